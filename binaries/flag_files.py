"""Flag files: a flag a line, written on whatever system.

As absl has them, but that a file names others relative to its own folder, that
one of ours (`binaries/presets/...`) is found from every folder, and that a file
is UTF-8, with or without a byte-order mark, wherever it is read.
"""

from collections.abc import Sequence
import os
import pathlib
import re

from binaries import flag_kinds
from tff_meta import spelling

_PRESETS = pathlib.Path('binaries', 'presets')
_ROOT = pathlib.Path(__file__).resolve().parents[1]
# UTF-32's first: one of them begins as UTF-16's does.
_OTHER_MARKS = {
    b'\xff\xfe\x00\x00': 'UTF-32',
    b'\x00\x00\xfe\xff': 'UTF-32',
    b'\xff\xfe': 'UTF-16',
    b'\xfe\xff': 'UTF-16',
}
_TIP = 'Tip: save it as UTF-8.'


def preset(name: str) -> str:
  """Returns the flag that reads a flag file of ours.

  Args:
    name: Of the file in `binaries/presets`, without its ending.
  """
  return f'--flagfile={_ROOT / _PRESETS / name}.flags'


def expand(arguments: Sequence[str]) -> list[str]:
  """Returns arguments with flag files replaced by what they say.

  Args:
    arguments: Of a command line, without the program's name. Relative names of
      flag files are those of the working directory.

  Raises:
    ValueError: If a file is not one of flags, or includes itself.
    OSError: If a file cannot be read.
  """
  return _expand(list(arguments), pathlib.Path(), ())


def _expand(arguments, folder, files_above) -> list[str]:
  expanded: list[str] = []
  rest = iter(arguments)
  for argument in rest:
    if argument == '--':
      return [*expanded, argument, *rest]
    name, equals, value = argument.partition('=')
    if name not in ('--flagfile', '-flagfile'):
      expanded.append(argument)
      continue
    value = (value if equals else next(rest, '')).strip()
    if not value:
      raise ValueError('Expected --flagfile to name a file, found none.')
    path = _find(flag_kinds.read_path(value), folder)
    if path in files_above:
      raise ValueError(f'Expected {path} not to include itself.')
    expanded += _expand(_lines(path), path.parent, (*files_above, path))
  return expanded


def _find(name: str, folder: pathlib.Path) -> pathlib.Path:
  """Returns where the flag file is that is called so in a folder."""
  path = pathlib.Path(os.path.abspath(folder / name))
  if pathlib.Path(name).parent != _PRESETS or path.exists():
    return path
  known = [p.name for p in sorted((_ROOT / _PRESETS).glob('*.flags'))]
  if path.name not in known:
    raise FileNotFoundError(
        f'Expected a flag file of this library, found no {name}.'
        f'{spelling.tip(path.name, known)}'
    )
  return _ROOT / _PRESETS / path.name


def _lines(path: pathlib.Path) -> list[str]:
  """Returns the flags of a file, its comments left out."""
  try:
    text = _decode(path.read_bytes())
  except ValueError as error:
    raise ValueError(f'Expected {path} to be UTF-8, found {error}') from None
  except OSError as error:
    raise OSError(
        f'Expected to read the flag file {path}, found {error.strerror}.'
    ) from None
  found = []
  for number, line in enumerate(re.split('\r\n|\r|\n', text), 1):
    line = line.strip()
    if not line or line.startswith(('#', '//')):
      continue
    if not line.startswith('-'):
      raise ValueError(
          f'Expected lines of {path} to be flags that begin with --, or'
          f' comments that begin with #, found {line!r} in line {number}.'
      )
    found.append(line)
  return found


def _decode(content: bytes) -> str:
  """Returns the text of a file; a ValueError says what else it is."""
  for mark, encoding in _OTHER_MARKS.items():
    if content.startswith(mark):
      raise ValueError(f'{encoding}. {_TIP}')
  try:
    text = content.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    text = content[: error.start].decode('utf-8-sig')
    raise ValueError(
        f'byte 0x{content[error.start]:02x} in line {_num_lines(text)}. {_TIP}'
    ) from None
  if '\0' in text:
    line = _num_lines(text[: text.index('\0')])
    raise ValueError(f'a NUL in line {line}, as UTF-16 has them. {_TIP}')
  return text


def _num_lines(text: str) -> int:
  return len(re.split('\r\n|\r|\n', text))
