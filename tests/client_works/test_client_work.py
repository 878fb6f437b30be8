"""The client work: metrics, seeds, state, clients that are not finite."""

import collections
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import models
from tff_meta.client_works import client_work
from tff_meta.learners import local_sgd

MODEL = models.build('mlp', (2,), None)
DATA_TYPE = client_work.client_data_type((2,))
NAN = float('nan')


def client_data(rows, batch_sizes=None, salts=(0,)):
  """Examples `rows` [n, 2] of labels 0, 1, ..., in batches of given sizes."""
  x = np.array(rows, np.float32).reshape(-1, 2)
  y = np.arange(len(x), dtype=np.int32)

  bounds = np.cumsum([0, *(batch_sizes or [len(x)])])
  batches = [
      tf.data.Dataset.from_tensors(
          collections.OrderedDict(x=x[start:stop], y=y[start:stop])
      )
      for start, stop in itertools.pairwise(bounds)
  ]
  return collections.OrderedDict(
      examples=functools.reduce(lambda a, b: a.concatenate(b), batches),
      salt=tf.data.Dataset.from_tensor_slices(np.array(salts, np.int32)),
  )


def client_update(weights, message, data):
  """Sends `sum y x - weights`; the report's loss is n times the message."""
  examples, salt, memory = data
  assert memory == ()
  labels = tf.cast(examples.y, tf.float32)
  update = tf.linalg.matvec(examples.x, labels, transpose_a=True) - weights
  count = tf.reduce_sum(examples.mask)
  return client_work.ClientOutput(
      update,
      count + tf.cast(salt, tf.float32),
      local_sgd.LocalReport(count * message, count),
      signal=count,
  )


# Counts examples; the message is ten times the state.
COUNTER = client_work.ClientWorkState(
    initialize=lambda: tf.constant(1.0),
    message=lambda state: 10 * state,
    next=lambda state, total: state + total,
    aggregator=tff.aggregators.SumFactory(),
)


def build():
  return client_work.build_client_work(
      tff.TensorType(np.float32, [2]),
      MODEL,
      client_update,
      COUNTER,
      num_classes=5,
  )


@pytest.fixture(scope='module')
def work():
  return build().process


def test_a_round(work):
  """Updates by client in order, state 1 + 5 examples, loss the message 10."""
  weights = np.array([1.0, -1.0], np.float32)
  clients = [
      client_data([[1, 2], [3, 4], [5, 6]], salts=(7,)),
      client_data([[0, 0], [8, 9]], salts=()),
  ]
  output = work.next(work.initialize(), [weights] * 2, clients)
  # 0 (1, 2) + 1 (3, 4) + 2 (5, 6) - (1, -1) = (12, 17); (8, 9) - (1, -1).
  assert [r.update.tolist() for r in output.result] == [[12, 17], [7, 10]]
  # Without a salt it is zero.
  assert [r.update_weight for r in output.result] == [10, 2]
  assert output.measurements == {
      'train': {
          'loss': 10,
          'num_examples': 5,
          'num_clients': 2,
          'num_trained_clients': 2,
          'num_non_finite_clients': 0,
          'num_bad_label_clients': 0,
          'num_empty_clients': 0,
          'max_update_norm': np.float32(np.hypot(12, 17)),
      },
      'signal': (),
  }
  assert output.state[0] == 6
  again = work.next(output.state, [weights], clients[:1])
  assert again.measurements['train']['loss'] == 60 and again.state[0] == 9


def test_any_batching_is_the_same(work):
  rows = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 1]]
  weights = np.zeros(2, np.float32)
  clients = [client_data(rows, sizes) for sizes in ([5], [2, 3], [1, 0, 4])]
  output = work.next(work.initialize(), [weights] * 3, clients)
  first, *others = (r.update.tolist() for r in output.result)
  assert others == [first, first]


