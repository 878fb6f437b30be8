"""The in-process context against TFF's own runtime, and by itself."""

import asyncio
import collections
from concurrent import futures
import functools
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.core.impl.computation import computation_impl

from tff_meta.execution import computation_graph
from tff_meta.execution import in_process
from tff_meta.execution import native
from tff_meta.models import layers

_ELEMENT = collections.OrderedDict(
    x=tf.TensorSpec([None, 4], tf.float32), y=tf.TensorSpec([None], tf.int32)
)


@pytest.fixture(scope='module')
def context():
  return in_process.InProcessContext()


@pytest.fixture(scope='module')
def native_context():
  return native.create_native_context()


def _run(context, function, *args):
  with tff.framework.get_context_stack().install(context):
    return function(*args)


def _leaves(value):
  """The numbers of a result, whatever its containers."""
  return [
      np.asarray(leaf)
      for leaf in tff.structure.flatten(
          tff.structure.from_container(value, recursive=True)
      )
  ]


def _assert_equal(actual, expected, **tolerance):
  for one, other in zip(_leaves(actual), _leaves(expected), strict=True):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    if tolerance and one.dtype.kind == 'f':
      np.testing.assert_allclose(one, other, **tolerance)
    else:
      np.testing.assert_array_equal(one, other)


def _keras_model():
  """A perceptron with batch-wise loss; a function, as TFF wants it."""

  def init(seed):
    return tf.keras.initializers.GlorotUniform(seed)

  network = tf.keras.Sequential(
      [
          tf.keras.layers.InputLayer((4,)),
          tf.keras.layers.Dense(5, 'relu', kernel_initializer=init(1)),
          tf.keras.layers.Dense(3, kernel_initializer=init(2)),
      ]
  )
  return tff.learning.models.from_keras_model(
      network,
      loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      input_spec=_ELEMENT,
      metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
  )


def _client_data(num_clients=3, seed=0):
  """Clients of 5, 8, 11, ... examples in batches of 4."""
  random = np.random.default_rng(seed)
  return [
      tf.data.Dataset.from_tensor_slices(
          collections.OrderedDict(
              x=random.normal(size=(5 + 3 * k, 4)).astype(np.float32),
              y=random.integers(0, 3, 5 + 3 * k).astype(np.int32),
          )
      ).batch(4)
      for k in range(num_clients)
  ]


def _sgd():
  return tff.learning.optimizers.build_sgdm(0.3)


@functools.cache  # Its graphs are traced once for all tests, then.
def _fed_avg(**options):
  return tff.learning.algorithms.build_weighted_fed_avg(
      _keras_model, _sgd(), **options
  )


def _without_noise():
  return tff.learning.algorithms.build_unweighted_fed_avg(
      _keras_model,
      _sgd(),
      model_aggregator=(
          tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
              0.0, 3.0, 0.5
          )
      ),
  )


_TFF_PROCESSES = {
    'fed_avg': _fed_avg,
    'fed_avg_iterator': lambda: _fed_avg(
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR
    ),
    'fed_prox': lambda: tff.learning.algorithms.build_weighted_fed_prox(
        _keras_model, 0.5, _sgd()
    ),
    'mime_lite': lambda: tff.learning.algorithms.build_weighted_mime_lite(
        _keras_model, tff.learning.optimizers.build_sgdm(0.3, 0.9)
    ),
    'fed_sgd': lambda: tff.learning.algorithms.build_fed_sgd(_keras_model),
    'fed_eval': lambda: tff.learning.algorithms.build_fed_eval(_keras_model),
    'robust': lambda: _fed_avg(
        model_aggregator=tff.learning.robust_aggregator()
    ),
    'private': _without_noise,
    'compression': lambda: _fed_avg(
        model_aggregator=tff.learning.compression_aggregator()
    ),
}


# Made of what the others have; the first takes longest.
_SLOW = ('mime_lite', 'fed_prox', 'robust', 'compression')


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(
            name, marks=pytest.mark.slow if name in _SLOW else pytest.mark.ci
        )
        for name in _TFF_PROCESSES
    ],
)
def test_tffs_own_processes_agree(name, context, native_context):
  process = _TFF_PROCESSES[name]()
  data = _client_data()
  state = _run(native_context, process.initialize)
  _assert_equal(_run(context, process.initialize), state)
  ours, theirs = state, state

  for _ in range(2):
    ours = _run(context, process.next, ours, data)
    theirs = _run(native_context, process.next, theirs, data)
    _assert_equal(ours, theirs, rtol=1e-5, atol=1e-5)
    ours, theirs = ours.state, theirs.state

  assert type(ours) is type(theirs)


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def _secure_sums(x):
  return (
      tff.federated_secure_sum(x, 100),
      tff.federated_secure_sum_bitwidth(x, 8),
  )


