"""An algorithm as one value, and the learning process that it stands for.

An algorithm is a public function `(model, config, num_classes) -> Method`,
named like its file, or a variant for another use in the same file, as an Optax
transformation is `init` and `update`. What is the same for all algorithms
(seeds, placements, aggregation, the server's optimizer,
memories) is written once, in `build_process`.

    method = fed_per.fed_per(model, fed_per.PAPER, num_classes=10)
    process = build_process(method, model, seed=1)
    known_client = method.known_client()
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Literal, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import aggregation as aggregation_lib
from tff_meta import composition
from tff_meta import episodes
from tff_meta import optimizers
from tff_meta.aggregators import bounds
from tff_meta.aggregators import clusters
from tff_meta.client_works import client_work
from tff_meta.learners import few_round
from tff_meta.learners import personalizer
from tff_meta.learners import prototype_classifier
from tff_meta.models import model as model_lib


class ClientInput(NamedTuple):
  """What a client works with in a round.

  Attributes:
    examples: Its `Examples`, dense, none of them padding.
    seed: int32 `[2]`, this client's own in this round.
    fixed_seed: int32 `[2]`, this client's own, the same in all rounds.
    message: What the server broadcasts beside the weights; `()` for nothing.
    memory: `ClientMemory`, what the client has kept since its last round; `()`
      if clients keep nothing.
  """

  examples: episodes.Examples
  seed: tf.Tensor
  fixed_seed: tf.Tensor
  message: Any
  memory: Any


class Channel(NamedTuple):
  """What clients send beside changes of models and metrics.

  Attributes:
    name: What it is, a plural noun, such as `'margins'`.
    summed: What is summed over the clients, a structure of `tf.TensorSpec`s. A
      signal is compared with it when the process is built; what travels in an
      update is not.
    aggregator: Of what the clients send, given what sums it. For a
      `ClientOutput.signal`, `sum -> unweighted aggregator of signals`; for what
      travels in `ClientOutput.update`, under its weight, `(aggregator of
      changes of models, sum) -> weighted aggregator of updates`. By default the
      sum itself.
    place: `'signal'`, or `'update'`.
    bound: How what one client adds to the sum is bounded.
  """

  name: str
  summed: Any
  aggregator: Callable[..., Any] = lambda total: total
  place: Literal['signal', 'update'] = 'signal'
  bound: bounds.Bound = bounds.VECTOR


@dataclasses.dataclass(frozen=True)
class Method:
  """An algorithm for a network, a configuration and a number of classes.

  All functions are pure TensorFlow unless said otherwise. Those of the uses
  take no arguments and are called where a use is asked for, so that what a use
  expects of a configuration is not expected of training.

  Attributes:
    num_classes: C; clients' labels are 0..C-1.
    initialize: `seed -> weights`, with an int32 `[2]`, the initial weights of
      the server.
    client_update: `(weights, ClientInput) -> ClientOutput`, what a client does
      in a round; its `update` is a pseudo-gradient, initial minus final
      weights. With a `compose`, whatever that calls.
    memory: `seed -> value`, stands in for the memory of a client that has not
      taken part yet; None if clients keep nothing between rounds.
    state: What the server keeps and broadcasts to the clients beside the
      weights, `seed -> ClientWorkState` with the run's seed, an int; None for
      nothing.
    num_models: How many models the server keeps, stacked in its weights, where
      a client's update is a `clusters.ClusterUpdate`; None for one as it is.
    sums_updates: Whether the clients' updates are summed; otherwise the server
      takes their mean by `update_weight`, or another aggregation.
    updates_alternate: Whether updates are changes of one thing in some rounds
      and of another in others, so that no aggregation may hold those of a round
      to those of the rounds before.
    sends_updates: Whether clients send their updates; otherwise the server's
      optimizer is given zeros.
    channels: What clients send beside changes of models and metrics. Nothing
      else is aggregated.
    server_optimizer: Applied to the mean update; None for SGD of rate 1, which
      puts the clients' mean in the place of the weights.
    compose: `(model, seed, aggregator of updates, aggregation) ->
      LearningProcess` where the state of the server is more than weights; None
      for `build_process`'s own. The aggregator is the aggregation's.
    memory_reaches: What a client's memory reaches of what leaves the client,
      `{channel: how}`. Channels are the `'update'` (of the model, with its
      weight and all metrics but the loss), the `'signal'` and the `'loss'`.
      `'training'`: by the gradients that it takes part in, and no other way, so
      not at all with learning rates of zero; `'itself'`: also else. Channels
      that are not named are the same bits whatever the memory.
    what_is_missing: `class_sizes -> str | None`, what a client with so many
      training examples of each class, int `[C]`, lacks to learn anything, as a
      sentence; None where it lacks nothing. None if any examples do.
    known_client: `() -> ClientPersonalizer`, of a client of the training
      population; None, as for the others, where there is no such use.
    new_client: The same of a client that training never saw.
    new_class: The same of one whose C classes training never saw.
    group: `() -> GroupPersonalizer`, of a new group of clients with C classes.
    client_network: `(weights, memory) -> OrderedDict(body, head)`, the network
      of a known client before it adapts, where that is not the server's.
    network: The network that is trained, whose `embed` takes these bodies and
      the server's, where the algorithm rebuilds the one that it is given; None
      for that one.
    gpal_rounds: `() -> few_round.GpalRounds`, a new group's rounds with global
      prototypes in the loss and without; None without GPAL.
    phase_ends: Phase of training, such as `'warm-up'` -> its last round, which
      pictures mark; without those that the configuration leaves out.
  """

  num_classes: int
  initialize: Callable[[tf.Tensor], Any]
  client_update: Callable[..., client_work.ClientOutput]
  _: dataclasses.KW_ONLY
  memory: Callable[[tf.Tensor], Any] | None = None
  state: Callable[[int], client_work.ClientWorkState] | None = None
  num_models: int | None = None
  sums_updates: bool = False
  updates_alternate: bool = False
  sends_updates: bool = True
  channels: tuple[Channel, ...] = ()
  server_optimizer: tff.learning.optimizers.Optimizer | None = None
  compose: (
      Callable[
          [
              model_lib.Model,
              int,
              tff.aggregators.WeightedAggregationFactory,
              aggregation_lib.Aggregation,
          ],
          tff.learning.templates.LearningProcess,
      ]
      | None
  ) = None
  memory_reaches: Mapping[str, str] = dataclasses.field(default_factory=dict)
  what_is_missing: Callable[[Any], str | None] | None = None
  known_client: Callable[[], personalizer.ClientPersonalizer] | None = None
  new_client: Callable[[], personalizer.ClientPersonalizer] | None = None
  new_class: Callable[[], personalizer.ClientPersonalizer] | None = None
  group: Callable[[], personalizer.GroupPersonalizer] | None = None
  client_network: Callable[[Any, Any], Any] | None = None
  network: model_lib.Model | None = None
  gpal_rounds: Callable[[], few_round.GpalRounds] | None = None
  phase_ends: Mapping[str, int] = dataclasses.field(default_factory=dict)


def with_prototypes(
    method: Method, model: model_lib.Model, *, squared: bool = True
) -> Method:
  """The same training, after which class prototypes classify.

  A client, known, new or with classes that training never saw, has the
  prototypes of all its training examples under the trained body; it takes no
  gradient step.

  Args:
    method: What is trained.
    model: The network; its head, if any, is not used.
    squared: As for `prototype_classifier.build_client_personalizer`.
  """

  def client():
    return prototype_classifier.build_client_personalizer(
        model, num_classes=method.num_classes, squared=squared
    )

  return dataclasses.replace(
      method, known_client=client, new_client=client, new_class=client
  )


def build_process(
    method: Method,
    model: model_lib.Model,
    *,
    seed: int = 0,
    aggregation: aggregation_lib.Aggregation | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds the process that trains with an algorithm.

  Args:
    method: The algorithm.
    model: The network that it was made for: what clients' examples look like,
      and how they are augmented.
    seed: The run's seed, 0..2**31-1.
    aggregation: Of everything that clients send, metrics included; None for
      `aggregation.Plain()`.
    server_optimizer: In place of the method's own.

  Returns:
    A `LearningProcess` on clients' `<examples, salt>`, whose
    `get_model_weights` returns `ModelWeights` with the weights as `trainable`;
    a `composition.StatefulLearningProcess` on `<examples, salt, memory>` where
    clients keep a memory.

  Raises:
    TypeError: If the aggregation is none.
    ValueError: If the seed is another number, the method does not take the
      aggregation or the optimizer, or clients send what is not declared.
  """
  aggregation = aggregation or aggregation_lib.Plain()
  aggregator, sum_of_signals = _aggregators(method, aggregation)
  if method.compose is not None:
    if server_optimizer is not None:
      raise ValueError(
          'Expected no `server_optimizer` with an algorithm whose server takes'
          f' no steps of one, found {server_optimizer}.'
      )
    if _channel(method, 'signal') is not None:
      raise ValueError(
          'Expected no channel in the signal of clients with a `compose`, which'
          f' does not get it, found {_channel(method, "signal")}.'
      )
    return method.compose(model, seed, aggregator, aggregation)

  @tff.tensorflow.computation
  def initial_weights():
    weights = method.initialize(composition.initial_seed(seed))
    return tff.learning.models.ModelWeights(weights, ())

  memory = method.memory

  def initial_memory():
    return memory and memory(composition.initial_seed(seed))

  state, signal = method.state and method.state(seed), _channel(
      method, 'signal'
  )
  if state is not None and signal is not None:
    state = state._replace(aggregator=signal.aggregator(sum_of_signals))
  weights_type = initial_weights.type_signature.result
  keeps = memory is not None
  work = client_work.build_client_work(
      weights_type,
      model,
      _work_of(method, signal),
      client_work.round_seed(seed, state),
      initial_memory if keeps else None,
      num_classes=method.num_classes,
      metrics=aggregation.metrics,
  )
  result_type = work.process.next.type_signature.result.result.member
  optimizer = server_optimizer or method.server_optimizer
  finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
      optimizer
      or optimizers.WithoutAutoGraph(tff.learning.optimizers.build_sgdm(1.0)),
      weights_type,
      tf.autograph.experimental.do_not_convert(
          tff.learning.templates.reject_non_finite_update
      ),
  )
  return composition.compose(
      initial_weights,
      work,
      aggregator.create(result_type.update, result_type.update_weight),
      finalizer,
      initial_memory() if keeps else None,
  )


