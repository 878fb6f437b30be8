"""The list of algorithms: name, paper, presets, how to build and to use each.

It is the only list; `register_algorithm` adds those from outside. Importing it
imports neither TensorFlow nor an algorithm; an `AlgorithmSpec` does when asked,
so that programs can show what there is at once.
"""

import ast
from collections.abc import Collection, Mapping
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
from typing import Any, TYPE_CHECKING

from tff_meta import catalog
from tff_meta import spelling

if TYPE_CHECKING:  # They import TensorFlow.
  from tff_meta import configurations
  from tff_meta import method as method_lib
  from tff_meta.models import model as model_lib

PRESETS = ('paper', 'release', 'demo')
USES = ('known_client', 'new_client', 'new_class', 'group')
# What new groups compare with, trained from scratch; and how it is written.
REFERENCE, REFERENCE_TITLE = 'fed_avg', 'FedAvg'
# What `tff_meta.fit` trains unless it is asked for something else.
DEFAULT = 'metavers'


@dataclasses.dataclass(frozen=True)
class AlgorithmSpec:
  """What the rest of the library knows of an algorithm.

  Attributes:
    name: What `--algorithm` takes.
    summary: One line.
    paper: Authors, venue and year.
    module_name: Where the algorithm is written.
    function: Name of its `(model, config, num_classes) -> Method` there; ''
      for that of the module itself.
    uses: What the trained model is for: which of `'known_client'`,
      `'new_client'`, `'new_class'` and `'group'` its `Method` has.
    partition: How training clients are made unless asked otherwise:
      `'few_round'` (of meta-train classes, two shards a client) or a name of
      `tff_meta.data.partitioners`.
    model: Name of the network in `tff_meta.models.MODELS` unless asked
      otherwise; None for the data set's own.
    changes: What a variant changes in the presets of its module.
    cohort_rounds_field: Field of the configuration that holds R where the
      cohort must stay for R + 1 consecutive rounds; None where every round
      draws its own.
    former_fields: Fields that the configuration had in earlier versions, with
      the value that means what the algorithm always does now.
    channels: What else than the change of one model decides what the server
      does next, of all that clients send: the names of its `Method`'s channels.
      None for nothing.
    refused_aggregations: Name in `aggregation.BY_NAME` -> why it cannot cover
      all that clients send.
    starts_from_scratch: Those of the uses that begin with random weights, so
      that what was trained makes no difference.
    gives_memories_to: Those of the uses that begin with what known clients have
      kept for themselves, which whoever has the use is then handed.
    group_rounds_field: Field of the configuration that holds R, the rounds of a
      new group; None where it has none.
    kept_clients_field: Field of the configuration that holds how many clients
      of a new group count in a round, which must be fewer than the group has;
      None where all do.
    num_clients_field: Field of the configuration that holds the number of all
      training clients, which a run fills in; None where it has none.
    run_settings: Settings of a run that are the algorithm's own unless a flag
      says otherwise, `'eval_support_fraction'` (of which 0 is none) or
      `'restrict_f1_to_client_labels'`, with the field that holds each.
    unused_fields: Fields of the configuration that others of its module read
      and it does not, with the values of its `changes`. Where a user gives one,
      a note says that it has no effect; runs have and record it all the same.
    own_statistics: Whether clients predict with statistics of their own where
      the network normalises a batch, so that no example changes another.
  """

  name: str
  summary: str
  paper: str
  module_name: str
  function: str = ''
  uses: tuple[str, ...] = ()
  partition: str = 'shards'
  model: str | None = None
  changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  cohort_rounds_field: str | None = None
  former_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  channels: str | None = None
  refused_aggregations: Mapping[str, str] = dataclasses.field(
      default_factory=dict
  )
  starts_from_scratch: tuple[str, ...] = ()
  gives_memories_to: tuple[str, ...] = ()
  group_rounds_field: str | None = None
  kept_clients_field: str | None = None
  num_clients_field: str | None = None
  run_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unused_fields: tuple[str, ...] = ()
  own_statistics: bool = False

  def __post_init__(self):
    named = self.uses + self.starts_from_scratch + self.gives_memories_to
    unknown = set(named) - set(USES)
    if unknown:
      raise ValueError(
          f'Expected uses of {self.name!r} among {", ".join(USES)}, found'
          f' {", ".join(sorted(unknown))}.'
      )

  def _attribute(self, name: str) -> Any:
    module = importlib.import_module(self.module_name)
    if not hasattr(module, name):
      raise ValueError(
          f'Expected `{name}` in {self.module_name}, where the algorithm'
          f' {self.name!r} is written, found none.'
      )
    return getattr(module, name)

  def method(
      self,
      model: 'model_lib.Model',
      config: 'configurations.Configuration',
      num_classes: int,
  ) -> 'method_lib.Method':
    """Returns the algorithm's `Method`, whose uses refuse bad labels.

    Args:
      model: A `models.model.Model`.
      config: One of the presets, or another of its kind.
      num_classes: Labels are 0..num_classes-1.

    Raises:
      TypeError: If the model is no network of this library.
      ValueError: If the algorithm does not take it, or the configuration.
    """
    from tff_meta.learners import personalizer  # Imports TensorFlow.
    from tff_meta.models import model as model_lib

    if not isinstance(model, model_lib.Model):
      raise TypeError(
          'Expected `model` to be a `tff_meta.models.model.Model`, found a'
          f' {type(model).__name__}. Tip: `models.build(name, input_shape,'
          ' None)` builds one by name; a network of another kind has to be'
          ' written as the pure functions that a `Model` consists of.'
      )
    name = self.function or self.module_name.rpartition('.')[2]
    method = self._attribute(name)(model, config, num_classes)

    @functools.cache  # Uses that are the same function stay one.
    def refusing(use):
      return lambda: personalizer.refusing_bad_labels(use(), num_classes)

    given = {use: getattr(method, use, None) for use in self.uses}
    known = [use for use in USES if getattr(method, use)]
    if known and not self.uses:
      raise ValueError(
          f'Expected `uses` of {self.name!r}, whose `Method` has'
          f' {", ".join(known)}, found none.'
      )
    if not set(given) <= set(known):
      raise ValueError(
          f'Expected the uses of {self.name!r} to be in its `Method`, which has'
          f' {", ".join(known)}, found {", ".join(given)}.'
      )
    declared = [channel.name for channel in method.channels]
    if method.num_models is not None:
      declared.append('choices among models')
    if ', '.join(declared) != (self.channels or ''):
      raise ValueError(
          f'Expected `channels` of {self.name!r} as its `Method` declares them,'
          f' {", ".join(declared)!r}, found {self.channels!r}.'
      )
    uses = {name: refusing(use) for name, use in given.items()}
    return dataclasses.replace(method, **dict.fromkeys(USES) | uses)

  @property
  def presets(self) -> Mapping[str, Any]:
    """Configurations by name.

    `paper` as it is printed, `release` as the released code has it, and `demo`
    with rates from which the embedded digits, and pairs of them, learn in a
    short run.
    """
    return {
        name: dataclasses.replace(self._attribute(name.upper()), **self.changes)
        for name in PRESETS
    }

  def hparam_names(self) -> tuple[str, ...]:
    """Returns the names of the configuration's fields.

    They are read in the module's source: to import it imports TensorFlow, which
    takes seconds that nobody who misspelt a name should have to wait. A module
    from outside whose source does not tell, as where the configuration is of
    another one, is imported all the same.
    """
    for node in _parsed(self.module_name):
      match node:
        case ast.Assign(targets, ast.Call(ast.Name(name))) if any(
            isinstance(t, ast.Name) and t.id == 'PAPER' for t in targets
        ):
          names = _field_names(self.module_name, name)
          if names:
            return tuple(names)
    return tuple(f.name for f in dataclasses.fields(self._attribute('PAPER')))

  def without_effect(self, given: Collection[str]) -> list[str]:
    """Returns which of the fields that a user gives have no effect, if known.

    Args:
      given: Their names. With one of `changes` it may be another variant, whose
        fields nobody knows.
    """
    if not self.changes.keys().isdisjoint(given):
      return []
    return [name for name in given if name in self.unused_fields]

  def rounds_per_cohort(self, config: 'configurations.Configuration') -> int:
    """Returns for how many consecutive rounds a cohort must stay together."""
    if self.cohort_rounds_field is None:
      return 1
    return getattr(config, self.cohort_rounds_field) + 1


