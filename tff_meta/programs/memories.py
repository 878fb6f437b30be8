"""What clients keep between rounds, beside a program that does not know it."""

import asyncio
from typing import Any

import tensorflow_federated as tff

from tff_meta.programs import cohorts
from tff_meta.training import client_state_store
from tff_meta.training import loop


class ProcessWithMemories:
  """What `tff.learning.programs.train_model` takes as `train_process`.

  Its `next` takes a `Cohort`, gives each client what it has kept, and writes
  what it keeps, under the number of the round.
  """

  def __init__(
      self,
      process: tff.learning.templates.LearningProcess,
      client_states: client_state_store.ClientStateStore,
  ):
    """Wraps a process.

    Args:
      process: The training process, whose clients may keep nothing.
      client_states: What they keep.
    """
    self._process, self._client_states = process, client_states
    self.initialize = process.initialize
    self.get_model_weights = process.get_model_weights

  def next(self, state: Any, cohort: cohorts.Cohort) -> Any:
    """Does a round.

    Args:
      state: The server's.
      cohort: From a `CohortSource`.

    Returns:
      The `LearningProcessOutput`.
    """
    return loop.next_round(
        self._process,
        state,
        cohort.round_num,
        cohort.clients,
        self._client_states,
    )


class ReleasedMetrics(tff.program.ReleaseManager):
  """A release manager that says when a round's metrics have been released.

  Rounds are released one after the other. A program releases in the background,
  and of two rounds at the same time TFF's CSV manager loses one.
  """

  def __init__(self, metrics: tff.program.ReleaseManager):
    """Wraps a release manager.

    Args:
      metrics: Releases metrics by the number of the round.
    """
    self._metrics = metrics
    self._released: dict[int, asyncio.Event] = {}
    self._failure: BaseException | None = None
    self._turn = asyncio.Lock()

  async def release(self, value: Any, key: int) -> None:
    """Releases the metrics of a round."""
    try:
      async with self._turn:
        await self._metrics.release(value, key)
    except Exception as error:
      self._failure = error
      raise
    finally:
      self._event(key).set()

  async def wait_for(self, key: int) -> None:
    """Waits until the metrics of a round have been released, or raises."""
    await self._event(key).wait()
    if self._failure is not None:
      raise self._failure

  def _event(self, key):
    return self._released.setdefault(int(key), asyncio.Event())


class StatesWithMemories(tff.program.ProgramStateManager):
  """A state manager whose states rely on nothing that may get lost.

  A program saves in the background, while rounds go on. So what clients have
  kept by a round, and its metrics, are made durable just before its state is: a
  program that is killed in between goes on from an earlier state, whose
  memories are still there, and what was kept later is forgotten when a state is
  loaded.
  """

  def __init__(
      self,
      states: tff.program.ProgramStateManager,
      client_states: client_state_store.ClientStateStore,
      metrics: ReleasedMetrics | None = None,
  ):
    """Wraps a state manager.

    Args:
      states: Where program states are, under the numbers of rounds.
      client_states: What clients keep.
      metrics: Where the program releases the metrics of its rounds.
    """
    self._states, self._client_states = states, client_states
    self._metrics = metrics
    self._failure: BaseException | None = None
    self._turn = asyncio.Lock()

  def check(self) -> None:
    """Raises what a save in the background has raised, which TFF only logs."""
    if self._failure is not None:
      raise self._failure

  async def get_versions(self) -> list[int] | None:
    """Returns the rounds whose states are there."""
    return await self._states.get_versions()

  async def load(self, version: int, structure: Any) -> Any:
    """Loads the state after a round, and forgets what clients kept later."""
    state = await self._states.load(version, structure)
    if version:
      if self._client_states.is_durable and not self._client_states.holds(
          version
      ):
        raise client_state_store.ClientStateError(
            f'Expected what clients kept after round {version}, found none: it'
            ' is not that of these program states.'
        )
    self._client_states.roll_back(version)
    return state

  async def save(self, program_state: Any, version: int) -> None:
    """Saves the state after a round, and what clients have kept by then."""
    try:
      # One after the other: two of TFF's would both remove the oldest state.
      async with self._turn:
        await self._save(program_state, int(version))  # It may be NumPy's.
    except Exception as error:
      self._failure = error
      raise

  async def _save(self, program_state, version):
    if version and self._metrics is not None:
      await self._metrics.wait_for(version)
    before = await self.get_versions() or []
    self._client_states.commit({version, *before})
    await self._states.save(program_state, version)
    # Without what states needed that are gone now.
    self._client_states.commit(set(await self.get_versions() or ()))

  async def remove_all(self) -> None:
    """Removes all states."""
    await self._states.remove_all()
