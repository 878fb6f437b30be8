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
Deviations: docs/algorithms/apfl.md.
"""

import collections
import dataclasses

import tensorflow as tf

from tff_meta import configurations
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.learners import classifiers
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class ApflConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Both models are trained alike.

  Attributes:
    mixing: alpha, the share of the client's own model, in [0, 1]; with 0 it is
      federated averaging, with 1 the own models are those of local training.
    new_client_epochs: Epochs of both models in which a new client gets itself
      one, beginning with the server's.
  """

  learning_rate: float = 0.01
  momentum: float = 0.5
  epochs: int = 10
  weight_decay: float = 1e-4
  mixing: float = 0.75
  new_client_epochs: int = 10

  def __post_init__(self):
    super().__post_init__()
    if self.mixing > 1:
      raise ValueError(f'Expected `mixing` in [0, 1], found {self.mixing}.')


# FedRep's code: a constant alpha, SGD with momentum and weight decay, B = 10;
# ten epochs are those of its local training. The authors' own settings are not
# at hand.
PAPER = ApflConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.03, epochs=1, batch_size=16)


def apfl(
    model: model_lib.Model, config: ApflConfig, num_classes: int
) -> method.Method:
  """APFL; a client's memory is its own model, at first the initial weights.

  The loss of a round is the sum of that of the server's model and that of the
  mixture. A known client has its mixture, the server's model if it was never
  sampled. A new client trains as in a round and mixes what results with the
  server's model as it was, not as it trained it. (The paper does not treat new
  clients.)
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def mixture(own, weights):
    return weights_lib.add(
        weights_lib.scale(own, config.mixing),
        weights_lib.scale(weights, 1 - config.mixing),
    )

  def loss(both, batch):
    fixed = tf.nest.map_structure(tf.stop_gradient, both['server'])
    return classifier.loss(both['server'], batch) + classifier.loss(
        mixture(both['own'], fixed), batch
    )

  def train(num_epochs, weights, own, examples, seed):
    # A new client's own model is the server's: two tensors, or each of them
    # would get the gradients of both.
    own = tf.nest.map_structure(tf.identity, own)
    both = collections.OrderedDict(server=weights, own=own)
    return config.train_for(num_epochs, loss, both, examples, seed)

  def client_update(weights, client):
    trained, report = train(
        config.epochs,
        weights,
        client.memory.value,
        client.examples,
        client.seed,
    )
    return config.output(
        weights,
        trained['server'],
        report,
        client.examples,
        memory=trained['own'],
    )

  def start_known(weights, memory):
    mixed = mixture(memory.value, weights)
    return memory._replace(value=mixed).value_or(weights)

  def train_new(weights, *client):
    both, _ = train(config.new_client_epochs, weights, weights, *client)
    return mixture(both['own'], weights)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=classifier.initialize,
      # The loss of the mixture; the server's part knows none.
      memory_reaches={'loss': 'itself'},
      known_client=lambda: classifiers.build_client_personalizer(
          classifier, start_known
      ),
      new_client=lambda: classifiers.build_client_personalizer(
          classifier, train=train_new
      ),
  )
