"""Searches try what they say, and choose by validation data alone."""

import dataclasses
import itertools
import math

from absl import flags
import pytest

from binaries import train
from tff_meta.comparison import results
from tff_meta.comparison import searches
from tff_meta.comparison import tables

_FLAGS = (
    '--algorithm=fed_avg',
    '--hparams=epochs=2,learning_rate=1',
    '--rounds=90',
)
_CELL = tables.Cell('FedAvg', 'Known', 7, (*_FLAGS, '--seed=7'))
_TABLE = tables.Table(
    name='t',
    title='T',
    source='ours',
    settings=(tables.Setting('Known', (tables.Measure('Test', 'x'),)),),
    rows=(tables.Row('FedAvg', _FLAGS),),
    scales={'cpu': tables.Scale((7,))},
)


def test_rounds_that_nobody_names_are_those_of_the_program():
  assert searches.num_rounds(()) == flags.FLAGS['rounds'].default


def test_switches_are_those_of_the_program():
  of_program = flags.FLAGS.get_key_flags_for_module(train)
  found = [flag.name for flag in of_program if flag.boolean]
  assert sorted(tables.SWITCHES) == sorted(found)


def _search(texts, kind, budget=10):
  space = searches.read_space(texts)
  return searches.search([_CELL], _TABLE, 'cpu', space, kind, budget)


def _entries(search, cells, accuracy_of):
  """Returns what would come out if the cells had these accuracies."""
  return [
      results.Entry(
          row=cell.row,
          setting=cell.setting,
          measure='Validation',
          published=None,
          values={} if value is None else {cell.seed: value},
          spread=None,
          spread_name='',
          states={cell.seed: 'finished'},
          problems={},
          hours=0.0,
      )
      for cell in cells
      for value in [accuracy_of(cell)]
  ]


def test_a_grid_is_all_combinations_on_held_out_examples():
  search = _search(['learning_rate=0.1,0.3', 'batch_size=5,10'], searches.GRID)
  cells = search.next_cells([], 0)
  assert [cell.row for cell in cells] == [
      f'FedAvg learning_rate={rate} batch_size={size}'
      for rate, size in itertools.product(('0.1', '0.3'), (5, 10))
  ]
  flags = tables.in_force(cells[-1].flags)
  assert flags['--hparams'] == (
      '--hparams=epochs=2,learning_rate=0.3,batch_size=10'
  )
  # Nothing of the test data is measured, on the way or at the end.
  assert flags['--protocol'] == '--protocol=none'
  assert flags['--validation_fraction'] == '--validation_fraction=0.2'
  assert flags['--eval_from'] == '--eval_from=81'
  (setting,) = search.table.settings
  assert [m.path for m in setting.measures] == [
      'last_ten_evaluations_mean/validation_clients/accuracy'
  ]


def test_the_best_one_is_chosen_that_has_all_its_numbers():
  search = _search(['learning_rate=0.1,0.3,1'], searches.GRID)
  cells = search.next_cells([], 0)
  values = iter([80.0, 85.0, None])
  (choice,) = search.choices(_entries(search, cells, lambda _: next(values)))
  assert choice['hparams'] == {'learning_rate': '0.3'}
  assert choice['validation_accuracy'] == 85.0
  assert (choice['candidates'], choice['candidates_with_numbers']) == (3, 2)
  assert set(choice['flags']) == {
      '--algorithm=fed_avg',
      '--hparams=epochs=2,learning_rate=0.3',
      '--rounds=90',
      '--seed=7',
  }
  assert not search.next_cells(_entries(search, cells, lambda _: 1.0), 1)


