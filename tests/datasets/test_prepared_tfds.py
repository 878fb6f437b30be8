"""Corpora of TensorFlow Datasets, on small data that its builders wrote."""

import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.datasets import cifar10
from tff_meta.datasets import cifar100
from tff_meta.datasets import mnist
from tff_meta.datasets import omniglot
from tff_meta.datasets import prepared_tfds
from tff_meta.datasets.locations import DatasetNotFoundError
from tff_meta.training import hyperparameters


@pytest.fixture
def replace_download(monkeypatch):
  """Lets the genuine builders "fetch" local files: `path_of(url)`."""

  def replace(path_of):
    monkeypatch.setattr(
        tfds.download.DownloadManager,
        'download_and_extract',
        lambda _, urls: tf.nest.map_structure(path_of, urls),
    )

  return replace


def _write_cifar(folder, *, num_labels, parts, names):
  """Writes CIFAR's binary files; image i is filled by its number."""
  folder.mkdir(parents=True)
  for file, labels in parts.items():
    with open(folder / file, 'wb') as f:
      for i, label in enumerate(labels):
        f.write(bytes([7] * (num_labels - 1) + [label]))
        planes = np.zeros((3, 32, 32), np.uint8)
        planes[0], planes[1, 4, 9] = i, 200
        f.write(planes.tobytes())
  for file, size in names.items():
    (folder / file).write_text('\n'.join(f'{i}' for i in range(size)) + '\n')


def _rows(examples):
  """Returns the pairs (red, label) in sorted order."""
  return sorted(
      zip(examples.x[:, 0, 0, 0].tolist(), examples.y.tolist(), strict=True)
  )


@pytest.fixture
def cifar100_files(tmp_path, replace_download):
  source = tmp_path / 'source'
  _write_cifar(
      source / 'cifar-100-binary',
      num_labels=2,
      parts={'train.bin': [99, 0, 64], 'test.bin': [5, 99]},
      names={'fine_label_names.txt': 100, 'coarse_label_names.txt': 20},
  )
  replace_download(lambda url: str(source))
  return tmp_path


def test_cifar100_is_prepared_once_and_read_with_fine_labels(
    cifar100_files, monkeypatch
):
  data_dir = str(cifar100_files / 'data')
  corpus = cifar100.load(data_dir, download=True)
  assert _rows(corpus.train) == [(0, 99), (1, 0), (2, 64)]
  assert _rows(corpus.test) == [(0, 5), (1, 99)]
  assert (corpus.train.x[:, 4, 9, 1] == 200).all()
  assert corpus.train.x.dtype == np.uint8
  monkeypatch.undo()  # From here on a download would need a network.
  again = cifar100.load(data_dir, download=True)
  assert again.fingerprint() == corpus.fingerprint()


def test_files_that_are_replaced_are_read_anew(tmp_path):
  names = [str(digit) for digit in range(10)]
  for value in (40, 50):
    images = np.full((3, 28, 28, 1), value, np.uint8)
    other = tmp_path / str(value)
    _store(other, 'mnist', images, np.array([9, 0, 7]), names, 2)
  mnist.load(str(tmp_path / '40'))
  found = [tmp_path / name / 'mnist' / '3.0.0' for name in ('40', '50')]
  for path in found[1].glob('*tfrecord*'):  # dataset_info.json stays.
    (found[0] / path.name).write_bytes(path.read_bytes())
  assert mnist.load(str(tmp_path / '40')).train.x.min() == 50
  assert found[0].joinpath('tff_meta_decoded_v2.npz').exists()
  # A copy of the directory is not decoded again.
  assert prepared_tfds.source(str(found[0])) == prepared_tfds.source(
      shutil.copytree(found[0], tmp_path / 'copy')
  )


def test_cifar100_class_splits(cifar100_files):
  data_dir = str(cifar100_files / 'data')
  corpus = cifar100.load(data_dir, download=True)
  assert corpus.class_split.test == tuple(range(80, 100))
  corpus = cifar100.load(data_dir, class_split='metavers')
  assert corpus.class_split.test == tuple(range(64, 84))
  with pytest.raises(ValueError, match="cifar_fs, fc100, found 'FC100'"):
    cifar100.load(data_dir, class_split='FC100')


def test_data_dir_may_hold_a_tfds_folder(cifar100_files):
  corpus = cifar100.load(str(cifar100_files / 'data' / 'tfds'), download=True)
  above = cifar100.load(str(cifar100_files / 'data'))
  assert above.fingerprint() == corpus.fingerprint()


def test_a_read_only_directory_is_read(cifar100_files, monkeypatch):
  data_dir = str(cifar100_files / 'data')

  def refuse(*_, **__):
    raise PermissionError('read-only')

  monkeypatch.setattr(np, 'savez', refuse)
  corpus = cifar100.load(data_dir, download=True)
  assert _rows(corpus.test) == [(0, 5), (1, 99)]


