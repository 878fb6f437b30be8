"""Tests what came out of training, at the end and on the way there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import pathlib
from typing import Any

import tensorflow_federated as tff

from tff_meta import registry
from tff_meta.evaluation import accuracy
from tff_meta.evaluation import client_metrics
from tff_meta.training import atomic_files
from tff_meta.training import client_memories
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import loop
from tff_meta.training import protocol_names
from tff_meta.training import protocols
from tff_meta.training import run_config

# The first that has whom to test is measured during training, and new clients.
_ON_THE_WAY = (
    protocols.NEW_GROUPS,
    protocols.NEW_CLASS_CLIENTS,
    protocols.KNOWN_CLIENTS,
)
# Settings that only tests of groups have, and only tests of clients.
_OF_GROUPS = 'way', 'group_clients'
_OF_CLIENTS = 'eval_support_fraction', 'restrict_f1_to_client_labels'
_MICRO = '_micro'  # Added to the name of a column: over all examples.
_ROUNDS = {'': '', '_best': ', best round'}


def check_has_known_clients(chosen: Sequence[str]) -> None:
  """Raises a ValueError if known clients, whom nVAR is of, are not chosen."""
  if protocols.KNOWN_CLIENTS not in chosen:
    raise ValueError(
        f'Expected {protocols.KNOWN_CLIENTS} to be evaluated with --nvar, found'
        f' {", ".join(chosen) or protocols.NONE}.'
    )


class _NobodyError(ValueError):
  """There is nobody to be tested on the way."""


class Evaluator:
  """Runs protocols; what TensorFlow has traced once is used again."""

  def __init__(self, experiment: experiment_lib.Experiment):
    """Looks up what the algorithm and the data set offer."""
    self._experiment = experiment
    self._config = experiment.config
    self.protocols = protocols.protocols_of(experiment)
    self.offered = tuple(
        name for name, protocol in self.protocols.items() if protocol.is_offered
    )

  def check_has_groups(self, **sizes: int | None) -> None:
    """Raises a ValueError if sizes of groups are given and there are no groups.

    Args:
      **sizes: Of groups, such as `way`; None where none is given.
    """
    given = ', '.join(f'{k} {v}' for k, v in sizes.items() if v is not None)
    if given and not any(self.protocols[n].has_groups for n in self.offered):
      raise ValueError(
          f'Expected no sizes of groups, as {self._config.algorithm!r} with'
          f' partition {self._config.data.partition!r} is tested in none, found'
          f' {given}.'
      )

  def check_has_settings(self, tested: Sequence[str], **given: Any) -> None:
    """Raises a ValueError if a setting is given that nobody tested has.

    Args:
      tested: Names of protocols.
      **given: Settings of an evaluation; None where none is given.
    """
    for name, value in given.items():
      having = protocol_names.having(name)
      if value is not None and not set(having) & set(tested):
        raise ValueError(
            f'Expected one of {", ".join(having)} to be tested with --{name},'
            f' found {", ".join(dict.fromkeys(tested)) or protocols.NONE}.'
        )

  def check_nothing_is_in_vain(
      self,
      chosen: tuple[str, ...],
      on_the_way: bool,
      given: Mapping[str, Any],
      recorded: Mapping[str, Any],
  ) -> None:
    """Raises a ValueError if a run tests nobody who has what is asked for.

    Args:
      chosen: Protocols at the end, from `choose`.
      on_the_way: Whether somebody is tested on the way, too.
      given: Settings that are asked for; None where none is.
      recorded: Those of the run that goes on; empty where one begins.
    """
    self.check_has_groups(**{name: given.get(name) for name in _OF_GROUPS})
    if self._config.evaluation.nvar:  # Maybe of an evaluation to come.
      check_has_known_clients(chosen or self.offered)
    tested = chosen
    if on_the_way:
      self.check_on_the_way()
      tested += self.names_on_the_way()
    if chosen:  # Else they are for an evaluation to come.
      new = {n: given.get(n) for n in _OF_CLIENTS}
      new = {n: v for n, v in new.items() if v != recorded.get(n)}
      self.check_has_settings(tested, **new)

  def why_nothing(self) -> str:
    """Returns why nothing is offered, and what to do."""
    uses, partition = self._experiment.spec.uses, self._config.data.partition
    is_for_clients = 'known_client' in uses or 'new_client' in uses
    if partition != run_config.FEW_ROUND and is_for_clients:
      return (
          'no client has examples to be tested on. Tip: without --test_fraction'
          ' clients are tested on the test part, or on a fifth of their own; a'
          ' larger one takes more of their own.'
      )
    tip = ' Tip: --partition=shards has clients to know.'
    if partition != run_config.FEW_ROUND:
      tip = run_config.few_round_tip(self._config.data)
    return (
        f'{self._config.algorithm} has no use for clients of partition'
        f' {partition}.{tip}'
    )

  def choose(self, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the protocols to run, having checked that they can be run.

    Args:
      names: Protocols; one that comes twice is run once. An empty sequence
        stands for those of `DEFAULT_PROTOCOLS` that are offered, `('none',)`
        for no protocol.

    Raises:
      ValueError: If one is unknown or not offered, or the data are not enough.
    """
    if tuple(names) == (protocols.NONE,):
      return ()
    if not names:
      names = [
          name for name in protocols.DEFAULT_PROTOCOLS if name in self.offered
      ]
    protocol_names.check(names)
    for name in names:
      if name not in self.offered:
        raise ValueError(
            f'Expected protocols that {self._config.algorithm!r} on'
            f' {self._config.data.dataset!r} with partition'
            f' {self._config.data.partition!r} offers:'
            f' {", ".join(self.offered) or "none"}; found {name!r}.'
            f'{self._tip(name)}'
        )
      self.protocols[name].check()
    return tuple(dict.fromkeys(names))

  def check_uses(self, names: Iterable[str]) -> None:
    """Raises a ValueError if a use does not take the hyperparameters.

    Args:
      names: Protocols that are offered.
    """
    for name in names:
      protocol, of = self.protocols[name], self._experiment
      method = of.group_method if protocol.has_groups else of.method
      getattr(method, protocol.use)()

  def _tip(self, name: str) -> str:
    """Returns what to do to be offered a protocol."""
    protocol = self.protocols[name]
    if not protocol.has_use:
      others = [
          spec.name
          for spec in registry.ALGORITHMS.values()
          if protocol.use in spec.uses
      ]
      return f' Tip: algorithms that have it are {", ".join(others)}.'
    if protocol.has_groups:
      return run_config.few_round_tip(self._config.data)
    if self._config.data.test_fraction == 0:
      return ' Tip: with a `test_fraction` of 0 clients have no test examples.'
    if name == protocols.NEW_CLIENTS and self._config.data.num_new_clients == 0:
      return ' Tip: --num_new_clients=5 keeps five clients out of training.'
    return ''

  def evaluate_all(
      self,
      names: Iterable[str],
      trained: Mapping[str, protocols.Model],
      untrained: protocols.Model,
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
    summaries: dict[str, dict[str, dict[str, Any]]] = {s: {} for s in trained}
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
      trained: Mapping[str, protocols.Model],
      untrained: protocols.Model,
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
      mean of the difference to them group by group or client by client, and
      1.96 standard errors of it. With the configuration's `nvar` known clients
      have `nvar`, too, see `normalized_variance`; None where that is not
      defined.
    """
    protocol, curve = self.protocols[name], self._config.evaluation.curve
    if protocol.starts_from_scratch:
      _report_test(name, protocols.FROM_SCRATCH, report)
      own = protocol.test(untrained, with_curve=curve)
      self._report_no_curve(name, own, report)
      return {s: (_summary(protocol, own, {}), own) for s in trained}
    references = {}
    if self._config.evaluation.references:
      for row, test in protocol.references().items():
        _report_test(name, row, report)
        references[row] = test(untrained)
    results: dict[str, tuple[dict[str, Any], client_metrics.Report]] = {}
    for suffix, of_round in trained.items():
      done = [s for s in results if trained[s] is of_round]
      if done:
        results[suffix] = results[done[0]]
        continue
      _report_test(name, protocols.TRAINED, report, _ROUNDS[suffix])
      own = protocol.test(of_round, with_curve=curve)
      summary = _summary(protocol, own, references)
      summary |= protocol.further_numbers(of_round, report)
      results[suffix] = summary, own
    self._report_no_curve(name, own, report)
    num_idle = int((own.num_support == 0).sum())
    if num_idle:
      report(
          f'Warning: {num_idle} of {len(own.ids)} {own.unit}s of {name} had no'
          ' examples to adapt on, and count nevertheless.'
      )
    return results

  def _report_no_curve(self, name, own, report) -> None:
    if self._config.evaluation.curve and own.curves is None:
      report(
          f'No curve of {name} (--curve): {self._config.algorithm} keeps none'
          ' there.'
      )

  def check_on_the_way(self) -> str:
    """Returns the column of metrics.csv that `on_the_way` fills.

    Raises:
      ValueError: If the algorithm and the data set offer nothing for it, there
        is nothing to select the best round on, or patience would go by those
        to whom training makes no difference.
    """
    first, column, _ = self._choose_on_the_way()[0]
    if self._config.training.patience and first.starts_from_scratch:
      raise ValueError(
          'Expected no `patience` where what is measured does not depend on'
          f' training, found {self._config.training.patience}: in {first.name}'
          f' {self._config.algorithm} begins with random weights.'
      )
    return column

  def names_on_the_way(self) -> tuple[str, ...]:
    """Returns the protocols whose clients or groups `on_the_way` measures.

    Raises:
      ValueError: As `check_on_the_way`.
    """
    return tuple(p.name for p, _, _ in self._choose_on_the_way())

  def why_no_curve(self) -> str | None:
    """Returns why nobody is measured on the way unless that is asked for.

    None if somebody is. Who begins with random weights is not: what is trained
    makes no difference to the result, which would be the same every time.
    """
    try:
      first, _, _ = self._choose_on_the_way()[0]
    except _NobodyError:
      return (
          f'With partition {self._config.data.partition} there is nobody whom'
          f' {self._config.algorithm} could be tested with.'
      )
    except ValueError as error:
      return str(error)
    if not first.starts_from_scratch:
      return None
    return (
        f'In {first.name} {self._config.algorithm} begins with random weights,'
        ' whatever was trained.'
    )

  def _choose_on_the_way(
      self,
  ) -> list[tuple[protocols.Protocol, str, protocols.Test]]:
    """Returns whom to test, the columns of metrics.csv, and the tests.

    The first is what the best round is looked for by.
    """
    chosen: list[tuple[protocols.Protocol, str, protocols.Test]] = []
    for name in _ON_THE_WAY:
      found = self.protocols[name].on_the_way()
      if found is not None:
        chosen.append((self.protocols[name], *found))
        break
    new_clients = self.protocols[protocols.NEW_CLIENTS]
    found = new_clients.on_the_way()
    selects = self._config.training.select_best and not chosen
    if found is not None and not selects:
      if not (chosen and new_clients.starts_from_scratch):
        chosen.append((new_clients, *found))
    if chosen:
      return chosen
    raise _NobodyError(
        'Expected somebody to evaluate on the way, found nobody:'
        f' {self._config.algorithm!r} with partition'
        f' {self._config.data.partition!r} offers nothing. Tip:'
        ' --eval_every=0.'
    )

  def on_the_way(
      self, process: tff.learning.templates.LearningProcess
  ) -> loop.Evaluation:
    """Returns a cheaper evaluation for during training.

    Groups, or else their clients, are those of `new_groups` or
    `new_class_clients`, but of meta-validation classes, so that nothing is
    chosen on the classes of the final test. Without groups it is known clients:
    those with validation examples adapt on their train part and are tested on
    them; where nobody has any, they are tested as in `known_clients`. New
    clients are tested, too, if the configuration says so. The first column of
    each is a mean over groups or clients, the second over their examples.

    Args:
      process: What is trained.

    Raises:
      ValueError: As `check_on_the_way`.
    """
    chosen = self._choose_on_the_way()

    def measure(weights, client_states):
      memories = client_memories.ClientMemories(process, client_states)
      model = protocols.Model(weights.trainable, memories)
      measured = {}
      for protocol, column, test in chosen:
        report = test(model)
        measured[column] = protocol.accuracies(report).mean
        measured[column + _MICRO] = report.accuracy.micro
      return measured

    names = [n for _, macro, _ in chosen for n in (macro, macro + _MICRO)]
    training = self._config.training
    best_by = names[('macro', 'micro').index(training.select_by)]
    return loop.Evaluation(
        tuple(names), measure, best_by if training.select_best else None
    )


def _report_test(name, row, report, which_round='') -> None:
  report(f'Evaluating {name}: {protocols.LABELS[row]}{which_round}.')


def _summary(
    protocol: protocols.Protocol,
    own: client_metrics.Report,
    references: Mapping[str, client_metrics.Report],
) -> dict[str, Any]:
  """Returns what goes into summary.json."""
  accuracies = protocol.accuracies(own)
  return protocol.summary(own) | {
      'starts_from_scratch': protocol.starts_from_scratch,
      'references': {
          row: protocol.summary(report)
          | _gain(accuracies, protocol.accuracies(report))
          for row, report in references.items()
      },
  }


def _gain(
    own: accuracy.AccuracyReport, reference: accuracy.AccuracyReport
) -> dict[str, Any]:
  """Returns the paired difference to a reference in the same groups."""
  difference = own._replace(accuracies=own.accuracies - reference.accuracies)
  return {
      'gain': difference.mean,
      'gain_half_width_95': difference.half_width,
  }
