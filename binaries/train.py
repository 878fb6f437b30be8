"""Trains an algorithm on a data set and evaluates what came out.

  python -m binaries.train --algorithm=frl
  python -m binaries.train --flagfile=binaries/presets/digit_pairs_frl.flags \
      --output_dir=DIR

The same command continues a run that was stopped, by whatever, with the very
results of one that was not. DIR holds config.json, metrics.csv, timings.csv,
summary.json, learning_curve.png, checkpoints, TensorBoard events and a CSV file
of clients or groups for each protocol.
"""

import contextlib
import dataclasses
import pathlib
import sys

from absl import flags

from binaries import command_line
from binaries import flag_groups
from binaries import flag_kinds
from binaries import listings
from tff_meta import aggregation
from tff_meta import datasets
from tff_meta import installation
from tff_meta import models
from tff_meta import plain_files
from tff_meta import registry
from tff_meta import spelling
from tff_meta.comparison import runner
from tff_meta.datasets import own_data
from tff_meta.training import hyperparameters
from tff_meta.training import partitions
from tff_meta.training import protocol_names
from tff_meta.training import run_directory
from tff_meta.training import trackers

ALGORITHM = flags.DEFINE_string(
    'algorithm', None, 'What to train; --list shows all.'
)
OUTPUT_DIR = flag_kinds.define_path(
    'output_dir',
    None,
    'Where the run is written, or continued; by default'
    ' runs/<dataset>_<algorithm>.',
)
PRESET = flags.DEFINE_enum(
    'preset',
    None,
    list(registry.PRESETS),
    'Hyperparameters as the paper prints them, as the released code has them,'
    ' or with rates from which the embedded digits learn in a short run (demo);'
    ' by default demo on these and on data of your own, paper elsewhere.',
)
HPARAMS = flags.DEFINE_string(
    'hparams',
    '',
    'Changes to the preset, name=value,... ; an unknown name lists all.',
)
REFERENCE_HPARAMS = flags.DEFINE_string(
    'reference_hparams',
    '',
    'Changes to the preset of FedAvg from scratch, which new groups compare'
    ' with, e.g. deployment_learning_rate=0.3.',
)
DATASET = flags.DEFINE_string(
    'dataset',
    None,
    'What to train on; --list shows all. Data of your own are csv:PATH,'
    ' folder:PATH and so on. By default digits, or digit_pairs with'
    ' --partition=few_round, which is the default of some algorithms.',
)
DATASET_OPTIONS = flags.DEFINE_string(
    'dataset_options',
    '',
    "Options of the data set's loader, name=value,... , e.g. scaling=raw.",
)
AUGMENTATION = flags.DEFINE_string(
    'augmentation',
    '',
    'How images vary from minibatch to minibatch of training, name=value,... :'
    ' crop_padding=4,flip=true adds four black pixels at each side, cuts the'
    " image's size out of that at random and mirrors every second one. By"
    ' default they are not.',
)
DOWNLOAD = flags.DEFINE_bool(
    'download', False, 'Fetch the data set if it is not there.'
)
PARTITION = flags.DEFINE_string(
    'partition',
    None,
    "How examples go to clients; by default the algorithm's way. few_round"
    ' (needed for groups with new classes) or a partitioner; a wrong name'
    ' lists all.',
)
PARTITION_OPTIONS = flags.DEFINE_string(
    'partition_options',
    '',
    'Options of the partition, name=value,... , e.g. alpha=0.3.',
)
TEST_FRACTION = flag_kinds.define_number(
    'test_fraction',
    None,
    "Share of each client's examples to test on, 0..1; by default the published"
    ' test part is dealt to the clients, and of data without one it is 0.2.',
)
STRATIFY = flags.DEFINE_bool(
    'stratify', False, 'Split off --test_fraction class by class.'
)
DEAL_TEST_IMAGES = flags.DEFINE_bool(
    'deal_test_images',
    True,
    'Deal the published test images, too, with --test_fraction pooled with the'
    " training images (by_writer: those of a writer with the same writer's);"
    ' without, --test_fraction is of the training images alone.',
)
VALIDATION_FRACTION = flag_kinds.define_number(
    'validation_fraction',
    0.0,
    'Share of the examples, 0..1, that --eval_every measures on instead of the'
    " test examples: of each client's with --test_fraction, otherwise of the"
    ' published training part before it is dealt.',
)
NUM_CLIENTS = flag_kinds.define_whole_number(
    'num_clients',
    None,
    'Training clients; by default what suits the data.',
    least=1,
)
NUM_NEW_CLIENTS = flag_kinds.define_whole_number(
    'num_new_clients',
    None,
    'Clients beside them that training never sees; by default what suits the'
    ' data.',
)
NEW_CLIENTS = flags.DEFINE_string(
    'new_clients',
    'held_out',
    'How new clients get examples: dealt like the others (held_out), or from'
    ' the test parts of all others (redealt, which needs'
    ' --eval_support_fraction).',
)
MODEL = flags.DEFINE_string(
    'model',
    None,
    'Network, a name or MODULE:FUNCTION, which makes one; by default what the'
    ' algorithm needs, or else what suits the data. --list=models shows all.',
)
ROUNDS = flag_kinds.define_whole_number(
    'rounds',
    200,
    'Communication rounds of the whole run (an FRL episode with R = 3 takes 4).'
    ' Raise it to extend a finished run.',
    least=1,
)
CLIENTS_PER_ROUND = flag_kinds.define_whole_number(
    'clients_per_round',
    None,
    'Clients of a round; by default what suits the data.',
    least=1,
)
ABSENT_CLIENTS = flag_kinds.define_number(
    'absent_clients',
    0.0,
    'Share of the clients of a round, on average, that are not there, to'
    ' simulate devices that drop out; from 0 to below 1.',
)
LATE_CLIENTS = flag_kinds.define_number(
    'late_clients',
    0.0,
    'Share of the clients of a round, on average, that are sent the model and'
    ' answer when the round is over, so that nothing of them counts; from 0 to'
    ' below 1.',
)
SLOW_CLIENTS = flag_kinds.define_number(
    'slow_clients',
    0.0,
    'Share of the clients of a round, on average, that manage half of their'
    ' examples; from 0 to 1.',
)
SEED = flag_kinds.define_whole_number(
    'seed', 0, 'Of everything random in the run; 0 to 2**31 - 1.'
)
SHARDS = flag_kinds.define_whole_number(
    'shards',
    None,
    "To how many shards a round's clients are dealt, about four times as many"
    ' as workers; by default what the run has that is continued, or else 16'
    ' with --execution=ray and 1 otherwise. Results differ by rounding, so a'
    ' run keeps to its number.',
    least=1,
)
DRIVER = flags.DEFINE_enum(
    'driver',
    'loop',
    ['loop', 'program'],
    "What goes through the rounds: this library's loop, or the program of"
    " tff.learning.programs, with TFF's own files.",
)
AGGREGATION = flags.DEFINE_string(
    'aggregation',
    'plain',
    'How everything that clients send is aggregated, metrics included; see'
    ' --list=aggregations. Refused where an algorithm sends what it cannot'
    ' cover.',
)
AGGREGATION_OPTIONS = flags.DEFINE_string(
    'aggregation_options',
    '',
    'Options of --aggregation, such as noise_multiplier=1,clip=0.1.',
)
TARGET_EPSILON = flag_kinds.define_number(
    'target_epsilon',
    None,
    'The largest epsilon that a run with --aggregation=dp may have, above 0;'
    ' nothing is trained where it would be larger.',
)
BATCHED_CLIENTS = flag_kinds.define_whole_number(
    'batched_clients',
    1,
    'Clients of a device that are computed together, 1 for one after the other;'
    ' meant for GPUs, slower on CPUs and to start. Only clients that have as'
    ' many examples, dealt over classes alike, are; the others are computed'
    ' alone. Results differ by rounding, so a run keeps to its number.',
    least=1,
)
MIXED_PRECISION = flags.DEFINE_bool(
    'mixed_precision',
    False,
    'Let TensorFlow compute on GPUs in float16 where it holds it safe.',
)
CHECKPOINT_EVERY = flag_kinds.define_whole_number(
    'checkpoint_every',
    20,
    'Rounds from one checkpoint to the next; with --driver=program there is one'
    ' when the run ends or is stopped.',
    least=1,
)
EVAL_EVERY = flag_kinds.define_whole_number(
    'eval_every',
    None,
    'Rounds from one evaluation on the way to the next, 0 for none: accuracy in'
    ' groups of meta-validation classes or of their clients, or of known'
    ' clients, and of new clients. By default a tenth of the rounds, on few of'
    ' them, or what the run has that is continued.',
)
EVAL_FROM = flag_kinds.define_whole_number(
    'eval_from',
    0,
    'The first round that --eval_every may evaluate: where an evaluation takes'
    ' longer than a round and only the last ones are of interest.',
)
SELECT_BEST = flags.DEFINE_bool(
    'select_best',
    False,
    'Evaluate the best round of --eval_every at the end, too; needs'
    ' --validation_fraction or groups.',
)
SELECT_BY = flags.DEFINE_enum(
    'select_by',
    'macro',
    ['macro', 'micro'],
    'What makes a round the best: the mean of accuracies over clients or groups'
    ' (macro), or over all their examples (micro).',
)
PATIENCE = flag_kinds.define_whole_number(
    'patience',
    0,
    'Ends training early when evaluations on the way got worse more than so'
    ' often since the best one; needs --select_best. 0 for never.',
)
VALIDATION_GROUPS = flag_kinds.define_whole_number(
    'validation_groups',
    None,
    'Groups of an evaluation on the way; by default 20, or 5 with neither'
    ' --eval_every nor --select_best, or as in the run that is continued.',
    least=1,
)
VALIDATION_CLIENTS = flag_kinds.define_whole_number(
    'validation_clients',
    None,
    'Clients of an evaluation on the way at most, of known and of new ones; by'
    ' default all, or 20 with neither --eval_every nor --select_best, or as in'
    ' the run that is continued.',
    least=1,
)
EVAL_NEW_CLIENTS = flags.DEFINE_bool(
    'eval_new_clients',
    None,
    'Whether --eval_every measures new clients, too; by default it does, or as'
    ' in the run that is continued.',
)
TRACK = flag_kinds.define_list(
    'track',
    'Experiment trackers that the numbers of the run go to as well: wandb,'
    ' mlflow, or those of --plugins. Their packages are installed with'
    ' requirements-track.txt.',
)
DESCRIBE = flags.DEFINE_bool(
    'describe',
    False,
    'Show clients, examples and classes, before anything is trained; end. An'
    ' --output_dir gets the picture, data.png; nothing else is written.',
)
LIST = flag_kinds.define_choice_or_all(
    'list',
    listings.KINDS,
    'Show algorithms and data sets or, of an --algorithm, what --hparams can'
    ' change; or all of a kind, with their options: --list='
    + '|'.join(listings.KINDS),
)
flags.adopt_module_key_flags(flag_groups)


