"""Federated meta-learning with personal layers (FedMeta-Per), and FedMeta.

Clients learn an initial model that adapts to a small support set in one pass:
they take inner steps on it and send back what the loss on their query set says
about where the steps began, and about their rates (Meta-SGD). The last layer,
with its rates, never leaves a client, which keeps it for its next round. A
known client adapts from the shared body under its own head; a new one tries the
heads of all known clients and takes the one that fits best. Without personal
layers this is FedMeta.

Source: Bao-Long Nguyen, Tat Cuong Cao and Bac Le, "Meta-Learning and
Personalization Layer in Federated Learning", ACIIDS 2022; FedMeta: Fei Chen, Mi
Luo, Zhenhua Dong, Zhenguo Li and Xiuqiang He, "Federated Meta-Learning with
Fast Convergence and Efficient Communication", 2018,
https://arxiv.org/abs/1802.07876.
Deviations: BUILD_NOTES.md, FedMeta-Per.
"""

import collections
import dataclasses
from typing import Literal

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import episodes
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import adaptation
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
class FedMetaPerConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    inner: `'maml'`, inner steps of the fixed rate alpha, or `'meta_sgd'`, whose
      alpha is learned for every parameter.
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
    config_checks.check_fields(self)
    config_checks.check_fraction(self, 'support_fraction')
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
    model: model_lib.Model, config: FedMetaPerConfig, seed: tf.Tensor
) -> Weights:
  """Draws w; alpha starts as the same number everywhere."""
  weights = model.initialize(seed)
  if config.inner == 'meta_sgd':
    weights['rates'] = tf.nest.map_structure(
        lambda w: tf.fill(w.shape, config.inner_learning_rate),
        collections.OrderedDict(weights),
    )
  return weights


def _network(weights: Weights) -> Weights:
  """The weights without their learning rates."""
  return collections.OrderedDict(body=weights['body'], head=weights['head'])


def _loss(model, weights, examples, batch_size=0):
  logits = model.logits(weights, examples.x, examples.mask)
  return cross_entropy.mean_over_minibatches(
      logits, examples.y, examples.mask, batch_size
  )


def _batches(config, support, seed):
  size, epochs = config.inner_batch_size or None, config.inner_epochs
  return episodes.minibatches(tf.size(support.y), size, seed, epochs)


