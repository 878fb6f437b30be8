import collections
import contextlib
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import aggregation
from tff_meta import method
from tff_meta import models
from tff_meta import traffic
from tff_meta.client_works import client_work
from tff_meta.data import availability
from tff_meta.learners import local_sgd
from tff_meta.training import atomic_files
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import loop
from tff_meta.training import metric_writers
from tff_meta.training import run
from tff_meta.training import run_directory

_CONFIG = {'algorithm': 'fed_avg', 'seed': 3}
_ROUNDS = 7


def _build_process(num_features):
  """Linear regression by TFF's own federated averaging, with momentum."""

  def model_fn():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential(
            [
                tf.keras.layers.InputLayer(num_features),
                tf.keras.layers.Dense(1, kernel_initializer='zeros'),
            ]
        ),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=(
            tf.TensorSpec([None, num_features], tf.float32),
            tf.TensorSpec([None, 1], tf.float32),
        ),
    )

  return tff.learning.algorithms.build_weighted_fed_avg(
      model_fn,
      tff.learning.optimizers.build_sgdm(0.1),
      tff.learning.optimizers.build_sgdm(1.0, momentum=0.5),
  )


@pytest.fixture(scope='module')
def process():
  return _build_process(num_features=2)


def _cohort(round_num):
  """Two other clients every round."""
  return [f'{round_num}/3', f'{round_num}/4']


def _client_data(client_id, part='train'):
  """Three points of one client and four of the other."""
  round_num, num_points = map(int, client_id.split('/'))
  rng = np.random.default_rng([round_num, num_points])
  x = rng.standard_normal((num_points, 2), np.float32)
  y = x @ np.float32([[2.0], [-1.0]])
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)


_EVALUATION = loop.Evaluation(
    ('slope',), lambda w, _: {'slope': float(w.trainable[0][0, 0])}
)


def _train(
    process,
    root,
    *,
    cohort=_cohort,
    client_data=_client_data,
    evaluation=_EVALUATION,
    rounds=_ROUNDS,
    should_stop=lambda: False,
    report=pytest.fail,
    **options,
):
  """Begins or continues the run in `root`, unless a checkpoint is given."""
  directory = run_directory.RunDirectory(root)
  root.mkdir(exist_ok=True)
  store = checkpoints.CheckpointStore(directory.checkpoints)
  states = client_state_store.SqliteStore(directory.client_states)
  with contextlib.closing(states):
    return loop.train(
        process,
        cohort,
        client_data,
        evaluation,
        is_cached=lambda client_id: client_id.endswith('/3'),
        client_states=states,
        directory=directory,
        config=_CONFIG,
        schedule=loop.Schedule(
            rounds,
            checkpoint_every=3,
            eval_every=2,
            eval_from=options.get('eval_from', 0),
            patience=options.get('patience', 0),
        ),
        checkpoint=options.get('checkpoint', store.load_latest(pytest.fail)),
        should_stop=should_stop,
        report=report,
        why_not_trained=options.get('why_not_trained', lambda _: None),
        sent=options.get('sent', traffic.UNKNOWN),
        available=options.get('available', availability.ALWAYS),
    )


def _files(root):
  """Everything that has to be the same however often a run was stopped."""
  newest = max((root / 'checkpoints').iterdir())
  return (root / 'metrics.csv').read_bytes(), newest.read_bytes()


@pytest.fixture(scope='module')
def whole(process, tmp_path_factory):
  root = tmp_path_factory.mktemp('whole') / 'run'
  state, rounds, best = _train(process, root)
  assert rounds == _ROUNDS and best is None
  assert np.any(process.get_model_weights(state).trainable[0])
  return _files(root)


def test_metrics_have_a_row_a_round_and_evaluations_where_due(whole, tmp_path):
  (tmp_path / 'metrics.csv').write_bytes(whole[0])
  columns = metric_writers.read_metrics(tmp_path / 'metrics.csv')
  assert columns['round'] == list(range(1, _ROUNDS + 1))
  assert np.isfinite(columns['train/loss']).all()
  evaluated = np.isfinite(columns['slope'])
  assert evaluated.tolist() == [False, True, False, True, False, True, False]


