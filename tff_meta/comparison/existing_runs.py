"""A report of runs that exist, wherever they are, and of what differs."""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

from tff_meta import plain_files
from tff_meta import spelling
from tff_meta.comparison import figures
from tff_meta.comparison import page
from tff_meta.comparison import progress as progress_lib
from tff_meta.comparison import report
from tff_meta.comparison import results
from tff_meta.comparison import run_records
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import metric_writers
from tff_meta.training import protocol_names
from tff_meta.training import run_directory
from tff_meta.training import sealed_json

# In what runs may differ whose mean is taken.
_OF_A_RUN = ('seed', 'data_dir')
# Parts of a config.json -> what they are, in this order; all else are settings.
_PARTS = {
    'data': 'Data',
    'git_commit': 'Code',
    'code_of_rounds': 'Code',
    'versions': 'Environment',
    'environment': 'Environment',
    'platform': 'Environment',
}
# Part -> what begins the field that tells whether it is the same.
_TOLD_BY = {
    'Settings': 'config.',
    'Data': 'data.fingerprint',
    'Code': 'git_commit',
    'Environment': 'versions.',
}
_ORDER = tuple(dict.fromkeys(['Settings', *_PARTS.values()]))
_SHOWN = 100  # Characters of a value, which may be anything.


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run.

  Attributes:
    number: What it is called, from 1.
    path: Its directory.
    record: Its config.json, the configuration as this version of the library
      writes it where it can be read.
    summary: Its summary.json.
  """

  number: int
  path: pathlib.Path
  record: Mapping[str, Any]
  summary: Mapping[str, Any]

  @property
  def algorithm(self) -> str:
    """What was trained."""
    return str(self.summary.get('algorithm'))

  @property
  def dataset(self) -> str:
    """On what."""
    return str(self.summary.get('dataset'))

  @property
  def seed(self) -> int:
    """Of everything random."""
    return self.summary['seed']

  @property
  def rounds(self) -> int:
    """How many it has done."""
    return self.summary['rounds']

  def hours(self) -> float | None:
    """Returns those of its rounds, None for a copy without them."""
    try:
      seconds = metric_writers.total_seconds(self.path / 'timings.csv')
    except FileNotFoundError:
      return None
    return seconds / 3600


def read(paths: Sequence[str]) -> list[Run]:
  """Reads runs; changes nothing.

  Args:
    paths: Their directories.

  Raises:
    OSError: If a file of a run cannot be read.
    ValueError: If a directory comes twice, or has no run that is finished and
      was evaluated.
  """
  runs: list[Run] = []
  for number, path in enumerate(paths, 1):
    directory = run_directory.RunDirectory(path)
    _check_is_there(directory.root)
    record = directory.read_config()
    summary = None
    with contextlib.suppress(FileNotFoundError):
      summary = sealed_json.read(directory.summary, directory.config)
    if record is None or summary is None:
      lacking = directory.config if record is None else directory.summary
      raise ValueError(
          f'Expected a finished run in {path}, found no {lacking.name} there.'
          f'{_tip(directory, lacking)}'
      )
    if any(directory.root.samefile(run.path) for run in runs):
      raise ValueError(f'Expected each run once, found {path} twice.')
    _check(path, record, summary)
    record |= {'config': run_records.as_of_now(record['config'])}
    runs.append(Run(number, directory.root, record, summary))
  return runs


def _check_is_there(root: pathlib.Path) -> None:
  """Raises if there is no such directory, with a name that may be meant."""
  if not root.is_dir():
    others = [p.name for p in root.parent.glob('*') if p.is_dir()]
    raise ValueError(
        f'Expected a finished run in {root}, found'
        f' {plain_files.describe(root)}.{spelling.tip(root.name, others)}'
    )


def _tip(directory: run_directory.RunDirectory, lacking: pathlib.Path) -> str:
  """Returns what to do about a directory that lacks a file of a run."""
  if runner.is_comparison(directory.root):
    return ' Tip: it is a comparison, whose runs are in folders called run.'
  if lacking == directory.summary:
    return ' Tip: the command that trains it goes on to its end.'
  return ' Tip: it is the --output_dir of binaries.train.'


def _check(path, record, summary) -> None:
  """Raises a ValueError if files are not those of an evaluated run."""
  for found in (record.get('config'), summary.get('evaluation')):
    if not found or not isinstance(found, Mapping):
      raise ValueError(
          f'Expected the configuration and an evaluation of a run in {path},'
          ' found none. Tip: the command that trained it goes on with another'
          ' --protocol, `fit` with `protocols`; what binaries.evaluate found is'
          ' not shown.'
      )
  for name in ('seed', 'rounds'):
    if type(summary.get(name)) is not int:
      raise ValueError(
          f'Expected `{name}` in summary.json of {path} to be a whole number,'
          f' found {summary.get(name)!r}.'
      )


def differences(runs: Sequence[Run]) -> dict[str, dict[int, Any]]:
  """Returns what is recorded of the runs and not the same in all of them.

  Args:
    runs: From `read`.

  Returns:
    Field of config.json (`rounds_done` is of summary.json) -> number of a run
    -> value, without runs that have no such field.
  """
  found = run_records.differences(
      [dict(run.record) | {'rounds_done': run.rounds} for run in runs]
  )
  return {
      field: {runs[i].number: value for i, value in found[field].items()}
      for field in sorted(found, key=lambda field: _ORDER.index(_part(field)))
  }


def _part(field: str) -> str:
  """Returns which of `_ORDER` a field is of."""
  return _PARTS.get(field.partition('.')[0], 'Settings')


@dataclasses.dataclass(frozen=True)
class RunsReport(report.Report):
  """A report of runs, a section a data set and a row a method.

  Runs that differ in nothing but their seed, and in what comes of it, are the
  seeds of one row.

  Attributes:
    runs: From `read`.
    command: What makes the report again.
    further: Which of `tables.FURTHER` are shown, too.
  """

  runs: Sequence[Run]
  command: str
  further: Sequence[str] = ()
  title = 'Runs side by side'

  def __post_init__(self):
    tables.further_measures(self.further, '')  # Now, not when it is written.

  def header(self) -> list[str]:
    """Returns sentences on what is the same in all runs."""
    sentences = [
        'Runs as they are: nothing was trained for this report.',
        f'{report.NUMBERS}. Behind a method stand the numbers of its runs.'
        ' Hours are those of the rounds.',
    ]
    counts = collections.Counter(map(_part, differences(self.runs)))
    for part in _ORDER:
      what = 'the same in all runs'
      if counts[part]:
        what = f'not the same in all runs, see below (fields: {counts[part]})'
      elif not self._is_recorded(_TOLD_BY[part]):
        what = 'not recorded'
      sentences.append(f'{part}: {what}.')
    unknown = [
        str(run.number)
        for run in self.runs
        if any(
            commit == run_records.UNKNOWN or commit.endswith('-dirty')
            for commit in run_records.commits(run.record).values()
        )
    ]
    if unknown:
      sentences.append(
          f'Attention: the code of {", ".join(unknown)} is not exactly known:'
          ' no commit is recorded, or one with changes.'
      )
    sentences += [
        'Attention: more than one version of the code has made'
        f' {run.number}: {run_records.code(run.record)}.'
        for run in self.runs
        if len(run_records.commits(run.record)) > 1
    ]
    sentences += self._mixed_rows()
    fingerprints = collections.defaultdict(list)
    for run in self.runs:
      fingerprint = run_records.fingerprint(run.record)
      fingerprints[run.dataset, run.seed].append(fingerprint)
    for (dataset, seed), found in fingerprints.items():
      same = run_records.same_data(found)
      of = f'runs on {dataset} with seed {seed} had'
      if same is None:
        sentences.append(f'Whether {of} the same data is not recorded.')
      elif not same:
        sentences.append(f'Attention: {of} different data.')
    return sentences

  def _is_recorded(self, beginning: str) -> bool:
    """Returns whether a run has a field, given how its name begins."""
    return any(
        field.startswith(beginning) and value is not None
        for run in self.runs
        for field, value in run_records.flatten(run.record)
    )

  def _mixed_rows(self) -> list[str]:
    """Returns a sentence on every row whose mean is over several codes."""
    sentences = []
    for setting in self._settings():
      for row, runs in self._rows(setting).items():
        found = run_records.differences(
            [
                {n: run.record.get(n) for n in _PARTS if n != 'data'}
                for run in runs
            ]
        )
        parts = dict.fromkeys(_part(field) for field in found)
        if parts:
          sentences.append(
              f'Attention: the seeds of {row} on {setting} are runs of'
              f' different {" and ".join(parts).lower()}, so that its mean and'
              ' interval are not of the seed alone.'
          )
    return sentences

  def notes(self) -> list[tuple[str, Sequence[str]]]:
    """Returns which run is where, and what differs."""
    where = [
        f'{run.number}: {run.path} ({run.algorithm} on {run.dataset}, seed'
        f' {run.seed}, {run.rounds} rounds)'
        for run in self.runs
    ]
    differing = []
    for field, values in differences(self.runs).items():
      numbers = collections.defaultdict(list)
      for run in self.runs:
        text = 'nothing'
        if run.number in values:
          text = json.dumps(values[run.number])[:_SHOWN]
        numbers[text].append(str(run.number))
      shown = (f'{text} in {", ".join(of)}' for text, of in numbers.items())
      differing.append(f'{field}: {"; ".join(shown)}')
    return [('Runs', where), ('What differs', differing)]

  def about(self) -> dict[str, Any]:
    """Returns where runs are, and what differs."""
    return {
        'runs': {run.number: str(run.path) for run in self.runs},
        'differences': differences(self.runs),
    }

  @functools.cached_property
  def entries(  # type: ignore[override]  # Nobody sets it.
      self,
  ) -> list[results.Entry]:
    """All numbers."""
    entries: list[results.Entry] = []
    for setting in self._settings().values():
      for row, runs in self._rows(setting.name).items():
        hours = [run.hours() for run in runs]
        entries += results.of_row(
            tables.Row(row, flags=()),
            setting,
            {run.seed: runner.Outcome('finished') for run in runs},
            {run.seed: run.summary for run in runs},
            None if None in hours else sum(h for h in hours if h),
            {run.seed: run.path for run in runs},
        )
    return entries

  def pictures(self, root: pathlib.Path, setting: str) -> list[figures.Picture]:
    """Draws the runs on a data set."""
    del root
    rows = self._rows(setting)
    return figures.of_runs(
        {row: [run.path for run in runs] for row, runs in rows.items()},
        self._settings()[setting],
        self.row_styles(),
    )

  def progress(
      self, root: pathlib.Path, setting: str
  ) -> progress_lib.Progress | None:
    """Returns how fast the runs on a data set are."""
    del root
    rows = self._rows(setting)
    return progress_lib.of_runs(
        {row: [run.path for run in runs] for row, runs in rows.items()},
        self._settings()[setting],
    )

  def run_links(
      self, root: pathlib.Path, setting: str, row: str
  ) -> list[page.RunLink]:
    """Returns the runs of a row; their commands are not recorded."""
    return [
        page.RunLink(
            run.seed,
            f'{run.rounds} rounds, run {run.number}',
            pathlib.Path(os.path.relpath(run.path, root)).as_posix() + '/',
            '',
        )
        for run in self._rows(setting)[row]
    ]

  def _settings(self) -> dict[str, tables.Setting]:
    """Returns data set -> what was measured on it."""
    measures: dict[str, dict[str, tables.Measure]] = collections.defaultdict(
        dict
    )
    for run in self.runs:
      for part, which in (('evaluation', ''), ('evaluation_best', ', best')):
        for protocol in run.summary.get(part) or {}:
          is_of_groups = protocol in protocol_names.OF_GROUPS
          unit = 'groups' if is_of_groups else 'clients'
          at = f'{part}/{protocol}/accuracy'
          for measure in (
              tables.Measure(
                  f'{protocol}{which}, mean',
                  f'{at}_mean',
                  f'{at}_std',
                  f'std over {unit}',
              ),
              tables.Measure(f'{protocol}{which}, micro', f'{at}_micro'),
              *tables.further_measures(
                  self.further,
                  f'{part}/{protocol}',
                  f'{protocol}{which}, ',
              ),
          ):
            measures[run.dataset][measure.name] = measure
    return {
        name: tables.Setting(name, tuple(found.values()))
        for name, found in measures.items()
    }

  def _rows(self, dataset: str) -> dict[str, list[Run]]:
    """Returns name of a row -> its runs, one a seed, on a data set."""
    groups: list[list[Run]] = []
    for run in self.runs:
      if run.dataset != dataset:
        continue
      for group in groups:
        seeds = [other.seed for other in group]
        if run.seed not in seeds and _method(run) == _method(group[0]):
          group.append(run)
          break
      else:
        groups.append([run])
    return {
        f'{group[0].algorithm}'
        f' ({", ".join(str(run.number) for run in group)})': group
        for group in groups
    }


def _method(run: Run) -> dict[str, Any]:
  """Returns what runs have in common that differ in their seed."""
  config = run.record['config']
  return {k: v for k, v in config.items() if k not in _OF_A_RUN}
