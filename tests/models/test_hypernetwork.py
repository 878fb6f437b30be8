"""A perceptron that makes the weights of another network."""

import few_round_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tff_meta import models
from tff_meta.models import hypernetwork as hypernetwork_lib

SEED = (3, 7)


def build(hidden_layers=2, num_classes=4):
  return hypernetwork_lib.Hypernetwork(
      oracle.build_model().with_head(num_classes), 5, hidden_layers, 3
  )


def test_number_of_parameters():
  """LeNet's 121,182 by a hundred features and a bias; four layers of 100."""
  lenet = models.build('lenet', (32, 32, 3), 10)
  hypernetwork = hypernetwork_lib.Hypernetwork(lenet, 13, 3, 100)
  with tf.Graph().as_default():
    weights = hypernetwork.initialize(SEED)
    body, head = (
        sum(w.shape.num_elements() for w in tf.nest.flatten(weights[part]))
        for part in ('body', 'head')
    )
  assert body == 14 * 100 + 3 * 101 * 100
  assert head == 101 * 121_182


@pytest.mark.parametrize('hidden_layers', [0, 1, 2])
def test_weights_by_a_naive_implementation(hidden_layers):
  """Units are rectified but for the last ones; tensors are row by row."""
  hypernetwork = build(hidden_layers)
  weights = hypernetwork.initialize(SEED)
  v = np.float32([0.5, -1.0, 2.0, 0.1, -0.7])

  actual = hypernetwork.generate(weights, tf.constant(v))

  units = v.tolist()
  for layer in range(hidden_layers + 1):
    if layer:
      units = [max(u, 0.0) for u in units]
    kernel = weights['body'][f'dense{layer}_kernel'].numpy()
    bias = weights['body'][f'dense{layer}_bias'].numpy()
    units = [
        sum(units[i] * kernel[i, j] for i in range(len(units))) + bias[j]
        for j in range(3)
    ]
  assert list(actual) == ['body', 'head']
  target = hypernetwork.target.initialize(SEED)
  for part in ('body', 'head'):
    assert list(actual[part]) == list(target[part])
    for name, tensor in target[part].items():
      kernel = weights['head']['kernels'][part][name].numpy()
      bias = weights['head']['biases'][part][name].numpy()
      assert actual[part][name].shape == tensor.shape
      expected = [
          sum(units[i] * kernel[i, j] for i in range(3)) + bias[j]
          for j in range(len(bias))
      ]
      np.testing.assert_allclose(
          np.ravel(actual[part][name]), expected, rtol=1e-5, atol=1e-6
      )


def test_initial_weights_are_apart():
  """The same seed draws the same ones; no two tensors begin alike."""
  first, again, other = (
      tf.nest.flatten(build().initialize(seed)) for seed in (SEED, SEED, (3, 8))
  )
  for a, b, c in zip(first, again, other, strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.all(np.abs(a - c) > 0)
  starts = [float(np.ravel(leaf)[0]) for leaf in first]
  assert len(set(starts)) == len(starts)
  # Of a dense layer on three units.
  head = np.concatenate(
      [np.ravel(w) for w in tf.nest.flatten(build().initialize(SEED)['head'])]
  )
  assert 0.95 / 3**0.5 < np.abs(head).max() <= 1 / 3**0.5
  # How many classes there are does not matter to the body.
  body = build(num_classes=7).initialize(SEED)['body']
  for a, b in zip(
      tf.nest.flatten(body),
      tf.nest.flatten(build().initialize(SEED)['body']),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)
