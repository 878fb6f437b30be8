"""What came out of the cells of a comparison, beside the published numbers."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import statistics
from typing import Any

from scipy import stats

from tff_meta.comparison import runner
from tff_meta.comparison import tables


@dataclasses.dataclass(frozen=True)
class Entry:
  """A measure of a row in a setting, over seeds; all numbers in percent.

  Attributes:
    row: Name of the row.
    setting: Name of the setting.
    measure: Name of the measure.
    published: What the paper prints, or None.
    values: Seed -> number, of finished cells only.
    client_std: Deviation over clients where the paper prints one: the mean over
      seeds, or None.
    states: Seed -> how its cell stands; empty if the row is not run here.
    problems: Seed -> why its cell failed, or why a finished one has no number.
    hours: Wall clock of all its cells.
  """

  row: str
  setting: str
  measure: str
  published: tables.Published | None
  values: Mapping[int, float]
  client_std: float | None
  states: Mapping[int, runner.State]
  problems: Mapping[int, str]
  hours: float

  @property
  def mean(self) -> float | None:
    """The mean over seeds, None without any."""
    return statistics.fmean(self.values.values()) if self.values else None

  @property
  def std(self) -> float | None:
    """The sample standard deviation over seeds, None for fewer than two."""
    if len(self.values) < 2:
      return None
    return statistics.stdev(self.values.values())

  @property
  def half_width(self) -> float | None:
    """Half of the 95 % interval of the mean over seeds (Student's t)."""
    if self.std is None:
      return None
    n = len(self.values)
    return float(stats.t.ppf(0.975, n - 1)) * self.std / math.sqrt(n)

  @property
  def difference(self) -> float | None:
    """Ours minus published, None if either is missing."""
    if self.mean is None or self.published is None:
      return None
    return self.mean - self.published.value

  @property
  def missing(self) -> str:
    """Says which seeds have no number and why; empty if all have one."""
    return '; '.join(
        f'seed {seed} {state}' + (f': {problem}' if problem else '')
        for seed, state in self.states.items()
        if seed not in self.values
        for problem in [self.problems.get(seed, '')]
    )

  def to_json(self) -> dict[str, Any]:
    """Returns all of it for a JSON file."""
    published = self.published
    return {
        'row': self.row,
        'setting': self.setting,
        'measure': self.measure,
        'mean': self.mean,
        'half_width_95': self.half_width,
        'std': self.std,
        'num_seeds': len(self.values),
        'values': {str(seed): value for seed, value in self.values.items()},
        'client_std': self.client_std,
        'published': None if published is None else published.value,
        'published_spread': None if published is None else published.spread,
        'difference': self.difference,
        'missing': self.missing,
        'hours': self.hours,
    }


def collect(
    root: pathlib.Path, table: tables.Table, cells: Sequence[tables.Cell]
) -> list[Entry]:
  """Reads what the cells have written, setting by setting and row by row.

  Args:
    root: The comparison's directory.
    table: The table.
    cells: Those that the comparison consists of.

  Returns:
    An entry for every measure of every row in every setting that `cells` has,
    and of rows that are published only.
  """
  used = list(dict.fromkeys(cell.setting for cell in cells))
  run = {cell.row for cell in cells}
  entries = []
  for setting in table.settings:
    if setting.name not in used:
      continue
    for row in table.rows:
      mine = [
          c for c in cells if (c.row, c.setting) == (row.name, setting.name)
      ]
      if mine or (row.settings == () and row.name not in run):
        entries += _entries(root, row, setting, mine)
  return entries


def _entries(root, row, setting, cells) -> list[Entry]:
  outcomes = {
      cell.seed: runner.CellFolder(root, cell).outcome() for cell in cells
  }
  summaries = {
      cell.seed: _summary(runner.CellFolder(root, cell))
      for cell in cells
      if outcomes[cell.seed].state == 'finished'
  }
  published = row.published.get(setting.name, {})
  entries = []
  for measure in setting.measures:
    values, deviations, problems = {}, [], {}
    for seed, outcome in outcomes.items():
      if outcome.state != 'finished':
        problems[seed] = outcome.problem
        continue
      value = tables.read(summaries[seed], measure.path)
      if value is None:
        problems[seed] = f'its summary.json has no {measure.path}'
        continue
      values[seed] = 100 * value
      if measure.std_path is not None:
        deviation = tables.read(summaries[seed], measure.std_path)
        if deviation is not None:
          deviations.append(100 * deviation)
    entries.append(
        Entry(
            row=row.name,
            setting=setting.name,
            measure=measure.name,
            published=published.get(measure.name),
            values=values,
            client_std=statistics.fmean(deviations) if deviations else None,
            states={seed: o.state for seed, o in outcomes.items()},
            problems=problems,
            hours=sum(o.seconds for o in outcomes.values()) / 3600,
        )
    )
  return entries


def _summary(folder: runner.CellFolder) -> Mapping[str, Any]:
  """Returns summary.json of a finished cell; empty if it is not readable."""
  try:
    return json.loads((folder.run / 'summary.json').read_text())
  except (OSError, ValueError):
    return {}