def adapt(
    model: model_lib.Model,
    config: FedMetaPerConfig,
    weights: Weights,
    support: episodes.Examples,
    seed: tf.Tensor,
) -> tuple[Weights, tf.Tensor]:
  """The inner steps, eq. 4 (MAML) and eq. 6 (Meta-SGD).

    w <- w - alpha * grad L(w, batch), for the minibatches of the support set.

  Args:
    model: The network, with a head.
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
      lambda w, batch: _loss(model, w, batch),
      _network(weights),
      support,
      batches,
      weights.get('rates', config.inner_learning_rate),
      order=1,
      first_scored=first_scored,
  )


def outer_gradient(
    model: model_lib.Model,
    config: FedMetaPerConfig,
    weights: Weights,
    support: episodes.Examples,
    query: episodes.Examples,
    seed: tf.Tensor,
) -> tuple[tf.Tensor, Weights]:
  """G of eq. 5 and 7: the gradient of L(w'(w, alpha), D_q) by w and alpha.

  Args:
    model: The network, with a head.
    config: The configuration.
    weights: w, and alpha for Meta-SGD.
    support: D_s.
    query: D_q.
    seed: As for `adapt`.

  Returns:
    The query loss of the adapted model, and G in the structure of `weights`.
  """
  meta = adaptation.meta_gradient(
      lambda w, batch: _loss(model, w, batch),
      lambda w: _loss(model, w, query, config.query_batch_size),
      _network(weights),
      support,
      _batches(config, support, seed),
      weights.get('rates', config.inner_learning_rate),
      order=config.order,
  )
  gradient = meta.weights
  if 'rates' in weights:
    gradient['rates'] = meta.learning_rate
  return meta.loss, gradient


def build_client_update(model: model_lib.Model, config: FedMetaPerConfig):
  """A client's round: `(weights, ClientInput) -> ClientOutput`."""
  personal = personal_layers.parameters(model, config.personal_layers)
  is_sent = config.first_head == 'averaged_head'

  def client_update(received, client):
    support, query = episodes.split_support_query(
        episodes.augmented(client.examples, client.seed),
        config.support_fraction,
        client.fixed_seed,
    )
    weights = personal_layers.recall(
        received, personal, client.memory, is_sent=is_sent
    )
    loss, gradient = outer_gradient(
        model, config, weights, support, query, client.seed
    )
    weights = adaptation.outer_step(
        weights,
        gradient,
        config.outer_learning_rate,
        fresh_adam=config.outer_optimizer == 'adam_fresh',
    )
    after, own = personal_layers.split(weights, personal)
    if is_sent:
      after = weights
    count = tf.cast(tf.size(query.y), tf.float32)
    return client_work.ClientOutput(
        weights_lib.subtract(received, after),
        count,
        local_sgd.LocalReport(count * loss, count),
        memory=own or (),
    )

  return client_update


def memory_flow(config: FedMetaPerConfig) -> dict[str, str]:
  """What a client's memory reaches; see `AlgorithmSpec.memory_flow`."""
  if not config.personal_layers:
    return {}  # Clients keep nothing.
  is_sent = config.first_head == 'averaged_head'
  return {'update': 'itself' if is_sent else 'training', 'loss': 'itself'}


def build_fedmeta_per(
    model: model_lib.Model,
    config: FedMetaPerConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds FedMeta-Per.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the shared weights and rates; by default the mean, weighted
      by the size of the query sets (eq. 2 and 3).
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `LearningProcess` on `<examples, salt, memory>` client data; without
    personal layers on `<examples, salt>`.

  Raises:
    ValueError: If the network does not have so many personal layers.
  """
  model = model.with_head(num_classes)
  personal = personal_layers.parameters(model, config.personal_layers)

  def initial(side):
    weights = initialize(model, config, composition.initial_seed(seed))
    if side == 'server' and config.first_head == 'averaged_head':
      return weights
    shared, own = personal_layers.split(weights, personal)
    return shared if side == 'server' else own

  return composition.build_learning_process(
      lambda: initial('server'),
      model,
      build_client_update(model, config),
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=(lambda: initial('client')) if personal else None,
  )


def build_fedmeta_per_known_client(
    model: model_lib.Model, config: FedMetaPerConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A known client adapts from the shared body under its own head.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that takes the inner steps on the client's examples.
  """
  model = model.with_head(num_classes)
  personal = personal_layers.parameters(model, config.personal_layers)

  def recall(weights, memory):
    is_sent = config.first_head == 'averaged_head'
    return personal_layers.recall(weights, personal, memory, is_sent=is_sent)

  def adapt_own(weights, memory, examples, seed):
    own = recall(weights, memory)
    return adapt(model, config, own, examples, seed)[0]

  def predict(adapted, query):
    logits = model.logits(adapted, query.x, query.mask)
    return tf.argmax(logits, axis=1, output_type=tf.int32)

  return personalizer.ClientPersonalizer(
      lambda *args: _network(recall(*args)), adapt_own, predict
  )


def build_fedmeta_per_new_client(
    model: model_lib.Model, config: FedMetaPerConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A new client adapts under the stored head that fits it best.

  It adapts under every known client's head and takes the one of the least
  `head_score`; so only examples to adapt on decide. Without personal layers it
  does as a known client.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that uses the bank of stored heads.
  """
  known = build_fedmeta_per_known_client(model, config, num_classes=num_classes)
  model = model.with_head(num_classes)
  personal = personal_layers.parameters(model, config.personal_layers)
  if not personal:
    return known

  def adapt_under(weights, own, examples, seed):
    shared, _ = personal_layers.split(weights, personal)
    merged = personal_layers.merge(shared, own)
    return adapt(model, config, merged, examples, seed)

  return memory_bank.build_client_personalizer(adapt_under, known.predict)
