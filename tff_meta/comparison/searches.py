"""Searches for hyperparameters, on validation data only.

A search is a table like any other (`tables.Table`): a row a candidate, whose
measure is the accuracy on validation data at the end of training. So it is run,
continued, reported and kept as comparisons are. Its runs measure nothing on
test data at all (`--protocol=none`).

There are three kinds: all candidates of a grid; some drawn at random; and
successive halving, in which many candidates train for a few rounds and only the
best third of them goes on to three times as many, until the best ones have
trained in full. A candidate that goes on begins anew, so that all of a rung
have the same number of rounds from the start, and each rung is a setting.

Sources: Bergstra and Bengio, Random Search for Hyper-Parameter Optimization,
JMLR, 2012. Jamieson and Talwalkar, Non-stochastic Best Arm Identification and
Hyperparameter Optimization, AISTATS, 2016.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import itertools
import math
import random
from typing import Any, Literal, TYPE_CHECKING

from tff_meta import registry
from tff_meta.comparison import tables
from tff_meta.training import hyperparameters

if TYPE_CHECKING:  # It imports SciPy, which takes seconds.
  from tff_meta.comparison import results

Kind = Literal['grid', 'random', 'halving']
KINDS: tuple[Kind, ...] = ('random', 'halving')  # What --search takes.
GRID: Kind = 'grid'
_KEPT_SHARE = 3  # One of so many goes on to the next rung.
_NUM_RUNGS = 3
_DRAWS_SEED = 0
_DEFAULT_ROUNDS = 200  # Of `binaries.train`.
_VALIDATION_FRACTION = 0.2
_LAST_ROUNDS = 10  # That clients are measured after: as many as are averaged.


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers from one to another, drawn so that every power of ten is alike.

  Attributes:
    low: The least, positive.
    high: The greatest.
    is_whole: Whether numbers are whole.
  """

  low: float
  high: float
  is_whole: bool

  def draw(self, generator: random.Random) -> str:
    """Returns one as text: three digits, more if these leave the range."""
    value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
    value = min(max(value, self.low), self.high)  # Logarithms are rounded.
    if self.is_whole:
      return str(round(value))
    texts = (f'{value:.{digits}g}' for digits in range(3, 18))
    return next(t for t in texts if self.low <= float(t) <= self.high)


Space = Mapping[str, Sequence[str] | Range]


def read_space(texts: Sequence[str]) -> dict[str, Sequence[str] | Range]:
  """Reads what is searched.

  Args:
    texts: Each `NAME=VALUE,VALUE,...` or `NAME=LOW..HIGH`.

  Raises:
    ValueError: If one is something else, or a name comes twice.
  """
  space: dict[str, Sequence[str] | Range] = {}
  for text in texts:
    name, equals, values = (part.strip() for part in text.partition('='))
    found = hyperparameters.split(values)
    if not (name.isidentifier() and equals and found):
      raise ValueError(
          f'Expected --sweep=NAME=VALUE,VALUE,..., found {text!r}. Tip:'
          ' --sweep=learning_rate=0.1,0.3, and once more for another name.'
      )
    if name in space:
      raise ValueError(
          f'Expected `{name}` in one --sweep, found it in two. Tip: values of a'
          ' name have commas between them.'
      )
    low, dots, high = (part.strip() for part in values.partition('..'))
    if dots and len(found) == 1:
      space[name] = _range(name, low, high)
    elif len(set(map(_number, found))) < len(found):
      raise ValueError(f'Expected each value of `{name}` once, found {values}.')
    else:
      space[name] = found
  return space


def _number(text: str) -> float | str:
  """Returns a value as it is compared: 1 and 1.0 are the same."""
  try:
    return float(text)
  except ValueError:
    return text


def _range(name: str, low: str, high: str) -> Range:
  try:
    found = Range(float(low), float(high), low.isdigit() and high.isdigit())
  except ValueError:
    found = Range(0, 0, False)
  if not 0 < found.low < found.high < math.inf:
    raise ValueError(
        f'Expected the range of `{name}` to be two positive numbers, the less'
        f' first, found {low}..{high}. Tip: --sweep={name}=0.001..0.3.'
    )
  return found


