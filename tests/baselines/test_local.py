"""Local training in its process and as it is used."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import plain_process
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta import registry
from tff_meta.baselines import local
from tff_meta.client_works import client_work

CLIENTS = oracle.CLIENTS
CONFIG = dataclasses.replace(
    local.PAPER, learning_rate=0.2, weight_decay=0.1, epochs=2, batch_size=4
)


@functools.cache
def build(config):
  return registry.build(
      'local',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def sgd(gradient, state):
  state['v'] = CONFIG.momentum * state.get('v', 0.0) + gradient
  return CONFIG.learning_rate * state['v']


def naive_training(w, client, seed):
  return oracle.descend(
      oracle.cross_entropy,
      w,
      oracle.batches_of(client.pairs(), 4, seed, 2),
      sgd,
      0.1,
  )


def test_every_client_trains_on_alone():
  """Client 1 twice, from where it was; the server's weights stay."""
  process = build(CONFIG)
  state, stored, expected = process.initialize(), {}, {}
  initial = oracle.to_vector(process.get_model_weights(state).trainable)
  for round_num, cohort in enumerate(((0, 1), (1, 2))):
    data = [
        CLIENTS[k].data()
        | {
            'memory': client_work.memory_dataset(
                process.initial_memory, stored.get(k)
            )
        }
        for k in cohort
    ]
    output, kept = process.next_with_memory(state, data)
    state, loss_sum, count = output.state, 0.0, 0
    stored |= {k: m.value for k, m in zip(cohort, kept, strict=True)}
    for k in cohort:
      round_seed = oracle.fold_in((0, oracle.RUN_SEED), round_num)
      expected[k], client_loss, client_count = naive_training(
          expected.get(k, initial),
          CLIENTS[k],
          oracle.fold_in(round_seed, CLIENTS[k].salt),
      )
      loss_sum, count = loss_sum + client_loss, count + client_count
    for k, w in expected.items():
      np.testing.assert_allclose(
          oracle.to_vector(stored[k]), w, rtol=1e-4, atol=1e-5
      )
    np.testing.assert_array_equal(
        oracle.to_vector(process.get_model_weights(state).trainable), initial
    )
    train = output.metrics['client_work']['train']
    np.testing.assert_allclose(train['loss'], loss_sum / count, rtol=1e-4)
    assert train['num_examples'] == count
  assert np.abs(expected[0] - initial).max() > 0.1


EPISODES = dataclasses.replace(
    CONFIG, training='episodes', episodes=3, shots=2, queries=2
)


def episode_of(config, pairs):
  """Support and query of all examples in this order."""
  x, y = zip(*pairs, strict=True)
  client = oracle.Client(np.array(x), np.array(y, np.int32), 0)
  parts = episodes.n_way_k_shot(
      client.examples(),
      oracle.NUM_CLASSES,
      tf.constant([0, 0]),
      ways=0,
      shots=config.shots,
      queries=config.queries,
      max_examples=config.max_whole_examples,
  )
  return [oracle.Client(p.x.numpy(), p.y.numpy(), 0).pairs() for p in parts]


def naive_episodes(config, w, client, seed):
  """Steps on episodes, each of another order of the examples."""

  def loss(w, episode):
    support, query = episode
    return oracle.distance_loss(w, query, oracle.class_means(w, support))

  drawn = [
      episode_of(config, pairs)
      for pairs in oracle.batches_of(client.pairs(), 0, seed, config.episodes)
  ]
  return oracle.descend(loss, w, drawn, sgd, config.weight_decay)[0]


