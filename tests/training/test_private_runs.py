"""Runs under every aggregation: going on after a stop, and their privacy."""

import numpy as np
import pytest
import tensorflow_federated as tff

from binaries.experiments import private
from tff_meta import aggregation
from tff_meta import array_archives
from tff_meta import fitting
from tff_meta.execution import native
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import loop
from tff_meta.training import run_config


def _experiment(algorithm, name, **settings):
  dataset = 'digit_pairs' if algorithm == 'frl' else 'digits'
  return experiment_lib.prepare(
      run_config.resolve(
          **fitting._SETTINGS
          | dict(algorithm=algorithm, dataset=dataset, rounds=8, seed=0)
          | dict(model=None if algorithm == 'cafeme' else 'mlp')
          | dict(protocols=('none',), aggregation=name)
          | settings
      )
  )


def _train(experiment, arrays, rounds, store):
  """Returns the server's state, as a checkpoint has it, after some rounds."""
  process = experiment.build_process()
  state = process.initialize()
  if arrays is not None:
    state = checkpoints.from_arrays(state, arrays)
  for number in rounds:
    clients = [
        (name, experiment.dataset.tff_client_data(name))
        for name in experiment.cohort(number)
    ]
    state = loop.next_round(process, state, number, clients, store).state
  return array_archives.load(array_archives.dump(checkpoints.to_arrays(state)))


def _assert_goes_on(algorithm, name):
  """By a process that is built anew, as a killed program does."""
  experiment = _experiment(algorithm, name)
  store = client_state_store.InMemoryStore()
  half = _train(experiment, None, range(1, 5), store)
  found = _train(experiment, half, range(5, 9), store)
  whole = _train(
      experiment, None, range(1, 9), client_state_store.InMemoryStore()
  )
  assert found.keys() == whole.keys()
  differing = [
      path for path in whole if not np.array_equal(found[path], whole[path])
  ]
  if name == 'dp':  # Whose noise is new.
    assert all(
        np.isfinite(a).all() for a in found.values() if a.dtype.kind == 'f'
    )
    assert any(
        path.startswith('global_model_weights') for path in differing
    ) or (
        algorithm == 'fed_proto'  # Which sends no weights.
    )
  else:
    assert not differing


@pytest.mark.ci
@pytest.mark.parametrize('name', ['robust', 'secure', 'dp'])
def test_a_run_goes_on_under_every_aggregation(name):
  _assert_goes_on('metavers', name)


@pytest.mark.ci
def test_secure_sums_in_tffs_worker_are_those_of_this_process():
  """Of weights and of SCAFFOLD's control variates."""
  experiment = _experiment('scaffold', 'secure')
  worker = native.create_native_context()
  expected = _train(
      experiment, None, range(1, 3), client_state_store.InMemoryStore()
  )
  with tff.framework.get_context_stack().install(worker):
    found = _train(
        experiment, None, range(1, 3), client_state_store.InMemoryStore()
    )
  for path, array in expected.items():
    np.testing.assert_allclose(found[path], array, atol=1e-5, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize('name', aggregation.BY_NAME)
@pytest.mark.parametrize('algorithm', private.METHODS)
def test_ten_algorithms_go_on_under_every_aggregation(algorithm, name):
  _assert_goes_on(algorithm, name)


@pytest.mark.ci
def test_the_privacy_of_a_run_is_of_its_cohorts():
  """FRL keeps a cohort for four rounds; 8 rounds are two cohorts."""
  config = _experiment('frl', 'dp', num_clients=64, clients_per_round=5).config
  found = config.privacy(8)
  assert found.pop('epsilon') > config.privacy(4)['epsilon']
  assert found == dict(
      delta=1e-5,
      noise_multiplier=1.0,
      num_clients=64,
      clients_per_round=5,
      rounds=8,
      rounds_per_cohort=4,
  )
  with pytest.raises(ValueError, match='epsilon of at most 3, found'):
    config.replace(target_epsilon=3.0)
  with pytest.raises(ValueError, match="aggregation` 'dp' with a `target_eps"):
    config.replace(
        aggregation='plain', aggregation_options={}, target_epsilon=3.0
    )


def test_options_of_an_aggregation_are_of_the_run():
  config = _experiment(
      'metavers', 'secure', aggregation_options='clip=0.5'
  ).config
  assert config.identity()['aggregation_options'] == dict(
      clip=0.5, max_weight=1000.0, channel_bound=100.0
  )
  before = run_config.upgrade(
      {
          k: v
          for k, v in _experiment('metavers', 'plain').config.to_json().items()
          if k not in ('aggregation_options', 'target_epsilon', 'driver')
      }
  )
  assert before['aggregation_options'] == {} and before['driver'] == 'loop'
  with pytest.raises(ValueError, match='clients_per_round'):
    _experiment('metavers', 'dp', aggregation_options='clients_per_round=3')
