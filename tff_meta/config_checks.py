"""Checks that the algorithms' configurations share."""

import dataclasses
import typing


def check_choices(config) -> None:
  """Checks every field that is annotated `Literal[...]`.

  Args:
    config: A dataclass instance.

  Raises:
    ValueError: If a value is not among its field's choices.
  """
  hints = typing.get_type_hints(type(config))
  for field in dataclasses.fields(config):
    if typing.get_origin(hints[field.name]) is not typing.Literal:
      continue
    choices = typing.get_args(hints[field.name])
    value = getattr(config, field.name)
    if value not in choices:
      raise ValueError(
          f'Expected `{field.name}` to be one of'
          f' {", ".join(map(repr, choices))}, found {value!r}.'
      )


def check_at_least(config, minimum: float, *names: str) -> None:
  """Checks that fields are finite and not below a minimum.

  Args:
    config: A dataclass instance.
    minimum: The least value allowed.
    *names: Fields to check.

  Raises:
    ValueError: If one is smaller, infinite or NaN.
  """
  for name in names:
    value = getattr(config, name)
    if not minimum <= value < float('inf'):
      raise ValueError(
          f'Expected `{name}` to be at least {minimum}, found {value}.'
      )


def check_fraction(config, name: str) -> None:
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
