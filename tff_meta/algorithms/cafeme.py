"""CAFeMe: contextual modulation and meta-learning for personalized FL.

One global network is personalized for clients whose labels, inputs or concepts
differ. A modulator looks at a batch of a client's data, averages features over
it, and gates the channels and units of a base network. Both are meta-trained
together, by MAML: a client takes gradient steps on its own batches and then
improves where it started with the loss of where it arrived, on other batches;
the server averages. A client is used after some dozens of fine-tuning steps.

Source: Anna Vettoruzzo, Mohamed-Rafik Bouguelia and Thorsteinn Rögnvaldsson,
"Personalized Federated Learning with Contextual Modulation and Meta-Learning",
2023, https://arxiv.org/abs/2312.15191.
Deviations: BUILD_NOTES.md, CAFeMe.
"""

import collections
import dataclasses
from typing import Literal, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import episodes
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import adaptation
from tff_meta.learners import cyclic_batches
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.losses import cross_entropy
from tff_meta.models import model as model_lib
from tff_meta.models import modulated_cnn


@dataclasses.dataclass(frozen=True)
class CafemeConfig:
  """Configuration; the defaults are the `paper` preset, for CIFAR-10.

  Attributes:
    context_mode: What the modulator sees. `'labeled_support'`: images and
      labels of the batch of the last inner step (in a step: of the step's own),
      which gates query and test examples too; no step, no examples.
      `'unlabeled_self'`: the images of the very batch that is predicted.
    gating: How it acts on a layer's output, see `models.modulated_cnn`.
    maml_order: 1 takes the query gradient at the adapted weights; 2
      differentiates through the inner steps.
    disjoint_support_query: Inner and query batches come from two fixed halves
      of the client's examples; otherwise one after the other from one stream,
      where they overlap if the examples are few.
    client_adam_state: `'persist'`: the client keeps Adam's moments, and where
      it stands in the fixed order of its batches. `'reset'`: both start anew
      every round, and the one step moves every weight by about the rate.
    inner_steps: tau, inner steps, each on a batch of its own.
    query_batches: Batches that make up the query set, at least 1.
    batch_size: Examples of a batch, at least 1; also in prediction.
    inner_learning_rate: Of the inner steps.
    outer_learning_rate: Of Adam, which takes one step a round.
    fine_tuning_steps: SGD steps of a client before it is used.
    fine_tuning_learning_rate: Of the first of them.
    fine_tuning_decay: Factor of that rate every `fine_tuning_decay_steps`.
    fine_tuning_decay_steps: At least 1.
  """

  context_mode: Literal['labeled_support', 'unlabeled_self'] = 'labeled_support'
  gating: Literal['c1', 'c0', 'c2'] = 'c1'
  maml_order: Literal[1, 2] = 1
  disjoint_support_query: bool = True
  client_adam_state: Literal['reset', 'persist'] = 'reset'
  inner_steps: int = 5
  query_batches: int = 6
  batch_size: int = 50
  inner_learning_rate: float = 0.05
  outer_learning_rate: float = 1e-3
  fine_tuning_steps: int = 50
  fine_tuning_learning_rate: float = 0.05
  fine_tuning_decay: float = 0.8
  fine_tuning_decay_steps: int = 5

  def __post_init__(self):
    config_checks.check_fields(self)
    for name in ('query_batches', 'batch_size', 'fine_tuning_decay_steps'):
      config_checks.check_at_least_one(self, name)


PAPER = CafemeConfig()
RELEASE = dataclasses.replace(
    PAPER,
    context_mode='unlabeled_self',
    disjoint_support_query=False,
    client_adam_state='persist',
)
# Only for the demonstration: small batches for the embedded digits, and so few
# steps at the end that one sees what was trained before.
DEMO = dataclasses.replace(
    PAPER, batch_size=10, query_batches=2, fine_tuning_steps=5
)


class Personalized(NamedTuple):
  """A client's model with a labelled context.

  Attributes:
    weights: `OrderedDict(body, head)`.
    eta: What the modulator made of the context, float32 `[V, G]`.
  """

  weights: model_lib.Weights
  eta: tf.Tensor


