import numpy as np
import pytest
import tensorflow as tf

from tff_meta.models import layers

RNG = np.random.default_rng(5)
X = RNG.normal(size=(5, 3, 2, 2))
GAMMA, BETA = np.array([2.0, 0.5]), np.array([-1.0, 3.0])


def batch_norm(x, mask=None):
  x = tf.convert_to_tensor(x)
  gamma, beta = tf.cast(GAMMA, x.dtype), tf.cast(BETA, x.dtype)
  return layers.batch_norm(x, gamma, beta, mask)


def test_batch_norm_against_the_oracle():
  expected = np.zeros_like(X)
  for c in range(2):
    values = X[..., c]
    mean = values.sum() / 30
    variance = ((values - mean) ** 2).sum() / 30  # Biased.
    normal = (values - mean) / np.sqrt(variance + 1e-5)
    expected[..., c] = GAMMA[c] * normal + BETA[c]
  np.testing.assert_allclose(batch_norm(X), expected, rtol=1e-10)


def test_padding_does_not_enter_the_statistics():
  padded = np.concatenate([X[:2], np.full((3, 3, 2, 2), 77.0), X[2:]])
  mask = tf.constant([1.0, 1, 0, 0, 0, 1, 1, 1])
  actual = tf.boolean_mask(batch_norm(padded, mask), mask > 0)
  np.testing.assert_allclose(actual, batch_norm(X), rtol=1e-10)


@pytest.mark.parametrize('num_padding', [0, 3])
def test_a_single_example_is_finite(num_padding):
  """One 1x1 example has variance zero: it is mapped to beta."""
  x = tf.constant(RNG.normal(size=(1 + num_padding, 1, 1, 2)), tf.float32)
  mask = tf.constant([1.0] + [0.0] * num_padding)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = batch_norm(x, mask)
    loss = tf.reduce_sum(y[0] ** 2)
  np.testing.assert_allclose(y[0, 0, 0], BETA, rtol=1e-6)
  assert np.isfinite(tape.gradient(loss, x)).all()


def test_only_padding_is_finite():
  assert np.isfinite(batch_norm(X, tf.zeros([5]))).all()


@pytest.mark.parametrize('mask', [None, [1.0, 0, 1, 1, 1]])
def test_batch_norm_second_derivative(mask):
  """Hessian times vector against differences of gradients, in float64."""
  scale, direction = RNG.normal(size=X.shape), RNG.normal(size=X.shape)
  scale *= np.reshape(mask or np.ones(5), [5, 1, 1, 1])

  def gradient(x):
    with tf.GradientTape() as tape:
      tape.watch(x)
      loss = tf.reduce_sum(scale * batch_norm(x, mask) ** 3)
    return tape.gradient(loss, x)

  x = tf.constant(X)
  with tf.GradientTape() as tape:
    tape.watch(x)
    slope = tf.reduce_sum(gradient(x) * direction)
  actual = tape.gradient(slope, x)
  step = 1e-5
  above, below = gradient(x + step * direction), gradient(x - step * direction)
  # Truncation step^2 and rounding 1e-16 / step, times values of order 100;
  # `tf.nn.moments` is off by a third.
  np.testing.assert_allclose(
      actual, (above - below) / (2 * step), rtol=0, atol=1e-6
  )


def test_uniform_fan_in():
  kernel, bias = layers.uniform_fan_in([1, 2], (5, 5, 4, 50))
  bound = 0.1  # 1 / sqrt(5 * 5 * 4).
  assert (kernel.shape, bias.shape) == ((5, 5, 4, 50), (50,))
  assert 0.095 < np.abs(kernel).max() <= bound
  assert 0.08 < np.abs(bias).max() <= bound
  # The mean of 5,000 draws: 4 standard errors of bound / sqrt(3 * 5000).
  assert abs(np.mean(kernel)) < 4 * bound / np.sqrt(15000)


def test_kaiming_normal():
  kernel, bias = layers.kaiming_normal([1, 2], (3, 3, 20, 40))
  # sqrt(2 / 180); the standard error of 7,200 draws is 0.8 %.
  np.testing.assert_allclose(np.std(kernel), 0.10541, rtol=0.04)
  assert abs(np.mean(kernel)) < 4 * 0.10541 / np.sqrt(7200)
  assert bias.numpy().tolist() == [0.0] * 40


def test_xavier_uniform():
  kernel, bias = layers.xavier_uniform([1, 2], (200, 40))
  bound = np.sqrt(6 / 240)
  assert 0.99 * bound < np.abs(kernel).max() <= bound
  assert bias.numpy().tolist() == [0.0] * 40


def test_initialisers_follow_the_seed():
  for initializer in (
      layers.uniform_fan_in,
      layers.kaiming_normal,
      layers.xavier_uniform,
  ):
    first, again, other = (
        initializer(seed, (4, 3))[0].numpy()
        for seed in ([1, 2], [1, 2], [1, 3])
    )
    assert (first == again).all()
    assert not (first == other).any()


def test_max_pool_drops_an_odd_row():
  x = tf.reshape(tf.range(15.0), [1, 3, 5, 1])
  assert layers.max_pool(x).numpy().ravel().tolist() == [6.0, 8.0]
