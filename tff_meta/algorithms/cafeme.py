"""CAFeMe: contextual modulation and meta-learning for personalized FL.

One global network is personalized for clients whose labels, inputs or concepts
differ. A modulator looks at a batch of a client's data, averages features over
it, and gates the channels and units of a base network. Both are meta-trained
together, by MAML: a client takes gradient steps on its own batches and then
improves where it started with the loss of where it arrived, on other batches;
the server averages. A client is used after some dozens of fine-tuning steps.

Source: Anna Vettoruzzo, Mohamed-Rafik Bouguelia and Thorsteinn Rögnvaldsson,
"Personalized Federated Learning with Contextual Modulation and Meta-Learning",
2023, https://arxiv.org/abs/2312.15191, Algorithms 1 and 2.
Deviations: docs/algorithms/cafeme.md.
"""

import collections
import dataclasses
from typing import Literal, NamedTuple

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import optimizers
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
class CafemeConfig(configurations.FineTuned):
  """Configuration; the defaults are the `paper` preset, for CIFAR-10.

  Attributes:
    context_mode: What the modulator sees. `'labeled_support'`: images and
      labels, in a step of its own batch, for query and test examples of what
      `query_context` says. `'unlabeled_self'`: the images of the very batch
      that is predicted.
    query_context: With labels: `'last_batch'`, that of the last step, or
      `'support'`, the batches of all inner steps, and for test examples all
      examples that a client fine-tunes on. Before any step: no examples.
    gating: How it acts on a layer's output, see `models.modulated_cnn`.
    maml_order: 1 takes the query gradient at the adapted weights; 2
      differentiates through the inner steps.
    disjoint_support_query: Inner and query batches come from two fixed parts of
      the client's examples; otherwise one after the other from one stream,
      where they overlap if the examples are few.
    support_fraction: Share of the examples that is the part of inner batches.
    batch_position: `'persist'`: a client has one order of its batches for good,
      and goes on where its last round ended. `'reset'`: a new order every
      round.
    client_adam_state: `'persist'`: a client keeps Adam's moments. `'reset'`:
      they start anew every round, so that the one step moves every weight by
      about the rate.
    inner_steps: tau, inner steps, each on a batch of its own.
    query_batches: Batches that make up the query set, at least 1.
    batch_size: Examples of a batch, at least 1; also in prediction.
    inner_learning_rate: Of the inner steps.
    outer_learning_rate: Of Adam, which takes one step a round.
  """

  context_mode: Literal['labeled_support', 'unlabeled_self'] = 'labeled_support'
  query_context: Literal['last_batch', 'support'] = 'last_batch'
  gating: Literal['c1', 'c0', 'c2'] = 'c1'
  maml_order: Literal[1, 2] = 1
  disjoint_support_query: bool = True
  support_fraction: float = 0.5
  batch_position: Literal['reset', 'persist'] = 'reset'
  client_adam_state: Literal['reset', 'persist'] = 'reset'
  inner_steps: int = 5
  query_batches: int = 6
  batch_size: int = 50
  inner_learning_rate: float = 0.05
  outer_learning_rate: float = 1e-3
  fine_tuning_learning_rate: float = 0.05

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_fraction(self, 'support_fraction')
    for name in ('query_batches', 'batch_size'):
      config_checks.check_at_least_one(self, name)
    is_self = self.context_mode == 'unlabeled_self'
    if is_self and self.query_context != 'last_batch':
      raise ValueError(
          "Expected `query_context` as 'last_batch', its default, where"
          " `context_mode` is 'unlabeled_self' and it says nothing, found"
          f" {self.query_context!r}. Tip: `context_mode='labeled_support'`."
      )


PAPER = CafemeConfig()
RELEASE = dataclasses.replace(
    PAPER,
    context_mode='unlabeled_self',
    disjoint_support_query=False,
    batch_position='persist',
    client_adam_state='persist',
)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, batch_size=10, query_batches=2)


class Personalized(NamedTuple):
  """A client's model with a labelled context.

  Attributes:
    weights: `OrderedDict(body, head)`.
    eta: What the modulator made of the context, float32 `[V, G]`.
  """

  weights: model_lib.Weights
  eta: tf.Tensor


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

  Source: Vettoruzzo et al. 2023, section 4; the gates are eq. 4.4.
  """
  eta = network.modulate(weights['body'], context.x, context.y, context.mask)
  logits = network.modulated_logits(weights, eta, batch.x, batch.mask)
  return cross_entropy.softmax_cross_entropy(logits, batch.y, batch.mask)


def client_meta_gradient(
    network: modulated_cnn.ModulatedModel,
    config: CafemeConfig,
    weights: model_lib.Weights,
    batches: cyclic_batches.SupportAndQuery,
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

  Source: Vettoruzzo et al. 2023, eqs. 3.2 (adaptation) and 3.3 (the update of
  what it began with), and the released code.
  """
  context = batches.query
  if config.context_mode == 'labeled_support':
    # In front, a batch of no examples: what there is before the first step.
    parts = (tf.pad(part, [[1, 0], [0, 0]]) for part in batches.support)
    first = -1 if config.query_context == 'last_batch' else 0
    used = episodes.Minibatches(*(part[first:] for part in parts))
    context = episodes.take_all(batches.examples, used)

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