def test_secure_sums_are_plain_ones(context, native_context):
  numbers = [np.int32(n) for n in (3, 5, 7)]
  for one in (context, native_context):
    assert _run(one, _secure_sums, numbers) == (15, 15)


@pytest.mark.ci
def test_secure_aggregation_is_that_of_plain_sums(context, native_context):
  """TFF's runtime computes plain sums in the place of secure ones."""
  process = tff.learning.algorithms.build_unweighted_fed_avg(
      _keras_model,
      _sgd(),
      model_aggregator=tff.learning.secure_aggregator(weighted=False),
  )
  data = _client_data()
  state = _run(context, process.initialize)

  _assert_equal(
      _run(context, process.next, state, data),
      _run(native_context, process.next, state, data),
      rtol=1e-5,
      atol=1e-5,
  )


@tff.tensorflow.computation(np.float32, np.int32)
def _times(number, key):
  return number * tf.cast(key, tf.float32)


@tff.tensorflow.computation(tff.SequenceType(np.float32))
def _sum_of(sequence):
  return sequence.reduce(np.float32(0), lambda total, value: total + value)


@tff.federated_computation(
    tff.FederatedType(tff.TensorType(np.int32, [2]), tff.CLIENTS),
    tff.FederatedType(np.float32, tff.SERVER),
)
def _select_and_sum(keys, number):
  max_key = tff.federated_value(np.int32(9), tff.SERVER)
  selected = tff.federated_select(keys, max_key, number, _times)
  return tff.federated_map(_sum_of, selected)


def test_federated_select(context):
  keys = [np.array(pair, np.int32) for pair in ([1, 2], [0, 9])]

  result = _run(context, _select_and_sum, keys, np.float32(0.5))

  np.testing.assert_array_equal(result, [1.5, 4.5])


@tff.tensorflow.computation(np.float32)
def _double(x):
  return 2 * x


@tff.tensorflow.computation(np.float32, np.float32)
def _add(x, y):
  return x + y


@tff.federated_computation(tff.SequenceType(np.float32))
def _sum_of_doubles(values):
  doubled = tff.sequence_map(_double, values)
  reduced = tff.sequence_reduce(doubled, np.float32(100), _add)
  return reduced, tff.sequence_sum(values)


def test_sequence_intrinsics(context):
  reduced, total = _run(
      context, _sum_of_doubles, [np.float32(1), np.float32(2)]
  )

  assert (reduced, total) == (106, 3)


@pytest.mark.parametrize(
    ('kind', 'values'),
    [
        ((np.float32,), [(1.0,), (2.0,)]),
        ((np.float32, np.float32), [(1.0, 5.0), (2.0, 6.0)]),
        (collections.OrderedDict(b=np.float32), [{'b': 1.0}, {'b': 2.0}]),
    ],
)
def test_sequence_map_over_structures(kind, values, context):
  @tff.tensorflow.computation(tff.to_type(kind))
  def first(element):
    parts = element.values() if isinstance(element, dict) else element
    return list(parts)[0] + 0

  @tff.federated_computation(tff.SequenceType(tff.to_type(kind)))
  def firsts(sequence):
    return tff.sequence_sum(tff.sequence_map(first, sequence))

  assert context.invoke(firsts, values) == 3


@tff.tensorflow.computation(
    tff.TensorType(np.float32, [None]), np.float32, np.float32
)
def _shifted(x, shift, scale):
  return (x + shift) * scale


@tff.tensorflow.computation(tff.TensorType(np.float32, [None]))
def _total(x):
  return tf.reduce_sum(x)


@tff.federated_computation(
    tff.FederatedType(tff.TensorType(np.float32, [None]), tff.CLIENTS),
    tff.FederatedType(np.float32, tff.CLIENTS),
)
def _three_levels(x, scale):
  """Broadcasts that need the aggregates before; clients' values come out."""
  totals = tff.federated_map(_total, x)
  mean = tff.federated_broadcast(tff.federated_mean(totals))
  shifted = tff.federated_map(_shifted, (x, mean, scale))
  again = tff.federated_sum(tff.federated_map(_total, shifted))
  last = tff.federated_map(_add, (totals, tff.federated_broadcast(again)))
  return shifted, last, again, tff.federated_max(totals)


