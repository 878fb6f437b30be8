"""The tables: every cell can be run, and says what the papers say."""

import dataclasses
import json
import pathlib
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import pytest

from binaries import experiments
from binaries import flag_files
from binaries import train
from tff_meta.comparison import tables
from tff_meta.training import run_config

_ROOT = pathlib.Path(__file__).parents[2]
_ALL = [
    (name, scale)
    for name, table in experiments.TABLES.items()
    for scale in table.scales
]
_ONE_SHOT = 'one_shot_ft'
_PAPER = [name for name, scale in _ALL if scale == 'paper']
_Flat = dataclasses.make_dataclass('_Flat', run_config.FIELDS)


@pytest.fixture
def resolve(monkeypatch):
  """Returns a function from a cell's flags to the fields of a `RunConfig`."""
  monkeypatch.chdir(_ROOT)  # Flag files are named from there.

  def run(cell_flags):
    with flagsaver.flagsaver():
      rest = flags.FLAGS(['train', *cell_flags])
      assert rest == ['train']
      return _Flat(**train._config().flat())

  return run


def _config(resolve, table, scale, row, setting):
  """Returns the configuration of the cell of the scale's first seed."""
  table = experiments.get(table)
  seed = table.scale(scale).seeds[0]
  (cell,) = tables.cells(
      table, scale, rows=[row], settings=[setting], seeds=[seed]
  )
  return resolve(cell.flags)


def test_only_the_digits_have_references(resolve):
  """Cells' flags come after those that a comparison gives to every cell."""
  # Apart, because both programs define --output_dir.
  ask = (
      'from absl import flags; from binaries import compare;'
      " flags.FLAGS(['compare']); print(*compare._program()[3:])"
  )
  program = subprocess.run(
      [sys.executable, '-c', ask],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      check=True,
  )
  of_all = program.stdout.split()
  for name, table in experiments.TABLES.items():
    for cell in tables.cells(table, 'smoke'):
      config = resolve([*of_all, *cell.flags])
      assert config.references == (name == 'digits'), name


def test_every_paper_has_its_file():
  """And every file is in the list."""
  folder = _ROOT / 'binaries' / 'experiments'
  files = {path.stem for path in folder.glob('*.py')}
  files -= {'__init__'}
  assert files == {
      'cafeme',
      'digits',
      'fedec',
      'fedmeta_per',
      'frl',
      'metavers',
  }
  for file in files:
    module = getattr(experiments, file)
    assert module.TABLES
    for table in module.TABLES:
      assert experiments.get(table.name) is table


@pytest.mark.parametrize('name, scale', _ALL)
def test_every_cell_can_be_run(resolve, name, scale):
  """And reports the numbers that are read of it."""
  table = experiments.get(name)
  cells = tables.cells(table, scale)
  assert cells
  assert len({cell.folder for cell in cells}) == len(cells)
  for cell in cells:
    config = resolve(cell.flags)
    assert config.seed == cell.seed
    for measure in table.setting(cell.setting).measures:
      if measure.path == 'best_round_validation':
        assert config.select_best and config.eval_every <= config.rounds
        continue
      where, what, *_, number = measure.path.split('/')
      if where == 'last_ten_evaluations_mean':
        validates = config.validation_fraction > 0
        assert what == f'{"validation" if validates else "known"}_clients'
        assert config.eval_every == 1
        assert config.eval_from <= max(config.rounds - 9, 0)
        continue
      assert where in ('evaluation', 'evaluation_best')
      assert what in config.protocols or (
          not config.protocols and what == 'known_clients'
      )
      if where == 'evaluation_best':
        assert config.select_best and config.eval_every <= config.rounds
      if number == 'curve_end_mean':
        assert config.curve
      if number == 'nvar':
        assert config.nvar


_KEPT = sorted(path.parent for path in _ROOT.glob('results/*/comparison.json'))


@pytest.mark.parametrize('root', _KEPT, ids=[path.name for path in _KEPT])
def test_what_is_kept_was_run_as_the_table_says_now(monkeypatch, root):
  """So that its report can be written again, and missing runs be added.

  Or none was, and `EARLIER.md` says what the table was then.
  """
  monkeypatch.chdir(_ROOT)
  claim = json.loads((root / 'comparison.json').read_text())
  assert claim['experiment'] == root.name
  table = experiments.get(root.name)
  kept = {path.parent: path for path in root.rglob('cell.json')}
  assert kept
  is_of_now = not (root / 'EARLIER.md').exists()
  seeds = {int(path.name.removeprefix('seed_')) for path in kept}
  for cell in tables.cells(
      table,
      claim['scale'],
      rows=[row.name for row in table.rows],
      settings=[setting.name for setting in table.settings],
      seeds=sorted(seeds),
  ):
    path = kept.pop(root / cell.folder, None)
    if path is not None:
      wanted = tables.in_force(flag_files.expand(cell.flags))
      found = tables.in_force(json.loads(path.read_text())['flags'])
      assert (found == wanted) == is_of_now, path
  assert not kept


