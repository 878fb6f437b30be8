"""Values of clients as they go from process to process.

A tensor goes as an array, a data set as the arrays of its elements; one that
has a name goes by its name and is opened where it is used. What goes is plain
data; what is made of it there has the same elements.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.client_works import client_work
from tff_meta.data import federated_dataset
from tff_meta.execution import client_records
from tff_meta.execution import structures


class Elements(NamedTuple):
  """The elements of a data set.

  Attributes:
    spec: The data set's `element_spec`.
    leaves: Of every element, its arrays.
    is_only: Whether the data set said that it has this one element.
  """

  spec: Any
  leaves: list[list[np.ndarray]]
  is_only: bool

  @property
  def num_bytes(self) -> int:
    """Size of the arrays."""
    return sum(array.nbytes for leaves in self.leaves for array in leaves)

  def open(self) -> tf.data.Dataset:
    """Returns a data set of the elements."""
    elements = [
        tf.nest.pack_sequence_as(self.spec, list(map(tf.constant, leaves)))
        for leaves in self.leaves
    ]
    if self.is_only:
      return client_work.one_element_dataset(elements[0], self.spec)
    if not elements:
      nothing = tf.nest.map_structure(
          lambda spec: tf.zeros([d or 0 for d in spec.shape], spec.dtype),
          self.spec,
      )
      return tf.data.Dataset.from_tensors(nothing).take(0)
    return client_records.concatenate(elements)


class ByName(NamedTuple):
  """A part of the data of a client of a `FederatedDataset`.

  Attributes:
    source: Name under which the receiver has the `FederatedDataset`.
    client_id: See `federated_dataset.NamedSequence`, as the others.
    part: As there.
    field: As there.
  """

  source: str
  client_id: str
  part: str
  field: str


class ByReference(NamedTuple):
  """A data set whose elements lie where the receiver can fetch them.

  Attributes:
    name: Of its own; the receiver may keep what it has opened.
    reference: To its `Elements`.
  """

  name: str
  reference: Any


def elements_of(dataset: tf.data.Dataset) -> Elements:
  """Reads a data set.

  Args:
    dataset: Any that ends.

  Raises:
    ValueError: If it does not.
  """
  if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
    raise ValueError(
        'Expected a data set that ends, to send what it has to a worker, found'
        ' one without end. Tip: `.take(n)`.'
    )
  spec = dataset.element_spec
  is_only = hasattr(dataset, 'only_element')
  elements = [dataset.only_element] if is_only else dataset
  return Elements(
      spec,
      [
          [np.asarray(leaf) for leaf in tf.nest.flatten(element)]
          for element in elements
      ],
      is_only,
  )


def leaves_of(value: Any, kind: tff.Type) -> list[Any]:
  """Takes a client's value apart.

  Args:
    value: Any structure of the type.
    kind: Its type.

  Returns:
    For every leaf an array, a data set, or a `NamedSequence`.

  Raises:
    TypeError: If it is not of the type.
  """
  return [
      _sequence(leaf, leaf_kind)
      if isinstance(leaf_kind, tff.SequenceType)
      else np.asarray(client_records.to_tensor(leaf, leaf_kind))
      for leaf, leaf_kind in zip(
          client_records.argument_leaves(value, kind),
          structures.leaf_types(kind),
          strict=True,
      )
  ]


def _sequence(value, kind):
  if isinstance(value, federated_dataset.NamedSequence):
    return value
  dataset = client_records.to_dataset(value, kind)
  client_records.check_type(dataset, kind)
  return dataset


def client_id_of(leaves: Sequence[Any]) -> str | None:
  """Returns whose leaves these are, None where they have no name."""
  for leaf in leaves:
    if isinstance(leaf, ByName):
      return leaf.client_id
  return None
