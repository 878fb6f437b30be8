"""How sure models are of their answers, and how rightly.

Sources: Brier 1950, "Verification of forecasts expressed in terms of
probability"; Guo et al. 2017, "On calibration of modern neural networks", whose
expected calibration error has 15 bins.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_meta import episodes
from tff_meta.learners import personalizer

# Smaller probabilities of the right class count as this one, about float32's
# resolution at 1: an answer that was thought impossible adds 16.1 to a sum.
SMALLEST_PROBABILITY = 1e-7
NUM_BINS = 15


class Certainty(NamedTuple):
  """Of the answers to Q examples, float32 `[..., Q]` each.

  Attributes:
    nll: Minus the natural logarithm of the right class's probability.
    brier: The sum over classes of the squared differences of the probability
      and 1 for the right class, 0 for others.
    confidence: The greatest probability.
  """

  nll: Any
  brier: Any
  confidence: Any


def ask(predict: Any, *args: Any) -> tf.Tensor:
  """Returns what a `predict` or `curve` gives, scores where it goes by them."""
  if isinstance(predict, personalizer.ByScores):
    return predict.scores(*args)
  return predict(*args)


def to_labels(predict: Any, answers: tf.Tensor) -> tf.Tensor:
  """Returns labels of what `ask` returned, int32 `[..., Q]`.

  -1, which is never right, where a score is no number: the greatest would be
  the first, as if a model that has diverged knew one class.
  """
  if isinstance(predict, personalizer.ByScores):
    is_none = tf.reduce_any(tf.math.is_nan(answers), -1)
    return tf.where(is_none, -1, predict.to_labels(answers))
  return answers


def mark(
    predict: Any, answers: tf.Tensor, y: tf.Tensor
) -> tuple[tf.Tensor, Any]:
  """Returns labels and their `Certainty`, `()` where only labels are told.

  Args:
    predict: What was asked.
    answers: What `ask` returned.
    y: int32 `[Q]`, the right classes.
  """
  how_sure: Any = ()
  if isinstance(predict, personalizer.ByScores):
    how_sure = of_answers(predict.to_log_probabilities(answers), y)
  return to_labels(predict, answers), how_sure


def among_own(
    predict: Any, answers: tf.Tensor, support: episodes.Examples
) -> Any:
  """Returns what is answered where only some classes are possible.

  A model over all classes has to find out which a client has; one that compares
  with means of the client's examples, or has a head of the client's, is told.

  Args:
    predict: What was asked.
    answers: What `ask` returned, `[Q, C]` where they are scores.
    support: Examples `[n, ...]` that a client adapts on, whose classes are
      possible; all are without any.

  Returns:
    Labels, int32 `[Q]`, -1 as in `to_labels`; `()` where only labels are told.
  """
  if not isinstance(predict, personalizer.ByScores):
    return ()
  own = personalizer.own_classes(support, tf.shape(answers)[-1])
  scores = personalizer.among(own, answers)
  is_none = tf.reduce_any(tf.math.is_nan(answers), -1)
  return tf.where(is_none, -1, predict.to_labels(scores))


def specs(predict: Any) -> tuple[tf.TensorSpec, Any]:
  """Returns what `mark` returns of a client's answers."""
  given = tf.TensorSpec([None], tf.float32)
  tells = isinstance(predict, personalizer.ByScores)
  labels = tf.TensorSpec([None], tf.int32)
  return labels, Certainty(given, given, given) if tells else ()


def of_answers(log_probabilities: tf.Tensor, y: tf.Tensor) -> Certainty:
  """Marks probabilities.

  Args:
    log_probabilities: `[..., Q, C]`.
    y: int32 `[Q]`, the right classes, in `0..C-1`.

  Returns:
    The marks.
  """
  probabilities = tf.exp(log_probabilities)
  right = tf.one_hot(y, tf.shape(probabilities)[-1])
  of_right = tf.reduce_sum(right * probabilities, -1)
  return Certainty(
      -tf.math.log(tf.maximum(of_right, SMALLEST_PROBABILITY)),
      tf.reduce_sum((probabilities - right) ** 2, -1),
      tf.reduce_max(probabilities, -1),
  )


def expected_calibration_error(
    confidence: np.ndarray, is_right: np.ndarray
) -> float:
  """How far confidence and accuracy are apart, bin by bin.

    sum_b n_b / n |accuracy_b - mean confidence_b|

  Bin b has the confidences above (b - 1) / 15 and up to b / 15.

  Args:
    confidence: `[n]`, n at least 1, the greatest probabilities.
    is_right: Whether that class is the right one, `[n]`.

  Returns:
    A number in [0, 1]; NaN where a confidence is none.

  Source: Guo et al. 2017, eq. 3.
  """
  confidence = confidence.astype(np.float64)
  if np.isnan(confidence).any():
    return np.nan
  bins = np.clip(np.ceil(confidence * NUM_BINS) - 1, 0, NUM_BINS - 1)
  apart = np.bincount(bins.astype(int), is_right - confidence)
  return float(np.abs(apart).sum() / len(confidence))


class Calibration(NamedTuple):
  """Of n clients or groups, float64 `[n]` each.

  Attributes:
    nll: The mean negative log likelihood of each.
    brier: The mean Brier score, from 0 to 2.
    ece: The expected calibration error, see above.
  """

  nll: np.ndarray
  brier: np.ndarray
  ece: np.ndarray


def calibration(
    certainties: Sequence[Certainty], is_right: Sequence[np.ndarray]
) -> Calibration:
  """Returns that of clients or groups.

  Args:
    certainties: Of the answers of each.
    is_right: Which answers are.
  """
  return Calibration(
      np.array([np.mean(c.nll, dtype=np.float64) for c in certainties]),
      np.array([np.mean(c.brier, dtype=np.float64) for c in certainties]),
      np.array(
          [
              expected_calibration_error(c.confidence, right)
              for c, right in zip(certainties, is_right, strict=True)
          ]
      ),
  )
