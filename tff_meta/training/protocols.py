"""Whom a trained model is tested on: the kinds of clients and groups, by name.

* `new_groups`: groups of clients with classes that training never saw, each
  client with few of them (FRL's non-IID deployment);
* `new_groups_iid`: the same classes, every client with all of them;
* `new_groups_mixed`, `new_groups_mixed_iid`: the same, but three fifths of the
  classes, rounded down, are those of training (FRL's Table 3: 3 of 5);
* `known_clients`: the training clients on their own held-out test examples;
* `new_clients`: clients that training never saw;
* `new_class_clients`: the clients of the groups of `new_groups_iid`, each with
  a model of its own (MetaVers, Table 6).
"""

import abc
from collections.abc import Callable, Iterable
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import tensorflow_federated as tff

from tff_meta import registry
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import accuracy
from tff_meta.evaluation import client_metrics
from tff_meta.evaluation import clients as client_evaluation
from tff_meta.evaluation import groups as group_evaluation
from tff_meta.evaluation import normalized_variance
from tff_meta.learners import personalizer as personalizer_lib
from tff_meta.training import client_memories
from tff_meta.training import client_state_store
from tff_meta.training import embeddings
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocol_names
from tff_meta.training import run_config

NONE = protocol_names.NONE
NEW_GROUPS = protocol_names.NEW_GROUPS
KNOWN_CLIENTS = protocol_names.KNOWN_CLIENTS
NEW_CLIENTS = protocol_names.NEW_CLIENTS
NEW_CLASS_CLIENTS = protocol_names.NEW_CLASS_CLIENTS
_DEPLOYMENTS = {
    NEW_GROUPS: 'non_iid',
    protocol_names.NEW_GROUPS_IID: 'iid',
    protocol_names.NEW_GROUPS_MIXED: 'non_iid',
    protocol_names.NEW_GROUPS_MIXED_IID: 'iid',
}
_MIXED = (
    protocol_names.NEW_GROUPS_MIXED,
    protocol_names.NEW_GROUPS_MIXED_IID,
)
PROTOCOLS = protocol_names.PROTOCOLS
# What is run where no protocols were asked for.
DEFAULT_PROTOCOLS = (NEW_GROUPS, KNOWN_CLIENTS, NEW_CLIENTS, NEW_CLASS_CLIENTS)

# Rows of results: whose accuracy it is.
TRAINED, UNTRAINED, FROM_SCRATCH = 'trained', 'untrained', 'from_scratch'
_REFERENCE_FROM_SCRATCH = f'{registry.REFERENCE}_{FROM_SCRATCH}'
LABELS = {
    TRAINED: 'trained model',
    UNTRAINED: 'initial model, untrained',
    FROM_SCRATCH: 'from scratch',
    _REFERENCE_FROM_SCRATCH: f'{registry.REFERENCE_TITLE} from scratch',
}


class Model(NamedTuple):
  """What comes out of training.

  Attributes:
    weights: `OrderedDict(body, head)`.
    memories: What clients have kept for themselves.
  """

  weights: Any
  memories: client_memories.ClientMemories


def model(
    process: tff.learning.templates.LearningProcess,
    state: Any,
    client_states: client_state_store.ClientStateStore | None,
    round_num: int | None = None,
) -> Model:
  """Returns the model in a server state and in the clients' states.

  Args:
    process: The training process.
    state: One of its server states.
    client_states: Where the clients' states are read.
    round_num: The round whose client states are meant; None for the newest.
  """
  return Model(
      process.get_model_weights(state).trainable,
      client_memories.ClientMemories(process, client_states, round_num),
  )


def untrained_model(process: tff.learning.templates.LearningProcess) -> Model:
  """Returns what training begins with: no client has taken part."""
  return model(process, process.initialize(), None)


# What is measured of a model.
Test = Callable[[Model], client_metrics.Report]


