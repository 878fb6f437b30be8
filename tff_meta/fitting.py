"""Three lines from arrays to a trained, testable model: `tff_meta.fit`.

It makes a run as `binaries.train` does, of the same configuration, in a
directory that the programs read as well. Nothing here imports TensorFlow before
it is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any, TYPE_CHECKING, TypeAlias
import warnings
import zipfile

import numpy as np

from tff_meta import config_checks
from tff_meta import plugins
from tff_meta import registry
from tff_meta import spelling
from tff_meta.execution import native

if TYPE_CHECKING:  # They import TensorFlow.
  import tensorflow_federated as tff

  from tff_meta.data import corpus as corpus_lib
  from tff_meta.learners import personalizer as personalizer_lib
  from tff_meta.training import experiment as experiment_lib
  from tff_meta.training import run_directory as run_directory_lib

_ARRAYS = 'data.npz'
# With fewer examples batch normalisation is worth a warning.
_FEW = 10
# Flags that `fit` has by another name.
_OTHER_NAMES = {'dataset': 'clients', 'protocol': 'protocols'}
# What NumPy raises where a file is none of arrays, or damaged.
_NO_ARRAYS = (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile)
# What stands for a missing label, as text; the last two are of pandas.
_MISSING = ('None', 'nan', '<NA>', 'NaT')
# The defaults of the flags of programs, but for references.
_SETTINGS: dict[str, Any] = dict(
    new_clients='held_out',
    stratify=False,
    validation_fraction=0.0,
    checkpoint_every=20,
    select_best=False,
    select_by='macro',
    patience=0,
    execution='in_process',
    protocols=(),
    references=False,
)

# What the execution context says, not a setting -> its argument there.
_OF_CONTEXT = {
    'execution': 'devices',
    'batched_clients': 'batched_clients=...',
}

Examples = tuple[Any, Any]
Clients: TypeAlias = (
    'Mapping[Any, Examples] | tff.simulation.datasets.ClientData | str'
)


@contextlib.contextmanager
def _errors_name_keywords() -> Iterator[None]:
  """Has errors name arguments of `fit` where they name flags of programs."""
  try:
    yield
  except Exception as error:
    error.args = tuple(
        _in_keywords(part) if isinstance(part, str) else part
        for part in error.args
    )
    raise


def _in_keywords(message: str) -> str:
  from tff_meta.training import run_config

  same = {name: name for name in (*run_config.FIELDS, 'output_dir')}
  return spelling.as_keywords(message, same | _OTHER_NAMES)


@_errors_name_keywords()
def fit(
    clients: Clients,
    algorithm: str = registry.DEFAULT,
    *,
    model: Any = None,
    rounds: int = 200,
    seed: int = 0,
    output_dir: str | os.PathLike[str] | None = None,
    hparams: Mapping[str, Any] | str = '',
    **settings: Any,
) -> 'Fitted':
  """Trains an algorithm on clients' examples.

  The first call lets TFF run computations in this process, and on GPUs where
  there are any, unless that has been chosen before.

  Args:
    clients: Name of a client -> its examples `(x, y)`, numbers `[n, ...]`
      (uint8 pixels are divided by 255) and classes `[n]`, whole numbers or
      names; a `tff.simulation.datasets.ClientData` of elements `(x, y)`, or of
      two features, one of them called `label`, `labels` or `y`; or what
      `--dataset` takes, the name of a data set or `KIND:PATH`.
    algorithm: What `--algorithm` takes.
    model: What `--model` takes; a Keras model, see `models.from_keras`; a
      `Model`; or `(input_shape, num_classes) -> ` one of them. None for what
      suits algorithm and data.
    rounds: Communication rounds.
    seed: Of everything random.
    output_dir: Where the run is written, or continued, and nothing else is;
      None for a directory that is there as long as what is returned.
    hparams: Changes to the hyperparameters, name -> value.
    **settings: What other flags of `binaries.train` say that config.json
      records, by their names, such as `test_fraction`, `num_new_clients`,
      `partition` or `preset`; options such as `dataset_options`, of arrays
      those of `npz:PATH`, may be mappings. Numbers may be NumPy's. None is as
      if it was not given.

  Nothing is tested before `Fitted.evaluate` is called, unless `protocols` say
  what: only a run with some can be compared by `binaries.compare --runs`.

  Where no round is done, nothing of the run is left in an `output_dir` that was
  new or empty.

  Returns:
    What was trained.

  Raises:
    NothingLearnedError: If no client trained in any round.
    TypeError: If a setting is unknown, or says what `clients` says already.
    ValueError: If one, or the examples, are not what they should be.
  """
  shards = config_checks.to_python(settings.get('shards'))
  config_checks.check_kind('shards', shards, int | None)
  num_shards = _prepare_process(shards)
  from tff_meta.datasets import own_data
  from tff_meta.training import run
  from tff_meta.training import run_config
  from tff_meta.training import run_directory

  given = {'dataset', *([] if isinstance(clients, str) else ['data_dir'])}
  refused = given | set(_OF_CONTEXT)
  for name in sorted(set(settings) - set(run_config.FIELDS)):
    if name in _hparam_names(algorithm):
      raise TypeError(
          f'Expected {name!r} of {algorithm} in `hparams`, found it beside.'
          f' Tip: `hparams={{{name!r}: {settings[name]!r}}}`.'
      )
    known = [field for field in run_config.FIELDS if field not in refused]
    raise TypeError(
        f'Expected settings of {", ".join(known)}, found'
        f' {name!r}.{spelling.tip(name, known)}'
    )
  for name in sorted(given & set(settings)):
    raise TypeError(
        f'Expected `clients` to say what the data are, found `{name}` as well.'
    )
  for name in sorted(set(_OF_CONTEXT) & set(settings)):
    raise TypeError(
        f'Expected no `{name}`, because clients are computed as the context of'
        ' this process does, found it. Tip:'
        f' `in_process.set_in_process_context({_OF_CONTEXT[name]})` before.'
    )
  for name in 'protocols', 'plugins':  # Of which flags make tuples.
    value = settings.get(name)
    if isinstance(value, str | list):
      listed = value.split(',') if isinstance(value, str) else value
      settings[name] = tuple(listed)
  settings |= dict(
      algorithm=algorithm,
      rounds=rounds,
      seed=seed,
      hparams=hparams,
      model=_model_name(model),
  )
  settings = run_config.of_their_kinds(
      {name: _to_text(value) for name, value in settings.items()}
  )
  plugins.import_named(settings.get('plugins') or (), '`plugins` of `fit`')
  if isinstance(clients, str):
    settings['dataset'] = clients
  else:
    arrays = _to_arrays(clients)
    settings['dataset'] = f'npz:{_ARRAYS}'
    settings['dataset_options'] = (
        f'client=client,{settings.get("dataset_options", "")}'
    )
    corpus, options = _to_corpus(arrays, settings)
  temporary = None
  if output_dir is None:
    temporary = tempfile.TemporaryDirectory(prefix='tff_meta_')
    output_dir = temporary.name
  root = pathlib.Path(output_dir).expanduser()
  directory = run_directory.RunDirectory(root)
  if isinstance(clients, str):
    place = own_data.path(clients, settings.get('data_dir'))
    directory.check_is_free(data=place)
  else:
    directory.check_is_free(_ARRAYS)
  with directory.locked(), directory.removed_if_no_round_is_done(_ARRAYS):
    if not isinstance(clients, str):
      _write_arrays(root, arrays)
      settings['data_dir'] = str(root)
      own_data.keep(settings['dataset'], str(root), options, corpus)
    try:
      experiment = _train(directory, settings, model, num_shards)
    except run.NothingLearnedError:
      if temporary is None:
        raise
      why = run.nothing_learned(directory)  # Its checkpoints go with it.
      raise run.NothingLearnedError(f'{why}. Nothing was learned.') from None
  return Fitted(experiment, root, temporary)


def _train(
    directory: 'run_directory_lib.RunDirectory',
    settings: dict[str, Any],
    model: Any,
    num_shards: int,
) -> 'experiment_lib.Experiment':
  """Begins or continues a run.

  Args:
    directory: Where it is, locked by the caller.
    settings: Those that are given, as `run_config.resolve` takes them.
    model: As for `fit`.
    num_shards: To how many shards clients are dealt.

  Returns:
    What was trained.
  """
  from tff_meta.programs import train
  from tff_meta.training import evaluator as evaluator_lib
  from tff_meta.training import run
  from tff_meta.training import run_config

  recorded = directory.recorded_if_readable()
  values = (
      _SETTINGS
      | (run_config.settings_of_the_run(recorded) if recorded else {})
      | settings
  )
  if values.setdefault('shards', num_shards) != num_shards:
    raise ValueError(
        f'Expected `shards` to be {num_shards}, as the execution context that'
        f' was chosen deals clients, found {values["shards"]}. Tip:'
        ' `in_process.set_in_process_context(num_shards=...)`.'
    )
  config = run_config.resolve(**values)
  for note in run_config.notes_on_hparams(
      config.algorithm, values.get('hparams') or ''
  ):
    _report(note)
  experiment = _prepare(config, model)
  caveat = _caveat(experiment)
  if not recorded and caveat is not None:
    _report(f'Note: {caveat}')
  evaluator = evaluator_lib.Evaluator(experiment)
  if not recorded and not {'eval_every', 'eval_from', 'select_best'} & set(
      settings
  ):
    why_not = evaluator.why_no_curve()
    if why_not is not None:
      config = run_config.resolve(**values, eval_every=0)
      _report(f'Note: no accuracy is measured on the way. {why_not}')
  if not evaluator.offered:
    _report(f'Note: nothing will be evaluated: {evaluator.why_nothing()}')
  chosen = evaluator.choose(settings.get('protocols', ('none',)))
  experiment = dataclasses.replace(
      experiment, config=config.replace(protocols=chosen)
  )
  evaluator.check_nothing_is_in_vain(
      chosen, bool(config.training.eval_every), settings, recorded
  )
  experiment.check_can_train()
  process = experiment.build_process()
  run.train_and_evaluate(
      experiment,
      process,
      evaluator_lib.Evaluator(experiment),
      directory,
      report=_report,
      train=train.driver(config),
  )
  return experiment


@_errors_name_keywords()
def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    data_dir: str | os.PathLike[str] | None = None,
) -> 'Fitted':
  """Opens what `Fitted.save` has saved, or a run of `binaries.train`.

  Args:
    path: The directory.
    model: The network that `fit` was given, where that was no name.
    data_dir: Where the run's data set is, as `--data_dir` of the programs; None
      for clients' examples that are saved with the run, or the default place
      of TensorFlow Datasets.

  Raises:
    FileNotFoundError: If there is none.
    ValueError: If it is of another version of the library.
  """
  _prepare_process()
  from tff_meta.training import restored_run
  from tff_meta.training import run_directory

  root = pathlib.Path(path).expanduser()
  config = restored_run.read_config(run_directory.RunDirectory(root))
  if data_dir is not None:
    config = config.replace(data_dir=str(pathlib.Path(data_dir).expanduser()))
  elif (root / _ARRAYS).exists():
    config = config.replace(data_dir=str(root))
  return Fitted(_prepare(config, model), root)


def export(
    run_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    **options: Any,
) -> pathlib.Path:
  """Writes the model of a run as a bundle, as `binaries.export` does.

  Args:
    run_dir: What `fit` or `binaries.train` was given as `output_dir`.
    output_dir: The bundle, which must not exist.
    **options: Of `Fitted.export`.

  Returns:
    The bundle.

  Raises:
    FileExistsError: If the bundle is there.
    FileNotFoundError: If there is no run.
    ValueError: As `Fitted.export`.
  """
  return load(run_dir).export(output_dir, **options)


class Fitted:
  """A trained model, its clients, and the run that made it.

  Attributes:
    experiment: What the run's configuration stands for.
    path: The directory of the run.
  """

  def __init__(
      self,
      experiment: 'experiment_lib.Experiment',
      path: pathlib.Path,
      temporary: Any = None,
  ):
    """Use `fit` or `load` instead."""
    self.experiment = experiment
    self.path = path
    self._temporary = temporary  # Removed with the last reference to it.

  @_errors_name_keywords()
  def evaluate(
      self, *protocols: str, references: bool = False
  ) -> dict[str, dict[str, Any]]:
    """Tests the model.

    Args:
      *protocols: What `--protocol` takes; none for those that algorithm and
        data offer.
      references: Whether to test the untrained model, too.

    Returns:
      Protocol -> numbers, such as `accuracy_mean`, in 0..1.

    Raises:
      ValueError: If one is unknown, or not offered, or there is none.
    """
    from tff_meta import plain_files
    from tff_meta.training import evaluator as evaluator_lib
    from tff_meta.training import restored_run
    from tff_meta.training import run_directory

    directory = run_directory.RunDirectory(self.path)
    evaluator = evaluator_lib.Evaluator(
        dataclasses.replace(
            self.experiment,
            config=self.experiment.config.replace(references=references),
        )
    )
    names = evaluator.choose(protocols)
    if not names and not protocols:
      raise ValueError(
          f'Expected somebody to test, found nobody: {evaluator.why_nothing()}'
      )
    plain_files.make_directory(directory.evaluations)
    with restored_run.open_models(
        self.experiment, directory, _report
    ) as models:
      return evaluator.evaluate_all(
          names,
          {'': models.trained},
          models.untrained,
          directory.evaluations,
          _report,
      )['']

  def metrics(self) -> dict[str, np.ndarray]:
    """Returns what was measured in training, a number `[rounds]` of each.

    Names are the columns of metrics.csv, such as `train/loss`, and
    `known_clients/accuracy` in 0..1, which is NaN in rounds that were not
    followed by a test.
    """
    from tff_meta.training import metric_writers
    from tff_meta.training import run_directory

    columns = metric_writers.read_metrics(
        run_directory.RunDirectory(self.path).metrics
    )
    return {name: np.array(column) for name, column in columns.items()}

  @_errors_name_keywords()
  def personalize(
      self, examples: Examples, client: str | None = None
  ) -> 'Personalized':
    """Makes a model for one client.

    Args:
      examples: `(x, y)`, what it adapts on, in the form that `fit` took.
      client: A client of training, with what it has kept; None for one that
        training never saw.

    Raises:
      ValueError: If the algorithm has no use for such a client, the client is
        unknown, or there are no examples, or such of another form.
    """
    import tensorflow as tf

    from tff_meta import episodes
    from tff_meta.training import restored_run
    from tff_meta.training import run_directory

    experiment, dataset = self.experiment, self.experiment.dataset
    use = 'new_client' if client is None else 'known_client'
    if use not in experiment.spec.uses:
      raise ValueError(
          f'Expected an algorithm with the use {use!r}, found'
          f' {experiment.spec.name}, which has'
          f' {", ".join(experiment.spec.uses)}.'
      )
    if client is not None and client not in dataset.client_ids():
      raise ValueError(
          'Expected a client of training, such as'
          f' {dataset.client_ids()[0]!r}, found {client!r}.'
      )
    x, y = self._network_input(examples[0]), self._labels(examples[1])
    if len(x) != len(y) or not len(y):
      raise ValueError(
          'Expected examples, and one class of each, found'
          f' {len(y)} of {len(x)}.'
      )
    personalizer = getattr(experiment.method, use)()
    with restored_run.open_models(
        experiment, run_directory.RunDirectory(self.path), _report
    ) as models:
      memories = models.trained.memories
      memory = () if client is None else memories.of(client)
      if personalizer.uses_bank:
        memory = memories.bank
      salt = 0 if client is None else dataset.salt(client)
      arguments = tf.nest.map_structure(
          tf.convert_to_tensor,
          (
              models.trained.weights,
              memory,
              episodes.Examples(x, y, np.ones(len(y), np.float32)),
              np.array([experiment.config.seed, salt], np.int32),
          ),
      )
    adapted = tf.function(personalizer.adapt, autograph=False)(*arguments)
    return Personalized(
        self._network_input,
        personalizer,
        adapted,
        self._classes,
        _caveat(experiment),
    )

  def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
    """Copies the run, with clients' examples if `fit` was given them.

    `load` opens it, and so do the programs: `binaries.evaluate --run_dir=PATH
    --data_dir=PATH`.

    What decides who takes part in a private run (`aggregation='dp'`) is not
    copied. A copy that is trained on says so, and draws the clients of its
    rounds to come by another number. What clients keep, with their names and
    rounds, is copied: known clients need it.

    Args:
      path: A directory, which must not exist.

    Raises:
      FileExistsError: If it does.
    """
    from tff_meta.training import run_directory

    saved = pathlib.Path(path).expanduser()
    secret = run_directory.RunDirectory(self.path).cohort_secret.name
    try:
      shutil.copytree(
          self.path, saved, ignore=shutil.ignore_patterns(f'{secret}*')
      )
    except FileExistsError:
      raise FileExistsError(
          f'Expected a directory that does not exist yet, found {saved}.'
      ) from None
    return saved

  @_errors_name_keywords()
  def export(
      self,
      path: str | os.PathLike[str],
      uses: Sequence[str] = (),
      allow_private_heads: bool = False,
      computations: bool = False,
      tflite: bool = False,
  ) -> pathlib.Path:
    """Writes the model as SavedModels, see `bundles.export.write`.

    Args:
      path: A directory, which must not exist.
      uses: `'known_client'`, `'new_client'`, `'new_class'` or `'group'`; none
        for those that the algorithm has.
      allow_private_heads: Whether what known clients have kept for themselves
        may be in it, where new clients begin with that.
      computations: Whether to write TFF's computations, a round that they do,
        and a client's round of training, too.
      tflite: Whether to write each SavedModel for TensorFlow Lite, too.

    Raises:
      FileExistsError: If the directory exists.
      ValueError: If the algorithm does not have such a use, new clients would
        be given what known ones have kept, or TensorFlow Lite does not take a
        model.
    """
    from tff_meta.bundles import computations as computations_lib
    from tff_meta.bundles import export
    from tff_meta.training import restored_run
    from tff_meta.training import run_directory

    with restored_run.open_models(
        self.experiment, run_directory.RunDirectory(self.path), _report
    ) as models:
      return export.write(
          self.experiment,
          models.trained,
          models.rounds,
          path,
          uses,
          allow_private_heads,
          computations_lib.Trained(
              models.process,
              models.state,
              self.experiment.model.input_shape,
              self.experiment.dataset.num_classes,
          )
          if computations
          else None,
          tflite,
      )

  def _network_input(self, x: Any) -> np.ndarray:
    from tff_meta.datasets import own_parts

    pixels = own_parts.to_pixels(_to_array(x, 'x', 'the examples'), '`x`')
    return self.experiment.dataset.preprocess(pixels)

  def _labels(self, y: Any) -> np.ndarray:
    from tff_meta.data import checks
    from tff_meta.data import class_splits

    dataset, labels = self.experiment.dataset, _to_labels(y, 'the examples')
    names, classes = dataset.class_names, self._classes
    if names is not None and classes is not None:
      numbers: dict[Any, int] = {name: i for i, name in enumerate(names)}
      numbers |= {label: i for i, label in enumerate(classes.tolist())}
      found = labels.tolist()
      for i, label in enumerate(found):
        found[i] = numbers.get(label, numbers.get(str(label)))
        if found[i] is None:
          raise ValueError(
              f'Expected classes of {", ".join(names)}, found {label!r}. Tip:'
              ' new classes are for `export`, where the algorithm has the use'
              f" 'new_class' and the data {class_splits.LEAST_CLASSES} classes"
              ' or more.'
          )
      labels = np.array(found, int)
    return checks.to_labels(labels, 'the examples', dataset.num_classes)

  @functools.cached_property
  def _classes(self) -> np.ndarray | None:
    """What classes are called, as `fit` took it; None for their numbers."""
    from tff_meta.datasets import own_parts

    if self.experiment.dataset.class_names is None:
      return None
    names = np.array(self.experiment.dataset.class_names)
    data = self.experiment.config.data
    if data.dataset == f'npz:{_ARRAYS}':
      path, label = data.data_dir or '', data.dataset_options['label']
      with np.load(os.path.join(path, _ARRAYS), allow_pickle=False) as held:
        if label in held.files:
          dtype = held[label].dtype
          return names == 'True' if dtype.kind == 'b' else names.astype(dtype)
    return own_parts.as_whole_numbers(names)


class Personalized:
  """The model of one client."""

  def __init__(
      self,
      network_input: Callable[[Any], np.ndarray],
      personalizer: 'personalizer_lib.ClientPersonalizer',
      adapted: Any,
      classes: np.ndarray | None,
      caveat: str | None,
  ):
    """Use `Fitted.personalize` instead."""
    import tensorflow as tf

    self._network_input = network_input
    self._predict = tf.function(
        personalizer.predict, autograph=False, reduce_retracing=True
    )
    self._adapted = adapted
    self._classes = classes
    self._caveat = caveat

  def predict(self, x: Any) -> np.ndarray:
    """Returns the class of each example, as they are called in `fit`.

    Networks with batch normalisation (`conv4`, the default for images)
    normalise the examples of a call together, and in `personalize` those that
    it adapts on: several classes each time. For few examples there is a
    warning.

    Args:
      x: Examples in the form that `fit` took.

    Raises:
      ValueError: If they have another form.
    """
    import tensorflow as tf

    from tff_meta import episodes

    pixels = self._network_input(x)
    if self._caveat is not None and 0 < len(pixels) < _FEW:
      warnings.warn(
          f'Expected at least {_FEW} examples, found {len(pixels)}:'
          f' {self._caveat}',
          stacklevel=2,
      )
    query = episodes.Examples(
        tf.constant(pixels),
        tf.zeros(len(pixels), tf.int32),
        tf.ones(len(pixels)),
    )
    labels = self._predict(self._adapted, query).numpy()
    return labels if self._classes is None else self._classes[labels]


def _caveat(experiment: 'experiment_lib.Experiment') -> str | None:
  """Returns what to mind where predictions depend on one another, or None."""
  if not experiment.sees_neighbours:
    return None
  tip = " Tip: `model='mlp'` takes each by itself."
  return (
      'the network normalises examples that are asked together, so that what it'
      ' predicts of one depends on the others, and of one alone it knows next'
      ' to nothing. Adapt and ask with several classes together.'
      f'{"" if experiment.spec.model else tip}'
  )


def _prepare_process(num_shards: int | None = None) -> int:
  """Lets TFF compute in this process unless that has been chosen.

  Algorithms and so on that installed packages announce are there afterwards.

  Args:
    num_shards: To how many shards clients are dealt where it has not; None for
      one.

  Returns:
    To how many they are dealt.
  """
  native.prepare_environment()
  plugins.import_installed()
  import tensorflow_federated as tff

  from tff_meta.execution import in_process

  current = tff.framework.get_context_stack().current
  if not isinstance(current, in_process.InProcessContext):
    in_process.set_in_process_context(
        in_process.use_device('auto'), num_shards=num_shards or 1
    )
  return tff.framework.get_context_stack().current.num_shards


def _hparam_names(algorithm: Any) -> tuple[str, ...]:
  """Returns an algorithm's hyperparameters; none if there is no such one."""
  try:
    return registry.get(algorithm).hparam_names()
  except (TypeError, ValueError):
    return ()


