"""Reads image files into one array."""

from collections.abc import Sequence
from concurrent import futures
import hashlib
import os
from typing import Any

import numpy as np


def to_rgb(file):
  """Decodes an image file to a `PIL.Image` of mode RGB.

  Args:
    file: A path or a file object.

  Raises:
    ValueError: If a grey value has more than 8 bits, which Pillow would cut
      off at 255.
  """
  from PIL import Image  # Only when needed.

  with Image.open(file) as image:
    if image.mode.startswith(('I', 'F')):
      raise ValueError(
          f'Expected at most 8 bits a channel, found mode {image.mode}.'
      )
    return image.convert('RGB')


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
    ValueError: If a file is no image of at most 8 bits a channel, or has
      another size; names the file.
  """
  from PIL import Image  # Only when needed.

  height, width = size
  x = np.empty((len(paths), height, width, 3), np.uint8)

  def decode(row):
    try:
      image = to_rgb(paths[row])
    except Exception as e:  # Whatever Pillow raises.
      raise ValueError(
          f'Expected {paths[row]} to be an image, found: {e}'
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


def files_digest(directory: str, files: Sequence[str]) -> str:
  """Returns a digest that changes when files come, go or are replaced.

  Of every file it sees the name, the size and the times of the last change: of
  its contents, which a copy may keep, and of its status, which nothing can set.
  Contents are not read: they may be a quarter of a million files.

  Args:
    directory: What `files` are relative to.
    files: Paths; one that is not there counts as that.
  """
  digest = hashlib.sha256()
  for file in files:
    try:
      found = os.stat(os.path.join(directory, file))
      facts: tuple[Any, ...] = (
          file,
          found.st_size,
          found.st_mtime_ns,
          found.st_ctime_ns,
      )
    except OSError:
      facts = (file, None)
    digest.update(repr(facts).encode())
  return digest.hexdigest()
