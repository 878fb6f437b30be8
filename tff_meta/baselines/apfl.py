"""APFL: a client's model is a mixture of the server's and one of its own.

A client trains the server's model w on its loss, as in federated averaging, and
with every step also a model v of its own, on the loss of the mixture
`alpha * v + (1 - alpha) * w`, of which w is held; v stays with the client.
alpha is a constant, as in the experiments that this is a baseline of; learning
it is not here. A known client uses the mixture with the server's model of the
time; one that was never sampled uses the server's model.

Both are trained by one optimizer on the sum of both losses, the mixture's as a
function of v only, so that v's gradient is alpha times that of the mixture.

Source: Yuyang Deng, Mohammad Mahdi Kamani and Mehrdad Mahdavi, "Adaptive
Personalized Federated Learning", 2020, https://arxiv.org/abs/2003.13461,
Algorithm 1.
Deviations: BUILD_NOTES.md, APFL.
"""

import collections
import dataclasses
from typing import Literal

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class ApflConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of both models; its state starts anew every round.
    learning_rate: Of both models.
    momentum: Of SGD, in [0, 1).
    epochs: Local epochs of a round.
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient, of both models.
    mixing: alpha, the share of the client's own model, in [0, 1]; with 0 it is
      federated averaging, with 1 the own models are those of local training.
    uniform: Clients count alike; otherwise by their number of examples.
    new_client_epochs: Epochs of both models in which a new client gets itself
      one, beginning with the server's.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.01
  momentum: float = 0.5
  epochs: int = 10
  batch_size: int = 10
  weight_decay: float = 1e-4
  mixing: float = 0.75
  uniform: bool = False
  new_client_epochs: int = 10

  def __post_init__(self):
    config_checks.check_fields(self)
    if self.mixing > 1:
      raise ValueError(f'Expected `mixing` in [0, 1], found {self.mixing}.')
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# FedRep's code: a constant alpha, SGD with momentum and weight decay, B = 10;
# ten epochs are those of its local training. The authors' own settings are not
# at hand.
PAPER = ApflConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.03, epochs=1, batch_size=16)


def memory_flow(config: ApflConfig) -> dict[str, str]:
  """What a client's memory reaches; see `AlgorithmSpec.memory_flow`."""
  del config
  return {'loss': 'itself'}  # Of the mixture; the server's part knows none.


def build_apfl(
    model: model_lib.Model,
    config: ApflConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> composition.StatefulLearningProcess:
  """Builds APFL.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of the models; by default the weighted mean.
    server_optimizer: By default SGD of rate 1, the plain average.

  Returns:
    A `StatefulLearningProcess`, whose loss is the sum of that of the server's
    model and that of the mixture. A client's memory is its own model, at first
    the run's initial weights.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def initial_weights():
    return classifier.initialize(composition.initial_seed(seed))

  def client_update(weights, client):
    trained, own, report = _train(
        classifier,
        config,
        weights,
        client.memory.value,
        client.examples,
        client.seed,
        config.epochs,
    )
    return client_work.ClientOutput(
        weights_lib.subtract(weights, trained),
        local_sgd.client_weight(tf.size(client.examples.y), config.uniform),
        report,
        memory=own,
    )

  return composition.build_learning_process(
      initial_weights,
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=aggregator,
      server_optimizer=server_optimizer,
      memory=initial_weights,
  )


def _mixture(config, own, weights):
  """`alpha * v + (1 - alpha) * w`."""
  return weights_lib.add(
      weights_lib.scale(own, config.mixing),
      weights_lib.scale(weights, 1 - config.mixing),
  )


def _train(classifier, config, weights, own, examples, seed, num_epochs):
  """Epochs on both models: the server's, the own, and a `LocalReport`."""

  def loss(both, batch):
    fixed = tf.nest.map_structure(tf.stop_gradient, both['server'])
    return classifier.loss(both['server'], batch) + classifier.loss(
        _mixture(config, both['own'], fixed), batch
    )

  # A new client's own model is the server's: two tensors, or each of them would
  # get the gradients of both.
  own = tf.nest.map_structure(tf.identity, own)
  both, report = composition.train_epochs(
      loss,
      config,
      collections.OrderedDict(server=weights, own=own),
      examples,
      seed,
      num_epochs,
  )
  return both['server'], both['own'], report


def build_apfl_known_client(
    model: model_lib.Model, config: ApflConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A known client has its mixture, the server's model if never sampled.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that trains nothing.
  """

  def start(weights, memory):
    mixture = _mixture(config, memory.value, weights)
    return memory._replace(value=mixture).value_or(weights)

  return classifiers.build_client_personalizer(
      classifiers.LinearClassifier(model, num_classes),
      start,
      classifiers.as_it_is,
  )


def build_apfl_new_client(
    model: model_lib.Model, config: ApflConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A new client trains as in a round and mixes what results.

  Its mixture has the server's model as it was, not as the client trained it.
  (The paper does not treat new clients.)

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that uses no memory.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def train(weights, examples, seed):
    _, own, _ = _train(
        classifier,
        config,
        weights,
        weights,
        examples,
        seed,
        config.new_client_epochs,
    )
    return _mixture(config, own, weights)

  return classifiers.build_client_personalizer(
      classifier, lambda weights, memory: weights, train
  )
