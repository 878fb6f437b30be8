import numpy as np
import pytest
import tensorflow as tf

from tff_meta.models import layers

RNG = np.random.default_rng(5)
X = RNG.normal(size=(5, 3, 2, 2))
GAMMA, BETA = np.array([2.0, 0.5]), np.array([-1.0, 3.0])
BIAS = np.array([4.0, -7.0])
# Float32 has an operation of its own; sums of 30 terms of order 1.
DTYPES = [(tf.float64, 1e-10), (tf.float32, 1e-5)]


def batch_norm(x, gamma=GAMMA, beta=BETA):
  bias, gamma, beta = (tf.cast(p, x.dtype) for p in (BIAS, gamma, beta))
  return layers.batch_norm(tf.convert_to_tensor(x), bias, gamma, beta)


def formula(x, gamma, beta):
  """Batch normalisation as printed; TensorFlow differentiates it."""
  mean = tf.reduce_mean(x, [0, 1, 2])
  variance = tf.reduce_mean((x - mean) ** 2, [0, 1, 2])  # Biased.
  return gamma * (x - mean) / tf.sqrt(variance + 1e-5) + beta


@pytest.mark.parametrize('dtype, tolerance', DTYPES)
def test_batch_norm_against_the_oracle(dtype, tolerance):
  expected = np.zeros_like(X)
  for c in range(2):
    values = X[..., c] + BIAS[c]
    mean = values.sum() / 30
    variance = ((values - mean) ** 2).sum() / 30  # Biased.
    normal = (values - mean) / np.sqrt(variance + 1e-5)
    expected[..., c] = GAMMA[c] * normal + BETA[c]
  actual = batch_norm(tf.cast(X, dtype))
  assert actual.dtype == dtype
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
@pytest.mark.parametrize('num_examples', [1, 2])
def test_equal_pixels_are_mapped_to_beta(dtype, num_examples):
  """Their variance is zero."""
  pixel = RNG.normal(size=(1, 1, 1, 2))
  x = tf.constant(np.repeat(pixel, num_examples, 0), dtype)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = batch_norm(x)
    loss = tf.reduce_sum(y[0] ** 2)
  np.testing.assert_allclose(y[0, 0, 0], BETA, rtol=1e-6)
  assert np.isfinite(tape.gradient(loss, x)).all()


def test_the_variance_of_a_far_mean_is_not_lost():
  """As it is in float32 where it is the mean of squares less a square."""
  x = tf.cast(X + 1000.0, tf.float32)
  expected = formula(tf.cast(x, tf.float64), GAMMA, BETA)
  # The mean is off by 1e-4, of 1000, at most.
  np.testing.assert_allclose(batch_norm(x), expected, atol=1e-3)


def derivatives(function, x, dtype):
  """A gradient and, times a direction, the second derivatives.

  Of `sum(scale * function(x, gamma, beta)^3)`, by x, gamma, beta and scale.
  """
  rng = np.random.default_rng(6)
  at = [
      tf.cast(part, dtype)
      for part in (x, GAMMA, BETA, rng.normal(size=x.shape))
  ]
  directions = [tf.cast(rng.normal(size=part.shape), dtype) for part in at]
  with tf.GradientTape() as outer:
    outer.watch(at)
    with tf.GradientTape() as inner:
      inner.watch(at)
      loss = tf.reduce_sum(at[3] * function(*at[:3]) ** 3)
    gradient = inner.gradient(loss, at)
    slope = tf.add_n(
        [
            tf.reduce_sum(g * d)
            for g, d in zip(gradient, directions, strict=True)
        ]
    )
  return gradient, outer.gradient(slope, at)


@pytest.mark.parametrize('dtype, tolerance', DTYPES)
@pytest.mark.parametrize('shape', [(5, 3, 2, 2), (7, 1, 1, 2), (1, 4, 4, 2)])
def test_batch_norm_has_the_derivatives_of_the_formula(dtype, tolerance, shape):
  x = RNG.normal(size=shape)
  actual = derivatives(batch_norm, x, dtype)
  expected = derivatives(formula, x, tf.float64)
  for a, e in zip(*map(tf.nest.flatten, (actual, expected)), strict=True):
    assert a.dtype == dtype
    scale = np.abs(e).max()
    np.testing.assert_allclose(a, e, rtol=0, atol=10 * tolerance * scale)


