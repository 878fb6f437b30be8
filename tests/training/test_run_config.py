import dataclasses
import json
import typing

import numpy as np
import pytest

from tff_meta import registry
from tff_meta.training import run_config

_DEFAULTS = dict(
    algorithm='frl',
    preset='release',
    hparams='rounds=2',
    dataset='synthetic',
    dataset_options='noise=0.5',
    new_clients='held_out',
    stratify=False,
    validation_fraction=0.0,
    rounds=5,
    seed=1,
    checkpoint_every=2,
    eval_every=0,
    select_best=False,
    select_by='macro',
    patience=0,
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
  assert config.evaluation.reference_hparams.deployment_learning_rate == 0.25
  assert config.evaluation.reference_hparams.momentum == 0.5  # Of the preset.
  assert config.data.partition == 'few_round'
  assert config.data.partition_options == {'examples_per_class': None}
  assert config.data.dataset_options['noise'] == 0.5
  assert config.data.dataset_options['num_classes'] == 20
  assert (config.model, config.data.num_clients) == ('mlp', 10)
  assert (
      config.training.clients_per_round,
      config.evaluation.way,
      config.evaluation.group_clients,
  ) == (
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
      model='conv4',
  )
  assert config.data.partition_options == {'alpha': 2.0, 'min_examples': 10}
  assert (config.data.num_clients, config.training.clients_per_round) == (2, 2)
  assert config.model == 'conv4'
  config = _resolve(way=4, group_clients=6)
  assert (config.evaluation.way, config.evaluation.group_clients) == (4, 6)


@pytest.mark.parametrize(
    'changes, expected',
    [
        (dict(rounds=200), (18, 5, 20, True)),  # Episodes have three rounds.
        (dict(rounds=2), (2, 5, 20, True)),
        (dict(rounds=40, algorithm='fed_avg', hparams=''), (4, 5, 20, True)),
        (dict(rounds=200, select_best=True), (18, 20, None, True)),
        (dict(eval_every=7), (7, 20, None, True)),
        (dict(eval_every=7, eval_new_clients=False), (7, 20, None, False)),
        (dict(eval_every=0), (0, 20, None, False)),
        (dict(protocols=('none',)), (0, 20, None, False)),
        (dict(validation_clients=3, validation_groups=4), (3, 4, 3, True)),
    ],
    ids=str,
)
def test_ten_evaluations_on_the_way_are_cheap_unless_asked_for(
    changes, expected
):
  asked = dict(eval_every=None, validation_groups=None) | changes
  config = _resolve(**asked)
  settings = run_config.settings_of_the_run(config.to_json())
  assert settings.pop('shards') == 1
  assert tuple(settings.values()) == expected
  of_before = config.to_json()
  del of_before['validation_clients'], of_before['eval_new_clients']
  settings = run_config.settings_of_the_run(of_before)
  assert settings.pop('shards') == 1
  assert tuple(settings.values()) == (*expected[:2], None, False)


def test_an_algorithm_that_has_to_know_learns_the_number_of_clients():
  scaffold = dict(algorithm='scaffold', num_clients=7)
  assert _resolve(hparams='', **scaffold).hparams.num_clients == 7
  given = _resolve(hparams='num_clients=7,epochs=3', **scaffold).hparams
  assert (given.num_clients, given.epochs) == (7, 3)
  with pytest.raises(ValueError, match='num_clients.* of the run, 7, found 9'):
    _resolve(hparams='num_clients=9', **scaffold)


def test_a_group_has_more_clients_than_are_kept():
  """Synthetic data have groups of three; a run without groups may be."""
  one_shot = dict(algorithm='one_shot_ft', hparams='kept_clients=3')
  with pytest.raises(
      ValueError, match='`kept_clients`, 3, found 3.*--group_clients=6'
  ):
    _resolve(**one_shot)
  config = _resolve(group_clients=4, **one_shot)
  assert (config.evaluation.group_clients, config.hparams.kept_clients) == (
      4,
      3,
  )
  assert config.replace(group_clients=None).evaluation.way == 3


def test_groups_of_a_data_set_without_sizes_of_its_own_need_some():
  config = _resolve()
  assert config.evaluation.group_sizes() == (3, 3)
  with pytest.raises(ValueError, match='found None and 3. Tip: --way'):
    config.replace(way=None).evaluation.group_sizes()


def test_digits_are_dealt_to_few_clients_and_learned_from_in_short_runs():
  config = _resolve(
      algorithm='fed_avg',
      hparams='',
      preset=None,
      dataset='digits',
      dataset_options='',
  )
  assert (config.preset, config.data.partition) == ('demo', 'shards')
  assert (config.data.num_clients, config.data.num_new_clients) == (20, 5)
  assert config.training.clients_per_round == 5


@pytest.mark.parametrize(
    'changes, expected',
    [
        (dict(), (0.2, True)),
        (dict(preset='paper'), (0.2, False)),
        (dict(preset='demo'), (None, False)),
        (dict(hparams='eval_support_fraction=0.4'), (0.4, True)),
        (dict(hparams='eval_support_fraction=0'), (None, True)),
        (dict(hparams='f1_restrict_to_client_labels=False'), (0.2, False)),
        (dict(eval_support_fraction=0.3), (0.3, True)),
        (dict(restrict_f1_to_client_labels=False), (0.2, False)),
        (dict(algorithm='fedmeta'), (0.2, True)),
        (dict(algorithm='fed_avg'), (None, False)),
    ],
    ids=str,
)
def test_how_clients_are_tested_is_the_algorithms_unless_given(
    changes, expected
):
  config = _resolve(**(dict(algorithm='fedmeta_per', hparams='') | changes))
  found = (
      config.evaluation.eval_support_fraction,
      config.evaluation.restrict_f1_to_client_labels,
  )
  assert found == expected


def test_clients_that_come_with_the_data_are_not_dealt_otherwise():
  given = dict(
      algorithm='cafeme', hparams='', dataset='meta_dataset', dataset_options=''
  )
  config = _resolve(**given)
  assert config.data.partition == 'by_writer'
  assert (config.data.num_clients, config.data.num_new_clients) == (80, 20)
  with pytest.raises(ValueError, match="'by_writer' .* found 'shards'"):
    _resolve(**given, partition='shards')


def test_groups_are_asked_for_where_the_data_can_be_dealt(tmp_path):
  lines = [f'{k},{"ab"[k % 2]},{k % 3}' for k in range(30)]
  (tmp_path / 'own.csv').write_text('\n'.join(['x,label,who', *lines]))

  def tip(**given):
    given = dict(algorithm='frl', hparams='', dataset_options='') | given
    return run_config.few_round_tip(_resolve(**given).data)

  own = dict(
      dataset=f'csv:{tmp_path}/own.csv',
      dataset_options='client=who',
      partition='by_writer',
  )
  assert tip(**own) == (
      ' Tip: leave out client= in --dataset_options (`fit` takes npz:PATH'
      ' instead of a mapping), so that --partition=few_round can deal the'
      ' examples to clients of its own. That takes at least 8 classes.'
  )
  with pytest.raises(ValueError, match="found 'few_round'. Tip: leave out"):
    tip(**own | dict(partition='few_round'))
  assert tip(dataset='digits', partition='shards') == (
      ' Tip: --partition=few_round has groups with new classes.'
  )
  of_meta_dataset = tip(dataset='meta_dataset', partition='by_writer')
  assert 'few_round' not in of_meta_dataset and 'other data' in of_meta_dataset


def test_other_data_have_the_published_settings_and_many_clients():
  config = _resolve(
      algorithm='fed_avg',
      hparams='',
      preset=None,
      dataset='mnist',
      dataset_options='',
  )
  assert config.preset == 'paper'
  assert (config.data.num_clients, config.data.num_new_clients) == (100, 0)
  assert config.training.clients_per_round == 10


def test_the_model_of_an_algorithm_goes_before_that_of_the_data(monkeypatch):
  spec = dataclasses.replace(registry.get('frl'), model='conv4')
  monkeypatch.setitem(registry.ALGORITHMS, 'frl', spec)
  assert _resolve().model == 'conv4'
  assert _resolve(model='lenet').model == 'lenet'


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(test_fraction=0.2), 'no `test_fraction`'),
        (dict(validation_fraction=0.2), 'no `validation_fraction`'),
        (dict(num_new_clients=2), 'no `num_new_clients`'),
        (dict(num_new_clients=-1), '`num_new_clients` to be at least 0'),
        (
            dict(partition='iid', deal_test_images=False),
            'a `test_fraction` where `deal_test_images` is False',
        ),
        (dict(eval_support_fraction=1.0), 'between 0 and 1, found 1.0'),
        (dict(new_clients='bought'), 'one of held_out, redealt'),
        (dict(new_clients='redealt'), 'an `eval_support_fraction`'),
        (dict(select_best=True), '`eval_every` to be at least 1'),
        (dict(eval_from=1), '`eval_every` to be at least 1 with `eval_from` 1'),
        (dict(eval_every=1, eval_from=6), 'from `eval_from` 6 to the last, 5'),
        (
            dict(eval_every=3, eval_from=4),
            '`eval_every` 3 to evaluate a round .* none',
        ),
        (dict(validation_clients=0), '`validation_clients` of at least 1'),
        (dict(absent_clients=1.5), '`absent_clients` as a share .* found 1.5'),
        (dict(absent_clients=0.6, late_clients=0.6), 'nobody would be left'),
        (dict(select_by='median'), '`select_by` to be one of macro, micro'),
        (dict(patience=-1), '`patience` to be at least 0'),
        (dict(patience=3), '`select_best` with `patience` 3'),
        (dict(select_by='micro'), "`select_best` with `select_by` 'micro'"),
    ],
    ids=str,
)
def test_impossible_evaluations_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    _resolve(**change)


