"""A few federated rounds inside one group of clients, as plain TensorFlow.

Few-round learning trains for this procedure and uses it at deployment, so the
client's part (`client_round`) and the server's part (`average`) are written
here once, for a classifier by distance to class prototypes and for a linear
one. Federated training runs the client's part through TFF; a personalizer runs
both parts in `adapt_group`.

Source: Younghyun Park, Dong-Jun Han, Do-Yeon Kim, Jun Seo and Jaekyun Moon,
"Few-Round Learning for Federated Learning", NeurIPS 2021, Algorithm 1.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tff_meta import episodes
from tff_meta import weights as weights_lib
from tff_meta.learners import local_sgd
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
    embeddings = self.model.embed(weights['body'], query.x, query.mask)
    return prototypical.nearest_prototype(embeddings, prototypes)


@dataclasses.dataclass(frozen=True)
class LinearClassifier:
  """A dense layer on the embedding, trained with softmax cross-entropy.

  It has the interface of `DistanceClassifier`, with prototypes of no class.

  Attributes:
    model: The network; its head, if any, is replaced.
    num_classes: Number of outputs of the dense layer.
  """

  model: model_lib.Model
  num_classes: int

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
        tf.zeros([0, self.model.embedding_size]), tf.zeros([0])
    )

  def prototypes(self, weights, examples) -> prototypical.Prototypes:
    """Returns prototypes of no class."""
    del weights, examples  # A linear classifier has none.
    return self.no_prototypes()

  def loss(self, weights, batch, global_prototypes=None, local_prototypes=None):
    """Returns the mean softmax cross-entropy of the batch."""
    del global_prototypes, local_prototypes  # A linear classifier has none.
    logits = self._logits(weights, batch)
    return cross_entropy.softmax_cross_entropy(logits, batch.y, batch.mask)

  def predict(self, weights, prototypes, query) -> tf.Tensor:
    """Returns the class of the largest output of every query, int32 `[Q]`."""
    del prototypes  # A linear classifier has none.
    return tf.argmax(self._logits(weights, query), axis=1, output_type=tf.int32)

  def _logits(self, weights, examples):
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


@dataclasses.dataclass(frozen=True)
class RoundSettings:
  """How a client trains in one round.

  Attributes:
    optimizer: An object with the interface of `tff.learning.optimizers`.
    batch_size: Examples of a minibatch; 0 takes all in one batch.
    num_epochs: Local epochs `E`, at least 0.
    weight_decay: Coupled L2 coefficient, at least 0.
    prototype_source: `'downloaded'` embeds the support set with the weights the
      round began with, `'updated'` with the client's trained ones.
    prototype_mean: `'holders'` or `'all'`, see `divide_prototypes`.
    uniform: Whether clients count alike; otherwise by their support size.
  """

  optimizer: Any
  batch_size: int
  num_epochs: int = 1
  weight_decay: float = 0.0
  prototype_source: str = 'updated'
  prototype_mean: str = 'holders'
  uniform: bool = False


class ClientUpload(NamedTuple):
  """What a client hands to its group's server after a round.

  Attributes:
    weights: The trained weights, like those downloaded.
    prototypes: `Prototypes` `[C, D]` of the client's support set.
    weight: lambda_k, float32 scalar.
    report: `LocalReport` of the training.
  """

  weights: Any
  prototypes: prototypical.Prototypes
  weight: tf.Tensor
  report: local_sgd.LocalReport


def client_weight(num_examples: tf.Tensor, uniform: bool) -> tf.Tensor:
  """Returns lambda_k: the number of examples, or 1 for any client with some."""
  num_examples = tf.cast(num_examples, tf.float32)
  return tf.sign(num_examples) if uniform else num_examples


def client_round(
    classifier: Classifier,
    settings: RoundSettings,
    weights: Any,
    global_prototypes: prototypical.Prototypes,
    support: episodes.Examples,
    seed: tf.Tensor,
) -> ClientUpload:
  """One client's part of a round: Algorithm 1, lines 9 and 11.

  Args:
    classifier: What is trained.
    settings: How.
    weights: The group's weights `theta^r`.
    global_prototypes: `Gamma^{r-1}`; none present in the first round.
    support: The client's support `Examples` `[n, ...]`, n of at least 0.
    seed: int32 `[2]`, this client's and this round's own.

  Returns:
    The client's upload.
  """
  trained, report = local_sgd.local_sgd(
      lambda w, batch: classifier.loss(w, batch, global_prototypes),
      weights,
      support,
      settings.optimizer,
      batch_size=settings.batch_size or None,
      num_epochs=settings.num_epochs,
      seed=seed,
      weight_decay=settings.weight_decay,
  )
  downloaded = settings.prototype_source == 'downloaded'
  prototypes = classifier.prototypes(
      weights if downloaded else trained, support
  )
  weight = client_weight(tf.reduce_sum(support.mask), settings.uniform)
  return ClientUpload(trained, prototypes, weight, report)


class PrototypeSums(NamedTuple):
  """What is summed over clients to average prototypes.

  Attributes:
    means: `lambda_k * means`, zero rows for absent classes; float `[C, D]`.
    class_weight: `lambda_k` where the client holds the class; float `[C]`.
    total_weight: `lambda_k`; float scalar, or `[C]` where each class has one.
  """

  means: tf.Tensor
  class_weight: tf.Tensor
  total_weight: tf.Tensor


def weigh_prototypes(
    prototypes: prototypical.Prototypes, weight: tf.Tensor
) -> PrototypeSums:
  """Returns one client's summand, given its weight lambda_k.

  Args:
    prototypes: The client's, of C classes.
    weight: At least 0; a scalar, or one for every class, `[C]`.
  """
  held = weight * prototypes.present
  return PrototypeSums(held[:, tf.newaxis] * prototypes.means, held, weight)


def divide_prototypes(
    sums: PrototypeSums, over: str = 'holders'
) -> prototypical.Prototypes:
  """The global prototypes from the summed `weigh_prototypes`.

    Gamma(c) = sum_{k holds c} lambda_k Gamma_k(c) / sum_{k holds c} lambda_k

  Args:
    sums: Sums over the clients.
    over: `'holders'` as above; `'all'` divides by the weight of all clients, so
      that a class held by few shrinks towards 0 (the literal Algorithm 1).

  Returns:
    Means `[C, D]`, zero rows for classes nobody holds, and present `[C]`, 0/1.
  """
  weight = sums.class_weight if over == 'holders' else sums.total_weight
  means = tf.math.divide_no_nan(
      sums.means,
      tf.broadcast_to(weight, tf.shape(sums.means)[:1])[:, tf.newaxis],
  )
  present = tf.cast(sums.class_weight > 0, sums.means.dtype)
  return prototypical.Prototypes(means, present)


def average(
    uploads: ClientUpload, previous: Any, over: str = 'holders'
) -> tuple[Any, prototypical.Prototypes]:
  """The server's part of a round: Algorithm 1, lines 13 and 14.

  Args:
    uploads: `ClientUpload` with a leading client axis. A client of weight zero
      has no say.
    previous: The weights the round began with, which stay where all clients
      have weight zero.
    over: See `divide_prototypes`.

  Returns:
    The weighted mean of the clients' weights, and the group's prototypes.
  """
  total = tf.reduce_sum(uploads.weight)

  def mean(stacked, before):
    weighted = tf.tensordot(uploads.weight, stacked, axes=1)
    return tf.where(total > 0, tf.math.divide_no_nan(weighted, total), before)

  sums = tf.vectorized_map(
      lambda args: weigh_prototypes(*args), (uploads.prototypes, uploads.weight)
  )
  sums = tf.nest.map_structure(lambda s: tf.reduce_sum(s, axis=0), sums)
  weights = tf.nest.map_structure(mean, uploads.weights, previous)
  return weights, divide_prototypes(sums, over)


def client_seed(
    seed: tf.Tensor, round_num: int | tf.Tensor, salt: tf.Tensor
) -> tf.Tensor:
  """Returns the seed of a client in a round of `adapt_group`, int32 `[2]`.

  Args:
    seed: Of the group, int32 `[2]`.
    round_num: From 0.
    salt: The client's, an int32 scalar.
  """
  fold_in = tf.random.experimental.stateless_fold_in
  return fold_in(fold_in(seed, round_num), salt)


def train_clients(
    classifier: Classifier,
    settings: RoundSettings,
    weights: Any,
    prototypes: prototypical.Prototypes,
    support: episodes.Examples,
    salts: tf.Tensor,
    seed: tf.Tensor,
    round_num: int | tf.Tensor,
) -> ClientUpload:
  """The part of a group's clients in a round.

  Args:
    classifier: What is trained, for the group's classes.
    settings: How.
    weights: The group's weights `theta^r`.
    prototypes: `Gamma^{r-1}`; none present in the first round.
    support: The clients' `Examples` with a leading client axis, padded.
    salts: int32 `[K]`, one of each client.
    seed: Of the group, int32 `[2]`.
    round_num: r, from 0, an integer or int32 scalar.

  Returns:
    The clients' uploads with a leading client axis, without reports. As in
    training, a client whose upload is not finite has zeros, and weight zero.
  """

  def one_client(args):
    padded, salt = args
    examples = episodes.drop_padding(padded)
    own_seed = client_seed(seed, round_num, salt)
    upload = client_round(
        classifier, settings, weights, prototypes, examples, own_seed
    )
    upload, _ = weights_lib.where_finite_or_zero(upload._replace(report=()))
    return upload

  specs = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype),
      ClientUpload(weights, prototypes, tf.constant(0.0), report=()),
  )
  # One after the other: evaluation runs several groups at the same time.
  return tf.map_fn(
      one_client,
      (support, salts),
      fn_output_signature=specs,
      parallel_iterations=1,
  )


def adapt_group(
    classifier: Classifier,
    settings: RoundSettings,
    num_rounds: int,
    weights: Any,
    support: episodes.Examples,
    salts: tf.Tensor,
    seed: tf.Tensor,
):
  """Runs the rounds of a group of clients: Algorithm 1 at deployment.

  Args:
    classifier: What is trained, for the group's classes.
    settings: How clients train.
    num_rounds: R, at least 1.
    weights: `theta^0`.
    support: The clients' `Examples` with a leading client axis, padded.
    salts: int32 `[K]`, one of each client.
    seed: int32 `[2]`.

  Returns:
    `theta^R` and the group's prototypes `Gamma^{R-1}`.
  """

  def one_round(round_num, weights, prototypes):
    uploads = train_clients(
        classifier,
        settings,
        weights,
        prototypes,
        support,
        salts,
        seed,
        round_num,
    )
    return round_num + 1, *average(uploads, weights, settings.prototype_mean)

  # Not unrolled: to trace a round takes longer than to compute it.
  _, weights, prototypes = tf.while_loop(
      lambda round_num, *_: round_num < num_rounds,
      one_round,
      (0, weights, classifier.no_prototypes()),
  )
  return weights, prototypes


def build_group_personalizer(
    classifier: Classifier, settings: RoundSettings, num_rounds: int
) -> personalizer.GroupPersonalizer:
  """What a new group does with trained weights: R rounds, then classify.

  Args:
    classifier: For the number of classes of a group.
    settings: How the group's clients train.
    num_rounds: R, at least 1.

  Returns:
    A `GroupPersonalizer`; `adapt` starts from `classifier.start(weights)`.
  """

  def adapt(weights, support, salts, seed):
    start_seed, rounds_seed = tf.unstack(
        tf.random.experimental.stateless_split(seed)
    )
    weights = classifier.start(weights, start_seed)
    return adapt_group(
        classifier, settings, num_rounds, weights, support, salts, rounds_seed
    )

  def predict(adapted, query):
    weights, prototypes = adapted
    return classifier.predict(weights, prototypes, query)

  return personalizer.GroupPersonalizer(adapt, predict)
