"""What clients have kept, as personalizers take it."""

import collections
import types

import numpy as np
import pytest

from tff_meta.training import checkpoints
from tff_meta.training import client_memories
from tff_meta.training import client_state_store

INITIAL = collections.OrderedDict(
    head=np.zeros((2, 3), np.float32), steps=np.int32(7)
)
STATEFUL = types.SimpleNamespace(initial_memory=INITIAL)
STATELESS = types.SimpleNamespace()


def value(number):
  return collections.OrderedDict(
      head=np.full((2, 3), number, np.float32), steps=np.int32(number)
  )


@pytest.fixture
def store():
  """The client `b` was sampled in the rounds 2 and 4, `a` in round 3."""
  states = client_state_store.InMemoryStore()
  for client_id, round_num in (('b', 2), ('a', 3), ('b', 4)):
    state = checkpoints.to_arrays(value(round_num))
    states.write(client_id, round_num, state)
  return states


def test_a_client_has_what_it_kept_last(store):
  memories = client_memories.ClientMemories(STATEFUL, store)
  for client_id, expected in (('a', 3), ('b', 4)):
    memory = memories.of(client_id)
    assert memory.present.dtype == bool and memory.present
    np.testing.assert_equal(memory.value, value(expected))


def test_a_client_that_never_took_part_has_the_initial_memory(store):
  for states in (store, None):
    memory = client_memories.ClientMemories(STATEFUL, states).of('c')
    assert memory.present.dtype == bool and not memory.present
    np.testing.assert_equal(memory.value, INITIAL)


def test_memories_are_those_of_the_round(store):
  memories = client_memories.ClientMemories(STATEFUL, store, round_num=2)
  np.testing.assert_equal(memories.of('b').value, value(2))
  assert not memories.of('a').present
  assert memories.bank['steps'].numpy().tolist() == [2]


def test_the_bank_has_all_memories_in_the_order_of_names(store):
  bank = client_memories.ClientMemories(STATEFUL, store).bank
  assert bank['head'].shape == (2, 2, 3)
  assert bank['steps'].numpy().tolist() == [3, 4]
  np.testing.assert_array_equal(bank['head'][1], value(4)['head'])


def test_the_bank_is_never_empty():
  bank = client_memories.ClientMemories(STATEFUL, None).bank
  assert bank['head'].shape == (1, 2, 3)
  assert bank['steps'].numpy().tolist() == [7]


def test_clients_that_keep_nothing_have_none(store):
  memories = client_memories.ClientMemories(STATELESS, store)
  assert memories.of('a') == memories.bank == ()


def test_a_state_of_another_process_is_refused(store):
  other = types.SimpleNamespace(initial_memory={'tail': np.float32(0)})
  memories = client_memories.ClientMemories(other, store)
  with pytest.raises(checkpoints.IncompatibleCheckpointError, match='tail'):
    memories.of('a')
