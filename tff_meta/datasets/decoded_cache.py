"""Decoded images kept in one file, so that they are decoded only once."""

from collections.abc import Callable, Mapping, Sequence
import os
import zipfile

import numpy as np

# What the names of such files begin with.
PREFIX = 'tff_meta_'
_SOURCE_KEY = 'source'


def load_or_decode(
    path: str,
    source: str,
    names: Sequence[str],
    decode: Callable[[], Mapping[str, np.ndarray]],
) -> Mapping[str, np.ndarray]:
  """Returns `decode()`, or what an earlier call of it left at `path`.

  Args:
    path: The .npz file, beside the data. Its name begins with `PREFIX` and
      carries the version of the decoding. Not written where the disk does not
      let it.
    source: Says what was decoded: a digest of the files, not of their names
      alone. A file made from another source, or a damaged one, is made anew.
    names: Of the arrays; a file that holds others is damaged.
    decode: Returns arrays by name.

  Returns:
    Arrays by name.
  """
  cached = _read(path, source, names)
  if cached is not None:
    return cached
  arrays = decode()
  try:
    _write(path, source, arrays)
  except OSError:
    pass  # A read-only or a full disk: decode again next time.
  return arrays


def _read(path, source, names):
  try:
    with zipfile.ZipFile(path) as file:
      found = sorted(file.namelist())
      if found != sorted(f'{name}.npy' for name in (_SOURCE_KEY, *names)):
        return None
      if str(_read_array(file, _SOURCE_KEY)) != source:
        return None
      return {name: _read_array(file, name) for name in names}
  except Exception:  # Whatever NumPy and zipfile raise for a damaged file.
    return None


def _read_array(file, name):
  """Reads one array to its end: only there its checksum is compared."""
  with file.open(f'{name}.npy') as member:
    array = np.lib.format.read_array(member, allow_pickle=False)
    if member.read(1):
      raise ValueError(f'Expected the end of {name}, found more bytes.')
    return array


def _write(path, source, arrays):
  """Writes a temporary file in the same directory, then renames it."""
  temporary = f'{path}.{os.getpid()}.tmp'
  try:
    with open(temporary, 'wb') as file:
      np.savez(file, **{_SOURCE_KEY: np.array(source)}, **arrays)
    os.replace(temporary, path)
  except OSError:
    if os.path.exists(temporary):
      os.unlink(temporary)
    raise
