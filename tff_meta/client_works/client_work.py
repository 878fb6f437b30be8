"""The one place that writes a `ClientWorkProcess`.

An algorithm supplies a pure TensorFlow function and, where the server keeps
something for the clients, functions on that state. Everything that TFF repeats
in every client work (types, placement, non-finite clients, metrics) is here and
knows no algorithm.

What a client keeps for itself between rounds, its memory, comes in with its
data and goes out beside the result. `ClientWork.process` drops it, as the
template demands; `ClientWork.next_with_memory` is the same computation with it.
"""

import collections
from collections.abc import Callable
import contextlib
import typing
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta import weights as weights_lib
from tff_meta.learners import local_sgd
from tff_meta.models import model as model_lib

# What is done with what is counted on clients, see `build_client_work`.
Metrics = Literal['plain', 'secure', 'withheld']

_NAN = float('nan')
# The most that secure sums take of a client's loss sum or number of examples;
# the sum is of multiples of 2**-11.
_LARGEST_COUNT = 2.0**20


class ClientMemory(NamedTuple):
  """What a client has kept for itself since its last round.

  Attributes:
    present: Boolean scalar, whether the client has taken part before.
    value: A structure of tensors; the initial memory where it has not.
  """

  present: tf.Tensor
  value: Any

  def value_or(self, other: Any) -> Any:
    """Returns `value`, or `other`, like it, where the client has none."""
    return tf.nest.map_structure(
        lambda mine, theirs: tf.where(self.present, mine, theirs),
        self.value,
        other,
    )


class ClientData(NamedTuple):
  """A client's data, dense.

  Attributes:
    examples: All its `Examples`, none of them padding.
    salt: int32 scalar that makes its random numbers its own.
    memory: `ClientMemory`; `()` if clients keep nothing between rounds.
  """

  examples: episodes.Examples
  salt: tf.Tensor
  memory: Any = ()


class ClientOutput(NamedTuple):
  """What a client's work results in.

  Attributes:
    update: What is aggregated, usually the weights it received minus those it
      ended with.
    update_weight: float32 scalar, at least 0; 0 without examples.
    report: `LocalReport` of the training.
    signal: What `ClientWorkState.aggregator` aggregates; `()` for nothing.
    memory: What the client keeps for its next round; `()` for nothing. It goes
      to no other party, unless `update` or `signal` has it, too.
    learned: Whether the loss was over any example, a boolean; where it was not,
      it is 0, which is no mean, and the report does not count.
    change: The change of one model, where `update` has other things beside it
      or several models; `()` for `update` itself. Its norm is measured.
  """

  update: Any
  update_weight: tf.Tensor
  report: local_sgd.LocalReport
  signal: Any = ()
  memory: Any = ()
  learned: bool | tf.Tensor = True
  change: Any = ()


class ClientWorkState(NamedTuple):
  """The server state of a client work, as pure TensorFlow functions.

  Attributes:
    initialize: `() -> S`, the state before the first round.
    message: `S -> M`, what is broadcast to the clients beside the weights.
    next: `(S, R) -> S`, where `R` is the aggregate of the clients' signals,
      `()` without an aggregator.
    aggregator: Unweighted, of the clients' signals; what it keeps between
      rounds is federated state.
  """

  initialize: Callable[[], Any]
  message: Callable[[Any], Any]
  next: Callable[[Any, Any], Any]
  aggregator: tff.aggregators.UnweightedAggregationFactory | None = None


class ClientWork(NamedTuple):
  """A client work, and its form that also returns the clients' memories.

  Attributes:
    process: `tff.learning.templates.ClientWorkProcess`.
    next_with_memory: `(state, weights, data) -> (MeasuredProcessOutput,
      ClientMemory at CLIENTS)`; None if clients keep nothing. A client whose
      memory is not `present` in the output has none to store.
  """

  process: tff.learning.templates.ClientWorkProcess
  next_with_memory: tff.Computation | None


class RoundSeed(NamedTuple):
  """State of `round_seed`.

  Attributes:
    seed: The run's seed, int32 `[2]`.
    round_num: Rounds done so far, int32 scalar.
  """

  seed: tf.Tensor
  round_num: tf.Tensor


class RoundMessage(NamedTuple):
  """What `round_seed` broadcasts.

  Attributes:
    seed: Of this round, int32 `[2]`.
    run_seed: Of all rounds, int32 `[2]`.
    message: Of the state that `round_seed` was given; `()` without.
  """

  seed: tf.Tensor
  run_seed: tf.Tensor
  message: Any