def test_bytes_are_those_of_all_clients_of_a_round(process, tmp_path):
  """Where they are known; a run that began without goes on without."""

  def cohort(round_num):  # Two clients, then one.
    return [f'{round_num}/3', f'{round_num}/4'][: 1 + round_num % 2]

  for sent, expected in (
      (traffic.of_process(process), {'train/bytes_down', 'train/bytes_up'}),
      (traffic.Traffic(None, 7), {'train/bytes_up'}),
      (traffic.UNKNOWN, set()),
  ):
    root = tmp_path / str(len(expected))
    _train(process, root, cohort=cohort, rounds=2, sent=sent)
    columns = metric_writers.read_metrics(root / 'metrics.csv')
    assert {n for n in columns if 'bytes' in n} == expected
    for name, of_one in zip(('down', 'up'), sent, strict=True):
      if of_one is not None:
        assert columns[f'train/bytes_{name}'] == [2 * of_one, of_one]

  _train(process, root, rounds=3, sent=traffic.of_process(process))
  columns = metric_writers.read_metrics(root / 'metrics.csv')
  assert columns['round'] == [1, 2, 3]
  assert not [name for name in columns if 'bytes' in name]


def test_clients_that_are_not_there_are_counted_also_after_a_stop(
    process, tmp_path
):
  """Those who are late are sent the model, and send nothing that counts."""
  options = dict(
      cohort=lambda round_num: [f'{round_num}/{i}' for i in range(1, 9)],
      available=availability.Availability(absent=0.3, late=0.3, slow=0.2),
      sent=traffic.Traffic(5, 7),
  )
  _train(process, tmp_path / 'whole', **options)
  _train(process, tmp_path / 'run', rounds=3, **options)
  _train(process, tmp_path / 'run', **options)
  assert _files(tmp_path / 'run') == _files(tmp_path / 'whole')
  columns = metric_writers.read_metrics(tmp_path / 'run/metrics.csv')
  absent, late, slow, down, up = (
      np.array(columns[f'train/{name}'])
      for name in (
          *(f'num_{kind}_clients' for kind in ('absent', 'late', 'slow')),
          *('bytes_down', 'bytes_up'),
      )
  )
  assert absent.any() and late.any() and slow.any()
  np.testing.assert_array_equal(down, 5 * (8 - absent))
  np.testing.assert_array_equal(up, 7 * (8 - absent - late))
  assert (columns['train/num_examples'] < 4 * 8 * np.ones(_ROUNDS)).all()


def test_no_evaluation_before_the_first_that_is_wanted(
    process, tmp_path, capsys
):
  _train(process, tmp_path / 'run', eval_from=5)
  timings = (tmp_path / 'run' / 'timings.csv').read_text().splitlines()
  # Of a round's two clients one is in memory.
  assert [line.split(',')[2] for line in timings[1:]] == _ROUNDS * ['0.5']
  columns = metric_writers.read_metrics(tmp_path / 'run' / 'metrics.csv')
  assert np.isfinite(columns['slope']).tolist() == 5 * [False] + [True, False]
  printed = capsys.readouterr().err.splitlines()
  shown = [line for line in printed if 'slope' in line]
  assert shown == [f'round 6: slope {columns["slope"][5]:.4f}']


def test_checkpoints_are_those_of_the_schedule_and_the_last(process, tmp_path):
  _train(process, tmp_path / 'run')
  names = sorted(p.name for p in (tmp_path / 'run' / 'checkpoints').iterdir())
  assert names == [f'round_00000000{n}.ckpt' for n in (3, 6, 7)]


