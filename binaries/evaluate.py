"""Evaluates a finished or running run from its newest good checkpoint.

  python -m binaries.evaluate --run_dir=DIR --protocol=new_groups_iid

Prints the accuracies and writes DIR/evaluation/PROTOCOL.json and a file with a
line a client or group, such as DIR/evaluation/clients_PROTOCOL.csv. Nothing
else in DIR is changed, so the run may go on meanwhile. What is not given is as
in the run.

  python -m binaries.evaluate --run_dir=DIR --grid='way=2,5;group_clients=5,10'

evaluates with every combination, and adds a row of each to
DIR/evaluation/grid_PROTOCOL.csv, and a file with a line a client or group to
DIR/evaluation/grid_PROTOCOL. Those that are there already are not computed
again.
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
from tff_meta import registry
from tff_meta.training import grid_axes
from tff_meta.training import protocol_names
from tff_meta.training import run_directory

RUN_DIR = flag_kinds.define_path(
    'run_dir', None, 'Directory of the run: --output_dir of binaries.train.'
)
EVAL_SEED = flag_kinds.define_whole_number(
    'eval_seed', None, 'Of the groups and of adaptation; 0 to 2**31 - 1.'
)
GRID = flags.DEFINE_string(
    'grid',
    None,
    'Evaluate with every combination of these values, as'
    ' "group_rounds=1,3,5;group_clients=5,10;way=2,5;eval_shots=5,20": rounds'
    ' of a new group, its clients, its classes, examples of a class to adapt'
    ' on; also eval_support_fraction, and what --hparams of training takes that'
    " does not change the model's shape, such as steps of adaptation.",
)
flags.adopt_module_key_flags(flag_groups)


def _with_flags(config):
  """Returns the run's configuration with the flags applied to it."""
  from tff_meta.training import run_config

  fields = {f.name for f in dataclasses.fields(run_config.EvaluationConfig)}
  values = flag_groups.values(fields - {'reference_hparams'} | {'data_dir'})
  return config.replace(
      **{k: v for k, v in values.items() if v not in (None, ())}
  )


def _an_example() -> str:
  """Returns the newest of the runs in the default place, as a flag."""
  runs = sorted(
      pathlib.Path('runs').glob('*/config.json'),
      key=lambda path: path.stat().st_mtime,
  )
  return f', such as --run_dir={runs[-1].parent}' if runs else ''


def _read_axes(directory: run_directory.RunDirectory):
  """Returns the axes of --grid, checked without TensorFlow; none without one.

  Whose plugins are imported.
  """
  if GRID.value is None:
    return {}
  name = directory.read_recorded().get('algorithm')
  axes = grid_axes.read_axes(GRID.value, registry.get(str(name)))
  for axis in axes:
    if axis in flags.FLAGS and flags.FLAGS[axis].value is not None:
      raise ValueError(
          f'Expected {axis} in --grid or as --{axis}, found it in both.'
      )
  grid_axes.check_protocols(axes, flag_groups.PROTOCOL.value)
  return axes


def _check_points(points, experiment, names) -> None:
  """Raises a ValueError if a combination cannot be evaluated."""
  from tff_meta.training import evaluator as evaluator_lib

  if not names:
    raise ValueError('Expected protocols to evaluate with --grid, found none.')
  kept, checked = experiment.kept(), [experiment.config.hparams]
  for point in points:
    changed = dataclasses.replace(experiment, config=point.config)
    try:
      evaluator = evaluator_lib.Evaluator(changed)
      evaluator.choose(names)
      evaluator.check_uses(names)
      if point.config.hparams not in checked and changed.kept() != kept:
        raise ValueError(
            'Expected hyperparameters that leave the shape of the trained model'
            ' and of what clients keep as it is, found others.'
        )
    except ValueError as error:
      raise ValueError(f'{error} That is of --grid, {point}.') from None
    checked.append(point.config.hparams)


def _evaluate_points(axes, points, experiment, models, done) -> None:
  """Evaluates combinations and adds their rows to files.

  Args:
    axes: Of the grid.
    points: All combinations.
    experiment: What the run's configuration stands for.
    models: Of the run.
    done: Protocol -> its file, and the rows that are there.
  """
  from binaries import accuracy_table
  from tff_meta.training import evaluator as evaluator_lib
  from tff_meta.training import grids
  from tff_meta.training import run

  identity, known = run.identity(experiment), grid_axes.axes_of(experiment.spec)
  settings = {
      name: [
          grids.settings(name, point.config, models.rounds, identity)
          for point in points
      ]
      for name in done
  }
  for name, (path, rows) in done.items():
    num_done = len(rows.keys() & set(settings[name]))
    if num_done:
      command_line.report(
          f'{num_done} of {len(points)} combinations are in {path} already.'
      )
  tables: dict[str, list[dict[str, str]]] = {name: [] for name in done}
  for i, point in enumerate(points):
    evaluator = evaluator_lib.Evaluator(
        dataclasses.replace(experiment, config=point.config)
    )
    for name, (path, rows) in done.items():
      row = rows.get(settings[name][i])
      if row is None:
        command_line.report(f'Combination {i + 1} of {len(points)}: {point}.')
        summary, own = evaluator.evaluate(
            name, {'': models.trained}, models.untrained, command_line.report
        )['']
        units = own.to_csv()
        row = grids.make_row(
            point, models.rounds, summary, settings[name][i], units
        )
        grids.add_row(path, row, known, units)
      tables[name].append(grids.with_values(row, point))
  print(f'After {models.rounds} rounds of {experiment.config.training.rounds}:')
  for name, rows in tables.items():
    print(accuracy_table.format_grid(name, list(axes), rows))
    for axis in grids.without_effect(axes, rows):
      print(f'  Whatever {axis} is, the accuracies are the same.')
  for path, _ in done.values():
    print(f'Written: {path}')


