"""A report of runs that exist: their numbers, and exactly what differs."""

import dataclasses
import hashlib
import json

import pytest

from tff_meta.comparison import existing_runs
from tff_meta.comparison import report
from tff_meta.training import atomic_files
from tff_meta.training import run_config
from tff_meta.training import sealed_json

_DEFAULTS = dict(
    preset='demo',
    reference_hparams='',
    dataset='digits',
    dataset_options='',
    augmentation='',
    data_dir=None,
    partition='shards',
    partition_options='',
    test_fraction=None,
    stratify=False,
    deal_test_images=True,
    validation_fraction=0.0,
    model='mlp',
    num_clients=4,
    num_new_clients=0,
    new_clients='held_out',
    clients_per_round=2,
    way=None,
    group_clients=None,
    rounds=3,
    checkpoint_every=1,
    eval_every=0,
    eval_from=0,
    select_best=False,
    select_by='macro',
    patience=0,
    validation_groups=1,
    protocols=('known_clients',),
    eval_groups=1,
    eval_support_fraction=None,
    restrict_f1_to_client_labels=None,
    references=False,
    curve=False,
    nvar=False,
    execution='in_process',
)


def _write(
    path,
    algorithm,
    seed,
    accuracy,
    hparams='',
    older=False,
    nll_mean=None,
    **more,
):
  """Writes the files of a finished run, and returns their place."""
  config = run_config.resolve(
      algorithm=algorithm, seed=seed, hparams=hparams, **_DEFAULTS
  ).to_json()
  if older:  # A kept copy of an early version.
    for name in ('augmentation', 'deal_test_images', 'nvar', 'data_dir'):
      del config[name]
    del config['plugins']
  table = f'client_id,num_examples,accuracy\na,10,{accuracy}\n'
  path.mkdir()
  (path / 'clients_known_clients.csv').write_text(table)
  if not older:
    (path / 'timings.csv').write_text('round,seconds\n1,1200\n2,600\n')
  summary = {
      'algorithm': algorithm,
      'dataset': config['dataset'],
      'seed': seed,
      'rounds': 3,
      'evaluation': {
          'known_clients': {
              'accuracy_mean': accuracy,
              'accuracy_std': 0.125,
              'accuracy_micro': accuracy - 0.25,
          }
          | ({} if nll_mean is None else {'nll_mean': nll_mean})
      },
      'files': {
          'clients_known_clients.csv': hashlib.sha256(
              table.encode()
          ).hexdigest()
      },
  }
  record = {
      'config': config,
      'data': {'fingerprint': f'data of {seed}', 'num_classes': 10},
      'versions': {'numpy': '1.25.2'},
      'environment': {'TF_NUM_INTRAOP_THREADS': '1'},
      'git_commit': 'a' * 40,
  }
  for name, content in (
      ('summary.json', summary),
      ('config.json', record | more),
  ):
    atomic_files.write_json(path / name, sealed_json.seal(content))
  return str(path)


@pytest.fixture
def paths(tmp_path):
  return [
      _write(tmp_path / 'a', 'fed_avg', 0, 0.5),
      _write(tmp_path / 'b', 'fed_avg', 1, 0.75, git_commit='b-dirty'),
      _write(tmp_path / 'c', 'local', 0, 1.0, older=True),
      _write(
          tmp_path / 'd',
          'fed_avg',
          0,
          0.25,
          hparams='learning_rate=0.5',
          data={'fingerprint': 'other', 'num_classes': 10},
      ),
  ]