def candidates(space: Space, kind: Kind, budget: int) -> list[dict[str, str]]:
  """Returns what is tried.

  Args:
    space: From `read_space`.
    kind: Of the search.
    budget: Of a search that is no grid: the training that it may take, in runs
      of full length.

  Returns:
    Names -> values. Those drawn at random are the same every time, and the
    first ones of a greater budget.

  Raises:
    ValueError: If a grid is asked for of a range, or the budget is too small.
  """
  lists = {n: v for n, v in space.items() if not isinstance(v, Range)}
  is_finite = len(lists) == len(space)
  if kind == GRID:
    if not is_finite:
      (name, *_) = (n for n in space if n not in lists)
      raise ValueError(
          f'Expected values of `{name}` with commas between them, found a'
          ' range. Tip: --search=random or --search=halving draws from ranges.'
      )
    return _grid(lists)
  wanted = budget
  if kind == 'halving':
    if budget < _NUM_RUNGS:
      raise ValueError(
          f'Expected --budget of at least {_NUM_RUNGS} with --search=halving,'
          f' found {budget}: each of its {_NUM_RUNGS} rungs takes as much'
          ' training as a run of full length.'
      )
    wanted = budget * _KEPT_SHARE ** (_NUM_RUNGS - 1) // _NUM_RUNGS
  generator = random.Random(_DRAWS_SEED)
  if is_finite:
    grid = _grid(lists)
    return generator.sample(grid, len(grid))[:wanted]
  found: dict[tuple[str, ...], dict[str, str]] = {}
  for _ in range(100 * wanted):  # Of few whole numbers there are not as many.
    if len(found) == wanted:
      break
    drawn = {
        name: (
            values.draw(generator)
            if isinstance(values, Range)
            else generator.choice(values)
        )
        for name, values in space.items()
    }
    found.setdefault(tuple(drawn.values()), drawn)
  return list(found.values())


