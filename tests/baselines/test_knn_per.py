"""kNN-Per: nearest neighbours at the client, beside the server's model."""

import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import composition
from tff_meta import registry
from tff_meta.baselines import knn_per

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS)
CONFIG = knn_per.KnnPerConfig(
    learning_rate=0.2,
    momentum=0.5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    neighbours=3,
    scale=0.2,
    hold_out_every=3,
)
SHARES = np.arange(11) / 10


def build_client(config):
  model, num_classes = oracle.build_model(), oracle.NUM_CLASSES
  return knn_per.knn_per(model, config, num_classes).known_client()


def initial_weights(seed):
  return oracle.build_model().with_head(oracle.NUM_CLASSES).initialize(seed)


def kept_and_held_out(pairs, every):
  held_out = pairs[every - 1 :: every]
  return [p for i, p in enumerate(pairs) if (i + 1) % every], held_out


@pytest.mark.parametrize(
    'uniform, build',
    [(False, registry.build), (True, plain_process.PlainProcess)],
)
def test_two_rounds_are_federated_averaging_of_what_is_not_held_out(
    uniform, build
):
  config = dataclasses.replace(CONFIG, uniform=uniform)
  process = build(
      'knn_per',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  result = personal.run(process, COHORTS)
  w = oracle.to_vector(
      initial_weights(composition.initial_seed(oracle.RUN_SEED))
  )
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes, loss_sum, count = [], [], 0.0, 0
    for client in cohort:
      kept, _ = kept_and_held_out(client.pairs(), config.hold_out_every)
      batches = oracle.batches_of(
          kept,
          config.batch_size,
          personal.client_seed(round_num, client),
          config.epochs,
      )
      mine, client_loss, client_count = oracle.descend(
          oracle.cross_entropy,
          w,
          batches,
          personal.naive_optimizer(
              'sgd', config.learning_rate, config.momentum
          ),
          config.weight_decay,
      )
      trained.append(mine)
      sizes.append(1 if uniform else len(client.y))
      loss_sum, count = loss_sum + client_loss, count + client_count
    w = oracle.mean(trained, sizes)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **oracle.TOLERANCE
    )
    metrics = result.metrics[round_num]
    np.testing.assert_allclose(metrics['loss'], loss_sum / count, rtol=1e-4)
    assert metrics['num_examples'] == count


def naive_probabilities(config, w, stored, x):
  """p_knn and the model's softmax, of one example."""
  e = oracle.embed(w, x)
  distances = [np.sum((e - oracle.embed(w, other)) ** 2) for other, _ in stored]
  nearest = np.argsort(distances)[: config.neighbours]
  near = np.zeros(oracle.NUM_CLASSES)
  for j in nearest:
    near[stored[j][1]] += np.exp(-distances[j] / (len(e) * config.scale))
  kernel = w[9:].reshape(4, -1)[:3]
  bias = w[9:].reshape(4, -1)[3]
  own = np.exp(e @ kernel + bias)
  return near / near.sum(), own / own.sum()


def naive_labels(config, w, stored, pairs, share):
  labels = []
  for x, _ in pairs:
    near, own = naive_probabilities(config, w, stored, x)
    labels.append(int(np.argmax(share * near + (1 - share) * own)))
  return labels


def naive_share(config, w, pairs):
  """The smallest share with the most hits on what is held out."""
  kept, held_out = kept_and_held_out(pairs, config.hold_out_every)
  truth = [label for _, label in held_out]
  hits = [
      np.sum(np.equal(naive_labels(config, w, kept, held_out, share), truth))
      for share in SHARES
  ]
  return SHARES[int(np.argmax(hits))]


@pytest.mark.parametrize('client', CLIENTS, ids=lambda c: str(c.salt))
@pytest.mark.parametrize('neighbours', [3, 50])
def test_a_client_by_a_naive_implementation(client, neighbours):
  config = dataclasses.replace(CONFIG, neighbours=neighbours)
  weights = initial_weights(tf.constant([1, 2]))
  w, query = oracle.to_vector(weights), oracle.make_client((6, 7, 8), salt=9)

  use = build_client(config)
  adapted = use.adapt(weights, (), client.examples(), tf.constant([5, 6]))

  share = naive_share(config, w, client.pairs())
  np.testing.assert_allclose(adapted.share, share)
  np.testing.assert_array_equal(adapted.labels, client.y)
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == naive_labels(
      config, w, client.pairs(), query.pairs(), share
  )
  if client is not CLIENTS[2]:  # All of it has the server's answer.
    assert share > 0 and predicted != personal.predict(w, query.pairs())


