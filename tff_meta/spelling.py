"""Names that somebody may have meant, and how numbers are written."""

from collections.abc import Iterable, Mapping
import re

_FLAG = re.compile(r'--(?P<name>[a-z][a-z0-9_]*)(=(?P<value>\S*[^\s.,;:)]))?')


def tip(name: str, known: Iterable[str]) -> str:
  """Returns ` Tip: did you mean 'fed_rep'?` for `fedrep`, or nothing.

  Capitals, spaces, dashes and underscores make no difference, nor do f and ph.
  One slip in up to seven letters, two in up to eleven and so on, is a misspelt
  name; so is its beginning, if it has three letters, and its initials: `lr` is
  `learning_rate`. What is further away may well be something that there is not:
  FedProx is not FedProto.

  Args:
    name: What was given, which is not known.
    known: All names.

  Returns:
    A sentence with a space before it, or an empty string.
  """
  given, known = _letters(str(name)), list(known)
  if len(given) < 2:
    return ''
  slips = {k: _num_slips(given, _letters(k)) for k in known}
  nearest = min(slips, key=lambda k: (slips[k], len(k)), default=None)
  allowed = max(1, len(given) // 4) if len(given) > 2 else 0
  if nearest is None or slips[nearest] > allowed:
    begun = [k for k in known if _letters(k).startswith(given)]
    initial = [k for k in known if _initials(k) == given]
    if len(given) < 3:
      begun = []
    nearest = next(iter(begun + initial), None)
  return '' if nearest is None else f' Tip: did you mean {nearest!r}?'


def counted(count: float, noun: str) -> str:
  """Returns `1 client`, or `2 clients`.

  Args:
    count: A whole number.
    noun: Singular, of which the plural ends with s.
  """
  return f'{count:.0f} {noun}' + ('' if count == 1 else 's')


def as_keywords(message: str, keywords: Mapping[str, str]) -> str:
  """Returns a message about flags as one about arguments of a function.

  `Tip: --partition=shards` becomes ``Tip: `partition='shards'```. What stands
  between backticks, such as a command, is left as it is.

  Args:
    message: For who uses the programs.
    keywords: Flag -> the argument; other flags are left as they are.
  """

  def as_keyword(flag):
    name, value = flag['name'], flag['value']
    if name not in keywords and name.startswith('no'):
      name, value = name[2:], 'False'
    if name not in keywords:
      return flag[0]
    name = keywords[name]
    if value is None:
      return f'`{name}`'
    is_python = value in ('True', 'False') or re.fullmatch(r'[-\d.]+', value)
    return f'`{name}={value if is_python else repr(value)}`'

  parts = message.split('`')
  parts[::2] = [_FLAG.sub(as_keyword, part) for part in parts[::2]]
  return '`'.join(parts)


def is_plain(number: str) -> bool:
  """Returns whether a number is ASCII without underscores.

  Python's `int` and `float` read `1_0` as 10, and the digits of all scripts.
  """
  return number.isascii() and '_' not in number


def _letters(name: str) -> str:
  letters = ''.join(c for c in name.lower() if c not in ' -_')
  return letters.replace('ph', 'f')


def _initials(name: str) -> str:
  return ''.join(word[0] for word in re.findall('[a-z0-9]+', name.lower()))


def _num_slips(one: str, other: str) -> int:
  """Returns how many letters to change, drop, add or swap with the next.

  Source: Damerau, A Technique for Computer Detection and Correction of Spelling
    Errors, Communications of the ACM, 1964.
  """
  above: list[int] = []
  row = list(range(len(other) + 1))
  for i, letter in enumerate(one, 1):
    before, above, row = above, row, [i]
    for j, wanted in enumerate(other, 1):
      slips = min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != wanted))
      if i > 1 and j > 1 and (one[i - 2], letter) == (wanted, other[j - 2]):
        slips = min(slips, before[j - 2] + 1)
      row.append(slips)
  return row[-1]
