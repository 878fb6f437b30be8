"""What is reported of clients, against counts by hand."""

import csv
import io

import numpy as np
import pytest

from tff_meta.evaluation import client_metrics


def naive_f1(labels, predicted):
  """Counts every kind of answer by itself."""
  scores = []
  for c in set(labels) | set(predicted):
    pairs = list(zip(labels, predicted, strict=True))
    tp = sum(a == c and b == c for a, b in pairs)
    fp = sum(a != c and b == c for a, b in pairs)
    fn = sum(a == c and b != c for a, b in pairs)
    precision = tp / (tp + fp) if tp + fp else 0.0
    recall = tp / (tp + fn) if tp + fn else 0.0
    both = precision + recall
    scores.append(2 * precision * recall / both if both else 0.0)
  return sum(scores) / len(scores)


def macro_f1(labels, predicted, **options):
  return client_metrics.macro_f1(
      np.array(labels), np.array(predicted), **options
  )


def test_macro_f1_by_hand():
  """Two of four threes, two said: 2 * 2 / 6; two of two sevens, four said."""
  labels, predicted = [3, 3, 3, 3, 7, 7], [3, 3, 7, 7, 7, 7]
  assert macro_f1(labels, predicted) == pytest.approx((2 / 3 + 2 / 3) / 2)
  # A class that is nowhere scores zero: (4/7 + 0 + 2/3) / 3.
  assert macro_f1([3, 3, 3, 7, 7], [3, 3, 5, 7, 3]) == pytest.approx(
      (2 * 2 / 6 + 0 + 2 / 3) / 3
  )
  assert macro_f1([4, 4], [4, 4]) == 1
  # No answer is no class.
  assert macro_f1([3, 3, 7], [3, 3, -1]) == pytest.approx((1 + 0) / 2)


def test_macro_f1_against_naive_counts():
  rng = np.random.default_rng(1)
  for _ in range(20):
    labels, predicted = rng.integers(0, 4, (2, 9))
    assert macro_f1(labels, predicted) == pytest.approx(
        naive_f1(labels, predicted)
    )


def test_restricted_f1_of_the_code_of_fedmeta_per():
  """Sevens become the other class: F1 of 0 is 2 / 5, of 1 it is 2 / 5."""
  labels, predicted = [0, 0, 1, 1, 1], [0, 7, 1, 0, 7]
  assert macro_f1(labels, predicted) == pytest.approx(1 / 3)
  restricted = macro_f1(labels, predicted, restrict_to_labels=True)
  assert restricted == pytest.approx(0.4)


def test_restricted_f1_replaces_foreign_labels():
  """By the other label, which is as wrong: 5 for a 3 becomes 7."""
  labels, predicted = [3, 3, 3, 7, 7], [3, 3, 5, 7, 9]
  restricted = macro_f1(labels, predicted, restrict_to_labels=True)
  assert restricted == pytest.approx(macro_f1(labels, [3, 3, 7, 7, 3]))
  assert restricted > macro_f1(labels, predicted)
  # Own labels are left alone, and with one class nothing can be put instead.
  assert macro_f1([3, 7], [7, 7], restrict_to_labels=True) == pytest.approx(
      macro_f1([3, 7], [7, 7])
  )
  assert macro_f1([3, 3], [3, 5], restrict_to_labels=True) == pytest.approx(
      macro_f1([3, 3], [3, 5])
  )


def make_report(accuracies, num_examples=None, **fields):
  n = len(accuracies)
  return client_metrics.Report(
      ids=tuple(f'c{i}' for i in range(n)),
      num_support=np.arange(n),
      num_examples=np.array(num_examples or [10] * n),
      accuracies=np.array(accuracies),
      macro_f1=np.array(fields.pop('macro_f1', [0.5] * n)),
      **{name: np.array(value) for name, value in fields.items()},
  )


def test_micro_macro_and_deviation():
  """FedMeta-Per, section 4.2: n = 10 at .9, 90 at .5: .54, .70, .20."""
  found = make_report([0.9, 0.5], [10, 90], macro_f1=[0.2, 0.8]).summary()
  assert found['accuracy_micro'] == pytest.approx(0.54)
  assert found['accuracy_mean'] == pytest.approx(0.70)
  assert found['accuracy_std'] == pytest.approx(0.20)
  assert found['macro_f1_mean'] == pytest.approx(0.5)
  assert found['macro_f1_std'] == pytest.approx(0.3)
  assert found['num_clients'] == 2
  assert found['accuracy_interval_95'] is not None


@pytest.mark.parametrize(
    'num_clients, expected',
    [(1, 0.99), (9, 0.91), (19, 0.81), (20, 0.805), (25, 0.755)],
)
def test_the_worst_decile_has_at_least_one_client(num_clients, expected):
  """Clients at .99, .98, ...: the last one, or the mean of the last two."""
  accuracies = [0.99 - 0.01 * i for i in range(num_clients)][::-1]
  rng = np.random.default_rng(3)
  found = make_report(rng.permutation(accuracies)).summary()
  assert found['accuracy_worst_decile'] == pytest.approx(expected)


