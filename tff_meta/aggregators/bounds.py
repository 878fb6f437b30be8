"""Sums of what clients send, of which each adds a bounded part.

Secure sums, noise and robustness all need to know how much one client can add.
A `Bound` says how what a client sends is made smaller, and what the server does
with the sum of the smaller parts to have the sum of what was sent again.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import weights as weights_lib


class Limits(NamedTuple):
  """How much a client can add.

  Attributes:
    size: The longest vector, or the largest number, above 0.
    weight: The most that a client counts for, above 0; None where all clients
      that count at all count 1.
  """

  size: float
  weight: float | None = None


class Bound(NamedTuple):
  """How what one client adds to a sum is bounded.

  Attributes:
    shorten: `(value, Limits) -> (value, is_cut)`. The value is of the same
      structure, its numbers are finite and in [-1, 1], and its norm is 1 at
      most unless it has several vectors; the boolean says whether what was sent
      was beyond the limits.
    restore: `(sum, Limits, noise) -> sum` on the server, undoes the scale of
      `shorten`. `noise` is the standard deviation of the noise in every number
      of the sum, a float, 0 without noise.
  """

  shorten: Callable[[Any, Limits], tuple[Any, tf.Tensor]]
  restore: Callable[[Any, Limits, float], Any]


def shorten_vector(value: Any, size: float) -> tuple[Any, tf.Tensor]:
  """Returns a structure over `size`, of norm 1 at most, and whether it is cut.

  Args:
    value: A structure of finite float tensors.
    size: The longest that stays as it is, above 0.
  """
  # Its numbers are cut first, so that the norm is finite.
  scaled = tf.nest.map_structure(
      lambda leaf: tf.clip_by_value(leaf / size, -2.0, 2.0), value
  )
  norm = tf.sqrt(weights_lib.squared_norm(scaled))
  shortened = weights_lib.scale(scaled, 1 / tf.maximum(norm, 1.0))
  return shortened, norm > 1.0


# All that a client sends is one vector.
VECTOR = Bound(
    lambda value, limits: shorten_vector(value, limits.size),
    lambda total, limits, noise: weights_lib.scale(total, limits.size),
)


class BoundedSumFactory(tff.aggregators.UnweightedAggregationFactory):
  """Sums what clients send, each part bounded.

  A part with a number that is not finite counts as zeros, and as cut. The state
  is that of the inner sum. The measurements are its own, as `sum`, and
  `num_cut_clients`, of which a part was beyond the limits, if they are
  counted.
  """

  def __init__(
      self,
      bound: Bound,
      limits: Limits,
      inner: tff.aggregators.UnweightedAggregationFactory,
      *,
      noise: float = 0.0,
      count: tff.aggregators.UnweightedAggregationFactory | None = None,
  ):
    """Initializes the factory.

    Args:
      bound: What is done to what clients send.
      limits: How much they can add.
      inner: Sums the shortened parts: values in [-1, 1].
      noise: Standard deviation of the noise that `inner` adds to every number.
      count: Sums int32 0 and 1, without a state; None not to count who is cut.
    """
    self._bound = bound
    self._limits = limits
    self._inner = inner
    self._noise = noise
    self._count = count

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the process for values of that type."""
    bound, limits, noise = self._bound, self._limits, self._noise
    process = self._inner.create(value_type)
    count = self._count and self._count.create(tff.TensorType(np.int32))

    @tff.tensorflow.computation(value_type)
    def shorten(value):
      # What is no number would be in the sum of all clients; without the rest
      # of its part a weight would count for nothing.
      numbers, is_finite = weights_lib.where_finite_or_zero(value)
      shortened, is_cut = bound.shorten(numbers, limits)
      return shortened, tf.cast(is_cut | ~is_finite, tf.int32)

    @tff.tensorflow.computation(value_type)
    def restore(total):
      return bound.restore(total, limits, noise)

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      shortened, is_cut = tff.federated_map(shorten, value)
      output = process.next(state, shortened)
      measurements = collections.OrderedDict(sum=output.measurements)
      if count is not None:
        nothing = tff.federated_value((), tff.SERVER)
        cut = count.next(nothing, is_cut).result
        measurements['num_cut_clients'] = cut
      return tff.templates.MeasuredProcessOutput(
          output.state,
          tff.federated_map(restore, output.result),
          tff.federated_zip(measurements),
      )

    return tff.templates.AggregationProcess(process.initialize, next_fn)


