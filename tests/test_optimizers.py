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


def steps(optimizer, gradients):
  """Where an optimizer takes a weight of 1 by these gradients."""
  state = optimizer.initialize(tf.TensorSpec([], tf.float32))
  w = tf.constant(1.0)
  for gradient in gradients:
    state, w = optimizer.next(state, w, tf.constant(gradient))
  return float(w)


def test_optimizers_by_name():
  """SGD: 1 - .1 (2 + 4). Momentum: v = 2, .5 * 2 + 4 = 5: 1 - .1 * 7.

  Adam's first step is the rate times the sign of the gradient, to within
  epsilon = 1e-8 relative to the gradient. RMSprop's is ten
  times that, for its mean square is .01 g^2; then .99 * .04 + .01 * 16.
  """
  build_optimizer = optimizers.build_optimizer
  assert steps(build_optimizer('sgd', 0.1), [2.0, 4.0]) == pytest.approx(0.4)
  assert steps(build_optimizer('sgd', 0.1, 0.5), [2.0, 4.0]) == pytest.approx(
      0.3
  )
  assert steps(build_optimizer('sgd', 0.0), [2.0]) == 1
  for gradient in (3.0, 1e-3):
    moved = steps(build_optimizer('adam', 0.1), [gradient])
    assert moved == pytest.approx(0.9, abs=1e-4)
  moved = steps(build_optimizer('rmsprop', 0.01), [2.0, 4.0])
  assert moved == pytest.approx(1 - 0.1 - 0.04 / 0.1996**0.5, abs=1e-5)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (('adagrad', 0.1), "'adam' or 'rmsprop', found 'adagrad'"),
        (('adam', 0.1, 0.5), "`momentum` with 'adam', .* found 0.5"),
        (('sgd', 0.1, 1.0), '`momentum`.*found 1.0'),
        (('sgd', 0.1, -0.5), '`momentum`.*found -0.5'),
        (('sgd', -0.1), 'learning_rate.*found -0.1'),
    ],
    ids=str,
)
def test_impossible_optimizers_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    optimizers.build_optimizer(*arguments)
