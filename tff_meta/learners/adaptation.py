"""The inner loop of meta-learning, the gradient through it, the outer step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tff_meta import episodes

_ADAM_EPSILON = 1e-8


class MetaGradient(NamedTuple):
  """The query loss of the adapted weights and its gradient.

  Attributes:
    loss: Scalar.
    weights: Like the weights; the gradient with respect to them.
    learning_rate: Like the learning rate; the gradient with respect to it.
  """

  loss: tf.Tensor
  weights: Any
  learning_rate: Any


def inner_loop(
    loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
    weights: Any,
    examples: episodes.Examples,
    batches: episodes.Minibatches,
    learning_rate: Any,
    *,
    order: int,
) -> Any:
  """Takes one gradient step per minibatch: `w <- w - rate * grad loss(w)`.

  Args and errors are those of `inner_loop_and_loss`.

  Returns:
    The adapted weights.
  """
  adapted, _ = inner_loop_and_loss(
      loss_fn, weights, examples, batches, learning_rate, order=order
  )
  return adapted


def inner_loop_and_loss(
    loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
    weights: Any,
    examples: episodes.Examples,
    batches: episodes.Minibatches,
    learning_rate: Any,
    *,
    order: int,
    first_scored: int | tf.Tensor = 0,
) -> tuple[Any, tf.Tensor]:
  """Takes one gradient step per minibatch: `w <- w - rate * grad loss(w)`.

  Gradients flow through the result (the loop runs on dense tensors).

  Args:
    loss_fn: From weights and a minibatch to a scalar.
    weights: A structure of tensors.
    examples: What to adapt to.
    batches: The minibatches of the steps, as `episodes.minibatches` gives them.
    learning_rate: A scalar, or a structure of tensors like `weights` (Meta-SGD:
      one rate per parameter).
    order: 2 differentiates through the steps. 1 takes the gradient inside a
      step for a constant, so that the derivative of the result with respect to
      `weights` is the identity.
    first_scored: The step, from 0, from which on losses are averaged.

  Returns:
    The adapted weights, and the mean over those steps of the loss before each
    step, float32 scalar (0 without steps).

  Raises:
    ValueError: `order` is neither 1 nor 2.

  Source: Finn, Abbeel and Levine 2017, "Model-Agnostic Meta-Learning"
  (MAML), section 2.2; Li et al. 2017, "Meta-SGD", section 3.
  """
  if order not in (1, 2):
    raise ValueError(
        f'Expected `order` to be 1 (first order) or 2, found {order}.'
    )
  rates = learning_rate
  if not tf.nest.is_nested(learning_rate):
    rates = tf.nest.map_structure(
        lambda w: tf.cast(learning_rate, w.dtype), weights
    )

  def step(i, weights, loss_sum):
    batch = episodes.take(examples, batches, i)
    with tf.GradientTape() as tape:
      tape.watch(weights)
      loss = loss_fn(weights, batch)
    gradients = tape.gradient(
        loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    if order == 1:
      gradients = tf.nest.map_structure(tf.stop_gradient, gradients)
    moved = tf.nest.map_structure(
        lambda w, rate, g: w - rate * g, weights, rates, gradients
    )
    loss = tf.where(i < first_scored, 0.0, tf.cast(loss, tf.float32))
    return i + 1, moved, loss_sum + loss

  num_steps = tf.shape(batches.indices)[0]
  _, adapted, loss_sum = tf.while_loop(
      lambda i, *_: i < num_steps,
      step,
      (tf.constant(0), weights, tf.constant(0.0)),
  )
  num_scored = tf.cast(num_steps - first_scored, tf.float32)
  return adapted, tf.math.divide_no_nan(loss_sum, num_scored)


def meta_gradient(
    support_loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
    query_loss_fn: Callable[[Any], tf.Tensor],
    weights: Any,
    support: episodes.Examples,
    batches: episodes.Minibatches,
    learning_rate: Any,
    *,
    order: int,
) -> MetaGradient:
  """The gradient of `query_loss(inner_loop(weights))`.

  Order 1 is the gradient of the query loss at the adapted weights. A learning
  rate of 0 gives the gradient of the query loss at `weights`.

  Args:
    support_loss_fn: From weights and a minibatch to a scalar.
    query_loss_fn: From adapted weights to a scalar.
    weights: A structure of tensors, where the inner loop starts.
    support: What the inner loop adapts to.
    batches: The minibatches of its steps.
    learning_rate: A scalar, or a structure of tensors like `weights`.
    order: 1 or 2; see `inner_loop`.

  Returns:
    The query loss and its gradient with respect to weights and learning rate.

  Raises:
    ValueError: `order` is neither 1 nor 2.

  Source: Finn et al. 2017, algorithm 1; Li et al. 2017, algorithm 1.
  """
  learning_rate = tf.nest.map_structure(tf.convert_to_tensor, learning_rate)
  with tf.GradientTape() as tape:
    tape.watch((weights, learning_rate))
    adapted = inner_loop(
        support_loss_fn, weights, support, batches, learning_rate, order=order
    )
    loss = query_loss_fn(adapted)
  gradients = tape.gradient(
      loss,
      (weights, learning_rate),
      unconnected_gradients=tf.UnconnectedGradients.ZERO,
  )
  return MetaGradient(loss, *gradients)


def outer_step(
    weights: Any, gradient: Any, learning_rate: float, *, fresh_adam: bool
) -> Any:
  """Moves weights along a gradient, by SGD or by an Adam that starts anew.

    w <- w - rate * G                       SGD
    w <- w - rate * G / (|G| + epsilon)     Adam

  as both moments of a single gradient, corrected for their bias, are G and its
  square.

  Args:
    weights: A structure of tensors.
    gradient: G, like `weights`.
    learning_rate: At least 0.
    fresh_adam: Whether it is Adam's first step, with epsilon 1e-8.

  Returns:
    The new weights.

  Source: Kingma and Ba 2015, "Adam", algorithm 1 at t = 1.
  """

  def step(w, g):
    if fresh_adam:
      g = g / (tf.abs(g) + _ADAM_EPSILON)
    return w - learning_rate * g

  return tf.nest.map_structure(step, weights, gradient)
