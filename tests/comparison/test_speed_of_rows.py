"""How fast accuracy grows, by curves that are computed by hand."""

import json

import pytest

from tff_meta.comparison import figures
from tff_meta.comparison import on_the_way
from tff_meta.comparison import progress
from tff_meta.comparison import tables

_SETTING = tables.Setting(
    's', (tables.Measure('m', 'evaluation/known_clients/accuracy_mean'),)
)
_TRAFFIC = ',train/bytes_down,train/bytes_up'


def _run(folder, seed, values, timings=None, sent=False):
  """Writes a run: round -> its accuracy as it stands in metrics.csv."""
  folder.mkdir(parents=True)
  header = 'round,train/accuracy,validation_clients/accuracy'
  lines = [header + _TRAFFIC * sent]
  lines += [f'{r},1.0,{v}' + ',30,10' * sent for r, v in values.items()]
  (folder / 'metrics.csv').write_text('\n'.join(lines) + '\n')
  summary = {'seed': seed, 'rounds': 9, 'seconds_per_round_median': 2.0}
  (folder / 'summary.json').write_text(json.dumps(summary))
  if timings:
    lines = ['round,seconds', *(f'{r},{s}' for r, s in timings.items())]
    (folder / 'timings.csv').write_text('\n'.join(lines) + '\n')
  return folder


def _grid(found):
  header, *lines = found.grid()
  return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


def test_curves_by_hand(tmp_path):
  # Rounds without an evaluation, with an empty one, and at unequal distances.
  good = {1: 0.3, 2: '', 3: 0.5, 4: 'nan', 7: 0.8, 9: 1.0}
  all_rounds = {1: 1.5, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 9}
  runs = {
      'good': [_run(tmp_path / 'a', 0, good, all_rounds, sent=True)],
      'late': [
          _run(tmp_path / 'b', 0, {2: 0.5, 6: 0.4, 8: 0.75}),
          # Reached by chance and lost again: reached.
          _run(tmp_path / 'c', 1, {2: 0.1, 6: 0.9, 8: 0.3}),
      ],
      'never': [_run(tmp_path / 'd', 0, {2: 0.3, 8: 0.49})],
      'in part': [
          _run(tmp_path / 'h', 0, {1: '', 2: ''}),
          _run(tmp_path / 'i', 1, {1: 0.1, 9: 0.6}),
      ],
      'once': [_run(tmp_path / 'e', 0, {1: 0.9, 2: ''})],
      'none': [_run(tmp_path / 'g', 0, {1: '', 2: ''})],
      'end': [_run(tmp_path / 'f', 0, {8: 0.9, 9: 0.9})],
  }
  found = progress.of_runs(
      runs, _SETTING, lambda row: progress.Sent(2_000_000, None)
  )
  assert (found.best, found.final) == ('good', 1.0)
  assert set(found.left_out) == {'in part', 'once', 'none', 'end'}
  assert found.left_out['in part'] == 'never evaluated with seed 0'
  assert [course.seed for course in found.rows['in part']] == [1]
  whys = found.left_out['once'], found.left_out['none']
  assert whys == ('evaluated once', 'never evaluated')
  lines = _grid(found)
  good, late, never = lines['good'], lines['late'], lines['never']
  assert [good[f'rounds to {t} %'] for t in ('50.0', '75.0')] == ['3', '7']
  assert late['rounds to 50.0 %'] == '≤ 4 (≤ 2, 6)'
  assert late['rounds to 75.0 %'] == '7 (8, 6)'
  assert late['rounds to 90.0 %'] == 'not reached by 1 of 2 (–, 6)'
  assert never['rounds to 50.0 %'] == 'not reached'
  # (.4 * 2 + .65 * 4 + .9 * 2) / 8, and of two seeds 2.95 / 6 and 3.2 / 6.
  assert (good['area, %'], late['area, %']) == ('65.00', '51.25')
  assert late['of rounds'] == '2 to 8'
  assert late['seconds to 90.0 %'] == late['MB down to 90.0 %'] == '–'
  cost = found.to_json()['rows']['good']['0']['to']
  assert cost['0.75'] == dict(  # Seconds of timings.csv, bytes of metrics.csv.
      rounds=7, seconds=28.5, bytes_down=210, bytes_up=70
  )
  # By the median, and by what a kept file says of bytes.
  assert found.rows['late'][0].cost(0.75) == dict(
      rounds=8, seconds=16.0, bytes_down=16_000_000, bytes_up=None
  )


def test_rows_of_one_setting_are_measured_alike(tmp_path):
  a = _run(tmp_path / 'a', 0, {1: 0.2, 2: 0.5})
  b = _run(tmp_path / 'b', 0, {1: 0.2, 2: 0.9})
  text = (b / 'metrics.csv').read_text()
  (b / 'metrics.csv').write_text(text.replace('validation_', 'known_'))
  found = progress.of_runs({'a': [a], 'b': [b]}, _SETTING)
  assert (found.best, set(found.left_out)) == ('a', {'b'})
  assert progress.of_runs({}, _SETTING) is None


