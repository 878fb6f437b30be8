"""Clients of one's own as TensorFlow Federated has them in a program."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

_LABELS = ('label', 'labels', 'y')
_READ_BATCH = 4096


def is_client_data(clients: Any) -> bool:
  """Returns whether something is a `tff.simulation.datasets.ClientData`."""
  return hasattr(clients, 'create_tf_dataset_for_client')


def examples(client_data: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Reads all clients of a `tff.simulation.datasets.ClientData`.

  Args:
    client_data: Its elements are one example each: a pair `(x, y)`, or a
      mapping of two features, of which one is called `label`, `labels` or `y`.

  Returns:
    Name of a client -> x [n, ...] and y [n] of their own dtypes, text as str.

  Raises:
    ValueError: If elements are something else, or a client has none or cannot
      be read.
  """
  x_key, y_key = _keys(client_data.element_type_structure)
  found = {}
  for client in client_data.client_ids:
    dataset = client_data.create_tf_dataset_for_client(client)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
      raise ValueError(
          f'Expected client {client!r} to hold a finite number of examples,'
          ' found a data set without end. Tip: leave `repeat` out.'
      )
    try:
      batches = [
          (batch[x_key], batch[y_key])
          for batch in dataset.batch(_READ_BATCH).as_numpy_iterator()
      ]
    except tf.errors.OpError as e:
      raise ValueError(
          f'Expected to read the examples of client {client!r}, all of one'
          f' shape, found {type(e).__name__}: {e.message.splitlines()[0]}'
      ) from e
    if not batches:
      raise ValueError(
          'Expected every client of the ClientData to have examples, found none'
          f' of {client!r}.'
      )
    x, y = (np.concatenate(column) for column in zip(*batches, strict=True))
    found[client] = x, y if y.dtype != object else _to_text(y)
  return found


def _keys(structure: Any) -> tuple[Any, Any]:
  """Returns what of an element is an example, and what its class.

  Args:
    structure: `ClientData.element_type_structure`.

  Raises:
    ValueError: If that cannot be told.
  """
  tip = (
      ' Tip: `client_data.preprocess(lambda ds: ds.map(...))` makes elements'
      " `{'x': x, 'y': y}` of others, one example each."
  )
  if isinstance(structure, Mapping):
    labels = [name for name in _LABELS if name in structure]
    others = [name for name in structure if name not in labels]
    is_known = len(labels) == len(others) == 1
    keys: tuple[Any, Any] = (*others[:1], *labels[:1])
    shown = f'the features {sorted(structure)}'
  else:
    is_known = isinstance(structure, tuple | list) and len(structure) == 2
    keys = 0, 1
    shown = f'a {type(structure).__name__}'
  if not is_known:
    raise ValueError(
        'Expected a ClientData with elements of two features, one of them'
        f' called {", ".join(_LABELS[:-1])} or {_LABELS[-1]}, or of (x, y),'
        f' found {shown}.{tip}'
    )
  label = structure[keys[1]]
  if not isinstance(label, tf.TensorSpec) or label.shape.rank != 0:
    raise ValueError(
        'Expected one example an element of the ClientData, with one class,'
        f' found {label}.{tip}'
    )
  return keys


def _to_text(y: np.ndarray) -> np.ndarray:
  return np.array([text.decode() for text in y])
