"""A finished or running run as it was at its newest good checkpoint."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_meta import catalog
from tff_meta.training import checkpoints
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import run
from tff_meta.training import run_config
from tff_meta.training import run_directory


class RestoredModels(NamedTuple):
  """What a run has come to, and what it began with.

  Attributes:
    trained: The model at the checkpoint.
    untrained: The initial model, before any client took part.
    rounds: Completed communication rounds.
    process: What it was trained with.
    state: The server's state at the checkpoint.
  """

  trained: protocols.Model
  untrained: protocols.Model
  rounds: int
  process: tff.learning.templates.LearningProcess
  state: Any


def read_config(
    directory: run_directory.RunDirectory,
) -> run_config.RunConfig:
  """Returns the configuration of a run.

  Args:
    directory: The run's directory.

  Raises:
    FileNotFoundError: If there is no run.
    RunDirectoryError: If config.json cannot be read.
    ValueError: If it is not a configuration of this version of the library, or
      has a name that the plugins which are imported do not register.
  """
  content = directory.read_config()
  if content is None:
    raise FileNotFoundError(
        f'Expected a run in {directory.root}, found no {directory.config.name}'
        ' there.'
    )
  try:
    return run_config.from_json(content.get('config'))
  except catalog.UnknownNameError as error:
    names = ', '.join(directory.read_plugins()) or 'none'
    raise ValueError(
        f'{error} The run in {directory.root}, made with the plugins {names},'
        ' has this name of a plugin or of an installed package that does not'
        ' register it now. Tip: name another module with --plugins, or import'
        ' it before `tff_meta.load`.'
    ) from None


@contextlib.contextmanager
def open_models(
    experiment: experiment_lib.Experiment,
    directory: run_directory.RunDirectory,
    report: Callable[[str], None],
) -> Iterator[RestoredModels]:
  """Opens the models of a run, which may go on meanwhile; changes nothing.

  Args:
    experiment: What the run's configuration stands for.
    directory: The run's directory.
    report: Called with a line for every checkpoint that is passed over, if
      there are other packages or kernels than in training, and if the run has
      learned nothing.

  Yields:
    The models; what clients have kept is read when asked for.

  Raises:
    ClientStateError: If what clients keep cannot be read.
    FileNotFoundError: If there is no checkpoint.
    RunDirectoryError: If the data are not those that the run was trained on, or
      there is no checkpoint that is good and of this configuration.
  """
  _check_data(directory, experiment)
  process = experiment.build_process()
  with run.open_client_states(
      process, directory, read_only=True
  ) as client_states:
    checkpoint = run.find_checkpoint(
        directory,
        run.identity(experiment),
        process,
        client_states,
        report,
        needs_metrics=False,
    )
    if checkpoint is None:
      when = 'after --checkpoint_every rounds'
      if experiment.config.training.driver == 'program':
        when = 'when it ends or is stopped, with --driver=program'
      raise FileNotFoundError(
          f'Expected a checkpoint in {directory.checkpoints}, found none.'
          f' Tip: a new run writes its first {when}.'
      )
    run.report_other_environment(directory, report)
    state = checkpoints.to_state(process, checkpoint.server_state)
    rounds = checkpoint.position.rounds
    # What is opened does not need the metrics.
    with contextlib.suppress(OSError, ValueError):
      why = run.nothing_learned(directory)
      if why is not None:
        report(f'Warning: {why}. The model is the initial one.')
    yield RestoredModels(
        protocols.model(process, state, client_states, rounds),
        protocols.untrained_model(process),
        rounds,
        process,
        state,
    )


def _check_data(
    directory: run_directory.RunDirectory, experiment: experiment_lib.Experiment
) -> None:
  """Raises a RunDirectoryError if a run was trained on other data."""
  content: Any = directory.read_config()
  try:
    of_run, versions = content['data']['fingerprint'], content['versions']
    version = str(versions['tff_meta'])
  except (KeyError, TypeError):  # Then checkpoints tell.
    return
  if of_run == experiment.dataset.fingerprint():
    return
  earlier = '.'
  if version.startswith('0.1.'):  # Whose fingerprints are of fewer examples.
    earlier = ', or the same by another rule, as the run is of version 0.1.'
  raise run_directory.RunDirectoryError(
      f'Expected the data that the run in {directory.root} was trained on,'
      f' found others in {experiment.config.data.dataset}{earlier} Nothing was'
      ' changed. Tip: put the earlier data back, or say with --data_dir where'
      ' they are. A model for other data needs a run of its own.'
  )
