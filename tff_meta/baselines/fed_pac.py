"""FedPAC: features are aligned, and heads are combined for every client.

All clients share a body, which is averaged. A client also has a head of its
own. At the beginning of a round it combines the heads of others and its own
into the one that promises the least error on its classes, trains that on the
frozen body, and then the body under the frozen head, with a pull of every
embedding towards the mean that all clients together have of its class. It
uploads the body, its class means, its head, and what others need to weigh that
head. A client that training never saw trains a head on the body.

A server of the paper solves the problem of the weights and sends every client a
head of its own. Servers here send all clients the same: the heads of the last
round's clients, in a fixed number of slots of which every client draws one,
and each client solves its problem itself.

Source: Jian Xu, Xinyi Tong and Shao-Lun Huang, "Personalized Federated Learning
with Feature Alignment and Classifier Collaboration", ICLR 2023,
https://arxiv.org/abs/2306.11867, Algorithm 1, and the authors' code,
https://github.com/JianXu95/FedPAC.
Deviations: docs/algorithms/fed_pac.md.
"""

import collections
import dataclasses
from typing import NamedTuple

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import method
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.aggregators import bounds
from tff_meta.aggregators import prototypes as prototypes_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import head_combination
from tff_meta.learners import personal_head
from tff_meta.losses import cross_entropy
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedPacConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    learning_rate: Of the body.
    epochs: Of a round on the body, after those on the head.
    head_learning_rate: Of the head.
    head_epochs: Epochs of a round on the head, first.
    alignment_weight: lambda, of the distance to the class means; 0 is none.
    combines: Whether heads are combined; otherwise a client has its own alone.
    slots: Into which the heads of a round's clients are sorted, at least 1.
      Those in one slot are averaged. With five slots for each client of a round
      about 83 % of the heads have one to themselves.
    known_client_epochs: Epochs on its own head before a known client is tested.
    new_client_epochs: The same for a new client, whose head is random at first.
  """

  learning_rate: float = 0.01
  momentum: float = 0.5
  batch_size: int = 50
  epochs: int = 5
  weight_decay: float = 5e-4
  head_learning_rate: float = 0.1
  head_epochs: int = 1
  alignment_weight: float = 1.0
  combines: bool = True
  slots: int = 100
  known_client_epochs: int = 1
  new_client_epochs: int = 10

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'slots')


# The authors' code, for Fashion-MNIST; on CIFAR-10 it has a rate of 0.02. Slots
# for its 20 clients and the epochs before a test are ours.
PAPER = FedPacConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(
    PAPER,
    learning_rate=0.1,
    head_learning_rate=0.3,
    batch_size=10,
    epochs=1,
    slots=50,
)


class _Shared(NamedTuple):
  """What the server keeps and broadcasts beside the body."""

  prototypes: prototypical.Prototypes
  heads: head_combination.Heads
  num_rounds: tf.Tensor


class _Sums(NamedTuple):
  """What is summed over the clients of a round."""

  prototypes: prototypical.PrototypeSums
  heads: head_combination.Heads


def _shorten(sums, limits):
  prototypes, cut = prototypes_lib.BOUND.shorten(sums.prototypes, limits)
  heads, heads_cut = bounds.VECTOR.shorten(sums.heads, limits)
  return _Sums(prototypes, heads), cut | heads_cut


def _restore(total, limits, noise):
  """The sums; without heads where the noise may be all that there is."""
  heads = bounds.VECTOR.restore(total.heads, limits, noise)
  is_there = tf.cast(total.heads.number > noise, tf.float32)
  return _Sums(
      prototypes_lib.BOUND.restore(total.prototypes, limits, noise),
      heads._replace(number=is_there * heads.number),
  )


def fed_pac(
    model: model_lib.Model, config: FedPacConfig, num_classes: int
) -> method.Method:
  """FedPAC; the server keeps the body, class means and the last round's heads.

  A client's memory is `OrderedDict(head, statistics, slot, round)`: the head
  that it trained last, its `Statistics` then, the slot that it uploaded both
  into and the number of that round. A known client trains its head on the
  server's body before it is tested, a new one a random head.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  by_distance = classifiers.DistanceClassifier(model, num_classes)
  sizes = head_combination.Statistics(
      tf.TensorSpec([num_classes, model.embedding_size]), tf.TensorSpec([])
  )

  def head_of(seed):
    return classifier.initialize(seed)['head']

  with tf.Graph().as_default():
    head = head_of(tf.constant([0, 0]))

  def in_slots(specs):
    return tf.nest.map_structure(
        lambda spec: tf.TensorSpec([config.slots, *spec.shape]), specs
    )

  heads = head_combination.Heads(
      in_slots(head), in_slots(sizes), tf.TensorSpec([config.slots])
  )

  def zeros(specs):
    return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape), specs)

  def combined(own, memory, shared):
    """The head with which a client begins its round.

    Of the last round's heads a client leaves out its own, which it has; it
    compares them with its features of then. One that has taken part in no round
    takes those of others alone.
    """
    kept, others = memory.value, shared.heads
    was_there = memory.present & tf.equal(kept['round'], shared.num_rounds - 1)
    own = memory._replace(present=was_there, value=kept['statistics']).value_or(
        own
    )
    # Where there is nobody's head it begins with the initial one.
    has_own = memory.present | tf.equal(tf.reduce_sum(others.number), 0.0)
    is_mine = was_there & tf.equal(tf.range(config.slots), kept['slot'])
    present = tf.concat(
        [
            [tf.cast(has_own, tf.float32)],
            tf.where(is_mine, 0.0, others.number),
        ],
        axis=0,
    )

    def with_own(mine, others):
      return tf.concat([mine[tf.newaxis], others], axis=0)

    candidates = tf.nest.map_structure(with_own, own, others.statistics)
    weights = head_combination.combination(own.features, candidates, present)
    return tf.nest.map_structure(
        lambda mine, others: tf.tensordot(weights, with_own(mine, others), 1),
        kept['head'],
        others.head,
    )

  def train_head(num_epochs, weights, examples, seed):
    return config.train_for(
        num_epochs,
        classifier.loss,
        weights,
        examples,
        seed,
        trainable=('head',),
        optimizer=optimizers.build_optimizer(
            config.optimizer, config.head_learning_rate, config.momentum
        ),
    )

  def aligned_loss(targets):
    def loss(weights, batch):
      embeddings = model.embed(weights['body'], batch.x, batch.mask)
      logits = model.classify(weights['head'], embeddings)
      return cross_entropy.softmax_cross_entropy(
          logits, batch.y, batch.mask
      ) + config.alignment_weight * prototypical.mean_squared_distance(
          embeddings, batch.y, batch.mask, targets
      )

    return loss

  def targets_of(shared, own):
    """The class means of all, of missing classes the client's own.

    None before there are any of all.
    """
    others = shared.prototypes
    is_later = tf.cast(tf.reduce_sum(others.present) > 0, tf.float32)
    has_other = others.present[:, tf.newaxis] > 0
    return prototypical.Prototypes(
        tf.where(has_other, others.means, own.means),
        is_later * tf.maximum(others.present, own.present),
    )

  def client_update(weights, client):
    examples, memory, shared = client.examples, client.memory, client.message
    seeds = tf.unstack(
        tf.random.experimental.stateless_split(client.seed, num=3)
    )
    embeddings = model.embed(weights['body'], examples.x, examples.mask)
    own = head_combination.statistics(embeddings, examples.y, num_classes)
    head = memory.value['head']
    if config.combines:
      head = combined(own, memory, shared)
    targets = targets_of(
        shared,
        prototypical.prototypes(
            embeddings, examples.y, examples.mask, num_classes
        ),
    )
    with_head, of_head = train_head(
        config.head_epochs,
        personal_head.merge(weights, head),
        examples,
        seeds[0],
    )
    trained, of_body = config.train(
        aligned_loss(targets),
        with_head,
        examples,
        seeds[1],
        trainable=('body',),
    )
    uploaded, head = personal_head.split(trained)
    slot = tf.random.stateless_uniform(
        [], seeds[2], 0, config.slots, dtype=tf.int32
    )
    # Nobody reads heads that are not combined.
    uploads = (tf.size(examples.y) > 0) & config.combines
    place = tf.one_hot(slot, config.slots) * tf.cast(uploads, tf.float32)

    def in_slot(leaf):
      return tf.tensordot(place, leaf, 0)

    class_sizes = tf.reduce_sum(tf.one_hot(examples.y, num_classes), axis=0)
    return config.output(
        weights,
        uploaded,
        weights_lib.add(of_head, of_body),
        examples,
        signal=_Sums(
            prototypical.weigh_prototypes(
                by_distance.prototypes(trained, examples), class_sizes
            ),
            head_combination.Heads(
                tf.nest.map_structure(in_slot, head),
                tf.nest.map_structure(in_slot, own),
                place,
            ),
        ),
        memory=collections.OrderedDict(
            head=head, statistics=own, slot=slot, round=shared.num_rounds
        ),
    )

  def initial_memory(seed):
    return collections.OrderedDict(
        head=head_of(seed),
        statistics=zeros(sizes),
        slot=tf.constant(0),
        round=tf.constant(0),
    )

  def next_shared(shared, sums):
    return _Shared(
        prototypical.newest(shared.prototypes, sums.prototypes),
        head_combination.means(sums.heads),
        shared.num_rounds + 1,
    )

  def use(head_of_memory, num_epochs):
    return classifiers.build_client_personalizer(
        classifier,
        lambda weights, memory: personal_head.merge(
            weights, head_of_memory(memory)
        ),
        lambda *start: train_head(num_epochs, *start)[0],
    )

  def new_client():
    return use(
        lambda _: personal_head.unseen_head(model, num_classes),
        config.new_client_epochs,
    )

  of_classes = tf.TensorSpec([num_classes])
  return method.Method(
      num_classes,
      lambda seed: personal_head.split(classifier.initialize(seed))[0],
      client_update,
      memory=initial_memory,
      state=lambda seed: client_work.ClientWorkState(
          initialize=lambda: _Shared(
              by_distance.no_prototypes(), zeros(heads), tf.constant(0)
          ),
          message=lambda shared: shared,
          next=next_shared,
      ),
      channels=(
          method.Channel(
              'class prototypes and heads',
              _Sums(
                  prototypical.PrototypeSums(
                      sizes.features, of_classes, of_classes
                  ),
                  heads,
              ),
              bound=bounds.Bound(_shorten, _restore),
          ),
      ),
      # Its head is what it uploads.
      memory_reaches={
          'update': 'training',
          'signal': 'itself',
          'loss': 'itself',
      },
      known_client=lambda: use(
          lambda memory: memory.value['head'], config.known_client_epochs
      ),
      new_client=new_client,
      new_class=new_client,
  )
