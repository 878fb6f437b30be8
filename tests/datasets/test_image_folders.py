"""CINIC-10 and miniImageNet, from small folders in their published layouts."""

import os

import numpy as np
from PIL import Image
import pytest

from tff_meta.datasets import cinic10
from tff_meta.datasets import mini_imagenet
from tff_meta.datasets.locations import DatasetNotFoundError


def _write_image(path, value, size=(32, 32), mode='RGB'):
  """Writes an image whose red is `value` and whose corner pixel is 255."""
  height, width = size
  pixels = np.zeros((height, width, 3), np.uint8)
  pixels[..., 0] = value
  pixels[1, 2] = 255
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def cinic_dir(tmp_path):
  """Part p (0..2), class c, image i has red 50 * p + 4 * c + i."""
  for p, part in enumerate(('train', 'valid', 'test')):
    for c, name in enumerate(cinic10.CLASSES):
      # Classes 0 and 3 have two images in the training part.
      for i in range(2 if part == 'train' and c in (0, 3) else 1):
        path = tmp_path / 'CINIC-10' / part / name / f'n{i}.png'
        _write_image(path, 50 * p + 4 * c + i)
  (tmp_path / 'CINIC-10' / 'README').write_text('not an image')
  return tmp_path


@pytest.mark.parametrize('below', ['', 'CINIC-10'])
def test_cinic10_reads_every_image_with_its_class(cinic_dir, below):
  corpus = cinic10.load(str(cinic_dir / below))
  red = corpus.train.x[:, 0, 0, 0]
  np.testing.assert_array_equal(
      np.stack([corpus.train.y, red], 1),
      [(0, 0), (0, 1), (1, 4), (2, 8), (3, 12), (3, 13)]
      + [(c, 4 * c) for c in range(4, 10)]
      + [(c, 50 + 4 * c) for c in range(10)],
  )
  np.testing.assert_array_equal(
      corpus.test.x[:, 0, 0, 0], 100 + 4 * np.arange(10)
  )
  np.testing.assert_array_equal(corpus.test.y, range(10))
  # Rows are rows and columns are columns.
  assert (corpus.test.x[:, 1, 2] == 255).all()
  assert (corpus.test.x[:, 2, 1, 1] == 0).all()


def test_cinic10_notices_a_new_image(cinic_dir):
  before = cinic10.load(str(cinic_dir))
  _write_image(cinic_dir / 'CINIC-10' / 'test' / 'dog' / 'new.png', 9)
  after = cinic10.load(str(cinic_dir))
  assert len(after.test.y) == len(before.test.y) + 1
  assert 9 in after.test.x[:, 0, 0, 0]


def test_cinic10_makes_grey_images_colour(cinic_dir):
  path = cinic_dir / 'CINIC-10' / 'test' / 'ship' / 'n0.png'
  _write_image(path, 255, mode='L')
  x = cinic10.load(str(cinic_dir)).test.x[8]
  assert (x[0, 0] == 76).all()  # 0.299 of red.


def test_cinic10_names_a_missing_class(cinic_dir):
  folder = cinic_dir / 'CINIC-10' / 'valid' / 'deer'
  (folder / 'n0.png').unlink()
  folder.rmdir()
  with pytest.raises(ValueError, match='valid to hold .* none for deer'):
    cinic10.load(str(cinic_dir))


def test_cinic10_names_an_image_of_another_size(cinic_dir):
  path = cinic_dir / 'CINIC-10' / 'train' / 'frog' / 'n0.png'
  _write_image(path, 1, size=(31, 33))
  with pytest.raises(ValueError, match='frog/n0.png to be 32 x 32 .* 33 x 31'):
    cinic10.load(str(cinic_dir))


def test_cinic10_names_a_damaged_image(cinic_dir):
  path = cinic_dir / 'CINIC-10' / 'train' / 'frog' / 'n0.png'
  path.write_bytes(path.read_bytes()[:60])
  with pytest.raises(ValueError, match='frog/n0.png to be an image'):
    cinic10.load(str(cinic_dir))


