"""Bytes a round are those of what is declared, and of what TFF compiles.

Of every name of the registry: no round is done for it.
"""

import math

import numpy as np
import pytest
import tensorflow_federated as tff
import tree

from tff_meta import aggregation
from tff_meta import method as method_lib
from tff_meta import traffic

# The network of the cases, for images of 8 by 8 and three classes.
_BODY = 4 * (64 * 100 + 100)
_MODEL = _BODY + 4 * (100 * 3 + 3)
_PROTOTYPES = 4 * (3 * 100 + 3)
_SEEDS = 2 * 4, 2 * 2 * 4  # Of FRL, which has one for all rounds; of others.
_WEIGHT = 4
# Loss, examples and five counts of clients; the norm of the update.
_METRICS = 7 * 4 + 4

_BY_HAND = {
    'fed_avg': (_MODEL + _SEEDS[1], _MODEL + _WEIGHT + _METRICS),
    # A control variate beside the model, both ways.
    'scaffold': (2 * _MODEL + _SEEDS[1], 2 * _MODEL + _WEIGHT + _METRICS),
    # Both bodies of an episode, prototypes, its phase and number; the change of
    # one, and sums of embeddings with weights by class and in all.
    'frl': (
        2 * _BODY + _PROTOTYPES + 2 * 4 + _SEEDS[0],
        _BODY + _WEIGHT + _PROTOTYPES + 4 + _METRICS,
    ),
    # The margin and whether the loss is hybrid; a margin and its weight.
    'metavers': (
        _BODY + _SEEDS[1] + 4 + 1,
        _BODY + _WEIGHT + 2 * 4 + _METRICS,
    ),
    # No model up; sums of embeddings with two weights a class.
    'fed_proto': (
        _MODEL + _SEEDS[1] + _PROTOTYPES,
        _PROTOTYPES + 3 * 4 + _METRICS,
    ),
    'local': (_MODEL + _SEEDS[1], _METRICS),
}


def _num_bytes(structure):
  return sum(np.asarray(leaf).nbytes for leaf in tree.flatten(structure))


def _declared(subject):
  """What the method says is sent, in bytes, where its state is weights."""
  method = subject.method
  _, message = method_lib.client_function(method, seed=0)
  state = subject.process.initialize()
  weights = _num_bytes(subject.weights(state))
  of_models = weights + 4 * (method.num_models or 1) * (not method.sums_updates)
  of_channels = sum(
      np.dtype(spec.dtype.as_numpy_dtype).itemsize * spec.shape.num_elements()
      for channel in method.channels
      for spec in tree.flatten(channel.summed)
  )
  return (
      weights + _num_bytes(message(state.client_work)),
      method.sends_updates * of_models + of_channels + _METRICS,
  )


def test_bytes_are_those_of_what_is_declared(every_name):
  found = traffic.of_process(every_name.process)
  name = every_name.case.algorithm
  if every_name.method.compose is None:
    assert found == _declared(every_name)
  if name in _BY_HAND or every_name.method.compose is not None:
    assert found == _BY_HAND[name]


def _compiled(process):
  """Bytes down and up of what TFF makes of a round for a production system."""
  form = tff.backends.mapreduce.get_map_reduce_form_for_computation(
      process.next
  )
  both = form.prepare, form.work
  return tuple(traffic.num_bytes(f.type_signature.result) for f in both)


_AGGREGATIONS = {
    name: kind(clients_per_round=3) if name == 'dp' else kind()
    for name, kind in aggregation.BY_NAME.items()
}
_AGGREGATIONS['compressed'] = aggregation.Compressed(min_elements=1000)
_NUM_KERNEL = 64 * 100
_AGGREGATED_BY_HAND = {
    # The kernel in 8 bits a number, of which TFF puts 28 bits in an int32, and
    # the least and the largest number.
    'compressed': (
        _MODEL + _SEEDS[1],
        _MODEL
        - 4 * _NUM_KERNEL
        + 4 * math.ceil(8 * _NUM_KERNEL / 28)
        + 2 * 4
        + _WEIGHT
        + _METRICS,
    ),
    # A bound of zeroing and one of clipping, each also for its estimate; a flag
    # and a one for either estimate, and whether it was zeroed and clipped.
    'robust': (
        _MODEL + _SEEDS[1] + 4 * 4,
        _MODEL + _WEIGHT + _METRICS + 2 * 2 * 4 + 2 * 4,
    ),
    # Three sums of numbers between two bounds: metrics without the norm, in
    # int64, and how many clients there were; models and weights, too, and of
    # these two how many clients are beyond each bound, which is sent again.
    'secure': (
        _MODEL + _SEEDS[1] + 3 * 2 * 4 + 2 * 2 * 4,
        2 * (_MODEL + _WEIGHT + 7 * 4) + 3 * 4 + 2 * 2 * 4,
    ),
    # The clip; no metrics and no weights.
    'dp': (_MODEL + _SEEDS[1] + 4, _MODEL),
}


@pytest.mark.parametrize('how', _AGGREGATED_BY_HAND)
def test_bytes_of_fed_avg_are_those_of_its_aggregation(plain_subject, how):
  process = plain_subject.build_with(aggregation=_AGGREGATIONS[how])
  assert traffic.of_process(process) == _AGGREGATED_BY_HAND[how]


@pytest.mark.parametrize('how', _AGGREGATIONS)
def test_bytes_are_those_that_tff_compiles(costly_subject, how):
  if how in costly_subject.case.spec.refused_aggregations:
    pytest.skip('The algorithm refuses the aggregation.')
  process = costly_subject.build_with(aggregation=_AGGREGATIONS[how])
  found = traffic.of_process(process)
  assert None not in found
  assert found == _compiled(process)
