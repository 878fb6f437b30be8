"""Tests of the environment's checks, in environments that are wrong."""

import importlib.metadata
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib

import pytest

import tff_meta
from tff_meta import installation

_ROOT = pathlib.Path(installation.__file__).parents[1]


def _run(code, **environment):
  """Runs code in a fresh Python at the root; returns exit code and stderr."""
  result = subprocess.run(
      [sys.executable, '-c', code],
      cwd=_ROOT,
      env={'PATH': '/usr/bin:/bin', **environment},
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
  )
  return result.returncode, result.stderr


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path):
  """Such as a clone, beside a script."""
  (tmp_path / 'tff_meta').mkdir()
  script = tmp_path / 'script.py'
  script.write_text('import tff_meta; print(tff_meta.__version__)')
  done = subprocess.run(
      [sys.executable, script], capture_output=True, text=True, timeout=60
  )
  assert done.stdout.strip() == tff_meta.__version__, done.stderr


def test_pins_hold_in_this_environment():
  # The pins are in the metadata of the package: without them nothing differs.
  requirements = importlib.metadata.requires('tff-meta') or []
  assert any('tensorflow-federated==' in line for line in requirements)
  # In a process of its own: Ray has packages of its own where it is imported.
  program = 'from tff_meta import installation as i; print(i.differing_pins())'
  found = subprocess.run(
      [sys.executable, '-c', program],
      capture_output=True,
      text=True,
      check=True,
  )
  assert found.stdout.strip() == '[]'


def test_differing_pins_names_both_versions(monkeypatch):
  installed = {'one': '1.0', 'two': '2.1'}

  def version(name):
    if name not in installed:
      raise installation.importlib.metadata.PackageNotFoundError(name)
    return installed[name]

  metadata = installation.importlib.metadata
  monkeypatch.setattr(
      metadata,
      'requires',
      lambda name: [
          'one==1.0',
          'two==2.0; extra == "pinned"',
          'three-x==3.0.post1; extra == "pinned"',
          'four==4.0; extra == "ray"',
      ],
  )
  monkeypatch.setattr(metadata, 'version', version)
  assert installation.differing_pins() == [
      'two 2.1 (pinned: 2.0)',
      'three-x missing (pinned: 3.0.post1)',
  ]
  assert installation.differing_pins('ray') == ['four missing (pinned: 4.0)']


def test_failing_import_of_tff_is_explained(tmp_path):
  package = tmp_path / 'tensorflow_federated'
  package.mkdir()
  (package / '__init__.py').write_text('import jax\njax.no_such_name\n')
  (tmp_path / 'jax.py').write_text('')
  code, stderr = _run(
      'from tff_meta import installation; installation.import_tff()',
      PYTHONPATH=str(tmp_path),
  )
  last_line = stderr.splitlines()[-1]
  assert code == 1
  assert last_line.startswith('ImportError: Expected to import tensorflow_fed')
  assert "AttributeError: module 'jax' has no attribute" in last_line
  assert 'pip install --no-deps -r requirements.txt' in last_line


def test_garbage_is_collected_again_after_the_import(tmp_path):
  package = tmp_path / 'tensorflow_federated'
  package.mkdir()
  for end in '', 'raise ImportError\n':
    (package / '__init__.py').write_text(
        'import gc\nassert not gc.isenabled()\n' + end
    )
    code, _ = _run(
        'import contextlib, gc\n'
        'from tff_meta import installation\n'
        'with contextlib.suppress(ImportError):\n'
        '  installation.import_tff()\n'
        'assert gc.isenabled()\n',
        PYTHONPATH=str(tmp_path),
    )
    assert code == 0


def test_what_waits_for_a_program_waits_for_the_import(tmp_path):
  """TensorFlow is not eager yet when it asks for that, within `app.run`."""
  package = tmp_path / 'tensorflow_federated'
  package.mkdir()
  (package / '__init__.py').write_text(
      'from absl import app\nseen = []\n'
      'app.call_after_init(lambda: seen.append(1))\nassert not seen\n'
  )
  code, stderr = _run(
      'from absl import app\n'
      'from tff_meta import installation\n'
      'def main(_):\n'
      '  assert installation.import_tff().seen == [1]\n'
      'app.run(main)\n',
      PYTHONPATH=str(tmp_path),
  )
  assert code == 0, stderr


