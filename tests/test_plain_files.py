"""Only plain files are read, whatever stands in their place."""

import os

import pytest

from tff_meta import plain_files


@pytest.mark.parametrize(
    'place, found',
    [
        (os.mkdir, 'a directory'),
        (os.mkfifo, 'a pipe'),
        (lambda p: os.symlink('/dev/full', p), 'a device'),
        (lambda p: os.symlink('/dev/zero', p), 'a device'),
        (lambda p: os.symlink('nothing', p), 'No such file'),
        (lambda p: os.symlink(p, p), 'symbolic links'),
        (lambda p: os.symlink('/proc/self/status', p), 'found more'),
        (lambda p: p.write_bytes(b'0123456789a'), 'at most 10 bytes, found 11'),
    ],
    ids=range(8),
)
def test_what_is_no_plain_file_is_an_error_that_names_it(
    tmp_path, place, found
):
  path = tmp_path / 'file'
  place(path)
  with pytest.raises(OSError) as error:
    plain_files.read_bytes(path, 10)
  assert found in str(error.value) and str(path) in str(error.value)


def test_a_link_to_a_plain_file_is_read(tmp_path):
  (tmp_path / 'file').write_bytes(b'0123456789')
  (tmp_path / 'link').symlink_to('file')
  assert plain_files.read_bytes(tmp_path / 'link', 10) == b'0123456789'


def test_what_is_in_a_directorys_place_is_named(tmp_path):
  (tmp_path / 'file').write_text('')
  (tmp_path / 'link').symlink_to('nothing')
  for name, found in (('file', 'a file'), ('link', 'a link to nothing')):
    for path in (tmp_path / name, tmp_path / name / 'run'):
      with pytest.raises(
          plain_files.DamagedFileError,
          match=f'{tmp_path / name} to be a directory, found {found}',
      ):
        plain_files.make_directory(path, parents=True)
  plain_files.make_directory(tmp_path / 'a' / 'b', parents=True)
  plain_files.make_directory(tmp_path / 'a' / 'b')
