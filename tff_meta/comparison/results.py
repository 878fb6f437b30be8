"""What came out of the cells of a comparison, beside the published numbers."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
import pathlib
import statistics
from typing import Any

from scipy import stats

from tff_meta import plain_files
from tff_meta.comparison import run_records
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import metric_writers
from tff_meta.training import sealed_json


@dataclasses.dataclass(frozen=True)
class Entry:
  """A measure of a row in a setting, over seeds; numbers as they are shown.

  Attributes:
    row: Name of the row.
    setting: Name of the setting.
    measure: Name of the measure.
    published: What the paper prints, or None.
    values: Seed -> number, of finished cells only.
    spread: That of single runs where the paper prints one: the mean over seeds,
      or None.
    spread_name: What that spread is.
    states: Seed -> how its cell stands; empty if the row is not run here.
    problems: Seed -> why its cell failed, or why a finished one has no number.
    hours: Wall clock of all its cells; None if unknown.
    lower_is_better: Whether the least number is the best one.
    bytes_down: That a client is sent in a round of training, the same in all
      finished runs that say so; None without such.
    bytes_up: That a client sends in one.
    path: Where the measure is in summary.json.
    factor: Of what is there, see `tables.Measure`.
    runs: Seed -> directory of its run.
    diverged: Seeds with a number whose run has diverged, see `has_diverged`.
  """

  row: str
  setting: str
  measure: str
  published: tables.Published | None
  values: Mapping[int, float]
  spread: float | None
  spread_name: str
  states: Mapping[int, runner.State]
  problems: Mapping[int, str]
  hours: float | None
  lower_is_better: bool = False
  bytes_down: int | None = None
  bytes_up: int | None = None
  path: str = ''
  factor: float = tables.PERCENT
  # The same numbers are the same entry wherever they are.
  runs: Mapping[int, pathlib.Path] = dataclasses.field(
      default_factory=dict, compare=False, repr=False
  )
  diverged: Sequence[int] = ()

  @property
  def in_percent(self) -> bool:
    """Whether its numbers are percent, not what the measure's name says."""
    is_share = self.factor == tables.PERCENT
    return is_share and not self.measure.endswith(tables.TIMES_100)

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
    return half_width(list(self.values.values()))

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
    # Runs of earlier versions do not say so, and their tables stay as they are.
    traffic = {'bytes_down': self.bytes_down, 'bytes_up': self.bytes_up}
    return {
        'row': self.row,
        'setting': self.setting,
        'measure': self.measure,
        'mean': self.mean,
        'half_width_95': self.half_width,
        'std': self.std,
        'num_seeds': len(self.values),
        'values': {str(seed): value for seed, value in self.values.items()},
        'spread': self.spread,
        'spread_is': self.spread_name,
        'published': None if published is None else published.value,
        'published_spread': None if published is None else published.spread,
        'difference': self.difference,
        'missing': self.missing,
        'hours': self.hours,
        **{name: n for name, n in traffic.items() if n is not None},
        **({'diverged': list(self.diverged)} if self.diverged else {}),
    }


def half_width(values: Sequence[float]) -> float | None:
  """Returns half of a mean's 95 % interval, None for fewer than two values.

  Args:
    values: Of single seeds; Student's t is what their number asks for.
  """
  n = len(values)
  if n < 2:
    return None
  std = statistics.stdev(values)
  return float(stats.t.ppf(0.975, n - 1)) * std / math.sqrt(n)


def mean(entry: Entry) -> float | None:
  """Returns our number."""
  return entry.mean


def published(entry: Entry) -> float | None:
  """Returns the paper's number."""
  return None if entry.published is None else entry.published.value