@pytest.mark.parametrize('name', ['digits', 'digits_search'])
def test_what_is_kept_of_the_digits_has_the_presets_of_now(resolve, name):
  """A cell's flags name the preset, which may have changed since it ran."""
  root = _ROOT / 'results' / name
  kept = 0
  for cell in tables.cells(experiments.get(name), 'cpu'):
    path = root / cell.folder / 'run' / 'config.json'
    if not path.exists():
      continue
    found = json.loads(path.read_text())['config']
    found = run_config.upgrade(found)['hparams']
    hparams = dataclasses.asdict(resolve(cell.flags).hparams)
    for numbers in (found, hparams):
      numbers.pop('num_clients', None)  # A run fills in its own.
    assert found == hparams, cell.folder
    kept += 1
  assert kept


@pytest.mark.parametrize('name', list(experiments.TABLES))
def test_rows_of_a_setting_see_the_same_data(resolve, name):
  """Clients and evaluation do not depend on the method."""
  table = experiments.get(name)
  scale = list(table.scales)[-1]
  same = (
      'dataset', 'dataset_options', 'partition', 'partition_options',
      'test_fraction', 'stratify', 'deal_test_images', 'validation_fraction',
      'num_clients', 'num_new_clients', 'new_clients', 'eval_support_fraction',
      'restrict_f1_to_client_labels', 'curve', 'protocols', 'way',
      'group_clients', 'eval_groups', 'select_best', 'select_by', 'seed',
  )  # fmt: skip
  seed = table.scale(scale).seeds[0]
  for setting in table.settings:
    configs = [
        resolve(cell.flags)
        for cell in tables.cells(
            table, scale, settings=[setting.name], seeds=[seed]
        )
    ]
    assert configs
    for field in same:
      values = [
          getattr(config, field)
          for config in configs
          # It has more clients than it keeps, of the same images.
          if (config.algorithm, field) != (_ONE_SHOT, 'group_clients')
      ]
      assert all(value == values[0] for value in values), field


@pytest.mark.parametrize('name', list(experiments.TABLES))
def test_names_can_be_given_as_flags(name):
  """Lists in flags are split at commas."""
  table = experiments.get(name)
  assert not [x.name for x in (*table.rows, *table.settings) if ',' in x.name]


@pytest.mark.parametrize('name', list(experiments.TABLES))
def test_published_numbers_are_percentages(name):
  """A row without flags is not run, and has published numbers to show."""
  table = experiments.get(name)
  most = 3000 if name == 'metavers_nvar' else 100  # No share of anything.
  for row in table.rows:
    assert row.flags or row.settings == ()
    assert row.flags or row.published
    for published in row.published.values():
      for number in published.values():
        assert 1 < number.value < most
        assert number.spread is None or 0 <= number.spread < 40
        assert number.spread is None or table.spread


@pytest.mark.parametrize('name, scale', _ALL)
def test_what_a_scale_says_it_changes(resolve, name, scale):
  table = experiments.get(name)
  if scale == 'smoke':
    assert table.scale('smoke').changes and len(table.scale('smoke').seeds) == 1
    for cell in tables.cells(table, 'smoke'):
      assert resolve(cell.flags).rounds <= 4
  elif scale == 'cpu' and 'paper' in table.scales:
    cpu, paper = table.scale('cpu'), table.scale('paper')
    assert set(cpu.seeds) <= set(paper.seeds)
    # Whatever is left out is said.
    if (cpu.flags, cpu.rows, cpu.settings) != ((), None, None):
      assert cpu.changes != paper.changes
  elif scale == 'paper':
    scale = table.scale('paper')
    assert (scale.flags, scale.rows, scale.settings) == ((), None, None)


def test_there_is_no_paper_scale_of_what_nobody_published():
  ours = {n for n, t in experiments.TABLES.items() if t.source == 'ours'}
  assert ours == {
      'digits',
      'digits_search',
      'frl_omniglot',
      'frl_omniglot_search',
      'frl_omniglot_updates',
      'frl_cifar10',
      'cafeme_fed_rep_head',
      'metavers_cifar10_sweep',
      'fedec_cifar10_100_2_grid',
      'fedec_cifar10_100_2_full_grid',
      'fedmeta_per_mnist_scalings',
      'fedmeta_per_mnist_scaling_search',
  }
  assert ours == set(experiments.TABLES) - set(_PAPER)


