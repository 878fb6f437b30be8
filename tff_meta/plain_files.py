"""Reading files that somebody else may have changed, or put something else for.

Only plain files (or links to them) are read, and only so much of them as they
can sensibly hold. A pipe would make the program wait, a device would never end,
and a directory is no file; all of them are one error that names the path.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import stat
from typing import Any, BinaryIO

MAX_JSON_BYTES = 2**26
MAX_TABLE_BYTES = 2**30

_KINDS = (
    (stat.S_ISDIR, 'a directory'),
    (stat.S_ISFIFO, 'a pipe'),
    (stat.S_ISSOCK, 'a socket'),
    (stat.S_ISCHR, 'a device'),
    (stat.S_ISBLK, 'a device'),
    (stat.S_ISREG, 'a file'),
)


class DamagedFileError(OSError):
  """A file is not what was written; the message names it."""


def open_plain(path: pathlib.Path) -> BinaryIO:
  """Opens a plain file to be read; never waits.

  Args:
    path: The file, or a link to one.

  Raises:
    DamagedFileError: If it is something else.
    OSError: If it cannot be opened, or is not there.
  """
  descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  mode = os.fstat(descriptor).st_mode
  if not stat.S_ISREG(mode):
    os.close(descriptor)
    raise DamagedFileError(
        f'Expected {path} to be a plain file, found {_kind(mode)}.'
    )
  return open(descriptor, 'rb')


def read_bytes(path: pathlib.Path, max_bytes: int) -> bytes:
  """Returns the content of a plain file.

  Args:
    path: The file, or a link to one.
    max_bytes: The most that it can sensibly hold.

  Raises:
    DamagedFileError: If it is something else, or longer.
    OSError: If it cannot be read, or is not there.
  """
  with named_errors(path), open_plain(path) as file:
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
      raise DamagedFileError(
          f'Expected {path} to have at most {max_bytes} bytes, found {size}.'
      )
    content = file.read(size)
    if file.read(1):  # As files of the system, which say that they are empty.
      raise DamagedFileError(
          f'Expected {path} to have {size} bytes, as it says, found more.'
      )
  return content


def check_plain(path: pathlib.Path) -> None:
  """Raises a `DamagedFileError` if there is something but no plain file."""
  with contextlib.suppress(FileNotFoundError):
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
      raise DamagedFileError(
          f'Expected {path} to be a plain file, found {_kind(mode)}.'
      )


def make_directory(path: pathlib.Path, *, parents: bool = False) -> None:
  """Makes a directory unless it is there.

  Args:
    path: The directory.
    parents: Whether to make those above it, too.

  Raises:
    DamagedFileError: If something else is in its place.
    OSError: If it cannot be made.
  """
  try:
    path.mkdir(parents=parents, exist_ok=True)
  except (FileExistsError, NotADirectoryError):
    # The first part of the path that is no directory is in the way.
    for place in (*reversed(path.parents), path):
      if os.path.lexists(place) and not place.is_dir():
        raise DamagedFileError(
            f'Expected {place} to be a directory, found {describe(place)}. Tip:'
            ' remove it, or give another directory.'
        ) from None
    raise


def describe(path: pathlib.Path) -> str:
  """Returns what is at a path, in words."""
  try:
    return _kind(path.stat().st_mode)
  except FileNotFoundError:
    return 'a link to nothing' if path.is_symlink() else 'nothing'
  except OSError as error:  # A link to itself, or no permission.
    return f'{type(error).__name__}: {error.strerror}'


def _kind(mode: int) -> str:
  return next((name for is_kind, name in _KINDS if is_kind(mode)), 'no file')


@contextlib.contextmanager
def named_errors(path: pathlib.Path) -> Iterator[None]:
  """Makes errors of an open file name it, as those of opening one do."""
  try:
    yield
  except OSError as error:
    if error.filename is None and error.errno is not None:
      error.filename = str(path)
    raise


class Place:
  """Where an open file is, to ask now and then if it is still there.

  A file that is removed or replaced can be written to as before, but what is
  written is lost.
  """

  def __init__(self, path: pathlib.Path, file: Any = None):
    """Notes the place.

    Args:
      path: The file, which exists.
      file: The same, open; None to look for it at its path.
    """
    self._path = path
    found = os.fstat(file.fileno()) if file is not None else path.stat()
    self._identity = found.st_dev, found.st_ino

  def check(self) -> None:
    """Raises a `DamagedFileError` if the file is not there any more."""
    try:
      found = self._path.stat()
    except OSError:
      found = None
    if found is None or (found.st_dev, found.st_ino) != self._identity:
      raise DamagedFileError(
          f'Expected {self._path} to stay in its place while it is written,'
          f' found it {"replaced" if found else "removed"}: what was written'
          ' since is lost.'
      )