class Protocol(abc.ABC):
  """Those on whom a trained model is tested, and what is told of them.

  Attributes:
    use: The use of an algorithm that is tested, one of `registry.USES`.
    has_groups: Whether they are, or are clients of, groups that are drawn from
      classes.
    name: One of `PROTOCOLS`.
  """

  use: ClassVar[str]
  has_groups: ClassVar[bool]

  def __init__(self, name: str, experiment: experiment_lib.Experiment):
    """Names those of an experiment; nothing is drawn or traced yet."""
    self.name = name
    self._experiment = experiment
    self._config = experiment.config

  @property
  def has_use(self) -> bool:
    """Whether the algorithm has the use."""
    return self.use in self._experiment.spec.uses

  @property
  def starts_from_scratch(self) -> bool:
    """Whether the algorithm has no use there for what was trained.

    It then begins with random weights, see `AlgorithmSpec.starts_from_scratch`.
    """
    return self.use in self._experiment.spec.starts_from_scratch

  @property
  @abc.abstractmethod
  def draw(self) -> Any:
    """Whom `test` tests, a `GroupProtocol` or a `ClientProtocol`."""

  @property
  @abc.abstractmethod
  def is_offered(self) -> bool:
    """Whether the algorithm has the use, and the data set whom to test."""

  @abc.abstractmethod
  def check(self) -> None:
    """Raises a ValueError if the data are not enough, though it is offered."""

  @abc.abstractmethod
  def test(
      self, model: Model, *, with_curve: bool = False
  ) -> client_metrics.Report:
    """Tests a model as at the end of a run.

    Args:
      model: What came out of training.
      with_curve: Whether accuracy is measured after every step of adaptation,
        too, where there are steps to look between.
    """

  @abc.abstractmethod
  def on_the_way(self) -> tuple[str, Test] | None:
    """Returns a cheaper test for during training.

    Returns:
      The column of metrics.csv that it fills, and the test; None if there is
      nobody to test.

    Raises:
      ValueError: If the data are not enough, or there is nothing to select the
        best round on.
    """

  def references(self) -> dict[str, Test]:
    """Returns tests of the untrained model, by the row that they fill."""
    return {UNTRAINED: self.test}

  def accuracies(
      self, report: client_metrics.Report
  ) -> accuracy.AccuracyReport:
    """Returns what the mean and the gain are of."""
    return report.accuracy

  def summary(self, report: client_metrics.Report) -> dict[str, Any]:
    """Returns what summary.json says of a report."""
    return report.summary()

  def further_numbers(
      self, model: Model, report: Callable[[str], None]
  ) -> dict[str, Any]:
    """Returns what summary.json says of a trained model beside that.

    Args:
      model: What came out of training.
      report: Called with a line for the user if a number is not defined.
    """
    del model, report
    return {}


class _Drawn(Protocol):
  """Groups that are drawn from classes that training never saw, or the like."""

  has_groups = True

  @property
  def draw(self):
    way, num_clients = self._config.evaluation.group_sizes()
    return group_evaluation.GroupProtocol(
        role='meta_test',
        way=way,
        num_clients=num_clients,
        deployment=_DEPLOYMENTS.get(self.name, 'iid'),
        num_groups=self._config.evaluation.eval_groups,
        seed=self._config.seed,
        num_seen=way * 3 // 5 if self.name in _MIXED else 0,
        shots=self._config.evaluation.eval_shots,
    )

  def _validation_draw(self):
    """Groups like these, but of classes that the final test does not have."""
    draw = dataclasses.replace(
        self.draw,
        role='meta_validation',
        num_groups=self._config.training.validation_groups,
    )
    draw.sample(self._pools, 0)
    return draw

  @property
  def _pools(self) -> groups_lib.ClassPools:
    pools = self._experiment.dataset.class_pools
    assert pools is not None, f'{self.name} is not offered'
    return pools

  @property
  def is_offered(self):
    return self.has_use and self._experiment.dataset.class_pools is not None

  def check(self):
    self.draw.sample(self._pools, 0)


class _GroupTests:
  """What asks new groups, traced once for all their protocols."""

  def __init__(self, experiment: experiment_lib.Experiment):
    self._experiment = experiment

  @functools.cached_property
  def own(self):
    """Asks a group what it learned with the algorithm."""
    return self._build(self._experiment.group_method)

  @functools.cached_property
  def reference(self):
    """Asks what it learned from random weights, in as many rounds."""
    experiment, spec = self._experiment, registry.get(registry.REFERENCE)
    config = experiment.config.evaluation.reference_hparams
    rounds_field = experiment.spec.group_rounds_field
    if rounds_field is not None:
      assert spec.group_rounds_field is not None
      rounds = getattr(experiment.config.hparams, rounds_field)
      config = dataclasses.replace(config, **{spec.group_rounds_field: rounds})
    way, _ = experiment.config.evaluation.group_sizes()
    return self._build(spec.method(experiment.model, config, way))

  def _build(self, method):
    return group_evaluation.build_group_test(method.group())