@pytest.mark.parametrize(
    'name, rounds', [('fedmeta_per_mnist', 300), ('fedmeta_per_cifar10', 600)]
)
def test_fedmeta_per(resolve, name, rounds):
  """Section 4.3 of the specification: 50 clients of two classes, 5 a round."""
  table = experiments.get(name)
  cells = tables.cells(table, 'paper')
  assert len(cells) == 8 * 2 * 3
  for cell in cells:
    config = resolve(cell.flags)
    assert config.rounds == rounds
    assert (config.num_clients, config.clients_per_round) == (50, 5)
    assert config.preset == 'release'
    assert config.test_fraction == 0.25
    assert config.eval_support_fraction == 0.2
    assert config.restrict_f1_to_client_labels
    assert len(config.protocols) == 1
  assert table.scale('paper').seeds[0] == 1  # Of the published partition.


@pytest.mark.parametrize(
    'name, row, setting, rates',
    [
        (data, row, setting, rates)
        for data, rows in {
            'mnist': {
                'FedMeta (MAML)': ((0.001, 0.001), (0.001, 0.001)),
                'FedMeta (Meta-SGD)': ((0.001, 2e-4), (0.001, 2e-4)),
                'FedMeta-Per (MAML)': ((0.001, 0.001), (0.001, 3e-4)),
                'FedMeta-Per (Meta-SGD)': ((0.001, 5e-4), (0.001, 2e-4)),
            },
            'cifar10': {
                'FedMeta (MAML)': ((0.01, 0.001), (0.01, 0.001)),
                'FedMeta (Meta-SGD)': ((0.001, 0.001), (0.01, 0.001)),
                'FedMeta-Per (MAML)': ((0.001, 0.003), (0.01, 7e-4)),
                'FedMeta-Per (Meta-SGD)': ((0.01, 0.01), (0.01, 0.001)),
            },
        }.items()
        for row, both in rows.items()
        for setting, rates in zip(
            ('Known clients', 'New clients'), both, strict=True
        )
    ],
)
def test_rates_of_fedmeta_per_are_those_of_its_logs(
    resolve, name, row, setting, rates
):
  config = _config(resolve, f'fedmeta_per_{name}', 'paper', row, setting)
  hparams = config.hparams
  assert (hparams.inner_learning_rate, hparams.outer_learning_rate) == rates
  assert hparams.inner == ('meta_sgd' if 'Meta-SGD' in row else 'maml')
  assert hparams.personal_layers == (1 if 'Per' in row else 0)


@pytest.mark.parametrize(
    'name, rates',
    [('mnist', (1e-5, 5e-6, 1e-5, 5e-6)), ('cifar10', (1e-4,) * 4)],
)
@pytest.mark.parametrize('setting', ['Known clients', 'New clients'])
def test_rates_of_averaging_are_those_of_the_logs(
    resolve, name, rates, setting
):
  rows = ('FedAvg', 'FedPer', 'FedAvgMeta', 'FedPerMeta')
  for row, rate in zip(rows, rates, strict=True):
    config = _config(resolve, f'fedmeta_per_{name}', 'paper', row, setting)
    assert config.hparams.learning_rate == rate
    assert config.hparams.optimizer == 'adam'


@pytest.mark.parametrize('data, rate', [('mnist', 1e-5), ('cifar10', 1e-4)])
def test_table_3_of_fedmeta_per(resolve, data, rate):
  """One client of all images, 50 IID ones, and FedAvg's runs of table 4."""
  name = f'fedmeta_per_table3_{data}'

  def run(setting, name=name):
    return _config(resolve, name, 'paper', 'FedAvg', setting)

  for setting in ('Known clients', 'New clients'):
    assert run(setting) == run(setting, f'fedmeta_per_{data}')
  iid, centralized = run('IID clients'), run('Centralized')
  assert iid == dataclasses.replace(
      run('Known clients'),
      partition='iid',
      partition_options={},
      num_new_clients=0,
      new_clients='held_out',
  )
  assert iid.hparams.learning_rate == rate
  assert (iid.num_clients, iid.clients_per_round) == (50, 5)
  assert centralized == dataclasses.replace(
      iid, num_clients=1, clients_per_round=1
  )


def test_scalings_of_mnist(resolve):
  """Only the pixels change, in table 3's IID runs."""
  iid = _config(
      resolve, 'fedmeta_per_table3_mnist', 'paper', 'FedAvg', 'IID clients'
  )
  assert iid.dataset_options['scaling'] == 'per_pixel'
  for scaling in ('per_pixel', 'unit', 'centered', 'standard', 'raw'):
    assert _config(
        resolve, 'fedmeta_per_mnist_scalings', 'cpu', 'FedAvg', scaling
    ) == dataclasses.replace(
        iid, dataset_options=iid.dataset_options | {'scaling': scaling}
    )
  table_4 = experiments.get('fedmeta_per_mnist')
  assert all(
      resolve(cell.flags).dataset_options['scaling'] == 'per_pixel'
      for cell in tables.cells(table_4, 'paper')
  )


