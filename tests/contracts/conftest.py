"""What the contract tests run on: every algorithm, on a small toy problem.

`CASES` is made from the registry, so an algorithm that is added there is held
to all contracts without a change here; `_TOY_SETTINGS` and `_VARIANTS` take its
learning rates for the toy problem and its important variants.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tff_meta import composition
from tff_meta import method as method_lib
from tff_meta import models
from tff_meta import registry
from tff_meta.client_works import client_work
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import groups as groups_lib
from tff_meta.datasets import synthetic
from tff_meta.evaluation import clients as client_evaluation
from tff_meta.evaluation import groups as group_evaluation
from tff_meta.execution import native
from tff_meta.learners import personalizer

# Fields of the configuration that the toy problem needs otherwise than the
# presets have them: large rates, because the runs are short; minibatches that
# do not divide the clients' sizes.
_TOY_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    'frl': dict(
        rounds=2,
        batch_size=4,
        inner_learning_rate=0.01,
        meta_learning_rate=0.1,
        deployment_learning_rate=0.01,
        deployment_batch_size=8,
    ),
    'fed_avg': dict(
        learning_rate=0.3,
        batch_size=4,
        rounds=2,
        deployment_learning_rate=1.0,
        deployment_batch_size=2,
    ),
    'personalized_fl': dict(
        inner_epochs=2,
        batch_size=4,
        inner_learning_rate=0.01,
        meta_learning_rate=0.1,
        rounds=2,
        deployment_learning_rate=0.01,
        deployment_batch_size=8,
    ),
    'one_shot_ft': dict(
        learning_rate=0.3,
        batch_size=4,
        rounds=2,
        deployment_learning_rate=1.0,
        deployment_batch_size=2,
        kept_clients=3,
        held_out_share=0.25,
    ),
}
_FEDEC = dict(inner_learning_rate=0.3, tau=2, batch_size=4)
_TOY_SETTINGS = {
    **_TOY_SETTINGS,
    'fedec': _FEDEC,
    'fedec_wo': _FEDEC,
    'fedec_l2': _FEDEC | dict(constraint_weight=0.03),
    'local': dict(learning_rate=0.1, epochs=2, batch_size=4),
}
_FED_PER = dict(learning_rate=0.1, epochs=2, batch_size=4, weight_decay=0.05)
_FED_REP = dict(learning_rate=0.1, head_epochs=2, batch_size=4)
_FED_BABU = dict(learning_rate=0.1, epochs=4, batch_size=4)
_DITTO = dict(
    learning_rate=0.1,
    epochs=4,
    personal_learning_rate=0.1,
    personal_epochs=4,
    local_unit='epochs',
    batch_size=4,
    proximal_weight=0.1,
    fine_tuning_steps=20,
    fine_tuning_learning_rate=0.3,
)
_IFCA = dict(
    clusters=2,
    learning_rate=0.3,
    epochs=2,
    batch_size=4,
    fine_tuning_steps=5,
    fine_tuning_learning_rate=0.3,
)
_PFEDGP = dict(inner_steps=3, gibbs_steps=2, train_draws=10, test_draws=10)
_TOY_SETTINGS = {
    **_TOY_SETTINGS,
    'fed_prox': dict(learning_rate=0.3, epochs=2, batch_size=4),
    'fed_bn': dict(learning_rate=0.1, epochs=2, batch_size=4),
    'fed_rod': dict(learning_rate=0.1, epochs=2, batch_size=4),
    'fed_ala': dict(learning_rate=0.3, epochs=2, batch_size=4, max_passes=12),
    'fed_per': _FED_PER,
    'fed_per_meta': _FED_PER,
    'fed_rep': _FED_REP,
    'fed_rep_proto': _FED_REP,
    'cafeme_fed_rep': dict(
        learning_rate=0.01,
        batch_size=4,
        fine_tuning_steps=20,
        fine_tuning_learning_rate=0.3,
    ),
    'fed_babu': _FED_BABU,
    'fed_babu_proto': _FED_BABU,
    'ditto': _DITTO,
    'lg_fed_avg': _FED_PER | dict(averaged_rounds=2),
    'apfl': dict(learning_rate=0.1, epochs=2, batch_size=4),
    'pfedme': dict(
        learning_rate=0.1,
        personal_learning_rate=0.1,
        local_rounds=5,
        proximal_weight=5.0,
        batch_size=4,
    ),
    'l2gd': dict(
        learning_rate=0.1,
        epochs=2,
        batch_size=4,
        averaging_probability=0.5,
        penalty_weight=2.0,
    ),
    'knn_per': dict(learning_rate=0.3, batch_size=4),
    'fed_proto': dict(learning_rate=0.1, epochs=2),
    'fed_pac': dict(
        learning_rate=0.1, head_learning_rate=0.2, epochs=2, batch_size=4
    ),
    'pfedgp': _PFEDGP,
    'pfedgp_proto': _PFEDGP,
    'ifca': _IFCA,
    'ifca_ft': _IFCA,
    'pfedhn': dict(
        num_clients=20,
        hidden_layers=1,
        hidden_units=20,
        server_learning_rate=0.1,
        server_momentum=0.5,
        learning_rate=0.1,
        momentum=0.5,
        local_steps=10,
        batch_size=4,
        fine_tuning_steps=20,
        fine_tuning_learning_rate=0.3,
    ),
    'scaffold': dict(
        learning_rate=0.3,
        server_learning_rate=1.0,
        num_clients=3,
        epochs=2,
        batch_size=4,
    ),
}
_TOY_SETTINGS = {**_TOY_SETTINGS, 'fed_avg_ft': _TOY_SETTINGS['fed_avg']}
_TOY_SETTINGS['fed_avg_proto'] = _TOY_SETTINGS['fed_avg']
_TOY_SETTINGS['fed_avg_own'] = _TOY_SETTINGS['fed_avg']
# Two phases in three rounds; one class has fewer than K + Q examples.
_METAVERS = dict(shots=1, queries=2, warm_up_rounds=2, learning_rate=0.01)
for _name in ('metavers', 'metavers_ce', 'metavers_triplet'):
  _TOY_SETTINGS[_name] = _METAVERS
# Triplets do not see a bias that shifts all embeddings alike. Its gradient is
# zero but for rounding, of which Adam would make whole steps.
_TOY_SETTINGS['metavers_triplet'] = _METAVERS | dict(
    optimizer='sgd', learning_rate=0.1
)
_TOY_SETTINGS |= {
    'cafeme': dict(
        inner_steps=2,
        query_batches=2,
        batch_size=3,
        outer_learning_rate=0.01,
        fine_tuning_steps=5,
        fine_tuning_learning_rate=0.3,
    ),
    'per_fed_avg': dict(
        local_steps=3,
        batch_size=4,
        inner_learning_rate=0.1,
        outer_learning_rate=0.1,
        fine_tuning_steps=3,
        fine_tuning_learning_rate=0.3,
    ),
}
_LINEAR = dict(
    classifier='linear',
    inner_learning_rate=0.3,
    meta_learning_rate=0.3,
    deployment_learning_rate=1.0,
    deployment_batch_size=2,
)

_FEDMETA_ADAM = dict(inner_learning_rate=0.1, outer_learning_rate=0.02)
# The clients are small: with a support fraction of 0.2 one would have none.
_FEDMETA = dict(
    inner_learning_rate=0.3,
    outer_learning_rate=1.0,
    support_fraction=0.4,
    inner_batch_size=2,
)
_TOY_SETTINGS |= {
    'fedmeta_per': _FEDMETA,
    'fedmeta': _FEDMETA,
    'fed_avg_meta': dict(
        learning_rate=0.01,
        batch_size=4,
        rounds=2,
        deployment_learning_rate=0.01,
        deployment_batch_size=2,
    ),
}

# Algorithm -> variant -> (preset, changes, network).
_VARIANTS: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any], str]]] = {
    'frl': {
        'linear': ('paper', _LINEAR, 'mlp'),
        'distance': ('paper', dict(gpal=False), 'mlp'),
        'literal': (
            'paper',
            dict(
                exclude_true_class=True,
                squared_distance=False,
                prototype_mean='all',
            ),
            'mlp',
        ),
    },
    'fedec': {
        'printed': (
            'paper',
            dict(
                kl_direction='student_first',
                constrain='first',
                server_aggregate='sum',
                eval_model='stored',
                outer_learning_rate=0.3,
            ),
            'mlp',
        ),
        'steps': (
            'paper',
            dict(
                tau=5,
                tau_unit='steps',
                eval_model='finetune',
                outer_learning_rate=0.5,
            ),
            'mlp',
        ),
    },
    'cafeme_fed_rep': {
        'reset': (
            'paper',
            dict(client_optimizer_state='reset', head_layers=1),
            'mlp',
        ),
    },
    'ditto': {
        'persistent': (
            'paper',
            dict(
                client_optimizer_state='persist',
                optimizer='adam',
                learning_rate=0.02,
                local_unit='steps',
                epochs=5,
                personal_epochs=5,
            ),
            'mlp',
        ),
    },
    'fed_babu': {
        'falling_rate': ('paper', dict(decay_rounds=40), 'mlp'),
    },
    'per_fed_avg': {
        'first_order': ('paper', dict(variant='first_order'), 'mlp'),
        'second_order': ('paper', dict(variant='second_order'), 'mlp'),
    },
    'fedmeta_per': {
        'release': ('release', _FEDMETA_ADAM, 'mlp'),
        'meta_sgd': ('paper', dict(inner='meta_sgd'), 'mlp'),
    },
    'fedmeta': {
        'release': ('release', _FEDMETA_ADAM | dict(inner='meta_sgd'), 'mlp'),
    },
    'personalized_fl': {
        'linear': ('release', _LINEAR, 'mlp'),
        'conv4': (
            'paper',
            dict(batch_size=0, meta_learning_rate=0.03),
            'conv4',
        ),
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One configuration of one algorithm.

  Attributes:
    algorithm: A name of the registry.
    variant: A preset or one of `_VARIANTS`.
    config: The algorithm's configuration.
    network: A name of `models.MODELS`.
  """

  algorithm: str
  variant: str
  config: Any
  network: str

  def __str__(self):
    return f'{self.algorithm}-{self.variant}'

  @property
  def is_variant(self) -> bool:
    """Whether it is one of `_VARIANTS`."""
    return self.variant in _VARIANTS.get(self.algorithm, {})

  @property
  def is_slow(self) -> bool:
    """Whether its contracts are left to the slow tests."""
    return (
        self.algorithm in _MADE_OF_OTHERS
        or str(self) in _MADE_OF_OTHERS
        or (
            self.variant == 'release'
            and self.algorithm in _SAME_BUT_FOR_NUMBERS
        )
    )

  @property
  def has_a_fixed_order(self) -> bool:
    """Whether a client's memory decides which examples come next."""
    return getattr(self.config, 'batch_position', None) == 'persist'

  @property
  def memory_takes_part(self) -> bool:
    """Whether a client's memory reaches the server by training alone."""
    network = models.build(self.network, _IMAGE_SHAPE, None)
    method = self.spec.method(network, self.config, _NUM_CLASSES)
    return 'training' in method.memory_reaches.values()

  @property
  def spec(self) -> registry.AlgorithmSpec:
    return registry.get(self.algorithm)

  @property
  def is_system(self) -> bool:
    """Whether it is one of the five systems, not a baseline."""
    return self.spec.module_name.startswith('tff_meta.algorithms.')


