"""Gaussian process classifiers in NumPy loops, float64, given their omegas.

Nothing is shared with the library but the jitter and the random omegas, whose
own tests are in learners/test_gp_classifier.py. A client's examples are lists
of (embedding, label).
"""

import itertools
import math

import numpy as np

from tff_meta.learners import gp_classifier


def covariance(process, a, b):
  """Of two embeddings, without jitter."""
  a, b = a / math.sqrt(sum(a * a)), b / math.sqrt(sum(b * b))
  distance = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
  return process.output_scale * math.exp(
      -distance / (2 * process.length_scale**2)
  )


def prior(process, embeddings):
  """The covariance of f at all embeddings, with jitter."""
  n = len(embeddings)
  matrix = np.zeros([n, n])
  for i, j in itertools.product(range(n), range(n)):
    matrix[i, j] = covariance(process, embeddings[i], embeddings[j])
    matrix[i, j] += gp_classifier.JITTER * (i == j)
  return matrix


def log_sigmoid(f):
  """The logarithm of `1 / (1 + exp(-f))`."""
  return -math.log1p(math.exp(-f))


def left_probability(process, embeddings, kappa, omegas, query):
  """Of one new example: the mean over the draws, omegas [S, n]."""
  matrix = prior(process, embeddings)
  cross = np.array([covariance(process, e, query) for e in embeddings])
  own = process.output_scale + gp_classifier.JITTER
  points, weights = np.polynomial.hermite.hermgauss(20)
  weights = weights / math.sqrt(math.pi)
  probabilities = []
  for omega in np.asarray(omegas, np.float64):
    inverse = np.linalg.inv(matrix + np.diag(1 / omega))
    mean = cross @ inverse @ (kappa / omega)
    deviation = math.sqrt(own - cross @ inverse @ cross)
    f = mean + math.sqrt(2) * deviation * points
    if process.likelihood == 'geometric':
      logs = [log_sigmoid(z) for z in f]
      probabilities.append(math.exp(weights @ logs))
    else:
      probabilities.append(weights @ [1 / (1 + math.exp(-z)) for z in f])
  return sum(probabilities) / len(probabilities)


def node_examples(node, pairs):
  """What a node, label -> 1 or -1, has of the pairs; and their kappa."""
  rows = [i for i, (_, label) in enumerate(pairs) if label in node]
  kappa = np.array([node[pairs[i][1]] / 2 for i in rows])
  return rows, [pairs[i][0] for i in rows], kappa


def class_probabilities(process, nodes, omegas, pairs, query):
  """Of one new embedding, label -> probability.

  Args:
    process: A `GaussianProcess`.
    nodes: Dictionaries label -> 1 or -1.
    omegas: Of every node, [S, n], n its examples.
    pairs: The client's.
    query: An embedding.
  """
  result = {label: 1.0 for _, label in pairs}
  for node, omega in zip(nodes, omegas, strict=True):
    _, embeddings, kappa = node_examples(node, pairs)
    left = left_probability(process, embeddings, kappa, omega, query)
    for label, side in node.items():
      result[label] *= left if side > 0 else 1 - left
  return result


def predictive_loss(process, nodes, omegas, pairs, held_out):
  """The mean of the negative logarithms of a node, summed over nodes."""
  total = 0.0
  for node, omega in zip(nodes, omegas, strict=True):
    _, embeddings, kappa = node_examples(node, pairs)
    losses = []
    for query, label in held_out:
      if label in node:
        left = left_probability(process, embeddings, kappa, omega, query)
        losses.append(-math.log(left if node[label] > 0 else 1 - left))
    total += sum(losses) / len(losses) if losses else 0.0
  return total


def bipartition(means):
  """The split of label -> mean with the least squares: label -> 1 or -1."""
  labels = sorted(means)
  best, least = None, math.inf
  for sides in itertools.product((1, -1), repeat=len(labels) - 1):
    node = dict(zip(labels, (1, *sides), strict=True))
    squares = 0.0
    for side in (1, -1):
      points = [means[c] for c in labels if node[c] == side]
      center = sum(points) / max(len(points), 1)
      squares += sum(np.sum((p - center) ** 2) for p in points)
    if -1 in sides and squares < least:
      best, least = node, squares
  return best


def tree(means):
  """The nodes over label -> mean, of at most three labels, the root first."""
  nodes = [means] if len(means) > 1 else []
  for i, part in enumerate(nodes):
    nodes[i] = node = bipartition(part)
    for side in (1, -1):
      members = {c: means[c] for c in node if node[c] == side}
      if len(members) > 1:
        nodes.append(members)
  return nodes
