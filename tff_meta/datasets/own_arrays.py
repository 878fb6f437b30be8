"""Arrays of one's own: NumPy's `.npz`, and HDF5 as TFF lays it out."""

from collections.abc import Callable, Mapping
import os
from typing import Any
import warnings
import zipfile

import numpy as np

from tff_meta import machine
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import own_parts

_TRAIN, _TEST = '_train', '_test'


def npz(
    path: str,
    download: bool = False,
    *,
    features: str = 'x',
    label: str = 'y',
    client: str = '',
    scaling: own_parts.OwnScaling = 'auto',
) -> corpus_lib.Corpus:
  """Reads arrays of `np.savez` that have an entry an example.

  An array `x` may also be called `x_train`; one called `x_test`, together with
  `y_test`, has the examples to test on, without which clients hold some of
  their own back. A warning names arrays that are not read.

  Args:
    path: The file.
    download: Not used.
    features: The array with the examples [n, ...], uint8 pixels 0..255 or
      other numbers; [n, height, width] are grey images.
    label: The array with the class of each, whole numbers or names [n].
    client: The array with the client of each [n], '' for none.
    scaling: 'unit' divides by 255, 'standard' gives each number mean 0 and
      variance 1, 'channels' each channel of images, 'raw' leaves numbers as
      they are. 'auto' is 'unit' for uint8 pixels and 'raw' for other numbers.

  Returns:
    The corpus.

  Raises:
    DatasetNotFoundError: If there is no such file.
    ValueError: If it is not what it should be.
  """
  del download
  own_parts.check_is_file(path)
  names = [name for name in (features, label, client) if name]
  try:
    with zipfile.ZipFile(path) as members:
      size = sum(member.file_size for member in members.infolist())
    machine.check_fits(size, path)
    with np.load(path, allow_pickle=False) as archive:
      held = archive.files
      suffix = _TRAIN if f'{features}{_TRAIN}' in held else ''
      for name in names:
        own_parts.check_has(f'{name}{suffix}', held, 'array', path)
      # An array called `x_test` itself has no test part.
      is_split = f'{features}{_TEST}' in held
      for name in names if is_split else ():
        own_parts.check_has(f'{name}{_TEST}', held, 'array', path)
      read = {f'{name}{suffix}' for name in names}
      read |= {f'{name}{_TEST}' for name in names if is_split}
      unread = [name for name in held if name not in read]
      own_parts.warn_of_clients(
          client, [name.removesuffix(_TRAIN) for name in unread], path
      )
      if unread:
        warnings.warn(
            f'{path} has arrays that are not read: {", ".join(unread)}.'
            ' Examples in them are neither trained nor tested on.',
            stacklevel=2,
        )
      train = _npz_part(archive, names, suffix, path)
      test = _npz_part(archive, names, _TEST, path) if is_split else None
  except (OSError, EOFError, zipfile.BadZipFile) as e:
    raise ValueError(
        f'Expected {path} to be a file of np.savez, found: {e}'
    ) from e
  except ValueError as e:
    if str(e).startswith('Expected'):
      raise
    raise ValueError(
        f'Expected {path} to be a file of np.savez with arrays of numbers or of'
        f' strings, found: {e}'
    ) from e
  return own_parts.to_corpus(os.path.basename(path), train, test, scaling, path)


def _npz_part(archive, names, suffix, path) -> own_parts.Part:
  x, labels, *clients = (archive[f'{name}{suffix}'] for name in names)
  for name, array in zip(names[2:], clients, strict=True):
    if array.shape != x.shape[:1]:
      raise ValueError(
          f'Expected one client for each of the {len(x)} examples of {path},'
          f' found {name}{suffix} of shape {array.shape}.'
      )
  return own_parts.Part(x, labels, clients[0] if clients else None)


