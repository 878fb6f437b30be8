"""From one client function to a `tff.learning.templates.LearningProcess`.

Algorithms whose state is the model's weights use `build_learning_process`;
those that keep more beside them compose their own and hide the rest behind
`with_model_weights`.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import config_checks
from tff_meta import episodes
from tff_meta import optimizers
from tff_meta.client_works import client_work as client_work_lib
from tff_meta.learners import local_sgd
from tff_meta.models import model as model_lib


def mean_factory() -> tff.aggregators.WeightedAggregationFactory:
  """The weighted mean; zero, not NaN, when every client has weight zero."""
  return tff.aggregators.MeanFactory(no_nan_division=True)


def robust_factory() -> tff.aggregators.WeightedAggregationFactory:
  """The weighted mean without updates that are much larger than most.

  Those beyond a multiple of a high quantile of the norms so far count as zeros,
  long ones are cut to a quantile. Where every client has weight zero the mean
  is NaN, which TFF's finalizers leave out.
  """
  return tff.learning.robust_aggregator()


def train_epochs(
    loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
    config: Any,
    weights: Any,
    examples: episodes.Examples,
    seed: tf.Tensor,
    num_epochs: int,
    **options: Any,
) -> tuple[Any, local_sgd.LocalReport]:
  """Local epochs with the optimizer of a configuration.

  Args:
    loss_fn: As in `local_sgd.local_sgd`.
    config: Has the fields `optimizer`, `learning_rate`, `momentum`,
      `weight_decay` and `batch_size`, where 0 is the whole set.
    weights: Where training begins.
    examples: The client's.
    seed: int32 `[2]`.
    num_epochs: How many.
    **options: Of `local_sgd.local_sgd`.

  Returns:
    The weights after the last step, and a report.
  """
  return local_sgd.local_sgd(
      loss_fn,
      weights,
      examples,
      optimizers.build_optimizer(
          config.optimizer, config.learning_rate, config.momentum
      ),
      batch_size=config.batch_size or None,
      num_epochs=num_epochs,
      seed=seed,
      weight_decay=config.weight_decay,
      **options,
  )


def initial_seed(seed: int) -> tf.Tensor:
  """The seed of a run's initial weights, int32 `[2]`.

  Args:
    seed: The run's seed, 0..2**31-1.

  Returns:
    A seed apart from those of the rounds, which begin with 0.

  Raises:
    ValueError: If it is another number.
  """
  config_checks.check_seed(seed)
  return tf.constant([1, seed], tf.int32)


class ClientInput(NamedTuple):
  """What a client works with in a round.

  Attributes:
    examples: Its `Examples`, dense, none of them padding.
    seed: int32 `[2]`, this client's own in this round.
    fixed_seed: int32 `[2]`, this client's own, the same in all rounds.
    message: What the server broadcasts beside the weights; `()` for nothing.
    memory: `ClientMemory`, what the client has kept since its last round; `()`
      if clients keep nothing.
  """

  examples: episodes.Examples
  seed: tf.Tensor
  fixed_seed: tf.Tensor
  message: Any
  memory: Any


class StatefulLearningProcess(tff.learning.templates.LearningProcess):
  """A `LearningProcess` whose clients keep something between rounds.

  A client's data are `<examples, salt, memory>`, where `memory` holds what the
  client kept of its last round, or nothing before its first
  (`client_work.memory_dataset`). `next` satisfies the template;
  `next_with_memory` computes the same round and also returns what the clients
  keep, at CLIENTS, so that whoever drives the rounds can store it.
  """

  def __init__(
      self,
      process: tff.learning.templates.LearningProcess,
      next_with_memory: tff.Computation,
      initial_memory: Any,
  ):
    """Adds the clients' memories to a process.

    Args:
      process: The process without.
      next_with_memory: `(state, data) -> (LearningProcessOutput, ClientMemory
        at CLIENTS)`.
      initial_memory: What stands in for the memory of a client that has none,
        a structure of NumPy arrays.
    """
    super().__init__(
        process.initialize,
        process.next,
        process.get_model_weights,
        process.set_model_weights,
    )
    self._next_with_memory = next_with_memory
    self._initial_memory = initial_memory

  @property
  def next_with_memory(self) -> tff.Computation:
    """`next`, with the clients' new `ClientMemory`s in cohort order."""
    return self._next_with_memory

  @property
  def initial_memory(self) -> Any:
    """The structure of a memory, NumPy arrays."""
    return self._initial_memory


