"""From the four processes of TFF's templates to a `LearningProcess`.

`method.build_process` does this for algorithms whose state is the weights of
models. Those that keep more beside them compose their own, and hide the rest
behind `with_model_weights`.
"""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import config_checks
from tff_meta.client_works import client_work as client_work_lib


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


def compose(
    initial_weights: tff.Computation,
    work: client_work_lib.ClientWork,
    aggregation: tff.templates.AggregationProcess,
    finalizer: tff.learning.templates.FinalizerProcess,
    initial_memory: Any = None,
) -> tff.learning.templates.LearningProcess:
  """Composes a process that broadcasts its weights, also with memories.

  Args:
    initial_weights: `() -> ModelWeights`.
    work: What clients do.
    aggregation: Of the clients' updates.
    finalizer: What the server does with the aggregate.
    initial_memory: What stands in for the memory of a client that has none, a
      structure of arrays, where clients keep something.

  Returns:
    A `LearningProcess`; a `StatefulLearningProcess` if clients have a memory.
  """
  distributor = tff.learning.templates.build_broadcast_process(
      initial_weights.type_signature.result
  )
  process = tff.learning.templates.compose_learning_process(
      initial_weights, distributor, work.process, aggregation, finalizer
  )
  if work.next_with_memory is None:
    return process
  next_with_memory = _compose_next_with_memory(
      process, distributor, work, aggregation, finalizer
  )
  return StatefulLearningProcess(
      process,
      next_with_memory,
      tf.nest.map_structure(np.asarray, initial_memory),
  )


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
