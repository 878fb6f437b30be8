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
Deviations: docs/algorithms/lg_fed_avg.md.
"""

import collections
import dataclasses

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import personal_layers
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class LgFedAvgConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Clients train all layers together.

  Attributes:
    shared_layers: How many dense layers, counted from the output, are averaged;
      at least 1, the classifier.
    averaged_rounds: Rounds at the beginning in which all layers are averaged.
    new_client_epochs: Epochs in which a new client trains the server's model;
      its first layers are those of the averaged rounds, or the initial ones.
  """

  momentum: float = 0.5
  batch_size: int = 50
  uniform: bool = True
  shared_layers: int = 1
  averaged_rounds: int = 0
  new_client_epochs: int = 10

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'shared_layers')


# The authors' code on CIFAR-10: B = 50, one epoch, SGD 0.1 with momentum 0.5,
# where clients count alike. FedBABU's code averages the classifier alone, which
# every network here has.
PAPER = LgFedAvgConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, batch_size=16, averaged_rounds=100)


def lg_fed_avg(
    model: model_lib.Model, config: LgFedAvgConfig, num_classes: int
) -> method.Method:
  """LG-FedAvg.

  A client's memory is `OrderedDict(layers, num_rounds)`: its first layers, and
  the rounds since the averaged ones that it has taken part in, int32. Before
  the first of these it works with the server's layers. A server's optimizer
  with a memory, as of momentum, goes on moving the server's first layers after
  the averaged rounds.

  A known client has its own layers under the server's. A new client trains the
  server's model. (The paper classifies its examples by the mean of all clients'
  models.)

  Raises:
    ValueError: The network has fewer dense layers than `shared_layers`, or no
      other.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  shared = personal_layers.parameters(
      model, config.shared_layers, 'shared_layers'
  )

  def with_own_layers(weights, layers, num_rounds):
    """The server's last layers on those of the client, or on the server's."""
    server_layers, last = personal_layers.split(weights, shared)
    own = client_work.ClientMemory(num_rounds > 0, layers)
    return personal_layers.merge(own.value_or(server_layers), last)

  def memory_of(weights, num_rounds):
    layers, _ = personal_layers.split(weights, shared)
    return collections.OrderedDict(layers=layers, num_rounds=num_rounds)

  def client_update(weights, client):
    is_local = tf.cast(client.message >= config.averaged_rounds, tf.int32)
    # In averaged rounds nobody has layers of its own, whatever it remembers.
    num_rounds = client.memory.value['num_rounds'] * is_local
    trained, report = config.train(
        classifier.loss,
        with_own_layers(weights, client.memory.value['layers'], num_rounds),
        client.examples,
        client.seed,
    )
    layers, last = personal_layers.split(
        weights_lib.subtract(weights, trained), shared
    )
    layers = weights_lib.scale(layers, tf.cast(1 - is_local, tf.float32))
    return client_work.ClientOutput(
        personal_layers.merge(layers, last),
        config.weight(client.examples),
        report,
        memory=memory_of(trained, num_rounds + is_local),
    )

  def train_new(*start):
    num_epochs = config.new_client_epochs
    return config.train_for(num_epochs, classifier.loss, *start)[0]

  def client_network(weights, memory):
    return with_own_layers(weights, **memory.value)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=lambda seed: memory_of(
          classifier.initialize(seed), tf.constant(0)
      ),
      state=lambda seed: client_work.rounds_done(),
      memory_reaches={'update': 'training', 'loss': 'itself'},
      known_client=lambda: classifiers.build_client_personalizer(
          classifier, client_network
      ),
      client_network=client_network,
      new_client=lambda: classifiers.build_client_personalizer(
          classifier, train=train_new
      ),
      phase_ends={'averaging all layers': config.averaged_rounds},
  )
