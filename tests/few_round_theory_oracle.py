"""FRL's meta-gradients once more: any loss, by TensorFlow's derivatives.

Written apart from `tff_meta.analyses.few_round_theory`: no waves, no closed
forms, no exact second derivatives, one group and one point at a time.
"""

import itertools

import numpy as np
import tensorflow as tf


def _gradient(losses, theta):
  """The mean of the losses' gradients at theta, a tensor of theta."""
  with tf.GradientTape() as tape:
    tape.watch(theta)
    loss = sum(loss(theta) for loss in losses) / len(losses)
  return tape.gradient(loss, theta)


def meta_gradients(losses, phi, alpha, rounds):
  """`(first order, exact)` of one group at one point."""
  phi = tf.constant(phi, tf.float64)
  with tf.GradientTape() as tape:
    tape.watch(phi)
    theta = phi
    for _ in range(rounds):
      theta = theta - alpha * _gradient(losses, theta)
    adapted = sum(loss(theta) for loss in losses) / len(losses)
  return (
      _gradient(losses, tf.constant(theta)).numpy(),
      tape.gradient(adapted, phi).numpy(),
  )


def slope(losses, phi, alpha, rounds, order, step=1e-5):
  """The derivative of one of the two by phi, by a central difference."""
  above, below = (
      meta_gradients(losses, phi + sign * step, alpha, rounds)[order]
      for sign in (1, -1)
  )
  return (above - below) / (2 * step)


def groups_of(losses, group_size, with_replacement):
  """All groups that can be drawn, as often as they are drawn."""
  drawn = itertools.product(range(len(losses)), repeat=group_size)
  return [
      [losses[k] for k in group]
      for group in drawn
      if with_replacement or len(set(group)) == group_size
  ]


def variance(losses, group_size, phi, alpha, rounds, order, with_replacement):
  """The variance of the meta-gradient over groups."""
  values = [
      meta_gradients(group, phi, alpha, rounds)[order]
      for group in groups_of(losses, group_size, with_replacement)
  ]
  return sum((v - sum(values) / len(values)) ** 2 for v in values) / len(values)


def client_variance(losses, points):
  """The largest variance of the clients' gradients over the points."""
  points = tf.constant(points, tf.float64)
  gradients = []
  for loss in losses:
    with tf.GradientTape() as tape:
      tape.watch(points)
      value = loss(points)
    gradients.append(tape.gradient(value, points).numpy())
  return np.var(gradients, axis=0).max()
