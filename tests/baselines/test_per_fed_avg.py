"""Per-FedAvg: its gradient in three variants, its rounds, its fine-tuning."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import plain_process
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta import models
from tff_meta import registry
from tff_meta import weights as weights_lib
from tff_meta.baselines import per_fed_avg
from tff_meta.learners import cyclic_batches
from tff_meta.losses import cross_entropy

VARIANTS = ('first_order', 'hessian_free', 'second_order')
CLIENTS = oracle.CLIENTS
CONFIG = dataclasses.replace(
    per_fed_avg.PAPER,
    local_steps=2,
    batch_size=3,  # The first clients have the three batches of a step.
    inner_learning_rate=0.3,
    outer_learning_rate=0.4,
    fine_tuning_steps=3,
    fine_tuning_learning_rate=0.5,
    fine_tuning_decay=0.5,
    fine_tuning_decay_steps=2,
)


class Problem:
  """A perceptron in float64, and three batches."""

  def __init__(self):
    self.model = models.build('mlp', (2, 3), 3)
    self.weights = tf.nest.map_structure(
        lambda w: tf.cast(w, tf.float64), self.model.initialize([3, 4])
    )
    rng = np.random.default_rng(5)
    self.batches = [
        episodes.Examples(
            tf.constant(rng.normal(size=(n, 2, 3))),
            tf.constant(rng.integers(0, 3, n), tf.int32),
            tf.ones(n),
        )
        for n in (4, 5, 6)
    ]

  def loss(self, weights, batch):
    logits = self.model.logits(weights, batch.x, batch.mask)
    return cross_entropy.softmax_cross_entropy(logits, batch.y, batch.mask)

  def gradient_of_loss(self, weights, batch):
    with tf.GradientTape() as tape:
      tape.watch(weights)
      loss = self.loss(weights, batch)
    return tape.gradient(loss, weights)

  def meta_gradient(self, variant, batches=None, **changes):
    config = dataclasses.replace(CONFIG, variant=variant, **changes)
    return per_fed_avg.client_meta_gradient(
        self.loss, config, self.weights, *(batches or self.batches)
    )


def distance(a, b):
  squared = weights_lib.squared_norm(weights_lib.subtract(a, b))
  return np.sqrt(squared / weights_lib.squared_norm(b))


def quadratic(w, batch):
  return 0.5 * batch.x[1] * (w - batch.x[0]) ** 2


def test_one_step_by_hand():
  """With f = h (w - t)^2 / 2 on (t, h) = (1, 1), (3, 1), (0, 2), from w = 0.

  Alpha = .1: w' = .1, v = .1 - 3 = -2.9; the third batch's Hessian is 2.
  """
  batches = [
      episodes.Examples(tf.constant(x, tf.float64), None, None)
      for x in ([1.0, 1.0], [3.0, 1.0], [0.0, 2.0])
  ]
  expected = {
      'first_order': -2.9,
      'hessian_free': -2.9 * (1 - 0.1 * 2),
      'second_order': -2.9 * (1 - 0.1 * 2),
  }
  for variant in VARIANTS:
    config = dataclasses.replace(
        CONFIG, variant=variant, inner_learning_rate=0.1
    )
    loss, gradient = per_fed_avg.client_meta_gradient(
        quadratic, config, tf.constant(0.0, tf.float64), *batches
    )
    np.testing.assert_allclose(loss, 0.5 * 2.9**2, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[variant], rtol=1e-6)


def test_second_order_on_one_batch_is_the_exact_gradient():
  """Of F(w) = f(w - alpha grad f(w)), by finite differences."""
  problem = Problem()
  batch = problem.batches[0]
  _, gradient = problem.meta_gradient('second_order', [batch] * 3)
  rng = np.random.default_rng(6)
  direction = tf.nest.map_structure(
      lambda w: tf.constant(rng.normal(size=w.shape)), problem.weights
  )

  def value(step):
    w = weights_lib.add(problem.weights, weights_lib.scale(direction, step))
    inner = weights_lib.scale(problem.gradient_of_loss(w, batch), 0.3)
    return problem.loss(weights_lib.subtract(w, inner), batch).numpy()

  products = tf.nest.map_structure(
      lambda g, d: tf.reduce_sum(g * d), gradient, direction
  )
  difference = (value(1e-6) - value(-1e-6)) / 2e-6
  # The Python rate 0.3 passes through float32.
  np.testing.assert_allclose(
      sum(tf.nest.flatten(products)), difference, rtol=1e-6
  )
  _, first_order = problem.meta_gradient('first_order', [batch] * 3)
  assert distance(first_order, gradient) > 0.05


def test_first_order_is_the_gradient_after_the_step():
  problem = Problem()
  inner, outer, _ = problem.batches
  step = weights_lib.scale(
      problem.gradient_of_loss(problem.weights, inner), 0.3
  )
  moved = weights_lib.subtract(problem.weights, step)
  loss, gradient = problem.meta_gradient('first_order')
  np.testing.assert_allclose(loss, problem.loss(moved, outer), rtol=1e-6)
  assert distance(gradient, problem.gradient_of_loss(moved, outer)) < 1e-7


def test_hessian_free_is_the_product_with_the_exact_hessian():
  """Whose first 40 rows are built here, at the weights, of the third batch."""
  problem = Problem()
  with tf.GradientTape(persistent=True) as tape:
    tape.watch(problem.weights)
    gradient = problem.gradient_of_loss(problem.weights, problem.batches[2])
    flat = tf.concat(
        [tf.reshape(g, [-1]) for g in tf.nest.flatten(gradient)], 0
    )
    entries = tf.unstack(flat[:40])
  rows = [
      np.concatenate(
          [
              np.ravel(part)
              for part in tf.nest.flatten(
                  tape.gradient(
                      entry,
                      problem.weights,
                      unconnected_gradients=tf.UnconnectedGradients.ZERO,
                  )
              )
          ]
      )
      for entry in entries
  ]
  flatten = lambda w: np.concatenate(  # noqa: E731
      [np.ravel(part) for part in tf.nest.flatten(w)]
  )
  v = flatten(problem.meta_gradient('first_order')[1])
  # The Python rate 0.3 passes through float32.
  expected = v[:40] - np.float32(0.3) * np.array(rows) @ v
  exact = flatten(problem.meta_gradient('second_order')[1])
  np.testing.assert_allclose(exact[:40], expected, rtol=1e-9, atol=1e-12)
  # The difference of gradients errs by delta^2.
  near = flatten(problem.meta_gradient('hessian_free')[1])
  np.testing.assert_allclose(near, exact, atol=1e-6)
  far = flatten(
      problem.meta_gradient('hessian_free', hessian_free_delta=2.0)[1]
  )
  assert np.abs(far - exact).max() > 1e-4


@pytest.mark.parametrize('variant', VARIANTS)
def test_without_an_inner_rate_it_is_the_gradient_of_the_outer_batch(variant):
  problem = Problem()
  _, gradient = problem.meta_gradient(variant, inner_learning_rate=0.0)
  expected = problem.gradient_of_loss(problem.weights, problem.batches[1])
  assert distance(gradient, expected) < 1e-12


@functools.cache
def build(config, build_process):
  return build_process(
      'per_fed_avg',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def run(config, num_rounds, build_process=plain_process.PlainProcess):
  process = build(config, build_process)
  state = process.initialize()
  weights = [oracle.to_vector(process.get_model_weights(state).trainable)]
  for _ in range(num_rounds):
    output = process.next(state, [c.data() for c in CLIENTS])
    state = output.state
    weights.append(oracle.to_vector(process.get_model_weights(state).trainable))
  return weights, output.metrics['client_work']['train']


def pairs(client, row):
  return [client.pairs()[i] for i in row]


def hessian_product(w, v, batch):
  """A central difference with a step of its own."""
  size = 1e-4 / np.linalg.norm(v)
  ahead, behind = (
      oracle.gradient(oracle.cross_entropy, w + s * v, batch)
      for s in (size, -size)
  )
  return (ahead - behind) / (2 * size)


def naive_round(variant, w, round_num):
  moved, loss_sum, num = [], 0.0, 0
  for client in CLIENTS:
    round_seed = oracle.fold_in((0, oracle.RUN_SEED), round_num)
    rows = cyclic_batches.cyclic_minibatches(
        len(client.y), 3, 6, oracle.fold_in(round_seed, client.salt)
    ).indices.numpy()
    theta = w
    for step in range(2):
      inner, outer, hessian = (pairs(client, r) for r in rows[3 * step :][:3])
      grad = functools.partial(oracle.gradient, oracle.cross_entropy)
      ahead = theta - 0.3 * grad(theta, inner)
      v = grad(ahead, outer)
      loss_sum += len(outer) * oracle.cross_entropy(ahead, outer)
      num += len(outer)
      if variant != 'first_order':
        v = v - 0.3 * hessian_product(theta, v, hessian)
      theta = theta - 0.4 * v
    moved.append(theta)
  return np.mean(moved, 0), loss_sum / num


@pytest.mark.parametrize(
    'variant, build_process',
    [
        ('first_order', plain_process.PlainProcess),
        ('hessian_free', plain_process.PlainProcess),
        ('second_order', registry.build),
    ],
)
def test_rounds_by_hand(variant, build_process):
  """Two rounds of two steps with three batches each; clients count alike."""
  # Float32 differences over 2 * delta: an error of 1e-7 becomes 1e-5.
  tolerance = dict(oracle.TOLERANCE)
  config = dataclasses.replace(CONFIG, variant=variant)
  if variant == 'hessian_free':
    config = dataclasses.replace(config, hessian_free_delta=0.01)
    tolerance = dict(rtol=1e-3, atol=5e-5)
  weights, metrics = run(config, 2, build_process)
  w = weights[0]
  for round_num in range(2):
    w, loss = naive_round(variant, w, round_num)
    np.testing.assert_allclose(weights[round_num + 1], w, **tolerance)
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-3)
  assert metrics['num_examples'] == 18


def test_fine_tuning_by_hand():
  """Rates 0.5, 0.5 and 0.25; a known client and a new one alike."""
  method = per_fed_avg.per_fed_avg(
      oracle.build_model(), CONFIG, oracle.NUM_CLASSES
  )
  assert method.known_client is method.new_client
  use = method.known_client()
  oracle.assert_fine_tunes(use, batch_size=3, rates=(0.5, 0.5, 0.25))


@pytest.mark.parametrize(
    'changes',
    [
        dict(variant='exact'),
        dict(batch_size=0),
        dict(fine_tuning_decay_steps=0),
        dict(hessian_free_delta=0.0),
    ],
    ids=str,
)
def test_bad_configurations(changes):
  (name,) = changes
  with pytest.raises(ValueError, match=f'`{name}`'):
    dataclasses.replace(CONFIG, **changes)


def test_a_difference_of_zero_is_fine_where_none_is_taken():
  dataclasses.replace(CONFIG, variant='first_order', hessian_free_delta=0.0)
