"""Local training: every client on its own, nothing is communicated.

All clients start from the same random weights. In every round it is sampled for
a client trains its model further on its own examples and keeps it; what it
uploads is zero, and the server's weights stay the initial ones. How often a
client was sampled decides how long it trains: one round with all clients is
`epochs` epochs for each of them.

Source: "Local" in FedEC's Table 2 and in MetaVers' tables. Neither gives a
number of epochs.
Deviations: BUILD_NOTES.md, Local.
"""

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
class LocalConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients; its state starts anew every round.
    learning_rate: Of the clients.
    momentum: Of SGD, in [0, 1).
    weight_decay: Coupled L2 coefficient.
    epochs: Local epochs of a round.
    batch_size: Examples of a minibatch; 0 is the whole set.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.01
  momentum: float = 0.5
  weight_decay: float = 0.0
  epochs: int = 10
  batch_size: int = 10

  def __post_init__(self):
    config_checks.check_fields(self)
    composition.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# Not in the papers; FedRep's code, whose protocol FedEC follows, trains its
# local models for 10 epochs with these.
PAPER = LocalConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.1, epochs=2)


def build_local(
    model: model_lib.Model,
    config: LocalConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
) -> composition.StatefulLearningProcess:
  """Builds local training.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the clients' zeros; by default the weighted mean.

  Returns:
    A `StatefulLearningProcess`; a client's memory is its model.
  """
  classifier = few_round.LinearClassifier(model, num_classes)

  def initialize():
    return classifier.initialize(composition.initial_seed(seed))

  def client_update(weights, client):
    trained, report = _train(
        classifier,
        config,
        client.memory.value_or(weights),
        client.examples,
        client.seed,
    )
    return client_work.ClientOutput(
        update=weights_lib.zeros_like(weights),
        update_weight=few_round.client_weight(
            tf.size(client.examples.y), uniform=True
        ),
        report=report,
        memory=trained,
    )

  return composition.build_learning_process(
      initialize,
      model.input_shape,
      client_update,
      seed=seed,
      aggregator=aggregator,
      memory=lambda: weights_lib.zeros_like(initialize()),
  )


def _train(classifier, config, weights, examples, seed):
  """Epochs on all parameters: the weights and a `LocalReport`."""
  return local_sgd.local_sgd(
      lambda w, batch: classifier.loss(w, batch, classifier.no_prototypes()),
      weights,
      examples,
      composition.build_optimizer(
          config.optimizer, config.learning_rate, config.momentum
      ),
      batch_size=config.batch_size or None,
      num_epochs=config.epochs,
      seed=seed,
      weight_decay=config.weight_decay,
  )


def build_local_known_client(
    model: model_lib.Model, config: LocalConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A known client uses its model, the initial one if it was never sampled.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that trains nothing more.
  """
  del config  # Nothing is trained.
  return personal_head.build_client_personalizer(
      few_round.LinearClassifier(model, num_classes),
      lambda weights, memory: memory.value_or(weights),
      lambda own, examples, seed: own,
  )


def build_local_new_client(
    model: model_lib.Model, config: LocalConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A new client trains the initial weights, as in a first round.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer`.
  """
  classifier = few_round.LinearClassifier(model, num_classes)
  return personal_head.build_client_personalizer(
      classifier,
      lambda weights, memory: weights,
      lambda w, examples, seed: _train(classifier, config, w, examples, seed)[
          0
      ],
  )
