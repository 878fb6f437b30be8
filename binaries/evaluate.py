"""Evaluates a finished or running run from its newest good checkpoint.

  python -m binaries.evaluate --run_dir=DIR --protocol=new_groups_iid

Prints the accuracies and writes DIR/evaluation/PROTOCOL.json and a file with a
line a client or group, such as DIR/evaluation/clients_PROTOCOL.csv. Nothing
else in DIR is changed, so the run may go on meanwhile. What is not given is as
in the run.
"""

import contextlib
import dataclasses
import pathlib

from absl import flags

from binaries import command_line
from binaries import flag_groups
from binaries import flag_kinds
from tff_meta import installation
from tff_meta import plain_files

RUN_DIR = flag_kinds.define_path(
    'run_dir', None, 'Directory of the run: --output_dir of binaries.train.'
)
EVAL_SEED = flag_kinds.define_whole_number(
    'eval_seed', None, 'Of the groups and of adaptation; 0 to 2**31 - 1.'
)
flags.adopt_module_key_flags(flag_groups)


def _with_flags(config):
  """Returns the run's configuration with the flags applied to it."""
  given = {
      'protocols': tuple(flag_groups.PROTOCOL.value) or config.protocols,
      'eval_groups': flag_groups.EVAL_GROUPS.value,
      'way': flag_groups.WAY.value,
      'group_clients': flag_groups.GROUP_CLIENTS.value,
      'data_dir': flag_groups.DATA_DIR.value,
      'eval_support_fraction': flag_groups.EVAL_SUPPORT_FRACTION.value,
      'restrict_f1_to_client_labels': (
          flag_groups.RESTRICT_F1_TO_CLIENT_LABELS.value
      ),
      'references': flag_groups.REFERENCES.value,
      'curve': flag_groups.CURVE.value,
      'nvar': flag_groups.NVAR.value,
  }
  given = {k: v for k, v in given.items() if v is not None}
  return dataclasses.replace(config, **given)


def _evaluate(stack):
  """Runs the program; `stack` closes what it opens."""
  with command_line.reported_errors():
    if not RUN_DIR.value:
      raise ValueError('Expected --run_dir, found none.')
    installation.import_tff()
    command_line.set_execution_context('in_process', flag_groups.DEVICE.value)
    from binaries import accuracy_table
    from tff_meta.training import atomic_files
    from tff_meta.training import experiment as experiment_lib
    from tff_meta.training import protocols
    from tff_meta.training import restored_run
    from tff_meta.training import run_directory

    directory = run_directory.RunDirectory(RUN_DIR.value)
    run_config = restored_run.read_config(directory)
    eval_config = _with_flags(run_config)
    experiment = experiment_lib.prepare(
        dataclasses.replace(run_config, data_dir=eval_config.data_dir)
    )
    # The clients stay those of the run; only groups and adaptation change.
    if EVAL_SEED.value is not None:
      eval_config = dataclasses.replace(eval_config, seed=EVAL_SEED.value)
    evaluator = protocols.Evaluator(
        dataclasses.replace(experiment, config=eval_config)
    )
    names = evaluator.choose(eval_config.protocols)
    evaluator.check_has_groups(**flag_groups.group_sizes())
    if flag_groups.NVAR.value:
      protocols.check_has_known_clients(names)
    trained, untrained, rounds = stack.enter_context(
        restored_run.open_models(experiment, directory, command_line.report)
    )
    plain_files.make_directory(directory.evaluations)
    files = {name: directory.evaluations / f'{name}.json' for name in names}
    for path in filter(pathlib.Path.exists, files.values()):
      command_line.report(f'Note: {path} will be replaced.')

  settings = {
      'rounds': rounds,
      'seed': eval_config.seed,
      'way': eval_config.way,
      'group_clients': eval_config.group_clients,
      'eval_support_fraction': eval_config.eval_support_fraction,
  }
  with command_line.reported_failures(directory.evaluations):
    results = evaluator.evaluate_all(
        names,
        {'': trained},
        untrained,
        directory.evaluations,
        command_line.report,
    )['']
    for name, result in results.items():
      atomic_files.write_json(
          files[name], {'protocol': name, **settings, **result}
      )
  print(f'After {rounds} rounds of {run_config.rounds}:')
  print(accuracy_table.format_table(results))


def main() -> int:
  """Runs the program and returns its exit code."""
  with contextlib.ExitStack() as stack:
    _evaluate(stack)
  return 0


if __name__ == '__main__':
  command_line.run_and_end(main)
