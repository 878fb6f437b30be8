"""A comparison as one HTML page that needs no other file.

The page is `templates/page.html`. Jinja escapes whatever is put into it, and
pictures are images, so that no name or message of others becomes markup.
"""

from collections.abc import Mapping, Sequence
import pathlib
import re
from typing import Any, NamedTuple, TYPE_CHECKING

import jinja2

from tff_meta.comparison import cell_texts
from tff_meta.comparison import figures
from tff_meta.comparison import progress
from tff_meta.comparison import results
from tff_meta.comparison import verdicts

if TYPE_CHECKING:
  from tff_meta.comparison import report as report_lib

# Marker -> the same as a path in a box of 12 by 12, for the page's tables.
_MARKER_PATHS = {
    'o': 'M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9z',
    's': 'M2 2h8v8h-8z',
    '^': 'M6 1l5 9.5h-10z',
    'D': 'M6 .5l5.5 5.5l-5.5 5.5l-5.5-5.5z',
    'v': 'M6 11l5-9.5h-10z',
    'P': 'M4 1h4v3h3v4h-3v3h-4v-3h-3v-4h3z',
}


class RunLink(NamedTuple):
  """A run that the page leads to.

  Attributes:
    seed: Of the run.
    state: How it stands.
    href: Its directory, as a link from the page.
    command: What runs it; empty if unknown.
  """

  seed: int
  state: str
  href: str
  command: str


def render(root: pathlib.Path, report: 'report_lib.Report') -> str:
  """Returns the page.

  Args:
    root: The directory that it will be in.
    report: What it says.
  """
  environment = jinja2.Environment(
      loader=jinja2.PackageLoader('tff_meta.comparison'),
      autoescape=True,
      undefined=jinja2.StrictUndefined,
      trim_blocks=True,
      lstrip_blocks=True,
  )
  environment.filters['slug'] = _slug
  by_setting = report.by_setting()
  styles = report.row_styles()
  first = [(name, [row[0] for row in rows]) for name, rows in by_setting]
  return environment.get_template('page.html').render(
      report=report,
      verdict=verdicts.verdict(first),
      overview=_overview(first),
      picture=figures.of_numbers([e for _, of in first for e in of], styles),
      keys={
          name: (style['color'], _MARKER_PATHS[style['marker']])
          for name, style in styles.items()
      },
      settings=[
          _setting(root, report, name, rows) for name, rows in by_setting
      ],
      texts=cell_texts,
      about_progress=progress,
  )


def _slug(text: str) -> str:
  """Returns text as part of an address within the page."""
  return re.sub(r'\W+', '-', text)


def _overview(
    first: Sequence[tuple[str, Sequence[results.Entry]]],
) -> dict[str, Any]:
  """Returns the table of first measures: a row a method, a column a setting."""
  rows: dict[str, dict[str, results.Entry]] = {}
  for name, entries in first:
    for entry in entries:
      rows.setdefault(entry.row, {})[name] = entry
  return {
      'columns': [(name, entries[0].measure) for name, entries in first],
      'rows': rows,
      'best': {name: _best(entries) for name, entries in first},
  }


def _best(entries: Sequence[results.Entry]) -> dict[str, list[str]]:
  """Returns the rows of the best of ours and of the published numbers.

  Nobody is the best of one.
  """
  found = {
      'ours': ([e for e in entries if e.mean is not None], results.mean),
      'published': ([e for e in entries if e.published], results.published),
  }
  return {
      kind: [e.row for e in results.best(those, number)]
      if len(those) > 1
      else []
      for kind, (those, number) in found.items()
  }


def _setting(root, report, name, rows) -> Mapping[str, Any]:
  """Returns what the page says of a setting."""
  by_measure = list(zip(*rows, strict=True))
  measures = [
      {
          'name': entries[0].measure,
          'has_published': any(entry.published for entry in entries),
          'best': _best(entries),
          'seeds': sorted({s for entry in entries for s in entry.values}),
          'entries': entries,
      }
      for entries in by_measure
  ]
  runs = {row[0].row: report.run_links(root, name, row[0].row) for row in rows}
  return {
      'name': name,
      'rows': rows,
      'measures': measures,
      'has_megabytes': any(cell_texts.has_megabytes(row[0]) for row in rows),
      'paired': report.paired[name],
      'runs': {row: links for row, links in runs.items() if links},
      'progress': report.progress(root, name),
      'pictures': report.pictures(root, name),
  }
