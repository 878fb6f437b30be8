import dataclasses
from typing import Literal

import pytest

from tff_meta.training import hyperparameters


@dataclasses.dataclass(frozen=True)
class _Config:
  rate: float = 0.1
  steps: int = 2
  gpal: bool = True
  name: str = 'a'
  mean: Literal['holders', 'all'] = 'holders'
  order: Literal[1, 2] = 1
  mu: float | None = 0.5
  sizes: tuple[int, ...] = (1,)
  span: tuple[float, float] = (0.0, 1.0)
  words: tuple[str, ...] = ()

  def __post_init__(self):
    if self.rate < 0:
      raise ValueError(f'Expected `rate` to be at least 0, found {self.rate}.')


def _with_dict(seed, sizes: dict | None = None):
  del seed, sizes


@pytest.mark.parametrize(
    'text, changes',
    [
        ('', {}),
        ('rate=1e-3', {'rate': 1e-3}),
        (' steps = 7 ,gpal=false', {'steps': 7, 'gpal': False}),
        ('gpal=True', {'gpal': True}),
        ('name=x=y', {'name': 'x=y'}),
        ('mean=all,order=2', {'mean': 'all', 'order': 2}),
        ('mu=none', {'mu': None}),
        ('mu=2', {'mu': 2.0}),
        ('sizes=(3,4,5),steps=3', {'sizes': (3, 4, 5), 'steps': 3}),
        ('sizes=()', {'sizes': ()}),
        ('span=(0.4,0.6)', {'span': (0.4, 0.6)}),
        ('words=(a (b),c (d))', {'words': ('a (b)', 'c (d)')}),
        ('words=(a (b,c)),steps=3', {'words': ('a (b,c)',), 'steps': 3}),
        ('words=a (b)', {'words': ('a (b)',)}),
    ],
)
def test_values_are_read_by_their_types(text, changes):
  expected = dataclasses.replace(_Config(), **changes)
  found = hyperparameters.override(_Config(), text)
  assert found == expected
  for field in dataclasses.fields(expected):
    assert type(getattr(found, field.name)) is type(
        getattr(expected, field.name)
    )


@pytest.mark.parametrize(
    'text, message',
    [
        ('rat=1', 'Known: rate, steps, gpal.*mean .rate.'),
        ('rate', 'name=value'),
        ('rate=0,1', 'a point before them'),
        ('rate=inf', '`rate` to be a finite number, found'),
        ('rate=fast', '`rate` to be a finite number, found'),
        ('steps=1.5', '`steps` to be a whole number'),
        ('steps=-1', '`steps` to be a whole number of at least 0 and'),
        ('steps=999999999999999', 'number of at least 0 and below 2..31'),
        ('steps=true', '`steps` to be a whole number'),
        ('gpal=yes', '`gpal` to be true or false'),
        ('mean=some', '`mean` to be one of holders, all'),
        ('order=3', '`order` to be one of 1, 2'),
        ('span=(1)', '`span` to be 2 values'),
        ('sizes=(1,x)', '`sizes` to be a whole number'),
        ('steps=1,steps=2', 'once'),
        ('steps=1_0', '`steps` to be a whole number'),
        ('steps=\u0661\u0662', '`steps` to be a whole number'),
        ('rate=1_0.5', '`rate` to be a finite number'),
        ('words=(a,steps=3', 'parenthesis to be opened and closed'),
        ('words=a),steps=3', 'parenthesis to be opened and closed'),
        ('words=(a) (b)', 'parenthesis to be opened and closed'),
        ('rate=-1', 'at least 0'),
    ],
)
def test_bad_values_are_refused(text, message):
  with pytest.raises(ValueError, match=message.replace('(', r'\(')):
    hyperparameters.override(_Config(), text)


@pytest.mark.parametrize(
    'function, text, found',
    [
        (lambda seed, size=1: None, '', '`size=1`'),
        (lambda seed, **options: None, '', r'`\*\*options`'),
        (_with_dict, 'sizes=1', 'dict'),
    ],
)
def test_an_option_that_cannot_be_read_is_named(function, text, found):
  with pytest.raises(TypeError, match=f'annotation.*found .*{found}'):
    hyperparameters.parse_options(function, 1, text)


def test_a_field_that_is_not_described_has_no_text():
  @dataclasses.dataclass(frozen=True)
  class Undocumented:
    step: float = 0.5

  assert hyperparameters.meanings(Undocumented) == {'step': ''}
