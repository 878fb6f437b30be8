"""A run does not depend on the order in which sets of names are walked."""

import os
import pathlib
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from tff_meta.training import checkpoints

_ROOT = pathlib.Path(__file__).parents[2]
_TIMEOUT_SECONDS = 900  # Shared machines can be slow.
_FLAGS = {
    'frl': ['--eval_groups=2', '--num_clients=10'],
    'metavers': ['--test_fraction=0.3'],
    'cafeme': ['--model=modulated_mlp', '--preset=release'],
    'fedec': ['--test_fraction=0.3'],
    'fedmeta_per': ['--test_fraction=0.3'],
}


def _train(directory, algorithm, hash_seed):
  """Returns all that a run leaves that is no time."""
  done = subprocess.run(
      [
          *(sys.executable, '-m', 'binaries.train'),
          f'--algorithm={algorithm}',
          *('--dataset=synthetic', '--model=mlp', '--preset=demo'),
          *('--rounds=4', '--num_clients=8', '--clients_per_round=4'),
          *_FLAGS[algorithm],
          f'--output_dir={directory}',
      ],
      cwd=_ROOT,
      env=os.environ | {'PYTHONHASHSEED': str(hash_seed)},
      capture_output=True,
      text=True,
      timeout=_TIMEOUT_SECONDS,
  )
  assert done.returncode == 0, done.stderr
  store = checkpoints.CheckpointStore(directory / 'checkpoints')
  kept = []
  if (directory / 'client_states.sqlite').exists():
    with sqlite3.connect(directory / 'client_states.sqlite') as states:
      kept = states.execute(
          'SELECT * FROM states ORDER BY client_id, round'
      ).fetchall()
  return (
      store.load_latest(pytest.fail).server_state,
      (directory / 'metrics.csv').read_bytes(),
      kept,
  )


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', _FLAGS)
def test_another_hash_seed_same_bits(tmp_path, algorithm):
  """Strings are hashed otherwise, so that sets of them have another order."""
  first, *others = (
      _train(tmp_path / str(seed), algorithm, seed) for seed in (0, 1, 2)
  )
  assert first[1].count(b'\n') == 5
  for other in others:
    np.testing.assert_equal(other, first)
