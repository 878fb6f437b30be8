"""Puts this host into a Ray cluster, which computes for --execution=ray.

  python -m binaries.worker --head
  python -m binaries.worker --address=HOST:PORT

The first begins a cluster with this host, the second has another one join it.
Both run until Ctrl-C, which takes the host out. All hosts need the same token:

  RAY_AUTH_MODE=token ray get-auth-token --generate

makes ~/.ray/auth_token, which is copied to the others.
"""

import collections
from collections.abc import Iterable, Iterator
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading

from absl import flags

from binaries import command_line
from binaries import flag_kinds
import tff_meta
from tff_meta.execution import native
from tff_meta.execution import ray_access

ADDRESS = flags.DEFINE_string(
    'address', None, 'HOST:PORT of the head of the cluster to join.'
)
HEAD = flags.DEFINE_bool('head', False, 'Begin a cluster instead.')
PORT = flag_kinds.define_whole_number(
    'port', 6379, 'With --head, where the others find it.', least=1024
)
CPUS = flag_kinds.define_whole_number(
    'cpus',
    None,
    'CPU cores that workers may have here, 0 for no worker; by default all.',
)
GPUS = flag_kinds.define_whole_number(
    'gpus', None, 'GPUs that workers may have here; by default all.'
)
IP = flags.DEFINE_string(
    'ip',
    None,
    'Address under which the other hosts reach this one; by default Ray finds'
    ' one, perhaps the wrong one where there are several networks, and none for'
    ' a head that has no way to the internet.',
)

_LARGEST_PORT = 65535
_LINES = 200  # Of Ray's output, to tell from them why it ended.
_STARTED = 'Ray runtime started.'
_OWN_IP = re.compile(r'Local node IP: *(\S+)')
_PROBLEM = re.compile(r'(?:[\w.]*(?:Error|Exception)|Error): ')
_SECONDS_TO_END = 20.0
# Ray asks every 3 s, waits 10 s for an answer and counts to 5: a host that is
# gone was missed after half a minute. Now after 3 s where it refuses to answer,
# and after 9 s where it is silent. The head asks.
_HEALTH_CHECKS = {
    'RAY_health_check_failure_threshold': '3',
    'RAY_health_check_initial_delay_ms': '1000',
    'RAY_health_check_period_ms': '1000',
    'RAY_health_check_timeout_ms': '2000',
}


def _check_flags() -> None:
  """Raises if flags do not go together."""
  if HEAD.value == bool(ADDRESS.value):
    raise ValueError(
        'Expected either --head or --address, found'
        f' {"both" if HEAD.value else "neither"}.'
    )
  if ADDRESS.value:
    host, colon, port = ADDRESS.value.rpartition(':')
    if not (host and colon and port.isdecimal()):
      raise ValueError(
          f'Expected --address=HOST:PORT, found {ADDRESS.value!r}.'
      )
    if flags.FLAGS['port'].present:
      raise ValueError('Expected --port with --head only, found --address.')
  if PORT.value > _LARGEST_PORT:
    raise ValueError(
        f'Expected --port of at most {_LARGEST_PORT}, found {PORT.value}.'
    )


def _check_environment() -> None:
  """Raises if workers of this host could not compute."""
  ray_access.check_installed()
  # They are started by Ray, in a folder and with a search path of its own.
  done = subprocess.run(
      [sys.executable, '-P', '-c', 'import tff_meta; print(tff_meta.__file__)'],
      capture_output=True,
      text=True,
      cwd='/',
  )
  found = done.stdout.strip() or (done.stderr.strip() or '?').splitlines()[-1]
  assert tff_meta.__file__ is not None
  own = pathlib.Path(tff_meta.__file__).resolve()
  if pathlib.Path(found).resolve() != own:
    raise ImportError(
        'Expected every process of this environment to import'
        f' {tff_meta.__file__}, found {found}. Tip: install tff_meta, or put'
        ' the absolute path of its root on PYTHONPATH.'
    )