# Algorithms whose released code differs from the paper by numbers alone, or by
# what another algorithm of the same module has, too: the contracts of their
# `release` preset are left to the slow tests.
_SAME_BUT_FOR_NUMBERS = (
    'metavers_ce',
    'fed_avg',
    'fed_avg_ft',
    'fed_avg_own',
    'fed_avg_proto',
    'fed_ala',
    'fed_rep',
    'fed_rep_proto',
    'cafeme_fed_rep',
    'fed_babu',
    'fed_babu_proto',
    'per_fed_avg',
    'ditto',
    'lg_fed_avg',
    'apfl',
    'pfedme',
    'l2gd',
    'knn_per',
    'fed_proto',
    'pfedgp',
    'ifca',
    'ifca_ft',
    'pfedhn',
    'scaffold',
    'one_shot_ft',
    'local',
)
# Algorithms and cases made of what others have, or that differ from others by
# what the tests of their algorithm go through: all of their contracts are.
_MADE_OF_OTHERS = (
    'fed_rep_proto',
    'fed_babu_proto',
    'frl-release',
    'personalized_fl-release',
    'metavers-release',
    'fedmeta-release',
    'fedec-steps',
    'per_fed_avg-second_order',
    'fed_prox',
    'metavers_triplet',
    'fedec_wo',
    'fedec_l2',
    'fed_avg_meta',
    'fed_per_meta',
    'pfedgp_proto',
    'frl-distance',
    'frl-linear',
    'frl-literal',
    'fedec-printed',
    'fedmeta_per-meta_sgd',
    'fed_per-release',
    'cafeme_fed_rep-reset',
    'personalized_fl-linear',
    'personalized_fl-conv4',
    'fed_babu-falling_rate',
    'per_fed_avg-first_order',
)