def test_runs_of_several_seeds_are_one_row(paths, tmp_path):
  found = existing_runs.RunsReport(existing_runs.read(paths), 'compare')
  means = {(e.row, e.measure): (e.mean, e.hours) for e in found.entries}
  assert means == {
      ('fed_avg (1, 2)', 'known_clients, mean'): (62.5, 1.0),
      ('fed_avg (1, 2)', 'known_clients, micro'): (37.5, 1.0),
      ('local (3)', 'known_clients, mean'): (100.0, None),
      ('local (3)', 'known_clients, micro'): (75.0, None),
      ('fed_avg (4)', 'known_clients, mean'): (25.0, 0.5),
      ('fed_avg (4)', 'known_clients, micro'): (0.0, 0.5),
  }
  assert {e.setting for e in found.entries} == {'digits'}
  report.write(tmp_path, found)
  text = (tmp_path / 'table.md').read_text()
  assert '| fed\\_avg (1, 2) | 62.50 ± ' in text or (
      '| fed_avg (1, 2) | 62.50 ± ' in text
  )
  assert 'Accuracy of single clients' in (tmp_path / 'report.html').read_text()
  content = json.loads((tmp_path / 'table.json').read_text())
  assert content['runs'] == {str(i + 1): path for i, path in enumerate(paths)}
  assert content['differences']['config.seed'] == {
      '1': 0,
      '2': 1,
      '3': 0,
      '4': 0,
  }


def test_what_is_shown_beyond_accuracy_is_missing_of_older_runs(tmp_path):
  paths = [
      _write(tmp_path / 'old', 'fed_avg', 0, 0.5),
      _write(tmp_path / 'new', 'local', 0, 0.5, nll_mean=0.25),
  ]
  found = existing_runs.RunsReport(existing_runs.read(paths), '', ['nll'])
  measure = 'known_clients, NLL x 100'
  assert {e.row: e.mean for e in found.entries if e.measure == measure} == {
      'fed_avg (1)': None,
      'local (2)': 25,
  }
  report.write(tmp_path, found)
  assert f'{measure}: seed 0 finished: its summary.json has no' in (
      (tmp_path / 'table.md').read_text()
  )
  with pytest.raises(ValueError, match='Expected a measure of .*worst_decile'):
    existing_runs.RunsReport(existing_runs.read(paths), '', ['accuracy'])


def test_a_run_that_was_done_again_is_a_row_of_its_own(paths, tmp_path):
  again = _write(tmp_path / 'again', 'fed_avg', 0, 0.5)
  runs = existing_runs.read([*paths[:2], again])
  entries = existing_runs.RunsReport(runs, 'compare').entries
  assert {e.row for e in entries} == {'fed_avg (1, 2)', 'fed_avg (3)'}


def test_a_run_of_several_codes_is_pointed_out(paths, tmp_path):
  codes = [{'from_round': 1}, {'from_round': 3, 'git_commit': 'a' * 40}]
  two = _write(tmp_path / 'two', 'fed_avg', 2, 0.5, code_of_rounds=codes)
  runs = existing_runs.read([paths[0], two])
  header = ' '.join(existing_runs.RunsReport(runs, '').header())
  assert 'Settings: not the same in all runs, see below (fields: 1)' in header
  assert 'the code of 2 is not exactly known' in header
  assert f'2: unknown from round 1, {"a" * 40} from round 3.' in header
  assert 'are runs of different code' in header


def test_what_differs_is_said_and_nothing_else(paths):
  runs = existing_runs.read(paths)
  found = existing_runs.differences(runs)
  hparams = {f for f in found if f.startswith('config.hparams.')}
  assert found.keys() - hparams == {
      'config.algorithm',
      'config.seed',
      'data.fingerprint',
      'git_commit',
  }
  assert found['config.hparams.learning_rate'] == {
      1: runs[0].record['config']['hparams']['learning_rate'],
      2: runs[0].record['config']['hparams']['learning_rate'],
      3: runs[2].record['config']['hparams']['learning_rate'],
      4: 0.5,
  }
  # What one of the algorithms does not have.
  assert found['config.hparams.deployment_learning_rate'].keys() == {1, 2, 4}

  whole = existing_runs.RunsReport(runs, 'compare')
  header = ' '.join(whole.header())
  assert 'Environment: the same in all runs.' in header
  assert 'Code: not the same in all runs, see below (fields: 1).' in header
  assert 'Attention: the code of 2 is not exactly known' in header
  assert 'runs on digits with seed 0 had different data.' in header
  assert 'none: the data are others' in report.markdown(whole)
  assert (
      'seeds of fed_avg (1, 2) on digits are runs of different code' in header
  )
  assert header.count('mean and interval') == 1
  assert 'with seed 1' not in header

  old = {'data': {'fingerprint': 'old'}, 'versions': {'tff_meta': '0.1.0'}}
  older = dataclasses.replace(runs[0], number=2, record=runs[0].record | old)
  header = ' '.join(existing_runs.RunsReport([runs[0], older], '').header())
  assert 'Whether runs on digits with seed 0 had the same data' in header
  (_, where), (_, lines) = whole.notes()
  assert where[1].startswith('2: ') and 'seed 1, 3 rounds' in where[1]
  assert (
      'data.fingerprint: "data of 0" in 1, 3; "data of 1" in 2; "other" in 4'
  ) in lines
  assert any('; nothing in 3' in line for line in lines)
  same = existing_runs.RunsReport(runs[:1], 'compare')
  assert same.notes()[1] == ('What differs', [])