def _check_port() -> None:
  """Raises if the head's port is taken."""
  with socket.socket() as tried:
    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      tried.bind((IP.value or '', PORT.value))
    except OSError as error:
      raise OSError(
          f'Expected to listen at port {PORT.value}, found {error.strerror}.'
          ' Tip: another --port, or --address where a cluster is there already.'
      ) from error


def _command() -> list[str]:
  """Returns what starts Ray's processes and waits for them."""
  command = [
      *(sys.executable, '-m', 'ray.scripts.scripts', 'start', '--block'),
      *('--disable-usage-stats', '--log-style=record', '--log-color=false'),
  ]
  if HEAD.value:
    # Ray's server for remote clients cannot be left out; it wants the token,
    # too, and nobody here needs to know its port.
    command += [
        *('--head', f'--port={PORT.value}', '--include-dashboard=false'),
        f'--ray-client-server-port={_free_port()}',
    ]
  else:
    command.append(f'--address={ADDRESS.value}')
  for option, value in (
      ('num-cpus', CPUS.value),
      ('num-gpus', GPUS.value),
      ('node-ip-address', IP.value),
  ):
    if value is not None:
      command.append(f'--{option}={value}')
  return command


def _free_port() -> int:
  with socket.socket() as chosen:
    chosen.bind(('', 0))
    return chosen.getsockname()[1]


def _follow(output: Iterable[str], lines: collections.deque[str]) -> None:
  """Keeps what Ray says, and says when this host is in the cluster."""
  ip = None
  for line in output:
    lines.append(line)
    ip = _OWN_IP.search(line) or ip
    if _STARTED not in line:
      continue
    if HEAD.value and ip and ip[1].startswith('127.'):
      command_line.report(
          f'A cluster has begun at {ip[1]}:{PORT.value}, for this host alone.'
          ' Tip: --ip says where others reach it, if they are to. Ctrl-C ends'
          ' it.'
      )
    elif HEAD.value:
      address = f'{ip[1] if ip else "HOST"}:{PORT.value}'
      command_line.report(
          f'A cluster has begun with this host, at {address}; others join it by'
          f' python -m binaries.worker --address={address}. Ctrl-C ends it.'
      )
    else:
      command_line.report(
          f'This host is in the cluster at {ADDRESS.value}. Ctrl-C takes it'
          ' out.'
      )


def _why(lines: Iterable[str]) -> str:
  """Returns the last problem among lines of Ray's."""
  found: list[str] = []
  for line in lines:
    if _PROBLEM.match(line) or 'exited unexpectedly' in line:
      found = []
    found.append(re.sub(r'^\S+ \S+\s+[A-Z]+ \S+ -- ', '', line.strip()))
  return ' '.join(found[-10:]) or 'no word'


@contextlib.contextmanager
def _ended(process: subprocess.Popen) -> Iterator[None]:
  """Ends Ray, whose processes end with the first, when this process has to."""

  def stop(signal_num, _):
    sys.exit(128 + signal_num)

  before = signal.signal(signal.SIGTERM, stop)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)
    process.terminate()
    try:
      process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)


def _run() -> int:
  """Starts Ray's processes and returns when they have ended."""
  lines: collections.deque[str] = collections.deque(maxlen=_LINES)
  process = subprocess.Popen(
      native.ending_with_parent(_command(), signal.SIGKILL),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
  )
  with _ended(process):
    assert process.stdout is not None
    # In a thread: Ray's processes may keep the output open.
    thread = threading.Thread(
        target=_follow, args=(process.stdout, lines), daemon=True
    )
    thread.start()
    process.wait()
    thread.join(1.0)
  command_line.fail(
      f'Expected Ray to run until it is told to end, found: {_why(lines)}',
      command_line.FAILURE,
  )
  return command_line.FAILURE


def main() -> int:
  """Runs the program and returns its exit code."""
  with ray_access.tokens():
    with command_line.reported_errors():
      _check_flags()
      _check_environment()
      ray_access.prepare_environment(_HEALTH_CHECKS if HEAD.value else None)
      if HEAD.value:
        ray_access.token()
        _check_port()
      else:
        ray_access.check_answers(ADDRESS.value)
    return _run()


if __name__ == '__main__':
  command_line.run_and_end(main)
