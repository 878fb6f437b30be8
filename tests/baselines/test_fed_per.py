"""FedPer: what is averaged, what stays, and what known and new clients do."""

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
from tff_meta.baselines import fed_avg
from tff_meta.baselines import fed_per
from tff_meta.learners import personal_head

CLIENTS = oracle.CLIENTS
# The second client is in all rounds, the others miss one.
COHORTS = (CLIENTS[:2], CLIENTS[1:], CLIENTS)
PERSONAL = dataclasses.replace(
    fed_per.PAPER,
    learning_rate=0.3,
    momentum=0.5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
)
AVERAGED = dataclasses.replace(
    fed_per.RELEASE, learning_rate=0.05, batch_size=4, uniform=True
)


@functools.cache
def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'fed_per',
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
  """One step of rate 1/2 on all examples.

  With b = 0 all logits are 0 and both probabilities 1/2, so the gradient in the
  logits is (-1/2, 1/2) for class 0 and (1/2, -1/2) for class 1. In b it is x
  times its product with the kernel (1, -1): -x and x; in the bias it is the
  same as in the logits; in the kernel zero, as the embedding is. The first
  client (x = 1, class 0) gets b = 1/2 and bias (1/4, -1/4), the second (x = 2,
  class 1) b = -1 and bias (-1/4, 1/4). The server's b is (1 * 1/2 + 3 * -1) / 4
  = -0.625; the biases stay with the clients.
  """
  config = fed_per.FedPerConfig(
      learning_rate=0.5, epochs=1, batch_size=0, uniform=False
  )
  process = plain_process.PlainProcess(
      'fed_per', personal.scalar_model(), config, num_classes=2
  )

  result = personal.run(process, [personal.SCALAR_CLIENTS])

  np.testing.assert_allclose(result.weights[1]['body']['b'], -0.625, rtol=1e-6)
  for salt, bias in ((1, [0.25, -0.25]), (2, [-0.25, 0.25])):
    head = result.heads[0][salt]
    np.testing.assert_allclose(head['bias'], bias, rtol=1e-6)
    np.testing.assert_array_equal(head['kernel'], [[1.0, -1.0]])
  np.testing.assert_allclose(result.metrics[0]['loss'], np.log(2), rtol=1e-6)


@pytest.mark.parametrize(
    'config, build_process',
    [(PERSONAL, registry.build), (AVERAGED, plain_process.PlainProcess)],
    ids=['personal', 'averaged'],
)
def test_rounds_with_changing_cohorts(config, build_process):
  """Own heads come back, and those of clients that wait stay as they are."""
  averaged = config.head_of_evaluation == 'averaged'
  result = personal.run(build(config, build_process), COHORTS)
  w, heads = initial_vector(), {}
  first_head = w[personal.HEAD]
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes = [], []
    for client in cohort:
      start = w.copy()
      default = w[personal.HEAD] if averaged else first_head
      start[personal.HEAD] = heads.get(client.salt, default)
      seed = personal.client_seed(round_num, client)
      own, _, _ = personal.train(
          start, client.pairs(), config, seed, config.epochs
      )
      heads = heads | {client.salt: own[personal.HEAD]}
      trained.append(own)
      sizes.append(1 if config.uniform else len(client.y))
    w = oracle.mean(trained, sizes)
    # Adam divides by the root of a gradient's square: float32 errors in small
    # gradients weigh more.
    tolerance = dict(rtol=1e-4, atol=2e-5)
    actual = oracle.to_vector(result.weights[round_num + 1])
    np.testing.assert_allclose(actual, w[: len(actual)], **tolerance)
    assert len(actual) == (len(w) if averaged else 9)
    assert result.heads[round_num].keys() == heads.keys()
    for salt, head in result.heads[round_num].items():
      np.testing.assert_allclose(
          personal.head_vector(head), heads[salt], **tolerance
      )
  personal.assert_same(result.heads[1][1], result.heads[0][1])