@pytest.mark.parametrize('name', run_config.FIELDS)
def test_a_value_of_another_kind_is_named_with_its_field(name):
  hints = {}
  for kind in run_config.RunConfig, *run_config._GROUPS.values():
    hints |= typing.get_type_hints(kind)
  wrong = {int: [2.5, 2.0, True, '3'], float: [True, '0.1', float('nan')]}
  kinds = typing.get_args(hints[name]) or (hints[name],)
  for value in [[2.5], *wrong.get(kinds[0], ())]:
    with pytest.raises(ValueError) as error:
      _resolve(**{name: value})
    assert f'`{name}` to be ' in str(error.value)
    assert str(error.value).endswith(f'found {value!r}.')


def test_numbers_of_numpy_are_those_of_python():
  given = dict(num_clients=4, rounds=6, seed=3, absent_clients=0.25)
  of_numpy = {
      'num_clients': np.int64(4),
      'rounds': np.uint8(6),
      'seed': np.int32(3),
      'absent_clients': np.float32(0.25),
      'stratify': np.False_,
  }
  found = _resolve(**of_numpy)
  assert json.dumps(found.to_json()) == json.dumps(_resolve(**given).to_json())
  assert found.replace(nvar=np.True_).to_json()['nvar'] is True


@pytest.mark.parametrize(
    'name, value', [('model', ''), ('partition', '')], ids=str
)
def test_an_empty_name_is_not_the_default(name, value):
  with pytest.raises(ValueError, match=f'`{name}` to be one of'):
    _resolve(**{name: value})


