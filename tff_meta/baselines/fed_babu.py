"""FedBABU: the body is trained and averaged under a head that never learns.

All clients have the same random head throughout the federation: they train the
body only and the server averages the bodies. The head learns at the end, when a
client fine-tunes the model to its own examples before it is tested. Without
heads ("FedBABU-Proto" in MetaVers), a client classifies by the class prototypes
of the trained body.

Source: Jaehoon Oh, SangMook Kim and Se-Young Yun, "FedBABU: Towards Enhanced
Representation for Federated Image Classification", ICLR 2022,
https://arxiv.org/abs/2106.06042; ten steps of fine-tuning and prototypes: Lim
et al. (MetaVers), tables 2 and 3.
Deviations: BUILD_NOTES.md, FedBABU.
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
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.learners import prototype_classifier
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedBabuConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients; its state starts anew every round.
    learning_rate: Of the body in training, in the first rounds.
    decay_rounds: T, the rounds of the whole training: the rate is a tenth after
      half of them and a hundredth after three quarters (rounded up). 0 keeps
      it.
    momentum: Of SGD, in [0, 1).
    epochs: Local epochs of a round, on the body.
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient, of the parts that learn.
    uniform: Clients count alike; otherwise by their number of examples.
    fine_tuned: What a client fine-tunes before it is tested.
    fine_tuning_learning_rate: Then.
    fine_tuning_epochs: Then; without a test, 0.
    fine_tuning_batch_size: Then; 0 is the whole set, so that an epoch is one
      step.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.1
  decay_rounds: int = 0
  momentum: float = 0.9
  epochs: int = 4
  batch_size: int = 50
  weight_decay: float = 0.0
  uniform: bool = True
  fine_tuned: Literal['all', 'body', 'head'] = 'all'
  fine_tuning_learning_rate: float = 0.1
  fine_tuning_epochs: int = 10
  fine_tuning_batch_size: int = 0

  def __post_init__(self):
    config_checks.check_fields(self)
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# As public reproductions have it: SGD 0.1, momentum 0.9, B = 50, E = 4. Ten
# steps of fine-tuning: MetaVers.
PAPER = FedBabuConfig()
# FedBABU's own fine-tuning: epochs of minibatches.
RELEASE = dataclasses.replace(
    PAPER, fine_tuning_epochs=5, fine_tuning_batch_size=50
)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, epochs=1, batch_size=16)


def build_fed_babu(
    model: model_lib.Model,
    config: FedBabuConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds FedBABU.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the weighted mean.
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `LearningProcess` whose head is the same in all rounds.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(weights, client):
    trained, report = local_sgd.local_sgd(
        classifier.loss,
        weights,
        client.examples,
        optimizers.build_optimizer(
            config.optimizer, _rate(config, client.message), config.momentum
        ),
        batch_size=config.batch_size or None,
        num_epochs=config.epochs,
        seed=client.seed,
        weight_decay=config.weight_decay,
        trainable=('body',),
    )
    return client_work.ClientOutput(
        weights_lib.subtract(weights, trained),
        local_sgd.client_weight(tf.size(client.examples.y), config.uniform),
        report,
    )

  return composition.build_learning_process(
      lambda: classifier.initialize(composition.initial_seed(seed)),
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      state=_rounds_done() if config.decay_rounds else None,
  )


def _rounds_done() -> client_work.ClientWorkState:
  """The server counts the rounds and tells the clients."""
  return client_work.ClientWorkState(
      lambda: tf.constant(0),
      lambda rounds_done: rounds_done,
      lambda rounds_done, _: rounds_done + 1,
  )


def _rate(config, rounds_done):
  """The body's rate: a tenth of it from T/2 on, a hundredth from 3T/4 on."""
  if not config.decay_rounds:
    return config.learning_rate
  past_half = 2 * rounds_done >= config.decay_rounds
  past_three_quarters = 4 * rounds_done >= 3 * config.decay_rounds
  factor = tf.where(past_half, 0.1, 1.0) * tf.where(
      past_three_quarters, 0.1, 1.0
  )
  return config.learning_rate * factor


def build_fed_babu_client(
    model: model_lib.Model, config: FedBabuConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client, known or new, fine-tunes the server's model.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that uses no memory.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def start(weights, memory):
    del memory  # Clients keep nothing.
    return weights

  def train(weights, examples, seed):
    tuned, _ = local_sgd.local_sgd(
        classifier.loss,
        weights,
        examples,
        optimizers.build_optimizer(
            config.optimizer, config.fine_tuning_learning_rate, config.momentum
        ),
        batch_size=config.fine_tuning_batch_size or None,
        num_epochs=config.fine_tuning_epochs,
        seed=seed,
        weight_decay=config.weight_decay,
        trainable=None if config.fine_tuned == 'all' else (config.fine_tuned,),
    )
    return tuned

  return classifiers.build_client_personalizer(classifier, start, train)


def build_fed_babu_proto_client(
    model: model_lib.Model, config: FedBabuConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """FedBABU-Proto: the nearest class prototype of the server's body.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the client's labels, known or new.

  Returns:
    A `ClientPersonalizer` that trains nothing and uses no memory.
  """
  del config  # Nothing is trained.
  return prototype_classifier.build_client_personalizer(
      model, num_classes=num_classes
  )
