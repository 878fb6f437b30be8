"""A comparison as Markdown, CSV, JSON and one HTML page.

All of them say the same: ours, published and the difference, in percent; what
has no number says why.
"""

from collections.abc import Sequence
import csv
import dataclasses
import html
import io
import itertools
import pathlib
from typing import Any

from tff_meta import escapes
from tff_meta.comparison import figures
from tff_meta.comparison import results
from tff_meta.comparison import tables
from tff_meta.training import atomic_files

NUMBERS = (
    'Numbers are percent: the mean over seeds, with its 95 % interval where'
    ' there is more than one seed; in parentheses a spread within a run, as it'
    ' says there'
)
_NONE = '–'


class Report:
  """What reports have in common; what they are of, classes below this say.

  Attributes:
    title: One line.
    entries: All numbers, setting by setting and row by row.
    command: What makes the report again.
  """

  title: str
  entries: Sequence[results.Entry]
  command: str

  def header(self) -> list[str]:
    """Returns sentences on what was run."""
    raise NotImplementedError

  def notes(self) -> list[tuple[str, Sequence[str]]]:
    """Returns titles with sentences that stand below the tables."""
    raise NotImplementedError

  def about(self) -> dict[str, Any]:
    """Returns what `table.json` says beside all that."""
    raise NotImplementedError

  def pictures(self, root: pathlib.Path, setting: str) -> list[figures.Picture]:
    """Draws the runs of a setting; `root` is where the report is."""
    raise NotImplementedError

  def sections(self) -> list[tuple[str, Sequence[str]]]:
    """Returns `notes`, and what has no number, if there is any."""
    all_sections = [*self.notes(), ('Without a number', self.missing())]
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
  """

  table: tables.Table
  scale: str
  cells: Sequence[tables.Cell]
  entries: Sequence[results.Entry]
  provenance: Sequence[str]
  command: str

  def header(self) -> list[str]:
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
        *self.provenance,
    ]

  @property
  def title(self) -> str:  # type: ignore[override]  # Nobody sets it.
    """That of the table."""
    return self.table.title

  def notes(self) -> list[tuple[str, Sequence[str]]]:
    """Returns those of the table."""
    return [('Notes', self.table.notes)]

  def about(self) -> dict[str, Any]:
    """Returns the names of table and scale."""
    return {'experiment': self.table.name, 'scale': self.scale}

  def pictures(self, root: pathlib.Path, setting: str) -> list[figures.Picture]:
    """Draws the finished cells."""
    return figures.of_setting(root, self.table, self.cells, setting)


def write(root: pathlib.Path, report: Report) -> None:
  """Writes `table.md`, `table.csv`, `table.json` and `report.html`.

  Args:
    root: The directory, where a comparison's runs are read, too.
    report: What to write.
  """
  page = _html(root, report)  # First: this is where something may fail.
  atomic_files.write_bytes(root / 'table.md', markdown(report).encode())
  atomic_files.write_bytes(root / 'table.csv', _csv(report))
  atomic_files.write_json(
      root / 'table.json',
      {
          **report.about(),
          'command': report.command,
          'header': report.header(),
          'entries': [entry.to_json() for entry in report.entries],
      },
  )
  atomic_files.write_bytes(root / 'report.html', page.encode())


def markdown(report: Report) -> str:
  """Returns the report as Markdown, without pictures."""
  lines = [f'# {escapes.markdown_line(report.title)}', '']
  lines += [f'* {escapes.markdown_line(line)}' for line in report.header()]
  # A block of code, where nothing is markup.
  lines += ['', f'    {escapes.one_line(report.command)}', '']
  for setting, rows in report.by_setting():
    lines += [f'## {escapes.markdown_line(setting)}', '']
    header, *body = _grid(rows)
    lines += [_pipes(header), _pipes(['---'] * len(header))]
    lines += [_pipes(row) for row in body]
    lines.append('')
  for title, sentences in report.sections():
    lines += [f'## {title}', '']
    lines += [f'* {escapes.markdown_line(s)}' for s in sentences]
    lines.append('')
  return '\n'.join(lines)


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
  header += ['seeds', 'hours']
  body = []
  for row in rows:
    line = [row[0].row]
    for entry, has_published in zip(row, published, strict=True):
      line.append(_ours(entry))
      line += [_published(entry), _difference(entry)] if has_published else []
    finished = len(row[0].values)
    seeds = f'{finished} of {len(row[0].states)}' if row[0].states else _NONE
    is_known = row[0].states and row[0].hours is not None
    hours = f'{row[0].hours:.2f}' if is_known else _NONE
    body.append([*line, seeds, hours])
  return [header, *body]


def _ours(entry: results.Entry) -> str:
  if not entry.states:
    return 'not run here'
  if entry.mean is None:
    # Never a number where there is none: say how the seeds stand.
    states = dict.fromkeys(entry.states.values())
    return ', '.join('no number' if s == 'finished' else s for s in states)
  text = f'{entry.mean:.2f}'
  if entry.half_width is not None:
    text += f' ± {entry.half_width:.2f}'
  if entry.spread is not None:
    text += f' (± {entry.spread:.2f}, {entry.spread_name})'
  return text


def _published(entry: results.Entry) -> str:
  if entry.published is None:
    return _NONE
  spread = entry.published.spread
  return f'{entry.published.value:g}' + (
      '' if spread is None else f' ± {spread:g}'
  )


def _difference(entry: results.Entry) -> str:
  return _NONE if entry.difference is None else f'{entry.difference:+.2f}'


def _first_measures(entries):
  """Returns an entry for every row and setting."""
  return {(e.row, e.setting): e for e in reversed(entries)}.values()


def _csv(report: Report) -> bytes:
  text = io.StringIO()
  rows = [entry.to_json() for entry in report.entries]
  seeds = sorted({seed for row in rows for seed in row['values']}, key=int)
  for row in rows:
    values = row.pop('values')
    row |= {name: escapes.csv_cell(v) for name, v in row.items()}
    row |= {f'seed_{seed}': values.get(seed) for seed in seeds}
  writer = csv.DictWriter(text, list(rows[0]), lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue().encode()


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; margin: 0 auto;
  max-width: 1290px; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: .3rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #d5dbe3; }
h3 { font-size: 1rem; margin-bottom: .2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .4rem; text-align: right; vertical-align: top;
  white-space: nowrap;
  border-bottom: 1px solid #e4e8ee; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #9aa6b5; font-weight: 600; }
th, small { white-space: normal; }
small, td.published { color: #5a6675; }
td.none { color: #a03030; }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; }
figcaption { color: #5a6675; font-size: .9rem; }
code { background: #f1f4f8; padding: .1rem .3rem; overflow-wrap: anywhere; }
"""


