"""Hosts that form a Ray cluster."""

import contextlib
import csv
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import program_calls
import psutil
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_TIMEOUT_SECONDS = 600  # Shared machines can be slow.
_TRAIN = (
    'train',
    '--algorithm=fed_avg',
    '--rounds=3',
    '--shards=4',
    '--protocol=none',
    '--eval_every=0',
    '--noreferences',
)


def test_flags_that_do_not_go_together_are_named():
  calls = {
      (): 'either --head or --address, found neither.',
      ('--head', '--address=a:1'): 'either --head or --address, found both.',
      ('--address=a',): "--address=HOST:PORT, found 'a'.",
      ('--address=a:1', '--port=7000'): '--port with --head only',
      ('--head', '--port=65536'): '--port of at most 65535, found 65536.',
      ('--head', '--port=80'): 'at least 1024',
      ('--head', '--cpus=-1'): 'at least 0',
  }
  found = program_calls.call_all('worker', list(calls))
  for (code, _, stderr), expected in zip(found, calls.values(), strict=True):
    assert code == 2 and expected in stderr and stderr.count('\n') == 1, stderr


class _Hosts:
  """Programs that are hosts of a cluster on loopback addresses."""

  def __init__(self, folder, stack):
    self._folder, self._stack = folder, stack
    self.environment = os.environ | {
        'HOME': str(folder),
        'RAY_AUTH_TOKEN': 'the token of a test',
        'RAY_TMPDIR': str(folder),
    }
    self.environment.pop('RAY_AUTH_MODE', None)
    self.processes: dict[str, psutil.Process] = {}

  def begin(self, name, *flags):
    log = self._folder / f'{name}.log'
    with log.open('w') as output:
      process = subprocess.Popen(
          self.command('worker', '--cpus=1', '--gpus=0', *flags),
          cwd=_ROOT,
          env=self.environment,
          stdout=output,
          stderr=output,
      )
    self._stack.callback(process.wait, 60)
    self._stack.callback(process.terminate)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while 'Ctrl-C' not in log.read_text():
      assert process.poll() is None, log.read_text()
      assert time.monotonic() < deadline, log.read_text()
      time.sleep(0.2)
    self.processes[name] = psutil.Process(process.pid)

  def call(self, *arguments, **environment):
    done = subprocess.run(
        self.command(*arguments),
        cwd=_ROOT,
        env=self.environment | environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    return done.returncode, done.stderr

  def command(self, name, *arguments):
    return [sys.executable, '-m', f'binaries.{name}', *map(str, arguments)]


@pytest.fixture
def hosts():
  # Not `tmp_path`: names of sockets are short.
  folder = pathlib.Path(tempfile.mkdtemp(prefix='r_'))
  with contextlib.ExitStack() as stack:
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    yield _Hosts(folder, stack)


@pytest.mark.ci
def test_a_host_that_joined_computes_what_one_process_does(hosts, tmp_path):
  pytest.importorskip('ray')
  with socket.socket() as free:
    free.bind(('', 0))
    port = free.getsockname()[1]
  address = f'127.0.0.1:{port}'
  # The head has no core, so that the worker can only be on the other host.
  hosts.begin('head', '--head', f'--port={port}', '--cpus=0')
  hosts.begin('joined', f'--address={address}', '--ip=127.0.0.2')

  here = ('--execution=in_process', f'--output_dir={tmp_path / "here"}')
  there = (
      '--execution=ray',
      f'--ray_address={address}',
      '--workers=1',
      f'--output_dir={tmp_path / "there"}',
  )
  too_large = ('--worker_cpus=2', '--worker_timeout_seconds=5')
  code, stderr = hosts.call(*_TRAIN, *there, *too_large)
  error = stderr.splitlines()[-1]
  assert code == 1 and 'a worker within 5 seconds, found none' in error, stderr
  assert 'takes 2 CPU' in error and 'Tip: the same command' in error
  for flags in here, there:
    code, stderr = hosts.call(*_TRAIN, *flags)
    assert code == 0, stderr
  assert '1 of 1 worker on 1 host' in stderr
  metrics = [tmp_path / name / 'metrics.csv' for name in ('here', 'there')]
  assert metrics[0].read_bytes() == metrics[1].read_bytes()
  with open(tmp_path / 'there' / 'timings.csv', newline='') as file:
    for row in csv.DictReader(file):
      assert float(row['bytes_sent']) > 0
      assert 0 < float(row['slowest_shard_seconds']) < float(row['seconds'])

  for program in (*_TRAIN, *there), ('worker', f'--address={address}'):
    code, stderr = hosts.call(*program, RAY_AUTH_TOKEN='another')
    *before, error = stderr.splitlines()
    assert code == 1 and len(before) <= 1, stderr
    assert f'{port}, found another one. Tip: ' in error
  code, stderr = hosts.call('worker', '--head', f'--port={port}')
  assert code == 1 and f'port {port}, found Address already in use' in stderr

  processes = [
      process
      for host in hosts.processes.values()
      for process in (host, *host.children(recursive=True))
  ]
  for name in 'joined', 'head':
    hosts.processes[name].send_signal(signal.SIGTERM)
  assert psutil.wait_procs(processes, timeout=60)[1] == []
