"""Shows how far something is: a bar on a terminal, plain lines elsewhere.

Whatever takes long is shown by it: reading data, tracing, training, evaluation
and comparisons. All of it is on stderr, which results on stdout are kept apart
from.
"""

from collections.abc import Callable
import contextlib
import sys
import threading
import time

import tqdm

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 1.0

# Those that are going on, the innermost last.
_open: list['Progress'] = []


def write(line: str) -> None:
  """Prints a line on stderr, above the bars that there may be."""
  if any(progress.has_bar for progress in _open):
    tqdm.tqdm.write(line, file=sys.stderr)
  else:
    print(line, file=sys.stderr, flush=True)


class Progress(contextlib.AbstractContextManager):
  """Reports how much is done, how fast, and the time left.

  Off a terminal that is a line every ten seconds, also where a single step
  takes longer, and of several that are going on only of the innermost.
  """

  def __init__(
      self,
      what: str,
      total: int | None = None,
      unit: str = '',
      done: int = 0,
      *,
      first: str = '',
      stays: bool = False,
      status: Callable[[], str] = str,
  ):
    """Starts to report.

    Args:
      what: What is going on, or what is counted.
      total: How many there are; None where nobody counts.
      unit: What they are called, a plural noun.
      done: How many were done before, by an earlier process.
      first: What is told until the first is done, where it takes longer than
        the others: it is no measure of the rest then.
      stays: Whether the first and the last are told in any case, however little
        time it takes.
      status: What to tell beside, asked for every line.
    """
    self._what = what
    self._total = total
    self._unit = unit
    self._first = first
    self._stays = stays
    self._status = status
    self._initial = self._done = done
    self._shown = ''
    self._began = time.monotonic()
    self._measured = None if first else (done, self._began)
    self._updated = self._began
    self._next_line = self._began + _SECONDS_BETWEEN_LINES
    self._is_told = False
    self._bar = None
    if sys.stderr.isatty():
      self._bar = tqdm.tqdm(
          desc=what,
          total=total,
          initial=done,
          unit=f' {unit}',
          mininterval=0.2,
          leave=stays,
          bar_format=None if unit else '{desc} {elapsed} {postfix}',
      )
      self._bar.set_postfix_str(first)
    self._lock = threading.Lock()
    self._is_over = threading.Event()
    self._thread = threading.Thread(target=self._keep_telling, daemon=True)
    _open.append(self)
    self._thread.start()

  @property
  def has_bar(self) -> bool:
    """Whether it is a bar on a terminal."""
    return self._bar is not None

  def update(self, done: int, shown: str = '') -> None:
    """Reports how many are done.

    Args:
      done: Those of earlier processes included.
      shown: What to show beside, such as a loss.
    """
    with self._lock:
      now = time.monotonic()
      is_first = not self._is_told
      self._done, self._shown, self._updated = done, shown, now
      if self._bar is not None:
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(done - self._bar.n)
      elif now >= self._next_line or (
          self._stays and (is_first or done == self._total)
      ):
        self._tell(now)
      self._is_told = True
      if self._measured is None:
        self._measured = (done, now)

  def close(self) -> None:
    """Ends the report."""
    self._is_over.set()
    self._thread.join()
    if self in _open:
      _open.remove(self)
    if self._bar is not None:
      self._bar.close()

  def __exit__(self, *unused_error) -> None:
    self.close()

  def _keep_telling(self) -> None:
    """Tells while a step takes long, from a thread of its own."""
    while not self._is_over.wait(_SECONDS_BETWEEN_LOOKS):
      if _open[-1:] != [self]:
        continue
      with self._lock, contextlib.suppress(OSError, ValueError):  # No stderr.
        now = time.monotonic()
        if self._bar is not None:
          status = self._status()
          if status:
            shown = '  '.join(filter(None, (self._shown, status)))
            self._bar.set_postfix_str(shown, refresh=False)
          self._bar.refresh()
        elif now >= self._next_line:
          self._tell(now)

  def _tell(self, now: float) -> None:
    self._next_line = now + _SECONDS_BETWEEN_LINES
    print(self._line(now), file=sys.stderr, flush=True)

  def _line(self, now: float) -> str:
    """Returns what is told now."""
    parts = [self._what]
    if self._unit:
      total = '' if self._total is None else f'/{self._total}'
      parts[0] += f' {self._done}{total}'
    parts.append(self._shown)
    rate = 0.0
    if self._measured is not None:
      done, since = self._measured
      rate = (self._done - done) / max(self._updated - since, 1e-9)
    if rate and self._unit:
      parts.append(f'{rate:.2f} {self._unit}/s')
    if rate and self._total is not None:
      running = min((now - self._updated) * rate, 1)  # Of one step, at most.
      left = (self._total - self._done - running) / rate
      parts.append(f'{duration(max(left, 0))} left')
    if self._done == self._initial or self._total is None:
      parts.append(f'{duration(now - self._began)} so far')
    if self._done == self._initial:
      parts.append(self._first)
    parts.append(self._status())
    return '  '.join(filter(None, parts))


def duration(seconds: float) -> str:
  """Returns h:mm:ss."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}'
