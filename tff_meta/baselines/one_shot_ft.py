"""Fine-tuning via one-shot FL: of a new group's clients, the best are averaged.

A model is prepared by federated averaging. A new group of clients trains it for
R rounds, under a new head, as in fine-tuning via FedAvg. But there are more
clients than are averaged (20, of which 10 are): every client holds out a part
of its support set, and in every round the server keeps the models with the best
accuracy, each on what its own client holds out, and averages these alone.

One-shot federated learning has one round, in which the server makes an ensemble
of the clients' models that do best on their own validation data ("CV
selection"). What is taken from it here is the selection.

Source: Neel Guha, Ameet Talwalkar and Virginia Smith, "One-Shot Federated
Learning", 2019, https://arxiv.org/abs/1902.11175; as a baseline: Park et al.,
"Few-Round Learning for Federated Learning", NeurIPS 2021, Tables 1 to 3,
"Fine-tuning via one-shot FL".
Deviations: docs/algorithms/one_shot_ft.md.
"""

import dataclasses

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import optimizers
from tff_meta.learners import classifiers
from tff_meta.learners import few_round
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib

# In place of a round's number, of which the first is 0: the draws of what
# clients hold out, and of who goes first among equals.
_HOLDING_OUT, _TIES = -1, -2


@dataclasses.dataclass(frozen=True)
class OneShotFtConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    learning_rate: Of the clients in training.
    uniform: Clients count alike; otherwise by their number of examples, in a
      new group those that they train on.
    rounds: R, federated rounds of a new group, at least 1.
    deployment_learning_rate: Of a new group's clients.
    deployment_batch_size: Of a new group's clients.
    kept_clients: K, how many clients of a new group are averaged in a round, at
      least 1. The group has at least as many; the paper has twice as many.
    held_out_share: Share of a client's support set that is held out to score
      it, at least 0 and below 1, rounded down to whole examples. With 0 K
      random clients are kept.
  """

  rounds: int = 3
  deployment_learning_rate: float = 0.1
  deployment_batch_size: int = 10
  kept_clients: int = 10
  held_out_share: float = 0.2

  def __post_init__(self):
    super().__post_init__()
    for name in ('rounds', 'kept_clients'):
      config_checks.check_at_least_one(self, name)
    if self.held_out_share >= 1:
      raise ValueError(
          'Expected `held_out_share` below 1, so that clients have something to'
          f' train on, found {self.held_out_share}.'
      )


# Park et al. keep 10 clients of 20 and have R = 3; the share that is held out
# is ours, and the training that of FedAvg's presets here.
PAPER = OneShotFtConfig()
RELEASE = dataclasses.replace(
    PAPER, learning_rate=0.01, momentum=0.5, deployment_learning_rate=0.01
)
# For the demonstration: groups of pairs of digits have five clients, who train
# on about ten images each, which is one step in batches of ten.
DEMO = dataclasses.replace(
    PAPER,
    kept_clients=3,
    deployment_learning_rate=0.3,
    deployment_batch_size=3,
)


def one_shot_ft(
    model: model_lib.Model, config: OneShotFtConfig, num_classes: int
) -> method.Method:
  """Federated averaging, in which nobody is left out, then R rounds in a group.

  A new group starts from the trained body and a new head. What a client holds
  out is the same in all rounds: it never trains on it. `adapt` raises a
  ValueError for a group of fewer than `config.kept_clients` clients.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(weights, client):
    trained, report = config.train(
        classifier.loss, weights, client.examples, client.seed
    )
    return config.output(weights, trained, report, client.examples)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      group=lambda: _group_rounds(classifier, config),
  )


def hold_out(
    support: episodes.Examples,
    share: float,
    salts: tf.Tensor,
    seed: tf.Tensor,
) -> tuple[episodes.Examples, episodes.Examples]:
  """Splits every client's examples at random; floor(share * n) are held out.

  Args:
    support: The clients' `Examples` with a leading client axis, padded.
    share: In [0, 1].
    salts: int32 `[K]`, one of each client.
    seed: Of the group, int32 `[2]`.

  Returns:
    What clients train on, and what they hold out: `support` with other masks.
  """

  def one_client(args):
    y, mask, salt = args
    rows = episodes.Examples(tf.range(tf.size(y)), y, mask)
    held_out, _ = episodes.split_support_query(
        rows, share, few_round.client_seed(seed, _HOLDING_OUT, salt)
    )
    indices = held_out.x[:, tf.newaxis]
    return tf.scatter_nd(indices, held_out.mask, tf.shape(mask))

  held_out = tf.map_fn(
      one_client,
      (support.y, support.mask, salts),
      fn_output_signature=tf.TensorSpec(support.mask.shape[1:], tf.float32),
  )
  return (
      support._replace(mask=support.mask - held_out),
      support._replace(mask=held_out),
  )


