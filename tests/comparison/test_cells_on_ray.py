"""Cells on a Ray cluster give the files that they give on this machine."""

import pathlib
import sys
import threading
import time

import pytest

from tests.comparison import test_runner as here
from tff_meta.comparison import hosted_program
from tff_meta.comparison import remote_runs
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.execution import native

ray = pytest.importorskip('ray')
pytestmark = pytest.mark.ci

from tff_meta.execution import ray_pool  # noqa: E402

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TRAIN = ['-m', 'binaries.train', '--device=cpu']
_FLAGS = (
    '--dataset=digits',
    '--algorithm=fed_rep',
    '--rounds=100',
    '--checkpoint_every=5',
    '--eval_every=50',
    '--protocol=known_clients',
    '--noreferences',
)
_CELLS = [
    tables.Cell('fed_rep', 'here', seed, (*_FLAGS, f'--seed={seed}'))
    for seed in (0, 1)
]
# What tells when, where and how often a run has begun, or that of its seconds.
_OF_ITS_OWN = 'config.json', 'summary.json', 'timings.csv', 'tensorboard'


@pytest.fixture(scope='module')
def environment():
  patch = pytest.MonkeyPatch()
  for name, value in (('OMP_NUM_THREADS', '1'), ('PYTHONPATH', str(_ROOT))):
    patch.setenv(name, value, prepend=':' if name == 'PYTHONPATH' else None)
  native.prepare_environment()
  yield runner.environment(1)
  patch.undo()


@pytest.fixture(scope='module')
def hosts(environment):
  """Room for two cells; what they have started is in `started`."""

  class Hosts(ray_pool.Hosts):
    started = []

    def start(self, kind):
      self.started.append(super().start(kind))
      return self.started[-1]

  hosts = Hosts(ray_pool.Options(workers=2))
  yield hosts
  hosts.close()


def _runner(root, hosts, program, environment, report=lambda line: None):
  start = None
  if hosts is not None:
    start = remote_runs.RemoteRuns(
        hosts,
        program,
        environment={},
        working_directory=_ROOT,
        allow_mixed_hosts=False,
        report=report,
    ).start
  return runner.Runner(
      root,
      [sys.executable, *program],
      environment=environment,
      working_directory=_ROOT,
      places={},
      report=lambda line: None,
      changed=lambda: None,
      start=start,
  )


def _files(root, cell):
  run = runner.CellFolder(root, cell).run
  return {
      file.name: (run / file.name).read_bytes()
      for file in hosted_program.files_of(run)
      if pathlib.Path(file.name).parts[0] not in _OF_ITS_OWN
  }


def _wait_for(path):
  deadline = time.monotonic() + 240
  while not path.exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_the_files_are_those_of_this_machine(
    tmp_path, hosts, environment, monkeypatch
):
  """One cell loses its host, then both are stopped, and go on."""
  monkeypatch.setattr(remote_runs, '_SECONDS_BETWEEN_FETCHES', 1.0)
  lines = []
  there = _runner(tmp_path, hosts, _TRAIN, environment, lines.append)
  thread = threading.Thread(target=there.run, args=(_CELLS, 2))
  thread.start()
  folders = [runner.CellFolder(tmp_path, cell) for cell in _CELLS]
  for folder in folders:
    _wait_for(folder.run / 'checkpoints')
  first = hosts.started[0]
  ray.kill(first._actor)
  while not lines:
    time.sleep(0.05)
  while (
      folders[0].log.read_text().count('Runs on')
      + (folders[1].log.read_text().count('Runs on'))
      < 3
  ):
    time.sleep(0.05)
  there.stop()
  thread.join()
  assert 'interrupted' in [folder.outcome().state for folder in folders]
  _runner(tmp_path, hosts, _TRAIN, environment).run(_CELLS, 2)
  _runner(tmp_path / 'ours', None, _TRAIN, environment).run(_CELLS, 2)
  for cell, folder in zip(_CELLS, folders, strict=True):
    assert folder.outcome().state == 'finished'
    log = folder.log.read_text()
    assert f'Written: {folder.run}' in log
    actual, expected = _files(tmp_path, cell), _files(tmp_path / 'ours', cell)
    assert list(actual) == list(expected)
    for name, content in expected.items():
      assert actual[name] == content, name


def test_a_cell_that_ends_its_hosts_fails(tmp_path, hosts, environment):
  program = 'import os, signal; os.kill(os.getppid(), signal.SIGKILL)'
  cell = here._cell('ends')
  lines = []
  there = _runner(tmp_path, hosts, ['-c', program], environment, lines.append)
  there.run([cell], 1)
  outcome = runner.CellFolder(tmp_path, cell).outcome()
  assert outcome.state == 'failed'
  assert 'Expected a host to run this cell, found 3 lost' in outcome.problem
  assert len(lines) == 3


def test_a_cell_waits_for_room_and_can_be_stopped_there(
    tmp_path, hosts, environment
):
  program = ['-c', 'import time; print("begins", flush=True); time.sleep(60)']
  cells = [here._cell('waits', seed) for seed in (1, 2, 3)]
  there = _runner(tmp_path, hosts, program, environment)
  thread = threading.Thread(target=there.run, args=(cells, 3))
  thread.start()
  logs = [runner.CellFolder(tmp_path, cell).log for cell in cells]
  while sum('begins' in log.read_text() for log in logs if log.exists()) < 2:
    time.sleep(0.05)
  there.stop()
  thread.join()
  states = [runner.CellFolder(tmp_path, cell).outcome().state for cell in cells]
  assert states == ['interrupted'] * 3


def test_without_a_host_there_is_an_error(
    tmp_path, hosts, environment, monkeypatch
):
  monkeypatch.setattr(
      hosts,
      '_options',
      ray_pool.Options(worker_cpus=64, worker_timeout_seconds=1.0),
  )
  there = _runner(tmp_path, hosts, ['-c', ''], environment)
  with pytest.raises(ray_pool.WorkersLostError, match='found none.*64 CPU'):
    there.run([here._cell('works')], 1)
