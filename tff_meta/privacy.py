"""The differential privacy of a run: its epsilon, for the sampler that is used.

A cohort has a fixed size, is drawn without replacement, independently of the
others, and stays for `rounds_per_cohort` rounds. In every round a Gaussian
mechanism releases the sum of what the clients send, with noise of standard
deviation `noise_multiplier` times its sensitivity: how far the sum moves where
one client is replaced by another. Neighbouring are two populations of as many
clients of which one client differs, with all of its data.

The rounds of a cohort that stays are one Gaussian mechanism whose noise
multiplier is smaller by the root of their number; only cohorts are sampled
anew. The bound is that of Rényi differential privacy: Wang, Balle and
Kasiviswanathan, "Subsampled Rényi Differential Privacy and Analytical Moments
Accountant", AISTATS 2019, https://arxiv.org/abs/1808.00087, Theorem 27, as
dp-accounting computes it. docs/design/privacy.md says what it does not cover.
"""

import dataclasses
import functools

_LARGEST_EPSILON = 100.0
_MOST_NOISE = 1e4
_PRECISION = 0.05  # Of the search for a noise multiplier.


@dataclasses.dataclass(frozen=True)
class Releases:
  """What the clients of a run send, as far as privacy depends on it.

  Attributes:
    num_clients: Clients of the population.
    clients_per_round: Clients of a cohort, at most `num_clients`.
    rounds: Rounds of the run, at least 1.
    rounds_per_cohort: Consecutive rounds of a cohort, at least 1.
  """

  num_clients: int
  clients_per_round: int
  rounds: int
  rounds_per_cohort: int = 1

  def epsilon(self, noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of all rounds together, at least 0.

    Args:
      noise_multiplier: Standard deviation of the noise over the sensitivity of
        a round's sum, above 0.
      delta: Between 0 and 1.
    """
    return _epsilon(self, noise_multiplier, delta)

  def noise_multiplier(self, epsilon: float, delta: float) -> float:
    """Returns a noise multiplier with at most that epsilon, to 5 percent.

    Args:
      epsilon: Above 0.
      delta: Between 0 and 1.

    Raises:
      ValueError: If 10,000 is too little.
    """
    high = 1.0
    while self.epsilon(high, delta) > epsilon:
      high *= 2
      if high > _MOST_NOISE:
        raise ValueError(
            f'Expected an `epsilon` that noise can reach, found {epsilon}.'
        )
    low = high / 2 if high > 1 else 0.0
    while high - low > _PRECISION * high:
      middle = (low + high) / 2
      if self.epsilon(middle, delta) > epsilon:
        low = middle
      else:
        high = middle
    return high

  def check(
      self, noise_multiplier: float, delta: float, target_epsilon: float | None
  ) -> None:
    """Checks that the privacy makes sense.

    Args:
      noise_multiplier: As for `epsilon`, at least 0.
      delta: Between 0 and 1.
      target_epsilon: The largest epsilon that is wanted, above 0 and at most
        100, beyond which there is no privacy to speak of; None for 100.

    Raises:
      ValueError: If it does not; the message has a tip.
    """
    if not noise_multiplier:
      raise ValueError(
          'Expected `noise_multiplier` above 0, found 0, with which nothing is'
          ' private. Tip: --aggregation=plain.'
      )
    if self.clients_per_round < 2:
      raise ValueError(
          'Expected at least 2 clients a round, among whom one can hide, found'
          f' {self.clients_per_round}.'
      )
    if delta > 1 / self.num_clients:
      raise ValueError(
          f'Expected `delta` of at most 1/{self.num_clients}, one over the'
          f' number of clients, found {delta}: a larger one allows that a whole'
          ' client is published. Tip: delta=1e-5.'
      )
    most = _LARGEST_EPSILON if target_epsilon is None else target_epsilon
    if not 0 < most <= _LARGEST_EPSILON:
      raise ValueError(
          'Expected `target_epsilon` above 0 and at most'
          f' {_LARGEST_EPSILON:g}, found {most:g}.'
      )
    found = self.epsilon(noise_multiplier, delta)
    if found > most:
      try:
        enough = f'{self.noise_multiplier(most, delta):.3g}'
        tip = f' Tip: noise_multiplier={enough} is enough'
      except ValueError:
        tip = ' Tip: no noise multiplier below 10,000 is enough'
      raise ValueError(
          f'Expected an epsilon of at most {most:g}, found {found:.4g} with'
          f' noise_multiplier={noise_multiplier:g}, delta={delta:g}, and'
          f' {self.clients_per_round} of {self.num_clients} clients in each of'
          f' {self.rounds} rounds.{tip}; more clients and fewer rounds help,'
          ' too.'
      )


@functools.lru_cache(maxsize=256)
def _epsilon(releases, noise_multiplier, delta):
  import dp_accounting  # Takes a second.
  from dp_accounting import rdp

  accountant = rdp.RdpAccountant(
      neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
  )
  length = releases.rounds_per_cohort
  whole, rest = divmod(releases.rounds, length)
  for num_cohorts, num_rounds in ((whole, length), (1, rest)):
    if num_cohorts and num_rounds:
      event = dp_accounting.SampledWithoutReplacementDpEvent(
          releases.num_clients,
          releases.clients_per_round,
          dp_accounting.GaussianDpEvent(noise_multiplier / num_rounds**0.5),
      )
      accountant.compose(event, num_cohorts)
  return accountant.get_epsilon(delta)
