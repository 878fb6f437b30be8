"""The fully resolved configuration of a run.

In memory it comes in groups; in config.json, in checkpoints and as flags it is
flat, so no two fields have the same name, whatever their groups.
"""

from collections.abc import Collection, Mapping
import dataclasses
import json
import typing
from typing import Any, Literal

from tff_meta import aggregation as aggregation_lib
from tff_meta import config_checks
from tff_meta import datasets
from tff_meta import models
from tff_meta import privacy
from tff_meta import registry
from tff_meta import spelling
from tff_meta.data import availability
from tff_meta.data import class_splits
from tff_meta.data import partitioners
from tff_meta.datasets import own_data
from tff_meta.training import hyperparameters
from tff_meta.training import partitions

FEW_ROUND = partitioners.FEW_ROUND
PRESETS = registry.PRESETS

# What a continuation takes from its run unless it is told otherwise.
FIELDS_OF_THE_RUN = (
    'eval_every',
    'validation_groups',
    'validation_clients',
    'eval_new_clients',
    'shards',
)
# Shards of a run over workers of Ray that says nothing else: enough for four.
_SHARDS_OF_RAY = 16

# Who is tested where a run evaluates on the way without having been asked to.
_FEW_GROUPS, _FEW_CLIENTS = 5, 20

# What `resolve` takes as text, `name=value,...`.
_TEXTS = (
    'hparams',
    'reference_hparams',
    'dataset_options',
    'partition_options',
    'augmentation',
    'aggregation_options',
)
# What nothing else tells, so that None is no value of it.
_NEEDED = ('algorithm', 'dataset', 'rounds', 'seed')

