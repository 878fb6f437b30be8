import io
import time
import types

from tff_meta import progress


def _rounds(total, done=0, **options):
  return progress.Progress(
      'round', total, 'rounds', done, stays=True, **options
  )


def test_lines_are_plain_and_rare_without_a_terminal(capsys, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  with _rounds(64, done=4, first='the first one is traced') as shown:
    for rounds in range(5, 65):
      now[0] += 30.0 if rounds == 5 else 0.5  # The first round compiles.
      shown.update(rounds, 'loss 0.2500')
  lines = capsys.readouterr().err.splitlines()
  assert lines[0] == 'round 5/64  loss 0.2500'
  assert lines[1] == 'round 25/64  loss 0.2500  2.00 rounds/s  0:00:20 left'
  assert lines[-1].startswith('round 64/64')
  assert len(lines) == 4


def test_time_left_gets_less_while_a_step_runs(capsys, monkeypatch):
  now = [100.0]
  clock = types.SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(progress, 'time', clock)
  monkeypatch.setattr(progress, '_SECONDS_BETWEEN_LOOKS', 0.01)
  told = []

  def is_told(line):
    told.extend(capsys.readouterr().err.splitlines())
    return line in told

  with progress.Progress('run', 3, 'runs') as shown:
    now[0] += 100
    shown.update(1)
    now[0] += 30
    _wait_for(lambda: is_told('run 1/3  0.01 runs/s  0:02:50 left'))
    now[0] += 971  # The second takes longer; of the third nothing is known.
    _wait_for(lambda: is_told('run 1/3  0.01 runs/s  0:01:40 left'))


def _wait_for(condition):
  deadline = time.monotonic() + 30
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.01)
  assert condition()


def test_a_step_that_takes_long_is_told_of_meanwhile(capsys, monkeypatch):
  """By the innermost of two; a third was done at once, and tells nothing."""
  monkeypatch.setattr(progress, '_SECONDS_BETWEEN_LINES', 0.05)
  monkeypatch.setattr(progress, '_SECONDS_BETWEEN_LOOKS', 0.01)
  told = []

  def lines():
    told.extend(capsys.readouterr().err.splitlines())
    return told

  with progress.Progress('run', 2, 'runs', status=lambda: 'busy') as outer:
    outer.update(1)
    with progress.Progress('tested', 9, 'clients', first='traced') as inner:
      _wait_for(lambda: len(lines()) > 2)
      assert set(told[-2:]) == {'tested 0/9  0:00:00 so far  traced'}
      inner.update(4)
    with progress.Progress('reading digits'):
      _wait_for(lambda: 'reading digits  0:00:00 so far' in lines())
    _wait_for(lambda: lines()[-1].startswith('run 1/2'))
    assert told[-1].endswith('  0:00:00 left  busy')
  with progress.Progress('tested', 1, 'clients') as quick:
    quick.update(1)
  assert not capsys.readouterr().err


def test_on_a_terminal_lines_stand_above_the_bar(monkeypatch, terminal):
  out = io.StringIO()
  monkeypatch.setattr(progress.sys, 'stderr', terminal)
  monkeypatch.setattr(progress.sys, 'stdout', out)
  with _rounds(2) as shown:
    shown.update(1)
    progress.write('round 1: accuracy 50.00 %')
    with progress.Progress('reading digits'):
      pass
  assert not out.getvalue()
  assert '1/2' in terminal.getvalue()
  assert 'round 1: accuracy 50.00 %\n' in terminal.getvalue()


def test_without_a_bar_lines_are_lines(capsys):
  progress.write('round 1: accuracy 50.00 %')
  with _rounds(2, first='traced') as shown:
    shown.update(2)
  assert capsys.readouterr().err == 'round 1: accuracy 50.00 %\nround 2/2\n'
