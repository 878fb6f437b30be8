"""README's tables of results say what the runs kept in `results` say."""

import json
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / 'README.md').read_text()


def _entries(name):
  """Entries of a kept table that have run: (setting, row) -> measure -> it."""
  table = json.loads((_ROOT / 'results' / name / 'table.json').read_text())
  entries = {}
  for entry in table['entries']:
    if entry['mean'] is not None:
      cell = entries.setdefault((entry['setting'], entry['row']), {})
      cell[entry['measure']] = entry
  assert entries
  return entries


def _readme_table(begin):
  """Rows, lists of cells, of the first table after a text that README has."""
  assert _README.count(begin) == 1
  rows = []
  for line in _README.partition(begin)[2].splitlines():
    if line.startswith('| '):
      rows.append([cell.strip() for cell in line.strip('|').split(' | ')])
    elif rows:
      break
  return rows[2:]  # Without its header and the line under it.


def _mean(entry):
  return f'{entry["mean"]:.2f}'


def _seeds(entry, spread='half_width_95'):
  """Mean and spread over seeds, and the values in parentheses."""
  if entry['num_seeds'] == 1:
    return _mean(entry)
  values = ', '.join(f'{value:.2f}' for value in entry['values'].values())
  return f'{_mean(entry)} +- {entry[spread]:.2f} ({values})'


def _spread(entry):
  """Mean and spread within the one run."""
  assert entry['num_seeds'] == 1
  return f'{_mean(entry)} +- {entry["spread"]:.2f}'


def _published(entry, digits):
  if entry['published'] is None:
    return '–'
  published = f'{entry["published"]:.{digits}f}'
  if entry['published_spread'] is None:
    return published
  return f'{published} +- {entry["published_spread"]:.{digits}f}'


def _difference(entry):
  if entry['difference'] is None:
    return '–'
  return f'{entry["difference"]:+.2f}'


def _metavers(setting, row, cell):
  best = cell['Best round on validation']
  return [
      setting.removesuffix(' clients'),
      row,
      _published(best, 1),
      _seeds(best),
      _difference(best),
      _mean(cell['Last round']),
  ]


def _cafeme(setting, row, cell):
  entry = cell['After 50 steps']
  return [setting, row, _published(entry, 2), _seeds(entry), _difference(entry)]


def _fedec(setting, row, cell):
  del setting  # One.
  entry, last = cell['Last ten rounds'], cell['Last round']
  values = ', '.join(f'{value:.2f}' for value in last['values'].values())
  return [
      row,
      _published(entry, 2),
      _seeds(entry),
      _difference(entry),
      f'{_mean(last)} ({values})',
  ]


@pytest.mark.parametrize(
    'name, begin, line_of',
    [
        ('metavers_cifar10', '**MetaVers, Table 2, CIFAR-10**', _metavers),
        ('cafeme_rmnist', '**CAFeMe, Figure 3, rotated MNIST**', _cafeme),
        ('fedec_cifar10_100_2', '**FedEC, Table 2, CIFAR-10**', _fedec),
    ],
)
def test_numbers_over_seeds(name, begin, line_of):
  expected = [line_of(*key, cell) for key, cell in _entries(name).items()]
  assert sorted(_readme_table(begin)) == sorted(expected)


@pytest.mark.parametrize(
    'data, has_curve', [('mnist', False), ('cifar10', True)]
)
def test_known_and_new_clients_of_fedmeta_per(data, has_curve):
  entries = _entries(f'fedmeta_per_{data}')
  expected = []
  for row in dict.fromkeys(row for _, row in entries):
    line = [row]
    for setting in ('Known clients', 'New clients'):
      entry = entries[setting, row]['Micro']
      line += [
          f'{entry["published"]:g}',
          _seeds(entry, 'std'),
          _difference(entry),
      ]
    expected.append(line)
  found = _readme_table(
      f'**FedMeta-Per, Table 4, {data.upper().replace("CIFAR", "CIFAR-")}**'
  )
  if has_curve:
    found = [
        line[:4] + line[5:] for line in found
    ]  # Without the last ten tests.
  assert found == expected


@pytest.mark.parametrize(
    'name, begin, measures',
    [
        (
            'frl_omniglot',
            '### FRL on Omniglot',
            [
                f'{groups}, last round'
                for groups in ('IID', 'Non-IID', 'Mixed IID', 'Mixed non-IID')
            ],
        ),
        (
            'frl_cifar10',
            '### FRL on CIFAR-10',
            [
                f'{groups}, {which} round'
                for which in ('last', 'best')
                for groups in ('IID', 'Non-IID')
            ],
        ),
    ],
)
def test_new_groups(name, begin, measures):
  expected = [
      [row] + [_spread(cell[measure]) for measure in measures]
      for (_, row), cell in _entries(name).items()
  ]
  assert sorted(_readme_table(begin)) == sorted(expected)


def test_sizes_of_clients():
  entries = _entries('cafeme_rmnist_local_size')
  sizes = list(dict.fromkeys(setting for setting, _ in entries))
  expected = [
      [row] + [_mean(entries[size, row]['After 50 steps']) for size in sizes]
      for row in dict.fromkeys(row for _, row in entries)
  ]
  assert _readme_table('**Sizes of clients**') == expected
