"""Runs TFF computations in TFF's own C++ worker, on the CPU.

TFF's stock native context starts the same worker, but in a way that does not
suit a tool that may be killed at any time: the worker outlives a killed parent
and keeps its stdout open, a Ctrl-C in the terminal reaches the worker before
the program, a worker that died is waited for without end, and with a proxy set
the first call over localhost hangs. So the worker is started here.
"""

import atexit
from collections.abc import Callable, Sequence
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import NoReturn
import warnings

from tff_meta import installation
from tff_meta import machine

_THREADS = 'TF_NUM_INTRAOP_THREADS', 'TF_NUM_INTEROP_THREADS'
_NUMBER_OF_THREADS = re.compile('[1-9][0-9]{0,3}')
_LOCAL_HOSTS = ('localhost', '127.0.0.1')
_START_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.02
_before_end: list[Callable[[], object]] = []
_MAX_MESSAGE_BYTES = 2_000_000_000

# Runs in the child: asks Linux for a signal when its parent ends
# (PR_SET_PDEATHSIG is 1; the setting survives exec), then becomes the program.
# A parent that is gone already is noticed by its changed process id.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
  sys.exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


class WorkerError(OSError):
  """TFF's worker is missing, does not start or has ended; the message says."""


def prepare_environment() -> None:
  """Sets what TensorFlow and gRPC read when they are imported.

  Silences TensorFlow's start-up lines, turns oneDNN's kernels on, which
  TensorFlow itself takes on new processors only (see `benchmarks.onednn`), and
  keeps calls to localhost away from any proxy. An operation gets one thread:
  several clients are computed at the same time instead, which is faster for
  small minibatches, and the order of sums, and with it the last bits of a run,
  do not depend on how many cores a machine has. All but the proxies stay as
  they are where they are set already. Has to run before the first import of
  either.

  Warns:
    UserWarning: If TensorFlow is imported already, and the variable of oneDNN
      is not set; whether it was set in time is not known.

  Raises:
    ValueError: If a number of threads is set to something else, where
      TensorFlow would take one of its own.
  """
  for name in _THREADS:
    value = os.environ.get(name)
    if value is not None and not _NUMBER_OF_THREADS.fullmatch(value):
      raise ValueError(
          f'Expected the environment variable {name} to be a whole number from'
          f' 1 to 9999, found {value!r}. Tip: leave it unset.'
      )
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  if 'tensorflow' not in sys.modules:
    os.environ.setdefault(machine.ONEDNN, '1')
  elif machine.ONEDNN not in os.environ:
    warnings.warn(
        'TensorFlow was imported before it was asked for the faster kernels of'
        ' oneDNN, which it leaves out on many processors; the last digits of'
        ' results differ, too. Tip: set the environment variable'
        f' {machine.ONEDNN} to 1 (or 0, for none) before TensorFlow is'
        ' imported.',
        stacklevel=3,
    )
  os.environ.setdefault('TF_NUM_INTRAOP_THREADS', '1')
  os.environ.setdefault('GRPC_VERBOSITY', 'ERROR')
  hosts = os.environ.get('no_proxy', os.environ.get('NO_PROXY', ''))
  known = [host.strip() for host in hosts.split(',') if host.strip()]
  missing = [host for host in _LOCAL_HOSTS if host not in known]
  os.environ['no_proxy'] = ','.join(known + missing)
  os.environ['NO_PROXY'] = os.environ['no_proxy']


def set_native_context() -> None:
  """Makes TFF run computations in a C++ worker that ends with this process.

  Raises:
    ImportError: If TensorFlow Federated cannot be imported.
    WorkerError: If the worker does not start.
  """
  context = create_native_context()
  installation.import_tff().framework.set_default_context(context)


def call_before_end(callback: Callable[[], object]) -> None:
  """Has something called by `end_process`, which Python's `atexit` is not."""
  _before_end.append(callback)


def end_process(exit_code: int) -> NoReturn:
  """Ends this process at once, with what was printed but without teardown.

  TensorFlow's and gRPC's threads outlive the interpreter's teardown and now and
  then crash in it (segmentation fault, exit code 139, in half of the runs on
  Python 3.11.2), after everything has been done and written. Programs end here
  instead; the worker ends with its parent. Handlers of `atexit` do not run, but
  the files that AutoGraph's would remove are removed here.

  Args:
    exit_code: What the process returns.
  """
  for callback in _before_end:
    with contextlib.suppress(BaseException):  # It ends in any case.
      callback()
  for name, module in list(sys.modules.items()):
    if name.startswith('__autograph_generated_file'):
      for path in (module.__file__, module.__cached__):
        pathlib.Path(path).unlink(missing_ok=True)
  for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed.
    stream.flush()
  os._exit(exit_code)


