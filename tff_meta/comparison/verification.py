"""Whether runs done again have the very numbers of runs that were kept.

What the training program measures is compared bit by bit: the evaluations in
summary.json, the tables of clients or groups, and the rounds of metrics.csv
that were kept. Why numbers differ nobody can know for certain; what differs in
the records of both runs is what it may be.
"""

from collections.abc import Iterator, Mapping, Sequence
import csv
import dataclasses
import io
import json
import pathlib
from typing import Any

from tff_meta import aggregation
from tff_meta import plain_files
from tff_meta.comparison import results
from tff_meta.comparison import run_records
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import metric_writers
from tff_meta.training import sealed_json

# Entries of summary.json that are results.
_RESULTS = (
    'rounds',
    'ended_by_patience',
    'best_round',
    'best_round_validation',
    'last_ten_evaluations_mean',
    'evaluation',
    'evaluation_best',
)
# Part of config.json -> what it is.
_CAUSES = {
    'data': 'data',
    'config': 'settings',
    'git_commit': 'code',
    'versions': 'versions',
    'environment': 'threads and kernels',
    'platform': 'platform',
}
# Settings that change no number that both runs have.
_NO_CAUSE = (
    'config.checkpoint_every',
    'config.data_dir',
    'config.nvar',
    'config.plugins',
    'config.reference_hparams',
    'config.references',
)
_SHOWN = 3  # Numbers that are named; the rest are counted.


@dataclasses.dataclass(frozen=True)
class Verified:
  """What came out when a run was done again.

  Attributes:
    cell: Which one.
    num_numbers: How many numbers both have.
    differences: What is not the same, a line a thing; empty if all is.
    causes: What is not the same in the records of the two runs.
    unrecorded: What the older record does not tell.
    problem: Why nothing can be said; empty if something can.
  """

  cell: tables.Cell
  num_numbers: int = 0
  differences: Sequence[str] = ()
  causes: Sequence[str] = ()
  unrecorded: Sequence[str] = ()
  problem: str = ''

  @property
  def is_identical(self) -> bool:
    """Whether there are numbers, and none differs."""
    return bool(self.num_numbers) and not self.differences and not self.problem

  def lines(self) -> list[str]:
    """Returns what is to be said, the verdict first."""
    name = f'{self.cell.setting}, {self.cell.row}, seed {self.cell.seed}'
    if self.problem:
      return [f'{name}: not compared: {self.problem}']
    if self.is_identical:
      lines = [f'{name}: identical, all {self.num_numbers} numbers.']
      also = 'Not the same, without any effect on them'
    else:
      lines = [f'{name}: different.', *(f'  {d}' for d in self.differences)]
      also = 'Why it may be'
    lines += [f'  {also}: {cause}' for cause in self.causes]
    if not self.is_identical and not self.causes:
      lines.append('  Nothing that both records tell is different.')
    if self.unrecorded:
      lines.append(
          f'  Not recorded at that time: {", ".join(self.unrecorded)}.'
      )
    return lines

  def to_json(self) -> dict[str, Any]:
    """Returns all of it for a JSON file."""
    return {
        'setting': self.cell.setting,
        'row': self.cell.row,
        'seed': self.cell.seed,
        'identical': self.is_identical,
        'num_numbers': self.num_numbers,
        'differences': list(self.differences),
        'causes': list(self.causes),
        'unrecorded': list(self.unrecorded),
        'problem': self.problem,
    }


def read_claim(kept: pathlib.Path) -> tuple[str, str]:
  """Returns the experiment and the scale of a kept comparison.

  Raises:
    ComparisonError: If the directory holds none, or a search.
  """
  try:
    claim = sealed_json.read(kept / runner.CLAIM)
    found = str(claim['experiment']), str(claim['scale'])
  except (OSError, KeyError):
    raise runner.ComparisonError(
        f'Expected a comparison of a table in {kept}, found no'
        f' {runner.CLAIM} that names one. Tip: --keep makes such directories,'
        ' and so does a comparison itself; those of this library are in'
        ' results.'
    ) from None
  if 'search' in claim:
    raise runner.ComparisonError(
        f'Expected a comparison of a table in {kept}, found a search'
        f' (--sweep of {claim.get("sweep")}), whose runs measure nothing on'
        ' test data.'
    )
  return found


