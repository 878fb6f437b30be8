"""Table 2 of FedEC (Lan et al., 2023): 100 rounds, a tenth of the clients each.

The number is the mean accuracy of all clients after each of the last ten
rounds.

Left open by the paper, which has no code: rates, epochs, batches and optimizer
of all rows, the weights of both constraints, the widths of the networks, which
model is tested, and the seeds. Ours are those of FedRep's code, whose clients
and networks the paper has, and otherwise what `_METHODS` and `_hparams` say.
Nothing in these tables was tuned. The last two are grids of ours, measured
on validation examples: a short one over the kind of the constraint and whom it
holds, and one of full length over what decides how much it matters.
"""

from collections.abc import Sequence
import dataclasses

from binaries import flag_files
from tff_meta.comparison import tables

_TEN, _LAST = 'Last ten rounds', 'Last round'
_MEASURES = (
    tables.Measure(_TEN, 'last_ten_evaluations_mean/known_clients/accuracy'),
    tables.Measure(_LAST, 'evaluation/known_clients/accuracy_mean'),
)
_MAIN = 'CIFAR-10 (100 x 2)'
# Name -> the flag file of its clients, its clients, and their average number of
# training examples: of FEMNIST nine tenths of the 190 images that clients draw
# here, where the paper has 207.
_SETTINGS = {
    _MAIN: ('fedec_cifar10_100_2', 100, 500),
    'CIFAR-10 (100 x 5)': ('fedec_cifar10_100_5', 100, 500),
    'CIFAR-10 (1000 x 2)': ('fedec_cifar10_1000_2', 1000, 50),
    'CIFAR-100 (100 x 5)': ('fedec_cifar100_100_5', 100, 500),
    'CIFAR-100 (100 x 20)': ('fedec_cifar100_100_20', 100, 500),
    'FEMNIST (150 x 3)': ('fedec_femnist_150_3', 150, 171),
}
_OTHERS = tuple(name for name in _SETTINGS if name != _MAIN)


def _setting(name: str) -> tables.Setting:
  flag_file, _, _ = _SETTINGS[name]
  return tables.Setting(
      name, measures=_MEASURES, flags=(flag_files.preset(flag_file),)
  )


# After the flags of a setting, which are those of FedEC there, and before those
# of `_hparams`. Rates, momentum, weight decay and batches are those of FedRep's
# code but where another is named. Of the epochs of others we know nothing: they
# have as many as FedRep has for head and body.
_METHODS = {
    'FedEC': ('--algorithm=fedec',),
    'FedEC-wo': ('--algorithm=fedec_wo',),
    'FedEC-l2': ('--algorithm=fedec_l2',),  # Of weight 1, as FedEC.
    # Not a row of the paper: the two cases of its Algorithm 1 as printed, which
    # its text and its eq. 6 contradict. That a client is then held to the model
    # that it receives, as it has none of its own, is ours. Added after the grid
    # below, where no weight of the constraint of eq. 6 gained anything.
    'FedEC (Algorithm 1)': (
        '--algorithm=fedec',
        '--hparams=eval_model=stored,constrain=first',
    ),
    # As many epochs of everybody as the scripts of FedRep's code give with
    # --epochs, which are the rounds of all else. In ten rounds, so that a run
    # of hours can be continued: momentum begins anew in each.
    'Local Only': (
        '--algorithm=local',
        '--hparams=epochs=10',
        '--rounds=10',
        '--eval_from=10',
        '--checkpoint_every=1',
    ),
    'FedAvg': (
        '--algorithm=fed_avg',
        '--preset=release',
        '--hparams=weight_decay=1e-4',
    ),
    'FedPer': ('--algorithm=fed_per',),
    # Without averaged rounds before, of which the paper has nothing.
    'LG-FedAvg': ('--algorithm=lg_fed_avg',),
    # A constant share of 0.75 of the own model, as in FedRep's code.
    'APFL': ('--algorithm=apfl',),
    # That code has all clients in 100 tosses of the coin, in which everybody
    # trains ten times. Here ten take part in each of 100 rounds, which is as
    # often.
    'L2GD': ('--algorithm=l2gd', '--preset=release'),
    # Without that code's momentum and clipping of gradients.
    'SCAFFOLD': ('--algorithm=scaffold', '--preset=release'),
    # Heads are tested as they are after every round. The code trains them ten
    # epochs more in an extra round, which its mean of ten leaves out, too.
    'FedRep': ('--algorithm=fed_rep', '--preset=release'),
    # Everybody adapts, which takes far longer than a round: no test before the
    # last ten rounds. Without that code's momentum and weight decay; a step
    # there is one batch, split 8 : 2, and nobody adapts but in an extra round.
    'Per-FedAvg': ('--algorithm=per_fed_avg', '--eval_from=91'),
    # Of pFedMe's code.
    'pFedMe': ('--algorithm=pfedme', '--hparams=', '--eval_from=91'),
}
_BATCH = 10


