import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import models
from tff_meta.losses import cross_entropy

SEED = (3, 7)
NETWORKS = [
    ('cafeme_base', (9, 8, 1)),
    ('conv4', (32, 32, 3)),
    ('conv4', (9, 11, 1)),
    ('fedec_mlp', (5, 4)),
    ('fedmeta_per_cifar', (32, 32, 3)),
    ('fedrep_cifar10', (18, 16, 1)),
    ('fedrep_cifar100', (16, 18, 1)),
    ('lenet', (28, 28, 1)),
    ('mlp', (4, 5)),
    ('modulated_cnn', (8, 9, 2)),
    ('modulated_mlp', (4, 5)),
    ('norm_cnn', (8, 9, 2)),
]


def images(num, input_shape):
  return np.random.default_rng(num).normal(size=(num, *input_shape))


def to_float64(weights):
  return tf.nest.map_structure(lambda w: tf.cast(w, tf.float64), weights)


def test_embeddings_depend_on_others_with_batch_normalisation_alone():
  seeing = {
      name
      for name, input_shape in NETWORKS
      if models.build(name, input_shape, 3).sees_neighbours()
  }
  assert seeing == {
      'cafeme_base',
      'conv4',
      'modulated_cnn',
      'modulated_mlp',
      'norm_cnn',
  }


@pytest.mark.parametrize(
    'name, input_shape, num_classes, expected',
    [
        ('lenet', (32, 32, 3), None, 120_332),
        ('lenet', (32, 32, 3), 10, 121_182),
        ('lenet', (32, 32, 3), 100, 128_832),
        ('conv4', (32, 32, 3), None, 113_088),
        ('conv4', (84, 84, 3), None, 113_088),
        ('conv4', (84, 84, 3), 64, 113_088 + 65 * 64),
        ('fedrep_cifar10', (32, 32, 3), 10, 307_842),
        ('fedrep_cifar100', (32, 32, 3), 100, 1_075_044),
        ('fedec_mlp', (28, 28, 1), 10, 218_058),
        ('fedmeta_per_cifar', (32, 32, 3), 10, 62_006),
        ('fedmeta_per_cifar', (32, 32, 3), None, 62_006 - 850),
        ('mlp', (28, 28, 1), 10, 79_510),
        ('mlp', (28, 28, 1), None, 79_510 - 1_010),
    ],
)
def test_number_of_parameters(name, input_shape, num_classes, expected):
  model = models.build(name, input_shape, num_classes)
  assert model.num_parameters() == expected
  weights = model.initialize(SEED)
  assert sum(w.numpy().size for w in tf.nest.flatten(weights)) == expected


@pytest.mark.parametrize('name, input_shape', NETWORKS)
@pytest.mark.parametrize('num_examples', [0, 1, 3])
def test_shapes(name, input_shape, num_examples):
  model = models.build(name, input_shape, 6)
  assert (model.name, model.input_shape) == (name, input_shape)
  weights = model.initialize(SEED)
  x = tf.constant(images(num_examples, input_shape), tf.float32)
  with tf.GradientTape() as tape:
    tape.watch(weights)
    embedding = model.embed(weights['body'], x, tf.ones([num_examples]))
    logits = model.logits(weights, x)
    loss = cross_entropy.softmax_cross_entropy(
        logits, tf.range(num_examples), tf.ones([num_examples])
    )
  assert embedding.shape == (num_examples, model.embedding_size)
  assert logits.shape == (num_examples, 6)
  for gradient in tf.nest.flatten(tape.gradient(loss, weights)):
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize('name, input_shape', NETWORKS)
def test_no_examples_in_a_graph(name, input_shape):
  """TensorFlow rewrites graphs: a row that is padded may be left out there."""
  model = models.build(name, input_shape, 6)
  body = model.initialize(SEED)['body']

  @tf.function(input_signature=[tf.TensorSpec([None, *input_shape])])
  def embed(x):
    return model.embed(body, x, tf.ones(tf.shape(x)[:1]))

  assert embed(tf.zeros([0, *input_shape])).shape == (0, model.embedding_size)


