"""How often the intervals over clients hold the truth, among real clients.

  python -m benchmarks.interval_coverage

What two rows of a kept table give to its known clients is taken for what they
give to all clients there are, so that it is known how far the rows are from
each other. From these, clients are drawn again and again, with replacement; the
rows are compared on them alone, as reports do (`tff_meta.comparison.pairs`),
and the intervals that hold what is known are counted: 95 % should.

Prints percent for the mean, the accuracy over all images ("micro"), the worst
decile (and its intervals if they had the degrees of freedom of all clients) and
the Gini coefficient, from the lowest of five rows to the highest:

* of one seed, with as many clients as the table has, and with three times as
  many: drawn of all clients of three seeds, who may be one person's in several;
* of three seeds, whose clients are partly the same persons, as in the table:
  persons are drawn, and each seed tests some of them. A person who is not in
  one of the seeds counts there as in another one.

It says nothing of other trainings: the models are those that were kept.
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
_TABLES = {'users_omniglot_drawers': 44, 'users_mnist_writers': 100}
_SEEDS = 3


class _Number(NamedTuple):
  """A number of clients.

  Attributes:
    parts: Accuracies, float [n] -> float [n], whose mean is the number.
    of: Accuracies -> the number, of all clients there are; None for the mean.
    is_of_images: Whether clients count by their test examples.
    is_of_worst: Whether it has the degrees of freedom of a worst decile.
  """

  parts: Callable[[np.ndarray], np.ndarray]
  of: Callable[[np.ndarray], float] | None = None
  is_of_images: bool = False
  is_of_worst: bool = False


_WORST = _Number(pairs.influences_on_worst_decile, client_metrics.worst_decile)
_NUMBERS = {
    'mean': _Number(lambda a: a),
    'over images': _Number(lambda a: a, is_of_images=True),
    'worst decile': _WORST._replace(is_of_worst=True),
    'the same, of all': _WORST,
    'Gini': _Number(pairs.influences_on_gini, client_metrics.gini),
}


class _Clients(NamedTuple):
  """All clients there are, of each seed.

  Attributes:
    reference: Accuracies of one row, float [clients, seeds].
    other: Those of another row.
    examples: Of a client's test, float [clients, seeds].
  """

  reference: np.ndarray
  other: np.ndarray
  examples: np.ndarray

  def of_one_seed(self) -> '_Clients':
    """Returns those of all seeds, as if they were of one."""
    return _Clients(*(values.reshape(-1, 1) for values in self))


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--draws', type=int, default=2000)
  draws = parser.parse_args(argv).draws
  for table, tested in _TABLES.items():
    rows = [_read(table, row) for row in _ROWS]
    one_seed = [clients.of_one_seed() for clients in rows]
    persons = len(rows[0].examples)
    for title, of_rows, drawn, of_seed in (
        (f'one seed of {tested} clients', one_seed, tested, tested),
        (f'one seed of {3 * tested} clients', one_seed, 3 * tested, 3 * tested),
        (f'three seeds of {tested} of {persons}', rows, persons, tested),
    ):
      print(f'{table}, {title}')
      for name, number in _NUMBERS.items():
        shares = [
            _share_held(number, clients, drawn, of_seed, draws)
            for clients in of_rows
        ]
        print(f'  {name:17} {100 * min(shares):.1f} to {100 * max(shares):.1f}')


def _read(table: str, row: str) -> _Clients:
  """Returns the known clients of three seeds, by a row and the reference."""
  found: dict[str, dict[int, tuple[float, ...]]] = {}
  for seed in range(_SEEDS):
    lines = []
    for of in (_REFERENCE, row):
      run = _RESULTS / table / 'known_and_new_clients' / of / f'seed_{seed}/run'
      with (run / 'clients_known_clients.csv').open(newline='') as file:
        lines.append({line['client_id']: line for line in csv.DictReader(file)})
    assert lines[0].keys() == lines[1].keys(), (table, row, seed)
    for name, line in lines[0].items():
      numbers = line['accuracy'], lines[1][name]['accuracy']
      found.setdefault(name, {})[seed] = tuple(
          map(float, (*numbers, line['num_examples']))
      )
  values = np.array(
      [
          [of.get(seed, next(iter(of.values()))) for seed in range(_SEEDS)]
          for of in found.values()
      ]
  )
  return _Clients(*np.moveaxis(values, 2, 0))


def _share_held(
    number: _Number, clients: _Clients, drawn: int, tested: int, draws: int
) -> float:
  """Returns the share of intervals that hold how far the rows are apart.

  Args:
    number: Of clients.
    clients: All there are.
    drawn: How many of them, with replacement.
    tested: How many of these each seed tests.
    draws: How often.
  """
  rng = np.random.default_rng(0)
  num_clients, num_seeds = clients.examples.shape
  weights = clients.examples if number.is_of_images else clients.examples**0
  of = number.of
  truths = [
      np.average(one - two, weights=w) if of is None else of(one) - of(two)
      for one, two, w in zip(
          clients.reference.T, clients.other.T, weights.T, strict=True
      )
  ]
  held = 0
  for _ in range(draws):
    persons = rng.integers(num_clients, size=drawn)
    values, spreads = {}, {}
    for seed in range(num_seeds):
      places = rng.permutation(drawn)[:tested]
      who = persons[places]
      d = number.parts(clients.reference[who, seed])
      d = d - number.parts(clients.other[who, seed])
      share = weights[who, seed] / weights[who, seed].sum()
      values[seed] = float(share @ d)
      spreads[seed] = pairs.spread_of(
          [str(i) for i in places], share, d, values[seed], number.is_of_worst
      )
    pair = pairs.Pair(
        '', '', '', values, 'clients', spreads, {}, is_same_by_name=True
    )
    half_width = pair.half_width_over_units
    missed_by = abs(pair.mean - np.mean(truths))
    held += half_width is not None and missed_by <= half_width
  return held / draws


if __name__ == '__main__':
  main()
