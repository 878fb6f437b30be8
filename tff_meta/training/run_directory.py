"""The directory of a run: what lies where, and who may write to it."""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from typing import Any

from tff_meta.training import atomic_files


class RunDirectoryError(OSError):
  """A run's directory cannot be used; the message says why."""


class RunDirectoryHeldError(RunDirectoryError):
  """Another process holds a run's directory."""


class RunDirectory:
  """Paths of a run's files, and its configuration."""

  def __init__(self, root: str | os.PathLike[str]):
    """Names the directory; nothing is read or created yet."""
    self.root = pathlib.Path(root)
    self.config = self.root / 'config.json'
    self.metrics = self.root / 'metrics.csv'
    self.timings = self.root / 'timings.csv'
    self.summary = self.root / 'summary.json'
    self.learning_curve = self.root / 'learning_curve.png'
    self.checkpoints = self.root / 'checkpoints'
    self.client_states = self.root / 'client_states.sqlite'
    self.events = self.root / 'tensorboard'
    self.evaluations = self.root / 'evaluation'
    self._lock = self.root / '.lock'

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Creates the directory and keeps other writers out of it meanwhile.

    The lock ends with the process, however that ends.

    Raises:
      RunDirectoryHeldError: If another process holds the directory.
      RunDirectoryError: If it cannot be created or written to, or has files of
        a run that are not ours.
    """
    make(self.root)
    try:
      lock = open(self._lock, 'a')
    except OSError as error:
      raise RunDirectoryError(
          f'Expected to be able to write to {self.root}, found'
          f' {type(error).__name__}: {error.strerror}.'
      ) from None
    with lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise RunDirectoryHeldError(
            f'Expected {self.root} to be free, found another process training'
            ' there. Tip: wait for it, or give another --output_dir.'
        ) from None
      self._check_is_ours()
      atomic_files.remove_leftovers(self.root)
      yield

  @contextlib.contextmanager
  def removed_if_no_round_is_done(self) -> Iterator[None]:
    """Removes a new directory, locked by the caller, if its run fails at once.

    A run that was never begun is nothing to continue, and the next one there
    may have other settings. What was there before stays.
    """
    is_new = not any(p != self._lock for p in self.root.iterdir())
    try:
      yield
    except Exception:
      is_begun = self.metrics.exists() and self.metrics.stat().st_size
      if is_new and not is_begun:
        shutil.rmtree(self.root, ignore_errors=True)
      raise

  def _check_is_ours(self) -> None:
    """Raises if files of a run are here without its configuration."""
    if not self.config.exists():
      for path in (self.metrics, self.summary, self.checkpoints):
        if path.exists():
          raise RunDirectoryError(
              f'Expected {self.root} to be new or to hold a run, found'
              f' {path.name} without {self.config.name}. Tip: give another'
              ' --output_dir.'
          )

  def read_config(self) -> dict[str, Any] | None:
    """Returns the content of config.json, None if there is none.

    Raises:
      RunDirectoryError: If it cannot be read.
    """
    try:
      return json.loads(self.config.read_text())
    except (FileNotFoundError, NotADirectoryError):
      return None
    except (OSError, ValueError) as error:
      raise RunDirectoryError(
          f'Expected {self.config} to be the configuration of a run, found it'
          f' unreadable: {error}.'
      ) from None


def make(path: pathlib.Path) -> None:
  """Makes a directory, and those above it, unless it is there.

  Args:
    path: The directory.

  Raises:
    RunDirectoryError: If it cannot be made, or something else is there.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
  except FileExistsError:
    found = 'a file'
    if path.is_symlink():
      found = f'a link to {os.readlink(path)}, where there is none'
    raise RunDirectoryError(
        f'Expected {path} to be a directory, found {found}.'
    ) from None
  except OSError as error:
    raise RunDirectoryError(
        f'Expected to be able to write to {path}, found'
        f' {type(error).__name__}: {error.strerror}.'
    ) from None


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ''
) -> list[str]:
  """Returns `field: old -> new` for every field that differs.

  Args:
    old: A configuration as nested mappings of JSON values.
    new: Another.
    prefix: Of the fields' names.
  """
  lines = []
  for name in [*old, *(name for name in new if name not in old)]:
    before, after = old.get(name), new.get(name)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
      lines += differences(before, after, f'{prefix}{name}.')
    elif before != after:
      lines.append(
          f'{prefix}{name}: {json.dumps(before)} -> {json.dumps(after)}'
      )
  return lines