def client_function(
    method: Method, seed: int
) -> tuple[Callable[..., client_work.ClientOutput], Callable[[Any], Any]]:
  """Returns what a client computes in a round, without TFF.

  Args:
    method: The algorithm.
    seed: The run's seed.

  Returns:
    `(weights, message, ClientData) -> ClientOutput`, where the weights are the
    `global_model_weights` of the server's state; and what makes the message
    that is sent with them, of the `client_work` of that state.
  """
  if method.compose is not None:
    return method.client_update, client_work.run_seed(seed).message
  own, signal = method.state and method.state(seed), _channel(method, 'signal')
  state = client_work.round_seed(seed, own)

  def message(of_server):
    # Beside what the aggregator of signals keeps, where there is one.
    aggregates = own is not None and signal is not None
    return state.message(of_server[0] if aggregates else of_server)

  return _work_of(method, signal), message


def _work_of(method: Method, signal: Channel | None):
  """Returns what a client does with what TFF gives it."""

  def work(model_weights, message, data):
    fold_in = tf.random.experimental.stateless_fold_in
    client = ClientInput(
        data.examples,
        fold_in(message.seed, data.salt),
        fold_in(message.run_seed, data.salt),
        message.message,
        data.memory,
    )
    output = method.client_update(model_weights.trainable, client)
    _check_signal(signal, output.signal)
    if method.memory is None and tf.nest.flatten(output.memory):
      raise ValueError(
          'Expected no memory of clients, as the `Method` has no `memory` that'
          f' stands in for it at first, found {output.memory}.'
      )
    if data.memory:
      try:
        tf.nest.assert_same_structure(data.memory.value, output.memory)
      except (TypeError, ValueError):
        raise ValueError(
            'Expected the `memory` that a client keeps to be as what stands in'
            f' for it at first, {data.memory.value}, found {output.memory}.'
        ) from None
    return output

  return work


