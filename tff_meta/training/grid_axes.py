"""The axes of a grid as they are given, see `grids`, without TensorFlow."""

from collections.abc import Mapping, Sequence
import itertools
import re
from typing import Any

from tff_meta import registry
from tff_meta import spelling
from tff_meta.training import protocol_names

GROUP_ROUNDS = 'group_rounds'
# Axes that are no hyperparameters -> how they are read.
OWN_AXES = {
    'group_clients': int,
    'way': int,
    'eval_shots': int,
    'eval_support_fraction': float,
}


def read_axes(
    text: str, spec: registry.AlgorithmSpec
) -> dict[str, tuple[str, ...]]:
  """Reads `axis=value,value;axis=value`, without TensorFlow.

  Args:
    text: The axes: one of `group_rounds`, `group_clients`, `way`, `eval_shots`
      and `eval_support_fraction`, or a field of the algorithm's configuration.
    spec: The algorithm.

  Returns:
    Axis -> its values as they are written, at least one.

  Raises:
    ValueError: If an axis is unknown, comes twice or has no values, or a value
      is empty or comes twice.
  """
  known = axes_of(spec)
  axes: dict[str, tuple[str, ...]] = {}
  for part in text.split(';'):
    name, equals, written = (x.strip() for x in part.partition('='))
    if not equals:
      raise ValueError(
          'Expected --grid as `axis=value,value;axis=value`, found'
          f' {part.strip()!r}. Tip: --grid="way=2,5;group_clients=5,10".'
      )
    if name not in known:
      raise ValueError(
          f'Expected axes of --grid that {spec.name} has:'
          f' {", ".join(known)}; found {name!r}.{spelling.tip(name, known)}'
      )
    if name in axes:
      raise ValueError(f'Expected the axis {name} of --grid once, found twice.')
    # Commas in parentheses belong to a value.
    values = tuple(v.strip() for v in re.split(r',(?![^(]*\))', written))
    if not all(values):
      raise ValueError(
          f'Expected values of the axis {name} of --grid, found'
          f' {written!r}, of which {"all are" if not written else "one is"}'
          ' empty.'
      )
    axes[name] = values
  return axes


def axes_of(spec: registry.AlgorithmSpec) -> tuple[str, ...]:
  """Returns the axes that an algorithm has."""
  others = (
      spec.group_rounds_field,
      spec.num_clients_field,
      *spec.run_settings.values(),
  )
  return (
      *([GROUP_ROUNDS] if spec.group_rounds_field else []),
      *OWN_AXES,
      *(n for n in spec.hparam_names() if n not in (*others, *OWN_AXES)),
  )


def check_protocols(axes: Mapping[str, Any], names: Sequence[str]) -> None:
  """Raises a ValueError if a protocol to be run does not have one of the axes.

  Args:
    axes: From `read_axes`.
    names: Names of protocols.
  """
  if axes and tuple(names) == (protocol_names.NONE,):
    raise ValueError(
        'Expected protocols to evaluate with --grid, found none. Tip:'
        f' --protocol={protocol_names.NEW_GROUPS}.'
    )
  for axis, name in itertools.product(axes, names):
    having = protocol_names.having(axis)
    if name not in having:
      raise ValueError(
          f'Expected axes of --grid that {name} has, found {axis!r}, which is'
          f' of {", ".join(having)}. Tip: --protocol={having[0]}.'
      )