def test_zero_group_clients_are_not_the_default():
  assert _resolve(group_clients=0).evaluation.group_clients == 0


def test_json_there_and_back_is_the_same():
  """All fields are side by side, so no two may have one name."""
  config = _resolve()
  values = json.loads(json.dumps(config.to_json()))
  assert values == config.to_json()
  assert len(set(run_config.FIELDS)) == len(run_config.FIELDS)
  assert values.keys() == set(run_config.FIELDS)
  assert run_config.from_json(values) == config


def test_the_identity_leaves_out_what_may_change():
  config = _resolve()
  longer = config.replace(
      rounds=50,
      checkpoint_every=1,
      data_dir='elsewhere',
      protocols=(),
      eval_groups=7,
      nvar=True,
  )
  other = config.replace(seed=2)
  assert longer.identity() == config.identity()
  assert other.identity() != config.identity()


def test_a_robust_aggregation_guards_all_that_clients_send():
  robust = _resolve(algorithm='fed_avg', hparams='', aggregation='robust')
  assert robust.identity()['aggregation'] == 'robust'
  with pytest.raises(ValueError, match='ifca .*picks another model'):
    _resolve(algorithm='ifca', hparams='', aggregation='robust')
  with pytest.raises(ValueError, match='frl .*every round by itself'):
    _resolve(
        algorithm='frl',
        hparams='',
        aggregation='robust',
        aggregation_options='rule=centered',
    )


def test_a_clip_that_the_cohort_cannot_estimate_is_refused():
  with pytest.raises(ValueError, match='more than 20 clients a round .* 5'):
    _resolve(
        algorithm='fed_avg',
        hparams='',
        clients_per_round=5,
        aggregation='dp',
        aggregation_options='clip_quantile=0.5',
    )


def test_clients_in_batches_are_another_run():
  four = _resolve(execution='in_process', batched_clients=4)
  assert four.identity()['batched_clients'] == 4
  with pytest.raises(ValueError, match="'in_process' with `batched_clients` 4"):
    _resolve(batched_clients=4, execution='native')


def test_a_configuration_of_an_earlier_version_is_read():
  config = _resolve(
      algorithm='fed_rep',
      hparams='',
      dataset='mnist',
      dataset_options='rotation_groups=5,rotation_interpolation=bilinear',
      partition='by_group',
      test_fraction=0.2,
      protocols=(),
  )
  values = config.to_json()
  for name in (
      'nvar',
      'deal_test_images',
      'aggregation',
      'batched_clients',
      'eval_new_clients',
      'validation_clients',
  ):
    del values[name]
  del values['dataset_options']['rotation_interpolation']
  del values['hparams']['uniform']
  values['hparams'] |= {'averaged_head': False, 'local_unit': 'epochs'}
  assert run_config.from_json(values) == config
  assert run_config.upgrade(values).items() >= config.identity().items()
  values['hparams']['averaged_head'] = True  # Another algorithm by now.
  with pytest.raises(ValueError, match='averaged_head'):
    run_config.from_json(values)


def test_digits_that_are_not_rotated_are_those_of_an_earlier_version():
  config = _resolve(
      algorithm='fed_avg', hparams='', dataset='mnist', dataset_options=''
  )
  values = config.to_json()
  del values['dataset_options']['rotation_interpolation']
  assert run_config.from_json(values) == config


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
