"""Nodes of a Ray cluster that go, and come, in the middle of a round."""

import time

import numpy as np
import pytest
import tensorflow_federated as tff

from tests.execution import test_ray_pool as small

pytest.importorskip('ray')
pytestmark = pytest.mark.slow

from ray import cluster_utils  # noqa: E402

from tff_meta.execution import in_process  # noqa: E402
from tff_meta.execution import native  # noqa: E402
from tff_meta.execution import ray_pool  # noqa: E402

# As `binaries.worker --head` has them.
_NOTICED_SOON = {
    'health_check_initial_delay_ms': 1000,
    'health_check_period_ms': 1000,
    'health_check_timeout_ms': 2000,
    'health_check_failure_threshold': 3,
}


@pytest.fixture(scope='module')
def cluster():
  """A head without CPUs for workers, and a node with one."""
  native.prepare_environment()
  patch = pytest.MonkeyPatch()
  patch.setenv('RAY_AUTH_MODE', 'disabled')
  patch.setattr(
      'ray._private.services.resolve_ip_for_localhost', lambda host: host
  )
  made = cluster_utils.Cluster(
      initialize_head=True,
      head_node_args=dict(num_cpus=1, _system_config=_NOTICED_SOON),
  )
  yield made
  made.shutdown()
  patch.undo()


@pytest.fixture(scope='module')
def pool(cluster):
  options = ray_pool.Options(
      address=cluster.address, workers=2, worker_timeout_seconds=240
  )
  pool = ray_pool.RayPool(options)
  yield pool
  pool.close()


def _run(context, *args):
  with tff.framework.get_context_stack().install(context):
    return np.hstack(small._round(*args))


def _run_until_both_are_there(pool, run, expected):
  deadline = time.monotonic() + 240
  while '2 of 2' not in pool.status() and time.monotonic() < deadline:
    np.testing.assert_array_equal(run(), expected)
    time.sleep(1)
  assert '2 of 2' in pool.status()


def test_a_node_goes_and_another_comes_in_mid_round(cluster, pool, monkeypatch):
  cohort = small._cohort(24)
  here = in_process.InProcessContext(num_shards=24)
  there = in_process.InProcessContext(num_shards=24, pool=pool)
  expected = _run(here, 0.3, cohort)
  node = cluster.add_node(num_cpus=1)
  np.testing.assert_array_equal(_run(there, 0.3, cohort), expected)
  _run_until_both_are_there(pool, lambda: _run(there, 0.3, cohort), expected)

  hand, handed = pool._hand, [0]

  def slow(member, task):
    time.sleep(0.2)
    handed[0] += 1
    if handed[0] == 4:
      cluster.remove_node(node, allow_graceful=False)
    if handed[0] == 12:
      cluster.add_node(num_cpus=1)
    return hand(member, task)

  monkeypatch.setattr(pool, '_hand', slow)
  started = time.monotonic()
  np.testing.assert_array_equal(_run(there, 0.3, cohort), expected)
  print(f'{time.monotonic() - started:.1f} s with a node lost')
  _run_until_both_are_there(pool, lambda: _run(there, 0.3, cohort), expected)
