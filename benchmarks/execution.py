"""How long rounds take in this process, in TFF's runtime and without TFF.

  python -m benchmarks.execution [--parts=speed,cohorts,reading,memory,start]
  TFF_META_DATA_DIR=DATA python -m benchmarks.execution --parts=whole_runs \
      --before=CHECKOUT

`speed` runs all candidates of a workload in turn, again and again, and prints
medians and ratios: absolute times of two runs are not comparable, ratios are.
`distributed` compares workers of Ray with one process (requirements-ray.txt),
`cohorts` has rounds of 10, 100 and 1,000 clients, `reading` rounds to which
clients bring new data sets, `memory` 10,000 rounds, and `start` whole programs
to their first round. `whole_runs` runs programs to their end, in turn with
those of another commit, checked out at CHECKOUT.

PyTorch's rows are left out where it is not installed; see `torch_loops`.
"""

import argparse
import collections
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import psutil

from tff_meta.execution import native

_ENVIRONMENT = dict(os.environ)  # As it was given, for programs.
native.prepare_environment()
try:  # Before TensorFlow, after which it cannot be imported.
  from benchmarks import torch_loops
except ImportError:
  torch_loops = None  # type: ignore[assignment]  # In place of a module.

import tensorflow as tf  # noqa: E402
import tensorflow_federated as tff  # noqa: E402

from benchmarks import whole_runs  # noqa: E402
from benchmarks import workloads  # noqa: E402
from tff_meta.execution import in_process  # noqa: E402

_MEGABYTE = 2**20
_ROOT = pathlib.Path(__file__).parents[1]
_STARTED = ('fed_avg', 'frl', 'cafeme')


def measure(candidates: workloads.Candidates, repeats: int) -> None:
  """Runs the candidates in turn; prints medians, and ratios to the first.

  Args:
    candidates: By name; each runs twice before it counts.
    repeats: How often each is measured.
  """
  for candidate in candidates.values():
    candidate(), candidate()
  seconds: dict[str, list[float]] = {name: [] for name in candidates}
  ratios: dict[str, list[float]] = {name: [] for name in candidates}
  for _ in range(repeats):
    for name, candidate in candidates.items():
      started = time.perf_counter()
      candidate()
      seconds[name].append(time.perf_counter() - started)
    first = next(iter(seconds.values()))[-1]
    for name in candidates:
      ratios[name].append(seconds[name][-1] / first)
  for name in candidates:
    print(
        f'  {name:34}{1e3 * statistics.median(seconds[name]):10.1f} ms'
        f'{statistics.median(ratios[name]):10.2f} x the first',
        flush=True,
    )


def _fed_avg(name, setting, ours, stock):
  """Returns the candidates of a FedAvg workload."""
  network, process = workloads.build_fed_avg(setting)
  clients = workloads.examples(
      setting.num_clients, setting.num_examples, setting.shape
  )
  data = workloads.client_data(clients)
  state = ours.invoke(process.initialize, None)
  weights = process.get_model_weights(state).trainable
  iterator = tff.learning.LoopImplementation.DATASET_ITERATOR
  stock_process = workloads.stock_process(setting)
  stock_iterator = workloads.stock_process(
      setting, loop_implementation=iterator
  )
  stock_data = workloads.stock_data(setting, clients)
  candidates = {
      'tff_meta, in process': workloads.rounds_in(ours, process, data),
      'bare tf.function, a client': workloads.bare_round(
          network, setting, weights, clients
      ),
      'bare tf.function, all clients': workloads.best_bare_round(
          network, setting, weights, clients
      ),
      'stock TFF, default loop': workloads.rounds_in(
          stock, stock_process, stock_data
      ),
      'stock TFF, dataset-iterator loop': workloads.rounds_in(
          stock, stock_iterator, stock_data
      ),
      "TFF's FedAvg in process, iterator": workloads.rounds_in(
          ours, stock_iterator, stock_data
      ),
      'tff_meta, in stock TFF': workloads.rounds_in(stock, process, data),
  }
  if torch_loops is not None:
    candidates['bare PyTorch loop'] = torch_loops.build_fed_avg(
        setting.network,
        weights,
        clients,
        setting.batch_size,
        setting.learning_rate,
    )
  print(f'{name}: {setting}')
  return candidates


