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
from tff_meta.training import run_directory
from tff_meta.training import sealed_json

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


def _begin(flags, directory):
  command = [
      *(sys.executable, '-m', 'binaries.train'),
      *(*flags, f'--output_dir={directory}'),
  ]
  return subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True)


def _wait(process, is_there):
  deadline = time.monotonic() + _TIMEOUT_SECONDS
  while not is_there():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.005)


@pytest.mark.ci
def test_a_program_that_is_interrupted_goes_on_by_the_same_command(
    call, tmp_path
):
  """It is interrupted in its first round. Clients keep their heads."""
  flags = ('--algorithm=fed_rep', '--rounds=12', *_FLAGS)
  whole, directory = tmp_path / 'whole', tmp_path / 'run'
  assert call(train, *flags, f'--output_dir={whole}')[0] == 0
  process = _begin(flags, directory)
  _wait(process, (directory / 'program_states/program_state_0').exists)
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
def test_a_private_program_that_was_killed_says_what_is_odd(call, tmp_path):
  """It has no checkpoint yet; its code has changed, its secret is lost."""
  directory = run_directory.RunDirectory(tmp_path / 'run')
  flags = ('--algorithm=fed_rep', '--aggregation=dp', '--rounds=12', *_FLAGS)
  flags += ('--num_clients=40', '--clients_per_round=4')
  process = _begin(flags, directory.root)
  _wait(process, directory.rounds_of_program)
  process.kill()
  process.communicate()
  done = directory.rounds_of_program()
  assert done < 12 and not directory.checkpoints.exists()
  directory.cohort_secret.unlink()
  config = directory.read_config() | {'git_commit': 'other'}
  directory.config.write_text(json.dumps(sealed_json.seal(config)))
  code, _, err = call(train, *flags, f'--output_dir={directory.root}')
  assert code == 0, err
  assert err.count(f'Continuing after round {done} of 12') == 1
  assert 'cohorts.secret is not there any more' in err
  assert 'the code or its environment has changed since' in err
  config, summary = directory.read_config(), sealed_json.read(directory.summary)
  assert summary['rounds'] == summary['privacy']['rounds'] == 12
  assert config['privacy'] == summary['privacy']
  assert [
      (code['from_round'], code['git_commit'])
      for code in config['code_of_rounds']
  ] == [(1, 'other'), (done + 1, config['git_commit'])]
  assert f'epsilon {summary["privacy"]["epsilon"]:.2f}' in err
  metrics = directory.metrics.read_text()
  assert metrics.count('\n') == 13 and 'train/loss' not in metrics
