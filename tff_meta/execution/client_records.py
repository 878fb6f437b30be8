"""What clients bring to a round, and what is kept of it for the next.

A record is a scalar variant: a data set, or an `Optional` that holds tensors of
any shapes. What is read of a data set is kept as long as the data set object
lives and the memory budget lasts. It is kept only if it cannot change: data
sets made of tensors by pure operations are read once, those that shuffle, draw
random numbers, call Python or read files are read anew in every round. To find
out takes as long as to copy the data several times; a data set that has an
attribute `only_element`, the structure of tensors that is its only element, is
taken at its word.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import threading
from typing import Any, NamedTuple
import weakref

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.data import federated_dataset
from tff_meta.execution import structures
from tff_meta.execution import tensorflow_block

# Nodes of a serialized data set beside those that are data sets.
_OTHER_NODES = frozenset(['Const', 'Identity', '_Retval'])
# The most elements, and shapes in a row, of a data set that is kept as tensors.
_MAX_ELEMENTS = 4096
_MAX_RUNS = 64
# The tensors that arrays are views of, by the id of the array, while it lives.
_VIEWED = {}
_MEMORY_TIP = (
    ' Tip: clients of this algorithm keep something between rounds, which'
    ' `training.loop.next_round` gives them.'
)


@dataclasses.dataclass
class _Known:
  """What is known of a data set.

  Attributes:
    forget: Ends what is known with the data set.
    types: Types that fit it.
    is_fixed: Whether it has the same elements whenever it is read; None where
      that has not been looked at.
    kept: Keys of what may be kept of it.
  """

  forget: weakref.ref
  types: set[tff.Type]
  is_fixed: bool | None = None
  kept: set[tuple[int, int]] = dataclasses.field(default_factory=set)


class _Kept(NamedTuple):
  """A record that is kept, until the reader that it is for is gone."""

  record: tf.Tensor
  num_bytes: int
  dies_with: weakref.ref | None


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
    self._kept: collections.OrderedDict[tuple[int, int], _Kept] = (
        collections.OrderedDict()
    )
    # By data set. Reentrant: garbage collection may call `_forget` any time.
    self._known: dict[int, _Known] = {}
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
      first: int = 0,
  ) -> tf.Tensor:
    """Returns the records of a cohort.

    Args:
      requests: `RecordRequest`s.
      arguments: For every argument at clients, the values of the clients.
      types: The types of one client's values.
      num_clients: Number of clients.
      first: The number of the first one, for messages.

    Returns:
      Variants [num_clients, number of requests], at least one column.
    """
    records = []
    for i in range(num_clients):
      leaves: list[list[Any]] = [[] for _ in arguments]
      for argument, (values, kind) in enumerate(
          zip(arguments, types, strict=True)
      ):
        try:
          leaves[argument] = list(argument_leaves(values[i], kind))
        except TypeError as error:
          raise TypeError(f'Client {first + i}: {error}') from error
      for request in requests:
        try:
          records.append(self._record(request, leaves[request.argument], types))
        except TypeError as error:
          raise TypeError(f'Client {first + i}: {error}') from error
    with tf.device('/device:CPU:0'):
      if not records:  # Something for every client, and for nobody.
        nothing = [tf.raw_ops.OptionalNone()] * (num_clients or 1)
        packed = tf.raw_ops.Pack(values=nothing, axis=0)
        return packed[:num_clients, tf.newaxis]
      packed = tf.raw_ops.Pack(values=records, axis=0)
      return tf.reshape(packed, _shape(num_clients, len(requests)))

  def _record(self, request, leaves, types):
    """The record of one client for a request."""
    kinds = structures.leaf_types(types[request.argument])
    if request.leaf is None:
      return _tensors_record(leaves, kinds)
    kind = kinds[request.leaf]
    dataset = to_dataset(leaves[request.leaf], kind)
    return self._sequence_record(dataset, kind, request.reader)

  def _sequence_record(self, dataset, type_signature, reader):
    """A data set's record: its variant, or an `Optional` of what is read."""
    key = id(dataset), id(reader)
    with self._lock:
      if key in self._kept:
        self._kept.move_to_end(key)
        return self._kept[key].record
      is_kept = self._look_at(dataset, type_signature)
    if reader is not None:
      tensors = reader(dataset)
      record = _to_record(tensors)
    else:
      tensors = []
      if is_kept:
        dataset, tensors = self._materialize(dataset)
      record = tf.data.experimental.to_variant(dataset)
    if is_kept:
      self._keep(key, record, sum(map(_num_bytes, tensors)), reader)
    return record

  def _look_at(self, dataset, type_signature) -> bool:
    """Whether to keep what is read; checks the type of a new data set.

    A data set is looked into, and kept, when it comes for the second time,
    since many come once.
    """
    key = id(dataset)
    known = self._known.get(key)
    if known is None or type_signature not in known.types:
      check_type(dataset, type_signature)
    if known is None:
      forget = weakref.ref(dataset, lambda _: self._forget(0, key))
      self._known[key] = _Known(forget, {type_signature})
      return False
    known.types.add(type_signature)
    if known.is_fixed is None:
      known.is_fixed = hasattr(dataset, 'only_element') or is_fixed(dataset)
    return known.is_fixed

  def _materialize(self, dataset):
    """Reads a data set; returns one of its elements, and their tensors.

    One with more than is worth keeping is returned as it is: what is kept then
    is only that.
    """
    elements, num_bytes, num_runs, shapes = [], 0, 0, None
    for element in dataset:
      tensors = tf.nest.flatten(element)
      num_bytes += sum(map(_num_bytes, tensors))
      num_runs += shapes != [tensor.shape for tensor in tensors]
      shapes = [tensor.shape for tensor in tensors]
      elements.append(element)
      if (
          num_bytes > self._budget_bytes
          or len(elements) > _MAX_ELEMENTS
          or num_runs > _MAX_RUNS
      ):
        return dataset, []
    if not elements:
      return dataset, []
    return concatenate(elements), tf.nest.flatten(elements)

  def _keep(self, key, record, num_bytes, reader):
    dies_with = reader and weakref.ref(
        reader, lambda _: self._forget(1, key[1])
    )
    with self._lock:
      if key in self._kept or num_bytes > self._budget_bytes:
        return
      self._kept[key] = _Kept(record, num_bytes, dies_with)
      self._known[key[0]].kept.add(key)
      self._used_bytes += num_bytes
      while self._used_bytes > self._budget_bytes:
        _, dropped = self._kept.popitem(last=False)
        self._used_bytes -= dropped.num_bytes

  def _forget(self, part, one_id):
    """Drops what is kept of a data set (part 0) or for a reader (1)."""
    with self._lock:
      if part == 0:
        keys = self._known.pop(one_id).kept & self._kept.keys()
      else:
        keys = {key for key in self._kept if key[1] == one_id}
      for key in keys:
        self._used_bytes -= self._kept.pop(key).num_bytes


