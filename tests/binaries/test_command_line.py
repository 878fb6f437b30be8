"""What all programs share."""

import pathlib
import subprocess
import sys

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


def test_no_interrupt_is_lost():
  ended = subprocess.run(
      [sys.executable, '-c', _INTERRUPTED_IN_A_CALLBACK],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=50,
  )
  assert ended.returncode == command_line.INTERRUPTED
  assert ended.stdout == 'goes on\n'  # Else nothing was ignored.
  assert ended.stderr == 'Interrupted.\n'