def _parsed(module_name: str) -> list[ast.stmt]:
  """Returns the statements of a module, which is not imported."""
  try:
    spec = importlib.util.find_spec(module_name)
  except ImportError:  # `module_name` is a class, or in none.
    return []
  if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
    return []
  return _statements(spec.loader.get_source(module_name) or '')


@functools.lru_cache(maxsize=64)
def _statements(source: str) -> list[ast.stmt]:
  """Returns the statements of a source, parsed once: it takes some 10 ms."""
  return ast.parse(source).body


def _field_names(module_name: str, class_name: str) -> dict[str, None] | None:
  """Returns the fields of a dataclass in its source, those of bases first.

  None where the class, or a base of it, is not found.
  """
  statements = _parsed(module_name)
  package = module_name.rpartition('.')[0]
  imported = {
      alias.asname
      or alias.name: '.' * node.level
      + (f'{node.module}.' if node.module else '')
      + alias.name
      for node in statements
      if isinstance(node, ast.ImportFrom)
      for alias in node.names
  }
  for node in statements:
    match node:
      case ast.ClassDef(name=name) if name == class_name:
        names: dict[str, None] = {}
        for base in reversed(node.bases):  # As dataclasses collect them.
          of_base = None
          match base:
            case ast.Attribute(ast.Name(module), base_name) if (
                module in imported
            ):
              with contextlib.suppress(ImportError):  # Of no package.
                found = importlib.util.resolve_name(imported[module], package)
                of_base = _field_names(found, base_name)
            case ast.Name(base_name):
              of_base = _field_names(module_name, base_name)
          if of_base is None:
            return None
          names |= of_base
        for part in node.body:
          match part:
            case ast.AnnAssign(ast.Name(field), annotation) if (
                'ClassVar' not in ast.unparse(annotation)
            ):
              names[field] = None
        return names
  return None


