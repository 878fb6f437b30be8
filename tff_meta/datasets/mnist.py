"""MNIST: 70,000 digits of 28x28 pixels.

Source: LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to
document recognition, Proc. IEEE 1998; read through TensorFlow Datasets.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import prepared_tfds
from tff_meta.datasets import scalings

SCALINGS: dict[str, corpus_lib.Preprocess] = {
    'unit': scalings.UNIT,
    'raw': scalings.RAW,
    'centered': scalings.CENTERED,
    # Mean and deviation of all pixels of the training images.
    'standard': scalings.Scaling(mean=(0.1307,), std=(0.3081,)),
    'per_pixel': scalings.per_pixel,
}


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
    rotation_groups: int = 0,
    rotation_seed: int = 0,
    rotation_interpolation: Literal['nearest', 'bilinear'] = 'nearest',
) -> corpus_lib.Corpus:
  """Loads MNIST, or rotated MNIST (RMNIST) with `rotation_groups`.

  Args:
    data_dir: Where TensorFlow Datasets has prepared `mnist`; None: its default.
    download: Whether to fetch it if it is not there.
    scaling: 'unit' ([0, 1]), 'raw' (0..255), 'centered' ([-1, 1]), 'standard'
      (mean 0, variance 1 over the pixels of the training images) or 'per_pixel'
      (mean 0, variance 1 of each pixel that varies, over all 70,000 images
      before any rotation; `scalings.per_pixel`).
    rotation_groups: G random groups of images, group g turned by 20 * g degrees
      counter-clockwise; IFCA and CAFeMe: 10, to be dealt with the partition
      `by_group`. 0 for none.
    rotation_seed: Of the groups, non-negative.
    rotation_interpolation: How turned pixels are made: 'nearest', each a copy
      of another as in the code of CAFeMe, or 'bilinear'.

  Returns:
    The corpus; x uint8 [n, 28, 28, 1], ink high.

  Raises:
    DatasetNotFoundError: If it is not there, or cannot be fetched.
    ValueError: If an option is impossible.
  """
  preprocess = scalings.choose(SCALINGS, scaling)
  train, test = prepared_tfds.read(
      prepared_tfds.find('mnist', data_dir, download)
  )
  if preprocess is scalings.per_pixel:
    preprocess = preprocess(np.concatenate([train.x, test.x]))
  corpus = corpus_lib.Corpus(
      name='mnist',
      train=train,
      test=test,
      num_classes=10,
      preprocess=preprocess,
      class_split=class_splits.ten_classes(),
  )
  if rotation_groups:
    return corpus_lib.with_rotation_groups(
        corpus,
        rotation_seed,
        rotation_groups,
        interpolation=rotation_interpolation,
    )
  return corpus


def _earlier_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
  """Rotation was bilinear before there was another."""
  is_rotated = bool(options.get('rotation_groups'))
  return {'rotation_interpolation': 'bilinear' if is_rotated else 'nearest'}


SPEC = dataset_spec.DatasetSpec(
    name='mnist',
    description='70,000 digits, 28x28, 10 classes (TensorFlow Datasets)',
    load=load,
    default_model='mlp',
    few_round=dataset_spec.FewRoundDefaults(
        way=3, num_clients=16, cohort_size=6, examples_per_class=600
    ),
    earlier_options=_earlier_options,
)
