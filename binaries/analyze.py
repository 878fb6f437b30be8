"""Looks into finished or running runs: embeddings, clients' ways, leaks.

  python -m binaries.analyze --analysis=nvar --run_dir=DIR,...
  python -m binaries.analyze --analysis=embedding_map --run_dir=DIR,...
  python -m binaries.analyze --analysis=group_map --run_dir=DIR
  python -m binaries.analyze --analysis=trajectory --run_dir=DIR,...
  python -m binaries.analyze --analysis=inversion --dataset=cifar10
  python -m binaries.analyze --analysis=theory

nvar: how widely classes spread by their distance (MetaVers, Table 4).
embedding_map: test examples in a plane (MetaVers, Fig. 2).
group_map: one client of a new group, with and without GPAL (FRL, Fig. 3).
trajectory: how clients move from update to update (FedEC, Fig. 2).
inversion: images guessed from what clients send (MetaVers, Fig. 3); needs no
  run, and goes on with a study that is in OUTPUT_DIR.
theory: Lemmas 1 and 2 and Theorem 1 of FRL on random problems; needs no run.

Prints numbers and writes them to OUTPUT_DIR/ANALYSIS.json, a picture beside it.
Nothing in a run's directory is changed.
"""

import contextlib
import dataclasses
import pathlib

from absl import flags

from binaries import command_line
from binaries import flag_groups
from binaries import flag_kinds
from tff_meta import datasets
from tff_meta import installation
from tff_meta import plain_files

ANALYSIS = flags.DEFINE_enum(
    'analysis',
    None,
    ['nvar', 'embedding_map', 'group_map', 'trajectory', 'inversion', 'theory'],
    'What to look at.',
)
RUN_DIR = flag_kinds.define_paths(
    'run_dir',
    'Directories of runs, --output_dir of binaries.train, with commas; one for'
    ' group_map, none for inversion and theory.',
)
OUTPUT_DIR = flag_kinds.define_path(
    'output_dir',
    None,
    'Where results are written; by default runs/analyze_<analysis>.',
)
SEED = flag_kinds.define_whole_number(
    'seed',
    0,
    'Of t-SNE, of the choice of examples, and of all of inversion and theory.',
)
PROJECTION = flags.DEFINE_enum(
    'projection', 'tsne', ['tsne', 'pca'], 'How pictures are laid out.'
)
PERPLEXITY = flag_kinds.define_number(
    'perplexity',
    30.0,
    'Of t-SNE: about how many neighbours a point has; less than there are'
    ' points.',
)
LITERAL = flags.DEFINE_bool(
    'literal',
    False,
    'nvar: the inner mean over all examples, as the formula is printed.',
)
MAX_EXAMPLES = flag_kinds.define_whole_number(
    'max_examples', 2000, 'embedding_map: at most so many.', least=3
)
GROUP = flag_kinds.define_whole_number(
    'group', 0, 'group_map: which of the evaluated new groups.'
)
CLIENT = flag_kinds.define_whole_number(
    'client', 0, 'group_map: which client of the group.'
)
ROUNDS = flag_kinds.define_whole_number(
    'rounds', 30, 'trajectory: how many rounds to do again.', least=1
)
CLIENTS = flag_kinds.define_whole_number(
    'clients',
    5,
    'trajectory: how many clients, those sampled most often.',
    least=1,
)
DATASET = flags.DEFINE_string(
    'dataset', 'digits', 'inversion: where the images are from.'
)
IMAGES = flag_kinds.define_whole_number(
    'images', 20, 'inversion: how many, drawn by the seed.', least=1
)
LOCAL_CLASSES = flag_kinds.define_whole_number(
    'local_classes', 2, 'inversion: classes with prototypes.', least=2
)
SHOTS = flag_kinds.define_whole_number(
    'shots', 20, 'inversion: images behind a prototype.', least=2
)
ITERATIONS = flag_kinds.define_whole_number(
    'iterations', 500, 'inversion: of L-BFGS, from each start.', least=1
)
RESTARTS = flag_kinds.define_whole_number(
    'restarts',
    3,
    'inversion: random starts; the one counts that explains best what was'
    ' sent.',
    least=1,
)
PROBLEMS = flag_kinds.define_whole_number(
    'problems',
    300,
    'theory: random problems of each kind.',
    least=1,
)
flags.declare_key_flag('data_dir')
flags.declare_key_flag('device')
flags.declare_key_flag('plugins')


_PICTURED = 6  # Images of inversion.

# Analyses that need no run, and what they draw in its place.
_WITHOUT_RUN = {'inversion': 'its weights', 'theory': 'its problems'}


