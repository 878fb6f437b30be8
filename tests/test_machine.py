"""The memory that a machine or a container has."""

import psutil

from tff_meta import machine


def test_a_container_may_have_less_than_the_machine(tmp_path):
  contents = ['max\n', '9223372036854771712\n', '4096\n', '8192\n']
  files = [tmp_path / str(i) for i in range(len(contents) + 1)]
  for file, content in zip(files, contents, strict=False):
    file.write_text(content)
  total = psutil.virtual_memory().total
  assert machine.total_bytes(files[:2] + files[4:]) == total
  assert machine.total_bytes(files) == 4096
