"""FedEC, an elastically constrained meta-learner.

The server keeps an initialisation. Sampled clients train it on their own
examples, and the server moves it towards the mean of what they trained, as
Reptile does. Because the initialisation moves, a client would end in another
optimum every time it is sampled; so it remembers the model that it trained last
and is held to the predictions of that model, not to its weights, by a
distillation term. A client uses the model it trained last; a new one trains the
initialisation on its own examples.

Source: Peng Lan, Donglai Chen, Chong Xie, Keshu Chen, Jinyuan He, Juntao Zhang,
Yonghong Chen and Yan Xu, "Elastically-Constrained Meta-Learner for Federated
Learning", 2023, https://arxiv.org/abs/2306.16703. No code was released.
Deviations: BUILD_NOTES.md, FedEC.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import episodes
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.losses import cross_entropy
from tff_meta.losses import distillation
from tff_meta.losses import proximal
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedEcConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    constraint: What holds a client to the model it trained last: `'kl'` its
      predictions (FedEC), `'l2'` its weights (FedEC-l2), `'none'` nothing
      (FedEC-wo, federated Reptile).
    kl_direction: KL of the last model's predictions and then the model's
      (`'teacher_first'`, eq. 9 and 13), or the other way round.
    constraint_weight: a, of the constraint.
    constrain: Whom it holds. `'returning'`: clients that have taken part before
      (eq. 6 and the prose). `'first'`, the two cases swapped as Algorithm 1
      prints them: a client in its first round, which has no last model and is
      held to the initialisation that it received; from then on it is free.
    optimizer: Of the clients; its state starts anew every round.
    inner_learning_rate: epsilon_in, of the clients.
    momentum: Of SGD, in [0, 1).
    weight_decay: Coupled L2 coefficient of all parameters but biases.
    tau: Local epochs of a round, or steps.
    tau_unit: Whether `tau` counts `'epochs'` or `'steps'` of minibatches.
    batch_size: Examples of a minibatch; 0 is the whole set.
    outer_learning_rate: epsilon_out, of the server.
    server_aggregate: Whether the server moves by the `'mean'` of the clients'
      updates (eqs. 5 and 8) or by their `'sum'` (eq. 4).
    eval_model: What a known client is tested with: `'stored'`, the model of its
      last round; `'finetune'`, what it trains from the initialisation anew;
      `'stored_then_finetune'`, the former during training and the latter after
      it.
  """

  constraint: Literal['kl', 'l2', 'none'] = 'kl'
  kl_direction: distillation.Direction = 'teacher_first'
  constraint_weight: float = 1.0
  constrain: Literal['returning', 'first'] = 'returning'
  optimizer: Literal['sgd', 'adam', 'rmsprop'] = 'sgd'
  inner_learning_rate: float = 0.01
  momentum: float = 0.5
  weight_decay: float = 1e-4
  tau: int = 5
  tau_unit: Literal['epochs', 'steps'] = 'epochs'
  batch_size: int = 10
  outer_learning_rate: float = 1.0
  server_aggregate: Literal['mean', 'sum'] = 'mean'
  eval_model: Literal['stored', 'finetune', 'stored_then_finetune'] = (
      'stored_then_finetune'
  )

  def __post_init__(self):
    config_checks.check_fields(self)
    optimizers.build_optimizer(
        self.optimizer, self.inner_learning_rate, self.momentum
    )


# The paper gives neither rates nor tau, a and the batch size. The optimizer's
# are those of FedRep's code, whose protocol the paper follows.
PAPER = FedEcConfig()
# There is no released code, hence nothing that it does otherwise.
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(
    PAPER, inner_learning_rate=0.03, tau=3, eval_model='stored'
)


def client_loss(
    network: model_lib.Model,
    config: FedEcConfig,
    weights: Any,
    batch: episodes.Examples,
    held_to: client_work.ClientMemory,
) -> tf.Tensor:
  """What a client minimises: eq. 6, and weight decay.

    l(theta) + a * KL(theta_hat(x) || theta(x))    if it is held to a model
    l(theta)                                       otherwise

  FedEC-l2 has `a * ||theta - theta_hat||^2` instead of the divergence.

  Args:
    network: The network with its classifier.
    config: The configuration.
    weights: theta.
    batch: `Examples` `[b, ...]`.
    held_to: Whether it is held to theta_hat, and theta_hat, like `weights`.

  Returns:
    A scalar.

  Source: FedEC, eqs. 6, 9 and 11.
  """
  logits = network.logits(weights, batch.x, batch.mask)
  a = config.constraint_weight * tf.cast(held_to.present, logits.dtype)
  if config.constraint == 'kl':
    teacher = network.logits(held_to.value, batch.x, batch.mask)
    loss = distillation.elastic_loss(
        logits, batch.y, batch.mask, teacher, a, config.kl_direction
    )
  else:
    loss = cross_entropy.softmax_cross_entropy(logits, batch.y, batch.mask)
  if config.constraint == 'l2':
    loss += a * proximal.proximal(weights, held_to.value, mu=2.0)
  kernels = [w for w in tf.nest.flatten(weights) if w.shape.rank > 1]
  return loss + 0.5 * config.weight_decay * weights_lib.squared_norm(kernels)


