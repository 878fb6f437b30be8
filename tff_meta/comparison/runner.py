"""Runs the cells of a comparison, each as a program of its own.

A comparison's directory holds `comparison.json` (which table at which scale)
and a folder a cell (`tables.Cell.folder`) with

* `cell.json`: its flags, how it stands, its seconds over all attempts;
* `log.txt`: what the program printed, in all attempts;
* `run/`: the program's own output directory.

A cell is finished when its program has ended with exit code 0, and is never run
again; any other is begun or continued by the next comparison in the directory.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import threading
import time
from typing import Any, BinaryIO, get_args, Literal, Protocol

from tff_meta import plain_files
from tff_meta import progress
from tff_meta.comparison import remote_runs
from tff_meta.comparison import tables
from tff_meta.execution import native
from tff_meta.training import atomic_files
from tff_meta.training import run_directory
from tff_meta.training import sealed_json

State = Literal['not run', 'running', 'finished', 'failed', 'interrupted']

RUN_AGAIN = (
    'Tip: remove its cell.json, or its whole folder if config.json is lost, and'
    ' the next comparison there runs it again.'
)
CLAIM = 'comparison.json'
_POLL_SECONDS = 0.2
_SECONDS_BETWEEN_WRITES = 30
_SECONDS_TO_SAVE = 600
_LONGEST_LINE = 2**16


class ComparisonError(ValueError):
  """The directory is not one of this comparison; the message says why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a cell stands.

  Attributes:
    state: `'failed'` is a program that has ended by itself with an exit code
      other than 0 or has crashed, `'interrupted'` one that was stopped.
    seconds: Wall clock of all attempts; of one that was killed but for the last
      half minute.
    problem: The last line it printed where it failed, otherwise empty.
    flags: Of `binaries.train`, those that it was run with, flag files read in.
  """

  state: State = 'not run'
  seconds: float = 0.0
  problem: str = ''
  flags: tuple[str, ...] = ()


class CellFolder:
  """The folder of one cell."""

  def __init__(self, root: pathlib.Path, cell: tables.Cell):
    """Names the files; nothing is read or created yet."""
    self.path = root / cell.folder
    self.run = self.path / 'run'
    self.log = self.path / 'log.txt'
    self._outcome = self.path / 'cell.json'

  def outcome(self) -> Outcome:
    """Returns how the cell stands.

    Raises:
      ComparisonError: If `cell.json` is not one.
    """
    try:
      config = self.run / 'config.json'
      return _parse_outcome(sealed_json.read(self._outcome, config))
    except FileNotFoundError:
      return Outcome()
    except (OSError, ValueError, TypeError, KeyError) as error:
      raise ComparisonError(
          f'Expected {self._outcome} to tell how a cell stands, found'
          f' {type(error).__name__}: {str(error).rstrip(".")}. {RUN_AGAIN}'
      ) from None

  def write(self, outcome: Outcome) -> None:
    """Replaces `cell.json`."""
    plain_files.make_directory(self.path, parents=True)
    content = sealed_json.seal(dataclasses.asdict(outcome))
    atomic_files.write_json(self._outcome, content)


def _parse_outcome(content: Any) -> Outcome:
  """Returns the content of a `cell.json`; raises if it is another's."""
  found = Outcome(**(content | {'flags': tuple(content['flags'])}))
  if found.state not in get_args(State):
    raise ValueError(f'state {found.state!r}')
  # Not NaN, either; and a whole number can be too large to calculate with.
  if type(found.seconds) not in (int, float) or not 0 <= found.seconds < 1e12:
    raise ValueError(f'seconds {found.seconds!r}')
  if not isinstance(found.problem, str):
    raise ValueError(f'problem {found.problem!r}')
  if not all(isinstance(flag, str) for flag in found.flags):
    raise ValueError(f'flags {found.flags!r}')
  return found


def seeds(root: pathlib.Path) -> list[int]:
  """Returns the seeds that a comparison's directory has folders of, sorted."""
  names = (path.name for path in root.glob(f'*/*/{tables.SEED_PREFIX}*'))
  numbers = (name.removeprefix(tables.SEED_PREFIX) for name in names)
  return sorted({int(n) for n in numbers if n.isascii() and n.isdigit()})


