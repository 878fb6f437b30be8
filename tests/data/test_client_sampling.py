"""Cohorts: purity, uniformity, errors."""

import numpy as np
import pytest

from tff_meta.data import client_sampling

IDS = tuple(f'client_{i}' for i in range(7))


def test_a_cohort_depends_on_seed_and_index_only():
  first = client_sampling.sample_cohort(IDS, 3, seed=2, cohort_index=4)
  client_sampling.sample_cohort(IDS, 5, seed=9, cohort_index=0)
  again = client_sampling.sample_cohort(IDS, 3, seed=2, cohort_index=4)
  assert first == again
  cohorts = {
      tuple(client_sampling.sample_cohort(IDS, 3, seed, index))
      for seed in range(3)
      for index in range(3)
  }
  assert len(cohorts) > 6


def test_cohorts_are_uniform_without_replacement():
  counts = dict.fromkeys(IDS, 0)
  for index in range(2000):
    cohort = client_sampling.sample_cohort(IDS, 3, 1, index)
    assert len(set(cohort)) == 3
    for client_id in cohort:
      counts[client_id] += 1
  # Binomial(2000, 3 / 7): standard deviation 22; five of them.
  np.testing.assert_allclose(list(counts.values()), 2000 * 3 / 7, atol=110)


@pytest.mark.parametrize('cohort_size', [0, 8])
def test_impossible_cohorts_are_refused(cohort_size):
  with pytest.raises(ValueError, match=f'of clients, 7, found {cohort_size}'):
    client_sampling.sample_cohort(IDS, cohort_size, 0, 0)
