"""A trained model is evaluated with every combination of settings."""

import csv
import errno
import hashlib
import json

import pytest

from binaries import evaluate
from binaries import train
from tff_meta import datasets
from tff_meta.training import atomic_files
from tff_meta.training import evaluator as evaluator_lib

_GRID = '--grid=group_rounds=1,2;eval_shots=2'


def _read(path):
  with open(path, newline='') as file:
    return list(csv.DictReader(file))


def _count(monkeypatch, owner, name):
  """Returns a list that has an item for every call that is made."""
  calls, original = [], getattr(owner, name)

  def counted(*args, **options):
    calls.append(name)
    return original(*args, **options)

  monkeypatch.setattr(owner, name, counted)
  return calls


@pytest.fixture
def run(call, tmp_path):
  directory = tmp_path / 'run'
  code, _, err = call(
      train,
      '--algorithm=frl',
      '--dataset=synthetic',
      '--dataset_options=noise=4.0',
      '--model=mlp',
      '--hparams=rounds=1,classifier=linear,gpal=false,deployment_learning_rate=0.1',
      '--rounds=2',
      '--checkpoint_every=2',
      '--eval_groups=3',
      '--protocol=none',
      f'--output_dir={directory}',
  )
  assert code == 0, err
  return directory


@pytest.mark.ci
def test_a_grid(call, run, monkeypatch):
  """One test, as the run that all of it needs takes most of its time."""
  where = f'--run_dir={run}', '--protocol=new_groups', '--noreferences'
  path = run / 'evaluation/grid_new_groups.csv'
  _check_refusals(call, run, where)
  with monkeypatch.context() as patch:
    _check_a_full_disk(call, where, path, patch)
  loaded = _count(monkeypatch, datasets, 'load_corpus')
  tested = _count(monkeypatch, evaluator_lib.Evaluator, 'evaluate')
  code, out, err = call(evaluate, *where, _GRID)
  assert code == 0, err
  assert (
      f'1 of 2 combinations are in {path} already.' in err
  )  # What the full disk left.
  assert 'Combination 2 of 2: group_rounds=2, eval_shots=2.' in err
  assert len(loaded) == len(tested) == 1
  assert 'group_rounds  eval_shots  accuracy' in out
  first, second = rows = _read(path)
  assert [row['group_rounds'] for row in rows] == ['1', '2']
  assert first['accuracy_mean'] != second['accuracy_mean']
  assert 'the accuracies are the same' not in out
  _check_single_evaluations(call, run, where, path, rows)
  _check_a_larger_grid(call, where, path, tested)
  _check_damage(call, where, path)


def _check_refusals(call, run, where):
  """Before anything is computed or written."""
  for flags, problem in (
      (['--grid='], 'as `axis=value,value;axis=value`'),
      (['--grid=steps=1'], 'that frl has: group_rounds, group_clients, way'),
      (['--grid=eval_support_fraction=0.5'], 'that new_groups has, found'),
      ([_GRID, '--eval_shots=2'], 'eval_shots in --grid or as --eval_shots'),
      (['--grid=way=2,2'], 'axis way of --grid once, found 2,2'),
      (['--grid=way=2,60'], 'for groups of 60 classes (`way`)'),
      (['--grid=eval_shots=60'], 'found 60. That is of --grid, eval_shots=60.'),
      (['--grid=classifier=distance'], 'leave the shape of the trained model'),
      ([_GRID, '--protocol=none'], 'to evaluate with --grid, found none'),
  ):
    code, out, err = call(evaluate, *where, *flags)
    assert (code, out) == (2, ''), err
    assert problem in err and 'Combination' not in err, err
  assert not (run / 'evaluation').exists()


def _check_a_full_disk(call, where, path, patch):
  written = []

  def write_bytes(path, data):
    written.append(data)
    if len(written) > 2:  # The clients of the second combination.
      raise OSError(errno.ENOSPC, 'No space left on device', str(path))
    path.write_bytes(data)

  patch.setattr(atomic_files, 'write_bytes', write_bytes)
  code, out, err = call(evaluate, *where, _GRID)
  assert (code, out) == (1, '')
  assert 'No space left on device' in err and 'Traceback' not in err
  assert len(written) == 3 and path.read_bytes() == written[1]
  (units,) = path.with_suffix('').iterdir()
  assert units.read_bytes() == written[0]


def _check_single_evaluations(call, run, where, path, rows):
  """They are the same, bit by bit."""
  code, _, err = call(evaluate, *where, '--eval_shots=2')
  assert code == 0, err
  alone = json.loads((run / 'evaluation/new_groups.json').read_text())
  assert alone['eval_shots'] == 2
  same = [name for name in rows[0] if name in alone]
  assert {'accuracy_mean', 'accuracy_half_width_95', 'macro_f1_std'} < {*same}
  assert [rows[0][n] for n in same] == [str(alone[n]) for n in same]
  units = path.with_suffix('') / f'{rows[0]["settings"][:16]}.csv'
  assert (
      units.read_bytes() == path.with_name('groups_new_groups.csv').read_bytes()
  )
  digest = hashlib.sha256(units.read_bytes()).hexdigest()
  assert rows[0]['units_sha256'] == digest
  aside = path.rename(path.with_name('aside'))
  flags = '--grid=group_rounds=2', '--eval_shots=2'
  code, _, err = call(evaluate, *where, *flags)
  assert code == 0, err
  (again,) = _read(path)
  differing = {n for n in rows[1] if rows[1][n] != again.get(n)}
  assert differing == {'eval_shots', 'checksum'}  # On no axis: empty.
  aside.replace(path)


def _check_a_larger_grid(call, where, path, tested):
  before, done = _read(path), len(tested)
  code, out, err = call(evaluate, *where, f'{_GRID};way=2,3')
  assert code == 0, err
  rows = _read(path)  # Of the run's way two are there.
  assert len(rows) == 4 and len(tested) == done + 2
  assert [row | {'way': ''} for row in rows[:2]] == [
      row | {'way': ''} for row in before
  ]
  assert [row['way'] for row in rows] == ['', '', '2', '2']
  shown = [line.split()[:3] for line in out.splitlines()[3:7]]
  assert shown == [[r, '2', w] for r in '12' for w in '23']


def _check_damage(call, where, path):
  content = path.read_bytes().replace(b',2,', b',3,', 1)
  path.write_bytes(content)
  code, out, err = call(evaluate, *where, _GRID)
  assert (code, out) == (1, '') and 'a grid as it was written' in err
  assert 'Combination' not in err and path.read_bytes() == content
