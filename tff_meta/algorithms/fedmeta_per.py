"""Federated meta-learning with personal layers (FedMeta-Per), and FedMeta.

Clients learn an initial model that adapts to a small support set in one pass:
they take inner steps on it and send back what the loss on their query set says
about where the steps began, and about their rates (Meta-SGD). The last layer,
with its rates, never leaves a client, which keeps it for its next round. A
known client adapts from the shared body under its own head; a new one tries the
heads of all known clients and takes the one that fits best. Without personal
layers this is FedMeta, whose inner steps may move the head alone (ANIL: Raghu
et al., ICLR 2020) or the body alone (BOIL: Oh et al., ICLR 2021).

Source: Bao-Long Nguyen, Tat Cuong Cao and Bac Le, "Meta-Learning and
Personalization Layer in Federated Learning", ACIIDS 2022; FedMeta: Fei Chen, Mi
Luo, Zhenhua Dong, Zhenguo Li and Xiuqiang He, "Federated Meta-Learning with
Fast Convergence and Efficient Communication", 2018,
https://arxiv.org/abs/1802.07876.
Deviations: docs/algorithms/fedmeta_per.md.
"""

import collections
import dataclasses
from typing import Literal

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import adaptation
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.learners import memory_bank
from tff_meta.learners import personal_layers
from tff_meta.learners import personalizer
from tff_meta.losses import cross_entropy
from tff_meta.models import model as model_lib

# The weights w = OrderedDict(body, head), for Meta-SGD with a third part
# `rates` = OrderedDict(body, head): alpha, one rate a parameter.
Weights = collections.OrderedDict


