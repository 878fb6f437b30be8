"""Polya-Gamma variables, their Gibbs sampling, and predictions given them."""

import dataclasses
import math

import gp_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tff_meta.learners import gp_classifier

PROCESS = gp_classifier.GaussianProcess(output_scale=3.0, length_scale=0.7)
GEOMETRIC = dataclasses.replace(PROCESS, likelihood='geometric')
KAPPA = np.array([0.5, -0.5, -0.5, 0.5])
OMEGAS = np.array([[0.1, 0.3, 0.2, 0.4], [0.25, 0.05, 0.6, 0.15]])


def embeddings(n, seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return np.array([1.0, -0.5, 0.3]) + scale * rng.normal(size=(n, 3))


def sides(process, given, kappa, omegas, query, dtype=tf.float32):
  arrays = given, kappa, omegas, query
  return gp_classifier.side_probabilities(
      process, *(tf.cast(array, dtype) for array in arrays)
  )


@pytest.mark.parametrize('c', [0.0, 1e-4, 0.8, -4.0, 12.0])
def test_moments_of_polya_gamma_variables(c):
  """Polson et al.: the mean, and E exp(-t omega); the variance is its second.

  Standard errors of 200,000 draws are 2e-3 of the mean and 5e-3 of the variance
  at most.
  """
  omega = gp_classifier.draw_polya_gamma(
      tf.fill([1000, 200], c), tf.constant([1, 2])
  )
  assert omega.shape == (1000, 200) and np.min(omega) > 0
  a = max(abs(c), 1e-2)  # Below it the formulas lose their digits.
  mean = math.tanh(a / 2) / (2 * a)
  variance = (math.sinh(a) - a) / (4 * a**3 * math.cosh(a / 2) ** 2)
  omega = omega.numpy().astype(np.float64)
  np.testing.assert_allclose(omega.mean(), mean, rtol=5e-3)
  np.testing.assert_allclose(omega.var(), variance, rtol=2e-2)
  for t in (0.5, 3.0, 20.0):
    expected = math.cosh(a / 2) / math.cosh(math.sqrt(a * a / 4 + t / 2))
    np.testing.assert_allclose(
        np.exp(-t * omega).mean(), expected, rtol=5e-3, atol=1e-4
    )


def test_the_covariance_sees_directions_only():
  a, b = embeddings(3, seed=1), embeddings(2, seed=2)
  actual = PROCESS.covariance(tf.constant(a), tf.constant(7 * b))
  expected = [[oracle.covariance(PROCESS, x, y) for y in b] for x in a]
  np.testing.assert_allclose(actual, expected, rtol=1e-6)
  np.testing.assert_allclose(
      PROCESS.prior(tf.constant(a)), oracle.prior(PROCESS, a), rtol=1e-6
  )


@pytest.mark.parametrize('process', [PROCESS, GEOMETRIC], ids=['mean', 'geo'])
def test_predictions_by_a_naive_implementation(process):
  given, query = embeddings(4, seed=1), embeddings(3, seed=2)
  actual = sides(process, given, KAPPA, OMEGAS, query)
  expected = [
      oracle.left_probability(process, given, KAPPA, OMEGAS, x) for x in query
  ]
  np.testing.assert_allclose(actual[0], expected, rtol=1e-4)
  np.testing.assert_allclose(actual[1], 1 - np.array(expected), rtol=1e-4)


def test_other_sides_other_answers():
  """Only with the mean of the sigmoid do both sides have the same rights."""
  given, query = embeddings(4, seed=1), embeddings(3, seed=2)
  for process, same in ((PROCESS, True), (GEOMETRIC, False)):
    left, _ = sides(process, given, KAPPA, OMEGAS, query)
    _, right = sides(process, given, -KAPPA, OMEGAS, query)
    assert np.allclose(left, right, rtol=1e-4) == same


def test_the_quadrature():
  """Far from everything f has the prior; its integral on a fine grid."""
  process = gp_classifier.GaussianProcess(length_scale=0.01)
  f = np.linspace(-40, 40, 80001)
  density = np.exp(-(f**2) / (2 * 8.001)) / math.sqrt(2 * math.pi * 8.001)
  log_left = np.sum(density * -np.logaddexp(0, -f)) * (f[1] - f[0])
  for likelihood, expected in (
      ('mean', 0.5),
      ('geometric', math.exp(log_left)),
  ):
    process = dataclasses.replace(process, likelihood=likelihood)
    left, _ = sides(process, [[1.0, 0.0]], [0.5], [[0.2]], [[0.0, 1.0]])
    np.testing.assert_allclose(left, [expected], rtol=1e-3)
  process = dataclasses.replace(process, likelihood='mean', length_scale=1.0)
  left, _ = sides(process, [[1.0, 0.0]], [0.5], [[0.2]], [[1.0, 0.0]])
  variance = 8.001 - 64 / (8.001 + 5)
  mean = 8 / (8.001 + 5) * 2.5
  density = np.exp(-((f - mean) ** 2) / (2 * variance))
  exact = np.sum(density / (1 + np.exp(-f))) / np.sum(density)
  np.testing.assert_allclose(left, [exact], rtol=1e-4)


@pytest.mark.parametrize('process', [PROCESS, GEOMETRIC], ids=['mean', 'geo'])
def test_gradients_by_central_differences(process):
  """Of what is given and of what is predicted, in float64."""
  parts = [tf.constant(embeddings(n, seed=n)) for n in (4, 3)]
  kappa, omegas = tf.constant(KAPPA), tf.constant(OMEGAS)

  def loss(given, query):
    left, right = tf.unstack(
        gp_classifier.side_probabilities(process, given, kappa, omegas, query)
    )
    return -tf.reduce_sum(tf.math.log(left) + 2 * tf.math.log(right))

  with tf.GradientTape() as tape:
    tape.watch(parts)
    value = loss(*parts)
  gradients = tape.gradient(value, parts)
  for which, gradient in enumerate(gradients):
    for row, column in np.ndindex(*gradient.shape):
      step = np.zeros(gradient.shape)
      step[row, column] = 1e-5
      ends = []
      for sign in (1, -1):
        moved = list(parts)
        moved[which] = moved[which] + sign * step
        ends.append(float(loss(*moved)))
      np.testing.assert_allclose(
          gradient[row, column], (ends[0] - ends[1]) / 2e-5, atol=1e-7
      )


def _grid(process, given, kappa):
  """Values of f at two embeddings, and what prior and posterior have there.

  Returns:
    f [g, 2], prior [g], posterior [g].
  """
  axis = np.linspace(-9, 9, 361)
  f = np.stack(np.meshgrid(axis, axis, indexing='ij'), -1).reshape(-1, 2)
  inverse = np.linalg.inv(oracle.prior(process, given))
  before = np.exp(-np.sum(f @ inverse * f, 1) / 2)
  after = before * np.prod(1 / (1 + np.exp(-2 * kappa * f)), 1)
  return f, before / before.sum(), after / after.sum()


def test_gibbs_sampling_by_numerical_integration():
  """Two examples: the mean of omega, and a prediction, by the exact posterior.

  Given f the mean of omega is `tanh(f / 2) / (2 f)`. Standard errors of 20,000
  chains are below 1e-3.
  """
  process = gp_classifier.GaussianProcess(length_scale=0.4, gibbs_steps=10)
  given = embeddings(2, seed=5)
  query = given[:1] + 0.1
  kappa = np.array([0.5, -0.5])
  draws = {}
  for num_steps in (0, 10):
    draws[num_steps] = gp_classifier.draw_omegas(
        dataclasses.replace(process, gibbs_steps=num_steps),
        tf.constant(given, tf.float32),
        tf.constant(kappa, tf.float32),
        20000,
        tf.constant([3, 4]),
    )
    assert draws[num_steps].shape == (20000, 2)

  f, before, after = _grid(process, given, kappa)
  mean_omega = np.tanh(f / 2) / (2 * np.where(f == 0, 1, f))
  mean_omega = np.where(f == 0, 0.25, mean_omega)
  np.testing.assert_allclose(
      np.mean(draws[0], 0), before @ mean_omega, atol=4e-3
  )
  expected = after @ mean_omega
  np.testing.assert_allclose(np.mean(draws[10], 0), expected, atol=4e-3)

  matrix = oracle.prior(process, given)
  cross = np.array([oracle.covariance(process, e, query[0]) for e in given])
  weights = np.linalg.solve(matrix, cross)
  variance = process.output_scale + gp_classifier.JITTER - cross @ weights
  points, masses = np.polynomial.hermite.hermgauss(40)
  values = (f @ weights)[:, None] + math.sqrt(2 * variance) * points
  exact = after @ (1 / (1 + np.exp(-values)) @ masses) / math.sqrt(math.pi)
  left, _ = sides(process, given, kappa, draws[10], query)
  np.testing.assert_allclose(left, [exact], atol=4e-3)
  assert exact > 0.6  # So it is no guess.


def test_draws_are_of_the_seed_alone_and_no_gradient_flows_through_them():
  given = tf.constant(embeddings(4, seed=1), tf.float32)
  kappa = tf.constant(KAPPA, tf.float32)

  def draw(seed):
    return gp_classifier.draw_omegas(PROCESS, given, kappa, 3, seed)

  with tf.GradientTape() as tape:
    tape.watch(given)
    first = draw(tf.constant([1, 2]))
  assert tape.gradient(first, given) is None
  np.testing.assert_array_equal(first, draw(tf.constant([1, 2])))
  assert np.min(np.abs(first - draw(tf.constant([1, 3])))) > 0
  assert len(np.unique(first)) == 12  # Chains and examples have their own.


def test_the_prior_is_drawn_where_float32_cannot_factor_it():
  """As 10,000 examples and output scale 8 have it: eigenvalues 1e-3, 8e4."""
  process = gp_classifier.GaussianProcess(output_scale=800.0, gibbs_steps=0)
  given = tf.constant(embeddings(100, seed=1, scale=1e-3), tf.float32)
  assert np.isnan(tf.linalg.cholesky(process.prior(given))).any()
  omegas = gp_classifier.draw_omegas(
      process, given, tf.fill([100], 0.5), 2, tf.constant([1, 2])
  )
  assert np.isfinite(omegas).all() and np.min(omegas) > 0


def test_embeddings_that_hardly_differ():
  """As those of a network that has not learned: float32 is as float64."""
  process = gp_classifier.GaussianProcess()
  given = embeddings(300, seed=1, scale=1e-3).astype(np.float32)
  query = embeddings(5, seed=2, scale=1e-3).astype(np.float32)
  kappa = np.where(np.arange(300) % 3 > 0, 0.5, -0.5)
  omegas = gp_classifier.draw_omegas(
      process,
      tf.constant(given),
      tf.constant(kappa, tf.float32),
      4,
      tf.constant([1, 2]),
  )
  assert np.isfinite(omegas).all() and np.min(omegas) > 0
  actual = sides(process, given, kappa, omegas, query)
  exact = sides(process, given, kappa, omegas, query, tf.float64)
  np.testing.assert_allclose(actual, exact, rtol=1e-3)
  np.testing.assert_allclose(actual[0], 2 / 3, atol=0.1)
