"""Runs a recorded round again from this folder; needs TFF, not tff_meta.

  python replay.py [next|next_on_tensors]

It reads the serialized computation, the state before the round and what its
clients held, runs them in TFF's own runtime, and prints how far the state and
the metrics are from those that were recorded, at most: |found - recorded| over
the larger of 1 and |recorded|. The exit code is 0 where that is at most 1e-6. A
round with noise of its own is run, and not compared. Nothing is unpickled, and
no code runs but this and the operations of the computation. A folder that is
not as it was written is refused.
"""

import collections
from collections.abc import Iterator, Mapping
import hashlib
import os
import pathlib
import signal
import sys
import types
from typing import Any

import numpy as np

COMPUTATIONS, ROUND = 'computations', 'round'
FORMS = 'next', 'next_on_tensors'
_TOLERANCE = 1e-6


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the arrays of an archive by their paths."""
  with np.load(path, allow_pickle=False) as archive:
    return {name: archive[name] for name in archive.files}


def read_computation(path: pathlib.Path) -> Any:
  """Returns a serialized computation."""
  import tensorflow_federated as tff
  from tensorflow_federated.proto.v0 import computation_pb2

  return tff.framework.deserialize_computation(
      computation_pb2.Computation.FromString(path.read_bytes())
  )


def to_value(
    kind: Any, arrays: Mapping[str, np.ndarray], path: str = ''
) -> Any:
  """Returns arrays by path as a value of a TFF type without sequences.

  Args:
    kind: The type, without placements.
    arrays: Path -> array. They are looked up by path, as the order of an
      archive is not that of a type.
    path: Of the value.
  """
  import tensorflow_federated as tff

  if isinstance(kind, tff.TensorType):
    return arrays[path]
  children = [
      to_value(child, arrays, below) for below, child in _children(kind, path)
  ]
  names = [name for name, _ in fields(kind)]
  if all(names):
    return collections.OrderedDict(zip(names, children, strict=True))
  return children


def to_sequences(kind: Any, arrays: Mapping[str, np.ndarray]) -> Any:
  """Returns what a client holds, as `next` takes it.

  Args:
    kind: A struct of sequences.
    arrays: What `next_on_tensors` takes of the client, by path.
  """
  import tensorflow as tf

  data = collections.OrderedDict()
  for name, sequence in fields(kind):
    present = arrays.get(f'{name}/present')
    path = name if present is None else f'{name}/value'
    value = to_value(sequence.element, arrays, path)
    dataset = tf.data.Dataset.from_tensors(value)
    data[name] = dataset if present is None else dataset.take(int(present))
  return data


def to_arrays(kind: Any, value: Any, path: str = '') -> dict[str, np.ndarray]:
  """Returns a value of a TFF type without sequences as arrays by path."""
  import tensorflow_federated as tff

  if isinstance(kind, tff.TensorType):
    return {path: np.asarray(value)}
  found: dict[str, np.ndarray] = {}
  for number, (below, child) in enumerate(_children(kind, path)):
    name = below.rpartition('/')[2]
    if isinstance(value, Mapping):
      part = value[name]
    elif hasattr(value, name):
      part = getattr(value, name)
    else:
      part = value[number]
    found |= to_arrays(child, part, below)
  return found


def leaves(kind: Any, path: str = '') -> list[tuple[str, Any]]:
  """Returns the paths and types of the tensors of a TFF type."""
  import tensorflow_federated as tff

  if isinstance(kind, tff.TensorType):
    return [(path, kind)]
  return [
      leaf
      for below, child in _children(kind, path)
      for leaf in leaves(child, below)
  ]


def difference(
    found: Mapping[str, np.ndarray], recorded: Mapping[str, np.ndarray]
) -> float:
  """Returns how far two sets of arrays are from each other; inf if not alike.

  NaN is at no distance from NaN.
  """
  if found.keys() != recorded.keys():
    return np.inf
  largest = 0.0
  for path, expected in recorded.items():
    actual = found[path]
    if actual.shape != expected.shape:
      return np.inf
    if expected.dtype.kind in 'SO':
      if (actual.astype('S') != expected.astype('S')).any():
        return np.inf
      continue
    actual, expected = actual.astype(float), expected.astype(float)
    apart = np.abs(actual - expected) / np.maximum(np.abs(expected), 1.0)
    apart = np.where(np.isnan(actual) & np.isnan(expected), 0.0, apart)
    apart = np.where(actual == expected, 0.0, apart)  # Infinite ones.
    if apart.size:
      largest = max(largest, float(np.nan_to_num(apart, nan=np.inf).max()))
  return largest


def replay(root: pathlib.Path, form: str = 'next') -> float:
  """Returns how far a round that is run again is from the recorded one.

  Args:
    root: The folder of the computations, which has been checked.
    form: `'next'`, or `'next_on_tensors'`, the same round whose clients hold
      tensors in the place of sequences.
  """
  recorded = root / ROUND
  computation = read_computation(root / f'{form}.pb')
  state_kind, data_kind = (
      kind.member for kind in computation.type_signature.parameter
  )
  read: Any = to_sequences if form == 'next' else to_value
  clients = [
      read(data_kind, read_arrays(path))
      for path in sorted(recorded.glob('client_*.npz'))
  ]
  output = computation(
      to_value(state_kind, read_arrays(recorded / 'state.npz')), clients
  )
  expected: dict[str, np.ndarray] = {}
  for name in ('state', 'metrics'):
    arrays = read_arrays(recorded / f'{name}_after.npz')
    expected |= {f'{name}/{p}'.rstrip('/'): a for p, a in arrays.items()}
  kinds = [
      kind.member if hasattr(kind, 'member') else kind
      for kind in computation.type_signature.result
  ]
  parts = output.values() if isinstance(output, Mapping) else output
  found: dict[str, np.ndarray] = {}
  for name, kind, part in zip(('state', 'metrics'), kinds, parts, strict=True):
    found |= to_arrays(kind, part, name)
  return difference(found, expected)


def fields(kind: Any) -> list[tuple[Any, Any]]:
  """Returns the names, None without, and the types of the parts of a struct."""
  import tensorflow_federated as tff

  return list(tff.structure.iter_elements(kind))


def _children(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
  """Yields the paths and types of the parts of a struct."""
  for number, (name, child) in enumerate(fields(kind)):
    part = str(number) if name is None else name
    yield f'{path}/{part}' if path else part, child


def _beside(name: str, folder: pathlib.Path) -> Any:
  """Returns a module made of its source, as what Python keeps is unchecked.

  Raises:
    ValueError: If the source is not that of SHA256SUMS.
  """
  module = types.ModuleType(name)
  path = folder / f'{name}.py'
  try:
    source = path.read_bytes()
    sums = (folder / 'SHA256SUMS').read_text('ascii').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'Expected a bundle in {folder}: {error}') from None
  if f'{hashlib.sha256(source).hexdigest()}  {path.name}' not in sums:
    raise ValueError(f'Expected {path} as SHA256SUMS says, found another.')
  module.__file__ = str(path)
  exec(compile(source, str(path), 'exec'), module.__dict__)
  return module


def _end_children() -> None:
  """Ends TFF's worker, which would outlive this process and keep its stdout."""
  for status in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      parent = status.read_text().rpartition(')')[2].split()[1]
    except OSError:  # It has ended meanwhile.
      continue
    if int(parent) == os.getpid():
      os.kill(int(status.parent.name), signal.SIGKILL)


