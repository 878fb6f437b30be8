"""The loop over clients that a trace of a computation has.

`Schedule` says what loops compute, `Evaluator` gives the values of nodes in the
graph that is being traced, and `ClientLoop` (or `BatchLoop`, for clients that
are computed together) traces the loop. `round_function` makes one function of a
whole computation of them, `round_parts` one of what a shard of clients does.

What a client brings are its *records*: scalar variants that hold tensors of any
shapes. The trace asks for records as it comes upon them, so a data set that
only needs to be made dense is not even opened in the loop.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.execution import computation_graph as graph_lib
from tff_meta.execution import nodes
from tff_meta.execution import structures
from tff_meta.execution import tensorflow_block
from tff_meta.execution import vectorization

_CPU = '/device:CPU:0'
# Clients' nodes whose values need not be kept from one loop to the next.
_ALWAYS_THERE = nodes.Argument, nodes.Symbol


@dataclasses.dataclass(frozen=True)
class RecordRequest:
  """What the loop wants of every client.

  Attributes:
    argument: Number of the argument at clients.
    leaf: Number of the argument's leaf, a sequence; None for all its tensors
      together.
    reader: What to read of the sequence; None for its variant.
  """

  argument: int
  leaf: int | None = None
  reader: tensorflow_block.DenseReader | None = None


class Schedule:
  """What the loops of every level compute.

  Attributes:
    num_levels: Number of levels.
    aggregations: By level, those that its loop accumulates.
    kept: By level, the clients' nodes whose values are wanted later.
    kept_lists: Lists of those values, by node and device, as they are made.
  """

  def __init__(self, results: list[nodes.Node]):
    found = ancestors(results)
    aggregations = [n for n in found if isinstance(n, nodes.Aggregation)]
    self.num_levels = 1 + max((node.level for node in found), default=0)
    levels = range(self.num_levels)
    self.aggregations = [
        [a for a in aggregations if a.level == level + 1] for level in levels
    ]
    self.kept: list[list[nodes.Node]] = [[] for _ in levels]
    self.kept_lists: dict[nodes.Node, Any] = {}
    for node in results:
      self._keep(node)
    for level in reversed(levels):
      for target in self.targets(level):
        self._keep_what_it_needs(target, level)

  def targets(self, level):
    """The clients' nodes that the loop of a level computes."""
    accumulated = [
        node
        for aggregation in self.aggregations[level]
        for node in nodes.nodes_in(aggregation.accumulated)
    ]
    return accumulated + self.kept[level]

  def _keep(self, node):
    if not node.at_clients or node in self.kept[node.level]:
      return
    self.kept[node.level].append(node)

  def _keep_what_it_needs(self, node, level):
    for parent in node.inputs:
      if not parent.at_clients or isinstance(parent, _ALWAYS_THERE):
        continue
      if parent.level < level and not _has_symbol(parent):
        self._keep(parent)
      else:
        self._keep_what_it_needs(parent, level)


class Evaluator:
  """Values of nodes in one graph that is being traced; an `Evaluate`."""

  def __init__(
      self,
      values: dict[nodes.Node, Any],
      parent: 'Evaluator | None' = None,
      owns: Callable[[nodes.Node], bool] = lambda node: True,
  ):
    """Starts with some values.

    Args:
      values: Known ones.
      parent: Of the graph around this one; None for the outermost.
      owns: Whether a node belongs to this graph; other ones the parent has.
    """
    self._graph = tf.compat.v1.get_default_graph()
    self._values = dict(values)
    self._parent = parent
    self._owns = owns

  def __call__(self, node):
    """See `nodes.Evaluate`."""
    if node not in self._values:
      if self._parent is not None and not self._owns(node):
        return self._parent(node)
      # A loop may ask first for what belongs to the graph around it.
      with self._graph.as_default():
        self._values[node] = node.compute(self)
    return self._values[node]

  def define(self, node, value):
    """Adds a value."""
    self._values[node] = value

  def given(self, values):
    """See `Evaluate`: nodes that need the values belong to the new graph."""
    return Evaluator(values, self, _DependsOn(values))


