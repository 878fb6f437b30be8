import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import client_state_store
from tff_meta.training import atomic_files
from tff_meta.training import checkpoints
from tff_meta.training import loop
from tff_meta.training import metric_writers
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


def _client_data(client_id):
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
    rounds=_ROUNDS,
    should_stop=lambda: False,
    report=pytest.fail,
):
  """Begins or continues the run in `root`."""
  directory = run_directory.RunDirectory(root)
  root.mkdir(exist_ok=True)
  store = checkpoints.CheckpointStore(directory.checkpoints)
  return loop.train(
      process,
      _cohort,
      _client_data,
      _EVALUATION,
      client_states=client_state_store.InMemoryStore(),
      directory=directory,
      config=_CONFIG,
      schedule=loop.Schedule(rounds, checkpoint_every=3, eval_every=2),
      checkpoint=store.load_latest(pytest.fail),
      should_stop=should_stop,
      report=report,
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


def test_checkpoints_are_those_of_the_schedule_and_the_last(process, tmp_path):
  _train(process, tmp_path / 'run')
  names = sorted(p.name for p in (tmp_path / 'run' / 'checkpoints').iterdir())
  assert names == [f'round_00000000{n}.ckpt' for n in (3, 6, 7)]


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


@pytest.mark.parametrize('last_round', range(1, _ROUNDS + 1))
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


def test_clients_that_diverge_are_reported_once(process, tmp_path, monkeypatch):
  flatten = metric_writers.flatten_metrics
  counts = iter([0, 2, 3, 0, 1, 0, 0])

  def flatten_metrics(metrics):
    return flatten(metrics) | {
        'train/num_non_finite_clients': np.float32(next(counts))
    }

  monkeypatch.setattr(metric_writers, 'flatten_metrics', flatten_metrics)
  lines = []
  _train(process, tmp_path / 'run', report=lines.append)
  (line,) = lines
  assert line.startswith('Warning: 2 clients of round 2 sent numbers')


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


@pytest.mark.parametrize('values', [(0, 1, 0), (1, 0, 0), (1, 1, -1)], ids=str)
def test_an_impossible_schedule_is_refused(values):
  with pytest.raises(ValueError, match='at least'):
    loop.Schedule(*values)
