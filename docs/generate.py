"""Writes the parts of the documentation that are made of other files.

  ./run python docs/generate.py

In README.md and the pages in docs, what stands between the comments
`<!-- generated: ... -->` and `<!-- end -->` is made of the runs that are kept
in `results`, or of the registry of algorithms. A test holds the pages to it.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import csv
import dataclasses
import functools
import json
import math
import pathlib
import re
import statistics
from typing import Any

import numpy as np

from binaries import experiments
from binaries.experiments import claims
from tff_meta import registry
from tff_meta.analyses import inversion
from tff_meta.comparison import cell_texts
from tff_meta.comparison import pairs
from tff_meta.comparison import progress
from tff_meta.comparison import results
from tff_meta.comparison import tables
from tff_meta.comparison import verdicts
from tff_meta.training import grids
from tff_meta.training import metric_writers

ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = ROOT / 'results'
_BLOCK = re.compile(
    r'(<!-- generated: (?P<what>.*?) -->\n).*?(<!-- end -->)', re.DOTALL
)
_NONE = '–'
_MARGIN = 'client_work/signal/margin'

_GRID = 'grid_new_clients.csv'

Entry = dict[str, Any]  # As `table.json` has them.
_Clients = dict[str, dict[str, float]]  # Client -> column -> number.


def pages() -> list[pathlib.Path]:
  """Returns README and the pages of the documentation."""
  return [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]


def regenerated(text: str) -> str:
  """Returns a page with its generated parts made again.

  Args:
    text: The page.

  Raises:
    ValueError: If a part asks for what there is not.
  """

  def block(match: re.Match[str]) -> str:
    kind, *arguments = (part.strip() for part in match['what'].split('|'))
    if kind not in _KINDS:
      raise ValueError(
          f'Expected a generated part of {", ".join(_KINDS)}, found {kind!r}.'
      )
    return f'{match[1]}\n{_KINDS[kind](*arguments)}\n\n{match[3]}'

  return _BLOCK.sub(block, text)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [header, ['---'] * len(header), *rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


@functools.cache
def _table_json(name: str) -> dict[str, Any]:
  return json.loads((_RESULTS / name / 'table.json').read_text())


def _entries(name: str, measure: str = '') -> list[Entry]:
  """Returns what has run of a kept table, of measures with this in the name."""
  found = [
      entry
      for entry in _table_json(name)['entries']
      if entry['mean'] is not None and measure in entry['measure']
  ]
  if not found:
    raise ValueError(f'Expected numbers of {name}, {measure!r}, found none.')
  return found


def _entry(name: str, setting: str, row: str, measure: str) -> Entry:
  """Returns one number."""
  (found,) = (
      e
      for e in _entries(name)
      if (e['setting'], e['row'], e['measure']) == (setting, row, measure)
  )
  return found


def _mean(entry: Entry) -> str:
  return f'{entry["mean"]:.2f}'


def _ours(entry: Entry) -> str:
  """Returns mean and spread: over seeds, or, with one, within the run."""
  spread = entry['spread']
  if entry['num_seeds'] > 1:
    spread = entry['half_width_95']
  elif entry['spread_is'] != '95 % over groups':
    spread = None
  return _mean(entry) + ('' if spread is None else f' ± {spread:.2f}')


def _seeds(entry: Entry) -> str:
  return ', '.join(f'{value:.2f}' for value in entry['values'].values())


def _published(entry: Entry) -> str:
  if entry['published'] is None:
    return _NONE
  spread = entry['published_spread']
  return f'{entry["published"]:g}' + (
      '' if spread is None else f' ± {spread:g}'
  )


def _difference(entry: Entry) -> str:
  if entry['difference'] is None:
    return _NONE
  return f'{entry["difference"]:+.2f}'


def _unique(entries: Sequence[Entry], key: str) -> list[str]:
  return list(dict.fromkeys(entry[key] for entry in entries))


def _table(name: str, measure: str = '') -> str:
  """A kept table, setting by setting: published, ours, and every seed.

  Args:
    name: Of the folder in `results`.
    measure: Only measures with this in their name.
  """
  entries = _entries(name, measure)
  several = max(entry['num_seeds'] for entry in entries) > 1
  parts = []
  for setting in _unique(entries, 'setting'):
    here = [e for e in entries if e['setting'] == setting]
    measures = _unique(here, 'measure')
    cells = {(e['row'], e['measure']): e for e in here}
    header, rows = ['Method'], {row: [row] for row in _unique(here, 'row')}
    for title in measures:
      column = title.removesuffix(f', {measure}')
      published = any(
          e['measure'] == title and e['published'] is not None for e in here
      )
      with_seeds = several and title == measures[0]
      header += [f'{column}: published'] if published else []
      header += [f'{column}: ours' if published else column]
      header += ['difference'] if published else []
      header += ['every seed'] if with_seeds else []
      for row, line in rows.items():
        cell = cells.get((row, title))
        shown = [_published] if published else []
        shown += [_ours]
        shown += [_difference] if published else []
        shown += [_seeds] if with_seeds else []
        line += [f(cell) if cell else _NONE for f in shown]
    parts += [f'**{setting}**', _markdown(header, list(rows.values()))]
  return '\n\n'.join(parts)


def _facts(name: str) -> str:
  """What a kept table is of, in the words of its report."""
  begins = ('Source', 'Scale', 'Finished', 'Seeds', 'Behind')
  lines = _table_json(name)['header']
  return '\n'.join(f'* {line}' for line in lines if line.startswith(begins))


def _notes(name: str) -> str:
  """What the definition of a table says of it."""
  return '\n'.join(f'* {note}' for note in experiments.get(name).notes)


def _across(name: str, measure: str, *rows: str) -> str:
  """One measure of a kept table: a line a method, a column a setting."""
  entries = [e for e in _entries(name) if e['measure'] == measure]
  settings = _unique(entries, 'setting')
  cells = {(e['row'], e['setting']): _mean(e) for e in entries}
  lines = [
      [row, *(cells.get((row, setting), _NONE) for setting in settings)]
      for row in rows or _unique(entries, 'row')
  ]
  return _markdown(['Method', *settings], lines)


def _changes(name: str, measure: str) -> str:
  """How far every row is in each setting from the same row in the first one.

  A seed is the same draw of clients in all settings, which each client is
  compared in with itself.
  """
  by_row: dict[str, list[results.Entry]] = {}
  for entry in _numbers(name):
    if entry.measure == measure and entry.values:
      by_row.setdefault(entry.row, []).append(entry)
  settings = list(
      dict.fromkeys(e.setting for of in by_row.values() for e in of)
  )
  lines = []
  for row, (first, *others) in by_row.items():
    assert [e.setting for e in (first, *others)] == settings, row
    found = [pairs.pair(entry, first) for entry in others]
    lines.append(
        [row]
        + [f'{p.mean:+.2f} ({cell_texts.over_units(p)})' for p in found if p]
    )
  return _markdown(['Method', *settings[1:]], lines)


def _method_of(candidate: str) -> str:
  """Returns the name of a row of a search without what is tried."""
  return ' '.join(word for word in candidate.split() if '=' not in word)


def _search(name: str) -> str:
  """What a search has found: a line a method, the best of its candidates.

  One that has diverged is not the best, whatever it has.

  Rows are called `METHOD NAME=VALUE NAME=VALUE`.

  Args:
    name: Of the folder in `results`, with one setting and one measure.
  """
  by_method: dict[str, list[tuple[dict[str, float], Entry]]] = {}
  num_candidates = collections.Counter(
      _method_of(row.name) for row in experiments.get(name).rows
  )
  for entry in _entries(name):
    words, method = entry['row'].split(), _method_of(entry['row'])
    values = (word.split('=') for word in words if '=' in word)
    candidate = {hparam: float(value) for hparam, value in values}
    by_method.setdefault(method, []).append((candidate, entry))
  lines = []
  for method, candidates in by_method.items():
    if len(candidates) < num_candidates[method]:
      continue  # Not all have run.
    diverged = sum('diverged' in entry for _, entry in candidates)
    if diverged == len(candidates):
      continue
    (best, entry), *others = sorted(
        candidates,
        key=lambda pair: ('diverged' in pair[1], -pair[1]['mean']),
    )
    means = sorted((other['mean'] for _, other in others), reverse=True)
    at_end = []
    for hparam, value in best.items():
      tried = sorted({candidate[hparam] for candidate, _ in candidates})
      if len(tried) > 2 and value in (tried[0], tried[-1]):
        end = 'least' if value == tried[0] else 'largest'
        at_end.append(f'{hparam}: {end}')
    lines.append(
        [
            method,
            ', '.join(f'{hparam}={value:g}' for hparam, value in best.items()),
            _mean(entry),
            f'{means[0]:.2f}, {means[-1]:.2f}',
            f'{diverged} of {len(candidates)}' if diverged else _NONE,
            ', '.join(at_end) or _NONE,
        ]
    )
  header = [
      'Method',
      'Best',
      'Has',
      'Others: most, least',
      'Diverged',
      'At an end of three or six',
  ]
  return _markdown(header, lines)


def _cells(name: str) -> list[tables.Cell]:
  """Returns the cells of a table whose runs are kept."""
  root = _RESULTS / name
  table = experiments.get(name)
  seeds = {
      int(path.name.removeprefix(tables.SEED_PREFIX))
      for path in root.rglob(f'{tables.SEED_PREFIX}*')
  }
  return [
      cell
      for cell in tables.cells(
          table,
          _table_json(name)['scale'],
          rows=[row.name for row in table.rows],
          settings=[setting.name for setting in table.settings],
          seeds=sorted(seeds),
      )
      if (root / cell.folder / 'cell.json').exists()
  ]


@functools.cache
def _numbers(name: str, path: str = '') -> list[results.Entry]:
  """Returns what the kept runs of a table have.

  Args:
    name: Of the table.
    path: Of a number of summary.json that is read instead of the measures.
  """
  table = experiments.get(name)
  if path:
    measures = (tables.Measure(path, path),)
    table = dataclasses.replace(
        table,
        settings=tuple(
            dataclasses.replace(setting, measures=measures)
            for setting in table.settings
        ),
        rows=tuple(
            dataclasses.replace(row, published={}) for row in table.rows
        ),
    )
  return results.collect(_RESULTS / name, table, _cells(name))


def _certainty(name: str, protocol: str, reference: str) -> str:
  """How sure the models of a kept table are, and how equally they serve.

  Args:
    name: Of the folder in `results`.
    protocol: Who is tested.
    reference: Name of the row that the others' NLL is compared with.
  """
  columns = {
      'NLL': 'nll_mean',
      'NLL before': 'nll_before_mean',
      'Brier score': 'brier_mean',
      'ECE, %': 'ece_mean',
      'Gini, %': 'accuracy_gini',
      'hurt, %': 'share_hurt',
  }
  by_row: dict[str, dict[str, results.Entry]] = {}
  for number in columns.values():
    for entry in _numbers(name, f'evaluation/{protocol}/{number}'):
      by_row.setdefault(entry.row, {})[number] = entry
  other = by_row[reference]['nll_mean']
  lines = []
  for row, entries in by_row.items():
    line, num_seeds = [row], len(entries['accuracy_gini'].values)
    for title, number in columns.items():
      mean = entries[number].mean  # Of a hundred times what is measured.
      scale = 1 if title.endswith('%') else 100
      line.append(_NONE if mean is None else f'{mean / scale:.2f}')
      with_number = len(entries[number].values)
      if 0 < with_number < num_seeds:
        line[-1] += f' ({with_number} of {num_seeds} seeds)'
    pair = None if row == reference else pairs.pair(entries['nll_mean'], other)
    if pair is None or pair.half_width_over_units is None:
      line += [_NONE, _NONE]
    else:
      low, high = (
          (pair.mean + sign * pair.half_width_over_units) / 100
          for sign in (-1, 1)
      )
      line += [f'{pair.mean / 100:+.2f}', f'{low:+.2f} to {high:+.2f}']
    lines.append(line)
  header = ['Method', *columns, f'NLL minus {reference}', '95 % over clients']
  return _markdown(header, lines)


def _pairs(name: str, *measures: str) -> str:
  """How far every row is from the reference of a kept table.

  Args:
    name: Of the folder in `results`.
    *measures: Their names, all without any; the first one may be `minus ROW`
      for another reference than that of the table.
  """
  table = experiments.get(name)
  reference = table.reference or table.rows[0].name
  if measures and measures[0].startswith('minus '):
    reference, measures = measures[0].removeprefix('minus '), measures[1:]
  by_place: dict[tuple[str, str], list[results.Entry]] = {}
  for entry in _numbers(name):
    if entry.measure in measures or not measures:
      by_place.setdefault((entry.setting, entry.measure), []).append(entry)
  parts = []
  for (setting, _), entries in by_place.items():
    found = pairs.with_reference(entries, reference)
    if found:
      header = ['Method', *cell_texts.pairs_header(found)]
      rows = [[pair.row, *cell_texts.pair(pair)] for pair in found]
      title = f'**{setting}**: {cell_texts.pairs_title(found)}'
      parts += [title, _markdown(header, rows)]
  return '\n\n'.join(parts)


def _runs(name: str) -> Iterator[tuple[str, str, list[pathlib.Path]]]:
  """Yields setting, row and the folders of its kept runs, one a seed."""
  found: dict[tuple[str, str], list[pathlib.Path]] = {}
  for cell in _cells(name):
    found.setdefault((cell.setting, cell.row), []).append(
        _RESULTS / name / cell.folder / 'run'
    )
  for (setting, row), folders in found.items():
    yield setting, row, folders


def _summary(run: pathlib.Path) -> dict[str, Any]:
  return json.loads((run / 'summary.json').read_text())


def _config(run: pathlib.Path) -> dict[str, Any]:
  return json.loads((run / 'config.json').read_text())['config']


def _column(run: pathlib.Path, name: str) -> list[float]:
  """Returns a column of a run's metrics, without rounds that lack it."""
  with (run / 'metrics.csv').open(newline='') as file:
    rows = list(csv.DictReader(line for line in file if line[0] != '#'))
  values = [float(row[name] or math.nan) for row in rows]
  return [value for value in values if not math.isnan(value)]


