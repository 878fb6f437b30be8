"""pFedMe: personal models are proximal points of the clients' losses.

A client's personal model theta approximately minimises its loss plus
`lambda / 2 * ||theta - w||^2`, and its copy w of the server's model descends on
that minimum as a function of w, the Moreau envelope, whose gradient is
`lambda * (w - theta)`. In each of R local rounds it takes a minibatch, K steps
for theta and one for w; w goes to the server, which averages and moves `beta`
of the way. Nothing has to be kept: the personal model of any client, known or
new, is what the same R local rounds make of the server's model.

Source: Canh T. Dinh, Nguyen H. Tran and Tuan Dung Nguyen, "Personalized
Federated Learning with Moreau Envelopes", NeurIPS 2020,
https://arxiv.org/abs/2006.08848, Algorithm 1.
Deviations: docs/algorithms/pfedme.md.
"""

import dataclasses

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.losses import proximal
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class PFedMeConfig(configurations.Averaged):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    learning_rate: eta, of the client's copy of the server's model.
    server_learning_rate: beta, how far the server moves towards the average; 1
      is the average.
    local_rounds: R, minibatches of a round.
    personal_learning_rate: Of the personal model, trained by plain SGD.
    personal_steps: K, steps of the personal model on each minibatch, at least
      1.
    proximal_weight: lambda. Times either rate of the clients it is below 2:
      steps beyond the double distance diverge.
    weight_decay: Coupled L2 coefficient, of the personal model.
    batch_size: Examples of a minibatch, at least 1.
  """

  uniform: bool = True
  learning_rate: float = 0.005
  server_learning_rate: float = 1.0
  local_rounds: int = 20
  personal_learning_rate: float = 0.09
  personal_steps: int = 5
  proximal_weight: float = 15.0
  weight_decay: float = 0.001
  batch_size: int = 20

  def __post_init__(self):
    super().__post_init__()
    for name in ('personal_steps', 'batch_size'):
      config_checks.check_at_least_one(self, name)
    for name in ('learning_rate', 'personal_learning_rate'):
      config_checks.check_pull(self, name)


# The authors' code: lambda = 15, R = 20, K = 5, B = 20, eta = 0.005; 0.09 is
# its rate of personal models for a network on MNIST.
PAPER = PFedMeConfig()
# Algorithm 1 has the plain mean, the code weighs by training examples.
RELEASE = dataclasses.replace(PAPER, uniform=False)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(
    RELEASE,
    learning_rate=0.1,
    local_rounds=5,
    personal_learning_rate=0.1,
    batch_size=16,
)


def pfedme(
    model: model_lib.Model, config: PFedMeConfig, num_classes: int
) -> method.Method:
  """pFedMe, whose loss is that of the personal models before their steps.

  A client, known or new, has the personal model of R local rounds.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(weights, client):
    trained, _, report = _train(
        classifier, config, weights, client.examples, client.seed
    )
    return config.output(weights, trained, report, client.examples)

  def personal_model(weights, examples, seed):
    # Adaptation's examples may be padded; minibatches are drawn from all.
    examples = episodes.drop_padding(examples)
    return _train(classifier, config, weights, examples, seed)[1]

  def client():
    return classifiers.build_client_personalizer(
        classifier, train=personal_model
    )

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      server_optimizer=tff.learning.optimizers.build_sgdm(
          config.server_learning_rate
      ),
      known_client=client,
      new_client=client,
  )


def _train(classifier, config, weights, examples, seed):
  """R local rounds: w, theta and a `LocalReport` of the steps of theta.

  Theta begins with the server's model and goes on from minibatch to minibatch,
  as in the authors' code.
  """
  batches = episodes.minibatches(
      tf.size(examples.y), config.batch_size, seed, config.local_rounds
  )
  # An epoch has at least one minibatch, if there are examples.
  batches = episodes.Minibatches(
      *(part[: config.local_rounds] for part in batches)
  )
  sizes = tf.cast(batches.sizes[:, 0], tf.float32)

  def personal_step(w, theta, batch):
    with tf.GradientTape() as tape:
      tape.watch(theta)
      loss = classifier.loss(theta, batch)
      pulled = loss + proximal.proximal(theta, w, config.proximal_weight)
    gradient = weights_lib.add_decay(
        tape.gradient(pulled, theta), theta, config.weight_decay
    )
    step = weights_lib.scale(gradient, config.personal_learning_rate)
    return weights_lib.subtract(theta, step), loss

  def local_round(r, w, theta, loss_sum):
    batch = episodes.take(examples, batches, r)

    def one_step(k, theta, loss_sum):
      theta, loss = personal_step(w, theta, batch)
      return k + 1, theta, loss_sum + sizes[r] * loss

    _, theta, loss_sum = tf.while_loop(
        lambda k, *_: k < config.personal_steps,
        one_step,
        (tf.constant(0), theta, loss_sum),
    )
    gap = weights_lib.subtract(w, theta)
    rate = config.learning_rate * config.proximal_weight
    w = weights_lib.subtract(w, weights_lib.scale(gap, rate))
    return r + 1, w, theta, loss_sum

  _, w, theta, loss_sum = tf.while_loop(
      lambda r, *_: r < tf.size(sizes),
      local_round,
      (tf.constant(0), weights, weights, tf.constant(0.0)),
  )
  num_examples = config.personal_steps * tf.reduce_sum(sizes)
  return w, theta, local_sgd.LocalReport(loss_sum, num_examples)
