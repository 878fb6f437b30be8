"""Local training: every client on its own, nothing is communicated.

All clients start from the same random weights. In every round it is sampled for
a client trains its model further on its own examples and keeps it; what it
uploads is zero, and the server's weights stay the initial ones. How often a
client was sampled decides how long it trains: one round with all clients is
`epochs` epochs for each of them. Or `episodes` episodes, for a network without
a classifier, which classifies by the nearest mean of the client's examples.

Source: "Local" in FedEC's Table 2, which gives no number of epochs, and in
MetaVers' tables (100 episodes).
Deviations: BUILD_NOTES.md, Local.
"""

import dataclasses
from typing import Literal

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import episodes
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.learners import prototype_classifier
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class LocalConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients; its state starts anew every round.
    learning_rate: Of the clients.
    momentum: Of SGD, in [0, 1).
    weight_decay: Coupled L2 coefficient.
    training: `'epochs'` of minibatches with a linear classifier, or few-shot
      `'episodes'` with prototypes.
    epochs: Local epochs of a round.
    batch_size: Examples of a minibatch; 0 is the whole set.
    episodes: Local episodes of a round, a step each, of all of the client's
      classes.
    shots: K, support examples of a class in an episode, at least 1.
    queries: Q, query examples of a class; 0 is all that are left.
    max_whole_examples: See `episodes.n_way_k_shot`; 0 for no limit.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.01
  momentum: float = 0.5
  weight_decay: float = 0.0
  training: Literal['epochs', 'episodes'] = 'epochs'
  epochs: int = 10
  batch_size: int = 10
  episodes: int = 100
  shots: int = 20
  queries: int = 30
  max_whole_examples: int = 450

  def __post_init__(self):
    config_checks.check_fields(self)
    config_checks.check_at_least_one(self, 'shots')
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# Not in the papers; FedRep's code, whose protocol FedEC follows, trains its
# local models for 10 epochs with these. Episodes are those of MetaVers.
PAPER = LocalConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.03, epochs=1)


def memory_flow(config: LocalConfig) -> dict[str, str]:
  """What a client's memory reaches; see `AlgorithmSpec.memory_flow`."""
  del config
  return {'loss': 'itself'}


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
    model: The network; with epochs it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the clients' zeros; by default the weighted mean.

  Returns:
    A `StatefulLearningProcess`; a client's memory is its model.
  """
  if config.training == 'episodes':
    network = model.without_head()
  else:
    network = classifiers.LinearClassifier(model, num_classes)
  train = _build_training(model, config, num_classes)

  def initialize():
    return network.initialize(composition.initial_seed(seed))

  def client_update(weights, client):
    trained, report = train(
        client.memory.value_or(weights), client.examples, client.seed
    )
    return client_work.ClientOutput(
        update=weights_lib.zeros_like(weights),
        update_weight=local_sgd.client_weight(
            tf.size(client.examples.y), uniform=True
        ),
        report=report,
        memory=trained,
        learned=_learns(config, client.examples, num_classes),
    )

  return composition.build_learning_process(
      initialize,
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      memory=lambda: weights_lib.zeros_like(initialize()),
  )


def _build_training(model, config, num_classes):
  """From weights, examples and a seed to weights and a `LocalReport`."""
  if config.training == 'episodes':
    batch_size, num_epochs = None, config.episodes
    loss = _build_episode_loss(model, config, num_classes)
  else:
    batch_size, num_epochs = config.batch_size or None, config.epochs
    loss = classifiers.LinearClassifier(model, num_classes).loss

  def train(weights, examples, seed):
    return local_sgd.local_sgd(
        loss,
        weights,
        examples,
        optimizers.build_optimizer(
            config.optimizer, config.learning_rate, config.momentum
        ),
        batch_size=batch_size,
        num_epochs=num_epochs,
        seed=seed,
        weight_decay=config.weight_decay,
    )

  return train


def _learns(config, examples, num_classes):
  """Whether the loss is over any example of a client with examples."""
  if config.training == 'epochs':
    return True
  support, query = _episode(examples, config, num_classes)
  member = tf.one_hot(support.y, num_classes)
  present = tf.cast(tf.reduce_sum(member, 0) > 0, tf.float32)
  return prototypical.num_scored(query.y, query.mask, present) > 0


def _episode(examples, config, num_classes):
  """Support and query of an episode of all examples."""
  return episodes.n_way_k_shot(
      examples,
      num_classes,
      tf.constant([0, 0]),
      ways=0,
      shots=config.shots,
      queries=config.queries,
      max_examples=config.max_whole_examples,
  )


def _build_episode_loss(model, config, num_classes):
  """The prototypical loss of an episode of all examples, in random order.

  The order is all that makes an episode a random one.
  """

  def loss(weights, examples):
    support, query = _episode(examples, config, num_classes)
    x, y, is_support = episodes.join(support, query)
    e = model.embed(weights['body'], x, tf.ones_like(is_support))
    prototypes = prototypical.prototypes(e, y, is_support, num_classes)
    return prototypical.prototypical_loss(e, y, 1 - is_support, prototypes)

  return loss


def what_is_missing(config: LocalConfig, class_sizes: np.ndarray) -> str | None:
  """Returns what a client lacks to train, see `registry.AlgorithmSpec`."""
  if config.training == 'epochs':
    return None
  return episodes.what_is_missing(
      class_sizes, config.shots, config.queries, needs_query=True
  )


def _build_client_personalizer(model, config, num_classes, start, train):
  """A client trains what it starts from; with episodes it adds prototypes."""
  if config.training == 'epochs':
    classifier = classifiers.LinearClassifier(model, num_classes)
    return classifiers.build_client_personalizer(classifier, start, train)
  by_prototypes = prototype_classifier.build_client_personalizer(
      model, num_classes=num_classes
  )

  def adapt(weights, memory, examples, seed):
    own = train(start(weights, memory), examples, seed)
    return by_prototypes.adapt(own, (), examples, seed)

  return by_prototypes._replace(adapt=adapt)


def client_network(
    model: model_lib.Model, config: LocalConfig, *, num_classes: int
):
  """A known client's network; see `AlgorithmSpec.client_network`."""
  del model, config, num_classes
  return lambda weights, memory: memory.value_or(weights)


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
  return _build_client_personalizer(
      model,
      config,
      num_classes,
      client_network(model, config, num_classes),
      classifiers.as_it_is,
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
  train = _build_training(model, config, num_classes)
  return _build_client_personalizer(
      model,
      config,
      num_classes,
      lambda weights, memory: weights,
      lambda initial, examples, seed: train(initial, examples, seed)[0],
  )
