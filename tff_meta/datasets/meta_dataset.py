"""Meta-Dataset as CAFeMe deals it: each client ten classes of one of 8 sources.

Sources: Triantafillou et al., Meta-Dataset: A Dataset of Datasets for Learning
to Learn from Few Examples, ICLR 2020 (records of six data sets); Vettoruzzo et
al., 2023, released code, which adds miniImageNet and CIFAR-FS and deals clients
of 600 images of 32x32 pixels.
"""

import glob
import io
import os

import numpy as np

from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import cifar100
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import decoded_cache
from tff_meta.datasets import image_folders
from tff_meta.datasets import locations
from tff_meta.datasets import mini_imagenet
from tff_meta.datasets import prepared_tfds
from tff_meta.datasets import scalings

SCALINGS = {'unit': scalings.UNIT, 'raw': scalings.RAW}
IMAGE_SIZE = 32
NUM_CLASSES = 10
RECORDS = (
    'aircraft',
    'cu_birds',
    'dtd',
    'traffic_sign',
    'vgg_flower',
    'omniglot',
)
# Its records are white on black, the drawings black on white.
_INVERTED = 'omniglot'
_HOW_TO_GET = (
    'make the records of these six as https://github.com/google-research/'
    'meta-dataset says (--download cannot), and pass --data_dir=DIR of the'
    ' folder that holds theirs, called meta_dataset, beside mini_imagenet and'
    ' cifar100.'
)


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
    dealt_clients: int = 100,
    images_per_client: int = 600,
    dealing_seed: int = 0,
) -> corpus_lib.Corpus:
  """Deals Meta-Dataset to clients, to be told apart with `by_writer`.

  A client gets one of the eight sources at random, ten of its classes, a random
  order in which these become labels 0..9 (so the same class has other labels in
  other clients), and at most `images_per_client` / 10 random images of each.
  Sources are the six folders of records with all their classes, and the
  meta-train classes of miniImageNet and CIFAR-FS. Images are resized to 32x32
  (bilinear, their shape is not kept). Two clients may hold the same image; a
  test client may so be tested on what a training client trained on, as in the
  released code.

  Args:
    data_dir: The folder that holds `meta_dataset` with the six folders of
      records, `mini_imagenet` and TensorFlow Datasets' `cifar100`.
    download: Whether to fetch CIFAR-100 if it is not there; the others have to
      be put there by hand.
    scaling: 'unit' ([0, 1]) or 'raw' (0..255).
    dealt_clients: Number of clients, training and new ones together.
    images_per_client: Most images of a client, a multiple of 10. What a client
      has of fewer it has of more, too. (Omniglot has 20 images a class, so 200
      are the most that its clients get.)
    dealing_seed: Source of all draws, non-negative. Client k is the same
      whatever `dealt_clients` is.

  Returns:
    The corpus; x uint8 [n, 32, 32, 3], y 0..9, `writers` the number of the
    client. All is in the train part.

  Raises:
    DatasetNotFoundError: If a source is not there.
    ValueError: If an option is impossible, a source has fewer than ten classes,
      or a file is no record of images.
  """
  preprocess = scalings.choose(SCALINGS, scaling)
  if dealt_clients < 1:
    raise ValueError(f'Expected `dealt_clients` >= 1, found {dealt_clients}.')
  if dealing_seed < 0:
    raise ValueError(f'Expected `dealing_seed` >= 0, found {dealing_seed}.')
  if images_per_client < NUM_CLASSES or images_per_client % NUM_CLASSES:
    raise ValueError(
        f'Expected `images_per_client` to be a multiple of {NUM_CLASSES}, found'
        f' {images_per_client}.'
    )
  directory = locations.find_folder(
      'meta_dataset',
      data_dir,
      folder_names=('meta_dataset', 'metadataset-records'),
      must_hold=RECORDS,
      how_to_get=_HOW_TO_GET,
  )
  files = {name: _list_records(directory, name) for name in RECORDS}
  dealing = f'{dealt_clients}_{images_per_client}_{dealing_seed}'
  arrays = decoded_cache.load_or_decode(
      os.path.join(directory, f'tff_meta_dealt_{dealing}_v2.npz'),
      _source(directory, files, data_dir, download),
      ('x', 'y', 'client'),
      lambda: _deal(
          _open_sources(files, data_dir, download),
          dealt_clients,
          images_per_client // NUM_CLASSES,
          dealing_seed,
      ),
  )
  x, y = arrays['x'], arrays['y']
  return corpus_lib.Corpus(
      name='meta_dataset',
      train=corpus_lib.LabelledExamples(x, y),
      test=corpus_lib.LabelledExamples(x[:0], y[:0]),
      num_classes=NUM_CLASSES,
      preprocess=preprocess,
      writers=arrays['client'],
  )