_TESTS_OF_FEDMETA_PER = dict(
    eval_support_fraction='eval_support_fraction',
    restrict_f1_to_client_labels='f1_restrict_to_client_labels',
)
_CHOICES = (
    'a client that picks another model moves two sums, and every model has the'
    ' zeros of those that picked another'
)
_REFUSED_WITH_CHOICES = dict(robust=_CHOICES, dp=_CHOICES)
_REFUSED_WITH_NOTHING = dict.fromkeys(
    ('robust', 'compressed', 'secure', 'dp'),
    'its clients send nothing but metrics, which have nothing to hide in',
)
# Of the configuration of FedAvg, and of that of MetaVers.
_OF_FINE_TUNING = (
    'fine_tuning_epochs',
    'fine_tuning_steps',
    'fine_tuning_decay',
    'fine_tuning_decay_steps',
)
_OF_GROUPS = ('rounds', 'deployment_learning_rate', 'deployment_batch_size')
_OF_TRIPLETS = (
    'gamma',
    'triplet_variant',
    'triplet_reduction',
    'fixed_margin',
    'margin_normalizer',
    'margin_stop_gradient',
)
# Those of `cafeme_fed_rep`, which was an option of FedRep.
_FORMER_FIELDS_OF_FED_REP = dict(
    averaged_head=False,
    client_optimizer_state='reset',
    local_unit='epochs',
    fine_tuning_steps=50,
    fine_tuning_learning_rate=0.01,
    fine_tuning_decay=0.8,
    fine_tuning_decay_steps=5,
)

