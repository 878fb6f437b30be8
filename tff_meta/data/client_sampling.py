"""Which clients take part in a round."""

from collections.abc import Sequence

import numpy as np

from tff_meta import config_checks


def sample_cohort(
    client_ids: Sequence[str],
    cohort_size: int,
    seed: int,
    cohort_index: int,
    secret: int | None = None,
) -> list[str]:
  """Draws a cohort uniformly without replacement.

  A pure function of its arguments, so that a continued run draws what the
  uninterrupted run would have drawn, whatever it did before. The generator is
  seeded with [seed, cohort_index]; groups and client splits seed theirs alike
  for other uses, so draws of different kinds are not independent of each other.

  Args:
    client_ids: Whom to draw from.
    cohort_size: How many to draw.
    seed: Seed of the run, non-negative.
    cohort_index: Number of the cohort, non-negative; an algorithm that keeps
      its cohort for several rounds counts cohorts, not rounds.
    secret: What only the run knows, non-negative, where nobody else may know
      who takes part: clients know the seed. None where that is no matter.

  Returns:
    The cohort, in random order.

  Raises:
    ValueError: If there are fewer clients than `cohort_size`.
  """
  if not 1 <= cohort_size <= len(client_ids):
    raise ValueError(
        'Expected `cohort_size` to be between 1 and the number of clients,'
        f' {len(client_ids)}, found {cohort_size}.'
    )
  config_checks.check_seed(seed)
  known = [seed, cohort_index]
  rng = np.random.default_rng(known if secret is None else [secret, *known])
  chosen = rng.choice(len(client_ids), cohort_size, replace=False)
  return [client_ids[i] for i in chosen]
