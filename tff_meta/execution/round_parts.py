"""A TFF computation cut at its aggregation, for clients in shards.

Shards of clients are computed apart from each other and from the server:

    frontier = broadcast(server's arguments)
    total, kept = clients(frontier, a shard's records)    # for every shard
    total = merge(total, another shard's total)           # in shard order
    result = finish(server's arguments, frontier, total)

What crosses the cut towards the clients, the *frontier*, are the values of the
server's nodes that clients' nodes or the zero of an aggregation are computed
from. Constants stay where they are used.

All four are traced from the same serialized computation wherever they run, and
each is the same code as the whole computation has (`client_loops`), so that a
result depends on the cohort and on how it is cut into shards alone.
"""

from collections.abc import Iterable, Sequence
import functools
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.execution import client_loops
from tff_meta.execution import computation_graph as graph_lib
from tff_meta.execution import nodes
from tff_meta.execution import structures


class Carried(NamedTuple):
  """What `broadcast` gives.

  Attributes:
    frontier: Leaves of what clients are sent.
    drawn: Leaves of what the server drew to compute it, for `finish` alone.
  """

  frontier: list[tf.Tensor]
  drawn: list[tf.Tensor]


class Partial(NamedTuple):
  """What a shard results in.

  Attributes:
    total: Leaves of what is accumulated over its clients.
    kept: Leaves of the clients' results, see `RoundFunction.__call__`.
  """

  total: list[tf.Tensor]
  kept: list[tf.Tensor]


