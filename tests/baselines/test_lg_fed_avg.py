"""LG-FedAvg: first layers stay with the clients, last ones are averaged."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import composition
from tff_meta import models
from tff_meta import registry
from tff_meta.baselines import fed_avg
from tff_meta.baselines import lg_fed_avg
from tff_meta.learners import personal_head

CLIENTS = oracle.CLIENTS
# The second client is in all rounds, the others miss one.
COHORTS = (CLIENTS[:2], CLIENTS[1:], CLIENTS)
CONFIG = lg_fed_avg.LgFedAvgConfig(
    learning_rate=0.3,
    momentum=0.5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    uniform=False,
    new_client_epochs=2,
)


@functools.cache
def run(averaged_rounds, uniform=False, build=plain_process.PlainProcess):
  config = dataclasses.replace(
      CONFIG, averaged_rounds=averaged_rounds, uniform=uniform
  )
  process = build(
      'lg_fed_avg',
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


def body_vector(memory):
  body = memory['layers']['body']
  return np.concatenate([np.ravel(body['kernel']), body['bias']])


@pytest.mark.parametrize(
    'averaged_rounds, uniform, build',
    [
        (0, False, plain_process.PlainProcess),
        (1, True, registry.build),
        (2, False, plain_process.PlainProcess),
    ],
)
def test_rounds_with_changing_cohorts(averaged_rounds, uniform, build):
  """All is averaged, then bodies stay with those who have trained one since.

  After one averaged round the client of the second and third round has a body
  of its own in the third, the first client takes the server's, though both took
  part before.
  """
  result = run(averaged_rounds, uniform, build)
  w, own = initial_vector(), {}
  for round_num, cohort in enumerate(COHORTS):
    is_local = round_num >= averaged_rounds
    trained, sizes = [], []
    for client in cohort:
      start = w.copy()
      if client.salt in own:
        start[personal.BODY] = own[client.salt]
      seed = personal.client_seed(round_num, client)
      mine, _, _ = personal.train(
          start, client.pairs(), CONFIG, seed, CONFIG.epochs
      )
      trained.append(mine)
      sizes.append(1 if uniform else len(client.y))
      if is_local:
        own[client.salt] = mine[personal.BODY]
    body = w[personal.BODY]
    w = oracle.mean(trained, sizes)
    if is_local:
      w[personal.BODY] = body
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **oracle.TOLERANCE
    )
    kept = result.heads[round_num]
    counted = {s: m for s, m in kept.items() if m['num_rounds']}
    assert counted.keys() == own.keys()
    for salt, memory in counted.items():
      np.testing.assert_allclose(
          body_vector(memory), own[salt], **oracle.TOLERANCE
      )
  assert kept[2]['num_rounds'] == 3 - averaged_rounds
  # Two clients' bodies are not one.
  assert np.abs(own[1] - own[2]).max() > 0.05


def test_the_servers_first_layers_stay_after_the_averaged_rounds():
  """Bit by bit, whatever the clients have; in these rounds it is FedAvg."""
  result = run(2)
  personal.assert_same(result.weights[3]['body'], result.weights[2]['body'])
  theirs = plain_process.PlainProcess(
      'fed_avg',
      oracle.build_model(),
      fed_avg.FedAvgConfig(
          learning_rate=0.3,
          momentum=0.5,
          epochs=2,
          batch_size=4,
          weight_decay=0.1,
      ),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  expected = personal.run(theirs, COHORTS[:2])
  for mine, their in zip(result.weights[:3], expected.weights, strict=True):
    np.testing.assert_allclose(
        oracle.to_vector(mine), oracle.to_vector(their), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    'shared_layers, own', [(1, 'conv1 conv2 dense1 dense2'), (3, 'conv1 conv2')]
)
def test_which_layers_stay(shared_layers, own):
  """LeNet has three dense layers, of which the last is the classifier."""
  process = plain_process.PlainProcess(
      'lg_fed_avg',
      models.build('lenet', (28, 28, 1), None),
      lg_fed_avg.LgFedAvgConfig(shared_layers=shared_layers),
      num_classes=10,
  )
  layers = process.initial_memory['layers']
  assert not layers['head']
  names = [name.rpartition('_')[0] for name in layers['body']]
  assert list(dict.fromkeys(names)) == own.split()
  assert process.initial_memory['num_rounds'] == 0


def test_rounds_with_two_shared_layers():
  """Of three: the first is averaged in the first round only."""
  model = models.build('fedec_mlp', (4, 4, 1), None)
  process = plain_process.PlainProcess(
      'lg_fed_avg',
      model,
      lg_fed_avg.LgFedAvgConfig(shared_layers=2, averaged_rounds=1),
      num_classes=3,
  )
  rng = np.random.default_rng(0)
  clients = [
      oracle.Client(
          rng.normal(size=(9, 4, 4, 1)).astype(np.float32),
          np.arange(9, dtype=np.int32) % 3,
          salt,
      )
      for salt in (1, 2)
  ]
  result = personal.run(process, [clients] * 3)
  for kind in ('kernel', 'bias'):
    first, second, head = (
        [w[part][name] for w in result.weights]
        for part, name in (
            ('body', f'dense1_{kind}'),
            ('body', f'dense2_{kind}'),
            ('head', kind),
        )
    )
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[1], first[3])
    for before, after in zip(second[:-1], second[1:], strict=True):
      assert not np.array_equal(before, after)
    for before, after in zip(head[:-1], head[1:], strict=True):
      assert not np.array_equal(before, after)
    own = [result.heads[-1][salt]['layers']['body'] for salt in (1, 2)]
    assert list(own[0]) == ['dense1_kernel', 'dense1_bias']
    assert not np.array_equal(own[0][f'dense1_{kind}'], first[3])
    assert not np.array_equal(*(layers[f'dense1_{kind}'] for layers in own))


def two_models():
  initialize = oracle.build_model().with_head(oracle.NUM_CLASSES).initialize
  return initialize(tf.constant([1, 2])), initialize(tf.constant([3, 4]))


@pytest.mark.parametrize('num_rounds, present', [(0, False), (0, True), (2, 1)])
def test_a_known_client_has_its_own_layers_under_the_servers(
    num_rounds, present
):
  """The server's, if it has taken part in averaged rounds only."""
  server, own = two_models()
  layers, _ = personal_head.split(own)
  value = {'layers': layers, 'num_rounds': tf.constant(num_rounds)}
  known = lg_fed_avg.lg_fed_avg(
      oracle.build_model(), CONFIG, oracle.NUM_CLASSES
  ).known_client()
  memory = personal.memory(value, present=bool(present))
  expected = dict(server, body=(own if num_rounds else server)['body'])
  query = oracle.make_client((6, 7, 8), salt=9)
  for adapted in (
      known.start(server, memory),
      known.adapt(server, memory, CLIENTS[0].examples(), tf.constant([5, 6])),
  ):
    for part, weights in expected.items():
      personal.assert_same(adapted[part], weights)
    predicted = known.predict(adapted, query.examples()).numpy().tolist()
    assert predicted == personal.predict(
        oracle.to_vector(expected), query.pairs()
    )


def test_a_new_client_trains_the_servers_model():
  server, _ = two_models()
  new = lg_fed_avg.lg_fed_avg(
      oracle.build_model(), CONFIG, oracle.NUM_CLASSES
  ).new_client()
  personal.assert_same(new.start(server, ()), server)
  adapted = new.adapt(server, (), CLIENTS[0].examples(), tf.constant([5, 6]))
  expected, _, _ = personal.train(
      oracle.to_vector(server), CLIENTS[0].pairs(), CONFIG, (5, 6), 2
  )
  np.testing.assert_allclose(
      oracle.to_vector(adapted), expected, **oracle.TOLERANCE
  )


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'shared_layers': 0}, '`shared_layers` of at least 1, found 0'),
        ({'averaged_rounds': -1}, '`averaged_rounds`.*found -1'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)


def test_layers_that_are_not_there_are_named():
  with pytest.raises(
      ValueError,
      match='`shared_layers`.*leave some other layer of .lenet., found 4',
  ):
    lg_fed_avg.lg_fed_avg(
        models.build('lenet', (28, 28, 1), None),
        lg_fed_avg.LgFedAvgConfig(shared_layers=4),
        num_classes=10,
    )
