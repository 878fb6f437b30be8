"""APFL: a client's model is a mixture of the server's and one of its own.

A client trains the server's model w on its loss, as in federated averaging, and
with every step also a model v of its own, on the loss of the mixture
`alpha * v + (1 - alpha) * w`; v, and alpha where it is adaptive, stay with the
client. A known client uses the mixture with the server's model of the time; one
that was never sampled uses the server's model.

Both are trained by one optimizer on the sum of both losses, the mixture's as a
function of v (and alpha) only: the gradients are those of Algorithm 1, that of
v has the factor alpha, that of alpha is `<v - w, gradient of the mixture>`.

Source: Yuyang Deng, Mohammad Mahdi Kamani and Mehrdad Mahdavi, "Adaptive
Personalized Federated Learning", 2020, https://arxiv.org/abs/2003.13461,
Algorithm 1.
Deviations: BUILD_NOTES.md, APFL.
"""

import collections
import dataclasses
from typing import Literal

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import few_round
from tff_meta.learners import local_sgd
from tff_meta.learners import personal_head
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class ApflConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of both models; its state starts anew every round.
    learning_rate: Of both models, and of an adaptive alpha.
    momentum: Of SGD, in [0, 1); an adaptive alpha has it, too.
    epochs: Local epochs of a round.
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient, of both models.
    mixing: alpha, the share of the client's own model, in [0, 1]; with 0 it is
      federated averaging, with 1 the own models are those of local training.
    adaptive: Whether clients learn alpha, from `mixing` on; after every round
      it is clipped to [0, 1].
    uniform: Clients count alike; otherwise by their number of examples.
    new_client_epochs: Epochs of both models in which a new client gets itself
      one, beginning with the server's.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.01
  momentum: float = 0.5
  epochs: int = 10
  batch_size: int = 10
  weight_decay: float = 1e-4
  mixing: float = 0.75
  adaptive: bool = False
  uniform: bool = False
  new_client_epochs: int = 10

  def __post_init__(self):
    config_checks.check_fields(self)
    if self.mixing > 1:
      raise ValueError(f'Expected `mixing` in [0, 1], found {self.mixing}.')
    if self.adaptive and self.weight_decay:
      raise ValueError(
          'Expected no `weight_decay` where `adaptive` is True, as alpha would'
          f' decay, too, found {self.weight_decay}.'
      )
    composition.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# FedRep's code: a constant alpha, ten epochs of SGD with momentum, B = 10. The
# authors' own settings are not at hand.
PAPER = ApflConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.1, epochs=1, batch_size=16)


def build_apfl(
    model: model_lib.Model,
    config: ApflConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> composition.StatefulLearningProcess:
  """Builds APFL.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the weighted mean.
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `StatefulLearningProcess`, whose loss is the sum of that of the server's
    model and that of the mixture. A client's memory is `OrderedDict(own,
    mixing)`: v, at first the run's initial weights, and alpha, float32 scalar.
  """
  classifier = few_round.LinearClassifier(model, num_classes)

  def initial_weights():
    return classifier.initialize(composition.initial_seed(seed))

  def client_update(weights, client):
    trained, kept, report = _train(
        classifier,
        config,
        weights,
        client.memory.value,
        client.examples,
        client.seed,
        config.epochs,
    )
    return client_work.ClientOutput(
        weights_lib.subtract(weights, trained),
        few_round.client_weight(tf.size(client.examples.y), config.uniform),
        report,
        memory=kept,
    )

  return composition.build_learning_process(
      initial_weights,
      model.input_shape,
      client_update,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=lambda: _first_memory(config, initial_weights()),
  )


def _first_memory(config, weights):
  """What a client keeps that has not trained: these weights as its own."""
  mixing = tf.constant(config.mixing, tf.float32)
  return collections.OrderedDict(own=weights, mixing=mixing)


def _mixture(kept, weights):
  """`alpha * v + (1 - alpha) * w`."""
  return weights_lib.add(
      weights_lib.scale(kept['own'], kept['mixing']),
      weights_lib.scale(weights, 1 - kept['mixing']),
  )


def _train(classifier, config, weights, kept, examples, seed, num_epochs):
  """Epochs on both models: the server's, what is kept, and a `LocalReport`."""

  def loss(both, batch):
    fixed = tf.nest.map_structure(tf.stop_gradient, both['server'])
    return classifier.loss(both['server'], batch) + classifier.loss(
        _mixture(both, fixed), batch
    )

  # A new client's own model is the server's: two tensors, or each of them would
  # get the gradients of both.
  kept = tf.nest.map_structure(tf.identity, kept)
  learned, report = local_sgd.local_sgd(
      loss,
      collections.OrderedDict(server=weights, **kept),
      examples,
      composition.build_optimizer(
          config.optimizer, config.learning_rate, config.momentum
      ),
      batch_size=config.batch_size or None,
      num_epochs=num_epochs,
      seed=seed,
      weight_decay=config.weight_decay,
      trainable=('server', 'own', *(['mixing'] if config.adaptive else [])),
  )
  kept = collections.OrderedDict(
      own=learned['own'], mixing=tf.clip_by_value(learned['mixing'], 0.0, 1.0)
  )
  return learned['server'], kept, report


def build_apfl_known_client(
    model: model_lib.Model, config: ApflConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A known client has its mixture, the server's model if never sampled.

  Args:
    model: The network.
    config: Not used: nothing is trained.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that trains nothing.
  """
  del config

  def start(weights, memory):
    mixture = memory._replace(value=_mixture(memory.value, weights))
    return mixture.value_or(weights)

  return personal_head.build_client_personalizer(
      few_round.LinearClassifier(model, num_classes),
      start,
      lambda own, examples, seed: own,
  )


def build_apfl_new_client(
    model: model_lib.Model, config: ApflConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A new client trains as in a round and mixes what results.

  Its mixture has the server's model as it was, not as the client trained it.
  (The paper does not treat new clients.)

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that uses no memory.
  """
  classifier = few_round.LinearClassifier(model, num_classes)

  def train(weights, examples, seed):
    _, kept, _ = _train(
        classifier,
        config,
        weights,
        _first_memory(config, weights),
        examples,
        seed,
        config.new_client_epochs,
    )
    return _mixture(kept, weights)

  return personal_head.build_client_personalizer(
      classifier, lambda weights, memory: weights, train
  )
