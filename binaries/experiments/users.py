r"""Real users, one protocol: MNIST by its writers, and Omniglot by its drawers.

Nobody published these numbers. What is held equal between the methods of a
table: the clients and their examples, the network (but where a method needs
another), the rounds, ten clients a round, minibatches of 10, about one pass
over a client's examples each time that it trains, and about five passes where
it adapts before a test. Six configurations of each method are tried, and six
more with a smaller rate of the server where more than half of them end in no
numbers (on Omniglot FedMeta, FedMeta-Per and Per-FedAvg). What a method costs
beyond that is in the columns for bytes and time. Exceptions, of which
`_BUDGETS` says more:

* MetaVers, pFedGP, FedMeta and FedMeta-Per make few steps of many examples.
* pFedMe makes five gradient steps on a minibatch, Per-FedAvg one on three.
* Per-FedAvg adapts with one step, pFedMe, FedMeta, FedMeta-Per and new clients
  of FedEC and local with one pass.
* Of L2GD's passes there are two or five a round, as the search has it; FedALA
  learns its shares beside its pass, at first until they settle.
* Not all have momentum, and some have Adam.
* Methods that count steps make as many with a small client as with a large one,
  and in the search, whose clients train on 55 % of their examples, not 75 %.

Files are those of `tff.simulation.datasets.SqlClientData` with the features
`pixels` [784] and `label`, in `--data_dir`; `docs/users_files.py` makes them of
what MNIST, QMNIST and Omniglot are published as:

* `mnist_by_writer.sqlite`: MNIST with the writers that NIST tells, 836 clients
  `f0000_mnisttrain` and so on. Numbers that end in 1, 4 or 7 are for the table,
  in 2, 5 or 8 for the search. Most have all ten classes and differ in their
  hands; the smallest, with 9 images or a few more, lack some.
* `omniglot_by_drawer.sqlite`: Omniglot by alphabet and drawer, 1,000 clients
  `Greek_01` and so on. A drawer has drawn every character of one alphabet
  **once**, so that a drawer alone has no class to train on and be tested on.
  Here nine or ten drawers of an alphabet share a client (01 to 09, and 10
  to 19; 20 is left out): a school class that practises a script. Alphabets from
  A to J are for the table, from K on for the search. Labels are the characters,
  so the table's clients have 14 to 52 of 873 classes, and those of the search
  14 to 55 of 750, all of one alphabet: the common model has to tell them all
  apart, and personalization pays.

The searches have users of their own, none of whom is in the table, and count
validation examples of known clients; nothing of theirs is tested. `found` says
what a finished search has found, for `_FOUND`.

That pixels are scaled (`scaling=standard`), and what a client of Omniglot is,
is the same for all methods and was first decided by trial runs on users of the
table, by test accuracy, which are not kept. `users_mnist_writers_forms` and
`users_omniglot_drawers_forms` ask again, on users and examples of the search;
the rounds of Omniglot and the rates that are tried come of such runs, too.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import json
import pathlib

from tff_meta import registry
from tff_meta.comparison import searches
from tff_meta.comparison import tables

_CLIENTS_PER_ROUND = 10
_PASSES = 5  # Of a client that adapts.
_SHARE_OF_ROUNDS = 3  # A search takes one of so many rounds.
_POINTS, _ON_THE_WAY = 10, 20  # Of a curve, and clients that it is of.

# Parts and doubles of other methods, which have no row: MetaVers with one of
# its losses, FedEC with another constraint or none, FedAvg and FedPer as
# FedMeta-Per's paper tests them, and FedAvg among own classes: most writers
# have all, and the drawers' table has a column of it.
PARTS = (
    'fed_avg_own',
    'metavers_ce',
    'metavers_triplet',
    'fedec_wo',
    'fedec_l2',
    'fed_avg_meta',
    'fed_per_meta',
)
# All others for single clients, in the order in which they are run.
_ALGORITHMS = (
    'fed_avg',
    'fed_avg_ft',
    'local',
    'fed_rep',
    'metavers',
    'cafeme',
    'fed_babu',
    'ditto',
    'per_fed_avg',
    'fed_prox',
    'fed_bn',
    'fed_rod',
    'fed_ala',
    'scaffold',
    'fed_per',
    'fedec',
    'fedmeta_per',
    'fedmeta',
    'apfl',
    'pfedme',
    'ifca',
    'ifca_ft',
    'lg_fed_avg',
    'l2gd',
    'knn_per',
    'fed_proto',
    'fed_pac',
    'pfedhn',
    'pfedgp',
    'cafeme_fed_rep',
    'fed_avg_proto',
    'fed_rep_proto',
    'fed_babu_proto',
    'pfedgp_proto',
)
# FedAvg with the network of FedBN, to compare that with.
_NORM_CNN = 'fed_avg norm_cnn'
_MODELS = {
    'fed_bn': 'norm_cnn',
    _NORM_CNN: 'norm_cnn',
    'cafeme': 'modulated_cnn',
    'cafeme_fed_rep': 'cafeme_base',
}
# They train as another method does, whose rates they have.
AS = {
    'fed_avg_proto': 'fed_avg',
    'fed_rep_proto': 'fed_rep',
    'fed_babu_proto': 'fed_babu',
    'pfedgp_proto': 'pfedgp',
}
# Hyperparameters of all methods that have one of the name.
_ALIKE = {
    'batch_size': 10,
    'deployment_batch_size': 10,
    'inner_batch_size': 10,
    'fine_tuning_batch_size': 10,
    'momentum': 0.5,
    'epochs': 1,
    'head_epochs': 1,
    'body_epochs': 1,
    'tau': 1,
    'fine_tuning_epochs': _PASSES,
    'new_client_epochs': _PASSES,
    'fine_tuning_decay': 1.0,
}
# Those that are counted in minibatches, of which a pass has a number.
_PASS = ('local_steps', 'local_rounds', 'head_steps', 'base_steps')
_ADAPTATION = 'fine_tuning_steps'
_QUERY_BATCHES = 2  # Of CAFeMe.
# The shares of the rounds that two methods begin otherwise.
_WARM_UP, _AVERAGED = 5, 3  # One of so many.


def _grid(**values: tuple[float, ...]) -> list[dict[str, float]]:
  """Returns every combination of values, the first ones first."""
  return [
      dict(zip(values, chosen, strict=True))
      for chosen in itertools.product(*values.values())
  ]


# FedAvg did not learn MNIST with 0.5, nor Omniglot with 0.15.
_RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_THREE = (0.02, 0.06, 0.2)
_ONE_RATE = _grid(learning_rate=_RATES)


def _adapting(*outer_rates: float) -> list[dict[str, float]]:
  """Returns what adapts with one rate, in training and before a test."""
  return [
      {
          'inner_learning_rate': rate,
          'fine_tuning_learning_rate': rate,
          'outer_learning_rate': outer,
      }
      for rate, outer in itertools.product(_THREE, outer_rates)
  ]


# Method -> the six that are tried.
_CANDIDATES = {
    'fed_avg': _ONE_RATE,
    'fed_avg_ft': _grid(
        learning_rate=_THREE, deployment_learning_rate=(0.01, 0.1)
    ),
    'local': _ONE_RATE,
    'fed_rep': _ONE_RATE,
    'metavers': [
        {'shots': images, 'queries': images, 'learning_rate': rate}
        for images, rate in itertools.product((5, 2), (0.001, 0.003, 0.01))
    ],
    'cafeme': _adapting(0.001, 0.003),
    'fed_babu': _grid(
        learning_rate=_THREE, fine_tuning_learning_rate=(0.01, 0.1)
    ),
    'ditto': [
        {
            'learning_rate': rate,
            'personal_learning_rate': rate,
            'fine_tuning_learning_rate': rate,
            'proximal_weight': weight,
        }
        for rate, weight in itertools.product(_THREE, (0.1, 1.0))
    ],
    'per_fed_avg': _adapting(0.03, 0.1),
    'fed_prox': _grid(learning_rate=_THREE, proximal_weight=(0.01, 0.1)),
    'fed_bn': _ONE_RATE,
    _NORM_CNN: _ONE_RATE,
    'fed_rod': _ONE_RATE,
    'fed_ala': _ONE_RATE,
    'scaffold': _ONE_RATE,
    'fed_per': _ONE_RATE,
    'fedec': _grid(inner_learning_rate=_THREE, constraint_weight=(0.1, 1.0)),
    'fedmeta_per': _grid(
        inner_learning_rate=_THREE, outer_learning_rate=(0.3, 1.0)
    ),
    'fedmeta': _grid(
        inner_learning_rate=_THREE, outer_learning_rate=(0.3, 1.0)
    ),
    'apfl': _grid(learning_rate=_THREE, mixing=(0.5, 0.75)),
    # Larger ones are refused at its proximal weight of 15.
    'pfedme': _grid(
        personal_learning_rate=(0.02, 0.05, 0.1), learning_rate=(0.03, 0.06)
    ),
    'ifca': _grid(learning_rate=_THREE, clusters=(2, 4)),
    'ifca_ft': _grid(
        learning_rate=_THREE, fine_tuning_learning_rate=(0.01, 0.1)
    ),
    'lg_fed_avg': _ONE_RATE,
    'l2gd': _grid(learning_rate=_THREE, averaging_probability=(0.2, 0.5)),
    'knn_per': _grid(learning_rate=_THREE, scale=(1.0, 10.0)),
    'fed_proto': _grid(learning_rate=_THREE, prototype_weight=(0.1, 1.0)),
    'fed_pac': _grid(learning_rate=_THREE, head_learning_rate=(0.05, 0.2)),
    'pfedhn': _grid(learning_rate=_THREE, server_learning_rate=(0.01, 0.03)),
    'pfedgp': _grid(learning_rate=(0.02, 0.05, 0.2), inner_steps=(1, 5)),
    'cafeme_fed_rep': _grid(
        learning_rate=(0.0003, 0.001, 0.003),
        fine_tuning_learning_rate=(0.001, 0.01),
    ),
}

# Name of a table -> method -> the best of its search, from `found`.
_FOUND: dict[str, dict[str, dict[str, float]]] = {
    'users_mnist_writers': {
        'fed_avg': {'learning_rate': 0.1},
        'fed_avg_ft': {'learning_rate': 0.06, 'deployment_learning_rate': 0.01},
        'local': {'learning_rate': 0.1},
        'fed_rep': {'learning_rate': 0.2},
        'metavers': {'shots': 2, 'queries': 2, 'learning_rate': 0.001},
        'cafeme': {
            'inner_learning_rate': 0.02,
            'fine_tuning_learning_rate': 0.02,
            'outer_learning_rate': 0.001,
        },
        'fed_babu': {'learning_rate': 0.2, 'fine_tuning_learning_rate': 0.01},
        'ditto': {
            'learning_rate': 0.2,
            'personal_learning_rate': 0.2,
            'fine_tuning_learning_rate': 0.2,
            'proximal_weight': 1.0,
        },
        'per_fed_avg': {
            'inner_learning_rate': 0.02,
            'fine_tuning_learning_rate': 0.02,
            'outer_learning_rate': 0.1,
        },
        'fed_prox': {'learning_rate': 0.06, 'proximal_weight': 0.01},
        'fed_bn': {'learning_rate': 0.1},
        'fed_avg norm_cnn': {'learning_rate': 0.05},
        'fed_rod': {'learning_rate': 0.1},
        'fed_ala': {'learning_rate': 0.1},
        'scaffold': {'learning_rate': 0.1},
        'fed_per': {'learning_rate': 0.1},
        'fedec': {'inner_learning_rate': 0.06, 'constraint_weight': 0.1},
        'fedmeta_per': {
            'inner_learning_rate': 0.02,
            'outer_learning_rate': 0.3,
        },
        'fedmeta': {'inner_learning_rate': 0.02, 'outer_learning_rate': 0.3},
        'apfl': {'learning_rate': 0.2, 'mixing': 0.5},
        'pfedme': {'personal_learning_rate': 0.05, 'learning_rate': 0.06},
        'ifca': {'learning_rate': 0.2, 'clusters': 4},
        'ifca_ft': {'learning_rate': 0.2, 'fine_tuning_learning_rate': 0.1},
        'lg_fed_avg': {'learning_rate': 0.1},
        'l2gd': {'learning_rate': 0.06, 'averaging_probability': 0.2},
        'knn_per': {'learning_rate': 0.2, 'scale': 1.0},
        'fed_proto': {'learning_rate': 0.02, 'prototype_weight': 1.0},
        'fed_pac': {'learning_rate': 0.2, 'head_learning_rate': 0.05},
        'pfedhn': {'learning_rate': 0.06, 'server_learning_rate': 0.03},
        'pfedgp': {'learning_rate': 0.05, 'inner_steps': 5},
        'cafeme_fed_rep': {
            'learning_rate': 0.001,
            'fine_tuning_learning_rate': 0.01,
        },
    },
    'users_omniglot_drawers': {
        'fed_avg': {'learning_rate': 0.05},
        'fed_avg_ft': {'learning_rate': 0.06, 'deployment_learning_rate': 0.01},
        'local': {'learning_rate': 0.05},
        'fed_rep': {'learning_rate': 0.05},
        'metavers': {'shots': 2, 'queries': 2, 'learning_rate': 0.003},
        'cafeme': {
            'inner_learning_rate': 0.2,
            'fine_tuning_learning_rate': 0.2,
            'outer_learning_rate': 0.003,
        },
        'fed_babu': {'learning_rate': 0.06, 'fine_tuning_learning_rate': 0.01},
        'ditto': {
            'learning_rate': 0.02,
            'personal_learning_rate': 0.02,
            'fine_tuning_learning_rate': 0.02,
            'proximal_weight': 1.0,
        },
        'per_fed_avg': {
            'inner_learning_rate': 0.02,
            'fine_tuning_learning_rate': 0.02,
            'outer_learning_rate': 0.03,
        },
        'fed_prox': {'learning_rate': 0.06, 'proximal_weight': 0.01},
        'fed_bn': {'learning_rate': 0.1},
        'fed_avg norm_cnn': {'learning_rate': 0.05},
        'fed_rod': {'learning_rate': 0.05},
        'fed_ala': {'learning_rate': 0.05},
        'scaffold': {'learning_rate': 0.02},
        'fed_per': {'learning_rate': 0.05},
        'fedec': {'inner_learning_rate': 0.02, 'constraint_weight': 0.1},
        'fedmeta_per': {
            'inner_learning_rate': 0.02,
            'outer_learning_rate': 0.3,
        },
        'fedmeta': {'inner_learning_rate': 0.06, 'outer_learning_rate': 0.03},
        'apfl': {'learning_rate': 0.06, 'mixing': 0.75},
        'pfedme': {'personal_learning_rate': 0.02, 'learning_rate': 0.06},
        'ifca': {'learning_rate': 0.06, 'clusters': 4},
        'ifca_ft': {'learning_rate': 0.06, 'fine_tuning_learning_rate': 0.01},
        'lg_fed_avg': {'learning_rate': 0.02},
        'l2gd': {'learning_rate': 0.06, 'averaging_probability': 0.2},
        'knn_per': {'learning_rate': 0.02, 'scale': 1.0},
        'fed_proto': {'learning_rate': 0.06, 'prototype_weight': 1.0},
        'fed_pac': {'learning_rate': 0.02, 'head_learning_rate': 0.2},
        'pfedhn': {'learning_rate': 0.06, 'server_learning_rate': 0.03},
        'pfedgp': {'learning_rate': 0.2, 'inner_steps': 5},
        'cafeme_fed_rep': {
            'learning_rate': 0.0003,
            'fine_tuning_learning_rate': 0.01,
        },
    },
}


@dataclasses.dataclass(frozen=True)
class _Users:
  """A data set.

  Attributes:
    name: Of its table.
    title: Of its table.
    file: In `--data_dir`.
    clients: Form of the names of the table's clients.
    clients_of_search: Of those of the search, none of whom is of the table.
    num_clients: That train.
    num_new_clients: Beside them.
    steps: Minibatches of a pass over a client's examples, on average.
    rounds: Of a run.
    notes: Of its table.
    forms: What else a client could be, and the scaling of pixels: name of a
      setting -> form of the names of clients of the search, their number, the
      scaling.
    further: What else is told of clients, of `tables.FURTHER`.
    more: Method -> what is tried in the search beside the six, in six more
      tries for a method of which more than half of the six end with a loss of
      training that is no number.
    hours: On two cores, of the table, the search and the forms.
  """

  name: str
  title: str
  file: str
  clients: str
  clients_of_search: str
  num_clients: int
  num_new_clients: int
  steps: int
  rounds: int
  notes: tuple[str, ...]
  forms: Mapping[str, tuple[str, int, str]]
  further: tuple[str, ...] = ('worst_decile',)
  more: Mapping[str, list[dict[str, float]]] = dataclasses.field(
      default_factory=dict
  )
  hours: tuple[float | None, ...] = (None, None, None)

  def candidates(self) -> dict[str, list[dict[str, float]]]:
    """Returns method -> what is tried in the search."""
    return {
        method: [*six, *self.more.get(method, [])]
        for method, six in _CANDIDATES.items()
    }

  def flags(self, clients: str, rounds: int) -> tuple[str, ...]:
    """Returns those of all runs with some of the clients."""
    return (
        '--preset=demo',
        f'--dataset=sqlite:{self.file}',
        _dataset_options(clients, 'standard'),
        '--partition=by_writer',
        '--test_fraction=0.25',
        f'--num_clients={self.num_clients}',
        f'--clients_per_round={_CLIENTS_PER_ROUND}',
        f'--rounds={rounds}',
    )

  def row(self, method: str, rounds: int) -> tables.Row:
    """Returns a method as it is before its rates are searched.

    Args:
      method: Of `_ALGORITHMS`, or `_NORM_CNN`.
      rounds: Of the run.
    """
    algorithm = method.split()[0]
    hparams = (
        _ALIKE
        | dict.fromkeys(_PASS, self.steps)
        | {_ADAPTATION: _PASSES * self.steps}
        | self._own(rounds).get(algorithm, {})
    )
    names = registry.get(algorithm).hparam_names()
    flags = (
        f'--algorithm={algorithm}',
        f'--model={_MODELS.get(method, "lenet")}',
    )
    return tables.Row(
        method,
        searches.with_hparams(
            flags, {name: hparams[name] for name in names if name in hparams}
        ),
    )

  def _own(self, rounds: int) -> dict[str, dict[str, int]]:
    """Returns algorithm -> hyperparameters that others have otherwise."""
    return {
        'metavers': {'warm_up_rounds': rounds // _WARM_UP},
        'cafeme': {
            'inner_steps': self.steps - _QUERY_BATCHES,
            'query_batches': _QUERY_BATCHES,
        },
        'fed_per': {'fine_tuning_epochs': 0},
        'fed_pac': {'known_client_epochs': _PASSES},
        # A step takes three minibatches.
        'per_fed_avg': {
            'local_steps': max(1, self.steps // 3),
            'fine_tuning_steps': 1,
        },
        'lg_fed_avg': {'averaged_rounds': rounds // _AVERAGED},
        'fed_avg': {'fine_tuning_steps': 0},
        'fed_avg_ft': {'fine_tuning_steps': 0},
    }

  def found_row(self, method: str) -> tables.Row:
    """Returns a method with what was found for it, if it was searched."""
    row = self.row(method, self.rounds)
    best = _FOUND[self.name].get(AS.get(method, method), {})
    return dataclasses.replace(
        row, flags=searches.with_hparams(row.flags, best)
    )


_ON = 'Known and new clients'
_BUDGETS = (
    'Equal for all methods are clients, rounds, clients of a round, minibatches'
    ' of 10, about one pass over the examples of a client that trains, about'
    ' five of one that adapts, and six configurations in the search, but that'
    ' rows with prototypes have those of the method that they train as. What'
    ' follows is otherwise. Methods that train two models, or the head first,'
    ' make a pass with each.',
    'In a round MetaVers computes one gradient of an episode, for one step of'
    ' the server. CAFeMe adapts with 1.7 to 1.9 passes over half of the'
    ' examples, for one step of Adam on two minibatches of the other half;'
    ' FedMeta and FedMeta-Per with one over a fifth, for one step on the'
    ' others. Per-FedAvg takes three minibatches in a step, so it has a third'
    ' of the steps. pFedMe makes five gradient steps on each minibatch. L2GD'
    ' makes two or five passes on average, pFedGP one or five, of all examples'
    ' in a step, as the search has it. FedALA learns shares of the two models'
    ' on four fifths of the examples, in a pass more, and in up to a hundred'
    ' when a client first has any. kNN-Per trains on four fifths.',
    'Before a test known clients of FedAvg-FT, FedBABU, CAFeMe and its FedRep,'
    ' IFCA-FT and FedPAC (the head) make five passes, of pFedMe, FedMeta and'
    ' FedMeta-Per one, of Per-FedAvg one step; FedALA learns shares once more;'
    ' others do not adapt, but IFCA chooses a model, and examples are kept as'
    ' new clients keep them. Of the new ones those of pFedMe, FedEC, local,'
    ' FedMeta and FedMeta-Per make one pass (FedMeta-Per one with the head of'
    ' every known client, to choose one), of Per-FedAvg one step, and those of'
    ' FedAvg, FedProx, SCAFFOLD, IFCA, FedRoD, FedALA and fed_avg norm_cnn'
    ' none; with prototypes, pFedGP and kNN-Per their examples are kept.',
    'Momentum is 0.5 in all methods that have it, and 0.9 at the server of'
    ' pFedHN. MetaVers (at the server), CAFeMe and its FedRep have Adam.'
    ' SCAFFOLD, Per-FedAvg, pFedMe, FedMeta, FedMeta-Per and the personal model'
    ' of Ditto have none, nor has what adapts by a number of steps (IFCA-FT,'
    ' CAFeMe and its FedRep, new clients of Ditto and pFedHN). Weight decay is'
    ' that of their presets `paper`.',
    'CAFeMe and its FedRep, Per-FedAvg, pFedMe and pFedHN count steps, and so'
    ' do Ditto and IFCA where they adapt: a number that is a pass on average,'
    ' whatever a client has, and the same in the search, whose clients train on'
    ' 55 % of their examples in place of 75 %. Other methods go through what a'
    ' client has. The episodes of MetaVers leave out classes with fewer'
    ' examples than `shots`, of which there are more in the search.',
    'In the first fifth of its rounds MetaVers warms up, in the first third'
    ' LG-FedAvg averages all layers, in the search as well.',
    'MetaVers, FedProto, pFedGP and rows with prototypes choose among the'
    ' classes of which a client has examples; so does, in effect, a head that'
    ' has trained on these alone. A model of all clients chooses among all.',
    'CAFeMe, its FedRep and fed_avg norm_cnn normalise by the examples that are'
    ' tested together, FedBN by those that a client trained on.',
)


def _dataset_options(clients: str, scaling: str) -> str:
  options = f'image_shape=(28,28,1),scaling={scaling},clients={clients}'
  return f'--dataset_options={options}'


def _measures(
    protocol: str, who: str, further: Sequence[str]
) -> tuple[tables.Measure, ...]:
  at = f'evaluation/{protocol}'
  return (
      tables.Measure(
          f'{who} clients',
          f'{at}/accuracy_mean',
          f'{at}/accuracy_std',
          'std over clients',
      ),
      *tables.further_measures(further, at, f'{who}: '),
  )


def _table(users: _Users) -> tables.Table:
  methods = (*_ALGORITHMS, _NORM_CNN)
  found = _FOUND[users.name]
  unsearched = [m for m in methods if AS.get(m, m) not in found]
  return tables.Table(
      name=users.name,
      title=users.title,
      source='ours',
      settings=(
          tables.Setting(
              _ON,
              measures=(
                  *_measures('known_clients', 'Known', users.further),
                  *_measures('new_clients', 'New', users.further),
                  tables.Measure(
                      "A client's ms a round",
                      'seconds_per_round_median',
                      lower_is_better=True,
                      factor=1000 / _CLIENTS_PER_ROUND,
                  ),
                  *(
                      tables.Measure(
                          f"A client's KB {way} a round",
                          f'client_bytes_per_round/{way}',
                          lower_is_better=True,
                          factor=1 / 1000,
                      )
                      for way in ('down', 'up')
                  ),
              ),
          ),
      ),
      rows=tuple(users.found_row(method) for method in methods),
      scales={
          'smoke': tables.Scale(
              seeds=(0,),
              flags=(
                  '--rounds=4',
                  '--eval_every=2',
                  '--num_clients=20',
                  '--num_new_clients=5',
              ),
              changes='4 rounds, 20 known clients and 5 new ones.',
          ),
          'cpu': tables.Scale(seeds=(0, 1, 2), hours=users.hours[0]),
      },
      flags=(
          *users.flags(users.clients, users.rounds),
          f'--num_new_clients={users.num_new_clients}',
          f'--eval_every={users.rounds // _POINTS}',
          '--eval_new_clients',
          f'--validation_clients={_ON_THE_WAY}',
      ),
      notes=(
          'Nobody published these numbers, so there is no paper scale.',
          f'How fast accuracy grows is read off tests of {_ON_THE_WAY} known'
          f' clients and of as many new ones, if there are,'
          f' every {users.rounds // _POINTS} rounds. By them nothing is chosen'
          ' or ended; the first runs have none, so that their hours are fewer.',
          *_BUDGETS,
          'Pixels have mean 0 and variance 1 over the train split of the file,'
          ' of all clients whose names are of the form: known ones, new ones'
          ' and those not drawn. Some of these examples are tested on.',
          'New clients adapt on three quarters of their examples, as known'
          ' clients train on, and are tested on the rest.',
          'All have the network lenet, but CAFeMe and its FedRep, which have'
          ' those of their paper, and FedBN, which needs batch normalisation'
          ' and is to be compared with fed_avg norm_cnn.',
          'KB are read off the types of what a client is sent and sends, zeros'
          ' included: LG-FedAvg goes on sending layers that are no longer'
          ' averaged, IFCA models that a client has not trained.',
          'Time is the median wall clock of a round, server included, divided'
          ' by its ten clients, on a machine that may have had other work.',
          'FedProto has nothing for new clients. FRL, Personalized FL and'
          ' one-shot fine-tuning are for groups.',
          *users.notes,
          *(
              [
                  'Not searched for yet, with the rates of the demonstration:'
                  f' {", ".join(unsearched)}.'
              ]
              if unsearched
              else []
          ),
      ),
  )


def _search(users: _Users) -> tables.Table:
  rounds = users.rounds // _SHARE_OF_ROUNDS
  on = searches.of_clients(rounds)
  return tables.Table(
      name=f'{users.name}_search',
      title=f'The search for the rates: {users.title}',
      source='ours',
      settings=(
          tables.Setting(
              'Validation examples',
              measures=(tables.Measure('After the last round', on.path),),
          ),
      ),
      rows=tuple(
          searches.candidate_row(users.row(method, rounds), hparams)
          for method, candidates in users.candidates().items()
          for hparams in candidates
      ),
      scales={
          'smoke': tables.Scale(
              seeds=(0,),
              flags=('--rounds=4', '--eval_every=4', '--num_clients=20'),
              changes='4 rounds, 20 clients.',
          ),
          'cpu': tables.Scale(seeds=(0,), hours=users.hours[1]),
      },
      flags=(
          *users.flags(users.clients_of_search, rounds),
          '--num_new_clients=0',
          *on.flags[:1],  # The fraction; once, since some adapt for long.
          f'--eval_every={rounds}',
          '--protocol=none',
      ),
      notes=(
          'Mean accuracy of known clients on a fifth of their examples, which'
          ' they do not train on here, after a third of the rounds; the'
          ' quarter that would be the test part is not touched. The users are'
          ' none of those of the table. The table takes the best row of each'
          ' method, the first of several, but none that has diverged. After a'
          ' third of the rounds what learns fast is ahead, which need not be'
          ' ahead at the end.',
      ),
  )


def _forms(users: _Users) -> tables.Table:
  """Returns FedAvg's search on clients of several forms."""
  search = _search(users)
  return dataclasses.replace(
      search,
      name=f'{users.name}_forms',
      title=f'FedAvg with other pixels or clients, for {users.name}',
      settings=tuple(
          dataclasses.replace(
              search.settings[0],
              name=name,
              flags=(
                  _dataset_options(clients, scaling),
                  f'--num_clients={number}',
              ),
          )
          for name, (clients, number, scaling) in users.forms.items()
      ),
      rows=tuple(
          row for row in search.rows if row.name.startswith('fed_avg learning')
      ),
      scales={
          **search.scales,
          'cpu': dataclasses.replace(
              search.scales['cpu'], hours=users.hours[2]
          ),
      },
      notes=(
          'Mean accuracy of known clients on a fifth of their examples, as in'
          ' the search and on its users. The first setting is that of the'
          ' search. Accuracies of settings with other clients are of other'
          ' tasks: they say whether FedAvg learns it in these rounds, not which'
          ' is better.',
      ),
  )


