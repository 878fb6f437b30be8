"""What client states cost a round, and in memory, for ever more clients.

  python -m benchmarks.client_state_store

A client keeps 300 kB, or 9 MB, which is Adam's moments of CAFeMe's network, or
20 bytes. A round reads and writes the states of a cohort and every tenth is
committed, as with --checkpoint_every=10. Prints the milliseconds of a round,
commits and all: median and mean, and how far the process's resident memory grew
while all clients took part.
"""

import pathlib
import statistics
import tempfile
import time

import numpy as np
import psutil

from tff_meta.training import client_state_store

# Clients, the cohort, float32 numbers that a client keeps, rounds.
_CASES = (
    (100, 10, 75_000, 200),
    (1000, 10, 75_000, 200),
    (4000, 10, 75_000, 200),
    (80, 5, 2_250_000, 40),
    (1000, 20, 5, 200),
)
_MEGABYTE = 2**20


def _measure(path: pathlib.Path, case) -> tuple[list[float], float]:
  """Returns the seconds of rounds and the growth of memory in bytes."""
  num_clients, cohort, num_floats, num_rounds = case
  process, rng = psutil.Process(), np.random.default_rng(0)
  state = {'weights': rng.standard_normal(num_floats).astype(np.float32)}
  before = process.memory_info().rss
  store = client_state_store.SqliteStore(path)
  for k in range(num_clients):
    store.write(f'client_{k}', 1, state)
    if k % 100 == 99:
      store.commit([1])
  store.commit([1])
  seconds = []
  for round_num in range(2, num_rounds + 2):
    started = time.perf_counter()
    for k in rng.choice(num_clients, cohort, replace=False):
      found = store.read(f'client_{k}')
      store.write(f'client_{k}', round_num, found)
    if round_num % 10 == 0:
      store.commit([round_num - 20, round_num - 10, round_num])
    seconds.append(time.perf_counter() - started)
  grown = process.memory_info().rss - before
  store.close()
  return seconds, grown


def main() -> None:
  """Prints a row for each case."""
  print('clients  kB each  median  mean ms/round  resident MB grown  file MB')
  with tempfile.TemporaryDirectory() as directory:
    for number, case in enumerate(_CASES):
      path = pathlib.Path(directory) / f'{number}.sqlite'
      seconds, grown = _measure(path, case)
      print(
          f'{case[0]:7}  {4e-3 * case[2]:7.2f}'
          f'  {1e3 * statistics.median(seconds):6.1f}'
          f'  {1e3 * statistics.fmean(seconds):13.1f}'
          f'  {grown / _MEGABYTE:17.1f}  {path.stat().st_size / _MEGABYTE:7.1f}'
      )


if __name__ == '__main__':
  main()