@pytest.mark.parametrize('name, input_shape', NETWORKS)
def test_variables_are_weights_too(name, input_shape):
  model = models.build(name, input_shape, 6)
  weights = model.initialize(SEED)
  x = tf.constant(images(3, input_shape), tf.float32)
  variables = tf.nest.map_structure(tf.Variable, weights)
  np.testing.assert_array_equal(
      model.logits(variables, x), model.logits(weights, x)
  )


@pytest.mark.parametrize('name, input_shape', NETWORKS)
def test_padding_changes_nothing(name, input_shape):
  model = models.build(name, input_shape, 6)
  weights = to_float64(model.initialize(SEED))
  x = images(4, input_shape)
  padded = np.concatenate([x[:1], 9.0 + x[:2], x[1:]])
  mask = np.array([1.0, 0, 0, 1, 1, 1])
  expected = model.logits(weights, x)
  actual = model.logits(weights, padded, mask)
  assert actual.dtype == tf.float64
  np.testing.assert_allclose(
      tf.boolean_mask(actual, mask > 0), expected, rtol=1e-8, atol=1e-10
  )


@pytest.mark.parametrize('name, input_shape', NETWORKS)
def test_float32_agrees_with_float64(name, input_shape):
  model = models.build(name, input_shape, 6)
  weights = model.initialize(SEED)
  x = images(4, input_shape)
  single = model.logits(weights, tf.constant(x, tf.float32))
  double = model.logits(to_float64(weights), x)
  # Float32 sums of up to 3,200 terms.
  np.testing.assert_allclose(single, double, atol=1e-4)


@pytest.mark.parametrize('name, input_shape', NETWORKS)
def test_traces_into_a_tff_graph(name, input_shape):
  model = models.build(name, input_shape, 6)

  @tff.tensorflow.computation(
      tff.types.tensorflow_to_type(tf.TensorSpec([None, *input_shape]))
  )
  def gradient(x):
    weights = model.initialize(SEED)
    with tf.GradientTape() as tape:
      tape.watch(weights)
      loss = tf.reduce_sum(model.logits(weights, x))
    return tape.gradient(loss, weights)

  expected = tf.nest.map_structure(
      lambda w: tf.TensorSpec(w.shape, w.dtype), model.initialize(SEED)
  )
  tff.types.tensorflow_to_type(expected).check_assignable_from(
      gradient.type_signature.result
  )


def test_the_seed_decides_and_the_head_does_not_change_the_body():
  model = models.build('mlp', (4, 5), 6)
  first, again = model.initialize([1, 2]), model.initialize([1, 2])
  tf.nest.map_structure(np.testing.assert_array_equal, first, again)
  other = model.initialize([1, 3])
  assert not np.any(first['body']['kernel'] == other['body']['kernel'])
  headless = model.without_head().initialize([1, 2])
  assert headless['head'] == collections.OrderedDict()
  wider = model.with_head(9).initialize([1, 2])
  for weights in (headless, wider):
    tf.nest.map_structure(
        np.testing.assert_array_equal, first['body'], weights['body']
    )
  assert wider['head']['kernel'].shape == (100, 9)
  seeds = dataclasses.replace(
      model, init_body=lambda seed: seed, init_head=lambda seed, _: seed
  ).initialize([1, 2])
  assert np.any(seeds['body'] != seeds['head'])


def test_logits_need_a_head():
  model = models.build('mlp', (4, 5), None)
  with pytest.raises(ValueError, match='with_head'):
    model.logits(model.initialize(SEED), np.zeros([1, 4, 5]))