def found(users: _Users, folder: str) -> str:
  """Returns what a search has found, as it stands in `_FOUND`.

  Args:
    users: Whose search it is.
    folder: Of the comparison, with its `table.json`.
  """
  content = json.loads((pathlib.Path(folder) / 'table.json').read_text())
  entries = {e['row']: e for e in content['entries'] if e['mean'] is not None}
  best = {}
  for method, candidates in users.candidates().items():
    of_method = [
        (entries[name], hparams)
        for hparams in candidates
        for name in [searches.row_name(method, hparams)]
        if name in entries
    ]
    usable = [
        (entry['mean'], hparams)
        for entry, hparams in of_method
        if not entry.get('diverged')
    ]
    if usable and len(of_method) == len(candidates):
      best[method] = max(usable, key=lambda pair: pair[0])[1]
  return ''.join(f'        {m!r}: {h!r},\n' for m, h in best.items())


WRITERS = _Users(
    name='users_mnist_writers',
    title='All methods on MNIST, whose clients are its writers',
    file='mnist_by_writer.sqlite',
    clients=r'f\d\d\d[147]_.*',
    clients_of_search=r'f\d\d\d[258]_.*',
    num_clients=100,
    num_new_clients=50,
    steps=7,
    rounds=100,
    notes=(
        'MNIST by the writers that NIST tells: a seed draws 100 known and 50'
        ' new ones of 251, with 63 images to train on and 21 to be tested on in'
        ' the mean. 198 of them have all ten classes and differ in their hands;'
        ' the others have six to nine. The least has 9 images, 74 have fewer'
        ' than 30.',
        'A known client trains in ten rounds on average.',
        'That pixels are scaled was first chosen by trial runs on clients of'
        ' this table, by test accuracy, the same for all methods. On users of'
        " the search FedAvg's best of six rates is as good either way.",
    ),
    forms={
        'Scaled': (r'f\d\d\d[258]_.*', 100, 'standard'),
        'As they are': (r'f\d\d\d[258]_.*', 100, 'raw'),
    },
    hours=(1.8, 1.0, 0.05),
)
DRAWERS = _Users(
    name='users_omniglot_drawers',
    title='All methods on Omniglot, by alphabet and half of its drawers',
    file='omniglot_by_drawer.sqlite',
    clients=r'([A-J].*_[01])\d',
    clients_of_search=r'([K-Z].*_[01])\d',
    num_clients=44,
    num_new_clients=12,
    steps=23,
    rounds=300,
    notes=(
        'Omniglot by its drawers, nine or ten of an alphabet to a client, since'
        ' one has drawn each character once: 44 known and 12 new clients of 28'
        ' alphabets, with 14 to 52 of 873 classes each, and 7.1 drawings of a'
        ' character to train on and 2.4 to be tested on in the mean; 6 to 7 %'
        ' of the classes of known clients have none to be tested on. Drawers 01'
        ' to 09 of an alphabet are a client and 10 to 19 another; 20 is left'
        ' out.',
        'A known client trains in 68 rounds on average.',
        'Every seed draws of the same 56 clients. Of a new client the other'
        ' half of its alphabet is known but for two of 36 (both in seed 0, of'
        ' one alphabet): new are the drawers, not the script.',
        'The worst decile of 12 new clients is the worst of them, of 44 known'
        ' ones the worst four.',
        'FedMeta, FedMeta-Per and Per-FedAvg have twelve configurations in the'
        ' search: of their first six more than half ended with a loss of'
        ' training that was no number, so that six more have smaller outer'
        ' rates.',
        'Classes with fewer examples than `shots`: of 1,499 (client, class) of'
        ' the search 454 with 5, and 11 with 2; of about 1,370 of a seed of the'
        ' table 43 to 48, and one at most. So shots of 5 were worse off in the'
        ' search. 23 minibatches are 1.1 to 1.2 passes with known clients in'
        ' the mean, and 1.45 in the search.',
        'Pixels at the border are seldom inked, so that scaling makes them up'
        ' to 428. That is hard on plain gradient steps, and yet the best of'
        ' three ways for FedAvg on users of the search.',
        'What a client is was chosen by trial runs on clients of this table, by'
        ' test accuracy; it is the same for all methods.',
    ),
    forms={
        'Scaled': (r'([K-Z].*_[01])\d', 44, 'standard'),
        'By channel': (r'([K-Z].*_[01])\d', 44, 'channels'),
        'As they are': (r'([K-Z].*_[01])\d', 44, 'raw'),
        'Four or five drawers': (r'([K-Z].*_[01])[0-4]', 44, 'standard'),
        'All drawers': (r'([K-Z].*)_[01]\d', 22, 'standard'),
    },
    further=('among_own', 'worst_decile'),
    hours=(None, 2.7, 0.09),
    more={
        'per_fed_avg': _adapting(0.003, 0.01),
        'fedmeta_per': _grid(
            inner_learning_rate=_THREE, outer_learning_rate=(0.03, 0.1)
        ),
        'fedmeta': _grid(
            inner_learning_rate=_THREE, outer_learning_rate=(0.03, 0.1)
        ),
    },
)

TABLES = (
    _table(WRITERS),
    _search(WRITERS),
    _forms(WRITERS),
    _table(DRAWERS),
    _search(DRAWERS),
    _forms(DRAWERS),
)