def test_without_anything_personal_it_is_fed_avg():
  """In the first round of all, and with a single client in every round."""
  shared = dict(learning_rate=0.3, epochs=2, batch_size=4)
  mine = build(fed_per.FedPerConfig(head_of_evaluation='averaged', **shared))
  theirs = plain_process.PlainProcess(
      'fed_avg',
      oracle.build_model(),
      fed_avg.FedAvgConfig(**shared),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  for cohorts in ([CLIENTS], [CLIENTS[:1]] * 3):
    actual = personal.run(mine, cohorts).weights
    expected = personal.run(theirs, cohorts).weights
    for a, b in zip(actual, expected, strict=True):
      # The server's head is `w - (w - own)`, not exactly the client's own.
      np.testing.assert_allclose(
          oracle.to_vector(a), oracle.to_vector(b), rtol=1e-5, atol=1e-6
      )
  assert np.ptp(oracle.to_vector(actual[0]) - oracle.to_vector(actual[1])) > 0.1


def test_the_first_head_is_common_and_random():
  """A memory of the initial head is as good as none; it depends on the seed."""
  process = build(PERSONAL)
  state = process.initialize()
  common = process.initial_memory
  np.testing.assert_array_equal(
      personal.head_vector(common), initial_vector()[personal.HEAD]
  )
  none, _ = personal.next_with_memory(process, state, CLIENTS, {})
  heads = {client.salt: common for client in CLIENTS}
  given, _ = personal.next_with_memory(process, state, CLIENTS, heads)
  personal.assert_same(
      process.get_model_weights(none.state).trainable,
      process.get_model_weights(given.state).trainable,
  )
  other = plain_process.PlainProcess(
      'fed_per',
      oracle.build_model(),
      PERSONAL,
      num_classes=4,
      seed=oracle.RUN_SEED + 1,
  ).initial_memory
  assert np.ptp(common['kernel'] - other['kernel']) > 0.1


@pytest.mark.parametrize(
    'known, head_of_evaluation, fine_tuning_epochs',
    [
        (True, 'personal', 0),
        (True, 'personal', 3),
        (False, 'personal', 0),
        (False, 'personal', 3),
        (True, 'averaged', 3),
        (False, 'averaged', 0),
    ],
)
def test_use(known, head_of_evaluation, fine_tuning_epochs):
  """Which head a client starts with, and for how long it trains."""
  config = dataclasses.replace(
      PERSONAL,
      head_of_evaluation=head_of_evaluation,
      fine_tuning_epochs=fine_tuning_epochs,
      new_client_epochs=2,
  )
  averaged = head_of_evaluation == 'averaged'
  model = oracle.build_model()
  weights = model.with_head(4).initialize(tf.constant([8, 9]))
  own = model.with_head(4).initialize(tf.constant([5, 5]))['head']
  memory, head = (personal.memory(own), own) if known else ((), None)
  if averaged:
    head = weights['head']
  else:
    weights = personal_head.split(weights)[0]
  if head is None:
    head = personal_head.unseen_head(model, 4)
  num_epochs = fine_tuning_epochs + (0 if known or averaged else 2)
  start = oracle.to_vector(personal_head.merge(weights, head))
  client, seed = CLIENTS[0], tf.constant([4, 4])
  tuned, _, _ = personal.train(start, client.pairs(), config, seed, num_epochs)
  query = oracle.make_client((6, 7, 8), salt=9)

  method = fed_per.fed_per(model, config, num_classes=4)
  use = method.known_client() if known else method.new_client()
  adapt = tf.function(use.adapt, autograph=False)

  np.testing.assert_array_equal(
      oracle.to_vector(use.start(weights, memory)), start
  )
  empty = personal.EMPTY_CLIENT.examples()
  np.testing.assert_array_equal(
      oracle.to_vector(adapt(weights, memory, empty, seed)), start
  )
  adapted = adapt(weights, memory, client.examples(), seed)
  np.testing.assert_allclose(
      oracle.to_vector(adapted), tuned, rtol=1e-4, atol=1e-5
  )
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == personal.predict(tuned, query.pairs())
  assert (np.abs(tuned - start).max() > 0.1) == (num_epochs > 0)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'optimizer': 'adam', 'momentum': 0.5}, 'momentum.*found 0.5'),
        ({'head_of_evaluation': 'own'}, "`head_of_evaluation`.*found 'own'"),
        ({'epochs': -1}, '`epochs`.*found -1'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(fed_per.PAPER, **change)