def test_a_client_that_is_not_finite_counts_for_nothing(work):
  """Update, weight and report are zero: (NaN, 1), and infinity in a row."""
  weights = np.zeros(2, np.float32)
  clients = [
      client_data([[1, 1], [NAN, 1]]),
      client_data([[1, 1], [3, 4]]),
      client_data([[1, 1], [1, np.inf]]),
  ]
  output = work.next(work.initialize(), [weights] * 3, clients)
  updates = [r.update.tolist() for r in output.result]
  assert updates == [[0, 0], [3, 4], [0, 0]]
  assert [r.update_weight for r in output.result] == [0, 2, 0]
  train = output.measurements['train']
  assert train['num_non_finite_clients'] == 2 and train['num_clients'] == 3
  assert train['num_examples'] == 2 and train['loss'] == 10
  assert output.state[0] == 3


def test_a_message_that_is_not_finite_spoils_the_report_alone(work):
  """A finite update does not count either when its loss is NaN."""
  output = work.next(
      (np.float32(NAN), ()),
      [np.zeros(2, np.float32)],
      [client_data([[1, 1]] * 2)],
  )
  assert output.result[0].update_weight == 0
  assert output.measurements['train']['num_non_finite_clients'] == 1


def test_a_client_with_a_label_of_no_class_counts_for_nothing(work):
  """There are five classes; the third client has six examples, the last 5."""
  negative = client_data([[1, 1]] * 2)
  negative['examples'] = negative['examples'].map(
      lambda batch: {**batch, 'y': batch['y'] - 1}
  )
  rows = [[1, 1], [3, 4]]
  output = work.next(
      work.initialize(),
      [np.zeros(2, np.float32)] * 3,
      [negative, client_data(rows), client_data([[1, 1]] * 6)],
  )
  assert [r.update.tolist() for r in output.result] == [[0, 0], [3, 4], [0, 0]]
  assert [r.update_weight for r in output.result] == [0, 2, 0]
  train = output.measurements['train']
  assert train['num_bad_label_clients'] == train['num_non_finite_clients'] == 2
  assert train['num_examples'] == 2 and train['loss'] == 10
  assert output.state[0] == 3


def test_a_client_without_examples(work):
  output = work.next(
      work.initialize(), [np.zeros(2, np.float32)], [client_data([])]
  )
  assert output.result[0].update_weight == 0
  train = output.measurements['train']
  assert np.isnan(train['loss']) and np.isnan(train['max_update_norm'])
  assert train['num_empty_clients'] == 1
  assert train['num_trained_clients'] == train['num_non_finite_clients'] == 0


def test_the_largest_norm_is_of_the_updates_that_count(work):
  """Of (0, 0), (3e30, 4e30), whose square is no float32, and infinity."""
  clients = [
      client_data([[1, 1], [0, 0]]),
      client_data([[1, 1], [3e30, 4e30]]),
      client_data([[1, 1], [np.inf, 0]]),
      client_data([]),
  ]
  output = work.next(work.initialize(), [np.zeros(2, np.float32)] * 4, clients)
  train = output.measurements['train']
  np.testing.assert_allclose(train['max_update_norm'], 5e30, rtol=1e-6)
  assert train['num_trained_clients'] == 2


def test_a_client_that_trained_on_nothing_did_not_train(work):
  """Its salt gives it a weight, so that its update counts nevertheless."""
  output = work.next(
      work.initialize(), [np.ones(2, np.float32)], [client_data([], salts=(3,))]
  )
  train = output.measurements['train']
  assert output.result[0].update_weight == 3
  assert np.isnan(train['loss']) and train['num_trained_clients'] == 0
  np.testing.assert_allclose(train['max_update_norm'], np.sqrt(2), rtol=1e-6)


def test_the_type_of_client_data():
  assert str(DATA_TYPE) == (
      '<examples=<x=float32[?,2],y=int32[?]>*,salt=int32*>'
  )


def messages(state_functions, num_rounds):
  """The messages of the first rounds."""
  state, found = state_functions.initialize(), []
  for _ in range(num_rounds):
    message = state_functions.message(state)
    seed = getattr(message, 'seed', message)
    found.append(tuple(seed.numpy().tolist()))
    state = state_functions.next(state, ())
  return found


def test_the_seed_of_a_run_stays():
  assert len(set(messages(client_work.run_seed(5), 4))) == 1
  assert messages(client_work.run_seed(5), 1) != messages(
      client_work.run_seed(6), 1
  )


