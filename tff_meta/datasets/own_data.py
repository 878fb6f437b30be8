"""Data of one's own: `KIND:PATH` in the place of a data set's name.

A path that does not begin at the root is relative to `data_dir`, or else to the
working directory.
"""

from collections.abc import Callable
import dataclasses
import functools
import os
from typing import Any

from tff_meta import catalog
from tff_meta import spelling
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import image_folders
from tff_meta.datasets import own_arrays
from tff_meta.datasets import own_clients
from tff_meta.datasets import own_images
from tff_meta.datasets import own_tables

_READERS: dict[str, Callable[..., corpus_lib.Corpus]] = {
    'folder': own_images.folder,
    'csv': own_tables.csv,
    'npz': own_arrays.npz,
    'parquet': own_tables.parquet,
    'leaf': own_clients.leaf,
    'hdf5': own_arrays.hdf5,
    'sqlite': own_clients.sqlite,
}
# What `--list` says of them.
KINDS = {
    'folder:PATH': 'images at class/image or client/class/image',
    'csv:PATH': 'a table with a line of names, an example a row',
    'npz:PATH': "NumPy's arrays x, y or x_train, y_train, maybe x_test, y_test",
    'parquet:PATH': 'a table, an example a row; as csv:PATH, with pyarrow',
    'leaf:PATH': "LEAF's JSON files, by user",
    'hdf5:PATH': "TensorFlow Federated's HDF5 files, by client",
    'sqlite:PATH': "TensorFlow Federated's SQLite files, by client",
}
_SEPARATOR = ':'
_TEST_FRACTION = 0.2
_EXAMPLES_PER_CLIENT = 60
_MOST_CLIENTS = 100
_COHORT_SIZE = 10
_LEAST_IMAGE_SIDE = 4

# What was looked at last, for who loads it next: it is read only once.
_found: dict[Any, corpus_lib.Corpus] = {}


def is_own(name: str) -> bool:
  """Returns whether the name of a data set stands for data of one's own."""
  return isinstance(name, str) and _SEPARATOR in name


def tip(name: str) -> str:
  """Returns a tip for a name that may be a path, with a space before it."""
  path = str(name)
  if os.path.isdir(path):
    kind = 'folder'
  elif os.path.exists(path) or os.sep in path:
    suffix = os.path.splitext(path)[1].lstrip('.').lower()
    also = {'h5': 'hdf5', 'json': 'leaf', 'db': 'sqlite'}
    kind = also.get(suffix, suffix if suffix in _READERS else 'KIND')
  else:
    return ''
  return f' Tip: data of your own are --dataset={kind}:{path}.'


def path(name: str, data_dir: str | None) -> str | None:
  """Returns where data of one's own are, None for those with a name."""
  if not is_own(name):
    return None
  return _joined(name.partition(_SEPARATOR)[2], data_dir)


def _joined(path: str, data_dir: str | None) -> str:
  place = os.path.expanduser(path)
  return os.path.join(os.path.expanduser(data_dir or ''), place)


def short_name(name: str) -> str:
  """Returns what a folder can be called after a data set, own or not."""
  if not is_own(name):
    return name
  path = os.path.abspath(name.partition(_SEPARATOR)[2])
  return os.path.splitext(os.path.basename(path))[0] or 'own'


def spec(name: str) -> dataset_spec.DatasetSpec:
  """Returns the specification of data of one's own; nothing is read yet.

  Args:
    name: `KIND:PATH`.

  Raises:
    UnknownNameError: If there is no such kind, or no path.
  """
  kind, _, path = name.partition(_SEPARATOR)
  if kind not in _READERS or not path:
    near = spelling.tip(kind, _READERS) if path else ''
    raise catalog.UnknownNameError(
        f'Expected `dataset` to be one of {", ".join(KINDS)}, or a data set by'
        f' name, found {name!r}.{near}'
    )
  read = _READERS[kind]

  @functools.wraps(read)  # Its options are read from its annotations.
  def load(data_dir=None, download=False, **options):
    place, key = _place(path, data_dir, kind, options)
    found = _found.pop(key, None)
    return read(place, download, **options) if found is None else found

  def look(data_dir, options):
    place, key = _place(path, data_dir, kind, options)
    corpus = _found.get(key)
    if corpus is None:
      _found.clear()
      corpus = read(place, False, **options)
      # Only the text of a table tells which images it has.
      if not options.get('image'):
        _found[key] = corpus
    return _suiting(unlooked, corpus)

  load.__qualname__ = f'the kind {kind!r} of data'
  unlooked = dataset_spec.DatasetSpec(
      name=name,
      description=KINDS[f'{kind}:PATH'],
      load=load,
      default_model='mlp',
      preset='demo',
      look=look,
  )
  return unlooked


def is_relative(name: str) -> bool:
  """Returns whether a data set is a file or folder by a relative path."""
  path = name.partition(_SEPARATOR)[2]
  return is_own(name) and not os.path.isabs(os.path.expanduser(path))


def keep(
    name: str,
    data_dir: str | None,
    options: dict[str, Any],
    corpus: corpus_lib.Corpus,
) -> None:
  """Keeps what a file holds for who looks at it next, so that nobody reads it.

  Args:
    name: `KIND:PATH` of the file, which is there.
    data_dir: What the path is relative to.
    options: All options of the kind, in their order.
    corpus: What the file holds.
  """
  kind, _, path = name.partition(_SEPARATOR)
  _found.clear()
  _found[_place(path, data_dir, kind, options)[1]] = corpus


def _place(path, data_dir, kind, options) -> tuple[str, Any]:
  """Returns where data are, and what tells that they were looked at."""
  place = _joined(path, data_dir)
  files = [place]
  if options.get('test_file'):
    files.append(os.path.join(os.path.dirname(place), options['test_file']))
  for folder, folders, names in os.walk(place, followlinks=True):
    folders.sort()
    files += [os.path.join(folder, name) for name in sorted(names)]
  facts = image_folders.files_digest('', files)
  return place, (kind, os.path.abspath(place), repr(options), facts)


def _suiting(
    unlooked: dataset_spec.DatasetSpec, corpus: corpus_lib.Corpus
) -> dataset_spec.DatasetSpec:
  """Returns the specification with what suits the data."""
  shape = corpus.train.x.shape[1:]
  is_image = len(shape) == 3 and min(shape[:2]) >= _LEAST_IMAGE_SIDE
  split = corpus.class_split
  few_round = None
  if split is not None:
    way = min(5, len(split.validation), len(split.test))
    few_round = dataset_spec.FewRoundDefaults(
        way=way,
        num_clients=len(split.train),
        cohort_size=min(2 * way, len(split.train)) // way * way,
    )
  has_clients = corpus.writers is not None
  if corpus.writers is not None:
    num_clients = len(set(corpus.writers.tolist()))
  else:
    num_clients = len(corpus.train.y) // _EXAMPLES_PER_CLIENT
    num_clients = min(max(num_clients, 2), _MOST_CLIENTS)
  return dataclasses.replace(
      unlooked,
      default_model='conv4' if is_image else 'mlp',
      few_round=few_round,
      clients=dataset_spec.ClientDefaults(
          num_clients=num_clients,
          cohort_size=_COHORT_SIZE,
          are_all=has_clients,
      ),
      partition='by_writer' if has_clients else None,
      test_fraction=None if len(corpus.test.y) else _TEST_FRACTION,
  )
