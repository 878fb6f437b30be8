"""miniImageNet: 60,000 photographs of 84x84 pixels, 100 classes.

Source: Vinyals et al., Matching Networks for One Shot Learning, NeurIPS 2016,
in the split of Ravi and Larochelle, Optimization as a Model for Few-Shot
Learning, ICLR 2017: files train.csv, val.csv and test.csv (columns filename,
label) beside a folder `images`.
"""

import collections
import csv
import os

import numpy as np

from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import decoded_cache
from tff_meta.datasets import image_folders
from tff_meta.datasets import locations
from tff_meta.datasets import scalings

SCALINGS = {'unit': scalings.UNIT, 'raw': scalings.RAW}
IMAGE_SIZE = 84
_TABLES = ('train.csv', 'val.csv', 'test.csv')
_HOW_TO_GET = (
    'ImageNet images may not be passed on, so --download cannot fetch them:'
    ' put the 60,000 files into a folder `images` beside train.csv, val.csv'
    ' and test.csv of https://github.com/twitter/meta-learning-lstm, and pass'
    ' --data_dir=DIR of the folder that holds these four, or of the one above'
    ' it if that is called mini_imagenet.'
)


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
) -> corpus_lib.Corpus:
  """Loads miniImageNet; images of another size are resized to 84x84.

  The three parts have no class in common, so they are no train and test part
  of one classification problem: all are in the train part here, the test part
  is empty. Labels count the classes of train.csv first (sorted by name), then
  those of val.csv, then those of test.csv: 64 / 16 / 20.

  Args:
    data_dir: The folder with `images` and the three tables, or the one above
      it.
    download: Not supported: the images have to be got by hand.
    scaling: 'unit' ([0, 1]) or 'raw' (0..255; FRL).

  Returns:
    The corpus; x uint8 [n, 84, 84, 3].

  Raises:
    DatasetNotFoundError: If it is not there.
    ValueError: If a table has other columns or a row is not whole, a file or
      class is listed twice, or a file is no image.
  """
  del download
  preprocess = scalings.choose(SCALINGS, scaling)
  directory = find(data_dir)
  tables = [_read_table(directory, name) for name in _TABLES]
  files = [file for table in tables for file, _ in table]
  classes = [sorted({label for _, label in table}) for table in tables]
  _check_disjoint('file', files)
  _check_disjoint('class', sum(classes, []))
  labels = {name: i for i, name in enumerate(sum(classes, []))}
  x = decoded_cache.load_or_decode(
      os.path.join(directory, 'tff_meta_84x84_v2.npz'),
      source(directory),
      ('x',),
      lambda: {'x': _read_images(directory, files)},
  )['x']
  y = [labels[label] for table in tables for _, label in table]
  return corpus_lib.Corpus(
      name='mini_imagenet',
      train=corpus_lib.LabelledExamples(x, np.array(y, np.int32)),
      test=corpus_lib.LabelledExamples(x[:0], np.zeros(0, np.int32)),
      num_classes=len(labels),
      preprocess=preprocess,
      class_split=class_splits.consecutive(*[len(part) for part in classes]),
  )


def find(data_dir: str | None) -> str:
  """Returns the folder of miniImageNet, see `load`."""
  return locations.find_folder(
      'mini_imagenet',
      data_dir,
      folder_names=('mini_imagenet', 'mini-imagenet', 'miniImageNet'),
      must_hold=('images', *_TABLES),
      how_to_get=_HOW_TO_GET,
  )


def source(directory: str) -> str:
  """Returns a digest that changes when images or tables do."""
  files = [file for name in _TABLES for file, _ in _read_table(directory, name)]
  images = [os.path.join('images', file) for file in files]
  return image_folders.files_digest(directory, [*_TABLES, *images])


def _check_disjoint(kind, names):
  """Raises a ValueError if something is in the tables more than once."""
  counts = collections.Counter(names)
  twice = sorted(name for name, count in counts.items() if count > 1)
  if twice:
    raise ValueError(
        f'Expected every {kind} once in {", ".join(_TABLES)}, which tell apart'
        f' what is trained and tested on, found {len(twice)} more often, such'
        f' as {twice[0]!r}.'
    )


def _read_table(directory, name):
  """Returns the rows (file name, class name) of a table."""
  path = os.path.join(directory, name)
  try:
    with open(path, newline='', encoding='utf-8-sig') as file:
      reader = csv.DictReader(file)
      rows = [(row, f'{path}, line {reader.line_num}') for row in reader]
  except (UnicodeDecodeError, csv.Error) as e:
    raise ValueError(
        f'Expected {path} to be a table of comma-separated values in UTF-8,'
        f' found: {e}.'
    ) from e
  if not {'filename', 'label'} <= set(reader.fieldnames or ()):
    raise ValueError(
        f'Expected {path} to have the columns filename and label, found'
        f' {reader.fieldnames}.'
    )
  return [_read_row(row, where) for row, where in rows]


def _read_row(row, where):
  """Returns the file, in one spelling only, and the class of a row."""
  # A short row has values that are None, a long one the key None.
  is_whole = None not in row and None not in row.values()
  file = os.path.normpath(row['filename'].strip()) if is_whole else ''
  label = row['label'].strip() if is_whole else ''
  if not label or file.split(os.sep)[0] in ('', '.', '..'):
    raise ValueError(
        f'Expected a file in the folder `images` and its class in {where},'
        f' found {list(row.values())}.'
    )
  return file, label


def _read_images(directory, files):
  paths = [os.path.join(directory, 'images', file) for file in files]
  return image_folders.read_images(
      paths, size=(IMAGE_SIZE, IMAGE_SIZE), resize=True
  )


SPEC = dataset_spec.DatasetSpec(
    name='mini_imagenet',
    description='60,000 photographs, 84x84, 100 classes (folder and tables)',
    load=load,
    default_model='conv4',
    few_round=dataset_spec.FewRoundDefaults(
        way=5, num_clients=64, cohort_size=10, examples_per_class=600
    ),
)
