"""README's tables of results say what the runs kept in `results` say."""

import dataclasses
import json
import math
import pathlib
import re
import shlex
import statistics

import pytest

from binaries import experiments
from tff_meta import registry
from tff_meta.comparison import results
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import metric_writers
from tff_meta.training import run_config

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / 'README.md').read_text()
_RESULTS = _README.partition('\n## Results\n')[2]
_KEPT = sorted(path.parent for path in _ROOT.glob('results/*/comparison.json'))


def _kept_entries(root):
  """Entries of a kept table that have run, as they are in table.json."""
  table = json.loads((root / 'table.json').read_text())
  return [entry for entry in table['entries'] if entry['mean'] is not None]


def _entries(name):
  """The same as (setting, row) -> measure -> entry."""
  entries = {}
  for entry in _kept_entries(_ROOT / 'results' / name):
    cell = entries.setdefault((entry['setting'], entry['row']), {})
    cell[entry['measure']] = entry
  assert entries
  return entries


def _runs(name):
  """Kept runs of a table: (setting, row) -> their directories, by seed."""
  root = _ROOT / 'results' / name
  runs = {}
  for cell in _kept_cells(root):
    run = runner.CellFolder(root, cell).run
    runs.setdefault((cell.setting, cell.row), []).append(run)
  return runs


def _claim(root):
  return json.loads((root / 'comparison.json').read_text())


def _table(root):
  return experiments.get(_claim(root)['experiment'])


def _kept_cells(root):
  table = _table(root)
  cells = tables.cells(
      table,
      _claim(root)['scale'],
      rows=[row.name for row in table.rows],
      settings=[setting.name for setting in table.settings],
      seeds=runner.seeds(root),
  )
  return [c for c in cells if (root / c.folder / 'cell.json').exists()]


def _readme_table(begin, index=0):
  """Rows, lists of cells, of a table after a text that README has."""
  assert _README.count(begin) == 1
  found = [[]]
  for line in _README.partition(begin)[2].splitlines():
    if line.startswith('| '):
      found[-1].append([cell.strip() for cell in line.strip('|').split(' | ')])
    elif found[-1]:
      found.append([])
  return found[index][2:]  # Without its header and the line under it.


def _mean(entry):
  return f'{entry["mean"]:.2f}'


def _seeds(entry, spread='half_width_95'):
  """Mean and spread over seeds, and the values in parentheses."""
  if entry['num_seeds'] == 1:
    return _mean(entry)
  values = ', '.join(f'{value:.2f}' for value in entry['values'].values())
  return f'{_mean(entry)} +- {entry[spread]:.2f} ({values})'


def _spread(entry):
  """Mean and spread within the one run."""
  assert entry['num_seeds'] == 1
  return f'{_mean(entry)} +- {entry["spread"]:.2f}'


def _published(entry, digits):
  if entry['published'] is None:
    return '–'
  published = f'{entry["published"]:.{digits}f}'
  if entry['published_spread'] is None:
    return published
  return f'{published} +- {entry["published_spread"]:.{digits}f}'


def _difference(entry):
  if entry['difference'] is None:
    return '–'
  return f'{entry["difference"]:+.2f}'


def _metavers(setting, row, cell):
  best = cell['Best round on validation']
  return [
      setting.removesuffix(' clients'),
      row,
      _published(best, 1),
      _seeds(best),
      _difference(best),
      _mean(cell['Last round']),
  ]


def _cafeme(setting, row, cell):
  entry = cell['After 50 steps']
  return [setting, row, _published(entry, 2), _seeds(entry), _difference(entry)]


def _fedec(setting, row, cell):
  del setting  # One.
  entry, last = cell['Last ten rounds'], cell['Last round']
  values = ', '.join(f'{value:.2f}' for value in last['values'].values())
  return [
      row,
      _published(entry, 2),
      _seeds(entry),
      _difference(entry),
      f'{_mean(last)} ({values})',
  ]