@pytest.mark.parametrize(
    'values, patience, expected',
    [
        ([5, 4, 3], 1, True),
        ([5, 4, 3], 2, False),
        ([5, 4, 3], 0, False),
        ([5, 4, 4, 4], 1, False),  # Not smaller than the one before.
        ([5, 4, 4, 3], 1, True),
        ([5, 3, 4, 3], 1, True),  # A rise that is no new best.
        ([5, 4, 6, 5], 1, False),  # A new best.
        ([5, 4, 3, 5], 1, True),  # An equal one is none.
        ([], 1, False),
    ],
)
def test_patience_is_a_number_of_drops_since_the_best(
    values, patience, expected
):
  assert loop.is_out_of_patience(values, patience) is expected


@pytest.mark.ci
def test_training_ends_out_of_patience_however_often_it_was_stopped(
    process, tmp_path
):

  def measure(weights, client_states):
    del client_states
    slope = float(weights.trainable[0][0, 0])
    return {'slope': slope, 'score': -slope}

  evaluation = loop.Evaluation(('slope', 'score'), measure, best_by='score')
  options = dict(evaluation=evaluation, rounds=24)
  _train(process, tmp_path / 'all', **options)
  columns = metric_writers.read_metrics(tmp_path / 'all' / 'metrics.csv')
  scores = columns['score'][1::2]
  ends = {}
  for patience in (1, 2):
    ends[patience] = 2 * next(
        n for n in range(13) if loop.is_out_of_patience(scores[:n], patience)
    )
  assert 4 < ends[1] < ends[2] < 24
  for patience, end in ends.items():  # The second goes on after the first.
    options['patience'] = patience
    assert _train(process, tmp_path / 'whole', **options).rounds == end
    assert _train(process, tmp_path / 'whole', **options).rounds == end
  for _ in range(end + 1):
    stopped = _train(
        process, tmp_path / 'often', should_stop=lambda: True, **options
    )
  assert stopped.rounds == end
  assert _files(tmp_path / 'often') == _files(tmp_path / 'whole')


class _CrashError(Exception):
  pass


@pytest.mark.parametrize('last_write', range(6))
def test_a_crash_at_any_write_is_continued(
    process, whole, tmp_path, monkeypatch, last_write
):
  """Dies at the n-th file that is written: timings, then checkpoints."""
  writes = []
  write_bytes = atomic_files.write_bytes

  def write_or_crash(path, data):
    if len(writes) == last_write:
      raise _CrashError
    writes.append(path)
    write_bytes(path, data)

  with monkeypatch.context() as patch:
    patch.setattr(atomic_files, 'write_bytes', write_or_crash)
    try:
      _train(process, tmp_path / 'run')
    except _CrashError:
      pass
    else:
      assert len(writes) <= last_write

  _train(process, tmp_path / 'run')

  assert _files(tmp_path / 'run') == whole


# Checkpoints follow rounds 3, 6 and 7.
@pytest.mark.parametrize('last_round', [1, 3, 4, 7])
def test_a_crash_between_metrics_and_checkpoint_is_continued(
    process, whole, tmp_path, monkeypatch, last_round
):
  append = metric_writers.MetricsFile.append

  def append_and_crash(self, round_num, values):
    append(self, round_num, values)
    if round_num == last_round:
      raise _CrashError

  with monkeypatch.context() as patch:
    patch.setattr(metric_writers.MetricsFile, 'append', append_and_crash)
    with pytest.raises(_CrashError):
      _train(process, tmp_path / 'run')

  _train(process, tmp_path / 'run')

  assert _files(tmp_path / 'run') == whole


def test_a_stop_is_a_checkpoint_and_is_continued(process, whole, tmp_path):
  asked = iter([False, True])
  _, rounds, _ = _train(
      process, tmp_path / 'run', should_stop=lambda: next(asked)
  )
  assert rounds == 2
  newest = max((tmp_path / 'run' / 'checkpoints').iterdir())
  assert newest.name == 'round_000000002.ckpt'

  _train(process, tmp_path / 'run')

  assert _files(tmp_path / 'run') == whole


