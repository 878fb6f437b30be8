"""Files that are either the old ones or the new ones, never something between.

A file is written beside its place, flushed to the disk and renamed into it; the
rename is flushed too. A process killed at any point leaves the old file whole
and at most one file ending in `.tmp`, which nothing reads.
"""

import functools
import json
import os
import pathlib

from tff_meta import plain_files

TMP_SUFFIX = '.tmp'


def write_bytes(path: pathlib.Path, data: bytes, mode: int = 0o666) -> None:
  """Writes `data` to `path` atomically and durably.

  Args:
    path: The file to create or to replace; its directory has to exist.
    data: The file's whole content.
    mode: Who may do what with the file from its first moment, less what the
      process's umask takes away.

  Raises:
    OSError: If the file cannot be written; the old file is then unchanged.
  """
  tmp_path = path.with_name(f'{path.name}.{os.getpid()}{TMP_SUFFIX}')
  try:
    # Replaced, if it is there: it may be a link, or a pipe.
    tmp_path.unlink(missing_ok=True)
    opener = functools.partial(os.open, mode=mode)
    with (
        plain_files.named_errors(path),
        open(tmp_path, 'xb', opener=opener) as file,
    ):
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(tmp_path, path)
  except BaseException as error:
    tmp_path.unlink(missing_ok=True)
    if isinstance(error, OSError) and error.filename is None:
      # As of a full disk: Python does not say which file was too much.
      raise OSError(error.errno, error.strerror, str(path)) from None
    raise
  sync_directory(path.parent)


def write_json(path: pathlib.Path, value: object) -> None:
  """Writes `value` to `path` as indented JSON, atomically and durably."""
  write_bytes(path, json_bytes(value))


def json_bytes(value: object) -> bytes:
  """Returns `value` as indented JSON, as `write_json` writes it.

  Raises:
    ValueError: If it has a number that is not finite.
  """
  text = json.dumps(value, indent=2, allow_nan=False)
  return (text + '\n').encode()


def sync_directory(path: pathlib.Path) -> None:
  """Flushes the entries of the directory `path` to the disk."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def sync_tree(path: pathlib.Path) -> None:
  """Flushes a directory and all that is in it to the disk."""
  for folder, _, names in os.walk(path):
    for name in names:
      with open(os.path.join(folder, name), 'rb') as file:
        os.fsync(file.fileno())
    sync_directory(pathlib.Path(folder))


def remove_leftovers(directory: pathlib.Path) -> None:
  """Removes what killed processes left half written in `directory`.

  Other files that end in `.tmp` stay: only ours have a process id before it.
  """
  for path in directory.glob(f'*{TMP_SUFFIX}'):
    if path.stem.rpartition('.')[2].isdigit() and not path.is_dir():
      path.unlink(missing_ok=True)
