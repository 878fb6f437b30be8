"""A finalizer that is one pure function of the global state."""

from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff


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
