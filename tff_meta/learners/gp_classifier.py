"""A binary Gaussian process classifier by Polya-Gamma augmentation.

An example is on the left side with probability `sigmoid(f(x))`, and f has a
Gaussian process prior. Given one Polya-Gamma variable omega for each example f
is Gaussian, and given f the omegas are drawn one by one, so Gibbs sampling
alternates between the two. The probability of a new example is the mean over
the draws of omega.

Here n are the examples, S the draws and m the new examples; kappa is 1/2 for an
example on the left and -1/2 for one on the right. With `s = sqrt(omega)` all
solves are with `B = I + diag(s) K diag(s)`, whose eigenvalues are at least 1
and seldom above `1 + n * output_scale / 4`, so float32 will do. K itself has
eigenvalues from the jitter up to `n * output_scale`; where a few thousand
embeddings hardly differ float32 has no Cholesky factor of it, so that one is
computed in float64.

Sources: Polson, Scott and Windle 2013, "Bayesian Inference for Logistic Models
Using Polya-Gamma Latent Variables"; Rasmussen and Williams 2006, "Gaussian
Processes for Machine Learning", section 3.4.3, for B; Achituve, Shamsian,
Navon, Chechik and Fetaya 2021, "Personalized Federated Learning with Gaussian
Processes", and its released code, for the covariance.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
import tensorflow as tf

from tff_meta.losses import prototypical

# On the diagonal of every covariance, that of new examples, too.
JITTER = 1e-3
_PG_TERMS = 20
_QUADRATURE = np.polynomial.hermite.hermgauss(20)

_fold_in = tf.random.experimental.stateless_fold_in


@dataclasses.dataclass(frozen=True)
class GaussianProcess:
  """The prior, and how to draw from and average over the posterior.

  Attributes:
    output_scale: Variance of f, above 0.
    length_scale: Of embeddings, which are brought to length 1; above 0.
    gibbs_steps: Draws of f, and of omega given it, after the first ones.
    likelihood: A probability given omega is `'mean'` of sigmoid(f) over f; or
      `'geometric'`, the exponential of the mean of its logarithm for the left
      side and the rest for the right one.
  """

  output_scale: float = 8.0
  length_scale: float = 1.0
  gibbs_steps: int = 5
  likelihood: Literal['mean', 'geometric'] = 'mean'

  def covariance(self, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """`output_scale * exp(-||a/|a| - b/|b|||^2 / (2 length_scale^2))`.

    Args:
      a: [k, D].
      b: [l, D].

    Returns:
      [k, l], without jitter.
    """
    distances = prototypical.squared_distances(
        tf.math.l2_normalize(a, axis=1), tf.math.l2_normalize(b, axis=1)
    )
    return self.output_scale * tf.exp(-distances / (2 * self.length_scale**2))

  def prior(self, embeddings: tf.Tensor) -> tf.Tensor:
    """The covariance [n, n] of f at the embeddings [n, D], with jitter."""
    identity = tf.eye(tf.shape(embeddings)[0], dtype=embeddings.dtype)
    return self.covariance(embeddings, embeddings) + JITTER * identity


def draw_polya_gamma(c: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Draws omega ~ PG(1, c).

      sum_k g_k / (2 pi^2 ((k - 1/2)^2 + c^2 / (4 pi^2))),   g_k ~ Exp(1)

  The first 20 terms are drawn and the others have their mean, so the mean is
  exactly `tanh(c / 2) / (2 c)`; the variance misses less than 1e-5 of itself
  for |c| below 1 and less than 1e-3 for |c| below 15.

  Args:
    c: float32, of any shape.
    seed: int32 [2].

  Returns:
    Of that shape, above 0.

  Source: Polson, Scott and Windle 2013, definition 1.
  """
  half_odd = tf.range(1, _PG_TERMS + 1, dtype=c.dtype) - 0.5
  scales = 0.5 / ((math.pi * half_odd) ** 2 + c[..., tf.newaxis] ** 2 / 4)
  uniform = tf.random.stateless_uniform(tf.shape(scales), seed, dtype=c.dtype)
  exponential = -tf.math.log1p(-uniform)
  small = tf.abs(c) < 1e-3
  mean = tf.tanh(c / 2) / (2 * tf.where(small, 1.0, c))
  mean = tf.where(small, 0.25, mean)
  return mean + tf.reduce_sum(scales * (exponential - 1), -1)


