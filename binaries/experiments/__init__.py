"""The tables that `binaries.compare` runs, by name; a file a paper.

A file of somebody else defines what these define: `TABLES`, a tuple of
`tff_meta.comparison.tables.Table`.
"""

from collections.abc import Sequence
import dataclasses
import os
import pathlib
import re
import runpy

from binaries.experiments import absences
from binaries.experiments import cafeme
from binaries.experiments import digits
from binaries.experiments import fedec
from binaries.experiments import fedmeta_per
from binaries.experiments import frl
from binaries.experiments import metavers
from binaries.experiments import presets
from binaries.experiments import private
from binaries.experiments import users
from tff_meta import catalog
from tff_meta import plugins
from tff_meta import spelling
from tff_meta.comparison import tables

TABLES = tables.TABLES

for _module in (
    digits,
    fedmeta_per,
    metavers,
    fedec,
    cafeme,
    frl,
    presets,
    private,
    absences,
    users,
):
  for _table in _module.TABLES:
    tables.register_table(_table)


def add_rows_of_plugins() -> None:
  """Gives the digits a row of every algorithm that there is by now."""
  TABLES[digits.TABLE.name] = dataclasses.replace(
      digits.TABLE, rows=digits.rows()
  )


def get(name: str) -> tables.Table:
  """Returns a table.

  Args:
    name: What `--experiment` takes: the name of a table; a file, `PATH.py`; or
      one of a file's tables, `PATH.py:NAME`.

  Raises:
    ValueError: If there is none of that name, or more than one in the file.
  """
  found = find(name)
  if len(found) > 1:
    choices = ', '.join(f'--experiment={name}:{table.name}' for table in found)
    raise ValueError(
        f'Expected one table, found {len(found)} in {name}. Tip: {choices}.'
    )
  return found[0]


def find(name: str) -> Sequence[tables.Table]:
  """Returns the tables that `--experiment` may mean, all those of a file.

  Args:
    name: As in `get`.

  Raises:
    ValueError: If there is none of that name, or a file cannot be run.
  """
  in_file = re.fullmatch(r'(.*\.py)(?::(.*))?', name)
  if in_file is None:
    return [TABLES.find(name)]
  path, chosen = in_file.groups()
  found = _read(path)
  if chosen is None:
    return found
  of_file = catalog.Catalog('experiment', {t.name: t for t in found})
  return [of_file.find(chosen)]


def _read(path: str) -> Sequence[tables.Table]:
  """Returns the tables of a file, whose names no other has."""
  file = pathlib.Path(path)
  if not file.is_file():
    there = [p.name for p in sorted(file.parent.glob('*.py'))]
    tip = spelling.tip(file.name, there) or (
        f' Tip: paths are those of {os.getcwd()}.'
    )
    raise ValueError(f'Expected a file of tables, found no {path}.{tip}')
  plugins.look_in_working_directory()
  with plugins.named_errors(ValueError, f'the tables of {path}'):
    found = runpy.run_path(path).get('TABLES')
  if not (
      isinstance(found, Sequence)
      and found
      and all(isinstance(table, tables.Table) for table in found)
  ):
    raise ValueError(
        f'Expected {path} to define TABLES, a tuple of'
        f' tff_meta.comparison.tables.Table, found {found!r}.'
    )
  for table in found:
    tables.register_table(table)
  return found