def test_a_state_that_changes_its_shape_is_continued(tmp_path):
  """A tree of noise has one level after rounds 1 and 3, two after 2 and 4."""
  tree_of_noise = tff.aggregators.DifferentiallyPrivateFactory.tree_aggregation(
      noise_multiplier=0.5,
      clients_per_round=3.0,
      l2_norm_clip=1.0,
      record_specs=collections.OrderedDict(
          body=collections.OrderedDict(w=tf.TensorSpec([2])),
          head=collections.OrderedDict(),
      ),
      noise_seed=7,
  )
  process = method.build_process(
      _remembering(),
      models.build('mlp', (1,), None),
      seed=5,
      aggregation=aggregation.OfModels(
          tff.aggregators.as_weighted_aggregator(tree_of_noise)
      ),
  )
  _train_stateful(process, tmp_path / 'whole')
  root, reports = tmp_path / 'run', []
  for last in (2, 4):
    trained = _train_stateful(process, root, rounds=last)
    shapes = {
        array.shape
        for name, array in checkpoints.to_arrays(trained.state).items()
        if name.endswith('level_buffer_idx')
    }
    assert shapes == {(2,)}
    assert _find(process, root, reports).position.rounds == last
  _train_stateful(process, root)
  assert _files(root) == _files(tmp_path / 'whole')
  assert not reports
  assert checkpoints.max_bytes(process) > len(_files(root)[1])


def test_every_reason_not_to_train_is_reported_once(
    process, tmp_path, monkeypatch
):
  """Clients of round 5 do not learn, but lack nothing: that may be so."""
  flatten = metric_writers.flatten_metrics
  rounds = iter(
      [(4, 4, 0, 0), (4, 1, 2, 1), (4, 0, 3, 0), (4, 0, 0, 0), (4, 3, 0, 0)]
      + [(4, 2, 1, 1)] * 2
  )
  names = ('clients', 'trained_clients', 'non_finite_clients', 'empty_clients')

  def flatten_metrics(metrics):
    counts = zip(names, next(rounds), strict=True)
    return flatten(metrics) | {
        f'train/num_{name}': np.float32(count) for name, count in counts
    }

  monkeypatch.setattr(metric_writers, 'flatten_metrics', flatten_metrics)
  lines = []
  lacks = {'3/3': ' It lacks a class.'}
  _train(
      process,
      tmp_path / 'run',
      report=lines.append,
      why_not_trained=lambda cohort: lacks.get(cohort[0]),
  )
  starts = (
      'Warning: 2 clients of round 2 sent numbers',
      'Warning: 1 client of round 2 had no examples',
      'Warning: 1 client of round 3 had examples, but learned nothing from'
      ' them. It lacks a class.',
      'Warning: 4 clients of round 4 had examples, but learned nothing from'
      ' them.',
  )
  assert len(lines) == len(starts)
  assert all(map(str.startswith, lines, starts))


def test_an_evaluation_that_is_no_number_is_not_the_best(process, tmp_path):
  """Nor does it count against the patience."""
  slopes = iter([0.3, math.nan, 0.2])
  evaluation = loop.Evaluation(
      ('slope',), lambda *_: {'slope': next(slopes)}, best_by='slope'
  )
  trained = _train(process, tmp_path / 'run', evaluation=evaluation, patience=1)
  assert (trained.rounds, trained.best.rounds) == (_ROUNDS, 2)


def test_an_extended_run_is_a_longer_run(process, whole, tmp_path):
  _train(process, tmp_path / 'run', rounds=4)
  _train(process, tmp_path / 'run')
  assert _files(tmp_path / 'run') == whole


def test_a_finished_run_is_left_alone(process, whole, tmp_path):
  _train(process, tmp_path / 'run')
  _, rounds, _ = _train(process, tmp_path / 'run')
  assert rounds == _ROUNDS
  assert _files(tmp_path / 'run') == whole