def inner_update(
    network: model_lib.Model,
    config: FedEcConfig,
    initial: Any,
    last: client_work.ClientMemory,
    examples: episodes.Examples,
    seed: tf.Tensor,
) -> tuple[Any, local_sgd.LocalReport]:
  """Trains the initialisation on a client's examples: `InnerUpdate`.

  Args:
    network: The network with its classifier.
    config: The configuration.
    initial: phi, where training starts.
    last: The client's memory, theta_hat; of any value where not present.
    examples: The client's `Examples` `[n, ...]`.
    seed: int32 `[2]`, of the minibatches.

  Returns:
    theta after tau epochs or steps, and a report; phi without examples.

  Source: FedEC, Algorithm 1, and eq. 3 with the base point that it lacks.
  """
  held_to = last
  if config.constrain == 'first':
    held_to = client_work.ClientMemory(~last.present, initial)
  return local_sgd.local_sgd(
      lambda weights, batch: client_loss(
          network, config, weights, batch, held_to
      ),
      initial,
      examples,
      optimizers.build_optimizer(
          config.optimizer, config.inner_learning_rate, config.momentum
      ),
      batch_size=config.batch_size or None,
      seed=seed,
      **local_sgd.length_of(config.tau, config.tau_unit),
  )


def memory_flow(config: FedEcConfig) -> dict[str, str]:
  """What a client's memory reaches; see `AlgorithmSpec.memory_flow`."""
  is_held = config.constraint != 'none' and config.constrain == 'returning'
  return {'update': 'training', 'loss': 'itself'} if is_held else {}


def build_fedec(
    model: model_lib.Model,
    config: FedEcConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
) -> composition.StatefulLearningProcess:
  """Builds FedEC.

  The server's step is `phi <- phi + epsilon_out * mean_i (theta_i - phi)` over
  the clients with examples, which count alike (eq. 8), or has the sum in place
  of the mean (eq. 4).

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the mean or the sum.

  Returns:
    A `StatefulLearningProcess`; a client's memory is theta_hat, the complete
    model that it trained last.

  Raises:
    ValueError: If there is an aggregator, although updates are to be summed.
  """
  network = model.with_head(num_classes)
  if config.server_aggregate == 'sum':
    if aggregator is not None:
      raise ValueError(
          "Expected no `aggregator` with `server_aggregate` 'sum', which is one"
          f" itself, found {aggregator}. Tip: take 'mean', which leaves the"
          ' aggregate as it is.'
      )
    # Clients that do not count send zeros.
    aggregator = tff.aggregators.as_weighted_aggregator(
        tff.aggregators.SumFactory()
    )

  def initialize():
    return network.initialize(composition.initial_seed(seed))

  def client_update(weights, client):
    trained, report = inner_update(
        network, config, weights, client.memory, client.examples, client.seed
    )
    update = weights_lib.subtract(weights, trained)
    return client_work.ClientOutput(
        update=update,
        update_weight=local_sgd.client_weight(
            tf.size(client.examples.y), uniform=True
        ),
        report=report,
        # Not `trained`: this is what the server gets, to the last bit.
        memory=weights_lib.subtract(weights, update),
    )

  return composition.build_learning_process(
      initialize,
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=tff.learning.optimizers.build_sgdm(
          config.outer_learning_rate
      ),
      memory=lambda: weights_lib.zeros_like(initialize()),
  )


def _predict(network: model_lib.Model) -> Callable[..., Any]:
  """Returns `(weights, query) -> labels`."""

  def predict(weights, query):
    logits = network.logits(weights, query.x, query.mask)
    return tf.argmax(logits, axis=1, output_type=tf.int32)

  return predict


def build_fedec_known_client(
    model: model_lib.Model, config: FedEcConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client uses the model of its last round, or trains a new one.

  Before it learns a client has the model of its last round, and the
  initialisation if it was never sampled. Unless it is to be tested with that
  (`eval_model`) it trains the initialisation as in a round, with the
  constraint.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer`.
  """
  network = model.with_head(num_classes)

  def start(weights, memory):
    return memory.value_or(weights)

  def adapt(weights, memory, examples, seed):
    if config.eval_model == 'stored':
      return start(weights, memory)
    adapted, _ = inner_update(network, config, weights, memory, examples, seed)
    return adapted

  return personalizer.ClientPersonalizer(
      start,
      adapt,
      _predict(network),
      adapts_during_training=config.eval_model != 'stored_then_finetune',
  )


def build_fedec_new_client(
    model: model_lib.Model, config: FedEcConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client that training never saw trains the initialisation.

  It does so as in its first round, with no last model to be held to.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer`.
  """
  network = model.with_head(num_classes)

  def start(weights, memory):
    del memory  # A new client has none.
    return weights

  def adapt(weights, memory, examples, seed):
    del memory  # A new client has none.
    none = client_work.ClientMemory(tf.constant(False), weights)
    adapted, _ = inner_update(network, config, weights, none, examples, seed)
    return adapted

  return personalizer.ClientPersonalizer(start, adapt, _predict(network))
