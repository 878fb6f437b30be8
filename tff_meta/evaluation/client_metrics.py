"""What is reported of clients or groups: how well, how equally served."""

from collections.abc import Sequence
import csv
import io
from typing import Any, Literal, NamedTuple

import numpy as np

from tff_meta import escapes
from tff_meta.evaluation import accuracy as accuracy_lib
from tff_meta.evaluation import certainty as certainty_lib

_WORST = 10  # One in so many is among the worst decile.


def macro_f1(
    labels: np.ndarray,
    predicted: np.ndarray,
    *,
    restrict_to_labels: bool = False,
) -> float:
  """The unweighted mean of the F1 scores of the classes of one client.

  `F1_c = 2 TP_c / (2 TP_c + FP_c + FN_c)`, over all classes that are among the
  labels or were predicted. A class that was predicted but is not there scores
  zero. An answer of -1 is wrong, and no class.

  Args:
    labels: int [n], the right answers, n at least 1.
    predicted: int [n], the answers given.
    restrict_to_labels: Whether a prediction that is none of the client's labels
      counts as the client's smallest label other than the right one: still
      wrong, but no class of score zero enters the mean. (FedMeta-Per's released
      code; its clients have two classes.) A client with one class has no such
      label and keeps the prediction.

  Returns:
    A number in [0, 1].

  Source: Nguyen et al., FedMeta-Per, and its released code.
  """
  present = np.unique(labels)
  if restrict_to_labels and len(present) > 1:
    wrong = np.where(labels == present[0], present[1], present[0])
    predicted = np.where(np.isin(predicted, present), predicted, wrong)
  scores = []
  for label in np.union1d(labels, predicted[predicted >= 0]):
    hits = np.sum((labels == label) & (predicted == label))
    scores.append(
        2 * hits / (np.sum(labels == label) + np.sum(predicted == label))
    )
  return float(np.mean(scores))


def gini(values: np.ndarray) -> float:
  """The Gini coefficient: 0 if all are equal, near 1 if few have everything.

    sum_ij |v_i - v_j| / (2 n^2 mean)

  Args:
    values: float [n], n at least 1, none negative; 0 if all of them are 0.

  Source: Gini 1912, "Variabilita e mutabilita".
  """
  total = values.sum()
  if not total:
    return 0.0
  # The i-th smallest is the greater one of i pairs, the smaller one of n-1-i.
  ranks = 2 * np.arange(len(values)) + 1 - len(values)
  return float(ranks @ np.sort(values) / (len(values) * total))


