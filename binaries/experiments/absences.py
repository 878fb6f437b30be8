"""What it costs that clients are missing or slow, under every aggregation.

On scikit-learn's handwritten digits with `demo`'s clients, so that it runs
anywhere. Nobody published these numbers.
"""

from binaries.experiments import digits
from tff_meta import aggregation
from tff_meta.comparison import tables

_METHODS = ('metavers', 'fedmeta_per', 'fed_avg_ft', 'scaffold')
_WHO = {
    'All there': (),
    '20 % absent and 20 % late': (
        '--absent_clients=0.2',
        '--late_clients=0.2',
    ),
    '40 % slow': ('--slow_clients=0.4',),
}
_KNOWN = digits.TABLE.setting('Known clients')

TABLE = tables.Table(
    name='absences_digits',
    title='Missing and slow clients under every aggregation, embedded digits',
    source='ours',
    settings=tuple(
        tables.Setting(name, _KNOWN.measures[:1], (*_KNOWN.flags, *flags))
        for name, flags in _WHO.items()
    ),
    rows=tuple(
        tables.Row(
            f'{method} ({name})',
            (f'--algorithm={method}', f'--aggregation={name}'),
        )
        for method in _METHODS
        for name in aggregation.OURS
    ),
    scales={
        'smoke': tables.Scale(
            seeds=(0,), flags=('--rounds=4',), changes='4 rounds.'
        ),
        'cpu': tables.Scale(seeds=(0,), hours=0.3),
    },
    flags=('--preset=demo', '--rounds=100', '--eval_every=0'),
    notes=(
        'Aggregations have the options that they have by default.',
        'A client that is absent is never sent the model; of one that is late'
        ' nothing counts; a slow one trains on every other example.',
    ),
)

TABLES = (TABLE,)
