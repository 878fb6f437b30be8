"""Rounds to measure: FedAvg in several implementations, and the five systems.

A workload has several candidates, functions without arguments that do the same
round. Data are random: time does not depend on what is in them.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import models
from tff_meta import registry
from tff_meta.baselines import fed_avg
from tff_meta.client_works import client_work
from tff_meta.models import model as model_lib

Candidates = dict[str, Callable[[], Any]]
_NUM_CLASSES = 10


def examples(
    num_clients: int,
    num_examples: int,
    shape: tuple[int, ...],
    classes_per_client: int = _NUM_CLASSES,
    num_classes: int = _NUM_CLASSES,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns clients' x float32 [n, *shape] and y int32 [n], equal classes."""
  rng = np.random.default_rng(0)
  clients = []
  for _ in range(num_clients):
    classes = rng.permutation(num_classes)[:classes_per_client]
    y = np.resize(classes, num_examples).astype(np.int32)
    x = rng.normal(size=(num_examples, *shape)).astype(np.float32)
    clients.append((x, y))
  return clients


def client_data(clients) -> list[collections.OrderedDict]:
  """Returns what our processes take."""
  return [
      collections.OrderedDict(
          examples=tf.data.Dataset.from_tensors(
              collections.OrderedDict(x=x, y=y)
          ),
          salt=tf.data.Dataset.from_tensors(np.int32(k)),
      )
      for k, (x, y) in enumerate(clients)
  ]


@dataclasses.dataclass(frozen=True)
class FedAvgSetting:
  """A FedAvg workload: a network and clients of `num_examples` each."""

  network: str
  shape: tuple[int, ...]
  num_clients: int
  num_examples: int
  batch_size: int
  learning_rate: float = 0.1


FED_AVG = {
    'fed_avg_lenet': FedAvgSetting('lenet', (32, 32, 3), 10, 300, 50),
    'fed_avg_mlp': FedAvgSetting('mlp', (28, 28, 1), 5, 1000, 32),
}


def build_fed_avg(setting: FedAvgSetting):
  """Returns the network and our FedAvg process."""
  network = models.build(setting.network, setting.shape, _NUM_CLASSES)
  config = fed_avg.FedAvgConfig(
      batch_size=setting.batch_size,
      learning_rate=setting.learning_rate,
      epochs=1,
  )
  return network, registry.build(
      'fed_avg', network, config, num_classes=_NUM_CLASSES
  )


def bare_round(
    network: model_lib.Model,
    setting: FedAvgSetting,
    weights: Any,
    clients: list[tuple[np.ndarray, np.ndarray]],
) -> Callable[[], Any]:
  """FedAvg as one writes it without a framework, on dense tensors.

  One `tf.function` for a client's epoch, a Python loop over clients and the
  mean of their models.

  Args:
    network: The network.
    setting: The workload.
    weights: The initial weights.
    clients: As `examples` returns them.

  Returns:
    A function that does a round and returns the new weights.
  """
  tensors = [(tf.constant(x), tf.constant(y)) for x, y in clients]
  weights = tf.nest.map_structure(tf.constant, weights)
  train = tf.function(_bare_epoch(network, setting), autograph=False)

  def one_round():
    total = sum(len(y) for _, y in tensors)
    mean: list[tf.Tensor] = []
    for k, (x, y) in enumerate(tensors):
      trained = train(weights, x, y, tf.constant([0, k]))
      share = tf.constant(len(y) / total)
      part = [w * share for w in tf.nest.flatten(trained)]
      if mean:
        part = [m + p for m, p in zip(mean, part, strict=True)]
      mean = part
    return [w.numpy() for w in mean]

  return one_round


def best_bare_round(
    network: model_lib.Model,
    setting: FedAvgSetting,
    weights: Any,
    clients: list[tuple[np.ndarray, np.ndarray]],
) -> Callable[[], Any]:
  """The fastest that was found of what one may write without a framework.

  All of the round in one `tf.function`: a loop over clients who have equally
  many examples, stacked, of which two are trained at the same time. Variables
  that are assigned in place, and clients one behind the other in the graph
  instead of a loop, were not faster. Arguments and result are those of
  `bare_round`.
  """
  xs, ys = (tf.stack(parts) for parts in zip(*clients, strict=True))
  weights = tf.nest.map_structure(tf.constant, weights)
  epoch = _bare_epoch(network, setting)

  @tf.function(autograph=False)
  def train_all(weights, xs, ys):
    def one_client(k, mean):
      trained = epoch(weights, xs[k], ys[k], tf.stack([0, k]))
      part = tf.nest.map_structure(lambda w: w / len(clients), trained)
      return k + 1, tf.nest.map_structure(tf.add, mean, part)

    zeros = tf.nest.map_structure(tf.zeros_like, weights)
    return tf.while_loop(
        lambda k, _: k < len(clients),
        one_client,
        (0, zeros),
        parallel_iterations=2,
    )[1]

  return lambda: [
      w.numpy() for w in tf.nest.flatten(train_all(weights, xs, ys))
  ]