def _channel(method: Method, place: str) -> Channel | None:
  """Returns the one channel of a place; two of a place have to be one."""
  for channel in method.channels:
    if channel.place not in ('signal', 'update'):
      raise ValueError(
          f"Expected `place` of the channel {channel.name!r} as 'signal' or"
          f" 'update', found {channel.place!r}."
      )
  channels = [c for c in method.channels if c.place == place]
  if len(channels) > 1:
    raise ValueError(
        f'Expected one channel at most in the {place} of clients, found'
        f' {", ".join(c.name for c in channels)}. Tip: one channel can sum a'
        ' structure of several things.'
    )
  return channels[0] if channels else None


def _aggregators(method: Method, aggregation: aggregation_lib.Aggregation):
  """Returns what aggregates the clients' updates, and what sums their signals.

  Both cover all that the declaration says clients send.
  """
  if not isinstance(aggregation, aggregation_lib.Aggregation):
    raise TypeError(
        f'Expected an `aggregation.Aggregation`, found {aggregation!r}. Tip:'
        ' aggregation.OfModels(...) takes a TFF aggregator for the changes of'
        ' models alone.'
    )
  plain = isinstance(aggregation, aggregation_lib.Plain)
  if method.num_models is not None and not aggregation.covers_choices:
    raise ValueError(
        'Expected an aggregation that covers the choice of a client among'
        f' {method.num_models} models, found {aggregation}: a client that picks'
        ' another model moves two sums, and every model has the zeros of those'
        ' that picked another.'
    )
  if method.updates_alternate and aggregation.compares_rounds:
    raise ValueError(
        'Expected an aggregation that takes every round by itself with a method'
        ' whose updates are changes of one thing in some rounds and of another'
        f' in others, found {aggregation}, which holds them to the result of'
        ' the rounds before. Tip: the adaptive rule of a robust one.'
    )
  num_parts = method.sends_updates + len(method.channels)
  if not num_parts and not plain:
    raise ValueError(
        'Expected a plain aggregation with a method whose clients send nothing,'
        f' found {aggregation}.'
    )
  factory = bounds.NothingFactory()
  if method.sends_updates:
    factory = _of_kind(
        tff.aggregators.WeightedAggregationFactory,
        aggregation.of_models(num_parts, method.sums_updates),
        aggregation.of_models,
    )
  if method.num_models is not None:
    factory = clusters.ClusterMeansFactory(factory)

  def total(channel):
    return _of_kind(
        tff.aggregators.UnweightedAggregationFactory,
        aggregation.of_sums(num_parts, channel.bound),
        aggregation.of_sums,
    )

  in_update = _channel(method, 'update')
  if in_update is not None:
    factory = in_update.aggregator(factory, total(in_update))
  signal = _channel(method, 'signal')
  return aggregation.limited(factory), signal and total(signal)


def _of_kind(kind, factory, made_by):
  """Returns the factory, or raises a TypeError if it is of another kind."""
  if not isinstance(factory, kind):
    raise TypeError(
        f'Expected {made_by.__qualname__} to return a'
        f' tff.aggregators.{kind.__name__}, found {factory!r}.'
    )
  return factory


def _check_signal(signal: Channel | None, sent: Any) -> None:
  """Raises a ValueError if a client sends another signal than is declared."""
  expected = () if signal is None else signal.summed
  found = tf.nest.map_structure(
      lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), sent
  )
  try:
    tf.nest.assert_same_structure(expected, found)
    same = tf.nest.flatten(expected) == tf.nest.flatten(found)
  except (TypeError, ValueError):
    same = False
  if not same:
    raise ValueError(
        f'Expected the `signal` of a client as it is declared, {expected},'
        f' found {found}. Tip: declare what is sent in `Method.channels`.'
    )
