"""Rounds of a `Method` without TFF, whose processes take seconds to build.

Variants of an algorithm differ in its `Method` only. One of each algorithm goes
through TFF to the same oracle, which holds `build_process` and this to it.
"""

import types
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import episodes
from tff_meta import method as method_lib
from tff_meta import registry
from tff_meta.client_works import client_work


class State(NamedTuple):
  """What the server keeps.

  Attributes:
    weights: Of the model or the models.
    client_work: The round's seed and what else is broadcast; the state of the
      signals' aggregator, if that is no sum.
    optimizer: State of the server's optimizer.
  """

  weights: Any
  client_work: Any
  optimizer: Any


class PlainProcess:
  """What `registry.build` returns, as far as oracles ask for it.

  The metrics are the loss and its number of examples. Clients whose update is
  not finite are not left out. What clients send is checked as `build_process`
  checks it.
  """

  def __init__(self, name, model, config, num_classes, *, seed=0):
    """Makes the process; its client function is traced in the first round.

    Args:
      name: Of the algorithm.
      model: The network.
      config: The algorithm's configuration.
      num_classes: As for `registry.build`.
      seed: The run's seed.

    Raises:
      ValueError: If the method or the network has a part that is not here.
    """
    method = registry.get(name).method(model, config, num_classes)
    not_here = {
        '`compose`': method.compose is not None,
        'a channel in the update': bool(method_lib._channel(method, 'update')),
        '`augment` of the network': model.augment is not None,
    }
    found = [part for part, is_there in not_here.items() if is_there]
    if found:
      raise ValueError(
          f'Expected what {type(self).__name__} has a form of, found'
          f' {", ".join(found)}. Tip: use `registry.build`.'
      )
    self._work = method_lib._work_of(
        method, method_lib._channel(method, 'signal')
    )
    self._method, self._input_shape = method, model.input_shape
    self._seed = composition.initial_seed(seed)
    self._server = client_work.round_seed(
        seed, method.state and method.state(seed)
    )
    self._client_update: Any = None
    self._signals: Any = None
    for channel in method.channels:
      total = tff.aggregators.SumFactory()
      aggregator = channel.aggregator(total)
      if channel.place == 'signal' and aggregator is not total:
        kind = tf.nest.map_structure(
            lambda spec: tff.TensorType(spec.dtype.as_numpy_dtype, spec.shape),
            channel.summed,
        )
        self._signals = aggregator.create(tff.to_type(kind))
    if method.memory is not None:
      self.initial_memory = _to_numpy(method.memory(self._seed))

  def initialize(self):
    weights = self._method.initialize(self._seed)
    optimizer = self._method.server_optimizer
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, weights)
    return State(
        _to_numpy(weights),
        (
            self._server.initialize(),
            self._signals and self._signals.initialize(),
        ),
        optimizer and optimizer.initialize(specs),
    )

  def get_model_weights(self, state):
    return types.SimpleNamespace(trainable=state.weights)

  def next(self, state, data):
    return self.next_with_memory(state, data)[0]

  def next_with_memory(self, state, data):
    work, of_signals = state.client_work
    message = self._server.message(work)
    outputs, memories = [], []
    for client in data:
      (examples,) = client['examples']
      memory = ()
      if self._method.memory is not None:
        kept = list(client['memory'])
        memory = client_work.ClientMemory(
            bool(kept), kept[0] if kept else self.initial_memory
        )
      (salt,) = client['salt']
      arguments = tf.nest.map_structure(
          tf.convert_to_tensor,
          (state.weights, message, memory, salt, *examples.values()),
      )
      outputs.append(self._update(arguments))
      if memory and outputs[-1].update_weight > 0:
        memory = client_work.ClientMemory(True, outputs[-1].memory)
      memories.append(_to_numpy(memory))
    signals = [output.signal for output in outputs]
    if self._signals:
      output = self._signals.next(of_signals, signals)
      of_signals, signal = output.state, output.result
    else:
      signal = tf.nest.map_structure(lambda *parts: sum(parts), *signals)
    work = self._server.next(work, signal), of_signals
    weights, optimizer = self._step(state, outputs)
    reports = [o.report for o in outputs if o.learned]
    count = sum(r.num_examples for r in reports)
    train = {
        'loss': sum(r.loss_sum for r in reports) / count if count else np.nan,
        'num_examples': float(count),
    }
    new_state = State(_to_numpy(weights), work, optimizer)
    metrics = {'client_work': {'train': train}}
    return types.SimpleNamespace(state=new_state, metrics=metrics), memories

  def _update(self, arguments):
    """Calls the client's function, one trace of which serves all clients."""
    if self._client_update is None:
      specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
      x = tf.TensorSpec([None, *self._input_shape])
      specs = (*specs[:-2], x, tf.TensorSpec([None], tf.int32))

      @tf.function(autograph=False, input_signature=[specs])
      def client_update(arguments):
        weights, message, memory, salt, x, y = arguments
        examples = episodes.Examples(x, y, tf.ones(tf.shape(y)))
        return self._work(
            tff.learning.models.ModelWeights(weights, ()),
            message,
            client_work.ClientData(examples, salt, memory),
        )

      self._client_update = client_update
    return self._client_update(arguments)

  def _step(self, state, outputs):
    """Returns the server's weights and its optimizer's state after a round."""
    sizes = np.stack([o.update_weight for o in outputs])
    if self._method.num_models is None:
      updates, picked = [o.update for o in outputs], np.ones([len(outputs), 1])
    else:
      updates = [o.update.models for o in outputs]
      picked = np.stack([o.update.picked for o in outputs])
    if self._method.sums_updates:
      sizes, total = np.ones_like(sizes), 1
    else:
      total = np.maximum(sizes @ picked, 1e-9)
    shares = sizes[:, np.newaxis] * picked / total  # [clients, models]

    def average(*leaves):
      if self._method.num_models is None:
        return np.tensordot(shares[:, 0], leaves, 1).astype(np.float32)
      return np.einsum('km,km...->m...', shares, leaves).astype(np.float32)

    mean = tf.nest.map_structure(average, *updates)
    optimizer = self._method.server_optimizer
    if optimizer is None:
      return tf.nest.map_structure(np.subtract, state.weights, mean), None
    weights = tf.nest.map_structure(tf.constant, state.weights)
    new_state, weights = optimizer.next(state.optimizer, weights, mean)
    return weights, new_state


def _to_numpy(structure):
  return tf.nest.map_structure(np.asarray, structure)