def _bare_epoch(network, setting):
  """A client's epoch, `(weights, x, y, seed) -> weights`, in plain ops."""
  size = setting.batch_size

  def train(weights, x, y, seed):
    num_examples = tf.shape(y)[0]
    order = tf.random.experimental.stateless_shuffle(
        tf.range(num_examples), seed
    )

    def step(i, weights):
      rows = order[i * size : (i + 1) * size]
      with tf.GradientTape() as tape:
        tape.watch(weights)
        logits = network.logits(weights, tf.gather(x, rows))
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.gather(y, rows), logits
            )
        )
      gradients = tape.gradient(loss, weights)
      return i + 1, tf.nest.map_structure(
          lambda w, g: w - setting.learning_rate * g, weights, gradients
      )

    return tf.while_loop(
        lambda i, _: i < (num_examples + size - 1) // size, step, (0, weights)
    )[1]

  return train


def stock_process(setting: FedAvgSetting, **options):
  """TFF's FedAvg with the same network in Keras."""

  def keras_network():
    layers = tf.keras.layers
    if setting.network == 'mlp':
      return tf.keras.Sequential(
          [
              layers.InputLayer(setting.shape),
              layers.Flatten(),
              layers.Dense(100, 'relu'),
              layers.Dense(_NUM_CLASSES),
          ]
      )
    return tf.keras.Sequential(
        [
            layers.InputLayer(setting.shape),
            layers.Conv2D(16, 5, activation='relu'),
            layers.MaxPool2D(),
            layers.Conv2D(32, 5, activation='relu'),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(120, 'relu'),
            layers.Dense(84, 'relu'),
            layers.Dense(_NUM_CLASSES),
        ]
    )

  def model_fn():
    return tff.learning.models.from_keras_model(
        keras_network(),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, *setting.shape], tf.float32),
            y=tf.TensorSpec([None], tf.int32),
        ),
    )

  optimizer = tff.learning.optimizers.build_sgdm(setting.learning_rate)
  return tff.learning.algorithms.build_weighted_fed_avg(
      model_fn, optimizer, **options
  )


def stock_data(setting: FedAvgSetting, clients) -> list[tf.data.Dataset]:
  """Returns what TFF's FedAvg takes."""
  return [
      tf.data.Dataset.from_tensor_slices(
          collections.OrderedDict(x=x, y=y)
      ).batch(setting.batch_size)
      for x, y in clients
  ]


def rounds_in(
    context: tff.framework.SyncContext, process: Any, data: list[Any]
) -> Callable[[], Any]:
  """Rounds of a process in a context, each from the state before."""
  state = [context.invoke(process.initialize, None)]

  def one_round():
    output = context.invoke(process.next, arguments(state[0], data))
    state[0] = output.state
    return output

  return one_round


def arguments(*args: Any) -> tff.structure.Struct:
  """Returns what a context takes for the arguments of a computation."""
  return tff.structure.Struct([(None, arg) for arg in args])


@dataclasses.dataclass(frozen=True)
class System:
  """A round (or episode) of a system at a published setting.

  Attributes:
    algorithm: Its name in the registry.
    preset: One of its presets.
    network: Name of the network.
    clients: Arguments of `examples`.
    changes: Of the preset's configuration.
    rounds: Communication rounds of what is measured.
    published: Seconds that the authors' own code took, on one thread of a
      machine of this kind; None if they have released none.
  """

  algorithm: str
  preset: str
  network: str
  clients: Mapping[str, Any]
  changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rounds: int = 1
  published: float | None = None


