"""Tables expand to runs, and refuse names that are not theirs."""

import dataclasses

import pytest

from tff_meta.comparison import tables

_MICRO = tables.Measure('micro', 'evaluation/known_clients/accuracy_micro')
_TABLE = tables.Table(
    name='t',
    title='A table',
    source='ours',
    settings=(
        tables.Setting('50 clients', (_MICRO,), ('--num_clients=50',)),
        tables.Setting('New', (_MICRO,), ('--num_clients=9',)),
    ),
    rows=(
        tables.Row(
            'A',
            ('--algorithm=a', '--hparams=x=1'),
            published={'New': {'micro': tables.Published(90.0, 0.5)}},
            setting_flags={'New': ('--hparams=x=2',)},
        ),
        tables.Row('B', ('--algorithm=b',), settings=('New',)),
        tables.Row('Only published', (), settings=()),
    ),
    scales={
        'smoke': tables.Scale((1,), ('--rounds=2',), 'two rounds', rows=('A',)),
        'paper': tables.Scale((1, 2)),
    },
    flags=('--rounds=100',),
)


def test_more_is_told_of_the_protocols_that_a_table_has():
  best = tables.Measure('best', 'evaluation_best/new_clients/accuracy_mean')
  last_ten = tables.Measure('ten', 'last_ten_evaluations_mean/new/accuracy')
  settings = (
      tables.Setting('One', (_MICRO, last_ten)),
      tables.Setting('Two', (_MICRO, best)),
  )
  table = dataclasses.replace(
      _TABLE, settings=settings, rows=(), scales={}
  ).with_further_measures(['worst_decile', 'nll'])
  one, two = (setting.measures[2:] for setting in table.settings)
  at = 'evaluation/known_clients'
  assert one == (
      tables.Measure('worst decile', f'{at}/accuracy_worst_decile'),
      tables.Measure('NLL x 100', f'{at}/nll_mean', lower_is_better=True),
  )
  assert [m.name for m in two][::3] == [
      'known clients: worst decile',
      'new clients, best round: NLL x 100',
  ]
  assert table.with_further_measures(['nll']) == table  # It has it.
  with pytest.raises(ValueError, match="found 'nil'. Tip: did you mean 'nll'"):
    table.with_further_measures(['nil'])


def test_a_cell_is_a_row_in_a_setting_with_a_seed():
  found = tables.cells(_TABLE, 'paper')
  assert [c.folder for c in found] == [
      '50_clients/a/seed_1',
      'new/a/seed_1',
      'new/b/seed_1',
      '50_clients/a/seed_2',
      'new/a/seed_2',
      'new/b/seed_2',
  ]


def test_later_flags_come_from_what_is_more_special():
  cell = tables.cells(_TABLE, 'smoke', settings=['New'])[0]
  assert cell.flags == (
      '--rounds=100',
      '--num_clients=9',
      '--algorithm=a',
      '--hparams=x=1',
      '--hparams=x=2',
      '--rounds=2',
      '--seed=1',
  )


def test_a_selection_replaces_that_of_the_scale():
  found = tables.cells(_TABLE, 'smoke', rows=['B'], seeds=[7, 8])
  assert [(c.row, c.setting, c.seed) for c in found] == [
      ('B', 'New', 7),
      ('B', 'New', 8),
  ]


@pytest.mark.parametrize(
    'selection', [{'rows': ['C']}, {'settings': ['Nowhere']}]
)
def test_an_unknown_name_is_an_error(selection):
  with pytest.raises(ValueError, match='Expected a (row|setting) of'):
    tables.cells(_TABLE, 'paper', **selection)


def test_names_are_directories_within_the_comparison():
  def folder(name):
    table = dataclasses.replace(
        _TABLE,
        settings=(tables.Setting(name, (_MICRO,)),),
        rows=(tables.Row('a', ()),),
        scales={'cpu': tables.Scale((1,))},
    )
    return tables.cells(table, 'cpu')[0].folder

  assert folder('日本 50') == '日本_50/a/seed_1'
  assert folder('rate=-0.1') == 'rate_minus_0.1/a/seed_1'
  assert folder('rate=0.1') == 'rate_0.1/a/seed_1'
  for name in ('', '..', '/', '.'):
    with pytest.raises(ValueError, match='name with letters or digits'):
      folder(name)


def test_an_unknown_scale_is_an_error():
  with pytest.raises(ValueError, match="smoke, paper; found 'cpu'"):
    tables.cells(_TABLE, 'cpu')


@pytest.mark.parametrize(
    'changes',
    [
        {'rows': (tables.Row('A', ()), tables.Row('a', ()))},
        {'scales': {'tiny': tables.Scale((1,))}},
        {'scales': {'cpu': tables.Scale((1,), rows=('C',))}},
        {'rows': (tables.Row('A', (), {'Old': {}}),)},
        {
            'rows': (
                tables.Row('A', (), {'New': {'f1': tables.Published(1.0)}}),
            )
        },
    ],
)
def test_a_table_that_contradicts_itself_is_an_error(changes):
  with pytest.raises(ValueError, match='Expected'):
    dataclasses.replace(_TABLE, **({'scales': {}} | changes))


def test_names_of_the_same_folder_are_told():
  rows = tables.Row('rate=1e-3', ()), tables.Row('rate=1e+3', ())
  problem = r"'rate=1e-3' and 'rate=1e\+3': .* would be called rate_1e_3"
  with pytest.raises(ValueError, match=problem):
    dataclasses.replace(_TABLE, rows=rows, scales={})


@pytest.mark.parametrize(
    'make',
    [
        lambda: tables.Scale((0,), '--rounds=2'),
        lambda: tables.Scale(0),
        lambda: tables.Setting('New', _MICRO),
        lambda: tables.Row('A', (), setting_flags={'New': '--seed=1'}),
        lambda: dataclasses.replace(_TABLE, rows=_TABLE.rows[0]),
    ],
)
def test_a_forgotten_comma_is_an_error(make):
  with pytest.raises(ValueError, match='to be a tuple, found .* a comma'):
    make()


def test_read_finds_keys_that_hold_slashes():
  summary = {'last': {'known/accuracy': 0.5}, 'evaluation': {'k': {'a': 1}}}
  assert tables.read(summary, 'last/known/accuracy') == 0.5
  assert tables.read(summary, 'evaluation/k/a') == 1
  assert tables.read(summary, 'evaluation/k/b') is None
  assert tables.read(summary, 'evaluation/k') is None
