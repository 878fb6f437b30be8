"""Draws docs/results/privacy_mnist.png from results/privacy_mnist.

python docs/plot_privacy.py
"""

import json
import pathlib
import statistics

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main() -> None:
  """Draws the mean over seeds of each method, and what it is untrained."""
  found: dict[str, dict[float, list[float]]] = {}
  plain: dict[str, list[float]] = {}
  untrained: dict[str, list[float]] = {}
  for path in sorted((ROOT / 'results/privacy_mnist').rglob('summary.json')):
    summary = json.loads(path.read_text())
    method = summary['algorithm']
    ((_, result),) = summary['evaluation'].items()
    accuracy = 100 * result['accuracy_mean']
    reference = result['references']['untrained']['accuracy_mean']
    untrained.setdefault(method, []).append(100 * reference)
    if 'privacy' in summary:
      points = found.setdefault(method, {})
      points.setdefault(summary['privacy']['epsilon'], []).append(accuracy)
    else:
      plain.setdefault(method, []).append(accuracy)
  figure, axes = plt.subplots(figsize=(7, 4.2), layout='constrained')
  for number, (method, points) in enumerate(sorted(found.items())):
    color = f'C{number}'
    epsilons = sorted(points)
    axes.plot(
        epsilons,
        [statistics.fmean(points[e]) for e in epsilons],
        marker='o',
        color=color,
        label=method,
    )
    for values, style, what in (
        (plain[method], '--', 'not private'),
        (untrained[method], ':', 'untrained'),
    ):
      axes.axhline(
          statistics.fmean(values),
          color=color,
          linestyle=style,
          linewidth=1,
          label=f'{method}, {what}',
      )
  axes.set_xscale('log')
  axes.set_xlabel('epsilon at delta = 1e-5, of replacing one client')
  axes.set_ylabel('accuracy, percent')
  axes.set_title('MNIST, 1,000 clients, 100 rounds')
  figure.legend(loc='outside right upper', fontsize='small')
  figure.savefig(ROOT / 'docs/results/privacy_mnist.png', dpi=120)


if __name__ == '__main__':
  main()
