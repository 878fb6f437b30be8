"""Sums whose terms are always added in the same order.

TensorFlow's sum of n terms (`AddN`) begins with whichever input nobody else
uses any more at that moment, to reuse its memory. Of two terms that does not
matter, of three the rounding depends on which of two threads is faster: in one
round of pFedHN, repeated ten times, in six of ten results.
"""

import tensorflow as tf


def keep_sums_apart() -> None:
  """Keeps TensorFlow from making one `AddN` of several additions.

  Its arithmetic optimizer does so with `momentum * v + (g + decay * w)`, for
  instance. For this process, from now on.
  """
  tf.config.optimizer.set_experimental_options(
      {'arithmetic_optimization': False}
  )


def add_in_pairs(graph_def) -> None:
  """Makes every `AddN` add two terms at a time, from the first on.

  Those of more terms come from gradients of what is used more than twice.

  Args:
    graph_def: A `GraphDef`, changed in place, and its functions.
  """
  functions = (f.node_def for f in graph_def.library.function)
  for nodes, output in (
      (graph_def.node, ''),
      *((nodes, ':sum:0') for nodes in functions),
  ):
    for node in list(nodes):
      if node.op != 'AddN' or node.attr['N'].i <= 2:
        continue
      terms = [name for name in node.input if not name.startswith('^')]
      others = node.input[len(terms) :]
      node.attr['N'].i = 2
      total = terms[0]
      for i, term in enumerate(terms[1:-1]):
        partial = nodes.add()
        partial.CopyFrom(node)
        partial.name = f'{node.name}/partial_{i}'
        partial.input[:] = [total, term, *others]
        total = partial.name + output
      node.input[:] = [total, terms[-1], *others]
