"""Facts of the papers, and naive NumPy with loops as the oracle."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.losses import prototypical

RNG = np.random.default_rng(1)
# Four classes of unequal size, class 2 absent; rows 3 and 7 are padding.
E = RNG.normal(size=(9, 3))
Y = np.array([0, 1, 0, 3, 3, 1, 0, 0, 3])
MASK = np.array([1, 1, 1, 0, 1, 1, 1, 0, 1])
NUM_CLASSES = 4


def naive_prototypes(e, y, mask, num_classes):
  means = np.zeros((num_classes, e.shape[1]))
  present = np.zeros(num_classes)
  for c in range(num_classes):
    members = [e[i] for i in range(len(e)) if mask[i] and y[i] == c]
    if members:
      means[c], present[c] = np.mean(members, axis=0), 1
  return means, present


def naive_loss(e, y, mask, means, present, exclude_true_class, squared):
  losses = []
  for i in range(len(e)):
    if not mask[i] or not present[y[i]]:
      continue
    distance = [np.sum((e[i] - mean) ** 2) for mean in means]
    if not squared:
      distance = np.sqrt(distance)
    total = 0.0
    for c in range(len(means)):
      if present[c] and not (exclude_true_class and c == y[i]):
        total += np.exp(-distance[c])
    if total > 0:
      losses.append(distance[y[i]] + np.log(total))
  return np.mean(losses) if losses else 0.0


def make_prototypes(e=E, y=Y, mask=MASK, num_classes=NUM_CLASSES):
  return prototypical.prototypes(
      tf.constant(e), tf.constant(y), tf.constant(mask), num_classes
  )


def test_prototypes_against_the_oracle():
  means, present = make_prototypes()
  expected_means, expected_present = naive_prototypes(E, Y, MASK, NUM_CLASSES)
  np.testing.assert_allclose(means, expected_means, atol=1e-12)
  np.testing.assert_array_equal(present, expected_present)
  np.testing.assert_array_equal(present, [1, 1, 0, 1])


def test_labels_outside_the_classes_count_nowhere():
  means, present = make_prototypes(
      [[1.0], [2.0], [5.0]], [0, -1, 2], [1] * 3, 2
  )
  assert means.numpy().tolist() == [[1.0], [0.0]]
  assert present.numpy().tolist() == [1.0, 0.0]


def test_prototypes_of_nothing():
  means, present = make_prototypes(
      np.zeros([0, 3]), np.zeros([0], np.int32), np.zeros([0]), 2
  )
  assert means.numpy().tolist() == [[0.0] * 3] * 2
  assert present.numpy().tolist() == [0.0, 0.0]


def test_squared_distances_against_the_oracle():
  c = RNG.normal(size=(4, 3))
  expected = [[np.sum((a - b) ** 2) for b in c] for a in E]
  actual = prototypical.squared_distances(tf.constant(E), tf.constant(c))
  np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_squared_distances_far_from_the_origin():
  """Expanding the square without moving the origin is off by about 1 here."""
  e = (1000.0 + E).astype(np.float32)
  expected = np.sum((e[:, None] - e[None]).astype(np.float64) ** 2, -1)
  actual = prototypical.squared_distances(tf.constant(e), tf.constant(e))
  assert (actual.numpy() >= 0).all()
  # Float32 resolution at 1000 is 6e-5: the mean is rounded, and distances of
  # order 10 carry 1e-6 of themselves.
  np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize('squared', [True, False])
@pytest.mark.parametrize('exclude_true_class', [True, False])
def test_loss_against_the_oracle(squared, exclude_true_class):
  means, present = naive_prototypes(E, Y, MASK, NUM_CLASSES)
  queries = RNG.normal(size=(5, 3))
  y, mask = np.array([3, 0, 2, 1, 1]), np.array([1, 1, 1, 0, 1])
  expected = naive_loss(
      queries, y, mask, means, present, exclude_true_class, squared
  )
  actual = prototypical.prototypical_loss(
      tf.constant(queries),
      tf.constant(y),
      tf.constant(mask),
      make_prototypes(),
      exclude_true_class,
      squared,
  )
  np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_loss_toy():
  """Prototypes 0 and 2; 0.5 of class 0 and 1.0 of class 1.

  log(1 + exp(0.25 - 2.25)) = 0.126928 and log 2 = 0.693147.
  """
  prototypes = prototypical.Prototypes(
      tf.constant([[0.0], [2.0]]), tf.constant([1.0, 1.0])
  )
  loss = prototypical.prototypical_loss(
      tf.constant([[0.5], [1.0]]),
      tf.constant([0, 1]),
      tf.constant([1.0, 1.0]),
      prototypes,
  )
  np.testing.assert_allclose(loss, 0.410038, atol=1e-6)  # Printed digits.


def loss_and_gradient(e, y, mask, num_classes, **options):
  e = tf.convert_to_tensor(e)
  with tf.GradientTape() as tape:
    tape.watch(e)
    prototypes = prototypical.prototypes(e, y, mask, num_classes)
    loss = prototypical.prototypical_loss(e, y, mask, prototypes, **options)
  return loss.numpy(), tape.gradient(loss, e).numpy()


@pytest.mark.parametrize('exclude_true_class', [True, False])
def test_one_class_has_no_loss_and_no_gradient(exclude_true_class):
  loss, gradient = loss_and_gradient(
      E, np.full(9, 2), MASK, NUM_CLASSES, exclude_true_class=exclude_true_class
  )
  assert loss == 0
  np.testing.assert_array_equal(gradient, np.zeros_like(E))


def test_no_examples_have_no_loss_and_no_gradient():
  loss, gradient = loss_and_gradient(E, Y, np.zeros(9), NUM_CLASSES)
  assert loss == 0
  np.testing.assert_array_equal(gradient, np.zeros_like(E))


def test_gradient_flows_through_prototypes_and_not_through_padding():
  loss, gradient = loss_and_gradient(E, Y, MASK, NUM_CLASSES)
  numeric = np.zeros_like(E)
  for index in np.ndindex(*E.shape):
    step = np.zeros_like(E)
    step[index] = 1e-6
    above, _ = loss_and_gradient(E + step, Y, MASK, NUM_CLASSES)
    below, _ = loss_and_gradient(E - step, Y, MASK, NUM_CLASSES)
    numeric[index] = (above - below) / 2e-6
  assert loss > 0
  # Central differences in float64: rounding 1e-16 / 1e-6.
  np.testing.assert_allclose(gradient, numeric, atol=1e-8)
  np.testing.assert_array_equal(gradient[[3, 7]], 0)


@pytest.mark.parametrize('squared', [True, False])
def test_coinciding_points_have_finite_gradients(squared):
  e = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], np.float32)
  loss, gradient = loss_and_gradient(
      e, np.array([0, 1, 1]), np.ones(3), 3, squared=squared
  )
  np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)  # Float32.
  np.testing.assert_array_equal(gradient, np.zeros_like(e))


def test_loss_does_not_depend_on_order_names_or_origin():
  loss, _ = loss_and_gradient(E, Y, MASK, NUM_CLASSES)
  order = RNG.permutation(9)
  names = np.array([2, 0, 3, 1])
  for e, y, mask in (
      (E[order], Y[order], MASK[order]),
      (E, names[Y], MASK),
      (E + 5.0, Y, MASK),
  ):
    moved, _ = loss_and_gradient(e, y, mask, NUM_CLASSES)
    np.testing.assert_allclose(moved, loss, rtol=1e-12)


def test_absent_classes_are_never_predicted():
  prototypes = prototypical.Prototypes(
      tf.constant([[0.0, 0.0], [4.0, 4.0], [-4.0, -4.0]]),
      tf.constant([0.0, 1.0, 1.0]),
  )
  e = tf.constant([[-1.0, 0.0], [4.0, 5.0], [0.0, 0.0]])
  logits = prototypical.prototype_logits(e, prototypes)
  assert np.isfinite(logits).all()
  assert tf.nn.softmax(logits).numpy()[:, 0].tolist() == [0.0, 0.0, 0.0]
  # The last is as far from class 1 as from class 2: the smaller label.
  predicted = prototypical.nearest_prototype(e, prototypes)
  assert predicted.numpy().tolist() == [2, 1, 1]


@pytest.mark.parametrize('far', [1e7, 3e38, np.nan])
def test_what_absent_classes_have_changes_nothing(far):
  """FedProto's server has the prototypes of others, who may have diverged."""
  means = np.array([[1.0, 2.0], [1.5, 2.0], [0.0, 0.0]], np.float32)
  present = tf.constant([1.0, 1.0, 0.0])
  e = tf.constant([[1.2, 2.0], [1.3, 2.0]])
  expected = prototypical.prototype_logits(
      e, prototypical.Prototypes(tf.constant(means), present)
  )
  means[2] = far
  diverged = prototypical.Prototypes(tf.constant(means), present)
  found = prototypical.prototype_logits(e, diverged)
  np.testing.assert_array_equal(found, expected)
  assert prototypical.nearest_prototype(e, diverged).numpy().tolist() == [0, 1]


