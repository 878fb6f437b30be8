"""Kinds of flags: paths, lists and numbers, each read in one way.

Their errors say what was expected, where those of absl say what Python's `int`
and `float` do, and a whole number always fits the int32 of a tensor.
"""

from collections.abc import Callable, Sequence
import math
import os

from absl import flags

from tff_meta import spelling

flags.disclaim_key_flags()  # A flag belongs to the module that asks for it.

_INT32_END = 2**31


def read_path(path: str) -> str:
  """Returns a path with `~` or `~user` at its beginning made a directory.

  Shells leave it alone behind `--name=`. A folder that is called like this can
  be given as `./~name`.

  Args:
    path: Any path.

  Raises:
    ValueError: If there is no home directory of this name, or the path is not
      UTF-8, which is all that TensorFlow reads and writes, or there is none.
  """
  if not path:
    raise ValueError('expected a path, found none')
  try:
    path.encode()
  except UnicodeEncodeError:
    raise ValueError('expected a path in UTF-8') from None
  expanded = os.path.expanduser(path)
  if expanded.startswith('~'):
    raise ValueError(
        f'expected {path.split("/")[0]} to be a home directory, found none'
    )
  return expanded


class _Parser(flags.ArgumentParser):
  """Reads a flag's text with a function."""

  def __init__(self, read: Callable[[str], object], kind: str):
    super().__init__()
    self._read = read
    self._kind = kind

  def parse(self, argument):
    """Returns the value of a text, and a default as it is."""
    return self._read(argument) if isinstance(argument, str) else argument

  def flag_type(self) -> str:
    """Returns what the help calls it."""
    return self._kind


class _ListParser(flags.ListParser):
  """Reads names with commas between them, none of them empty.

  A flag that is given and empty would be as if it was not given: all there is.
  """

  def parse(self, argument) -> list[str]:
    """Returns the names of a text, and a default as it is."""
    names = super().parse(argument)
    if isinstance(argument, str) and not (names and all(names)):
      raise ValueError(
          'expected names with commas between them, found'
          f' {"an empty one" if names else "none"}'
      )
    return names

  def flag_type(self) -> str:
    """Returns what the help calls it."""
    return 'list'


class _PathsParser(_ListParser):
  """Reads paths with commas between them."""

  def parse(self, argument) -> list[str]:
    """Returns the paths."""
    return [read_path(path) for path in super().parse(argument)]


def define_path(
    name: str, default: str | None, help_text: str
) -> flags.FlagHolder:
  """Defines a flag that holds a path."""
  parser = _Parser(read_path, 'path')
  return flags.DEFINE(parser, name, default, help_text)


def define_list(name: str, help_text: str) -> flags.FlagHolder:
  """Defines a flag that holds a list of names, none where it is not given."""
  return _define_list(_ListParser(), name, help_text)


def define_paths(name: str, help_text: str) -> flags.FlagHolder:
  """Defines a flag that holds a list of paths, none where it is not given."""
  return _define_list(_PathsParser(), name, help_text)


def _define_list(
    parser: _ListParser, name: str, help_text: str
) -> flags.FlagHolder:
  serializer = flags.CsvListSerializer(',')
  return flags.DEFINE(parser, name, [], help_text, serializer=serializer)


def _plain(text: str) -> str:
  """Returns the text of a number; raises a ValueError if it is not plain."""
  if not spelling.is_plain(text):
    raise ValueError
  return text


def define_whole_number(
    name: str, default: int | None, help_text: str, least: int = 0
) -> flags.FlagHolder:
  """Defines a flag that holds a whole number below 2**31.

  Args:
    name: Of the flag.
    default: Its value where it is not given.
    help_text: What it means.
    least: Its least value.
  """

  def read(text: str) -> int:
    try:
      value = int(_plain(text))
    except ValueError:
      raise ValueError('expected a whole number') from None
    if not least <= value < _INT32_END:
      raise ValueError(
          f'expected a whole number of at least {least} and below 2**31'
      )
    return value

  return flags.DEFINE(_Parser(read, 'whole number'), name, default, help_text)


def define_number(
    name: str, default: float | None, help_text: str
) -> flags.FlagHolder:
  """Defines a flag that holds a finite number."""

  def read(text: str) -> float:
    try:
      value = float(_plain(text))
    except ValueError:
      raise ValueError(
          'expected a number, with a point before its decimals'
      ) from None
    if not math.isfinite(value):
      raise ValueError('expected a finite number')
    return value

  return flags.DEFINE(_Parser(read, 'number'), name, default, help_text)


def define_choice_or_all(
    name: str, choices: Sequence[str], help_text: str
) -> flags.FlagHolder:
  """Defines a flag that is one of some choices, or given without any.

  Args:
    name: Of the flag.
    choices: What `--name=CHOICE` takes.
    help_text: What it means.

  Returns:
    The flag: None where it is not given, `'all'` for `--name` alone.
  """

  def read(text: str) -> str | None:
    known = {'true': 'all', 'false': None} | {c: c for c in choices}
    if text not in known:
      raise ValueError(
          f'expected one of {", ".join(choices)}.'
          f'{spelling.tip(text, choices)}'.rstrip('?.')
      )
    return known[text]

  parser = _Parser(read, 'choice')
  # `boolean`: it takes no value from the next argument.
  return flags.DEFINE_flag(
      flags.Flag(parser, None, name, None, help_text, boolean=True)
  )
