import collections
import hashlib
import io
import json
import os
import pathlib
from typing import NamedTuple
import zipfile

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_meta import array_archives
from tff_meta.training import checkpoints


class _State(NamedTuple):
  weights: collections.OrderedDict
  phase: np.int32
  empty: tuple = ()


def _state(offset=0.0):
  body = collections.OrderedDict(
      z=np.float32([[1, 2, 3], [4, 5, 6]]) + np.float32(offset),
      a=np.float64(0.1) + offset,
  )
  return _State(collections.OrderedDict(body=body), np.int32(2))


def _checkpoint(rounds, offset=0.0):
  return checkpoints.Checkpoint(
      config={'algorithm': 'frl', 'seed': 3},
      position=checkpoints.Position(rounds, rounds, 10 * rounds),
      server_state=checkpoints.to_arrays(_state(offset)),
      best=checkpoints.Best(
          rounds - 1, 0.5, checkpoints.to_arrays(_state(offset - 1))
      ),
  )


@pytest.fixture
def store(tmp_path):
  store = checkpoints.CheckpointStore(tmp_path / 'checkpoints', num_kept=2)
  store.create()
  for rounds in (1, 2, 3):
    store.save(_checkpoint(rounds, offset=rounds))
  return store


def _assert_identical(actual, expected):
  assert actual.keys() == expected.keys()
  for name, array in expected.items():
    assert actual[name].tobytes() == array.tobytes()
    assert actual[name].dtype == array.dtype


def _load(store, **kwargs):
  reports = []
  return store.load_latest(reports.append, **kwargs), reports


def _rounds(store):
  return [checkpoints_rounds(path) for path in store.paths()]


def checkpoints_rounds(path: pathlib.Path) -> int:
  return int(path.stem.removeprefix('round_'))


def test_loads_what_was_saved_bit_for_bit(store):
  loaded, reports = _load(store)

  expected = _checkpoint(3, offset=3)
  assert not reports
  assert loaded.config == expected.config
  assert loaded.position == expected.position
  _assert_identical(loaded.server_state, expected.server_state)
  assert loaded.best[:2] == (2, 0.5)
  _assert_identical(loaded.best.server_state, expected.best.server_state)


def test_no_best_round_is_none(store):
  store.save(_checkpoint(4)._replace(best=None))
  assert _load(store)[0].best is None


def test_restores_the_structure_of_the_template(store):
  loaded, _ = _load(store)

  state = checkpoints.from_arrays(_state(), loaded.server_state)

  assert isinstance(state, _State)
  assert list(state.weights['body']) == ['z', 'a']
  np.testing.assert_array_equal(
      state.weights['body']['z'], _state(3).weights['body']['z']
  )
  assert state.phase == 2


def test_keeps_the_newest(store):
  assert _rounds(store) == [3, 2]


@pytest.mark.parametrize('kept', [0, 40, 200, -1])
def test_a_truncated_file_is_reported_and_the_previous_one_used(store, kept):
  newest = store.paths()[0]
  newest.write_bytes(newest.read_bytes()[:kept])

  loaded, reports = _load(store)

  assert loaded.position.rounds == 2
  assert len(reports) == 1 and str(newest) in reports[0]


def test_every_flipped_byte_is_found(store):
  newest = store.paths()[0]
  content = newest.read_bytes()
  rng = np.random.default_rng(5)
  for place in [0, 30, 93, *rng.integers(0, len(content), 20)]:
    flipped = bytearray(content)
    flipped[place] ^= 1 << rng.integers(8)
    newest.write_bytes(flipped)
    loaded, reports = _load(store)
    assert (loaded.position.rounds, len(reports)) == (2, 1), place


def test_no_good_checkpoint_is_none_with_every_reason(store):
  for path in store.paths():
    path.write_bytes(b'')

  loaded, reports = _load(store)

  assert loaded is None
  assert len(reports) == 2


def test_an_unusable_checkpoint_is_passed_over(store):
  loaded, reports = _load(
      store,
      is_usable=lambda c: 'too new' if c.position.rounds > 2 else None,
  )

  assert loaded.position.rounds == 2
  assert 'too new' in reports[0]