def _to_arrays(clients: Any) -> dict[str, np.ndarray]:
  """Returns clients' examples as the arrays of data of one's own.

  Raises:
    TypeError: If they are neither a mapping of pairs nor a ClientData.
    ValueError: If a client has none, examples of another form, one without a
      label, or the name of another as text.
  """
  from tff_meta.datasets import own_arrays
  from tff_meta.datasets import own_client_data

  if own_client_data.is_client_data(clients):
    clients = own_client_data.examples(clients)
  if not isinstance(clients, Mapping):
    raise TypeError(
        'Expected `clients` to be a mapping from a name to (x, y), a'
        ' `tff.simulation.datasets.ClientData` or the name of data, found a'
        f' {type(clients).__name__}.'
    )

  def of_client(client):
    examples = clients[client]
    if not isinstance(examples, tuple | list) or len(examples) != 2:
      raise TypeError(
          f'Expected (x, y) of client {client!r}, found a'
          f' {type(examples).__name__}.'
      )
    x = _to_array(examples[0], 'x', f'client {client!r}')
    if x.dtype.kind not in 'biuf':
      raise ValueError(
          f'Expected numbers in `x` of client {client!r}, found {x.dtype}.'
      )
    y = _to_labels(examples[1], f'client {client!r}')
    if x.dtype.kind == 'f' and not np.isfinite(x).all():
      raise ValueError(
          f'Expected finite numbers of client {client!r}, found others.'
      )
    return {'x': x, 'y': y}.__getitem__

  named = {str(client): client for client in clients}
  for client in clients:
    if named[str(client)] != client:
      raise ValueError(
          'Expected clients whose names differ as text, found'
          f' {client!r} and {named[str(client)]!r}.'
      )
  part = own_arrays.join(
      {name: of_client(client) for name, client in named.items()},
      'x',
      'y',
      '`clients`',
  )
  assert part.clients is not None
  return {'x': part.x, 'y': part.labels, 'client': part.clients}


