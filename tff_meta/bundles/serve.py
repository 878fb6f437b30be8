"""Adapts the model in this folder to examples and predicts; needs TensorFlow.

  python serve.py USE EXAMPLES.npz PREDICTIONS.npy [--tflite]

USE is one of those in manifest.json, such as new_client. EXAMPLES.npz has the
arrays support_x and support_y, which the model adapts to, and query_x, whose
classes are written. Without query_x, what the model has adapted is written, an
.npz; with these arrays beside query_x in the place of the support set, it is
asked again. With --tflite it runs in TensorFlow Lite's interpreter. Nothing is
unpickled, and no code runs but this and the operations of the models. A folder
that is not as it was written is refused.
"""

from collections.abc import Mapping
import functools
import hashlib
import json
import os
import pathlib
import sys
import threading
from typing import Any
import zipfile

import numpy as np

SUMS, MANIFEST, SCALING = 'SHA256SUMS', 'manifest.json', 'scaling.npz'
CLIENT_ROUND = 'client_round'
FORMAT = 2
_OF_TRAINING = 'known_client', 'new_client'  # Whose classes training had.


class BundleError(ValueError):
  """A folder is no bundle, or not as it was written."""


def digests(root: pathlib.Path) -> dict[str, str]:
  """Returns path below a folder -> SHA-256 of each file but `SHA256SUMS`.

  What Python keeps of modules that it has imported, in `__pycache__`, is left
  out.

  Raises:
    BundleError: If there is anything but folders and plain files.
  """
  found = {}
  for path in sorted(root.rglob('*')):
    name = path.relative_to(root).as_posix()
    if '__pycache__' in path.parts[len(root.parts) :]:
      continue
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
        f' `sha256sum -c {SUMS}` names those that were changed; there may also'
        ' be more.'
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
    root: str | os.PathLike[str],
    use: str,
    arrays: Mapping[str, Any],
    tflite: bool = False,
) -> np.ndarray:
  """Returns the class of each query, by its name where the manifest has names.

  Args:
    root: The bundle.
    use: Name of a use.
    arrays: Name of an input -> its values: `query_x`, and a support set or what
      `adapt` returned. Examples are as the data set has them where the manifest
      has `examples`, and otherwise as the network takes them; labels are
      numbers, or names of the manifest's `class_names`. `seed`, `salts` (zeros)
      and `support_mask` (ones) may be left out.
    tflite: Whether TensorFlow Lite's interpreter runs it.

  Returns:
    int32 or text `[Q]`.

  Raises:
    BundleError: If the bundle is not as it was written.
    ValueError: If there is no such use, or the arrays are not what it takes.
    RuntimeError: If TensorFlow cannot compute it.
  """
  bundle = _Bundle(root, use, tflite)
  if arrays.keys() & bundle.spec['adapted'].keys():
    name, fed = 'predict', bundle.adapted(arrays)
  else:
    name, fed = 'adapt_and_predict', bundle.inputs(arrays)
  labels = np.zeros(0, np.int32)
  if len(fed['query_x']):
    labels = bundle.call(name, fed)['labels']
  return np.array(bundle.names)[labels] if bundle.names else labels


def adapt(
    root: str | os.PathLike[str],
    use: str,
    arrays: Mapping[str, Any],
    tflite: bool = False,
) -> dict[str, np.ndarray]:
  """Returns what the model has adapted to a support set, for `predict`.

  Args:
    root: The bundle.
    use: Name of a use.
    arrays: As for `predict`, without `query_x`.
    tflite: As for `predict`.

  Raises:
    BundleError, ValueError, RuntimeError: As `predict`.
  """
  bundle = _Bundle(root, use, tflite)
  return bundle.call('adapt', bundle.inputs(arrays, without={'query_x'}))


