"""Every process converts to the forms that production systems run.

The forms are run as such a system would: MapReduceForm and the mergeable form
piece by piece, with the clients in two partitions; the others as the
computations that TFF puts together from them.
"""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta.bundles import computations
from tff_meta.execution import native
from tff_meta.training import checkpoints

# The clients' sums are merged from those of two partitions, and TFF's graph
# optimization reorders arithmetic: last bits of values near 1.
_TOLERANCE = dict(rtol=1e-5, atol=1e-6)


def _assert_close(actual, expected):
  actual, expected = map(checkpoints.to_arrays, (actual, expected))
  assert actual.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_allclose(actual[name], array, err_msg=name, **_TOLERANCE)


def _map_reduce(form, state, cohort):
  """One round; the clients' sums are made in two partitions."""
  broadcast = form.prepare(state)
  sums = [form.zero(), form.zero()]
  for k, data in enumerate(cohort):
    update, *secure = form.work(data, broadcast)
    assert not any(secure)
    sums[k % 2] = form.accumulate(sums[k % 2], update)
  total = form.report(form.merge(*sums))
  return form.update(state, (total, (), (), ())).values()


def test_map_reduce_form_computes_the_same_rounds(composed_subject):
  form = tff.backends.mapreduce.get_map_reduce_form_for_computation(
      composed_subject.process.next
  )
  for state, cohort, expected in composed_subject.rounds():
    next_state, metrics = _map_reduce(form, state, cohort)
    _assert_close(next_state, expected.state)
    _assert_close(metrics, expected.metrics)


def test_distribute_aggregate_form_computes_the_same_rounds(composed_subject):
  forms = tff.backends.mapreduce
  form = forms.get_distribute_aggregate_form_for_computation(
      composed_subject.process.next
  )
  next_round = forms.get_computation_for_distribute_aggregate_form(form)
  for state, cohort, expected in composed_subject.rounds():
    next_state, metrics = next_round(state, cohort)
    _assert_close(next_state, expected.state)
    _assert_close(metrics, expected.metrics)


def test_initial_state_converts(module_subject):
  initialize = tff.backends.mapreduce.get_state_initialization_computation(
      module_subject.process.initialize
  )
  _assert_close(initialize(), module_subject.states[0])


def test_mergeable_form_computes_the_same_rounds(costly_process):
  form = tff.backends.native.compile_to_mergeable_comp_form(
      costly_process.process.next
  )
  for state, cohort, expected in costly_process.rounds():
    parts = [form.up_to_merge(state, part) for part in (cohort[:2], cohort[2:])]
    output = form.after_merge((state, cohort), form.merge(*parts))
    next_state, metrics = _both(output)
    _assert_close(next_state, expected.state)
    _assert_close(metrics, expected.metrics)


def test_what_clients_keep_converts_to_a_broadcast(costly_process):
  """`next_with_memory` does not: its results are at both placements."""
  subject = costly_process
  if not isinstance(subject.process, composition.StatefulLearningProcess):
    pytest.skip('Its clients keep nothing.')
  forms = tff.backends.mapreduce
  form = forms.get_broadcast_form_for_computation(
      computations.memory(subject.process)
  )
  memory = forms.get_computation_for_broadcast_form(form)
  state, cohort, _ = next(iter(subject.rounds()))
  _, expected = subject.process.next_with_memory(state, cohort)
  for found, kept in zip(memory(state, cohort), expected, strict=True):
    found_present, found_value = _both(found)
    assert found_present == kept.present
    _assert_close(found_value, kept.value)


def test_clients_may_hold_tensors(costly_process):
  """In the place of sequences, in TFF's own runtime; and it converts."""
  subject = costly_process
  next_on_tensors = computations.on_tensors(subject.process.next)
  tff.backends.mapreduce.get_map_reduce_form_for_computation(next_on_tensors)
  state, cohort, expected = next(iter(subject.rounds()))
  context = native.create_native_context()
  with tff.framework.get_context_stack().install(context):
    output = next_on_tensors(state, [_tensors(client) for client in cohort])
  next_state, metrics = _both(output)
  _assert_close(next_state, expected.state)
  _assert_close(metrics, expected.metrics)


def _both(output):
  """Returns the two parts of a result, whatever Python holds them."""
  return output.values() if isinstance(output, dict) else output


def _tensors(client):
  """Returns what a client of the toy problem holds, without data sets."""
  (examples,) = client['examples']
  (salt,) = client['salt']
  held = collections.OrderedDict(examples=examples, salt=salt)
  if 'memory' in client:
    kept = list(client['memory'])
    nothing = tf.nest.map_structure(
        lambda spec: tf.zeros(spec.shape, spec.dtype),
        client['memory'].element_spec,
    )
    held['memory'] = collections.OrderedDict(
        present=bool(kept), value=kept[0] if kept else nothing
    )
  return tf.nest.map_structure(np.asarray, held)
