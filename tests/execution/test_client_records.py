"""What is kept of clients' data sets, and that it is never out of date."""

import collections
import gc

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.execution import client_records
from tff_meta.execution import in_process

_EXAMPLES = tff.SequenceType(tff.TensorType(np.float32, [None]))


def _dense_total():
  """A computation that makes clients' examples dense: their sum and number."""

  @tff.tensorflow.computation(_EXAMPLES)
  def dense_sum(dataset):
    dense = dataset.reduce(
        np.zeros([0], np.float32), lambda all, batch: tf.concat([all, batch], 0)
    )
    return tf.reduce_sum(dense), tf.size(dense)

  @tff.federated_computation(tff.FederatedType(_EXAMPLES, tff.CLIENTS))
  def total(data):
    return tff.federated_sum(tff.federated_map(dense_sum, data))

  return total


_TOTAL = _dense_total()


def _context(**options):
  """A context's records, and `_TOTAL` in it."""
  context = in_process.InProcessContext(**options)
  return context._records, lambda data: context.invoke(_TOTAL, data)


def _batches(values, batch_size=2):
  array = np.asarray(values, np.float32)
  return tf.data.Dataset.from_tensor_slices(array).batch(batch_size)


def test_what_comes_twice_is_read_once_and_kept():
  records, total = _context()
  data = [_batches([1, 2, 3]), _batches([4])]

  results = [total(data) for _ in range(4)]

  assert results == [(10, 4)] * 4
  assert records.kept_bytes == 4 * 4


def test_what_says_what_its_only_element_is_is_not_looked_into():
  """That one is shuffled does not matter then."""
  records, total = _context()
  one = _batches([1, 2, 3], batch_size=3).shuffle(2)
  one.only_element = tf.constant([1.0, 2.0, 3.0])
  data = [one, _batches([4]).shuffle(2)]

  results = [total(data) for _ in range(2)]

  assert results == [(10, 4)] * 2
  assert records.kept_bytes == 3 * 4


@pytest.mark.parametrize(
    'element',
    [None, [1.0], np.float32([1.0]), tf.constant([1]), tf.constant([[1.0]])],
)
def test_an_only_element_of_another_type_is_refused(element):
  _, total = _context()
  data = _batches([1])
  data.only_element = element
  with pytest.raises(TypeError, match='Client 0: Expected `only_element`'):
    total([data])


def _add(dataset, start):
  return dataset.reduce(
      (start, tf.zeros([0, 1])),
      lambda state, e: (state[0] + e['n'], tf.concat([state[1], e['x']], 0)),
  )


def _count_of_pairs(dataset):
  return dataset.reduce(
      tf.constant(0, tf.int64),
      lambda number, _: number + dataset.reduce(number, lambda n, _: n + 1),
  )


@pytest.mark.parametrize(
    'compute',
    [
        lambda dataset: _add(dataset, 5),
        lambda dataset: (_add(dataset, 1), _add(dataset.repeat(2), 1)),
        lambda dataset: (_add(dataset, 1), _count_of_pairs(dataset)),
        lambda dataset: dataset.get_single_element(),
    ],
)
def test_an_only_element_is_read_as_its_data_set_is(compute):
  """Also where something else is computed of it."""
  element = collections.OrderedDict(x=tf.constant([[1.0], [2.0]]), n=3)
  plain, told = (tf.data.Dataset.from_tensors(element) for _ in range(2))
  told.only_element = tf.nest.map_structure(tf.constant, element)
  kind = tff.SequenceType(tff.types.tensorflow_to_type(plain.element_spec))
  of_one = tff.tensorflow.computation(compute, kind)

  @tff.federated_computation(tff.FederatedType(kind, tff.CLIENTS))
  def of_all(data):
    return tff.federated_map(of_one, data)

  expected, found = in_process.InProcessContext().invoke(of_all, [plain, told])
  tf.nest.map_structure(np.testing.assert_array_equal, expected, found)


def test_data_sets_that_end_take_only_their_own_with_them():
  records, total = _context()
  data = [_batches([1, 2]), _batches([3]), _batches([4, 5, 6])]
  for _ in range(2):
    total(data)

  del data[1]
  assert records.kept_bytes == 5 * 4
  data.clear()
  assert records.kept_bytes == 0