def best(
    entries: Iterable[Entry], number: Callable[[Entry], float | None]
) -> list[Entry]:
  """Returns the entries of the best number, to two decimals; none without any.

  Of ours none is the best of which a run has diverged.

  Args:
    entries: Of one measure in one setting.
    number: `mean` or `published`.
  """
  found = [
      (-value if entry.lower_is_better else value, entry)
      for entry in entries
      for value in [number(entry)]
      if value is not None and not (number is mean and entry.diverged)
  ]
  top = max((round(value, 2) for value, _ in found), default=None)
  return [entry for value, entry in found if round(value, 2) == top]


def collect(
    root: pathlib.Path, table: tables.Table, cells: Sequence[tables.Cell]
) -> list[Entry]:
  """Reads what the cells have written, setting by setting and row by row.

  Args:
    root: The comparison's directory.
    table: The table.
    cells: Those that the comparison consists of.

  Returns:
    An entry for every measure of every row in every setting that `cells` has;
    rows that have no cell there are left out if they are not published.
  """
  used = {cell.setting for cell in cells}
  entries = []
  for setting in table.settings:
    if setting.name not in used:
      continue
    for row in table.rows:
      mine = [
          c for c in cells if (c.row, c.setting) == (row.name, setting.name)
      ]
      if mine or row.published.get(setting.name):
        entries += _of_cells(root, row, setting, mine)
  return entries


def _of_cells(root, row, setting, cells) -> list[Entry]:
  outcomes = {
      cell.seed: runner.CellFolder(root, cell).outcome() for cell in cells
  }
  summaries = {
      cell.seed: read_json(runner.CellFolder(root, cell).run / 'summary.json')
      for cell in cells
      if outcomes[cell.seed].state == 'finished'
  }
  hours = sum(o.seconds for o in outcomes.values()) / 3600
  runs = {cell.seed: runner.CellFolder(root, cell).run for cell in cells}
  return of_row(row, setting, outcomes, summaries, hours, runs)


def of_row(
    row: tables.Row,
    setting: tables.Setting,
    outcomes: Mapping[int, runner.Outcome],
    summaries: Mapping[int, Mapping[str, Any]],
    hours: float | None,
    runs: Mapping[int, pathlib.Path],
) -> list[Entry]:
  """Returns an entry for every measure of a row in a setting.

  Args:
    row: The row.
    setting: The setting.
    outcomes: Seed -> how its run stands.
    summaries: Seed -> summary.json of its finished run, empty if unreadable.
    hours: Wall clock of all of them; None if unknown.
    runs: Seed -> directory of its run.

  Raises:
    DamagedFileError: If a run's metrics are not as it wrote them.
    OSError: If they cannot be read.
  """
  published = row.published.get(setting.name, {})
  diverged = [s for s in summaries if summaries[s] and has_diverged(runs[s])]
  entries = []
  for measure in setting.measures:
    values, spreads, problems = {}, [], {}
    for seed, outcome in outcomes.items():
      if outcome.state != 'finished':
        problems[seed] = outcome.problem
        continue
      if not summaries[seed]:
        problems[seed] = 'its summary.json is missing or unreadable'
        continue
      value = tables.read(summaries[seed], measure.path)
      if value is None:
        problems[seed] = f'its summary.json has no {measure.path}'
        continue
      values[seed] = measure.factor * value
      if measure.spread_path is not None:
        spread = tables.read(summaries[seed], measure.spread_path)
        if spread is not None:
          spreads.append(measure.factor * spread)
    entries.append(
        Entry(
            row=row.name,
            setting=setting.name,
            measure=measure.name,
            published=published.get(measure.name),
            values=values,
            spread=statistics.fmean(spreads) if spreads else None,
            spread_name=measure.spread_name,
            states={seed: o.state for seed, o in outcomes.items()},
            problems=problems,
            hours=hours,
            lower_is_better=measure.lower_is_better,
            bytes_down=_bytes_a_round(summaries, 'down'),
            bytes_up=_bytes_a_round(summaries, 'up'),
            path=measure.path,
            factor=measure.factor,
            runs=runs,
            diverged=[seed for seed in values if seed in diverged],
        )
    )
  return entries


