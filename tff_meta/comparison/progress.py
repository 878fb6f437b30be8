"""How fast accuracy grows: rounds, seconds and bytes to a target, and areas.

All of it is read off evaluations on the way in metrics.csv, in the same way for
all rows of a setting. Between two evaluations nothing is guessed: a target is
reached in the first evaluated round that has it, or it is not reached. Whose
accuracy it is follows from the setting, see `on_the_way`. Rows that were
measured on other clients or groups than most, by `--validation_clients` or
`--validation_groups`, are left out; how often rows were evaluated may differ,
and stands beside them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
import pathlib
import statistics
from typing import Any, NamedTuple

import numpy as np

from tff_meta.comparison import on_the_way
from tff_meta.comparison import results
from tff_meta.comparison import tables
from tff_meta.training import metric_writers
from tff_meta.training import protocol_names
from tff_meta.training import sealed_json

# Of the best row's last accuracy; the costs in tables are to one of them.
FRACTIONS = (0.5, 0.75, 0.9, 0.95)
_COSTS_TO = 0.9
# Beside a comparison's runs: what clients send where old runs do not say it.
TRAFFIC_FILE = 'traffic.json'
_NONE = '–'
TITLE = 'How fast accuracy grows'
WHAT_IT_IS = (
    'A target is reached in the first evaluated round that has it, be it by'
    ' chance; of the rounds since the evaluation before nothing is known, and'
    ' "≤" says that there was none before. A mean stands where every seed'
    ' reaches it, in parentheses stand the seeds.',
    'Seconds are those of the rounds on the host that simulated them, all'
    ' clients and the server, without evaluations: the rounds times their'
    ' median where single ones are not kept. They are not those of a device,'
    ' and runs had other machines and other load.',
    'MB (10^6 bytes) are what all clients of these rounds are sent and send,'
    " read off TFF's types.",
    'The area is that under the line through all evaluations, divided by the'
    ' rounds from the first to the last: a mean accuracy, to be compared'
    ' between equal spans of rounds.',
)


class Sent(NamedTuple):
  """What travels between the server and clients.

  Attributes:
    down: Bytes that they are sent; None if unknown.
    up: Bytes that they send; None if unknown.
  """

  down: int | None = None
  up: int | None = None

  def times(self, count: int) -> 'Sent':
    """Returns what travels in so many rounds, or of so many clients."""
    return Sent(*(n if n is None else n * count for n in self))


@dataclasses.dataclass(frozen=True)
class Course:
  """The evaluations on the way of a run.

  Attributes:
    seed: Of the run.
    rounds: Those with an evaluation, two at least.
    accuracies: Shares, one a round of `rounds`.
    seconds: Round of `rounds` -> seconds of all rounds so far; None if unknown.
    sent: Round of `rounds` -> what travelled in all rounds so far.
    signals: Column of `on_the_way.SIGNALS` -> round of `rounds` -> its number,
      of what the run has measured.
  """

  seed: int
  rounds: Sequence[int]
  accuracies: Sequence[float]
  seconds: Mapping[int, float] | None
  sent: Mapping[int, Sent]
  signals: Mapping[str, Mapping[int, float]]

  def reached(self, target: float) -> int | None:
    """Returns the first evaluated round with an accuracy, None if none has."""
    pairs = zip(self.rounds, self.accuracies, strict=True)
    return next((r for r, accuracy in pairs if accuracy >= target), None)

  def is_at_once(self, target: float) -> bool:
    """Returns whether an accuracy may have been reached in earlier rounds."""
    return self.reached(target) == self.rounds[0] > 1

  def area(self) -> float:
    """Returns the area under the curve, divided by its rounds."""
    span = self.rounds[-1] - self.rounds[0]
    return float(np.trapz(self.accuracies, self.rounds)) / span

  def cost(self, target: float) -> dict[str, float | None]:
    """Returns rounds, seconds and bytes to an accuracy; None where unknown."""
    round_num = self.reached(target)
    if round_num is None:
      return dict.fromkeys(('rounds', 'seconds', 'bytes_down', 'bytes_up'))
    sent = self.sent[round_num]
    return {
        'rounds': round_num,
        'seconds': None if self.seconds is None else self.seconds[round_num],
        'bytes_down': sent.down,
        'bytes_up': sent.up,
    }


class Progress(NamedTuple):
  """How fast the rows of a setting are.

  Attributes:
    best: Row with the best last accuracy, the mean over its seeds.
    final: That accuracy, a share, of which targets are fractions.
    rows: Row -> the courses of its runs.
    left_out: Row -> why it, or some seeds of it, have none.
    column: Of metrics.csv, where all accuracies are from.
    attention: A sentence if the setting is about another one.
  """

  best: str
  final: float
  rows: Mapping[str, Sequence[Course]]
  left_out: Mapping[str, str]
  column: str
  attention: str

  def targets(self) -> dict[float, float]:
    """Returns fraction -> accuracy."""
    return {fraction: fraction * self.final for fraction in FRACTIONS}

  def sentence(self) -> str:
    """Returns what targets are, and which rows are left out."""
    shares = ', '.join(f'{100 * fraction:g}' for fraction in FRACTIONS)
    without = '; '.join(f'{row}: {why}' for row, why in self.left_out.items())
    return (
        f'Targets are {shares} % of {100 * self.final:.2f} %, the last'
        f' evaluation of {self.best}, the best of all rows here ({self.column}'
        f' in metrics.csv).{f" Left out: {without}." if without else ""}'
        f'{f" {self.attention}" if self.attention else ""}'
    )

  def grid(self) -> list[list[str]]:
    """Returns the table as text, its header first."""
    targets = self.targets()
    at = f'{100 * targets[_COSTS_TO]:.1f} %'
    header = ['Method']
    header += [f'rounds to {100 * t:.1f} %' for t in targets.values()]
    header += ['area, %', 'of rounds']
    header += [f'seconds to {at}', f'MB down to {at}', f'MB up to {at}']
    return [header, *(list(self._line(*item)) for item in self.rows.items())]

  def _line(self, row: str, courses: Sequence[Course]) -> Iterator[str]:
    targets = self.targets()
    yield row
    for target in targets.values():
      yield _rounds(courses, target)
    yield f'{100 * statistics.fmean(course.area() for course in courses):.2f}'
    spans = (f'{c.rounds[0]} to {c.rounds[-1]}' for c in courses)
    yield ', '.join(dict.fromkeys(spans))
    target = targets[_COSTS_TO]
    most = '≤ ' * any(course.is_at_once(target) for course in courses)
    for name, unit in (('seconds', 1), ('bytes_down', 1e6), ('bytes_up', 1e6)):
      found = [course.cost(target)[name] for course in courses]
      known = [value / unit for value in found if value is not None]
      is_whole = len(known) == len(found)
      yield f'{most}{_cost(statistics.fmean(known))}' if is_whole else _NONE

  def signals(self) -> dict[str, list[list[str]]]:
    """Returns tables of what rounds measured beside accuracy.

    Returns:
      What it is -> the table as text, its header first: means over seeds, of
      rows in which it is not always 0, as where a method has no such thing.
    """
    found = {}
    for column, _, meaning in on_the_way.SIGNALS:
      shown = self._shown_rounds(column)
      body = []
      for row, courses in self.rows.items():
        seeds = [course.signals.get(column, {}) for course in courses]
        if any(any(seed.values()) for seed in seeds):
          cells = ([s[r] for s in seeds if r in s] for r in shown)
          body.append(
              [
                  row,
                  *(
                      f'{statistics.fmean(c):.3g}' if c else _NONE
                      for c in cells
                  ),
              ]
          )
      if body:
        header = ['Method', *(f'round {r:,}' for r in shown)]
        found[
            f'{meaning}, as {column} in metrics.csv, in these rounds alone:'
            ' means over the seeds that have measured it.'
        ] = [header, *body]
    return found

  def _shown_rounds(self, column: str) -> list[int]:
    """Returns up to five rounds with a number, from the first to the last."""
    courses = [course for row in self.rows.values() for course in row]
    rounds = sorted({r for c in courses for r in c.signals.get(column, {})})
    places = np.linspace(0, len(rounds) - 1, min(5, len(rounds))).round()
    return [rounds[int(i)] for i in places]

  def to_json(self) -> dict[str, Any]:
    """Returns every number of every seed."""
    shown = {s.column: self._shown_rounds(s.column) for s in on_the_way.SIGNALS}
    return {
        'best': self.best,
        'final': self.final,
        'column': self.column,
        'left_out': dict(self.left_out),
        'rows': {
            row: {
                str(course.seed): {
                    'area': course.area(),
                    'span': [course.rounds[0], course.rounds[-1]],
                    'to': {
                        str(fraction): course.cost(target)
                        for fraction, target in self.targets().items()
                    },
                    **{
                        column: {
                            str(r): of[r] for r in shown[column] if r in of
                        }
                        for column, of in course.signals.items()
                        if any(of.values())
                    },
                }
                for course in courses
            }
            for row, courses in self.rows.items()
        },
    }


def _cost(value: float) -> str:
  """Returns seconds or MB: whole numbers, or of small ones three digits."""
  return f'{value:,.0f}' if value >= 10 else f'{value:.3g}'


def _rounds(courses: Sequence[Course], target: float) -> str:
  """Returns the rounds to a target as text: their mean, and every seed."""
  found = [course.reached(target) for course in courses]
  at_once = [course.is_at_once(target) for course in courses]
  known = [r for r in found if r is not None]
  if not known:
    return 'not reached'
  seeds = ', '.join(
      _NONE if r is None else f'{"≤ " * first}{r:,}'
      for r, first in zip(found, at_once, strict=True)
  )
  if len(known) < len(found):
    return f'not reached by {len(found) - len(known)} of {len(found)} ({seeds})'
  mean = f'{"≤ " * any(at_once)}{statistics.fmean(known):,.0f}'
  return mean if len(set(known)) == 1 else f'{mean} ({seeds})'


def of_runs(
    runs: Mapping[str, Sequence[pathlib.Path]],
    setting: tables.Setting,
    sent: Callable[[str], Sent] = lambda row: Sent(),
) -> Progress | None:
  """Returns how fast the rows of a setting are, None without any curve.

  Args:
    runs: Row -> directories of its finished runs, one a seed.
    setting: The setting, which says whose accuracy counts. Where no run has
      measured that, it is that of whoever was measured.
    sent: What travels in a round of a row, of all clients, where its runs do
      not say it.
  """
  metrics = {
      row: list(map(results.read_metrics, paths)) for row, paths in runs.items()
  }
  found = [n for of_row in metrics.values() for m in of_row for n in m or ()]
  for column in on_the_way.columns(setting, found):
    rows: dict[str, list[Course]] = {}
    left_out, measured = {}, {}
    for row, paths in runs.items():
      courses, without = {}, {}
      for path, of_run in zip(paths, metrics[row], strict=True):
        try:
          courses[path] = _course(path, of_run, column, sent(row))
        except _NoCourseError as why:
          without[path] = str(why)
      if courses:
        rows[row], measured[row] = list(courses.values()), list(courses)
      if without:
        left_out[row] = _why_without(without, bool(courses))
    others = _of_others(measured, column)
    rows = {row: found for row, found in rows.items() if row not in others}
    left_out |= others
    if rows:
      finals = {
          row: statistics.fmean(course.accuracies[-1] for course in courses)
          for row, courses in rows.items()
      }
      best = max(finals, key=lambda row: finals[row])
      attention = on_the_way.attention(setting, column)
      return Progress(best, finals[best], rows, left_out, column, attention)
  return None


def _why_without(without: Mapping[pathlib.Path, str], is_in_part: bool) -> str:
  """Returns why runs of a row have no course, and of which seeds in part."""
  if not is_in_part:
    return next(iter(without.values()))
  return ', '.join(
      f'{why} with seed {_seed(run)}' for run, why in without.items()
  )


def _of_others(runs, column) -> dict[str, str]:
  """Returns the rows measured on others than most, each with whom."""
  is_of_groups = (
      'groups' in column or protocol_names.NEW_CLASS_CLIENTS in column
  )
  field = 'validation_groups' if is_of_groups else 'validation_clients'

  def number(config):
    if is_of_groups:
      return str(config.get(field) or 'unknown')
    few, known = config.get(field), config.get('num_clients')
    return str(few) if few and not (known and few >= known) else 'all'

  found = {
      row: ' and '.join(dict.fromkeys(number(_config(path)) for path in paths))
      for row, paths in runs.items()
  }
  numbers = list(found.values())
  most = max(numbers, key=numbers.count, default='')  # Of equal ones the first.
  return {
      row: f'{field} is {of_row}, not {most}'
      for row, of_row in found.items()
      if of_row != most
  }


class _NoCourseError(Exception):
  """A run has no evaluations on the way that say how fast it was."""


def _course(
    run: pathlib.Path,
    metrics: Mapping[str, Sequence[float]] | None,
    column: str,
    sent: Sent,
) -> Course:
  """Returns a run's course, of a column of what its metrics.csv has."""
  if metrics is None:
    raise _NoCourseError('no curve was kept')
  if column not in metrics:
    raise _NoCourseError(f'{column} was not measured on the way')
  pairs = zip(metrics['round'], metrics[column], strict=True)
  found = {int(r): value for r, value in pairs if not math.isnan(value)}
  if len(found) < 2:
    raise _NoCourseError('evaluated once' if found else 'never evaluated')
  rounds = list(found)
  if rounds[0] > rounds[-1] / 2:
    raise _NoCourseError(f'no evaluation before round {rounds[0]:,} was kept')
  summary = results.read_json(run / 'summary.json')
  return Course(
      _seed(run),
      rounds,
      list(found.values()),
      _seconds(run, summary, rounds),
      _sent(metrics, rounds, sent, _is_everybody_there(run)),
      _signals(metrics, found),
  )


