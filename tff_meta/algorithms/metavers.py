"""MetaVers: an embedding whose class margins are a federated quantity.

Clients and server share a network that embeds examples; nobody has a
classifier. In a round a client draws one few-shot episode of its own classes
and sends one gradient, of a prototypical loss and of a triplet loss that pushes
other classes away from its centroids by a margin: its own mean distance between
centroids or, if that is larger, the margin which the server averages over
clients and rounds. A client, known or new and even with classes never trained,
classifies by the nearest mean of its own training examples, without any
gradient step.

Source: Jin Hyuk Lim, SeungBum Ha and Sung Whan Yoon, "MetaVers: Meta-Learned
Versatile Representations for Personalized Federated Learning", WACV 2024.
Deviations: docs/algorithms/metavers.md.
"""

import dataclasses
from typing import Literal, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import optimizers
from tff_meta.aggregators import margins as margins_lib
from tff_meta.client_works import client_work
from tff_meta.learners import local_sgd
from tff_meta.losses import centroid_triplet
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class MetaVersConfig(configurations.Configuration):
  """Configuration; the defaults are the `paper` preset, for CIFAR-10.

  Attributes:
    ways: N, classes of an episode, at least 2; 0 is all that the client has.
    shots: K, support examples of a class, at least 1.
    queries: Q, query examples of a class; 0 is all that are left (R*).
    max_whole_examples: The most examples of an episode that, because a class
      has fewer than K + Q, takes all that the client has; 0 for no limit.
    loss: `'hybrid'`; or only `'ce'` or only `'triplet'`, the paper's ablations,
      in which no margin is federated.
    gamma: Weight of the prototypical loss in the hybrid one, at most 1.
    squared_distance: Whether that loss uses the squared Euclidean distance.
    triplet_variant: Negatives by their distance to the positive (`'eq4'`), or
      squared and to the centroid (`'release'`).
    triplet_reduction: The mean over all triplets, or their printed sum.
    fixed_margin: Margin of the loss `'triplet'`.
    margin_normalizer: Divides a client's sum of distances by the number of
      `'pairs'`, N (N - 1), or by the `'printed'` (N - 1)^2.
    margin_rule: The server's margin by `'eq7'`, or as the mean of a `'window'`
      of all single margins.
    margin_window: W, rounds that the server's margin looks back.
    warm_start: Whether `'eq7'` takes the mean margin of a round as it is, in
      the first W rounds.
    initial_margin: The server's margin at first.
    margin_stop_gradient: Whether a client's margin is a constant of its loss.
    warm_up_rounds: Rounds at first whose loss is the prototypical one alone.
    local_update: Whether a client sends its `'gradient'`, to which the server
      applies the optimizer; or takes a step of SGD and sends the `'model'`, of
      which the server takes the mean (eqs. 5 and 6). With SGD this is the same.
    optimizer: Its state stays on the server.
    learning_rate: eta.
    halving_rounds: Rounds in which the learning rate halves; 0 for never.
    weight_decay: Coupled L2 coefficient.
  """

  ways: int = 0
  shots: int = 20
  queries: int = 30
  max_whole_examples: int = 450
  loss: Literal['hybrid', 'ce', 'triplet'] = 'hybrid'
  gamma: float = 0.4
  squared_distance: bool = True
  triplet_variant: Literal['eq4', 'release'] = 'eq4'
  triplet_reduction: Literal['mean', 'sum'] = 'mean'
  fixed_margin: float = 0.75
  margin_normalizer: Literal['pairs', 'printed'] = 'pairs'
  margin_rule: Literal['eq7', 'window'] = 'eq7'
  margin_window: int = 50
  warm_start: bool = True
  initial_margin: float = 0.0
  margin_stop_gradient: bool = True
  warm_up_rounds: int = 50
  local_update: Literal['gradient', 'model'] = 'gradient'
  optimizer: Literal['adam', 'sgd'] = 'adam'
  learning_rate: float = 1e-3
  halving_rounds: int = 0
  weight_decay: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'shots')
    config_checks.check_at_least_one(self, 'margin_window')
    if self.ways == 1:
      raise ValueError(
          'Expected `ways` of at least 2, or 0 for all classes that a client'
          ' has, found 1: there is nothing to tell one class from.'
      )
    if self.gamma > 1:
      raise ValueError(
          f'Expected `gamma` of at most 1, found {self.gamma}. It is a part of'
          ' the loss; 1 leaves out the triplets.'
      )
    if self.local_update == 'model' and (
        self.optimizer != 'sgd' or self.halving_rounds
    ):
      raise ValueError(
          "Expected optimizer 'sgd' and `halving_rounds` 0 with local_update"
          f" 'model', found {self.optimizer!r} and {self.halving_rounds}. Tip:"
          " with SGD local_update='gradient' does the same, at any rate."
      )


