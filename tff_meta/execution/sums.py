"""Sums whose terms are always added in the same order.

TensorFlow's sum of n terms (`AddN`) begins with whichever input nobody else
uses any more at that moment, to reuse its memory. Of two terms that does not
matter; of three the rounding depends on which of two threads is faster. One
round of pFedHN, done ten times, had six results.
"""

import tensorflow as tf

_ADDITIONS = ('Add', 'AddV2', 'AddN')


def fix_order(graph_def) -> None:
  """Makes every sum add two terms at a time, in the order that it is written.

  `AddN` of more terms come from gradients of what is used more than twice.
  Others are made by TensorFlow's arithmetic optimizer (Grappler) of additions
  whose terms are additions, such as momentum * v + (g + decay * w). Without
  that optimizer some rounds take three times as long, so it is kept from that
  alone: between two additions comes a `Snapshot`, which it does not look
  through, and which copies only what somebody else uses, too.

  Args:
    graph_def: A `GraphDef`, changed in place, and its functions.
  """
  _fix_order(graph_def.node, '', '')
  for function in graph_def.library.function:
    _fix_order(function.node_def, ':sum:0', ':output:0')


def _fix_order(nodes, sum_output, passed_output):
  """Changes nodes; the outputs' names are what follows those of the nodes."""
  for node in [node for node in nodes if node.op == 'AddN']:
    _split(node, nodes, sum_output)
  additions = {
      node.name: node
      for node in nodes
      if node.op in _ADDITIONS and tf.DType(node.attr['T'].type).is_floating
  }
  for node in additions.values():
    for i, name in enumerate(node.input):
      if name.split(':')[0] in additions:
        between = nodes.add(
            name=f'{node.name}/term_{i}',
            op='Snapshot',
            device=node.device,
        )
        between.input.append(name)
        between.attr['T'].type = node.attr['T'].type
        node.input[i] = between.name + passed_output


def _split(node, nodes, output):
  """Makes an `AddN` the last one of a chain."""
  terms = [name for name in node.input if not name.startswith('^')]
  others = node.input[len(terms) :]
  if len(terms) <= 2:
    return
  node.attr['N'].i = 2
  total = terms[0]
  for i, term in enumerate(terms[1:-1]):
    partial = nodes.add()
    partial.CopyFrom(node)
    partial.name = f'{node.name}/partial_{i}'
    partial.input[:] = [total, term, *others]
    total = partial.name + output
  node.input[:] = [total, terms[-1], *others]