@pytest.mark.parametrize(
    ('setup', 'expected'),
    [
        (
            'import sys; sys.version_info = (3, 12, 1, "final", 0)',
            'error: Expected Python 3.11, found Python 3.12.1 (',
        ),
        (
            'import importlib.util as u; u.find_spec = lambda name: None',
            'error: Expected the package tensorflow-federated, found none',
        ),
    ],
)
def test_binaries_end_with_one_line_in_a_wrong_environment(setup, expected):
  code, stderr = _run(f'{setup}; import binaries')
  assert code == 1
  assert stderr.startswith(expected)
  assert stderr.count('\n') == 1


def test_import_of_the_package_is_cheap():
  code, stderr = _run(
      'import sys, tff_meta; assert "tensorflow" not in sys.modules;'
      ' assert "numpy" not in sys.modules'
  )
  assert (code, stderr) == (0, '')


_BESIDE = """
import sys
exec(open(sys.argv[1]).read())  # As Python does at its start.
import binaries, binaries.mine, binaries.flag_groups
assert binaries.theirs and binaries.flag_groups.__doc__ == 'Theirs.'
import binaries.train, binaries.experiments.frl
assert binaries.train.__file__.startswith(sys.argv[2]), binaries.train.__file__
try:
  import binaries.nothing
except ModuleNotFoundError as error:
  print(error)
"""


def test_another_package_binaries_is_not_hidden_and_does_not_hide_ours(
    tmp_path,
):
  folder = tmp_path / 'binaries'
  folder.mkdir()
  (folder / '__init__.py').write_text('theirs = True')
  (folder / 'mine.py').touch()
  (folder / 'flag_groups.py').write_text(
      '"""Theirs."""\nfrom absl import flags\n'
      "DATA_DIR = flags.DEFINE_string('data_dir', None, '')\n"
      "flags.DEFINE_string('device', None, '')\n"
  )
  done = subprocess.run(
      [sys.executable, '-c', _BESIDE, _ROOT / 'tff_meta_binaries.pth', _ROOT],
      cwd=tmp_path,
      env={'PATH': '/usr/bin:/bin', 'PYTHONPATH': str(_ROOT)},
      capture_output=True,
      text=True,
      timeout=60,
  )
  assert done.stdout == "No module named 'binaries.nothing'\n", done.stderr


