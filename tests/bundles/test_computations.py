"""TFF's computations and a client's round in a bundle, without tff_meta."""

import collections
from concurrent import futures
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import aggregation
from tff_meta import fitting
from tff_meta import registry
from tff_meta.bundles import computations
from tff_meta.bundles import export
from tff_meta.bundles import replay
from tff_meta.bundles import serve
from tff_meta.bundles import signatures
from tff_meta.training import checkpoints
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import run_config

_SYSTEMS = 'frl', 'metavers', 'cafeme', 'fedec', 'fedmeta_per'


def _write(root, algorithm, **settings):
  """Exports what there is after a round, its computations, too."""
  pairs = 'known_client' not in registry.get(algorithm).uses
  config = run_config.resolve(
      **fitting._SETTINGS
      | dict(algorithm=algorithm, dataset='digit_pairs' if pairs else 'digits')
      | dict(rounds=4, seed=0, protocols=('none',))
      | settings
  )
  experiment = experiment_lib.prepare(config)
  process = experiment.build_process()
  trained = computations.Trained(
      process,
      process.initialize(),
      experiment.model.input_shape,
      experiment.dataset.num_classes,
  )
  client = replay.to_sequences(
      process.next.type_signature.parameter[1].member,
      computations._made_up_client(trained, 0),
  )
  trained = trained._replace(state=process.next(trained.state, [client]).state)
  return trained, export.write(
      experiment,
      protocols.untrained_model(process),
      0,
      root / 'bundle',
      allow_private_heads=True,
      trained=trained,
      tflite=True,
  )


@pytest.fixture(scope='module')
def fed_rep(tmp_path_factory):
  return _write(tmp_path_factory.mktemp('fed_rep'), 'fed_rep', model='mlp')


@pytest.fixture(scope='module')
def scaffold(tmp_path_factory):
  return _write(tmp_path_factory.mktemp('scaffold'), 'scaffold', model='mlp')


def _replay(bundle, form='next'):
  """Runs replay.py where tff_meta cannot be imported."""
  absent = (
      "import runpy, sys; sys.modules['tff_meta'] = None; sys.argv ="
      " sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
  )
  return subprocess.run(
      [sys.executable, '-c', absent, str(bundle / 'replay.py'), form],
      env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'},
      capture_output=True,
      text=True,
      timeout=600,
      check=False,
  )


@pytest.mark.ci
@pytest.mark.parametrize('form', replay.FORMS)
def test_a_round_is_replayed_without_the_library(fed_rep, form):
  found = _replay(fed_rep[1], form)
  assert found.returncode == 0, found.stderr
  assert found.stdout.startswith(f'{form} differs from the recorded round by')


@pytest.mark.ci
def test_noise_of_any_aggregation_is_not_replayed(tmp_path, monkeypatch):
  monkeypatch.setattr(aggregation.Plain, 'adds_noise', True)
  _, bundle = _write(tmp_path, 'fed_avg', model='mlp')
  assert not serve.read_manifest(bundle)['computations']['replayable']


@pytest.mark.ci
def test_a_form_that_tff_does_not_make_is_named(tmp_path, monkeypatch):
  kind = aggregation.Compressed
  monkeypatch.setattr(kind, 'has_distribute_aggregate_form', True)
  with pytest.raises(
      ValueError, match='`has_distribute_aggregate_form = False`'
  ):
    _write(tmp_path, 'fed_avg', model='mlp', aggregation='compressed')
  assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_a_round_that_differs_is_noticed(fed_rep, tmp_path):
  root = shutil.copytree(fed_rep[1], tmp_path / 'other')
  path = root / 'computations/round/state_after.npz'
  arrays = replay.read_arrays(path)
  name = max(arrays, key=lambda name: arrays[name].size)
  arrays[name].flat[3] += 2e-6
  np.savez(path, **arrays)
  found = _replay(root)
  assert found.returncode == 2 and 'as SHA256SUMS says' in found.stderr
  (root / serve.SUMS).write_text(serve.to_text(serve.digests(root)))
  assert _replay(root).returncode == 1