def test_a_candidate_that_has_diverged_is_not_chosen():
  """As Per-FedAvg's best with Omniglot's users had: no client, but a number."""
  search = _search(['learning_rate=0.1,0.3'], searches.GRID)
  low, high = _entries(
      search,
      search.next_cells([], 0),
      lambda cell: 85.0 if '0.3' in cell.row else 80.0,
  )
  dead = dataclasses.replace(high, diverged=[7])
  for best, found in [('0.3', [low, high]), ('0.1', [low, dead])]:
    (choice,) = search.choices(found)
    assert choice['hparams'] == {'learning_rate': best}
    assert results.best(found, results.mean) == [found[best == '0.3']]
  assert choice['candidates_in_last_rung'] == 1
  assert choice['diverged'] == ['FedAvg learning_rate=0.3']
  assert not search.choices([dead])
  assert dead.to_json()['diverged'] == [7]


@pytest.mark.parametrize(
    'rows, diverged',
    [
        ((['1', 9, 9, 0, 0, 0.5], ['2', 9, 0, 9, 0, 0.5]), True),
        ((['1', 9, 0, 9, 0, 0.5], ['2', 9, 1, 8, 0, 0.5]), False),
        # Of rounds without an evaluation a kept copy has no row.
        ((['1', 9, 9, 0, 0, 0.5], ['2', 9, 0, 9, 0, '']), False),
        ((['1', 9, 0, 9, 0, 0.5], ['2', 9, 9, 0, 0, '']), True),
        ((['1', 9, 0, 9, 0, ''], ['2', 9, 0, 9, 0, '']), False),
        # They had no examples, or labels of no class.
        ((['1', 9, 0, 0, 0, 0.5],), False),
        ((['1', 9, 0, 9, 9, 0.5],), False),
        ((), False),
    ],
)
def test_a_run_has_diverged_if_nobody_trained_at_its_last_evaluation(
    tmp_path, rows, diverged
):
  names = (
      *('round', 'train/num_clients', 'train/num_trained_clients'),
      *('train/num_non_finite_clients', 'train/num_bad_label_clients'),
      'validation_clients/accuracy',
  )
  (tmp_path / 'summary.json').write_text('{"rounds": 2}')
  lines = [','.join(map(str, row)) for row in (names, *rows)]
  (tmp_path / 'metrics.csv').write_text('\n'.join([*lines, '']))
  assert results.has_diverged(tmp_path) == diverged
  lines = [line.rpartition(',')[0] for line in lines]  # As older runs have it.
  (tmp_path / 'metrics.csv').write_text('\n'.join([*lines, '']))
  assert not results.has_diverged(tmp_path)


def test_halving_trains_the_best_third_for_longer_within_its_budget():
  search = _search(['learning_rate=0.001..1'], 'halving', budget=4)
  entries, trained = [], []
  for rung in itertools.count():
    cells = search.next_cells(entries, rung)
    if not cells:
      break
    trained.append(
        [(cell.row, tables.in_force(cell.flags)['--rounds']) for cell in cells]
    )
    entries += _entries(
        search, cells, lambda cell: float(cell.row.partition('rate=')[2])
    )
  assert [len(rung) for rung in trained] == [12, 4, 1]
  rounds = [{flag for _, flag in rung} for rung in trained]
  assert rounds == [{'--rounds=10'}, {'--rounds=30'}, {'--rounds=90'}]
  assert 12 * 10 + 4 * 30 + 1 * 90 <= 4 * 90
  (last,) = trained[-1]
  assert last[0] == max(
      (row for row, _ in trained[0]),
      key=lambda row: float(row.partition('rate=')[2]),
  )
  (choice,) = search.choices(entries)
  assert f'FedAvg learning_rate={choice["hparams"]["learning_rate"]}' == last[0]


