"""One TensorFlow function for a whole TFF computation, such as a round.

The server's part is traced as it is, the clients' as a loop over the cohort
whose length is an argument: a cohort of another size needs no new trace. An
iteration takes one client from its data to its contribution to every aggregate.
So clients of any sizes follow each other without padding, only as many as run
at the same time are in memory, and sums are taken in the order of the cohort,
which makes them the same bits in every run.

Or, where that is wanted, an iteration takes a batch of clients that are alike
and makes one graph of what they compute (`vectorization`); sums are then taken
batch by batch, and a whole batch is in memory.

The loop itself is in `client_loops`.
"""

from collections.abc import Sequence

import tensorflow as tf

from tff_meta.execution import client_loops
from tff_meta.execution import computation_graph as graph_lib
from tff_meta.execution import nodes
from tff_meta.execution import structures


class RoundFunction:
  """A computation as a TensorFlow function.

  Attributes:
    requests: The records that it takes of every client, in order.
  """

  def __init__(
      self,
      graph: graph_lib.ComputationGraph,
      devices: Sequence[str],
      parallel_clients: int,
      in_batches: bool = False,
  ):
    """Traces the function.

    Args:
      graph: The computation.
      devices: Names of the devices that clients are dealt over.
      parallel_clients: How many clients of a device may run at the same time.
      in_batches: Whether clients are computed in batches.

    Raises:
      UnsupportedComputationError: If they cannot be computed in batches.
    """
    self.requests: list[client_loops.RecordRequest] = []
    self._graph = graph
    self._devices = devices
    self._parallel_clients = parallel_clients
    self._in_batches = in_batches
    self._server_arguments = [a for a in graph.arguments if not a.at_clients]
    specs = [
        spec
        for argument in self._server_arguments
        for spec in structures.flat_specs(argument.type_signature)
    ]
    specs.append(tf.TensorSpec([None, None], tf.variant))
    if in_batches:
      specs.append(tf.TensorSpec([None, 2], tf.int32))
    self._function = tf.compat.v1.wrap_function(self._trace, specs)

  def __call__(
      self,
      server_leaves: list[tf.Tensor],
      records: tf.Tensor,
      batches: tf.Tensor | None = None,
  ) -> list[tf.Tensor]:
    """Computes.

    Args:
      server_leaves: The leaves of the arguments that are not at clients; of
        sequences the variants.
      records: Variants [number of clients, number of requests].
      batches: Where clients are computed in batches, see
        `client_batches.batches`.

    Returns:
      The leaves of the result. Those of clients are stacked along a leading
      axis or, where their shape is not fully known, in a variant that is a list
      of tensors.
    """
    batches = [batches] if self._in_batches else []
    return self._function(*server_leaves, records, *batches)

  # The rest runs while the function is traced.

  def _trace(self, *inputs):
    if self._in_batches:
      *server_leaves, records, batches = inputs
    else:
      *server_leaves, records = inputs
      batches = None
    leaves = iter(server_leaves)
    server = client_loops.Evaluator(
        {
            argument: structures.pack(argument.type_signature, leaves)
            for argument in self._server_arguments
        }
    )
    results = nodes.nodes_in(self._graph.result)
    schedule = client_loops.Schedule(results)
    for level in range(schedule.num_levels):
      self._run_clients(level, schedule, server, records, batches)
    outputs = []
    for node in results:
      if node.at_clients:
        outputs.extend(
            client_loops.join(schedule.kept_lists[node], node.type_signature)
        )
      else:
        outputs.extend(client_loops.leaf_tensors(server(node)))
    return outputs

  def _run_clients(self, level, schedule, server, records, batches):
    """Traces the loops of a level, one a device, and what they result in."""
    aggregations = schedule.aggregations[level]
    kept = schedule.kept[level]
    if not aggregations and not kept:
      return
    num_clients = tf.shape(records)[0]
    num_devices = len(self._devices)
    totals, lists = [], []
    for d, device in enumerate(self._devices):
      bounds = (
          num_clients * d // num_devices,
          num_clients * (d + 1) // num_devices,
      )
      with tf.device(device):
        loop = client_loops.make_loop(
            self.requests, schedule, server, records, d, bounds, batches
        )
        # TensorFlow's kernel of oneDNN's batch normalisation keeps the number
        # of channels, so it does not bear batches of several sizes at a time.
        parallel = 1 if self._in_batches else self._parallel_clients
        total, new_lists = loop.run(aggregations, kept, parallel)
      totals.append(total)
      lists.append(new_lists)
    for aggregation, parts in zip(
        aggregations, zip(*totals, strict=True), strict=True
    ):
      value = parts[0]
      for part in parts[1:]:
        given = server.given(
            dict(zip(aggregation.merging, (value, part), strict=True))
        )
        value = nodes.substitute(aggregation.merged, given)
      server.define(aggregation, value)
    for node, parts in zip(kept, zip(*lists, strict=True), strict=True):
      schedule.kept_lists[node] = parts
