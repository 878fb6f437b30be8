"""FedBABU: a head that learns only at the end."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import registry
from tff_meta.baselines import fed_babu

CLIENTS = oracle.CLIENTS
CONFIG = dataclasses.replace(
    fed_babu.PAPER,
    learning_rate=0.2,
    momentum=0.5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    fine_tuning_learning_rate=0.3,
    fine_tuning_epochs=3,
)
ADAM = dataclasses.replace(
    CONFIG, optimizer='adam', momentum=0.0, learning_rate=0.05, uniform=False
)


@functools.cache
def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'fed_babu',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


@pytest.mark.parametrize('uniform, body', [(True, -0.25), (False, -0.625)])
def test_one_round_by_hand(uniform, body):
  """One step of rate 1/2 on the body: b = 1/2 and b = -1, as in FedPer's test.

  Their plain mean is -1/4; by 1 and 3 examples it is -0.625. The head keeps
  its kernel (1, -1) and its bias 0.
  """
  config = fed_babu.FedBabuConfig(
      learning_rate=0.5, momentum=0.0, epochs=1, batch_size=0, uniform=uniform
  )
  process = plain_process.PlainProcess(
      'fed_babu', personal.scalar_model(), config, num_classes=2
  )

  result = personal.run(process, [personal.SCALAR_CLIENTS])

  np.testing.assert_allclose(result.weights[1]['body']['b'], body, rtol=1e-6)
  personal.assert_same(result.weights[1]['head'], result.weights[0]['head'])


@pytest.mark.parametrize(
    'config, decay_rounds, factors, build_process',
    [
        (CONFIG, 4, [1, 1, 0.1, 0.01], registry.build),
        (CONFIG, 0, [1, 1], plain_process.PlainProcess),
        (ADAM, 3, [1, 1, 0.1, 0.01], plain_process.PlainProcess),
    ],
    ids=['falling', 'sgd', 'adam-falling'],
)
def test_rounds_by_a_naive_implementation(
    config, decay_rounds, factors, build_process
):
  """The head stays as it was drawn, bit by bit, weight decay or not.

  The rate falls after 2 and 3 of 4 rounds, and of 3 (1.5 and 2.25 rounded up).
  """
  config = dataclasses.replace(config, decay_rounds=decay_rounds)
  process = build(config, build_process)
  result = personal.run(process, [CLIENTS] * len(factors))
  w = oracle.to_vector(result.weights[0])
  for round_num, factor in enumerate(factors):
    before = w
    trained = [
        personal.train(
            w,
            client.pairs(),
            config,
            personal.client_seed(round_num, client),
            config.epochs,
            personal.BODY,
            rate=factor * config.learning_rate,
        )[0]
        for client in CLIENTS
    ]
    sizes = [1 if config.uniform else len(c.y) for c in CLIENTS]
    w = oracle.mean(trained, sizes)
    weights = result.weights[round_num + 1]
    np.testing.assert_allclose(
        oracle.to_vector(weights), w, rtol=1e-4, atol=2e-5
    )
    personal.assert_same(weights['head'], result.weights[0]['head'])
    assert np.abs(w - before).max() > 0.01 * factor
  assert np.ptp(result.weights[0]['head']['kernel']) > 0.1


@pytest.mark.parametrize(
    'fine_tuned, part, batch_size',
    [
        ('all', personal.ALL, 4),
        ('body', personal.BODY, 4),
        ('head', personal.HEAD, 0),
    ],
    ids=['all', 'body', 'head'],
)
def test_fine_tuning(fine_tuned, part, batch_size):
  """With the whole set as a batch, an epoch is one step."""
  config = dataclasses.replace(
      CONFIG, fine_tuned=fine_tuned, fine_tuning_batch_size=batch_size
  )
  model = oracle.build_model()
  weights = model.with_head(4).initialize(tf.constant([8, 9]))
  start = oracle.to_vector(weights)
  client, seed = CLIENTS[1], tf.constant([4, 4])
  tuned, _, count = personal.train(
      start,
      client.pairs(),
      config,
      seed,
      3,
      part,
      rate=0.3,
      batch_size=batch_size,
  )
  assert count == 3 * len(client.y)
  query = oracle.make_client((6, 7, 8), salt=9)

  use = fed_babu.fed_babu(model, config, num_classes=4).known_client()
  adapt = tf.function(use.adapt, autograph=False)

  personal.assert_same(use.start(weights, ()), weights)
  empty = personal.EMPTY_CLIENT.examples()
  personal.assert_same(adapt(weights, (), empty, seed), weights)
  adapted = adapt(weights, (), client.examples(), seed)
  np.testing.assert_allclose(
      oracle.to_vector(adapted), tuned, rtol=1e-4, atol=1e-5
  )
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == personal.predict(tuned, query.pairs())
  assert np.abs(tuned - start).max() > 0.1


def test_prototypes_do_not_use_the_head():
  model = oracle.build_model()
  weights = model.with_head(4).initialize(tf.constant([8, 9]))
  client, query = CLIENTS[0], oracle.make_client((6, 7, 8), salt=9)
  use = fed_babu.fed_babu_proto(model, fed_babu.PAPER, 4).known_client()
  adapted = use.adapt(weights, (), client.examples(), tf.constant([1, 1]))
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == personal.nearest_class(
      oracle.to_vector(weights), client.pairs(), query.pairs()
  )
  assert set(predicted) == {0, 1}  # The client has no other class.


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'optimizer': 'adam'}, 'momentum.*found 0.9'),
        ({'fine_tuned': 'none'}, "`fine_tuned`.*found 'none'"),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(fed_babu.PAPER, **change)
