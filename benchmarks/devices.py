"""The five systems on a device: do they agree with the CPU, and how fast.

  python -m benchmarks.devices --device=gpu

Prints the device's name; for each system the largest difference of the weights
after a round to those of the CPU, relative to the largest weight; and rounds a
second with one client at a time and with more, after rounds that do not count,
in which kernels are compiled and chosen.
"""

import argparse
import statistics
import time

import numpy as np

from tff_meta.execution import native

native.prepare_environment()

import tensorflow as tf  # noqa: E402
import tree  # noqa: E402

from benchmarks import workloads  # noqa: E402
from tff_meta.execution import in_process  # noqa: E402

_AGREEMENT = 1e-3
_WARM_UP_ROUNDS = 5


def difference(system: workloads.System, devices: list[str]) -> float:
  """Returns how far a round on some devices is from one on the CPU.

  Args:
    system: The system; one communication round, from its initial state.
    devices: Names of devices.

  Returns:
    The largest difference of a weight, divided by the largest weight.
  """
  process, clients = workloads.build_system(system)
  weights = []
  for names in (['/CPU:0'], devices):
    context = in_process.InProcessContext(names)
    state = context.invoke(process.initialize, None)
    arguments = workloads.arguments(
        state, workloads.system_data(process, clients)
    )
    state = context.invoke(process.next, arguments).state
    weights.append(tree.flatten(process.get_model_weights(state).trainable))
  largest = max(np.abs(w).max() for w in weights[0] if w.size)
  return max(
      float(np.abs(actual - expected).max() / largest)
      for expected, actual in zip(*weights, strict=True)
      if expected.size
  )


def rounds_per_second(
    system: workloads.System,
    devices: list[str],
    parallel_clients: int,
    repeats: int,
) -> float:
  """Returns the median of rounds (FRL: episodes) a second."""
  process, clients = workloads.build_system(system)
  context = in_process.InProcessContext(
      devices, parallel_clients=parallel_clients
  )
  one = workloads.system_rounds(context, system, process, clients)
  for _ in range(_WARM_UP_ROUNDS):
    one()
  seconds = []
  for _ in range(repeats):
    started = time.perf_counter()
    one()
    seconds.append(time.perf_counter() - started)
  return 1 / statistics.median(seconds)


def main(argv: list[str] | None = None) -> None:
  """Prints agreement and speed.

  Args:
    argv: Command line; None for the program's own.
  """
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--device', choices=('cpu', 'gpu'), default='gpu')
  parser.add_argument('--repeats', type=int, default=20)
  parser.add_argument('--systems', default=','.join(workloads.SYSTEMS))
  parser.add_argument(
      '--speed', default='frl,metavers', help='Systems to time.'
  )
  arguments = parser.parse_args(argv)
  devices = in_process.use_device(arguments.device)
  for gpu in tf.config.list_physical_devices('GPU'):
    print(
        tf.config.experimental.get_device_details(gpu).get('device_name', gpu)
    )
  print(f'{devices}, TensorFlow {tf.__version__}')
  for name in filter(None, arguments.systems.split(',')):
    found = difference(workloads.SYSTEMS[name], devices)
    verdict = 'agrees' if found <= _AGREEMENT else 'DIFFERS'
    print(f'{name:12} {verdict} with the CPU: {found:.1e}', flush=True)
  for name in filter(None, arguments.speed.split(',')):
    system = workloads.SYSTEMS[name]
    for parallel_clients in (1, system.clients['num_clients']):
      rate = rounds_per_second(
          system, devices, parallel_clients, arguments.repeats
      )
      print(
          f'{name:12} {rate:8.2f} a second, {parallel_clients} clients at the'
          ' same time',
          flush=True,
      )


if __name__ == '__main__':
  main()
  native.end_process(0)
