"""The small files of a comparison, to be kept where every number can be traced.

Checkpoints, logs, pictures and most of the metrics stay behind. Nothing that is
kept names a place on this machine. What is kept is a comparison's directory in
its turn: its report can be written again (without the losses), and the runs
that it lacks can be added to a copy of it.
"""

from collections.abc import Sequence
import csv
import io
import json
import pathlib

from tff_meta.comparison import results
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import atomic_files

_TABLES = ('table.md', 'table.csv', 'table.json')


def check_target(target: pathlib.Path, cells: Sequence[tables.Cell]) -> None:
  """Raises if a directory has other runs than copies of these cells.

  Args:
    target: The directory; it need not exist.
    cells: The cells.

  Raises:
    ComparisonError: If there is a copy of another run, or a run that was made
      there.
  """
  known = {cell.folder for cell in cells}
  for path in sorted(target.rglob('cell.json')):
    name = path.parent.relative_to(target).as_posix()
    if name not in known:
      raise runner.ComparisonError(
          f'Expected {target} to hold no runs but those of this report, found'
          f' {name}. Tip: remove it, or give another directory.'
      )
    if (path.parent / 'log.txt').exists():
      raise runner.ComparisonError(
          f'Expected {target} to hold copies of runs, found {name}, which was'
          ' run there. Tip: give another directory.'
      )


def keep(
    root: pathlib.Path,
    table: tables.Table,
    scale_name: str,
    cells: Sequence[tables.Cell],
    target: pathlib.Path,
) -> None:
  """Copies the tables, and of each finished cell what it was and gave.

  That is `cell.json` and, in `run`, `summary.json`, `config.json` without where
  the data set was, the tables of clients or groups at the end, and of
  `metrics.csv` the rounds that have an evaluation, if any have. Copies that are
  there are replaced.

  Args:
    root: The comparison's directory.
    table: Its table.
    scale_name: Its scale.
    cells: Its cells.
    target: Where the copies go; made if it is not there.

  Raises:
    ComparisonError: If copies of another table or scale are there, of a run
      that is not among the cells or is not finished, or other files, or a
      finished cell lacks a file or has one that cannot be read. Nothing is
      changed then.
    OSError: If a table cannot be read or a file not be written.
  """
  runner.check_claim(target, table.name, scale_name)
  check_target(target, cells)
  finished = []
  for cell in cells:
    state = runner.CellFolder(root, cell).outcome().state
    if state == 'finished':
      finished.append(cell)
    elif runner.CellFolder(target, cell).outcome().state == 'finished':
      raise runner.ComparisonError(
          f'Expected {cell.folder}, of which {target} has a copy, to be'
          f' finished, found it {state}. Tip: run it to its end, or give'
          ' another directory.'
      )
  files = {cell: _small_files(root, cell) for cell in finished}
  pages = {name: (root / name).read_bytes() for name in _TABLES}
  target.mkdir(parents=True, exist_ok=True)
  runner.claim(target, table.name, scale_name)
  for name, content in pages.items():
    atomic_files.write_bytes(target / name, content)
  for cell, contents in files.items():
    copy = runner.CellFolder(target, cell)
    copy.run.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
      atomic_files.write_bytes(copy.run / name, content)
    for path in (copy.run / 'metrics.csv', *_per_client(copy.run)):
      if path.name not in contents:  # Of an earlier copy.
        path.unlink(missing_ok=True)
    copy.write(runner.CellFolder(root, cell).outcome())


def _small_files(root, cell) -> dict[str, bytes]:
  """Returns name -> content of what is kept of a finished cell's run."""
  run = runner.CellFolder(root, cell).run
  try:
    files = {
        path.name: path.read_bytes()
        for path in (run / 'summary.json', *_per_client(run))
    }
    if not results.read_json(run / 'summary.json'):
      raise ValueError('summary.json is not one')
    evaluations = _evaluations(run / 'metrics.csv')
    if evaluations:
      files['metrics.csv'] = evaluations
    config = json.loads((run / 'config.json').read_text())
    config['config'].pop('data_dir', None)
    return files | {'config.json': atomic_files.json_bytes(config)}
  except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
    raise runner.ComparisonError(
        f'Expected the files of a finished run in {run}, found'
        f' {type(error).__name__}: {error}. {runner.RUN_AGAIN}'
    ) from None


def _per_client(run: pathlib.Path) -> list[pathlib.Path]:
  """Returns a run's tables of clients and of groups."""
  return [*run.glob('clients_*.csv'), *run.glob('groups_*.csv')]


def _evaluations(metrics: pathlib.Path) -> bytes:
  """Returns the rows of metrics.csv that have an evaluation, if any have."""
  if not metrics.exists():  # In a copy, where none had one.
    return b''
  with open(metrics, newline='') as file:
    reader = csv.DictReader(file)
    names = reader.fieldnames or ()
    measured = [
        name
        for name in names
        if name.endswith('/accuracy') and not name.startswith('train/')
    ]
    rows = [row for row in reader if any(row[name] for name in measured)]
  if not rows:
    return b''
  text = io.StringIO()
  writer = csv.DictWriter(text, names, lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue().encode()