def check_type(
    dataset: tf.data.Dataset, type_signature: tff.SequenceType
) -> None:
  """Checks that the elements of a data set are of a type.

  Args:
    dataset: Any.
    type_signature: The type.

  Raises:
    TypeError: If they are not.
  """
  _check_names(dataset.element_spec)
  found = tff.types.tensorflow_to_type(dataset.element_spec)
  if not type_signature.is_assignable_from(tff.SequenceType(found)):
    raise TypeError(
        f'Expected a data set of type {type_signature}, found elements of type'
        f' {found}.'
    )
  if hasattr(dataset, 'only_element'):
    _check_only_element(dataset)


def _check_only_element(dataset):
  """Raises a TypeError unless that is an element as the data set says."""
  spec, element = dataset.element_spec, dataset.only_element
  try:
    tf.nest.assert_same_structure(spec, element)
    fits = all(
        isinstance(part, tf.Tensor) and kind.is_compatible_with(part)
        for kind, part in zip(
            tf.nest.flatten(spec), tf.nest.flatten(element), strict=True
        )
    )
  except (TypeError, ValueError):
    fits = False
  if not fits:
    raise TypeError(
        f'Expected `only_element` of a data set to be tensors like {spec},'
        f' found {element!r:.200}.'
    )


def is_fixed(dataset: tf.data.Dataset) -> bool:
  """Whether a data set has the same elements whenever it is read.

  Args:
    dataset: Any.

  Returns:
    True only if it is known: it ends, and is made of tensors by pure
    operations.
  """
  if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
    return False
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
      node.op in tensorflow_block.FIXED_DATASETS | _OTHER_NODES
      and all(
          tensorflow_block.is_pure(name, None, library)
          for name in tensorflow_block.called_functions(node)
      )
      for node in graph_def.node
  )


@functools.lru_cache
def _shape(*dims: int) -> tf.Tensor:
  """A shape as a tensor, which takes long to make."""
  with tf.init_scope():
    return tf.constant(dims)


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
  kinds = structures.elements_of(type_signature)
  names, all_names = structures.names_of(type_signature)
  # TFF's ways to ask what a container is take long.
  parts: Sequence[Any]
  if isinstance(value, dict) or isinstance(value, collections.abc.Mapping):
    if value.keys() != all_names:
      lacks_memory = all_names - value.keys() == {'memory'}
      raise TypeError(
          f'Expected the fields {names}, found {list(value)}.'
          + (_MEMORY_TIP if lacks_memory else '')
      )
    parts = [value[name] for name in names]
  elif isinstance(value, tuple):
    parts = value
  else:
    if not isinstance(value, tff.structure.Struct):
      try:
        value = tff.structure.from_container(value)
      except TypeError:
        raise TypeError(
            f'Expected a structure with the fields {names}, found a'
            f' {type(value).__name__}.'
        ) from None
    parts = [part for _, part in tff.structure.iter_elements(value)]
  if len(parts) != len(kinds):
    raise TypeError(
        f'Expected a structure of {len(kinds)} for the type {type_signature},'
        f' found one of {len(parts)}.'
    )
  return [(part, kind) for part, (_, kind) in zip(parts, kinds, strict=True)]