def build_learning_process(
    initialize: Callable[[], Any],
    model: model_lib.Model,
    client_update: Callable[[Any, ClientInput], client_work_lib.ClientOutput],
    *,
    num_classes: int,
    seed: int,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    memory: Callable[[], Any] | None = None,
    state: client_work_lib.ClientWorkState | None = None,
) -> tff.learning.templates.LearningProcess:
  """Composes a process whose global state is the model's weights.

  Args:
    initialize: `() -> weights` in pure TensorFlow, the initial weights.
    model: The network that clients train: what their examples look like, and
      how they are augmented.
    client_update: `(weights, ClientInput) -> ClientOutput` in pure TensorFlow;
      the result's `update` is a pseudo-gradient, initial minus final weights.
    num_classes: Clients' labels are 0..num_classes-1.
    seed: The run's seed, in the int32 range.
    aggregator: Weighted; by default `mean_factory()`.
    server_optimizer: Applied to the aggregate; by default SGD of rate 1, which
      adds the mean change to the weights.
    memory: `() -> value` in pure TensorFlow, stands in for the memory of a
      client that has not taken part yet; None if clients keep nothing.
    state: What the server keeps and broadcasts to the clients beside the
      weights; None for nothing.

  Returns:
    A `LearningProcess` whose `get_model_weights` returns `ModelWeights` with
    the weights as `trainable`; a `StatefulLearningProcess` if clients have a
    `memory`.
  """

  @tff.tensorflow.computation
  def initial_weights():
    return tff.learning.models.ModelWeights(initialize(), ())

  weights_type = initial_weights.type_signature.result

  def update_weights(model_weights, message, data):
    fold_in = tf.random.experimental.stateless_fold_in
    client = ClientInput(
        data.examples,
        fold_in(message.seed, data.salt),
        fold_in(message.run_seed, data.salt),
        message.message,
        data.memory,
    )
    return client_update(model_weights.trainable, client)

  work = client_work_lib.build_client_work(
      weights_type,
      model,
      update_weights,
      client_work_lib.round_seed(seed, state),
      memory,
      num_classes=num_classes,
  )
  result_type = work.process.next.type_signature.result.result.member
  distributor = tff.learning.templates.build_broadcast_process(weights_type)
  aggregation = (aggregator or mean_factory()).create(
      result_type.update, result_type.update_weight
  )
  finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
      server_optimizer
      or optimizers.WithoutAutoGraph(tff.learning.optimizers.build_sgdm(1.0)),
      weights_type,
      tf.autograph.experimental.do_not_convert(
          tff.learning.templates.reject_non_finite_update
      ),
  )
  process = tff.learning.templates.compose_learning_process(
      initial_weights, distributor, work.process, aggregation, finalizer
  )
  if memory is None:
    return process
  next_with_memory = _compose_next_with_memory(
      process, distributor, work, aggregation, finalizer
  )
  initial_memory = tf.nest.map_structure(np.asarray, memory())
  return StatefulLearningProcess(process, next_with_memory, initial_memory)


def _compose_next_with_memory(
    process, distributor, work, aggregation, finalizer
) -> tff.Computation:
  """What `compose_learning_process` makes, with the clients' memories."""

  @tff.federated_computation(process.next.type_signature.parameter)
  def next_with_memory(state, client_data):
    distributed = distributor.next(
        state.distributor, state.global_model_weights
    )
    worked, memory = work.next_with_memory(
        state.client_work, distributed.result, client_data
    )
    aggregated = aggregation.next(
        state.aggregator, worked.result.update, worked.result.update_weight
    )
    finalized = finalizer.next(
        state.finalizer, state.global_model_weights, aggregated.result
    )
    new_state = tff.federated_zip(
        tff.learning.templates.LearningAlgorithmState(
            finalized.result,
            distributed.state,
            worked.state,
            aggregated.state,
            finalized.state,
        )
    )
    metrics = tff.federated_zip(
        collections.OrderedDict(
            distributor=distributed.measurements,
            client_work=worked.measurements,
            aggregator=aggregated.measurements,
            finalizer=finalized.measurements,
        )
    )
    output = tff.learning.templates.LearningProcessOutput(new_state, metrics)
    return output, memory

  return next_with_memory


def build_stateless_finalizer(
    state_type: tff.Type,
    update_type: tff.Type,
    next_state: Callable[[Any, Any], Any],
) -> tff.learning.templates.FinalizerProcess:
  """Builds a finalizer without a state or measurements of its own.

  Args:
    state_type: Unplaced type of the global state (TFF's "model weights").
    update_type: Unplaced type of the aggregated update.
    next_state: `(state, update) -> state` in pure TensorFlow.

  Returns:
    A `FinalizerProcess`.
  """
  next_tf = tff.tensorflow.computation(next_state, (state_type, update_type))

  @tff.federated_computation
  def init_fn():
    return tff.federated_value((), tff.SERVER)

  @tff.federated_computation(
      init_fn.type_signature.result,
      tff.FederatedType(state_type, tff.SERVER),
      tff.FederatedType(update_type, tff.SERVER),
  )
  def next_fn(state, global_state, update):
    return tff.templates.MeasuredProcessOutput(
        state,
        tff.federated_map(next_tf, (global_state, update)),
        tff.federated_value((), tff.SERVER),
    )

  return tff.learning.templates.FinalizerProcess(init_fn, next_fn)


def with_model_weights(
    process: tff.learning.templates.LearningProcess,
    get: Callable[[Any], Any],
    put: Callable[[Any, Any], Any],
) -> tff.learning.templates.LearningProcess:
  """Makes a process with a richer global state speak `ModelWeights`.

  Args:
    process: A composed process whose `global_model_weights` hold more than a
      model.
    get: `global_model_weights -> weights` in pure TensorFlow.
    put: `(global_model_weights, weights) -> global_model_weights`.

  Returns:
    The same process, but for `get_model_weights` and `set_model_weights`.
  """
  state_type = process.initialize.type_signature.result.member

  @tff.tensorflow.computation(state_type)
  def get_model_weights(state):
    weights = get(state.global_model_weights)
    return tff.learning.models.ModelWeights(weights, ())

  @tff.tensorflow.computation(
      state_type, get_model_weights.type_signature.result
  )
  def set_model_weights(state, model_weights):
    return state._replace(
        global_model_weights=put(
            state.global_model_weights, model_weights.trainable
        )
    )

  return tff.learning.templates.LearningProcess(
      process.initialize,
      process.next,
      get_model_weights,
      set_model_weights,
      get_hparams_fn=process.get_hparams,
      set_hparams_fn=process.set_hparams,
  )