def _published(table, row, setting, measure):
  (row,) = (r for r in experiments.get(table).rows if r.name == row)
  number = row.published[setting][measure]
  return number.value, number.spread


@pytest.mark.parametrize(
    'cell, number',
    [
        (
            ('fedmeta_per_mnist', 'FedAvg', 'New clients', 'Macro-F1'),
            (77.66, 22.54),
        ),
        (
            (
                'fedmeta_per_cifar10',
                'FedMeta-Per (MAML)',
                'Known clients',
                'Micro',
            ),  # fmt: skip
            (86.6, None),
        ),
        (
            ('fedmeta_per_table3_cifar10', 'FedAvg', 'IID clients', 'Macro-F1'),
            (53, 3.21),
        ),
        (
            ('fedmeta_per_table3_mnist', 'FedAvg', 'New clients', 'Macro'),
            (81.69, 19.71),
        ),
        (
            ('fedmeta_per_table3_mnist', 'FedAvg', 'Centralized', 'Macro-F1'),
            (97.04, None),
        ),
        (
            (
                'metavers_cifar10',
                'MetaVers',
                '500 clients',
                'Best round on validation',
            ),  # fmt: skip
            (89.9, 0.3),
        ),
        (
            (
                'metavers_proto',
                'FedBABU-Proto',
                '500 clients',
                'Best round on validation',
            ),  # fmt: skip
            (43.5, 1.0),
        ),
        (
            (
                'metavers_nvar',
                'FedRep',
                'CIFAR-100',
                'Best round on validation',
            ),  # fmt: skip
            (2031.4, None),
        ),
        (
            (
                'fedec_table2_others',
                'FedEC',
                'FEMNIST (150 x 3)',
                'Last ten rounds',
            ),  # fmt: skip
            (77.3, None),
        ),
        (
            ('cafeme_rmnist', 'Per-FedAvg', 'Dirichlet 0.3', 'After 50 steps'),
            (74.57, 3.12),
        ),
        (
            (
                'frl_mini_imagenet',
                'FRL linear',
                'Groups of 10 clients',
                'Mixed non-IID, last round',
            ),  # fmt: skip
            (55.18, 0.46),
        ),
    ],
)
def test_published_numbers_stand_where_the_papers_have_them(cell, number):
  assert _published(*cell) == number


@pytest.mark.parametrize(
    'name', [n for n in experiments.TABLES if n.startswith('frl_')]
)
def test_settings_of_frl_say_how_large_groups_are(resolve, name):
  for cell in tables.cells(experiments.get(name), 'smoke'):
    config = resolve(cell.flags)
    num_clients = config.group_clients
    if config.algorithm == _ONE_SHOT:
      num_kept = config.hparams.kept_clients
      assert num_clients == 2 * num_kept
      # Omniglot has too few images for more clients.
      num_clients = num_clients if name == 'frl_omniglot' else num_kept
    assert cell.setting == f'Groups of {num_clients} clients'


_METAVERS = ('MetaVers', 'Only triplet', 'Only CE')
_SHOTS = {
    'cifar10': ((20, 30), (20, 30), (20, 0)),
    'cifar100': ((10, 20), (10, 20), (3, 0)),
    'cinic10': ((25, 35), (25, 35), (20, 0)),
}
_GAMMAS = {
    'cifar10': (0.4, 0.3, 0.2),
    'cifar100': (0.6, 0.6, 0.6),
    'cinic10': (0.5, 0.5, 0.5),
}


@pytest.mark.parametrize('data', list(_SHOTS))
def test_metavers(resolve, data):
  """Section 1.3: 1001 rounds of 5 clients, seeds 0, 21 and 42."""
  table = experiments.get(f'metavers_{data}')
  assert table.scale('paper').seeds == (0, 21, 42)
  assert len(tables.cells(table, 'paper')) == 15 * 3 * 3
  for i, num_clients in enumerate((50, 100, 500)):
    for row in ('MetaVers', 'Only triplet', 'Only CE', 'FedAvg', 'FedBABU'):
      config = _config(
          resolve, table.name, 'paper', row, f'{num_clients} clients'
      )
      assert config.dataset == data
      assert (config.rounds, config.clients_per_round) == (1001, 5)
      assert config.num_clients == num_clients
      assert (config.eval_every, config.patience) == (50, 10)
      if row in _METAVERS:
        hparams = config.hparams
        assert (hparams.shots, hparams.queries) == _SHOTS[data][i]
        assert hparams.gamma == _GAMMAS[data][i]
        assert hparams.weight_decay == (0.001 if data == 'cifar10' else 0)
        assert config.preset == 'release'
    local = _config(
        resolve, table.name, 'paper', 'Local', f'{num_clients} clients'
    )
    assert local.rounds == 1 and local.clients_per_round == num_clients
    assert local.hparams.episodes == 100
    assert (local.hparams.shots, local.hparams.queries) == _SHOTS[data][i]


