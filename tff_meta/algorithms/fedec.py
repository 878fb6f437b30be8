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
Deviations: docs/algorithms/fedec.md.
"""

import dataclasses
from typing import Any, Literal

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.losses import cross_entropy
from tff_meta.losses import distillation
from tff_meta.losses import proximal
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedEcConfig(configurations.Configuration):
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
    super().__post_init__()
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
    classifier: classifiers.LinearClassifier,
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
    classifier: The network and its head.
    config: The configuration.
    weights: theta.
    batch: `Examples` `[b, ...]`.
    held_to: Whether it is held to theta_hat, and theta_hat, like `weights`.

  Returns:
    A scalar.

  Source: FedEC, eqs. 6, 9 and 11.
  """
  logits = classifier.logits(weights, batch)
  a = config.constraint_weight * tf.cast(held_to.present, logits.dtype)
  if config.constraint == 'kl':
    teacher = classifier.logits(held_to.value, batch)
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
    classifier: classifiers.LinearClassifier,
    config: FedEcConfig,
    initial: Any,
    last: client_work.ClientMemory,
    examples: episodes.Examples,
    seed: tf.Tensor,
) -> tuple[Any, local_sgd.LocalReport]:
  """Trains the initialisation on a client's examples: `InnerUpdate`.

  Args:
    classifier: The network and its head.
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
          classifier, config, weights, batch, held_to
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


def fedec(
    model: model_lib.Model, config: FedEcConfig, num_classes: int
) -> method.Method:
  """FedEC; a client's memory is theta_hat, the model that it trained last.

  The server's step is `phi <- phi + epsilon_out * mean_i (theta_i - phi)` over
  the clients with examples, which count alike (eq. 8), or has the sum in place
  of the mean (eq. 4).

  Before it learns a known client has the model of its last round, and the
  initialisation if it was never sampled. Unless it is to be tested with that
  (`eval_model`) it trains the initialisation as in a round, with the
  constraint. A new client trains it as in its first round, with no last model
  to be held to.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(weights, client):
    trained, report = inner_update(
        classifier, config, weights, client.memory, client.examples, client.seed
    )
    update = weights_lib.subtract(weights, trained)
    return client_work.ClientOutput(
        update,
        local_sgd.client_weight(tf.size(client.examples.y), uniform=True),
        report,
        # Not `trained`: this is what the server gets, to the last bit.
        memory=weights_lib.subtract(weights, update),
    )

  new = classifiers.build_client_personalizer(classifier)

  def known_client():
    def start(weights, memory):
      return memory.value_or(weights)

    def adapt(weights, memory, *data):
      if config.eval_model == 'stored':
        return start(weights, memory)
      return inner_update(classifier, config, weights, memory, *data)[0]

    return new._replace(
        start=start,
        adapt=adapt,
        adapts_during_training=config.eval_model != 'stored_then_finetune',
    )

  def adapt_new(weights, memory, *data):
    del memory  # A new client has none.
    none = client_work.ClientMemory(tf.constant(False), weights)
    return inner_update(classifier, config, weights, none, *data)[0]

  is_held = config.constraint != 'none' and config.constrain == 'returning'
  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=lambda seed: weights_lib.zeros_like(classifier.initialize(seed)),
      memory_reaches={'update': 'training', 'loss': 'itself'}
      if is_held
      else {},
      sums_updates=config.server_aggregate == 'sum',
      server_optimizer=tff.learning.optimizers.build_sgdm(
          config.outer_learning_rate
      ),
      known_client=known_client,
      new_client=lambda: new._replace(adapt=adapt_new),
  )
