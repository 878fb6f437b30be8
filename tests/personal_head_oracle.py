"""Rounds with clients that keep a head, and a network to compute by hand.

Beside `few_round_oracle`, whose network, clients and NumPy training are used.
"""

import collections
from typing import Any, NamedTuple

import few_round_oracle as oracle
import numpy as np
import tensorflow as tf

from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.models import model as model_lib

# Of `oracle.to_vector(weights)`.
ALL, BODY, HEAD = slice(None), slice(0, 9), slice(9, None)


class Run(NamedTuple):
  """What some rounds led to.

  Attributes:
    weights: The server's weights before, between and after the rounds.
    heads: After each round, the clients' memories by salt.
    metrics: The training metrics of each round.
    state: The last server state.
  """

  weights: list[Any]
  heads: list[dict[int, Any]]
  metrics: list[Any]
  state: Any


def run(process, cohorts):
  """Runs a round per cohort, keeping the clients' memories as a store would."""
  state = process.initialize()
  result = Run([process.get_model_weights(state).trainable], [], [], None)
  heads = {}
  for cohort in cohorts:
    output, memories = next_with_memory(process, state, cohort, heads)
    state = output.state
    for client, memory in zip(cohort, memories, strict=True):
      if memory and memory.present:
        heads[client.salt] = memory.value
    result.weights.append(process.get_model_weights(state).trainable)
    result.heads.append(dict(heads))
    result.metrics.append(output.metrics['client_work']['train'])
  return result._replace(state=state)


def next_with_memory(process, state, cohort, heads):
  """Returns a round's output and memories; `()` where clients keep nothing."""
  data = [client.data() for client in cohort]
  if not hasattr(process, 'initial_memory'):
    return process.next(state, data), [()] * len(cohort)
  for client, client_data in zip(cohort, data, strict=True):
    client_data['memory'] = client_work.memory_dataset(
        process.initial_memory, heads.get(client.salt)
    )
  return process.next_with_memory(state, data)


def memory(head, present=True):
  """The `ClientMemory` that a personalizer takes."""
  return client_work.ClientMemory(tf.constant(present), head)


def scalar_model():
  """`logits = (b * x) * kernel + bias`, with b = 0, kernel (1, -1), bias 0."""

  def init_head(seed, num_classes):
    del seed, num_classes
    return collections.OrderedDict(
        kernel=tf.constant([[1.0, -1.0]]), bias=tf.zeros([2])
    )

  return model_lib.Model(
      name='scalar',
      input_shape=(1,),
      embedding_size=1,
      num_classes=None,
      init_body=lambda seed: collections.OrderedDict(b=tf.zeros([])),
      init_head=init_head,
      embed=lambda body, x, mask: body['b'] * x,
      classify=lambda head, e: e @ head['kernel'] + head['bias'],
  )


# One example x = 1 of class 0; three times x = 2 of class 1.
SCALAR_CLIENTS = (
    oracle.Client(np.float32([[1]]), np.int32([0]), salt=1),
    oracle.Client(np.float32([[2]] * 3), np.int32([1] * 3), salt=2),
)
EMPTY_CLIENT = oracle.Client(
    np.zeros([0, 2], np.float32), np.zeros([0], np.int32), salt=9
)


def head_vector(head):
  """A head as a float64 vector."""
  leaves = [np.ravel(head['kernel']), np.ravel(head['bias'])]
  return np.concatenate(leaves).astype(np.float64)


def predict(w, pairs):
  """The class of the largest output, by the weights as a vector."""
  num_classes = len(w[HEAD]) // 4
  kernel = w[HEAD][: 3 * num_classes].reshape(3, num_classes)
  bias = w[HEAD][3 * num_classes :]
  return [int(np.argmax(oracle.embed(w, x) @ kernel + bias)) for x, _ in pairs]


def nearest_class(w, train, query):
  """The class of the nearest class mean of the embeddings."""
  means = oracle.class_means(w, train)
  return [
      min(means, key=lambda c: np.sum((oracle.embed(w, x) - means[c]) ** 2))
      for x, _ in query
  ]


def naive_optimizer(name, rate, momentum=0.0, part=ALL):
  """SGD or Adam of which only a part of the weights moves."""

  def sgd(gradient, state):
    state['v'] = momentum * state.get('v', 0.0) + gradient
    return rate * state['v']

  def adam(gradient, state):
    state['t'] = t = state.get('t', 0) + 1
    state['m'] = 0.9 * state.get('m', 0.0) + 0.1 * gradient
    state['v'] = 0.999 * state.get('v', 0.0) + 0.001 * gradient**2
    m, v = state['m'] / (1 - 0.9**t), state['v'] / (1 - 0.999**t)
    return rate * m / (np.sqrt(v) + 1e-8)

  def step(gradient, state):
    moved = np.zeros_like(gradient)
    moved[part] = 1.0
    return moved * (sgd if name == 'sgd' else adam)(gradient, state)

  return step


def train(w, pairs, config, seed, num_epochs, part=ALL, **options):
  """Local epochs; returns the weights, the summed loss and its count.

  Args:
    w: The weights as a vector.
    pairs: The examples.
    config: Has optimizer, momentum, weight_decay; learning_rate and batch_size
      unless `options` give them.
    seed: Of the order of the examples.
    num_epochs: How many.
    part: What moves.
    **options: `rate`, `batch_size`, `max_steps`, after which it ends, and
      `state`, the optimizer's of earlier steps.
  """
  rate = options.get('rate', getattr(config, 'learning_rate', None))
  batch_size = options.get('batch_size', getattr(config, 'batch_size', None))
  num_classes = len(w[HEAD]) // 4
  return oracle.descend(
      lambda w, pairs: oracle.cross_entropy(w, pairs, num_classes),
      w,
      oracle.batches_of(pairs, batch_size, seed, num_epochs)[
          : options.get('max_steps')
      ],
      naive_optimizer(config.optimizer, rate, config.momentum, part),
      config.weight_decay,
      options.get('state'),
  )


def client_seed(round_num, client):
  """The seed of a client in a round, with `oracle.RUN_SEED`."""
  round_seed = oracle.fold_in((0, oracle.RUN_SEED), round_num)
  return oracle.fold_in(round_seed, client.salt)


def assert_same(actual, expected):
  """Compares weights bit for bit."""
  difference = weights_lib.subtract(actual, expected)
  assert float(weights_lib.squared_norm(difference)) == 0.0