def test_a_save_that_was_cut_off_leaves_the_old_and_is_cleaned_up(store):
  directory = store.paths()[0].parent
  leftover = directory / 'round_000000004.ckpt.123.tmp'
  leftover.write_bytes(store.paths()[0].read_bytes()[:50])

  assert _load(store)[0].position.rounds == 3

  store.save(_checkpoint(4))
  assert not leftover.exists()
  assert _rounds(store) == [4, 3]


def test_an_empty_directory_has_no_checkpoint(tmp_path):
  assert _load(checkpoints.CheckpointStore(tmp_path / 'none')) == (None, [])


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda a: a.pop('phase'), 'phase'),
        (lambda a: a.update(phase=np.int64(2)), r'int32\[\], found int64\[\]'),
        (
            lambda a: a.update(phase=np.int32([2])),
            r'int32\[\], found int32\[1\]',
        ),
        (lambda a: a.update(more=np.int32(2)), 'more'),
    ],
)
def test_arrays_of_another_process_are_refused(change, message):
  arrays = checkpoints.to_arrays(_state())
  change(arrays)
  with pytest.raises(ValueError, match=message):
    checkpoints.from_arrays(_state(), arrays)


def _restore_tree(arrays):
  """As of a type whose first dimension is open in one part."""
  return checkpoints.from_arrays(
      [{'tree': np.zeros((1, 3)), 'x': np.zeros(2)}],
      arrays,
      tff.to_type(
          [
              dict(
                  tree=tff.TensorType(np.float64, [None, 3]),
                  x=(np.float64, [2]),
              )
          ]
      ),
  )


@pytest.mark.parametrize('levels', [0, 1, 5])
def test_dimensions_that_a_type_leaves_open_may_change(levels):
  tree = np.ones((levels, 3))
  (restored,) = _restore_tree({'0/tree': tree, '0/x': np.ones(2)})
  np.testing.assert_array_equal(restored['tree'], tree)


@pytest.mark.parametrize(
    'tree, x, message',
    [
        ((1, 4), 2, r'float64\[\?, 3\], found float64\[1, 4\]'),
        ((3,), 2, r'float64\[\?, 3\], found float64\[3\]'),
        ((2000, 3), 2, r'float64\[\?, 3\], found float64\[2000, 3\]'),
        ((1, 3), 3, r'float64\[2\], found float64\[3\]'),
    ],
)
def test_all_other_dimensions_may_not(tree, x, message):
  with pytest.raises(checkpoints.IncompatibleCheckpointError, match=message):
    _restore_tree({'0/tree': np.ones(tree), '0/x': np.ones(x)})


def test_a_state_with_text_is_refused():
  with pytest.raises(TypeError, match='name'):
    checkpoints.to_arrays({'name': 'conv4'})


def test_one_checkpoint_is_too_few_to_keep(tmp_path):
  with pytest.raises(ValueError, match='at least 2'):
    checkpoints.CheckpointStore(tmp_path, num_kept=1)


def _file_of(manifest, arrays=None, save=np.savez, claim=None):
  """Returns the file of a checkpoint with a right checksum, made by a foe."""
  text = manifest if isinstance(manifest, str) else json.dumps(manifest)
  members = {'server/x': np.zeros(3)} if arrays is None else arrays
  buffer = io.BytesIO()
  save(buffer, manifest=np.frombuffer(text.encode(), np.uint8), **members)
  body = buffer.getvalue()
  if claim is not None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
      archive.writestr('server/x.npy', claim)
    body = buffer.getvalue()
  digest = hashlib.sha256(body).hexdigest().encode()
  return b'tff_meta checkpoint 1 sha256 ' + digest + b'\n' + body


def _manifest(rounds=3, best=None, config=None, **position):
  position = {
      'rounds': rounds,
      'metrics_rows': 3,
      'metrics_bytes': 9,
  } | position
  return {'position': position, 'best': best, 'config': config or {}}


def _nested(depth):
  return {'a': _nested(depth - 1)} if depth else {}


def _header(shape, dtype='<f4'):
  text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}"
  text += ' ' * (117 - len(text)) + '\n'
  return b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text.encode()


def test_what_foes_start_from_is_a_checkpoint(store):
  store.paths()[0].write_bytes(_file_of(_manifest()))
  loaded, reports = _load(store)
  assert loaded.position.rounds == 3 and not reports


