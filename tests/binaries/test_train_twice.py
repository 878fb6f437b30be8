"""The same command twice, of every algorithm: the same bytes."""

import json
import pathlib
import subprocess
import sys

import pytest

from tff_meta import registry

_ROOT = pathlib.Path(__file__).parents[2]
_ROUNDS = 4  # One FRL episode.
_FLAGS = {'one_shot_ft': ['--group_clients=21']}  # Of whom it keeps ten.


def _start(directory, spec):
  return subprocess.Popen(
      [
          *(sys.executable, '-m', 'binaries.train'),
          f'--algorithm={spec.name}',
          '--preset=release',
          '--dataset=synthetic',
          '--dataset_options=noise=3.0',
          f'--model={spec.model or "conv4"}',
          '--num_clients=10',
          '--clients_per_round=4',
          f'--rounds={_ROUNDS}',
          f'--checkpoint_every={_ROUNDS}',
          '--eval_groups=2',
          *_FLAGS.get(spec.name, []),
          f'--output_dir={directory}',
      ],
      cwd=_ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
  )


def _without_times(value):
  """Without what is measured in seconds, and the checksum over it."""
  if isinstance(value, dict):
    return {
        name: _without_times(part)
        for name, part in value.items()
        if 'seconds' not in name and name != 'sha256'
    }
  return value


def _results(directory):
  """What the seed determines of a run's files."""
  files = [directory / 'metrics.csv', *directory.glob('checkpoints/*.ckpt')]
  files += [*directory.glob('clients_*.csv'), *directory.glob('groups_*.csv')]
  results = {file.name: file.read_bytes() for file in files}
  assert len(results) > 1
  summary = json.loads((directory / 'summary.json').read_text())
  return results, _without_times(summary)


@pytest.mark.slow
@pytest.mark.parametrize(
    'spec', registry.ALGORITHMS.values(), ids=lambda spec: spec.name
)
def test_a_command_twice_has_the_same_result(spec, tmp_path):
  """Both at the same time, so that their threads are in each other's way."""
  directories = [tmp_path / 'one', tmp_path / 'other']
  for process in [_start(directory, spec) for directory in directories]:
    _, err = process.communicate()
    assert process.returncode == 0, err.decode()
  one, other = map(_results, directories)
  assert one == other
