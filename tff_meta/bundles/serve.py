"""Adapts the model in this folder to examples and predicts; needs TensorFlow.

  python serve.py USE EXAMPLES.npz PREDICTIONS.npy

USE is one of those in manifest.json, such as new_client. EXAMPLES.npz has the
arrays that it says. Nothing is unpickled, and no code runs but this and the
operations of the SavedModels. A folder that is not as it was written is
refused.
"""

from collections.abc import Mapping
import hashlib
import json
import pathlib
import sys
from typing import Any

import numpy as np

SUMS, MANIFEST = 'SHA256SUMS', 'manifest.json'
FORMAT = 1


class BundleError(ValueError):
  """A folder is no bundle, or not as it was written."""


def digests(root: pathlib.Path) -> dict[str, str]:
  """Returns path below a folder -> SHA-256 of each file but `SHA256SUMS`.

  Raises:
    BundleError: If there is anything but folders and plain files.
  """
  found = {}
  for path in sorted(root.rglob('*')):
    name = path.relative_to(root).as_posix()
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
      raise BundleError(f'Expected plain files in {root}, found {name}.')
    if path.is_file() and name != SUMS:
      found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
  return found


def to_text(sums: Mapping[str, str]) -> str:
  """Returns the content of `SHA256SUMS`, as `sha256sum -c` reads it."""
  return ''.join(f'{digest}  {name}\n' for name, digest in sums.items())


def read_manifest(root: pathlib.Path) -> dict[str, Any]:
  """Returns manifest.json of a bundle, having checked every file.

  Raises:
    BundleError: If it is no bundle, one of another version, or a file is
      missing, was changed or added.
  """
  try:
    recorded = (root / SUMS).read_bytes().decode('ascii')
  except (OSError, UnicodeDecodeError) as error:
    raise BundleError(
        f'Expected a bundle in {root}, found {type(error).__name__} of {SUMS}.'
    ) from None
  if to_text(digests(root)) != recorded:
    raise BundleError(
        f'Expected the files in {root} as {SUMS} says, found others. Tip:'
        f' `sha256sum -c {SUMS}` names those that were changed.'
    )
  try:
    manifest = json.loads((root / MANIFEST).read_bytes())
    version = manifest['format']
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise BundleError(
        f'Expected {MANIFEST} in {root} to describe a bundle, found'
        f' {type(error).__name__}: {error}.'
    ) from None
  if version != FORMAT:
    raise BundleError(f'Expected a bundle of format {FORMAT}, found {version}.')
  return manifest


def predict(
    root: pathlib.Path, use: str, arrays: Mapping[str, np.ndarray]
) -> np.ndarray:
  """Returns the class of each query, int32, or its name where classes have one.

  Args:
    root: The bundle.
    use: Name of a use.
    arrays: Name of an input -> its values, as the manifest says. `seed` and
      `salts` may be left out, which are zeros then.

  Raises:
    BundleError: If the bundle is not as it was written.
    ValueError: If there is no such use, or the arrays are not what it takes.
  """
  manifest = read_manifest(root)
  if use not in manifest['uses']:
    raise ValueError(
        f'Expected a use of {", ".join(manifest["uses"])}, found {use!r}.'
    )
  inputs = manifest['uses'][use]['inputs']
  given = dict(arrays)
  if 'salts' in inputs and 'support_y' in given:
    given.setdefault('salts', np.zeros(len(given['support_y']), np.int32))
  if 'support_mask' in inputs and 'support_y' in given:
    given.setdefault('support_mask', np.ones(np.shape(given['support_y'])))
  given.setdefault('seed', np.zeros(2, np.int32))
  if given.keys() != inputs.keys():
    raise ValueError(
        f'Expected the arrays {", ".join(inputs)}, found {", ".join(given)}.'
    )
  fed = {
      name: _as(np.asarray(given[name]), name, **spec)
      for name, spec in inputs.items()
  }
  import tensorflow as tf  # Last, because it takes seconds.

  loaded = tf.saved_model.load(str(root / use))
  adapt = loaded.signatures['adapt_and_predict']
  tensors = {name: tf.constant(array) for name, array in fed.items()}
  labels = adapt(**tensors)['labels'].numpy()
  names = manifest['class_names']
  is_of_training = manifest['uses'][use]['num_classes'] == len(names or ())
  return np.array(names)[labels] if names and is_of_training else labels


def _as(array: np.ndarray, name: str, dtype: str, shape: list[Any]):
  """Returns an array as an input takes it, or raises a ValueError."""
  fits = array.ndim == len(shape) and all(
      size is None or size == found
      for size, found in zip(shape, array.shape, strict=True)
  )
  if not fits or not np.can_cast(array.dtype, dtype, 'same_kind'):
    raise ValueError(
        f'Expected {name} to be {dtype} {shape}, found'
        f' {array.dtype} {list(array.shape)}.'
    )
  return array.astype(dtype)


def main(arguments: list[str]) -> int:
  """Runs the program and returns its exit code."""
  if len(arguments) != 3:
    print(__doc__, file=sys.stderr)
    return 2
  use, source, target = arguments
  try:
    with np.load(source, allow_pickle=False) as arrays:
      labels = predict(pathlib.Path(__file__).parent, use, dict(arrays))
  except (OSError, ValueError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  np.save(target, labels, allow_pickle=False)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
