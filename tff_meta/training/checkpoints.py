"""Checkpoints: everything that a run needs to go on as if never interrupted.

One file a checkpoint: a line with the SHA-256 of what follows, then a NumPy
`.npz` archive without pickles. The archive holds a JSON manifest and the arrays
of the server state, and of that of the best round so far, named by their paths
in the state, e.g. `server/global_model_weights/body/conv_0`. The position in
the data is the number of completed rounds: the cohort of a round and all
randomness are pure functions of the seed and the round. What clients keep
between rounds is not here but in `client_state_store`, under the number of the
round.
"""

from collections.abc import Callable, Mapping
import contextlib
import hashlib
import json
import math
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
import tensorflow_federated as tff
import tree

from tff_meta import array_archives
from tff_meta import plain_files
from tff_meta.training import atomic_files
from tff_meta.training import sealed_json

_MAGIC = b'tff_meta checkpoint 1 sha256 '
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size * 2 + 1
_FILE_NAME = re.compile(r'round_(\d{9})\.ckpt')
_SHA256 = re.compile(r'[0-9a-f]{64}|')
_SERVER, _BEST = 'server/', 'best/'
_SHOWN = 300  # Characters of what is wrong, which may quote anything.
_MANIFEST_BYTES = 2**20  # Far more than a configuration takes.
_STRING_BYTES = 2**8  # The longest string of a state.
_LONGEST = 2**10  # Far more levels than a tree over rounds has.
_MOST_BYTES = 2**40  # Where nobody knows the state.
_MEMBER_BYTES = 2**11  # An array's name, twice, and its headers.


class DamagedCheckpointError(Exception):
  """A checkpoint's file is not what was written."""


class IncompatibleCheckpointError(ValueError):
  """A checkpoint holds the state of another process."""


class Position(NamedTuple):
  """How far a run has come.

  Attributes:
    rounds: Completed communication rounds.
    metrics_rows: Rows of metrics.csv after these rounds, without the header.
    metrics_bytes: Length of metrics.csv after these rounds, in bytes.
    metrics_sha256: Checksum of these bytes; empty in checkpoints of earlier
      versions.
    client_states: `ClientStateStore.fingerprint` after these rounds; empty
      where nothing is kept, and in checkpoints of earlier versions.
  """

  rounds: int
  metrics_rows: int
  metrics_bytes: int
  metrics_sha256: str = ''
  client_states: str = ''


class Best(NamedTuple):
  """The state of the round that was best by some measurement.

  Attributes:
    rounds: Completed communication rounds.
    value: The measurement, larger is better.
    server_state: Arrays of the server state by path.
    client_states: As in `Position`, after these rounds.
  """

  rounds: int
  value: float
  server_state: Mapping[str, np.ndarray]
  client_states: str = ''


class Checkpoint(NamedTuple):
  """What a run was after some round.

  Attributes:
    config: The run's configuration (JSON values), its seed among them.
    position: How far the run had come.
    server_state: Arrays of the server state by path.
    best: The best round so far; None if none was looked for.
  """

  config: Mapping[str, Any]
  position: Position
  server_state: Mapping[str, np.ndarray]
  best: Best | None = None