def _hparams(method: str, setting: str) -> tuple[str, ...]:
  """Returns flags of a method that differ from setting to setting."""
  _, num_clients, num_examples = _SETTINGS[setting]
  # FedRep's code has one epoch on the body in the first column, five elsewhere.
  body_epochs = 1 if setting == _MAIN else 5
  # An epoch at the test, and in training, where a step takes three batches.
  steps = round(num_examples / _BATCH)
  local_steps = round(num_examples / (3 * _BATCH))
  # As many epochs as FedRep has, ten of them on the head.
  epochs = 10 + body_epochs
  # alpha / (n (1 - p)) with alpha = 1 and p = 0.9.
  l2gd_rate = 10 / num_clients
  return {
      'Local Only': (f'--clients_per_round={num_clients}',),
      'FedPer': (
          (
              f'--hparams=momentum=0.5,weight_decay=1e-4,batch_size={_BATCH}'
              f',epochs={epochs}'
          ),
      ),
      # FedRep's code averages the last two of five layers.
      'LG-FedAvg': (
          (
              '--hparams=learning_rate=0.01,weight_decay=1e-4,uniform=false'
              f',batch_size={_BATCH},epochs={epochs},shared_layers=2'
          ),
      ),
      'APFL': (f'--hparams=epochs={epochs}',),
      'L2GD': (f'--hparams=learning_rate={l2gd_rate:.4g},epochs={epochs}',),
      'SCAFFOLD': (f'--hparams=epochs={epochs}',),
      'FedRep': (f'--hparams=known_client_epochs=0,body_epochs={body_epochs}',),
      'Per-FedAvg': (
          (
              f'--hparams=variant=second_order,local_steps={local_steps}'
              f',batch_size={_BATCH},inner_learning_rate=1e-5'
              f',outer_learning_rate=0.01,fine_tuning_steps={steps}'
              ',fine_tuning_learning_rate=0.01'
          ),
      ),
  }.get(method, ())


_PUBLISHED = {
    'FedEC': (92.35, 83.78, 92.11, 81.75, 59.1, 77.3),
    'FedEC-wo': (91.03, 82.26, 90.87, 80.29, 58.07, 53.27),
    'FedEC-l2': (87.38, 71.15, 87.13, 74.90, 43.09, 72.03),
    'Local Only': (89.79, 70.68, 78.30, 75.29, 41.29, 40.12),
    'FedAvg': (42.65, 51.78, 44.31, 23.94, 31.97, 31.26),
    'FedPer': (87.13, 73.84, 81.73, 76.00, 55.68, 59.07),
    'FedRep': (87.70, 75.68, 83.27, 79.15, 56.10, 59.21),
    'Per-FedAvg': (82.27, 67.2, 67.36, 72.05, 52.49, 71.51),
    'SCAFFOLD': (37.72, 47.33, 33.79, 20.32, 22.52, 17.65),
    'pFedMe': (60.23, 70.01, 62.33, 23.64, 34.66, 47.66),
    'LG-FedAvg': (84.14, 63.02, 77.48, 72.44, 38.76, 41.38),
    'L2GD': (81.04, 59.98, 71.96, 72.13, 42.84, 46.56),
    'APFL': (83.77, 72.29, 82.39, 78.20, 55.44, 52.46),
}


def _row(name: str, settings: tuple[str, ...]) -> tables.Row:
  numbers = {}
  if name in _PUBLISHED:
    numbers = dict(zip(_SETTINGS, _PUBLISHED[name], strict=True))
  return tables.Row(
      name,
      flags=_METHODS[name],
      published={
          setting: {_TEN: tables.Published(numbers[setting])}
          for setting in settings
          if numbers
      },
      setting_flags={s: _hparams(name, s) for s in settings},
  )


