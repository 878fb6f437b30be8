"""What a trained model makes of its clients' test examples."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_meta.models import model as model_lib
from tff_meta.training import client_memories
from tff_meta.training import experiment as experiment_lib

# Algorithms whose server trains no model, and where a client's memory has its.
_OWN_MODEL = {
    'local': lambda kept: kept,
    'fed_proto': lambda kept: kept['weights'],
}
# Those whose known clients have a network that is the server's in part, or is
# made by it.
_PARTLY_OWN_MODEL = ('lg_fed_avg', 'pfedhn')
_MANY_MODELS = ('ifca', 'ifca_ft')


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
  own = (*_OWN_MODEL, *_PARTLY_OWN_MODEL)
  return 'client' if experiment.config.algorithm in own else 'global'


def check_can_embed(experiment: experiment_lib.Experiment) -> None:
  """Raises a ValueError if there is no one network, or nothing to embed."""
  dataset, algorithm = experiment.dataset, experiment.config.algorithm
  if algorithm in _MANY_MODELS:
    raise ValueError(
        'Expected an algorithm whose server has one model, or each client its'
        f" own, found '{algorithm}', whose server has several."
    )
  if not any(dataset.num_examples(c, 'test') for c in dataset.client_ids()):
    raise ValueError(
        f'Expected known clients of {dataset.name!r} with test examples, found'
        f' none in partition {experiment.config.partition!r}.'
    )


def embed_test_examples(
    experiment: experiment_lib.Experiment,
    weights: Any,
    memories: client_memories.ClientMemories,
) -> EmbeddedExamples:
  """Embeds the test examples of all known clients.

  They are embedded by the body of the server's model; after local training and
  FedProto, where the server trains none, LG-FedAvg, where the first layers are
  the clients', and pFedHN, where it makes one for each client, each client's by
  the body of its own. A client's examples are one batch, which matters to
  networks with batch normalisation.

  Args:
    experiment: The clients and the network.
    weights: `OrderedDict(body, head)` of the server's model.
    memories: What clients have kept for themselves.

  Returns:
    The examples, client by client.

  Raises:
    ValueError: If no known client has test examples, or the server has several
      models.
  """
  check_can_embed(experiment)
  network_of = _build_network_of(experiment)
  embed = build_embed(experiment.model)
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
  algorithm = experiment.config.algorithm
  if algorithm in _PARTLY_OWN_MODEL:
    known_client = experiment.spec.build_known_client_personalizer(
        experiment.model,
        experiment.config.hparams,
        num_classes=experiment.dataset.num_classes,
    )
    return known_client.start
  if algorithm not in _OWN_MODEL:
    return lambda weights, memory: weights

  def own_network(weights, memory):
    own = memory._replace(value=_OWN_MODEL[algorithm](memory.value))
    return own.value_or(weights)

  return own_network


def build_embed(model: model_lib.Model) -> Any:
  """Returns the traced `(body, x [n, ...]) -> embeddings [n, D]`."""

  @tf.function(autograph=False, reduce_retracing=True)
  def embed(body, x):
    x = tf.ensure_shape(x, [None, *model.input_shape])
    return model.embed(body, x, tf.ones(tf.shape(x)[:1]))

  return embed