def test_the_state_beside_the_seeds_goes_on_by_itself():
  """And the seed of all rounds is that of `run_seed`."""
  plain = client_work.ClientWorkState(
      lambda: tf.constant(1), lambda state: state * 10, lambda s, r: s + r
  )
  state_functions = client_work.round_seed(5, plain)
  state = state_functions.initialize()
  seeds = []
  for expected in (10, 40, 70):
    message = state_functions.message(state)
    assert message.message == expected
    assert message.run_seed.numpy().tolist() == [0, 5]
    seeds.append(tuple(message.seed.numpy()))
    state = state_functions.next(state, 3)
  assert [list(s) for s in seeds] == [
      list(s) for s in messages(client_work.round_seed(5), 3)
  ]


def test_every_round_and_run_has_its_own_seed():
  first, again, other = (
      messages(client_work.round_seed(seed), 5) for seed in (5, 5, 6)
  )
  assert first == again
  assert len({*first, *other}) == 10


@pytest.mark.parametrize(
    'arguments, message',
    [
        ((2**31,), '`seed` in the int32 range, found 2147483648'),
        ((-(2**31) - 1,), '`seed` in the int32 range, found -2147483649'),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    client_work.round_seed(*arguments)
  with pytest.raises(ValueError, match=message):
    client_work.run_seed(*arguments)


def update_with_memory(weights, message, data):
  """Remembers the sum of all x it has seen, and how often it took part."""
  total = tf.reduce_sum(data.examples.x)
  seen, rounds = data.memory.value['seen'], data.memory.value['rounds']
  count = tf.reduce_sum(data.examples.mask)
  return client_work.ClientOutput(
      weights + tf.cast(data.memory.present, tf.float32),
      count,
      local_sgd.LocalReport(message * 0, count),
      memory=collections.OrderedDict(seen=seen + total, rounds=rounds + 1),
  )


INITIAL_MEMORY = collections.OrderedDict(
    seen=np.float32(100), rounds=np.int32(0)
)


@pytest.fixture(scope='module')
def memory_work():
  return client_work.build_client_work(
      tff.TensorType(np.float32),
      MODEL,
      update_with_memory,
      client_work.ClientWorkState(
          lambda: tf.constant(1.0), lambda s: s, lambda s, r: s
      ),
      lambda: tf.nest.map_structure(tf.constant, INITIAL_MEMORY),
      num_classes=2,
  )


def with_memory(rows, value):
  dataset = client_work.memory_dataset(INITIAL_MEMORY, value)
  return collections.OrderedDict(client_data(rows), memory=dataset)


def test_clients_remember_what_they_kept_and_nobody_else_does(memory_work):
  """New, known, not finite, not finite and new, without examples."""
  old = collections.OrderedDict(seen=np.float32(7), rounds=np.int32(4))
  clients = [
      with_memory([[1, 2], [3, 4]], None),
      with_memory([[5, 6]], old),
      with_memory([[NAN, 1]], old),
      with_memory([[NAN, 1]], None),
      with_memory([], old),
      with_memory([], None),
  ]
  output, memories = memory_work.next_with_memory(
      np.float32(1), [np.float32(0)] * 6, clients
  )
  assert [(bool(m.present), *m.value.values()) for m in memories] == [
      (True, 110, 1),
      (True, 18, 5),
      (True, 7, 4),
      (False, 100, 0),
      (True, 7, 4),
      (False, 100, 0),
  ]
  # Whether it was sampled before is seen by the client, from its memory.
  assert [float(r.update) for r in output.result] == [0, 1, 0, 0, 1, 0]
  assert output.measurements['train']['num_non_finite_clients'] == 2
  plain = memory_work.process.next(np.float32(1), [np.float32(0)] * 6, clients)
  assert [float(r.update) for r in plain.result] == [0, 1, 0, 0, 1, 0]
  assert plain.measurements == output.measurements


def test_a_client_without_memory_has_no_second_form(memory_work):
  assert build().next_with_memory is None
  assert 'memory=<seen=float32,rounds=int32>*' in str(
      memory_work.process.next.type_signature.parameter
  )
