import dataclasses
import json

import pytest

from tff_meta.training import run_config

_DEFAULTS = dict(
    algorithm='frl',
    preset='release',
    hparams='rounds=2',
    dataset='synthetic',
    dataset_options='noise=0.5',
    data_dir=None,
    partition=None,
    partition_options='',
    model=None,
    num_clients=None,
    clients_per_round=None,
    way=None,
    group_clients=None,
    test_fraction=None,
    rounds=5,
    seed=1,
    checkpoint_every=2,
    eval_every=0,
    validation_groups=2,
    protocols=('new_groups',),
    eval_groups=3,
    reference_hparams='deployment_learning_rate=0.25',
    execution='native',
)


def _resolve(**changes):
  return run_config.resolve(**(_DEFAULTS | changes))


def test_everything_is_resolved():
  config = _resolve()
  assert config.hparams.rounds == 2
  assert config.hparams.weight_decay == 5e-4  # Of the preset.
  assert config.reference_hparams.deployment_learning_rate == 0.25
  assert config.reference_hparams.momentum == 0.5  # Of the preset.
  assert config.partition == 'few_round'
  assert config.partition_options == {'examples_per_class': None}
  assert config.dataset_options['noise'] == 0.5
  assert config.dataset_options['num_classes'] == 20
  assert (config.model, config.num_clients) == ('mlp', 10)
  assert (config.clients_per_round, config.way, config.group_clients) == (
      3,
      3,
      3,
  )


def test_what_is_given_is_kept():
  config = _resolve(
      algorithm='fed_avg',
      hparams='',
      partition='dirichlet',
      partition_options='alpha=2.0',
      test_fraction=0.25,
      num_clients=2,
      way=4,
      group_clients=6,
      model='conv4',
  )
  assert config.partition_options == {'alpha': 2.0, 'min_examples': 10}
  assert (config.num_clients, config.clients_per_round) == (2, 2)
  assert (config.way, config.group_clients, config.model) == (4, 6, 'conv4')


@pytest.mark.parametrize(
    'name, value', [('model', ''), ('partition', '')], ids=str
)
def test_an_empty_name_is_not_the_default(name, value):
  with pytest.raises(ValueError, match=f'`{name}` to be one of'):
    _resolve(**{name: value})


def test_zero_group_clients_are_not_the_default():
  assert _resolve(group_clients=0).group_clients == 0


def test_json_there_and_back_is_the_same():
  config = _resolve()
  values = json.loads(json.dumps(config.to_json()))
  assert values == config.to_json()
  assert run_config.from_json(values) == config


def test_the_identity_leaves_out_what_may_change():
  config = _resolve()
  longer = dataclasses.replace(
      config,
      rounds=50,
      checkpoint_every=1,
      data_dir='elsewhere',
      protocols=(),
      eval_groups=7,
  )
  other = dataclasses.replace(config, seed=2)
  assert longer.identity() == config.identity()
  assert other.identity() != config.identity()


@pytest.mark.parametrize(
    'change',
    [
        lambda values: values.pop('seed'),
        lambda values: values.update(colour='blue'),
        lambda values: values['hparams'].update(alpha=1),
        lambda values: values.update(algorithm='gone'),
        lambda values: values.update(preset='gone'),
    ],
)
def test_a_configuration_of_another_version_is_refused(change):
  values = _resolve().to_json()
  change(values)
  with pytest.raises(ValueError):
    run_config.from_json(values)
