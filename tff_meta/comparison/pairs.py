"""How far one row of a table is from another, client by client.

A seed is the same draw of clients, or of groups, for all rows of a setting. For
every seed s that two rows have, and every client or group i, which both were
tested on with the same examples,

  d_i = number of the row - number of the other row,

and D_s = sum_i w_i d_i, where w_i is what the measure itself weights by:
1 / n_s, or for accuracy over all examples ("micro") the share of i's examples.
So D_s is the difference of the two numbers of summary.json, which is checked.
The difference is D = mean_s D_s, with two intervals that answer two questions.

* Over clients, within these trainings: were other clients of this kind tested
  with the models that were trained, would it be the same? The variance of D_s
  is that of a weighted mean, V_s = n_s / (n_s - 1) sum_i w_i^2 (d_i - D_s)^2,
  which is s^2 / n_s for equal weights; that of D, of S seeds, is
  V = sum_s V_s / S^2. D +- t sqrt(V) has Student's t with Welch's number of
  degrees of freedom, (sum_s V_s)^2 / sum_s (V_s^2 / f_s) with f_s = n_s - 1,
  which is n - 1 for one seed. Clients are taken as drawn independently, also
  those of different seeds, unless they are the data's own (`by_writer`), whose
  names are the same for all seeds: then V sums what each distinct client adds
  to D - mean in all seeds, squared, sum_u (sum_s v_su)^2 / S^2 with
  v_su = sqrt(n_s / (n_s - 1)) w_i (d_i - D_s) of client u in seed s, and the
  degrees of freedom are at most those of so many clients. Groups share their
  test classes, so that theirs is over groups of these classes. Clients of a
  group (`new_class_clients`) share its classes and are not independent: of each
  group i the weighted mean of its clients' differences counts, with the sum of
  their weights.
  A worst decile or a Gini coefficient is no mean over clients, but nearly one:
  instead of what client i has there is x_i of equal mean, what it is plus what
  i adds to it to first order (its influence). Of the worst k of n clients, with
  q the least of the others, x_i = q + (n / k) min(a_i - q, 0); k is at least
  MIN_WORST. Most of its variance is of these few, so the degrees of freedom
  are as if there were k clients, f_s = k - 1, a cautious rule of thumb. The
  Gini coefficient has x_i = h / 2m + (h_i - h) / m - h (a_i - m) / 2m^2, with m
  the mean, h_i the mean distance of a_i from all, and h the mean of the h_i.
  How often such intervals hold the truth is printed by
  `benchmarks/interval_coverage.py`.
  Where all differences are the same these clients say nothing of how far others
  would be: there is no such interval, but 0 to 0 for rows that are equal.
* Over seeds: were all of it done again, from the draw of clients on? That is
  Student's interval of the D_s, from two seeds on.

Sources: Student (1908), The probable error of a mean; Cochran (1977), Sampling
Techniques, section 6.4, for a mean whose weights are drawn with the clients;
Welch (1947), The generalization of "Student's" problem; Hampel (1974), The
influence curve and its role in robust estimation.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import pathlib
import re
import statistics
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from tff_meta.comparison import results
from tff_meta.comparison import run_records
from tff_meta.evaluation import client_metrics
from tff_meta.training import metric_writers
from tff_meta.training import protocol_names

_SECTIONS = {'evaluation': '', 'evaluation_best': '_best'}
_CURVE_END = 'curve_end'  # No column, but of several.
_HURT = 'hurt'  # As well.
_AFTER_AND_BEFORE = 'accuracy', 'accuracy_before'
_COLUMNS = {
    'accuracy_mean': 'accuracy',
    'accuracy_micro': 'accuracy',
    'accuracy_before_mean': 'accuracy_before',
    'accuracy_among_own_mean': 'accuracy_among_own',
    'curve_end_mean': _CURVE_END,
    'macro_f1_mean': 'macro_f1',
    'share_hurt': _HURT,
    'nll_mean': 'nll',
    'brier_mean': 'brier',
    'ece_mean': 'ece',
    'nll_before_mean': 'nll_before',
    'brier_before_mean': 'brier_before',
    'ece_before_mean': 'ece_before',
    'accuracy_worst_decile': 'accuracy',
    'accuracy_gini': 'accuracy',
    'accuracy_before_worst_decile': 'accuracy_before',
    'accuracy_before_gini': 'accuracy_before',
}
# Clients in a worst decile that has an interval over clients.
MIN_WORST = 4
_TESTED = ('clients', 'groups')
# What groups are besides their number, as fields of config.json.
_OF_GROUPS = ('way', 'group_clients', 'partition', 'partition_options')
_OWN_CLIENTS = 'by_writer'  # The partition that leaves clients as they are.
_ROUNDING = 1e-6  # In the unit of a measure.


class Spread(NamedTuple):
  """How the differences of a seed's clients or groups are spread.

  Attributes:
    num_units: How many clients or groups.
    variance: Of their weighted mean, in the squared unit of the measure.
    parts: Name of each -> what it adds to the weighted mean beyond the average,
      in the unit of the measure; the sum of their squares is the variance.
    is_of_worst: Whether that mean is a worst decile.
  """

  num_units: int
  variance: float
  parts: Mapping[str, float]
  is_of_worst: bool = False

  def degrees(self, num_units: int) -> int:
    """Returns the degrees of freedom of so many clients or groups."""
    if self.is_of_worst:
      return client_metrics.num_worst(num_units) - 1
    return num_units - 1


@dataclasses.dataclass(frozen=True)
class Pair:
  """How far a row is from another one; in the unit of the measure.

  Attributes:
    row: Name of the row.
    other: Name of the other.
    measure: Name of the measure.
    values: Seed that both have -> number of the row minus that of the other;
      empty if they have none in common.
    unit: What is tested, clients or groups.
    spreads: Seed -> spread over clients or groups, where these are the same.
    problems: Seed -> why there is none.
    in_percent: Whether that unit is a percentage point.
    is_same_by_name: Whether those of the same name in several seeds are one,
      as writers are.
  """

  row: str
  other: str
  measure: str
  values: Mapping[int, float]
  unit: str
  spreads: Mapping[int, Spread]
  problems: Mapping[int, str]
  in_percent: bool = True
  is_same_by_name: bool = False

  @property
  def mean(self) -> float:
    """The mean over seeds, NaN without any."""
    return statistics.fmean(self.values.values()) if self.values else math.nan

  @property
  def half_width_over_units(self) -> float | None:
    """Half of the 95 % interval over clients or groups.

    None if they are not known, or not the same, for every seed, or if all
    differences are the same and not 0.
    """
    if self.is_without_spread:
      return None if abs(self.mean) > _ROUNDING else 0.0
    found = self._error_over_units()
    if found is None:
      return None
    error, degrees = found
    return float(stats.t.ppf(0.975, degrees)) * error

  def p_value_over_units(self, margin: float = 0.0) -> float | None:
    """How likely a mean so far from the margin is, were it that of all clients.

    Two-sided, of the same distribution as the interval: below 0.05 exactly
    where the interval leaves the margin out.

    Args:
      margin: In the unit of the measure.

    Returns:
      From 0 to 1; None where there is no interval, or no spread.
    """
    found = self._error_over_units()
    if found is None or self.is_without_spread:
      return None
    error, degrees = found
    return float(2 * stats.t.sf(abs(self.mean - margin) / error, degrees))

  @property
  def is_without_spread(self) -> bool:
    """Whether all differences of a seed are the same, but for rounding.

    That few of them agree is no sign that others would.
    """
    found = self._error_over_units()
    return found is not None and found[0] <= _ROUNDING

  def _error_over_units(self) -> tuple[float, float] | None:
    """Returns the standard error, and the degrees of freedom of Student's t."""
    spreads = [self.spreads.get(seed) for seed in self.values]
    found = [spread for spread in spreads if spread is not None]
    if not found or len(found) < len(spreads):
      return None
    total = sum(spread.variance for spread in found)
    if not total:  # As `is_without_spread` says.
      return 0.0, math.inf
    degrees = total**2 / sum(
        s.variance**2 / s.degrees(s.num_units) for s in found
    )
    if self.is_same_by_name:
      of_all_seeds = _sums_by_name(found)
      total = math.fsum(part**2 for part in of_all_seeds.values())
      degrees = min(degrees, found[0].degrees(len(of_all_seeds)))
    return math.sqrt(total) / len(found), degrees

  @property
  def half_width_over_seeds(self) -> float | None:
    """Half of the 95 % interval over seeds, None for one seed."""
    return results.half_width(list(self.values.values()))

  @property
  def num_same_sign(self) -> int:
    """How many seeds have a difference of the mean's sign."""
    return sum(value * self.mean > 0 for value in self.values.values())

  @property
  def num_units(self) -> int | None:
    """How many clients or groups there are over all seeds, None if unknown.

    Those of several seeds count once where they are the same.
    """
    if self._error_over_units() is None:
      return None
    found = [self.spreads[seed] for seed in self.values]
    if self.is_same_by_name:
      return len(_sums_by_name(found))
    return sum(spread.num_units for spread in found)

  @property
  def has_interval(self) -> bool:
    """Whether there is any."""
    return len(self.values) > 1 or bool(self.spreads)

  def to_json(self) -> dict[str, Any]:
    """Returns all of it for a JSON file."""
    return {
        'row': self.row,
        'other': self.other,
        'measure': self.measure,
        'mean': self.mean if self.values else None,
        'unit': self.unit,
        'num_units': self.num_units,
        'half_width_95_over_units': self.half_width_over_units,
        'half_width_95_over_seeds': self.half_width_over_seeds,
        'num_same_sign': self.num_same_sign,
        'values': {str(seed): value for seed, value in self.values.items()},
        'problems': {str(seed): why for seed, why in self.problems.items()},
    }