@pytest.mark.parametrize(
    'content',
    [
        _file_of(_manifest(rounds='a')),
        _file_of(_manifest(rounds=-2)),
        _file_of(_manifest(rounds=2)),  # It is called round 3.
        _file_of(_manifest(rounds=3.0)),
        _file_of(_manifest(rounds=True)),
        _file_of(_manifest(rounds=float('nan'))),
        _file_of(_manifest(metrics_bytes=10**30)),
        _file_of(_manifest(metrics_rows=-1)),
        _file_of(_manifest(metrics_rows=None)),
        _file_of(_manifest(metrics_sha256=7)),
        _file_of(_manifest(metrics_sha256='x')),
        _file_of(_manifest(more=1)),
        _file_of(_manifest(best=3)),
        _file_of(_manifest(best=[1, 0.5])),
        _file_of(_manifest(best={'rounds': 4, 'value': 0.5})),
        _file_of(_manifest(best={'rounds': 1, 'value': '0.5'})),
        _file_of(_manifest(best={'rounds': 1, 'value': float('inf')})),
        _file_of(_manifest(best={'rounds': 1, 'server_state': {}})),
        _file_of(_manifest(config=[1])),
        _file_of(_manifest() | {'position': [3, 3, 9]}),
        _file_of('[' * 100_000),
        _file_of(_manifest(config=_nested(200))),
        _file_of('{"position": ' + '9' * 10_000 + '}'),
        _file_of('[1]'),
        _file_of('\xff{'),
        _file_of({}),
        _file_of(_manifest(), {'elsewhere/x': np.zeros(3)}),
        _file_of(_manifest(), {'server/x': np.array(['a'])}),
        _file_of(_manifest(), {'server/x': np.zeros(9, 'datetime64[s]')}),
        _file_of(_manifest(), {'server/x': np.array([{}], object)}),
        _file_of(_manifest(), save=np.savez_compressed),
        _file_of({}, claim=_header('(1000000000000,)')),
        _file_of({}, claim=_header('(-1,)')),
        _file_of({}, claim=_header('(2**')),
        _file_of({}, claim=_header('(0,)', '<V0')),
        _file_of({}, claim=_header('(' * 60)),
        _file_of({}, claim=b'\x93NUMPY\x03\x00'),
        _file_of({}, claim=b''),
    ],
    ids=range(38),
)
def test_a_hostile_checkpoint_is_reported_and_the_previous_one_used(
    store, content
):
  newest = store.paths()[0]
  newest.write_bytes(content)

  loaded, reports = _load(store)

  assert loaded.position.rounds == 2
  assert len(reports) == 1 and str(newest) in reports[0]
  assert 'checksum does not match' not in reports[0]
  assert len(reports[0]) < 800


def test_what_is_no_plain_file_or_too_large_is_passed_over(store):
  newest = store.paths()[0]
  content = newest.read_bytes()
  large = _load(store, most_bytes=len(content) - 1)
  assert large[0] is None and 'at most' in large[1][0]
  for place in (os.mkfifo, os.mkdir, lambda p: os.symlink('/dev/full', p)):
    newest.unlink()
    place(newest)
    loaded, reports = _load(store)
    assert loaded.position.rounds == 2 and len(reports) == 1
    if newest.is_dir():
      newest.rmdir()
      newest.write_bytes(content)


def test_later_ones_that_were_not_gone_on_from_stay_until_made_again(store):
  store.save(_checkpoint(1))
  assert _rounds(store) == [3, 2, 1]
  store.save(_checkpoint(2, offset=9))
  store.save(_checkpoint(3, offset=9))
  assert _rounds(store) == [3, 2]
  assert _load(store)[0].server_state['phase'] == 2


def test_byte_strings_of_a_state_are_kept():
  """As TFF's private aggregators have them; another one may be longer."""
  template = {'event': b'none', 'more': np.array([b'', b'ab'], object)}
  state = {'event': b'GaussianDpEvent', 'more': np.array([b'x', b'yz'], object)}
  arrays = array_archives.load(
      array_archives.dump(checkpoints.to_arrays(state))
  )
  restored = checkpoints.from_arrays(template, arrays)
  assert restored['event'] == b'GaussianDpEvent'
  assert restored['more'].tolist() == [b'x', b'yz']


@pytest.mark.parametrize(
    'leaf', [None, 'text', b'a' * 300, np.array([b'a\0'], object)]
)
def test_other_leaves_are_refused(leaf):
  with pytest.raises(TypeError, match='the state at `x`'):
    checkpoints.to_arrays({'x': leaf})
