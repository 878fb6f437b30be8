"""Bundles: what they predict, where, and what is refused."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta import fitting
from tff_meta.bundles import export
from tff_meta.bundles import serve
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import run_config


def _experiment(algorithm, **settings):
  config = run_config.resolve(
      **fitting._SETTINGS
      | dict(algorithm=algorithm, dataset='digits', model='mlp', rounds=1)
      | dict(seed=0, protocols=('none',))
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
  """Raw pixels, what the network has of them, and labels."""
  dtype, form = experiment.dataset.raw_form
  raw = np.random.default_rng(7).integers(0, 256, [*shape, *form]).astype(dtype)
  x = experiment.dataset.preprocess(raw.reshape(-1, *form)).reshape(raw.shape)
  classes = experiment.group_method.num_classes if shape[1:] else 10
  y = np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % classes
  return raw, x, y


def test_clients_get_what_the_personalizer_gives(fed_rep):
  experiment, model, bundle = fed_rep
  raw, x, y = _examples(experiment, 30)
  arrays = dict(support_x=raw[:20], support_y=y[:20], query_x=raw[20:])
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


def test_a_model_is_loaded_once_unless_it_is_another(
    fed_rep, tmp_path, monkeypatch
):
  experiment, _, bundle = fed_rep
  raw, _, y = _examples(experiment, 30)
  arrays = dict(support_x=raw[:20], support_y=y[:20], query_x=raw[20:])
  root = shutil.copytree(bundle, tmp_path / 'bundle')
  loaded, load = [], tf.saved_model.load
  monkeypatch.setattr(
      tf.saved_model, 'load', lambda path: loaded.append(path) or load(path)
  )
  first, second = (serve.predict(root, 'new_client', arrays) for _ in range(2))
  np.testing.assert_array_equal(first, second)
  assert len(loaded) == 1
  (root / 'more.txt').write_text('x')
  (root / serve.SUMS).write_text(serve.to_text(serve.digests(root)))
  serve.predict(root, 'new_client', arrays)
  assert len(loaded) == 2


def test_a_group_gets_what_the_personalizer_gives(tmp_path):
  experiment, model, bundle = _write(tmp_path, 'frl', dataset='digit_pairs')
  raw, x, y = _examples(experiment, 4, 6)
  raw_query, query, _ = _examples(experiment, 9)
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
  arrays = dict(
      support_x=raw, support_y=y, query_x=raw_query, salts=salts, seed=seed
  )
  found = serve.predict(bundle, 'group', arrays)
  assert len(set(expected)) > 1
  np.testing.assert_array_equal(found, expected)
  mask = np.ones([4, 6], bool)
  masked = serve.predict(bundle, 'group', arrays | dict(support_mask=mask))
  np.testing.assert_array_equal(masked, expected)
  for mask in -np.ones([4, 6]), np.full([4, 6], 0.5), np.zeros([4, 6]):
    with pytest.raises(ValueError, match='of 0 and 1|group with examples'):
      serve.predict(bundle, 'group', arrays | dict(support_mask=mask))


@pytest.mark.ci
def test_it_serves_where_the_library_is_not(fed_rep, tmp_path):
  experiment, _, bundle = fed_rep
  moved = shutil.copytree(bundle, tmp_path / 'elsewhere')
  x, _, y = _examples(experiment, 30)
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
      'adapt',
      'adapt_and_predict',
      'embed',
      'predict',
  ]
  assert 'data_dir' not in manifest['configuration']
  assert manifest['caveats'] == []  # An mlp sees one example at a time.
  loaded = tf.saved_model.load(str(bundle / 'new_client'))
  _, x, _ = _examples(experiment, 3)
  embeddings = loaded.signatures['embed'](x=tf.constant(x))['embeddings']
  assert embeddings.shape == (3, experiment.model.embedding_size)


@pytest.mark.ci
@pytest.mark.parametrize('algorithm', ['fed_avg_ft', 'pfedhn'])
def test_a_network_that_sees_its_batch_is_said_to(tmp_path, algorithm):
  """Also where the server has no whole body."""
  _, _, bundle = _write(tmp_path, algorithm, model='conv4')
  assert 'mean and variance' in serve.read_manifest(bundle)['caveats'][0]


@pytest.mark.ci
def test_the_network_that_was_trained_embeds(tmp_path):
  experiment, model, bundle = _write(
      tmp_path,
      'cafeme',
      model='modulated_mlp',
      preset='release',
      hparams='gating=c0',
  )
  loaded = tf.saved_model.load(str(bundle / 'new_client'))
  _, x, _ = _examples(experiment, 3)
  found = loaded.signatures['embed'](x=tf.constant(x))['embeddings']
  network = experiment.model.rebuild(10, gating='c0', num_labels=0)
  expected = network.embed(model.weights['body'], x)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_heads_of_known_clients_do_not_leave_unasked(tmp_path):
  experiment = _experiment('fedmeta_per')
  model = protocols.untrained_model(experiment.build_process())
  arguments = (experiment, model, 0, tmp_path / 'bundle')
  with pytest.raises(ValueError, match='nothing of known clients.*fedmeta_per'):
    export.write(*arguments)
  assert not list(tmp_path.iterdir())
  export.write(*arguments, uses='known_client')
  allowed = export.write(
      experiment, model, 0, tmp_path / 'allowed', allow_private_heads=True
  )
  assert 'known clients' in serve.read_manifest(allowed)['caveats'][0]


@pytest.mark.ci
def test_a_group_may_have_any_number_of_clients(tmp_path):
  """Also of an algorithm that wants some at least."""
  _, _, bundle = _write(
      tmp_path, 'one_shot_ft', dataset='digit_pairs', hparams='kept_clients=2'
  )
  assert list(serve.read_manifest(bundle)['uses']) == ['group']


def test_names_are_those_of_training_and_pixels_are_scaled(tmp_path):
  rng = np.random.default_rng(0)
  kinds = np.array(['ape', 'bee', 'cow'])
  y = np.arange(240) % 3
  np.savez(
      tmp_path / 'animals.npz',
      x=rng.normal(500 * y[:, np.newaxis], 50, [240, 2]).astype(np.float32),
      y=kinds[y],
      client=np.arange(240) % 6,
  )
  experiment, _, bundle = _write(
      tmp_path,
      'fed_per_meta',
      dataset=f'npz:{tmp_path}/animals.npz',
      dataset_options='client=client,scaling=standard',
      way=3,
      group_clients=2,
  )
  assert export.uses_of(
      _experiment(
          'fed_per_meta',
          dataset=f'npz:{tmp_path}/animals.npz',
          dataset_options='client=client',
      )
  ) == ('known_client', 'new_client')
  text = (bundle / serve.MANIFEST).read_text()
  assert str(tmp_path) not in text and 'animals' not in text
  x = rng.normal(500 * y[:30, np.newaxis], 50, [30, 2]).astype(np.float32)
  arrays = dict(support_x=x[:21], support_y=kinds[y[:21]], query_x=x[21:])
  found = serve.predict(str(bundle), 'new_client', arrays)
  numbers = arrays | dict(support_y=y[:21])
  np.testing.assert_array_equal(
      found, serve.predict(bundle, 'new_client', numbers)
  )
  assert set(found) <= set(kinds)
  with pytest.raises(ValueError, match="ape, bee, cow, found 'owl'"):
    serve.predict(
        bundle, 'new_client', arrays | dict(support_y=np.array(['owl'] * 21))
    )
  scaling = np.load(bundle / serve.SCALING)
  np.testing.assert_allclose(
      experiment.dataset.preprocess(x),
      x * scaling['slope'] + scaling['offset'],
      atol=1e-4,
  )
  # Where names are numbers, too, nobody knows what a number means.
  other = json.loads(text) | dict(class_names=['1', '2', '3'])
  (bundle / serve.MANIFEST).write_text(json.dumps(other))
  (bundle / serve.SUMS).write_text(serve.to_text(serve.digests(bundle)))
  with pytest.raises(ValueError, match='1, 2, 3 as strings, .*found int64'):
    serve.predict(bundle, 'new_client', numbers)


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
  (root / 'manifest.json').write_text(json.dumps(manifest | {'format': 3}))
  (root / 'SHA256SUMS').write_text(serve.to_text(serve.digests(root)))
  with pytest.raises(serve.BundleError, match='of format 2, found 3'):
    serve.read_manifest(root)


@pytest.mark.parametrize(
    'use, changes, problem',
    [
        ('group', {}, "known_client, .*new_client, found 'group'"),
        (
            'new_client',
            {'query': np.zeros(3)},
            'seed, if you like.*y, query_x, q',
        ),
        ('new_client', {'support_y': np.zeros(20)}, 'int32 .*found float64'),
        ('new_client', {'support_y': np.full(20, 2**33)}, 'up to 8589934592'),
        ('new_client', {'support_y': np.arange(20)}, r'0\.\.9 .* 0\.\.19'),
        ('new_client', {'support_y': np.zeros(19, int)}, r'\[19\], found \[20'),
        ('new_client', {'query_x': np.zeros((2, 8, 8, 1))}, 'uint8 .* float64'),
        ('known_client', {}, 'Expected the arrays memory_0, memory_1'),
    ],
)
def test_arrays_that_do_not_fit_are_refused(fed_rep, use, changes, problem):
  experiment, _, bundle = fed_rep
  x, _, y = _examples(experiment, 30)
  arrays = dict(support_x=x[:20], support_y=y[:20], query_x=x[20:]) | changes
  with pytest.raises(ValueError, match=problem):
    serve.predict(bundle, use, arrays)


@pytest.mark.parametrize(
    'content, problem',
    [
        (b'', ''),
        (b'no archive', ''),
        (None, 'query_x, .*found support_x, queryx'),
    ],
)
def test_a_file_of_something_else_is_one_line(
    fed_rep, tmp_path, content, problem, capsys, monkeypatch
):
  monkeypatch.setattr(serve, '__file__', str(fed_rep[2] / 'serve.py'))
  if content is None:  # With a misspelt array.
    np.savez(tmp_path / 'x.npz', support_x=np.ones(2), queryx=np.ones(2))
  else:
    (tmp_path / 'x.npz').write_bytes(content)
  arguments = ['new_client', str(tmp_path / 'x.npz'), str(tmp_path / 'y.npy')]
  assert serve.main(arguments) == 2
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and re.search(problem, said)
  assert not (tmp_path / 'y.npy').exists()


@pytest.mark.parametrize('fails', ['the model', 'the disk'])
def test_what_was_there_stays_where_something_fails(
    fed_rep, tmp_path, fails, capsys, monkeypatch
):
  def fail(*_, **__):
    raise error

  experiment, _, bundle = fed_rep
  x, _, y = _examples(experiment, 30)
  source, target = tmp_path / 'x.npz', tmp_path / 'y.npy'
  np.savez(source, support_x=x[:20], support_y=y[:20], query_x=x[20:])
  target.write_bytes(b'before')
  monkeypatch.setattr(serve, '__file__', str(bundle / 'serve.py'))
  error = OSError('No space\nleft')
  if fails == 'the model':
    error = tf.errors.ResourceExhaustedError(None, None, 'No memory\nleft')
    model = types.SimpleNamespace(signatures={'adapt_and_predict': fail})
    monkeypatch.setattr(serve, '_load', lambda *_: model)
  else:
    monkeypatch.setattr(np, 'save', fail)
  assert serve.main(['new_client', str(source), str(target)]) == 2
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and re.search('No (space|memory) left', said)
  assert target.read_bytes() == b'before'
  assert set(tmp_path.iterdir()) == {source, target}


def test_no_queries_are_no_answers(fed_rep, monkeypatch):
  experiment, _, bundle = fed_rep
  x, _, y = _examples(experiment, 30)
  monkeypatch.setattr(serve, '_load', None)  # Some models end the process.
  arrays = dict(support_x=x, support_y=y, query_x=x[:0])
  assert serve.predict(bundle, 'new_client', arrays).shape == (0,)


def test_what_exports_of_other_hosts_have_begun_stays(tmp_path):
  names = socket.gethostname(), f'{socket.gethostname()}.b', 'other'
  begun = [tmp_path / f'.a[1].{name}.{2**40}' for name in names]
  for path in begun:
    path.mkdir()
  export._remove_leftovers(tmp_path / 'a[1]')
  assert [path.exists() for path in begun] == [False, False, True]


def test_python_may_keep_the_module(fed_rep, tmp_path):
  root = shutil.copytree(fed_rep[2], tmp_path / 'used')
  (root / '__pycache__').mkdir()
  (root / '__pycache__/serve.cpython-311.pyc').write_bytes(b'')
  serve.read_manifest(root)


def test_nothing_is_written_over(fed_rep):
  experiment, model, bundle = fed_rep
  before = pathlib.Path(bundle / serve.SUMS).read_bytes()
  with pytest.raises(FileExistsError, match='not to exist'):
    export.write(experiment, model, 0, bundle)
  assert pathlib.Path(bundle / serve.SUMS).read_bytes() == before
