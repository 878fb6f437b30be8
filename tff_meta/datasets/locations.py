"""Where data sets are looked for, and what is said when they are not there."""

from collections.abc import Sequence
import os

_DEFAULT_DATA_DIR = os.path.join('~', 'tensorflow_datasets')


class DatasetNotFoundError(FileNotFoundError):
  """A data set is in none of the places where it was looked for."""


def roots(data_dir: str | None) -> list[str]:
  """Returns the directories that may hold data sets, best first.

  Args:
    data_dir: A directory of data sets, or one whose `tfds` folder is such a
      directory. None stands for $TFDS_DATA_DIR and, where that is not set, for
      `~/tensorflow_datasets`: the places TensorFlow Datasets uses.

  Returns:
    Paths, with `~` expanded; they need not exist.
  """
  if data_dir is None:
    data_dir = os.environ.get('TFDS_DATA_DIR', _DEFAULT_DATA_DIR)
  data_dir = os.path.expanduser(data_dir)
  return [data_dir, os.path.join(data_dir, 'tfds')]


def find_folder(
    name: str,
    data_dir: str | None,
    *,
    folder_names: Sequence[str],
    must_hold: Sequence[str],
    how_to_get: str,
) -> str:
  """Returns the directory that holds a data set in its published layout.

  Args:
    name: Name of the data set, for the error.
    data_dir: The directory itself, or the one above it; None: the default place
      of data sets, see `roots`.
    folder_names: What the directory may be called below `data_dir`.
    must_hold: Names of the files and folders it has to hold.
    how_to_get: Completes 'Tip: '.

  Raises:
    DatasetNotFoundError: If no candidate holds all of `must_hold`.
  """
  root = roots(data_dir)[0]
  candidates = [root] + [os.path.join(root, folder) for folder in folder_names]
  for candidate in candidates:
    if all(os.path.exists(os.path.join(candidate, n)) for n in must_hold):
      return candidate
  contents = '{' + ','.join(must_hold) + '}'
  raise not_found(
      name, [os.path.join(c, contents) for c in candidates], how_to_get
  )


def not_found(
    name: str, looked_for: Sequence[str], how_to_get: str
) -> DatasetNotFoundError:
  """Returns the error that says what was looked for and how to get it."""
  return DatasetNotFoundError(
      f'Expected the data set {name!r} at one of {", ".join(looked_for)};'
      f' found none of them. Tip: {how_to_get}'
  )
