"""TFF computations as graphs of what is computed where.

A compiled TFF computation is a tree of calls: of TensorFlow graphs, and of
intrinsics such as `federated_map`. Here the calls are followed once, without
data. What remains is a graph of nodes, each computed at the server or at every
client, from nodes before it. Placement, broadcast and zip leave no node: they
say where a value may be used, not what it is. An intrinsic that is not known is
an error now, not when a round runs.

A *level* counts the aggregations before a node: the clients' nodes of level 0
can be computed for one client after the other, then the server's of level 1 and
the clients' of level 1, which use the aggregates, and so on. Nearly all
computations have one.
"""

import collections
from collections.abc import Callable, Iterator
import functools
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

# Not part of TFF's public interface; the version is pinned.
from tensorflow_federated.python.core.environments.tensorflow_backend import (
    tensorflow_tree_transformations,
)

from tff_meta.execution import tensorflow_block


class UnsupportedComputationError(NotImplementedError):
  """A computation has something that cannot run in this process."""


class Evaluate(Protocol):
  """Gives the values of nodes in the graph that is being traced."""

  def __call__(self, node: 'Node') -> Any:
    """Returns the node's value, a structure of tensors and sequences."""

  def given(self, values: dict['Node', Any]) -> 'Evaluate':
    """Returns the same with values of symbols, for a graph inside this one."""


class Node:
  """A value of a computation.

  Attributes:
    at_clients: Whether every client has its own; otherwise it is the server's,
      or placed nowhere.
    type_signature: Of the value, without its placement.
    level: Number of aggregations before it.
    inputs: The nodes that it is computed from.
  """

  def __init__(
      self,
      at_clients: bool,
      type_signature: tff.Type,
      inputs: list['Node'],
      level: int = 0,
  ):
    self.at_clients = at_clients
    self.type_signature = type_signature
    self.inputs = inputs
    self.level = max([level, *(node.level for node in inputs)])

  def compute(self, evaluate: 'Evaluate') -> Any:
    """Computes the value in the graph that is being traced.

    Args:
      evaluate: Gives the values of the inputs.

    Returns:
      A structure of tensors and sequences.
    """
    raise NotImplementedError(type(self).__name__)


class Argument(Node):
  """The computation's argument, or the part of it that has a placement.

  Attributes:
    index: Its number among the arguments at clients, or among the others.
  """

  def __init__(self, at_clients: bool, type_signature: tff.Type, index: int):
    super().__init__(at_clients, type_signature, [])
    self.index = index


class Symbol(Node):
  """Stands for a value that `Evaluate.given` supplies."""

  def __init__(self, at_clients: bool, type_signature: tff.Type):
    super().__init__(at_clients, type_signature, [])


class _Call(Node):
  """A call of a TensorFlow block."""

  def __init__(self, at_clients, type_signature, block, argument):
    super().__init__(at_clients, type_signature, nodes_in(argument))
    self._block = block
    self._argument = argument

  def compute(self, evaluate):
    return self._block(substitute(self._argument, evaluate))


class _Literal(Node):
  """A number that stands in the computation."""

  def __init__(self, type_signature, value):
    super().__init__(False, type_signature, [])
    self._value = value

  def compute(self, evaluate):
    del evaluate
    kind = self.type_signature
    return tf.constant(self._value, kind.dtype, kind.shape)


class _Selection(Node):
  """An element of a structure."""

  def __init__(self, source, index):
    kind = source.type_signature[index]
    super().__init__(source.at_clients, kind, [source])
    self._index = index

  def compute(self, evaluate):
    return evaluate(self.inputs[0])[self._index]


class _Function(Node):
  """A value computed by a function of the trace, such as a data set."""

  def __init__(self, at_clients, type_signature, inputs, function):
    super().__init__(at_clients, type_signature, inputs)
    self.compute = function


class Aggregation(Node):
  """What the server gets of the clients' values.

      zero, then for every client: accumulated = accumulate(accumulated, value)

  Where clients are dealt over devices, each device accumulates from zero and
  the server merges.

  Attributes:
    zero: A structure of nodes.
    accumulator: Symbol of what is accumulated so far, for `accumulated`.
    accumulated: A structure of nodes at the clients.
    merging: Two symbols, for `merged`.
    merged: A structure of nodes at the server.
  """

  def __init__(self, type_signature, value, zero, accumulate, merge):
    """Follows the functions of the aggregation.

    Args:
      type_signature: Of what is accumulated.
      value: A structure of nodes at the clients.
      zero: A structure of nodes at the server.
      accumulate: From a structure of two, at the clients.
      merge: From a structure of two, at the server.
    """
    self.zero = zero
    self.accumulator = Symbol(True, type_signature)
    self.accumulated = accumulate((self.accumulator, value))
    self.merging = tuple(Symbol(False, type_signature) for _ in range(2))
    self.merged = merge(self.merging)
    inputs = nodes_in((zero, self.accumulated))
    level = max([0, *(node.level for node in inputs)])
    super().__init__(False, type_signature, inputs, level + 1)


