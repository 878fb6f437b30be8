"""Facts of MetaVers, and naive NumPy as the oracle."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.losses import centroid_triplet
from tff_meta.losses import prototypical

RNG = np.random.default_rng(4)
# Classes 0, 1 and 3 with 4, 2 and 3 examples; row 5 is padding.
E = RNG.normal(size=(10, 3))
Y = np.array([0, 3, 0, 1, 0, 1, 3, 1, 0, 3])
MASK = np.array([1.0, 1, 1, 1, 1, 0, 1, 1, 1, 1])
NUM_CLASSES = 4


def naive_triplet(e, y, mask, margin, variant, reduction='mean'):
  e, y = e[mask > 0], y[mask > 0]
  total, per_class = 0.0, []
  for k in np.unique(y):
    anchor = e[y == k].mean(0)
    per_positive = []
    for p in e[y == k]:
      terms = []
      for n in e[y != k]:
        if variant == 'eq4':
          near = np.sqrt(np.sum((anchor - p) ** 2))
          far = np.sqrt(np.sum((p - n) ** 2))
        else:
          near, far = np.sum((anchor - p) ** 2), np.sum((anchor - n) ** 2)
        terms.append(max(near - far + margin, 0.0))
      total += sum(terms)
      per_positive.append(np.mean(terms))
    per_class.append(np.mean(per_positive))
  return total if reduction == 'sum' else np.mean(per_class)


def triplet(
    e, y, mask, margin, variant, num_classes=NUM_CLASSES, reduction='mean'
):
  e = tf.convert_to_tensor(e)
  centroids = prototypical.prototypes(e, y, mask, num_classes)
  margin = tf.cast(margin, e.dtype)
  return centroid_triplet.triplet_loss(
      e, y, mask, centroids, margin, variant, reduction
  )


def margin_of(*points, normalizer='pairs'):
  return centroid_triplet.local_margin(
      prototypical.Prototypes(
          tf.constant([[float(p)] for p in points]), tf.ones(len(points))
      ),
      normalizer,
  ).numpy()


def test_margin_by_hand():
  # Float32 roots of small squares.
  np.testing.assert_allclose(margin_of(1, 11), 10.0, rtol=1e-6)
  np.testing.assert_allclose(margin_of(0, 3, 6), 4.0, rtol=1e-6)
  assert margin_of(7) == 0


def test_printed_margin_by_hand():
  """Both ways, 2 * 10 over 1 and 2 * (3 + 6 + 3) over 4."""
  margin = margin_of(1, 11, normalizer='printed')
  np.testing.assert_allclose(margin, 20.0, rtol=1e-6)
  margin = margin_of(0, 3, 6, normalizer='printed')
  np.testing.assert_allclose(margin, 6.0, rtol=1e-6)
  assert margin_of(7, normalizer='printed') == 0


def test_margin_ignores_absent_classes():
  centroids = prototypical.Prototypes(
      tf.constant([[1.0], [0.0], [11.0]]), tf.constant([1.0, 0.0, 1.0])
  )
  margin = centroid_triplet.local_margin(centroids)
  np.testing.assert_allclose(margin, 10.0, rtol=1e-6)


@pytest.mark.parametrize(
    'variant, margin, reduction, expected',
    [
        ('eq4', 10.0, 'mean', 1.25),
        ('eq4', 10.0, 'sum', 10.0),
        ('release', 10.0, 'mean', 0.0),
        ('release', 90.0, 'mean', 5.0),
    ],
)
def test_triplet_toy(variant, margin, reduction, expected):
  """Class 0 is {0, 2} and class 1 {10, 12}; centroids 1 and 11.

  eq4, margin 10: 1 - |p - n| + 10 is 1, 0 for p = 0 and 3, 1 for p = 2: mean
  1.25, by symmetry for class 1 too. The sum of class 0 is 5.
  """
  loss = triplet(
      np.array([[0.0], [2.0], [10.0], [12.0]]),
      np.array([0, 0, 1, 1]),
      np.ones(4),
      margin,
      variant,
      2,
      reduction,
  )
  np.testing.assert_allclose(loss, expected, atol=1e-12)


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('variant', ['eq4', 'release'])
def test_triplet_against_the_oracle(variant, reduction):
  expected = naive_triplet(E, Y, MASK, 1.5, variant, reduction)
  assert expected > 0
  np.testing.assert_allclose(
      triplet(E, Y, MASK, 1.5, variant, reduction=reduction),
      expected,
      rtol=1e-10,
  )


@pytest.mark.parametrize('variant', ['eq4', 'release'])
def test_triplet_does_not_depend_on_order_or_names(variant):
  loss = triplet(E, Y, MASK, 1.5, variant)
  order, names = RNG.permutation(10), np.array([2, 0, 3, 1])
  for e, y, mask in (
      (E[order], Y[order], MASK[order]),
      (E, names[Y], MASK),
  ):
    np.testing.assert_allclose(
        triplet(e, y, mask, 1.5, variant), loss, rtol=1e-10
    )


@pytest.mark.parametrize('variant', ['eq4', 'release'])
def test_one_class_has_no_loss_and_no_gradient(variant):
  e = tf.constant(E)
  with tf.GradientTape() as tape:
    tape.watch(e)
    loss = triplet(e, np.full(10, 2), MASK, 1.5, variant)
  assert loss.numpy() == 0
  np.testing.assert_array_equal(tape.gradient(loss, e), np.zeros_like(E))


@pytest.mark.parametrize('global_margin', [0.5, 50.0])
def test_effective_margin_is_the_larger_one(global_margin):
  margin = tf.constant(10.0)
  effective = centroid_triplet.effective_margin(global_margin, margin, True)
  assert effective.numpy() == max(global_margin, 10.0)


def loss_gradient(margin_fn):
  e = tf.constant(E)
  with tf.GradientTape() as tape:
    tape.watch(e)
    centroids = prototypical.prototypes(e, Y, MASK, NUM_CLASSES)
    margin = margin_fn(centroid_triplet.local_margin(centroids))
    loss = centroid_triplet.triplet_loss(e, Y, MASK, centroids, margin, 'eq4')
  return tape.gradient(loss, e).numpy()


def test_gradient_through_the_margin():
  centroids = prototypical.prototypes(tf.constant(E), Y, MASK, NUM_CLASSES)
  value = centroid_triplet.local_margin(centroids).numpy()

  def margin_fn(stop_gradient):
    return lambda m: centroid_triplet.effective_margin(0.0, m, stop_gradient)

  constant = loss_gradient(lambda _: tf.constant(value))
  np.testing.assert_allclose(
      loss_gradient(margin_fn(True)), constant, atol=1e-14
  )
  assert np.abs(loss_gradient(margin_fn(False)) - constant).max() > 1e-3


@pytest.mark.parametrize('variant', ['eq4', 'release'])
def test_coinciding_points_have_finite_gradients(variant):
  e = tf.ones([4, 2])
  y, mask = np.array([0, 0, 1, 2]), np.ones(4)
  with tf.GradientTape() as tape:
    tape.watch(e)
    centroids = prototypical.prototypes(e, y, mask, 3)
    margin = centroid_triplet.local_margin(centroids)
    loss = triplet(e, y, mask, 1.0, variant, 3) + margin
  assert loss.numpy() == 1.0
  assert np.isfinite(tape.gradient(loss, e)).all()


def test_unknown_choices():
  with pytest.raises(ValueError, match="'eq4' or 'release', found 'sum'"):
    triplet(E, Y, MASK, 1.0, 'sum')
  with pytest.raises(ValueError, match="'mean' or 'sum', found 'eq4'"):
    triplet(E, Y, MASK, 1.0, 'eq4', reduction='eq4')
  with pytest.raises(ValueError, match="'pairs' or 'printed', found 'mean'"):
    margin_of(1, 11, normalizer='mean')
