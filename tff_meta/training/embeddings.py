"""What a trained model makes of its clients' test examples."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tree

from tff_meta.models import model as model_lib
from tff_meta.training import client_memories
from tff_meta.training import experiment as experiment_lib


class EmbeddedExamples(NamedTuple):
  """Examples in the embedding space.

  Attributes:
    embeddings: float32 [n, D].
    labels: int32 [n].
  """

  embeddings: np.ndarray
  labels: np.ndarray

  def choose(self, most: int, seed: int) -> 'EmbeddedExamples':
    """Returns a random subset of at most `most` examples, in their order."""
    if len(self.labels) <= most:
      return self
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(len(self.labels), most, replace=False))
    return EmbeddedExamples(self.embeddings[rows], self.labels[rows])


def embedded_by(experiment: experiment_lib.Experiment) -> str:
  """Returns whose body `embed_test_examples` uses: 'global' or 'client'."""
  return 'global' if experiment.method.client_network is None else 'client'


def check_can_embed(experiment: experiment_lib.Experiment) -> None:
  """Raises a ValueError if there is no one network, or nothing to embed."""
  dataset, method = experiment.dataset, experiment.method
  if method.num_models is not None:
    raise ValueError(
        'Expected an algorithm whose server has one model, or each client its'
        f' own, found {experiment.config.algorithm!r}, whose server has'
        ' several.'
    )
  if method.client_network is None:
    with tf.Graph().as_default():  # Of which nothing is computed.
      weights = method.initialize(tf.constant([0, 0]))
    if not has_whole_body(experiment.network, weights):
      raise ValueError(
          'Expected an algorithm whose server has all of the network before the'
          ' head, or each client its own, found'
          f' {experiment.config.algorithm!r}, whose server lacks a part.'
      )
  if not any(dataset.num_examples(c, 'test') for c in dataset.client_ids()):
    raise ValueError(
        f'Expected known clients of {dataset.name!r} with test examples, found'
        f' none in partition {experiment.config.data.partition!r}.'
    )


def has_whole_body(network: model_lib.Model, weights: Any) -> bool:
  """Returns whether weights have the whole body of a network.

  Args:
    network: The network.
    weights: What a server has, whatever that is.
  """
  if not isinstance(weights, Mapping) or not weights.get('body'):
    return False
  with tf.Graph().as_default():
    body = network.initialize(tf.constant([0, 0]))['body']
  shapes = [
      {
          '/'.join(map(str, path)): tuple(leaf.shape)
          for path, leaf in tree.flatten_with_path(structure)
      }
      for structure in (body, weights['body'])
  ]
  return shapes[0] == shapes[1]


def embed_test_examples(
    experiment: experiment_lib.Experiment,
    weights: Any,
    memories: client_memories.ClientMemories,
) -> EmbeddedExamples:
  """Embeds the test examples of all known clients.

  They are embedded by the body of the server's model; where known clients have
  networks of their own (`Method.client_network`), each client's by the
  body of its own. A client's examples are one batch, which matters to networks
  with batch normalisation.

  Args:
    experiment: The clients and the network.
    weights: `OrderedDict(body, head)` of the server's model.
    memories: What clients have kept for themselves.

  Returns:
    The examples, client by client.

  Raises:
    ValueError: If no known client has test examples, or the server has several
      models, or not the whole body while clients have no networks of their own.
  """
  check_can_embed(experiment)
  network_of = _build_network_of(experiment)
  embed = build_embed(experiment.network)
  dataset = experiment.dataset
  parts = []
  for client_id in dataset.client_ids():
    if not dataset.num_examples(client_id, 'test'):
      continue
    test = dataset.client(client_id).test
    network = network_of(weights, memories.of(client_id))
    parts.append((embed(network['body'], test.x).numpy(), test.y))
  return EmbeddedExamples(
      *(np.concatenate(column) for column in zip(*parts, strict=True))
  )


def _build_network_of(experiment):
  """Returns `(weights, memory) -> OrderedDict(body, head)` of a client."""
  own = experiment.method.client_network
  return (lambda weights, memory: weights) if own is None else own


def build_embed(model: model_lib.Model) -> Any:
  """Returns the traced `(body, x [n, ...]) -> embeddings [n, D]`."""

  @tf.function(autograph=False, reduce_retracing=True)
  def embed(body, x):
    x = tf.ensure_shape(x, [None, *model.input_shape])
    return model.embed(body, x, tf.ones(tf.shape(x)[:1]))

  return embed
