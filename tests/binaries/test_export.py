"""Runs of other aggregations become bundles, whose scripts can be trusted."""

import json
import pathlib
import subprocess
import sys

import pytest

from binaries import train

_ROOT = pathlib.Path(__file__).parents[2]
_TIMEOUT_SECONDS = 900  # Shared machines can be slow.


def _call(*command):
  return subprocess.run(
      [sys.executable, *map(str, command)],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=_TIMEOUT_SECONDS,
      check=False,
  )


@pytest.mark.ci
@pytest.mark.parametrize(
    'aggregation, said, forms',
    [
        ('dp', 'its noise is new', {'distribute_aggregate', 'map_reduce'}),
        ('compressed', 'differs from the recorded round', {'map_reduce'}),
    ],
)
def test_a_run_with_an_aggregation_is_exported(
    call, tmp_path, aggregation, said, forms
):
  """TFF does not convert encoded sums to a DistributeAggregateForm."""
  run, bundle = tmp_path / 'run', tmp_path / 'bundle'
  code, _, err = call(
      train,
      *('--algorithm=fed_avg', '--dataset=digits', '--model=mlp'),
      *('--rounds=2', '--num_clients=40', '--clients_per_round=4'),
      *(f'--aggregation={aggregation}', '--protocol=none'),
      f'--output_dir={run}',
  )
  assert code == 0, err
  exported = _call(
      *('-m', 'binaries.export', f'--run_dir={run}', f'--output_dir={bundle}')
  )
  assert exported.returncode == 0, exported.stderr
  manifest = json.loads((bundle / 'manifest.json').read_text())
  summary = json.loads((run / 'summary.json').read_text())
  assert manifest['privacy'] == summary.get('privacy')
  assert (manifest['privacy'] is not None) == (aggregation == 'dp')
  assert set(manifest['computations']['forms']) == forms
  replayed = _call(bundle / 'replay.py')
  assert replayed.returncode == 0 and said in replayed.stdout, replayed.stderr

  serve = bundle / 'serve.py'
  serve.write_text(f'print("It runs.")\n{serve.read_text()}')
  for problem in ('SHA256SUMS says, found another', 'No such file'):
    replayed = _call(bundle / 'replay.py')
    assert replayed.returncode == 2 and not replayed.stdout
    (line,) = replayed.stderr.splitlines()
    assert line.startswith('error: Expected') and problem in line
    serve.unlink(missing_ok=True)