def _bytes_a_round(summaries, direction) -> int | None:
  """Returns what runs say of a client, None if they disagree or none does."""
  path = f'client_bytes_per_round/{direction}'
  read = (tables.read(summary, path) for summary in summaries.values())
  found = {int(value) for value in read if value is not None}
  return found.pop() if len(found) == 1 else None


def sentence(root: pathlib.Path, table: tables.Table, cell: tables.Cell) -> str:
  """Returns the first number of a finished cell, empty if it has none.

  Args:
    root: The comparison's directory.
    table: The table.
    cell: The cell.
  """
  measure = table.setting(cell.setting).measures[0]
  summary = read_json(runner.CellFolder(root, cell).run / 'summary.json')
  value = tables.read(summary, measure.path)
  return '' if value is None else f'with {100 * value:.2f} % ({measure.name})'


def is_complete(root: pathlib.Path, cell: tables.Cell) -> bool:
  """Returns whether a cell is finished and its `summary.json` can be read.

  Args:
    root: The comparison's directory.
    cell: The cell.

  Raises:
    runner.ComparisonError: If its `cell.json` is not one.
  """
  folder = runner.CellFolder(root, cell)
  finished = folder.outcome().state == 'finished'
  return finished and bool(read_json(folder.run / 'summary.json'))


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
  """Returns a JSON file of a finished cell; empty if it is not readable."""
  others = (path.with_name(n) for n in ('config.json', 'summary.json'))
  try:
    return sealed_json.read(path, *others)
  except OSError:
    return {}


def read_sha256(run: pathlib.Path, name: str) -> str:
  """Returns the checksum that a run's summary.json has of a table.

  Args:
    run: The run's directory.
    name: Name of the table's file.

  Returns:
    SHA-256, empty if the summary has none, as those of earlier versions.
  """
  files = read_json(run / 'summary.json').get('files')
  sha256 = files.get(name) if isinstance(files, Mapping) else None
  return sha256 if isinstance(sha256, str) else ''


def sha256_of_table(run: pathlib.Path, name: str) -> str | None:
  """Returns a table's checksum, empty if unknown; None if there is no table.

  One that is lost has a checksum, and so is an error when it is read.

  Args:
    run: The run's directory.
    name: Name of the table's file.
  """
  sha256 = read_sha256(run, name)
  return sha256 if sha256 or (run / name).exists() else None


def read_metrics(run: pathlib.Path) -> dict[str, list[float]] | None:
  """Returns the columns of a run's metrics.csv, None if it was not kept.

  Args:
    run: The run's directory.

  Returns:
    None, too, if its summary.json cannot be read, so that nothing says whether
    they are what the run wrote.

  Raises:
    DamagedFileError: If it is lost, or not as it was written.
    OSError: If it cannot be read.
  """
  if not read_json(run / 'summary.json'):
    return None
  path = run / 'metrics.csv'
  sha256 = sha256_of_table(run, path.name)
  if sha256 is None:
    return None
  if not path.exists():
    raise plain_files.DamagedFileError(
        f'Expected {path}, which the summary.json beside it names, found no'
        ' such file. Tip: what --keep copies has a summary.json of its own.'
    )
  columns = metric_writers.read_metrics(path, sha256)
  if not sha256:
    _check_last_round(path, columns)
  return columns


def _check_last_round(
    path: pathlib.Path, columns: Mapping[str, Sequence[float]]
) -> None:
  """Raises if a metrics.csv ends before the last evaluation of its run.

  The last evaluated round follows from the rounds that were done, which are
  fewer than the configuration's where patience has ended them. A kept copy has
  no rounds after it.

  Args:
    path: The file, beside the run's summary.json and config.json.
    columns: What it has.
  """
  summary = read_json(path.with_name('summary.json'))
  config = read_json(path.with_name('config.json'))
  rounds = int(tables.read(summary, 'rounds') or 0)
  every = int(tables.read(config, 'config/eval_every') or 0)
  expected = rounds - rounds % every if every else 0
  if expected < (tables.read(config, 'config/eval_from') or 0):
    return  # None was evaluated.
  last = int(max(columns.get('round', ()), default=0))
  if last < expected:
    patience = tables.read(summary, 'ended_by_patience')
    ended = f', ended by a patience of {patience:g}' if patience else ''
    raise plain_files.DamagedFileError(
        f'Expected {path} to go to round {expected}, the last one that was'
        f' evaluated (of {rounds} in summary.json{ended}; eval_every is'
        f' {every}), found {last} as its last round. Tip: put the whole file'
        ' back.'
    )


