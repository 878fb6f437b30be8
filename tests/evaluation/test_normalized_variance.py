"""nVAR: known values, and what does not change it."""

import numpy as np
import pytest

from tff_meta.evaluation import normalized_variance

nvar = normalized_variance.normalized_variance
TWO_PAIRS = np.array([[-1.0], [1.0], [9.0], [11.0]])
LABELS = np.array([0, 0, 1, 1])


def test_two_pairs():
  """Means 0 and 10, variances 1 and 1, squared distance 100."""
  assert nvar(TWO_PAIRS, LABELS) == pytest.approx(0.01, rel=1e-12)


def test_the_printed_formula_averages_over_all_examples():
  """(1 + 1 + 81 + 121) / 4 = 51 about either mean."""
  assert nvar(TWO_PAIRS, LABELS, literal=True) == pytest.approx(0.51)


def test_every_class_counts_alike_and_has_its_nearest_mean():
  """Means 0, 1 and 4: squared distances to the nearest 1, 1 and 9."""
  points = np.array([[-2.0], [2.0], [1.0], [1.0], [1.0], [1.0], [3.0], [5.0]])
  labels = np.array([7, 7, 0, 0, 0, 0, 3, 3])
  assert nvar(points, labels) == pytest.approx((4 / 1 + 0 / 1 + 1 / 9) / 3)


@pytest.mark.parametrize('literal', [False, True])
def test_moving_turning_and_scaling_change_nothing(literal):
  rng = np.random.default_rng(0)
  labels = np.repeat(np.arange(4), 15)
  points = rng.standard_normal((4, 5))[labels] + rng.standard_normal((60, 5))
  turn, _ = np.linalg.qr(rng.standard_normal((5, 5)))
  moved = 7.0 * points @ turn + 100.0
  found = nvar(points, labels, literal)
  assert found > 0
  assert nvar(moved, labels, literal) == pytest.approx(found)


@pytest.mark.parametrize(
    'points, labels, problem',
    [
        (TWO_PAIRS, LABELS[:3], r'found shapes \(4, 1\) and \(3,\)'),
        (TWO_PAIRS, np.zeros(4, int), 'at least two classes, found 1'),
        (TWO_PAIRS * np.nan, LABELS, 'NaN'),
        (TWO_PAIRS * 0, LABELS, r'equal ones of classes \[0, 1\]'),
    ],
)
def test_impossible_input(points, labels, problem):
  with pytest.raises(ValueError, match=problem):
    nvar(points, labels)
