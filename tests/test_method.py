"""From a method to a learning process."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import aggregation
from tff_meta import composition
from tff_meta import datasets
from tff_meta import method
from tff_meta import models
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.data import client_sampling
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.learners import local_sgd

SEED = 9
MODEL = models.build('mlp', (1,), None)


def client_data(value, count, salt=0):
  x = np.full((count, 1), value, np.float32)
  batch = collections.OrderedDict(x=x, y=np.zeros(count, np.int32))
  return collections.OrderedDict(
      examples=tf.data.Dataset.from_tensors(batch),
      salt=tf.data.Dataset.from_tensors(np.int32(salt)),
  )


def initial_weights(seed):
  del seed
  body = collections.OrderedDict(w=tf.constant([2.0, 4.0]))
  return collections.OrderedDict(body=body, head=collections.OrderedDict())


def move_to_mean(weights, client):
  """Moves the weights to the mean of x; the loss tells the seed."""
  count = tf.reduce_sum(client.examples.mask)
  target = tf.math.divide_no_nan(tf.reduce_sum(client.examples.x), count)
  update = tf.nest.map_structure(lambda w: w - target, weights)
  # Below 2^24 a float32 holds a whole number exactly.
  seed = tf.math.floormod(client.seed[0] + client.seed[1], 2**20)
  report = local_sgd.LocalReport(count * tf.cast(seed, tf.float32), count)
  return client_work.ClientOutput(update, count, report)


MOVING = method.Method(1, initial_weights, move_to_mean)


def build(moving=MOVING, **options):
  return method.build_process(moving, MODEL, seed=SEED, **options)


@pytest.fixture(scope='module')
def process():
  return build()


def weights_of(process, state):
  return process.get_model_weights(state).trainable['body']['w'].tolist()


CLIENTS = [client_data(1.0, 1), client_data(5.0, 3)]


def test_the_weights_move_by_the_weighted_mean(process):
  """To (1 * 1 + 3 * 5) / 4 = 4."""
  state = process.initialize()
  assert weights_of(process, state) == [2, 4]
  output = process.next(state, CLIENTS)
  assert weights_of(process, output.state) == [4, 4]
  assert output.metrics['client_work']['train']['num_examples'] == 4
  assert list(output.metrics) == [
      'distributor',
      'client_work',
      'aggregator',
      'finalizer',
  ]


def test_every_round_has_the_seed_of_round_seed(process):
  state, losses = process.initialize(), []
  for _ in range(3):
    output = process.next(state, CLIENTS[:1])
    state = output.state
    losses.append(output.metrics['client_work']['train']['loss'])
  expected = []
  for round_num in range(3):
    fold_in = tf.random.experimental.stateless_fold_in
    seed = fold_in(fold_in((0, SEED), round_num), 0)  # The client's salt is 0.
    expected.append(float(tf.reduce_sum(seed) % 2**20))
  assert losses == expected and len(set(losses)) == 3


def test_only_clients_without_weight_leave_the_weights(process):
  """Neither NaN, which the division of zero by zero would give, nor a move."""
  output = process.next(process.initialize(), [client_data(7.0, 0)] * 2)
  assert weights_of(process, output.state) == [2, 4]
  # Infinite pixels count for nothing beside a client that is finite.
  spoiled = [client_data(np.inf, 2), CLIENTS[1]]
  output = process.next(process.initialize(), spoiled)
  assert weights_of(process, output.state) == [5, 5]


@pytest.mark.parametrize(
    'of_all',
    [
        aggregation.Plain(),
        aggregation.Compressed(),
        aggregation.Secure(),
        aggregation.Robust(),
        aggregation.Robust(rule='centered'),
    ],
    ids=str,
)
def test_a_server_with_moments_rests_when_nobody_counts(of_all):
  """Adam's moments of the round before would move the model without cause."""
  process = build(
      server_optimizer=optimizers.build_optimizer('adam', 0.1),
      aggregation=of_all,
  )
  first = process.next(process.initialize(), CLIENTS).state
  second = process.next(first, [client_data(7.0, 0)] * 2).state
  assert weights_of(process, second) == weights_of(process, first) != [2, 4]
  assert str(second.finalizer) == str(first.finalizer)


def test_server_optimizer_and_aggregator_are_those_given():
  """A sum of the moves -(-1 - 3, ...) at rate 1/2 instead of their mean."""
  process = build(
      server_optimizer=tff.learning.optimizers.build_sgdm(0.5),
      aggregation=aggregation.OfModels(
          tff.aggregators.as_weighted_aggregator(tff.aggregators.SumFactory())
      ),
  )
  output = process.next(process.initialize(), CLIENTS)
  # 2 + ((1 - 2) + (5 - 2)) / 2 and 4 + ((1 - 4) + (5 - 4)) / 2.
  assert weights_of(process, output.state) == [3, 3]


