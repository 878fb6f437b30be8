"""The margin's two rules: by hand, through TFF, with clients that have none."""

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_meta.aggregators import margins

VALUE_TYPE = tff.to_type(
    margins.Margin(tff.TensorType(np.float32), tff.TensorType(np.float32))
)


def upload(value, weight=1.0):
  return margins.Margin(np.float32(value), np.float32(weight))


NONE = upload(1e6, 0.0)  # What a client of one class sends counts nowhere.


def run(rule, rounds):
  """Returns the global margin after each round, and the last state."""
  process = margins.MarginsFactory(rule).create(VALUE_TYPE)
  state, found = process.initialize(), []
  for clients in rounds:
    output = process.next(state, clients)
    state = output.state
    found.append(float(output.result))
    assert output.measurements['margin'] == output.result
  return found, state


LOCALS = [[upload(m)] for m in (3, 6, 9, 12, 15)]


@pytest.mark.parametrize(
    'warm_start, expected',
    [
        # (0 + 0 + 3) / 3, (0 + 0 + 6) / 3, (0 + 1 + 9) / 3, (1 + 2 + 12) / 3,
        # (2 + 10 / 3 + 15) / 3: m(t) itself is in no sum.
        (False, [1, 2, 10 / 3, 5, 61 / 9]),
        # Three rounds as they are; (3 + 6 + 12) / 3, (6 + 9 + 15) / 3.
        (True, [3, 6, 9, 7, 10]),
    ],
)
def test_eq7_by_hand(warm_start, expected):
  found, _ = run(margins.eq7(3, warm_start, 0.0), LOCALS)
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_eq7_starts_from_the_initial_margin():
  """(4 + 4 + 3) / 3, (4 + 4 + 6) / 3, (4 + 11 / 3 + 9) / 3."""
  found, _ = run(margins.eq7(3, False, 4.0), LOCALS[:3])
  np.testing.assert_allclose(found, [11 / 3, 14 / 3, 50 / 9], rtol=1e-6)


def test_eq7_of_zeros_hardly_moves():
  """The numbers of the text: 0.051 after 50 rounds with W = 50."""
  margin_rule = margins.eq7(50, False, 0.0)
  state = margin_rule.initialize()
  for _ in range(50):
    state = margin_rule.next(state, upload(1.0))
  np.testing.assert_allclose(margin_rule.margin(state), 0.051, atol=5e-4)


def test_the_window_is_the_mean_of_single_margins():
  """W = 2: (1 + 3) / 2; (1 + 3 + 8) / 3, not the mean of 2 and 8; then 8, 5."""
  rounds = [[upload(1), upload(3)], [upload(8)], [upload(5)]]
  found, state = run(margins.raw_window(2, 9.0), rounds)
  np.testing.assert_allclose(found, [2, 4, 6.5], rtol=1e-6)
  np.testing.assert_array_equal(state[0].sums, [8, 5])


def test_the_window_holds_the_last_rounds_only():
  """Never more than W times the clients of a round; always their mean."""
  rng = np.random.default_rng(3)
  values = rng.uniform(0, 9, [12, 4])
  rule = margins.raw_window(5, 0.0)
  state = rule.initialize()
  for t, row in enumerate(values):
    state = rule.next(state, margins.Margin(np.float32(row.sum()), 4.0))
    kept = values[max(0, t - 4) : t + 1]
    assert np.sum(state.counts) == kept.size <= 5 * 4
    np.testing.assert_allclose(rule.margin(state), kept.mean(), rtol=1e-6)


RULES = {
    'eq7': margins.eq7(3, False, 2.0),
    'warm': margins.eq7(3, True, 2.0),
    'window': margins.raw_window(3, 2.0),
}


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_clients_without_a_margin_change_nothing(rule):
  with_them = [[upload(5), NONE], [NONE], [NONE, upload(7), upload(2)]]
  without = [[upload(5)], [upload(7), upload(2)]]
  found, state = run(rule, with_them)
  expected, expected_state = run(rule, without)
  assert found == [expected[0], expected[0], expected[1]]
  for a, b in zip(state[0], expected_state[0], strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_before_any_margin_there_is_the_initial_one(rule):
  found, _ = run(rule, [[NONE]])
  assert found == [2.0]


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_a_constant_margin_is_a_fixed_point(rule):
  found, _ = run(rule, [[upload(2), upload(2)]] * 5)
  np.testing.assert_allclose(found, 2.0, rtol=1e-6)


def test_the_sum_may_be_any_factory():
  """Clipped to norm 1, (3, 1) and (0, 1) have the sum (.95, 1.32)."""
  process = margins.MarginsFactory(
      margins.raw_window(3, 0.0),
      tff.aggregators.clipping_factory(1.0, tff.aggregators.SumFactory()),
  ).create(VALUE_TYPE)
  output = process.next(process.initialize(), [upload(3), upload(0)])
  expected = 3 / np.sqrt(10) / (1 / np.sqrt(10) + 1)
  np.testing.assert_allclose(output.result, expected, rtol=1e-6)
  assert output.measurements['sum']['clipped_count'] == 1