def _cholesky(prior, s):
  """Lower triangular [S, n, n], of B; prior [n, n] and s [S, n]."""
  identity = tf.eye(tf.shape(s)[1], dtype=s.dtype)
  return tf.linalg.cholesky(
      identity + s[:, :, tf.newaxis] * prior * s[:, tf.newaxis]
  )


def draw_omegas(
    process: GaussianProcess,
    embeddings: tf.Tensor,
    kappa: tf.Tensor,
    num_draws: int,
    seed: tf.Tensor,
) -> tf.Tensor:
  """Gibbs sampling in chains of their own; no gradient flows through it.

  A chain begins with f of the prior. Given omega, f is a draw of the prior that
  is corrected by what it and noise of variance 1 / omega leave of kappa / omega
  (Matheron's rule).

  Args:
    process: The Gaussian process.
    embeddings: Of the examples, float32 [n, D].
    kappa: float32 [n].
    num_draws: S, chains.
    seed: int32 [2].

  Returns:
    The last omegas, float32 [S, n].
  """
  embeddings = tf.stop_gradient(embeddings)
  prior = process.prior(embeddings)
  prior_cholesky = tf.cast(
      tf.linalg.cholesky(process.prior(tf.cast(embeddings, tf.float64))),
      prior.dtype,
  )

  def draw_normal(seed):
    return tf.random.stateless_normal([num_draws, tf.shape(kappa)[0]], seed)

  def draw_prior(seed):
    return tf.matmul(draw_normal(seed), prior_cholesky, transpose_b=True)

  def draw_f(omegas, seed):
    s = tf.sqrt(omegas)
    f = draw_prior(_fold_in(seed, 0))
    residual = kappa / s - s * f - draw_normal(_fold_in(seed, 1))
    solved = tf.linalg.cholesky_solve(
        _cholesky(prior, s), residual[:, :, tf.newaxis]
    )
    return f + tf.matmul(s * solved[:, :, 0], prior)

  f = draw_prior(_fold_in(seed, 0))
  omegas = draw_polya_gamma(f, _fold_in(seed, 1))
  for step in range(process.gibbs_steps):
    f = draw_f(omegas, _fold_in(seed, 2 * step + 2))
    omegas = draw_polya_gamma(f, _fold_in(seed, 2 * step + 3))
  return omegas


def side_probabilities(
    process: GaussianProcess,
    embeddings: tf.Tensor,
    kappa: tf.Tensor,
    omegas: tf.Tensor,
    query: tf.Tensor,
) -> tf.Tensor:
  """The probabilities of both sides; gradients flow into all embeddings.

  Given omega, f at a new example has mean `k' A kappa / omega` and variance
  `k(x, x) - k' A k` with `A = (K + diag(1 / omega))^-1`. The integral over f
  is by Gauss-Hermite quadrature.

  Args:
    process: The Gaussian process.
    embeddings: Of the examples, [n, D].
    kappa: [n].
    omegas: [S, n], above 0.
    query: New embeddings, [m, D].

  Returns:
    [2, m], left and right, each above 0 and together 1.
  """
  s = tf.sqrt(omegas)
  cross = s[:, :, tf.newaxis] * process.covariance(embeddings, query)
  solved = tf.linalg.triangular_solve(
      _cholesky(process.prior(embeddings), s),
      tf.concat([(kappa / s)[:, :, tf.newaxis], cross], axis=2),
  )
  target, cross = solved[:, :, :1], solved[:, :, 1:]
  mean = tf.reduce_sum(target * cross, axis=1)
  variance = process.output_scale + JITTER - tf.reduce_sum(cross**2, axis=1)
  variance = tf.maximum(variance, JITTER)  # It is, but for rounding.
  points, weights = (tf.constant(part, mean.dtype) for part in _QUADRATURE)
  deviation = tf.sqrt(2 * variance)
  f = mean[:, :, tf.newaxis] + deviation[:, :, tf.newaxis] * points
  weights /= math.sqrt(math.pi)
  if process.likelihood == 'geometric':
    log_left = tf.linalg.matvec(tf.math.log_sigmoid(f), weights)
    sides = tf.stack([tf.exp(log_left), -tf.math.expm1(log_left)])
  else:
    sides = tf.stack(
        [tf.linalg.matvec(tf.sigmoid(z), weights) for z in (f, -f)]
    )
  return tf.reduce_mean(sides, axis=1)