def nodes_in(value: Any) -> list[Node]:
  """The nodes of a structure, in order."""
  if isinstance(value, tuple):
    return [node for part in value for node in nodes_in(part)]
  return [value] if isinstance(value, Node) else []


def substitute(value: Any, resolve: Callable[[Node], Any]) -> Any:
  """Replaces the nodes of a structure."""
  if isinstance(value, tuple):
    return tuple(substitute(part, resolve) for part in value)
  return resolve(value) if isinstance(value, Node) else value


def leaf_types(type_signature: tff.Type) -> Iterator[tff.Type]:
  """Yields the types of the tensors and sequences of a type, in order."""
  if isinstance(type_signature, tff.StructType):
    for _, element in tff.structure.iter_elements(type_signature):
      yield from leaf_types(element)
  else:
    yield type_signature


def flat_specs(type_signature: tff.Type) -> list[tf.TensorSpec]:
  """The specs of the tensors of a type, in order; of a sequence its variant."""
  return [
      tf.TensorSpec([], tf.variant)
      if isinstance(leaf, tff.SequenceType)
      else tf.TensorSpec(leaf.shape, leaf.dtype)
      for leaf in leaf_types(type_signature)
  ]


def pack(type_signature: tff.Type, leaves: Iterator[Any]) -> Any:
  """Returns the structure of a type with its leaves, taken in order."""
  if isinstance(type_signature, tff.StructType):
    elements = tff.structure.iter_elements(type_signature)
    return tuple(pack(element, leaves) for _, element in elements)
  if isinstance(type_signature, tff.SequenceType):
    leaf = next(leaves)
    is_variant = isinstance(leaf, tf.Tensor)
    return tensorflow_block.Sequence(leaf) if is_variant else leaf
  return next(leaves)


def flatten(value: Any) -> list[Any]:
  """The leaves of a structure, in order."""
  if isinstance(value, tuple):
    return [leaf for part in value for leaf in flatten(part)]
  return [value]


def element_structure(type_signature: tff.Type, leaves: Iterator[Any]) -> Any:
  """Returns an element of a sequence as TFF's graphs expect it of a data set.

  Args:
    type_signature: Of the element.
    leaves: In the order of the type.

  Returns:
    `OrderedDict`s for structures with names, tuples for others.
  """
  if not isinstance(type_signature, tff.StructType):
    return next(leaves)
  elements = [
      (name, element_structure(element, leaves))
      for name, element in tff.structure.iter_elements(type_signature)
  ]
  if elements and elements[0][0] is not None:
    return collections.OrderedDict(elements)
  return tuple(element for _, element in elements)


def element_leaves(type_signature: tff.Type, element: Any) -> Iterator[Any]:
  """Yields the leaves of an `element_structure` in the order of its type."""
  if isinstance(type_signature, tff.StructType):
    named = isinstance(element, dict)
    for i, (name, inner) in enumerate(
        tff.structure.iter_elements(type_signature)
    ):
      yield from element_leaves(inner, element[name if named else i])
  else:
    yield element


def to_dataset(
    sequence: tensorflow_block.Sequence, element_type: tff.Type
) -> tf.data.Dataset:
  """Returns the data set of a sequence."""
  specs = element_structure(element_type, iter(flat_specs(element_type)))
  return tf.data.experimental.from_variant(sequence.variant, specs)


