"""What tests of the programs share."""

import sys

from absl.testing import flagsaver
import pytest

from binaries import command_line


@pytest.fixture
def call(monkeypatch, capfd):
  """Returns a function that runs a program: (code, stdout, stderr).

  It runs in this process, which has imported TFF: that takes most of the time
  of a short run. So it is for `train` and `evaluate`, whose flags differ;
  others are called by `program_calls`.
  """

  def run(program, *flags):
    monkeypatch.setattr(sys, 'argv', [program.__name__, *map(str, flags)])
    capfd.readouterr()
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as stopped:
      command_line.run(program.main)
    return stopped.value.code, *capfd.readouterr()

  return run
