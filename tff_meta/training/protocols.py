"""What a trained model is evaluated on, by name.

* `new_groups`: groups of clients with classes that training never saw, each
  client with few of them (FRL's non-IID deployment);
* `new_groups_iid`: the same classes, every client with all of them;
* `new_groups_mixed`, `new_groups_mixed_iid`: the same, but three fifths of the
  classes, rounded down, are those of training (FRL's Table 3: 3 of 5);
* `known_clients`: the training clients' own held-out test examples.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from tff_meta import registry
from tff_meta.evaluation import accuracy
from tff_meta.evaluation import few_round
from tff_meta.evaluation import known_clients
from tff_meta.training import client_memories
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import loop

NONE = 'none'
KNOWN_CLIENTS = 'known_clients'
_DEPLOYMENTS = {
    'new_groups': 'non_iid',
    'new_groups_iid': 'iid',
    'new_groups_mixed': 'non_iid',
    'new_groups_mixed_iid': 'iid',
}
_MIXED = ('new_groups_mixed', 'new_groups_mixed_iid')
PROTOCOLS = (*_DEPLOYMENTS, KNOWN_CLIENTS)
# What is run where no protocols were asked for.
DEFAULT_PROTOCOLS = ('new_groups', KNOWN_CLIENTS)

_SCRATCH = 'fed_avg'


class Evaluator:
  """Runs protocols; what TensorFlow has traced once is used again."""

  def __init__(self, experiment: experiment_lib.Experiment):
    """Looks up what the algorithm and the data set offer."""
    self._experiment = experiment
    self._config = experiment.config
    spec, dataset = experiment.spec, experiment.dataset
    offered = []
    if spec.build_group_personalizer and dataset.class_pools:
      offered += list(_DEPLOYMENTS)
    if spec.build_client_personalizer and self._clients_with_tests():
      offered.append(KNOWN_CLIENTS)
    self.offered = tuple(offered)

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
        )
      if name not in self.offered:
        raise ValueError(
            f'Expected protocols that {self._config.algorithm!r} on'
            f' {self._config.dataset!r} with partition'
            f' {self._config.partition!r} offers:'
            f' {", ".join(self.offered) or "none"}; found {name!r}.'
        )
      if name in _DEPLOYMENTS:
        self.group_protocol(name).sample(
            self._experiment.dataset.class_pools, 0
        )
    return tuple(names)

  def group_protocol(self, name: str) -> few_round.GroupProtocol:
    """Returns the groups of a protocol of new groups."""
    config = self._config
    return few_round.GroupProtocol(
        role='meta_test',
        way=config.way,
        num_clients=config.group_clients,
        deployment=_DEPLOYMENTS[name],
        num_groups=config.eval_groups,
        seed=config.seed,
        num_seen=config.way * 3 // 5 if name in _MIXED else 0,
    )

  def evaluate(
      self,
      name: str,
      weights: Any,
      untrained_weights: Any,
      memories: client_memories.ClientMemories,
  ) -> dict[str, Any]:
    """Runs a protocol.

    Args:
      name: One that is offered.
      weights: Trained weights.
      untrained_weights: The weights that training began with.

    Returns:
      What goes into summary.json: the accuracy's mean, interval and counts; and
      under `references` the same of others in the very same groups, with `gain`
      and `gain_half_width_95`, the mean and 95 % half width of the difference
      to them group by group.
    """
    if name == KNOWN_CLIENTS:
      report = self._evaluate_clients(weights)
      return report.summary() | {'num_clients': len(report.accuracies)}
    protocol = self.group_protocol(name)
    own = self._evaluate_groups(self._own_accuracy, weights, protocol)
    references = {}
    if self._config.algorithm != _SCRATCH:  # Which ignores what was trained.
      references['untrained'] = self._evaluate_groups(
          self._own_accuracy, untrained_weights, protocol
      )
      references['fed_avg_from_scratch'] = self._evaluate_groups(
          self._scratch_accuracy, weights, protocol
      )
    return _group_summary(own) | {
        'references': {
            name: _group_summary(report) | _gain(own, report)
            for name, report in references.items()
        }
    }

  def on_the_way(self) -> loop.Evaluation:
    """Returns a cheaper evaluation for during training.

    Groups are drawn from the meta-validation classes, so that nothing is chosen
    on the classes of the final test. Without groups it is `known_clients`.

    Raises:
      ValueError: If the algorithm and the data set offer neither.
    """
    if set(_DEPLOYMENTS) & set(self.offered):
      protocol = dataclasses.replace(
          self.group_protocol('new_groups'),
          role='meta_validation',
          num_groups=self._config.validation_groups,
      )
      protocol.sample(self._experiment.dataset.class_pools, 0)
      name = 'validation_groups/accuracy'
      measure = functools.partial(self._measure_groups, protocol)
    elif KNOWN_CLIENTS in self.offered:
      name = f'{KNOWN_CLIENTS}/accuracy'
      measure = self._evaluate_clients
    else:
      raise ValueError(
          f'Expected `eval_every` to be 0, found {self._config.eval_every}:'
          f' {self._config.algorithm!r} with partition'
          f' {self._config.partition!r} offers nothing to evaluate.'
      )
    return loop.Evaluation(
        (name,), lambda weights, _: {name: measure(weights.trainable).mean}
    )

  def _measure_groups(self, protocol, weights) -> accuracy.AccuracyReport:
    return self._evaluate_groups(self._own_accuracy, weights, protocol)

  def _evaluate_groups(
      self, group_accuracy, weights, protocol
  ) -> accuracy.AccuracyReport:
    pools = self._experiment.dataset.class_pools
    return few_round.evaluate_groups(group_accuracy, weights, pools, protocol)

  @functools.cached_property
  def _own_accuracy(self) -> Callable[..., Any]:
    """How good the algorithm's own personalizer is in a group."""
    return few_round.build_group_accuracy(
        self._experiment.spec.build_group_personalizer(
            self._experiment.model, self._config.hparams, way=self._config.way
        )
    )

  @functools.cached_property
  def _scratch_accuracy(self) -> Callable[..., Any]:
    """How good FedAvg from random weights is, in as many rounds."""
    config = dataclasses.replace(
        self._config.reference_hparams, rounds=self._config.hparams.rounds
    )
    return few_round.build_group_accuracy(
        registry.get(_SCRATCH).build_group_personalizer(
            self._experiment.model, config, way=self._config.way
        )
    )

  @functools.cached_property
  def _client_accuracy(self) -> Callable[..., Any]:
    """How good the algorithm's own personalizer is for a client."""
    return known_clients.build_client_accuracy(
        self._experiment.spec.build_client_personalizer(
            self._experiment.model,
            self._config.hparams,
            num_classes=self._experiment.dataset.num_classes,
        )
    )

  def _evaluate_clients(self, weights) -> accuracy.AccuracyReport:
    dataset = self._experiment.dataset
    return known_clients.evaluate_clients(
        self._client_accuracy,
        weights,
        dataset,
        dataset.client_ids(),
        self._config.seed,
    )

  def _clients_with_tests(self) -> bool:
    dataset = self._experiment.dataset
    return any(dataset.num_examples(c, 'test') for c in dataset.client_ids())


