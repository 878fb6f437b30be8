"""The TensorFlow graphs in TFF computations, imported where they are called.

A TFF computation carries its TensorFlow code as graphs in the style of
TensorFlow 1: placeholders to feed, names to fetch, variables with an operation
that initializes them. A `TensorFlowBlock` is such a graph, ready to be imported
into any graph that is being traced, any number of times and inside loops.

Values are nested tuples whose leaves are tensors and `Sequence`s.
"""

from collections.abc import Iterable, Iterator
import functools
import hashlib
import itertools
from typing import Any

import tensorflow as tf

# Not part of TensorFlow's public interface: what a variable is called that is a
# new one in every execution, and what is known of an operation.
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import op_def_registry

from tff_meta.execution import sums

_CPU = '/device:CPU:0'
# Data sets whose elements are functions of their inputs alone, as long as those
# of the functions that they call are. No other operation on data sets is taken
# for pure: TensorFlow counts not all as stateful that shuffle or read files.
FIXED_DATASETS = frozenset(
    [
        'BatchDataset',
        'BatchDatasetV2',
        'ConcatenateDataset',
        'EnumerateDataset',
        'FilterDataset',
        'FiniteTakeDataset',
        'MapAndBatchDataset',
        'MapDataset',
        'ModelDataset',
        'OptionsDataset',
        'PaddedBatchDatasetV2',
        'ParallelBatchDataset',
        'ParallelMapDatasetV2',
        'PrefetchDataset',
        'RangeDataset',
        'RepeatDataset',
        'SkipDataset',
        'TakeDataset',
        'TensorDataset',
        'TensorSliceDataset',
        'UnbatchDataset',
        'ZipDataset',
    ]
)
# Other operations that TensorFlow counts as stateful although they are pure, as
# long as what they call is.
_PURE_OPS = frozenset(
    [
        'DatasetCardinality',
        'DatasetToSingleElement',
        'If',
        'ReduceDataset',
        'StatefulPartitionedCall',
        'While',
    ]
)
# And those that it does not count as stateful although they read files, call
# Python or draw random numbers; all others that do have a seed as an attribute.
_IMPURE_OPS = frozenset(
    [
        'GenerateVocabRemapping',
        'ImmutableConst',
        'MatchingFiles',
        'PyFuncStateless',
        'ReadFile',
        'RiscRandomUniform',
    ]
)
# Tables that live on under a name, and those that an execution has for itself.
_MUTABLE_TABLES = {
    'MutableDenseHashTableV2': 'AnonymousMutableDenseHashTable',
    'MutableHashTableOfTensorsV2': 'AnonymousMutableHashTableOfTensors',
    'MutableHashTableV2': 'AnonymousMutableHashTable',
}
# Without the tuning and rewriting of a data set, which take longer than reading
# one of a client's size.
_READ_AT_ONCE = tf.data.Options()
_READ_AT_ONCE.autotune.enabled = False
_READ_AT_ONCE.experimental_optimization.apply_default_optimizations = False


class Sequence:
  """A sequence in a trace.

  Attributes:
    variant: Of the data set, a scalar variant tensor.
  """

  def __init__(self, variant: tf.Tensor):
    self._variant = variant

  @property
  def variant(self) -> tf.Tensor:
    """The data set as a scalar variant tensor."""
    return self._variant

  def read(self, reader: 'DenseReader') -> list[tf.Tensor] | None:
    """What the reader reads of the sequence; None where that is not kept."""
    del reader
    return None


