"""A group's rounds as plain TensorFlow: losses, averages, adaptation."""

import functools

import few_round_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta import models
from tff_meta.learners import few_round
from tff_meta.losses import prototypical

MODEL = oracle.build_model()
WEIGHTS = MODEL.initialize(tf.constant([1, 2]))
W = oracle.to_vector(WEIGHTS)
CLIENT = oracle.CLIENTS[1]  # Eight examples of class 1 and three of class 2.
NONE = few_round.DistanceClassifier(MODEL, 4).no_prototypes()
GLOBAL = {
    0: np.array([0.5, 0.0, 0.2]),
    1: np.array([-0.6, 0.3, 0.1]),
    2: np.array([0.2, -0.4, 0.9]),
}


def prototypes_of(rows):
  """Prototypes of four classes from label -> [3]; garbage where absent."""
  means = np.full((4, 3), 9.0, np.float32)
  present = np.zeros(4, np.float32)
  for label, row in rows.items():
    means[label], present[label] = row, 1
  return prototypical.Prototypes(tf.constant(means), tf.constant(present))


def own_loss(w, pairs):
  return oracle.distance_loss(w, pairs, oracle.class_means(w, pairs))


def combined_loss(w, pairs, gamma=0.75):
  auxiliary = oracle.distance_loss(w, pairs, GLOBAL)
  return gamma * own_loss(w, pairs) + (1 - gamma) * auxiliary


