"""Clients in shards take the same rounds as dealt over devices, to the bit."""

import numpy as np
import tensorflow_federated as tff

from tff_meta.execution import in_process
from tff_meta.training import checkpoints


def _rounds(subject, **options):
  """Two rounds in a context: states, metrics and what clients keep."""
  context = in_process.InProcessContext(**options)
  with tff.framework.get_context_stack().install(context):
    rounds = subject.run(subject.cohort, num_rounds=2)
  return [checkpoints.to_arrays(round_) for round_ in rounds]


def test_three_shards_are_three_loops(subject):
  expected = _rounds(subject, devices=['/CPU:0'] * 3)
  np.testing.assert_equal(_rounds(subject, num_shards=3), expected)
