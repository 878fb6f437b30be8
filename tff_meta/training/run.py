"""A whole run: begin or go on, train, evaluate, sum up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import hashlib
import importlib.metadata
import platform
from typing import Any

import numpy as np
import tensorflow_federated as tff
import tree

import tff_meta
from tff_meta import composition
from tff_meta import dealing
from tff_meta import installation
from tff_meta import machine
from tff_meta import plain_files
from tff_meta import plugins
from tff_meta import traffic
from tff_meta.training import atomic_files
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import evaluator as evaluator_lib
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import learning_curve
from tff_meta.training import loop
from tff_meta.training import metric_writers
from tff_meta.training import protocols
from tff_meta.training import run_config
from tff_meta.training import run_directory
from tff_meta.training import sealed_json
from tff_meta.training import stop_signals
from tff_meta.training import trackers

_VERSIONS_OF = ('tensorflow', 'tensorflow-federated', 'numpy')
# Parts of config.json on what decides the bits of a round.
_CODE = ('git_commit', 'versions', 'environment')
_SHOWN_DIFFERENCES = 5
_TIP_TO_READ = 'Nothing was changed. Tip: put the file back.'
_TIP = (
    'Nothing was changed. Tip: put the file back, give another --output_dir, or'
    ' remove the checkpoints to begin again.'
)


class AnotherConfigurationError(ValueError):
  """The directory holds a run of another configuration."""


class NothingLearnedError(Exception):
  """No client has trained in any round; the message says why."""


class StoppedError(Exception):
  """A signal has stopped the run; it can be continued.

  Attributes:
    signal_num: Which signal.
  """

  def __init__(self, signal_num: int):
    super().__init__(f'stopped by signal {signal_num}')
    self.signal_num = signal_num


def identity(experiment: experiment_lib.Experiment) -> dict[str, Any]:
  """Returns what a run and its continuation must have in common."""
  return experiment.config.identity() | {
      'data_fingerprint': experiment.dataset.fingerprint()
  }


@contextlib.contextmanager
def open_client_states(
    process: tff.learning.templates.LearningProcess,
    directory: run_directory.RunDirectory,
    *,
    read_only: bool = False,
) -> Iterator[client_state_store.ClientStateStore]:
  """Opens what the clients of a run keep between rounds.

  Args:
    process: The training process. If its clients keep nothing, no file is made.
    directory: The run's directory.
    read_only: Whether the run may go on meanwhile, in another process.

  Yields:
    The store.

  Raises:
    ClientStateError: If the file cannot be read or written.
    RunDirectoryError: If there are checkpoints, which need it, and it is lost.
  """
  if isinstance(process, composition.StatefulLearningProcess):
    is_begun = checkpoints.CheckpointStore(directory.checkpoints).paths()
    if is_begun and not directory.client_states.exists():
      raise run_directory.RunDirectoryError(
          f'Expected {directory.client_states}, which the checkpoints beside it'
          f' need, found {plain_files.describe(directory.client_states)}.'
          f' {_TIP_TO_READ if read_only else _TIP}'
      )
    store: client_state_store.ClientStateStore = client_state_store.SqliteStore(
        directory.client_states, read_only=read_only
    )
  else:
    store = client_state_store.InMemoryStore()
  with contextlib.closing(store):
    yield store


def find_checkpoint(
    directory: run_directory.RunDirectory,
    run_identity: Mapping[str, Any],
    process: tff.learning.templates.LearningProcess,
    client_states: client_state_store.ClientStateStore,
    report: Callable[[str], None],
    *,
    needs_metrics: bool = True,
) -> checkpoints.Checkpoint | None:
  """Returns the newest checkpoint that can be used, None if there is none.

  Args:
    directory: The run's directory.
    run_identity: From `identity`.
    process: The training process.
    client_states: From `open_client_states`.
    report: Called with a line for every checkpoint that is passed over.
    needs_metrics: Whether the run is to go on, so metrics.csv is needed.

  Raises:
    RunDirectoryError: If there are checkpoints and none can be used.
  """
  problems = []

  def pass_over(problem):
    problems.append(problem)
    report(problem)

  def problem_of(checkpoint):
    try:
      _check_usable(
          checkpoint,
          directory if needs_metrics else None,
          run_identity,
          process,
          client_states,
      )
    except (OSError, ValueError) as error:
      return str(error)
    return None

  store = checkpoints.CheckpointStore(directory.checkpoints)
  checkpoint = store.load_latest(
      pass_over, problem_of, checkpoints.max_bytes(process)
  )
  if checkpoint is None and problems:
    raise run_directory.RunDirectoryError(
        f'Expected one of the {len(problems)} checkpoints in'
        f' {directory.checkpoints} to be usable, found none.'
        f' {problems[0].rstrip(".")}.'
        f' {_TIP if needs_metrics else _TIP_TO_READ}'
    )
  return checkpoint


def _check_usable(
    checkpoint: checkpoints.Checkpoint,
    directory: run_directory.RunDirectory | None,
    run_identity: Mapping[str, Any],
    process: tff.learning.templates.LearningProcess,
    client_states: client_state_store.ClientStateStore,
) -> None:
  """Raises a ValueError or OSError if a run cannot go on from a checkpoint.

  Args:
    checkpoint: The checkpoint, which is as it was written.
    directory: Where its metrics.csv is; None if it is not needed.
    run_identity: From `identity`.
    process: The training process.
    client_states: What clients keep.
  """
  _check_same(checkpoint.config, run_identity, 'it')
  position, best = checkpoint.position, checkpoint.best
  if directory is not None:
    metric_writers.read_prefix(
        directory.metrics, position.metrics_bytes, position.metrics_sha256
    )
  kept = [(position.rounds, position.client_states)]
  checkpoints.to_state(process, checkpoint.server_state)
  if best is not None:
    checkpoints.to_state(process, best.server_state)
    kept.append((best.rounds, best.client_states))
  if not client_states.is_durable:
    return
  for rounds, fingerprint in kept:
    if not client_states.holds(rounds):
      raise ValueError(
          f'{run_directory.CLIENT_STATES} does not hold the states of clients'
          f' after round {rounds}.'
      )
    if fingerprint and client_states.fingerprint(rounds) != fingerprint:
      raise ValueError(
          f'{run_directory.CLIENT_STATES} does not hold the states that clients'
          f' had after round {rounds}, but others.'
      )


def _check_same(old, new, what):
  with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
    old = run_config.upgrade(old)  # Else the differences say what is wrong.
  old = run_config.identity(old)
  differences = run_directory.differences(old, new)
  differences = [
      'the data have changed' if d.startswith('data_fingerprint: ') else d
      for d in differences
  ]
  if differences:
    shown = '; '.join(differences[:_SHOWN_DIFFERENCES])
    if len(differences) > _SHOWN_DIFFERENCES:
      shown += f'; and {len(differences) - _SHOWN_DIFFERENCES} more'
    raise AnotherConfigurationError(
        f'Expected {what} to have this configuration, found another: {shown}.'
        ' Tip: give another --output_dir, or the flags (and the version of this'
        ' library) that the run began with.'
    )


def train_and_evaluate(
    experiment: experiment_lib.Experiment,
    process: tff.learning.templates.LearningProcess,
    evaluator: evaluator_lib.Evaluator,
    directory: run_directory.RunDirectory,
    *,
    report: Callable[[str], None],
    track: Sequence[str] = (),
    train: Callable[..., loop.Trained] = loop.train,
) -> dict[str, Any]:
  """Begins or continues a run; a finished one is only summed up.

  Args:
    experiment: What to run.
    process: From `experiment.build_process`.
    evaluator: Of the experiment.
    directory: Where the run is, locked by the caller.
    report: Called with lines for the user about what is found there and what
      goes wrong.
    track: Names of `trackers.TRACKERS` that the numbers go to as well.
    train: What trains, with the arguments of `loop.train`.

  Returns:
    What summary.json says.

  Raises:
    AnotherConfigurationError: If the directory holds another run.
    ClientStateError: If what clients keep cannot be read or written.
    IncompatibleCheckpointError: If another version of the library wrote it.
    NothingLearnedError: If no client trained in any round; the checkpoints are
      there, but nothing is evaluated.
    OSError: If a file cannot be read or written, or is removed meanwhile.
    RunDirectoryError: If the directory's config.json cannot be read, or no
      checkpoint can be used.
    StoppedError: If Ctrl-C (SIGINT) or SIGTERM stopped it between two rounds.
  """
  config = experiment.config
  num_rounds = config.training.rounds
  run_identity = identity(experiment)
  old_file, config_error = _read_config_file(directory, run_identity)
  with open_client_states(process, directory) as client_states:
    checkpoint = find_checkpoint(
        directory, run_identity, process, client_states, report
    )
    done = checkpoint.position.rounds if checkpoint else 0
    # A program that is killed leaves states without a checkpoint.
    most = max(done, directory.rounds_of_program())
    if most > num_rounds:
      raise AnotherConfigurationError(
          f'Expected `rounds` to be at least {most}, which the run has done'
          f' already, found {num_rounds}.'
      )
    if config_error is not None:
      if checkpoint is None:
        raise config_error
      report(f'Note: {config_error} It is made again.')
      _write_config(directory, _config_file(experiment, process, None, most))
    summary = _finished_summary(directory, config, old_file, done, report)
    if summary is not None:
      report(f'{directory.root} holds this run, finished: {done} rounds.')
      return summary
    file = _config_file(experiment, process, old_file, most)
    sent = traffic.Traffic(**file['client_bytes_per_round'])
    _report_beginning(experiment, directory, most, old_file, file, report)
    _write_config(directory, file)
    with _open_writers(experiment, directory, done, track, report) as writers:
      trained, metrics = _train(
          experiment,
          process,
          evaluator,
          directory,
          client_states,
          checkpoint,
          writers,
          report,
          train,
          sent,
      )
      if trained.rounds < num_rounds:
        assert trained.best is not None  # Patience goes by it.
        report(
            f'Training ended after round {trained.rounds} of {num_rounds}:'
            f' accuracy dropped more than {config.training.patience} times'
            f' since round {trained.best.rounds}.'
        )
      _check_learned(directory, report)
      summary = (
          _summary(experiment, directory, trained, sent)
          | _last_evaluations(evaluator, metrics, config)
          | _evaluate(
              experiment,
              process,
              evaluator,
              directory,
              client_states,
              trained,
              report,
          )
      )
      shown = metric_writers.for_people(_final_numbers(summary))
      for writer in writers:
        writer.finish(trained.rounds, shown)
    summary['files'] = _checksums(directory)
    client_states.check_in_place()
    _check_kept(directory, trained)
  atomic_files.write_json(directory.summary, sealed_json.seal(summary))
  return summary


@contextlib.contextmanager
def _open_writers(
    experiment, directory, done, track, report
) -> Iterator[list[metric_writers.Writer]]:
  """Opens where the numbers of a run go beside its tables."""
  config = experiment.config.to_json()
  title = '{algorithm} on {dataset}, seed {seed}'.format(**config)
  run = trackers.TrackedRun(directory.trackers, title, config, done)
  with contextlib.ExitStack() as stack:

    def opened(writer):
      return stack.enter_context(contextlib.closing(writer))

    events = metric_writers.TensorBoardWriter(directory.events, done, config)
    yield [
        opened(events),
        *(opened(trackers.open_tracker(name, run, report)) for name in track),
    ]


def _final_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
  """Returns the accuracies at the end, as columns of metrics.csv are called.

  They begin with `final`, or with `final_best` where they are of the best
  round; those of references have their name before the last part.
  """
  numbers = {}
  for suffix in ('', '_best'):
    evaluations = summary.get(f'evaluation{suffix}', {})
    for protocol, result in evaluations.items():
      for row, of_row in {'': result, **result['references']}.items():
        at = '/'.join(filter(None, (f'final{suffix}', protocol, row)))
        for name in ('accuracy', 'accuracy_micro', 'accuracy_worst_decile'):
          key = 'accuracy_mean' if name == 'accuracy' else name
          numbers[f'{at}/{name}'] = of_row[key]
  return numbers


def nothing_learned(directory: run_directory.RunDirectory) -> str | None:
  """Returns why no client trained in any round, None if one did.

  Args:
    directory: The run's directory.

  Raises:
    OSError: If metrics.csv cannot be read.
    ValueError: If it is not a table of numbers.
  """
  columns = metric_writers.read_metrics(directory.metrics)
  # Older versions of the library counted examples alone.
  trained = columns.get(metric_writers.TRAINED) or columns.get(
      'train/num_examples'
  )
  if not trained or any(trained):
    return None
  sums = {name: sum(values) for name, values in columns.items()}
  clients, non_finite, bad_label, empty = (
      sums.get(name, 0)
      for name in (
          metric_writers.CLIENTS,
          metric_writers.NON_FINITE,
          metric_writers.BAD_LABEL,
          metric_writers.EMPTY,
      )
  )
  others = metric_writers.num_without_reason(sums)
  return (
      f'In none of {len(trained)} rounds has a client trained: of {clients:.0f}'
      ' that took part, counted in every round,'
      f' {non_finite - bad_label:.0f} sent numbers that are not finite,'
      f' {bad_label:.0f} had labels of no class, {empty:.0f} had no examples'
      f' and {others:.0f} learned nothing from theirs'
  )


def _check_learned(directory, report) -> None:
  """Raises if no round trained anything, and tells of rounds that did not."""
  why = nothing_learned(directory)
  if why is not None:
    raise NothingLearnedError(
        f'{why}. Nothing was learned, so nothing is evaluated; the checkpoints'
        f' are in {directory.checkpoints}.'
    )
  columns = metric_writers.read_metrics(directory.metrics)
  trained = columns.get(metric_writers.TRAINED, [])
  if 0 in trained:
    report(
        f'Warning: in {trained.count(0)} of {len(trained)} rounds no client'
        ' trained.'
    )


def _checksums(directory) -> dict[str, str]:
  """Returns the SHA-256 of the tables that a comparison reads, by name."""
  return {
      path.name: hashlib.sha256(
          plain_files.read_bytes(path, plain_files.MAX_TABLE_BYTES)
      ).hexdigest()
      for path in (directory.metrics, *directory.tables())
  }


def _check_kept(directory, trained) -> None:
  """Raises if the checkpoint of the last round is not there any more."""
  store = checkpoints.CheckpointStore(directory.checkpoints)
  if trained.rounds not in store.rounds():
    raise run_directory.RunDirectoryError(
        f'Expected {directory.checkpoints} to hold the checkpoint of round'
        f' {trained.rounds}, which was written there, found none.'
    )


def _evaluate(
    experiment, process, evaluator, directory, client_states, trained, report
) -> dict[str, Any]:
  """Returns the evaluation of the last round, and of the best if looked for."""

  def model(state, round_num):
    return protocols.model(process, state, client_states, round_num)

  models = {'': model(trained.state, trained.rounds)}
  selection = {}
  best = trained.best
  if best is not None:
    models['_best'] = models['']  # The same one is evaluated once.
    if best.rounds != trained.rounds:
      state = checkpoints.to_state(process, best.server_state)
      models['_best'] = model(state, best.rounds)
    selection = {'best_round': best.rounds, 'best_round_validation': best.value}
  evaluations = evaluator.evaluate_all(
      experiment.config.evaluation.protocols,
      models,
      protocols.untrained_model(process),
      directory.root,
      report,
  )
  return selection | {
      f'evaluation{suffix}': of_round
      for suffix, of_round in evaluations.items()
  }


def _report_beginning(
    experiment, directory, done, old_file, file, report
) -> None:
  """Says what the run goes on from, and what is odd about it."""
  if done:
    rounds = experiment.config.training.rounds
    report(f'Continuing after round {done} of {rounds}.')
    _report_other_code(old_file, file, report)
  elif directory.metrics.exists():
    report(
        f'Starting over: {directory.root} holds no checkpoint to go on from, so'
        ' its rounds are done again.'
    )
  _report_unfinished_episode(experiment, done, report)
  _report_privacy(experiment, directory, done, report)
  training = experiment.config.training
  network = experiment.network.with_head(experiment.dataset.num_classes)
  why = training.aggregator().why_in_vain(network.tensor_sizes())
  if why is not None:
    report(f'Note: the aggregation {training.aggregation} does nothing: {why}.')


def _report_privacy(experiment, directory, done, report):
  """Says how private a run is, before anything is trained."""
  found = experiment.config.privacy(experiment.config.training.rounds)
  if found is not None:
    what = (
        'epsilon {epsilon:.2f} at delta {delta:g}, of replacing one of'
        ' {num_clients} clients, {clients_per_round} of which take part in each'
        ' of {rounds} rounds'
    ).format(**found)
    if found['rounds_per_cohort'] > 1:
      what += f', the same ones for {found["rounds_per_cohort"]} rounds'
    report(
        f'Privacy: {what}. Noise is new every time: a run that is done again is'
        ' another one. Accuracies on the way and at the end are exact.'
    )
    if done and not directory.cohort_secret.exists():
      report(
          f'Warning: {directory.cohort_secret} is not there any more, which has'
          ' decided who takes part: the rounds to come draw other clients.'
      )


def _report_unfinished_episode(experiment, done, report):
  """Says so if rounds that are still to do end within an episode."""
  rounds = experiment.config.training.rounds
  episode = experiment.rounds_per_cohort
  if done < rounds and rounds % episode:
    report(
        f'Note: an episode has {episode} rounds, of which {rounds} is no'
        f' multiple: the last one ends after {rounds % episode} of them.'
    )


def _train(
    experiment,
    process,
    evaluator,
    directory,
    client_states,
    checkpoint,
    writers,
    report,
    train,
    sent,
) -> tuple[loop.Trained, dict[str, list[float]]]:
  """Trains and draws the learning curve; returns its numbers, too."""
  config, training = experiment.config, experiment.config.training
  evaluation = loop.NO_EVALUATION
  if training.eval_every:
    evaluation = evaluator.on_the_way(process)
  cohort = experiment.cohort
  if config.privacy(1) is not None:
    cohort = functools.partial(cohort, secret=directory.secret_of_cohorts())
  client_data = experiment.dataset.tff_client_data
  if dealing.dealer() is not None:  # Whoever computes clients reads them.
    client_data = experiment.dataset.named_client_data
  with stop_signals.listen() as stop:
    trained = train(
        process,
        cohort,
        client_data,
        evaluation,
        is_cached=experiment.dataset.is_cached,
        client_states=client_states,
        directory=directory,
        config=identity(experiment),
        schedule=loop.Schedule(
            training.rounds,
            training.checkpoint_every,
            training.eval_every,
            training.eval_from,
            training.patience,
        ),
        checkpoint=checkpoint,
        should_stop=stop.requested,
        report=report,
        why_not_trained=experiment.why_not_trained,
        writers=writers,
        sent=sent,
        available=training.availability(),
        seed=config.seed,
        rounds_per_cohort=experiment.rounds_per_cohort,
    )
  metrics = metric_writers.read_metrics(directory.metrics)
  learning_curve.write_learning_curve(
      directory.learning_curve,
      metrics,
      f'{config.algorithm} on {config.data.dataset}',
      experiment.rounds_per_cohort,
      experiment.method.phase_ends,
      evaluation.best_by,
  )
  if stop.signal_num is not None:
    raise StoppedError(stop.signal_num)
  return trained, metrics


def _read_config_file(
    directory, run_identity
) -> tuple[dict[str, Any] | None, run_directory.RunDirectoryError | None]:
  """Returns config.json, or else what is wrong with it; both None without.

  Raises:
    AnotherConfigurationError: If it is that of another run.
  """
  try:
    found = directory.read_config()
    if found is None:
      return None, None
    old = found['config'] | {'data_fingerprint': found['data']['fingerprint']}
  except run_directory.RunDirectoryError as error:
    return None, error
  except (AttributeError, KeyError, TypeError):
    return None, run_directory.RunDirectoryError(
        f'Expected {directory.config} to be the configuration of a run, found'
        ' something else. Tip: give another --output_dir.'
    )
  _check_same(old, run_identity, str(directory.root))
  return found, None


def _report_other_code(old_file, new_file, report):
  """Says so if a run goes on with other code, or kernels, than so far."""
  if old_file is None:
    report(
        'Note: whether the code or its environment has changed is not known, as'
        ' there was no config.json to read.'
    )
    return
  changes = _changes(old_file, new_file, *_CODE)
  if changes:
    report(
        f'Note: the code or its environment has changed since ({changes}), so'
        ' the results may not be those of an uninterrupted run.'
    )


def report_other_environment(
    directory: run_directory.RunDirectory, report: Callable[[str], None]
) -> None:
  """Says so if a run was made with other packages or kernels than there are.

  Args:
    directory: The run's directory.
    report: Called with a line if they differ.
  """
  file = directory.read_config() or {}
  changes = _changes(file, _surroundings(), 'versions', 'environment')
  if changes:
    report(
        f'Note: the environment is another than in training ({changes}), so'
        ' results may differ a little from those of the run.'
    )


def _changes(old_file, new_file, *parts) -> str:
  """Returns what differs, of what the old file has recorded."""
  changes = []
  for part in parts:
    old, new = old_file.get(part), new_file[part]
    if isinstance(old, dict) and isinstance(new, dict):
      new = {name: value for name, value in new.items() if name in old}
    changes += run_directory.differences({part: old}, {part: new})
  return '; '.join(changes)


def _write_config(directory, file) -> None:
  atomic_files.write_json(directory.config, sealed_json.seal(file))


def _config_file(experiment, process, old_file, done) -> dict[str, Any]:
  """Returns the content of config.json.

  `num_model_parameters` are those of the network with a classifier for all
  classes, also where an algorithm goes without; `num_server_parameters` what
  the server holds and sends (a body alone, several models, a hypernetwork);
  `num_client_values` what a client keeps from round to round, be it weights,
  moments or counts; and `client_bytes_per_round` what it is sent and sends, all
  of it, with null for what TFF's types do not tell (see `traffic`). What
  `git_commit` and the like say is of the code that has run last.

  Args:
    experiment: What to run.
    process: From `experiment.build_process`.
    old_file: What config.json has been; None if it cannot be read.
    done: Rounds that are done, from which the run goes on.
  """
  dataset = experiment.dataset
  network = experiment.network.with_head(dataset.num_classes)
  on_server = process.get_model_weights(process.initialize()).trainable
  of_client = ()
  if isinstance(process, composition.StatefulLearningProcess):
    of_client = process.initial_memory
  file = {
      'config': experiment.config.to_json(),
      'data': {
          'fingerprint': dataset.fingerprint(),
          'num_train_clients': len(dataset.client_ids()),
          'num_classes': dataset.num_classes,
          'input_shape': list(dataset.input_shape),
          # Null: they are numbers.
          'class_names': dataset.class_names,
      },
      'num_model_parameters': network.num_parameters(),
      'num_server_parameters': _num_values(on_server),
      'num_client_values': _num_values(of_client),
      'client_bytes_per_round': traffic.of_process(process)._asdict(),
      **_privacy(experiment, experiment.config.training.rounds),
      **_surroundings(),
      'git_commit': installation.commit(),
  }
  return file | _code_of_rounds(old_file, file, done)


def _code_of_rounds(old_file, file, done) -> dict[str, Any]:
  """Returns the entry on what has done which rounds, none of one code alone.

  It is a list of `_CODE`, each with the first round that is of it; one beyond
  the last round has evaluated alone. A `git_commit` of null is not known. Files
  of earlier versions name the code that ran last, which is taken for all of it.

  Args:
    old_file: What config.json has been; None if it cannot be read.
    file: What it is to be, without this.
    done: Rounds that are done.
  """
  codes = [{'from_round': 1, 'git_commit': None}]
  if old_file is not None:
    codes = old_file.get('code_of_rounds') or [_code(old_file, 1)]
  codes = [code for code in codes if code['from_round'] <= done]
  if codes and _changes(codes[-1], file, *_CODE):
    codes.append(_code(file, done + 1))
  return {'code_of_rounds': codes} if len(codes) > 1 else {}


def _code(file, from_round) -> dict[str, Any]:
  return {'from_round': from_round} | {part: file.get(part) for part in _CODE}


def _privacy(experiment, rounds) -> dict[str, Any]:
  """Returns the entry of a private run, none for others."""
  found = experiment.config.privacy(rounds)
  return {} if found is None else {'privacy': found}


def _surroundings() -> dict[str, Any]:
  """Returns what of the machine decides the last digits of results."""
  return {
      'versions': {
          'python': platform.python_version(),
          'tff_meta': tff_meta.__version__,
          **{name: importlib.metadata.version(name) for name in _VERSIONS_OF},
          **plugins.versions(),
      },
      # Null: as TensorFlow sees fit.
      'environment': machine.environment(),
      'platform': {
          'machine': platform.machine(),
          'processor': machine.processor(),
          'cores': machine.CORES,
      },
  }


def _num_values(structure) -> int:
  """Returns how many numbers a structure of arrays holds."""
  return sum(np.size(array) for array in tree.flatten(structure))


def _summary(experiment, directory, trained, sent) -> dict[str, Any]:
  """Returns summary.json without the evaluation.

  `training_bytes` are those of all clients in all rounds of training.
  """
  config, training = experiment.config, experiment.config.training
  num_times = trained.rounds * len(experiment.cohort(1))
  training_bytes = sent.times(num_times)._asdict()
  if not training.availability().is_full:  # Not as many in every round.
    columns = metric_writers.read_metrics(directory.metrics)
    for name, column in (
        ('down', metric_writers.BYTES_DOWN),
        ('up', metric_writers.BYTES_UP),
    ):
      if column in columns:
        training_bytes[name] = int(sum(columns[column]))
  return {
      'algorithm': config.algorithm,
      'dataset': config.data.dataset,
      'preset': config.preset,
      'rounds': trained.rounds,
      'ended_by_patience': (
          training.patience if trained.rounds < training.rounds else None
      ),
      'seed': config.seed,
      'eval_groups': config.evaluation.eval_groups,
      'references': config.evaluation.references,
      'reference_hparams': config.to_json()['reference_hparams'],
      'nvar': config.evaluation.nvar,
      'seconds_per_round_median': metric_writers.median_seconds(
          directory.timings
      ),
      'client_bytes_per_round': sent._asdict(),
      'training_bytes': training_bytes,
      **_privacy(experiment, trained.rounds),
  }


def _last_evaluations(
    evaluator: evaluator_lib.Evaluator,
    metrics: Mapping[str, Sequence[float]],
    config: run_config.RunConfig,
) -> dict[str, Any]:
  """Returns the mean of the last ten evaluations on the way, if there are any.

  With an evaluation in every round this is the number in FedEC's tables.
  """
  if not config.training.eval_every:
    return {}
  column = evaluator.check_on_the_way()
  mean = metric_writers.mean_of_last(metrics, column, 10)
  return {} if mean is None else {'last_ten_evaluations_mean': {column: mean}}


def _finished_summary(
    directory: run_directory.RunDirectory,
    config: run_config.RunConfig,
    old_file: Mapping[str, Any] | None,
    done: int,
    report: Callable[[str], None],
) -> dict[str, Any] | None:
  """Returns summary.json if it is what this run would write again.

  Args:
    directory: The run's directory.
    config: Of the run as it is asked for now.
    old_file: What config.json has been; None if it cannot be read.
    done: Rounds that are done.
    report: Called with a line if the file cannot be used.
  """
  try:
    summary = sealed_json.read(directory.summary, directory.config)
  except FileNotFoundError:
    return None
  except plain_files.DamagedFileError as error:
    report(f'Note: {error} It is made again.')
    return None
  if not sealed_json.is_sealed(directory.summary):
    report(
        f'Note: {directory.summary} has no checksum, as earlier versions wrote'
        ' it. It is made again.'
    )
    return None
  training, evaluation = config.training, config.evaluation
  same = (
      summary['rounds'] == done
      and (
          done == training.rounds
          or summary['ended_by_patience'] == training.patience
      )
      and summary['eval_groups'] == evaluation.eval_groups
      and summary['references'] == evaluation.references
      and _reference_hparams(summary, old_file, evaluation)
      == evaluation.reference_hparams
      # Older ones have none.
      and summary.get('nvar', False) == evaluation.nvar
      and tuple(summary['evaluation']) == evaluation.protocols
  )
  if not same:
    return None
  try:
    changed = summary['files'].items() - _checksums(directory).items()
  except OSError as error:
    report(f'Note: {error} It is made again.')
    return None
  if changed:
    names = ', '.join(sorted(name for name, _ in changed))
    report(f'Note: {names} is not as it was written, and is made again.')
    return None
  return summary


def _reference_hparams(summary, old_file, evaluation):
  """Returns what a summary's references were trained with, None if unknown.

  Summaries of earlier versions leave that to config.json. A field that neither
  has is as it was before there was one.
  """
  of_run = old_file['config'] if old_file else {}
  values = summary.get('reference_hparams', of_run.get('reference_hparams'))
  return values and type(evaluation.reference_hparams)(**values)