def _grid(lists: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
  return [
      dict(zip(lists, values, strict=True))
      for values in itertools.product(*lists.values())
  ]


def with_hparams(
    flags: Sequence[str], hparams: Mapping[str, object]
) -> tuple[str, ...]:
  """Returns flags of `binaries.train` with other values of hyperparameters.

  Args:
    flags: Flag files read in, as far as they have hyperparameters.
    hparams: Name -> value.

  Raises:
    ValueError: If a flag file that is not read in may have hyperparameters.
  """
  name = '--hparams'
  files = [flag for flag in flags if flag.startswith('--flagfile')]
  if files and name not in tables.in_force(flags):
    raise ValueError(
        f'Expected {name} beside, or flag files read in, found {files[0]}.'
    )
  before = tables.in_force(flags).get(name, '').removeprefix(f'{name}=')
  merged = dict(
      (part.partition('=')[0].strip(), part.partition('=')[2].strip())
      for part in hyperparameters.split(before)
  )
  merged |= {key: _text(value) for key, value in hparams.items()}
  text = ','.join(f'{key}={value}' for key, value in merged.items())
  rest = [flag for flag in flags if not flag.startswith(f'{name}=')]
  return (*rest, f'{name}={text}')


def _text(value: object) -> str:
  return f'{value:g}' if isinstance(value, float) else str(value)


def row_name(row: str, hparams: Mapping[str, object]) -> str:
  """Returns what a candidate of a row is called."""
  values = (f'{name}={_text(value)}' for name, value in hparams.items())
  return ' '.join([row, *values])


def candidate_row(row: tables.Row, hparams: Mapping[str, object]) -> tables.Row:
  """Returns a candidate: a row with other values of hyperparameters."""
  return dataclasses.replace(
      row,
      name=row_name(row.name, hparams),
      flags=with_hparams(row.flags, hparams),
  )


@dataclasses.dataclass(frozen=True)
class Validation:
  """What candidates are measured on.

  Attributes:
    path: Where the number is in summary.json.
    flags: Of `binaries.train`, which make a run measure it.
    what: What it is, for readers.
  """

  path: str
  flags: tuple[str, ...]
  what: str


def of_groups(rounds: int) -> Validation:
  """Returns groups of meta-validation classes, after the last round."""
  return Validation(
      'last_ten_evaluations_mean/validation_groups/accuracy',
      (f'--eval_every={rounds}',),
      'groups of validation classes, which are neither trained nor tested on',
  )


def of_new_class_clients(rounds: int) -> Validation:
  """Returns clients of meta-validation classes, after the last round."""
  return Validation(
      'last_ten_evaluations_mean/validation_new_class_clients/accuracy',
      (f'--eval_every={rounds}',),
      'clients of validation classes, which are neither trained nor tested on',
  )


def of_clients(rounds: int, fraction: float = 0.0) -> Validation:
  """Returns held-out examples of the training clients, in the last ten rounds.

  Args:
    rounds: Of the run.
    fraction: Share of their training examples that the run holds out anyway; 0
      for none.
  """
  fraction = fraction or _VALIDATION_FRACTION
  first = max(0, rounds - _LAST_ROUNDS + 1)
  return Validation(
      'last_ten_evaluations_mean/validation_clients/accuracy',
      (
          f'--validation_fraction={fraction:g}',
          '--eval_every=1',
          f'--eval_from={first}',
      ),
      f'held-out training examples of the training clients ({fraction:g} of'
      ' them); new clients, if the setting has any, take no part',
  )


def validation(flags: Sequence[str], rounds: int | None = None) -> Validation:
  """Returns what a run can be measured on without its test data.

  Args:
    flags: Of `binaries.train`, flag files read in.
    rounds: Of the run; None for those that the flags say.
  """
  values = {
      name: flag.partition('=')[2]
      for name, flag in tables.in_force(flags).items()
  }
  rounds = rounds or num_rounds(flags)
  partition = values.get('--partition')
  if partition is None:
    partition = registry.get(values['--algorithm']).partition
  if 'new_class_clients' in values.get('--protocol', ''):
    return of_new_class_clients(rounds)
  if partition == 'few_round':
    return of_groups(rounds)
  return of_clients(rounds, float(values.get('--validation_fraction') or 0))


def num_rounds(flags: Sequence[str]) -> int:
  """Returns the rounds of a run with these flags."""
  rounds = tables.in_force(flags).get('--rounds', '').partition('=')[2]
  return int(rounds or _DEFAULT_ROUNDS)


@dataclasses.dataclass(frozen=True)
class Search:
  """A search for the hyperparameters of some rows of a table.

  Attributes:
    kind: Which one.
    base: The cells whose hyperparameters are looked for, one a row and setting,
      flag files read in.
    tried: From `candidates`.
    table: What is run.
    scale: The table's scale.
    seeds: Of all runs.
  """

  kind: Kind
  base: Sequence[tables.Cell]
  tried: Sequence[Mapping[str, str]]
  table: tables.Table
  scale: str
  seeds: Sequence[int]

  def rungs(self, cell: tables.Cell) -> list[int]:
    """Returns the rounds of the rungs of a row in a setting, upwards."""
    return _rungs(self.kind, num_rounds(cell.flags))

  def next_cells(
      self, entries: 'Sequence[results.Entry]', rung: int
  ) -> list[tables.Cell]:
    """Returns the runs of a rung.

    Args:
      entries: Of the rung before, if there is one.
      rung: Which one, from 0.
    """
    wanted = set()
    for cell in self.base:
      rungs = self.rungs(cell)
      if rung >= len(rungs):
        continue
      names = [row_name(cell.row, hparams) for hparams in self.tried]
      if rung:
        before = _rung_name(cell.setting, rungs, rung - 1)
        number = max(1, len(names) // _KEPT_SHARE**rung)
        names = _best(entries, before, names, number)
      setting = _rung_name(cell.setting, rungs, rung)
      wanted |= {(setting, name) for name in names}
    return [
        cell
        for cell in tables.cells(self.table, self.scale, seeds=self.seeds)
        if (cell.setting, cell.row) in wanted
    ]

  def choices(self, entries: 'Sequence[results.Entry]') -> list[dict[str, Any]]:
    """Returns what was chosen for every row and setting.

    Args:
      entries: From `results.collect`.

    Returns:
      For each the row, the setting, the hyperparameters, their accuracy on
      validation data in percent, what that is on, how many candidates of the
      last rung it is the best of, how many there were in all, and with all
      numbers of the rungs that they were in, the rows that have diverged in a
      rung, and the flags of the run that would test them. Rows of whose last
      rung no candidate has all its seeds, none of them diverged, are left out.
    """
    found: list[dict[str, Any]] = []
    for cell in self.base:
      rungs = self.rungs(cell)
      last = _rung_name(cell.setting, rungs, len(rungs) - 1)
      by_name = {row_name(cell.row, hparams): hparams for hparams in self.tried}
      names = _best(entries, last, by_name, len(by_name))
      if not names:
        continue
      of_cell = {_rung_name(cell.setting, rungs, i) for i in range(len(rungs))}
      mine = [e for e in entries if e.setting in of_cell and e.row in by_name]
      lacking = {e.row for e in mine if e.missing}
      best = next(e for e in entries if (e.setting, e.row) == (last, names[0]))
      found.append(
          {
              'row': cell.row,
              'setting': cell.setting,
              'hparams': dict(by_name[names[0]]),
              'validation_accuracy': best.mean,
              'validation_on': validation(cell.flags).what,
              'candidates_in_last_rung': len(names),
              'candidates': len(self.tried),
              'candidates_with_numbers': len(by_name.keys() - lacking),
              'diverged': sorted({e.row for e in mine if e.diverged}),
              'seeds': list(best.values),
              'flags': list(with_hparams(cell.flags, by_name[names[0]])),
          }
      )
    return found


def _best(
    entries: 'Sequence[results.Entry]',
    setting: str,
    names: Collection[str],
    number: int,
) -> list[str]:
  """Returns the names of the best rows that have all seeds, the best first.

  Rows of which a run has diverged are left out: what was measured of it are the
  models of some round before.
  """
  complete = [
      entry
      for entry in entries
      if entry.setting == setting
      and entry.row in names
      and entry.mean is not None
      and len(entry.values) == len(entry.states)
      and not entry.diverged
  ]
  complete.sort(key=lambda entry: -(entry.mean or 0))  # Keeps equal ones.
  return [entry.row for entry in complete[:number]]


def _rungs(kind: Kind, rounds: int) -> list[int]:
  if kind != 'halving':
    return [rounds]
  shares = (_KEPT_SHARE**i for i in reversed(range(_NUM_RUNGS)))
  return sorted({max(1, rounds // share) for share in shares})


def _rung_name(setting: str, rungs: Sequence[int], rung: int) -> str:
  if len(rungs) == 1:
    return setting
  return f'{setting} after {rungs[rung]} rounds'


def search(
    base: Sequence[tables.Cell],
    table: tables.Table,
    scale_name: str,
    space: Space,
    kind: Kind,
    budget: int,
) -> Search:
  """Makes the search for the hyperparameters of rows of a table.

  Args:
    base: Cells of the table that are to be improved, flag files read in; those
      of several seeds are one.
    table: The table.
    scale_name: Of the cells.
    space: From `read_space`.
    kind: Of the search.
    budget: As for `candidates`.

  Raises:
    ValueError: If a hyperparameter is unknown to a row's algorithm, a row says
      no algorithm, or the space does not suit the kind.
  """
  tried = candidates(space, kind, budget)
  seeds = tuple(dict.fromkeys(cell.seed for cell in base))
  base = list({(c.setting, c.row): c for c in base[::-1]}.values())[::-1]
  settings: dict[str, tables.Setting] = {}
  rows: dict[str, tables.Row] = {}
  for cell in base:
    if '--algorithm' not in tables.in_force(cell.flags):
      raise ValueError(
          f'Expected --algorithm=NAME among the flags of row {cell.row!r} in'
          f' {cell.setting!r}, found {" ".join(cell.flags)}.'
      )
    flags = [f for f in cell.flags if not f.startswith('--seed=')]
    rungs = _rungs(kind, num_rounds(flags))
    for i, rounds in enumerate(rungs):
      name = _rung_name(cell.setting, rungs, i)
      on = validation(flags, rounds)
      measure = tables.Measure('Validation', on.path)
      settings.setdefault(name, tables.Setting(name, (measure,)))
      for hparams in tried:
        candidate = row_name(cell.row, hparams)
        row = rows.get(candidate) or tables.Row(candidate, (), settings=())
        own = (
            *with_hparams(flags, hparams),
            f'--rounds={rounds}',
            *on.flags,
            '--noselect_best',
            '--select_by=macro',
            '--patience=0',
            '--protocol=none',
        )
        rows[candidate] = dataclasses.replace(
            row,
            setting_flags={**row.setting_flags, name: own},
            settings=(*(row.settings or ()), name),
        )
  kinds = {validation(cell.flags).what for cell in base}
  return Search(
      kind,
      base,
      tried,
      tables.Table(
          name=f'{table.name}_{kind}',
          title=f'A search ({kind}): {table.title}',
          source='ours',
          settings=tuple(settings.values()),
          rows=tuple(rows.values()),
          scales={scale_name: tables.Scale(seeds=seeds)},
          notes=(
              f'Numbers are on {"; or on ".join(sorted(kinds))}. Nothing is'
              ' measured on test data.',
          ),
      ),
      scale_name,
      seeds,
  )
