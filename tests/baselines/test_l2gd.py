"""L2GD: own models, a coin, and an average that pulls."""

import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import composition
from tff_meta import registry
from tff_meta.baselines import fed_avg
from tff_meta.baselines import l2gd

CLIENTS = oracle.CLIENTS
# The last client begins late, the first one misses a round.
COHORTS = (CLIENTS[:2], CLIENTS, CLIENTS[1:])
CONFIG = l2gd.L2gdConfig(
    learning_rate=0.2,
    momentum=0.5,
    weight_decay=0.1,
    epochs=2,
    batch_size=4,
    averaging_probability=0.7,
    penalty_weight=2.0,
    new_client_epochs=3,
)
# A local step is the gradient step of Algorithm 1.
GRADIENTS = dataclasses.replace(
    CONFIG, momentum=0.0, weight_decay=0.0, epochs=1, batch_size=0
)
ROUNDS = 4


def run(config, cohorts=COHORTS, build=plain_process.PlainProcess):
  process = build(
      'l2gd',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  return personal.run(process, cohorts)


def initial_vector():
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  seed = composition.initial_seed(oracle.RUN_SEED)
  return oracle.to_vector(model.initialize(seed))


def coin(config, round_num):
  """The coin of a round, from its seed: a list of 1 (averaging), then of 0."""
  seed = oracle.fold_in((3, oracle.RUN_SEED), round_num)
  steps = l2gd.draw_steps(config, seed)
  return [1] * int(steps.averaging) + [0] * int(steps.local)


def algorithm_1(config, num_rounds):
  """Yields all models after a round's tosses, one iteration at a time.

  As in the paper, by alpha and n, with an average that is taken anew in every
  averaging step.
  """
  n, p, lam = len(CLIENTS), config.averaging_probability, config.penalty_weight
  alpha = config.learning_rate * n * (1 - p)
  models = [initial_vector()] * n
  for round_num in range(num_rounds):
    for averages in coin(config, round_num):
      if averages:
        share = alpha * lam / (n * p)
        mean = sum(models) / n
        models = [(1 - share) * x + share * mean for x in models]
      else:
        models = [
            x
            - alpha
            / (n * (1 - p))
            * oracle.gradient(oracle.cross_entropy, x, client.pairs())
            for x, client in zip(models, CLIENTS, strict=True)
        ]
    yield models


def test_with_all_clients_it_is_algorithm_1():
  tosses = [coin(GRADIENTS, round_num) for round_num in range(ROUNDS)]
  assert max(sum(t) for t in tosses[1:]) > 1  # Several averaging steps,
  assert max(len(t) - sum(t) for t in tosses) > 1  # and several local ones.

  result = run(GRADIENTS, (CLIENTS,) * ROUNDS)

  for round_num, models in enumerate(algorithm_1(GRADIENTS, ROUNDS)):
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]),
        np.mean(models, axis=0),
        **oracle.TOLERANCE,
    )
    for client, x in zip(CLIENTS, models, strict=True):
      np.testing.assert_allclose(
          oracle.to_vector(result.heads[round_num][client.salt]),
          x,
          **oracle.TOLERANCE,
      )


def naive_round(config, own, average, tosses, pairs, seed):
  """What a client makes of its model; also the summed loss and its count."""
  p = config.averaging_probability
  pull = config.learning_rate * config.penalty_weight * (1 - p) / p
  loss_sum, count, num_local = 0.0, 0, 0
  for averages in tosses:
    if averages:
      own = (1 - pull) * own + pull * average
      continue
    own, seen, num_seen = oracle.descend(
        oracle.cross_entropy,
        own,
        oracle.batches_of(
            pairs,
            config.batch_size,
            oracle.fold_in(seed, num_local),
            config.epochs,
        ),
        personal.naive_optimizer('sgd', config.learning_rate, config.momentum),
        config.weight_decay,
    )
    loss_sum, count = loss_sum + seen, count + num_seen
    num_local += 1
  return own, loss_sum, count


def test_three_rounds_by_a_naive_implementation():
  """Some clients in a round, epochs of minibatches, momentum and decay."""
  result = run(CONFIG, build=registry.build)
  average = first = initial_vector()
  own = {}
  for round_num, cohort in enumerate(COHORTS):
    tosses = coin(CONFIG, round_num)
    loss_sum, count = 0.0, 0
    for client in cohort:
      own[client.salt], seen, num_seen = naive_round(
          CONFIG,
          own.get(client.salt, first),
          average,
          tosses,
          client.pairs(),
          personal.client_seed(round_num, client),
      )
      loss_sum, count = loss_sum + seen, count + num_seen
    average = np.mean([own[client.salt] for client in cohort], axis=0)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]),
        average,
        **oracle.TOLERANCE,
    )
    kept = result.heads[round_num]
    assert kept.keys() == own.keys()
    for salt, memory in kept.items():
      np.testing.assert_allclose(
          oracle.to_vector(memory), own[salt], **oracle.TOLERANCE
      )
    metrics = result.metrics[round_num]
    np.testing.assert_allclose(metrics['loss'], loss_sum / count, rtol=1e-4)
    assert metrics['num_examples'] == count


