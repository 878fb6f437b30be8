"""Trains an algorithm on a data set and evaluates what came out.

  python -m binaries.train --algorithm=frl --dataset=digits --output_dir=DIR

The same command continues a run that was stopped, by whatever, with the very
results of one that was not. DIR holds config.json, metrics.csv, timings.csv,
summary.json, learning_curve.png, checkpoints and TensorBoard events.
"""

import dataclasses

from absl import flags

from binaries import command_line
from binaries import flag_groups
from tff_meta import datasets
from tff_meta import registry
from tff_meta.execution import native

OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', None, 'Where the run is written, or continued.'
)
LIST = flags.DEFINE_bool('list', False, 'Show algorithms and data sets, end.')
flags.adopt_module_key_flags(flag_groups)


def _print_list() -> None:
  """Prints the names that --algorithm and --dataset take."""
  print('Algorithms (--algorithm)')
  for spec in registry.ALGORITHMS.values():
    print(f'  {spec.name:16}{spec.summary} ({spec.paper})')
  print('\nData sets (--dataset)')
  for spec in datasets.DATASETS.values():
    print(f'  {spec.name:16}{spec.description}')


def _config():
  """Returns the configuration that the flags mean."""
  for flag in (flag_groups.ALGORITHM, flag_groups.DATASET, OUTPUT_DIR):
    if not flag.value:
      raise ValueError(
          f'Expected --{flag.name}, found none. Tip: --list shows algorithms'
          ' and data sets.'
      )
  # Names first: what follows imports TensorFlow, which takes seconds.
  registry.get(flag_groups.ALGORITHM.value)
  datasets.get(flag_groups.DATASET.value)
  from tff_meta.training import run_config

  return run_config.resolve(
      algorithm=flag_groups.ALGORITHM.value,
      preset=flag_groups.PRESET.value,
      hparams=flag_groups.HPARAMS.value,
      dataset=flag_groups.DATASET.value,
      dataset_options=flag_groups.DATASET_OPTIONS.value,
      data_dir=flag_groups.DATA_DIR.value,
      partition=flag_groups.PARTITION.value,
      partition_options=flag_groups.PARTITION_OPTIONS.value,
      test_fraction=flag_groups.TEST_FRACTION.value,
      num_clients=flag_groups.NUM_CLIENTS.value,
      model=flag_groups.MODEL.value,
      rounds=flag_groups.ROUNDS.value,
      clients_per_round=flag_groups.CLIENTS_PER_ROUND.value,
      seed=flag_groups.SEED.value,
      execution=flag_groups.EXECUTION.value,
      checkpoint_every=flag_groups.CHECKPOINT_EVERY.value,
      protocols=tuple(flag_groups.PROTOCOL.value),
      eval_every=flag_groups.EVAL_EVERY.value,
      validation_groups=flag_groups.VALIDATION_GROUPS.value,
      eval_groups=flag_groups.EVAL_GROUPS.value,
      way=flag_groups.WAY.value,
      group_clients=flag_groups.GROUP_CLIENTS.value,
  )


def main() -> int:
  """Runs the program and returns its exit code."""
  if LIST.value:
    _print_list()
    return 0
  native.prepare_environment()
  with command_line.reported_errors():
    config = _config()
    from tff_meta.training import checkpoints
    from tff_meta.training import experiment as experiment_lib
    from tff_meta.training import protocols
    from tff_meta.training import run
    from tff_meta.training import run_directory

    experiment = experiment_lib.prepare(
        config, download=flag_groups.DOWNLOAD.value
    )
    evaluator = protocols.Evaluator(experiment)
    chosen = evaluator.choose(config.protocols)
    experiment = dataclasses.replace(
        experiment, config=dataclasses.replace(config, protocols=chosen)
    )
    if config.eval_every:
      evaluator.on_the_way()
    process = experiment.build_process()

  directory = run_directory.RunDirectory(OUTPUT_DIR.value)
  try:
    with directory.locked():
      native.set_native_context()
      summary = run.train_and_evaluate(
          experiment,
          process,
          evaluator,
          directory,
          report=command_line.report,
      )
  except OSError as error:
    command_line.fail(error, command_line.FAILURE)
  except (
      run.AnotherConfigurationError,
      checkpoints.IncompatibleCheckpointError,
  ) as error:
    command_line.fail(error, command_line.USAGE_ERROR)
  except run.StoppedError as stopped:
    command_line.report('Stopped; the same command continues the run.')
    return 128 + stopped.signal_num
  print(protocols.format_table(summary['evaluation']))
  return 0


if __name__ == '__main__':
  command_line.run(main)
