"""Runs whose clients are not always there."""

import json

import numpy as np
import pytest

from binaries import train
from tff_meta import aggregation
from tff_meta.training import metric_writers

_FLAGS = (
    *('--algorithm=fed_rep', '--dataset=synthetic', '--model=mlp'),
    *('--num_clients=40', '--clients_per_round=10', '--protocol=none'),
    *('--absent_clients=0.3', '--late_clients=0.2', '--slow_clients=0.3'),
)


@pytest.mark.ci
@pytest.mark.parametrize('name', aggregation.BY_NAME)
def test_clients_may_be_missing_under_every_aggregation(call, tmp_path, name):
  flags = (*_FLAGS, '--rounds=4', f'--aggregation={name}')
  code, _, err = call(train, *flags, f'--output_dir={tmp_path}')
  assert code == 0, err
  columns = metric_writers.read_metrics(tmp_path / 'metrics.csv')
  absent, late, slow = (
      np.array(columns[f'train/num_{kind}_clients'])
      for kind in ('absent', 'late', 'slow')
  )
  assert absent.any() and late.any() and slow.any()
  summary = json.loads((tmp_path / 'summary.json').read_text())
  for way in ('down', 'up'):
    total = summary['training_bytes'][way]
    assert total == sum(columns[f'train/bytes_{way}'])
    each = summary['client_bytes_per_round'][way]
    left = 40 - absent.sum() - (late.sum() if way == 'up' else 0)
    assert total == each * left
  if name != 'dp':  # Which withholds how many there were.
    expected = 10 - absent - late
    np.testing.assert_allclose(
        columns['train/num_clients'], expected, rtol=0.01
    )


@pytest.mark.ci
def test_who_is_slow_stays_so_for_an_episode(call, tmp_path):
  code, _, err = call(
      train,
      *('--algorithm=frl', '--protocol=none', '--eval_every=0'),
      *('--rounds=12', '--clients_per_round=30', '--slow_clients=0.4'),
      f'--output_dir={tmp_path}',
  )
  assert code == 0, err
  columns = metric_writers.read_metrics(tmp_path / 'metrics.csv')
  episodes = np.array(columns['train/num_slow_clients']).reshape([3, 4])
  np.testing.assert_array_equal(episodes, episodes[:, :1].repeat(4, 1))
  assert len(set(episodes[:, 0])) > 1


def test_a_program_has_all_its_clients(call, tmp_path):
  code, _, err = call(
      train, *_FLAGS, '--driver=program', f'--output_dir={tmp_path}/run'
  )
  assert code == 2 and "found 'program'" in err.splitlines()[-1]
