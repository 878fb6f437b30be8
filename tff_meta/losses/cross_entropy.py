"""Softmax cross-entropy with padding."""

import tensorflow as tf


def softmax_cross_entropy(
    logits: tf.Tensor, y: tf.Tensor, mask: tf.Tensor
) -> tf.Tensor:
  """`mean_i -log softmax(logits_i)[y_i]` over the examples; 0 without any.

  Args:
    logits: [n, C].
    y: int32 [n], labels in 0..C-1.
    mask: [n], 1 for an example and 0 for padding; no gradient reaches it.

  Returns:
    A scalar in the dtype of the logits, in nats.
  """
  num_classes = logits.shape[1] or tf.shape(logits)[1]
  target = tf.one_hot(y, num_classes, dtype=logits.dtype)
  mask = tf.cast(mask, logits.dtype)
  num_examples = tf.reduce_sum(mask)

  @tf.custom_gradient
  def mean_loss(logits):
    log_softmax = tf.nn.log_softmax(logits)
    losses = -tf.reduce_sum(target * log_softmax, 1)
    mean = tf.math.divide_no_nan(tf.reduce_sum(losses * mask), num_examples)

    # TensorFlow's own gradient has the same factors in the same order, and 20
    # operations instead of 8: a small network's step has less than 100.
    # (Second derivatives differ in rounding where they are of a function of the
    # gradient and the loss together, as no algorithm here has.)
    def gradient(dy):
      d_losses = -tf.math.divide_no_nan(dy, num_examples) * mask
      total = tf.expand_dims(d_losses, 1)
      return total * target - tf.exp(log_softmax) * total

    return mean, gradient

  return mean_loss(logits)


def mean_over_minibatches(
    logits: tf.Tensor, y: tf.Tensor, mask: tf.Tensor, batch_size: int
) -> tf.Tensor:
  """The mean over minibatches of each one's mean cross-entropy.

  Args:
    logits: [n, C], in the order of the minibatches.
    y: int32 [n], labels in 0..C-1.
    mask: [n], 1 for an example and 0 for padding; all ones with a `batch_size`.
    batch_size: Examples of a minibatch, of which the last may be short, so that
      its examples count for more each; 0 is the plain mean over all examples.

  Returns:
    A scalar in the dtype of the logits, in nats; 0 without examples.
  """
  if batch_size:
    count = tf.size(y)
    start = tf.range(count) // batch_size * batch_size
    mask = 1 / tf.cast(tf.minimum(batch_size, count - start), tf.float32)
  return softmax_cross_entropy(logits, y, mask)


def masked_mean(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
  """The mean of `values` [n] where `mask` [n] is 1; 0 when it is nowhere."""
  mask = tf.cast(mask, values.dtype)
  return tf.math.divide_no_nan(
      tf.reduce_sum(values * mask), tf.reduce_sum(mask)
  )