_SEEDS = (0, 1, 2)
_CROPS = (
    'Training images of CIFAR are cropped and flipped at random, as in the code'
    ' that the paper follows; the paper does not say. Clients that adapt before'
    ' a test do so on images as they are.'
)
_SMOKE = tables.Scale(
    seeds=(0,),
    flags=('--rounds=2', '--clients_per_round=5', '--eval_from=0'),
    changes=(
        '2 rounds of 5 clients, also of Local, whose other clients stay'
        ' untrained, so the last ten rounds are these two; seed 0 only.'
        f' {_CROPS}'
    ),
)


def _table(name, title, settings, cpu, paper_hours=None):
  return tables.Table(
      name=name,
      title=title,
      source='Lan et al., 2023, Table 2',
      settings=tuple(_setting(setting) for setting in settings),
      rows=tuple(_row(method, settings) for method in _METHODS),
      scales={
          'smoke': _SMOKE,
          'cpu': cpu,
          'paper': tables.Scale(
              seeds=_SEEDS, changes=_CROPS, hours=paper_hours
          ),
      },
      notes=(
          'Mean accuracy of all clients after every round, over the last ten'
          ' rounds; of Local after its last one.',
          'The paper says nothing of rates, epochs, batches, optimizers, the'
          ' weight of the constraint and seeds: no row can be repeated exactly.'
          " Ours are those of FedRep's code where it has any.",
          'The claim under test is FedEC > FedEC-wo. FedEC (Algorithm 1) is'
          ' ours: clients are held in their first round only, as that algorithm'
          ' has it, to the model that they receive; the text of the paper holds'
          ' them after it, to the one that they trained last.',
      ),
  )


# Of one seed, half of what one core takes: medians of rounds and tests without
# augmentation, ten times that of ten epochs for Local, and for LG-FedAvg, APFL,
# L2GD, pFedMe and SCAFFOLD, which have not run, 4.2 hours by their steps.
_HOURS = 6.3
CIFAR10_100_2 = _table(
    'fedec_cifar10_100_2',
    'FedEC on CIFAR-10: 100 clients of 2 classes',
    (_MAIN,),
    cpu=tables.Scale(
        seeds=(0,), changes=f'Seed 0 only. {_CROPS}', hours=_HOURS
    ),
    paper_hours=3 * _HOURS,
)
# What its first runs were of, which are kept until all have been run anew.
_EARLIER_LOCAL = (
    '--algorithm=local',
    '--hparams=epochs=10',
    '--rounds=1',
    '--eval_every=1',
)
_NOT_RUN_EARLIER = 'LG-FedAvg', 'APFL', 'L2GD', 'SCAFFOLD', 'pFedMe'
CIFAR10_100_2_EARLIER = dataclasses.replace(
    CIFAR10_100_2,
    name='fedec_cifar10_100_2_earlier',
    title=f'{CIFAR10_100_2.title}, as this library had it first',
    settings=tuple(
        dataclasses.replace(setting, flags=(*setting.flags, '--augmentation='))
        for setting in CIFAR10_100_2.settings
    ),
    rows=tuple(
        dataclasses.replace(row, flags=_EARLIER_LOCAL)
        if row.name == 'Local Only'
        else row
        for row in CIFAR10_100_2.rows
        if row.name not in _NOT_RUN_EARLIER
    ),
    scales={
        name: dataclasses.replace(
            scale,
            changes=scale.changes.replace(
                _CROPS,
                'Images are not augmented; whether the paper does is not said'
                ' (the code that it follows crops and flips those of CIFAR).',
            ),
            hours=None,
        )
        for name, scale in CIFAR10_100_2.scales.items()
    },
)

OTHERS = _table(
    'fedec_table2_others',
    'FedEC with other clients (clients x classes of each)',
    _OTHERS,
    cpu=tables.Scale(
        seeds=(0,),
        changes=(
            'FedEC, FedEC-wo and Local Only, and clients of CIFAR-10, alone;'
            f' seed 0 only. {_CROPS}'
        ),
        rows=('FedEC', 'FedEC-wo', 'Local Only'),
        settings=('CIFAR-10 (100 x 5)', 'CIFAR-10 (1000 x 2)'),
    ),
)

_GRID_DATA = (
    'A fifth of the training images is held back as validation examples.'
    f' {_CROPS}'
)
_TAUS = (1, 5)
# What the constraint is -> the program's algorithm, and weights to try: those
# of squared distances between weights have to be smaller.
_CONSTRAINTS = {
    'KL': ('fedec', (0.1, 0.5, 1, 2)),
    'L2': ('fedec_l2', (0.001, 0.01, 0.1, 1)),
}


