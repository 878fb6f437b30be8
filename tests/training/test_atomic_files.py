"""Files that are written whole or not at all."""

import resource
import signal

import pytest

from tff_meta.training import atomic_files


def test_a_disk_that_is_full_is_named_with_the_file(tmp_path):
  """By a limit on the size of files, whose error names none either."""
  path = tmp_path / 'a.json'
  path.write_text('old')
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
  try:
    with pytest.raises(OSError, match='File too large') as error:
      atomic_files.write_bytes(path, bytes(10_000))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
  assert error.value.filename == str(path)
  assert [p.name for p in tmp_path.iterdir()] == ['a.json']
  assert path.read_text() == 'old'
