"""What a process that computes for another one does; it knows no Ray.

It is sent computations once, and then shards of clients with what the server
sends them; or graphs of tests, and then calls of them.
"""

from collections.abc import Callable, Sequence
import os
import socket
import time
from typing import Any, NamedTuple

import cachetools
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.proto.v0 import computation_pb2

from tff_meta import installation
from tff_meta import machine
from tff_meta.data import federated_dataset
from tff_meta.execution import client_records
from tff_meta.execution import computation_graph as graph_lib
from tff_meta.execution import in_process
from tff_meta.execution import portable_values
from tff_meta.execution import shards
from tff_meta.execution import structures


class Settings(NamedTuple):
  """How a worker computes.

  Attributes:
    on_gpu: Whether on a GPU, rather than the CPU.
    parallel_clients: Clients that are computed at the same time.
    batched_clients: Clients that are computed together.
  """

  on_gpu: bool
  parallel_clients: int
  batched_clients: int


class Graph(NamedTuple):
  """A traced function, to be called elsewhere.

  Attributes:
    graph_def: Serialized `GraphDef`.
    inputs: Names of the tensors of its inputs.
    outputs: Of its outputs.
  """

  graph_def: bytes
  inputs: list[str]
  outputs: list[str]


class Shard(NamedTuple):
  """The clients of a shard.

  Attributes:
    leaves: For every argument at clients, for every client, the leaves of its
      value: arrays, `Elements`, `ByName` or `ByReference`.
    first: The first one's number in the cohort.
  """

  leaves: list[list[list[Any]]]
  first: int


class ShardResult(NamedTuple):
  """What a shard results in, beside its total.

  Attributes:
    kept: See `shards.Outcome`.
    num_bytes: Size of the total.
    seconds: What it took, by the clock.
  """

  kept: list[list[np.ndarray]]
  num_bytes: int
  seconds: float


def describe(device: str) -> dict[str, str]:
  """Returns what of a process the last bits of its results depend on.

  Args:
    device: What it computes on.
  """
  return {
      'instructions': ' '.join(machine.instructions()),
      **installation.versions(),
      **{name: str(value) for name, value in machine.environment().items()},
      'device': device,
  }


def kind_of_device(on_gpu: bool) -> str:
  """Returns what a GPU of this process is called, or CPU."""
  if not on_gpu:
    return 'CPU'
  gpu, *_ = tf.config.list_physical_devices('GPU')
  details = tf.config.experimental.get_device_details(gpu)
  return str(details.get('device_name', 'GPU'))