def _speed(repeats: int, only: list[str]) -> None:
  """Prints the table of every workload."""
  ours = in_process.InProcessContext()
  stock = native.create_native_context()
  for name, setting in workloads.FED_AVG.items():
    if not only or name in only:
      measure(_fed_avg(name, setting, ours, stock), repeats)
  for name, system in (workloads.SYSTEMS | workloads.PERSONALIZED).items():
    if only and name not in only:
      continue
    process, clients = workloads.build_system(system)
    candidates = {
        'tff_meta, in process': workloads.system_rounds(
            ours, system, process, clients
        ),
        'tff_meta, in stock TFF': workloads.system_rounds(
            stock, system, process, clients
        ),
    }
    build = torch_loops and torch_loops.SYSTEMS.get(name)
    if build:
      state = ours.invoke(process.initialize, None)
      weights = process.get_model_weights(state).trainable
      candidates['bare PyTorch loop'] = build(weights, clients)
    print(f'{name}: {system}')
    measure(candidates, max(3, repeats // 3))


def _cohorts(repeats: int) -> None:
  """Prints a client's share of rounds of ever more clients, and memory."""
  setting = workloads.FedAvgSetting('mlp', (28, 28, 1), 1000, 50, 32)
  _, process = workloads.build_fed_avg(setting)
  clients = workloads.examples(setting.num_clients, 50, setting.shape)
  data = workloads.client_data(clients)
  context = in_process.InProcessContext()
  sizes = (10, 100, 1000)
  state = context.invoke(process.initialize, None)
  rounds = {
      size: (
          lambda size=size: context.invoke(
              process.next, workloads.arguments(state, data[:size])
          )
      )
      for size in sizes
  }
  for one_round in rounds.values():
    one_round(), one_round()
  shares: dict[int, list[float]] = {size: [] for size in sizes}
  for _ in range(repeats):
    for size, one_round in rounds.items():
      # As many clients for every size: ten small rounds say as much as one.
      number = max(1, 100 // size)
      started = time.perf_counter()
      for _ in range(number):
        one_round()
      shares[size].append((time.perf_counter() - started) / (number * size))
  medians = {size: statistics.median(shares[size]) for size in sizes}
  print('cohorts: MLP, 50 examples a client')
  for size, share in medians.items():
    print(
        f'  {size:5} clients: {1e3 * share:8.3f} ms a client,'
        f' {share / medians[sizes[0]]:5.2f} x that of {sizes[0]}'
    )
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  print(f'  peak resident memory of the process: {peak:.0f} MB')


def _preprocessed(x, y, salt, decode):
  """Returns a client's data as TFF's tutorials prepare them, in new objects."""
  elements = tf.data.Dataset.from_tensor_slices((x, y))
  return collections.OrderedDict(
      examples=elements.map(
          lambda x, y: collections.OrderedDict(x=decode(x), y=y)
      )
      .shuffle(len(y))
      .batch(20),
      salt=tf.data.Dataset.from_tensors(np.int32(salt)),
  )


def _reading(repeats: int) -> None:
  """Prints what rounds take whose clients' data sets have to be read."""
  setting = workloads.FedAvgSetting('mlp', (28, 28, 1), 10, 100, 20)
  _, process = workloads.build_fed_avg(setting)
  clients = workloads.examples(10, 100, setting.shape)
  files = [
      ([tf.io.encode_png(tf.cast(image, tf.uint8)).numpy() for image in x], y)
      for x, y in clients
  ]
  context = in_process.InProcessContext()
  state = context.invoke(process.initialize, None)

  def rounds(make):
    def one_round():
      arguments = workloads.arguments(state, make())
      context.invoke(process.next, arguments)

    return one_round

  def preprocessed(clients, decode):
    return lambda: [
        _preprocessed(x, y, k, decode) for k, (x, y) in enumerate(clients)
    ]

  def decode(png):
    image = tf.ensure_shape(tf.io.decode_png(png), setting.shape)
    return tf.cast(image, tf.float32)

  kept = workloads.client_data(clients)
  mapped = preprocessed(clients, lambda x: x / 2)
  print(f'reading: {setting}')
  measure(
      {
          'the same data sets': rounds(lambda: kept),
          'new ones, one batch': rounds(lambda: workloads.client_data(clients)),
          'new ones, mapped and shuffled': rounds(mapped),
          'making the latter, no round': mapped,
          'new ones, of PNG images': rounds(preprocessed(files, decode)),
      },
      repeats,
  )


def _memory(num_rounds: int) -> None:
  """Prints what the process holds after some and after many rounds."""
  setting = workloads.FED_AVG['fed_avg_mlp']
  setting = workloads.FedAvgSetting('mlp', setting.shape, 5, 100, 32)
  _, process = workloads.build_fed_avg(setting)
  clients = workloads.examples(5, 100, setting.shape)
  data = workloads.client_data(clients)
  context = in_process.InProcessContext()
  one_round = workloads.rounds_in(context, process, data)
  this = psutil.Process()
  graphs = []
  initialize = tf.Graph.__init__

  def initialize_and_count(graph):
    graphs.append(1)
    initialize(graph)

  tf.Graph.__init__ = initialize_and_count
  print(f'memory: {num_rounds} rounds of the MLP')
  early = None
  for i in range(1, num_rounds + 1):
    one_round()
    if i in (num_rounds // 20, num_rounds):
      resident = this.memory_info().rss / _MEGABYTE
      early = early or resident
      print(
          f'  after {i:6} rounds: {resident:7.1f} MB,'
          f' {100 * (resident / early - 1):+5.1f} %;'
          f' {this.num_threads()} threads ({threading.active_count()} of'
          f' Python), {this.num_fds()} files, {len(graphs)} graphs',
          flush=True,
      )
  tf.Graph.__init__ = initialize


def _distributed(repeats: int) -> None:
  """Prints what rounds over workers cost; here, as it needs Ray."""
  from benchmarks import distributed

  distributed.measure(repeats)


def _start(repeats: int) -> None:
  """Prints how long programs take to their first output."""
  print('start: whole programs, median seconds')
  clock = time.perf_counter
  seconds = collections.defaultdict(list)
  for _ in range(repeats):
    begin = clock()
    subprocess.run(
        [sys.executable, '-m', 'binaries.train', '--helpshort'],
        cwd=_ROOT,
        env=_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    seconds['binaries.train --helpshort'].append(clock() - begin)
    for algorithm in _STARTED:
      seconds[f'{algorithm}, the first round'].append(_first_round(algorithm))
  for name, values in seconds.items():
    print(f'  {name:34}{statistics.median(values):6.1f}')


def _first_round(algorithm: str) -> float:
  """Seconds of a program from its start to the end of its first round."""
  with tempfile.TemporaryDirectory() as directory:
    command = [sys.executable, '-m', 'binaries.train']
    command += [f'--algorithm={algorithm}', f'--output_dir={directory}/run']
    begin = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        env=_ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
      for line in program.stdout or ():
        if line.startswith('round 1/'):
          break
      else:
        raise RuntimeError('Expected a line of the first round, found none.')
      seconds = time.perf_counter() - begin
      program.kill()
  return seconds


def main() -> None:
  """Runs the parts asked for."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--parts', default='speed,cohorts,reading,memory,start')
  parser.add_argument('--repeats', type=int, default=15)
  parser.add_argument('--rounds', type=int, default=10_000)
  parser.add_argument(
      '--only', default='', help='Workloads of `speed` or `whole_runs`.'
  )
  parser.add_argument(
      '--before', default='', help='Checkout that `whole_runs` compares with.'
  )
  arguments = parser.parse_args()
  only = [name for name in arguments.only.split(';') if name]
  parts = {
      'speed': lambda: _speed(arguments.repeats, only),
      'cohorts': lambda: _cohorts(arguments.repeats),
      'reading': lambda: _reading(arguments.repeats),
      'memory': lambda: _memory(arguments.rounds),
      'start': lambda: _start(3),
      'distributed': lambda: _distributed(arguments.repeats),
      'whole_runs': lambda: whole_runs.measure(
          arguments.before, min(3, arguments.repeats), only, _ENVIRONMENT
      ),
  }
  chosen = arguments.parts.split(',')
  if not set(chosen) <= set(parts):
    parser.error(f'Expected --parts among {list(parts)}, found {chosen}.')
  print(f'{os.cpu_count()} CPUs, TensorFlow {tf.__version__}')
  for part in chosen:
    if len(chosen) == 1:
      parts[part]()
    else:  # Each in a process of its own: memory and threads start anew.
      command = [sys.executable, '-m', 'benchmarks.execution']
      command += [f'--parts={part}', f'--repeats={arguments.repeats}']
      command += [f'--rounds={arguments.rounds}', f'--only={arguments.only}']
      command += [f'--before={arguments.before}']
      subprocess.run(command, check=True, env=_ENVIRONMENT)
  native.end_process(0)


if __name__ == '__main__':
  main()
