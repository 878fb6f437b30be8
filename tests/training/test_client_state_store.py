"""Client states: what is kept, gone back to, lost, and what it costs."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tff_meta.training import client_state_store


def state(value, size=3):
  """A state of two arrays, one of them a scalar of another type."""
  return {
      'head/kernel': np.full((size, 2), value, np.float32),
      'step': np.array(value, np.int32),
  }


@pytest.fixture(params=['memory', 'sqlite'])
def store(request, tmp_path):
  if request.param == 'memory':
    made = client_state_store.InMemoryStore()
  else:
    made = client_state_store.SqliteStore(tmp_path / 'states.sqlite')
  yield made
  made.close()


def test_what_is_written_is_read(store):
  written = state(2)
  store.write('b', 1, written)
  store.write('a', 3, state(5, size=4))

  np.testing.assert_equal(store.read('b'), written)
  assert store.read('b')['step'].dtype == np.int32
  assert store.read('b')['step'].shape == ()
  assert store.read('a')['head/kernel'].shape == (4, 2)
  assert store.read('c') is None
  assert store.client_ids() == ('a', 'b')
  written['head/kernel'][:] = 9  # The caller's array, not the store's.
  assert store.read('b')['head/kernel'][0, 0] == 2


def test_rounds_are_told_apart(store):
  for round_num in (2, 5, 7):
    store.write('a', round_num, state(round_num))
  store.write('b', 6, state(6))

  assert store.read('a')['step'] == 7
  steps = {r: store.read('a', r) for r in (1, 2, 4, 5, 6, 99)}
  assert steps.pop(1) is None
  assert {r: int(s['step']) for r, s in steps.items()} == {
      2: 2, 4: 2, 5: 5, 6: 5, 99: 7,
  }  # fmt: skip
  assert store.client_ids(1) == ()
  assert store.client_ids(5) == ('a',)
  assert store.client_ids(6) == ('a', 'b')


def test_rolling_back_forgets_what_came_later(store):
  for round_num in (2, 5, 7):
    store.write('a', round_num, state(round_num))
  store.write('b', 6, state(6))
  store.commit([2, 5])

  store.roll_back(5)

  assert store.read('a')['step'] == 5
  assert store.read('b') is None
  assert store.client_ids() == ('a',)
  store.write('b', 6, state(60))
  assert store.read('b')['step'] == 60


def test_rounds_are_held_from_a_commit_until_another_drops_them(store):
  assert not store.holds(0)
  store.write('a', 1, state(1))
  assert not store.holds(1)
  store.commit([0, 1])
  assert store.holds(0) and store.holds(1) and not store.holds(2)
  store.commit({1, 3})
  assert not store.holds(0) and store.holds(1) and store.holds(3)
  store.roll_back(2)
  assert store.holds(1) and not store.holds(3)


def test_a_commit_keeps_what_kept_rounds_need_and_no_more(store):
  for round_num in (1, 2, 4, 5, 8, 9):
    store.write('a', round_num, state(round_num))

  store.commit([3, 5, 7])  # After round 3 the state is that of 2, after 7 of 5.

  steps = {r: store.read('a', r) for r in range(1, 10)}
  assert [r for r, s in steps.items() if s is None] == [1]
  assert [int(s['step']) for s in list(steps.values())[1:]] == [
      2, 2, 2, 5, 5, 5, 8, 9,
  ]  # fmt: skip


def test_what_no_kept_round_needs_any_more_goes_and_so_do_its_bytes(tmp_path):
  """Also of clients that are not written again, in a file opened anew."""
  path = tmp_path / 'states.sqlite'
  megabyte = {'x': np.zeros(2**18, np.float32)}
  with contextlib.closing(client_state_store.SqliteStore(path)) as store:
    for round_num in (1, 2):
      for k in range(10):
        store.write(f'{k}', round_num, megabyte)
    store.commit([1, 2])
  assert path.stat().st_size > 20 * 2**20

  with contextlib.closing(client_state_store.SqliteStore(path)) as store:
    store.commit([2])
    assert store.read('0', 1) is None and store.read('0', 2) is not None
  assert path.stat().st_size < 11 * 2**20


def test_a_store_closes_on_a_full_disk(tmp_path):
  """A process of its own, whose files may have two megabytes from then on."""
  script = """
import pathlib, resource, sys
import numpy as np
from tff_meta.training import client_state_store

store = client_state_store.SqliteStore(pathlib.Path(sys.argv[1]))
for round_num in (1, 2):
  for k in range(10):
    store.write(str(k), round_num, {'x': np.zeros(2**18, np.float32)})
  store.commit([1, round_num])