def _grid_row(
    name: str, algorithm: str, hparams: str = '', taus: Sequence[int] = _TAUS
) -> tables.Row:
  """Returns a row of a grid, with every number of local epochs."""
  return tables.Row(
      name,
      flags=(f'--algorithm={algorithm}',),
      setting_flags={
          f'tau {tau}': (f'--hparams=eval_model=stored,tau={tau}{hparams}',)
          for tau in taus
      },
  )


def _grid_setting(tau: int) -> tables.Setting:
  return tables.Setting(
      f'tau {tau}',
      measures=(
          tables.Measure(
              'Validation, last ten rounds',
              'last_ten_evaluations_mean/validation_clients/accuracy',
          ),
          tables.Measure('Test, last round', _MEASURES[1].path),
      ),
      flags=_setting(_MAIN).flags,
  )


CIFAR10_100_2_GRID = tables.Table(
    name='fedec_cifar10_100_2_grid',
    title="A grid of FedEC's constraint: its weight, and whom it holds",
    source='ours',
    settings=tuple(_grid_setting(tau) for tau in _TAUS),
    rows=(
        _grid_row('FedEC-wo', 'fedec_wo'),
        *(
            _grid_row(
                f'{kind} {weight:g} {held}',
                algorithm,
                f',constraint_weight={weight},constrain={held}',
            )
            for kind, (algorithm, weights) in _CONSTRAINTS.items()
            for held in ('returning', 'first')
            for weight in weights
        ),
    ),
    scales={
        'smoke': dataclasses.replace(
            _SMOKE,
            changes=f'2 rounds of 5 clients; seed 0 only. {_GRID_DATA}',
        ),
        'cpu': tables.Scale(
            seeds=(0,),
            flags=('--rounds=20',),
            changes=(
                '20 rounds of 100, in which a client takes part twice on'
                f' average; seed 0 only. {_GRID_DATA}'
            ),
            # One epoch: medians of all runs; five: the rounds of the table.
            hours=1.8,
        ),
    },
    flags=('--validation_fraction=0.2',),
    notes=(
        'Mean accuracy of all clients, with the models they keep. A choice'
        ' between rows is made by the validation examples.',
        'Tau is the number of local epochs. A row is a constraint (of'
        ' predictions, KL, or of weights, L2), its weight, and whom it holds:'
        ' clients that have taken part before (returning), or those that have'
        ' not (first, as Algorithm 1 prints it).',
        'Optimizer, rates and batches are the same in all rows, also in'
        ' FedEC-wo, which has no constraint.',
    ),
)

_FULL_TAUS = (5, 1, 10)
CIFAR10_100_2_FULL_GRID = tables.Table(
    name='fedec_cifar10_100_2_full_grid',
    title="A grid of full length: local epochs, the server's step, the weight",
    source='ours',
    settings=tuple(_grid_setting(tau) for tau in _FULL_TAUS),
    rows=tuple(
        _grid_row(
            name + suffix,
            algorithm,
            weight + f',outer_learning_rate={outer}',
            taus=_FULL_TAUS,
        )
        for suffix, outer in (('', 1.0), (' outer 0.5', 0.5))
        for name, algorithm, weight in (
            ('FedEC-wo', 'fedec_wo', ''),
            *(
                (f'KL {w:g}', 'fedec', f',constraint_weight={w}')
                for w in _CONSTRAINTS['KL'][1]
            ),
        )
    ),
    scales={
        'smoke': dataclasses.replace(
            _SMOKE,
            changes=f'2 rounds of 5 clients; seed 0 only. {_GRID_DATA}',
        ),
        'cpu': tables.Scale(seeds=(0,), changes=f'Seed 0 only. {_GRID_DATA}'),
    },
    flags=('--validation_fraction=0.2',),
    notes=(
        'Mean accuracy of all clients, with the models they keep, after each of'
        ' the last ten of 100 rounds. A choice between rows is made by the'
        ' validation examples.',
        'Tau is the number of local epochs, KL the weight of the constraint on'
        ' clients that have taken part before, outer the step of the server'
        ' where it is not 1. FedEC-wo has no constraint.',
    ),
)

TABLES = (
    CIFAR10_100_2,
    CIFAR10_100_2_EARLIER,
    OTHERS,
    CIFAR10_100_2_GRID,
    CIFAR10_100_2_FULL_GRID,
)