def test_squared_and_plain_distance_predict_the_same():
  prototypes = make_prototypes()
  plain = prototypical.prototype_logits(tf.constant(E), prototypes, False)
  np.testing.assert_array_equal(
      prototypical.nearest_prototype(tf.constant(E), prototypes),
      np.argmax(plain, 1),
  )


def averaged(uploads, over='holders'):
  """Averages label -> value uploads of one dimension with weights."""
  sums = [
      prototypical.weigh_prototypes(
          prototypical.Prototypes(
              tf.constant([[held.get(c, 0.0)] for c in range(3)]),
              tf.constant([float(c in held) for c in range(3)]),
          ),
          tf.constant(weight),
      )
      for held, weight in uploads
  ]
  total = tf.nest.map_structure(lambda *s: sum(s), *sums)
  means, present = prototypical.divide_prototypes(total, over)
  return means[:, 0].numpy().tolist(), present.numpy().tolist()


def test_prototypes_are_averaged_over_their_holders():
  """.25 * 0 + .75 * 4 = 3; class 1 is that of its holder.

  Over all clients class 1, of weight 1/4, would be a quarter of it.
  """
  uploads = [({0: 0.0, 1: 8.0}, 0.25), ({0: 4.0}, 0.75)]
  assert averaged(uploads) == ([3, 8, 0], [1, 1, 0])
  assert averaged(uploads, 'all') == ([3, 2, 0], [1, 1, 0])


def test_a_client_of_weight_zero_holds_nothing():
  assert averaged([({0: 5.0, 1: 5.0}, 0.0), ({0: 4.0}, 2.0)]) == (
      [4, 0, 0],
      [1, 0, 0],
  )
