"""How often the intervals over clients hold the truth, among real clients.

  python -m benchmarks.interval_coverage

What two rows of a kept table give to its known clients, all seeds together, is
taken for what they give to all clients there are, so that it is known how far
they are from each other. Of these, clients are drawn again and again, the rows
are compared on them alone, as reports do (`tff_meta.comparison.pairs`), and the
intervals that hold what is known are counted: 95 % should.

Prints how many clients are drawn, and percent of the mean, the accuracy over
all images ("micro"), the worst decile (with the degrees of freedom of its
clients, and with those of all) and the Gini coefficient, from the lowest row to
the highest. It says nothing of other trainings: the models are those that were
kept.
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
    parts: Accuracies, float [n] -> float [n], whose mean is the number.
    of: Accuracies -> the number, of all clients there are; None for the mean.
    degrees: n -> degrees of freedom; None for n - 1.
    is_of_images: Whether clients count by their test examples.
  """

  parts: Callable[[np.ndarray], np.ndarray]
  of: Callable[[np.ndarray], float] | None = None
  degrees: Callable[[int], int] | None = None
  is_of_images: bool = False


_WORST = _Number(pairs.influences_on_worst_decile, client_metrics.worst_decile)
_NUMBERS = {
    'mean': _Number(lambda a: a),
    'over images': _Number(lambda a: a, is_of_images=True),
    'worst decile': _WORST._replace(
        degrees=lambda n: client_metrics.num_worst(n) - 1
    ),
    'the same, all count': _WORST,
    'Gini': _Number(pairs.influences_on_gini, client_metrics.gini),
}


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--draws', type=int, default=2000)
  draws = parser.parse_args(argv).draws
  rng = np.random.default_rng(0)
  for table, numbers_of_clients in _TABLES.items():
    reference, examples = _clients(table, _REFERENCE)
    others = [_clients(table, row)[0] for row in _ROWS]
    for num_clients in numbers_of_clients:
      print(f'{table}, {num_clients} of {len(reference)} clients')
      for name, number in _NUMBERS.items():
        weights = examples if number.is_of_images else np.ones_like(examples)
        shares = [
            _share_held(
                number, reference, other, weights, num_clients, draws, rng
            )
            for other in others
        ]
        print(f'  {name:20} {100 * min(shares):.1f} to {100 * max(shares):.1f}')


def _clients(table: str, row: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns accuracies and test examples of three seeds' known clients."""
  accuracies, examples = [], []
  for seed in range(3):
    run = _RESULTS / table / 'known_and_new_clients' / row / f'seed_{seed}/run'
    with (run / 'clients_known_clients.csv').open(newline='') as file:
      for client in csv.DictReader(file):
        accuracies.append(float(client['accuracy']))
        examples.append(float(client['num_examples']))
  return np.array(accuracies), np.array(examples)


def _share_held(
    number: _Number,
    reference: np.ndarray,
    other: np.ndarray,
    weights: np.ndarray,
    num_clients: int,
    draws: int,
    rng: np.random.Generator,
) -> float:
  """Returns the share of intervals that hold how far the rows are apart.

  Args:
    number: Of clients.
    reference: Accuracies of all clients, float [n].
    other: The same clients', by the other row.
    weights: What they count, float [n].
    num_clients: Drawn each time, with replacement.
    draws: How often.
    rng: Draws.
  """
  if number.of is None:
    truth = np.average(reference - other, weights=weights)
  else:
    truth = number.of(reference) - number.of(other)
  names = [str(i) for i in range(num_clients)]
  degrees = number.degrees(num_clients) if number.degrees else None
  held = 0
  for _ in range(draws):
    drawn = rng.integers(len(reference), size=num_clients)
    d = number.parts(reference[drawn]) - number.parts(other[drawn])
    share = weights[drawn] / weights[drawn].sum()
    mean = float(share @ d)
    spread = pairs.spread_of(names, share, d, mean, degrees)
    pair = pairs.Pair('', '', '', {0: mean}, 'clients', {0: spread}, {})
    half_width = pair.half_width_over_units
    held += half_width is not None and abs(mean - truth) <= half_width
  return held / draws


if __name__ == '__main__':
  main()
