"""A comparison as Markdown, CSV, JSON and one HTML page.

All of them say the same: ours, published and the difference, in percent; what
has no number says why.
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import functools
import io
import itertools
import pathlib
import shlex
import types
from typing import Any

from tff_meta import escapes
from tff_meta import plain_files
from tff_meta.comparison import cell_texts
from tff_meta.comparison import figures
from tff_meta.comparison import page
from tff_meta.comparison import pairs as pairs_lib
from tff_meta.comparison import progress as progress_lib
from tff_meta.comparison import provenance as provenance_lib
from tff_meta.comparison import results
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import atomic_files
from tff_meta.training import sealed_json

NUMBERS = (
    'Numbers are percent where their column names no other unit: the mean over'
    ' seeds, with its 95 % interval where there is more than one seed; in'
    ' parentheses a spread within a run, as it says there'
)


class Report:
  """What reports have in common; what they are of, classes below this say.

  Attributes:
    title: One line.
    entries: All numbers, setting by setting and row by row.
    command: What makes the report again.
    numbers: What numbers are, for readers of the page.
    banner: What every reader has to know first; empty for nothing.
  """

  title: str
  entries: Sequence[results.Entry]
  command: str
  numbers: str = f'{NUMBERS}.'
  banner: str = ''

  def header(self) -> list[str]:
    """Returns sentences on what was run."""
    raise NotImplementedError

  def page_header(self) -> list[str]:
    """Returns those of `header` that the page shows at once."""
    return self.header()

  def notes(self) -> list[tuple[str, Sequence[str]]]:
    """Returns titles with sentences that stand below the tables."""
    raise NotImplementedError

  def about(self) -> dict[str, Any]:
    """Returns what `table.json` says beside all that."""
    raise NotImplementedError

  def pictures(self, root: pathlib.Path, setting: str) -> list[figures.Picture]:
    """Draws the runs of a setting; `root` is where the report is."""
    raise NotImplementedError

  def progress(
      self, root: pathlib.Path, setting: str
  ) -> progress_lib.Progress | None:
    """Returns how fast rows are; `root` is where the report is."""
    raise NotImplementedError

  def run_links(
      self, root: pathlib.Path, setting: str, row: str
  ) -> list[page.RunLink]:
    """Returns the runs of a row; `root` is where the report is."""
    raise NotImplementedError

  def row_styles(self) -> dict[str, dict[str, Any]]:
    """Returns how rows are drawn in all pictures, see `figures`."""
    return figures.row_styles(list(dict.fromkeys(e.row for e in self.entries)))

  def provenance_notes(self) -> Sequence[provenance_lib.Note]:
    """Returns what the page says, folded, of the runs' code and data."""
    return ()

  def reference(self) -> str:
    """Returns the row that all others are compared with: the first one."""
    return self.entries[0].row if self.entries else ''

  @functools.cached_property
  def paired(self) -> dict[str, list[list[pairs_lib.Pair]]]:
    """Setting -> for each measure how far other rows are from `reference`.

    Without measures that nothing can be told of, see `pairs.with_reference`.
    """
    found = {
        setting: [
            pairs_lib.with_reference(entries, self.reference())
            for entries in zip(*rows, strict=True)
        ]
        for setting, rows in self.by_setting()
    }
    return {name: list(filter(None, pairs)) for name, pairs in found.items()}

  def sections(self) -> list[tuple[str, Sequence[str]]]:
    """Returns `notes`, and what has no number or diverged, if any has."""
    all_sections = [
        *self.notes(),
        ('Without a number', self.missing()),
        ('Diverged', self.diverged()),
    ]
    return [(title, found) for title, found in all_sections if found]

  def by_setting(self) -> list[tuple[str, list[list[results.Entry]]]]:
    """Returns settings, each with its rows, each with an entry a measure."""
    return [
        (
            setting,
            [
                list(row)
                for _, row in itertools.groupby(entries, lambda e: e.row)
            ],
        )
        for setting, entries in itertools.groupby(
            self.entries, lambda e: e.setting
        )
    ]

  def missing(self) -> list[str]:
    """Returns lines on what lacks a seed's number: rows, or measures of one."""
    lines = []
    for setting, rows in self.by_setting():
      for row in rows:
        whole = len({entry.missing for entry in row}) == 1
        lines += [
            f'{setting}, {entry.row}{"" if whole else f", {entry.measure}"}:'
            f' {entry.missing}'
            for entry in row
            if entry.missing
        ]
    return list(dict.fromkeys(lines))

  def diverged(self) -> list[str]:
    """Returns lines on rows with runs that have diverged."""
    lines = [
        f'{entry.setting}, {entry.row}: {what_diverged(entry)}'
        for entry in self.entries
        if entry.diverged
    ]
    return list(dict.fromkeys(lines))


