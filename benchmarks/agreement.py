"""How far rounds on a device are from the CPU's, and what rounding alone does.

  python -m benchmarks.agreement --device=gpu --systems=cafeme,metavers

`benchmarks.devices` compares a round from the initial weights. Here a round
(FRL: an episode) is done from every state that the CPU goes through, with one
client at a time, so again, and with all in one batch. Beside these stands what
the CPU makes of weights that are an ulp off, half of them, and of weights with
a relative noise, as `--noise=6e-7,6e-6`: a device that is no farther off rounds
differently and does nothing else. Then follows how far each way is after all
rounds, going on from its own states. Differences are those of the weights after
a round, by their norms (square roots of sums of squares), divided by those of
the CPU's moves; TensorFloat 32 is off.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import statistics
from typing import Any

import numpy as np

from tff_meta.execution import native

native.prepare_environment()

import tensorflow as tf  # noqa: E402
import tree  # noqa: E402

from benchmarks import workloads  # noqa: E402
from tff_meta import models  # noqa: E402
from tff_meta import registry  # noqa: E402
from tff_meta.execution import in_process  # noqa: E402

Round = Callable[[Any], Any]  # State -> state.


def an_ulp_off(weights: Any, seed: int) -> Any:
  """Returns weights of which a half are an ulp larger or smaller.

  Args:
    weights: Nested arrays; what is not float32 stays as it is.
    seed: Of the choice.
  """
  rng = np.random.default_rng(seed)

  def changed(leaf):
    towards = rng.choice(np.array([-np.inf, 0, 0, np.inf], 'f'), leaf.shape)
    return np.where(towards == 0, leaf, np.nextafter(leaf, towards))

  return _changed(weights, changed)


def with_noise(weights: Any, seed: int, noise: float) -> Any:
  """Returns weights with normal relative noise of that deviation.

  Args:
    weights: Nested arrays; what is not float32 stays as it is.
    seed: Of the noise.
    noise: The deviation.
  """
  rng = np.random.default_rng(seed)
  return _changed(
      weights,
      lambda leaf: leaf * (1 + noise * rng.normal(size=leaf.shape)).astype('f'),
  )


def _changed(weights, change):
  def of_leaf(leaf):
    leaf = np.asarray(leaf)
    return change(leaf) if leaf.dtype == np.float32 else leaf

  return tree.map_structure(of_leaf, weights)


def compare(
    name: str,
    devices: list[str],
    seed: int,
    num_rounds: int,
    noises: Sequence[float] = (),
) -> tuple[dict[str, list[float]], dict[str, float]]:
  """Returns the differences of rounds, and those after all rounds.

  Args:
    name: A system.
    devices: Names of devices.
    seed: Of the run; also of the clients' examples.
    num_rounds: Rounds or episodes.
    noises: Deviations of relative noise, see the module.

  Returns:
    For each way: the differences of rounds that start where the CPU does, and
    the one after all rounds, from the way's own states.
  """
  system = workloads.SYSTEMS[name]
  spec = registry.get(system.algorithm)
  config = dataclasses.replace(spec.presets[system.preset], **system.changes)
  num_classes = system.clients.get('num_classes', 10)
  network = models.build(system.network, system.clients['shape'], num_classes)
  process = registry.build(
      system.algorithm, network, config, num_classes, seed=seed
  )
  clients = workloads.examples(**system.clients)
  rng = np.random.default_rng(seed)
  clients = [(rng.permutation(x), y) for x, y in clients]  # Other images.
  data = workloads.system_data(process, clients)

  def rounds_in(names, batched_clients=1) -> Round:
    context = in_process.InProcessContext(
        names, batched_clients=batched_clients
    )

    def one(state):
      for _ in range(system.rounds):
        arguments = workloads.arguments(state, data)
        state = context.invoke(process.next, arguments).state
      return state

    return one

  def of_moves(actual, expected, start):
    vectors = []
    for state in (actual, expected, start):
      weights = server.invoke(process.get_model_weights, state).trainable
      leaves = [np.ravel(leaf) for leaf in tree.flatten(weights)]
      vectors.append(np.concatenate(leaves))
    distance = np.linalg.norm(vectors[0] - vectors[1])
    return float(distance / np.linalg.norm(vectors[1] - vectors[2]))

  def perturbed(state, noise=None):
    weights = state.global_model_weights
    weights = (
        with_noise(weights, seed, noise) if noise else an_ulp_off(weights, seed)
    )
    return state._replace(global_model_weights=weights)

  def from_perturbed(noise=None) -> Round:
    return lambda state: cpu(perturbed(state, noise))

  server = in_process.InProcessContext()
  cpu, loop = rounds_in(['/CPU:0']), rounds_in(devices)
  batch = rounds_in(devices, len(clients))
  ways: dict[str, Round] = {
      'an ulp off': from_perturbed(),
      **{f'noise of {noise:g}': from_perturbed(noise) for noise in noises},
      'one at a time': loop,
      'the same again': loop,
      'in one batch': batch,
  }
  own_ways: dict[str, Round] = {
      'an ulp off': cpu,
      'one at a time': loop,
      'in one batch': batch,
  }
  start = server.invoke(process.initialize, None)
  state = start
  own = {way: state for way in own_ways}
  own['an ulp off'] = perturbed(state)
  each: dict[str, list[float]] = {way: [] for way in ways}
  for _ in range(num_rounds):
    expected = cpu(state)
    for way, one in ways.items():
      each[way].append(of_moves(one(state), expected, state))
    own = {way: own_ways[way](own[way]) for way in own}
    state = expected
  return each, {way: of_moves(own[way], state, start) for way in own}


def main(argv: list[str] | None = None) -> None:
  """Prints the differences.

  Args:
    argv: Command line; None for the program's own.
  """
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--device', choices=('cpu', 'gpu'), default='gpu')
  parser.add_argument('--systems', default=','.join(workloads.SYSTEMS))
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--noise', default='', help='Deviations, with commas.')
  arguments = parser.parse_args(argv)
  noises = [float(noise) for noise in arguments.noise.split(',') if noise]
  devices = in_process.use_device(arguments.device)
  tf.config.experimental.enable_tensor_float_32_execution(False)
  print(f'{devices}, TensorFlow {tf.__version__}', flush=True)
  for name in arguments.systems.split(','):
    rounds: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = {}
    for seed in range(arguments.seeds):
      each, after = compare(name, devices, seed, arguments.rounds, noises)
      for way, found in each.items():
        rounds.setdefault(way, []).extend(found)
        print(name, seed, way, *(f'{one:.1e}' for one in found), flush=True)
      for way, one in after.items():
        ends.setdefault(way, []).append(one)
        print(name, seed, way, f'on its own {one:.1e}', flush=True)
    for title, table in (
        ('a round', rounds),
        (f'after {arguments.rounds} rounds', ends),
    ):
      for way, found in table.items():
        print(
            f'{name:12} {title}, {way}: {statistics.median(found):.1e} of the'
            f' moves, {min(found):.1e} to {max(found):.1e}',
            flush=True,
        )


if __name__ == '__main__':
  main()
  native.end_process(0)
