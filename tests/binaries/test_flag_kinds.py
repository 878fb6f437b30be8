"""Flags of all programs: paths, whole numbers and numbers."""

import json
import os
import subprocess
import sys

from absl import flags
import pytest

from binaries import flag_kinds

# A process for each program: they have flags of the same names.
_LIST_FLAGS = """
import importlib, json, sys
from absl import flags

importlib.import_module(f'binaries.{sys.argv[1]}')
assert 'tensorflow' not in sys.modules
found = {
    flag.name: (flag.parser.flag_type(), flag.parser.parse('~/a'))
    for module, defined in flags.FLAGS.flags_by_module_dict().items()
    if module.startswith('binaries.')
    for flag in defined
    if flag.name.endswith('_dir') or flag.name == 'keep'
}
kinds = {
    flag.flag_type()
    for module, defined in flags.FLAGS.flags_by_module_dict().items()
    if module.startswith('binaries.')
    for flag in defined
}
keys = [f.name for f in flags.FLAGS.get_key_flags_for_module(
    sys.modules[f'binaries.{sys.argv[1]}'])]
print(json.dumps([found, sorted(kinds), keys]))
"""


@pytest.mark.parametrize(
    'program, paths',
    [
        ('train', {'output_dir', 'data_dir'}),
        ('evaluate', {'run_dir', 'data_dir'}),
        ('compare', {'output_dir', 'data_dir', 'keep'}),
        ('analyze', {'output_dir', 'data_dir', 'run_dir'}),
    ],
)
def test_all_flags_of_a_program_are_of_our_kinds(program, paths):
  done = subprocess.run(
      [sys.executable, '-c', _LIST_FLAGS, program],
      env=os.environ | {'HOME': '/home/of'},
      capture_output=True,
      text=True,
      timeout=60,
  )
  found, kinds, keys = json.loads(done.stdout or done.stderr)
  assert found.keys() == paths
  for kind, value in found.values():
    assert value in ('/home/of/a', ['/home/of/a']), kind
  of_absl = {'int', 'float', 'comma separated list of strings'}
  assert not of_absl & set(kinds)
  assert paths <= set(keys)  # So --helpshort shows them.


@pytest.fixture
def parse(monkeypatch):
  """Returns a function from the text of a flag to its value."""
  monkeypatch.setenv('HOME', '/home/of')
  holders = {
      'path': flag_kinds.define_path('a_path', None, ''),
      'paths': flag_kinds.define_paths('some_paths', ''),
      'list': flag_kinds.define_list('a_list', ''),
      'count': flag_kinds.define_whole_number('a_count', 7, '', least=1),
      'rate': flag_kinds.define_number('a_rate', None, ''),
  }

  def run(name, text):
    flag = flags.FLAGS[holders[name].name]
    flag.parse(text)
    return flag.value

  yield run
  for holder in holders.values():
    delattr(flags.FLAGS, holder.name)


@pytest.mark.parametrize(
    'name, text, value',
    [
        ('path', '~', '/home/of'),
        ('path', '~/a b/../ü\n', '/home/of/a b/../ü\n'),
        ('path', './~/a', './~/a'),
        ('path', 'a~/', 'a~/'),
        ('paths', '~/a,b,./~', ['/home/of/a', 'b', './~']),
        ('paths', '"~/a,b",c', ['/home/of/a,b', 'c']),
        ('list', 'a, b c', ['a', 'b c']),
        ('count', '1', 1),
        ('count', str(2**31 - 1), 2**31 - 1),
        ('rate', '1e-3', 1e-3),
    ],
)
def test_flags_are_read(parse, name, text, value):
  assert parse(name, text) == value


@pytest.mark.parametrize(
    'name, text, problem',
    [
        ('path', '~nobody_of_this_name/a', '~nobody_of_this_name to be a home'),
        (
            'paths',
            'a,~nobody_of_this_name',
            '~nobody_of_this_name to be a home',
        ),
        ('path', '', 'expected a path, found none'),
        ('paths', 'a,', 'with commas between them, found an empty one'),
        ('list', '', 'with commas between them, found none'),
        ('list', ',a', 'with commas between them, found an empty one'),
        ('path', 'caf\udce9', 'expected a path in UTF-8'),  # Of Latin-1.
        ('count', '0', 'of at least 1 and below 2[*]{2}31'),
        ('count', '-3', 'of at least 1 and below 2[*]{2}31'),
        ('count', str(2**31), 'of at least 1 and below 2[*]{2}31'),
        ('count', '9' * 30, 'of at least 1 and below 2[*]{2}31'),
        ('count', 'many', 'a whole number$'),
        ('count', '1e3', 'a whole number$'),
        ('count', '1_0', 'a whole number$'),
        ('count', '\u0661\u0662', 'a whole number$'),
        ('rate', '0,2', 'a point before its decimals'),
        ('rate', '1_0.5', 'a point before its decimals'),
        ('rate', 'nan', 'a finite number'),
        ('rate', '-inf', 'a finite number'),
        ('rate', '1e999', 'a finite number'),
    ],
)
def test_impossible_flags_are_refused(parse, name, text, problem):
  with pytest.raises(flags.IllegalFlagValueError, match=problem):
    parse(name, text)
