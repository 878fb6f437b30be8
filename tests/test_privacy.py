import dp_accounting
from dp_accounting import rdp
import pytest

from tff_meta import privacy


def by_hand(releases, num_cohorts, noise_multiplier):
  """Epsilon at 1e-5, of cohorts that are one Gaussian mechanism each."""
  accountant = rdp.RdpAccountant(
      neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
  )
  event = dp_accounting.SampledWithoutReplacementDpEvent(
      releases.num_clients,
      releases.clients_per_round,
      dp_accounting.GaussianDpEvent(noise_multiplier),
  )
  accountant.compose(dp_accounting.SelfComposedDpEvent(event, num_cohorts))
  return accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(
    'releases, num_cohorts, of_a_cohort, expected',
    [
        (privacy.Releases(1000, 50, 200), 200, 1.0, 9.28),
        # Kept for four rounds: four releases, a noise multiplier of a half.
        (privacy.Releases(1000, 50, 200, 4), 50, 0.5, 22.20),
    ],
    ids=['a cohort a round', 'FRL, R = 3'],
)
def test_epsilon_is_of_the_sampler_that_is_used(
    releases, num_cohorts, of_a_cohort, expected
):
  found = releases.epsilon(1.0, 1e-5)
  assert found == pytest.approx(expected, abs=0.005)
  assert found == pytest.approx(by_hand(releases, num_cohorts, of_a_cohort))


def test_rounds_of_an_unfinished_cohort_count():
  whole, more, next_whole = (
      privacy.Releases(1000, 50, rounds, 4).epsilon(1.0, 1e-5)
      for rounds in (8, 9, 12)
  )
  assert whole < more < next_whole


@pytest.mark.ci
def test_a_noise_multiplier_for_an_epsilon():
  releases = privacy.Releases(100, 10, 3)
  needed = releases.noise_multiplier(5.0, 1e-3)
  assert 4.3 < releases.epsilon(needed, 1e-3) <= 5


@pytest.mark.parametrize(
    'releases, options, expected',
    [
        (privacy.Releases(1000, 50, 4), (0.0, 1e-5, None), 'above 0, found 0'),
        (privacy.Releases(10, 1, 4), (1.0, 1e-5, None), 'at least 2 clients'),
        (privacy.Releases(1000, 50, 4), (1.0, 0.01, None), 'at most 1/1000'),
        (
            privacy.Releases(1000, 50, 4),
            (1.0, 1e-5, 0.0),
            'above 0 .*, found 0',
        ),
        pytest.param(
            privacy.Releases(9, 5, 500),
            (0.5, 1e-5, None),
            'at most 100, found',
            marks=pytest.mark.ci,
        ),
        (privacy.Releases(9, 5, 500), (0.5, 1e-5, 1e9), 'at most 100, found'),
        (
            privacy.Releases(1000, 50, 9),
            (0.5, 1e-5, 2.0),
            r'at most 2, found .* Tip: noise_multiplier=1\.\d+ is enough',
        ),
    ],
)
def test_what_makes_no_sense_is_refused(releases, options, expected):
  with pytest.raises(ValueError, match=expected):
    releases.check(*options)
