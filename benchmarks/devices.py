"""The five systems on a device: do they agree with the CPU, and how fast.

  python -m benchmarks.devices --device=gpu

Prints the device's name; for each system how far the weights after a round
(FRL: an episode) are from those of the CPU, compared with how far they moved,
one client at a time and all as one batch; and rounds a second with one client
at a time, with all at the same time and with all as one batch, after rounds
that do not count, in which kernels are compiled and chosen. These take turns.
Weights are compared without TensorFloat 32, whose products have 10 bits of the
mantissa; speed is that with it, as TensorFlow has it by default.

Agreement is of the norms of all differences and all moves. The largest of them
say less: a step of Adam is as long for a gradient that is all rounding, as that
of a bias before batch normalisation, as for any other, and goes either way.
What rounding alone does to a round, `benchmarks.agreement` shows.

TensorFlow computes everything on a GPU in one stream, however many clients run
at the same time. Several streams are several logical devices:

  python -m benchmarks.devices --device=gpu --streams=4 --stream_megabytes=18000
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import numpy as np

from tff_meta.execution import native

native.prepare_environment()

import tensorflow as tf  # noqa: E402
import tree  # noqa: E402

from benchmarks import workloads  # noqa: E402
from tff_meta.execution import in_process  # noqa: E402

_AGREEMENT = 0.05  # Of the moves; a device that does nothing has 1.
# A weight of CAFeMe's clients makes the first step of Adam, whose direction is
# the sign of its gradient: noise of 6e-6 in the weights makes up to 0.3.
_AGREEMENTS = {'cafeme': 0.4}


class Difference(NamedTuple):
  """How far weights are from those of the CPU.

  Attributes:
    of_moves: The norm of the differences, divided by that of the moves.
    largest: The largest difference of a weight, divided by the largest weight.
  """

  of_moves: float
  largest: float

  def verdict(self, name: str = '') -> str:
    """Says whether that is agreement; what is no number is none.

    Args:
      name: Of the system; without it the limit is that of most.
    """
    limit = _AGREEMENTS.get(name, _AGREEMENT)
    return 'agrees' if self.of_moves <= limit else 'DIFFERS'


def difference(
    system: workloads.System, devices: list[str], batched_clients: int = 1
) -> Difference:
  """Returns how far a round on some devices is from one on the CPU.

  Args:
    system: The system; as many communication rounds as are measured of it, from
      its initial state.
    devices: Names of devices.
    batched_clients: Clients that are computed together there, not on the CPU.

  Raises:
    AssertionError: If the weights do not move, and so say nothing.
  """
  process, clients = workloads.build_system(system)
  data = workloads.system_data(process, clients)
  weights = []
  for names, number in ((['/CPU:0'], 1), (devices, batched_clients)):
    context = in_process.InProcessContext(names, batched_clients=number)
    state = context.invoke(process.initialize, None)
    states = [state]
    for _ in range(system.rounds):
      arguments = workloads.arguments(states[-1], data)
      states.append(context.invoke(process.next, arguments).state)
    for state in (states[0], states[-1]):
      found = context.invoke(process.get_model_weights, state)
      leaves = tree.flatten(found.trainable)
      weights.append(np.concatenate([np.ravel(leaf) for leaf in leaves]))
  initial, expected, _, actual = weights
  assert np.any(expected != initial)
  distances = actual - expected
  return Difference(
      float(np.linalg.norm(distances) / np.linalg.norm(expected - initial)),
      float(np.abs(distances).max() / np.abs(expected).max()),
  )


def round_seconds(
    system: workloads.System, devices: list[str], warm_up: int, repeats: int
) -> dict[str, list[float]]:
  """Returns what rounds (FRL: episodes) take in several ways, in turn.

  Args:
    system: The system.
    devices: Names of devices; the first one has all clients, and if there are
      more, they have them together in a fourth way.
    warm_up: Rounds of each that do not count.
    repeats: Rounds of each that do.

  Returns:
    By what is done with clients, the seconds of its rounds.
  """
  process, clients = workloads.build_system(system)
  options_of: dict[str, dict[str, Any]] = {
      'one client at a time': dict(parallel_clients=1),
      'all at the same time': dict(parallel_clients=len(clients)),
      'all in one batch': dict(
          parallel_clients=1, batched_clients=len(clients)
      ),
  }
  ways = {name: (devices[:1], options) for name, options in options_of.items()}
  if len(devices) > 1:
    ways[f'dealt over {len(devices)} devices'] = devices, {}
  rounds = {}
  for name, (names, options) in ways.items():
    context = in_process.InProcessContext(names, **options)
    rounds[name] = workloads.system_rounds(context, system, process, clients)
  seconds: dict[str, list[float]] = {name: [] for name in ways}
  for _ in range(warm_up + repeats):
    for name, one in rounds.items():
      started = time.perf_counter()
      one()
      seconds[name].append(time.perf_counter() - started)
  return {name: one[warm_up:] for name, one in seconds.items()}


def main(argv: list[str] | None = None) -> None:
  """Prints agreement and speed.

  Args:
    argv: Command line; None for the program's own.
  """
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--device', choices=('cpu', 'gpu'), default='gpu')
  parser.add_argument('--repeats', type=int, default=20)
  parser.add_argument('--warm_up', type=int, default=5)
  parser.add_argument('--systems', default=','.join(workloads.SYSTEMS))
  parser.add_argument(
      '--speed', default='frl,metavers', help='Systems to time.'
  )
  parser.add_argument(
      '--streams', type=int, default=1, help='Logical devices of each device.'
  )
  parser.add_argument(
      '--stream_megabytes', type=int, help='Memory of each; for GPUs a must.'
  )
  arguments = parser.parse_args(argv)
  devices = in_process.use_device(arguments.device)
  if arguments.streams > 1:
    kind = arguments.device.upper()
    part = tf.config.LogicalDeviceConfiguration(arguments.stream_megabytes)
    for device in tf.config.list_physical_devices(kind):
      tf.config.set_logical_device_configuration(
          device, [part] * arguments.streams
      )
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
  for gpu in tf.config.list_physical_devices('GPU'):
    print(
        tf.config.experimental.get_device_details(gpu).get('device_name', gpu)
    )
  print(f'{devices}, TensorFlow {tf.__version__}')
  for name in filter(len, arguments.systems.split(',')):
    system = workloads.SYSTEMS[name]
    tf.config.experimental.enable_tensor_float_32_execution(False)
    for number in (1, system.clients['num_clients']):
      found = difference(system, devices, number)
      print(
          f'{name:12} {found.verdict(name)} with the CPU:'
          f' {found.of_moves:.1e} of the moves,'
          f' at most {found.largest:.1e} of the largest weight,'
          f' clients in batches of {number}',
          flush=True,
      )
  tf.config.experimental.enable_tensor_float_32_execution(True)
  for name in filter(None, arguments.speed.split(',')):
    seconds = round_seconds(
        workloads.SYSTEMS[name], devices, arguments.warm_up, arguments.repeats
    )
    first, *_ = seconds.values()
    for way, taken in seconds.items():
      pairs = zip(taken, first, strict=True)
      ratio = statistics.median(one / other for one, other in pairs)
      print(
          f'{name:12} {1 / statistics.median(taken):8.2f} a second, {way}:'
          f' {ratio:.2f} x the time of the first',
          flush=True,
      )


if __name__ == '__main__':
  main()
  native.end_process(0)
