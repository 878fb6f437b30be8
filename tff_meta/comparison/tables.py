"""What a published table consists of, and the runs that it takes.

A table has rows (methods) and settings (data sets, numbers of clients, kinds of
client). A row in a setting with one seed is a cell: one run of
`binaries.train`, whose flags are those of the table, the setting, the row and
the scale, in this order, so that later ones win. A run yields one or more
measures, each a number of the run's summary.json with its published
counterpart.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any

from tff_meta import catalog
from tff_meta import spelling

SCALES = ('smoke', 'cpu', 'paper')
SEED_PREFIX = 'seed_'  # Of the folders of a row's runs.
PERCENT = 100
# Flags of `binaries.train` that are true or false.
SWITCHES = (
    'allow_mixed_hosts',
    'curve',
    'deal_test_images',
    'describe',
    'download',
    'eval_new_clients',
    'list',
    'mixed_precision',
    'nvar',
    'references',
    'restrict_f1_to_client_labels',
    'select_best',
    'stratify',
)
_VALUES = dict.fromkeys(('', 'true', 't', '1'), 'true') | dict.fromkeys(
    ('false', 'f', '0'), 'false'
)
# What is measured on the way, which changes nothing of the last model.
_ON_THE_WAY = (
    '--eval_every',
    '--eval_from',
    '--eval_new_clients',
    '--validation_clients',
    '--validation_groups',
)
# Parts of summary.json that do not depend on it.
_WITHOUT_THE_WAY = (
    'client_bytes_per_round',
    'evaluation',
    'seconds_per_round_median',
)


@dataclasses.dataclass(frozen=True)
class Published:
  """A number as a paper prints it.

  Attributes:
    value: In percent.
    spread: What the paper prints behind it (the table says what that is), in
      percentage points, or None.
  """

  value: float
  spread: float | None = None


@dataclasses.dataclass(frozen=True)
class Measure:
  """One number of a run.

  Attributes:
    name: What it is called in tables.
    path: Where it is in summary.json: keys joined by `/`; keys may hold a `/`
      themselves, see `read`.
    spread_path: Where the spread is that the paper prints beside it (also a
      share), or None.
    spread_name: What that spread is.
    lower_is_better: Whether the least number is the best one.
    factor: Of what summary.json has, and of the spread, to what is shown: that
      of shares, 0..1, to percent. With another one the name says the unit.
  """

  name: str
  path: str
  spread_path: str | None = None
  spread_name: str = 'std over clients'
  lower_is_better: bool = False
  factor: float = PERCENT


# Ends the name of a measure that is no percentage.
TIMES_100 = ' x 100'
# What accuracy does not tell: name -> what it is called in tables, its key in
# the evaluation of a protocol in summary.json, and whether less is better.
FURTHER = {
    'among_own': ('among own classes', 'accuracy_among_own_mean', False),
    'worst_decile': ('worst decile', 'accuracy_worst_decile', False),
    'gini': ('Gini', 'accuracy_gini', True),
    'hurt': ('hurt', 'share_hurt', True),
    'nll': ('NLL' + TIMES_100, 'nll_mean', True),
    'brier': ('Brier' + TIMES_100, 'brier_mean', True),
    'ece': ('ECE', 'ece_mean', True),
    'worst_decile_before': (
        'worst decile before',
        'accuracy_before_worst_decile',
        False,
    ),
    'gini_before': ('Gini before', 'accuracy_before_gini', True),
    'nll_before': ('NLL before' + TIMES_100, 'nll_before_mean', True),
    'brier_before': ('Brier before' + TIMES_100, 'brier_before_mean', True),
    'ece_before': ('ECE before', 'ece_before_mean', True),
}


def further_measures(
    names: Sequence[str], at: str, of: str = ''
) -> tuple[Measure, ...]:
  """Returns what else is told of a protocol.

  Args:
    names: Keys of `FURTHER`.
    at: Where the protocol is, such as `evaluation/known_clients`.
    of: What stands before the names of the measures.

  Raises:
    ValueError: If a name is unknown.
  """
  _check_known('measure', names, FURTHER)
  return tuple(
      Measure(f'{of}{title}', f'{at}/{key}', lower_is_better=is_lower)
      for title, key, is_lower in (FURTHER[name] for name in names)
  )


def _place(at: str) -> str:
  """Returns what a place of `further_measures` is called in a table."""
  section, _, place = at.partition('/')
  protocol, _, reference = place.partition('/references/')
  words = [protocol.replace('_', ' ')]
  if section == 'evaluation_best':
    words.append('best round')
  if reference:
    words.append(reference.replace('_', ' '))
  return ', '.join(words)


class _Checked:
  """Refuses text or one thing where a tuple is meant."""

  def __post_init__(self):
    for field in dataclasses.fields(self):  # type: ignore[arg-type]
      value = getattr(self, field.name)
      if field.name == 'setting_flags':
        found = list(value.values())
      elif str(field.type).startswith('tuple') and value is not None:
        found = [value]
      else:
        continue
      for part in found:
        if not isinstance(part, tuple | list):
          raise ValueError(
              f'Expected `{field.name}` of a {type(self).__name__} to be a'
              f' tuple, found {part!r}. Tip: a tuple of one ends with a comma,'
              " ('--rounds=20',)."
          )


@dataclasses.dataclass(frozen=True)
class Setting(_Checked):
  """A group of columns: the same clients for every row.

  Attributes:
    name: What it is called in tables.
    measures: What is read of its runs, the most important first, which is in
      percent.
    flags: Of `binaries.train`, added for this setting.
  """

  name: str
  measures: tuple[Measure, ...]
  flags: tuple[str, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    if self.measures and self.measures[0].factor != PERCENT:
      raise ValueError(
          f'Expected the first measure of {self.name!r} in percent, found'
          f' {self.measures[0]}.'
      )


@dataclasses.dataclass(frozen=True)
class Row(_Checked):
  """A method.

  Attributes:
    name: What it is called in tables.
    flags: Of `binaries.train`, added for this row.
    published: Name of a setting -> name of a measure -> what the paper prints.
    setting_flags: Name of a setting -> flags that the row has there only, such
      as a learning rate of its own.
    settings: Names of the settings that it is run in; None for all.
  """

  name: str
  flags: tuple[str, ...]
  published: Mapping[str, Mapping[str, Published]] = dataclasses.field(
      default_factory=dict
  )
  setting_flags: Mapping[str, tuple[str, ...]] = dataclasses.field(
      default_factory=dict
  )
  settings: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Scale(_Checked):
  """How much of a table is run.

  Attributes:
    seeds: Of the runs.
    flags: Of `binaries.train`, added last.
    changes: What differs from the published experiment, for readers; empty for
      nothing.
    rows: Names of the rows that are run; None for all.
    settings: Names of the settings that are run; None for all.
    hours: On two cores, of all runs, measured or extrapolated from one seed;
      None if nobody has measured any.
  """

  seeds: tuple[int, ...]
  flags: tuple[str, ...] = ()
  changes: str = ''
  rows: tuple[str, ...] | None = None
  settings: tuple[str, ...] | None = None
  hours: float | None = None


@dataclasses.dataclass(frozen=True)
class Table(_Checked):
  """A published table, or a comparison of ours.

  Attributes:
    name: What `--experiment` takes.
    title: One line.
    source: Paper and table; `'ours'` if nobody published it.
    settings: Groups of columns.
    rows: Methods.
    scales: Name (of `SCALES`) -> how much of it is run.
    flags: Of `binaries.train`, for all cells.
    spread: What the spread of published numbers is, e.g. `'standard error over
      3 seeds'`; empty if they have none.
    notes: Sentences for readers of the report.
    reference: Name of the row that all others are compared with, the paper's
      own system; None for the first row.

  Raises:
    ValueError: If names repeat, something names a row, a setting, a measure
      or a scale that is not there, or what should be a tuple is none.
  """

  name: str
  title: str
  source: str
  settings: tuple[Setting, ...]
  rows: tuple[Row, ...]
  scales: Mapping[str, Scale]
  flags: tuple[str, ...] = ()
  spread: str = ''
  notes: tuple[str, ...] = ()
  reference: str | None = None

  def __post_init__(self):
    super().__post_init__()
    settings = _check_unique('setting', [s.name for s in self.settings])
    rows = _check_unique('row', [r.name for r in self.rows])
    measures = {s.name: {m.name for m in s.measures} for s in self.settings}
    _check_known('scale', self.scales, SCALES)
    reference = () if self.reference is None else (self.reference,)
    _check_known('row', reference, rows)
    for scale in self.scales.values():
      _check_known('row', scale.rows or (), rows)
      _check_known('setting', scale.settings or (), settings)
    for row in self.rows:
      _check_known('setting', row.published, settings)
      _check_known('setting', row.setting_flags, settings)
      _check_known('setting', row.settings or (), settings)
      for setting, published in row.published.items():
        _check_known('measure', published, measures[setting])

  def setting(self, name: str) -> Setting:
    """Returns the setting of a name."""
    return next(s for s in self.settings if s.name == name)

  def with_further_measures(self, names: Sequence[str]) -> 'Table':
    """Returns the table with more measures of the protocols that it has.

    Args:
      names: Keys of `FURTHER`.

    Raises:
      ValueError: If a name is unknown.
    """
    settings = []
    for setting in self.settings:
      places = dict.fromkeys(
          measure.path.rpartition('/')[0]
          for measure in setting.measures
          if measure.path.startswith(('evaluation/', 'evaluation_best/'))
      )
      paths = [measure.path for measure in setting.measures]
      more = [
          measure
          for at in places
          for measure in further_measures(
              names, at, f'{_place(at)}: ' if len(places) > 1 else ''
          )
          if measure.path not in paths
      ]
      settings.append(
          dataclasses.replace(setting, measures=(*setting.measures, *more))
      )
    return dataclasses.replace(self, settings=tuple(settings))

  @property
  def default_scale(self) -> str:
    """The scale `cpu`, or the first one of a table without it."""
    return 'cpu' if 'cpu' in self.scales else next(iter(self.scales), 'cpu')

  def scale(self, name: str) -> Scale:
    """Returns the scale of a name.

    Raises:
      ValueError: If the table has none of that name.
    """
    if name not in self.scales:
      raise ValueError(
          f'Expected a scale of {self.name!r}: {", ".join(self.scales)}; found'
          f' {name!r}.'
      )
    return self.scales[name]


# Those of the papers are registered by `binaries.experiments`.
TABLES = catalog.Catalog[Table]('experiment', {})


def register_table(table: Table) -> None:
  """Adds a table, with the name that `--experiment` takes.

  Raises:
    ValueError: If there is one of its name, or that is no name.
  """
  TABLES.register(table.name, table)


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run.

  Attributes:
    row: Name of its row.
    setting: Name of its setting.
    seed: Its seed.
    flags: Of `binaries.train`, without `--output_dir`.
  """

  row: str
  setting: str
  seed: int
  flags: tuple[str, ...]

  @property
  def folder(self) -> str:
    """Its place in a comparison's directory, e.g. `new/fed_avg/seed_1`."""
    seed = f'{SEED_PREFIX}{self.seed}'
    return f'{_slug(self.setting)}/{_slug(self.row)}/{seed}'


