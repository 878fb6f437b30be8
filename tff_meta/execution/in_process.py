"""Runs TFF computations with this process's TensorFlow.

TFF's own runtime is a separate process without a GPU, to which the data of
every client are sent again in every round. Here a computation becomes one
TensorFlow function (`round_function`), traced when it is first called, to which
clients' data sets are handed as they are.

Rounds may be called from several threads at the same time, with cohorts of any
sizes; the context keeps nothing of a round but what it has read of data sets
that cannot change.
"""

import asyncio
import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import threading
from typing import Any
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import machine
from tff_meta.execution import client_batches
from tff_meta.execution import client_records
from tff_meta.execution import computation_graph as graph_lib
from tff_meta.execution import round_function
from tff_meta.execution import shards
from tff_meta.execution import structures
from tff_meta.execution import tensorflow_block


class InProcessContext(tff.framework.SyncContext):
  """A synchronous context on one or more devices of this process."""

  def __init__(
      self,
      devices: Sequence[str] = ('/CPU:0',),
      *,
      parallel_clients: int = machine.PARALLEL,
      batched_clients: int = 1,
      kept_bytes: int | None = None,
      num_shards: int = 1,
      pool: shards.Pool | None = None,
  ):
    """Makes a context; nothing is compiled yet.

    Args:
      devices: Names of the devices over which clients are dealt, as `'/GPU:0'`.
      parallel_clients: How many clients of a device may be trained at the same
        time, at least 1; by default as many as there are cores, 2 to 16. The
        result does not depend on it.
      batched_clients: How many clients of a device may be computed together, as
        a batch, at least 1. Only clients that are alike are (see
        `client_batches`), the others alone. Where it is more than 1, sums are
        taken in another order: results agree to rounding. Batches follow each
        other, whatever `parallel_clients` says.
      kept_bytes: The most memory for what is read of clients' data sets and
        kept for later rounds; None for a quarter of the machine's.
      num_shards: To how many shards a cohort is dealt, see `shards`; 1 for a
        whole cohort at once, dealt over the devices. Results depend on it, to
        rounding.
      pool: Who computes the shards; None for this process.

    Raises:
      ValueError: If a number is out of range or there is no such device.
    """
    if kept_bytes is None:
      kept_bytes = machine.cache_bytes()
    at_least_one = min(parallel_clients, batched_clients, num_shards)
    if not devices or at_least_one < 1 or kept_bytes < 0:
      raise ValueError(
          'Expected `devices`, at least 1 of `parallel_clients`,'
          ' `batched_clients` and `num_shards`, and at least 0 `kept_bytes`,'
          f' found {devices}, {parallel_clients}, {batched_clients},'
          f' {num_shards}, {kept_bytes}.'
      )
    known = {device.name for device in tf.config.list_logical_devices()}
    full_names = [
        '/device:' + name.removeprefix('/').removeprefix('device:')
        for name in devices
    ]
    if isinstance(devices, str) or not known.issuperset(full_names):
      raise ValueError(
          f'Expected `devices` among {sorted(known)}, found {devices!r}.'
      )
    self._devices = list(devices)
    self._records = client_records.ClientRecords(kept_bytes)
    self._options = parallel_clients, batched_clients, self._records
    self._num_shards = num_shards
    self._pool = pool
    if pool is None and num_shards > 1:
      self._pool = shards.LocalPool(self._devices, *self._options)
    self._compiled: dict[int, _Slot] = {}
    self._lock = threading.Lock()

  @property
  def num_shards(self) -> int:
    """To how many shards a cohort is dealt."""
    return self._num_shards

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """Runs a computation; called by TFF.

    Args:
      comp: The computation.
      arg: Its argument, None without one.

    Returns:
      The result, in the Python containers that the computation's type names.

    Raises:
      UnsupportedComputationError: If it cannot run here; nothing has run then.
      TypeError, ValueError: If the argument does not fit, or clients that were
        to be computed together are not alike.
    """
    return self._compile(comp)(arg)

  def _compile(self, computation):
    """Returns the compiled computation, which lives as long as it does."""
    key = id(computation)
    with self._lock:
      if key not in self._compiled:
        # Garbage collection may end a computation while this thread holds the
        # lock, so this must not take it; `pop` is atomic.
        ends = weakref.ref(computation, lambda _: self._compiled.pop(key, None))
        self._compiled[key] = _Slot(ends, threading.Lock())
      slot = self._compiled[key]
    with slot.lock:  # Others may compile, and this one wait.
      if slot.compiled is None:
        compute = self._computes(computation)
        slot.compiled = _CompiledComputation(computation, compute)
      return slot.compiled

  def _computes(self, computation):
    """Returns what computes the leaves of a computation's result."""
    graph = graph_lib.ComputationGraph(computation)
    if self._pool is not None and shards.client_types(graph):
      return shards.ShardedComputation(
          computation, graph, self._pool, self._num_shards
      )
    return _WholeComputation(graph, self._devices, *self._options)