PAPER = MetaVersConfig()
RELEASE = dataclasses.replace(
    PAPER,
    triplet_variant='release',
    fixed_margin=3.0,
    margin_rule='window',
    margin_stop_gradient=False,
    warm_up_rounds=51,
    weight_decay=1e-3,
)
# For the demonstration on the embedded digits, about 28 images of a class.
DEMO = dataclasses.replace(PAPER, shots=5, queries=5, learning_rate=3e-3)


class ServerState(NamedTuple):
  """What the server keeps beside the weights; the window is the aggregator's.

  Attributes:
    round_num: int32 scalar, rounds done.
    margin: float32 scalar, the global margin.
  """

  round_num: tf.Tensor
  margin: tf.Tensor


class Message(NamedTuple):
  """What is broadcast beside the weights.

  Attributes:
    margin: float32 scalar, the global margin.
    is_hybrid: Boolean scalar, False during the warm-up.
  """

  margin: tf.Tensor
  is_hybrid: tf.Tensor


def episode_loss(
    e: tf.Tensor,
    y: tf.Tensor,
    is_support: tf.Tensor,
    message: Message,
    config: MetaVersConfig,
    num_classes: int,
) -> tuple[tf.Tensor, margins_lib.Margin]:
  """A client's loss and its own margin.

      gamma * L_S + (1 - gamma) * L_T

  L_S is the prototypical loss of the query examples (eq. 2), L_T the triplet
  loss of all examples (eq. 4). It is L_S alone during the warm-up, for gamma =
  1 and with the loss `'ce'`, and L_T alone with the loss `'triplet'`. With one
  class it is 0, and so is its gradient.

  Args:
    e: Embeddings of the episode, float32 [n, D].
    y: int32 [n], labels in 0..C-1.
    is_support: float32 [n], 1 for support and 0 for query.
    message: From the server.
    config: The configuration.
    num_classes: C.

  Returns:
    A scalar; and the margin to upload, which has weight 0 with fewer than two
    classes, or if the loss federates no margin.
  """
  prototypes = prototypical.prototypes(e, y, is_support, num_classes)
  ce = prototypical.prototypical_loss(
      e, y, 1 - is_support, prototypes, squared=config.squared_distance
  )
  if config.loss == 'ce':
    return ce, margins_lib.Margin(tf.constant(0.0), tf.constant(0.0))
  ones = tf.ones_like(is_support)
  centroids = prototypical.prototypes(e, y, ones, num_classes)
  own = centroid_triplet.local_margin(centroids, config.margin_normalizer)
  margin, has_margin = tf.constant(config.fixed_margin), tf.constant(0.0)
  if config.loss == 'hybrid':
    margin = centroid_triplet.effective_margin(
        message.margin, own, config.margin_stop_gradient
    )
    has_margin = tf.cast(tf.reduce_sum(centroids.present) > 1, tf.float32)
  triplet = centroid_triplet.triplet_loss(
      e,
      y,
      ones,
      centroids,
      margin,
      config.triplet_variant,
      config.triplet_reduction,
  )
  uploaded = margins_lib.Margin(own, has_margin)
  if config.loss == 'triplet':
    return triplet, uploaded
  gamma = tf.where(message.is_hybrid, config.gamma, 1.0)
  return gamma * ce + (1 - gamma) * triplet, uploaded


