"""Checks of numbers and of labels, before anything is cast."""

import math
import numbers
import operator
from typing import Any

import numpy as np


def check_count(name: str, value: Any, least: int = 0) -> int:
  """Returns a whole number as an int.

  Args:
    name: Of the argument, for the error.
    value: What was given for it.
    least: The smallest that is possible.

  Raises:
    TypeError: If it is no whole number: a float, a bool, a string.
    ValueError: If it is smaller than `least`.
  """
  try:
    if isinstance(value, bool | np.bool_):
      raise TypeError
    number = operator.index(value)
  except TypeError:
    raise TypeError(
        f'Expected `{name}` to be a whole number of at least {least}, found'
        f' {value!r}.'
    ) from None
  if number < least:
    raise ValueError(
        f'Expected `{name}` to be a whole number of at least {least}, found'
        f' {number}.'
    )
  return number


def check_number(name: str, value: Any) -> None:
  """Raises unless a value is one finite real number.

  Args:
    name: Of the argument, for the error.
    value: What was given for it.

  Raises:
    TypeError: If it is no real number: an array, a string.
    ValueError: If it is NaN or infinite.
  """
  if not isinstance(value, numbers.Real):
    raise TypeError(f'Expected `{name}` to be a number, found {value!r}.')
  size: Any = abs(value)
  if not size < math.inf:
    raise ValueError(f'Expected `{name}` to be a finite number, found {value}.')


def to_labels(labels: np.ndarray, where: str, num_classes: int) -> np.ndarray:
  """Returns labels as int32, having checked them as they are.

  Args:
    labels: One whole number an example, any integer dtype [n].
    where: Whose labels these are, for the error.
    num_classes: Labels are 0..num_classes-1.

  Raises:
    ValueError: If they are no vector of integers, or one is out of range.
  """
  if labels.ndim != 1 or labels.dtype.kind not in 'iu':
    raise ValueError(
        f'Expected the labels of {where} to be a vector of integers, found'
        f' {labels.dtype} of shape {labels.shape}.'
    )
  # As they are: a cast to int32 would make 1 of 2**32 + 1.
  if len(labels) and not (0 <= labels.min() and labels.max() < num_classes):
    raise ValueError(
        f'Expected the labels of {where} in 0..{num_classes - 1}, found'
        f' {labels.min()}..{labels.max()}.'
    )
  return labels.astype(np.int32)