def _last_ten(name: str) -> str:
  """Range and mean of the last ten tests on the way, over all seeds."""
  rows = []
  for setting, row, folders in _runs(name):
    if setting != 'Known clients':
      continue
    values = [
        100 * value
        for run in folders
        for value in _column(run, 'known_clients/accuracy_micro')[-10:]
    ]
    numbers = (min(values), max(values), statistics.fmean(values))
    rows.append([row, *(f'{number:.2f}' for number in numbers)])
  return _markdown(['Method', 'least', 'most', 'mean'], rows)


def _steps(name: str) -> str:
  """Accuracy of new clients after so many steps, the mean over seeds."""
  shown = (0, 1, 2, 5, 10, 20, 50)
  rows = []
  for setting, row, folders in _runs(name):
    curves = [
        _summary(run)['evaluation']['new_clients']['curve'] for run in folders
    ]
    means = [statistics.fmean(c[step] for c in curves) for step in shown]
    rows.append([setting, row, *(f'{100 * mean:.2f}' for mean in means)])
  return _markdown(['Clients', 'Method', *map(str, shown)], rows)


# What algorithms call the rate of fine-tuning.
_FINE_TUNING_RATES = ('fine_tuning_learning_rate', 'deployment_learning_rate')


@functools.cache
def _clients_by_rate(name: str) -> dict[tuple[str, str, str, int], _Clients]:
  """Returns new clients of kept runs, fine-tuned with several rates.

  Args:
    name: Of the table whose runs they are. What they have with other rates than
      their row's is in a folder of `results/analyses`, in files that
      `binaries.evaluate --grid` has written.

  Returns:
    Setting, row, rate and seed -> client -> column -> number; of a row of which
    one seed has other rates, the others with the row's own.
  """
  root = _RESULTS / 'analyses' / f'{name}_fine_tuning_rates'
  found = {}
  for setting, row, folders in _runs(name):
    grids_of_runs = {
        run: root / run.parent.relative_to(_RESULTS / name) / _GRID
        for run in folders
    }
    if not any(grid.exists() for grid in grids_of_runs.values()):
      continue
    for run, grid in grids_of_runs.items():
      seed = int(run.parent.name.removeprefix(tables.SEED_PREFIX))
      hparams = _config(run)['hparams']
      rate = next(r for r in _FINE_TUNING_RATES if r in hparams)
      found[setting, row, f'{hparams[rate]:g}', seed] = (
          metric_writers.read_units(run / 'clients_new_clients.csv', '')
      )
      for point in grids.read_rows(grid).values() if grid.exists() else ():
        found[setting, row, point[rate], seed] = metric_writers.read_units(
            grids.units_file(grid, point), point['units_sha256']
        )
  return found


