"""The comparison program: runs a table, goes on, and refuses bad input."""

import dataclasses
import json
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pandas as pd
import program_calls
import pytest

from binaries import experiments
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import sealed_json

_ROOT = pathlib.Path(__file__).parents[2]
_TIMEOUT_SECONDS = 900  # Shared machines can be slow.
_SMOKE = (
    '--experiment=digits',
    '--scale=smoke',
    '--rows=fed_avg,frl',
    '--settings=New groups',
    '--processes=2',
)


def _compare(*flags):
  return subprocess.run(
      [sys.executable, '-m', 'binaries.compare', *flags],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=_TIMEOUT_SECONDS,
  )


def _outcomes(directory):
  return {
      str(path.parent.relative_to(directory)): json.loads(path.read_text())
      for path in directory.rglob('cell.json')
  }


@pytest.mark.parametrize(
    'signal_num',
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.ci),
    ],
)
def test_a_killed_comparison_goes_on_where_it_was(tmp_path, signal_num):
  directory, kept = tmp_path / 'a table', tmp_path / 'kept'
  place = f'--output_dir={directory}'
  flags = ('--experiment=digits', '--scale=smoke', place)
  asked = (*flags, '--rows=fed_avg', '--settings=Known clients')
  program = subprocess.Popen(
      [sys.executable, '-m', 'binaries.compare', *asked, f'--keep={kept}'],
      cwd=_ROOT,
      stderr=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
  )
  deadline = time.monotonic() + _TIMEOUT_SECONDS
  while not _outcomes(directory):
    assert time.monotonic() < deadline and program.poll() is None
    time.sleep(0.05)
  program.send_signal(signal_num)
  program.wait(_TIMEOUT_SECONDS)
  ((folder, outcome),) = _outcomes(directory).items()
  if signal_num == signal.SIGTERM:
    assert program.returncode == 130 and outcome['state'] == 'interrupted'
    assert 'interrupted' in (directory / 'table.md').read_text()
  else:
    assert outcome['state'] == 'running'
  assert not _outcomes(kept)

  done = _compare(*asked)
  assert done.returncode == 0, done.stderr
  assert '1 of 1 runs to do, 1 at a time' in done.stderr
  after = _outcomes(directory)
  assert [o['state'] for o in after.values()] == ['finished']
  table = json.loads((directory / 'table.json').read_text())
  means = {(e['row'], e['setting']): e['mean'] for e in table['entries']}
  assert means['fed_avg', 'Known clients'] is not None
  run = f'{folder}/run'
  summary = json.loads((directory / run / 'summary.json').read_text())
  assert summary['rounds'] == 4
  # Only the digits have references.
  assert 'untrained' in summary['evaluation']['known_clients']['references']
  assert (directory / 'report.html').stat().st_size > 10_000
  assert '| fed_avg |' in done.stdout

  verify = (f'--verify={kept}', '--report_only', place)
  again, report, verified, other = program_calls.call_all(
      'compare',
      [
          asked,
          (*flags, '--rows=local', '--report_only', f'--keep={kept}'),
          verify,
          (flags[0], '--scale=cpu', place),
      ],
  )
  assert again[0] == 0 and '0 of 1 runs to do' in again[2], again[2]
  assert report[0] == 0, report[2]
  assert '| fed_avg |' in report[1]  # Begun before: still in the report.
  assert _outcomes(directory) == after
  assert [p.parent for p in kept.rglob('summary.json')] == [kept / run]
  assert verified[0] == 0, verified[2]
  assert 'Known clients, fed_avg, seed 0: identical, all ' in verified[1]
  assert '1 of 1 cells are identical to' in verified[1]
  assert other[0] == 2 and 'another directory' in other[2]

  summary['evaluation']['known_clients']['accuracy_mean'] += 2**-50
  del summary['sha256'], summary['files']['metrics.csv']
  changed = kept / run / 'summary.json'
  changed.write_text(json.dumps(sealed_json.seal(summary)))
  different, printed = program_calls.call_all(
      'compare', [verify, (*asked, '--print_command')]
  )
  assert different[0] == 1
  assert '0 of 1 cells are identical to' in different[1]
  (command,) = map(shlex.split, printed[1].splitlines())
  assert command[:3] == [sys.executable, '-m', 'binaries.train']
  written = {*after[folder]['flags'], f'--output_dir={directory}/{run}'}
  assert written < set(command)


