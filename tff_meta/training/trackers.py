"""Experiment trackers that a run's numbers also go to, by name.

Weights & Biases and MLflow are optional packages, imported when a run asks for
them. `register_tracker` adds another, such as a plugin's. Everything a tracker
is given is in the run's own files, too: one that fails costs no round.
"""

from collections.abc import Callable, Mapping, Sequence
import importlib.util
import os
import pathlib
import secrets
from typing import Any, NamedTuple

from tff_meta import catalog
from tff_meta import plain_files
from tff_meta.training import atomic_files
from tff_meta.training import metric_writers

_PROJECT = 'tff_meta'
_MAX_ID_BYTES = 1000
_MOST_AT_ONCE = 500  # MLflow takes at most 1000 numbers in a call,
_MOST_PARAMS_AT_ONCE = 100  # and as many settings.


class TrackedRun(NamedTuple):
  """What a tracker is told of a run.

  Attributes:
    directory: Where a tracker may keep files of this run; it is there.
    title: The run in a few words.
    config: Its configuration as JSON values.
    done: Rounds that were done before, 0 for a new run.
  """

  directory: pathlib.Path
  title: str
  config: Mapping[str, Any]
  done: int


class Tracker(NamedTuple):
  """How a tracker is opened.

  Attributes:
    open: `TrackedRun -> metric_writers.Writer`, once a process.
    module: What has to be importable for it; None for nothing.
    tip: A sentence on what to try where it cannot be opened; may be empty.
  """

  open: Callable[[TrackedRun], metric_writers.Writer]
  module: str | None = None
  tip: str = ''


class _Wandb:
  """A run of Weights & Biases, which goes on in the background.

  The environment variables WANDB_PROJECT, WANDB_MODE and so on are its own. A
  round that it has is passed over when it comes again.
  """

  def __init__(self, run: TrackedRun):
    import wandb

    self._is_finished = False
    self._run = wandb.init(
        project=os.environ.get('WANDB_PROJECT', _PROJECT),
        name=run.title,
        id=_read_id(run, 'wandb')
        or _write_id(run, 'wandb', secrets.token_hex(8)),
        resume='allow',
        dir=run.directory,
        config=dict(run.config),
        settings={'console': 'off'},  # Else it keeps what is printed.
    )

  def append(self, round_num: int, values: Mapping[str, float]) -> None:
    self._run.log(dict(values), step=round_num)

  def finish(self, round_num: int, values: Mapping[str, float]) -> None:
    del round_num
    self._run.summary.update(dict(values))
    self._is_finished = True

  def flush(self) -> None:
    pass  # It writes by itself.

  def close(self) -> None:
    self._run.finish(exit_code=0 if self._is_finished else 1)


class _Mlflow:
  """A run of MLflow.

  The environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are
  its own. Rounds that it has are passed over when they come again.
  """

  def __init__(self, run: TrackedRun):
    from mlflow import entities
    from mlflow import tracking

    self._entities = entities
    self._client = tracking.MlflowClient()
    self._metrics: list[Any] = []
    self._is_finished = False
    self._last_round = 0
    self._id = _read_id(run, 'mlflow')
    if self._id:
      found = self._client.get_run(self._id).data.metrics
      self._last_round = int(found.get('round', 0))
      self._client.set_terminated(self._id, 'RUNNING')
    else:
      created = self._client.create_run(
          self._experiment_id(), run_name=run.title
      )
      self._id = _write_id(run, 'mlflow', created.info.run_id)
      self._log_settings(run.config)

  def _experiment_id(self) -> str:
    name = os.environ.get('MLFLOW_EXPERIMENT_NAME', _PROJECT)
    found = self._client.get_experiment_by_name(name)
    return (
        found.experiment_id if found else self._client.create_experiment(name)
    )

  def _log_settings(self, config: Mapping[str, Any]) -> None:
    settings = [
        self._entities.Param(name, str(value))
        for name, value in metric_writers.flat_settings(config).items()
    ]
    for first in range(0, len(settings), _MOST_PARAMS_AT_ONCE):
      some = settings[first : first + _MOST_PARAMS_AT_ONCE]
      self._client.log_batch(self._id, params=some)

  def append(self, round_num: int, values: Mapping[str, float]) -> None:
    if round_num <= self._last_round:
      return
    self._last_round = round_num
    self._take(round_num, {'round': round_num, **values})
    if len(self._metrics) >= _MOST_AT_ONCE:
      self.flush()

  def _take(self, round_num: int, values: Mapping[str, float]) -> None:
    now = int(1000 * metric_writers.wall_clock())
    self._metrics += [
        self._entities.Metric(name, value, now, round_num)
        for name, value in values.items()
    ]

  def finish(self, round_num: int, values: Mapping[str, float]) -> None:
    self._take(round_num, values)
    self._is_finished = True

  def flush(self) -> None:
    while self._metrics:
      some = self._metrics[:_MOST_AT_ONCE]
      self._client.log_batch(self._id, metrics=some)
      del self._metrics[: len(some)]

  def close(self) -> None:
    self.flush()
    status = 'FINISHED' if self._is_finished else 'KILLED'
    self._client.set_terminated(self._id, status)


