"""Hyperparameters and options from text: `name=value,...`."""

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import dataclasses
import inspect
import math
import re
import types
import typing
from typing import Any, TYPE_CHECKING, TypeVar

from tff_meta import config_checks
from tff_meta import spelling

if TYPE_CHECKING:
  from _typeshed import DataclassInstance

_ConfigT = TypeVar('_ConfigT', bound='DataclassInstance')
_BOOLS = {'true': True, '1': True, 'false': False, '0': False}


def override(config: _ConfigT, text: str, of: str | None = None) -> _ConfigT:
  """Returns `config` with the fields named in `text` replaced.

  Args:
    config: An instance of a frozen dataclass.
    text: As for `parse`.
    of: As for `parse`; None for the dataclass.

  Raises:
    ValueError: As `parse`, or if the dataclass refuses a value.
  """
  kind = type(config)
  values = parse(text, _hints(kind), of=of or kind.__name__)
  return dataclasses.replace(config, **values)


def check(kind: type, text: str, of: str) -> None:
  """Raises a ValueError, as `parse`, if a dataclass has no such fields.

  Args:
    kind: The dataclass.
    text: As for `parse`.
    of: Whose names these are, for errors.
  """
  parse(text, _hints(kind), of)


def _hints(kind: type) -> dict[str, Any]:
  """Returns the annotations of the fields of a dataclass that can be given."""
  hints = typing.get_type_hints(kind)
  return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def parse_options(
    function: Callable[..., Any], num_leading: int, text: str
) -> dict[str, Any]:
  """Returns all keyword arguments for `function`, those in `text` changed.

  Args:
    function: A function with annotated parameters.
    num_leading: How many of its first parameters are no options.
    text: As for `parse`.

  Raises:
    TypeError: If a parameter has no annotation, or collects others.
    ValueError: As `parse`, or if an option without a default is not given.
  """
  parameters = list(inspect.signature(function).parameters.values())
  options = {p.name: p.default for p in parameters[num_leading:]}
  hints = typing.get_type_hints(function)
  for parameter in parameters[num_leading:]:
    collects = parameter.kind in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )
    if collects or parameter.name not in hints:
      raise TypeError(
          f'Expected every option of {function.__qualname__} as a parameter'
          f' with an annotation, such as `{parameter.name}: float = 1.0`, found'
          f' `{parameter}`.'
      )
  given = parse(text, {n: hints[n] for n in options}, of=function.__qualname__)
  options |= given
  for name, value in options.items():
    if value is inspect.Parameter.empty:
      raise ValueError(
          f'Expected a value for option `{name}` of {function.__qualname__},'
          ' found none.'
      )
  return options


def parse(text: str, hints: Mapping[str, Any], of: str) -> dict[str, Any]:
  """Reads `name=value,...`.

  Args:
    text: The assignments; may be empty.
    hints: Known name -> annotation, which says how the value is read: int,
      float, bool (true or false), str, `Literal` choices, `T | None` (none),
      and tuples written as `(1,2,3)`.
    of: Whose names these are, for errors.

  Returns:
    Name -> value.

  Raises:
    TypeError: If values are not read by such an annotation.
    ValueError: If a name is unknown or comes twice, or a value has the wrong
      type.
  """
  assigned = assignments(text, hints, of)
  return {n: _parse(n, value, hints[n]) for n, value in assigned.items()}


def meanings(kind: type) -> dict[str, str]:
  """Returns what the fields of a dataclass mean, in their order.

  Args:
    kind: The dataclass. The last class in whose docstring a field stands under
      `Attributes:` says it, itself or a base.

  Returns:
    Name -> text, whose further lines are indented; '' where nothing is told.
  """
  found: dict[str, str] = {}
  for base in reversed(kind.__mro__):
    found |= _described(base, 'Attributes:\n')
  return {f.name: found.get(f.name, '') for f in dataclasses.fields(kind)}


def option_meanings(
    function: Callable[..., Any], num_leading: int
) -> dict[str, str]:
  """Returns what the options of a function mean, with their defaults.

  Args:
    function: As for `parse_options`. Its docstring has them under `Args:`.
    num_leading: As for `parse_options`.

  Returns:
    `name=default` -> text, '' where nothing is told.
  """
  told = _described(function, 'Args:\n')
  parameters = list(inspect.signature(function).parameters.values())
  shown = {}
  for option in parameters[num_leading:]:
    default: Any = option.default
    if default is inspect.Parameter.empty:
      default = '...'
    shown[f'{option.name}={default}'] = told.get(option.name, '')
  return shown