_PROBLEMS = {
    (): '--list shows them',
    ('--experiment=nothing',): "found 'nothing'",
    ('--runs=a,b', '--rows=frl'): 'no --rows with --runs, found both',
    ('--runs=a', '--worker_cpus=2'): 'no --worker_cpus with --runs',
    ('--runs=a', '--data_dir=a'): 'no --data_dir with --runs',
    (
        '--experiment=digits',
        '--print_command',
        '--keep=a',
    ): 'no --keep with --print_command',
    ('--experiment=digits', '--scale=paper'): "'digits': smoke, cpu",
    ('--experiment=digits', '--rows=sgd'): "found 'sgd'",
    ('--experiment=digits', '--seeds=x'): 'below 2**31, found x',
    ('--experiment=digits', f'--seeds={2**31}'): f'found {2**31}',
    (
        '--experiment=digits',
        f'--keep={__file__}',
    ): 'to be a directory, found a file',
    ('--experiment=digits', '--report_only'): 'found no directory',
    ('--experiment=digits', '--rows='): 'flag --rows=: expected names',
    ('--runs=a,',): 'flag --runs=a,: expected names with commas',
    ('--experiment=digits', '--reference='): "found ''",
    ('--experiment=digits', '--keep='): 'flag --keep=: expected a path',
    (
        '--experiment=digits',
        '--rows=frl',
        '--settings=Known clients',
    ): 'run of frl in Known clients, found none. Tip: frl has New',
    (
        '--experiment=digits',
        '--rows=fed_avg,frl',
        '--settings=Known clients',
    ): 'run of frl in Known clients, found none. Tip: frl has New',
    (
        '--experiment=digits',
        '--reference=fed_avgg',
    ): "found 'fed_avgg'",
    (
        '--experiment=digits',
        '--sweep=learning_rate=0.1,0.3',
        '--reference=fed_avg',
    ): 'Expected no --reference with --sweep, found both',
    (
        '--verify=results/digits',
        '--reference=fed_avg',
    ): 'Expected no --reference with --verify, found both',
    (
        '--experiment=metavers_new_classes',
        '--rows=FRL',
    ): 'FRL in any setting, found none. Tip: there are published',
}


def test_bad_input_is_a_line_before_anything_is_written(tmp_path):
  output = tmp_path / 'table'
  found = program_calls.call_all(
      'compare', [(*flags, f'--output_dir={output}') for flags in _PROBLEMS]
  )
  for (code, _, err), problem in zip(found, _PROBLEMS.values(), strict=True):
    assert (code, err.count('\n')) == (2, 1) and problem in err, err
    assert not output.exists()


def _of_errors(stderr):
  """Whether it is one error, behind what was to be done, if anything was."""
  *before, last = stderr.splitlines()
  said = [line.startswith('Comparing ') for line in before]
  return said in ([], [True]) and last.startswith('Error: ')


_TABLE = """
from tff_meta.comparison import tables

OWN = '--dataset=csv:own.csv', '--dataset_options=label=knd'
BESIDE = {6: (tables.Row('two', ('--dataset=digits', '--algorithm=fed_avg')),)}
MEAN = tables.Measure('Mean', 'evaluation/known_clients/accuracy_mean')
TABLES = [
    tables.Table(
        name='mine_' + str(i),
        title='Mine',
        source='ours',
        settings=(tables.Setting('Known', (MEAN,)),),
        rows=(
            tables.Row('own', ('--dataset=digits', *flags)),
            *BESIDE.get(i, ()),
        ),
        scales={'smoke': tables.Scale((0,), ('--rounds=2',))},
    )
    for i, flags in enumerate((
        ('--algorithm=own_one',),
        ('--algorithm=fed_avg', '--hparams=epochs=1,learning_rate=fast'),
        ('--algorithm=fed_avg', *OWN),
        ('--dataset=csv:/home/me/own.csv',),
        ('--algorithm=fed_avg', '--absent_clients=1.5'),
        ('--algorithm=fed_avg', '--round=2'),
        ('--algorithm=fed_avg', *OWN),
    ))
]
"""


