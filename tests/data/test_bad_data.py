"""Bad data sets through the API: an error that names whom and what, or right.

None may end in a traceback from deep inside of TensorFlow or NumPy, and none in
a data set that is silently another one than was given.
"""

import functools
import inspect
import itertools
import json
import random
import sqlite3

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.datasets import cinic10
from tff_meta.datasets import femnist
from tff_meta.datasets import mini_imagenet

ClientData = tff.simulation.datasets.ClientData
FederatedDataset = federated_dataset.FederatedDataset
slices = tf.data.Dataset.from_tensor_slices

X = np.random.default_rng(0).random((9, 4, 4, 1)).astype(np.float32)
Y = np.arange(9, dtype=np.int32) % 3


def one(x=X, y=Y):
  """A data set of one client."""
  return slices({'image': x, 'label': y})


def clients(**own):
  """ClientData of 'a', which is as it should be, and of others."""
  own = {'a': one, **own}
  return ClientData.from_clients_and_tf_fn(list(own), lambda c: own[c]())


def load(data, test=None, **options):
  """Makes a data set of ClientData and reads everything in it."""
  options = {
      'name': 'mine', 'num_classes': 3, 'seed': 0, 'x_key': 'image',
      'test_fraction': None if test else 0.3,
  } | options  # fmt: skip
  dataset = FederatedDataset.from_client_data(data, test, **options)
  for role in corpus_lib.ROLES:
    for client_id in dataset.client_ids(role):
      dataset.client(client_id)
  return dataset


def b(dataset_fn, **options):
  """Loads the clients 'a' and 'b', of whom the latter is bad."""
  return lambda: load(clients(b=dataset_fn), **options)


def mapped(map_fn):
  return b(lambda: one().map(map_fn))


def labels(*y):
  return b(lambda: one(X[: len(y)], np.array(y)))


def generated(first, *others):
  """Examples of a generator, whose types are known, and shapes are not."""

  def generate():
    for image, label in (first, *others):
      if image is None:
        raise KeyError('no such file')
      yield {'image': image, 'label': label}

  signature = {
      'image': tf.TensorSpec(None, tf.float32),
      'label': tf.TensorSpec(None, tf.int32),
  }
  return b(
      lambda: tf.data.Dataset.from_generator(
          generate, output_signature=signature
      )
  )


def ids(*names):
  return lambda: load(ClientData.from_clients_and_tf_fn(names, lambda c: one()))


_LENGTHS = itertools.cycle(range(3, 9))


def of_another_length():
  return one().take(next(_LENGTHS))


def raises(client_id=None):
  raise OSError('disk on fire')