class _DependsOn:
  """Whether a node is computed from any of some symbols."""

  def __init__(self, symbols):
    self._known = dict.fromkeys(symbols, True)

  def __call__(self, node) -> bool:
    if node not in self._known:
      self._known[node] = any(self(parent) for parent in node.inputs)
    return self._known[node]


class ClientLoop:
  """The loop over the clients of one device."""

  def __init__(self, requests, schedule, server, records, device_num, bounds):
    self._requests = requests
    self._schedule = schedule
    self._server = server
    self._records = records
    self._device_num = device_num
    self._first, self._end = bounds

  def run(self, aggregations, kept, parallel_clients):
    """Traces the loop.

    Args:
      aggregations: What to accumulate.
      kept: Nodes whose values to keep.
      parallel_clients: The loop's parallel iterations.

    Returns:
      The accumulated structures, and for every kept node the lists of its
      leaves.
    """
    zeros = [
        leaf_tensors(nodes.substitute(aggregation.zero, self._server))
        for aggregation in aggregations
    ]
    shapes = [
        [spec.shape for spec in structures.flat_specs(a.type_signature)]
        for a in aggregations
    ]
    num_clients = self._end - self._first
    lists = [
        [
            tf.raw_ops.TensorListReserve(
                element_shape=tf.constant(-1),
                num_elements=num_clients,
                element_dtype=spec.dtype,
            )
            for spec in structures.flat_specs(node.type_signature)
        ]
        for node in kept
    ]

    def loop(first, end, step, totals, lists, parallel_iterations=1):
      scalars = tf.nest.map_structure(lambda _: tf.TensorShape([]), lists)
      _, totals, lists = tf.while_loop(
          lambda i, *_: i < end,
          step,
          (first, totals, lists),
          (tf.TensorShape([]), shapes, scalars),
          parallel_iterations=parallel_iterations,
      )
      return totals, lists

    totals, lists = loop(
        self._first,
        self._end,
        self._step(aggregations, kept, loop),
        zeros,
        lists,
        parallel_clients,
    )
    totals = [
        structures.pack(aggregation.type_signature, iter(total))
        for aggregation, total in zip(aggregations, totals, strict=True)
    ]
    return totals, lists

  def _step(self, aggregations, kept, loop):
    """Returns the loop's body; `loop` makes another one inside."""
    del loop

    def step(i, totals, lists):
      client = self._client(i, aggregations, totals)
      return i + 1, *self._add(i, client, aggregations, kept, lists)

    return step

  def _add(self, i, client, aggregations, kept, lists):
    """What is accumulated and kept, with that of client i."""
    totals = [
        leaf_tensors(nodes.substitute(aggregation.accumulated, client))
        for aggregation in aggregations
    ]
    lists = [
        [
            tf.raw_ops.TensorListSetItem(
                input_handle=handle, index=i - self._first, item=item
            )
            for handle, item in zip(
                handles, leaf_tensors(client(node)), strict=True
            )
        ]
        for node, handles in zip(kept, lists, strict=True)
    ]
    return totals, lists

  def _client(self, i, aggregations, totals):
    """The evaluator of client i."""
    values = _accumulators(aggregations, totals)
    for node, handles in self._schedule.kept_lists.items():
      specs = structures.flat_specs(node.type_signature)
      items = [
          tf.raw_ops.TensorListGetItem(
              input_handle=handle,
              index=i - self._first,
              element_shape=_element_shape(spec),
              element_dtype=spec.dtype,
          )
          for handle, spec in zip(handles[self._device_num], specs, strict=True)
      ]
      values[node] = structures.pack(node.type_signature, iter(items))
    return _ClientEvaluator(values, self._server, self._fetch, i)

  def _fetch(self, request: RecordRequest, i):
    """Client i's record of what is requested."""
    if request not in self._requests:
      self._requests.append(request)
    with tf.device(_CPU):
      return self._records[i, self._requests.index(request)]


