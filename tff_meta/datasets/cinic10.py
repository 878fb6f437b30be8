"""CINIC-10: 270,000 photographs of 32x32 pixels, the classes of CIFAR-10.

Source: Darlow, Crowley, Antoniou and Storkey, CINIC-10 is not ImageNet or
CIFAR-10, 2018; read from the folders <part>/<class>/*.png of its archive.
"""

import os

import numpy as np

from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import decoded_cache
from tff_meta.datasets import image_folders
from tff_meta.datasets import locations
from tff_meta.datasets import scalings

SCALINGS = {
    'unit': scalings.UNIT,
    'raw': scalings.RAW,
    'metavers': scalings.Scaling(
        mean=(0.47889522, 0.47227842, 0.43047404),
        std=(0.24205776, 0.23828046, 0.25874835),
    ),
}
CLASSES = (
    'airplane',
    'automobile',
    'bird',
    'cat',
    'deer',
    'dog',
    'frog',
    'horse',
    'ship',
    'truck',
)
_PARTS = ('train', 'valid', 'test')
_HOW_TO_GET = (
    'fetch CINIC-10.tar.gz from https://datashare.ed.ac.uk/handle/10283/3192'
    ' (--download cannot), unpack it into a folder CINIC-10, and pass'
    ' --data_dir=DIR of that folder or of the one above it.'
)


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
) -> corpus_lib.Corpus:
  """Loads CINIC-10.

  The published validation part (as large as the training part) is joined to
  the training part: validation examples are set aside client by client.

  Args:
    data_dir: The folder with `train`, `valid` and `test`, or the one above it.
    download: Not supported: the archive has to be fetched by hand.
    scaling: 'unit' ([0, 1]), 'raw' (0..255) or 'metavers' (mean 0, variance 1
      per channel).

  Returns:
    The corpus; x uint8 [n, 32, 32, 3].

  Raises:
    DatasetNotFoundError: If it is not there.
    ValueError: If a class has no folder, a folder is of no class, or a file is
      no such image.
  """
  del download
  preprocess = scalings.choose(SCALINGS, scaling)
  directory = locations.find_folder(
      'cinic10',
      data_dir,
      folder_names=('CINIC-10', 'cinic-10', 'cinic10'),
      must_hold=_PARTS,
      how_to_get=_HOW_TO_GET,
  )
  files = {part: _list_part(directory, part) for part in _PARTS}
  arrays = decoded_cache.load_or_decode(
      os.path.join(directory, 'tff_meta_decoded_v2.npz'),
      image_folders.files_digest(
          directory, [file for part in files.values() for file in part]
      ),
      ('train', 'test'),
      lambda: {
          'train': _read(directory, files['train'] + files['valid']),
          'test': _read(directory, files['test']),
      },
  )
  return corpus_lib.Corpus(
      name='cinic10',
      train=corpus_lib.LabelledExamples(
          arrays['train'], _labels(files['train'] + files['valid'])
      ),
      test=corpus_lib.LabelledExamples(arrays['test'], _labels(files['test'])),
      num_classes=len(CLASSES),
      preprocess=preprocess,
  )


def _list_part(directory, part):
  """Returns the files '<part>/<class>/<file>' of a part, sorted.

  Only hidden files, and other files than folders beside those of the classes,
  are passed over.
  """
  files = []
  unknown = [
      entry.name
      for entry in os.scandir(os.path.join(directory, part))
      if entry.is_dir() and entry.name not in CLASSES
  ]
  unknown = sorted(name for name in unknown if not name.startswith('.'))
  if unknown:
    raise ValueError(
        f'Expected {os.path.join(directory, part)} to hold one folder for each'
        f' of {", ".join(CLASSES)}, found {unknown[0]}, too.'
    )
  for name in CLASSES:
    folder = os.path.join(directory, part, name)
    if not os.path.isdir(folder):
      raise ValueError(
          f'Expected {os.path.join(directory, part)} to hold one folder for'
          f' each of {", ".join(CLASSES)}, found none for {name}.'
      )
    files += [
        os.path.join(part, name, file)
        for file in sorted(os.listdir(folder))
        if not file.startswith('.')
    ]
  return files


def _read(directory, files):
  paths = [os.path.join(directory, file) for file in files]
  return image_folders.read_images(paths, size=(32, 32))


def _labels(files):
  names = [os.path.basename(os.path.dirname(file)) for file in files]
  return np.array([CLASSES.index(name) for name in names], np.int32)


SPEC = dataset_spec.DatasetSpec(
    name='cinic10',
    description='270,000 photographs, 32x32, 10 classes (folders of PNG files)',
    load=load,
    default_model='lenet',
)
