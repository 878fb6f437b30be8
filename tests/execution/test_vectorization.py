import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.execution import client_batches
from tff_meta.execution import client_loops
from tff_meta.execution import client_records
from tff_meta.execution import vectorization

pytestmark = pytest.mark.ci


def _many(function, *columns):
  """What a function is of each row of columns, computed together."""

  @tf.function(autograph=False)
  def together(*columns):
    many = vectorization.Many(tf.shape(columns[0])[0])
    arguments = [many.argument(column) for column in columns]
    with many.graph.as_default():
      results = function(*arguments)
    return many.results(results)

  return together(*columns)


def _imported(function, *columns):
  """The function as a graph with a library, as a computation brings it."""
  specs = [tf.TensorSpec(c.shape[1:], c.dtype) for c in columns]
  concrete = tf.function(function, specs, autograph=False)
  concrete = concrete.get_concrete_function()
  graph_def = concrete.graph.as_graph_def()
  names = [tensor.name for tensor in concrete.inputs]
  fetches = [tensor.name for tensor in concrete.outputs]

  def call(*arguments):
    return tf.graph_util.import_graph_def(
        graph_def, dict(zip(names, arguments, strict=True)), fetches
    )

  return call


def _normal(*shape):
  values = np.random.default_rng(shape).normal(size=shape)
  return tf.constant(values, tf.float32)


@pytest.mark.parametrize(
    'strides, padding, many_filters', [(2, 'SAME', True), (1, 'VALID', False)]
)
def test_convolutions_and_their_two_gradients(strides, padding, many_filters):
  x, w = _normal(3, 5, 8, 7, 2), _normal(3, 3, 2, 2, 4)

  def convolve(x, w=None):
    w = _normal(3, 2, 2, 4) if w is None else w
    with tf.GradientTape() as outer:
      outer.watch([x, w])
      with tf.GradientTape() as inner:
        inner.watch([x, w])
        y = tf.nn.conv2d(x, w, strides, padding)
        loss = tf.reduce_sum(y**3)
      first = inner.gradient(loss, [x, w])
      loss = sum(tf.reduce_sum(g**2) for g in first)
    return [y, *first, *outer.gradient(loss, [x, w])]

  columns = (x, w) if many_filters else (x,)
  results = _many(convolve, *columns)
  for k in range(3):
    expected = convolve(*(column[k] for column in columns))
    for result, one in zip(results, expected, strict=True):
      scale = float(tf.reduce_max(tf.abs(one)))
      np.testing.assert_allclose(result[k], one, rtol=0, atol=1e-5 * scale)


def test_loops_conditions_and_calls_of_an_imported_graph():
  """Their gradients keep lists of what the loops have computed."""

  def function(x, n, flag):
    with tf.GradientTape() as outer, tf.GradientTape() as tape:
      outer.watch(x)
      tape.watch(x)
      _, y = tf.while_loop(
          lambda i, _: i < n, lambda i, y: (i + 1, tf.sin(y) * x), (0, x)
      )
      y = tf.cond(flag, lambda: y * x, lambda: tf.ones_like(x))
      y = tf.function(lambda y: y + 1.0, autograph=False)(y)
      gradient = tape.gradient(y, x)
    return [y, gradient, outer.gradient(gradient, x)]

  x = _normal(2, 4)
  for flag in (True, False):
    columns = x, tf.constant([3, 3]), tf.constant([flag, flag])
    results = _many(_imported(function, *columns), *columns)
    for k in range(2):
      expected = tf.function(function, autograph=False)(
          *(column[k] for column in columns)
      )
      for result, one in zip(results, expected, strict=True):
        np.testing.assert_allclose(result[k], one, rtol=1e-5)


def test_random_numbers_are_those_of_each():
  def function(seed):
    return [
        tf.random.stateless_uniform([3], seed),
        tf.random.experimental.stateless_shuffle(tf.range(5), seed),
    ]

  seeds = tf.constant([[1, 2], [3, 4]])
  for column, *expected in zip(
      _many(function, seeds), *map(function, seeds), strict=True
  ):
    np.testing.assert_array_equal(column, expected)


def test_rows_that_a_mask_selects():
  def function(mask, x):
    rows = tf.where(mask)
    selected = tf.gather_nd(x, rows)
    return [tf.scatter_nd(rows, 2 * selected, tf.shape(x, tf.int64))]

  masks = tf.constant([[True, False, True], [False, True, True]])
  (result,) = _many(function, masks, _normal(2, 3, 2))
  expected = 2 * _normal(2, 3, 2) * tf.cast(masks, tf.float32)[..., None]
  np.testing.assert_array_equal(result, expected)


def test_norms():
  x = _normal(2, 3, 4)
  (result,) = _many(lambda x: [tf.linalg.global_norm([x])], x)
  expected = tf.linalg.norm(tf.reshape(x, [2, -1]), axis=1)
  np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(
    'function, column',
    [
        (lambda mask: [tf.where(mask)], [[True, False], [True, True]]),
        (lambda n: [tf.zeros([n])], [1, 2]),
        (lambda n: [tf.cond(n > 0, lambda: n, lambda: -n)], [1, -1]),
        (
            lambda n: tf.while_loop(
                lambda i: i < n, lambda i: (i + 1,), (tf.constant(0),)
            ),
            [1, 2],
        ),
    ],
)
def test_clients_whose_shapes_differ_are_an_error(function, column):
  column = tf.constant(column)
  with pytest.raises(tf.errors.InvalidArgumentError, match='to be alike'):
    _many(_imported(function, column), column)


def test_an_operation_without_a_form_for_many_is_an_error():
  with pytest.raises(vectorization.CannotVectorizeError, match='Unique'):
    _many(lambda x: [tf.unique(x).y], tf.constant([[1, 2]]))


def test_clients_that_are_alike_share_batches():
  """Of two devices: those of one shape whose values are as frequent."""
  kind = tff.StructType([('y', tff.TensorType(np.int32, [None]))])
  values = [[0, 1, 1], [2], [2, 0, 2], [0, 1, 2], [1, 0, 0], [3], [1, 1, 3]]
  requests = [client_loops.RecordRequest(0)]
  records = client_records.ClientRecords(0).matrix(
      requests, [[{'y': np.int32(y)} for y in values]], [kind], len(values)
  )

  def batches(size, num_devices):
    return client_batches.batches(
        requests, records, [kind], size, num_devices
    ).numpy()

  one = [[0, 2], [2, 2], [4, 2], [6, 2], [1, 2], [5, 2], [3, 1]]
  np.testing.assert_array_equal(batches(2, 1), one)
  two = [[0, 2], [2, 2], [1, 1], [3, 1], [4, 2], [6, 2], [5, 1]]
  np.testing.assert_array_equal(batches(8, 2), two)
