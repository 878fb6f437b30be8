"""Stops that a user or the machine asks for."""

from concurrent import futures
import os
import signal

from tff_meta.training import stop_signals


def test_a_signal_asks_for_a_stop_and_afterwards_has_its_usual_effect():
  usual = signal.getsignal(signal.SIGTERM)
  with stop_signals.listen() as stop:
    assert not stop.requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested() and stop.signal_num == signal.SIGTERM
  assert signal.getsignal(signal.SIGTERM) == usual


def test_another_thread_trains_without_signals():
  def listen():
    with stop_signals.listen() as stop:
      return stop.requested()

  with futures.ThreadPoolExecutor(1) as pool:
    assert pool.submit(listen).result() is False
