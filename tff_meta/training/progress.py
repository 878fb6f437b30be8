"""Shows how far a run is: a bar on a terminal, plain lines elsewhere."""

import sys
import time

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
  """Reports rounds, loss, rounds per second and the time left."""

  def __init__(self, first_round: int, num_rounds: int):
    """Starts to report.

    Args:
      first_round: Rounds done before, by an earlier process.
      num_rounds: Rounds of the whole run.
    """
    self._num_rounds = num_rounds
    self._first: tuple[int, float] | None = None
    self._next_line = time.monotonic()
    self._bar = None
    if sys.stderr.isatty():
      import tqdm

      self._bar = tqdm.tqdm(
          total=num_rounds, initial=first_round, unit='round', mininterval=0.2
      )

  def update(self, rounds: int, loss: float | None) -> None:
    """Reports that `rounds` rounds of the run are done.

    Args:
      rounds: Completed rounds, those of earlier processes included.
      loss: The training loss of the last of them, None if there is none.
    """
    if self._bar is not None:
      if loss is not None:
        self._bar.set_postfix_str(f'loss {loss:.4f}', refresh=False)
      self._bar.update(rounds - self._bar.n)
      return
    now = time.monotonic()
    if now < self._next_line and rounds < self._num_rounds:
      return
    self._next_line = now + _SECONDS_BETWEEN_LINES
    line = f'round {rounds}/{self._num_rounds}'
    if loss is not None:
      line += f'  loss {loss:.4f}'
    if self._first is not None:
      rate = (rounds - self._first[0]) / max(now - self._first[1], 1e-9)
      left = (self._num_rounds - rounds) / rate
      line += f'  {rate:.2f} rounds/s  {_duration(left)} left'
    else:
      # The first round of a process also compiles: no measure of the rest.
      self._first = (rounds, now)
    print(line, flush=True)

  def note(self, line: str) -> None:
    """Prints a line at once, above the bar if there is one."""
    if self._bar is None:
      print(line, flush=True)
    else:
      self._bar.write(line)

  def close(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.close()


def _duration(seconds: float) -> str:
  """Returns h:mm:ss."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}'
