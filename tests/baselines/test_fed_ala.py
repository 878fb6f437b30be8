"""FedALA: shares of the server's last layers, learned before training."""

import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta import registry
from tff_meta.baselines import fed_ala

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS, CLIENTS)
LOCAL = dict(learning_rate=0.2, momentum=0.5, epochs=2, batch_size=4)
CONFIG = fed_ala.FedAlaConfig(
    share_learning_rate=2.0, settled=0.05, max_passes=14, **LOCAL
)


def run(
    config,
    cohorts=COHORTS,
    name='fed_ala',
    build=plain_process.PlainProcess,
):
  process = build(
      name,
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  return personal.run(process, cohorts)


def shares_of_a_line(slope, is_first, **changes):
  """Of loss = slope * weight, own weight 0, the server's 2, from a share of 1.

  There are four minibatches of one example each: 80 % of five.
  """
  config = dataclasses.replace(
      CONFIG, **dict(batch_size=1, share_learning_rate=1.0) | changes
  )
  client = oracle.make_client((5, 0, 0), salt=1)
  return float(
      fed_ala.learn_shares(
          lambda weight, batch: slope * weight * tf.reduce_sum(batch.mask),
          config,
          tf.constant(0.0),
          tf.constant(2.0),
          tf.constant(1.0),
          client.examples(),
          tf.constant([1, 2]),
          tf.constant(is_first),
      )
  )


def test_shares_by_hand():
  """A step takes `eta * slope * 2` off; shares stay in [0, 1]."""
  assert shares_of_a_line(-0.1, False) == 1  # The loss wants the server's.
  assert shares_of_a_line(0.5, False) == 0
  np.testing.assert_allclose(
      [
          shares_of_a_line(0.01, False),
          shares_of_a_line(0.01, False, share_learning_rate=0.5),
          # Losses differ by 0.0016 a pass, so ten of them by 0.0046.
          shares_of_a_line(0.01, True, settled=0.005),
          shares_of_a_line(0.01, True, settled=0.004),
          shares_of_a_line(0.01, True, settled=0.004, max_passes=3),
      ],
      [1 - 0.08, 1 - 0.04, 1 - 11 * 0.08, 0, 1 - 3 * 0.08],
      atol=1e-6,
  )


def naive_shares(config, w, own, shares, client, seed, is_first):
  """As the authors' code goes about it, on one vector of the head."""
  split_seed, passes_seed = tf.random.experimental.stateless_split(seed)
  used, _ = episodes.split_support_query(
      client.examples(), config.share_fraction, split_seed
  )
  used = oracle.Client(used.x.numpy(), used.y.numpy(), client.salt).pairs()
  difference, losses = w[personal.HEAD] - own, []
  while True:
    batches = oracle.batches_of(
        used, config.batch_size, oracle.fold_in(passes_seed, len(losses))
    )
    for batch in batches:
      mixed = np.append(w[personal.BODY], own + difference * shares)
      gradient = oracle.gradient(oracle.cross_entropy, mixed, batch)
      loss = oracle.cross_entropy(mixed, batch)
      shares = shares - config.share_learning_rate * (
          gradient[personal.HEAD] * difference
      )
      shares = np.clip(shares, 0, 1)
    losses.append(loss)
    settled = len(losses) > 10 and np.std(losses[-10:]) < config.settled
    if not is_first or settled or len(losses) == config.max_passes:
      return shares, len(losses)


def test_three_rounds_by_a_naive_implementation():
  """One client is new in the second round, when the others' shares settle."""
  result, kept, passes = run(CONFIG, build=registry.build), {}, set()
  w = oracle.to_vector(result.weights[0])
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes = [], []
    for client in cohort:
      seed = personal.client_seed(round_num, client)
      start, shares, rounds = w, np.ones(16), 0
      if client.salt in kept:
        own, shares, rounds = kept[client.salt]
        shares, num = naive_shares(
            CONFIG, w, own, shares, client, seed, rounds == 1
        )
        passes.add(num)
        start = np.append(
            w[personal.BODY], own + (w[personal.HEAD] - own) * shares
        )
      mine, _, _ = personal.train(start, client.pairs(), CONFIG, seed, 2)
      kept[client.salt] = mine[personal.HEAD], shares, rounds + 1
      trained.append(mine)
      sizes.append(len(client.y))
    w = oracle.mean(trained, sizes)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, rtol=1e-4, atol=1e-5
    )
    for salt, memory in result.heads[round_num].items():
      layers, shares, rounds = kept[salt]
      assert memory['rounds'] == rounds
      np.testing.assert_allclose(
          [
              personal.head_vector(memory[part]['head'])
              for part in ('layers', 'shares')
          ],
          [layers, shares],
          rtol=1e-4,
          atol=1e-5,
      )
  assert len(passes) > 1  # Some settle before the last pass, later ones take 1.
  final = np.concatenate([shares for _, shares, _ in kept.values()])
  assert np.mean((final > 0.01) & (final < 0.99)) > 0.2