class ComputationGraph:
  """A computation as nodes.

  Attributes:
    arguments: The `Argument`s, in the order of the parameter's parts.
    result: A structure of nodes.
  """

  def __init__(self, computation: tff.Computation):
    """Compiles a computation and follows its calls.

    Args:
      computation: Any but one with functions as arguments or results.

    Raises:
      UnsupportedComputationError: If it has anything that is not known here;
        the message names it.
    """
    computation = tff.backends.test.replace_secure_intrinsics_with_bodies(
        computation
    )
    tree, _ = tensorflow_tree_transformations.replace_intrinsics_with_bodies(
        computation.to_building_block()
    )
    tree = tff.framework.to_call_dominant(tree)
    self.arguments = []
    function = _Interpreter().evaluate(tree, {}, False)
    parameter = computation.type_signature.parameter
    argument = None if parameter is None else self._arguments_of(parameter)
    result = function(argument, False)
    self.result = _place(result, computation.type_signature.result)

  def _arguments_of(self, type_signature):
    """Makes an `Argument` of every part of the parameter that is placed."""
    if isinstance(type_signature, tff.FederatedType):
      at_clients = not type_signature.all_equal
      return self._argument(at_clients, type_signature.member)
    if isinstance(type_signature, tff.StructType):
      elements = tff.structure.iter_elements(type_signature)
      return tuple(self._arguments_of(element) for _, element in elements)
    if isinstance(type_signature, tff.FunctionType):
      raise UnsupportedComputationError(
          'Expected a computation without functions as arguments, found'
          f' {type_signature}.'
      )
    return self._argument(False, type_signature)

  def _argument(self, at_clients, type_signature):
    same = [node for node in self.arguments if node.at_clients == at_clients]
    self.arguments.append(Argument(at_clients, type_signature, len(same)))
    return self.arguments[-1]


class _Interpreter:
  """Follows the calls of a tree of building blocks.

  Values are structures of nodes; functions are Python functions `(argument,
  at_clients) -> value`, where the second says whether every client calls.
  """

  def __init__(self):
    self._blocks = {}

  def evaluate(self, tree, scope: dict[str, Any], at_clients: bool) -> Any:
    """Returns the value of a building block, given those of names."""
    framework = tff.framework
    match tree:
      case framework.Reference():
        return scope[tree.name]
      case framework.Selection():
        source = self.evaluate(tree.source, scope, at_clients)
        return _select(source, tree.as_index())
      case framework.Struct():
        return tuple(
            self.evaluate(element, scope, at_clients)
            for _, element in tff.structure.iter_elements(tree)
        )
      case framework.Block():
        scope = dict(scope)
        for name, local in tree.locals:
          scope[name] = self.evaluate(local, scope, at_clients)
        return self.evaluate(tree.result, scope, at_clients)
      case framework.Call():
        function = self.evaluate(tree.function, scope, at_clients)
        argument = None
        if tree.argument is not None:
          argument = self.evaluate(tree.argument, scope, at_clients)
        return function(argument, at_clients)
      case framework.Lambda():
        return self._closure(tree, scope)
      case framework.CompiledComputation():
        return self._compiled(tree)
      case framework.Literal():
        return _Literal(tree.type_signature, tree.value)
      case framework.Intrinsic():
        return self._intrinsic(tree)
    raise UnsupportedComputationError(
        'Expected calls, intrinsics and TensorFlow, found'
        f' {type(tree).__name__} in the computation.'
    )

  def _closure(self, tree, scope):
    def function(argument, at_clients):
      inner = {**scope, tree.parameter_name: argument}
      return self.evaluate(tree.result, inner, at_clients)

    return function

  def _compiled(self, tree):
    kind = tree.proto.WhichOneof('computation')
    if kind != 'tensorflow':
      raise UnsupportedComputationError(
          f'Expected TensorFlow code, found {kind} code in the computation.'
      )
    key = tree.proto.SerializeToString(deterministic=True)
    if key not in self._blocks:
      self._blocks[key] = tensorflow_block.TensorFlowBlock(
          tree.proto.tensorflow
      )
    result_type = tree.type_signature.result
    return lambda argument, at_clients: _Call(
        at_clients, result_type, self._blocks[key], argument
    )

  def _intrinsic(self, tree):
    if tree.uri not in _INTRINSICS:
      raise UnsupportedComputationError(
          f'Expected an intrinsic among {sorted(_INTRINSICS)}, found'
          f" '{tree.uri}' in the computation."
      )
    return functools.partial(_INTRINSICS[tree.uri], tree.type_signature)


def _place(value, type_signature):
  """Gives each client its own of the server's values in a result at clients."""
  if isinstance(type_signature, tff.FederatedType):
    if type_signature.all_equal:
      return value
    return substitute(
        value, lambda node: node if node.at_clients else _at_clients(node)
    )
  if isinstance(type_signature, tff.StructType) and isinstance(value, tuple):
    kinds = tff.structure.iter_elements(type_signature)
    pairs = zip(value, kinds, strict=True)
    return tuple(_place(part, kind) for part, (_, kind) in pairs)
  return value


def _at_clients(node):
  return _Function(
      True, node.type_signature, [node], lambda evaluate: evaluate(node)
  )


def _select(value, index):
  """The element of a structure, or of a node whose value is one."""
  return value[index] if isinstance(value, tuple) else _Selection(value, index)


# Intrinsics, as functions `(their type, argument, at_clients) -> value`.


def _same(function_type, argument, at_clients):
  del function_type, at_clients
  return argument


