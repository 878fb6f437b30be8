"""Runs of cells on other hosts, which need not share a file system with this.

A host gets what a run's directory holds, runs the program in a folder of its
own (`hosted_program`), and what it has written comes back every minute and when
it ends. So a host that is lost costs a minute and what was computed since the
last checkpoint: another one goes on from what came back.

What comes back replaces the whole directory at once: its files belong together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import os
import pathlib
import shutil
import subprocess
import time
from typing import Any, BinaryIO, Protocol

from tff_meta import plain_files
from tff_meta.comparison import hosted_program
from tff_meta.comparison import tables
from tff_meta.training import atomic_files

_MOST_TRIES = 3
_SECONDS_BETWEEN_FETCHES = 60.0
_SECONDS_OF_A_LOOK = 1.0
_SECONDS_TO_CLOSE = 60.0
_STOPPED, _KILLED = 143, -9  # Exit codes of what was not begun, or is lost.


class OtherHostError(OSError):
  """A host has other software than this one."""


class _HostLostError(Exception):
  """A host does not answer any more, or cannot do what it should."""


class Answer(Protocol):
  """What a call will return."""

  def get(self, timeout: float | None = None) -> Any:
    """Returns it.

    Args:
      timeout: Seconds; None to wait for it, however long.

    Raises:
      TimeoutError: If it is not there yet.
      ConnectionError: If the host is lost, or cannot read or write files.
      OSError: If there is no host, and none comes.
      Exception: What the call has raised.
    """


class Remote(Protocol):
  """An object on another host."""

  def call(self, method: str, *arguments: Any) -> Answer:
    """Calls a method; calls are done in order."""

  def end(self) -> None:
    """Ends it after the calls so far; waits for nothing."""


class Hosts(Protocol):
  """Where objects can be."""

  def start(self, kind: type) -> Remote:
    """Makes an object of a class there, as soon as there is room."""


class RemoteRuns:
  """What starts cells on hosts."""

  def __init__(
      self,
      hosts: Hosts,
      program: Sequence[str],
      *,
      environment: Mapping[str, str],
      working_directory: pathlib.Path,
      allow_mixed_hosts: bool,
      report: Callable[[str], None],
  ):
    """Prepares.

    Args:
      hosts: Where.
      program: Arguments of Python that make it the training program; flags are
        added.
      environment: What is not as on the hosts.
      working_directory: Of the program if it ran here: where this library is.
      allow_mixed_hosts: Whether hosts may have other versions than this one.
      report: Called with a line when a host is lost.
    """
    self.hosts = hosts
    self.program = list(program)
    self.environment = dict(environment)
    self.working_directory = working_directory
    self.report = report
    self._expected = {} if allow_mixed_hosts else hosted_program.describe()

  def start(
      self, cell: tables.Cell, run: pathlib.Path, log: BinaryIO
  ) -> 'RemoteRun':
    """Starts the program of a cell, see `runner.Start`."""
    return RemoteRun(self, cell, run, log)

  def check(self, found: Mapping[str, str]) -> None:
    """Raises an `OtherHostError` if a host is not as this one."""
    differences = [
        f'{name} {found.get(name)} (not {value})'
        for name, value in self._expected.items()
        if found.get(name) != value
    ]
    if differences:
      raise OtherHostError(
          f'Expected {found["host"]} to have what this host has, found'
          f' {", ".join(differences)}. Tip: --allow_mixed_hosts takes it'
          ' nevertheless; results may then depend on who computes them.'
      )


class RemoteRun:
  """A program on some host, to be used as a `subprocess.Popen`."""

  def __init__(
      self,
      runs: RemoteRuns,
      cell: tables.Cell,
      run: pathlib.Path,
      log: BinaryIO,
  ):
    self._runs = runs
    self._cell = cell
    self._run = run.resolve()
    self._log = log
    self._exit_code: int | None = None
    self._num_lost = 0
    self._is_stopping = False
    self._give_up_at = float('inf')
    self._attempt()

  def wait(self, timeout: float | None = None) -> int:
    """Returns the exit code, when everything has come back.

    Raises:
      subprocess.TimeoutExpired: If it has not ended in time.
      OtherHostError: If a host is not as this one.
      OSError: If nothing can be written here, or there is no host.
    """
    deadline = time.monotonic() + (float('inf') if timeout is None else timeout)
    while (exit_code := self._exit_code) is None:
      now = time.monotonic()
      if now > self._give_up_at:
        self._end(_KILLED)
        continue
      try:
        self._step(min(_SECONDS_OF_A_LOOK, max(0.0, deadline - now)))
      except TimeoutError:
        pass
      except _HostLostError as error:
        self._lose(str(error))
      is_late = timeout is not None and time.monotonic() >= deadline
      if self._exit_code is None and is_late:
        raise subprocess.TimeoutExpired(self._cell.folder, timeout or 0)
    return exit_code

  def terminate(self) -> None:
    """Asks the program to save and to end."""
    self._is_stopping = True
    if self._exit_code is None:
      if self._is_begun:
        self._remote.call('terminate')
      else:
        self._end(_STOPPED)

  def kill(self) -> None:
    """Kills the program; what it has saved still comes back."""
    self._is_stopping = True
    if self._exit_code is None:
      if self._is_begun:
        self._remote.call('kill')
        self._give_up_at = time.monotonic() + _SECONDS_TO_CLOSE
      else:
        self._end(_KILLED)

  def _attempt(self) -> None:
    """Asks for a host."""
    self._is_begun = False
    self._host: str | None = None  # As long as none has answered.
    self._say('Waiting for a host.')
    self._remote = self._runs.hosts.start(hosted_program.HostedProgram)
    self._answer = self._remote.call('describe')

  def _step(self, timeout: float) -> None:
    """Takes an answer and asks the next thing.

    Raises:
      TimeoutError: If there is no answer in time.
    """
    found = _got(self._answer, timeout)
    if not self._is_begun:
      self._host = found['host']
      self._runs.check(found)
      self._begin()
    else:
      self._log.write(found.log)
      self._log.flush()
      self._offset = found.offset
      has_ended = found.exit_code is not None
      if has_ended or time.monotonic() > self._fetch_at:
        self._fetch()
      if has_ended:
        self._end(found.exit_code)
        return
    self._answer = self._remote.call('look', self._offset, _SECONDS_OF_A_LOOK)

  def _begin(self) -> None:
    """Sends what there is, and starts the program.

    That is also what decides who takes part in a private run, which would go on
    with other clients without it.
    """
    for file in hosted_program.files_of(self._run):
      path = self._run / file.name
      for piece in _pieces(functools.partial(hosted_program.read_piece, path)):
        self._ask('write', file.name, file.mode, piece)
    self._ask(
        'begin',
        [*self._runs.program, *self._cell.flags],
        self._runs.environment,
        str(self._run),
        str(self._runs.working_directory),
    )
    self._say(f'Runs on {self._host}.')
    self._is_begun = True
    self._offset = 0
    self._fetch_at = time.monotonic() + _SECONDS_BETWEEN_FETCHES

  def _fetch(self) -> None:
    """Replaces the directory with what the host has."""
    snapshot = self._ask('snapshot')
    changed = {file.name: file for file in snapshot.changed}
    coming, _ = _beside(self._run)
    shutil.rmtree(coming, ignore_errors=True)
    folders = {coming}
    for name in snapshot.names:
      path = coming / name
      plain_files.make_directory(path.parent, parents=True)
      folders |= {p for p in path.parents if p.is_relative_to(coming)}
      if name in changed:
        self._fetch_file(changed[name], path)
      else:
        _link(self._run / name, path)
    if snapshot.names:
      for folder in folders:
        atomic_files.sync_directory(folder)
    elif (self._run / 'metrics.csv').exists():
      raise _HostLostError(f'the folder on {self._host} is gone')
    _replace(self._run)
    self._fetch_at = time.monotonic() + _SECONDS_BETWEEN_FETCHES

  def _fetch_file(self, file: hosted_program.File, path: pathlib.Path) -> None:
    with plain_files.named_errors(path), open(path, 'xb') as opened:
      os.fchmod(opened.fileno(), file.mode)
      for piece in _pieces(functools.partial(self._ask, 'read', file.name)):
        opened.write(piece)
      opened.flush()
      os.fsync(opened.fileno())

  def _ask(self, method: str, *arguments: Any) -> Any:
    return _got(self._remote.call(method, *arguments))

  def _lose(self, why: str) -> None:
    """Goes on elsewhere, unless that was tried often enough."""
    self._num_lost += 1
    what = f'{self._host or "A host"} is lost: {why}'
    self._runs.report(f'{self._cell.folder}: {what}')
    self._remote.call('close')  # If it can.
    self._remote.end()
    if self._is_stopping:
      self._say(what)
      self._exit_code = _STOPPED
    elif self._num_lost < _MOST_TRIES:
      self._say(f'{what} Another one goes on from what came back.')
      self._attempt()
    else:
      self._say(
          f'Error: Expected a host to run this cell, found {_MOST_TRIES} lost'
          f' while they did; {what} Tip: a host may be out of memory or disk;'
          ' the same command goes on from what came back.'
      )
      self._exit_code = 1

  def _say(self, line: str) -> None:
    self._log.write(f'{line}\n'.encode())
    self._log.flush()

  def _end(self, exit_code: int) -> None:
    """Lets the host go."""
    self._exit_code = exit_code
    if self._host is not None:
      with contextlib.suppress(OSError):
        self._remote.call('close').get(_SECONDS_TO_CLOSE)
    self._remote.end()


def recover(run: pathlib.Path) -> None:
  """Removes what a killed comparison has left beside a run's directory.

  Args:
    run: The directory; it is put back if it was being replaced.
  """
  run = run.resolve()
  coming, before = _beside(run)
  if before.exists() and not run.exists():
    before.rename(run)
  for folder in (coming, before):
    shutil.rmtree(folder, ignore_errors=True)


def _beside(run: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
  """Returns where what comes is collected, and where what was there goes."""
  return run.with_name(f'{run.name}.coming'), run.with_name(
      f'{run.name}.before'
  )


def _replace(run: pathlib.Path) -> None:
  """Puts what has come, which may be nothing, in place of a directory."""
  coming, before = _beside(run)
  shutil.rmtree(before, ignore_errors=True)
  if run.exists():
    run.rename(before)
  if coming.exists():
    coming.rename(run)
  atomic_files.sync_directory(run.parent)
  shutil.rmtree(before, ignore_errors=True)


def _link(path: pathlib.Path, new: pathlib.Path) -> None:
  """Makes a file appear in a second place."""
  try:
    os.link(path, new)
  except OSError:  # Not every file system can.
    shutil.copy2(path, new)


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
  """Yields what a file holds; of an empty one a piece of nothing.

  Args:
    read: Where to begin -> the next piece.
  """
  offset = 0
  while True:
    piece = read(offset)
    yield piece
    if len(piece) < hosted_program.PIECE_BYTES:
      return
    offset += len(piece)


def _got(answer: Answer, timeout: float | None = None) -> Any:
  try:
    return answer.get(timeout)
  except ConnectionError as error:
    raise _HostLostError(' '.join(str(error).split())) from error
