"""Means and intervals of accuracies."""

import math

import numpy as np
import pytest

from tff_meta.evaluation import accuracy


def report(accuracies, num_examples):
  return accuracy.AccuracyReport(
      np.array(accuracies), np.array(num_examples, np.int64)
  )


def test_the_interval_is_that_of_the_mean():
  """Mean .6; deviations -.4, .1, .3; s^2 = .26 / 2; 1.96 s / sqrt(3)."""
  found = report([0.2, 0.7, 0.9], [10, 20, 30])
  half = 1.96 * math.sqrt(0.13) / math.sqrt(3)
  assert found.mean == pytest.approx(0.6)
  assert found.half_width == pytest.approx(half)
  summary = found.summary()
  assert summary['accuracy_mean'] == pytest.approx(0.6)
  assert summary['accuracy_half_width_95'] == pytest.approx(half)
  assert half > 0.4  # So the interval ends at 1.
  assert summary['accuracy_interval_95'] == pytest.approx([0.6 - half, 1.0])
  low, high = report([0.8, 0.3, 0.1], [1, 1, 1]).summary()[
      'accuracy_interval_95'
  ]
  assert (low, high) == (0, pytest.approx(0.4 + half))


def test_the_micro_average_is_over_examples():
  """(.2 * 10 + .7 * 20 + .9 * 30) / 60 = 43 / 60."""
  found = report([0.2, 0.7, 0.9], [10, 20, 30])
  assert found.micro == pytest.approx(43 / 60)
  assert found.summary()['accuracy_micro'] == found.micro


def test_one_group_has_no_interval():
  found = report([0.3], [7])
  assert found.mean == 0.3 and found.half_width is None
  summary = found.summary()
  assert summary['accuracy_half_width_95'] is None
  assert summary['accuracy_interval_95'] is None


def test_the_interval_covers_the_mean_19_times_in_20():
  """400 experiments of 50 groups: 95 % within 4 standard errors, 1.1 % each."""
  rng = np.random.default_rng(1)
  covered = 0
  for accuracies in rng.normal(0.5, 0.1, (400, 50)):
    found = report(accuracies, np.ones(50))
    covered += abs(found.mean - 0.5) <= found.half_width
  assert 0.906 < covered / 400 < 0.994
