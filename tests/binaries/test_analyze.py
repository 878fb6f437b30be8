"""The program of analyses: what it writes, and what it refuses."""

import json

import program_calls
import pytest

from binaries import train

_TRAIN = (
    '--dataset=synthetic',
    '--model=mlp',
    '--rounds=4',
    '--preset=demo',
    '--protocol=none',
    '--eval_every=0',
)


def _contents(directory):
  return {
      path: path.read_bytes()
      for path in directory.rglob('*')
      if path.is_file() and not path.name.startswith('.')
  }


@pytest.mark.ci
def test_analyses_write_numbers_and_a_picture(call, tmp_path):
  runs = {name: tmp_path / name for name in ('fedec', 'frl')}
  fedec = ('--algorithm=fedec', '--test_fraction=0.3')
  # Classes that overlap, or there is nothing that local training would change.
  frl = (
      '--algorithm=frl',
      '--hparams=rounds=2,deployment_learning_rate=0.01',
      '--dataset_options=noise=5.0',
  )
  for name, flags in ('fedec', fedec), ('frl', frl):
    code, _, err = call(train, *_TRAIN, *flags, f'--output_dir={runs[name]}')
    assert code == 0, err
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
      [
          '--analysis=inversion',
          '--images=2',
          '--iterations=2',
          '--restarts=1',
          '--shots=3',
      ],
      ['--analysis=trajectory', f'--run_dir={runs["fedec"]}', '--rounds=5'],
      ['--analysis=nvar', f'--run_dir={runs["fedec"]},{runs["frl"]}'],
      ['--analysis=group_map', f'--run_dir={runs["fedec"]}'],
      ['--analysis=group_map', f'--run_dir={runs["frl"]}', '--group=100'],
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
  assert codes == (0, 0, 0, 0, 0, 2, 2, 2, 2, 1, 1, 1), errors
  assert not nowhere.exists() and empty.exists()
  # All runs are checked before one is.
  assert ''.join(outputs).count('nVAR') == 1
  for problem in (
      "the run's 4, found 5",
      f"{runs['frl']}: Expected known clients of 'synthetic' with test",
      f"{runs['fedec']}: Expected a run of an algorithm whose loss has global",
      f"{runs['frl']}: Expected --group of those that are evaluated, 0..99",
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
  assert set(found) == pictures | {'nvar'}
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
  assert list(cases)[0] == 'classifier' and len(cases) == 9
  assert all(case['psnr']['half_width_95'] > 0 for case in cases.values())


@pytest.mark.ci
def test_a_study_of_inversion_goes_on_with_the_same_bytes(tmp_path):
  whole, cut = tmp_path / 'whole', tmp_path / 'cut'
  flags = ('--analysis=inversion', '--iterations=5', '--restarts=2')
  calls = (whole, 2), (cut, 1), (cut, 2)
  found = program_calls.call_all(
      'analyze',
      [(*flags, f'--images={n}', f'--output_dir={root}') for root, n in calls],
  )
  assert [code for code, _, _ in found] == [0, 0, 0], found
  assert [err.count('PSNR') for _, _, err in found] == [2, 1, 1]
  assert found[0][1].splitlines()[:-1] == found[2][1].splitlines()[:-1]
  files = [path.relative_to(whole) for path in _contents(whole)]
  assert len(files) == 5
  for path in files:
    assert (whole / path).read_bytes() == (cut / path).read_bytes()


@pytest.mark.ci
def test_the_theory_is_tried_and_written(tmp_path):
  """Theorem 1 with as many episodes as always; the rest on two problems."""
  call = ('--analysis=theory', '--problems=2', f'--output_dir={tmp_path}')
  ((code, _, err),) = program_calls.call_all('analyze', [call])
  assert code == 0, err
  found = json.loads((tmp_path / 'theory.json').read_text())
  assert found['problems'] == 2
  counterexample = found['counterexample']
  assert counterexample['variance'] > 3 * counterexample['bound']


_PROBLEMS = {
    (): 'group_map, trajectory, inversion, theory, found none',
    ('--analysis=nvar',): 'Expected --run_dir, found none',
    ('--analysis=group_map', '--run_dir=a,b'): 'group_map, found 2',
    ('--analysis=inversion', '--run_dir=a'): 'draws its weights, found a',
    ('--analysis=theory', '--run_dir=a'): 'draws its problems, found a',
    ('--analysis=inversion', '--dataset=x'): "found 'x'",
    ('--analysis=theory', '--images=3'): 'no --images with --analysis=theory',
    ('--analysis=theory', '--data_dir=a'): 'no --data_dir with',
    (
        '--analysis=embedding_map',
        '--projection=pca',
        '--perplexity=5',
    ): 'no --perplexity with --projection=pca',
    ('--analysis=nvar', '--run_dir=a', '--projection=pca'): 'no --projection',
    ('--analysis=inversion', '--problems=7'): 'no --problems with',
    ('--analysis=umap',): 'value should be one of',
    ('--analysis=inversion', '--restarts=0'): 'flag --restarts=0',
    ('--analysis=inversion', '--images=0'): 'flag --images=0',
    ('--analysis=inversion', '--local_classes=1'): 'flag --local_classes=1',
}


def test_bad_input_is_a_line_before_anything_is_written(tmp_path):
  output, run = tmp_path / 'analyses', tmp_path / 'run'
  run.mkdir()
  (run / 'config.json').write_text('{}')
  *found, in_run = program_calls.call_all(
      'analyze',
      [
          *((*flags, f'--output_dir={output}') for flags in _PROBLEMS),
          ('--analysis=theory', f'--output_dir={run}'),
      ],
  )
  assert in_run[0] == 2 and f'found the run in {run}' in in_run[2], in_run
  assert [path.name for path in run.iterdir()] == ['config.json']
  for (code, _, err), problem in zip(found, _PROBLEMS.values(), strict=True):
    assert (code, err.count('\n')) == (2, 1) and problem in err, err
    assert not output.exists()
