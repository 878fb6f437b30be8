"""FedRep: a shared representation, and a head that every client fits anew.

A client receives the body, trains its own head for many epochs on the frozen
body, then the body for a few epochs under the frozen head; it keeps the head
and the server averages the bodies. A new client only trains a head. Without
heads ("FedRep-Proto" in MetaVers), a client classifies by the class prototypes
of the trained body.

What CAFeMe's code calls FedRep is another algorithm, `cafeme_fed_rep`.

Source: Liam Collins, Hamed Hassani, Aryan Mokhtari and Sanjay Shakkottai,
"Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, https://arxiv.org/abs/2102.07078; prototypes: Lim et al. (MetaVers), table
3.
Deviations: BUILD_NOTES.md, FedRep.
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
from tff_meta.learners import prototype_classifier
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedRepConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients, one for the head and one for the body, which
      start anew every round.
    learning_rate: Of the head and of the body.
    momentum: Of SGD, in [0, 1).
    head_epochs: Epochs of a round on the head, first.
    body_epochs: Epochs of a round on the body, then.
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient, of the part that learns.
    uniform: Clients count alike; otherwise by their number of examples.
    known_client_epochs: Epochs on its own head before a known client is tested;
      0 keeps that of its last round.
    new_client_epochs: The same for a new client, whose head is random at first.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.01
  momentum: float = 0.5
  head_epochs: int = 10
  body_epochs: int = 1
  batch_size: int = 10
  weight_decay: float = 0.0
  uniform: bool = True
  known_client_epochs: int = 0
  new_client_epochs: int = 10

  def __post_init__(self):
    config_checks.check_fields(self)
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# Collins et al.: SGD with momentum, ten epochs on the head, then one (CIFAR-10
# with 100 clients) or five on the body; a new client trains ten on a head.
PAPER = FedRepConfig()
# Their code: decay, and ten last epochs on every head before the final test.
RELEASE = dataclasses.replace(PAPER, weight_decay=1e-4, known_client_epochs=10)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.3, head_epochs=2)


def memory_flow(config: FedRepConfig) -> dict[str, str]:
  """What a client's memory reaches; see `AlgorithmSpec.memory_flow`."""
  del config  # Whatever it is.
  return {'update': 'training', 'loss': 'itself'}


def build_fed_rep(
    model: model_lib.Model,
    config: FedRepConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> composition.StatefulLearningProcess:
  """Builds FedRep.

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

  def initial_parts():
    weights = classifier.initialize(composition.initial_seed(seed))
    return personal_head.split(weights)

  def client_update(weights, client):
    local = personal_head.merge(weights, client.memory.value)
    trained, report = _train_head_then_body(
        classifier, config, local, client.examples, client.seed
    )
    uploaded, head = personal_head.split(trained)
    return client_work.ClientOutput(
        weights_lib.subtract(weights, uploaded),
        local_sgd.client_weight(tf.size(client.examples.y), config.uniform),
        report,
        memory=head,
    )

  return composition.build_learning_process(
      lambda: initial_parts()[0],
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=lambda: initial_parts()[1],
  )


def _options(config, part, seed):
  """How the head or the body is trained."""
  return dict(
      optimizer=optimizers.build_optimizer(
          config.optimizer, config.learning_rate, config.momentum
      ),
      batch_size=config.batch_size or None,
      seed=seed,
      weight_decay=config.weight_decay,
      trainable=(part,),
  )


def _train_head_then_body(classifier, config, weights, examples, seed):
  """A client's round: Algorithm 1, the head's updates and then the body's."""
  seeds = tf.unstack(tf.random.experimental.stateless_split(seed))
  epochs = dict(head=config.head_epochs, body=config.body_epochs)
  reports = []
  for (part, num_epochs), part_seed in zip(epochs.items(), seeds, strict=True):
    weights, report = local_sgd.local_sgd(
        classifier.loss,
        weights,
        examples,
        num_epochs=num_epochs,
        **_options(config, part, part_seed),
    )
    reports.append(report)
  return weights, weights_lib.add(*reports)


def _build_client_with_head(model, config, num_classes, start, num_epochs):
  """A client that trains a head of its own, from `start(weights, memory)`."""
  classifier = classifiers.LinearClassifier(model, num_classes)

  def train(weights, examples, seed):
    trained, _ = local_sgd.local_sgd(
        classifier.loss,
        weights,
        examples,
        num_epochs=num_epochs,
        **_options(config, 'head', seed),
    )
    return trained

  return classifiers.build_client_personalizer(classifier, start, train)


def build_fed_rep_known_client(
    model: model_lib.Model, config: FedRepConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A known client has the server's body under its own head.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer`.
  """
  return _build_client_with_head(
      model,
      config,
      num_classes,
      lambda weights, memory: personal_head.merge(weights, memory.value),
      config.known_client_epochs,
  )


def build_fed_rep_new_client(
    model: model_lib.Model, config: FedRepConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A new client, of any classes, trains a random head on the server's body.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the client's labels, known or new.

  Returns:
    A `ClientPersonalizer` that uses no memory.
  """

  def start(weights, memory):
    del memory  # Training never saw the client.
    head = personal_head.unseen_head(model, num_classes)
    return personal_head.merge(weights, head)

  return _build_client_with_head(
      model, config, num_classes, start, config.new_client_epochs
  )


def build_fed_rep_proto_client(
    model: model_lib.Model, config: FedRepConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """FedRep-Proto: the nearest class prototype of the server's body.

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
