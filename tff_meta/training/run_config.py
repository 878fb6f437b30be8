"""The fully resolved configuration of a run."""

from collections.abc import Mapping
import dataclasses
import json
from typing import Any

from tff_meta import datasets
from tff_meta import models
from tff_meta import registry
from tff_meta import spelling
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.training import hyperparameters
from tff_meta.training import partitions

FEW_ROUND = partitioners.FEW_ROUND
EXECUTIONS = ('in_process', 'native')
AGGREGATIONS = ('plain', 'robust')
PRESETS = registry.PRESETS
SELECT_BY = ('macro', 'micro')

# Fields that may differ between a run and its continuation: none of them
# changes the weights or metrics.csv of the rounds that are done.
FREE_FIELDS = (
    'rounds',
    'checkpoint_every',
    'patience',
    'data_dir',
    'protocols',
    'eval_groups',
    'references',
    'reference_hparams',
    'nvar',
    'plugins',
)

# Fields that runs of older versions do not have -> what these did.
# Likewise of the free ones; kept copies of runs do not say where the data were.
LATER_FREE_FIELDS = {'nvar': False, 'plugins': [], 'data_dir': None}
_LATER_FIELDS = {'augmentation': None, 'deal_test_images': True}


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Everything that decides what a run does; nothing is left to default later.

  Attributes:
    algorithm: Name in `tff_meta.registry.ALGORITHMS`.
    preset: Which of the algorithm's configurations `hparams` started from.
    hparams: The algorithm's configuration.
    dataset: Name in `tff_meta.datasets.DATASETS`.
    dataset_options: Further arguments of the data set's loader.
    data_dir: Where the data set is; None for its default place.
    augmentation: Fields of `augmentation.CropAndFlip` but `fill`, how images
      are varied in training; None for not at all.
    model: Name in `tff_meta.models.MODELS`.
    partition: How training clients are made: `'few_round'` (of meta-train
      classes, two shards a client) or a name of `partitioners.PARTITIONERS`.
    partition_options: Further arguments of the partitioner.
    test_fraction: Share of each client's examples to test on; None deals the
      published test part to the clients. Always None with `'few_round'`.
    stratify: Whether that share is split off class by class.
    deal_test_images: Whether the published test part is dealt, too, with a
      `test_fraction` or `'few_round'` pooled with the train part.
    validation_fraction: Share of each client's examples to select on; 0 with
      `'few_round'`, which selects on groups of meta-validation classes.
    num_clients: Training clients.
    num_new_clients: Clients beside them that training never sees; 0 with
      `'few_round'`.
    new_clients: Where these come from, see `FederatedDataset.from_corpus`:
      `'held_out'` or `'redealt'`.
    clients_per_round: Clients in a round's cohort.
    rounds: Communication rounds of the whole run.
    seed: Of the partition, the cohorts, the initial weights, local training
      and the evaluation; 0..2**31-1.
    checkpoint_every: Rounds between checkpoints.
    eval_every: Rounds between evaluations on the way; 0 for none.
    eval_from: The first round that may be evaluated on the way.
    select_best: Whether the best round of these evaluations is evaluated at
      the end, too.
    select_by: By which mean of accuracies: `'macro'`, over clients or groups,
      or `'micro'`, over all their examples.
    patience: How often that mean may drop from one evaluation to the next after
      the best one, before training ends early; 0 for any number.
    validation_groups: Groups of an evaluation on the way.
    protocols: What to evaluate at the end; see `training.protocols`.
    eval_groups: Groups of an evaluation at the end.
    references: Whether the evaluation at the end also tests what the trained
      model is compared with: the untrained one and, in new groups, FedAvg.
    reference_hparams: Configuration of FedAvg, which a new group's accuracy is
      compared with.
    eval_support_fraction: None for clients to adapt on their train part and be
      tested on their test part; otherwise the share of the test part that they
      adapt on, the rest being tested on.
    restrict_f1_to_client_labels: Whether a prediction that a client has no
      label for does not bring its class into the macro-F1.
    curve: Whether accuracy is measured after every step of adaptation, too.
    nvar: Whether the evaluation of known clients at the end measures how widely
      the classes of their test examples spread, too.
    way: Classes of a group; None where no groups can be drawn.
    group_clients: Clients of a group; None where no groups can be drawn.
    execution: Where TFF computations run.
    aggregation: How the server takes the mean of the clients' updates:
      `'plain'`, or `'robust'`, which leaves out and cuts down what is much
      larger than most. In `to_json` only if it is not plain: runs from before
      there was another go on.
    batched_clients: How many clients that are alike are computed together, 1
      for one after the other. Only rounding depends on it, but that does, so a
      continuation must share it. In `to_json` only if it is not 1, likewise.
    plugins: Modules that were imported for what they register; runs of earlier
      versions have none.
  """

  algorithm: str
  preset: str
  hparams: Any
  dataset: str
  dataset_options: Mapping[str, Any]
  data_dir: str | None
  augmentation: Mapping[str, Any] | None
  model: str
  partition: str
  partition_options: Mapping[str, Any]
  test_fraction: float | None
  stratify: bool
  deal_test_images: bool
  validation_fraction: float
  num_clients: int
  num_new_clients: int
  new_clients: str
  clients_per_round: int
  rounds: int
  seed: int
  checkpoint_every: int
  eval_every: int
  eval_from: int
  select_best: bool
  select_by: str
  patience: int
  validation_groups: int
  protocols: tuple[str, ...]
  eval_groups: int
  references: bool
  reference_hparams: Any
  eval_support_fraction: float | None
  restrict_f1_to_client_labels: bool
  curve: bool
  nvar: bool
  way: int | None
  group_clients: int | None
  execution: str
  aggregation: str = AGGREGATIONS[0]
  batched_clients: int = 1
  plugins: tuple[str, ...] = ()

  def __post_init__(self):
    models.MODELS.check(self.model)
    partitioners.PARTITIONERS.check(self.partition)
    for name, value, choices in (
        ('new_clients', self.new_clients, federated_dataset.NEW_CLIENTS),
        ('select_by', self.select_by, SELECT_BY),
        ('execution', self.execution, EXECUTIONS),
        ('aggregation', self.aggregation, AGGREGATIONS),
    ):
      if value not in choices:
        raise ValueError(
            f'Expected `{name}` to be one of {", ".join(choices)}, found'
            f' {value!r}.{spelling.tip(value, choices)}'
        )
    for name, least in (
        ('num_clients', 1),
        ('num_new_clients', 0),
        ('clients_per_round', 1),
        ('rounds', 1),
        ('seed', 0),
        ('checkpoint_every', 1),
        ('eval_every', 0),
        ('eval_from', 0),
        ('patience', 0),
        ('validation_groups', 1),
        ('eval_groups', 1),
        ('batched_clients', 1),
    ):
      value = getattr(self, name)
      if not least <= value < 2**31:
        raise ValueError(
            f'Expected `{name}` to be at least {least} and below 2**31, found'
            f' {value}.'
        )
    if self.execution == 'native' and self.batched_clients > 1:
      raise ValueError(
          "Expected `execution` 'in_process' with `batched_clients`"
          f' {self.batched_clients}, found native.'
      )
    if self.clients_per_round > self.num_clients:
      raise ValueError(
          'Expected `clients_per_round` to be at most `num_clients`,'
          f' {self.num_clients}, found {self.clients_per_round}.'
      )
    known = getattr(self.hparams, 'num_clients', self.num_clients)
    if known != self.num_clients:
      raise ValueError(
          f'Expected `num_clients` of {self.algorithm} to be that of the run,'
          f' {self.num_clients}, found {known}.'
      )
    kept = getattr(self.hparams, 'kept_clients', None)
    if None not in (kept, self.group_clients) and kept >= self.group_clients:
      raise ValueError(
          f'Expected `group_clients` to be more than `kept_clients`, {kept},'
          f' found {self.group_clients}: nobody would be chosen. Tip:'
          f' --group_clients={2 * kept} has twice as many to choose from.'
      )
    channels = registry.get(self.algorithm).channels
    if self.aggregation != AGGREGATIONS[0] and channels:
      raise ValueError(
          f'Expected `aggregation` {AGGREGATIONS[0]!r} with {self.algorithm},'
          f' found {self.aggregation!r}: its clients also send {channels},'
          ' which it would not guard.'
      )
    if self.partition == FEW_ROUND:
      self._check_few_round()
    elif self.test_fraction is None and not self.deal_test_images:
      raise ValueError(
          'Expected a `test_fraction` where `deal_test_images` is False and'
          ' clients have no published test images, found None.'
      )
    fraction = self.eval_support_fraction
    if fraction is not None and not 0 < fraction < 1:
      raise ValueError(
          'Expected `eval_support_fraction` to be between 0 and 1, found'
          f' {fraction}.'
      )
    if self.new_clients == 'redealt' and fraction is None:
      raise ValueError(
          "Expected an `eval_support_fraction` with `new_clients` 'redealt',"
          ' whose examples are all in their test part, found none.'
      )
    if self.eval_from and not self.eval_every:
      raise ValueError(
          'Expected `eval_every` to be at least 1 with `eval_from`'
          f' {self.eval_from}, found 0.'
      )
    if self.eval_from and self.rounds // self.eval_every < (
        -(-self.eval_from // self.eval_every)
    ):
      raise ValueError(
          f'Expected `eval_every` {self.eval_every} to evaluate a round from'
          f' `eval_from` {self.eval_from} to the last, {self.rounds}, found'
          ' none. Tip: --eval_from=0.'
      )
    if self.select_best and not self.eval_every:
      raise ValueError(
          'Expected `eval_every` to be at least 1 with `select_best`, found 0.'
      )
    for name, default in (('select_by', SELECT_BY[0]), ('patience', 0)):
      value = getattr(self, name)
      if value != default and not self.select_best:
        raise ValueError(
            f'Expected `select_best` with `{name}` {value!r}, found none: no'
            ' round is selected.'
        )

  def _check_few_round(self):
    """Checks that nothing is asked for that this partition does not have."""
    for name, none in (
        ('test_fraction', None),
        ('validation_fraction', 0),
        ('num_new_clients', 0),
    ):
      if getattr(self, name) != none:
        raise ValueError(
            f"Expected no `{name}` with partition 'few_round', which trains on"
            f' all examples of its classes, found {getattr(self, name)}.'
        )

  def to_json(self) -> dict[str, Any]:
    """Returns the configuration as JSON values."""
    # There and back: JSON makes lists of tuples, wherever they are.
    values = json.loads(json.dumps(dataclasses.asdict(self)))
    if self.aggregation == AGGREGATIONS[0]:
      del values['aggregation']
    if self.batched_clients == 1:
      del values['batched_clients']
    return values

  def identity(self) -> dict[str, Any]:
    """Returns the part that a continuation must share, as JSON values."""
    return {k: v for k, v in self.to_json().items() if k not in FREE_FIELDS}


def from_json(values: Mapping[str, Any]) -> RunConfig:
  """Returns the configuration that `to_json` was called on.

  Raises:
    ValueError: If `values` is not one, e.g. of another version.
  """
  try:
    values = upgrade(LATER_FREE_FIELDS | dict(values))
    preset = registry.get(values['algorithm']).presets[values['preset']]
    hparams = {k: _to_tuple(v) for k, v in values['hparams'].items()}
    reference = registry.get(registry.REFERENCE).presets[values['preset']]
    return RunConfig(
        **{k: _to_tuple(v) for k, v in values.items()}
        | {
            'hparams': dataclasses.replace(preset, **hparams),
            'reference_hparams': type(reference)(**values['reference_hparams']),
        }
    )
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(
        'Expected the configuration of a run of this version of the library,'
        f' found one that it does not know ({error}).'
    ) from None


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a configuration of an earlier version in the terms of this one.

  Choices that were added are as they were before there was one. Hyperparameters
  that an algorithm no longer has are left out where their value was what it
  always does now.

  Args:
    values: What `to_json` or `identity` returned, of this version or an earlier
      one.

  Raises:
    AttributeError, KeyError, TypeError, ValueError: If it is nothing like it.
  """
  values = _LATER_FIELDS | dict(values)
  former = registry.get(values['algorithm']).former_fields
  hparams = values['hparams'].items()
  values['hparams'] = {
      k: v for k, v in hparams if k not in former or v != former[k]
  }
  earlier_options = datasets.get(values['dataset']).earlier_options
  if earlier_options:
    options = values['dataset_options']
    values['dataset_options'] = {**earlier_options(options), **options}
  return values


