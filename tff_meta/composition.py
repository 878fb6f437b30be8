"""From one client function to a `tff.learning.templates.LearningProcess`.

Algorithms whose state is the model's weights use `build_learning_process`;
those that keep more beside them compose their own and hide the rest behind
`with_model_weights`.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.client_works import client_work as client_work_lib


def mean_factory() -> tff.aggregators.WeightedAggregationFactory:
  """The weighted mean; zero, not NaN, when every client has weight zero."""
  return tff.aggregators.MeanFactory(no_nan_division=True)


def build_optimizer(
    name: str, learning_rate: float, momentum: float = 0.0
) -> tff.learning.optimizers.Optimizer:
  """A TFF optimizer by name.

  Args:
    name: `'sgd'`, or `'adam'` with moments 0.9 and 0.999 and epsilon 1e-8
      outside the root. (TFF adds epsilon before the bias correction, PyTorch
      after it: gradients above about 1e-6 do not tell.)
    learning_rate: At least 0.
    momentum: Of SGD, in `[0, 1)`.

  Returns:
    A `tff.learning.optimizers.Optimizer` without weight decay: coupled decay is
    an argument of `local_sgd`.

  Raises:
    ValueError: If a name is unknown, momentum is out of its range or asked of
      Adam.
  """
  if not 0 <= momentum < 1:
    raise ValueError(
        f'Expected `momentum` of at least 0 and below 1, found {momentum}.'
    )
  if name == 'sgd':
    return tff.learning.optimizers.build_sgdm(learning_rate, momentum or None)
  if name != 'adam':
    raise ValueError(f"Expected optimizer 'sgd' or 'adam', found {name!r}.")
  if momentum:
    raise ValueError(f'Expected no `momentum` with Adam, found {momentum}.')
  return tff.learning.optimizers.build_adam(learning_rate, epsilon=1e-8)


def initial_seed(seed: int) -> tf.Tensor:
  """The seed of a run's initial weights, int32 `[2]`.

  Args:
    seed: The run's seed, in the int32 range.

  Returns:
    A seed apart from those of the rounds, which begin with 0.
  """
  return tf.constant([1, seed], tf.int32)


def build_learning_process(
    initialize: Callable[[], Any],
    input_shape: tuple[int, ...],
    client_update: Callable[..., Any],
    *,
    seed: int,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Composes a process whose global state is the model's weights.

  Args:
    initialize: `() -> weights` in pure TensorFlow, the initial weights.
    input_shape: Shape of one example, channels last.
    client_update: `(weights, seed, data) -> (ClientResult, LocalReport)` in
      pure TensorFlow; the result's `update` is a pseudo-gradient, initial minus
      final weights, and `seed` the round's, int32 `[2]`.
    seed: The run's seed, in the int32 range.
    aggregator: Weighted; by default `mean_factory()`.
    server_optimizer: Applied to the aggregate; by default SGD of rate 1, which
      adds the mean change to the weights.

  Returns:
    A `LearningProcess` whose `get_model_weights` returns `ModelWeights` with
    the weights as `trainable`.
  """

  @tff.tensorflow.computation
  def initial_weights():
    return tff.learning.models.ModelWeights(initialize(), ())

  weights_type = initial_weights.type_signature.result

  def update_weights(model_weights, message, data):
    return client_update(model_weights.trainable, message, data)

  work = client_work_lib.build_client_work(
      weights_type,
      client_work_lib.client_data_type(input_shape),
      update_weights,
      client_work_lib.round_seed(seed),
  )
  result_type = work.next.type_signature.result.result.member
  return tff.learning.templates.compose_learning_process(
      initial_weights,
      tff.learning.templates.build_broadcast_process(weights_type),
      work,
      (aggregator or mean_factory()).create(
          result_type.update, result_type.update_weight
      ),
      tff.learning.templates.build_apply_optimizer_finalizer(
          server_optimizer or tff.learning.optimizers.build_sgdm(1.0),
          weights_type,
      ),
  )


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
