"""FEMNIST, from small files in the schemas of TFF and of LEAF."""

import json
import sqlite3

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.datasets import femnist
from tff_meta.datasets.locations import DatasetNotFoundError

# Writer -> labels. One pixel of a writer's example i is (2 * label + i) / 255.
TRAIN = {'f02_b': [61, 10, 10], 'f01_a': [3, 12]}
TEST = {'f01_a': [12]}
DIGITS = {'f03_c': [9, 0]}


def _pixels(label, i):
  pixels = np.ones((28, 28), np.float32)
  pixels[2, 7] = (2 * label + i) / 255
  return pixels


def _proto(pixels, label):
  feature = {
      'pixels': tf.train.Feature(
          float_list=tf.train.FloatList(value=np.ravel(pixels))
      ),
      'label': tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
  }
  features = tf.train.Features(feature=feature)
  return tf.train.Example(features=features).SerializeToString()


def _write_sqlite(path, splits, make_pixels=_pixels):
  with sqlite3.connect(path) as db:
    db.execute(
        'CREATE TABLE examples (split_name TEXT, client_id TEXT,'
        ' serialized_example_proto BLOB)'
    )
    db.execute(
        'CREATE TABLE client_metadata (client_id TEXT, split_name TEXT,'
        ' num_examples INTEGER)'
    )
    for split, writers in splits.items():
      for writer, labels in writers.items():
        db.execute(
            'INSERT INTO client_metadata VALUES (?, ?, ?)',
            (writer, split, len(labels)),
        )
        for i, label in enumerate(labels):
          db.execute(
              'INSERT INTO examples VALUES (?, ?, ?)',
              (split, writer, _proto(make_pixels(label, i), label)),
          )


@pytest.fixture
def tff_file(tmp_path):
  path = tmp_path / 'emnist_all.sqlite'
  _write_sqlite(
      path,
      {
          'all_train': TRAIN,
          'all_test': TEST,
          'digits_only_train': DIGITS,
          'digits_only_test': {},
      },
  )
  with sqlite3.connect(path) as db:
    db.execute(
        "INSERT INTO client_metadata VALUES ('x', 'digits_only_test', 0)"
    )
  return path


def _write_leaf(path, writers):
  path.parent.mkdir(parents=True, exist_ok=True)
  contents = {
      'users': list(writers),
      'num_samples': [len(labels) for labels in writers.values()],
      'user_data': {
          writer: {
              'x': [
                  _pixels(label, i).ravel().tolist()
                  for i, label in enumerate(labels)
              ],
              'y': labels,
          }
          for writer, labels in writers.items()
      },
  }
  path.write_text(json.dumps(contents))


@pytest.fixture
def leaf_dir(tmp_path):
  first, second = TRAIN.items()
  _write_leaf(tmp_path / 'leaf' / 'train' / 'all_0.json', dict([first]))
  _write_leaf(tmp_path / 'leaf' / 'train' / 'all_1.json', dict([second]))
  _write_leaf(tmp_path / 'leaf' / 'test' / 'all_0.json', TEST)
  return tmp_path / 'leaf'


def _check_corpus(corpus):
  np.testing.assert_array_equal(corpus.train.y, [61, 10, 10, 3, 12])
  np.testing.assert_array_equal(
      corpus.train.x[:, 2, 7, 0], [122, 21, 22, 6, 25]
  )
  np.testing.assert_array_equal(corpus.writers, ['f02_b'] * 3 + ['f01_a'] * 2)
  np.testing.assert_array_equal(corpus.test.y, [12])
  np.testing.assert_array_equal(corpus.test.x[:, 2, 7, 0], [24])
  assert (corpus.train.x[:, 7, 2] == 255).all()
  assert corpus.num_classes == 62


def test_sqlite_by_path_and_by_folder(tff_file):
  _check_corpus(femnist.load(str(tff_file)))
  _check_corpus(femnist.load(str(tff_file.parent)))