_OURS = {
    'wandb': Tracker(
        _Wandb,
        'wandb',
        'Tip: with the environment variable WANDB_MODE=offline it needs no'
        ' account and no network.',
    ),
    'mlflow': Tracker(
        _Mlflow,
        'mlflow',
        'Tip: without the environment variable MLFLOW_TRACKING_URI it writes to'
        ' the folder mlruns.',
    ),
}

TRACKERS = catalog.Catalog[Tracker]('track', _OURS)


def register_tracker(
    name: str, open_tracker: Callable[[TrackedRun], metric_writers.Writer]
) -> None:
  """Adds a tracker, with the name that `--track` takes.

  Args:
    name: Of the tracker.
    open_tracker: See `Tracker.open`.

  Raises:
    ValueError: If there is one of its name, or that is no name.
  """
  TRACKERS.register(name, Tracker(open_tracker))


def check(names: Sequence[str]) -> None:
  """Raises if a tracker is unknown, or its package is not installed.

  Args:
    names: Of trackers.

  Raises:
    ImportError: If a package is missing.
    ValueError: If there is no tracker of a name.
  """
  for name in names:
    module = TRACKERS.find(name).module
    if module is not None and importlib.util.find_spec(module) is None:
      raise ImportError(
          f'Expected the package {module}, which --track={name} needs, found it'
          ' not installed. Tip: requirements-track.txt, at the root of the'
          ' repository, has its version: `pip install --no-deps -r'
          ' requirements-track.txt`.'
      )


class _Guarded:
  """A tracker that is left alone once it has failed, which is said."""

  def __init__(
      self,
      name: str,
      writer: metric_writers.Writer,
      report: Callable[[str], None],
  ):
    self._name = name
    self._writer: metric_writers.Writer | None = writer
    self._report = report

  def _call(self, method: str, *args: Any) -> None:
    if self._writer is None:
      return
    try:
      getattr(self._writer, method)(*args)
    except Exception as error:  # Of whatever kind: it is not our run's.
      self._writer = None
      self._report(
          f'Warning: {self._name} gets no more of this run, found'
          f' {type(error).__name__}: {str(error).rstrip(".")}. The run goes on,'
          ' and its own files have everything.'
      )

  def append(self, round_num: int, values: Mapping[str, float]) -> None:
    self._call('append', round_num, values)

  def finish(self, round_num: int, values: Mapping[str, float]) -> None:
    self._call('finish', round_num, values)

  def flush(self) -> None:
    self._call('flush')

  def close(self) -> None:
    self._call('close')


def open_tracker(
    name: str, run: TrackedRun, report: Callable[[str], None]
) -> metric_writers.Writer:
  """Opens a tracker for a run.

  Args:
    name: Of the tracker.
    run: What it is told of the run.
    report: Called with a line if the tracker fails later, which stops nothing.

  Raises:
    OSError: If it cannot be opened.
  """
  tracker = TRACKERS.find(name)
  plain_files.make_directory(run.directory)
  try:
    writer = tracker.open(run)
    for method in 'append', 'finish', 'flush', 'close':
      if not callable(getattr(writer, method, None)):
        raise TypeError(f'what it opens, {writer!r}, has no `{method}`')
    return _Guarded(name, writer, report)
  except Exception as error:
    raise OSError(
        f'Expected --track={name} to open a run there, found'
        f' {type(error).__name__}: {str(error).rstrip(".")}. {tracker.tip}'
    ) from error


def _id_path(run: TrackedRun, name: str) -> pathlib.Path:
  return run.directory / f'{name}_id.txt'


def _read_id(run: TrackedRun, name: str) -> str:
  """Returns what a tracker calls the run; empty if it has none yet."""
  try:
    content = plain_files.read_bytes(_id_path(run, name), _MAX_ID_BYTES)
  except FileNotFoundError:
    return ''
  return content.decode().strip()


def _write_id(run: TrackedRun, name: str, run_id: str) -> str:
  atomic_files.write_bytes(_id_path(run, name), f'{run_id}\n'.encode())
  return run_id
