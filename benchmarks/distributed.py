"""What rounds over workers of Ray cost, against those of one process.

CPU seconds of the driver and its workers together, because on one machine the
clock says nothing of several; and the bytes that go to and fro.
"""

from collections.abc import Callable
import statistics
import time
from typing import Any

import psutil
import tree

from benchmarks import workloads
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.datasets import synthetic
from tff_meta.execution import in_process
from tff_meta.execution import ray_pool

_WORKERS = 2
_SHARDS = 4
_WARM_UP = 3
_MLP = workloads.FedAvgSetting('mlp', (28, 28, 1), 1000, 50, 32)


def _named_clients() -> list[Any]:
  """A thousand clients with 50 images each, by name."""
  corpus = synthetic.load(
      num_classes=10, examples_per_class=5000, image_size=28
  )
  dataset = federated_dataset.FederatedDataset.from_corpus(
      corpus, partitioners.PARTITIONERS['iid'], _MLP.num_clients, seed=0
  )
  return [dataset.named_client_data(k) for k in dataset.client_ids()]


def _by_value(setting: workloads.FedAvgSetting) -> list[Any]:
  clients = workloads.examples(
      setting.num_clients, setting.num_examples, setting.shape
  )
  return workloads.client_data(clients)


def measure(repeats: int) -> None:
  """Prints CPU milliseconds and bytes of a round, and ratios.

  Args:
    repeats: How many rounds of each count.
  """
  pool = ray_pool.RayPool(ray_pool.Options(workers=_WORKERS))
  lenet = workloads.FED_AVG['fed_avg_lenet']
  print(f'distributed: {_WORKERS} workers, {_SHARDS} shards, CPU of a round')
  for name, setting, data in (
      ('LeNet, 10 x 300, by value', lenet, _by_value(lenet)),
      ('MLP, 1,000 x 50, by value', _MLP, _by_value(_MLP)),
      ('MLP, 1,000 x 50, by name', _MLP, _named_clients()),
  ):
    _, process = workloads.build_fed_avg(setting)
    contexts = {
        'one process': in_process.InProcessContext(),
        'one process, in shards': in_process.InProcessContext(
            num_shards=_SHARDS
        ),
        'over workers': in_process.InProcessContext(
            num_shards=_SHARDS, pool=pool
        ),
    }
    rounds = {
        context_name: workloads.rounds_in(context, process, data)
        for context_name, context in contexts.items()
    }
    model = process.get_model_weights(process.initialize()).trainable
    num_bytes = sum(leaf.nbytes for leaf in tree.flatten(model))
    _compare(name, rounds, pool, repeats, num_bytes, len(data))
  pool.close()


def _compare(name, rounds, pool, repeats, model_bytes, num_clients) -> None:
  """Prints what the rounds of a workload take, done in turn."""
  for one_round in rounds.values():
    for _ in range(_WARM_UP):
      one_round()
  taken: dict[str, list[tuple[float, float]]] = {name: [] for name in rounds}
  down = up = 0.0
  for _ in range(repeats):
    for way, one_round in rounds.items():
      pool.statistics()
      taken[way].append(_cpu_seconds(one_round, pool))
      counted = pool.statistics()
      down = counted.get('bytes_down', down)
      up = counted.get('bytes_up', up)
  first = [sum(pair) for pair in taken['one process']]
  print(f'  {name}; a model of {model_bytes / 1e6:.3f} MB')
  for way, pairs in taken.items():
    here, there = (
        1e3 * statistics.median(one) for one in zip(*pairs, strict=True)
    )
    ratio = statistics.median(
        sum(pair) / other for pair, other in zip(pairs, first, strict=True)
    )
    print(
        f'    {way:24}{here:9.0f} ms here{there:9.0f} ms in workers'
        f'{ratio:7.2f} x one process',
        flush=True,
    )
  print(
      f'    bytes of a round: {down / 1e6:.3f} MB down, which is the model and'
      f' {(down - model_bytes) / num_clients:.0f} bytes a client;'
      f' {up / 1e6:.3f} MB up, {up / model_bytes:.2f} x the model'
  )


def _cpu_seconds(
    one_round: Callable[[], Any], pool: ray_pool.RayPool
) -> tuple[float, float]:
  """CPU seconds of a round, of this process and of the workers."""

  def workers():
    times = [psutil.Process(pid).cpu_times() for pid in pool.processes()]
    return sum(one.user + one.system for one in times)

  here, there = time.process_time(), workers()
  one_round()
  return time.process_time() - here, workers() - there