@pytest.mark.parametrize(
    'setting, of', [('CIFAR-100', 'cifar100'), ('CIFAR-10', 'cifar10')]
)
def test_spread_of_classes_is_measured_in_the_runs_of_table_2(
    resolve, setting, of
):
  """Table 4: 100 clients, the four methods; there is one more measure."""
  table = experiments.get('metavers_nvar')
  assert [row.name for row in table.rows] == [
      'FedAvg', 'FedBABU', 'FedRep', 'MetaVers',
  ]  # fmt: skip
  for row in table.rows:
    config = _config(resolve, table.name, 'paper', row.name, setting)
    accuracy = _config(
        resolve, f'metavers_{of}', 'paper', row.name, '100 clients'
    )
    assert dataclasses.replace(config, nvar=False) == accuracy


def test_ablations_of_metavers(resolve):
  losses = [
      _config(
          resolve, 'metavers_cinic10', 'paper', row, '100 clients'
      ).hparams.loss
      for row in _METAVERS
  ]
  assert losses == ['hybrid', 'triplet', 'ce']


def test_sweep_of_metavers(resolve):
  """Gamma and window change one at a time, from the published settings."""
  table = experiments.get('metavers_cifar10_sweep')
  released = _config(
      resolve, 'metavers_cifar10', 'paper', 'MetaVers', '50 clients'
  )
  swept = {}
  for cell in tables.cells(table, 'cpu', seeds=[0]):
    config = resolve(cell.flags)
    swept[cell.row] = config.hparams.gamma, config.hparams.margin_window
    assert config == dataclasses.replace(
        released,
        hparams=dataclasses.replace(
            released.hparams,
            gamma=config.hparams.gamma,
            margin_window=config.hparams.margin_window,
            warm_up_rounds=config.hparams.margin_window + 1,
        ),
    )
  assert swept.pop('gamma 0.4 window 50') == (0.4, 50)
  assert len(swept) == 8
  for row, values in swept.items():
    what, value = row.split()
    expected = {'gamma': (float(value), 50), 'window': (0.4, float(value))}
    assert values == expected[what]


@pytest.mark.parametrize('setting', ['CIFAR-100', 'miniImageNet'])
def test_new_classes_of_metavers(resolve, setting):
  config = _config(
      resolve, 'metavers_new_classes', 'paper', 'MetaVers', setting
  )
  assert (config.num_clients, config.clients_per_round) == (64, 10)
  assert (config.rounds, config.patience) == (40000, 10)
  assert (config.way, config.group_clients) == (5, 10)
  assert (config.validation_groups, config.eval_groups) == (500, 1000)


def test_fedec(resolve):
  """Section 3.3: 100 rounds, a tenth of the clients in each."""
  for name, num_cells in (
      ('fedec_cifar10_100_2', 14),
      ('fedec_table2_others', 5 * 14),
  ):
    table = experiments.get(name)
    cells = tables.cells(table, 'paper', seeds=[0])
    assert len(cells) == num_cells
    for cell in cells:
      config = resolve(cell.flags)
      assert config.augmentation == (
          None
          if config.dataset == 'femnist'
          else {'crop_padding': 4, 'flip': True}
      )
      if cell.row == 'Local Only':
        assert config.rounds * config.hparams.epochs == 100
        assert config.clients_per_round == config.num_clients
      else:
        assert config.rounds == 100
        assert config.clients_per_round * 10 == config.num_clients


def test_fedec_with_algorithm_1_as_printed(resolve):
  """Nothing but whom the constraint holds differs from FedEC."""
  table, setting = 'fedec_cifar10_100_2', 'CIFAR-10 (100 x 2)'
  printed, fedec = (
      _config(resolve, table, 'paper', row, setting)
      for row in ('FedEC (Algorithm 1)', 'FedEC')
  )
  assert printed.hparams.constrain == 'first'
  assert fedec == dataclasses.replace(
      printed,
      hparams=dataclasses.replace(printed.hparams, constrain='returning'),
  )


def test_grid_of_fedec(resolve):
  """Rows differ in the constraint alone, from each other and from FedEC-wo."""
  table = experiments.get('fedec_cifar10_100_2_grid')
  cells = tables.cells(table, 'cpu', seeds=[0])
  assert len(cells) == 2 * (1 + 2 * 2 * 4)
  for cell in cells:
    config = resolve(cell.flags)
    hparams = config.hparams
    kind, *constraint = cell.row.split()
    assert cell.setting == f'tau {hparams.tau}'
    if kind == 'FedEC-wo':
      assert hparams.constraint == 'none'
    else:
      assert hparams.constraint == kind.lower()
      assert [str(hparams.constraint_weight), hparams.constrain] == [
          str(float(constraint[0])),
          constraint[1],
      ]
    assert hparams == dataclasses.replace(
        resolve(
            ['--flagfile=binaries/presets/fedec_cifar10_100_2.flags']
        ).hparams,
        constraint=hparams.constraint,
        constraint_weight=hparams.constraint_weight,
        constrain=hparams.constrain,
        tau=hparams.tau,
    )
    assert (config.rounds, config.validation_fraction) == (20, 0.2)


