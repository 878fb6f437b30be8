"""FedProx: the pull towards what was received, and FedAvg without it."""

import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import composition
from tff_meta import registry
from tff_meta.baselines import fed_prox

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS)
LOCAL = dict(learning_rate=0.2, momentum=0.5, epochs=2, batch_size=4)
CONFIG = fed_prox.FedProxConfig(proximal_weight=0.7, **LOCAL)


def run(
    config,
    cohorts=COHORTS,
    name='fed_prox',
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


def test_two_steps_by_hand():
  """The first is FedAvg's: at the server's model nothing pulls.

  As in SCAFFOLD's test b moves from 0 to 1/2, and the gradient there is -2 q,
  with q = 1 - 1 / (1 + exp(-3/2)), to which the pull adds mu / 2.
  """
  config = fed_prox.FedProxConfig(
      learning_rate=0.5, epochs=2, batch_size=0, proximal_weight=0.6
  )
  process = plain_process.PlainProcess(
      'fed_prox', personal.scalar_model(), config, num_classes=2
  )
  result = personal.run(process, [personal.SCALAR_CLIENTS[:1]])
  q = 1 - 1 / (1 + np.exp(-1.5))
  np.testing.assert_allclose(
      result.weights[1]['body']['b'], 0.5 + 0.5 * (2 * q - 0.3), rtol=1e-6
  )


@pytest.mark.parametrize(
    'uniform, build',
    [(False, registry.build), (True, plain_process.PlainProcess)],
)
def test_two_rounds_by_a_naive_implementation(uniform, build):
  config = dataclasses.replace(CONFIG, uniform=uniform, weight_decay=0.1)
  result = run(config, build=build)
  w = oracle.to_vector(result.weights[0])
  for round_num, cohort in enumerate(COHORTS):

    def loss(v, pairs, received=w):
      pull = config.proximal_weight / 2 * np.sum((v - received) ** 2)
      return oracle.cross_entropy(v, pairs) + pull

    trained, sizes, loss_sum, count = [], [], 0.0, 0
    for client in cohort:
      seed = personal.client_seed(round_num, client)
      own, client_loss, client_count = oracle.descend(
          loss,
          w,
          oracle.batches_of(client.pairs(), 4, seed, 2),
          personal.naive_optimizer('sgd', 0.2, 0.5),
          config.weight_decay,
      )
      trained.append(own)
      sizes.append(1 if uniform else len(client.y))
      loss_sum, count = loss_sum + client_loss, count + client_count
    w = oracle.mean(trained, sizes)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **oracle.TOLERANCE
    )
    np.testing.assert_allclose(
        result.metrics[round_num]['loss'], loss_sum / count, rtol=1e-4
    )


def test_without_a_pull_it_is_fed_avg():
  """Bit for bit, also with a client that has no examples."""
  cohorts = (*COHORTS, (*CLIENTS, personal.EMPTY_CLIENT))
  fed_avg = dataclasses.replace(
      registry.get('fed_avg').presets['paper'], **LOCAL
  )
  expected = run(fed_avg, cohorts, 'fed_avg').weights
  free = run(dataclasses.replace(CONFIG, proximal_weight=0.0), cohorts).weights
  for mine, theirs in zip(free, expected, strict=True):
    personal.assert_same(mine, theirs)

  pulled = run(CONFIG, cohorts).weights
  moved, moved_freely = (
      np.abs(oracle.to_vector(w[1]) - oracle.to_vector(w[0])).sum()
      for w in (pulled, free)
  )
  assert 0.1 < moved < 0.9 * moved_freely


@pytest.mark.parametrize('kind', ['known_client', 'new_client'])
def test_clients_use_the_servers_model_as_it_is(kind):
  method = fed_prox.fed_prox(oracle.build_model(), CONFIG, oracle.NUM_CLASSES)
  weights = method.initialize(composition.initial_seed(3))
  use = getattr(method, kind)()
  seed = tf.constant([1, 2])
  adapted = use.adapt(weights, (), CLIENTS[0].examples(), seed)
  personal.assert_same(adapted, weights)
  query = oracle.make_client((6, 7, 8), salt=9)
  assert use.predict(
      adapted, query.examples()
  ).numpy().tolist() == personal.predict(
      oracle.to_vector(weights), query.pairs()
  )


def test_a_pull_that_overshoots_is_named():
  with pytest.raises(ValueError, match='`proximal_weight`.*found 10.0 times'):
    dataclasses.replace(CONFIG, proximal_weight=10.0)
