import re

from benchmarks import devices


def test_a_device_agrees_with_the_cpu_and_is_timed(capsys):
  """On the CPU, which is what the tests have."""
  devices.main(
      [
          '--device=cpu',
          '--systems=fedmeta_per,cafeme',
          '--speed=metavers',
          '--repeats=1',
      ]
  )

  lines = capsys.readouterr().out.splitlines()
  assert re.match(r'fedmeta_per +agrees with the CPU: 0\.0e\+00', lines[-4])
  assert re.match(r'cafeme +agrees with the CPU: 0\.0e\+00', lines[-3])
  rates = [float(line.split()[1]) for line in lines[-2:]]
  assert all(rate > 0 for rate in rates)
