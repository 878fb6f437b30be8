"""Rounds whose clients are dealt in shards, to whoever computes them.

A cohort of n clients is dealt to K shards: shard d has the clients from
`n * d // K` up to `n * (d + 1) // K`, in the cohort's order. Each is
accumulated from zero, and totals are merged in pairs of neighbours, then in
pairs of pairs. So a result depends on the cohort and K alone, never on who
computes which shard or which is done first.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
import itertools
import threading
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.execution import client_batches
from tff_meta.execution import client_records
from tff_meta.execution import computation_graph as graph_lib
from tff_meta.execution import round_parts
from tff_meta.execution import structures


class Outcome(NamedTuple):
  """What a shard results in.

  Attributes:
    total: Tensors, or arrays, of what is accumulated.
    kept: By leaf of the clients' results, a list of one array a client.
  """

  total: list[Any]
  kept: list[list[Any]]


Merge = Callable[[list[Any], list[Any]], list[Any]]


class Runner(Protocol):
  """Computes the shards of rounds of one computation."""

  def __call__(
      self,
      frontier: list[tf.Tensor],
      cohort: Sequence[list[list[Any]]],
      merge: Merge,
  ) -> Outcome:
    """Computes shards.

    Args:
      frontier: See `round_parts`.
      cohort: Of every shard, for every argument at clients, the values of the
        shard's clients, at least one.
      merge: See `collected`; who computes shards may merge totals, too.

    Returns:
      The outcome of all of them.
    """


class Pool(Protocol):
  """Whoever computes shards."""

  def prepare(
      self,
      computation: tff.Computation,
      graph: graph_lib.ComputationGraph,
      total_bytes: int,
  ) -> Runner:
    """Returns what computes the shards of a computation.

    Args:
      computation: The computation.
      graph: The same, followed.
      total_bytes: Size of what is accumulated.
    """


class ShardFunction:
  """The clients' part of a computation, on one device of this process."""

  def __init__(
      self,
      graph: graph_lib.ComputationGraph,
      device: str,
      parallel_clients: int,
      batched_clients: int,
      records: client_records.ClientRecords,
  ):
    """Traces it.

    Args:
      graph: The computation.
      device: The device's name.
      parallel_clients: How many clients may run at the same time.
      batched_clients: How many may be computed together.
      records: What is kept of clients' data.
    """
    self._device = device
    self._batched_clients = batched_clients
    self._records = records
    self._parts = round_parts.RoundParts(
        graph, parallel_clients, batched_clients > 1
    )
    self._types = client_types(graph)
    self._turn = threading.Lock()
    with tf.device(device):
      self._parts.trace_clients()

  def merge(self, total: list[Any], other: list[Any]) -> list[tf.Tensor]:
    """Merges the totals of two shards, or of neighbours."""
    with tf.device(self._device):
      return self._parts.merge(total, other)

  def __call__(
      self, frontier: list[tf.Tensor], values: list[list[Any]], first: int
  ) -> Outcome:
    """Computes a shard.

    Args:
      frontier: See `round_parts`.
      values: For every argument at clients, the values of its clients.
      first: The first one's number in the cohort, for messages.
    """
    num_clients = len(values[0])
    requests = self._parts.requests
    records = self._records.matrix(
        requests, values, self._types, num_clients, first
    )
    batches = None
    if self._batched_clients > 1:
      batches = client_batches.batches(
          requests, records, self._types, self._batched_clients, 1
      )
    with tf.device(self._device), client_batches.in_turn(self._turn, batches):
      total, kept = self._parts.clients(frontier, records, batches)
    kinds = [
        leaf
        for kind in self._parts.kept_types
        for leaf in structures.leaf_types(kind)
    ]
    return Outcome(
        total,
        [
            client_records.column(leaf, kind, num_clients)
            for leaf, kind in zip(kept, kinds, strict=True)
        ],
    )