_OF_LAYOUTS = PROJECTION, PERPLEXITY, SEED
# Analysis -> the flags that it reads beside those that all have.
_READS: dict[str, tuple[flags.FlagHolder, ...]] = {
    'nvar': (flag_groups.DATA_DIR, LITERAL),
    'embedding_map': (flag_groups.DATA_DIR, *_OF_LAYOUTS, MAX_EXAMPLES),
    'group_map': (flag_groups.DATA_DIR, *_OF_LAYOUTS, GROUP, CLIENT),
    'trajectory': (flag_groups.DATA_DIR, *_OF_LAYOUTS, ROUNDS, CLIENTS),
    'inversion': (
        flag_groups.DATA_DIR,
        SEED,
        DATASET,
        IMAGES,
        LOCAL_CLASSES,
        SHOTS,
        ITERATIONS,
        RESTARTS,
    ),
    'theory': (SEED, PROBLEMS),
}


def _check_are_read() -> None:
  """Raises a ValueError if a flag is given that the analysis does not read."""
  read = {flag.name for flag in _READS[ANALYSIS.value]}
  known = {flag.name for of_one in _READS.values() for flag in of_one}
  ignored = [n for n in sorted(known - read) if flags.FLAGS[n].present]
  if ignored:
    raise ValueError(
        f'Expected no --{ignored[0]} with --analysis={ANALYSIS.value}, which'
        ' does not read it, found both.'
    )
  if PROJECTION.value == 'pca' and flags.FLAGS[PERPLEXITY.name].present:
    raise ValueError(
        'Expected no --perplexity with --projection=pca, which does not read'
        ' it, found both.'
    )


def _check_flags() -> None:
  """Raises a ValueError if flags do not go together."""
  if ANALYSIS.value is None:
    raise ValueError(
        f'Expected --analysis to be one of {", ".join(_ANALYSES)}, found none.'
    )
  root = pathlib.Path(OUTPUT_DIR.value or '')
  if OUTPUT_DIR.value and (root / 'config.json').exists():
    raise ValueError(
        'Expected --output_dir to be a directory of its own, found the run in'
        f' {root}.'
    )
  _check_are_read()
  found = len(RUN_DIR.value)
  if ANALYSIS.value in _WITHOUT_RUN:
    if found:
      raise ValueError(
          f'Expected no --run_dir with {ANALYSIS.value}, which draws'
          f' {_WITHOUT_RUN[ANALYSIS.value]}, found {",".join(RUN_DIR.value)}.'
      )
    if ANALYSIS.value == 'inversion':
      datasets.get(DATASET.value)
  elif not found:
    raise ValueError('Expected --run_dir, found none.')
  elif ANALYSIS.value == 'group_map' and found > 1:
    raise ValueError(f'Expected one --run_dir with group_map, found {found}.')


def _layout():
  """Returns how pictures are laid out."""
  from tff_meta.analyses import projections

  return projections.Layout(PROJECTION.value, PERPLEXITY.value, SEED.value)


def _configs():
  """Returns the directories and configurations of all runs."""
  from tff_meta.training import restored_run
  from tff_meta.training import run_directory

  directories = [run_directory.RunDirectory(path) for path in RUN_DIR.value]
  configs = [restored_run.read_config(directory) for directory in directories]
  data_dir = flag_groups.DATA_DIR.value
  if data_dir is not None:
    configs = [config.replace(data_dir=data_dir) for config in configs]
  return list(zip(directories, configs, strict=True))


def _prepare(configs, check):
  """Returns the experiments of all runs, before anything is computed of one.

  Args:
    configs: From `_configs`.
    check: Called with each experiment. What it returns is returned, too; its
      ValueErrors are made to name the run.
  """
  from tff_meta.training import experiment as experiment_lib

  prepared = []
  for directory, config in configs:
    try:
      experiment = experiment_lib.prepare(config)
      prepared.append((experiment, check(experiment)))
    except ValueError as error:
      raise ValueError(f'{directory.root}: {error}') from None
  return prepared


def _open_models(experiment, directory):
  """Opens the models of a run, a context manager."""
  from tff_meta.training import restored_run

  return restored_run.open_models(experiment, directory, command_line.report)


def _facts(directory, config):
  """Returns what a result says of its run."""
  return {
      'run_dir': str(directory.root),
      'algorithm': config.algorithm,
      'dataset': config.data.dataset,
      'seed': config.seed,
  }


def _titles(configs):
  """Returns what panels and lines of runs are called, so that they differ."""
  names = [config.algorithm for _, config in configs]
  if len(set(names)) == len(names):
    return names
  return [
      f'{config.algorithm} ({directory.root})' for directory, config in configs
  ]


