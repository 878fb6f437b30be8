"""A use of a trained model as a computation, as programs evaluate it."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta.client_works import client_work
from tff_meta.evaluation import certainty
from tff_meta.learners import personalizer as personalizer_lib


def build_evaluation(
    personalizer: personalizer_lib.ClientPersonalizer,
    weights_type: tff.Type,
    input_shape: tuple[int, ...],
    *,
    initial_memory: Any = None,
    seed: int = 0,
    secure: bool = False,
) -> tff.Computation:
  """Returns how accurate clients are after they have adapted.

  Args:
    personalizer: Of new clients or of known ones, which needs nothing that
      other clients have kept.
    weights_type: Unplaced type of the model's weights.
    input_shape: Of an example.
    initial_memory: For known clients of an algorithm that has them keep
      something: the process's `initial_memory`, which stands in for that of a
      client that has not taken part. None for all others.
    seed: Of the draws of adaptation.
    secure: Whether the counts are summed by secure sums.

  Returns:
    `(weights at SERVER, data at CLIENTS) -> metrics at SERVER`. A client holds
    `support` and `query`, sequences of batches `<x, y>` in any sizes, `salt`,
    and with an `initial_memory` also `memory`, as in training. The metrics are
    `accuracy`, of all queries, and `num_examples` and `num_clients`, float32;
    the accuracy is NaN without a query.

  Raises:
    ValueError: If the personalizer begins with what known clients have kept.
  """
  parts = _build_parts(
      personalizer, weights_type, input_shape, initial_memory, seed, secure
  )
  to_metrics = tff.tensorflow.computation(_to_metrics, parts.counts_type)

  @tff.federated_computation(
      tff.FederatedType(weights_type, tff.SERVER),
      tff.FederatedType(parts.data_type, tff.CLIENTS),
  )
  def evaluate(weights, data):
    return tff.federated_map(to_metrics, parts.count(weights, data))

  return evaluate


def build_process(
    train_process: tff.learning.templates.LearningProcess,
    personalizer: personalizer_lib.ClientPersonalizer,
    input_shape: tuple[int, ...],
    *,
    initial_memory: Any = None,
    seed: int = 0,
    secure: bool = False,
) -> tff.learning.templates.LearningProcess:
  """Returns what `tff.learning.programs.EvaluationManager` evaluates with.

  Args:
    train_process: What the models are of.
    personalizer: As for `build_evaluation`.
    input_shape: As for `build_evaluation`.
    initial_memory: As for `build_evaluation`.
    seed: As for `build_evaluation`.
    secure: As for `build_evaluation`.

  Returns:
    A process that trains nothing. `next` takes data as `build_evaluation` does;
    its metrics are those of it, of the round and of all rounds since
    `set_model_weights`, where TFF's managers look for them.

  Raises:
    ValueError: As `build_evaluation`.
  """
  get_weights = train_process.get_model_weights
  weights_type = get_weights.type_signature.result
  parts = _build_parts(
      personalizer,
      weights_type.trainable,
      input_shape,
      initial_memory,
      seed,
      secure,
  )

  @tff.tensorflow.computation(weights_type)
  def to_state(weights):
    nothing = collections.OrderedDict(
        (name, tf.constant(0.0)) for name in _COUNTS
    )
    return collections.OrderedDict(weights=weights, counts=nothing)

  state_type = to_state.type_signature.result

  @tff.tensorflow.computation(state_type, parts.counts_type)
  def add(state, counts):
    total = tf.nest.map_structure(tf.add, state['counts'], counts)
    return collections.OrderedDict(weights=state['weights'], counts=total)

  @tff.tensorflow.computation(state_type, parts.counts_type)
  def to_metrics(state, counts):
    of_evaluation = collections.OrderedDict(
        current_round_metrics=_to_metrics(counts),
        total_rounds_metrics=_to_metrics(state['counts']),
    )
    return collections.OrderedDict(
        client_work=collections.OrderedDict(eval=of_evaluation)
    )

  @tff.tensorflow.computation(state_type)
  def to_trainable(state):
    return state['weights'].trainable

  @tff.tensorflow.computation(state_type)
  def get_model_weights(state):
    return state['weights']

  @tff.tensorflow.computation(state_type, weights_type)
  def set_model_weights(state, weights):
    del state
    return to_state(weights)

  @tff.federated_computation
  def initialize():
    state = train_process.initialize()
    weights = tff.federated_map(get_weights, state)
    return tff.federated_map(to_state, weights)

  @tff.federated_computation(
      tff.FederatedType(state_type, tff.SERVER),
      tff.FederatedType(parts.data_type, tff.CLIENTS),
  )
  def next_fn(state, data):
    weights = tff.federated_map(to_trainable, state)
    counts = parts.count(weights, data)
    state = tff.federated_map(add, (state, counts))
    return tff.learning.templates.LearningProcessOutput(
        state, tff.federated_map(to_metrics, (state, counts))
    )

  return tff.learning.templates.LearningProcess(
      initialize, next_fn, get_model_weights, set_model_weights
  )


class _Parts(NamedTuple):
  """Parts of an evaluation.

  Attributes:
    data_type: Of what a client holds.
    counts_type: Of `_COUNTS`.
    count: `(weights at SERVER, data at CLIENTS) -> counts at SERVER`.
  """

  data_type: tff.Type
  counts_type: tff.Type
  count: Callable[..., Any]


_COUNTS = 'num_right', 'num_examples', 'num_clients'
_LARGEST_COUNT = np.float32(2.0**20).item()


def _to_metrics(counts):
  return collections.OrderedDict(
      accuracy=counts['num_right'] / counts['num_examples'],
      num_examples=counts['num_examples'],
      num_clients=counts['num_clients'],
  )


def _build_parts(
    personalizer, weights_type, input_shape, initial_memory, seed, secure
) -> _Parts:
  """Returns how clients adapt and are counted."""
  if personalizer.uses_bank:
    raise ValueError(
        'Expected a personalizer that needs nothing of known clients, found one'
        ' that begins with what they have kept for themselves.'
    )
  has_memory = initial_memory is not None
  memory_type = None
  if has_memory:
    memory_type = tff.tensorflow.computation(
        lambda: tf.nest.map_structure(tf.constant, initial_memory)
    ).type_signature.result
  data_kind = client_work.client_data_type(input_shape, memory_type)
  held = collections.OrderedDict(
      support=data_kind.examples,
      query=data_kind.examples,
      salt=data_kind.salt,
  )
  if has_memory:
    held['memory'] = data_kind.memory
  data_type = tff.to_type(held)

  @tff.tensorflow.computation(weights_type, data_type)
  def of_client(weights, data):
    support, query = map(episodes.to_examples, (data['support'], data['query']))
    own_seed = tf.random.experimental.stateless_fold_in(
        tf.constant([3, seed]), episodes.to_salt(data['salt'])
    )
    memory: Any = ()
    if has_memory:
      begin = tf.nest.map_structure(tf.constant, initial_memory)
      memory = client_work.to_memory(data['memory'], begin)
    adapted = personalizer.adapt(weights, memory, support, own_seed)
    ask = personalizer.predict
    labels = certainty.to_labels(ask, certainty.ask(ask, adapted, query))
    right = tf.cast(tf.equal(labels, query.y), tf.float32)
    counts = (
        tf.reduce_sum(right * query.mask),
        tf.reduce_sum(query.mask),
        tf.constant(1.0),
    )
    return collections.OrderedDict(zip(_COUNTS, counts, strict=True))

  counts_type = of_client.type_signature.result
  total = tff.aggregators.SumFactory()
  if secure:
    total = tff.aggregators.SecureSumFactory(_LARGEST_COUNT)
  process = total.create(counts_type)

  def count(weights, data):
    counts = tff.federated_map(
        of_client, (tff.federated_broadcast(weights), data)
    )
    nothing = tff.federated_value((), tff.SERVER)
    return process.next(nothing, counts).result

  return _Parts(data_type, counts_type, count)