def create_native_context():
  """Returns a synchronous TFF context on a worker of its own.

  Has to be called in the main thread: Linux ends the worker with the thread
  that started it.

  Raises:
    ImportError: If TensorFlow Federated cannot be imported.
    WorkerError: If the worker does not start.
  """
  prepare_environment()
  tff = installation.import_tff()
  import grpc
  import portpicker
  from tensorflow_federated.python.core.environments.tensorflow_frontend import (  # noqa: E501
      tensorflow_computation,
  )

  port = portpicker.pick_unused_port()
  assert tff.__file__ is not None
  process = _start_worker(pathlib.Path(tff.__file__).parent, port)
  limit = ('grpc.max_message_length', _MAX_MESSAGE_BYTES)
  limits = [limit] + [
      (f'grpc.max_{way}_message_length', _MAX_MESSAGE_BYTES)
      for way in ('send', 'receive')
  ]
  channel = grpc.insecure_channel(f'localhost:{port}', limits)
  _wait_until_ready(grpc, channel, process)
  stub = tff.framework.RemoteExecutorGrpcStub(channel)

  def create_executor(cardinalities):
    if process.poll() is not None:
      raise WorkerError(
          'Expected the TFF worker to be running, found that it ended with'
          f' code {process.returncode}. Tip: code -9 often means that the'
          ' machine ran out of memory.'
      )
    cardinalities.setdefault(tff.CLIENTS, 0)
    executor = tff.framework.RemoteExecutor(stub)
    executor.set_cardinalities(cardinalities)
    return executor

  def compile_to_native(computation):
    # The worker knows no secure sums; simulations compute them in the clear.
    computation = tff.backends.test.replace_secure_intrinsics_with_bodies(
        computation
    )
    return tff.backends.native.desugar_and_transform_to_native(computation)

  return tff.framework.SyncExecutionContext(
      executor_fn=tff.framework.ResourceManagingExecutorFactory(
          create_executor
      ),
      compiler_fn=compile_to_native,
      transform_args=tensorflow_computation.transform_args,
      transform_result=tensorflow_computation.transform_result,
  )


def ending_with_parent(
    command: Sequence[str], signal_num: signal.Signals
) -> list[str]:
  """Returns a command whose process gets a signal when this one has ended.

  However this one ends. To be exact, when the thread has ended that started it.

  Args:
    command: A program's path and its arguments.
    signal_num: Which signal.
  """
  return [
      *(sys.executable, '-I', '-S', '-c', _DIE_WITH_PARENT),
      *(str(int(signal_num)), str(os.getpid())),
      *command,
  ]


def _start_worker(tff_dir: pathlib.Path, port: int) -> subprocess.Popen:
  """Starts TFF's worker as a child that ends with this process."""
  binary = tff_dir / 'data' / 'worker_binary'
  if not binary.is_file():
    raise WorkerError(
        f'Expected a TFF worker at {binary}, found none. Tip: install'
        ' tensorflow-federated from its wheel for Linux on x86-64.'
    )
  process = subprocess.Popen(
      ending_with_parent(
          [
              str(binary),
              f'--port={port}',
              '--max_concurrent_computation_calls=-1',
          ],
          signal.SIGKILL,
      ),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      start_new_session=True,
  )
  atexit.register(_end_worker, process)
  return process


def _end_worker(process: subprocess.Popen) -> None:
  """Ends the worker and waits for it."""
  if process.poll() is None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def _wait_until_ready(grpc, channel, process: subprocess.Popen) -> None:
  """Waits until the worker answers, or raises if it ended or takes too long."""
  ready = grpc.channel_ready_future(channel)
  deadline = time.monotonic() + _START_TIMEOUT_SECONDS
  while process.poll() is None and time.monotonic() < deadline:
    try:
      return ready.result(timeout=_POLL_SECONDS)
    except grpc.FutureTimeoutError:
      continue
  ready.cancel()
  _end_worker(process)
  raise WorkerError(
      'Expected the TFF worker to answer within'
      f' {_START_TIMEOUT_SECONDS:.0f} seconds, found exit code'
      f' {process.returncode}. Tip: check that localhost is not proxied.'
  )