def _group_summary(report: accuracy.AccuracyReport) -> dict[str, Any]:
  return report.summary() | {'num_groups': len(report.accuracies)}


def _gain(
    own: accuracy.AccuracyReport, reference: accuracy.AccuracyReport
) -> dict[str, Any]:
  """Returns the paired difference to a reference in the same groups."""
  difference = own._replace(accuracies=own.accuracies - reference.accuracies)
  return {
      'gain': difference.mean,
      'gain_half_width_95': difference.half_width,
  }


def format_table(evaluation: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the evaluation of a summary as a table to print."""
  lines = []
  for name, result in evaluation.items():
    count = result.get('num_groups') or result['num_clients']
    unit = 'groups' if 'num_groups' in result else 'clients'
    lines.append(f'{name} ({count} {unit}, accuracy +- 95 % interval, percent)')
    rows = {'trained': result, **result.get('references', {})}
    for row, values in rows.items():
      line = f'  {_LABELS.get(row, row):24}' + _percent(
          values['accuracy_mean'], values['accuracy_half_width_95']
      )
      if 'gain' in values:
        gain = _percent(values['gain'], values['gain_half_width_95'])
        line += f'   trained gains {gain}'
      lines.append(line)
  return '\n'.join(lines)


def _percent(mean: float, half_width: float | None) -> str:
  width = 'unknown' if half_width is None else f'{100 * half_width:.2f}'
  return f'{100 * mean:6.2f} +- {width}'


_LABELS = {
    'trained': 'trained model',
    'untrained': 'initial model, untrained',
    'fed_avg_from_scratch': 'FedAvg from scratch',
}
