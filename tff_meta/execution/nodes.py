"""The nodes of a computation's graph: what is computed where, and from what.

A *level* counts the aggregations before a node: the clients' nodes of level 0
can be computed for one client after the other, then the server's of level 1 and
the clients' of level 1, which use the aggregates, and so on. Nearly all
computations have one.
"""

from collections.abc import Callable
import functools
from typing import Any, Protocol

import tensorflow as tf
import tensorflow_federated as tff


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
    self.level: int = max([level, *(node.level for node in inputs)])

  @functools.cached_property
  def is_pure(self) -> bool:
    """Whether the value is a function of the inputs' values alone.

    False also where that is not known.
    """
    return False

  @functools.cached_property
  def is_constant(self) -> bool:
    """Whether the value is the same in every call, whatever the arguments."""
    return self.is_pure and all(node.is_constant for node in self.inputs)

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


class Call(Node):
  """A call of a TensorFlow block."""

  def __init__(self, at_clients, type_signature, block, argument):
    super().__init__(at_clients, type_signature, nodes_in(argument))
    self._block = block
    self._argument = argument

  @functools.cached_property
  def is_pure(self):
    """See `Node`."""
    return self._block.is_pure

  def compute(self, evaluate):
    """Imports the block's graph."""
    return self._block(substitute(self._argument, evaluate))


class Literal(Node):
  """A number that stands in the computation."""

  is_pure = True

  def __init__(self, type_signature, value):
    super().__init__(False, type_signature, [])
    self._value = value

  def compute(self, evaluate):
    """Adds a constant."""
    del evaluate
    kind = self.type_signature
    return tf.constant(self._value, kind.dtype, kind.shape)


class Selection(Node):
  """An element of a structure."""

  is_pure = True

  def __init__(self, source, index):
    kind = source.type_signature[index]
    super().__init__(source.at_clients, kind, [source])
    self._index = index

  def compute(self, evaluate):
    """Takes the element."""
    return evaluate(self.inputs[0])[self._index]


class Function(Node):
  """A value computed by a function of the trace, such as a data set."""

  def __init__(self, at_clients, type_signature, inputs, function):
    super().__init__(at_clients, type_signature, inputs)
    self._function = function

  def compute(self, evaluate):
    """Calls the function."""
    return self._function(evaluate)


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