def _fine_tuning_rates(name: str) -> str:
  """Accuracy of new clients by the rate of fine-tuning, with each seed."""
  found = _clients_by_rate(name)
  rates = sorted({rate for _, _, rate, _ in found}, key=float)
  rows = []
  for setting, row in dict.fromkeys(key[:2] for key in found):
    line = [setting, row]
    for rate in rates:
      values = [
          statistics.fmean(_last_of_curve(of) for of in clients.values())
          for key, clients in found.items()
          if key[:3] == (setting, row, rate)
      ]
      line.append(_mean_and_each(values) if values else _NONE)
    rows.append(line)
  return _markdown(['Clients', 'Method', *rates], rows)


def _equal_rates(name: str, first: str, *steps: str) -> str:
  """How far a row is from others with the same rate of fine-tuning.

  Args:
    name: As for `_clients_by_rate`.
    first: Name of the row.
    *steps: After how many, or `'the last'` for the mean of the last three.
  """
  found = _clients_by_rate(name)
  rows = []
  for setting, row, rate in dict.fromkeys(key[:3] for key in found):
    seeds = [
        seed
        for *key, seed in found
        if (*key,) == (setting, row, rate)
        and (setting, first, rate, seed) in found
    ]
    for step in steps if row != first and seeds else ():
      by_seed = {}
      for seed in seeds:
        both = [found[setting, which, rate, seed] for which in (first, row)]
        by_seed[seed] = [
            {client: _after(numbers, step) for client, numbers in of.items()}
            for of in both
        ]
      pair = _paired((first, row), step, 'clients', by_seed)
      rows.append([setting, rate, row, step, *cell_texts.pair(pair)])
  header = ['Clients', 'Rate', 'Method', 'After steps']
  header += [
      f'{first} minus it', '95 % over clients', '95 % over seeds', 'clients',
      'seeds',
  ]  # fmt: skip
  return _markdown(header, rows)