# The baselines that contracts run on by default: no memory, clusters,
# prototypes alone, and a hypernetwork with an optimizer of the server.
_EACH_MECHANISM = (
    'fed_avg',
    'ifca',
    'fed_proto',
    'pfedhn',
)


def _network(spec):
  """Returns a small network, of the kind that the algorithm needs."""
  small = {
      'modulated_cnn': 'modulated_mlp',
      'cafeme_base': 'fedec_mlp',
      'norm_cnn': 'norm_cnn',
  }
  return small.get(spec.model, 'mlp')


def _cases():
  for name, spec in registry.ALGORITHMS.items():
    network = _network(spec)
    # A plugin's has no toy settings; its demonstration learns in a short run.
    presets = ('paper', 'release') if name in _TOY_SETTINGS else ('demo',)
    variants = {preset: (preset, {}, network) for preset in presets}
    variants |= _VARIANTS.get(name, {})
    for variant, (preset, changes, network) in variants.items():
      config = dataclasses.replace(
          spec.presets[preset], **(_TOY_SETTINGS.get(name, {}) | changes)
      )
      yield Case(name, variant, config, network)


CASES = tuple(_cases())

_NUM_CLASSES = 3
_WAY = 4  # Classes of a group: more than training had, and others.
_IMAGE_SHAPE = (8, 8, 1)
_SEED = 7


