"""Which protocols there are for whom, and what they report."""

import csv
import dataclasses
import functools

import numpy as np
import pytest
import tree

from binaries import accuracy_table
from tff_meta import registry
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import normalized_variance
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import evaluator as evaluator_lib
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import run_config

_DEFAULTS = dict(
    algorithm='fed_per',
    preset='paper',
    dataset='synthetic',
    dataset_options='num_classes=12,examples_per_class=20,noise=2.0',
    test_fraction=0.5,
    stratify=False,
    validation_fraction=0.0,
    num_clients=6,
    num_new_clients=2,
    new_clients='held_out',
    clients_per_round=3,
    rounds=1,
    seed=1,
    checkpoint_every=1,
    eval_every=0,
    select_best=False,
    select_by='macro',
    patience=0,
    validation_groups=1,
    protocols=(),
    eval_groups=3,
    execution='native',
)
# A new group has one round: tracing a group's rounds takes most of the time.
_FEW_ROUND = dict(
    partition='few_round',
    test_fraction=None,
    num_clients=3,
    num_new_clients=0,
    hparams='rounds=1',
    reference_hparams='rounds=1',
)


@functools.cache
def prepare(**changes):
  return experiment_lib.prepare(run_config.resolve(**(_DEFAULTS | changes)))


@pytest.fixture(scope='module')
def experiment():
  return prepare()


@functools.cache
def build_evaluator(**changes):
  """Shared, as what evaluates is traced once for an evaluator."""
  return evaluator_lib.Evaluator(prepare(**changes))


@pytest.fixture(scope='module')
def evaluator():
  return build_evaluator()


@pytest.fixture(scope='module')
def process(experiment):
  """Clients of FedPer keep their heads."""
  return experiment.build_process()


def constant_head(process, label):
  """The memory of a client that answers the same label to everything."""
  memory = tree.map_structure(np.zeros_like, process.initial_memory)
  (bias,) = (leaf for leaf in tree.flatten(memory) if leaf.ndim == 1)
  bias[label] = 1
  return memory


@pytest.fixture(scope='module')
def states(experiment, process):
  """The last client was never sampled; the others answer their first label."""
  store = client_state_store.InMemoryStore()
  for client_id in experiment.dataset.client_ids()[:-1]:
    label = int(experiment.dataset.client(client_id).test.y[0])
    memory = constant_head(process, label)
    store.write(client_id, 1, checkpoints.to_arrays(memory))
  return store


@pytest.fixture(scope='module')
def models(process, states):
  return (
      protocols.model(process, process.initialize(), states),
      protocols.untrained_model(process),
  )


def _evaluate(evaluator, name, trained, untrained):
  return evaluator.evaluate(name, {'': trained}, untrained, lambda _: None)['']


@pytest.mark.parametrize(
    'changes, offered',
    [
        ({}, ('known_clients', 'new_clients')),
        (dict(num_new_clients=0), ('known_clients',)),
        (dict(test_fraction=0.0), ()),
        (dict(algorithm='frl', partition='shards'), ()),
        (
            dict(algorithm='frl', **_FEW_ROUND),
            (
                'new_groups',
                'new_groups_iid',
                'new_groups_mixed',
                'new_groups_mixed_iid',
            ),
        ),
        (
            dict(algorithm='fed_avg_proto', **_FEW_ROUND),
            ('new_class_clients',),
        ),
    ],
    ids=str,
)
def test_what_is_offered(changes, offered):
  evaluator = evaluator_lib.Evaluator(prepare(**changes))
  assert evaluator.offered == offered
  defaults = tuple(n for n in offered if n in protocols.DEFAULT_PROTOCOLS)
  assert evaluator.choose(()) == defaults
  assert evaluator.choose(('none',)) == ()
  with pytest.raises(
      ValueError, match='new_groups, .*new_class_clients, found'
  ):
    evaluator.choose(('new_people',))