def build_network(
    model: model_lib.Model, config: CafemeConfig, num_classes: int
) -> modulated_cnn.ModulatedModel:
  """The network in the variant that the configuration asks for.

  Args:
    model: A `ModulatedModel`.
    config: The configuration.
    num_classes: C, of the head and of labels in a context.

  Returns:
    A `ModulatedModel`.

  Raises:
    ValueError: If the model has no modulator.
  """
  if not isinstance(model, modulated_cnn.ModulatedModel):
    raise ValueError(
        'Expected `model` with a modulator, as CAFeMe needs it, found'
        f' {model.name!r}. Tip: use `modulated_cnn`.'
    )
  is_labeled = config.context_mode == 'labeled_support'
  return model.rebuild(
      num_classes, gating=config.gating, num_labels=num_classes * is_labeled
  )


def modulated_loss(
    network: modulated_cnn.ModulatedModel,
    weights: model_lib.Weights,
    context: episodes.Examples,
    batch: episodes.Examples,
) -> tf.Tensor:
  """Cross-entropy of a batch under the gates that a context gives.

  Args:
    network: The modulated network.
    weights: Its `OrderedDict(body, head)`.
    context: `Examples` `[B, ...]` that the modulator sees.
    batch: `Examples` `[n, ...]` to predict.

  Returns:
    The mean over the batch, a scalar in nats.

  Source: Vettoruzzo et al. 2023, section 4.
  """
  eta = network.modulate(weights['body'], context.x, context.y, context.mask)
  logits = network.modulated_logits(weights, eta, batch.x, batch.mask)
  return cross_entropy.softmax_cross_entropy(logits, batch.y, batch.mask)


class ClientBatches(NamedTuple):
  """A client's batches of a round.

  Attributes:
    examples: The examples that inner batches are taken from.
    support: Their `Minibatches`, `tau` of them.
    query: The query batches in one, `Examples`.
  """

  examples: episodes.Examples
  support: episodes.Minibatches
  query: episodes.Examples


def client_batches(
    config: CafemeConfig,
    examples: episodes.Examples,
    split_seed: tf.Tensor,
    order_seed: tf.Tensor,
    num_rounds: int | tf.Tensor,
) -> ClientBatches:
  """The batches of a client's round, see `cyclic_batches.cyclic_minibatches`.

  Args:
    config: The configuration.
    examples: All examples of the client, none of them padding.
    split_seed: int32 `[2]`, of the two halves if support and query are
      disjoint.
    order_seed: int32 `[2]`, of the order of the batches.
    num_rounds: int32 scalar, rounds that have taken batches from this order.

  Returns:
    `ClientBatches`; without `disjoint_support_query` the query batches are
    those that follow the inner ones.
  """
  tau, num_query = config.inner_steps, config.query_batches

  def stream(examples, seed, num_batches):
    return cyclic_batches.cyclic_minibatches(
        tf.size(examples.y),
        config.batch_size,
        num_batches,
        seed,
        num_rounds * num_batches,
    )

  if config.disjoint_support_query:
    fold_in = tf.random.experimental.stateless_fold_in
    pool, query_pool = episodes.split_support_query(examples, 0.5, split_seed)
    support = stream(pool, fold_in(order_seed, 0), tau)
    query = stream(query_pool, fold_in(order_seed, 1), num_query)
  else:
    pool, query_pool = examples, examples
    batches = stream(examples, order_seed, tau + num_query)
    support = episodes.Minibatches(*(part[:tau] for part in batches))
    query = episodes.Minibatches(*(part[tau:] for part in batches))
  rows, mask = (tf.reshape(part, [-1]) for part in query)
  return ClientBatches(pool, support, episodes.take(query_pool, rows, mask))


