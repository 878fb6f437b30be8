"""What private aggregation costs: accuracy against epsilon, and in all forms.

Nobody published these numbers. The first table is MNIST dealt to 1,000 clients
at several noise multipliers; docs/results/privacy_mnist.md has the epsilons.
The second is ten algorithms under every aggregation for a few rounds on
scikit-learn's digits, which shows that all of them run.
"""

from tff_meta import aggregation
from tff_meta import registry
from tff_meta.comparison import tables

_KNOWN, _CLIENTS, _GROUPS = 'Known clients', 'New clients', 'New groups'
NOISE_MULTIPLIERS = (1.0, 2.0, 4.0, 8.0)
NUM_CLIENTS, ROUNDS = 1000, 100
# What a client may add: little of the model, as there are 80,000 weights, each
# of which gets the noise.
_BOUNDS = {
    'FedAvg': 'clip=0.3',
    'MetaVers': 'clip=0.3,channel_bound=10',
    'FRL': 'clip=0.1,channel_bound=3',
}
COHORTS = {'FedAvg': 100, 'MetaVers': 100, 'FRL': 50}
_FLAGS = {
    'FedAvg': ('--algorithm=fed_avg',),
    'MetaVers': ('--algorithm=metavers', '--hparams=shots=10,queries=20'),
    'FRL': (
        '--algorithm=frl',
        '--hparams=inner_learning_rate=0.05,meta_learning_rate=0.05,'
        'deployment_learning_rate=0.05',
    ),
}


def _measures(protocol: str, who: str) -> tuple[tables.Measure, ...]:
  at = f'evaluation/{protocol}'
  return (
      tables.Measure(
          'Mean',
          f'{at}/accuracy_mean',
          f'{at}/accuracy_std',
          f'std over {who}',
      ),
      tables.Measure(
          'Untrained, mean', f'{at}/references/untrained/accuracy_mean'
      ),
  )


def row_name(method: str, noise_multiplier: float | None) -> str:
  """Returns the name of a row; without noise it is that of the method."""
  return f'{method} (z = {noise_multiplier:g})' if noise_multiplier else method


def _private_row(method: str, noise_multiplier: float | None) -> tables.Row:
  flags = (*_FLAGS[method], f'--clients_per_round={COHORTS[method]}')
  if noise_multiplier:
    options = f'noise_multiplier={noise_multiplier:g},{_BOUNDS[method]}'
    flags += ('--aggregation=dp', f'--aggregation_options={options}')
  return tables.Row(
      row_name(method, noise_multiplier),
      flags,
      settings=(_GROUPS if method == 'FRL' else _CLIENTS,),
  )


PRIVACY = tables.Table(
    name='privacy_mnist',
    title='Accuracy against epsilon on MNIST with 1,000 clients',
    source='ours',
    settings=(
        tables.Setting(
            _CLIENTS,
            _measures('new_clients', 'clients'),
            (
                '--partition=shards',
                '--num_new_clients=100',
                '--protocol=new_clients',
            ),
        ),
        tables.Setting(
            _GROUPS,
            _measures('new_groups', 'groups'),
            (
                '--partition=few_round',
                '--partition_options=examples_per_class=none',
                '--num_new_clients=0',
                '--protocol=new_groups',
            ),
        ),
    ),
    rows=tuple(
        _private_row(method, noise_multiplier)
        for method in _FLAGS
        for noise_multiplier in (None, *NOISE_MULTIPLIERS)
    ),
    scales={
        'smoke': tables.Scale(
            seeds=(0,),
            flags=('--rounds=4', '--eval_groups=10'),
            changes='4 rounds, 10 groups, seed 0 only.',
        ),
        'cpu': tables.Scale(seeds=(0, 1), hours=0.4),
    },
    flags=(
        '--dataset=mnist',
        f'--num_clients={NUM_CLIENTS}',
        f'--rounds={ROUNDS}',
        '--model=mlp',
        '--eval_every=0',
        '--eval_groups=20',
        '--references',
    ),
    notes=(
        'z is the noise multiplier; without it the aggregation is plain.',
        'The bounds of what a client may add were chosen on seed 0.',
    ),
)

METHODS = (
    'frl',
    'metavers',
    'cafeme',
    'fedec',
    'fedmeta_per',
    'fed_avg_ft',
    'fed_rep',
    'ditto',
    'scaffold',
    'fed_proto',
)


def _rows() -> tuple[tables.Row, ...]:
  return tuple(
      tables.Row(
          f'{method} ({name})',
          (f'--algorithm={method}', f'--aggregation={name}'),
          settings=(
              _KNOWN
              if 'known_client' in registry.get(method).uses
              else _GROUPS,
          ),
      )
      for method in METHODS
      for name in aggregation.OURS
  )


AGGREGATIONS = tables.Table(
    name='aggregations_digits',
    title='Ten algorithms under every aggregation on the embedded digits',
    source='ours',
    settings=(
        tables.Setting(
            _KNOWN,
            _measures('known_clients', 'clients')[:1],
            (
                '--dataset=digits',
                '--partition=shards',
                '--protocol=known_clients',
            ),
        ),
        tables.Setting(
            _GROUPS,
            _measures('new_groups', 'groups')[:1],
            (
                '--dataset=digit_pairs',
                '--partition=few_round',
                '--protocol=new_groups',
            ),
        ),
    ),
    rows=_rows(),
    scales={
        'smoke': tables.Scale(
            seeds=(0,), flags=('--rounds=4',), changes='4 rounds.'
        ),
        'cpu': tables.Scale(seeds=(0,), hours=0.3),
    },
    flags=('--preset=demo', '--rounds=8', '--eval_every=0'),
    notes=(
        'Eight rounds, at the options that aggregations have by default: this'
        ' shows that all of them run, not what they cost.',
    ),
)

TABLES = (PRIVACY, AGGREGATIONS)
