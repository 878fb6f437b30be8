"""No byte of a run makes `evaluate` or `analyze` wrong, or end in a traceback.

What they compute with is looked at 500 times in tests/training; this is the
programs themselves, fewer times.
"""

import collections
import json
import pathlib
import random
import shutil
import subprocess
import sys

import mutations
import program_calls
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_TIMEOUT_SECONDS = 900  # Shared machines can be slow.
# FedEC's clients keep their models, which its analysis of variances needs.
_TRAIN = (
    '--algorithm=fedec',
    '--dataset=synthetic',
    '--dataset_options=noise=3.0',
    '--model=mlp',
    '--preset=demo',
    '--test_fraction=0.3',
    '--num_clients=6',
    '--clients_per_round=3',
    '--rounds=5',
    '--checkpoint_every=1',
    '--protocol=known_clients',
)


def _without_times(value):
  if isinstance(value, dict):
    skipped = ('seconds', 'sha256', 'run_dir', 'git', 'versions')
    return {
        k: _without_times(v)
        for k, v in value.items()
        if not any(word in k for word in skipped)
    }
  return [*map(_without_times, value)] if isinstance(value, list) else value


def _call_both(roots):
  """Root -> the exit codes, the messages and the numbers of both programs."""
  calls = {
      'evaluate': [[f'--run_dir={root}'] for root in roots],
      'analyze': [
          [
              '--analysis=nvar',
              f'--run_dir={root}',
              f'--output_dir={root}_analysis',
          ]
          for root in roots
      ],
  }
  results = {
      name: program_calls.call_all(name, called)
      for name, called in calls.items()
  }
  files = {
      'evaluate': lambda root: root / 'evaluation/known_clients.json',
      'analyze': lambda root: root.with_name(f'{root.name}_analysis')
      / 'nvar.json',
  }
  for number, root in enumerate(roots):
    for name, result in results.items():
      code, _, messages = result[number]
      numbers = None
      if code == 0:
        numbers = _without_times(json.loads(files[name](root).read_text()))
      yield root, name, code, messages, numbers


@pytest.mark.slow
def test_programs_on_damaged_runs(tmp_path):
  whole = tmp_path / 'whole'
  subprocess.run(
      [
          sys.executable,
          '-m',
          'binaries.train',
          *_TRAIN,
          f'--output_dir={whole}',
      ],
      cwd=_ROOT,
      check=True,
      capture_output=True,
      timeout=_TIMEOUT_SECONDS,
  )
  # What is right after each of the rounds whose checkpoint may be the newest.
  sound = [tmp_path / f'sound_{lost}' for lost in range(3)]
  for lost, root in enumerate(sound):
    shutil.copytree(whole, root)
    for path in sorted((root / 'checkpoints').iterdir())[3 - lost :]:
      path.unlink()
  right = collections.defaultdict(list)
  for _, name, code, messages, numbers in _call_both(sound):
    assert code == 0, messages
    right[name].append(numbers)
  assert len({json.dumps(numbers) for numbers in right['evaluate']}) == 3

  damages = {}
  for seed in range(60):
    root, rng = tmp_path / f'damaged_{seed}', random.Random(seed)
    shutil.copytree(whole, root)
    paths = [
        p
        for p in sorted(root.rglob('*'))
        if p.is_file() and not p.name.startswith(('events', '.', 'learning'))
    ]
    path, kind = rng.choice(paths), rng.choice(mutations.KINDS)
    mutations.mutate(path, kind, rng)
    damages[root] = f'{seed}: {kind} of {path.relative_to(root)}'
  counts = collections.Counter()
  for root, name, code, messages, numbers in _call_both([*damages]):
    what = f'{name}, {damages[root]}: {messages}'
    print(what)
    assert code in (0, 1, 2), what
    if code:
      assert messages.splitlines()[-1].startswith('Error: '), what
    else:
      assert numbers in right[name], what
    counts[name, code] += 1
  print(f'{len(damages)} damaged runs: {dict(counts)}')
  assert all(counts[name, 0] and counts[name, 1] for name in right)
