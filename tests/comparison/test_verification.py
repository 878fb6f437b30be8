"""Runs done again are identical, or it is said what differs and why."""

import json

import pytest

from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.comparison import verification

_SETTING = tables.Setting(
    'known', (tables.Measure('Micro', 'evaluation/known_clients/accuracy'),)
)
_CELL = tables.Cell('a', 'known', 1, ('--seed=1',))


def _write(root, accuracy=0.5, client='0.25', loss='1.5', **record):
  folder = runner.CellFolder(root, _CELL)
  folder.write(runner.Outcome('finished', flags=_CELL.flags))
  folder.run.mkdir()
  of_clients = {'accuracy': accuracy, 'curve': [0.1, accuracy]}
  for name, content in {
      'summary.json': json.dumps(
          {
              'seconds_per_round_median': accuracy,
              'evaluation': {'known_clients': of_clients},
          }
      ),
      'config.json': json.dumps({'git_commit': 'x', **record}),
      'clients_known_clients.csv': f'client_id,accuracy\n7,{client}\n8,1.0\n',
      'metrics.csv': f'round,train/loss\n20,{loss}\n',
  }.items():
    (folder.run / name).write_text(content)


def _verify(tmp_path):
  return verification.verify(
      tmp_path / 'kept', tmp_path / 'again', _SETTING, _CELL
  )


def test_the_same_numbers_are_identical_whatever_else_differs(tmp_path):
  _write(tmp_path / 'kept')
  _write(tmp_path / 'again', git_commit='y', platform={'cores': 2})
  metrics = tmp_path / 'again' / _CELL.folder / 'run/metrics.csv'
  metrics.write_text('round,train/loss,new\n10,3.0,1\n20,1.5,1\n')
  found = _verify(tmp_path)
  assert found.is_identical and found.num_numbers == 5
  assert found.causes == ['code: git_commit "x" -> "y"']
  assert 'platform' in found.unrecorded
  assert found.lines()[0] == 'known, a, seed 1: identical, all 5 numbers.'


def test_the_code_that_began_a_run_is_a_cause(tmp_path):
  codes = [
      {'from_round': 1, 'git_commit': 'w'},
      {'from_round': 9, 'git_commit': 'x'},
  ]
  _write(tmp_path / 'kept', code_of_rounds=codes)
  _write(tmp_path / 'again')
  (cause,) = _verify(tmp_path).causes
  assert cause == 'code: git_commit "w from round 1, x from round 9" -> "x"'


@pytest.mark.parametrize(
    'accuracy, noise, num_causes', [(0.5, 1, 0), (0.625, 1, 1), (0.625, 0, 0)]
)
def test_noise_is_why_private_runs_differ(
    tmp_path, accuracy, noise, num_causes
):
  config = {
      'aggregation': 'dp',
      'aggregation_options': {'noise_multiplier': noise},
  }
  _write(tmp_path / 'kept', config=config)
  _write(tmp_path / 'again', config=config, accuracy=accuracy)
  found = _verify(tmp_path)
  assert found.causes == num_causes * [
      "noise: the aggregation 'dp' draws it anew in every run"
  ]


@pytest.mark.parametrize(
    'change, difference',
    [
        ({'accuracy': 0.625}, 'Micro: 50.0000 -> 62.5000 (+12.5)'),
        (
            {'client': '0.5'},
            'clients_known_clients.csv: 1 of 2 numbers differ, by at most 0.25'
            ' (accuracy of 7)',
        ),
        (
            {'loss': '1.5000000000000002'},
            'metrics.csv: 1 of 1 numbers differ, by at most 2.22e-16'
            ' (train/loss of 20)',
        ),
    ],
)
def test_a_number_that_differs_is_named_with_what_may_be_why(
    tmp_path, change, difference
):
  data = {'fingerprint': 'one'}
  _write(tmp_path / 'kept', data=data, environment={'THREADS': '1'})
  _write(
      tmp_path / 'again',
      data={'fingerprint': 'two'},
      environment={'THREADS': None},
      **change,
  )
  found = _verify(tmp_path)
  assert not found.is_identical and found.differences[0] == difference
  assert found.causes == [
      'data: data.fingerprint "one" -> "two"',
      'threads and kernels: environment.THREADS "1" -> null',
  ]


def test_what_has_no_numbers_is_not_identical(tmp_path):
  _write(tmp_path / 'kept')
  folder = runner.CellFolder(tmp_path / 'again', _CELL)
  folder.write(runner.Outcome('failed', 1.0, 'no data', _CELL.flags))
  assert not _verify(tmp_path).is_identical
  assert 'the run is failed no data' in _verify(tmp_path).lines()[0]
  _write(tmp_path / 'other')
  (tmp_path / 'other' / _CELL.folder / 'run/clients_known_clients.csv').unlink()
  found = verification.verify(
      tmp_path / 'kept', tmp_path / 'other', _SETTING, _CELL
  )
  assert not found.is_identical and 'clients_known' in found.problem


def test_a_kept_table_that_is_cut_is_not_identical(tmp_path):
  for name in ('kept', 'again'):
    _write(tmp_path / name, config={'eval_every': 10})
  path = tmp_path / 'kept' / _CELL.folder / 'run/summary.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'rounds': 30}))
  assert 'metrics.csv to go to round 30' in _verify(tmp_path).problem


def test_a_search_is_no_kept_comparison(tmp_path):
  claim = {'experiment': 'digits', 'scale': 'cpu'}
  runner.claim(tmp_path, **claim)
  assert verification.read_claim(tmp_path) == ('digits', 'cpu')
  (tmp_path / runner.CLAIM).unlink()
  runner.claim(tmp_path, **claim, sweep='epochs', search='grid')
  with pytest.raises(runner.ComparisonError, match='a search .*of epochs'):
    verification.read_claim(tmp_path)


def test_what_is_lost_is_not_identical(tmp_path):
  """A kept table that its summary names, and a number of the run again."""
  for place in ('kept', 'again'):
    _write(tmp_path / place)
  summaries = [
      tmp_path / place / _CELL.folder / 'run' / 'summary.json'
      for place in ('kept', 'again')
  ]
  kept, again = (json.loads(path.read_text()) for path in summaries)
  table = 'clients_known_clients.csv'
  summaries[0].write_text(json.dumps(kept | {'files': {table: ''}}))
  summaries[0].with_name(table).unlink()
  assert table in _verify(tmp_path).problem
  summaries[0].write_text(json.dumps(kept))
  del again['evaluation']['known_clients']['curve']
  summaries[1].write_text(json.dumps(again))
  metrics = summaries[1].with_name('metrics.csv')
  metrics.write_text('round,new\n20,7\n')
  assert _verify(tmp_path).differences == [
      '1 numbers of summary.json are not there, as'
      ' evaluation.known_clients.curve',
      'metrics.csv: 1 columns are not there, as train/loss',
  ]