@pytest.mark.ci
@pytest.mark.parametrize('tflite', [False, True], ids=['saved model', 'lite'])
@pytest.mark.parametrize('name', ['fed_rep', 'scaffold'])
def test_a_client_round_is_that_of_training(name, tflite, request):
  """Of a client that has a memory: what it sends, and what it keeps."""
  trained, bundle = request.getfixturevalue(name)
  client = replay.read_arrays(bundle / 'computations/round/client_1.npz')
  manifest = serve.read_manifest(bundle)[serve.CLIENT_ROUND]
  fed = dict(replay.read_arrays(bundle / 'client_round.npz'))
  fed |= {
      'x': client['examples/x'],
      'y': client['examples/y'],
      'salt': client['salt'],
      'memory_present': client['memory/present'],
  }
  fed |= {
      name: client[f'memory/value/{path}']
      for name, path in manifest['paths'].items()
      if name.startswith('memory_')
  }
  assert fed.keys() == manifest['inputs'].keys()
  if tflite:
    interpreter = tf.lite.Interpreter(str(bundle / 'client_round.tflite'))
    found = interpreter.get_signature_runner('client_round')(**fed)
  else:
    loaded = tf.saved_model.load(str(bundle / 'client_round'))
    tensors = {name: tf.constant(array) for name, array in fed.items()}
    found = loaded.signatures['client_round'](**tensors)
  assert sorted(found) == manifest['outputs']

  data = replay.to_sequences(
      trained.process.next.type_signature.parameter[1].member, client
  )
  output, memories = trained.process.next_with_memory(
      trained.state, [collections.OrderedDict(data)]
  )
  before, after = (
      checkpoints.to_arrays(state.global_model_weights.trainable)
      for state in (trained.state, output.state)
  )
  kept = checkpoints.to_arrays(memories[0].value)
  moved = 0
  for name, path in manifest['paths'].items():
    if name.startswith('update_'):
      path = path.removeprefix('trainable/')
      expected = before[path] - after[path]
      moved += np.abs(expected).sum()
    elif name.startswith('memory_'):
      expected = kept[path]
    else:
      continue
    np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
  assert moved and found['memory_present'] and found['num_examples'] > 0


@pytest.mark.ci
def test_what_is_adapted_once_predicts_later(fed_rep):
  """Also in TensorFlow Lite's interpreter."""
  _, bundle = fed_rep
  rng = np.random.default_rng(1)
  x = rng.integers(0, 17, [30, 8, 8, 1]).astype(np.uint8)
  support = dict(support_x=x[:20], support_y=np.arange(20, dtype=np.int32) % 10)
  expected = serve.predict(bundle, 'new_client', support | {'query_x': x[20:]})
  assert len(set(expected)) > 1
  for tflite in (False, True):
    adapted = serve.adapt(bundle, 'new_client', support, tflite)
    found = serve.predict(
        bundle, 'new_client', adapted | {'query_x': x[20:]}, tflite
    )
    np.testing.assert_array_equal(found, expected)
  with futures.ThreadPoolExecutor(6) as pool:
    asked = support | {'query_x': x[20:]}
    for found in pool.map(
        lambda _: serve.predict(bundle, 'new_client', asked, True), range(60)
    ):
      np.testing.assert_array_equal(found, expected)
  nobody = dict(support_x=x[:0], support_y=np.zeros(0, np.int32))
  with pytest.raises(ValueError, match='examples in support_y with TensorFlow'):
    serve.adapt(bundle, 'new_client', nobody, tflite=True)
  with pytest.raises(ValueError, match='Expected the arrays adapted_0.*query'):
    serve.predict(bundle, 'new_client', adapted | support)


