"""Pictures of a comparison: numbers, learning curves, clients, adaptation.

They are SVG without a background, whose ink is dark on a light page and light
on a dark one. A row of a table has the same colour and marker in all of them.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import io
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from tff_meta import escapes
from tff_meta.comparison import on_the_way
from tff_meta.comparison import results
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import metric_writers

_UNITS = ('clients', 'groups')
_LEGEND_INCHES = 0.19  # Of a line.
# Told apart by people who do not see all colours, on white and on black.
# Source: Paul Tol, Colour Schemes, SRON technical note, 2021, "bright".
_COLOURS = (
    '#4477aa',
    '#ee6677',
    '#228833',
    '#ccbb44',
    '#66ccee',
    '#aa3377',
    '#999999',
)
_MARKERS = 'o', 's', '^', 'D', 'v', 'P'  # No divisor of 7: 42 pairs.
_INK = '#010203'  # What becomes the colour of the page's text.
_INK_STYLE = (
    '<style>svg { color: #1c2430; } @media (prefers-color-scheme: dark)'
    ' { svg { color: #dfe5ee; } }</style>'
)
_PAGE_STYLE = {
    **dict.fromkeys(
        (
            'axes.edgecolor',
            'axes.labelcolor',
            'axes.titlecolor',
            'boxplot.boxprops.color',
            'boxplot.capprops.color',
            'boxplot.flierprops.markeredgecolor',
            'boxplot.whiskerprops.color',
            'grid.color',
            'text.color',
            'xtick.color',
            'ytick.color',
        ),
        _INK,
    ),
    'axes.facecolor': 'none',
    'figure.facecolor': 'none',
    'grid.alpha': 0.15,
    'svg.fonttype': 'none',  # Text stays text.
    'svg.hashsalt': 'tff_meta',  # The same picture has the same bytes.
}


class Picture(NamedTuple):
  """A picture.

  Attributes:
    caption: What is seen.
    base64: An SVG.
  """

  caption: str
  base64: str


def of_setting(
    root: pathlib.Path,
    table: tables.Table,
    cells: Sequence[tables.Cell],
    setting: str,
) -> list[Picture]:
  """Draws what the finished cells of a setting have written.

  Args:
    root: The comparison's directory.
    table: The table.
    cells: Those that the comparison consists of.
    setting: Name of the setting.

  Returns:
    Those pictures that there is something to see in.
  """
  return of_runs(
      runner.finished(root, cells, setting),
      table.setting(setting),
      row_styles([row.name for row in table.rows]),
  )


def of_runs(
    runs: Mapping[str, Sequence[pathlib.Path]],
    setting: tables.Setting,
    styles: Mapping[str, Mapping[str, Any]],
) -> list[Picture]:
  """Draws what finished runs of a setting have written.

  Args:
    runs: Row -> directories of its runs, one a seed.
    setting: The setting.
    styles: From `row_styles`, of these rows at least.

  Returns:
    Those pictures that there is something to see in.
  """
  protocol, suffix = _protocol(setting)
  metrics = {
      row: [m for m in map(results.read_metrics, paths) if m is not None]
      for row, paths in runs.items()
  }
  with _style():
    pictures = [
        *_accuracy_curves(metrics, setting, styles),
        _losses(metrics, sum(map(len, runs.values())), styles),
        *_signals(metrics, styles),
        _distribution(runs, styles, protocol, suffix),
        _adaptation(runs, styles, protocol, suffix),
    ]
  return [picture for picture in pictures if picture is not None]


def row_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Chooses how rows are drawn, so that no two of up to 42 look the same.

  Args:
    names: Of all rows of a table, so that a row looks the same in all settings.

  Returns:
    Row -> `color` and `marker` for matplotlib.
  """
  return {
      name: {
          'color': _COLOURS[i % len(_COLOURS)],
          'marker': _MARKERS[i % len(_MARKERS)],
      }
      for i, name in enumerate(names)
  }