def test_known_clients_have_what_they_kept(experiment, evaluator, models):
  summary, report = _evaluate(evaluator, 'known_clients', *models)
  ids = experiment.dataset.client_ids()
  assert report.ids == ids
  tests = [experiment.dataset.client(client_id).test for client_id in ids]
  expected = [np.mean(test.y == test.y[0]) for test in tests]
  assert report.accuracies[:-1] == pytest.approx(expected[:-1])
  # Without memories all have the initial head, as the last one has anyway.
  untrained, reference = _evaluate(evaluator, 'known_clients', *models[::-1])
  assert reference.accuracies[-1] == report.accuracies[-1]
  gain = report.accuracies - reference.accuracies
  found = summary['references']['untrained']
  assert found['accuracy_mean'] == untrained['accuracy_mean']
  assert found['gain'] == pytest.approx(gain.mean()) and abs(gain.mean()) > 0.1
  assert found['gain_half_width_95'] == pytest.approx(
      1.96 * gain.std(ddof=1) / np.sqrt(6)
  )


def test_all_protocols_of_clients_have_the_same_keys(
    evaluator, models, tmp_path
):
  names = ('known_clients', 'new_clients')
  trained, untrained = models
  lines = []
  both = evaluator.evaluate_all(
      names,
      {'': untrained, '_best': trained},
      untrained,
      tmp_path,
      lines.append,
  )
  assert len(lines) == len(names) * 3  # The untrained model once, not twice.
  assert both[''] == {
      name: _evaluate(evaluator, name, untrained, untrained)[0]
      for name in names
  }
  found = both['_best']
  assert tuple(found) == names
  assert found['known_clients'].keys() == found['new_clients'].keys()
  assert found['new_clients']['num_clients'] == 2
  for name in names:
    with open(tmp_path / f'clients_{name}_best.csv', newline='') as file:
      rows = list(csv.DictReader(file))
    assert len(rows) == found[name]['num_clients']
    for column in ('accuracy', 'nll', 'brier', 'ece', 'nll_before'):
      mean = np.mean([float(row[column]) for row in rows])
      assert mean == pytest.approx(found[name][f'{column}_mean'])
  table = accuracy_table.format_table(found)
  for part in ('known_clients (6 clients', 'initial model', 'worst', 'NLL'):
    assert part in table


def test_a_curve_that_there_is_not_is_said(evaluator, models):
  """Once, however many models are tested; FedPer has none."""
  trained, untrained = models
  for one, count in ((evaluator, 0), (build_evaluator(curve=True), 1)):
    lines = []
    one.evaluate(
        'known_clients',
        {'': trained, '_best': trained},
        untrained,
        lines.append,
    )
    said = [line for line in lines if 'No curve of known_clients' in line]
    assert len(said) == count
    # The untrained model and the trained one, which is the best one, too.
    assert sum(line.startswith('Evaluating') for line in lines) == 2


def test_spread_of_classes_is_that_of_known_clients_in_the_global_body(
    experiment, evaluator, models
):
  trained, untrained = models
  body = tree.map_structure(
      lambda w: np.cos(np.arange(w.size, dtype=w.dtype)).reshape(w.shape),
      tree.map_structure(np.asarray, trained.weights['body']),
  )
  trained = trained._replace(weights=trained.weights | {'body': body})
  tests = [
      experiment.dataset.client(c).test for c in experiment.dataset.client_ids()
  ]
  x = np.concatenate([test.x for test in tests])
  expected = normalized_variance.normalized_variance(
      experiment.model.embed(body, x, None).numpy(),
      np.concatenate([test.y for test in tests]),
  )
  asked = build_evaluator(nvar=True)
  known, _ = _evaluate(asked, 'known_clients', trained, untrained)
  assert known['nvar'] == pytest.approx(expected, rel=1e-4)
  assert f'nVAR {known["nvar"]:.4g}' in accuracy_table.format_table(
      {'a': known}
  )
  new, _ = _evaluate(asked, 'new_clients', trained, untrained)
  assert 'nvar' not in new
  without, _ = _evaluate(evaluator, 'known_clients', trained, untrained)
  assert without == {k: v for k, v in known.items() if k != 'nvar'}


def test_a_network_that_tells_no_classes_apart_has_no_spread(models):
  """It is said, and all else is measured."""
  trained, untrained = models
  weights = tree.map_structure(np.zeros_like, trained.weights)
  lines = []
  results = build_evaluator(nvar=True).evaluate(
      'known_clients',
      {'': trained._replace(weights=weights)},
      untrained,
      lines.append,
  )
  known, _ = results['']
  assert known['nvar'] is None and known['num_clients'] == 6
  assert 'nVAR' not in accuracy_table.format_table({'a': known})
  (said,) = (line for line in lines if 'nVAR' in line)
  assert 'equal ones' in said


