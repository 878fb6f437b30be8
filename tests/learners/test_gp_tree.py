"""A tree of Gaussian process classifiers over a client's classes."""

import gp_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tff_meta.learners import gp_classifier
from tff_meta.learners import gp_tree
from tff_meta.losses import prototypical

pytestmark = pytest.mark.ci

PROCESS = gp_classifier.GaussianProcess(output_scale=3.0, gibbs_steps=1)
SEED = tf.constant([5, 6])
NUM_CLASSES, NUM_DRAWS = 5, 2
# Of classes 0, 2 and 4, none of them as large as another.
Y = np.array([2, 4, 0, 4, 2, 4], np.int32)


def embeddings(n, seed):
  return np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)


def pairs(e, y):
  return list(zip(e.astype(np.float64), y.tolist(), strict=True))


def prototypes(means):
  """Of label -> mean."""
  size = len(next(iter(means.values())))
  table = np.zeros([NUM_CLASSES, size], np.float32)
  for label, mean in means.items():
    table[label] = mean
  present = np.float32([c in means for c in range(NUM_CLASSES)])
  return prototypical.Prototypes(tf.constant(table), tf.constant(present))


def class_means(e, y):
  return {c: e[y == c].mean(0) for c in np.unique(y).tolist()}


def nodes_of(tree):
  """The sides as dictionaries label -> 1 or -1."""
  return [
      {c: int(side) for c, side in enumerate(row) if side}
      for row in tree.sides.numpy()
  ]


def fitted(e, y, process=PROCESS):
  tree = gp_tree.build_tree(prototypes(class_means(e, y)))
  return gp_tree.fit(
      process, tree, tf.constant(e), tf.constant(y), NUM_DRAWS, SEED
  )


def omegas_of(posterior):
  """Of every node those of its own examples."""
  examples = pairs(posterior.embeddings.numpy(), posterior.y.numpy())
  nodes = nodes_of(posterior.tree)
  return [
      omegas.numpy()[:, oracle.node_examples(node, examples)[0]]
      for node, omegas in zip(nodes, posterior.omegas, strict=True)
  ]


@pytest.mark.parametrize('seed', range(6))
def test_two_means_by_trying_all_splits(seed):
  points = embeddings(6, seed)
  expected = oracle.bipartition(dict(enumerate(points)))
  right = gp_tree.two_means(tf.constant(points)).numpy()
  assert right.tolist() == [expected[i] < 0 for i in range(6)]


@pytest.mark.parametrize('value', [1.5, np.nan])
@pytest.mark.parametrize('k', [2, 4])
def test_points_that_do_not_differ_are_split_nevertheless(k, value):
  right = gp_tree.two_means(tf.fill([k, 3], value)).numpy().tolist()
  assert right == [False] + [True] * (k - 1)


def test_a_tree_by_hand():
  """Classes 0 and 4 are near each other, and so are 1 and 3; 2 is absent."""
  means = {0: [0.0], 1: [7.0], 3: [5.0], 4: [1.0]}
  tree = gp_tree.build_tree(prototypes(means))
  np.testing.assert_array_equal(tree.present, [1, 1, 0, 1, 1])
  np.testing.assert_array_equal(
      tree.sides, [[1, -1, 0, -1, 1], [1, 0, 0, 0, -1], [0, 1, 0, -1, 0]]
  )


@pytest.mark.parametrize('labels', [(), (3,), (1, 3), (0, 1, 2, 3, 4)])
def test_a_tree_has_a_node_less_than_classes(labels):
  """And whatever the means, its nodes tell all classes apart."""
  for means in (embeddings(5, 1), np.ones([5, 3])):
    tree = gp_tree.build_tree(
        prototypes({c: means[c] for c in labels})
        if labels
        else prototypical.Prototypes(tf.zeros([5, 3]), tf.zeros([5]))
    )
    assert tree.sides.shape == (max(len(labels) - 1, 0), NUM_CLASSES)
    columns = tree.sides.numpy().T[list(labels)]
    assert len(np.unique(columns, axis=0)) == len(labels)


