"""A mean that a minority of clients cannot move far."""

import math

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import weights as weights_lib
from tff_meta.aggregators import bounds


class CenteredClippingFactory(tff.aggregators.WeightedAggregationFactory):
  """The mean of the clients' differences to the last result, each cut short.

      v <- v + 1/n sum_k (x_k - v) min(1, radius / ||x_k - v||)

  over the n clients of a weight above 0, which count alike; v is zero at first
  and is the result. Where nobody counts v stays, and the result is NaN.
  Whatever a client sends, it moves v by radius / n at most. The differences are
  to the last result, not to zero, so that a client that sends what all others
  do is not cut.

  Source: Sai Praneeth Karimireddy, Lie He and Martin Jaggi, "Learning from
  History for Byzantine Robust Optimization", ICML 2021,
  https://arxiv.org/abs/2012.10333, Algorithm 2 with one iteration. Clients'
  updates are used as they are, without momentum of the clients.
  """

  def __init__(self, radius: float):
    """Initializes the factory.

    Args:
      radius: tau, the longest difference that counts in full, above 0.
    """
    self._radius = radius

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process for values and weights of these types."""
    radius = self._radius

    @tff.tensorflow.computation
    def zeros():
      return bounds.zeros_of(value_type)

    @tff.tensorflow.computation(value_type, weight_type, value_type)
    def cut(value, weight, center):
      difference, _ = bounds.shorten_vector(
          weights_lib.subtract(value, center), radius
      )
      counts = tf.cast(weight > 0, weight.dtype)
      return weights_lib.scale(difference, counts), counts

    summand_type = cut.type_signature.result

    @tff.tensorflow.computation(value_type, summand_type)
    def move(center, total):
      differences, count = total
      step = tf.math.divide_no_nan(radius, count)
      return weights_lib.add(center, weights_lib.scale(differences, step))

    @tff.tensorflow.computation(value_type, summand_type)
    def result(moved, total):
      _, count = total
      # Of nobody there is no mean; TFF's finalizers leave it out.
      nobody = tf.where(count > 0, 0.0, math.nan)
      return tf.nest.map_structure(
          lambda leaf: leaf + tf.cast(nobody, leaf.dtype), moved
      )

    @tff.federated_computation
    def init_fn():
      return tff.federated_eval(zeros, tff.SERVER)

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(center, value, weight):
      summands = tff.federated_map(
          cut, (value, weight, tff.federated_broadcast(center))
      )
      total = tff.federated_sum(summands)
      moved = tff.federated_map(move, (center, total))
      return tff.templates.MeasuredProcessOutput(
          moved,
          tff.federated_map(result, (moved, total)),
          tff.federated_value((), tff.SERVER),
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)