def test_full_grid_of_fedec(resolve):
  """The specification's grid, at the length of the table, on validation."""
  table = experiments.get('fedec_cifar10_100_2_full_grid')
  flag_file = '--flagfile=binaries/presets/fedec_cifar10_100_2.flags'
  base = resolve([flag_file])
  found = set()
  for cell in tables.cells(table, 'cpu'):
    config = resolve(cell.flags)
    hparams = config.hparams
    kind, weight = (*cell.row.split(), '')[:2]
    if kind == 'KL':
      assert float(weight) == hparams.constraint_weight
    changes = {
        name: getattr(hparams, name)
        for name in ('tau', 'outer_learning_rate', 'constraint')
    }
    assert changes['constraint'] == ('kl' if kind == 'KL' else 'none')
    assert cell.setting == f'tau {hparams.tau}'
    assert cell.row.endswith('outer 0.5') == (hparams.outer_learning_rate < 1)
    assert config == dataclasses.replace(
        base,
        algorithm=config.algorithm,
        validation_fraction=0.2,
        hparams=dataclasses.replace(
            base.hparams,
            constraint_weight=hparams.constraint_weight,
            **changes,
        ),
    )
    found.add((kind, weight if kind == 'KL' else '', *changes.values()))
  assert len(found) == 3 * 2 * (1 + 4)


def test_l2gd_of_fedec(resolve):
  """FedRep's code: eta = 1 / (n (1 - p)), a pull of half of that."""
  for table, setting, num_clients in (
      ('fedec_cifar10_100_2', 'CIFAR-10 (100 x 2)', 100),
      ('fedec_table2_others', 'CIFAR-10 (1000 x 2)', 1000),
      ('fedec_table2_others', 'FEMNIST (150 x 3)', 150),
  ):
    config = _config(resolve, table, 'paper', 'L2GD', setting)
    assert config.num_clients == num_clients
    hparams = config.hparams
    rate = 1 / (num_clients * (1 - hparams.averaging_probability))
    assert hparams.learning_rate == pytest.approx(rate, rel=1e-3)
    assert hparams.pull == pytest.approx(rate / 2, rel=1e-3)


@pytest.mark.parametrize(
    'data, num_steps', [('cifar10', 3), ('cifar100', 1), ('cinic10', 1)]
)
def test_pfedgp_of_metavers(resolve, data, num_steps):
  """Section 6: an inner step, but on CIFAR-10."""
  config = _config(
      resolve, f'metavers_{data}', 'paper', 'pFedGP', '500 clients'
  )
  assert (config.algorithm, config.preset) == ('pfedgp', 'release')
  assert config.hparams.inner_steps == num_steps
  if data == 'cifar100':
    proto = _config(
        resolve, 'metavers_proto', 'paper', 'pFedGP-Proto', '500 clients'
    )
    assert proto == dataclasses.replace(config, algorithm='pfedgp_proto')


_RMNIST = {
    'None': 'none',
    'Dirichlet 1000': 'dirichlet_1000',
    'Dirichlet 5': 'dirichlet_5',
    'Dirichlet 0.3': 'dirichlet',
    'Shards': 'shards',
}


def test_heads_of_fed_rep(resolve):
  """All dense layers, as in the table of now, and the last one alone."""
  whole = _config(resolve, 'cafeme_rmnist', 'paper', 'FedRep', 'Shards')
  for row, head_layers in (('All dense layers', 2), ('The last layer', 1)):
    hparams = dataclasses.replace(whole.hparams, head_layers=head_layers)
    for rounds in (100, 250):
      assert _config(
          resolve, 'cafeme_fed_rep_head', 'cpu', row, f'{rounds} rounds'
      ) == dataclasses.replace(whole, rounds=rounds, hparams=hparams)


@pytest.mark.parametrize(
    'row', ['CAFeMe', 'Per-FedAvg', 'FedAvg-FT', 'IFCA-FT', 'FedRep', 'Ditto']
)
@pytest.mark.parametrize(
    'data, setting, field, option',
    [
        ('rmnist', 'None', 'partition_options', 'max_examples'),
        ('meta_dataset', 'Sources', 'dataset_options', 'images_per_client'),
    ],
)
def test_local_sizes_of_cafeme(resolve, row, data, setting, field, option):
  """Figure 5 has 100 to 600 examples a client; all else is as elsewhere."""
  table = experiments.get(f'cafeme_{data}_local_size')
  whole = _config(resolve, f'cafeme_{data}', 'paper', row, setting)
  cells = tables.cells(table, 'paper', rows=[row], seeds=[0])
  options = getattr(whole, field)
  assert [(cell.setting, resolve(cell.flags)) for cell in cells] == [
      (
          f'{size} images',
          dataclasses.replace(whole, **{field: options | {option: size}}),
      )
      for size in (100, 200, 300, 400, 500, 600)
  ]


