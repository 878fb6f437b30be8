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


@pytest.mark.parametrize(
    'name, known, meant',
    [
        ('metaverse', ('metavers', 'metavers_ce'), 'metavers'),
        ('metaverse', ('metavers_ce', 'metavers'), 'metavers'),
        ('cifar_10', ('cifar100', 'cifar10'), 'cifar10'),
        ('dirchlet', ('iid', 'dirichlet'), 'dirichlet'),
        ('alfa', ('min_examples', 'alpha'), 'alpha'),
        ('lr', ('momentum', 'learning_rate'), 'learning_rate'),
        ('learning', ('momentum', 'learning_rate'), 'learning_rate'),
        ('mnsit', ('femnist', 'mnist'), 'mnist'),
    ],
)
def test_of_close_names_the_closest_is_suggested(name, known, meant):
  assert spelling.tip(name, known) == f' Tip: did you mean {meant!r}?'


def test_another_method_is_no_misspelt_name():
  assert spelling.tip('fedprox', ('fed_proto', 'fed_per', 'fed_rep')) == ''


@pytest.mark.parametrize('name', ['', 'sgd', 'x', None])
def test_nothing_is_suggested_where_nothing_is_close(name):
  assert spelling.tip(name, _NAMES) == ''


@pytest.mark.parametrize(
    'message, expected',
    [
        ('Tip: --partition=shards has.', "Tip: `partition='shards'` has."),
        ('Tip: --eval_every=0.', 'Tip: `eval_every=0`.'),
        ('with --validation=0.2, and', 'with `validation=0.2`, and'),
        ('with --f1_of_own, found', 'with `f1_of_own`, found'),
        ('are --dataset=csv:a.csv.', "are `clients='csv:a.csv'`."),
        ('(--nvar): --nonvar.', '(`nvar`): `nvar=False`.'),
        (
            'with --plugins, or `a --nvar` or',
            'with --plugins, or `a --nvar` or',
        ),
    ],
)
def test_flags_become_arguments(message, expected):
  names = ('partition', 'eval_every', 'validation', 'nvar', 'f1_of_own')
  keywords = {name: name for name in names} | {'dataset': 'clients'}
  assert spelling.as_keywords(message, keywords) == expected
