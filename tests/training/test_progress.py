import io
import re

from tff_meta.training import progress


def test_lines_are_plain_and_rare_without_a_terminal(capsys, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  shown = progress.Progress(first_round=4, num_rounds=64)
  for rounds in range(5, 65):
    now[0] += 30.0 if rounds == 5 else 0.5  # The first round compiles.
    shown.update(rounds, 0.25)
  shown.close()
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == 'round 5/64  loss 0.2500'
  assert lines[1] == 'round 25/64  loss 0.2500  2.00 rounds/s  0:00:20 left'
  assert lines[-1].startswith('round 64/64')
  assert len(lines) == 4


def test_notes_are_lines(capsys):
  shown = progress.Progress(0, 2)
  shown.update(1, None)
  shown.note('round 1: accuracy 0.5000')
  assert capsys.readouterr().out.splitlines()[1] == 'round 1: accuracy 0.5000'


def test_on_a_terminal_notes_stand_above_the_bar(monkeypatch, terminal):
  out = io.StringIO()
  monkeypatch.setattr(progress.sys, 'stderr', terminal)
  monkeypatch.setattr(progress.sys, 'stdout', out)
  shown = progress.Progress(0, 2)
  shown.update(1, None)
  shown.note('round 1: accuracy 0.5000')
  shown.close()
  assert out.getvalue() == 'round 1: accuracy 0.5000\n'
  assert '1/2' in terminal.getvalue()


def test_a_run_without_loss_shows_rounds(capsys):
  progress.Progress(0, 2).update(2, None)
  assert re.fullmatch(r'round 2/2\n', capsys.readouterr().out)
