"""Ditto: the server's model, and a personal one that is pulled towards it.

A client does two things with what it downloads. It trains the model further and
uploads it, as in federated averaging; and it trains a model of its own, which
it keeps, on its loss and the squared distance to the downloaded weights. The
personal model never reaches the server, which learns what it would without,
unless a personal model diverges: such a client is left out of the round, as any
whose results are not finite. A known client uses its personal model; a new one
has none and fine-tunes the server's.

In CAFeMe's code clients keep the moments of the Adam with which they train the
server's model (`client_optimizer_state`).

Source: Tian Li, Shengyuan Hu, Ahmad Beirami and Virginia Smith, "Ditto: Fair
and Robust Federated Learning Through Personalization", ICML 2021,
https://arxiv.org/abs/2012.04221.
Deviations: docs/algorithms/ditto.md.
"""

import collections
import dataclasses
from typing import Literal

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import method
from tff_meta import optimizers
from tff_meta.learners import classifiers
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd
from tff_meta.losses import proximal
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class DittoConfig(configurations.Averaged, configurations.FineTuned):
  """Configuration; the defaults are the `paper` preset.

  A new client is fine-tuned, on the server's model.

  Attributes:
    optimizer: Of the server's model, at the clients.
    client_optimizer_state: `'persist'`: a client keeps that optimizer's state
      (Adam's moments, SGD's velocity). `'reset'`: it starts anew every round.
    learning_rate: Of that optimizer.
    momentum: Of SGD, in [0, 1).
    epochs: Epochs of a round on the server's model.
    personal_learning_rate: Of the personal model, trained by plain SGD.
    personal_epochs: Epochs of a round on the personal model.
    local_unit: Whether these two count `'epochs'` or `'steps'` of minibatches.
    batch_size: Examples of a minibatch, at least 1; both models have the same
      minibatches.
    proximal_weight: lambda, of the pull towards the downloaded weights; with 0
      the personal model is one of local training. Times
      `personal_learning_rate` it is below 2: steps beyond the double distance
      diverge.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  client_optimizer_state: Literal['reset', 'persist'] = 'reset'
  learning_rate: float = 0.05
  momentum: float = 0.0
  epochs: int = 2
  personal_learning_rate: float = 0.05
  personal_epochs: int = 2
  local_unit: Literal['epochs', 'steps'] = 'steps'
  batch_size: int = 16
  proximal_weight: float = 1.0
  uniform: bool = True

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'batch_size')
    config_checks.check_client_optimizer_state(self)
    config_checks.check_pull(self, 'personal_learning_rate')
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# The authors' code, in its script for Fashion-MNIST: SGD 0.05, B = 16, two
# steps of each model, lambda = 1, clients alike. New clients, whom the paper
# does not treat, fine-tune as in CAFeMe's code.
PAPER = DittoConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(
    PAPER,
    learning_rate=0.01,
    epochs=1,
    personal_learning_rate=0.01,
    personal_epochs=1,
    local_unit='epochs',
    batch_size=10,
    fine_tuning_steps=10,
)


def ditto(
    model: model_lib.Model, config: DittoConfig, num_classes: int
) -> method.Method:
  """Ditto, whose metrics are of the server's model.

  A client's memory is `OrderedDict(personal, optimizer)`, its personal model,
  at first the initial weights, and the state of its optimizer; the latter is
  not there where it does not persist. A known client has its personal model,
  the server's if it was never sampled. A new client fine-tunes the server's
  model, as in CAFeMe's code.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  optimizer = optimizers.build_optimizer(
      config.optimizer, config.learning_rate, config.momentum
  )
  persists = config.client_optimizer_state == 'persist'

  def memory_of(personal, state):
    parts = [('personal', personal)]
    if persists:
      parts.append(('optimizer', state))
    return collections.OrderedDict(parts)

  def initial_memory(seed):
    weights = classifier.initialize(seed)
    state = local_sgd.initial_optimizer_state(optimizer, weights)
    return memory_of(weights, state)

  def client_update(weights, client):
    kept = client.memory.value
    minibatches = dict(batch_size=config.batch_size, seed=client.seed)

    def pulled_loss(own, batch):
      """The paper's h: the loss, and `lambda / 2 * ||v - w||^2`."""
      pull = proximal.proximal(own, weights, config.proximal_weight)
      return classifier.loss(own, batch) + pull

    state = (
        kept['optimizer']
        if persists
        else local_sgd.initial_optimizer_state(optimizer, weights)
    )
    trained, state, report = local_sgd.resume_local_sgd(
        classifier.loss,
        weights,
        state,
        client.examples,
        optimizer,
        **minibatches,
        **local_sgd.length_of(config.epochs, config.local_unit),
    )
    personal, _ = local_sgd.local_sgd(
        pulled_loss,
        kept['personal'],
        client.examples,
        optimizers.build_optimizer('sgd', config.personal_learning_rate),
        **minibatches,
        **local_sgd.length_of(config.personal_epochs, config.local_unit),
    )
    return config.output(
        weights,
        trained,
        report,
        client.examples,
        memory=memory_of(personal, state),
    )

  def start_known(weights, memory):
    return memory._replace(value=memory.value['personal']).value_or(weights)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=initial_memory,
      # The personal model is trained apart.
      memory_reaches=(
          {'update': 'training', 'loss': 'training'} if persists else {}
      ),
      known_client=lambda: classifiers.build_client_personalizer(
          classifier, start_known
      ),
      new_client=lambda: fine_tuning.build_classifier_personalizer(
          config.fine_tuning(), classifier
      ),
  )