def hdf5(
    path: str,
    download: bool = False,
    *,
    features: str = 'pixels',
    label: str = 'label',
    test_file: str = '',
    scaling: own_parts.OwnScaling = 'auto',
) -> corpus_lib.Corpus:
  """Reads arrays by client, `examples/CLIENT/NAME`, as TFF's files have them.

  Args:
    path: The file.
    download: Not used.
    features: The array of a client with its examples [n, ...].
    label: The array of a client with their classes [n].
    test_file: A file of the same kind, relative to this one's folder, with the
      examples to test on; '' where clients hold some of their own back.
    scaling: 'unit' divides by 255, 'standard' gives each number mean 0 and
      variance 1, 'channels' each channel of images, 'raw' leaves numbers as
      they are. 'auto' is 'unit' for uint8 pixels and 'raw' for other numbers.

  Returns:
    The corpus.

  Raises:
    DatasetNotFoundError: If there is no such file.
    ValueError: If it is not what it should be.
  """
  del download
  train = _read_hdf5(path, features, label)
  test = None
  if test_file:
    beside = os.path.join(os.path.dirname(path), test_file)
    test = _read_hdf5(beside, features, label)
  return own_parts.to_corpus(os.path.basename(path), train, test, scaling, path)


def _read_hdf5(path: str, features: str, label: str) -> own_parts.Part:
  import h5py  # Only when needed.

  own_parts.check_is_file(path)
  machine.check_fits(os.path.getsize(path), path)
  try:
    with h5py.File(path, 'r') as file:
      if 'examples' not in file:
        raise ValueError(
            f'Expected the group examples in {path}, found'
            f' {", ".join(file) or "nothing"}.'
        )
      clients = file['examples']
      return join(
          {client: _of_client(clients, client, path) for client in clients},
          features,
          label,
          path,
      )
  except OSError as e:
    raise ValueError(f'Expected {path} to be an HDF5 file, found: {e}') from e


def _of_client(clients, client, path) -> Callable[[str], np.ndarray]:
  """Returns what reads an array of a client."""

  def read(name):
    where = f'client {client!r} of {path}'
    own_parts.check_has(name, list(clients[client]), 'array', where)
    array = clients[client][name]
    # Strings come as bytes otherwise.
    is_text = array.dtype.kind in 'OS'
    return np.asarray(array.asstr()[()] if is_text else array[()])

  return read


def join(
    clients: Mapping[str, Callable[[str], Any]],
    features: str,
    label: str,
    path: str,
) -> own_parts.Part:
  """Returns the examples of clients, one client after the other.

  Args:
    clients: Name of a client -> what reads an array of it, `name -> [n, ...]`.
    features: Name of the array with its examples.
    label: Name of the array with their classes.
    path: The file, for errors.

  Returns:
    x [n, ...] of the arrays' own dtype, labels [n] and names of clients [n].

  Raises:
    ValueError: If a client has no examples, as many labels, or examples of
      another form than those before it.
  """
  xs: list[np.ndarray] = []
  ys: list[np.ndarray] = []
  for client, read in clients.items():
    x, y = np.asarray(read(features)), np.asarray(read(label))
    if y.ndim == 2 and y.shape[1] == 1:
      y = y[:, 0]
    if not y.size:
      raise ValueError(
          f'Expected every client of {path} to have examples, found none of'
          f' {client!r}.'
      )
    if y.ndim != 1 or x.shape[:1] != y.shape:
      raise ValueError(
          f'Expected one label an example of client {client!r} of {path}, found'
          f' {label} of shape {y.shape} and {features} of shape {x.shape}.'
      )
    if xs and (x.shape[1:], x.dtype) != (xs[0].shape[1:], xs[0].dtype):
      raise ValueError(
          f'Expected examples of one shape and dtype in {path}, found'
          f' {xs[0].dtype} {xs[0].shape[1:]} of the first client and'
          f' {x.dtype} {x.shape[1:]} of {client!r}.'
      )
    xs.append(x)
    ys.append(y)
  if not xs:
    raise ValueError(f'Expected clients in {path}, found none.')
  names = np.repeat(list(clients), [len(y) for y in ys])
  return own_parts.Part(np.concatenate(xs), np.concatenate(ys), names)
