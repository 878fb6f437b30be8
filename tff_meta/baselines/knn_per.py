"""kNN-Per: the server's model, mixed with nearest neighbours at the client.

The model is trained by federated averaging. A client stores the embeddings and
labels of its examples; its class probabilities are

  lambda * p_knn(x) + (1 - lambda) * softmax(model(x)),

where p_knn are the labels of the k nearest stored embeddings, weighted by
`exp(-||f(x) - f(x_j)||^2 / (D * scale))` and normalised, D the size of an
embedding. Nothing of that is uploaded, and nothing is kept between rounds: a
client, known or new, makes its store of the examples that it has.

Every client has its own lambda, of 0, 0.1, ..., 1 the smallest with the best
accuracy on every fifth of its examples, which neither training nor the store of
that choice have. The store that is used then has all examples.

Source: Othmane Marfoq, Giovanni Neglia, Laetitia Kameni and Richard Vidal,
"Personalized Federated Learning through Local Memorization", ICML 2022,
https://arxiv.org/abs/2111.09360.
Deviations: docs/algorithms/knn_per.md.
"""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta.learners import classifiers
from tff_meta.learners import personalizer
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib

_SHARES = [i / 10 for i in range(11)]  # lambda is one of them,
_NO_CHOICE = 0.5  # and this where a client has nothing to choose it with.


@dataclasses.dataclass(frozen=True)
class KnnPerConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    uniform: Clients count alike; otherwise by their number of examples, those
      that are held out, too.
    neighbours: k, at least 1; all stored examples where they are fewer.
    scale: Of the squared distances, above 0.
    hold_out_every: Of so many examples, in their order, the last one is held
      out; at least 2.
  """

  neighbours: int = 10
  scale: float = 1.0
  hold_out_every: int = 5

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'neighbours')
    if self.scale <= 0:
      raise ValueError(f'Expected `scale` above 0, found {self.scale}.')
    if self.hold_out_every < 2:
      raise ValueError(
          'Expected `hold_out_every` of at least 2, found'
          f' {self.hold_out_every}.'
      )


# k = 10 and scale 1 are those of the authors' code; the training is that of
# FedAvg's presets here.
PAPER = KnnPerConfig()
RELEASE = dataclasses.replace(PAPER, learning_rate=0.01, momentum=0.5)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, batch_size=16)


class Memorization(NamedTuple):
  """A client's model.

  Attributes:
    weights: Of the server's model.
    embeddings: float32 `[n, D]`, of the examples that it has stored.
    labels: int32 `[n]`.
    share: float32 scalar in [0, 1], lambda.
  """

  weights: Any
  embeddings: tf.Tensor
  labels: tf.Tensor
  share: tf.Tensor


def knn_per(
    model: model_lib.Model, config: KnnPerConfig, num_classes: int
) -> method.Method:
  """kNN-Per; a client trains on the examples that it does not hold out.

  A client, known or new, stores its examples and chooses its lambda; what it
  makes is a `Memorization`, with an empty store before it has seen examples.
  Its data should have their examples in one order in all rounds and in use, so
  that those held out are the same.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(weights, client):
    kept, _ = _hold_out(client.examples, config.hold_out_every)
    trained, report = config.train(classifier.loss, weights, kept, client.seed)
    return config.output(weights, trained, report, client.examples)

  def client():
    return _build_client(model, config, num_classes)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      known_client=client,
      new_client=client,
  )


def _hold_out(examples, every):
  """Returns all but every `every`-th of the examples, and those."""
  held_out = tf.equal(tf.range(tf.size(examples.y)) % every, every - 1)

  def those(chosen):
    x, y, mask = (tf.boolean_mask(part, chosen) for part in examples[:3])
    return examples._replace(x=x, y=y, mask=mask)

  return those(~held_out), those(held_out)


def _neighbours(config, stored, labels, embeddings, num_classes):
  """p_knn of embeddings [Q, D], float32 [Q, C]; 0 where nothing is stored.

  Args:
    config: Has k and the scale.
    stored: float32 [n, D].
    labels: int32 [n].
    embeddings: float32 [Q, D].
    num_classes: C.
  """
  distances = prototypical.squared_distances(embeddings, stored)
  k = tf.minimum(config.neighbours, tf.size(labels))
  nearness, nearest = tf.math.top_k(-distances, k)
  size = tf.cast(tf.shape(stored)[1], tf.float32)
  shares = tf.nn.softmax(nearness / (size * config.scale))
  members = tf.one_hot(tf.gather(labels, nearest), num_classes)
  return tf.reduce_sum(shares[:, :, tf.newaxis] * members, axis=1)


def _build_client(model, config, num_classes):
  """A client with its store and its lambda."""

  def embed(weights, examples):
    return model.embed(weights['body'], examples.x, examples.mask)

  def parts(weights, stored, labels, query):
    """p_knn and the model's probabilities."""
    embeddings = embed(weights, query)
    logits = model.classify(weights['head'], embeddings)
    near = _neighbours(config, stored, labels, embeddings, num_classes)
    return near, tf.nn.softmax(logits)

  def choose(weights, kept, held_out):
    near, own = parts(weights, embed(weights, kept), kept.y, held_out)
    shares = tf.constant(_SHARES)[:, tf.newaxis, tf.newaxis]
    mixed = shares * near + (1 - shares) * own
    labels = tf.argmax(mixed, axis=2, output_type=tf.int32)
    hits = tf.reduce_sum(tf.cast(tf.equal(labels, held_out.y), tf.int32), 1)
    share = tf.gather(tf.constant(_SHARES), tf.argmax(hits))
    return tf.where(tf.size(held_out.y) > 0, share, _NO_CHOICE)

  def start(weights, memory):
    del memory  # Clients keep nothing.
    return Memorization(
        weights,
        tf.zeros([0, model.embedding_size]),
        tf.zeros([0], tf.int32),
        tf.constant(_NO_CHOICE),
    )

  def adapt(weights, memory, examples, seed):
    del memory, seed  # Nothing is kept and nothing is random.
    examples = episodes.drop_padding(examples)
    share = choose(weights, *_hold_out(examples, config.hold_out_every))
    return Memorization(weights, embed(weights, examples), examples.y, share)

  def mixture(adapted, query):
    near, own = parts(
        adapted.weights, adapted.embeddings, adapted.labels, query
    )
    return adapted.share * near + (1 - adapted.share) * own

  def to_log_probabilities(mixed):
    # It sums to less than 1 where nothing is stored.
    return tf.math.log(mixed / tf.reduce_sum(mixed, axis=1, keepdims=True))

  return personalizer.ClientPersonalizer(
      start, adapt, personalizer.ByScores(mixture, to_log_probabilities)
  )
