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

from tff_meta import composition
from tff_meta import episodes
from tff_meta import optimizers
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
    aggregator: Of what the clients send. Unweighted for a
      `ClientOutput.signal`; for what travels in `ClientOutput.update`, under
      its weight, `aggregator_of_changes -> weighted aggregator of updates`.
    place: `'signal'`, or `'update'`.
    bound: How what one client adds can be bounded: `'norm'`, where its vectors
      can be shortened; `'range'`, where its numbers can be cut to an interval.
  """

  name: str
  summed: Any
  aggregator: (
      tff.aggregators.UnweightedAggregationFactory
      | Callable[
          [tff.aggregators.WeightedAggregationFactory],
          tff.aggregators.WeightedAggregationFactory,
      ]
  )
  place: Literal['signal', 'update'] = 'signal'
  bound: Literal['norm', 'range'] = 'norm'


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
    channels: What clients send beside changes of models and metrics. Nothing
      else is aggregated.
    server_optimizer: Applied to the mean update; None for SGD of rate 1, which
      puts the clients' mean in the place of the weights.
    compose: `(model, seed, aggregator of updates) -> LearningProcess` where the
      state of the server is more than weights; None for `build_process`'s own.
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
  channels: tuple[Channel, ...] = ()
  server_optimizer: tff.learning.optimizers.Optimizer | None = None
  compose: (
      Callable[
          [model_lib.Model, int, tff.aggregators.WeightedAggregationFactory],
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
  gpal_rounds: Callable[[], few_round.GpalRounds] | None = None
  phase_ends: Mapping[str, int] = dataclasses.field(default_factory=dict)


def with_prototypes(method: Method, model: model_lib.Model) -> Method:
  """The same training, after which class prototypes classify.

  A client, known, new or with classes that training never saw, has the
  prototypes of all its training examples under the trained body; it takes no
  gradient step.

  Args:
    method: What is trained.
    model: The network; its head, if any, is not used.
  """

  def client():
    return prototype_classifier.build_client_personalizer(
        model, num_classes=method.num_classes
    )

  return dataclasses.replace(
      method, known_client=client, new_client=client, new_class=client
  )


def build_process(
    method: Method,
    model: model_lib.Model,
    *,
    seed: int = 0,
    aggregation: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds the process that trains with an algorithm.

  Args:
    method: The algorithm.
    model: The network that it was made for: what clients' examples look like,
      and how they are augmented.
    seed: The run's seed, 0..2**31-1.
    aggregation: Of the changes of a model. What goes through channels does not
      go through it. By default `composition.mean_factory()`.
    server_optimizer: In place of the method's own.

  Returns:
    A `LearningProcess` on clients' `<examples, salt>`, whose
    `get_model_weights` returns `ModelWeights` with the weights as `trainable`;
    a `composition.StatefulLearningProcess` on `<examples, salt, memory>` where
    clients keep a memory.

  Raises:
    ValueError: If the seed is another number, the method does not take the
      aggregation or the optimizer, or clients send what is not declared.
  """
  aggregator = _aggregator(method, aggregation)
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
    return method.compose(model, seed, aggregator)

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
    state = state._replace(aggregator=signal.aggregator)
  weights_type = initial_weights.type_signature.result
  keeps = memory is not None
  work = client_work.build_client_work(
      weights_type,
      model,
      _work_of(method, signal),
      client_work.round_seed(seed, state),
      initial_memory if keeps else None,
      num_classes=method.num_classes,
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
    return output

  return work


def _channel(method: Method, place: str) -> Channel | None:
  """Returns the one channel of a place; two of a place have to be one."""
  for channel in method.channels:
    for field, known in (
        ('place', ('signal', 'update')),
        ('bound', ('norm', 'range')),
    ):
      if getattr(channel, field) not in known:
        raise ValueError(
            f'Expected `{field}` of the channel {channel.name!r} as one of'
            f' {known}, found {getattr(channel, field)!r}.'
        )
  channels = [c for c in method.channels if c.place == place]
  if len(channels) > 1:
    raise ValueError(
        f'Expected one channel at most in the {place} of clients, found'
        f' {", ".join(c.name for c in channels)}. Tip: one channel can sum a'
        ' structure of several things.'
    )
  return channels[0] if channels else None


def _aggregator(
    method: Method,
    aggregation: tff.aggregators.WeightedAggregationFactory | None,
) -> tff.aggregators.WeightedAggregationFactory:
  """Returns what aggregates the clients' updates, made of the declaration."""
  if method.sums_updates:
    if aggregation is not None:
      raise ValueError(
          'Expected no `aggregation` with a method whose updates are summed,'
          f' which is one itself, found {aggregation}.'
      )
    # Clients that do not count send zeros.
    aggregation = tff.aggregators.as_weighted_aggregator(
        tff.aggregators.SumFactory()
    )
  aggregation = aggregation or composition.mean_factory()
  if method.num_models is not None:
    aggregation = clusters.ClusterMeansFactory(aggregation)
  in_update = _channel(method, 'update')
  return in_update.aggregator(aggregation) if in_update else aggregation


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
