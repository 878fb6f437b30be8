"""Sums of three and more terms, whose order must not be a race."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.execution import sums

# In this order the float32 sums are 1 and -1; in others 0, for instance.
_TERMS = (1e8, -1e8, 1.0, -2.0)


def _sum_of_gradients(terms):
  return tf.add_n(terms)


def _steps_direction(terms):
  """Momentum * v + (g + decay * w), and one more."""
  total = terms[0]
  for term in terms[1:]:
    total = total + term
  return total


def _in_a_function(terms):
  @tf.function(autograph=False)
  def add(*terms):
    with tf.control_dependencies([tf.no_op('before')]):
      return tf.add_n(terms)

  return add(*terms)


def _graph_of(add, num_terms):
  """Returns a graph def, and the names of its inputs."""
  with tf.Graph().as_default() as graph:
    inputs = [tf.compat.v1.placeholder(tf.float32, [1]) for _ in _TERMS]
    # TensorFlow trusts the shape of no input.
    terms = [tf.reshape(x, [1, 1]) for x in inputs[:num_terms]]
    tf.exp(add(terms), name='result')
    return graph.as_graph_def(), [x.name for x in inputs]


def _run(graph_def, inputs):
  """Returns the result and the most terms of an `AddN` among what was run."""
  metadata = tf.compat.v1.RunMetadata()
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    tf.graph_util.import_graph_def(graph_def, name='')
    result = session.run(
        'result:0',
        {name: [term] for name, term in zip(inputs, _TERMS, strict=True)},
        tf.compat.v1.RunOptions(output_partition_graphs=True),
        metadata,
    )
  nodes = [node for part in metadata.partition_graphs for node in part.node]
  num_terms = [node.attr['N'].i for node in nodes if node.op == 'AddN']
  return result, max(num_terms, default=0)


@pytest.mark.parametrize(
    'add', [_sum_of_gradients, _steps_direction, _in_a_function]
)
@pytest.mark.parametrize('num_terms', [3, 4])
def test_no_operation_adds_more_than_two_terms(add, num_terms):
  """Not even when TensorFlow has optimized the graph, as it does without."""
  graph_def, inputs = _graph_of(add, num_terms)
  assert _run(graph_def, inputs)[1] == num_terms

  sums.fix_order(graph_def)

  found, most_terms = _run(graph_def, inputs)
  assert most_terms <= 2
  expected = np.float32(0)
  for term in _TERMS[:num_terms]:
    expected += np.float32(term)
  np.testing.assert_allclose(found, [[np.exp(expected)]], rtol=1e-6)
