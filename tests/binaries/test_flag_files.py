"""Flag files, from other systems and in other folders."""

import pathlib

import pytest

from binaries import flag_files

_ROOT = pathlib.Path(flag_files.__file__).parents[1]
_PRESET = 'binaries/presets/metavers_cifar10_fed_rep.flags'
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


def test_flag_files_of_the_library_are_found_from_anywhere(
    tmp_path, monkeypatch
):
  """Also beside a folder `binaries` of somebody else's."""
  monkeypatch.chdir(_ROOT)
  flags = flag_files.expand([f'--flagfile={_PRESET}'])
  assert len(flags) > 5 and not any('flagfile' in flag for flag in flags)

  presets = tmp_path / 'binaries' / 'presets'
  presets.mkdir(parents=True)
  (tmp_path / 'binaries' / '__init__.py').touch()
  # The preset includes this one of ours, not theirs.
  (presets / 'metavers_cifar10_50.flags').write_text('--theirs')
  monkeypatch.chdir(tmp_path)
  assert flag_files.expand([f'--flagfile={_PRESET}']) == flags
  monkeypatch.setenv('HOME', str(_ROOT))
  assert flag_files.expand([f'--flagfile=~/{_PRESET}']) == flags

  theirs = '--flagfile=binaries/presets/metavers_cifar10_50.flags'
  assert flag_files.expand([theirs]) == ['--theirs']
  assert '--theirs' not in flag_files.expand([theirs], ours=True)

  with pytest.raises(FileNotFoundError, match="mean 'omniglot_frl_gpal.flags"):
    flag_files.expand(['--flagfile=binaries/presets/omniglot_frl_gpl.flags'])
  with pytest.raises(OSError, match='mine.flags, found No such file'):
    flag_files.expand(['--flagfile=mine.flags'])
  with pytest.raises(OSError, match='binaries, found Is a directory'):
    flag_files.expand(['--flagfile=binaries'])