BAD_CLIENTS = {
    'shuffled': (b(lambda: one().shuffle(99)), "'b' of 'mine' .* twice"),
    'shuffled test': (
        lambda: load(clients(), clients().preprocess(lambda d: d.shuffle(99))),
        "'a' of 'mine' .* twice",
    ),
    'noise': (
        mapped(lambda e: e | {'image': tf.random.uniform([4, 4, 1])}),
        "'b' of 'mine' .* twice",
    ),
    'noise in preprocess': (
        b(one, preprocess=lambda x: np.float32(x * random.random())),
        "`preprocess` .* always alike, .* 'a' of 'mine' alone",
    ),
    'statistics of the batch': (
        b(one, preprocess=lambda x: x - x.mean(0)),
        "`preprocess` .* 'a' of 'mine' alone",
    ),
    'statistics of a later batch': (
        b(lambda: one(9 * X), preprocess=lambda x: x - x.mean(0) * (
            x.max() > 1)),
        "`preprocess` .* 'b' of 'mine' alone",
    ),
    'another length': (b(of_another_length), "'b' of 'mine' .* twice"),
    'endless': (b(lambda: one().repeat()), "'b' to hold a finite number"),
    'empty': (b(lambda: one().take(0)), "'b' of 'mine' to hold examples"),
    'no label': (
        b(lambda: slices({'image': X})), r"keys .* found \['image'\] .* 'b'"
    ),
    'tuples': (b(lambda: slices((X, Y))), "found a tuple for client 'b'"),
    'other image size': (
        b(lambda: one(X[:, :3])), r"'b' .* \(7, 4, 4, 1\), found .* 3, 4, 1"
    ),
    'other number of axes': (
        b(lambda: one(X[..., 0])), r"'b' .* \(7, 4, 4, 1\), found"
    ),
    'several image sizes': (
        generated((X[0], 0), (X[0, 1:], 1)), "client 'b', all of one shape"
    ),
    'ragged': (
        b(lambda: one(tf.RaggedTensor.from_row_lengths(
            tf.ones([18]), [2] * 9))),
        "'image', found RaggedTensorSpec.* 'b'",
    ),
    'sparse': (
        b(lambda: one(tf.sparse.from_dense(X[..., 0]))),
        "'image', found SparseTensorSpec.* 'b'",
    ),
    'complex pixels': (b(lambda: one(X + 0j)), "real numbers .* 'b'"),
    'no image': (b(lambda: one(np.arange(9.0))), "'b' .* have a shape"),
    'paths': (b(lambda: one(np.array(['/a.png'] * 9))), "'b' .* float: "),
    'NaN': (b(lambda: one(X / (Y > 0).reshape(9, 1, 1, 1))), "'b' .* finite"),
    'too large for float32': (b(lambda: one(X * 1e300)), "'b' .* finite"),
    'label names': (labels('cat', 'dog'), "type .*string.* 'b'"),
    'halves as labels': (labels(0.0, 1.7), "type .*float64.* 'b'"),
    'True and False': (labels(True, False), "type .*bool.* 'b'"),
    'one-hot': (b(lambda: one(y=np.eye(3)[Y])), r"shape \(3,\) .* 'b'"),
    'a column of labels': (
        b(lambda: one(y=Y[:, np.newaxis])), r"shape \(1,\) .* 'b'"
    ),
    'labels of several shapes': (
        generated((X[0], [0]), (X[0], [1])), r"'b' .* of shape \(2, 1\)"
    ),
    'batches': (b(lambda: one().batch(2)), r"shape \(None,\) .* 'b'"),
    'batches of one': (
        b(lambda: one().batch(1, drop_remainder=True)), r"shape \(1,\) .* 'b'"
    ),
    'a label of 33 bits': (labels(0, 2**32 + 1), "'b' .* 0..2, .*4294967297"),
    'a label of 64 bits': (
        labels(*np.uint64([0, 2**63 + 1])), "'b' .* 0..2, .*922337203685477"
    ),
    'a negative label': (labels(0, -1), "'b' .* 0..2, found -1"),
    'one label too many': (labels(1, 2, 3), "'b' .* 0..2, found 1..3"),
    'failing generator': (
        generated((X[0], 0), (None, 0)), "client 'b', .*no such file"
    ),
    'failing function': (b(raises), "client 'b', .* OSError: disk on fire"),
    'failing preprocess': (
        b(one, preprocess=raises), "`preprocess` .* 'a' .* OSError: disk"
    ),
    'fewer of preprocess': (
        b(one, preprocess=lambda x: x[1:]), r"`preprocess` .* \(8, 4.* 'a'"
    ),
    'a tensor of preprocess': (
        b(one, preprocess=tf.identity), "`preprocess` .* EagerTensor .* 'a'"
    ),
    'float64 of preprocess': (
        b(one, preprocess=np.float64), "`preprocess` .* float64 .* 'a'"
    ),
    'one id twice': (ids('a', 'b', 'a'), r"`train` .* \['a'\] come more"),
    'ids that are numbers': (ids(3, 4), 'ids .*`train` .* strings, found 3'),
    'half a surrogate pair': (ids('a', '\ud83d'), '`train` .* Unicode, found'),
    'all clients held out': (
        lambda: load(clients(), num_test_clients=1), 'some of the 1 clients'
    ),
    'half a client': (
        lambda: load(clients(), num_clients=0.5), '`num_clients` .* found 0.5'
    ),
    'half a new client': (
        lambda: load(clients(), num_test_clients=0.5), '`num_test_clients`'
    ),
    'no classes': (lambda: load(clients(), num_classes=0), '`num_classes`'),
    'half a class': (lambda: load(clients(), num_classes=2.5), '`num_classes`'),
    'negative seed': (lambda: load(clients(), seed=-1), '`seed` .* found -1'),
    'half a seed': (lambda: load(clients(), seed=0.5), '`seed` .* found 0.5'),
    'no fraction': (
        lambda: load(clients(), test_fraction='0.1'), "`test_fraction` .*'0.1'"
    ),
    'NaN as a fraction': (
        lambda: load(clients(), test_fraction=np.nan), '`test_fraction` .* nan'
    ),
    'no ClientData': (lambda: load({'a': one()}), '`train` .* found a dict'),
    'no ClientData to test on': (
        lambda: load(clients(), [one()]), '`test` .* found a list'
    ),
    'tested on what was trained on': (
        lambda: load(*[clients()] * 2), "'a' .* in `test` than in `train`"
    ),
    'tested on equal ClientData': (
        lambda: load(clients(), clients(), validation_fraction=0.3),
        "client 'a' of 'mine' .* `test` than in `train`, found the same 9",
    ),
    'one client tested on what it was trained on, in another order': (
        lambda: load(clients(b=one), clients(
            a=lambda: one(1 - X), b=lambda: one(X[::-1], Y[::-1]))),
        "client 'b' of 'mine' .* found the same 9",
    ),
    'tested clients that do not train': (
        lambda: load(clients(), clients(z=one)), "`train`, .* such as 'z'"
    ),
}  # fmt: skip


