import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types

import psutil
import pytest

from binaries import command_line
from tff_meta.execution import native

_ROOT = pathlib.Path(__file__).parents[2]
_SUM = """
import os, sys
os.environ['http_proxy'] = 'http://127.0.0.1:9'  # Nothing answers there.
from tff_meta.execution import native
native.set_native_context()
import numpy as np
import tensorflow_federated as tff

@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def total(values):
  return tff.federated_sum(values)

print(total([1.0, 2.0, 4.0]), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    'end', ['return', pytest.param('kill', marks=pytest.mark.ci)]
)
def test_the_worker_computes_and_ends_with_its_parent(end):
  process = subprocess.Popen(
      [sys.executable, '-c', _SUM],
      cwd=_ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
  )
  assert process.stdout.readline() == b'7.0\n'
  (worker,) = psutil.Process(process.pid).children(recursive=True)
  assert worker.name() == 'worker_binary'
  assert worker.environ()['TF_ENABLE_ONEDNN_OPTS'] == '1'
  # A Ctrl-C in the terminal reaches the program's process group only.
  assert os.getpgid(worker.pid) != os.getpgid(process.pid)

  if end == 'kill':
    process.send_signal(signal.SIGKILL)
  _, errors = process.communicate(b'\n', timeout=60)

  assert errors == b''
  deadline = time.monotonic() + 20
  while _is_alive(worker) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not _is_alive(worker)


def test_a_program_leaves_no_file_of_autograph(tmp_path):
  program = tmp_path / 'program.py'
  program.write_text(
      textwrap.dedent(
          """
          import sys
          import tensorflow as tf
          from tff_meta.execution import native

          @tf.function
          def absolute(x):
            return x if x > 0 else -x

          absolute(tf.constant(-1))
          assert any('autograph_generated' in name for name in sys.modules)
          native.end_process(3)
      """
      )
  )
  temporary = tmp_path / 'temporary'
  temporary.mkdir()
  done = subprocess.run(
      [sys.executable, program],
      cwd=_ROOT,
      env=os.environ
      | {
          'TMPDIR': str(temporary),
          'PYTHONPATH': str(_ROOT),
          'PYTHONDONTWRITEBYTECODE': '',  # It writes it.
      },
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 3, done.stderr
  assert not [path for path in temporary.rglob('*') if path.is_file()]


def _is_alive(process):
  try:
    return process.status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def test_localhost_is_never_proxied(monkeypatch):
  monkeypatch.setenv('no_proxy', 'example.org, localhost')
  monkeypatch.setenv('NO_PROXY', '')
  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '0')
  native.prepare_environment()
  expected = 'example.org,localhost,127.0.0.1'
  assert os.environ['no_proxy'] == os.environ['NO_PROXY'] == expected
  assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == '0'


@pytest.mark.parametrize(
    'name', ['TF_ENABLE_ONEDNN_OPTS', 'TF_NUM_INTRAOP_THREADS']
)
def test_onednn_is_on_with_one_thread_unless_they_are_set(monkeypatch, name):
  monkeypatch.delenv(name, raising=False)
  monkeypatch.delitem(sys.modules, 'tensorflow', raising=False)
  native.prepare_environment()
  assert os.environ[name] == '1'

  monkeypatch.setenv(name, '2')
  native.prepare_environment()
  assert os.environ[name] == '2'


@pytest.mark.parametrize('name', ['INTRAOP', 'INTEROP'])
@pytest.mark.parametrize('value', ['two', '', '0', '10000'])
def test_a_number_of_threads_is_a_number(monkeypatch, name, value):
  monkeypatch.setenv(f'TF_NUM_{name}_THREADS', value)
  with pytest.raises(ValueError, match=f"{name}_THREADS .* found '{value}'"):
    native.prepare_environment()


@pytest.mark.parametrize('tensorflow_is_first', [False, True])
def test_tensorflow_has_onednn_then(tensorflow_is_first):
  """In a program of its own; TensorFlow says so when it is imported."""
  lines = [
      'from tff_meta.execution import native',
      'native.prepare_environment()',
      'import tensorflow',
  ]
  if tensorflow_is_first:
    lines.insert(0, lines.pop())
  environment = os.environ | {'TF_CPP_MIN_LOG_LEVEL': '0'}
  environment.pop('TF_ENABLE_ONEDNN_OPTS', None)
  program = subprocess.run(
      [sys.executable, '-c', '\n'.join(lines)],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
  )
  if tensorflow_is_first:
    assert 'variable TF_ENABLE_ONEDNN_OPTS to 1' in program.stderr
  else:
    assert 'oneDNN custom operations are on' in program.stderr
    assert 'variable TF_ENABLE_ONEDNN_OPTS to 1' not in program.stderr


def test_a_missing_worker_is_named(tmp_path):
  with pytest.raises(native.WorkerError, match='worker_binary'):
    native._start_worker(tmp_path, 1)


@pytest.fixture
def fake_tff(tmp_path, monkeypatch):
  """Returns a function that makes TFF one whose worker is a shell script."""

  def fake(script):
    worker = tmp_path / 'data' / 'worker_binary'
    worker.parent.mkdir()
    worker.write_text(f'#!/bin/sh\n{script}\n')
    worker.chmod(0o755)
    tff = types.SimpleNamespace(
        __file__=str(tmp_path / '__init__.py'),
        framework=types.SimpleNamespace(set_default_context=pytest.fail),
    )
    monkeypatch.setattr(native.installation, 'import_tff', lambda: tff)

  return fake


def test_a_worker_that_ends_at_once_is_one_line_and_code_1(fake_tff, capfd):
  fake_tff('exit 3')
  with pytest.raises(SystemExit) as stopped:
    with command_line.reported_errors():
      native.set_native_context()
  _, err = capfd.readouterr()
  assert stopped.value.code == 1
  assert err.startswith('Error: Expected the TFF worker to answer within')
  assert 'found exit code 3.' in err and err.count('\n') == 1


def test_a_worker_that_never_answers_is_ended(fake_tff, monkeypatch):
  fake_tff('exec sleep 600')
  monkeypatch.setattr(native, '_START_TIMEOUT_SECONDS', 1.0)
  with pytest.raises(native.WorkerError, match='within 1 sec.* exit code -9'):
    native.set_native_context()