def test_spread_of_classes_needs_one_network():
  evaluator = evaluator_lib.Evaluator(prepare(algorithm='ifca', nvar=True))
  with pytest.raises(ValueError, match="one model.* found 'ifca'"):
    evaluator.choose(())


def test_evaluation_on_the_way_is_the_known_clients_or_their_validation(
    evaluator, process, states, models
):
  weights = process.get_model_weights(process.initialize())
  evaluation = evaluator.on_the_way(process)
  column = 'known_clients/accuracy'
  assert evaluation.names == (column, column + '_micro')
  assert evaluation.best_by is None
  final, _ = _evaluate(evaluator, 'known_clients', *models)
  measured = evaluation.measure(weights, states)
  assert measured == {
      column: final['accuracy_mean'],
      column + '_micro': final['accuracy_micro'],
  }

  validated = prepare(
      partition='dirichlet',  # Clients of several sizes.
      partition_options='alpha=1.0,min_examples=5',
      validation_fraction=0.3,
      eval_every=1,
      select_best=True,
      eval_support_fraction=0.5,  # Not of the validation examples.
  )
  evaluation = evaluator_lib.Evaluator(validated).on_the_way(process)
  column = 'validation_clients/accuracy'
  assert evaluation.names[0] == evaluation.best_by == column
  new = 'new_clients/accuracy'
  assert evaluation.names[2:] == (new, new + '_micro')
  clients = [
      validated.dataset.client(client_id)
      for client_id in validated.dataset.client_ids()
  ]
  store = client_state_store.InMemoryStore()
  labels = [int(client.validation.y[0]) for client in clients]
  for client_id, label in zip(
      validated.dataset.client_ids(), labels, strict=True
  ):
    memory = constant_head(process, label)
    store.write(client_id, 1, checkpoints.to_arrays(memory))
  expected = [
      np.mean(client.validation.y == label)
      for client, label in zip(clients, labels, strict=True)
  ]
  found = evaluation.measure(weights, store)
  assert found[column] == pytest.approx(np.mean(expected))
  sizes = [len(client.validation.y) for client in clients]
  share = np.average(expected, weights=sizes)
  assert abs(share - np.mean(expected)) > 1e-3
  assert found[column + '_micro'] == pytest.approx(share)


def test_new_clients_are_measured_on_the_way_and_few_of_many(
    process, models, states
):
  """Every second of six known ones, and both new ones, as at the end."""
  few = prepare(rounds=9, eval_every=None, validation_clients=3)
  evaluator = evaluator_lib.Evaluator(few)
  evaluation = evaluator.on_the_way(process)
  weights = process.get_model_weights(process.initialize())
  measured = evaluation.measure(weights, states)
  assert tuple(measured) == evaluation.names
  _, known = _evaluate(evaluator, 'known_clients', *models)
  expected = known.accuracies[[0, 2, 4]].mean()
  assert measured['known_clients/accuracy'] == pytest.approx(expected)
  assert abs(expected - known.accuracies.mean()) > 1e-3
  new, _ = _evaluate(evaluator, 'new_clients', *models)
  assert measured['new_clients/accuracy'] == new['accuracy_mean']
  assert evaluator.why_no_curve() is None


@pytest.mark.parametrize(
    'changes, why',
    [
        (dict(algorithm='fed_avg', **_FEW_ROUND), 'begins with random'),
        (dict(algorithm='fed_avg_proto', way=4, **_FEW_ROUND), '4 meta_valid'),
        (dict(test_fraction=0.0), 'there is nobody whom'),
    ],
    ids=str,
)
def test_nobody_is_measured_on_the_way_where_that_tells_nothing(changes, why):
  evaluator = evaluator_lib.Evaluator(prepare(eval_every=None, **changes))
  assert why in evaluator.why_no_curve()


def test_no_round_is_selected_by_new_clients(monkeypatch):
  spec = dataclasses.replace(registry.get('fed_per'), uses=('new_client',))
  monkeypatch.setitem(registry.ALGORITHMS, 'fed_per', spec)
  shown = evaluator_lib.Evaluator(prepare(eval_every=1))
  assert shown.check_on_the_way() == 'new_clients/accuracy'
  selecting = prepare(eval_every=1, select_best=True, validation_fraction=0.2)
  with pytest.raises(ValueError, match='offers nothing'):
    evaluator_lib.Evaluator(selecting).check_on_the_way()