def _list_records(directory, name):
  """Returns the files of a source, one a class."""
  pattern = os.path.join(directory, name, '*.tfrecords')
  files = sorted(glob.glob(pattern))
  if len(files) < NUM_CLASSES:
    raise ValueError(
        f'Expected at least {NUM_CLASSES} files {pattern}, one for each class,'
        f' found {len(files)}.'
    )
  return files


def _source(directory, files, data_dir, download):
  """Returns a digest that changes when one of the eight sources does."""
  records = [
      os.path.relpath(path, directory) for own in files.values() for path in own
  ]
  cifar100_dir = prepared_tfds.find('cifar100', data_dir, download)
  return ' '.join(
      (
          image_folders.files_digest(directory, records),
          mini_imagenet.source(mini_imagenet.find(data_dir)),
          prepared_tfds.source(cifar100_dir),
      )
  )


def _open_sources(files, data_dir, download):
  """Returns the eight sources; the one that is slow to read comes last."""
  cifar_fs = cifar100.load(data_dir, download, class_split='cifar_fs')
  return [
      *(_Records(own, name == _INVERTED) for name, own in files.items()),
      _MetaTrainClasses(mini_imagenet.load(data_dir)),
      _MetaTrainClasses(cifar_fs),
  ]


def _deal(sources, num_clients, images_per_class, seed):
  """Returns x, y and client of all images, client after client."""
  xs, ys, clients = [], [], []
  for k in range(num_clients):
    rng = np.random.default_rng([seed, k])
    source = sources[rng.integers(len(sources))]
    classes = rng.permutation(source.num_classes)[:NUM_CLASSES]
    for label, chosen in enumerate(classes):
      x = source.draw(chosen, images_per_class, rng)
      xs.append(x)
      ys.append(np.full(len(x), label, np.int32))
      clients.append(np.full(len(x), k, np.int32))
  return {
      'x': np.concatenate(xs),
      'y': np.concatenate(ys),
      'client': np.concatenate(clients),
  }


class _Records:
  """A source of record files, one a class: JPEG images, any size."""

  def __init__(self, files, inverted):
    self._files = files
    self._inverted = inverted
    self.num_classes = len(files)

  def draw(self, chosen, most, rng):
    """Returns at most `most` images of a class, uint8 [k, 32, 32, 3]."""
    import tensorflow as tf  # Takes seconds: only when needed.

    path = self._files[chosen]
    try:
      # Deprecated, but a data set takes 40 ms for each of a thousand classes.
      records = list(tf.compat.v1.io.tf_record_iterator(path))
      images = [
          tf.train.Example.FromString(records[row])
          .features.feature['image']
          .bytes_list.value[0]
          for row in _draw_rows(len(records), most, rng)
      ]
      x = np.stack([_small(io.BytesIO(image)) for image in images])
    except Exception as e:  # Whatever TensorFlow, protobuf or Pillow raise.
      raise ValueError(
          f'Expected {path} to hold records of Meta-Dataset, with an encoded'
          f' image under the key image, found: {e}'
      ) from e
    return 255 - x if self._inverted else x


class _MetaTrainClasses:
  """A source that is the meta-train classes of a corpus."""

  def __init__(self, corpus):
    self._corpus = corpus
    self._classes = corpus.class_split.train
    self.num_classes = len(self._classes)

  def draw(self, chosen, most, rng):
    """Returns at most `most` images of a class, uint8 [k, 32, 32, 3]."""
    rows = np.flatnonzero(self._corpus.pooled_labels == self._classes[chosen])
    rows = rows[_draw_rows(len(rows), most, rng)]
    return np.stack([_small(x) for x in self._corpus.raw_rows(rows)])


def _draw_rows(available, most, rng):
  """Returns different rows; those of a smaller `most` are the first ones."""
  return rng.permutation(available)[:most]


def _small(image):
  """Returns an array, or a file of an image, as uint8 [32, 32, 3]."""
  from PIL import Image  # Only when needed.

  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  else:
    image = image_folders.to_rgb(image)
  size = (IMAGE_SIZE, IMAGE_SIZE)
  return np.asarray(image.resize(size, Image.Resampling.BILINEAR))


SPEC = dataset_spec.DatasetSpec(
    name='meta_dataset',
    description='clients of 10 classes of one of 8 sources, 32x32 (records)',
    load=load,
    partition='by_writer',
    default_model='cafeme_base',
    clients=dataset_spec.ClientDefaults(
        num_clients=80, num_new_clients=20, cohort_size=5
    ),
)
