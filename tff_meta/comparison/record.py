"""The small files of a comparison, to be kept where every number can be traced.

Checkpoints, metrics and pictures stay behind. Nothing that is kept names a
place on this machine.
"""

from collections.abc import Sequence
import json
import pathlib

from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import atomic_files

_TABLES = ('table.md', 'table.csv', 'table.json')


def keep(
    root: pathlib.Path,
    table: tables.Table,
    scale_name: str,
    cells: Sequence[tables.Cell],
    target: pathlib.Path,
) -> None:
  """Copies the tables, and of each finished cell what it was and gave.

  That is `cell.json`, `summary.json` and `config.json`, the last without where
  the data set was. Copies that are there are replaced.

  Args:
    root: The comparison's directory.
    table: Its table.
    scale_name: Its scale.
    cells: Its cells.
    target: Where the copies go; made if it is not there.

  Raises:
    ComparisonError: If copies of another table or scale are there, of a run
      that is not among the finished ones, or other files.
    OSError: If a file cannot be read or written.
    ValueError: If one that should be JSON is not.
  """
  runner.check_claim(target, table.name, scale_name)
  folders = {cell.folder: runner.CellFolder(root, cell) for cell in cells}
  finished = {
      name: folder
      for name, folder in folders.items()
      if folder.outcome().state == 'finished'
  }
  for path in sorted(target.rglob('cell.json')):
    name = path.parent.relative_to(target).as_posix()
    if name not in finished:
      raise runner.ComparisonError(
          f'Expected {target} to hold no runs but those of this report, found'
          f' {name}. Tip: remove it, or give another directory.'
      )
  target.mkdir(parents=True, exist_ok=True)
  runner.claim(target, table.name, scale_name)
  for name in _TABLES:
    atomic_files.write_bytes(target / name, (root / name).read_bytes())
  for name, folder in finished.items():
    copy = target / name
    copy.mkdir(parents=True, exist_ok=True)
    for path in (folder.path / 'cell.json', folder.run / 'summary.json'):
      atomic_files.write_bytes(copy / path.name, path.read_bytes())
    config = json.loads((folder.run / 'config.json').read_text())
    config['config'].pop('data_dir', None)
    atomic_files.write_json(copy / 'config.json', config)