def _paired(
    rows: tuple[str, str],
    measure: str,
    unit: str,
    by_seed: dict[int, Sequence[dict[str, float]]],
) -> pairs.Pair:
  """Returns how far a row is from another, each client or group the same.

  Args:
    rows: The row and the other.
    measure: What is measured.
    unit: Clients or groups.
    by_seed: Seed -> for both rows the name of each -> its number, in percent.
  """
  values, spreads = {}, {}
  for seed, (mine, others) in by_seed.items():
    assert mine.keys() == others.keys()
    d = np.array([mine[name] - others[name] for name in mine])
    equal = np.full(len(d), 1 / len(d))
    values[seed] = float(d.mean())
    spreads[seed] = pairs.spread_of(list(mine), equal, d, values[seed])
  return pairs.Pair(*rows, measure, values, unit, spreads, {})


def _after(client: dict[str, float], step: str) -> float:
  """Returns a client's accuracy after so many steps, in percent."""
  if step == 'the last':
    return _last_of_curve(client)
  return 100 * client[f'accuracy_after_{step}_steps']


def _last_of_curve(client: dict[str, float]) -> float:
  """Returns the mean of the last three points, in percent."""
  curve = [client[n] for n in client if n.startswith('accuracy_after_')]
  return 100 * statistics.fmean(curve[-3:])


def _grid(folder: str, protocol: str, *columns: str) -> str:
  """What `binaries.evaluate --grid` has written of one trained model.

  Args:
    folder: Of `results/analyses`.
    protocol: What was evaluated.
    *columns: Axes and measures of the table; shares come as percent.
  """
  path = _RESULTS / 'analyses' / folder / f'grid_{protocol}.csv'
  rows = [
      [_of_grid(name, float(point[name])) for name in columns]
      for point in grids.read_rows(path).values()
  ]
  rows.sort(key=lambda row: [float(value) for value in row])
  return _markdown([f'`{name}`' for name in columns], rows)


def _grid_pairs(folder: str, protocol: str, axis: str, reference: str) -> str:
  """How far the values of an axis are from one of them, group by group.

  Args:
    folder: Of `results/analyses`, as for `_grid`.
    protocol: What was evaluated.
    axis: Of the grid, the only one.
    reference: The value that the others are compared with.
  """
  path = _RESULTS / 'analyses' / folder / f'grid_{protocol}.csv'
  points = {point[axis]: point for point in grids.read_rows(path).values()}
  accuracies = {
      value: {
          name: 100 * unit['accuracy']
          for name, unit in metric_writers.read_units(
              grids.units_file(path, point), point['units_sha256']
          ).items()
      }
      for value, point in points.items()
  }
  others, lines = accuracies[reference], []
  for value, mine in sorted(accuracies.items(), key=lambda item: int(item[0])):
    point = points[value]
    half_width = 100 * float(point['accuracy_half_width_95'])
    mean = 100 * float(point['accuracy_mean'])
    line = [value, f'{mean:.2f} ± {half_width:.2f}']
    if value == reference:
      lines.append([*line, _NONE, _NONE])
      continue
    pair = _paired((value, reference), axis, 'groups', {0: (mine, others)})
    lines.append([*line, f'{pair.mean:+.2f}', cell_texts.over_units(pair)])
  header = [f'`{axis}`', 'accuracy', f'minus {reference}', '95 % over groups']
  return _markdown(header, lines)


def _grids(folder: str, protocol: str, measure: str, *axes: str) -> str:
  """Means over seeds of what `binaries.evaluate --grid` has written of rows.

  Args:
    folder: Of `results/analyses`, with a folder for every row, and in it one
      for every seed.
    protocol: What was evaluated.
    measure: A share.
    *axes: The one that a row has, `ROW=AXIS`; all have the same values.
  """
  root, values, rows = _RESULTS / 'analyses' / folder, set(), []
  for row, axis in (text.split('=') for text in axes):
    found = collections.defaultdict(list)
    for path in sorted((root / row).glob(f'seed_*/grid_{protocol}.csv')):
      for point in grids.read_rows(path).values():
        found[float(point[axis])].append(100 * float(point[measure]))
    assert values in (set(), found.keys()), (row, values)
    values = set(found)
    means = [_mean_and_each(found[value]) for value in sorted(found)]
    rows.append([f'`{row}`', f'`{axis}`', *means])
  header = ['Run', 'Passes', *(f'{value:g}' for value in sorted(values))]
  return _markdown(header, rows)


def _of_grid(column: str, value: float) -> str:
  if column.startswith('accuracy_'):
    return f'{100 * value:.2f}'
  return f'{value:.2f}' if column.startswith('nll_') else f'{value:g}'


def _mean_and_each(values: Sequence[float]) -> str:
  """Returns a mean and, where there are several, what it is the mean of."""
  mean = f'{statistics.fmean(values):.2f}'
  if len(values) == 1:
    return mean
  return f'{mean} ({", ".join(f"{value:.2f}" for value in values)})'


def _best_rounds(name: str) -> str:
  """Every method's round that is best on validation groups, with each seed."""
  rows = []
  for _, row, runs in _runs(name):
    best = [_summary(run)['best_round'] for run in runs]
    if max(best) > 1:  # What prepares nothing has one round.
      rows.append([row, '; '.join(f'{round_num:,}' for round_num in best)])
  return _markdown(['Method', 'Round'], rows)


