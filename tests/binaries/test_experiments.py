"""The tables: every cell can be run, and is what its row and setting say."""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import functools
import json
import pathlib
import re
import sqlite3
import tempfile
from typing import NamedTuple

from absl import flags
from absl.testing import flagsaver
import pytest
import tensorflow as tf

from binaries import experiments
from binaries import flag_files
from binaries import train
from tff_meta import registry
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import run_config

_ROOT = pathlib.Path(__file__).parents[2]
_ONE_SHOT = 'Fine-tuning via one-shot FL'


@pytest.fixture(
    scope='module',
    params=[
        # The noise for an epsilon takes seconds to find, for every cell.
        pytest.param(
            name, marks=[pytest.mark.ci] if name == 'privacy_mnist' else []
        )
        for name in experiments.TABLES
    ],
)
def table(request):
  return experiments.get(request.param)


_Flat = dataclasses.make_dataclass('_Flat', run_config.FIELDS)


@pytest.fixture(scope='module', autouse=True)
def _no_folder_is_left():
  """Programs of pytest-xdist end without what Python does at exit."""
  yield
  if _users.cache_info().currsize:
    _users().cleanup()
    _users.cache_clear()


@functools.cache
def _users():
  """Returns a folder with the files of users, an image of each of few.

  A configuration looks at data of one's own, which nobody else has here.
  """
  folder = tempfile.TemporaryDirectory()
  files = {
      'mnist_by_writer': ('f0001_mnisttrain', 'f0012_mnisttest'),
      'omniglot_by_drawer': ('Greek_01', 'Latin_11'),
  }
  for name, clients in files.items():
    with sqlite3.connect(f'{folder.name}/{name}.sqlite') as database:
      database.execute(
          'CREATE TABLE examples (split_name, client_id,'
          ' serialized_example_proto)'
      )
      database.execute(
          'CREATE TABLE client_metadata (client_id, split_name, num_examples)'
      )
      for client in clients:
        database.execute(
            "INSERT INTO client_metadata VALUES (?, 'train', 2)", (client,)
        )
        for label in range(2):
          example = tf.train.Example()
          held = example.features.feature
          held['pixels'].float_list.value.extend([0.5] * 784)
          held['label'].int64_list.value.append(label)
          database.execute(
              "INSERT INTO examples VALUES ('train', ?, ?)",
              (client, example.SerializeToString()),
          )
  return folder


@functools.cache
def _config(cell):
  """Returns the fields of the `RunConfig` of a cell."""
  with flagsaver.flagsaver():
    # Nothing that depends on the number of rounds, but where a cell says so.
    arguments = ['train', '--eval_every=0', '--noeval_new_clients']
    arguments += flag_files.expand(cell.flags)
    if any(flag.startswith('--dataset=sqlite:') for flag in cell.flags):
      arguments.append(f'--data_dir={_users().name}')
    assert flags.FLAGS(arguments) == ['train']
    return _Flat(**train.configuration().flat())


def _cells(table, scale, **selection):
  """Returns the cells of a scale's first seed; others differ in it alone."""
  seeds = table.scale(scale).seeds[:1]
  return tables.cells(table, scale, seeds=seeds, **selection)


def _last_scale(table):
  return list(table.scales)[-1]  # `paper`, or what there is of it.


def test_every_file_of_tables_is_in_the_list():
  folder = pathlib.Path(experiments.__file__).parent
  of_tables = {path.stem for path in folder.glob('[a-z]*.py')} - {'claims'}
  for name in of_tables:
    for table in getattr(experiments, name).TABLES:
      assert experiments.get(table.name) is table


@pytest.mark.ci
def test_every_cell_can_be_run(table):
  """And reports what is read of it; of the last scale no two are the same."""
  for scale in table.scales:
    cells = tables.cells(table, scale)
    assert len({cell.folder for cell in cells}) == len(cells)
    configs = {cell: _config(cell) for cell in _cells(table, scale)}
    assert configs
    if scale == _last_scale(table):
      assert len(set(map(str, configs.values()))) == len(configs)
    for cell, config in configs.items():
      assert config.seed == cell.seed
      references = table.name in ('digits', 'privacy_mnist')
      assert ('--references' in cell.flags) == references
      for measure in table.setting(cell.setting).measures:
        _check_reports(config, measure)


