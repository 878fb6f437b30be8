"""Reads image files into one array."""

from collections.abc import Sequence
from concurrent import futures
import hashlib
import os

import numpy as np


def read_images(
    paths: Sequence[str], size: tuple[int, int], resize: bool = False
) -> np.ndarray:
  """Decodes image files; grey ones get three equal channels.

  Args:
    paths: Files of a format that Pillow reads.
    size: Height and width in pixels.
    resize: Whether images of another size are resized (Lanczos filter) rather
      than refused.

  Returns:
    Pixels, uint8 [len(paths), height, width, 3].

  Raises:
    ValueError: If a file is no image, or has another size; names the file.
  """
  from PIL import Image  # Only when needed.

  height, width = size
  x = np.empty((len(paths), height, width, 3), np.uint8)

  def decode(row):
    try:
      with Image.open(paths[row]) as image:
        image = image.convert('RGB')
    except OSError as e:
      raise ValueError(
          f'Expected {paths[row]} to be an image, found: {e}. Tip: unpack the'
          ' archive again.'
      ) from e
    if image.size != (width, height):
      if not resize:
        raise ValueError(
            f'Expected {paths[row]} to be {width} x {height} pixels, found'
            f' {image.size[0]} x {image.size[1]}.'
        )
      image = image.resize((width, height), Image.Resampling.LANCZOS)
    x[row] = np.asarray(image)

  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    for _ in pool.map(decode, range(len(paths)), chunksize=64):
      pass  # Raises what `decode` raised.
  return x


def names_digest(paths: Sequence[str]) -> str:
  """Returns a digest of file names, to notice that files came or went."""
  return hashlib.sha256('\n'.join(paths).encode()).hexdigest()
