"""SCAFFOLD: gradients are corrected by what clients' gradients were before."""

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
from tff_meta.baselines import scaffold

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS, CLIENTS[1:])
CONFIG = scaffold.ScaffoldConfig(
    learning_rate=0.2,
    server_learning_rate=1.5,
    num_clients=5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    uniform=False,
)
# One step of a round, on all examples; everybody takes part.
STEPS = dataclasses.replace(
    CONFIG,
    server_learning_rate=1.0,
    num_clients=len(CLIENTS),
    epochs=1,
    batch_size=0,
    uniform=True,
)


@functools.cache
def build(
    config,
    model=None,
    num_classes=oracle.NUM_CLASSES,
    build_process=plain_process.PlainProcess,
):
  return build_process(
      'scaffold',
      model or oracle.build_model(),
      config,
      num_classes=num_classes,
      seed=oracle.RUN_SEED,
  )


def run(config, cohorts=COHORTS, build_process=plain_process.PlainProcess):
  return personal.run(build(config, build_process=build_process), cohorts)


def control(state):
  """c, which the server keeps."""
  (_, own), _ = state.client_work
  return own


def test_one_round_by_hand():
  """Two steps of rate 1/2 on the one example of one client of four.

  As in FedPer's test the gradients of the first step are -1 in b and (-1/2,
  1/2) in the bias. In the second, q = 1 - 1 / (1 + exp(-3/2)) is the
  probability of the wrong class; the gradients are -2 q in b, (-q, q) in the
  bias and (-q / 2, q / 2) in the kernel. The means of the two are what the
  client keeps, a quarter of them is c, and eta_g = 2 doubles what it moved.
  """
  config = scaffold.ScaffoldConfig(
      learning_rate=0.5,
      server_learning_rate=2.0,
      num_clients=4,
      epochs=2,
      batch_size=0,
  )
  process = build(config, personal.scalar_model(), 2)

  result = personal.run(process, [personal.SCALAR_CLIENTS[:1]])

  q = 1 - 1 / (1 + np.exp(-1.5))
  kept, server = result.heads[0][1], result.weights[1]
  np.testing.assert_allclose(kept['body']['b'], -(1 + 2 * q) / 2, rtol=1e-6)
  np.testing.assert_allclose(
      kept['head']['bias'], [-(0.5 + q) / 2, (0.5 + q) / 2], rtol=1e-6
  )
  np.testing.assert_allclose(
      kept['head']['kernel'], [[-q / 4, q / 4]], rtol=1e-6
  )
  np.testing.assert_allclose(
      control(result.state)['body']['b'], -(1 + 2 * q) / 8, rtol=1e-6
  )
  np.testing.assert_allclose(server['body']['b'], 1 + 2 * q, rtol=1e-6)
  np.testing.assert_allclose(
      server['head']['kernel'], [[1 + q / 2, -1 - q / 2]], rtol=1e-6
  )
  np.testing.assert_allclose(
      result.metrics[0]['loss'], (np.log(2) - np.log(1 - q)) / 2, rtol=1e-6
  )


def naive_training(config, w, c, c_i, pairs, seed):
  """Corrected steps, and the new c_i by the formula of option II."""
  y, num_steps = w, 0
  batches = oracle.batches_of(
      pairs, config.batch_size or len(pairs), seed, config.epochs
  )
  for batch in batches:
    gradient = oracle.gradient(oracle.cross_entropy, y, batch)
    gradient = gradient + config.weight_decay * y
    y = y - config.learning_rate * (gradient - c_i + c)
    num_steps += 1
  return y, c_i - c + (w - y) / (num_steps * config.learning_rate)


@pytest.mark.parametrize(
    'config, build_process',
    [(CONFIG, registry.build), (STEPS, plain_process.PlainProcess)],
    ids=['batches', 'steps'],
)
def test_three_rounds_by_a_naive_implementation(config, build_process):
  result = run(config, build_process=build_process)
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  w = oracle.to_vector(
      model.initialize(composition.initial_seed(oracle.RUN_SEED))
  )
  c, kept = np.zeros_like(w), {}
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes, change = [], [], np.zeros_like(c)
    for client in cohort:
      before = kept.get(client.salt, np.zeros_like(c))
      y, kept[client.salt] = naive_training(
          config,
          w,
          c,
          before,
          client.pairs(),
          personal.client_seed(round_num, client),
      )
      trained.append(y)
      sizes.append(1 if config.uniform else len(client.y))
      change += kept[client.salt] - before
    w = w + config.server_learning_rate * (oracle.mean(trained, sizes) - w)
    c = c + change / config.num_clients
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **oracle.TOLERANCE
    )
    memories = result.heads[round_num]
    assert memories.keys() == kept.keys()
    for salt, memory in memories.items():
      np.testing.assert_allclose(
          oracle.to_vector(memory), kept[salt], **oracle.TOLERANCE
      )
  np.testing.assert_allclose(
      oracle.to_vector(control(result.state)), c, **oracle.TOLERANCE
  )


def test_corrections_cancel_where_everybody_takes_one_step():
  """Then every round is a step of gradient descent on the mean loss.

  As it is without corrections; c is the mean of what clients keep.
  """
  result = run(STEPS, (CLIENTS,) * 3)
  vectors = [oracle.to_vector(weights) for weights in result.weights]
  for before, after in zip(vectors[:-1], vectors[1:], strict=True):
    gradients = [
        oracle.gradient(oracle.cross_entropy, before, client.pairs())
        + STEPS.weight_decay * before
        for client in CLIENTS
    ]
    np.testing.assert_allclose(
        after,
        before - STEPS.learning_rate * np.mean(gradients, axis=0),
        **oracle.TOLERANCE,
    )
  kept = [oracle.to_vector(c_i) for c_i in result.heads[-1].values()]
  np.testing.assert_allclose(
      oracle.to_vector(control(result.state)),
      np.mean(kept, axis=0),
      **oracle.TOLERANCE,
  )


@pytest.mark.parametrize(
    'x, y',
    [(np.zeros([0, 2]), []), (np.full([3, 2], np.nan), [0, 1, 1])],
    ids=['no examples', 'not finite'],
)
def test_who_comes_back_and_cannot_train_leaves_the_control(x, y):
  back = oracle.Client(np.float32(x), np.int32(y), CLIENTS[0].salt)
  once = run(CONFIG, (CLIENTS[:2],), registry.build)
  twice = run(CONFIG, (CLIENTS[:2], (back,)), registry.build)
  assert np.abs(oracle.to_vector(control(once.state))).max() > 0.01
  personal.assert_same(control(twice.state), control(once.state))
  personal.assert_same(twice.weights[2], once.weights[1])
  salt = back.salt
  personal.assert_same(twice.heads[1][salt], once.heads[0][salt])


def test_a_client_uses_the_servers_model():
  model = oracle.build_model()
  weights = model.with_head(oracle.NUM_CLASSES).initialize(tf.constant([1, 2]))
  method = scaffold.scaffold(model, CONFIG, oracle.NUM_CLASSES)
  assert method.known_client is method.new_client
  use = method.known_client()
  client, query = CLIENTS[1], oracle.make_client((6, 7, 8), salt=9)
  adapted = use.adapt(weights, (), client.examples(), tf.constant([5, 6]))
  personal.assert_same(adapted, weights)
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == personal.predict(oracle.to_vector(weights), query.pairs())


@pytest.mark.parametrize(
    'change, message',
    [
        ({'num_clients': 0}, '`num_clients` of at least 1, found 0'),
        ({'learning_rate': -1.0}, '`learning_rate` .*found -1.0'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