_OURS = {
    spec.name: spec
    for spec in (
        AlgorithmSpec(
            name='frl',
            summary='Few-round learning with global prototypes (GPAL)',
            paper='Park et al., NeurIPS 2021',
            module_name='tff_meta.algorithms.frl',
            uses=('group',),
            partition='few_round',
            cohort_rounds_field='rounds',
            channels='class prototypes',
            group_rounds_field='rounds',
        ),
        AlgorithmSpec(
            name='metavers',
            summary='Prototypes, and triplets with a federated margin',
            paper='Lim et al., WACV 2024',
            module_name='tff_meta.algorithms.metavers',
            uses=('known_client', 'new_client', 'new_class'),
            channels='margins',
        ),
        AlgorithmSpec(
            name='metavers_ce',
            summary='MetaVers with its prototypical loss alone',
            paper='Lim et al., WACV 2024',
            module_name='tff_meta.algorithms.metavers',
            uses=('known_client', 'new_client', 'new_class'),
            changes=dict(loss='ce'),
            channels='margins',
            unused_fields=_OF_TRIPLETS,
        ),
        AlgorithmSpec(
            name='metavers_triplet',
            summary='MetaVers with its triplet loss alone, and a fixed margin',
            paper='Lim et al., WACV 2024',
            module_name='tff_meta.algorithms.metavers',
            uses=('known_client', 'new_client', 'new_class'),
            changes=dict(loss='triplet'),
            channels='margins',
            unused_fields=('gamma', 'margin_stop_gradient'),
        ),
        AlgorithmSpec(
            name='cafeme',
            summary='CAFeMe: modulated by context, and meta-learned',
            paper='Vettoruzzo et al., 2023',
            module_name='tff_meta.algorithms.cafeme',
            uses=('known_client', 'new_client'),
            model='modulated_cnn',
        ),
        AlgorithmSpec(
            name='fedec',
            summary='Reptile, held to the predictions of the last local model',
            paper='Lan et al., 2023',
            module_name='tff_meta.algorithms.fedec',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='fedec_wo',
            summary='FedEC without constraint: federated Reptile',
            paper='Lan et al., 2023',
            module_name='tff_meta.algorithms.fedec',
            uses=('known_client', 'new_client'),
            changes={'constraint': 'none'},
            unused_fields=('kl_direction',),
        ),
        AlgorithmSpec(
            name='fedec_l2',
            summary='FedEC, held to the weights of the last local model',
            paper='Lan et al., 2023',
            module_name='tff_meta.algorithms.fedec',
            uses=('known_client', 'new_client'),
            changes={'constraint': 'l2'},
            unused_fields=('kl_direction',),
        ),
        AlgorithmSpec(
            name='fedmeta_per',
            summary='Learns to adapt, under a head that stays with the client',
            paper='Nguyen et al., 2022',
            module_name='tff_meta.algorithms.fedmeta_per',
            uses=('known_client', 'new_client'),
            gives_memories_to=('new_client',),
            run_settings=_TESTS_OF_FEDMETA_PER,
        ),
        AlgorithmSpec(
            name='fedmeta',
            summary='Learns to adapt: federated MAML or Meta-SGD',
            paper='Chen et al., 2018',
            module_name='tff_meta.algorithms.fedmeta_per',
            uses=('known_client', 'new_client'),
            changes=dict(personal_layers=0),
            run_settings=_TESTS_OF_FEDMETA_PER,
        ),
        AlgorithmSpec(
            name='local',
            summary='Every client trains its own model, alone',
            paper='Baseline of Lan et al., 2023, and Lim et al., WACV 2024',
            module_name='tff_meta.baselines.local',
            uses=('known_client', 'new_client'),
            starts_from_scratch=('new_client',),
            refused_aggregations=_REFUSED_WITH_NOTHING,
        ),
        AlgorithmSpec(
            name='fed_avg',
            summary='Federated averaging; a new group starts from scratch',
            paper='McMahan et al., AISTATS 2017',
            module_name='tff_meta.baselines.fed_avg',
            uses=('known_client', 'new_client', 'group'),
            group_rounds_field='rounds',
            starts_from_scratch=('group',),
            unused_fields=_OF_FINE_TUNING,
        ),
        AlgorithmSpec(
            name='fed_avg_ft',
            summary='Federated averaging, then fine-tuning',
            paper='McMahan et al., AISTATS 2017; Park et al., NeurIPS 2021',
            module_name='tff_meta.baselines.fed_avg',
            function='fed_avg_ft',
            uses=('known_client', 'new_client', 'group'),
            group_rounds_field='rounds',
        ),
        AlgorithmSpec(
            name='fed_avg_meta',
            summary='Federated averaging with Adam, fine-tuned before a test',
            paper='McMahan et al., AISTATS 2017; Nguyen et al., 2022',
            module_name='tff_meta.baselines.fed_avg',
            function='fed_avg_ft',
            uses=('known_client', 'new_client'),
            # Published rates differ by data set; see binaries/presets.
            changes=dict(
                optimizer='adam',
                learning_rate=1e-3,
                momentum=0.0,
                batch_size=32,
                deployment_learning_rate=1e-3,
                deployment_batch_size=32,
            ),
        ),
        AlgorithmSpec(
            name='fed_avg_own',
            summary='Federated averaging, then only classes that a client has',
            paper='McMahan et al., AISTATS 2017; the rest is ours',
            module_name='tff_meta.baselines.fed_avg',
            function='fed_avg_own',
            uses=('known_client', 'new_client'),
            unused_fields=_OF_FINE_TUNING + _OF_GROUPS,
        ),
        AlgorithmSpec(
            name='fed_avg_proto',
            summary='Federated averaging, then class prototypes for the head',
            paper='McMahan et al., AISTATS 2017; Lim et al., WACV 2024',
            module_name='tff_meta.baselines.fed_avg',
            function='fed_avg_proto',
            uses=('known_client', 'new_client', 'new_class'),
            unused_fields=_OF_FINE_TUNING + _OF_GROUPS,
        ),
        AlgorithmSpec(
            name='fed_prox',
            summary="Federated averaging, held to the server's model",
            paper='Li et al., MLSys 2020',
            module_name='tff_meta.baselines.fed_prox',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='fed_bn',
            summary='All is averaged but batch normalisation',
            paper='Li et al., ICLR 2021',
            module_name='tff_meta.baselines.fed_bn',
            uses=('known_client', 'new_client'),
            model='norm_cnn',
            own_statistics=True,
        ),
        AlgorithmSpec(
            name='fed_rod',
            summary='A generic predictor, and a personal one on top of it',
            paper='Chen and Chao, ICLR 2022',
            module_name='tff_meta.baselines.fed_rod',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='fed_ala',
            summary="The server's last layers, mixed into a client's own",
            paper='Zhang et al., AAAI 2023',
            module_name='tff_meta.baselines.fed_ala',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='fed_per',
            summary='The body is averaged, every client keeps its own head',
            paper='Arivazhagan et al., 2019',
            module_name='tff_meta.baselines.fed_per',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='fed_per_meta',
            summary='FedPer, tested with fine-tuning of the averaged head',
            paper='Arivazhagan et al., 2019; Nguyen et al., 2022',
            module_name='tff_meta.baselines.fed_per',
            uses=('known_client', 'new_client'),
            changes=dict(head_of_evaluation='averaged', fine_tuning_epochs=1),
            unused_fields=('new_client_epochs',),
        ),
        AlgorithmSpec(
            name='fed_rep',
            summary='A shared body, and a head that every client fits first',
            paper='Collins et al., ICML 2021',
            module_name='tff_meta.baselines.fed_rep',
            uses=('known_client', 'new_client', 'new_class'),
            former_fields=_FORMER_FIELDS_OF_FED_REP,
        ),
        AlgorithmSpec(
            name='fed_rep_proto',
            summary='FedRep, then class prototypes in place of heads',
            paper='Collins et al., ICML 2021; Lim et al., WACV 2024',
            module_name='tff_meta.baselines.fed_rep',
            function='fed_rep_proto',
            uses=('known_client', 'new_client', 'new_class'),
            former_fields=_FORMER_FIELDS_OF_FED_REP,
            unused_fields=('known_client_epochs', 'new_client_epochs'),
        ),
        AlgorithmSpec(
            name='cafeme_fed_rep',
            summary='Head, then base, both averaged: the FedRep of CAFeMe',
            paper='Collins et al., ICML 2021; Vettoruzzo et al., 2023',
            module_name='tff_meta.baselines.cafeme_fed_rep',
            uses=('known_client', 'new_client'),
            model='cafeme_base',
        ),
        AlgorithmSpec(
            name='fed_babu',
            summary='The body learns under a fixed head; then fine-tuning',
            paper='Oh et al., ICLR 2022',
            module_name='tff_meta.baselines.fed_babu',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='fed_babu_proto',
            summary='FedBABU, then class prototypes in place of heads',
            paper='Oh et al., ICLR 2022; Lim et al., WACV 2024',
            module_name='tff_meta.baselines.fed_babu',
            function='fed_babu_proto',
            uses=('known_client', 'new_client', 'new_class'),
            unused_fields=(
                'fine_tuned',
                'fine_tuning_learning_rate',
                'fine_tuning_epochs',
                'fine_tuning_batch_size',
            ),
        ),
        AlgorithmSpec(
            name='lg_fed_avg',
            summary='Own first layers, the last ones averaged',
            paper='Liang et al., 2020',
            module_name='tff_meta.baselines.lg_fed_avg',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='apfl',
            summary="The server's model, mixed with one of the client's own",
            paper='Deng et al., 2020',
            module_name='tff_meta.baselines.apfl',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='pfedme',
            summary='Personal models are proximal points (Moreau envelopes)',
            paper='Dinh et al., NeurIPS 2020',
            module_name='tff_meta.baselines.pfedme',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='l2gd',
            summary='Own models, pulled towards their average by a coin',
            paper='Hanzely and Richtarik, 2020',
            module_name='tff_meta.baselines.l2gd',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='ditto',
            summary="A personal model, pulled towards the server's",
            paper='Li et al., ICML 2021',
            module_name='tff_meta.baselines.ditto',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='ifca',
            summary='Several models; a client has the one that fits it best',
            paper='Ghosh et al., NeurIPS 2020',
            module_name='tff_meta.baselines.ifca',
            uses=('known_client', 'new_client'),
            channels='choices among models',
            refused_aggregations=_REFUSED_WITH_CHOICES,
            unused_fields=(
                'fine_tuning_steps',
                'fine_tuning_learning_rate',
                'fine_tuning_decay',
                'fine_tuning_decay_steps',
            ),
        ),
        AlgorithmSpec(
            name='ifca_ft',
            summary='IFCA, then fine-tuning',
            paper='Ghosh et al., NeurIPS 2020; Vettoruzzo et al., 2023',
            module_name='tff_meta.baselines.ifca',
            function='ifca_ft',
            uses=('known_client', 'new_client'),
            channels='choices among models',
            refused_aggregations=_REFUSED_WITH_CHOICES,
        ),
        AlgorithmSpec(
            name='knn_per',
            summary="The server's model, mixed with nearest neighbours",
            paper='Marfoq et al., ICML 2022',
            module_name='tff_meta.baselines.knn_per',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='fed_proto',
            summary='Own models, which share class prototypes alone',
            paper='Tan et al., AAAI 2022',
            module_name='tff_meta.baselines.fed_proto',
            uses=('known_client',),
            channels='class prototypes',
        ),
        AlgorithmSpec(
            name='fed_pac',
            summary='Aligned features, and heads combined for every client',
            paper='Xu et al., ICLR 2023',
            module_name='tff_meta.baselines.fed_pac',
            uses=('known_client', 'new_client', 'new_class'),
            channels='class prototypes and heads',
        ),
        AlgorithmSpec(
            name='pfedhn',
            summary="A hypernetwork makes the clients' models",
            paper='Shamsian et al., ICML 2021',
            module_name='tff_meta.baselines.pfedhn',
            uses=('known_client', 'new_client'),
            num_clients_field='num_clients',
        ),
        AlgorithmSpec(
            name='pfedgp',
            summary="A shared kernel under clients' own Gaussian processes",
            paper='Achituve et al., NeurIPS 2021',
            module_name='tff_meta.baselines.pfedgp',
            uses=('known_client', 'new_client', 'new_class'),
        ),
        AlgorithmSpec(
            name='pfedgp_proto',
            summary='pFedGP, then class prototypes for Gaussian processes',
            paper='Achituve et al., NeurIPS 2021; Lim et al., WACV 2024',
            module_name='tff_meta.baselines.pfedgp',
            function='pfedgp_proto',
            uses=('known_client', 'new_client', 'new_class'),
            unused_fields=('test_draws',),
        ),
        AlgorithmSpec(
            name='scaffold',
            summary="Control variates correct the drift of clients' training",
            paper='Karimireddy et al., ICML 2020',
            module_name='tff_meta.baselines.scaffold',
            uses=('known_client', 'new_client'),
            channels='control variates',
            num_clients_field='num_clients',
        ),
        AlgorithmSpec(
            name='per_fed_avg',
            summary='Per-FedAvg: a start from which one step personalizes',
            paper='Fallah et al., NeurIPS 2020',
            module_name='tff_meta.baselines.per_fed_avg',
            uses=('known_client', 'new_client'),
        ),
        AlgorithmSpec(
            name='personalized_fl',
            summary='Per-FedAvg alone, then rounds in a new group',
            paper='Fallah et al., NeurIPS 2020; Park et al., NeurIPS 2021',
            module_name='tff_meta.baselines.personalized_fl',
            uses=('group',),
            partition='few_round',
            group_rounds_field='rounds',
        ),
        AlgorithmSpec(
            name='one_shot_ft',
            summary='Federated averaging; of a new group the best are averaged',
            paper='Guha et al., 2019; Park et al., NeurIPS 2021',
            module_name='tff_meta.baselines.one_shot_ft',
            uses=('group',),
            partition='few_round',
            group_rounds_field='rounds',
            kept_clients_field='kept_clients',
        ),
    )
}

