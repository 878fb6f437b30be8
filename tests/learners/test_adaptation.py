"""Gradients through the inner loop: by hand and by finite differences."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta import models
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.learners import adaptation
from tff_meta.losses import cross_entropy
from tff_meta.losses import prototypical

SEED = (3, 7)
RNG = np.random.default_rng(8)


def scalar_examples(*targets):
  return episodes.Examples(
      tf.constant(targets, tf.float64),
      tf.zeros([len(targets)], tf.int32),
      tf.ones([len(targets)]),
  )


def scalar_loss(w, batch):
  return cross_entropy.masked_mean(0.5 * (w - batch.x) ** 2, batch.mask)


def scalar_meta_gradient(learning_rate, order, targets=(1.0,), batch_size=1):
  support = scalar_examples(*targets)
  return adaptation.meta_gradient(
      scalar_loss,
      lambda w: 0.5 * (w - 3.0) ** 2,
      tf.constant(0.0, tf.float64),
      support,
      episodes.minibatches(len(targets), batch_size, SEED, shuffle=False),
      learning_rate,
      order=order,
  )


@pytest.mark.parametrize('order, expected', [(1, -2.9), (2, -2.61)])
def test_one_step_by_hand(order, expected):
  """L_s = (w - 1)^2 / 2, L_q = (w - 3)^2 / 2, w = 0, rate .1: w' = .1.

  dL/dw is w' - 3 = -2.9, times (1 - .1) in second order; dL/drate is
  -(w - 1)(w' - 3) = -2.9.
  """
  gradient = scalar_meta_gradient(tf.constant(0.1, tf.float64), order)
  np.testing.assert_allclose(gradient.loss, 0.5 * 2.9**2, rtol=1e-12)
  np.testing.assert_allclose(gradient.weights, expected, rtol=1e-12)
  np.testing.assert_allclose(gradient.learning_rate, -2.9, rtol=1e-12)


@pytest.mark.parametrize('order, factor', [(1, 1.0), (2, 0.64)])
def test_two_steps_by_hand(order, factor):
  """Targets 1 and .25, rate .2: w = 0, then .2, then .2 + .2 * .05 = .21.

  dL/dw is .21 - 3, times (1 - .2)^2 in second order.
  """
  gradient = scalar_meta_gradient(0.2, order, targets=(1.0, 0.25))
  # The Python rate 0.2 passes through float32.
  np.testing.assert_allclose(gradient.weights, -2.79 * factor, rtol=1e-6)


def test_the_loss_is_the_mean_before_each_step():
  """Of (0 - 1)^2 / 2 and (.2 - .25)^2 / 2; after the second step w = .21."""
  batches = episodes.minibatches(2, 1, SEED, shuffle=False)
  adapted, loss = adaptation.inner_loop_and_loss(
      scalar_loss,
      tf.constant(0.0, tf.float64),
      scalar_examples(1.0, 0.25),
      batches,
      0.2,
      order=2,
  )
  np.testing.assert_allclose(adapted, 0.21, rtol=1e-6)
  np.testing.assert_allclose(loss, (0.5 + 0.5 * 0.05**2) / 2, rtol=1e-6)
  none = episodes.minibatches(0, 1, SEED)
  adapted, loss = adaptation.inner_loop_and_loss(
      scalar_loss, tf.constant(7.0), scalar_examples(), none, 0.2, order=2
  )
  assert (float(adapted), float(loss)) == (7.0, 0.0)


@pytest.mark.parametrize(
    'first_scored, expected', [(1, 0.5 * 0.05**2), (2, 0.0)]
)
def test_only_the_losses_that_are_scored_are_averaged(first_scored, expected):
  batches = episodes.minibatches(2, 1, SEED, shuffle=False)
  adapted, loss = adaptation.inner_loop_and_loss(
      scalar_loss,
      tf.constant(0.0, tf.float64),
      scalar_examples(1.0, 0.25),
      batches,
      0.2,
      order=2,
      first_scored=tf.constant(first_scored),
  )
  np.testing.assert_allclose(adapted, 0.21, rtol=1e-6)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_step_of_sgd():
  moved = adaptation.outer_step(
      {'w': tf.constant([1.0, 2.0])},
      {'w': tf.constant([3.0, -1.0])},
      0.5,
      fresh_adam=False,
  )
  np.testing.assert_allclose(moved['w'], [-0.5, 2.5])


def test_a_step_of_fresh_adam_is_its_rate_in_every_coordinate():
  gradient = tf.constant([3.0, -1e-4, 0.0, 1e-8])
  moved = adaptation.outer_step(tf.zeros(4), gradient, 0.3, fresh_adam=True)
  np.testing.assert_allclose(moved, [-0.3, 0.3, 0, -0.15], rtol=2e-4)
  adam = optimizers.build_optimizer('adam', 0.3)
  state = adam.initialize(tf.TensorSpec([4]))
  _, expected = adam.next(state, tf.zeros(4), gradient)
  np.testing.assert_allclose(moved, expected, rtol=1e-6)


def test_a_rate_of_zero_is_one_gradient_step_on_the_query_set():
  for order in (1, 2):
    gradient = scalar_meta_gradient(0.0, order)
    assert gradient.weights.numpy() == -3.0


def test_unknown_order():
  with pytest.raises(ValueError, match='1 .*or 2, found 3'):
    scalar_meta_gradient(0.1, 3)


class Problem:
  """A network in float64, six support examples, three query examples.

  The images are not smaller because batch normalisation over a handful of
  numbers has huge third derivatives, which finite differences do not survive.
  """

  def __init__(self, name, kind):
    num_classes = None if kind == 'prototypes' else 3
    self.model = models.build(name, (12, 13, 1), num_classes)
    self.kind = kind
    weights = self.model.initialize(SEED)
    self.weights = tf.nest.map_structure(
        lambda w: tf.cast(w, tf.float64), weights
    )
    self.support, self.query = (
        episodes.Examples(
            tf.constant(RNG.normal(size=(n, 12, 13, 1))),
            tf.constant(np.arange(n) % 3, tf.int32),
            tf.constant([1.0] * (n - 1) + [last]),
        )
        for n, last in ((6, 1.0), (4, 0.0))
    )
    # Two steps; the second minibatch is filled up.
    self.batches = episodes.minibatches(6, 4, SEED)

  def loss_fn(self, weights, batch):
    x, y, mask = batch[:3]
    if self.kind == 'head':
      logits = self.model.logits(weights, x, mask)
      return cross_entropy.softmax_cross_entropy(logits, y, mask)
    e = self.model.embed(weights['body'], x, mask)
    prototypes = prototypical.prototypes(e, y, mask, 3)
    return prototypical.prototypical_loss(e, y, mask, prototypes)

  def query_loss(self, weights):
    return self.loss_fn(weights, self.query)

  def adapt(self, weights, learning_rate, order=2):
    return adaptation.inner_loop(
        self.loss_fn,
        weights,
        self.support,
        self.batches,
        learning_rate,
        order=order,
    )

  def meta_gradient(self, learning_rate, order):
    return adaptation.meta_gradient(
        self.loss_fn,
        self.query_loss,
        self.weights,
        self.support,
        self.batches,
        learning_rate,
        order=order,
    )

  def random_like_weights(self):
    return tf.nest.map_structure(
        lambda w: tf.constant(RNG.normal(size=w.shape)), self.weights
    )


def inner_product(a, b):
  products = tf.nest.map_structure(lambda x, y: tf.reduce_sum(x * y), a, b)
  return sum(tf.nest.flatten(products))


def relative_distance(a, b):
  difference = weights_lib.subtract(a, b)
  squared = weights_lib.squared_norm(difference) / weights_lib.squared_norm(b)
  return np.sqrt(squared)


@pytest.mark.parametrize(
    'name, kind',
    [
        ('mlp', 'head'),
        pytest.param('conv4', 'prototypes', marks=pytest.mark.slow),
    ],
)
def test_second_order_against_finite_differences(name, kind):
  """Along random directions of the weights and of per-parameter rates."""
  problem = Problem(name, kind)
  rates = tf.nest.map_structure(
      lambda w: 0.05 + 0.01 * tf.constant(RNG.normal(size=w.shape)),
      problem.weights,
  )
  gradient = tf.function(
      lambda: problem.meta_gradient(rates, 2), autograph=False
  )()
  query_loss = tf.function(
      lambda weights, rates: problem.query_loss(problem.adapt(weights, rates)),
      autograph=False,
  )
  direction = problem.random_like_weights()
  norm = tf.sqrt(weights_lib.squared_norm(direction))
  direction = weights_lib.scale(direction, 1 / norm)
  step = 1e-5

  def moved(point, sign):
    return weights_lib.add(point, weights_lib.scale(direction, sign * step))

  for actual, above, below in (
      (
          gradient.weights,
          query_loss(moved(problem.weights, 1), rates),
          query_loss(moved(problem.weights, -1), rates),
      ),
      (
          gradient.learning_rate,
          query_loss(problem.weights, moved(rates, 1)),
          query_loss(problem.weights, moved(rates, -1)),
      ),
  ):
    # Rounding 1e-15 / step = 1e-10 and truncation step^2 = 1e-10 times a third
    # derivative; the first order is off by more than 1e-3.
    np.testing.assert_allclose(
        inner_product(actual, direction),
        (above - below) / (2 * step),
        rtol=1e-5,
        atol=1e-8,
    )


def test_first_order_is_the_gradient_at_the_adapted_weights():
  problem = Problem('conv4', 'prototypes')
  first, second = (problem.meta_gradient(0.05, order) for order in (1, 2))
  adapted = problem.adapt(problem.weights, 0.05)
  with tf.GradientTape() as tape:
    tape.watch(adapted)
    loss = problem.query_loss(adapted)
  expected = tape.gradient(
      loss, adapted, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12),
      first.weights,
      expected,
  )
  # The two orders differ, so the test can fail.
  assert relative_distance(first.weights, second.weights) > 1e-3


@pytest.mark.parametrize('order', [1, 2])
def test_constant_rates_are_one_rate(order):
  problem = Problem('mlp', 'head')
  rate = tf.constant(0.05, tf.float64)
  rates = tf.nest.map_structure(
      lambda w: tf.fill(w.shape, rate), problem.weights
  )
  one, many = (problem.meta_gradient(lr, order) for lr in (rate, rates))
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
      (one.loss, one.weights),
      (many.loss, many.weights),
  )
  total = sum(tf.reduce_sum(g) for g in tf.nest.flatten(many.learning_rate))
  np.testing.assert_allclose(one.learning_rate, total, rtol=1e-10)


def test_one_step_rate_gradient_is_minus_the_product_of_gradients():
  problem = Problem('mlp', 'head')
  problem.batches = episodes.minibatches(6, None, SEED)
  rates = tf.nest.map_structure(
      lambda w: tf.fill(w.shape, tf.constant(0.05, tf.float64)),
      problem.weights,
  )
  actual = problem.meta_gradient(rates, 2).learning_rate

  def gradient(loss_fn, weights):
    with tf.GradientTape() as tape:
      tape.watch(weights)
      loss = loss_fn(weights)
    return tape.gradient(loss, weights)

  at_support = gradient(
      lambda w: problem.loss_fn(w, problem.support), problem.weights
  )
  adapted = problem.adapt(problem.weights, rates)
  at_query = gradient(problem.query_loss, adapted)
  tf.nest.map_structure(
      lambda a, s, q: np.testing.assert_allclose(a, -s * q, atol=1e-12),
      actual,
      at_support,
      at_query,
  )


@pytest.mark.parametrize('order', [1, 2])
def test_graphs_agree_with_eager(order):
  problem = Problem('mlp', 'head')
  eager = problem.meta_gradient(0.05, order)
  graph = tf.function(
      lambda: problem.meta_gradient(0.05, order), autograph=False
  )()
  # Float64 sums in another order.
  np.testing.assert_allclose(graph.loss, eager.loss, rtol=1e-12)
  assert relative_distance(graph.weights, eager.weights) < 1e-12


def test_second_order_traces_into_a_tff_graph():
  computation = tff.tensorflow.computation(
      lambda: Problem('mlp', 'head').meta_gradient(0.05, 2).weights
  )
  expected = tf.nest.map_structure(
      lambda w: tf.TensorSpec(w.shape, w.dtype), Problem('mlp', 'head').weights
  )
  tff.types.tensorflow_to_type(expected).check_assignable_from(
      computation.type_signature.result
  )
