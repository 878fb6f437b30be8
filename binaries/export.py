"""Writes the model of a run as SavedModels, which need TensorFlow alone.

  python -m binaries.export --run_dir=DIR --output_dir=BUNDLE

From the newest good checkpoint, which is not changed. The folder has a
SavedModel for each use of the algorithm, `serve.py`, which adapts and predicts
with it, and `manifest.json`, which says what it takes.
"""

from absl import flags

from binaries import command_line
from binaries import flag_groups
from binaries import flag_kinds
from tff_meta import installation
from tff_meta.training import run_directory

RUN_DIR = flag_kinds.define_path(
    'run_dir', None, 'Directory of the run: --output_dir of binaries.train.'
)
OUTPUT_DIR = flag_kinds.define_path(
    'output_dir', None, 'Where the bundle goes; a folder that is not there.'
)
USES = flag_kinds.define_list(
    'uses',
    'Which uses: known_client, new_client, new_class, group; by default those'
    ' that the algorithm has.',
)
ALLOW_PRIVATE_HEADS = flags.DEFINE_bool(
    'allow_private_heads',
    False,
    'Whether to write what known clients have kept for themselves into the'
    ' bundle, where new clients begin with it.',
)
COMPUTATIONS = flags.DEFINE_bool(
    'computations',
    True,
    "Whether to write TFF's computations, a round that they do, and a client's"
    ' round of training, too.',
)
TFLITE = flags.DEFINE_bool(
    'tflite',
    False,
    'Whether to write each SavedModel for TensorFlow Lite, too.',
)
flags.declare_key_flag('data_dir')
flags.declare_key_flag('plugins')


def main() -> int:
  """Runs the program and returns its exit code."""
  with command_line.reported_errors():
    for flag in (RUN_DIR, OUTPUT_DIR):
      if not flag.value:
        raise ValueError(f'Expected --{flag.name}, found none.')
    directory = run_directory.RunDirectory(RUN_DIR.value)
    if directory.read_config() is None:
      raise FileNotFoundError(
          f'Expected a run in {RUN_DIR.value}, found no config.json there. Tip:'
          ' --run_dir is the --output_dir of binaries.train.'
      )
    flag_groups.import_plugins(RUN_DIR.value)
    command_line.announce(f'Exporting the model of the run in {RUN_DIR.value}.')
    installation.import_tff()
    flag_groups.ray_options(flag_groups.execution_among('in_process'))
    command_line.set_execution_context('in_process', 'cpu')
    from tff_meta.bundles import computations
    from tff_meta.bundles import export
    from tff_meta.training import experiment as experiment_lib
    from tff_meta.training import restored_run

    export.check_target(OUTPUT_DIR.value)
    config = restored_run.read_config(directory)
    if flag_groups.DATA_DIR.value is not None:
      config = config.replace(data_dir=flag_groups.DATA_DIR.value)
    experiment = experiment_lib.prepare(config)
    with restored_run.open_models(
        experiment, directory, command_line.report
    ) as models:
      folder = export.write(
          experiment,
          models.trained,
          models.rounds,
          OUTPUT_DIR.value,
          USES.value,
          ALLOW_PRIVATE_HEADS.value,
          computations.Trained(
              models.process,
              models.state,
              experiment.model.input_shape,
              experiment.dataset.num_classes,
          )
          if COMPUTATIONS.value
          else None,
          TFLITE.value,
      )
  print(f'Written: {folder}')
  return 0


if __name__ == '__main__':
  command_line.run_and_end(main)