def score(
    classifier: classifiers.LinearClassifier,
    uploads: few_round.ClientUpload,
    held_out: episodes.Examples,
) -> tf.Tensor:
  """Returns the accuracy of every client's model on what the client holds out.

  A client that holds out nothing has 0, like one whose model is always wrong:
  nothing speaks for it. One of weight zero, whose upload is not finite or who
  has no examples, has -1, so that it takes the place of none that counts.

  Args:
    classifier: For the group's classes.
    uploads: The clients', with a leading client axis `[K]`.
    held_out: `Examples` with a leading client axis, padded.

  Returns:
    float32 `[K]`.

  Source: Guha et al. 2019, CV selection.
  """

  def accuracy(args):
    weights, padded = args
    examples = episodes.drop_padding(padded)
    labels = classifier.predict(weights, classifier.no_prototypes(), examples)
    hits = tf.reduce_sum(tf.cast(tf.equal(labels, examples.y), tf.float32))
    return tf.math.divide_no_nan(hits, tf.reduce_sum(examples.mask))

  accuracies = tf.map_fn(
      accuracy,
      (uploads.weights, held_out),
      fn_output_signature=tf.TensorSpec([], tf.float32),
  )
  return tf.where(uploads.weight > 0, accuracies, -1.0)


def draw_ranks(salts: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Returns who goes first among equals, whatever the order of the clients.

  Args:
    salts: int32 `[K]`, one of each client.
    seed: Of the group, int32 `[2]`.

  Returns:
    float32 `[K]`, random numbers of the clients' own; the smallest goes first.
  """
  return tf.map_fn(
      lambda salt: tf.random.stateless_uniform(
          [], few_round.client_seed(seed, _TIES, salt)
      ),
      salts,
      fn_output_signature=tf.TensorSpec([], tf.float32),
  )


def keep_best(scores: tf.Tensor, ranks: tf.Tensor, num_kept: int) -> tf.Tensor:
  """Returns which clients have the best scores.

  Args:
    scores: float32 `[K]`.
    ranks: float32 `[K]`; of equal scores those of the smallest are kept.
    num_kept: From 1 to K.

  Returns:
    float32 `[K]`, 1 for `num_kept` clients and 0 for the others.
  """
  by_rank = tf.argsort(ranks)
  # Where elements are equal, top_k promises the lower index first.
  _, best = tf.math.top_k(tf.gather(scores, by_rank), num_kept)
  kept = tf.one_hot(tf.gather(by_rank, best), tf.size(scores))
  return tf.reduce_sum(kept, axis=0)


def _group_rounds(
    classifier: classifiers.LinearClassifier, config: OneShotFtConfig
) -> personalizer.GroupPersonalizer:
  """R rounds in a group, in each of which the best are averaged."""
  settings = few_round.RoundSettings(
      optimizer=optimizers.build_optimizer(
          config.optimizer, config.deployment_learning_rate, config.momentum
      ),
      batch_size=config.deployment_batch_size,
      num_epochs=config.epochs,
      weight_decay=config.weight_decay,
      uniform=config.uniform,
  )
  none = classifier.no_prototypes()

  def adapt(weights, support, salts, seed):
    num_clients = support.y.shape[0]  # None where any number can come.
    if num_clients is not None and num_clients < config.kept_clients:
      raise ValueError(
          f'Expected a group of at least {config.kept_clients} clients'
          f' (`kept_clients`), found {num_clients}.'
      )
    # The seeds of fine-tuning via FedAvg: the same head, the same minibatches.
    start_seed, rounds_seed = tf.unstack(
        tf.random.experimental.stateless_split(seed)
    )
    weights = classifier.start(weights, start_seed)
    train, held_out = hold_out(
        support, config.held_out_share, salts, rounds_seed
    )
    ranks = draw_ranks(salts, rounds_seed)
    for round_num in range(config.rounds):
      uploads = few_round.train_clients(
          classifier,
          settings,
          weights,
          none,
          train,
          salts,
          rounds_seed,
          round_num,
      )
      scores = score(classifier, uploads, held_out)
      kept = keep_best(scores, ranks, config.kept_clients)
      weights, _ = few_round.average(
          uploads._replace(weight=kept * uploads.weight), weights
      )
    return weights

  return personalizer.GroupPersonalizer(
      adapt, classifiers.build_predict(classifier)
  )