@functools.cache
def _corpus() -> corpus_lib.Corpus:
  """Blobs; classes 0 to 2 are trained on, 12 to 15 are in no cohort."""
  corpus = synthetic.load(num_classes=16, noise=1.0, seed=4)
  return dataclasses.replace(corpus, preprocess=lambda x: np.float32(0.15) * x)


@dataclasses.dataclass(frozen=True)
class Client:
  """A client of the toy problem, from which its TFF data are made.

  Attributes:
    counts: Label -> number of examples.
    salt: The client's salt.
    first: Number of the first image of each class that is used.
    pixel: Value of all pixels, in place of images.
    empty_batch: Whether a client without examples has a batch nevertheless.
    last_label: Label of the last example, in place of its own.
  """

  counts: Mapping[int, int]
  salt: int
  first: int = 0
  pixel: float | None = None
  empty_batch: bool = False
  last_label: int | None = None

  def arrays(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns x float32 `[n, 8, 8, 1]` and y int32 `[n]`."""
    train = _corpus().train
    rows = [
        np.flatnonzero(train.y == label)[self.first :][:count]
        for label, count in self.counts.items()
    ]
    rows = np.concatenate([np.zeros(0, np.int64), *rows])
    x, y = _corpus().preprocess(train.x[rows]), train.y[rows]
    if self.last_label is not None:
      y = np.append(y[:-1], self.last_label).astype(np.int32)
    return x if self.pixel is None else np.full_like(x, self.pixel), y

  def data(self, batch_size: int | None = None) -> collections.OrderedDict:
    """Returns what `process.next` takes, all in one batch by default."""
    x, y = self.arrays()
    examples = collections.OrderedDict(x=x, y=y)
    if self.empty_batch:
      batches = tf.data.Dataset.from_tensors(examples)
    else:
      batches = tf.data.Dataset.from_tensor_slices(examples)
      batches = batches.batch(batch_size or max(len(y), 1))
    return collections.OrderedDict(
        examples=batches,
        salt=tf.data.Dataset.from_tensors(np.int32(self.salt)),
    )


# Unequal clients and classes; the second holds too little of class 1 to have
# it in a support set, and the third holds one class only.
_COHORT = (
    Client({0: 6, 1: 3}, salt=11),
    Client({0: 2, 1: 1, 2: 5}, salt=5, first=10),
    Client({2: 4}, salt=8, first=20),
)


# Of the processes, subjects and uses the latest are kept, which are those of a
# case and its neighbours; all of them take gigabytes.
_KEPT = 8


def _process_key(case):
  """What a process depends on; what it is used for is not of it."""
  return case.spec.module_name, case.config, case.network


@functools.lru_cache(_KEPT)
def _build(module_name, config, network, seed, copy):
  """Builds a process; algorithms of one module share its processes."""
  del copy  # Another number is another process.
  model = models.build(network, _IMAGE_SHAPE, None)
  name = module_name.rpartition('.')[2]
  return registry.build(name, model, config, _NUM_CLASSES, seed=seed)


class Round(NamedTuple):
  """What a round results in.

  Attributes:
    state: Of the server.
    metrics: Of the round.
    memories: Salt -> what the client keeps, of all clients that have taken part
      so far; empty if clients keep nothing.
  """

  state: Any
  metrics: Any
  memories: Mapping[int, Any]


class Subject:
  """A case under test; what takes seconds is done once and kept."""

  def __init__(self, case: Case):
    self.case = case
    self.model = models.build(case.network, _IMAGE_SHAPE, None)
    # An episode at least, and more than one round.
    self.rounds_per_cohort = case.spec.rounds_per_cohort(case.config)
    self.num_rounds = max(3, self.rounds_per_cohort)
    self.cohort = _COHORT

  @functools.cached_property
  def method(self) -> method_lib.Method:
    return self.case.spec.method(self.model, self.case.config, _NUM_CLASSES)

  def build(self, *, seed: int = _SEED, copy: int = 0) -> Any:
    """Returns a process; each `copy` of the same one is built by itself."""
    return _build(*_process_key(self.case), seed, copy)

  @property
  def restored(self) -> Any:
    """The process of a program that goes on: a new one, which takes seconds.

    Only in one case of each system, see `thrifty_subject`; in the others it is
    the process itself.
    """
    return self.build(copy=1) if self.case in _NOT_ALIKE else self.process

  def build_with(self, **options: Any) -> Any:
    """Returns a process with options of `build_process`."""
    return method_lib.build_process(
        self.method, self.model, seed=_SEED, **options
    )

  @functools.cached_property
  def process(self) -> Any:
    return self.build()

  @functools.cached_property
  def frozen_process(self) -> Any:
    """The process with rates of zero for all that clients train."""
    config = self.case.config
    rates = {
        field.name
        for field in dataclasses.fields(config)
        if field.name.endswith('learning_rate')
        and not field.name.startswith(('server', 'deployment', 'fine_tuning'))
    }
    if self.case.spec.module_name.endswith('.fedec'):
      rates.remove('outer_learning_rate')  # It is the server's.
    assert rates
    config = dataclasses.replace(config, **dict.fromkeys(rates, 0.0))
    return registry.build(
        self.case.algorithm, self.model, config, _NUM_CLASSES, seed=_SEED
    )

  def weights(self, state: Any) -> Any:
    """Returns `OrderedDict(body, head)` of a state."""
    return self.process.get_model_weights(state).trainable

  def data(
      self,
      client: Client,
      memories: Mapping[int, Any] | None = None,
      batch_size: int | None = None,
  ) -> collections.OrderedDict:
    """Returns what `process.next` takes, in one batch by default.

    Args:
      client: The client.
      memories: Salt -> what the client keeps; nobody has taken part by default.
      batch_size: Of the examples.
    """
    data = client.data(batch_size)
    if isinstance(self.process, composition.StatefulLearningProcess):
      data['memory'] = client_work.memory_dataset(
          self.process.initial_memory, (memories or {}).get(client.salt)
      )
    return data

  def one_round(
      self, state: Any, data: Sequence[Any], process: Any = None
  ) -> tuple[Any, Sequence[Any]]:
    """Returns a round's output, and what its clients keep if they do.

    Where they do, by `next_with_memory` alone: to compile `next`, too, takes as
    long as the contracts of a subject together.

    Args:
      state: The server's.
      data: The clients'.
      process: By default `self.process`.
    """
    process = process or self.process
    if isinstance(process, composition.StatefulLearningProcess):
      return process.next_with_memory(state, data)
    output = process.next(state, data)
    return output, [client_work.ClientMemory(False, ())] * len(data)

  def run(
      self,
      cohort: Sequence[Client],
      *,
      process: Any = None,
      state: Any = None,
      memories: Mapping[int, Any] | None = None,
      num_rounds: int | None = None,
      batch_size: int | None = None,
  ) -> list[Round]:
    """Returns the results of rounds with the same clients.

    Args:
      cohort: The clients; what they keep goes from round to round.
      process: By default `self.process`.
      state: By default a new one.
      memories: Salt -> what clients kept before.
      num_rounds: By default `self.num_rounds`.
      batch_size: Of the clients' examples.
    """
    process = process or self.process
    state = process.initialize() if state is None else state
    memories = dict(memories or {})
    rounds = []
    for _ in range(num_rounds or self.num_rounds):
      data = [self.data(client, memories, batch_size) for client in cohort]
      output, kept = self.one_round(state, data, process)
      memories |= {
          client.salt: memory.value
          for client, memory in zip(cohort, kept, strict=True)
          if memory.present
      }
      state = output.state
      rounds.append(Round(state, output.metrics, dict(memories)))
    return rounds

  @functools.cached_property
  def outputs(self) -> list[Round]:
    """The results of `num_rounds` rounds with `_COHORT`."""
    return self.run(_COHORT)

  @functools.cached_property
  def states(self) -> list[Any]:
    """The initial state and those after each of the rounds of `outputs`."""
    return [self.process.initialize(), *(o.state for o in self.outputs)]

  def rounds(self) -> Iterator[tuple[Any, list[Any], Round]]:
    """Yields state before, client data and result of every round."""
    memories = {}
    for state, output in zip(self.states, self.outputs, strict=False):
      yield state, [self.data(c, memories) for c in self.cohort], output
      memories = output.memories

  @functools.cached_property
  def long_run(self) -> list[Round]:
    """The results of a run that is long enough to learn something."""
    return self.run(_COHORT, num_rounds=6 * self.rounds_per_cohort)

  @functools.cached_property
  def trained_weights(self) -> Any:
    """What `long_run` ends with, as tensors."""
    weights = self.weights(self.long_run[-1].state)
    return tf.nest.map_structure(tf.convert_to_tensor, weights)

  @functools.cached_property
  def group_personalizer(self) -> personalizer.GroupPersonalizer | None:
    method = self.case.spec.method(self.model, self.case.config, _WAY)
    return method.group and method.group()

  @functools.cached_property
  def use_in_group(self) -> Callable[..., Any]:
    """`(weights, support, salts, query, seed) -> (adapted, labels)`."""
    adapt, predict = self.group_personalizer

    @tf.function(autograph=False)
    def use(weights, support, salts, query, seed):
      adapted = adapt(weights, support, salts, seed)
      return adapted, predict(adapted, query)

    return use


_subject = functools.lru_cache(_KEPT)(Subject)


def _first_of_each(key):
  """Returns the first case of every value of `key`."""
  return tuple({key(case): case for case in reversed(CASES)}.values())[::-1]


_PROCESSES = _first_of_each(_process_key)
_MODULES = _first_of_each(lambda c: c.spec.module_name)
_NOT_ALIKE = tuple(
    case
    for case in _MODULES
    if case.is_system or case.algorithm in ('fed_avg', 'scaffold')
)
# One of each way to compose a process: one of its own, the plain one, and that
# with memories, a signal and a state of the clients' work.
_COMPOSED = tuple(
    case
    for case in _MODULES
    if case.algorithm in ('frl', 'fed_avg', 'scaffold')
)
# One of each thing that clients send beside, or in place of, a model.
_EACH_CHANNEL = (
    'frl',
    'metavers',
    'fed_avg',
    'scaffold',
    'fed_proto',
    'ifca',
    'local',
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
  """Puts the contracts on one module next to each other, and on one case.

  So one of several processes of pytest builds what all of them use, and what is
  kept of a case can go when another one begins, see `_KEPT`.

  Args:
    items: All tests, put in order in place; those of other folders stay where
      they are.
  """
  modules = [case.spec.module_name for case in _MODULES]

  def number(item):
    values = item.callspec.params.values() if hasattr(item, 'callspec') else ()
    for value in values:
      case = value[0] if isinstance(value, tuple) and value else value
      if isinstance(case, Case):
        place = CASES.index(case) if case in CASES else -1
        return modules.index(case.spec.module_name), place
    return -1, -1

  folder = pathlib.Path(__file__).parent
  places = [i for i, item in enumerate(items) if item.path.parent == folder]
  in_order = sorted((items[i] for i in places), key=number)
  for place, item in zip(places, in_order, strict=True):
    items[place] = item


def _is_left_to_ci(found):
  case = found if isinstance(found, Case) else found[0]
  if case.is_system:
    return case.variant == 'release'
  return case.algorithm not in _EACH_MECHANISM


def _is_not_the_plain_one(case):
  return case.algorithm != 'fed_avg'


def _with_marks(
    cases, is_slow=lambda case: case.is_slow, is_left_to_ci=_is_left_to_ci
):
  """Returns cases, or uses of cases, as parameters with their marks.

  By default the contracts run on the systems, as their papers have them, and on
  one baseline of every mechanism; those that take long on FedAvg alone. .ci/run
  holds the other presets and baselines to them.
  """

  def mark(found):
    if is_slow(found):
      return [pytest.mark.slow]
    return [pytest.mark.ci] if is_left_to_ci(found) else []

  return [pytest.param(found, marks=mark(found)) for found in cases]


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _first_of_each(lambda case: case.algorithm),
        lambda case: case.algorithm not in _EACH_CHANNEL,
        _is_not_the_plain_one,
    ),
    ids=str,
)
def any_subject(request) -> Subject:
  """Every name of the registry; most are slow tests."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _first_of_each(lambda case: case.algorithm),
        lambda case: case.algorithm not in _EACH_CHANNEL,
        lambda case: True,
    ),
    ids=str,
)
def costly_subject(request) -> Subject:
  """The same; none by default."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _first_of_each(lambda case: case.algorithm),
        lambda case: case not in _COMPOSED,
        lambda case: True,
    ),
    ids=str,
)
def costly_process(request) -> Subject:
  """Every name of the registry; one of each way to compose it in CI."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _first_of_each(lambda case: case.algorithm),
        lambda case: False,
        lambda case: case.algorithm not in _EACH_CHANNEL,
    ),
    ids=str,
)
def every_name(request) -> Subject:
  """Every name of the registry; but for one of each thing sent in CI."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=[case for case in _COMPOSED if case.algorithm == 'fed_avg'],
    ids=str,
)
def plain_subject(request) -> Subject:
  """FedAvg, for what is the same of all."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(_PROCESSES),
    ids=str,
)
def subject(request) -> Subject:
  """Every process in turn; algorithms that only use it otherwise share it."""
  return _subject(request.param)