def what_diverged(entry: results.Entry) -> str:
  """Returns which runs of an entry have diverged, and what that means."""
  seeds = ', '.join(map(str, entry.diverged))
  return (
      f'seed{"s" * (len(entry.diverged) > 1)} {seeds}: in the last round that'
      ' was evaluated nobody who trained had finite numbers'
  )


@dataclasses.dataclass(frozen=True)
class Comparison(Report):
  """A report of a table's cells.

  Attributes:
    table: The table.
    scale: Name of the scale.
    cells: The cells that it consists of.
    entries: From `results.collect`.
    provenance: From `results.provenance`.
    command: What makes the report again.
    program: Command of the training program, which cells add their flags to;
      empty if it is not to be shown.
    details: From `provenance.notes`.
  """

  table: tables.Table
  scale: str
  cells: Sequence[tables.Cell]
  entries: Sequence[results.Entry]
  provenance: Sequence[str]
  command: str
  program: Sequence[str] = ()
  details: Sequence[provenance_lib.Note] = ()

  def header(self) -> list[str]:
    """Returns sentences on what was run, and of what code and data."""
    return [*self.page_header(), *self.provenance]

  def page_header(self) -> list[str]:
    """Returns sentences on what was run."""
    scale = self.table.scale(self.scale)
    seeds = sorted({cell.seed for cell in self.cells})
    entries = _first_measures(self.entries)
    hours = sum(e.hours for e in entries)
    states = [state for e in entries for state in e.states.values()]
    sentences = [f'Source: {self.table.source}.']
    changes = scale.changes.rstrip('.')
    if self.table.source == 'ours':
      sentences.append(
          f'Scale: {self.scale}{": " + changes if changes else ""}.'
          ' Nobody has published these numbers.'
      )
    else:
      sentences.append(
          f'Scale: {self.scale}. Changed against the source:'
          f' {changes or "nothing but what the notes say"}.'
      )
    num_cells = len(tables.cells(self.table, self.scale))
    sentences.append(
        f'Finished runs: {states.count("finished")} of the'
        f' {len(self.cells)} asked for; the scale has {num_cells}.'
    )
    return [
        *sentences,
        'The command is the last one; runs of earlier ones are shown, too.',
        f'Seeds: {", ".join(map(str, seeds))}. All runs together took'
        f' {hours:.2f} hours.',
        f'{NUMBERS}; differences are ours minus published.',
        *(
            [f'Behind a published number stands its {self.table.spread}.']
            if self.table.spread
            else []
        ),
    ]

  @property
  def title(self) -> str:  # type: ignore[override]  # Nobody sets it.
    """That of the table."""
    return self.table.title

  @property
  def numbers(self) -> str:  # type: ignore[override]  # Nobody sets it.
    """With what stands behind published numbers."""
    spread = self.table.spread
    behind = (
        f' Behind a published number stands its {spread}.' if spread else ''
    )
    if self.table.source == 'ours':
      return f'{NUMBERS}.'
    return f'{NUMBERS}; differences are ours minus published.{behind}'

  @property
  def banner(self) -> str:  # type: ignore[override]  # Nobody sets it.
    """Says of the smoke scale that it is no experiment."""
    if self.scale != 'smoke':
      return ''
    return (
        'This is the smoke scale, a few rounds that show that everything runs.'
        ' Its numbers say nothing about the methods.'
    )

  def notes(self) -> list[tuple[str, Sequence[str]]]:
    """Returns those of the table."""
    return [('Notes', self.table.notes)]

  def about(self) -> dict[str, Any]:
    """Returns the names of table and scale."""
    return {'experiment': self.table.name, 'scale': self.scale}

  def reference(self) -> str:
    """Returns that of the table."""
    return self.table.reference or super().reference()

  def pictures(self, root: pathlib.Path, setting: str) -> list[figures.Picture]:
    """Draws the finished cells."""
    return figures.of_setting(root, self.table, self.cells, setting)

  def progress(
      self, root: pathlib.Path, setting: str
  ) -> progress_lib.Progress | None:
    """Returns how fast the finished cells are."""
    return progress_lib.of_runs(
        runner.finished(root, self.cells, setting),
        self.table.setting(setting),
        progress_lib.kept_traffic(root, setting),
    )

  def row_styles(self) -> dict[str, dict[str, Any]]:
    """Returns those of all rows of the table, run here or not."""
    return figures.row_styles([row.name for row in self.table.rows])

  def run_links(
      self, root: pathlib.Path, setting: str, row: str
  ) -> list[page.RunLink]:
    """Returns the row's cells, each with the flags that it was run with."""
    links = []
    for cell in self.cells:
      if (cell.setting, cell.row) != (setting, row):
        continue
      outcome = runner.CellFolder(root, cell).outcome()
      ran = dataclasses.replace(cell, flags=outcome.flags or cell.flags)
      command = runner.command(self.program, pathlib.Path('DIR'), ran)
      links.append(
          page.RunLink(
              cell.seed,
              outcome.state,
              f'{cell.folder}/',
              shlex.join(command) if self.program else '',
          )
      )
    return links

  def provenance_notes(self) -> Sequence[provenance_lib.Note]:
    """Returns which cell is of which code and data."""
    return self.details


