"""CIFAR-10: 60,000 colour photographs of 32x32 pixels, 10 classes.

Source: Krizhevsky, Learning multiple layers of features from tiny images,
2009; read through TensorFlow Datasets.
"""

from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import prepared_tfds
from tff_meta.datasets import scalings

SCALINGS = {
    'unit': scalings.UNIT,
    'raw': scalings.RAW,
    'centered': scalings.CENTERED,
    'metavers': scalings.Scaling(
        mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)
    ),
    'fedrep': scalings.Scaling(
        mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),
}


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
) -> corpus_lib.Corpus:
  """Loads CIFAR-10.

  Args:
    data_dir: Where TensorFlow Datasets has prepared `cifar10`; None: its
      default.
    download: Whether to fetch it if it is not there.
    scaling: 'unit' ([0, 1]; CAFeMe), 'raw' (0..255), 'centered' ([-1, 1];
      FedMeta-Per), 'metavers' or 'fedrep' (mean 0, variance 1 per channel,
      with the constants of MetaVers and of FedRep).

  Returns:
    The corpus; x uint8 [n, 32, 32, 3].

  Raises:
    DatasetNotFoundError: If it is not there, or cannot be fetched.
  """
  preprocess = scalings.choose(SCALINGS, scaling)
  train, test = prepared_tfds.read(
      prepared_tfds.find('cifar10', data_dir, download)
  )
  return corpus_lib.Corpus(
      name='cifar10',
      train=train,
      test=test,
      num_classes=10,
      preprocess=preprocess,
      class_split=class_splits.ten_classes(),
  )


SPEC = dataset_spec.DatasetSpec(
    name='cifar10',
    description='60,000 photographs, 32x32, 10 classes (TensorFlow Datasets)',
    load=load,
    default_model='lenet',
    few_round=dataset_spec.FewRoundDefaults(
        way=3, num_clients=16, cohort_size=6, examples_per_class=600
    ),
)
