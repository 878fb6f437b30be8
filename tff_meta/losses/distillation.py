"""The elastic constraint: stay close to the predictions of another model.

Source: FedEC (elastically constrained meta-learner), eqs. 6 and 9-13.
"""

from typing import Literal

import tensorflow as tf

from tff_meta.losses import cross_entropy

Direction = Literal['teacher_first', 'student_first']


def kl_to_teacher(
    teacher_logits: tf.Tensor,
    logits: tf.Tensor,
    mask: tf.Tensor,
    direction: Direction = 'teacher_first',
) -> tf.Tensor:
  """The mean divergence from a teacher's predictions; 0 without examples.

    mean_i KL(softmax(teacher_i) || softmax(logits_i))    teacher first
    mean_i KL(softmax(logits_i) || softmax(teacher_i))    student first

  Args:
    teacher_logits: [n, C]; constants, no gradient flows into them.
    logits: [n, C] of the model that learns.
    mask: [n], 1 for an example and 0 for padding.
    direction: Which of the two.

  Returns:
    A scalar, in nats.

  Source: FedEC, eq. 9, teacher first (its identity eq. 13 holds only so).
  """
  first = tf.nn.log_softmax(tf.stop_gradient(teacher_logits))
  second = tf.nn.log_softmax(logits)
  if direction == 'student_first':
    first, second = second, first
  divergence = tf.reduce_sum(tf.exp(first) * (first - second), 1)
  return cross_entropy.masked_mean(divergence, mask)


def elastic_loss(
    logits: tf.Tensor,
    y: tf.Tensor,
    mask: tf.Tensor,
    teacher_logits: tf.Tensor,
    constraint_weight: float,
    direction: Direction = 'teacher_first',
) -> tf.Tensor:
  """Cross-entropy plus a times the divergence from the teacher.

  Teacher first it is, up to a constant, (1 + a) times the cross-entropy with
  the soft target `(one_hot(y) + a * teacher) / (1 + a)`; a uniform teacher is
  label smoothing with mass `a / (1 + a)`. `a = 0` is plain cross-entropy.

  Args:
    logits: [n, C] of the model that learns.
    y: int32 [n], labels in 0..C-1.
    mask: [n], 1 for an example and 0 for padding.
    teacher_logits: [n, C]; constants.
    constraint_weight: a, at least 0.
    direction: Of the divergence, see `kl_to_teacher`.

  Returns:
    A scalar, in nats.

  Source: FedEC, eqs. 6 and 11.
  """
  divergence = kl_to_teacher(teacher_logits, logits, mask, direction)
  loss = cross_entropy.softmax_cross_entropy(logits, y, mask)
  return loss + constraint_weight * divergence
