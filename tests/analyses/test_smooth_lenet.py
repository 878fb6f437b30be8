"""The smooth LeNet: its sizes, and that it embeds every example alone."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.analyses import smooth_lenet


@pytest.mark.parametrize(
    'shape, num_parameters',
    [
        # Convolutions 300c + 12, 3612, 3612; dense (64 * 12 + 1) * 84.
        ((32, 32, 3), 912 + 2 * 3612 + 64_596),
        # Sides 28, 14, 7: dense (49 * 12 + 1) * 84.
        ((28, 28, 1), 312 + 2 * 3612 + 49_476),
        # Sides 7, 4, 2 and 9, 5, 3: dense (6 * 12 + 1) * 84.
        ((7, 9, 1), 312 + 2 * 3612 + 6_132),
    ],
)
def test_sizes(shape, num_parameters):
  model = smooth_lenet.build_smooth_lenet(shape)
  assert model.num_parameters() == num_parameters
  classifier = model.with_head(10)
  assert classifier.num_parameters() == num_parameters + 85 * 10
  weights = classifier.initialize(tf.constant([0, 1]))
  kernel = weights['body']['conv0_kernel'].numpy()
  assert 0.45 < np.abs(kernel).max() <= 0.5
  x = np.random.default_rng(0).uniform(size=(3, *shape))
  together = model.embed(weights['body'], x, None)
  assert together.shape == (3, 84)
  alone = model.embed(weights['body'], x[1:2], None)
  np.testing.assert_allclose(together[1:2], alone, rtol=1e-4, atol=1e-5)
  assert np.std(classifier.logits(weights, x), 0).min() > 0
