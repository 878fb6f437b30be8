"""What a cell leaves on another host comes back whole, whatever happens there.

The hosts are objects of this process: Ray is in `test_cells_on_ray`.
"""

import os
import pathlib
import threading
import time

import pytest

from tests.comparison import test_runner as here
from tff_meta.comparison import hosted_program
from tff_meta.comparison import remote_runs
from tff_meta.comparison import runner

# Writes a number to two files, one after the other, again and again.
_COUNTS = """
import os, pathlib, sys, time
root = pathlib.Path(sys.argv[-1].partition('=')[2])
root.mkdir(parents=True)
files = [os.open(root / n, os.O_RDWR | os.O_CREAT) for n in ('first', 'second')]
print('counts', flush=True)
for i in range(10**7):
  for file in files:
    os.pwrite(file, b'%9d' % i * 1000, 0)
"""


class _Remote:
  """A host that is lost after so many calls."""

  def __init__(self, kind, num_calls):
    self._object = kind()
    self._left = num_calls

  def call(self, method, *arguments):
    self._left -= 1
    lost = self._left < 0
    if lost:
      self._object.close()
    result = None if lost else getattr(self._object, method)(*arguments)
    return _Answer(result, lost)

  def end(self):
    pass


class _Answer:

  def __init__(self, result, lost):
    self._result = result
    self._lost = lost

  def get(self, timeout=None):
    del timeout
    if self._lost:
      raise ConnectionError('It was unplugged.')
    return self._result


class _Hosts:
  """Each is lost after its number of calls, those that follow never."""

  def __init__(self, *calls):
    self._calls = list(calls)

  def start(self, kind):
    return _Remote(kind, self._calls.pop(0) if self._calls else 10**9)


@pytest.fixture(autouse=True)
def folder_of_hosts(tmp_path_factory, monkeypatch):
  folder = tmp_path_factory.mktemp('hosts')
  monkeypatch.setattr('tempfile.tempdir', str(folder))
  monkeypatch.setattr(remote_runs, '_SECONDS_OF_A_LOOK', 0.1)
  yield folder
  assert not list(folder.iterdir())


def _runner(root, hosts, report=lambda line: None, program=here._PROGRAM):
  runs = remote_runs.RemoteRuns(
      hosts,
      ['-c', program],
      environment={},
      working_directory=pathlib.Path.cwd(),
      allow_mixed_hosts=False,
      report=report,
  )
  return here._runner(root, start=runs.start)


def _outcomes(root, cells):
  return [runner.CellFolder(root, cell).outcome() for cell in cells]


def test_cells_end_as_they_do_here(tmp_path):
  cells = [here._cell(does) for does in ('fails', 'killed', 'works')]
  _runner(tmp_path / 'there', _Hosts()).run(cells, 2)
  here._runner(tmp_path / 'here').run(cells, 2)
  there, ours = (_outcomes(tmp_path / at, cells) for at in ('there', 'here'))
  assert [(o.state, o.problem.replace(str(tmp_path), '')) for o in there] == [
      (o.state, o.problem.replace(str(tmp_path), '')) for o in ours
  ]
  for at in ('there', 'here'):
    files = hosted_program.files_of(tmp_path / at / cells[2].folder / 'run')
    assert [file.name for file in files] == ['starts', 'summary.json']


def test_what_a_stopped_cell_has_saved_comes_back(tmp_path):
  cell = here._cell('waits')
  first = _runner(tmp_path, _Hosts())
  thread = threading.Thread(target=first.run, args=([cell], 1))
  thread.start()
  log = runner.CellFolder(tmp_path, cell).log
  while not (log.exists() and 'waiting' in log.read_text()):
    time.sleep(0.02)
  first.stop()
  thread.join()
  assert _outcomes(tmp_path, [cell])[0].state == 'interrupted'
  assert (runner.CellFolder(tmp_path, cell).run / 'saved').exists()
  _runner(tmp_path, _Hosts()).run([cell], 1)
  assert _outcomes(tmp_path, [cell])[0].state == 'finished'
  assert here._starts(tmp_path, cell) == 2


