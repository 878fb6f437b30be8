"""Tests of the environment's checks, in environments that are wrong."""

import importlib.metadata
import pathlib
import subprocess
import sys

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
  assert installation.differing_pins() == []


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
      ],
  )
  monkeypatch.setattr(metadata, 'version', version)
  assert installation.differing_pins() == [
      'two 2.1 (pinned: 2.0)',
      'three-x missing (pinned: 3.0.post1)',
  ]


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
