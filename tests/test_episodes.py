import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import episodes

SEED = (3, 7)


def numbered_examples(y, mask=None):
  """Examples whose x is their row number plus 100, as a [n, 1] array."""
  x = 100.0 + np.arange(len(y), dtype=np.float32)[:, np.newaxis]
  mask = np.ones(len(y)) if mask is None else np.array(mask)
  return episodes.Examples(
      tf.constant(x),
      tf.constant(y, tf.int32, shape=[len(y)]),
      tf.constant(mask, tf.float32),
  )


def rows(examples):
  """The row numbers of numbered examples."""
  return (examples.x.numpy()[:, 0] - 100).astype(int).tolist()


def dataset_of(x, y):
  return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y))


@pytest.mark.parametrize('batch_size', [1, 3, 7])
def test_to_examples_concatenates_batches_of_any_size(batch_size):
  x = np.random.default_rng(0).normal(size=(7, 2, 3, 1)).astype(np.float32)
  y = np.array([4, 0, 2, 2, 1, 0, 3], np.int32)
  examples = episodes.to_examples(dataset_of(x, y).batch(batch_size))
  np.testing.assert_array_equal(examples.x, x)
  np.testing.assert_array_equal(examples.y, y)
  np.testing.assert_array_equal(examples.mask, np.ones(7))
  assert (examples.y.dtype, examples.mask.dtype) == (tf.int32, tf.float32)


def test_to_examples_of_an_empty_data_set():
  dataset = dataset_of(np.zeros([3, 2, 5], np.float32), np.zeros([3], np.int32))
  examples = episodes.to_examples(dataset.batch(2).take(0))
  assert [tuple(part.shape) for part in examples[:3]] == [(0, 2, 5), (0,), (0,)]


def test_to_examples_casts_integers():
  dataset = dataset_of(np.array([[255], [3]], np.uint8), np.array([1, 0]))
  examples = episodes.to_examples(dataset.batch(2))
  assert examples.x.dtype == tf.float32
  assert examples.x.numpy().tolist() == [[255.0], [3.0]]


def test_to_salt():
  dataset = tf.data.Dataset.from_tensors(tf.constant(-17))
  assert episodes.to_salt(dataset).numpy() == -17
  assert episodes.to_salt(dataset.take(0)).numpy() == 0


def test_drop_padding_keeps_the_order():
  examples = numbered_examples([5, 6, 7, 8], [0, 1, 0, 1])
  kept = episodes.drop_padding(examples)
  assert rows(kept) == [1, 3]
  assert kept.y.numpy().tolist() == [6, 8]


def test_split_is_stratified_disjoint_and_exhaustive():
  y = [0] * 5 + [2] * 7 + [1] * 2 + [3] * 1
  mask = [1] * 14 + [0]  # Class 3 is padding only.
  examples = numbered_examples(y, mask)
  support, query = episodes.split_support_query(examples, 0.5, SEED, 4)
  assert np.bincount(support.y, minlength=4).tolist() == [2, 1, 3, 0]
  assert np.bincount(query.y, minlength=4).tolist() == [3, 1, 4, 0]
  assert sorted(rows(support) + rows(query)) == list(range(14))
  for part in (support, query):
    assert [y[row] for row in rows(part)] == part.y.numpy().tolist()
    assert part.mask.numpy().all()


@pytest.mark.parametrize(
    'num_examples, fraction, expected',
    [(11, 0.2, 2), (100, 0.29, 29), (10, 0.7, 7), (3, 0.0, 0), (3, 1.0, 3)]
    + [(0, 0.5, 0), (1, 0.5, 0)],
)
def test_split_takes_the_floor_of_the_fraction(
    num_examples, fraction, expected
):
  examples = numbered_examples(list(range(num_examples)))
  support, query = episodes.split_support_query(examples, fraction, SEED)
  assert len(rows(support)) == expected
  assert sorted(rows(support) + rows(query)) == list(range(num_examples))


def test_split_depends_on_the_seed_only():
  examples = numbered_examples([0, 1] * 10)
  padded = numbered_examples([0, 1] * 10 + [0] * 5, [1] * 20 + [0] * 5)

  def support_rows(examples, seed):
    return rows(episodes.split_support_query(examples, 0.5, seed, 2)[0])

  assert support_rows(examples, [1, 2]) == support_rows(examples, [1, 2])
  assert support_rows(examples, [1, 2]) == support_rows(padded, [1, 2])
  assert support_rows(examples, [1, 2]) != support_rows(examples, [1, 3])


def test_split_is_uniform():
  examples = numbered_examples([0, 0, 0, 1, 1])
  num_trials = 200
  hits = np.zeros(5)
  for trial in range(num_trials):
    support, _ = episodes.split_support_query(examples, 0.5, [9, trial], 2)
    hits[rows(support)] += 1
  # One of three and one of two. 4 standard deviations of a binomial.
  np.testing.assert_allclose(
      hits / num_trials, [1 / 3] * 3 + [1 / 2] * 2, atol=0.14
  )


def test_split_rejects_a_fraction_out_of_range():
  with pytest.raises(ValueError, match=r'\[0, 1\], found 1.5'):
    episodes.split_support_query(numbered_examples([0]), 1.5, SEED)


