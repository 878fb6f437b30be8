"""Fine-tuning via one-shot FL: which clients of a group are averaged."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta import models
from tff_meta import registry
from tff_meta.baselines import fed_avg
from tff_meta.baselines import one_shot_ft
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import groups as group_evaluation
from tff_meta.learners import classifiers
from tff_meta.learners import few_round

CONFIG = one_shot_ft.OneShotFtConfig(
    learning_rate=9.0,
    momentum=0.5,
    epochs=2,
    weight_decay=0.05,
    rounds=3,
    deployment_learning_rate=0.4,
    deployment_batch_size=4,
    kept_clients=2,
    held_out_share=0.4,
)
# Of 9, 11, 6, 2 and 8 examples 3, 4, 2, none and 3 are held out.
CLIENTS = (
    *oracle.CLIENTS,
    oracle.make_client((1, 1, 0), salt=4),
    oracle.make_client((3, 2, 3), salt=6),
)
SEED = tf.constant([3, 4])
WAY = 3


def trained_weights():
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  return model.initialize(tf.constant([1, 2]))


def stack(clients):
  """The support set with a client axis, garbage in between, and salts."""
  size = 1 + max(len(c.y) for c in clients)
  x = np.full((len(clients), size, 2), 7.0, np.float32)
  y = np.zeros((len(clients), size), np.int32)
  mask = np.zeros((len(clients), size), np.float32)
  for k, client in enumerate(clients):
    rows = np.arange(len(client.y)) + (np.arange(len(client.y)) > 1)
    x[k, rows], y[k, rows], mask[k, rows] = client.x, client.y, 1
  salts = tf.constant([c.salt for c in clients])
  return episodes.Examples(*map(tf.constant, (x, y, mask))), salts


@functools.cache
def deployed(config):
  """`(support, salts) -> adapted`, compiled."""
  use = one_shot_ft.one_shot_ft(oracle.build_model(), config, WAY).group()
  return tf.function(
      lambda support, salts: use.adapt(trained_weights(), support, salts, SEED),
      autograph=False,
  )


def fine_tune(config, clients):
  """The group's model of fine-tuning via FedAvg, with the same settings."""
  fields = {f.name for f in dataclasses.fields(fed_avg.FedAvgConfig)}
  shared = {
      name: value
      for name, value in dataclasses.asdict(config).items()
      if name in fields
  }
  config = fed_avg.FedAvgConfig(**shared)
  use = fed_avg.fed_avg_ft(oracle.build_model(), config, WAY).group()
  adapted, _ = use.adapt(trained_weights(), *stack(clients), SEED)
  return adapted


def assert_equal(actual, expected):
  tf.nest.map_structure(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected):
  np.testing.assert_allclose(
      oracle.to_vector(actual), oracle.to_vector(expected), **oracle.TOLERANCE
  )


def test_preparation_is_federated_averaging():
  config = dataclasses.replace(
      CONFIG, learning_rate=0.3, batch_size=4, uniform=True
  )
  shared = dataclasses.asdict(config)
  del shared['kept_clients'], shared['held_out_share']
  one_shot, averaging = (
      personal.run(
          registry.build(
              name,
              oracle.build_model(),
              own,
              num_classes=oracle.NUM_CLASSES,
              seed=oracle.RUN_SEED,
          ),
          (CLIENTS[:2], CLIENTS[:3]),
      )
      for name, own in (
          ('one_shot_ft', config),
          ('fed_avg', fed_avg.FedAvgConfig(**shared)),
      )
  )
  assert_equal(one_shot.weights, averaging.weights)
  assert_equal(one_shot.metrics, averaging.metrics)
  moved = oracle.to_vector(one_shot.weights[2]) - oracle.to_vector(
      one_shot.weights[0]
  )
  assert np.abs(moved).max() > 0.1


def naive_split(client, share, rounds_seed):
  """What it trains on and what it holds out, as pairs."""
  seed = oracle.fold_in(oracle.fold_in(rounds_seed, -1), client.salt)
  parts = episodes.split_support_query(client.examples(), share, seed)
  held_out, train = (
      oracle.Client(part.x.numpy(), part.y.numpy(), client.salt).pairs()
      for part in parts
  )
  # In the order that the client has them in, as training goes by its masks.
  position = {tuple(x): i for i, (x, _) in enumerate(client.pairs())}
  train.sort(key=lambda pair: position[tuple(pair[0])])
  assert len(held_out) == int(share * len(client.y))
  return train, held_out