class _Bundle:
  """A use of a bundle that is as it was written."""

  def __init__(self, root, use: str, tflite: bool):
    self._folder, self._use, self._tflite = pathlib.Path(root), use, tflite
    self._manifest = read_manifest(self._folder)
    uses = self._manifest['uses']
    if use not in uses:
      raise ValueError(f'Expected a use of {", ".join(uses)}, found {use!r}.')
    if tflite and not self._lite_path().exists():
      raise ValueError(
          f'Expected {self._lite_path().name}, found none. Tip: export with'
          ' --tflite.'
      )
    self.spec = uses[use]
    is_of_training = use in _OF_TRAINING
    self.names = self._manifest['class_names'] if is_of_training else None

  def _lite_path(self) -> pathlib.Path:
    return self._folder / f'{self._use}.tflite'

  def inputs(self, arrays, without=frozenset()) -> dict[str, np.ndarray]:
    """Returns what a support set, and queries, are fed as."""
    spec = dict(self.spec)
    spec['inputs'] = {
        name: of for name, of in spec['inputs'].items() if name not in without
    }
    fed = _inputs(self._folder, self._manifest, spec, self.names, arrays)
    if self._tflite and not fed['support_y'].size:
      raise ValueError(
          'Expected examples in support_y with TensorFlow Lite, which can end'
          ' the process without, found none. Tip: leave --tflite out.'
      )
    return fed

  def adapted(self, arrays) -> dict[str, np.ndarray]:
    """Returns what has been adapted, and queries, as they are fed."""
    inputs = self.spec['adapted'] | {'query_x': self.spec['inputs']['query_x']}
    given = {name: np.asarray(array) for name, array in arrays.items()}
    if given.keys() != inputs.keys():
      raise ValueError(
          f'Expected the arrays {", ".join(sorted(inputs))}, found'
          f' {", ".join(given)}.'
      )
    examples = self._manifest['examples']
    if examples is not None:
      given['query_x'] = _scaled(
          self._folder, examples, 'query_x', given['query_x']
      )
    return {name: _as(given[name], name, **of) for name, of in inputs.items()}

  def call(self, name: str, fed) -> dict[str, np.ndarray]:
    """Runs a signature."""
    import tensorflow as tf  # Last, because it takes seconds.

    sums = (self._folder / SUMS).read_text()
    if self._tflite:
      interpreter, lock = _load(str(self._lite_path()), sums)
      with lock:
        return interpreter.get_signature_runner(name)(**fed)
    loaded = _load(str(self._folder / self._use), sums)
    tensors = {key: tf.constant(array) for key, array in fed.items()}
    try:
      found = loaded.signatures[name](**tensors)
    except tf.errors.OpError as error:  # As of the interpreter.
      raise RuntimeError(
          f'Expected TensorFlow to run {name}, found {error}'
      ) from error
    return {key: tensor.numpy() for key, tensor in found.items()}


@functools.lru_cache(maxsize=8)
def _load(path: str, sums: str) -> Any:
  """Returns a model, which is loaded once in a process.

  That of TensorFlow Lite is an interpreter, which computes for one thread at a
  time, with its lock.

  Args:
    path: Of the model.
    sums: `SHA256SUMS` of its bundle: another one there is loaded anew.
  """
  import tensorflow as tf

  del sums
  if path.endswith('.tflite'):
    return tf.lite.Interpreter(path), threading.Lock()
  return tf.saved_model.load(path)


def _inputs(folder, manifest, spec, names, arrays) -> dict[str, np.ndarray]:
  """Returns what a use is fed with, or raises a ValueError."""
  inputs = spec['inputs']
  given = {name: np.asarray(array) for name, array in arrays.items()}
  optional = {'seed', 'salts', 'support_mask'} & inputs.keys()
  if not inputs.keys() - optional <= given.keys() <= inputs.keys():
    raise ValueError(
        'Expected the arrays'
        f' {", ".join(sorted(inputs.keys() - optional))} (and'
        f' {", ".join(sorted(optional))}, if you like), found'
        f' {", ".join(given) or "none"}.'
    )
  y = given['support_y']
  if names and y.dtype.kind in 'US':
    numbers = {name: i for i, name in enumerate(names)}
    for name in y.astype(str).reshape(-1).tolist():
      if name not in numbers:
        raise ValueError(
            f'Expected support_y to be of {", ".join(names)}, found {name!r}.'
        )
    y = np.vectorize(numbers.get, otypes=[np.int32])(y.astype(str))
    given['support_y'] = y
  elif names and _are_other_numbers(names):
    raise ValueError(
        f'Expected support_y to be of {", ".join(names)} as strings, since'
        f' these names are numbers, too, found {y.dtype}.'
    )
  given.setdefault('seed', np.zeros(2, np.int32))
  given.setdefault('salts', np.zeros(y.shape[:1], np.int32))
  mask = given.setdefault('support_mask', np.ones(y.shape, np.float32))
  if not np.isin(mask, (0, 1)).all():
    raise ValueError('Expected support_mask of 0 and 1, found others.')
  given['support_mask'] = mask.astype(np.float32)
  if manifest['examples'] is not None:
    for name in {'support_x', 'query_x'} & given.keys():
      given[name] = _scaled(folder, manifest['examples'], name, given[name])
  fed = {name: _as(given[name], name, **of) for name, of in inputs.items()}
  y, count = fed['support_y'], spec['num_classes']
  if len(y) < spec.get('min_clients', 0):
    raise ValueError(
        f'Expected a group of at least {spec["min_clients"]} clients, found'
        f' {len(y)}.'
    )
  for name in {'support_x', 'support_mask', 'salts'} & fed.keys():
    axes = 1 if name == 'salts' else y.ndim
    if fed[name].shape[:axes] != y.shape[:axes]:
      raise ValueError(
          f'Expected {name} to begin with the sizes of support_y,'
          f' {list(y.shape[:axes])}, found {list(fed[name].shape)}.'
      )
  counts = fed.get('support_mask', np.ones(y.shape)) > 0
  if 'support_mask' in fed and not counts.any():
    raise ValueError('Expected a group with examples, found none.')
  if not ((y >= 0) & (y < count))[counts].all():
    raise ValueError(
        f'Expected labels in 0..{count - 1} in support_y, found'
        f' {y[counts].min()}..{y[counts].max()}.'
    )
  return fed


