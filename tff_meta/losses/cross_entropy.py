"""Softmax cross-entropy with padding."""

import tensorflow as tf


def softmax_cross_entropy(
    logits: tf.Tensor, y: tf.Tensor, mask: tf.Tensor
) -> tf.Tensor:
  """`mean_i -log softmax(logits_i)[y_i]` over the examples; 0 without any.

  Args:
    logits: [n, C].
    y: int32 [n], labels in 0..C-1.
    mask: [n], 1 for an example and 0 for padding.

  Returns:
    A scalar in the dtype of the logits, in nats.
  """
  target = tf.one_hot(y, tf.shape(logits)[1], dtype=logits.dtype)
  losses = -tf.reduce_sum(target * tf.nn.log_softmax(logits), 1)
  return masked_mean(losses, mask)


def masked_mean(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
  """The mean of `values` [n] where `mask` [n] is 1; 0 when it is nowhere."""
  mask = tf.cast(mask, values.dtype)
  return tf.math.divide_no_nan(
      tf.reduce_sum(values * mask), tf.reduce_sum(mask)
  )
