"""`--execution=ray` trains as one process does, whatever is killed."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip('ray')
pytestmark = pytest.mark.slow

_ALGORITHMS = (
    'fed_avg',
    'metavers',
    'cafeme',
    'fedec',
    'fedmeta_per',
    'frl',
    'scaffold',
)
_NO_TESTS = ('--protocol=none', '--eval_every=0')
_RAY = ('--execution=ray', '--workers=2')
_TIMEOUT_SECONDS = 1800
_SECONDS_TO_END = 90


def _command(directory: pathlib.Path, *flags: str) -> list[str]:
  return [
      *(sys.executable, '-m', 'binaries.train', '--shards=4', '--device=cpu'),
      *('--checkpoint_every=2', f'--output_dir={directory}', *flags),
  ]


def _call(command: list[str]) -> None:
  done = subprocess.run(
      command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
  )
  assert done.returncode == 0, done.stderr


def _train(directory: pathlib.Path, *flags: str) -> None:
  _call(_command(directory, *flags))


def _files(directory: pathlib.Path) -> dict[str, bytes]:
  """Metrics, every client's or group's results, and the states, as bytes."""
  paths = [
      *directory.glob('*s_*.csv'),
      directory / 'metrics.csv',
      *(directory / 'checkpoints').iterdir(),
  ]
  return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize('algorithm', _ALGORITHMS)
def test_files_are_those_of_one_process(tmp_path, algorithm):
  flags = [f'--algorithm={algorithm}', '--rounds=4', '--eval_every=2']
  flags += ['--validation_groups=2'] if algorithm == 'frl' else []
  flags += ['--eval_groups=8', '--noreferences']
  _train(tmp_path / 'here', *flags)
  expected = _files(tmp_path / 'here')
  assert len(expected) >= 4
  for workers in (2, 1):
    directory = tmp_path / f'{workers}'
    _train(directory, *flags, '--execution=ray', f'--workers={workers}')
    assert _files(directory) == expected


@pytest.mark.parametrize('algorithm', ['fedec', 'frl'])
def test_an_evaluation_is_that_of_one_process(tmp_path, algorithm):
  """Of new clients, or of groups, of which workers get fewer at a time."""
  _train(tmp_path, f'--algorithm={algorithm}', '--rounds=4', *_NO_TESTS)
  found = []
  for flags in (), _RAY:
    command = [sys.executable, '-m', 'binaries.evaluate', *flags]
    _call([*command, '--eval_groups=9', f'--run_dir={tmp_path}'])
    paths = (tmp_path / 'evaluation').glob('*_*.csv')
    found.append({path.name: path.read_bytes() for path in paths})
  assert found[0] and found[0] == found[1]


def test_a_program_is_that_of_one_process(tmp_path):
  flags = ['--algorithm=fed_rep', '--driver=program', '--rounds=6', *_NO_TESTS]
  _train(tmp_path / 'here', *flags)
  _train(tmp_path / 'there', *flags, *_RAY)
  assert _files(tmp_path / 'there') == _files(tmp_path / 'here')


@pytest.mark.parametrize('first, then', [((), _RAY), (_RAY, ())])
def test_a_run_goes_on_elsewhere(tmp_path, first, then):
  flags = ['--algorithm=scaffold', *_NO_TESTS]
  _train(tmp_path / 'whole', *flags, '--rounds=4')
  _train(tmp_path / 'parts', *flags, '--rounds=2', *first)
  _train(tmp_path / 'parts', *flags, '--rounds=4', *then)
  assert _files(tmp_path / 'parts') == _files(tmp_path / 'whole')


def _rounds(directory: pathlib.Path) -> int:
  """How many rounds metrics.csv has."""
  try:
    return (directory / 'metrics.csv').read_text().count('\n') - 1
  except FileNotFoundError:
    return 0


def _wait_for_round(process, directory, number) -> None:
  deadline = time.monotonic() + _TIMEOUT_SECONDS
  while _rounds(directory) < number and time.monotonic() < deadline:
    assert process.poll() is None, 'The run has ended too early.'
    time.sleep(0.05)


def _workers(process) -> list[psutil.Process]:
  return [
      child
      for child in psutil.Process(process.pid).children(recursive=True)
      if child.is_running()
      and child.cmdline()[:1]
      and child.cmdline()[0].startswith('ray::_Actor')
  ]


def test_killed_workers_and_a_killed_program_change_nothing(tmp_path):
  flags = ['--algorithm=fedec', '--rounds=60', '--protocol=none']
  _train(tmp_path / 'here', *flags)
  directory = tmp_path / 'ray'
  flags += ['--execution=ray', '--workers=2']
  process = subprocess.Popen(
      _command(directory, *flags), stderr=subprocess.PIPE, text=True
  )
  _wait_for_round(process, directory, 5)
  _workers(process)[0].kill()
  _wait_for_round(process, directory, 20)
  for worker in _workers(process):
    worker.kill()
  _wait_for_round(process, directory, 35)
  children = psutil.Process(process.pid).children(recursive=True)
  process.kill()
  _, said = process.communicate()
  assert said.count('is lost') >= 3
  deadline = time.monotonic() + _SECONDS_TO_END
  while any(child.is_running() for child in children):
    assert time.monotonic() < deadline, [c for c in children if c.is_running()]
    time.sleep(0.5)
  _train(directory, *flags)
  assert _files(directory) == _files(tmp_path / 'here')


def test_gpus_that_are_not_there_are_an_error(tmp_path):
  done = subprocess.run(
      _command(
          tmp_path,
          *('--algorithm=fed_avg', '--rounds=6', '--protocol=none'),
          *('--execution=ray', '--workers=1', '--worker_gpus=1'),
      ),
      capture_output=True,
      text=True,
      timeout=_TIMEOUT_SECONDS,
      env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''},
  )
  assert done.returncode == 2
  last = done.stderr.strip().splitlines()[-1]
  assert last.startswith('Error: Expected 1 GPUs of this machine'), done.stderr


def test_ctrl_c_saves_and_ends_the_workers(tmp_path):
  flags = ['--algorithm=fed_avg', '--rounds=2000', '--protocol=none']
  process = subprocess.Popen(
      _command(tmp_path, *flags, '--execution=ray', '--workers=1'),
      stderr=subprocess.PIPE,
      text=True,
  )
  _wait_for_round(process, tmp_path, 3)
  children = psutil.Process(process.pid).children(recursive=True)
  process.send_signal(signal.SIGINT)
  _, said = process.communicate(timeout=_TIMEOUT_SECONDS)
  assert process.returncode == 128 + signal.SIGINT
  assert said.strip().endswith('the same command continues the run.')
  deadline = time.monotonic() + _SECONDS_TO_END
  while any(child.is_running() for child in children):
    assert time.monotonic() < deadline
    time.sleep(0.5)