def _check_reports(config, measure):
  path = measure.path
  where, *parts = path.split('/')
  if where in ('evaluation_best', 'best_round_validation'):
    assert config.select_best and config.eval_every <= config.rounds
  if path == 'last_ten_evaluations_mean/validation_groups/accuracy':
    assert config.partition == 'few_round'
    assert config.eval_every <= config.rounds
  elif where == 'last_ten_evaluations_mean':
    validates = config.validation_fraction > 0
    assert parts[0] == f'{"validation" if validates else "known"}_clients'
    if config.eval_every != config.rounds:  # The last round alone.
      assert config.eval_every == 1
      # Local has ten times ten epochs, and is tested after all of them.
      last = 1 if config.algorithm == 'local' else 10
      assert config.eval_from <= max(config.rounds + 1 - last, 0)
  elif where == 'seconds_per_round_median':
    # The time of a round is said to be that of a client, in ms.
    assert measure.factor == 1000 / config.clients_per_round
  elif where == 'client_bytes_per_round':
    assert (parts, measure.factor) in ((['down'], 0.001), (['up'], 0.001))
    assert f' KB {parts[0]} ' in measure.name
  elif where != 'best_round_validation':
    assert where in ('evaluation', 'evaluation_best')
    assert parts[0] in (config.protocols or ('known_clients', 'new_clients'))
    assert parts[0] != 'new_clients' or config.num_new_clients > 0
    assert config.curve or parts[-1] != 'curve_end_mean'
    assert config.nvar or parts[-1] != 'nvar'


_OF_A_SETTING = (
    'dataset', 'dataset_options', 'partition', 'partition_options',
    'test_fraction', 'stratify', 'deal_test_images', 'validation_fraction',
    'num_clients', 'num_new_clients', 'new_clients', 'eval_support_fraction',
    'restrict_f1_to_client_labels', 'curve', 'protocols', 'way',
    'group_clients', 'eval_groups', 'select_best', 'select_by', 'seed',
)  # fmt: skip


def test_rows_of_a_setting_see_the_same_data(table):
  """Clients and evaluation do not depend on the method."""
  for setting in table.settings:
    cells = _cells(table, _last_scale(table), settings=[setting.name])
    assert cells
    for field in _OF_A_SETTING:
      values = {
          str(getattr(_config(cell), field))
          for cell in cells
          # It has more clients than it keeps, of the same images.
          if (cell.row, field) != (_ONE_SHOT, 'group_clients')
      }
      assert len(values) == 1, field


def test_what_a_scale_says_it_changes(table):
  smoke = table.scale('smoke')
  assert smoke.changes and len(smoke.seeds) == 1
  assert all(_config(c).rounds <= 4 for c in _cells(table, 'smoke'))
  assert ('paper' in table.scales) == (table.source != 'ours')
  if 'paper' in table.scales:
    cpu, paper = table.scale('cpu'), table.scale('paper')
    assert (paper.flags, paper.rows, paper.settings) == ((), None, None)
    assert set(cpu.seeds) <= set(paper.seeds)
    # Whatever is left out is said.
    if (cpu.flags, cpu.rows, cpu.settings) != ((), None, None):
      assert cpu.changes != paper.changes


def test_names_and_published_numbers(table):
  """Names have no comma, as flags split lists there; numbers are percentages.

  A row without flags is not run, and has published numbers to show.
  """
  assert not [x for x in (*table.rows, *table.settings) if ',' in x.name]
  most = 3000 if table.name == 'metavers_nvar' else 100  # No share of anything.
  for row in table.rows:
    assert row.flags or (row.settings == () and row.published)
    for published in row.published.values():
      for number in published.values():
        assert 1 < number.value < most
        assert number.spread is None or (table.spread and number.spread < 40)


def test_digits_have_every_algorithm():
  rows = {cell.row for cell in _cells(experiments.get('digits'), 'cpu')}
  assert rows == set(registry.ALGORITHMS)


def test_users_of_a_search_are_not_those_of_its_table():
  for users in (experiments.users.WRITERS, experiments.users.DRAWERS):
    of_table, of_search = (
        experiments.get(name).flags
        for name in (users.name, f'{users.name}_search')
    )
    assert any(flag.endswith(f'clients={users.clients}') for flag in of_table)
    assert any(
        flag.endswith(f'clients={users.clients_of_search}')
        for flag in of_search
    )
  forms = [
      (users.clients, users.clients_of_search)
      for users in (experiments.users.WRITERS, experiments.users.DRAWERS)
  ]
  names = [
      [f'f{number:04}_mnisttrain' for number in range(836)],
      [f'{alphabet}_01' for alphabet in ('Greek', 'Latin', 'ULOG', 'Angelic')],
  ]
  for (one, other), clients in zip(forms, names, strict=True):
    of_one, of_other = (
        {name for name in clients if re.fullmatch(form, name)}
        for form in (one, other)
    )
    assert of_one and of_other and not of_one & of_other