def _to_corpus(
    arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]
) -> 'tuple[corpus_lib.Corpus, dict[str, Any]]':
  """Returns the corpus that a file of arrays is, and the options of its kind.

  Args:
    arrays: From `_to_arrays`.
    settings: `dataset`, the file's name, and `dataset_options`, their text.

  Raises:
    ValueError: If examples or labels are not what they should be, or options.
  """
  from tff_meta import datasets
  from tff_meta.datasets import own_parts
  from tff_meta.training import hyperparameters

  options = hyperparameters.parse_options(
      datasets.get(settings['dataset']).load, 2, settings['dataset_options']
  )
  for name, expected in ('features', 'x'), ('label', 'y'):
    if options[name] != expected:
      raise ValueError(
          f'Expected no option `{name}` of clients with (x, y), found'
          f' {options[name]!r}.'
      )
  corpus = own_parts.to_corpus(
      _ARRAYS,
      own_parts.Part(arrays['x'], arrays['y'], arrays['client']),
      None,
      options['scaling'],
      '`clients`',
      label_tip=f'`y` is {arrays["y"].dtype}',
  )
  return corpus, options


def _to_array(values: Any, name: str, whose: str) -> np.ndarray:
  """Returns an array, or raises a ValueError that names what makes none."""
  try:
    return np.asarray(values)
  except ValueError:
    raise ValueError(
        f'Expected `{name}` of {whose} to be one array, found a'
        f' {type(values).__name__} of rows of different lengths.'
    ) from None


