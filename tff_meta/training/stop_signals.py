"""Ends a run cleanly when a user or the machine asks for it."""

from collections.abc import Iterator
import contextlib
import signal
import sys
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
  """Whether a stop was asked for.

  Attributes:
    signal_num: The signal that asked for it, None so far.
  """

  def __init__(self):
    self.signal_num: int | None = None

  def requested(self) -> bool:
    """Returns whether to stop after the round that is running."""
    return self.signal_num is not None

  def handle(self, signal_num, frame):
    """Notes the first signal; the second has its usual effect, at once."""
    del frame
    self.signal_num = signal_num
    for number in _SIGNALS:
      signal.signal(number, signal.SIG_DFL)
    print(
        'Stopping after this round; once more to stop at once.', file=sys.stderr
    )


@contextlib.contextmanager
def listen() -> Iterator[StopRequest]:
  """Catches Ctrl-C (SIGINT) and SIGTERM meanwhile.

  Only the main thread can: in another one they keep their usual effect.
  """
  request = StopRequest()
  if threading.current_thread() is not threading.main_thread():
    yield request
    return
  before = {n: signal.signal(n, request.handle) for n in _SIGNALS}
  try:
    yield request
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
