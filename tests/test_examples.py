"""The examples run; short, so that little is learned."""

import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

from tff_meta import registry

_EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'


@pytest.fixture(autouse=True)
def examples(tmp_path, monkeypatch):
  """Makes examples importable; what they register is forgotten."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(_EXAMPLES))
  known = set(registry.ALGORITHMS)
  yield
  for name in set(registry.ALGORITHMS) - known:
    del registry.ALGORITHMS[name]
  for path in _EXAMPLES.glob('*.py'):
    sys.modules.pop(path.stem, None)


def _main(name, **arguments):
  return importlib.import_module(name).main(**arguments)


@pytest.mark.ci
def test_quickstart():
  lines = (_EXAMPLES / 'quickstart.py').read_text().splitlines()
  assert len(list(filter(str.strip, lines))) <= 20
  assert _main('quickstart', rounds=3) > 0.6  # Guessing is 0.1.


@pytest.mark.ci
def test_export(tmp_path):
  assert _main('export', folder=str(tmp_path), rounds=3) > 0.5


@pytest.mark.slow
def test_own_arrays(tmp_path):
  found = _main('own_arrays', folder=str(tmp_path), rounds=3)
  assert list(found) == ['known_clients', 'new_clients']
  assert found['known_clients']['num_clients'] > 10


@pytest.mark.slow
def test_own_keras_model():
  """With second derivatives: the preset learns to adapt."""
  assert 0 < _main('own_keras_model', rounds=2) <= 1


@pytest.mark.ci
def test_own_algorithm():
  assert 0 < _main('own_algorithm', rounds=2, model='mlp') <= 1


@pytest.mark.slow
def test_clients_that_remember():
  num_clients, accuracy = _main('clients_that_remember', rounds=2)
  assert num_clients == 10 and 0 < accuracy <= 1


@pytest.mark.ci
def test_the_notebook():
  """Its cells of code, in order, in one namespace."""
  notebook = json.loads((_EXAMPLES / 'quickstart.ipynb').read_text())
  names: dict = {}
  for cell in notebook['cells']:
    if cell['cell_type'] == 'code':
      source = ''.join(cell['source']).replace('rounds = 50', 'rounds = 2')
      exec(compile(source, 'quickstart.ipynb', 'exec'), names)
  assert names['accuracy'] > 0.5 and len(names['metrics']['round']) == 2
  assert np.isfinite(names['metrics']['train/loss']).all()
