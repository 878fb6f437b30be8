"""Class prototypes, distances to them, and the prototypical loss.

Source: Snell, Swersky and Zemel 2017, "Prototypical Networks for Few-shot
Learning".
"""

from typing import NamedTuple

import tensorflow as tf

# The logit of a class that is not there: finite, so that no gradient is NaN,
# and so low that its probability is exactly zero.
_ABSENT = -1e30


class Prototypes(NamedTuple):
  """One point per class.

  Attributes:
    means: [C, D], zero for an absent class.
    present: [C], 1 where the class has a prototype and 0 where it has none.
  """

  means: tf.Tensor
  present: tf.Tensor


def prototypes(
    embeddings: tf.Tensor, y: tf.Tensor, mask: tf.Tensor, num_classes: int
) -> Prototypes:
  """The mean embedding of every class; gradients flow into the embeddings.

  Args:
    embeddings: [n, D].
    y: int32 [n]; labels outside 0..num_classes-1 count nowhere.
    mask: [n], 1 for an example and 0 for padding.
    num_classes: C.

  Returns:
    The prototypes, in the dtype of the embeddings.

  Source: Snell et al. 2017, eq. 1.
  """
  member = _member(embeddings, y, mask, num_classes)
  count = tf.reduce_sum(member, 0)
  total = tf.matmul(member, embeddings, transpose_a=True)
  return Prototypes(
      means=tf.math.divide_no_nan(total, count[:, tf.newaxis]),
      present=tf.cast(count > 0, embeddings.dtype),
  )


def squared_distances(e: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
  """`sum_j (e_ij - c_kj)^2` for all pairs.

  Expanded into a matrix product, after moving the origin to the mean of `c`:
  the distances do not depend on the origin and the rounding error does. The
  error is about 1e-7 times the squared spread of the points in float32.

  Args:
    e: [n, D].
    c: [k, D].

  Returns:
    [n, k], never negative.
  """
  origin = tf.stop_gradient(
      tf.math.divide_no_nan(
          tf.reduce_sum(c, 0), tf.cast(tf.shape(c)[0], c.dtype)
      )
  )
  e -= origin
  c -= origin
  product = tf.matmul(e, c, transpose_b=True)
  e_norm = tf.reduce_sum(e**2, -1)[:, tf.newaxis]
  c_norm = tf.reduce_sum(c**2, -1)[tf.newaxis]
  return tf.nn.relu(e_norm - 2.0 * product + c_norm)


def root(squared: tf.Tensor) -> tf.Tensor:
  """The square root, with a gradient of zero at zero (it is infinite there)."""
  positive = squared > 0
  return tf.where(positive, tf.sqrt(tf.where(positive, squared, 1.0)), 0.0)


def prototype_logits(
    e: tf.Tensor, prototypes: Prototypes, squared: bool = True
) -> tf.Tensor:
  """Minus the (squared) distance; absent classes get probability zero.

  Args:
    e: Embeddings, [n, D].
    prototypes: Of C classes.
    squared: Squared Euclidean distance; otherwise its root, with a gradient of
      zero where a point lies on its prototype.

  Returns:
    Logits, [n, C], finite.
  """
  # Absent classes, whatever they have, neither move the origin nor overflow.
  is_present = prototypes.present[:, tf.newaxis] > 0
  distances = squared_distances(e, tf.where(is_present, prototypes.means, 0.0))
  if not squared:
    distances = root(distances)
  return tf.where(prototypes.present > 0, -distances, _ABSENT)


def log_probabilities(
    squared_logits: tf.Tensor, *, squared: bool = True
) -> tf.Tensor:
  """Those of the softmax that `prototypical_loss` has.

  Args:
    squared_logits: Of the squared distances, [..., C].
    squared: Whether the loss has these; otherwise their roots.

  Returns:
    Natural logarithms in the same order; without any class all are alike.
  """
  logits = squared_logits if squared else -root(-squared_logits)
  return tf.nn.log_softmax(logits)


def prototypical_loss(
    e: tf.Tensor,
    y: tf.Tensor,
    mask: tf.Tensor,
    prototypes: Prototypes,
    exclude_true_class: bool = False,
    squared: bool = True,
) -> tf.Tensor:
  """Cross-entropy of the softmax over minus the (squared) distances.

  `mean_i [ d(e_i, c_{y_i}) + log sum_l exp(-d(e_i, c_l)) ]`, over the examples
  whose class has a prototype; 0 when there is none. With one class the loss and
  its gradient are zero.

  Args:
    e: Embeddings, [n, D].
    y: int32 [n].
    mask: [n], 1 for an example and 0 for padding.
    prototypes: Of C classes; gradients flow into them.
    exclude_true_class: Whether the sum over l leaves out the true class, as
      FRL's eq. 2 prints it. Examples for which no other class is left do not
      count then (the printed loss is minus infinity).
    squared: Squared Euclidean distance; otherwise its root.

  Returns:
    A scalar.

  Source: Snell et al. 2017, eq. 2; Park et al. 2021 (FRL), eq. 2.
  """
  member = _member(e, y, mask, tf.shape(prototypes.present)[0])
  logits = prototype_logits(e, prototypes, squared)
  counts = tf.linalg.matvec(member, prototypes.present)
  true_logit = tf.reduce_sum(member * logits, 1)
  if exclude_true_class:
    logits = tf.where(member > 0, tf.cast(_ABSENT, e.dtype), logits)
    counts *= tf.cast(tf.reduce_sum(prototypes.present) > 1, e.dtype)
  losses = tf.reduce_logsumexp(logits, 1) - true_logit
  losses = tf.where(counts > 0, losses, 0.0)
  return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.reduce_sum(counts))


