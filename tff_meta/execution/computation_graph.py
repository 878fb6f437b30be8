"""TFF computations as graphs of what is computed where.

A compiled TFF computation is a tree of calls: of TensorFlow graphs, and of
intrinsics such as `federated_map`. Here the calls are followed once, without
data. What remains is a graph of nodes, each computed at the server or at every
client, from nodes before it. Placement, broadcast and zip leave no node: they
say where a value may be used, not what it is. An intrinsic that is not known is
an error now, not when a round runs.
"""

import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

# Not part of TFF's public interface; the version is pinned.
from tensorflow_federated.python.core.environments.tensorflow_backend import (
    tensorflow_tree_transformations,
)

from tff_meta.execution import nodes
from tff_meta.execution import structures
from tff_meta.execution import tensorflow_block

_SECURE = b'federated_secure_'  # How the names of secure intrinsics begin.


class UnsupportedComputationError(NotImplementedError):
  """A computation has something that cannot run in this process."""


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
    serialized = tff.framework.serialize_computation(computation)
    if _SECURE in serialized.SerializeToString():
      # Only then, as TFF builds a tree of the whole computation for it.
      computation = tff.backends.test.replace_secure_intrinsics_with_bodies(
          computation
      )
      serialized = tff.framework.serialize_computation(computation)
    self.arguments: list[nodes.Argument] = []
    function = _Interpreter().evaluate(serialized, {}, False)
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
    self.arguments.append(nodes.Argument(at_clients, type_signature, len(same)))
    return self.arguments[-1]


class _Interpreter:
  """Follows the calls of a serialized computation.

  It reads the message itself: TFF's tree of building blocks has the type of
  every part, and takes longer to make than all of the rest.

  Values are structures of nodes; functions are Python functions `(argument,
  at_clients) -> value`, where the second says whether every client calls.
  """

  def __init__(self):
    self._blocks = {}

  def evaluate(self, proto, scope: dict[str, Any], at_clients: bool) -> Any:
    """Returns the value of a part of the computation, given those of names."""
    match proto.WhichOneof('computation'):
      case 'reference':
        return scope[proto.reference.name]
      case 'selection':
        source = self.evaluate(proto.selection.source, scope, at_clients)
        return _select(source, proto.selection.index)
      case 'struct':
        return tuple(
            self.evaluate(element.value, scope, at_clients)
            for element in proto.struct.element
        )
      case 'block':
        # A new scope each time: functions keep that in which they are made.
        for local in proto.block.local:
          value = self.evaluate(local.value, scope, at_clients)
          scope = {**scope, local.name: value}
        return self.evaluate(proto.block.result, scope, at_clients)
      case 'call':
        function = self.evaluate(proto.call.function, scope, at_clients)
        argument = None
        if proto.call.HasField('argument'):
          argument = self.evaluate(proto.call.argument, scope, at_clients)
        return function(argument, at_clients)
      case 'lambda':
        return self._closure(getattr(proto, 'lambda'), scope)
      case 'tensorflow':
        return self._tensorflow(proto)
      case 'literal':
        literal = _building_block(proto)
        return nodes.Literal(literal.type_signature, literal.value)
      case 'intrinsic':
        return self._intrinsic(proto)
      case kind:
        raise UnsupportedComputationError(
            'Expected calls, intrinsics and TensorFlow, found a part of kind'
            f" '{kind}' in the computation."
        )

  def _closure(self, proto, scope):
    def function(argument, at_clients):
      inner = {**scope, proto.parameter_name: argument}
      return self.evaluate(proto.result, inner, at_clients)

    return function

  def _tensorflow(self, proto):
    key = proto.SerializeToString(deterministic=True)
    if key not in self._blocks:
      self._blocks[key] = tensorflow_block.TensorFlowBlock(proto.tensorflow)
    result_type = _building_block(proto).type_signature.result
    return lambda argument, at_clients: nodes.Call(
        at_clients, result_type, self._blocks[key], argument
    )

  def _intrinsic(self, proto):
    uri = proto.intrinsic.uri
    block = _building_block(proto)
    if uri in _INTRINSICS:
      return functools.partial(_INTRINSICS[uri], block.type_signature)
    body, is_known = (
        tensorflow_tree_transformations.replace_intrinsics_with_bodies(block)
    )
    if not is_known:
      raise UnsupportedComputationError(
          f'Expected an intrinsic among {sorted(_INTRINSICS)}, or one that TFF'
          f" has a body for, found '{uri}' in the computation."
      )
    return self.evaluate(body.proto, {}, False)


def _building_block(proto):
  """TFF's reading of a part of a computation, with its type."""
  return tff.framework.ComputationBuildingBlock.from_proto(proto)


