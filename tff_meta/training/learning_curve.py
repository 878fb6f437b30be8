"""The learning curve of a run as a picture."""

from collections.abc import Mapping, Sequence
import io
import math
import pathlib

from tff_meta.training import atomic_files

_MAX_POINTS = 400


def _moving_average(values: Sequence[float]) -> list[float]:
  """Returns trailing means over 2 % of the curve, NaN left out."""
  width = max(1, len(values) // 50)
  means = []
  for end in range(1, len(values) + 1):
    window = [v for v in values[max(0, end - width) : end] if math.isfinite(v)]
    means.append(sum(window) / len(window) if window else math.nan)
  return means


def write_learning_curve(
    path: pathlib.Path, metrics: Mapping[str, Sequence[float]], title: str
) -> None:
  """Draws losses above accuracies over the rounds.

  Metrics of every round are shown as trailing means over 2 % of the run;
  evaluations, which not every round has, as points.

  Args:
    path: The PNG to write (atomically).
    metrics: Columns of metrics.csv, `round` among them; see `read_metrics`.
    title: Above the picture.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot as plt

  figure, (upper, lower) = plt.subplots(
      2, 1, sharex=True, figsize=(7, 6), layout='constrained'
  )
  rounds = metrics.get('round', [])
  step = max(1, len(rounds) // _MAX_POINTS)
  for name, values in metrics.items():
    axes = {'loss': upper, 'accuracy': lower}.get(name.rpartition('/')[2])
    if axes is None:
      continue
    if any(math.isnan(value) for value in values):
      rows = [row for row, v in enumerate(values) if not math.isnan(v)]
      shown = [values[row] for row in rows]
      axes.plot([rounds[row] for row in rows], shown, 'o-', label=name)
    else:
      means = _moving_average(values)
      axes.plot(rounds[::step], means[::step], linewidth=1, label=name)
  for axes, label in ((upper, 'loss'), (lower, 'accuracy')):
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if axes.lines:
      axes.legend(fontsize='small')
  lower.set_xlabel('communication round')
  figure.suptitle(title)
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=120)
  plt.close(figure)
  atomic_files.write_bytes(path, buffer.getvalue())
