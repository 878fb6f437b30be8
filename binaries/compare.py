"""Runs a table of a paper and sets its published numbers beside ours.

  python -m binaries.compare --list
  python -m binaries.compare --experiment=fedmeta_per_mnist --scale=paper \
      --output_dir=DIR
  python -m binaries.compare --runs=RUN,RUN,...

Every cell (method, setting, seed) is a run of `binaries.train`. The same
command continues a comparison that was stopped, by whatever: finished cells are
not run again. DIR holds table.md, table.csv, table.json and report.html, which
are brought up to date after every cell, and the runs. --runs makes the same of
runs that exist, with what differs in their settings, data and code.
"""

import dataclasses
import os
import pathlib
import shlex
import signal
import sys

from absl import flags

from binaries import command_line
from binaries import experiments
from binaries import flag_files
from binaries import flag_groups
from binaries import flag_kinds
from tff_meta import plain_files
from tff_meta import plugins
from tff_meta import spelling
from tff_meta.comparison import tables

EXPERIMENT = flags.DEFINE_string(
    'experiment',
    None,
    'What to run: a name, --list shows all; or PATH.py, a file that defines'
    ' TABLES as those of binaries/experiments do, PATH.py:NAME if there are'
    ' several.',
)
RUNS = flag_kinds.define_paths(
    'runs',
    [],
    'Instead of an --experiment: directories of finished runs, --output_dir of'
    ' binaries.train, with commas, to be set side by side. Nothing is trained.',
)
OUTPUT_DIR = flag_kinds.define_path(
    'output_dir',
    None,
    'Where the comparison is written, or continued; by default'
    ' runs/compare_<experiment>_<scale>, or runs/compare_runs.',
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
PROCESSES = flag_kinds.define_whole_number(
    'processes', 1, 'Cells that run at the same time.', least=1
)
PRINT_COMMAND = flags.DEFINE_bool(
    'print_command',
    False,
    "Print each cell's command of binaries.train, a line each, and end.",
)
REPORT_ONLY = flags.DEFINE_bool(
    'report_only', False, 'Run nothing; write the report of what is there.'
)
KEEP = flag_kinds.define_path(
    'keep',
    None,
    'Where the tables and the small files of finished cells are copied to at'
    ' the end, so that every number can be traced.',
)
LIST = flags.DEFINE_bool('list', False, 'Show the experiments, end.')
flags.declare_key_flag('data_dir')
flags.declare_key_flag('device')
flags.declare_key_flag('plugins')

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _cost(table: tables.Table, scale_name: str) -> str:
  """Returns how much all of a table is at a scale."""
  hours = table.scale(scale_name).hours
  cost = (
      'hours not measured'
      if hours is None
      else f'about {hours:g} hours (measured, or from runs like them) with'
      ' --processes=2 on 2 cores'
  )
  seeds = ', '.join(map(str, table.scale(scale_name).seeds))
  runs = len(tables.cells(table, scale_name))
  return f'{runs} runs, seeds {seeds}, {cost}'


def _print_list() -> None:
  """Prints what --experiment takes, with what each scale costs.

  Of one experiment if there is an --experiment.
  """
  name = EXPERIMENT.value
  shown = experiments.find(name) if name else experiments.TABLES.values()
  for table in shown:
    print(f'{table.name}\n  {table.title} ({table.source})')
    for name, scale in table.scales.items():
      print(f'  --scale={name}: {_cost(table, name)}')
      if scale.changes:
        print(f'    changes: {scale.changes}')
    print(f'  --settings: {", ".join(s.name for s in table.settings)}')
    rows = (r.name for r in table.rows if r.settings != ())
    print(f'  --rows: {", ".join(rows)}')


def _check_have_runs(cells, table: tables.Table) -> None:
  """Raises if a row that was asked for has no run in these settings."""
  scale = table.scale(SCALE.value)
  with_runs = {cell.row for cell in cells}
  rows = [row for row in ROWS.value if row not in with_runs]
  if cells and not rows:
    return
  rows = rows or list(scale.rows or [row.name for row in table.rows])
  settings = {
      row.name: row.settings or [s.name for s in table.settings]
      for row in table.rows
      if row.name in rows and row.settings != ()
  }
  tip = '; '.join(f'{row} has {", ".join(of)}' for row, of in settings.items())
  raise ValueError(
      f'Expected a run of {", ".join(rows)} in'
      f' {", ".join(SETTINGS.value) or "any setting"}, found none. Tip:'
      f' {tip or "there are published numbers only"}.'
  )


def _seeds() -> list[int]:
  if not all(
      seed.isascii() and seed.isdigit() and int(seed) < 2**31
      for seed in SEEDS.value
  ):
    raise ValueError(
        'Expected --seeds to be integers of at least 0 and below 2**31, found'
        f' {",".join(SEEDS.value)}.'
    )
  return [int(seed) for seed in SEEDS.value]


def _with_flag_files(cell: tables.Cell) -> tables.Cell:
  """Returns the cell with what its flag files say, not where they are.

  So a cell tells what it was run with, whatever becomes of the files.
  """
  given = flag_files.expand(cell.flags)
  return dataclasses.replace(cell, flags=tuple(given))


def _shown(root, table, cells):
  """Returns the cells of the report: those asked for, and all begun before."""
  from tff_meta.comparison import runner

  scale = table.scale(SCALE.value)
  seeds = dict.fromkeys([*scale.seeds, *(cell.seed for cell in cells)])
  seeds |= dict.fromkeys(runner.seeds(root))
  asked = {cell.folder for cell in cells}
  return [
      cell
      for cell in tables.cells(
          table,
          SCALE.value,
          rows=[r.name for r in table.rows],
          settings=[s.name for s in table.settings],
          seeds=list(seeds),
      )
      if cell.folder in asked
      or runner.CellFolder(root, cell).outcome().state != 'not run'
  ]


def _check_data(cells, data_dir: str | None) -> None:
  """Loads each data set, so that one that is not there is one error."""
  from tff_meta import datasets

  flag = '--dataset='
  given = ([f for f in cell.flags if f.startswith(flag)] for cell in cells)
  for name in dict.fromkeys(names[-1].removeprefix(flag) for names in given):
    datasets.load_corpus(name, data_dir)


def _claim_kept(kept: pathlib.Path, table: tables.Table) -> None:
  """Makes the directory of --keep, or raises before anything runs."""
  from tff_meta.comparison import runner

  try:
    plain_files.make_directory(kept, parents=True)
    runner.claim(kept, experiment=table.name, scale=SCALE.value)
  except plain_files.DamagedFileError:
    raise
  except OSError as error:
    raise OSError(
        f'Expected to be able to write to {kept} of --keep, found'
        f' {error.strerror}.'
    ) from None


def _command() -> str:
  """Returns the command that makes the report again, without places."""
  name = os.path.basename(EXPERIMENT.value)
  parts = [*_this_program(), f'--experiment={name}', f'--scale={SCALE.value}']
  for flag in (ROWS, SETTINGS, SEEDS):
    if flag.value:
      parts.append(f'--{flag.name}={",".join(flag.value)}')
  parts += _plugins()
  if _data_dir() is not None:
    parts.append('--data_dir=DATA')
  return shlex.join(parts)


def _this_program() -> list[str]:
  if (_ROOT / 'run').exists():
    return ['./run', 'python', '-m', 'binaries.compare']
  return ['tff-meta-compare']  # As an installation has it.


def _data_dir() -> str | None:
  given = flag_groups.DATA_DIR.value
  return None if given is None else os.path.abspath(given)


def _program() -> list[str]:
  program = [sys.executable, '-m', 'binaries.train']
  if _data_dir() is not None:
    program.append(f'--data_dir={_data_dir()}')
  program += [f'--device={flag_groups.DEVICE.value}', *_plugins()]
  # A table has rows to compare with: no further references. And it says what
  # is evaluated on the way, so that its runs take as long as it says.
  return [*program, '--noreferences', '--eval_every=0', '--noeval_new_clients']


def _plugins() -> list[str]:
  names = ','.join(flag_groups.PLUGINS.value)
  return [f'--plugins={names}'] if names else []


def _environment() -> dict[str, str]:
  """Returns that of the training programs, which are run elsewhere."""
  from tff_meta.comparison import runner

  environment = runner.environment(PROCESSES.value)
  if _plugins():
    environment['PYTHONPATH'] = plugins.python_path()
  return environment


def _places(root: pathlib.Path) -> dict[str, str]:
  """Returns what directories are called in messages that are kept."""
  places = {str(root): 'DIR', str(_ROOT): '.'}
  data_dir = _data_dir()
  if data_dir is not None:
    places[data_dir] = 'DATA'
  return places


def _compare_runs() -> int:
  """Writes the report of --runs."""
  others = (
      EXPERIMENT,
      SCALE,
      ROWS,
      SETTINGS,
      SEEDS,
      PROCESSES,
      PRINT_COMMAND,
      REPORT_ONLY,
      KEEP,
  )
  given = [flag.name for flag in others if flags.FLAGS[flag.name].present]
  if given:
    raise ValueError(f'Expected no --{given[0]} with --runs, found both.')
  from tff_meta.comparison import existing_runs
  from tff_meta.comparison import report
  from tff_meta.comparison import runner
  from tff_meta.training import run_directory

  root = pathlib.Path(OUTPUT_DIR.value or 'runs/compare_runs')
  paths = ','.join(RUNS.value)
  runner.check_claim(root, runs=paths)
  command = shlex.join([*_this_program(), f'--runs={paths}'])
  found = existing_runs.RunsReport(existing_runs.read(RUNS.value), command)
  with run_directory.RunDirectory(root).locked():
    runner.claim(root, runs=paths)
    report.write(root, found)
  print(report.markdown(found))
  print(f'Report: {root / "report.html"}')
  return 0


def main() -> int:
  """Runs the program and returns its exit code."""
  with command_line.reported_errors():
    flag_groups.import_plugins()
    experiments.add_rows_of_plugins()
    if LIST.value:
      _print_list()
      return 0
    if RUNS.value:
      return _compare_runs()
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
    _check_have_runs(cells, table)
    default = f'runs/compare_{table.name}_{SCALE.value}'
    root = pathlib.Path(OUTPUT_DIR.value or default).resolve()
    kept = KEEP.value and pathlib.Path(KEEP.value).resolve()
    program, places, data_dir = _program(), _places(root), _data_dir()
    cells = [_with_flag_files(cell) for cell in cells]
    from tff_meta.comparison import record
    from tff_meta.comparison import report
    from tff_meta.comparison import results
    from tff_meta.comparison import runner
    from tff_meta.training import run_directory

    if PRINT_COMMAND.value:
      found = f'PYTHONPATH={plugins.python_path()}'
      prefix = ['env', found] if _plugins() else []
      for cell in cells:
        print(shlex.join([*prefix, *runner.command(program, root, cell)]))
      return 0
    runner.check_claim(root, experiment=table.name, scale=SCALE.value)
    if kept:
      if kept == root:
        raise ValueError(
            'Expected --keep to be another directory than --output_dir, found'
            f' {KEEP.value} for both.'
        )
      runner.check_claim(kept, experiment=table.name, scale=SCALE.value)
      record.check_target(kept, _shown(root, table, cells))
    if REPORT_ONLY.value and not root.exists():
      raise ValueError(f'Expected a comparison in {root}, found no directory.')
    if not REPORT_ONLY.value:
      todo = [
          cell
          for cell in cells
          if runner.CellFolder(root, cell).outcome().state != 'finished'
      ]
      command_line.report(
          f'Comparing {spelling.counted(len(cells), "run")} of {table.name}, of'
          f' which {len(cells) - len(todo)} are finished. Reading their data'
          ' sets.'
      )
      _check_data(todo, data_dir)

    def write_report():
      shown = _shown(root, table, cells)
      report.write(
          root,
          report.Comparison(
              table,
              SCALE.value,
              shown,
              results.collect(root, table, shown),
              results.provenance(root, shown),
              _command(),
          ),
      )

    with run_directory.RunDirectory(root).locked():
      runner.claim(root, experiment=table.name, scale=SCALE.value)
      if kept:
        _claim_kept(kept, table)
      begun = _shown(root, table, cells)
      runner.settle(root, [_with_flag_files(cell) for cell in begun])
      running = runner.Runner(
          root,
          program,
          environment=_environment(),
          working_directory=_ROOT,
          places=places,
          report=command_line.report,
          changed=write_report,
          result=lambda cell: results.sentence(root, table, cell),
      )

      def stop(*_):
        running.stop()
        command_line.report(
            'Stopping: running cells end their round and save; a second signal'
            ' kills them.'
        )

      for signal_num in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_num) is not signal.SIG_IGN:  # Of nohup.
          signal.signal(signal_num, stop)
      if not REPORT_ONLY.value:
        command_line.report(
            f'{len(todo)} of {len(cells)} runs to do, {PROCESSES.value} at a'
            f' time, in {root}. All of {table.name} --scale={SCALE.value}:'
            f' {_cost(table, SCALE.value)}.'
        )
        running.run(cells, PROCESSES.value)
      write_report()
      if kept and running.stopped:
        command_line.report(f'Nothing was copied to {kept}.')
      elif kept:
        record.keep(root, table, SCALE.value, _shown(root, table, cells), kept)
      complete = REPORT_ONLY.value or all(
          results.is_complete(root, cell) for cell in cells
      )
  print((root / 'table.md').read_text('utf-8'))
  print(f'Report: {root / "report.html"}')
  if running.stopped:
    command_line.report('Stopped; the same command continues the comparison.')
    return command_line.INTERRUPTED
  return 0 if complete else command_line.FAILURE


if __name__ == '__main__':
  command_line.run_and_end(main)