def test_all_methods_on_users_have_a_row_and_as_many_candidates():
  users = experiments.users
  rows = {
      row.name.split()[0] for row in experiments.get(users.WRITERS.name).rows
  }
  for name, spec in registry.ALGORITHMS.items():
    assert (name in rows) == (
        bool({'known_client', 'new_client'} & set(spec.uses))
        and name not in users.PARTS
    )
  for of in (users.WRITERS, users.DRAWERS):
    candidates = collections.Counter(
        re.split(r' (?=\S+=)', row.name)[0]
        for row in experiments.get(f'{of.name}_search').rows
    )
    candidates.subtract(dict.fromkeys(of.more, 6))
    assert set(candidates.values()) == {6}
    searched = {
        users.AS.get(row.name, row.name)
        for row in experiments.get(of.name).rows
    }
    assert set(candidates) == searched


@pytest.mark.parametrize('users', ['WRITERS', 'DRAWERS'])
@pytest.mark.parametrize('ending', ['', '_search'])
def test_methods_on_users_have_rounds_of_each_phase_and_one_pass(users, ending):
  of = getattr(experiments.users, users)
  hparams = {}
  for cell in _cells(experiments.get(f'{of.name}{ending}'), 'cpu'):
    config = _config(cell)
    own = hparams[config.algorithm] = dataclasses.asdict(config.hparams)
    for phase in ('warm_up_rounds', 'averaged_rounds'):
      assert own.get(phase, 1) in range(1, config.rounds // 2)
    assert own.get('fine_tuning_decay', 1) == 1
  cafeme = hparams['cafeme']
  assert cafeme['inner_steps'] + cafeme['query_batches'] == of.steps
  of_per_fed_avg = 3 * hparams['per_fed_avg']['local_steps']
  assert of.steps - 3 < of_per_fed_avg <= of.steps


def test_what_a_search_of_users_found_is_read(tmp_path):
  """Of methods all of whose candidates have run; what diverged is not taken."""
  users = experiments.users.WRITERS
  rows = experiments.get(f'{users.name}_search').rows
  entries = [
      {'row': row.name, 'mean': 9.0 if 'rate=0.2' in row.name else 8.0}
      for row in rows
      if row.name.startswith('fed_avg learning')
      or row.name == 'local learning_rate=0.2'
  ]
  (tmp_path / 'table.json').write_text(json.dumps({'entries': entries}))
  said = experiments.users.found(users, str(tmp_path))
  assert said.split() == "'fed_avg': {'learning_rate': 0.2},".split()
  best = [entry for entry in entries if entry['mean'] == 9.0]
  for diverged, found in [
      (best, "'fed_avg': {'learning_rate': 0.005},"),
      (entries, ''),
  ]:
    for entry in diverged:
      entry['diverged'] = [0]
    (tmp_path / 'table.json').write_text(json.dumps({'entries': entries}))
    said = experiments.users.found(users, str(tmp_path))
    assert said.split() == found.split()


def _hparams(*names):
  return {f'hparams/{name}' for name in names}


class _Trial(NamedTuple):
  """Cells that differ from others in what is varied alone.

  Attributes:
    name: Of the table.
    differing: Settings that differ; hyperparameters that stand in the name of a
      row may, too.
    row: The only row that is meant, if it is one.
    of: What the table, the row or the setting of the other cell is, or a
      function that finds it, where it is not that of the cell.
  """

  name: str
  differing: set[str]
  row: str | None = None
  of: Mapping[str, str | Callable[[tables.Cell], str]] = {}


_CONSTRAINT = _hparams('constraint', 'constraint_weight', 'tau')
_FEDEC = dict(
    table='fedec_cifar10_100_2', row='FedEC', setting='CIFAR-10 (100 x 2)'
)
_ON_THE_WAY = {'eval_every', 'eval_new_clients', 'validation_clients'}
_VALIDATION = {'validation_fraction', 'eval_every', 'eval_from'}
_ONE_SHOT_ALONE = _hparams('kept_clients', 'held_out_share') | {'algorithm'}
_FED_AVG_ALONE = _hparams(
    'fine_tuning_epochs',
    'fine_tuning_steps',
    'fine_tuning_decay',
    'fine_tuning_decay_steps',
)
_DRAWERS_A_CLIENT = {'dataset_options/clients', 'num_clients'}
_TRIALS = (
    _Trial(
        'presets_metavers_cifar10',
        # References, which have the preset's rates, are not of the table.
        {'preset'}
        | {'reference_hparams/learning_rate', 'reference_hparams/momentum'}
        | {'reference_hparams/deployment_learning_rate'}
        | _hparams('triplet_variant', 'margin_rule', 'margin_stop_gradient')
        | _hparams('fixed_margin', 'warm_up_rounds', 'weight_decay'),
        row='paper',
        of=dict(table='metavers_cifar10', row='MetaVers'),
    ),
    _Trial(
        'fedmeta_per_table3_mnist',
        {'partition', 'partition_options/stride', 'new_clients'}
        | {'num_new_clients', 'num_clients', 'clients_per_round'},
        of=dict(
            table='fedmeta_per_mnist',
            setting=lambda cell: (
                cell.setting if 'New' in cell.setting else 'Known clients'
            ),
        ),
    ),
    _Trial(
        'fedmeta_per_mnist_scalings',
        {'dataset_options/scaling'},
        of=dict(table='fedmeta_per_table3_mnist', setting='IID clients'),
    ),
    _Trial(
        'fedmeta_per_mnist_scaling_search',
        {'dataset_options/scaling'} | _VALIDATION,
        of=dict(table='fedmeta_per_mnist', setting='Known clients'),
    ),
    _Trial(
        'metavers_cifar10',
        {'algorithm', 'hparams/loss'},
        row='Only CE',
        of=dict(row='MetaVers'),
    ),
    _Trial(
        'metavers_nvar',
        {'nvar'},
        of=dict(
            table=lambda c: f'metavers_{c.setting.lower().replace("-", "")}',
            setting='100 clients',
        ),
    ),
    _Trial(
        'metavers_proto',
        {'algorithm'},
        of=dict(
            table='metavers_cifar100',
            row=lambda cell: cell.row.removesuffix('-Proto'),
        ),
    ),
    _Trial(
        'metavers_cifar10_sweep',
        _hparams('gamma', 'margin_window', 'warm_up_rounds'),
        of=dict(table='metavers_cifar10', row='MetaVers'),
    ),
    _Trial(
        'fedec_cifar10_100_2',
        _hparams('constrain'),
        row='FedEC (Algorithm 1)',
        of=_FEDEC,
    ),
    _Trial(
        'fedec_cifar10_100_2_earlier',
        {'augmentation/crop_padding', 'augmentation/flip'}
        | {'rounds', 'eval_from', 'checkpoint_every'},
        of=dict(table='fedec_cifar10_100_2'),
    ),
    _Trial(
        'fedec_cifar10_100_2_grid',
        {'algorithm', 'rounds', 'validation_fraction', 'hparams/constrain'}
        | _CONSTRAINT,
        of=_FEDEC,
    ),
    _Trial(
        'fedec_cifar10_100_2_full_grid',
        {'algorithm', 'validation_fraction', 'hparams/outer_learning_rate'}
        | _CONSTRAINT,
        of=_FEDEC,
    ),
    _Trial(
        'cafeme_fed_rep_head',
        {'rounds', 'hparams/head_layers'} | _ON_THE_WAY,
        of=dict(table='cafeme_rmnist', row='FedRep', setting='Shards'),
    ),
    _Trial(
        'cafeme_rmnist_earlier',
        {'dataset_options/rotation_interpolation', 'deal_test_images'}
        | _hparams('head_layers')
        | _ON_THE_WAY,
        of=dict(table='cafeme_rmnist'),
    ),
    _Trial(
        'cafeme_rmnist_local_size',
        {'partition_options/max_examples'} | _ON_THE_WAY,
        of=dict(table='cafeme_rmnist', setting='None'),
    ),
    _Trial(
        'cafeme_meta_dataset_local_size',
        {'dataset_options/images_per_client'},
        of=dict(table='cafeme_meta_dataset', setting='Sources'),
    ),
    _Trial(
        'frl_cifar100',
        {'group_clients'} | _ONE_SHOT_ALONE | _FED_AVG_ALONE,
        row=_ONE_SHOT,
        of=dict(row='Fine-tuning via FedAvg'),
    ),
    _Trial(
        'frl_omniglot',
        _ONE_SHOT_ALONE | _FED_AVG_ALONE,
        row=_ONE_SHOT,
        of=dict(row='Fine-tuning via FedAvg'),
    ),
    _Trial(
        'frl_omniglot_updates',
        {'rounds', 'eval_every'},
        of=dict(table='frl_omniglot'),
    ),
    _Trial(
        'frl_omniglot_search',
        {'rounds', 'protocols', 'eval_groups', 'seed'},
        of=dict(
            table='frl_omniglot',
            row=lambda c: c.row.partition('=')[0].rpartition(' ')[0],
        ),
    ),
    *(
        _Trial(
            f'{name}_search',
            {'dataset_options/clients', 'num_new_clients', 'rounds'}
            | {'protocols', 'validation_fraction'}
            | _ON_THE_WAY
            | _hparams('warm_up_rounds', 'averaged_rounds'),
            of=dict(
                table=name,
                row=lambda c: re.split(r' (?=\S+=)', c.row)[0],
                setting='Known and new clients',
            ),
        )
        for name in ('users_mnist_writers', 'users_omniglot_drawers')
    ),
    *(
        _Trial(
            f'{name}_forms',
            {'dataset_options/scaling'} | more,
            of=dict(table=f'{name}_search', setting='Validation examples'),
        )
        for name, more in (
            ('users_mnist_writers', set()),
            ('users_omniglot_drawers', _DRAWERS_A_CLIENT),
        )
    ),
    _Trial(
        'presets_cafeme_rmnist',
        _hparams('gating'),
        row='release with gates c0',
        of=dict(table='cafeme_rmnist', row='CAFeMe'),
    ),
    _Trial(
        'digits_search',
        {'seed'} | _VALIDATION,
        of=dict(
            table='digits',
            row=lambda cell: cell.row.split()[0],
            setting='Known clients',
        ),
    ),
)


def _flat(content, above=''):
  """Returns the leaves of nested dictionaries, by path."""
  leaves = {}
  for name, value in content.items():
    if isinstance(value, dict):
      leaves |= _flat(value, f'{above}{name}/')
    else:
      leaves[above + name] = value
  return leaves


@pytest.mark.parametrize('trial', _TRIALS, ids=lambda t: f'{t.name}-{t.row}')
def test_a_trial_varies_what_it_says(trial):
  """All else is as in a cell of another table, or of another row."""
  of_trial = experiments.get(trial.name)
  found = set()
  for cell in _cells(
      of_trial, _last_scale(of_trial), rows=[trial.row] if trial.row else []
  ):
    base = dict(table=trial.name, row=cell.row, setting=cell.setting)
    for part, value in trial.of.items():
      base[part] = value(cell) if callable(value) else value
    table = experiments.get(base['table'])
    (other,) = _cells(
        table,
        _last_scale(table),
        rows=[base['row']],
        settings=[base['setting']],
    )
    one, other = (_flat(dataclasses.asdict(_config(c))) for c in (cell, other))
    changed = {
        field
        for field in one.keys() | other.keys()
        if one.get(field) != other.get(field)
    }
    named = {word.partition('=')[0] for word in cell.row.split() if '=' in word}
    assert changed <= trial.differing | _hparams(*named), cell
    found |= changed
  assert found >= trial.differing


_KEPT = sorted(path.parent for path in _ROOT.glob('results/*/comparison.json'))


@pytest.mark.parametrize('root', _KEPT, ids=[path.name for path in _KEPT])
def test_what_is_kept_was_run_as_the_table_says_now(root):
  """So that its report can be written again, but for evaluations on the way.

  Or none was, and `EARLIER.md` says what the table was then.
  """
  claim = json.loads((root / 'comparison.json').read_text())
  assert claim['experiment'] == root.name
  table = experiments.get(root.name)
  kept = {path.parent: path for path in root.rglob('cell.json')}
  assert kept
  is_of_now = not (root / 'EARLIER.md').exists()
  for cell in tables.cells(
      table,
      claim['scale'],
      rows=[row.name for row in table.rows],
      settings=[setting.name for setting in table.settings],
      seeds=runner.seeds(root),
  ):
    path = kept.pop(root / cell.folder, None)
    if path is not None:
      flags_found = json.loads(path.read_text())['flags']
      wanted, found = (
          tables.of_the_end(table.setting(cell.setting), tables.in_force(of))
          for of in (flag_files.expand(cell.flags), flags_found)
      )
      assert (found == wanted) == is_of_now, path
  assert not kept


@pytest.mark.parametrize('name', ['digits', 'digits_search'])
def test_what_is_kept_of_the_digits_has_the_presets_of_now(name):
  """A cell's flags name the preset, which may have changed since it ran."""
  kept = 0
  for cell in tables.cells(experiments.get(name), 'cpu'):
    path = _ROOT / 'results' / name / cell.folder / 'run' / 'config.json'
    if not path.exists():
      continue
    found = json.loads(path.read_text())['config']
    found = run_config.upgrade(found)['hparams']
    hparams = dataclasses.asdict(_config(cell).hparams)
    for numbers in (found, hparams):
      numbers.pop('num_clients', None)  # A run fills in its own.
    assert found == hparams, cell.folder
    kept += 1
  assert kept
