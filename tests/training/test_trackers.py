"""Where the numbers of a run go beside its own files.

Those of the libraries are left out where these are not installed; what a run
and a tracker have to do with each other is tested without them.
"""

import json

import pytest

from tff_meta.training import trackers

_CONFIG = {'algorithm': 'frl', 'seed': 3, 'hparams': {'gamma': 0.5, 'at': None}}


def _track(name, root, first, last, finish=False, report=pytest.fail):
  """Tracks rounds of a run, as a process does."""
  run = trackers.TrackedRun(root / 'trackers', 'a run', _CONFIG, first - 1)
  tracker = trackers.open_tracker(name, run, report)
  for round_num in range(first, last + 1):
    tracker.append(round_num, {'a/accuracy_percent': 10.0 * round_num})
  tracker.flush()
  if finish:
    tracker.finish(last, {'final/accuracy_percent': 77.0})
  tracker.close()


class _Lines:
  """A tracker that writes a line for everything it is told."""

  def __init__(self, run):
    self._file = open(run.directory / 'lines.json', 'a')
    self._tell('begin', run.done, dict(run.config))

  def _tell(self, *what):
    self._file.write(json.dumps(what) + '\n')

  def append(self, round_num, values):
    if values['a/accuracy_percent'] == 40:
      raise ConnectionError('the line is cut.')
    self._tell('round', round_num, values)

  def finish(self, round_num, values):
    self._tell('finish', round_num, values)

  def flush(self):
    self._tell('flush')

  def close(self):
    self._tell('close')
    self._file.close()


@pytest.fixture
def lines(monkeypatch):
  monkeypatch.setattr(
      trackers, 'TRACKERS', type(trackers.TRACKERS)('track', {})
  )
  trackers.register_tracker('lines', _Lines)


@pytest.mark.usefixtures('lines')
def test_a_tracker_that_fails_is_left_alone_and_that_is_said(tmp_path):
  told = []
  _track('lines', tmp_path, 3, 5, finish=True, report=told.append)
  written = (tmp_path / 'trackers/lines.json').read_text().splitlines()
  assert [json.loads(line)[0] for line in written] == ['begin', 'round']
  (warning,) = told
  assert 'lines gets no more of this run, found ConnectionError' in warning


@pytest.mark.usefixtures('lines')
def test_a_tracker_that_cannot_be_opened_is_an_error(tmp_path):
  (tmp_path / 'trackers/lines.json').mkdir(parents=True)
  with pytest.raises(OSError, match='--track=lines to open a run there, found'):
    _track('lines', tmp_path, 1, 2)


@pytest.mark.usefixtures('lines')
def test_a_tracker_that_opens_no_writer_is_an_error(tmp_path):
  trackers.register_tracker('none', lambda run: None)
  with pytest.raises(OSError, match='--track=none .*None, has no `append`'):
    _track('none', tmp_path, 1, 2)


def test_what_to_install_is_said(monkeypatch):
  there_is_none = trackers.Tracker(_Lines, 'no_such_package')
  monkeypatch.setitem(trackers.TRACKERS, 'wandb', there_is_none)
  with pytest.raises(ImportError, match='no_such_package, .*-r requirements-t'):
    trackers.check(['wandb'])
  with pytest.raises(ValueError, match="did you mean 'mlflow'"):
    trackers.check(['ml_flow'])


def test_wandb_offline(tmp_path, monkeypatch):
  # Before the import, which reads them.
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  pytest.importorskip('wandb')
  from wandb.proto import wandb_internal_pb2
  from wandb.sdk.internal import datastore

  _track('wandb', tmp_path, 1, 2)
  _track('wandb', tmp_path, 3, 3, finish=True)
  histories, run_ids, summary = {}, set(), {}
  for path in sorted(tmp_path.glob('trackers/wandb/offline-run-*/*.wandb')):
    store = datastore.DataStore()
    store.open_for_scan(str(path))
    while content := store.scan_data():
      record = wandb_internal_pb2.Record()
      record.ParseFromString(content)
      if record.HasField('run'):
        run_ids.add(record.run.run_id)
        config = {u.key: u.value_json for u in record.run.config.update}
      for item in record.history.item:
        name = item.key or '/'.join(item.nested_key)
        if name == 'a/accuracy_percent':
          step = record.history.step.num
          histories[step] = json.loads(item.value_json)
      for item in record.summary.update:
        summary['/'.join(item.nested_key) or item.key] = item.value_json
  assert histories == {1: 10.0, 2: 20.0, 3: 30.0}
  assert len(run_ids) == 1
  assert json.loads(config['seed']) == 3
  assert float(summary['final/accuracy_percent']) == 77.0


def test_mlflow_in_a_folder(tmp_path, monkeypatch):
  pytest.importorskip('mlflow')
  from mlflow import tracking

  monkeypatch.setenv('MLFLOW_TRACKING_URI', f'file://{tmp_path}/mlruns')
  _track('mlflow', tmp_path, 1, 3)
  run_id = (tmp_path / 'trackers/mlflow_id.txt').read_text().strip()
  client = tracking.MlflowClient()
  assert client.get_run(run_id).info.status == 'KILLED'
  _track('mlflow', tmp_path, 3, 4, finish=True)  # Round 3 comes again.
  run = client.get_run(run_id)
  assert run.info.status == 'FINISHED'
  assert run.data.params['hparams.gamma'] == '0.5'
  assert run.data.metrics['final/accuracy_percent'] == 77
  history = client.get_metric_history(run_id, 'a/accuracy_percent')
  points = sorted((m.step, m.value) for m in history)
  assert points == [(1, 10), (2, 20), (3, 30), (4, 40)]
  experiment = client.get_experiment_by_name('tff_meta')
  assert len(client.search_runs([experiment.experiment_id])) == 1