def test_steps_and_batches_of_ditto(resolve):
  """Section 2.3: tau = 8 on FEMNIST; batches of 50, and 30 on Meta-Dataset."""
  for table, setting, steps, batch_size in (
      ('cafeme_cifar10', 'Shards', 5, 50),
      ('cafeme_femnist', 'Writers', 8, 50),
      ('cafeme_meta_dataset', 'Sources', 5, 30),
  ):
    config = _config(resolve, table, 'paper', 'Ditto', setting)
    hparams = config.hparams
    assert hparams.epochs == hparams.personal_epochs == steps
    assert hparams.batch_size == batch_size


def test_how_many_models_ifca_has(resolve):
  """Section 2.3: 3 on CIFAR-10, 4 on RMNIST, 2 on FEMNIST, 8 elsewhere."""
  for table, setting, clusters in (
      ('cafeme_cifar10', 'Shards', 3),
      ('cafeme_rmnist', 'Shards', 4),
      ('cafeme_femnist', 'Writers', 2),
      ('cafeme_meta_dataset', 'Sources', 8),
  ):
    hparams = _config(resolve, table, 'paper', 'IFCA-FT', setting).hparams
    assert hparams.clusters == clusters
    assert (hparams.epochs, hparams.learning_rate) == (5, 0.001)


@pytest.mark.parametrize(
    'row, fine_tuning',
    [
        ('CAFeMe', ('fine_tuning_learning_rate', 0.05)),
        ('Per-FedAvg', ('fine_tuning_learning_rate', 0.01)),
        ('FedAvg-FT', ('deployment_learning_rate', 0.01)),
        ('IFCA-FT', ('fine_tuning_learning_rate', 0.01)),
        ('FedRep', ('fine_tuning_learning_rate', 0.01)),
        ('Ditto', ('fine_tuning_learning_rate', 0.01)),
    ],
)
def test_cafeme_on_meta_dataset(resolve, row, fine_tuning):
  """Section 2.3: 2000 rounds, batches of 30, five local steps."""
  config = _config(resolve, 'cafeme_meta_dataset', 'paper', row, 'Sources')
  assert (config.rounds, config.clients_per_round) == (2000, 5)
  assert (config.num_clients, config.num_new_clients) == (80, 20)
  assert (config.partition, config.test_fraction) == ('by_writer', 0.2)
  assert config.hparams.batch_size == 30 and config.curve
  name, rate = fine_tuning
  assert getattr(config.hparams, name) == rate
  steps = {'CAFeMe': 'inner_steps', 'Per-FedAvg': 'local_steps'}
  if row in steps:
    assert getattr(config.hparams, steps[row]) == 5
    assert config.hparams.inner_learning_rate == 0.05


@pytest.mark.parametrize(
    'name, num_clients',
    [('frl_cifar100', 64), ('frl_mini_imagenet', 64), ('frl_femnist', 52)],
)
def test_frl(resolve, name, num_clients):
  """Section 5.3: 40,000 rounds, 10 clients, R = 3; 1000 groups."""
  table = experiments.get(name)
  for cell in tables.cells(table, 'paper'):
    config = resolve(cell.flags)
    assert config.num_clients == num_clients
    one_shot = config.algorithm == _ONE_SHOT  # Of 20 clients it keeps 10.
    assert (config.way, config.group_clients) == (5, 20 if one_shot else 10)
    assert getattr(config.hparams, 'kept_clients', 10) == 10
    assert config.eval_groups == 1000 and config.hparams.rounds == 3
    assert config.dataset_options['scaling'] == 'raw'
    padding = {'cifar100': 3, 'mini_imagenet': 8}.get(config.dataset)
    assert config.augmentation == (
        padding and {'crop_padding': padding, 'flip': False}
    )
    if cell.row == 'FedAvg':
      assert config.algorithm == 'fed_avg' and config.rounds == 1
    else:
      assert (config.rounds, config.clients_per_round) == (40000, 10)


def test_variants_of_frl(resolve):
  def hparams(row):
    return _config(
        resolve, 'frl_cifar100', 'paper', row, 'Groups of 10 clients'
    ).hparams

  assert hparams('FRL distance + GPAL').gpal
  assert not hparams('FRL distance').gpal
  assert hparams('FRL distance').classifier == 'distance'
  assert hparams('FRL linear').classifier == 'linear'
  assert hparams('Personalized FL linear').classifier == 'linear'
  assert hparams('Personalized FL distance').classifier == 'distance'


