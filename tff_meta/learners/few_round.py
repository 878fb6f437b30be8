"""A few federated rounds inside one group of clients, as plain TensorFlow.

Few-round learning trains for this procedure and uses it at deployment, so the
client's part (`client_round`) and the server's part (`average`) are written
here once, for a classifier by distance to class prototypes and for a linear
one. Federated training runs the client's part through TFF; a personalizer runs
both parts in `adapt_group`.

Source: Younghyun Park, Dong-Jun Han, Do-Yeon Kim, Jun Seo and Jaekyun Moon,
"Few-Round Learning for Federated Learning", NeurIPS 2021, Algorithm 1.
"""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tff_meta import episodes
from tff_meta import weights as weights_lib
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.losses import prototypical


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
    prototype_mean: `'holders'` or `'all'`, as `over` of
      `prototypical.divide_prototypes`.
    uniform: Whether clients count alike; otherwise by their support size.
  """

  optimizer: Any
  batch_size: int
  num_epochs: int = 1
  weight_decay: float = 0.0
  prototype_source: str = 'updated'
  prototype_mean: str = 'holders'
  uniform: bool = False


class GpalRounds(NamedTuple):
  """A new group's rounds with global prototypes in the loss and without.

  Attributes:
    num_rounds: R, at least 2: the first round has no global prototypes yet.
    settings: How clients train.
    classifier: What is trained, as the configuration has it.
    without_gpal: The same without global prototypes in the loss.
    with_gpal: The same with them.
  """

  num_rounds: int
  settings: RoundSettings
  classifier: classifiers.Classifier
  without_gpal: classifiers.Classifier
  with_gpal: classifiers.Classifier


class ClientUpload(NamedTuple):
  """What a client hands to its group's server after a round.

  Attributes:
    weights: The trained weights, like those downloaded.
    prototypes: `Prototypes` `[C, D]` of the client's support set.
    weight: lambda_k, float32 scalar.
    report: `LocalReport` of the training, `()` where nobody asks.
  """

  weights: Any
  prototypes: prototypical.Prototypes
  weight: tf.Tensor
  report: Any


def client_round(
    classifier: classifiers.Classifier,
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
  weight = local_sgd.client_weight(
      tf.reduce_sum(support.mask), settings.uniform
  )
  return ClientUpload(trained, prototypes, weight, report)


def average(
    uploads: ClientUpload, previous: Any, over: str = 'holders'
) -> tuple[Any, prototypical.Prototypes]:
  """The server's part of a round: Algorithm 1, lines 13 and 14.

  Args:
    uploads: `ClientUpload` with a leading client axis. A client of weight zero
      has no say.
    previous: The weights the round began with, which stay where all clients
      have weight zero.
    over: See `prototypical.divide_prototypes`.

  Returns:
    The weighted mean of the clients' weights, and the group's prototypes.
  """
  total = tf.reduce_sum(uploads.weight)

  def mean(stacked, before):
    weighted = tf.tensordot(uploads.weight, stacked, axes=1)
    return tf.where(total > 0, tf.math.divide_no_nan(weighted, total), before)

  sums = tf.vectorized_map(
      lambda args: prototypical.weigh_prototypes(*args),
      (uploads.prototypes, uploads.weight),
  )
  sums = tf.nest.map_structure(lambda s: tf.reduce_sum(s, axis=0), sums)
  weights = tf.nest.map_structure(mean, uploads.weights, previous)
  return weights, prototypical.divide_prototypes(sums, over)


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
    classifier: classifiers.Classifier,
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
    classifier: classifiers.Classifier,
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
    classifier: classifiers.Classifier, settings: RoundSettings, num_rounds: int
) -> personalizer.GroupPersonalizer:
  """What a new group does with trained weights: R rounds, then classify.

  Args:
    classifier: For the number of classes of a group.
    settings: How the group's clients train.
    num_rounds: R, at least 1.

  Returns:
    A `GroupPersonalizer`; `adapt` starts from `classifier.start(weights)`.
  """
  if isinstance(classifier, classifiers.LinearClassifier):
    # TensorFlow Lite does not stack what clients upload where it has no rows.
    classifier = dataclasses.replace(classifier, num_absent=1)

  def adapt(weights, support, salts, seed):
    start_seed, rounds_seed = tf.unstack(
        tf.random.experimental.stateless_split(seed)
    )
    weights = classifier.start(weights, start_seed)
    return adapt_group(
        classifier, settings, num_rounds, weights, support, salts, rounds_seed
    )

  def scores(adapted, query):
    weights, prototypes = adapted
    return classifier.scores(weights, prototypes, query)

  return personalizer.GroupPersonalizer(
      adapt, personalizer.ByScores(scores, classifier.to_log_probabilities)
  )
