"""Bytes that a client is sent, and sends, when a computation runs once.

They are read off the types in TFF's computation, without data: those of what
the server broadcasts, and of what is aggregated over the clients. Nothing is
measured on a wire. A transport's framing and compression are not in the
numbers, nor are the masks and keys of a protocol for secure sums.

What a client computes and keeps for itself is not sent, nor are its own data
and its memory; a constant of the computation comes with the program. What is
broadcast or summed twice counts twice; what nothing depends on does not count.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow_federated as tff

from tff_meta import composition


class Traffic(NamedTuple):
  """What travels between the server and one client.

  Attributes:
    down: Bytes that a client is sent; None if its types do not tell.
    up: Bytes that a client sends; None if its types do not tell.
  """

  down: int | None
  up: int | None

  def times(self, count: int) -> 'Traffic':
    """Returns what travels for so many clients, or rounds, of this kind."""
    return Traffic(*(n if n is None else n * count for n in self))


# Where nobody has looked.
UNKNOWN = Traffic(None, None)


def of_process(process: tff.learning.templates.LearningProcess) -> Traffic:
  """Returns what travels in a round of a process, of one client.

  Args:
    process: Its clients may keep something between rounds.

  Returns:
    As `of_computation` does.
  """
  if isinstance(process, composition.StatefulLearningProcess):
    return of_computation(process.next_with_memory)
  return of_computation(process.next)


def of_computation(computation: tff.Computation) -> Traffic:
  """Returns what travels when a computation runs once, of one client.

  Args:
    computation: Federated or not.

  Returns:
    A `Traffic`. A direction is None, and no guess, if something of it has no
    fixed size (see `num_bytes`); both are if there is an intrinsic of TFF that
    is not known here.
  """
  tree = tff.framework.ComputationBuildingBlock.from_proto(
      tff.framework.serialize_computation(computation)
  )
  down: list[int | None] = [0]
  up: list[int | None] = [0]
  # In this form all calls stand one after another, and none is without use.
  for uri, kind in _intrinsics(tff.framework.to_call_dominant(tree)):
    if uri in _STAYS:
      continue
    known = uri in _DOWN or uri in _UP
    down.append(_DOWN.get(uri, _nothing)(kind) if known else None)
    up.append(_UP.get(uri, _nothing)(kind) if known else None)
  return Traffic(_total(down), _total(up))


def num_bytes(type_signature: tff.Type) -> int | None:
  """Returns the bytes of a value's tensors, those of one client if placed.

  Args:
    type_signature: Of the value. A boolean is a byte.

  Returns:
    None if a tensor is of strings or has a dimension that the type leaves open,
    and of a sequence, whose length no type has.

  Raises:
    TypeError: If values of the type are no data, such as functions.
  """
  match type_signature:
    case tff.FederatedType():
      return num_bytes(type_signature.member)
    case tff.StructType():
      parts = tff.structure.iter_elements(type_signature)
      return _total(num_bytes(part) for _, part in parts)
    case tff.SequenceType():
      return None
    case tff.TensorType():
      dtype = np.dtype(type_signature.dtype)
      shape = type_signature.shape
      if dtype.kind in 'OSU' or shape is None or None in shape:
        return None
      return math.prod(shape) * dtype.itemsize
  raise TypeError(f'Expected the type of data, found {type_signature}.')


def _intrinsics(tree) -> Iterator[tuple[str, tff.FunctionType]]:
  """Yields name and type of every intrinsic that is called."""
  while isinstance(tree, tff.framework.Lambda | tff.framework.Block):
    if isinstance(tree, tff.framework.Block):
      for _, value in tree.locals:
        if isinstance(value.function, tff.framework.Intrinsic):
          yield value.function.uri, value.function.type_signature
    tree = tree.result


def _total(numbers: Iterable[int | None]) -> int | None:
  """Returns the sum, None if one of them is."""
  total = 0
  for number in numbers:
    if number is None:
      return None
    total += number
  return total


# Of the type of an intrinsic to bytes.


def _nothing(kind):
  del kind
  return 0


def _all(kind):
  return num_bytes(kind.parameter)


def _first(kind):
  return num_bytes(kind.parameter[0])


def _first_two(kind):
  return _total(num_bytes(kind.parameter[i]) for i in (0, 1))


def _mean(kind):
  # TFF weighs by ones, as many as there are numbers.
  return _total(2 * [num_bytes(kind.parameter)])


def _selected(kind):
  """A value for every key, of which a client has a vector."""
  (num_keys,) = kind.parameter[0].member.shape  # TFF takes no open one.
  return _total(num_keys * [num_bytes(kind.result.member.element)])


_Rule = Callable[[Any], int | None]
_DOWN: Mapping[str, _Rule] = {
    'federated_broadcast': _all,
    'federated_secure_select': _selected,
    'federated_select': _selected,
}
# Weights go beside the values that they are of; what bounds a secure sum stays
# at the server.
_UP: Mapping[str, _Rule] = {
    'federated_aggregate': _first,
    'federated_max': _all,
    'federated_mean': _mean,
    'federated_min': _all,
    'federated_secure_modular_sum': _first,
    'federated_secure_select': _first,
    'federated_secure_sum': _first,
    'federated_secure_sum_bitwidth': _first,
    'federated_select': _first,
    'federated_sum': _all,
    'federated_weighted_mean': _first_two,
}
_STAYS = frozenset(
    [
        'federated_apply',
        'federated_eval_at_clients',
        'federated_eval_at_server',
        'federated_map',
        'federated_map_all_equal',
        'federated_value_at_clients',
        'federated_value_at_server',
        'federated_zip_at_clients',
        'federated_zip_at_server',
        'sequence_map',
        'sequence_reduce',
        'sequence_sum',
    ]
)
