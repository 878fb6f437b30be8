"""docs/users_files.py, which makes the files of real users."""

import gzip
import pathlib
import runpy

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import datasets

_PROGRAM = pathlib.Path(__file__).resolve().parents[1] / 'docs/users_files.py'


def _write_idx(path, array):
  kind = {'u1': 8, 'i4': 12}[array.dtype.str[1:]]
  head = (
      bytes([0, 0, kind, array.ndim]) + np.array(array.shape, '>i4').tobytes()
  )
  path.write_bytes(gzip.compress(head + array.tobytes()))


@pytest.fixture
def mnist(tmp_path):
  """Twelve digits of two writers by turns; the test part has one writer."""
  folder = tmp_path / 'mnist'
  folder.mkdir()
  for part, of_qmnist, writers in (
      ('train', 'train', np.arange(12) % 2 * 2100),
      ('t10k', 'test', np.full(12, 7)),
  ):
    labels = np.arange(12, dtype=np.uint8) % 10
    images = np.zeros((12, 28, 28), np.uint8)
    images[:, 3, 5] = 51 * (labels % 5)
    # QMNIST has more test examples than MNIST, and eight columns.
    told = np.zeros((12 + 3, 8), '>i4')
    told[:12, 0], told[:12, 2] = labels, writers
    _write_idx(folder / f'{part}-images-idx3-ubyte.gz', images)
    _write_idx(folder / f'{part}-labels-idx1-ubyte.gz', labels)
    _write_idx(folder / f'qmnist-{of_qmnist}-labels-idx2-int.gz', told)
  return folder


@pytest.fixture
def omniglot(tmp_path):
  """Two alphabets of two characters, each drawn by three."""
  for number in range(4):
    part, alphabet = [('background', 'Greek'), ('evaluation', 'Oriya')][
        number // 2
    ]
    folder = (
        tmp_path / f'omniglot/images_{part}/{alphabet}/character{number % 2}'
    )
    folder.mkdir(parents=True)
    for drawer in range(1, 4):
      paper = np.full((105, 105, 1), 255, np.uint8)
      paper[: 15 * (number + 1), :30] = 0
      content = tf.io.encode_png(paper).numpy()
      (folder / f'{number + 1:04d}_{drawer:02d}.png').write_bytes(content)
  return tmp_path / 'omniglot'


def test_files_have_the_users_of_the_originals(mnist, omniglot, tmp_path):
  main = runpy.run_path(str(_PROGRAM))['main']
  main(
      [
          f'--output_dir={tmp_path}/out',
          f'--omniglot={omniglot}',
          f'--mnist={mnist}',
      ]
  )
  digits = datasets.load_corpus(f'sqlite:{tmp_path}/out/mnist_by_writer.sqlite')
  everyone = set(digits.writers) | set(digits.test_writers)
  assert everyone == {'f0000_mnisttrain', 'f2100_mnisttrain', 'f0007_mnisttest'}
  # A tenth, one at least, of six, six and twelve is in the split test.
  assert (len(digits.train.y), len(digits.test.y)) == (21, 3)
  even = digits.train.y[digits.writers == 'f0000_mnisttrain']
  assert set(even % 2) == {0}
  ink = digits.train.x.reshape(-1, 28, 28)[:, 3, 5]
  np.testing.assert_allclose(ink, 1 - digits.train.y % 5 / 5, atol=1e-6)
  drawings = datasets.load_corpus(
      f'sqlite:{tmp_path}/out/omniglot_by_drawer.sqlite'
  )
  assert set(drawings.writers) == {
      f'{alphabet}_0{drawer}'
      for alphabet in ('Greek', 'Oriya')
      for drawer in (1, 2, 3)
  }
  greek = np.char.startswith(drawings.writers.astype(str), 'Greek')
  assert set(drawings.train.y[greek]) <= {0, 1}
  # 15 of 105 rows are 4 of 28, and 30 columns are 8.
  inked = (1 - drawings.train.x).sum(1)
  np.testing.assert_allclose(inked, 32 * (drawings.train.y + 1), atol=1e-4)
  with pytest.raises(FileExistsError, match='omniglot_by_drawer.sqlite, found'):
    # Said before anything is read or written.
    main([f'--output_dir={tmp_path}/out', '--omniglot=nowhere'])
  labels = np.ones(12, np.uint8)
  _write_idx(mnist / 't10k-labels-idx1-ubyte.gz', labels)
  with pytest.raises(ValueError, match='first 12 classes of QMNIST'):
    main([f'--output_dir={tmp_path}/other', f'--mnist={mnist}'])
  _write_idx(mnist / 't10k-labels-idx1-ubyte.gz', labels[:9])
  with pytest.raises(ValueError, match='t10k, in .*, found 12 and 9'):
    main([f'--output_dir={tmp_path}/other', f'--mnist={mnist}'])
  (mnist / 't10k-labels-idx1-ubyte.gz').write_bytes(b'no file of gzip')
  with pytest.raises(ValueError, match='IDX file in .*t10k-labels.*, found'):
    main([f'--output_dir={tmp_path}/other', f'--mnist={mnist}'])
  assert not list((tmp_path / 'other').iterdir())
  (mnist / 't10k-labels-idx1-ubyte.gz').unlink()
  with pytest.raises(FileNotFoundError, match='t10k-labels-idx1-ubyte or'):
    main([f'--output_dir={tmp_path}/other', f'--mnist={mnist}'])