@pytest.mark.parametrize(
    'name', ['frl_cifar100', 'frl_omniglot', 'frl_cifar10']
)
def test_one_shot_fine_tuning_trains_as_that_via_fed_avg(resolve, name):
  """Whom the server averages is all that differs, and how many there are."""
  (setting,) = experiments.get(name).settings
  one_shot, fed_avg = (
      _config(resolve, name, 'cpu', row, setting.name)
      for row in ('Fine-tuning via one-shot FL', 'Fine-tuning via FedAvg')
  )
  assert (
      dataclasses.replace(
          one_shot,
          algorithm=fed_avg.algorithm,
          hparams=fed_avg.hparams,
          group_clients=fed_avg.group_clients,
      )
      == fed_avg
  )
  trained, expected = map(
      dataclasses.asdict, (one_shot.hparams, fed_avg.hparams)
  )
  assert set(trained) - set(expected) == {'kept_clients', 'held_out_share'}
  assert all(
      trained[key] == expected[key] for key in set(trained) & set(expected)
  )


def test_digits_have_every_algorithm(resolve):
  table = experiments.get('digits')
  cells = tables.cells(table, 'cpu')
  known = {c.row for c in cells if c.setting == 'Known clients'}
  groups = {c.row for c in cells if c.setting == 'New groups'}
  assert {'metavers', 'cafeme', 'fedec', 'fedmeta_per', 'local'} <= known
  assert {'frl', 'personalized_fl', 'fed_avg', 'one_shot_ft'} <= groups
  assert {(c.setting, resolve(c.flags).dataset) for c in cells} == {
      ('Known clients', 'digits'),
      ('New groups', 'digit_pairs'),
  }
  assert {cell.seed for cell in cells} == {0, 1, 2}
  assert {resolve(cell.flags).rounds for cell in cells} == {200}


def test_search_of_the_digits(resolve):
  """Runs of the table itself, but for what is searched and for the examples."""
  searched = tables.cells(experiments.get('digits_search'), 'cpu')
  assert len({cell.row.split()[0] for cell in searched}) == 17
  for cell in searched:
    algorithm, *changes = cell.row.split()
    config = resolve(cell.flags)
    known = _config(resolve, 'digits', 'cpu', algorithm, 'Known clients')
    hparams = dataclasses.asdict(known.hparams)
    for change in changes:
      name, _, value = change.partition('=')
      hparams[name] = type(hparams[name])(value)
    assert config == dataclasses.replace(
        known,
        hparams=type(known.hparams)(**hparams),
        validation_fraction=0.2,
        eval_every=1,
        eval_from=191,
        seed=1,
    )


def test_search_for_the_linear_rows_on_omniglot(resolve):
  """Rates of the rows of the table, tried on validation characters alone."""
  searched = tables.cells(experiments.get('frl_omniglot_search'), 'cpu')
  assert len(searched) == 9 + 9 + 6
  for cell in searched:
    # The name of a method has no =.
    words = cell.row.split()
    rates = [word.partition('=') for word in words if '=' in word]
    method = ' '.join(words[: -len(rates)])
    row = _config(resolve, 'frl_omniglot', 'cpu', method, cell.setting)
    changed = {name: float(value) for name, _, value in rates}
    assert len(changed) == (2 if method.startswith('Fine') else 3)
    assert resolve(cell.flags) == dataclasses.replace(
        row,
        hparams=dataclasses.replace(row.hparams, **changed),
        rounds=200,
        protocols=('new_groups',),
        eval_groups=2,
        seed=1,
    )
    assert row.select_best and row.eval_every == 200


def test_frl_with_as_many_updates_as_personalized_fl(resolve):
  cells = tables.cells(experiments.get('frl_omniglot_updates'), 'cpu')
  assert len(cells) == 2
  for cell in cells:
    row = _config(resolve, 'frl_omniglot', 'cpu', cell.row, cell.setting)
    assert resolve(cell.flags) == dataclasses.replace(
        row, rounds=4 * row.rounds, eval_every=4 * row.eval_every
    )
    assert row.hparams.rounds == 3  # And the update: four a step.


def test_search_for_the_scaling_of_mnist(resolve):
  """Known clients of Table 4, but for the scaling and for the examples."""
  searched = tables.cells(
      experiments.get('fedmeta_per_mnist_scaling_search'), 'cpu'
  )
  assert len(searched) == 4 * 5
  for cell in searched:
    known = _config(
        resolve, 'fedmeta_per_mnist', 'cpu', cell.row, 'Known clients'
    )
    assert resolve(cell.flags) == dataclasses.replace(
        known,
        dataset_options=known.dataset_options | {'scaling': cell.setting},
        validation_fraction=0.2,
        eval_every=1,
        eval_from=291,
    )
