"""How time, memory and disk grow with cohorts, clients, models and memories.

  python -m benchmarks.scale [--only='clients a round=1000']

prints a table in Markdown. Each row is a run in a process of its own, as
`binaries.train` does it: FedAvg of a perceptron, or Ditto, whose clients keep a
model of their own; 20 random images of 8x8 a client, one epoch in minibatches
of ten, and a checkpoint after every second round. The time a client is the
median round's without its checkpoint, and depends on how many of the clients
are in memory from rounds before (`known`); the last column is all of the run
from the first round on, checkpoints too.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from tff_meta import installation
from tff_meta.execution import native

native.prepare_environment()
installation.import_tff()  # As programs do.

from tff_meta import registry  # noqa: E402
from tff_meta.data import client_sampling  # noqa: E402
from tff_meta.data import corpus as corpus_lib  # noqa: E402
from tff_meta.data import federated_dataset  # noqa: E402
from tff_meta.data import partitioners  # noqa: E402
from tff_meta.execution import in_process  # noqa: E402
from tff_meta.models import mlp  # noqa: E402
from tff_meta.training import client_state_store  # noqa: E402
from tff_meta.training import loop  # noqa: E402
from tff_meta.training import run_directory  # noqa: E402

_SHAPE = (8, 8, 1)
_NUM_CLASSES = 10
_EXAMPLES = 20
_MEGABYTE = 10**6


@dataclasses.dataclass(frozen=True)
class Case:
  """A run.

  Attributes:
    population: Clients there are.
    cohort: Clients of a round.
    weights: Of the model, about.
    algorithm: Name in the registry.
    rounds: How many, at least 2.
  """

  population: int = 100
  cohort: int = 10
  weights: int = 100_000
  algorithm: str = 'fed_avg'
  rounds: int = 41


CASES = {
    **{
        f'clients a round={n}': Case(max(n, 100), n, rounds=rounds)
        for n, rounds in ((10, 41), (100, 41), (1000, 7), (10_000, 7))
    },
    **{
        f'clients in all={n}': Case(population=n)
        for n in (100, 10_000, 100_000, 1_000_000)
    },
    **{
        f'weights of the model={n}': Case(weights=n, rounds=rounds)
        for n, rounds in (
            (100_000, 41),
            (1_000_000, 41),
            (10_000_000, 7),
            (100_000_000, 7),
        )
    },
    **{
        f'MB that a client keeps={n}': Case(
            population=20,
            weights=n * 1_000_000 // 4,
            algorithm='ditto',
            rounds=7,
        )
        for n in (1, 10, 100)
    },
}
_COLUMNS = (
    'run',
    'clients dealt, s',
    'fingerprint, s',
    'rounds',
    'first round, s',
    'known, %',
    'ms a client',
    'peak MB',
    'checkpoints, MB',
    'states, MB',
    'run, s',
)


def _build_dataset(num_clients):
  rng = np.random.default_rng(0)
  size = num_clients * _EXAMPLES
  examples = corpus_lib.LabelledExamples(
      rng.integers(0, 256, (size, *_SHAPE), np.uint8),
      rng.integers(0, _NUM_CLASSES, size, np.int32),
  )
  corpus = corpus_lib.Corpus(
      'noise',
      examples,
      corpus_lib.LabelledExamples(*(part[:0] for part in examples)),
      _NUM_CLASSES,
  )
  return federated_dataset.FederatedDataset.from_corpus(
      corpus, partitioners.iid, num_clients, seed=0, test_fraction=0.0
  )


def _build_process(case):
  units = case.weights // (_SHAPE[0] * _SHAPE[1] + 1 + _NUM_CLASSES)
  network = mlp.build_mlp(_SHAPE, _NUM_CLASSES, hidden_units=units)
  spec = registry.get(case.algorithm)
  config = dataclasses.replace(
      spec.presets['paper'], epochs=1, batch_size=10, learning_rate=0.01
  )
  if case.algorithm == 'ditto':
    config = dataclasses.replace(config, personal_epochs=1)
  return registry.build(case.algorithm, network, config, _NUM_CLASSES)


def _measure(name: str) -> list[str]:
  """Does one run; returns its row."""
  case = CASES[name]
  clock = time.perf_counter
  started = clock()
  dataset = _build_dataset(case.population)
  dealt = clock() - started
  started = clock()
  dataset.fingerprint()
  fingerprint = clock() - started
  in_process.set_in_process_context()
  started = clock()
  with tempfile.TemporaryDirectory() as scratch:
    directory = run_directory.RunDirectory(scratch)
    states = client_state_store.SqliteStore(directory.client_states)
    with contextlib.closing(states):
      loop.train(
          _build_process(case),
          functools.partial(
              client_sampling.sample_cohort,
              dataset.client_ids(),
              case.cohort,
              0,
          ),
          dataset.tff_client_data,
          loop.NO_EVALUATION,
          is_cached=dataset.is_cached,
          client_states=states,
          directory=directory,
          config={},
          schedule=loop.Schedule(case.rounds, checkpoint_every=2, eval_every=0),
          checkpoint=None,
          should_stop=lambda: False,
          report=print,
      )
    with open(directory.timings, newline='', encoding='utf-8') as file:
      rows = list(csv.DictReader(file))
    checkpoints = _megabytes(directory.checkpoints.iterdir())
    kept = _megabytes([directory.client_states])
  whole = clock() - started
  first, *later = (float(row['seconds']) for row in rows)
  known = statistics.median(float(row['cached']) for row in rows[1:])
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEGABYTE
  return [
      name,
      f'{dealt:.2g}',
      f'{fingerprint:.2g}',
      str(case.rounds),
      f'{first:.2f}',
      f'{100 * known:.0f}',
      f'{1e3 * statistics.median(later) / case.cohort:.2f}',
      f'{peak:.0f}',
      f'{checkpoints:.1f}',
      f'{kept:.1f}',
      f'{whole:.0f}',
  ]


def _megabytes(paths) -> float:
  return sum(pathlib.Path(path).stat().st_size for path in paths) / _MEGABYTE


def _print_row(cells) -> None:
  print('|', ' | '.join(cells), '|', flush=True)


def main() -> None:
  """Prints the table, or the row that is asked for."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', choices=CASES)
  parser.add_argument(
      '--in_this_process', action='store_true', help='a row alone; with --only'
  )
  arguments = parser.parse_args()
  if arguments.in_this_process and not arguments.only:
    parser.error('Expected --only with --in_this_process, found none.')
  if arguments.in_this_process:
    _print_row(_measure(arguments.only))
    native.end_process(0)
  _print_row(_COLUMNS)
  _print_row(['---'] + ['---:'] * (len(_COLUMNS) - 1))
  for name in [arguments.only] if arguments.only else CASES:
    command = [sys.executable, '-m', 'benchmarks.scale', f'--only={name}']
    subprocess.run([*command, '--in_this_process'], check=True)


if __name__ == '__main__':
  main()
