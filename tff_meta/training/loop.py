"""The training loop: rounds, metrics, checkpoints, and going on after a stop.

A round is a pure function of the state before it, the seed and its number. So a
run that was stopped at any moment, by whatever, is continued from its newest
good checkpoint: the files are cut back to where they were at the checkpoint and
the rounds since are simply done again, with the same results.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import pathlib
import time
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import dealing
from tff_meta import progress as progress_lib
from tff_meta import spelling
from tff_meta import traffic
from tff_meta.client_works import client_work
from tff_meta.data import availability
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import metric_writers
from tff_meta.training import run_directory

_LOSS = 'train/loss'
_ABSENT, _LATE = 'train/num_absent_clients', 'train/num_late_clients'
_SLOW = 'train/num_slow_clients'


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When a run does what, in communication rounds.

  Attributes:
    num_rounds: Rounds of the whole run.
    checkpoint_every: Rounds from one checkpoint to the next; the last round and
      a stopped run always get one.
    eval_every: Rounds from one evaluation to the next; 0 for none on the way.
    eval_from: The first round that may be evaluated.
    patience: See `is_out_of_patience`; 0 for any amount.
  """

  num_rounds: int
  checkpoint_every: int
  eval_every: int
  eval_from: int = 0
  patience: int = 0

  def __post_init__(self):
    for name, least in (
        ('num_rounds', 1),
        ('checkpoint_every', 1),
        ('eval_every', 0),
        ('eval_from', 0),
        ('patience', 0),
    ):
      if getattr(self, name) < least:
        raise ValueError(
            f'Expected `{name}` to be at least {least}, found'
            f' {getattr(self, name)}.'
        )

  def evaluates(self, rounds: int) -> bool:
    """Returns whether there is an evaluation after this round, from 1."""
    if not self.eval_every or rounds < self.eval_from:
      return False
    return rounds % self.eval_every == 0


class Evaluation(NamedTuple):
  """A measurement on the way.

  Attributes:
    names: The columns that it fills in metrics.csv.
    measure: `(ModelWeights, ClientStateStore) -> {name: number}`; a pure
      function.
    best_by: The column whose first largest value marks the best round; None to
      look for no best round.
  """

  names: Sequence[str]
  measure: Callable[..., Mapping[str, float]]
  best_by: str | None = None


class Trained(NamedTuple):
  """Where a run has come to.

  Attributes:
    state: The server state.
    rounds: Completed communication rounds.
    best: The best round by `Evaluation.best_by`, None without.
  """

  state: Any
  rounds: int
  best: checkpoints.Best | None


def is_out_of_patience(values: Sequence[float], patience: int) -> bool:
  """Returns whether training should end before its last round.

  It should when, since the largest value so far, more than `patience` values
  were smaller than the one before.

  Args:
    values: What was measured so far, larger is better.
    patience: 0 for any amount.

  Source: Lim et al. (MetaVers), released code.
  """
  drops, best, last = 0, -math.inf, -math.inf
  for value in values:
    drops = 0 if value > best else drops + (value < last)
    best, last = max(best, value), value
  return bool(patience) and drops > patience


class _Warnings:
  """Tells of every reason why clients did not train once."""

  def __init__(
      self,
      report: Callable[[str], None],
      why_not_trained: Callable[[Sequence[str]], str | None],
  ):
    self._report = report
    self._why_not_trained = why_not_trained
    self._told: set[str] = set()

  def look_at(
      self, rounds: int, metrics: Mapping[str, Any], cohort: Sequence[str]
  ) -> None:
    """Reports what a round's metrics have for the first time."""
    mislabelled = metrics.get(metric_writers.BAD_LABEL, 0)
    if mislabelled:
      self._tell(
          mislabelled,
          rounds,
          'had labels outside 0..num_classes-1; such clients do not count, nor'
          ' does their loss. Tip: number the classes from 0.',
      )
    not_finite = metrics.get(metric_writers.NON_FINITE, 0) - mislabelled
    if not_finite:
      self._tell(
          not_finite,
          rounds,
          'sent numbers that are not finite; such clients do not count, nor'
          ' does their loss. Tip: try smaller learning rates.',
      )
    if metrics.get(metric_writers.EMPTY):
      self._tell(
          metrics[metric_writers.EMPTY],
          rounds,
          'had no examples to train on; such clients do not count.',
      )
    others = metric_writers.num_without_reason(metrics)
    if others > 0:
      why = self._why_not_trained(cohort)
      if why is not None or not metrics[metric_writers.TRAINED]:
        # Otherwise it may be as it should be, in this phase of the algorithm.
        self._tell(
            others,
            rounds,
            'had examples, but learned nothing from them.' + (why or ''),
        )

  def _tell(self, count, rounds, what):
    if what not in self._told:
      self._told.add(what)
      who = spelling.counted(count, 'client')
      self._report(f'Warning: {who} of round {rounds} {what}')


