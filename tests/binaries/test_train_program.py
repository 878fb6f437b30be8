"""Runs with --driver=program, as a user begins, stops and continues them."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from binaries import train
from tff_meta.training import checkpoints

_ROOT = pathlib.Path(__file__).parents[2]
_TIMEOUT_SECONDS = 900  # Shared machines can be slow.
_FLAGS = (
    '--dataset=synthetic',
    '--model=mlp',
    '--driver=program',
    '--protocol=none',
)


def _state(directory):
  store = checkpoints.CheckpointStore(directory / 'checkpoints')
  return {
      name: array.tobytes()
      for name, array in store.load_latest(pytest.fail).server_state.items()
  }


@pytest.mark.ci
def test_a_program_that_is_interrupted_goes_on_by_the_same_command(
    call, tmp_path
):
  """It is interrupted in its first round. Clients keep their heads."""
  flags = ('--algorithm=fed_rep', '--rounds=12', *_FLAGS)
  whole, directory = tmp_path / 'whole', tmp_path / 'run'
  assert call(train, *flags, f'--output_dir={whole}')[0] == 0
  command = [
      *(sys.executable, '-m', 'binaries.train'),
      *(*flags, f'--output_dir={directory}'),
  ]
  process = subprocess.Popen(
      command, cwd=_ROOT, stderr=subprocess.PIPE, text=True
  )
  deadline = time.monotonic() + _TIMEOUT_SECONDS
  while not (directory / 'program_states/program_state_0').exists():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.005)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=_TIMEOUT_SECONDS)
  assert process.returncode == 130, err
  assert 'the same command continues the run' in err
  rows = (directory / 'metrics.csv').read_bytes().splitlines()
  assert 2 <= len(rows) < 13
  code, _, err = call(train, *flags, f'--output_dir={directory}')
  assert code == 0 and 'Continuing after round' in err
  for name in ('metrics.csv', 'program_metrics.csv'):
    assert (directory / name).read_bytes() == (whole / name).read_bytes()
  assert _state(directory) == _state(whole)


@pytest.mark.ci
def test_a_private_program_says_how_private_it_is(call, tmp_path):
  flags = ('--algorithm=fed_rep', '--aggregation=dp', *_FLAGS)
  flags += ('--num_clients=40', '--clients_per_round=4')
  code, _, err = call(
      train, *flags, '--rounds=3', f'--output_dir={tmp_path}/run'
  )
  assert code == 0, err
  config, summary = (
      json.loads((tmp_path / f'run/{name}.json').read_text())
      for name in ('config', 'summary')
  )
  assert summary['rounds'] == summary['privacy']['rounds'] == 3
  assert config['privacy'] == summary['privacy']
  assert f'epsilon {summary["privacy"]["epsilon"]:.2f}' in err
  metrics = (tmp_path / 'run/metrics.csv').read_text()
  assert metrics.count('\n') == 4 and 'train/loss' not in metrics
  (tmp_path / 'run/cohorts.secret').unlink()
  _, _, err = call(train, *flags, '--rounds=4', f'--output_dir={tmp_path}/run')
  assert 'cohorts.secret is not there any more' in err