def has_diverged(run: pathlib.Path) -> bool:
  """Returns whether nobody had finite numbers in the last round of a run.

  Such a round changes nothing, so what is measured after it are the models of
  before. It may be one round only, but mostly there were others before it.

  The last round is the last one with an evaluation on the way, which is what a
  kept copy has of a run. Of a run without one nobody knows, nor of those that
  do not count such clients; so it is False.

  Args:
    run: The run's directory.

  Raises:
    DamagedFileError: If its metrics are not as it wrote them.
    OSError: If they cannot be read.
  """
  columns = read_metrics(run) or {}
  measured = [columns[name] for name in metric_writers.evaluations(columns)]
  rounds = zip(*measured, strict=True)
  evaluated = [i for i, of in enumerate(rounds) if not all(map(math.isnan, of))]
  names = metric_writers.TRAINED, metric_writers.NON_FINITE
  if not evaluated or not all(name in columns for name in names):
    return False
  trained, not_finite = (columns[name][evaluated[-1]] for name in names)
  if metric_writers.BAD_LABEL in columns:  # They are among the latter.
    not_finite -= columns[metric_writers.BAD_LABEL][evaluated[-1]]
  return trained == 0 < not_finite


def read_curve(run: pathlib.Path, section: str, protocol: str) -> list[float]:
  """Returns the accuracies after 0, 1, ... steps of adaptation; empty without.

  Args:
    run: The run's directory.
    section: Which part of its summary.json.
    protocol: Which evaluation there.
  """
  value: Any = read_json(run / 'summary.json')
  for key in (section, protocol, 'curve'):
    value = value.get(key) if isinstance(value, Mapping) else None
  curve = value if isinstance(value, list) else []
  is_one = all(type(v) in (int, float) and abs(v) <= 1 for v in curve)
  return curve if is_one else []  # A point less would shift the others.


def provenance(root: pathlib.Path, cells: Sequence[tables.Cell]) -> list[str]:
  """Returns sentences on what code and data the finished cells are of.

  Args:
    root: The comparison's directory.
    cells: Those that the comparison consists of.
  """
  commits: set[str] = set()
  data = collections.defaultdict(set)
  continued = []
  for cell in cells:
    folder = runner.CellFolder(root, cell)
    if folder.outcome().state == 'finished':
      config = read_json(folder.run / 'config.json')
      of_run = run_records.commits(config).values()
      commits.update(of_run)
      if len(of_run) > 1:
        continued.append(
            f'Attention: more than one version has made {cell.row} in'
            f' {cell.setting}, seed {cell.seed}: {run_records.code(config)}.'
        )
      if fingerprint := run_records.fingerprint(config):
        data[cell.setting, cell.seed].add(fingerprint)
  sentences = []
  if commits:
    sentences.append(f'Code of the runs: {", ".join(sorted(commits))}.')
  if len(commits) > 1:
    sentences.append(
        'Attention: the runs are of more than one version of the code.'
    )
  sentences += continued
  for (setting, seed), fingerprints in data.items():
    same = run_records.same_data(fingerprints)
    place = f'{setting}, seed {seed}'
    if same is None:
      sentences.append(
          f'Whether methods had the same data in {place} is not recorded:'
          ' fingerprints of before version 0.2.0 are of fewer examples.'
      )
    elif not same:
      sentences.append(f'Attention: methods had different data in {place}.')
  return sentences