@pytest.mark.ci
def test_a_table_of_ones_own_and_a_search_are_checked_before_the_first_run(
    tmp_path,
):
  for name in ('table', 'away', 'flag', 'mix', 'late', 'last', 'kept'):
    (tmp_path / f'{name}.py').write_text(_TABLE.replace('mine_', f'{name}_'))
  (tmp_path / 'runs').mkdir()
  (tmp_path / 'own.csv').write_text('a,kind\n1,oak\n2,elm\n')
  rows = ('--experiment=digits', '--rows=fed_avg')
  expected = {
      # Without --scale: it is that of the table.
      ('--experiment=table.py:table_0',): "'own_one'. Tip: --plugins=MODULE",
      ('--experiment=tabel.py',): "Tip: did you mean 'table.py'?",
      ('--runs=run',): "found nothing. Tip: did you mean 'runs'?",
      (*rows, '--sweep=learningrate=1'): "did you mean 'learning_rate'?",
      (*rows, '--sweep=learning_rate=1,x'): "'x'. Tip: as in learning_rate=0.1",
      (
          *rows,
          '--settings=Known clients',
          '--sweep=learning_rate=0.1,-1',
      ): (
          'Error: Known clients, fed_avg learning_rate=-1, seed 0: Expected'
          ' `learning_rate` as a number of at least 0'
      ),
      ('--experiment=away.py:away_4',): 'own, seed 0: Expected `absent_clients',
      ('--experiment=flag.py:flag_5',): 'own, seed 0: Unknown command line fl',
      # A run works in the library's folder.
      ('--experiment=mix.py:mix_6',): "found 'csv:own.csv' beside 'digits'",
      (*rows, '--search=random'): 'Expected --sweep with --search',
      (*rows, '--budget=3'): 'Expected --search with --budget',
      ('--verify=runs',): 'Expected a comparison of a table in',
      ('--verify=runs', '--sweep=a=1'): 'no --sweep with --verify',
  }
  late = [
      ('--experiment=late.py:late_1',),
      ('--experiment=last.py:last_2', f'--data_dir={tmp_path}'),
      (
          '--experiment=fedmeta_per_mnist',
          '--scale=smoke',
          f'--data_dir={tmp_path}/nothing',
      ),
  ]
  placed = ('--experiment=kept.py:kept_3', '--report_only', '--keep=kept')
  *found, wrong, misread, lacking, said = program_calls.call_all(
      'compare', [*expected, *late, placed], tmp_path
  )
  for (flags, problem), (code, _, err) in zip(
      expected.items(), found, strict=True
  ):
    assert code == 2 and problem in err and _of_errors(err), (flags, err)
  assert "`learning_rate` to be a finite number, found 'fast'. Tip" in wrong[2]
  # A data set is read as its runs read it.
  assert misread[0] == 2 and f"'knd' in {tmp_path}/own.csv" in misread[2]
  assert "did you mean 'kind'?" in misread[2] and _of_errors(misread[2])
  # Data that are not there are one error.
  assert lacking[0] == 1 and f'{tmp_path}/nothing/mnist' in lacking[2]
  assert _of_errors(lacking[2])
  assert [p.name for p in (tmp_path / 'runs').iterdir()] == []
  assert '--dataset=csv:own.csv --data_dir=/home/me do not' in said[2]
  assert not (tmp_path / 'kept').exists()