class _ChangedUpdatesFactory(tff.aggregators.WeightedAggregationFactory):
  """Aggregates what `_change` makes of every client's value and weight."""

  def __init__(self, inner: tff.aggregators.WeightedAggregationFactory):
    """Initializes the factory.

    Args:
      inner: Aggregates the values and weights that are left.
    """
    self._inner = inner

  def _change(self, value, weight):
    """Returns another value and weight of a client, of the same types."""
    raise NotImplementedError

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process for values and weights of these types."""
    process = self._inner.create(value_type, weight_type)

    @tff.tensorflow.computation(value_type, weight_type)
    def change(value, weight):
      return self._change(value, weight)

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      changed = tff.federated_map(change, (value, weight))
      return process.next(state, changed[0], changed[1])

    return tff.templates.AggregationProcess(process.initialize, next_fn)


class FiniteUpdatesFactory(_ChangedUpdatesFactory):
  """Clients that send a number that is not finite count as those of weight 0.

  They send zeros. Sums and states would hold NaN for ever otherwise.
  """

  def _change(self, value, weight):
    leaves = [tf.cast(weight, tf.float32), *tf.nest.flatten(value)]
    is_finite = tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(leaf)) for leaf in leaves]
    )
    return tf.nest.map_structure(
        lambda leaf: tf.where(is_finite, leaf, tf.zeros_like(leaf)),
        (value, weight),
    )


class AlikeFactory(_ChangedUpdatesFactory):
  """Clients that count at all count 1; the others send zeros."""

  def _change(self, value, weight):
    counts = weight > 0
    value = tf.nest.map_structure(
        lambda leaf: tf.where(counts, leaf, tf.zeros_like(leaf)), value
    )
    return value, tf.cast(counts, weight.dtype)


class LimitedWeightsFactory(_ChangedUpdatesFactory):
  """A weighted mean in which clients count for a limited weight.

  Whoever has a larger weight sends a smaller value in its place, so that both
  multiply to what the limit does. The weight is left as it is: what sums the
  weights cuts it at the same limit, and counts who was beyond. Clients of
  weight 0 send zeros.
  """

  def __init__(
      self, inner: tff.aggregators.WeightedAggregationFactory, most: float
  ):
    """Initializes the factory.

    Args:
      inner: A mean whose sum of weights cuts every weight at `most`.
      most: The largest weight, above 0.
    """
    super().__init__(inner)
    self._most = most

  def _change(self, value, weight):
    most = tf.constant(self._most, weight.dtype)
    # 1 to the last bit for weights within the limit.
    share = tf.math.divide_no_nan(tf.minimum(weight, most), weight)

    def limited(leaf):
      part = tf.cast(share, leaf.dtype) * leaf
      return tf.where(share > 0, part, tf.zeros_like(leaf))

    return tf.nest.map_structure(limited, value), weight


class DividedSumFactory(tff.aggregators.WeightedAggregationFactory):
  """A sum over the clients divided by a constant, whatever their weights.

  Where noise is added to a sum, the number of clients that counted is not known
  and must not be: the mean is over those that were expected.
  """

  def __init__(
      self, inner: tff.aggregators.UnweightedAggregationFactory, divisor: float
  ):
    """Initializes the factory.

    Args:
      inner: Sums the values.
      divisor: Above 0.
    """
    self._inner = inner
    self._divisor = divisor

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process for values of that type."""
    divisor = self._divisor
    process = self._inner.create(value_type)

    @tff.tensorflow.computation(value_type)
    def divide(total):
      return tf.nest.map_structure(lambda leaf: leaf / divisor, total)

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      del weight
      output = process.next(state, value)
      return tff.templates.MeasuredProcessOutput(
          output.state,
          tff.federated_map(divide, output.result),
          output.measurements,
      )

    return tff.templates.AggregationProcess(process.initialize, next_fn)


class NothingFactory(tff.aggregators.WeightedAggregationFactory):
  """Zeros, whatever the clients have, of which nothing is sent."""

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process for values and weights of these types."""

    @tff.tensorflow.computation
    def zeros():
      return zeros_of(value_type)

    @tff.federated_computation
    def init_fn():
      return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      del value, weight
      return tff.templates.MeasuredProcessOutput(
          state,
          tff.federated_eval(zeros, tff.SERVER),
          tff.federated_value((), tff.SERVER),
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)


def zeros_of(value_type: tff.Type) -> Any:
  """Returns zeros of a type whose shapes are known."""
  return tff.types.structure_from_tensor_type_tree(
      lambda tensor: tf.zeros(tensor.shape, tensor.dtype), value_type
  )
