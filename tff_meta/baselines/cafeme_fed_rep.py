"""FedRep as CAFeMe's code has it: head, then base, and both are averaged.

A client receives the whole model, takes some steps of an Adam on the head above
the frozen base, then one step of another Adam on the base under the frozen
head, and uploads both; the server averages both. All that a client keeps are
its two Adams. The head is not the last layer, as in FedRep, but all dense
layers with their batch normalisation, nine tenths of the network on 28x28
images. As nobody has a head of its own, every client fine-tunes the whole model
by SGD before a test.

Source: the released code of Anna Vettoruzzo, Mohamed-Rafik Bouguelia and
Thorsteinn Rögnvaldsson, "Personalized Federated Learning with Contextual
Modulation and Meta-Learning" (CAFeMe), 2023, where it is called FedRep; see
`fed_rep` for Collins et al., ICML 2021.
Deviations: BUILD_NOTES.md, FedPer, FedRep, FedBABU.
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
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd
from tff_meta.learners import personal_layers
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib

_PARTS = ('head', 'base')  # In the order in which a client trains them.


@dataclasses.dataclass(frozen=True)
class CafemeFedRepConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    head_layers: How many dense layers, counted from the output and with their
      batch normalisation, are the head; at least 1, the classifier. The code
      has all that there are: 2 on 28x28 images, 3 on 32x32.
    client_optimizer_state: `'persist'`: a client keeps the moments of its two
      Adams for all rounds. `'reset'`: they start anew every round.
    learning_rate: Of both Adams.
    head_steps: Minibatches of a round on the head, first.
    base_steps: Minibatches of a round on the base, then.
    batch_size: Examples of a minibatch, in training and in fine-tuning.
    fine_tuning_steps: SGD steps of a client on the whole model before a test.
    fine_tuning_learning_rate: Of the first of them.
    fine_tuning_decay: Factor of that rate every `fine_tuning_decay_steps`.
    fine_tuning_decay_steps: At least 1.
  """

  head_layers: int = 2
  client_optimizer_state: Literal['persist', 'reset'] = 'persist'
  learning_rate: float = 0.001
  head_steps: int = 5
  base_steps: int = 1
  batch_size: int = 30
  fine_tuning_steps: int = 50
  fine_tuning_learning_rate: float = 0.001
  fine_tuning_decay: float = 0.8
  fine_tuning_decay_steps: int = 5

  def __post_init__(self):
    config_checks.check_fields(self)
    for name in ('head_layers', 'batch_size', 'fine_tuning_decay_steps'):
      config_checks.check_at_least_one(self, name)
    _build_optimizer(self)


def _build_optimizer(config):
  return optimizers.build_optimizer('adam', config.learning_rate)


# The code on rotated MNIST; the paper says nothing of what its FedRep does. The
# embedded digits learn from that, too.
PAPER = CafemeFedRepConfig()
RELEASE = PAPER
DEMO = PAPER


def memory_flow(config: CafemeFedRepConfig) -> dict[str, str]:
  """What a client's memory reaches; see `AlgorithmSpec.memory_flow`."""
  if config.client_optimizer_state == 'persist':
    return {'update': 'training', 'loss': 'training'}
  return {}  # Clients keep nothing.


def build_cafeme_fed_rep(
    model: model_lib.Model,
    config: CafemeFedRepConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds CAFeMe's FedRep.

  Args:
    model: The network; it gets a classifier of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the weighted mean. Clients count
      alike.
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `StatefulLearningProcess` whose clients' memory is the states of their
    optimizers, `OrderedDict(head, base)`; where these do not persist a
    `LearningProcess` without memory.

  Raises:
    ValueError: The network has fewer dense layers than `head_layers`, or no
      other.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  optimizer = _build_optimizer(config)
  head = head_parameters(model, config, num_classes)
  persists = config.client_optimizer_state == 'persist'

  def initial_weights():
    return classifier.initialize(composition.initial_seed(seed))

  def split(weights):
    return collections.OrderedDict(
        zip(('base', 'head'), personal_layers.split(weights, head), strict=True)
    )

  def merge(parts):
    return personal_layers.merge(parts['base'], parts['head'])

  def loss(parts, batch):
    return classifier.loss(merge(parts), batch)

  def initial_states(parts):
    return collections.OrderedDict(
        (part, local_sgd.initial_optimizer_state(optimizer, parts, (part,)))
        for part in _PARTS
    )

  def client_update(weights, client):
    parts = split(weights)
    states = client.memory.value if persists else initial_states(parts)
    lengths = (config.head_steps, config.base_steps)
    seeds = tf.unstack(tf.random.experimental.stateless_split(client.seed))
    new_states, reports = collections.OrderedDict(), []
    for part, length, part_seed in zip(_PARTS, lengths, seeds, strict=True):
      parts, new_states[part], report = local_sgd.resume_local_sgd(
          loss,
          parts,
          states[part],
          client.examples,
          optimizer,
          batch_size=config.batch_size,
          seed=part_seed,
          trainable=(part,),
          **local_sgd.length_of(length, 'steps'),
      )
      reports.append(report)
    return client_work.ClientOutput(
        weights_lib.subtract(weights, merge(parts)),
        local_sgd.client_weight(tf.size(client.examples.y), uniform=True),
        weights_lib.add(*reports),
        memory=new_states if persists else (),
    )

  return composition.build_learning_process(
      initial_weights,
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=(
          (lambda: initial_states(split(initial_weights())))
          if persists
          else None
      ),
  )


def head_parameters(
    model: model_lib.Model, config: CafemeFedRepConfig, num_classes: int
) -> frozenset[tuple[str, str]]:
  """Returns which parameters are the head's, as pairs of part and name.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Raises:
    ValueError: The network has fewer dense layers than `head_layers`, or no
      other.
  """
  return personal_layers.parameters(
      model.with_head(num_classes), config.head_layers, 'head_layers'
  )


def build_cafeme_fed_rep_client(
    model: model_lib.Model, config: CafemeFedRepConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """Any client, known or new, fine-tunes the server's whole model.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that uses no memory; its curve has
    `fine_tuning_steps + 1` points.
  """
  return fine_tuning.build_classifier_personalizer(
      fine_tuning.of_config(config),
      classifiers.LinearClassifier(model, num_classes),
  )
