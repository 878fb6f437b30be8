"""What clients keep between rounds, in memory or in an SQLite file.

A training process hands out each sampled client's new state and takes it back
the next time the client is sampled; between, it is here, and nowhere on the
server. States are mappings from names to NumPy arrays.

Every state is kept under the round that it came from, so that a run that has to
go back to an earlier checkpoint finds the states of that round: `roll_back`
forgets what came later. `commit` makes the states durable and drops those that
no checkpoint can need any more. Calling it before a checkpoint is written, with
that checkpoint's round among `kept_rounds`, commits both together: without the
checkpoint's file the states of its round are rolled back, and a checkpoint
whose round the store does not `hold` cannot be gone on from.

Reading, writing and committing cost as much as the cohort's states, however
many clients there are.
"""

import abc
from collections.abc import Collection, Iterator, Mapping
import contextlib
import io
import pathlib
import sqlite3
import zipfile

import numpy as np

ClientState = Mapping[str, np.ndarray]


class ClientStateError(OSError):
  """The file of client states cannot be read or written."""


class ClientStateStore(abc.ABC):
  """States of clients by round.

  Attributes:
    is_durable: Whether what is committed outlives the process.
  """

  is_durable: bool

  @abc.abstractmethod
  def read(
      self, client_id: str, round_num: int | None = None
  ) -> ClientState | None:
    """Returns a client's state, None if it has none.

    Args:
      client_id: Which client.
      round_num: As it was after this round; None for the newest.
    """

  @abc.abstractmethod
  def client_ids(self, round_num: int | None = None) -> tuple[str, ...]:
    """Returns the ids of the clients that have a state, sorted.

    Args:
      round_num: After this round; None for now.
    """

  @abc.abstractmethod
  def write(self, client_id: str, round_num: int, state: ClientState) -> None:
    """Keeps a client's state.

    Args:
      client_id: Which client.
      round_num: The round it comes from, later than the client's last one.
      state: Arrays of numbers by name.

    Raises:
      TypeError: If an array is not of numbers.
    """

  @abc.abstractmethod
  def commit(self, kept_rounds: Collection[int]) -> None:
    """Makes what was written durable and drops what is not needed.

    Args:
      kept_rounds: The rounds that may still be gone back to.
    """

  @abc.abstractmethod
  def holds(self, round_num: int) -> bool:
    """Returns whether the states of a round were committed and kept."""

  @abc.abstractmethod
  def roll_back(self, round_num: int) -> None:
    """Forgets all states that came after a round."""

  @abc.abstractmethod
  def close(self) -> None:
    """Closes the store; what was not committed may be lost."""


def _check_numeric(state: ClientState) -> None:
  for name, array in state.items():
    if np.asarray(array).dtype.kind not in 'biufc':
      raise TypeError(
          f'Expected the client state {name!r} to be numeric, found'
          f' {np.asarray(array).dtype}.'
      )


def _needed(written: Collection[int], kept_rounds: Collection[int]) -> set[int]:
  """Which of a client's rounds are needed to go back to `kept_rounds`."""
  needed = {r for r in written if r > max(kept_rounds, default=0)}
  for kept in kept_rounds:
    needed |= {max((r for r in written if r <= kept), default=0)}
  return needed


class InMemoryStore(ClientStateStore):
  """States that end with the process."""

  is_durable = False

  def __init__(self):
    self._versions: dict[str, dict[int, ClientState]] = {}
    self._kept_rounds: set[int] = set()

  def read(self, client_id, round_num=None):
    """See base class."""
    versions = self._versions.get(client_id, {})
    rounds = [r for r in versions if round_num is None or r <= round_num]
    return versions[max(rounds)] if rounds else None

  def client_ids(self, round_num=None):
    """See base class."""
    return tuple(
        client_id
        for client_id in sorted(self._versions)
        if self.read(client_id, round_num) is not None
    )

  def write(self, client_id, round_num, state):
    """See base class."""
    _check_numeric(state)
    copies = {name: np.array(array) for name, array in state.items()}
    self._versions.setdefault(client_id, {})[round_num] = copies

  def commit(self, kept_rounds):
    """See base class."""
    for client_id, versions in self._versions.items():
      needed = _needed(versions, kept_rounds)
      self._versions[client_id] = {
          r: state for r, state in versions.items() if r in needed
      }
    self._kept_rounds = set(kept_rounds)

  def holds(self, round_num):
    """See base class."""
    return round_num in self._kept_rounds

  def roll_back(self, round_num):
    """See base class."""
    for client_id, versions in list(self._versions.items()):
      kept = {r: state for r, state in versions.items() if r <= round_num}
      self._versions[client_id] = kept
      if not kept:
        del self._versions[client_id]
    self._kept_rounds = {r for r in self._kept_rounds if r <= round_num}

  def close(self):
    """See base class."""


