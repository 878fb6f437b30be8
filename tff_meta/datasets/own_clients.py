"""Clients of one's own as LEAF keeps them, in JSON, and TFF, in SQLite."""

import collections
from collections.abc import Mapping, Sequence, Set
import glob
import itertools
import os
import re
import sqlite3
from typing import Any

import numpy as np

from tff_meta import machine
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import locations
from tff_meta.datasets import own_arrays
from tff_meta.datasets import own_parts
from tff_meta.datasets import writer_files

_PARTS = ('train', 'test')
_BATCH_SIZE = 4096


def leaf(
    path: str,
    download: bool = False,
    *,
    image_shape: tuple[int, ...] = (),
    scaling: own_parts.OwnScaling = 'auto',
) -> corpus_lib.Corpus:
  """Reads JSON files of `users` and their `user_data`, `x` and `y`.

  Args:
    path: A file; or a folder with the folders `train` and `test` of such files.
      Of a file alone clients hold some examples back to be tested on.
    download: Not used.
    image_shape: Height, width and channels if the numbers of an example are the
      pixels of an image, row by row; () if they are not.
    scaling: 'unit' divides by 255, 'standard' gives each number mean 0 and
      variance 1, 'channels' each channel of images, 'raw' leaves numbers as
      they are. 'auto' is 'raw'.

  Returns:
    The corpus.

  Raises:
    DatasetNotFoundError: If there is no such file or folder.
    ValueError: If it is not what it should be.
  """
  del download
  test = None
  if os.path.isfile(path):
    train = _read_users([path], image_shape)
  else:
    files = {
        part: sorted(glob.glob(os.path.join(path, part, '*.json')))
        for part in _PARTS
    }
    if not files['train']:
      raise locations.DatasetNotFoundError(
          f'Expected a .json file or files train/*.json at {path}, found none.'
          f'{own_parts.path_tip(path)}'
      )
    train = _read_users(files['train'], image_shape)
    if files['test']:
      test = _read_users(files['test'], image_shape)
  name = os.path.basename(os.path.abspath(path))
  return own_parts.to_corpus(name, train, test, scaling, path)


def _read_users(
    paths: Sequence[str], image_shape: tuple[int, ...]
) -> own_parts.Part:
  machine.check_fits(4 * sum(map(os.path.getsize, paths)), paths[0])
  users: dict[str, Mapping[str, np.ndarray]] = {}

  def take(user, data):
    x, y = np.asarray(data['x']), np.asarray(data['y'])
    if x.dtype.kind not in 'biuf':
      raise ValueError(f'Expected numbers in x, found {x.dtype}.')
    users[user] = {'x': _to_images(x, image_shape), 'y': y}

  writer_files.take_users(paths, take, 'x [n, ...], numbers, and y [n]')
  # JSON writes 1.0 as 1, so that a user's numbers may happen to be whole.
  dtype = np.result_type(bool, *(held['x'].dtype for held in users.values()))
  users = {
      user: {'x': held['x'].astype(dtype, copy=False), 'y': held['y']}
      for user, held in users.items()
  }
  clients = {user: held.__getitem__ for user, held in users.items()}
  return own_arrays.join(clients, 'x', 'y', os.path.dirname(paths[0]))


def _to_images(x: np.ndarray, image_shape: tuple[int, ...]) -> np.ndarray:
  if not image_shape:
    return x
  if x.shape[1:] != (int(np.prod(image_shape)),):
    raise ValueError(
        f'Expected as many numbers as an image of shape {image_shape} has'
        f' pixels, found examples of shape {x.shape[1:]}.'
    )
  return x.reshape(len(x), *image_shape)


def sqlite(
    path: str,
    download: bool = False,
    *,
    features: str = 'pixels',
    label: str = 'label',
    prefix: str = '',
    clients: str = '',
    image_shape: tuple[int, ...] = (),
    scaling: own_parts.OwnScaling = 'auto',
) -> corpus_lib.Corpus:
  """Reads a file of `tff.simulation.datasets.SqlClientData`.

  Args:
    path: The file, with the tables `examples` and `client_metadata`.
    download: Not used.
    features: The feature of a tf.train.Example with the numbers of an example.
    label: The feature with its class, a whole number or a name.
    prefix: What the names of the splits begin with: `<prefix>train` is trained
      on, and `<prefix>test`, where there is one, tested on. A file with a
      single split, such as the `default_split` of TFF's
      `save_to_sql_client_data`, is trained on if there is no prefix, whatever
      that is called but `test`.
    clients: A regular expression; only clients whose whole name is of this form
      are read. Where it has groups in parentheses, those with the same text in
      them are one client, named by that. '' reads all as they are.
    image_shape: Height, width and channels if the numbers of an example are the
      pixels of an image, row by row; () if they are not.
    scaling: 'unit' divides by 255, 'standard' gives each number mean 0 and
      variance 1, 'channels' each channel of images, 'raw' leaves numbers as
      they are. 'auto' is 'raw'.

  Returns:
    The corpus.

  Raises:
    DatasetNotFoundError: If there is no such file.
    ValueError: If it is not what it should be.
  """
  del download
  own_parts.check_is_file(path)
  machine.check_fits(os.path.getsize(path), path)
  try:
    rows = list(
        writer_files.query(
            path, 'SELECT split_name, client_id FROM client_metadata'
        )
    )
    splits = _splits({split for split, _ in rows}, prefix)
    _check_metadata(path, splits)
    names = _names(path, [client for _, client in rows], clients)
    train, test = (
        _read_split(
            path,
            split,
            [client for of, client in rows if of == split],
            names,
            features,
            label,
            image_shape,
        )
        for split in splits
    )
  except sqlite3.Error as e:
    raise ValueError(
        f'Expected {path} to be an SQLite file with the tables examples and'
        f' client_metadata, as TFF writes it, found: {e}. Tip: csv:PATH and'
        ' parquet:PATH are tables of your own.'
    ) from e
  if train is None:
    found = ', '.join(sorted({str(split) for split, _ in rows})) or 'none'
    raise ValueError(
        f'Expected the split {splits[0]} in {path}, found {found}. Tip:'
        ' --dataset_options=prefix=NAME says what precedes train and test in'
        ' their names; without it a split that is alone may have any but test.'
    )
  return own_parts.to_corpus(os.path.basename(path), train, test, scaling, path)