def test_minibatches_visit_every_example_once_per_epoch():
  batches = episodes.minibatches(7, 3, SEED, num_epochs=4)
  assert batches.indices.shape == (12, 3)
  indices = batches.indices.numpy().reshape(4, 9)
  np.testing.assert_array_equal(batches.sizes, [[3], [3], [1]] * 4)
  np.testing.assert_array_equal(indices[:, 7:], 0)
  orders = [tuple(order) for order in indices[:, :7]]
  assert all(sorted(order) == list(range(7)) for order in orders)
  assert len(set(orders)) == 4


def test_minibatches_without_shuffling():
  batches = episodes.minibatches(4, 3, SEED, num_epochs=2, shuffle=False)
  expected = [[0, 1, 2], [3, 0, 0]] * 2
  assert batches.indices.numpy().tolist() == expected
  assert batches.sizes.numpy().tolist() == [[3], [1]] * 2


def test_minibatches_of_everything():
  batches = episodes.minibatches(5, None, SEED, num_epochs=2)
  assert np.sort(batches.indices).tolist() == [list(range(5))] * 2
  assert batches.sizes.numpy().tolist() == [[5]] * 2


@pytest.mark.parametrize('batch_size', [3, None])
@pytest.mark.parametrize('shuffle', [True, False])
def test_minibatches_of_nothing(batch_size, shuffle):
  batches = episodes.minibatches(0, batch_size, SEED, 2, shuffle)
  assert batches.indices.shape[0] == batches.sizes.shape[0] == 0


def test_minibatches_of_a_size_known_at_run_time():
  traced = tf.function(
      lambda n: episodes.minibatches(n, 3, SEED, 2),
      input_signature=[tf.TensorSpec([], tf.int32)],
      autograph=False,
  )
  for num_examples in (0, 1, 7):
    for part, expected in zip(
        traced(num_examples),
        episodes.minibatches(num_examples, 3, SEED, 2),
        strict=True,
    ):
      np.testing.assert_array_equal(part, expected)


def test_minibatches_reject_bad_sizes():
  with pytest.raises(ValueError, match='`batch_size` .* found 0'):
    episodes.minibatches(5, 0, SEED)
  with pytest.raises(ValueError, match='`num_epochs` .* found -1'):
    episodes.minibatches(5, 2, SEED, num_epochs=-1)


def test_take_cuts_what_fills_up_and_keeps_padding_as_padding():
  examples = numbered_examples([5, 6, 7], [1, 0, 1])
  batches = episodes.Minibatches(
      tf.constant([[1, 1, 1, 1], [2, 1, 0, 0]]),
      tf.constant([[4], [3]]),
      tf.zeros([2, 2], tf.int32),
  )
  batch = episodes.take(examples, batches, 1)
  assert rows(batch) == [2, 1, 0]
  assert batch.y.numpy().tolist() == [7, 6, 5]
  assert batch.mask.numpy().tolist() == [1, 0, 1]


def draw(examples, seed=SEED, **changes):
  """An episode of two support and three query examples of all 5 classes."""
  options = dict(ways=0, shots=2, queries=3, max_examples=0) | changes
  return episodes.n_way_k_shot(examples, 5, seed, **options)


def counts(part):
  return np.bincount(part.y, minlength=5).tolist()


def labels(*class_sizes):
  return np.random.default_rng(1).permutation(
      np.repeat(np.arange(len(class_sizes)), class_sizes)
  )


@pytest.mark.parametrize(
    'class_sizes, changes, expected_support, expected_query',
    [
        # Enough of all classes: K and Q of each, however many there are.
        ((7, 0, 5, 60), {}, [2, 0, 2, 2, 0], [3, 0, 3, 3, 0]),
        # Class 2 is short: all 9 <= (2 + 3) * 2 are dealt, 4 > Q to query.
        ((6, 0, 3), {}, [2, 0, 2, 0, 0], [4, 0, 1, 0, 0]),
        # Short, and 13 > (2 + 3) * 2 in all: at most K + Q of a class.
        ((9, 0, 4), {}, [2, 0, 2, 0, 0], [3, 0, 2, 0, 0]),
        # Class 1 has less than K and is as if it were not there: 10 <= 10.
        ((6, 1, 4), {}, [2, 0, 2, 0, 0], [4, 0, 2, 0, 0]),
        ((6, 1, 5), {}, [2, 0, 2, 0, 0], [3, 0, 3, 0, 0]),
        # K examples are a prototype without a query.
        ((2, 4), {}, [2, 2, 0, 0, 0], [0, 2, 0, 0, 0]),
        ((1, 1, 1), {}, [0] * 5, [0] * 5),
        # Q = 0: all that are left.
        ((9, 0, 4), dict(queries=0), [2, 0, 2, 0, 0], [7, 0, 2, 0, 0]),
        ((60, 0, 2), dict(queries=0), [2, 0, 2, 0, 0], [58, 0, 0, 0, 0]),
    ],
)
def test_episode_sizes(class_sizes, changes, expected_support, expected_query):
  y = labels(*class_sizes)
  mask = np.ones(len(y) + 4)
  mask[len(y) :] = 0  # Padding of class 4.
  examples = numbered_examples([*y, 4, 4, 4, 4], mask)
  support, query = draw(examples, **changes)
  assert (counts(support), counts(query)) == (expected_support, expected_query)
  drawn = rows(support) + rows(query)
  assert len(set(drawn)) == len(drawn) and max(drawn, default=0) < len(y)
  for part in (support, query):
    assert [y[row] for row in rows(part)] == part.y.numpy().tolist()
    assert part.mask.numpy().all()


