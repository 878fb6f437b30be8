import collections

import numpy as np
import tensorflow as tf

from tff_meta.losses import proximal


def test_value_and_gradient_by_hand():
  weights = collections.OrderedDict(
      body=tf.constant([1.0, 4.0]), head=tf.constant([[2.0]])
  )
  anchor = collections.OrderedDict(
      body=tf.constant([0.0, 6.0]), head=tf.constant([[5.0]])
  )
  with tf.GradientTape() as tape:
    tape.watch(weights)
    term = proximal.proximal(weights, anchor, 0.5)
  gradient = tape.gradient(term, weights)
  assert term.numpy() == 0.25 * (1 + 4 + 9)
  assert gradient['body'].numpy().tolist() == [0.5, -1.0]
  assert gradient['head'].numpy().tolist() == [[-1.5]]
  assert proximal.proximal(weights, anchor, 0.0).numpy() == 0


def test_no_distance():
  weights = [tf.constant(np.arange(3.0))]
  assert proximal.proximal(weights, weights, 9.0).numpy() == 0
