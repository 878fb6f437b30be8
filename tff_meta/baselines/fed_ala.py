"""FedALA: a client mixes the server's model into its own, weight by weight.

Before it trains a client replaces its lower layers by the server's, and moves
every weight of its last layers towards the server's by a share of its own in
[0, 1]. It learns these shares by gradient steps on some of its examples, in its
second round until the loss settles and from then on for one pass a round. Then
it trains as in federated averaging, keeps what it trained and uploads it. A
known client uses its mixture with the server's model of the time; a client that
training never saw has nothing to mix and uses the server's model.

Source: Jianqing Zhang, Yang Hua, Hao Wang, Tao Song, Zhengui Xue, Ruhui Ma and
Haibing Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning", AAAI 2023, https://arxiv.org/abs/2212.01197, Algorithm 1.
Deviations: docs/algorithms/fed_ala.md.
"""

import collections
import dataclasses
from typing import Any

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta.learners import classifiers
from tff_meta.learners import personal_layers
from tff_meta.models import model as model_lib

_WINDOW = 10  # Losses whose spread tells whether the first shares have settled.


@dataclasses.dataclass(frozen=True)
class FedAlaConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    mixed_layers: p, dense layers, counted from the output, whose weights are
      mixed; of the others a client takes the server's. At least 1.
    share_learning_rate: eta, of the shares.
    share_fraction: s, the part of a client's examples on which shares are
      learned, in (0, 1].
    settled: Standard deviation of the last 10 passes' losses below which the
      shares of a client's first time are learned.
    max_passes: Passes after which they are anyway, at least 1.
  """

  learning_rate: float = 0.005
  mixed_layers: int = 1
  share_learning_rate: float = 1.0
  share_fraction: float = 0.8
  settled: float = 0.01
  max_passes: int = 100

  def __post_init__(self):
    super().__post_init__()
    for name in ('mixed_layers', 'max_passes'):
      config_checks.check_at_least_one(self, name)
    if not 0 < self.share_fraction <= 1:
      raise ValueError(
          'Expected `share_fraction` above 0 and at most 1, found'
          f' {self.share_fraction}.'
      )


# The authors' code: rate 0.005, B = 10, one epoch, s = 80, eta = 1, the head.
# Its threshold is 0.1; the paper's was 0.01, they say. The last pass is ours.
PAPER = FedAlaConfig()
RELEASE = dataclasses.replace(PAPER, settled=0.1)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.1)


def mix(own: Any, received: Any, shares: Any) -> Any:
  """`own + (received - own) * share`, weight by weight; eq. 4."""
  return tf.nest.map_structure(
      lambda o, r, s: o + (r - o) * s, own, received, shares
  )


def learn_shares(
    loss_fn,
    config: FedAlaConfig,
    own: Any,
    received: Any,
    shares: Any,
    examples: episodes.Examples,
    seed: tf.Tensor,
    is_first: tf.Tensor,
) -> Any:
  """Gradient steps on the shares: line 9 of Algorithm 1.

    W <- clip(W - eta * grad loss(mix) * (received - own), 0, 1)

  Args:
    loss_fn: `(mixed weights, batch) -> scalar`.
    config: The configuration.
    own: The client's weights of the mixed layers.
    received: The server's.
    shares: W, where the steps begin.
    examples: The client's.
    seed: int32 `[2]`.
    is_first: Boolean scalar, whether to go on until the losses settle.

  Returns:
    The shares.
  """
  split_seed, passes_seed = tf.unstack(
      tf.random.experimental.stateless_split(seed)
  )
  used, _ = episodes.split_support_query(
      examples, config.share_fraction, split_seed
  )

  def step(i, shares, loss, batches):
    batch = episodes.take(used, batches, i)
    mixed = mix(own, received, shares)
    with tf.GradientTape() as tape:
      tape.watch(mixed)
      loss = loss_fn(mixed, batch)
    gradients = tape.gradient(
        loss, mixed, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    shares = tf.nest.map_structure(
        lambda s, g, o, r: tf.clip_by_value(
            s - config.share_learning_rate * g * (r - o), 0.0, 1.0
        ),
        shares,
        gradients,
        own,
        received,
    )
    return i + 1, shares, loss

  def one_pass(number, shares, losses):
    batches = episodes.minibatches(
        tf.size(used.y),
        config.batch_size or None,
        tf.random.experimental.stateless_fold_in(passes_seed, number),
    )
    _, shares, loss = tf.while_loop(
        lambda i, *_: i < tf.shape(batches.indices)[0],
        lambda i, shares, loss: step(i, shares, loss, batches),
        (tf.constant(0), shares, tf.constant(0.0)),
    )
    return number + 1, shares, tf.concat([losses[1:], [loss]], 0)

  def goes_on(number, shares, losses):
    del shares
    settles = (number > _WINDOW) & (tf.math.reduce_std(losses) < config.settled)
    return tf.where(
        is_first, (number < config.max_passes) & ~settles, number < 1
    )

  _, shares, _ = tf.while_loop(
      goes_on, one_pass, (tf.constant(0), shares, tf.zeros([_WINDOW]))
  )
  return shares


def fed_ala(
    model: model_lib.Model, config: FedAlaConfig, num_classes: int
) -> method.Method:
  """FedALA; a client's memory is `OrderedDict(layers, shares, rounds)`.

  `layers` are the last layers of the model that it trained last, `shares` their
  shares, at first 1 (the server's model), and `rounds` an int32 scalar, the
  rounds that it has taken part in. A known client learns its shares anew before
  it is tested, as it does before it trains.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  mixed_parts = personal_layers.parameters(
      model, config.mixed_layers, 'mixed_layers'
  )

  def memory_of(weights, shares, rounds):
    _, layers = personal_layers.split(weights, mixed_parts)
    return collections.OrderedDict(layers=layers, shares=shares, rounds=rounds)

  def initial_memory(seed):
    weights = classifier.initialize(seed)
    _, layers = personal_layers.split(weights, mixed_parts)
    ones = tf.nest.map_structure(tf.ones_like, layers)
    return memory_of(weights, ones, tf.constant(0))

  def parts_of(weights, kept):
    """Returns lower layers, and the last ones, the client's and the server's.

    In its first round a client has no model but the one that it received.
    """
    lower, received = personal_layers.split(weights, mixed_parts)
    own = tf.nest.map_structure(
        lambda mine, theirs: tf.where(kept['rounds'] > 0, mine, theirs),
        kept['layers'],
        received,
    )
    return lower, own, received

  def mixture(weights, kept, shares):
    lower, own, received = parts_of(weights, kept)
    return personal_layers.merge(lower, mix(own, received, shares))

  def new_shares(weights, kept, examples, seed):
    lower, own, received = parts_of(weights, kept)
    return learn_shares(
        lambda layers, batch: classifier.loss(
            personal_layers.merge(lower, layers), batch
        ),
        config,
        own,
        received,
        kept['shares'],
        examples,
        seed,
        is_first=tf.equal(kept['rounds'], 1),
    )

  def client_update(weights, client):
    kept = client.memory.value
    shares = new_shares(weights, kept, client.examples, client.seed)
    trained, report = config.train(
        classifier.loss,
        mixture(weights, kept, shares),
        client.examples,
        client.seed,
    )
    return config.output(
        weights,
        trained,
        report,
        client.examples,
        memory=memory_of(trained, shares, kept['rounds'] + 1),
    )

  def known_client():
    def start(weights, memory):
      return mixture(weights, memory.value, memory.value['shares'])

    def adapt(weights, memory, examples, seed):
      shares = new_shares(weights, memory.value, examples, seed)
      return mixture(weights, memory.value, shares)

    use = classifiers.build_client_personalizer(classifier, start)
    return use._replace(adapt=adapt)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=initial_memory,
      # A client uploads what it trained from its own mixture.
      memory_reaches={'update': 'itself', 'loss': 'itself'},
      known_client=known_client,
      new_client=lambda: classifiers.build_client_personalizer(classifier),
  )
