"""Local training: epochs of minibatch steps of an optimizer."""

import collections
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import tensorflow as tf

from tff_meta import episodes
from tff_meta import weights as weights_lib


class LocalReport(NamedTuple):
  """What training on a client saw; clients' reports may be summed.

  Attributes:
    loss_sum: float32 scalar, the loss before each step times the examples of
      its minibatch, summed over all steps.
    num_examples: float32 scalar, the examples of all steps (n examples in E
      epochs count E * n), so that `loss_sum / num_examples` is the mean loss.
  """

  loss_sum: tf.Tensor
  num_examples: tf.Tensor


def initial_optimizer_state(
    optimizer: Any, weights: Any, trainable: Collection[str] | None = None
) -> Any:
  """The state of an optimizer that has not taken a step.

  Args:
    optimizer: Has TFF's optimizer interface.
    weights: A structure of tensors, `OrderedDict(body=..., head=...)`.
    trainable: The top-level parts that learn; None means all.

  Returns:
    A structure of tensors, made by the optimizer.

  Raises:
    ValueError: `trainable` names a part that is not there.
  """
  specs = tf.nest.map_structure(
      lambda w: tf.TensorSpec(w.shape, w.dtype),
      _partition(weights, trainable)[0],
  )
  return tf.nest.map_structure(
      tf.convert_to_tensor, optimizer.initialize(specs)
  )


def local_sgd(
    loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
    weights: Any,
    examples: episodes.Examples,
    optimizer: Any,
    *,
    batch_size: int | None,
    num_epochs: int,
    seed: tf.Tensor,
    weight_decay: float = 0.0,
    max_gradient_norm: float | None = None,
    trainable: Collection[str] | None = None,
    max_steps: int | None = None,
) -> tuple[Any, LocalReport]:
  """Takes one optimizer step per minibatch.

  Per step: `g = grad loss(w) + weight_decay * w`, the gradient clipped if asked
  for, then the optimizer moves `w` by `g`; the decay is coupled, that is it
  passes through momentum and Adam's moments. Without examples the weights come
  back unchanged. Gradients do not flow through this function usefully; see
  `adaptation` for that.

  Args:
    loss_fn: From weights and a minibatch to a scalar: the mean over the
      examples of the minibatch.
    weights: A structure of tensors, `OrderedDict(body=..., head=...)`.
    examples: The client's examples. Padding is dropped first and takes no part.
    optimizer: Has TFF's optimizer interface: `initialize(specs)` and
      `next(state, weights, gradients)`. Its state starts anew.
    batch_size: Examples per minibatch; None means all of them.
    num_epochs: Passes over the examples, each in its own random order.
    seed: int32 [2].
    weight_decay: Coefficient of the coupled L2 penalty.
    max_gradient_norm: Longer gradients of the loss are scaled down to it before
      the decay is added; above 0. A gradient whose norm overflows becomes NaN.
      None means no clipping.
    trainable: The top-level parts that learn, such as ('body',); the others
      stay as they are. None means all.
    max_steps: Ends after so many steps, even amid an epoch; None means after
      the last epoch.

  Returns:
    The weights after the last step, and a report.

  Raises:
    ValueError: `trainable` names a part that is not there.

  Source: coupled decay is PyTorch's `weight_decay` of SGD and Adam.
  """
  weights, _, report = resume_local_sgd(
      loss_fn,
      weights,
      initial_optimizer_state(optimizer, weights, trainable),
      examples,
      optimizer,
      batch_size=batch_size,
      num_epochs=num_epochs,
      seed=seed,
      weight_decay=weight_decay,
      max_gradient_norm=max_gradient_norm,
      trainable=trainable,
      max_steps=max_steps,
  )
  return weights, report


