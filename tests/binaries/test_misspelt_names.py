"""Misspelt names are told at once: before TensorFlow is imported."""

import json
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]
_CALLS = """
import contextlib, importlib, io, json, sys
from absl import flags
from binaries import command_line
program = importlib.import_module(f'binaries.{sys.argv[1]}')
for argv in json.load(sys.stdin):
  sys.argv = ['program', *argv]
  flags.FLAGS.unparse_flags()
  for flag in flags.FLAGS:
    flags.FLAGS[flag].unparse()
  out = io.StringIO()
  with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
    try:
      command_line.run(program.main)
    except SystemExit as end:
      code = end.code
  print(json.dumps([code, out.getvalue(), 'tensorflow' in sys.modules]))
"""


def _call(program, calls, cwd=_ROOT):
  done = subprocess.run(
      [sys.executable, '-c', _CALLS, program],
      cwd=cwd,
      env=os.environ | {'PYTHONPATH': str(_ROOT)},
      input=json.dumps(calls),
      capture_output=True,
      text=True,
      timeout=600,
  )
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]


_FED_AVG = '--algorithm=fed_avg'
_MEANT = {
    ('--algorithm=metaverse',): 'metavers',
    ('--algorithm=fedprox',): 'fed_prox',
    ('--algorithm=scafold',): 'scaffold',
    (_FED_AVG, '--dataset=cifar_10'): 'cifar10',
    (_FED_AVG, '--dataset=foldr:x'): 'folder',
    (_FED_AVG, '--dataset_options=scalling=raw'): 'scaling',
    (_FED_AVG, '--partition=dirchlet'): 'dirichlet',
    (_FED_AVG, '--partition=dirichlet', '--partition_options=alfa=1'): 'alpha',
    (_FED_AVG, '--hparams=lr=0.1'): 'learning_rate',
    (_FED_AVG, '--reference_hparams=momentun=0.1'): 'momentum',
    (_FED_AVG, '--model=conv_4'): 'conv4',
    (_FED_AVG, '--protocol=known_client'): 'known_clients',
    (_FED_AVG, '--augmentation=filp=true'): 'flip',
    ('--list=protocol',): 'protocols',
}


def test_misspelt_names_are_told_at_once():
  done = _call('train', list(_MEANT))
  for (code, said, has_tensorflow), (argv, meant) in zip(
      done, _MEANT.items(), strict=True
  ):
    assert code == 2 and not has_tensorflow, argv
    assert f'did you mean {meant!r}' in said, said
    assert said.count('\n') == 1


def test_evaluate_knows_protocols_at_once():
  argv = ['--run_dir=/nowhere', '--protocol=new_client']
  ((code, said, has_tensorflow),) = _call('evaluate', [argv])
  assert (code, has_tensorflow) == (2, False) and "mean 'new_clients'" in said


def test_evaluate_knows_axes_of_a_grid_at_once():
  run = '--run_dir=results/models/frl_omniglot'
  calls = [
      [run, '--grid=group_round=1,3'],
      [run, '--grid=way=5,'],
      [run, '--protocol=new_class_clients', '--grid=group_rounds=1'],
  ]
  problems = "mean 'group_rounds'", 'one is empty', 'that new_class_clients has'
  done = _call('evaluate', calls)
  for (code, said, has_tensorflow), problem in zip(done, problems, strict=True):
    assert (code, has_tensorflow) == (2, False) and problem in said, said


def test_own_data_are_looked_at_first(tmp_path):
  (tmp_path / 'a.csv').write_text('n,y\n1,b\n2,c\n')
  (tmp_path / 'fruit.csv').touch()
  (tmp_path / 'pile').mkdir()
  calls = [
      [_FED_AVG, '--dataset=csv:none.csv'],
      [_FED_AVG, '--dataset=csv:fruity.csv'],
      [_FED_AVG, '--dataset=folder:piles'],
      [_FED_AVG, '--dataset=leaf:piles'],
      [_FED_AVG, '--dataset=csv:a.csv'],
      [_FED_AVG, '--dataset=a.csv'],
  ]
  problems = [
      (1, 'Expected a file, found none at none.csv.\n'),
      (1, "found none at fruity.csv. Tip: did you mean 'fruit.csv'?"),
      (1, "found none at piles. Tip: did you mean 'pile'?"),
      (1, "at piles, found none. Tip: did you mean 'pile'?"),
      (2, "the column 'label' in a.csv, found n, y."),
      (2, 'Tip: data of your own are --dataset=csv:a.csv'),
  ]
  done = _call('train', calls, tmp_path)
  for (code, said, has_tensorflow), problem in zip(done, problems, strict=True):
    assert not has_tensorflow and (code, problem[1] in said) == (
        problem[0],
        True,
    ), said


def test_every_list_is_shown_at_once():
  kinds = [
      'algorithms',
      'datasets',
      'models',
      'partitions',
      'protocols',
      'aggregations',
      'experiments',
  ]
  shown = ['frl', 'csv:PATH', 'conv4', 'dirichlet', 'new_groups', 'robust']
  shown.append('digits_search')
  done = _call('train', [[f'--list={kind}'] for kind in kinds])
  for (code, said, has_tensorflow), name in zip(done, shown, strict=True):
    assert (code, has_tensorflow) == (0, False) and f'\n  {name}' in said
  assert '\n      alpha=' in done[3][1]
  assert '\n      scaling=unit: ' in done[1][1]
