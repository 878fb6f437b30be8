"""All algorithms on scikit-learn's handwritten digits: needs no data, no GPU.

New groups have pairs of them, because ten classes are too few to prepare on.
Nobody published these numbers: there is no paper scale. The clients are
`demo`'s: few, of few images of 8x8 pixels, with rates from which they learn in
200 rounds. It shows that everything runs, not which method is better.
"""

from tff_meta import registry
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
      _KNOWN: spec.known_client_personalizer,
      _GROUPS: spec.group_personalizer,
  }
  return tables.Row(
      spec.name,
      flags=(f'--algorithm={spec.name}',),
      settings=tuple(setting for setting, use in uses.items() if use),
  )


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
    rows=tuple(_row(spec) for spec in registry.ALGORITHMS.values()),
    scales={
        'smoke': tables.Scale(
            seeds=(0,),
            flags=('--rounds=4', '--eval_groups=10'),
            changes=(
                '4 rounds, one episode of FRL, so that some clients of Local'
                ' stay untrained; 10 groups; seed 0 only.'
            ),
        ),
        'cpu': tables.Scale(seeds=(0, 1, 2), hours=1.3),
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

TABLES = (TABLE,)