class Worker:
  """Computes shards and calls, one at a time."""

  def __init__(self, settings: Settings, fetch: Callable[[Any], Any]):
    """Chooses the device.

    Args:
      settings: How to compute.
      fetch: Reference of a `portable_values.ByReference` -> its `Elements`.

    Raises:
      ValueError: If there is no GPU where one is needed.
    """
    self._settings = settings
    self._fetch = fetch
    device, *_ = in_process.use_device('gpu' if settings.on_gpu else 'cpu')
    self._device = device
    # Others have the other cores. There are three caches: this one, that of
    # data sets by value, and that of a `FederatedDataset`.
    machine.take_share(min(1.0, settings.parallel_clients / machine.CORES) / 3)
    self._records = client_records.ClientRecords(machine.cache_bytes())
    self._opened = cachetools.LRUCache(
        machine.cache_bytes(), lambda opened: opened[1]
    )
    # Whatever asks TFF for a context here shall not start TFF's own worker.
    tff.framework.set_default_context(in_process.InProcessContext([device]))
    self._computations: _Kept = _Kept(self._trace)
    self._graphs: _Kept = _Kept(_import)
    self._sources: _Kept = _Kept(lambda source: source)

  def describe(self) -> dict[str, str]:
    """Returns `describe` of this process, its host's name and its number."""
    found = describe(kind_of_device(self._settings.on_gpu))
    return found | {'host': socket.gethostname(), 'pid': str(os.getpid())}

  def add_computation(self, name: str, serialized: bytes) -> None:
    """Takes a computation, to be traced when it is used."""
    self._computations.add(name, serialized)

  def add_graph(self, name: str, graph: Graph) -> None:
    """Takes a function, to be imported when it is called."""
    self._graphs.add(name, graph)

  def add_source(
      self, name: str, source: federated_dataset.FederatedDataset
  ) -> None:
    """Takes a data set, whose clients are then given by name."""
    self._sources.add(name, source)

  def forget(self, names: Sequence[str]) -> None:
    """Drops what was given."""
    for kept in (self._computations, self._graphs, self._sources):
      for name in names:
        kept.drop(name)

  def compute_shard(
      self,
      computation: str,
      frontier: Sequence[np.ndarray],
      shard: Shard,
      *after: Any,
  ) -> tuple[ShardResult, list[np.ndarray]]:
    """Computes a shard.

    Args:
      computation: Name of the computation.
      frontier: See `round_parts`.
      shard: Its clients.
      *after: What had to be done before.

    Returns:
      Its result and, apart from it, its total.
    """
    del after
    started = time.monotonic()
    function, types = self._computations.get(computation)
    values = [
        [structures.pack(kind, map(self._open, leaves)) for leaves in clients]
        for kind, clients in zip(types, shard.leaves, strict=True)
    ]
    given = [tf.constant(leaf) for leaf in frontier]
    outcome = function(given, values, shard.first)
    total = [np.asarray(leaf) for leaf in outcome.total]
    num_bytes = sum(array.nbytes for array in total)
    seconds = time.monotonic() - started
    return ShardResult(outcome.kept, num_bytes, seconds), total

  def merge(
      self,
      computation: str,
      total: Sequence[np.ndarray],
      other: Sequence[np.ndarray],
      *after: Any,
  ) -> tuple[None, list[np.ndarray]]:
    """Merges the totals of shards that are neighbours.

    Args:
      computation: Name of the computation.
      total: Of the earlier ones.
      other: Of the later ones.
      *after: What had to be done before.

    Returns:
      Nothing and, apart from it, the total.
    """
    del after
    function, _ = self._computations.get(computation)
    merged = function.merge(
        *(list(map(tf.constant, t)) for t in (total, other))
    )
    return None, [np.asarray(leaf) for leaf in merged]

  def call(
      self,
      graph: str,
      shared: Sequence[np.ndarray],
      inputs: Sequence[Any],
      *after: Any,
  ) -> tuple[None, list[np.ndarray]]:
    """Calls a function that was given.

    Args:
      graph: Its name.
      shared: Its first inputs.
      inputs: The others.
      *after: What had to be done before.

    Returns:
      Nothing and, apart from it, the outputs.
    """
    del after
    function = self._graphs.get(graph)
    with tf.device(self._device):
      outputs = function(*map(tf.constant, [*shared, *inputs]))
    return None, [np.asarray(output) for output in outputs]

  def _trace(self, serialized):
    proto = computation_pb2.Computation.FromString(serialized)
    computation = tff.framework.deserialize_computation(proto)
    graph = graph_lib.ComputationGraph(computation)
    function = shards.ShardFunction(
        graph,
        self._device,
        self._settings.parallel_clients,
        self._settings.batched_clients,
        self._records,
    )
    return function, shards.client_types(graph)

  def _open(self, leaf):
    if isinstance(leaf, portable_values.ByName):
      source = self._sources.get(leaf.source)
      return source.tff_client_data(leaf.client_id, leaf.part)[leaf.field]
    if isinstance(leaf, portable_values.Elements):
      return leaf.open()
    if isinstance(leaf, portable_values.ByReference):
      if leaf.name not in self._opened:
        elements = self._fetch(leaf.reference)
        if elements.num_bytes > self._opened.maxsize:
          return elements.open()
        self._opened[leaf.name] = elements.open(), elements.num_bytes
      return self._opened[leaf.name][0]
    return leaf


class _Kept:
  """What was sent under a name, made ready when it is used first."""

  def __init__(self, prepare: Callable[[Any], Any]):
    self._prepare = prepare
    self._sent: dict[str, Any] = {}
    self._ready: dict[str, Any] = {}

  def add(self, name, sent):
    self._sent[name] = sent

  def drop(self, name):
    self._sent.pop(name, None)
    self._ready.pop(name, None)

  def get(self, name):
    if name not in self._ready:
      self._ready[name] = self._prepare(self._sent[name])
    return self._ready[name]


def _import(graph: Graph):
  """Returns a function of a graph's inputs."""
  graph_def = tf.compat.v1.GraphDef.FromString(graph.graph_def)
  with tf.Graph().as_default() as imported:
    tf.graph_util.import_graph_def(graph_def, name='')
  specs = [
      tf.TensorSpec.from_tensor(imported.get_tensor_by_name(name))
      for name in graph.inputs
  ]

  def call(*inputs):
    return tf.graph_util.import_graph_def(
        graph_def,
        dict(zip(graph.inputs, inputs, strict=True)),
        graph.outputs,
        name='',
    )

  return tf.compat.v1.wrap_function(call, specs)