# Fields that may differ between a run and its continuation: none of them
# changes the weights or metrics.csv of the rounds that are done.
FREE_FIELDS = (
    'rounds',
    'checkpoint_every',
    'patience',
    'target_epsilon',
    'data_dir',
    'protocols',
    'eval_groups',
    'references',
    'reference_hparams',
    'nvar',
    'plugins',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """Which clients there are, and which examples they have.

  Attributes:
    dataset: Name in `tff_meta.datasets.DATASETS`, or `KIND:PATH`.
    dataset_options: Further arguments of the data set's loader.
    data_dir: Where the data set is; None for its default place. Records of runs
      leave it out.
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
  """

  dataset: str
  dataset_options: Mapping[str, Any]
  data_dir: str | None = None
  partition: str
  partition_options: Mapping[str, Any]
  test_fraction: float | None
  stratify: bool
  deal_test_images: bool = True
  validation_fraction: float
  num_clients: int
  num_new_clients: int
  new_clients: Literal['held_out', 'redealt']

  def __post_init__(self):
    partitioners.PARTITIONERS.check(self.partition)
    _check_fields(self, at_least_one=('num_clients',))
    if self.partition == FEW_ROUND:
      self._check_few_round()
    elif self.test_fraction is None and not self.deal_test_images:
      raise ValueError(
          'Expected a `test_fraction` where `deal_test_images` is False and'
          ' clients have no published test images, found None.'
      )

  @property
  def num_held_out(self) -> int:
    """How many new clients are dealt examples together with the others."""
    return self.num_new_clients if self.new_clients == 'held_out' else 0

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
  """What a run does up to its last round.

  Attributes:
    augmentation: Fields of `augmentation.CropAndFlip` but `fill`, how images
      are varied in training; None for not at all.
    clients_per_round: Clients in a round's cohort.
    absent_clients: Share of clients of a cohort, on average, that are not
      there, see `availability.Availability`.
    late_clients: That answer too late.
    slow_clients: That manage half of their examples.
    rounds: Communication rounds of the whole run.
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
    validation_clients: Clients of an evaluation on the way at most, of known
      ones and of new ones; None for all.
    eval_new_clients: Whether new clients are evaluated on the way, too; no
      round is selected by them.
    execution: Where TFF computations run: in this process, in TFF's own worker
      (`'native'`), or in this process with clients over workers of Ray, which
      computes the same as `'in_process'` with as many `shards`.
    driver: What goes through the rounds: our `'loop'`, or
      `tff.learning.programs.train_model` (`'program'`).
    aggregation: How everything that clients send is aggregated: a name in
      `aggregation.BY_NAME`.
    aggregation_options: Fields of that class.
    target_epsilon: The largest epsilon that the run may have, above 0; None for
      any. Of `aggregation` `'dp'` alone.
    batched_clients: How many clients that are alike are computed together, 1
      for one after the other. Only rounding depends on it, but that does, so a
      continuation must share it.
    shards: To how many shards a round's clients are dealt, each summed up by
      itself. Only rounding depends on it, but a continuation must share it.
  """

  augmentation: Mapping[str, Any] | None = None
  clients_per_round: int
  absent_clients: float = 0.0
  late_clients: float = 0.0
  slow_clients: float = 0.0
  rounds: int
  checkpoint_every: int
  eval_every: int
  eval_from: int = 0
  select_best: bool
  select_by: Literal['macro', 'micro']
  patience: int
  validation_groups: int
  validation_clients: int | None = None
  eval_new_clients: bool = False
  execution: Literal['in_process', 'native', 'ray']
  driver: Literal['loop', 'program'] = 'loop'
  aggregation: str = 'plain'
  aggregation_options: Mapping[str, Any] = dataclasses.field(
      default_factory=dict
  )
  target_epsilon: float | None = None
  batched_clients: int = 1
  shards: int = 1

  def __post_init__(self):
    _check_fields(
        self,
        at_least_one=(
            'clients_per_round',
            'rounds',
            'checkpoint_every',
            'validation_groups',
            'batched_clients',
            'shards',
        ),
    )
    available = self.availability()  # Raises if its shares make no sense.
    if self.driver == 'program' and not available.is_full:
      raise ValueError(
          "Expected `driver` 'loop' with `absent_clients`, `late_clients` or"
          " `slow_clients`, found 'program', whose cohorts have a fixed size."
      )
    aggregation = self.aggregator()
    if isinstance(aggregation, aggregation_lib.DifferentiallyPrivate):
      expected = aggregation.clients_per_round
      if expected != self.clients_per_round:
        raise ValueError(
            'Expected `clients_per_round` of the aggregation to be that of the'
            f' run, {self.clients_per_round}, found {expected}.'
        )
    elif self.target_epsilon is not None:
      raise ValueError(
          "Expected `aggregation` 'dp' with a `target_epsilon`, found"
          f' {self.aggregation!r}, which has no epsilon.'
      )
    if self.validation_clients is not None and self.validation_clients < 1:
      raise ValueError(
          'Expected `validation_clients` of at least 1, or None for all, found'
          f' {self.validation_clients}.'
      )
    for name in ('batched_clients', 'shards'):
      if self.execution == 'native' and getattr(self, name) > 1:
        raise ValueError(
            f"Expected `execution` 'in_process' with `{name}`"
            f' {getattr(self, name)}, found native.'
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
    if self.driver == 'program' and (self.eval_every or self.patience):
      raise ValueError(
          "Expected `driver` 'loop' with an evaluation on the way, found"
          f" 'program' and `eval_every` {self.eval_every}. Tip: --eval_every=0."
      )
    if self.select_best and not self.eval_every:
      raise ValueError(
          'Expected `eval_every` to be at least 1 with `select_best`, found 0.'
      )
    for name, default in (('select_by', 'macro'), ('patience', 0)):
      value = getattr(self, name)
      if value != default and not self.select_best:
        raise ValueError(
            f'Expected `select_best` with `{name}` {value!r}, found none: no'
            ' round is selected.'
        )

  def availability(self) -> availability.Availability:
    """Returns how often clients are not there."""
    return availability.Availability(
        self.absent_clients, self.late_clients, self.slow_clients
    )

  def aggregator(self) -> aggregation_lib.Aggregation:
    """Returns how everything that clients send is aggregated."""
    kind = aggregation_lib.BY_NAME.find(self.aggregation)
    return kind(**self.aggregation_options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
  """How what came out of training is tested; a later evaluation may differ.

  Attributes:
    protocols: What to evaluate at the end; see `training.protocols`.
    eval_groups: Groups of an evaluation at the end.
    references: Whether the evaluation at the end also tests what the trained
      model is compared with: the untrained one and, in new groups, the
      algorithm `registry.REFERENCE`.
    reference_hparams: The configuration of that algorithm.
    eval_support_fraction: None for clients to adapt on their train part and be
      tested on their test part; otherwise the share of the test part that they
      adapt on, the rest being tested on.
    eval_shots: Examples of a class that a tested client adapts on: of a client
      of a group exactly so many of every class that it holds, of others so many
      at most. None for all that it has to adapt on.
    restrict_f1_to_client_labels: Whether a prediction that a client has no
      label for does not bring its class into the macro-F1.
    curve: Whether accuracy is measured after every step of adaptation, too.
    nvar: Whether the evaluation of known clients at the end measures how widely
      the classes of their test examples spread, too.
    way: Classes of a group; None where no groups can be drawn.
    group_clients: Clients of a group; None where no groups can be drawn.
  """

  protocols: tuple[str, ...]
  eval_groups: int
  references: bool = True
  reference_hparams: Any
  eval_support_fraction: float | None
  eval_shots: int | None = None
  restrict_f1_to_client_labels: bool
  curve: bool
  nvar: bool = False
  way: int | None
  group_clients: int | None

  def __post_init__(self):
    _check_fields(self, at_least_one=('eval_groups',))
    fraction = self.eval_support_fraction
    if fraction is not None and not 0 < fraction < 1:
      raise ValueError(
          'Expected `eval_support_fraction` to be between 0 and 1, found'
          f' {fraction}.'
      )
    if self.eval_shots is not None and self.eval_shots < 1:
      raise ValueError(
          'Expected `eval_shots` to be at least 1, or None for all, found'
          f' {self.eval_shots}.'
      )

  def group_sizes(self) -> tuple[int, int]:
    """Returns the numbers of classes and of clients of a group.

    Raises:
      ValueError: If no groups can be drawn.
    """
    if self.way is None or self.group_clients is None:
      raise ValueError(
          'Expected `way` and `group_clients` where groups are drawn and the'
          f' data set has none of its own, found {self.way} and'
          f' {self.group_clients}. Tip: --way=5 --group_clients=10.'
      )
    return self.way, self.group_clients


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Everything that decides what a run does; nothing is left to default later.

  To add a setting, add a field to the class where it belongs, and a flag of the
  same name to a program. The field's default is what runs did before there was
  a choice: they are read with it. Other fields have none.

  Attributes:
    algorithm: Name in `tff_meta.registry.ALGORITHMS`.
    preset: Which of the algorithm's configurations `hparams` started from.
    hparams: The algorithm's configuration.
    model: Name in `tff_meta.models.MODELS`, or `MODULE:FUNCTION`.
    seed: Of the partition, the cohorts, the initial weights, local training
      and the evaluation; 0..2**31-1.
    data: Which clients there are.
    training: What happens up to the last round.
    evaluation: How the outcome is tested.
    plugins: Modules that were imported for what they register.
  """

  algorithm: str
  preset: str
  hparams: Any
  model: str
  seed: int
  data: DataConfig
  training: TrainingConfig
  evaluation: EvaluationConfig
  plugins: tuple[str, ...] = ()

  def __post_init__(self):
    models.check(self.model)
    _check_fields(self)
    if self.training.clients_per_round > self.data.num_clients:
      raise ValueError(
          'Expected `clients_per_round` to be at most `num_clients`,'
          f' {self.data.num_clients}, found {self.training.clients_per_round}.'
      )
    if (
        self.data.new_clients == 'redealt'
        and self.evaluation.eval_support_fraction is None
    ):
      raise ValueError(
          "Expected an `eval_support_fraction` with `new_clients` 'redealt',"
          ' whose examples are all in their test part, found none.'
      )
    self._check_algorithm(registry.get(self.algorithm))

  def _check_algorithm(self, spec: registry.AlgorithmSpec) -> None:
    """Checks what the algorithm has to know of the run, and bears."""
    num_clients = self.data.num_clients
    if spec.num_clients_field is not None:
      known = getattr(self.hparams, spec.num_clients_field)
      if known != num_clients:
        raise ValueError(
            f'Expected `{spec.num_clients_field}` of {self.algorithm} to be'
            f' that of the run, {num_clients}, found {known}.'
        )
    group_clients = self.evaluation.group_clients
    if spec.kept_clients_field is not None and group_clients is not None:
      kept = getattr(self.hparams, spec.kept_clients_field)
      if kept >= group_clients:
        raise ValueError(
            'Expected `group_clients` to be more than'
            f' `{spec.kept_clients_field}`, {kept}, found {group_clients}:'
            ' nobody would be chosen. Tip:'
            f' --group_clients={2 * kept} has twice as many to choose from.'
        )
    why_not = spec.refused_aggregations.get(self.training.aggregation)
    if why_not is not None:
      raise ValueError(
          f'Expected `aggregation` of {self.algorithm} as one that covers all'
          f' that clients send, found {self.training.aggregation!r}: {why_not}.'
      )
    if (
        spec.rounds_per_cohort(self.hparams) > 1
        and self.training.aggregator().compares_rounds
    ):
      raise ValueError(
          f'Expected `aggregation` of {self.algorithm} as one that takes every'
          ' round by itself, since the rounds of a cohort change different'
          f' things, found {self.training.aggregator()}, which holds a round to'
          ' the ones before. Tip: --aggregation_options=rule=adaptive.'
      )
    private = self._private()
    if private is not None:
      private.check_can_estimate(num_parts=1)  # Channels are parts, too.
      self._releases(self.training.rounds).check(
          private.noise_multiplier, private.delta, self.training.target_epsilon
      )

  def _private(self) -> aggregation_lib.DifferentiallyPrivate | None:
    """Returns the aggregation if it is a private one."""
    aggregation = self.training.aggregator()
    if isinstance(aggregation, aggregation_lib.DifferentiallyPrivate):
      return aggregation
    return None

  def _releases(self, rounds: int) -> privacy.Releases:
    """Returns what clients send in so many rounds."""
    return privacy.Releases(
        self.data.num_clients,
        self.training.clients_per_round,
        rounds,
        registry.get(self.algorithm).rounds_per_cohort(self.hparams),
    )

  def privacy(self, rounds: int) -> dict[str, Any] | None:
    """Returns the differential privacy of the run's first rounds, as JSON.

    Args:
      rounds: How many, at least 1.

    Returns:
      `epsilon`, and what it depends on; None where nothing is private.
    """
    private = self._private()
    if private is None:
      return None
    releases = self._releases(rounds)
    return {
        'epsilon': releases.epsilon(private.noise_multiplier, private.delta),
        'delta': private.delta,
        'noise_multiplier': private.noise_multiplier,
        **dataclasses.asdict(releases),
    }

  def flat(self) -> dict[str, Any]:
    """Returns all fields by name, whatever their groups."""
    values = vars(self).copy()
    for group in _GROUPS:
      values |= vars(values.pop(group))
    return values

  def replace(self, **changes: Any) -> 'RunConfig':
    """Returns the configuration with other values of fields.

    Args:
      **changes: Field -> value, whatever the field's group.
    """
    changes = {k: config_checks.to_python(v) for k, v in changes.items()}
    return _grouped(self.flat() | changes)

  def to_json(self) -> dict[str, Any]:
    """Returns all fields as JSON values, whatever their groups."""
    # There and back: JSON makes lists of tuples, wherever they are.
    values = json.loads(json.dumps(dataclasses.asdict(self)))
    for group in _GROUPS:
      values |= values.pop(group)
    return values

  def identity(self) -> dict[str, Any]:
    """Returns the part that a continuation must share, as JSON values."""
    return identity(self.to_json())


_GROUPS = {
    'data': DataConfig,
    'training': TrainingConfig,
    'evaluation': EvaluationConfig,
}
_FIELDS = [
    field
    for kind in (RunConfig, *_GROUPS.values())
    for field in dataclasses.fields(kind)
    if field.name not in _GROUPS
]
FIELDS = tuple(field.name for field in _FIELDS)
_HINTS = {
    name: str if name in _TEXTS else hint
    for kind in (RunConfig, *_GROUPS.values())
    for name, hint in typing.get_type_hints(kind).items()
}
# What runs of before do not have -> what they did.
_LATER_FIELDS = {
    field.name: field.default
    for field in _FIELDS
    if field.default is not dataclasses.MISSING
} | {
    field.name: field.default_factory()
    for field in _FIELDS
    if field.default_factory is not dataclasses.MISSING
}


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
  """Raises a ValueError if a value is none of the choices."""
  if value not in choices:
    raise ValueError(
        f'Expected `{name}` to be one of {", ".join(choices)}, found'
        f' {value!r}.{spelling.tip(value, choices)}'
    )


def _check_fields(config: Any, at_least_one: Collection[str] = ()) -> None:
  """Checks that fields are of their kind, and the range of whole numbers."""
  for name, hint in typing.get_type_hints(type(config)).items():
    value = getattr(config, name)
    config_checks.check_kind(name, value, hint)
    if typing.get_origin(hint) is Literal:
      _check_choice(name, value, typing.get_args(hint))
    elif hint is int and not int(name in at_least_one) <= value < 2**31:
      raise ValueError(
          f'Expected `{name}` to be at least {int(name in at_least_one)} and'
          f' below 2**31, found {value}.'
      )


def _grouped(values: Mapping[str, Any]) -> RunConfig:
  """Returns the configuration with these values of all fields.

  Raises:
    TypeError: If one is missing or unknown.
    ValueError: If one is impossible.
  """
  rest, groups = dict(values), {}
  for group, kind in _GROUPS.items():
    names = [field.name for field in dataclasses.fields(kind)]
    groups[group] = kind(**{n: rest.pop(n) for n in names if n in rest})
  return RunConfig(**rest, **groups)


def identity(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the part of a configuration that a continuation must share.

  Args:
    values: As JSON values.
  """
  found = {k: v for k, v in values.items() if k not in FREE_FIELDS}
  if found.get('execution') == 'ray':  # Which computes the same.
    found['execution'] = 'in_process'
  return found


def from_json(values: Any) -> RunConfig:
  """Returns the configuration that `to_json` was called on.

  Raises:
    ValueError: If `values` is not one, e.g. of another version.
  """
  try:
    values = upgrade(values)
    preset = registry.get(values['algorithm']).presets[values['preset']]
    hparams = {k: _to_tuple(v) for k, v in values['hparams'].items()}
    reference = registry.get(registry.REFERENCE).presets[values['preset']]
    return _grouped(
        {k: _to_tuple(v) for k, v in values.items()}
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

  Choices that were added are as they were before there was one, hyperparameters
  as their preset has them. Those that an algorithm no longer has are left out
  where their value was what it always does now.

  Args:
    values: What `to_json` or `identity` returned, of this version or an earlier
      one.

  Raises:
    AttributeError, KeyError, TypeError, ValueError: If it is nothing like it.
  """
  found = json.loads(json.dumps(_LATER_FIELDS)) | dict(values)
  spec = registry.get(found['algorithm'])
  preset = dataclasses.asdict(spec.presets[found['preset']])
  aggregation = aggregation_lib.BY_NAME.find(found['aggregation'])
  found['aggregation_options'] = (
      dataclasses.asdict(aggregation()) | found['aggregation_options']
  )
  found['hparams'] = json.loads(json.dumps(preset)) | {
      name: value
      for name, value in found['hparams'].items()
      if (name, value) not in spec.former_fields.items()
  }
  earlier_options = datasets.get(found['dataset']).earlier_options
  if earlier_options:
    options = found['dataset_options']
    found['dataset_options'] = {**earlier_options(options), **options}
  return found


def _to_tuple(value):
  """Returns lists, which JSON makes of tuples, as tuples again."""
  return tuple(value) if isinstance(value, list) else value


def settings_of_the_run(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a continuation takes from its run unless told otherwise.

  Args:
    values: The run's configuration as JSON values, of whatever version.
  """
  found = _LATER_FIELDS | dict(values)
  return {name: found[name] for name in FIELDS_OF_THE_RUN if name in found}


def _evaluations_on_the_way(
    given: Mapping[str, Any], rounds_per_cohort: int
) -> dict[str, Any]:
  """Returns how often, and on whom, a run is evaluated on the way.

  By default ten times, on so few groups and clients that it takes little of the
  run's time; not at all if nothing is to be evaluated at the end, either. Where
  it is asked for, or a round is selected by it, all count.

  Args:
    given: Values of fields as `resolve` takes them.
    rounds_per_cohort: Rounds of an episode: evaluations come at its end.
  """
  every, is_few = given.get('eval_every'), False
  if every is None:
    rounds = given.get('rounds', 1)
    num_episodes = max(1, rounds // 10 // rounds_per_cohort)
    every = min(rounds, num_episodes * rounds_per_cohort)
    if (
        tuple(given.get('protocols', ())) == ('none',)
        or given.get('driver') == 'program'
    ):
      every = 0
    is_few = bool(every) and not given.get('select_best')
  return {
      'eval_every': every,
      'validation_groups': _FEW_GROUPS if is_few else 20,
      'validation_clients': _FEW_CLIENTS if is_few else None,
      'eval_new_clients': bool(every),
  }


def few_round_tip(data: DataConfig) -> str:
  """Returns what to do to have groups with new classes."""
  if data.dataset_options.get('client'):
    return _without_clients(data.dataset_options, FEW_ROUND) + (
        f' That takes at least {class_splits.LEAST_CLASSES} classes.'
    )
  is_own = own_data.is_own(data.dataset)
  is_own = is_own or datasets.get(data.dataset).partition is not None
  if is_own and data.partition == 'by_writer':
    return ' Tip: other data; these say themselves who their clients are.'
  return f' Tip: --partition={FEW_ROUND} has groups with new classes.'


def _without_clients(options: Mapping[str, Any], partition: str) -> str:
  if not options.get('client'):
    return ''
  return (
      ' Tip: leave out client= in --dataset_options (`fit` takes npz:PATH'
      f' instead of a mapping), so that --partition={partition} can deal the'
      ' examples to clients of its own.'
  )


def of_their_kinds(flags: Mapping[str, Any]) -> dict[str, Any]:
  """Returns values of fields as `resolve` takes them, of the fields' kinds.

  Args:
    flags: As for `resolve`.

  Returns:
    The same without those that are None, as `config_checks.to_python` has them.

  Raises:
    ValueError: If one is of another kind than its field.
  """
  values = {k: config_checks.to_python(v) for k, v in flags.items()}
  given = {k: v for k, v in values.items() if v is not None or k in _NEEDED}
  for name, value in given.items():
    config_checks.check_kind(name, value, _HINTS.get(name, Any))
  return given


def notes_on_hparams(algorithm: str, text: str) -> list[str]:
  """Returns a sentence on each hyperparameter that has no effect.

  Args:
    algorithm: Its name.
    text: The hyperparameters that are given, as `resolve` takes them.
  """
  spec = registry.get(algorithm)
  given = hyperparameters.assignments(text, spec.hparam_names(), of=algorithm)
  return [
      f'Note: the hyperparameter {name} has no effect: {algorithm} does not'
      ' read it.'
      for name in spec.without_effect(given)
  ]


def resolve(**flags: Any) -> RunConfig:
  """Fills in what was left to the algorithm and to the data set.

  Args:
    **flags: Values of fields of the configuration and its groups as flags give
      them: `hparams`, `reference_hparams`, `dataset_options`,
      `partition_options` and `augmentation` are text, `name=value,...`. None is
      as if it was not given: what suits the algorithm or the data set.

  Raises:
    TypeError: If a field is unknown, or not given and nothing suits it.
    ValueError: If a name is unknown, or a value of another kind than its field
      or impossible.
  """
  given = of_their_kinds(flags)
  algorithm = registry.get(given['algorithm'])
  dataset = datasets.get(given['dataset'])
  dataset_options = hyperparameters.parse_options(
      dataset.load, 2, given.get('dataset_options', '')
  )
  if dataset.look is not None:
    dataset = dataset.look(given.get('data_dir'), dataset_options)
  preset = given.get('preset', dataset.preset)
  if preset not in PRESETS:
    raise ValueError(
        f'Expected `preset` to be one of {", ".join(PRESETS)}, found'
        f' {preset!r}.'
    )
  only = dataset.partition
  partition = given.get('partition', only or algorithm.partition)
  if only and partition != only:
    raise ValueError(
        f'Expected `partition` to be {only!r} with the data set'
        f' {dataset.name!r}, which says itself who its clients are, found'
        f' {partition!r}.{_without_clients(dataset_options, partition)}'
    )
  groups, clients = dataset.few_round, dataset.clients
  if partition == FEW_ROUND and groups:
    clients = datasets.ClientDefaults(groups.num_clients, 0, groups.cohort_size)
  num_new_clients = given.get('num_new_clients', clients.num_new_clients)
  suitable_clients = clients.num_clients
  if clients.are_all:
    suitable_clients = max(1, suitable_clients - num_new_clients)
  num_clients = given.get('num_clients', suitable_clients)
  hparams = algorithm.presets[preset]
  if algorithm.num_clients_field is not None:
    hparams = dataclasses.replace(
        hparams, **{algorithm.num_clients_field: num_clients}
    )
  hparams = hyperparameters.override(
      hparams, given.get('hparams', ''), algorithm.name
  )
  own = {
      setting: getattr(hparams, field)
      for setting, field in algorithm.run_settings.items()
  }
  suitable = {
      'model': algorithm.model or dataset.default_model,
      'test_fraction': (
          None if partition == FEW_ROUND else dataset.test_fraction
      ),
      'num_clients': num_clients,
      'num_new_clients': num_new_clients,
      'clients_per_round': min(clients.cohort_size, num_clients),
      'way': groups and groups.way,
      'group_clients': groups and groups.cohort_size,
      'eval_groups': 100,
      'eval_support_fraction': own.get('eval_support_fraction') or None,
      'restrict_f1_to_client_labels': own.get(
          'restrict_f1_to_client_labels', False
      ),
      'curve': False,
      'shards': _SHARDS_OF_RAY if given.get('execution') == 'ray' else 1,
  } | _evaluations_on_the_way(given, algorithm.rounds_per_cohort(hparams))
  aggregation: Any = aggregation_lib.BY_NAME.find(
      given.get('aggregation', 'plain')
  )()
  if isinstance(aggregation, aggregation_lib.DifferentiallyPrivate):
    aggregation = dataclasses.replace(
        aggregation,
        clients_per_round=given.get(
            'clients_per_round', suitable['clients_per_round']
        ),
    )
  read = {
      'aggregation_options': dataclasses.asdict(
          hyperparameters.override(
              aggregation, given.get('aggregation_options', '')
          )
      ),
      'preset': preset,
      'hparams': hparams,
      'reference_hparams': hyperparameters.override(
          registry.get(registry.REFERENCE).presets[preset],
          given.get('reference_hparams', ''),
          registry.REFERENCE,
      ),
      'dataset_options': dataset_options,
      'augmentation': hyperparameters.parse_augmentation(
          given.get('augmentation', '')
      ),
      'partition': partition,
      'partition_options': partitions.read_options(
          partition,
          given.get('partition_options', ''),
          groups.examples_per_class if groups else None,
      ),
  }
  return _grouped(suitable | given | read)
