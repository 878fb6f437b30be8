"""pFedMe: descent on Moreau envelopes, whose proximal points are personal."""

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
from tff_meta.baselines import pfedme

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS)
CONFIG = pfedme.PFedMeConfig(
    uniform=False,
    learning_rate=0.2,
    server_learning_rate=1.5,
    local_rounds=4,
    personal_learning_rate=0.3,
    personal_steps=3,
    proximal_weight=2.0,
    weight_decay=0.1,
    batch_size=4,
)
# Bigger than any client: a minibatch is all of its examples.
WHOLE = dataclasses.replace(CONFIG, batch_size=100, uniform=True)


def build(
    config,
    model=None,
    num_classes=oracle.NUM_CLASSES,
    build_process=plain_process.PlainProcess,
):
  return build_process(
      'pfedme',
      model or oracle.build_model(),
      config,
      num_classes=num_classes,
      seed=oracle.RUN_SEED,
  )


@functools.cache
def run(config, build_process=plain_process.PlainProcess):
  return personal.run(build(config, build_process=build_process), COHORTS)


def test_clients_count_alike_in_the_paper_and_by_examples_in_its_code():
  examples = CLIENTS[0].examples()
  weights = {
      name: float(preset.weight(examples))
      for name, preset in registry.get('pfedme').presets.items()
  }
  n = len(CLIENTS[0].y)
  assert weights == {'paper': 1, 'release': n, 'demo': n} and n > 1


def test_one_round_by_hand():
  """Two steps of rate 1/2 on the one example, lambda = 1, eta = 1/4.

  As in FedPer's test the first step takes theta to b = 1/2 and bias (1/4,
  -1/4), and nothing pulls yet. In the second, q = 1 - 1 / (1 + exp(-3/2)) is
  the probability of the wrong class; the gradients are -2 q in b, (-q, q) in
  the bias and (-q / 2, q / 2) in the kernel, and the pull is what the first
  step did: b = 1/2 + q - 1/4. The copy of the server's model moves by 1/4 of
  the way to theta, and beta = 2 doubles that.
  """
  config = pfedme.PFedMeConfig(
      learning_rate=0.25,
      server_learning_rate=2.0,
      local_rounds=1,
      personal_learning_rate=0.5,
      personal_steps=2,
      proximal_weight=1.0,
      weight_decay=0.0,
  )
  process = build(config, personal.scalar_model(), 2)

  result = personal.run(process, [personal.SCALAR_CLIENTS[:1]])

  q = 1 - 1 / (1 + np.exp(-1.5))
  server = result.weights[1]
  np.testing.assert_allclose(server['body']['b'], (0.25 + q) / 2, rtol=1e-6)
  np.testing.assert_allclose(
      server['head']['bias'],
      [(0.125 + q / 2) / 2, -(0.125 + q / 2) / 2],
      rtol=1e-6,
  )
  np.testing.assert_allclose(
      server['head']['kernel'], [[1 + q / 8, -1 - q / 8]], rtol=1e-6
  )
  np.testing.assert_allclose(
      result.metrics[0]['loss'], (np.log(2) - np.log(1 - q)) / 2, rtol=1e-6
  )
  assert result.metrics[0]['num_examples'] == 2


def naive_training(config, w, pairs, seed):
  """R minibatches: K steps of theta, which goes on, and one of w, on each."""
  theta = w
  loss_sum, count = 0.0, 0
  batches = oracle.batches_of(
      pairs, config.batch_size, seed, config.local_rounds
  )
  for batch in batches[: config.local_rounds]:
    for _ in range(config.personal_steps):
      loss_sum += len(batch) * oracle.cross_entropy(theta, batch)
      count += len(batch)
      theta = theta - config.personal_learning_rate * (
          oracle.gradient(oracle.cross_entropy, theta, batch)
          + config.proximal_weight * (theta - w)
          + config.weight_decay * theta
      )
    w = w - config.learning_rate * config.proximal_weight * (w - theta)
  return w, theta, loss_sum, count


@pytest.mark.parametrize(
    'config, build_process',
    [(CONFIG, registry.build), (WHOLE, plain_process.PlainProcess)],
    ids=['batches', 'whole'],
)
def test_two_rounds_by_a_naive_implementation(config, build_process):
  result = run(config, build_process)
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  w = oracle.to_vector(
      model.initialize(composition.initial_seed(oracle.RUN_SEED))
  )
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes, loss_sum, count = [], [], 0.0, 0
    for client in cohort:
      mine, _, client_loss, client_count = naive_training(
          config,
          w,
          client.pairs(),
          personal.client_seed(round_num, client),
      )
      trained.append(mine)
      sizes.append(1 if config.uniform else len(client.y))
      loss_sum, count = loss_sum + client_loss, count + client_count
    w = w + config.server_learning_rate * (oracle.mean(trained, sizes) - w)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **oracle.TOLERANCE
    )
    metrics = result.metrics[round_num]
    np.testing.assert_allclose(metrics['loss'], loss_sum / count, rtol=1e-4)
    assert metrics['num_examples'] == count


def test_without_a_pull_the_server_stays():
  config = dataclasses.replace(CONFIG, proximal_weight=0.0)
  result = run(config)
  personal.assert_same(result.weights[-1], result.weights[0])


def test_one_step_makes_the_envelope_the_loss():
  """`lambda (w - theta)` is then rate times lambda times the gradient."""
  config = dataclasses.replace(
      WHOLE,
      learning_rate=0.25,
      server_learning_rate=1.0,
      local_rounds=1,
      personal_steps=1,
      weight_decay=0.0,
  )
  before, after = (oracle.to_vector(w) for w in run(config).weights[:2])
  gradients = [
      oracle.gradient(oracle.cross_entropy, before, client.pairs())
      for client in COHORTS[0]
  ]
  np.testing.assert_allclose(
      before - after,
      0.25 * 2.0 * 0.3 * np.mean(gradients, axis=0),
      rtol=1e-4,
      atol=1e-6,
  )


@pytest.mark.parametrize('config', [CONFIG, WHOLE], ids=['batches', 'whole'])
def test_a_client_has_the_personal_model(config):
  model = oracle.build_model()
  weights = model.with_head(oracle.NUM_CLASSES).initialize(tf.constant([1, 2]))
  method = pfedme.pfedme(model, config, oracle.NUM_CLASSES)
  use = method.known_client()
  personal.assert_same(use.start(weights, ()), weights)
  client, query = CLIENTS[1], oracle.make_client((6, 7, 8), salt=9)
  adapted = use.adapt(weights, (), client.examples(), tf.constant([5, 6]))
  _, theta, _, _ = naive_training(
      config, oracle.to_vector(weights), client.pairs(), (5, 6)
  )
  np.testing.assert_allclose(
      oracle.to_vector(adapted), theta, **oracle.TOLERANCE
  )
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == personal.predict(theta, query.pairs())

  nobody = personal.EMPTY_CLIENT.examples()
  personal.assert_same(
      use.adapt(weights, (), nobody, tf.constant([5, 6])), weights
  )


@pytest.mark.parametrize(
    'change, message',
    [
        ({'batch_size': 0}, '`batch_size` of at least 1, found 0'),
        ({'personal_steps': 0}, '`personal_steps` of at least 1, found 0'),
        ({'proximal_weight': 7.0}, '`personal_learning_rate` below 2.*7.0'),
        (
            {'learning_rate': 1.5, 'personal_learning_rate': 0.0},
            '`learning_rate` below 2, found 2.0 times 1.5',
        ),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
