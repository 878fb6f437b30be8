"""A graph that computes one client's part, turned into one for several.

TensorFlow's `pfor` makes the graph of many of the graph of one: each tensor
that differs between them gets a leading axis. What it lacks for the graphs of
clients, or does in a roundabout way, is here:

*   A convolution whose filter differs becomes a grouped one, of as many groups
    as there are clients, and so do its gradients. (On a CPU only oneDNN has
    these, which `native.prepare_environment` turns on.)
*   Loops, conditions and calls of functions that were imported, of which
    TensorFlow has no Python graph. A loop stays one loop, a condition one.
*   Operations that `pfor` does not know, such as `Where`.

A tensor can have the axis only if it has one shape for all. Where a shape, the
end of a loop or a branch depends on values, such as the number of rows that a
mask selects, the graph compares them when it runs, and fails where they differ.
Nothing is computed for one client after the other but random numbers.
"""

import importlib
import threading
from unittest import mock

import tensorflow as tf

# Not part of TensorFlow's public interface; the version is pinned.
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import function_def_to_graph

# A module that its package hides behind a function of the same name.
_pfor = importlib.import_module('tensorflow.python.ops.parallel_for.pfor')

_THEIRS = dict(_pfor._pfor_converter_registry)
# What the graph says where clients turn out to differ.
NOT_ALIKE = 'Expected clients of a batch to be alike'
_PATCHING = threading.RLock()  # The converters are TensorFlow's, and global.
_CALLS = 'PartitionedCall', 'StatefulPartitionedCall'
_CONDITIONS = 'If', 'StatelessIf'
_LOOPS = 'StatelessWhile', 'While'
# What they return depends on the shapes of their inputs, not on the values.
_OF_SHAPES = 'Rank', 'Shape', 'ShapeN', 'Size', 'TensorListLength', 'ZerosLike'


class CannotVectorizeError(NotImplementedError):
  """A graph has an operation that has no form for many."""


