"""An algorithm, a network, data, a partition and a table from one file outside.

It lies in the working directory, where installed commands do not look by
themselves, and neither do the programs as they are called here.
"""

import json
import pathlib
import shlex

import program_calls
import pytest

_THEIRS = pathlib.Path(__file__).parents[1] / 'outside/theirs.py'
_TABLE = """
import dataclasses

import theirs

TABLES = (dataclasses.replace(theirs.TABLE, name='table_of_a_file'),)
"""


@pytest.mark.parametrize('flags', [(), ('--output_dir=runs/mine',)])
def test_an_algorithm_from_outside_is_known_before_the_place_of_its_run(
    tmp_path, flags
):
  (tmp_path / 'theirs.py').write_bytes(_THEIRS.read_bytes())
  call = ('--plugins=theirs', '--algorithm=theirs', '--late_clients=1', *flags)
  ((code, _, err),) = program_calls.call_all('train', [call], tmp_path)
  assert code == 2 and 'to be less than 1 together' in err, err


@pytest.mark.ci
def test_everything_comes_from_outside(tmp_path):
  """A table is run, a run of it goes on, is evaluated and is analyzed."""
  module = tmp_path / 'theirs.py'
  module.write_bytes(_THEIRS.read_bytes())
  (tmp_path / 'table.py').write_text(_TABLE)
  run = 'runs/compare_table_of_a_file_smoke/known/theirs/seed_0/run'

  def call(program, *calls):
    return program_calls.call_all(program, calls, tmp_path)

  smoke = ('--plugins=theirs', '--experiment=table.py', '--scale=smoke')
  shown, table, report = call(
      'compare', ('--plugins=theirs', '--list'), smoke, (f'--runs={run}',)
  )
  # In another process: the tables of a file get their names but once.
  (printed,) = call('compare', (*smoke, '--print_command'))
  rows = next(x for x in shown[1].splitlines() if 'rows: frl, met' in x)
  assert rows.endswith(', theirs') and '\ntheir_table\n' in shown[1]
  assert table[0] == 0 and ' --plugins=theirs' in table[1], table[2]
  # The program is not in this folder.
  page = (tmp_path / run).parents[3] / 'report.html'
  assert 'ELSEWHERE/run python -m binaries.compare' in page.read_text()
  assert report[0] == 0 and '| theirs (1) |' in report[1], report[2]
  content = json.loads((tmp_path / run / 'config.json').read_text())
  assert content['config']['plugins'] == ['theirs']
  assert content['config']['model'] == 'their_net'

  module.write_text(f'{_THEIRS.read_text()}\n# Changed.\n')
  train = (
      '--algorithm=theirs',
      '--dataset=their_blobs',
      '--partition=their_deal',
      '--partition_options=turn=3',
      '--preset=demo',
      '--noreferences',
      f'--output_dir={run}',
  )
  # Pasted, the command of a cell is the run that it was: it only says again
  # what came out, where other settings are an error.
  _, place, _, _, _, *pasted = shlex.split(printed[1])
  assert place.startswith(f'PYTHONPATH={tmp_path}:')
  pasted, again, shown, misspelt = call(
      'train',
      pasted,
      (*train, '--rounds=3'),
      ('--list',),
      (*train, '--hparams=learningrate=1'),
  )
  assert pasted[0] == 0 and 'finished: 2 rounds' in pasted[2], pasted[2]
  assert again[0] == 0 and 'Continuing after round 2' in again[2], again[2]
  assert 'has changed since (versions.plugin theirs: "sha256 ' in again[2]
  assert 'theirs ' in shown[1] and 'their_blobs ' in shown[1]
  assert misspelt[0] == 2 and "did you mean 'learning_rate'" in misspelt[2]

  moved = tmp_path / 'moved/theirs.py'
  moved.parent.mkdir()
  module.rename(moved)
  where, plugin = f'--run_dir={run}', '--plugins=moved.theirs'
  lacking, found, analysis = program_calls.call_in_turn(
      [
          ('evaluate', where),
          ('evaluate', where, plugin),
          ('analyze', '--analysis=nvar', where, plugin),
      ],
      tmp_path,
  )
  assert lacking[0] == 2 and lacking[2].count('\n') == 1
  assert f"the plugin 'theirs' of {run}/config.json, found Modu" in lacking[2]
  assert found[0] == 0 and 'known_clients (10 clients' in found[1], found[2]
  assert analysis[0] == 0 and 'theirs: nVAR' in analysis[1], analysis[2]


@pytest.mark.ci
def test_a_table_has_a_network_of_a_file_outside(tmp_path):
  (tmp_path / 'net.py').write_text(
      'from tff_meta import models\n\n\n'
      'def build(shape, classes):\n'
      "  return models.build('mlp', shape, classes)\n"
  )
  for name, model in ('there', 'net:build'), ('lacking', 'nett:build'):
    flags = ('--algorithm=fed_avg', f'--model={model}')
    (tmp_path / f'{name}.py').write_text(
        f"""
from tff_meta.comparison import tables

MEAN = tables.Measure('Mean', 'evaluation/known_clients/accuracy_mean')
TABLES = (tables.Table(
    'net_{name}', 'Ours', 'ours', (tables.Setting('Known', (MEAN,)),),
    (tables.Row('own', {flags}),),
    {{'smoke': tables.Scale(seeds=(0,), flags=('--rounds=2',))}},
),)
"""
    )
  smoke = '--scale=smoke'
  refused, done = program_calls.call_all(
      'compare',
      [('--experiment=lacking.py', smoke), ('--experiment=there.py', smoke)],
      tmp_path,
  )
  assert refused[0] == 2 and "'nett'" in refused[2], refused[2]
  assert done[0] == 0, done[2]
  (config,) = tmp_path.glob('runs/*/known/own/seed_0/run/config.json')
  assert json.loads(config.read_text())['config']['model'] == 'net:build'
