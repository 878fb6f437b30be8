import re
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import agreement
from benchmarks import devices
from benchmarks import interval_coverage
from benchmarks import onednn
from benchmarks import workloads
from tff_meta.execution import in_process


@pytest.mark.slow
def test_a_device_agrees_with_the_cpu_and_is_timed(capsys):
  """On the CPU, which is what the tests have."""
  devices.main(
      [
          '--device=cpu',
          '--systems=fedmeta_per,cafeme',
          '--speed=metavers',
          '--warm_up=1',
          '--repeats=1',
      ]
  )

  lines = capsys.readouterr().out.splitlines()
  for name, line in (('fedmeta_per', lines[-7]), ('cafeme', lines[-5])):
    assert re.match(f'{name} +agrees with the CPU: 0\\.0e\\+00', line)
  for name, line in (('fedmeta_per', lines[-6]), ('cafeme', lines[-4])):
    assert re.match(f'{name} +agrees .*, clients in batches of 5', line)
  rates = [float(line.split()[1]) for line in lines[-3:]]
  assert all(rate > 0 for rate in rates)
  assert lines[-3].endswith(
      'one client at a time: 1.00 x the time of the first'
  )


def _weights_of_a_device(monkeypatch, change):
  """Has a device, 'CPU:0', whose weights after a round are changed."""

  class Changed(in_process.InProcessContext):

    def invoke(self, comp, arg):
      output = super().invoke(comp, arg)
      if self._devices == ['CPU:0'] and hasattr(output, 'metrics'):
        before = arg[0].global_model_weights.trainable
        change(before, output.state.global_model_weights.trainable)
      return output

  monkeypatch.setattr(in_process, 'InProcessContext', Changed)
  return devices.difference(workloads.SYSTEMS['fedmeta_per'], ['CPU:0'])


@pytest.mark.ci
def test_a_device_that_differs_is_noticed(monkeypatch):
  def one_too_large(_, after):
    for name in after['head']:
      after['head'][name] = after['head'][name] + 1

  found = _weights_of_a_device(monkeypatch, one_too_large)

  # No weight is as large as 1 at first.
  assert found.largest > 1
  assert found.verdict() == 'DIFFERS'


@pytest.mark.ci
def test_a_device_that_does_nothing_is_noticed(monkeypatch):
  """Its weights are near those of the CPU: these hardly move in a round."""

  def unmoved(before, after):
    for part in after:
      after[part] = before[part]

  found = _weights_of_a_device(monkeypatch, unmoved)

  assert found.of_moves == pytest.approx(1)
  assert found.largest < 0.02
  assert found.verdict() == 'DIFFERS'


@pytest.mark.ci
def test_a_step_of_adam_may_go_the_other_way(monkeypatch):
  """As on an H100 that of one weight of a kernel did."""

  def one_weight_the_other_way(before, after):
    old, new = (np.array(w['body']['kernel']) for w in (before, after))
    moved = np.unravel_index(np.abs(new - old).argmax(), new.shape)
    new[moved] = 2 * old[moved] - new[moved]
    after['body']['kernel'] = new

  found = _weights_of_a_device(monkeypatch, one_weight_the_other_way)

  assert found.largest > 0.01
  assert found.verdict() == 'agrees'


@pytest.mark.slow
def test_rounds_with_and_without_onednn_are_compared(monkeypatch, capfd):
  monkeypatch.setattr(
      sys, 'argv', ['', '--workloads=fedmeta_per', '--repeats=1']
  )
  onednn.main()

  line = capfd.readouterr().out.splitlines()[-1]
  number = r'([0-9.]+)'
  pattern = f'fedmeta_per +{number} ms with +{number} ms without, +{number} x'
  on, off, ratio = map(float, re.fullmatch(pattern, line).groups())
  assert ratio == pytest.approx(off / on, abs=0.02)


@pytest.mark.slow
def test_what_a_large_model_takes_is_measured():
  """A million weights of four bytes, in each of the three checkpoints."""
  name = 'weights of the model=1000000'
  program = subprocess.run(
      [sys.executable, '-m', 'benchmarks.scale', f'--only={name}'],
      capture_output=True,
      text=True,
      check=True,
  )
  columns, _, row = (
      [cell.strip() for cell in line.strip('|').split('|')]
      for line in program.stdout.splitlines()
  )
  cells = dict(zip(columns, row, strict=True))
  assert cells['run'] == name
  assert float(cells['checkpoints, MB']) == pytest.approx(12, rel=0.05)
  assert float(cells['peak MB']) > 300
  # 10 clients of 100 in 41 rounds: most have taken part before.
  assert int(cells['known, %']) > 50
  whole = int(cells['rounds']) * 10 * float(cells['ms a client']) / 1e3
  assert 0 < float(cells['first round, s']) < float(cells['run, s']) > whole / 2


def test_an_ulp_off_changes_a_half_of_the_weights():
  weights = {'w': np.ones((100, 100), np.float32), 'n': np.int32(3)}

  changed = agreement.an_ulp_off(weights, seed=0)

  distances = np.abs(changed['w'] - 1)
  assert changed['w'].dtype == np.float32
  assert 0.45 < np.mean(distances > 0) < 0.55
  assert distances.max() == np.finfo(np.float32).eps
  assert changed['n'] == 3


@pytest.mark.slow
def test_agreement_of_rounds_with_the_cpu_itself():
  """Rounding of the weights differs, one client at a time does not."""
  each, after = agreement.compare(
      'fedmeta_per', ['/CPU:0'], seed=0, num_rounds=1, noises=[1e-4]
  )

  assert each['one at a time'] == each['the same again'] == [0.0]
  assert 0 < each['in one batch'][0] < 1e-4
  assert 0 < each['an ulp off'][0] < 1e-3
  assert each['an ulp off'] < each['noise of 0.0001']
  assert after['an ulp off'] == each['an ulp off'][0]


def test_intervals_hold_the_truth_as_often_as_they_say(capsys):
  interval_coverage.main(['--draws=200'])

  found = {}
  for name, least in re.findall(
      r'^  (\S.*\S) +([\d.]+) to', capsys.readouterr().out, re.MULTILINE
  ):
    found.setdefault(name, []).append(float(least))
  of_all = found.pop('the same, of all')
  assert all(min(least) >= 86 for least in found.values()), found
  assert sum(found['worst decile']) > sum(of_all) + 12  # Two points of each.
