"""What clients have kept of their training, as personalizers take it."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.client_works import client_work
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store


class ClientMemories:
  """The memories of all clients after some round."""

  def __init__(
      self,
      process: tff.learning.templates.LearningProcess,
      client_states: client_state_store.ClientStateStore | None,
      round_num: int | None = None,
  ):
    """Initializes the memories; nothing is read yet.

    Args:
      process: Whose clients they are; one whose clients keep nothing has no
        `initial_memory`.
      client_states: Where the clients' states are; None if no client has any,
        as before the first round.
      round_num: As they were after this round; None for now.
    """
    self._initial = getattr(process, 'initial_memory', None)
    self._client_states = client_states
    self._round_num = round_num

  def of(self, client_id: str) -> Any:
    """Returns a client's `ClientMemory`; `()` where clients keep nothing."""
    if self._initial is None:
      return ()
    state = None
    if self._client_states is not None:
      state = self._client_states.read(client_id, self._round_num)
    return client_work.ClientMemory(
        present=np.array(state is not None), value=self._value(state)
    )

  @functools.cached_property
  def bank(self) -> Any:
    """The values of all clients that have one, `[M, ...]` each leaf.

    They are in the order of the clients' names. Before any client has taken
    part it holds the initial memory, so that it is never empty. `()` where
    clients keep nothing.
    """
    if self._initial is None:
      return ()
    states = []
    if self._client_states is not None:
      states = [
          self._client_states.read(client_id, self._round_num)
          for client_id in self._client_states.client_ids(self._round_num)
      ]
    values = [self._value(state) for state in states or [None]]
    return tf.nest.map_structure(
        lambda *leaves: tf.constant(np.stack(leaves)), *values
    )

  def _value(self, state):
    if state is None:
      return self._initial
    return checkpoints.from_arrays(self._initial, state)
