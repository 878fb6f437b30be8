"""What clients keep between rounds, beside a program that does not know it."""

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any

import tensorflow_federated as tff

from tff_meta.programs import cohorts
from tff_meta.training import client_state_store
from tff_meta.training import loop


class _InTurn:
  """Does what a program begins in the background one after the other.

  What it is done for has a number, a round's, by which others wait for it.
  """

  def __init__(self):
    self._done: dict[int, asyncio.Event] = {}
    self._failure: BaseException | None = None
    self._turn = asyncio.Lock()

  async def do(self, number: int, work: Awaitable[None]) -> None:
    """Awaits the work when its turn has come."""
    try:
      async with self._turn:
        await work
    except Exception as error:
      self._failure = error
      raise
    finally:
      self.is_done(number)

  def is_done(self, number: int) -> None:
    """Ends the wait for a number."""
    self._event(number).set()

  async def wait_for(self, number: int) -> None:
    """Waits until the work of a number is done; raises what any has raised."""
    await self._event(number).wait()
    self.check()

  def check(self) -> None:
    """Raises what any work has raised."""
    if self._failure is not None:
      raise self._failure

  def _event(self, number):
    return self._done.setdefault(int(number), asyncio.Event())


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
    self._in_turn = _InTurn()

  async def release(self, value: Any, key: int) -> None:
    """Releases the metrics of a round."""
    await self._in_turn.do(key, self._metrics.release(value, key))

  async def wait_for(self, key: int) -> None:
    """Waits until the metrics of a round have been released, or raises."""
    await self._in_turn.wait_for(key)


class StatesWithMemories(tff.program.ProgramStateManager):
  """A state manager whose states rely on nothing that may get lost.

  A program saves in the background. So what clients have kept by a round, and
  its metrics, are made durable just before its state is: a program that is
  killed in between goes on from an earlier state, whose memories are still
  there, and what was kept later is forgotten when a state is loaded.
  """

  def __init__(
      self,
      states: tff.program.ProgramStateManager,
      client_states: client_state_store.ClientStateStore,
      metrics: ReleasedMetrics | None = None,
      kept_rounds: Collection[int] = (),
  ):
    """Wraps a state manager.

    Args:
      states: Where program states are, under the numbers of rounds.
      client_states: What clients keep.
      metrics: Where the program releases the metrics of its rounds.
      kept_rounds: Rounds beside those of its states that may still be gone back
        to.
    """
    self._states, self._client_states = states, client_states
    self._metrics, self._kept_rounds = metrics, kept_rounds
    self._in_turn = _InTurn()

  def check(self) -> None:
    """Raises what a save in the background has raised, which TFF only logs."""
    self._in_turn.check()

  async def wait_for(self, version: int) -> None:
    """Waits until the state after a round is saved or loaded, or raises."""
    await self._in_turn.wait_for(version)

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
    self._in_turn.is_done(version)
    return state

  async def save(self, program_state: Any, version: int) -> None:
    """Saves the state after a round, and what clients have kept by then."""
    version = int(version)  # It may be NumPy's.
    # One after the other: two of TFF's would both remove the oldest state.
    await self._in_turn.do(version, self._save(program_state, version))

  async def _save(self, program_state, version):
    if version and self._metrics is not None:
      await self._metrics.wait_for(version)
    before = await self.get_versions() or []
    self._client_states.commit({version, *before, *self._kept_rounds})
    await self._states.save(program_state, version)
    # Without what states needed that are gone now.
    after = await self.get_versions() or []
    self._client_states.commit({*after, *self._kept_rounds})

  async def remove_all(self) -> None:
    """Removes all states."""
    await self._states.remove_all()


class ProcessWithMemories:
  """What `tff.learning.programs.train_model` takes as `train_process`.

  Its `next` takes a `Cohort`, gives each client what it has kept, and writes
  what it keeps, under the number of the round.
  """

  def __init__(
      self,
      process: tff.learning.templates.LearningProcess,
      client_states: client_state_store.ClientStateStore,
      states: StatesWithMemories,
  ):
    """Wraps a process.

    Args:
      process: The training process, whose clients may keep nothing.
      client_states: What they keep.
      states: Where the program saves.
    """
    self._process, self._client_states = process, client_states
    self._states = states
    self.initialize = process.initialize
    self.get_model_weights = process.get_model_weights

  def next(self, state: Any, cohort: cohorts.Cohort) -> '_Round':
    """Returns a round to be awaited, whose value is `LearningProcessOutput`.

    Args:
      state: The server's.
      cohort: From a `CohortSource`.
    """
    return _Round(
        self._process, state, cohort, self._client_states, self._states
    )


class _Round(tff.program.MaterializableValueReference):
  """A round that begins once the state that it begins from is saved.

  A program does not wait for what it saves. Without this wait the states of
  rounds that take less time than to save one would pile up in memory, and a
  program that is killed would lose them.
  """

  def __init__(self, process, state, cohort, client_states, states):
    self._process, self._state, self._cohort = process, state, cohort
    self._client_states, self._states = client_states, states

  @property
  def type_signature(self):
    """The type of the process' result."""
    return self._process.next.type_signature.result

  async def get_value(self) -> tff.learning.templates.LearningProcessOutput:
    """Does the round; called by TFF."""
    round_num, clients = self._cohort
    await self._states.wait_for(round_num - 1)
    return loop.next_round(
        self._process, self._state, round_num, clients, self._client_states
    )
