"""Few-round learning (FRL) with global-prototype-assisted learning (GPAL).

A service provider meta-trains one initial model so that any later group of
clients, with classes never seen, gets a good *global* model within R rounds.
Training mimics deployment: an episode takes K participants through R federated
rounds on their support sets and then updates the initial model (first-order
MAML) with the query loss of the model they reached. Clients classify by
distance to class prototypes; the prototypes are averaged over the clients every
round and steer the next round's local training, so that clients with few
classes do not overfit to them.

One `next` of the process is ONE communication round. The server state holds a
phase: rounds 0 to R - 1 train the group's model, the round of phase R updates
the initial model. The driver keeps the cohort for these R + 1 rounds.

Source: Younghyun Park, Dong-Jun Han, Do-Yeon Kim, Jun Seo and Jaekyun Moon,
"Few-Round Learning for Federated Learning", NeurIPS 2021,
https://proceedings.neurips.cc/paper/2021/hash/f065d878ccfb4cc4f4265a4ff8bafa9a-Abstract.html
Deviations: docs/algorithms/frl.md.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.aggregators import prototypes as prototypes_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import few_round
from tff_meta.learners import local_sgd
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FrlConfig(configurations.Averaged):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    classifier: `'distance'` to prototypes, or a `'linear'` layer (which has no
      prototypes and no GPAL).
    gpal: Whether global prototypes enter the loss. Without it they still
      classify at the end ("FRL distance" in the paper's tables).
    rounds: R, federated rounds of an episode and of a deployment, at least 0 in
      training; at least 1 to deploy.
    epochs: E, local epochs of a round.
    batch_size: Examples of a minibatch in training; 0 is the whole set.
    inner_learning_rate: alpha, of the clients' rounds.
    meta_learning_rate: beta, of the update of the initial model.
    weight_decay: Coupled L2 coefficient of both.
    local_weight: gamma, weight of the loss against local prototypes.
    aux_weight: 1 - gamma, weight of the loss against global prototypes. The
      released code uses 1 and 0.2, which is 1.2 times gamma = 5/6.
    exclude_true_class: Leave the true class out of the softmax's denominator,
      as eq. 2 prints it; the code and any single-class client need it in.
    squared_distance: Squared Euclidean distance; otherwise its root.
    prototype_source: Weights that embed the uploaded prototypes: those
      `'downloaded'` (Algorithm 1, line 9) or the client's `'updated'` ones.
    prototype_mean: Over the `'holders'` of a class, or over `'all'` clients
      (as the aggregation, lines 13 and 14, is printed).
    meta_update: `'single_full_query'`, one step on the whole query set; or
      `'first_then_plain'`, a step a query minibatch, of which only the first
      uses the gradient at theta^R.
    meta_prototypes: What the query is compared with locally: prototypes of the
      `'query'` batch itself, or those `'stored_support'` ones that the client
      uploaded in the last round.
    support_fraction: Share of every class's examples that is support.
    deployment_learning_rate: alpha at deployment.
    deployment_batch_size: Examples of a minibatch at deployment.
  """

  classifier: Literal['distance', 'linear'] = 'distance'
  gpal: bool = True
  rounds: int = 3
  epochs: int = 1
  batch_size: int = 60
  inner_learning_rate: float = 1e-4
  meta_learning_rate: float = 1e-3
  weight_decay: float = 0.0
  local_weight: float = 5 / 6
  aux_weight: float = 1 / 6
  exclude_true_class: bool = False
  squared_distance: bool = True
  prototype_source: Literal['downloaded', 'updated'] = 'downloaded'
  prototype_mean: Literal['holders', 'all'] = 'holders'
  meta_update: Literal['single_full_query', 'first_then_plain'] = (
      'single_full_query'
  )
  meta_prototypes: Literal['query', 'stored_support'] = 'query'
  support_fraction: float = 0.5
  deployment_learning_rate: float = 1e-4
  deployment_batch_size: int = 60

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_fraction(self, 'support_fraction')
    if self.meta_prototypes == 'stored_support' and self.rounds == 0:
      raise ValueError(
          'Expected `rounds` of at least 1 to store support prototypes in,'
          " found 0. Tip: use meta_prototypes='query'."
      )