def _preset_cases():
  """Yields every preset as it is, on a network of convolutions."""
  for name, spec in registry.ALGORITHMS.items():
    for preset, config in spec.presets.items():
      yield Case(name, preset, config, spec.model or 'conv4')


_PRESETS = tuple(
    {_process_key(case): case for case in _preset_cases()}.values()
)
# Where sums of three terms had another order in every run: momentum with weight
# decay, and a penalty on weights that the loss uses, too.
_RACED = ('pfedhn-demo', 'fedec_l2-demo')


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _PRESETS, lambda case: str(case) not in _RACED, lambda case: True
    ),
    ids=str,
)
def preset_subject(request) -> Subject:
  """Every preset with its own numbers; most are slow, two are left to CI."""
  return _subject(request.param)


@pytest.fixture(scope='session')
def native_context() -> tff.framework.SyncContext:
  """TFF's own runtime."""
  return native.create_native_context()


@pytest.fixture(scope='session')
def stateful_subject(subject) -> Subject:
  """Every process whose clients keep something."""
  if not isinstance(subject.process, composition.StatefulLearningProcess):
    pytest.skip('Clients of this process keep nothing.')
  return subject


@pytest.fixture(
    scope='session',
    params=_with_marks(_PROCESSES, lambda case: case not in _NOT_ALIKE),
    ids=str,
)
def thrifty_subject(request) -> Subject:
  """Every process in turn; but for one of each system they are slow tests.

  For what is costly and depends on what a process is made of: the baselines are
  made of what FedAvg (no memory), FedEC (memory) and SCAFFOLD (memory, and what
  is aggregated beside the models) have.
  """
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _PROCESSES,
        lambda case: case.is_slow,
        _is_not_the_plain_one,
    ),
    ids=str,
)
def dealt_subject(request) -> Subject:
  """Every process in turn; but for FedAvg's in CI."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _PROCESSES, lambda case: case not in _COMPOSED, _is_not_the_plain_one
    ),
    ids=str,
)
def composed_subject(request) -> Subject:
  """Every process; one of each composition in CI, the others are slow tests.

  For what depends on nothing but how a process is composed.
  """
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _PROCESSES,
        lambda case: str(case) not in ('scaffold-paper', 'pfedhn-paper'),
    ),
    ids=str,
)
def recalling_subject(request) -> Subject:
  """Every process; but for two whose clients keep something, slow tests.

  One has a signal and a state of the clients' work, the other a state of the
  server's optimizer.
  """
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _PROCESSES,
        lambda case: case not in _NOT_ALIKE,
        _is_not_the_plain_one,
    ),
    ids=str,
)
def thriftiest_subject(request) -> Subject:
  """As `thrifty_subject`; of these all but FedAvg run in CI.

  For what a process that is built again draws, and for TFF's own runtime.
  """
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(_MODULES, lambda case: case not in _COMPOSED),
    ids=str,
)
def module_subject(request) -> Subject:
  """The first case of every module; most are slow, see `composed_subject`."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        (case for case in _PROCESSES if case.memory_takes_part),
        lambda case: case.is_slow or case.is_variant or not case.is_system,
    ),
    ids=str,
)
def frozen_subject(request) -> Subject:
  """Every process in whose training memories take part; baselines slowly."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(c for c in CASES if 'group' in c.spec.uses),
    ids=str,
)
def group_subject(request) -> Subject:
  """Every case that has a use for a new group."""
  return _subject(request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        (c for c in CASES if 'group' in c.spec.uses),
        lambda case: case not in _COMPOSED,
    ),
    ids=str,
)
def composed_group_subject(request) -> Subject:
  """For what is the evaluation's own: all but two are slow tests."""
  return _subject(request.param)


