"""Synthetic: one Gaussian blob per class; for tests and smoke runs."""

import numpy as np

from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import scalings


def load(
    data_dir: str | None = None,
    download: bool = False,
    *,
    num_classes: int = 20,
    examples_per_class: int = 40,
    test_examples_per_class: int = 10,
    image_size: int = 8,
    noise: float = 1.0,
    seed: int = 0,
) -> corpus_lib.Corpus:
  """Draws x = centre[y] + noise * z, with centre and z standard normal.

  With noise 0 every image is its class's centre.

  Args:
    data_dir: Not used: nothing is read.
    download: Not used.
    num_classes: At least 2. About half of the classes are meta-train, the rest
      is halved into meta-validation and meta-test.
    examples_per_class: Train images of a class, at least 1.
    test_examples_per_class: Test images of a class, may be 0.
    image_size: Height and width in pixels.
    noise: Standard deviation of a pixel within its class, at least 0.
    seed: Non-negative.

  Returns:
    The corpus; x float32 [n, image_size, image_size, 1], sorted by class.

  Raises:
    ValueError: If a number is out of its range.
  """
  del data_dir, download
  for name, value, least in (
      ('num_classes', num_classes, 2),
      ('examples_per_class', examples_per_class, 1),
      ('test_examples_per_class', test_examples_per_class, 0),
      ('image_size', image_size, 1),
      ('noise', noise, 0),
      ('seed', seed, 0),
  ):
    if value < least:
      raise ValueError(f'Expected `{name}` >= {least}, found {value}.')
  rng = np.random.default_rng(seed)
  shape = (image_size, image_size, 1)
  centres = rng.standard_normal((num_classes, *shape), np.float32)

  def draw(per_class):
    y = np.repeat(np.arange(num_classes, dtype=np.int32), per_class)
    z = rng.standard_normal((len(y), *shape), np.float32)
    return corpus_lib.LabelledExamples(centres[y] + np.float32(noise) * z, y)

  num_test = max(1, num_classes // 4)
  num_validation = num_classes // 4
  return corpus_lib.Corpus(
      name='synthetic',
      train=draw(examples_per_class),
      test=draw(test_examples_per_class),
      num_classes=num_classes,
      preprocess=scalings.RAW,
      class_split=class_splits.consecutive(
          num_classes - num_validation - num_test, num_validation, num_test
      ),
  )


SPEC = dataset_spec.DatasetSpec(
    name='synthetic',
    description='Gaussian blobs, any number of classes; for smoke runs',
    load=load,
    default_model='mlp',
    few_round=dataset_spec.FewRoundDefaults(
        way=3, num_clients=10, cohort_size=3
    ),
    clients=dataset_spec.ClientDefaults(num_clients=10, cohort_size=3),
)
