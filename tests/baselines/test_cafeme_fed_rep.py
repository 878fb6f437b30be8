"""CAFeMe's FedRep: head steps, then base steps, and all of it is averaged."""

import collections
import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import models
from tff_meta import registry
from tff_meta.baselines import cafeme_fed_rep
from tff_meta.learners import classifiers
from tff_meta.learners import personal_layers
from tff_meta.models import layers

COHORTS = (oracle.CLIENTS[:2], oracle.CLIENTS)
CONFIG = dataclasses.replace(
    cafeme_fed_rep.PAPER,
    learning_rate=0.05,
    head_steps=3,
    base_steps=2,
    batch_size=4,
)


@pytest.mark.parametrize(
    'side, channels, head_layers, base_and_head',
    [
        (28, 1, 2, [52_288, 530_954]),
        (32, 3, 3, [76_032, 930_826]),
        (28, 1, 1, [578_112, 5_130]),
    ],
)
def test_the_head_of_the_authors(side, channels, head_layers, base_and_head):
  """All dense layers with their batch normalisation; then the last alone."""
  model = models.build('cafeme_base', (side, side, channels), None)
  config = dataclasses.replace(CONFIG, head_layers=head_layers)
  weights = model.with_head(10).initialize(tf.constant([1, 2]))
  parts = personal_layers.split(
      weights, personal_layers.parameters(model, config.head_layers)
  )
  assert [
      sum(w.shape.num_elements() for w in tf.nest.flatten(part))
      for part in parts
  ] == base_and_head


def build_model():
  """A smooth perceptron with two dense layers before the classifier."""

  def init_body(seed):
    body = collections.OrderedDict()
    for i, (name, num_inputs) in enumerate({'dense1': 2, 'dense2': 4}.items()):
      body[f'{name}_kernel'], body[f'{name}_bias'] = layers.uniform_fan_in(
          oracle.fold_in(seed, i), (num_inputs, 4)
      )
    return body

  def embed(body, x, mask):
    del mask  # Examples do not see each other.
    for name in ('dense1', 'dense2'):
      x = tf.tanh(layers.dense(x, body[f'{name}_kernel'], body[f'{name}_bias']))
    return x

  return dataclasses.replace(
      oracle.build_model(),
      embedding_size=4,
      init_body=init_body,
      init_head=layers.dense_head(layers.uniform_fan_in, 4),
      embed=embed,
  )


def build(config, build_process=registry.build):
  """The process, and the classifier that it trains."""
  model = build_model()
  process = build_process(
      'cafeme_fed_rep',
      model,
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  return process, classifiers.LinearClassifier(model, oracle.NUM_CLASSES)


def naive_client(classifier, start, client, config, round_num, states):
  """Steps on some of the flat weights, then on the others.

  Args:
    classifier: Of which the gradients are.
    start: The weights; their leaves are six of the body and two of the head.
    client: The client.
    config: The configuration.
    round_num: From 0.
    states: The dictionaries of two Adams, which these change.

  Returns:
    The trained weights, as a vector.
  """
  sizes = [int(tf.size(leaf)) for leaf in tf.nest.flatten(start)]
  owner = np.repeat(np.arange(len(sizes)), sizes)
  in_head = owner >= len(sizes) - 2 * config.head_layers

  def to_vector(weights):
    leaves = [np.ravel(leaf) for leaf in tf.nest.flatten(weights)]
    return np.concatenate(leaves).astype(np.float64)

  def to_weights(vector):
    leaves = map(tf.constant, np.split(vector, np.cumsum(sizes)[:-1]))
    leaves = map(tf.reshape, leaves, map(tf.shape, tf.nest.flatten(start)))
    return tf.nest.pack_sequence_as(start, list(leaves))

  def gradient(vector, pairs):
    weights = to_weights(vector)
    x, y = map(np.array, zip(*pairs, strict=True))
    batch = oracle.Client(x.astype(np.float32), y.astype(np.int32), 0)
    with tf.GradientTape() as tape:
      tape.watch(weights)
      loss = classifier.loss(weights, batch.examples())
    return to_vector(tape.gradient(loss, weights))

  w = to_vector(start)
  seeds = tf.unstack(
      tf.random.experimental.stateless_split(
          personal.client_seed(round_num, client)
      )
  )
  for part, seed, num_steps, state in (
      (in_head, seeds[0], config.head_steps, states[0]),
      (~in_head, seeds[1], config.base_steps, states[1]),
  ):
    adam = personal.naive_optimizer('adam', config.learning_rate, part=part)
    batches = oracle.batches_of(
        client.pairs(), config.batch_size, seed, num_steps
    )
    for batch in batches[:num_steps]:
      w = w - adam(gradient(w, batch), state)
  return w


@pytest.mark.parametrize(
    'head_layers, client_optimizer_state, build_process',
    [
        (2, 'persist', registry.build),
        (1, 'reset', plain_process.PlainProcess),
    ],
    ids=['persist', 'reset'],
)
def test_two_rounds_by_a_naive_implementation(
    head_layers, client_optimizer_state, build_process
):
  """All clients of the first round come again in the second."""
  config = dataclasses.replace(
      CONFIG,
      head_layers=head_layers,
      client_optimizer_state=client_optimizer_state,
  )
  process, classifier = build(config, build_process)
  persists = client_optimizer_state == 'persist'
  assert hasattr(process, 'initial_memory') == persists

  result = personal.run(process, COHORTS)

  states = {}
  for round_num, cohort in enumerate(COHORTS):
    start = tf.nest.map_structure(tf.constant, result.weights[round_num])
    trained = []
    for client in cohort:
      if not persists or client.salt not in states:
        states[client.salt] = ({}, {})  # Of the head, of the base.
      trained.append(
          naive_client(
              classifier, start, client, config, round_num, states[client.salt]
          )
      )
    actual = np.concatenate(
        [np.ravel(w) for w in tf.nest.flatten(result.weights[round_num + 1])]
    )
    # A step is 0.05, and a hundredth shorter where the gradient is 3e-5: TFF's
    # Adam adds its epsilon before the correction of the moments' bias.
    expected = np.mean(trained, axis=0)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)
    kept = result.heads[round_num]
    assert list(kept) == (list(states) if persists else [])
    for salt, optimizers in kept.items():
      for part, state in zip(('head', 'base'), states[salt], strict=True):
        assert optimizers[part]['step'] == state['t']


def test_any_client_fine_tunes_the_whole_model():
  """By plain SGD at a falling rate."""
  config = dataclasses.replace(
      CONFIG,
      head_layers=1,
      fine_tuning_steps=3,
      fine_tuning_learning_rate=0.5,
      fine_tuning_decay=0.5,
      fine_tuning_decay_steps=2,
  )
  method = cafeme_fed_rep.cafeme_fed_rep(
      oracle.build_model(), config, oracle.NUM_CLASSES
  )
  assert method.known_client is method.new_client
  oracle.assert_fine_tunes(
      method.known_client(), batch_size=4, rates=(0.5, 0.5, 0.25)
  )


def test_a_head_that_is_the_whole_network_is_refused():
  with pytest.raises(ValueError, match='`head_layers`.*found 3'):
    build(dataclasses.replace(CONFIG, head_layers=3))
  with pytest.raises(ValueError, match='`head_layers` of at least 1, found 0'):
    dataclasses.replace(CONFIG, head_layers=0)
