"""Configurations name the field and the value that cannot be."""

import dataclasses
import re
import typing
from typing import ClassVar, Literal

import numpy as np
import pytest

from tff_meta import config_checks
from tff_meta import registry


@dataclasses.dataclass(frozen=True)
class Config:
  mode: Literal['slow', 'fast'] = 'slow'
  on: bool = False
  steps: int = 3
  rate: float = 0.5

  def __post_init__(self):
    config_checks.check_fields(self)


def wrong_values(hint):
  """Values that a field of this annotation must refuse."""
  if typing.get_origin(hint) is Literal:
    similar = str(typing.get_args(hint)[0]).upper()
    return ['neither', similar, None, 0, True]
  return {
      bool: [0, 1, 'True', None],
      int: [-1, 2**31, 10**15, 2.0, 1.5, '3', True, None],
      float: [-0.1, float('nan'), float('inf'), 1e39, 1e-50, '0.1', None],
  }[hint]


def cases():
  """All wrong values of all fields of every kind of configuration."""
  configs = [Config()]
  configs += [spec.presets['paper'] for spec in registry.ALGORITHMS.values()]
  for kind, config in {type(config): config for config in configs}.items():
    name = kind.__name__
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
      yield pytest.param(
          config,
          field.name,
          wrong_values(hints[field.name]),
          id=f'{name}-{field.name}',
      )


@pytest.mark.parametrize('config, field, values', cases())
def test_a_wrong_value_is_named_with_its_field(config, field, values):
  for value in values:
    message = f'`{field}`.*found {re.escape(repr(value))}'
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(config, **{field: value})


@pytest.mark.parametrize(
    'change',
    [
        *({'mode': 'fast'}, {'on': True}, {'steps': 0}, {'steps': 2**31 - 1}),
        *({'rate': 0}, {'rate': 2.5}, {'rate': 3.4e38}, {'rate': 1.2e-38}),
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_allowed(change):
  ((name, value),) = change.items()
  assert getattr(dataclasses.replace(Config(), **change), name) == value


def test_choices_are_listed():
  with pytest.raises(ValueError, match="one of 'slow', 'fast', found 'fats'"):
    Config(mode='fats')


def test_at_least_one():
  config_checks.check_at_least_one(Config(steps=1), 'steps')
  with pytest.raises(ValueError, match='`steps` of at least 1, found 0'):
    config_checks.check_at_least_one(Config(steps=0), 'steps')


@pytest.mark.parametrize('rate', [0.0, 1.0, 1.5])
def test_a_fraction_excludes_its_ends(rate):
  config_checks.check_fraction(Config(rate=0.999), 'rate')
  with pytest.raises(ValueError, match=f'`rate` between 0 and 1.*found {rate}'):
    config_checks.check_fraction(Config(rate=rate), 'rate')


@pytest.mark.parametrize('name', ['frl', 'personalized_fl'])
def test_a_support_fraction_leaves_some_queries(name):
  preset = registry.get(name).presets['paper']
  with pytest.raises(ValueError, match='`support_fraction`.*found 1.0'):
    dataclasses.replace(preset, support_fraction=1.0)


@pytest.mark.parametrize('name', ['fed_avg', 'personalized_fl'])
def test_a_new_group_needs_a_round(name):
  preset = registry.get(name).presets['paper']
  with pytest.raises(ValueError, match='`rounds` of at least 1, found 0'):
    dataclasses.replace(preset, rounds=0)


@pytest.mark.parametrize('seed', [0, 2**31 - 1, np.int64(5)])
def test_seeds(seed):
  config_checks.check_seed(seed)


@pytest.mark.parametrize('seed', [-1, 2**31, 1.0, '1', None, np.int64(-1)])
def test_what_is_no_seed_is_named(seed):
  message = f'Expected `seed` .*, found {re.escape(repr(seed))}'
  with pytest.raises(ValueError, match=message):
    config_checks.check_seed(seed)


class _Undecorated(Config):
  more: float = 1.0


@dataclasses.dataclass(frozen=True)
class _OfUndecorated(_Undecorated):
  last: float = 1.0


class _WithConstant(Config):
  constant: ClassVar[int] = 1


@pytest.mark.parametrize('kind', [_Undecorated, _OfUndecorated])
def test_fields_of_a_class_without_the_decorator_are_not_ignored(kind):
  with pytest.raises(TypeError, match=f'{kind.__name__}, .* found more in a'):
    kind()
  _WithConstant()