_SCHEMA = """
CREATE TABLE IF NOT EXISTS states (
  client_id TEXT NOT NULL,
  round INTEGER NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (client_id, round)
);
CREATE TABLE IF NOT EXISTS kept_rounds (round INTEGER PRIMARY KEY);
"""


class SqliteStore(ClientStateStore):
  """States in an SQLite file, as NumPy archives without pickles.

  One process writes at a time. Others may read meanwhile; they see what was
  committed last before they opened the file, and nothing later.
  """

  is_durable = True

  def __init__(self, path: pathlib.Path, *, read_only: bool = False):
    """Opens the file, or makes it.

    Args:
      path: The file.
      read_only: Whether the file must exist and is not written.

    Raises:
      ClientStateError: If that is not possible.
    """
    self._path = path
    self._written = set()  # Clients written since the last commit.
    with self._errors():
      self._database = sqlite3.connect(
          f'{path.absolute().as_uri()}?mode={"rw" if read_only else "rwc"}',
          uri=True,
          isolation_level=None,  # Transactions begin where they are asked for.
          timeout=60,
      )
      if read_only:
        # Not mode=ro, which would leave SQLite's files for readers behind.
        self._database.execute('PRAGMA query_only = ON')
        # A transaction that stays open: all that is read is of one commit.
        self._database.execute('BEGIN')
        self._database.execute('SELECT client_id FROM states LIMIT 1')
        return
      # Of a new file: megabytes take a quarter less time than with 4 kB.
      self._database.execute('PRAGMA page_size = 16384')
      # Readers do not wait for the writer, nor it for them; a commit is synced.
      self._database.execute('PRAGMA journal_mode = WAL')
      self._database.execute('PRAGMA synchronous = FULL')
      self._database.executescript(_SCHEMA)

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    except sqlite3.Error as error:
      raise ClientStateError(
          f'Expected to read and write the client states in {self._path},'
          f' found: {error}.'
      ) from None

  def read(self, client_id, round_num=None):
    """See base class."""
    with self._errors():
      row = self._database.execute(
          'SELECT content FROM states WHERE client_id = ? AND round <= ? '
          'ORDER BY round DESC LIMIT 1',
          (client_id, _bound(round_num)),
      ).fetchone()
    if row is None:
      return None
    try:
      with np.load(io.BytesIO(row[0]), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
    except (ValueError, zipfile.BadZipFile) as error:
      raise ClientStateError(
          f'Expected the state of client {client_id!r} in {self._path} as it'
          f' was written, found it damaged ({error}).'
      ) from None

  def client_ids(self, round_num=None):
    """See base class."""
    with self._errors():
      rows = self._database.execute(
          'SELECT DISTINCT client_id FROM states WHERE round <= ?'
          ' ORDER BY client_id',
          (_bound(round_num),),
      )
      return tuple(client_id for (client_id,) in rows)

  def write(self, client_id, round_num, state):
    """See base class."""
    _check_numeric(state)
    buffer = io.BytesIO()
    np.savez(buffer, **state)
    with self._errors():
      self._begin()
      self._database.execute(
          'INSERT OR REPLACE INTO states VALUES (?, ?, ?)',
          (client_id, round_num, buffer.getvalue()),
      )
    self._written.add(client_id)

  def commit(self, kept_rounds):
    """See base class."""
    with self._errors():
      self._begin()
      for client_id in self._written:
        rows = self._database.execute(
            'SELECT round FROM states WHERE client_id = ?', (client_id,)
        )
        written = [r for (r,) in rows]
        for r in set(written) - _needed(written, kept_rounds):
          self._database.execute(
              'DELETE FROM states WHERE client_id = ? AND round = ?',
              (client_id, r),
          )
      self._database.execute('DELETE FROM kept_rounds')
      self._database.executemany(
          'INSERT OR IGNORE INTO kept_rounds VALUES (?)',
          [(r,) for r in kept_rounds],
      )
      self._database.execute('COMMIT')
    self._written.clear()

  def holds(self, round_num):
    """See base class."""
    with self._errors():
      row = self._database.execute(
          'SELECT 1 FROM kept_rounds WHERE round = ?', (round_num,)
      ).fetchone()
    return row is not None

  def roll_back(self, round_num):
    """See base class."""
    with self._errors():
      self._begin()
      for table in ('states', 'kept_rounds'):
        self._database.execute(
            f'DELETE FROM {table} WHERE round > ?', (round_num,)
        )
      self._database.execute('COMMIT')

  def close(self):
    """See base class."""
    self._database.close()

  def _begin(self):
    if not self._database.in_transaction:
      self._database.execute('BEGIN IMMEDIATE')


def _bound(round_num: int | None) -> int:
  """The last round to look at; SQLite's largest integer for all."""
  return 2**63 - 1 if round_num is None else round_num
