"""Named scalings, on numbers worked out by hand."""

import numpy as np
import pytest

from tff_meta.datasets import cifar10
from tff_meta.datasets import cifar100
from tff_meta.datasets import cinic10
from tff_meta.datasets import digits
from tff_meta.datasets import femnist
from tff_meta.datasets import mnist
from tff_meta.datasets import scalings

# One image of 1x2 pixels, three channels.
PIXELS = np.array([[[[0, 51, 255], [255, 102, 0]]]], np.uint8)


@pytest.mark.parametrize(
    'scale, expected',
    [
        (cifar10.SCALINGS['unit'], [[0, 0.2, 1], [1, 0.4, 0]]),
        (cifar10.SCALINGS['raw'], [[0, 51, 255], [255, 102, 0]]),
        (cifar10.SCALINGS['centered'], [[-1, -0.6, 1], [1, -0.2, -1]]),
        (scalings.per_channel(PIXELS), [[-1, -1, 1], [1, 1, -1]]),
        (scalings.per_channel(np.ones_like(PIXELS)), PIXELS[0, 0] - 1.0),
        (femnist.SCALINGS['ink'], [[1, 0.8, 0], [0, 0.6, 1]]),
        (femnist.SCALINGS['cafeme'], [[1, 0.6, -1], [-1, 0.2, 1]]),
        (
            mnist.SCALINGS['standard'],
            [
                [-0.1307 / 0.3081, 0.0693 / 0.3081, 0.8693 / 0.3081],
                [0.8693 / 0.3081, 0.2693 / 0.3081, -0.1307 / 0.3081],
            ],
        ),
        (
            cifar10.SCALINGS['metavers'],
            [
                [-0.4914 / 0.2023, -0.2822 / 0.1994, 0.5535 / 0.2010],
                [0.5086 / 0.2023, -0.0822 / 0.1994, -0.4465 / 0.2010],
            ],
        ),
        (
            cifar100.SCALINGS['metavers'],
            [
                [-0.5071 / 0.2673, -0.2865 / 0.2564, 0.5591 / 0.2762],
                [0.4929 / 0.2673, -0.0865 / 0.2564, -0.4409 / 0.2762],
            ],
        ),
        (
            cinic10.SCALINGS['metavers'],
            [
                [-1.978418, -1.142682, 2.201081],
                [2.152826, -0.303335, -1.663677],
            ],
        ),
    ],
)
def test_scaling_by_hand(scale, expected):
  scaled = scale(PIXELS)
  assert scaled.dtype == np.float32
  # float32 with a division each: a few units in the last place.
  np.testing.assert_allclose(scaled[0, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('num_images', [0, 5])
@pytest.mark.parametrize('dtype', [np.uint8, np.float32, np.float64])
def test_scaling_rounds_as_its_formula_does_and_leaves_its_input(
    dtype, num_images
):
  rng = np.random.default_rng(0)
  x = rng.integers(0, 256, (num_images, 4, 3, 3)).astype(dtype)
  before = x.copy()
  for scale in (
      cifar10.SCALINGS['metavers'],
      femnist.SCALINGS['cafeme'],
      scalings.per_pixel(rng.integers(0, 256, (9, 4, 3, 3))),
  ):
    for pixels in (x, x[:, ::-1], x[..., ::-1]):
      expected = np.float32(pixels) / np.float32(scale.divisor)
      expected = (expected - np.float32(scale.mean)) / np.float32(scale.std)
      np.testing.assert_array_equal(scale(pixels), expected)
  np.testing.assert_array_equal(x, before)


def test_every_pixel_has_a_mean_and_a_deviation_of_its_own():
  images = np.array([[[[0], [7]], [[10], [9]]], [[[4], [7]], [[30], [5]]]])
  scale = scalings.per_pixel(images.astype(np.uint8))
  # Means 2, 7, 20, 7; deviations 2, 0, 10, 2.
  np.testing.assert_allclose(
      scale(images[:1])[0, ..., 0],
      [[-2 / 2.001, 0], [-10 / 10.001, 2 / 2.001]],
      rtol=1e-6,
  )


def test_digits_are_scaled_by_their_own_maximum():
  scaled = digits.SCALINGS['unit'](np.array([0, 4, 16], np.uint8))
  np.testing.assert_array_equal(scaled, np.float32([0, 0.25, 1]))


def test_unknown_scaling_lists_the_known_ones():
  with pytest.raises(ValueError, match="unit, raw, .*, found 'Unit'"):
    scalings.choose(cifar10.SCALINGS, 'Unit')