@dataclasses.dataclass
class _Slot:
  """A computation's place among the compiled ones."""

  ends: weakref.ref
  lock: threading.Lock
  compiled: '_CompiledComputation | None' = None


class AsyncInProcessContext(tff.framework.AsyncContext):
  """The same for coroutines: calls run in threads."""

  def __init__(self, context: InProcessContext):
    """Wraps a context."""
    self._context = context

  async def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """See `InProcessContext.invoke`; `arg` may be a coroutine."""
    if asyncio.iscoroutine(arg):
      arg = await arg
    return await asyncio.to_thread(self._context.invoke, comp, arg)


class _WholeComputation:
  """A computation as one function, its clients on all devices."""

  def __init__(
      self, graph, devices, parallel_clients, batched_clients, records
  ):
    self._num_devices = len(devices)
    self._batched_clients = batched_clients
    self._turn = threading.Lock()
    self._records = records
    self._client_types = shards.client_types(graph)
    self._function = round_function.RoundFunction(
        graph, devices, parallel_clients, in_batches=batched_clients > 1
    )

  def __call__(self, server_leaves, client_values, num_clients):
    requests = self._function.requests
    records = self._records.matrix(
        requests, client_values, self._client_types, num_clients
    )
    batches = None
    if self._batched_clients > 1:
      batches = client_batches.batches(
          requests,
          records,
          self._client_types,
          self._batched_clients,
          self._num_devices,
      )
    with client_batches.in_turn(self._turn, batches):
      return self._function(server_leaves, records, batches)


class _CompiledComputation:
  """A computation, ready to be called with Python values."""

  def __init__(self, computation, compute):
    self._type = computation.type_signature
    self._read = _reader(self._type.result)
    self._compute = compute

  def __call__(self, argument):
    server_leaves: list[Any] = []
    client_values: list[list[Any]] = []
    if self._type.parameter is not None:
      self._split(argument, self._type.parameter, server_leaves, client_values)
    num_clients = self._num_clients(client_values)
    leaves = self._compute(server_leaves, client_values, num_clients)
    return self._read(iter(leaves), num_clients)

  def _split(self, value, kind, server_leaves, client_values):
    """Sorts an argument into the server's leaves and the clients' values."""
    if isinstance(kind, tff.FederatedType) and not kind.all_equal:
      if not isinstance(value, list | tuple):
        raise TypeError(
            f'Expected a list of values, one a client, for {kind}, found'
            f' {type(value).__name__}.'
        )
      client_values.append(list(value))
    elif isinstance(kind, tff.StructType):
      for part, element in client_records.elements(value, kind):
        self._split(part, element, server_leaves, client_values)
    else:
      member = kind.member if isinstance(kind, tff.FederatedType) else kind
      leaves = client_records.argument_leaves(value, member)
      for leaf, leaf_type in zip(
          leaves, structures.leaf_types(member), strict=True
      ):
        server_leaves.append(_to_server_leaf(leaf, leaf_type))

  def _num_clients(self, client_values) -> int:
    """The size of the cohort; 0 for a computation that takes no clients."""
    sizes = {len(values) for values in client_values}
    if len(sizes) > 1 or 0 in sizes:
      raise ValueError(
          'Expected as many values for every argument at clients, and at least'
          f' one, found {[len(values) for values in client_values]}.'
      )
    return sizes.pop() if sizes else 0


def set_in_process_context(
    devices: Sequence[str] = ('/CPU:0',),
    batched_clients: int = 1,
    num_shards: int = 1,
) -> None:
  """Makes TFF run computations in this process.

  Args:
    devices: Over which clients are dealt, see `use_device`.
    batched_clients: See `InProcessContext`.
    num_shards: See `InProcessContext`.

  Raises:
    ValueError: If TensorFlow has no such device, or a number is out of range.
  """
  context = InProcessContext(
      devices, batched_clients=batched_clients, num_shards=num_shards
  )
  tff.framework.set_default_context(context)


