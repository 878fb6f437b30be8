"""Arithmetic on structures of weights (anything `tf.nest` takes apart)."""

import tensorflow as tf

_SMALL = 2.0**-64  # Times the largest number, summed 2**64 times, is finite.


def add(a, b):
  """`a + b`, leaf by leaf."""
  return tf.nest.map_structure(tf.add, a, b)


def subtract(a, b):
  """`a - b`, leaf by leaf."""
  return tf.nest.map_structure(tf.subtract, a, b)


def scale(a, factor):
  """`factor * a`; `factor` is a scalar and is cast to the dtype of a leaf."""
  return tf.nest.map_structure(
      lambda leaf: tf.cast(factor, leaf.dtype) * leaf, a
  )


def add_decay(gradients, weights, decay):
  """`gradients + decay * weights`, leaf by leaf.

  Written as a difference, which is the same to the last bit: with momentum's
  addition TensorFlow would otherwise make one sum of three terms, whose order
  depends on which thread is faster (see `execution.sums`). A decay of 0 takes
  no operations, which are a tenth of a small network's step.
  """
  if not decay:
    return gradients
  return subtract(gradients, scale(weights, -decay))


def zeros_like(a):
  """Zeros with the shapes and dtypes of `a`."""
  return tf.nest.map_structure(tf.zeros_like, a)


def squared_norm(a):
  """The sum of the squares of all entries, a scalar; 0.0 without leaves."""
  return sum((tf.reduce_sum(leaf**2) for leaf in tf.nest.flatten(a)), 0.0)


def clip_by_global_norm(a, norm):
  """Scales `a` down to a joint norm; what is shorter stays as it is.

  Args:
    a: A structure of float tensors, at least one.
    norm: The joint norm, above 0.

  Returns:
    The structure; NaN throughout if the norm of `a` is infinite or NaN.
  """
  clipped, _ = tf.clip_by_global_norm(tf.nest.flatten(a), norm)
  return tf.nest.pack_sequence_as(a, clipped)


def all_finite(a):
  """Whether no entry is NaN or infinite, a boolean scalar.

  An entry that is not makes a sum that is not, and the sum of numbers that are
  scaled down is finite. TensorFlow's `reduce_all` takes several times as long.
  """
  finite = [
      tf.math.is_finite(tf.reduce_sum(x * _SMALL))
      for x in tf.nest.flatten(a)
      if x.dtype.is_floating  # Others always are.
  ]
  return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)


def where_finite_or_zero(a):
  """All of `a` where every entry is finite, otherwise zeros throughout.

  Args:
    a: A structure of tensors of numbers.

  Returns:
    The structure, and a boolean scalar that says whether it is `a`.
  """
  finite = all_finite(a)
  kept = tf.nest.map_structure(
      # `tf.where` would broadcast the scalar, which takes longer.
      lambda leaf: tf.raw_ops.Select(
          condition=finite, x=leaf, y=tf.zeros_like(leaf)
      ),
      a,
  )
  return kept, finite
