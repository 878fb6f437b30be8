"""Checks that the algorithms' configurations share."""

from collections.abc import Callable, Mapping
import dataclasses
import math
import operator
import os
import typing
from typing import Any

import numpy as np

INT32_END = 2**31  # What is a tensor of int32 stays below.
# Between them numbers are float32 with all digits: beyond one is infinite, and
# nearer to 0 one becomes 0.
_LEAST_FLOAT32 = 2.0**-126
_LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
# Kind of an annotation -> whether a value is of it, and what it is called.
_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda v: isinstance(v, bool), 'True or False'),
    int: (lambda v: type(v) is int, 'a whole number'),
    float: (
        lambda v: type(v) in (int, float) and abs(v) < math.inf,
        'a finite number',
    ),
    str: (lambda v: isinstance(v, str), 'text'),
    tuple: (
        lambda v: isinstance(v, tuple) and all(isinstance(x, str) for x in v),
        'a tuple of texts',
    ),
    Mapping: (lambda v: isinstance(v, Mapping), 'a mapping'),
}


def check_fields(config: Any) -> None:
  """Checks every field of a configuration against its annotation.

  A `Literal` field holds one of its choices, a `bool` field a bool, an `int`
  field a whole number of at least 0 that is an int32, and a `float` field a
  number of at least 0 that is a float32: no hyper-parameter of this library is
  negative, and TensorFlow computes with these types.

  Args:
    config: A dataclass instance.

  Raises:
    TypeError: If a field has another annotation, or the class has fields of its
      own and no decorator, without which they are none.
    ValueError: If a field holds anything else.
  """
  kind = type(config)
  hints = typing.get_type_hints(kind)
  fields = {field.name for field in dataclasses.fields(config)}
  lost = [
      name
      for name, hint in hints.items()
      if name not in fields
      and typing.ClassVar not in (hint, typing.get_origin(hint))
  ]
  if lost:
    raise TypeError(
        f'Expected {kind.__name__}, and what it derives from, to be frozen'
        f' dataclasses, found {", ".join(lost)} in a class without the'
        ' decorator.'
    )
  for field in dataclasses.fields(config):
    value, hint = getattr(config, field.name), hints[field.name]
    if typing.get_origin(hint) is typing.Literal:
      choices = typing.get_args(hint)
      # True equals 1 but is no choice of it.
      valid = any(type(value) is type(c) and value == c for c in choices)
      expected = f'one of {", ".join(map(repr, choices))}'
    elif hint is bool:
      valid, expected = isinstance(value, bool), 'True or False'
    elif hint is int:
      valid = type(value) is int and 0 <= value < INT32_END
      expected = 'a whole number of at least 0 and below 2**31'
    elif hint is not float:
      raise TypeError(
          f'Expected the field `{field.name}` of {kind.__name__} to be'
          f' annotated as bool, int, float or a Literal, found {hint}.'
      )
    else:
      valid = type(value) in (int, float) and (
          value == 0 or _LEAST_FLOAT32 <= value <= _LARGEST_FLOAT32
      )
      expected = 'a number of at least 0: 0, or from 1.2e-38 to 3.4e38'
    if not valid:
      raise ValueError(
          f'Expected `{field.name}` as {expected}, found {value!r}.'
      )


def check_kind(name: str, value: Any, hint: Any) -> None:
  """Checks that a value is of the kind of an annotation, whatever its range.

  Args:
    name: Of the field, for the error.
    value: What it holds. A bool is no number, and a number of NumPy none of
      Python, see `to_python`.
    hint: `bool`, `int`, `float`, `str`, `tuple[str, ...]`, a mapping, or one of
      them `| None`. Values of other annotations are not looked at.

  Raises:
    ValueError: If it is of another kind.
  """
  arguments = typing.get_args(hint)
  is_optional = type(None) in arguments
  if is_optional:
    if value is None:
      return
    (hint,) = (a for a in arguments if a is not type(None))
  kind = typing.get_origin(hint) or hint
  if kind not in _KINDS:
    return
  is_of_kind, expected = _KINDS[kind]
  if not is_of_kind(value):
    raise ValueError(
        f'Expected `{name}` to be {expected}{" or None" * is_optional}, found'
        f' {value!r}.'
    )


def to_python(value: Any) -> Any:
  """Returns NumPy's numbers as Python's, paths as text, others as they are."""
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  return value.item() if isinstance(value, np.generic) else value


def check_seed(seed: Any) -> None:
  """Checks that a seed is one: a whole number, 0..2**31-1.

  Args:
    seed: What was given, a Python or a NumPy number.

  Raises:
    ValueError: If it is anything else.
  """
  try:
    valid = 0 <= operator.index(seed) < INT32_END
  except TypeError:
    valid = False
  if not valid:
    raise ValueError(
        'Expected `seed` as a whole number of at least 0 and below 2**31, found'
        f' {seed!r}.'
    )


def check_at_least_one(config: Any, name: str) -> None:
  """Checks that a field is at least 1.

  Args:
    config: A dataclass instance.
    name: The field.

  Raises:
    ValueError: If it is smaller.
  """
  value = getattr(config, name)
  if value < 1:
    raise ValueError(f'Expected `{name}` of at least 1, found {value}.')


def check_fraction(config: Any, name: str) -> None:
  """Checks that a field is strictly between 0 and 1.

  Args:
    config: A dataclass instance.
    name: The field.

  Raises:
    ValueError: If it is not.
  """
  value = getattr(config, name)
  if not 0 < value < 1:
    raise ValueError(
        f'Expected `{name}` between 0 and 1, both excluded, found {value}.'
    )


def check_client_optimizer_state(config: Any) -> None:
  """Checks that clients that keep an optimizer's state have one to keep.

  Args:
    config: Has the fields `client_optimizer_state`, `optimizer` and `momentum`.

  Raises:
    ValueError: If the state is to persist and there is none.
  """
  persists = config.client_optimizer_state == 'persist'
  if persists and config.optimizer == 'sgd' and not config.momentum:
    raise ValueError(
        "Expected `client_optimizer_state` as 'reset' where the optimizer is"
        " SGD without momentum, which has nothing to keep, found 'persist'."
    )


def check_pull(config: Any, name: str) -> None:
  """Checks that a pull towards other weights does not overshoot for good.

  Args:
    config: Has the field `proximal_weight`, the strength of the pull.
    name: The field of the learning rate of what is pulled.

  Raises:
    ValueError: If the two multiply to 2 or more.
  """
  rate = getattr(config, name)
  if rate * config.proximal_weight >= 2:
    raise ValueError(
        f'Expected `proximal_weight` times `{name}` below 2, found'
        f' {config.proximal_weight} times {rate}: the pull alone would make'
        ' models diverge.'
    )
