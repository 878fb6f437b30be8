"""What it costs that clients are missing or slow, under every aggregation.

On scikit-learn's handwritten digits with `demo`'s clients, so that it runs
anywhere. Known clients are tested, of FRL new groups, which have pairs of
digits. Nobody published these numbers.
"""

from collections.abc import Sequence

from binaries.experiments import digits
from tff_meta import aggregation
from tff_meta.comparison import tables

_WHO = {
    'All there': (),
    '20 % absent and 20 % late': (
        '--absent_clients=0.2',
        '--late_clients=0.2',
    ),
    '40 % slow': ('--slow_clients=0.4',),
}


def _table(
    name: str,
    title: str,
    tested: str,
    methods: Sequence[str],
    rounds: int,
    hours: float,
    compressed: str = '',
) -> tables.Table:
  """Returns a table.

  Args:
    name: Of the table.
    title: Of the table.
    tested: Setting of the digits.
    methods: Algorithms that are for it.
    rounds: Of a run.
    hours: Of all of it, on two cores.
    compressed: A flag of rows with compression, beside those of all.
  """
  of_digits = digits.TABLE.setting(tested)
  more = (compressed,) if compressed else ()
  return tables.Table(
      name=name,
      title=title,
      source='ours',
      settings=tuple(
          tables.Setting(
              who, of_digits.measures[:1], (*of_digits.flags, *flags)
          )
          for who, flags in _WHO.items()
      ),
      rows=tuple(
          tables.Row(
              f'{method} ({aggregator})',
              (
                  f'--algorithm={method}',
                  f'--aggregation={aggregator}',
                  *(more if aggregator == 'compressed' else ()),
              ),
          )
          for method in methods
          for aggregator in aggregation.OURS
      ),
      scales={
          'smoke': tables.Scale(
              seeds=(0,), flags=('--rounds=4',), changes='4 rounds.'
          ),
          'cpu': tables.Scale(seeds=(0,), hours=hours),
      },
      flags=('--preset=demo', f'--rounds={rounds}', '--eval_every=0'),
      notes=(
          'Aggregations have the options that they have by default'
          f'{f", compression {compressed}" if compressed else ""}.',
          'A client that is absent is never sent the model; of one that is late'
          ' nothing counts; a slow one trains on every other example.',
      ),
  )


TABLES = (
    _table(
        'absences_digits',
        'Missing and slow clients under every aggregation, embedded digits',
        'Known clients',
        (
            'metavers',
            'fedmeta_per',
            'fed_avg_ft',
            'scaffold',
            'cafeme',
            'fedec',
        ),
        rounds=100,
        hours=0.5,
    ),
    _table(
        'absences_digit_pairs',
        'FRL with missing and slow clients under every aggregation, pairs of'
        ' the embedded digits',
        'New groups',
        ('frl',),
        rounds=200,
        hours=0.2,
        # No tensor has 20,000 numbers, as it takes by default.
        compressed='--aggregation_options=min_elements=1000',
    ),
)