def test_bad_requests_are_named():
  with pytest.raises(ValueError, match="conv4, .*, mlp, .* found 'resnet'"):
    models.build('resnet', (32, 32, 3), None)
  with pytest.raises(ValueError, match=r'at least 16, found \(8, 8, 1\)'):
    models.build('lenet', (8, 8, 1), None)
  for name, tip in {
      'conv4': 'use `mlp` for',
      'cafeme_base': 'use `mlp` for',
      'modulated_cnn': 'use `modulated_mlp` for',
      'norm_cnn': 'no network with .* vectors, so',
  }.items():
    with pytest.raises(ValueError, match=rf'least 4, found \(784,\).*{tip}'):
      models.build(name, (784,), None)
  with pytest.raises(ValueError, match='`num_classes` .* found 0'):
    models.build('mlp', (4, 5), 0)


def naive_conv(x, kernel, bias):
  """Valid convolution, [n, h, w, in]."""
  windows = np.lib.stride_tricks.sliding_window_view(
      x, kernel.shape[:2], axis=(1, 2)
  )
  return np.einsum('nhwcij,ijco->nhwo', windows, kernel) + bias


def naive_max_pool(x):
  n, height, width, channels = x.shape
  out = np.zeros([n, height // 2, width // 2, channels])
  for i in range(height // 2):
    for j in range(width // 2):
      out[:, i, j] = x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max((1, 2))
  return out


@pytest.mark.parametrize(
    'input_shape, is_padded, pooled_blocks',
    [
        ((32, 32, 3), False, (1, 2)),
        ((84, 84, 1), False, (1, 2, 3, 4)),
        ((9, 11, 2), True, (1, 2)),
    ],
)
def test_conv4_against_the_oracle(input_shape, is_padded, pooled_blocks):
  model = models.build('conv4', input_shape, None)
  rng = np.random.default_rng(6)
  body = to_float64(model.initialize(SEED))['body']
  for name, value in body.items():  # No zeros and ones.
    body[name] = value.numpy() + 0.1 * rng.normal(size=value.shape)
  x = images(2, input_shape)
  actual = model.embed(body, x, None)
  for i in (1, 2, 3, 4):
    if is_padded:
      x = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    x = naive_conv(x, body[f'conv{i}_kernel'], body[f'conv{i}_bias'])
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    x = (x - mean) / np.sqrt(variance + 1e-5)
    x = x * body[f'norm{i}_gamma'] + body[f'norm{i}_beta']
    x = np.maximum(x, 0)
    if i in pooled_blocks:
      x = naive_max_pool(x)
  side = {32: 2, 84: 3, 9: 2}[input_shape[0]]
  assert x.shape == (2, side, side, 64)
  np.testing.assert_allclose(actual, x.mean((1, 2)), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    'name, is_linear', [('lenet', True), ('fedmeta_per_cifar', False)]
)
def test_two_convolutions_against_the_oracle(name, is_linear):
  model = models.build(name, (28, 20, 1), 3)
  weights = to_float64(model.initialize(SEED))
  body, head = (
      {name: value.numpy() for name, value in weights[part].items()}
      for part in ('body', 'head')
  )
  x = images(2, (28, 20, 1))
  actual = model.embed(body, x, None), model.logits(weights, x)
  for layer in ('conv1', 'conv2'):
    x = naive_conv(x, body[f'{layer}_kernel'], body[f'{layer}_bias'])
    x = naive_max_pool(np.maximum(x, 0))
  x = x.reshape(2, -1) @ body['dense1_kernel'] + body['dense1_bias']
  x = np.maximum(x, 0) @ body['dense2_kernel'] + body['dense2_bias']
  embedding = x if is_linear else np.maximum(x, 0)
  logits = np.maximum(x, 0) @ head['kernel'] + head['bias']
  np.testing.assert_allclose(actual[0], embedding, rtol=1e-8, atol=1e-12)
  np.testing.assert_allclose(actual[1], logits, rtol=1e-8, atol=1e-12)
