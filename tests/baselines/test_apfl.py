"""APFL: the server's model, own models, and mixtures of the two."""

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
from tff_meta.baselines import apfl
from tff_meta.baselines import fed_avg
from tff_meta.baselines import local

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS)
CONFIG = apfl.ApflConfig(
    learning_rate=0.2,
    momentum=0.5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    mixing=0.75,
    new_client_epochs=2,
)
ADAM = dataclasses.replace(
    CONFIG,
    optimizer='adam',
    learning_rate=0.05,
    momentum=0.0,
    weight_decay=0.0,
    mixing=0.25,
    uniform=True,
)


@functools.cache
def run(config, build=plain_process.PlainProcess):
  process = build(
      'apfl',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  return personal.run(process, COHORTS)


def initial_vector():
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  seed = composition.initial_seed(oracle.RUN_SEED)
  return oracle.to_vector(model.initialize(seed))


def naive_training(config, w, v, pairs, seed):
  """Algorithm 1: both gradients of a step are taken before it."""
  alpha, states = config.mixing, ({}, {})
  step = personal.naive_optimizer(
      config.optimizer, config.learning_rate, config.momentum
  )
  loss_sum, count = 0.0, 0
  for batch in oracle.batches_of(pairs, config.batch_size, seed, config.epochs):
    mixture = alpha * v + (1 - alpha) * w
    loss_sum += len(batch) * (
        oracle.cross_entropy(w, batch) + oracle.cross_entropy(mixture, batch)
    )
    count += len(batch)
    of_mixture = oracle.gradient(oracle.cross_entropy, mixture, batch)
    of_w = oracle.gradient(oracle.cross_entropy, w, batch)
    gradients = (
        of_w + config.weight_decay * w,
        alpha * of_mixture + config.weight_decay * v,
    )
    w, v = (
        value - step(gradient, state)
        for value, gradient, state in zip(
            (w, v), gradients, states, strict=True
        )
    )
  return w, v, loss_sum, count


@pytest.mark.parametrize(
    'config, build',
    [(CONFIG, registry.build), (ADAM, plain_process.PlainProcess)],
    ids=['momentum', 'adam'],
)
def test_two_rounds_by_a_naive_implementation(config, build):
  """Clients of the first round come again, with their models."""
  result = run(config, build)
  w = first = initial_vector()
  own = {}
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes, loss_sum, count = [], [], 0.0, 0
    for client in cohort:
      mine, own[client.salt], client_loss, client_count = naive_training(
          config,
          w,
          own.get(client.salt, first),
          client.pairs(),
          personal.client_seed(round_num, client),
      )
      trained.append(mine)
      sizes.append(1 if config.uniform else len(client.y))
      loss_sum, count = loss_sum + client_loss, count + client_count
    w = oracle.mean(trained, sizes)
    # Adam divides by the root of a gradient's square: float32 errors in small
    # gradients weigh more.
    tolerance = dict(rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **tolerance
    )
    kept = result.heads[round_num]
    assert kept.keys() == own.keys()
    for salt, memory in kept.items():
      np.testing.assert_allclose(
          oracle.to_vector(memory), own[salt], **tolerance
      )
    metrics = result.metrics[round_num]
    np.testing.assert_allclose(metrics['loss'], loss_sum / count, rtol=1e-4)
    assert metrics['num_examples'] == count


@pytest.mark.parametrize('mixing', [0.0, 0.4])
def test_the_server_learns_what_it_would_without(mixing):
  """It is FedAvg's, bit for bit; without a share own models stay."""
  config = dataclasses.replace(CONFIG, weight_decay=0.0, mixing=mixing)
  theirs = plain_process.PlainProcess(
      'fed_avg',
      oracle.build_model(),
      fed_avg.FedAvgConfig(
          learning_rate=0.2, momentum=0.5, epochs=2, batch_size=4
      ),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  expected = personal.run(theirs, COHORTS)
  actual = run(config)
  for mine, their in zip(actual.weights, expected.weights, strict=True):
    personal.assert_same(mine, their)
  moved = oracle.to_vector(actual.heads[-1][1]) - initial_vector()
  if mixing:
    assert np.abs(moved).max() > 0.05
  else:
    assert not moved.any()


def test_all_of_an_own_model_is_one_of_local_training():
  config = dataclasses.replace(CONFIG, weight_decay=0.0, mixing=1.0)
  alone = plain_process.PlainProcess(
      'local',
      oracle.build_model(),
      local.LocalConfig(
          learning_rate=0.2, momentum=0.5, epochs=2, batch_size=4
      ),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  expected = personal.run(alone, COHORTS).heads[-1]
  actual = run(config).heads[-1]
  assert actual.keys() == expected.keys()
  for salt, memory in actual.items():
    np.testing.assert_allclose(
        oracle.to_vector(memory),
        oracle.to_vector(expected[salt]),
        rtol=1e-6,
        atol=1e-6,
    )


def two_models():
  initialize = oracle.build_model().with_head(oracle.NUM_CLASSES).initialize
  return initialize(tf.constant([1, 2])), initialize(tf.constant([3, 4]))


@pytest.mark.parametrize('sampled', [True, False])
def test_a_known_client_uses_its_mixture(sampled):
  server, own = two_models()
  memory = personal.memory(own, present=sampled)
  known = apfl.apfl(
      oracle.build_model(), CONFIG, oracle.NUM_CLASSES
  ).known_client()
  share = 0.75 if sampled else 0.0
  expected = share * oracle.to_vector(own)
  expected += (1 - share) * oracle.to_vector(server)
  query = oracle.make_client((6, 7, 8), salt=9)
  for adapted in (
      known.start(server, memory),
      known.adapt(server, memory, CLIENTS[0].examples(), tf.constant([5, 6])),
  ):
    np.testing.assert_allclose(
        oracle.to_vector(adapted), expected, rtol=1e-5, atol=1e-6
    )
    predicted = known.predict(adapted, query.examples()).numpy().tolist()
    assert predicted == personal.predict(expected, query.pairs())


@pytest.mark.parametrize('config', [CONFIG, ADAM], ids=['momentum', 'adam'])
def test_a_new_client_trains_and_mixes_with_the_servers_model(config):
  server, _ = two_models()
  w = oracle.to_vector(server)
  new = apfl.apfl(oracle.build_model(), config, oracle.NUM_CLASSES).new_client()
  personal.assert_same(new.start(server, ()), server)
  adapted = new.adapt(server, (), CLIENTS[0].examples(), tf.constant([5, 6]))
  _, v, _, _ = naive_training(config, w, w, CLIENTS[0].pairs(), (5, 6))
  np.testing.assert_allclose(
      oracle.to_vector(adapted),
      config.mixing * v + (1 - config.mixing) * w,
      rtol=1e-4,
      atol=1e-4,
  )


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'mixing': 1.5}, r'`mixing` in \[0, 1\], found 1.5'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
