"""SCAFFOLD: control variates correct the drift of the clients' local training.

A client keeps the mean gradient c_i of its last local training; the server
keeps the mean c over all clients. In local training a client takes
`g - c_i + c` in place of its gradient g, so that clients with other data move
in the same direction. The model is one for all: clients, known or new, use the
server's model as it is.

A client's new c_i is `c_i - c + (x - y) / (K * rate)` (option II), which, as a
step is `rate * (g - c_i + c)`, is the mean of the gradients of its K steps.

Source: Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank J. Reddi,
Sebastian U. Stich and Ananda Theertha Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, https://arxiv.org/abs/1910.06378,
Algorithm 1.
Deviations: docs/algorithms/scaffold.md.
"""

import collections
import dataclasses

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class ScaffoldConfig(configurations.Averaged):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    learning_rate: eta_l, of the clients' plain SGD.
    server_learning_rate: eta_g, how far the server moves towards the average; 1
      is the average.
    num_clients: N, all clients of the federation, of which some take part in a
      round: c moves by the sum of their changes over N. At least 1. A run of
      the programs fills in its own.
    epochs: Local epochs of a round.
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient; part of the gradients.
    uniform: Clients count alike in the model; otherwise by their number of
      examples. In c they always count alike.
  """

  learning_rate: float = 0.1
  server_learning_rate: float = 1.0
  num_clients: int = 100
  epochs: int = 5
  batch_size: int = 10
  weight_decay: float = 0.0
  uniform: bool = True

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'num_clients')


# The paper has eta_g = 1, N = 100 and minibatches of a fifth of a client's
# data, varies the epochs and tunes eta_l; the rate, B and five epochs are ours.
PAPER = ScaffoldConfig()
# FedRep's code, which has it as a baseline, without its momentum and clipping.
RELEASE = dataclasses.replace(
    PAPER, learning_rate=0.01, server_learning_rate=0.1, weight_decay=1e-4
)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, epochs=1, batch_size=16)


class _CorrectedSgd:
  """SGD on `g + correction`, with TFF's optimizer interface.

  Its state is the sum of the gradients g and the number of steps.
  """

  def __init__(self, learning_rate: float, correction):
    self._learning_rate = learning_rate
    self._correction = correction

  def initialize(self, specs):
    zeros = tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)
    return collections.OrderedDict(gradient_sum=zeros, num_steps=0.0)

  def next(self, state, weights, gradients):
    step = weights_lib.scale(
        weights_lib.add(gradients, self._correction), self._learning_rate
    )
    state = collections.OrderedDict(
        gradient_sum=weights_lib.add(state['gradient_sum'], gradients),
        num_steps=state['num_steps'] + 1.0,
    )
    return state, weights_lib.subtract(weights, step)


def scaffold(
    model: model_lib.Model, config: ScaffoldConfig, num_classes: int
) -> method.Method:
  """SCAFFOLD; a client's memory is its c_i, like the weights, at first zero.

  It has to come back with the client: of a client that comes without, c gets
  the whole gradient again. The server keeps c, at first zero. A client, known
  or new, uses the server's model.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  with tf.Graph().as_default():
    weights = classifier.initialize(tf.constant([0, 0]))
  specs = tf.nest.map_structure(
      lambda w: tf.TensorSpec(w.shape, w.dtype), weights
  )

  def no_control(*_):
    return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)

  def client_update(weights, client):
    own, examples = client.memory.value, client.examples
    optimizer = _CorrectedSgd(
        config.learning_rate, weights_lib.subtract(client.message, own)
    )
    trained, state, report = local_sgd.resume_local_sgd(
        classifier.loss,
        weights,
        local_sgd.initial_optimizer_state(optimizer, weights),
        examples,
        optimizer,
        batch_size=config.batch_size or None,
        num_epochs=config.epochs,
        seed=client.seed,
        weight_decay=config.weight_decay,
    )
    num_steps = state['num_steps']
    mean = weights_lib.scale(
        state['gradient_sum'], tf.math.divide_no_nan(1.0, num_steps)
    )
    # Without examples there is no mean.
    mean = tf.nest.map_structure(
        lambda new, old: tf.where(num_steps > 0, new, old), mean, own
    )
    return config.output(
        weights,
        trained,
        report,
        examples,
        signal=weights_lib.subtract(mean, own),
        memory=mean,
    )

  control = client_work.ClientWorkState(
      initialize=no_control,
      message=lambda control: control,
      next=lambda control, changes: weights_lib.add(
          control, weights_lib.scale(changes, 1 / config.num_clients)
      ),
  )

  def client():
    return classifiers.build_client_personalizer(classifier)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=no_control,
      state=lambda seed: control,
      channels=(method.Channel('control variates', specs),),
      server_optimizer=tff.learning.optimizers.build_sgdm(
          config.server_learning_rate
      ),
      memory_reaches={
          'update': 'training',
          'signal': 'itself',  # It is the change of c_i.
          'loss': 'training',
      },
      known_client=client,
      new_client=client,
  )
