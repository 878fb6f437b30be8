"""Who computes for this process elsewhere, where there is anybody.

Tests of clients and groups are calls of traced functions, which may be dealt
over other processes as the clients of a round are. `training` and `evaluation`
choose nobody: whoever sets an execution context does, and they ask here.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
import itertools
from typing import Any, Protocol, TypeVar

import tensorflow as tf

Tag = TypeVar('Tag')


class Dealer(Protocol):
  """Computes calls in other processes."""

  def call_all(
      self,
      function: Any,
      shared: list[Any],
      calls: Iterable[list[Any]],
  ) -> Iterator[list[Any]]:
    """Computes calls of a traced function.

    Args:
      function: A `ConcreteFunction` without variables.
      shared: Its first inputs, tensors, which all calls have in common.
      calls: Of every call, the other inputs. They are taken as workers are
        idle, and must not use workers themselves.

    Yields:
      The outputs of every call, tensors or arrays, in order.
    """

  def statistics(self) -> Mapping[str, float]:
    """Returns what was counted since this was last asked."""

  def status(self) -> str:
    """Returns who computes, for people."""


_dealers: list[Dealer] = []


def set_dealer(dealer: Dealer | None) -> None:
  """Chooses who computes from now on; None for this process alone."""
  _dealers[:] = [] if dealer is None else [dealer]


def dealer() -> Dealer | None:
  """Returns who was chosen, None where nobody was."""
  return _dealers[0] if _dealers else None


def call_all(
    function: tf.types.experimental.GenericFunction,
    specs: Any,
    shared: tuple[Any, ...],
    calls: Iterable[tuple[Tag, tuple[Any, ...]]],
) -> Iterator[tuple[Tag, Any]]:
  """Computes calls of a function, elsewhere where somebody was chosen.

  Args:
    function: What is called; reuse it, it is traced once.
    specs: `(shared, arguments) -> specs of all arguments` to trace it for.
    shared: Its first arguments, structures of tensors.
    calls: Of every call what it is for, and the other arguments.

  Yields:
    What a call was for, and its result, in order.
  """
  chosen = dealer()
  if chosen is None:
    for tag, arguments in calls:
      function.get_concrete_function(*specs(shared, arguments))
      yield tag, function(*shared, *arguments)
    return
  remaining = iter(calls)
  first = next(remaining, None)
  if first is None:
    return
  concrete = function.get_concrete_function(*specs(shared, first[1]))
  tags: collections.deque[Tag] = collections.deque()

  def inputs():
    for tag, arguments in itertools.chain([first], remaining):
      tags.append(tag)
      yield tf.nest.flatten(arguments)

  for outputs in chosen.call_all(concrete, tf.nest.flatten(shared), inputs()):
    found = iter(outputs)
    # Where a function returns no tensor it returns None.
    result = tf.nest.map_structure(
        lambda part, found=found: None if part is None else next(found),
        concrete.structured_outputs,
    )
    yield tags.popleft(), result