def _dataset() -> str:
  if DATASET.value is not None:
    return DATASET.value
  partition = PARTITION.value or registry.get(ALGORITHM.value).partition
  return 'digit_pairs' if partition == 'few_round' else 'digits'


def _output_dir() -> str:
  if OUTPUT_DIR.value is None:
    name = datasets.short_name(_dataset())
    return f'runs/{name}_{ALGORITHM.value}'
  return OUTPUT_DIR.value


def _plugins() -> tuple[str, ...]:
  """Imports the plugins of the run, and returns their names."""
  given = flag_groups.import_plugins()
  if not given:  # And the run itself says what is wrong with its directory.
    with contextlib.suppress(run_directory.RunDirectoryError):
      return flag_groups.import_plugins(_output_dir())
  return given


def _describe(dataset) -> None:
  """Prints what clients hold, and draws it where that is asked for."""
  from tff_meta.training import data_description

  description = data_description.describe(dataset)
  print(description.to_text())
  if OUTPUT_DIR.value:
    directory = pathlib.Path(OUTPUT_DIR.value)
    plain_files.make_directory(directory, parents=True)
    description.write_picture(directory / 'data.png')
    print(f'Written: {directory / "data.png"}')


def _check_algorithm() -> None:
  if not ALGORITHM.value:
    raise ValueError(
        'Expected --algorithm, found none. Tip: --list shows algorithms and'
        ' data sets.'
    )


