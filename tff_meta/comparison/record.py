"""The small files of a comparison, to be kept where every number can be traced.

Checkpoints, logs, pictures and most of the metrics stay behind, and so does the
place of the data set, but for one in the flags of a table of one's own
(`--dataset=folder:/PATH`), by which a cell is known again; a path relative to
`--data_dir` names no place. What is kept is a comparison's directory in its
turn: its report can be written again (without the losses), and the runs that it
lacks can be added to a copy of it. The report's tables are written there last,
of the copies (`report.write_tables`): whatever stops that, no new table stands
beside old copies.
"""

from collections.abc import Sequence
import csv
import hashlib
import io
import pathlib

from tff_meta import plain_files
from tff_meta.comparison import progress
from tff_meta.comparison import results
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import atomic_files
from tff_meta.training import metric_writers
from tff_meta.training import sealed_json


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
  """Copies what each finished cell was and gave.

  That is `cell.json` and, in `run`, `summary.json`, `config.json` without where
  the data set was, the tables of clients or groups at the end, and of
  `metrics.csv` the rounds that have an evaluation, if any have; and the bytes
  that old runs do not tell themselves (`traffic.json`). Copies that are there
  are replaced.

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
    OSError: If `traffic.json` cannot be read or a file not be written.
  """
  runner.check_claim(target, experiment=table.name, scale=scale_name)
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
  traffic = b''
  if (root / progress.TRAFFIC_FILE).exists():
    traffic = plain_files.read_bytes(
        root / progress.TRAFFIC_FILE, plain_files.MAX_JSON_BYTES
    )
  plain_files.make_directory(target, parents=True)
  runner.claim(target, experiment=table.name, scale=scale_name)
  if traffic:
    atomic_files.write_bytes(target / progress.TRAFFIC_FILE, traffic)
  for cell, contents in files.items():
    copy = runner.CellFolder(target, cell)
    plain_files.make_directory(copy.run, parents=True)
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
    files = run / 'summary.json', run / 'config.json'
    summary, config = (sealed_json.read(path, *files) for path in files)
    contents = {
        path.name: _read_table(run, path.name) for path in _per_client(run)
    }
    evaluations = _evaluations(run)
    if evaluations:
      contents['metrics.csv'] = evaluations
    sums = {n: hashlib.sha256(c).hexdigest() for n, c in contents.items()}
    contents['summary.json'] = plain_files.read_bytes(
        run / 'summary.json', plain_files.MAX_JSON_BYTES
    )
    config['config'].pop('data_dir', None)
    if 'files' in summary:  # Of a run of this version.
      summary = sealed_json.seal(summary | {'files': sums})
      contents['summary.json'] = atomic_files.json_bytes(summary)
      config = sealed_json.seal(config)
    contents['config.json'] = atomic_files.json_bytes(config)
    return contents
  except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
    raise runner.ComparisonError(
        f'Expected the files of a finished run in {run}, found'
        f' {type(error).__name__}: {error}. {runner.RUN_AGAIN}'
    ) from None


def _read_table(run: pathlib.Path, name: str) -> bytes:
  """Returns the content of a run's table, checked by its summary.json."""
  path = run / name
  content = plain_files.read_bytes(path, plain_files.MAX_TABLE_BYTES)
  metric_writers.check_sha256(path, content, results.read_sha256(run, name))
  return content


def _per_client(run: pathlib.Path) -> list[pathlib.Path]:
  """Returns a run's tables of clients and of groups."""
  return [*run.glob('clients_*.csv'), *run.glob('groups_*.csv')]


def _evaluations(run: pathlib.Path) -> bytes:
  """Returns the rows of metrics.csv that have an evaluation, if any have."""
  if results.sha256_of_table(run, 'metrics.csv') is None:
    return b''  # In a copy, where none had one.
  content = _read_table(run, 'metrics.csv').decode()
  reader = csv.DictReader(io.StringIO(content, newline=''))
  names = reader.fieldnames or ()
  measured = metric_writers.evaluations(names)
  rows = [row for row in reader if any(row[name] for name in measured)]
  if not rows:
    return b''
  text = io.StringIO()
  writer = csv.DictWriter(text, names, lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue().encode()
