"""The embedded digits."""

import numpy as np
from sklearn import datasets as sklearn_datasets

from tff_meta.datasets import digits


def _row_strings(x):
  return sorted(row.tobytes() for row in np.asarray(x, np.uint8))


def test_train_and_test_are_the_published_images_once_each():
  corpus = digits.load()
  published = sklearn_datasets.load_digits()
  pooled = corpus.pooled()
  labelled = np.concatenate([pooled.x.reshape(1797, 64), pooled.y[:, None]], 1)
  expected = np.concatenate([published.data, published.target[:, None]], 1)
  assert _row_strings(labelled) == _row_strings(expected)


def test_test_part_is_a_fifth_of_every_class():
  corpus = digits.load()
  counts = np.bincount(corpus.pooled_labels)
  np.testing.assert_array_equal(np.bincount(corpus.test.y), counts // 5)
  assert counts.min() != counts.max()  # So that "of every class" is tested.


def test_same_parts_every_time():
  assert digits.load().fingerprint() == digits.load().fingerprint()


def test_test_part_is_spread_over_the_file():
  """The file is in the order of its writers."""
  published = sklearn_datasets.load_digits().data.astype(np.uint8)
  positions = {row.tobytes(): i for i, row in enumerate(published)}
  test = [positions[row.tobytes()] for row in digits.load().test.x]
  # Uniform over 0..1796: the mean of 355 has a standard error of 28.
  assert abs(np.mean(test) - 898) < 5 * 28


def test_preprocessed_pixels_fill_the_unit_interval():
  corpus = digits.load()
  x = corpus.preprocess(corpus.train.x)
  assert (x.min(), x.max()) == (0, 1)
  assert corpus.input_shape == (8, 8, 1)
