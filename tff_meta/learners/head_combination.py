"""Heads of other clients, combined into the one that promises least error.

A head is weighed by statistics of its client's embeddings alone: how far its
classes lie from those of the client that asks (bias), and how surely they are
known (variance).

Source: Jian Xu, Xinyi Tong and Shao-Lun Huang, "Personalized Federated Learning
with Feature Alignment and Classifier Collaboration", ICLR 2023,
https://arxiv.org/abs/2306.11867, and the authors' code.
"""

from typing import Any, NamedTuple

import tensorflow as tf

_STEPS = 400  # Within 1e-3 of all weights in what was tried, mostly nearer.
_SMALLEST = 1e-3  # A weight below it is none, as in the authors' code.


class Statistics(NamedTuple):
  """What the weight of a client's head depends on.

  Attributes:
    features: h, `[..., C, D]`: of every class its share of the client's
      examples times the mean of their embeddings.
    variance: V, `[...]`: the variance of the sum of these, given the number of
      examples.
  """

  features: tf.Tensor
  variance: tf.Tensor


class Heads(NamedTuple):
  """Heads and what their weights depend on, in S slots.

  Attributes:
    head: A structure with a leading axis of slots.
    statistics: `Statistics` with a leading axis of slots.
    number: `[S]`, the clients whose mean stands there.
  """

  head: Any
  statistics: Statistics
  number: tf.Tensor


def statistics(
    embeddings: tf.Tensor, y: tf.Tensor, num_classes: int
) -> Statistics:
  """Those of a client's examples.

    h_c = sum_{i of class c} e_i / n,
    V = (sum_i |e_i|^2 / n - sum_c |h_c|^2) / n

  Args:
    embeddings: e, `[n, D]`.
    y: int32 `[n]`, labels 0..C-1.
    num_classes: C.

  Returns:
    The statistics; zeros without examples.
  """
  num = tf.cast(tf.size(y), embeddings.dtype)
  member = tf.one_hot(y, num_classes, dtype=embeddings.dtype)
  features = tf.math.divide_no_nan(
      tf.matmul(member, embeddings, transpose_a=True), num
  )
  square = tf.math.divide_no_nan(tf.reduce_sum(embeddings**2), num)
  spread = tf.nn.relu(square - tf.reduce_sum(features**2))
  return Statistics(features, tf.math.divide_no_nan(spread, num))


def combination(
    own_features: tf.Tensor, candidates: Statistics, present: tf.Tensor
) -> tf.Tensor:
  """The weights of the heads that promise a client the least error.

    minimise sum_j w_j^2 V_j + |sum_j w_j (h - h_j)|^2
    over w_j >= 0 that add up to one

  By accelerated projected gradient steps, which begin anew where they would go
  back. Weights below 0.001 become 0, as in the authors' code.

  Args:
    own_features: h, `[C, D]`.
    candidates: Of J heads.
    present: `[J]`, above 0 for a head that is there; at least one. What stands
      in the place of another is not read.

  Returns:
    `[J]`, weights.

  Source: Xu et al. 2023, the problem of the optimal weights.
  """
  is_there = present > 0
  bias = tf.reshape(own_features - candidates.features, [tf.size(present), -1])
  bias = tf.where(is_there[:, tf.newaxis], bias, 0.0)
  # Noise makes a variance negative at times.
  variance = tf.where(is_there, tf.nn.relu(candidates.variance), 0.0)
  error = tf.linalg.diag(variance) + tf.matmul(bias, bias, transpose_b=True)
  # No eigenvalue is larger.
  largest = tf.reduce_max(tf.reduce_sum(tf.abs(error), axis=1))
  error = tf.math.divide_no_nan(error, largest)
  uniform = tf.cast(is_there, error.dtype)
  uniform /= tf.reduce_sum(uniform)

  def step(i, since, weights, ahead):
    moved = _on_simplex(ahead - tf.linalg.matvec(error, ahead), is_there)
    goes_back = tf.reduce_sum((ahead - moved) * (moved - weights)) > 0
    since = tf.where(goes_back, 0.0, since + 1.0)
    momentum = since / (since + 3.0)
    return i + 1, since, moved, moved + momentum * (moved - weights)

  _, _, weights, _ = tf.while_loop(
      lambda i, *_: i < _STEPS, step, (0, 0.0, uniform, uniform)
  )
  least = tf.minimum(_SMALLEST, tf.reduce_max(weights))
  weights = tf.where(weights >= least, weights, 0.0)
  return weights / tf.reduce_sum(weights)


def _on_simplex(point, is_there):
  """The nearest weights that add up to one, 0 for what is not there."""
  point = tf.where(is_there, point, -1e30)
  falling = tf.sort(point, direction='DESCENDING')
  number = tf.cast(tf.range(1, tf.size(point) + 1), point.dtype)
  return tf.nn.relu(point - tf.reduce_max((tf.cumsum(falling) - 1.0) / number))


def means(sums: Heads) -> Heads:
  """The means of the clients in a slot, with the variance of such a mean.

  Args:
    sums: Of what the clients of each slot sent, V too.

  Returns:
    Heads like it; zeros in a slot without clients.
  """

  def divided(total, by):
    by = tf.reshape(by, [-1] + [1] * (total.shape.rank - 1))
    return tf.math.divide_no_nan(total, by)

  number = sums.number
  return Heads(
      tf.nest.map_structure(lambda leaf: divided(leaf, number), sums.head),
      Statistics(
          divided(sums.statistics.features, number),
          divided(sums.statistics.variance, number**2),
      ),
      number,
  )
