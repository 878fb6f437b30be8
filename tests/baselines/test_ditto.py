"""Ditto: FedAvg, and beside it personal models that stay with the clients."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import composition
from tff_meta import registry
from tff_meta.baselines import ditto
from tff_meta.baselines import fed_avg
from tff_meta.baselines import local

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS)
EPOCHS = dataclasses.replace(
    ditto.PAPER,
    learning_rate=0.2,
    momentum=0.5,
    epochs=2,
    personal_learning_rate=0.3,
    personal_epochs=1,
    local_unit='epochs',
    batch_size=4,
    uniform=False,
)
VELOCITY = dataclasses.replace(EPOCHS, client_optimizer_state='persist')
PERSISTENT = dataclasses.replace(
    EPOCHS,
    optimizer='adam',
    momentum=0.0,
    learning_rate=0.05,
    client_optimizer_state='persist',
    local_unit='steps',
    epochs=3,
    personal_epochs=2,
    uniform=True,
)


@functools.cache
def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'ditto',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def initial_vector():
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  seed = composition.initial_seed(oracle.RUN_SEED)
  return oracle.to_vector(model.initialize(seed))


def test_one_round_by_hand():
  """Two steps of rate 1/2 on all examples, lambda = 1.

  As in FedPer's test the first step of both models takes the first client to
  b = 1/2 and bias (1/4, -1/4); both begin at the downloaded weights, so nothing
  pulls yet. In the second step the logits are (1/2 + 1/4) (1, -1), the true
  class has s = 1 / (1 + exp(-3/2)), and with q = 1 - s the gradients are -2 q
  in b, (-q, q) in the bias and (-q / 2, q / 2) in the kernel (the embedding is
  1/2). The server's model of this one client moves by half of that. The
  personal model is also pulled back by half of what the first step did.
  """
  config = ditto.DittoConfig(
      learning_rate=0.5,
      epochs=2,
      personal_learning_rate=0.5,
      personal_epochs=2,
      proximal_weight=1.0,
  )
  process = plain_process.PlainProcess(
      'ditto', personal.scalar_model(), config, num_classes=2
  )

  result = personal.run(process, [personal.SCALAR_CLIENTS[:1]])

  q = 1 - 1 / (1 + np.exp(-1.5))
  tolerance = dict(rtol=1e-6)
  server = result.weights[1]
  np.testing.assert_allclose(server['body']['b'], 0.5 + q, **tolerance)
  np.testing.assert_allclose(
      server['head']['bias'], [0.25 + q / 2, -0.25 - q / 2], **tolerance
  )
  kernel = [[1 + q / 4, -1 - q / 4]]
  np.testing.assert_allclose(server['head']['kernel'], kernel, **tolerance)
  own = result.heads[0][1]['personal']
  np.testing.assert_allclose(own['body']['b'], 0.25 + q, **tolerance)
  np.testing.assert_allclose(
      own['head']['bias'], [0.125 + q / 2, -0.125 - q / 2], **tolerance
  )
  np.testing.assert_allclose(own['head']['kernel'], kernel, **tolerance)
  np.testing.assert_allclose(
      result.metrics[0]['loss'], (np.log(2) - np.log(1 - q)) / 2, **tolerance
  )
  assert result.metrics[0]['num_examples'] == 2


def naive_round(config, w, own, client, seed, state):
  """What a client makes of the server's model w and of its own."""
  in_steps = config.local_unit == 'steps'
  batches = oracle.batches_of(client.pairs(), config.batch_size, seed, 3)
  per_epoch = len(batches) // 3

  def descend(loss, start, length, step, state=None):
    num_steps = length if in_steps else length * per_epoch
    return oracle.descend(loss, start, batches[:num_steps], step, state=state)

  trained, loss_sum, count = descend(
      oracle.cross_entropy,
      w,
      config.epochs,
      personal.naive_optimizer(
          config.optimizer, config.learning_rate, config.momentum
      ),
      state,
  )

  def pulled(v, pairs):
    pull = config.proximal_weight / 2 * np.sum((v - w) ** 2)
    return oracle.cross_entropy(v, pairs) + pull

  own, _, _ = descend(
      pulled,
      own,
      config.personal_epochs,
      oracle.plain_sgd(config.personal_learning_rate),
  )
  return trained, own, loss_sum, count


@pytest.mark.parametrize(
    'config, build_process',
    [
        (EPOCHS, plain_process.PlainProcess),
        (VELOCITY, plain_process.PlainProcess),
        (PERSISTENT, registry.build),
    ],
    ids=['epochs', 'velocity', 'persistent'],
)
def test_two_rounds_by_a_naive_implementation(config, build_process):
  """Clients of the first round come again: with their models and moments."""
  persists = config.client_optimizer_state == 'persist'
  result = personal.run(build(config, build_process), COHORTS)
  w = first = initial_vector()
  own, states = {}, {}
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes, loss_sum, count = [], [], 0.0, 0
    for client in cohort:
      if not persists or client.salt not in states:
        states[client.salt] = {}
      mine, own[client.salt], client_loss, client_count = naive_round(
          config,
          w,
          own.get(client.salt, first),
          client,
          personal.client_seed(round_num, client),
          states[client.salt],
      )
      trained.append(mine)
      sizes.append(1 if config.uniform else len(client.y))
      loss_sum, count = loss_sum + client_loss, count + client_count
    w = oracle.mean(trained, sizes)
    tolerance = dict(rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **tolerance
    )
    kept = result.heads[round_num]
    assert kept.keys() == own.keys()
    for salt, memory in kept.items():
      np.testing.assert_allclose(
          oracle.to_vector(memory['personal']), own[salt], **tolerance
      )
      assert ('optimizer' in memory) == persists
      if config.optimizer == 'adam':
        assert memory['optimizer']['step'] == states[salt]['t']
    metrics = result.metrics[round_num]
    np.testing.assert_allclose(metrics['loss'], loss_sum / count, rtol=1e-4)
    assert metrics['num_examples'] == count
  for salt in (1, 2):  # Pulled, but not onto the server's model.
    assert np.abs(own[salt] - w).max() > 0.05


