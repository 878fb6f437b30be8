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

Every state is kept with a digest of its client, round and content, so that a
changed one is an error; `fingerprint` is one of all of them, so that a
checkpoint can tell whether states are missing, or are another run's.

Reading, writing and committing cost as much as the cohort's states, however
many clients there are; opening a file and rolling back as much as there are
clients.
"""

import abc
import collections
from collections.abc import Collection, Iterator, Mapping
import contextlib
import hashlib
import itertools
import pathlib
import sqlite3

import numpy as np

from tff_meta import array_archives
from tff_meta import plain_files

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
  def fingerprint(self, round_num: int | None = None) -> str:
    """Returns what tells the states of a round from others.

    Args:
      round_num: After this round; None for now, which costs nothing.

    Returns:
      Equal for equal states of the same clients; empty if nothing is durable.
    """

  @abc.abstractmethod
  def check_in_place(self) -> None:
    """Raises a `ClientStateError` if what is durable would be lost."""

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

  def fingerprint(self, round_num=None):
    """See base class."""
    return ''

  def check_in_place(self):
    """See base class."""

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


# The digest comes first: it is read without the pages that content takes.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS states (
  client_id TEXT NOT NULL,
  round INTEGER NOT NULL,
  digest BLOB,
  content BLOB NOT NULL,
  PRIMARY KEY (client_id, round)
);
CREATE TABLE IF NOT EXISTS kept_rounds (round INTEGER PRIMARY KEY);
"""
_NEWEST = """
SELECT {columns} FROM states WHERE client_id = ? AND round <= ?
ORDER BY round DESC LIMIT 1
"""
_SIDE_FILES = ('', '-journal', '-shm', '-wal')