def cells(
    table: Table,
    scale_name: str,
    *,
    rows: Sequence[str] = (),
    settings: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[Cell]:
  """Returns the runs of a table, all of one seed before the next seed.

  Args:
    table: The table.
    scale_name: One of its scales.
    rows: Names of rows; by default those of the scale.
    settings: Names of settings; by default those of the scale.
    seeds: By default those of the scale.

  Raises:
    ValueError: If a name is unknown.
  """
  scale = table.scale(scale_name)
  all_rows = [r.name for r in table.rows]
  all_settings = [s.name for s in table.settings]
  _check_known('row', rows, all_rows)
  _check_known('setting', settings, all_settings)
  rows = rows or scale.rows or all_rows
  settings = settings or scale.settings or all_settings
  return [
      Cell(
          row.name, setting.name, seed, _flags(table, setting, row, scale, seed)
      )
      for seed in dict.fromkeys(seeds or scale.seeds)
      for setting, row in _pairs(table)
      if row.name in rows and setting.name in settings
  ]


def in_force(flags: Sequence[str]) -> dict[str, str]:
  """Returns what flags mean: the name of each -> how it stands last.

  Two cells whose flags are the same in this sense are the same run, in whatever
  order a table has put them together, and whether it says `--curve`,
  `--curve=true` or `--curve=1`.

  Args:
    flags: Of `binaries.train`, flag files read in.
  """
  last = {}
  for flag in flags:
    name, equals, value = flag.partition('=')
    if not equals and name.removeprefix('--no') in SWITCHES:
      name, value = name.replace('--no', '--', 1), 'false'
    if name.removeprefix('--') in SWITCHES:
      flag = f'{name}={_VALUES.get(value.lower(), value)}'
    last[name] = flag
  return last


def of_the_end(setting: Setting, flags: Mapping[str, str]) -> dict[str, str]:
  """Returns flags without those on which no number of a setting depends.

  That is those of evaluations on the way where all measures are of the last
  model, of rounds' time (without evaluations) or bytes, and training is not
  ended by what is measured.

  Args:
    setting: The setting.
    flags: From `in_force`.
  """
  depends = '--patience' in flags or any(
      measure.path.partition('/')[0] not in _WITHOUT_THE_WAY
      for measure in setting.measures
  )
  ignored = () if depends else _ON_THE_WAY
  return {name: flag for name, flag in flags.items() if name not in ignored}


def read(summary: Any, path: str) -> float | None:
  """Returns a number of summary.json, None if the run did not report it.

  Args:
    summary: The file's content.
    path: Keys joined by `/`, or places in a list. Where a key itself holds a
      `/`, the longest key that fits is taken.
  """
  if isinstance(summary, list):
    summary = {str(i): value for i, value in enumerate(summary)}
  if not isinstance(summary, Mapping):
    return None
  if path in summary:
    value = summary[path]
    # No truth value, NaN or whole number that is too large to calculate with.
    is_number = type(value) in (int, float) and abs(value) < 1e12
    return value if is_number else None
  parts = path.split('/')
  for end in range(len(parts) - 1, 0, -1):
    key = '/'.join(parts[:end])
    if key in summary:
      return read(summary[key], '/'.join(parts[end:]))
  return None


def _pairs(table: Table) -> Iterator[tuple[Setting, Row]]:
  for setting in table.settings:
    for row in table.rows:
      if row.settings is None or setting.name in row.settings:
        yield setting, row


def _flags(table, setting, row, scale, seed) -> tuple[str, ...]:
  return (
      *table.flags,
      *setting.flags,
      *row.flags,
      *row.setting_flags.get(setting.name, ()),
      *scale.flags,
      f'--seed={seed}',
  )


def _slug(name: str) -> str:
  name = name.lower().replace('=-', '=minus ')  # A negative hyperparameter.
  return re.sub(r'[^\w.]+', '_', name).strip('_')


def _check_unique(what: str, names: Sequence[str]) -> Sequence[str]:
  of_slug: dict[str, str] = {}
  for name in names:
    slug = _slug(name)  # It is the name of a directory.
    if not slug.strip('.'):
      raise ValueError(
          f'Expected each {what} to have a name with letters or digits, found'
          f' {name!r}.'
      )
    if slug in of_slug:
      raise ValueError(
          f'Expected each {what} to have letters or digits of its own, found'
          f' {of_slug[slug]!r} and {name!r}: folders of both would be called'
          f' {slug}.'
      )
    of_slug[slug] = name
  return names


def _check_known(what, names, known) -> None:
  for name in names:
    if name not in known:
      raise ValueError(
          f'Expected a {what} of {", ".join(known)}; found'
          f' {name!r}.{spelling.tip(name, known)}'
      )
