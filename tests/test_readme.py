"""README's Python, run in the order of the page."""

import collections
import pathlib
import re
import subprocess
import sys

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import registry

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


def _arrays():
  """Sixty images of each of ten classes to train on, twenty to test."""
  rng = np.random.default_rng(0)
  arrays = {}
  for part, num_images in (('train', 600), ('test', 200)):
    images = rng.integers(0, 256, (num_images, 4, 4, 1)).astype(np.uint8)
    arrays[f'{part}_images'] = images
    arrays[f'{part}_labels'] = np.arange(num_images, dtype=np.int32) % 10
  return arrays


def test_pythons_of_readme(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  subprocess.run(
      [
          sys.executable,
          '-m',
          'binaries.train',
          '--algorithm=fed_avg',
          '--rounds=3',
          f'--output_dir={tmp_path / "runs/digits_fed_avg"}',
      ],
      cwd=_README.parent,
      check=True,
      capture_output=True,
  )
  blocks = re.findall(r'```python\n(.*?)```', _README.read_text(), re.DOTALL)
  names = {'client_data': _clients(), **_arrays()}
  for block in blocks:
    exec(block, names)
  groups, known, new = capsys.readouterr().out.splitlines()
  assert groups.startswith('new groups') and float(groups.split()[2]) > 0.5
  assert known.startswith('meta_train') and float(known.split()[1]) > 0.9
  assert new.startswith('meta_test') and float(new.split()[1]) > 0.5
  assert len(names['dealt'].client_ids()) == 15
  images = np.random.default_rng(0).random((7, 8, 8, 1), np.float32)
  saved = tf.saved_model.load('runs/classifier')
  np.testing.assert_allclose(
      saved(images), names['classifier'](images), rtol=1e-6
  )


def test_algorithms_and_what_they_are_tested_on():
  found = {}
  for line in _README.read_text().splitlines():
    cells = [cell.strip() for cell in line.strip('|').split(' | ')]
    if len(cells) == 4 and cells[2].startswith('`tff_meta/'):
      names = re.findall(r'`(\w+)`', cells[0])
      for kind in re.findall(
          r'(new classes|new|known|groups)( \(.*?\))?', cells[3]
      ):
        for name in re.findall(r'`(\w+)`', kind[1]) or names:
          found.setdefault(name, set()).add(kind[0])
  assert found == {
      spec.name: {
          kind
          for kind, use in (
              ('known', 'known_client'),
              ('new', 'new_client'),
              ('groups', 'group'),
              ('new classes', 'new_class'),
          )
          if use in spec.uses
      }
      for spec in registry.ALGORITHMS.values()
  }