def test_the_server_learns_what_it_would_without():
  """It is FedAvg's, bit for bit, whatever the personal models are."""
  shared = dict(
      learning_rate=0.2, momentum=0.5, epochs=2, batch_size=4, uniform=False
  )
  theirs = plain_process.PlainProcess(
      'fed_avg',
      oracle.build_model(),
      fed_avg.FedAvgConfig(**shared),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  expected = personal.run(theirs, COHORTS)
  actual = personal.run(build(EPOCHS), COHORTS)
  for mine, their in zip(actual.weights, expected.weights, strict=True):
    personal.assert_same(mine, their)


def test_without_epochs_a_model_stays():
  """The server's, and the personal one, each by itself."""
  server, own = (
      personal.run(build(dataclasses.replace(EPOCHS, **change)), COHORTS[:1])
      for change in ({'epochs': 0}, {'personal_epochs': 0})
  )
  first = server.weights[0]
  personal.assert_same(server.weights[1], first)
  for salt in (1, 2):
    trained = server.heads[0][salt]['personal']
    assert np.ptp(oracle.to_vector(trained) - oracle.to_vector(first)) > 0.1
    personal.assert_same(own.heads[0][salt]['personal'], first)
  assert np.ptp(oracle.to_vector(own.weights[1]) - initial_vector()) > 0.1


def test_a_client_whose_personal_model_diverges_is_left_out():
  """Like one whose update is not finite: the others are averaged."""
  config = dataclasses.replace(
      EPOCHS, proximal_weight=0.0, personal_learning_rate=3e38
  )
  result = personal.run(build(config, registry.build), [CLIENTS])
  left = [client for client in CLIENTS if client.salt in result.heads[0]]
  assert 0 < len(left) < 3
  assert result.metrics[0]['num_non_finite_clients'] == 3 - len(left)
  expected = personal.run(build(EPOCHS), [left])
  np.testing.assert_allclose(
      oracle.to_vector(result.weights[1]),
      oracle.to_vector(expected.weights[1]),
      rtol=1e-6,
  )


def test_without_a_pull_the_personal_model_is_local_trainings():
  """And with a stronger one it is closer to the server's."""
  config = dataclasses.replace(EPOCHS, proximal_weight=0.0)
  alone = plain_process.PlainProcess(
      'local',
      oracle.build_model(),
      local.LocalConfig(
          learning_rate=0.3, momentum=0.0, epochs=1, batch_size=4
      ),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  expected = personal.run(alone, COHORTS).heads[-1]
  actual = personal.run(build(config), COHORTS)
  assert actual.heads[-1].keys() == expected.keys()
  for salt, memory in actual.heads[-1].items():
    personal.assert_same(memory['personal'], expected[salt])

  strong = dataclasses.replace(EPOCHS, proximal_weight=2.0)
  pulled = personal.run(build(strong), COHORTS)
  server = oracle.to_vector(actual.weights[1])
  for salt in (1, 2):
    free, near = (
        np.linalg.norm(
            oracle.to_vector(result.heads[-1][salt]['personal']) - server
        )
        for result in (actual, pulled)
    )
    assert near < 0.7 * free


def models():
  initialize = oracle.build_model().with_head(oracle.NUM_CLASSES).initialize
  return initialize(tf.constant([1, 2])), initialize(tf.constant([3, 4]))


@pytest.mark.parametrize('sampled', [True, False])
def test_a_known_client_uses_its_personal_model(sampled):
  server, own = models()
  memory = personal.memory({'personal': own}, present=sampled)
  known = ditto.ditto(
      oracle.build_model(), EPOCHS, oracle.NUM_CLASSES
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


def test_a_new_client_fine_tunes_the_servers_model():
  """By plain SGD at a falling rate, whatever the optimizer of training is."""
  config = dataclasses.replace(
      PERSISTENT,
      fine_tuning_steps=3,
      fine_tuning_learning_rate=0.5,
      fine_tuning_decay=0.5,
      fine_tuning_decay_steps=2,
  )
  use = ditto.ditto(
      oracle.build_model(), config, oracle.NUM_CLASSES
  ).new_client()
  oracle.assert_fine_tunes(use, batch_size=4, rates=(0.5, 0.5, 0.25))


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'batch_size': 0}, '`batch_size` of at least 1, found 0'),
        ({'fine_tuning_decay_steps': 0}, '`fine_tuning_decay_steps`.*found 0'),
        ({'proximal_weight': -1.0}, '`proximal_weight`.*found -1.0'),
        ({'proximal_weight': 40.0}, 'below 2, found 40.0 times 0.05'),
        (
            {'client_optimizer_state': 'persist'},
            "SGD without momentum.*found 'persist'",
        ),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(ditto.PAPER, **change)