def _to_labels(y: Any, whose: str) -> np.ndarray:
  """Returns labels as an array of numbers or of text, none of them missing.

  Args:
    y: Labels [n] or [n, 1].
    whose: Whose they are, for errors.

  Returns:
    Labels [n] of their own dtype; objects as numbers if they all are, otherwise
    as text.

  Raises:
    ValueError: If one is missing (None, NaN or no text), they are neither
      numbers nor text, or no vector.
  """
  labels = _to_array(y, 'y', whose)
  # An array would have made text of what stands for missing labels.
  found = np.asarray(y, object) if isinstance(y, list | tuple) else labels
  for label in found.reshape(-1).tolist():
    if str(label) in ([''] if isinstance(label, str) else _MISSING):
      raise ValueError(
          f'Expected a class of every example of {whose}, found {label!r}.'
      )
  if labels.dtype == object:
    numbers = np.array(labels.tolist())
    labels = numbers if numbers.dtype.kind in 'biuf' else labels.astype(str)
  if labels.dtype.kind not in 'biufU':
    raise ValueError(
        f'Expected whole numbers or names in `y` of {whose}, found'
        f' {labels.dtype}.'
    )
  if labels.shape[1:] == (1,):
    labels = labels[:, 0]
  if labels.ndim != 1:
    raise ValueError(
        f'Expected labels of {whose} of shape [n] or [n, 1], found'
        f' {labels.shape}.'
    )
  return labels


