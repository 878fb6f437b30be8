"""The runs kept in `results` say what is made of them elsewhere."""

import dataclasses
import json
import pathlib
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys

import pytest

from binaries import experiments
from binaries.experiments import claims
from binaries.experiments import users
from tff_meta import registry
from tff_meta.comparison import record
from tff_meta.comparison import report
from tff_meta.comparison import results
from tff_meta.comparison import runner
from tff_meta.comparison import searches
from tff_meta.comparison import tables
from tff_meta.training import checkpoints
from tff_meta.training import restored_run
from tff_meta.training import run_config
from tff_meta.training import run_directory

_ROOT = pathlib.Path(__file__).parents[1]
_KEPT = sorted(path.parent for path in _ROOT.glob('results/*/comparison.json'))


def _kept_entries(root):
  """Entries of a kept table that have run, as they are in table.json."""
  table = json.loads((root / 'table.json').read_text())
  return [entry for entry in table['entries'] if entry['mean'] is not None]


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


_SENT = [
    pytest.param(
        path.parent,
        setting,
        row,
        # Each builds a process.
        marks=() if is_first else pytest.mark.slow,
        id=f'{path.parent.name}, {setting}, {row}',
    )
    for path in sorted(_ROOT.glob('results/*/traffic.json'))
    for setting, rows in json.loads(path.read_text()).items()
    for row in rows
    for is_first in [(setting, row) == ('50 clients', 'MetaVers')]
]


@pytest.mark.parametrize(('root', 'setting', 'row'), _SENT)
def test_kept_bytes_are_those_of_the_process(root, setting, row):
  program = runpy.run_path(str(_ROOT / 'docs/traffic_of_kept_runs.py'))
  kept = json.loads((root / 'traffic.json').read_text())[setting][row]
  runs = _runs(root.name)[setting, row]
  for run in runs:
    config = results.read_json(run / 'config.json')['config']
    assert kept['clients'] == config['clients_per_round']
  assert kept == program['of_run'](results.read_json(runs[0] / 'config.json'))


_MODELS = sorted(
    path.parent for path in _ROOT.glob('results/models/*/config.json')
)


@pytest.mark.parametrize('root', _MODELS, ids=lambda root: root.name)
def test_a_kept_model_is_that_of_the_last_round(root):
  directory = run_directory.RunDirectory(root)
  config = restored_run.read_config(directory)
  assert config.data.data_dir is None
  store = checkpoints.CheckpointStore(directory.checkpoints)
  assert len(store.paths()) == 1
  kept = store.load_latest(pytest.fail)
  assert kept.position.rounds == config.training.rounds


@pytest.mark.slow
@pytest.mark.parametrize('root', _MODELS, ids=lambda root: root.name)
def test_a_kept_model_is_as_good_as_its_run_was(root, real_data_dir, tmp_path):
  copy = shutil.copytree(root, tmp_path / 'run')
  program = [sys.executable, '-m', 'binaries.evaluate', f'--run_dir={copy}']
  subprocess.run([*program, f'--data_dir={real_data_dir}'], check=True)
  summary = json.loads((root / 'summary.json').read_text())
  for protocol, was in summary['evaluation'].items():
    found = json.loads((copy / 'evaluation' / f'{protocol}.json').read_text())
    assert found['accuracy_mean'] == pytest.approx(was['accuracy_mean'], 1e-6)


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


def test_runs_are_as_they_are_kept_and_can_be_read_again():
  """Not copied by hand: that has places in it, and names what is not there."""
  num_runs = 0
  for root in _KEPT:
    for cell in _kept_cells(root):
      run = runner.CellFolder(root, cell).run
      found = {path.name: path.read_bytes() for path in run.iterdir()}
      assert found == record._small_files(root, cell), run
      num_runs += 1
  assert num_runs > 500


def test_speed_is_that_of_the_kept_runs():
  """Tables of earlier definitions have none: they are not written again."""
  num_settings = 0
  for root in _KEPT:
    if not (root / 'EARLIER.md').exists():
      cells = _kept_cells(root)
      found = report.Comparison(_table(root), 'cpu', cells, [], [], '')
      kept = json.loads((root / 'table.json').read_text())['progress']
      for setting in dict.fromkeys(cell.setting for cell in cells):
        speed = found.progress(root, setting)
        assert kept.get(setting) == (speed and speed.to_json()), root.name
        num_settings += setting in kept
  assert num_settings > 12


