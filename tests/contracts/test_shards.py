"""Clients in shards take the same rounds as dealt over devices, to the bit."""

import numpy as np
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import traffic
from tff_meta.execution import computation_graph
from tff_meta.execution import in_process
from tff_meta.execution import round_parts
from tff_meta.training import checkpoints


def _rounds(subject, **options):
  """Two rounds in a context: states, metrics and what clients keep."""
  context = in_process.InProcessContext(**options)
  with tff.framework.get_context_stack().install(context):
    rounds = subject.run(subject.cohort, num_rounds=2)
  return [checkpoints.to_arrays(round_) for round_ in rounds]


def test_three_shards_are_three_loops(dealt_subject):
  expected = _rounds(dealt_subject, devices=['/CPU:0'] * 3)
  np.testing.assert_equal(_rounds(dealt_subject, num_shards=3), expected)


def test_what_crosses_to_clients_is_what_is_broadcast(dealt_subject):
  next_round = dealt_subject.process.next
  if isinstance(dealt_subject.process, composition.StatefulLearningProcess):
    next_round = dealt_subject.process.next_with_memory
  graph = computation_graph.ComputationGraph(next_round)
  crosses = round_parts.RoundParts(graph, 1).frontier_types
  num_bytes = sum(map(traffic.num_bytes, crosses))
  assert num_bytes <= traffic.of_process(dealt_subject.process).down + 64
