"""Grids of an evaluation: what they take, and their files."""

import threading

import pytest

from tff_meta import plain_files
from tff_meta import registry
from tff_meta.training import grid_axes
from tff_meta.training import grids
from tff_meta.training import run_config

_FRL = registry.get('frl')


def _resolve(algorithm, **flags):
  return run_config.resolve(
      algorithm=algorithm,
      dataset='synthetic',
      rounds=1,
      seed=1,
      checkpoint_every=1,
      eval_every=0,
      validation_fraction=0.0,
      stratify=False,
      new_clients='held_out',
      select_best=False,
      select_by='macro',
      patience=0,
      protocols=(),
      execution='in_process',
      **flags,
  )


def test_axes_are_read():
  text = ' group_rounds = 1, 3;way=2,5 ;classifier=linear,distance'
  assert grid_axes.read_axes(text, _FRL) == {
      'group_rounds': ('1', '3'),
      'way': ('2', '5'),
      'classifier': ('linear', 'distance'),
  }


@pytest.mark.parametrize(
    'algorithm, text, problem',
    [
        ('frl', '', "as `axis=value,value;axis=value`, found ''"),
        ('frl', 'way', "found 'way'. Tip: --grid=\"way=2"),
        ('frl', 'way=2;', "as `axis=value,value;axis=value`, found ''"),
        ('frl', 'way=', "of the axis way of --grid, found '', of which all"),
        ('frl', 'way=2,,5', "found '2,,5', of which one is empty"),
        ('frl', 'way=2;way=5', 'axis way of --grid once, found twice'),
        ('frl', 'group_round=1', "did you mean 'group_rounds'"),
        ('frl', 'rounds=1', "that frl has: group_rounds, .*; found 'rounds'"),
        ('frl', 'tau=1', "that frl has: group_rounds, .*; found 'tau'"),
        ('fedec', 'group_rounds=1', 'that fedec has: group_clients, .*; found'),
        ('scaffold', 'num_clients=5', "scaffold has: .*; found 'num_clients'"),
        ('fedmeta_per', 'f1_restrict_to_client_labels=true', 'has: .*; found'),
    ],
)
def test_impossible_axes_are_refused(algorithm, text, problem):
  with pytest.raises(ValueError, match=problem):
    grid_axes.read_axes(text, registry.get(algorithm))


@pytest.mark.parametrize(
    'axis, protocol, having',
    [
        ('group_rounds', 'new_class_clients', 'new_groups, new_groups_iid'),
        ('way', 'known_clients', 'new_groups, .*, new_class_clients'),
        ('group_clients', 'new_clients', 'new_groups'),
        ('eval_support_fraction', 'new_groups', 'known_clients, new_clients'),
    ],
)
def test_axes_that_a_protocol_lacks_are_refused(axis, protocol, having):
  problem = f"that {protocol} has, found '{axis}', which is of {having}"
  with pytest.raises(ValueError, match=problem):
    grid_axes.check_protocols({axis: ()}, [protocol])
  every = ['new_groups_mixed', 'new_class_clients', 'known_clients']
  grid_axes.check_protocols({'eval_shots': (), 'epochs': ()}, every)


def test_all_combinations_are_configurations_of_their_own():
  config = _resolve('frl', hparams='epochs=2')
  axes = grid_axes.read_axes('group_rounds=1,3;way=2,3;eval_shots=5', _FRL)
  found = grids.combinations(axes, config)
  assert [tuple(point.values.values()) for point in found] == [
      (1, 2, 5),
      (1, 3, 5),
      (3, 2, 5),
      (3, 3, 5),
  ]
  for point in found:
    changed, values = point.config, point.values
    assert changed.hparams.rounds == values['group_rounds']
    assert changed.evaluation.way == values['way']
    assert changed.evaluation.eval_shots == 5
    assert changed.hparams.epochs == 2  # What is on no axis stays.
  digests = {grids.settings('new_groups', p.config, 1, {}) for p in found}
  assert len(digests) == 4


@pytest.mark.parametrize(
    'algorithm, text, problem',
    [
        (
            'frl',
            'way=2,two',
            "`way` to be a whole .*found 'two'.*grid, way=two",
        ),
        ('frl', 'way=1', "`way` .* of at least 2 .*'1'. .* That is of --grid"),
        ('frl', 'group_rounds=1.5', "`group_rounds` .* least 1 .* found '1.5'"),
        ('frl', 'group_rounds=0', "`group_rounds` .* least 1 .* found '0'"),
        ('frl', 'group_clients=0', "`group_clients` .* least 1 .* found '0'"),
        ('frl', 'eval_shots=5,0', '`eval_shots` .* least 1 .*eval_shots=0'),
        ('frl', 'classifier=tree', 'one of distance, linear, found .tree'),
        ('frl', 'epochs=1,01', 'axis epochs of --grid once, found 1,01'),
        ('fedec', 'eval_support_fraction=1.5', 'between 0 and 1, found 1.5'),
        ('fedec', 'momentum=1.5', 'momentum'),
        ('one_shot_ft', 'kept_clients=2;group_clients=4,2', 'nobody would be'),
    ],
)
def test_impossible_values_are_refused(algorithm, text, problem):
  axes = grid_axes.read_axes(text, registry.get(algorithm))
  hparams = 'kept_clients=2' if algorithm == 'one_shot_ft' else ''
  config = _resolve(algorithm, hparams=hparams)
  with pytest.raises(ValueError, match=problem):
    grids.combinations(axes, config)


