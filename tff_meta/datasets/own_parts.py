"""From what a file of one's own holds to a corpus: labels, pixels, scaling."""

from collections.abc import Sequence
import difflib
import os
import pathlib
from typing import Literal, NamedTuple
import warnings

import numpy as np

from tff_meta import spelling
from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import locations
from tff_meta.datasets import scalings

OwnScaling = Literal['auto', 'unit', 'standard', 'channels', 'raw']

_CALLED_CLIENTS = (
    *('client', 'client_id', 'clients', 'user', 'user_id', 'users'),
    *('writer', 'writer_id', 'device', 'device_id', 'participant'),
)
# More than this of a deviation is not lost without a word.
_MOST_ROUNDED = 0.01
_QUANTITIES = 'quantities, such as prices, cannot be learned'
_LABEL_TIP = '--dataset_options=label=NAME chooses another'
# A file of so many classes has more than one in every second example.
_MANY_CLASSES = 20


class _AsTheyAre:
  """Leaves numbers as they are, which may be a mistake: nobody asked for it."""

  scale_tip = (
      'Tip: --dataset_options=scaling=standard, or in a program'
      " dataset_options={'scaling': 'standard'}; scaling channels suits images,"
      ' raw leaves them so.'
  )

  def __call__(self, x: np.ndarray) -> np.ndarray:
    return np.array(x, np.float32)


class Part(NamedTuple):
  """The train or the test part of a file, as it is there.

  Attributes:
    x: Numbers [n, ...].
    labels: Whole numbers, or names, [n].
    clients: Names of clients [n], or None where it tells none.
  """

  x: np.ndarray
  labels: np.ndarray
  clients: np.ndarray | None


def check_is_file(path: str) -> None:
  """Raises a DatasetNotFoundError if there is no such file."""
  if os.path.isdir(path):
    raise locations.DatasetNotFoundError(
        f'Expected a file, found the folder {path}. Tip: join its files into'
        ' one in which a column, or an array, says whose each example is.'
    )
  if not os.path.isfile(path):
    raise locations.DatasetNotFoundError(
        f'Expected a file, found none at {path}.{path_tip(path)}'
    )


def path_tip(path: str) -> str:
  """Returns what is called almost as a path that is not there, or nothing."""
  missing = pathlib.Path(path)
  there = sorted(p.name for p in missing.parent.glob('*'))
  return spelling.tip(missing.name, there)


def check_has(name: str, known: Sequence[str], kind: str, where: str) -> None:
  """Raises a ValueError if something of a file is not there.

  Args:
    name: Of the column, array or feature.
    known: Those that there are.
    kind: What it is, such as 'column'.
    where: The file.
  """
  if name in known:
    return
  shown = ', '.join(known[:20]) + (', ...' if len(known) > 20 else '')
  near = difflib.get_close_matches(name, known, 1)
  tip = f' Tip: did you mean {near[0]!r}?' if near else ''
  raise ValueError(
      f'Expected the {kind} {name!r} in {where}, found {shown or "none"}.{tip}'
      ' --dataset_options says which one holds what, such as features=NAME or'
      ' label=NAME.'
  )


def warn_of_clients(client: str, known: Sequence[str], where: str) -> None:
  """Warns if a file tells whose an example is, and nobody asked for it.

  Args:
    client: The column or array that was asked for, '' for none.
    known: Those that are nothing else, such as the labels.
    where: The file.

  Warns:
    UserWarning: With the option that takes the first such name.
  """
  found = [name for name in known if name.lower() in _CALLED_CLIENTS]
  if found and not client:
    warnings.warn(
        f'{where} has {found[0]!r}, which is not taken for whose an example is:'
        ' examples are dealt to clients that are made up. Tip:'
        f' --dataset_options=client={found[0]}, or in a program'
        f" dataset_options={{'client': {found[0]!r}}}.",
        stacklevel=2,
    )