def _base_seed(seed: int) -> tf.Tensor:
  """The seed behind those of the rounds, int32 `[2]`."""
  return tf.constant([0, seed], tf.int32)


def check_seed(seed: int) -> None:
  """Raises a ValueError if a run's seed is not in the int32 range."""
  if not -(2**31) <= seed < 2**31:
    raise ValueError(f'Expected `seed` in the int32 range, found {seed}.')


def rounds_done(
    message: Callable[[tf.Tensor], Any] = lambda num_rounds: num_rounds,
) -> ClientWorkState:
  """A state that counts rounds, an int32 scalar.

  Args:
    message: From the rounds done so far to what is broadcast; by default that
      number.

  Returns:
    A `ClientWorkState`.
  """
  return ClientWorkState(
      lambda: tf.constant(0),
      message,
      lambda num_rounds, aggregate: num_rounds + 1,
  )


def round_seed(
    seed: int, state: ClientWorkState | None = None
) -> ClientWorkState:
  """A state whose message has a fresh random seed every round.

  Args:
    seed: The run's seed, in the int32 range.
    state: What else the server keeps and broadcasts; None for nothing.

  Returns:
    A `ClientWorkState` whose message is a `RoundMessage`.

  Raises:
    ValueError: If the seed is out of range.
  """
  check_seed(seed)
  inner = state or ClientWorkState(
      lambda: (), lambda state: (), lambda state, aggregate: ()
  )

  def initialize():
    return RoundSeed(_base_seed(seed), tf.constant(0)), inner.initialize()

  def message(state):
    seeds, inner_state = state
    return RoundMessage(
        tf.random.experimental.stateless_fold_in(seeds.seed, seeds.round_num),
        seeds.seed,
        inner.message(inner_state),
    )

  def next_state(state, aggregate):
    seeds, inner_state = state
    seeds = RoundSeed(seeds.seed, seeds.round_num + 1)
    return seeds, inner.next(inner_state, aggregate)

  return ClientWorkState(initialize, message, next_state, inner.aggregator)


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
      lambda: _base_seed(seed),
      lambda state: state,
      lambda state, aggregate: state,
  )


def client_data_type(
    input_shape: tuple[int, ...], memory_type: tff.Type | None = None
) -> tff.StructType:
  """The type of one client's data, `<examples=<x, y>*, salt=int32*>`.

  Args:
    input_shape: Shape of one example, channels last.
    memory_type: Unplaced type of what a client keeps; None for nothing.

  Returns:
    A struct of sequences: batches of examples (`x` float32
    `[None, *input_shape]`, `y` int32 `[None]`), in any batching, at most one
    int32 scalar that makes the client's random numbers its own, and, with a
    `memory_type`, at most one `memory`: none before the client's first round.
  """
  batch = collections.OrderedDict(
      x=tff.TensorType(np.float32, [None, *input_shape]),
      y=tff.TensorType(np.int32, [None]),
  )
  fields = collections.OrderedDict(
      examples=tff.SequenceType(batch), salt=tff.SequenceType(np.int32)
  )
  if memory_type is not None:
    fields['memory'] = tff.SequenceType(memory_type)
  return tff.to_type(fields)


def one_element_dataset(element: Any, spec: Any) -> tf.data.Dataset:
  """Returns a data set of one element, whose tensors are not copied.

  Args:
    element: A structure of tensors.
    spec: Its type, whose sizes may be open.
  """
  with tf.device('/device:CPU:0'):
    variant = tf.raw_ops.TensorDataset(
        components=tf.nest.flatten(element),
        output_shapes=[leaf.shape for leaf in tf.nest.flatten(spec)],
    )
    dataset = tf.data.experimental.from_variant(variant, spec)
  dataset.only_element = element  # Spares the runtime to look for it.
  return dataset


def memory_dataset(initial_memory: Any, value: Any | None) -> tf.data.Dataset:
  """What a client's data hold as `memory`.

  Args:
    initial_memory: The process's initial memory, for its structure.
    value: What the client has kept, in that structure; None if it has not taken
      part yet.

  Returns:
    A data set of one element, or of none.
  """
  if value is None:
    return tf.data.Dataset.from_tensors(initial_memory).take(0)
  value = tf.nest.map_structure(tf.convert_to_tensor, value)
  spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, value)
  return one_element_dataset(value, spec)


