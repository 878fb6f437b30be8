"""Names that somebody may have meant."""

from collections.abc import Iterable
import difflib


def tip(name: str, known: Iterable[str]) -> str:
  """Returns ` Tip: did you mean 'fed_rep'?` for `fedrep`, or nothing.

  Capitals, spaces, dashes and underscores make no difference.

  Args:
    name: What was given, which is not known.
    known: All names.

  Returns:
    A sentence with a space before it, or an empty string.
  """
  by_letters = {_letters(k): k for k in known}
  found = difflib.get_close_matches(_letters(name), by_letters, n=1)
  return f' Tip: did you mean {by_letters[found[0]]!r}?' if found else ''


def _letters(name: str) -> str:
  return ''.join(c for c in name.lower() if c not in ' -_')
