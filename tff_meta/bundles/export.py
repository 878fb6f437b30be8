"""Writes what a trained model is used for as SavedModels.

A bundle is a folder: `manifest.json` says what is in it, what a use takes, and
what it was made of; each use is a SavedModel; `serve.py` adapts and predicts
where there is TensorFlow and nothing else; `SHA256SUMS` has the digest of every
file. What known clients have kept is not in it: whoever asks for a known client
gives its memory, too.
"""

from collections.abc import Mapping, Sequence
import glob
import json
import os
import pathlib
import platform
import shutil
import socket

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tff_meta
from tff_meta import plain_files
from tff_meta.bundles import computations
from tff_meta.bundles import replay
from tff_meta.bundles import serve
from tff_meta.bundles import signatures
from tff_meta.training import atomic_files
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import run_directory

# Of each axis of any size where a converted model is run: clients, and examples
# of two classes, since few end in an error where a part of them is held out.
_ROWS = 12
USES = ('known_client', 'new_client', 'new_class', 'group')
_OF_GROUPS = signatures.OF_GROUPS


def uses_of(experiment: experiment_lib.Experiment) -> tuple[str, ...]:
  """Returns the uses that an algorithm has for these data, of `USES`."""
  evaluation = experiment.config.evaluation
  has_groups = None not in (evaluation.way, evaluation.group_clients)
  return tuple(
      use
      for use in USES
      if getattr(experiment.method, use) is not None
      and (has_groups or use not in _OF_GROUPS)
  )