class _NewGroups(_Drawn):
  """Groups with new classes, each with one model for all its clients."""

  use = 'group'

  def __init__(self, name, experiment, tests: _GroupTests):
    super().__init__(name, experiment)
    self._tests = tests

  def test(self, model, *, with_curve=False):
    del with_curve  # Groups have none.
    return self._evaluate(self._tests.own, model, self.draw)

  def on_the_way(self):
    if not self.is_offered:
      return None
    draw = self._validation_draw()
    return (
        f'{protocol_names.VALIDATED_AS[self.name]}/accuracy',
        lambda model: self._evaluate(self._tests.own, model, draw),
    )

  def references(self):
    return super().references() | {
        _REFERENCE_FROM_SCRATCH: lambda model: self._evaluate(
            self._tests.reference, model, self.draw
        )
    }

  def summary(self, report):
    summary = report.summary()
    num_clients = summary['num_groups'] * self.draw.num_clients
    return summary | {'num_clients': num_clients}

  def _evaluate(self, group_test, model, draw):
    return group_evaluation.evaluate_groups(
        group_test, model.weights, self._pools, draw
    )


class _ClientTests:
  """What asks clients with a model each; what is traced once is used again."""

  def __init__(
      self,
      config: run_config.RunConfig,
      build: Callable[[], personalizer_lib.ClientPersonalizer],
      *,
      has_memories: bool = False,
  ):
    """Takes what builds the use, and whether clients may have memories."""
    self._config = config
    self._build = build
    self._has_memories = has_memories
    self._traced = functools.cache(self._trace)

  def _trace(
      self, is_final: bool, with_curve: bool
  ) -> tuple[personalizer_lib.ClientPersonalizer, Callable[..., Any]]:
    """Returns what a client does, and the traced function that tests it."""
    personalizer = self._build()
    final = is_final or personalizer.adapts_during_training
    shown = with_curve and personalizer.curve is not None
    if (final, shown) != (is_final, with_curve):
      return self._traced(final, shown)  # The same, traced once.
    if not final:
      personalizer = personalizer.during_training()
    return personalizer, client_evaluation.build_client_test(
        personalizer, with_curve=with_curve
    )

  def evaluate(
      self,
      model: Model,
      tasks: Iterable[client_evaluation.ClientTask],
      num_tasks: int,
      *,
      is_final: bool = True,
      with_curve: bool = False,
  ) -> client_metrics.Report:
    """Tests clients; only `is_final` they do what is for the end alone."""
    personalizer, client_test = self._traced(is_final, with_curve)
    return client_evaluation.evaluate_clients(
        client_test,
        model.weights,
        model.memories.of if self._has_memories else lambda _: (),
        tasks,
        seed=self._config.seed,
        bank=model.memories.bank if personalizer.uses_bank else (),
        restrict_f1=self._config.evaluation.restrict_f1_to_client_labels,
        num_tasks=num_tasks,
    )


class _NewClassClients(_Drawn):
  """Clients of groups with new classes, each with a model of its own."""

  use = 'new_class'

  def __init__(self, name, experiment):
    super().__init__(name, experiment)
    self._tests = _ClientTests(
        experiment.config, lambda: experiment.group_method.new_class()
    )

  def test(self, model, *, with_curve=False):
    return self._evaluate(model, self.draw, with_curve=with_curve)

  def on_the_way(self):
    if not self.is_offered:
      return None
    draw = self._validation_draw()
    return (
        f'{protocol_names.VALIDATED_AS[self.name]}/accuracy',
        lambda model: self._evaluate(model, draw, is_final=False),
    )

  def accuracies(self, report):
    return report.by_group(self.draw.num_clients)

  def summary(self, report):
    summary = report.summary()
    # The mean and its interval are over groups, all else over clients.
    by_group = self.accuracies(report).summary()
    by_group['accuracy_micro'] = summary['accuracy_micro']
    return summary | by_group | {'num_groups': self.draw.num_groups}

  def _evaluate(self, model, draw, **options):
    tasks = client_evaluation.new_class_tasks(self._pools, draw)
    num_tasks = draw.num_groups * draw.num_clients
    return self._tests.evaluate(model, tasks, num_tasks, **options)


