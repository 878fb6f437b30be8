"""Workers of Ray: the same bits as in this process, whatever ends meanwhile."""

import dataclasses
import os
import signal
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import dealing
from tff_meta.execution import in_process
from tff_meta.execution import native

pytest.importorskip('ray')
pytestmark = pytest.mark.ci

from ray._private import internal_api  # noqa: E402

from tff_meta.execution import ray_pool  # noqa: E402

_SHARDS = 4


@tff.tensorflow.computation(tff.SequenceType(np.float32))
def _sum_of(values):
  return values.reduce(0.0, lambda total, value: total + value)


@tff.federated_computation(
    tff.FederatedType(np.float32, tff.SERVER),
    tff.FederatedType(tff.SequenceType(np.float32), tff.CLIENTS),
)
def _round(factor, values):
  """The sum of the clients' sums, times a factor, and what every client had."""

  @tff.tensorflow.computation
  def scaled(own, given):
    return given * tf.sin(own)

  given = tff.federated_broadcast(factor)
  own = tff.federated_map(_sum_of, values)
  sums = tff.federated_map(scaled, (own, given))
  return tff.federated_sum(sums), sums


@tff.tensorflow.computation(np.int32)
def _checked(value):
  with tf.control_dependencies([tf.debugging.assert_positive(value)]):
    return tf.identity(value)


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def _positive(values):
  return tff.federated_sum(tff.federated_map(_checked, values))


def _cohort(num_clients):
  random = np.random.default_rng(num_clients)
  return [
      tf.data.Dataset.from_tensor_slices(
          random.normal(size=1 + k % 3).astype(np.float32)
      )
      for k in range(num_clients)
  ]


@pytest.fixture(scope='module')
def lines():
  return []


@pytest.fixture(scope='module')
def pool(lines):
  """Two workers; they end with the module."""
  native.prepare_environment()
  pool = ray_pool.RayPool(ray_pool.Options(workers=2), report=lines.append)
  yield pool
  pool.close()


@pytest.fixture
def context(pool):
  return in_process.InProcessContext(num_shards=_SHARDS, pool=pool)


def _run(context, computation, *args):
  with tff.framework.get_context_stack().install(context):
    return computation(*args)


@pytest.mark.parametrize('num_clients', [1, 3, 11])
def test_rounds_are_those_of_this_process(context, num_clients):
  cohort = _cohort(num_clients)
  here = in_process.InProcessContext(num_shards=_SHARDS)
  for _ in range(3):  # By value, kept by workers, and from there.
    np.testing.assert_array_equal(
        np.hstack(_run(context, _round, 0.7, cohort)),
        np.hstack(_run(here, _round, 0.7, cohort)),
    )


def test_workers_merge_large_totals_to_the_same(context, monkeypatch):
  monkeypatch.setattr(ray_pool, '_LARGE_BYTES', -1)
  large = in_process.InProcessContext(num_shards=7, pool=context._pool)
  here = in_process.InProcessContext(num_shards=7)
  cohort = _cohort(15)
  np.testing.assert_array_equal(
      np.hstack(_run(large, _round, 0.7, cohort)),
      np.hstack(_run(here, _round, 0.7, cohort)),
  )


@pytest.mark.parametrize('num_losses', [1, 3])
def test_totals_that_are_lost_are_computed_again(
    pool, context, lines, monkeypatch, num_losses
):
  monkeypatch.setattr(ray_pool, '_LARGE_BYTES', -1)
  cohort = _cohort(2)
  large = in_process.InProcessContext(num_shards=2, pool=pool)
  expected = _run(large, _round, 0.7, cohort)
  hand, left = pool._hand, [num_losses]

  def losing(member, task):
    if task.method == 'merge' and left[0]:
      left[0] -= 1
      internal_api.free(list(task.arguments))
    return hand(member, task)

  monkeypatch.setattr(pool, '_hand', losing)
  lines.clear()
  if num_losses == 3:
    with pytest.raises(ray_pool.WorkersLostError, match='them lost 3 times'):
      _run(large, _round, 0.7, cohort)
  actual = _run(large, _round, 0.7, cohort)
  np.testing.assert_array_equal(np.hstack(actual), np.hstack(expected))
  again = 'Totals of shards are lost, all are computed again.'
  assert lines == [again] * num_losses


def test_an_interrupted_round_is_not_in_the_way_of_the_next(
    pool, context, monkeypatch
):
  def interrupted(running):
    assert running
    raise KeyboardInterrupt

  expected = _run(context, _round, 0.3, _cohort(9))
  with monkeypatch.context() as patched:
    patched.setattr(pool, '_wait', interrupted)
    with pytest.raises(KeyboardInterrupt):
      _run(context, _round, 0.3, _cohort(9))
  actual = _run(context, _round, 0.3, _cohort(9))
  np.testing.assert_array_equal(np.hstack(actual), np.hstack(expected))