def test_fitting_draws_for_the_examples_of_a_node():
  e = embeddings(6, seed=1)
  posterior = fitted(e, Y)
  assert posterior.omegas.shape == (2, NUM_DRAWS, 6)
  root, child = nodes_of(posterior.tree)
  assert set(root) == {0, 2, 4} and len(child) == 2
  for i, node in enumerate((root, child)):
    rows, _, kappa = oracle.node_examples(node, pairs(e, Y))
    expected = np.zeros([NUM_DRAWS, 6])
    expected[:, rows] = gp_classifier.draw_omegas(
        PROCESS,
        tf.constant(e[rows]),
        tf.constant(kappa, tf.float32),
        NUM_DRAWS,
        tf.random.experimental.stateless_fold_in(SEED, i),
    )
    np.testing.assert_allclose(posterior.omegas[i], expected, rtol=1e-5)


def test_class_probabilities_by_a_naive_implementation():
  """They add up to one; a class that the client lacks has none."""
  e, query = embeddings(6, seed=1), embeddings(4, seed=2)
  posterior = fitted(e, Y)
  logs = gp_tree.class_log_probabilities(PROCESS, posterior, tf.constant(query))
  probabilities = np.exp(logs)
  np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
  np.testing.assert_array_equal(probabilities[:, [1, 3]], 0.0)
  nodes, omegas = nodes_of(posterior.tree), omegas_of(posterior)
  for row, x in zip(probabilities, query.astype(np.float64), strict=True):
    expected = oracle.class_probabilities(
        PROCESS, nodes, omegas, pairs(e, Y), x
    )
    for label, probability in expected.items():
      np.testing.assert_allclose(row[label], probability, rtol=1e-4)


def test_the_probabilities_of_ten_classes_add_up_to_one():
  y = np.repeat(np.arange(10), 3).astype(np.int32)
  e = embeddings(30, seed=1) + 2 * embeddings(10, seed=2)[y]
  tree = gp_tree.build_tree(
      prototypical.prototypes(tf.constant(e), tf.constant(y), tf.ones(30), 12)
  )
  posterior = gp_tree.fit(
      PROCESS, tree, tf.constant(e), tf.constant(y), 10, SEED
  )
  logs = gp_tree.class_log_probabilities(PROCESS, posterior, tf.constant(e))
  np.testing.assert_allclose(np.exp(logs).sum(1), 1.0, rtol=1e-5)
  assert np.mean(np.argmax(logs, 1) == y) > 0.5  # Chance is 0.1.


@pytest.mark.parametrize('labels', [[], [3, 3]])
def test_clients_of_one_class_and_of_none(labels):
  """Nothing to tell apart: no loss, and no other answer than that class."""
  y = np.array(labels, np.int32)
  e, query = embeddings(len(y), seed=1), tf.constant(embeddings(4, seed=2))

  @tf.function(autograph=False)
  def use(e, y, query):
    tree = gp_tree.build_tree(
        prototypical.prototypes(e, y, tf.ones(tf.shape(y)), NUM_CLASSES)
    )
    posterior = gp_tree.fit(PROCESS, tree, e, y, NUM_DRAWS, SEED)
    return (
        gp_tree.class_log_probabilities(PROCESS, posterior, query),
        gp_tree.predictive_loss(PROCESS, posterior, e, y),
    )

  logs, loss = use(e, y, query)
  assert float(loss) == 0.0
  answers = np.argmax(logs, 1).tolist()
  assert answers == [labels[0] if labels else 0] * 4


@pytest.mark.parametrize(
    'held_out', [[2, 4, 0, 4, 2], [0, 0], [4]], ids=['all', 'one', 'leaf']
)
def test_the_loss_by_a_naive_implementation(held_out):
  e, y = embeddings(6, seed=1), np.array(held_out, np.int32)
  query = embeddings(len(y), seed=2)
  posterior = fitted(e, Y)
  actual = gp_tree.predictive_loss(
      PROCESS, posterior, tf.constant(query), tf.constant(y)
  )
  expected = oracle.predictive_loss(
      PROCESS,
      nodes_of(posterior.tree),
      omegas_of(posterior),
      pairs(e, Y),
      pairs(query, y),
  )
  np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_nobodys_loss_is_zero():
  posterior = fitted(embeddings(6, seed=1), Y)
  none = tf.zeros([0, 3]), tf.zeros([0], tf.int32)
  assert float(gp_tree.predictive_loss(PROCESS, posterior, *none)) == 0.0