PAPER = FrlConfig()
RELEASE = dataclasses.replace(
    PAPER,
    weight_decay=5e-4,
    local_weight=1.0,
    aux_weight=0.2,
    prototype_source='updated',
    meta_update='first_then_plain',
    meta_prototypes='stored_support',
    uniform=True,
    deployment_learning_rate=1e-3,
    deployment_batch_size=30,
)
# For demonstrations: the embedded digits learn little at the published rates in
# a few hundred rounds.
DEMO = dataclasses.replace(
    PAPER,
    inner_learning_rate=0.5,
    meta_learning_rate=0.5,
    deployment_learning_rate=0.5,
)


class FrlState(NamedTuple):
  """The global state of the process; all of it is broadcast.

  Attributes:
    phi: The initial model being learned, `OrderedDict(body, head)`, float32.
    theta: The group's model theta^r of this episode, like `phi`.
    prototypes: The group's `Prototypes` Gamma^{r-1}: means `[C, D]`, present
      `[C]`; none present at r = 0.
    phase: int32 scalar r in 0..R; R is the round of the meta-update.
    episode: int32 scalar, number of the episode, from 0. It decides how clients
      split their examples.
    previous: `(theta^{r-1}, Gamma^{r-2})` where clients classify by distance
      and `meta_prototypes` is `'stored_support'`, otherwise `()`. A client
      keeps nothing between rounds: it replays its last round from them to have
      its stored prototypes again.
  """

  phi: Any
  theta: Any
  prototypes: prototypical.Prototypes
  phase: tf.Tensor
  episode: tf.Tensor
  previous: Any


def _classifier(model, config, num_classes):
  """What is trained, for that many classes."""
  if config.classifier == 'linear':
    return classifiers.LinearClassifier(model, num_classes)
  return classifiers.DistanceClassifier(
      model,
      num_classes,
      local_weight=config.local_weight,
      aux_weight=config.aux_weight if config.gpal else 0.0,
      exclude_true_class=config.exclude_true_class,
      squared=config.squared_distance,
  )


def _stores_prototypes(config):
  """Whether a query is compared with what a client uploaded last."""
  by_distance = config.classifier == 'distance'  # Others have no prototypes.
  return by_distance and config.meta_prototypes == 'stored_support'


def _round_settings(config, learning_rate, batch_size):
  return few_round.RoundSettings(
      optimizer=optimizers.build_optimizer('sgd', learning_rate),
      batch_size=batch_size,
      num_epochs=config.epochs,
      weight_decay=config.weight_decay,
      prototype_source=config.prototype_source,
      prototype_mean=config.prototype_mean,
      uniform=config.uniform,
  )


