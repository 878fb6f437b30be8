"""Runs a table of a paper and sets its published numbers beside ours.

  python -m binaries.compare --list
  python -m binaries.compare --experiment=fedmeta_per_mnist --scale=paper \
      --output_dir=DIR

Every cell (method, setting, seed) is a run of `binaries.train`. The same
command continues a comparison that was stopped, by whatever: finished cells are
not run again. DIR holds table.md, table.csv, table.json and report.html, which
are brought up to date after every cell, and the runs.
"""

import os
import pathlib
import shlex
import signal
import sys

from absl import flags

from binaries import command_line
from binaries import experiments
from binaries import flag_groups
from tff_meta.comparison import tables
from tff_meta.execution import native

EXPERIMENT = flags.DEFINE_string(
    'experiment', None, 'What to run; --list shows all.'
)
OUTPUT_DIR = flags.DEFINE_string(
    'output_dir',
    None,
    'Where the comparison is written, or continued; by default'
    ' runs/compare_<experiment>_<scale>.',
)
SCALE = flags.DEFINE_enum(
    'scale',
    'cpu',
    list(tables.SCALES),
    'How much of it: a few rounds that show that it works (smoke), what two'
    ' cores do in hours (cpu), or as published (paper).',
)
ROWS = flags.DEFINE_list('rows', [], 'Only these methods.')
SETTINGS = flags.DEFINE_list('settings', [], 'Only these settings.')
SEEDS = flags.DEFINE_list('seeds', [], 'Instead of those of the scale.')
PROCESSES = flags.DEFINE_integer(
    'processes', 1, 'Cells that run at the same time.', lower_bound=1
)
REPORT_ONLY = flags.DEFINE_bool(
    'report_only', False, 'Run nothing; write the report of what is there.'
)
KEEP = flags.DEFINE_string(
    'keep',
    None,
    'Where the tables and the small files of finished cells are copied to at'
    ' the end, so that every number can be traced.',
)
LIST = flags.DEFINE_bool('list', False, 'Show the experiments, end.')
flags.declare_key_flag('data_dir')
flags.declare_key_flag('device')

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _print_list() -> None:
  """Prints what --experiment takes, with what each scale costs."""
  for table in experiments.TABLES.values():
    print(f'{table.name}\n  {table.title} ({table.source})')
    for name, scale in table.scales.items():
      runs = len(tables.cells(table, name))
      hours = (
          'hours not measured'
          if scale.hours is None
          else f'{scale.hours:g} hours on 2 cores'
      )
      print(f'  --scale={name}: {runs} runs, {hours}')
      if scale.changes:
        print(f'    changes: {scale.changes}')


def _seeds() -> list[int]:
  try:
    return [int(seed) for seed in SEEDS.value]
  except ValueError:
    raise ValueError(
        f'Expected --seeds to be integers, found {",".join(SEEDS.value)}.'
    ) from None


def _command() -> str:
  """Returns the command that makes the report again, without places."""
  parts = ['./run', 'python', '-m', 'binaries.compare']
  parts += [f'--experiment={EXPERIMENT.value}', f'--scale={SCALE.value}']
  for flag in (ROWS, SETTINGS, SEEDS):
    if flag.value:
      parts.append(f'--{flag.name}={",".join(flag.value)}')
  return shlex.join(parts)


def _program() -> list[str]:
  program = [sys.executable, '-m', 'binaries.train']
  if flag_groups.DATA_DIR.value is not None:
    program.append(f'--data_dir={os.path.abspath(flag_groups.DATA_DIR.value)}')
  return [*program, f'--device={flag_groups.DEVICE.value}']


def main() -> int:
  """Runs the program and returns its exit code."""
  if LIST.value:
    _print_list()
    return 0
  with command_line.reported_errors():
    if not EXPERIMENT.value:
      raise ValueError(
          'Expected --experiment, found none. Tip: --list shows them.'
      )
    table = experiments.get(EXPERIMENT.value)
    cells = tables.cells(
        table,
        SCALE.value,
        rows=ROWS.value,
        settings=SETTINGS.value,
        seeds=_seeds(),
    )
    if not cells:
      raise ValueError('Expected at least one run, found none to do.')
    native.prepare_environment()
    from tff_meta.comparison import record
    from tff_meta.comparison import report
    from tff_meta.comparison import results
    from tff_meta.comparison import runner
    from tff_meta.training import run_directory

    default = f'runs/compare_{table.name}_{SCALE.value}'
    root = pathlib.Path(OUTPUT_DIR.value or default).resolve()

    def write_report():
      report.write(
          root,
          report.Comparison(
              table,
              SCALE.value,
              cells,
              results.collect(root, table, cells),
              _command(),
          ),
      )

    with run_directory.RunDirectory(root).locked():
      runner.claim(root, table.name, SCALE.value)
      runner.settle(root, cells)
      running = runner.Runner(
          root,
          _program(),
          environment=runner.environment(PROCESSES.value),
          working_directory=_ROOT,
          report=command_line.report,
          changed=write_report,
      )
      for signal_num in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_num, lambda *_: running.stop())
      if not REPORT_ONLY.value:
        running.run(cells, PROCESSES.value)
      write_report()
      if KEEP.value:
        record.keep(root, cells, pathlib.Path(KEEP.value))
      states = [runner.CellFolder(root, c).outcome().state for c in cells]
  print((root / 'table.md').read_text())
  print(f'Report: {root / "report.html"}')
  if running.stopped.is_set():
    command_line.report('Stopped; the same command continues the comparison.')
    return command_line.INTERRUPTED
  return 0 if set(states) == {'finished'} else command_line.FAILURE


if __name__ == '__main__':
  command_line.run_and_end(main)
