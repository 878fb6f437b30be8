"""Federated averaging, alone and with fine-tuning for a new group.

Clients train the whole model on their own examples and the server averages
what they return, weighted by their number of examples. A new group of clients
either starts this from random weights ("FedAvg" in FRL's tables), or from the
trained ones under a new head ("fine-tuning via FedAvg"): in both cases R rounds
and one global model for the group. A client, known or new, is tested with the
global model as it is, or after training it on its own examples.

Source: Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson and Blaise
Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629; as a
baseline: Park et al., "Few-Round Learning for Federated Learning", NeurIPS
2021, section 4.
Deviations: BUILD_NOTES.md, FedAvg.
"""

import dataclasses
from typing import Literal

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import few_round
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.learners import prototype_classifier
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedAvgConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients; its state starts anew every round.
    learning_rate: Of the clients in training.
    momentum: Of SGD, in [0, 1).
    epochs: E, local epochs of a round.
    batch_size: B, examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient.
    uniform: Clients count alike; otherwise by their number of examples.
    rounds: R, federated rounds of a new group, at least 1.
    deployment_learning_rate: Of a new group's clients, and of fine-tuning.
    deployment_batch_size: Of a new group's clients, and of fine-tuning.
    fine_tuning_epochs: Epochs that a client trains before it is tested, with
      fine-tuning.
    fine_tuning_steps: Steps of plain SGD in place of these epochs, with a curve
      of accuracy by steps; 0 for none.
    fine_tuning_decay: Factor of the rate every `fine_tuning_decay_steps` steps.
    fine_tuning_decay_steps: At least 1.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.1
  momentum: float = 0.0
  epochs: int = 1
  batch_size: int = 10
  weight_decay: float = 0.0
  uniform: bool = False
  rounds: int = 3
  deployment_learning_rate: float = 0.1
  deployment_batch_size: int = 10
  fine_tuning_epochs: int = 1
  fine_tuning_steps: int = 0
  fine_tuning_decay: float = 1.0
  fine_tuning_decay_steps: int = 5

  def __post_init__(self):
    config_checks.check_fields(self)
    for name in ('rounds', 'fine_tuning_decay_steps'):
      config_checks.check_at_least_one(self, name)
    if self.fine_tuning_steps:
      config_checks.check_at_least_one(self, 'deployment_batch_size')
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# McMahan et al. 2017: B = 10, E = 1, SGD; weights by number of examples.
PAPER = FedAvgConfig()
# FedRep's code, whose protocol other papers follow: SGD 0.01, momentum 0.5.
RELEASE = dataclasses.replace(
    PAPER, learning_rate=0.01, momentum=0.5, deployment_learning_rate=0.01
)
DEMO = PAPER  # Learns the embedded digits as it is.