def _is_over_any_example(y, is_support, message, config, num_classes):
  """Whether `episode_loss` is; otherwise it is 0, and so is its gradient."""
  member = tf.one_hot(y, num_classes) * is_support[:, tf.newaxis]
  present = tf.cast(tf.reduce_sum(member, 0) > 0, tf.float32)
  has_ce = prototypical.num_scored(y, 1 - is_support, present) > 0
  has_triplets = tf.reduce_sum(present) > 1  # An episode has support of all.
  if config.loss == 'ce':
    return has_ce
  if config.loss == 'triplet':
    return has_triplets
  return has_ce | (has_triplets & message.is_hybrid & (config.gamma < 1))


def _margins(config):
  """What the clients' margins are, and what becomes of them."""
  if config.margin_rule == 'eq7':
    rule = margins_lib.eq7(
        config.margin_window, config.warm_start, config.initial_margin
    )
  else:
    rule = margins_lib.raw_window(config.margin_window, config.initial_margin)
  scalar = tf.TensorSpec([])
  return method.Channel(
      'margins',
      margins_lib.Margin(scalar, scalar),
      lambda total: margins_lib.MarginsFactory(rule, total),
      bound=margins_lib.BOUND,
  )


def _server_optimizer(config):
  """What the server does with the mean update, see `local_update`."""
  if config.local_update == 'model':
    return optimizers.build_optimizer('sgd', 1.0)
  rate = config.learning_rate
  optimizer = optimizers.build_optimizer(config.optimizer, rate)
  if not config.halving_rounds:
    return optimizer

  def halved(round_num):
    num_halvings = tf.cast(round_num // config.halving_rounds, tf.float32)
    return rate * 0.5**num_halvings

  return tff.learning.optimizers.schedule_learning_rate(optimizer, halved)


def metavers(
    model: model_lib.Model, config: MetaVersConfig, num_classes: int
) -> method.Method:
  """MetaVers; a round is one episode and one gradient of every client.

  All clients that have an episode count alike, those of one class, whose
  gradient is that of the weight decay, included.
  """
  model = model.without_head()

  def client_update(weights, client):
    support, query = episodes.n_way_k_shot(
        client.examples,
        num_classes,
        client.seed,
        ways=config.ways,
        shots=config.shots,
        queries=config.queries,
        max_examples=config.max_whole_examples,
    )
    x, y, is_support = episodes.join(support, query)
    with tf.GradientTape() as tape:
      tape.watch(weights)
      embeddings = model.embed(weights['body'], x, tf.ones_like(is_support))
      loss, margin = episode_loss(
          embeddings, y, is_support, client.message, config, num_classes
      )
    gradient = tape.gradient(
        loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    rate = config.learning_rate if config.local_update == 'model' else 1.0
    update = tf.nest.map_structure(
        lambda g, w: rate * (g + config.weight_decay * w), gradient, weights
    )
    count = tf.reduce_sum(tf.ones_like(is_support))
    return client_work.ClientOutput(
        update,
        tf.cast(count > 0, tf.float32),
        local_sgd.LocalReport(loss * count, count),
        signal=margin,
        learned=_is_over_any_example(
            y, is_support, client.message, config, num_classes
        ),
    )

  # The global margin and the phase, from the clients' margins.
  state = client_work.ClientWorkState(
      initialize=lambda: ServerState(
          tf.constant(0), tf.constant(config.initial_margin)
      ),
      message=lambda state: Message(
          state.margin, state.round_num >= config.warm_up_rounds
      ),
      next=lambda state, margin: ServerState(state.round_num + 1, margin),
  )

  def what_is_missing(class_sizes):
    return episodes.what_is_missing(
        class_sizes,
        config.shots,
        config.queries,
        ways=config.ways,
        max_examples=config.max_whole_examples,
        # Triplets are of support and query examples alike.
        needs_query=config.loss == 'ce'
        or (config.loss == 'hybrid' and config.gamma == 1),
    )

  trained = method.Method(
      num_classes,
      model.initialize,
      client_update,
      state=lambda seed: state,
      channels=(_margins(config),),
      server_optimizer=_server_optimizer(config),
      what_is_missing=what_is_missing,
      phase_ends=(
          {'warm-up': config.warm_up_rounds}
          if config.loss == 'hybrid' and config.gamma < 1
          else {}
      ),
  )
  return method.with_prototypes(trained, model, squared=config.squared_distance)