def pair(entry: results.Entry, other: results.Entry) -> Pair | None:
  """Returns how far a row is from another in a measure.

  Args:
    entry: Of the row.
    other: Of the other row, and of the same measure.

  Returns:
    None if they have no seed in common.

  Raises:
    OSError: If a table of clients or groups cannot be read.
    DamagedFileError: If it is not what its run wrote.
  """
  found = _pair(entry, other)
  return found if found.values else None


def _pair(entry: results.Entry, other: results.Entry) -> Pair:
  """Returns the same, also if they have no seed in common."""
  shared = [seed for seed in entry.values if seed in other.values]
  spreads, problems = {}, {}
  of_groups = 'groups', protocol_names.NEW_CLASS_CLIENTS
  unit = 'groups' if any(n in entry.path for n in of_groups) else 'clients'
  for seed in shared:
    try:
      mine, others = (_read_units(e, seed) for e in (entry, other))
      unit = mine.unit
      _check_same_data(entry.runs[seed], other.runs[seed])
      _check_same(mine, others)
      difference = entry.values[seed] - other.values[seed]
      spreads[seed] = _spread(mine, others, difference)
    except _UnpairedError as error:
      problems[seed] = str(error)
  return Pair(
      entry.row,
      other.row,
      entry.measure,
      {seed: entry.values[seed] - other.values[seed] for seed in shared},
      unit,
      spreads,
      problems,
      entry.in_percent,
      all(_has_own_clients(entry.runs[seed]) for seed in shared),
  )