def _with_ends(pool, monkeypatch, num_ends):
  """Has workers killed with the first tasks that they are given."""
  hand, left = pool._hand, [num_ends]

  def deadly(member, task):
    references = hand(member, task)
    if left[0]:
      left[0] -= 1
      os.kill(member.pid, signal.SIGKILL)
    return references

  monkeypatch.setattr(pool, '_hand', deadly)


@pytest.mark.parametrize('num_ends', [1, 2])
def test_a_lost_worker_costs_its_shard(
    pool, context, lines, monkeypatch, num_ends
):
  cohort = _cohort(9)
  expected = _run(context, _round, 0.3, cohort)
  lines.clear()
  _with_ends(pool, monkeypatch, num_ends)
  actual = _run(context, _round, 0.3, cohort)
  np.testing.assert_array_equal(np.hstack(actual), np.hstack(expected))
  assert sum('is lost' in line for line in lines) == num_ends


def test_a_shard_that_ends_three_workers_is_named(pool, context, monkeypatch):
  _with_ends(pool, monkeypatch, 100)
  with pytest.raises(ray_pool.WorkersLostError, match='1 client: number 0 of'):
    _run(context, _round, 0.3, _cohort(1))


def test_an_error_of_a_client_ends_the_round_and_not_the_workers(pool, context):
  with pytest.raises(tf.errors.InvalidArgumentError):
    _run(context, _positive, [1, 2, 0, 4])
  assert _run(context, _positive, [1, 2, 3, 4]) == 10


def test_calls_are_dealt_in_order(pool):
  @tf.function
  def function(shared, own):
    return None, shared['a'] * own, own + tf.constant([1.0, 2.0])

  def specs(shared, arguments):
    return tf.nest.map_structure(
        tf.TensorSpec.from_tensor, (*shared, *arguments)
    )

  shared = ({'a': tf.constant(3.0)},)
  calls = [(i, (tf.constant([float(i), 1.0]),)) for i in range(7)]
  here = list(dealing.call_all(function, specs, shared, calls))
  dealing.set_dealer(pool)
  try:
    there = list(dealing.call_all(function, specs, shared, calls))
  finally:
    dealing.set_dealer(None)
  for (tag, (nothing, *ours)), (same_tag, (none, *theirs)) in zip(
      there, here, strict=True
  ):
    assert tag == same_tag
    assert nothing is None and none is None
    np.testing.assert_array_equal(ours, theirs)


def test_nobody_is_waited_for_so_long(pool, monkeypatch):
  options = dataclasses.replace(pool._options, worker_timeout_seconds=0.5)
  monkeypatch.setattr(pool, '_options', options)
  monkeypatch.setattr(pool, '_members', [])
  monkeypatch.setattr(pool, '_starting', {})
  with pytest.raises(ray_pool.WorkersLostError, match='within 0.5 seconds'):
    list(pool._deal([]))


def test_workers_that_ended_while_idle_do_not_count(pool, context):
  for _ in range(2):
    expected = _run(context, _round, 0.3, _cohort(1))
    for pid in pool.processes():
      os.kill(pid, signal.SIGKILL)
    actual = _run(context, _round, 0.3, _cohort(1))
    np.testing.assert_array_equal(np.hstack(actual), np.hstack(expected))


def test_a_data_set_without_end_is_refused(context):
  cohort = [*_cohort(2), _cohort(1)[0].repeat()]
  with pytest.raises(ValueError, match='Client 2: Expected a data set that'):
    _run(context, _round, 0.3, cohort)


def test_a_host_that_differs_is_left_out_and_an_error_if_it_is_alone(
    pool, context, lines, monkeypatch, capfd
):
  cohort = _cohort(9)
  expected = np.hstack(_run(context, _round, 0.3, cohort))

  def run_until(is_so):
    deadline = time.monotonic() + 240
    while not is_so() and time.monotonic() < deadline:
      actual = np.hstack(_run(context, _round, 0.3, cohort))
      np.testing.assert_array_equal(actual, expected)
      time.sleep(0.1)
    assert is_so()

  run_until(lambda: '2 of 2' in pool.status())
  # Of those that come from now on.
  monkeypatch.setitem(pool._expected, 'commit', 'another')
  lines.clear()
  os.kill(pool.processes()[0], signal.SIGKILL)
  left_out = 'A worker is left out. Expected'
  run_until(lambda: any(line.startswith(left_out) for line in lines))
  (alone,) = pool.processes()
  os.kill(alone, signal.SIGKILL)
  with pytest.raises(ray_pool.HostError, match='not another.*mixed_hosts'):
    _run(context, _round, 0.3, cohort)
  assert capfd.readouterr() == ('', '')  # No line of Ray's own.