@pytest.mark.parametrize('num_examples', [1, 5])
def test_batch_norm_second_derivative(num_examples):
  """Hessian times vector against differences of gradients, in float64."""
  x = X[:num_examples]
  scale, direction = RNG.normal(size=x.shape), RNG.normal(size=x.shape)

  def gradient(x):
    with tf.GradientTape() as tape:
      tape.watch(x)
      loss = tf.reduce_sum(scale * batch_norm(x) ** 3)
    return tape.gradient(loss, x)

  x = tf.constant(x)
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


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
def test_the_bias_before_batch_norm_has_no_gradient(dtype):
  x, bias, gamma, beta = (tf.cast(p, dtype) for p in (X, BIAS, GAMMA, BETA))
  with tf.GradientTape() as tape:
    tape.watch(bias)
    loss = tf.reduce_sum(layers.batch_norm(x, bias, gamma, beta) ** 3)
  assert tape.gradient(loss, bias).numpy().tolist() == [0.0, 0.0]


@layers.allow_padding
def embed(body, x):
  """An embedding [n, 2] in which the examples see each other."""
  assert x.shape[0] is None or x.shape[0] > 0
  gamma, beta = body
  y = layers.batch_norm(x, tf.zeros_like(gamma), gamma, beta)
  return tf.reduce_sum(y**3, [1, 2])


@pytest.mark.parametrize('dtype, tolerance', DTYPES)
@pytest.mark.parametrize('padding', [77.0, np.nan])
def test_padding_is_dropped(dtype, tolerance, padding):
  body = tf.cast(GAMMA, dtype), tf.cast(BETA, dtype)
  padded = np.concatenate([X[:2], np.full((3, 3, 2, 2), padding), X[2:]])
  padded_mask = tf.constant([1.0, 1, 0, 0, 0, 1, 1, 1])
  results = []
  for x, mask in ((X, None), (X, tf.ones([5])), (padded, padded_mask)):
    x = tf.cast(x, dtype)
    with tf.GradientTape() as tape:
      tape.watch((body, x))
      embeddings = embed(body, x, mask)
      loss = tf.reduce_sum(embeddings**2)
    by_body, by_x = tape.gradient(loss, (body, x))
    by_x = tf.convert_to_tensor(by_x)
    keep = np.ones(5) if mask is None else mask
    assert not np.any(embeddings[keep == 0]) and not np.any(by_x[keep == 0])
    embeddings, by_x = embeddings[keep > 0], by_x[keep > 0]
    results.append((embeddings, by_body, by_x))
  for result in results[1:]:
    for a, e in zip(*map(tf.nest.flatten, (result, results[0])), strict=True):
      scale = np.abs(e).max()
      np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize('num_padding', [0, 3])
@pytest.mark.parametrize('is_traced', [False, True])
def test_no_examples(num_padding, is_traced):
  body = tf.constant(GAMMA, tf.float32), tf.constant(BETA, tf.float32)

  def gradient(x, mask):
    with tf.GradientTape() as tape:
      tape.watch(body)
      embeddings = embed(body, x, mask)
      loss = tf.reduce_sum(embeddings)
    return embeddings, tape.gradient(loss, body)

  if is_traced:  # Where the number of examples is not known.
    specs = (tf.TensorSpec([None, 3, 2, 2]), tf.TensorSpec([None]))
    gradient = tf.function(gradient, input_signature=specs, autograph=False)
  embeddings, gradients = gradient(
      tf.ones([num_padding, 3, 2, 2]), tf.zeros([num_padding])
  )
  assert embeddings.numpy().tolist() == [[0.0, 0.0]] * num_padding
  assert not np.any(gradients)


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
