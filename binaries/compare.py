"""Runs a table of a paper and sets its published numbers beside ours.

  python -m binaries.compare --list
  python -m binaries.compare --experiment=fedmeta_per_mnist --scale=paper \
      --output_dir=DIR
  python -m binaries.compare --runs=RUN,RUN,...
  python -m binaries.compare --verify=results/fedmeta_per_mnist --seeds=1
  python -m binaries.compare --experiment=digits --rows=fed_avg \
      --sweep=learning_rate=0.1,0.3

Every cell (method, setting, seed) is a run of `binaries.train`. The same
command continues a comparison that was stopped, by whatever: finished cells are
not run again. DIR holds table.md, table.csv, table.json and report.html, which
are brought up to date after every cell, and the runs. --runs makes the same of
runs that exist, with what differs in their settings, data and code. --verify
runs cells of a kept comparison again, and says of each if its numbers are the
very same. --sweep looks for hyperparameters, on validation data only.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import json
import os
import pathlib
import shlex
import signal
import subprocess
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
from tff_meta.comparison import searches
from tff_meta.comparison import tables
from tff_meta.datasets import own_data

EXPERIMENT = flags.DEFINE_string(
    'experiment',
    None,
    'What to run: a name, --list shows all; or PATH.py, a file that defines'
    ' TABLES as those of binaries/experiments do, PATH.py:NAME if there are'
    ' several.',
)
RUNS = flag_kinds.define_paths(
    'runs',
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
    None,
    list(tables.SCALES),
    'How much of it: a few rounds that show that it works (smoke), what two'
    ' cores do in hours (cpu), or as published (paper); by default cpu or, if'
    ' the table has no such scale, its first one.',
)
ROWS = flag_kinds.define_list('rows', 'Only these methods.')
SETTINGS = flag_kinds.define_list('settings', 'Only these settings.')
SEEDS = flag_kinds.define_list('seeds', 'Instead of those of the scale.')
MEASURES = flag_kinds.define_list(
    'measures',
    'What else is shown of those who are tested, beyond accuracy, with commas:'
    f' {", ".join(tables.FURTHER)}.',
)
REFERENCE = flags.DEFINE_string(
    'reference',
    None,
    'The row of --experiment that all others are compared with, client by'
    " client; by default the table's own, or its first.",
)
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
VERIFY = flag_kinds.define_path(
    'verify',
    None,
    'Instead of an --experiment: the directory of a kept comparison. Its cells,'
    ' or those of --rows, --settings and --seeds, are run again (with'
    ' --report_only: taken from --output_dir) and compared with what was kept,'
    ' bit by bit.',
)
SWEEP = flags.DEFINE_multi_string(
    'sweep',
    [],
    'Values of a hyperparameter that are tried for the rows of --experiment,'
    ' NAME=VALUE,VALUE,... or, with --search, also NAME=LOW..HIGH; given'
    ' several times, all combinations. The best are chosen on validation data.',
)
SEARCH = flags.DEFINE_enum(
    'search',
    None,
    list(searches.KINDS),
    'Try not all that --sweep says but --budget combinations that are drawn at'
    ' random (random); or three times as many, of which the best thirds go on'
    ' to more rounds (halving).',
)
BUDGET = flag_kinds.define_whole_number(
    'budget',
    10,
    'How much --search trains for a row, a setting and a seed, in runs of full'
    ' length.',
    least=1,
)
LIST = flags.DEFINE_bool('list', False, 'Show the experiments, end.')
flags.declare_key_flag('data_dir')
flags.declare_key_flag('device')
flags.declare_key_flag('plugins')
flags.declare_key_flag('ray_address')
flags.declare_key_flag('worker_cpus')
flags.declare_key_flag('worker_gpus')
flags.declare_key_flag('worker_timeout_seconds')
flags.declare_key_flag('allow_mixed_hosts')

# Where runs compute, and on whose data.
_OF_MACHINES = (
    flag_groups.DATA_DIR,
    flag_groups.DEVICE,
    flag_groups.EXECUTION,
    flag_groups.RAY_ADDRESS,
    flag_groups.WORKERS,
    flag_groups.WORKER_CPUS,
    flag_groups.WORKER_GPUS,
    flag_groups.WORKER_TIMEOUT_SECONDS,
    flag_groups.ALLOW_MIXED_HOSTS,
)
_MANY_ROWS = 50  # Not listed among all experiments.
# What of finished runs is shown, not which are run.
_VIEWS = MEASURES, REFERENCE
_ROOT = pathlib.Path(__file__).resolve().parents[1]
# A table has rows to compare with: no further references. On the way its runs
# measure one accuracy, ten times unless the table says otherwise.
_OF_CELLS = '--noreferences', '--noeval_new_clients'
_DATA = '--data_dir=DATA'  # In commands that are kept.


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
    rows = [r.name for r in table.rows if r.settings != ()]
    if EXPERIMENT.value or len(rows) < _MANY_ROWS:
      print(f'  --rows: {", ".join(rows)}')
    else:
      print(f'  --rows: {len(rows)}, shown by --list --experiment={table.name}')


def _check_have_runs(cells, table: tables.Table, scale_name: str) -> None:
  """Raises if a row that was asked for has no run in these settings."""
  scale = table.scale(scale_name)
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


@dataclasses.dataclass(frozen=True)
class _Work:
  """What is run, and where.

  Attributes:
    table: The table.
    scale: Name of its scale.
    cells: The runs that are asked for; of a search, those of its first rung.
    root: The directory.
    claim: What the directory is marked with.
    command: What makes the report again.
    kept: Cells of a comparison that is verified, which have their own flags.
    search: What the runs belong to, if they are a search.
  """

  table: tables.Table
  scale: str
  cells: Sequence[tables.Cell]
  root: pathlib.Path
  claim: Mapping[str, str]
  command: str
  kept: Sequence[tables.Cell] = ()
  search: searches.Search | None = None

  def shown(self) -> list[tables.Cell]:
    """Returns the cells of the report: those asked for, and all begun before.

    Flag files are read in: so a cell tells what it was run with, whatever
    becomes of the files.
    """
    from tff_meta.comparison import runner

    seeds = [
        *self.table.scale(self.scale).seeds,
        *(cell.seed for cell in self.cells),
        *runner.seeds(self.root),
    ]
    known = {cell.folder: cell for cell in (*self.kept, *self.cells)}
    asked = {cell.folder for cell in self.cells}
    return [
        known.get(cell.folder) or _with_flag_files(cell)
        for cell in tables.cells(
            self.table,
            self.scale,
            rows=[r.name for r in self.table.rows],
            settings=[s.name for s in self.table.settings],
            seeds=list(dict.fromkeys(seeds)),
        )
        if cell.folder in asked
        or runner.CellFolder(self.root, cell).outcome().state != 'not run'
    ]


def _values(cells: Sequence[tables.Cell], name: str) -> list[str]:
  """Returns what a flag is in each of the cells, empty where it is not."""
  found = (tables.in_force(cell.flags).get(f'--{name}', '') for cell in cells)
  return [text.partition('=')[2] for text in found]


def _check_settings(work: _Work, todo: Sequence[tables.Cell]) -> None:
  """Raises before the first run if one would be refused as its flags are.

  Where only seeds differ, one run is checked, and each seed in some run.
  """
  from tff_meta.comparison import runner
  from tff_meta.execution import native

  asked: list[tables.Cell] = []
  seen: set[object] = set()
  for cell in todo:
    seed = f'--seed={cell.seed}'
    found = {seed, tuple(flag for flag in cell.flags if flag != seed)}
    if not found <= seen:
      asked.append(cell)
    seen |= found
  _, _, _, *of_all = _program(work.cells)  # Behind python -m binaries.train.
  done = subprocess.run(
      native.ending_with_parent(
          [sys.executable, '-m', 'binaries.check_runs'], signal.SIGTERM
      ),
      input=json.dumps([runner.command(of_all, work.root, c) for c in asked]),
      capture_output=True,
      text=True,
      cwd=_ROOT,
      env=_environment(asked),
  )
  if done.returncode:
    cell = asked[int((done.stdout.split() or ['0'])[-1])]
    *_, problem = done.stderr.splitlines() or ['It printed nothing.']
    is_refused = done.returncode == command_line.USAGE_ERROR
    raise (ValueError if is_refused else OSError)(
        f'{cell.setting}, {cell.row}, seed {cell.seed}:'
        f' {problem.removeprefix("Error: ")}'
    )


def _check_data(cells: Sequence[tables.Cell], of_all: str | None) -> None:
  """Loads each data set as cells do: one that is not there is one error.

  Args:
    cells: Those that have to run.
    of_all: Where data are unless a cell says it, see `_data_dir_of`.
  """
  from tff_meta import datasets
  from tff_meta.training import hyperparameters

  for text in filter(None, dict.fromkeys(_values(cells, 'plugins'))):
    plugins.import_named(text.split(','), '--plugins of a run')
  names = ('dataset', 'data_dir', 'dataset_options')
  given = zip(*(_values(cells, name) for name in names), strict=True)
  for name, data_dir, text in dict.fromkeys(given):
    if name:
      load = datasets.get(name).load
      options = hyperparameters.parse_options(load, 2, text)
      load(data_dir or of_all, False, **options)


def _say_places_of_data(
    cells: Sequence[tables.Cell], kept: pathlib.Path
) -> None:
  """Says which places of this machine the flags of kept cells will name."""
  for name in filter(own_data.is_own, dict.fromkeys(_values(cells, 'dataset'))):
    kind, _, path = name.partition(':')
    if os.path.isabs(path):
      folder, base = os.path.split(path)
      command_line.report(
          f'Note: the copies in {kept} will say that the data were in {path}.'
          f' Tip: those of --dataset={kind}:{base} --data_dir={folder} do not.'
      )


def _claim_kept(kept: pathlib.Path, work: _Work) -> None:
  """Makes the directory of --keep, or raises before anything runs."""
  from tff_meta.comparison import runner

  try:
    plain_files.make_directory(kept, parents=True)
    runner.claim(kept, **work.claim)
  except plain_files.DamagedFileError:
    raise
  except OSError as error:
    raise OSError(
        f'Expected to be able to write to {kept} of --keep, found'
        f' {error.strerror}.'
    ) from None


def _command(scale: str | None) -> str:
  """Returns the command that makes the report again.

  Its places are relative to the working directory; those elsewhere are not
  named, because the command is kept with the tables.
  """
  parts = _this_program('compare')
  if VERIFY.value:
    parts.append(f'--verify={_place(VERIFY.value)}')
  if EXPERIMENT.value:
    path, ending, name = EXPERIMENT.value.partition('.py')
    experiment = f'{_place(path)}{ending}{name}' if ending else path
    parts.append(f'--experiment={experiment}')
  if scale is not None:
    parts.append(f'--scale={scale}')
  for flag in (ROWS, SETTINGS, SEEDS, MEASURES):
    if flag.value:
      parts.append(f'--{flag.name}={",".join(flag.value)}')
  if REFERENCE.value:
    parts.append(f'--reference={REFERENCE.value}')
  parts += [f'--sweep={text}' for text in SWEEP.value]
  if SEARCH.value:
    parts += [f'--search={SEARCH.value}', f'--budget={BUDGET.value}']
  parts += _plugins()
  if _data_dir() is not None:
    parts.append(_DATA)
  if OUTPUT_DIR.value:
    place = _place(OUTPUT_DIR.value)
    is_elsewhere = place.startswith('ELSEWHERE')
    parts.append(f'--output_dir={"DIR" if is_elsewhere else place}')
  return shlex.join(parts)


def _place(path: str) -> str:
  """Returns a path as commands that are kept name it."""
  relative = os.path.relpath(path)
  if relative.startswith(os.pardir):
    return os.path.join('ELSEWHERE', os.path.basename(path))
  return relative


def _without_views(command: str) -> str:
  """Returns a command without what a report without these flags lacks."""
  views = tuple(f'--{flag.name}=' for flag in _VIEWS)
  parts = shlex.split(command)
  return shlex.join(part for part in parts if not part.startswith(views))


def _this_program(name: str) -> list[str]:
  """Returns the command of one of our programs, without flags."""
  if (_ROOT / 'run').exists():
    place = _place(str(_ROOT / 'run'))
    run = './run' if place == 'run' else place
    return [run, 'python', '-m', f'binaries.{name}']
  return [f'tff-meta-{name}']  # As an installation has it.


def _shown_program(command: str) -> list[str]:
  """Returns the command of a cell's program as the report shows it.

  Args:
    command: That of the comparison.
  """
  data_dir = [part for part in shlex.split(command) if part == _DATA]
  return [*_this_program('train'), *data_dir, *_plugins(), *_OF_CELLS]


def _data_dir() -> str | None:
  given = flag_groups.DATA_DIR.value
  return None if given is None else os.path.abspath(given)


def _data_dir_of(cells: Sequence[tables.Cell]) -> str | None:
  """Returns where cells find their data, who work in another directory.

  Without --data_dir that is the working directory of this program if a cell has
  data of one's own by a relative path.
  """
  if _data_dir() is not None:
    return _data_dir()
  given = zip(
      _values(cells, 'dataset'), _values(cells, 'data_dir'), strict=True
  )
  names = dict.fromkeys(name for name, data_dir in given if not data_dir)
  relative = [name for name in names if own_data.is_relative(name)]
  others = [name for name in names if name and not own_data.is_own(name)]
  if relative and others:
    raise ValueError(
        'Expected an absolute path of data of your own beside other data sets,'
        f' found {relative[0]!r} beside {others[0]!r}.'
    )
  return os.getcwd() if relative else None


def _program(cells: Sequence[tables.Cell]) -> list[str]:
  program = [sys.executable, '-m', 'binaries.train']
  data_dir = _data_dir_of(cells)
  if data_dir is not None:
    program.append(f'--data_dir={data_dir}')
  program += [f'--device={_device()}', *_plugins()]
  return [*program, *_OF_CELLS]


def _device() -> str:
  """Returns what cells compute on; on Ray that is what they have taken."""
  device = flag_groups.DEVICE.value
  if flag_groups.EXECUTION.value != 'ray':
    return device
  taken = 'gpu' if flag_groups.WORKER_GPUS.value else 'cpu'
  if device not in ('auto', taken):
    raise ValueError(
        f'Expected --worker_gpus={int(device == "gpu")} with --execution=ray'
        f' and --device={device}, found {flag_groups.WORKER_GPUS.value}.'
    )
  return taken


def _plugins() -> list[str]:
  names = ','.join(flag_groups.PLUGINS.value)
  return [f'--plugins={names}'] if names else []


def _have_own_modules(cells: Sequence[tables.Cell]) -> bool:
  """Returns whether runs import modules that are not of this library."""
  of_models = any(':' in name for name in _values(cells, 'model'))
  return bool(_plugins()) or any(_values(cells, 'plugins')) or of_models


def _environment(cells: Sequence[tables.Cell]) -> dict[str, str]:
  """Returns that of the training programs, which are run elsewhere."""
  from tff_meta.comparison import runner

  environment = runner.environment(PROCESSES.value)
  if _have_own_modules(cells):
    environment['PYTHONPATH'] = plugins.python_path()
  return environment


def _check_execution() -> None:
  """Raises if flags do not go with --execution."""
  if flag_groups.EXECUTION.value == 'ray' and flags.FLAGS['workers'].present:
    raise ValueError(
        'Expected --processes, how many cells run at the same time, found'
        ' --workers.'
    )
  flag_groups.ray_options(flag_groups.execution_among('in_process', 'ray'))
  _device()


def _start_elsewhere(cells: Sequence[tables.Cell]):
  """Returns what starts cells on a Ray cluster, None for this machine."""
  if flag_groups.EXECUTION.value != 'ray':
    return None
  # Here, because they import TensorFlow.
  from tff_meta import machine
  from tff_meta.comparison import remote_runs
  from tff_meta.execution import native
  from tff_meta.execution import ray_pool

  options = flag_groups.ray_options('ray') | {'workers': PROCESSES.value}
  hosts = ray_pool.Hosts(ray_pool.Options(**options))
  native.call_before_end(hosts.close)
  environment = {
      name: value for name, value in machine.environment().items() if value
  }
  for name in ('OMP_NUM_THREADS', 'TF_NUM_INTEROP_THREADS'):
    environment[name] = str(options['worker_cpus'])
  if _have_own_modules(cells):
    environment['PYTHONPATH'] = plugins.python_path()
  return remote_runs.RemoteRuns(
      hosts,
      _program(cells)[1:],  # Every host has its own Python.
      environment=environment,
      working_directory=_ROOT,
      allow_mixed_hosts=options['allow_mixed_hosts'],
      report=command_line.report,
  ).start


def _places(work: _Work) -> dict[str, str]:
  """Returns what directories are called in messages that are kept."""
  places = {str(work.root): 'DIR', str(_ROOT): '.'}
  data_dir = _data_dir_of(work.cells)
  if data_dir is not None:
    places.setdefault(data_dir, 'DATA')
  return places


def _check_alone(flag: flags.FlagHolder, *others: flags.FlagHolder) -> None:
  """Raises if a flag is given with one that means nothing beside it."""
  given = [other.name for other in others if flags.FLAGS[other.name].present]
  if given:
    raise ValueError(
        f'Expected no --{given[0]} with --{flag.name}, found both.'
    )


def _compare_runs() -> int:
  """Writes the report of --runs."""
  _check_alone(
      RUNS,
      EXPERIMENT,
      SCALE,
      ROWS,
      SETTINGS,
      SEEDS,
      REFERENCE,
      BUDGET,
      PROCESSES,
      *_OF_MACHINES,
      PRINT_COMMAND,
      REPORT_ONLY,
      KEEP,
      VERIFY,
      SWEEP,
      SEARCH,
  )
  from tff_meta.comparison import existing_runs
  from tff_meta.comparison import report
  from tff_meta.comparison import runner
  from tff_meta.training import run_directory

  root = pathlib.Path(OUTPUT_DIR.value or 'runs/compare_runs')
  paths = ','.join(RUNS.value)
  runner.check_claim(root, runs=paths)
  parts = [*_this_program('compare'), f'--runs={paths}']
  if MEASURES.value:
    parts.append(f'--{MEASURES.name}={",".join(MEASURES.value)}')
  if OUTPUT_DIR.value:  # As they are given: such a report is not kept.
    parts.append(f'--output_dir={OUTPUT_DIR.value}')
  found = existing_runs.RunsReport(
      existing_runs.read(RUNS.value), shlex.join(parts), MEASURES.value
  )
  with run_directory.RunDirectory(root).locked():
    runner.claim(root, runs=paths)
    report.write(root, found)
  print(report.markdown(found))
  print(f'Report: {root / "report.html"}')
  return 0


def _root(default: str) -> pathlib.Path:
  return pathlib.Path(OUTPUT_DIR.value or f'runs/{default}').resolve()


def _table_work() -> _Work:
  """Returns the runs of --experiment, or of a search for its rows."""
  if not EXPERIMENT.value:
    raise ValueError(
        'Expected --experiment, found none. Tip: --list shows them.'
    )
  if SEARCH.value and not SWEEP.value:
    raise ValueError(
        'Expected --sweep with --search, found none: nobody knows what to vary.'
        ' Tip: --sweep=learning_rate=0.001..0.3.'
    )
  if flags.FLAGS[BUDGET.name].present and not SEARCH.value:
    raise ValueError(
        'Expected --search with --budget, found none. Tip: --search=random;'
        ' without, --sweep tries everything.'
    )
  if SWEEP.value:  # Its table has validation accuracies alone.
    _check_alone(SWEEP, *_VIEWS)
  space = searches.read_space(SWEEP.value)
  table = experiments.get(EXPERIMENT.value)
  table = table.with_further_measures(MEASURES.value)
  if REFERENCE.value is not None:
    table = dataclasses.replace(table, reference=REFERENCE.value)
  scale = SCALE.value or table.default_scale
  seeds = _seeds()
  if space and not seeds:
    seeds = list(table.scale(scale).seeds[:1])
  cells = tables.cells(
      table, scale, rows=ROWS.value, settings=SETTINGS.value, seeds=seeds
  )
  _check_have_runs(cells, table, scale)
  cells = [_with_flag_files(cell) for cell in cells]
  command = _command(scale)
  if not space:
    root = _root(f'compare_{table.name}_{scale}')
    claim = {'experiment': table.name, 'scale': scale}
    return _Work(table, scale, cells, root, claim, command)
  if KEEP.value:
    raise ValueError('Expected no --keep with --sweep, found both.')
  kind = SEARCH.value or searches.GRID
  search = searches.search(cells, table, scale, space, kind, BUDGET.value)
  names = '_'.join(space)
  return _Work(
      search.table,
      scale,
      search.next_cells([], 0),
      _root(f'{kind}_{table.name}_{scale}_{names}'),
      {
          'experiment': table.name,
          'scale': scale,
          'sweep': names,
          'search': kind,
      },
      command,
      search=search,
  )


def _verify_work() -> _Work:
  """Returns the cells of --verify."""
  _check_alone(VERIFY, SCALE, *_VIEWS, KEEP, SWEEP, SEARCH, BUDGET)
  from tff_meta.comparison import runner
  from tff_meta.comparison import verification

  source = pathlib.Path(VERIFY.value).resolve()
  name, scale = verification.read_claim(source)
  table = experiments.get(EXPERIMENT.value or name)
  if table.name != name:
    raise ValueError(
        f'Expected --experiment to be that of {VERIFY.value}, {name!r}, found'
        f' {table.name!r}.'
    )
  root = _root(f'verify_{source.name}')
  if root == source:
    raise ValueError(
        'Expected --output_dir to be another directory than --verify, found'
        f' {VERIFY.value} for both.'
    )
  kept = verification.kept_cells(source, table, scale)
  asked = tables.cells(
      table,
      scale,
      rows=ROWS.value or [row.name for row in table.rows],
      settings=SETTINGS.value or [setting.name for setting in table.settings],
      seeds=_seeds() or runner.seeds(source),
  )
  folders = {cell.folder for cell in asked}
  cells = [cell for cell in kept if cell.folder in folders]
  if not cells:
    raise ValueError(
        f'Expected finished runs of these rows, settings and seeds in'
        f' {VERIFY.value}, found none. Tip: it has the seeds'
        f' {", ".join(map(str, runner.seeds(source)))} of'
        f' {", ".join(dict.fromkeys(cell.row for cell in kept))}.'
    )
  claim = {'experiment': table.name, 'scale': scale}
  return _Work(table, scale, cells, root, claim, _command(None), kept=kept)


def _say_verified(work: _Work) -> bool:
  """Says of every cell of --verify if it is identical; returns if all are."""
  from tff_meta.comparison import verification
  from tff_meta.training import atomic_files

  source = pathlib.Path(VERIFY.value).resolve()
  found = [
      verification.verify(
          source, work.root, work.table.setting(cell.setting), cell
      )
      for cell in work.cells
  ]
  content = {
      'verified': VERIFY.value and _place(VERIFY.value),
      'cells': [verified.to_json() for verified in found],
  }
  atomic_files.write_json(work.root / 'verification.json', content)
  for verified in found:
    print('\n'.join(verified.lines()))
  identical = sum(verified.is_identical for verified in found)
  print(
      f'{identical} of {len(found)} cells are identical to'
      f' {content["verified"]}. Written:'
      f' {work.root / "verification.json"}'
  )
  return identical == len(found)


def _say_chosen(work: _Work, search: searches.Search) -> bool:
  """Says what a search has chosen, and who took no part.

  Returns:
    Whether there is a choice for all, of all numbers that were to be there.
  """
  from tff_meta.comparison import report
  from tff_meta.comparison import results
  from tff_meta.training import atomic_files

  # Of the seeds that were asked for alone: all candidates have these.
  entries = results.collect(work.root, work.table, work.cells)
  choices = search.choices(entries)
  atomic_files.write_json(work.root / 'choices.json', {'choices': choices})
  lacking = [entry for entry in entries if entry.missing]
  for choice in choices:
    among = f'{choice["candidates"]} candidates'
    if choice['candidates_with_numbers'] < choice['candidates']:
      among = (
          f'the {choice["candidates_with_numbers"]} of {among} with a number'
      )
    if choice['diverged']:
      among += f', but for {len(choice["diverged"])} that diverged,'
    hparams = ','.join(f'{k}={v}' for k, v in choice['hparams'].items())
    print(
        f'{choice["setting"]}, {choice["row"]}: {hparams} has'
        f' {choice["validation_accuracy"]:.2f} %, the best of {among} on'
        f' {choice["validation_on"]}.'
    )
    test = [*_shown_program(work.command), *choice['flags']]
    print(f'  Its test: {shlex.join(test)}')
  for entry in lacking:
    print(f'Without a number: {entry.setting}, {entry.row}: {entry.missing}')
  for entry in entries:
    if entry.diverged:
      print(
          f'Diverged, so not chosen: {entry.setting}, {entry.row}:'
          f' {report.what_diverged(entry)}'
      )
  chosen = {(choice['setting'], choice['row']) for choice in choices}
  for cell in search.base:
    if (cell.setting, cell.row) not in chosen:
      print(f'Nothing is chosen for {cell.setting}, {cell.row}.')
  print(f'Written: {work.root / "choices.json"}')
  is_complete = REPORT_ONLY.value or not lacking
  return is_complete and len(choices) == len(search.base)


def _print_commands(work: _Work) -> int:
  from tff_meta.comparison import runner

  found = f'PYTHONPATH={plugins.python_path()}'
  prefix = ['env', found] if _have_own_modules(work.cells) else []
  for cell in work.cells:
    command = runner.command(_program(work.cells), work.root, cell)
    print(shlex.join([*prefix, *command]))
  return 0


def _check(work: _Work, kept: pathlib.Path | None) -> None:
  """Raises if something is wrong, before anything is written."""
  from tff_meta.comparison import record
  from tff_meta.comparison import runner

  runner.check_claim(work.root, **work.claim)
  runner.check_flags(work.root, work.shown(), _reported(work))
  if kept:
    if kept == work.root:
      raise ValueError(
          'Expected --keep to be another directory than --output_dir, found'
          f' {KEEP.value} for both.'
      )
    runner.check_claim(kept, **work.claim)
    record.check_target(kept, work.shown())
    _say_places_of_data(work.shown(), kept)
  if REPORT_ONLY.value and not work.root.exists():
    raise ValueError(
        f'Expected a comparison in {work.root}, found no directory.'
    )
  if not REPORT_ONLY.value:
    todo = _todo(work)
    command_line.report(
        f'Comparing {spelling.counted(len(work.cells), "run")} of'
        f' {work.table.name}, of which {len(work.cells) - len(todo)} are'
        ' finished. Checking their settings and data sets.'
    )
    if todo and not work.kept:  # Of an earlier version some may be impossible.
      _check_settings(work, todo)
    _check_data(todo, _data_dir_of(work.cells))


def _reported(work: _Work) -> tables.Table | None:
  """Returns the table if nothing is run but its report is written."""
  return work.table if REPORT_ONLY.value else None


def _todo(work: _Work) -> list[tables.Cell]:
  """Returns the cells that are not finished."""
  from tff_meta.comparison import runner

  return [
      cell
      for cell in work.cells
      if runner.CellFolder(work.root, cell).outcome().state != 'finished'
  ]


def _comparison(work: _Work):
  """Returns what is reported of the cells that are finished."""
  from tff_meta.comparison import provenance
  from tff_meta.comparison import report
  from tff_meta.comparison import results

  shown = work.shown()
  return report.Comparison(
      work.table,
      work.scale,
      shown,
      results.collect(work.root, work.table, shown),
      results.provenance(work.root, shown),
      work.command,
      _shown_program(work.command),
      provenance.notes(work.root, shown),
  )


def _write_report(work: _Work) -> None:
  from tff_meta.comparison import report

  report.write(work.root, _comparison(work))


def _run_search(work: _Work, running) -> _Work:
  """Runs the rungs of a search; returns its work with all of their cells."""
  from tff_meta.comparison import results

  assert work.search is not None
  batch = work.cells
  for rung in itertools.count(1):
    if not REPORT_ONLY.value:
      running.run(batch, PROCESSES.value)
    entries = results.collect(work.root, work.table, work.cells)
    batch = work.search.next_cells(entries, rung)
    if not batch or running.stopped:
      break
    work = dataclasses.replace(work, cells=[*work.cells, *batch])
  return work


def _stop_on_signals(running) -> None:
  def stop(*_):
    running.stop()
    command_line.report(
        'Stopping: running cells end their round and save; a second signal'
        ' kills them.'
    )

  for signal_num in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(signal_num) is not signal.SIG_IGN:  # Of nohup.
      signal.signal(signal_num, stop)


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
    if PRINT_COMMAND.value:
      _check_alone(PRINT_COMMAND, KEEP, REPORT_ONLY)
    _check_execution()
    work = _verify_work() if VERIFY.value else _table_work()
    kept = pathlib.Path(KEEP.value).resolve() if KEEP.value else None
    if PRINT_COMMAND.value:
      return _print_commands(work)
    _check(work, kept)
    from tff_meta.comparison import record
    from tff_meta.comparison import report
    from tff_meta.comparison import results
    from tff_meta.comparison import runner
    from tff_meta.training import run_directory

    stored = None
    if REPORT_ONLY.value and not any(flag.value for flag in _VIEWS):
      stored = report.stored_command(work.root)
      stored = stored and _without_views(stored)
    work = dataclasses.replace(work, command=stored or work.command)
    start = None if REPORT_ONLY.value else _start_elsewhere(work.cells)
    with run_directory.RunDirectory(work.root).locked():
      runner.claim(work.root, **work.claim)
      if kept:
        _claim_kept(kept, work)
      runner.settle(work.root, work.shown(), _reported(work))
      running = runner.Runner(
          work.root,
          _program(work.cells),
          environment=_environment(work.cells),
          working_directory=_ROOT,
          places=_places(work),
          report=command_line.report,
          changed=lambda: _write_report(work),
          result=lambda cell: results.sentence(work.root, work.table, cell),
          start=start,
      )
      _stop_on_signals(running)
      if not REPORT_ONLY.value:
        command_line.report(
            f'{len(_todo(work))} of {len(work.cells)} runs to do,'
            f' {PROCESSES.value} at a time, in {work.root}. All of'
            f' {work.table.name} --scale={work.scale}:'
            f' {_cost(work.table, work.scale)}.'
        )
      if work.search is not None:
        work = _run_search(work, running)
      elif not REPORT_ONLY.value:
        running.run(work.cells, PROCESSES.value)
      _write_report(work)
      if kept and running.stopped:
        command_line.report(f'Nothing was copied to {kept}.')
      elif kept:
        record.keep(work.root, work.table, work.scale, work.shown(), kept)
        # Last, so that no new table stands beside old copies.
        report.write_tables(kept, _comparison(work))
        command_line.report(f'What is kept of it was copied to {kept}.')
      complete = REPORT_ONLY.value or all(
          results.is_complete(work.root, cell) for cell in work.cells
      )
  print((work.root / 'table.md').read_text('utf-8'))
  print(f'Report: {work.root / "report.html"}')
  if running.stopped:
    command_line.report('Stopped; the same command continues the comparison.')
    return command_line.INTERRUPTED
  if work.kept:
    complete = _say_verified(work)
  if work.search is not None:
    complete = _say_chosen(work, work.search)
  return 0 if complete else command_line.FAILURE


if __name__ == '__main__':
  command_line.run_and_end(main)