def test_an_episode_dealt_whole_has_a_limit():
  """No limit where every class has enough; a class may fall below K."""
  examples = numbered_examples(labels(30, 40, 3))
  for num in range(20):
    support, query = draw(examples, [num, 1], queries=0, max_examples=9)
    kept = [n for n in counts(support) if n]
    assert set(kept) == {2}
    assert len(rows(support)) + len(rows(query)) in (8, 9)
  support, query = draw(numbered_examples(labels(30, 40)), max_examples=9)
  assert counts(query) == [3, 3, 0, 0, 0]


def test_the_classes_of_an_episode_are_drawn():
  """Two of the three that have K examples, each two times out of three."""
  examples = numbered_examples(labels(9, 8, 1, 7))
  num_trials, hits = 150, np.zeros(5)
  for trial in range(num_trials):
    support, query = draw(examples, [5, trial], ways=2)
    drawn = np.array(counts(support)) > 0
    assert drawn.sum() == 2 and len(rows(query)) == 6
    hits += drawn
  assert hits[2] == hits[4] == 0
  # 4 standard deviations of a binomial.
  np.testing.assert_allclose(hits[[0, 1, 3]] / num_trials, 2 / 3, atol=0.155)


def test_examples_of_an_episode_are_drawn_uniformly():
  examples = numbered_examples([0] * 6 + [1] * 5)
  num_trials = 200
  in_support, in_query = np.zeros(11), np.zeros(11)
  for trial in range(num_trials):
    support, query = draw(examples, [9, trial])
    in_support[rows(support)] += 1
    in_query[rows(query)] += 1
  expected = np.array([1 / 6] * 6 + [1 / 5] * 5)
  np.testing.assert_allclose(in_support / num_trials, 2 * expected, atol=0.14)
  np.testing.assert_allclose(in_query / num_trials, 3 * expected, atol=0.14)


def test_an_episode_depends_on_the_seed_only():
  y = labels(9, 8, 7)
  plain = numbered_examples(y)
  padded = numbered_examples([*y, 0, 1], [1] * len(y) + [0, 0])

  def episode(examples, seed):
    return [rows(part) for part in draw(examples, seed, ways=2)]

  assert episode(plain, [1, 2]) == episode(padded, [1, 2])
  assert episode(plain, [1, 2]) != episode(plain, [1, 3])


def test_an_episode_of_a_size_known_at_run_time():
  traced = tf.function(
      lambda x, y: draw(episodes.Examples(x, y, tf.ones(tf.shape(y)))),
      input_signature=[
          tf.TensorSpec([None, 1], tf.float32),
          tf.TensorSpec([None], tf.int32),
      ],
      autograph=False,
  )
  for sizes in ((), (4, 9), (5, 5)):
    examples = numbered_examples(labels(*sizes) if sizes else [])
    for found, expected in zip(
        traced(examples.x, examples.y), draw(examples), strict=True
    ):
      assert rows(found) == rows(expected)


@pytest.mark.parametrize('needs_query', [False, True])
@pytest.mark.parametrize(
    'class_sizes, options',
    [
        ((4, 4), dict(max_examples=3)),
        ((4, 4), dict(max_examples=4)),
        ((4, 4), dict(max_examples=5)),
        ((4, 4), dict()),
        ((5, 5), dict(max_examples=3)),  # Of K + Q each, which are not cut.
        ((5, 5), dict(max_examples=3, queries=0)),
        ((5, 5, 2), dict(max_examples=3)),
        ((5, 5, 2), dict(max_examples=3, ways=2)),
        ((5, 4, 2), dict(max_examples=3, ways=2)),
        ((2, 2, 1), dict()),
        ((9, 1), dict()),
    ],
    ids=str,
)
def test_what_is_missing_is_what_no_episode_has(
    class_sizes, options, needs_query
):
  """Of 30 episodes none has two classes, and a query where it needs one."""
  options = dict(ways=0, max_examples=0, queries=3) | options
  missing = episodes.what_is_missing(
      np.array(class_sizes), 2, needs_query=needs_query, **options
  )
  examples = numbered_examples(labels(*class_sizes))

  def teaches(seed):
    support, query = draw(examples, seed, **options)
    return np.count_nonzero(counts(support)) > 1 and (
        len(rows(query)) > 0 or not needs_query
    )

  assert (missing is None) == any(teaches([num, 3]) for num in range(30))


def test_an_episode_needs_a_shot():
  with pytest.raises(ValueError, match='`shots` .* found 0'):
    draw(numbered_examples([0, 1]), shots=0)