@pytest.mark.parametrize('root', _KEPT, ids=lambda root: root.name)
def test_tables_are_of_the_kept_runs(root):
  cells = _kept_cells(root)
  assert len(cells) == len(list(root.rglob('cell.json')))
  found = [
      entry.to_json() | {'missing': None}
      for entry in results.collect(root, _table(root), cells)
      if entry.mean is not None
  ]
  assert found == [
      entry | {'missing': None} for entry in _kept_entries(root)
  ]  # Seeds that were asked for and have not run are missing in one of them.


def _cells_of_commands():
  """Experiment -> folders of the cells that README's commands run."""
  blocks = re.findall(r'```sh\n(.*?)```', _RESULTS, re.DOTALL)
  folders = {}
  for line in ''.join(blocks).replace('\\\n', '').splitlines():
    run, python, option, module, *given = shlex.split(line)
    assert (run, python, option) == ('./run', 'python', '-m')
    assert module == 'binaries.compare'
    values = dict(flag.removeprefix('--').split('=', 1) for flag in given)
    values.pop('data_dir', None)
    values.pop('processes', None)
    name, scale = values.pop('experiment'), values.pop('scale')
    selection = {key: value.split(',') for key, value in values.items()}
    if 'seeds' in selection:
      selection['seeds'] = [int(seed) for seed in selection['seeds']]
    cells = tables.cells(experiments.get(name), scale, **selection)
    folders.setdefault((name, scale), set()).update(c.folder for c in cells)
  return folders


def test_commands_are_those_of_the_kept_runs():
  commands = _cells_of_commands()
  assert len(commands) > 10
  for (name, scale), folders in commands.items():
    root = _ROOT / 'results' / name
    assert _claim(root)['scale'] == scale
    kept = {cell.folder for cell in _kept_cells(root)}
    if name == 'digits':  # Algorithms that came later have no runs yet.
      methods = {folder.split('/')[1] for folder in kept}
      folders = {f for f in folders if f.split('/')[1] in methods}
    assert folders == kept, name


@pytest.mark.parametrize(
    'name, begin, line_of',
    [
        ('metavers_cifar10', '**MetaVers, Table 2, CIFAR-10**', _metavers),
        ('cafeme_rmnist', '**CAFeMe, Figure 3, rotated MNIST**', _cafeme),
        ('fedec_cifar10_100_2', '**FedEC, Table 2, CIFAR-10**', _fedec),
    ],
)
def test_numbers_over_seeds(name, begin, line_of):
  expected = [line_of(*key, cell) for key, cell in _entries(name).items()]
  assert sorted(_readme_table(begin)) == sorted(expected)


def _last_ten_tests(runs):
  """Range and mean of the last ten tests of every run."""
  values = []
  for run in runs:
    metrics = metric_writers.read_metrics(run / 'metrics.csv')
    column = metrics['known_clients/accuracy_micro']
    values += [100 * value for value in column if not math.isnan(value)][-10:]
  return (
      f'{min(values):.1f} to {max(values):.1f},'
      f' mean {statistics.fmean(values):.2f}'
  )


@pytest.mark.parametrize(
    'data, has_curve', [('mnist', False), ('cifar10', True)]
)
def test_known_and_new_clients_of_fedmeta_per(data, has_curve):
  entries = _entries(f'fedmeta_per_{data}')
  runs = _runs(f'fedmeta_per_{data}')
  expected = []
  for row in dict.fromkeys(row for _, row in entries):
    line = [row]
    for setting in ('Known clients', 'New clients'):
      entry = entries[setting, row]['Micro']
      line += [
          f'{entry["published"]:g}',
          _seeds(entry, 'std'),
          _difference(entry),
      ]
      if has_curve and setting == 'Known clients':
        line.append(_last_ten_tests(runs[setting, row]))
    expected.append(line)
  found = _readme_table(
      f'**FedMeta-Per, Table 4, {data.upper().replace("CIFAR", "CIFAR-")}**'
  )
  assert found == expected


