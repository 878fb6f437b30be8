"""How sure models are, against sums by hand."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta.evaluation import certainty
from tff_meta.evaluation import client_metrics
from tff_meta.evaluation import clients as client_evaluation
from tff_meta.learners import fine_tuning
from tff_meta.learners import personalizer

# Right and unsure, wrong and quite sure, a tie that the first class wins, and
# an answer that leaves no chance to the right class.
PROBABILITIES = [[0.5, 0.3, 0.2], [0.1, 0.9, 0.0], [0.5, 0.5, 0.0], [1, 0, 0]]
Y = [0, 0, 1, 2]
NLL = [math.log(2), math.log(10), math.log(2), -math.log(1e-7)]
BRIER = [0.25 + 0.09 + 0.04, 0.81 + 0.81, 0.25 + 0.25, 1 + 1]


def _log(probabilities):
  return tf.math.log(tf.constant(probabilities, tf.float32))


def test_marks_by_hand():
  found = certainty.of_answers(_log(PROBABILITIES), tf.constant(Y))
  np.testing.assert_allclose(found.nll, NLL, rtol=1e-5)
  np.testing.assert_allclose(found.brier, BRIER, rtol=1e-5)
  np.testing.assert_allclose(found.confidence, [0.5, 0.9, 0.5, 1], rtol=1e-6)


def test_calibration_error_by_hand():
  """Bins of 15: 0.5 twice, one right; 0.9 and 1 in two bins, both wrong."""
  confidence = np.array([0.5, 0.9, 0.5, 1])
  error = certainty.expected_calibration_error(
      confidence, np.array([True, False, False, False])
  )
  assert error == pytest.approx((abs(1 - 2 * 0.5) + 0.9 + 1) / 4)
  # In one bin an answer too many and one too few make up for each other.
  error = certainty.expected_calibration_error(
      np.array([0.61, 0.65, 0.0]), np.array([True, False, False])
  )
  assert error == pytest.approx(abs(1 - 0.61 - 0.65) / 3)
  assert math.isnan(
      certainty.expected_calibration_error(np.array([math.nan]), np.ones(1))
  )


@pytest.mark.parametrize(
    'values, expected',
    [([0.3] * 4, 0), ([0, 0, 0], 0), ([0.4], 0), ([1, 0, 0, 0], 3 / 4)],
)
def test_gini_of_equals_and_of_one_who_has_all(values, expected):
  assert client_metrics.gini(np.array(values)) == pytest.approx(expected)


def test_gini_by_its_double_sum():
  values = np.random.default_rng(4).random(7)
  apart = np.abs(values[:, np.newaxis] - values).sum()
  assert client_metrics.gini(values) == pytest.approx(
      apart / (2 * 7**2 * values.mean())
  )


def _evaluate(predict, support=None, **options):
  """A client whose model is as unsure as `PROBABILITIES`, then surer.

  It adapts on what it is tested on, unless on other examples.
  """
  use = fine_tuning.build_client_personalizer(
      fine_tuning.FineTuning(1, 1.0, batch_size=4),
      (1,),
      lambda scale, batch: -scale,  # A step adds 1.
      predict,
  )
  x = np.arange(4, dtype=np.float32)[:, np.newaxis]
  examples = client_evaluation.corpus_lib.LabelledExamples(
      x, np.array(Y, np.int32)
  )
  return client_evaluation.evaluate_clients(
      client_evaluation.build_client_test(use, **options),
      np.float32(1),
      lambda _: (),
      [client_evaluation.ClientTask('a', support or examples, examples, 1)],
      seed=1,
  )


def _scores(scale, batch):
  return scale * tf.gather(
      _log(PROBABILITIES), tf.cast(batch.x[:, 0], tf.int32)
  )


@pytest.mark.parametrize('with_curve', [False, True])
def test_before_and_after_with_and_without_a_curve(with_curve):
  report = _evaluate(personalizer.ByScores(_scores), with_curve=with_curve)
  before, after = report.calibration_before, report.calibration
  assert before.nll == pytest.approx(np.mean(NLL), rel=1e-5)
  assert before.brier == pytest.approx(np.mean(BRIER), rel=1e-5)
  assert before.ece == pytest.approx(1.9 / 4, rel=1e-5)
  # Twice the logits: the first example has 0.25, 0.09 and 0.04 of 0.38.
  squares = np.square(PROBABILITIES[:2])
  squares /= squares.sum(1, keepdims=True)
  assert after.nll == pytest.approx(
      np.mean([*-np.log(squares[:, 0]), *NLL[2:]]), rel=1e-5
  )
  summary = report.summary()
  assert summary['nll_mean'] == after.nll and summary['ece_mean'] == after.ece
  assert summary['brier_before_mean'] == before.brier
  last = report.to_csv().decode().splitlines()[1].split(',')[-6:]
  assert [float(cell) for cell in last] == [*map(float, (*after, *before))]


@pytest.mark.parametrize('with_curve', [False, True])
@pytest.mark.parametrize(
    'own, expected', [([0, 0, 2], 0.5), ([1], 0.25), ([], 0.25)]
)
def test_among_own_classes_others_are_not_possible(own, expected, with_curve):
  """The second of four is wrong by a class that only some clients have."""
  support = client_evaluation.corpus_lib.LabelledExamples(
      np.zeros((len(own), 1), np.float32), np.array(own, np.int32)
  )
  report = _evaluate(
      personalizer.ByScores(_scores), support, with_curve=with_curve
  )
  assert report.accuracies_among_own == [expected]
  assert report.summary()['accuracy_among_own_mean'] == expected
  columns = report.to_csv().decode().splitlines()
  row = dict(zip(*(line.split(',') for line in columns), strict=True))
  assert (float(row['accuracy_among_own']), float(row['accuracy'])) == (
      expected,
      0.25,
  )


def test_labels_are_the_same_where_only_they_are_told():
  by_scores = personalizer.ByScores(_scores)
  told = _evaluate(lambda *args: by_scores(*args), with_curve=True)
  expected = _evaluate(by_scores, with_curve=True)
  assert told.calibration is told.calibration_before is None
  assert told.summary()['nll_mean'] is None
  assert told.summary()['accuracy_among_own_mean'] is None
  np.testing.assert_array_equal(told.curves, expected.curves)
  np.testing.assert_array_equal(told.accuracies, expected.accuracies)
  assert told.to_csv().decode().splitlines()[1].endswith(',,,,,,')


def test_what_is_no_number_is_not_in_the_summary():
  """Nor right, although two examples are of class 0."""
  report = _evaluate(
      personalizer.ByScores(
          lambda scale, batch: _scores(scale * math.nan, batch)
      )
  )
  assert math.isnan(report.calibration.nll[0])
  assert report.summary()['nll_mean'] is report.summary()['ece_mean'] is None
  assert report.accuracies == report.macro_f1 == report.accuracies_before == 0


def test_guards_keep_the_scores():
  use = personalizer.refusing_bad_labels(
      fine_tuning.build_client_personalizer(
          fine_tuning.FineTuning(1, 1.0, batch_size=4),
          (1,),
          lambda scale, batch: -scale,
          personalizer.ByScores(_scores),
      ),
      3,
  )
  query = episodes.Examples(tf.zeros([1, 1]), tf.constant([3]), tf.ones([1]))
  assert isinstance(use.curve, personalizer.ByScores)
  with pytest.raises(tf.errors.InvalidArgumentError, match='labels in 0..2'):
    use.curve.scores(tf.constant(1.0), (), query, query, tf.constant([1, 2]))