def test_commands_are_the_programs(tmp_path):
  """In a folder whose own `binaries` would be found by `python -m`."""
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
  (tmp_path / 'binaries').mkdir()
  (tmp_path / 'binaries' / '__init__.py').write_text('raise KeyError')
  for name, target in project['scripts'].items():
    module, _, function = target.partition(':')
    program = f'import sys, {module}; sys.argv[0] = {name!r}; {target}()'
    done = subprocess.run(
        [sys.executable, '-P', '-c', program.replace(':', '.', 1), '--seed=x'],
        cwd=tmp_path,
        env={'PATH': '/usr/bin:/bin', 'PYTHONPATH': str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and 'Error: ' in done.stderr, done.stderr
    assert function == name.removeprefix('tff-meta-')


def _call(*command, cwd):
  """Runs a program in a folder as a new user does; returns its output."""
  done = subprocess.run(
      command,
      cwd=cwd,
      env={'PATH': '/usr/bin:/bin', 'HOME': str(cwd)},
      capture_output=True,
      text=True,
      timeout=1800,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def _files(root):
  return {
      str(path.relative_to(root)) for path in root.rglob('*') if path.is_file()
  }


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
  """An installed source distribution: its folder, and the environment's.

  The environment has the packages of this one, but not this repository.
  """
  if not (_ROOT / '.git').exists():
    pytest.skip("Which files are the repository's, git alone knows.")
  root = tmp_path_factory.mktemp('installed')
  listing = ('ls-files', '--cached', '--others', '--exclude-standard')
  for name in _call('git', *listing, cwd=_ROOT).splitlines():
    if (_ROOT / name).exists():
      (root / 'copy' / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(_ROOT / name, root / 'copy' / name)
  build = 'from setuptools import build_meta; build_meta.build_sdist("..")'
  expected = _files(root / 'copy')
  _call(sys.executable, '-c', build, cwd=root / 'copy')
  (archive,) = root.glob('*.tar.gz')
  with tarfile.open(archive) as opened:
    opened.extractall(root, filter='data')
  source = root / archive.name.removesuffix('.tar.gz')
  made = _files(source) - expected
  assert _files(source) >= expected
  assert all('egg-info' in n or n in ('PKG-INFO', 'setup.cfg') for n in made)

  _call(sys.executable, '-m', 'venv', '--without-pip', 'env', cwd=root)
  borrowed = root / 'env' / 'lib' / 'python3.11' / 'site-packages'
  (borrowed / 'borrowed.pth').write_text(sysconfig.get_path('purelib'))
  pip = (sys.executable, '-m', 'pip', '--python', root / 'env/bin/python')
  alone = ('--no-deps', '--no-index', '--no-cache-dir', '--ignore-installed')
  _call(*pip, 'install', *alone, '--no-build-isolation', archive, cwd=root)
  return source, root / 'env'


@pytest.mark.slow
def test_a_wheel_has_all_that_it_names(installed, tmp_path):
  _, env = installed
  program = {
      name: env / 'bin' / f'tff-meta-{name}'
      for name in ('train', 'evaluate', 'compare', 'analyze')
  }
  where = 'import tff_meta; print(tff_meta.__file__)'
  found = _call(env / 'bin/python', '-c', where, cwd=tmp_path).strip()
  assert pathlib.Path(found).is_relative_to(env)
  docs = env / 'share' / 'doc' / 'tff-meta'
  assert {
      'README.md',
      'BUILD_NOTES.md',
      'docs/algorithms/frl.md',
      'docs/guide/scale.md',
  } <= _files(docs)
  assert 'fed_avg' in _call(program['train'], '--list', cwd=tmp_path)

  (tmp_path / 'mine.flags').write_text(
      '--flagfile=binaries/presets/digit_pairs_frl.flags\n'
      '--rounds=4\n--eval_groups=2\n--noreferences'
  )
  mine = ('--flagfile=mine.flags', '--output_dir=run')
  assert 'Written: run' in _call(program['train'], *mine, cwd=tmp_path)
  for name, flags in {
      'evaluate': ('--run_dir=run',),
      'analyze': ('--analysis=group_map', '--run_dir=run'),
  }.items():
    _call(program[name], *flags, cwd=tmp_path)
  flags = ('--scale=smoke', '--rows=fed_avg', '--settings=Known clients')
  digits = ('--experiment=digits', *flags, '--print_command')
  command = _call(program['compare'], *digits, cwd=tmp_path)
  _call(*shlex.split(command), '--rounds=2', cwd=tmp_path)
  assert list(tmp_path.rglob('known_clients/fed_avg/seed_0/run/summary.json'))


@pytest.mark.slow
def test_a_source_distribution_tests_itself(installed):
  source, env = installed
  tests = ('test_results.py', 'test_benchmarks.py', 'binaries/test_compare.py')
  call = (env / 'bin/python', '-m', 'pytest', '-n', '0', '-q', '--no-header')
  some = (f'tests/{name}' for name in tests)
  passed = _call(*call, '-k', 'not killed', *some, cwd=source)
  assert ' passed' in passed and ' failed' not in passed


@pytest.mark.slow
def test_an_outsider_works_with_what_is_installed(installed, tmp_path):
  """What is theirs is trained, killed, continued and looked at elsewhere."""
  _, env = installed
  shutil.copy(_ROOT / 'tests/outside/theirs.py', tmp_path)

  def program(name, *flags):
    return (env / 'bin' / f'tff-meta-{name}', '--plugins=theirs', *flags)

  train = program(
      'train',
      '--algorithm=theirs',
      '--dataset=their_blobs',
      '--partition=their_deal',
      '--aggregation=their_cut',
      '--aggregation_options=longest=0.5',
      '--preset=demo',
      '--checkpoint_every=2',
      '--output_dir=run',
  )
  killed = subprocess.Popen([*train, '--rounds=100000'], cwd=tmp_path)
  metrics = tmp_path / 'run/metrics.csv'
  while not metrics.exists() or metrics.read_bytes().count(b'\n') < 8:
    assert killed.poll() is None
    time.sleep(0.1)
  killed.kill()
  killed.wait()
  rounds = metrics.read_bytes().count(b'\n') + 4
  shown = _call(*train, f'--rounds={rounds}', cwd=tmp_path)
  assert 'Written: run' in shown
  summary = json.loads((tmp_path / 'run/summary.json').read_text())
  assert summary['rounds'] == rounds and summary['algorithm'] == 'theirs'

  evaluated = _call(*program('evaluate', '--run_dir=run'), cwd=tmp_path)
  assert 'known_clients (10 clients' in evaluated
  analyzed = program('analyze', '--analysis=nvar', '--run_dir=run')
  assert 'theirs: nVAR' in _call(*analyzed, cwd=tmp_path)
  table = ('--experiment=their_table', '--scale=smoke', '--output_dir=table')
  _call(*program('compare', *table), cwd=tmp_path)
  runs = '--runs=run,table/known/theirs/seed_0/run'
  report = _call(*program('compare', runs), cwd=tmp_path)
  assert 'rounds: ' in report and 'theirs (1, 2)' not in report