def test_the_best_round_is_that_of_the_chosen_mean(process):
  by_micro = prepare(
      validation_fraction=0.3,
      eval_every=1,
      select_best=True,
      select_by='micro',
  )
  evaluation = evaluator_lib.Evaluator(by_micro).on_the_way(process)
  assert evaluation.best_by == 'validation_clients/accuracy_micro'


def test_clients_of_validation_classes_are_measured_on_the_way(monkeypatch):
  """As at the end, but in other groups, of other classes."""
  experiment = prepare(
      algorithm='fed_avg_proto',
      eval_every=1,
      select_best=True,
      validation_groups=2,
      **_FEW_ROUND,
  )
  process = experiment.build_process()
  state = process.initialize()
  evaluator = evaluator_lib.Evaluator(experiment)
  evaluation = evaluator.on_the_way(process)
  column = 'validation_new_class_clients/accuracy'
  assert evaluation.names == (column, column + '_micro')
  assert evaluation.best_by == column
  drawn = []
  sample = groups_lib.sample_group

  def sample_group(*args, **options):
    drawn.append(sample(*args, **options))
    return drawn[-1]

  monkeypatch.setattr(groups_lib, 'sample_group', sample_group)
  measured = evaluation.measure(process.get_model_weights(state), None)
  split = experiment.dataset.class_pools.corpus.class_split
  assert len(drawn) == 2
  for group in drawn:
    assert set(group.classes) <= set(split.validation)
  trained = protocols.model(process, state, None)
  as_test = dataclasses.replace(
      experiment,
      config=experiment.config.replace(eval_groups=2),
  )
  monkeypatch.setattr(
      groups_lib,
      'sample_group',
      lambda *args, **options: drawn[options['index']],
  )
  final, _ = _evaluate(
      evaluator_lib.Evaluator(as_test), 'new_class_clients', trained, trained
  )
  assert measured == {
      column: final['accuracy_mean'],
      column + '_micro': final['accuracy_micro'],
  }


def test_too_few_validation_classes_are_refused_at_once():
  evaluator = evaluator_lib.Evaluator(
      prepare(
          algorithm='fed_avg_proto',
          eval_every=1,
          way=4,
          **_FEW_ROUND,
      )
  )
  with pytest.raises(ValueError, match='4 meta_validation classes'):
    evaluator.check_on_the_way()


def test_what_clients_only_do_after_training_is_not_measured_on_the_way():
  """FedEC's stored models are, those trained once more are not."""
  changes = dict(algorithm='fedec', hparams='inner_learning_rate=0.3,tau=2')
  experiment = prepare(**changes)
  process = experiment.build_process()
  trained = protocols.untrained_model(process)
  evaluator = evaluator_lib.Evaluator(experiment)
  final, _ = _evaluate(evaluator, 'known_clients', trained, trained)
  evaluation = evaluator.on_the_way(process)
  measured = evaluation.measure(
      process.get_model_weights(process.initialize()),
      client_state_store.InMemoryStore(),
  )
  before = final['accuracy_before_mean']
  assert measured['known_clients/accuracy'] == before
  assert final['accuracy_mean'] != before


def test_there_must_be_something_to_select_on():
  evaluator = evaluator_lib.Evaluator(prepare(eval_every=1, select_best=True))
  with pytest.raises(ValueError, match='--validation_fraction'):
    evaluator.check_on_the_way()
  nothing = evaluator_lib.Evaluator(prepare(eval_every=1, test_fraction=0.0))
  with pytest.raises(ValueError, match='found nobody: .*offers nothing'):
    nothing.check_on_the_way()
  groups = evaluator_lib.Evaluator(prepare(algorithm='frl', **_FEW_ROUND))
  assert groups.check_on_the_way() == 'validation_groups/accuracy'
  changes = dict(eval_every=1, select_best=True, patience=2, **_FEW_ROUND)
  scratch = evaluator_lib.Evaluator(prepare(algorithm='fed_avg', **changes))
  with pytest.raises(ValueError, match='`patience` .* found 2: in new_groups'):
    scratch.check_on_the_way()


def test_a_protocol_that_comes_twice_is_run_once(evaluator):
  names = ['new_clients', 'known_clients', 'new_clients']
  assert evaluator.choose(names) == ('new_clients', 'known_clients')


