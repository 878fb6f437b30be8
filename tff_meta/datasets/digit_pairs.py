"""Digit pairs: two handwritten digits side by side, 100 classes; no download.

Class 37 is a 3 beside a 7. Ten digits are too few to prepare a model on some
classes and test it on others; of their pairs there are a hundred, of which 64
are meta-train, 16 meta-validation and 20 meta-test. No image of a digit is in
two of these parts, nor in training and in test images. Within a class it is on
either side at most once; classes of a part share images.

Source: ours, of the images of the data set `digits`.
"""

import numpy as np

from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import digits

_NUM_DIGITS = 10
_PART_SIZES = (64, 16, 20)  # Classes of meta-train, -validation and -test.
_TRAIN_PER_CLASS, _TEST_PER_CLASS = 20, 5


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
) -> corpus_lib.Corpus:
  """Pairs the digits at random, always in the same way.

  Args:
    data_dir: Not used: the images come with scikit-learn.
    download: Not used.
    scaling: 'unit' ([0, 1]) or 'raw' (0..16).

  Returns:
    The corpus: 20 training and 5 test images a class; x uint8 0..16
    [n, 8, 16, 1], ink high.

  Raises:
    ValueError: If there is no such scaling.
  """
  source = digits.load(data_dir, download, scaling)
  rng = np.random.default_rng(0)
  bounds = np.cumsum(_PART_SIZES)[:-1]
  parts = np.split(rng.permutation(_NUM_DIGITS**2), bounds)
  return corpus_lib.Corpus(
      name='digit_pairs',
      train=_pair(source.train, parts, _TRAIN_PER_CLASS, rng),
      test=_pair(source.test, parts, _TEST_PER_CLASS, rng),
      num_classes=_NUM_DIGITS**2,
      preprocess=source.preprocess,
      class_split=corpus_lib.ClassSplit(
          *(tuple(map(int, np.sort(part))) for part in parts)
      ),
  )


def _pair(source, parts, per_class, rng):
  """Returns pairs of the source's images, each of which is in one part only."""
  images, labels = [], []
  pools = _pools(source, rng)
  for part, pool in zip(parts, pools, strict=True):
    for label in np.sort(part):
      left, right = (
          source.x[rng.permutation(pool[digit])[:per_class]]
          for digit in divmod(label, _NUM_DIGITS)
      )
      images.append(np.concatenate([left, right], axis=2))
      labels.append(np.full(per_class, label, np.int32))
  return corpus_lib.LabelledExamples(
      np.concatenate(images), np.concatenate(labels)
  )


def _pools(source, rng):
  """Deals the rows of every digit to the three parts, in their proportion."""
  bounds = np.cumsum(_PART_SIZES)[:-1] / sum(_PART_SIZES)
  pools: tuple[list[np.ndarray], ...] = [], [], []
  for digit in range(_NUM_DIGITS):
    rows = rng.permutation(np.flatnonzero(source.y == digit))
    cuts = np.round(bounds * len(rows)).astype(int)
    for pool, dealt in zip(pools, np.split(rows, cuts), strict=True):
      pool.append(dealt)
  return pools


SPEC = dataset_spec.DatasetSpec(
    name='digit_pairs',
    description='2,500 pairs of the digits, 8x16, 100 classes',
    load=load,
    # Conv4 averages over the places that tell 37 from 73.
    default_model='mlp',
    few_round=dataset_spec.FewRoundDefaults(
        way=5, num_clients=64, cohort_size=5
    ),
    clients=dataset_spec.ClientDefaults(num_clients=50, cohort_size=5),
    preset='demo',
)