class LocalPool:
  """Computes shards in this process, one after the other on each device."""

  def __init__(
      self,
      devices: Sequence[str],
      parallel_clients: int,
      batched_clients: int,
      records: client_records.ClientRecords,
  ):
    """Takes the devices; see `ShardFunction`."""
    self._devices = devices
    self._options = parallel_clients, batched_clients, records

  def prepare(self, computation, graph, total_bytes):
    """See `Pool`."""
    del computation, total_bytes
    functions = [
        ShardFunction(graph, device, *self._options) for device in self._devices
    ]

    def outcomes(frontier, cohort):
      firsts = [0, *itertools.accumulate(len(values[0]) for values in cohort)]
      if len(functions) == 1:
        for values, first in zip(cohort, firsts, strict=False):
          yield functions[0](frontier, values, first)
        return
      threads = [futures.ThreadPoolExecutor(1) for _ in functions]
      waiting = [
          threads[i % len(threads)].submit(
              functions[i % len(functions)], frontier, values, firsts[i]
          )
          for i, values in enumerate(cohort)
      ]
      try:
        for outcome in waiting:
          yield outcome.result()
      finally:
        for thread in threads:
          thread.shutdown(cancel_futures=True)

    def run(frontier, cohort, merge):
      return collected(outcomes(frontier, cohort), merge)

    return run


class ShardedComputation:
  """A computation whose clients are dealt in shards."""

  def __init__(
      self,
      computation: tff.Computation,
      graph: graph_lib.ComputationGraph,
      pool: Pool,
      num_shards: int,
  ):
    """Cuts the computation.

    Args:
      computation: The computation.
      graph: The same, followed; with an argument at clients.
      pool: Who computes shards.
      num_shards: How many there are; of fewer clients some have none.

    Raises:
      UnsupportedComputationError: If it cannot be cut.
    """
    self._parts = round_parts.RoundParts(graph, 1)
    self._num_shards = num_shards
    self._run = pool.prepare(computation, graph, self._parts.total_bytes)

  def __call__(
      self,
      server_leaves: list[tf.Tensor],
      client_values: list[list[Any]],
      num_clients: int,
  ) -> list[Any]:
    """Computes.

    Args:
      server_leaves: As for `RoundFunction`.
      client_values: For every argument at clients, the values of the clients.
      num_clients: How many there are, at least 1.

    Returns:
      The leaves of the result, those of clients as lists with one array a
      client.
    """
    carried = self._parts.broadcast(server_leaves)
    cohort = [
        [values[first:end] for values in client_values]
        for first, end in bounds(num_clients, self._num_shards)
    ]
    total, kept = self._run(carried.frontier, cohort, self._parts.merge)
    finished = self._parts.finish(server_leaves, carried, total)
    return self._parts.results(finished, kept)


def bounds(num_clients: int, num_shards: int) -> list[tuple[int, int]]:
  """Returns the first client of every shard that has any, and that after it."""
  cuts = [num_clients * d // num_shards for d in range(num_shards + 1)]
  pairs = zip(cuts[:-1], cuts[1:], strict=True)
  return [(first, end) for first, end in pairs if first < end]


def collected(outcomes: Iterable[Outcome], merge: Merge) -> Outcome:
  """Merges neighbours, then neighbours of these, until one is left.

  Args:
    outcomes: Of shards, in order, at least one.
    merge: `(total, that of later shards) -> total`.

  Returns:
    The merged total, and what clients keep in the cohort's order.
  """
  waiting: list[tuple[int, Any]] = []  # How many shards, and their total.
  kept = []
  for total, of_shard in outcomes:
    kept.append(of_shard)
    size = 1
    while waiting and waiting[-1][0] == size:
      total = merge(waiting.pop()[1], total)
      size *= 2
    waiting.append((size, total))
  _, total = waiting.pop()
  while waiting:
    total = merge(waiting.pop()[1], total)
  columns = zip(*kept, strict=True)
  return Outcome(total, [list(itertools.chain(*parts)) for parts in columns])


def client_types(graph: graph_lib.ComputationGraph) -> list[tff.Type]:
  """The types of one client's values, by argument at clients."""
  return [
      argument.type_signature
      for argument in graph.arguments
      if argument.at_clients
  ]