def to_memory(dataset: tf.data.Dataset, initial_memory: Any) -> ClientMemory:
  """Returns the memory in a data set of at most one.

  Args:
    dataset: What a client's data hold as `memory`.
    initial_memory: What stands in for a memory that is not there, a structure
      of tensors like it.
  """

  @tf.autograph.experimental.do_not_convert  # Which takes longer than tracing.
  def last(_, value):
    return tf.constant(True), value

  present, value = dataset.reduce((tf.constant(False), initial_memory), last)
  return ClientMemory(present, value)


class _Counts(NamedTuple):
  """What is summed over the clients of a round; float32 scalars."""

  report: local_sgd.LocalReport
  num_clients: tf.Tensor
  num_trained: tf.Tensor
  num_non_finite: tf.Tensor
  num_bad_label: tf.Tensor
  num_empty: tf.Tensor


def _count(
    kept: ClientOutput,
    finite: tf.Tensor,
    labels_fit: tf.Tensor,
    num_given: tf.Tensor,
) -> _Counts:
  """Returns what one client, with zeros if it is not finite, counts for."""
  trained = (kept.update_weight > 0) & (kept.report.num_examples > 0)
  # What is no mean would pull down that of the others.
  learned = tf.cast(kept.learned, tf.float32)
  report = local_sgd.LocalReport(*(learned * part for part in kept.report))
  return _Counts(
      report,
      tf.constant(1.0),
      *(
          tf.cast(flag, tf.float32)
          for flag in (
              trained & kept.learned,
              ~finite,
              ~labels_fit,
              tf.equal(num_given, 0),
          )
      ),
  )


def _update_norm(kept: ClientOutput) -> tf.Tensor:
  """Returns the norm of a client's update, -1 for one that does not count."""
  change = kept.change if tf.nest.flatten(kept.change) else kept.update
  # In float32 the square of 1e30 would be infinite.
  squared = weights_lib.squared_norm(
      tf.nest.map_structure(lambda leaf: tf.cast(leaf, tf.float64), change)
  )
  norm = tf.cast(tf.sqrt(tf.cast(squared, tf.float64)), tf.float32)
  return tf.where(kept.update_weight > 0, norm, -1.0)


def _train_metrics(counts: _Counts, max_norm: tf.Tensor):
  """Returns the measurements of a round; over nothing there is no number."""
  report = counts.report
  return collections.OrderedDict(
      loss=tf.where(
          counts.num_trained > 0, report.loss_sum / report.num_examples, _NAN
      ),
      num_examples=report.num_examples,
      num_clients=counts.num_clients,
      num_trained_clients=counts.num_trained,
      num_non_finite_clients=counts.num_non_finite,
      num_bad_label_clients=counts.num_bad_label,
      num_empty_clients=counts.num_empty,
      max_update_norm=tf.where(max_norm < 0, _NAN, max_norm),
  )


def _without_loss_unless(labels_fit: tf.Tensor, output: ClientOutput):
  """Makes the loss NaN where a label has no class, so that nothing counts."""
  report = output.report
  loss_sum = tf.where(labels_fit, report.loss_sum, float('nan'))
  return output._replace(report=report._replace(loss_sum=loss_sum))


def _keep_finite(output: ClientOutput, memory: Any):
  """Zeros in place of an output that is not finite; it keeps its memory.

  Args:
    output: A client's `ClientOutput`.
    memory: The `ClientMemory` that it came with, or `()`.

  Returns:
    The output, the client's memory after the round, and whether the output was
    finite.
  """
  output = output._replace(learned=tf.convert_to_tensor(output.learned))
  kept, finite = weights_lib.where_finite_or_zero(output)
  if memory:
    took_part = tf.logical_and(finite, output.update_weight > 0)
    memory = ClientMemory(
        tf.logical_or(took_part, memory.present),
        tf.nest.map_structure(
            lambda new, old: tf.where(took_part, new, old),
            output.memory,
            memory.value,
        ),
    )
  return kept, memory, finite


