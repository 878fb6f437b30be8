"""A group's rounds as plain TensorFlow: losses, averages, adaptation."""

import functools

import few_round_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta.learners import classifiers
from tff_meta.learners import few_round

MODEL = oracle.build_model()
WEIGHTS = MODEL.initialize(tf.constant([1, 2]))
W = oracle.to_vector(WEIGHTS)
CLIENT = oracle.CLIENTS[1]  # Eight examples of class 1 and three of class 2.
GPAL = classifiers.DistanceClassifier(
    MODEL, 4, local_weight=0.75, aux_weight=0.25
)


def stack(clients, fill=7.0):
  """Support with a client axis, padded with garbage in between."""
  size = 1 + max(len(c.y) for c in clients)
  x = np.full((len(clients), size, 2), fill, np.float32)
  y = np.zeros((len(clients), size), np.int32)
  mask = np.zeros((len(clients), size), np.float32)
  for k, client in enumerate(clients):
    rows = np.arange(len(client.y)) + (np.arange(len(client.y)) > 2)
    x[k, rows], y[k, rows], mask[k, rows] = client.x, client.y, 1
  salts = tf.constant([c.salt for c in clients])
  return episodes.Examples(*map(tf.constant, (x, y, mask))), salts


def settings_of(**changes):
  options = {
      'optimizer': tff.learning.optimizers.build_sgdm(0.5),
      'batch_size': 4,
      'num_epochs': 2,
      'weight_decay': 0.05,
  }
  return few_round.RoundSettings(**(options | changes))


@functools.cache
def compiled(num_rounds, **changes):
  settings = settings_of(**changes)
  return tf.function(
      lambda support, salts: few_round.adapt_group(
          GPAL,
          settings,
          num_rounds,
          WEIGHTS,
          support,
          salts,
          tf.constant([5, 6]),
      ),
      autograph=False,
  )


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {
            'prototype_source': 'downloaded',
            'prototype_mean': 'all',
            'uniform': True,
        },
    ],
    ids=['defaults', 'the other options'],
)
def test_a_group_s_rounds_by_hand(changes):
  """Three unequal clients, two rounds of two epochs in batches of four."""
  theta, prototypes = W, {}
  for round_num in range(2):
    trained, uploads, weights = [], [], []
    for client in oracle.CLIENTS:
      seed = oracle.fold_in(oracle.fold_in((5, 6), round_num), client.salt)

      def loss(w, pairs, prototypes=prototypes):
        local = oracle.distance_loss(w, pairs, oracle.class_means(w, pairs))
        if not prototypes:
          return local
        auxiliary = oracle.distance_loss(w, pairs, prototypes)
        return 0.75 * local + 0.25 * auxiliary

      w, _, _ = oracle.descend(
          loss,
          theta,
          oracle.batches_of(client.pairs(), 4, seed, 2),
          oracle.plain_sgd(0.5),
          0.05,
      )
      trained.append(w)
      at = theta if 'prototype_source' in changes else w
      uploads.append(oracle.class_means(at, client.pairs()))
      weights.append(1 if 'uniform' in changes else len(client.y))
    theta = oracle.mean(trained, weights)
    prototypes = oracle.mean_of_holders(
        uploads, weights, changes.get('prototype_mean', 'holders')
    )
  found, found_prototypes = compiled(2, **changes)(*stack(oracle.CLIENTS))
  np.testing.assert_allclose(oracle.to_vector(found), theta, **oracle.TOLERANCE)
  oracle.assert_prototypes(found_prototypes, prototypes)
  assert np.abs(theta - W).max() > 0.05


def test_padding_and_the_order_of_clients_change_nothing():
  adapt = compiled(2)
  expected, expected_prototypes = adapt(*stack(oracle.CLIENTS))
  padded, padded_prototypes = adapt(*stack(oracle.CLIENTS, fill=-3.0))
  tf.nest.map_structure(
      np.testing.assert_array_equal,
      (expected, expected_prototypes),
      (padded, padded_prototypes),
  )
  reordered, _ = adapt(*stack(oracle.CLIENTS[::-1]))
  # Sums of three numbers in another order.
  np.testing.assert_allclose(
      oracle.to_vector(reordered),
      oracle.to_vector(expected),
      rtol=1e-5,
      atol=1e-6,
  )


def test_clients_and_rounds_draw_their_own_orders():
  """Two clients that differ only in their salts train in different orders."""
  seeds = []
  client_round = few_round.client_round

  def recording(*args):
    seeds.append(tuple(args[-1].numpy()))
    return client_round(*args)

  clients = [CLIENT._replace(salt=salt) for salt in (4, 5)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(few_round, 'client_round', recording)
    few_round.adapt_group(
        GPAL,
        settings_of(num_epochs=0),
        2,
        WEIGHTS,
        *stack(clients),
        tf.constant([5, 6]),
    )
  assert len(seeds) == 4 and len(set(seeds)) == 4


def test_a_client_without_examples_has_no_say():
  empty = oracle.Client(CLIENT.x[:0], CLIENT.y[:0], 8)
  adapt = compiled(1)
  expected = adapt(*stack([CLIENT]))
  found = adapt(*stack([CLIENT, empty]))
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected
  )


def test_a_client_that_diverges_does_not_count_in_its_group():
  """As in training: weight zero; the group is that of the other clients."""
  classifier = classifiers.DistanceClassifier(MODEL, 3)
  settings = few_round.RoundSettings(
      tff.learning.optimizers.build_sgdm(0.1), batch_size=0
  )
  weights = classifier.initialize(tf.constant([3, 4]))
  x = tf.random.stateless_normal([2, 5, *MODEL.input_shape], (7, 8))
  y = tf.constant([[0, 1, 2, 0, 1]] * 2)
  mask = tf.ones([2, 5])
  bad = tf.concat([x[:1], x[1:] * float('nan')], 0)

  def adapt(x, num_clients):
    support = episodes.Examples(
        x[:num_clients], y[:num_clients], mask[:num_clients]
    )
    return few_round.adapt_group(
        classifier,
        settings,
        2,
        weights,
        support,
        tf.range(num_clients),
        tf.constant([1, 2]),
    )

  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
      adapt(bad, 2),
      adapt(x, 1),
  )
