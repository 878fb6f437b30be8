import numpy as np
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta.learners import cyclic_batches

SEED = (3, 7)


def take(n, batch_size, num_batches, start=0, seed=SEED):
  return cyclic_batches.cyclic_minibatches(
      n, batch_size, num_batches, seed, start
  )


def test_one_order_goes_round_and_round():
  """11 examples in batches of 3: three whole ones, two examples are left."""
  batches = take(11, 3, 8)
  rows = batches.indices.numpy()
  assert rows.shape == (8, 3) and rows.dtype == np.int32
  np.testing.assert_array_equal(batches.sizes, np.full([8, 1], 3))
  assert len(set(rows[:3].flat)) == 9 and set(rows.flat) <= set(range(11))
  np.testing.assert_array_equal(rows[3:6], rows[:3])
  np.testing.assert_array_equal(rows[6:], rows[:2])
  later = take(11, 3, 4, start=tf.constant(5)).indices
  np.testing.assert_array_equal(later[:3], rows[5:])
  other = take(11, 3, 3, seed=(3, 8)).indices
  assert np.any(other != rows[:3])


@pytest.mark.parametrize('n', [0, 1, 2])
def test_few_examples_are_the_only_batch(n):
  rows = take(n, 3, 4, start=9).indices.numpy()
  assert rows.shape == (4, n)
  for row in rows:
    assert sorted(row) == list(range(n))
    np.testing.assert_array_equal(row, rows[0])


def test_no_batches():
  assert take(5, 2, 0).indices.shape == (0, 2)


def numbered(n):
  """Examples that are told apart by their x."""
  x = tf.range(float(n))[:, tf.newaxis]
  return episodes.Examples(x, tf.zeros(n, tf.int32), tf.ones(n))


def support_and_query(n, num_support, num_query, **options):
  """Returns the x of the pool, of the support batches and of the query."""
  pool, support, query = cyclic_batches.support_and_query(
      numbered(n),
      3,
      num_support=num_support,
      num_query=num_query,
      **(dict(split_seed=SEED, order_seed=(3, 4)) | options),
  )
  x = pool.x.numpy()[:, 0]
  return x, x[support.indices.numpy()], query.x.numpy()[:, 0]


@pytest.mark.parametrize('fraction, size', [(0.5, 11), (0.3, 6)])
def test_two_parts_are_disjoint_and_the_same_in_every_round(fraction, size):
  """Of 23 examples; the batches are others in every order."""
  rounds = [
      support_and_query(23, 2, 2, support_fraction=fraction, order_seed=(3, r))
      for r in range(12)
  ]
  support = {x for _, batches, _ in rounds for x in batches.flat}
  query = {x for *_, batch in rounds for x in batch}
  assert support == set(rounds[0][0]) and len(support) == size
  assert len(query) == 23 - size and not support & query


@pytest.mark.parametrize('n, overlap', [(35, 0), (24, 9)])
def test_one_stream_overlaps_only_when_examples_are_few(n, overlap):
  """Five support batches, and the six that follow them."""
  _, support, query = support_and_query(
      n, 5, 6, support_fraction=None, num_rounds=1
  )
  assert support.shape == (5, 3) and query.shape == (18,)
  assert len(set(support.flat) & set(query)) == overlap
  stream = take(n, 3, 11, start=11, seed=(3, 4)).indices.numpy()
  np.testing.assert_array_equal(support, stream[:5])
  np.testing.assert_array_equal(query, stream[5:].ravel())


def test_two_parts_go_on_where_the_last_round_ended():
  options = dict(support_fraction=0.5, num_rounds=2)
  _, support, query = support_and_query(24, 2, 1, **options)
  options['num_rounds'] = 0
  _, all_support, all_query = support_and_query(24, 6, 3, **options)
  np.testing.assert_array_equal(support, all_support[4:])
  np.testing.assert_array_equal(query, all_query[6:])


@pytest.mark.parametrize('batch_size, num_batches', [(0, 1), (1, -1)])
def test_bad_sizes(batch_size, num_batches):
  with pytest.raises(ValueError, match='`batch_size` of at least 1'):
    take(5, batch_size, num_batches)


def batch_sum_labels(offset, batch):
  """Labels that tell the batch: the sum of its examples."""
  total = tf.cast(tf.reduce_sum(batch.x * batch.mask), tf.int32)
  return tf.fill(tf.shape(batch.y), total + offset)


def predict(x, mask, batch_size):
  query = episodes.Examples(
      tf.constant(x, tf.float32),
      tf.zeros([len(x)], tf.int32),
      tf.constant(mask, tf.float32),
  )
  labels = tf.function(
      lambda: cyclic_batches.predict_in_batches(
          batch_sum_labels, 1000, query, batch_size
      ),
      autograph=False,
  )()
  return labels.numpy().tolist()


def test_every_second_example_is_in_a_batch():
  """Five examples in batches of at most three: 1 + 4 + 16 and 2 + 8."""
  labels = predict([1, 2, 4, 8, 16], [1] * 5, 3)
  assert labels == [1021, 1010, 1021, 1010, 1021]


def test_padding_is_in_no_batch():
  labels = predict([1, 7, 2, 4, 7, 8, 16], [1, 0, 1, 1, 0, 1, 1], 3)
  assert labels == [1021, 0, 1010, 1021, 0, 1010, 1021]


@pytest.mark.parametrize(
    'num, batch_size, sizes',
    [(0, 3, []), (1, 3, [1]), (6, 3, [3, 3]), (101, 50, [34, 34, 33])],
)
def test_batches_are_nearly_equal(num, batch_size, sizes):
  labels = predict([1] * num, [1] * num, batch_size)
  found = [x - 1000 for x in labels[: len(sizes)]]
  assert found == sizes and len(labels) == num
