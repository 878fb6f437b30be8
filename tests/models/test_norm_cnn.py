"""The network whose normalisation can be a client's own."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import models

SHAPE = (8, 9, 2)
RNG = np.random.default_rng(5)
MODEL = models.build('norm_cnn', SHAPE, 3)
BODY = {
    name: tf.constant(value.numpy() + 0.1 * RNG.normal(size=value.shape))
    for name, value in MODEL.initialize([3, 7])['body'].items()
}


def images(num):
  return RNG.normal(size=(num, *SHAPE))


def naive(x, statistics=None):
  """Returns the embedding, and the means and variances of every layer."""
  seen = {}
  for i in (1, 2):
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(
        padded, (3, 3), axis=(1, 2)
    )
    x = np.einsum('nhwcij,ijco->nhwo', windows, BODY[f'conv{i}_kernel'])
    mean, variance = f'norm{i}_mean', f'norm{i}_variance'
    seen |= {mean: x.mean((0, 1, 2)), variance: x.var((0, 1, 2))}
    by = statistics or seen
    x = (x - by[mean]) / np.sqrt(by[variance] + 1e-5)
    x = np.maximum(x * BODY[f'norm{i}_scale'] + BODY[f'norm{i}_offset'], 0)
    n, h, w, c = x.shape
    x = x[:, : h // 2 * 2, : w // 2 * 2].reshape(n, h // 2, 2, w // 2, 2, c)
    x = x.max((2, 4))
  return x.reshape(len(x), -1), seen


def test_a_batch_is_normalised_by_itself():
  x = images(4)
  embedding, _ = naive(x)
  assert embedding.shape == (4, MODEL.embedding_size)
  np.testing.assert_allclose(MODEL.embed(BODY, x, None), embedding, rtol=1e-8)


def test_statistics_are_those_of_every_layer():
  """Of the examples alone, not of padding."""
  x = images(5)
  padded = np.concatenate([x[:2], 9 + images(3), x[2:]])
  mask = np.array([1.0, 1, 0, 0, 0, 1, 1, 1])
  _, expected = naive(x)
  found = MODEL.statistics(BODY, padded, mask)
  initial = MODEL.initial_statistics()
  assert found.keys() == expected.keys() == initial.keys()
  for name, value in found.items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-8, atol=1e-12)
    assert initial[name].shape == value.shape
    np.testing.assert_array_equal(initial[name], float('variance' in name))


def test_with_statistics_images_do_not_see_each_other():
  x = images(4)
  statistics = MODEL.statistics(BODY, images(6), np.ones(6))
  predicting = BODY | statistics
  found = MODEL.embed(predicting, x, None)
  np.testing.assert_allclose(found, naive(x, statistics)[0], rtol=1e-8)
  np.testing.assert_allclose(
      MODEL.embed(predicting, x[1:2], None), found[1:2], rtol=1e-8
  )


def test_second_derivatives():
  """Of a direction: against the difference of gradients."""
  x, direction = images(3), tf.constant(RNG.normal(size=(3, 3, 2, 32)))

  def gradient(kernel):
    with tf.GradientTape() as tape:
      tape.watch(kernel)
      embedding = MODEL.embed(BODY | {'conv1_kernel': kernel}, x, None)
      loss = tf.reduce_sum(tf.sin(embedding))
    return tape.gradient(loss, kernel)

  kernel = BODY['conv1_kernel']
  with tf.GradientTape() as tape:
    tape.watch(kernel)
    slope = tf.reduce_sum(gradient(kernel) * direction)
  step = 1e-6 * direction
  difference = gradient(kernel + step) - gradient(kernel - step)
  np.testing.assert_allclose(
      tape.gradient(slope, kernel), difference / 2e-6, rtol=1e-4, atol=1e-5
  )


def test_what_is_no_image_is_named():
  for shape in ((8, 9), (3, 8, 1)):
    with pytest.raises(ValueError, match=r'at least 4, found \('):
      models.build('norm_cnn', shape, 3)