class BatchLoop(ClientLoop):
  """The loop over the batches of one device."""

  def __init__(self, *args):
    super().__init__(*args[:-1])
    self._batches = args[-1]

  def _step(self, aggregations, kept, loop):
    wanted = _before_accumulation(aggregations, kept)

    def step(position, totals, lists):
      size = self._batches[position, 1]
      members = self._batches[position : position + size, 0]
      columns = self._compute(wanted, members, size)

      def add(row, totals, lists):
        values = _accumulators(aggregations, totals)
        for node, leaves in zip(wanted, columns, strict=True):
          values[node] = structures.pack(
              node.type_signature, iter([leaf[row] for leaf in leaves])
          )
        client = Evaluator(values, self._server, lambda node: node.at_clients)
        i = members[row]
        return row + 1, *self._add(i, client, aggregations, kept, lists)

      return position + size, *loop(0, size, add, totals, lists)

    return step

  def _compute(self, wanted, members, size):
    """Returns the leaves of nodes, each with those of all members stacked."""
    many = vectorization.Many(size)
    around = tf.compat.v1.get_default_graph()

    def read(request, specs):
      def one(i):
        return _get_value(self._fetch(request, i), specs)

      with around.as_default(), tf.device(_CPU):
        columns = tf.map_fn(one, members, fn_output_signature=specs)
      return [many.argument(column) for column in columns]

    values = {}
    for node, handles in self._schedule.kept_lists.items():
      specs = structures.flat_specs(node.type_signature)
      leaves = [
          many.argument(
              tf.raw_ops.TensorListGather(
                  input_handle=handle,
                  indices=members - self._first,
                  element_shape=_element_shape(spec),
                  element_dtype=spec.dtype,
              )
          )
          for handle, spec in zip(handles[self._device_num], specs, strict=True)
      ]
      values[node] = structures.pack(node.type_signature, iter(leaves))
    with many.graph.as_default():
      client = _BatchEvaluator(values, self._server, read)
      leaves = [leaf_tensors(client(node)) for node in wanted]
    try:
      results = many.results(tf.nest.flatten(leaves))
    except vectorization.CannotVectorizeError as error:
      raise _no_batches(str(error)) from error
    return tf.nest.pack_sequence_as(leaves, results)


def make_loop(
    requests: list[RecordRequest],
    schedule: Schedule,
    server: Evaluator,
    records: tf.Tensor,
    device_num: int,
    bounds: tuple[Any, Any],
    batches: tf.Tensor | None,
) -> ClientLoop:
  """Returns the loop over the clients, or the batches of them, of one device.

  Args:
    requests: The records that the loop takes of every client; it adds those
      that are missing.
    schedule: What loops compute.
    server: Values of the server's nodes.
    records: Variants [number of clients, number of requests].
    device_num: The device's number.
    bounds: Its first client, and the one after its last.
    batches: From `client_batches.batches`; None for one client at a time.
  """
  args = requests, schedule, server, records, device_num, bounds
  return ClientLoop(*args) if batches is None else BatchLoop(*args, batches)


def _before_accumulation(aggregations, kept):
  """The clients' nodes on which what is accumulated and kept depends directly.

  Args:
    aggregations: What is accumulated.
    kept: Nodes that are kept.

  Returns:
    The last nodes that do not depend on what is accumulated so far.
  """
  depends = _DependsOn(
      [aggregation.accumulator for aggregation in aggregations]
  )
  waiting = list(kept)
  for aggregation in aggregations:
    waiting += nodes.nodes_in(aggregation.accumulated)
  found: dict[nodes.Node, None] = {}
  seen = set()
  while waiting:
    node = waiting.pop(0)
    if not node.at_clients or node in seen:
      continue
    seen.add(node)
    if depends(node):
      waiting += node.inputs
    else:
      found[node] = None
  return list(found)


def _no_batches(reason):
  return graph_lib.UnsupportedComputationError(
      'Expected a computation whose clients can be computed together, found'
      f' one where they cannot: {reason} Tip: --batched_clients=1.'
  )


def _accumulators(aggregations, totals):
  """What is accumulated so far, by the nodes that stand for it."""
  return {
      aggregation.accumulator: structures.pack(
          aggregation.type_signature, iter(total)
      )
      for aggregation, total in zip(aggregations, totals, strict=True)
  }


def _get_value(record, specs):
  """The tensors in a record."""
  return tf.raw_ops.OptionalGetValue(
      optional=record,
      output_types=[spec.dtype for spec in specs],
      output_shapes=[spec.shape for spec in specs],
  )