def kept_cells(
    kept: pathlib.Path, table: tables.Table, scale_name: str
) -> list[tables.Cell]:
  """Returns the finished cells of a kept comparison, with their own flags.

  Args:
    kept: Its directory.
    table: Its table, as it is now.
    scale_name: Its scale.
  """
  found = []
  for cell in tables.cells(
      table,
      scale_name,
      rows=[row.name for row in table.rows],
      settings=[setting.name for setting in table.settings],
      seeds=runner.seeds(kept),
  ):
    outcome = runner.CellFolder(kept, cell).outcome()
    if outcome.state == 'finished':
      found.append(dataclasses.replace(cell, flags=outcome.flags))
  return found


def verify(
    kept: pathlib.Path, again: pathlib.Path, setting: tables.Setting, cell
) -> Verified:
  """Compares a run with the one that was kept.

  Args:
    kept: Directory of the kept comparison.
    again: That of the comparison in which the cell was run again.
    setting: The cell's, whose measures are named first.
    cell: The cell.
  """
  folder = runner.CellFolder(again, cell)
  outcome = folder.outcome()
  if outcome.state != 'finished':
    problem = f'the run is {outcome.state} {outcome.problem}'.rstrip()
    return Verified(cell, problem=problem)
  old, new = runner.CellFolder(kept, cell).run, folder.run
  summaries = [results.read_json(run / 'summary.json') for run in (old, new)]
  records = [results.read_json(run / 'config.json') for run in (old, new)]
  for run, summary in zip((old, new), summaries, strict=True):
    if not summary:
      problem = f'summary.json of {run} is missing or unreadable'
      return Verified(cell, problem=problem)
  try:
    results.read_metrics(old)  # If it is cut, what is left may be identical.
    counts, differences = zip(
        _compare_summaries(summaries[0], summaries[1], setting),
        *(
            _compare_tables(old, new, name)
            for name in _kept_tables(old, summaries[0])
        ),
        strict=True,
    )
  except (OSError, ValueError) as error:
    return Verified(cell, problem=str(error))
  causes, unrecorded = _causes(*records)
  found = [line for lines in differences for line in lines]
  if found:
    causes = [*_noise(records[1]), *causes]
  return Verified(cell, sum(counts), found, causes, unrecorded)


def _compare_summaries(old, new, setting) -> tuple[int, list[str]]:
  """Returns how many numbers both have, and which of them differ."""
  before, after = (
      {
          name: value
          for name, value in run_records.flatten(summary)
          if name.partition('.')[0] in _RESULTS
      }
      for summary in (old, new)
  )
  # Older runs measured references, too, which cells do not any more.
  shared = [name for name in before if name in after]
  lost = [n for n in before if n not in after and '.references.' not in n]
  wrong = [name for name in shared if before[name] != after[name]]
  lines = []
  for measure in setting.measures:
    one, other = (tables.read(summary, measure.path) for summary in (old, new))
    if one is not None and one != other:  # Older runs have fewer measures.
      lines.append(f'{measure.name}: {_change(one, other)}')
  lines += [
      f'{name}: {json.dumps(before[name])[:40]} ->'
      f' {json.dumps(after[name])[:40]}'
      for name in wrong[:_SHOWN]
  ]
  if lost:
    lines.append(
        f'{len(lost)} numbers of summary.json are not there, as {lost[0]}'
    )
  if len(wrong) > _SHOWN:
    lines.append(f'and {len(wrong) - _SHOWN} more numbers of summary.json')
  return len(shared), lines


def _change(one: float | None, other: float | None) -> str:
  """Returns two shares as percent, with their difference in full."""
  if one is None or other is None:
    return f'{one} -> {other}'
  return f'{100 * one:.4f} -> {100 * other:.4f} ({100 * (other - one):+.3g})'


