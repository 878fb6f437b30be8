"""Planes are reproducible and keep clusters; silhouettes are known values."""

import numpy as np
import pytest

from tff_meta.analyses import projections

RNG = np.random.default_rng(0)
LABELS = np.repeat(np.arange(3), 20)
APART = 50.0 * np.eye(3, 8)[LABELS] + RNG.standard_normal((60, 8))


@pytest.mark.parametrize('method', projections.METHODS)
def test_a_layout_keeps_clusters_and_is_reproducible(method):
  layout = projections.Layout(method, perplexity=10)
  xy = layout.project(APART)
  assert xy.shape == (60, 2)
  assert projections.silhouette(xy, LABELS) > 0.8
  np.testing.assert_array_equal(layout.project(APART), xy)


def test_pca_keeps_distances_in_a_plane():
  points = RNG.standard_normal((30, 2))
  xy = projections.Layout('pca').project(np.pad(points, [(0, 0), (2, 3)]))
  expected = np.linalg.norm(points[:, None] - points, axis=-1)
  found = np.linalg.norm(xy[:, None] - xy, axis=-1)
  np.testing.assert_allclose(found, expected, atol=1e-9)


def test_silhouette():
  """Points 0, 2, 10: a = 2, b = 10 and 8, and a class of one counts 0."""
  points, labels = np.array([[0.0], [2.0], [10.0]]), np.array([0, 0, 1])
  expected = (0.8 + 0.75 + 0.0) / 3
  assert projections.silhouette(points, labels) == pytest.approx(expected)
  assert projections.silhouette(APART, LABELS) > 0.9
  shuffled = RNG.permutation(LABELS)
  assert projections.silhouette(APART, shuffled) < 0.1


@pytest.mark.parametrize(
    'kwargs, problem',
    [
        (dict(method='umap'), 'tsne, pca'),
        (dict(perplexity=0.0), 'positive, found 0'),
        (dict(perplexity=float('nan')), 'positive, found nan'),
    ],
)
def test_impossible_layouts(kwargs, problem):
  with pytest.raises(ValueError, match=problem):
    projections.Layout(**kwargs)


def test_too_few_points():
  with pytest.raises(ValueError, match='at least 31 points .* found 30'):
    projections.Layout().project(APART[:30])
  with pytest.raises(ValueError, match='at least 2 points .* found 1'):
    projections.Layout('pca').project(APART[:1])
  with pytest.raises(ValueError, match='found 1 classes'):
    projections.silhouette(APART[:5], LABELS[:5])
