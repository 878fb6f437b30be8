"""Writes what a trained model is used for as SavedModels.

A bundle is a folder: `manifest.json` says what is in it, what a use takes, and
what it was made of; each use is a SavedModel; `serve.py` adapts and predicts
where there is TensorFlow and nothing else; `SHA256SUMS` has the digest of every
file. What known clients have kept is not in it: whoever asks for a known client
gives its memory, too.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import platform
import shutil
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tree

import tff_meta
from tff_meta import episodes
from tff_meta import plain_files
from tff_meta.bundles import computations
from tff_meta.bundles import replay
from tff_meta.bundles import serve
from tff_meta.learners import personalizer as personalizer_lib
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import run_directory

USES = ('known_client', 'new_client', 'new_class', 'group')
_OF_GROUPS = ('new_class', 'group')  # Whose classes training need not have had.


class _Use(NamedTuple):
  """A use, traced.

  Attributes:
    module: What is saved.
    signatures: Name -> concrete function.
    inputs: Name of an input of `adapt_and_predict` -> dtype and shape.
    memory: Name of an input -> which part of a client's memory it is.
    num_classes: Labels are 0..num_classes-1.
  """

  module: tf.Module
  signatures: dict[str, Any]
  inputs: dict[str, Any]
  memory: dict[str, str]
  num_classes: int


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
    trained: What TFF's computations have of the run; None to leave them out.

  Returns:
    The folder, which is there as a whole or not at all.

  Raises:
    FileExistsError: If it exists.
    RunDirectoryError: If it cannot be made.
    ValueError: If the algorithm does not have such a use, or a new client would
      be given the heads of known ones.
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
  traced = {
      use: _trace(experiment, model, use, allow_private_heads)
      for use in uses or offered
  }
  folder.parent.mkdir(parents=True, exist_ok=True)
  unfinished = folder.with_name(f'.{folder.name}.{os.getpid()}')
  unfinished.mkdir()
  try:
    for name, found in traced.items():
      tf.saved_model.save(
          found.module, str(unfinished / name), signatures=found.signatures
      )
    manifest = _manifest(experiment, traced, rounds, allow_private_heads)
    if trained is not None:
      manifest['computations'] = computations.write(
          unfinished / replay.COMPUTATIONS, trained
      ) | {'replayable': not manifest['privacy']}
      shutil.copyfile(replay.__file__, unfinished / 'replay.py')
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
    unfinished.rename(folder)
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise
  return folder


def _trace(experiment, model, use, allow_private_heads) -> _Use:
  """Returns a use of a trained model as functions of plain tensors."""
  method = experiment.group_method if use in _OF_GROUPS else experiment.method
  personalizer = getattr(method, use)()
  network = experiment.model
  module = tf.Module()
  module.weights = tf.nest.map_structure(
      lambda leaf: tf.Variable(leaf, trainable=False), model.weights
  )
  images = tf.TensorSpec([None, *network.input_shape])
  if use == 'group':
    function, specs = _group_function(personalizer, module, network)
    memory = {}
  else:
    kept = ()
    if use == 'known_client':
      kept = model.memories.of('')  # Of nobody: its structure.
    elif personalizer.uses_bank:
      if not allow_private_heads:
        raise ValueError(
            f'Expected an algorithm whose {use} begins with nothing of known'
            f' clients, found {experiment.spec.name}, which gives it what they'
            ' have kept for themselves. Tip: name other uses (--uses), or allow'
            ' private heads (--allow_private_heads) if these clients agree.'
        )
      module.bank = tf.nest.map_structure(tf.constant, model.memories.bank)
    function, specs, memory = _client_function(
        personalizer, module, network, kept
    )
  signatures = {
      'adapt_and_predict': tf.function(
          function, autograph=False
      ).get_concrete_function(
          **{
              name: tf.TensorSpec(spec.shape, spec.dtype, name=name)
              for name, spec in specs.items()
          }
      )
  }
  if _has_body(network, model.weights):

    @tf.function(
        autograph=False,
        input_signature=[tf.TensorSpec(images.shape, images.dtype, name='x')],
    )
    def embed(x):
      return {
          'embeddings': network.embed(_tensors(module.weights)['body'], x, None)
      }

    signatures['embed'] = embed.get_concrete_function()
  inputs = {
      name: {'dtype': spec.dtype.name, 'shape': spec.shape.as_list()}
      for name, spec in specs.items()
  }
  return _Use(module, signatures, inputs, memory, method.num_classes)


def _client_function(
    personalizer: personalizer_lib.ClientPersonalizer, module, network, kept
):
  """Returns what adapts to a client, its inputs, and those of its memory."""
  paths = ['/'.join(map(str, p)) for p, _ in tree.flatten_with_path(kept)]
  memory = {f'memory_{i}': path for i, path in enumerate(paths)}
  leaves = tf.nest.flatten(kept)

  def adapt_and_predict(support_x, support_y, query_x, seed, **parts):
    given = tf.nest.pack_sequence_as(kept, [parts[name] for name in memory])
    if personalizer.uses_bank:
      given = module.bank
    adapted = personalizer.adapt(
        _tensors(module.weights),
        given,
        episodes.Examples(support_x, support_y, tf.ones(tf.shape(support_y))),
        seed,
    )
    return {'labels': personalizer.predict(adapted, _queries(query_x))}

  specs = {
      'support_x': tf.TensorSpec([None, *network.input_shape]),
      'support_y': tf.TensorSpec([None], tf.int32),
      'query_x': tf.TensorSpec([None, *network.input_shape]),
      'seed': tf.TensorSpec([2], tf.int32),
  }
  for name, leaf in zip(memory, leaves, strict=True):
    leaf = np.asarray(leaf)
    specs[name] = tf.TensorSpec(leaf.shape, leaf.dtype)
  return adapt_and_predict, specs, memory


def _group_function(
    personalizer: personalizer_lib.GroupPersonalizer, module, network
):
  """Returns what makes a group's model and asks it, and its inputs."""

  def adapt_and_predict(
      support_x, support_y, support_mask, salts, query_x, seed
  ):
    adapted = personalizer.adapt(
        _tensors(module.weights),
        episodes.Examples(support_x, support_y, support_mask),
        salts,
        seed,
    )
    return {'labels': personalizer.predict(adapted, _queries(query_x))}

  return adapt_and_predict, {
      'support_x': tf.TensorSpec([None, None, *network.input_shape]),
      'support_y': tf.TensorSpec([None, None], tf.int32),
      'support_mask': tf.TensorSpec([None, None]),
      'salts': tf.TensorSpec([None], tf.int32),
      'query_x': tf.TensorSpec([None, *network.input_shape]),
      'seed': tf.TensorSpec([2], tf.int32),
  }