def _kept_tables(run: pathlib.Path, summary) -> list[str]:
  """Returns the tables of a run, those that are lost, too."""
  files = summary.get('files')
  named = files if isinstance(files, Mapping) else {}
  names = {*named, *(path.name for path in run.glob('*.csv'))}
  return sorted(n for n in names if n.endswith('.csv') and n != 'timings.csv')


def _compare_tables(old, new, name) -> tuple[int, list[str]]:
  """Returns how many numbers of a table both have, and what differs."""
  before, after = (_read_rows(run, name) for run in (old, new))
  lacking = [key for key in before if key not in after]
  lines = []
  if lacking:
    lines.append(f'{name}: {len(lacking)} rows are not there, as {lacking[0]}')
  columns, found = (next(iter(rows.values()), {}) for rows in (before, after))
  lost = [column for column in columns if column not in found]
  if lost:  # What the new run alone has, later versions measure.
    lines.append(f'{name}: {len(lost)} columns are not there, as {lost[0]}')
  count = num_wrong = 0
  largest = ('', 0.0)
  for key in before.keys() & after.keys():
    for column in before[key].keys() & after[key].keys():
      one, other = before[key][column], after[key][column]
      count += bool(one or other)
      if one != other:
        num_wrong += 1
        largest = max(
            largest,
            (f'{column} of {key}', _apart(one, other)),
            key=lambda pair: pair[1],
        )
  if num_wrong:
    place, apart = largest
    at = f', by at most {apart:.3g} ({place})' if place else ''
    lines.append(f'{name}: {num_wrong} of {count} numbers differ{at}')
  return count, lines


def _apart(one: str, other: str) -> float:
  """Returns how far two numbers are from each other; 0 if one is none."""
  try:
    return abs(float(one) - float(other))
  except ValueError:
    return 0.0


def _read_rows(run: pathlib.Path, name: str) -> dict[str, dict[str, str]]:
  """Returns first column -> the other columns of a table that is unharmed."""
  content = plain_files.read_bytes(run / name, plain_files.MAX_TABLE_BYTES)
  sha256 = results.read_sha256(run, name)
  metric_writers.check_sha256(run / name, content, sha256)
  reader = csv.DictReader(io.StringIO(content.decode(), newline=''))
  key, *_ = reader.fieldnames or ['']
  return {row.pop(key): row for row in reader}


def _causes(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
  """Returns what differs in two records, and what the older one lacks."""
  old, new = (_of_now(record) for record in (old, new))
  found = run_records.differences([old, new])
  causes = [
      f'{kind}: {"; ".join(changes)}'
      for part, kind in _CAUSES.items()
      for changes in [list(_changes(found, part))]
      if changes
  ]
  if 'data.fingerprint' in found and 'git_commit' in found:
    causes.append(
        'data, but perhaps in name only: what a fingerprint is of is decided by'
        ' the code, which is another one'
    )
  unrecorded = [kind for part, kind in _CAUSES.items() if part not in old]
  return causes, unrecorded


def _noise(record: Mapping[str, Any]) -> Iterator[str]:
  """Yields why two runs of these settings differ, if they have noise."""
  config = record.get('config')
  config = config if isinstance(config, Mapping) else {}
  name, options = config.get('aggregation'), config.get('aggregation_options')
  kind = aggregation.BY_NAME.get(str(name))
  is_off = isinstance(options, Mapping) and options.get('noise_multiplier') == 0
  if kind is not None and kind.adds_noise and not is_off:
    yield f"noise: the aggregation '{name}' draws it anew in every run"


def _changes(found, part: str) -> Iterator[str]:
  """Yields what differs in a part of the records that both have."""
  for field, values in found.items():
    is_of_part = field.partition('.')[0] == part
    if is_of_part and len(values) == 2 and not field.startswith(_NO_CAUSE):
      yield f'{field} {json.dumps(values[0])} -> {json.dumps(values[1])}'


def _of_now(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a record whose configuration is as this version writes it.

  Its `git_commit` names all code that has made the run.
  """
  config = record.get('config')
  if 'code_of_rounds' in record:
    record = dict(record) | {'git_commit': run_records.code(record)}
  if not isinstance(config, Mapping):
    return dict(record)
  return dict(record) | {'config': run_records.as_of_now(config)}
