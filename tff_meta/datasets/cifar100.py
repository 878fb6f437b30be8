"""CIFAR-100: 60,000 colour photographs of 32x32 pixels, 100 classes.

Source: Krizhevsky, Learning multiple layers of features from tiny images,
2009; read through TensorFlow Datasets, fine labels.
"""

from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import prepared_tfds
from tff_meta.datasets import scalings

SCALINGS = {
    'unit': scalings.UNIT,
    'raw': scalings.RAW,
    'metavers': scalings.Scaling(
        mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)
    ),
    'fedrep': scalings.Scaling(
        mean=(0.507, 0.487, 0.441), std=(0.267, 0.256, 0.276)
    ),
}

CLASS_SPLITS = {
    'frl': class_splits.frl_cifar100,
    'metavers': class_splits.metavers_cifar100,
    'cifar_fs': class_splits.cifar_fs,
    'fc100': class_splits.fc100,
}


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
    class_split: str = 'frl',
) -> corpus_lib.Corpus:
  """Loads CIFAR-100.

  Args:
    data_dir: Where TensorFlow Datasets has prepared `cifar100`; None: its
      default.
    download: Whether to fetch it if it is not there.
    scaling: 'unit' ([0, 1]), 'raw' (0..255; FRL), 'metavers' or 'fedrep' (mean
      0, variance 1 per channel, with the constants of MetaVers and of FedRep).
    class_split: 'frl', 'metavers', 'cifar_fs' or 'fc100'.

  Returns:
    The corpus; x uint8 [n, 32, 32, 3].

  Raises:
    DatasetNotFoundError: If it is not there, or cannot be fetched.
    ValueError: If `scaling` or `class_split` is unknown.
  """
  preprocess = scalings.choose(SCALINGS, scaling)
  if class_split not in CLASS_SPLITS:
    raise ValueError(
        f'Expected `class_split` to be one of {", ".join(CLASS_SPLITS)}, found'
        f' {class_split!r}.'
    )
  train, test = prepared_tfds.read(
      prepared_tfds.find('cifar100', data_dir, download)
  )
  return corpus_lib.Corpus(
      name='cifar100',
      train=train,
      test=test,
      num_classes=100,
      preprocess=preprocess,
      class_split=CLASS_SPLITS[class_split](),
  )


SPEC = dataset_spec.DatasetSpec(
    name='cifar100',
    description='60,000 photographs, 32x32, 100 classes (TensorFlow Datasets)',
    load=load,
    default_model='conv4',
    # 128 shards of 300 of the 64 * 600 images: Park et al., section 4.
    few_round=dataset_spec.FewRoundDefaults(
        way=5, num_clients=64, cohort_size=10, examples_per_class=600
    ),
)