def test_a_client_of_one_batch_is_kept_without_a_copy():
  x, y = np.ones([3, 2], np.float32), np.zeros([3], np.int32)
  part = corpus_lib.LabelledExamples(x, y)
  corpus = corpus_lib.Corpus('own', part, part._replace(x=2 * x), 1, np.float32)
  dataset = federated_dataset.FederatedDataset.from_corpus(
      corpus, partitioners.iid, 1, 0
  )
  (client_id,) = dataset.client_ids()
  data = dataset.tff_client_data(client_id)['examples']
  kind = tff.SequenceType(tff.types.tensorflow_to_type(data.element_spec))

  @tff.tensorflow.computation(kind)
  def dense_sum(dataset):
    return tf.reduce_sum(episodes.to_examples(dataset).x)

  @tff.federated_computation(tff.FederatedType(kind, tff.CLIENTS))
  def total(data):
    return tff.federated_sum(tff.federated_map(dense_sum, data))

  context = in_process.InProcessContext()
  assert [context.invoke(total, [data]) for _ in range(2)] == [6, 6]
  (kept,) = context._records._kept.values()
  kept_x, _ = tf.raw_ops.OptionalGetValue(
      optional=kept.record,
      output_types=[tf.float32, tf.int32],
      output_shapes=[None, None],
  )
  held_x = dataset.client(client_id).train.x
  assert np.shares_memory(np.asarray(kept_x), held_x)


@pytest.mark.parametrize('num_elements', [0, 1, 5])
def test_what_is_read_is_what_the_reduction_says(num_elements):
  """In the order of the elements, of several dtypes, and of growing shapes."""
  element = collections.OrderedDict(
      name=np.str_, x=tff.TensorType(np.float32, [None])
  )

  def reduction(dataset):
    start = tf.constant('>'), tf.zeros([0, 2]), tf.constant(0)
    return dataset.reduce(
        start,
        lambda state, e: (
            tf.strings.join([state[0], e['name']]),
            tf.concat([state[1], e['x'][tf.newaxis]], 0),
            2 * state[2] + 1,
        ),
    )

  @tff.federated_computation(
      tff.FederatedType(tff.SequenceType(element), tff.CLIENTS)
  )
  def reduced(data):
    return tff.federated_map(
        tff.tensorflow.computation(reduction, tff.SequenceType(element)), data
    )

  x = np.random.default_rng(2).normal(size=[num_elements, 2])
  names = tf.constant(list('abcde')[:num_elements], tf.string)
  dataset = tf.data.Dataset.from_tensor_slices(
      collections.OrderedDict(name=names, x=np.float32(x))
  )
  context = in_process.InProcessContext()

  for _ in range(3):  # Read, read and kept, not read.
    [found] = context.invoke(reduced, [dataset])
    for actual, expected in zip(found, reduction(dataset), strict=True):
      np.testing.assert_array_equal(actual, expected)


def test_only_what_lives_is_kept():
  records, total = _context()
  data = [_batches([1, 2, 3]), _batches([4])]
  for _ in range(3):
    total(data)

  del data[0]
  gc.collect()

  assert records.kept_bytes == 4
  assert total(data) == (4, 1)


def test_what_was_not_used_for_longest_goes_first():
  records, total = _context(kept_bytes=6 * 4)
  first, second, third = (_batches([i, i, i]) for i in range(3))
  for data in ([first], [first], [second], [second], [first], [third]):
    total(data)
  assert records.kept_bytes == 6 * 4

  total([third])  # Now kept, and `second` is not.

  kept = [key[0] for key in records._kept]
  assert kept == [id(first), id(third)]
  assert total([second]) == (3, 3)


def test_more_than_the_budget_is_not_kept():
  records, total = _context(kept_bytes=8)
  data = [_batches([1, 2, 3])]

  assert [total(data) for _ in range(3)] == [(6, 3)] * 3
  assert records.kept_bytes == 0


def _of_generator(values):
  return tf.data.Dataset.from_generator(
      lambda: (np.asarray([v], np.float32) for v in values),
      output_signature=tf.TensorSpec([None], tf.float32),
  )


def test_a_generator_is_read_in_every_round():
  records, total = _context()
  values = [1, 2]
  data = [_of_generator(values)]
  total(data), total(data)

  values.append(3)

  assert total(data) == (6, 3)
  assert records.kept_bytes == 0