def _described(documented: Any, heading: str) -> dict[str, str]:
  """Returns what a docstring says of names under a heading."""
  text = inspect.cleandoc(documented.__doc__ or '').partition(heading)[2]
  text = re.split(r'^(?=\S)', text, flags=re.MULTILINE)[0]  # Up to the next.
  found = {}
  for entry in re.split(r'^  (?=\w+: )', text, flags=re.MULTILINE):
    name, colon, meaning = entry.partition(': ')
    if colon:
      found[name] = meaning.rstrip()
  return found


def parse_augmentation(text: str) -> dict[str, Any] | None:
  """Returns the fields that `text` gives, the others as they leave images.

  Args:
    text: As for `parse`, fields of `augmentation.CropAndFlip` but `fill`.

  Returns:
    Field -> value; None if images stay as they are.

  Raises:
    ValueError: As `parse`.
  """
  hints = {'crop_padding': int, 'flip': bool}
  given = parse(text, hints, of='augmentation')
  off = {'crop_padding': 0, 'flip': False}
  return None if off | given == off else off | given


def assignments(text: str, known: Collection[str], of: str) -> dict[str, str]:
  """Returns name -> value as it is written; `parse` reads the values, too.

  Raises:
    ValueError: If a name is not `known` or comes twice.
  """
  values = {}
  for assignment in split(text):
    name, equals, value = (x.strip() for x in assignment.partition('='))
    if not equals:
      raise ValueError(
          f'Expected `name=value,...`, found {assignment!r}. Tip: decimals have'
          ' a point before them, and lists are written as (1,2).'
      )
    if name not in known:
      raise ValueError(
          f'Expected an option of {of}, found {name!r}. Known:'
          f' {", ".join(known) or "none"}.{spelling.tip(name, known)}'
      )
    if name in values:
      raise ValueError(f'Expected `{name}` once, found it twice.')
    values[name] = value
  return values


def split(text: str) -> list[str]:
  """Returns the assignments of `name=value,...`: commas in parentheses stay.

  Raises:
    ValueError: If a parenthesis has no other one.
  """
  parts, depth = [''], 0
  for char in text:
    depth += (char == '(') - (char == ')')
    if depth < 0:
      break
    if char == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += char
  if depth:
    raise ValueError(
        'Expected every parenthesis to be opened and closed, found'
        f' {text!r}.'
    )
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
      expected = f'one of {", ".join(choices)}'
      raise _error(name, expected, text, spelling.tip(text, choices))
    return choices[text]
  if origin in (tuple, Sequence):
    return _parse_tuple(name, text, arguments)
  if hint is bool:
    if text.lower() not in _BOOLS:
      raise _error(name, 'true or false', text)
    return _BOOLS[text.lower()]
  if hint is str:
    return text
  if hint is int:
    return whole_number(name, text)
  if hint is float:
    return _parse_number(name, text)
  raise TypeError(
      f'Expected the annotation of `{name}` to be int, float, bool, str, a'
      f' Literal, one of them `| None`, or a tuple of them, found {hint}.'
  )


def whole_number(name: str, text: str, least: int = 0) -> int:
  """Returns the whole number of a text; all of this library are counts.

  Args:
    name: Of what has it, for the error.
    text: The number.
    least: The least that it may be.

  Raises:
    ValueError: If it is something else.
  """
  with contextlib.suppress(ValueError):
    if spelling.is_plain(text) and least <= int(text) < config_checks.INT32_END:
      return int(text)
  expected = f'a whole number of at least {least} and below 2**31'
  raise _error(name, expected, text, f' Tip: as in {name}=10.')


def _parse_number(name: str, text: str) -> float:
  """Returns a finite number."""
  with contextlib.suppress(ValueError):
    if spelling.is_plain(text) and math.isfinite(float(text)):
      return float(text)
  raise _error(
      name, 'a finite number', text, f' Tip: as in {name}=0.1 or {name}=1e-3.'
  )


def _parse_tuple(name: str, text: str, arguments: Sequence[Any]) -> tuple:
  """Returns the tuple that `text`, e.g. `(1,2,3)`, means."""
  if text.startswith('(') and text.endswith(')'):
    text = text[1:-1]
  items = split(text)
  if len(arguments) == 2 and arguments[1] is Ellipsis:
    arguments = [arguments[0]] * len(items)
  if len(items) != len(arguments):
    raise _error(name, f'{len(arguments)} values like (1,2)', text)
  pairs = zip(items, arguments, strict=True)
  return tuple(_parse(name, item, hint) for item, hint in pairs)


def _error(name: str, expected: str, found: str, tip: str = '') -> ValueError:
  return ValueError(
      f'Expected `{name}` to be {expected}, found {found!r}.{tip}'
  )