def _nvar(root):
  """Prints and returns nVAR of every run."""
  del root  # There is no picture.
  from tff_meta.evaluation import normalized_variance
  from tff_meta.training import embeddings

  runs, configs = [], _configs()
  prepared = _prepare(configs, embeddings.check_can_embed)
  for title, (directory, config), (experiment, _) in zip(
      _titles(configs), configs, prepared, strict=True
  ):
    with _open_models(experiment, directory) as models:
      values = {}
      for name in ('trained', 'untrained'):
        examples = embeddings.embed_test_examples(
            experiment, *getattr(models, name)
        )
        values[name] = normalized_variance.normalized_variance(
            *examples, literal=LITERAL.value
        )
    runs.append(
        _facts(directory, config)
        | {
            'rounds': models.rounds,
            'body': embeddings.embedded_by(experiment),
            'num_examples': len(examples.labels),
        }
        | values
    )
    print(
        f'{title}: nVAR {values["trained"]:.4g} after'
        f' {models.rounds} rounds, {values["untrained"]:.4g} untrained'
    )
  return {'literal': LITERAL.value, 'runs': runs}


def _embedding_map(root):
  """Draws every run's test examples; prints and returns silhouettes."""
  from tff_meta.analyses import embedding_map
  from tff_meta.analyses import pictures
  from tff_meta.training import embeddings

  panels, runs, configs = [], [], _configs()
  prepared = _prepare(configs, embeddings.check_can_embed)
  for title, (directory, config), (experiment, _) in zip(
      _titles(configs), configs, prepared, strict=True
  ):
    with _open_models(experiment, directory) as models:
      examples = embeddings.embed_test_examples(experiment, *models.trained)
    panel, numbers = embedding_map.build_panel(
        title,
        examples.choose(MAX_EXAMPLES.value, SEED.value),
        _layout(),
    )
    panels.append(panel)
    runs.append(
        _facts(directory, config)
        | {
            'rounds': models.rounds,
            'body': embeddings.embedded_by(experiment),
        }
        | numbers
    )
    print(f'{title}: silhouette {numbers["silhouette"]:.4f}')
  pictures.write_panels(root / 'embedding_map.png', panels, 'class')
  return {'layout': dataclasses.asdict(_layout()), 'runs': runs}


def _group_map(root):
  """Draws a client's views; prints and returns silhouettes."""
  import tensorflow as tf

  from tff_meta.analyses import group_map
  from tff_meta.analyses import pictures
  from tff_meta.training import evaluator as evaluator_lib
  from tff_meta.training import protocols

  def check(experiment):
    rounds = group_map.build_rounds(experiment)
    num_groups = experiment.config.evaluation.eval_groups
    if GROUP.value >= num_groups:
      raise ValueError(
          f'Expected --group of those that are evaluated, 0..{num_groups - 1},'
          f' found {GROUP.value}.'
      )
    return rounds

  configs = _configs()
  ((directory, config),) = configs
  ((experiment, rounds),) = _prepare(configs, check)
  with _open_models(experiment, directory) as models:
    evaluator = evaluator_lib.Evaluator(experiment)
    evaluator.choose([protocols.NEW_GROUPS])
    group = evaluator.protocols[protocols.NEW_GROUPS].draw.sample(
        experiment.dataset.class_pools, GROUP.value
    )
    views = group_map.view_client(
        experiment.model,
        rounds,
        models.trained.weights,
        group,
        CLIENT.value,
        tf.constant([config.seed, GROUP.value], tf.int32),
    )
  panels, numbers = group_map.build_panels(views, _layout())
  for name, values in numbers.items():
    print(
        f'{name}: silhouette {values["silhouette"]:.4f}, of other clients'
        f' {values["silhouette_others"]:.4f}'
    )
  pictures.write_panels(root / 'group_map.png', panels, 'class')
  return {
      'layout': dataclasses.asdict(_layout()),
      **_facts(directory, config),
      'rounds': models.rounds,
      'group': GROUP.value,
      'client': CLIENT.value,
      'classes': group.classes.tolist(),
      'num_examples': len(views.labels),
      'views': numbers,
  }


def _trajectory(root):
  """Draws the ways of clients; prints and returns their steps' lengths."""
  from tff_meta.analyses import pictures
  from tff_meta.analyses import trajectory

  def record(experiment):
    recording = trajectory.Recording(experiment, ROUNDS.value, CLIENTS.value)
    _layout().check(recording.num_updates)
    return recording

  panels, runs, configs = [], [], _configs()
  for title, (directory, config), (_, recording) in zip(
      _titles(configs), configs, _prepare(configs, record), strict=True
  ):
    found = recording.run()
    numbers = trajectory.summarize(found)
    panels.append(trajectory.build_panel(title, found, _layout()))
    runs.append(_facts(directory, config) | numbers)
    relative = numbers['relative_step_length']
    print(
        f'{title}: mean step length'
        f' {numbers["mean_step_length"]:.4g},'
        f' {"unknown" if relative is None else f"{relative:.4g}"} of the'
        " features' norm"
    )
  pictures.write_panels(root / 'trajectory.png', panels, 'client')
  return {
      'layout': dataclasses.asdict(_layout()),
      'rounds': ROUNDS.value,
      'runs': runs,
  }