def one_client(
    client_update: Callable[..., ClientOutput],
    weights: Any,
    message: Any,
    client: ClientData,
    model: model_lib.Model,
    num_classes: int,
) -> tuple[ClientOutput, Any, tf.Tensor, tf.Tensor]:
  """Does a client's work of a round, guarded against what cannot count.

  Args:
    client_update: As for `build_client_work`.
    weights: What the server sent.
    message: What it sent beside.
    client: What the client holds.
    model: The network, which says how examples are augmented.
    num_classes: Labels are 0..num_classes-1.

  Returns:
    The output, with zeros where it is not finite or a label is of no class; the
    client's `ClientMemory` after the round, `()` if it keeps nothing; and two
    booleans, whether the output was finite and whether the labels fit.

  Raises:
    ValueError: As `build_client_work`.
  """
  labels_fit = episodes.labels_fit(client.examples, num_classes)
  fitting = episodes.all_or_none(client.examples, labels_fit)
  with _augmenting(fitting, model.augment) as fitting:
    output = client_update(weights, message, client._replace(examples=fitting))
  output = _without_loss_unless(labels_fit, output)
  kept, memory, finite = _keep_finite(output, client.memory)
  return kept, memory, finite, labels_fit


def build_client_work(
    weights_type: tff.Type,
    model: model_lib.Model,
    client_update: Callable[..., ClientOutput],
    state: ClientWorkState,
    initial_memory: Callable[[], Any] | None = None,
    *,
    num_classes: int,
    metrics: Metrics = 'plain',
) -> ClientWork:
  """Builds a client work from one pure client function.

  A client whose output is not finite counts with weight zero, keeps the memory
  that it had and is counted in the measurement `train/num_non_finite_clients`.
  So does a client with a label that no class has, whose loss is no number; it
  does no work. One with weight zero keeps its memory too.

  Args:
    weights_type: Unplaced type of what the distributor sends.
    model: The network that clients train: what their examples look like, and
      how they are augmented.
    client_update: `(weights, message, ClientData) -> ClientOutput` in pure
      TensorFlow, where `message` is `state.message(...)`.
    state: The server state of the client work.
    initial_memory: `() -> value` in pure TensorFlow, stands in for the memory
      of a client that has none yet; None if clients keep nothing.
    num_classes: Labels are 0..num_classes-1.
    metrics: What is done with the measurements of clients: summed `'plain'`, by
      `'secure'` sums (without the largest norm, which is no sum, and with a
      client's loss sum and number of examples cut at 2**20; how many clients
      were beyond is not measured), or `'withheld'`.

  Returns:
    A `ClientWork` whose measurements are `train`, all float32 scalars, none
    where metrics are withheld; and
    `signal` with those of the state's aggregator, if it has one. `train` has
    `loss`, the mean over the examples trained on, and NaN where nobody trained;
    `num_examples`, how many these are; `num_clients`; `num_trained_clients`,
    whose update counts and whose loss was over an example at least;
    `num_non_finite_clients` and, of these, `num_bad_label_clients`;
    `num_empty_clients`, who have no examples; and
    `max_update_norm`, the largest norm of an update that counts, and NaN
    without any.

  Raises:
    ValueError: If examples are to be augmented, and the client function takes
      them as they are.
  """
  message_tf, initial_state_tf = _message(state)
  message_type = message_tf.type_signature.result
  memory_type = None
  if initial_memory is not None:
    memory_type = tff.tensorflow.computation(
        initial_memory
    ).type_signature.result
  data_type = client_data_type(model.input_shape, memory_type)

  @tff.tensorflow.computation(weights_type, message_type, data_type)
  def client_update_tf(weights, message, data):
    memory: Any = ()
    if initial_memory is not None:
      memory = to_memory(data['memory'], initial_memory())
    examples = episodes.to_examples(data['examples'])
    client = ClientData(examples, episodes.to_salt(data['salt']), memory)
    kept, memory, finite, labels_fit = one_client(
        client_update, weights, message, client, model, num_classes
    )
    result = tff.learning.templates.ClientResult(
        kept.update, kept.update_weight
    )
    counts = _count(kept, finite, labels_fit, tf.size(examples.y))
    return result, (counts, _update_norm(kept)), kept.signal, memory

  _, measured_type, signal_type, _ = client_update_tf.type_signature.result
  measure = _measurement(measured_type, metrics)
  signals = _SignalAggregation(state, signal_type, initial_state_tf)
  parameter_types = (
      signals.init_fn.type_signature.result,
      tff.FederatedType(weights_type, tff.CLIENTS),
      tff.FederatedType(data_type, tff.CLIENTS),
  )

  def one_round(server_state, weights, data):
    message = tff.federated_broadcast(
        tff.federated_map(message_tf, signals.own_state(server_state))
    )
    result, counted, signal, memory = tff.federated_map(
        client_update_tf, (weights, message, data)
    )
    new_state, measured = signals.next_state(server_state, signal)
    measured = collections.OrderedDict(train=measure(counted), **measured)
    output = tff.templates.MeasuredProcessOutput(
        new_state, result, tff.federated_zip(measured)
    )
    return output, memory

  @tff.federated_computation(*parameter_types)
  def next_fn(server_state, weights, data):
    return one_round(server_state, weights, data)[0]

  process = tff.learning.templates.ClientWorkProcess(signals.init_fn, next_fn)
  if initial_memory is None:
    return ClientWork(process, None)
  return ClientWork(
      process, tff.federated_computation(one_round, parameter_types)
  )