def test_a_robust_mean_outlives_a_huge_update(process):
  """Of a client that is at 1e30, which the metric shows; others move on."""
  cohort = [*CLIENTS, client_data(1e30, 1)]
  plain = process.next(process.initialize(), cohort)
  train = plain.metrics['client_work']['train']
  np.testing.assert_allclose(train['max_update_norm'], 2**0.5 * 1e30, 1e-6)
  assert min(weights_of(process, plain.state)) > 1e29

  robust = build(aggregation=aggregation.Robust())
  state = robust.next(robust.initialize(), cohort).state
  first, second = weights_of(robust, state)
  assert 2 < first < 6 and 2 < second < 6 and first != 4
  # Where nobody has any example, the weights stay.
  state = robust.next(robust.initialize(), [client_data(7.0, 0)]).state
  assert weights_of(robust, state) == [2, 4]


def build_with_counter():
  """A process whose state is <weights, rounds done>."""

  @tff.tensorflow.computation
  def initial_state():
    return (initial_weights(SEED), tf.constant(0))

  state_type = initial_state.type_signature.result
  work = client_work.build_client_work(
      state_type,
      MODEL,
      lambda state, message, data: move_to_mean(
          state[0],
          method.ClientInput(data.examples, message.seed, (), (), ()),
      ),
      client_work.round_seed(SEED),
      num_classes=1,
  )
  result_type = work.process.next.type_signature.result.result.member
  mean = tff.aggregators.MeanFactory(no_nan_division=True).create(
      result_type.update, result_type.update_weight
  )
  return composition.with_model_weights(
      composition.compose(
          initial_state,
          work,
          mean,
          composition.build_stateless_finalizer(
              state_type,
              result_type.update,
              lambda state, update: (
                  weights_lib.subtract(state[0], update),
                  state[1] + 1,
              ),
          ),
      ),
      get=lambda state: state[0],
      put=lambda state, weights: (weights, tf.constant(100)),
  )


def test_a_richer_state_speaks_model_weights():
  process = build_with_counter()
  state = process.next(process.initialize(), CLIENTS).state
  assert weights_of(process, state) == [4, 4]
  assert state.global_model_weights[1] == 1
  weights = process.get_model_weights(state)
  doubled = tf.nest.map_structure(lambda w: 2 * w, weights)
  written = process.set_model_weights(state, doubled)
  assert weights_of(process, written) == [8, 8]
  assert written.global_model_weights[1] == 100
  # All else is left as it was, the round number among it.
  assert written.client_work[0].round_num == state.client_work[0].round_num == 1
  output = process.next(written, CLIENTS[1:])
  assert weights_of(process, output.state) == [5, 5]
  # No finalizer of TFF's here that would refuse the NaN of zero by zero.
  output = process.next(written, [client_data(7.0, 0)] * 2)
  assert weights_of(process, output.state) == [8, 8]


def test_initial_weights_and_rounds_have_different_seeds():
  """A run of seed 0 must not draw its weights from its first round's seed."""
  for seed in (0, 1, 9):
    state, _ = client_work.round_seed(seed).initialize()
    own = tuple(composition.initial_seed(seed).numpy())
    assert own != tuple(state.seed.numpy())
  assert tuple(composition.initial_seed(3).numpy()) != tuple(
      composition.initial_seed(4).numpy()
  )


def remember(weights, client):
  """Moves by the times the client has taken part before; remembers them."""
  moved = tf.nest.map_structure(
      lambda w: tf.fill(tf.shape(w), -client.memory.value), weights
  )
  count = tf.reduce_sum(client.examples.mask)
  seed = tf.math.floormod(tf.reduce_sum(client.fixed_seed), 2**20)
  return client_work.ClientOutput(
      moved,
      count,
      local_sgd.LocalReport(count * tf.cast(seed, tf.float32), count),
      signal=client.message + count,
      memory=client.memory.value + 1,
  )


def forget(weights, client):
  """Keeps nothing."""
  return remember(weights, client)._replace(memory=())


REMEMBERING = method.Method(
    1,
    initial_weights,
    remember,
    memory=lambda seed: tf.constant(0.0),
    state=lambda seed: client_work.ClientWorkState(
        lambda: tf.constant(0.0),
        lambda state: state,
        lambda state, total: total,
    ),
    channels=(method.Channel('counts', tf.TensorSpec([])),),
)


@pytest.fixture(scope='module')
def stateful():
  """Its server sums the examples seen and broadcasts the sum."""
  return build(REMEMBERING)


