"""Of what code and data the finished cells of a comparison are, and why."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any, NamedTuple, TypeVar

from tff_meta.comparison import results
from tff_meta.comparison import run_records
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import run_config

_Value = TypeVar('_Value')
_SHORT = 12  # Characters of a commit that is named in full elsewhere.
_OF_TWO_RULES = (
    'Fingerprints are of all examples since version 0.2.0, and were of 64 of'
    ' each part of a data set before: those of old and new runs differ anyway.'
)


class Note(NamedTuple):
  """Something to look up.

  Attributes:
    title: What it is about, a line.
    lines: What it says.
  """

  title: str
  lines: Sequence[str]


def notes(root: pathlib.Path, cells: Sequence[tables.Cell]) -> list[Note]:
  """Returns which run is of which code and data; where data differ, also why.

  Args:
    root: The comparison's directory.
    cells: Those that the comparison consists of.
  """
  records = {
      cell: record
      for cell in cells
      for folder in [runner.CellFolder(root, cell)]
      if folder.outcome().state == 'finished'
      for record in [results.read_json(folder.run / 'config.json')]
      if record
  }
  if not records:
    return []
  by_commit = _grouped(
      {cell: run_records.code(r) for cell, r in records.items()}
  )
  commits = {
      c for r in records.values() for c in run_records.commits(r).values()
  }
  versions = 'one version' if len(commits) == 1 else f'{len(commits)} versions'
  code = Note(
      f'Code of the runs: {versions}',
      [f'{commit}: {_names(of)}' for commit, of in by_commit.items()],
  )
  return [code, _data_facts(records), *_data_notes(records)]


def _data_facts(records) -> Note:
  """Returns what data there are in each setting, classes by their names."""
  facts: dict[str, None] = {}  # In their order.
  for cell, record in records.items():
    config, data = (record.get(part) for part in ('config', 'data'))
    if isinstance(config, Mapping) and isinstance(data, Mapping):
      names = data.get('class_names')
      named = f' ({", ".join(map(str, names))})' if names else ''
      line = (
          f'{cell.setting}: {config.get("dataset")},'
          f' {data.get("num_train_clients")} training clients,'
          f' {data.get("num_classes")} classes{named}, examples of shape'
          f' {data.get("input_shape")}'
      )
      facts[line] = None
  return Note('Data of the settings', list(facts))


def _data_notes(records) -> list[Note]:
  """Returns a note on data that agree, and one a seed where they do not."""
  by_place: dict[tuple[str, int], dict[tables.Cell, run_records.Fingerprint]]
  by_place = collections.defaultdict(dict)
  for cell, record in records.items():
    if fingerprint := run_records.fingerprint(record):
      by_place[cell.setting, cell.seed][cell] = fingerprint
  agreeing, found = [], []
  for (setting, seed), fingerprints in by_place.items():
    groups = _grouped(fingerprints)
    place = f'{setting}, seed {seed}'
    if len(groups) == 1:
      agreeing.append(f'{place}: {next(iter(groups)).digits}')
      continue
    lines = [f'{data.digits}: {_rows(of)}' for data, of in groups.items()]
    title = f'Whether methods had the same data in {place} is not recorded'
    if run_records.same_data(groups) is False:
      title = f'Methods had different data in {place}'
      lines.append(_cause([(of, records[of[0]]) for of in groups.values()]))
    if len({data.of_all for data in groups}) > 1:
      lines.append(_OF_TWO_RULES)
    found.append(Note(title, lines))
  if agreeing:
    found.append(Note('Fingerprints of data that all methods shared', agreeing))
  return found


def _cause(groups) -> str:
  """Returns why the data of groups of cells differ, from a record of each."""
  of_data = {field.name for field in dataclasses.fields(run_config.DataConfig)}
  differing = run_records.differences(
      [_data_settings(record, of_data) for _, record in groups]
  )
  if differing:
    settings = (
        f'{field} is '
        + ', '.join(
            f'{values.get(i)!r} for {_rows(of)}'
            for i, (of, _) in enumerate(groups)
        )
        for field, values in differing.items()
    )
    return f'Cause: their settings differ: {"; ".join(settings)}.'
  commits = {
      list(run_records.commits(record).values())[-1][:_SHORT]: _rows(of)
      for of, record in groups
  }
  if len(commits) > 1:
    code = '; '.join(f'{commit} for {rows}' for commit, rows in commits.items())
    return (
        'Cause: their settings of data are the same, the code that read and'
        f' dealt them is not: {code}.'
    )
  return (
      'Cause: their settings of data and their code are the same, so that the'
      " data set's files must have been others."
  )


def _data_settings(record: Mapping[str, Any], names) -> dict[str, Any]:
  """Returns the settings that decide which client has which examples."""
  config = record.get('config')
  if not isinstance(config, Mapping):
    return {}
  config = run_records.as_of_now(config)
  return {
      name: value
      for name, value in config.items()
      if name in names - {'data_dir'}
  }


def _grouped(
    of_cells: Mapping[tables.Cell, _Value],
) -> dict[_Value, list[tables.Cell]]:
  """Returns value -> the cells that have it."""
  groups: dict[_Value, list[tables.Cell]] = collections.defaultdict(list)
  for cell, value in of_cells.items():
    groups[value].append(cell)
  return groups


def _rows(cells: Sequence[tables.Cell]) -> str:
  return ', '.join(dict.fromkeys(cell.row for cell in cells))


def _names(cells: Sequence[tables.Cell]) -> str:
  """Returns rows with their settings and seeds, each row once."""
  by_row = collections.defaultdict(list)
  for cell in cells:
    by_row[cell.row].append(f'{cell.setting} {cell.seed}')
  return '; '.join(f'{row} ({", ".join(of)})' for row, of in by_row.items())