NO_EVALUATION = Evaluation((), lambda weights, client_states: {})


class _Recorder:
  """Everything that a run writes while it trains."""

  def __init__(
      self,
      directory: run_directory.RunDirectory,
      config: Mapping[str, Any],
      position: checkpoints.Position,
      best: checkpoints.Best | None,
      evaluation_names: Sequence[str],
      client_states: client_state_store.ClientStateStore,
      writers: Sequence[metric_writers.Writer],
      report: Callable[[str], None],
  ):
    """Opens the files and cuts them back to `position`."""
    metrics = metric_writers.read_prefix(  # First: it may not be as written.
        directory.metrics, position.metrics_bytes, position.metrics_sha256
    )
    self._config = config
    self._store = checkpoints.CheckpointStore(directory.checkpoints)
    self._store.create()
    self._client_states = client_states
    self._client_states.roll_back(position.rounds)
    self._best_rounds = {}
    if best is not None:  # Of the checkpoints before it, too.
      found = self._store.best_rounds(position.rounds).items()
      self._best_rounds = {k: r for k, r in found if client_states.holds(r)}
    self._metrics = metric_writers.MetricsFile(
        directory.metrics, position.metrics_rows, metrics, evaluation_names
    )
    self._timings = metric_writers.TimingsFile(
        directory.timings, position.rounds, report
    )
    self._writers = writers

  def append(
      self,
      rounds: int,
      metrics: Mapping[str, Any],
      seconds: float,
      cached: float,
      elsewhere: Mapping[str, float],
  ) -> None:
    """Writes a round's metrics, its time and the share of clients in memory.

    Args:
      rounds: The round.
      metrics: What it measured.
      seconds: Its time.
      cached: That share.
      elsewhere: What was counted where other processes computed clients, see
        `dealing`; nothing otherwise.
    """
    self._metrics.append(rounds, metrics)
    self._timings.append(
        rounds,
        seconds,
        None if elsewhere else cached,  # Nobody reads them here.
        sum(elsewhere[name] for name in ('bytes_down', 'bytes_up'))
        if elsewhere
        else None,
        elsewhere.get('slowest_shard_seconds'),
    )
    shown = metric_writers.for_people(metrics)
    for writer in self._writers:
      writer.append(rounds, shown)

  def save(self, trained: Trained) -> None:
    """Writes a checkpoint, after everything that it relies on."""
    if trained.best is not None:
      self._best_rounds[trained.rounds] = trained.best.rounds
    # Not those that could not be gone on from, which are later.
    earlier = self._store.rounds(trained.rounds)
    self._commit_client_states({trained.rounds, *earlier})
    for writer in self._writers:
      writer.flush()
    self._timings.check()
    position = checkpoints.Position(
        trained.rounds,
        *self._metrics.sync(),
        self._client_states.fingerprint(),
    )
    self._store.save(
        checkpoints.Checkpoint(
            config=self._config,
            position=position,
            server_state=checkpoints.to_arrays(trained.state),
            best=trained.best,
        )
    )
    # Without what the oldest one needed, which is gone now.
    self._commit_client_states(set(self._store.rounds(trained.rounds)))

  def _commit_client_states(self, kept_rounds: set[int]) -> None:
    best_rounds = {r for k, r in self._best_rounds.items() if k in kept_rounds}
    self._client_states.commit(kept_rounds | best_rounds)

  def check(self) -> None:
    """Raises if metrics.csv, which is read next, is not what was written."""
    self._metrics.check()

  def close(self) -> None:
    """Closes the files."""
    self._metrics.close()
    self._timings.close()


