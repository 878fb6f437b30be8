"""Clients that are computed together take the same rounds as one by one."""

import dataclasses

import numpy as np
import pytest
import tensorflow_federated as tff
import tree

from tff_meta.execution import in_process


def _cohort(client):
  """Two pairs of clients that are alike, and two that are like nobody."""
  return [
      dataclasses.replace(client, counts=counts, salt=salt, first=5 * salt)
      for salt, counts in enumerate(
          (
              {0: 6, 1: 3},
              {2: 4},
              {1: 6, 2: 3},
              {0: 2, 1: 1, 2: 5},
              {0: 1, 1: 3, 2: 2},
              {0: 4},
          )
      )
  ]


def _outcome(subject, **options):
  """What two episodes change, the first one with some of the clients.

  Args:
    subject: The case.
    **options: Of the context.

  Returns:
    By how much the weights move, and what clients keep, as one float64 array.
  """
  cohort = _cohort(subject.cohort[0])
  num_rounds = subject.rounds_per_cohort
  context = in_process.InProcessContext(**options)
  with tff.framework.get_context_stack().install(context):
    start = subject.process.initialize()
    first = subject.run(cohort[2:5], state=start, num_rounds=num_rounds)[-1]
    last = subject.run(
        cohort,
        state=first.state,
        memories=first.memories,
        num_rounds=num_rounds,
    )[-1]
  moves = tree.map_structure(
      np.subtract, subject.weights(last.state), subject.weights(start)
  )
  kept = [last.memories[salt] for salt in sorted(last.memories)]
  return np.concatenate(
      [np.ravel(leaf).astype(float) for leaf in tree.flatten([moves, kept])]
  )


@pytest.mark.slow
def test_batches_take_the_same_rounds(thrifty_subject):
  if thrifty_subject.case.algorithm == 'fed_ala':
    # Its clients end a loop when their losses settle, each at another time.
    with pytest.raises(ValueError, match='alike.*--batched_clients=1'):
      _outcome(thrifty_subject, batched_clients=4)
    return
  expected = _outcome(thrifty_subject)
  actual = _outcome(thrifty_subject, batched_clients=4)

  size = np.abs(expected).sum()
  assert size > 0
  # Sums of float32 in another order. Where a gradient is zero but for that,
  # Adam makes whole steps of it, in a few weights.
  assert np.abs(actual - expected).sum() <= 1e-4 * size