def to_corpus(
    name: str,
    train: Part,
    test: Part | None,
    scaling: OwnScaling,
    where: str,
    *,
    is_table: bool = False,
    label_tip: str = _LABEL_TIP,
) -> corpus_lib.Corpus:
  """Makes a corpus of what a file holds.

  Classes are the different labels of both parts, sorted, and called as they
  are. Of eight classes or more the first half is meta-train, and of the rest
  the first half meta-validation.

  Args:
    name: Of the data set.
    train: What to train on.
    test: What to test on, of the same clients if these are told; None where
      clients are to hold some of `train` back.
    scaling: `'unit'` divides by 255; `'standard'` gives each number of an
      example mean 0 and variance 1 over `train`, `'channels'` all numbers of a
      channel together, which suits images; `'raw'` leaves numbers as they are.
      `'auto'` is `'unit'` for uint8 pixels, and for other numbers `'standard'`
      in a table and `'raw'` elsewhere.
    where: The file, for errors.
    is_table: Whether numbers are columns, of any units.
    label_tip: What to do where labels name no classes.

  Raises:
    ValueError: If labels or numbers are not what they should be.

  Warns:
    UserWarning: If numbers differ by little more than float32 rounds them.
  """
  parts = [train] if test is None else [train, test]
  for part in parts:
    if not len(part.labels):
      raise ValueError(f'Expected examples in {where}, found none.')
    if (part.clients is None) != (train.clients is None):
      raise ValueError(
          f'Expected clients in both parts of {where} or in none, found them in'
          ' one.'
      )
  labels, class_names = _number_classes(parts, where, label_tip)
  pixels = [to_pixels(part.x, where) for part in parts]
  _warn_of_rounding(train.x, where)
  if test is None:
    pixels.append(pixels[0][:0])
    labels.append(labels[0][:0])
  num_classes = len(class_names)
  has_clients = train.clients is not None
  return corpus_lib.Corpus(
      name=name,
      train=corpus_lib.LabelledExamples(pixels[0], labels[0]),
      test=corpus_lib.LabelledExamples(pixels[1], labels[1]),
      num_classes=num_classes,
      preprocess=_preprocess(pixels, scaling, where, is_table),
      class_split=_class_split(num_classes),
      writers=_to_names(train.clients) if has_clients else None,
      test_writers=(
          _to_names(test.clients) if has_clients and test is not None else None
      ),
      class_names=class_names,
      writers_name_clients=has_clients,
  )


def _to_names(clients: np.ndarray | None) -> np.ndarray:
  return np.array([str(client) for client in np.asarray(clients).tolist()])