def refuses(call, message):
  with pytest.raises((TypeError, ValueError), match=message) as caught:
    call()
  assert caught.type in (TypeError, ValueError)
  assert str(caught.value).startswith('Expected ')


@pytest.mark.parametrize('name', BAD_CLIENTS)
def test_bad_clients(name):
  refuses(*BAD_CLIENTS[name])


ODD_IDS = ('', ' ', 'a\nb', '../a/b', 'a\0', 'a', "';--", 'é ∑ 🦊', 'x' * 10**4)


def test_odd_ids_are_ids():
  dataset = ids(*ODD_IDS)()
  assert set(dataset.client_ids()) == set(ODD_IDS)
  assert len({dataset.salt(client_id) for client_id in ODD_IDS}) == len(ODD_IDS)


def test_the_order_of_ids_and_keys_makes_no_difference():
  order = ['c', 'a', 'b']
  datasets = [
      load(
          ClientData.from_clients_and_tf_fn(
              names, lambda c: one().map(lambda e: dict(reversed(e.items())))
          )
      )
      for names in (order, sorted(order))
  ]
  assert datasets[0].fingerprint() == datasets[1].fingerprint()


@pytest.mark.parametrize(
    'dtype', ['uint8', 'uint16', 'bool', 'float64', 'int64']
)
def test_pixels_stay_as_they_are(dtype):
  x = (9 * X).astype(dtype)
  client = load(clients(b=lambda: one(x))).client('b')
  pixels = np.concatenate([client.train.x, client.test.x])
  assert pixels.dtype == np.float32
  np.testing.assert_array_equal(
      np.sort(pixels, axis=None), np.sort(x, axis=None)
  )


def test_a_client_that_changes_while_it_is_out_of_the_cache_is_refused():
  """The data set is the same twice, then another one."""
  x = X.copy()
  dataset = load(clients(b=lambda: one(x)), cache_bytes=0)
  dataset.client('b')
  dataset.tff_client_data('b', 'test')
  x[:] = 0
  with pytest.raises(ValueError, match="'b' of 'mine' .* read again"):
    dataset.tff_client_data('b', 'test')


def corpus(x=None, y=Y, **fields):
  x = (255 * X).astype(np.uint8) if x is None else x
  part = corpus_lib.LabelledExamples(x, y)
  none = corpus_lib.LabelledExamples(x[:0], y[:0])
  return corpus_lib.Corpus(
      **{'name': 'own', 'train': part, 'test': none, 'num_classes': 3} | fields
  )


def deal(rows=None, *, num_clients=3, **options):
  """Deals a corpus, to clients with the given rows."""
  fields = {k: options.pop(k) for k in list(options) if 'writers' in k}
  return FederatedDataset.from_corpus(
      corpus(**fields),
      partitioners.iid if rows is None else lambda *_: rows,
      num_clients,
      **{'seed': 0, 'test_fraction': 0.0} | options,
  )


