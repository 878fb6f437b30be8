import numpy as np
import pytest
import tensorflow as tf

from tff_meta.losses import distillation

RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=(4, 3))
TEACHER = RNG.normal(size=(4, 3))
Y = np.array([2, 0, 1, 2])
MASK = np.array([1.0, 1.0, 0.0, 1.0])


def softmax(logits):
  return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def elastic_loss_and_gradients(constraint_weight, teacher=TEACHER):
  logits, teacher = tf.constant(LOGITS), tf.constant(teacher)
  with tf.GradientTape() as tape:
    tape.watch([logits, teacher])
    loss = distillation.elastic_loss(
        logits, Y, MASK, teacher, constraint_weight
    )
  return loss.numpy(), *tape.gradient(loss, [logits, teacher])


def test_loss_identity():
  """With y = (1, 0), teacher (.5, .5), p = (.8, .2), a = 1.

  -log .8 + .5 log(.5/.8) + .5 log(.5/.2) = .223144 + .223144, and with
  q = (.75, .25): 2 * CE(q, p) + log .5.
  """
  p, q = np.array([0.8, 0.2]), np.array([0.75, 0.25])
  loss = distillation.elastic_loss(
      tf.constant(np.log([p])),
      tf.constant([0]),
      tf.constant([1.0]),
      tf.zeros([1, 2], tf.float64),
      1.0,
  )
  np.testing.assert_allclose(loss, 0.446287, atol=1e-6)  # Printed digits.
  soft = -2 * np.sum(q * np.log(p)) + np.log(0.5)
  np.testing.assert_allclose(loss, soft, rtol=1e-12)


@pytest.mark.parametrize('direction', ['teacher_first', 'student_first'])
def test_kl_against_the_oracle(direction):
  expected = []
  for first, second, real in zip(
      softmax(TEACHER), softmax(LOGITS), MASK, strict=True
  ):
    if direction == 'student_first':
      first, second = second, first
    if real:
      expected.append(
          sum(first[c] * np.log(first[c] / second[c]) for c in range(3))
      )
  actual = distillation.kl_to_teacher(
      tf.constant(TEACHER), tf.constant(LOGITS), tf.constant(MASK), direction
  )
  np.testing.assert_allclose(actual, np.mean(expected), rtol=1e-12)


def test_the_student_first_learns_and_the_teacher_does_not():
  """By the logits z of p = softmax(z): `p_c (log p_c / t_c - KL)`."""
  logits, teacher = tf.constant(LOGITS), tf.constant(TEACHER)
  with tf.GradientTape() as tape:
    tape.watch([logits, teacher])
    divergence = distillation.kl_to_teacher(
        teacher, logits, tf.constant(MASK), 'student_first'
    )
  gradient, teacher_gradient = tape.gradient(divergence, [logits, teacher])
  p = softmax(LOGITS)
  log_ratio = np.log(p / softmax(TEACHER))
  kl = np.sum(p * log_ratio, 1, keepdims=True)
  expected = p * (log_ratio - kl) * MASK[:, np.newaxis] / 3
  np.testing.assert_allclose(gradient, expected, atol=1e-12)
  assert teacher_gradient is None


def test_the_loss_takes_the_direction():
  """With p = (.8, .2), teacher (.5, .5): .8 log 1.6 + .2 log .4 = .192745."""
  loss = distillation.elastic_loss(
      tf.constant(np.log([[0.8, 0.2]])),
      tf.constant([0]),
      tf.constant([1.0]),
      tf.zeros([1, 2], tf.float64),
      2.0,
      'student_first',
  )
  np.testing.assert_allclose(loss, -np.log(0.8) + 2 * 0.192745, atol=1e-6)


def test_gradient_is_scaled_prediction_minus_soft_target():
  a = 0.7
  _, gradient, teacher_gradient = elastic_loss_and_gradients(a)
  q = (np.eye(3)[Y] + a * softmax(TEACHER)) / (1 + a)
  expected = (1 + a) * (softmax(LOGITS) - q) * MASK[:, np.newaxis] / 3
  np.testing.assert_allclose(gradient, expected, atol=1e-12)
  assert teacher_gradient is None


def test_uniform_teacher_is_label_smoothing():
  a = 0.5
  _, gradient, _ = elastic_loss_and_gradients(a, np.zeros([4, 3]))
  mass = a / (1 + a)
  smoothed = (1 - mass) * np.eye(3)[Y] + mass / 3
  expected = (1 + a) * (softmax(LOGITS) - smoothed) * MASK[:, np.newaxis] / 3
  np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_constant_shift_of_the_logits_is_free():
  shifted = distillation.kl_to_teacher(
      tf.constant(LOGITS), tf.constant(LOGITS + 3.0), tf.constant(MASK)
  )
  np.testing.assert_allclose(shifted, 0.0, atol=1e-15)


def test_certain_teacher_is_finite():
  loss, gradient, _ = elastic_loss_and_gradients(
      1.0, np.array([[1e4, 0.0, -1e4]] * 4)
  )
  assert np.isfinite(loss)
  assert np.isfinite(gradient).all()