def to_arrays(structure: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of a nested structure by their paths.

  Args:
    structure: Nested mappings, tuples and attrs classes of tensors of numbers,
      or of byte strings, which some of TFF's aggregators keep.

  Returns:
    Path (names joined by '/') -> array, with the tensors' dtypes and shapes.

  Raises:
    TypeError: If a leaf is neither.
  """
  arrays = {}
  for path, leaf in tree.flatten_with_path(structure):
    name = '/'.join(str(part) for part in path)
    array = np.asarray(leaf)
    if array.dtype.kind == 'O':  # As TensorFlow gives arrays of strings.
      array = _to_byte_strings(array)
    if array.dtype.kind not in 'biufcS' or (
        array.dtype.kind == 'S' and array.dtype.itemsize > _STRING_BYTES
    ):
      raise TypeError(
          f'Expected the state at `{name}` to be numeric, or byte strings of at'
          f' most {_STRING_BYTES} bytes, found {array.dtype}. Tip: keep only'
          ' tensors of these in the state.'
      )
    arrays[name] = array
  return arrays


def _to_byte_strings(array: np.ndarray) -> np.ndarray:
  """Returns objects as byte strings where they are, and as they are if not.

  NumPy drops zeros at the end of one, so these are not.
  """
  items = array.reshape(-1).tolist()
  if all(isinstance(i, bytes) and not i.endswith(b'\0') for i in items):
    return array.astype(np.bytes_)
  return array


def to_state(
    process: tff.learning.templates.LearningProcess,
    arrays: Mapping[str, np.ndarray],
) -> Any:
  """Returns a server state of a process.

  Args:
    process: The process that the state is of.
    arrays: What `to_arrays` returned for the state.

  Raises:
    IncompatibleCheckpointError: As `from_arrays`.
  """
  return from_arrays(process.initialize(), arrays, _state_type(process))


def _state_type(process):
  return process.initialize.type_signature.result.member


def from_arrays(
    template: Any,
    arrays: Mapping[str, np.ndarray],
    kind: tff.Type | None = None,
) -> Any:
  """Returns the structure of `template` filled with `arrays`.

  Args:
    template: A structure like the one that was saved.
    arrays: What `to_arrays` returned for the saved one.
    kind: The structure's type. Dimensions that it leaves open, such as the
      levels of a tree of noise, may have another size than the template's. None
      if all have the template's.

  Raises:
    IncompatibleCheckpointError: If paths, dtypes or shapes differ from the
      template's, or a dimension that is open is beyond all sense.
  """
  expected = to_arrays(template)
  if expected.keys() != arrays.keys():
    difference = sorted(expected.keys() ^ arrays.keys())
    raise IncompatibleCheckpointError(
        'Expected the checkpoint to hold the state of this process, found'
        f' different parts: {", ".join(difference[:5])}. Tip: was it written by'
        ' another version of this library?'
    )
  open_shapes = {} if kind is None else _open_shapes(kind)
  for name, array in expected.items():
    found, shape = arrays[name], open_shapes.get(name, array.shape)
    same_kind = found.dtype == array.dtype or (
        found.dtype.kind == array.dtype.kind == 'S'
        and found.dtype.itemsize <= _STRING_BYTES
    )
    if not same_kind or not _fits(found.shape, shape):
      shown = str(list(shape)).replace('None', '?')
      raise IncompatibleCheckpointError(
          f'Expected `{name}` of the checkpoint to be'
          f' {array.dtype}{shown}, found'
          f' {found.dtype}{list(found.shape)}. Tip: was it written by another'
          ' version of this library?'
      )
  return tree.unflatten_as(template, [arrays[name] for name in expected])


def _open_shapes(kind: tff.Type, path: str = '') -> dict[str, tuple]:
  """Returns path -> shape, None where open, of arrays that may change it."""
  if isinstance(kind, tff.TensorType):
    shape = kind.shape if kind.shape is not None else ()
    return {path: tuple(shape)} if None in shape else {}
  shapes: dict[str, tuple] = {}
  for number, (name, part) in enumerate(tff.structure.iter_elements(kind)):
    below = str(number) if name is None else name
    shapes |= _open_shapes(part, f'{path}/{below}' if path else below)
  return shapes


def _fits(found, expected) -> bool:
  return len(found) == len(expected) and all(
      size <= _LONGEST if wanted is None else size == wanted
      for size, wanted in zip(found, expected, strict=True)
  )


def max_bytes(process: tff.learning.templates.LearningProcess) -> int:
  """Returns more bytes than any checkpoint of a process has."""
  arrays = to_arrays(process.initialize())
  shapes = {name: array.shape for name, array in arrays.items()}
  shapes |= _open_shapes(_state_type(process))
  state = 0
  for name, array in arrays.items():
    sizes = [_LONGEST if size is None else size for size in shapes[name]]
    is_text = array.dtype.kind == 'S'
    item = _STRING_BYTES if is_text else array.dtype.itemsize
    state += math.prod(sizes) * item + len(name)
  num_members = 2 * len(arrays) + 1
  return 2 * state + num_members * _MEMBER_BYTES + _MANIFEST_BYTES


class CheckpointStore:
  """The checkpoints of one run; a save that was cut off leaves no trace."""

  def __init__(self, directory: pathlib.Path, num_kept: int = 3):
    """Initializes the store.

    Args:
      directory: Where the checkpoints are; created by the first save.
      num_kept: How many of the newest to keep, at least 2: a damaged one needs
        a previous one.
    """
    if num_kept < 2:
      raise ValueError(
          f'Expected `num_kept` to be at least 2, found {num_kept}.'
      )
    self._directory = directory
    self._num_kept = num_kept

  def save(self, checkpoint: Checkpoint) -> pathlib.Path:
    """Writes a checkpoint atomically, drops the oldest, returns the path.

    Later ones, which a run did not go on from, stay until they are made again.
    """
    atomic_files.remove_leftovers(self._directory)
    path = self._path(checkpoint.position.rounds)
    atomic_files.write_bytes(path, _serialize(checkpoint))
    for rounds in self.rounds(checkpoint.position.rounds)[self._num_kept :]:
      old_path = self._path(rounds)
      if not old_path.is_dir():  # Not ours, then.
        old_path.unlink(missing_ok=True)
    return path

  def create(self) -> None:
    """Makes the directory unless it is there."""
    plain_files.make_directory(self._directory)

  def _path(self, rounds: int) -> pathlib.Path:
    return self._directory / f'round_{rounds:09d}.ckpt'

  def paths(self) -> list[pathlib.Path]:
    """Returns the checkpoints' files, the newest first."""
    if not self._directory.is_dir():
      return []
    paths = self._directory.iterdir()
    return sorted(filter(_is_checkpoint, paths), reverse=True)

  def rounds(self, last: int | None = None) -> list[int]:
    """Returns the rounds that there are checkpoints of, the newest first.

    Args:
      last: No later ones than this; None for all.
    """
    rounds = [_rounds_of(path) for path in self.paths()]
    return [r for r in rounds if last is None or r <= last]

  def load_latest(
      self,
      report: Callable[[str], None],
      is_usable: Callable[[Checkpoint], str | None] = lambda _: None,
      most_bytes: int = _MOST_BYTES,
  ) -> Checkpoint | None:
    """Returns the newest good checkpoint, or None if there is none.

    Args:
      report: Called with one line for every checkpoint that is passed over.
      is_usable: Returns why a checkpoint cannot be used, or None if it can.
      most_bytes: The most that a checkpoint can have, see `max_bytes`.
    """
    for path in self.paths():
      try:
        content = plain_files.read_bytes(path, most_bytes)
        checkpoint = _deserialize(content, _rounds_of(path))
        problem = is_usable(checkpoint)
      except FileNotFoundError:
        if not path.is_symlink():  # A running run has just dropped it.
          continue
        problem = 'it is a link to nothing'
      except (DamagedCheckpointError, plain_files.DamagedFileError) as error:
        problem = str(error)
      if problem is None:
        return checkpoint
      report(f'Checkpoint {path} cannot be used: {problem[:_SHOWN]}')
    return None

  def best_rounds(self, last: int) -> dict[int, int]:
    """Returns the best rounds of good checkpoints that have one.

    Args:
      last: Of checkpoints of no later rounds than this.

    Returns:
      Rounds of a checkpoint -> its best round.
    """
    found = {}
    for rounds in self.rounds(last):
      with contextlib.suppress(OSError, DamagedCheckpointError):
        content = plain_files.read_bytes(self._path(rounds), _MOST_BYTES)
        best = _deserialize(content, rounds).best
        if best is not None:
          found[rounds] = best.rounds
    return found


def _is_checkpoint(path: pathlib.Path) -> bool:
  return _FILE_NAME.fullmatch(path.name) is not None


def _rounds_of(path: pathlib.Path) -> int:
  return int(_FILE_NAME.findall(path.name)[0])


def _serialize(checkpoint: Checkpoint) -> bytes:
  """Returns the content of a checkpoint's file."""
  best = checkpoint.best
  manifest = {
      'config': checkpoint.config,
      'position': checkpoint.position._asdict(),
      'best': best
      and {
          name: value
          for name, value in best._asdict().items()
          if name != 'server_state'
      },
  }
  members = {f'{_SERVER}{k}': v for k, v in checkpoint.server_state.items()}
  if best is not None:
    members |= {f'{_BEST}{k}': v for k, v in best.server_state.items()}
  manifest_bytes = json.dumps(manifest, sort_keys=True).encode()
  members['manifest'] = np.frombuffer(manifest_bytes, np.uint8)
  body = array_archives.dump(members)
  digest = hashlib.sha256(body).hexdigest().encode()
  return _MAGIC + digest + b'\n' + body


def _deserialize(content: bytes, rounds: int) -> Checkpoint:
  """Returns the checkpoint in a file's content, which is verified.

  Args:
    content: Bytes that may come from anywhere.
    rounds: The rounds that it should be of.

  Raises:
    DamagedCheckpointError: If it is not what was written.
  """
  header, body = content[:_HEADER_BYTES], content[_HEADER_BYTES:]
  digest = hashlib.sha256(body).hexdigest().encode()
  if header != _MAGIC + digest + b'\n':
    raise DamagedCheckpointError(
        f'its checksum does not match its {len(content)} bytes'
    )
  try:
    members = array_archives.load(body)
    manifest = sealed_json.parse(members.pop('manifest').tobytes())
    position = Position(**manifest['position'])
    best = manifest['best'] and Best(server_state={}, **manifest['best'])
    _check(manifest['config'], position, best, rounds)
    server_state = _take(members, _SERVER)
    if best:
      best = best._replace(server_state=_take(members, _BEST))
    if members:
      raise ValueError(f'it has a part {min(members)!r}')
  except (KeyError, TypeError, ValueError) as error:
    raise DamagedCheckpointError(
        f'it is unreadable ({type(error).__name__}: {error})'
    ) from None
  return Checkpoint(manifest['config'], position, server_state, best or None)


def _take(members, prefix) -> dict[str, np.ndarray]:
  """Takes the arrays whose names begin with `prefix` out of `members`."""
  names = [name for name in members if name.startswith(prefix)]
  return {name[len(prefix) :]: members.pop(name) for name in names}


def _check(config, position, best, rounds) -> None:
  """Raises a ValueError if a checkpoint says what cannot be."""
  if not isinstance(config, Mapping):
    raise ValueError('`config` is no object')
  if position.rounds != rounds:
    raise ValueError(f'it is of round {position.rounds!r}')
  for name, value, least, most in (
      ('rounds', position.rounds, 1, math.inf),
      ('metrics_rows', position.metrics_rows, 0, rounds),
      ('metrics_bytes', position.metrics_bytes, 0, plain_files.MAX_TABLE_BYTES),
      ('best.rounds', best.rounds if best else 1, 1, rounds),
  ):
    if type(value) is not int or not least <= value <= most:
      raise ValueError(f'`{name}` is {value!r}')
  hashes = [position.metrics_sha256, position.client_states]
  if best:
    hashes.append(best.client_states)
    if type(best.value) is not float or not math.isfinite(best.value):
      raise ValueError(f'`best.value` is {best.value!r}')
  if not all(isinstance(h, str) and _SHA256.fullmatch(h) for h in hashes):
    raise ValueError(f'a checksum is none: {hashes}')