class _Dealt(Protocol):
  """Clients of the data set, with the classes of training."""

  has_groups = False
  role: ClassVar[str]

  def __init__(self, name, experiment):
    super().__init__(name, experiment)
    self._tests = _ClientTests(
        experiment.config,
        lambda: getattr(experiment.method, self.use)(),
        has_memories=self.role == 'meta_train',
    )

  @property
  def draw(self) -> client_evaluation.ClientProtocol:
    return client_evaluation.ClientProtocol(
        role=self.role,
        part='test',
        support_fraction=self._config.evaluation.eval_support_fraction,
        seed=self._config.seed,
        shots=self._config.evaluation.eval_shots,
    )

  @property
  def is_offered(self):
    return self.has_use and self._anybody_has('test')

  def _anybody_has(self, part):
    dataset = self._experiment.dataset
    return any(
        dataset.num_examples(client_id, part)
        for client_id in dataset.client_ids(self.role)
    )

  def check(self):
    pass  # Who is offered has test examples.

  def test(self, model, *, with_curve=False):
    return self._evaluate(model, self.draw, with_curve=with_curve)

  def _evaluate(self, model, draw, **options):
    dataset = self._experiment.dataset
    num_tasks = len(draw.client_ids(dataset))
    return self._tests.evaluate(
        model, draw.tasks(dataset), num_tasks, **options
    )

  def _test_on_the_way(self, draw: client_evaluation.ClientProtocol) -> Test:
    """Returns a test of so many of these clients as there are at most."""
    most = self._config.training.validation_clients
    draw = dataclasses.replace(draw, most=most)
    return lambda model: self._evaluate(model, draw, is_final=False)


class _NewClients(_Dealt):
  """Clients that training never saw."""

  use = 'new_client'
  role = 'meta_test'

  def on_the_way(self):
    is_wanted = self._config.training.eval_new_clients
    if not (is_wanted and self.is_offered):
      return None
    return f'{self.name}/accuracy', self._test_on_the_way(self.draw)


class _KnownClients(_Dealt):
  """The training clients, with what they have kept."""

  use = 'known_client'
  role = 'meta_train'

  def check(self):
    if self._config.evaluation.nvar:
      embeddings.check_can_embed(self._experiment)

  def on_the_way(self):
    draw, column = self.draw, f'{self.name}/accuracy'
    if not self.has_use:
      return None
    if self._anybody_has('validation'):
      column = f'{protocol_names.VALIDATED_AS[self.name]}/accuracy'
      draw = dataclasses.replace(draw, part='validation', support_fraction=None)
    elif self._config.training.select_best:
      raise ValueError(
          'Expected validation examples to select the best round on, found'
          ' none. Tip: --validation_fraction=0.2.'
      )
    elif not self.is_offered:
      return None
    return column, self._test_on_the_way(draw)

  def further_numbers(self, model, report):
    if not self._config.evaluation.nvar:
      return {}
    examples = embeddings.embed_test_examples(self._experiment, *model)
    try:
      return {'nvar': normalized_variance.normalized_variance(*examples)}
    except ValueError as error:  # Training has diverged, or units are dead.
      report(f'No nVAR of {self.name} (--nvar): {error}')
      return {'nvar': None}


def protocols_of(
    experiment: experiment_lib.Experiment,
) -> dict[str, Protocol]:
  """Returns those of all names, offered or not.

  Args:
    experiment: What a configuration stands for.
  """
  tests = _GroupTests(experiment)
  return {
      name: _NewGroups(name, experiment, tests) for name in _DEPLOYMENTS
  } | {
      name: kind(name, experiment)
      for name, kind in (
          (KNOWN_CLIENTS, _KnownClients),
          (NEW_CLIENTS, _NewClients),
          (NEW_CLASS_CLIENTS, _NewClassClients),
      )
  }
