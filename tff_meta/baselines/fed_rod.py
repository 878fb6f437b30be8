"""FedRoD: a generic predictor and, on top of it, a personal one.

All clients share a body and a generic head, which are averaged. They are
trained with a balanced softmax: a class's logit is raised by the logarithm of
how many examples of it the client has, so that clients of other classes learn
towards the same generic predictor. A client also has a head of its own, which
never leaves it; its outputs are added to those of the generic head, and it
learns the client's own classes without moving the body or the generic head. A
known client uses both heads, a client that training never saw the generic one.

Source: Hong-You Chen and Wei-Lun Chao, "On Bridging Generic and Personalized
Federated Learning for Image Classification", ICLR 2022,
https://arxiv.org/abs/2107.00778, Algorithm 1, with the linear personal head.
Deviations: docs/algorithms/fed_rod.md.
"""

import collections
import dataclasses

import tensorflow as tf

from tff_meta import configurations
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.learners import classifiers
from tff_meta.learners import personalizer
from tff_meta.losses import cross_entropy
from tff_meta.models import model as model_lib

_NO_EXAMPLE = -1e9  # In place of log 0, which has no gradient.


@dataclasses.dataclass(frozen=True)
class FedRodConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    balance: gamma, the power of the class counts in the balanced softmax, at
      least 0; 0 is the plain softmax.
  """

  learning_rate: float = 0.01
  momentum: float = 0.9
  epochs: int = 5
  batch_size: int = 20
  weight_decay: float = 1e-4
  balance: float = 1.0


# Ours, of a usual size: the authors have published no code, and the settings in
# the paper were not at hand.
PAPER = FedRodConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.03, epochs=1)


def balanced_loss(
    logits: tf.Tensor,
    y: tf.Tensor,
    mask: tf.Tensor,
    class_sizes: tf.Tensor,
    balance: float,
) -> tf.Tensor:
  """Cross-entropy of the balanced softmax: `logits + gamma * log n_c`.

  Args:
    logits: `[n, C]`.
    y: int32 `[n]`, labels in 0..C-1 of classes with examples.
    mask: `[n]`, 1 for an example and 0 for padding.
    class_sizes: n_c, float `[C]`, the client's examples of each class.
    balance: gamma.

  Returns:
    A scalar, in nats. With gamma = 0, or equal sizes, the plain cross-entropy.

  Source: FedRoD, eq. 8.
  """
  raised = balance * tf.math.log(tf.maximum(class_sizes, 1.0))
  if balance:
    raised = tf.where(class_sizes > 0, raised, _NO_EXAMPLE)
  return cross_entropy.softmax_cross_entropy(logits + raised, y, mask)


def fed_rod(
    model: model_lib.Model, config: FedRodConfig, num_classes: int
) -> method.Method:
  """FedRoD; a client's memory is its own head, at first the initial one.

  The loss of a round is the sum of the generic and the personal one.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def both_logits(weights, own, examples):
    embeddings = model.embed(weights['body'], examples.x, examples.mask)
    generic = model.classify(weights['head'], embeddings)
    # The personal head moves neither the body nor the generic head.
    personal = model.classify(own, tf.stop_gradient(embeddings))
    return generic, tf.stop_gradient(generic) + personal

  def client_update(weights, client):
    class_sizes = tf.reduce_sum(tf.one_hot(client.examples.y, num_classes), 0)

    def loss(parts, batch):
      generic, personal = both_logits(parts, parts['own'], batch)
      return balanced_loss(
          generic, batch.y, batch.mask, class_sizes, config.balance
      ) + cross_entropy.softmax_cross_entropy(personal, batch.y, batch.mask)

    start = collections.OrderedDict(weights, own=client.memory.value)
    trained, report = config.train(loss, start, client.examples, client.seed)
    own = trained.pop('own')
    return config.output(weights, trained, report, client.examples, memory=own)

  def known_client():
    def start(weights, memory):
      # Without a head of its own the generic one alone decides.
      none = weights_lib.zeros_like(memory.value)
      return weights, memory.value_or(none)

    def adapt(weights, memory, *_):
      return start(weights, memory)

    def scores(adapted, query):
      weights, own = adapted
      _, logits = both_logits(weights, own, query)
      return logits

    return personalizer.ClientPersonalizer(
        start, adapt, personalizer.ByScores(scores)
    )

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=lambda seed: classifier.initialize(seed)['head'],
      # The personal loss; the rest of the client's work knows no memory.
      memory_reaches={'loss': 'itself'},
      known_client=known_client,
      new_client=lambda: classifiers.build_client_personalizer(classifier),
  )