def configuration(**changes):
  """Returns the configuration that the flags mean.

  Args:
    **changes: Fields -> values that they have whatever the flags say.

  Raises:
    ImportError, OSError: If the environment does not play along.
    ValueError: If a flag is impossible, or flags do not go together.
  """
  _check_algorithm()
  is_new = 'tensorflow' not in sys.modules
  plugins = _plugins()
  trackers.check(TRACK.value)
  # What can be checked without TFF first: to import it takes seconds.
  for name, text in (
      (ALGORITHM.value, HPARAMS.value),
      (registry.REFERENCE, REFERENCE_HPARAMS.value),
  ):
    known = registry.get(name).hparam_names()
    hyperparameters.assignments(text, known, of=name)
  hyperparameters.check(
      aggregation.BY_NAME.find(AGGREGATION.value),
      AGGREGATION_OPTIONS.value,
      of=f'--aggregation={AGGREGATION.value}',
  )
  hyperparameters.parse_augmentation(AUGMENTATION.value)
  protocol_names.check(flag_groups.PROTOCOL.value)
  if MODEL.value is not None:
    models.check(MODEL.value)
  dataset = datasets.get(_dataset())
  options = hyperparameters.parse_options(
      dataset.load, 2, DATASET_OPTIONS.value
  )
  if PARTITION.value:
    partitions.read_options(PARTITION.value, PARTITION_OPTIONS.value, None)
  if dataset.look is not None:
    dataset = dataset.look(flag_groups.DATA_DIR.value, options)
  if DESCRIBE.value:
    line = f'Describing the clients of {_dataset()}.'
  else:
    line = (
        f'Training {ALGORITHM.value} on {_dataset()} for'
        f' {spelling.counted(ROUNDS.value, "round")} with the preset'
        f' {PRESET.value or dataset.preset}, written to {_output_dir()}.'
    )
  if is_new and 'tensorflow' in sys.modules:  # A plugin has imported it.
    command_line.report(line)
  else:
    command_line.announce(line)
  installation.import_tff()
  from tff_meta.training import run_config

  values = flag_groups.values(run_config.FIELDS)
  recorded = _run_directory().recorded_if_readable()
  if recorded:
    of_the_run = run_config.settings_of_the_run(recorded)
    values |= {k: v for k, v in of_the_run.items() if values[k] is None}
  chosen = {'dataset': _dataset(), 'plugins': plugins}
  return run_config.resolve(**values | chosen | changes)