def _are_other_numbers(names: list[str]) -> bool:
  """Whether classes are called by numbers that are not their places."""
  return all(
      name.removeprefix('-').isdecimal() for name in names
  ) and names != [str(place) for place in range(len(names))]


def _scaled(folder, examples, name: str, array: np.ndarray) -> np.ndarray:
  """Returns examples of the data set as the network takes them."""
  shape = tuple(examples['shape'])
  is_gray = shape[-1:] == (1,) and len(shape) > 1
  if is_gray and array.shape[1 - len(shape) :] == shape[:-1]:
    array = array[..., np.newaxis]
  form = array.dtype.name, array.shape[array.ndim - len(shape) :]
  if form != (examples['dtype'], shape):
    raise ValueError(
        f'Expected {name} of {examples["dtype"]} and shape {list(shape)}, as'
        f' the data set had its examples, found {form[0]} and {list(form[1])}.'
    )
  with np.load(folder / SCALING, allow_pickle=False) as scaling:
    return array.astype(np.float32) * scaling['slope'] + scaling['offset']


def _as(array: np.ndarray, name: str, dtype: str, shape: list[Any]):
  """Returns an array as an input takes it, or raises a ValueError."""
  fits = array.ndim == len(shape) and all(
      size is None or size == found
      for size, found in zip(shape, array.shape, strict=True)
  )
  kinds = {'f': 'f', 'i': 'iu', 'b': 'b'}[np.dtype(dtype).kind]
  if not fits or array.dtype.kind not in kinds:
    raise ValueError(
        f'Expected {name} to be {dtype} {shape}, found'
        f' {array.dtype} {list(array.shape)}.'
    )
  with np.errstate(over='ignore'):
    cast = array.astype(dtype)
  if array.dtype.kind == 'f' and not np.isfinite(cast).all():
    raise ValueError(f'Expected {name} to be finite {dtype}, found others.')
  if array.dtype.kind in 'iu' and (cast != array).any():
    raise ValueError(
        f'Expected {name} to be {dtype}, found up to {array.max()}.'
    )
  return cast


def main(arguments: list[str]) -> int:
  """Runs the program and returns its exit code."""
  tflite = '--tflite' in arguments
  if len(arguments) != 3 + tflite:
    print(__doc__, file=sys.stderr)
    return 2
  use, source, target = (a for a in arguments if a != '--tflite')
  is_new = not os.path.lexists(target)
  try:
    with open(target, 'ab'):  # Before anything takes long.
      pass
    with zipfile.ZipFile(source) as archive:
      arrays = {}
      for member in archive.namelist():
        with archive.open(member) as file:
          name = member.removesuffix('.npy')
          arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    folder = pathlib.Path(__file__).parent
    if 'query_x' not in arrays and target.endswith('.npy'):
      raise ValueError(
          'Expected query_x, whose classes are written as .npy, found'
          f' {", ".join(arrays) or "none"}. Tip: without it, what the model has'
          ' adapted is written as .npz.'
      )
    run: Any = predict if 'query_x' in arrays else adapt
    _write(target, run(folder, use, arrays, tflite))
  except (
      OSError,
      ValueError,
      EOFError,
      RuntimeError,
      zipfile.BadZipFile,
  ) as error:
    problem = ' '.join(str(error).split())[:1000]
    print(f'error: {source} to {target}: {problem}', file=sys.stderr)
    if is_new:
      pathlib.Path(target).unlink(missing_ok=True)
    return 2
  print(f'Written: {target}')
  return 0


def _write(target: str, found) -> None:
  """Writes a file that is there; as a whole or not at all, but for devices."""
  path = part = pathlib.Path(target)
  if path.is_file():
    path = path.resolve()
    part = path.with_name(f'.{path.name}.{os.getpid()}')
  try:
    with open(part, 'wb') as file:
      if isinstance(found, dict):
        np.savez(file, **found)
      else:
        np.save(file, found, allow_pickle=False)
    if part != path:
      part.replace(path)
  except BaseException:
    if part != path:
      part.unlink(missing_ok=True)
    raise


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