SYSTEMS = {
    # CIFAR-10, 50 clients: 5 clients of two classes with 800 images.
    'metavers': System(
        'metavers',
        'release',
        'lenet',
        dict(
            num_clients=5,
            num_examples=800,
            shape=(32, 32, 3),
            classes_per_client=2,
        ),
        changes=dict(shots=20, queries=30, gamma=0.4, warm_up_rounds=0),
        published=0.55,
    ),
    # CIFAR-100: an episode of three rounds and the meta-update; 300 examples
    # are support and 300 query.
    'frl': System(
        'frl',
        'release',
        'conv4',
        dict(
            num_clients=10,
            num_examples=600,
            shape=(32, 32, 3),
            classes_per_client=5,
            num_classes=20,
        ),
        rounds=4,
        published=17.0,
    ),
    # RMNIST: 5 clients of 600 digits.
    'cafeme': System(
        'cafeme',
        'release',
        'modulated_cnn',
        dict(num_clients=5, num_examples=600, shape=(28, 28, 1)),
        changes=dict(batch_size=30, inner_steps=5, inner_learning_rate=0.05),
        published=1.5,
    ),
    # CIFAR-10, 100 clients of two classes, 10 a round.
    'fedec': System(
        'fedec',
        'paper',
        'fedrep_cifar10',
        dict(
            num_clients=10,
            num_examples=500,
            shape=(32, 32, 3),
            classes_per_client=2,
        ),
    ),
    # MNIST, 50 clients of two digits, 5 a round.
    'fedmeta_per': System(
        'fedmeta_per',
        'release',
        'mlp',
        dict(
            num_clients=5,
            num_examples=1000,
            shape=(28, 28, 1),
            classes_per_client=2,
        ),
    ),
}


# Ten personalized methods, one epoch a client: LeNet on CIFAR-10, 10 clients of
# two classes with 500 images.
PERSONALIZED = {
    name: System(
        name,
        'paper',
        'lenet',
        dict(
            num_clients=10,
            num_examples=500,
            shape=(32, 32, 3),
            classes_per_client=2,
        ),
        changes=changes,
    )
    for name, changes in {
        'apfl': dict(epochs=1),
        'ditto': dict(epochs=1, personal_epochs=1),
        'fed_babu': dict(epochs=1),
        'fed_per': dict(epochs=1),
        'fed_proto': dict(epochs=1),
        'fed_rep': dict(head_epochs=1, body_epochs=1),
        'lg_fed_avg': dict(epochs=1),
        'per_fed_avg': {},
        'pfedme': {},
        'scaffold': dict(epochs=1),
    }.items()
}


def build_system(system: System):
  """Returns the process of a system and its clients' examples."""
  spec = registry.get(system.algorithm)
  config = dataclasses.replace(spec.presets[system.preset], **system.changes)
  num_classes = system.clients.get('num_classes', _NUM_CLASSES)
  network = models.build(system.network, system.clients['shape'], num_classes)
  process = registry.build(system.algorithm, network, config, num_classes)
  return process, examples(**system.clients)


def system_data(
    process: Any, clients, memories: list[Any] | None = None
) -> list[collections.OrderedDict]:
  """Returns what a system's process takes.

  Args:
    process: The process.
    clients: As `examples` returns them.
    memories: What the clients have kept; by default nobody has taken part.
  """
  data = client_data(clients)
  if isinstance(process, composition.StatefulLearningProcess):
    memories = memories or [None] * len(clients)
    for client, value in zip(data, memories, strict=True):
      client['memory'] = client_work.memory_dataset(
          process.initial_memory, value
      )
  return data


def system_rounds(
    context: tff.framework.SyncContext, system: System, process: Any, clients
) -> Callable[[], Any]:
  """What is measured of a system in a context, with the clients' memories."""
  state = [context.invoke(process.initialize, None)]
  data = system_data(process, clients)
  keeps = isinstance(process, composition.StatefulLearningProcess)

  def one():
    for _ in range(system.rounds):
      computation = process.next_with_memory if keeps else process.next
      output = context.invoke(computation, arguments(state[0], data))
      if keeps:
        output, kept = output
        for client, memory in zip(data, kept, strict=True):
          client['memory'] = client_work.memory_dataset(
              process.initial_memory, memory.value
          )
      state[0] = output.state

  return one


def rounds_of(
    context: tff.framework.SyncContext, name: str
) -> Callable[[], Any]:
  """Rounds of a workload, by its name."""
  systems = SYSTEMS | PERSONALIZED
  if name in systems:
    system = systems[name]
    return system_rounds(context, system, *build_system(system))
  setting = FED_AVG[name]
  _, process = build_fed_avg(setting)
  clients = examples(setting.num_clients, setting.num_examples, setting.shape)
  return rounds_in(context, process, client_data(clients))
