"""Flag files, from other systems and in other folders, and those of ours."""

import pathlib

from absl import flags
from absl.testing import flagsaver
import pytest

from binaries import experiments
from binaries import flag_files
from binaries import train

_ROOT = pathlib.Path(flag_files.__file__).parents[1]
_PRESETS = _ROOT / 'binaries' / 'presets'
_NAMES = sorted(path.stem for path in _PRESETS.glob('*.flags'))
_FLAGS = ['--rounds=3', '--hparams=a=1']


@pytest.mark.parametrize(
    'content',
    [
        b'--rounds=3\n--hparams=a=1\n',
        b'\xef\xbb\xbf--rounds=3\r\n--hparams=a=1\r\n',  # Of Windows.
        b'\xef\xbb\xbf# a comment\r\n\r\n--rounds=3\r\n--hparams=a=1',
        b'--rounds=3\r--hparams=a=1\r',  # Of an old Mac.
        b'  --rounds=3 \t\n\t--hparams=a=1\xc2\xa0\n \t\n',
        b'// caf\xc3\xa9\n   # indented\n--rounds=3\n--hparams=a=1\n',
    ],
)
def test_a_file_of_any_system_is_read(content, tmp_path):
  path = tmp_path / 'with space.flags'
  path.write_bytes(content)
  assert flag_files.expand([f'--flagfile={path}']) == _FLAGS
  assert flag_files.expand(['--x', '-flagfile', str(path), 'y']) == [
      *('--x', *_FLAGS, 'y')
  ]


@pytest.mark.parametrize(
    'content, problem',
    [
        ('--rounds=3\n'.encode('utf-16'), 'found UTF-16. Tip: save it as'),
        ('--rounds=3\n'.encode('utf-32'), 'found UTF-32. Tip: save it as'),
        ('--rounds=3\n'.encode('utf-16-le'), 'found a NUL in line 1'),
        (b'--rounds=3\n# caf\xe9\n', 'found byte 0xe9 in line 2. Tip'),
        (b'--a\r\n--b\r\n\x00', 'found a NUL in line 3'),
        ('--a\n–rounds=3\n'.encode(), "found '–rounds=3' in line 2"),
        (b'--flagfile=mine.flags', 'not to include itself'),
        (b'--flagfile=\n', 'Expected --flagfile to name a file, found none'),
    ],
)
def test_another_file_is_refused(content, problem, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = tmp_path / 'mine.flags'
  path.write_bytes(content)
  with pytest.raises(ValueError) as error:
    flag_files.expand(['--flagfile=mine.flags'])
  assert problem in str(error.value)
  assert str(path) in str(error.value) or b'flagfile=\n' in content


def test_what_follows_two_dashes_is_no_flag_file():
  arguments = ['--a', '--', '--flagfile=nowhere']
  assert flag_files.expand(arguments) == arguments


def test_a_file_names_others_relative_to_itself(tmp_path, monkeypatch):
  folder = tmp_path / 'a' / 'folder'
  folder.mkdir(parents=True)
  (folder / 'mine.flags').write_text(
      '--rounds=3\n--flagfile=../other.flags\n--flagfile=third.flags'
  )
  (folder.parent / 'other.flags').write_text('--flagfile=folder/third.flags')
  (folder / 'third.flags').write_text('--hparams=a=1')
  (tmp_path / 'third.flags').write_text('--another=1')
  monkeypatch.chdir(tmp_path)
  expected = [*_FLAGS, _FLAGS[1]]
  assert flag_files.expand(['--flagfile=a/folder/mine.flags']) == expected
  (folder / 'third.flags').write_text('--flagfile=./mine.flags')
  with pytest.raises(ValueError, match='mine.flags not to include itself'):
    flag_files.expand(['--flagfile=a/folder/mine.flags'])


def test_flag_files_of_the_library_are_found_from_anywhere(
    tmp_path, monkeypatch
):
  """Also in a file elsewhere, and beside somebody else's `binaries`."""
  name = 'binaries/presets/digit_pairs_frl.flags'
  monkeypatch.chdir(_ROOT)
  ours = flag_files.expand([f'--flagfile={name}'])
  assert len(ours) == 5 and ours[0] == '--algorithm=frl'

  monkeypatch.chdir(tmp_path)
  assert flag_files.expand([f'--flagfile={name}']) == ours
  (tmp_path / 'mine.flags').write_text(f'--flagfile={name}')
  assert flag_files.expand(['--flagfile=mine.flags']) == ours
  monkeypatch.setenv('HOME', str(_ROOT))
  assert flag_files.expand([f'--flagfile=~/{name}']) == ours

  theirs = tmp_path / name
  theirs.parent.mkdir(parents=True)
  theirs.write_text('--theirs')
  assert flag_files.expand([f'--flagfile={name}']) == ['--theirs']
  assert flag_files.expand([flag_files.preset('digit_pairs_frl')]) == ours

  with pytest.raises(FileNotFoundError, match="mean 'omniglot_frl_gpal.flags"):
    flag_files.expand(['--flagfile=binaries/presets/omniglot_frl_gpl.flags'])
  with pytest.raises(OSError, match='nothing.flags, found No such file'):
    flag_files.expand(['--flagfile=nothing.flags'])
  with pytest.raises(OSError, match='binaries, found Is a directory'):
    flag_files.expand(['--flagfile=binaries'])


def _config(arguments):
  with flagsaver.flagsaver():
    assert flags.FLAGS(['train', *flag_files.expand(arguments)]) == ['train']
    return train.configuration()


@pytest.mark.parametrize('name', _NAMES)
def test_a_flag_file_of_ours_is_whole(name):
  """It has a comment, and flags that make a configuration."""
  lines = (_PRESETS / f'{name}.flags').read_text().splitlines()
  assert lines[0].startswith('# ')
  assert all(line.startswith(('# ', '--')) for line in lines)
  _config([flag_files.preset(name)])


def test_the_first_command_of_the_readme_is_that_of_frl_alone():
  alone = _config(['--algorithm=frl'])
  assert _config([flag_files.preset('digit_pairs_frl')]) == alone


def test_flag_files_of_ours_are_of_cells_of_tables():
  """Each is written once: a table reads it, and no other has its flags."""
  of_tables = {
      flag
      for table in experiments.TABLES.values()
      for flag in (
          *table.flags,
          *(f for part in (*table.settings, *table.rows) for f in part.flags),
      )
  }
  ours = {flag_files.preset(name) for name in _NAMES}
  assert ours - of_tables == {flag_files.preset('digit_pairs_frl')}
  contents = [tuple(flag_files.expand([flag])) for flag in ours]
  assert len(set(contents)) == len(contents)
