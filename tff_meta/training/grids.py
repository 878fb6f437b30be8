"""Grids: one trained model, evaluated with every combination of settings.

A grid's file has a row for each combination that is done. Rows are added, never
taken away, so that a grid can be stopped, continued and made larger. A folder
of the same name has a table for each, with a line a client or group.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import csv
import fcntl
import hashlib
import io
import itertools
import json
import os
import pathlib
from typing import Any, NamedTuple

from tff_meta import escapes
from tff_meta import plain_files
from tff_meta import registry
from tff_meta.training import atomic_files
from tff_meta.training import grid_axes
from tff_meta.training import hyperparameters
from tff_meta.training import run_config

_LEAST = {
    grid_axes.GROUP_ROUNDS: 1,
    'group_clients': 1,
    'way': 2,
    'eval_shots': 1,
}
# What decides a result and is no part of what a run and its continuation share.
_FIELDS = ('eval_groups', 'references', 'reference_hparams', 'nvar')
_OF_REFERENCES = (
    'accuracy_mean',
    'accuracy_half_width_95',
    'gain',
    'gain_half_width_95',
)
_SETTINGS, _CHECKSUM = 'settings', 'checksum'
_UNITS = 'units_sha256'
_MAX_BYTES = 64 * 2**20


class Combination(NamedTuple):
  """A point of a grid.

  Attributes:
    values: Axis -> value.
    config: The run's configuration with these.
  """

  values: Mapping[str, Any]
  config: run_config.RunConfig

  def __str__(self) -> str:
    return _shown(self.values)


def combinations(
    axes: Mapping[str, Sequence[str]], config: run_config.RunConfig
) -> list[Combination]:
  """Returns all combinations of the values; the last axis varies fastest.

  Args:
    axes: From `grid_axes.read_axes`.
    config: What is not on an axis.

  Raises:
    ValueError: If a value is impossible or comes twice, or a combination is
      impossible.
  """
  found = []
  for written in itertools.product(*axes.values()):
    point = dict(zip(axes, written, strict=True))
    try:
      found.append(_combination(point, config))
    except ValueError as error:
      raise ValueError(f'{error} That is of --grid, {_shown(point)}.') from None
  for axis, values in axes.items():
    if len({c.values[axis] for c in found}) < len(values):
      raise ValueError(
          f'Expected every value of the axis {axis} of --grid once, found'
          f' {",".join(values)}.'
      )
  return found


def _combination(
    point: Mapping[str, str], config: run_config.RunConfig
) -> Combination:
  """Returns what a point stands for, whose values are text."""
  for name, least in _LEAST.items():  # So that errors name the axis.
    if name in point:
      hyperparameters.whole_number(name, point[name], least)
  rounds = str(registry.get(config.algorithm).group_rounds_field)
  fields = {n: rounds if n == grid_axes.GROUP_ROUNDS else n for n in point}
  own = {n: v for n, v in point.items() if n in grid_axes.OWN_AXES}
  others = {fields[n]: v for n, v in point.items() if n not in own}
  changes = hyperparameters.parse(
      _assigned(own), grid_axes.OWN_AXES, of='--grid'
  )
  hparams = hyperparameters.override(config.hparams, _assigned(others))
  values = {
      n: changes[n] if n in own else getattr(hparams, fields[n]) for n in point
  }
  # A target of training, which is over, is none of what is tested.
  changes |= {'hparams': hparams, 'target_epsilon': None}
  return Combination(values, config.replace(**changes))


def _assigned(values: Mapping[str, str]) -> str:
  return ','.join(f'{name}={value}' for name, value in values.items())


def _shown(values: Mapping[str, Any]) -> str:
  return ', '.join(f'{name}={value}' for name, value in values.items())


def settings(
    protocol: str,
    config: run_config.RunConfig,
    rounds: int,
    identity: Mapping[str, Any],
) -> str:
  """Returns a digest of all that decides a result, but the code.

  Args:
    protocol: Name of the protocol.
    config: The configuration of the evaluation.
    rounds: Of training.
    identity: Of the run, see `run.identity`.
  """
  values = config.to_json()
  own = run_config.identity(values) | {n: values[n] for n in _FIELDS}
  everything = [protocol, rounds, dict(identity), own]
  text = json.dumps(everything, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def make_row(
    combination: Combination,
    rounds: int,
    summary: Mapping[str, Any],
    settings_digest: str,
    units: bytes,
) -> dict[str, str]:
  """Returns a row of a grid's file: column -> cell, those that are not empty.

  Args:
    combination: What was evaluated.
    rounds: Of training.
    summary: From `Evaluator.evaluate`. What it has of single numbers is kept.
    settings_digest: From `settings`.
    units: The table of clients or groups.
  """
  config = combination.config
  cells: dict[str, Any] = {
      **combination.values,
      'trained_rounds': rounds,
      'seed': config.seed,
      **{
          name: value
          for name, value in summary.items()
          if not isinstance(value, Mapping | list)
      },
      **{
          f'{row}/{name}': reference[name]
          for row, reference in summary['references'].items()
          for name in _OF_REFERENCES
      },
      _UNITS: hashlib.sha256(units).hexdigest(),
      _SETTINGS: settings_digest,
  }
  row = _text({n: v for n, v in cells.items() if v is not None})
  return row | {_CHECKSUM: _checksum(row)}


def with_values(
    row: Mapping[str, str], combination: Combination
) -> dict[str, str]:
  """Returns a row with all axes of a combination.

  Another grid, which had fewer, may have written it.

  Args:
    row: One with the settings of the combination.
    combination: What was evaluated.
  """
  return dict(row) | _text(combination.values)


def _text(cells: Mapping[str, Any]) -> dict[str, str]:
  return {name: str(escapes.csv_cell(v)) for name, v in cells.items()}


def _checksum(row: Mapping[str, str]) -> str:
  text = json.dumps(
      {n: v for n, v in row.items() if n != _CHECKSUM}, sort_keys=True
  )
  return hashlib.sha256(text.encode()).hexdigest()


def read_rows(path: pathlib.Path) -> dict[str, dict[str, str]]:
  """Returns the rows of a grid's file by their settings; none without a file.

  Raises:
    DamagedFileError: If it is not as it was written.
    OSError: If it cannot be read.
  """
  try:
    text = plain_files.read_bytes(path, _MAX_BYTES).decode()
    lines = list(csv.DictReader(io.StringIO(text, newline=''), strict=True))
  except FileNotFoundError:
    return {}
  except (csv.Error, UnicodeDecodeError):
    lines = [{}]
  found = {}
  for number, line in enumerate(lines, 1):
    row = {name: cell for name, cell in line.items() if cell}
    is_whole = all(isinstance(part, str) for part in (*row, *row.values()))
    if not is_whole or row.get(_CHECKSUM) != _checksum(row):
      raise plain_files.DamagedFileError(
          f'Expected {path} to be a grid as it was written, found another row'
          f' {number}. Tip: move it away, and it is made again.'
      )
    found[row[_SETTINGS]] = row
  return found


def units_file(path: pathlib.Path, row: Mapping[str, str]) -> pathlib.Path:
  """Returns where the clients or groups of a row of a grid's file are."""
  return path.with_suffix('') / f'{row[_SETTINGS][:16]}.csv'