def test_cifar10(tmp_path, replace_download):
  _write_cifar(
      tmp_path / 'source' / 'cifar-10-batches-bin',
      num_labels=1,
      parts={
          'data_batch_1.bin': [3],
          'data_batch_2.bin': [9, 4],
          'data_batch_3.bin': [],
          'data_batch_4.bin': [],
          'data_batch_5.bin': [],
          'test_batch.bin': [8],
      },
      names={'batches.meta.txt': 10},
  )
  replace_download(lambda url: str(tmp_path / 'source'))
  corpus = cifar10.load(str(tmp_path), download=True, scaling='centered')
  assert _rows(corpus.train) == [(0, 3), (0, 9), (1, 4)]
  assert corpus.preprocess(corpus.train.x).min() == -1
  assert corpus.class_split.test == (7, 8, 9)


def _store(data_dir, name, images, labels, names, num_train):
  """Lets TensorFlow Datasets write its files, as its builders do.

  Without names labels are any integers.
  """

  def dataset(rows):
    return tf.data.Dataset.from_tensor_slices(
        {'image': images[rows], 'label': labels[rows]}
    )

  tfds.dataset_builders.store_as_tfds_dataset(
      name=name,
      version='3.0.0',
      data_dir=data_dir,
      features=tfds.features.FeaturesDict(
          {
              'image': tfds.features.Image(
                  shape=images.shape[1:],
                  dtype=images.dtype.type,
                  encoding_format='png',
              ),
              'label': tfds.features.ClassLabel(names=names)
              if names
              else tfds.features.Scalar(np.int64),
          }
      ),
      split_datasets={
          'train': dataset(slice(num_train)),
          'test': dataset(slice(num_train, None)),
      },
  )


def test_mnist(tmp_path):
  images = np.zeros((3, 28, 28, 1), np.uint8)
  images[:, 0, 0, 0] = [40, 50, 60]
  images[:, 3, 5] = 255
  names = [str(digit) for digit in range(10)]
  _store(tmp_path, 'mnist', images, np.array([9, 0, 7]), names, 2)
  corpus = mnist.load(str(tmp_path))
  assert _rows(corpus.train) == [(40, 9), (50, 0)]
  assert _rows(corpus.test) == [(60, 7)]
  assert (corpus.train.x[:, 3, 5] == 255).all()
  assert corpus.input_shape == (28, 28, 1)
  by_pixel = mnist.load(str(tmp_path), scaling='per_pixel')
  x = by_pixel.preprocess(np.concatenate([corpus.train.x, corpus.test.x]))
  expected = np.zeros((3, 28, 28, 1))  # Where no pixel varies.
  expected[:, 0, 0, 0] = np.array([-10, 0, 10]) / (np.sqrt(200 / 3) + 0.001)
  np.testing.assert_allclose(x, expected, atol=1e-6)
  with pytest.raises(ValueError, match="standard, per_pixel, found 'each'"):
    mnist.load(str(tmp_path), scaling='each')


@pytest.mark.parametrize(
    'dtype, label, message',
    [
        ('uint8', 2**32 + 1, 'mnist/3.0.0 .* found 0..4294967297'),
        ('uint16', 1, 'mnist/3.0.0 to be uint8, found uint16'),
    ],
)
def test_what_is_not_as_mnist_is_refused(tmp_path, dtype, label, message):
  images = np.zeros((3, 28, 28, 1), dtype)
  labels = np.array([0, label, 0])
  _store(tmp_path, 'mnist', images, labels, None, 2)
  with pytest.raises(ValueError, match=message):
    mnist.load(str(tmp_path))


def test_rotated_mnist_is_dealt_by_group(tmp_path):
  """40 + 20 images with a bar on top; ten groups, two clients each."""
  images = np.zeros((60, 28, 28, 1), np.uint8)
  images[:, 4:8, 10:18] = 255
  names = [str(digit) for digit in range(10)]
  _store(tmp_path, 'mnist', images, np.full(60, 7), names, 40)
  options = hyperparameters.parse_options(mnist.load, 2, 'rotation_groups=10')
  corpus = mnist.load(str(tmp_path), **options)
  clients = federated_dataset.FederatedDataset.from_corpus(
      corpus, partitioners.by_group, 20, 0, partition_by='rotation'
  )
  means = []
  for client_id in clients.client_ids():
    client = clients.client(client_id)
    x = np.concatenate([client.train.x, client.test.x])[..., 0]
    assert len(x) == 3
    rows, columns = np.mgrid[:28, :28] - 13.5
    means.append([(x[0] * columns).sum(), (-x[0] * rows).sum()])
    for image in x[1:]:  # All of a client are turned alike.
      np.testing.assert_array_equal(image, x[0])
  angles = np.degrees([np.arctan2(y, x) for x, y in means]) - 90
  expected = np.repeat(20.0 * np.arange(10), 2)
  np.testing.assert_allclose((angles - expected + 180) % 360, 180, atol=2)
  for change in ({'rotation_seed': 1}, {'rotation_interpolation': 'bilinear'}):
    other = mnist.load(str(tmp_path), **options | change)
    assert other.fingerprint() != corpus.fingerprint()
  with pytest.raises(ValueError, match='`num_groups` .* at least 1, found -1'):
    mnist.load(str(tmp_path), rotation_groups=-1)