def cafeme(
    model: model_lib.Model, config: CafemeConfig, num_classes: int
) -> method.Method:
  """CAFeMe; the loss it reports is that of the query sets.

  Where anything persists clients have a memory: `num_rounds`, an int32 scalar
  that says which batches come next, with `batch_position`, and `adam`, the
  optimizer's state, with `client_adam_state`.

  A client, known or new, fine-tunes the whole network, and does not use what it
  kept of training; its curve has `fine_tuning_steps + 1` points. (This is the
  test of the released code; the labelled context is ours.)

  Raises:
    ValueError: If the model has no modulator.
  """
  if not isinstance(model, modulated_cnn.ModulatedModel):
    raise ValueError(
        'Expected `model` with a modulator, as CAFeMe needs it, found'
        f' {model.name!r}. Tip: use `modulated_cnn` for images and'
        ' `modulated_mlp` for vectors.'
    )
  is_labeled = config.context_mode == 'labeled_support'
  network = model.rebuild(
      num_classes, gating=config.gating, num_labels=num_classes * is_labeled
  )
  optimizer = optimizers.build_optimizer('adam', config.outer_learning_rate)
  keeps_adam = config.client_adam_state == 'persist'
  keeps_position = config.batch_position == 'persist'

  def memory_of(num_rounds, adam):
    memory = collections.OrderedDict()
    if keeps_position:
      memory['num_rounds'] = num_rounds
    if keeps_adam:
      memory['adam'] = adam
    return memory or ()

  def client_update(weights, client):
    num_rounds, order_seed = tf.constant(0), client.seed
    if keeps_position:
      num_rounds = client.memory.value['num_rounds']
      order_seed = client.fixed_seed
    adam = local_sgd.initial_optimizer_state(optimizer, weights)
    if keeps_adam:
      adam = client.memory.value['adam']
    batches = cyclic_batches.support_and_query(
        client.examples,
        config.batch_size,
        num_support=config.inner_steps,
        num_query=config.query_batches,
        support_fraction=(
            config.support_fraction if config.disjoint_support_query else None
        ),
        split_seed=client.fixed_seed,
        order_seed=order_seed,
        num_rounds=num_rounds,
    )
    loss, gradient = client_meta_gradient(network, config, weights, batches)
    adam, moved = optimizer.next(adam, weights, gradient)
    num_query = tf.cast(tf.size(batches.query.y), tf.float32)
    return client_work.ClientOutput(
        weights_lib.subtract(weights, moved),
        tf.cast(num_query > 0, tf.float32),
        local_sgd.LocalReport(loss * num_query, num_query),
        memory=memory_of(num_rounds + 1, adam),
    )

  def initial_memory(seed):
    weights = network.initialize(seed)
    return memory_of(
        tf.constant(0), local_sgd.initial_optimizer_state(optimizer, weights)
    )

  reaches = {}
  if keeps_adam or keeps_position:
    reaches['update'] = 'training'
  if keeps_position:
    reaches['loss'] = 'itself'  # It says which batches are next.

  def to_personalized(weights, context):
    eta = network.modulate(weights['body'], context.x, context.y, context.mask)
    return Personalized(weights, eta)

  def logits(personalized, batch):
    if is_labeled:
      weights, eta = personalized
      return network.modulated_logits(weights, eta, batch.x, batch.mask)
    return network.logits(personalized, batch.x, batch.mask)

  def embed_before_any_step(body, x, mask=None):
    none = tf.zeros([0, *network.input_shape]), tf.zeros([0], tf.int32)
    eta = network.modulate(body, *none, tf.zeros([0]))
    return network.embed_modulated(body, eta, x, mask)

  def client():
    return fine_tuning.build_client_personalizer(
        config.fine_tuning(),
        network.input_shape,
        lambda w, batch: modulated_loss(network, w, batch, batch),
        personalizer.ByScores(logits),
        to_personalized if is_labeled else None,
        context_is_all=config.query_context == 'support',
    )

  return method.Method(
      num_classes,
      network.initialize,
      client_update,
      memory=initial_memory if keeps_adam or keeps_position else None,
      memory_reaches=reaches,
      known_client=client,
      new_client=client,
      network=(
          dataclasses.replace(network, embed=embed_before_any_step)
          if is_labeled
          else network
      ),
  )