@dataclasses.dataclass(frozen=True)
class FedMetaPerConfig(configurations.Configuration):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    inner: `'maml'`, inner steps of the fixed rate alpha, or `'meta_sgd'`, whose
      alpha is learned for every parameter.
    inner_layers: What the inner steps move: `'all'`, the `'head'` alone (ANIL)
      or the `'body'` alone (BOIL); not of Meta-SGD, whose rates say it.
    order: 2 differentiates through the inner steps; 1 does not.
    personal_layers: Dense layers, counted from the output, that stay with the
      client: 0 is FedMeta, 1 the head, more reach into the body.
    first_head: What personal layers a client starts with in its first round: a
      common random draw that follows from the seed (`'server_init'`), or those
      of the server, which are then averaged and sent like all others
      (`'averaged_head'`).
    inner_learning_rate: alpha; of Meta-SGD its initial value.
    outer_learning_rate: beta.
    inner_batch_size: Examples of an inner step; 0 is the whole support set.
    inner_epochs: Passes over the support set.
    outer_optimizer: `'sgd'`, or `'adam_fresh'`, one step of an Adam that starts
      anew every round: about beta times the sign of the gradient.
    query_batch_size: Examples of the minibatches of the query set whose mean
      losses are averaged; 0 is the mean over the whole query set.
    support_fraction: Share of a client's examples that is support; the split is
      the same in all rounds, the order of inner minibatches is not.
    head_score: What a new client judges a stored head by: the mean of the
      losses before each inner step of `'all_epochs'`, or of the `'last_epoch'`.
    eval_support_fraction: Unless a flag says so, the share of its test examples
      that a tested client adapts on; 0 for its training examples instead.
    f1_restrict_to_client_labels: Unless a flag says so, whether classes that a
      client does not have stay out of its macro-F1.
  """

  inner: Literal['maml', 'meta_sgd'] = 'maml'
  inner_layers: Literal['all', 'head', 'body'] = 'all'
  order: Literal[1, 2] = 2
  personal_layers: int = 1
  first_head: Literal['server_init', 'averaged_head'] = 'server_init'
  inner_learning_rate: float = 0.001
  outer_learning_rate: float = 0.001
  inner_batch_size: int = 0
  inner_epochs: int = 1
  outer_optimizer: Literal['sgd', 'adam_fresh'] = 'sgd'
  query_batch_size: int = 0
  support_fraction: float = 0.2
  head_score: Literal['all_epochs', 'last_epoch'] = 'last_epoch'
  eval_support_fraction: float = 0.2
  f1_restrict_to_client_labels: bool = False

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_fraction(self, 'support_fraction')
    if self.inner == 'meta_sgd' and self.inner_layers != 'all':
      raise ValueError(
          "Expected `inner_layers` 'all' with inner 'meta_sgd', which learns"
          f" what to move, found {self.inner_layers!r}. Tip: inner='maml'."
      )
    if self.eval_support_fraction:
      config_checks.check_fraction(self, 'eval_support_fraction')


# Rates of MNIST, MAML (Table 6); for the others see binaries/presets.
PAPER = FedMetaPerConfig()
RELEASE = dataclasses.replace(
    PAPER,
    first_head='averaged_head',
    inner_batch_size=32,
    outer_optimizer='adam_fresh',
    query_batch_size=32,
    f1_restrict_to_client_labels=True,
)
# For the demonstration on digits only.
DEMO = dataclasses.replace(
    PAPER,
    inner_learning_rate=0.1,
    outer_learning_rate=0.3,
    eval_support_fraction=0.0,
)


def initialize(
    classifier: classifiers.LinearClassifier,
    config: FedMetaPerConfig,
    seed: tf.Tensor,
) -> Weights:
  """Draws w; alpha starts as the same number everywhere."""
  weights = classifier.initialize(seed)
  if config.inner == 'meta_sgd':
    weights['rates'] = tf.nest.map_structure(
        lambda w: tf.fill(w.shape, config.inner_learning_rate),
        collections.OrderedDict(weights),
    )
  return weights


def _network(weights: Weights) -> Weights:
  """The weights without their learning rates."""
  return collections.OrderedDict(body=weights['body'], head=weights['head'])


def _loss(classifier, weights, examples, batch_size=0):
  logits = classifier.logits(weights, examples)
  return cross_entropy.mean_over_minibatches(
      logits, examples.y, examples.mask, batch_size
  )


def _rates(config, weights):
  """Rates of the inner steps: alpha, 0 for what they do not move."""
  if config.inner_layers == 'all':
    return weights.get('rates', config.inner_learning_rate)

  def rates_of(part, params):
    moves = part == config.inner_layers
    rate = config.inner_learning_rate if moves else 0.0
    return tf.nest.map_structure(lambda w: tf.constant(rate, w.dtype), params)

  return collections.OrderedDict(
      (part, rates_of(part, params)) for part, params in weights.items()
  )


def _batches(config, support, seed):
  size, epochs = config.inner_batch_size or None, config.inner_epochs
  return episodes.minibatches(tf.size(support.y), size, seed, epochs)


def adapt(
    classifier: classifiers.LinearClassifier,
    config: FedMetaPerConfig,
    weights: Weights,
    support: episodes.Examples,
    seed: tf.Tensor,
) -> tuple[Weights, tf.Tensor]:
  """The inner steps, eq. 4 (MAML) and eq. 6 (Meta-SGD).

    w <- w - alpha * grad L(w, batch), for the minibatches of the support set.

  Args:
    classifier: The network and its head.
    config: The configuration.
    weights: Where the steps begin; w, and alpha for Meta-SGD.
    support: What to adapt to.
    seed: int32 `[2]`, orders the minibatches.

  Returns:
    The adapted `OrderedDict(body, head)`, and how badly it fitted on the way:
    the `head_score`.
  """
  batches, first_scored = _batches(config, support, seed), 0
  if config.head_score == 'last_epoch' and config.inner_epochs:
    num_steps = tf.shape(batches.indices)[0]
    first_scored = num_steps - num_steps // config.inner_epochs
  return adaptation.inner_loop_and_loss(
      lambda w, batch: _loss(classifier, w, batch),
      _network(weights),
      support,
      batches,
      _rates(config, weights),
      order=1,
      first_scored=first_scored,
  )


def outer_gradient(
    classifier: classifiers.LinearClassifier,
    config: FedMetaPerConfig,
    weights: Weights,
    support: episodes.Examples,
    query: episodes.Examples,
    seed: tf.Tensor,
) -> tuple[tf.Tensor, Weights]:
  """G of eq. 5 and 7: the gradient of L(w'(w, alpha), D_q) by w and alpha.

  Args:
    classifier: The network and its head.
    config: The configuration.
    weights: w, and alpha for Meta-SGD.
    support: D_s.
    query: D_q.
    seed: As for `adapt`.

  Returns:
    The query loss of the adapted model, and G in the structure of `weights`.
  """
  meta = adaptation.meta_gradient(
      lambda w, batch: _loss(classifier, w, batch),
      lambda w: _loss(classifier, w, query, config.query_batch_size),
      _network(weights),
      support,
      _batches(config, support, seed),
      _rates(config, weights),
      order=config.order,
  )
  gradient = meta.weights
  if 'rates' in weights:
    gradient['rates'] = meta.learning_rate
  return meta.loss, gradient


def fedmeta_per(
    model: model_lib.Model, config: FedMetaPerConfig, num_classes: int
) -> method.Method:
  """FedMeta-Per; a client's memory is its personal layers, and their rates.

  A known client takes the inner steps from the shared body under its own head.
  A new client takes them under every known client's head and has the one of the
  least `head_score`; so only examples to adapt on decide. Without personal
  layers clients keep nothing, and a new one does as a known one.

  Raises:
    ValueError: If the network does not have so many personal layers.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  personal = personal_layers.parameters(model, config.personal_layers)
  is_sent = config.first_head == 'averaged_head'

  def split(weights):
    return personal_layers.split(weights, personal)

  def server_part(weights):
    return weights if is_sent else split(weights)[0]

  def recall(received, memory):
    return personal_layers.recall(received, personal, memory, is_sent=is_sent)

  def client_update(received, client):
    support, query = episodes.split_support_query(
        episodes.augmented(client.examples, client.seed),
        config.support_fraction,
        client.fixed_seed,
    )
    weights = recall(received, client.memory)
    loss, gradient = outer_gradient(
        classifier, config, weights, support, query, client.seed
    )
    weights = adaptation.outer_step(
        weights,
        gradient,
        config.outer_learning_rate,
        fresh_adam=config.outer_optimizer == 'adam_fresh',
    )
    count = tf.cast(tf.size(query.y), tf.float32)
    return client_work.ClientOutput(
        weights_lib.subtract(received, server_part(weights)),
        count,
        local_sgd.LocalReport(count * loss, count),
        memory=split(weights)[1] or (),
    )

  predict = classifiers.build_predict(classifier)

  def known_client():
    def adapt_own(weights, memory, examples, seed):
      own = recall(weights, memory)
      return adapt(classifier, config, own, examples, seed)[0]

    return personalizer.ClientPersonalizer(
        lambda *args: _network(recall(*args)), adapt_own, predict
    )

  def new_client():
    def adapt_under(weights, own, examples, seed):
      merged = personal_layers.merge(split(weights)[0], own)
      return adapt(classifier, config, merged, examples, seed)

    return memory_bank.build_client_personalizer(adapt_under, predict)

  def memory(seed):
    return split(initialize(classifier, config, seed))[1]

  return method.Method(
      num_classes,
      lambda seed: server_part(initialize(classifier, config, seed)),
      client_update,
      memory=memory if personal else None,
      memory_reaches=(
          {'update': 'itself' if is_sent else 'training', 'loss': 'itself'}
          if personal
          else {}
      ),
      known_client=known_client,
      new_client=new_client if personal else known_client,
  )