def write(root: pathlib.Path, report: Report) -> None:
  """Writes `table.md`, `table.csv`, `table.json` and `report.html`.

  Args:
    root: The directory, where a comparison's runs are read, too.
    report: What to write.
  """
  html = page.render(root, report)  # First: here something may fail.
  write_tables(root, report)
  atomic_files.write_bytes(root / 'report.html', html.encode())


def write_tables(root: pathlib.Path, report: Report) -> None:
  """Writes `table.md`, `table.csv` and `table.json`.

  Args:
    root: The directory. How fast a comparison's rows are is read there: kept
      copies of its runs have no seconds of single rounds.
    report: What to write.
  """
  progress = _progress(root, report)
  text = markdown(report, progress)
  atomic_files.write_bytes(root / 'table.md', text.encode())
  atomic_files.write_bytes(root / 'table.csv', _csv(report))
  atomic_files.write_json(
      root / 'table.json',
      {
          **report.about(),
          'command': report.command,
          'header': report.header(),
          'entries': [entry.to_json() for entry in report.entries],
          'paired': [
              {'setting': setting} | pair.to_json()
              for setting, measures in report.paired.items()
              for pairs in measures
              for pair in pairs
          ],
          'progress': {name: p.to_json() for name, p in progress.items()},
      },
  )


def stored_command(root: pathlib.Path) -> str | None:
  """Returns the command that `table.json` has, None if it has none.

  Args:
    root: The directory of a report that was written before.
  """
  try:
    content = sealed_json.parse(
        plain_files.read_bytes(root / 'table.json', plain_files.MAX_JSON_BYTES)
    )
  except (OSError, ValueError):
    return None
  command = content.get('command')
  return command if isinstance(command, str) else None


def _progress(
    root: pathlib.Path, report: Report
) -> dict[str, progress_lib.Progress]:
  """Returns setting -> how fast its rows are, if they have curves."""
  found = {name: report.progress(root, name) for name, _ in report.by_setting()}
  return {name: progress for name, progress in found.items() if progress}


