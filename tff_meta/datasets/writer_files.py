"""Images of 28x28 pixels by writer: TFF's SQLite files and LEAF's JSON files.

SQLite (`tff.simulation.datasets.SqlClientData`): the table `examples` holds
split_name, client_id and a serialized tf.train.Example of `pixels` (28 * 28
floats in [0, 1]) and `label`. JSON (Caldas et al., LEAF, 2018): `users` and
`user_data[user]` with `x` (lists of 784 floats in [0, 1]) and `y`.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import glob
import itertools
import json
import os
import reprlib
import sqlite3
from typing import Any, NamedTuple
import urllib.parse

import numpy as np

from tff_meta.data import checks

IMAGE_SIZE = 28
_BATCH_SIZE = 4096
_PARTS = ('train', 'test')
# What int32 holds; a data set checks its own number of classes.
_MOST_CLASSES = 2**31


class Part(NamedTuple):
  """A train or test part.

  Attributes:
    x: Pixels in steps of 1/255, uint8 [n, 28, 28, 1].
    y: Labels, int32 [n].
    writers: Names, str [n].
  """

  x: np.ndarray
  y: np.ndarray
  writers: np.ndarray


def is_sqlite(path: str) -> bool:
  """Tells an SQLite file from a JSON file or a folder of those."""
  return os.path.isfile(path) and not path.endswith('.json')


def read(path: str, kind: str) -> tuple[Part, Part]:
  """Reads the train and the test part into memory.

  Args:
    path: An SQLite file; or a LEAF file or folder, as for `read_leaf`.
    kind: As for `sqlite_splits`.

  Raises:
    ValueError: If a file is not what it should be.
  """
  if not is_sqlite(path):
    return read_leaf(path)
  splits = sqlite_splits(path, kind)
  return _checked(path, *(_read_sqlite(path, split) for split in splits))


def sqlite_splits(path: str, kind: str) -> tuple[str, str]:
  """Returns the names of the train and the test split in an SQLite file.

  Args:
    path: The file.
    kind: '<kind>_train' and '<kind>_test' are taken, or else 'train' and
      'test'. Other splits of the file are not read.

  Raises:
    ValueError: If the file holds neither pair.
  """
  known = ((f'{kind}_train', f'{kind}_test'), _PARTS)
  rows = _query(path, 'SELECT DISTINCT split_name FROM client_metadata')
  found = {name for (name,) in rows}
  for names in known:
    if found.issuperset(names):
      return names
  raise ValueError(
      f'Expected {path} to hold the splits'
      f' {" or ".join(f"{a} and {b}" for a, b in known)}, found'
      f' {sorted(found)}.'
  )


def read_leaf(path: str) -> tuple[Part, Part]:
  """Reads LEAF's JSON files: those of the folders `train` and `test`, or one.

  Args:
    path: The folder that holds the two; or one file, whose examples are all
      train.

  Raises:
    ValueError: If a file is not what it should be.
  """
  if os.path.isfile(path):
    return _read_json([path]), _to_part([], [], [])
  patterns = [os.path.join(path, part, '*.json') for part in _PARTS]
  return _checked(path, *(_read_json(sorted(glob.glob(p))) for p in patterns))


def open_sqlite(path: str, split: str):
  """Opens one split of an SQLite file as data of clients.

  Args:
    path: The file.
    split: Name of the split.

  Returns:
    A `tff.simulation.datasets.ClientData`; the elements of a writer are
    OrderedDict(x=float32 0..255 [28, 28, 1], y=int32).

  Raises:
    ValueError: If a client has no proper name.
  """
  from tff_meta.data import federated_dataset  # Imports TensorFlow.

  query = 'SELECT client_id FROM client_metadata WHERE split_name = ?'
  for (writer,) in _query(path, query, split):
    _check_name(writer, path)

  def to_example(element):
    x = 255.0 * element['pixels'][:, :, np.newaxis]
    return collections.OrderedDict(x=x, y=element['label'])

  return federated_dataset.sqlite_client_data(
      path, split, (IMAGE_SIZE, IMAGE_SIZE)
  ).preprocess(lambda dataset: dataset.map(to_example))


def open_arrays(part: Part):
  """Returns the same for a part in memory, or None if it has no examples.

  Its x are uint8.
  """
  import tensorflow_federated as tff  # Takes seconds: only when needed.

  slices = {
      writer: collections.OrderedDict(x=part.x[rows], y=part.y[rows])
      for writer, rows in _rows_by_writer(part).items()
  }
  return tff.simulation.datasets.TestClientData(slices) if slices else None


def query(path: str, sql: str, *values) -> Iterator[tuple]:
  """Yields the rows of a query on an SQLite file, opened for reading only.

  Args:
    path: The file.
    sql: The query.
    *values: What its question marks stand for.

  Raises:
    sqlite3.Error: If it is no such file, or lacks what is asked for.
  """
  uri = f'file:{urllib.parse.quote(path)}?mode=ro'
  connection = sqlite3.connect(uri, uri=True)
  try:
    yield from connection.execute(sql, values)
  finally:
    connection.close()


def _query(path: str, sql: str, *values) -> Iterator[tuple]:
  """Yields the rows of a query, or raises a ValueError."""
  try:
    yield from query(path, sql, *values)
  except sqlite3.Error as e:
    raise ValueError(
        f'Expected {path} to be an SQLite file with the tables examples and'
        f' client_metadata, or a .json file of LEAF, found: {e}. Tip: no other'
        ' kinds are read, such as the HDF5 files of older versions of'
        ' TensorFlow Federated or .npz; a download that was cut short can be'
        ' fetched again into another folder.'
    ) from e


def _rows_by_writer(part: Part) -> dict[str, list[int]]:
  """Returns the writers, sorted, each with the rows of the examples."""
  rows = collections.defaultdict(list)
  for row, writer in enumerate(part.writers.tolist()):
    rows[writer].append(row)
  return dict(sorted(rows.items()))


def _checked(path: str, train: Part, test: Part) -> tuple[Part, Part]:
  """Returns the parts, or raises a ValueError if a writer's are copies."""

  def contents(part, rows):
    return sorted((part.x[row].tobytes(), part.y[row]) for row in rows)

  trained = _rows_by_writer(train)
  for writer, rows in _rows_by_writer(test).items():
    own = trained.get(writer, ())
    if len(own) == len(rows) and contents(train, own) == contents(test, rows):
      raise ValueError(
          f'Expected {path} to hold other examples of {writer!r} in the test'
          f' part than in the train part, found the same {len(rows)} in both.'
      )
  return train, test


