"""Classifiers: by distance to class prototypes, and linear ones."""

import few_round_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta import models
from tff_meta.learners import classifiers
from tff_meta.losses import prototypical

MODEL = oracle.build_model()
WEIGHTS = MODEL.initialize(tf.constant([1, 2]))
W = oracle.to_vector(WEIGHTS)
CLIENT = oracle.CLIENTS[1]  # Eight examples of class 1 and three of class 2.
NONE = classifiers.DistanceClassifier(MODEL, 4).no_prototypes()
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


GPAL = classifiers.DistanceClassifier(
    MODEL, 4, local_weight=0.75, aux_weight=0.25
)


def test_the_first_round_has_the_local_loss_alone():
  """Not gamma times it, and whatever lies in the rows of absent classes."""
  check_loss(loss_and_gradient(GPAL, NONE), own_loss)
  check_loss(loss_and_gradient(GPAL, prototypes_of({})), own_loss)


def test_later_rounds_combine_both_losses():
  check_loss(loss_and_gradient(GPAL, prototypes_of(GLOBAL)), combined_loss)


def test_gamma_1_removes_the_auxiliary_loss():
  plain = classifiers.DistanceClassifier(MODEL, 4)
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
  classifier = classifiers.LinearClassifier(MODEL, 4)
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
  trained = classifiers.LinearClassifier(MODEL, 4).initialize(
      tf.constant([3, 4])
  )
  same = classifiers.DistanceClassifier(MODEL, 2).start(trained, (5, 6))
  assert same is trained
  linear = classifiers.LinearClassifier(MODEL, 2)
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


@pytest.mark.parametrize('name', models.MODELS)
def test_linear_classifiers_are_the_networks_own(name):
  """What lies between embedding and logits, such as LeNet's ReLU, counts."""
  shape = (28, 28, 1) if name in ('mlp', 'conv4') else (32, 32, 3)
  model = models.build(name, shape, 4)
  classifier = classifiers.LinearClassifier(model.without_head(), 4)
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