def test_sqlite_with_plain_split_names(tmp_path):
  _write_sqlite(tmp_path / 'mine.db', {'train': TRAIN, 'test': TEST})
  _check_corpus(femnist.load(str(tmp_path / 'mine.db')))


def test_leaf_folder(leaf_dir):
  _check_corpus(femnist.load(str(leaf_dir)))


def test_leaf_file_is_all_train(leaf_dir):
  corpus = femnist.load(str(leaf_dir / 'train' / 'all_0.json'))
  np.testing.assert_array_equal(corpus.train.y, [61, 10, 10])
  assert not len(corpus.test.y)


def test_frl_prepares_with_letters_and_tests_on_digits(tff_file):
  split = femnist.load(str(tff_file)).class_split
  assert split.train == tuple(range(10, 62))
  assert split.test == tuple(range(10))


def test_only_digits(tff_file):
  corpus = femnist.load(str(tff_file), only_digits=True)
  np.testing.assert_array_equal(corpus.train.y, [9, 0])
  assert corpus.num_classes == 10
  assert max(corpus.class_split.test) <= 9


def test_only_a_to_j(tmp_path):
  train = {'f02_b': [35, 36, 61, 45], 'f01_a': [46, 38]}
  _write_sqlite(tmp_path / 'mine.db', {'train': train, 'test': {'x': [10, 37]}})
  corpus = femnist.load(str(tmp_path / 'mine.db'), only_a_to_j=True)
  np.testing.assert_array_equal(corpus.train.y, [0, 9, 2])
  np.testing.assert_array_equal(corpus.train.x[:, 2, 7, 0], [73, 93, 77])
  np.testing.assert_array_equal(corpus.writers, ['f02_b', 'f02_b', 'f01_a'])
  np.testing.assert_array_equal(corpus.test.y, [1])
  assert corpus.num_classes == 10 and corpus.class_split is None
  with pytest.raises(ValueError, match='one of `only_digits` and .*both'):
    femnist.load(str(tmp_path / 'mine.db'), only_digits=True, only_a_to_j=True)


@pytest.mark.parametrize('kind', ['sqlite', 'leaf'])
@pytest.mark.parametrize(
    'scaling, background, pixel',
    [('unit', 1, 6 / 255), ('ink', 0, 1 - 6 / 255), ('raw', 255, 6)],
)
def test_client_data(tff_file, leaf_dir, kind, scaling, background, pixel):
  path = str(tff_file if kind == 'sqlite' else leaf_dir)
  train, test = femnist.load_client_data(path, scaling=scaling)
  assert train.client_ids == ['f01_a', 'f02_b']
  assert test.client_ids == ['f01_a']
  examples = list(
      train.create_tf_dataset_for_client('f01_a').as_numpy_iterator()
  )
  assert [e['y'] for e in examples] == [3, 12]
  assert examples[0]['y'].dtype == np.int32
  assert examples[0]['x'].dtype == np.float32
  assert examples[0]['x'].shape == (28, 28, 1)
  # float32 of k / 255.
  np.testing.assert_allclose(examples[0]['x'][2, 7], pixel, atol=1e-5)
  np.testing.assert_allclose(examples[0]['x'][7, 2], background, atol=1e-6)


def test_client_data_equal_the_corpus(tff_file):
  corpus = femnist.load(str(tff_file), scaling='cafeme')
  train, test = femnist.load_client_data(str(tff_file), scaling='cafeme')
  clients = federated_dataset.FederatedDataset.from_client_data(
      train, test, name='femnist', num_classes=62, seed=0, x_key='x', y_key='y'
  )
  client = clients.client('f02_b').train
  order = np.argsort(client.x[:, 2, 7, 0])  # Dealt in another order.
  expected = corpus.preprocess(corpus.train.x[[0, 2, 1]])
  np.testing.assert_array_equal(client.y[order], corpus.train.y[[0, 2, 1]])
  # uint8 is exact here: the pixels are multiples of 1/255.
  np.testing.assert_allclose(client.x[order], expected, atol=1e-6)