def num_worst(num_clients: int) -> int:
  """Returns how many are the worst decile: a tenth rounded down, but one."""
  return max(1, num_clients // _WORST)


def worst_decile(values: np.ndarray) -> float:
  """The mean of the smallest tenth.

  Args:
    values: float [n], n at least 1; see `num_worst`.
  """
  return float(np.mean(np.sort(values)[: num_worst(len(values))]))


def _mean(values: np.ndarray) -> float | None:
  """The mean, None where it is no number, which JSON has no word for."""
  mean = float(np.mean(values))
  return mean if np.isfinite(mean) else None


class Report(NamedTuple):
  """How good the models of several clients are on the clients' test examples.

  Or those of several groups, which have one model each, on the test examples of
  all their clients.

  Attributes:
    ids: n names.
    num_support: int64 [n], examples that each adapted on.
    num_examples: int64 [n], test examples, each at least 1.
    accuracies: float64 [n], after adaptation, in [0, 1].
    macro_f1: float64 [n], after adaptation, see `macro_f1`.
    accuracies_before: float64 [n], of the model that each started from; None
      where there is no model before adaptation.
    curves: float64 [n, num_points], accuracy after 0, 1, ... steps; None where
      it was not asked for or there are no steps.
    unit: Whose models: `'client'` or `'group'`.
    calibration: How sure models are after adaptation; None where they do not
      tell it.
    calibration_before: The same of the models that each started from.
    accuracies_among_own: float64 [n], after adaptation, where only classes that
      the client adapted on are possible; None where models tell no scores.
  """

  ids: tuple[str, ...]
  num_support: np.ndarray
  num_examples: np.ndarray
  accuracies: np.ndarray
  macro_f1: np.ndarray
  accuracies_before: np.ndarray | None = None
  curves: np.ndarray | None = None
  unit: Literal['client', 'group'] = 'client'
  calibration: certainty_lib.Calibration | None = None
  calibration_before: certainty_lib.Calibration | None = None
  accuracies_among_own: np.ndarray | None = None

  @property
  def accuracy(self) -> accuracy_lib.AccuracyReport:
    """The accuracies after adaptation alone."""
    return accuracy_lib.AccuracyReport(self.accuracies, self.num_examples)

  def by_group(self, num_clients: int) -> accuracy_lib.AccuracyReport:
    """Returns the mean accuracy of every `num_clients` successive clients."""
    return accuracy_lib.AccuracyReport(
        self.accuracies.reshape(-1, num_clients).mean(1),
        self.num_examples.reshape(-1, num_clients).sum(1),
    )

  def summary(self) -> dict[str, Any]:
    """Returns what goes into summary.json.

    With `a_i` the accuracy of a client (or group) after adaptation, `b_i`
    before, `f_i` its macro-F1 and `n_i` its test examples: `accuracy_mean` is
    the mean of `a_i` (macro), `accuracy_half_width_95` 1.96 standard errors of
    it, which is too narrow for few clients, `accuracy_interval_95` as much to
    both sides within 0..1, `accuracy_micro` the mean weighted by `n_i`,
    `accuracy_std` the population standard deviation of `a_i`,
    `accuracy_worst_decile` the mean of the smallest tenth of `a_i` (rounded
    down, at least one), `accuracy_gini` their Gini coefficient,
    `accuracy_before_mean` the mean of `b_i`, `accuracy_before_worst_decile` and
    `accuracy_before_gini` the same of `b_i`, `share_hurt` the share of clients
    with `a_i < b_i`, `macro_f1_mean` and `macro_f1_std` those of `f_i`, `curve`
    the mean over clients per step, `curve_end_mean` the mean of its last three
    points (the number in CAFeMe's tables), `nll_mean`, `brier_mean` and
    `ece_mean` the means of what `certainty.Calibration` has of clients,
    `nll_before_mean` and so on those before adaptation, and
    `accuracy_among_own_mean` the mean accuracy where only classes that a client
    adapted on are possible. What does not exist is None.
    """
    before = self.accuracies_before
    hurt, curve, curve_end, of_own = None, None, None, None
    if self.accuracies_among_own is not None:
      of_own = float(np.mean(self.accuracies_among_own))
    if before is not None:
      hurt = float(np.mean(self.accuracies < before))
    if self.curves is not None:
      curve = np.mean(self.curves, 0).tolist()
      curve_end = float(np.mean(curve[-3:]))
    return self.accuracy.summary() | {
        'accuracy_std': float(np.std(self.accuracies)),
        'accuracy_worst_decile': worst_decile(self.accuracies),
        'accuracy_before_mean': None if before is None else _mean(before),
        'share_hurt': hurt,
        'macro_f1_mean': float(np.mean(self.macro_f1)),
        'macro_f1_std': float(np.std(self.macro_f1)),
        'curve': curve,
        'curve_end_mean': curve_end,
        'accuracy_gini': gini(self.accuracies),
        **{
            f'{name}_mean': None if values is None else _mean(values)
            for name, values in self._calibrations().items()
        },
        'accuracy_among_own_mean': of_own,
        'accuracy_before_worst_decile': (
            None if before is None else worst_decile(before)
        ),
        'accuracy_before_gini': None if before is None else gini(before),
        f'num_{self.unit}s': len(self.ids),
    }

  def _calibrations(self) -> dict[str, np.ndarray | None]:
    """Returns names of columns, and what is in them."""
    columns: dict[str, np.ndarray | None] = {}
    for suffix, found in (
        ('', self.calibration),
        ('_before', self.calibration_before),
    ):
      for name in certainty_lib.Calibration._fields:
        columns[name + suffix] = None if found is None else getattr(found, name)
    return columns

  def to_csv(self) -> bytes:
    """Returns a line a client or group, for a spreadsheet.

    Numbers read back as the very same; what does not exist is empty. A name
    that a spreadsheet would compute has an apostrophe before it.
    """
    columns = {
        f'{self.unit}_id': [escapes.csv_cell(i) for i in self.ids],
        'num_support': self.num_support,
        'num_examples': self.num_examples,
        'accuracy_before': self.accuracies_before,
        'accuracy': self.accuracies,
        'macro_f1': self.macro_f1,
    }
    if self.accuracies_among_own is not None:
      columns['accuracy_among_own'] = self.accuracies_among_own
    if self.curves is not None:
      columns |= {
          f'accuracy_after_{step}_steps': self.curves[:, step]
          for step in range(self.curves.shape[1])
      }
    columns |= self._calibrations()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(columns)
    for i in range(len(self.ids)):
      writer.writerow(
          '' if column is None else np.asarray(column)[i].item()
          for column in columns.values()
      )
    return text.getvalue().encode()


class Answers(NamedTuple):
  """What the models of one client or group answered to its test examples.

  Attributes:
    id: Its name.
    num_support: Examples that it adapted on.
    labels: int [Q], the right answers, Q at least 1.
    before: int [Q], answers of the model it started from, or None.
    after: int [Q], answers of the adapted model, -1 where it has none.
    curve: int [num_points, Q], answers after 0, 1, ... steps, or None.
    certainty: How sure the adapted model is, or None.
    certainty_before: How sure the model is that it started from, or None.
    among_own: int [Q], answers of the adapted model where only classes that it
      adapted on are possible, or None.
  """

  id: str
  num_support: int
  labels: np.ndarray
  before: np.ndarray | None
  after: np.ndarray
  curve: np.ndarray | None
  certainty: certainty_lib.Certainty | None = None
  certainty_before: certainty_lib.Certainty | None = None
  among_own: np.ndarray | None = None


def report(
    answers: Sequence[Answers],
    *,
    restrict_f1: bool = False,
    unit: Literal['client', 'group'] = 'client',
) -> Report:
  """Marks the answers of clients or groups.

  Args:
    answers: Of all of them, at least one; all or none with `before`, with
      `curve`, and with how sure they are.
    restrict_f1: See `macro_f1`.
    unit: Whose answers these are.

  Returns:
    The report, in the same order.
  """

  def share_right(given):
    if given[0] is None:
      return None
    pairs = zip(given, answers, strict=True)
    return np.array([np.mean(g == a.labels, axis=-1) for g, a in pairs])

  def calibration(certainties, given):
    if certainties[0] is None:
      return None
    pairs = zip(given, answers, strict=True)
    return certainty_lib.calibration(
        certainties, [g == a.labels for g, a in pairs]
    )

  return Report(
      ids=tuple(a.id for a in answers),
      num_support=np.array([a.num_support for a in answers]),
      num_examples=np.array([len(a.labels) for a in answers]),
      accuracies=share_right([a.after for a in answers]),
      macro_f1=np.array(
          [
              macro_f1(a.labels, a.after, restrict_to_labels=restrict_f1)
              for a in answers
          ]
      ),
      accuracies_before=share_right([a.before for a in answers]),
      curves=share_right([a.curve for a in answers]),
      unit=unit,
      calibration=calibration(
          [a.certainty for a in answers], [a.after for a in answers]
      ),
      calibration_before=calibration(
          [a.certainty_before for a in answers], [a.before for a in answers]
      ),
      accuracies_among_own=share_right([a.among_own for a in answers]),
  )