def markdown(
    report: Report,
    progress: Mapping[str, progress_lib.Progress] = types.MappingProxyType({}),
) -> str:
  """Returns the report as Markdown, without pictures.

  Args:
    report: What it says.
    progress: Setting -> how fast its rows are, for tables of that.
  """
  lines = [f'# {escapes.markdown_line(report.title)}', '']
  if report.banner:
    lines += [f'**Only a trial.** {report.banner}', '']
  lines += [f'* {escapes.markdown_line(line)}' for line in report.header()]
  # A block of code, where nothing is markup.
  lines += ['', f'    {escapes.one_line(report.command)}', '']
  for setting, rows in report.by_setting():
    lines += [f'## {escapes.markdown_line(setting)}', '']
    lines += [*_table(_grid(rows)), '']
    for pairs in report.paired[setting]:
      title = escapes.markdown_line(cell_texts.pairs_title(pairs))
      lines += [f'### Paired differences: {title}', '']
      header = ['Method', *cell_texts.pairs_header(pairs)]
      body = [[pair.row, *cell_texts.pair(pair)] for pair in pairs]
      lines += [*_table([header, *body]), '']
    if setting in progress:
      found = progress[setting]
      lines += [
          f'{progress_lib.TITLE}. {escapes.markdown_line(found.sentence())}',
          '',
      ]
      lines += [*_table(found.grid()), '']
      for sentence, grid in found.signals().items():
        lines += [escapes.markdown_line(sentence), '', *_table(grid), '']
  all_pairs = [pairs for of in report.paired.values() for pairs in of]
  if all_pairs:
    lines += [f'Paired differences: {cell_texts.about_pairs(all_pairs)}', '']
  how = [(progress_lib.TITLE, progress_lib.WHAT_IT_IS)] if progress else []
  for title, sentences in [*how, *report.sections()]:
    lines += [f'## {title}', '']
    lines += [f'* {escapes.markdown_line(s)}' for s in sentences]
    lines.append('')
  return '\n'.join(lines)


def _table(grid: Sequence[Sequence[str]]) -> list[str]:
  """Returns the lines of a table, its header first."""
  header, *body = grid
  return [_pipes(header), _pipes(['---'] * len(header)), *map(_pipes, body)]


def _pipes(cells) -> str:
  cells = (escapes.markdown_line(cell).replace('|', r'\|') for cell in cells)
  return f'| {" | ".join(cells)} |'


def _grid(rows: list[list[results.Entry]]) -> list[list[str]]:
  """Returns a setting's table as text, its header first."""
  measures = [entry.measure for entry in rows[0]]
  published = [
      any(row[i].published for row in rows) for i in range(len(measures))
  ]
  header = ['Method']
  for name, has_published in zip(measures, published, strict=True):
    header.append(name)
    header += ['published', 'difference'] if has_published else []
  has_traffic = any(cell_texts.has_megabytes(row[0]) for row in rows)
  header += [cell_texts.MEGABYTES] if has_traffic else []
  header += ['seeds', 'hours']
  body = []
  for row in rows:
    line = [row[0].row]
    for entry, has_published in zip(row, published, strict=True):
      line.append(
          f'{cell_texts.ours(entry)} {cell_texts.spread(entry)}'.strip()
      )
      if has_published:
        line += [cell_texts.published(entry), cell_texts.difference(entry)]
    line += [cell_texts.megabytes(row[0])] if has_traffic else []
    body.append([*line, cell_texts.seeds(row[0]), cell_texts.hours(row[0])])
  return [header, *body]


def _first_measures(entries):
  """Returns an entry for every row and setting."""
  return {(e.row, e.setting): e for e in reversed(entries)}.values()


def _csv(report: Report) -> bytes:
  text = io.StringIO()
  rows = [entry.to_json() for entry in report.entries]
  seeds = sorted({seed for row in rows for seed in row['values']}, key=int)
  has_diverged = any('diverged' in row for row in rows)
  for row in rows:
    values = row.pop('values')
    if has_diverged:
      row['diverged'] = ' '.join(map(str, row.get('diverged', ())))
    row |= {name: escapes.csv_cell(v) for name, v in row.items()}
    row |= {f'seed_{seed}': values.get(seed) for seed in seeds}
  names = dict.fromkeys(name for row in rows for name in row)
  writer = csv.DictWriter(text, list(names), lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue().encode()