def meta_steps(
    loss_fn,
    config: FrlConfig,
    phi: Any,
    theta: Any,
    query: episodes.Examples,
    seed: tf.Tensor,
):
  """The meta-update of a client: Algorithm 1, lines 18 and 19.

    phi_k = phi - beta * grad_theta loss(theta^R, Q_k)

  First order: the derivative of theta^R by phi is taken as the identity. With
  `'first_then_plain'` the query set comes in minibatches; the first step is the
  above and every later one takes the gradient at phi_k itself.

  Args:
    loss_fn: `(weights, Examples) -> scalar`.
    config: The configuration.
    phi: The initial model.
    theta: The group's model after R rounds.
    query: The client's query `Examples`.
    seed: int32 `[2]`, orders the minibatches.

  Returns:
    phi_k, and a `LocalReport` of the losses.
  """
  full = config.meta_update == 'single_full_query'
  batches = episodes.minibatches(
      tf.size(query.y), None if full else config.batch_size or None, seed
  )

  def step(i, phi_k, loss_sum, num_examples):
    batch = episodes.take(query, batches, i)
    # Not `==`: of tensors in TFF's graphs, it compares Python identities.
    is_first = tf.equal(i, 0)
    point = tf.nest.map_structure(
        lambda t, p: tf.where(is_first, t, p), theta, phi_k
    )
    with tf.GradientTape() as tape:
      tape.watch(point)
      loss = loss_fn(point, batch)
    gradient = tape.gradient(
        loss, point, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    phi_k = tf.nest.map_structure(
        lambda p, g: p
        - config.meta_learning_rate * (g + config.weight_decay * p),
        phi_k,
        gradient,
    )
    count = tf.reduce_sum(batch.mask)
    return i + 1, phi_k, loss_sum + count * loss, num_examples + count

  _, phi_k, loss_sum, num_examples = tf.while_loop(
      lambda i, *_: i < tf.shape(batches.indices)[0],
      step,
      (tf.constant(0), phi, tf.constant(0.0), tf.constant(0.0)),
  )
  return phi_k, local_sgd.LocalReport(loss_sum, num_examples)


def start_episode(
    phi: Any,
    episode: tf.Tensor,
    classifier: classifiers.Classifier,
    config: FrlConfig,
) -> FrlState:
  """The state in phase 0: theta^0 = phi, no prototypes."""
  none = classifier.no_prototypes()
  previous = (phi, none) if _stores_prototypes(config) else ()
  return FrlState(phi, phi, none, tf.constant(0), episode, previous)


def next_state(
    state: FrlState,
    update: prototypes_lib.ModelAndPrototypes,
    classifier: classifiers.Classifier,
    config: FrlConfig,
    *,
    noisy: bool = False,
) -> FrlState:
  """The server's part of a round: Algorithm 1, lines 13, 14 and 21.

  A change that is not finite, as a mean over nobody is none, counts as zeros. A
  class of which every holder is missing keeps its prototype of the round before
  within an episode: the group still has the class.

  Args:
    state: Before the round.
    update: What the clients' updates were aggregated to.
    classifier: What is trained.
    config: The configuration.
    noisy: Whether noise says which classes were held. Then the prototypes are
      those of this round alone: what noise has made up would stay otherwise.

  Returns:
    The state after the round.
  """
  change, _ = weights_lib.where_finite_or_zero(update.model)
  prototypes = update.prototypes
  if not noisy:
    prototypes = prototypical.or_before(prototypes, state.prototypes)

  def after_round():
    return state._replace(
        theta=weights_lib.subtract(state.theta, change),
        prototypes=prototypes,
        phase=state.phase + 1,
        previous=(state.theta, state.prototypes) if state.previous else (),
    )

  def after_meta_update():
    phi = weights_lib.subtract(state.phi, change)
    return start_episode(phi, state.episode + 1, classifier, config)

  return tf.cond(state.phase < config.rounds, after_round, after_meta_update)


def frl(
    model: model_lib.Model, config: FrlConfig, num_classes: int
) -> method.Method:
  """FRL; one `next` of its process is one communication round.

  Keep the cohort for `config.rounds + 1` consecutive rounds. The weights of the
  model are phi. A new group does R rounds from them, and then classifies by the
  nearest global prototype.
  """
  classifier = _classifier(model, config, num_classes)
  settings = _round_settings(
      config, config.inner_learning_rate, config.batch_size
  )

  def client_update(state, run_seed, data):
    """A client's work in any phase.

    The split of its data into support and query, per class, depends on the
    run's seed, the episode and its salt, so that it is the same in the R + 1
    rounds of an episode.
    """
    fold_in = tf.random.experimental.stateless_fold_in
    seed = fold_in(fold_in(run_seed, state.episode), data.salt)
    split_seed, round_seed = fold_in(seed, 0), fold_in(seed, 1 + state.phase)
    # Augmented once for an episode, as in the released code.
    support, query = episodes.split_support_query(
        episodes.augmented(data.examples, split_seed),
        config.support_fraction,
        split_seed,
        num_classes,
    )

    def local_round(theta, prototypes, seed):
      return few_round.client_round(
          classifier, settings, theta, prototypes, support, seed
      )

    def train():
      upload = local_round(state.theta, state.prototypes, round_seed)
      change = weights_lib.subtract(state.theta, upload.weights)
      learned = classifiers.learns_from(
          classifier, support, state.prototypes, batch_size=config.batch_size
      )
      return (
          prototypes_lib.ModelAndPrototypes(change, upload.prototypes),
          upload.weight,
          upload.report,
          learned,
      )

    def meta():
      stored = None
      if _stores_prototypes(config):
        theta, prototypes = state.previous
        last = local_round(theta, prototypes, fold_in(seed, config.rounds))
        stored = last.prototypes

      def loss_fn(weights, batch):
        return classifier.loss(weights, batch, state.prototypes, stored)

      phi_k, report = meta_steps(
          loss_fn, config, state.phi, state.theta, query, round_seed
      )
      weight = local_sgd.client_weight(
          tf.size(support.y) + tf.size(query.y), config.uniform
      )
      change = weights_lib.subtract(state.phi, phi_k)
      is_full = config.meta_update == 'single_full_query'
      learned = classifiers.learns_from(
          classifier,
          query,
          state.prototypes,
          stored and stored.present,
          batch_size=0 if is_full else config.batch_size,
      )
      none = classifier.no_prototypes()
      return (
          prototypes_lib.ModelAndPrototypes(change, none),
          weight,
          report,
          learned,
      )

    update, weight, report, learned = tf.cond(
        state.phase < config.rounds, train, meta
    )
    return client_work.ClientOutput(
        update, weight, report, learned=learned, change=update.model
    )

  num_rows = num_classes if config.classifier == 'distance' else 0
  size = model.embedding_size
  spec = tf.TensorSpec
  prototypes = method.Channel(
      'class prototypes',
      prototypical.PrototypeSums(
          spec([num_rows, size]), spec([num_rows]), spec([])
      ),
      lambda models, total: prototypes_lib.ModelAndPrototypesFactory(
          models, total, over=config.prototype_mean
      ),
      place='update',
      bound=prototypes_lib.BOUND,
  )

  def compose(model, seed, aggregator, aggregation):
    @tff.tensorflow.computation
    def initial_state():
      phi = classifier.initialize(composition.initial_seed(seed))
      return start_episode(phi, tf.constant(0), classifier, config)

    state_type = initial_state.type_signature.result
    work = client_work.build_client_work(
        state_type,
        model,
        client_update,
        client_work.run_seed(seed),
        num_classes=num_classes,
        metrics=aggregation.metrics,
    )
    result_type = work.process.next.type_signature.result.result.member
    update_process = aggregator.create(
        result_type.update, result_type.update_weight
    )
    process = composition.compose(
        initial_state,
        work,
        update_process,
        composition.build_stateless_finalizer(
            state_type,
            update_process.next.type_signature.result.result.member,
            lambda state, update: next_state(
                state,
                update,
                classifier,
                config,
                noisy=aggregation.adds_noise,
            ),
        ),
    )
    return composition.with_model_weights(
        process,
        get=lambda state: state.phi,
        put=lambda state, phi: start_episode(
            phi, state.episode + 1, classifier, config
        ),
    )

  deployment = _round_settings(
      config, config.deployment_learning_rate, config.deployment_batch_size
  )

  def group():
    config_checks.check_at_least_one(config, 'rounds')
    return few_round.build_group_personalizer(
        classifier, deployment, config.rounds
    )

  def gpal_rounds():
    if config.classifier != 'distance':
      raise ValueError(
          "Expected the classifier 'distance', the only one with GPAL, found"
          f' {config.classifier!r}.'
      )
    if config.rounds < 2 or not config.aux_weight:
      raise ValueError(
          'Expected `rounds` of at least 2, because the first has no global'
          ' prototypes yet, and a positive `aux_weight`, found'
          f' {config.rounds} and {config.aux_weight}.'
      )
    variants = (
        _classifier(model, dataclasses.replace(config, gpal=gpal), num_classes)
        for gpal in (config.gpal, False, True)
    )
    return few_round.GpalRounds(config.rounds, deployment, *variants)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      # Of theta, and of phi in the last round of an episode.
      updates_alternate=config.rounds > 0,
      channels=(prototypes,),
      compose=compose,
      group=group,
      gpal_rounds=gpal_rounds,
  )
