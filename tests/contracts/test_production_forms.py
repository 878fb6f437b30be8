"""Every process converts to the forms that production systems run.

The forms are run as such a system would: MapReduceForm piece by piece, with the
clients in two partitions; DistributeAggregateForm as the computation that TFF
puts together from it.
"""

import numpy as np
import tensorflow_federated as tff

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