def _check_name(writer, path: str) -> None:
  """Raises a ValueError unless an array of str can hold the name."""
  try:
    is_name = not writer.encode().endswith(b'\0')
  except (AttributeError, UnicodeEncodeError):
    is_name = False
  if not is_name:
    raise ValueError(
        f'Expected the writers of {path} to have names, strings of Unicode that'
        f' do not end in NUL, found {writer!r}.'
    )


def _to_bytes(pixels: np.ndarray, writer: str) -> np.ndarray:
  """Maps pixels in [0, 1] to uint8 0..255, or raises a ValueError."""
  if not ((pixels >= 0) & (pixels <= 1)).all():
    raise ValueError(
        f'Expected pixels in [0, 1], found {pixels.min()}..{pixels.max()} among'
        f' those of the writer {writer!r} and the next ones.'
    )
  return np.rint(255.0 * pixels).astype(np.uint8)


def _read_sqlite(path: str, split: str) -> Part:
  """Reads one split in the order of the file."""
  rows = _query(
      path,
      'SELECT client_id, serialized_example_proto FROM examples'
      ' WHERE split_name = ?',
      split,
  )
  xs, ys, writers = [], [], []
  while batch := list(itertools.islice(rows, _BATCH_SIZE)):
    ids = [writer for writer, _ in batch]
    for writer in set(ids):
      _check_name(writer, path)
    examples = _parse(batch, path)
    xs.append(_to_bytes(examples['pixels'].numpy(), ids[0]))
    ys.append(checks.to_labels(examples['label'].numpy(), path, _MOST_CLASSES))
    writers += ids
  return _to_part(xs, ys, writers)


