"""How often the intervals over clients hold the truth, among real clients.

  python -m benchmarks.interval_coverage

What two rows of a kept table give to its known clients, all seeds together, is
taken for what they give to all clients there are, so that it is known how far
they are from each other. Of these, clients are drawn again and again, the rows
are compared on them alone, as reports do (`tff_meta.comparison.pairs`), and the
intervals that hold what is known are counted: 95 % should.

Prints how many clients are drawn, and percent of the mean, the worst decile
(with the degrees of freedom of its clients, and with those of all) and the Gini
coefficient, from the lowest row to the highest. It says nothing of other
trainings: the models are those that were kept.
"""

import argparse
from collections.abc import Callable, Sequence
import csv
import pathlib
from typing import NamedTuple

import numpy as np

from tff_meta.comparison import pairs
from tff_meta.evaluation import client_metrics

_RESULTS = pathlib.Path(__file__).parents[1] / 'results'
_REFERENCE = 'metavers'
_ROWS = ('ditto', 'fed_avg', 'cafeme', 'fed_pac', 'local')
_TABLES = {
    'users_omniglot_drawers': (44, 88, 132),
    'users_mnist_writers': (50, 100, 300),
}


class _Number(NamedTuple):
  """A number of clients.

  Attributes:
    of: Accuracies, float [n] -> the number.
    parts: Accuracies -> float [n], whose mean is the number.
    degrees: n -> degrees of freedom; None for n - 1.
  """

  of: Callable[[np.ndarray], float]
  parts: Callable[[np.ndarray], np.ndarray]
  degrees: Callable[[int], int] | None = None


_WORST = _Number(client_metrics.worst_decile, pairs.influences_on_worst_decile)
_NUMBERS = {
    'mean': _Number(lambda a: float(a.mean()), lambda a: a),
    'worst decile': _WORST._replace(
        degrees=lambda n: client_metrics.num_worst(n) - 1
    ),
    'the same, all count': _WORST,
    'Gini': _Number(client_metrics.gini, pairs.influences_on_gini),
}


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--draws', type=int, default=2000)
  draws = parser.parse_args(argv).draws
  rng = np.random.default_rng(0)
  for table, numbers_of_clients in _TABLES.items():
    reference = _accuracies(table, _REFERENCE)
    others = [_accuracies(table, row) for row in _ROWS]
    for num_clients in numbers_of_clients:
      print(f'{table}, {num_clients} of {len(reference)} clients')
      for name, number in _NUMBERS.items():
        shares = [
            _share_held(number, reference, other, num_clients, draws, rng)
            for other in others
        ]
        print(f'  {name:20} {100 * min(shares):.1f} to {100 * max(shares):.1f}')


def _accuracies(table: str, row: str) -> np.ndarray:
  """Returns those of all known clients of three seeds, float [n]."""
  found = []
  for seed in range(3):
    run = _RESULTS / table / 'known_and_new_clients' / row / f'seed_{seed}/run'
    with (run / 'clients_known_clients.csv').open(newline='') as file:
      found += [float(client['accuracy']) for client in csv.DictReader(file)]
  return np.array(found)


def _share_held(
    number: _Number,
    reference: np.ndarray,
    other: np.ndarray,
    num_clients: int,
    draws: int,
    rng: np.random.Generator,
) -> float:
  """Returns the share of intervals that hold how far the rows are apart.

  Args:
    number: Of clients.
    reference: Accuracies of all clients, float [n].
    other: The same clients', by the other row.
    num_clients: Drawn each time, with replacement.
    draws: How often.
    rng: Draws.
  """
  truth = number.of(reference) - number.of(other)
  names = [str(i) for i in range(num_clients)]
  weights = np.full(num_clients, 1 / num_clients)
  degrees = number.degrees(num_clients) if number.degrees else None
  held = 0
  for _ in range(draws):
    drawn = rng.integers(len(reference), size=num_clients)
    one, two = reference[drawn], other[drawn]
    found = number.of(one) - number.of(two)
    spread = pairs.spread_of(
        names, weights, number.parts(one) - number.parts(two), found, degrees
    )
    pair = pairs.Pair('', '', '', {0: found}, 'clients', {0: spread}, {})
    half_width = pair.half_width_over_units
    held += half_width is not None and abs(found - truth) <= half_width
  return held / draws


if __name__ == '__main__':
  main()
