"""A client's classifier: a binary tree of Gaussian processes over its classes.

Every inner node tells two sets of classes apart, by a classifier of its own on
the examples of these classes. A class has the product of the probabilities on
its way down from the root.

Sources: Achituve, Navon, Yemini, Chechik and Fetaya 2021, "GP-Tree: A Gaussian
Process Classifier for Few-Shot Incremental Learning"; Achituve, Shamsian,
Navon, Chechik and Fetaya 2021, "Personalized Federated Learning with Gaussian
Processes", and its released code.
"""

from typing import NamedTuple

import tensorflow as tf

from tff_meta.learners import gp_classifier
from tff_meta.losses import prototypical

_LLOYD_STEPS = 10
# The logarithm of the probability of a class that the client does not have.
_ABSENT = -1e30


class Tree(NamedTuple):
  """Which classes are on which side of which node.

  Attributes:
    sides: float32 [J, C], J the number of present classes less one, at least 0;
      1 for a class on the left of a node, -1 on the right and 0 elsewhere.
    present: [C], 1 for a class of the client and 0 for others.
  """

  sides: tf.Tensor
  present: tf.Tensor


def two_means(points: tf.Tensor) -> tf.Tensor:
  """The best of Lloyd's solutions that begin at two of the points.

  Args:
    points: [k, D], k of at least 2.

  Returns:
    Boolean [k], which points are not in the cluster of the first one; never all
    equal: where no two points differ, only the first one is by itself.
  """
  k = tf.shape(points)[0]
  pairs = tf.where(tf.range(k)[:, tf.newaxis] < tf.range(k))
  num_starts = tf.shape(pairs)[0]
  centers = tf.gather(points, pairs)  # [starts, 2, D].

  def distances(centers):
    flat = prototypical.squared_distances(
        tf.reshape(centers, [-1, tf.shape(points)[1]]), points
    )
    return tf.reshape(flat, [num_starts, 2, k])

  for _ in range(_LLOYD_STEPS):
    near = distances(centers)
    second = tf.cast(near[:, 1] < near[:, 0], points.dtype)
    member = tf.stack([1 - second, second], axis=1)
    centers = tf.math.divide_no_nan(
        tf.matmul(member, points), tf.reduce_sum(member, 2, keepdims=True)
    )
  near = distances(centers)
  near = near[tf.argmin(tf.reduce_sum(tf.reduce_min(near, 1), 1))]
  second = near[1] < near[0]
  others = tf.not_equal(second, second[0])
  return tf.where(tf.reduce_any(others), others, tf.range(k) > 0)


def build_tree(prototypes: prototypical.Prototypes) -> Tree:
  """Splits the classes, and then what is more than one, by 2-means.

  Args:
    prototypes: The client's class means, of C classes.

  Returns:
    The tree. A node's left side has its first class.

  Source: Achituve et al. 2021 (GP-Tree), and the released code of pFedGP.
  """
  means, present = prototypes
  num_classes = present.shape[0]
  num_nodes = tf.cast(tf.reduce_sum(present), tf.int32) - 1

  def split(node, cluster, sides):
    sizes = tf.reduce_sum(tf.one_hot(cluster, num_classes), 0)
    largest = tf.argmax(sizes, output_type=tf.int32)
    members = tf.where(tf.equal(cluster, largest))
    right = two_means(tf.gather(means, members[:, 0]))
    side = tf.scatter_nd(
        members,
        tf.where(right, -1.0, 1.0),
        tf.constant([num_classes], tf.int64),
    )
    return (
        node + 1,
        tf.where(side < 0, node + 1, cluster),
        tf.concat([sides, side[tf.newaxis]], 0),
    )

  cluster = tf.where(present > 0, 0, -1)
  _, _, sides = tf.while_loop(
      lambda node, *_: node < num_nodes,
      split,
      (tf.constant(0), cluster, tf.zeros([0, num_classes])),
      shape_invariants=(
          tf.TensorShape([]),
          cluster.shape,
          tf.TensorShape([None, num_classes]),
      ),
  )
  return Tree(sides, present)


class Posterior(NamedTuple):
  """A client's classifier.

  Attributes:
    tree: Of its classes.
    embeddings: Of its examples, float32 [n, D].
    y: int32 [n].
    omegas: float32 [J, S, n], 0 for examples that are in no side of a node.
  """

  tree: Tree
  embeddings: tf.Tensor
  y: tf.Tensor
  omegas: tf.Tensor


def _members(tree, node, y):
  """Numbers of a node's examples [n], and their kappa."""
  side = tf.gather(tree.sides[node], y)
  rows = tf.where(tf.not_equal(side, 0))[:, 0]
  return rows, tf.gather(side, rows) / 2