def test_clients_hurt_by_adaptation_are_those_that_lose():
  found = make_report(
      [0.5, 0.6, 0.7, 0.8, 0.4], accuracies_before=[0.6, 0.6, 0.1, 0.2, 0.5]
  ).summary()
  assert found['share_hurt'] == pytest.approx(2 / 5)
  assert found['accuracy_before_mean'] == pytest.approx(0.4)
  assert found['accuracy_before_worst_decile'] == pytest.approx(0.1)
  # Of 0.1, 0.2, 0.5, 0.6, 0.6 the sum of all |b_i - b_j| is 2 x 2.8.
  assert found['accuracy_before_gini'] == pytest.approx(5.6 / (2 * 25 * 0.4))


def test_what_does_not_exist_is_none():
  found = make_report([0.5, 0.7]).summary()
  assert found['share_hurt'] is found['accuracy_before_mean'] is None
  assert found['accuracy_before_gini'] is None
  assert found['curve'] is found['curve_end_mean'] is None
  assert make_report([0.5]).summary()['accuracy_half_width_95'] is None


def test_the_curve_is_the_mean_over_clients():
  curves = [[0.1, 0.1, 0.2, 0.5], [0.9, 0.5, 0.6, 0.7]]
  found = make_report([0.5, 0.7], curves=curves).summary()
  assert found['curve'] == pytest.approx([0.5, 0.3, 0.4, 0.6])
  assert found['curve_end_mean'] == pytest.approx(1.3 / 3)


def test_groups_weigh_their_clients_alike():
  found = make_report([0.5, 0.7, 0.1, 0.2], [1, 3, 5, 5]).by_group(2)
  assert found.accuracies == pytest.approx([0.6, 0.15])
  assert found.num_examples.tolist() == [4, 10]


def test_the_answers_are_marked():
  answers = [
      client_metrics.Answers(
          id='b',
          num_support=4,
          labels=np.array([1, 2, 2]),
          before=np.array([1, 1, 1]),
          after=np.array([1, 2, 5]),
          curve=np.array([[1, 1, 1], [1, 2, 2]]),
      ),
      client_metrics.Answers(
          id='a',
          num_support=0,
          labels=np.array([0, 1]),
          before=np.array([1, 1]),
          after=np.array([1, 0]),
          curve=np.array([[1, 1], [1, 0]]),
      ),
  ]
  found = client_metrics.report(answers, restrict_f1=False)
  assert found.ids == ('b', 'a')
  assert found.num_support.tolist() == [4, 0]
  assert found.num_examples.tolist() == [3, 2]
  assert found.accuracies == pytest.approx([2 / 3, 0])
  assert found.accuracies_before == pytest.approx([1 / 3, 1 / 2])
  np.testing.assert_allclose(found.curves, [[1 / 3, 1], [1 / 2, 0]])
  assert found.macro_f1 == pytest.approx([(1 + 2 / 3 + 0) / 3, 0])
  restricted = client_metrics.report(answers, restrict_f1=True)
  assert restricted.macro_f1[0] == pytest.approx((2 / 3 + 2 / 3) / 2)
  bare = [a._replace(before=None, curve=None) for a in answers]
  found = client_metrics.report(bare, restrict_f1=False)
  assert found.accuracies_before is found.curves is None


def test_a_report_of_groups_says_so():
  answers = client_metrics.Answers(
      id='group_0',
      num_support=4,
      labels=np.array([1, 2]),
      before=None,
      after=np.array([1, 1]),
      curve=None,
  )
  groups = client_metrics.report([answers], unit='group')
  clients = client_metrics.report([answers])
  found, expected = groups.summary(), clients.summary()
  assert found.pop('num_groups') == expected.pop('num_clients') == 1
  assert found == expected
  assert groups.to_csv().startswith(b'group_id,num_support,')
  assert clients.to_csv().startswith(b'client_id,num_support,')


def test_the_csv_has_a_line_for_each_client():
  report = make_report(
      [1 / 3, 0.7],
      [3, 10],
      accuracies_before=[0.1, 0.2],
      curves=[[0.1, 1 / 3], [0.2, 0.7]],
  )
  first, second = csv.DictReader(io.StringIO(report.to_csv().decode()))
  assert list(first) == [
      'client_id',
      'num_support',
      'num_examples',
      'accuracy_before',
      'accuracy',
      'macro_f1',
      'accuracy_after_0_steps',
      'accuracy_after_1_steps',
      'nll',
      'brier',
      'ece',
      'nll_before',
      'brier_before',
      'ece_before',
  ]
  assert float(first['accuracy']) == 1 / 3  # To the last digit.
  assert (second['client_id'], second['num_examples']) == ('c1', '10')
  assert second['accuracy_after_1_steps'] == '0.7'
  bare = report._replace(accuracies_before=None, curves=None)
  first, _ = csv.DictReader(io.StringIO(bare.to_csv().decode()))
  assert first['accuracy_before'] == first['nll'] == ''
