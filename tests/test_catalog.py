"""What comes from outside beside what is ours: by the same names, once."""

import dataclasses

import pytest

from binaries import experiments
from tff_meta import aggregation
from tff_meta import catalog
from tff_meta import datasets
from tff_meta import models
from tff_meta import registry
from tff_meta.comparison import tables
from tff_meta.data import partitioners


def test_what_is_registered_is_found_and_listed_last():
  fruits = catalog.Catalog('fruit', {'apple': 1}, reserved=['stone'])
  fruits.register('pear', 2)
  assert fruits.find('pear') == 2 and fruits.names == ('stone', 'apple', 'pear')
  fruits.check('stone')
  with pytest.raises(
      catalog.UnknownNameError,
      match="`fruit` to be one of stone, apple, pear, found 'peer'.*Tip: ",
  ):
    fruits.find('peer')
  with pytest.raises(catalog.UnknownNameError):
    fruits.check(['pear'])  # As a changed config.json may have it.


@pytest.mark.parametrize('name', ['', '-x', 'a b', 'a,b', 'a/b', 'ä', 'a\n'])
def test_a_name_fits_into_flags_and_folders(name):
  with pytest.raises(ValueError, match='Expected the name of a new `fruit`'):
    catalog.Catalog('fruit', {}).register(name, 1)


@pytest.mark.parametrize(
    'register, name',
    [
        (lambda: registry.register_algorithm(registry.get('frl')), 'frl'),
        (
            lambda: aggregation.register_aggregation('dp', aggregation.Plain),
            'dp',
        ),
        (lambda: models.register_model('mlp', models.MODELS['conv4']), 'mlp'),
        (lambda: datasets.register_dataset(datasets.get('mnist')), 'mnist'),
        (lambda: partitioners.register_partition('iid', print), 'iid'),
        (
            lambda: partitioners.register_partition('few_round', print),
            'few_round',
        ),
        (lambda: tables.register_table(experiments.get('digits')), 'digits'),
    ],
)
def test_a_name_that_there_is_is_refused(register, name):
  with pytest.raises(ValueError, match=f"to be free, found '{name}'"):
    register()


class _WithoutDecorator(aggregation.Plain):
  more: float = 1.0


@dataclasses.dataclass(frozen=True)
class _WithoutDefault(aggregation.Aggregation):
  more: float


@dataclasses.dataclass(frozen=True)
class _OfOtherKind(aggregation.Plain):
  parts: tuple[float, ...] = (1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class _WithoutSums(aggregation.Aggregation):

  def of_models(self, num_parts, summed):
    return aggregation.Plain().of_models(num_parts, summed)


@pytest.mark.parametrize(
    'kind, problem',
    [
        (_OfOtherKind, '`parts` of _OfOtherKind .* found tuple'),
        (_WithoutSums, "the aggregation 'theirs', found no `of_sums`"),
        (aggregation.Plain(), 'a subclass of `aggregation.Aggregation`'),
        (float, 'a subclass of `aggregation.Aggregation`'),
        (_WithoutDecorator, 'a frozen dataclass, found _WithoutDecorator'),
        (_WithoutDefault, 'to be an option with a default, found more'),
    ],
)
def test_an_aggregation_is_a_class_whose_fields_have_defaults(kind, problem):
  with pytest.raises(TypeError, match=problem):
    aggregation.register_aggregation('theirs', kind)


def test_a_partitioner_takes_a_seed():
  with pytest.raises(TypeError, match="seed, .*'mine' with .labels, number."):
    partitioners.register_partition('mine', lambda labels, number: [])


@dataclasses.dataclass(frozen=True)
class _Misspelled(aggregation.Plain):
  metrics = 'withhold'


@dataclasses.dataclass(frozen=True)
class _MisspelledAndUnchecked(_Misspelled):

  def __post_init__(self):
    pass  # It does not call that of its base.


@dataclasses.dataclass(frozen=True)
class _Open(aggregation.DifferentiallyPrivate):
  metrics = 'plain'


@pytest.mark.parametrize(
    'kind, problem',
    [
        (_Misspelled, "withheld, found 'withhold'"),
        (_MisspelledAndUnchecked, "withheld, found 'withhold'"),
        (_Open, 'on which epsilon rests, found plain'),
    ],
)
def test_metrics_that_would_be_published_are_refused(kind, problem):
  with pytest.raises(ValueError, match=problem):
    aggregation.register_aggregation('theirs', kind)
