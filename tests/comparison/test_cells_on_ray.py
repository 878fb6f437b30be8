"""Cells on a Ray cluster give the files that they give on this machine."""

import contextlib
import os
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
    '--rounds=300',  # That last longer than it takes to kill a host.
    '--checkpoint_every=2',
    '--eval_every=300',
    '--protocol=known_clients',
    '--noreferences',
)
_CELLS = [
    tables.Cell('fed_rep', 'here', seed, (*_FLAGS, f'--seed={seed}'))
    for seed in (0, 1)
]
# What tells when, and how often, a run has begun; SQLite counts that, too.
_OF_ITS_OWN = (
    'client_states.sqlite',
    'config.json',
    'summary.json',
    'tensorboard',
    'timings.csv',
)


@pytest.fixture(scope='module')
def environment():
  patch = pytest.MonkeyPatch()
  patch.setenv('PYTHONPATH', str(_ROOT), prepend=os.pathsep)
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
  """Returns name -> content; of the checkpoints, the last one.

  A run that is stopped writes one of its round, whichever that is.
  """
  run = runner.CellFolder(root, cell).run
  earlier = sorted((run / 'checkpoints').iterdir())[:-1]
  return {
      file.name: (run / file.name).read_bytes()
      for file in hosted_program.files_of(run)
      if pathlib.Path(file.name).parts[0] not in _OF_ITS_OWN
      and run / file.name not in earlier
  }


@contextlib.contextmanager
def _running(there, cells):
  """Runs cells meanwhile, and stops them in the end."""
  thread = threading.Thread(target=there.run, args=(cells, len(cells)))
  thread.start()
  try:
    yield
  finally:
    there.stop()
    thread.join()


def _wait_until(is_so):
  deadline = time.monotonic() + 240
  while not is_so():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def _num_said(root, cells, text):
  logs = [runner.CellFolder(root, cell).log for cell in cells]
  return sum(log.read_text().count(text) for log in logs if log.exists())


def test_the_files_are_those_of_this_machine(
    tmp_path, hosts, environment, monkeypatch
):
  """One cell loses its host, then both are stopped, and go on."""
  monkeypatch.setattr(remote_runs, '_SECONDS_BETWEEN_FETCHES', 1.0)
  lines = []
  there = _runner(tmp_path, hosts, _TRAIN, environment, lines.append)
  folders = [runner.CellFolder(tmp_path, cell) for cell in _CELLS]
  with _running(there, _CELLS):
    _wait_until(lambda: all((f.run / 'checkpoints').exists() for f in folders))
    ray.kill(hosts.started[0]._actor)
    _wait_until(lambda: _num_said(tmp_path, _CELLS, 'Runs on') == 3)
  assert len(lines) == 1
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
  with _running(there, cells):
    _wait_until(lambda: _num_said(tmp_path, cells, 'begins') == 2)
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