class Many:
  """The graph of one, of which that of many is made.

  Attributes:
    graph: The graph of one, in which operations are to be made. They may use
      tensors of the graph that was the current one before, and of those around.
  """

  def __init__(self, num: tf.Tensor):
    """Begins an empty graph.

    Args:
      num: How many there are, an int32 scalar of the current graph.
    """
    self.graph = func_graph.FuncGraph('one_of_many')
    self._num = num
    self._arguments: list[tuple[tf.Tensor, tf.Tensor]] = []

  def argument(self, stacked: tf.Tensor) -> tf.Tensor:
    """Returns what stands in the graph of one for a row of a tensor.

    Args:
      stacked: The tensor [num, ...], not of the graph of one.
    """
    with self.graph.as_default():
      one = tf.compat.v1.placeholder(stacked.dtype, stacked.shape[1:])
    self._arguments.append((one, stacked))
    return one

  def results(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Makes the graph of many, in the current graph.

    Args:
      tensors: Of the graph of one.

    Returns:
      The tensors of all, [num, ...].

    Raises:
      CannotVectorizeError: If there is an operation that has no form for many.
    """
    with self.graph.as_default():
      number = tf.compat.v1.placeholder_with_default(0, [])
    values = [(one, _wrap(many, True)) for one, many in self._arguments]
    values += [(one, _wrap(all_, False)) for all_, one in self.graph.captures]
    current = tf.compat.v1.get_default_graph()
    for function in self.graph._functions.values():
      current._add_function(function)
    whole = _pfor.PFor(number, self._num, [], fallback_to_while_loop=False)
    converters = _CONVERTERS | _calling_converters(_Library(self.graph))
    with (
        _PATCHING,
        mock.patch.dict(_pfor._pfor_converter_registry, converters),
        # What it logs, it raises, too.
        mock.patch.object(_pfor, 'logging'),
        mock.patch.object(_pfor, 'traceback'),
    ):
      try:
        results = _convert(whole, self.graph, values, tensors)
      except (
          AssertionError,
          NotImplementedError,
          TypeError,
          ValueError,
      ) as error:
        raise CannotVectorizeError(
            (str(error) or repr(error)).splitlines()[0]
        ) from error
      return [_as_stacked(result, whole) for result in results]


def _wrap(tensor, is_stacked):
  return _pfor.wrap(tensor, is_stacked)


def _wrap_all(tensors, are_stacked):
  return list(map(_wrap, tensors, are_stacked))


def _convert(whole, graph, values, outputs):
  """Converts a graph into the current one.

  Args:
    whole: A `PFor` for the same clients.
    graph: The graph of one.
    values: Pairs of its inputs and their values, wrapped.
    outputs: Tensors of the graph.

  Returns:
    The values of the outputs, wrapped.
  """
  converter = _pfor.PFor(
      whole.loop_var,
      whole.loop_len_vector[0],
      graph.get_operations(),
      fallback_to_while_loop=False,
      all_indices=whole.all_indices,
  )
  for tensor, value in values:
    converter._add_conversion(tensor, value)
  return [converter._convert_helper(output) for output in outputs]


def _convert_function(whole, graph, inputs):
  pairs = zip(graph.inputs, inputs, strict=True)
  return _convert(whole, graph, pairs, graph.outputs)


def _as_stacked(value, whole):
  """A wrapped value with the leading axis; of a list, that of its elements."""
  if value.is_stacked:
    return value.t
  if value.t.op.type == 'EmptyTensorList':  # It may have a shape of elements.
    return tf.raw_ops.EmptyTensorList(
        element_shape=-1,
        max_num_elements=-1,
        element_dtype=value.t.op.get_attr('element_dtype'),
    )
  return _pfor._stack(value.t, whole.loop_len_vector).t


def _same_for_all(value):
  """Takes the leading axis away; the graph fails where rows differ."""
  if not value.is_stacked:
    return value
  check = tf.debugging.Assert(
      tf.reduce_all(tf.equal(value.t, value.t[:1])),
      [f'{NOT_ALIKE}, found', value.t],
  )
  with tf.control_dependencies([check]):
    return _wrap(tf.identity(value.t[0]), False)


# Loops, conditions and calls.


class _Library:
  """The functions that the operations of a graph call, as Python graphs."""

  def __init__(self, graph):
    self._graph = graph
    self._definitions = {
        name: function.cached_definition
        for name, function in graph._functions.items()
    }
    self._graphs = {}

  def called_by(self, operation, *attributes):
    """The graphs that an operation calls, by names of attributes."""
    return [self._get(operation.get_attr(name).name) for name in attributes]

  def _get(self, name):
    if name not in self._graphs:
      with self._graph.as_default():
        self._graphs[name] = function_def_to_graph.function_def_to_graph(
            self._definitions[name]
        )
    return self._graphs[name]

  def of_branches(self, operation, inputs):
    """Which results of a condition may differ, given which inputs do."""
    branches = self.called_by(operation, 'then_branch', 'else_branch')
    outputs = [self._of_function(branch, inputs) for branch in branches]
    return [any(both) for both in zip(*outputs, strict=True)]

  def of_loop(self, operation, inputs):
    """Which variables of a loop may differ, given which do at first."""
    (body,) = self.called_by(operation, 'body')
    while True:
      outputs = self._of_function(body, inputs)
      either = [a or b for a, b in zip(inputs, outputs, strict=True)]
      if either == inputs:
        return inputs
      inputs = either

  def _of_function(self, graph, inputs):
    """Which outputs of a function may differ."""
    differ: set[int] = set()

    def add(tensors, flags):
      pairs = zip(tensors, flags, strict=True)
      differ.update(id(tensor) for tensor, flag in pairs if flag)

    add(graph.inputs, inputs)
    for operation in graph.get_operations():
      flags = [id(tensor) in differ for tensor in operation.inputs]
      add(operation.outputs, self._of_operation(operation, flags))
    return [id(tensor) in differ for tensor in graph.outputs]

  def _of_operation(self, operation, inputs):
    if operation.type in _CALLS:
      (called,) = self.called_by(operation, 'f')
      return self._of_function(called, inputs)
    if operation.type in _CONDITIONS:
      return self.of_branches(operation, inputs[1:])
    if operation.type in _LOOPS:
      return self.of_loop(operation, inputs)
    of_shape = operation.type in _OF_SHAPES and not _is_list(operation)
    return [any(inputs) and not of_shape] * len(operation.outputs)


def _calling_converters(library):
  """Converters of operations that call functions of a library."""

  def call(pfor_input):
    (graph,) = library.called_by(pfor_input.op, 'f')
    return _convert_function(pfor_input.pfor, graph, pfor_input.inputs)

  def condition(pfor_input):
    predicate, *inputs = pfor_input.inputs
    flags = library.of_branches(pfor_input.op, [i.is_stacked for i in inputs])

    def branch(graph):
      values = _convert_function(pfor_input.pfor, graph, inputs)
      return _fit(values, flags, pfor_input.pfor)

    yes, no = library.called_by(pfor_input.op, 'then_branch', 'else_branch')
    outputs = tf.cond(
        _same_for_all(predicate).t, lambda: branch(yes), lambda: branch(no)
    )
    return _wrap_all(outputs, flags)

  def loop(pfor_input):
    whole = pfor_input.pfor
    goes_on, body = library.called_by(pfor_input.op, 'cond', 'body')
    flags = library.of_loop(
        pfor_input.op, [i.is_stacked for i in pfor_input.inputs]
    )

    def results(graph, tensors):
      return _convert_function(whole, graph, _wrap_all(tensors, flags))

    shapes = []
    for output, is_stacked in zip(pfor_input.outputs, flags, strict=True):
      is_plain = output.dtype != tf.variant
      axis = tf.TensorShape([None] if is_stacked and is_plain else [])
      shapes.append(axis.concatenate(output.shape))

    def step(*tensors):
      tensors = _fit(results(body, tensors), flags, whole)
      for tensor, shape in zip(tensors, shapes, strict=True):
        tensor.set_shape(shape)  # Lists forget it.
      return tensors

    outputs = tf.while_loop(
        lambda *tensors: _same_for_all(*results(goes_on, tensors)).t,
        step,
        _fit(pfor_input.inputs, flags, whole),
        shapes,
        parallel_iterations=pfor_input.get_attr('parallel_iterations'),
    )
    return _wrap_all(outputs, flags)

  return {
      **dict.fromkeys(_CALLS, call),
      **dict.fromkeys(_CONDITIONS, condition),
      **dict.fromkeys(_LOOPS, loop),
  }


def _fit(values, flags, whole):
  """The tensors of values, with the leading axis where flags say so."""
  for value, flag in zip(values, flags, strict=True):
    if value.is_stacked and not flag:
      raise NotImplementedError(
          f'Expected {value.t.name} to be the same for all clients.'
      )
  return [
      _as_stacked(value, whole) if flag else value.t
      for value, flag in zip(values, flags, strict=True)
  ]


# Other operations. A converter takes `pfor`'s view of an operation.


def _stacked(pfor_input, *numbers):
  """The inputs with these numbers, all with the leading axis."""
  pfor_input.stack_inputs(numbers)
  return [pfor_input.stacked_input(number) for number in numbers]


def _as_it_is(pfor_input):
  """The same operation, for inputs that it treats element by element."""
  outputs = _pfor._create_op(
      pfor_input.op_type,
      [value.t for value in pfor_input.inputs],
      [output.dtype for output in pfor_input.outputs],
      attrs=pfor_input.op.node_def.attr,
  ).outputs
  is_stacked = any(value.is_stacked for value in pfor_input.inputs)
  return [_wrap(output, is_stacked) for output in outputs]


def _broadcasting(theirs):
  """A converter for inputs that are broadcast.

  Theirs computes the shapes in the graph, with many more operations.

  Args:
    theirs: The converter for inputs of unknown rank.
  """

  def convert(pfor_input):
    if any(t.shape.rank is None for t, *_ in pfor_input.inputs):
      return theirs(pfor_input)
    ranks = [
        t.shape.rank + (not is_stacked)
        for t, is_stacked, _ in pfor_input.inputs
    ]
    for number, rank in enumerate(ranks):
      t, is_stacked, _ = pfor_input.input(number)
      if is_stacked and rank < max(ranks):
        axes = (tf.newaxis,) * (max(ranks) - rank)
        pfor_input.inputs[number] = _wrap(t[(slice(None), *axes)], True)
    return _as_it_is(pfor_input)

  return convert


def _with_same(numbers, theirs):
  """A converter where inputs with these numbers must be the same for all."""

  def convert(pfor_input):
    for number in numbers:
      same = _same_for_all(pfor_input.input(number))
      pfor_input.inputs[number] = same
    if not any(value.is_stacked for value in pfor_input.inputs):
      return _as_it_is(pfor_input)
    return theirs(pfor_input)

  return convert


def _where_stacked(number, ours, theirs):
  """Ours if the input with this number has the leading axis, else theirs."""

  def convert(pfor_input):
    is_stacked = pfor_input.input(number).is_stacked
    return ours(pfor_input) if is_stacked else theirs(pfor_input)

  return convert


def _into_channels(x):
  """[k, n, height, width, c] to [n, height, width, k * c]."""
  shape = tf.shape(x)
  x = tf.transpose(x, [1, 2, 3, 0, 4])
  return tf.reshape(x, tf.concat([shape[1:4], [-1]], 0))


def _out_of_channels(x, k):
  """[n, height, width, k * c] to [k, n, height, width, c]."""
  x = tf.reshape(x, tf.concat([tf.shape(x)[:3], [k, -1]], 0))
  return tf.transpose(x, [3, 0, 1, 2, 4])


def _grouped(pfor_input, *numbers):
  """A convolution, or a gradient of one, in groups.

  Args:
    pfor_input: The operation. Its images have their channels last.
    *numbers: Of the inputs with the leading axis. The third one is a shape.

  Returns:
    Its result with the leading axis.
  """
  inputs = [value.t for value in pfor_input.inputs]
  k = pfor_input.pfor.loop_len_vector[0]
  stacked = _stacked(pfor_input, *numbers)
  for number, value in zip(numbers, stacked, strict=True):
    inputs[number] = _into_channels(value)
  for number in set(range(len(inputs))).difference(numbers):
    inputs[number] *= [1, 1, 1, k]
  (output,) = _pfor._create_op(
      pfor_input.op_type,
      inputs,
      [pfor_input.output(0).dtype],
      attrs=pfor_input.op.node_def.attr,
  ).outputs
  return _wrap(_out_of_channels(output, k), True)


def _conv2d(pfor_input):
  return _grouped(pfor_input, 0, 1)


def _conv2d_backprop_input(pfor_input):
  return _grouped(pfor_input, 1, 2)


def _conv2d_backprop_filter(pfor_input):
  return _grouped(pfor_input, 0, 2)


def _where(pfor_input):
  (condition,) = _stacked(pfor_input, 0)
  k = tf.shape(condition)[0]
  rows = tf.reshape(condition, [k, -1])
  counts = tf.math.count_nonzero(rows, axis=1, dtype=tf.int32)
  num = _same_for_all(_wrap(counts, True)).t
  indices = tf.where(condition)[:, 1:]
  return _wrap(tf.reshape(indices, [k, num, condition.shape.rank - 1]), True)


def _scatter_nd(pfor_input):
  indices, updates = _stacked(pfor_input, 0, 1)
  shape = pfor_input.unstacked_input(2)
  k = tf.shape(indices, shape.dtype)[0]
  first = tf.range(tf.cast(k, indices.dtype))
  first = tf.reshape(first, [-1] + [1] * (indices.shape.rank - 1))
  first = tf.broadcast_to(first, tf.shape(indices[..., :1]))
  indices = tf.concat([first, indices], -1)
  return _wrap(
      tf.scatter_nd(indices, updates, tf.concat([[k], shape], 0)), True
  )


def _l2_loss(pfor_input):
  (x,) = _stacked(pfor_input, 0)
  return _wrap(tf.reduce_sum(x**2, range(1, x.shape.rank)) / 2, True)


def _is_list(operation):
  return operation.outputs[0].dtype == tf.variant


def _zeros_like(pfor_input):
  is_list = _is_list(pfor_input.op)
  return (_as_it_is if is_list else _THEIRS['ZerosLike'])(pfor_input)


def _push_back(pfor_input):
  handle = _as_stacked(pfor_input.input(0), pfor_input.pfor)
  pfor_input.inputs[0] = _wrap(handle, True)
  return _THEIRS['TensorListPushBack'](pfor_input)


# Inputs on which the shape of the result depends, or its place in another.
_SHAPES = {
    'BroadcastTo': [1],
    'Fill': [0],
    'OneHot': [1],
    'Pad': [1],
    'Range': [0, 1, 2],
    'Reshape': [1],
    'Slice': [2],
    'StridedSlice': [1, 2, 3],
    'StridedSliceGrad': [0, 1, 2, 3],
    'Tile': [1],
}
_CONVERTERS = {
    **{
        name: _broadcasting(theirs)
        for name, theirs in _THEIRS.items()
        if theirs is _pfor._convert_cwise
        or name in ('Equal', 'NotEqual', 'SelectV2')
    },
    **{
        name: _with_same(numbers, _THEIRS.get(name))
        for name, numbers in _SHAPES.items()
    },
    **{
        name: _where_stacked(number, ours, _THEIRS[name])
        for name, number, ours in (
            ('Conv2D', 1, _conv2d),
            ('Conv2DBackpropInput', 1, _conv2d_backprop_input),
            ('Conv2DBackpropFilter', 0, _conv2d_backprop_filter),
        )
    },
    **dict.fromkeys(('OnesLike', 'Snapshot'), _as_it_is),
    **dict.fromkeys(
        (
            'StatelessRandomGetKeyCounter',
            'StatelessRandomNormalV2',
            'StatelessRandomUniformFullIntV2',
            'StatelessRandomUniformIntV2',
            'StatelessRandomUniformV2',
            'StatelessShuffle',
        ),
        _pfor._fallback_converter,
    ),
    'L2Loss': _l2_loss,
    'ScatterNd': _scatter_nd,
    'TensorListPushBack': _push_back,
    'TopKV2': _with_same([1], _as_it_is),
    'Where': _where,
    'ZerosLike': _zeros_like,
}
