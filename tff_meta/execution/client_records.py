"""What clients bring to a round, and what is kept of it for the next.

A record is a scalar variant: a data set, or an `Optional` that holds tensors of
any shapes. What is read of a data set is kept as long as the data set object
lives and the memory budget lasts. It is kept only if it cannot change: data
sets made of tensors by pure operations are read once, those that shuffle, draw
random numbers, call Python or read files are read anew in every round.
"""

import collections
import dataclasses
import itertools
import threading
from typing import Any
import weakref

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.execution import computation_graph as graph_lib
from tff_meta.execution import tensorflow_block

# Operations of data sets whose elements are functions of tensors that the data
# set holds. Functions of `map` and the like are looked at.
_FIXED_DATASETS = frozenset(
    [
        'BatchDataset',
        'BatchDatasetV2',
        'ConcatenateDataset',
        'Const',
        'EnumerateDataset',
        'FilterDataset',
        'FiniteTakeDataset',
        'Identity',
        'MapAndBatchDataset',
        'MapDataset',
        'ModelDataset',
        'OptionsDataset',
        'PaddedBatchDatasetV2',
        'ParallelBatchDataset',
        'ParallelMapDatasetV2',
        'PrefetchDataset',
        'RangeDataset',
        'RepeatDataset',
        'SkipDataset',
        'TakeDataset',
        'TensorDataset',
        'TensorSliceDataset',
        'UnbatchDataset',
        'ZipDataset',
        '_Retval',
    ]
)


@dataclasses.dataclass
class _Known:
  """What is known of a data set: types that fit it, and whether it is fixed."""

  forget: weakref.ref
  types: set[tff.Type]
  is_fixed: bool | None = None


class ClientRecords:
  """Makes the records of cohorts, and keeps what need not be read again.

  May be used by several threads at the same time.
  """

  def __init__(self, budget_bytes: int):
    """Starts with nothing kept.

    Args:
      budget_bytes: The most that is kept of all data sets together; what was
        not used for longest goes first.
    """
    self._budget_bytes = budget_bytes
    self._used_bytes = 0
    # By data set and reader, least recently used first.
    self._kept = collections.OrderedDict()
    # By data set. Reentrant: garbage collection may call `_forget` any time.
    self._known = {}
    self._lock = threading.RLock()

  @property
  def kept_bytes(self) -> int:
    """Size of what is kept now."""
    return self._used_bytes

  def matrix(
      self,
      requests: list,
      arguments: list[list[Any]],
      types: list[tff.Type],
      num_clients: int,
  ) -> tf.Tensor:
    """Returns the records of a cohort.

    Args:
      requests: `RecordRequest`s.
      arguments: For every argument at clients, the values of the clients.
      types: The types of one client's values.
      num_clients: Number of clients.

    Returns:
      Variants [num_clients, number of requests], at least one column.
    """
    leaf_types = [list(graph_lib.leaf_types(kind)) for kind in types]
    records = []
    for i in range(num_clients):
      leaves = [
          list(argument_leaves(argument[i], kind))
          for argument, kind in zip(arguments, types, strict=True)
      ]
      for request in requests:
        values = leaves[request.argument]
        kinds = leaf_types[request.argument]
        if request.leaf is None:
          records.append(_tensors_record(values, kinds))
        else:
          kind = kinds[request.leaf]
          dataset = to_dataset(values[request.leaf], kind)
          records.append(self._sequence_record(dataset, kind, request.reader))
    with tf.device('/device:CPU:0'):
      nothing = [tf.raw_ops.OptionalNone()] if not requests else []
      records.extend(nothing * num_clients)
      packed = tf.raw_ops.Pack(values=records or nothing, axis=0)
      return tf.reshape(packed, [-1, len(requests) or 1])[:num_clients]

  def _sequence_record(self, dataset, type_signature, reader):
    """A data set's record: its variant, or an `Optional` of what is read."""
    key = id(dataset), reader
    with self._lock:
      if key in self._kept:
        self._kept.move_to_end(key)
        return self._kept[key][0]
      is_fixed = self._look_at(dataset, type_signature)
    if reader is not None:
      tensors = reader(dataset)
      record = _to_record(tensors)
    elif is_fixed:
      dataset, tensors = _materialize(dataset)
      record = tf.data.experimental.to_variant(dataset)
    else:
      return tf.data.experimental.to_variant(dataset)
    if is_fixed:
      self._keep(key, record, sum(_num_bytes(tensor) for tensor in tensors))
    return record

  def _look_at(self, dataset, type_signature) -> bool:
    """Whether to keep what is read; checks the type of a new data set.

    A data set is looked into when it comes for the second time: many come once.
    """
    key = id(dataset)
    known = self._known.get(key)
    if known is None or type_signature not in known.types:
      found = tff.types.tensorflow_to_type(dataset.element_spec)
      if not type_signature.is_assignable_from(tff.SequenceType(found)):
        raise TypeError(
            f'Expected a data set of type {type_signature}, found elements of'
            f' type {found}.'
        )
    if known is None:
      forget = weakref.ref(dataset, lambda _: self._forget(key))
      self._known[key] = _Known(forget, {type_signature})
      return False
    known.types.add(type_signature)
    if known.is_fixed is None:
      known.is_fixed = is_fixed(dataset)
    return known.is_fixed

  def _keep(self, key, record, num_bytes):
    with self._lock:
      if key in self._kept or num_bytes > self._budget_bytes:
        return
      self._kept[key] = record, num_bytes
      self._used_bytes += num_bytes
      while self._used_bytes > self._budget_bytes:
        _, (_, freed) = self._kept.popitem(last=False)
        self._used_bytes -= freed

  def _forget(self, dataset_id):
    """Drops what is kept of a data set that is gone."""
    with self._lock:
      self._known.pop(dataset_id, None)
      for key in [key for key in self._kept if key[0] == dataset_id]:
        self._used_bytes -= self._kept.pop(key)[1]