@pytest.mark.ci
def test_groups_of_linear_heads_are_served_by_tensorflow_lite(tmp_path):
  """Also one of whose clients has no examples."""
  _, bundle = _write(tmp_path, 'fed_avg_ft', model='mlp', dataset='digit_pairs')
  y = np.arange(60) % 2
  x = np.zeros([60, 8, 16, 1], np.uint8)
  x[y == 0, :, :8] = x[y == 1, :, 8:] = 16
  group = dict(
      support_x=x.reshape(3, 20, 8, 16, 1),
      support_y=y.reshape(3, 20),
      query_x=x,
      support_mask=np.arange(60).reshape(3, 20) < 35,
  )
  found = [serve.predict(bundle, 'group', group, lite) for lite in (0, 1)]
  assert len(set(found[0])) > 1
  np.testing.assert_array_equal(*found)


@pytest.mark.ci
def test_what_converts_but_does_not_run_is_refused(tmp_path):
  function = tf.function(lambda x: {'y': tf.reshape(x, [-1, 3])})
  concrete = function.get_concrete_function(tf.TensorSpec([None, 2], name='x'))
  manifest = {'inputs': {'x': {'dtype': 'float32', 'shape': [None, 2]}}}
  traced = signatures.Traced(tf.Module(), {'use': concrete}, manifest)
  export._save(traced, tmp_path / 'use')
  with pytest.raises(ValueError, match='Lite to take use, .*RuntimeError'):
    export._convert(tmp_path / 'use', traced, 2)
  assert not (tmp_path / 'use.tflite').exists()


@pytest.mark.ci
def test_an_example_store_is_told_what_to_deliver(fed_rep):
  trained, bundle = fed_rep
  wanted = json.loads((bundle / 'computations/data.json').read_text())
  assert wanted.keys() == {'examples', 'salt', 'memory'}
  assert wanted['examples']['elements'] == {
      'x': {'dtype': 'float32', 'shape': [None, 8, 8, 1]},
      'y': {'dtype': 'int32', 'shape': [None]},
  }
  types = (bundle / 'computations/types.txt').read_text()
  for name in ('initialize', 'memory', 'map_reduce/work', 'next_on_tensors'):
    computation = replay.read_computation(bundle / f'computations/{name}.pb')
    line = f'{name}: {computation.type_signature.compact_representation()}\n'
    assert line in types
  assert (
      tff.types.to_type(
          trained.process.next.type_signature
      ).compact_representation()
      in types
  )


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', _SYSTEMS)
def test_systems_are_replayed_without_the_library(tmp_path, algorithm):
  _, bundle = _write(tmp_path, algorithm)
  for form in replay.FORMS:
    found = _replay(bundle, form)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', registry.ALGORITHMS)
def test_every_algorithm_is_exported(tmp_path, algorithm):
  """With a small network, where it takes any."""
  spec = registry.get(algorithm)
  _, bundle = _write(tmp_path, algorithm, model=spec.model or 'mlp')
  manifest = serve.read_manifest(bundle)
  assert set(manifest['uses']) >= set(spec.uses) - {'new_class', 'group'}
  assert manifest['uses'] and manifest['computations']['names']
  for name in (*manifest['uses'], serve.CLIENT_ROUND):
    tf.lite.Interpreter(str(bundle / f'{name}.tflite')).allocate_tensors()
    tf.saved_model.load(str(bundle / name))


@pytest.mark.slow
def test_a_thousand_flipped_bytes_are_refused(fed_rep, tmp_path):
  changed = shutil.copytree(fed_rep[1], tmp_path / 'changed')
  files = [path for path in sorted(changed.rglob('*')) if path.is_file()]
  rng = np.random.default_rng(0)
  for number in range(1000):
    path = files[number % len(files)]
    kept = path.read_bytes()
    content = bytearray(kept)
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)
    with pytest.raises(serve.BundleError):
      serve.read_manifest(changed)
    path.write_bytes(kept)
  serve.read_manifest(changed)
