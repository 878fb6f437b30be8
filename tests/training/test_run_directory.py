import os
import pathlib
import stat
import subprocess
import sys

import pytest

from tff_meta.training import run_directory

_HOLD = """
import sys
from tff_meta.training import run_directory
with run_directory.RunDirectory(sys.argv[1]).locked():
  print('held', flush=True)
  sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
  directory = run_directory.RunDirectory(tmp_path / 'run')
  root = pathlib.Path(run_directory.__file__).parents[2]
  other = subprocess.Popen(
      [sys.executable, '-c', _HOLD, str(directory.root)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      cwd=root,
  )
  try:
    assert other.stdout.readline() == b'held\n'
    with pytest.raises(run_directory.RunDirectoryError, match='another'):
      with directory.locked():
        pass
  finally:
    other.kill()
    other.wait()
  with directory.locked():
    assert directory.root.is_dir()


def test_a_secret_is_its_owners_before_it_has_its_name(tmp_path, monkeypatch):
  modes, replace = [], os.replace

  def look(source, target):
    modes.append(stat.S_IMODE(os.stat(source).st_mode))
    replace(source, target)

  monkeypatch.setattr(os, 'replace', look)
  directory = run_directory.RunDirectory(tmp_path)
  before = os.umask(0)
  try:
    secret = directory.secret_of_cohorts()
  finally:
    os.umask(before)
  assert directory.secret_of_cohorts() == secret > 0
  assert modes == [0o600]
  assert stat.S_IMODE(directory.cohort_secret.stat().st_mode) == 0o600


def test_a_file_in_the_way_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  directory = run_directory.RunDirectory(tmp_path / 'file' / 'run')
  with pytest.raises(
      run_directory.RunDirectoryError,
      match='file to be a directory, found a file',
  ):
    with directory.locked():
      pass


def test_what_is_no_directory_is_named(tmp_path):
  (tmp_path / 'link').symlink_to('nowhere')
  (tmp_path / 'file').touch()
  for name, problem in {
      'link': 'link to be a directory, found a link to nothing',
      'file': 'file to be a directory, found a file',
      'file/run': 'file to be a directory, found a file',
      'n' * 300: 'name too long',
  }.items():
    place = run_directory.RunDirectory(tmp_path / name)
    with pytest.raises(run_directory.RunDirectoryError, match=problem):
      with place.locked():
        pass


@pytest.mark.parametrize(
    'before, meanwhile, stays',
    [
        ((), {'config.json': '{}', 'metrics.csv': ''}, False),
        ((), {'config.json': '{}', 'metrics.csv': 'round\n1\n'}, True),
        # What a program writes before, and after, its first round.
        (
            (),
            {'program_metrics.csv': 'round\n', 'program_states/x': ''}
            | {'program_states/program_state_0/x': ''},
            False,
        ),
        ((), {'program_metrics.csv': 'round\n1\n'}, True),
        ((), {'program_states/program_state_2/x': ''}, True),
        ((), {'checkpoints/round_000000001.ckpt': ''}, True),
        (('config.json',), {'metrics.csv': ''}, True),
        (('mine.txt',), {}, True),
    ],
)
def test_a_run_that_fails_at_once_leaves_nothing(
    tmp_path, before, meanwhile, stays
):
  directory = run_directory.RunDirectory(tmp_path / 'run')
  for name in before:
    directory.root.mkdir()
    (directory.root / name).touch()
  with pytest.raises(OSError, match='at once'):
    with directory.locked(), directory.removed_if_no_round_is_done():
      for name, text in meanwhile.items():
        path = directory.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
      raise OSError('at once')
  found = {
      str(path.relative_to(directory.root))
      for path in tmp_path.rglob('*')
      if path.is_file()
  }
  assert found == ({'.lock', *before, *meanwhile} if stays else set())


def test_a_program_without_its_configuration_is_not_gone_on_with(tmp_path):
  """Killed, it has states and rows, but no checkpoint that tells whose."""
  directory = run_directory.RunDirectory(tmp_path)
  directory.program_states.mkdir()
  with pytest.raises(
      run_directory.RunDirectoryError, match='found program_states without'
  ):
    with directory.locked():
      pass


def test_metrics_of_something_else_are_not_touched(tmp_path):
  (tmp_path / 'metrics.csv').write_text('mine')
  directory = run_directory.RunDirectory(tmp_path)
  with pytest.raises(run_directory.RunDirectoryError, match='metrics.csv'):
    with directory.locked():
      pass
  assert (tmp_path / 'metrics.csv').read_text() == 'mine'


def test_leftovers_are_removed(tmp_path):
  (tmp_path / 'summary.json.77.tmp').write_text('{"half')
  with run_directory.RunDirectory(tmp_path).locked():
    pass
  assert not (tmp_path / 'summary.json.77.tmp').exists()


def test_config_is_read_or_its_trouble_named(tmp_path):
  directory = run_directory.RunDirectory(tmp_path)
  assert directory.read_config() is None
  directory.config.write_text('{"seed": 1}')
  assert directory.read_config() == {'seed': 1}
  directory.config.write_text('{"seed"')
  with pytest.raises(run_directory.RunDirectoryError, match='unreadable'):
    directory.read_config()


@pytest.mark.parametrize(
    'name, why',
    [
        ('new', None),
        ('a/b/new', None),
        ('.', None),
        ('file/new', 'to be a directory, found a file. Tip: remove it'),
        ('link', 'to be a directory, found a link to nothing'),
        ('/proc/new', 'write to /proc/new, found .* in /proc'),
    ],
)
def test_where_nothing_can_be_written_is_known_at_once(tmp_path, name, why):
  (tmp_path / 'file').write_text('')
  (tmp_path / 'link').symlink_to('nowhere')
  before = sorted(tmp_path.iterdir())
  directory = run_directory.RunDirectory(tmp_path / name)
  if why is None:
    directory.check_can_be_made()
  else:
    with pytest.raises(run_directory.RunDirectoryError, match=why):
      directory.check_can_be_made()
  assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    'there, data, found',
    [
        ((), None, None),
        (('.DS_Store', '.lock', 'a.flags', 'out.log', 'data.png'), None, None),
        # As of runs that were killed before they had a configuration.
        (('config.json.7.tmp', 'client_states.sqlite-wal'), 'far', None),
        (('data.npz', 'data.npz.9.tmp'), None, None),
        (('config.json', 'mine.txt', 'ann/1.png'), 'run', None),
        (('checkpoints/round_000000001.ckpt', 'mine.txt'), None, None),
        (('mine.txt',), None, 'to hold a run, found mine.txt. Tip'),
        (('ann/1.png',), None, 'to hold a run, found ann. Tip'),
        (('ann/1.png',), 'run', 'outside of .*run, which .* found .*run. Tip'),
        ((), '.', 'outside of .*, found .*run. Tip: give another'),
        ((), 'here', 'outside of '),
    ],
)
def test_a_run_does_not_come_among_other_files(tmp_path, there, data, found):
  directory = run_directory.RunDirectory(tmp_path / 'run')
  for name in there:
    (directory.root / name).parent.mkdir(parents=True, exist_ok=True)
    (directory.root / name).touch()
  (tmp_path / 'far').mkdir()
  (tmp_path / 'here').symlink_to('.')
  place = None if data is None else tmp_path / data
  before = sorted(tmp_path.rglob('*'))
  if found is None:
    directory.check_is_free('data.npz', data=place)
  else:
    with pytest.raises(run_directory.RunDirectoryError, match=found):
      directory.check_is_free('data.npz', data=place)
  assert sorted(tmp_path.rglob('*')) == before


def test_differences_name_the_fields():
  old = {'seed': 1, 'hparams': {'a': 1.0, 'b': None}, 'gone': 'x'}
  new = {'seed': 1, 'hparams': {'a': 2.0, 'b': None}, 'more': [1]}
  assert run_directory.differences(old, new) == [
      'hparams.a: 1.0 -> 2.0',
      'gone: "x" -> nothing',
      'more: nothing -> [1]',
  ]
  assert not run_directory.differences(old, old)


def test_a_run_that_fails_at_once_takes_its_own_files_alone(tmp_path):
  """Also where it is stopped, in the place that a link leads to."""
  root, link = tmp_path / 'real', tmp_path / 'link'
  root.mkdir()
  link.symlink_to(root)
  directory = run_directory.RunDirectory(link)
  with (
      pytest.raises(KeyboardInterrupt),
      directory.locked(),
      directory.removed_if_no_round_is_done('data.npz'),
  ):
    for name in ('config.json', 'data.npz', 'mine'):
      (root / name).touch()
    raise KeyboardInterrupt
  assert [path.name for path in root.iterdir()] == ['mine']
