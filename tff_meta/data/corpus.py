"""A corpus: labelled images in memory, before they are dealt to clients."""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
import math
from typing import Any, Literal, NamedTuple
import warnings

import numpy as np
from scipy import ndimage

from tff_meta.data import checks

ROLES = ('meta_train', 'meta_validation', 'meta_test')
INTERPOLATIONS = ('nearest', 'bilinear')
# Raw pixels to float32 pixels. `Any`, because `np.float32` is one, of which its
# type says that it returns a scalar.
Preprocess = Callable[[np.ndarray], Any]


class LabelledExamples(NamedTuple):
  """Examples with their labels.

  Attributes:
    x: Pixels, uint8 or float32, shape [n, ...] with channels last.
    y: Labels, int32, shape [n].
  """

  x: np.ndarray
  y: np.ndarray


@dataclasses.dataclass(frozen=True)
class ClassSplit:
  """Which classes serve preparation, model selection and the final test.

  Classes that are in no part are not used by what goes by the split.

  Attributes:
    train: Labels of the meta-train classes.
    validation: Labels of the meta-validation classes; may be empty.
    test: Labels of the meta-test classes.
  """

  train: tuple[int, ...]
  validation: tuple[int, ...]
  test: tuple[int, ...]

  def __post_init__(self):
    """Checks what would otherwise fail late and obscurely."""
    parts = ('train', 'validation', 'test')
    for part in parts:
      labels = tuple(int(label) for label in getattr(self, part))
      object.__setattr__(self, part, labels)
      if any(label < 0 for label in labels):
        raise ValueError(
            f'Expected the labels of `{part}` to be non-negative, found'
            f' {min(labels)}.'
        )
    labels = self.train + self.validation + self.test
    counts = collections.Counter(labels)
    twice = sorted(label for label, count in counts.items() if count > 1)
    if twice:
      raise ValueError(
          'Expected `train`, `validation` and `test` to be disjoint lists of'
          f' distinct classes, found these classes more than once: {twice}.'
      )
    if not self.train or not self.test:
      raise ValueError(
          'Expected `train` and `test` to hold at least one class each, found'
          f' {len(self.train)} and {len(self.test)}.'
      )

  def of_role(self, role: str) -> tuple[int, ...]:
    """Returns the labels of 'meta_train', 'meta_validation' or 'meta_test'."""
    check_role(role)
    return getattr(self, role.removeprefix('meta_'))


def check_role(role: str) -> None:
  """Raises a ValueError if `role` is not one of `ROLES`."""
  if role not in ROLES:
    raise ValueError(f'Expected `role` to be one of {ROLES}, found {role!r}.')