def of_numbers(
    entries: Sequence[results.Entry], styles: Mapping[str, Mapping[str, Any]]
) -> Picture | None:
  """Draws ours against published or, where nothing is, ours alone.

  Args:
    entries: Of the first measure of every setting.
    styles: From `row_styles`, of these rows at least.

  Returns:
    None if there is nothing to see.
  """
  ours = [entry for entry in entries if entry.mean is not None]
  compared = [entry for entry in ours if entry.published is not None]
  with _style():
    if compared:
      return _against_published(compared, styles)
    return _side_by_side(ours, styles) if ours else None


def _against_published(entries, styles) -> Picture:
  plt = _pyplot()
  figure, axes = plt.subplots(figsize=(4.6, 4.2), layout='constrained')
  settings = list(dict.fromkeys(entry.setting for entry in entries))
  for entry in entries:
    axes.errorbar(
        entry.published.value,
        entry.mean,
        entry.half_width,
        **styles[entry.row],
        markerfacecolor=(
            styles[entry.row]['color']
            if entry.setting == settings[0]
            else 'none'
        ),
        markersize=7,
        linewidth=1,
        alpha=0.9,
    )
  ends = [entry.mean for entry in entries]
  ends += [entry.published.value for entry in entries]
  margin = 0.08 * (max(ends) - min(ends)) or 1
  limits = min(ends) - margin, max(ends) + margin
  axes.plot(limits, limits, color=_INK, linewidth=0.8, alpha=0.6)
  axes.set(
      xlim=limits,
      ylim=limits,
      xlabel='published, percent',
      ylabel='ours, percent',
      aspect='equal',
  )
  axes.grid()
  hollow = ''
  if len(settings) > 1:
    hollow = f' Full markers: {settings[0]}; hollow ones: the other settings.'
  return _picture(
      plt,
      figure,
      f'Ours against published ({entries[0].measure}): on the line they are'
      ' equal, above it ours is more. Bars: 95 % intervals over'
      f' seeds.{hollow}',
  )


