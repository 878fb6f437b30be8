"""Bytes are those of the types of what goes between the server and a client."""

import collections

import numpy as np
import pytest
import tensorflow_federated as tff

# Not part of TFF's public interface; the version is pinned.
from tensorflow_federated.python.core.environments.tensorflow_backend import (
    tensorflow_tree_transformations,
)

from tff_meta import traffic

_MODEL = tff.to_type(
    collections.OrderedDict(kernel=(np.float32, [3, 5]), bias=(np.float32, [5]))
)
_ON_SERVER = tff.FederatedType(_MODEL, tff.SERVER)
_AT_CLIENTS = tff.FederatedType(_MODEL, tff.CLIENTS)
_MODEL_BYTES = 4 * (15 + 5)


@pytest.mark.parametrize(
    'kind, expected',
    [
        ((np.float32, [3, 5]), 60),
        (np.float64, 8),
        ((np.int16, [7]), 14),
        ((np.bool_, [7]), 7),
        ([], 0),
        ([np.int32, (np.int64, [0]), [np.uint8]], 5),
        ((np.float32, [None, 5]), None),
        (np.str_, None),
        ([np.int32, np.str_], None),
        (tff.TensorType(np.float32, None), None),
        (tff.SequenceType(np.int32), None),
        (_AT_CLIENTS, _MODEL_BYTES),
    ],
)
def test_bytes_of_types(kind, expected):
  assert traffic.num_bytes(tff.to_type(kind)) == expected


def test_a_function_is_no_data():
  with pytest.raises(TypeError, match='Expected the type of data, found'):
    traffic.num_bytes(tff.FunctionType(np.int32, np.int32))


def _round(parameters, body):
  return tff.federated_computation(body, parameters)


def test_what_is_sent_and_aggregated_counts_and_nothing_else():
  """Each time that it is sent; not what stays, is unused or constant."""
  data_type = tff.FederatedType(tff.SequenceType(_MODEL), tff.CLIENTS)
  memory_type = tff.FederatedType((np.float32, [1000]), tff.CLIENTS)
  train = tff.tensorflow.computation(
      lambda model, data, memory, rate: (model, memory + 1.0),
      (_MODEL, data_type.member, memory_type.member, np.float64),
  )

  def one_round(model, seed, data, memory):
    tff.federated_sum(memory)  # Nobody asks for it.
    rate = tff.federated_value(np.float64(0.5), tff.CLIENTS)
    sent, again = tff.federated_broadcast(model), tff.federated_broadcast(seed)
    update, memory = tff.federated_map(train, (sent, data, memory, rate))
    other, _ = tff.federated_map(
        train, (tff.federated_broadcast(model), data, memory, rate)
    )
    kept = tff.federated_map(
        tff.tensorflow.computation(
            lambda x, _: x, ((np.float32, [1000]), np.int32)
        ),
        (memory, again),
    )
    return tff.federated_sum(update), tff.federated_max(other), kept

  computation = _round(
      (
          _ON_SERVER,
          tff.FederatedType(np.int32, tff.SERVER),
          data_type,
          memory_type,
      ),
      one_round,
  )
  assert traffic.of_computation(computation) == (
      2 * _MODEL_BYTES + 4,
      2 * _MODEL_BYTES,
  )


def test_a_computation_that_is_called_twice_sends_twice():
  total = _round(_AT_CLIENTS, tff.federated_sum)
  twice = _round(_AT_CLIENTS, lambda value: (total(value), total(value)))
  assert traffic.of_computation(twice) == (0, 2 * _MODEL_BYTES)


def test_a_computation_that_sends_nothing():
  add = tff.tensorflow.computation(lambda x: x + 1, np.int32)
  assert traffic.of_computation(add) == (0, 0)
  seed = tff.federated_computation(
      lambda: tff.federated_value(np.int32(1), tff.SERVER)
  )
  assert traffic.of_computation(seed) == (0, 0)


@pytest.mark.parametrize(
    'body, expected',
    [
        (tff.federated_sum, _MODEL_BYTES),
        (tff.federated_min, _MODEL_BYTES),
        (tff.federated_max, _MODEL_BYTES),
        # Weighed by ones, as many as there are numbers.
        (lambda x: tff.federated_mean(x), 2 * _MODEL_BYTES),
        (
            lambda x: tff.federated_mean(
                x, tff.federated_value(np.float32(2.0), tff.CLIENTS)
            ),
            _MODEL_BYTES + 4,
        ),
    ],
)
def test_composed_intrinsics_send_what_tff_makes_of_them(body, expected):
  """Which are sums and aggregations alone."""
  computation = _round(_AT_CLIENTS, body)
  lowered, changed = (
      tensorflow_tree_transformations.replace_intrinsics_with_bodies(
          computation.to_building_block()
      )
  )
  assert changed
  lowered = tff.framework.ConcreteComputation.from_building_block(lowered)
  for each in (computation, lowered):
    assert traffic.of_computation(each) == (0, expected)


@pytest.mark.parametrize(
    'aggregate',
    [
        lambda x: tff.federated_secure_sum(x, 7),
        lambda x: tff.federated_secure_sum_bitwidth(x, 3),
    ],
)
def test_secure_sums_count_what_is_summed(aggregate):
  """As integers of their type, whatever a protocol makes of them."""
  kind = tff.FederatedType((np.int64, [7]), tff.CLIENTS)
  computation = _round(kind, aggregate)
  plain = tff.backends.test.replace_secure_intrinsics_with_bodies(computation)
  for each in (computation, plain):
    assert traffic.of_computation(each) == (0, 56)


def test_a_selection_sends_keys_up_and_a_value_for_each_down():
  @tff.tensorflow.computation((np.float32, [9, 5]), np.int32)
  def select(table, key):
    return table[key]

  computation = _round(
      (
          tff.FederatedType((np.int32, [3]), tff.CLIENTS),
          tff.FederatedType((np.float32, [9, 5]), tff.SERVER),
      ),
      lambda keys, table: tff.federated_select(
          keys, tff.federated_value(np.int32(9), tff.SERVER), table, select
      ),
  )
  assert traffic.of_computation(computation) == (3 * 20, 3 * 4)


def test_what_has_no_size_is_not_guessed_and_hides_nothing_else():
  computation = _round(
      (
          tff.FederatedType(np.str_, tff.SERVER),
          _ON_SERVER,
          _AT_CLIENTS,
      ),
      lambda text, model, value: (
          tff.federated_broadcast(text),
          tff.federated_broadcast(model),
          tff.federated_sum(value),
      ),
  )
  assert traffic.of_computation(computation) == (None, _MODEL_BYTES)


def test_an_intrinsic_that_is_not_known_is_not_guessed():
  kind = tff.FunctionType(_AT_CLIENTS, _ON_SERVER)
  call = tff.framework.Call(
      tff.framework.Intrinsic('federated_fly', kind),
      tff.framework.Reference('x', _AT_CLIENTS),
  )
  computation = tff.framework.ConcreteComputation.from_building_block(
      tff.framework.Lambda('x', _AT_CLIENTS, call)
  )
  assert traffic.of_computation(computation) == traffic.UNKNOWN


def test_so_many_clients_or_rounds():
  assert traffic.Traffic(3, None).times(5) == (15, None)