@pytest.mark.ci
def test_a_search_chooses_on_validation_data_and_goes_on(tmp_path):
  flags = (
      '--experiment=digits',
      '--scale=smoke',
      '--rows=fed_avg',
      '--settings=Known clients',
      '--processes=2',
      '--sweep=learning_rate=1e-6,0.1',
      f'--output_dir={tmp_path}/sweep',
  )
  done = _compare(*flags)
  assert done.returncode == 0, done.stderr
  assert '2 of 2 runs to do, 2 at a time' in done.stderr
  assert 'learning_rate=0.1 has ' in done.stdout
  assert 'held-out training examples' in done.stdout
  summaries = [
      json.loads(p.read_text()) for p in tmp_path.rglob('summary.json')
  ]
  assert [s['evaluation'] for s in summaries] == [{}, {}]
  again = _compare(
      *flags[:-2], '--sweep=learning_rate=1e-6,0.1,0.05', flags[-1]
  )
  assert '1 of 3 runs to do' in again.stderr and again.returncode == 0
  (low,) = tmp_path.glob('sweep/*/*1e_6/*/run/summary.json')
  (high,) = tmp_path.glob('sweep/*/*rate_0.1/*/run')
  whole, _ = low.read_text(), low.write_text('{}')
  poorer = _compare(*flags)
  assert poorer.returncode == 1
  assert 'the best of the 1 of 2 candidates with a number' in poorer.stdout
  assert re.search('Without a number: .*=1e-6: seed 0 finished', poorer.stdout)
  _let_diverge(high)
  nothing = _compare(*flags)
  assert nothing.returncode == 1
  assert 'Nothing is chosen for Known clients, fed_avg.' in nothing.stdout
  assert re.search('Diverged, so not chosen: .*=0.1: seed 0: ', nothing.stdout)
  low.write_text(whole)
  other = _compare(*flags)
  assert other.returncode == 0
  assert re.search(
      '=1e-6 has .*, the best of 2 candidates, but for 1 that diverged, on',
      other.stdout,
  )


def _let_diverge(run):
  """Makes a run whose metrics nobody checks one in which nobody trained."""
  summary = sealed_json.read(run / 'summary.json')
  del summary['files']
  (run / 'summary.json').write_text(json.dumps(sealed_json.seal(summary)))
  columns = pd.read_csv(run / 'metrics.csv')
  columns['train/num_trained_clients'] = 0
  columns['train/num_non_finite_clients'] = columns['train/num_clients']
  columns.to_csv(run / 'metrics.csv', index=False)


def test_a_comparison_is_not_kept_where_it_is(tmp_path):
  table = tmp_path / 'table'
  done = _compare(
      '--experiment=digits', f'--output_dir={table}', f'--keep={table}'
  )
  assert done.returncode == 2
  assert f'another directory than --output_dir, found {table}' in done.stderr
  assert not table.exists()


@pytest.mark.ci
def test_what_cannot_be_written_to_is_refused_before_anything_runs(tmp_path):
  table, kept = tmp_path / 'table', '/proc/kept'
  done = _compare(*_SMOKE, f'--output_dir={table}', f'--keep={kept}')
  assert done.returncode == 1
  assert f'Expected to be able to write to {kept} of --keep' in done.stderr
  assert _of_errors(done.stderr)
  assert not list(table.rglob('cell.json'))


def test_the_list_has_every_experiment_with_its_runs():
  done = _compare('--list')
  assert done.returncode == 0
  assert 'fedmeta_per_mnist\n' in done.stdout
  assert '--scale=smoke: 16 runs' in done.stdout
  assert '91, shown by --list --experiment=digits_search' in done.stdout


def _write_failed_runs(root, seeds):
  """Makes a comparison of the digits whose runs of FedAvg have all failed."""
  digits = experiments.get('digits')
  runner.claim(root, experiment='digits', scale='smoke')
  for cell in tables.cells(
      digits, 'smoke', rows=['fed_avg'], settings=['New groups'], seeds=seeds
  ):
    outcome = runner.Outcome(state='failed', flags=cell.flags)
    runner.CellFolder(root, cell).write(outcome)