@pytest.mark.parametrize('num_lost', [2, 3])
def test_a_lost_host_is_replaced_twice(tmp_path, monkeypatch, num_lost):
  monkeypatch.setattr(remote_runs, '_SECONDS_BETWEEN_FETCHES', 0.0)
  lines = []
  cell = here._cell('works')
  program = here._PROGRAM.replace('does = flags', 'time.sleep(1)\ndoes = flags')
  hosts = _Hosts(*[20] * num_lost)
  _runner(tmp_path, hosts, lines.append, program).run([cell], 1)
  (outcome,) = _outcomes(tmp_path, [cell])
  assert sum('unplugged' in line for line in lines) == num_lost
  if num_lost < 3:
    assert outcome.state == 'finished'
    assert here._starts(tmp_path, cell) == 3  # The third had the first two's.
  else:
    assert outcome.state == 'failed'
    assert 'found 3 lost while they did' in outcome.problem


def test_a_host_of_other_software_is_an_error(tmp_path, monkeypatch):
  running = _runner(tmp_path, _Hosts())
  monkeypatch.setattr(hosted_program, 'describe', lambda: {'numpy': '2'})
  with pytest.raises(remote_runs.OtherHostError, match='mixed_hosts'):
    running.run([here._cell('works')], 1)


def test_files_are_fetched_as_they_are_together(tmp_path):
  hosted = hosted_program.HostedProgram()
  hosted.begin(['-c', _COUNTS], {}, str(tmp_path), str(tmp_path))
  while not hosted.look(0, 0.05).log:
    pass
  for _ in range(20):
    snapshot = hosted.snapshot()
    assert snapshot.names == ['first', 'second']
    assert [file.name for file in snapshot.changed] == snapshot.names
    first, second = (
        {int(n) for n in hosted.read(name, 0).split()}
        for name in snapshot.names
    )
    assert max(first) - max(second) in (0, 1)
    assert hosted.look(0, 0.0).exit_code is None
  hosted.close()


def test_files_that_stay_are_not_fetched_again(tmp_path, monkeypatch):
  monkeypatch.setattr(hosted_program, '_SETTLED_NANOSECONDS', -(10**12))
  hosted = hosted_program.HostedProgram()
  hosted.write('sent', 0o600, b'a')
  program = "import sys; open(sys.argv[-1][13:] + '/new', 'w').write('b')"
  hosted.begin(['-c', program], {}, str(tmp_path), str(tmp_path))
  while hosted.look(0, 1.0).exit_code is None:
    pass
  assert hosted.snapshot() == (['new', 'sent'], [('new', 0o644, 1)])
  assert hosted.snapshot() == (['new', 'sent'], [])
  hosted.close()


def test_folders_of_hosts_that_ended_are_removed(folder_of_hosts):
  old = hosted_program.HostedProgram()
  held = hosted_program.HostedProgram()
  os.close(old._lock)  # As when its process ends.
  new = hosted_program.HostedProgram()
  assert not old._folder.exists()
  assert held._folder.exists()
  for hosted in (held, new):
    hosted.close()


@pytest.mark.parametrize('has_come', [True, False])
def test_a_comparison_killed_while_it_replaces_a_run(tmp_path, has_come):
  run = tmp_path / 'run'
  for name in ('run.coming', 'run.before'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'file').write_text(name)
  if has_come:
    (tmp_path / 'run.coming').rename(run)
  remote_runs.recover(run)
  expected = 'run.coming' if has_come else 'run.before'
  assert (run / 'file').read_text() == expected
  assert [path.name for path in tmp_path.iterdir()] == ['run']


def test_a_large_file_goes_to_and_fro_in_pieces(tmp_path, monkeypatch):
  monkeypatch.setattr(hosted_program, 'PIECE_BYTES', 3)
  cell = here._cell('works')
  run = runner.CellFolder(tmp_path, cell).run
  (run / 'below').mkdir(parents=True)
  contents = {'below/six': b'abcdef', 'seven': b'abcdefg', 'none': b''}
  for name, content in contents.items():
    (run / name).write_bytes(content)
  (run / 'seven').chmod(0o600)
  program = (
      'import pathlib, sys\n'
      "for p in pathlib.Path(sys.argv[-1][13:]).rglob('*'):\n"
      '  if p.is_file(): p.write_bytes(p.read_bytes()[::-1])\n'
      "print('x' * 10)\n"
  )
  _runner(tmp_path, _Hosts(), program=program).run([cell], 1)
  for name, content in contents.items():
    assert (run / name).read_bytes() == content[::-1]
  assert (run / 'seven').stat().st_mode & 0o777 == 0o600
  assert 'xxxxxxxxxx\n' in runner.CellFolder(tmp_path, cell).log.read_text()
