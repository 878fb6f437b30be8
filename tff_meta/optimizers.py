"""Optimizers by name; some are other than TFF's, as the papers' code is."""

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff


class WithoutAutoGraph(tff.learning.optimizers.Optimizer):
  """An optimizer whose steps AutoGraph leaves as they are.

  TFF's finalizer converts all Python code that it calls, which takes longer
  than tracing the graphs of a small process. TFF's optimizers have no Python
  control flow on tensors, so nothing is there to convert.
  """

  def __init__(self, optimizer: tff.learning.optimizers.Optimizer):
    """Wraps an optimizer; what it computes and keeps is the same."""
    self._optimizer = optimizer

  def initialize(self, specs: Any) -> Any:
    """Returns the state before the first step."""
    return self._optimizer.initialize(specs)

  @tf.autograph.experimental.do_not_convert
  def next(self, state: Any, weights: Any, gradients: Any) -> tuple[Any, Any]:
    """Returns the state and the weights after a step."""
    return self._optimizer.next(state, weights, gradients)

  def get_hparams(self, state: Any) -> Any:
    """Returns the hyperparameters in a state."""
    return self._optimizer.get_hparams(state)

  def set_hparams(self, state: Any, hparams: Any) -> Any:
    """Returns the state with hyperparameters such as `get_hparams` returns."""
    return self._optimizer.set_hparams(state, hparams)


class Adam(tff.learning.optimizers.Optimizer):
  """Adam, with epsilon where Kingma and Ba and PyTorch have it.

    a <- b1 a + (1 - b1) g          p <- b2 p + (1 - b2) g^2
    w <- w - rate * a / (1 - b1^t) / (sqrt(p / (1 - b2^t)) + epsilon)

  TFF adds epsilon to sqrt(p), before the bias is corrected, so that it counts
  as epsilon / sqrt(1 - b2^t): at t = 1 it is 32 times larger, and the step 23 %
  too short for a gradient of 1e-6 and an epsilon of 1e-8. The state and the
  hyperparameters are those of TFF's Adam, to which this one adds its step.

  Source: Kingma and Ba 2015, "Adam", algorithm 1.
  """

  def __init__(self, learning_rate: float, epsilon: float = 1e-8):
    """Makes an optimizer with moments of decay 0.9 and 0.999.

    Args:
      learning_rate: At least 0.
      epsilon: At least 0.
    """
    self._tff_adam = tff.learning.optimizers.build_adam(
        learning_rate, epsilon=epsilon
    )

  def initialize(self, specs: Any) -> Any:
    """Returns the state before the first step, as TFF's Adam has it."""
    return self._tff_adam.initialize(specs)

  def next(self, state: Any, weights: Any, gradients: Any) -> tuple[Any, Any]:
    """Takes a step.

    Args:
      state: Of `initialize`, or of the step before.
      weights: A structure of float tensors.
      gradients: Like `weights`.

    Returns:
      The state and the weights after the step.
    """
    tff.learning.optimizers.check_weights_gradients_match(weights, gradients)
    step = state['step'] + 1
    first_decay, second_decay = state['beta_1'], state['beta_2']

    def moving_mean(decay, means, values):
      return tf.nest.map_structure(
          lambda m, v: m + (v - m) * (1.0 - tf.cast(decay, m.dtype)),
          means,
          values,
      )

    def bias_correction(decay):
      # In float32, 1 - 0.999^t would be off by up to 1e-5 of itself.
      return 1.0 - tf.cast(decay, tf.float64) ** tf.cast(step, tf.float64)

    rate = tf.cast(state['learning_rate'], tf.float64)
    rate /= bias_correction(first_decay)
    correction = tf.sqrt(bias_correction(second_decay))

    def move(w, a, p):
      root = tf.sqrt(p) / tf.cast(correction, w.dtype)
      return w - tf.cast(rate, w.dtype) * a / (
          root + tf.cast(state['epsilon'], w.dtype)
      )

    accumulator = moving_mean(first_decay, state['accumulator'], gradients)
    squares = tf.nest.map_structure(tf.square, gradients)
    preconditioner = moving_mean(second_decay, state['preconditioner'], squares)
    moved = tf.nest.map_structure(move, weights, accumulator, preconditioner)
    state = collections.OrderedDict(
        state,
        step=step,
        accumulator=accumulator,
        preconditioner=preconditioner,
    )
    return state, moved

  def get_hparams(self, state: Any) -> Any:
    """Returns `learning_rate`, `beta_1`, `beta_2` and `epsilon`."""
    return self._tff_adam.get_hparams(state)

  def set_hparams(self, state: Any, hparams: Any) -> Any:
    """Returns the state with hyperparameters such as `get_hparams` returns."""
    return self._tff_adam.set_hparams(state, hparams)


def build_optimizer(
    name: str, learning_rate: float, momentum: float = 0.0
) -> tff.learning.optimizers.Optimizer:
  """A TFF optimizer by name.

  Args:
    name: `'sgd'`; `'adam'` with moments 0.9 and 0.999; or `'rmsprop'` with mean
      squares of decay 0.99. The latter two add an epsilon of 1e-8 to the root,
      Adam to that of the corrected moment. All three compute what PyTorch's
      optimizers of these names do by default.
    learning_rate: At least 0.
    momentum: Of SGD, in `[0, 1)`.

  Returns:
    A `tff.learning.optimizers.Optimizer` without weight decay: coupled decay is
    an argument of `local_sgd`.

  Raises:
    ValueError: If a name is unknown, momentum is out of its range or asked of
      another than SGD.
  """
  if not 0 <= momentum < 1:
    raise ValueError(
        f'Expected `momentum` of at least 0 and below 1, found {momentum}.'
    )
  if name == 'sgd':
    return tff.learning.optimizers.build_sgdm(learning_rate, momentum or None)
  if momentum:
    raise ValueError(
        f'Expected no `momentum` with {name!r}, only with SGD, found'
        f' {momentum}.'
    )
  if name == 'adam':
    return Adam(learning_rate)
  if name == 'rmsprop':
    return tff.learning.optimizers.build_rmsprop(learning_rate, 0.99, 1e-8)
  raise ValueError(
      f"Expected optimizer 'sgd', 'adam' or 'rmsprop', found {name!r}."
  )
