import re
import subprocess
import sys

import pytest

from benchmarks import devices
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


def test_a_device_that_differs_is_noticed(monkeypatch):
  """A device whose weights are one too large after a round."""

  class Wrong(in_process.InProcessContext):

    def invoke(self, comp, arg):
      output = super().invoke(comp, arg)
      if self._devices == ['CPU:0'] and hasattr(output, 'metrics'):
        head = output.state.global_model_weights.trainable['head']
        for name in head:
          head[name] = head[name] + 1
      return output

  monkeypatch.setattr(in_process, 'InProcessContext', Wrong)
  system = workloads.SYSTEMS['fedmeta_per']
  # No weight is as large as 1 at first.
  assert devices.difference(system, ['CPU:0']) > 1


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