def add_row(
    path: pathlib.Path,
    row: Mapping[str, str],
    axes: Sequence[str],
    units: bytes,
) -> None:
  """Adds a row to a grid's file, all others of which stay; atomically.

  Args:
    path: The file, which need not be there.
    row: From `make_row`.
    axes: The axes that the algorithm has.
    units: The table of clients or groups of the row, which is written first.

  Raises:
    OSError: As `read_rows`, or if it cannot be written.
  """
  file = units_file(path, row)
  plain_files.make_directory(file.parent)
  with _locked(path.parent):
    atomic_files.write_bytes(file, units)
    rows = read_rows(path) | {row[_SETTINGS]: dict(row)}
    atomic_files.write_bytes(path, _to_csv(rows.values(), axes))


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """Waits until no other process adds to a grid in a folder."""
  flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
  descriptor = os.open(folder / '.lock', flags, 0o666)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)


def _to_csv(rows: Collection[Mapping[str, str]], axes: Sequence[str]) -> bytes:
  names = dict.fromkeys(name for row in rows for name in row)
  ends = _UNITS, _SETTINGS, _CHECKSUM
  columns = [name for name in axes if name in names]
  columns += [n for n in names if n not in (*columns, *ends)]
  columns += [n for n in ends if n in names]  # Older rows have no units.
  text = io.StringIO()
  writer = csv.DictWriter(text, columns, '', lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue().encode()


def without_effect(
    axes: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, str]]
) -> list[str]:
  """Returns axes of several values that make no difference to any accuracy.

  Args:
    axes: From `grid_axes.read_axes`.
    rows: Those of all combinations.
  """
  idle = []
  for axis, values in axes.items():
    results: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for row in rows:
      others = tuple(row[name] for name in axes if name != axis)
      accuracies = row['accuracy_mean'], row['accuracy_micro']
      results.setdefault(others, set()).add(accuracies)
    if len(values) > 1 and all(len(found) == 1 for found in results.values()):
      idle.append(axis)
  return idle
