"""Folders of images of one's own: a folder a class, or a client."""

import os

import numpy as np

from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import image_folders
from tff_meta.datasets import locations
from tff_meta.datasets import own_parts

_PARTS = ('train', 'test')
_CALLED_TRAIN = ('train', 'training')
_CALLED_PARTS = (
    *_CALLED_TRAIN,
    *('val', 'valid', 'validation', 'dev', 'test', 'testing'),
)
_SUFFIXES = (
    '.bmp',
    '.gif',
    '.jpeg',
    '.jpg',
    '.pgm',
    '.png',
    '.ppm',
    '.tif',
    '.tiff',
    '.webp',
)


def folder(
    path: str,
    download: bool = False,
    *,
    image_size: tuple[int, ...] = (),
    scaling: own_parts.OwnScaling = 'auto',
) -> corpus_lib.Corpus:
  """Reads `class/image` or `client/class/image`, whichever there is.

  Each may be in two folders `train` and `test`, beside which no other part is
  read; without them clients hold some of their own images back to be tested on.
  Images are grey if all of them are, otherwise RGB. Files and folders whose
  names begin with a point do not count.

  Args:
    path: The folder.
    download: Not used.
    image_size: Height and width, or both in one number, that images are resized
      to; () where they have one size.
    scaling: 'unit' divides by 255, 'standard' gives each number mean 0 and
      variance 1, 'channels' each channel of images, 'raw' leaves numbers as
      they are. 'auto' is 'unit'.

  Returns:
    The corpus; x uint8 [n, height, width, 1 or 3].

  Raises:
    DatasetNotFoundError: If there is no such folder.
    ValueError: If it is not what it should be.
  """
  del download
  if not os.path.isdir(path):
    raise locations.DatasetNotFoundError(
        f'Expected a folder, found none at {path}.{own_parts.path_tip(path)}'
    )
  found = _names(path)
  is_split = bool(found) and set(found) <= set(_PARTS)
  if is_split and 'train' not in found:
    raise ValueError(
        f'Expected a folder train beside the folder test in {path}, found none.'
    )
  names = {name.lower() for name in found}
  has_parts = bool(names & set(_CALLED_TRAIN)) and names <= set(_CALLED_PARTS)
  if has_parts and not is_split:
    raise ValueError(
        f'Expected folders of clients or of classes in {path}, or train and'
        f' test, found {", ".join(found)}. Tip: move the images of another part'
        ' into one of the two, or elsewhere.'
    )
  roots = [os.path.join(path, p) for p in _PARTS if p in found]
  trees = [_Tree(root) for root in (roots if is_split else [path])]
  files = [file for tree in trees for file in tree.files]
  x = image_folders.read_alike(files, image_size)
  ends = np.cumsum([len(tree.files) for tree in trees])[:-1]
  parts = [
      own_parts.Part(own, tree.labels, tree.clients)
      for tree, own in zip(trees, np.split(x, ends), strict=True)
  ]
  name = os.path.basename(os.path.abspath(path))
  test = parts[1] if len(parts) > 1 else None
  return own_parts.to_corpus(name, parts[0], test, scaling, path)


class _Tree:
  """The images below a folder.

  Attributes:
    files: Their paths, sorted.
    labels: The names of their folders.
    clients: The names of the folders of these, or None.
  """

  def __init__(self, root: str):
    """Looks for images.

    Raises:
      ValueError: If something else is there, or a folder has none.
    """
    self.files: list[str] = []
    # By how many folders a file is in, one such file.
    depths: dict[int, str] = {}
    for place, folders, files in os.walk(root, followlinks=True):
      folders[:] = sorted(name for name in folders if name[0] != '.')
      for name in sorted(name for name in files if name[0] != '.'):
        file = os.path.join(place, name)
        if not name.lower().endswith(_SUFFIXES):
          raise ValueError(
              f'Expected images alone in {root}, found {file}. Tip: move it'
              f' elsewhere; names of images end in {", ".join(_SUFFIXES)}.'
          )
        depths.setdefault(os.path.relpath(file, root).count(os.sep), file)
        self.files.append(file)
    if len(depths) != 1 or not {1, 2} >= set(depths):
      shown = ' and '.join(depths.values()) or 'no image'
      raise ValueError(
          f'Expected images in {root} at class/image or at client/class/image,'
          f' found {shown}.'
      )
    names = [os.path.relpath(f, root).split(os.sep) for f in self.files]
    for name in sorted({folder for parts in names for folder in parts[:-1]}):
      try:
        name.encode()
      except UnicodeEncodeError:
        raise ValueError(
            f'Expected folders in {root} named in UTF-8, found {name!r}. Tip:'
            ' rename it.'
        ) from None
    empty = sorted(set(_names(root)) - {name[0] for name in names})
    if empty:
      raise ValueError(
          f'Expected images in every folder of {root}, found none in'
          f' {empty[0]}. Tip: remove it.'
      )
    self.labels = np.array([name[-2] for name in names])
    has_clients = 2 in depths
    self.clients = (
        np.array([name[0] for name in names]) if has_clients else None
    )


def _names(path: str) -> list[str]:
  """Returns what is in a folder but for hidden files, sorted."""
  return sorted(name for name in os.listdir(path) if name[0] != '.')
