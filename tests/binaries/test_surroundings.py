"""Runs and comparisons on full, read-only and oddly named directories.

A run that could not write says so in a line, loses nothing, and is then
continued as if nothing had happened.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_TIMEOUT_SECONDS = 900  # Shared machines can be slow.
# Clients keep a head and its rates, so there is a database beside the rest.
_TRAIN = (
    '-m',
    'binaries.train',
    '--algorithm=fedmeta_per',
    '--dataset=synthetic',
    '--dataset_options=noise=3.0',
    '--model=mlp',
    '--num_clients=10',
    '--clients_per_round=4',
    '--rounds=12',
    '--checkpoint_every=3',
    '--validation_fraction=0.2',
    '--eval_every=4',
    '--select_best',
    '--noreferences',
)
_COMPARE = (
    '-m',
    'binaries.compare',
    '--experiment=digits',
    '--scale=smoke',
    '--rows=fed_avg,fedmeta_per',
    '--settings=Known clients',
    '--processes=2',
)
_MEBIBYTE = 2**20

pytestmark = pytest.mark.slow


def _call(*arguments, **options):
  """Runs a program; returns its exit code and what it wrote on stderr."""
  done = subprocess.run(
      [sys.executable, *map(str, arguments)],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=_TIMEOUT_SECONDS,
      **options,
  )
  assert 'Traceback' not in done.stderr, done.stderr
  return done.returncode, done.stderr


def _errors(stderr):
  return [line for line in stderr.splitlines() if line.startswith('Error: ')]


def _numbers(directory):
  """What a run has come to, without its times and the checksum over them."""
  summary = json.loads((directory / 'summary.json').read_text())
  del summary['seconds_per_round_median'], summary['sha256']
  metrics = (directory / 'metrics.csv').read_bytes()
  newest = max((directory / 'checkpoints').iterdir())
  return summary, hashlib.sha256(metrics).hexdigest(), newest.name


def _cells(directory):
  return {
      str(path.parent.relative_to(directory)): _numbers(path.parent / 'run')
      for path in directory.rglob('cell.json')
  }


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory):
  directory = tmp_path_factory.mktemp('run') / 'whole'
  code, stderr = _call(*_TRAIN, f'--output_dir={directory}')
  assert code == 0, stderr
  return _numbers(directory)


@pytest.fixture(scope='module')
def whole_fed_avg(tmp_path_factory):
  directory = tmp_path_factory.mktemp('run') / 'fed_avg'
  flags = ('--algorithm=fed_avg', f'--output_dir={directory}')
  code, stderr = _call(*_TRAIN, *flags)
  assert code == 0, stderr
  return _numbers(directory)


@pytest.fixture(scope='module')
def whole_comparison(tmp_path_factory):
  directory = tmp_path_factory.mktemp('comparison') / 'whole'
  code, stderr = _call(*_COMPARE, f'--output_dir={directory}')
  assert code == 0, stderr
  return _cells(directory)


@pytest.fixture
def disk(tmp_path):
  """A file system of its own: a directory, and a function to remount it."""
  place = tmp_path / 'disk'
  place.mkdir()

  def mount(*options):
    return subprocess.run(
        ['mount', *options, 'tmpfs', str(place)],
        capture_output=True,
        check=False,
    )

  if mount('-t', 'tmpfs', '-o', 'size=1m').returncode:
    pytest.skip('Only root may mount a file system.')

  def remount(options):
    assert not mount('-o', f'remount,{options}').returncode

  yield place, remount
  subprocess.run(['umount', '--lazy', str(place)], check=True)


@pytest.mark.parametrize(
    'algorithm, kibibytes',
    [
        *(('fedmeta_per', size) for size in (16, 128, 700, 900, 1100, 1300)),
        *(('fed_avg', size) for size in (8, 24, 48, 96, 160, 200)),
    ],
)
def test_a_run_on_a_full_disk_says_where_and_goes_on(
    disk, whole_run, whole_fed_avg, algorithm, kibibytes
):
  place, remount = disk
  flags = (*_TRAIN, f'--algorithm={algorithm}')
  whole = whole_fed_avg if algorithm == 'fed_avg' else whole_run
  remount(f'size={kibibytes}k')
  directory = place / 'run'
  code, stderr = _call(*flags, f'--output_dir={directory}')
  print(algorithm, kibibytes, code, stderr)
  if code:
    assert code == 1
    [error] = _errors(stderr)
    assert 'No space left' in error or 'full' in error
    assert str(place) in error
  remount('size=64m')
  code, stderr = _call(*flags, f'--output_dir={directory}')
  assert code == 0, stderr
  assert _numbers(directory) == whole
  assert not list(directory.rglob('*.tmp'))


@pytest.mark.parametrize('kibibytes', [64, 512])
def test_a_comparison_on_a_full_disk_goes_on(disk, whole_comparison, kibibytes):
  place, remount = disk
  remount(f'size={kibibytes}k')
  flags = (*_COMPARE, f'--output_dir={place / "table"}')
  code, stderr = _call(*flags)
  print(kibibytes, code, stderr)
  assert code == 1
  assert str(place) in stderr or 'DIR' in stderr
  remount('size=64m')
  code, stderr = _call(*flags)
  assert code == 0, stderr
  assert _cells(place / 'table') == whole_comparison


def test_what_is_on_a_read_only_file_system_stays_and_can_be_gone_on_from(
    disk, whole_run
):
  place, remount = disk
  remount('size=64m')
  flags = (*_TRAIN, f'--output_dir={place / "run"}')
  remount('ro')
  code, stderr = _call(*flags)
  assert code == 1 and 'Read-only file system' in stderr
  assert len(_errors(stderr)) == 1 and str(place) in stderr
  remount('rw')
  code, _ = _call(*flags)
  assert code == 0
  remount('ro')
  code, stderr = _call(*flags)
  assert code == 1 and 'Read-only file system' in stderr
  evaluate = ('-m', 'binaries.evaluate', f'--run_dir={place / "run"}')
  code, stderr = _call(*evaluate)
  assert code == 1 and len(_errors(stderr)) == 1 and str(place) in stderr
  remount('rw')
  assert _numbers(place / 'run') == whole_run


_ODD_NAMES = (
    'with space',
    'new\nline',
    'ünïcödé 学习',
    '100%25 ?mode=memory#x',
    'quote\'d "and" $HOME `x`',
    '[a-z]*',
    ';semi,colon=1',
    'a' * 200,
)


@pytest.mark.parametrize('name', _ODD_NAMES)
def test_a_directory_may_have_any_name(tmp_path, whole_run, name):
  directory = tmp_path / name
  code, stderr = _call(*_TRAIN, f'--output_dir={directory}')
  assert code == 0, stderr
  assert _numbers(directory) == whole_run
  assert [path.name for path in tmp_path.iterdir()] == [name]
  code, stderr = _call('-m', 'binaries.evaluate', f'--run_dir={directory}')
  assert code == 0, stderr


@contextlib.contextmanager
def _comparison(directory):
  """Starts a comparison in the background."""
  with open(f'{directory}.log', 'wb') as log:
    program = subprocess.Popen(
        [sys.executable, *_COMPARE, f'--output_dir={directory}'],
        cwd=_ROOT,
        stdout=log,
        stderr=log,
    )
  try:
    yield program
  finally:
    program.kill()
    program.wait()


def _children(program):
  return [
      child
      for child in psutil.Process(program.pid).children(recursive=True)
      if 'binaries.train' in ' '.join(child.cmdline())
  ]


def _wait_for(condition):
  deadline = time.monotonic() + _TIMEOUT_SECONDS
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.05)


@pytest.mark.parametrize('what', ['one child', 'both children', 'all at once'])
def test_killed_programs_of_a_comparison_are_run_again(
    tmp_path, whole_comparison, what
):
  directory = tmp_path / 'table'
  with _comparison(directory) as program:
    _wait_for(lambda: len(list(directory.rglob('config.json'))) == 2)
    victims = _children(program)
    assert len(victims) >= 2
    if what == 'one child':
      victims = victims[:1]
    for victim in victims:
      victim.send_signal(signal.SIGKILL)
    if what == 'all at once':
      program.kill()
    code = program.wait(_TIMEOUT_SECONDS)
    psutil.wait_procs(victims, timeout=20)
    assert not any(v.is_running() for v in victims)
  states = {
      json.loads(path.read_text())['state']
      for path in directory.rglob('cell.json')
  }
  if what == 'one child':
    assert code == 1 and states == {'failed', 'finished'}
  elif what == 'both children':
    assert code == 1 and states == {'failed'}
  else:
    assert code == -signal.SIGKILL and states == {'running'}
  code, stderr = _call(*_COMPARE, f'--output_dir={directory}')
  assert code == 0, stderr
  assert _cells(directory) == whole_comparison


def test_of_two_comparisons_in_a_directory_one_is_refused(
    tmp_path, whole_comparison
):
  directory = tmp_path / 'table'
  with _comparison(directory) as first:
    code, stderr = None, ''
    _wait_for((directory / 'comparison.json').exists)
    code, stderr = _call(*_COMPARE, f'--output_dir={directory}')
    assert code == 1
    assert str(directory) in stderr and 'another process' in stderr
    assert len(_errors(stderr)) == 1
    assert first.wait(_TIMEOUT_SECONDS) == 0
  assert _cells(directory) == whole_comparison


def test_two_comparisons_side_by_side_do_not_disturb_each_other(
    tmp_path, whole_comparison
):
  with _comparison(tmp_path / 'a') as a, _comparison(tmp_path / 'b') as b:
    assert a.wait(_TIMEOUT_SECONDS) == b.wait(_TIMEOUT_SECONDS) == 0
  for name in 'ab':
    assert _cells(tmp_path / name) == whole_comparison
  assert sorted(os.listdir(tmp_path)) == ['a', 'a.log', 'b', 'b.log']
