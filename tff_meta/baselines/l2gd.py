"""L2GD: own models, pulled towards their average when a coin says so.

A client keeps a model x_i of its own. The n clients minimize

  1/n sum_i f_i(x_i) + lambda / (2 n) sum_i ||x_i - xbar||^2,

xbar the average of the models, by steps on one of the two terms at a time: a
coin that all share says which. With probability 1 - p everybody takes a step on
its own loss, with probability p an averaging step, which pulls it to xbar.

Averaging steps leave xbar as it is, so that nothing is communicated between
equal sides of the coin. Here a round is a run of averaging steps and the run of
local steps that follows: a client downloads xbar, pulls its model towards it as
often as the coin says, trains, and uploads the model, and the server's average
is the next xbar. With all clients in every round that is Algorithm 1; with some
of them, xbar is the average of those of the last round, and the others' models
stay as they are. A known client uses its model, one that was never sampled the
server's.

Source: Filip Hanzely and Peter Richtarik, "Federated Learning of a Mixture of
Global and Local Models", 2020, https://arxiv.org/abs/2002.05516, Algorithm 1.
Deviations: docs/algorithms/l2gd.md.
"""

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

from tff_meta import configurations
from tff_meta import method
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.models import model as model_lib

# The coin's seeds are apart from those of rounds and of initial weights.
_COIN_SEED = 3