def with_reference(
    entries: Sequence[results.Entry], reference: str
) -> list[Pair]:
  """Returns how far all other rows are from one.

  Args:
    entries: Of one measure in one setting.
    reference: Name of the row that the others are compared with; if it has no
      number here, the first one that has.

  Returns:
    In their order, all that have a number: one that cannot be compared says
    why. None where no single client or group has such a number and no row has
    an interval over seeds.
  """
  with_numbers = [entry for entry in entries if entry.values]
  named = [entry for entry in with_numbers if entry.row == reference]
  first = next(iter(named or with_numbers), None)
  pairs = [_pair(e, first) for e in with_numbers if first and e is not first]
  is_of_units = first is not None and not _why_not_of_units(first.path)
  return pairs if is_of_units or any(p.has_interval for p in pairs) else []


class _UnpairedError(ValueError):
  """Clients or groups cannot be paired; the message says why."""


class _Units(NamedTuple):
  """What a run measured of every client or group.

  Attributes:
    unit: What differences are spread over.
    num_examples: Name -> number of test examples.
    num_support: Name -> number of examples to train on.
    values: In the unit of the measure, in the same order.
    weights: Of the measure, of sum 1.
    group_of: The groups that clients belong to, in the same order; None if
      what was tested is what differences are spread over.
    groups: What groups are, None without any.
    is_of_worst: Whether the values are of a worst decile.
  """

  unit: str
  num_examples: dict[str, float]
  num_support: dict[str, float | None]
  values: np.ndarray
  weights: np.ndarray
  group_of: list[str] | None
  groups: dict[str, object] | None
  is_of_worst: bool