class RoundParts:
  """The functions that a computation is cut into, each traced when it is used.

  Attributes:
    requests: The records that `clients` takes of every client, in order; known
      once it was traced, see `trace_clients`.
    frontier_types: Types of the values that cross the cut towards clients.
    kept_types: Types of the clients' results, in the order of `Partial.kept`.
    total_bytes: Size of what is accumulated, as far as shapes are known.
  """

  def __init__(
      self,
      graph: graph_lib.ComputationGraph,
      parallel_clients: int,
      in_batches: bool = False,
  ):
    """Finds the cut.

    Args:
      graph: The computation, with an argument at clients.
      parallel_clients: How many clients may run at the same time.
      in_batches: Whether clients are computed in batches.

    Raises:
      UnsupportedComputationError: If it cannot be cut: clients take part more
        than once, or data sets cross the cut.
    """
    self.requests: list[client_loops.RecordRequest] = []
    self._results = nodes.nodes_in(graph.result)
    self._parallel_clients = 1 if in_batches else parallel_clients
    self._in_batches = in_batches
    self._server_arguments = [a for a in graph.arguments if not a.at_clients]
    schedule = client_loops.Schedule(self._results)
    if any(schedule.aggregations[1:]) or any(schedule.kept[1:]):
      raise graph_lib.UnsupportedComputationError(
          'Expected a computation whose clients take part once, to deal them in'
          ' shards, found one where they use aggregates of the same round. Tip:'
          ' --execution=in_process --shards=1.'
      )
    self._schedule = schedule
    self._aggregations = schedule.aggregations[0]
    self._kept = schedule.kept[0]
    self._frontier = self._find_frontier()
    self._drawn = self._find_drawn()
    for aggregation in self._aggregations:
      for node in client_loops.ancestors(nodes.nodes_in(aggregation.merged)):
        if isinstance(node, nodes.Argument):
          raise graph_lib.UnsupportedComputationError(
              'Expected totals of shards to be merged by themselves, found a'
              f' merge that uses an argument, {node.type_signature}. Tip:'
              ' --execution=in_process --shards=1.'
          )
    self.frontier_types = [node.type_signature for node in self._frontier]
    self.kept_types = [node.type_signature for node in self._kept]
    self.total_bytes = sum(
        spec.shape.num_elements() * spec.dtype.size
        for spec in _specs(self._aggregations)
        if spec.shape.is_fully_defined() and spec.dtype != tf.string
    )
    for kind in self.frontier_types + self.kept_types:
      leaves = structures.leaf_types(kind)
      if any(isinstance(leaf, tff.SequenceType) for leaf in leaves):
        raise graph_lib.UnsupportedComputationError(
            'Expected a computation where no data sets go to clients or come'
            f' from them, to deal them in shards, found {kind}. Tip:'
            ' --execution=in_process --shards=1.'
        )

  def _find_frontier(self) -> list[nodes.Node]:
    """The server's nodes that the clients' work is computed from."""
    waiting = self._schedule.targets(0)
    for aggregation in self._aggregations:
      waiting += nodes.nodes_in(aggregation.zero)
    found: dict[nodes.Node, None] = {}
    seen = set()
    while waiting:
      node = waiting.pop()
      if node in seen:
        continue
      seen.add(node)
      if node.at_clients:
        waiting += node.inputs
      elif not node.is_constant:
        found[node] = None
    return list(found)

  def _find_drawn(self) -> list[nodes.Node]:
    """What the frontier is computed from and a second time may differ."""
    waiting = list(self._frontier)
    found: dict[nodes.Node, None] = {}
    seen = set()
    while waiting:
      node = waiting.pop()
      if node in seen:
        continue
      seen.add(node)
      is_computed = isinstance(node, nodes.Call | nodes.Function)
      if is_computed and not node.is_pure and node not in self._frontier:
        found[node] = None
      if not isinstance(node, nodes.Function):  # Inside it has its own symbols.
        waiting += node.inputs
    return list(found)

  def broadcast(self, server_leaves: Sequence[tf.Tensor]) -> Carried:
    """Computes what is sent to clients.

    Args:
      server_leaves: As for `RoundFunction`.
    """
    leaves = self._broadcast(*server_leaves)
    num_sent = len(_specs(self._frontier))
    return Carried(leaves[:num_sent], leaves[num_sent:])

  def clients(
      self,
      frontier: Sequence[tf.Tensor],
      records: tf.Tensor,
      batches: tf.Tensor | None = None,
  ) -> Partial:
    """Computes the clients of a shard.

    Args:
      frontier: From `broadcast`.
      records: Variants [clients of the shard, number of requests].
      batches: Where clients are computed in batches, see
        `client_batches.batches`.
    """
    self.trace_clients()
    rest = () if batches is None else (batches,)
    leaves = self._clients(*frontier, records, *rest)
    num_accumulated = len(_specs(self._aggregations))
    return Partial(leaves[:num_accumulated], leaves[num_accumulated:])

  def trace_clients(self) -> None:
    """Makes sure that `requests` are known."""
    assert self._clients

  def merge(
      self, total: Sequence[tf.Tensor], other: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Adds the total of a later shard to that of earlier ones."""
    return self._merge(*total, *other)

  def finish(
      self,
      server_leaves: Sequence[tf.Tensor],
      carried: Carried,
      total: Sequence[tf.Tensor],
  ) -> list[tf.Tensor]:
    """Computes the server's results, in order."""
    return self._finish(
        *server_leaves, *carried.frontier, *carried.drawn, *total
    )

  def results(
      self, finished: Sequence[tf.Tensor], kept: Sequence[Any]
  ) -> list[Any]:
    """Puts the results of server and clients in the computation's order.

    Args:
      finished: From `finish`.
      kept: Of all shards together, a value for every tensor of `Partial.kept`.

    Returns:
      The leaves of the result, as `RoundFunction` has them.
    """
    remaining = iter(kept)
    of_clients = {
        node: [next(remaining) for _ in structures.leaf_types(kind)]
        for node, kind in zip(self._kept, self.kept_types, strict=True)
    }
    of_server = iter(finished)
    leaves: list[Any] = []
    for node in self._results:
      if node.at_clients:
        leaves += of_clients[node]
      else:
        num_leaves = len(structures.leaf_types(node.type_signature))
        leaves += [next(of_server) for _ in range(num_leaves)]
    return leaves

  @functools.cached_property
  def _broadcast(self):
    def trace(*leaves):
      server = client_loops.Evaluator(_given(self._server_arguments, leaves))
      return _leaves(server, self._frontier + self._drawn)

    return _wrap(trace, _specs(self._server_arguments))

  @functools.cached_property
  def _clients(self):
    specs = _specs(self._frontier)
    num_sent = len(specs)
    specs.append(tf.TensorSpec([None, None], tf.variant))
    if self._in_batches:
      specs.append(tf.TensorSpec([None, 2], tf.int32))

    def trace(*inputs):
      server = client_loops.Evaluator(_given(self._frontier, inputs[:num_sent]))
      records, *batches = inputs[num_sent:]
      loop = client_loops.make_loop(
          self.requests,
          self._schedule,
          server,
          records,
          0,
          (0, tf.shape(records)[0]),
          batches[0] if batches else None,
      )
      totals, lists = loop.run(
          self._aggregations, self._kept, self._parallel_clients
      )
      outputs = [
          leaf for total in totals for leaf in client_loops.leaf_tensors(total)
      ]
      for node, handles in zip(self._kept, lists, strict=True):
        outputs += client_loops.join([handles], node.type_signature)
      return outputs

    return _wrap(trace, specs)

  @functools.cached_property
  def _merge(self):
    specs = _specs(self._aggregations)

    def trace(*leaves):
      server = client_loops.Evaluator({})
      ours = _given(self._aggregations, leaves[: len(specs)])
      theirs = _given(self._aggregations, leaves[len(specs) :])
      outputs = []
      for aggregation in self._aggregations:
        pair = ours[aggregation], theirs[aggregation]
        given = server.given(dict(zip(aggregation.merging, pair, strict=True)))
        merged = nodes.substitute(aggregation.merged, given)
        outputs += client_loops.leaf_tensors(merged)
      return outputs

    return _wrap(trace, specs + specs)

  @functools.cached_property
  def _finish(self):
    known = (
        self._server_arguments
        + self._frontier
        + self._drawn
        + self._aggregations
    )

    def trace(*leaves):
      server = client_loops.Evaluator(_given(known, leaves))
      return _leaves(server, [n for n in self._results if not n.at_clients])

    return _wrap(trace, _specs(known))


def _wrap(trace, specs):
  return tf.compat.v1.wrap_function(trace, specs)


def _specs(found: Iterable[nodes.Node]) -> list[tf.TensorSpec]:
  """The specs of the leaves of nodes."""
  return [
      spec
      for node in found
      for spec in structures.flat_specs(node.type_signature)
  ]


def _given(found: Iterable[nodes.Node], leaves) -> dict[nodes.Node, Any]:
  """The values of nodes, whose leaves are given one after the other."""
  remaining = iter(leaves)
  return {
      node: structures.pack(node.type_signature, remaining) for node in found
  }


def _leaves(evaluate, found: Iterable[nodes.Node]) -> list[tf.Tensor]:
  return [
      leaf
      for node in found
      for leaf in client_loops.leaf_tensors(evaluate(node))
  ]
