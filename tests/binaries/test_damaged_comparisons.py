"""No byte of a comparison's directory brings a wrong number into its report."""

import collections
import hashlib
import json
import random
import re
import shutil

import mutations
import program_calls
import pytest

from binaries import experiments
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.training import atomic_files
from tff_meta.training import sealed_json

_FLAGS = (
    '--experiment=digits',
    '--scale=smoke',
    '--rows=fed_avg,local',
    '--settings=Known clients',
    '--seeds=0,1',
    '--report_only',
)


def _report(directories):
  """Returns the exit code and the messages for each directory."""
  calls = [[*_FLAGS, f'--output_dir={d}'] for d in directories]
  return [
      (code, err) for code, _, err in program_calls.call_all('compare', calls)
  ]


def _pictures(root):
  page = (root / 'report.html').read_text()
  return re.findall(r'base64,([^"]*)', page)


def _table(root):
  return json.loads((root / 'table.json').read_text())


def _entries(table):
  return {(e['row'], e['measure']): e for e in table['entries']}


_ROWS = ['fed_avg', 'local']


def _write_comparison(root):
  """Makes a comparison of finished runs, as the programs write them.

  Two rows with two seeds, each with two clients and evaluations on the way.
  """
  digits = experiments.get('digits')
  root.mkdir()
  runner.claim(root, experiment='digits', scale='smoke')
  for cell in tables.cells(
      digits,
      'smoke',
      rows=_ROWS,
      settings=['Known clients'],
      seeds=[0, 1],
  ):
    folder = runner.CellFolder(root, cell)
    folder.write(runner.Outcome('finished', 1800.0, flags=cell.flags))
    folder.run.mkdir()
    accuracy = 0.75 + cell.seed / 8 - _ROWS.index(cell.row) / 4
    apart = (1 + _ROWS.index(cell.row)) / 16
    evaluation = {
        'accuracy_mean': accuracy,
        'accuracy_micro': accuracy,
        'accuracy_std': 0.25,
        'macro_f1_mean': accuracy - 0.125,
        'curve': [0.5, accuracy],
        'references': {'untrained': {'accuracy_mean': 0.125}},
    }
    content = {
        'metrics.csv': (
            'round,train/loss,known_clients/accuracy\n'
            f'1,2.5,{accuracy / 2}\n2,1.25,\n3,0.75,{accuracy}\n'
        ),
        'clients_known_clients.csv': (
            'client_id,num_support,num_examples,accuracy\n'
            f'a,7,16,{accuracy - apart}\nb,7,16,{accuracy + apart}\n'
        ),
    }
    for name, text in content.items():
      (folder.run / name).write_text(text)
    summary = {
        'rounds': 3,
        'seed': cell.seed,
        'evaluation': {'known_clients': evaluation},
        'files': {
            name: hashlib.sha256(text.encode()).hexdigest()
            for name, text in content.items()
        },
    }
    config = {'git_commit': 'a' * 40, 'data': {'fingerprint': 'b' * 64}}
    for name, value in (('summary.json', summary), ('config.json', config)):
      atomic_files.write_json(folder.run / name, sealed_json.seal(value))


def _damage(whole, root, seed, kind):
  """Makes a damaged copy; returns what is damaged, in words."""
  rng = random.Random(seed)
  shutil.copytree(whole, root)
  files = [p for p in sorted(root.rglob('*')) if p.is_file()]
  path, kind = rng.choice(files), kind or rng.choice(mutations.KINDS)
  mutations.mutate(path, kind, rng)
  return f'{seed}: {kind} of {path.relative_to(root)}'


def _check_made_of_it(found, expected, what):
  """Checks differences and curves, of which some may be gone."""
  pairs = {p['measure']: p for p in expected['paired']}
  for pair in found['paired']:
    right = pairs[pair['measure']]
    assert pair['values'].items() <= right['values'].items(), what
    assert pair == right or pair['problems'] or len(pair['values']) < 2, what
  if found['progress']:
    ours, right = (t['progress']['Known clients'] for t in (found, expected))
    for row, of_seed in ours['rows'].items():
      for seed, course in of_seed.items():
        assert course['area'] == right['rows'][row][seed]['area'], what


def _check(root, what, code, messages, expected, pictures):
  """Checks a report, or the line that says why there is none."""
  assert code in (0, 1, 2), f'{what}: {messages}'
  print(f'{what}: {messages.strip() or code}')
  if code:
    assert messages.count('\n') == 1 and messages.startswith('Error: '), what
    return 'refused'
  table = _table(root)
  _check_made_of_it(table, expected, what)
  found, whole = _entries(table), _entries(expected)
  assert found.keys() == whole.keys()
  for key, entry in found.items():
    right = whole[key]['values']
    assert entry['values'].items() <= right.items(), what
    lost = right.keys() - entry['values'].keys()
    # A number that is not there says why.
    assert all(f'seed {seed} ' in entry['missing'] for seed in lost), what
    if not lost:
      assert entry == whole[key], what
  if found != whole:
    return 'without a number, which says why'
  assert table['paired'] == expected['paired'], what
  assert table['progress'] == expected['progress'], what
  assert _pictures(root) == pictures, what
  return 'right'


def _check_all(tmp_path, seeds, digits):
  """Damages copies: in any way, and by a digit, which looks right."""
  whole = tmp_path / 'whole'
  _write_comparison(whole)
  ((code, messages),) = _report([whole])
  assert code == 0, messages
  expected = _table(whole)
  assert all(len(e['values']) == 2 for e in expected['entries'] if e['hours'])
  (pair, *_) = expected['paired']
  assert pair['half_width_95_over_units'] > 0
  assert set(expected['progress']['Known clients']['rows']) == set(_ROWS)
  pictures = _pictures(whole)
  assert len(pictures) == 5  # Accuracy, its curve, losses, clients, steps.
  for name in ('table.md', 'table.csv', 'table.json', 'report.html'):
    (whole / name).unlink()
  damages = {}
  for kind, of_kind in ((None, seeds), ('change a digit', digits)):
    for seed in of_kind:
      root = tmp_path / f'{kind or "any"}_{seed}'.replace(' ', '_')
      damages[root] = _damage(whole, root, seed, kind)
  counts = collections.Counter()
  for root, (code, messages) in zip(damages, _report(damages), strict=True):
    outcome = _check(root, damages[root], code, messages, expected, pictures)
    counts[outcome] += 1
  print(f'{len(damages)} damaged comparisons: {dict(counts)}')
  assert counts['refused'] and counts['right']


@pytest.mark.ci
def test_a_damaged_comparison_is_right_or_refused(tmp_path):
  _check_all(tmp_path, range(8), range(10))


@pytest.mark.slow
def test_many_damaged_comparisons_are_right_or_refused(tmp_path):
  _check_all(tmp_path, range(1000, 1110), range(40))