def _preparation(name: str) -> str:
  """Accuracy of validation groups against rounds, the mean over seeds."""
  rows: list[list[str]] = []
  rounds: list[float] = []
  for _, row, runs in _runs(name):
    of_run = _column(runs[0], 'round')
    if len(of_run) > 1:
      rounds = of_run
      seeds = [_column(run, 'validation_groups/accuracy') for run in runs]
      means = map(statistics.fmean, zip(*seeds, strict=True))
      rows.append([row, *(f'{100 * mean:.2f}' for mean in means)])
  return _markdown(['Method', *(f'{r:,.0f}' for r in rounds)], rows)


def _progress(name: str) -> str:
  """How fast accuracy grows in a kept table, setting by setting."""
  table = experiments.get(name)
  by_setting: dict[str, dict[str, list[pathlib.Path]]] = {}
  for setting, row, folders in _runs(name):
    by_setting.setdefault(setting, {})[row] = folders
  parts = []
  for setting, runs in by_setting.items():
    sent = progress.kept_traffic(_RESULTS / name, setting)
    found = progress.of_runs(runs, table.setting(setting), sent)
    if found is not None:
      header, *rows = found.grid()
      parts += [f'**{setting}.** {found.sentence()}', _markdown(header, rows)]
  return '\n\n'.join(parts)


def _how_progress() -> str:
  """What the numbers of `_progress` are."""
  return '\n'.join(f'* {sentence}' for sentence in progress.WHAT_IT_IS)


def _margins(name: str, of_row: str) -> str:
  """The server's margin on the way, the mean over seeds."""
  shown = (50, 250, 500, 750, 1000)
  rows = []
  for setting, row, folders in _runs(name):
    if row != of_row:
      continue
    curves = [
        dict(zip(_column(run, 'round'), _column(run, _MARGIN), strict=True))
        for run in folders
    ]
    cells = []
    for round_num in shown:
      seeds = [curve[round_num] for curve in curves]
      every = ', '.join(f'{value:.2f}' for value in seeds)
      cells.append(f'{statistics.fmean(seeds):.2f} ({every})')
    rows.append([setting, *cells])
  return _markdown(['', *(f'round {r:,}' for r in shown)], rows)


def _privacy() -> str:
  """Accuracy of every run with its epsilon, the mean over seeds."""
  rows = []
  for setting, row, runs in _runs('privacy_mnist'):
    at = 'new_groups' if 'groups' in setting else 'new_clients'
    found = [_summary(run) for run in runs]
    accuracy = [100 * s['evaluation'][at]['accuracy_mean'] for s in found]
    untrained = statistics.fmean(
        100 * s['evaluation'][at]['references']['untrained']['accuracy_mean']
        for s in found
    )
    private = found[0].get('privacy')
    rows.append(
        [
            row,
            f'{private["epsilon"]:.2f}' if private else 'none',
            f'{statistics.fmean(accuracy):.2f}',
            ', '.join(f'{value:.2f}' for value in accuracy),
            f'{untrained:.2f}',
        ]
    )
  header = ['Run', 'Epsilon', 'Accuracy', 'Of each seed', 'Untrained']
  return _markdown(header, rows)


def _first_command() -> str:
  """FRL on pairs of digits beside what it is compared with."""
  ((_, _, (run,)),) = (
      found for found in _runs('digits') if found[:2] == ('New groups', 'frl')
  )
  groups = _summary(run)['evaluation']['new_groups']

  def number(values, name):
    half_width = values[f'{name.removesuffix("_mean")}_half_width_95']
    return f'{100 * values[name]:.2f} ± {100 * half_width:.2f}'

  rows = [['FRL with GPAL', number(groups, 'accuracy_mean'), _NONE]]
  for title, key in (
      ("FRL's initial model, untrained", 'untrained'),
      ('FedAvg from scratch', 'fed_avg_from_scratch'),
  ):
    reference = groups['references'][key]
    rows.append(
        [title, number(reference, 'accuracy_mean'), number(reference, 'gain')]
    )
  return _markdown(['Model', 'Accuracy', "FRL's gain over it"], rows)


def _nvar() -> str:
  """How widely classes spread in the embedding of five methods."""
  titles = {
      'metavers': 'MetaVers',
      'metavers_ce': 'Only CE',
      'metavers_triplet': 'Only triplet',
      'fed_avg': 'FedAvg',
      'per_fed_avg': 'Per-FedAvg',
  }
  rows = []
  for title, folder, number, form in (
      ('nVAR of 10,000 test images', 'nvar', 'trained', '.2f'),
      ('silhouette of the 2,000 images in the map', 'embedding_map',
       'silhouette', '.3f'),
  ):  # fmt: skip
    path = _RESULTS / 'analyses' / f'{folder}_metavers_cifar10'
    found = json.loads((path / f'{folder}.json').read_text())['runs']
    runs = {run['algorithm']: run for run in found}
    values = [round(runs[name][number], 3) + 0.0 for name in titles]
    rows.append([title, *(format(value, form) for value in values)])
  return _markdown(['', *titles.values()], rows)


def _inversion() -> str:
  """What clients' messages give away of 20 images."""
  metavers = "MetaVers' query loss, prototypes constant"
  titles = {
      'classifier': 'FedAvg: gradient',
      'hidden_prototypes': f'{metavers}: guessed',
      'leaked_prototypes': f'{metavers}: known',
      'hidden_prototypes_by_bias': f'{metavers}: not needed, by the last bias',
      'update_and_prototype': 'FRL: step and prototype',
      'prototype_only': 'FedProto: prototype',
      'minibatch': 'FedAvg: gradient of four images',
      'episode': 'MetaVers as trained here: gradient of an episode of the four',
      'grey': 'nothing: mid-grey is guessed',
  }
  path = _RESULTS / 'analyses' / 'inversion_cifar10' / 'inversion.json'
  cases = json.loads(path.read_text())['cases']

  def interval(entry, form):
    if entry is None:
      return _NONE
    return f'{entry["mean"]:{form}} ± {entry["half_width_95"]:{form[-3:]}}'

  rows = []
  for case, title in titles.items():
    entry = cases[case]
    right = (
        'given' if case in inversion.LABEL_IS_GIVEN else entry['right_labels']
    )
    rows.append(
        [
            title,
            interval(entry['psnr'], '.1f'),
            interval(entry.get('psnr_difference'), '+.1f'),
            interval(entry['ssim'], '.2f'),
            interval(entry.get('ssim_difference'), '+.2f'),
            str(entry['recognised']),
            _NONE if right is None else str(right),
        ]
    )
  header = [
      'What the attacker has',
      'PSNR, dB',
      'minus FedAvg of as many images',
      'SSIM',
      'minus FedAvg of as many images',
      'images of 20 dB or more',
      'right labels',
  ]
  return _markdown(header, rows)