def test_what_two_classes_a_client_cost():
  expected = []
  for name, setting in {
      'One, with all images': 'Centralized',
      '50, IID': 'IID clients',
      '50 of 2 classes, known': 'Known clients',
      '50 of 2 classes, new': 'New clients',
  }.items():
    entry = _entries('fedmeta_per_table3_mnist')[setting, 'FedAvg']['Micro']
    expected.append(
        [
            name,
            _published(entry, 2),
            _seeds(entry, 'std'),
            _difference(entry),
        ]
    )
  assert _readme_table('**FedMeta-Per, Table 3, MNIST**') == expected


@pytest.mark.parametrize(
    'name, begin, measures',
    [
        (
            'frl_omniglot',
            '### FRL on Omniglot',
            [
                f'{groups}, last round'
                for groups in ('IID', 'Non-IID', 'Mixed IID', 'Mixed non-IID')
            ],
        ),
        (
            'frl_omniglot_updates',
            '**FRL distance is before Personalized FL distance',
            [
                f'{groups}, {which} round'
                for which in ('last', 'best')
                for groups in ('IID', 'Non-IID')
            ],
        ),
        (
            'frl_cifar10',
            '### FRL on CIFAR-10',
            [
                f'{groups}, {which} round'
                for which in ('last', 'best')
                for groups in ('IID', 'Non-IID')
            ],
        ),
    ],
)
def test_new_groups(name, begin, measures):
  expected = [
      [row] + [_spread(cell[measure]) for measure in measures]
      for (_, row), cell in _entries(name).items()
  ]
  assert sorted(_readme_table(begin)) == sorted(expected)


def test_curves_of_personalization():
  expected = []
  for (setting, row), runs in _runs('cafeme_rmnist').items():
    curves = []
    for run in runs:
      summary = results.read_json(run / 'summary.json')
      curves.append(summary['evaluation']['new_clients']['curve'])
      assert len(curves[-1]) == 51
    means = [
        statistics.fmean(curve[steps] for curve in curves)
        for steps in (0, 1, 2, 5, 10, 20, 50)
    ]
    expected.append([setting, row] + [f'{100 * mean:.2f}' for mean in means])
  assert sorted(_readme_table('**The personalization curve**')) == sorted(
      expected
  )


def test_sizes_of_clients():
  entries = _entries('cafeme_rmnist_local_size')
  sizes = list(dict.fromkeys(setting for setting, _ in entries))
  expected = [
      [row] + [_mean(entries[size, row]['After 50 steps']) for size in sizes]
      for row in dict.fromkeys(row for _, row in entries)
  ]
  assert _readme_table('**Sizes of clients**') == expected


def test_heads_of_fed_rep():
  expected = [
      [row, setting.removesuffix(' rounds'), _mean(cell['After 50 steps'])]
      for (setting, row), cell in _entries('cafeme_fed_rep_head').items()
  ]
  found = _readme_table('**What the head of FedRep is**')
  assert [[row, rounds, ours] for row, rounds, _, ours, _ in found] == expected
  for _, _, theirs, ours, difference in found:
    assert difference == f'{float(ours) - float(theirs):+.2f}'


_GROUPS_OF_OMNIGLOT = ('IID', 'Non-IID', 'Mixed IID', 'Mixed non-IID')


def test_best_rounds_of_new_groups():
  expected = []
  runs = _runs('frl_omniglot')
  for key, cell in _entries('frl_omniglot').items():
    (run,) = runs[key]
    best = results.read_json(run / 'summary.json')['best_round']
    if best > 1:  # FedAvg prepares nothing, and has one.
      expected.append(
          [f'{key[1]} (round {best:,})']
          + [_spread(cell[f'{g}, best round']) for g in _GROUPS_OF_OMNIGLOT]
      )
  found = _readme_table('### FRL on Omniglot', index=1)
  assert sorted(found) == sorted(expected)


def test_accuracy_against_rounds_of_preparation():
  expected = []
  for (_, row), (run,) in _runs('frl_omniglot').items():
    metrics = metric_writers.read_metrics(run / 'metrics.csv')
    if len(metrics['round']) > 1:
      assert metrics['round'] == [200, 400, 600, 800, 1000, 1200]
      column = metrics['validation_groups/accuracy']
      expected.append([row] + [f'{100 * value:.2f}' for value in column])
  found = _readme_table('### FRL on Omniglot', index=2)
  assert sorted(found) == sorted(expected)


