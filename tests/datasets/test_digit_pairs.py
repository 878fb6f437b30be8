"""The embedded pairs of digits."""

import itertools

import numpy as np
import pytest

from tff_meta.datasets import digit_pairs
from tff_meta.datasets import digits


@pytest.fixture(scope='module')
def corpus():
  return digit_pairs.load()


def _halves(examples, classes):
  """Returns the images of digits, as bytes, in the pairs of classes."""
  x = examples.x[np.isin(examples.y, classes)]
  return {half.tobytes() for half in (*x[:, :, :8], *x[:, :, 8:])}


def test_a_class_is_a_digit_beside_a_digit(corpus):
  source = digits.load().pooled()
  digit_of = {
      image.tobytes(): label
      for image, label in zip(source.x, source.y, strict=True)
  }
  for examples in (corpus.train, corpus.test):
    tens = [digit_of[x.tobytes()] for x in examples.x[:, :, :8]]
    ones = [digit_of[x.tobytes()] for x in examples.x[:, :, 8:]]
    np.testing.assert_array_equal(
        10 * np.array(tens) + np.array(ones), examples.y
    )


def test_a_class_has_an_image_of_a_digit_once_on_either_side(corpus):
  np.testing.assert_array_equal(np.bincount(corpus.train.y), [20] * 100)
  np.testing.assert_array_equal(np.bincount(corpus.test.y), [5] * 100)
  pooled = corpus.pooled()
  for label in range(100):
    x = pooled.x[pooled.y == label]
    for side in (x[:, :, :8], x[:, :, 8:]):
      assert len({half.tobytes() for half in side}) == 25


def test_no_image_of_a_digit_is_in_two_parts(corpus):
  split = corpus.class_split
  parts = (split.train, split.validation, split.test)
  assert [len(part) for part in parts] == [64, 16, 20]
  assert sorted(sum(parts, ())) == list(range(100))
  used = [
      _halves(examples, part)
      for examples in (corpus.train, corpus.test)
      for part in parts
  ]
  assert all(used)
  for one, other in itertools.combinations(used, 2):
    assert not one & other


def test_it_is_always_the_same_and_scaled_like_digits(corpus):
  assert corpus.fingerprint() == digit_pairs.load().fingerprint()
  # On every machine: The results' numbers are of these very pairs.
  assert corpus.fingerprint() == 'ca1a70e895ffeaac'
  assert corpus.input_shape == (8, 16, 1)
  x = corpus.preprocess(corpus.train.x)
  assert (x.min(), x.max()) == (0, 1)
  raw = digit_pairs.load(scaling='raw')
  assert raw.preprocess(raw.train.x).max() == 16