def resume_local_sgd(
    loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
    weights: Any,
    optimizer_state: Any,
    examples: episodes.Examples,
    optimizer: Any,
    *,
    batch_size: int | None,
    num_epochs: int,
    seed: tf.Tensor,
    weight_decay: float = 0.0,
    max_gradient_norm: float | None = None,
    trainable: Collection[str] | None = None,
    max_steps: int | None = None,
) -> tuple[Any, Any, LocalReport]:
  """`local_sgd` with an optimizer that has taken steps before.

  Args:
    loss_fn: See `local_sgd`, as all that is not said here.
    weights: A structure of tensors.
    optimizer_state: Of `initial_optimizer_state` with the same weights and
      parts, or what an earlier call gave back.
    examples: The client's examples.
    optimizer: Has TFF's optimizer interface. Its rate, momentum and so on are
      those in `optimizer_state`.
    batch_size: Examples per minibatch; None means all of them.
    num_epochs: Passes over the examples.
    seed: int32 [2].
    weight_decay: Coefficient of the coupled L2 penalty.
    max_gradient_norm: To which longer gradients are scaled down.
    trainable: The top-level parts that learn.
    max_steps: Ends after so many steps.

  Returns:
    The weights and the optimizer's state after the last step, and a report.

  Raises:
    ValueError: `trainable` names a part that is not there.

  Source: clients in the released code of CAFeMe (Vettoruzzo et al. 2023), which
  keep their Adams.
  """
  # Numbers of the examples, not `drop_padding`, which copies them all.
  rows = tf.where(examples.mask > 0)[:, 0]
  batches = episodes.minibatches(tf.size(rows), batch_size, seed, num_epochs)
  batches = episodes.Minibatches(*(part[:max_steps] for part in batches))
  batches = batches._replace(indices=tf.gather(rows, batches.indices))
  num_steps = tf.shape(batches.indices)[0]
  learned, fixed = _partition(weights, trainable)

  def step(i, learned, state, loss_sum):
    batch = episodes.take(examples, batches, i)
    with tf.GradientTape() as tape:
      tape.watch(learned)
      loss = loss_fn(_merge(weights, learned, fixed), batch)
    gradients = tape.gradient(
        loss, learned, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    if max_gradient_norm is not None:
      gradients = weights_lib.clip_by_global_norm(gradients, max_gradient_norm)
    gradients = weights_lib.add_decay(gradients, learned, weight_decay)
    state, learned = optimizer.next(state, learned, gradients)
    num_examples = tf.reduce_sum(batch.mask)
    loss_sum += tf.cast(loss, tf.float32) * num_examples
    return i + 1, learned, state, loss_sum

  _, learned, state, loss_sum = tf.while_loop(
      lambda i, *_: i < num_steps,
      step,
      (tf.constant(0), learned, optimizer_state, tf.constant(0.0)),
  )
  num_examples = tf.cast(tf.reduce_sum(batches.sizes), tf.float32)
  report = LocalReport(loss_sum, num_examples)
  return _merge(weights, learned, fixed), state, report


def length_of(number: int, unit: str) -> dict[str, Any]:
  """How long to train, as arguments of `local_sgd`.

  Args:
    number: How many, at least 0.
    unit: `'epochs'`, or `'steps'` of minibatches.

  Returns:
    `num_epochs` and `max_steps`.
  """
  # An epoch has at least one step.
  return dict(num_epochs=number, max_steps=number if unit == 'steps' else None)


def client_weight(num_examples: tf.Tensor, uniform: bool) -> tf.Tensor:
  """Returns lambda_k: the number of examples, or 1 for any client with some."""
  num_examples = tf.cast(num_examples, tf.float32)
  return tf.sign(num_examples) if uniform else num_examples


def _partition(weights, trainable):
  """The parts that learn and the parts that do not."""
  if trainable is None:
    return weights, {}
  if not set(trainable) <= set(weights):
    raise ValueError(
        f'Expected `trainable` to be among {list(weights)}, found'
        f' {list(trainable)}.'
    )
  learned = collections.OrderedDict(
      (name, part) for name, part in weights.items() if name in trainable
  )
  fixed = {name: part for name, part in weights.items() if name not in learned}
  return learned, fixed


def _merge(weights, learned, fixed):
  """Puts the parts together in the order of `weights`."""
  if not fixed:
    return learned
  parts = {**learned, **fixed}
  return collections.OrderedDict((name, parts[name]) for name in weights)
