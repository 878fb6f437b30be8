"""Triplet loss anchored at class centroids, with a federated margin.

A centroid is the prototype (`prototypical.prototypes`) of all examples of a
class, support and query.

Source: MetaVers, eqs. 3 and 4.
"""

from typing import Literal

import tensorflow as tf

from tff_meta.losses import prototypical


def local_margin(
    centroids: prototypical.Prototypes,
    normalizer: Literal['pairs', 'printed'] = 'pairs',
) -> tf.Tensor:
  """The mean Euclidean distance between two different centroids.

      pairs:    m = 1 / (N (N - 1)) * sum_k sum_{l != k} ||a_k - a_l||
      printed:  m = 1 / (N - 1)^2   * sum_k sum_{l != k} ||a_k - a_l||

  The latter, against the paper's own text and its code, is no mean: it is twice
  the distance for two classes.

  Args:
    centroids: Of C classes, N of them present.
    normalizer: What the sum is divided by.

  Returns:
    A scalar; 0 for N < 2, where the margin is undefined.

  Raises:
    ValueError: The normalizer is not known.

  Source: MetaVers, eq. 3.
  """
  _check_choice('normalizer', normalizer, ('pairs', 'printed'))
  means, present = centroids
  pair = present[:, tf.newaxis] * present
  pair = tf.linalg.set_diag(pair, tf.zeros_like(present))
  distances = prototypical.root(prototypical.squared_distances(means, means))
  # `where` and not a product alone: no gradient through the diagonal's noise.
  distances = tf.where(pair > 0, distances, 0.0)
  num_others = tf.reduce_sum(present) - 1
  divisor = tf.reduce_sum(pair) if normalizer == 'pairs' else num_others**2
  return tf.math.divide_no_nan(tf.reduce_sum(distances), divisor)


def effective_margin(
    global_margin: tf.Tensor, margin: tf.Tensor, stop_gradient: bool
) -> tf.Tensor:
  """`max(global_margin, margin)`, the margin the triplet loss asks for.

  Args:
    global_margin: Scalar, from the server.
    margin: Scalar, the client's own (`local_margin`).
    stop_gradient: Whether the margin is a constant of the loss. Otherwise the
      loss pulls the client's centroids together where its own margin is larger.

  Returns:
    A scalar.
  """
  margin = tf.maximum(margin, tf.cast(global_margin, margin.dtype))
  return tf.stop_gradient(margin) if stop_gradient else margin


def triplet_loss(
    e: tf.Tensor,
    y: tf.Tensor,
    mask: tf.Tensor,
    centroids: prototypical.Prototypes,
    margin: tf.Tensor,
    variant: Literal['eq4', 'release'],
    reduction: Literal['mean', 'sum'] = 'mean',
) -> tf.Tensor:
  """The mean over classes, positives p and negatives n of the triplet term.

      eq4:      max(||a_k - e_p|| - ||e_p - e_n|| + margin, 0)
      release:  max(||a_k - e_p||^2 - ||a_k - e_n||^2 + margin, 0)

  for all examples p of class k and n of the other classes: first the mean over
  n, then over p, then over the classes that are present; or the sum over all.

  Args:
    e: Embeddings of support and query, [n, D].
    y: int32 [n], labels in 0..C-1.
    mask: [n], 1 for an example and 0 for padding.
    centroids: Of C classes, made of these embeddings.
    margin: Scalar (`effective_margin`).
    variant: As printed, or as released.
    reduction: The mean, as released, or the sum over all triples, as printed.

  Returns:
    A scalar; 0 with fewer than two classes.

  Raises:
    ValueError: The variant or the reduction is not known.

  Source: MetaVers, eq. 4, and its code.
  """
  _check_choice('variant', variant, ('eq4', 'release'))
  _check_choice('reduction', reduction, ('mean', 'sum'))
  positive = tf.reduce_sum((e - tf.gather(centroids.means, y)) ** 2, 1)
  if variant == 'eq4':
    positive = prototypical.root(positive)
    negative = prototypical.root(prototypical.squared_distances(e, e))
  else:
    to_anchor = prototypical.squared_distances(centroids.means, e)
    negative = tf.gather(to_anchor, y)  # Row p: from p's centroid to all n.
  mask = tf.cast(mask, e.dtype)
  differs = tf.cast(tf.not_equal(y[:, tf.newaxis], y), e.dtype)
  pair = mask[:, tf.newaxis] * mask * differs  # [p, n].
  triplets = tf.nn.relu(positive[:, tf.newaxis] - negative + margin)
  triplets = tf.where(pair > 0, triplets, 0.0)
  if reduction == 'sum':
    return tf.reduce_sum(triplets)
  per_positive = tf.math.divide_no_nan(
      tf.reduce_sum(triplets, 1), tf.reduce_sum(pair, 1)
  )
  # The mean of `per_positive` over a class is its one-dimensional prototype.
  num_classes = tf.shape(centroids.present)[0]
  per_class = prototypical.prototypes(
      per_positive[:, tf.newaxis], y, mask, num_classes
  )
  return tf.math.divide_no_nan(
      tf.reduce_sum(per_class.means), tf.reduce_sum(per_class.present)
  )


def _check_choice(name, value, choices):
  if value not in choices:
    raise ValueError(
        f'Expected `{name}` to be {choices[0]!r} or {choices[1]!r}, found'
        f' {value!r}.'
    )