def test_a_variable_is_read_in_every_round():
  records, total = _context()
  factor = tf.Variable(1.0)
  data = [_batches([1, 2]).map(lambda x: x * factor)]
  total(data), total(data)

  factor.assign(10.0)

  assert total(data) == (30, 2)
  assert records.kept_bytes == 0


def test_a_file_is_read_in_every_round(tmp_path):
  records, total = _context()
  path = tmp_path / 'numbers.txt'
  path.write_text('1\n2\n')
  data = [
      tf.data.TextLineDataset(str(path)).map(
          lambda line: tf.strings.to_number([line])
      )
  ]
  total(data), total(data)

  path.write_text('5\n')

  assert total(data) == (5, 1)
  assert records.kept_bytes == 0


def test_a_file_that_a_map_reads_is_read_in_every_round(tmp_path):
  records, total = _context()
  path = tmp_path / 'number'

  def read(name):
    return tf.reshape(tf.strings.to_number(tf.io.read_file(name)), [1])

  data = [tf.data.Dataset.from_tensors(str(path)).map(read)]
  for number in range(4):
    path.write_text(str(number))
    assert total(data) == (number, 1)
  assert records.kept_bytes == 0


def test_arrays_may_change_after_a_data_set_is_made_of_them():
  _, total = _context()
  array = np.ones(4, np.float32)
  data = [tf.data.Dataset.from_tensors(array)]
  expected = total(data), total(data), total(data)

  array[:] = 7

  assert expected == ((4, 4),) * 3
  assert total(data) == (4, 4)


@pytest.mark.parametrize(
    ('change', 'is_fixed'),
    [
        (lambda d: d, True),
        (lambda d: d.map(lambda x: 2 * x), True),
        (lambda d: d.repeat(2).take(3).skip(1).prefetch(1), True),
        (lambda d: d.concatenate(d).unbatch().batch(3), True),
        (lambda d: tf.data.Dataset.zip((d, d)).map(lambda x, y: x + y), True),
        (lambda d: d.repeat(), False),
        (lambda d: d.cache(), False),
        (lambda d: d.shuffle(4), False),
        (lambda d: d.shuffle(4, seed=1), False),
        (lambda d: d.map(lambda x: x + tf.random.uniform([])), False),
        (lambda d: d.map(lambda x: tf.py_function(abs, [x], x.dtype)), False),
    ],
)
def test_what_cannot_change(change, is_fixed):
  assert client_records.is_fixed(change(_batches([1, 2, 3]))) is is_fixed


def test_data_sets_whose_loop_needs_more_are_kept_as_they_are():
  """The reduction starts from a value of the server: it cannot be kept."""

  @tff.tensorflow.computation(_EXAMPLES, np.float32)
  def sum_from(dataset, start):
    return dataset.reduce(start, lambda s, batch: s + tf.reduce_sum(batch))

  @tff.federated_computation(
      tff.FederatedType(_EXAMPLES, tff.CLIENTS),
      tff.FederatedType(np.float32, tff.SERVER),
  )
  def sums(data, start):
    starts = tff.federated_broadcast(start)
    return tff.federated_map(sum_from, (data, starts))

  context = in_process.InProcessContext()
  data = [_batches([1, 2, 3]), _batches([])]

  for start in (0.0, 10.0, 20.0):
    assert context.invoke(sums, (data, start)) == [6 + start, start]
  assert context._records.kept_bytes == 3 * 4


_STRUCTURE = tff.to_type(
    collections.OrderedDict(b=np.int32, a=(np.float32, np.bool_))
)


@pytest.mark.parametrize(
    'value',
    [
        {'b': 1, 'a': (2.0, True)},
        {'a': [2.0, True], 'b': 1},
        tff.structure.Struct([('b', 1), ('a', (2.0, True))]),
    ],
)
def test_leaves_are_in_the_order_of_the_type(value):
  leaves = list(client_records.argument_leaves(value, _STRUCTURE))
  assert leaves == [1, 2.0, True]


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        ({'b': 1}, 'Expected the fields'),
        ({'b': 1, 'a': (2.0,)}, 'Expected a structure of 2'),
        (tf.data.Dataset.range(1), r"the fields \['b', 'a'\], found a _Range"),
    ],
)
def test_structures_that_do_not_fit(value, message):
  with pytest.raises(TypeError, match=message):
    list(client_records.argument_leaves(value, _STRUCTURE))