def _read_units(entry: results.Entry, seed: int) -> _Units:
  """Reads what makes up an entry's number of a seed."""
  why_not = _why_not_of_units(entry.path)
  if why_not:
    raise _UnpairedError(why_not)
  section, protocol, number = _parts(entry.path)
  column = _column(number)
  run = entry.runs[seed]
  for tested in _TESTED:
    name = f'{tested}_{protocol}{_SECTIONS[section]}.csv'
    sha256 = results.read_sha256(run, name)
    if sha256 or (run / name).exists():  # One that is lost is an error.
      rows = metric_writers.read_units(run / name, sha256)
      break
  else:
    raise _UnpairedError(f'{entry.row} has no table of them')
  values = np.array([_value(row, column) for row in rows.values()])
  examples = [row.get('num_examples', math.nan) for row in rows.values()]
  support = [row.get('num_support') for row in rows.values()]
  weights = np.array(examples if number == 'accuracy_micro' else values * 0 + 1)
  if not np.isfinite([*values, *weights, *examples]).all():
    raise _UnpairedError(f'{name} of {entry.row} lacks numbers')
  is_of_worst = number.endswith('_worst_decile')
  if is_of_worst:
    values = influences_on_worst_decile(values)
  elif number.endswith('_gini'):
    values = influences_on_gini(values)
  unit, group_of = tested, None
  if protocol == protocol_names.NEW_CLASS_CLIENTS:
    unit, group_of = 'groups', [_group_of(client) for client in rows]
  return _Units(
      unit,
      dict(zip(rows, examples, strict=True)),
      dict(zip(rows, support, strict=True)),
      entry.factor * values,
      weights / np.sum(weights),
      group_of,
      _groups(run) if unit == 'groups' else None,
      is_of_worst,
  )


def _parts(path: str) -> tuple[str, str, str]:
  """Returns section, protocol and number of a path, empty where it ends."""
  section, protocol, number = (*path.split('/', 2), '', '')[:3]
  return section, protocol, number


def _why_not_of_units(path: str) -> str:
  """Returns why clients or groups have no such number, empty if they have."""
  section, _, number = _parts(path)
  if section not in _SECTIONS or not _column(number):
    return 'numbers of single clients are not kept'
  return ''


def _group_of(client: str) -> str:
  """Returns the group of a client that `clients.new_class_tasks` has named."""
  found = re.fullmatch(r'(group_\d+)_client_\d+', client)
  if not found:
    raise _UnpairedError(f'{client} is no client of a group')
  return found[1]


def _column(number: str) -> str:
  """Returns the column that a number is the mean of, empty if of none."""
  step = re.fullmatch(r'curve/(\d+)', number)
  if step:
    return f'accuracy_after_{step[1]}_steps'
  return _COLUMNS.get(number, '')


def _value(row: Mapping[str, float], column: str) -> float:
  """Returns the value of a client or group, NaN if it has none."""
  if column == _HURT:
    after, before = (row.get(n, math.nan) for n in _AFTER_AND_BEFORE)
    gained = after - before
    return gained if math.isnan(gained) else float(gained < 0)
  if column != _CURVE_END:
    return row.get(column, math.nan)
  # The mean of a curve's last three points, as `client_metrics` has it.
  points = [v for name, v in row.items() if name.startswith('accuracy_after_')]
  return statistics.fmean(points[-3:]) if points else math.nan


def influences_on_worst_decile(values: np.ndarray) -> np.ndarray:
  """Returns numbers of clients, float [n], whose mean is the worst decile."""
  num_worst = client_metrics.num_worst(len(values))
  # The least of the others, if there are any.
  others = np.sort(values)[min(num_worst, len(values) - 1)]
  return others + len(values) / num_worst * np.minimum(values - others, 0)