def test_aggregates_can_be_broadcast_again(context, native_context):
  x = [np.arange(n, dtype=np.float32) for n in (1, 4, 2)]
  scale = [np.float32(s) for s in (1, 2, 3)]

  shifted, last, again, most = _run(context, _three_levels, x, scale)

  # Totals are 0, 6 and 1, their mean is 7 / 3.
  expected = [(x[i] + np.float32(7 / 3)) * (i + 1) for i in range(3)]
  for one, other in zip(shifted, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6)
  sums = sum(array.sum() for array in expected)
  np.testing.assert_allclose(again, sums, rtol=1e-6)
  np.testing.assert_allclose(last, np.add([0, 6, 1], sums), rtol=1e-6)
  assert most == 6
  theirs = _run(native_context, _three_levels, x, scale)
  np.testing.assert_allclose(theirs[2], again, rtol=1e-6)


def test_clients_in_batches_come_out_in_their_places(context):
  x = [np.arange(n, dtype=np.float32) for n in (1, 4, 1, 2, 4, 4)]
  scale = [np.float32(s) for s in range(6)]
  batched = in_process.InProcessContext(batched_clients=2)

  expected = _run(context, _three_levels, x, scale)
  actual = _run(batched, _three_levels, x, scale)

  for part, other in zip(actual[:2], expected[:2], strict=True):
    for one, another in zip(part, other, strict=True):
      np.testing.assert_allclose(one, another, rtol=1e-6)
  np.testing.assert_allclose(actual[2:], expected[2:], rtol=1e-6)


def test_batches_of_several_sizes_normalise_each_by_itself(context):
  """At the same time oneDNN would write over each other's memory, and crash."""

  @tff.tensorflow.computation(tff.TensorType(np.float32, [None, 4, 4, 32]))
  def normalise(x):
    zeros, ones = tf.zeros([32]), tf.ones([32])

    def step(i, y):
      return i + 1, layers.batch_norm(y, zeros, ones, zeros) + x

    return tf.while_loop(lambda i, _: i < 20, step, (0, x))[1]

  @tff.federated_computation(
      tff.FederatedType(normalise.type_signature.parameter, tff.CLIENTS)
  )
  def all_clients(x):
    return tff.federated_map(normalise, x)

  rng = np.random.default_rng(0)
  sizes = [n for n in range(1, 21) for _ in range(1 + n % 4)]
  x = [rng.normal(size=[n, 4, 4, 32]).astype(np.float32) for n in sizes]
  batched = in_process.InProcessContext(batched_clients=4, parallel_clients=4)
  expected = _run(context, all_clients, x)

  def one_cohort(number):
    start = number % 20
    found = batched.invoke(all_clients, x[start:])
    for one, another in zip(found, expected[start:], strict=True):
      np.testing.assert_allclose(one, another, atol=1e-4)

  with futures.ThreadPoolExecutor(2) as pool:
    list(pool.map(one_cohort, range(20)))


def test_clients_that_turn_out_not_to_be_alike_are_an_error_with_a_tip():
  @tff.tensorflow.computation(tff.TensorType(np.float32, [None]))
  def num_positive(x):
    return tf.size(tf.boolean_mask(x, x > 0))

  @tff.federated_computation(
      tff.FederatedType(num_positive.type_signature.parameter, tff.CLIENTS)
  )
  def all_clients(x):
    return tff.federated_map(num_positive, x)

  batched = in_process.InProcessContext(batched_clients=2)
  with pytest.raises(ValueError, match='to be alike.*--batched_clients=1'):
    batched.invoke(all_clients, [np.float32([1, 2]), np.float32([1, -2])])


def test_clients_that_cannot_be_computed_together_are_refused():
  batched = in_process.InProcessContext(batched_clients=2)
  process = _fed_avg()  # Its clients go through their data sets.
  with pytest.raises(
      computation_graph.UnsupportedComputationError,
      match='they read data sets. Tip: --batched_clients=1',
  ):
    _run(batched, process.next, process.initialize(), _client_data(2))


@tff.federated_computation(
    tff.FederatedType(np.float32, tff.SERVER),
    tff.FederatedType(np.float32, tff.CLIENTS, all_equal=True),
)
def _no_cohort(server, everywhere):
  return tff.federated_map(_double, server), everywhere


def test_a_computation_without_a_cohort(context):
  assert _run(context, _no_cohort, 2.0, 3.0) == (4.0, 3.0)


