"""What evaluation reports: accuracies, their mean and its interval."""

import math
from typing import NamedTuple

import numpy as np


class AccuracyReport(NamedTuple):
  """Accuracies of several groups or clients.

  Attributes:
    accuracies: float64 `[n]`, in `[0, 1]`, in evaluation order.
    num_examples: int64 `[n]`, test examples behind each.
  """

  accuracies: np.ndarray
  num_examples: np.ndarray

  @property
  def mean(self) -> float:
    """The unweighted mean over groups or clients."""
    return float(np.mean(self.accuracies))

  @property
  def micro(self) -> float:
    """The mean weighted by examples: the share of all that were right."""
    right = np.sum(self.accuracies * self.num_examples)
    return float(right / np.sum(self.num_examples))

  @property
  def half_width(self) -> float | None:
    """1.96 standard errors of the mean, 1.96 s / sqrt(n).

    `s` is the sample standard deviation. For many groups that is half of a 95 %
    interval, as papers have it. For few it is too narrow, since it takes `s`
    for known: an interval of so much to both sides covers a normal mean in 70 %
    of cases for n = 2, and in 93.5 % for n = 20. None for a single group, of
    which no interval is known.
    """
    n = len(self.accuracies)
    if n < 2:
      return None
    return 1.96 * float(np.std(self.accuracies, ddof=1)) / math.sqrt(n)

  def summary(self) -> dict[str, float | list[float] | None]:
    """Returns what goes into `summary.json`.

    The half width is 1.96 standard errors, see `half_width`, and the interval
    that to both sides of the mean, cut to 0..1.
    """
    mean, half_width = self.mean, self.half_width
    interval = None
    if half_width is not None:
      interval = np.clip([mean - half_width, mean + half_width], 0, 1).tolist()
    return {
        'accuracy_mean': mean,
        'accuracy_half_width_95': half_width,
        'accuracy_interval_95': interval,
        'accuracy_micro': self.micro,
    }
