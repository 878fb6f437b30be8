"""CAFeMe's networks: their sizes and gates, and what a context does."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import models
from tff_meta.models import modulated_cnn

SEED = (3, 7)
RNG = np.random.default_rng(5)
SHAPES = [(8, 9, 2), (28, 28, 1), (32, 32, 3)]
SMALL = (8, 9, 2)


def to_float64(weights):
  return tf.nest.map_structure(lambda w: tf.cast(w, tf.float64), weights)


def images(num, shape=SMALL):
  return RNG.normal(size=(num, *shape))


def build(shape=SMALL, num_classes=3, *, gating='c1', num_labels=0):
  """A network and weights in float64, none of them zero or one."""
  model = modulated_cnn.build_modulated_cnn(
      shape, num_classes, gating=gating, num_labels=num_labels
  )
  weights = tf.nest.map_structure(
      lambda w: w + 0.05 * RNG.normal(size=w.shape),
      to_float64(model.initialize(SEED)),
  )
  return model, weights


def to_numpy(parameters):
  return {name: value.numpy() for name, value in parameters.items()}


def count(parameters):
  return sum(w.numpy().size for w in tf.nest.flatten(parameters))


@pytest.mark.parametrize(
    'shape, base, modulator, num_gates',
    [
        ((28, 28, 1), 583_242, 543_220, 1632),
        ((32, 32, 3), 1_006_858, 725_000, 2368),
    ],
)
def test_published_sizes(shape, base, modulator, num_gates):
  model = models.build('modulated_cnn', shape, 10)
  weights = model.initialize(SEED)
  assert count(weights['body']['base']) + count(weights['head']) == base
  assert count(weights['body']['modulator']) == modulator
  assert model.num_parameters() == base + modulator
  assert models.build('cafeme_base', shape, 10).num_parameters() == base
  x = tf.zeros([2, *shape])
  assert model.modulate(weights['body'], x, None).shape == (1, num_gates)
  film = model.rebuild(10, gating='c2', num_labels=0).initialize(SEED)
  assert count(film['body']['modulator']) == modulator + 201 * num_gates
  labeled = model.rebuild(10, gating='c1', num_labels=10).initialize(SEED)
  assert count(labeled['body']['modulator']) == modulator + 10 * 200
  assert labeled['body']['modulator']['dense_kernel'].shape == (210, 200)


def test_same_seed_same_base():
  model = models.build('modulated_cnn', SMALL, 3)
  base = models.build('cafeme_base', SMALL, 3)
  ours, theirs = model.initialize(SEED), base.initialize(SEED)
  tf.nest.map_structure(
      np.testing.assert_array_equal,
      (ours['body']['base'], ours['head']),
      (theirs['body'], theirs['head']),
  )
  assert model.rebuild(5, gating='c2', num_labels=5).num_labels == 5
  assert model.with_head(7).num_classes == 7


@pytest.mark.parametrize('num_labels', [0, 3])
def test_eta_sees_a_set(num_labels):
  """Not an order, not how often all of it comes, and no padding."""
  model, weights = build(num_labels=num_labels)
  body, x, y = weights['body'], images(5), np.array([0, 2, 1, 1, 0], np.int32)
  eta = model.modulate(body, x, y)
  order = np.array([3, 0, 4, 2, 1])
  kwargs = dict(rtol=1e-9, atol=1e-12)
  permuted = model.modulate(body, x[order], y[order])
  np.testing.assert_allclose(permuted, eta, **kwargs)
  twice = model.modulate(body, np.concatenate([x, x]), np.concatenate([y, y]))
  np.testing.assert_allclose(twice, eta, **kwargs)
  padded = model.modulate(
      body,
      np.concatenate([x, images(2)]),
      np.append(y, [2, 2]),
      np.array([1.0] * 5 + [0] * 2),
  )
  np.testing.assert_allclose(padded, eta, **kwargs)
  other_labels = model.modulate(body, x, y[order])
  other_images = model.modulate(body, images(5), y)
  assert np.abs(other_images - eta).max() > 1e-4
  # Another pairing of images and labels has the same means of both.
  np.testing.assert_allclose(other_labels, eta, **kwargs)
  other_classes = model.modulate(body, x, np.array([0, 2, 1, 1, 1]))
  assert (np.abs(other_classes - eta).max() > 1e-4) == bool(num_labels)


def test_a_context_of_no_examples_is_one_of_zeros():
  model, weights = build(num_labels=3)
  modulator = to_numpy(weights['body']['modulator'])
  eta = model.modulate(
      weights['body'], tf.constant(images(0)), np.zeros(0, np.int32)
  )
  z = np.maximum(modulator['dense_bias'], 0)
  expected = z @ modulator['eta_kernel'] + modulator['eta_bias']
  np.testing.assert_allclose(eta[0], expected, rtol=1e-9)


@pytest.mark.parametrize('shape', SHAPES)
def test_open_gates_are_the_base_network(shape):
  """As eta grows, sigmoid(eta) is 1; FiLM with 1 and 0 is the same."""
  x = images(3, shape)
  base = models.build('cafeme_base', shape, 3)
  for gating, eta in (('c1', [60.0]), ('c0', [0.0]), ('c2', [1.0, 0.0])):
    model, weights = build(shape, gating=gating)
    size = model.modulate(weights['body'], x, None).shape[1]
    eta = tf.constant([[e] * size for e in eta], tf.float64)
    expected = base.embed(weights['body']['base'], x, None)
    actual = model.embed_modulated(weights['body'], eta, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
    logits = model.modulated_logits(weights, eta, x)
    np.testing.assert_allclose(
        logits, base.classify(weights['head'], expected), rtol=1e-9
    )


def test_shut_gates_let_nothing_pass():
  model, weights = build()
  size = model.modulate(weights['body'], images(2), None).shape[1]
  shut = tf.fill([1, size], tf.constant(-800.0, tf.float64))
  embedding = model.embed_modulated(weights['body'], shut, images(3))
  np.testing.assert_array_equal(embedding, np.zeros([3, 128]))


def naive_norm(parameters, name, x):
  axes = tuple(range(x.ndim - 1))
  x = (x - np.mean(x, axes)) / np.sqrt(np.var(x, axes) + 1e-5)
  return x * parameters[f'{name}_gamma'] + parameters[f'{name}_beta']


def naive_blocks(parameters, x, gate):
  for i in (1, 2):
    kernel = parameters[f'conv{i}_kernel']
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(
        padded, (3, 3), axis=(1, 2)
    )
    x = np.einsum('nhwcij,ijco->nhwo', windows, kernel)
    x = x + parameters[f'conv{i}_bias']
    x = np.maximum(naive_norm(parameters, f'conv{i}', x), 0)
    n, h, w, c = x.shape
    x = x[:, : h // 2 * 2, : w // 2 * 2].reshape(n, h // 2, 2, w // 2, 2, c)
    x = gate(i - 1, x.max((2, 4)))
  return x.reshape(len(x), -1)


@pytest.mark.parametrize('gating', ['c1', 'c0', 'c2'])
def test_against_the_oracle(gating):
  """Labels enter after the features; gates act after pooling and flattening."""
  model, weights = build(gating=gating, num_labels=3)
  base, modulator = (
      to_numpy(weights['body'][part]) for part in ('base', 'modulator')
  )
  context, y, x = images(4), np.array([2, 0, 2, 1]), images(3)

  h = naive_blocks(modulator, context, lambda i, a: a)
  for i in (1, 2):
    h = h @ modulator[f'dense{i}_kernel'] + modulator[f'dense{i}_bias']
    h = np.maximum(h, 0)
  z = np.mean(np.concatenate([h, np.eye(3)[y]], 1), 0)
  z = np.maximum(z @ modulator['dense_kernel'] + modulator['dense_bias'], 0)
  eta = z @ modulator['eta_kernel'] + modulator['eta_bias']
  eta = np.reshape(eta, [-1, 32 + 64 + 256 + 128])
  assert len(eta) == (2 if gating == 'c2' else 1)
  actual = model.modulate(weights['body'], context, y)
  np.testing.assert_allclose(actual, eta, rtol=1e-8)

  parts = np.split(eta, np.cumsum([32, 64, 256]), axis=1)
  gate = {
      'c1': lambda i, a: a / (1 + np.exp(-parts[i][0])),
      'c0': lambda i, a: a + parts[i][0],
      'c2': lambda i, a: a * parts[i][0] + parts[i][1],
  }[gating]
  a = gate(2, naive_blocks(base, x, gate))
  a = a @ base['dense1_kernel'] + base['dense1_bias']
  a = gate(3, np.maximum(naive_norm(base, 'dense1', a), 0))
  expected = a @ weights['head']['kernel'] + weights['head']['bias']
  actual = model.modulated_logits(weights, tf.constant(eta), x)
  np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-10)


def test_without_labels_the_batch_is_its_own_context():
  model, weights = build()
  x = images(4)
  eta = model.modulate(weights['body'], x, None)
  np.testing.assert_allclose(
      model.logits(weights, x), model.modulated_logits(weights, eta, x)
  )
  labeled, weights = build(num_labels=3)
  with pytest.raises(ValueError, match='embed_modulated'):
    labeled.logits(weights, x)


def test_biases_before_batch_normalisation_have_no_gradient():
  """Not even of rounding noise; and they change no output."""
  model, weights = build()
  x = images(4)
  with tf.GradientTape() as tape:
    tape.watch(weights)
    logits = model.logits(weights, x)
  gradients = tape.gradient(logits, weights)
  for part, name in (
      ('base', 'conv1_bias'),
      ('base', 'conv2_bias'),
      ('base', 'dense1_bias'),
      ('modulator', 'conv1_bias'),
      ('modulator', 'conv2_bias'),
  ):
    np.testing.assert_array_equal(gradients['body'][part].pop(name), 0)
    weights['body'][part][name] += 3.0
  np.testing.assert_allclose(model.logits(weights, x), logits, rtol=1e-7)
  for gradient in tf.nest.flatten(gradients):
    assert np.abs(gradient).max() > 1e-9


def test_a_modulated_perceptron():
  model = models.build('modulated_mlp', (4, 2), 3)
  weights = to_float64(model.initialize(SEED))
  x = images(3, (4, 2))
  eta = np.ones([1, 8 + 100]) * 60.0
  base, head = weights['body']['base'], weights['head']
  hidden = x.reshape(3, 8) @ base['dense1_kernel'] + base['dense1_bias']
  expected = np.maximum(hidden, 0) @ head['kernel'] + head['bias']
  np.testing.assert_allclose(
      model.modulated_logits(weights, eta, x), expected, rtol=1e-9
  )
  assert model.rebuild(5, gating='c2', num_labels=5).name == 'modulated_mlp'
  assert model.modulate(weights['body'], x, None).shape == (1, 108)


def test_bad_requests_are_named():
  with pytest.raises(ValueError, match='c1, c0, c2, found .film'):
    modulated_cnn.build_modulated_cnn(SMALL, 3, gating='film')
  for name in ('modulated_cnn', 'cafeme_base'):
    with pytest.raises(ValueError, match=r'at least 4, found \(3, 8, 1\)'):
      models.build(name, (3, 8, 1), 3)