def test_what_nobody_recorded_is_not_called_the_same(paths):
  run, *_ = existing_runs.read(paths)
  runs = [
      dataclasses.replace(
          run, number=n, record={'config': run.record['config']}
      )
      for n in (1, 2)
  ]
  header = ' '.join(existing_runs.RunsReport(runs, '').header())
  assert 'Settings: the same' in header
  for part in ('Data', 'Code', 'Environment'):
    assert f'{part}: not recorded.' in header
  assert 'Whether runs on digits with seed 0 had the same data' in header
  alone = ' '.join(existing_runs.RunsReport(runs[:1], '').header())
  assert 'Whether' not in alone


def test_a_spread_is_of_what_the_protocol_has_numbers_of(paths):
  run, *_ = existing_runs.read(paths)
  numbers = {'accuracy_mean': 0.5, 'accuracy_std': 0.1, 'num_groups': 2}
  protocols = ('new_class_clients', 'new_groups_mixed')
  run.summary['evaluation'].update(dict.fromkeys(protocols, numbers))
  found = existing_runs.RunsReport([run], '')
  spreads = {e.measure: e.spread_name for e in found.entries if e.spread}
  assert spreads == {
      'known_clients, mean': 'std over clients',
      'new_class_clients, mean': 'std over clients',
      'new_groups_mixed, mean': 'std over groups',
  }


def test_runs_of_nobody_are_as_they_are_written(paths, tmp_path):
  """As where the plugin that has the algorithm is not imported."""
  path = tmp_path / 'a/config.json'
  record = sealed_json.read(path)
  record['config'] |= {'algorithm': 'theirs', 'hparams': {'mu': 1}}
  atomic_files.write_json(path, sealed_json.seal(record))
  runs = existing_runs.read(paths[:2])
  assert existing_runs.differences(runs)['config.hparams.mu'] == {1: 1}


@pytest.mark.parametrize(
    'change, problem',
    [
        (lambda run: (run / 'summary.json').unlink(), 'found no summary.json'),
        (lambda run: (run / 'config.json').unlink(), 'found no config.json'),
        (
            lambda run: _change(run / 'summary.json', evaluation={}),
            'an evaluation of a run in .*/a, found none. Tip',
        ),
        (lambda run: _change(run / 'summary.json', seed='x'), "`seed` .* 'x'"),
    ],
)
def test_what_is_no_finished_run_is_refused(paths, tmp_path, change, problem):
  change(tmp_path / 'a')
  with pytest.raises(ValueError, match=problem):
    existing_runs.read(paths)


def _change(path, **changes):
  content = sealed_json.read(path) | changes
  atomic_files.write_json(path, sealed_json.seal(content))


def test_a_run_comes_once(paths, tmp_path):
  (tmp_path / 'link').symlink_to('a')
  with pytest.raises(ValueError, match='once, found .*link twice'):
    existing_runs.read([*paths, str(tmp_path / 'link')])