def _side_by_side(entries, styles) -> Picture:
  plt = _pyplot()
  settings = list(dict.fromkeys(entry.setting for entry in entries))
  rows = list(dict.fromkeys(entry.row for entry in entries))[::-1]
  across = min(2, len(settings))
  down = math.ceil(len(settings) / across)
  figure, grid = plt.subplots(
      down,
      across,
      figsize=(5.4, down * (0.7 + 0.2 * len(rows))),
      layout='constrained',
      squeeze=False,
      sharey=True,
  )
  for axes, setting in zip(grid.flat, settings, strict=False):
    for entry in entries:
      if entry.setting == setting:
        axes.errorbar(
            entry.mean,
            rows.index(entry.row),
            xerr=entry.half_width,
            **styles[entry.row],
            markersize=6,
            linewidth=1,
        )
    axes.set_title(escapes.picture_text(setting), fontsize='medium')
    axes.set_xlabel('percent')
    axes.set_yticks(range(len(rows)), [escapes.picture_text(r) for r in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.grid(axis='x')
  for axes in grid.flat[len(settings) :]:
    axes.set_axis_off()
  return _picture(
      plt,
      figure,
      f'{entries[0].measure}: means over seeds. Bars: 95 % intervals where'
      ' there is more than one seed.',
  )


def _protocol(setting: tables.Setting) -> tuple[str, str]:
  """Returns the protocol of the first measure and its files' suffix."""
  for measure in setting.measures:
    section, _, rest = measure.path.partition('/')
    if section in ('evaluation', 'evaluation_best'):
      return rest.split('/')[0], '_best' if section.endswith('best') else ''
  return 'known_clients', ''


def _which(protocol: str, suffix: str) -> str:
  return f'{protocol}, {"best" if suffix else "last"} round'


def _accuracy_curves(metrics, setting, styles) -> Iterator[Picture | None]:
  """Yields those of all who were tested, those of the setting first."""
  found = [name for of_row in metrics.values() for m in of_row for name in m]
  columns = on_the_way.columns(setting, found)
  lacks_own = bool(columns and on_the_way.attention(setting, columns[0]))
  for column in columns:
    curves, _ = _columns(metrics, column)
    attention = on_the_way.attention(setting, column) if lacks_own else ''
    yield _lines(
        curves,
        styles,
        'communication round',
        'accuracy, percent',
        f'Accuracy of {column.split("/")[0].replace("_", " ")} during training'
        ' (mean over the seeds of a method, band of one standard deviation, to'
        f' the end of the shortest of its runs), as {column} in metrics.csv:'
        ' names with "validation" are of examples or classes kept apart for'
        ' it, others of test examples, by which nothing is chosen.'
        f'{f" {attention}" if attention else ""}',
        scale=100,
    )


def _losses(metrics, num_runs, styles) -> Picture | None:
  curves, num_shown = _columns(metrics, 'train/loss', every_round=True)
  left_out = (
      f' Of {num_runs} runs {num_shown} are shown: the others have one round,'
      ' or were kept without their losses.'
  )
  return _lines(
      curves,
      styles,
      'communication round',
      'training loss',
      'The loss that a method reports of its local training (mean over the'
      ' seeds of a method, a moving one over 2 % of the rounds, to the end of'
      ' the shortest of its runs).'
      ' Methods minimise different losses: compare shapes, not heights.'
      f'{left_out if num_shown < num_runs else ""}',
      smooth=True,
  )


def _signals(metrics, styles) -> Iterator[Picture | None]:
  """What methods measure in training beside the loss, if they do."""
  for column, label, meaning in on_the_way.SIGNALS:
    curves, _ = _columns(metrics, column)
    # A method of the same family that has no such thing reports zeros.
    curves = {row: xy for row, xy in curves.items() if xy[1].any()}
    yield _lines(
        curves,
        styles,
        'communication round',
        label,
        f'{meaning} (mean over the seeds of a method, band of one standard'
        ' deviation, to the end of the shortest of its runs), as'
        f' {column} in metrics.csv.',
    )


def _columns(metrics, column, every_round=False):
  """Returns row -> (rounds, values of each seed) of a column; number of runs.

  Of those there is something to see.
  With `every_round` runs are left out of which rounds are missing, or that
  have only one.
  """
  curves, num_shown = {}, 0
  for row, of_row in metrics.items():
    series = [
        {
            r: value
            for r, value in zip(m['round'], m[column], strict=True)
            if not math.isnan(value)
        }
        for m in of_row
        if column in m and (not every_round or _has_every_round(m['round']))
    ]
    # A round may be missing: not evaluated, or nobody trained in it.
    shared = [r for r in (series or [{}])[0] if all(r in s for s in series)]
    if shared:
      values = np.array([[of[r] for r in shared] for of in series])
      curves[row] = np.array(shared), values
      num_shown += len(series)
  return curves, num_shown


def _has_every_round(rounds: Sequence[float]) -> bool:
  """Returns whether these are rounds 1, 2, ... of a curve, none left out."""
  return len(rounds) > 1 and list(rounds) == list(range(1, len(rounds) + 1))


def _distribution(runs, styles, protocol, suffix) -> Picture | None:
  """One box a row: the accuracies of single clients or groups."""
  accuracies, unit_seen = {}, 'clients'
  for row, paths in runs.items():
    values = []
    for path in paths:
      for unit in _UNITS:
        file = path / f'{unit}_{protocol}{suffix}.csv'
        sha256 = results.sha256_of_table(path, file.name)
        if sha256 is not None:
          unit_seen = unit
          column = metric_writers.read_column(file, 'accuracy', sha256)
          values += [100 * value for value in column]
    if values:
      accuracies[row] = values
  if not accuracies:
    return None
  plt = _pyplot()
  figure, axes = plt.subplots(
      figsize=(8, 0.8 + 0.36 * len(accuracies)), layout='constrained'
  )
  names = list(accuracies)[::-1]
  boxes = axes.boxplot(
      [accuracies[name] for name in names],
      vert=False,
      tick_labels=[escapes.picture_text(name) for name in names],
      patch_artist=True,
      widths=0.6,
      medianprops={'color': _INK},
      flierprops={
          'marker': '.',
          'markersize': 3,
          'alpha': 0.5,
          'markeredgecolor': _INK,
      },
  )
  for box, name in zip(boxes['boxes'], names, strict=True):
    box.set(facecolor=styles[name]['color'], alpha=0.55)
  axes.set_xlabel('accuracy, percent')
  axes.grid(axis='x')
  return _picture(
      plt,
      figure,
      f'Accuracy of single {unit_seen} ({_which(protocol, suffix)}), all seeds'
      ' together: box from the first to the third quartile, line at the median,'
      " dots beyond 1.5 times the box's width.",
  )


def _adaptation(runs, styles, protocol, suffix) -> Picture | None:
  section = f'evaluation{suffix}'
  curves = {}
  for row, paths in runs.items():
    found = []
    for path in paths:
      curve = results.read_curve(path, section, protocol)
      if curve:
        found.append(curve)
    if found:
      length = min(map(len, found))
      values = np.stack([curve[:length] for curve in found])
      curves[row] = (np.arange(length), values)
  return _lines(
      curves,
      styles,
      'steps of adaptation',
      'accuracy, percent',
      'Accuracy after 0, 1, ... steps of adaptation'
      f' ({_which(protocol, suffix)}; mean over clients and seeds, band of one'
      ' standard deviation over seeds).',
      scale=100,
  )


def _lines(
    curves, styles, x_label, y_label, caption, *, scale=1, smooth=False
) -> Picture | None:
  """Draws row -> (x, y of each seed) as lines of means, None without any.

  With a band of one standard deviation, unless they are smooth.
  """
  if not curves:
    return None
  plt = _pyplot()
  height = max(3.6, 0.4 + _LEGEND_INCHES * len(curves))
  figure, axes = plt.subplots(figsize=(8, height), layout='constrained')
  for row, (x, values) in curves.items():
    y = values.mean(0)
    if len(values) > 1 and not smooth:
      spread = values.std(0, ddof=1)
      axes.fill_between(
          x,
          scale * (y - spread),
          scale * (y + spread),
          color=styles[row]['color'],
          alpha=0.15,
          linewidth=0,
      )
    if smooth:
      window = max(1, len(y) // 50)
      y = np.convolve(y, np.ones(window) / window, 'valid')
      x = x[window - 1 :]
    step = max(1, math.ceil(len(x) / 300))
    shown = x[::step]
    axes.plot(
        shown,
        scale * y[::step],
        **styles[row],
        label=escapes.picture_text(row),
        markevery=max(1, len(shown) // 10),
        markersize=4.5,
        linewidth=1.4,
    )
  axes.set(xlabel=x_label, ylabel=y_label)
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid()
  figure.legend(loc='outside right upper', fontsize='small', frameon=False)
  return _picture(plt, figure, caption)


def _picture(plt, figure, caption) -> Picture:
  buffer = io.StringIO()
  figure.savefig(buffer, format='svg', metadata={'Date': None})
  plt.close(figure)
  content = buffer.getvalue().replace(_INK, 'currentColor')
  content = content.replace('<defs>', f'{_INK_STYLE}<defs>', 1)
  return Picture(caption, base64.b64encode(content.encode()).decode())


@contextlib.contextmanager
def _style() -> Iterator[None]:
  """Draws pictures for a page that is light or dark, as its reader likes."""
  with _pyplot().rc_context(_PAGE_STYLE):
    yield


def _pyplot():
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  return pyplot