_SUMMARY = {
    'accuracy_mean': 1 / 3,
    'accuracy_interval_95': [0.1, 0.2],
    'accuracy_micro': 0.1 + 0.2,
    'accuracy_before_mean': None,
    'references': {
        'untrained': dict.fromkeys(
            (
                'accuracy_mean',
                'accuracy_half_width_95',
                'gain',
                'gain_half_width_95',
            ),
            0.25,
        )
        | {'accuracy_std': 0.5}
    },
}

_UNITS = b'group_id\n0\n'


def _row(way, config, settings, summary=None):
  point = grids.Combination({'way': way}, config)
  return grids.make_row(point, 7, summary or _SUMMARY, settings, _UNITS)


def test_a_file_keeps_all_rows_as_they_are(tmp_path):
  config, path = _resolve('frl'), tmp_path / 'grid_new_groups.csv'
  known = grid_axes.axes_of(_FRL)
  assert grids.read_rows(path) == {}
  rows = {s: _row(2, config, s) for s in 'ab'}
  for row in rows.values():
    grids.add_row(path, row, known, _UNITS)
  assert grids.read_rows(path) == rows
  assert float(rows['a']['accuracy_mean']) == 1 / 3
  assert rows['a']['untrained/gain'] == '0.25'
  assert not {'accuracy_interval_95', 'accuracy_before_mean'} & set(rows['a'])
  point = grids.Combination({'epochs': 3, 'group_rounds': 1}, config)
  rows['c'] = grids.make_row(point, 7, _SUMMARY | {'new': 1}, 'c', _UNITS)
  # Of another grid, and a later version.
  grids.add_row(path, rows['c'], known, _UNITS)
  assert grids.read_rows(path) == rows
  header = path.read_text().splitlines()[0].split(',')
  assert header[:3] == ['group_rounds', 'way', 'epochs']
  assert header[-2:] == ['settings', 'checksum']
  assert grids.with_values(rows['a'], point)['epochs'] == '3'


def test_no_row_is_lost_where_two_add_at_once(tmp_path, monkeypatch):
  """The second adds its row when the first has read, and not yet written."""
  config, path = _resolve('frl'), tmp_path / 'grid_new_groups.csv'
  read, others = grids.read_rows, []

  def reading(file):
    rows = read(file)
    if not others:
      others.append(threading.Thread(target=add, args=('b',)))
      others[0].start()
      others[0].join(timeout=0.5)
    return rows

  def add(name):
    grids.add_row(path, _row(2, config, name), ('way',), _UNITS)

  monkeypatch.setattr(grids, 'read_rows', reading)
  add('a')
  others[0].join()
  assert read(path).keys() == {'a', 'b'}


def test_another_file_is_refused_and_stays(tmp_path):
  config, path = _resolve('frl'), tmp_path / 'grid_new_groups.csv'
  grids.add_row(path, _row(2, config, 'a'), ('way',), _UNITS)
  whole = path.read_bytes()
  others = [
      whole.replace(b'0.25', b'0.35', 1),
      whole[:-3],
      whole[:-1] + b',9\n',
      b'name,value\n1,2\n',
      b'\xff\xfe' + whole,
      whole + b'a\0b\n',
      whole + b'"',
  ]
  for content in others:
    path.write_bytes(content)
    for use in (
        lambda: grids.read_rows(path),
        lambda: grids.add_row(path, _row(3, config, 'b'), ('way',), _UNITS),
    ):
      with pytest.raises(plain_files.DamagedFileError, match='as it was writ'):
        use()
    assert path.read_bytes() == content


def test_axes_without_effect():
  axes = {'way': ('2', '3'), 'epochs': ('1', '2'), 'eval_shots': ('5',)}

  def rows(accuracy):
    return [
        dict(
            way=way,
            epochs=epochs,
            eval_shots='5',
            accuracy_mean=str(accuracy(way, epochs)),
            accuracy_micro='0.5',
        )
        for way in axes['way']
        for epochs in axes['epochs']
    ]

  assert grids.without_effect(axes, rows(lambda way, _: way)) == ['epochs']
  both = rows(lambda way, epochs: way + epochs)
  assert grids.without_effect(axes, both) == []
