"""A new client takes the memory of the least score."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.learners import memory_bank


@pytest.mark.parametrize(
    'scores, best',
    [
        ([3.0, 1.0, 2.0], 1),
        ([2.0, 1.0, 1.0], 1),  # Of equals the first.
        ([np.nan, 5.0, np.inf], 1),
        ([-np.inf, 7.0, 6.0], 2),
        ([np.nan, np.nan, np.nan], 0),
    ],
)
def test_the_least_score_is_taken(scores, best):
  def adapt(weights, value, examples, seed):
    adapted = weights + value['id'] + examples + seed
    return adapted, value['score']

  use = memory_bank.build_client_personalizer(adapt, lambda *_: None)
  bank = {'id': tf.constant([0.0, 1.0, 2.0]), 'score': tf.constant(scores)}
  adapted = tf.function(use.adapt, autograph=False)(
      tf.constant(10.0), bank, tf.constant(100.0), tf.constant(1000.0)
  )
  assert float(adapted) == 1110 + best
  assert use.uses_bank and use.start is None
