"""A data source whose cohorts are those of a run: pure functions of the round.

The iterator of TFF's own data sources draws at random, and a restored one draws
anew. Here its position is the number of the round, which is all that a program
saves of it, so that a program that goes on trains on the same clients.
"""

from collections.abc import Callable, Sequence
import json
from typing import Any, ClassVar, NamedTuple

import tensorflow_federated as tff


class Cohort(NamedTuple):
  """What a data source selects for a round.

  Attributes:
    round_num: From 1.
    clients: The ids of the clients, and what they hold, without what they keep
      between rounds.
  """

  round_num: int
  clients: Sequence[tuple[str, Any]]


class CohortSource(tff.program.FederatedDataSource):
  """The clients of a run."""

  def __init__(
      self,
      cohort: Callable[[int], Sequence[str]],
      client_data: Callable[[str], Any],
      client_type: tff.Type,
  ):
    """Initializes the source; nothing is read yet.

    Args:
      cohort: Round (from 1) -> the ids of its clients; a pure function.
      client_data: Client id -> the client's data.
      client_type: Unplaced type of these data.
    """
    self._cohort, self._client_data = cohort, client_data
    self._type = tff.FederatedType(client_type, tff.CLIENTS)

    # TFF restores an iterator by its class, which so has to know the source.
    class Iterator(_CohortIterator):
      source = self

    self._iterator_class = Iterator

  @property
  def federated_type(self) -> tff.FederatedType:
    """The type of the clients' data."""
    return self._type

  def iterator(self) -> '_CohortIterator':
    """Returns an iterator that begins with the first round."""
    return self._iterator_class(0)

  def select(self, round_num: int, k: int | None = None) -> Any:
    """Returns the clients of a round, a `Cohort`.

    Args:
      round_num: From 1.
      k: How many; those of the run, or an error.

    Raises:
      ValueError: If the cohort has another number of clients.
    """
    ids = self._cohort(round_num)
    if k is not None and k != len(ids):
      raise ValueError(
          f'Expected to select the {len(ids)} clients of a cohort, found {k}.'
      )
    return Cohort(round_num, [(c, self._client_data(c)) for c in ids])


class EvaluationSource(CohortSource):
  """The clients of an evaluation, whose data go to a computation as they are.

  Its rounds are those of one evaluation, which has one unless it lasts longer.
  """

  def select(self, round_num: int, k: int | None = None) -> Any:
    """Returns what each client of a round holds; see `CohortSource`."""
    return [data for _, data in super().select(round_num, k).clients]


class _CohortIterator(tff.program.FederatedDataSourceIterator):
  """The position in the rounds, which is all that is saved."""

  source: ClassVar[CohortSource]

  def __init__(self, rounds: int):
    self._rounds = rounds

  @property
  def federated_type(self) -> tff.FederatedType:
    return self.source.federated_type

  def select(self, k: int | None = None) -> Any:
    """Returns the next round's clients; see `CohortSource.select`."""
    cohort = self.source.select(self._rounds + 1, k)
    self._rounds += 1
    return cohort

  @classmethod
  def from_bytes(cls, buffer: bytes) -> '_CohortIterator':
    """Returns the iterator that `to_bytes` was called on."""
    return cls(json.loads(buffer)['rounds'])

  def to_bytes(self) -> bytes:
    """Returns the position."""
    return json.dumps({'rounds': self._rounds}).encode()

  def __deepcopy__(self, memo):
    return type(self)(self._rounds)

  def __eq__(self, other):
    return type(self) is type(other) and self._rounds == other._rounds

  __hash__ = None  # type: ignore[assignment]  # Its position changes.