@pytest.mark.ci
def test_paired_differences_are_of_the_kept_runs():
  """Those of earlier definitions have none: they are not written again."""
  num_pairs = 0
  for root in _KEPT:
    if not (root / 'EARLIER.md').exists():
      kept = json.loads((root / 'table.json').read_text())['paired']
      num_pairs += len(kept)
      table, cells = _table(root), _kept_cells(root)
      entries = results.collect(root, table, cells)
      found = report.Comparison(table, 'cpu', cells, entries, [], '').paired
      assert kept == [
          {'setting': setting} | pair.to_json()
          for setting, measures in found.items()
          for pairs in measures
          for pair in pairs
      ], root.name
  assert num_pairs > 300


def _cells_of_commands():
  """Experiment -> folders of the cells that commands of the results run."""
  pages = sorted((_ROOT / 'docs/results').glob('*.md'))
  text = ''.join(page.read_text() for page in pages)
  blocks = re.findall(r'```sh\n(.*?)```', text, re.DOTALL)
  folders = {}
  for line in ''.join(blocks).replace('\\\n', '').splitlines():
    run, python, option, module, *given = shlex.split(line)
    assert (run, python) == ('./run', 'python')
    if (option, module) != ('-m', 'binaries.compare'):
      continue
    values = dict(flag.removeprefix('--').split('=', 1) for flag in given)
    values.pop('data_dir', None)
    values.pop('processes', None)
    values.pop('output_dir', None)
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


def _best(entries):
  """Name of a method -> its best entry of a search, the first of equal ones.

  One that has diverged is not taken.
  """
  best = {}
  for entry in entries:
    method = entry['row'].partition('=')[0].rpartition(' ')[0]
    if 'diverged' in entry:
      continue
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


@pytest.mark.ci
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


@pytest.mark.parametrize('name', ['frl_omniglot', 'fedmeta_per_mnist_rates'])
def test_rows_have_what_the_search_found(name):
  best = _best(_whole_search(f'{name}_search'))
  assert len(best) > 2
  rows = {row.name: row for row in experiments.get(name).rows}
  for method, entry in best.items():
    rates = entry['row'].removeprefix(method).split()
    hparams = tables.in_force(rows[method].flags)['--hparams']
    found = hparams.removeprefix('--hparams=').split(',')
    assert set(rates) <= set(found), method


@pytest.mark.parametrize('on', [users.WRITERS, users.DRAWERS])
def test_methods_of_which_most_tries_diverge_have_six_more(on):
  runs = _runs(f'{on.name}_search')
  found = set()
  for method, tried in on.candidates().items():
    diverged = 0
    for hparams in tried[:6]:
      row = searches.row_name(method, hparams)
      for run in runs.get(('Validation examples', row), []):
        diverged += results.has_diverged(run)
    if diverged > 3:
      found.add(method)
      assert len(tried) == 12
  assert found == set(on.more)


@pytest.mark.parametrize('on', [users.WRITERS, users.DRAWERS])
def test_methods_on_users_have_what_the_search_found(on):
  """And methods that were not searched have the rates of the demonstration."""
  search = _ROOT / 'results' / f'{on.name}_search'
  entries = _kept_entries(search) if search.exists() else []
  assert on is users.DRAWERS or entries == _whole_search(search.name)
  best = _best(entries)
  for row in experiments.get(on.name).rows:
    found, before = (
        tables.in_force(flags)['--hparams'].removeprefix('--hparams=')
        for flags in (row.flags, on.row(row.name, on.rounds).flags)
    )
    expected = dict(pair.split('=') for pair in before.split(','))
    method = users.AS.get(row.name, row.name)
    if method in best:
      rates = best[method]['row'].removeprefix(method).split()
      expected |= dict(pair.split('=') for pair in rates)
    assert dict(pair.split('=') for pair in found.split(',')) == expected


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


def test_claims_are_of_rows_that_there_are():
  """A misspelt one would be taken for one that has not run."""
  (claim, *_) = (claim for claim in claims.CLAIMS if claim.paper == 'FedEC')
  comparison = claim.comparisons[0]
  assert (comparison.row, comparison.other) == ('FedEC', 'FedEC-wo')
  for change in (
      {'row': 'FedEC-vo'},
      {'other': 'MetaVers'},
      {'setting': 'CIFAR-10'},
      {'measure': 'Last'},
      {'other_experiment': 'digits'},
  ):
    with pytest.raises(ValueError, match='found no such number'):
      dataclasses.replace(comparison, **change)


def test_claims_are_what_the_numbers_of_the_papers_say():
  for claim in claims.CLAIMS:
    for comparison in claim.comparisons:
      difference = comparison.published
      assert difference is None or difference > claim.margin, comparison
