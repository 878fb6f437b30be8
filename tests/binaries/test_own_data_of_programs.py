"""A table of one's own is described, trained on and evaluated."""

import json

import numpy as np
import pytest

from binaries import evaluate
from binaries import train

_CLIENTS = ('ann', 'bob', 'cyd', 'dan', 'eve')
_DATA = (
    '--dataset=csv:own.csv',
    '--dataset_options=client=who,label=kind,features=(a,b)',
)
_TRAIN = (
    *_DATA,
    '--algorithm=fed_per',
    '--num_new_clients=1',
    '--clients_per_round=2',
    '--noreferences',
)
_RUN = 'runs/own_fed_per'


def _table(seed):
  rng = np.random.default_rng(seed)
  lines = ['a,b,note,kind,who']
  for who in _CLIENTS:
    for kind in ('oak', 'elm') * 10:
      a, b = rng.normal(3 * (kind == 'oak'), 1, 2)
      lines.append(f'{a},{b},some text,{kind},{who}')
  return '\n'.join(lines)


@pytest.mark.ci
def test_a_table_of_ones_own(call, tmp_path, monkeypatch):
  path = tmp_path / 'own.csv'
  path.write_text(_table(0))
  monkeypatch.chdir(tmp_path)

  shown = call(train, *_DATA, '--describe')
  assert shown[0] == 0 and 'own.csv: 5 clients, 2 classes, 100' in shown[1]
  for flags in ('--describe',), ('--algorithm=fed_avg',):
    among = call(train, *_DATA, '--output_dir=.', *flags)
    assert among[0] != 0 and 'hold a run, found own.csv. Tip: g' in among[2]
  dealt = call(train, *_TRAIN, '--partition=iid')
  assert dealt[0] == 2 and "'by_writer' with the data set 'csv:" in dealt[2]
  trained = call(train, *_TRAIN, '--rounds=2')
  assert trained[0] == 0, trained[2]
  assert 'known_clients (4 clients' in trained[1]
  assert 'new_clients (1 client,' in trained[1]
  assert [p.name for p in tmp_path.iterdir()] == ['own.csv', 'runs']
  known = (tmp_path / _RUN / 'clients_known_clients.csv').read_text()
  assert sum(f'\n{who},' in known for who in _CLIENTS) == 4
  config = json.loads((tmp_path / _RUN / 'config.json').read_text())
  assert config['data']['class_names'] == ['elm', 'oak']
  assert config['config']['test_fraction'] == 0.2

  path.write_text(_table(1))
  changed = call(train, *_TRAIN, '--rounds=3')
  assert changed[0] == 2 and 'another: the data have changed.' in changed[2]
  moved = tmp_path / 'moved/own.csv'
  moved.parent.mkdir()
  moved.write_text(_table(0))
  others = call(evaluate, f'--run_dir={_RUN}')
  assert others[0] == 1 and others[2].count('others in csv:own.csv. No') == 1
  assert 'fingerprint' not in others[2] and '--output_dir' not in others[2]
  same = call(evaluate, f'--run_dir={_RUN}', f'--data_dir={moved.parent}')
  assert same[0] == 0 and 'known_clients (4 clients' in same[1]