def arrays(**changed):
  return lambda: corpus(**changed)


def dealt(*args, **kwargs):
  return lambda: deal(*args, **kwargs)


BAD_CORPORA = {
    'a tuple': (arrays(train=(X, Y)), '`own.train` .* found a tuple'),
    'lists': (
        arrays(train=corpus_lib.LabelledExamples(X.tolist(), Y)),
        '`own.train.x` .* found a list',
    ),
    'float64': (arrays(x=np.float64(X)), 'uint8 or float32 .* float64'),
    'uint16': (arrays(x=np.uint16(X)), 'uint8 or float32 .* uint16'),
    'bool': (arrays(x=X > 0.5), 'uint8 or float32 .* bool'),
    'strings': (arrays(x=X.astype(str)), 'uint8 or float32 .* <U'),
    'float32 without scaling': (arrays(x=X), '`preprocess` .* float32 pixels'),
    'zeros and ones': (arrays(x=np.uint8(X > 0.5)), 'found none above 1'),
    'sixteen shades': (
        arrays(x=np.uint8(16 * X)), r"`preprocess` .* 'own', .* above 1\d\. Tip"
    ),
    'tested on what was trained on': (
        lambda: corpus(test=corpus_lib.LabelledExamples(
            (255 * X).astype(np.uint8), Y)),
        '`own.test` to hold other examples than `own.train`, found the same',
    ),
    'statistics of the batch': (
        arrays(x=X, preprocess=lambda x: x / x.max()), '`preprocess` .* alone'
    ),
    'noise': (
        arrays(x=X, preprocess=lambda x: x * np.float32(random.random())),
        '`preprocess` .* always alike',
    ),
    'a tensor of preprocess': (
        arrays(preprocess=lambda x: tf.cast(x, tf.float32)), 'EagerTensor'
    ),
    'failing preprocess': (arrays(preprocess=raises), '`preprocess` .*OSError'),
    'int64 labels': (arrays(y=np.int64(Y)), '`own.train.y` .* int32'),
    'a column of labels': (
        arrays(y=Y[:, np.newaxis]), r'`own.train.y` .* \(9,\), .* \(9, 1\)'
    ),
    'labels from 1': (arrays(y=Y + 1), r'`own.train.y` in 0..2, found 1..3'),
    'no classes': (arrays(num_classes=0), '`num_classes`'),
    'too few writers': (arrays(writers=Y[:3]), r'`writers` .* shape \(3,\)'),
    'a column of writers': (
        arrays(writers=Y[:, np.newaxis]), r'`writers` .* shape \(9, 1\)'
    ),
    'unasked test writers': (
        arrays(test_writers=Y), r'`test_writers` .* 0 test .* \(9,\)'
    ),
    'rows twice': (
        dealt([[0, 1, 1], [2], [3]]), '`partition` .* client 0 every row once'
    ),
    'a row of two clients': (
        dealt([[0, 1], [2], [3, 1]]), 'row 1 given to client 0 and to client 2'
    ),
    'the same rows for all, with a published test part': (
        lambda: FederatedDataset.from_corpus(
            corpus(test=corpus_lib.LabelledExamples(np.uint8(X), Y)),
            lambda *_: [range(9)] * 3, 3, 0,
        ),
        'row 0 given to client 0 and to client 1',
    ),
    'rows that are none': (
        dealt([[0], [1], [9]]), r'rows in 0..8 for client 2, found 9'
    ),
    'negative rows': (dealt([[0], [-1], [2]]), 'client 1, found -1'),
    'rows that are halves': (dealt([[0.5], [1], [2]]), 'client 0, .* float64'),
    'a mask for rows': (
        dealt([Y == k for k in range(3)]), 'client 0, .* bool'
    ),
    'rows in a column': (dealt([[[0]], [[1]], [[2]]]), r'client 0, .*\(1, 1\)'),
    'too few clients': (dealt([[0], [1]]), 'of 3 clients .* found 2'),
    'a partition of nothing': (
        lambda: FederatedDataset.from_corpus(
            corpus(), lambda *_: None, 3, 0, test_fraction=0.1
        ),
        'a list of rows for every client, found None',
    ),
    'a client without rows': (dealt([[0], [1], []]), "none for 'client_2'"),
    'half a client': (dealt(num_clients=2.5), '`num_clients` .* found 2.5'),
    'a negative seed': (dealt(seed=-1), '`seed` .* found -1'),
    'a test part without writers': (
        dealt(partition_by='writer', test_fraction=None), 'writer of every'
    ),
    'next to nothing to train on': (
        lambda: FederatedDataset.from_corpus(
            corpus(test=corpus_lib.LabelledExamples(np.uint8(X), Y)),
            partitioners.iid, 3, 0, validation_fraction=0.999999,
        ),
        'found 0.999999, which leaves 1 of 9',
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', BAD_CORPORA)
def test_bad_corpora(name):
  refuses(*BAD_CORPORA[name])


SPLIT = corpus_lib.ClassSplit((0, 1), (), (2,))
ROTATED = functools.partial(
    corpus_lib.with_rotation_groups, corpus=corpus(), seed=0
)
NUMBERS = {
    load: (
        clients(),
        ['num_classes', 'seed', 'num_clients', 'validation_fraction',
         'test_fraction', 'num_validation_clients', 'num_test_clients',
         'cache_bytes'],
    ),
    functools.partial(FederatedDataset.from_corpus, num_clients=3, seed=0,
                      corpus=corpus(), partition=partitioners.iid,
                      test_fraction=0.1): (
        None,
        ['num_clients', 'seed', 'validation_fraction', 'test_fraction',
         'num_validation_clients', 'num_test_clients', 'cache_bytes'],
    ),
    functools.partial(FederatedDataset.few_round, num_clients=3, seed=0,
                      corpus=corpus(class_split=SPLIT)): (
        None, ['num_clients', 'seed', 'examples_per_class', 'cache_bytes']
    ),
    ROTATED: (None, ['seed', 'num_groups', 'degrees_between_groups']),
}  # fmt: skip


@pytest.mark.parametrize('value', [np.array([0.1, 0.2]), '1', 1j, [1]])
@pytest.mark.parametrize('function', NUMBERS)
def test_numbers_that_are_none(function, value):
  data, names = NUMBERS[function]
  for name in names:
    call = functools.partial(function, *[data] * (data is not None))
    refuses(lambda n=name, c=call: c(**{n: value}), f'`{name}`')


@pytest.mark.parametrize('value', [np.array([0.1, 0.2]), '1', 1j, [1]])
@pytest.mark.parametrize('name', partitioners.PARTITIONERS)
def test_numbers_of_partitioners_that_are_none(name, value):
  partition = partitioners.PARTITIONERS[name]
  parameters = inspect.signature(partition).parameters
  good = {'num_clients': 4, 'seed': 0}
  if 'classes_per_client' in parameters:
    good['classes_per_client'] = 1
  for option in list(parameters)[1:]:
    if option != 'start_over':
      call = functools.partial(partition, np.arange(4000) % 4)
      refuses(
          lambda o=option, c=call: c(**good | {o: value}),
          'client' if 'client' in option else f'`{option}`',
      )


def test_a_partitioner_that_says_so_may_share_rows():
  y = np.repeat(np.arange(3, dtype=np.int32), 300)
  many = corpus(np.zeros((900, 2, 2, 1), np.uint8), y)
  partition = functools.partial(partitioners.fedec_femnist, start_over=True)
  rows = np.concatenate(partition(y, 12, 0))
  assert len(set(rows)) < len(rows)
  FederatedDataset.from_corpus(many, partition, 12, 0, test_fraction=0.1)


def test_a_corpus_that_changes_while_it_is_in_use_is_refused():
  x = (255 * X).astype(np.uint8)
  dataset = FederatedDataset.from_corpus(
      corpus(x), partitioners.iid, 3, 0, test_fraction=0.3, cache_bytes=0
  )
  dataset.client('client_1')
  x //= 2
  with pytest.raises(ValueError, match="'client_1' of 'own' .* read again"):
    dataset.client('client_1')


def leaf(change):
  """Reads a LEAF file that is changed from a right one."""

  def read(tmp_path):
    user = {'x': [[0.5] * 784, [0.1] * 784], 'y': [0, 1]}
    contents = {
        'users': ['ann'], 'num_samples': [2], 'user_data': {'ann': user}
    }  # fmt: skip
    change(contents, user)
    path = tmp_path / 'leaf.json'
    path.write_text(json.dumps(contents))
    return femnist.load(str(path))

  return read


def leaf_text(text):
  """Reads a LEAF file of this text."""

  def read(tmp_path):
    (tmp_path / 'leaf.json').write_text(text)
    return femnist.load(str(tmp_path / 'leaf.json'))

  return read


def leaf_folder(**files):
  """Reads a LEAF folder: the writer and pixel of `<part>_<file>.json`."""

  def read(tmp_path):
    for name, (user, pixel) in files.items():
      part = tmp_path / name.partition('_')[0]
      part.mkdir(exist_ok=True)
      data = {'x': [[pixel] * 784, [0.1] * 784], 'y': [0, 1]}
      contents = {'users': [user], 'user_data': {user: data}}
      (part / f'{name}.json').write_text(json.dumps(contents))
    return femnist.load(str(tmp_path))

  return read


def labelled(*y):
  return leaf(lambda _, user: user.update(y=y))


def proto(label=0):
  feature = {
      'pixels': tf.train.Feature(float_list={'value': [0.5] * 784}),
      'label': tf.train.Feature(int64_list={'value': [label]}),
  }
  example = tf.train.Example(features={'feature': feature})
  return example.SerializeToString()


def sqlite(*own, writer='ann', test=(), read=femnist.load):
  """Reads an SQLite file in which a writer has these examples."""

  def make(tmp_path):
    path = str(tmp_path / 'file.sqlite')
    with sqlite3.connect(path) as db:
      db.execute('CREATE TABLE examples (split_name TEXT, client_id TEXT,'
                 ' serialized_example_proto BLOB)')  # fmt: skip
      db.execute('CREATE TABLE client_metadata (client_id TEXT,'
                 ' split_name TEXT, num_examples INTEGER)')  # fmt: skip
      for split, examples in (('train', own), ('test', test)):
        db.execute('INSERT INTO client_metadata VALUES (?, ?, ?)',
                   (writer, split, len(examples)))  # fmt: skip
        for example in examples:
          db.execute('INSERT INTO examples VALUES (?, ?, ?)',
                     (split, writer, example))  # fmt: skip
    return read(path)

  return make


def read_lazily(path):
  train, _ = femnist.load_client_data(path)
  return load(train, num_classes=62, x_key='x', y_key='y')


def deep(mode):
  """Makes the image 0.png of a folder one of more than 8 bits a channel."""
  return lambda d: Image.new(mode, (32, 32), 4500).save(d / 'cat' / '0.tiff')


def folder(change):
  """Reads CINIC-10, of one image a class, that is changed."""

  def read(tmp_path):
    for part in ('train', 'valid', 'test'):
      for name in cinic10.CLASSES:
        (tmp_path / part / name).mkdir(parents=True)
        image = Image.fromarray(np.zeros((32, 32, 3), np.uint8))
        image.save(tmp_path / part / name / '0.png')
    change(tmp_path / 'train')
    return cinic10.load(str(tmp_path))

  return read


def tables(**own):
  """Reads miniImageNet whose tables hold these rows."""

  def read(tmp_path):
    (tmp_path / 'images').mkdir()
    for name in ('train', 'val', 'test'):
      rows = ['filename,label', own.get(name, f'{name}.png,{name}')]
      (tmp_path / f'{name}.csv').write_bytes('\n'.join(rows).encode('latin-1'))
    return mini_imagenet.load(str(tmp_path))

  return read


BAD_FILES = {
    'a label of 1.7': (labelled(0, 1.7), "'ann' .* integers, found float64"),
    'a label of 33 bits in JSON': (labelled(0, 2**32 + 1), '0..4294967297'),
    'a label of 65 bits': (labelled(0, 2**64), 'integers, found object'),
    'labels that are strings': (labelled('0', '1'), 'integers, found <U1'),
    'a column of labels': (labelled([0], [1]), r'of shape \(2, 1\)'),
    'too few labels': (labelled(0), 'LEAF .* user .*ann.*, found 1'),
    'pixels that are strings': (
        leaf(lambda _, user: user.update(x=[['0'] * 784] * 2)), 'LEAF'
    ),
    'a pixel of 400 digits': (
        leaf(lambda _, user: user.update(x=[[0.5] * 783 + [10**400]] * 2)),
        "leaf.json .* 'ann'",
    ),
    'a user twice': (
        leaf(lambda c, _: c.update(users=['ann', 'ann'])), "once .* 'ann'"
    ),
    'a user that is not listed': (
        leaf(lambda c, user: c['user_data'].update(bob=user)), "once .* 'bob'"
    ),
    'a user without data': (
        leaf(lambda c, _: c['users'].append('bob')), "once .* 'bob'"
    ),
    'other numbers of examples': (
        leaf(lambda c, _: c.update(num_samples=[3])), "3 examples of user 'ann'"
    ),
    'pixels by examples': (
        leaf(lambda _, user: user.update(x=[[0.5] * 2] * 784)),
        r"leaf.json .* 'ann': .*\(2, 784\), found \(784, 2\)",
    ),
    'images of rows': (
        leaf(lambda _, user: user.update(x=[[[0.5] * 28] * 28] * 2)),
        r"leaf.json .* 'ann': .* found \(2, 28, 28\)",
    ),
    'a name that ends in NUL': (
        leaf(lambda c, user: c.update(
            users=['ann', 'ann\0'], user_data={'ann': user, 'ann\0': user},
            num_samples=[2, 2])),
        r'leaf.json .* names.*ann\\x00',
    ),
    'half a surrogate pair for a name': (
        leaf(lambda c, user: c.update(
            users=['\ud83d'], user_data={'\ud83d': user})),
        'leaf.json .* name.*ud83d',
    ),
    'a user with data twice': (
        leaf_text('{"users": ["u"], "user_data": {"u": 1, "u": 2}}'),
        "leaf.json .* once, found 'u'",
    ),
    'nested too deeply': (leaf_text('[' * 10**5), 'leaf.json .*Recursion'),
    'a user in two files': (
        leaf_folder(train_0=('ann', 0.5), train_1=('ann', 0.4)),
        r"train_1.json .* 'ann': .* one file, found .*train_0.json, too",
    ),
    'a copy of the train part': (
        leaf_folder(train_0=('ann', 0.5), test_0=('ann', 0.5)),
        "other examples of 'ann' in the test part",
    ),
    'a copy of the train part in SQLite': (
        sqlite(proto(3), proto(4), test=(proto(4), proto(3))),
        "file.sqlite .* other examples of 'ann' in the test part",
    ),
    'NULL for a name': (
        sqlite(proto(), writer=None), 'file.sqlite .* name.*None'
    ),
    'NULL for a name, read lazily': (
        sqlite(proto(), writer=None, read=read_lazily),
        'file.sqlite .* name.*None',
    ),
    'bytes for a name': (
        sqlite(proto(), writer=b'\xff'), r"file.sqlite .* name.*b'\\xff'"
    ),
    'bytes for a name, read lazily': (
        sqlite(proto(), writer=b'\xff', read=read_lazily),
        r"file.sqlite .* name.*b'\\xff'",
    ),
    'NULL for an example': (
        sqlite(proto(), None), "file.sqlite .* 'ann' that is not: None"
    ),
    'text for an example': (
        sqlite(proto(), 'proto'), "file.sqlite .* 'ann' that"
    ),
    'bytes that are no example': (
        sqlite(proto(), b'\xff\xfe'),
        r"file.sqlite .* 'ann' that is not: b'\\xff",
    ),
    'bytes that are no example, read lazily': (
        sqlite(proto(), b'\xff\xfe', read=read_lazily), "'ann'"
    ),
    'a label of 33 bits in SQLite': (
        sqlite(proto(2**32 + 1)), 'file.sqlite in .* 4294967297'
    ),
    'a label of 33 bits, read lazily': (
        sqlite(proto(2**32 + 1), read=read_lazily), "client 'ann', .* int32"
    ),
    'a file that is no image': (
        folder(lambda d: (d / 'cat' / 'notes.txt').write_text('cats')),
        'cat/notes.txt to be an image',
    ),
    'an image of 16 bits': (folder(deep('I;16')), 'cat/0.tiff .* I;16'),
    'an image of 32 bits': (folder(deep('I')), 'cat/0.tiff .* found mode I'),
    'an image of floats': (folder(deep('F')), 'cat/0.tiff .* found mode F'),
    'a class that is none': (
        folder(lambda d: (d / 'zebra').mkdir()), 'found zebra, too'
    ),
    'an image in two tables': (
        tables(test='train.png,test'), "every file once .* 'train.png'"
    ),
    'an image in two tables, with a dot': (
        tables(test='./train.png,test'), "every file once .* 'train.png'"
    ),
    'an image elsewhere': (
        tables(test='../images/train.png,test'),
        r"test.csv, line 2, found \['../images/train.png', 'test'\]",
    ),
    'a class in two tables, with a blank': (
        tables(val='val.png, train'), "every class once .* 'train'"
    ),
    'a short row': (tables(val='val.png'), 'val.csv, line 2, found'),
    'a long row': (tables(val='val.png,a,b'), 'val.csv, line 2, found'),
    'a row without a class': (tables(val='val.png, '), 'val.csv, line 2, f'),
    'a table in latin-1': (tables(val='val.png,caf\xe9'), 'val.csv .* 0xe9'),
    'a class in two tables': (
        tables(val='val.png,train'), "every class once .* 'train'"
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', BAD_FILES)
def test_bad_files(name, tmp_path):
  read, message = BAD_FILES[name]
  refuses(functools.partial(read, tmp_path), message)


@pytest.mark.parametrize('suffix', ['.npz', '.h5', '.sqlite'])
def test_own_files_are_not_to_be_deleted(suffix, tmp_path):
  path = tmp_path / f'mine{suffix}'
  path.write_bytes(b'\x89HDF\r\n\x1a\n' + bytes(2000))
  with pytest.raises(ValueError, match='SQLite .* LEAF') as caught:
    femnist.load(str(path))
  assert 'delete' not in str(caught.value)


def test_leaf_files_split_by_user_have_no_test_examples(tmp_path):
  for part, user, label in (('train', 'ann', 0), ('test', 'bob', 1)):
    (tmp_path / part).mkdir()
    data = {'x': [[0.5] * 784] * 3, 'y': [label] * 3}
    contents = {'users': [user], 'user_data': {user: data}}
    (tmp_path / part / 'all.json').write_text(json.dumps(contents))
  train, test = femnist.load_client_data(str(tmp_path))
  options = {'num_classes': 62, 'x_key': 'x', 'y_key': 'y'}
  refuses(lambda: load(train, test, **options), "`train`, .* such as 'bob'")
  loaded = femnist.load(str(tmp_path))
  refuses(
      lambda: FederatedDataset.from_corpus(
          loaded, partitioners.by_writer, 1, 0, partition_by='writer'
      ),
      "'femnist' .* such as 'bob'",
  )
  pooled = FederatedDataset.from_corpus(
      loaded, partitioners.by_writer, 2, 0,
      partition_by='writer', test_fraction=0.4,
  )  # fmt: skip
  assert [len(pooled.client(c).test.y) for c in pooled.client_ids()] == [1, 1]


@pytest.mark.parametrize(
    'scale, cause', [(1 / 255, 'scaled twice'), (255, 'not scaled at all')]
)
def test_pixels_far_from_one_are_warned_of(scale, cause):
  def preprocess(x):
    return np.float32(x * scale)

  with pytest.warns(UserWarning, match=cause) as warned:
    load(clients(b=one), preprocess=preprocess)
  assert len(warned) == 1  # Not of every client.
  part = corpus_lib.LabelledExamples(X, Y)
  with pytest.warns(UserWarning, match=cause):
    corpus_lib.Corpus('mine', part, part._replace(x=X[::-1]), 3, preprocess)