def test_what_gives_clients_their_memory_is_named():
  kind = tff.to_type(collections.OrderedDict(salt=np.int32, memory=np.int32))
  with pytest.raises(TypeError, match="found .'salt'.*Tip: .*next_round"):
    list(client_records.argument_leaves({'salt': 1}, kind))


def test_lists_become_data_sets():
  kind = tff.SequenceType(
      collections.OrderedDict(x=tff.TensorType(np.float32, [None]), y=np.int32)
  )
  values = [
      dict(x=[1.0], y=1),
      dict(x=[2.0, 3.0], y=2),
      dict(x=[4.0, 5.0], y=3),
  ]

  dataset = client_records.to_dataset(values, kind)

  found = [(list(e['x'].numpy()), int(e['y'])) for e in dataset]
  assert found == [([1], 1), ([2, 3], 2), ([4, 5], 3)]
  assert not list(client_records.to_dataset([], kind))


def test_elements_of_very_many_shapes():
  context = in_process.InProcessContext()

  @tff.tensorflow.computation(_EXAMPLES, np.float32)
  def sum_from(dataset, start):
    return dataset.reduce(start, lambda s, batch: s + tf.reduce_sum(batch))

  @tff.federated_computation(
      tff.FederatedType(_EXAMPLES, tff.CLIENTS),
      tff.FederatedType(np.float32, tff.CLIENTS),
  )
  def sums(data, starts):
    return tff.federated_map(sum_from, (data, starts))

  data = tf.data.Dataset.range(4000).map(lambda i: tf.ones([1 + i % 3]))

  for _ in range(3):
    assert context.invoke(sums, ([data], [1.0])) == [1 + 7999]


@tff.tensorflow.computation(_EXAMPLES, np.int64)
def _first(dataset, number):
  start = tf.cast(number, tf.float32) * 0
  return dataset.take(number).reduce(
      start, lambda s, batch: s + tf.reduce_sum(batch)
  )


@tff.federated_computation(
    tff.FederatedType(_EXAMPLES, tff.CLIENTS),
    tff.FederatedType(np.int64, tff.CLIENTS),
)
def _first_of_each(data, numbers):
  return tff.federated_map(_first, (data, numbers))


@pytest.mark.parametrize(
    'dataset',
    [
        _batches([1, 1], 1).repeat(),
        _batches([1], 1).repeat(10**9),
        _batches(np.ones(10**6), 1),
    ],
    ids=['without end', 'long', 'many elements'],
)
def test_only_what_is_worth_it_is_read_whole(dataset):
  context = in_process.InProcessContext()

  for _ in range(3):
    assert context.invoke(_first_of_each, ([dataset], [3])) == [3]

  assert context._records.kept_bytes == 0


def test_what_is_read_for_a_computation_goes_with_it():
  context = in_process.InProcessContext()
  data = [_batches([1, 2, 3])]
  for _ in range(3):
    total = _dense_total()
    context.invoke(total, data), context.invoke(total, data)
    assert context._records.kept_bytes == 12
    del total
    gc.collect()
    assert context._records.kept_bytes == 0


def test_what_comes_out_goes_in_again_without_a_copy():
  kind = tff.TensorType(np.float32, [3])
  double = tff.tensorflow.computation(lambda x: 2 * x, kind)
  context = in_process.InProcessContext()

  once = context.invoke(double, np.float32([1, 2, 3]))

  taken = client_records.to_tensor(once, kind)
  assert np.shares_memory(np.asarray(taken), once)
  with pytest.raises(ValueError, match='read-only'):
    once[:] = 0
  part = once[1:]
  assert context.invoke(double, once).tolist() == [4, 8, 12]
  del once, taken
  gc.collect()
  assert part.tolist() == [4, 6]
  before = len(client_records._VIEWED)
  del part
  gc.collect()
  assert len(client_records._VIEWED) == before - 1


def test_named_tuples_in_another_order_are_refused():
  pair = collections.namedtuple('Pair', ['y', 'x'])
  dataset = tf.data.Dataset.from_tensors(pair(1.0, 2.0))
  kind = tff.SequenceType(collections.OrderedDict(y=np.float32, x=np.float32))

  with pytest.raises(TypeError, match='in the order of their names'):
    client_records.check_type(dataset, kind)
