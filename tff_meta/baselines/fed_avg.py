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
Deviations: docs/algorithms/fed_avg.md.
"""

import dataclasses

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import method
from tff_meta import optimizers
from tff_meta.learners import classifiers
from tff_meta.learners import few_round
from tff_meta.learners import fine_tuning
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedAvgConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    rounds: R, federated rounds of a new group, at least 1.
    deployment_learning_rate: Of a new group's clients, and of fine-tuning.
    deployment_batch_size: Of a new group's clients, and of fine-tuning.
    fine_tuning_epochs: Epochs that a client trains before it is tested, of
      `fed_avg_ft` alone: clients of the others take no step.
    fine_tuning_steps: Steps of plain SGD in place of these epochs, with a curve
      of accuracy by steps; 0 for the epochs. Of `fed_avg_ft` alone.
    fine_tuning_decay: Factor of the rate every `fine_tuning_decay_steps` steps.
    fine_tuning_decay_steps: At least 1.
  """

  rounds: int = 3
  deployment_learning_rate: float = 0.1
  deployment_batch_size: int = 10
  fine_tuning_epochs: int = 1
  fine_tuning_steps: int = 0
  fine_tuning_decay: float = 1.0
  fine_tuning_decay_steps: int = 5

  def __post_init__(self):
    super().__post_init__()
    for name in ('rounds', 'fine_tuning_decay_steps'):
      config_checks.check_at_least_one(self, name)
    if self.fine_tuning_steps:
      config_checks.check_at_least_one(self, 'deployment_batch_size')


# McMahan et al. 2017: B = 10, E = 1, SGD; weights by number of examples.
PAPER = FedAvgConfig()
# FedRep's code, whose protocol other papers follow: SGD 0.01, momentum 0.5.
RELEASE = dataclasses.replace(
    PAPER, learning_rate=0.01, momentum=0.5, deployment_learning_rate=0.01
)
DEMO = PAPER  # Learns the embedded digits as it is.


def fed_avg(
    model: model_lib.Model, config: FedAvgConfig, num_classes: int
) -> method.Method:
  """Federated averaging of a linear classifier.

  Clients, known or new, are tested with the global model as it is. A new group
  runs R rounds from random weights.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(weights, client):
    trained, report = config.train(
        classifier.loss, weights, client.examples, client.seed
    )
    return config.output(weights, trained, report, client.examples)

  def client():
    return classifiers.build_client_personalizer(classifier)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      known_client=client,
      new_client=client,
      group=lambda: _from_scratch(
          classifier, _group_rounds(classifier, config)
      ),
  )


def fed_avg_ft(
    model: model_lib.Model, config: FedAvgConfig, num_classes: int
) -> method.Method:
  """Federated averaging, then fine-tuning.

  A client, known or new, first trains the global model on its own examples;
  with `config.fine_tuning_steps` it has a curve of that many points and one. A
  new group runs R rounds from the trained body and a new head.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client():
    if config.fine_tuning_steps:
      settings = fine_tuning.FineTuning(
          num_steps=config.fine_tuning_steps,
          learning_rate=config.deployment_learning_rate,
          batch_size=config.deployment_batch_size,
          decay=config.fine_tuning_decay,
          decay_steps=config.fine_tuning_decay_steps,
      )
      return fine_tuning.build_classifier_personalizer(settings, classifier)

    def train(weights, examples, seed):
      deployment = dataclasses.replace(
          config,
          learning_rate=config.deployment_learning_rate,
          batch_size=config.deployment_batch_size,
          epochs=config.fine_tuning_epochs,
      )
      return deployment.train(classifier.loss, weights, examples, seed)[0]

    return classifiers.build_client_personalizer(classifier, train=train)

  return dataclasses.replace(
      fed_avg(model, config, num_classes),
      known_client=client,
      new_client=client,
      group=lambda: _group_rounds(classifier, config),
  )


def fed_avg_own(
    model: model_lib.Model, config: FedAvgConfig, num_classes: int
) -> method.Method:
  """Federated averaging, then the global model among a client's own classes.

  A client, known or new, takes no step. It leaves out classes of which it has
  no example among those that it could adapt on, as prototypes do and, in
  effect, a head that has trained on them.
  """

  def client():
    classifier = classifiers.LinearClassifier(model, num_classes)
    return personalizer.among_own_classes(
        classifiers.build_client_personalizer(classifier), num_classes
    )

  return dataclasses.replace(
      fed_avg(model, config, num_classes),
      known_client=client,
      new_client=client,
  )


def fed_avg_proto(
    model: model_lib.Model, config: FedAvgConfig, num_classes: int
) -> method.Method:
  """Federated averaging, then class prototypes in the place of the head.

  Source: Lim et al. (MetaVers), WACV 2024, table 3, "FedAvg-Proto".
  """
  return method.with_prototypes(fed_avg(model, config, num_classes), model)


def _group_rounds(
    classifier: classifiers.LinearClassifier, config: FedAvgConfig
) -> personalizer.GroupPersonalizer:
  """R rounds in a group, from the trained body and a new head."""
  settings = few_round.RoundSettings(
      optimizer=optimizers.build_optimizer(
          config.optimizer, config.deployment_learning_rate, config.momentum
      ),
      batch_size=config.deployment_batch_size,
      num_epochs=config.epochs,
      weight_decay=config.weight_decay,
      uniform=config.uniform,
  )
  return few_round.build_group_personalizer(classifier, settings, config.rounds)


def _from_scratch(
    classifier: classifiers.LinearClassifier,
    rounds: personalizer.GroupPersonalizer,
) -> personalizer.GroupPersonalizer:
  """The same from random weights, whatever was trained."""

  def adapt(weights, support, salts, seed):
    del weights  # A group from scratch has only its own examples.
    weights_seed, rounds_seed = tf.unstack(
        tf.random.experimental.stateless_split(seed)
    )
    return rounds.adapt(
        classifier.initialize(weights_seed), support, salts, rounds_seed
    )

  return rounds._replace(adapt=adapt)
