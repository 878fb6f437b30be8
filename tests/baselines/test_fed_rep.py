"""FedRep: first the head, then the body; only the body is shared."""

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
from tff_meta.baselines import fed_babu
from tff_meta.baselines import fed_rep
from tff_meta.learners import personal_head

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS[:2], CLIENTS)
PERSONAL = dataclasses.replace(
    fed_rep.PAPER,
    learning_rate=0.3,
    head_epochs=2,
    body_epochs=1,
    batch_size=4,
    weight_decay=0.1,
    uniform=False,
)


@functools.cache
def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'fed_rep',
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
  """One step of rate 1/2 on the head, then one on the body.

  With b = 0 both probabilities are 1/2 and the embedding is 0, so the head's
  step leaves the kernel (1, -1) and makes the first client's bias (1/4, -1/4),
  the second's (-1/4, 1/4) (see FedPer's test). The logits are now the bias,
  which is 1/2 in favour of the true class: its probability is s = 1 / (1 +
  exp(-1/2)). The gradient in b is -2 (1 - s) x for class 0 and 2 (1 - s) x for
  class 1, so b = (1 - s) for x = 1 of class 0 and -2 (1 - s) for x = 2 of class
  1. The server's plain mean is -(1 - s) / 2.
  """
  config = fed_rep.FedRepConfig(
      learning_rate=0.5, head_epochs=1, body_epochs=1, batch_size=0
  )
  process = plain_process.PlainProcess(
      'fed_rep', personal.scalar_model(), config, num_classes=2
  )

  result = personal.run(process, [personal.SCALAR_CLIENTS])

  wrong = 1 - 1 / (1 + np.exp(-0.5))
  np.testing.assert_allclose(
      result.weights[1]['body']['b'], -wrong / 2, rtol=1e-5
  )
  for salt, bias in ((1, [0.25, -0.25]), (2, [-0.25, 0.25])):
    np.testing.assert_allclose(result.heads[0][salt]['bias'], bias, rtol=1e-6)
  # Over both steps of all examples: log 2, then -log s.
  np.testing.assert_allclose(
      result.metrics[0]['loss'],
      (np.log(2) - np.log(1 - wrong)) / 2,
      rtol=1e-6,
  )
  assert result.metrics[0]['num_examples'] == 8


def naive_client(w, client, config, round_num):
  seeds = tf.unstack(
      tf.random.experimental.stateless_split(
          personal.client_seed(round_num, client)
      )
  )
  for part, num_epochs, seed in (
      (personal.HEAD, config.head_epochs, seeds[0]),
      (personal.BODY, config.body_epochs, seeds[1]),
  ):
    w, _, _ = personal.train(w, client.pairs(), config, seed, num_epochs, part)
  return w


def test_two_rounds_by_a_naive_implementation():
  """Head and body have optimizers of their own, new ones in every round.

  All clients of the first round come again in the second.
  """
  result = personal.run(build(PERSONAL, registry.build), COHORTS)
  w, heads = initial_vector(), {}
  first_head = w[personal.HEAD]
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes = [], []
    for client in cohort:
      start = w.copy()
      start[personal.HEAD] = heads.get(client.salt, first_head)
      own = naive_client(start, client, PERSONAL, round_num)
      trained.append(own)
      sizes.append(len(client.y))
      heads[client.salt] = own[personal.HEAD]
    w = oracle.mean(trained, sizes)
    actual = oracle.to_vector(result.weights[round_num + 1])
    assert len(actual) == 9  # The server has no head.
    tolerance = dict(rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(actual, w[personal.BODY], **tolerance)
    for salt, head in result.heads[round_num].items():
      np.testing.assert_allclose(
          personal.head_vector(head), heads[salt], **tolerance
      )


def test_without_epochs_on_the_head_it_is_fed_babu():
  """The common random head never changes then."""
  shared = dict(learning_rate=0.3, momentum=0.5, batch_size=0)
  config = fed_rep.FedRepConfig(head_epochs=0, body_epochs=2, **shared)
  other = fed_babu.FedBabuConfig(epochs=2, **shared)
  theirs = plain_process.PlainProcess(
      'fed_babu',
      oracle.build_model(),
      other,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  result = personal.run(build(config), COHORTS)
  expected = personal.run(theirs, COHORTS)
  for mine, their in zip(result.weights, expected.weights, strict=True):
    np.testing.assert_allclose(
        oracle.to_vector(mine),
        oracle.to_vector(their)[personal.BODY],
        rtol=1e-6,
    )
  for head in result.heads[-1].values():
    personal.assert_same(head, expected.weights[0]['head'])


def test_without_epochs_on_the_body_it_never_changes():
  config = dataclasses.replace(PERSONAL, body_epochs=0)
  result = personal.run(build(config), COHORTS)
  for weights in result.weights[1:]:
    personal.assert_same(weights, result.weights[0])
  assert len(result.heads[-1]) == 3


@pytest.mark.parametrize(
    'name, num_classes, start_head, num_epochs',
    [
        ('known_client', 4, 'own', 3),
        ('new_client', 4, 'unseen', 2),
        ('new_class', 3, 'unseen', 2),
    ],
)
def test_use(name, num_classes, start_head, num_epochs):
  """A head alone is trained."""
  config = dataclasses.replace(
      PERSONAL, known_client_epochs=3, new_client_epochs=2
  )
  model = oracle.build_model()
  weights = model.with_head(4).initialize(tf.constant([8, 9]))
  heads = {
      'own': model.with_head(4).initialize(tf.constant([5, 5]))['head'],
      'unseen': personal_head.unseen_head(model, num_classes),
  }
  memory = personal.memory(heads['own']) if start_head == 'own' else ()
  weights, _ = personal_head.split(weights)
  start = oracle.to_vector(personal_head.merge(weights, heads[start_head]))
  client, seed = CLIENTS[1], tf.constant([4, 4])
  tuned, _, _ = personal.train(
      start, client.pairs(), config, seed, num_epochs, personal.HEAD
  )
  query = oracle.make_client((6, 7, 8), salt=9)

  use = getattr(fed_rep.fed_rep(model, config, num_classes), name)()
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
  assert np.abs(tuned - start).max() > 0.1


def test_a_known_client_of_the_paper_trains_nothing():
  model = oracle.build_model()
  weights = model.with_head(4).initialize(tf.constant([8, 9]))
  shared, head = personal_head.split(weights)
  use = fed_rep.fed_rep(model, fed_rep.PAPER, num_classes=4).known_client()
  adapted = use.adapt(
      shared,
      personal.memory(head),
      CLIENTS[0].examples(),
      tf.constant([1, 1]),
  )
  personal.assert_same(adapted, weights)


def test_prototypes_need_neither_head_nor_memory():
  model = oracle.build_model()
  weights = model.with_head(4).initialize(tf.constant([8, 9]))
  client, query = CLIENTS[1], oracle.make_client((6, 7, 8), salt=9)
  use = fed_rep.fed_rep_proto(model, fed_rep.PAPER, 4).known_client()
  shared, _ = personal_head.split(weights)
  adapted = use.adapt(shared, (), client.examples(), tf.constant([1, 1]))
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == personal.nearest_class(
      oracle.to_vector(weights), client.pairs(), query.pairs()
  )
  assert set(predicted) == {1, 2}  # The client has no other class.


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'optimizer': 'adam'}, 'momentum.*found 0.5'),
        ({'head_epochs': -1}, '`head_epochs`.*found -1'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(fed_rep.PAPER, **change)