def client_meta_gradient(
    network: modulated_cnn.ModulatedModel,
    config: CafemeConfig,
    weights: model_lib.Weights,
    batches: ClientBatches,
) -> tuple[tf.Tensor, model_lib.Weights]:
  """The gradient by which a client improves the initial weights omega.

  phi_0 = omega;  phi_s = phi_{s-1} - a * grad loss(b_s; phi_{s-1}), s = 1..tau
  g = the gradient of loss(query; phi_tau) with respect to phi_tau
      (maml_order 1) or to omega (maml_order 2)

  Args:
    network: The modulated network.
    config: The configuration.
    weights: omega, `OrderedDict(body, head)`.
    batches: The client's batches.

  Returns:
    The query loss and g.

  Source: Vettoruzzo et al. 2023, section 4, and the released code.
  """
  # In front, a batch of no examples: what there is before the first step.
  rows, mask = (tf.pad(part, [[1, 0], [0, 0]])[-1] for part in batches.support)
  last_batch = episodes.take(batches.examples, rows, mask)
  is_labeled = config.context_mode == 'labeled_support'
  context = last_batch if is_labeled else batches.query

  def adapt(weights):
    return adaptation.inner_loop(
        lambda w, batch: modulated_loss(network, w, batch, batch),
        weights,
        batches.examples,
        batches.support,
        config.inner_learning_rate,
        order=config.maml_order,
    )

  # In first order the tape need not see the inner loop, which takes long.
  is_first_order = config.maml_order == 1
  start = adapt(weights) if is_first_order else weights
  with tf.GradientTape() as tape:
    tape.watch(start)
    adapted = start if is_first_order else adapt(start)
    loss = modulated_loss(network, adapted, context, batches.query)
  return loss, tape.gradient(
      loss, start, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )


def build_cafeme(
    model: model_lib.Model,
    config: CafemeConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds CAFeMe; the loss it reports is that of the query sets.

  Args:
    model: A `ModulatedModel`; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the mean, clients counting alike.
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `LearningProcess`; where `client_adam_state` is `'persist'`, a
    `StatefulLearningProcess` whose clients keep `num_rounds`, an int32 scalar
    that says which batches come next, and `adam`, the optimizer's state.

  Raises:
    ValueError: If the model has no modulator.
  """
  network = build_network(model, config, num_classes)
  optimizer = composition.build_optimizer('adam', config.outer_learning_rate)
  persists = config.client_adam_state == 'persist'

  def initialize():
    return network.initialize(composition.initial_seed(seed))

  def new_memory():
    specs = tf.nest.map_structure(
        lambda w: tf.TensorSpec(w.shape, w.dtype), initialize()
    )
    adam = optimizer.initialize(specs)
    return collections.OrderedDict(
        num_rounds=tf.constant(0),
        adam=tf.nest.map_structure(tf.convert_to_tensor, adam),
    )

  def client_update(weights, client):
    memory = client.memory.value if persists else new_memory()
    order_seed = client.fixed_seed if persists else client.seed
    batches = client_batches(
        config,
        client.examples,
        client.fixed_seed,
        order_seed,
        memory['num_rounds'],
    )
    loss, gradient = client_meta_gradient(network, config, weights, batches)
    adam, moved = optimizer.next(memory['adam'], weights, gradient)
    kept = collections.OrderedDict(
        num_rounds=memory['num_rounds'] + 1, adam=adam
    )
    num_query = tf.cast(tf.size(batches.query.y), tf.float32)
    return client_work.ClientOutput(
        weights_lib.subtract(weights, moved),
        tf.cast(num_query > 0, tf.float32),
        local_sgd.LocalReport(loss * num_query, num_query),
        memory=kept if persists else (),
    )

  return composition.build_learning_process(
      initialize,
      network.input_shape,
      client_update,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=new_memory if persists else None,
  )


def build_cafeme_client(
    model: model_lib.Model, config: CafemeConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client, known or new, fine-tunes the whole network.

  Args:
    model: A `ModulatedModel`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer`; its curve has `fine_tuning_steps + 1` points. What a
    client keeps of training is not used.

  Raises:
    ValueError: If the model has no modulator.

  Source: the test of the released code; with a labelled context the batch of
  the last step gates the test examples.
  """
  network = build_network(model, config, num_classes)
  is_labeled = config.context_mode == 'labeled_support'

  def to_personalized(weights, batch):
    if not is_labeled:
      return weights
    eta = network.modulate(weights['body'], batch.x, batch.y, batch.mask)
    return Personalized(weights, eta)

  def predict(personalized, batch):
    if is_labeled:
      weights, eta = personalized
      logits = network.modulated_logits(weights, eta, batch.x, batch.mask)
    else:
      logits = network.logits(personalized, batch.x, batch.mask)
    return tf.argmax(logits, axis=1, output_type=tf.int32)

  return fine_tuning.build_client_personalizer(
      fine_tuning.of_config(config),
      network.input_shape,
      lambda w, batch: modulated_loss(network, w, batch, batch),
      predict,
      to_personalized,
  )