@dataclasses.dataclass(frozen=True)
class L2gdConfig(configurations.Configuration):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    learning_rate: eta = alpha / (n (1 - p)), of the local steps, where alpha is
      the paper's step size.
    momentum: Of SGD, in [0, 1); its state starts anew with every local step.
    weight_decay: Coupled L2 coefficient.
    epochs: Epochs that make a local step.
    batch_size: Examples of a minibatch; 0 is the whole set, where one epoch is
      the gradient step of Algorithm 1.
    averaging_probability: p, from 1e-4 to 1 - 1e-4. A round has 1 / (1 - p)
      averaging steps and 1 / p local ones on average.
    penalty_weight: lambda; with 0 clients train alone.
    new_client_epochs: Epochs in which a new client trains the server's model.
  """

  learning_rate: float = 0.1
  momentum: float = 0.0
  weight_decay: float = 0.0
  epochs: int = 1
  batch_size: int = 0
  averaging_probability: float = 0.1
  penalty_weight: float = 0.5
  new_client_epochs: int = 10

  def __post_init__(self):
    super().__post_init__()
    if not 1e-4 <= self.averaging_probability <= 1 - 1e-4:
      raise ValueError(
          'Expected `averaging_probability` from 0.0001 to 0.9999, found'
          f' {self.averaging_probability}.'
      )
    optimizers.build_optimizer('sgd', self.learning_rate, self.momentum)
    if self.pull > 1:
      raise ValueError(
          'Expected an averaging step, `learning_rate` * `penalty_weight` *'
          ' (1 - p) / p with p = `averaging_probability`, of at most 1, found'
          f' {self.learning_rate} * {self.penalty_weight} *'
          f' (1 - {self.averaging_probability}) / {self.averaging_probability}'
          f' = {self.pull:g}: models would go beyond the average.'
      )

  @property
  def pull(self) -> float:
    """The share of the way to xbar that an averaging step goes.

    alpha lambda / (n p) = eta lambda (1 - p) / p.
    """
    p = self.averaging_probability
    return self.learning_rate * self.penalty_weight * (1 - p) / p


# Algorithm 1 itself. The numbers are ours: p is near lambda / (L + lambda), at
# which the paper's bound on alpha is largest, with eta = 1 / (2 L) for L = 5;
# an averaging step then goes nearly half of the way.
PAPER = L2gdConfig()
# FedRep's code, which has it as a baseline: alpha = 1 with n = 100, p = 0.9, a
# local step of ten epochs of minibatches. It pulls by eta * 0.5, not by
# eta * 0.5 * (1 - p) / p, so that its 0.5 is a lambda of 4.5.
RELEASE = dataclasses.replace(
    PAPER,
    momentum=0.5,
    weight_decay=1e-4,
    epochs=10,
    batch_size=10,
    averaging_probability=0.9,
    penalty_weight=4.5,
)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.03, batch_size=16)


class RoundSteps(NamedTuple):
  """How often the coin falls on either side in a round.

  Attributes:
    averaging: Averaging steps, int32 scalar of at least 1.
    local: Local steps after them, int32 scalar of at least 1.
  """

  averaging: tf.Tensor
  local: tf.Tensor


def draw_steps(config: L2gdConfig, seed: tf.Tensor) -> RoundSteps:
  """Tosses the coin of a round until it has fallen on both sides.

    P(averaging = k) = p^(k - 1) (1 - p),  P(local = k) = (1 - p)^(k - 1) p

  (Where the coin first falls on the local side, the first round has averaging
  steps nevertheless, which do nothing: all models are the same.)

  Args:
    config: The configuration.
    seed: Of the round, int32 `[2]`.

  Returns:
    The lengths of the two runs.
  """
  p = config.averaging_probability
  # A number of (0, 1] is at most q^k, for k more steps, with probability q^k.
  uniform = 1 - tf.random.stateless_uniform([2], seed, dtype=tf.float64)
  more = tf.math.log(uniform) / [math.log(p), math.log1p(-p)]
  averaging, local = tf.unstack(1 + tf.cast(tf.floor(more), tf.int32))
  return RoundSteps(averaging, local)


def l2gd(
    model: model_lib.Model, config: L2gdConfig, num_classes: int
) -> method.Method:
  """L2GD, whose server's model is xbar; clients count alike.

  A client's memory is its own model, at first the initial weights, and what it
  uploads. A known client has it, the server's model if it was never sampled. A
  new client trains the server's model. (The paper does not treat new clients.)
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def train(num_epochs, weights, examples, seed):
    return local_sgd.local_sgd(
        classifier.loss,
        weights,
        examples,
        optimizers.build_optimizer(
            'sgd', config.learning_rate, config.momentum
        ),
        batch_size=config.batch_size or None,
        num_epochs=num_epochs,
        seed=seed,
        weight_decay=config.weight_decay,
    )

  def pulled(own, average, num_steps):
    """Averaging steps: after k of them `(1 - pull)^k` of the way is left."""
    left = tf.pow(1.0 - config.pull, tf.cast(num_steps, tf.float32))
    way = weights_lib.subtract(average, own)
    return weights_lib.add(own, weights_lib.scale(way, 1 - left))

  def local_steps(weights, client):
    """Local steps, each with an order of its own."""

    def step(i, weights, report):
      own_seed = tf.random.experimental.stateless_fold_in(client.seed, i)
      weights, seen = train(config.epochs, weights, client.examples, own_seed)
      return i + 1, weights, weights_lib.add(report, seen)

    nothing = local_sgd.LocalReport(tf.constant(0.0), tf.constant(0.0))
    _, weights, report = tf.while_loop(
        lambda i, *_: i < client.message.local,
        step,
        (tf.constant(0), weights, nothing),
    )
    return weights, report

  def client_update(weights, client):
    start = pulled(client.memory.value, weights, client.message.averaging)
    trained, report = local_steps(start, client)
    return client_work.ClientOutput(
        weights_lib.subtract(weights, trained),
        local_sgd.client_weight(tf.size(client.examples.y), uniform=True),
        report,
        memory=trained,
    )

  def coin(seed):
    return client_work.rounds_done(
        lambda round_num: draw_steps(
            config,
            tf.random.experimental.stateless_fold_in(
                tf.constant([_COIN_SEED, seed], tf.int32), round_num
            ),
        )
    )

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=classifier.initialize,
      state=coin,
      # A client uploads its own model.
      memory_reaches={'update': 'itself', 'loss': 'itself'},
      known_client=lambda: classifiers.build_client_personalizer(
          classifier, lambda weights, memory: memory.value_or(weights)
      ),
      new_client=lambda: classifiers.build_client_personalizer(
          classifier,
          train=lambda *client: train(config.new_client_epochs, *client)[0],
      ),
  )
