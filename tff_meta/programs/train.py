"""`tff.learning.programs.train_model` in the place of our training loop."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import csv
import io
import os
import pathlib
import shutil
import time
from typing import Any

import tensorflow_federated as tff

from tff_meta import plain_files
from tff_meta import traffic
from tff_meta.programs import cohorts
from tff_meta.programs import context as context_lib
from tff_meta.programs import memories
from tff_meta.training import atomic_files
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import loop
from tff_meta.training import metric_writers
from tff_meta.training import run_config
from tff_meta.training import run_directory


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
    kept_rounds: Collection[int] = (),
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
    kept_rounds: Rounds beside those of `states` to which `client_states` may
      still be taken back.

  Raises:
    Exception: What a manager has raised, also in the background.
  """
  released = metrics and memories.ReleasedMetrics(metrics)
  saved = memories.StatesWithMemories(
      states, client_states, released, kept_rounds
  )
  if not await saved.get_versions():  # It begins, whatever is there.
    client_states.roll_back(0)
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
    checkpoint: checkpoints.Checkpoint | None = None,
    writers: Sequence[metric_writers.Writer] = (),
    sent: traffic.Traffic = traffic.UNKNOWN,
    **others: Any,
) -> loop.Trained:
  """Trains as `loop.train` does, as a program.

  Program states and metrics are TFF's, in the run's directory, and what a
  killed run goes on from. metrics.csv, timings.csv and a checkpoint, which
  evaluation reads, are written when the program ends, and what TensorBoard and
  trackers show; a program that is killed leaves no timings of its rounds.

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
    checkpoint: What the program left when it last ended, not when it was
      killed; the newest state goes for both.
    writers: Where the numbers of every round go as well, when the program ends.
    sent: What travels between the server and a client in a round.
    **others: Of `loop.train`, not used.

  Returns:
    Where the run has come to.

  Raises:
    OSError: If a file cannot be read or written, or states or metrics of the
      program are lost that it is to go on from.
    ValueError: If a state that was saved is not one of the process.
  """
  del evaluation, others
  position = checkpoints.Position(0, 0, 0)
  if checkpoint is not None:
    position = checkpoint.position
  done, last = position.rounds, directory.rounds_of_program()
  if last < done:
    raise run_directory.RunDirectoryError(
        f'Expected {directory.program_states} to hold the state after round'
        f' {done}, to which the run has come, found that after round {last}.'
        ' Tip: put the folder back, or give another --output_dir.'
    )
  _read_rows(directory.program_metrics, done + 1, last)  # Raises without one.
  store = checkpoints.CheckpointStore(directory.checkpoints)
  for path in directory.program_states.glob('*_temp*'):  # Of a killed save.
    shutil.rmtree(path)
  states = tff.program.FileProgramStateManager(
      str(directory.program_states),
      prefix=run_directory.STATE_PREFIX,
      keep_total=3,
      keep_first=False,
  )
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
    with contextlib.suppress(_Stopped):
      await train_model(
          process,
          source,
          clients_per_round=len(cohort(1)),
          rounds=schedule.num_rounds,
          states=states,
          client_states=client_states,
          metrics=tff.program.CSVFileReleaseManager(
              str(directory.program_metrics), key_fieldname='round'
          ),
          kept_rounds=[r for r in store.rounds(done) if client_states.holds(r)],
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
      position,
      started,
      writers,
      loop.traffic_columns(sent, len(cohort(1))),
  )
  return trained


def driver(config: run_config.RunConfig) -> Callable[..., loop.Trained]:
  """Returns what trains as a run's configuration says, see `loop.train`."""
  drivers: dict[str, Callable[..., loop.Trained]]
  drivers = {'loop': loop.train, 'program': train}
  return drivers[config.training.driver]


def _read_rows(
    path: pathlib.Path, first: int, last: int
) -> list[dict[str, str]]:
  """Returns the metrics that a program has released of rounds.

  Args:
    path: The file of TFF's manager.
    first: The first round.
    last: The last one; the file need not exist if there is none.

  Raises:
    RunDirectoryError: If one of the rounds has no row, or there is no table.
  """
  rows: dict[int, dict[str, str]] = {}
  with contextlib.suppress(FileNotFoundError):
    content = plain_files.read_bytes(path, plain_files.MAX_TABLE_BYTES)
    text = content.decode(errors='replace')
    with contextlib.suppress(ValueError, csv.Error):  # Those before count.
      for row in csv.DictReader(io.StringIO(text, newline='')):
        rows[int(row.pop('round', ''))] = row
  wanted = range(first, last + 1)
  missing = [r for r in wanted if r not in rows]
  if missing:
    raise run_directory.RunDirectoryError(
        f'Expected {path} to hold the metrics of rounds {first} to {last},'
        f' found none of round {missing[0]}. Tip: put the file back, or give'
        ' another --output_dir.'
    )
  return [rows[r] for r in wanted]


def _write_files(
    trained, directory, config, client_states, position, started, writers, sent
) -> None:
  """Writes what `loop.train` leaves, so that the run can be evaluated.

  metrics.csv goes on from the position of the last checkpoint. It is written
  beside its place: the old one stays until all of the new one is there.
  """
  rows = _read_rows(
      directory.program_metrics, position.rounds + 1, trained.rounds
  )
  prefix = metric_writers.read_prefix(
      directory.metrics, position.metrics_bytes, position.metrics_sha256
  )
  beside = directory.metrics.with_name(
      f'{directory.metrics.name}.{os.getpid()}{atomic_files.TMP_SUFFIX}'
  )
  metrics = metric_writers.MetricsFile(beside, position.metrics_rows, prefix)
  timings = metric_writers.TimingsFile(
      directory.timings, min(started) - 1, lambda _: None
  )
  try:
    for number, row in enumerate(rows, position.rounds + 1):
      values = {
          name.replace('model_metrics/', 'train/'): value
          for name, value in row.items()
      }
      metrics.append(number, values | sent)
      shown = metric_writers.for_people(values | sent)
      for writer in writers:
        writer.append(number, shown)
      if {number, number + 1} <= started.keys():
        timings.append(number, started[number + 1] - started[number], None)
    for writer in writers:
      writer.flush()
    written = metrics.sync()
    os.replace(beside, directory.metrics)
    atomic_files.sync_directory(directory.root)
    store = checkpoints.CheckpointStore(directory.checkpoints)
    store.create()
    store.save(
        checkpoints.Checkpoint(
            config=config,
            position=checkpoints.Position(
                trained.rounds, *written, client_states.fingerprint()
            ),
            server_state=checkpoints.to_arrays(trained.state),
        )
    )
  finally:
    metrics.close()
    timings.close()