def test_draws_are_the_first_of_more_draws_and_within_their_range():
  space = searches.read_space(['learning_rate=0.01..1', 'epochs=1..3', 'a=x,y'])
  few, many = (searches.candidates(space, 'random', n) for n in (3, 20))
  assert many[:3] == few and len(many) == 20
  rates = [float(c['learning_rate']) for c in many]
  assert all(0.01 <= rate <= 1 for rate in rates)
  # As many below as above the middle of two powers of ten, about.
  assert 4 <= sum(math.log10(rate) < -1 for rate in rates) <= 16
  assert {c['epochs'] for c in many} == {'1', '2', '3'}
  # Three digits would leave the range, and whole numbers are whole.
  space = searches.read_space(['a=0.0012345 .. 0.0012355', 'b=1 .. 10'])
  drawn = searches.candidates(space, 'random', 20)
  assert all(0.0012345 <= float(c['a']) <= 0.0012355 for c in drawn)
  assert {c['b'] for c in drawn} <= set(map(str, range(1, 11)))
  assert {c['a'] for c in many} == {'x', 'y'}
  finite = searches.read_space(['a=x,y', 'b=1,2'])
  assert len(searches.candidates(finite, 'random', 9)) == 4


@pytest.mark.parametrize(
    'flags, path',
    [
        (('--algorithm=frl',), 'validation_groups'),
        (('--algorithm=fed_avg',), 'validation_clients'),
        (
            ('--algorithm=metavers', '--protocol=new_class_clients'),
            'validation_new_class_clients',
        ),
    ],
)
def test_what_is_measured_is_validation_data_of_the_setting(flags, path):
  found = searches.validation(flags)
  assert found.path == f'last_ten_evaluations_mean/{path}/accuracy'


@pytest.mark.parametrize(
    'texts, problem',
    [
        (['learning_rate'], 'Tip: --sweep=learning_rate=0.1,0.3'),
        (['a=1', 'a=2'], 'in one --sweep, found it in two'),
        (['a=1,1'], 'each value of `a` once'),
        (['a=1.0,x,1'], 'each value of `a` once'),
        (['a=3..1'], 'the less first, found 3..1'),
    ],
)
def test_what_is_no_space_is_refused(texts, problem):
  with pytest.raises(ValueError, match=problem):
    searches.read_space(texts)


def test_hyperparameters_of_a_flag_file_are_not_lost():
  """A row's own go before those of the file; without its own it is read in."""
  flags = ('--flagfile=a.flags', '--hparams=inner=maml')
  found = searches.with_hparams(flags, {'rate': 0.1})
  assert found == (flags[0], '--hparams=inner=maml,rate=0.1')
  with pytest.raises(ValueError, match='read in, found --flagfile=a.flags'):
    searches.with_hparams(flags[:1], {'rate': 0.1})


def test_a_search_that_cannot_be_is_refused():
  with pytest.raises(ValueError, match='Tip: --search=random'):
    _search(['a=1..3'], searches.GRID)
  row = dataclasses.replace(_CELL, flags=('--dataset=digits',))
  with pytest.raises(ValueError, match="--algorithm=NAME .* 'FedAvg'"):
    searches.search(
        [row], _TABLE, 'cpu', searches.read_space(['a=1']), searches.GRID, 1
    )
  with pytest.raises(ValueError, match='at least 3 with --search=halving'):
    _search(['a=1..3'], 'halving', budget=2)


def test_a_name_of_two_settings_is_searched_in_each():
  other = dataclasses.replace(_CELL, setting='New')
  search = searches.search(
      [_CELL, other],
      dataclasses.replace(
          _TABLE,
          settings=(
              *_TABLE.settings,
              dataclasses.replace(_TABLE.settings[0], name='New'),
          ),
      ),
      'cpu',
      searches.read_space(['learning_rate=0.1,0.3']),
      searches.GRID,
      1,
  )
  cells = search.next_cells([], 0)
  assert len(cells) == 4
  choices = search.choices(
      _entries(
          search,
          cells,
          lambda c: float(('0.1' in c.row) == (c.setting == 'New')),
      )
  )
  assert [(c['setting'], c['hparams']['learning_rate']) for c in choices] == [
      ('Known', '0.3'),
      ('New', '0.1'),
  ]