def test_a_checkpoint_of_another_process_is_refused(process, tmp_path):
  _train(process, tmp_path / 'run', rounds=3)
  other = _build_process(num_features=3)
  with pytest.raises(
      checkpoints.IncompatibleCheckpointError, match=r'float32\[3, 1\]'
  ):
    _train(other, tmp_path / 'run')


@pytest.mark.parametrize(
    'every, first, expected',
    [
        (0, 0, []),
        (1, 0, [1, 2, 3, 4, 5, 6]),
        (2, 0, [2, 4, 6]),
        (1, 5, [5, 6]),
        (2, 4, [4, 6]),
        (2, 5, [6]),
    ],
)
def test_rounds_that_are_evaluated(every, first, expected):
  schedule = loop.Schedule(6, 1, every, first)
  rounds = range(1, schedule.num_rounds + 1)
  assert [r for r in rounds if schedule.evaluates(r)] == expected


@pytest.mark.parametrize(
    'values', [(0, 1, 0), (1, 0, 0), (1, 1, -1), (1, 1, 0, -1)], ids=str
)
def test_an_impossible_schedule_is_refused(values):
  with pytest.raises(ValueError, match='at least'):
    loop.Schedule(*values)


# Clients that remember: three of four take part in a round, the others wait.
_CLIENTS = ('a', 'b', 'c', 'd')


def _rotating_cohort(round_num):
  return [c for k, c in enumerate(_CLIENTS) if (k - round_num) % 4]


def _scalar_data(client_id, part='train'):
  x = np.float32([[1 + _CLIENTS.index(client_id)]])
  batch = collections.OrderedDict(x=x, y=np.int32([0]))
  return collections.OrderedDict(
      examples=tf.data.Dataset.from_tensors(batch),
      salt=tf.data.Dataset.from_tensors(np.int32(3)),
  )


def _remember(weights, client):
  """Moves by the sum of what the client has seen, a random number included."""
  drawn = tf.random.stateless_uniform([], client.seed)
  total = client.memory.value + tf.reduce_sum(client.examples.x) + drawn
  update = tf.nest.map_structure(lambda w: tf.fill(tf.shape(w), total), weights)
  return client_work.ClientOutput(
      update,
      tf.constant(1.0),
      local_sgd.LocalReport(total, tf.constant(1.0)),
      memory=total,
  )


def _remembering():
  return method.Method(
      1,
      lambda seed: collections.OrderedDict(
          body=collections.OrderedDict(w=tf.zeros([2])),
          head=collections.OrderedDict(),
      ),
      _remember,
      memory=lambda seed: tf.constant(0.0),
  )


@pytest.fixture(scope='module')
def stateful():
  model = models.build('mlp', (1,), None)
  return method.build_process(_remembering(), model, seed=5)


def _train_stateful(stateful, root, **options):
  return _train(
      stateful,
      root,
      cohort=_rotating_cohort,
      client_data=_scalar_data,
      evaluation=options.pop('evaluation', loop.NO_EVALUATION),
      **options,
  )


def test_client_states_go_with_the_checkpoint_that_needed_them(
    stateful, tmp_path
):
  _train_stateful(stateful, tmp_path / 'run', rounds=13)
  store = client_state_store.SqliteStore(tmp_path / 'run/client_states.sqlite')
  with contextlib.closing(store):
    assert [r for r in range(14) if store.holds(r)] == [9, 12, 13]


def test_labels_of_no_class_are_reported_once(stateful, tmp_path):
  """One of the clients, who take turns, has a label of 7 where 0 is all."""

  def client_data(client_id, part='train'):
    data = _scalar_data(client_id)
    label = 7 if client_id == _CLIENTS[0] else 0
    examples = data['examples'].map(
        lambda batch: {**batch, 'y': tf.fill(tf.shape(batch['y']), label)}
    )
    return collections.OrderedDict(data, examples=examples)

  lines = []
  _train(
      stateful,
      tmp_path / 'run',
      cohort=_rotating_cohort,
      client_data=client_data,
      evaluation=loop.NO_EVALUATION,
      report=lines.append,
  )
  (line,) = lines
  assert line.startswith('Warning: 1 client of round') and 'labels' in line