def _parse(batch: Sequence[tuple[str, bytes]], path: str):
  """Parses rows (writer, example); an error names the first bad writer."""
  import tensorflow as tf

  features = {
      'pixels': tf.io.FixedLenFeature((IMAGE_SIZE, IMAGE_SIZE, 1), tf.float32),
      'label': tf.io.FixedLenFeature((), tf.int64),
  }
  try:
    return tf.io.parse_example([example for _, example in batch], features)
  except (tf.errors.InvalidArgumentError, TypeError, ValueError) as e:
    if len(batch) > 1:
      for row in batch:
        _parse([row], path)
    writer, example = batch[0]
    # Others are TensorFlow's, that it cannot take or show the bytes.
    found = (
        e.message
        if isinstance(e, tf.errors.InvalidArgumentError)
        else reprlib.repr(example)
    )
    raise ValueError(
        f'Expected the examples of {path} to be tf.train.Example with'
        f' {IMAGE_SIZE**2} floats `pixels` and an integer `label`, found one of'
        f' {writer!r} that is not: {found}'
    ) from e


def _read_json(paths: Sequence[str]) -> Part:
  xs, ys, writers = [], [], []

  def take(user, data):
    if not data['y'] and not data['x']:
      return
    y = np.asarray(data['y'])
    ys.append(checks.to_labels(y, f'user {user!r}', _MOST_CLASSES))
    x = np.asarray(data['x'])
    if x.shape != (len(y), IMAGE_SIZE**2):
      raise ValueError(
          f'Expected x of shape {(len(y), IMAGE_SIZE**2)}, found {x.shape}.'
      )
    x = _to_bytes(x, user)
    xs.append(x.reshape(len(y), IMAGE_SIZE, IMAGE_SIZE, 1))
    writers.extend([user] * len(y))

  take_users(paths, take, f'x [n, {IMAGE_SIZE**2}] and y [n]')
  return _to_part(xs, ys, writers)


def take_users(
    paths: Sequence[str], take: Callable[[str, Any], None], what: str
) -> None:
  """Reads LEAF's JSON files, user by user.

  Args:
    paths: The files; a user is in one of them.
    take: Called with the name of each user and the dict of what it has; may
      raise what a dict of another form makes it raise.
    what: What users should have, for errors.

  Raises:
    ValueError: If a file is not what it should be; names it, and the user.
  """
  path_of: dict[str, str] = {}
  for path in paths:
    user = None
    try:
      with open(path, encoding='utf-8-sig') as file:
        contents = json.load(file, object_pairs_hook=_to_dict)
      _check_users(contents)
      for user in contents['users']:
        _check_name(user, path)
        if user in path_of:
          raise ValueError(
              f'Expected every user in one file, found this one in'
              f' {path_of[user]}, too.'
          )
        path_of[user] = path
        take(user, contents['user_data'][user])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
      whose = '' if user is None else f'of user {user!r}: '
      raise ValueError(
          f'Expected {path} to be a JSON file of LEAF with users and their'
          f' {what}, found {whose}{type(e).__name__}: {e}'
      ) from e


def _to_dict(pairs):
  """Makes a dict of what JSON has; of a key that comes twice, an error."""
  found = {}
  for key, value in pairs:
    if key in found:
      raise ValueError(f'Expected every key once, found {key!r} again.')
    found[key] = value
  return found


def _check_users(contents) -> None:
  """Raises a ValueError unless every user is there once, with all examples."""
  users, user_data = contents['users'], contents['user_data']
  if len(set(users)) < len(users) or set(users) != set(user_data):
    odd = sorted(set(users) ^ set(user_data)) or sorted(
        user for user in set(users) if users.count(user) > 1
    )
    raise ValueError(
        'Expected every user once in users and in user_data, found otherwise of'
        f' {odd[0]!r}.'
    )
  for user, size in zip(users, contents.get('num_samples', ()), strict=False):
    if size != len(user_data[user]['y']):
      raise ValueError(
          f'Expected the {size} examples of user {user!r} that num_samples has,'
          f' found {len(user_data[user]["y"])}.'
      )


def _to_part(xs, ys, writers) -> Part:
  no_images = np.zeros((0, IMAGE_SIZE, IMAGE_SIZE, 1), np.uint8)
  return Part(
      np.concatenate([no_images, *xs]),
      np.concatenate([np.zeros(0, np.int32), *ys]),
      np.array(writers, dtype=str),
  )