store.commit([2])
store._database.execute('PRAGMA wal_checkpoint(TRUNCATE)')
resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))
store.close()
"""
  path = tmp_path / 'states.sqlite'
  command = [sys.executable, '-c', script, str(path)]
  subprocess.run(command, check=True)

  store = client_state_store.SqliteStore(path, read_only=True)
  with contextlib.closing(store):
    assert len(store.client_ids()) == 10
    assert store.read('9')['x'].shape == (2**18,)


def test_pages_are_large_but_in_a_file_that_has_others(tmp_path):
  def pages(path):
    client_state_store.SqliteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
      return database.execute('PRAGMA page_size').fetchone()[0]

  old = tmp_path / 'old.sqlite'
  with contextlib.closing(sqlite3.connect(old)) as database:
    database.execute('PRAGMA page_size = 4096')
    database.execute('PRAGMA journal_mode = WAL')
  assert (pages(old), pages(tmp_path / 'new.sqlite')) == (4096, 16384)


def test_a_killed_process_loses_only_what_was_not_committed(tmp_path):
  """The states of rounds 1 and 2 are committed, those of 3 are not."""
  path = tmp_path / 'states.sqlite'
  program = textwrap.dedent(
      """
      import os, pathlib, signal, sys
      import numpy as np
      from tff_meta.training import client_state_store
      store = client_state_store.SqliteStore(pathlib.Path(sys.argv[1]))
      for r in (1, 2, 3):
        store.write('a', r, {'x': np.full(100_000, r, np.float32)})
        if r == 2:
          store.commit([2])
      os.kill(os.getpid(), signal.SIGKILL)
      """
  )
  done = subprocess.run(
      [sys.executable, '-c', program, str(path)], check=False, timeout=60
  )
  assert done.returncode == -9

  store = client_state_store.SqliteStore(path)
  assert store.read('a')['x'][0] == 2
  store.write('a', 3, {'x': np.zeros(1)})
  store.close()


def test_a_reader_sees_what_was_committed_while_another_writes(tmp_path):
  path = tmp_path / 'states.sqlite'
  writer = client_state_store.SqliteStore(path)
  writer.write('a', 1, state(1))
  writer.commit([1])
  writer.write('a', 2, state(2))

  reader = client_state_store.SqliteStore(path, read_only=True)

  assert reader.read('a')['step'] == 1
  writer.commit([2])  # Drops what the reader reads.
  assert reader.read('a')['step'] == 1 and reader.holds(1)
  reader.close()
  reader = client_state_store.SqliteStore(path, read_only=True)
  assert reader.read('a')['step'] == 2 and not reader.holds(1)
  with pytest.raises(client_state_store.ClientStateError, match='readonly'):
    reader.write('a', 3, state(3))
  reader.close()
  writer.close()
  client_state_store.SqliteStore(path, read_only=True).close()
  assert [p.name for p in tmp_path.iterdir()] == ['states.sqlite']


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path):
  path = tmp_path / 'states.sqlite'
  with pytest.raises(
      client_state_store.ClientStateError, match='states.sqlite.*unable to open'
  ):
    client_state_store.SqliteStore(path, read_only=True)
  assert not path.exists()
  path.write_bytes(b'not a database' * 1000)
  with pytest.raises(client_state_store.ClientStateError, match='not a data'):
    client_state_store.SqliteStore(path)


def test_states_are_numbers(store):
  with pytest.raises(TypeError, match="'x' to be numeric, found object"):
    store.write('a', 1, {'x': np.array([{'an': 'object'}], object)})
  assert store.client_ids() == ()


def test_a_damaged_state_is_named(tmp_path):
  path = tmp_path / 'states.sqlite'
  store = client_state_store.SqliteStore(path)
  store.write('a', 1, state(1))
  store.commit([1])
  with sqlite3.connect(path) as database:
    database.execute('UPDATE states SET content = substr(content, 1, 50)')
  database.close()
  with pytest.raises(client_state_store.ClientStateError, match="client 'a'"):
    store.read('a')
  store.close()


def _sqlite_of_three(path):
  store = client_state_store.SqliteStore(path)
  for k, client_id in enumerate('abc'):
    store.write(client_id, 1, state(k))
  store.write('a', 2, state(7))
  store.commit([1, 2])
  prints = store.fingerprint(1), store.fingerprint(2)
  assert store.fingerprint() == prints[1]
  store.close()
  return prints


def test_a_changed_state_is_an_error_and_a_lost_one_changes_the_fingerprint(
    tmp_path,
):
  """Each client's content, name and round, and each row that goes."""
  path = tmp_path / 'states.sqlite'
  prints = _sqlite_of_three(path)
  assert len(set(prints)) == 2
  whole = path.read_bytes()
  for change in (
      'UPDATE states SET content = zeroblob(length(content)) WHERE round = 2',
      'UPDATE states SET round = 3 WHERE round = 2',
      "UPDATE states SET client_id = 'd' WHERE round = 2",
      'UPDATE states SET content = (SELECT content FROM states WHERE'
      " client_id = 'b') WHERE round = 2",
      "UPDATE states SET content = 'text' WHERE round = 2",
      'UPDATE states SET content = 5 WHERE round = 2',
      'UPDATE states SET digest = 5 WHERE round = 2',
      'DELETE FROM states WHERE round = 2',
      "DELETE FROM states WHERE client_id = 'b'",
  ):
    path.write_bytes(whole)
    with contextlib.closing(sqlite3.connect(path)) as database:
      database.execute(change)
      database.commit()
    try:
      store = client_state_store.SqliteStore(path, read_only=True)
    except client_state_store.ClientStateError:
      continue
    with contextlib.closing(store):
      changed = store.fingerprint(2) != prints[1]
      if not changed:
        with pytest.raises(client_state_store.ClientStateError):
          for client_id in store.client_ids():
            store.read(client_id)


