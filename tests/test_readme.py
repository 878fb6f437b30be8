"""README's Python, run in the order of the page."""

import collections
import pathlib
import re

import numpy as np
import tensorflow_federated as tff

_README = pathlib.Path(__file__).parents[1] / 'README.md'


def _clients():
  """Twelve clients of two classes each, brighter for the second."""
  rng = np.random.default_rng(0)
  data = {}
  for k in range(12):
    label = rng.integers(0, 2, 30).astype(np.int32)
    image = rng.integers(0, 100, (30, 4, 4, 1)) + 100 * label.reshape(
        -1, 1, 1, 1
    )
    data[f'client_{k:02}'] = collections.OrderedDict(
        image=image.astype(np.uint8), label=label
    )
  return tff.simulation.datasets.TestClientData(data)


def test_pythons_of_readme(capsys):
  blocks = re.findall(r'```python\n(.*?)```', _README.read_text(), re.DOTALL)
  names = {'client_data': _clients()}
  for block in blocks:
    exec(block, names)
  assert names['weights']['body']  # Of FRL.
  known, new = capsys.readouterr().out.splitlines()
  assert known.startswith('meta_train') and float(known.split()[1]) > 0.9
  assert new.startswith('meta_test') and float(new.split()[1]) > 0.5
