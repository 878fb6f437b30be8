"""FedRoD: balanced losses of the shared network, and personal heads on top."""

import dataclasses
import math

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import registry
from tff_meta.baselines import fed_rod

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS)
LOCAL = dict(
    learning_rate=0.2, momentum=0.5, epochs=2, batch_size=4, weight_decay=0.1
)
CONFIG = fed_rod.FedRodConfig(**LOCAL)


def run(config, name='fed_rod', build=plain_process.PlainProcess):
  process = build(
      name,
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  return personal.run(process, COHORTS)


def naive_balanced(w, pairs, class_sizes, balance):
  """Equation 8 as it is printed, in probabilities."""
  kernel, bias = w[personal.HEAD][:12].reshape(3, 4), w[personal.HEAD][12:]
  total = 0.0
  for x, label in pairs:
    z = oracle.embed(w, x) @ kernel + bias
    shares = [n**balance * math.exp(z[c]) for c, n in enumerate(class_sizes)]
    total -= math.log(shares[label] / sum(shares))
  return total / len(pairs)


def both(w, own):
  """The weights under the sum of both heads, whose outputs are the sums."""
  return np.concatenate([w[personal.BODY], w[personal.HEAD] + own])


def naive_training(config, w, own, client, seed):
  sizes = np.bincount(client.y, minlength=oracle.NUM_CLASSES)
  step = personal.naive_optimizer('sgd', config.learning_rate, config.momentum)
  states, loss_sum, count = ({}, {}), 0.0, 0

  def generic(w, pairs):
    return naive_balanced(w, pairs, sizes, config.balance)

  batches = oracle.batches_of(
      client.pairs(), config.batch_size, seed, config.epochs
  )
  for batch in batches:
    of_own = oracle.gradient(
        lambda own, batch, w=w: oracle.cross_entropy(both(w, own), batch),
        own,
        batch,
    )
    of_w = oracle.gradient(generic, w, batch)
    loss = generic(w, batch) + oracle.cross_entropy(both(w, own), batch)
    loss_sum, count = loss_sum + len(batch) * loss, count + len(batch)
    w = w - step(of_w + config.weight_decay * w, states[0])
    own = own - step(of_own + config.weight_decay * own, states[1])
  return w, own, loss_sum, count


@pytest.mark.parametrize(
    'balance, build', [(0.5, registry.build), (1.0, plain_process.PlainProcess)]
)
def test_two_rounds_by_a_naive_implementation(balance, build):
  """Nobody has class 3, and nobody all of the others."""
  config = dataclasses.replace(CONFIG, balance=balance, uniform=balance == 0.5)
  result = run(config, build=build)
  w = oracle.to_vector(result.weights[0])
  first, own = w[personal.HEAD], {}
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes, loss_sum, count = [], [], 0.0, 0
    for client in cohort:
      mine, own[client.salt], client_loss, client_count = naive_training(
          config,
          w,
          own.get(client.salt, first),
          client,
          personal.client_seed(round_num, client),
      )
      trained.append(mine)
      sizes.append(1 if config.uniform else len(client.y))
      loss_sum, count = loss_sum + client_loss, count + client_count
    w = oracle.mean(trained, sizes)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **oracle.TOLERANCE
    )
    assert result.heads[round_num].keys() == own.keys()
    for salt, head in result.heads[round_num].items():
      np.testing.assert_allclose(
          personal.head_vector(head), own[salt], **oracle.TOLERANCE
      )
    np.testing.assert_allclose(
        result.metrics[round_num]['loss'], loss_sum / count, rtol=1e-4
    )


def test_without_balance_the_shared_network_is_fed_avgs():
  """Bit for bit: personal heads move nothing of it."""
  fed_avg = dataclasses.replace(
      registry.get('fed_avg').presets['paper'], **LOCAL
  )
  expected = run(fed_avg, name='fed_avg').weights
  plain = run(dataclasses.replace(CONFIG, balance=0.0)).weights
  for mine, theirs in zip(plain, expected, strict=True):
    personal.assert_same(mine, theirs)
  difference = oracle.to_vector(run(CONFIG).weights[-1]) - oracle.to_vector(
      plain[-1]
  )
  assert np.abs(difference).max() > 0.05


def test_the_balanced_loss_by_hand():
  """Of two classes with equal outputs, the rarer one has a quarter."""
  logits, y, mask = tf.zeros([2, 3]), tf.constant([1, 0]), [1.0, 0.0]

  def loss(class_sizes, balance):
    return fed_rod.balanced_loss(
        logits, y, tf.constant(mask), tf.constant(class_sizes), balance
    )

  np.testing.assert_allclose(loss([9.0, 3, 0], 1.0), np.log(4), rtol=1e-6)
  np.testing.assert_allclose(
      loss([9.0, 3, 0], 0.5), np.log(1 + 3**0.5), rtol=1e-6
  )
  for sizes, balance in (([9.0, 3, 0], 0.0), ([5.0, 5, 5], 1.0)):
    np.testing.assert_allclose(loss(sizes, balance), np.log(3), rtol=1e-6)


@pytest.mark.parametrize('sampled', [True, False])
def test_known_clients_use_both_heads_and_new_ones_the_generic(sampled):
  method = fed_rod.fed_rod(oracle.build_model(), CONFIG, oracle.NUM_CLASSES)
  weights = method.initialize(tf.constant([1, 2]))
  own = method.memory(tf.constant([3, 4]))
  w = oracle.to_vector(weights)
  query = oracle.make_client((6, 7, 8), salt=9)
  seed, memory = tf.constant([5, 6]), personal.memory(own, present=sampled)
  with_own = both(w, personal.head_vector(own)) if sampled else w
  answers, generic = (personal.predict(v, query.pairs()) for v in (with_own, w))
  assert (answers != generic) == sampled
  for use, kept, expected in (
      (method.known_client(), memory, answers),
      (method.new_client(), (), generic),
  ):
    for adapted in (
        use.start(weights, kept),
        use.adapt(weights, kept, CLIENTS[0].examples(), seed),
    ):
      predicted = use.predict(adapted, query.examples()).numpy().tolist()
      assert predicted == expected