def _place(value, type_signature):
  """Gives each client its own of the server's values in a result at clients."""
  if isinstance(type_signature, tff.FederatedType):
    if type_signature.all_equal:
      return value
    return nodes.substitute(
        value, lambda node: node if node.at_clients else _at_clients(node)
    )
  if isinstance(type_signature, tff.StructType) and isinstance(value, tuple):
    kinds = tff.structure.iter_elements(type_signature)
    pairs = zip(value, kinds, strict=True)
    return tuple(_place(part, kind) for part, (_, kind) in pairs)
  return value


def _at_clients(node):
  return nodes.Function(
      True, node.type_signature, [node], lambda evaluate: evaluate(node)
  )


def _select(value, index):
  """The element of a structure, or of a node whose value is one."""
  return (
      value[index]
      if isinstance(value, tuple)
      else nodes.Selection(value, index)
  )


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
  aggregation = nodes.Aggregation(
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
  key = nodes.Symbol(True, tff.TensorType(np.int32))
  selected = select((server_value, key), True)
  element_type = function_type.result.member.element

  def compute(evaluate):
    def element(one_key):
      value = nodes.substitute(selected, evaluate.given({key: one_key}))
      return structures.element_structure(
          element_type, iter(structures.flatten(value))
      )

    (all_keys,) = structures.flatten(nodes.substitute(keys, evaluate))
    dataset = tf.data.Dataset.from_tensor_slices(all_keys).map(element)
    return tensorflow_block.Sequence(tf.data.experimental.to_variant(dataset))

  result_type = function_type.result.member
  return nodes.Function(
      True, result_type, nodes.nodes_in((keys, selected)), compute
  )


def _sequence_map(function_type, argument, at_clients):
  function, sequence = argument
  element_type = function_type.parameter[1].element
  result_type = function_type.result.element
  is_tuple = isinstance(element_type, tff.StructType) and not any(
      tff.structure.name_list_with_nones(element_type)
  )
  symbol = nodes.Symbol(at_clients, element_type)
  mapped = function(symbol, at_clients)

  def compute(evaluate):
    def element(*parts):  # One argument for each element of a tuple.
      value = parts if is_tuple else parts[0]
      leaves = iter(list(structures.element_leaves(element_type, value)))
      given = evaluate.given({symbol: structures.pack(element_type, leaves)})
      return structures.element_structure(
          result_type, iter(structures.flatten(nodes.substitute(mapped, given)))
      )

    dataset = structures.to_dataset(
        nodes.substitute(sequence, evaluate), element_type
    )
    mapped_dataset = dataset.map(element)
    return tensorflow_block.Sequence(
        tf.data.experimental.to_variant(mapped_dataset)
    )

  inputs = nodes.nodes_in((sequence, mapped))
  return nodes.Function(at_clients, function_type.result, inputs, compute)


def _sequence_reduce(function_type, argument, at_clients):
  sequence, zero, operator = argument
  element_type = function_type.parameter[0].element
  total_type = function_type.result
  symbols = nodes.Symbol(at_clients, total_type), nodes.Symbol(
      at_clients, element_type
  )
  result = operator(symbols, at_clients)

  def compute(evaluate):
    def step(total, value):
      leaves = iter(list(structures.element_leaves(element_type, value)))
      values = structures.pack(total_type, iter(total)), structures.pack(
          element_type, leaves
      )
      given = evaluate.given(dict(zip(symbols, values, strict=True)))
      return tuple(structures.flatten(nodes.substitute(result, given)))

    dataset = structures.to_dataset(
        nodes.substitute(sequence, evaluate), element_type
    )
    start = tuple(structures.flatten(nodes.substitute(zero, evaluate)))
    return structures.pack(total_type, iter(dataset.reduce(start, step)))

  inputs = nodes.nodes_in((sequence, zero, result))
  return nodes.Function(at_clients, total_type, inputs, compute)


def _sequence_sum(function_type, argument, at_clients):
  element_type = function_type.result

  def compute(evaluate):
    zeros = tuple(
        tf.zeros(spec.shape, spec.dtype)
        for spec in structures.flat_specs(element_type)
    )

    def step(total, value):
      leaves = structures.element_leaves(element_type, value)
      return tuple(old + new for old, new in zip(total, leaves, strict=True))

    dataset = structures.to_dataset(
        nodes.substitute(argument, evaluate), element_type
    )
    return structures.pack(element_type, iter(dataset.reduce(zeros, step)))

  return nodes.Function(
      at_clients, element_type, nodes.nodes_in(argument), compute
  )


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
