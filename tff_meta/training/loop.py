"""The training loop: rounds, metrics, checkpoints, and going on after a stop.

A round is a pure function of the state before it, the seed and its number. So a
run that was stopped at any moment, by whatever, is continued from its newest
good checkpoint: the files are cut back to where they were at the checkpoint and
the rounds since are simply done again, with the same results.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import time
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_meta.training import checkpoints
from tff_meta.training import metric_writers
from tff_meta.training import progress as progress_lib
from tff_meta.training import run_directory

_LOSS = 'train/loss'
_NON_FINITE = 'train/num_non_finite_clients'


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When a run does what, in communication rounds.

  Attributes:
    num_rounds: Rounds of the whole run.
    checkpoint_every: Rounds from one checkpoint to the next; the last round and
      a stopped run always get one.
    eval_every: Rounds from one evaluation to the next; 0 for none on the way.
  """

  num_rounds: int
  checkpoint_every: int
  eval_every: int

  def __post_init__(self):
    for name, least in (
        ('num_rounds', 1),
        ('checkpoint_every', 1),
        ('eval_every', 0),
    ):
      if getattr(self, name) < least:
        raise ValueError(
            f'Expected `{name}` to be at least {least}, found'
            f' {getattr(self, name)}.'
        )


class Evaluation(NamedTuple):
  """A measurement of model weights on the way.

  Attributes:
    names: The columns that it fills in metrics.csv.
    measure: `ModelWeights -> {name: number}`; a pure function.
  """

  names: Sequence[str]
  measure: Callable[[Any], Mapping[str, float]]


NO_EVALUATION = Evaluation((), lambda weights: {})


class _Recorder:
  """Everything that a run writes while it trains."""

  def __init__(
      self,
      directory: run_directory.RunDirectory,
      config: Mapping[str, Any],
      position: checkpoints.Position,
      evaluation_names: Sequence[str],
  ):
    """Opens the files and cuts them back to `position`."""
    self._config = config
    self._store = checkpoints.CheckpointStore(directory.checkpoints)
    self._metrics = metric_writers.MetricsFile(
        directory.metrics,
        position.metrics_rows,
        position.metrics_bytes,
        evaluation_names,
    )
    self._timings = metric_writers.TimingsFile(
        directory.timings, position.rounds
    )
    self._events = metric_writers.TensorBoardWriter(
        directory.events, position.rounds
    )

  def append(
      self, rounds: int, metrics: Mapping[str, Any], seconds: float
  ) -> None:
    """Writes a round's metrics and time."""
    self._metrics.append(rounds, metrics)
    self._timings.append(rounds, seconds)
    self._events.append(rounds, metrics)

  def save(self, rounds: int, state: Any) -> None:
    """Writes a checkpoint, after everything that it relies on."""
    self._events.flush()
    self._store.save(
        checkpoints.Checkpoint(
            config=self._config,
            position=checkpoints.Position(rounds, *self._metrics.sync()),
            server_state=checkpoints.to_arrays(state),
            client_states={},
        )
    )

  def close(self) -> None:
    """Closes the files."""
    self._metrics.close()
    self._timings.close()
    self._events.close()


def train(
    process: tff.learning.templates.LearningProcess,
    cohort_data: Callable[[int], Sequence[Any]],
    evaluation: Evaluation,
    *,
    directory: run_directory.RunDirectory,
    config: Mapping[str, Any],
    schedule: Schedule,
    checkpoint: checkpoints.Checkpoint | None,
    should_stop: Callable[[], bool],
    report: Callable[[str], None],
) -> tuple[Any, int]:
  """Trains until the schedule ends or a stop is asked for.

  Args:
    process: What to train.
    cohort_data: Round (from 1) -> the data of its clients; a pure function.
    evaluation: What to measure every `eval_every` rounds.
    directory: Where the run is written, locked by the caller.
    config: The run's configuration as JSON values, kept in the checkpoints.
    schedule: When to do what.
    checkpoint: Where to go on, None to begin.
    should_stop: Asked after every round.
    report: Called with a warning, once, when clients send numbers that are not
      finite.

  Returns:
    The server state and the number of completed rounds.

  Raises:
    ValueError: If the checkpoint's state is not one of `process`, or
      metrics.csv is shorter than the checkpoint says.
  """
  state = process.initialize()
  position = checkpoints.Position(0, 0, 0)
  if checkpoint is not None:
    state = checkpoints.from_arrays(state, checkpoint.server_state)
    position = checkpoint.position
  recorder = _Recorder(directory, config, position, evaluation.names)
  progress = progress_lib.Progress(position.rounds, schedule.num_rounds)
  rounds, stop, diverged = position.rounds, False, False
  try:
    while rounds < schedule.num_rounds and not stop:
      started = time.perf_counter()
      output = process.next(state, cohort_data(rounds + 1))
      seconds = time.perf_counter() - started
      state, rounds = output.state, rounds + 1
      metrics = metric_writers.flatten_metrics(output.metrics)
      if schedule.eval_every and rounds % schedule.eval_every == 0:
        metrics |= evaluation.measure(process.get_model_weights(state))
      if metrics.get(_NON_FINITE) and not diverged:
        diverged = True
        report(
            f'Warning: {metrics[_NON_FINITE]:.0f} clients of round {rounds}'
            ' sent numbers that are not finite; they do not count, nor does'
            ' their loss. Tip: try smaller learning rates.'
        )
      recorder.append(rounds, metrics, seconds)
      progress.update(rounds, metrics.get(_LOSS))
      stop = should_stop()
      if (
          stop
          or rounds == schedule.num_rounds
          or rounds % schedule.checkpoint_every == 0
      ):
        recorder.save(rounds, state)
  finally:
    progress.close()
    recorder.close()
  return state, rounds
