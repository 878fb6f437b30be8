"""The program of analyses: what it writes, and what it refuses."""

import json
import pathlib
import subprocess
import sys

import program_calls
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_TIMEOUT_SECONDS = 900  # Shared machines can be slow.


def _python(*arguments):
  return subprocess.run(
      [sys.executable, *arguments],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=_TIMEOUT_SECONDS,
  )


def _train(directory, *flags):
  done = _python(
      '-m',
      'binaries.train',
      '--dataset=synthetic',
      '--model=mlp',
      '--rounds=4',
      '--preset=demo',
      '--protocol=none',
      f'--output_dir={directory}',
      *flags,
  )
  assert done.returncode == 0, done.stderr


def _contents(directory):
  return {
      path: path.read_bytes()
      for path in directory.rglob('*')
      if path.is_file() and not path.name.startswith('.')
  }


def test_every_analysis_writes_numbers_and_a_picture(tmp_path):
  runs = {name: tmp_path / name for name in ('fedec', 'frl')}
  _train(runs['fedec'], '--algorithm=fedec', '--test_fraction=0.3')
  # Classes that overlap, or there is nothing that local training would change.
  _train(
      runs['frl'],
      '--algorithm=frl',
      '--hparams=rounds=2,deployment_learning_rate=0.01',
      '--dataset_options=noise=5.0',
  )
  before = {name: _contents(path) for name, path in runs.items()}
  output = tmp_path / 'analyses'
  calls = [
      ['--analysis=nvar', f'--run_dir={runs["fedec"]}'],
      [
          '--analysis=embedding_map',
          f'--run_dir={runs["fedec"]},{runs["fedec"]}',
          '--max_examples=50',
          '--perplexity=10',
      ],
      [
          '--analysis=group_map',
          f'--run_dir={runs["frl"]}',
          '--projection=pca',
          '--client=1',
      ],
      [
          '--analysis=trajectory',
          f'--run_dir={runs["fedec"]}',
          '--rounds=4',
          '--clients=2',
          '--projection=pca',
      ],
      ['--analysis=inversion', '--iterations=2', '--restarts=1', '--shots=3'],
      ['--analysis=theory', '--problems=2'],
      ['--analysis=trajectory', f'--run_dir={runs["fedec"]}', '--rounds=5'],
      ['--analysis=nvar', f'--run_dir={runs["fedec"]},{runs["frl"]}'],
      ['--analysis=group_map', f'--run_dir={runs["fedec"]}'],
      ['--analysis=nvar', f'--run_dir={tmp_path}'],
  ]
  nowhere, empty = tmp_path / 'nowhere', tmp_path / 'empty'
  empty.mkdir()
  calls = [
      *([*call, f'--output_dir={output}'] for call in calls),
      [*calls[-1], f'--output_dir={nowhere}'],
      [*calls[-1], f'--output_dir={empty}'],
  ]
  codes, outputs, errors = zip(
      *program_calls.call_all('analyze', calls), strict=True
  )
  assert codes == (0, 0, 0, 0, 0, 0, 2, 2, 2, 1, 1, 1), errors
  assert not nowhere.exists() and empty.exists()
  # All runs are checked before one is.
  assert ''.join(outputs).count('nVAR') == 1
  for problem in (
      "the run's 4, found 5",
      f"{runs['frl']}: Expected known clients of 'synthetic' with test",
      f"{runs['fedec']}: Expected a run of an algorithm whose loss has global",
      'found no config.json',
  ):
    assert problem in ''.join(errors)
  assert before == {name: _contents(path) for name, path in runs.items()}
  _check_files(output)


def _check_files(output):
  found = {
      path.stem: json.loads(path.read_text()) for path in output.glob('*.json')
  }
  pictures = {'embedding_map', 'group_map', 'trajectory', 'inversion'}
  assert set(found) == pictures | {'nvar', 'theory'}
  for name in pictures:
    png = (output / f'{name}.png').read_bytes()
    assert png.startswith(b'\x89PNG') and len(png) > 5_000
  (run,) = found['nvar']['runs']
  assert run['trained'] > 0 and run['untrained'] > 0
  assert (run['algorithm'], run['rounds']) == ('fedec', 4)
  first, second = found['embedding_map']['runs']
  assert first == second and first['num_examples'] == 50
  views = found['group_map']['views']
  assert len({view['silhouette'] for view in views.values()}) == 3
  (run,) = found['trajectory']['runs']
  assert len(run['clients']) == 2 and run['mean_step_length'] > 0
  cases = found['inversion']['cases']
  assert list(cases) == ['classifier', 'hidden_prototypes', 'leaked_prototypes']
  assert all(case['mse'] > 0 for case in cases.values())
  assert found['theory']['problems'] == 2
  counterexample = found['theory']['counterexample']
  assert counterexample['variance'] > 3 * counterexample['bound']


@pytest.mark.parametrize(
    'flags, problem',
    [
        ([], 'group_map, trajectory, inversion, theory, found none'),
        (['--analysis=nvar'], 'Expected --run_dir, found none'),
        (['--analysis=group_map', '--run_dir=a,b'], 'group_map, found 2'),
        (['--analysis=inversion', '--run_dir=a'], 'draws its weights, found a'),
        (['--analysis=theory', '--run_dir=a'], 'draws its problems, found a'),
        (['--analysis=inversion', '--dataset=x'], "found 'x'"),
        (['--analysis=umap'], 'value should be one of'),
        (['--analysis=inversion', '--restarts=0'], 'flag --restarts=0'),
    ],
    ids=str,
)
def test_bad_input_is_a_line_before_anything_is_written(
    tmp_path, flags, problem
):
  output = tmp_path / 'analyses'
  done = _python('-m', 'binaries.analyze', *flags, f'--output_dir={output}')
  assert done.returncode == 2
  assert problem in done.stderr
  assert done.stderr.count('\n') == 1
  assert not output.exists()
