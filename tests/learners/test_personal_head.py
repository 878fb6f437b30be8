"""Taking a network apart into what is shared and what stays."""

import few_round_oracle as oracle
import numpy as np
import tensorflow as tf

from tff_meta.learners import personal_head


def test_merge_undoes_split():
  """And a head that is merged replaces the one that was there."""
  weights = oracle.build_model().with_head(4).initialize(tf.constant([1, 2]))
  other = oracle.build_model().with_head(4).initialize(tf.constant([3, 4]))

  shared, head = personal_head.split(weights)

  assert list(shared) == ['body', 'head']
  assert not shared['head']
  assert head is weights['head']
  merged = personal_head.merge(shared, head)
  np.testing.assert_array_equal(
      oracle.to_vector(merged), oracle.to_vector(weights)
  )
  replaced = personal_head.merge(weights, other['head'])
  assert replaced['body'] is weights['body']
  assert replaced['head'] is other['head']


def test_unseen_head_is_always_the_same():
  """It needs no seed, hence `start` and `adapt` begin with the same one."""
  model = oracle.build_model()
  one, again, wider = (
      personal_head.unseen_head(model, num_classes) for num_classes in (3, 3, 5)
  )
  np.testing.assert_array_equal(one['kernel'], again['kernel'])
  assert one['kernel'].shape == [3, 3] and wider['kernel'].shape == [3, 5]
  assert np.ptp(one['kernel']) > 0.1