def train(
    process: tff.learning.templates.LearningProcess,
    cohort: Callable[[int], Sequence[str]],
    client_data: Callable[..., Any],
    evaluation: Evaluation,
    *,
    is_cached: Callable[[str], bool],
    client_states: client_state_store.ClientStateStore,
    directory: run_directory.RunDirectory,
    config: Mapping[str, Any],
    schedule: Schedule,
    checkpoint: checkpoints.Checkpoint | None,
    should_stop: Callable[[], bool],
    report: Callable[[str], None],
    why_not_trained: Callable[[Sequence[str]], str | None] = lambda _: None,
    writers: Sequence[metric_writers.Writer] = (),
    sent: traffic.Traffic = traffic.UNKNOWN,
    available: availability.Availability = availability.ALWAYS,
    seed: int = 0,
    rounds_per_cohort: int = 1,
) -> Trained:
  """Trains until the schedule or the patience ends or a stop is asked for.

  Args:
    process: What to train.
    cohort: Round (from 1) -> the ids of its clients; a pure function.
    client_data: Client id, and a part of its data where it is not 'train' ->
      the client's data, without what it keeps between rounds.
    evaluation: What to measure when the schedule says so.
    is_cached: Client id -> whether `client_data` need not read its data.
    client_states: What clients keep between rounds; rolled back to the
      checkpoint, committed with every new one.
    directory: Where the run is written, locked by the caller.
    config: The run's configuration as JSON values, kept in the checkpoints.
    schedule: When to do what.
    checkpoint: Where to go on, None to begin.
    should_stop: Asked after every round.
    report: Called with a warning, once for every reason, when clients do not
      train, and with a note if timings.csv cannot be gone on with.
    why_not_trained: The ids of a cohort -> what one of them lacks to learn
      anything, sentences with a space before them; None if nobody lacks
      anything.
    writers: Where the numbers of every round go beside the directory's tables,
      as people read them; flushed before a checkpoint, left open.
    sent: What travels between the server and a client in a round; metrics.csv
      has it of all clients of a round, where it is known.
    available: How often clients are not there; metrics.csv counts them.
    seed: That this is drawn from.
    rounds_per_cohort: For how many consecutive rounds a cohort stays.

  Returns:
    Where the run has come to.

  Raises:
    ValueError: If the checkpoint's state is not one of `process`.
    OSError: If a file cannot be written, is not what the checkpoint says, or is
      removed or replaced meanwhile.
  """
  if checkpoint is None:
    position = checkpoints.Position(0, 0, 0)
    trained = Trained(process.initialize(), 0, None)
  else:
    position = checkpoint.position
    state = checkpoints.to_state(process, checkpoint.server_state)
    trained = Trained(state, position.rounds, checkpoint.best)
  recorder = _Recorder(
      directory,
      config,
      position,
      trained.best,
      evaluation.names,
      client_states,
      writers,
      report,
  )
  values = _measured(directory.metrics, evaluation.best_by)
  stop = is_out_of_patience(values, schedule.patience)
  warnings = _Warnings(report, why_not_trained)
  progress = progress_lib.Progress(
      'round',
      schedule.num_rounds,
      'rounds',
      position.rounds,
      first='the first one is traced, which takes longest',
      stays=True,
      status=lambda: (dealer := dealing.dealer()) and dealer.status() or '',
  )
  try:
    while trained.rounds < schedule.num_rounds and not stop:
      rounds = trained.rounds + 1
      started = time.perf_counter()
      present = available.present(
          cohort(rounds), seed, rounds, rounds_per_cohort
      )
      clients = [client_id for client_id, _ in present.clients]
      cached = sum(map(is_cached, clients)) / len(clients)
      output = next_round(
          process,
          trained.state,
          rounds,
          [(c, client_data(c, part)) for c, part in present.clients],
          client_states,
      )
      seconds = time.perf_counter() - started
      dealer = dealing.dealer()
      elsewhere = dealer.statistics() if dealer else {}
      trained = Trained(output.state, rounds, trained.best)
      metrics = metric_writers.flatten_metrics(output.metrics)
      metrics |= traffic_columns(sent, len(clients), present.num_late)
      if not available.is_full:
        metrics |= {
            _ABSENT: present.num_absent,
            _LATE: present.num_late,
            _SLOW: present.num_slow,
        }
      if schedule.evaluates(rounds):
        weights = process.get_model_weights(output.state)
        measured = evaluation.measure(weights, client_states)
        metrics |= measured
        shown = metric_writers.sentence(measured)
        progress_lib.write(f'round {rounds}: {shown}')
        if evaluation.best_by is not None:
          value = measured[evaluation.best_by]
          if not math.isnan(value):  # As `_measured` leaves it out.
            values.append(value)
            states = client_states.fingerprint()
            trained = _with_best(trained, value, states)
      warnings.look_at(rounds, metrics, clients)
      recorder.append(rounds, metrics, seconds, cached, elsewhere)
      loss = metrics.get(_LOSS)
      progress.update(rounds, '' if loss is None else f'loss {loss:.4f}')
      stop = should_stop() or is_out_of_patience(values, schedule.patience)
      if (
          stop
          or rounds == schedule.num_rounds
          or rounds % schedule.checkpoint_every == 0
      ):
        recorder.save(trained)
    recorder.check()
  finally:
    progress.close()
    recorder.close()
  return trained