def _to_tuple(value):
  """Returns lists, which JSON makes of tuples, as tuples again."""
  return tuple(value) if isinstance(value, list) else value


def resolve(
    *,
    algorithm: str,
    preset: str | None,
    hparams: str,
    reference_hparams: str,
    dataset: str,
    dataset_options: str,
    augmentation: str,
    partition: str | None,
    partition_options: str,
    model: str | None,
    num_clients: int | None,
    num_new_clients: int | None,
    clients_per_round: int | None,
    way: int | None,
    group_clients: int | None,
    eval_support_fraction: float | None,
    restrict_f1_to_client_labels: bool | None,
    **given: Any,
) -> RunConfig:
  """Fills in what was left to the algorithm and to the data set.

  Args:
    algorithm: As in `RunConfig`.
    preset: As in `RunConfig`; None for the one that suits the data set.
    hparams: `name=value,...`, changes to the preset.
    reference_hparams: `name=value,...`, changes to FedAvg's preset.
    dataset: As in `RunConfig`.
    dataset_options: `name=value,...`.
    augmentation: `name=value,...`; empty for none.
    partition: As in `RunConfig`; None for the data set's only one, or else the
      algorithm's own.
    partition_options: `name=value,...`.
    model: As in `RunConfig`; None for the algorithm's own, or else the data
      set's.
    num_clients: As in `RunConfig`; None for the data set's own.
    num_new_clients: As in `RunConfig`; None for the data set's own.
    clients_per_round: As in `RunConfig`; None for the data set's own.
    way: As in `RunConfig`; None for the data set's own.
    group_clients: As in `RunConfig`; None for the data set's own.
    eval_support_fraction: As in `RunConfig`; None for the algorithm's own,
      where its configuration has such a field.
    restrict_f1_to_client_labels: The same.
    **given: The other fields of `RunConfig`, as they are.

  Raises:
    ValueError: If a name is unknown or a value impossible.
  """
  algorithm_spec = registry.get(algorithm)
  dataset_spec = datasets.get(dataset)
  if preset is None:
    preset = dataset_spec.preset
  if preset not in PRESETS:
    raise ValueError(
        f'Expected `preset` to be one of {", ".join(PRESETS)}, found'
        f' {preset!r}.'
    )
  only = dataset_spec.partition
  if partition is None:
    partition = only or algorithm_spec.partition
  if only and partition != only:
    raise ValueError(
        f'Expected `partition` to be {only!r} with the data set {dataset!r},'
        f' whose clients are dealt when it is loaded, found {partition!r}.'
    )
  groups, clients = dataset_spec.few_round, dataset_spec.clients
  if partition == FEW_ROUND and groups:
    clients = datasets.ClientDefaults(groups.num_clients, 0, groups.cohort_size)
  if num_clients is None:
    num_clients = clients.num_clients
  if num_new_clients is None:
    num_new_clients = clients.num_new_clients
  if clients_per_round is None:
    clients_per_round = min(clients.cohort_size, num_clients)
  if model is None:
    model = algorithm_spec.model or dataset_spec.default_model
  if way is None and groups:
    way = groups.way
  if group_clients is None and groups:
    group_clients = groups.cohort_size
  config = algorithm_spec.presets[preset]
  if hasattr(config, 'num_clients'):  # Of the algorithm: it has to know.
    config = dataclasses.replace(config, num_clients=num_clients)
  config = hyperparameters.override(config, hparams)
  if eval_support_fraction is None:
    # Of the algorithm's own 0 is none.
    eval_support_fraction = getattr(config, 'eval_support_fraction', 0) or None
  if restrict_f1_to_client_labels is None:
    restrict_f1_to_client_labels = getattr(
        config, 'f1_restrict_to_client_labels', False
    )
  return RunConfig(
      algorithm=algorithm,
      preset=preset,
      hparams=config,
      reference_hparams=hyperparameters.override(
          registry.get(registry.REFERENCE).presets[preset], reference_hparams
      ),
      dataset=dataset,
      dataset_options=hyperparameters.parse_options(
          dataset_spec.load, 2, dataset_options
      ),
      augmentation=_augmentation(augmentation),
      model=model,
      partition=partition,
      partition_options=partitions.read_options(
          partition,
          partition_options,
          groups.examples_per_class if groups else None,
      ),
      num_clients=num_clients,
      num_new_clients=num_new_clients,
      clients_per_round=clients_per_round,
      way=way,
      group_clients=group_clients,
      eval_support_fraction=eval_support_fraction,
      restrict_f1_to_client_labels=restrict_f1_to_client_labels,
      **given,
  )


def _augmentation(text: str) -> dict[str, Any] | None:
  """Returns the fields that `text` gives, the others as they leave images."""
  hints = {'crop_padding': int, 'flip': bool}
  given = hyperparameters.parse(text, hints, of='augmentation')
  off = {'crop_padding': 0, 'flip': False}
  return None if off | given == off else off | given