def _headline() -> str:
  """One number of every kept table of a paper, with its page."""
  rows = []
  for title, name, setting, row, measure in (
      (
          'MetaVers, CIFAR-10, 50 clients of 2 classes',
          'metavers_cifar10',
          '50 clients',
          'MetaVers',
          'Best round on validation',
      ),
      (
          'MetaVers, CIFAR-10, 100 clients of 2 classes',
          'metavers_cifar10',
          '100 clients',
          'MetaVers',
          'Best round on validation',
      ),
      (
          'FedMeta-Per (MAML), MNIST, known clients',
          'fedmeta_per_mnist',
          'Known clients',
          'FedMeta-Per (MAML)',
          'Micro',
      ),
      (
          'FedMeta-Per (MAML), CIFAR-10, known clients',
          'fedmeta_per_cifar10',
          'Known clients',
          'FedMeta-Per (MAML)',
          'Micro',
      ),
      (
          'CAFeMe, rotated MNIST, new clients, shards',
          'cafeme_rmnist',
          'Shards',
          'CAFeMe',
          'After 50 steps',
      ),
      (
          'FedEC, CIFAR-10, 100 clients of 2 classes (images as they are)',
          'fedec_cifar10_100_2_earlier',
          'CIFAR-10 (100 x 2)',
          'FedEC',
          'Last ten rounds',
      ),
      (
          'FRL with GPAL, Omniglot, new groups (non-IID)',
          'frl_omniglot',
          'Groups of 10 clients',
          'FRL distance + GPAL',
          'Non-IID, last round',
      ),
  ):
    entry = _entry(name, setting, row, measure)
    page = name.removesuffix('_earlier')
    link = f'[{page}](docs/results/{page}.md)'
    rows.append(
        [title, _published(entry), _ours(entry), str(entry['num_seeds']), link]
    )
  header = ['What', 'Published', 'Ours', 'Seeds', 'All of it']
  return _markdown(header, rows)


def _is_kept(name: str) -> bool:
  return (_RESULTS / name / 'table.json').exists()


def _found(
    name: str, comparison: claims.Comparison, row: str
) -> results.Entry | None:
  """Returns what the kept runs of a row have, None without any."""
  if not _is_kept(name):
    return None
  path = comparison.measure if '/' in comparison.measure else ''
  for entry in _numbers(name, path):
    if (entry.setting, entry.row, entry.measure) == (
        comparison.setting,
        row,
        comparison.measure,
    ):
      return entry
  return None


@functools.cache
def _pair(comparison: claims.Comparison) -> pairs.Pair | None:
  """Returns the paired difference of a comparison, None if it has not run."""
  name = comparison.experiment
  mine = _found(name, comparison, comparison.row)
  other = _found(
      comparison.other_experiment or name, comparison, comparison.other
  )
  return pairs.pair(mine, other) if mine and other else None


def _or_none(difference: float | None) -> str:
  return _NONE if difference is None else f'{difference:+.2f}'


_VERDICTS = 'confirmed', 'contradicted', 'not decided', 'not run'


def _judged(
    claim: claims.Claim,
) -> list[tuple[claims.Comparison, pairs.Pair | None, str, str]]:
  """Returns comparisons with their pair, and the verdict with its reason."""
  judged: list[tuple[claims.Comparison, pairs.Pair | None, str, str]] = []
  for comparison in claim.comparisons:
    pair = _pair(comparison)
    if pair is None:
      judged.append((comparison, None, 'not run', ''))
    else:
      word, why = verdicts.judge(pair, claim.margin)
      judged.append((comparison, pair, word, why))
  return judged


def _counts(words: Sequence[str]) -> str:
  """Returns how often there is each verdict, in words."""
  found = [(words.count(word), word) for word in _VERDICTS]
  return ', '.join(f'{n} {word}' for n, word in found if n)


def _claims_of(paper: str) -> list[tuple[int, claims.Claim]]:
  of_paper = [claim for claim in claims.CLAIMS if claim.paper == paper]
  if not of_paper:
    raise ValueError(f'Expected claims of {paper!r}, found none.')
  return list(enumerate(of_paper, 1))


def _claims(paper: str) -> str:
  """All claims of a paper: one row each, then one row a comparison."""
  overview, details, lacking = [], [], []
  remain = _that_remain()
  for number, claim in _claims_of(paper):
    judged = _judged(claim)
    words = [word for _, _, word, _ in judged]
    instead = ' '.join(
        part
        for part in (
            claim.evidence,
            f'It would take: {claim.needs}' if claim.needs else '',
        )
        if part
    )
    verdict = _counts(words) or (claim.verdict if claim.evidence else 'not run')
    overview.append(
        [str(number), claim.text, claim.source, verdict, instead or _NONE]
    )
    details += [
        [
            str(number),
            comparison.where,
            f'{comparison.row} − {comparison.other}',
            _or_none(comparison.published),
            *cell_texts.pair(pair),
            _verdict(word, why, (claim, comparison) in remain),
        ]
        for comparison, pair, word, why in judged
        if pair
    ]
    lacking += [f'* {number}: {text}' for text in _lacking(judged)]
  header = ['', 'Claim', 'Where', 'Comparisons', 'Instead of a comparison']
  parts = [_markdown(header, overview)]
  if details:
    header = [
        'Claim',
        'Data',
        'Difference of',
        'published',
        'ours',
        '95 % over clients or groups',
        '95 % over seeds',
        'clients or groups',
        'seeds',
        'Verdict',
    ]
    parts.append(_markdown(header, details))
  if lacking:
    parts += ['Not run:', '\n'.join(lacking)]
  return '\n\n'.join(parts)