def check_target(target: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the folder that a bundle would be.

  Raises:
    FileExistsError: If it exists.
    RunDirectoryError: If it cannot be made.
  """
  folder = pathlib.Path(target).expanduser()
  if os.path.lexists(folder):
    raise FileExistsError(
        f'Expected {folder} not to exist, found'
        f' {plain_files.describe(folder)}. Tip: give another folder.'
    )
  run_directory.RunDirectory(folder).check_can_be_made()
  return folder


def write(
    experiment: experiment_lib.Experiment,
    model: protocols.Model,
    rounds: int,
    target: str | os.PathLike[str],
    uses: Sequence[str] = (),
    allow_private_heads: bool = False,
    trained: computations.Trained | None = None,
    tflite: bool = False,
) -> pathlib.Path:
  """Writes a bundle.

  Args:
    experiment: What the run's configuration stands for.
    model: The trained model.
    rounds: Communication rounds that it has trained.
    target: The folder, which must not exist.
    uses: Some of `USES`; none for those that the algorithm has.
    allow_private_heads: Whether to write the heads of known clients into the
      bundle where new clients begin with one of them.
    trained: What TFF's computations have of the run; None to leave them, and a
      client's round, out.
    tflite: Whether to write each SavedModel for TensorFlow Lite, too.

  Returns:
    The folder, which is there as a whole or not at all.

  Raises:
    FileExistsError: If it exists.
    RunDirectoryError: If it cannot be made.
    ValueError: If the algorithm does not have such a use, a new client would be
      given the heads of known ones, or TensorFlow Lite does not take a model.
  """
  folder = check_target(target)
  offered = uses_of(experiment)
  uses = [uses] if isinstance(uses, str) else uses
  for use in uses:
    if use not in offered:
      raise ValueError(
          f'Expected uses of {", ".join(offered) or "nobody"}, which'
          f' {experiment.spec.name} has with these data, found {use!r}.'
      )
  if not offered:
    raise ValueError(
        f'Expected a use of {experiment.spec.name} with these data, found none.'
    )
  aggregation = experiment.config.training.aggregator()
  traced = {
      use: signatures.of_use(experiment, model, use, allow_private_heads)
      for use in uses or offered
  }
  folder.parent.mkdir(parents=True, exist_ok=True)
  _remove_leftovers(folder)
  unfinished = folder.with_name(f'{_unfinished(folder)}{os.getpid()}')
  unfinished.mkdir()
  saved = dict(traced)
  try:
    manifest = _manifest(experiment, traced, rounds)
    if trained is not None:
      manifest['computations'] = computations.write(
          unfinished / replay.COMPUTATIONS,
          trained,
          aggregation.has_distribute_aggregate_form,
      ) | {'replayable': not aggregation.adds_noise}
      shutil.copyfile(replay.__file__, unfinished / 'replay.py')
      client_round, sent = signatures.of_round(experiment, trained)
      manifest[serve.CLIENT_ROUND] = client_round.manifest
      saved[serve.CLIENT_ROUND] = client_round
      np.savez(unfinished / f'{serve.CLIENT_ROUND}.npz', **sent)
    for name, found in saved.items():
      _save(found, unfinished / name)
      if tflite:
        least = _of_group(experiment, name).get('min_clients', 0)
        _convert(unfinished / name, found, max(least, _ROWS))
    scaling = _scaling(experiment)
    if scaling is not None:
      manifest['examples'], arrays = scaling
      np.savez(unfinished / serve.SCALING, **arrays)
    (unfinished / serve.MANIFEST).write_text(
        json.dumps(manifest, indent=2, sort_keys=True) + '\n'
    )
    shutil.copyfile(serve.__file__, unfinished / 'serve.py')
    sums = serve.digests(unfinished)
    (unfinished / serve.SUMS).write_text(serve.to_text(sums))
    atomic_files.sync_tree(unfinished)
    unfinished.rename(folder)
    atomic_files.sync_directory(folder.parent)
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise
  return folder


def _scaling(experiment):
  """Returns what examples were, and how the network has them; None if unknown.

  Known are scalings that multiply and add, pixel by pixel.
  """
  form = experiment.dataset.raw_form
  if form is None or form[1] != tuple(experiment.model.input_shape):
    return None
  dtype, shape = form
  scale = experiment.dataset.preprocess
  rng = np.random.default_rng(0)
  some = rng.integers(0, 256, [8, *shape]).astype(dtype)
  offset = scale(np.zeros([1, *shape], dtype))
  slope = scale(np.ones([1, *shape], dtype)) - offset
  if not np.allclose(scale(some), some * slope + offset, rtol=1e-4, atol=1e-4):
    return None
  arrays = {'slope': slope[0], 'offset': offset[0]}
  return {'dtype': dtype.name, 'shape': list(shape)}, arrays


def _save(traced: signatures.Traced, folder: pathlib.Path) -> None:
  tf.saved_model.save(traced.module, str(folder), signatures=traced.signatures)


def _convert(
    folder: pathlib.Path, traced: signatures.Traced, rows: int
) -> None:
  """Writes a SavedModel as FOLDER.tflite, with the same signatures.

  Each is run once, since a file that is converted need not run.

  Args:
    folder: Of the SavedModel.
    traced: What is in it.
    rows: How many clients and examples it is run with.

  Raises:
    ValueError: If it is not converted, or does not run.
  """
  converter = tf.lite.TFLiteConverter.from_saved_model(str(folder))
  # Loops, draws and gradients are operations of TensorFlow itself.
  converter.target_spec.supported_ops = [
      tf.lite.OpsSet.TFLITE_BUILTINS,
      tf.lite.OpsSet.SELECT_TF_OPS,
  ]
  try:
    content = converter.convert()
    _run(tf.lite.Interpreter(model_content=content), traced, rows)
  except Exception as error:  # Of many kinds, some of them C++'s.
    raise ValueError(
        f'Expected TensorFlow Lite to take {folder.name}, found'
        f' {type(error).__name__}: {str(error)[:300]}. Tip: leave --tflite out,'
        ' or name other --uses (a client_round: --nocomputations).'
    ) from error
  folder.with_suffix('.tflite').write_bytes(content)


def _run(interpreter, traced: signatures.Traced, rows: int) -> None:
  """Runs every signature on made-up examples; what it returns is no matter."""
  rng = np.random.default_rng(0)

  def made_up(dtype, shape):
    shape = [rows if size is None else size for size in shape]
    if dtype == 'float32':
      return rng.random(shape, np.float32)
    return (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype)

  given = {n: made_up(**of) for n, of in traced.manifest['inputs'].items()}
  given['support_mask'] = np.ones([rows, rows], np.float32)
  given.setdefault('x', given.get('query_x'))  # What `embed` takes.
  for name in traced.signatures:
    run = interpreter.get_signature_runner(name)
    inputs = {key: given[key] for key in run.get_input_details()}
    given |= run(**inputs)  # What is adapted is asked.


def _unfinished(folder: pathlib.Path) -> str:
  """Returns how names of unfinished exports of this host begin."""
  return f'.{folder.name}.{socket.gethostname()}.'


def _remove_leftovers(folder: pathlib.Path) -> None:
  """Removes what exports to a folder have left that were killed here."""
  for path in folder.parent.glob(f'{glob.escape(_unfinished(folder))}*'):
    pid = path.name.rpartition('.')[2]
    if pid.isdigit() and not os.path.exists(f'/proc/{pid}'):
      shutil.rmtree(path, ignore_errors=True)


def _manifest(experiment, traced: Mapping[str, signatures.Traced], rounds: int):
  config, dataset = experiment.config.to_json(), experiment.dataset
  caveats = []
  if _scaling(experiment) is None:
    caveats.append(
        'Examples have to be preprocessed as in training: see dataset and'
        ' dataset_options of the configuration.'
    )
  if any(use.gives_away for use in traced.values()):
    caveats.append(
        'What known clients have kept for themselves is in here: new clients'
        ' begin with it.'
    )
  if config['select_best']:
    caveats.append('The model is that of the last round, not of the best one.')
  if experiment.sees_neighbours:
    caveats.append(
        'The network normalises a batch by its own mean and variance, so that'
        ' a prediction depends on the examples that are asked with it. Ask with'
        ' batches of the size of training, never with one example.'
    )
  config.pop('data_dir', None)
  config['dataset'] = config['dataset'].partition(':')[0]  # Not where it was.
  return {
      'format': serve.FORMAT,
      'algorithm': experiment.spec.name,
      'rounds': rounds,
      'configuration': config,
      'class_names': dataset.class_names and list(dataset.class_names),
      'caveats': caveats,
      'computations': None,
      'examples': None,
      # Null: the run promises none.
      'privacy': experiment.config.privacy(max(rounds, 1)),
      'versions': {
          'python': platform.python_version(),
          'tff_meta': tff_meta.__version__,
          'tensorflow': tf.__version__,
          'tensorflow-federated': tff.__version__,
          'numpy': np.__version__,
      },
      'uses': {
          name: use.manifest | _of_group(experiment, name)
          for name, use in traced.items()
      },
  }


def _of_group(experiment, use) -> dict[str, int]:
  """Returns how many clients a group has to have at least, if it matters."""
  field = experiment.spec.kept_clients_field
  if use != 'group' or field is None:
    return {}
  return {'min_clients': getattr(experiment.config.hparams, field) + 1}
