"""The learning curve of a run as a picture."""

from collections.abc import Mapping, Sequence
import io
import math
import pathlib
import statistics

from tff_meta import escapes
from tff_meta.training import atomic_files

_MAX_POINTS = 400
_PANELS = ('loss', 'accuracy')
_EVERY_ROUND = 'train/'  # Begins the names of what every round measures.


def write_learning_curve(
    path: pathlib.Path,
    metrics: Mapping[str, Sequence[float]],
    title: str,
    min_window: int = 1,
) -> None:
  """Draws losses above accuracies over the rounds.

  Metrics of every round are shown as trailing means over 2 % of the run, as the
  legend says; evaluations, which not every round has, as points.

  Args:
    path: The PNG to write (atomically).
    metrics: Columns of metrics.csv, `round` among them; see `read_metrics`.
    title: Above the picture.
    min_window: Least number of rounds in a mean, such as those of an episode.
  """
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
    for name in curves[panel]:
      label = escapes.picture_text(name)
      _draw(axes, rounds, metrics[name], label, window)
    axes.set_ylabel(panel)
    axes.grid(alpha=0.3)
    axes.legend(fontsize='small')
  grid[-1, 0].set_xlabel('communication round')
  figure.suptitle(escapes.picture_text(title))
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=120)
  atomic_files.write_bytes(path, buffer.getvalue())


def _draw(axes, rounds, values, name, window) -> None:
  """Draws one column: evaluations that have gaps as points, else as means."""
  filled = [row for row, value in enumerate(values) if not math.isnan(value)]
  if len(filled) < len(values) and not name.startswith(_EVERY_ROUND):
    axes.plot(
        [rounds[row] for row in filled],
        [values[row] for row in filled],
        'o-',
        label=name,
    )
    return
  step = max(1, len(values) // _MAX_POINTS)
  rows = range(step - 1, len(values), step)
  means = [_mean(_last(values, row, window)) for row in rows]
  label = f'{name}, mean of {window} rounds' if window > 1 else name
  axes.plot([rounds[row] for row in rows], means, label=label)


def _mean(values):
  """Returns the mean of the numbers among the values, NaN if none is one."""
  numbers = [value for value in values if not math.isnan(value)]
  return statistics.fmean(numbers) if numbers else math.nan


def _last(values, row, window):
  """Returns the last `window` values up to and including a row."""
  return values[max(0, row + 1 - window) : row + 1]
