"""Tips for misspelt names."""

import pytest

from tff_meta import spelling

_NAMES = ('frl', 'fed_rep', 'FRL distance + GPAL', '50 clients')


@pytest.mark.parametrize(
    'name, meant',
    [
        ('fedrep', 'fed_rep'),
        ('FRL', 'frl'),
        ('Fed-Rep', 'fed_rep'),
        ('frl distance+gpal', 'FRL distance + GPAL'),
        ('50clients', '50 clients'),
    ],
)
def test_close_names_are_suggested(name, meant):
  assert spelling.tip(name, _NAMES) == f' Tip: did you mean {meant!r}?'


@pytest.mark.parametrize('name', ['', 'sgd', 'x'])
def test_nothing_is_suggested_where_nothing_is_close(name):
  assert spelling.tip(name, _NAMES) == ''
