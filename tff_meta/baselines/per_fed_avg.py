"""Per-FedAvg: federated averaging of a model that a gradient step personalizes.

Every client minimises, by some local steps, the loss that the model has after
one gradient step on the client's data; the server averages. The gradient of
that loss has a Hessian in it, which is taken exactly, as a difference of
gradients, or left out. A client is used after fine-tuning.

Source: Alireza Fallah, Aryan Mokhtari and Asuman Ozdaglar, "Personalized
Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, https://arxiv.org/abs/2002.07948.
Deviations: docs/algorithms/per_fed_avg.md.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import cyclic_batches
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class PerFedAvgConfig(configurations.FineTuned):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    variant: What becomes of the Hessian: `'first_order'` leaves it out,
      `'hessian_free'` takes a difference of gradients for its product with a
      vector, `'second_order'` the product itself.
    local_steps: tau, meta-steps of a client in a round.
    batch_size: Examples of a batch, at least 1; also of fine-tuning and
      prediction.
    inner_learning_rate: alpha, of the step inside the loss.
    outer_learning_rate: beta, of the meta-steps.
    hessian_free_delta: delta of the difference; read by `'hessian_free'` only.
  """

  variant: Literal['first_order', 'hessian_free', 'second_order'] = (
      'hessian_free'
  )
  local_steps: int = 10
  batch_size: int = 40
  inner_learning_rate: float = 0.01
  outer_learning_rate: float = 1e-3
  hessian_free_delta: float = 1e-3
  fine_tuning_steps: int = 1
  fine_tuning_decay: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'batch_size')
    if self.variant == 'hessian_free' and not self.hessian_free_delta:
      raise ValueError(
          'Expected `hessian_free_delta` above 0, found 0. Tip:'
          " variant='second_order' takes the product with the Hessian itself."
      )


# Fallah et al.: a single step at test, on the client's own data.
PAPER = PerFedAvgConfig()
# As a baseline in CAFeMe's code, there for CIFAR-10.
RELEASE = dataclasses.replace(
    PAPER,
    local_steps=5,
    batch_size=50,
    inner_learning_rate=0.05,
    fine_tuning_steps=50,
    fine_tuning_decay=0.8,
)
# Only for the demonstration: rates for the embedded digits.
DEMO = dataclasses.replace(
    PAPER,
    batch_size=10,
    inner_learning_rate=0.1,
    outer_learning_rate=0.03,
    fine_tuning_learning_rate=0.1,
)


def client_meta_gradient(
    loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
    config: PerFedAvgConfig,
    weights: Any,
    inner: episodes.Examples,
    outer: episodes.Examples,
    hessian: episodes.Examples,
) -> tuple[tf.Tensor, Any]:
  """An estimate of the gradient of `F(w) = f(w - alpha * grad f(w))`.

  w' = w - alpha * grad f(w; inner);  v = grad f(w'; outer)
  first_order:   v
  second_order:  v - alpha * hess f(w; hessian) v
  hessian_free:  v - alpha * (grad f(w + delta * v; hessian) -
                              grad f(w - delta * v; hessian)) / (2 * delta)

  With alpha = 0 all are the gradient of f. With one and the same batch
  second_order is the exact gradient of F.

  Args:
    loss_fn: f, from weights and a batch to a scalar.
    config: The configuration.
    weights: w, a structure of tensors.
    inner: The batch of the step inside.
    outer: The batch of the loss.
    hessian: The batch of the Hessian; not read in first order.

  Returns:
    The loss f(w'; outer) and the gradient, like the weights.

  Source: Fallah et al. 2020, algorithm 1 and section 5.
  """
  alpha = config.inner_learning_rate
  _, inner_gradient = _value_and_gradient(loss_fn, weights, inner)
  moved = weights_lib.subtract(
      weights, weights_lib.scale(inner_gradient, alpha)
  )
  loss, v = _value_and_gradient(loss_fn, moved, outer)
  if config.variant == 'first_order':
    return loss, v
  if config.variant == 'second_order':
    with tf.GradientTape() as tape:
      tape.watch(weights)
      _, gradient = _value_and_gradient(loss_fn, weights, hessian)
    product = tape.gradient(
        gradient,
        weights,
        output_gradients=v,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
  else:
    delta = config.hessian_free_delta
    shift = weights_lib.scale(v, delta)
    _, ahead = _value_and_gradient(
        loss_fn, weights_lib.add(weights, shift), hessian
    )
    _, behind = _value_and_gradient(
        loss_fn, weights_lib.subtract(weights, shift), hessian
    )
    difference = weights_lib.subtract(ahead, behind)
    product = weights_lib.scale(difference, 1 / (2 * delta))
  return loss, weights_lib.subtract(v, weights_lib.scale(product, alpha))


def _value_and_gradient(loss_fn, weights, batch):
  with tf.GradientTape() as tape:
    tape.watch(weights)
    loss = loss_fn(weights, batch)
  return loss, tape.gradient(
      loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )


def per_fed_avg(
    model: model_lib.Model, config: PerFedAvgConfig, num_classes: int
) -> method.Method:
  """Per-FedAvg; the loss it reports is that after the step inside.

  A client, known or new, fine-tunes the whole model, with a curve of
  `fine_tuning_steps + 1` points.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(weights, client):
    """Algorithm 1: tau steps `w <- w - beta * client_meta_gradient(w)`.

    Every step has three batches of its own, the next ones of a shuffled stream
    without end (`cyclic_batches.cyclic_minibatches`). Clients count alike.
    """
    num_examples = tf.size(client.examples.y)
    batches = cyclic_batches.cyclic_minibatches(
        num_examples, config.batch_size, 3 * config.local_steps, client.seed
    )

    def step(i, weights, report):
      inner, outer, hessian = (
          episodes.take(client.examples, batches, 3 * i + j) for j in range(3)
      )
      loss, gradient = client_meta_gradient(
          classifier.loss, config, weights, inner, outer, hessian
      )
      weights = weights_lib.subtract(
          weights, weights_lib.scale(gradient, config.outer_learning_rate)
      )
      num_outer = tf.cast(tf.size(outer.y), tf.float32)
      loss_sum = tf.cast(loss, tf.float32) * num_outer
      of_step = local_sgd.LocalReport(loss_sum, num_outer)
      return i + 1, weights, weights_lib.add(report, of_step)

    none = local_sgd.LocalReport(tf.constant(0.0), tf.constant(0.0))
    _, moved, report = tf.while_loop(
        lambda i, *_: i < config.local_steps,
        step,
        (tf.constant(0), weights, none),
    )
    return client_work.ClientOutput(
        weights_lib.subtract(weights, moved),
        local_sgd.client_weight(num_examples, uniform=True),
        report,
    )

  def client():
    return fine_tuning.build_classifier_personalizer(
        config.fine_tuning(), classifier
    )

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      known_client=client,
      new_client=client,
  )