@pytest.mark.parametrize(
    'change',
    [
        {'episodes': 2, 'shots': 1},
        {'queries': 0, 'max_whole_examples': 6},
    ],
    ids=str,
)
def test_a_client_trains_on_episodes(change):
  """Of two classes; then it is tested with means of all its examples."""
  config = dataclasses.replace(EPISODES, **change)
  client = CLIENTS[0]
  process = plain_process.PlainProcess(
      'local',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  state = process.initialize()
  weights = process.get_model_weights(state).trainable
  memory = client_work.memory_dataset(process.initial_memory, None)
  data = client.data() | {'memory': memory}
  _, (kept,) = process.next_with_memory(state, [data])
  seed = oracle.fold_in(oracle.fold_in((0, oracle.RUN_SEED), 0), client.salt)
  initial = oracle.to_vector(weights)
  expected = naive_episodes(config, initial, client, seed)
  assert len(initial) == 9 and np.abs(expected - initial).max() > 0.01
  np.testing.assert_allclose(
      oracle.to_vector(kept.value), expected, rtol=1e-4, atol=1e-5
  )

  method = local.local(oracle.build_model(), config, oracle.NUM_CLASSES)
  known, new = method.known_client(), method.new_client()
  assert known.start is None and new.start is None
  query = oracle.make_client((6, 7, 8), salt=9)
  means = oracle.class_means(expected, client.pairs())
  answers = []
  for x in query.x:
    e = oracle.embed(expected, x)
    answers.append(min(means, key=lambda c: np.sum((e - means[c]) ** 2)))
  assert len(set(answers)) == 2
  for use, memory in ((known, kept), (new, ())):
    weights, memory = tf.nest.map_structure(
        tf.convert_to_tensor, (weights, memory)
    )
    adapted = use.adapt(weights, memory, client.examples(), seed)
    found = use.predict(adapted, query.examples()).numpy().tolist()
    assert found == answers


@pytest.mark.parametrize(
    'labels', [(0, 0, 0, 0), (0, 0, 1, 1), (0, 0, 0, 1, 1)], ids=str
)
def test_a_client_without_an_episode_did_not_train(labels):
  """Of one class, or without a query example, which what is missing tells."""
  sizes = np.bincount(labels, minlength=oracle.NUM_CLASSES)
  method = local.local(oracle.build_model(), EPISODES, oracle.NUM_CLASSES)
  missing = method.what_is_missing(sizes)
  assert (missing is None) == (len(labels) == 5)
  x = np.arange(2 * len(labels), dtype=np.float32).reshape(-1, 2)
  client = oracle.Client(x, np.array(labels, np.int32), 3)
  process = build(EPISODES)
  memory = client_work.memory_dataset(process.initial_memory, None)
  data = client.data() | {'memory': memory}
  output = process.next(process.initialize(), [data])
  train = output.metrics['client_work']['train']
  assert train['num_trained_clients'] == (missing is None)
  assert np.isnan(train['loss']) == (missing is not None)


def test_a_known_client_without_episodes_has_the_initial_network():
  weights = oracle.build_model().initialize(tf.constant([1, 2]))
  other = oracle.build_model().initialize(tf.constant([3, 4]))
  known = local.local(
      oracle.build_model(), EPISODES, oracle.NUM_CLASSES
  ).known_client()
  for present, expected in ((True, other), (False, weights)):
    memory = client_work.ClientMemory(tf.constant(present), other)
    examples = CLIENTS[0].examples()
    body, _ = known.adapt(weights, memory, examples, tf.constant([5, 6]))
    tf.nest.map_structure(np.testing.assert_array_equal, body, expected['body'])


def models():
  initialize = oracle.build_model().with_head(4).initialize
  return initialize(tf.constant([1, 2])), initialize(tf.constant([3, 4]))


def assert_predicts(personalizer, adapted, w):
  query = oracle.make_client((6, 7, 8), salt=9)
  kernel, bias = w[9:-4].reshape(3, 4), w[-4:]
  expected = [
      int(np.argmax(oracle.embed(w, x) @ kernel + bias)) for x in query.x
  ]
  assert personalizer.predict(adapted, query.examples()).numpy().tolist() == (
      expected
  )


@pytest.mark.parametrize('sampled', [True, False])
def test_a_known_client_uses_its_own_model(sampled):
  initial, own = models()
  memory = client_work.ClientMemory(tf.constant(sampled), own)
  known = local.local(oracle.build_model(), CONFIG, 4).known_client()
  expected = oracle.to_vector(own if sampled else initial)
  for adapted in (
      known.start(initial, memory),
      known.adapt(initial, memory, CLIENTS[0].examples(), tf.constant([5, 6])),
  ):
    np.testing.assert_array_equal(oracle.to_vector(adapted), expected)
    assert_predicts(known, adapted, expected)


def test_a_new_client_trains_the_initial_weights():
  initial, _ = models()
  seed = tf.constant([5, 6])
  new = local.local(oracle.build_model(), CONFIG, 4).new_client()
  np.testing.assert_array_equal(
      oracle.to_vector(new.start(initial, ())), oracle.to_vector(initial)
  )
  adapted = new.adapt(initial, (), CLIENTS[1].examples(), seed)
  expected, _, _ = naive_training(oracle.to_vector(initial), CLIENTS[1], seed)
  np.testing.assert_allclose(
      oracle.to_vector(adapted), expected, rtol=1e-4, atol=1e-5
  )
  assert_predicts(new, adapted, expected)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'optimizer': 'adam'}, "momentum.*'adam'.*found 0.5"),
        ({'epochs': -1}, '`epochs`.*found -1'),
        ({'training': 'steps'}, "`training`.*'episodes', found 'steps'"),
        ({'shots': 0}, '`shots` of at least 1, found 0'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(local.PAPER, **change)
