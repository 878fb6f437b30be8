"""All algorithms on scikit-learn's handwritten digits: needs no data, no GPU.

New groups have pairs of them, because ten classes are too few to prepare on.
Nobody published these numbers: there is no paper scale. The clients are
`demo`'s: few, of few images of 8x8 pixels, with rates from which they learn in
200 rounds. It shows that everything runs, not which method is better.

The second table is the search for these rates, and for some numbers of steps
and sizes, on validation examples.
"""

import itertools

from tff_meta import registry
from tff_meta.comparison import searches
from tff_meta.comparison import tables

_KNOWN, _GROUPS = 'Known clients', 'New groups'


def _setting(
    name: str, dataset: str, protocol: str, partition: str, spread_name: str
) -> tables.Setting:
  at = f'evaluation/{protocol}'
  return tables.Setting(
      name,
      measures=(
          tables.Measure(
              'Mean',
              f'{at}/accuracy_mean',
              f'{at}/accuracy_std',
              spread_name,
          ),
          tables.Measure('Micro', f'{at}/accuracy_micro'),
          tables.Measure(
              'Untrained, mean', f'{at}/references/untrained/accuracy_mean'
          ),
      ),
      flags=(
          f'--dataset={dataset}',
          f'--partition={partition}',
          f'--protocol={protocol}',
      ),
  )


def _row(spec: registry.AlgorithmSpec) -> tables.Row:
  uses = {
      _KNOWN: 'known_client' in spec.uses,
      _GROUPS: 'group' in spec.uses,
  }
  return tables.Row(
      spec.name,
      flags=(f'--algorithm={spec.name}',),
      settings=tuple(setting for setting, use in uses.items() if use),
  )


def rows() -> tuple[tables.Row, ...]:
  """Returns one for every algorithm, those of plugins at the end."""
  return tuple(_row(spec) for spec in registry.ALGORITHMS.values())


TABLE = tables.Table(
    name='digits',
    title='Every algorithm on the embedded digits and pairs of them',
    source='ours',
    settings=(
        _setting(
            _KNOWN, 'digits', 'known_clients', 'shards', 'std over clients'
        ),
        _setting(
            _GROUPS, 'digit_pairs', 'new_groups', 'few_round', 'std over groups'
        ),
    ),
    rows=rows(),
    scales={
        'smoke': tables.Scale(
            seeds=(0,),
            flags=('--rounds=4', '--eval_groups=10'),
            changes=(
                '4 rounds, one episode of FRL, so that some clients of Local'
                ' stay untrained; 10 groups; seed 0 only.'
            ),
        ),
        'cpu': tables.Scale(seeds=(0, 1, 2), hours=0.4),
    },
    # For the column of untrained models.
    flags=('--preset=demo', '--rounds=200', '--references'),
    notes=(
        'Nobody published these numbers, so there is no paper scale.',
        'Clients, network and rates are those of the demonstration:'
        ' not tuned alike, so a few points between rows mean nothing.',
        'Untrained is the same method at round 0, adapted as the trained model'
        ' is.',
        'In a new group FedAvg starts from random weights, whatever was trained'
        ' before, so that it has no untrained model to compare with; FedAvg-FT'
        ' starts from the trained ones.',
    ),
)

_RATES = (0.01, 0.03, 0.1, 0.3)


def _grid(**values: tuple[float, ...]) -> list[dict[str, float]]:
  """Returns every combination of values, the first ones first."""
  return [
      dict(zip(values, chosen, strict=True))
      for chosen in itertools.product(*values.values())
  ]


# Algorithm -> what is tried in place of its `demo` preset. Others share that of
# one of these (fedec_wo that of fedec), or were not searched for. All that is
# searched is named, because the preset in the place of the rest has what was
# found.
_CANDIDATES = {
    'metavers': [
        {'shots': images, 'queries': images, 'learning_rate': rate}
        for images, rate in itertools.product((10, 5), (0.001, 0.003, 0.01))
    ],
    'cafeme': _grid(fine_tuning_steps=(5, 50)),
    'fedec': _grid(tau=(1, 3), inner_learning_rate=(0.01, 0.03, 0.1)),
    'fedmeta_per': _grid(
        inner_learning_rate=(0.03, 0.1, 0.3), outer_learning_rate=(0.1, 0.3)
    ),
    'local': _grid(learning_rate=_RATES),
    'fed_per': _grid(learning_rate=_RATES),
    'fed_rep': _grid(head_epochs=(2, 10), learning_rate=_RATES),
    'fed_babu': _grid(fine_tuning_learning_rate=(0.003, 0.01, 0.03, 0.1)),
    'lg_fed_avg': _grid(averaged_rounds=(0, 100)),
    'apfl': _grid(learning_rate=_RATES),
    'pfedme': _grid(
        learning_rate=(0.03, 0.1), personal_learning_rate=(0.03, 0.1)
    ),
    'l2gd': _grid(
        averaging_probability=(0.1, 0.5),
        penalty_weight=(0.5, 1.0),
        learning_rate=(0.03, 0.1),
    ),
    'ditto': [
        {'learning_rate': rate, 'personal_learning_rate': rate}
        for rate in _RATES
    ],
    'ifca': _grid(clusters=(2, 4)),
    'fed_proto': _grid(learning_rate=_RATES),
    'pfedhn': [
        *_grid(local_steps=(10,), learning_rate=(0.005, 0.02, 0.08)),
        *_grid(local_steps=(50,), learning_rate=(0.005, 0.02)),
    ],
    'per_fed_avg': [
        {
            'local_steps': steps,
            'inner_learning_rate': inner,
            'fine_tuning_learning_rate': inner,
            'outer_learning_rate': outer,
        }
        for steps, inner, outer in itertools.product(
            (5, 10), (0.03, 0.1, 0.3), (0.03, 0.1, 0.3)
        )
    ],
}


_ROUNDS = 200
_ON = searches.of_clients(_ROUNDS)
_SEARCH = 'Validation examples'
SEARCH = tables.Table(
    name='digits_search',
    title='The search for the rates, and some sizes, of the demonstration',
    source='ours',
    settings=(
        tables.Setting(
            _SEARCH,
            measures=(tables.Measure('Last ten rounds', _ON.path),),
            flags=(*TABLE.setting(_KNOWN).flags, *_ON.flags),
        ),
    ),
    rows=tuple(
        searches.candidate_row(
            tables.Row(algorithm, (f'--algorithm={algorithm}',)), hparams
        )
        for algorithm, candidates in _CANDIDATES.items()
        for hparams in candidates
    ),
    scales={
        'smoke': tables.Scale(
            seeds=(1,),
            flags=('--rounds=4', '--eval_from=0'),
            changes='4 rounds.',
        ),
        # Not the seed of the table's numbers.
        'cpu': tables.Scale(seeds=(1,), hours=0.5),
    },
    flags=('--preset=demo', f'--rounds={_ROUNDS}'),
    notes=(
        'Mean accuracy of known clients on a fifth of the training images of'
        ' the digits, which they do not train on here. The presets have the'
        ' best row of each algorithm, the first of several.',
        'Test images are not among them; what each run says of those at its'
        ' end is not read here.',
    ),
)

TABLES = (TABLE, SEARCH)
