"""Digits: 1,797 real 8x8 images that ship with scikit-learn; no download.

Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI
Machine Learning Repository, 1998 (its test set, as scikit-learn packs it).
"""

import numpy as np

from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import scalings

SCALINGS = {'unit': scalings.Scaling(divisor=16.0), 'raw': scalings.RAW}
_TEST_FRACTION = 0.2


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
) -> corpus_lib.Corpus:
  """Loads the digits, a fifth of every class as test.

  Args:
    data_dir: Not used: the images come with scikit-learn.
    download: Not used.
    scaling: 'unit' ([0, 1]) or 'raw' (0..16).

  Returns:
    The corpus; x uint8 0..16 [n, 8, 8, 1], ink high.

  Raises:
    ValueError: If there is no such scaling.
  """
  del data_dir, download
  preprocess = scalings.choose(SCALINGS, scaling)
  from sklearn import datasets  # Takes seconds: only when needed.

  images, labels = datasets.load_digits(return_X_y=True)
  x = images.reshape(-1, 8, 8, 1).astype(np.uint8)
  y = labels.astype(np.int32)
  in_test = _stratified_test_mask(y)
  return corpus_lib.Corpus(
      name='digits',
      train=corpus_lib.LabelledExamples(x[~in_test], y[~in_test]),
      test=corpus_lib.LabelledExamples(x[in_test], y[in_test]),
      num_classes=10,
      preprocess=preprocess,
      class_split=class_splits.ten_classes(),
  )


def _stratified_test_mask(labels):
  """Marks a fixed random fifth (rounded down) of the rows of every class."""
  rng = np.random.default_rng(0)
  in_test = np.zeros(len(labels), bool)
  for label in np.unique(labels):
    rows = rng.permutation(np.flatnonzero(labels == label))
    in_test[rows[: int(_TEST_FRACTION * len(rows))]] = True
  return in_test


SPEC = dataset_spec.DatasetSpec(
    name='digits',
    description='1,797 real 8x8 digits, 10 classes; comes with scikit-learn',
    load=load,
    default_model='conv4',
    few_round=dataset_spec.FewRoundDefaults(
        way=3, num_clients=16, cohort_size=6
    ),
    clients=dataset_spec.ClientDefaults(
        num_clients=20, num_new_clients=5, cohort_size=5
    ),
    preset='demo',
)