def is_fixed(dataset: tf.data.Dataset) -> bool:
  """Whether a data set has the same elements whenever it is read.

  Args:
    dataset: Any.

  Returns:
    True only if it is known: it is made of tensors by pure operations.
  """
  fail_on_state = 2
  try:
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=fail_on_state,
    )
  except tf.errors.OpError:
    return False
  graph_def = tf.compat.v1.GraphDef.FromString(serialized.numpy())
  library = {f.signature.name: f for f in graph_def.library.function}
  return all(
      node.op in _FIXED_DATASETS
      and all(
          tensorflow_block.is_pure(name, None, library)
          for name in tensorflow_block.called_functions(node)
      )
      for node in graph_def.node
  )


def argument_leaves(value: Any, type_signature: tff.Type):
  """Yields the leaves of an argument, in the order of its type.

  Args:
    value: A structure of any containers.
    type_signature: Its type, without placement.

  Yields:
    Tensors and sequences, as they are.

  Raises:
    TypeError: If the structure is not that of the type.
  """
  if not isinstance(type_signature, tff.StructType):
    yield value
    return
  for part, kind in elements(value, type_signature):
    yield from argument_leaves(part, kind)


def elements(value: Any, type_signature: tff.StructType):
  """Returns the elements of a structure with their types.

  Args:
    value: Any container.
    type_signature: Its type.

  Returns:
    Pairs, in the order of the type.

  Raises:
    TypeError: If the structure is not that of the type.
  """
  kinds = tff.structure.to_elements(type_signature)
  names = [name for name, _ in kinds]
  if isinstance(value, collections.abc.Mapping):
    if set(value) != set(names):
      raise TypeError(f'Expected the fields {names}, found {list(value)}.')
    parts = [value[name] for name in names]
  else:
    if not isinstance(value, tff.structure.Struct):
      value = tff.structure.from_container(value)
    parts = [part for _, part in tff.structure.iter_elements(value)]
  if len(parts) != len(kinds):
    raise TypeError(
        f'Expected a structure of {len(kinds)} for the type {type_signature},'
        f' found one of {len(parts)}.'
    )
  return [(part, kind) for part, (_, kind) in zip(parts, kinds, strict=True)]


def to_tensor(value: Any, type_signature: tff.TensorType) -> tf.Tensor:
  """Converts a value to a tensor of a type.

  Raises:
    TypeError: If it is of another shape or dtype.
  """
  dtype = tf.as_dtype(type_signature.dtype)
  if not isinstance(value, tf.Tensor):
    array = np.asarray(value)
    is_python = isinstance(
        value, bool | int | float | complex | str | bytes | list
    )
    if is_python or array.dtype.kind in 'OSU':
      value = tf.constant(value, dtype)
    else:
      value = tf.constant(array)
  shape = tf.TensorShape(type_signature.shape)
  if value.dtype != dtype or not shape.is_compatible_with(value.shape):
    raise TypeError(
        f'Expected a value of type {type_signature}, found'
        f' {value.dtype.name}{value.shape}.'
    )
  return value


def to_dataset(value: Any, type_signature: tff.SequenceType) -> tf.data.Dataset:
  """Returns a data set as it is, and a list of elements as a data set."""
  if isinstance(value, tf.data.Dataset):
    return value
  if not isinstance(value, list | tuple):
    raise TypeError(
        f'Expected a data set or a list of elements for {type_signature}, found'
        f' {type(value).__name__}.'
    )
  kind = type_signature.element
  kinds = list(graph_lib.leaf_types(kind))
  elements = [
      graph_lib.element_structure(
          kind, map(to_tensor, argument_leaves(element, kind), kinds)
      )
      for element in value
  ]
  if not elements:
    empty = [
        tf.zeros([0 if dim is None else dim for dim in leaf.shape], leaf.dtype)
        for leaf in kinds
    ]
    nothing = graph_lib.element_structure(kind, iter(empty))
    return tf.data.Dataset.from_tensors(nothing).take(0)
  return _concatenate(elements)


def _concatenate(elements: list[Any]) -> tf.data.Dataset:
  """A data set of elements, in which those of one shape lie together."""
  by_shape = itertools.groupby(
      elements, lambda element: [t.shape for t in tf.nest.flatten(element)]
  )
  parts = [
      tf.data.Dataset.from_tensor_slices(
          tf.nest.map_structure(lambda *tensors: tf.stack(tensors), *group)
      )
      for _, group in by_shape
  ]
  while len(parts) > 1:  # In pairs: a long chain overflows TensorFlow's stack.
    pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
    parts = [
        pair[0] if len(pair) == 1 else pair[0].concatenate(pair[1])
        for pair in pairs
    ]
  return parts[0]


def _materialize(dataset):
  """Reads a data set; returns one of the elements, and their tensors."""
  elements = list(dataset)
  if not elements:
    return dataset, []
  return _concatenate(elements), tf.nest.flatten(elements)


def _tensors_record(values, kinds):
  """The tensors of an argument as a record."""
  return _to_record(
      [
          to_tensor(value, kind)
          for value, kind in zip(values, kinds, strict=True)
          if not isinstance(kind, tff.SequenceType)
      ]
  )


def _to_record(tensors):
  with tf.device('/device:CPU:0'):
    return tf.raw_ops.OptionalFromValue(components=tensors)


def _num_bytes(tensor) -> int:
  return tensor.shape.num_elements() * max(tensor.dtype.size or 0, 1)