def _number_classes(
    parts: Sequence[Part], where: str, label_tip: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
  """Returns the labels of each part as 0, 1, ..., and what these stand for."""
  labels = _comparable(
      np.concatenate([_checked_labels(p, where, label_tip) for p in parts])
  )
  names, numbers = np.unique(labels, return_inverse=True)
  if len(names) < 2:
    raise ValueError(
        f'Expected examples of at least two classes in {where}, found only'
        f' {names[0]!r}.'
    )
  if len(names) > max(_MANY_CLASSES, len(labels) / 2):
    raise ValueError(
        f'Expected labels that name classes in {where}, found'
        f' {len(names)} different ones of {len(labels)} examples. Tip:'
        f' {label_tip}; {_QUANTITIES}.'
    )
  ends = np.cumsum([len(part.labels) for part in parts])[:-1]
  return (
      np.split(numbers.astype(np.int32), ends),
      tuple(str(name) for name in names.tolist()),
  )


def _checked_labels(part: Part, where: str, label_tip: str) -> np.ndarray:
  """Returns labels as Python objects, none of them missing or a fraction."""
  labels = np.asarray(part.labels)
  if labels.ndim == 2 and labels.shape[1] == 1:  # As of Keras' CIFAR-10.
    labels = labels[:, 0]
  if labels.ndim != 1 or len(labels) != len(part.x):
    raise ValueError(
        f'Expected one label for each of the {len(part.x)} examples in {where},'
        f' found labels of shape {labels.shape}.'
    )
  if labels.dtype.kind not in 'biufUO':
    raise ValueError(
        f'Expected labels in {where} to be whole numbers or names, found'
        f' {labels.dtype}.'
    )
  found = labels.tolist()
  for row, label in enumerate(found):
    if label is None or label != label or label == '':
      raise ValueError(
          f'Expected a label of every example in {where}, found none of'
          f' example {row + 1}.'
      )
    if isinstance(label, float | np.floating) and not label.is_integer():
      whose = f'example {row + 1}'
      if part.clients is not None:
        whose = f'client {str(part.clients[row])!r}'
      raise ValueError(
          f'Expected labels in {where} to be whole numbers or names, found'
          f' {label} of {whose}. Tip: {label_tip}; {_QUANTITIES}.'
      )
  return np.array(found, object)


def as_whole_numbers(labels: np.ndarray) -> np.ndarray:
  """Returns labels as int64 if all are texts as `str` writes such numbers.

  Others, such as 01 beside 1, stay as they are: each is a class of its own.

  Args:
    labels: Texts, or what stands for missing ones [n].
  """
  found = labels.tolist()
  try:
    numbers = np.array([int(label) for label in found], np.int64)
  except (OverflowError, TypeError, ValueError):
    return labels
  return numbers if list(map(str, numbers.tolist())) == found else labels


def _comparable(labels: np.ndarray) -> np.ndarray:
  """Returns labels as whole numbers if they all are, else as names."""
  found = labels.tolist()
  if all(isinstance(x, int | float) and not isinstance(x, bool) for x in found):
    if all(float(x).is_integer() and abs(x) < 2**63 for x in found):
      return np.array([int(x) for x in found], np.int64)
  return np.array([str(x) for x in found])


def to_pixels(x: np.ndarray, where: str) -> np.ndarray:
  """Returns numbers as uint8 or float32 with at least one axis of their own.

  Args:
    x: Numbers [n, ...]; [n, height, width] are grey images.
    where: Whose they are, for errors.

  Raises:
    ValueError: If they are no finite numbers, or none.
  """
  if x.dtype.kind not in 'biuf':
    raise ValueError(
        f'Expected numbers in the examples of {where}, found {x.dtype}.'
    )
  if x.dtype != np.uint8:
    with np.errstate(over='ignore'):
      found = x.astype(np.float32)
    bad = ~np.isfinite(found).all(axis=tuple(range(1, x.ndim)))
    if bad.any():
      raise ValueError(
          f'Expected finite numbers of float32 in {where}, found NaN, infinity'
          f' or larger ones in {bad.sum()} examples, first in example'
          f' {int(bad.argmax()) + 1}.'
      )
    x = found
  if x.ndim in (1, 3):  # A single number, or a grey image.
    x = x[..., np.newaxis]
  if x.ndim < 2 or 0 in x.shape[1:]:
    raise ValueError(
        f'Expected at least one number an example in {where}, found shape'
        f' {x.shape}.'
    )
  return x


def _warn_of_rounding(x: np.ndarray, where: str) -> None:
  """Warns of large numbers that are almost the same in float32."""
  if np.can_cast(x.dtype, np.float32):
    return
  x = x.reshape(len(x), -1)
  rounding = np.abs(x - x.astype(np.float32)).max(axis=0)
  lost = (rounding > _MOST_ROUNDED * x.std(axis=0)) & (x != x[0]).any(axis=0)
  if lost.any():
    number = int(lost.argmax())
    warnings.warn(
        f'Expected numbers that float32 tells apart in {where}, found that it'
        f' rounds number {number + 1} of an example, such as {x[0, number]}, by'
        f' up to {rounding[number]:.3g}, of a deviation of'
        f' {x[:, number].std():.3g}. Tip: subtract the least one beforehand.',
        stacklevel=2,
    )


def _preprocess(pixels, scaling, where, is_table):
  """Returns how pixels are scaled."""
  is_uint8 = pixels[0].dtype == np.uint8
  largest = max(x.max(initial=0) for x in pixels)
  if scaling == 'auto' and is_uint8 and largest < 128:
    raise ValueError(
        f'Expected pixels 0..255 in {where}, or to be told how they are scaled,'
        f' found none above {largest}. Tip: --dataset_options=scaling=standard,'
        " in a program dataset_options={'scaling': 'standard'}, or scaling unit"
        ' to divide them by 255 nevertheless.'
    )
  if scaling == 'unit' or (scaling == 'auto' and is_uint8):
    return scalings.UNIT
  if scaling == 'standard' or (scaling == 'auto' and is_table):
    return scalings.standard(pixels[0])
  if scaling == 'channels':
    return scalings.per_channel(pixels[0])
  return scalings.RAW if scaling == 'raw' else _AsTheyAre()


def _class_split(num_classes: int) -> corpus_lib.ClassSplit | None:
  if num_classes < class_splits.LEAST_CLASSES:
    return None
  num_train = num_classes - num_classes // 2
  num_validation = num_classes // 4
  return class_splits.consecutive(
      num_train, num_validation, num_classes - num_train - num_validation
  )
