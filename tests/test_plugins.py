"""Modules from outside: found, imported once, named when they are broken."""

import json
import pathlib
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import pytest

from binaries import experiments
from binaries import flag_groups
from tff_meta import plugins
from tff_meta.training import restored_run
from tff_meta.training import run_directory


@pytest.fixture
def place(tmp_path, monkeypatch):
  """An empty working directory; what is imported from it is forgotten."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', sys.path[:])
  monkeypatch.setattr(plugins, '_versions', {})
  before = set(sys.modules)
  plugins.import_installed.cache_clear()
  yield tmp_path
  plugins.import_installed.cache_clear()
  for name in set(sys.modules) - before:
    del sys.modules[name]


def test_modules_of_the_working_directory_are_found(place):
  (place / 'their_module.py').write_text('imported = 1')
  (place / 'their_package').mkdir()
  (place / 'their_package/inner.py').write_text('imported = 2')
  (place / 'json.py').write_text('raise AssertionError')  # Imported already.
  plugins.import_named(['their_module', 'their_package.inner'], '--plugins')
  assert sys.modules['their_module'].imported == 1
  found = plugins.versions()
  assert list(found) == ['plugin their_module', 'plugin their_package.inner']
  assert len(set(found.values())) == 2 and found['plugin their_module'] == (
      plugins._checksum(sys.modules['their_module'])
  )
  plugins.import_named(['their_package'], '--plugins')
  assert plugins.versions()['plugin their_package'] == (
      found['plugin their_package.inner']  # It has no other file.
  )


@pytest.mark.parametrize(
    'name, source, problem',
    [
        ('thier_module', '', 'no such module in the working directory'),
        ('their_module.py', '', 'no such module .* without .py; put the'),
        ('their_module.inner', '', 'no such module'),
        ('./their_module', '', 'no such module'),
        ('their_package.inner', '', "No module named 'nosuch' .*line 1"),
        ('', '', 'no such module'),
        ('their_module', 'import nosuch', "No module named 'nosuch' .*line 1"),
        ('their_module', '\nx = y', r'NameError: .*their_module.py, line 2\)'),
        ('their_module', 'x = (', r'SyntaxError: .*their_module.py, line 1\)'),
        (
            'their_module',
            'from tff_meta import registry\n\n'
            "registry.register_algorithm(registry.get('frl'))",
            "to be free, found 'frl', .*their_module.py, line 3",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(place, name, source, problem):
  (place / 'their_module.py').write_text(source)
  (place / 'their_package').mkdir()
  (place / 'their_package/__init__.py').write_text('import nosuch')
  with pytest.raises(ValueError, match=problem) as error:
    plugins.import_named([name], 'somebody')
  assert str(error.value).startswith(
      f'Expected to import the plugin {name!r} of somebody, found '
  )


def _install(place, entry):
  (place / 'their_package.py').write_text(
      'calls = []\nNO_PLUGIN = 1\n'
      'def register():\n  calls.append(1)\n'
      'def fail():\n  raise KeyError("x")\n'
  )
  info = place / 'their_package-1.2.dist-info'
  info.mkdir()
  (info / 'METADATA').write_text('Name: their-package\nVersion: 1.2\n')
  (info / 'entry_points.txt').write_text(
      f'[{plugins.GROUP}]\nanything = {entry}\n'
  )
  sys.path.append(str(place))


@pytest.mark.parametrize(
    'entry, calls',
    [('their_package', 0), ('their_package:register', 1)],
)
def test_installed_packages_are_imported_once(place, entry, calls):
  _install(place, entry)
  plugins.import_installed()
  plugins.import_installed()
  assert len(sys.modules['their_package'].calls) == calls
  assert plugins.versions() == {'plugin their-package': '1.2'}


@pytest.mark.parametrize(
    'entry, problem',
    [
        ('their_package:fail', r"KeyError: 'x' \(.*their_package.py, line 6\)"),
        ('their_package:nothing', "AttributeError: .*'nothing'"),
        ('their_package:NO_PLUGIN', 'TypeError: no module, .* but int'),
        ('gone', "No module named 'gone'"),
    ],
)
def test_a_broken_installed_package_is_named(place, entry, problem):
  _install(place, entry)
  with pytest.raises(ImportError, match=problem) as error:
    plugins.import_installed()
  assert f"{entry!r} of the installed package 'their-package'" in str(
      error.value
  )


def test_the_plugins_of_a_run_are_imported_unless_others_are_asked_for(place):
  (place / 'theirs.py').touch()
  run = run_directory.RunDirectory(place / 'run')
  run.root.mkdir()

  def imported(config, *argv):
    run.config.write_text(json.dumps({'config': config}))
    with flagsaver.flagsaver():
      flags.FLAGS(['program', *argv])
      return flag_groups.import_plugins('nothing', str(run.root), str(run.root))

  assert imported({}) == ()  # Of an earlier version.
  assert imported({'plugins': ['theirs']}) == ('theirs',)
  assert imported({'plugins': ['gone']}, '--plugins=theirs') == ('theirs',)
  with pytest.raises(
      ValueError, match="'gone' of .*run/config.json, found .*no"
  ):
    imported({'plugins': ['gone']})
  with pytest.raises(run_directory.RunDirectoryError, match='modules, found 5'):
    imported({'plugins': 5})
  with pytest.raises(ValueError, match="found 'gone'.* plugins theirs, has"):
    imported({'algorithm': 'gone', 'plugins': ['theirs']})
    restored_run.read_config(run)


def test_a_misspelt_plugin_is_refused_before_tensorflow_is_imported(place):
  code = (
      'import sys; sys.argv = ["train", "--algorithm=frl", "--plugins=x"];'
      ' from binaries import command_line, train\n'
      'try: command_line.run(train.main)\n'
      'finally: print("tensorflow" in sys.modules)'
  )
  done = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, cwd=place
  )
  assert (done.returncode, done.stdout) == (2, 'False\n'), done.stderr
  assert done.stderr.startswith("Error: Expected to import the plugin 'x' of")


_FILE = """
from tff_meta.comparison import tables
def table(name):
  return tables.Table(name, 'Title', 'ours', (), (), {})
"""


@pytest.mark.parametrize(
    'source, named, problem',
    [
        ("TABLES = (table('x'), table('y'))", ':y', None),
        ("TABLES = [table('x')]", '', None),
        (
            "TABLES = (table('x'), table('y'))",
            '',
            r'=theirs.py:x, --exp.*py:y\.',
        ),
        ("TABLES = (table('x'),)", ':z', "to be one of x, found 'z'"),
        ("TABLES = (table('digits'),)", '', "to be free, found 'digits'"),
        ('TABLES = ()', '', r'theirs.py to define TABLES, .* found \(\)'),
        ('TABLES = (1,)', '', r'to define TABLES, .* found \(1,\)'),
        ('TABLE = 1', '', 'to define TABLES, .* found None'),
        ('import nosuch', '', r'tables of theirs.py, found .*py, line 6\)'),
        (None, '', 'a file of tables, found no theirs.py'),
    ],
)
def test_tables_of_a_file(place, monkeypatch, source, named, problem):
  del place
  for name in 'xy':  # Gone again in the end.
    monkeypatch.setitem(experiments.TABLES, name, None)
    monkeypatch.delitem(experiments.TABLES, name)
  if source is not None:
    pathlib.Path('theirs.py').write_text(f'{_FILE}\n{source}')
  if problem is None:
    name = named.removeprefix(':') or 'x'
    assert experiments.get(f'theirs.py{named}').name == name
  else:
    with pytest.raises(ValueError, match=problem):
      experiments.get(f'theirs.py{named}')