def test_the_share_is_what_a_client_needs():
  """None where the model is right; enough of it where that is wrong."""
  weights = initial_weights(tf.constant([1, 2]))
  use, client = build_client(CONFIG), CLIENTS[2]  # All of class 2.
  seed = tf.constant([5, 6])

  def of_class(label):
    bias = tf.one_hot(label, oracle.NUM_CLASSES, on_value=20.0)
    head = weights['head'] | {'bias': bias}
    changed = weights.copy()
    changed['head'] = head
    return changed

  right = use.adapt(of_class(2), (), client.examples(), seed)
  wrong = use.adapt(of_class(1), (), client.examples(), seed)
  assert float(right.share) == 0.0
  # With a half each both classes have as much, but for rounding.
  assert 0.45 < wrong.share < 0.65
  query = client.examples()
  assert use.predict(wrong, query).numpy().tolist() == [2] * 6


def test_nobody_is_its_own_neighbour_in_the_choice():
  """The stored ones are of class 0, those held out of 1: no share has a hit."""
  use = build_client(dataclasses.replace(CONFIG, neighbours=1))
  x = np.float32([[0.0, 0.5], [0.5, 0.0], [0.5, 0.5]] * 2)
  client = oracle.Client(x, np.int32([0, 0, 1] * 2), salt=1)
  weights = initial_weights(tf.constant([1, 2]))
  weights['head']['bias'] = tf.one_hot(2, oracle.NUM_CLASSES, on_value=20.0)
  adapted = use.adapt(weights, (), client.examples(), tf.constant([5, 6]))
  assert float(adapted.share) == 0.0


@pytest.mark.parametrize(
    'neighbours, expected',
    [
        (2, [1, np.exp(-1)]),
        (3, [1, np.exp(-1) + np.exp(-1.44)]),
        (9, [1, np.exp(-1) + np.exp(-1.44)]),
    ],
)
def test_neighbours_by_hand(neighbours, expected):
  """Squared distances 0, 1 and 1.44, over 2 dimensions times 1/2."""
  near = knn_per._neighbours(
      dataclasses.replace(CONFIG, neighbours=neighbours, scale=0.5),
      tf.constant([[0.0, 1.2], [0.0, 0.0], [1.0, 0.0]]),
      tf.constant([1, 0, 1]),
      tf.zeros([1, 2]),
      2,
  )
  np.testing.assert_allclose(
      near, [np.divide(expected, np.sum(expected))], rtol=1e-5
  )


def test_too_few_examples():
  """Nothing to choose with: half; nothing at all: the server's model."""
  weights = initial_weights(tf.constant([1, 2]))
  use, query = build_client(CONFIG), oracle.make_client((6, 7, 8), salt=9)
  two = oracle.Client(CLIENTS[0].x[:2], CLIENTS[0].y[:2], salt=1)
  adapted = use.adapt(weights, (), two.examples(), tf.constant([5, 6]))
  assert float(adapted.share) == 0.5
  server = personal.predict(oracle.to_vector(weights), query.pairs())
  nobody = personal.EMPTY_CLIENT.examples()
  for model in (
      use.start(weights, ()),
      use.adapt(weights, (), nobody, tf.constant([5, 6])),
  ):
    assert use.predict(model, query.examples()).numpy().tolist() == server


def test_padding_is_not_stored():
  client = CLIENTS[0]
  padded = oracle.Client(
      np.insert(client.x, 1, 7.0, axis=0), np.insert(client.y, 1, 3), salt=1
  ).examples()
  mask = tf.constant(np.insert(np.ones(len(client.y), np.float32), 1, 0.0))
  use, weights = build_client(CONFIG), initial_weights(tf.constant([1, 2]))
  seed = tf.constant([5, 6])
  tf.nest.map_structure(
      np.testing.assert_array_equal,
      use.adapt(weights, (), padded._replace(mask=mask), seed),
      use.adapt(weights, (), client.examples(), seed),
  )


@pytest.mark.parametrize(
    'change, message',
    [
        ({'neighbours': 0}, '`neighbours` of at least 1, found 0'),
        ({'scale': 0.0}, '`scale` above 0, found 0.0'),
        ({'hold_out_every': 1}, '`hold_out_every` of at least 2, found 1'),
        ({'momentum': 1.0}, '`momentum` .*found 1.0'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