def _evaluate(stack):
  """Runs the program; `stack` closes what it opens."""
  with command_line.reported_errors():
    if not RUN_DIR.value:
      raise ValueError(
          'Expected --run_dir, found none. Tip: it is the --output_dir of'
          f' binaries.train{_an_example()}.'
      )
    protocol_names.check(flag_groups.PROTOCOL.value)
    directory = run_directory.RunDirectory(RUN_DIR.value)
    if directory.read_config() is None:
      raise FileNotFoundError(
          f'Expected a run in {RUN_DIR.value}, found no config.json there. Tip:'
          f' --run_dir is the --output_dir of binaries.train{_an_example()}.'
      )
    flag_groups.import_plugins(RUN_DIR.value)
    axes = _read_axes(directory)
    command_line.announce(f'Evaluating the run in {RUN_DIR.value}.')
    installation.import_tff()
    execution = flag_groups.execution_among('in_process', 'ray')
    command_line.set_execution_context(
        execution,
        flag_groups.DEVICE.value,
        ray_options=flag_groups.ray_options(execution),
    )
    from binaries import accuracy_table
    from tff_meta.training import atomic_files
    from tff_meta.training import evaluator as evaluator_lib
    from tff_meta.training import experiment as experiment_lib
    from tff_meta.training import grids
    from tff_meta.training import restored_run

    config = restored_run.read_config(directory)
    eval_config = _with_flags(config)
    data_dir = eval_config.data.data_dir
    # The clients stay those of the run; only groups and adaptation change.
    if EVAL_SEED.value is not None:
      eval_config = eval_config.replace(seed=EVAL_SEED.value)
    grid_axes.check_protocols(axes, eval_config.evaluation.protocols)
    points = grids.combinations(axes, eval_config)
    experiment = experiment_lib.prepare(config.replace(data_dir=data_dir))
    evaluator = evaluator_lib.Evaluator(
        dataclasses.replace(experiment, config=eval_config)
    )
    names = evaluator.choose(eval_config.evaluation.protocols)
    evaluator.check_has_groups(**flag_groups.group_sizes())
    evaluator.check_has_settings(
        names,
        eval_groups=flag_groups.EVAL_GROUPS.value,
        **flag_groups.settings_of_clients(),
    )
    if flag_groups.NVAR.value:
      evaluator_lib.check_has_known_clients(names)
    grid_axes.check_protocols(axes, names)
    if axes:
      _check_points(points, experiment, names)
    models = stack.enter_context(
        restored_run.open_models(experiment, directory, command_line.report)
    )
    plain_files.make_directory(directory.evaluations)
    if axes:
      grid_files = {n: directory.evaluations / f'grid_{n}.csv' for n in names}
      done = {n: (f, grids.read_rows(f)) for n, f in grid_files.items()}
    else:
      files = {name: directory.evaluations / f'{name}.json' for name in names}
      for path in filter(pathlib.Path.exists, files.values()):
        command_line.report(f'Note: {path} will be replaced.')

  if axes:
    with command_line.reported_failures(directory.evaluations):
      _evaluate_points(axes, points, experiment, models, done)
    return
  settings = {
      'rounds': models.rounds,
      'seed': eval_config.seed,
      'way': eval_config.evaluation.way,
      'group_clients': eval_config.evaluation.group_clients,
      'eval_support_fraction': eval_config.evaluation.eval_support_fraction,
      'eval_shots': eval_config.evaluation.eval_shots,
  }
  with command_line.reported_failures(directory.evaluations):
    results = evaluator.evaluate_all(
        names,
        {'': models.trained},
        models.untrained,
        directory.evaluations,
        command_line.report,
    )['']
    for name, result in results.items():
      of_protocol = {
          setting: value if name in protocol_names.having(setting) else None
          for setting, value in settings.items()
      }
      atomic_files.write_json(
          files[name], {'protocol': name, **of_protocol, **result}
      )
  print(f'After {models.rounds} rounds of {config.training.rounds}:')
  print(accuracy_table.format_table(results))
  command_line.report(f'Written to {directory.evaluations}.')


def main() -> int:
  """Runs the program and returns its exit code."""
  with contextlib.ExitStack() as stack:
    _evaluate(stack)
  return 0


if __name__ == '__main__':
  command_line.run_and_end(main)
