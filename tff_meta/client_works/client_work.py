"""The one place that writes a `ClientWorkProcess`.

An algorithm supplies a pure TensorFlow function and, where the server keeps
something for the clients, three functions on that state. Everything that TFF
repeats in every client work (types, placement, non-finite clients, metrics) is
here and knows no algorithm.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import weights as weights_lib
from tff_meta.learners import local_sgd


class ClientWorkState(NamedTuple):
  """The server state of a client work, as three pure TensorFlow functions.

  Attributes:
    initialize: `() -> S`, the state before the first round.
    message: `S -> M`, what is broadcast to the clients beside the weights.
    next: `(S, R) -> S`, where `R` is the clients' reports, summed.
  """

  initialize: Callable[[], Any]
  message: Callable[[Any], Any]
  next: Callable[[Any, Any], Any]


class RoundSeed(NamedTuple):
  """State of `round_seed`.

  Attributes:
    seed: The run's seed, int32 `[2]`.
    round_num: Rounds done so far, int32 scalar.
  """

  seed: tf.Tensor
  round_num: tf.Tensor


def _base_seed(seed: int) -> tf.Tensor:
  """The seed behind those of the rounds, int32 `[2]`."""
  return tf.constant([0, seed], tf.int32)


def check_seed(seed: int) -> None:
  """Raises a ValueError if a run's seed is not in the int32 range."""
  if not -(2**31) <= seed < 2**31:
    raise ValueError(f'Expected `seed` in the int32 range, found {seed}.')


def round_seed(seed: int) -> ClientWorkState:
  """A state whose message is a fresh random seed every round, int32 `[2]`.

  Args:
    seed: The run's seed, in the int32 range.

  Returns:
    A `ClientWorkState`; clients fold their own salt into the message.

  Raises:
    ValueError: If the seed is out of range.
  """
  check_seed(seed)

  def message(state):
    return tf.random.experimental.stateless_fold_in(state.seed, state.round_num)

  def next_state(state, report):
    del report  # The seeds do not depend on what clients did.
    return RoundSeed(state.seed, state.round_num + 1)

  return ClientWorkState(
      lambda: RoundSeed(_base_seed(seed), tf.constant(0)), message, next_state
  )


def run_seed(seed: int) -> ClientWorkState:
  """A state whose message is the same seed in all rounds, int32 `[2]`.

  For algorithms that count for themselves: an FRL client folds in the number of
  the episode, which lasts several rounds.

  Args:
    seed: The run's seed, in the int32 range.

  Returns:
    A `ClientWorkState`.

  Raises:
    ValueError: If the seed is out of range.
  """
  check_seed(seed)
  return ClientWorkState(
      lambda: _base_seed(seed), lambda state: state, lambda state, report: state
  )


def client_data_type(input_shape: tuple[int, ...]) -> tff.StructType:
  """The type of one client's data, `<examples=<x, y>*, salt=int32*>`.

  Args:
    input_shape: Shape of one example, channels last.

  Returns:
    A struct of two sequences: batches of examples (`x` float32
    `[None, *input_shape]`, `y` int32 `[None]`), in any batching, and at most
    one int32 scalar that makes the client's random numbers its own.
  """
  batch = collections.OrderedDict(
      x=tff.TensorType(np.float32, [None, *input_shape]),
      y=tff.TensorType(np.int32, [None]),
  )
  return tff.to_type(
      collections.OrderedDict(
          examples=tff.SequenceType(batch), salt=tff.SequenceType(np.int32)
      )
  )


def _train_metrics(report: local_sgd.LocalReport, num_clients, num_non_finite):
  return collections.OrderedDict(
      loss=tf.math.divide_no_nan(report.loss_sum, report.num_examples),
      num_examples=report.num_examples,
      num_clients=num_clients,
      num_non_finite_clients=num_non_finite,
  )


def build_client_work(
    weights_type: tff.Type,
    data_type: tff.Type,
    client_update: Callable[..., Any],
    state: ClientWorkState,
) -> tff.learning.templates.ClientWorkProcess:
  """Builds a `ClientWorkProcess` from one pure client function.

  A client whose update, weight or report is not finite counts with weight zero
  and is counted in the measurement `train/num_non_finite_clients`.

  Args:
    weights_type: Unplaced type of what the distributor sends.
    data_type: Unplaced type of a client's data, see `client_data_type`.
    client_update: `(weights, message, data) -> (ClientResult, LocalReport)` in
      pure TensorFlow, where `message` is `state.message(...)` and `data` a
      structure of `tf.data.Dataset`s.
    state: The server state of the client work.

  Returns:
    A client work whose measurements are `train` with `loss` (mean over the
    examples trained on), `num_examples`, `num_clients` and
    `num_non_finite_clients`, all float32 scalars.
  """
  init_tf = tff.tensorflow.computation(state.initialize)
  state_type = init_tf.type_signature.result
  message_tf = tff.tensorflow.computation(state.message, state_type)
  message_type = message_tf.type_signature.result

  @tff.tensorflow.computation(weights_type, message_type, data_type)
  def client_update_tf(weights, message, data):
    result, report = client_update(weights, message, data)
    kept, finite = weights_lib.where_finite_or_zero(
        (result.update, result.update_weight, report)
    )
    update, update_weight, report = kept
    result = tff.learning.templates.ClientResult(update, update_weight)
    return result, report, tf.constant(1.0), 1.0 - tf.cast(finite, tf.float32)

  report_type = client_update_tf.type_signature.result[1]
  next_state_tf = tff.tensorflow.computation(
      state.next, (state_type, report_type)
  )
  metrics_tf = tff.tensorflow.computation(
      _train_metrics, (report_type, np.float32, np.float32)
  )

  @tff.federated_computation
  def init_fn():
    return tff.federated_eval(init_tf, tff.SERVER)

  @tff.federated_computation(
      init_fn.type_signature.result,
      tff.FederatedType(weights_type, tff.CLIENTS),
      tff.FederatedType(data_type, tff.CLIENTS),
  )
  def next_fn(server_state, weights, data):
    message = tff.federated_broadcast(
        tff.federated_map(message_tf, server_state)
    )
    result, report, count, non_finite = tff.federated_map(
        client_update_tf, (weights, message, data)
    )
    report_sum = tff.federated_sum(report)
    train = tff.federated_map(
        metrics_tf,
        (report_sum, tff.federated_sum(count), tff.federated_sum(non_finite)),
    )
    return tff.templates.MeasuredProcessOutput(
        tff.federated_map(next_state_tf, (server_state, report_sum)),
        result,
        tff.federated_zip(collections.OrderedDict(train=train)),
    )

  return tff.learning.templates.ClientWorkProcess(init_fn, next_fn)