@pytest.mark.ci
def test_groups_have_the_keys_of_clients(evaluator, models, tmp_path):
  clients, _ = _evaluate(evaluator, 'new_clients', *models)
  groups = prepare(algorithm='frl', eval_groups=2, **_FEW_ROUND)
  untrained = protocols.untrained_model(groups.build_process())
  lines = []
  evaluation = evaluator_lib.Evaluator(groups).evaluate_all(
      ['new_groups'], {'_best': untrained}, untrained, tmp_path, lines.append
  )['_best']
  assert lines == [
      'Evaluating new_groups: initial model, untrained.',
      'Evaluating new_groups: FedAvg from scratch.',
      'Evaluating new_groups: trained model, best round.',
  ]
  found = evaluation['new_groups']
  assert found.keys() - clients.keys() == {'num_groups'}
  assert clients.keys() <= found.keys()
  assert (found['num_groups'], found['num_clients']) == (2, 6)
  assert found['share_hurt'] is found['accuracy_before_mean'] is None
  assert found['references']['untrained']['gain'] == 0
  with open(tmp_path / 'groups_new_groups_best.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert [row['group_id'] for row in rows] == ['group_0', 'group_1']
  accuracies = [float(row['accuracy']) for row in rows]
  assert np.mean(accuracies) == found['accuracy_mean']
  assert np.std(accuracies) == found['accuracy_std']
  assert min(accuracies) == found['accuracy_worst_decile']
  table = accuracy_table.format_table(evaluation)
  assert 'worst decile' in table and 'hurt' not in table


@pytest.mark.parametrize(
    'name, file, changes',
    [
        (
            'new_groups',
            'groups_new_groups',
            dict(algorithm='fed_avg', eval_groups=2, **_FEW_ROUND),
        ),
        ('new_clients', 'clients_new_clients', dict(algorithm='local')),
    ],
)
def test_who_ignores_what_was_trained(tmp_path, name, file, changes):
  experiment = prepare(**changes)
  evaluator = evaluator_lib.Evaluator(experiment)
  assert evaluator.protocols[name].starts_from_scratch
  untrained = protocols.untrained_model(experiment.build_process())
  expected, _ = _evaluate(evaluator, name, untrained, untrained)
  useless = untrained._replace(
      weights=tree.map_structure(lambda w: w * np.nan, untrained.weights)
  )
  lines = []
  evaluation = evaluator.evaluate_all(
      [name],
      {'': useless, '_best': useless},
      untrained,
      tmp_path,
      lines.append,
  )
  assert lines == [f'Evaluating {name}: from scratch.']
  assert evaluation == {suffix: {name: expected} for suffix in ('', '_best')}
  assert not evaluation[''][name]['references']
  assert (tmp_path / f'{file}_best.csv').exists()
  table = accuracy_table.format_table(evaluation[''])
  assert '  from scratch ' in table and 'trained model' not in table


def test_without_references_only_the_trained_model_is_tested(
    evaluator, models, tmp_path
):
  _, untrained = models
  lines = []
  found = build_evaluator(references=False).evaluate_all(
      ['known_clients'], {'': untrained}, untrained, tmp_path, lines.append
  )['']
  assert lines == ['Evaluating known_clients: trained model.']
  expected, _ = _evaluate(evaluator, 'known_clients', untrained, untrained)
  assert expected['references']
  assert found == {'known_clients': expected | {'references': {}}}
  table = accuracy_table.format_table(found)
  assert 'trained model' in table and 'untrained' not in table


def test_clients_of_new_classes_are_averaged_by_group():
  """Untrained against untrained: no gain, whatever the interval."""
  experiment = prepare(algorithm='fed_avg_proto', **_FEW_ROUND)
  evaluator = evaluator_lib.Evaluator(experiment)
  untrained = protocols.untrained_model(experiment.build_process())
  summary, report = _evaluate(
      evaluator, 'new_class_clients', untrained, untrained
  )
  assert summary['num_groups'] == 3 and summary['num_clients'] == 9
  means = report.accuracies.reshape(3, 3).mean(1)
  assert summary['accuracy_mean'] == pytest.approx(means.mean())
  # Means of a client's examples are of its own classes alone.
  np.testing.assert_array_equal(report.accuracies_among_own, report.accuracies)
  assert summary['accuracy_half_width_95'] == pytest.approx(
      1.96 * means.std(ddof=1) / np.sqrt(3)
  )
  assert summary['references']['untrained']['gain'] == 0
  assert summary['share_hurt'] is None
