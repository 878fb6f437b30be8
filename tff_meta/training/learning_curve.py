"""The learning curve of a run as a picture."""

from collections.abc import Mapping, Sequence
import io
import math
import pathlib
import statistics

from tff_meta import escapes
from tff_meta.training import atomic_files
from tff_meta.training import metric_writers

_MAX_POINTS = 400
_PANELS = {'loss': 'loss', 'accuracy': 'accuracy, percent'}
_EVERY_ROUND = 'train/'  # Begins the names of what every round measures.


def write_learning_curve(
    path: pathlib.Path,
    metrics: Mapping[str, Sequence[float]],
    title: str,
    min_window: int = 1,
    phase_ends: Mapping[str, int] | None = None,
    best_by: str | None = None,
) -> None:
  """Draws losses above accuracies, in percent, over the rounds.

  Metrics of every round are shown as trailing means over 2 % of the run, as the
  legend says; evaluations, which not every round has, as points, of which the
  best has a mark. Where a phase of training ends there is a line.

  Args:
    path: The PNG to write (atomically).
    metrics: Columns of metrics.csv, `round` among them; see `read_metrics`.
    title: Above the picture.
    min_window: Least number of rounds in a mean, such as those of an episode.
    phase_ends: Phase of training -> its last round.
    best_by: The column whose first largest value marks the best round; by
      default the first accuracy of an evaluation.
  """
  figure = _figure(metrics, title, min_window, phase_ends or {}, best_by)
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=120)
  atomic_files.write_bytes(path, buffer.getvalue())


def _figure(metrics, title, min_window, phase_ends, best_by):
  """Draws the picture of `write_learning_curve`."""
  from matplotlib import figure as figure_lib  # Not pyplot, which is slow.

  curves = {
      panel: [name for name in metrics if name.split('/')[-1] == panel]
      for panel in _PANELS
  }
  panels = [panel for panel in _PANELS if curves[panel]]
  num_panels = max(1, len(panels))
  figure = figure_lib.Figure((7, 3.2 * num_panels), layout='constrained')
  grid = figure.subplots(num_panels, 1, sharex=True, squeeze=False)
  rounds = metrics.get('round', [])
  window = max(min_window, len(rounds) // 50)
  for panel, axes in zip(panels, grid[:, 0], strict=False):
    scale = 100 if panel == 'accuracy' else 1
    for name in curves[panel]:
      values = [scale * value for value in metrics[name]]
      _draw(axes, rounds, values, name, window)
    if panel == 'accuracy':
      _mark_best(axes, metrics, curves[panel], best_by)
    _mark_phases(axes, rounds, phase_ends)
    axes.set_ylabel(_PANELS[panel])
    axes.grid(alpha=0.3)
    axes.legend(fontsize='small')
  grid[-1, 0].set_xlabel('communication round')
  figure.suptitle(escapes.picture_text(title))
  return figure


def best_round(
    metrics: Mapping[str, Sequence[float]], column: str
) -> tuple[int, float] | None:
  """Returns the row of the first largest number of a column, and the number.

  Args:
    metrics: Columns of metrics.csv.
    column: Name of one of them.

  Returns:
    None if it holds no number.
  """
  found = [
      (value, -row)
      for row, value in enumerate(metrics[column])
      if not math.isnan(value)
  ]
  if not found:
    return None
  value, row = max(found)
  return -row, value


def _mark_best(axes, metrics, shown, best_by) -> None:
  """Puts a star on the best round of the evaluations, if there are any."""
  evaluated = [name for name in shown if not name.startswith(_EVERY_ROUND)]
  if not evaluated:
    return
  found = best_round(metrics, best_by if best_by in metrics else evaluated[0])
  if found is None:
    return
  row, value = found
  round_num = int(metrics['round'][row])
  axes.plot(
      [round_num],
      [100 * metrics[evaluated[0]][row]],
      '*',
      color='black',
      markersize=11,
      label=f'best: {100 * value:.2f} % in round {round_num}',
  )


def _mark_phases(axes, rounds, phase_ends) -> None:
  """Draws a line where a phase ends in these rounds, but for the last one."""
  for number, (phase, last) in enumerate(phase_ends.items()):
    if rounds and rounds[0] <= last < rounds[-1]:
      axes.axvline(
          last + 0.5,
          color='black',
          linestyle=('--', ':', '-.')[number % 3],
          linewidth=1,
          label=f'{escapes.picture_text(phase)} ends after round {last}',
      )


def _draw(axes, rounds, values, name, window) -> None:
  """Draws one column: evaluations that have gaps as points, else as means."""
  label = escapes.picture_text(metric_writers.title(name))
  is_of_every_round = name.startswith(_EVERY_ROUND)
  filled = [row for row, value in enumerate(values) if not math.isnan(value)]
  if len(filled) < len(values) and not is_of_every_round:
    axes.plot(
        [rounds[row] for row in filled],
        [values[row] for row in filled],
        'o-',
        label=label,
    )
    return
  step = max(1, len(values) // _MAX_POINTS)
  rows = range(step - 1, len(values), step)
  means = [_mean(_last(values, row, window)) for row in rows]
  if window > 1:
    label += f', mean of {window} rounds'
  axes.plot([rounds[row] for row in rows], means, label=label)


def _mean(values):
  """Returns the mean of the numbers among the values, NaN if none is one."""
  numbers = [value for value in values if not math.isnan(value)]
  return statistics.fmean(numbers) if numbers else math.nan


def _last(values, row, window):
  """Returns the last `window` values up to and including a row."""
  return values[max(0, row + 1 - window) : row + 1]
