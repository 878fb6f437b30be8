"""The directory of a run: what lies where, and who may write to it."""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import os
import pathlib
import re
import secrets
import shutil
import tempfile
from typing import Any

from tff_meta import plain_files
from tff_meta.training import atomic_files
from tff_meta.training import sealed_json

CLIENT_STATES = 'client_states.sqlite'
STATE_PREFIX = 'program_state_'  # The rest of the name is the round.
# What else may lie where a run begins: the picture of --describe, flag files,
# and what the program's output was redirected into.
_PICTURE, _OF_VOLUMES = 'data.png', 'lost+found'
_BESIDE = ('.flags', '.log', '.out')
_SECRET_BYTES = 100
_SHOWN = 100  # Characters of a value, which may be anything.
_NOTHING = object()  # Stands for a field that is not there.


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
    self.client_states = self.root / CLIENT_STATES
    # Of --driver=program.
    self.program_states = self.root / 'program_states'
    self.program_metrics = self.root / 'program_metrics.csv'
    self.events = self.root / 'tensorboard'
    self.trackers = self.root / 'trackers'
    self.evaluations = self.root / 'evaluation'
    self.cohort_secret = self.root / 'cohorts.secret'
    self._lock = self.root / '.lock'

  def secret_of_cohorts(self) -> int:
    """Returns what decides who takes part in a private run; made at first.

    It is in this one file, which only its owner can read: it is not sent to
    clients, kept in checkpoints, logged, exported or saved. A host that is to
    go on with the whole run (`comparison.remote_runs`) is sent it.

    Raises:
      RunDirectoryError: If the file is there, and is something else.
    """
    if not self.cohort_secret.exists():
      number = f'{secrets.token_hex(16)}\n'.encode()
      atomic_files.write_bytes(self.cohort_secret, number, mode=0o600)
    content = plain_files.read_bytes(self.cohort_secret, _SECRET_BYTES)
    try:
      return int(content.decode('ascii').strip(), 16)
    except ValueError:
      raise RunDirectoryError(
          f'Expected {self.cohort_secret} to hold a number, found something'
          ' else. Tip: remove it, and cohorts are drawn by another one.'
      ) from None

  def check_can_be_made(self) -> None:
    """Raises if nothing can be written here, before anything takes long.

    What `locked` finds out later is not looked at. Nothing is left here.

    Raises:
      RunDirectoryError: If a file cannot be made in the directory, or in the
        nearest one above it that is there.
    """
    place = self.root.absolute()
    while not os.path.lexists(place):
      place = place.parent
    if not place.is_dir():
      raise RunDirectoryError(
          f'Expected {place} to be a directory, found'
          f' {plain_files.describe(place)}. Tip: remove it, or give another'
          ' directory.'
      )
    try:
      with tempfile.TemporaryFile(dir=place):
        pass
    except OSError as error:
      raise RunDirectoryError(
          f'Expected to be able to write to {self.root}, found'
          f' {type(error).__name__} in {place}: {error.strerror}. Tip: give'
          ' another --output_dir.'
      ) from None

  def check_is_free(
      self, *others: str, data: str | os.PathLike[str] | None = None
  ) -> None:
    """Raises if a run would come among somebody's files; changes nothing.

    A run that is here may go on, and one may begin beside hidden files, flag
    files and logs.

    Args:
      *others: Names of further files that are part of the run.
      data: The file or folder that its data are read from; None for none.

    Raises:
      RunDirectoryError: If it is the data's folder, is within it, or holds
        something else than a run.
    """
    if self.config.exists() or any(self.checkpoints.glob('*.ckpt')):
      return
    if data is not None and os.path.isdir(data):
      folder = pathlib.Path(data).resolve()
      if folder in (self.root.resolve(), *self.root.resolve().parents):
        raise RunDirectoryError(
            f'Expected an --output_dir outside of the data in {data}, which'
            f' could not be read any more, found {self.root}. Tip: give another'
            ' --output_dir.'
        )
    paths = [path for path in vars(self).values() if path.parent == self.root]
    own = {path.name for path in paths} | {_PICTURE, _OF_VOLUMES, *others}
    for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
      # SQLite's files end in -wal and so on, half written ones in .tmp.
      name = re.sub(r'(-[a-z]+|\.\d+\.tmp)$', '', path.name)
      if name not in own and name[:1] != '.' and path.suffix not in _BESIDE:
        raise RunDirectoryError(
            f'Expected {self.root} to be new or to hold a run, found'
            f' {path.name}. Tip: give another --output_dir.'
        )

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Creates the directory and keeps other writers out of it meanwhile.

    The lock ends with the process, however that ends.

    Raises:
      RunDirectoryHeldError: If another process holds the directory.
      RunDirectoryError: If it cannot be created or written to, or has files of
        a run that are not ours.
    """
    try:
      plain_files.make_directory(self.root, parents=True)
      lock = _open_lock(self._lock)
    except plain_files.DamagedFileError as error:
      raise RunDirectoryError(str(error)) from None
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
      place = plain_files.Place(self._lock, lock)
      place.check()  # Not removed between being opened and being locked.
      self._check_is_ours()
      self._check_kinds()
      atomic_files.remove_leftovers(self.root)
      yield
      place.check()

  def rounds_of_program(self) -> int:
    """Returns the round of the newest program state, 0 without one."""
    names = [p.name for p in self.program_states.glob(f'{STATE_PREFIX}*')]
    rounds = [name.removeprefix(STATE_PREFIX) for name in names]
    return max((int(r) for r in rounds if r.isdecimal()), default=0)

  def tables(self) -> list[pathlib.Path]:
    """Returns the tables of clients and groups that are there, sorted."""
    kinds = 'clients_*.csv', 'groups_*.csv'
    return sorted(path for kind in kinds for path in self.root.glob(kind))

  def _check_kinds(self) -> None:
    """Raises if a directory is where a file belongs, or a file for one."""
    for path in (
        self.config,
        self.metrics,
        self.timings,
        self.summary,
        self.learning_curve,
        *self.tables(),
    ):
      if path.is_dir():
        raise RunDirectoryError(
            f'Expected {path} to be a file, found a directory. Tip: remove it,'
            ' or give another --output_dir.'
        )
    for path in (self.checkpoints, self.events):
      if os.path.lexists(path) and not path.is_dir():
        raise RunDirectoryError(
            f'Expected {path} to be a directory, found'
            f' {plain_files.describe(path)}. Tip: remove it, or give another'
            ' --output_dir.'
        )

  @contextlib.contextmanager
  def removed_if_no_round_is_done(self, *others: str) -> Iterator[None]:
    """Removes a new run, whose directory the caller has locked, if it fails.

    A run that was never begun is nothing to continue, and the next one there
    may have other settings. What was there before stays, and so does what is no
    part of the run; the directory goes if nothing is left in it.

    Args:
      *others: Names of further files that are part of the run.
    """
    is_new = not any(p != self._lock for p in self.root.iterdir())
    try:
      yield
    except BaseException:
      if is_new and not self._is_begun():
        parts = [p for p in vars(self).values() if p.parent == self.root]
        for path in (*parts, *map(self.root.joinpath, others)):
          if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
          else:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
          self.root.rmdir()
      raise

  def _is_begun(self) -> bool:
    """Whether a round is done, by our loop or by a program."""
    tables = filter(pathlib.Path.exists, (self.metrics, self.program_metrics))
    return (  # A program writes a header at once.
        any(len(path.read_bytes().splitlines()) > 1 for path in tables)
        or self.rounds_of_program() > 0
        or any(self.checkpoints.glob('*.ckpt'))
    )

  def _check_is_ours(self) -> None:
    """Raises if files of a run are here without its configuration.

    Checkpoints tell whose they are.
    """
    if not self.config.exists() and not any(self.checkpoints.glob('*.ckpt')):
      for path in (
          self.metrics,
          self.summary,
          self.checkpoints,
          self.program_states,
          self.program_metrics,
      ):
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
      return sealed_json.read(self.config, self.summary)
    except (FileNotFoundError, NotADirectoryError):
      return None
    except OSError as error:
      raise RunDirectoryError(
          f'Expected {self.config} to be the configuration of a run, found it'
          f' unreadable: {error}'
      ) from None

  def read_recorded(self) -> dict[str, Any]:
    """Returns the configuration of the run here; empty without one.

    Raises:
      RunDirectoryError: If config.json cannot be read.
    """
    content = self.read_config()
    config = content.get('config') if isinstance(content, Mapping) else None
    return dict(config) if isinstance(config, Mapping) else {}

  def recorded_if_readable(self) -> dict[str, Any]:
    """Returns the configuration of the run here; empty where there is none."""
    with contextlib.suppress(RunDirectoryError):
      return self.read_recorded()
    return {}

  def read_plugins(self) -> tuple[str, ...]:
    """Returns the modules that a run had imported by name; none without a run.

    Raises:
      RunDirectoryError: If config.json cannot be read, or has something else.
    """
    names = self.read_recorded().get('plugins', [])
    if isinstance(names, list) and all(isinstance(n, str) for n in names):
      return tuple(names)
    raise RunDirectoryError(
        f'Expected `plugins` of {self.config} to be names of modules, found'
        f' {json.dumps(names)[:_SHOWN]}.'
    )


def _open_lock(path: pathlib.Path) -> Any:
  """Opens a plain file to be locked; never waits, as for a pipe."""
  descriptor = os.open(
      path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
  )
  file = open(descriptor, 'r+b', buffering=0)
  try:
    plain_files.check_plain(path)
  except BaseException:
    file.close()
    raise
  return file


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
    before, after = (of.get(name, _NOTHING) for of in (old, new))
    if isinstance(before, Mapping) and isinstance(after, Mapping):
      lines += differences(before, after, f'{prefix}{name}.')
    elif before != after:
      before, after = (
          'nothing' if v is _NOTHING else json.dumps(v)[:_SHOWN]
          for v in (before, after)
      )
      lines.append(f'{prefix[:_SHOWN]}{name[:_SHOWN]}: {before} -> {after}')
  return lines
