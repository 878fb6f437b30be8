"""Cells run once, go on where they were stopped, and say how they stand."""

import dataclasses
import json
import os
import pathlib
import re
import sys
import threading
import time

import pytest

from tff_meta import progress
from tff_meta.comparison import results
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import run_directory
from tff_meta.training import sealed_json

# A training program: behaves as its flags say, and counts its starts.
_PROGRAM = """
import json, os, pathlib, signal, sys, time
flags = dict(f[2:].split('=', 1) for f in sys.argv[1:])
root = pathlib.Path(flags['output_dir'])
root.mkdir(parents=True, exist_ok=True)
with open(root / 'starts', 'a') as file:
  file.write('x')
does = flags['does']
if does == 'fails':
  print(f'Error: Expected more in {root}')
  sys.exit(2)
if does == 'killed':
  os.kill(os.getpid(), signal.SIGKILL)
if does == 'waits' and not (root / 'saved').exists():
  def save(*_):
    (root / 'saved').write_text('')
    sys.exit(143)
  signal.signal(signal.SIGTERM, save)
  (root / 'waiting').write_text('')
  print('waiting', flush=True)
  time.sleep(60)
if does == 'lasts':
  time.sleep(1)
(root / 'summary.json').write_text(json.dumps({'a': 0.25}))
"""


def _cell(does, seed=1):
  return tables.Cell(does, 'here', seed, (f'--does={does}', f'--seed={seed}'))


def _runner(root, changed=lambda: None, report=lambda line: None, **options):
  return runner.Runner(
      root,
      [sys.executable, '-c', _PROGRAM],
      environment=os.environ,
      working_directory=pathlib.Path.cwd(),
      places={str(root): 'DIR'},
      report=report,
      changed=changed,
      **options,
  )


def _starts(root, cell):
  return len((runner.CellFolder(root, cell).run / 'starts').read_text())


def test_finished_cells_are_not_run_again(tmp_path):
  cells = [_cell('works', seed) for seed in (1, 2, 3)]
  _runner(tmp_path).run(cells, 2)
  _runner(tmp_path).run(cells, 2)
  for cell in cells:
    assert runner.CellFolder(tmp_path, cell).outcome().state == 'finished'
    assert _starts(tmp_path, cell) == 1