def traffic_columns(
    sent: traffic.Traffic, num_clients: int, num_late: int = 0
) -> dict[str, int]:
  """Returns the columns of metrics.csv with the bytes of a round.

  Args:
    sent: What travels between the server and one client.
    num_clients: Of the round.
    num_late: Others, who are sent something, and of whom nothing comes.

  Returns:
    Name -> bytes, without what is not known.
  """
  columns = {
      metric_writers.BYTES_DOWN: sent.times(num_clients + num_late).down,
      metric_writers.BYTES_UP: sent.times(num_clients).up,
  }
  return {name: n for name, n in columns.items() if n is not None}


def next_round(
    process: tff.learning.templates.LearningProcess,
    state: Any,
    round_num: int,
    clients: Sequence[tuple[str, Any]],
    client_states: client_state_store.ClientStateStore,
) -> Any:
  """Does a round; what its clients keep comes from the store and goes there.

  Args:
    process: What is trained.
    state: The server state before the round.
    round_num: From 1.
    clients: The cohort's ids, and their data without what they keep.
    client_states: What clients keep between rounds.

  Returns:
    The `LearningProcessOutput`.
  """
  if not isinstance(process, composition.StatefulLearningProcess):
    return process.next(state, [data for _, data in clients])
  initial = process.initial_memory
  data = []
  for client_id, client_data in clients:
    value = client_states.read(client_id)
    if value is not None:
      value = checkpoints.from_arrays(initial, value)
    memory = client_work.memory_dataset(initial, value)
    data.append(collections.OrderedDict(client_data, memory=memory))
  output, memories = process.next_with_memory(state, data)
  for (client_id, _), memory in zip(clients, memories, strict=True):
    if memory.present:
      client_states.write(
          client_id, round_num, checkpoints.to_arrays(memory.value)
      )
  return output


def _measured(path: pathlib.Path, column: str | None) -> list[float]:
  """Returns the values of a column of metrics.csv, none without the column."""
  table = metric_writers.read_metrics(path)
  values = [] if column is None else table.get(column, [])
  return [value for value in values if not math.isnan(value)]


def _with_best(trained: Trained, value: float, client_states: str) -> Trained:
  """Notes the round as the best if it measures more than all before."""
  best = trained.best
  if best is not None and value <= best.value:
    return trained
  arrays = checkpoints.to_arrays(trained.state)
  return trained._replace(
      best=checkpoints.Best(trained.rounds, float(value), arrays, client_states)
  )
