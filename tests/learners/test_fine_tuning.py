"""Fine-tuning, against steps written out by hand."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import configurations
from tff_meta import episodes
from tff_meta.learners import cyclic_batches
from tff_meta.learners import fine_tuning
from tff_meta.losses import cross_entropy

SEED = tf.constant([3, 7])
SETTINGS = fine_tuning.FineTuning(
    num_steps=12, learning_rate=0.3, batch_size=2, decay=0.5, decay_steps=5
)
EXAMPLES = episodes.Examples(
    tf.constant([[1.0], [9.0], [2.0], [4.0], [-3.0], [6.0]]),
    tf.zeros([6], tf.int32),
    tf.constant([1.0, 0, 1, 1, 1, 1]),
)
QUERY = episodes.Examples(
    tf.constant([[0.0], [1.0], [2.0]]), tf.zeros([3], tf.int32), tf.ones([3])
)


def loss(w, batch):
  return cross_entropy.masked_mean(0.5 * (w - batch.x[:, 0]) ** 2, batch.mask)


def predict(w, batch):
  """Labels that tell the weights to a thousandth."""
  return tf.cast(tf.round(1000 * (w + batch.x[:, 0])), tf.int32)


def build(settings=SETTINGS, **kwargs):
  return fine_tuning.build_client_personalizer(
      settings, (1,), loss, kwargs.pop('predict', predict), **kwargs
  )


def by_hand(num_steps, rates):
  """`w <- w - rate * (w - mean of the batch)` from 0, and all on the way."""
  dense = episodes.drop_padding(EXAMPLES)
  rows = cyclic_batches.cyclic_minibatches(5, 2, num_steps, SEED).indices
  w, path, means = 0.0, [0.0], [None]
  for row, rate in zip(rows.numpy(), rates, strict=True):
    means.append(dense.x.numpy()[row].mean())
    w = w - rate * (w - means[-1])
    path.append(w)
  return path, means


RATES = [0.3] * 5 + [0.15] * 5 + [0.075] * 2


def test_steps_and_curve_by_hand():
  use = build()
  path, _ = by_hand(12, RATES)
  weights = tf.constant(0.0)
  adapted = tf.function(use.adapt, autograph=False)(weights, (), EXAMPLES, SEED)
  np.testing.assert_allclose(adapted, path[-1], rtol=1e-6)
  curve = tf.function(use.curve, autograph=False)(
      weights, (), EXAMPLES, QUERY, SEED
  )
  assert curve.shape == (13, 3)
  expected = 1000 * (np.array(path)[:, np.newaxis] + QUERY.x.numpy()[:, 0])
  np.testing.assert_allclose(curve, expected, atol=0.6)
  np.testing.assert_array_equal(use.predict(adapted, QUERY), curve[-1])
  np.testing.assert_array_equal(
      use.predict(use.start(weights, ()), QUERY), curve[0]
  )


def test_the_published_schedule():
  """50 steps, 51 points, and 0.8 times the rate every 5 steps."""
  config = configurations.FineTuned(
      batch_size=2,
      fine_tuning_steps=50,
      fine_tuning_learning_rate=0.05,
      fine_tuning_decay=0.8,
      fine_tuning_decay_steps=5,
  )
  settings = config.fine_tuning()
  rates = [0.05 * 0.8 ** (s // 5) for s in range(50)]
  actual = [settings.rate(tf.constant(s)).numpy() for s in range(50)]
  np.testing.assert_allclose(actual, rates, rtol=1e-5)
  path, _ = by_hand(50, rates)
  use = build(settings)
  curve = use.curve(tf.constant(0.0), (), EXAMPLES, QUERY, SEED)
  assert curve.shape == (51, 3)
  np.testing.assert_allclose(curve[:, 0], 1000 * np.array(path), atol=0.6)


@pytest.mark.parametrize('context_is_all', [False, True])
def test_what_is_adapted_to_sees_the_last_batch_or_all(context_is_all):
  """Point s has the batch of step s - 1 or all, and point 0 no examples."""

  def to_adapted(w, batch):
    return w, tf.reduce_sum(batch.x), tf.size(batch.y)

  def tell(adapted, batch):
    _, total, num = adapted
    total = tf.cast(total, tf.int32) + 100 * num
    return tf.fill(tf.shape(batch.y), total)

  use = build(
      to_adapted=to_adapted, predict=tell, context_is_all=context_is_all
  )
  _, means = by_hand(12, RATES)
  told = [510] * 12 if context_is_all else [200 + 2 * m for m in means[1:]]
  curve = use.curve(tf.constant(0.0), (), EXAMPLES, QUERY, SEED)
  assert curve[:, 0].numpy().tolist() == [0] + told
  adapted = use.adapt(tf.constant(0.0), (), EXAMPLES, SEED)
  np.testing.assert_array_equal(use.predict(adapted, QUERY), curve[-1])
  assert use.start(tf.constant(0.0), ())[2] == 0


@pytest.mark.parametrize('num_steps', [0, 3])
def test_without_examples_or_steps_nothing_changes(num_steps):
  settings = fine_tuning.FineTuning(num_steps, 0.3, batch_size=2)
  use = build(settings)
  examples = EXAMPLES
  if num_steps:
    examples = EXAMPLES._replace(mask=tf.zeros([6]))
  assert use.adapt(tf.constant(2.0), (), examples, SEED) == 2.0
  curve = use.curve(tf.constant(2.0), (), examples, QUERY, SEED).numpy()
  assert curve.tolist() == [[2000, 3000, 4000]] * (num_steps + 1)


def test_rates_do_not_fall_unless_asked():
  settings = fine_tuning.FineTuning(3, 0.25, batch_size=2)
  assert [settings.rate(tf.constant(s)).numpy() for s in (0, 99)] == [0.25] * 2
