"""A client that training never saw tries what the known clients have kept."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_meta.learners import personalizer


def build_client_personalizer(
    adapt: Callable[..., tuple[Any, tf.Tensor]],
    predict: Callable[..., tf.Tensor],
) -> personalizer.ClientPersonalizer:
  """A new client adapts with the stored memory that fits it best.

  It adapts with every one and takes that of the least score, of equals the
  first; one whose score is not finite comes last. No example that it is tested
  on takes part.

  Args:
    adapt: `(weights, value, examples, seed) -> (adapted, score)`, with `value`
      what a known client has kept and `score` a float32 scalar.
    predict: `(adapted, query) -> labels`.

  Returns:
    A `ClientPersonalizer` that uses the bank.

  Source: Nguyen et al. 2022, FedMeta-Per, and its released code.
  """

  def adapt_best(weights, bank, examples, seed):
    scores = tf.map_fn(
        lambda value: adapt(weights, value, examples, seed)[1],
        bank,
        fn_output_signature=tf.float32,
    )
    scores = tf.where(tf.math.is_finite(scores), scores, scores.dtype.max)
    # Not tf.argmin, which promises nothing about ties.
    best = tf.where(tf.equal(scores, tf.reduce_min(scores)))[0, 0]
    value = tf.nest.map_structure(lambda leaf: leaf[best], bank)
    return adapt(weights, value, examples, seed)[0]

  return personalizer.ClientPersonalizer(
      None, adapt_best, predict, uses_bank=True
  )