class _ClientEvaluator(Evaluator):
  """Values of one client's nodes, in the loop's body."""

  def __init__(self, values, server, fetch, i):
    super().__init__(values, server, lambda node: node.at_clients)
    self._fetch = fetch
    self._i = i
    self._sequences = {}

  def __call__(self, node):
    if isinstance(node, nodes.Argument) and node.at_clients:
      if node not in self._values:
        self._values[node] = self._argument(node)
    return super().__call__(node)

  def _argument(self, node):
    """The value of an argument; its sequences are fetched when used."""
    types = structures.leaf_types(node.type_signature)
    is_sequence = [isinstance(leaf, tff.SequenceType) for leaf in types]
    specs = structures.tensor_specs(node.type_signature)
    tensors = iter(())
    if specs:
      tensors = iter(self._open(RecordRequest(node.index), specs))
    leaves = [
        _ClientSequence(self, node.index, number) if is_one else next(tensors)
        for number, is_one in enumerate(is_sequence)
    ]
    return structures.pack(node.type_signature, iter(leaves))

  def _open(self, request, specs):
    """The tensors in a record."""
    with tf.device(_CPU):
      return _get_value(self._fetch(request, self._i), specs)

  def sequence(self, argument, leaf, reader):
    """A client's data set: its variant, or what a reader reads of it."""
    request = RecordRequest(argument, leaf, reader)
    if request not in self._sequences:
      if reader is None:
        self._sequences[request] = self._fetch(request, self._i)
      else:
        self._sequences[request] = self._open(request, reader.specs)
    return self._sequences[request]


class _BatchEvaluator(_ClientEvaluator):
  """Values of the nodes of any client of a batch, in the graph of one."""

  def __init__(self, values, server, read):
    super().__init__(values, server, None, None)
    self._read = read

  def _open(self, request, specs):
    return self._read(request, specs)

  def sequence(self, argument, leaf, reader):
    if reader is None:
      raise _no_batches('they read data sets.')
    return super().sequence(argument, leaf, reader)


class _ClientSequence(tensorflow_block.Sequence):
  """A client's data set, of which only what is used is fetched."""

  def __init__(self, client: _ClientEvaluator, argument: int, leaf: int):
    super().__init__(None)
    self._client = client
    self._argument = argument
    self._leaf = leaf

  @property
  def variant(self):
    return self._client.sequence(self._argument, self._leaf, None)

  def read(self, reader):
    return self._client.sequence(self._argument, self._leaf, reader)


def ancestors(starts):
  """Returns nodes and all that they are computed from."""
  found: dict[nodes.Node, None] = {}
  waiting = list(starts)
  while waiting:
    node = waiting.pop()
    if node not in found:
      found[node] = None
      waiting.extend(node.inputs)
  return list(found)


def _has_symbol(node) -> bool:
  return any(isinstance(n, nodes.Symbol) for n in ancestors([node]))


def leaf_tensors(value) -> list[tf.Tensor]:
  """The leaves of a structure; of sequences the variants."""
  return [
      leaf.variant if isinstance(leaf, tensorflow_block.Sequence) else leaf
      for leaf in structures.flatten(value)
  ]


def _element_shape(spec: tf.TensorSpec) -> tf.Tensor:
  """The shape of a list's elements, -1 where it is not known."""
  if spec.shape.rank is None:
    return tf.constant(-1)
  dims = [-1 if dim is None else dim for dim in spec.shape]
  return tf.constant(dims, tf.int32, [len(dims)])


def join(parts, type_signature) -> list[tf.Tensor]:
  """Joins the lists of all devices, leaf by leaf."""
  joined = []
  for spec, handles in zip(
      structures.flat_specs(type_signature),
      zip(*parts, strict=True),
      strict=True,
  ):
    if spec.shape.is_fully_defined():
      stacked = [
          tf.raw_ops.TensorListStack(
              input_handle=handle,
              element_shape=_element_shape(spec),
              element_dtype=spec.dtype,
          )
          for handle in handles
      ]
      joined.append(tf.concat(stacked, 0))
      continue
    whole = handles[0]
    for handle in handles[1:]:
      whole = tf.raw_ops.TensorListConcatLists(
          input_a=whole, input_b=handle, element_dtype=spec.dtype
      )
    joined.append(whole)
  return joined