def test_what_runs_and_what_came_out_is_told(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(progress, '_SECONDS_BETWEEN_LINES', 0.0)
  monkeypatch.setattr(progress, '_SECONDS_BETWEEN_LOOKS', 0.01)
  table = tables.Table(
      name='t',
      title='T',
      source='ours',
      settings=(tables.Setting('Here', (tables.Measure('Mean', 'a'),)),),
      rows=(tables.Row('lasts', ('--does=lasts',)),),
      scales={'cpu': tables.Scale((1, 2))},
  )
  lines = []
  running = _runner(
      tmp_path,
      report=lines.append,
      result=lambda cell: results.sentence(tmp_path, table, cell),
  )
  running.run(tables.cells(table, 'cpu'), 1)
  end = r'\[2/2\] here/lasts/seed_2: finished after 0:\d\d:\d\d with 25.00 % '
  assert re.fullmatch(end + r'\(Mean\)', lines[-1])
  err = capsys.readouterr().err
  assert re.search(
      r'run 0/2  .*  here/lasts/seed_1: It has printed nothing', err
  )
  assert re.search(r'run 1/2  .* left  here/lasts/seed_2: ', err)


def test_a_failing_cell_says_why_and_the_others_go_on(tmp_path):
  changes = []
  cells = [_cell('fails'), _cell('killed'), _cell('works')]
  _runner(tmp_path, lambda: changes.append(1)).run(cells, 1)
  outcomes = [runner.CellFolder(tmp_path, c).outcome() for c in cells]
  assert [o.state for o in outcomes] == ['failed', 'failed', 'finished']
  assert outcomes[0].problem == (
      'Error: Expected more in DIR/here/fails/seed_1/run'
  )
  assert outcomes[1].problem == 'ended by signal 9'
  assert outcomes[2].seconds > 0
  assert len(changes) == 3
  _runner(tmp_path).run(cells, 1)
  assert _starts(tmp_path, cells[0]) == 2
  assert _starts(tmp_path, cells[2]) == 1


def test_a_stopped_cell_saves_and_goes_on_later(tmp_path):
  cells = [_cell('waits'), _cell('works')]
  first = _runner(tmp_path)
  thread = threading.Thread(target=first.run, args=(cells, 1))
  thread.start()
  waiting = runner.CellFolder(tmp_path, cells[0]).run / 'waiting'
  while not waiting.exists():
    time.sleep(0.02)
  first.stop()
  thread.join()
  states = [runner.CellFolder(tmp_path, c).outcome().state for c in cells]
  assert states == ['interrupted', 'not run']
  _runner(tmp_path).run(cells, 1)
  states = [runner.CellFolder(tmp_path, c).outcome().state for c in cells]
  assert states == ['finished', 'finished']
  assert _starts(tmp_path, cells[0]) == 2


def test_what_a_killed_comparison_left_running_is_interrupted(tmp_path):
  cell = _cell('works')
  folder = runner.CellFolder(tmp_path, cell)
  folder.write(runner.Outcome('running', 5.0, flags=cell.flags))
  runner.settle(tmp_path, [cell])
  assert folder.outcome().state == 'interrupted'
  _runner(tmp_path).run([cell], 1)
  assert folder.outcome().state == 'finished'
  assert folder.outcome().seconds > 5.0  # Those before count, too.


def test_a_cell_of_other_flags_is_an_error(tmp_path):
  cell = _cell('works')
  _runner(tmp_path).run([cell], 1)
  other = dataclasses.replace(cell, flags=('--does=works', '--seed=1', '--x=2'))
  with pytest.raises(runner.ComparisonError, match='--x=2'):
    runner.settle(tmp_path, [other])
  same = dataclasses.replace(cell, flags=('--seed=2', *cell.flags[::-1]))
  runner.settle(tmp_path, [same])  # Only put together in another way.


def test_a_report_takes_cells_with_other_evaluations_on_the_way(tmp_path):
  cell = _cell('works')
  folder = runner.CellFolder(tmp_path, cell)
  folder.write(runner.Outcome('finished', 5.0, flags=cell.flags))

  def table(path):
    setting = tables.Setting(cell.setting, (tables.Measure('m', path),))
    return tables.Table('t', 't', 'ours', (setting,), (), {})

  def settle(*flags, path='evaluation/new_clients/accuracy_mean', run=False):
    asked = dataclasses.replace(cell, flags=(*cell.flags, *flags))
    runner.settle(tmp_path, [asked], None if run else table(path))

  settle('--eval_every=20', '--eval_new_clients')
  for flags, options in (
      (['--eval_every=20'], {'run': True}),  # It would have no curve.
      (['--eval_every=20', '--rounds=3'], {}),
      (['--eval_every=20', '--patience=3'], {}),
      (['--eval_every=20'], {'path': 'last_ten_evaluations_mean/a/accuracy'}),
      (['--eval_every=20'], {'path': 'evaluation_best/a/accuracy_mean'}),
  ):
    with pytest.raises(runner.ComparisonError, match='--eval_every|--rounds'):
      settle(*flags, **options)


@pytest.mark.parametrize(
    'one, other, same',
    [
        ('--a=1 --b=2', '--b=2 --a=3 --a=1', True),
        ('--a=1', '--a=1 --b=2', False),
        ('--curve --nocurve', '--nocurve --curve', False),
        ('--nonvar', '--nvar --nonvar', True),
        ('--nocurve --nvar=True', '--curve=false --nvar', True),
        ('--curve=1', '--curve=0', False),
        ('--normalize', '--rmalize', False),
    ],
)
def test_the_last_flag_of_a_name_counts(one, other, same):
  one, other = (tables.in_force(flags.split()) for flags in (one, other))
  assert (one == other) == same


def test_a_directory_is_of_one_experiment_at_one_scale(tmp_path):
  runner.claim(tmp_path, experiment='a', scale='cpu')
  runner.claim(tmp_path, experiment='a', scale='cpu')
  for name, scale in (('a', 'paper'), ('b', 'cpu')):
    problem = (
        f'--experiment={name} --scale={scale}, found --experiment=a --scale'
    )
    with pytest.raises(runner.ComparisonError, match=problem):
      runner.claim(tmp_path, experiment=name, scale=scale)
  (tmp_path / 'comparison.json').write_text('3')
  with pytest.raises(runner.ComparisonError, match='found something else'):
    runner.claim(tmp_path, experiment='a', scale='cpu')


def test_a_directory_with_other_files_is_refused(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  with pytest.raises(runner.ComparisonError, match='thesis.tex'):
    runner.claim(tmp_path, experiment='a', scale='cpu')
  assert not (tmp_path / 'comparison.json').exists()


@pytest.mark.parametrize(
    'changes, problem',
    [
        ({'state': 'bogus'}, "state 'bogus'"),
        ({'seconds': 'x'}, "seconds 'x'"),
        ({'seconds': None}, 'seconds None'),
        ({'problem': 1}, 'problem 1'),
        ({'flags': [1]}, 'flags'),
        ({'flags': None}, 'TypeError'),
        ({'more': 1}, 'more'),
    ],
    ids=str,
)
def test_an_unreadable_cell_file_is_an_error(tmp_path, changes, problem):
  folder = runner.CellFolder(tmp_path, _cell('works'))
  folder.write(runner.Outcome('finished', 2.0))
  path = folder.path / 'cell.json'
  content = json.loads(path.read_text()) | changes
  path.write_text(json.dumps(content))
  with pytest.raises(runner.ComparisonError, match='checksum.*remove its'):
    folder.outcome()
  del content['sha256']  # As earlier versions wrote it.
  path.write_text(json.dumps(content))
  with pytest.raises(runner.ComparisonError, match=f'{problem}.*remove its'):
    folder.outcome()
  folder.run.mkdir()
  config = sealed_json.seal({'seed': 1})
  (folder.run / 'config.json').write_text(json.dumps(config))
  with pytest.raises(runner.ComparisonError, match='checksum is gone.*remove'):
    folder.outcome()
  (folder.run / 'summary.json').write_text('{"rounds": 1}')
  assert not results.read_json(folder.run / 'summary.json')
  (folder.run / 'config.json').write_text('{}')
  assert results.read_json(folder.run / 'summary.json') == {'rounds': 1}


def test_a_file_is_not_a_directory(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(runner.ComparisonError, match='directory, found a file'):
    runner.check_claim(tmp_path / 'file', experiment='a', scale='cpu')


def test_cores_are_divided_between_processes(monkeypatch):
  monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(8))
  assert runner.environment(2)['OMP_NUM_THREADS'] == '4'
  assert 'OMP_NUM_THREADS' not in runner.environment(1)


def test_a_report_that_fails_stops_nothing(tmp_path):
  lines = []

  def changed():
    raise OSError('disk full')

  cells = [_cell('works', seed) for seed in (1, 2)]
  _runner(tmp_path, changed, lines.append).run(cells, 1)
  states = [runner.CellFolder(tmp_path, c).outcome().state for c in cells]
  assert states == ['finished', 'finished']
  assert sum('disk full' in line for line in lines) == 2


def test_what_cannot_be_started_is_an_error(tmp_path):
  broken = runner.Runner(
      tmp_path,
      [sys.executable, '-c', _PROGRAM],
      environment=os.environ,
      working_directory=tmp_path / 'nowhere',
      places={},
      report=lambda line: None,
      changed=lambda: None,
  )
  with pytest.raises(OSError):
    broken.run([_cell('works')], 1)


def test_a_cell_waits_for_its_directory(tmp_path, monkeypatch):
  cell = _cell('works')
  running, waits = _runner(tmp_path), threading.Event()

  def wait(seconds):
    waits.set()
    time.sleep(seconds)

  monkeypatch.setattr(running._stopped, 'wait', wait)
  directory = run_directory.RunDirectory(runner.CellFolder(tmp_path, cell).run)
  runner.CellFolder(tmp_path, cell).run.mkdir(parents=True)
  thread = threading.Thread(target=running.run, args=([cell], 1))
  with directory.locked():
    thread.start()
    assert waits.wait(60)
    assert not (directory.root / 'starts').exists()
  thread.join()
  assert runner.CellFolder(tmp_path, cell).outcome().state == 'finished'


def test_only_another_process_is_waited_for(tmp_path, monkeypatch):
  cell = _cell('works')
  run = runner.CellFolder(tmp_path, cell).run
  run.mkdir(parents=True)
  (run / 'metrics.csv').write_text('')  # Not a run's: it has no config.json.
  running = _runner(tmp_path)
  monkeypatch.setattr(running._stopped, 'wait', lambda _: pytest.fail('waits'))
  running.run([cell], 1)
  assert _starts(tmp_path, cell) == 1