@pytest.mark.ci
def test_a_choice_is_of_the_seeds_that_are_asked_for(tmp_path):
  """Of a rate one more seed was begun, and of the other one finished."""
  root = tmp_path / 'sweep'
  flags = (
      '--experiment=digits',
      '--scale=smoke',
      '--rows=fed_avg',
      '--settings=Known clients',
      '--sweep=learning_rate=0.1,0.3',
      f'--output_dir={root}',
  )
  root.mkdir()
  runner.claim(
      root,
      experiment='digits',
      scale='smoke',
      sweep='learning_rate',
      search='grid',
  )
  accuracies = {('0.1', 1): 0.5, ('0.1', 2): 0.6, ('0.3', 1): 0.9}
  ((_, commands, _),) = program_calls.call_all(
      'compare', [(*flags, '--seeds=1,2', '--print_command')]
  )
  for command in commands.splitlines():
    parts = shlex.split(command)
    given = dict(p.removeprefix('--').split('=', 1) for p in parts if '=' in p)
    run = pathlib.Path(given['output_dir'])
    rate = given['hparams'].removeprefix('learning_rate=')
    accuracy = accuracies.get((rate, int(given['seed'])))
    of_cell = parts[parts.index('--noeval_new_clients') + 1 : -1]
    run.mkdir(parents=True)
    outcome = runner.Outcome(
        'interrupted' if accuracy is None else 'finished', flags=tuple(of_cell)
    )
    (run.parent / 'cell.json').write_text(
        json.dumps(sealed_json.seal(dataclasses.asdict(outcome)))
    )
    measured = {'validation_clients/accuracy': accuracy}
    summary = {'last_ten_evaluations_mean': measured}
    (run / 'summary.json').write_text(json.dumps(summary))
  one, two = program_calls.call_all(
      'compare',
      [(*flags, f'--seeds={s}', '--report_only') for s in ('1', '1,2')],
  )
  assert 'learning_rate=0.3 has 90.00 %, the best of 2' in one[1], one
  assert 'learning_rate=0.1 has 55.00 %, the best of the 1 of 2' in two[1], two


@pytest.mark.ci
def test_runs_of_every_seed_are_in_the_report(tmp_path):
  _write_failed_runs(tmp_path, seeds=[0, 7, 12])
  asked = (
      '--experiment=digits',
      '--scale=smoke',
      '--settings=New groups',
      '--report_only',
      f'--output_dir={tmp_path}',
  )
  views = ('--measures=nll', '--reference=frl')
  first, again, seen, unseen = program_calls.call_all(
      'compare',
      [
          (*asked, '--rows=fed_avg'),
          (*asked, '--rows=frl'),
          (*asked, '--rows=fed_avg', *views),
          (*asked, '--rows=frl'),
      ],
  )
  for code, _, err in (first, again, seen, unseen):
    assert code == 0, err
  assert 'Seeds: 0, 7, 12.' in first[1]
  # A report that is written again has the command that made the runs, and of
  # what it shows only what it does show.
  command = "--rows=fed_avg '--settings=New groups' {}--output_dir=DIR\n"
  for _, table, _ in (first, again, unseen):
    assert command.format('') in table and 'NLL' not in table
  assert command.format(' '.join(views) + ' ') in seen[1] and 'NLL' in seen[1]


def test_what_cannot_be_kept_is_refused_before_anything_runs(tmp_path):
  directory, kept = tmp_path / 'table', tmp_path / 'kept'
  kept.mkdir()
  _write_failed_runs(kept, seeds=[7])
  done = _compare(*_SMOKE, f'--output_dir={directory}', f'--keep={kept}')
  assert done.returncode == 2
  assert 'found new_groups/fed_avg/seed_7' in done.stderr
  assert not directory.exists()


def test_runs_of_other_flags_are_refused_before_anything_is_read(tmp_path):
  directory, kept = tmp_path / 'table', tmp_path / 'kept'
  directory.mkdir()
  _write_failed_runs(directory, seeds=[0])
  (path,) = directory.rglob('cell.json')
  outcome = sealed_json.read(path)
  outcome['flags'].append('--rounds=7')
  path.write_text(json.dumps(sealed_json.seal(outcome)))
  done = _compare(*_SMOKE, f'--output_dir={directory}', f'--keep={kept}')
  assert done.returncode == 2 and done.stderr.count('\n') == 1
  assert 'found --rounds=7' in done.stderr
  assert not kept.exists()


def test_the_list_of_one_experiment():
  done = _compare('--list', '--experiment=digits')
  assert done.returncode == 0
  assert done.stdout.startswith('digits\n')
  assert 'fedmeta_per_mnist' not in done.stdout
  wrong = _compare('--list', '--experiment=nothing')
  assert wrong.returncode == 2
  assert "found 'nothing'" in wrong.stderr


def test_a_directory_of_others_is_left_as_it_is(tmp_path):
  for name in ('thesis.tex', 'draft.tmp'):
    (tmp_path / name).write_text('years of work')
  done = _compare(*_SMOKE, f'--output_dir={tmp_path}')
  assert done.returncode == 2
  assert 'another directory' in done.stderr
  assert {p.name for p in tmp_path.iterdir()} == {'thesis.tex', 'draft.tmp'}