def _splits(found: Set[str], prefix: str) -> list[str]:
  """Returns the names of the parts to train and to test on."""
  train, test = (f'{prefix}{part}' for part in _PARTS)
  if len(found) == 1 and not prefix and test not in found:
    (train,) = found
  return [train, test]


def _check_metadata(path: str, splits: Sequence[str]) -> None:
  """Raises a ValueError if the examples of splits are not those it tells."""
  where = f'WHERE split_name IN ({", ".join("?" * len(splits))})'
  told, found = (
      {
          (split, client): number
          for split, client, number in writer_files.query(
              path, f'SELECT split_name, client_id, {sql}', *splits
          )
      }
      for sql in (
          f'num_examples FROM client_metadata {where}',
          f'COUNT(*) FROM examples {where} GROUP BY split_name, client_id',
      )
  )
  for split, client in {**told, **found}:
    numbers = [of.get((split, client), 0) for of in (told, found)]
    if numbers[0] != numbers[1]:
      raise ValueError(
          f'Expected as many examples in {path} as client_metadata says, found'
          f' {numbers[1]}, not {numbers[0]}, of client {client!r} in'
          f' {split!r}.'
      )


def _names(path: str, clients: Sequence[str], form: str) -> Mapping[str, str]:
  """Returns what clients of a form are called here; '' takes all."""
  try:
    found = {c: re.fullmatch(form or '.*', str(c), re.DOTALL) for c in clients}
  except re.error as e:
    raise ValueError(
        f'Expected `clients` to be a regular expression, found {form!r}: {e}'
    ) from e
  names = {
      client: ''.join(text or '' for text in match.groups()) or client
      for client, match in found.items()
      if match
  }
  if clients and not names:
    raise ValueError(
        f'Expected clients of the form {form!r} in {path}, found'
        f' {", ".join(map(str, clients[:3]))} and so on.'
    )
  return names


def _read_split(
    path, split, clients, names, features, label, image_shape
) -> own_parts.Part | None:
  """Returns the examples of a split, None if it has none of the clients."""
  clients = dict.fromkeys(names[c] for c in clients if c in names)
  if not clients:
    return None
  found = writer_files.query(
      path,
      'SELECT client_id, serialized_example_proto FROM examples'
      ' WHERE split_name = ? ORDER BY rowid',
      split,
  )
  held: dict[str, list[Any]] = collections.defaultdict(list)
  while batch := list(itertools.islice(found, _BATCH_SIZE)):
    for client, example in batch:
      if client in names:
        held[names[client]].append(
            _parse(example, features, label, client, path)
        )

  def of_client(client):
    def read(name):
      values = [example[name] for example in held[client]]
      sizes = sorted({np.size(value) for value in values})
      if len(sizes) > 1:
        raise ValueError(
            f'Expected as many {name} in every example of client {client!r} of'
            f' {path}, found {sizes[0]} and {sizes[-1]}.'
        )
      x = np.asarray(values)
      if name == features and values:
        x = _to_images(x, image_shape)
      return x

    return read

  return own_arrays.join(
      {client: of_client(client) for client in clients}, features, label, path
  )


def _parse(serialized, features, label, client, path) -> dict[str, Any]:
  """Returns the numbers and the class of a serialized tf.train.Example."""
  import tensorflow as tf  # Takes seconds: only when needed.

  where = f'an example of client {client!r} of {path}'
  try:
    held = tf.train.Example.FromString(serialized).features.feature
  except Exception as e:  # Whatever protobuf raises.
    raise ValueError(
        f'Expected {where} to be a tf.train.Example, found: {e}'
    ) from e
  for name in (features, label):
    own_parts.check_has(name, sorted(held), 'feature', where)
  kind = held[features].WhichOneof('kind')
  if kind not in ('float_list', 'int64_list'):
    raise ValueError(
        f'Expected numbers in {features} of {where}, found {kind}.'
    )
  dtype = np.float32 if kind == 'float_list' else np.int64
  x = np.array(getattr(held[features], kind).value, dtype)
  of_label = held[label]
  values = getattr(of_label, of_label.WhichOneof('kind') or 'int64_list').value
  if len(values) != 1:
    raise ValueError(
        f'Expected one class in {label} of {where}, found {len(values)}.'
    )
  y = values[0]
  return {features: x, label: y.decode() if isinstance(y, bytes) else y}