def _seed(run: pathlib.Path) -> int:
  return int(tables.read(results.read_json(run / 'summary.json'), 'seed') or 0)


def _signals(metrics, rounds) -> dict[str, dict[int, float]]:
  """Returns column -> round, of some rounds -> what was measured there."""
  return {
      signal.column: {
          int(r): value
          for r, value in zip(
              metrics['round'], metrics[signal.column], strict=True
          )
          if int(r) in rounds and not math.isnan(value)
      }
      for signal in on_the_way.SIGNALS
      if signal.column in metrics
  }


def _seconds(run, summary, rounds) -> dict[int, float] | None:
  """Returns round -> seconds so far: of timings.csv, or by their median."""
  try:
    of_round = metric_writers.read_seconds(run / 'timings.csv')
  except FileNotFoundError:
    of_round = {}
  if all(r in of_round for r in range(1, rounds[-1] + 1)):
    total = np.cumsum([of_round[r] for r in range(1, rounds[-1] + 1)])
    return {r: float(total[r - 1]) for r in rounds}
  median = tables.read(summary, 'seconds_per_round_median')
  return None if median is None else {r: median * r for r in rounds}


def _is_everybody_there(run: pathlib.Path) -> bool:
  """Whether no client of a run is absent or late, so that rounds are alike."""
  config = _config(run)
  return not (config.get('absent_clients') or config.get('late_clients'))