def _client_states(root):
  store = client_state_store.SqliteStore(root / 'client_states.sqlite')
  with contextlib.closing(store):
    return {c: float(store.read(c)['']) for c in store.client_ids()}


@pytest.fixture(scope='module')
def whole_stateful(stateful, tmp_path_factory):
  root = tmp_path_factory.mktemp('whole') / 'run'
  _train_stateful(stateful, root)
  return (*_files(root), _client_states(root))


def test_clients_keep_what_they_saw_last(whole_stateful):
  """X = 1..4 plus a number in [0, 1) each of the rounds they took part in.

  Rounds 1 to 7 leave out clients b, c, d, a, b, c, d in turn.
  """
  states = whole_stateful[2]
  for client_id, x, times in (('a', 1, 6), ('b', 2, 5), ('c', 3, 5)):
    assert x * times < states[client_id] < (x + 1) * times
  assert states.keys() == set(_CLIENTS)


@pytest.mark.parametrize(
    'where, last_round',
    [
        *(('write', last_round) for last_round in (1, 3, 4, 7)),
        *itertools.product(('commit', 'save'), (1, 2, 3)),
    ],
)
def test_a_crash_around_client_states_is_continued(
    stateful, whole_stateful, tmp_path, monkeypatch, where, last_round
):
  """After a client's state, before or after the states are committed."""
  owner, name = {
      'write': (client_state_store.SqliteStore, 'write'),
      'commit': (client_state_store.SqliteStore, 'commit'),
      'save': (checkpoints.CheckpointStore, 'save'),
  }[where]
  original, calls = getattr(owner, name), []

  def crash_after_or_before(self, *args):
    calls.append(1)
    # Three clients write in a round; checkpoints follow rounds 3, 6 and 7.
    if len(calls) == (3 * last_round - 1 if where == 'write' else last_round):
      raise _CrashError
    return original(self, *args)

  with monkeypatch.context() as patch:
    patch.setattr(owner, name, crash_after_or_before)
    with pytest.raises(_CrashError):
      _train_stateful(stateful, tmp_path / 'run')

  _train_stateful(stateful, tmp_path / 'run')

  root = tmp_path / 'run'
  assert (*_files(root), _client_states(root)) == whole_stateful


def test_states_after_the_checkpoint_are_rolled_back(
    stateful, whole_stateful, tmp_path
):
  """The newest checkpoint is lost, so rounds 7 and then 4 to 7 are repeated."""
  root = tmp_path / 'run'
  for num_lost in (1, 2):
    _train_stateful(stateful, root)
    for path in sorted((root / 'checkpoints').iterdir())[-num_lost:]:
      path.unlink()

    _train_stateful(stateful, root)

    assert (*_files(root), _client_states(root)) == whole_stateful


def test_the_best_round_is_kept_with_its_client_states(stateful, tmp_path):
  """Round 4 measures most; rounds 2 and 6 less. Its states are still read."""
  values = {2: 0.5, 4: 0.75, 6: 0.75}
  seen = {}

  def measure(weights, client_states):
    rounds = 2 * (len(seen) + 1)
    seen[rounds] = float(client_states.read('a')[''])
    weight = float(weights.trainable['body']['w'][0])
    return {'value': values[rounds], 'weight': weight}

  evaluation = loop.Evaluation(('value', 'weight'), measure, best_by='value')
  root = tmp_path / 'run'
  trained = _train_stateful(stateful, root, evaluation=evaluation)

  assert trained.best[:2] == (4, 0.75)
  columns = metric_writers.read_metrics(root / 'metrics.csv')
  (weights,) = (
      a for name, a in trained.best.server_state.items() if name.endswith('/w')
  )
  assert weights[0] == pytest.approx(columns['weight'][3], rel=1e-6)
  store = client_state_store.SqliteStore(root / 'client_states.sqlite')
  with contextlib.closing(store):
    assert store.holds(4)
    assert store.read('a', 4)[''] == pytest.approx(seen[4])
    assert store.read('a')[''] > seen[6]
  (newest, *_) = checkpoints.CheckpointStore(root / 'checkpoints').paths()
  store = checkpoints.CheckpointStore(newest.parent)
  assert store.load_latest(pytest.fail).best[:2] == (4, 0.75)