def test_the_fingerprint_is_that_of_the_states_however_they_came(tmp_path):
  """Written at once, or gone back to; of earlier versions, without digests."""
  path = tmp_path / 'states.sqlite'
  prints = _sqlite_of_three(path)
  store = client_state_store.SqliteStore(path)
  store.write('b', 3, state(9))
  assert store.fingerprint() not in prints
  store.commit([1, 2, 3])
  store.roll_back(2)
  assert store.fingerprint() == prints[1]
  store.close()
  other = client_state_store.SqliteStore(tmp_path / 'other.sqlite')
  for client_id, round_num, value in (
      ('a', 2, 7), ('c', 1, 2), ('b', 1, 1),
  ):  # fmt: skip
    other.write(client_id, round_num, state(value))
  assert other.fingerprint() == prints[1]
  other.close()


def test_a_file_of_an_earlier_version_is_read_and_gone_on_with(tmp_path):
  path = tmp_path / 'states.sqlite'
  _sqlite_of_three(path)
  with contextlib.closing(sqlite3.connect(path)) as database:
    database.execute('ALTER TABLE states DROP COLUMN digest')
  for read_only in (True, False):
    store = client_state_store.SqliteStore(path, read_only=read_only)
    assert store.read('a')['step'] == 7 and store.holds(2)
    before = store.fingerprint()
    if not read_only:
      store.write('a', 3, state(8))
      assert store.fingerprint() != before
      assert store.read('a')['step'] == 8
    store.close()


def test_a_file_that_goes_while_it_is_written_is_an_error(tmp_path):
  path = tmp_path / 'states.sqlite'
  store = client_state_store.SqliteStore(path)
  store.write('a', 1, state(1))
  store.commit([1])
  path.rename(tmp_path / 'elsewhere')
  store.write('a', 2, state(2))
  with pytest.raises(client_state_store.ClientStateError, match='removed'):
    store.commit([1, 2])
  path.write_bytes(b'')
  with pytest.raises(client_state_store.ClientStateError, match='replaced'):
    store.check_in_place()
  store.close()


@pytest.mark.parametrize('name', ['', '-wal', '-shm', '-journal'])
@pytest.mark.parametrize('place', [os.mkdir, os.mkfifo])
def test_what_is_no_plain_file_is_an_error(tmp_path, name, place):
  path = tmp_path / 'states.sqlite'
  place(f'{path}{name}')
  for read_only in (True, False):
    with pytest.raises(client_state_store.ClientStateError, match='plain file'):
      client_state_store.SqliteStore(path, read_only=read_only)


def _operations(database, work):
  """Returns how many virtual-machine steps SQLite takes, in hundreds."""
  steps = []
  database.set_progress_handler(lambda: steps.append(1) and 0, 100)
  work()
  database.set_progress_handler(None, 0)
  return len(steps)


def test_a_round_costs_the_same_however_many_clients_there_are(tmp_path):
  """Counted in SQLite's own steps, for 30 and for 3,000 clients."""
  costs = []
  for num_clients in (30, 3000):
    store = client_state_store.SqliteStore(tmp_path / f'{num_clients}.sqlite')
    for k in range(num_clients):
      store.write(f'client_{k}', 1, state(k))
    store.commit([1])
    for k in range(num_clients):  # Two states each, as after a best round.
      store.write(f'client_{k}', 2, state(k))
    store.commit([1, 2])

    def one_round(store=store):
      for k in (3, 11, 24):
        found = store.read(f'client_{k}')
        store.write(f'client_{k}', 3, found)
      store.commit([1, 3])

    costs.append(_operations(store._database, one_round))
    store.close()
  assert costs[0] > 0
  assert costs[1] <= costs[0] + 1
