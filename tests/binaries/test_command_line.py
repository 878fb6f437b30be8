"""What all programs share."""

import os
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


def _run(program, **environment):
  return subprocess.run(
      [sys.executable, '-c', program],
      cwd=_ROOT,
      env=os.environ | environment,
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


@pytest.mark.parametrize(
    'environment',
    [
        {'PYTHONIOENCODING': 'ascii'},
        {'LC_ALL': 'POSIX', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'},
    ],
)
def test_an_output_that_lacks_a_character_shows_its_code(environment):
  program = """
from binaries import command_line
command_line.run(lambda: print('80 \\u00b1 1.5 \\udce9'))
"""
  ended = _run(program, **environment)
  assert (ended.returncode, ended.stdout) == (0, '80 \\xb1 1.5 \\udce9\n')


@pytest.mark.parametrize(
    'error, line',
    [
        (
            MemoryError('Unable to allocate 8 EiB'),
            'memory, found Unable to allo',
        ),
        (MemoryError(), 'memory, found none left'),
        (OSError(28, 'No space left', '/a/b'), "No space left: '/a/b'"),
    ],
)
def test_failures_of_the_environment_are_a_line(error, line, capfd):
  with pytest.raises(SystemExit) as end, command_line.reported_failures():
    raise error
  assert end.value.code == command_line.FAILURE
  err = capfd.readouterr().err
  assert line in err and err.count('\n') == 1


def test_an_error_without_a_place_is_given_one(capfd):
  with pytest.raises(SystemExit), command_line.reported_failures('/a/run'):
    raise OSError(28, 'No space left on device')
  assert capfd.readouterr().err == (
      'Error: [Errno 28] No space left on device, in /a/run\n'
  )


def _without_tff(name, *flags):
  """Runs a program that cannot import TFF; returns its code and stderr."""
  ended = _run(
      'import sys\n'
      f'from binaries import command_line, {name}\n'
      'sys.modules["tensorflow_federated"] = None\n'
      f'sys.argv = {[name, *map(str, flags)]}\n'
      f'command_line.run({name}.main)'
  )
  return ended.returncode, ended.stderr.splitlines()


@pytest.mark.ci
def test_what_is_going_to_happen_is_said_before_tensorflow_is_loaded(
    tmp_path, monkeypatch
):
  code, lines = _without_tff(
      'train', '--algorithm=frl', f'--output_dir={tmp_path}/run'
  )
  assert code == command_line.FAILURE and len(lines) == 2
  assert lines[0] == (
      'Training frl on digit_pairs for 200 rounds with the preset demo, written'
      f' to {tmp_path}/run. Loading TensorFlow takes some seconds.'
  )
  assert 'to import tensorflow_federated' in lines[1]
  code, lines = _without_tff('train', '--describe')
  assert code == command_line.FAILURE and len(lines) == 2
  assert lines[0].startswith('Describing the clients of digits. Loading')
  (tmp_path / 'mine.py').write_text('import tensorflow')
  path = f'{tmp_path}:{os.environ.get("PYTHONPATH", "")}'
  monkeypatch.setenv('PYTHONPATH', path)
  code, lines = _without_tff('train', '--algorithm=frl', '--plugins=mine')
  assert code == command_line.FAILURE and len(lines) == 3
  assert lines[0].startswith('Importing mine. Loading TensorFlow takes')
  assert lines[1].startswith('Training frl on digit_pairs for 200 rounds with')
  (tmp_path / 'config.json').write_text('{}')
  code, lines = _without_tff('evaluate', f'--run_dir={tmp_path}')
  assert code == command_line.FAILURE and len(lines) == 2
  assert lines[0].startswith(f'Evaluating the run in {tmp_path}. Loading')


def test_what_needs_no_tensorflow_is_refused_without_it():
  code, lines = _without_tff(
      'train', '--algorithm=frl', '--output_dir=/proc/run'
  )
  assert code == command_line.FAILURE and len(lines) == 1
  assert 'to be able to write to /proc/run, found' in lines[0]
  assert _without_tff('train', '--algorithm=frl', '--track=ml_flow') == (
      command_line.USAGE_ERROR,
      [
          'Error: Expected `track` to be one of wandb, mlflow, found'
          " 'ml_flow'. Tip: did you mean 'mlflow'?"
      ],
  )
  code, lines = _without_tff('evaluate')
  assert code == command_line.USAGE_ERROR and len(lines) == 1
  assert 'Tip: it is the --output_dir of binaries.train' in lines[0]
  code, lines = _without_tff('evaluate', '--run_dir=/nowhere')
  assert code == command_line.FAILURE and len(lines) == 1
  assert 'found no config.json there. Tip: --run_dir is' in lines[0]


def test_help_is_no_error():
  assert _without_tff('evaluate', '--helpshort') == (0, [])


def test_other_errors_keep_their_traceback():
  with pytest.raises(KeyError), command_line.reported_errors():
    raise KeyError('a fault of ours')