def scale_to_unit(x: np.ndarray) -> np.ndarray:
  """Returns pixels 0..255 of any dtype as float32 in [0, 1]."""
  return np.asarray(x, np.float32) / np.float32(255)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Labelled images of one data set, as published: a train and a test part.

  The test part may be empty (a corpus that is published in one piece). Row
  numbers of the pool count the train part first and the test part after it.

  Attributes:
    name: Short name of the data set.
    train: Training examples.
    test: Test examples, of the same dtype and image shape.
    num_classes: Labels are 0..num_classes-1.
    preprocess: Turns a batch of raw pixels into float32 network input. Applied
      lazily, to the examples of one client or group at a time; row by row, so
      that no example depends on its batch. None stands for `scale_to_unit`
      and is refused for float32 pixels, which may be in [0, 1] already.
    class_split: Meta-train, meta-validation and meta-test classes, or None.
    writers: Who made each train example, shape [n_train], or None.
    test_writers: Who made each test example, shape [n_test], or None. Not part
      of the fingerprint: it decides nothing but which test rows a client gets.
    class_names: What labels 0, 1, ... stand for, or None.
    writers_name_clients: Whether a client that is made of a writer is called
      like the writer.
    rotations: Degrees counter-clockwise by which each example of the pool is
      turned when it is read, float32 [n], or None.
    interpolation: How turned pixels are made of others, 'nearest' or
      'bilinear'.
  """

  name: str
  train: LabelledExamples
  test: LabelledExamples
  num_classes: int
  preprocess: Any = None  # A `Preprocess` after `__post_init__`.
  class_split: ClassSplit | None = None
  writers: np.ndarray | None = None
  rotations: np.ndarray | None = None
  interpolation: Literal['nearest', 'bilinear'] = 'nearest'
  test_writers: np.ndarray | None = None
  class_names: tuple[str, ...] | None = None
  writers_name_clients: bool = False

  def __post_init__(self):
    """Checks what would otherwise fail late and obscurely."""
    checks.check_count('num_classes', self.num_classes, 1)
    _check_examples(self.train, f'{self.name}.train', self.num_classes)
    _check_examples(self.test, f'{self.name}.test', self.num_classes)
    _check_parts_fit(self)
    _check_class_split(self)
    for name, part in (('writers', 'train'), ('test_writers', 'test')):
      writers, size = getattr(self, name), len(getattr(self, part).y)
      if writers is not None and np.shape(writers) != (size,):
        raise ValueError(
            f'Expected `{name}` to have one entry for each of the {size}'
            f' {part} examples, found shape {np.shape(writers)}.'
        )
    names = self.class_names
    if names is not None and len(names) != self.num_classes:
      raise ValueError(
          f'Expected `class_names` of {self.num_classes} classes, found'
          f' {len(names)}.'
      )
    if self.rotations is not None and self.rotations.shape != (
        len(self.train.y) + len(self.test.y),
    ):
      raise ValueError(
          'Expected `rotations` to have one entry for each of the'
          f' {len(self.train.y) + len(self.test.y)} examples, found shape'
          f' {self.rotations.shape}.'
      )
    if self.interpolation not in INTERPOLATIONS:
      raise ValueError(
          f'Expected `interpolation` to be one of {INTERPOLATIONS}, found'
          f' {self.interpolation!r}.'
      )
    preprocess = self.preprocess
    if preprocess is None:
      _check_can_scale_to_unit(self)
      preprocess = scale_to_unit
      object.__setattr__(self, 'preprocess', preprocess)
    pixels = check_row_by_row(preprocess, self.train.x, repr(self.name))
    warn_of_scale(preprocess, pixels, repr(self.name))

  @property
  def input_shape(self) -> tuple[int, ...]:
    """Shape of one preprocessed example, without the batch axis."""
    return self.preprocess(self.train.x[:1]).shape[1:]

  @property
  def black(self) -> np.ndarray:
    """What a raw pixel of 0 becomes, float32 [channels].

    Raises:
      ValueError: If examples are no images, or it differs from pixel to pixel.
    """
    black = self.preprocess(np.zeros_like(self.train.x[:1]))[0]
    if black.ndim != 3:
      raise ValueError(
          f'Expected examples of {self.name} to be images (height, width,'
          f' channels), found shape {black.shape}.'
      )
    if not (black == black[0, 0]).all():
      raise ValueError(
          f'Expected one black in images of {self.name}, found pixels that are'
          ' scaled each by itself. Tip: another scaling in --dataset_options.'
      )
    return black[0, 0]

  @property
  def pooled_labels(self) -> np.ndarray:
    """Labels of the train part followed by the test part, int32 [n]."""
    return np.concatenate([self.train.y, self.test.y])

  def pooled(self) -> LabelledExamples:
    """Returns train and test part in one array; copies all pixels."""
    labels = self.pooled_labels
    return LabelledExamples(self.raw_rows(np.arange(len(labels))), labels)

  def raw_rows(self, rows: np.ndarray) -> np.ndarray:
    """Returns raw pixels of some rows of the pool without building the pool.

    Args:
      rows: Row numbers of the pool, integers [k].

    Returns:
      Pixels as stored but for the rotation, [k, ...].
    """
    rows = np.asarray(rows, np.int64)
    num_train = len(self.train.y)
    pixels = np.empty((len(rows), *self.train.x.shape[1:]), self.train.x.dtype)
    in_train = rows < num_train
    pixels[in_train] = self.train.x[rows[in_train]]
    pixels[~in_train] = self.test.x[rows[~in_train] - num_train]
    if self.rotations is not None:
      rotate = {'nearest': _rotate_nearest, 'bilinear': _rotate_bilinear}
      for degrees in np.unique(self.rotations[rows]):
        turned = self.rotations[rows] == degrees
        pixels[turned] = rotate[self.interpolation](pixels[turned], degrees)
    return pixels

  def without_test_part(self) -> 'Corpus':
    """Returns the training examples alone."""
    num_train = len(self.train.y)
    return dataclasses.replace(
        self,
        test=LabelledExamples(self.test.x[:0], self.test.y[:0]),
        test_writers=None,
        rotations=None
        if self.rotations is None
        else self.rotations[:num_train],
    )

  def fingerprint(self) -> str:
    """Returns 16 hex digits that change when the data change.

    Hashes the name, shapes, all pixels, labels, writers, rotations, how these
    are done, class split and class names; of `preprocess` what it makes of at
    most 64 evenly spaced examples of each part. It is computed once, of the
    arrays as they then are.
    """
    return self._fingerprint

  @functools.cached_property
  def _fingerprint(self) -> str:
    digest = hashlib.sha256()
    digest.update(
        repr((self.name, self.num_classes, self.class_split)).encode()
    )
    for x, y in (self.train, self.test):
      digest.update(repr((x.shape, str(x.dtype))).encode())
      digest.update(np.ascontiguousarray(y).data)
      digest.update(np.ascontiguousarray(x).data)
      if len(y):
        sample = np.linspace(0, len(y) - 1, min(64, len(y))).astype(int)
        digest.update(np.ascontiguousarray(self.preprocess(x[sample])).data)
    if self.writers is not None:
      digest.update('\n'.join(str(w) for w in self.writers).encode())
    if self.rotations is not None:
      digest.update(np.ascontiguousarray(self.rotations).data)
      digest.update(self.interpolation.encode())
    if self.class_names is not None:
      digest.update(repr(self.class_names).encode())
    return digest.hexdigest()[:16]


def with_rotation_groups(
    corpus: Corpus,
    seed: int,
    num_groups: int = 10,
    degrees_between_groups: float = 20.0,
    interpolation: Literal['nearest', 'bilinear'] = 'nearest',
) -> Corpus:
  """Turns every example by the angle of a random group (RMNIST).

  The rows of the train part, and those of the test part, are shuffled and cut
  into groups equal to within one example; group g is turned by g *
  `degrees_between_groups` counter-clockwise, lazily.

  Args:
    corpus: Images to turn; MNIST in the papers.
    seed: Source of the groups, non-negative.
    num_groups: Number of angles.
    degrees_between_groups: Difference between neighbouring angles.
    interpolation: Of `Corpus`.

  Returns:
    The corpus with `rotations`.

  Raises:
    TypeError: If a number is none.
    ValueError: If `num_groups` is not positive, or `interpolation` is unknown.

  Source: Ghosh et al., IFCA, NeurIPS 2020; CAFeMe, released code: 60,000 images
    in 10 groups of 6,000, 0 to 180 degrees, with torchvision's default, nearest
    neighbours.
  """
  checks.check_count('seed', seed)
  checks.check_count('num_groups', num_groups, 1)
  checks.check_number('degrees_between_groups', degrees_between_groups)
  rng = np.random.default_rng(seed)
  parts = []
  for examples in (corpus.train, corpus.test):
    groups = np.empty(len(examples.y), np.float32)
    rows = rng.permutation(len(examples.y))
    for group, own in enumerate(np.array_split(rows, num_groups)):
      groups[own] = group
    parts.append(groups * np.float32(degrees_between_groups))
  return dataclasses.replace(
      corpus,
      name=f'rotated_{corpus.name}',
      rotations=np.concatenate(parts),
      interpolation=interpolation,
  )


def with_rotated_classes(corpus: Corpus) -> Corpus:
  """Makes every class rotated by 90, 180 and 270 degrees a class of its own.

  Label c turned by 90 * q degrees becomes label c + q * num_classes. In the
  class split the rotations of a class stay in the part that the class is in,
  so that no meta-test character is seen, turned, in meta-training.

  Args:
    corpus: Square images; Omniglot in the papers.

  Returns:
    A corpus of four times as many classes and examples.

  Raises:
    ValueError: If the images are not square, or rotated in groups already.

  Source: Santoro et al., Meta-Learning with Memory-Augmented Neural Networks,
    ICML 2016, section 4.1; Vinyals et al., Matching Networks, NeurIPS 2016.
  """
  if corpus.rotations is not None:
    raise ValueError('Expected a corpus without `rotations`.')
  height, width = corpus.train.x.shape[1:3]
  if height != width:
    raise ValueError(
        f'Expected square images to rotate, found {height} x {width} pixels.'
    )

  def turn(examples):
    quarters = range(4)
    return LabelledExamples(
        np.concatenate([np.rot90(examples.x, q, (1, 2)) for q in quarters]),
        np.concatenate([examples.y + q * corpus.num_classes for q in quarters]),
    )

  def turn_labels(labels: Sequence[int]) -> tuple[int, ...]:
    return tuple(c + q * corpus.num_classes for q in range(4) for c in labels)

  def four_times(writers: np.ndarray | None) -> np.ndarray | None:
    return None if writers is None else np.tile(writers, 4)

  split = corpus.class_split
  return dataclasses.replace(
      corpus,
      name=f'{corpus.name}_rotated',
      train=turn(corpus.train),
      test=turn(corpus.test),
      num_classes=4 * corpus.num_classes,
      class_split=split
      and ClassSplit(
          turn_labels(split.train),
          turn_labels(split.validation),
          turn_labels(split.test),
      ),
      writers=four_times(corpus.writers),
      test_writers=four_times(corpus.test_writers),
      class_names=None,
  )


def _rotate_nearest(pixels: np.ndarray, degrees: float) -> np.ndarray:
  """Turns images as torchvision does unless told otherwise.

  A pixel gets the value of the original one whose centre is nearest to where it
  comes from, and 0 where that is outside. Of two that are equally near float32
  takes one, in torchvision's order of operations: coordinates in [-1, 1] first,
  then pixels, halves to the even one.

  Args:
    pixels: Images [n, height, width, ...] of any dtype.
    degrees: Counter-clockwise, about the middle of the image.

  Returns:
    Images of the same shape and dtype.

  Source: `torchvision.transforms.functional.rotate` of a tensor, with which the
    released code of CAFeMe turns MNIST.
  """
  height, width = np.array(pixels.shape[1:3], np.float32)
  angle = math.radians(degrees)
  cos, sin = np.float32(math.cos(angle)), np.float32(math.sin(angle))
  half = np.float32(0.5)
  x = (np.arange(width, dtype=np.float32) - width * half) + half
  y = ((np.arange(height, dtype=np.float32) - height * half) + half)[:, None]

  def nearest(in_unit_square, size):
    pixel = ((in_unit_square + 1) * size - 1) / 2
    return np.rint(pixel).astype(np.int64)

  from_x = nearest(
      x * (cos / (half * width)) + y * (-sin / (half * width)), width
  )
  from_y = nearest(
      x * (sin / (half * height)) + y * (cos / (half * height)), height
  )
  inside = (0 <= from_x) & (from_x < width) & (0 <= from_y) & (from_y < height)
  turned = pixels[:, np.where(inside, from_y, 0), np.where(inside, from_x, 0)]
  turned[:, ~inside] = 0
  return turned


def _rotate_bilinear(pixels, degrees):
  """Turns images counter-clockwise, bilinearly, black outside."""
  turned = ndimage.rotate(
      pixels.astype(np.float32), degrees, axes=(1, 2), reshape=False, order=1
  )
  if pixels.dtype == np.uint8:
    turned = np.rint(turned).clip(0, 255)
  return turned.astype(pixels.dtype)


def _check_examples(examples, where, num_classes):
  """Raises unless pixels and labels are what they should be."""
  if not isinstance(examples, LabelledExamples):
    raise TypeError(
        f'Expected `{where}` to be LabelledExamples, found a'
        f' {type(examples).__name__}.'
    )
  for name, array in zip(LabelledExamples._fields, examples, strict=True):
    if not isinstance(array, np.ndarray):
      raise TypeError(
          f'Expected `{where}.{name}` to be a NumPy array, found a'
          f' {type(array).__name__}.'
      )
  x, y = examples
  if x.dtype not in (np.uint8, np.float32) or x.ndim < 2:
    raise ValueError(
        f'Expected `{where}.x` to be uint8 or float32 with a batch axis and at'
        f' least one more, found {x.dtype} of shape {x.shape}.'
    )
  if y.dtype != np.int32 or y.shape != x.shape[:1]:
    raise ValueError(
        f'Expected `{where}.y` to be int32 of shape {x.shape[:1]}, found'
        f' {y.dtype} of shape {y.shape}. Tip: check the range before a cast,'
        ' which makes 1 of 2**32 + 1 and of 1.7.'
    )
  if x.dtype == np.float32 and not np.isfinite(x).all():
    bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
    raise ValueError(
        f'Expected finite pixels in `{where}.x`, found NaN or infinity in'
        f' {len(bad)} examples, first in row {bad[0]}.'
    )
  checks.to_labels(y, f'`{where}.y`', num_classes)


def _check_can_scale_to_unit(corpus):
  """Raises a ValueError where a division by 255 would be a guess."""
  found = f'{corpus.train.x.dtype} pixels'
  if corpus.train.x.dtype == np.uint8:
    largest = max(x.max(initial=0) for x in (corpus.train.x, corpus.test.x))
    if largest >= 128 or not largest:  # Zeros are zeros, however scaled.
      return
    found = f'none above {largest}'
  raise ValueError(
      f'Expected a `preprocess` that scales the pixels of {corpus.name!r},'
      ' since without one they are taken for uint8 pixels 0..255, found'
      f' {found}. Tip: np.float32 leaves pixels as they are, `scale_to_unit`'
      ' divides them by 255.'
  )


def check_row_by_row(
    preprocess: Preprocess, x: np.ndarray, where: str
) -> np.ndarray:
  """Raises unless `preprocess` returns the right form, row by row.

  Args:
    preprocess: As for `preprocessed`, and so the others.
    x: Raw pixels [n, ...], of which three rows are tried.
    where: Whose pixels these are.

  Returns:
    The preprocessed pixels of these rows.

  Raises:
    ValueError: If an example depends on those beside it, or as `preprocessed`.
  """
  rows = np.linspace(0, len(x) - 1, min(3, len(x))).astype(int)
  together = preprocessed(preprocess, x[rows], where)
  alone = np.concatenate(
      [preprocessed(preprocess, x[[row]], where) for row in rows]
  )
  # Kernels may round otherwise for another number of rows.
  atol = 1e-3 * np.abs(alone[np.isfinite(alone)]).max(initial=0)
  if together.shape != alone.shape or not np.allclose(
      together, alone, rtol=1e-3, atol=atol, equal_nan=True
  ):
    raise ValueError(
        'Expected `preprocess` to treat every example by itself and always'
        f' alike, found other pixels for examples of {where} alone than among'
        ' others. Tip: statistics over many examples belong outside, and so do'
        ' random changes.'
    )
  return together


def warn_of_scale(
    preprocess: Preprocess,
    pixels: np.ndarray,
    where: str,
) -> None:
  """Warns if networks may learn nothing from pixels, as they are scaled.

  Args:
    preprocess: What made the pixels. One with an attribute `is_deliberate` that
      is True is not warned of. An attribute `scale_tip` says what can be done.
    pixels: Some examples, preprocessed, float32 [n, ...].
    where: Whose pixels these are.
  """
  if getattr(preprocess, 'is_deliberate', False):
    return
  largest = np.abs(pixels[np.isfinite(pixels)]).max(initial=0)
  if largest >= 128:
    cause = 'are they not scaled at all?'
  elif 0 < largest < 1 / 128:
    cause = 'are they scaled twice?'
  else:
    return
  warnings.warn(
      'Expected the pixels that networks see to be of the order of 1, found'
      f' {largest:.3g} as the largest of three examples of {where}: {cause}'
      f' {getattr(preprocess, "scale_tip", "See `preprocess`.")}',
      stacklevel=2,
  )


def preprocessed(
    preprocess: Preprocess, x: np.ndarray, where: str
) -> np.ndarray:
  """Returns `preprocess(x)`, having checked its form.

  Args:
    preprocess: What a caller of the library gave.
    x: Raw pixels [n, ...].
    where: Whose pixels these are, for the error.

  Raises:
    ValueError: If it fails, or returns anything but a float32 array [n, ...].
  """
  try:
    result: Any = preprocess(x)
  except Exception as e:  # Whatever the caller's function raises.
    raise ValueError(
        f'Expected `preprocess` to take the pixels of {where}, {x.dtype} of'
        f' shape {x.shape}, found that it raised {type(e).__name__}: {e}'
    ) from e
  if isinstance(result, np.ndarray):
    found = f'{result.dtype} of shape {result.shape}'
    if result.dtype == np.float32 and result.shape[:1] == x.shape[:1]:
      return result
  else:
    found = f'a {type(result).__name__}'
  raise ValueError(
      'Expected `preprocess` to return a NumPy array of float32 pixels of as'
      f' many examples as it got, found {found} for {len(x)} of {where}.'
  )


def _check_parts_fit(corpus):
  """Raises a ValueError if train is empty or does not look like test."""
  if not len(corpus.train.y):
    raise ValueError(f'Expected `{corpus.name}.train` to hold examples.')
  train, test = corpus.train.x, corpus.test.x
  if all(map(np.array_equal, corpus.train, corpus.test)):
    raise ValueError(
        f'Expected `{corpus.name}.test` to hold other examples than'
        f' `{corpus.name}.train`, found the same. Tip: a `test_fraction` splits'
        ' them.'
    )
  if (train.shape[1:], train.dtype) != (test.shape[1:], test.dtype):
    raise ValueError(
        'Expected train and test images to have one shape and dtype, found'
        f' {train.shape[1:]} {train.dtype} and {test.shape[1:]} {test.dtype}.'
    )


def _check_class_split(corpus):
  """Raises a ValueError if the split names classes that do not exist."""
  split = corpus.class_split
  if split is None:
    return
  largest = max(split.train + split.validation + split.test)
  if largest >= corpus.num_classes:
    raise ValueError(
        f'Expected `class_split` to name classes 0..{corpus.num_classes - 1},'
        f' found {largest}.'
    )