@pytest.mark.parametrize('deal_test_images', [True, False])
def test_a_fraction_of_what_a_writer_has_in_both_parts(
    leaf_dir, deal_test_images
):
  corpus = femnist.load(str(leaf_dir))
  if not deal_test_images:
    corpus = corpus.without_test_part()
  dataset = federated_dataset.FederatedDataset.from_corpus(
      corpus, partitioners.by_writer, 2, 0,
      partition_by='writer', test_fraction=0.34,
  )  # fmt: skip
  labels = sorted(
      sorted(y for part in dataset.client(c) for y in part.y)
      for c in dataset.client_ids()
  )
  assert labels == [[3, 12] + deal_test_images * [12], [10, 10, 61]]


def test_client_data_without_test_examples(leaf_dir):
  path = str(leaf_dir / 'train' / 'all_0.json')
  train, test = femnist.load_client_data(path)
  assert train.client_ids == ['f02_b']
  assert test is None


def test_not_there(tmp_path):
  with pytest.raises(DatasetNotFoundError) as e:
    femnist.load(str(tmp_path))
  assert str(tmp_path / 'emnist_all.sqlite') in str(e.value)
  assert '--download' in str(e.value) and '--data_dir' in str(e.value)


def test_download_goes_through_tff(tmp_path, monkeypatch):
  import tensorflow_federated as tff

  def fetch(cache_dir):
    splits = {'all_train': TRAIN, 'all_test': TEST}
    _write_sqlite(f'{cache_dir}/emnist_all.sqlite', splits)

  monkeypatch.setattr(tff.simulation.datasets.emnist, 'load_data', fetch)
  _check_corpus(femnist.load(str(tmp_path), download=True))


def test_a_failed_download_says_why(tmp_path, monkeypatch):
  import tensorflow_federated as tff

  def fail(cache_dir):
    raise OSError(f'no route to host for {cache_dir}')

  monkeypatch.setattr(tff.simulation.datasets.emnist, 'load_data', fail)
  with pytest.raises(DatasetNotFoundError, match='no route to host'):
    femnist.load(str(tmp_path), download=True)


def test_not_an_sqlite_file(tmp_path):
  (tmp_path / 'emnist_all.sqlite').write_bytes(b'half a download' * 99)
  with pytest.raises(
      ValueError, match='to be an SQLite file .* not a database'
  ):
    femnist.load(str(tmp_path))


def test_other_split_names_are_listed(tmp_path):
  _write_sqlite(tmp_path / 'a.sqlite', {'heldout': TEST})
  with pytest.raises(ValueError, match=r"train and test, found \['heldout'\]"):
    femnist.load(str(tmp_path / 'a.sqlite'))


@pytest.mark.parametrize('value', [np.nan, -0.01, 1.01])
def test_impossible_pixels(tmp_path, value):
  def pixels(label, i):
    del label, i
    return np.full((28, 28), value, np.float32)

  _write_sqlite(tmp_path / 'a.sqlite', {'train': TRAIN, 'test': TEST}, pixels)
  with pytest.raises(ValueError, match="in \\[0, 1\\], found .* 'f02_b'"):
    femnist.load(str(tmp_path / 'a.sqlite'))


def test_images_of_another_size(tmp_path):
  def pixels(label, i):
    del label, i
    return np.zeros((8, 8), np.float32)

  _write_sqlite(tmp_path / 'a.sqlite', {'train': TRAIN, 'test': TEST}, pixels)
  with pytest.raises(ValueError, match='784 floats `pixels`'):
    femnist.load(str(tmp_path / 'a.sqlite'))


@pytest.mark.parametrize('contents', ['{"users": ["a"]}', 'no json', '[1, 2]'])
def test_not_a_leaf_file(tmp_path, contents):
  (tmp_path / 'a.json').write_text(contents)
  with pytest.raises(ValueError, match='a.json to be a JSON file of LEAF'):
    femnist.load(str(tmp_path / 'a.json'))
