"""Hyperparameters from text: `name=value,...` onto a frozen dataclass."""

from collections.abc import Sequence
import dataclasses
import types
import typing
from typing import Any, TypeVar

_T = TypeVar('_T')
_BOOLS = {'true': True, '1': True, 'false': False, '0': False}


def override(config: _T, text: str) -> _T:
  """Returns `config` with the fields named in `text` replaced.

  Args:
    config: An instance of a frozen dataclass; its annotations say how values
      are read: int, float, bool (true or false), str, `Literal` choices,
      `T | None` (none), and tuples written as `(1,2,3)`.
    text: `name=value,...`; may be empty.

  Raises:
    ValueError: If a name is unknown, a value has the wrong type, or the
      dataclass refuses a value.
  """
  hints = typing.get_type_hints(type(config))
  known = {f.name: hints[f.name] for f in dataclasses.fields(config) if f.init}
  values = {}
  for assignment in _split(text):
    name, equals, value = (x.strip() for x in assignment.partition('='))
    if not equals:
      raise ValueError(
          f'Expected hyperparameters as `name=value,...`, found {assignment!r}.'
      )
    if name not in known:
      raise ValueError(
          f'Expected a hyperparameter of {type(config).__name__}, found'
          f' {name!r}. Known: {", ".join(known)}.'
      )
    if name in values:
      raise ValueError(f'Expected hyperparameter `{name}` once, found twice.')
    values[name] = _parse(name, value, known[name])
  return dataclasses.replace(config, **values)


def _split(text: str) -> list[str]:
  """Returns the parts of `text` between commas outside of parentheses."""
  parts, depth = [''], 0
  for char in text:
    depth += (char == '(') - (char == ')')
    if char == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += char
  return [part for part in (p.strip() for p in parts) if part]


def _parse(name: str, text: str, hint: Any) -> Any:
  """Returns the value that `text` means for a field annotated with `hint`."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin in (types.UnionType, typing.Union):
    if type(None) in arguments and text.lower() == 'none':
      return None
    (inner,) = (a for a in arguments if a is not type(None))
    return _parse(name, text, inner)
  if origin is typing.Literal:
    choices = {str(choice): choice for choice in arguments}
    if text not in choices:
      raise _error(name, f'one of {", ".join(choices)}', text)
    return choices[text]
  if origin in (tuple, Sequence):
    return _parse_tuple(name, text, arguments)
  if hint is bool:
    if text.lower() not in _BOOLS:
      raise _error(name, 'true or false', text)
    return _BOOLS[text.lower()]
  if hint is str:
    return text
  try:
    return {int: int, float: float}[hint](text)
  except ValueError:
    kind = {int: 'a whole number', float: 'a number'}[hint]
    raise _error(name, kind, text) from None


def _parse_tuple(name: str, text: str, arguments: Sequence[Any]) -> tuple:
  """Returns the tuple that `text`, e.g. `(1,2,3)`, means."""
  items = [x.strip() for x in text.strip('()').split(',') if x.strip()]
  if len(arguments) == 2 and arguments[1] is Ellipsis:
    arguments = arguments[:1] * len(items)
  if len(items) != len(arguments):
    raise _error(name, f'{len(arguments)} values like (1,2)', text)
  pairs = zip(items, arguments, strict=True)
  return tuple(_parse(name, item, hint) for item, hint in pairs)


def _error(name: str, expected: str, found: str) -> ValueError:
  return ValueError(
      f'Expected hyperparameter `{name}` to be {expected}, found {found!r}.'
  )