def _verdict(word: str, why: str, remains: bool) -> str:
  """Returns what a comparison decides, and what may be said against it."""
  if word == 'not decided':
    return f'{word}: {why}'
  return word if remains else f'{word}, but not with all taken together'


def _lacking(judged) -> Iterator[str]:
  """Yields what has not run of a claim, a line a table."""
  by_table: dict[str, list[claims.Comparison]] = {}
  for comparison, pair, *_ in judged:
    if pair is None:
      by_table.setdefault(comparison.experiment, []).append(comparison)
  for name, comparisons in by_table.items():
    table = experiments.get(name)
    if not _is_kept(name):
      num_runs = len(tables.cells(table, 'paper'))
      data = f'; data: {claims.DATA[name]}' if claims.DATA[name] else ''
      yield (
          f'all {len(comparisons)} of `--experiment={name}` (its table has'
          f' {num_runs} runs at the scale `paper`{data})'
      )
    else:
      of_rows: dict[str, list[str]] = {}
      for comparison in comparisons:
        place = of_rows.setdefault(f'{comparison.row} − {comparison.other}', [])
        place.append(comparison.setting)
      rows = (
          f'{row} ({"; ".join(dict.fromkeys(at))})'
          for row, at in of_rows.items()
      )
      yield f'of `--experiment={name}`: {", ".join(rows)}'


def _claims_overview() -> str:
  """How many comparisons of each paper have which verdict."""
  rows = []
  remain = _that_remain()
  for paper in dict.fromkeys(claim.paper for claim in claims.CLAIMS):
    of_paper = [claim for _, claim in _claims_of(paper)]
    judged = [(c, *j) for c in of_paper for j in _judged(c)]
    words = [word for *_, word, _ in judged]
    anchor = paper.lower()
    decided = [
        (claim, comparison)
        for claim, comparison, _, word, _ in judged
        if word in ('confirmed', 'contradicted')
    ]
    over_seeds = [
        abs(pair.mean - claim.margin) > (pair.half_width_over_seeds or math.inf)
        for claim, _, pair, word, _ in judged
        if word in ('confirmed', 'contradicted')
    ]
    rows.append(
        [
            f'[{paper}](#{anchor})',
            str(len(of_paper)),
            *(str(words.count(word)) for word in _VERDICTS),
            f'{len(remain.intersection(decided))} of {len(decided)}',
            f'{sum(over_seeds)} of {len(decided)}',
            str(sum(c.experiment in _EARLIER.values() for _, c in decided)),
        ]
    )
  header = [
      'Paper',
      'Claims',
      *(f'Comparisons {word}' for word in _VERDICTS),
      'Decided with all taken together',
      'Decided over seeds, too',
      'Decided by an earlier definition',
  ]
  return _markdown(header, rows)


@functools.cache
def _that_remain() -> set[tuple[claims.Claim, claims.Comparison]]:
  """Returns the differences that are told apart with all taken together."""
  found = {
      (claim, comparison): p_value
      for claim in claims.CLAIMS
      for comparison, pair, *_ in _judged(claim)
      if pair
      for p_value in [pair.p_value_over_units(claim.margin)]
      if p_value is not None
  }
  remain = verdicts.holm(list(found.values()))
  return {key for key, stays in zip(found, remain, strict=True) if stays}


_PAPERS = {
    'Lim': 'MetaVers',
    'Vettoruzzo': 'CAFeMe',
    'Lan': 'FedEC',
    'Nguyen': 'FedMeta-Per',
    'Park': 'FRL',
}
# Table -> that of its runs of an earlier definition, which count until others
# have run.
_EARLIER = {
    'cafeme_rmnist': 'cafeme_rmnist_earlier',
    'fedec_cifar10_100_2': 'fedec_cifar10_100_2_earlier',
}


def _run_in_full(name: str) -> set[tuple[str, str]]:
  """Returns the (row, setting) of a table that have run at full scale."""
  if not _is_kept(name) or _table_json(name)['scale'] != 'paper':
    return set()
  return {
      (e['row'], e['setting'])
      for e in _table_json(name)['entries']
      if e['mean'] is not None and e['num_seeds']
  }


def _coverage() -> str:
  """Published (row, setting) cells that have run at full scale, and all."""
  rows, totals = [], [0, 0, 0]
  by_paper: dict[str, list[list[str]]] = {p: [] for p in _PAPERS.values()}
  sums = {paper: [0, 0, 0] for paper in by_paper}
  for name, table in experiments.TABLES.items():
    published = {
        (row.name, setting) for row in table.rows for setting in row.published
    }
    if table.source == 'ours' or not published or name in _EARLIER.values():
      continue
    paper = _PAPERS[table.source.split()[0]]
    done, earlier = _run_in_full(name) & published, set()
    if name in _EARLIER:
      earlier = _run_in_full(_EARLIER[name]) & published - done
    numbers = [len(done | earlier), len(earlier), len(published)]
    where = table.source.partition(', ')[2] or table.source
    by_paper[paper].append(
        [
            paper,
            where.removeprefix('2023, ').removeprefix('2022, '),
            f'`{name}`',
            *map(str, numbers),
        ]
    )
    for total in (totals, sums[paper]):
      for i, number in enumerate(numbers):
        total[i] += number
  for paper, lines in by_paper.items():
    rows += lines
    rows.append([f'**{paper}**', '', '', *(f'**{n}**' for n in sums[paper])])
  rows.append(['**All**', '', '', *(f'**{n}**' for n in totals)])
  header = [
      'Paper', 'Of', 'Table', 'cells run', 'of an earlier definition',
      'published cells',
  ]  # fmt: skip
  return _markdown(header, rows)