def test_the_spread_of_classes_in_the_embedding():
  lines = []
  for analysis, directory, number, form in (
      ('nvar', 'nvar_metavers_cifar10', 'trained', '.2f'),
      ('embedding_map', 'embedding_map_metavers_cifar10', 'silhouette', '.3f'),
  ):
    path = _ROOT / 'results' / 'analyses' / directory / f'{analysis}.json'
    runs = {
        run['algorithm']: run for run in json.loads(path.read_text())['runs']
    }
    lines.append(
        [
            format(round(runs[name][number], 3) + 0.0, form)  # No -0.000.
            for name in (
                'metavers',
                'metavers_ce',
                'metavers_triplet',
                'fed_avg',
                'per_fed_avg',
            )
        ]
    )
  assert [line[1:] for line in _readme_table('### Analyses')] == lines


def test_the_first_command():
  (run,) = _runs('digits')['New groups', 'frl']
  summary = results.read_json(run / 'summary.json')
  found = summary['evaluation']['new_groups']
  frl, untrained, _ = _readme_table('### Pairs of digits')
  for numbers, cell in (
      (found, frl[1]),
      (found['references']['untrained'], untrained[1]),
  ):
    assert cell == (
        f'{100 * numbers["accuracy_mean"]:.2f} +-'
        f' {100 * numbers["accuracy_half_width_95"]:.2f}'
    )


def _best(entries):
  """Name of a method -> its best entry of a search, the first of equal ones."""
  best = {}
  for entry in entries:
    method = entry['row'].partition('=')[0].rpartition(' ')[0]
    if method not in best or entry['mean'] > best[method]['mean']:
      best[method] = entry
  return best


def _whole_search(name):
  """Entries of a search, all of whose rows have run."""
  entries = _kept_entries(_ROOT / 'results' / name)
  assert {entry['row'] for entry in entries} == {
      row.name for row in experiments.get(name).rows
  }
  return entries


def test_demonstrations_have_what_the_search_found():
  runs = _runs('digits_search')
  best = _best(_whole_search('digits_search'))
  assert len(best) > 16
  for algorithm, entry in best.items():
    (run,) = runs[entry['setting'], entry['row']]
    found = results.read_json(run / 'config.json')['config']
    found = run_config.upgrade(found)['hparams']
    demo = dataclasses.asdict(registry.get(algorithm).presets['demo'])
    for hparams in (found, demo):
      hparams.pop('num_clients', None)  # A run fills in its own.
    assert demo == found, algorithm


def test_every_kept_configuration_is_read():
  """But of the FedRep that is an algorithm of its own by now."""
  found = [results.read_json(p) for p in _ROOT.glob('results/**/config.json')]
  assert len(found) > 400
  for values in (content['config'] for content in found):
    upgraded = run_config.upgrade(values)
    if 'client_optimizer_state' not in upgraded['hparams'].keys() & (
        registry.get('fed_rep').former_fields
    ):
      config = run_config.from_json(values)
      assert config.to_json().items() >= upgraded.items()


def test_rows_on_omniglot_have_what_the_search_found():
  best = _best(_whole_search('frl_omniglot_search'))
  assert len(best) > 2
  rows = {row.name: row for row in experiments.get('frl_omniglot').rows}
  for method, entry in best.items():
    rates = entry['row'].removeprefix(method).split()
    hparams = tables.in_force(rows[method].flags)['--hparams']
    assert hparams.endswith(','.join(rates)), method


def test_the_scaling_of_mnist_is_what_the_search_found():
  search = experiments.get('fedmeta_per_mnist_scaling_search')
  entries = _whole_search(search.name)
  assert len(entries) == len(search.rows) * len(search.settings)
  scalings = {}
  for entry in entries:
    scalings.setdefault(entry['setting'], []).append(entry['mean'])
  means = {name: statistics.mean(found) for name, found in scalings.items()}
  best = max(means, key=means.get)
  for run in sum(_runs('fedmeta_per_mnist').values(), []):
    config = results.read_json(run / 'config.json')['config']
    assert config['dataset_options']['scaling'] == best
