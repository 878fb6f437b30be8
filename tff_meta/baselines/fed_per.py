"""FedPer: the body is averaged, every client keeps its own head.

A client puts its own head onto the server's body, trains both together, keeps
the head and uploads the body. The head of the first participation is random and
common to all; it is a function of the run's seed, so it need not be anywhere. A
known client is tested with the server's body under its own head.

FedMeta-Per's experiments test FedPer differently: heads are uploaded too, the
server averages them, and that average is tested (`head_of_evaluation`). FedPer
with a pass of fine-tuning before the test is their FedPerMeta.

Source: Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh and Sunav
Choudhary, "Federated Learning with Personalization Layers", 2019,
https://arxiv.org/abs/1912.00818.
Deviations: BUILD_NOTES.md, FedPer.
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
from tff_meta.learners import personal_head
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedPerConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients; its state starts anew every round.
    learning_rate: Of body and head.
    momentum: Of SGD, in [0, 1).
    epochs: Local epochs of a round, on body and head together.
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient.
    uniform: Clients count alike; otherwise by their number of examples.
    head_of_evaluation: `'personal'`: heads never leave the clients;
      `'averaged'`: heads are uploaded and averaged as well. Clients still train
      their own, from the average in their first round, but are tested with the
      average.
    fine_tuning_epochs: Epochs on body and head together before a test; 0 is
      FedPer, 1 FedPerMeta.
    new_client_epochs: Epochs, before these, in which a new client gets itself a
      head when there is no averaged one; body and head together.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.01
  momentum: float = 0.0
  epochs: int = 4
  batch_size: int = 128
  weight_decay: float = 0.0
  uniform: bool = False
  head_of_evaluation: Literal['personal', 'averaged'] = 'personal'
  fine_tuning_epochs: int = 0
  new_client_epochs: int = 10

  def __post_init__(self):
    config_checks.check_fields(self)
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# As a public reproduction of Arivazhagan et al. has it: SGD, E = 4, B = 128.
PAPER = FedPerConfig()
# FedMeta-Per's code: Adam, one epoch, B = 32; 1e-4 on CIFAR-10 (5e-6 in its
# runs on MNIST); the averaged head is tested.
RELEASE = dataclasses.replace(
    PAPER,
    optimizer='adam',
    learning_rate=1e-4,
    epochs=1,
    batch_size=32,
    head_of_evaluation='averaged',
)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.3, epochs=1, batch_size=16)


def memory_flow(config: FedPerConfig) -> dict[str, str]:
  """What a client's memory reaches; see `AlgorithmSpec.memory_flow`."""
  # Where heads are averaged, a client's own is where its upload begins.
  is_sent = config.head_of_evaluation == 'averaged'
  return {'update': 'itself' if is_sent else 'training', 'loss': 'itself'}


def build_fed_per(
    model: model_lib.Model,
    config: FedPerConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> composition.StatefulLearningProcess:
  """Builds FedPer.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the weighted mean.
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `StatefulLearningProcess` whose clients' memory is their head.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def initial_weights():
    return classifier.initialize(composition.initial_seed(seed))

  def client_update(weights, client):
    local = _with_own_head(config, weights, client.memory)
    trained, report = composition.train_epochs(
        classifier.loss,
        config,
        local,
        client.examples,
        client.seed,
        config.epochs,
    )
    return client_work.ClientOutput(
        weights_lib.subtract(weights, _server_part(config, trained)),
        local_sgd.client_weight(tf.size(client.examples.y), config.uniform),
        report,
        memory=trained['head'],
    )

  return composition.build_learning_process(
      lambda: _server_part(config, initial_weights()),
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=lambda: initial_weights()['head'],
  )


def _server_part(config, weights):
  """What the server averages of a client's model."""
  if config.head_of_evaluation == 'averaged':
    return weights
  return personal_head.split(weights)[0]


def _with_own_head(config, weights, memory):
  """The server's body under the head that the client trains."""
  if config.head_of_evaluation == 'averaged':
    return personal_head.merge(weights, memory.value_or(weights['head']))
  return personal_head.merge(weights, memory.value)


def _build_client(classifier, config, start, num_epochs):
  """A client that trains for some epochs, from `start(weights, memory)`."""

  def train(weights, examples, seed):
    trained, _ = composition.train_epochs(
        classifier.loss, config, weights, examples, seed, num_epochs
    )
    return trained

  return classifiers.build_client_personalizer(classifier, start, train)


def build_fed_per_known_client(
    model: model_lib.Model, config: FedPerConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A known client has the server's body under its own or the averaged head.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that trains `config.fine_tuning_epochs`.
  """

  def start(weights, memory):
    if config.head_of_evaluation == 'averaged':
      return weights
    return personal_head.merge(weights, memory.value)

  return _build_client(
      classifiers.LinearClassifier(model, num_classes),
      config,
      start,
      config.fine_tuning_epochs,
  )


def build_fed_per_new_client(
    model: model_lib.Model, config: FedPerConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A new client has the server's body under the averaged or a random head.

  With the random one it first trains as clients do in training, for
  `config.new_client_epochs`. (The paper does not treat new clients.)

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that uses no memory.
  """
  averaged = config.head_of_evaluation == 'averaged'

  def start(weights, memory):
    del memory  # Training never saw the client.
    if averaged:
      return weights
    head = personal_head.unseen_head(model, num_classes)
    return personal_head.merge(weights, head)

  new_client_epochs = 0 if averaged else config.new_client_epochs
  return _build_client(
      classifiers.LinearClassifier(model, num_classes),
      config,
      start,
      new_client_epochs + config.fine_tuning_epochs,
  )