def finished(
    root: pathlib.Path, cells: Sequence[tables.Cell], setting: str
) -> dict[str, list[pathlib.Path]]:
  """Returns row -> directories of its finished runs in a setting, if any.

  Args:
    root: The comparison's directory.
    cells: Those that the comparison consists of.
    setting: Name of the setting.
  """
  runs: dict[str, list[pathlib.Path]] = {}
  for cell in cells:
    folder = CellFolder(root, cell)
    if cell.setting == setting:
      of_row = runs.setdefault(cell.row, [])
      of_row += [folder.run] * (folder.outcome().state == 'finished')
  return {row: paths for row, paths in runs.items() if paths}


def is_comparison(root: pathlib.Path) -> bool:
  """Returns whether a directory is that of a comparison."""
  return (root / CLAIM).exists()


def check_claim(root: pathlib.Path, **what: str) -> None:
  """Raises if a directory is not free for a comparison; changes nothing.

  Args:
    root: The directory; it need not exist.
    **what: What is compared, as `binaries.compare` takes it: `experiment` and
      `scale`, or `runs`.

  Raises:
    ComparisonError: If it is another's, or holds other files, or is a file.
  """
  path = root / CLAIM
  if os.path.lexists(root) and not root.is_dir():
    raise ComparisonError(
        f'Expected {root} to be a directory, found'
        f' {plain_files.describe(root)}.'
    )
  try:
    found = sealed_json.read(path)
  except (FileNotFoundError, NotADirectoryError):
    others = []
    if root.is_dir():
      others = [p.name for p in root.iterdir() if not p.name.startswith('.')]
    if others:
      raise ComparisonError(
          f'Expected {root} to be new or to hold a comparison, found'
          f' {others[0]}. Tip: give another directory.'
      ) from None
    return
  except plain_files.DamagedFileError:
    found = None
  if found != what:
    raise ComparisonError(
        f'Expected {root} to hold a comparison of {_flags(what)}, found'
        f' {_flags(found)} in {CLAIM}. Tip: ask for that, or give another'
        ' directory.'
    )


def claim(root: pathlib.Path, **what: str) -> None:
  """Marks a directory, which exists, as that of a comparison.

  Args:
    root: The directory.
    **what: As in `check_claim`.

  Raises:
    ComparisonError: As `check_claim`.
  """
  check_claim(root, **what)
  atomic_files.write_json(root / CLAIM, what)


def _flags(content) -> str:
  """Returns flags of `binaries.compare` for the content of a claim."""
  if not isinstance(content, Mapping):
    return 'something else'
  return ' '.join(f'--{name}={value}' for name, value in content.items())


def check_flags(
    root: pathlib.Path,
    cells: Sequence[tables.Cell],
    reported: tables.Table | None = None,
) -> None:
  """Raises if a cell was run with other flags; changes nothing.

  Args:
    root: The comparison's directory; it need not exist.
    cells: All that are asked for now.
    reported: Their table, if nothing is run but its report is written: then
      they may differ in flags that change no number of it.

  Raises:
    ComparisonError: If one was run with other flags.
  """
  for cell in cells:
    folder = CellFolder(root, cell)
    outcome = folder.outcome()
    wanted, found = map(tables.in_force, (cell.flags, outcome.flags))
    if reported is not None:
      setting = reported.setting(cell.setting)
      wanted, found = (tables.of_the_end(setting, f) for f in (wanted, found))
    if outcome.state != 'not run' and found != wanted:
      raise ComparisonError(
          f'Expected {folder.path} to be a run with {_only_in(wanted, found)},'
          f' found {_only_in(found, wanted)}. Tip: remove the folder, or give'
          ' another directory.'
      )


def settle(
    root: pathlib.Path,
    cells: Sequence[tables.Cell],
    reported: tables.Table | None = None,
) -> None:
  """Marks cells that a killed comparison left running as interrupted.

  And what was on its way back from another host is removed.

  Args:
    root: The comparison's directory, locked by the caller.
    cells: All that are asked for now.
    reported: As for `check_flags`.

  Raises:
    ComparisonError: If one was run with other flags. Nothing is changed then.
  """
  check_flags(root, cells, reported)
  for cell in cells:
    folder = CellFolder(root, cell)
    outcome = folder.outcome()
    remote_runs.recover(folder.run)
    if outcome.state == 'running':
      folder.write(dataclasses.replace(outcome, state='interrupted'))