def test_data_sets_and_strings_come_out(context):
  @tff.tensorflow.computation(tff.SequenceType(np.int32), np.str_)
  def squares(numbers, text):
    squared = numbers.map(lambda n: collections.OrderedDict(b=n, a=n * n))
    return squared, tf.strings.join([text, '!'])

  dataset, text = _run(context, squares, [1, 2, 3], 'a')

  assert [int(element['a']) for element in dataset] == [1, 4, 9]
  assert text == b'a!'


def test_same_bits_in_every_run_and_context():
  process = _fed_avg()
  state = process.initialize()
  first = _run(
      in_process.InProcessContext(), process.next, state, _client_data(5)
  )

  second = _run(
      in_process.InProcessContext(parallel_clients=5),
      process.next,
      state,
      _client_data(5),
  )

  _assert_equal(second, first)


def test_cohorts_of_any_size_need_one_trace(context, monkeypatch):
  process = _fed_avg()
  state = process.initialize()
  _run(context, process.next, state, _client_data(5))
  monkeypatch.setattr(
      computation_graph.ComputationGraph, '__init__', None
  )  # Compiles nothing.
  monkeypatch.setattr(tf.Graph, '__init__', None)  # Traces nothing.

  for num_clients in (3, 1, 7, 3):
    output = _run(context, process.next, state, _client_data(num_clients))
    examples = output.metrics['client_work']['train']['num_examples']
    assert examples == sum(5 + 3 * k for k in range(num_clients))


@pytest.mark.ci
def test_rounds_may_run_at_the_same_time(context):
  process = _fed_avg()
  state = process.initialize()
  sizes = [1, 4, 2, 6, 3, 5] * 3
  data = {size: _client_data(size) for size in set(sizes)}
  alone = {
      size: context.invoke(process.next, (state, data[size])) for size in data
  }

  with futures.ThreadPoolExecutor(6) as pool:
    outputs = pool.map(
        lambda size: context.invoke(process.next, (state, data[size])), sizes
    )

  for size, output in zip(sizes, outputs, strict=True):
    _assert_equal(output, alone[size])


def test_asynchronous_calls(context):
  asynchronous = in_process.AsyncInProcessContext(context)

  async def run():
    with tff.framework.get_context_stack().install(asynchronous):
      return await asyncio.gather(*(_double(float(i)) for i in range(4)))

  assert asyncio.run(run()) == [0, 2, 4, 6]


