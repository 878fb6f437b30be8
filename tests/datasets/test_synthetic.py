"""Gaussian blobs."""

import numpy as np
import pytest

from tff_meta.datasets import synthetic


def test_sizes_and_class_split():
  corpus = synthetic.load(
      num_classes=7,
      examples_per_class=5,
      test_examples_per_class=2,
      image_size=3,
  )
  assert corpus.train.x.shape == (35, 3, 3, 1)
  np.testing.assert_array_equal(np.bincount(corpus.train.y), [5] * 7)
  np.testing.assert_array_equal(np.bincount(corpus.test.y), [2] * 7)
  split = corpus.class_split
  assert (split.train, split.validation, split.test) == (
      (0, 1, 2, 3, 4),
      (5,),
      (6,),
  )


def test_two_classes_are_enough():
  split = synthetic.load(num_classes=2).class_split
  assert (split.train, split.validation, split.test) == ((0,), (), (1,))


def test_noise_is_the_spread_around_the_class_centre():
  centres = synthetic.load(noise=0, seed=3)
  noisy = synthetic.load(noise=0.5, examples_per_class=400, seed=3)
  of_class_2 = noisy.train.x[noisy.train.y == 2]
  centre = centres.train.x[centres.train.y == 2][0]
  # Mean of 400 draws: standard error 0.025, 5 of them over 64 pixels.
  np.testing.assert_allclose(of_class_2.mean(0), centre, atol=0.125)
  assert abs((of_class_2 - centre).std() - 0.5) < 0.01
  assert (centres.train.x[centres.train.y == 2] == centre).all()
  assert (centres.test.x[centres.test.y == 2] == centre).all()


def test_seed_decides():
  assert synthetic.load().fingerprint() == synthetic.load().fingerprint()
  assert synthetic.load().fingerprint() != synthetic.load(seed=1).fingerprint()


@pytest.mark.parametrize(
    'option, value',
    [
        ('num_classes', 1),
        ('examples_per_class', 0),
        ('test_examples_per_class', -1),
        ('image_size', 0),
        ('noise', -0.1),
        ('seed', -1),
    ],
)
def test_impossible_options(option, value):
  with pytest.raises(ValueError, match=f'`{option}` >= .*, found {value}'):
    synthetic.load(**{option: value})