def test_the_first_round_is_fed_avgs():
  """Bit for bit, and all of them are, if the loss has no say in the shares."""
  fed_avg = dataclasses.replace(
      registry.get('fed_avg').presets['paper'], **LOCAL
  )
  cohorts = ((*CLIENTS, personal.EMPTY_CLIENT), CLIENTS)
  expected = run(fed_avg, cohorts, 'fed_avg').weights
  actual = run(CONFIG, cohorts)
  personal.assert_same(actual.weights[1], expected[1])
  assert actual.heads[0].keys() == {1, 2, 3}
  distance = oracle.to_vector(actual.weights[2]) - oracle.to_vector(expected[2])
  assert np.abs(distance).max() > 0.01
  fixed = dataclasses.replace(CONFIG, share_learning_rate=0.0)
  for mine, theirs in zip(run(fixed, cohorts).weights, expected, strict=True):
    np.testing.assert_allclose(
        oracle.to_vector(mine), oracle.to_vector(theirs), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize('rounds', [0, 1, 2])
def test_use(rounds):
  """A mixture, by the kept shares and by new ones; or the server's model."""
  method = fed_ala.fed_ala(oracle.build_model(), CONFIG, oracle.NUM_CLASSES)
  weights = method.initialize(tf.constant([1, 2]))
  memory = method.memory(tf.constant([3, 4])) | dict(rounds=tf.constant(rounds))
  memory['shares'] = tf.nest.map_structure(
      lambda s: s * (0.5 if rounds else 1.0), memory['shares']
  )
  known, client, seed = method.known_client(), CLIENTS[0], tf.constant([5, 6])
  w = oracle.to_vector(weights)
  own = personal.head_vector(memory['layers']['head']) if rounds else w[9:]
  shares, _ = naive_shares(
      CONFIG, w, own, np.full(16, 0.5), client, seed, rounds == 1
  )
  mixed, learned = (
      np.append(w[:9], own + (w[9:] - own) * s) for s in (0.5, shares)
  )
  kept, empty = personal.memory(memory), personal.EMPTY_CLIENT.examples()
  for adapted, expected in (
      (known.start(weights, kept), mixed),
      (known.adapt(weights, kept, empty, seed), mixed),
      (known.adapt(weights, kept, client.examples(), seed), learned),
  ):
    np.testing.assert_allclose(
        oracle.to_vector(adapted), expected, rtol=1e-4, atol=1e-5
    )
  assert (np.abs(learned - mixed).max() > 0.05) == bool(rounds)
  new = method.new_client()
  personal.assert_same(new.adapt(weights, (), client.examples(), seed), weights)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'share_fraction': 1.5}, '`share_fraction`.*found 1.5'),
        ({'mixed_layers': 0}, '`mixed_layers` of at least 1, found 0'),
        ({'max_passes': 0}, '`max_passes` of at least 1, found 0'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
