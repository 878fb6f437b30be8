"""What client states cost a round, and in memory, for ever more clients.

  python -m benchmarks.client_state_store

Clients keep 300 kB each; a round reads and writes the states of ten of them and
every tenth round is committed, as with --checkpoint_every=10. Prints, for each
number of clients, the median milliseconds of a round and how far the process's
resident memory grew while all clients took part.
"""

import pathlib
import statistics
import tempfile
import time

import numpy as np
import psutil

from tff_meta import client_state_store

_NUM_FLOATS = 75_000  # 300 kB.
_COHORT = 10
_ROUNDS = 200
_MEGABYTE = 2**20


def _measure(path: pathlib.Path, num_clients: int) -> tuple[float, float]:
  """Returns median seconds of a round and growth of memory in bytes."""
  process, rng = psutil.Process(), np.random.default_rng(0)
  state = {'weights': rng.standard_normal(_NUM_FLOATS).astype(np.float32)}
  before = process.memory_info().rss
  store = client_state_store.SqliteStore(path)
  for k in range(num_clients):
    store.write(f'client_{k}', 1, state)
    if k % 100 == 99:
      store.commit([1])
  store.commit([1])
  seconds = []
  for round_num in range(2, _ROUNDS + 2):
    started = time.perf_counter()
    for k in rng.choice(num_clients, _COHORT, replace=False):
      found = store.read(f'client_{k}')
      store.write(f'client_{k}', round_num, found)
    if round_num % 10 == 0:
      store.commit([round_num - 20, round_num - 10, round_num])
    seconds.append(time.perf_counter() - started)
  grown = process.memory_info().rss - before
  store.close()
  return statistics.median(seconds), grown


def main() -> None:
  """Prints a row for each number of clients."""
  print('clients  median ms/round  resident MB grown  file MB')
  with tempfile.TemporaryDirectory() as directory:
    for num_clients in (100, 1000, 4000):
      path = pathlib.Path(directory) / f'{num_clients}.sqlite'
      seconds, grown = _measure(path, num_clients)
      print(
          f'{num_clients:7}  {1e3 * seconds:15.1f}'
          f'  {grown / _MEGABYTE:17.1f}  {path.stat().st_size / _MEGABYTE:7.1f}'
      )


if __name__ == '__main__':
  main()
