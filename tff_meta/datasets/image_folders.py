"""Reads image files into one array."""

from collections.abc import Sequence
from concurrent import futures
import hashlib
import os
from typing import Any

import numpy as np

from tff_meta import machine


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


def read_alike(paths: Sequence[str], size: tuple[int, ...] = ()) -> np.ndarray:
  """Decodes image files of one size; grey ones if all of them are.

  Args:
    paths: As for `read_images`.
    size: Height and width in pixels, or one number for both, that images are
      resized to; () for that of all of them.

  Returns:
    Pixels, uint8 [len(paths), height, width, 1 or 3].

  Raises:
    ValueError: As `read_images`, or if the size is no size, images have several
      and none is given, or they do not fit into memory.
  """
  from PIL import Image  # Only when needed.

  if len(size) > 2 or any(side < 1 for side in size):
    raise ValueError(
        'Expected `image_size` to be a height and a width, or one number for'
        f' both, found {size}.'
    )

  def look(path):
    try:
      with Image.open(path) as image:
        return image.size[::-1], image.mode in ('1', 'L', 'LA')
    except Exception as e:  # Whatever Pillow raises.
      raise ValueError(f'Expected {path} to be an image, found: {e}') from e

  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    found = list(pool.map(look, paths, chunksize=64))
  sizes = {
      of_image: path for path, (of_image, _) in zip(paths, found, strict=True)
  }
  if not size and len(sizes) > 1:
    shown = ' and '.join(
        f'{path} of {height} x {width}'
        for (height, width), path in list(sizes.items())[:2]
    )
    raise ValueError(
        f'Expected images of one size (height x width), found {shown}. Tip:'
        ' --dataset_options=image_size=32 makes all of them 32 x 32.'
    )
  height, width = (size * 2)[:2] if size else next(iter(sizes))
  machine.check_fits(3 * len(paths) * height * width, f'{len(paths)} images')
  x = read_images(paths, (height, width), resize=True)
  all_grey = all(is_grey for _, is_grey in found)
  return np.ascontiguousarray(x[..., :1]) if all_grey else x


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
