"""Modules from outside that add algorithms, networks, data sets and so on.

A plugin is a module that, when it is imported, calls any of

    registry.register_algorithm       models.register_model
    datasets.register_dataset         partitioners.register_partition
    comparison.tables.register_table  training.trackers.register_tracker
    aggregation.register_aggregation

It is imported by name, or an installed package announces it: an entry point of
the group `tff_meta.plugins` is such a module, or a function without arguments
that calls them. Every program imports plugins once, when it starts.

A run records a checksum of each: of a package's files, of a module's own one;
so name the package rather than a module in it. What a plugin has registered
before its import fails stays registered in that process.
"""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import traceback
import types

GROUP = 'tff_meta.plugins'

_versions: dict[str, str] = {}


def versions() -> dict[str, str]:
  """Returns what is imported so far: of a module a checksum of its source."""
  return dict(_versions)


@functools.cache
def import_installed() -> None:
  """Imports, once, what installed packages announce.

  Raises:
    ImportError: If that fails; names the package.
  """
  for entry in importlib.metadata.entry_points(group=GROUP):
    package = entry.dist
    assert package is not None  # It is for all that is found in packages.
    announced = f'{entry.value!r} of the installed package {package.name!r}'
    with named_errors(ImportError, f'the plugin {announced}'):
      plugin = entry.load()
      if callable(plugin):
        plugin()
      elif not isinstance(plugin, types.ModuleType):
        raise TypeError(
            'no module, nor a function without arguments, but'
            f' {type(plugin).__name__}'
        )
    _versions[f'plugin {package.name}'] = package.version


def import_named(names: Sequence[str], wanted_by: str) -> None:
  """Imports modules by name.

  Args:
    names: Of modules, as `import` takes them.
    wanted_by: Who names them, for errors.

  Raises:
    ValueError: If there is no such module, or its import fails.
  """
  for name in names:
    check_is_there(name, wanted_by)
  for name in names:
    with named_errors(ValueError, f'the plugin {name!r} of {wanted_by}'):
      _versions[f'plugin {name}'] = _checksum(importlib.import_module(name))


def check_is_there(name: str, wanted_by: str) -> None:
  """Looks for a module, but does not import it; only the packages around it.

  Args:
    name: As `import` takes it.
    wanted_by: Who names it, for errors.

  Raises:
    ValueError: If there is no such module, or a package's import fails.
  """
  look_in_working_directory()
  with named_errors(ValueError, f'the plugin {name!r} of {wanted_by}'):
    _find(name)


def look_in_working_directory() -> None:
  """Makes imports look in the working directory before other places.

  As `python -m` does; a command that an installation has made does not.
  """
  if os.path.abspath(sys.path[0]) != os.getcwd():
    sys.path.insert(0, os.getcwd())


def python_path() -> str:
  """Returns a PYTHONPATH with which a program elsewhere finds the same."""
  given = os.environ.get('PYTHONPATH')
  places = ['', *(given.split(os.pathsep) if given else [])]
  return os.pathsep.join(dict.fromkeys(map(os.path.abspath, places)))


def _find(name: str) -> None:
  """Raises a ModuleNotFoundError if there is no such module."""
  try:
    is_name = all(map(str.isidentifier, name.split('.')))
    # Imports the packages around a module, not the module itself.
    if is_name and importlib.util.find_spec(name):
      return
  except ModuleNotFoundError as error:
    if not f'{name}.'.startswith(f'{error.name}.'):  # What a package imports.
      raise
  raise ModuleNotFoundError(
      'no such module in the working directory, on PYTHONPATH or among what is'
      ' installed. Tip: names are as `import` has them, without .py; put the'
      " module's directory on PYTHONPATH, or name another with --plugins"
  )


def _checksum(module: types.ModuleType) -> str:
  """Returns a checksum of a module's source, or of all of a package's."""
  content = hashlib.sha256()
  for place in getattr(module, '__path__', None) or [module.__file__]:
    path = pathlib.Path(place)
    for file in sorted(path.rglob('*.py')) if path.is_dir() else [path]:
      content.update(file.read_bytes())
  return f'sha256 {content.hexdigest()[:16]}'


@contextlib.contextmanager
def named_errors(kind: type[Exception], what: str) -> Iterator[None]:
  """Makes errors tell which import they are of, and where in it.

  Args:
    kind: Of the error that is raised instead.
    what: What is imported.
  """
  try:
    yield
  except Exception as error:
    said = f'{type(error).__name__}: {str(error).rstrip(".")}'
    raise kind(
        f'Expected to import {what}, found {said}{_place(error)}.'
    ) from error


def _place(error: Exception) -> str:
  """Returns the line of what is imported at which an error arose, if any.

  That is the first one below what Python does to import, and below this module.
  """
  frames = traceback.extract_tb(error.__traceback__)
  importing = [
      frame.filename == __file__
      or frame.filename.startswith('<frozen ')
      or 'importlib' in frame.filename
      for frame in frames
  ]
  below = frames[len(frames) - importing[::-1].index(True) :]
  return f' ({below[0].filename}, line {below[0].lineno})' if below else ''