def naive_accuracy(w, pairs):
  """0 without examples."""
  hits = 0
  for x, label in pairs:
    losses = [oracle.cross_entropy(w, [(x, c)], WAY) for c in range(WAY)]
    hits += int(np.argmin(losses)) == label
  return hits / len(pairs) if pairs else 0.0


def naive_best(scores, ranks, num_kept):
  """The best, one after the other; of equals that of the smallest rank."""
  kept = []
  for _ in range(num_kept):
    best = None
    for k, score in enumerate(scores):
      if k not in kept and (
          best is None
          or score > scores[best]
          or (score == scores[best] and ranks[k] < ranks[best])
      ):
        best = k
    kept.append(best)
  return sorted(kept)


def naive_ranks(rounds_seed):
  """A client's own number does not depend on who else is there."""
  seeds = [
      oracle.fold_in(oracle.fold_in(rounds_seed, -2), c.salt) for c in CLIENTS
  ]
  return [float(tf.random.stateless_uniform([], seed)) for seed in seeds]


def naive_group(config, start):
  """The group's weights, and who was averaged in each of its rounds."""
  _, rounds_seed = tf.unstack(tf.random.experimental.stateless_split(SEED))
  parts = [naive_split(c, config.held_out_share, rounds_seed) for c in CLIENTS]
  w, history = oracle.to_vector(start), []
  for round_num in range(config.rounds):
    models_, scores = [], []
    for client, (train, held_out) in zip(CLIENTS, parts, strict=True):
      seed = oracle.fold_in(oracle.fold_in(rounds_seed, round_num), client.salt)
      mine, _, _ = oracle.descend(
          lambda v, pairs: oracle.cross_entropy(v, pairs, WAY),
          w,
          oracle.batches_of(
              train, config.deployment_batch_size, seed, config.epochs
          ),
          personal.naive_optimizer(
              'sgd', config.deployment_learning_rate, config.momentum
          ),
          config.weight_decay,
      )
      models_.append(mine)
      scores.append(naive_accuracy(mine, held_out))
    kept = naive_best(scores, naive_ranks(rounds_seed), config.kept_clients)
    sizes = [1 if config.uniform else len(parts[k][0]) for k in kept]
    w = oracle.mean([models_[k] for k in kept], sizes)
    history.append((kept, scores))
  return w, history


@pytest.mark.parametrize(('num_kept', 'uniform'), [(2, False), (4, True)])
def test_a_group_by_a_naive_implementation(num_kept, uniform):
  config = dataclasses.replace(CONFIG, uniform=uniform, kept_clients=num_kept)
  start = deployed(dataclasses.replace(CONFIG, epochs=0))(*stack(CLIENTS))
  np.testing.assert_allclose(
      oracle.to_vector(start)[:9],
      oracle.to_vector(trained_weights())[:9],
      rtol=1e-6,  # Float32: it is the mean of equal ones.
  )

  w, history = naive_group(config, start)
  adapted = deployed(config)(*stack(CLIENTS))

  np.testing.assert_allclose(oracle.to_vector(adapted), w, **oracle.TOLERANCE)
  # Others than the first ones, too; a score decided, and a tie as well.
  assert any(kept != list(range(num_kept)) for kept, _ in history)
  assert any(len(set(scores)) < len(scores) for _, scores in history)


def test_the_best_are_kept_and_of_equals_the_smallest_ranks():
  rng = np.random.default_rng(0)
  for _ in range(20):
    scores = rng.integers(-1, 3, 6).astype(np.float32) / 3
    ranks = rng.permutation(6).astype(np.float32)
    for num_kept in range(1, 7):
      kept = one_shot_ft.keep_best(scores, ranks, num_kept).numpy()
      expected = naive_best(scores, ranks, num_kept)
      assert np.flatnonzero(kept).tolist() == expected
      assert set(kept) <= {0.0, 1.0}