def _inversion(root):
  """Attacks all images in all cases; draws, prints and returns what leaks."""
  from tff_meta.analyses import inversion_study
  from tff_meta.analyses import pictures

  corpus = datasets.load_corpus(DATASET.value, flag_groups.DATA_DIR.value)
  settings = inversion_study.Settings(
      DATASET.value,
      corpus.fingerprint(),
      LOCAL_CLASSES.value,
      SHOTS.value,
      ITERATIONS.value,
      RESTARTS.value,
      SEED.value,
  )
  rows = inversion_study.run(
      corpus, settings, IMAGES.value, root, command_line.report
  )
  cases = inversion_study.summarize(rows)
  for case, numbers in cases.items():
    print(
        f'{case}: PSNR {_with_interval(numbers["psnr"], 1)} dB, SSIM'
        f' {_with_interval(numbers["ssim"], 3)}, recognised'
        f' {numbers["recognised"]} of {numbers["images"]}'
    )
  pictures.write_images(
      root / 'inversion.png',
      *inversion_study.read_pictures(root, rows, _PICTURED),
  )
  return {
      **dataclasses.asdict(settings),
      'images': [row.image_index for row in rows if row.case == 'grey'],
      'recognised_from_psnr': inversion_study.RECOGNISED,
      'cases': cases,
  }


def _with_interval(numbers, digits):
  """Returns a mean and, if it is known, half of its interval."""
  half_width = numbers['half_width_95']
  text = f'{numbers["mean"]:.{digits}f}'
  return text + ('' if half_width is None else f' +- {half_width:.{digits}f}')


def _theory(root):
  """Tries FRL's lemmas and theorem; prints and returns what held."""
  del root  # There is no picture.
  from tff_meta.analyses import few_round_theory

  counterexample = few_round_theory.try_counterexample()
  print(
      f'Lemma 2, one problem: variance {counterexample["variance"]:.4f}, bound'
      f' {counterexample["bound"]:.4f}, at a common point'
      f' {counterexample["common_point"]:.4f}; corrected bound'
      f' {counterexample["corrected"]:.4f}',
      flush=True,
  )
  lemmas = few_round_theory.try_lemmas(PROBLEMS.value, SEED.value)
  for setting in lemmas:
    print(
        f'{setting["family"]}, alpha L = {setting["alpha_smoothness"]},'
        f' R = {setting["rounds"]}:'
    )
    for name, numbers in setting.items():
      if isinstance(numbers, dict):
        print(
            f'  {name:34} holds in {numbers["holds"]:6.1%}, at every phi in'
            f' {numbers["holds_everywhere"]:6.1%}; worst ratio'
            f' {numbers["worst"]:.3g}'
        )
  rate = few_round_theory.try_rate(SEED.value)
  for numbers in rate:
    print(
        f'Theorem 1, {numbers["episodes"]:,} episodes: mean squared field'
        f' {numbers["first_order"]:.3g}, at most {numbers["worst"]:.3g} of the'
        f' bound, holds in {numbers["holds"]:.1%}; of the exact gradient'
        f' {numbers["exact"]:.3g}'
    )
  return {
      'seed': SEED.value,
      'problems': PROBLEMS.value,
      'counterexample': counterexample,
      'lemmas': lemmas,
      'rate': rate,
  }


_ANALYSES = {
    'nvar': _nvar,
    'embedding_map': _embedding_map,
    'group_map': _group_map,
    'trajectory': _trajectory,
    'inversion': _inversion,
    'theory': _theory,
}


def main() -> int:
  """Runs the program and returns its exit code."""
  with command_line.reported_errors():
    flag_groups.import_plugins(*RUN_DIR.value)
    _check_flags()
    name = ANALYSIS.value
    root = pathlib.Path(OUTPUT_DIR.value or f'runs/analyze_{name}')
    command_line.announce(f'Analysis {name}, written to {root}.')
    installation.import_tff()
    flag_groups.ray_options(flag_groups.execution_among('in_process'))
    command_line.set_execution_context('in_process', flag_groups.DEVICE.value)
    from tff_meta.training import atomic_files

    is_new = not root.exists()
    plain_files.make_directory(root, parents=True)
    try:
      result = _ANALYSES[name](root)
    except BaseException:
      if is_new:
        with contextlib.suppress(OSError):  # A picture is there.
          root.rmdir()
      raise
    path = root / f'{name}.json'
    atomic_files.write_json(path, {'analysis': name, **result})
  print(f'Written: {path}')
  return 0


if __name__ == '__main__':
  command_line.run_and_end(main)