def _html(root: pathlib.Path, report: Report) -> str:
  """Returns a page that needs no other file."""
  parts = [
      '<!doctype html><html lang="en"><head><meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      f'<title>{html.escape(report.title)}</title>',
      f'<style>{_STYLE}</style></head><body>',
      f'<h1>{html.escape(report.title)}</h1>',
      _list(report.header()),
      f'<p><code>{html.escape(report.command)}</code></p>',
  ]
  for setting, rows in report.by_setting():
    parts.append(f'<h2>{html.escape(setting)}</h2>')
    parts.append(_html_table(rows))
    for picture in report.pictures(root, setting):
      caption = html.escape(picture.caption)
      parts.append(
          f'<figure><img alt="{caption}" src="data:image/png;base64,'
          f'{picture.base64}"><figcaption>{caption}</figcaption></figure>'
      )
  for title, sentences in report.sections():
    parts += [f'<h2>{title}</h2>', _list(sentences)]
  return '\n'.join([*parts, '</body></html>\n'])


def _html_table(rows) -> str:
  header, *body = _grid(rows)
  lines = ['<div class="wide"><table><tr>']
  lines += [f'<th>{html.escape(name)}</th>' for name in header]
  lines.append('</tr>')
  for cells in body:
    lines.append('<tr>')
    for name, cell in zip(header, cells, strict=True):
      if name == 'Method':
        lines.append(f'<td>{html.escape(cell)}</td>')
        continue
      kind = 'published' if name == 'published' else ''
      if name not in ('seeds', 'hours') and not any(c.isdigit() for c in cell):
        kind = 'published' if cell == _NONE else 'none'
      # A run's own spread goes below: the table fits a laptop's screen.
      number, bracket, spread = html.escape(cell).partition(' (')
      text = number + (f'<br><small>({spread}</small>' if bracket else '')
      lines.append(f'<td class="{kind}">{text}</td>')
    lines.append('</tr>')
  return ''.join([*lines, '</table></div>'])


def _list(sentences) -> str:
  items = ''.join(f'<li>{html.escape(s)}</li>' for s in sentences)
  return f'<ul>{items}</ul>'