def main(arguments: list[str]) -> int:
  """Runs the program and returns its exit code."""
  form = arguments[0] if arguments else FORMS[0]
  if len(arguments) > 1 or form not in FORMS:
    print(__doc__, file=sys.stderr)
    return 2
  folder = pathlib.Path(__file__).resolve().parent
  try:
    manifest = _beside('serve', folder).read_manifest(folder)
  except ValueError as error:  # Also a BundleError of serve.py.
    print(f'error: {error}', file=sys.stderr)
    return 2
  if manifest['computations'] is None:
    print('error: This bundle has no computations.', file=sys.stderr)
    return 2
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  # As where the round was recorded: other kernels have other last digits.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
  os.environ.setdefault('TF_NUM_INTRAOP_THREADS', '1')
  for name in ('no_proxy', 'NO_PROXY'):  # TFF's worker is on this machine.
    hosts = filter(None, (os.environ.get(name), 'localhost,127.0.0.1'))
    os.environ[name] = ','.join(hosts)
  import tensorflow_federated as tff

  # The one that also takes secure sums.
  tff.backends.test.set_sync_test_cpp_execution_context()
  apart = replay(folder / COMPUTATIONS, form)
  if not manifest['computations']['replayable']:
    print(f'{form} ran; its noise is new every time, so nothing is compared.')
    return 0
  print(f'{form} differs from the recorded round by {apart:.2g} at most.')
  return int(apart > _TOLERANCE)


if __name__ == '__main__':
  code = main(sys.argv[1:])
  sys.stdout.flush()
  _end_children()
  os._exit(code)  # TFF's threads outlive the interpreter's teardown.
