"""What classifies a client's examples: its losses and its predictions.

Both classifiers have one interface, so that an algorithm takes either: one goes
by the distance to class prototypes, the other has a linear layer.
"""

import collections
from collections.abc import Callable
import dataclasses
from typing import Any

import tensorflow as tf

from tff_meta import episodes
from tff_meta.learners import personalizer
from tff_meta.losses import cross_entropy
from tff_meta.losses import prototypical
from tff_meta.models import layers
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class DistanceClassifier:
  """Classification by squared distance to class prototypes, with GPAL.

  The loss of a batch is `L_local` against prototypes of the client's own
  classes while there are no global prototypes yet, and afterwards

    local_weight * L_local + aux_weight * L_aux

  where `L_aux` (global prototype assisted learning) measures the same
  embeddings against the group's aggregated prototypes. An `aux_weight` of 0
  removes GPAL: the loss is then `L_local` in every round.

  Attributes:
    model: The network; its head, if any, is not used.
    num_classes: Number of classes `C` that prototypes are kept for.
    local_weight: Weight of `L_local`, at least 0 (the paper's gamma).
    aux_weight: Weight of `L_aux`, at least 0 (the paper's 1 - gamma).
    exclude_true_class: Whether the softmax denominator leaves out the true
      class, as the paper's eq. 2 prints it.
    squared: Squared Euclidean distance; otherwise its root.
  """

  model: model_lib.Model
  num_classes: int
  local_weight: float = 1.0
  aux_weight: float = 0.0
  exclude_true_class: bool = False
  squared: bool = True

  def initialize(self, seed: tf.Tensor):
    """Returns initial weights, whose head is empty."""
    return self.model.without_head().initialize(seed)

  def start(self, weights, seed):
    """Returns the weights a new group starts from: the trained ones."""
    del seed  # Nothing is drawn: there is no head.
    return weights

  def no_prototypes(self) -> prototypical.Prototypes:
    """Returns the prototypes before the first round: of no class."""
    return prototypical.Prototypes(
        tf.zeros([self.num_classes, self.model.embedding_size]),
        tf.zeros([self.num_classes]),
    )

  def prototypes(self, weights, examples) -> prototypical.Prototypes:
    """Returns the class means of the embedded examples."""
    embeddings = self.model.embed(weights['body'], examples.x, examples.mask)
    return prototypical.prototypes(
        embeddings, examples.y, examples.mask, self.num_classes
    )

  def loss(self, weights, batch, global_prototypes, local_prototypes=None):
    """Returns the loss of one batch; prototypes given are constants.

    Args:
      weights: `OrderedDict(body, head)`.
      batch: `Examples` `[b, ...]`.
      global_prototypes: The group's prototypes of the round before; none
        present in the first round.
      local_prototypes: The client's own; by default those of the batch itself,
        through which the gradient flows.

    Returns:
      A float scalar; 0 for a batch without real examples.
    """
    embeddings = self.model.embed(weights['body'], batch.x, batch.mask)
    if local_prototypes is None:
      local_prototypes = prototypical.prototypes(
          embeddings, batch.y, batch.mask, self.num_classes
      )
    local = self._distance_loss(embeddings, batch, local_prototypes)
    if self.aux_weight == 0:
      return local
    auxiliary = self._distance_loss(embeddings, batch, global_prototypes)
    combined = self.local_weight * local + self.aux_weight * auxiliary
    # Not `==`: of tensors in TFF's graphs, it compares Python identities.
    first_round = tf.equal(tf.reduce_sum(global_prototypes.present), 0.0)
    return tf.where(first_round, local, combined)

  def _distance_loss(self, embeddings, batch, prototypes):
    return prototypical.prototypical_loss(
        embeddings,
        batch.y,
        batch.mask,
        prototypes,
        exclude_true_class=self.exclude_true_class,
        squared=self.squared,
    )

  def predict(self, weights, prototypes, query) -> tf.Tensor:
    """Returns the nearest present class of every query, int32 `[Q]`."""
    scores = self.scores(weights, prototypes, query)
    return personalizer.ByScores.to_labels(scores)

  def scores(self, weights, prototypes, query) -> tf.Tensor:
    """Returns minus the squared distances to all classes, float `[Q, C]`."""
    embeddings = self.model.embed(weights['body'], query.x, query.mask)
    return prototypical.prototype_logits(embeddings, prototypes)

  def to_log_probabilities(self, scores) -> tf.Tensor:
    """Returns those of the softmax over all present classes."""
    return prototypical.log_probabilities(scores, squared=self.squared)


