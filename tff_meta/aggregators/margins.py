"""Aggregation of the clients' margins over a window of rounds (MetaVers)."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.aggregators import bounds

_ROOT_2 = 2**0.5
# Standard deviations of the noise that a weight has to be above to be believed.
_CERTAINTY = 1.0


class Margin(NamedTuple):
  """What a client uploads; the server adds up `weight * value` and `weight`.

  Attributes:
    value: float32 scalar, the client's own margin.
    weight: float32 scalar, 1; 0 for a client that has none, because a margin
      takes two classes.
  """

  value: tf.Tensor
  weight: tf.Tensor


def _shorten(margin, limits):
  """Cuts `weight * value` to [0, size] and the weight to [0, 1]."""
  shortened = Margin(
      tf.clip_by_value(margin.value / limits.size, 0.0, 1.0) / _ROOT_2,
      tf.clip_by_value(margin.weight, 0.0, 1.0) / _ROOT_2,
  )
  return shortened, margin.value > limits.size


def _restore(total, limits, noise):
  """The sums; none where the noise may be all that there is."""
  weight = tf.where(
      total.weight > _CERTAINTY * noise, _ROOT_2 * total.weight, 0.0
  )
  value = _ROOT_2 * limits.size * total.value
  return Margin(tf.clip_by_value(value, 0.0, limits.size * weight), weight)


# What one client adds, `weight * value` and `weight`, has norm 1 at most. The
# server uses that no margin is negative or beyond the limit.
BOUND = bounds.Bound(_shorten, _restore)


class Rule(NamedTuple):
  """How the global margin follows from the rounds' margins.

  Attributes:
    initialize: `() -> S`, the window before the first round.
    next: `(S, Margin) -> S`, where the margin holds the sums over a round's
      clients, of a weight above 0.
    margin: `S -> float32 scalar`, the global margin.
  """

  initialize: Callable[[], Any]
  next: Callable[[Any, Margin], Any]
  margin: Callable[[Any], tf.Tensor]


class Eq7Window(NamedTuple):
  """State of `eq7`.

  Attributes:
    margins: float32 [W], the global margins m(t - W + 1), ..., m(t).
    num_rounds: int32 scalar, rounds that had a margin, t - 1.
  """

  margins: tf.Tensor
  num_rounds: tf.Tensor


class RawWindow(NamedTuple):
  """State of `window`: the clients' margins of W rounds, added up by round.

  Attributes:
    sums: float32 [W], of a round's margins.
    counts: float32 [W], how many they are.
  """

  sums: tf.Tensor
  counts: tf.Tensor


def eq7(window: int, warm_start: bool, initial_margin: float) -> Rule:
  """A recursion on the global margin.

      m(t + 1) = 1 / W * (sum_{s = t - W + 1}^{t - 1} m(s) + l_t)

  where l_t is the mean of round t's margins. (As printed, the sum leaves out
  m(t).) With a history of zeros it hardly moves: a constant margin of 1 and W =
  50 give 0.051 after 50 rounds. A constant margin is a fixed point.

  Args:
    window: W, at least 1.
    warm_start: Whether m(t + 1) is l_t for t <= W.
    initial_margin: m(s) for s <= 1.

  Returns:
    A `Rule`.

  Source: Lim et al. (MetaVers), eq. 7; the warm start is ours.
  """

  def next_state(state, total):
    mean = total.value / total.weight
    margin = (tf.reduce_sum(state.margins[:-1]) + mean) / window
    if warm_start:
      margin = tf.where(state.num_rounds < window, mean, margin)
    margins = tf.concat([state.margins[1:], [margin]], 0)
    return Eq7Window(margins, state.num_rounds + 1)

  return Rule(
      lambda: Eq7Window(tf.fill([window], initial_margin), tf.constant(0)),
      next_state,
      lambda state: state.margins[-1],
  )


def raw_window(window: int, initial_margin: float) -> Rule:
  """The mean of all single margins that the last W rounds uploaded.

  A client's margin counts as much in a round of many as in a round of few. The
  window holds at most W times the clients of a round; rounds without a margin
  take no place in it.

  Args:
    window: W, at least 1.
    initial_margin: The margin until there is one.

  Returns:
    A `Rule`.

  Source: the released code of MetaVers, which keeps the margins one by one.
  """

  def next_state(state, total):
    return RawWindow(
        tf.concat([state.sums[1:], [total.value]], 0),
        tf.concat([state.counts[1:], [total.weight]], 0),
    )

  def margin(state):
    count = tf.reduce_sum(state.counts)
    mean = tf.math.divide_no_nan(tf.reduce_sum(state.sums), count)
    return tf.where(count > 0, mean, initial_margin)

  return Rule(
      lambda: RawWindow(tf.zeros([window]), tf.zeros([window])),
      next_state,
      margin,
  )


class MarginsFactory(tff.aggregators.UnweightedAggregationFactory):
  """Turns the clients' `Margin`s into the global margin, a float32 scalar.

  The window is the state of the aggregation process, so it is federated state.
  The server sees sums only. A round in which no client has a margin changes
  nothing.
  """

  def __init__(
      self,
      rule: Rule,
      sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
  ):
    """Initializes the factory.

    Args:
      rule: `eq7(...)` or `raw_window(...)`.
      sum_factory: Adds up margins and weights; by default
        `tff.aggregators.SumFactory()`, replaceable by a secure sum.
    """
    self._rule = rule
    self._sum_factory = sum_factory or tff.aggregators.SumFactory()

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the process for values of type `Margin`."""
    rule = self._rule
    sum_process = self._sum_factory.create(value_type)
    init_tf = tff.tensorflow.computation(rule.initialize)
    state_type = init_tf.type_signature.result

    @tff.tensorflow.computation(value_type)
    def weigh(value):
      return Margin(value.weight * value.value, value.weight)

    @tff.tensorflow.computation(state_type, value_type)
    def next_tf(state, total):
      # Not a product: 0 / 0 in the branch that is not taken is no harm here.
      moved = tf.nest.map_structure(
          lambda new, old: tf.where(total.weight > 0, new, old),
          rule.next(state, total),
          state,
      )
      return moved, rule.margin(moved)

    @tff.federated_computation
    def init_fn():
      return tff.federated_zip(
          (tff.federated_eval(init_tf, tff.SERVER), sum_process.initialize())
      )

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      total = sum_process.next(state[1], tff.federated_map(weigh, value))
      window, margin = tff.federated_map(next_tf, (state[0], total.result))
      measurements = collections.OrderedDict(
          margin=margin, sum=total.measurements
      )
      return tff.templates.MeasuredProcessOutput(
          tff.federated_zip((window, total.state)),
          margin,
          tff.federated_zip(measurements),
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)
