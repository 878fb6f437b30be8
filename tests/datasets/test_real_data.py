"""Every corpus that is in $TFF_META_DATA_DIR, against what was published."""

import hashlib

import numpy as np
import pytest

from tff_meta import datasets
from tff_meta.data import federated_dataset
from tff_meta.datasets import femnist


def _load(name, data_dir, **options):
  try:
    return datasets.load_corpus(name, str(data_dir), **options)
  except datasets.DatasetNotFoundError as e:
    pytest.skip(str(e))


def test_mnist(real_data_dir):
  corpus = _load('mnist', real_data_dir)
  assert np.bincount(corpus.train.y).tolist() == [
      5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
  ]  # fmt: skip
  assert np.bincount(corpus.test.y).tolist() == [
      980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
  ]  # fmt: skip
  assert corpus.input_shape == (28, 28, 1)
  # The mean and standard deviation that everybody normalises with.
  x = corpus.preprocess(corpus.train.x)
  assert round(float(x.mean(dtype=np.float64)), 4) == 0.1307
  assert round(float(x.std(dtype=np.float64)), 4) == 0.3081
  by_pixel = _load('mnist', real_data_dir, scaling='per_pixel')
  x = by_pixel.preprocess(np.concatenate([corpus.train.x, corpus.test.x]))
  np.testing.assert_allclose(x.mean(0, dtype=np.float64), 0, atol=1e-3)
  deviations = x.std(0, dtype=np.float64)
  varies = (corpus.train.x != corpus.train.x[0]).any(0)
  assert 600 < varies.sum() < 784  # The corners are always empty.
  # Rare ink has a deviation that the added 0.001 is not small against.
  np.testing.assert_allclose(deviations[varies], 1, atol=0.05)


@pytest.mark.parametrize(
    'name, num_classes', [('cifar10', 10), ('cifar100', 100)]
)
def test_cifar(real_data_dir, name, num_classes):
  corpus = _load(name, real_data_dir, scaling='metavers')
  for part, num_images in ((corpus.train, 50000), (corpus.test, 10000)):
    assert part.x.shape == (num_images, 32, 32, 3)
    counts = np.bincount(part.y, minlength=num_classes)
    assert (counts == num_images // num_classes).all()
  x = corpus.preprocess(corpus.train.x[::10])
  # MetaVers' constants: the mean is right, the deviation (an average of those
  # of single images) a little too small.
  np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=0.02)
  assert 1 <= x.std() < 1.3


def test_omniglot(real_data_dir):
  corpus = _load('omniglot', real_data_dir)
  assert (np.bincount(corpus.train.y) == 20).all()
  assert corpus.num_classes == 1623
  split = corpus.class_split
  assert [len(p) for p in (split.train, split.validation, split.test)] == [
      1028, 172, 423,
  ]  # fmt: skip
  # The published halves: 964 "background" characters, then 659.
  assert set(corpus.train.y[: 964 * 20]) == set(range(964))
  x = corpus.preprocess(corpus.train.x)
  assert x.min() == 0 and x.max() == 1 and 0.07 < x.mean() < 0.09


def test_mnist_by_writer(real_data_dir):
  path = real_data_dir / 'fed' / 'mnist_by_writer.sqlite'
  if not path.exists():
    pytest.skip(f'needs {path}')
  corpus = femnist.load(str(path), scaling='ink', only_digits=True)
  assert len(corpus.train.y) == 63003 and len(corpus.test.y) == 6997
  assert len(set(corpus.writers)) == 836
  mnist = _load('mnist', real_data_dir)
  # The same images as MNIST's, in another order, ink high.
  ink = corpus.preprocess(corpus.pooled().x)
  assert _digests(np.rint(255 * ink)) == _digests(mnist.pooled().x)
  train, test = femnist.load_client_data(
      str(path), scaling='ink', only_digits=True
  )
  clients = federated_dataset.FederatedDataset.from_client_data(
      train, test, name='mnist', num_classes=10, seed=0, x_key='x', y_key='y'
  )
  writer = clients.client_ids()[7]
  rows = corpus.writers == writer
  client = clients.client(writer).train
  assert _digests(np.rint(255 * client.x)) == _digests(
      np.rint(255 * corpus.preprocess(corpus.train.x[rows]))
  )
  assert sorted(client.y) == sorted(corpus.train.y[rows])


def _digests(images):
  return sorted(
      hashlib.md5(image.tobytes()).digest() for image in images.astype(np.uint8)
  )
