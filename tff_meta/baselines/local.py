"""Local training: every client on its own, nothing is communicated.

All clients start from the same random weights. In every round it is sampled for
a client trains its model further on its own examples and keeps it; it uploads
nothing, and the server's weights stay the initial ones. How often a client was
sampled decides how long it trains: one round with all clients is `epochs`
epochs for each of them. Or `episodes` episodes, for a network without a
classifier, which classifies by the nearest mean of the client's examples.

Source: "Local" in FedEC's Table 2, which gives no number of epochs, and in
MetaVers' tables (100 episodes).
Deviations: docs/algorithms/local.md.
"""

import dataclasses
from typing import Literal

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.learners import prototype_classifier
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class LocalConfig(configurations.LocalOptimizer):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    training: `'epochs'` of minibatches with a linear classifier, or few-shot
      `'episodes'` with prototypes.
    epochs: Local epochs of a round.
    episodes: Local episodes of a round, a step each, of all of the client's
      classes.
    shots: K, support examples of a class in an episode, at least 1.
    queries: Q, query examples of a class; 0 is all that are left.
    max_whole_examples: See `episodes.n_way_k_shot`; 0 for no limit.
  """

  learning_rate: float = 0.01
  momentum: float = 0.5
  training: Literal['epochs', 'episodes'] = 'epochs'
  epochs: int = 10
  episodes: int = 100
  shots: int = 20
  queries: int = 30
  max_whole_examples: int = 450

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'shots')


# Not in the papers; FedRep's code, whose protocol FedEC follows, trains its
# local models for 10 epochs with these. Episodes are those of MetaVers.
PAPER = LocalConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.03, epochs=1)


def local(
    model: model_lib.Model, config: LocalConfig, num_classes: int
) -> method.Method:
  """Local training; a client's memory is its model, at first of zeros.

  A known client uses its model, the initial one if it was never sampled. A new
  client trains the initial one, as in a first round.
  """
  in_epochs = config.training == 'epochs'
  classifier = classifiers.LinearClassifier(model, num_classes)
  initialize = (
      classifier.initialize if in_epochs else model.without_head().initialize
  )

  def episode(examples):
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

  def episode_loss(weights, examples):
    """Prototypical; the random order of examples makes the episode random."""
    x, y, is_support = episodes.join(*episode(examples))
    e = model.embed(weights['body'], x, tf.ones_like(is_support))
    prototypes = prototypical.prototypes(e, y, is_support, num_classes)
    return prototypical.prototypical_loss(e, y, 1 - is_support, prototypes)

  def train(*start):
    if in_epochs:
      return config.train_for(config.epochs, classifier.loss, *start)
    return config.train_for(
        config.episodes, episode_loss, *start, batch_size=None
    )

  def learns(examples):
    """Whether the loss is over any example of a client with examples."""
    if in_epochs:
      return True
    support, query = episode(examples)
    member = tf.one_hot(support.y, num_classes)
    present = tf.cast(tf.reduce_sum(member, 0) > 0, tf.float32)
    return prototypical.num_scored(query.y, query.mask, present) > 0

  def client_update(weights, client):
    trained, report = train(
        client.memory.value_or(weights), client.examples, client.seed
    )
    return client_work.ClientOutput(
        weights_lib.zeros_like(weights),
        local_sgd.client_weight(tf.size(client.examples.y), uniform=True),
        report,
        memory=trained,
        learned=learns(client.examples),
    )

  def what_is_missing(class_sizes):
    if in_epochs:
      return None
    return episodes.what_is_missing(
        class_sizes,
        config.shots,
        config.queries,
        ways=0,
        max_examples=config.max_whole_examples,
        needs_query=True,
    )

  def use(trained):
    """With episodes a client adds prototypes to what it has trained."""
    if in_epochs:
      return trained
    by_prototypes = prototype_classifier.build_client_personalizer(
        model, num_classes=num_classes
    )

    def adapt(weights, memory, examples, seed):
      own = trained.adapt(weights, memory, examples, seed)
      return by_prototypes.adapt(own, (), examples, seed)

    return by_prototypes._replace(adapt=adapt)

  def client_network(weights, memory):
    return memory.value_or(weights)

  return method.Method(
      num_classes,
      initialize,
      client_update,
      sends_updates=False,
      memory=lambda seed: weights_lib.zeros_like(initialize(seed)),
      memory_reaches={'loss': 'itself'},
      what_is_missing=what_is_missing,
      known_client=lambda: use(
          classifiers.build_client_personalizer(classifier, client_network)
      ),
      client_network=client_network,
      new_client=lambda: use(
          classifiers.build_client_personalizer(
              classifier, train=lambda *start: train(*start)[0]
          )
      ),
  )