def test_rows_measured_on_others_are_left_out(tmp_path):
  """Who most were measured on counts, with all of them where nobody says."""
  runs = {}
  numbers = {'few': 2, 'all': None, 'as many': 5, 'older': 'unsaid'}
  for row, number in numbers.items():
    runs[row] = [_run(tmp_path / row, 0, {1: 0.2, 2: 0.5})]
    # The number of groups says nothing of clients.
    config = {'num_clients': 5, 'validation_groups': row}
    if number != 'unsaid':
      config['validation_clients'] = number
    path = runs[row][0] / 'config.json'
    path.write_text(json.dumps({'config': config}))
  found = progress.of_runs(runs, _SETTING)
  assert set(found.rows) == {'all', 'as many', 'older'} and found.best == 'all'
  assert 'few: validation_clients is 2, not all' in found.sentence()


def test_small_costs_are_not_nothing(tmp_path):
  run = _run(tmp_path / 'a', 0, {1: 0.2, 2: 0.5}, {1: 0.06, 2: 0.0634}, True)
  line = _grid(progress.of_runs({'a': [run]}, _SETTING))['a']
  assert line['seconds to 45.0 %'] == '0.123'
  assert line['MB down to 45.0 %'] == '6e-05'


def test_bytes_of_unequal_rounds_are_summed_or_unknown(tmp_path):
  run = _run(tmp_path / 'a', 0, {1: 0.2, 2: '', 3: 0.5}, sent=True)
  path = run / 'metrics.csv'
  # Somebody was late in round 2.
  path.write_text(path.read_text().replace('2,1.0,,30,10', '2,1.0,,40,10'))
  ((course,),) = progress.of_runs({'a': [run]}, _SETTING).rows.values()
  assert course.sent == {1: (30, 10), 3: (100, 30)}
  lines = path.read_text().splitlines()
  path.write_text('\n'.join([lines[0], *lines[2:], '6,1.0,0.5,30,10', '']))
  ((course,),) = progress.of_runs({'a': [run]}, _SETTING).rows.values()
  assert course.sent == {3: (None, 30), 6: (None, 60)}
  # A copy has some rounds; that these are alike says nothing of the others.
  (run / 'config.json').write_text('{"config": {"late_clients": 0.2}}')
  ((course,),) = progress.of_runs({'a': [run]}, _SETTING).rows.values()
  assert course.sent == {3: (None, None), 6: (None, None)}


def test_a_run_whose_summary_is_damaged_has_no_curve(tmp_path):
  a, b = (_run(tmp_path / name, 0, {1: 0.2, 2: 0.5}) for name in 'ab')
  (b / 'summary.json').write_text('{')
  found = progress.of_runs({'a': [a], 'b': [b]}, _SETTING)
  assert (set(found.rows), set(found.left_out)) == ({'a'}, {'b'})


@pytest.mark.parametrize('rounds, patience', [(9, None), (8, 2)])
@pytest.mark.parametrize(
    'end, why',
    [
        ('4,1.0,0.4\n', 'to go to round 8, .* found 4 as its last round'),
        ('8,1.0,0.', 'to end with a whole line'),
        ('8,1.0\n', 'to have 3 columns'),
    ],
)
def test_a_table_that_is_cut_is_an_error(tmp_path, rounds, patience, end, why):
  """Also where no checksum tells it, and where patience has ended the run."""
  run = _run(tmp_path / 'a', 0, {r: r / 10 for r in (2, 4, 6, 8)})
  summary = {'rounds': rounds, 'ended_by_patience': patience}
  (run / 'summary.json').write_text(json.dumps(summary))
  config = {'config': {'eval_every': 2, 'eval_from': 2}}
  (run / 'config.json').write_text(json.dumps(config))
  assert progress.of_runs({'a': [run]}, _SETTING).rows
  path = run / 'metrics.csv'
  text = path.read_text()
  path.write_text(text[: text.index(f'\n{end[0]},') + 1] + end)
  with pytest.raises(OSError, match=f'metrics.csv.* {why}') as error:
    progress.of_runs({'a': [run]}, _SETTING)
  if 'round' in why:
    assert ('patience of 2' in str(error.value)) == (patience == 2)


