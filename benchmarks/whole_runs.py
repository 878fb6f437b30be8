"""What a user waits for: whole runs of programs, here and at another commit.

A run is a process of `binaries.train`, from its start to its end. Runs of both
checkouts take turns; they have the same flags and must give the same numbers.
"""

from collections.abc import Mapping, Sequence
import csv
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_HERE = pathlib.Path(__file__).resolve().parents[1]
# Where data sets other than the digits are; without it they are left out.
DATA_DIR = 'TFF_META_DATA_DIR'


def _preset(name: str, *flags: str) -> tuple[str, ...]:
  return (f'--flagfile=binaries/presets/{name}.flags', *flags)


# Published settings with fewer rounds and evaluations, in the same proportion
# as nearly as a few minutes allow.
RUNS = {
    'FRL, digits': _preset('digit_pairs_frl', '--eval_every=0'),
    'MetaVers, digits': ('--algorithm=metavers', '--eval_every=0'),
    'FedMeta-Per, digits': ('--algorithm=fedmeta_per', '--eval_every=0'),
    'MetaVers, CIFAR-10, 50 clients': _preset(
        'metavers_cifar10_50', '--rounds=40', '--eval_every=20'
    ),
    'FRL, Omniglot, groups': _preset(
        'omniglot_frl_gpal',
        '--rounds=80',
        '--eval_every=40',
        '--validation_groups=10',
        '--eval_groups=50',
    ),
    'CAFeMe, RMNIST, curves': _preset(
        'cafeme_rmnist_none', '--rounds=10', '--eval_every=0'
    ),
}


class _Run(NamedTuple):
  """A finished run: its seconds, those of its rounds, peak MB, and tables."""

  seconds: float
  training: float
  megabytes: float
  tables: dict[str, bytes]


def _run(
    root: pathlib.Path, flags: Sequence[str], environment: Mapping[str, str]
) -> _Run:
  """Runs the program of a checkout."""
  with tempfile.TemporaryDirectory() as scratch:
    output = pathlib.Path(scratch, 'run')
    command = [sys.executable, '-m', 'binaries.train', *flags]
    if environment.get(DATA_DIR):
      command.append(f'--data_dir={environment[DATA_DIR]}')
    with open(pathlib.Path(scratch, 'log'), 'w+', encoding='utf-8') as log:
      started = time.perf_counter()
      program = subprocess.Popen(
          [*command, f'--output_dir={output}'],
          cwd=root,
          env={**environment, 'PYTHONPATH': str(root)},
          stdout=log,
          stderr=subprocess.STDOUT,
      )
      _, status, usage = os.wait4(program.pid, 0)
      seconds = time.perf_counter() - started
      program.returncode = os.waitstatus_to_exitcode(status)
      if program.returncode:
        log.seek(0)
        raise RuntimeError(f'{command} failed in {root}:\n{log.read()}')
    with open(output / 'timings.csv', newline='', encoding='utf-8') as file:
      training = sum(float(row['seconds']) for row in csv.DictReader(file))
    tables = {
        path.name: path.read_bytes()
        for path in output.glob('*.csv')
        if path.name != 'timings.csv'
    }
  return _Run(seconds, training, usage.ru_maxrss / 1024, tables)


def measure(
    before: str,
    repeats: int,
    only: Sequence[str],
    environment: Mapping[str, str],
) -> None:
  """Prints seconds, share of training and peak memory of whole runs.

  Args:
    before: A checkout of another commit; empty to run this one alone.
    repeats: How often each is run.
    only: Names in `RUNS`; empty for all.
    environment: Of the programs, without what this process has set for itself.

  Raises:
    RuntimeError: If a program fails.
  """
  roots = {'before': pathlib.Path(before)} if before else {}
  roots |= {'now': _HERE}
  for name, flags in RUNS.items():
    if only and name not in only:
      continue
    if 'digits' not in name and not environment.get(DATA_DIR):
      print(f'{name}: left out, as {DATA_DIR} is not set')
      continue
    print(f'{name}: {" ".join(flags)}', flush=True)
    runs: dict[str, list[_Run]] = {label: [] for label in roots}
    for _ in range(repeats):
      for label, root in roots.items():
        runs[label].append(_run(root, flags, environment))
    for label, done in runs.items():
      seconds, training, megabytes = (
          statistics.median(values)
          for values in zip(*(run[:3] for run in done), strict=True)
      )
      print(
          f'  {label:8}{seconds:8.1f} s, of them rounds'
          f' {100 * training / seconds:3.0f} %;{megabytes:7.0f} MB'
      )
    if before:
      ratios = [
          old.seconds / new.seconds
          for old, new in zip(runs['before'], runs['now'], strict=True)
      ]
      same = all(
          old.tables == new.tables
          for old, new in zip(runs['before'], runs['now'], strict=True)
      )
      print(
          f'  {statistics.median(ratios):.2f} times as fast; all numbers are'
          f' {"the same" if same else "NOT THE SAME"}',
          flush=True,
      )