def test_without_a_penalty_a_client_trains_alone():
  """The others do not matter to it, bit for bit; with one they do."""
  for penalty, same in ((0.0, True), (2.0, False)):
    config = dataclasses.replace(CONFIG, penalty_weight=penalty)
    alone = run(config, (CLIENTS[:1],) * 2).heads[-1][1]
    beside = run(config, (CLIENTS,) * 2).heads[-1][1]
    difference = oracle.to_vector(beside) - oracle.to_vector(alone)
    assert (np.abs(difference).max() == 0) == same


def test_a_whole_pull_and_one_local_step_are_federated_averaging():
  """With p = 1 - 1 / 1024 a pull of 1 / 4 * 4092 / 1023."""
  config = dataclasses.replace(
      CONFIG,
      learning_rate=0.25,
      batch_size=0,
      averaging_probability=1 - 2.0**-10,
      penalty_weight=4092.0,
  )
  assert config.pull == 1
  assert all(coin(config, t).count(0) == 1 for t in range(len(COHORTS)))
  theirs = plain_process.PlainProcess(
      'fed_avg',
      oracle.build_model(),
      fed_avg.FedAvgConfig(
          learning_rate=0.25,
          momentum=0.5,
          weight_decay=0.1,
          epochs=2,
          batch_size=0,
          uniform=True,
      ),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  expected = personal.run(theirs, COHORTS).weights
  for mine, their in zip(run(config).weights, expected, strict=True):
    np.testing.assert_allclose(
        oracle.to_vector(mine), oracle.to_vector(their), rtol=1e-5, atol=1e-6
    )


def test_runs_of_the_coin():
  """Lengths are geometric; the frequencies' deviation is at most 0.008."""
  config = dataclasses.replace(CONFIG, averaging_probability=0.75)
  seeds = tf.random.stateless_uniform(
      [4000, 2], (1, 2), None, None, dtype=tf.int32
  )
  draw = tf.function(
      lambda seeds: tf.map_fn(
          lambda seed: l2gd.draw_steps(config, seed),
          seeds,
          fn_output_signature=l2gd.RoundSteps(tf.int32, tf.int32),
      ),
      autograph=False,
  )
  averaging, local = (lengths.numpy() for lengths in draw(seeds))
  for lengths, goes_on in ((averaging, 0.75), (local, 0.25)):
    assert lengths.min() == 1
    for k in range(1, 5):
      share = np.mean(lengths == k)
      assert abs(share - goes_on ** (k - 1) * (1 - goes_on)) < 0.03
    np.testing.assert_allclose(lengths.mean(), 1 / (1 - goes_on), rtol=0.06)
  # One run says nothing of the other: P(both are 1) = 1/4 * 3/4.
  assert abs(np.mean((averaging == 1) & (local == 1)) - 0.1875) < 0.03


def two_models():
  initialize = oracle.build_model().with_head(oracle.NUM_CLASSES).initialize
  return initialize(tf.constant([1, 2])), initialize(tf.constant([3, 4]))


@pytest.mark.parametrize('sampled', [True, False])
def test_a_known_client_uses_its_model(sampled):
  server, own = two_models()
  memory = personal.memory(own, present=sampled)
  known = l2gd.l2gd(
      oracle.build_model(), CONFIG, oracle.NUM_CLASSES
  ).known_client()
  expected = own if sampled else server
  query = oracle.make_client((6, 7, 8), salt=9)
  for adapted in (
      known.start(server, memory),
      known.adapt(server, memory, CLIENTS[0].examples(), tf.constant([5, 6])),
  ):
    personal.assert_same(adapted, expected)
    predicted = known.predict(adapted, query.examples()).numpy().tolist()
    assert predicted == personal.predict(
        oracle.to_vector(expected), query.pairs()
    )


def test_a_new_client_trains_the_servers_model():
  server, _ = two_models()
  new = l2gd.l2gd(oracle.build_model(), CONFIG, oracle.NUM_CLASSES).new_client()
  personal.assert_same(new.start(server, ()), server)
  adapted = new.adapt(server, (), CLIENTS[0].examples(), tf.constant([5, 6]))
  expected, _, _ = oracle.descend(
      oracle.cross_entropy,
      oracle.to_vector(server),
      oracle.batches_of(CLIENTS[0].pairs(), 4, (5, 6), num_epochs=3),
      personal.naive_optimizer('sgd', 0.2, 0.5),
      0.1,
  )
  np.testing.assert_allclose(
      oracle.to_vector(adapted), expected, **oracle.TOLERANCE
  )


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'penalty_weight': -1.0}, '`penalty_weight`.*found -1.0'),
        ({'averaging_probability': 0.0}, '`averaging_probability`.*found 0.0'),
        ({'averaging_probability': 1.0}, '`averaging_probability`.*found 1.0'),
        (
            {'averaging_probability': 0.2},
            r'at most 1, found 0.2 \* 2.0 \* \(1 - 0.2\) / 0.2 = 1.6',
        ),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
