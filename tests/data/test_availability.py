"""Clients that are not there are drawn at their rates, alike every time."""

import numpy as np
import pytest

from tff_meta.data import availability


def test_clients_are_missing_at_their_rates_and_alike_every_time():
  rates = availability.Availability(absent=0.2, late=0.1, slow=0.3)
  cohort = [f'client_{i}' for i in range(10_000)]
  present = rates.present(cohort, 3, 7)
  assert present == rates.present(cohort, 3, 7)
  assert present != rates.present(cohort, 3, 8)
  assert present != rates.present(cohort, 4, 7)
  kinds = [present.num_absent, present.num_late, present.num_slow]
  np.testing.assert_allclose(kinds, [2000, 1000, 3000], rtol=0.08)
  left = [client for client, _ in present.clients]
  assert len(left) + present.num_absent + present.num_late == len(cohort)
  assert [client for client in cohort if client in set(left)] == left


def test_who_is_slow_stays_so_while_a_cohort_is_kept():
  """So a client splits the same examples in all rounds of an episode."""
  rates = availability.Availability(absent=0.2, late=0.1, slow=0.3)
  cohort = [f'client_{i}' for i in range(10_000)]

  def slow(round_num):
    parts = dict(rates.present(cohort, 3, round_num, 4).clients)
    return parts.keys(), {c for c, part in parts.items() if part != 'train'}

  episodes = [[slow(4 * i + r) for r in range(1, 5)] for i in range(2)]
  for rounds in episodes:
    for present, found in rounds:
      assert abs(len(found) - 3000) < 200
      for others, slow_ones in rounds:
        assert found & others == slow_ones & present
    # But not who is missing.
    assert len({frozenset(present) for present, _ in rounds}) == 4
  assert episodes[0][0][1] != episodes[1][0][1]


def test_somebody_is_left():
  rates = availability.Availability(absent=0.6, late=0.39)
  for round_num in range(1, 50):
    present = rates.present(['a', 'b'], 0, round_num)
    assert len(present.clients) + present.num_absent + present.num_late == 2
    assert present.clients and not present.num_slow


@pytest.mark.parametrize(
    'rates, expected',
    [
        (dict(absent=-0.1), '`absent_clients` .* found -0.1'),
        (dict(slow=float('nan')), '`slow_clients` .* found nan'),
        (dict(absent=0.5, late=0.5), 'nobody would be left'),
        (dict(late=0.5, slow=0.6), 'at most 1 together'),
    ],
)
def test_rates_that_make_no_sense(rates, expected):
  with pytest.raises(ValueError, match=expected):
    availability.Availability(**rates)


def test_shares_that_make_up_all_are_no_more_than_1():
  """Their sum is 1.0000000000000002."""
  assert availability.Availability(absent=0.33, late=0.56, slow=0.11).slow
