"""Data sets that TensorFlow Datasets has prepared on disk."""

from collections.abc import Callable, Sequence
import hashlib
import os

import numpy as np

from tff_meta.data import checks
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import decoded_cache
from tff_meta.datasets import locations

_INFO_FILE = 'dataset_info.json'
_SPLITS = ('train', 'test')
_BATCH_SIZE = 512
# What int32 holds; a data set checks its own number of classes.
_MOST_CLASSES = 2**31


def find(name: str, data_dir: str | None, download: bool) -> str:
  """Returns the directory of a prepared data set, '.../<name>/<version>'.

  Args:
    name: Name in TensorFlow Datasets.
    data_dir: As for `locations.roots`.
    download: Whether to fetch and prepare it if it is not there.

  Raises:
    locations.DatasetNotFoundError: If it is not there, or cannot be fetched.
  """
  roots = locations.roots(data_dir)
  for root in roots:
    versions = _versions(os.path.join(root, name))
    if versions:
      return versions[-1]
  if download:
    return _download(name, roots[0])
  raise locations.not_found(
      name,
      [os.path.join(root, name, '<version>', _INFO_FILE) for root in roots],
      f'`./run python -m binaries.train --algorithm=fed_avg --dataset={name}'
      f' --rounds=1 --download --data_dir={data_dir or "DIR"}` fetches it with'
      ' TensorFlow Datasets; --data_dir may also be a directory where tfds.load'
      ' has prepared it.',
  )


def read(
    directory: str,
    *,
    cache_name: str = 'tff_meta_decoded_v2.npz',
    convert: Callable | None = None,
) -> tuple[corpus_lib.LabelledExamples, corpus_lib.LabelledExamples]:
  """Reads the splits 'train' and 'test', in the order of the files.

  The first call leaves the decoded images in the directory (if it can write
  there), because decoding takes seconds and reading them back does not.

  Args:
    directory: What `find` returned.
    cache_name: Name of that file; another one for every `convert`.
    convert: Maps a batch of images, uint8 tensor [b, h, w, c], to uint8; None
      keeps them.

  Returns:
    Train and test part, x uint8.

  Raises:
    ValueError: If images are not uint8, or labels not in the range of int32.
  """
  names = [f'{split}_{part}' for split in _SPLITS for part in 'xy']

  def decode():
    parts = [_read_split(directory, split, convert) for split in _SPLITS]
    return dict(zip(names, sum(parts, ()), strict=True))

  arrays = decoded_cache.load_or_decode(
      os.path.join(directory, cache_name), source(directory), names, decode
  )
  train, test = (
      corpus_lib.LabelledExamples(arrays[f'{split}_x'], arrays[f'{split}_y'])
      for split in _SPLITS
  )
  return train, test


def source(directory: str) -> str:
  """Returns a digest of all files of a prepared data set and their contents.

  They are read, which takes a tenth of a second for a hundred megabytes, so
  that a copy of the directory with its decoded images is not decoded again.
  """
  digest = hashlib.sha256()
  for name in sorted(os.listdir(directory)):
    path = os.path.join(directory, name)
    if name.startswith(decoded_cache.PREFIX) or not os.path.isfile(path):
      continue
    with open(path, 'rb') as file:
      contents = hashlib.file_digest(file, 'sha256').hexdigest()
    digest.update(repr((name, contents)).encode())
  return digest.hexdigest()


def label_names(directory: str) -> Sequence[str]:
  """Returns the names of the labels 0, 1, ... of a prepared data set."""
  return _builder(directory).info.features['label'].names


def _versions(directory):
  """Returns the prepared versions in a directory, oldest first."""

  def key(version):
    return [int(n) if n.isdigit() else -1 for n in version.split('.')]

  if not os.path.isdir(directory):
    return []
  paths = [
      os.path.join(directory, version)
      for version in sorted(os.listdir(directory), key=key)
  ]
  return [p for p in paths if os.path.exists(os.path.join(p, _INFO_FILE))]


def _download(name, data_dir):
  import tensorflow_datasets as tfds  # Takes seconds: only when needed.

  try:
    builder = tfds.builder(name, data_dir=data_dir)
    builder.download_and_prepare()
  except Exception as e:  # Whatever the network, the host or the disk raise.
    raise locations.DatasetNotFoundError(
        f'Could not download {name!r} to {data_dir}: {e}. Tip: prepare it with'
        ' tfds.load on a machine with internet, and pass --data_dir=DIR of a'
        ' copy of its directory.'
    ) from e
  return str(builder.data_dir)


def _builder(directory):
  import tensorflow_datasets as tfds

  return tfds.builder_from_directory(directory)


def _read_split(directory, split, convert):
  """Decodes one split into arrays x and y."""
  import tensorflow as tf
  import tensorflow_datasets as tfds

  dataset = _builder(directory).as_dataset(
      split=split,
      batch_size=_BATCH_SIZE,
      shuffle_files=False,
      read_config=tfds.ReadConfig(try_autocache=False),
  )
  pixels = dataset.element_spec['image'].dtype
  if pixels != tf.uint8:
    raise ValueError(
        f'Expected the images of {directory} to be uint8, found {pixels.name}.'
    )
  dataset = dataset.map(
      lambda e: (convert(e['image']) if convert else e['image'], e['label']),
      num_parallel_calls=tf.data.AUTOTUNE,
  )
  images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
  y = checks.to_labels(np.concatenate(labels), directory, _MOST_CLASSES)
  return np.concatenate(images), y