def _measurement(
    measured_type: tff.Type, metrics: Metrics
) -> Callable[[Any], Any]:
  """Returns what makes the metrics of a round of what clients counted.

  Args:
    measured_type: Of a client's counts and norm.
    metrics: See `build_client_work`.

  Raises:
    ValueError: If it is something else.
  """
  if metrics not in typing.get_args(Metrics):
    raise ValueError(
        f'Expected `metrics` as one of {", ".join(typing.get_args(Metrics))},'
        f' found {metrics!r}.'
    )
  if metrics == 'withheld':
    return lambda counted: tff.federated_value((), tff.SERVER)
  if metrics == 'plain':
    both_tf = tff.tensorflow.computation(_train_metrics, measured_type)

    def plain(counted):
      counts, norm = counted
      return tff.federated_map(
          both_tf, (tff.federated_sum(counts), tff.federated_max(norm))
      )

    return plain

  counts_type, _ = measured_type
  process = tff.aggregators.SecureSumFactory(_LARGEST_COUNT).create(counts_type)
  counts_tf = tff.tensorflow.computation(_from_secure_sum, counts_type)

  def secure(counted):
    counts, _ = counted
    # A sum with fixed bounds keeps nothing between rounds.
    nothing = tff.federated_value((), tff.SERVER)
    return tff.federated_map(counts_tf, process.next(nothing, counts).result)

  return secure


def _from_secure_sum(counts: _Counts):
  """Returns the metrics; whole numbers are rounded in a secure sum."""
  report = counts.report._replace(
      num_examples=tf.round(counts.report.num_examples)
  )
  whole = _Counts(report, *map(tf.round, counts[1:]))
  return _train_metrics(whole, tf.constant(-1.0))


@contextlib.contextmanager
def _augmenting(examples, augment):
  """The examples, to be augmented; raises if nobody does before the end."""
  if augment is None:
    yield examples
    return
  has_been = []

  def counted(x, seed):
    has_been.append(True)
    return augment(x, seed)

  yield examples._replace(augment=counted)
  if not has_been:
    raise ValueError(
        'Expected an algorithm that draws minibatches (`episodes.take`), or'
        ' calls `episodes.augmented`, where examples are to be augmented, found'
        ' one that takes its examples as they are. Tip: leave --augmentation'
        ' out.'
    )


def _message(state: ClientWorkState):
  """Returns the state's `message` and `initialize` as TFF computations."""
  init_tf = tff.tensorflow.computation(state.initialize)
  state_type = init_tf.type_signature.result
  return tff.tensorflow.computation(state.message, state_type), init_tf


class _SignalAggregation:
  """The server state of a client work, with that of its aggregator if any."""

  def __init__(self, state, signal_type, init_tf):
    own_type = init_tf.type_signature.result
    aggregation = state.aggregator and state.aggregator.create(signal_type)
    aggregate_type = tff.StructType([])
    if aggregation is not None:
      aggregate_type = aggregation.next.type_signature.result.result.member
    next_tf = tff.tensorflow.computation(state.next, (own_type, aggregate_type))
    self._aggregation = aggregation
    self._next_tf = next_tf

    @tff.federated_computation
    def init_fn():
      own = tff.federated_eval(init_tf, tff.SERVER)
      if aggregation is None:
        return own
      return tff.federated_zip((own, aggregation.initialize()))

    self.init_fn = init_fn

  def own_state(self, server_state):
    """The state without the aggregator's."""
    return server_state if self._aggregation is None else server_state[0]

  def next_state(self, server_state, signal):
    """The state after a round with the clients' signals, and measurements."""
    if self._aggregation is None:
      nothing = tff.federated_value((), tff.SERVER)
      return tff.federated_map(self._next_tf, (server_state, nothing)), {}
    output = self._aggregation.next(server_state[1], signal)
    own = tff.federated_map(self._next_tf, (server_state[0], output.result))
    state = tff.federated_zip((own, output.state))
    return state, {'signal': output.measurements}
