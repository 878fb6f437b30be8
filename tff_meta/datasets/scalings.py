"""How raw pixels become network input: named, so that a flag can choose."""

from collections.abc import Mapping
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Scaling:
  """Maps raw pixels x to (x / divisor - mean) / std, as float32.

  Attributes:
    divisor: The raw value that stands for 1, e.g. 255.
    mean: One number, or one per channel; subtracted after the division.
    std: Likewise; a negative value inverts the image.
  """

  divisor: float = 255.0
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """Returns float32 of the shape of `x` (channels last)."""
    x = np.asarray(x, np.float32) / np.float32(self.divisor)
    return (x - np.float32(self.mean)) / np.float32(self.std)


# FRL's code: pixels as they are.
RAW = Scaling(divisor=1.0)
# [0, 1].
UNIT = Scaling()
# [-1, 1], as FedMeta-Per scales CIFAR-10.
CENTERED = Scaling(mean=(0.5,), std=(0.5,))


def choose(scalings: Mapping[str, Scaling], name: str) -> Scaling:
  """Returns `scalings[name]`, or raises a ValueError that lists the names."""
  if name not in scalings:
    raise ValueError(
        f'Expected `scaling` to be one of {", ".join(scalings)}, found'
        f' {name!r}.'
    )
  return scalings[name]