# Training images of a cohort: 10 clients of 600 in the published preparation, 6
# of 150 on CIFAR-10 (600 images of each of 4 classes, dealt to 16 clients).
_IMAGES, _TIMED_IMAGES = 6000, 900


def _few_round_needs() -> str:
  """What every row of FRL's tables that has not run would take."""
  (setting,) = experiments.get('frl_cifar10').settings
  seconds = {
      row: _summary(run)['seconds_per_round_median']
      for name, row, (run,) in _runs('frl_cifar10')
      if name == setting.name
  }
  rows = []
  for name in ('frl_cifar100', 'frl_mini_imagenet', 'frl_femnist'):
    if _is_kept(name):
      continue
    table = experiments.get(name)
    for cell in tables.cells(table, 'paper'):
      flags = tables.in_force(cell.flags)
      num_rounds = int(flags['--rounds'].partition('=')[2])
      groups = int(flags['--eval_groups'].partition('=')[2])
      kinds = flags['--protocol'].count(',') + 1
      hours = num_rounds * seconds[cell.row] / 3600 * _IMAGES / _TIMED_IMAGES
      if num_rounds == 1:
        estimate = 'none: groups start from random weights'
      elif name == 'frl_mini_imagenet':
        estimate = 'not estimated: images of 84 x 84'
      else:
        estimate = f'{hours:.0f}'
      rows.append(
          [
              claims.DATA[name],
              cell.row,
              f'{num_rounds:,}',
              estimate,
              f'{kinds} x {groups:,}',
          ]
      )
  header = ['Data', 'Row', 'Rounds', 'Hours of preparation', 'Groups to test']
  return _markdown(header, rows)


_USES = {
    'known_client': 'known clients',
    'new_client': 'new clients',
    'new_class': 'new classes',
    'group': 'new groups',
}


def _page_of(spec: registry.AlgorithmSpec) -> str:
  return f'{spec.module_name.rpartition(".")[2]}.md'


def _algorithms() -> str:
  """All algorithms of the registry, with links to their pages."""
  return _markdown(
      ['Name', 'What it is', 'Paper', 'Tested on'],
      [
          [
              f'[`{spec.name}`]({_page_of(spec)})',
              spec.summary,
              spec.paper,
              ', '.join(_USES[use] for use in spec.uses),
          ]
          for spec in registry.ALGORITHMS.values()
      ],
  )


def _specs(module: str) -> list[registry.AlgorithmSpec]:
  found = [
      spec
      for spec in registry.ALGORITHMS.values()
      if spec.module_name.rpartition('.')[2] == module
  ]
  if not found:
    raise ValueError(f'Expected an algorithm of {module!r}, found none.')
  return found


def _needs(module: str) -> str:
  """What the algorithms of a module need, and what their clients send."""
  from tff_meta import models  # Imports TensorFlow.

  rows = []
  for spec in _specs(module):
    model = models.build(spec.model or 'lenet', (28, 28, 1), None)
    methods = {
        name: spec.method(model, preset, 10)
        for name, preset in spec.presets.items()
    }
    keeping = [name for name, method in methods.items() if method.memory]
    keeps = 'with ' + ', '.join(f'`{name}`' for name in keeping)
    if len(keeping) in (0, len(methods)):
      keeps = 'yes' if keeping else 'no'
    rows.append(
        [
            f'`{spec.name}`',
            ', '.join(_USES[use] for use in spec.uses),
            keeps,
            spec.channels or 'nothing',
            f'`{spec.model}`' if spec.model else "the data set's",
            f'`{spec.partition}`',
        ]
    )
  header = [
      '`--algorithm`',
      'Tested on',
      'Clients keep something',
      'Sent beside the model',
      'Network',
      'Partition',
  ]
  return _markdown(header, rows)


def _presets(module: str) -> str:
  """Every setting of an algorithm in its presets, and what variants change."""
  spec, *others = _specs(module)
  presets = [spec.presets[name] for name in registry.PRESETS]
  columns = [dataclasses.asdict(preset) for preset in presets]
  parts = []
  bases = [
      f'[`{base.__name__}`](../reference/algorithms.md#{base.__module__}'
      f'.{base.__name__})'
      for base in type(presets[0]).__bases__
      if base.__name__ != 'Configuration'
  ]
  if bases:
    parts.append(f'Its other settings are those of {" and ".join(bases)}.')
  parts.append(
      _markdown(
          ['`--hparams`', *(f'`{name}`' for name in registry.PRESETS)],
          [
              [f'`{field}`', *(f'`{column[field]}`' for column in columns)]
              for field in sorted(columns[0])
          ],
      )
  )
  changes = [
      f'* `{other.name}`: '
      + ', '.join(
          f'`{field}={value}`' for field, value in other.changes.items()
      )
      for other in others
      if other.changes
  ]
  if changes:
    parts.append('\n'.join(changes))
  return '\n\n'.join(parts)


_KINDS: dict[str, Callable[..., str]] = {
    'table': _table,
    'facts': _facts,
    'notes': _notes,
    'across': _across,
    'changes': _changes,
    'search': _search,
    'last ten tests': _last_ten,
    'steps': _steps,
    'fine-tuning rates': _fine_tuning_rates,
    'equal rates': _equal_rates,
    'grid': _grid,
    'grid pairs': _grid_pairs,
    'grids': _grids,
    'best rounds': _best_rounds,
    'preparation': _preparation,
    'progress': _progress,
    'what progress is': _how_progress,
    'margins': _margins,
    'first command': _first_command,
    'privacy': _privacy,
    'nvar': _nvar,
    'inversion': _inversion,
    'certainty': _certainty,
    'pairs': _pairs,
    'claims': _claims,
    'claims overview': _claims_overview,
    'coverage': _coverage,
    'few-round needs': _few_round_needs,
    'headline': _headline,
    'algorithms': _algorithms,
    'needs': _needs,
    'presets': _presets,
}


def main() -> None:
  """Writes the pages whose generated parts have changed."""
  for page in pages():
    text = page.read_text()
    new = regenerated(text)
    if new != text:
      page.write_text(new)
      print(page.relative_to(ROOT))


if __name__ == '__main__':
  main()
