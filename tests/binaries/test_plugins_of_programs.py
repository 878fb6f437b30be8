"""An algorithm, a network, data, a partition and a table from one file outside.

It lies in the working directory, where installed commands do not look by
themselves, and neither do the programs as they are called here.
"""

import json

import program_calls

_THEIRS = """
import dataclasses

import numpy as np

from tff_meta import datasets
from tff_meta import models
from tff_meta import registry
from tff_meta.baselines import fed_per
from tff_meta.comparison import tables
from tff_meta.data import partitioners


def __getattr__(name):  # Its presets and functions are FedPer's.
  return getattr(fed_per, name)


def deal(labels, num_clients, seed, turn: int = 0):
  del seed
  rows = np.roll(np.arange(len(labels)), turn)
  return [rows[client::num_clients] for client in range(num_clients)]


registry.register_algorithm(
    dataclasses.replace(
        registry.get('fed_per'), name='their_per', module_name=__name__
    )
)
models.register_model('their_mlp', models.MODELS['mlp'])
datasets.register_dataset(
    dataclasses.replace(
        datasets.get('synthetic'), name='their_blobs', default_model='their_mlp'
    )
)
partitioners.register_partition('their_deal', deal)
mean = tables.Measure('Mean', 'evaluation/known_clients/accuracy_mean')
table = tables.Table(
    name='their_table',
    title='Theirs',
    source='ours',
    settings=(tables.Setting('Known', (mean,)),),
    rows=(tables.Row('their_per', ('--algorithm=their_per',)),),
    scales={'smoke': tables.Scale(seeds=(0,), flags=('--rounds=2',))},
    flags=(
        '--dataset=their_blobs',
        '--dataset_options=num_classes=4',
        '--partition=their_deal',
        '--partition_options=turn=3',
        '--preset=demo',
    ),
)
tables.register_table(table)
"""
_TABLE = """
import dataclasses

import theirs

TABLES = (dataclasses.replace(theirs.table, name='table_of_a_file'),)
"""


def test_everything_comes_from_outside(tmp_path):
  """A table is run, a run of it goes on, is evaluated and is analyzed."""
  module = tmp_path / 'theirs.py'
  module.write_text(_THEIRS)
  (tmp_path / 'table.py').write_text(_TABLE)
  run = 'runs/compare_table_of_a_file_smoke/known/their_per/seed_0/run'

  def call(program, *calls):
    return program_calls.call_all(program, calls, tmp_path)

  shown, table = call(
      'compare',
      ('--plugins=theirs', '--list'),
      ('--plugins=theirs', '--experiment=table.py', '--scale=smoke'),
  )
  rows = next(x for x in shown[1].splitlines() if 'rows: frl, met' in x)
  assert rows.endswith(', their_per') and '\ntheir_table\n' in shown[1]
  assert table[0] == 0 and ' --plugins=theirs' in table[1], table[2]
  content = json.loads((tmp_path / run / 'config.json').read_text())
  assert content['config']['plugins'] == ['theirs']
  assert content['config']['model'] == 'their_mlp'

  module.write_text(f'{_THEIRS}\n# Changed.\n')
  train = (
      '--algorithm=their_per',
      '--dataset=their_blobs',
      '--dataset_options=num_classes=4',
      '--partition=their_deal',
      '--partition_options=turn=3',
      '--preset=demo',
      '--noreferences',
      f'--output_dir={run}',
  )
  again, shown, misspelt = call(
      'train',
      (*train, '--rounds=3'),
      ('--list',),
      (*train, '--hparams=learningrate=1'),
  )
  assert again[0] == 0 and 'Continuing after round 2' in again[2], again[2]
  assert 'has changed since (versions.plugin theirs: "sha256 ' in again[2]
  assert 'their_per ' in shown[1] and 'their_blobs ' in shown[1]
  assert misspelt[0] == 2 and "did you mean 'learning_rate'" in misspelt[2]

  moved = tmp_path / 'moved/theirs.py'
  moved.parent.mkdir()
  module.rename(moved)
  lacking, found = call(
      'evaluate',
      (f'--run_dir={run}',),
      (f'--run_dir={run}', '--plugins=moved.theirs'),
  )
  assert lacking[0] == 2 and lacking[2].count('\n') == 1
  assert f"the plugin 'theirs' of {run}/config.json, found Modu" in lacking[2]
  assert found[0] == 0 and 'known_clients (10 clients' in found[1], found[2]

  moved.rename(module)
  (analysis,) = call('analyze', ('--analysis=nvar', f'--run_dir={run}'))
  assert analysis[0] == 0 and 'their_per: nVAR' in analysis[1], analysis[2]