def _only_in(flags, others) -> str:
  return ' '.join(f for n, f in flags.items() if f != others.get(n)) or (
      'fewer flags'
  )


class Program(Protocol):
  """A program that runs, as `subprocess.Popen` has it."""

  def wait(self, timeout: float | None = None) -> int:
    """Returns its exit code; raises `subprocess.TimeoutExpired`."""

  def terminate(self) -> None:
    """Asks it to save and to end."""

  def kill(self) -> None:
    """Kills it, if it runs."""


# Starts a cell's program, given its output directory and its log.
Start = Callable[[tables.Cell, pathlib.Path, BinaryIO], Program]


class Runner:
  """Runs cells, several at a time."""

  def __init__(
      self,
      root: pathlib.Path,
      program: Sequence[str],
      *,
      environment: Mapping[str, str],
      working_directory: pathlib.Path,
      places: Mapping[str, str],
      report: Callable[[str], None],
      changed: Callable[[], None],
      result: Callable[[tables.Cell], str] = lambda _: '',
      start: Start | None = None,
  ):
    """Prepares.

    Args:
      root: The comparison's directory, locked by the caller.
      program: Command of the training program; flags are added.
      environment: Of the program.
      working_directory: Of the program, where flag files are looked for.
      places: Directories of this machine -> what they are called in messages
        that are kept.
      report: Called with a line when a cell begins or ends.
      changed: Called after a cell has ended, not by two threads at once; an
        error in it is reported and stops nothing.
      result: Cell -> what came out of it, in a few words, once it is finished.
      start: What starts a program elsewhere; None for this machine.
    """
    self._root = root
    self._program = list(program)
    self._environment = dict(environment)
    self._working_directory = working_directory
    self._places = dict(places)
    self._report = report
    self._changed = changed
    self._result = result
    self._start = start or self._start_here
    self._running: dict[str, pathlib.Path] = {}  # Folder of a cell -> log.
    self._lock = threading.Lock()
    self._stopped = threading.Event()
    self._killed = threading.Event()

  @property
  def stopped(self) -> bool:
    """Whether it was asked to stop."""
    return self._stopped.is_set()

  def stop(self) -> None:
    """Asks the running programs to save and end, and begins no other.

    The second call kills them. Safe in a signal handler.
    """
    (self._killed if self.stopped else self._stopped).set()

  def run(self, cells: Sequence[tables.Cell], processes: int) -> None:
    """Runs all cells that are not finished; returns when all have ended.

    Args:
      cells: What to run, in this order.
      processes: How many at the same time, at least 1.

    Raises:
      OSError: If a program cannot be started or a file cannot be written.
    """
    todo = [
        cell
        for cell in cells
        if CellFolder(self._root, cell).outcome().state != 'finished'
    ]
    numbered = iter(list(enumerate(todo, 1)))
    errors: list[BaseException] = []
    ended: list[tables.Cell] = []

    def work():
      try:
        while not self.stopped and not errors:
          with self._lock:
            number, cell = next(numbered, (None, None))
          if cell is None:
            return
          self._run_cell(cell, f'[{number}/{len(todo)}] {cell.folder}')
          with self._lock:
            ended.append(cell)
            shown.update(len(ended))
      except Exception as error:  # Raised again in the caller's thread.
        errors.append(error)

    threads = [
        threading.Thread(target=work) for _ in range(min(processes, len(todo)))
    ]
    with progress.Progress(
        'run', len(todo), 'runs', status=self._now_running
    ) as shown:
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
    if errors:
      raise errors[0]

  def _now_running(self) -> str:
    """Returns what the running programs have printed last."""
    running = list(self._running.items())
    return '; '.join(f'{name}: {_last_line(log)}' for name, log in running)

  def _run_cell(self, cell: tables.Cell, label: str) -> None:
    folder = CellFolder(self._root, cell)
    before = folder.outcome()
    self._report(f'{label}: begins')
    started = time.monotonic()

    def write(state: State, problem: str = '') -> None:
      seconds = round(before.seconds + time.monotonic() - started, 3)
      folder.write(Outcome(state, seconds, problem, cell.flags))

    write('running')
    self._running[cell.folder] = folder.log
    try:
      exit_code = self._execute(cell, folder, lambda: write('running'))
    finally:
      del self._running[cell.folder]
    state: State = 'finished'
    problem = ''
    if exit_code and self.stopped:
      state = 'interrupted'
    elif exit_code < 0:
      state, problem = 'failed', f'ended by signal {-exit_code}'
    elif exit_code > 128:  # It got a signal from elsewhere, and has saved.
      state = 'interrupted'
    elif exit_code:
      state, problem = 'failed', self._without_places(_last_line(folder.log))
    write(state, problem)
    told = problem or (self._result(cell) if state == 'finished' else '')
    took = progress.duration(time.monotonic() - started)
    self._report(f'{label}: {state} after {took} {told}'.rstrip())
    with self._lock:
      try:
        self._changed()
      except Exception as error:  # The other cells do not depend on it.
        self._report(f'The report was not written: {error!r}')

  def _execute(
      self,
      cell: tables.Cell,
      folder: CellFolder,
      still_running: Callable[[], None],
  ) -> int:
    """Runs the program, and stops it if asked to; returns its exit code."""
    self._wait_until_free(folder)
    with contextlib.ExitStack() as stack:
      log = stack.enter_context(open(folder.log, 'ab'))
      process = self._start(cell, folder.run, log)
      stack.callback(process.wait)
      stack.callback(process.kill)
      written = time.monotonic()
      while not self.stopped:
        with contextlib.suppress(subprocess.TimeoutExpired):
          return process.wait(timeout=_POLL_SECONDS)
        if time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
          still_running()
          written = time.monotonic()
      process.terminate()  # It ends its round and writes a checkpoint.
      deadline = time.monotonic() + _SECONDS_TO_SAVE
      while not self._killed.is_set() and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
          return process.wait(timeout=_POLL_SECONDS)
    return process.wait()  # The stack has killed it.

  def _start_here(
      self, cell: tables.Cell, run: pathlib.Path, log: BinaryIO
  ) -> subprocess.Popen:
    del run  # Where the command says.
    return subprocess.Popen(
        # It also saves and ends when this process is killed.
        native.ending_with_parent(
            command(self._program, self._root, cell), signal.SIGTERM
        ),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=self._working_directory,
        env=self._environment,
        start_new_session=True,  # Ctrl-C reaches only this program.
    )

  def _wait_until_free(self, folder: CellFolder) -> None:
    """Waits for a program that a killed comparison has left saving.

    What else keeps the directory from being used, the cell's program says.
    """
    directory = run_directory.RunDirectory(folder.run)
    deadline = time.monotonic() + _SECONDS_TO_SAVE
    while folder.run.exists() and time.monotonic() < deadline:
      try:
        with directory.locked():
          return
      except run_directory.RunDirectoryHeldError:
        if self._stopped.wait(_POLL_SECONDS):
          return
      except run_directory.RunDirectoryError:
        return

  def _without_places(self, text: str) -> str:
    for place, name in self._places.items():
      text = text.replace(place, name)
    return text


def command(
    program: Sequence[str], root: pathlib.Path, cell: tables.Cell
) -> list[str]:
  """Returns the command of a cell's run.

  Args:
    program: Command of the training program; flags are added.
    root: The comparison's directory.
    cell: The cell, flag files read in.
  """
  return [*program, *cell.flags, f'--output_dir={CellFolder(root, cell).run}']


def environment(processes: int) -> dict[str, str]:
  """Returns this process's environment, with its cores divided.

  Args:
    processes: Programs that run at the same time.
  """
  divided = dict(os.environ)
  if processes > 1:
    threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
    # Not TensorFlow's threads of an operation, of which there is one anyway.
    for name in ('OMP_NUM_THREADS', 'TF_NUM_INTEROP_THREADS'):
      divided.setdefault(name, threads)
  return divided


def _last_line(log: pathlib.Path) -> str:
  try:
    with open(log, 'rb') as file:
      file.seek(max(0, os.fstat(file.fileno()).st_size - _LONGEST_LINE))
      lines = file.read().decode('utf-8', errors='replace').split('\n')
  except FileNotFoundError:
    lines = []
  lines = [line.strip() for line in lines if line.strip()]
  return lines[-1] if lines else 'It has printed nothing.'