def _config(run: pathlib.Path) -> Mapping[str, Any]:
  """Returns a run's configuration as it was written, empty if unknown."""
  config = results.read_json(run / 'config.json').get('config')
  return config if isinstance(config, Mapping) else {}


def _sent(metrics, rounds, in_a_round: Sent, alike: bool) -> dict[int, Sent]:
  """Returns round -> what travelled so far: of metrics.csv, if it says so."""
  if not {metric_writers.BYTES_DOWN, metric_writers.BYTES_UP} & metrics.keys():
    return {r: in_a_round.times(r) for r in rounds}
  down = _bytes_so_far(metrics, metric_writers.BYTES_DOWN, alike)
  up = _bytes_so_far(metrics, metric_writers.BYTES_UP, alike)
  return {r: Sent(down(r), up(r)) for r in rounds}


def _bytes_so_far(metrics, column, alike) -> Callable[[int], int | None]:
  """Returns the sum over rounds; None if some lack one and are not alike."""
  values = metrics.get(column, [math.nan])
  if any(map(math.isnan, values)):
    return lambda round_num: None
  if alike and len(set(values)) == 1:
    return lambda round_num: int(values[0]) * round_num
  if list(metrics['round']) != list(range(1, len(values) + 1)):
    return lambda round_num: None
  return lambda round_num: int(sum(values[:round_num]))


def kept_traffic(root: pathlib.Path, setting: str) -> Callable[[str], Sent]:
  """Returns what travels in a round, of runs that do not say it themselves.

  Args:
    root: A comparison's directory, which may have a `traffic.json`: setting ->
      row -> `down` and `up` of one client, and `clients` of a round.
    setting: Name of the setting.

  Returns:
    Row -> what travels, of all clients of a round.
  """
  rows: Mapping[str, Mapping[str, Any]] = {}
  with contextlib.suppress(FileNotFoundError):
    rows = sealed_json.read(root / TRAFFIC_FILE).get(setting, {})

  def sent(row: str) -> Sent:
    if row not in rows:
      return Sent()
    found = rows[row]
    one = Sent(found['down'], found['up'])
    return one.times(found['clients'])

  return sent
