"""A program that this host runs for another one, in a folder of its own.

The folder is sent and fetched file by file, in pieces. It is fetched as a
program leaves it that is killed: nothing is written while files are copied.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from typing import NamedTuple

from tff_meta import installation
from tff_meta import machine
from tff_meta.execution import native

PIECE_BYTES = 2**23
_PREFIX = 'tff_meta_cell_'
_LOCK = 'lock'
# A file that was written so shortly before it was copied may be written again
# without a change of its time.
_SETTLED_NANOSECONDS = 10**9


class File(NamedTuple):
  """A file of a folder.

  Attributes:
    name: Its path below the folder.
    mode: Who may read it, and so on.
    num_bytes: Its size.
  """

  name: str
  mode: int
  num_bytes: int


class Snapshot(NamedTuple):
  """What a folder holds.

  Attributes:
    names: Of all files; none if there is no such folder.
    changed: Those that are not as they were sent, or fetched, before.
  """

  names: list[str]
  changed: list[File]


class Look(NamedTuple):
  """How a program is doing.

  Attributes:
    log: What it has printed since, in whole lines while it runs.
    offset: Where the next look begins.
    exit_code: As `subprocess.Popen` has it; None while it runs, or there is
      more to read.
  """

  log: bytes
  offset: int
  exit_code: int | None


def describe() -> dict[str, str]:
  """Returns what of this host the last bits of results depend on.

  Whoever has a program run says what it computes on.
  """
  instructions = ' '.join(machine.instructions())
  return installation.versions() | {'instructions': instructions}


def files_of(folder: pathlib.Path) -> list[File]:
  """Returns the plain files of a folder, which need not exist, sorted."""
  found = []
  for place, _, names in os.walk(folder):
    for path in (pathlib.Path(place, name) for name in names):
      if path.is_file():
        status = path.stat()
        name = path.relative_to(folder).as_posix()
        found.append(File(name, status.st_mode & 0o777, status.st_size))
  return sorted(found)


def read_piece(path: pathlib.Path, offset: int) -> bytes:
  """Returns the next bytes of a file, none at its end."""
  with open(path, 'rb') as file:
    file.seek(offset)
    return file.read(PIECE_BYTES)


class HostedProgram:
  """The program; its output directory is `run` in the folder."""

  def __init__(self):
    """Makes the folder, and removes those of others that have ended."""
    self._folder, self._lock = _make_folder()
    self._run = self._folder / 'run'
    self._log = self._folder / 'log.txt'
    self._staged = self._folder / 'staged'
    self._process: subprocess.Popen | None = None
    self._names: dict[bytes, bytes] = {}
    self._known: dict[str, tuple[int, ...]] = {}  # Name -> stamp.

  def describe(self) -> dict[str, str]:
    """Returns `describe` of this host and, as `host`, its name."""
    return describe() | {'host': socket.gethostname()}

  def write(self, name: str, mode: int, piece: bytes) -> None:
    """Appends to a file of the output directory."""
    path = self._run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'ab') as file:
      file.write(piece)
    path.chmod(mode)

  def begin(
      self,
      arguments: Sequence[str],
      environment: Mapping[str, str],
      run: str,
      root: str,
  ) -> None:
    """Starts the program, after all files were written.

    Args:
      arguments: Of Python, but for --output_dir.
      environment: What is not as on this host. Its PYTHONPATH comes first.
      run: What the log calls the output directory.
      root: What it calls the place of this library.
    """
    own_root = pathlib.Path(__file__).resolve().parents[2]
    self._names = {
        os.fsencode(self._run): os.fsencode(run),
        os.fsencode(own_root): os.fsencode(root),
    }
    self._known = {name: stamp for name, stamp, _ in self._stamps()}
    paths = [of.get('PYTHONPATH') for of in (environment, os.environ)]
    joined = {'PYTHONPATH': os.pathsep.join(filter(None, paths))}
    command = [sys.executable, *arguments, f'--output_dir={self._run}']
    with open(self._log, 'ab') as log:
      self._process = subprocess.Popen(
          # Whatever it might save then, nobody would fetch.
          native.ending_with_parent(command, signal.SIGKILL),
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          cwd=own_root,
          env=os.environ | environment | joined,
          start_new_session=True,
      )

  def look(self, offset: int, seconds: float) -> Look:
    """Returns what the program has printed, and whether it has ended.

    Args:
      offset: Where the last look has ended.
      seconds: How long to wait for its end.
    """
    assert self._process is not None
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(seconds)
    exit_code = self._process.poll()
    log = read_piece(self._log, offset)
    if len(log) == PIECE_BYTES:
      exit_code = None
    if exit_code is None:
      end = log.rfind(b'\n') + 1
      if end or len(log) < PIECE_BYTES:
        log = log[:end]
    offset += len(log)
    for own, name in self._names.items():
      log = log.replace(own, name)
    return Look(log, offset, exit_code)

  def snapshot(self) -> Snapshot:
    """Copies what has changed in the output directory, to be read."""
    shutil.rmtree(self._staged, ignore_errors=True)
    self._staged.mkdir()
    with self._paused():
      now = self._staged.stat().st_mtime_ns
      found = self._stamps()
      changed = []
      for name, stamp, file in found:
        if self._known.get(name) != stamp:
          copy = self._staged / name
          copy.parent.mkdir(parents=True, exist_ok=True)
          shutil.copyfile(self._run / name, copy)
          changed.append(file)
    self._known = {
        name: stamp
        for name, stamp, _ in found
        if now - stamp[-1] > _SETTLED_NANOSECONDS
    }
    return Snapshot([name for name, *_ in found], changed)

  def read(self, name: str, offset: int) -> bytes:
    """Returns the next bytes of a changed file of the last snapshot."""
    return read_piece(self._staged / name, offset)

  def terminate(self) -> None:
    """Asks the program to save and to end."""
    if self._process is not None:
      self._process.terminate()

  def kill(self) -> None:
    """Kills the program."""
    if self._process is not None:
      self._process.kill()

  def close(self) -> None:
    """Ends the program, and removes the folder."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()
    shutil.rmtree(self._folder, ignore_errors=True)

  def _stamps(self) -> list[tuple[str, tuple[int, ...], File]]:
    """Returns for every file what changes when it is written, time last."""
    stamps: list[tuple[str, tuple[int, ...], File]] = []
    for file in files_of(self._run):
      found = (self._run / file.name).stat()
      stamp = found.st_ino, found.st_size, found.st_mode, found.st_mtime_ns
      stamps.append((file.name, stamp, file))
    return stamps

  @contextlib.contextmanager
  def _paused(self) -> Iterator[None]:
    """Stops the program meanwhile, all of its threads."""
    process = self._process
    if process is None or process.poll() is not None:
      yield
      return
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
      yield
    finally:
      process.send_signal(signal.SIGCONT)


def _make_folder() -> tuple[pathlib.Path, int]:
  """Returns a new folder, and its lock, which ends with this process."""
  for old in pathlib.Path(tempfile.gettempdir()).glob(f'{_PREFIX}*'):
    with contextlib.suppress(OSError):  # Of another user, or in use.
      lock = os.open(old / _LOCK, os.O_RDWR | os.O_CLOEXEC)
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(old)
      finally:
        os.close(lock)
  # It gets its name when it is locked, not to be taken for an old one.
  new = pathlib.Path(tempfile.mkdtemp(prefix=f'new_{_PREFIX}'))
  lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
  fcntl.flock(lock, fcntl.LOCK_EX)
  folder = new.with_name(new.name.removeprefix('new_'))
  new.rename(folder)
  return folder, lock