@dataclasses.dataclass(frozen=True)
class LinearClassifier:
  """A dense layer on the embedding, trained with softmax cross-entropy.

  It has the interface of `DistanceClassifier`, with prototypes of no class.

  Attributes:
    model: The network; its head, if any, is replaced.
    num_classes: Number of outputs of the dense layer.
    num_absent: Rows of its prototypes, of classes that are not there.
  """

  model: model_lib.Model
  num_classes: int
  num_absent: int = 0

  def initialize(self, seed: tf.Tensor):
    """Returns initial weights with a head of `num_classes` outputs."""
    return self.model.with_head(self.num_classes).initialize(seed)

  def start(self, weights, seed):
    """Returns the trained body under a new, random head for the group."""
    init_head = layers.dense_head(
        layers.xavier_uniform, self.model.embedding_size
    )
    head = init_head(seed, self.num_classes)
    return collections.OrderedDict(body=weights['body'], head=head)

  def no_prototypes(self) -> prototypical.Prototypes:
    """Returns prototypes of no class."""
    return prototypical.Prototypes(
        tf.zeros([self.num_absent, self.model.embedding_size]),
        tf.zeros([self.num_absent]),
    )

  def prototypes(self, weights, examples) -> prototypical.Prototypes:
    """Returns prototypes of no class."""
    del weights, examples  # A linear classifier has none.
    return self.no_prototypes()

  def loss(self, weights, batch, global_prototypes=None, local_prototypes=None):
    """Returns the mean softmax cross-entropy of the batch."""
    del global_prototypes, local_prototypes  # A linear classifier has none.
    logits = self.logits(weights, batch)
    return cross_entropy.softmax_cross_entropy(logits, batch.y, batch.mask)

  def predict(self, weights, prototypes, query) -> tf.Tensor:
    """Returns the class of the largest output of every query, int32 `[Q]`."""
    scores = self.scores(weights, prototypes, query)
    return personalizer.ByScores.to_labels(scores)

  def scores(self, weights, prototypes, query) -> tf.Tensor:
    """Returns the outputs for every query, float `[Q, C]`."""
    del prototypes  # A linear classifier has none.
    return self.logits(weights, query)

  def to_log_probabilities(self, scores) -> tf.Tensor:
    """Returns those of the softmax."""
    return tf.nn.log_softmax(scores)

  def logits(self, weights, examples) -> tf.Tensor:
    """Returns the outputs for every example, float `[n, C]`."""
    embeddings = self.model.embed(weights['body'], examples.x, examples.mask)
    return self.model.classify(weights['head'], embeddings)


Classifier = DistanceClassifier | LinearClassifier


def learns_from(
    classifier: Classifier,
    examples: episodes.Examples,
    global_prototypes: prototypical.Prototypes,
    local_present: tf.Tensor | None = None,
    batch_size: int = 0,
) -> tf.Tensor:
  """Whether a classifier's loss tells classes apart, a boolean scalar.

  By distances it is 0, whatever the weights, for a client of one class before
  there are prototypes of others, and for batches of one example.

  Args:
    classifier: Whose loss.
    examples: `Examples` `[n, ...]`, none of them padding.
    global_prototypes: As for `DistanceClassifier.loss`.
    local_present: Which local prototypes there are, `[C]`; by default those of
      the examples.
    batch_size: Of the minibatches with prototypes of their own; 0 takes all in
      one.
  """
  if not isinstance(classifier, DistanceClassifier):
    return tf.size(examples.y) > 0
  member = tf.one_hot(examples.y, classifier.num_classes)

  def is_scored(present):
    held = tf.reduce_sum(tf.linalg.matvec(member, present)) > 0
    return held & (tf.reduce_sum(present) > 1)

  if local_present is None:
    own = tf.cast(tf.reduce_sum(member, 0) > 0, tf.float32)
    learns = is_scored(own) & (batch_size != 1)
  else:
    learns = is_scored(local_present)
  if classifier.aux_weight:
    learns |= is_scored(global_prototypes.present)
  return learns


def build_predict(classifier: LinearClassifier) -> personalizer.ByScores:
  """Returns `(weights, query) -> labels` of a personalizer."""
  none = classifier.no_prototypes()
  return personalizer.ByScores(
      lambda weights, query: classifier.scores(weights, none, query),
      classifier.to_log_probabilities,
  )


def build_client_personalizer(
    classifier: LinearClassifier,
    start: Callable[[Any, Any], Any] = lambda weights, memory: weights,
    train: Callable[[Any, Any, tf.Tensor], Any] = lambda weights, *_: weights,
) -> personalizer.ClientPersonalizer:
  """A client takes a body and a head, trains them and classifies with them.

  Args:
    classifier: What predicts.
    start: `(weights, memory) -> OrderedDict(body, head)`; by default the
      server's weights.
    train: `(OrderedDict(body, head), examples, seed) -> OrderedDict(body,
      head)`; gives back what it gets where there are no examples. By default
      nothing is trained.

  Returns:
    A `ClientPersonalizer`.
  """

  def adapt(weights, memory, examples, seed):
    return train(start(weights, memory), examples, seed)

  return personalizer.ClientPersonalizer(
      start, adapt, build_predict(classifier)
  )
