import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import weights as weights_lib


def make_weights(*values):
  a, b, c = values
  return collections.OrderedDict(
      body=collections.OrderedDict(
          bias=tf.constant(a), kernel=tf.constant([[b, c]])
      ),
      head=collections.OrderedDict(),
  )


def flat(weights):
  return [leaf.numpy().tolist() for leaf in tf.nest.flatten(weights)]


def test_arithmetic_by_hand():
  a, b = make_weights(1.0, 2.0, 3.0), make_weights(-5.0, 10.0, 30.0)
  assert flat(weights_lib.add(a, b)) == [-4.0, [[12.0, 33.0]]]
  assert flat(weights_lib.subtract(a, b)) == [6.0, [[-8.0, -27.0]]]
  assert flat(weights_lib.scale(a, 2)) == [2.0, [[4.0, 6.0]]]
  assert flat(weights_lib.zeros_like(a)) == [0.0, [[0.0, 0.0]]]
  assert float(weights_lib.squared_norm(a)) == 14.0
  tf.nest.assert_same_structure(weights_lib.add(a, b), a)


def test_clipping_by_hand():
  """Of norm 5: to half of it, and not at all."""
  a = make_weights(3.0, 0.0, 4.0)
  assert flat(weights_lib.clip_by_global_norm(a, 2.5)) == [1.5, [[0.0, 2.0]]]
  assert flat(weights_lib.clip_by_global_norm(a, 8.0)) == flat(a)
  huge = weights_lib.clip_by_global_norm(make_weights(1e30, 0.0, 1.0), 1.0)
  assert np.isnan(huge['body']['bias'])


def test_scale_keeps_the_dtype():
  scaled = weights_lib.scale(
      [tf.ones(2, tf.float64), tf.ones(2)], tf.constant(0.5)
  )
  assert [leaf.dtype for leaf in scaled] == [tf.float64, tf.float32]


def test_no_leaves():
  assert float(weights_lib.squared_norm({})) == 0.0
  assert bool(weights_lib.all_finite({}))


def test_the_largest_numbers_are_finite_and_infinities_do_not_cancel():
  largest = tf.fill([1000], tf.float32.max)
  assert weights_lib.all_finite([largest, -largest])
  assert not weights_lib.all_finite(tf.constant([np.inf, -np.inf]))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_one_bad_entry_clears_everything(bad):
  weights = make_weights(1.0, bad, 3.0)
  assert not weights_lib.all_finite(weights)
  kept, finite = weights_lib.where_finite_or_zero(weights)
  assert not finite
  assert flat(kept) == [0.0, [[0.0, 0.0]]]


def test_finite_weights_are_kept():
  weights = make_weights(1.0, 2.0, 3.0)
  kept, finite = weights_lib.where_finite_or_zero(weights)
  assert finite
  assert flat(kept) == flat(weights)