def _map(function_type, argument, at_clients):
  del at_clients
  result = function_type.result
  at_clients = result.placement is tff.CLIENTS and not result.all_equal
  function, value = argument
  return function(value, at_clients)


def _eval_at_clients(function_type, argument, at_clients):
  del function_type, at_clients
  return argument(None, True)


def _eval_at_server(function_type, argument, at_clients):
  del function_type, at_clients
  return argument(None, False)


def _aggregate(function_type, argument, at_clients):
  del at_clients
  value, zero, accumulate, merge, report = argument
  aggregation = Aggregation(
      function_type.parameter[2].result,
      value,
      zero,
      lambda pair: accumulate(pair, True),
      lambda pair: merge(pair, False),
  )
  return report(aggregation, False)


def _federated_select(function_type, argument, at_clients):
  del at_clients
  keys, _, server_value, select = argument
  key = Symbol(True, tff.TensorType(np.int32))
  selected = select((server_value, key), True)
  element_type = function_type.result.member.element

  def compute(evaluate):
    def element(one_key):
      value = substitute(selected, evaluate.given({key: one_key}))
      return element_structure(element_type, iter(flatten(value)))

    (all_keys,) = flatten(substitute(keys, evaluate))
    dataset = tf.data.Dataset.from_tensor_slices(all_keys).map(element)
    return tensorflow_block.Sequence(tf.data.experimental.to_variant(dataset))

  result_type = function_type.result.member
  return _Function(True, result_type, nodes_in((keys, selected)), compute)


def _sequence_map(function_type, argument, at_clients):
  function, sequence = argument
  element_type = function_type.parameter[1].element
  result_type = function_type.result.element
  symbol = Symbol(at_clients, element_type)
  mapped = function(symbol, at_clients)

  def compute(evaluate):
    def element(*value):
      value = value[0] if len(value) == 1 else value
      leaves = iter(list(element_leaves(element_type, value)))
      given = evaluate.given({symbol: pack(element_type, leaves)})
      return element_structure(
          result_type, iter(flatten(substitute(mapped, given)))
      )

    dataset = to_dataset(substitute(sequence, evaluate), element_type)
    mapped_dataset = dataset.map(element)
    return tensorflow_block.Sequence(
        tf.data.experimental.to_variant(mapped_dataset)
    )

  inputs = nodes_in((sequence, mapped))
  return _Function(at_clients, function_type.result, inputs, compute)


def _sequence_reduce(function_type, argument, at_clients):
  sequence, zero, operator = argument
  element_type = function_type.parameter[0].element
  total_type = function_type.result
  symbols = Symbol(at_clients, total_type), Symbol(at_clients, element_type)
  result = operator(symbols, at_clients)

  def compute(evaluate):
    def step(total, value):
      leaves = iter(list(element_leaves(element_type, value)))
      values = pack(total_type, iter(total)), pack(element_type, leaves)
      given = evaluate.given(dict(zip(symbols, values, strict=True)))
      return tuple(flatten(substitute(result, given)))

    dataset = to_dataset(substitute(sequence, evaluate), element_type)
    start = tuple(flatten(substitute(zero, evaluate)))
    return pack(total_type, iter(dataset.reduce(start, step)))

  inputs = nodes_in((sequence, zero, result))
  return _Function(at_clients, total_type, inputs, compute)


def _sequence_sum(function_type, argument, at_clients):
  element_type = function_type.result

  def compute(evaluate):
    zeros = tuple(
        tf.zeros(spec.shape, spec.dtype) for spec in flat_specs(element_type)
    )

    def step(total, value):
      leaves = element_leaves(element_type, value)
      return tuple(old + new for old, new in zip(total, leaves, strict=True))

    dataset = to_dataset(substitute(argument, evaluate), element_type)
    return pack(element_type, iter(dataset.reduce(zeros, step)))

  return _Function(at_clients, element_type, nodes_in(argument), compute)


_INTRINSICS = {
    'federated_aggregate': _aggregate,
    'federated_apply': _map,
    'federated_broadcast': _same,
    'federated_eval_at_clients': _eval_at_clients,
    'federated_eval_at_server': _eval_at_server,
    'federated_map': _map,
    'federated_map_all_equal': _map,
    'federated_secure_select': _federated_select,
    'federated_select': _federated_select,
    'federated_value_at_clients': _same,
    'federated_value_at_server': _same,
    'federated_zip_at_clients': _same,
    'federated_zip_at_server': _same,
    'sequence_map': _sequence_map,
    'sequence_reduce': _sequence_reduce,
    'sequence_sum': _sequence_sum,
}
