"""FedRep: a shared representation, and a head that every client fits anew.

A client receives the body, trains its own head for many epochs on the frozen
body, then the body for a few epochs under the frozen head; it keeps the head
and the server averages the bodies. A new client only trains a head. Without
heads ("FedRep-Proto" in MetaVers), a client classifies by the class prototypes
of the trained body.

CAFeMe's code averages and broadcasts the head too, counts steps instead of
epochs, lets clients keep Adam's moments, and fine-tunes the whole model before
a test (`averaged_head`, `local_unit`, `client_optimizer_state`).

Source: Liam Collins, Hamed Hassani, Aryan Mokhtari and Sanjay Shakkottai,
"Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, https://arxiv.org/abs/2102.07078; prototypes: Lim et al. (MetaVers), table
3.
Deviations: BUILD_NOTES.md, FedRep.
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
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd
from tff_meta.learners import personal_head
from tff_meta.learners import personalizer
from tff_meta.learners import prototype_classifier
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedRepConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients, one for the head and one for the body.
    client_optimizer_state: `'persist'`: a client keeps the state of both
      (Adam's moments, SGD's velocity), with an averaged head only. `'reset'`:
      they start anew every round.
    learning_rate: Of the head and of the body.
    momentum: Of SGD, in [0, 1).
    head_epochs: Epochs of a round on the head, first.
    body_epochs: Epochs of a round on the body, then.
    local_unit: Whether these two count `'epochs'` or `'steps'` of minibatches.
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient, of the part that learns.
    uniform: Clients count alike; otherwise by their number of examples.
    averaged_head: Heads are averaged and broadcast like bodies, no client has
      one of its own, and every client fine-tunes the whole model by SGD steps,
      with a curve of accuracy by steps.
    known_client_epochs: Epochs on its own head before a known client is tested;
      0 keeps that of its last round.
    new_client_epochs: The same for a new client, whose head is random at first.
    fine_tuning_steps: SGD steps of any client, with an averaged head.
    fine_tuning_learning_rate: Of the first of them.
    fine_tuning_decay: Factor of that rate every `fine_tuning_decay_steps`.
    fine_tuning_decay_steps: At least 1.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  client_optimizer_state: Literal['reset', 'persist'] = 'reset'
  learning_rate: float = 0.01
  momentum: float = 0.5
  head_epochs: int = 10
  body_epochs: int = 1
  local_unit: Literal['epochs', 'steps'] = 'epochs'
  batch_size: int = 10
  weight_decay: float = 0.0
  uniform: bool = True
  averaged_head: bool = False
  known_client_epochs: int = 0
  new_client_epochs: int = 10
  fine_tuning_steps: int = 50
  fine_tuning_learning_rate: float = 0.01
  fine_tuning_decay: float = 0.8
  fine_tuning_decay_steps: int = 5

  def __post_init__(self):
    config_checks.check_fields(self)
    config_checks.check_at_least_one(self, 'fine_tuning_decay_steps')
    if self.averaged_head:
      config_checks.check_at_least_one(self, 'batch_size')
    if self.client_optimizer_state == 'persist' and not self.averaged_head:
      raise ValueError(
          "Expected `client_optimizer_state` as 'reset' where `averaged_head`"
          " is False and clients keep their heads alone, found 'persist'."
      )
    config_checks.check_client_optimizer_state(self)
    composition.build_optimizer(
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
  if not config.averaged_head:
    return {'update': 'training', 'loss': 'itself'}
  if config.client_optimizer_state == 'persist':
    return {'update': 'training', 'loss': 'training'}
  return {}  # Clients keep nothing.



def build_fed_rep(
    model: model_lib.Model,
    config: FedRepConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds FedRep.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the weighted mean.
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `StatefulLearningProcess` whose clients' memory is their head; with an
    averaged head their optimizers' states, `OrderedDict(head, body)`, or, where
    these do not persist, a `LearningProcess` without memory.
  """
  classifier = few_round.LinearClassifier(model, num_classes)
  persists = config.client_optimizer_state == 'persist'

  def initial_weights():
    return classifier.initialize(composition.initial_seed(seed))

  def initial_states(weights):
    optimizer = _build_optimizer(config)
    return collections.OrderedDict(
        (part, local_sgd.initial_optimizer_state(optimizer, weights, (part,)))
        for part in ('head', 'body')
    )

  def initial_memory():
    weights = initial_weights()
    return initial_states(weights) if persists else weights['head']

  def client_update(weights, client):
    local = weights
    if not config.averaged_head:
      local = personal_head.merge(weights, client.memory.value)
    trained, states, report = _train_head_then_body(
        classifier,
        config,
        local,
        client.memory.value if persists else initial_states(local),
        client.examples,
        client.seed,
    )
    uploaded, head = _share(config, trained)
    return client_work.ClientOutput(
        weights_lib.subtract(weights, uploaded),
        few_round.client_weight(tf.size(client.examples.y), config.uniform),
        report,
        memory=states if persists else head,
    )

  return composition.build_learning_process(
      lambda: _share(config, initial_weights())[0],
      model.input_shape,
      client_update,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=initial_memory if persists or not config.averaged_head else None,
  )


