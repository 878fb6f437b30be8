"""Checkpoints: everything that a run needs to go on as if never interrupted.

One file a checkpoint: a line with the SHA-256 of what follows, then a NumPy
`.npz` archive without pickles. The archive holds a JSON manifest and the arrays
of the server state, and of that of the best round so far, named by their paths
in the state, e.g. `server/global_model_weights/body/conv_0`. The position in
the data is the number of completed rounds: the cohort of a round and all
randomness are pure functions of the seed and the round. What clients keep
between rounds is not here but in `tff_meta.client_state_store`, under the
number of the round.
"""

from collections.abc import Callable, Mapping
import hashlib
import io
import json
import pathlib
import re
from typing import Any, NamedTuple
import zipfile

import numpy as np
import tree

from tff_meta.training import atomic_files

_MAGIC = b'tff_meta checkpoint 1 sha256 '
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size * 2 + 1
_FILE_NAME = re.compile(r'round_(\d{9})\.ckpt')


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
  """

  rounds: int
  metrics_rows: int
  metrics_bytes: int


class Best(NamedTuple):
  """The state of the round that was best by some measurement.

  Attributes:
    rounds: Completed communication rounds.
    value: The measurement, larger is better.
    server_state: Arrays of the server state by path.
  """

  rounds: int
  value: float
  server_state: Mapping[str, np.ndarray]


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
    structure: Nested mappings, tuples and attrs classes of numeric tensors.

  Returns:
    Path (names joined by '/') -> array, with the tensors' dtypes and shapes.

  Raises:
    TypeError: If a leaf is not numeric.
  """
  arrays = {}
  for path, leaf in tree.flatten_with_path(structure):
    name = '/'.join(str(part) for part in path)
    array = np.asarray(leaf)
    if array.dtype.kind not in 'biufc':
      raise TypeError(
          f'Expected the state at `{name}` to be numeric, found'
          f' {array.dtype}. Tip: keep only tensors of numbers in the state.'
      )
    arrays[name] = array
  return arrays


def from_arrays(template: Any, arrays: Mapping[str, np.ndarray]) -> Any:
  """Returns the structure of `template` filled with `arrays`.

  Args:
    template: A structure like the one that was saved.
    arrays: What `to_arrays` returned for the saved one.

  Raises:
    IncompatibleCheckpointError: If paths, dtypes or shapes differ from the
      template's.
  """
  expected = to_arrays(template)
  if expected.keys() != arrays.keys():
    difference = sorted(expected.keys() ^ arrays.keys())
    raise IncompatibleCheckpointError(
        'Expected the checkpoint to hold the state of this process, found'
        f' different parts: {", ".join(difference[:5])}. Tip: was it written by'
        ' another version of this library?'
    )
  for name, array in expected.items():
    found = arrays[name]
    if (found.dtype, found.shape) != (array.dtype, array.shape):
      raise IncompatibleCheckpointError(
          f'Expected `{name}` of the checkpoint to be'
          f' {array.dtype}{list(array.shape)}, found'
          f' {found.dtype}{list(found.shape)}. Tip: was it written by another'
          ' version of this library?'
      )
  return tree.unflatten_as(template, [arrays[name] for name in expected])


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
    """Writes a checkpoint atomically, drops the oldest, returns the path."""
    self._directory.mkdir(parents=True, exist_ok=True)
    atomic_files.remove_leftovers(self._directory)
    path = self._directory / f'round_{checkpoint.position.rounds:09d}.ckpt'
    atomic_files.write_bytes(path, _serialize(checkpoint))
    for old_path in self.paths()[self._num_kept :]:
      old_path.unlink(missing_ok=True)
    return path

  def paths(self) -> list[pathlib.Path]:
    """Returns the checkpoints' files, the newest first."""
    if not self._directory.is_dir():
      return []
    paths = self._directory.iterdir()
    return sorted(filter(_is_checkpoint, paths), reverse=True)

  def rounds(self) -> list[int]:
    """Returns the rounds that there are checkpoints of, the newest first."""
    return [int(_FILE_NAME.fullmatch(p.name).group(1)) for p in self.paths()]

  def drop_after(self, num_rounds: int) -> None:
    """Deletes the checkpoints of later rounds, which are to be done again."""
    for path, rounds in zip(self.paths(), self.rounds(), strict=True):
      if rounds > num_rounds:
        path.unlink(missing_ok=True)

  def load_latest(
      self,
      report: Callable[[str], None],
      is_usable: Callable[[Checkpoint], str | None] = lambda _: None,
  ) -> Checkpoint | None:
    """Returns the newest good checkpoint, or None if there is none.

    Args:
      report: Called with one line for every checkpoint that is passed over.
      is_usable: Returns why a checkpoint cannot be used, or None if it can.
    """
    for path in self.paths():
      try:
        checkpoint = _deserialize(path.read_bytes())
        problem = is_usable(checkpoint)
      except FileNotFoundError:  # A running run has just dropped it.
        continue
      except DamagedCheckpointError as error:
        problem = str(error)
      if problem is None:
        return checkpoint
      report(f'Checkpoint {path} cannot be used: {problem}')
    return None


def _is_checkpoint(path: pathlib.Path) -> bool:
  return _FILE_NAME.fullmatch(path.name) is not None


def _serialize(checkpoint: Checkpoint) -> bytes:
  """Returns the content of a checkpoint's file."""
  best = checkpoint.best
  manifest = {
      'config': checkpoint.config,
      'position': checkpoint.position._asdict(),
      'best': best and {'rounds': best.rounds, 'value': best.value},
  }
  members = {f'server/{k}': v for k, v in checkpoint.server_state.items()}
  if best is not None:
    members |= {f'best/{k}': v for k, v in best.server_state.items()}
  manifest_bytes = json.dumps(manifest, sort_keys=True).encode()
  members['manifest'] = np.frombuffer(manifest_bytes, np.uint8)
  buffer = io.BytesIO()
  np.savez(buffer, **members)
  digest = hashlib.sha256(buffer.getbuffer()).hexdigest().encode()
  return _MAGIC + digest + b'\n' + buffer.getvalue()


def _deserialize(content: bytes) -> Checkpoint:
  """Returns the checkpoint in a file's content, which is verified."""
  header, body = content[:_HEADER_BYTES], content[_HEADER_BYTES:]
  digest = hashlib.sha256(body).hexdigest().encode()
  if header != _MAGIC + digest + b'\n':
    raise DamagedCheckpointError(
        f'its checksum does not match its {len(content)} bytes'
    )
  try:
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
      members = {name: archive[name] for name in archive.files}
    manifest = json.loads(members.pop('manifest').tobytes())
    position = Position(**manifest['position'])
    best = manifest['best']
  except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
    raise DamagedCheckpointError(f'it is unreadable ({error})') from None

  def select(prefix):
    return {
        name[len(prefix) :]: array
        for name, array in members.items()
        if name.startswith(prefix)
    }

  return Checkpoint(
      config=manifest['config'],
      position=position,
      server_state=select('server/'),
      best=best and Best(**best, server_state=select('best/')),
  )