def test_a_run_that_goes_on_keeps_the_best_rounds_of_earlier_checkpoints(
    stateful, tmp_path
):
  """Round 2 is the best of the first checkpoint, 4 of those after it."""
  held = []
  for name, stops in (('whole', ()), ('run', (6,))):
    root, values = tmp_path / name, iter([0.5, 0.6, 0.1])
    evaluation = loop.Evaluation(
        ('value',), lambda *_, v=values: {'value': next(v)}, best_by='value'
    )
    for rounds in (*stops, _ROUNDS):
      _train_stateful(stateful, root, evaluation=evaluation, rounds=rounds)
    store = client_state_store.SqliteStore(root / 'client_states.sqlite')
    with contextlib.closing(store):
      held.append([r for r in range(_ROUNDS + 1) if store.holds(r)])
  assert held == [[2, 3, 4, 6, 7]] * 2


def _find(process, root, reports):
  directory = run_directory.RunDirectory(root)
  with run.open_client_states(process, directory) as states:
    return run.find_checkpoint(
        directory, _CONFIG, process, states, reports.append
    )


def test_checkpoints_without_their_client_states_are_refused_and_redone(
    stateful, whole_stateful, tmp_path
):
  """Lost states: the old checkpoints must not seem to be those of new ones."""
  root = tmp_path / 'run'
  _train_stateful(stateful, root)
  reports = []
  assert _find(stateful, root, reports).position.rounds == _ROUNDS
  files = _files(root)
  (root / 'client_states.sqlite').unlink()
  with pytest.raises(OSError, match='client_states.sqlite, .* found nothing'):
    _find(stateful, root, reports)
  client_state_store.SqliteStore(root / 'client_states.sqlite').close()
  with pytest.raises(OSError, match='one of the 3 checkpoints.*Nothing was'):
    _find(stateful, root, reports)
  assert _files(root) == files
  assert len(reports) == 3
  assert 'does not hold the states of clients after round 7' in reports[0]

  _train_stateful(stateful, root, rounds=4, checkpoint=None)
  assert _find(stateful, root, []).position.rounds == 4
  store = checkpoints.CheckpointStore(root / 'checkpoints')
  assert store.rounds() == [7, 6, 4, 3]  # Good ones stay until made again.
  _train_stateful(stateful, root, checkpoint=_find(stateful, root, []))
  assert (*_files(root), _client_states(root)) == whole_stateful


def test_a_checkpoint_whose_best_round_is_dropped_is_refused(
    stateful, tmp_path
):
  """Rounds 2, 4 and 6 measure ever more; the best of each is kept with it."""
  values = iter([0.5, 0.6, 0.7])
  evaluation = loop.Evaluation(
      ('value',), lambda *_: {'value': next(values)}, best_by='value'
  )
  root = tmp_path / 'run'
  _train_stateful(stateful, root, evaluation=evaluation)
  # The checkpoints of rounds 3, 6 and 7 have 2, 6 and 6 for their best.
  store = client_state_store.SqliteStore(root / 'client_states.sqlite')
  with contextlib.closing(store):
    assert [r for r in range(8) if store.holds(r)] == [2, 3, 6, 7]
    store.commit([3, 6, 7])
  for path in sorted((root / 'checkpoints').iterdir())[1:]:
    path.unlink()
  reports = []
  with pytest.raises(OSError, match='none'):
    _find(stateful, root, reports)
  assert 'after round 2' in reports[0]