def influences_on_gini(values: np.ndarray) -> np.ndarray:
  """Returns numbers of clients, float [n], whose mean is the coefficient."""
  mean = values.mean()
  if not mean:
    return values  # It is 0, whatever they are.
  apart = np.abs(values[:, np.newaxis] - values).mean(1)
  of_all = apart.mean()
  return (
      of_all / (2 * mean)
      + (apart - of_all) / mean
      - of_all * (values - mean) / (2 * mean**2)
  )


def _groups(run: pathlib.Path) -> dict[str, object]:
  """Returns what a run's groups are, as its config.json has it."""
  config = results.read_json(run / 'config.json').get('config')
  config = run_records.as_of_now(config) if isinstance(config, Mapping) else {}
  return {name: config.get(name) for name in _OF_GROUPS}


def _check_same_data(run: pathlib.Path, other: pathlib.Path) -> None:
  """Raises if two runs are known to have had other data."""
  records = (results.read_json(r / 'config.json') for r in (run, other))
  if run_records.same_data(map(run_records.fingerprint, records)) is False:
    raise _UnpairedError('the data are others')


def _check_same(mine: _Units, other: _Units) -> None:
  """Raises if two runs did not test the same clients or groups alike."""
  if mine.num_examples.keys() != other.num_examples.keys():
    raise _UnpairedError(f'the {mine.unit} are others')
  if mine.groups != other.groups:
    raise _UnpairedError('the groups are drawn otherwise')
  if mine.num_examples != other.num_examples:
    raise _UnpairedError(f'the {mine.unit} have other numbers of test examples')
  if mine.num_support != other.num_support:
    raise _UnpairedError(
        f'the {mine.unit} have other numbers of examples to train on'
    )


def _has_own_clients(run: pathlib.Path) -> bool:
  """Returns whether a run's clients are the data's own, named by them."""
  config = results.read_json(run / 'config.json').get('config')
  return isinstance(config, Mapping) and config.get('partition') == _OWN_CLIENTS


def _sums_by_name(spreads: Sequence[Spread]) -> dict[str, float]:
  """Returns what each client or group adds in all seeds."""
  sums: dict[str, float] = {}
  for spread in spreads:
    for name, part in spread.parts.items():
      sums[name] = sums.get(name, 0.0) + part
  return sums


def _spread(mine: _Units, other: _Units, difference: float) -> Spread:
  """Returns the spread of paired differences, see the head of this file."""
  place = {name: i for i, name in enumerate(other.num_examples)}
  order = [place[name] for name in mine.num_examples]
  d, w = mine.values - other.values[order], mine.weights
  mean = float(np.sum(w * d))
  if abs(mean - difference) > _ROUNDING:
    raise _UnpairedError(
        f'the mean over {mine.unit} is {mean:+.4f}, that of the summaries'
        f' {difference:+.4f}'
    )
  names = list(mine.num_examples)
  if mine.group_of:
    groups, places = np.unique(mine.group_of, return_inverse=True)
    names = groups.tolist()
    of_groups = np.bincount(places, w)
    w, d = of_groups, np.bincount(places, w * d) / of_groups
  n = len(d)
  if n < 2:
    raise _UnpairedError(f'of {mine.unit} there is only one')
  if mine.is_of_worst and client_metrics.num_worst(n) < MIN_WORST:
    raise _UnpairedError(f'fewer than {MIN_WORST} in the worst decile')
  return spread_of(names, w, d, mean, mine.is_of_worst)


def spread_of(
    names: Sequence[str],
    weights: np.ndarray,
    d: np.ndarray,
    mean: float,
    is_of_worst: bool = False,
) -> Spread:
  """Returns the spread of differences of a seed, see the head of this file.

  Args:
    names: Of clients or groups, at least two.
    weights: Of sum 1.
    d: The differences, in the unit of the measure, in the same order.
    mean: Their weighted mean.
    is_of_worst: Whether it is a worst decile, of at least `MIN_WORST`.
  """
  scale = len(d) / (len(d) - 1)
  parts = math.sqrt(scale) * weights * (d - mean)
  return Spread(
      len(d),
      scale * float(np.sum(weights**2 * (d - mean) ** 2)),
      dict(zip(names, parts.tolist(), strict=True)),
      is_of_worst,
  )