def _queries(x) -> episodes.Examples:
  count = tf.shape(x)[0]
  return episodes.Examples(x, tf.zeros([count], tf.int32), tf.ones([count]))


def _tensors(variables):
  return tf.nest.map_structure(tf.convert_to_tensor, variables)


def _has_body(network, weights) -> bool:
  """Whether the server's weights have the whole body of the network."""
  if not isinstance(weights, Mapping) or not weights.get('body'):
    return False
  body = network.initialize(tf.zeros([2], tf.int32))['body']
  shapes = [
      {'/'.join(map(str, p)): np.shape(t) for p, t in tree.flatten_with_path(s)}
      for s in (body, weights['body'])
  ]
  return shapes[0] == shapes[1]


def _sees_its_neighbours(network, embed: Callable[..., Any]) -> bool:
  """Whether what is made of an example depends on those beside it."""
  x = np.random.default_rng(0).random([4, *network.input_shape], np.float32)
  together = embed(x=tf.constant(x))['embeddings'].numpy()[:1]
  alone = embed(x=tf.constant(x[:1]))['embeddings'].numpy()
  return not np.allclose(together, alone, rtol=1e-3, atol=1e-5)


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


def _manifest(
    experiment, traced: Mapping[str, _Use], rounds: int, has_private_heads: bool
):
  config, dataset = experiment.config.to_json(), experiment.dataset
  caveats = []
  if _scaling(experiment) is None:
    caveats.append(
        'Examples have to be preprocessed as in training: see dataset and'
        ' dataset_options of the configuration.'
    )
  if has_private_heads:
    caveats.append(
        'What known clients have kept for themselves may be in here: new'
        ' clients begin with it.'
    )
  if config['select_best']:
    caveats.append('The model is that of the last round, not of the best one.')
  signatures = [use.signatures for use in traced.values()]
  embeds = [found['embed'] for found in signatures if 'embed' in found]
  if embeds and _sees_its_neighbours(experiment.model, embeds[0]):
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
          name: {
              'num_classes': use.num_classes,
              'inputs': use.inputs,
              'memory': use.memory,
              'signatures': sorted(use.signatures),
          }
          for name, use in traced.items()
      },
  }
