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
    '--rows=fed_avg',
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


def _entries(root):
  return json.loads((root / 'table.json').read_text())['entries']


def _write_comparison(root):
  """Makes a comparison of two finished runs, as the programs write them."""
  digits = experiments.get('digits')
  root.mkdir()
  runner.claim(root, experiment='digits', scale='smoke')
  for cell in tables.cells(
      digits,
      'smoke',
      rows=['fed_avg'],
      settings=['Known clients'],
      seeds=[0, 1],
  ):
    folder = runner.CellFolder(root, cell)
    folder.write(runner.Outcome('finished', 1800.0, flags=cell.flags))
    folder.run.mkdir()
    accuracy = 0.75 + cell.seed / 8
    evaluation = {
        'accuracy_mean': accuracy,
        'accuracy_micro': accuracy,
        'accuracy_std': 0.25,
        'macro_f1_mean': accuracy - 0.125,
        'curve': [0.5, accuracy],
        'references': {'untrained': {'accuracy_mean': 0.125}},
    }
    content = {
        'metrics.csv': 'round,train/loss\n1,2.5\n2,1.25\n3,0.75\n',
        'clients_known_clients.csv': f'client_id,accuracy\na,{accuracy}\n',
    }
    for name, text in content.items():
      (folder.run / name).write_text(text)
    summary = {
        'rounds': 3,
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


def _check(root, what, code, messages, expected, pictures):
  """Checks a report, or the line that says why there is none."""
  assert code in (0, 1, 2), f'{what}: {messages}'
  print(f'{what}: {messages.strip() or code}')
  if code:
    assert messages.count('\n') == 1 and messages.startswith('Error: '), what
    return 'refused'
  found = {(e['row'], e['measure']): e for e in _entries(root)}
  assert found.keys() == expected.keys()
  for key, entry in found.items():
    right = expected[key]['values']
    assert entry['values'].items() <= right.items(), what
    lost = right.keys() - entry['values'].keys()
    # A number that is not there says why.
    assert all(f'seed {seed} ' in entry['missing'] for seed in lost), what
    if not lost:
      assert entry == expected[key], what
  if found != expected:
    return 'without a number, which says why'
  assert _pictures(root) == pictures, what
  return 'right'


def _check_all(tmp_path, seeds, digits):
  """Damages copies: in any way, and by a digit, which looks right."""
  whole = tmp_path / 'whole'
  _write_comparison(whole)
  ((code, messages),) = _report([whole])
  assert code == 0, messages
  expected = {(e['row'], e['measure']): e for e in _entries(whole)}
  assert all(len(e['values']) == 2 for e in expected.values() if e['hours'])
  pictures = _pictures(whole)
  assert len(pictures) == 4  # Accuracy, losses, clients, steps.
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