ALGORITHMS = catalog.Catalog[AlgorithmSpec]('algorithm', _OURS)


def register_algorithm(spec: AlgorithmSpec) -> None:
  """Adds an algorithm from outside.

  Args:
    spec: Its specification; `module_name` is usually the caller's `__name__`.

  Raises:
    ValueError: If there is one of its name, or that is no name.
  """
  ALGORITHMS.register(spec.name, spec)


def get(name: str) -> AlgorithmSpec:
  """Returns the algorithm of that name.

  Args:
    name: One of `ALGORITHMS`.

  Returns:
    Its specification.

  Raises:
    ValueError: If there is none of that name.
  """
  return ALGORITHMS.find(name)


def build(
    name: str,
    model: 'model_lib.Model',
    config: 'configurations.Configuration | str',
    num_classes: int,
    *,
    seed: int = 0,
    aggregation: Any = None,
    server_optimizer: Any = None,
) -> Any:
  """Builds the process that trains with an algorithm, in one line.

  Args:
    name: One of `ALGORITHMS`.
    model: A `models.model.Model`; its head, if any, is not used.
    config: Name of a preset, or a configuration of the algorithm.
    num_classes: Labels of the clients are 0..num_classes-1.
    seed: The run's seed, 0..2**31-1.
    aggregation: An `aggregation.Aggregation` of everything that clients send;
      None for the plain one.
    server_optimizer: In place of the algorithm's own.

  Returns:
    A `tff.learning.templates.LearningProcess`, see `method.build_process`.

  Raises:
    TypeError: If the model is no network of this library.
    ValueError: If a name is unknown or a value is out of its range.
  """
  from tff_meta import method  # Imports TensorFlow.

  spec = get(name)
  if isinstance(config, str):
    presets = spec.presets
    if config not in presets:
      raise ValueError(
          f'Expected a preset of {", ".join(presets)}, found'
          f' {config!r}.{spelling.tip(config, presets)}'
      )
    return build(
        name,
        model,
        presets[config],
        num_classes,
        seed=seed,
        aggregation=aggregation,
        server_optimizer=server_optimizer,
    )
  return method.build_process(
      spec.method(model, config, num_classes),
      model,
      seed=seed,
      aggregation=aggregation,
      server_optimizer=server_optimizer,
  )