@pytest.mark.parametrize('corpus', [cinic10, mini_imagenet])
def test_not_there(corpus, tmp_path):
  with pytest.raises(DatasetNotFoundError) as e:
    corpus.load(str(tmp_path))
  assert str(tmp_path / 'CINIC-10') in str(e.value) or (
      str(tmp_path / 'mini_imagenet') in str(e.value)
  )
  assert '--data_dir' in str(e.value)


@pytest.fixture
def mini_dir(tmp_path):
  """Image i of the tables has red 20 * i; the classes are out of order."""
  tables = {
      'train.csv': ['n09', 'n01', 'n09', 'n05'],
      'val.csv': ['n03'],
      'test.csv': ['n08', 'n02'],
  }
  i = 0
  for name, labels in tables.items():
    rows = ['filename,label']
    for label in labels:
      file = f'{label}{i:08d}.png'
      # The second image is not 84x84 and has to be resized.
      size = (168, 252) if i == 1 else (84, 84)
      _write_image(tmp_path / 'images' / file, 20 * i, size)
      rows.append(f'{file},{label}')
      i += 1
    (tmp_path / name).write_text('\n'.join(rows) + '\n')
  return tmp_path


def test_mini_imagenet_numbers_the_classes_of_the_tables(mini_dir):
  corpus = mini_imagenet.load(str(mini_dir))
  assert corpus.train.x.shape == (7, 84, 84, 3)
  # train: n01 n05 n09 -> 0 1 2; val: n03 -> 3; test: n02 n08 -> 4 5.
  np.testing.assert_array_equal(corpus.train.y, [2, 0, 2, 1, 3, 5, 4])
  np.testing.assert_array_equal(corpus.train.x[:, 50, 50, 0], 20 * np.arange(7))
  split = corpus.class_split
  assert (split.train, split.validation, split.test) == (
      (0, 1, 2),
      (3,),
      (4, 5),
  )
  assert not len(corpus.test.y)


def test_mini_imagenet_reads_tables_of_spreadsheets(mini_dir):
  """With a byte-order mark, carriage returns and blanks."""
  before = mini_imagenet.load(str(mini_dir))
  for name in ('train.csv', 'val.csv', 'test.csv'):
    text = (mini_dir / name).read_text().replace(',n', ' , n')
    (mini_dir / name).write_bytes(
        text.replace('\n', '\r\n').encode('utf-8-sig')
    )
  after = mini_imagenet.load(str(mini_dir))
  assert after.fingerprint() == before.fingerprint()


def test_mini_imagenet_names_wrong_columns(mini_dir):
  (mini_dir / 'val.csv').write_text('file,class\na.png,n03\n')
  with pytest.raises(ValueError, match='val.csv to have the columns filename'):
    mini_imagenet.load(str(mini_dir))


def test_mini_imagenet_names_a_missing_image(mini_dir):
  (mini_dir / 'images' / 'n0300000004.png').unlink()
  with pytest.raises(ValueError, match='n0300000004.png to be an image'):
    mini_imagenet.load(str(mini_dir))


@pytest.mark.parametrize('name', ['cinic10', 'mini_imagenet'])
def test_a_replaced_image_is_noticed(name, request):
  """Even one of the same name, size and time of change."""
  if name == 'cinic10':
    root = request.getfixturevalue('cinic_dir')
    path = root / 'CINIC-10' / 'train' / 'cat' / 'n0.png'
    load, size = cinic10.load, (32, 32)
  else:
    root = request.getfixturevalue('mini_dir')
    path = root / 'images' / 'n0300000004.png'
    load, size = mini_imagenet.load, (84, 84)

  def write(value):
    Image.new('RGB', size, (value, 1, 1)).save(path, 'BMP')

  write(200)
  found = path.stat()
  assert 200 in load(str(root)).train.x[:, 0, 0, 0]
  write(201)
  os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
  assert path.stat().st_size == found.st_size
  red = load(str(root)).train.x[:, 0, 0, 0]
  assert 201 in red and 200 not in red
