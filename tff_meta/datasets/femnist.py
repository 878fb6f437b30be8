"""FEMNIST: handwritten digits and letters by writer, 28x28 pixels.

Source: Caldas et al., LEAF: A Benchmark for Federated Settings, 2018, out of
Cohen et al., EMNIST, 2017. Read from an SQLite file as TensorFlow Federated
publishes it, or from LEAF's JSON files. Any data set in one of these two forms
can be read by giving its path.
"""

import collections
import glob
import os

import numpy as np

from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import locations
from tff_meta.datasets import scalings
from tff_meta.datasets import writer_files

# In the files the background is 1 and the ink 0.
SCALINGS = {
    'unit': scalings.UNIT,
    'ink': scalings.Scaling(mean=(1.0,), std=(-1.0,)),
    'cafeme': scalings.Scaling(mean=(0.5,), std=(-0.5,)),
    'raw': scalings.RAW,
}
NUM_DIGITS, NUM_CLASSES = 10, 62
_SMALL_A_TO_J = range(36, 46)
_TFF_FILE = 'emnist_all.sqlite'
_TFF_DIR = os.path.join('~', '.tff')
_HOW_TO_GET = (
    'binaries.train --dataset=femnist --rounds=1 --download, with any'
    ' --algorithm, fetches it with TensorFlow Federated; --data_dir=PATH is an'
    ' .sqlite file of its kind, a .json file of LEAF, or the folder with the'
    ' folders `train` and `test` of such files.'
)


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
    only_digits: bool = False,
    only_a_to_j: bool = False,
) -> corpus_lib.Corpus:
  """Loads FEMNIST into memory.

  Pixels are kept in steps of 1/255 (the published files hold no finer ones).

  Args:
    data_dir: Path of an SQLite or JSON file, of a folder with LEAF's folders
      `train` and `test`, or of the folder that holds `emnist_all.sqlite`. None:
      `~/.tff`, where TensorFlow Federated keeps it.
    download: Whether to fetch `emnist_all.sqlite` if it is not there.
    scaling: 'unit' (background 1, ink 0), 'ink' (background 0, ink 1), 'cafeme'
      (background -1, ink 1) or 'raw' (background 255, ink 0).
    only_digits: Whether there are 10 classes instead of 62 (digits 0-9, capital
      letters 10-35, small letters 36-61).
    only_a_to_j: Whether there are only the small letters a to j, as classes
      0-9 (FedRep and FedEC).

  Returns:
    The corpus, with the writer of every example; x uint8 [n, 28, 28, 1]. Its
    class split is FRL's: letters prepare, digits test; with `only_digits` that
    of the digits, with `only_a_to_j` there is none.

  Raises:
    DatasetNotFoundError: If it is not there, or cannot be fetched.
    ValueError: If a file is not what it should be, or both `only_digits` and
      `only_a_to_j` are asked for.
  """
  if only_digits and only_a_to_j:
    raise ValueError(
        'Expected one of `only_digits` and `only_a_to_j`, found both.'
    )
  preprocess = scalings.choose(SCALINGS, scaling)
  path = _find(data_dir, download)
  train, test = writer_files.read(path, _kind(only_digits))
  if only_a_to_j:
    class_split = None
    train, test = _keep_a_to_j(train), _keep_a_to_j(test)
  elif only_digits:
    class_split = class_splits.ten_classes()
  else:
    letters = tuple(range(NUM_DIGITS, NUM_CLASSES))
    class_split = corpus_lib.ClassSplit(letters, (), tuple(range(NUM_DIGITS)))
  return corpus_lib.Corpus(
      name='femnist',
      train=corpus_lib.LabelledExamples(train.x, train.y),
      test=corpus_lib.LabelledExamples(test.x, test.y),
      num_classes=10 if only_digits or only_a_to_j else NUM_CLASSES,
      preprocess=preprocess,
      class_split=class_split,
      writers=train.writers,
      test_writers=test.writers,
  )