@functools.lru_cache(_KEPT)
def _method(case, num_classes):
  return case.spec.method(_subject(case).model, case.config, num_classes)


@functools.lru_cache(_KEPT)
def _client_test(use, memory):
  """Returns a personalizer and its test; those of one function are shared.

  Args:
    use: What makes the personalizer.
    memory: Another memory is another trace.
  """
  del memory
  made = use()
  return made, client_evaluation.build_client_test(made, with_curve=True)


class ClientUse:
  """What a single client does with what a case has trained."""

  def __init__(self, case: Case, kind: str):
    self.kind = kind
    self.subject = _subject(case)
    self.num_classes = _WAY if kind == 'new_class' else _NUM_CLASSES
    method = _method(case, self.num_classes)
    self.personalizer, self.test = _client_test(
        getattr(method, kind), method.memory is not None and kind
    )

  def task(self, pools: groups_lib.ClassPools, index: int = 0):
    """Returns a client: of the cohort, unseen, or of a group of new classes."""
    if self.kind == 'new_class':
      protocol = group_evaluation.GroupProtocol(
          'meta_test', _WAY, 2, 'iid', 1, index
      )
      return next(client_evaluation.new_class_tasks(pools, protocol))
    if self.kind == 'known_client':
      support, query = _COHORT[0], Client({0: 8, 1: 8}, salt=11, first=30)
    else:
      support, query = (
          Client({0: 3, 2: 5}, salt=21, first=24),
          Client({0: 8, 2: 8}, salt=21, first=30),
      )
    parts = (corpus_lib.LabelledExamples(*c.arrays()) for c in (support, query))
    return client_evaluation.ClientTask('client', *parts, salt=support.salt)

  def memory(self) -> Any:
    """Returns what the personalizer is given of the clients' memories."""
    memories = self.subject.long_run[-1].memories
    if self.kind == 'known_client' and memories:
      return client_work.ClientMemory(True, memories[_COHORT[0].salt])
    if self.personalizer.uses_bank:
      values = [value for _, value in sorted(memories.items())]
      return tree.map_structure(lambda *leaves: np.stack(leaves), *values)
    return ()

  def ask(self, task: client_evaluation.ClientTask, memory: Any = None) -> Any:
    """Returns the client's answers before, after and while it adapts."""
    return self.ask_all([task], memory)[0]

  def ask_all(self, tasks, memory: Any = None, test: Any = None) -> list[Any]:
    """Returns the answers of clients with the same memory."""
    memory = self.memory() if memory is None else memory
    bank, own = (memory, ()) if self.personalizer.uses_bank else ((), memory)
    return client_evaluation.ask_clients(
        test or self.test,
        self.subject.trained_weights,
        [own] * len(tasks),
        tasks,
        seed=3,
        bank=bank,
    )


