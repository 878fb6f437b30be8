"""What a paper's text gives, beside what its released code does.

Where both differ the presets `paper` and `release` have one each. Here both
meet the same data, clients, rounds and rates: those of the tables of
the papers, or of Omniglot, which is ours. CAFeMe has its three kinds of gates
beside them. Nobody published these numbers.
"""

import dataclasses

from binaries import flag_files
from binaries.experiments import cafeme
from binaries.experiments import fedmeta_per
from binaries.experiments import frl
from binaries.experiments import metavers
from tff_meta.comparison import searches
from tff_meta.comparison import tables

_PAPER, _RELEASE = 'paper', 'release'
_NOTES = (
    'Both rows have the data, clients, rounds and rates of the same table; they'
    ' differ in what the text of the paper and its released code say of the'
    ' algorithm.',
)


def _row(table: tables.Table, row: str, name: str, *flags: str) -> tables.Row:
  """Returns a row of a published table with other flags, under another name."""
  found = next(r for r in table.rows if r.name == row)
  return dataclasses.replace(
      found, name=name, flags=(*found.flags, *flags), published={}
  )


def _table(
    of: tables.Table,
    name: str,
    title: str,
    rows: tuple[tables.Row, ...],
    *,
    settings: tuple[str, ...],
    seeds: tuple[int, ...],
    hours: float | None = None,
    notes: tuple[str, ...] = (),
) -> tables.Table:
  """Returns a table with the settings and flags of another."""
  return tables.Table(
      name=name,
      title=title,
      source='ours',
      settings=tuple(of.setting(setting) for setting in settings),
      rows=rows,
      scales={
          'smoke': dataclasses.replace(
              of.scale('smoke'), rows=None, settings=settings[:1]
          ),
          'cpu': tables.Scale(seeds=seeds, hours=hours),
      },
      flags=of.flags,
      notes=(*_NOTES, *notes),
  )


_METAVERS_DATA = {  # Without the weight decay of the code.
    '50 clients': 'shots=20,queries=30,gamma=0.4',
    '100 clients': 'shots=20,queries=30,gamma=0.3',
    '500 clients': 'shots=20,queries=0,gamma=0.2',
}
METAVERS = _table(
    metavers.CIFAR10,
    'presets_metavers_cifar10',
    "MetaVers on CIFAR-10: the paper's text and the released code",
    (
        _row(metavers.CIFAR10, 'MetaVers', _RELEASE),
        dataclasses.replace(
            _row(metavers.CIFAR10, 'MetaVers', _PAPER, '--preset=paper'),
            setting_flags={
                setting: (f'--hparams={hparams}',)
                for setting, hparams in _METAVERS_DATA.items()
            },
        ),
    ),
    settings=tuple(_METAVERS_DATA),
    seeds=(0, 21, 42),
    hours=0.8,
    notes=(
        'Shots, queries and gamma of a data set are those of the code in both'
        ' rows, because the text has no others.',
    ),
)

_CAFEME_SETTINGS = ('Shards', 'Dirichlet 0.3')


def _gates(gating: str) -> tables.Row:
  """Returns CAFeMe as it is in each setting, but for its gates."""
  name = f'{_RELEASE} with gates {gating}'
  of_settings = {
      setting: flag_files.expand(cafeme.RMNIST.setting(setting).flags)
      for setting in _CAFEME_SETTINGS
  }
  return dataclasses.replace(
      _row(cafeme.RMNIST, 'CAFeMe', name),
      setting_flags={
          setting: searches.with_hparams(flags, {'gating': gating})[-1:]
          for setting, flags in of_settings.items()
      },
  )


CAFEME = _table(
    cafeme.RMNIST,
    'presets_cafeme_rmnist',
    "CAFeMe on rotated MNIST: the paper's text, the released code, and gates",
    (
        _row(cafeme.RMNIST, 'CAFeMe', _RELEASE),
        _row(cafeme.RMNIST, 'CAFeMe', _PAPER, '--preset=paper'),
        *(_gates(gating) for gating in ('c0', 'c2')),
    ),
    settings=_CAFEME_SETTINGS,
    seeds=(0, 1),
    notes=(
        'Gates are c1, a sigmoid that multiplies, in the first two rows; c0 are'
        ' added, and c2 multiply and add (FiLM).',
    ),
)

_FEDMETA_PER = {'MAML': 'maml', 'Meta-SGD': 'meta_sgd'}


def _fedmeta_per_row(name: str, inner: str, preset: str) -> tables.Row:
  """Returns a row with the rates of the paper's Table 6, not of the logs."""
  flag_file = flag_files.preset(f'fedmeta_per_mnist_{inner}')
  return tables.Row(
      f'{name} ({preset})',
      (flag_file, f'--preset={preset}', '--restrict_f1_to_client_labels'),
  )


FEDMETA_PER = _table(
    fedmeta_per.MNIST,
    'presets_fedmeta_per_mnist',
    "FedMeta-Per on MNIST: the paper's text and the released code",
    tuple(
        _fedmeta_per_row(name, inner, preset)
        for name, inner in _FEDMETA_PER.items()
        for preset in (_RELEASE, _PAPER)
    ),
    settings=('Known clients', 'New clients'),
    seeds=(1, 2, 3),
    hours=0.2,
    notes=(
        "Rates are those of the paper's table of rates. The step of the code's"
        ' outer Adam is about the rate itself, that of the plain gradient in'
        ' the text as much smaller as the gradient is.',
    ),
)

_GPAL = 'FRL distance + GPAL'
FRL = _table(
    frl.OMNIGLOT,
    'presets_frl_omniglot',
    "FRL on Omniglot: the paper's text and the released code",
    (
        _row(frl.OMNIGLOT, _GPAL, _PAPER),
        _row(frl.OMNIGLOT, _GPAL, _RELEASE, '--preset=release'),
    ),
    settings=tuple(setting.name for setting in frl.OMNIGLOT.settings),
    seeds=(0, 1),
    notes=(
        'Rates were chosen for the text, on groups of validation characters.',
    ),
)

TABLES = (METAVERS, CAFEME, FEDMETA_PER, FRL)
