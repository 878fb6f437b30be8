"""Nothing leaves a client exactly where an aggregation is to hide it.

Of every name of the registry; where an algorithm's spec refuses an aggregation,
its process does, too.
"""

import numpy as np
import pytest
import tensorflow_federated as tff
import tree

from tff_meta import aggregation
from tff_meta.training import metric_writers

_PRIVATE = aggregation.DifferentiallyPrivate(
    noise_multiplier=0.05, clients_per_round=3, clip=1.0, channel_bound=2.0
)


def _refuses(subject, name):
  """Whether the spec refuses an aggregation; the process has to agree."""
  is_refused = name in subject.case.spec.refused_aggregations
  if is_refused:
    with pytest.raises(ValueError, match='Expected an? .*aggregation'):
      subject.build_with(aggregation=aggregation.BY_NAME[name]())
  return is_refused


def _processes(subject, how):
  """Returns the plain process and that with an aggregation."""
  if subject.method.server_optimizer is None:
    return subject.process, subject.build_with(aggregation=how)
  # Adam's first steps have a sign alone, also of rounding errors.
  options = dict(server_optimizer=tff.learning.optimizers.build_sgdm(1.0))
  return subject.build_with(**options), subject.build_with(
      aggregation=how, **options
  )


def _one_round(subject, process, state):
  cohort = [subject.data(client) for client in subject.cohort]
  return subject.one_round(state, cohort, process)[0]


def _floats(structure):
  """Path -> array, of all that are neither whole numbers nor flags."""
  return {
      path: np.asarray(array)
      for path, array in tree.flatten_with_path(structure)
      if np.issubdtype(np.asarray(array).dtype, np.floating)
      and 'present' not in path  # A class is believed, or not.
  }


def test_the_server_of_a_secure_aggregation_sees_sums_alone(costly_subject):
  """What clients send in the clear is nothing; the round is as without."""
  if _refuses(costly_subject, 'secure'):
    return
  plain, secure = _processes(costly_subject, aggregation.Secure())
  form = tff.backends.mapreduce.get_map_reduce_form_for_computation(secure.next)
  clear, *secret = form.work.type_signature.result
  assert not tff.types.contains(clear, lambda t: isinstance(t, tff.TensorType))
  assert any(map(len, secret))

  weights = [
      tree.flatten(
          process.get_model_weights(
              _one_round(costly_subject, process, process.initialize()).state
          ).trainable
      )
      for process in (plain, secure)
  ]
  for expected, actual in zip(*weights, strict=True):
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def _after(subject, process, num_rounds):
  state = process.initialize()
  for _ in range(num_rounds):
    state = _one_round(subject, process, state).state
  return state


def test_noise_is_in_all_that_a_round_moves(any_subject):
  """Two rounds from one state differ wherever a plain one moves the server.

  And no number that is measured is that of the plain round. Of a method whose
  cohorts stay the last round, which may move something else, as the first;
  what that puts back to its beginning tells nothing.
  """
  if _refuses(any_subject, 'dp'):
    return
  for done in {0, any_subject.rounds_per_cohort - 1}:
    _check_noise_after(any_subject, done)


def _check_noise_after(subject, done):
  plain_process, process = _processes(subject, _PRIVATE)
  state = _after(subject, process, done)
  first, second = (_one_round(subject, process, state) for _ in range(2))
  plain_state = _after(subject, plain_process, done)
  plain = _one_round(subject, plain_process, plain_state)

  begin = _floats(plain_process.initialize())
  before, after = _floats(plain_state), _floats(plain.state)
  one, other = _floats(first.state), _floats(second.state)
  moved = {
      p: (before[p] != after[p]) & (begin[p] != after[p])
      for p in before
      if p in after
  }
  assert any(where.any() for where in moved.values())
  for path, where in moved.items():
    is_noisy = one[path] != other[path]
    # What noise has left nothing of may be put back, too, such as a head.
    is_put_back = (one[path] == begin[path]) & (other[path] == begin[path])
    assert (is_noisy | is_put_back)[where].all(), (done, path)
    assert is_noisy[where].any() or not where.any(), (done, path)
  measured = metric_writers.flatten_metrics(first.metrics)
  exact = metric_writers.flatten_metrics(plain.metrics)
  assert not [n for n in measured if n.startswith('train/')]
  had = {float(array) for array in before.values() if array.size == 1}
  assert not [
      name
      for name, value in measured.items()
      if np.asarray(value).dtype.kind == 'f'
      and value == exact.get(name)
      and float(value) not in had  # A margin that nobody trains.
  ]
