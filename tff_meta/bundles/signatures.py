"""What a trained model is used for, and a client's round, as SavedModels.

Traced anew from the functions of a `Method`: TFF's own computations, wrapped as
a SavedModel, are saved but do not run. Structures become flat: the parts of a
structure `memory` are `memory_0`, `memory_1`, ..., whose paths the manifest
has.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tree

from tff_meta import episodes
from tff_meta import method as method_lib
from tff_meta.bundles import computations
from tff_meta.client_works import client_work
from tff_meta.learners import personalizer as personalizer_lib
from tff_meta.models import layers
from tff_meta.training import embeddings
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols

# Uses with classes that training need not have had.
OF_GROUPS = ('new_class', 'group')


class Traced(NamedTuple):
  """Functions to be saved.

  Attributes:
    module: What they belong to.
    signatures: Name -> concrete function.
    manifest: What is told of them, JSON values.
    gives_away: Whether what known clients keep is in the module.
  """

  module: tf.Module
  signatures: dict[str, Any]
  manifest: dict[str, Any]
  gives_away: bool = False


def of_use(
    experiment: experiment_lib.Experiment,
    model: protocols.Model,
    use: str,
    allow_private_heads: bool,
) -> Traced:
  """Returns what a trained model is used for.

  `adapt` takes the support set of a client or group and returns what it has
  adapted; `predict` takes that and queries; `adapt_and_predict` is both.
  `embed` is there where the server has the whole body.

  Args:
    experiment: What the run's configuration stands for.
    model: The trained model.
    use: A use of the algorithm.
    allow_private_heads: Whether what known clients have kept may be in it.

  Raises:
    ValueError: If a new client would be given what known ones have kept.
  """
  method = experiment.group_method if use in OF_GROUPS else experiment.method
  personalizer = getattr(method, use)()
  network = method.network or experiment.model
  module = tf.Module()
  module.weights = tf.nest.map_structure(
      lambda leaf: tf.Variable(leaf, trainable=False), model.weights
  )
  kept, gives_away = (), False
  if use == 'known_client':
    kept = model.memories.of('')  # Of nobody: its structure.
  elif use != 'group' and personalizer.uses_bank:
    if not allow_private_heads:
      raise ValueError(
          f'Expected an algorithm whose {use} begins with nothing of known'
          f' clients, found {experiment.spec.name}, which gives it what they'
          ' have kept for themselves. Tip: name other uses (--uses), or allow'
          ' private heads (--allow_private_heads) if these clients agree.'
      )
    module.bank = tf.nest.map_structure(tf.constant, model.memories.bank)
    gives_away = True
  if use == 'group':
    adapt_fn, specs = _group_adaptation(personalizer, module, network)
  else:
    adapt_fn, specs = _client_adaptation(personalizer, module, network, kept)
  memory = _names('memory', kept)
  adapted: Any = None

  def adapt_flat(**inputs):
    nonlocal adapted
    adapted = adapt_fn(**inputs)
    leaves = map(tf.convert_to_tensor, tf.nest.flatten(adapted))
    return dict(zip(_names('adapted', adapted), leaves, strict=True))

  adapt = _concrete(adapt_flat, specs)
  names = _names('adapted', adapted)
  of_adapted = {name: adapt.structured_outputs[name] for name in names}
  query = {'query_x': tf.TensorSpec([None, *network.input_shape])}

  def predict_flat(query_x, **parts):
    packed = tf.nest.pack_sequence_as(adapted, [parts[n] for n in names])
    return {'labels': personalizer.predict(packed, _queries(query_x))}

  predict = _concrete(predict_flat, query | of_adapted)

  def adapt_and_predict(query_x, **inputs):
    return predict(query_x=query_x, **adapt(**inputs))

  inputs = specs | query
  signatures = {
      'adapt': adapt,
      'predict': predict,
      'adapt_and_predict': _concrete(adapt_and_predict, inputs),
  }
  if embeddings.has_whole_body(network, model.weights):

    def embed(x):
      return {
          'embeddings': network.embed(_tensors(module.weights)['body'], x, None)
      }

    signatures['embed'] = _concrete(embed, {'x': query['query_x']})
  manifest = {
      'num_classes': method.num_classes,
      'inputs': _described(inputs),
      'adapted': _described(of_adapted),
      'memory': memory,
      'signatures': sorted(signatures),
  }
  return Traced(module, signatures, manifest, gives_away)


def of_round(
    experiment: experiment_lib.Experiment, trained: computations.Trained
) -> tuple[Traced, dict[str, np.ndarray]]:
  """Returns what a client computes in a round of training.

  `client_round` takes what the server sends, the client's examples, its salt
  and, where clients keep something, its memory; it returns what the client
  sends back and keeps.

  Args:
    experiment: What the run's configuration stands for.
    trained: What the run has come to.

  Returns:
    The function, and what the server sends in the next round: name of an input
    -> array.
  """
  method, network = experiment.method, experiment.model
  update, message_of = method_lib.client_function(
      method, experiment.config.seed
  )
  weights = trained.state.global_model_weights
  message = tf.nest.map_structure(
      np.asarray, message_of(trained.state.client_work)
  )
  sent = {'weights': weights, 'message': message}
  kept = getattr(trained.process, 'initial_memory', None)
  keeps = kept is not None
  structures = sent | ({'memory': kept} if keeps else {})
  arrays = {
      name: np.asarray(leaf)
      for prefix, structure in sent.items()
      for name, leaf in zip(
          _names(prefix, structure), tf.nest.flatten(structure), strict=True
      )
  }
  specs = {
      name: tf.TensorSpec(np.shape(leaf), np.asarray(leaf).dtype)
      for prefix, structure in structures.items()
      for name, leaf in zip(
          _names(prefix, structure), tf.nest.flatten(structure), strict=True
      )
  } | {
      'x': tf.TensorSpec([None, *network.input_shape]),
      'y': tf.TensorSpec([None], tf.int32),
      'salt': tf.TensorSpec([], tf.int32),
  }
  if keeps:
    specs['memory_present'] = tf.TensorSpec([], tf.bool)
  paths: dict[str, str] = {}

  def client_round(x, y, salt, **parts):
    given = {
        prefix: tf.nest.pack_sequence_as(
            structure, [parts[name] for name in _names(prefix, structure)]
        )
        for prefix, structure in structures.items()
    }
    memory: Any = ()
    if keeps:
      memory = client_work.ClientMemory(
          parts['memory_present'], given['memory']
      )
    examples = episodes.Examples(x, y, tf.ones(tf.shape(y)))
    output, memory, _, _ = client_work.one_client(
        update,
        given['weights'],
        given['message'],
        client_work.ClientData(examples, salt, memory),
        network,
        experiment.dataset.num_classes,
    )
    results = {
        'update_weight': output.update_weight,
        'loss_sum': output.report.loss_sum,
        'num_examples': output.report.num_examples,
    }
    if keeps:
      results['memory_present'] = memory.present
    for prefix, structure in (
        ('update', output.update),
        ('signal', output.signal),
        ('memory', memory.value if keeps else ()),
    ):
      found = _names(prefix, structure)
      paths.update(found)
      leaves = tf.nest.flatten(structure)
      results |= dict(zip(found, leaves, strict=True))
    return results

  concrete = _concrete(client_round, specs)
  for prefix, structure in structures.items():
    paths |= _names(prefix, structure)
  manifest = {
      'inputs': _described(specs),
      'outputs': sorted(concrete.structured_outputs),
      'paths': paths,
  }
  return Traced(tf.Module(), {'client_round': concrete}, manifest), arrays


def _concrete(function, specs):
  with layers.in_one_graph():
    return tf.function(function, autograph=False).get_concrete_function(
        **{
            name: tf.TensorSpec(spec.shape, spec.dtype, name=name)
            for name, spec in specs.items()
        }
    )


def _names(prefix: str, structure: Any) -> dict[str, str]:
  """Returns the name of each part of a structure -> its path."""
  return {
      f'{prefix}_{number}': '/'.join(map(str, path))
      for number, (path, _) in enumerate(tree.flatten_with_path(structure))
  }


def _described(specs) -> dict[str, Any]:
  return {
      name: {'dtype': spec.dtype.name, 'shape': spec.shape.as_list()}
      for name, spec in specs.items()
  }


def _client_adaptation(
    personalizer: personalizer_lib.ClientPersonalizer, module, network, kept
):
  """Returns what adapts to a client, and its inputs."""
  memory = _names('memory', kept)

  def adapt(support_x, support_y, seed, **parts):
    given = tf.nest.pack_sequence_as(kept, [parts[name] for name in memory])
    if personalizer.uses_bank:
      given = module.bank
    return personalizer.adapt(
        _tensors(module.weights),
        given,
        episodes.Examples(support_x, support_y, tf.ones(tf.shape(support_y))),
        seed,
    )

  specs = {
      'support_x': tf.TensorSpec([None, *network.input_shape]),
      'support_y': tf.TensorSpec([None], tf.int32),
      'seed': tf.TensorSpec([2], tf.int32),
  }
  for name, leaf in zip(memory, tf.nest.flatten(kept), strict=True):
    leaf = np.asarray(leaf)
    specs[name] = tf.TensorSpec(leaf.shape, leaf.dtype)
  return adapt, specs


def _group_adaptation(
    personalizer: personalizer_lib.GroupPersonalizer, module, network
):
  """Returns what makes a group's model, and its inputs."""

  def adapt(support_x, support_y, support_mask, salts, seed):
    return personalizer.adapt(
        _tensors(module.weights),
        episodes.Examples(support_x, support_y, support_mask),
        salts,
        seed,
    )

  return adapt, {
      'support_x': tf.TensorSpec([None, None, *network.input_shape]),
      'support_y': tf.TensorSpec([None, None], tf.int32),
      'support_mask': tf.TensorSpec([None, None]),
      'salts': tf.TensorSpec([None], tf.int32),
      'seed': tf.TensorSpec([2], tf.int32),
  }


def _queries(x) -> episodes.Examples:
  count = tf.shape(x)[0]
  return episodes.Examples(x, tf.zeros([count], tf.int32), tf.ones([count]))


def _tensors(variables):
  return tf.nest.map_structure(tf.convert_to_tensor, variables)