def loss_and_gradient(classifier, global_prototypes, local_prototypes=None):
  with tf.GradientTape() as tape:
    tape.watch(WEIGHTS)
    loss = classifier.loss(
        WEIGHTS, CLIENT.examples(), global_prototypes, local_prototypes
    )
  gradient = tape.gradient(
      loss, WEIGHTS, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
  return loss.numpy(), oracle.to_vector(gradient)


def check_loss(found, expected_loss):
  loss, gradient = found
  pairs = CLIENT.pairs()
  np.testing.assert_allclose(loss, expected_loss(W, pairs), rtol=1e-5)
  np.testing.assert_allclose(
      gradient,
      oracle.gradient(expected_loss, W, pairs),
      rtol=1e-4,
      atol=1e-6,
  )


GPAL = few_round.DistanceClassifier(
    MODEL, 4, local_weight=0.75, aux_weight=0.25
)


def test_the_first_round_has_the_local_loss_alone():
  """Not gamma times it, and whatever lies in the rows of absent classes."""
  check_loss(loss_and_gradient(GPAL, NONE), own_loss)
  check_loss(loss_and_gradient(GPAL, prototypes_of({})), own_loss)


def test_later_rounds_combine_both_losses():
  check_loss(loss_and_gradient(GPAL, prototypes_of(GLOBAL)), combined_loss)


def test_gamma_1_removes_the_auxiliary_loss():
  plain = few_round.DistanceClassifier(MODEL, 4)
  check_loss(loss_and_gradient(plain, prototypes_of(GLOBAL)), own_loss)


def test_given_local_prototypes_are_constants():
  """And the gradient goes into the embeddings only."""
  stored = {1: np.array([0.3, 0.3, -0.3]), 2: np.array([-0.2, 0.1, 0.4])}

  def expected(w, pairs):
    auxiliary = oracle.distance_loss(w, pairs, GLOBAL)
    return 0.75 * oracle.distance_loss(w, pairs, stored) + 0.25 * auxiliary

  check_loss(
      loss_and_gradient(GPAL, prototypes_of(GLOBAL), prototypes_of(stored)),
      expected,
  )


def test_the_loss_is_the_same_in_the_graphs_of_tff():
  """Where `==` of tensors compares identities: a first round has no gamma."""
  arrays = tf.nest.map_structure(lambda w: w.numpy(), WEIGHTS)

  @tff.tensorflow.computation
  def losses():
    weights = tf.nest.map_structure(tf.constant, arrays)
    return tuple(
        GPAL.loss(weights, CLIENT.examples(), prototypes_of(rows))
        for rows in ({}, GLOBAL)
    )

  expected = [loss(W, CLIENT.pairs()) for loss in (own_loss, combined_loss)]
  np.testing.assert_allclose(losses(), expected, rtol=1e-5)


def test_one_class_has_no_loss():
  """Neither value nor gradient: with one class the softmax is 1."""
  client = oracle.CLIENTS[2]
  with tf.GradientTape() as tape:
    tape.watch(WEIGHTS)
    loss = GPAL.loss(WEIGHTS, client.examples(), NONE)
  assert loss == 0
  for gradient in tf.nest.flatten(tape.gradient(loss, WEIGHTS)):
    assert not gradient.numpy().any()


def test_prediction_is_the_nearest_present_class():
  """Class 3 has garbage at (9, 9, 9) and class 0 is left out: never."""
  query = oracle.make_client((6, 7, 8), salt=9)
  rows = {label: GLOBAL[label] for label in (1, 2)}
  predicted = GPAL.predict(WEIGHTS, prototypes_of(rows), query.examples())
  expected = []
  for x in query.x:
    distances = {
        c: np.sum((oracle.embed(W, x) - row) ** 2) for c, row in rows.items()
    }
    expected.append(min(distances, key=distances.get))
  assert predicted.numpy().tolist() == expected
  assert set(expected) == {1, 2}


def test_a_linear_classifier():
  classifier = few_round.LinearClassifier(MODEL, 4)
  weights = classifier.initialize(tf.constant([3, 4]))
  w = oracle.to_vector(weights)
  loss = classifier.loss(weights, CLIENT.examples(), None)
  np.testing.assert_allclose(
      loss, oracle.cross_entropy(w, CLIENT.pairs()), rtol=1e-5
  )
  kernel, bias = w[9:21].reshape(3, 4), w[21:]
  query = oracle.make_client((6, 7, 8), salt=9)
  expected = [
      int(np.argmax(oracle.embed(w, x) @ kernel + bias)) for x in query.x
  ]
  predicted = classifier.predict(weights, None, query.examples())
  assert predicted.numpy().tolist() == expected and len(set(expected)) > 1


def test_only_a_linear_classifier_starts_with_something_new():
  trained = few_round.LinearClassifier(MODEL, 4).initialize(tf.constant([3, 4]))
  same = few_round.DistanceClassifier(MODEL, 2).start(trained, (5, 6))
  assert same is trained
  linear = few_round.LinearClassifier(MODEL, 2)
  first, again, other = (
      linear.start(trained, tf.constant(seed))
      for seed in ([5, 6], [5, 6], [5, 7])
  )
  assert first['body'] is trained['body']
  kernel = first['head']['kernel'].numpy()
  # Xavier: +-sqrt(6 / (3 + 2)).
  assert kernel.shape == (3, 2) and 0.5 < np.abs(kernel).max() <= 1.2**0.5
  assert not first['head']['bias'].numpy().any()
  np.testing.assert_array_equal(kernel, again['head']['kernel'])
  assert not np.array_equal(kernel, other['head']['kernel'])


@pytest.mark.parametrize(
    'num_examples, uniform, expected',
    [(7, False, 7), (7, True, 1), (0, False, 0), (0, True, 0)],
)
def test_client_weights(num_examples, uniform, expected):
  weight = few_round.client_weight(tf.constant(num_examples), uniform)
  assert weight.dtype == tf.float32 and weight == expected


def averaged(uploads, over='holders'):
  """Averages label -> value uploads of one dimension with weights."""
  sums = [
      few_round.weigh_prototypes(
          prototypical.Prototypes(
              tf.constant([[held.get(c, 0.0)] for c in range(3)]),
              tf.constant([float(c in held) for c in range(3)]),
          ),
          tf.constant(weight),
      )
      for held, weight in uploads
  ]
  total = tf.nest.map_structure(lambda *s: sum(s), *sums)
  means, present = few_round.divide_prototypes(total, over)
  return means[:, 0].numpy().tolist(), present.numpy().tolist()


def test_prototypes_are_averaged_over_their_holders():
  """.25 * 0 + .75 * 4 = 3; class 1 is that of its holder.

  Over all clients class 1, of weight 1/4, would be a quarter of it.
  """
  uploads = [({0: 0.0, 1: 8.0}, 0.25), ({0: 4.0}, 0.75)]
  assert averaged(uploads) == ([3, 8, 0], [1, 1, 0])
  assert averaged(uploads, 'all') == ([3, 2, 0], [1, 1, 0])


def test_a_client_of_weight_zero_holds_nothing():
  assert averaged([({0: 5.0, 1: 5.0}, 0.0), ({0: 4.0}, 2.0)]) == (
      [4, 0, 0],
      [1, 0, 0],
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
        local = own_loss(w, pairs)
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


@pytest.mark.parametrize('name', models.MODELS)
def test_linear_classifiers_are_the_networks_own(name):
  """What lies between embedding and logits, such as LeNet's ReLU, counts."""
  shape = (28, 28, 1) if name in ('mlp', 'conv4') else (32, 32, 3)
  model = models.build(name, shape, 4)
  classifier = few_round.LinearClassifier(model.without_head(), 4)
  weights = classifier.initialize(tf.constant([1, 2]))
  x = tf.random.stateless_normal([3, *shape], (5, 6))
  query = episodes.Examples(x, tf.zeros([3], tf.int32), tf.ones([3]))
  np.testing.assert_array_equal(
      classifier.predict(weights, classifier.no_prototypes(), query),
      tf.argmax(model.logits(weights, x), 1),
  )
  expected = tf.nn.sparse_softmax_cross_entropy_with_logits(
      query.y, model.logits(weights, x)
  )
  np.testing.assert_allclose(
      classifier.loss(weights, query, classifier.no_prototypes()),
      tf.reduce_mean(expected),
      rtol=1e-5,  # Float32.
  )


def test_a_client_that_diverges_does_not_count_in_its_group():
  """As in training: weight zero; the group is that of the other clients."""
  classifier = few_round.DistanceClassifier(MODEL, 3)
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
