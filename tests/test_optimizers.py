"""Optimizers of our own."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import optimizers


# The right values are PyTorch's `torch.optim.Adam(lr=1e-3)`, to ten decimals.
@pytest.mark.parametrize(
    'gradient, expected',
    [
        (3e-5, [-9.9966677774e-4, -1.9993335555e-3, -2.9990003332e-3]),
        (1e-6, [-9.9009900990e-4, -1.9801980198e-3, -2.9702970297e-3]),
        (1e-7, [-9.0909090909e-4, -1.8181818182e-3, -2.7272727273e-3]),
    ],
)
@pytest.mark.parametrize('dtype', [tf.float64, tf.float32])
def test_epsilon_is_added_after_the_bias_correction(gradient, expected, dtype):
  """With one constant gradient, w_t = -t * rate * g / (g + epsilon)."""
  adam = optimizers.Adam(1e-3)
  state = adam.initialize(tf.TensorSpec([1], dtype))
  w, found = tf.zeros([1], dtype), []
  for _ in range(3):
    state, w = adam.next(state, w, tf.constant([gradient], dtype))
    found.append(float(w[0]))
  # Rate and epsilon are float32 in either dtype, an error of up to 6e-8 each;
  # the other operations in float32 add a few of the like.
  np.testing.assert_allclose(found, expected, rtol=5e-7)


def test_it_goes_on_from_a_state_of_tff_s_adam():
  """Runs begun with TFF's keep their moments; far from epsilon both agree."""
  ours = optimizers.Adam(0.1)
  theirs = tff.learning.optimizers.build_adam(0.1, epsilon=1e-8)
  w = collections.OrderedDict(a=tf.constant([1.0, -2.0]), b=tf.constant(3.0))
  specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape), w)
  state = theirs.initialize(specs)
  tf.nest.assert_same_structure(state, ours.initialize(specs))
  state, w = theirs.next(state, w, tf.nest.map_structure(tf.sin, w))
  gradients = tf.nest.map_structure(tf.cos, w)
  (our_state, moved), (their_state, expected) = (
      adam.next(state, w, gradients) for adam in (ours, theirs)
  )
  assert list(our_state) == list(their_state)
  # TFF's bias corrections are float32: 1 - 0.999^2 is off by 3e-5 of itself.
  for a, b in zip(
      tf.nest.flatten((our_state, moved)),
      tf.nest.flatten((their_state, expected)),
      strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=2e-5)


def test_hyperparameters_can_be_replaced():
  adam = optimizers.Adam(0.1, epsilon=0.5)
  state = adam.initialize(tf.TensorSpec([1]))
  hparams = adam.get_hparams(state)
  assert hparams['learning_rate'] == 0.1 and hparams['epsilon'] == 0.5
  state = adam.set_hparams(state, hparams | dict(learning_rate=0.3))
  _, w = adam.next(state, tf.zeros([1]), tf.constant([2.0]))
  np.testing.assert_allclose(w, [-0.3 * 2.0 / 2.5], rtol=1e-6)
