"""Values in a trace, and the TFF types that say what they are made of.

A value is a structure of nested tuples, whatever containers the computation's
Python code has; its leaves are tensors and `Sequence`s, in the type's order.
"""

import collections
from collections.abc import Iterator
import functools
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.execution import tensorflow_block

# Every round asks for the parts of the same types, for every client.
_REMEMBERED_TYPES = 1024


@functools.lru_cache(maxsize=_REMEMBERED_TYPES)
def elements_of(
    type_signature: tff.StructType,
) -> tuple[tuple[str | None, tff.Type], ...]:
  """The names, which may be None, and types of the elements of a type."""
  return tuple(tff.structure.iter_elements(type_signature))


@functools.lru_cache(maxsize=_REMEMBERED_TYPES)
def names_of(type_signature: tff.StructType) -> tuple[list, frozenset]:
  """The names of the elements of a type, None for those without; twice."""
  names = [name for name, _ in elements_of(type_signature)]
  return names, frozenset(names)


@functools.lru_cache(maxsize=_REMEMBERED_TYPES)
def leaf_types(type_signature: tff.Type) -> tuple[tff.Type, ...]:
  """The types of the tensors and sequences of a type, in order."""
  if not isinstance(type_signature, tff.StructType):
    return (type_signature,)
  return tuple(
      leaf
      for _, element in elements_of(type_signature)
      for leaf in leaf_types(element)
  )


def flat_specs(type_signature: tff.Type) -> list[tf.TensorSpec]:
  """The specs of the tensors of a type, in order; of a sequence its variant."""
  return [
      tf.TensorSpec([], tf.variant)
      if isinstance(leaf, tff.SequenceType)
      else tf.TensorSpec(leaf.shape, leaf.dtype)
      for leaf in leaf_types(type_signature)
  ]


def tensor_specs(type_signature: tff.Type) -> list[tf.TensorSpec]:
  """The specs of the tensors of a type that are not in sequences, in order."""
  return [
      tf.TensorSpec(leaf.shape, leaf.dtype)
      for leaf in leaf_types(type_signature)
      if not isinstance(leaf, tff.SequenceType)
  ]


def pack(type_signature: tff.Type, leaves: Iterator[Any]) -> Any:
  """Returns the structure of a type with its leaves, taken in order."""
  if isinstance(type_signature, tff.StructType):
    elements = elements_of(type_signature)
    return tuple(pack(element, leaves) for _, element in elements)
  if isinstance(type_signature, tff.SequenceType):
    leaf = next(leaves)
    is_variant = isinstance(leaf, tf.Tensor)
    return tensorflow_block.Sequence(leaf) if is_variant else leaf
  return next(leaves)


def flatten(value: Any) -> list[Any]:
  """The leaves of a structure, in order."""
  if isinstance(value, tuple):
    return [leaf for part in value for leaf in flatten(part)]
  return [value]


def element_structure(type_signature: tff.Type, leaves: Iterator[Any]) -> Any:
  """Returns an element of a sequence as TFF's graphs expect it of a data set.

  Args:
    type_signature: Of the element.
    leaves: In the order of the type.

  Returns:
    `OrderedDict`s for structures with names, tuples for others.
  """
  if not isinstance(type_signature, tff.StructType):
    return next(leaves)
  elements = [
      (name, element_structure(element, leaves))
      for name, element in elements_of(type_signature)
  ]
  if elements and elements[0][0] is not None:
    return collections.OrderedDict(elements)
  return tuple(element for _, element in elements)


def element_leaves(type_signature: tff.Type, element: Any) -> Iterator[Any]:
  """Yields the leaves of an `element_structure` in the order of its type."""
  if isinstance(type_signature, tff.StructType):
    named = isinstance(element, dict)
    for i, (name, inner) in enumerate(elements_of(type_signature)):
      yield from element_leaves(inner, element[name if named else i])
  else:
    yield element


def to_dataset(
    sequence: tensorflow_block.Sequence, element_type: tff.Type
) -> tf.data.Dataset:
  """Returns the data set of a sequence, whose elements are of a type."""
  specs = element_structure(element_type, iter(flat_specs(element_type)))
  return tf.data.experimental.from_variant(sequence.variant, specs)