def _over_nodes(tree, term, initial):
  """`initial` plus the sum of `term(node)`."""
  _, total = tf.while_loop(
      lambda node, _: node < tf.shape(tree.sides)[0],
      lambda node, total: (node + 1, total + term(node)),
      (tf.constant(0), initial),
      shape_invariants=(
          tf.TensorShape([]),
          tf.TensorShape([None] * initial.shape.rank),
      ),
  )
  return total


def fit(
    process: gp_classifier.GaussianProcess,
    tree: Tree,
    embeddings: tf.Tensor,
    y: tf.Tensor,
    num_draws: int,
    seed: tf.Tensor,
) -> Posterior:
  """Draws the omegas of all nodes.

  Args:
    process: The Gaussian process.
    tree: Of the client's classes, each with an example.
    embeddings: float32 [n, D], n of at least 0.
    y: int32 [n].
    num_draws: S, at least 1.
    seed: int32 [2].

  Returns:
    The posterior.
  """
  num_examples = tf.shape(y, out_type=tf.int64)[0]

  def draw(node, omegas):
    rows, kappa = _members(tree, node, y)
    drawn = gp_classifier.draw_omegas(
        process,
        tf.gather(embeddings, rows),
        kappa,
        num_draws,
        tf.random.experimental.stateless_fold_in(seed, node),
    )
    placed = tf.scatter_nd(
        rows[:, tf.newaxis],
        tf.transpose(drawn),
        tf.stack([num_examples, num_draws]),
    )
    return node + 1, tf.concat([omegas, tf.transpose(placed)[tf.newaxis]], 0)

  _, omegas = tf.while_loop(
      lambda node, _: node < tf.shape(tree.sides)[0],
      draw,
      (tf.constant(0), tf.zeros([0, num_draws, tf.size(y)])),
      shape_invariants=(
          tf.TensorShape([]),
          tf.TensorShape([None, num_draws, None]),
      ),
  )
  return Posterior(tree, embeddings, y, omegas)


def _log_sides(process, posterior, node, query):
  """Logarithms of the probabilities of a node's sides, [2, m]."""
  rows, kappa = _members(posterior.tree, node, posterior.y)
  probabilities = gp_classifier.side_probabilities(
      process,
      tf.gather(posterior.embeddings, rows),
      kappa,
      tf.gather(posterior.omegas[node], rows, axis=1),
      query,
  )
  return tf.math.log(probabilities)


def class_log_probabilities(
    process: gp_classifier.GaussianProcess,
    posterior: Posterior,
    query: tf.Tensor,
) -> tf.Tensor:
  """The logarithm of every class's predictive probability.

  Args:
    process: The Gaussian process.
    posterior: The client's.
    query: New embeddings, [m, D].

  Returns:
    [m, C]; 0 for the class of a client that has only one, and -1e30 for classes
    that the client does not have.
  """
  tree = posterior.tree

  def term(node):
    left, right = tf.unstack(
        _log_sides(process, posterior, node, query)[:, :, tf.newaxis]
    )
    side = tree.sides[node]
    return tf.where(side > 0, left, tf.where(side < 0, right, 0.0))

  shape = [tf.shape(query)[0], tf.size(tree.present)]
  total = _over_nodes(tree, term, tf.zeros(shape))
  return tf.where(tree.present > 0, total, _ABSENT)


def predictive_loss(
    process: gp_classifier.GaussianProcess,
    posterior: Posterior,
    query: tf.Tensor,
    y: tf.Tensor,
) -> tf.Tensor:
  """Minus the mean predictive log likelihood, summed over nodes.

  A node has the examples of its own classes; one with no new example counts 0.
  Gradients flow into the embeddings of the posterior and of the query.

  Args:
    process: The Gaussian process.
    posterior: Of what is given.
    query: Held-out embeddings, [m, D].
    y: int32 [m].

  Returns:
    A scalar; 0 for a tree without nodes.

  Source: Achituve et al. 2021 (pFedGP), and its released code, whose objective
  this is unless asked for the marginal likelihood.
  """

  def term(node):
    rows, kappa = _members(posterior.tree, node, y)
    log_left, log_right = tf.unstack(
        _log_sides(process, posterior, node, tf.gather(query, rows))
    )
    log_likelihood = tf.where(kappa > 0, log_left, log_right)
    return -tf.math.divide_no_nan(
        tf.reduce_sum(log_likelihood), tf.cast(tf.size(rows), tf.float32)
    )

  return _over_nodes(posterior.tree, term, tf.constant(0.0))