def use_device(device: str, mixed_precision: bool = False) -> list[str]:
  """Chooses the devices of this process, before TensorFlow computes anything.

  Args:
    device: `'cpu'`, which hides GPUs from TensorFlow; `'gpu'`, all that there
      are; or `'auto'`, GPUs if there are any.
    mixed_precision: Whether TensorFlow may compute in float16 on GPUs where it
      holds that safe.

  Returns:
    Names of at least one device.

  Raises:
    ValueError: If there is no GPU where one is needed, or no such device.
  """
  if device not in ('auto', 'cpu', 'gpu'):
    raise ValueError(
        f"Expected `device` to be 'auto', 'cpu' or 'gpu', found {device!r}."
    )
  gpus = tf.config.list_physical_devices('GPU')
  if not gpus and (device == 'gpu' or mixed_precision):
    raise ValueError(
        "Expected a GPU for `device` 'gpu' or `mixed_precision`, found none"
        ' that TensorFlow can use. Tip: install requirements-gpu.txt (of the'
        ' repository, or the source distribution), and see what `nvidia-smi`'
        ' lists.'
    )
  if device == 'cpu' and gpus:
    tf.config.set_visible_devices([], 'GPU')
    gpus = []
  if mixed_precision:
    tf.config.optimizer.set_experimental_options({'auto_mixed_precision': True})
  return [f'/GPU:{i}' for i in range(len(gpus))] or ['/CPU:0']


def _to_server_leaf(value, type_signature):
  """A leaf as a tensor; of a sequence the variant."""
  if isinstance(type_signature, tff.SequenceType):
    dataset = client_records.to_dataset(value, type_signature)
    client_records.check_type(dataset, type_signature)
    return tf.data.experimental.to_variant(dataset)
  return client_records.to_tensor(value, type_signature)


def _reader(type_signature) -> Callable[[Iterator[Any], int], Any]:
  """Returns what makes the Python value of a type.

  What a type is takes long to ask, so it is asked once, not in every round.

  Args:
    type_signature: The type.

  Returns:
    `(leaves, num_clients) -> value`, NumPy arrays in the type's containers.
  """
  if isinstance(type_signature, tff.FederatedType):
    read = _reader(type_signature.member)
    if type_signature.all_equal:
      return read
    kinds = structures.leaf_types(type_signature.member)

    def read_clients(leaves, num_clients):
      columns = [
          client_records.column(next(leaves), kind, num_clients)
          for kind in kinds
      ]
      return [
          read(iter(row), num_clients) for row in zip(*columns, strict=True)
      ]

    return read_clients
  if isinstance(type_signature, tff.StructType):
    names = [name for name, _ in structures.elements_of(type_signature)]
    readers = [
        _reader(element)
        for _, element in structures.elements_of(type_signature)
    ]
    pack = _packer(type_signature.python_container, names)
    return lambda leaves, num_clients: pack(
        [read(leaves, num_clients) for read in readers]
    )
  if isinstance(type_signature, tff.SequenceType):
    element = type_signature.element
    return lambda leaves, _: structures.to_dataset(
        tensorflow_block.Sequence(next(leaves)), element
    )
  # For the others `numpy` gives NumPy's scalars, and Python's bytes.
  is_string = tf.as_dtype(type_signature.dtype) == tf.string
  is_array = bool(type_signature.shape) and not is_string
  to_python = client_records.to_array if is_array else _numpy

  def read_leaf(leaves, _):
    leaf = next(leaves)
    # One of a client's column is NumPy's already.
    return to_python(leaf) if isinstance(leaf, tf.Tensor) else leaf

  return read_leaf


def _numpy(tensor):
  return tensor.numpy()


def _packer(container, names) -> Callable[[list[Any]], Any]:
  """Returns what puts values with these names, or None, into a container."""
  has_names = any(name is not None for name in names)
  if container is None:
    container = collections.OrderedDict if has_names else tuple
  if container is tff.structure.Struct:
    return lambda values: container(zip(names, values, strict=True))
  if not has_names:
    return container
  if issubclass(container, dict):
    return lambda values: container(zip(names, values, strict=True))
  # Named tuples and attrs classes.
  return lambda values: container(**dict(zip(names, values, strict=True)))