def _keep_a_to_j(part: writer_files.Part) -> writer_files.Part:
  """Returns the small letters a to j, as classes 0 to 9."""
  keep = np.isin(part.y, _SMALL_A_TO_J)
  return writer_files.Part(
      part.x[keep], part.y[keep] - _SMALL_A_TO_J[0], part.writers[keep]
  )


def load_client_data(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
    only_digits: bool = False,
):
  """Opens FEMNIST as data of clients, one per writer.

  Args:
    data_dir: As for `load`. From an SQLite file, examples are read when a
      client is asked for.
    download: As for `load`.
    scaling: As for `load`.
    only_digits: As for `load`.

  Returns:
    Train and test `tff.simulation.datasets.ClientData` of elements
    OrderedDict(x=float32 [28, 28, 1], y=int32). A writer without test examples
    is missing from the latter; it is None if no writer has any. Files that are
    split by writer have other writers in the latter, which
    `FederatedDataset.from_client_data` refuses to take for test examples.

  Raises:
    DatasetNotFoundError: If it is not there, or cannot be fetched.
    ValueError: If a file is not what it should be.
  """
  scale = scalings.choose(SCALINGS, scaling)
  path = _find(data_dir, download)
  if writer_files.is_sqlite(path):
    splits = writer_files.sqlite_splits(path, _kind(only_digits))
    parts = [writer_files.open_sqlite(path, split) for split in splits]
  else:
    parts = [writer_files.open_arrays(p) for p in writer_files.read_leaf(path)]
  return tuple(part and _scaled_client_data(part, scale) for part in parts)


def _scaled_client_data(client_data, scale):
  """Scales the uint8 pixels of every client in its tf.data pipeline."""
  import tensorflow as tf

  mean, std = np.float32(scale.mean), np.float32(scale.std)

  def scale_example(example):
    x = tf.cast(example['x'], tf.float32) / scale.divisor
    return collections.OrderedDict(x=(x - mean) / std, y=example['y'])

  return client_data.preprocess(lambda dataset: dataset.map(scale_example))


def _find(data_dir, download):
  """Returns the path of an SQLite file, a JSON file or a LEAF folder."""
  given = os.path.expanduser(_TFF_DIR if data_dir is None else data_dir)
  if os.path.isfile(given):
    return given
  looked_for = [os.path.join(given, _TFF_FILE)]
  if os.path.exists(looked_for[0]):
    return looked_for[0]
  for folder in (given, os.path.join(given, 'femnist')):
    looked_for.append(os.path.join(folder, 'train', '*.json'))
    if glob.glob(looked_for[-1]):
      return folder
  if not download:
    raise locations.not_found('femnist', looked_for, _HOW_TO_GET)
  import tensorflow_federated as tff  # Takes seconds: only when needed.

  try:
    tff.simulation.datasets.emnist.load_data(cache_dir=given)
  except Exception as e:  # Whatever the network, the host or the disk raise.
    raise locations.DatasetNotFoundError(
        f"Could not download 'femnist' to {given}: {e}. Tip: try again with the"
        f' --data_dir of an empty folder; {looked_for[0]}, should it be there'
        ' now, is not complete.'
    ) from e
  return looked_for[0]


def _kind(only_digits):
  """Names the splits of TensorFlow Federated's file."""
  return 'digits_only' if only_digits else 'all'


SPEC = dataset_spec.DatasetSpec(
    name='femnist',
    description='805,000 digits and letters by 3,500 writers, 28x28 (SQLite)',
    load=load,
    load_client_data=load_client_data,
    default_model='conv4',
    # 52 letters prepare, 10 digits test; 600 images each: Park et al. 2021.
    few_round=dataset_spec.FewRoundDefaults(
        way=5, num_clients=52, cohort_size=10, examples_per_class=600
    ),
)