def _share(config, weights):
  """What the server averages of a model, and what stays with the client."""
  if config.averaged_head:
    return weights, ()
  return personal_head.split(weights)


def _build_optimizer(config):
  return composition.build_optimizer(
      config.optimizer, config.learning_rate, config.momentum
  )


def _options(config, part, seed):
  """How the head or the body is trained."""
  return dict(
      optimizer=_build_optimizer(config),
      batch_size=config.batch_size or None,
      seed=seed,
      weight_decay=config.weight_decay,
      trainable=(part,),
  )


def _train_head_then_body(classifier, config, weights, states, examples, seed):
  """A client's round: Algorithm 1, the head's updates and then the body's."""
  seeds = tf.unstack(tf.random.experimental.stateless_split(seed))
  lengths = dict(head=config.head_epochs, body=config.body_epochs)
  reports, new_states = [], collections.OrderedDict()
  for (part, length), part_seed in zip(lengths.items(), seeds, strict=True):
    weights, new_states[part], report = local_sgd.resume_local_sgd(
        classifier.loss,
        weights,
        states[part],
        examples,
        **local_sgd.length_of(length, config.local_unit),
        **_options(config, part, part_seed),
    )
    reports.append(report)
  return weights, new_states, weights_lib.add(*reports)


def _build_client_with_head(model, config, num_classes, start, num_epochs):
  """A client that trains a head of its own, from `start(weights, memory)`."""
  classifier = few_round.LinearClassifier(model, num_classes)

  def train(weights, examples, seed):
    trained, _ = local_sgd.local_sgd(
        classifier.loss,
        weights,
        examples,
        num_epochs=num_epochs,
        **_options(config, 'head', seed),
    )
    return trained

  return personal_head.build_client_personalizer(classifier, start, train)


def _build_fine_tuning_client(model, config, num_classes):
  """A client that fine-tunes the server's whole model, step by step."""
  return fine_tuning.build_classifier_personalizer(
      fine_tuning.of_config(config),
      few_round.LinearClassifier(model, num_classes),
  )


def build_fed_rep_known_client(
    model: model_lib.Model, config: FedRepConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A known client has the server's body under its own head.

  With an averaged head it fine-tunes the server's whole model.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer`; with an averaged head it has a curve.
  """
  if config.averaged_head:
    return _build_fine_tuning_client(model, config, num_classes)
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
  """A new client trains a random head on the server's body.

  With an averaged head it fine-tunes the server's whole model.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that uses no memory; with an averaged head it has a
    curve.
  """
  if config.averaged_head:
    return _build_fine_tuning_client(model, config, num_classes)
  return build_fed_rep_new_classes(model, config, num_classes=num_classes)


def build_fed_rep_new_classes(
    model: model_lib.Model, config: FedRepConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client of other classes trains a random head on the server's body.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of these classes.

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