def test_signals_are_of_evaluated_rounds_which_are_kept(tmp_path):
  column = 'train/max_update_norm'

  def run(name, seed, norm):
    values = {r: f'{"" if r % 2 else r / 40},{norm(r)}' for r in range(1, 31)}
    path = _run(tmp_path / name, seed, values) / 'metrics.csv'
    header = 'validation_clients/accuracy'
    path.write_text(path.read_text().replace(header, f'{header},{column}', 1))
    return path.parent

  found = progress.of_runs(
      {
          'grows': [run('a', 0, lambda r: r / 10), run('b', 1, lambda r: r)],
          'none': [run('c', 0, lambda r: 0.0)],  # Has no such thing.
          'lost': [run('d', 0, lambda r: 'nan' if r == 2 else 1.0)],
          'older': [_run(tmp_path / 'e', 0, {2: 0.1, 30: 0.2})],
      },
      _SETTING,
  )
  ((sentence, grid),) = found.signals().items()
  assert sentence.startswith('Drift: ') and column in sentence
  assert grid == [
      ['Method', 'round 2', 'round 10', 'round 16', 'round 22', 'round 30'],
      ['grows', '1.1', '5.5', '8.8', '12.1', '16.5'],
      ['lost', '–', '1', '1', '1', '1'],
  ]
  rows = found.to_json()['rows']
  assert rows['grows']['1'][column] == {
      '2': 2,
      '10': 10,
      '16': 16,
      '22': 22,
      '30': 30,
  }
  assert column not in rows['none']['0'] and column not in rows['older']['0']


def test_a_kept_file_of_traffic_is_of_all_clients(tmp_path):
  row = {'down': 8, 'up': 3, 'clients': 5}
  path = tmp_path / progress.TRAFFIC_FILE
  path.write_text(json.dumps({'s': {'r': row}}))
  assert progress.kept_traffic(tmp_path, 's')('r') == (40, 15)
  assert progress.kept_traffic(tmp_path, 's')('other') == (None, None)
  path.write_text('{')
  with pytest.raises(OSError, match='damaged'):
    progress.kept_traffic(tmp_path, 's')


def _setting(path):
  return tables.Setting('s', (tables.Measure('m', path),))


@pytest.mark.parametrize(
    ('path', 'expected'),
    [
        (
            'evaluation/new_clients/accuracy_micro',
            ['new/_micro', 'known/_micro'],
        ),
        ('evaluation/new_clients/curve_end_mean', ['new/', 'known/']),
        ('evaluation/known_clients/accuracy_mean', ['known/', 'new/']),
        ('evaluation_best/new_groups_iid/accuracy_mean', ['known/', 'new/']),
        ('last_ten_evaluations_mean/new_clients/accuracy', ['new/', 'known/']),
        ('best_round_validation', ['known/', 'new/']),
    ],
)
def test_whose_accuracy_follows_from_the_first_measure(path, expected):
  names = ['train/accuracy', 'known_clients/accuracy', 'new_clients/accuracy']
  found = [n + end for n in names for end in ('', '_micro')]
  assert [
      column.replace('_clients/accuracy', '/')
      for column in on_the_way.columns(_setting(path), found)
  ] == expected


def test_new_clients_are_shown_where_they_were_tested_or_it_says_so(tmp_path):
  setting = _setting('evaluation/new_clients/accuracy_micro')
  run = _run(tmp_path / 'a', 0, {1: 0.2, 2: 0.5})
  found = progress.of_runs({'a': [run]}, setting)
  assert (found.column, found.final) == ('validation_clients/accuracy', 0.5)
  assert found.sentence().endswith(
      ' Attention: the setting is about new_clients/accuracy_micro, which was'
      ' not measured on the way; this is validation_clients/accuracy.'
  )
  # Those of known clients come first in the file, and are more.
  both = _run(tmp_path / 'b', 0, {1: '0.9,0.1,0.3', 2: '0.9,0.1,0.4'})
  path = both / 'metrics.csv'
  new = ',new_clients/accuracy,new_clients/accuracy_micro'
  header, *lines = path.read_text().splitlines()
  path.write_text('\n'.join([header + new, *lines]) + '\n')
  found = progress.of_runs({'a': [run], 'b': [both]}, setting)
  assert (
      found.column == found.to_json()['column'] == 'new_clients/accuracy_micro'
  )
  assert (found.best, found.final, found.attention) == ('b', 0.4, '')
  assert found.left_out == {
      'a': 'new_clients/accuracy_micro was not measured on the way'
  }


def test_a_picture_in_place_of_another_says_whose_it_is():
  rounds = {'round': [1, 2]}
  names = ['known_clients/accuracy', 'new_clients/accuracy']
  metrics = {'a': [rounds | dict.fromkeys(names, [0.2, 0.5])]}
  setting = _setting('evaluation/new_groups/accuracy_mean')
  styles = figures.row_styles(['a'])
  for name, picture in zip(
      names, figures._accuracy_curves(metrics, setting, styles), strict=True
  ):
    assert picture.caption.endswith(f'this is {name}.')
