"""Aggregation of clients' updates cluster by cluster."""

from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import weights as weights_lib


class ClusterUpdate(NamedTuple):
  """A client's update of one of k models.

  Attributes:
    models: A structure of float32 tensors with a leading axis of k models; what
      stands in the rows that are not picked is not read.
    picked: float32 `[k]`, 1 for the model that the client trained, else 0.
  """

  models: Any
  picked: tf.Tensor


class ClusterMeansFactory(tff.aggregators.WeightedAggregationFactory):
  """Aggregates every model over the clients that picked it.

  There is a process of a given factory for each of the k models (mean, robust
  ...), in which clients that picked another one have weight 0 and an update of
  zeros. What does not count weights takes these zeros for updates, too: a
  differentially private factory, whose updates become smaller, and norms that
  adapt to the clients, which become those of the zeros where most clients
  picked another model.

  A model's result that is not finite, as a mean of no weight at all can be, is
  replaced by zeros. TFF's finalizers would drop the updates of all models for
  it.

  The result is a structure like `ClusterUpdate.models`.

  Source: Ghosh et al., "An Efficient Framework for Clustered Federated
  Learning", NeurIPS 2020, Algorithm 1, model averaging.
  """

  def __init__(self, factory: tff.aggregators.WeightedAggregationFactory):
    """Initializes the factory.

    Args:
      factory: Aggregates the updates of one model.
    """
    self._factory = factory

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process for values of type `ClusterUpdate`."""
    (num_clusters,) = value_type.picked.shape
    rows = [_row(value_type, weight_type, i) for i in range(num_clusters)]
    row_type, _ = rows[0].type_signature.result
    process = self._factory.create(row_type, weight_type)

    @tff.tensorflow.computation([row_type] * num_clusters)
    def stack(models):
      finite = [weights_lib.where_finite_or_zero(model)[0] for model in models]
      return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *finite)

    @tff.federated_computation
    def init_fn():
      return tff.federated_zip([process.initialize() for _ in rows])

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      outputs = []
      for i, row in enumerate(rows):
        mine = tff.federated_map(row, (value, weight))
        outputs.append(process.next(state[i], mine[0], mine[1]))
      return tff.templates.MeasuredProcessOutput(
          tff.federated_zip([output.state for output in outputs]),
          tff.federated_map(
              stack, tff.federated_zip([output.result for output in outputs])
          ),
          tff.federated_zip([output.measurements for output in outputs]),
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)


def _row(value_type, weight_type, index):
  """The computation of a client's update of one model, and its weight."""

  @tff.tensorflow.computation(value_type, weight_type)
  def row(update, weight):
    picked = update.picked[index]
    model = tf.nest.map_structure(
        lambda leaf: tf.where(picked > 0, leaf[index], 0.0), update.models
    )
    return model, weight * picked

  return row
