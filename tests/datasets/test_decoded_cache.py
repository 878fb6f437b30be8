"""The file of decoded images."""

import numpy as np
import pytest

from tff_meta.datasets import decoded_cache


class _Decoder:
  """Returns other arrays at every call, and counts the calls."""

  def __init__(self):
    self.num_calls = 0

  def __call__(self):
    self.num_calls += 1
    x = np.full((2, 3), self.num_calls, np.uint8)
    return {'x': x, 'y': x[0]}


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / 'decoded.npz')


def _load(path, source, decoder):
  return decoded_cache.load_or_decode(path, source, ('x', 'y'), decoder)


def test_decodes_once(path):
  decoder = _Decoder()
  first = _load(path, 'a', decoder)
  second = _load(path, 'a', decoder)
  assert decoder.num_calls == 1
  np.testing.assert_array_equal(first['x'], second['x'])
  assert second['x'].dtype == np.uint8
  assert list(second) == ['x', 'y']


def test_decodes_again_for_another_source(path):
  decoder = _Decoder()
  _load(path, 'a', decoder)
  assert _load(path, 'b', decoder)['x'][0, 0] == 2
  assert _load(path, 'b', decoder)['x'][0, 0] == 2


@pytest.mark.parametrize('num_bytes', [0, 7, 300])
def test_decodes_again_when_the_file_is_damaged(path, num_bytes):
  decoder = _Decoder()
  _load(path, 'a', decoder)
  with open(path, 'rb') as file:
    start = file.read()[:num_bytes]
  with open(path, 'wb') as file:
    file.write(start)
  assert _load(path, 'a', decoder)['x'][0, 0] == 2
  assert _load(path, 'a', decoder)['x'][0, 0] == 2


def _flips(contents):
  """A few dozen bits: random ones, and all that once were the worst."""
  size = 8 * len(contents)
  yield from map(int, np.random.default_rng(0).integers(size, size=40))
  for field in (b'PK\x01\x02', b'x.npy', b'y.npy', b'(2, 3)', b'PK\x05\x06'):
    at = contents.rindex(field)
    # In the directory flags and compression follow 8 bytes after its mark.
    yield from range(8 * at, 8 * (at + 12), 3)


def test_a_bit_that_is_flipped_makes_no_difference(path):
  """The arrays are right, be the bit of no use or the file made anew."""
  _load(path, 'a', _Decoder())
  with open(path, 'rb') as file:
    contents = file.read()
  num_made_anew = 0
  for bit in _flips(contents):
    damaged = bytearray(contents)
    damaged[bit // 8] ^= 1 << bit % 8
    with open(path, 'wb') as file:
      file.write(damaged)
    decoder = _Decoder()
    arrays = _load(path, 'a', decoder)
    assert {k: v.tolist() for k, v in arrays.items()} == {
        'x': [[1] * 3] * 2,
        'y': [1] * 3,
    }
    num_made_anew += decoder.num_calls
  assert num_made_anew > 60


def test_an_array_that_is_cut_short_is_made_anew(path):
  """A digit of its shape is damaged, so that it ends before its checksum."""
  _load(path, 'a', _Decoder())
  with open(path, 'rb') as file:
    contents = file.read()
  for change in ((b'(2, 3)', b'(1, 3)'), (b'(2, 3)', b'(2, 2)')):
    with open(path, 'wb') as file:
      file.write(contents.replace(*change))
    decoder = _Decoder()
    assert _load(path, 'a', decoder)['x'].shape == (2, 3)
    assert decoder.num_calls == 1


def test_works_where_nothing_can_be_written(tmp_path):
  decoder = _Decoder()
  path = str(tmp_path / 'missing' / 'decoded.npz')
  assert _load(path, 'a', decoder)['x'][0, 0] == 1
  assert _load(path, 'a', decoder)['x'][0, 0] == 2


def test_leaves_no_temporary_file(path, tmp_path):
  _load(path, 'a', _Decoder())
  assert [p.name for p in tmp_path.iterdir()] == ['decoded.npz']
