"""What a trained model is evaluated on, by name.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_meta import registry
from tff_meta import spelling
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import accuracy
from tff_meta.evaluation import client_metrics
from tff_meta.evaluation import clients as client_evaluation
from tff_meta.evaluation import groups as group_evaluation
from tff_meta.evaluation import normalized_variance
from tff_meta.learners import personalizer as personalizer_lib
from tff_meta.training import atomic_files
from tff_meta.training import client_memories
from tff_meta.training import client_state_store
from tff_meta.training import embeddings
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import loop
from tff_meta.training import run_config

NONE = 'none'
KNOWN_CLIENTS = 'known_clients'
NEW_CLIENTS = 'new_clients'
NEW_CLASS_CLIENTS = 'new_class_clients'
_DEPLOYMENTS = {
    'new_groups': 'non_iid',
    'new_groups_iid': 'iid',
    'new_groups_mixed': 'non_iid',
    'new_groups_mixed_iid': 'iid',
}
_MIXED = ('new_groups_mixed', 'new_groups_mixed_iid')
_ROLES = {KNOWN_CLIENTS: 'meta_train', NEW_CLIENTS: 'meta_test'}
PROTOCOLS = (*_DEPLOYMENTS, *_ROLES, NEW_CLASS_CLIENTS)
# What is run where no protocols were asked for.
DEFAULT_PROTOCOLS = ('new_groups', *_ROLES, NEW_CLASS_CLIENTS)

# Columns of metrics.csv: means over groups or clients. With `_MICRO` added they
# are means over all their examples.
_VALIDATION_GROUPS = 'validation_groups/accuracy'
_VALIDATION_CLASSES = 'validation_new_class_clients/accuracy'
_VALIDATION_CLIENTS = 'validation_clients/accuracy'
_TEST_CLIENTS = f'{KNOWN_CLIENTS}/accuracy'
_MICRO = '_micro'
_GROUP_COLUMNS = {
    'new_groups': _VALIDATION_GROUPS,
    NEW_CLASS_CLIENTS: _VALIDATION_CLASSES,
}
_SCRATCH = 'fed_avg'
# Where an algorithm has no use for what was trained.
_UNUSED = {_SCRATCH: tuple(_DEPLOYMENTS), 'local': (NEW_CLIENTS,)}
TRAINED, _UNTRAINED = 'trained', 'untrained'
FROM_SCRATCH, _FED_AVG_FROM_SCRATCH = 'from_scratch', 'fed_avg_from_scratch'
_ROUNDS = {'': '', '_best': ', best round'}
LABELS = {
    TRAINED: 'trained model',
    _UNTRAINED: 'initial model, untrained',
    FROM_SCRATCH: 'from scratch',
    _FED_AVG_FROM_SCRATCH: 'FedAvg from scratch',
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


def check_has_known_clients(chosen: Sequence[str]) -> None:
  """Raises a ValueError if known clients, whom nVAR is of, are not chosen."""
  if KNOWN_CLIENTS not in chosen:
    raise ValueError(
        f'Expected {KNOWN_CLIENTS} to be evaluated with --nvar, found'
        f' {", ".join(chosen) or NONE}.'
    )


class Evaluator:
  """Runs protocols; what TensorFlow has traced once is used again."""

  def __init__(self, experiment: experiment_lib.Experiment):
    """Looks up what the algorithm and the data set offer."""
    self._experiment = experiment
    self._config = experiment.config
    self._client_use = functools.cache(self._build_client_use)
    spec, dataset = experiment.spec, experiment.dataset
    offered = []
    if spec.build_group_personalizer and dataset.class_pools:
      offered += list(_DEPLOYMENTS)
    if spec.build_known_client_personalizer and self._tested(KNOWN_CLIENTS):
      offered.append(KNOWN_CLIENTS)
    if spec.build_new_client_personalizer and self._tested(NEW_CLIENTS):
      offered.append(NEW_CLIENTS)
    if spec.build_new_class_personalizer and dataset.class_pools:
      offered.append(NEW_CLASS_CLIENTS)
    self.offered = tuple(offered)

  def check_has_groups(self, **sizes: int | None) -> None:
    """Raises a ValueError if sizes of groups are given and there are no groups.

    Args:
      **sizes: Of groups, such as `way`; None where none is given.
    """
    given = ', '.join(f'{k} {v}' for k, v in sizes.items() if v is not None)
    if given and not set(self.offered) - set(_ROLES):
      raise ValueError(
          f'Expected no sizes of groups, as {self._config.algorithm!r} with'
          f' partition {self._config.partition!r} is tested in none, found'
          f' {given}.'
      )

  def why_nothing(self) -> str:
    """Returns why nothing is offered, and what to do."""
    spec, partition = self._experiment.spec, self._config.partition
    is_for_clients = (
        spec.build_known_client_personalizer
        or spec.build_new_client_personalizer
    )
    if partition != run_config.FEW_ROUND and is_for_clients:
      return (
          'no client has examples to be tested on. Tip: without --test_fraction'
          ' they get the published ones, with a larger one more of their own.'
      )
    tip = 'shards has clients to know'
    if partition != run_config.FEW_ROUND:
      tip = f'{run_config.FEW_ROUND} has groups with new classes'
    return (
        f'{self._config.algorithm} has no use for clients of partition'
        f' {partition}. Tip: --partition={tip}.'
    )

  def _tested(self, name: str, part: str = 'test') -> bool:
    """Returns whether any client of a role has examples to be tested on."""
    dataset = self._experiment.dataset
    ids = dataset.client_ids(_ROLES[name])
    return any(dataset.num_examples(client_id, part) for client_id in ids)

  def choose(self, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the protocols to run, having checked that they can be run.

    Args:
      names: Protocols. An empty sequence stands for those of
        `DEFAULT_PROTOCOLS` that are offered, `('none',)` for no protocol.

    Raises:
      ValueError: If one is unknown or not offered, or the data are not enough.
    """
    if tuple(names) == (NONE,):
      return ()
    if not names:
      names = [name for name in DEFAULT_PROTOCOLS if name in self.offered]
    for name in names:
      if name not in PROTOCOLS:
        raise ValueError(
            f'Expected protocols of {", ".join(PROTOCOLS)}, found {name!r}.'
            f'{spelling.tip(name, PROTOCOLS)}'
        )
      if name not in self.offered:
        raise ValueError(
            f'Expected protocols that {self._config.algorithm!r} on'
            f' {self._config.dataset!r} with partition'
            f' {self._config.partition!r} offers:'
            f' {", ".join(self.offered) or "none"}; found {name!r}.'
            + ' Tip: with a `test_fraction` of 0 clients have no test examples.'
            * (self._config.test_fraction == 0)
        )
      if name not in _ROLES:
        self.group_protocol(name).sample(self._pools, 0)
    if self._config.nvar and KNOWN_CLIENTS in names:
      embeddings.check_can_embed(self._experiment)
    return tuple(names)

  @property
  def _pools(self) -> groups_lib.ClassPools:
    return self._experiment.dataset.class_pools

  def group_protocol(self, name: str) -> group_evaluation.GroupProtocol:
    """Returns the groups of a protocol of new groups or new classes."""
    config = self._config
    return group_evaluation.GroupProtocol(
        role='meta_test',
        way=config.way,
        num_clients=config.group_clients,
        deployment=_DEPLOYMENTS.get(name, 'iid'),
        num_groups=config.eval_groups,
        seed=config.seed,
        num_seen=config.way * 3 // 5 if name in _MIXED else 0,
    )

  def client_protocol(self, name: str) -> client_evaluation.ClientProtocol:
    """Returns the clients of a protocol of single clients."""
    return client_evaluation.ClientProtocol(
        role=_ROLES[name],
        part='test',
        support_fraction=self._config.eval_support_fraction,
        seed=self._config.seed,
    )

  def evaluate_all(
      self,
      names: Iterable[str],
      trained: Mapping[str, Model],
      untrained: Model,
      directory: pathlib.Path,
      report: Callable[[str], None],
  ) -> dict[str, dict[str, dict[str, Any]]]:
    """Runs protocols; writes files with a line a client or group.

    These are `clients_NAMESUFFIX.csv` or, for new groups,
    `groups_NAMESUFFIX.csv`.

    Args:
      names: Protocols that are offered.
      trained: Suffix, '' or '_best' -> what came out of training, of the last
        round or the best. Where both are one object it is evaluated once.
      untrained: What training began with.
      directory: Where the files go.
      report: Called with a line for the user before anything that takes long.

    Returns:
      Suffix -> name -> what goes into summary.json, see `evaluate`.
    """
    summaries = {suffix: {} for suffix in trained}
    for name in names:
      results = self.evaluate(name, trained, untrained, report)
      for suffix, (summary, own) in results.items():
        summaries[suffix][name] = summary
        path = directory / f'{own.unit}s_{name}{suffix}.csv'
        atomic_files.write_bytes(path, own.to_csv())
    return summaries

  def evaluate(
      self,
      name: str,
      trained: Mapping[str, Model],
      untrained: Model,
      report: Callable[[str], None],
  ) -> dict[str, tuple[dict[str, Any], client_metrics.Report]]:
    """Runs a protocol.

    Args:
      name: One that is offered.
      trained: As for `evaluate_all`.
      untrained: What training began with.
      report: As for `evaluate_all`.

    Returns:
      Suffix -> what goes into summary.json, and the report behind it. The
      former has the same keys for all protocols (see
      `client_metrics.Report.summary`); `starts_from_scratch`; and under
      `references`, if the configuration asks for them, the same of others in
      the very same groups or clients, with `gain` and `gain_half_width_95`, the
      mean and 95 % half width of the difference to them group by group or
      client by client. With the configuration's `nvar` known clients have
      `nvar`, too, see `normalized_variance`; None where that is not defined.
    """
    if self.starts_from_scratch(name):
      report(f'Evaluating {name}: {LABELS[FROM_SCRATCH]}.')
      own = self._report(name, untrained, with_curve=self._config.curve)
      self._report_no_curve(name, own, report)
      return {suffix: (self._summary(name, own, {}), own) for suffix in trained}
    references = self._references(name, untrained, report)
    results = {}
    for suffix, of_round in trained.items():
      done = [s for s in results if trained[s] is of_round]
      if done:
        results[suffix] = results[done[0]]
        continue
      report(f'Evaluating {name}: {LABELS[TRAINED]}{_ROUNDS[suffix]}.')
      own = self._report(name, of_round, with_curve=self._config.curve)
      summary = self._summary(name, own, references)
      if self._config.nvar and name == KNOWN_CLIENTS:
        summary['nvar'] = self._nvar(of_round, report)
      results[suffix] = summary, own
    self._report_no_curve(name, own, report)
    num_idle = int((own.num_support == 0).sum())
    if num_idle:
      report(
          f'Warning: {num_idle} of {len(own.ids)} {own.unit}s of {name} had no'
          ' examples to adapt on, and count nevertheless.'
      )
    return results

  def _nvar(self, trained: Model, report) -> float | None:
    """Returns that of known clients' test examples, None if there is none."""
    examples = embeddings.embed_test_examples(self._experiment, *trained)
    try:
      return normalized_variance.normalized_variance(*examples)
    except ValueError as error:  # Training has diverged, or units are dead.
      report(f'No nVAR of {KNOWN_CLIENTS} (--nvar): {error}')
      return None

  def _report_no_curve(self, name, own, report) -> None:
    if self._config.curve and own.curves is None:
      report(
          f'No curve of {name} (--curve): {self._config.algorithm} keeps none'
          ' there.'
      )

  def _references(
      self, name: str, untrained: Model, report: Callable[[str], None]
  ) -> dict[str, client_metrics.Report]:
    """Runs a protocol for what is the same whatever was trained."""
    if not self._config.references:
      return {}
    references = {_UNTRAINED: self._report}
    if name in _DEPLOYMENTS:
      references[_FED_AVG_FROM_SCRATCH] = self._scratch_report
    reports = {}
    for other, of in references.items():
      report(f'Evaluating {name}: {LABELS[other]}.')
      reports[other] = of(name, untrained)
    return reports

  def starts_from_scratch(self, name: str) -> bool:
    """Returns whether the algorithm has no use there for what was trained.

    FedAvg begins with random weights in a new group, Local in a new client.
    """
    return name in _UNUSED.get(self._config.algorithm, ())

  def check_on_the_way(self) -> str:
    """Returns the column of metrics.csv that `on_the_way` fills.

    Raises:
      ValueError: If the algorithm and the data set offer nothing for it, or
        there is nothing to select the best round on.
    """
    column, _, _ = self._choose_on_the_way()
    return column

  def _choose_on_the_way(self) -> tuple[str, str, Any]:
    """Returns the column, and which protocol fills it run on what."""
    for name, column in _GROUP_COLUMNS.items():
      if name in self.offered:
        groups = dataclasses.replace(
            self.group_protocol(name),
            role='meta_validation',
            num_groups=self._config.validation_groups,
        )
        groups.sample(self._pools, 0)
        return column, name, groups
    if self._experiment.spec.build_known_client_personalizer:
      clients = self.client_protocol(KNOWN_CLIENTS)
      if self._tested(KNOWN_CLIENTS, 'validation'):
        clients = dataclasses.replace(
            clients, part='validation', support_fraction=None
        )
        return _VALIDATION_CLIENTS, KNOWN_CLIENTS, clients
      if self._config.select_best:
        raise ValueError(
            'Expected validation examples to select the best round on, found'
            ' none. Tip: --validation_fraction=0.2.'
        )
      if KNOWN_CLIENTS in self.offered:
        return _TEST_CLIENTS, KNOWN_CLIENTS, clients
    raise ValueError(
        f'Expected `eval_every` to be 0, found {self._config.eval_every}:'
        f' {self._config.algorithm!r} with partition'
        f' {self._config.partition!r} offers nothing to evaluate.'
    )

  def on_the_way(
      self, process: tff.learning.templates.LearningProcess
  ) -> loop.Evaluation:
    """Returns a cheaper evaluation for during training.

    Groups, or else their clients, are those of `new_groups` or
    `new_class_clients`, but of meta-validation classes, so that nothing is
    chosen on the classes of the final test. Without groups it is known clients:
    those with validation examples adapt on their train part and are tested on
    them; where nobody has any, they are tested as in `known_clients`.

    Args:
      process: What is trained.

    Raises:
      ValueError: As `check_on_the_way`.
    """
    macro, name, protocol = self._choose_on_the_way()
    micro = macro + _MICRO

    def measure(weights, client_states):
      memories = client_memories.ClientMemories(process, client_states)
      trained = Model(weights.trainable, memories)
      report = self._report(name, trained, protocol)
      return {
          macro: self._accuracies(name, report).mean,
          micro: report.accuracy.micro,
      }

    best_by = {'macro': macro, 'micro': micro}[self._config.select_by]
    return loop.Evaluation(
        (macro, micro), measure, best_by if self._config.select_best else None
    )

  def _report(
      self,
      name: str,
      trained: Model,
      protocol: Any = None,
      with_curve: bool = False,
  ) -> client_metrics.Report:
    """Tests groups or clients; `protocol` is for during training."""
    if name in _DEPLOYMENTS:
      protocol = protocol or self.group_protocol(name)
      return self._group_report(self._own_test, trained, protocol)
    return self._client_report(name, trained, protocol, with_curve)

  def _scratch_report(
      self, name: str, untrained: Model
  ) -> client_metrics.Report:
    return self._group_report(
        self._scratch_test, untrained, self.group_protocol(name)
    )

  def _group_report(
      self, group_test, trained, protocol
  ) -> client_metrics.Report:
    return group_evaluation.evaluate_groups(
        group_test, trained.weights, self._pools, protocol
    )

  @functools.cached_property
  def _own_test(self) -> Callable[..., Any]:
    """Asks a group what it learned with the algorithm's own personalizer."""
    return group_evaluation.build_group_test(
        self._experiment.spec.build_group_personalizer(
            self._experiment.model, self._config.hparams, way=self._config.way
        )
    )

  @functools.cached_property
  def _scratch_test(self) -> Callable[..., Any]:
    """Asks what it learned with FedAvg from random weights, as many rounds."""
    config = dataclasses.replace(
        self._config.reference_hparams, rounds=self._config.hparams.rounds
    )
    return group_evaluation.build_group_test(
        registry.get(_SCRATCH).build_group_personalizer(
            self._experiment.model, config, way=self._config.way
        )
    )

  def _client_report(
      self,
      name: str,
      trained: Model,
      protocol: (
          client_evaluation.ClientProtocol
          | group_evaluation.GroupProtocol
          | None
      ),
      with_curve: bool,
  ) -> client_metrics.Report:
    """Tests clients; `protocol` is for during training."""
    is_final = protocol is None
    personalizer, client_test = self._client_use(name, is_final, with_curve)
    if name == NEW_CLASS_CLIENTS:
      tasks = client_evaluation.new_class_tasks(
          self._pools, protocol or self.group_protocol(name)
      )
    else:
      protocol = protocol or self.client_protocol(name)
      tasks = protocol.tasks(self._experiment.dataset)
    return client_evaluation.evaluate_clients(
        client_test,
        trained.weights,
        trained.memories.of if name == KNOWN_CLIENTS else lambda _: (),
        tasks,
        seed=self._config.seed,
        bank=trained.memories.bank if personalizer.uses_bank else (),
        restrict_f1=self._config.restrict_f1_to_client_labels,
    )

  def _build_client_use(
      self, name: str, is_final: bool, with_curve: bool
  ) -> tuple[personalizer_lib.ClientPersonalizer, Callable[..., Any]]:
    """Returns what a client does, and the traced function that tests it."""
    spec, dataset = self._experiment.spec, self._experiment.dataset
    build, num_classes = {
        KNOWN_CLIENTS: (
            spec.build_known_client_personalizer,
            dataset.num_classes,
        ),
        NEW_CLIENTS: (spec.build_new_client_personalizer, dataset.num_classes),
        NEW_CLASS_CLIENTS: (
            spec.build_new_class_personalizer,
            self._config.way,
        ),
    }[name]
    personalizer = build(
        self._experiment.model, self._config.hparams, num_classes=num_classes
    )
    final = is_final or personalizer.adapts_during_training
    shown = with_curve and personalizer.curve is not None
    if (final, shown) != (is_final, with_curve):
      return self._client_use(name, final, shown)  # The same, traced once.
    if not final:
      personalizer = personalizer.during_training()
    return personalizer, client_evaluation.build_client_test(
        personalizer, with_curve=with_curve
    )

  def _accuracies(self, name, report) -> accuracy.AccuracyReport:
    """What the mean and the gain are of: groups of clients, or clients."""
    if name == NEW_CLASS_CLIENTS:
      return report.by_group(self._config.group_clients)
    return report.accuracy

  def _summary(self, name, own, references) -> dict[str, Any]:
    """Returns what goes into summary.json."""
    accuracies = self._accuracies(name, own)
    return self._own_summary(name, own) | {
        'starts_from_scratch': self.starts_from_scratch(name),
        'references': {
            other: self._own_summary(name, report)
            | _gain(accuracies, self._accuracies(name, report))
            for other, report in references.items()
        },
    }

  def _own_summary(self, name, report) -> dict[str, Any]:
    summary = report.summary()
    if name == NEW_CLASS_CLIENTS:
      # The mean and its interval are over groups, all else over clients.
      by_group = self._accuracies(name, report).summary()
      summary |= by_group | {'accuracy_micro': summary['accuracy_micro']}
      summary['num_groups'] = self._config.eval_groups
    if name in _DEPLOYMENTS:
      num_clients = summary['num_groups'] * self._config.group_clients
      summary['num_clients'] = num_clients
    return summary


def _gain(
    own: accuracy.AccuracyReport, reference: accuracy.AccuracyReport
) -> dict[str, Any]:
  """Returns the paired difference to a reference in the same groups."""
  difference = own._replace(accuracies=own.accuracies - reference.accuracies)
  return {
      'gain': difference.mean,
      'gain_half_width_95': difference.half_width,
  }