class DenseReader:
  """What a graph computes of one of its data sets alone, apart from the graph.

  Client work often begins by making its data dense, in reductions that depend
  on nothing but the data set. Their results are the same in every round, so
  they can be computed once, kept, and fed to the graph in place of the data
  set.

  Attributes:
    names: Names of the tensors in the graph.
    specs: Their shapes and dtypes.
  """

  def __init__(self, graph_def, placeholder: str, tensors: list[tf.Tensor]):
    """Takes the tensors' part of the graph.

    Args:
      graph_def: The graph.
      placeholder: Name of the data set's variant tensor.
      tensors: What to compute of it.
    """
    self.names = names = [tensor.name for tensor in tensors]
    self.specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]

    reductions = _reductions(graph_def, names)
    self._reads_elements = all(
        name.split(':')[0] in reductions for name in names
    ) and all(
        first == placeholder
        and placeholder.split(':')[0]
        not in _ancestors(graph_def, others, set())
        for first, *others in reductions.values()
    )

    @tf.function(autograph=False)
    def read(variant):
      with tf.device(_CPU):
        return _read(graph_def, {placeholder: variant}, names)

    @tf.function(autograph=False)
    def read_element(*parts):
      with tf.device(_CPU):
        return _read(graph_def, {placeholder: parts}, names)

    # Traced when they are used first, which takes a tenth of a second.
    self._read_variant = functools.cache(
        lambda: read.get_concrete_function(tf.TensorSpec([], tf.variant))
    )
    self._read_element = functools.cache(
        lambda *dtypes: read_element.get_concrete_function(
            *(tf.TensorSpec(None, dtype) for dtype in dtypes)
        )
    )

  def __call__(self, dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Computes the tensors of an eager data set.

    Args:
      dataset: Any. Of one with an attribute `only_element`, its only element,
        reductions are computed without an iterator, which takes ten times as
        long to make as a client's data to read.
    """
    if not self._reads_elements or not hasattr(dataset, 'only_element'):
      return self._read_variant()(tf.data.experimental.to_variant(dataset))
    parts = tf.nest.flatten(dataset.only_element)
    return self._read_element(*(part.dtype for part in parts))(*parts)


def _reductions(graph_def, names: list[str]) -> dict[str, list[str]]:
  """The inputs of the reductions of data sets that compute some tensors."""
  operations = {name.split(':')[0] for name in names}
  return {
      node.name: [_full_name(i) for i in node.input if not i.startswith('^')]
      for node in graph_def.node
      if node.op == 'ReduceDataset' and node.name in operations
  }


def _read(graph_def, feeds: dict[str, Any], names: list[str]):
  """Imports what computes tensors of a data set, its reductions as loops.

  Args:
    graph_def: The graph.
    feeds: Name -> the data set's variant, or the tensors of its only element
      where all is computed by reductions of the data set itself.
    names: Of the tensors, as `_dense_tensors` finds them: no reduction is made
      of another, or waits for more than constants.

  Returns:
    The tensors.
  """
  reductions = _reductions(graph_def, names)
  plain = [name for name in names if name.split(':')[0] not in reductions]
  wanted = dict.fromkeys([*plain, *itertools.chain(*reductions.values())])
  fetches = [name for name in wanted if name not in feeds]
  part = _prune(graph_def, fetches, set(feeds))
  tensors = feeds | dict(
      zip(fetches, _import(part, feeds, fetches), strict=True)
  )
  for node in graph_def.node:
    if node.name in reductions:
      inputs = [tensors[name] for name in reductions[node.name]]
      outputs = _reduce(node, inputs, graph_def.library)
      tensors |= {f'{node.name}:{i}': t for i, t in enumerate(outputs)}
  return [tensors[name] for name in names]


def _reduce(node, inputs: list[Any], library) -> list[tf.Tensor]:
  """Returns the outputs of a `ReduceDataset`, by a loop over its elements.

  The operation itself prepares its function anew in every execution, which for
  a small data set takes several times as long as reading it.

  Args:
    node: Its node.
    inputs: The data set's variant or its only element, the initial state, other
      arguments.
    library: The graph's functions.
  """
  function = node.attr['f'].func.name
  num_state = len(node.attr['Tstate'].list.type)
  variant, state = inputs[0], inputs[1 : 1 + num_state]
  others = inputs[1 + num_state :]
  if isinstance(variant, tuple):
    return _call(function, [*state, *variant, *others], num_state, library)
  signatures = {f.signature.name: f.signature for f in library.function}
  # The function takes the state, an element's parts and the other arguments.
  taken = [tf.as_dtype(a.type) for a in signatures[function].input_arg]
  dtypes = taken[num_state : len(taken) - len(others)]
  kind = dict(output_types=dtypes, output_shapes=[None] * len(dtypes))
  dataset = tf.data.experimental.from_variant(
      variant, tuple(tf.TensorSpec(None, dtype) for dtype in dtypes)
  ).with_options(_READ_AT_ONCE)
  iterator = tf.raw_ops.AnonymousIteratorV3(**kind)
  tf.raw_ops.MakeIterator(
      dataset=tf.data.experimental.to_variant(dataset), iterator=iterator
  )
  shapes = [tf.TensorShape(s) for s in node.attr['output_shapes'].list.shape]

  def next_element():
    return tf.raw_ops.IteratorGetNextAsOptional(iterator=iterator, **kind)

  def step(element, *state):
    parts = tf.raw_ops.OptionalGetValue(optional=element, **kind)
    state = _call(function, [*state, *parts, *others], num_state, library)
    for tensor, shape in zip(state, shapes, strict=True):
      tensor.set_shape(shape)
    return next_element(), *state

  _, *state = tf.while_loop(
      lambda element, *_: tf.raw_ops.OptionalHasValue(optional=element),
      step,
      [next_element(), *state],
      shape_invariants=[tf.TensorShape([]), *shapes],
  )
  return state


def _call(function: str, arguments: list[tf.Tensor], num_outputs: int, library):
  """Calls a function of a library in the current graph."""
  graph_def = tf.compat.v1.GraphDef(library=library)
  call = graph_def.node.add(name='call', op=function)
  for i, argument in enumerate(arguments):
    call.input.append(f'argument_{i}')
    placeholder = graph_def.node.add(name=f'argument_{i}', op='Placeholder')
    placeholder.attr['dtype'].type = argument.dtype.as_datatype_enum
  feeds = {f'argument_{i}:0': argument for i, argument in enumerate(arguments)}
  return _import(graph_def, feeds, [f'call:{i}' for i in range(num_outputs)])


class TensorFlowBlock:
  """A TensorFlow computation of TFF as a function of a trace's tensors."""

  def __init__(self, proto):
    """Prepares the graph; adds nothing to any other.

    Args:
      proto: The field `tensorflow` of a computation's protocol buffer.
    """
    graph_def = tf.compat.v1.GraphDef()
    proto.graph_def.Unpack(graph_def)
    sums.fix_order(graph_def)
    _make_functions_unique(graph_def)
    for node in _all_nodes(graph_def):
      node.attr.pop('_class', None)  # Wants other nodes, pruned perhaps, near.
      if 'Dataset' in node.op or 'Iterator' in node.op:
        node.device = _CPU
    _make_state_anonymous(graph_def, proto.initialize_op)
    self._parameter = proto.parameter
    self._result = proto.result
    self._constants = {}
    if proto.session_token_tensor_name:
      self._constants[proto.session_token_tensor_name] = b''
    self._outputs = [name for _, name in _leaves(self._result)]
    self._graph_def = _prune(graph_def, self._outputs, set())
    self._readers = self._dense_readers()

  @functools.cached_property
  def is_pure(self) -> bool:
    """Whether the result is a function of the argument alone."""
    library = {f.signature.name: f for f in self._graph_def.library.function}
    return all(is_pure(n.op, n, library) for n in self._graph_def.node)

  def __call__(self, argument: Any) -> Any:
    """Imports the graph into the current one.

    Args:
      argument: A structure as the computation's parameter; anything for a
        computation without one.

    Returns:
      A structure as the computation's result.
    """
    feeds = {n: tf.constant(v) for n, v in self._constants.items()}
    for kind, name, value in _bind(self._parameter, argument):
      reader = self._readers.get(name)
      tensors = None if reader is None else value.read(reader)
      if reader is not None and tensors is not None:
        feeds.update(zip(reader.names, tensors, strict=True))
      else:
        feeds[name] = value.variant if kind == 'sequence' else value
    fetches = [name for name in self._outputs if name not in feeds]
    graph_def = _prune(self._graph_def, fetches, set(feeds))
    feeds |= zip(fetches, _import(graph_def, feeds, fetches), strict=True)
    return _pack(self._result, feeds)

  def _dense_readers(self) -> dict[str, DenseReader]:
    """The readers of those data sets that are made dense, by placeholder."""
    used = {node.name for node in self._graph_def.node}
    placeholders = [
        name
        for kind, name in _leaves(self._parameter)
        if kind == 'sequence' and name.split(':')[0] in used
    ]
    if not placeholders:
      return {}
    with tf.Graph().as_default() as graph:
      tf.graph_util.import_graph_def(self._graph_def, name='')
    library = {f.signature.name: f for f in self._graph_def.library.function}
    readers = {}
    for name in placeholders:
      tensors = _dense_tensors(graph, name, library)
      if tensors:
        readers[name] = DenseReader(self._graph_def, name, tensors)
    return readers


def _leaves(binding) -> Iterator[tuple[str, str]]:
  """Yields the kinds and the tensors' names of a binding, in order."""
  kind = binding.WhichOneof('binding')
  if kind == 'tensor':
    yield kind, binding.tensor.tensor_name
  elif kind == 'sequence':
    yield kind, binding.sequence.variant_tensor_name
  elif kind == 'struct':
    for element in binding.struct.element:
      yield from _leaves(element)


def _bind(binding, value) -> Iterator[tuple[str, str, Any]]:
  """Yields the leaves of a binding with those of a structure like it."""
  if binding.WhichOneof('binding') == 'struct':
    for element, part in zip(binding.struct.element, value, strict=True):
      yield from _bind(element, part)
  else:
    for kind, name in _leaves(binding):
      yield kind, name, value


def _pack(binding, tensors: dict[str, tf.Tensor]) -> Any:
  """Returns the structure that a binding describes."""
  kind = binding.WhichOneof('binding')
  if kind == 'tensor':
    return tensors[binding.tensor.tensor_name]
  if kind == 'sequence':
    return Sequence(tensors[binding.sequence.variant_tensor_name])
  return tuple(_pack(element, tensors) for element in binding.struct.element)


def _all_nodes(graph_def):
  """Returns the nodes of a graph and of all its functions."""
  functions = (f.node_def for f in graph_def.library.function)
  return itertools.chain(graph_def.node, *functions)


def _make_functions_unique(graph_def) -> None:
  """Gives a graph's functions names of their own.

  Graphs of different computations have different functions of the same name.
  The names here contain a hash of the library, so that a graph that is seen
  again has the same.

  Args:
    graph_def: The graph, changed in place.
  """
  library = graph_def.library
  if not library.function:
    return
  digest = hashlib.sha256(library.SerializeToString(deterministic=True))
  suffix = '_' + digest.hexdigest()[:16]
  known = {function.signature.name for function in library.function}
  for node in _all_nodes(graph_def):
    if node.op in known:
      node.op += suffix
    for attr in node.attr.values():
      for func in (attr.func, *attr.list.func):
        if func.name in known:
          func.name += suffix
  for function in library.function:
    function.signature.name += suffix
  for gradient in library.gradient:
    gradient.function_name += suffix
    gradient.gradient_func += suffix


def _make_state_anonymous(graph_def, initialize_op: str) -> None:
  """Gives every execution its own variables and tables, initialized first.

  Args:
    graph_def: The graph, changed in place.
    initialize_op: Name of the operation that initializes them; '' for none.
  """
  for node in _all_nodes(graph_def):
    if node.op == 'VarHandleOp':
      # TensorFlow counts the references to such a variable and deletes it.
      node.attr['shared_name'].s = eager_context.anonymous_name().encode()
    elif node.op in _MUTABLE_TABLES:
      node.op = _MUTABLE_TABLES[node.op]
      for name in ('container', 'shared_name', 'use_node_name_sharing'):
        node.attr.pop(name, None)
  if not initialize_op:
    return
  initialize_op = initialize_op.removeprefix('^').split(':')[0]
  initializing = _ancestors(graph_def, [initialize_op], set())
  for node in graph_def.node:
    if node.name not in initializing and node.op not in (
        'Const',
        'Placeholder',
    ):
      node.input.append('^' + initialize_op)


def _ancestors(graph_def, fetches: Iterable[str], feeds: set[str]) -> set[str]:
  """Returns the names of the nodes that fetches need, given the feeds."""
  nodes = {node.name: node for node in graph_def.node}
  needed = set()
  waiting = [name for name in fetches if not _is_fed(name, feeds)]
  while waiting:
    name = waiting.pop().removeprefix('^').split(':')[0]
    if name not in needed:
      needed.add(name)
      inputs = nodes[name].input
      waiting.extend(parent for parent in inputs if not _is_fed(parent, feeds))
  return needed


def _is_fed(name: str, feeds: set[str]) -> bool:
  """Whether the input of a node, a tensor or `^operation`, is fed."""
  if name.startswith('^'):
    return any(fed.split(':')[0] == name[1:] for fed in feeds)
  return _full_name(name) in feeds


def _full_name(name: str) -> str:
  """A tensor's name with the number of the output, which nodes leave out."""
  return name if ':' in name else f'{name}:0'


def _prune(graph_def, fetches: Iterable[str], feeds: set[str]):
  """Returns the part of a graph that computes the fetches from the feeds.

  Args:
    graph_def: The graph.
    fetches: Names of tensors.
    feeds: Names of tensors.

  Returns:
    A `GraphDef`.
  """
  needed = _ancestors(graph_def, fetches, feeds)
  pruned = tf.compat.v1.GraphDef(
      versions=graph_def.versions, library=graph_def.library
  )
  for node in graph_def.node:
    if node.name in needed:
      pruned.node.add().CopyFrom(node)
      inputs = [
          name
          for name in node.input
          if not (name.startswith('^') and _is_fed(name, feeds))
      ]
      pruned.node[-1].ClearField('input')
      pruned.node[-1].input.extend(inputs)
  return pruned


def _import(graph_def, feeds: dict[str, tf.Tensor], fetches: list[str]):
  """Imports a pruned graph into the current one; returns what is fetched."""
  used = {_full_name(name) for node in graph_def.node for name in node.input}
  # Loops capture the tensors of other graphs only where operations use them.
  input_map = {
      name: tf.identity(tensor)
      for name, tensor in feeds.items()
      if name in used
  }
  return tf.graph_util.import_graph_def(
      graph_def, input_map, fetches, name='block'
  )


def _dense_tensors(
    graph: tf.Graph, placeholder: str, library: dict[str, Any]
) -> list[tf.Tensor]:
  """Finds what a graph computes of a data set alone.

  Args:
    graph: The graph.
    placeholder: Name of the data set's variant tensor.
    library: The graph's functions, by name.

  Returns:
    The outputs of the operations that turn the data set (or one made of it)
    into ordinary tensors, purely and using no other input of the graph. Empty
    if any other operation uses the data set, which is then needed anyway.
  """
  derived = {graph.get_tensor_by_name(placeholder).op}
  constant: set[tf.Operation] = set()
  results = []
  for op in graph.get_operations():  # Parents come before their children.
    parents = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
    pure = op.type != 'Placeholder' and is_pure(op.type, op.node_def, library)
    if not derived & parents:
      if pure and parents <= constant:
        constant.add(op)
      continue
    is_variant = {tensor.dtype == tf.variant for tensor in op.outputs}
    if not pure or not parents <= derived | constant or len(is_variant) != 1:
      return []
    if is_variant.pop():
      derived.add(op)
    else:
      results.extend(op.outputs)
  return results


def is_pure(op_type: str, node, library: dict[str, Any]) -> bool:
  """Whether an operation's outputs are functions of its inputs alone.

  Args:
    op_type: The operation, or a function of the library.
    node: Its node; None for a function.
    library: The functions it may call, by name.

  Returns:
    False also where that is not known.
  """
  if op_type in library:
    nodes = library[op_type].node_def
    return all(is_pure(inner.op, inner, library) for inner in nodes)
  if op_type not in _PURE_OPS | FIXED_DATASETS:
    op_def = op_def_registry.get(op_type)
    if op_def is None or op_def.is_stateful or op_type in _IMPURE_OPS:
      return False
    if 'Dataset' in op_type or any(a.name == 'seed' for a in op_def.attr):
      return False
  return all(
      name in library and is_pure(name, None, library)
      for name in called_functions(node)
  )


def called_functions(node) -> list[str]:
  """The names of the functions that a node calls."""
  return [
      func.name
      for attr in node.attr.values()
      for func in (attr.func, *attr.list.func)
      if func.name
  ]
