"""Bundles: what they predict, where, and what is refused."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta.bundles import export
from tff_meta.bundles import serve
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import run_config


def _experiment(algorithm, **settings):
  config = run_config.resolve(
      **dict(
          algorithm=algorithm,
          dataset='digits',
          model='mlp',
          rounds=1,
          seed=0,
          new_clients='held_out',
          stratify=False,
          validation_fraction=0.0,
          checkpoint_every=1,
          select_best=False,
          select_by='macro',
          patience=0,
          execution='in_process',
          protocols=('none',),
          references=False,
      )
      | settings
  )
  return experiment_lib.prepare(config)


def _write(root, algorithm, **settings):
  """Exports what training begins with."""
  experiment = _experiment(algorithm, **settings)
  model = protocols.untrained_model(experiment.build_process())
  return experiment, model, export.write(experiment, model, 0, root / 'bundle')


@pytest.fixture(scope='module')
def fed_rep(tmp_path_factory):
  return _write(tmp_path_factory.mktemp('fed_rep'), 'fed_rep')


def _examples(experiment, *shape):
  x = np.random.default_rng(7).random(
      [*shape, *experiment.model.input_shape], np.float32
  )
  classes = experiment.group_method.num_classes if shape[1:] else 10
  y = np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % classes
  return x, y


def test_clients_get_what_the_personalizer_gives(fed_rep):
  experiment, model, bundle = fed_rep
  x, y = _examples(experiment, 30)
  arrays = dict(support_x=x[:20], support_y=y[:20], query_x=x[20:])
  for use, memory in ('new_client', ()), (
      'known_client',
      model.memories.of(''),
  ):
    personalizer = getattr(experiment.method, use)()
    adapted = personalizer.adapt(
        model.weights,
        tf.nest.map_structure(tf.convert_to_tensor, memory),
        episodes.Examples(x[:20], y[:20], tf.ones(20)),
        tf.constant([0, 5]),
    )
    query = episodes.Examples(x[20:], y[20:], tf.ones(10))
    expected = personalizer.predict(adapted, query).numpy()
    kept = {
        f'memory_{i}': np.asarray(leaf)
        for i, leaf in enumerate(tf.nest.flatten(memory))
    }
    seed = np.array([0, 5], np.int32)
    found = serve.predict(bundle, use, arrays | kept | {'seed': seed})
    assert len(set(expected)) > 1
    np.testing.assert_array_equal(found.astype(int), expected)


def test_a_group_gets_what_the_personalizer_gives(tmp_path):
  experiment, model, bundle = _write(tmp_path, 'frl', dataset='digit_pairs')
  x, y = _examples(experiment, 4, 6)
  query, _ = _examples(experiment, 9)
  salts, seed = np.arange(4, dtype=np.int32), np.array([3, 1], np.int32)
  personalizer = experiment.group_method.group()
  adapted = personalizer.adapt(
      tf.nest.map_structure(tf.convert_to_tensor, model.weights),
      episodes.Examples(tf.constant(x), tf.constant(y), tf.ones([4, 6])),
      tf.constant(salts),
      tf.constant(seed),
  )
  asked = episodes.Examples(query, tf.zeros(9, tf.int32), tf.ones(9))
  expected = personalizer.predict(adapted, asked).numpy()
  arrays = dict(support_x=x, support_y=y, query_x=query, salts=salts, seed=seed)
  found = serve.predict(bundle, 'group', arrays)
  assert len(set(expected)) > 1
  np.testing.assert_array_equal(found, expected)


def test_it_serves_where_the_library_is_not(fed_rep, tmp_path):
  experiment, _, bundle = fed_rep
  moved = shutil.copytree(bundle, tmp_path / 'elsewhere')
  x, y = _examples(experiment, 30)
  arrays = dict(support_x=x[:20], support_y=y[:20], query_x=x[20:])
  np.savez(tmp_path / 'examples.npz', **arrays)
  absent = (
      'import runpy, sys\n'
      "sys.modules['tff_meta'] = sys.modules['tensorflow_federated'] = None\n"
      'sys.argv = sys.argv[1:]\n'
      "runpy.run_path(sys.argv[0], run_name='__main__')"
  )
  command = [sys.executable, '-P', '-c', absent, str(moved / 'serve.py')]
  rest = ['new_client', 'examples.npz', 'labels.npy']
  environment = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  subprocess.run(
      [*command, *rest], cwd=tmp_path, env=environment, check=True, timeout=600
  )
  found = np.load(tmp_path / 'labels.npy')
  expected = serve.predict(bundle, 'new_client', arrays)
  np.testing.assert_array_equal(found, expected)


def test_the_manifest_says_what_is_there(fed_rep):
  experiment, _, bundle = fed_rep
  manifest = serve.read_manifest(bundle)
  assert manifest['algorithm'] == 'fed_rep'
  assert list(manifest['uses']) == ['known_client', 'new_class', 'new_client']
  assert manifest['uses']['new_client']['signatures'] == [
      'adapt_and_predict',
      'embed',
  ]
  assert 'data_dir' not in manifest['configuration']
  assert len(manifest['caveats']) == 1  # An mlp sees one example at a time.
  loaded = tf.saved_model.load(str(bundle / 'new_client'))
  x, _ = _examples(experiment, 3)
  embeddings = loaded.signatures['embed'](x=tf.constant(x))['embeddings']
  assert embeddings.shape == (3, experiment.model.embedding_size)


def test_a_network_that_sees_its_batch_is_said_to(tmp_path):
  _, _, bundle = _write(tmp_path, 'fed_avg_ft', model='conv4')
  assert 'mean and variance' in serve.read_manifest(bundle)['caveats'][1]


def test_heads_of_known_clients_do_not_leave_unasked(tmp_path):
  experiment = _experiment('fedmeta_per')
  model = protocols.untrained_model(experiment.build_process())
  arguments = (experiment, model, 0, tmp_path / 'bundle')
  with pytest.raises(ValueError, match='nothing of known clients.*fedmeta_per'):
    export.write(*arguments)
  assert not list(tmp_path.iterdir())
  export.write(*arguments, uses=['known_client'])


def test_every_changed_byte_is_seen(fed_rep, tmp_path):
  _, _, bundle = fed_rep
  changed = shutil.copytree(bundle, tmp_path / 'changed')
  files = [path for path in sorted(changed.rglob('*')) if path.is_file()]
  rng = np.random.default_rng(0)
  for path in files * 4:
    content = bytearray(path.read_bytes())
    place = rng.integers(len(content))
    content[place] ^= 1 << rng.integers(8)
    kept = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(serve.BundleError):
      serve.read_manifest(changed)
    path.write_bytes(kept)
  serve.read_manifest(changed)


@pytest.mark.parametrize(
    'damage',
    [
        lambda root: (root / 'more.txt').write_text('x'),
        lambda root: (root / 'manifest.json').unlink(),
        lambda root: (root / 'SHA256SUMS').unlink(),
        lambda root: (root / 'link').symlink_to('/'),
    ],
)
def test_a_folder_that_is_not_as_written_is_refused(fed_rep, tmp_path, damage):
  root = shutil.copytree(fed_rep[2], tmp_path / 'damaged')
  damage(root)
  with pytest.raises(serve.BundleError, match='Expected'):
    serve.read_manifest(root)


def test_another_format_is_refused(fed_rep, tmp_path):
  root = shutil.copytree(fed_rep[2], tmp_path / 'later')
  manifest = json.loads((root / 'manifest.json').read_text())
  (root / 'manifest.json').write_text(json.dumps(manifest | {'format': 2}))
  (root / 'SHA256SUMS').write_text(serve.to_text(serve.digests(root)))
  with pytest.raises(serve.BundleError, match='of format 1, found 2'):
    serve.read_manifest(root)


@pytest.mark.parametrize(
    'use, changes, problem',
    [
        ('group', {}, "known_client, .*new_client, found 'group'"),
        ('new_client', {'query': np.zeros(3)}, 'support_x, support_y, found'),
        ('new_client', {'support_y': np.zeros(20)}, 'int32 .*found float64'),
        (
            'new_client',
            {'query_x': np.zeros((2, 3))},
            r'found float64 \[2, 3\]',
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(fed_rep, use, changes, problem):
  experiment, _, bundle = fed_rep
  x, y = _examples(experiment, 30)
  arrays = dict(support_x=x[:20], support_y=y[:20], query_x=x[20:]) | changes
  with pytest.raises(ValueError, match=problem):
    serve.predict(bundle, use, arrays)


def test_nothing_is_written_over(fed_rep):
  experiment, model, bundle = fed_rep
  before = pathlib.Path(bundle / serve.SUMS).read_bytes()
  with pytest.raises(FileExistsError, match='not to exist'):
    export.write(experiment, model, 0, bundle)
  assert pathlib.Path(bundle / serve.SUMS).read_bytes() == before
