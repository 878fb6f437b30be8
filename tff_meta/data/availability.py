"""Clients of a cohort that do not answer, or not in time, or not with all.

Devices drop out of rounds. What becomes of each client of a cohort is drawn
from the seed and the number of the round, so a continued run has the rounds of
an uninterrupted one. Who is slow stays so for as long as a cohort is kept: what
its clients split once has to be the same in all of these rounds.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

# The part of a client's data that a slow one trains on: every other example.
HALF_TRAIN = 'half_train'
_ROUNDING = 1e-9  # Of sums of shares.
_SEED = 17  # Of draws of this kind, beside those of cohorts.
_SEED_OF_SLOW = 18  # Of a cohort that stays for several rounds.


class Present(NamedTuple):
  """Who takes part in a round.

  Attributes:
    clients: Ids, each with the part of its data that it trains on: 'train', or
      'half_train' of a slow one.
    num_absent: How many others were never there.
    num_late: How many others were sent the model, and answer too late.
  """

  clients: Sequence[tuple[str, str]]
  num_absent: int = 0
  num_late: int = 0

  @property
  def num_slow(self) -> int:
    """How many of the clients train on half of their data."""
    return sum(part != 'train' for _, part in self.clients)


@dataclasses.dataclass(frozen=True)
class Availability:
  """How often clients are not there; each client of a round by itself.

  Attributes:
    absent: Probability that a client is not there, from 0 to below 1.
    late: That it is sent the model but answers when the round is over: nothing
      of it counts, and it keeps what it had kept before.
    slow: That it manages half of its examples (every other one).
  """

  absent: float = 0.0
  late: float = 0.0
  slow: float = 0.0

  def __post_init__(self):
    rates = dataclasses.asdict(self)
    for name, rate in rates.items():
      if not 0 <= rate <= 1:
        raise ValueError(
            f'Expected `{name}_clients` as a share between 0 and 1, found'
            f' {rate}.'
        )
    if self.absent + self.late > 1 - _ROUNDING:
      raise ValueError(
          'Expected `absent_clients` and `late_clients` to be less than 1'
          f' together, found {self.absent} and {self.late}: nobody would be'
          ' left.'
      )
    if sum(rates.values()) > 1 + _ROUNDING:
      raise ValueError(
          'Expected `absent_clients`, `late_clients` and `slow_clients` to be'
          f' at most 1 together, found {self.absent}, {self.late} and'
          f' {self.slow}.'
      )

  @property
  def is_full(self) -> bool:
    """Whether everybody is always there."""
    return not (self.absent or self.late or self.slow)

  def present(
      self,
      cohort: Sequence[str],
      seed: int,
      round_num: int,
      rounds_per_cohort: int = 1,
  ) -> Present:
    """Draws who takes part.

    Args:
      cohort: Ids of the round's clients, at least one.
      seed: Of the run, non-negative.
      round_num: From 1.
      rounds_per_cohort: For how many consecutive rounds a cohort stays. Who is
        slow is slow in all of them; who is missing is drawn every round.

    Returns:
      A pure function of the arguments. Where nobody would be left, the round
      waits for the client that was nearest to being there.
    """
    if self.is_full:
      return Present([(client, 'train') for client in cohort])
    rng = np.random.default_rng([seed, round_num, _SEED])
    draws = rng.random(len(cohort))
    missing = self.absent + self.late
    absent, gone = draws < self.absent, draws < missing
    if gone.all():
      last = np.argmax(draws)
      absent[last] = gone[last] = False
    slow = (draws >= missing) & (draws < missing + self.slow)
    if rounds_per_cohort > 1:
      cohort_num = (round_num - 1) // rounds_per_cohort
      rng = np.random.default_rng([seed, cohort_num, _SEED_OF_SLOW])
      # Of those who are there, so that as many of the cohort are slow.
      slow = rng.random(len(cohort)) < self.slow / (1 - missing)
    return Present(
        [
            (client, HALF_TRAIN if slow[i] else 'train')
            for i, client in enumerate(cohort)
            if not gone[i]
        ],
        int(absent.sum()),
        int((gone & ~absent).sum()),
    )


ALWAYS = Availability()