class SqliteStore(ClientStateStore):
  """States in an SQLite file, as NumPy archives without pickles.

  One process writes at a time. Others may read meanwhile; they see what was
  committed last before they opened the file, and nothing later.
  """

  is_durable = True

  def __init__(self, path: pathlib.Path, *, read_only: bool = False):
    """Opens the file, or makes it.

    States in files of earlier versions have no digest; they are read as they
    are.

    Args:
      path: The file.
      read_only: Whether the file must exist and is not written.

    Raises:
      ClientStateError: If that is not possible.
    """
    self._path = path
    # Clients whose states may not all be needed after the next commit: those
    # written since the last one, and by each kept round those of which it needs
    # an older state, and no later one does.
    self._written: set[str] = set()
    self._held_by: dict[int, set[str]] = collections.defaultdict(set)
    self._place: plain_files.Place | None = None
    with self._errors():
      for suffix in _SIDE_FILES:
        plain_files.check_plain(path.with_name(path.name + suffix))
      self._database = sqlite3.connect(
          f'{path.absolute().as_uri()}?mode={"rw" if read_only else "rwc"}',
          uri=True,
          isolation_level=None,  # Transactions begin where they are asked for.
          timeout=60,
      )
      try:
        if read_only:
          self._begin_to_read()
        else:
          self._begin_to_write()
        self._now = self._combined(None)
      except BaseException:
        self._database.close()
        raise

  def _begin_to_read(self):
    # Not mode=ro, which would leave SQLite's files for readers behind.
    self._database.execute('PRAGMA query_only = ON')
    # A transaction that stays open: all that is read is of one commit.
    self._database.execute('BEGIN')
    self._database.execute('SELECT client_id FROM states LIMIT 1')
    self._digest_column = 'digest' if self._has_digests() else 'NULL'

  def _begin_to_write(self):
    # Of a new file: megabytes take a quarter less time than with 4 kB, and
    # pages that are free can be given back.
    self._database.execute('PRAGMA page_size = 16384')
    self._database.execute('PRAGMA auto_vacuum = INCREMENTAL')
    # Readers do not wait for the writer, nor it for them; a commit is synced.
    self._database.execute('PRAGMA journal_mode = WAL')
    self._database.execute('PRAGMA synchronous = FULL')
    self._database.executescript(_SCHEMA)
    if not self._has_digests():
      self._database.execute('ALTER TABLE states ADD COLUMN digest BLOB')
    self._digest_column = 'digest'
    self._written = {
        client_id
        for (client_id,) in self._database.execute(
            'SELECT client_id FROM states GROUP BY client_id'
            ' HAVING count(*) > 1'
        )
    }
    self._place = plain_files.Place(self._path)

  def _has_digests(self) -> bool:
    columns = self._database.execute('PRAGMA table_info(states)').fetchall()
    return 'digest' in [name for _, name, *_ in columns]

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    # The latter two where a damaged file claims that something is large.
    except (sqlite3.Error, OverflowError, MemoryError) as error:
      raise ClientStateError(
          f'Expected to read and write the client states in {self._path},'
          f' found: {error}.'
      ) from None
    except plain_files.DamagedFileError as error:
      raise ClientStateError(str(error)) from None

  def read(self, client_id, round_num=None):
    """See base class."""
    with self._errors():
      row = self._database.execute(
          _NEWEST.format(columns=f'round, {self._digest_column}, content'),
          (client_id, _bound(round_num)),
      ).fetchone()
    if row is None:
      return None
    found, digest, content = row
    try:
      if not isinstance(content, bytes):
        raise ValueError(f'it is of type {type(content).__name__}')
      if digest not in (None, _digest(client_id, found, content)):
        raise ValueError('its checksum does not match')
      return array_archives.load(content)
    except ValueError as error:
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
    content = array_archives.dump(state)
    digest = _digest(client_id, round_num, content)
    with self._errors():
      self._begin()
      before = self._database.execute(
          _NEWEST.format(columns='client_id, round, digest'),
          (client_id, _bound(None)),
      ).fetchone()
      self._database.execute(
          'INSERT OR REPLACE INTO states (client_id, round, digest, content)'
          ' VALUES (?, ?, ?, ?)',
          (client_id, round_num, digest, content),
      )
    if before is not None:
      self._now ^= self._number(*before)
    self._now ^= self._number(client_id, round_num, digest)
    self._written.add(client_id)

  def commit(self, kept_rounds):
    """See base class."""
    self.check_in_place()
    with self._errors():
      self._begin()
      lost = set(self._held_by).difference(kept_rounds)
      let_go = [self._held_by.pop(r) for r in lost]
      for client_id in self._written.union(*let_go):
        rows = self._database.execute(
            'SELECT round FROM states WHERE client_id = ?', (client_id,)
        )
        written = sorted(r for (r,) in rows)
        needed = _needed(written, kept_rounds)
        for r, later in itertools.pairwise(r for r in written if r in needed):
          last = max((k for k in kept_rounds if r <= k < later), default=later)
          self._held_by[last].add(client_id)
        for r in set(written) - needed:
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

  def fingerprint(self, round_num=None):
    """See base class."""
    with self._errors():
      now = self._now if round_num is None else self._combined(round_num)
    return f'{now:064x}'

  def _combined(self, round_num: int | None) -> int:
    """Returns the exclusive or of the digests of all clients' newest states."""
    rows = self._database.execute(
        f'SELECT client_id, max(round), {self._digest_column} FROM states'
        ' WHERE round <= ? GROUP BY client_id',
        (_bound(round_num),),
    )
    combined = 0
    for row in rows:
      combined ^= self._number(*row)
    return combined

  def _number(self, client_id, round_num, digest) -> int:
    """Returns a number for one client's newest state."""
    if not (
        isinstance(client_id, str)
        and isinstance(round_num, int)
        and isinstance(digest, bytes | None)
    ):
      raise ClientStateError(
          f'Expected the client states in {self._path} as they were written,'
          ' found a row that is damaged.'
      )
    return int.from_bytes(_digest(client_id, round_num, digest or b''))

  def check_in_place(self):
    """See base class."""
    if self._place is not None:
      with self._errors():
        self._place.check()

  def roll_back(self, round_num):
    """See base class."""
    with self._errors():
      self._begin()
      for table in ('states', 'kept_rounds'):
        self._database.execute(
            f'DELETE FROM {table} WHERE round > ?', (round_num,)
        )
      self._database.execute('COMMIT')
      self._now = self._combined(None)

  def close(self):
    """See base class; the file gives back the pages that it does not need."""
    try:
      if not self._database.in_transaction:
        # A script, as `execute` ends after the first page.
        self._database.executescript('PRAGMA incremental_vacuum')
    except sqlite3.Error:
      pass  # It only stays larger, on a full disk for instance.
    finally:
      self._database.close()

  def _begin(self):
    if not self._database.in_transaction:
      self._database.execute('BEGIN IMMEDIATE')


def _bound(round_num: int | None) -> int:
  """The last round to look at; SQLite's largest integer for all."""
  return 2**63 - 1 if round_num is None else round_num


def _digest(client_id: str, round_num: int, content: bytes) -> bytes:
  """Returns the SHA-256 of a client's state."""
  # Ends with a zero byte, so that no other client and round begin like it.
  key = f'{round_num} {client_id}'.encode(errors='surrogatepass') + b'\0'
  return hashlib.sha256(key + content).digest()
