"""Sums of three and more terms, whose order must not be a race."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.execution import sums

# In this order the float32 sum is 1; in others 0 or 2.
_TERMS = (1e8, -1e8, 1.0, 1e-9)


def _add_n(terms):
  return tf.add_n(terms) * 1.0


@tf.function(autograph=False)
def _in_a_function(*terms):
  with tf.control_dependencies([tf.no_op('before')]):
    return _add_n(terms)


@pytest.mark.parametrize('add', [_add_n, _in_a_function])
@pytest.mark.parametrize('num_terms', [2, 3, 4])
def test_terms_are_added_in_pairs_from_the_first_on(add, num_terms):
  with tf.Graph().as_default() as graph:
    feeds = [tf.compat.v1.placeholder(tf.float32, []) for _ in range(num_terms)]
    total = add(feeds) if add is _add_n else add(*feeds)
    graph_def = graph.as_graph_def()

  sums.add_in_pairs(graph_def)

  nodes = [*graph_def.node]
  for function in graph_def.library.function:
    nodes.extend(function.node_def)
  added = [node for node in nodes if node.op == 'AddN']
  assert [node.attr['N'].i for node in added] == [2] * (num_terms - 1)
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    (again,) = tf.graph_util.import_graph_def(
        graph_def, return_elements=[total.name]
    )
    values = dict(
        zip([f'import/{f.name}' for f in feeds], _TERMS, strict=False)
    )
    found = session.run(again, values)
  expected = np.float32(_TERMS[0])
  for term in _TERMS[1:num_terms]:
    expected += np.float32(term)
  assert found == expected


def test_tensorflow_s_additions_stay_apart():
  """The suite's execution context turns that rewriting off."""
  options = tf.config.optimizer.get_experimental_options()
  assert options['arithmetic_optimization'] is False
