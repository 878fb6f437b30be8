"""Which clients of a cohort can be computed together.

Those of a batch must be alike, because their tensors are stacked: the same
shapes, and as many examples of the most frequent label, of the next one and so
on, because some algorithms take parts of fixed sizes out of every class.
"""

from collections.abc import Iterator, Sequence
import contextlib
import threading
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.execution import structures
from tff_meta.execution import vectorization


def batches(
    requests: Sequence,
    records: tf.Tensor,
    types: Sequence[tff.Type],
    size: int,
    num_devices: int,
) -> tf.Tensor:
  """Deals a cohort into batches of clients that are alike.

  Args:
    requests: `RecordRequest`s.
    records: Of the cohort, variants [clients, requests].
    types: By argument at clients, the type of one client's value.
    size: The most clients of a batch.
    num_devices: The cohort is dealt over devices first, as evenly as possible.

  Returns:
    int32 [clients, 2]: the clients, one batch after the other, and with each
    the size of its batch.
  """
  num_clients = int(tf.shape(records)[0])
  rows = []
  for d in range(num_devices):
    first = num_clients * d // num_devices
    end = num_clients * (d + 1) // num_devices
    alike: dict[Any, list[int]] = {}
    for client in range(first, end):
      key = _kind(requests, records[client], types)
      alike.setdefault(key, []).append(client)
    for clients in alike.values():
      for start in range(0, len(clients), size):
        members = clients[start : start + size]
        rows += [(member, len(members)) for member in members]
  return tf.constant(np.reshape(rows, [-1, 2]), tf.int32)


@contextlib.contextmanager
def in_turn(turn: threading.Lock, batches: tf.Tensor | None) -> Iterator[None]:
  """Computes batches one call after the other, and says if they do not fit.

  Args:
    turn: Of the function that is called: batches do not bear others at the
      same time, see `RoundFunction`.
    batches: From `batches`; None for clients one at a time, which need no turn.

  Raises:
    ValueError: If clients that are computed together are not alike.
  """
  if batches is None:
    yield
    return
  try:
    with turn:
      yield
  except tf.errors.InvalidArgumentError as error:
    if vectorization.NOT_ALIKE not in str(error):
      raise
    raise ValueError(
        'Expected clients of a batch to be alike, found that something'
        ' differs in size, such as where one has a label of no class. Tip:'
        ' --batched_clients=1.'
    ) from None


def _kind(requests, records, types) -> tuple:
  """What a client shares with those that it may be computed with."""
  kind = []
  for number, request in enumerate(requests):
    if request.reader is not None:
      specs = request.reader.specs
    elif request.leaf is None:
      specs = structures.tensor_specs(types[request.argument])
    else:
      continue  # A data set as it is, which no batch can be made of.
    tensors = tf.raw_ops.OptionalGetValue(
        optional=records[number],
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    for tensor in tensors:
      kind.append(tuple(tensor.shape))
      if tensor.dtype.is_integer and tensor.shape.rank == 1:
        _, counts = np.unique(tensor.numpy(), return_counts=True)
        kind.append(tuple(sorted(counts)))
  return tuple(kind)