def test_scores_are_accuracies_on_what_is_held_out():
  """0 with nothing held out; -1 for a client that does not count."""
  classifier = classifiers.LinearClassifier(oracle.build_model(), WAY)
  weights = [classifier.initialize(tf.constant([1, s])) for s in range(5)]
  held_out, _ = stack(CLIENTS)
  nobody = tf.constant([1.0, 1, 1, 0, 1])[:, tf.newaxis]
  held_out = held_out._replace(mask=held_out.mask * nobody)
  uploads = few_round.ClientUpload(
      tf.nest.map_structure(lambda *w: tf.stack(w), *weights),
      (),
      tf.constant([9.0, 0, 6, 2, 8]),
      (),
  )

  scores = one_shot_ft.score(classifier, uploads, held_out).numpy()

  expected = [
      naive_accuracy(oracle.to_vector(w), c.pairs())
      for w, c in zip(weights, CLIENTS, strict=True)
  ]
  expected[1], expected[3] = -1, 0
  np.testing.assert_allclose(scores, expected, rtol=1e-6)
  assert len({expected[0], expected[2], expected[4]}) == 3


@pytest.mark.parametrize('network', ['conv4', 'lenet'])
def test_convolutions_score_a_client_that_holds_out_nothing(network):
  shape = (16, 16, 1)
  classifier = classifiers.LinearClassifier(models.build(network, shape, 2), 2)
  weights = classifier.initialize(tf.constant([1, 2]))
  uploads = few_round.ClientUpload(
      tf.nest.map_structure(lambda w: tf.stack([w, w]), weights),
      (),
      tf.ones([2]),
      (),
  )
  x = tf.random.stateless_normal([2, 3, *shape], (5, 6))
  y = classifier.predict(weights, (), episodes.Examples(x[1], (), tf.ones(3)))
  held_out = episodes.Examples(
      x, tf.stack([y, y]), tf.constant([[0.0] * 3, [1.0] * 3])
  )
  scores = one_shot_ft.score(classifier, uploads, held_out)
  assert scores.numpy().tolist() == [0, 1]


def test_held_out_shares():
  """Rounded down, of the examples alone; other clients draw otherwise."""
  same = [CLIENTS[1]._replace(salt=salt) for salt in (2, 3)]
  support, salts = stack((*CLIENTS, *same))
  train, held_out = one_shot_ft.hold_out(support, 0.4, salts, SEED)
  assert_equal(train.mask + held_out.mask, support.mask)
  counts = tf.reduce_sum(held_out.mask, 1).numpy().tolist()
  assert counts == [3, 4, 2, 0, 3, 4, 4]
  assert set(held_out.mask.numpy().ravel()) == {0, 1}
  for part in (train, held_out):
    assert_equal((part.x, part.y), (support.x, support.y))
  assert_equal(held_out.mask[1], held_out.mask[5])  # Salt 2 both.
  assert not np.array_equal(held_out.mask[5], held_out.mask[6])


def with_held_out(change):
  """A group in which `change` was done to the examples held out."""
  support, salts = stack(CLIENTS)
  _, rounds_seed = tf.unstack(tf.random.experimental.stateless_split(SEED))
  _, held_out = one_shot_ft.hold_out(
      support, CONFIG.held_out_share, salts, rounds_seed
  )
  x, y = change(support.x, support.y)
  chosen = held_out.mask > 0
  return (
      support._replace(
          x=tf.where(chosen[:, :, tf.newaxis], x, support.x),
          y=tf.where(chosen, y, support.y),
      ),
      salts,
  )


def test_what_is_held_out_is_never_trained_on():
  """Where all are kept, whatever it is; where some are, it decides."""
  changed = with_held_out(lambda x, y: (5 - x, (y + 1) % WAY))
  for num_kept, same in ((5, True), (2, False)):
    adapt = deployed(dataclasses.replace(CONFIG, kept_clients=num_kept))
    before, after = (
        oracle.to_vector(adapt(*group)) for group in (stack(CLIENTS), changed)
    )
    assert np.array_equal(before, after) == same


