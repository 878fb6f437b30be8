"""How raw pixels become network input: named, so that a flag can choose."""

from collections.abc import Mapping
import dataclasses
import math
from typing import TypeVar

import numpy as np

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Scaling:
  """Maps raw pixels x to (x / divisor - mean) / std, as float32.

  Attributes:
    divisor: The raw value that stands for 1, e.g. 255.
    mean: One number, or one per channel, or one per pixel and channel (an array
      of the shape of an image); subtracted after the division.
    std: Likewise; a negative value inverts the image.
  """

  divisor: float = 255.0
  mean: tuple[float, ...] | np.ndarray = (0.0,)
  std: tuple[float, ...] | np.ndarray = (1.0,)

  # Whatever the pixels come to, it was asked for: `corpus.warn_of_scale`.
  is_deliberate = True

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """Returns float32 of the shape of `x` (channels last)."""
    scaled = np.array(x, np.float32, order='C')
    # An image as one row: NumPy is slow at many short ones, as of channels.
    rows = scaled.reshape(len(scaled), math.prod(scaled.shape[1:]))
    rows /= np.float32(self.divisor)
    rows -= _to_row(self.mean, scaled.shape[1:])
    rows /= _to_row(self.std, scaled.shape[1:])
    return scaled


def _to_row(values, image_shape):
  """Numbers as broadcast to an image, float32 [number of its pixels]."""
  return np.broadcast_to(np.float32(values), image_shape or 1).reshape(-1)


# FRL's code: pixels as they are.
RAW = Scaling(divisor=1.0)
# [0, 1].
UNIT = Scaling()
# [-1, 1], as FedMeta-Per scales CIFAR-10.
CENTERED = Scaling(mean=(0.5,), std=(0.5,))


def per_pixel(images: np.ndarray) -> Scaling:
  """Returns the scaling that gives every pixel mean 0 and about variance 1.

  0.001 is added to the deviations: a pixel that never varies becomes 0. One
  that seldom does becomes large where it does; in MNIST up to 264.

  Args:
    images: Raw pixels [n, height, width, channels], 0..255; what the means and
      deviations are over.

  Source: pFedMe (Dinh et al., NeurIPS 2020), released generator of MNIST.
  """
  images = images.astype(np.float32)
  return Scaling(
      divisor=1.0, mean=images.mean(axis=0), std=images.std(axis=0) + 0.001
  )


def standard(examples: np.ndarray) -> Scaling:
  """Returns the scaling that gives every number mean 0 and variance 1.

  A number that never varies becomes 0. One that seldom does becomes large where
  it does, such as a pixel at the border of drawings.

  Args:
    examples: Raw numbers [n, ...]; what means and deviations are over.
  """
  examples = examples.astype(np.float64)
  deviations = examples.std(axis=0)
  # Of equal numbers the rounding of their mean is no deviation.
  varies = (examples != examples[:1]).any(axis=0)
  return Scaling(
      divisor=1.0,
      mean=examples.mean(axis=0).astype(np.float32),
      std=np.where(varies, deviations, 1.0).astype(np.float32),
  )


def per_channel(images: np.ndarray) -> Scaling:
  """Returns the scaling that gives every channel mean 0 and variance 1.

  A channel that never varies becomes 0.

  Args:
    images: Raw numbers [n, ..., channels]; what means and deviations are over.
  """
  channels = images.reshape(-1, images.shape[-1])
  mean = channels.mean(axis=0, dtype=np.float64)
  deviations = channels.std(axis=0, dtype=np.float64)
  varies = (channels != channels[:1]).any(axis=0)
  return Scaling(
      divisor=1.0,
      mean=mean.astype(np.float32),
      std=np.where(varies, deviations, 1.0).astype(np.float32),
  )


def choose(scalings: Mapping[str, _T], name: str) -> _T:
  """Returns `scalings[name]`, or raises a ValueError that lists the names."""
  if name not in scalings:
    raise ValueError(
        f'Expected `scaling` to be one of {", ".join(scalings)}, found'
        f' {name!r}.'
    )
  return scalings[name]
