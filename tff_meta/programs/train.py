"""`tff.learning.programs.train_model` in the place of our training loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import contextlib
import csv
import shutil
import time
from typing import Any

import tensorflow_federated as tff

from tff_meta import traffic
from tff_meta.programs import cohorts
from tff_meta.programs import context as context_lib
from tff_meta.programs import memories
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import loop
from tff_meta.training import metric_writers
from tff_meta.training import run_config
from tff_meta.training import run_directory

# In a run's directory.
PROGRAM_STATES, PROGRAM_METRICS = 'program_states', 'program_metrics.csv'


async def train_model(
    process: tff.learning.templates.LearningProcess,
    source: cohorts.CohortSource,
    *,
    clients_per_round: int,
    rounds: int,
    states: tff.program.ProgramStateManager,
    client_states: client_state_store.ClientStateStore,
    metrics: tff.program.ReleaseManager | None = None,
    outputs: tff.program.ReleaseManager | None = None,
    evaluation: tff.learning.programs.EvaluationManager | None = None,
    evaluate_every: int | None = None,
) -> None:
  """Trains a process, whose clients may keep something, as a TFF program.

  It goes on from the newest state that is there. A round begins when the state
  of the round before is saved. The current context has to be a
  `tff.program.FederatedContext`, such as a `ProgramContext`.

  Args:
    process: The training process.
    source: Its clients.
    clients_per_round: Clients of a cohort.
    rounds: Rounds of the whole run.
    states: Where program states are.
    client_states: What clients keep between rounds.
    metrics: Where the metrics of each round are released, by its number.
    outputs: Where states are released, every ten rounds and at the end.
    evaluation: Evaluates models on the way, see `evaluation.build_process`.
    evaluate_every: Rounds from one evaluation to the next; None for the last
      round alone, which is evaluated in any case.

  Raises:
    Exception: What a manager has raised, also in the background.
  """
  released = metrics and memories.ReleasedMetrics(metrics)
  saved = memories.StatesWithMemories(states, client_states, released)
  try:
    await tff.learning.programs.train_model(
        train_process=memories.ProcessWithMemories(
            process, client_states, saved
        ),
        train_data_source=source,
        train_per_round_clients=clients_per_round,
        train_total_rounds=rounds,
        program_state_manager=saved,
        model_output_manager=outputs or tff.program.MemoryReleaseManager(),
        train_metrics_manager=released,
        evaluation_manager=evaluation,
        evaluation_periodicity=evaluate_every or rounds,
    )
  finally:  # Also where the source has ended it.
    saved.check()


class _Stopped(Exception):
  """The program was asked to stop."""


def train(
    process: tff.learning.templates.LearningProcess,
    cohort: Callable[[int], Sequence[str]],
    client_data: Callable[[str], Any],
    evaluation: loop.Evaluation,
    *,
    client_states: client_state_store.ClientStateStore,
    directory: run_directory.RunDirectory,
    config: Mapping[str, Any],
    schedule: loop.Schedule,
    should_stop: Callable[[], bool],
    report: Callable[[str], None],
    checkpoint: checkpoints.Checkpoint | None = None,
    sent: traffic.Traffic = traffic.UNKNOWN,
    **others: Any,
) -> loop.Trained:
  """Trains as `loop.train` does, as a program.

  Program states and metrics are TFF's, in the run's directory, and what a
  killed run goes on from. metrics.csv, timings.csv and a checkpoint, which
  evaluation reads, are written when the program ends; a program that is killed
  leaves no timings of its rounds.

  Args:
    process: What to train.
    cohort: Round (from 1) -> the ids of its clients; a pure function.
    client_data: Client id -> the client's data, without what it keeps.
    evaluation: None on the way; see `loop.NO_EVALUATION`.
    client_states: What clients keep between rounds.
    directory: Where the run is written, locked by the caller.
    config: The run's configuration as JSON values, kept in the checkpoint.
    schedule: How many rounds; a state is saved after each of them.
    should_stop: Asked after every round.
    report: Called with what a user should know.
    checkpoint: What the program left when it last ended, not when it was
      killed; the newest state goes for both.
    sent: What travels between the server and a client in a round.
    **others: Of `loop.train`, not used.

  Returns:
    Where the run has come to.

  Raises:
    OSError: If a file cannot be read or written.
    ValueError: If a state that was saved is not one of the process.
  """
  del evaluation, others
  states_path = directory.root / PROGRAM_STATES
  for path in states_path.glob('*_temp*'):  # Of a save that was killed.
    shutil.rmtree(path)
  states = tff.program.FileProgramStateManager(
      str(states_path), keep_total=3, keep_first=False
  )
  metrics_path = directory.root / PROGRAM_METRICS
  started: dict[int, float] = {}

  def cohort_unless_stopped(round_num):
    if started and should_stop():
      raise _Stopped()
    started[round_num] = time.perf_counter()
    return cohort(round_num)

  source = cohorts.CohortSource(
      cohort_unless_stopped,
      client_data,
      process.next.type_signature.parameter[1].member,
  )

  async def program():
    template = process.initialize()
    done = 0 if checkpoint is None else checkpoint.position.rounds
    last = max(await states.get_versions() or [0])
    if last > done:
      report(
          f'Continuing after round {last} of {schedule.num_rounds}, the last'
          f' one of {PROGRAM_STATES}.'
      )
    with contextlib.suppress(_Stopped):
      await train_model(
          process,
          source,
          clients_per_round=len(cohort(1)),
          rounds=schedule.num_rounds,
          states=states,
          client_states=client_states,
          metrics=tff.program.CSVFileReleaseManager(
              str(metrics_path), key_fieldname='round'
          ),
      )
    # What is still saved in the background, where it was stopped.
    unfinished = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*unfinished)
    structure = tff.learning.programs.ProgramState(
        template, 0, 0, source.iterator()
    )
    return await states.load_latest(structure)

  current = tff.framework.get_context_stack().current
  with tff.framework.get_context_stack().install(
      context_lib.ProgramContext(current)
  ):
    saved, rounds = asyncio.run(program())
  started[rounds + 1] = time.perf_counter()
  trained = loop.Trained(saved.state, rounds, None)
  _write_files(
      trained,
      directory,
      config,
      client_states,
      metrics_path,
      started,
      loop.traffic_columns(sent, len(cohort(1))),
  )
  return trained


def driver(config: run_config.RunConfig) -> Callable[..., loop.Trained]:
  """Returns what trains as a run's configuration says, see `loop.train`."""
  drivers: dict[str, Callable[..., loop.Trained]]
  drivers = {'loop': loop.train, 'program': train}
  return drivers[config.training.driver]


def _write_files(
    trained, directory, config, client_states, metrics_path, started, sent
) -> None:
  """Writes what `loop.train` leaves, so that the run can be evaluated."""
  metrics = metric_writers.MetricsFile(directory.metrics, 0, b'')
  timings = metric_writers.TimingsFile(
      directory.timings, min(started) - 1, lambda _: None
  )
  try:
    with open(metrics_path, newline='') as file:
      for row in csv.DictReader(file):
        number = int(row.pop('round'))
        if number > trained.rounds:
          continue
        metrics.append(
            number,
            {n.replace('model_metrics/', 'train/'): v for n, v in row.items()}
            | sent,
        )
        if {number, number + 1} <= started.keys():
          timings.append(number, started[number + 1] - started[number], None)
    store = checkpoints.CheckpointStore(directory.checkpoints)
    store.create()
    store.save(
        checkpoints.Checkpoint(
            config=config,
            position=checkpoints.Position(
                trained.rounds, *metrics.sync(), client_states.fingerprint()
            ),
            server_state=checkpoints.to_arrays(trained.state),
        )
    )
  finally:
    metrics.close()
    timings.close()