def num_scored(y: tf.Tensor, mask: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
  """The number of examples that `prototypical_loss` can be wrong about.

  Args:
    y: int32 [n].
    mask: [n], 1 for an example and 0 for padding.
    present: [C], 1 where the class has a prototype.

  Returns:
    A scalar; of examples whose class has a prototype, and another class has
    one, too. The loss and its gradient are zero where it is 0.
  """
  member = _member(present, y, mask, tf.shape(present)[0])
  scored = tf.reduce_sum(tf.linalg.matvec(member, present))
  return tf.where(tf.reduce_sum(present) > 1, scored, 0.0)


def nearest_prototype(e: tf.Tensor, prototypes: Prototypes) -> tf.Tensor:
  """The class of the nearest present prototype.

  Args:
    e: Embeddings, [n, D].
    prototypes: Of C classes.

  Returns:
    int32 [n]; the smallest label among equals.
  """
  logits = prototype_logits(e, prototypes)
  return tf.argmax(logits, 1, output_type=tf.int32)


def mean_squared_distance(
    embeddings: tf.Tensor,
    y: tf.Tensor,
    mask: tf.Tensor,
    prototypes: Prototypes,
) -> tf.Tensor:
  """`mean_ij (e_ij - c_{y_i}j)^2`, over all examples and all D numbers.

  Args:
    embeddings: [n, D].
    y: int32 [n], labels 0..C-1.
    mask: [n], 1 for an example and 0 for padding.
    prototypes: Of C classes; examples of a class without one are at no
      distance.

  Returns:
    A scalar; 0 without examples.

  Source: Tan et al., AAAI 2022 (FedProto), the second term of the local loss.
  """
  distances = tf.reduce_mean(
      (embeddings - tf.gather(prototypes.means, y)) ** 2, axis=1
  )
  counted = mask * tf.gather(prototypes.present, y)
  return tf.math.divide_no_nan(
      tf.reduce_sum(counted * distances), tf.reduce_sum(mask)
  )


class PrototypeSums(NamedTuple):
  """What is summed over clients to average prototypes.

  Attributes:
    means: `lambda_k * means`, zero rows for absent classes; float `[C, D]`.
    class_weight: `lambda_k` where the client holds the class; float `[C]`.
    total_weight: `lambda_k`; float scalar, or `[C]` where each class has one.
  """

  means: tf.Tensor
  class_weight: tf.Tensor
  total_weight: tf.Tensor


def weigh_prototypes(
    prototypes: Prototypes, weight: tf.Tensor
) -> PrototypeSums:
  """Returns one client's summand, given its weight lambda_k.

  Args:
    prototypes: The client's, of C classes.
    weight: At least 0; a scalar, or one for every class, `[C]`.
  """
  held = weight * prototypes.present
  return PrototypeSums(held[:, tf.newaxis] * prototypes.means, held, weight)


def divide_prototypes(sums: PrototypeSums, over: str = 'holders') -> Prototypes:
  """The global prototypes from the summed `weigh_prototypes`.

    Gamma(c) = sum_{k holds c} lambda_k Gamma_k(c) / sum_{k holds c} lambda_k

  Args:
    sums: Sums over the clients.
    over: `'holders'` as above; `'all'` divides by the weight of all clients, so
      that a class held by few shrinks towards 0 (the literal Algorithm 1).

  Returns:
    Means `[C, D]`, zero rows for classes nobody holds, and present `[C]`, 0/1.
  """
  weight = sums.class_weight if over == 'holders' else sums.total_weight
  means = tf.math.divide_no_nan(
      sums.means,
      tf.broadcast_to(weight, tf.shape(sums.means)[:1])[:, tf.newaxis],
  )
  present = tf.cast(sums.class_weight > 0, sums.means.dtype)
  return Prototypes(means, present)


def newest(old: Prototypes, sums: PrototypeSums) -> Prototypes:
  """The prototypes of a round; of a class that nobody held, those of before.

  Args:
    old: Of the round before, of C classes.
    sums: As for `divide_prototypes`.

  Returns:
    Means `[C, D]` and present `[C]`, 0/1.
  """
  return or_before(divide_prototypes(sums), old)


def or_before(new: Prototypes, old: Prototypes) -> Prototypes:
  """Takes a round's prototypes, and the old one of each class that they lack.

  Args:
    new: Of the round: means `[C, D]` and present `[C]`, 0/1.
    old: Of the rounds before, of the same form.

  Returns:
    Means `[C, D]` and present `[C]`, 0/1.
  """
  return Prototypes(
      tf.where(new.present[:, tf.newaxis] > 0, new.means, old.means),
      tf.maximum(new.present, old.present),
  )


def _member(e, y, mask, num_classes):
  """[n, C]: the mask in the column of the label, zero elsewhere."""
  mask = tf.cast(mask, e.dtype)
  return tf.one_hot(y, num_classes, dtype=e.dtype) * mask[:, tf.newaxis]
