"""LG-FedAvg: every client keeps its own first layers, the last are averaged.

It is FedPer the other way round: a client puts the server's last dense layers
onto its own layers before them, trains all, keeps its own and uploads the last
ones. A known client is tested with its own layers under the server's.

Both the authors and MetaVers start from a model of federated averaging:
`averaged_rounds` are rounds in which all layers are averaged, after which every
client has the server's first layers to begin with. (What is uploaded of these
layers afterwards is zero, as everybody's update has one type.)

Source: Paul Pu Liang, Terrance Liu, Liu Ziyin, Ruslan Salakhutdinov and
Louis-Philippe Morency, "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", 2020, https://arxiv.org/abs/2001.01523.
Deviations: BUILD_NOTES.md, LG-FedAvg.
"""

import collections
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
from tff_meta.learners import personal_layers
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class LgFedAvgConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients; its state starts anew every round.
    learning_rate: Of all layers.
    momentum: Of SGD, in [0, 1).
    epochs: Local epochs of a round, on all layers together.
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient.
    uniform: Clients count alike; otherwise by their number of examples.
    shared_layers: How many dense layers, counted from the output, are averaged;
      at least 1, the classifier.
    averaged_rounds: Rounds at the beginning in which all layers are averaged.
    new_client_epochs: Epochs in which a new client trains the server's model;
      its first layers are those of the averaged rounds, or the initial ones.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.1
  momentum: float = 0.5
  epochs: int = 1
  batch_size: int = 50
  weight_decay: float = 0.0
  uniform: bool = True
  shared_layers: int = 1
  averaged_rounds: int = 0
  new_client_epochs: int = 10

  def __post_init__(self):
    config_checks.check_fields(self)
    config_checks.check_at_least_one(self, 'shared_layers')
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# The authors' code on CIFAR-10: B = 50, one epoch, SGD 0.1 with momentum 0.5,
# where clients count alike. FedBABU's code averages the classifier alone, which
# every network here has.
PAPER = LgFedAvgConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, batch_size=16, averaged_rounds=100)


def memory_flow(config: LgFedAvgConfig) -> dict[str, str]:
  """What a client's memory reaches; see `AlgorithmSpec.memory_flow`."""
  del config
  return {'update': 'training', 'loss': 'itself'}


def build_lg_fed_avg(
    model: model_lib.Model,
    config: LgFedAvgConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> composition.StatefulLearningProcess:
  """Builds LG-FedAvg.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the weighted mean.
    server_optimizer: By default SGD of rate 1, the plain average. One with a
      memory, as of momentum, goes on moving the server's first layers after the
      averaged rounds.

  Returns:
    A `StatefulLearningProcess`. A client's memory is `OrderedDict(layers,
    num_rounds)`: its first layers, and the rounds since the averaged ones that
    it has taken part in, int32. Before the first of these it works with the
    server's layers.

  Raises:
    ValueError: The network has fewer dense layers than `shared_layers`, or no
      other.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  shared = _shared_parameters(model, config, num_classes)

  def initial_weights():
    return classifier.initialize(composition.initial_seed(seed))

  def initial_memory():
    return collections.OrderedDict(
        layers=personal_layers.split(initial_weights(), shared)[0],
        num_rounds=tf.constant(0),
    )

  def client_update(weights, client):
    is_local = tf.cast(client.message >= config.averaged_rounds, tf.int32)
    # In averaged rounds nobody has layers of its own, whatever it remembers.
    num_rounds = client.memory.value['num_rounds'] * is_local
    local = _with_own_layers(
        weights, shared, client.memory.value['layers'], num_rounds
    )
    trained, report = composition.train_epochs(
        classifier.loss,
        config,
        local,
        client.examples,
        client.seed,
        config.epochs,
    )
    layers, last = personal_layers.split(
        weights_lib.subtract(weights, trained), shared
    )
    layers = weights_lib.scale(layers, tf.cast(1 - is_local, tf.float32))
    return client_work.ClientOutput(
        personal_layers.merge(layers, last),
        local_sgd.client_weight(tf.size(client.examples.y), config.uniform),
        report,
        memory=collections.OrderedDict(
            layers=personal_layers.split(trained, shared)[0],
            num_rounds=num_rounds + is_local,
        ),
    )

  return composition.build_learning_process(
      initial_weights,
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=initial_memory,
      state=client_work.ClientWorkState(
          initialize=lambda: tf.constant(0),
          message=lambda round_num: round_num,
          next=lambda round_num, aggregate: round_num + 1,
      ),
  )


def _shared_parameters(model, config, num_classes):
  """The parameters that are averaged, as pairs of part and name."""
  return personal_layers.parameters(
      model.with_head(num_classes), config.shared_layers, 'shared_layers'
  )


def _with_own_layers(weights, shared, layers, num_rounds):
  """The server's last layers on those of the client, or on the server's."""
  server_layers, last = personal_layers.split(weights, shared)
  own = client_work.ClientMemory(num_rounds > 0, layers)
  return personal_layers.merge(own.value_or(server_layers), last)


def client_network(
    model: model_lib.Model, config: LgFedAvgConfig, *, num_classes: int
):
  """A known client's network; see `AlgorithmSpec.client_network`."""
  shared = _shared_parameters(model, config, num_classes)
  return lambda weights, memory: _with_own_layers(
      weights, shared, **memory.value
  )


def build_lg_fed_avg_known_client(
    model: model_lib.Model, config: LgFedAvgConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A known client has its own layers under the server's.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that trains nothing.
  """
  return classifiers.build_client_personalizer(
      classifiers.LinearClassifier(model, num_classes),
      client_network(model, config, num_classes),
      classifiers.as_it_is,
  )


def build_lg_fed_avg_new_client(
    model: model_lib.Model, config: LgFedAvgConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A new client trains the server's model.

  (The paper classifies its examples by the mean of all clients' models.)

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that uses no memory.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def train(weights, examples, seed):
    trained, _ = composition.train_epochs(
        classifier.loss,
        config,
        weights,
        examples,
        seed,
        config.new_client_epochs,
    )
    return trained

  return classifiers.build_client_personalizer(
      classifier, lambda weights, memory: weights, train
  )