def test_mnist_that_is_not_rotated_has_no_rotation_groups(tmp_path):
  images = np.zeros((3, 28, 28, 1), np.uint8)
  names = [str(digit) for digit in range(10)]
  _store(tmp_path, 'mnist', images, np.array([9, 0, 7]), names, 2)
  with pytest.raises(
      ValueError, match='rotation .* option .*`rotation_groups`'
  ):
    federated_dataset.FederatedDataset.from_corpus(
        mnist.load(str(tmp_path)),
        partitioners.by_group,
        2,
        0,
        partition_by='rotation',
    )


OMNIGLOT_NAMES = ('Greek_0', 'Bengali_0', 'Gurmukhi_41', 'Keble_0')


@pytest.fixture
def omniglot_dir(tmp_path):
  """Labels 2, 0 in 'train' and 3, 1, 1 in 'test'; black strokes on white."""
  rng = np.random.default_rng(0)
  images = np.where(rng.random((5, 105, 105, 1)) < 0.3, 0, 255)
  images = np.repeat(images.astype(np.uint8), 3, axis=-1)
  labels = np.array([2, 0, 3, 1, 1])

  _store(tmp_path, 'omniglot', images, labels, OMNIGLOT_NAMES, 2)
  return tmp_path, images, labels


def _area_means(ink):
  """Averages 105x105 pixels over 28x28 squares of 3.75 pixels, with loops."""
  weights = np.zeros((28, 105))
  for i in range(28):
    for j in range(105):
      overlap = min(3.75 * (i + 1), j + 1) - max(3.75 * i, j)
      weights[i, j] = max(0, overlap) / 3.75
  return weights @ ink @ weights.T


def test_omniglot_is_small_ink_on_nothing(omniglot_dir):
  data_dir, images, labels = omniglot_dir
  corpus = omniglot.load(str(data_dir))
  assert corpus.train.x.shape == (5, 28, 28, 1)
  x = corpus.preprocess(corpus.train.x)[..., 0]
  expected = {
      label: [_area_means(1 - i[..., 0] / 255) for i in images[labels == label]]
      for label in (0, 2, 3)
  }
  for label, (image,) in expected.items():
    (row,) = np.flatnonzero(corpus.train.y == label)
    # Rounded to a 255th.
    np.testing.assert_allclose(x[row], image, atol=0.5 / 255 + 1e-5)
  assert sorted(corpus.train.y[:2]) == [0, 2]  # 'train' comes first.
  assert not len(corpus.test.y)


def test_omniglot_class_split_comes_from_the_names(omniglot_dir):
  split = omniglot.load(str(omniglot_dir[0])).class_split
  assert (split.train, split.validation, split.test) == ((0,), (1,), (2, 3))


def test_omniglot_with_rotated_classes(omniglot_dir):
  plain = omniglot.load(str(omniglot_dir[0]))
  options = hyperparameters.parse_options(
      omniglot.load, 2, 'rotated_classes=true'
  )
  corpus = omniglot.load(str(omniglot_dir[0]), **options)
  assert corpus.num_classes == 16 and corpus.class_split.train == (0, 4, 8, 12)
  assert sorted(corpus.train.y) == sorted(
      label + 4 * q for label in plain.train.y for q in range(4)
  )
  (first,) = plain.train.x[plain.train.y == 2]
  (turned,) = corpus.train.x[corpus.train.y == 2 + 4 * 3]
  np.testing.assert_array_equal(turned, np.rot90(first, 3))


def test_the_newest_prepared_version_is_taken(tmp_path):
  for version in ('9.0.0', '10.0.0', '11.0.0'):
    (tmp_path / 'mnist' / version).mkdir(parents=True)
  for version in ('9.0.0', '10.0.0'):  # 11.0.0 is not complete.
    (tmp_path / 'mnist' / version / 'dataset_info.json').write_text('{}')
  found = prepared_tfds.find('mnist', str(tmp_path), download=False)
  assert os.path.basename(found) == '10.0.0'


@pytest.mark.parametrize('corpus', [mnist, cifar10, cifar100, omniglot])
def test_not_there(corpus, tmp_path):
  with pytest.raises(DatasetNotFoundError) as e:
    corpus.load(str(tmp_path))
  name = corpus.__name__.rpartition('.')[2]
  assert str(tmp_path / name) in str(e.value)
  assert str(tmp_path / 'tfds' / name) in str(e.value)
  assert '--download' in str(e.value) and '--data_dir' in str(e.value)


def test_the_default_place_is_that_of_tfds(tmp_path, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  with pytest.raises(DatasetNotFoundError, match=str(tmp_path / 'mnist')):
    mnist.load()
  monkeypatch.delenv('TFDS_DATA_DIR')
  monkeypatch.setenv('HOME', str(tmp_path))
  default = str(tmp_path / 'tensorflow_datasets' / 'mnist')
  with pytest.raises(DatasetNotFoundError, match=default):
    mnist.load()


def test_a_failed_download_says_why(tmp_path, replace_download):
  def fail(_):
    raise ConnectionError('no route to host')

  replace_download(fail)
  with pytest.raises(DatasetNotFoundError, match='no route to host. Tip: '):
    mnist.load(str(tmp_path), download=True)
