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
import json
import os
import pathlib
import subprocess
import threading
import time
from typing import Literal

from tff_meta.comparison import tables
from tff_meta.training import atomic_files

State = Literal['not run', 'running', 'finished', 'failed', 'interrupted']

_SECONDS_TO_SAVE = 120


class ComparisonError(ValueError):
  """The directory is not one of this comparison; the message says why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a cell stands.

  Attributes:
    state: `'failed'` is a program that has ended with an exit code other than
      0, `'interrupted'` one that was stopped or killed.
    seconds: Wall clock of all attempts.
    problem: The last line it printed where it failed, otherwise empty.
    flags: Of `binaries.train`, those that it was run with.
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
      found = json.loads(self._outcome.read_text())
      return Outcome(**(found | {'flags': tuple(found['flags'])}))
    except FileNotFoundError:
      return Outcome()
    except (ValueError, TypeError, KeyError) as error:
      raise ComparisonError(
          f'Expected {self._outcome} to tell how a cell stands, found'
          f' {type(error).__name__}: {error}. Tip: remove its folder.'
      ) from None

  def write(self, outcome: Outcome) -> None:
    """Replaces `cell.json`."""
    self.path.mkdir(parents=True, exist_ok=True)
    atomic_files.write_json(self._outcome, dataclasses.asdict(outcome))


def claim(root: pathlib.Path, table_name: str, scale_name: str) -> None:
  """Marks a directory as that of a table at a scale.

  Args:
    root: The directory; it exists.
    table_name: The table.
    scale_name: The scale.

  Raises:
    ComparisonError: If it is another's, or holds other files.
  """
  path = root / 'comparison.json'
  wanted = {'experiment': table_name, 'scale': scale_name}
  try:
    found = json.loads(path.read_text())
  except FileNotFoundError:
    others = [p.name for p in root.iterdir() if not p.name.startswith('.')]
    if others:
      raise ComparisonError(
          f'Expected {root} to be new or to hold a comparison, found'
          f' {others[0]}. Tip: give another --output_dir.'
      ) from None
    atomic_files.write_json(path, wanted)
    return
  except ValueError:
    found = None
  if found != wanted:
    raise ComparisonError(
        f'Expected {path} to say {wanted}, found {found}. Tip: give another'
        ' --output_dir.'
    )


def settle(root: pathlib.Path, cells: Sequence[tables.Cell]) -> None:
  """Marks cells that a killed comparison left running as interrupted.

  Args:
    root: The comparison's directory, locked by the caller.
    cells: All that are asked for now.

  Raises:
    ComparisonError: If one was run with other flags.
  """
  for cell in cells:
    folder = CellFolder(root, cell)
    outcome = folder.outcome()
    if outcome.state != 'not run' and outcome.flags != cell.flags:
      raise ComparisonError(
          f'Expected {folder.path} to be a run with'
          f' {_only_in(cell.flags, outcome.flags)}, found'
          f' {_only_in(outcome.flags, cell.flags)}. Tip: remove the folder, or'
          ' give another --output_dir.'
      )
    if outcome.state == 'running':
      folder.write(dataclasses.replace(outcome, state='interrupted'))


def _only_in(flags, others) -> str:
  return ' '.join(f for f in flags if f not in others) or 'fewer flags'


class Runner:
  """Runs cells, several at a time.

  Attributes:
    stopped: Set by `stop`.
  """

  def __init__(
      self,
      root: pathlib.Path,
      program: Sequence[str],
      *,
      environment: Mapping[str, str],
      working_directory: pathlib.Path,
      report: Callable[[str], None],
      changed: Callable[[], None],
  ):
    """Prepares.

    Args:
      root: The comparison's directory, locked by the caller.
      program: Command of the training program; flags are added.
      environment: Of the program.
      working_directory: Of the program, where flag files are looked for.
      report: Called with a line when a cell begins or ends.
      changed: Called after a cell has ended, not by two threads at once.
    """
    self.stopped = threading.Event()
    self._root = root
    self._program = list(program)
    self._environment = dict(environment)
    self._working_directory = working_directory
    self._report = report
    self._changed = changed
    self._lock = threading.Lock()

  def stop(self) -> None:
    """Asks the running programs to save and end, and begins no other.

    Safe in a signal handler.
    """
    self.stopped.set()

  def run(self, cells: Sequence[tables.Cell], processes: int) -> None:
    """Runs all cells that are not finished; returns when all have ended.

    Args:
      cells: What to run, in this order.
      processes: How many at the same time, at least 1.
    """
    todo = [
        cell
        for cell in cells
        if CellFolder(self._root, cell).outcome().state != 'finished'
    ]
    numbered = iter(list(enumerate(todo, 1)))

    def work():
      while not self.stopped.is_set():
        with self._lock:
          number, cell = next(numbered, (None, None))
        if cell is None:
          return
        self._run_cell(cell, f'[{number}/{len(todo)}] {cell.folder}')

    threads = [
        threading.Thread(target=work) for _ in range(min(processes, len(todo)))
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  def _run_cell(self, cell: tables.Cell, label: str) -> None:
    folder = CellFolder(self._root, cell)
    before = folder.outcome()
    begun = dataclasses.replace(
        before, state='running', problem='', flags=cell.flags
    )
    folder.write(begun)
    self._report(f'{label}: begins')
    start = time.monotonic()
    exit_code = self._execute(cell, folder)
    seconds = before.seconds + time.monotonic() - start
    state, problem = 'finished', ''
    # Negative: killed. Over 128: ended by itself after a signal.
    if exit_code < 0 or exit_code > 128:
      state = 'interrupted'
    elif exit_code:
      state, problem = 'failed', _last_line(folder.log)
    folder.write(
        dataclasses.replace(
            begun, state=state, seconds=round(seconds, 1), problem=problem
        )
    )
    self._report(f'{label}: {state} after {seconds:.0f} s {problem}'.rstrip())
    with self._lock:
      self._changed()

  def _execute(self, cell: tables.Cell, folder: CellFolder) -> int:
    """Runs the program, and stops it if asked to; returns its exit code."""
    command = [*self._program, *cell.flags, f'--output_dir={folder.run}']
    with contextlib.ExitStack() as stack:
      log = stack.enter_context(open(folder.log, 'ab'))
      process = subprocess.Popen(
          command,
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          cwd=self._working_directory,
          env=self._environment,
          start_new_session=True,  # Ctrl-C reaches only this program.
      )
      stack.callback(process.wait)
      stack.callback(process.kill)
      while not self.stopped.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
          return process.wait(timeout=0.2)
      process.terminate()  # It writes a checkpoint.
      with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_SECONDS_TO_SAVE)
      process.kill()
      return process.wait()


def environment(processes: int) -> dict[str, str]:
  """Returns this process's environment, with its cores divided.

  Args:
    processes: Programs that run at the same time.
  """
  divided = dict(os.environ)
  if processes > 1:
    threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
    for name in (
        'OMP_NUM_THREADS',
        'TF_NUM_INTRAOP_THREADS',
        'TF_NUM_INTEROP_THREADS',
    ):
      divided.setdefault(name, threads)
  return divided


def _last_line(log: pathlib.Path) -> str:
  lines = log.read_text(errors='replace').split('\n')
  lines = [line.strip() for line in lines if line.strip()]
  return lines[-1] if lines else 'It printed nothing.'
