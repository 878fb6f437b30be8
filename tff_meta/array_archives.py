"""Arrays as bytes: NumPy's `.npz`, of which not everything is read.

Arrays are of numbers, or of byte strings of a fixed size.

What is read may come from anywhere. So nothing is unpickled or unpacked, and no
array is longer than the bytes that it is read from: a header cannot make the
reader allocate more than it was given.
"""

from collections.abc import Mapping
import io
import math
import zipfile

import numpy as np

_KINDS = 'biufcS'  # Numbers, and byte strings of a fixed size.
_SUFFIX = '.npy'
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class DamagedArchiveError(ValueError):
  """Bytes are not what `dump` returned."""


def dump(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns arrays as the bytes of an archive.

  Args:
    arrays: Arrays of numbers or byte strings by name.

  Raises:
    TypeError: If an array is of neither.
  """
  for name, array in arrays.items():
    if np.asarray(array).dtype.kind not in _KINDS:
      raise TypeError(
          f'Expected {name!r} to be numeric, or byte strings, found'
          f' {np.asarray(array).dtype}.'
      )
  buffer = io.BytesIO()
  np.savez(buffer, **arrays)
  return buffer.getvalue()


def load(content: bytes) -> dict[str, np.ndarray]:
  """Returns the arrays of an archive.

  Args:
    content: What `dump` returned.

  Raises:
    DamagedArchiveError: If it is something else.
  """
  try:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
      members = archive.infolist()
      _check_stored(members)
      return {
          member.filename.removesuffix(_SUFFIX): _parse(archive.read(member))
          for member in members
      }
  # Its bytes may be anything, and parsers raise at least ten kinds of errors.
  except Exception as error:
    raise DamagedArchiveError(f'{type(error).__name__}: {error}') from None


def _check_stored(members) -> None:
  """Raises unless members are stored as they are, each under its own name."""
  if any(m.compress_type != zipfile.ZIP_STORED for m in members):
    raise ValueError('a part is packed')
  if not all(m.filename.endswith(_SUFFIX) for m in members):
    raise ValueError('a part is no array')
  if len({m.filename for m in members}) < len(members):
    raise ValueError('two parts have one name')


def _parse(content: bytes) -> np.ndarray:
  """Returns the array in the bytes of an `.npy` file."""
  file = io.BytesIO(content)
  version = np.lib.format.read_magic(file)
  shape, is_fortran, dtype = _READ_HEADER[version](file)
  if dtype.kind not in _KINDS:
    raise ValueError(f'an array is of {dtype}')
  data = content[file.tell() :]
  if min(shape, default=0) < 0 or (
      math.prod(shape) * dtype.itemsize != len(data)
  ):
    raise ValueError(f'{len(data)} bytes are no array of {dtype}{list(shape)}')
  flat = np.frombuffer(data, dtype).copy()  # Of its own, and writable.
  return flat.reshape(shape, order='F' if is_fortran else 'C')