def _write_arrays(root: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes arrays to a run's directory, unless they are there.

  Raises:
    ValueError: If others are there.
  """
  path = root / _ARRAYS
  if path.exists():
    try:
      with np.load(path, allow_pickle=False) as held:
        are_same = all(
            name in held.files
            and held[name].dtype == array.dtype
            and np.array_equal(held[name], array)
            for name, array in arrays.items()
        )
    except _NO_ARRAYS:
      raise ValueError(
          f'Expected {root} to be new, or to hold these examples, found'
          f' something else than arrays in {path}. Tip: give another'
          ' `output_dir`.'
      ) from None
    if not are_same:
      raise ValueError(
          f'Expected {root} to be new, or to hold these examples, found'
          f' others, or such of another dtype, in {path}. Tip: give another'
          ' `output_dir`.'
      )
    return
  root.mkdir(parents=True, exist_ok=True)
  temporary = root / f'.{_ARRAYS}'
  np.savez(temporary, **arrays)
  os.replace(temporary, path)


def _to_text(setting: Any) -> Any:
  """Returns options that are a mapping as flags have them."""
  if not isinstance(setting, Mapping):
    return setting
  return ','.join(f'{name}={value}' for name, value in setting.items())


def _model_name(model: Any) -> str | None:
  from tff_meta import models

  return model if model is None or isinstance(model, str) else models.GIVEN


def _prepare(config, model) -> 'experiment_lib.Experiment':
  from tff_meta.training import experiment as experiment_lib

  given = None if model is None or isinstance(model, str) else model
  return experiment_lib.prepare(config, network=given)


def _report(line: str) -> None:
  print(_in_keywords(line), file=sys.stderr, flush=True)