def column(value: Any, kind: tff.Type, num_clients: int) -> list[Any]:
  """Takes a leaf of the clients' results apart.

  Args:
    value: As `RoundFunction` has it; or a list, which is returned as it is.
    kind: The leaf's type.
    num_clients: Number of clients.

  Returns:
    An array, or the variant of a data set, of every client.
  """
  if isinstance(value, list):
    return value
  if value.dtype != tf.variant:
    return list(value.numpy())
  if isinstance(kind, tff.SequenceType):
    return tf.unstack(value, num_clients)
  return [
      tf.raw_ops.TensorListGetItem(
          input_handle=value,
          index=i,
          element_shape=tf.constant(-1),
          element_dtype=tf.as_dtype(kind.dtype),
      ).numpy()
      for i in range(num_clients)
  ]


def to_array(tensor: tf.Tensor) -> np.ndarray:
  """Returns a tensor as an array that nobody can write to, without copying it.

  Args:
    tensor: Of any dtype but string.

  Returns:
    A view of it; `to_tensor` gives the tensor back, so that what goes into a
    round as it came out of another is never copied.
  """
  array = np.asarray(tensor)
  array.flags.writeable = False  # Of bfloat16 it would be.
  _VIEWED[id(array)] = tensor
  weakref.finalize(array, _VIEWED.pop, id(array)).atexit = False
  return array


def to_tensor(value: Any, type_signature: tff.TensorType) -> tf.Tensor:
  """Converts a value to a tensor of a type.

  Args:
    value: A tensor or array of the type's dtype; or Python numbers, which may
      have any that holds them.
    type_signature: The type.

  Returns:
    The tensor.

  Raises:
    TypeError: If the value is of another shape or dtype, or out of range.
  """
  dtype = tf.as_dtype(type_signature.dtype)
  found = _VIEWED.get(id(value), value)
  if not isinstance(found, tf.Tensor):
    array = np.asarray(value)
    if _holds(dtype, value, array):
      array = array.astype(dtype.as_numpy_dtype)
    found = tf.constant(array)
  shape = tf.TensorShape(type_signature.shape)
  if found.dtype != dtype or not shape.is_compatible_with(found.shape):
    raise TypeError(
        f'Expected a value of type {type_signature}, found'
        f' {found.dtype.name}{found.shape}: {value!r:.80}.'
    )
  return found


def _holds(dtype: tf.DType, value: Any, array: np.ndarray) -> bool:
  """Whether a dtype holds Python numbers, which have none of their own."""
  if isinstance(value, np.ndarray | np.generic):
    return False
  if dtype.is_integer and array.dtype.kind == 'i':
    return bool(np.all((array >= dtype.min) & (array <= dtype.max)))
  return dtype.is_floating and array.dtype.kind in 'if'


def to_dataset(value: Any, type_signature: tff.SequenceType) -> tf.data.Dataset:
  """Returns a data set as it is, and a list of elements as a data set.

  Args:
    value: A data set, perhaps by name; or a list of elements, structures of
      tensors or Python numbers.
    type_signature: The type, which only the elements of lists are checked for.

  Returns:
    A data set.

  Raises:
    TypeError: If the value is neither, or an element does not fit.
  """
  if isinstance(value, federated_dataset.NamedSequence):
    return value.open()
  if isinstance(value, tf.data.Dataset):
    return value
  if not isinstance(value, list | tuple):
    raise TypeError(
        f'Expected a data set or a list of elements for {type_signature}, found'
        f' {type(value).__name__}.'
    )
  kind = type_signature.element
  kinds = structures.leaf_types(kind)
  elements = [
      structures.element_structure(
          kind, map(to_tensor, argument_leaves(element, kind), kinds)
      )
      for element in value
  ]
  if not elements:
    empty = [
        tf.zeros([0 if dim is None else dim for dim in leaf.shape], leaf.dtype)
        for leaf in kinds
    ]
    nothing = structures.element_structure(kind, iter(empty))
    return tf.data.Dataset.from_tensors(nothing).take(0)
  return concatenate(elements)


def concatenate(elements: list[Any]) -> tf.data.Dataset:
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
  if tensor.dtype == tf.string:
    return int(np.sum(tf.strings.length(tensor), dtype=np.int64))
  return tensor.shape.num_elements() * tensor.dtype.size


def _check_names(element_spec: Any) -> None:
  """Refuses named tuples whose order TFF's graphs would not keep.

  Graphs take the fields of an element in the order of their names, as
  TensorFlow has those of dictionaries; those of a named tuple it has in the
  order of its class.

  Args:
    element_spec: Of a data set.

  Raises:
    TypeError: If a named tuple has its fields in another order.
  """

  def check(part):
    names = list(getattr(part, '_fields', ()))
    if names != sorted(names):
      raise TypeError(
          'Expected elements with fields in the order of their names, found a'
          f' {type(part).__name__} of {names}. Tip: use an OrderedDict.'
      )
    children = part.values() if isinstance(part, dict) else part
    if isinstance(part, dict | tuple):
      for child in children:
        check(child)

  check(element_spec)