def test_rounds_can_be_merged_from_several_contexts(native_context):
  """With TFF's context for computations that are dealt over several others."""
  contexts = [
      in_process.AsyncInProcessContext(in_process.InProcessContext())
      for _ in range(2)
  ]
  merging = tff.backends.native.create_mergeable_comp_execution_context(
      contexts
  )
  process = _fed_avg()
  state = process.initialize()
  data = _client_data(4)

  merged = _run(merging, process.next, state, data)

  expected = _run(native_context, process.next, state, data)
  _assert_equal(merged, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ci
def test_clients_can_be_dealt_over_devices():
  """In a process of its own, whose CPU counts as three devices."""
  program = textwrap.dedent(
      """
      import numpy as np, tensorflow as tf, tensorflow_federated as tff
      from tff_meta.execution import in_process, native
      cpu = tf.config.list_physical_devices('CPU')[0]
      tf.config.set_logical_device_configuration(
          cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
      import tests.execution.test_in_process as tests
      in_process.set_in_process_context()
      process = tests._fed_avg()
      state = process.initialize()
      x = [np.arange(n, dtype=np.float32) for n in (1, 4, 2, 3)]
      for size in (2, 4, 7):
        outputs = []
        for devices in (['/CPU:0'], ['/CPU:0', '/CPU:1', '/CPU:2']):
          context = in_process.InProcessContext(devices)
          outputs.append(context.invoke(
              process.next, (state, tests._client_data(size))))
          levels = context.invoke(
              tests._three_levels, (x, [np.float32(s) for s in range(4)]))
          outputs.append(levels)
        tests._assert_equal(outputs[2], outputs[0], rtol=1e-5, atol=1e-5)
        for one, other in zip(outputs[1][0], outputs[3][0]):
          np.testing.assert_allclose(one, other, rtol=1e-5)
        tests._assert_equal(outputs[3][1:], outputs[1][1:], rtol=1e-5)
      print('the same')
      native.end_process(0)
  """
  )
  root = pathlib.Path(__file__).parents[2]

  done = subprocess.run(
      [sys.executable, '-c', program],
      cwd=root,
      capture_output=True,
      text=True,
      check=False,
  )

  assert done.stdout == 'the same\n', done.stderr


def test_what_is_not_supported_is_named_before_it_runs(context):
  @tff.federated_computation(tff.FunctionType(np.float32, np.float32))
  def apply(function):
    return function(np.float32(1))

  with pytest.raises(
      computation_graph.UnsupportedComputationError, match='functions'
  ):
    context.invoke(apply, _double)


_BLOCKS = tff.framework
_INT = tff.TensorType(np.int32)


def _x_is(*numbers, then):
  """`let x = number, ... in then`."""
  names = [('x', _BLOCKS.Literal(number, _INT)) for number in numbers]
  return _BLOCKS.Block(names, then)


def _names_in_nested_blocks():
  """A function sees the x where it is made; an inner x ends with its block."""
  x = _BLOCKS.Reference('x', _INT)
  function = _BLOCKS.Lambda('unused', _INT, x)
  call = _BLOCKS.Call(_BLOCKS.Reference('f', function.type_signature), x)
  one, two = _BLOCKS.Literal(1, _INT), _BLOCKS.Literal(2, _INT)
  function_and_two = [('f', function), ('x', two)]
  return {
      'one block': _BLOCKS.Block([('x', one), *function_and_two], call),
      'two blocks': _x_is(1, then=_BLOCKS.Block(function_and_two, call)),
      'after a block': _x_is(
          1, then=_BLOCKS.Block([('unused', _x_is(2, then=x))], x)
      ),
      'the last of two': _x_is(2, 1, then=x),
      'a parameter': _x_is(
          2, then=_BLOCKS.Call(_BLOCKS.Lambda('x', _INT, x), one)
      ),
  }


@pytest.mark.parametrize('name', sorted(_names_in_nested_blocks()))
def test_names_are_those_of_the_block(name, context):
  body = _names_in_nested_blocks()[name]
  computation = computation_impl.ConcreteComputation.from_building_block(
      _BLOCKS.Lambda(None, None, body)
  )
  assert context.invoke(computation, None) == 1


def test_an_intrinsic_that_is_not_supported_is_named(monkeypatch):
  monkeypatch.delitem(computation_graph._INTRINSICS, 'federated_select')
  context = in_process.InProcessContext()

  with pytest.raises(
      computation_graph.UnsupportedComputationError, match="'federated_select'"
  ):
    context.invoke(_select_and_sum, None)


@pytest.mark.parametrize(
    ('data', 'expected'),
    [
        ([], 'at least one, found'),
        ([tf.data.Dataset.range(3)], 'Expected a data set of type'),
        ([3], 'Expected a data set or a list of elements'),
    ],
)
def test_arguments_that_do_not_fit(data, expected, context):
  process = _fed_avg()
  state = process.initialize()

  with pytest.raises((TypeError, ValueError), match=expected):
    context.invoke(process.next, (state, data))


def test_numbers_that_do_not_fit(context):
  with pytest.raises(TypeError, match='Expected a value of type float32'):
    context.invoke(_double, np.zeros(3, np.float32))


@pytest.mark.parametrize(
    'options',
    [
        dict(devices=[]),
        dict(parallel_clients=0),
        dict(batched_clients=0),
        dict(kept_bytes=-1),
    ],
)
def test_impossible_options(options):
  with pytest.raises(ValueError, match='Expected `devices`'):
    in_process.InProcessContext(**options)


def test_a_gpu_that_is_not_there_is_missed():
  if tf.config.list_physical_devices('GPU'):
    pytest.skip('This machine has a GPU.')
  for options in (('gpu',), ('auto', True)):
    with pytest.raises(ValueError, match='Expected a GPU'):
      in_process.use_device(*options)
  assert in_process.use_device('auto') == ['/CPU:0']
  assert in_process.use_device('cpu') == ['/CPU:0']
  with pytest.raises(ValueError, match="found 'tpu'"):
    in_process.use_device('tpu')


# What a review of the first version found to be otherwise than in TFF.


@tff.federated_computation(
    tff.FederatedType(np.float32, tff.CLIENTS),
    tff.FederatedType(tff.TensorType(np.float32, [2]), tff.SERVER),
)
def _zipped_with_a_broadcast(x, server):
  everywhere = tff.federated_broadcast(server)
  return tff.federated_zip((x, everywhere)), tff.federated_sum(x)


def test_every_client_gets_what_is_broadcast(context):
  pairs, _ = _run(
      context, _zipped_with_a_broadcast, [1.0, 2.0], np.float32([7, 8])
  )

  assert [pair[0] for pair in pairs] == [1, 2]
  for _, server in pairs:
    np.testing.assert_array_equal(server, [7, 8])


@tff.tensorflow.computation
def _noise():
  return tf.random.uniform([])


@tff.tensorflow.computation(np.float32, np.float32)
def _difference(x, y):
  return x - y


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def _noise_before_and_after_a_sum(x):
  noise = tff.federated_eval(_noise, tff.CLIENTS)
  total = tff.federated_sum(tff.federated_map(_add, (noise, x)))
  everywhere = tff.federated_broadcast(total)
  return tff.federated_map(_difference, (noise, everywhere))


def test_clients_draw_once(context):
  results = [
      _run(context, _noise_before_and_after_a_sum, [1.0]) for _ in range(3)
  ]
  np.testing.assert_allclose(results, -1, rtol=1e-6)


_NUMBERS = tff.SequenceType(np.float32)


@tff.tensorflow.computation(_NUMBERS)
def _shuffled(numbers):
  return (
      numbers.shuffle(100)
      .batch(100)
      .reduce(
          np.zeros([0], np.float32), lambda all, some: tf.concat([all, some], 0)
      )
  )


@tff.federated_computation(tff.FederatedType(_NUMBERS, tff.CLIENTS))
def _shuffled_at_clients(data):
  return tff.federated_map(_shuffled, data)


def test_shuffles_in_the_computation_are_drawn_anew(context):
  dataset = tf.data.Dataset.range(50).map(lambda i: tf.cast(i, tf.float32))

  orders = [
      tuple(order)
      for _ in range(4)
      for order in _run(context, _shuffled_at_clients, [dataset, dataset])
  ]

  assert len(set(orders)) == len(orders)
  assert all(sorted(order) == list(range(50)) for order in orders)


@tff.tensorflow.computation(np.int64)
def _size_of_a_table(key):
  table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
  with tf.control_dependencies([table.insert([key], [key])]):
    return table.size()


@tff.federated_computation(tff.FederatedType(np.int64, tff.CLIENTS))
def _sizes_of_tables(keys):
  return tff.federated_map(_size_of_a_table, keys)


def test_tables_are_a_clients_own_in_a_round(context):
  for _ in range(3):
    assert _run(context, _sizes_of_tables, [1, 2, 3]) == [1, 1, 1]


@tff.tensorflow.computation(_NUMBERS)
def _doubled(numbers):
  return numbers.map(lambda x: 2 * x)


@tff.tensorflow.computation(_NUMBERS, np.float32)
def _sum_above(numbers, threshold):
  return numbers.reduce(
      np.float32(0), lambda s, x: s + tf.where(x > threshold, x, 0.0)
  )


@tff.federated_computation(tff.FederatedType(_NUMBERS, tff.CLIENTS))
def _sequences_that_stay(data):
  doubled = tff.federated_map(_doubled, data)
  mean = tff.federated_mean(tff.federated_map(_sum_of, doubled))
  above = (doubled, tff.federated_broadcast(mean))
  return doubled, tff.federated_sum(tff.federated_map(_sum_above, above))


def test_clients_keep_and_return_sequences(context):
  doubled, total = _run(
      context, _sequences_that_stay, [[1.0, 2.0], [3.0, 8.0], [5.0]]
  )

  # Sums of the doubled ones are 6, 22 and 10; the mean is 12.67.
  assert total == 16
  assert [list(d.as_numpy_iterator()) for d in doubled] == [
      [2, 4],
      [6, 16],
      [10],
  ]


@pytest.mark.parametrize('value', [2**40, True, 1.5, np.int64(1), '1'])
def test_other_than_int32(value, context):
  @tff.tensorflow.computation(np.int32)
  def same(x):
    return x

  with pytest.raises(TypeError, match='Expected a value of type int32'):
    context.invoke(same, value)


@pytest.mark.parametrize('name', ['/CPU:0', 'CPU:0', '/device:CPU:0'])
def test_names_of_a_device(name):
  assert in_process.InProcessContext([name]).invoke(_double, 1.0) == 2


@pytest.mark.parametrize('devices', ['/CPU:0', ['/GPU:7']])
def test_devices_that_are_not_there(devices):
  with pytest.raises(ValueError, match='Expected `devices` among'):
    in_process.InProcessContext(devices)
