import numpy as np
import pytest
import tensorflow as tf

from tff_meta.losses import cross_entropy

LOGITS = np.random.default_rng(2).normal(size=(4, 3))
Y = np.array([2, 0, 1, 2])
MASK = np.array([1.0, 1.0, 0.0, 1.0])


def naive_cross_entropy(logits, y, mask):
  losses = []
  for row, label, real in zip(logits, y, mask, strict=True):
    if real:
      losses.append(np.log(np.sum(np.exp(row))) - row[label])
  return np.mean(losses)


def test_cross_entropy_against_the_oracle():
  actual = cross_entropy.softmax_cross_entropy(
      tf.constant(LOGITS), tf.constant(Y), tf.constant(MASK)
  )
  expected = naive_cross_entropy(LOGITS, Y, MASK)
  np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_gradient_is_prediction_minus_target():
  logits = tf.constant(LOGITS)
  with tf.GradientTape() as tape:
    tape.watch(logits)
    loss = cross_entropy.softmax_cross_entropy(logits, Y, MASK)
  p = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
  expected = (p - np.eye(3)[Y]) * MASK[:, np.newaxis] / 3
  np.testing.assert_allclose(tape.gradient(loss, logits), expected, atol=1e-12)


def test_first_and_second_derivatives_are_the_bits_of_tensorflow():
  def plain(logits):
    losses = -tf.reduce_sum(tf.one_hot(Y, 3) * tf.nn.log_softmax(logits), 1)
    mask = tf.cast(MASK, tf.float32)
    return cross_entropy.masked_mean(losses, mask)

  def derivatives(loss_fn):
    logits = tf.constant(LOGITS, tf.float32)
    with tf.GradientTape() as outer:
      outer.watch(logits)
      with tf.GradientTape() as inner:
        inner.watch(logits)
        loss = 3.0 * loss_fn(logits)
      gradient = inner.gradient(loss, logits)
      length = tf.reduce_sum(gradient**2)
    return loss, gradient, outer.gradient(length, logits)

  ours = derivatives(
      lambda logits: cross_entropy.softmax_cross_entropy(logits, Y, MASK)
  )
  for actual, expected in zip(ours, derivatives(plain), strict=True):
    np.testing.assert_array_equal(actual, expected)


def test_no_examples_have_no_loss():
  nothing = cross_entropy.softmax_cross_entropy(
      tf.zeros([0, 3]), tf.zeros([0], tf.int32), tf.zeros([0])
  )
  assert nothing.numpy() == 0
  padding = cross_entropy.softmax_cross_entropy(
      tf.constant(LOGITS), tf.constant(Y), tf.zeros([4])
  )
  assert padding.numpy() == 0


@pytest.mark.parametrize('size, expected', [(0, 2.2), (2, 7 / 3), (9, 2.2)])
def test_a_short_minibatch_counts_like_the_others(size, expected):
  """Losses 1, 3, 1, 3, 3: means of 2, 2 and 3 in minibatches of 2."""
  # Logits (0, z) with label 0 cost log(1 + e^z).
  z = np.log(np.expm1(np.array([1.0, 3, 1, 3, 3])))
  logits = tf.constant(np.stack([np.zeros(5), z], 1))
  loss = cross_entropy.mean_over_minibatches(
      logits, tf.zeros(5, tf.int32), tf.ones(5), size
  )
  np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_minibatches_of_no_examples_and_padding_without_minibatches():
  none = cross_entropy.mean_over_minibatches(
      tf.zeros([0, 3]), tf.zeros([0], tf.int32), tf.zeros([0]), 2
  )
  assert float(none) == 0
  actual = cross_entropy.mean_over_minibatches(
      tf.constant(LOGITS), tf.constant(Y), tf.constant(MASK), 0
  )
  expected = naive_cross_entropy(LOGITS, Y, MASK)
  np.testing.assert_allclose(actual, expected, rtol=1e-12)
