"""Aggregation of class prototypes over the clients that hold each class."""

import collections
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.aggregators import bounds
from tff_meta.losses import prototypical

# Standard deviations of the noise that a class's weight has to be above for the
# class to be believed.
_CERTAINTY = 1.0


def _shorten(sums, limits):
  """Means of norm `size` at most, and weights of `Limits.weight` at most.

  Where clients that count at all count 1 no weight is beyond a limit.
  """

  def limit(weight):
    if limits.weight is None:
      return tf.cast(weight > 0, weight.dtype), False
    is_beyond = tf.reduce_any(weight > limits.weight)
    return tf.clip_by_value(weight / limits.weight, 0.0, 1.0), is_beyond

  weight, is_class_beyond = limit(sums.class_weight)
  total_weight, is_total_beyond = limit(sums.total_weight)
  means, is_longer = _of_norm_one_at_most(
      tf.math.divide_no_nan(sums.means, sums.class_weight[:, tf.newaxis])
      / limits.size
  )
  shortened = prototypical.PrototypeSums(
      weight[:, tf.newaxis] * means, weight, total_weight
  )
  return shortened, is_longer | is_class_beyond | is_total_beyond


def _restore(total, limits, noise):
  """The sums; without classes where the noise may be all that there is."""
  most = 1.0 if limits.weight is None else limits.weight
  if not noise:
    return prototypical.PrototypeSums(
        most * limits.size * total.means,
        most * total.class_weight,
        most * total.total_weight,
    )

  def believed(weight):
    return tf.where(weight > _CERTAINTY * noise, most * weight, 0.0)

  weight = believed(total.class_weight)
  # No mean of a client was longer, so none of all clients is.
  means, _ = _of_norm_one_at_most(
      tf.math.divide_no_nan(most * total.means, weight[:, tf.newaxis])
  )
  return prototypical.PrototypeSums(
      limits.size * weight[:, tf.newaxis] * means,
      weight,
      believed(total.total_weight),
  )


def _of_norm_one_at_most(means):
  """Shortens the rows, and says whether any was longer."""
  means = tf.clip_by_value(means, -2.0, 2.0)  # So that norms are finite.
  norm = tf.norm(means, axis=1, keepdims=True)
  return means / tf.maximum(norm, 1.0), tf.reduce_any(norm > 1.0)


# For `PrototypeSums`: a class mean has a bounded norm, and the weights of the
# classes are of the same size. Where a client holds several classes its part
# has a norm above 1; whoever shortens it keeps the class means as they are, as
# means and weights become smaller alike.
BOUND = bounds.Bound(_shorten, _restore)


class ModelAndPrototypes(NamedTuple):
  """A client's update, and what it is aggregated to.

  Attributes:
    model: A structure of float32 tensors, averaged with the clients' weights.
    prototypes: Means `[C, D]` and present `[C]` of the classes held.
  """

  model: Any
  prototypes: prototypical.Prototypes


class ModelAndPrototypesFactory(tff.aggregators.WeightedAggregationFactory):
  """Aggregates `ModelAndPrototypes` with one weight per client.

  The model part goes through any weighted factory (mean, robust, differentially
  private ...). Prototypes are class-keyed sums of means and of weights, divided
  on the server, so the mean of a class is over the clients that hold it:

    Gamma(c) = sum_{k holds c} lambda_k Gamma_k(c) / sum_{k holds c} lambda_k

  With one holder it recovers that client's prototype unchanged.

  Source: Park et al., "Few-Round Learning for Federated Learning", NeurIPS
  2021, Algorithm 1, normalised over the holders as the released code does.
  """

  def __init__(
      self,
      model_factory: tff.aggregators.WeightedAggregationFactory,
      sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
      over: str = 'holders',
  ):
    """Initializes the factory.

    Args:
      model_factory: Aggregates the field `model` of the updates.
      sum_factory: Sums the prototypes; by default
        `tff.aggregators.SumFactory()`, replaceable by a secure sum.
      over: `'holders'` or `'all'`, see `prototypical.divide_prototypes`.

    Raises:
      ValueError: If `over` is neither.
    """
    if over not in ('holders', 'all'):
      raise ValueError(
          f"Expected `over` as 'holders' or 'all', found {over!r}."
      )
    self._model_factory = model_factory
    self._sum_factory = sum_factory or tff.aggregators.SumFactory()
    self._over = over

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process for values of type `ModelAndPrototypes`."""
    over = self._over
    model_process = self._model_factory.create(value_type.model, weight_type)

    @tff.tensorflow.computation(value_type.prototypes, weight_type)
    def summand(prototypes, weight):
      return prototypical.weigh_prototypes(prototypes, weight)

    sum_process = self._sum_factory.create(summand.type_signature.result)

    @tff.tensorflow.computation(summand.type_signature.result)
    def divide(total):
      return prototypical.divide_prototypes(total, over)

    @tff.federated_computation
    def init_fn():
      return tff.federated_zip(
          (model_process.initialize(), sum_process.initialize())
      )

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      model = model_process.next(state[0], value.model, weight)
      total = sum_process.next(
          state[1], tff.federated_map(summand, (value.prototypes, weight))
      )
      result = ModelAndPrototypes(
          model.result, tff.federated_map(divide, total.result)
      )
      measurements = collections.OrderedDict(
          model=model.measurements, prototypes=total.measurements
      )
      return tff.templates.MeasuredProcessOutput(
          tff.federated_zip((model.state, total.state)),
          tff.federated_zip(result),
          tff.federated_zip(measurements),
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)
