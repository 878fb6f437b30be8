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
    return {'x': np.full((2, 3), self.num_calls, np.uint8)}


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / 'decoded.npz')


def _load(path, source, decoder):
  return decoded_cache.load_or_decode(path, source, decoder)


def test_decodes_once(path):
  decoder = _Decoder()
  first = _load(path, 'a', decoder)
  second = _load(path, 'a', decoder)
  assert decoder.num_calls == 1
  np.testing.assert_array_equal(first['x'], second['x'])
  assert second['x'].dtype == np.uint8
  assert list(second) == ['x']


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


def test_works_where_nothing_can_be_written(tmp_path):
  decoder = _Decoder()
  path = str(tmp_path / 'missing' / 'decoded.npz')
  assert _load(path, 'a', decoder)['x'][0, 0] == 1
  assert _load(path, 'a', decoder)['x'][0, 0] == 2


def test_leaves_no_temporary_file(path, tmp_path):
  _load(path, 'a', _Decoder())
  assert [p.name for p in tmp_path.iterdir()] == ['decoded.npz']