def build_fed_avg(
    model: model_lib.Model,
    config: FedAvgConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds federated averaging of a linear classifier.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the weighted mean.
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `LearningProcess` on `<examples, salt>` client data.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  settings = _round_settings(config, config.learning_rate, config.batch_size)

  def client_update(weights, client):
    upload = few_round.client_round(
        classifier,
        settings,
        weights,
        classifier.no_prototypes(),
        client.examples,
        client.seed,
    )
    update = weights_lib.subtract(weights, upload.weights)
    return client_work.ClientOutput(update, upload.weight, upload.report)

  return composition.build_learning_process(
      lambda: classifier.initialize(composition.initial_seed(seed)),
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
  )


def _round_settings(config, learning_rate, batch_size):
  return few_round.RoundSettings(
      optimizer=optimizers.build_optimizer(
          config.optimizer, learning_rate, config.momentum
      ),
      batch_size=batch_size,
      num_epochs=config.epochs,
      weight_decay=config.weight_decay,
      uniform=config.uniform,
  )


def build_fine_tuning_group_personalizer(
    model: model_lib.Model, config: FedAvgConfig, *, way: int
) -> personalizer.GroupPersonalizer:
  """R rounds of FedAvg in the group, from the trained body and a new head.

  Args:
    model: The network.
    config: The configuration.
    way: Number of the group's classes.

  Returns:
    A `GroupPersonalizer`.
  """
  return few_round.build_group_personalizer(
      classifiers.LinearClassifier(model, way),
      _round_settings(
          config,
          config.deployment_learning_rate,
          config.deployment_batch_size,
      ),
      config.rounds,
  )


def build_from_scratch_group_personalizer(
    model: model_lib.Model, config: FedAvgConfig, *, way: int
) -> personalizer.GroupPersonalizer:
  """R rounds of FedAvg in the group, from random weights.

  Args:
    model: The network.
    config: The configuration.
    way: Number of the group's classes.

  Returns:
    A `GroupPersonalizer` that ignores the weights it is given.
  """
  classifier = classifiers.LinearClassifier(model, way)
  tuned = build_fine_tuning_group_personalizer(model, config, way=way)

  def adapt(weights, support, salts, seed):
    del weights  # A group from scratch has only its own examples.
    weights_seed, rounds_seed = tf.unstack(
        tf.random.experimental.stateless_split(seed)
    )
    return tuned.adapt(
        classifier.initialize(weights_seed), support, salts, rounds_seed
    )

  return personalizer.GroupPersonalizer(adapt, tuned.predict)


def build_global_client_personalizer(
    model: model_lib.Model, config: FedAvgConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client is tested with the global model as it is.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer`, for known and new clients alike, that learns nothing
    from the client's examples.
  """
  del config  # Nothing is trained.
  classifier = classifiers.LinearClassifier(model, num_classes)

  def start(weights, memory):
    del memory  # Clients keep none.
    return weights

  def adapt(weights, memory, examples, seed):
    del memory, examples, seed  # Nothing is trained.
    return weights

  def predict(weights, query):
    return classifier.predict(weights, classifier.no_prototypes(), query)

  return personalizer.ClientPersonalizer(start, adapt, predict)


def build_fine_tuning_client_personalizer(
    model: model_lib.Model, config: FedAvgConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client trains the global model on its own examples first.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer`, for known and new clients alike; with
    `config.fine_tuning_steps` it has a curve of that many points and one.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  none = build_global_client_personalizer(
      model, config, num_classes=num_classes
  )

  if config.fine_tuning_steps:
    settings = fine_tuning.FineTuning(
        num_steps=config.fine_tuning_steps,
        learning_rate=config.deployment_learning_rate,
        batch_size=config.deployment_batch_size,
        decay=config.fine_tuning_decay,
        decay_steps=config.fine_tuning_decay_steps,
    )
    return fine_tuning.build_classifier_personalizer(settings, classifier)

  def adapt(weights, memory, examples, seed):
    del memory  # Clients keep none.
    adapted, _ = local_sgd.local_sgd(
        classifier.loss,
        weights,
        examples,
        optimizers.build_optimizer(
            config.optimizer, config.deployment_learning_rate, config.momentum
        ),
        batch_size=config.deployment_batch_size or None,
        num_epochs=config.fine_tuning_epochs,
        seed=seed,
        weight_decay=config.weight_decay,
    )
    return adapted

  return personalizer.ClientPersonalizer(none.start, adapt, none.predict)


def build_proto_client_personalizer(
    model: model_lib.Model, config: FedAvgConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client puts its own class prototypes in the place of the trained head.

  Args:
    model: The network.
    config: Not used: prototypes have no hyperparameters.
    num_classes: Number of classes of the client's labels; they need not be
      those of training.

  Returns:
    A `ClientPersonalizer`.

  Source: Lim et al. (MetaVers), WACV 2024, table 3, "FedAvg-Proto".
  """
  del config
  return prototype_classifier.build_client_personalizer(
      model, num_classes=num_classes
  )