def test_queries_do_not_matter_to_the_group_s_model():
  """Neither their number, nor labels: the last six are asked as before."""
  support, salts = stack(CLIENTS)
  query = oracle.make_client((4, 5, 6), salt=9)
  use = one_shot_ft.one_shot_ft(oracle.build_model(), CONFIG, WAY).group()
  ask = group_evaluation.build_group_test(use)

  def answers(x, y):
    group = groups_lib.Group(
        *support[:3],
        query_x=tf.constant(x),
        query_y=tf.constant(y),
        query_mask=tf.ones(len(y)),
        query_clients=tf.zeros(len(y), tf.int32),
        salts=salts,
        classes=(),
    )
    (labels,), _ = ask(
        trained_weights(),
        tf.nest.map_structure(lambda leaf: leaf[tf.newaxis], group),
        SEED[tf.newaxis],
    )
    return labels.numpy().tolist()

  whole = answers(query.x, query.y)
  assert answers(query.x[-6:], (query.y[-6:] + 1) % WAY) == whole[-6:]
  adapted = oracle.to_vector(deployed(CONFIG)(support, salts))
  assert whole == [
      np.argmin(
          [oracle.cross_entropy(adapted, [(x, c)], WAY) for c in range(3)]
      )
      for x, _ in query.pairs()
  ]


def test_with_nothing_held_out_random_ones_are_averaged():
  config = dataclasses.replace(CONFIG, kept_clients=3, held_out_share=0.0)
  adapted = deployed(config)(*stack(CLIENTS))
  _, rounds_seed = tf.unstack(tf.random.experimental.stateless_split(SEED))
  kept = naive_best([0] * 5, naive_ranks(rounds_seed), 3)
  assert_close(adapted, fine_tune(config, [CLIENTS[k] for k in kept]))


def test_keeping_all_is_fine_tuning_on_what_is_not_held_out():
  config = dataclasses.replace(CONFIG, kept_clients=5)
  _, rounds_seed = tf.unstack(tf.random.experimental.stateless_split(SEED))
  kept = []
  for client in CLIENTS:
    train, _ = naive_split(client, config.held_out_share, rounds_seed)
    x, y = zip(*train, strict=True)
    kept.append(
        oracle.Client(np.float32(x), np.array(y, np.int32), client.salt)
    )
  assert_close(deployed(config)(*stack(CLIENTS)), fine_tune(config, kept))


def test_a_client_that_does_not_count_takes_nobody_s_place():
  """The first one of a group, empty or not finite; two of three are kept."""
  expected = deployed(CONFIG)(*stack(CLIENTS[1:3]))
  (first, *others), salt = CLIENTS[:3], CLIENTS[0].salt
  for x, y in (
      (first.x * np.nan, first.y),
      (first.x[:0], first.y[:0]),
  ):
    group = stack((oracle.Client(x, y, salt), *others))
    assert_close(deployed(CONFIG)(*group), expected)


def test_a_group_of_clients_without_examples_stays_where_it_starts():
  empty = [c._replace(x=c.x[:0], y=c.y[:0]) for c in CLIENTS]
  adapted = deployed(CONFIG)(*stack(empty))
  start = deployed(dataclasses.replace(CONFIG, epochs=0))(*stack(CLIENTS))
  assert_close(adapted, start)


def test_a_group_of_fewer_clients_than_are_kept_is_refused():
  config = dataclasses.replace(CONFIG, kept_clients=4)
  with pytest.raises(ValueError, match='at least 4 clients.*found 3'):
    deployed(config)(*stack(CLIENTS[:3]))


def test_presets():
  """10 clients in three rounds; all else is FedAvg's."""
  for name in ('PAPER', 'RELEASE'):
    preset = getattr(one_shot_ft, name)
    assert (preset.kept_clients, preset.rounds) == (10, 3)
    averaging = dataclasses.asdict(getattr(fed_avg, name))
    for field, value in dataclasses.asdict(preset).items():
      assert averaging.get(field, value) == value, field
  assert one_shot_ft.DEMO.kept_clients == 3  # Of a group of five.


@pytest.mark.parametrize(
    'change, message',
    [
        ({'kept_clients': 0}, '`kept_clients` of at least 1, found 0'),
        ({'kept_clients': 2.5}, '`kept_clients` as a whole number.*found 2.5'),
        ({'held_out_share': 1.0}, '`held_out_share` below 1,.*found 1.0'),
        ({'held_out_share': -0.1}, '`held_out_share` as .*found -0.1'),
        ({'rounds': 0}, '`rounds` of at least 1, found 0'),
        ({'momentum': 1.0}, '`momentum` .*found 1.0'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