_CLIENT_KINDS = ('known_client', 'new_client', 'new_class')


def _client_uses():
  """Returns the first case of every personalizer, and every variant of it."""
  uses = {}
  for case in CASES:
    variant = case.is_variant and case.variant
    made_by = case.spec.module_name, case.spec.function
    for kind in _CLIENT_KINDS:
      if kind in case.spec.uses:
        uses.setdefault((made_by, kind, variant), (case, kind))
  return tuple(uses.values())


_client_use = functools.lru_cache(_KEPT)(ClientUse)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _client_uses(), lambda use: use[0].is_slow or use[0].is_variant
    ),
    ids=lambda use: f'{use[0]}-{use[1]}',
)
def client_use(request) -> ClientUse:
  """Every use of a single client in turn; those of variants are slow tests."""
  return _client_use(*request.param)


@pytest.fixture(
    scope='session',
    params=_with_marks(
        _client_uses(),
        lambda use: use[0].algorithm not in ('cafeme', 'metavers')
        or use[0].is_variant
        or use[1] == 'known_client',
    ),
    ids=lambda use: f'{use[0]}-{use[1]}',
)
def scoring_use(request) -> ClientUse:
  """Every use of a single client; but for logits and prototypes slow tests."""
  return _client_use(*request.param)


@pytest.fixture(scope='session')
def bad_labels() -> tuple[int, ...]:
  """Returns labels just outside the training clients' classes, and far."""
  return (-1, _NUM_CLASSES, 2**31 - 1, -(2**31))


@pytest.fixture(scope='session')
def way() -> int:
  """Returns the number of classes of a group."""
  return _WAY


@pytest.fixture(scope='session')
def pools() -> groups_lib.ClassPools:
  """Images of the toy problem by class."""
  return groups_lib.ClassPools(_corpus(), examples_per_class=16)
