"""What all programs share."""

import pathlib
import subprocess
import sys

import pytest

from binaries import command_line

_ROOT = pathlib.Path(command_line.__file__).parents[1]

# Ctrl-C while a callback of the garbage collector runs, as jax has one. The
# handler is set because a job in the background is started without it.
_INTERRUPTED_IN_A_CALLBACK = """
import gc, signal, sys, time
from binaries import command_line

signal.signal(signal.SIGINT, signal.default_int_handler)

def callback(phase, info):
  gc.callbacks.remove(callback)
  signal.raise_signal(signal.SIGINT)

def main():
  gc.callbacks.append(callback)
  gc.collect()
  print('goes on', flush=True)
  time.sleep(60)

command_line.run(main)
"""


def _run(program):
  return subprocess.run(
      [sys.executable, '-c', program],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=50,
  )


def test_no_interrupt_is_lost():
  ended = _run(_INTERRUPTED_IN_A_CALLBACK)
  assert ended.returncode == command_line.INTERRUPTED
  assert ended.stdout == 'goes on\n'  # Else nothing was ignored.
  assert ended.stderr == 'Interrupted.\n'


# Ctrl-C while modules are imported: what they raise then is a consequence. A
# job in the background is started without Python's handler of it.
_INTERRUPTED_IN_AN_IMPORT = """
import signal
from binaries import command_line

signal.signal(signal.SIGINT, signal.default_int_handler)

def main():
  with command_line.reported_errors():
    try:
      {interrupt}
    except KeyboardInterrupt:
      pass
    raise {error}('half imported')

command_line.run(main)
"""


@pytest.mark.parametrize('error', ['ImportError', 'AttributeError'])
def test_what_fails_after_an_interrupt_is_an_interrupt(error):
  program = _INTERRUPTED_IN_AN_IMPORT.format(
      interrupt='signal.raise_signal(signal.SIGINT)', error=error
  )
  ended = _run(program)
  assert ended.returncode == command_line.INTERRUPTED
  assert ended.stderr == 'Interrupted.\n'


def test_without_an_interrupt_an_error_is_reported():
  program = _INTERRUPTED_IN_AN_IMPORT.format(
      interrupt='pass', error='ImportError'
  )
  ended = _run(program)
  assert ended.returncode == command_line.FAILURE
  assert ended.stderr == 'Error: half imported\n'