def with_memory(process, client, value):
  dataset = client_work.memory_dataset(process.initial_memory, value)
  return collections.OrderedDict(client, memory=dataset)


def test_clients_of_a_stateful_process_remember(stateful):
  """Weights move by the mean of 0 and 2, (1 * 2 + 3 * 0) / 4."""
  assert isinstance(stateful, composition.StatefulLearningProcess)
  assert isinstance(stateful, tff.learning.templates.LearningProcess)
  assert stateful.initial_memory == 0
  data = [
      with_memory(stateful, client, value)
      for client, value in zip(CLIENTS, (2.0, None), strict=True)
  ]
  state = stateful.initialize()

  output, memories = stateful.next_with_memory(state, data)

  assert weights_of(stateful, output.state) == [2.5, 4.5]
  assert [float(m.value) for m in memories] == [3, 1]
  assert all(m.present for m in memories)
  plain = stateful.next(state, data)
  tf.nest.map_structure(
      np.testing.assert_array_equal, tuple(plain.state), tuple(output.state)
  )
  assert plain.metrics == output.metrics
  # The sum of the signals 1 + 3 is broadcast, so the next sum is 2 * 4 + 4.
  again = stateful.next(output.state, data).state
  assert [s.client_work[0][1] for s in (output.state, again)] == [4, 12]


def test_a_clients_fixed_seed_stays_and_differs_from_the_others(stateful):
  data = [
      with_memory(stateful, client_data(1.0, 1, salt), None) for salt in (3, 4)
  ]
  state, losses = stateful.initialize(), []
  for client in (data[0], data[0], data[1]):
    output = stateful.next(state, [client])
    state = output.state
    losses.append(output.metrics['client_work']['train']['loss'])
  assert losses[0] == losses[1] != losses[2]


def test_a_process_without_memory_is_a_plain_one(process):
  assert not isinstance(process, composition.StatefulLearningProcess)


@pytest.mark.parametrize('seed', [-1, 2**31])
def test_a_seed_that_is_none_is_named(seed):
  corpus = datasets.load_corpus('digit_pairs')
  with pytest.raises(ValueError, match='Expected `seed`'):
    composition.initial_seed(seed)
  with pytest.raises(ValueError, match='Expected `seed`'):
    client_sampling.sample_cohort(['a', 'b'], 1, seed, 0)
  with pytest.raises(ValueError, match='Expected `seed`'):
    federated_dataset.FederatedDataset.few_round(corpus, 64, seed)
  with pytest.raises(ValueError, match='Expected `seed`'):
    federated_dataset.FederatedDataset.from_corpus(
        corpus, partitioners.iid, 3, seed
    )


@pytest.mark.parametrize(
    'changes, expected',
    [
        (dict(channels=()), r'declared, \(\), found .*shape=\(\)'),
        (
            dict(channels=2 * REMEMBERING.channels),
            'one channel at most in the signal .* found counts, counts',
        ),
        (
            dict(channels=[REMEMBERING.channels[0]._replace(place='nowhere')]),
            'of the channel .counts. as .* found .nowhere.',
        ),
        (dict(client_update=forget), r'`memory` that a client .* found \(\)'),
    ],
)
def test_what_clients_send_is_declared(changes, expected):
  with pytest.raises(ValueError, match=expected):
    build(dataclasses.replace(REMEMBERING, **changes))


def test_what_a_method_does_not_take_is_refused():
  summed = dataclasses.replace(MOVING, sums_updates=True)
  mean = tff.aggregators.MeanFactory()
  with pytest.raises(ValueError, match='no aggregator .*MeanFactory'):
    build(summed, aggregation=aggregation.OfModels(mean))
  with pytest.raises(TypeError, match=r'aggregation.OfModels\('):
    build(summed, aggregation=mean)
  composed = dataclasses.replace(MOVING, compose=lambda *_: None)
  with pytest.raises(ValueError, match='no `server_optimizer`'):
    build(composed, server_optimizer=tff.learning.optimizers.build_sgdm(0.5))


class _Unweighted(aggregation.Plain):

  def of_models(self, num_parts, summed):
    return tff.aggregators.UnweightedMeanFactory()


class _OfNothing(aggregation.Plain):

  def of_sums(self, num_parts, bound):
    return None


@pytest.mark.parametrize(
    'kind, expected',
    [
        (
            _Unweighted,
            r'of_models .* a tff.aggregators.WeightedAggregationFact',
        ),
        (_OfNothing, r'of_sums .*\.UnweightedAggregationFactory, found None'),
    ],
)
def test_an_aggregation_returns_what_aggregates(kind, expected):
  with pytest.raises(TypeError, match=expected):
    build(REMEMBERING, aggregation=kind())