def _check_output_dir() -> None:
  """Raises if the run cannot be written, or would come among other files."""
  if runner.is_comparison(pathlib.Path(_output_dir())):
    raise ValueError(
        'Expected --output_dir to be new or to hold a run, found'
        f' {_output_dir()}, a comparison of binaries.compare.'
    )
  directory = _run_directory()
  directory.check_can_be_made()
  directory.check_is_free(
      data=own_data.path(_dataset(), flag_groups.DATA_DIR.value)
  )


def _run_directory() -> run_directory.RunDirectory:
  return run_directory.RunDirectory(_output_dir())


def _is_evaluated_by_default() -> bool:
  """Whether nobody has asked for an evaluation on the way, now or before."""
  asked = EVAL_EVERY.value or EVAL_FROM.value or SELECT_BEST.value
  return not asked and not _run_directory().recorded_if_readable()


def main() -> int:
  """Runs the program and returns its exit code."""
  if LIST.value:
    with command_line.reported_errors():
      flag_groups.import_plugins()
      if ALGORITHM.value:
        listings.show_hparams(ALGORITHM.value)
      else:
        listings.show(LIST.value)
    return 0
  if DESCRIBE.value and not ALGORITHM.value:
    flags.FLAGS[ALGORITHM.name].value = registry.REFERENCE  # Any would do.
  with command_line.reported_errors():
    _check_algorithm()
    if ALGORITHM.value not in registry.ALGORITHMS:
      flag_groups.import_plugins()  # The place of a run depends on it.
    if OUTPUT_DIR.value or not DESCRIBE.value:
      _check_output_dir()
    config = configuration()
    from tff_meta.training import run_config

    for algorithm, text in (
        (config.algorithm, HPARAMS.value),
        (registry.REFERENCE, REFERENCE_HPARAMS.value),
    ):
      for note in run_config.notes_on_hparams(algorithm, text):
        command_line.report(note)
    command_line.set_execution_context(
        config.training.execution,
        flag_groups.DEVICE.value,
        MIXED_PRECISION.value,
        config.training.batched_clients,
        config.training.shards,
        flag_groups.ray_options(config.training.execution),
    )
    from binaries import accuracy_table
    from tff_meta.programs import train
    from tff_meta.training import evaluator as evaluator_lib
    from tff_meta.training import experiment as experiment_lib
    from tff_meta.training import run

    experiment = experiment_lib.prepare(config, download=DOWNLOAD.value)
    if DESCRIBE.value:
      _describe(experiment.dataset)
      return 0
    experiment.dataset.fingerprint()  # Looks at all data; kept for the run.
    evaluator = evaluator_lib.Evaluator(experiment)
    chosen = evaluator.choose(config.evaluation.protocols)
    why_no_curve = None
    if config.training.eval_every and _is_evaluated_by_default():
      why_no_curve = evaluator.why_no_curve()
      if why_no_curve is not None:
        config = configuration(eval_every=0)
    experiment = dataclasses.replace(
        experiment, config=config.replace(protocols=chosen)
    )
    evaluator.check_nothing_is_in_vain(
        chosen,
        bool(config.training.eval_every),
        flag_groups.group_sizes() | flag_groups.settings_of_clients(),
        _run_directory().recorded_if_readable(),
    )
    if why_no_curve is not None:
      command_line.report(
          f'Note: no accuracy is measured on the way. {why_no_curve}'
      )
    if not chosen and not config.evaluation.protocols:
      command_line.report(
          f'Note: nothing will be evaluated: {evaluator.why_nothing()}'
      )
    for name in chosen:
      if not evaluator.protocols[name].starts_from_scratch:
        continue
      command_line.report(
          f'Note: in {name} {config.algorithm} begins with random weights: what'
          ' is trained before makes no difference.'
      )
    experiment.check_can_train()
    process = experiment.build_process()
    training = config.training
    if (
        training.execution == 'ray'
        and training.shards < flag_groups.WORKERS.value
    ):
      command_line.report(
          f'Note: clients are dealt to --shards={training.shards}, so no more'
          f' of the {flag_groups.WORKERS.value} workers have something to do.'
      )

  directory = _run_directory()
  try:
    with (
        command_line.reported_failures(directory.root),
        directory.locked(),
        directory.removed_if_no_round_is_done(),
    ):
      summary = run.train_and_evaluate(
          experiment,
          process,
          evaluator,
          directory,
          report=command_line.report,
          track=TRACK.value,
          train=train.driver(experiment.config),
      )
  except run.NothingLearnedError as error:
    command_line.fail(error, command_line.FAILURE)
  except ValueError as error:  # As of another configuration.
    command_line.fail(error, command_line.USAGE_ERROR)
  except run.StoppedError as stopped:
    command_line.report('Stopped; the same command continues the run.')
    return 128 + stopped.signal_num
  if summary['evaluation']:
    print(accuracy_table.format_table(summary['evaluation']))
  if summary.get('evaluation_best'):
    print(f'Best round, {summary["best_round"]}:')
    print(accuracy_table.format_table(summary['evaluation_best']))
  print(f'Written: {directory.root}')
  return 0


if __name__ == '__main__':
  command_line.run_and_end(main)
