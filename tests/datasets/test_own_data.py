"""Data of one's own: every kind read, and everything wrong with it named."""

import json
import os
import shutil
import sqlite3
import warnings

import h5py
import numpy as np
import pandas as pd
from PIL import Image
import pytest

from tff_meta import datasets
from tff_meta import machine
from tff_meta.datasets import own_data

_CLASSES = ('cat', 'dog', 'eel')
_CLIENTS = ('ann', 'bob')
# Two clients, three classes, five, four and three examples of each client's.
_ROWS = range(24)
_LABELS = np.repeat(np.tile(_CLASSES, 2), (5, 4, 3) * 2)
_OWNERS = np.repeat(_CLIENTS, 12)
_PIXELS = np.random.default_rng(0).integers(0, 256, (24, 6, 4, 3), np.uint8)
_NUMBERS = np.arange(48, dtype=np.float64).reshape(24, 2) ** 2


def _folder(path, rows=_ROWS, client=True, size=(4, 6), mode='RGB'):
  for row in rows:
    place = path / _OWNERS[row] if client else path
    (place / _LABELS[row]).mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(_PIXELS[row]).resize(size).convert(mode)
    image.save(place / _LABELS[row] / f'{row:02}.png')


def _csv(path, **columns):
  data = {'a': _NUMBERS[:, 0], 'b': _NUMBERS[:, 1], 'label': _LABELS}
  pd.DataFrame(data | columns).to_csv(path, index=False)


def _load(name, **options):
  return datasets.load_corpus(name, **options)


def _check(corpus, x, clients=_OWNERS, labels=_LABELS):
  """Compares a corpus with what it should hold, in the order of `x`."""
  names = np.array(corpus.class_names)
  assert corpus.class_names == _CLASSES
  assert corpus.num_classes == 3 and corpus.class_split is None
  np.testing.assert_array_equal(corpus.train.x, x)
  np.testing.assert_array_equal(names[corpus.train.y], labels)
  if clients is None:
    assert corpus.writers is None
  else:
    np.testing.assert_array_equal(corpus.writers, clients)


def test_folders(tmp_path):
  _folder(tmp_path / 'a')
  (tmp_path / 'a/.DS_Store').touch()
  (tmp_path / 'a/ann/fox').mkdir()  # Bob may have one.
  corpus = _load(f'folder:{tmp_path}/a')
  _check(corpus, _PIXELS)
  assert corpus.preprocess(corpus.train.x).max() == _PIXELS.max() / 255
  _folder(tmp_path / 'b/train', range(0, 24, 2), client=False)
  _folder(tmp_path / 'b/test', range(1, 24, 2), client=False)
  corpus = _load(f'folder:{tmp_path}/b')
  order = np.argsort(_LABELS[::2], kind='stable')
  _check(corpus, _PIXELS[::2][order], None, np.sort(_LABELS[::2]))
  order = np.argsort(_LABELS[1::2], kind='stable')
  np.testing.assert_array_equal(corpus.test.x, _PIXELS[1::2][order])
  _folder(tmp_path / 'c', mode='L')
  assert _load(f'folder:{tmp_path}/c').input_shape == (6, 4, 1)
  for size, shape in ((8,), (8, 8, 3)), ((8, 5), (8, 5, 3)):
    corpus = _load(f'folder:{tmp_path}/a', image_size=size)
    assert corpus.input_shape == shape


def test_tables(tmp_path):
  _csv(tmp_path / 'a.csv', who=_OWNERS)
  corpus = _load('csv:a.csv', data_dir=str(tmp_path), client='who')
  _check(corpus, _NUMBERS)
  scaled = corpus.preprocess(corpus.train.x)
  np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(scaled.std(axis=0), 1, rtol=1e-5)
  _csv(tmp_path / 'a.csv', client=range(24))
  with pytest.warns(UserWarning, match="'client'.* made up.*client=client"):
    _load('csv:a.csv', data_dir=str(tmp_path))
  path = tmp_path / 'b.csv'
  # A byte-order mark, and names that pandas takes for missing values.
  frame = pd.DataFrame(dict(label=['NA', 'None'] * 9, a=7, b=range(18)))
  frame.to_csv(path, index=False, encoding='utf-8-sig', sep=';')
  corpus = _load(f'csv:{path}', separator='semicolon', features=('b',))
  assert corpus.class_names == ('NA', 'None') and corpus.input_shape == (1,)
  corpus = _load(f'csv:{path}', separator='semicolon')
  assert (corpus.preprocess(corpus.train.x)[:, 0] == 0).all()  # Constant.
  # Names may be those of missing values, and bools are numbers.
  path.write_text('NA,b,label\n0.5,True,x\n1.5,False,y\n')
  corpus = _load(f'csv:{path}', scaling='raw')
  assert corpus.train.x.tolist() == [[0.5, 1], [1.5, 0]]

  pixels = _PIXELS.reshape(24, -1).T
  _csv(tmp_path / 'c.csv', **{f'p{i:02}': own for i, own in enumerate(pixels)})
  names = tuple(f'p{i:02}' for i in range(72))
  corpus = _load(f'csv:{tmp_path}/c.csv', features=names, image_shape=(6, 4, 3))
  _check(corpus, _PIXELS, None)
  assert corpus.train.x.dtype == np.uint8
  _folder(tmp_path / 'images')
  files = [
      f'images/{client}/{label}/{row:02}.png'
      for row, (client, label) in enumerate(zip(_OWNERS, _LABELS, strict=True))
  ]
  _csv(tmp_path / 'd.csv', file=files)
  _check(_load(f'csv:{tmp_path}/d.csv', image='file'), _PIXELS, None)


@pytest.mark.parametrize(
    'labels, names',
    [
        (['10', '9', '-1'], ('-1', '9', '10')),
        (['01', '1', '2'], ('01', '1', '2')),
        (['1.1', '1.10', '2'], ('1.1', '1.10', '2')),
        (['True', 'False'], ('False', 'True')),
    ],
)
def test_labels_of_a_table_are_called_as_they_are(tmp_path, labels, names):
  path = tmp_path / 'a.csv'
  path.write_text('\n'.join(['a,label', *(f'1,{label}' for label in labels)]))
  corpus = _load(f'csv:{path}')
  assert corpus.class_names == names
  assert [names[y] for y in corpus.train.y] == labels


def test_numbers_that_float32_does_not_tell_apart_are_warned_of(tmp_path):
  path, seconds = tmp_path / 'a.csv', np.arange(24) + 1_700_000_000
  _csv(path, b=seconds)
  with pytest.warns(
      UserWarning, match='number 2 .* 1700000000.0, by up to 23, of'
  ):
    _load(f'csv:{path}')
  # Neither seconds of years, nor what does not vary, nor what seldom does.
  _csv(path, b=seconds * np.arange(24), c=0.1, d=2020 + (np.arange(24) == 7))
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    _load(f'csv:{path}')


def test_a_table_with_a_test_file(tmp_path):
  for name, rows in ('train', slice(0, None, 2)), ('test', slice(1, None, 2)):
    frame = pd.DataFrame(
        dict(
            a=_NUMBERS[rows, 0],
            b=_NUMBERS[rows, 1],
            label=_LABELS[rows],
            who=_OWNERS[rows],
        )
    )
    # Columns go by their names.
    order = list(frame)[:: 1 if name == 'train' else -1]
    frame[order].to_csv(tmp_path / f'{name}.csv', index=False)
  name, options = f'csv:{tmp_path}/train.csv', dict(test_file='test.csv')
  corpus = _load(name, client='who', **options)
  np.testing.assert_array_equal(corpus.test_writers, _OWNERS[1::2])
  np.testing.assert_array_equal(corpus.test.x, _NUMBERS[1::2])
  frame.assign(c=1).to_csv(tmp_path / 'test.csv', index=False)
  _raises("in .*test.csv, found 'c' as well", name, client='who', **options)
  frame.drop(columns='b').to_csv(tmp_path / 'test.csv', index=False)
  _raises("column 'b' in .*test.csv", name, client='who', **options)
  frame.to_csv(tmp_path / 'test.csv', index=False)
  assert len(_load(name, features=('b', 'a'), **options).test.y) == 12


def test_parquet(tmp_path):
  path = tmp_path / 'a.parquet'
  try:
    pd.DataFrame(dict(a=_NUMBERS[:, 0], label=_LABELS, who=_OWNERS)).to_parquet(
        path
    )
  except ImportError:  # It is optional: the error says what to install.
    path.touch()
    with pytest.raises(ImportError, match='Tip: `pip install pyarrow=='):
      _load(f'parquet:{path}')
    return
  _check(_load(f'parquet:{path}', client='who'), _NUMBERS[:, :1])
  path.write_bytes(b'PAR1')
  with pytest.raises(ValueError, match='a.parquet to be a Parquet file'):
    _load(f'parquet:{path}')


def test_arrays(tmp_path):
  path = tmp_path / 'a.npz'
  np.savez(path, x=_PIXELS, y=_LABELS, who=_OWNERS)
  _check(_load(f'npz:{path}', client='who'), _PIXELS)
  corpus = _load(f'npz:{path}', client='who', scaling='channels')
  scaled = corpus.preprocess(corpus.train.x)
  np.testing.assert_allclose(scaled.mean(axis=(0, 1, 2)), 0, atol=1e-5)
  np.testing.assert_allclose(scaled.std(axis=(0, 1, 2)), 1, rtol=1e-5)
  np.savez(path, x=_PIXELS, user=_LABELS)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    _load(f'npz:{path}', label='user')
  parts = {'x_train': _PIXELS, 'y_train': _LABELS, 'x_val': 1, 'y_val': 2}
  np.savez(path, **parts)
  with pytest.warns(UserWarning, match='a.npz .* not read: x_val, y_val'):
    _load(f'npz:{path}')
  np.savez(path, x=_PIXELS, y=_LABELS, User=_OWNERS)
  with pytest.warns(UserWarning, match="'User'.* made up.*client=User"):
    assert _load(f'npz:{path}').writers is None
  # As Keras keeps MNIST: grey images, labels that are numbers.
  np.savez(
      path,
      x_train=_PIXELS[..., 0],
      y_train=np.arange(24) % 3,
      x_test=_PIXELS[:2, :, :, 1],
      y_test=np.array([2, 0]),
  )
  corpus = _load(f'npz:{path}')
  assert corpus.input_shape == (6, 4, 1) and corpus.test.y.tolist() == [2, 0]
  # Labels without gaps are made of any; floats are as they are.
  np.savez(path, x=_NUMBERS, y=np.tile([7, -1, 300], 8))
  with pytest.warns(UserWarning, match='not scaled at all.*=scaling=standard'):
    corpus = _load(f'npz:{path}')
  assert corpus.class_names == ('-1', '7', '300')
  assert corpus.train.y.tolist() == [1, 0, 2] * 8
  np.testing.assert_array_equal(corpus.preprocess(corpus.train.x), _NUMBERS)


def _by_client(write):
  for client in _CLIENTS:
    write(client, _OWNERS == client)


def test_files_by_client(tmp_path):
  """HDF5 and SQLite in TFF's layout, JSON in LEAF's."""
  import tensorflow as tf

  with h5py.File(tmp_path / 'a.h5', 'w') as file:

    def write(client, rows):
      file[f'examples/{client}/pixels'] = _PIXELS[rows]
      file[f'examples/{client}/label'] = _LABELS[rows].tolist()

    _by_client(write)
  _check(_load(f'hdf5:{tmp_path}/a.h5'), _PIXELS)

  flat = _PIXELS.reshape(24, -1)
  users = {'users': list(_CLIENTS), 'user_data': {}}

  def add_user(client, rows):
    users['user_data'][client] = {
        'x': flat[rows].tolist(),
        'y': _LABELS[rows].tolist(),
    }

  _by_client(add_user)
  (tmp_path / 'leaf/train').mkdir(parents=True)
  (tmp_path / 'leaf/train/a.json').write_text(json.dumps(users))
  _check(_load(f'leaf:{tmp_path}/leaf', image_shape=(6, 4, 3)), _PIXELS)
  users['user_data']['bob']['x'][0][0] = 0.5  # Whole numbers are floats, too.
  (tmp_path / 'leaf/train/a.json').write_text(json.dumps(users))
  assert _load(f'leaf:{tmp_path}/leaf').train.x[12, 0] == 0.5

  with sqlite3.connect(tmp_path / 'a.sqlite') as database:
    database.execute(
        'CREATE TABLE examples (split_name TEXT, client_id TEXT,'
        ' serialized_example_proto BLOB)'
    )
    database.execute(
        'CREATE TABLE client_metadata (client_id TEXT, split_name TEXT,'
        ' num_examples INTEGER)'
    )
    for part in 'train', 'test':
      for client in _CLIENTS:
        database.execute(
            'INSERT INTO client_metadata VALUES (?, ?, 12)', (client, part)
        )
      for row in range(24):
        feature = tf.train.Feature
        example = tf.train.Example(
            features=tf.train.Features(
                feature={
                    'pixels': feature(
                        float_list=tf.train.FloatList(
                            value=flat[row] / 255 + (part == 'test')
                        )
                    ),
                    'label': feature(
                        bytes_list=tf.train.BytesList(
                            value=[_LABELS[row].encode()]
                        )
                    ),
                }
            )
        )
        database.execute(
            'INSERT INTO examples VALUES (?, ?, ?)',
            (part, str(_OWNERS[row]), example.SerializeToString()),
        )
  corpus = _load(f'sqlite:{tmp_path}/a.sqlite', image_shape=(6, 4, 3))
  _check(corpus, np.float32(_PIXELS / 255))
  np.testing.assert_array_equal(corpus.test.x, np.float32(_PIXELS / 255 + 1))

  # As TFF's `save_to_sql_client_data` calls what is not split.
  shutil.copy(tmp_path / 'a.sqlite', tmp_path / 'b.sqlite')
  with sqlite3.connect(tmp_path / 'b.sqlite') as database:
    for table in 'examples', 'client_metadata':
      database.execute(f"DELETE FROM {table} WHERE split_name = 'test'")
      database.execute(f"UPDATE {table} SET split_name = 'default_split'")
  alone = _load(f'sqlite:{tmp_path}/b.sqlite')
  np.testing.assert_array_equal(alone.train.x, np.float32(flat / 255))
  with sqlite3.connect(tmp_path / 'b.sqlite') as database:
    database.execute(
        "INSERT INTO client_metadata VALUES ('ann', 'other_split', 0)"
    )
  _raises(
      'the split train in .*, found default_split, other_split. Tip: .* alone',
      f'sqlite:{tmp_path}/b.sqlite',
  )

  bob = _load(f'sqlite:{tmp_path}/a.sqlite', clients='b.b')
  assert set(bob.writers) == set(bob.test_writers) == {'bob'}
  np.testing.assert_array_equal(
      bob.train.x, np.float32(flat[_OWNERS == 'bob'] / 255)
  )
  with sqlite3.connect(tmp_path / 'a.sqlite') as database:
    for table in 'examples', 'client_metadata':
      database.execute(f"UPDATE {table} SET client_id = 'c_' || client_id")
  both = _load(f'sqlite:{tmp_path}/a.sqlite', clients='(c_).*')
  assert set(both.writers) == set(both.test_writers) == {'c_'}
  np.testing.assert_array_equal(both.train.x, np.float32(flat / 255))
  with pytest.raises(
      ValueError, match='of the form .b. in .*, found c_ann, c_bob'
  ):
    _load(f'sqlite:{tmp_path}/a.sqlite', clients='b')
  with pytest.raises(ValueError, match='`clients` to be a regular expression'):
    _load(f'sqlite:{tmp_path}/a.sqlite', clients='(')
  example.features.feature['pixels'].float_list.value.append(0)
  name = f'sqlite:{tmp_path}/a.sqlite'
  with sqlite3.connect(tmp_path / 'a.sqlite') as database:
    database.execute(
        'UPDATE examples SET serialized_example_proto = ? WHERE rowid = 1',
        (example.SerializeToString(),),
    )
  _raises("of client 'c_ann' of .*a.sqlite, found 72 and 73", name)
  for change, problem in (
      ("DELETE FROM client_metadata WHERE client_id = 'c_bob'", '12, not 0'),
      ('UPDATE client_metadata SET num_examples = 60', '12, not 60'),
  ):
    with sqlite3.connect(tmp_path / 'a.sqlite') as database:
      database.execute(change)
    _raises(f'metadata says, found {problem}, of', name, clients='c_ann')


def _raises(problem, name, **options):
  with pytest.raises((ValueError, OSError), match=problem):
    _load(name, **options)


def test_what_is_wrong_with_a_folder_is_named(tmp_path, monkeypatch):
  _raises('Expected a folder, found none at .*/none', f'folder:{tmp_path}/none')
  place = f'folder:{tmp_path}'
  _raises('class/image or at client/class/image, found no image', place)
  _folder(tmp_path, client=False)
  extra = tmp_path / 'dog/notes.txt'
  extra.touch()
  _raises('images alone in .*, found .*notes.txt. Tip: move it', place)
  extra.rename(tmp_path / 'dog/broken.png')
  _raises('broken.png to be an image, found: cannot', place)
  (tmp_path / 'dog/broken.png').unlink()
  (tmp_path / 'eels').mkdir()
  _raises('images in every folder of .*, found none in eels', place)
  (tmp_path / 'eels').rename(tmp_path / 'caf\udce9')  # Of Latin-1.
  (tmp_path / 'caf\udce9/0.png').touch()
  _raises(r"named in UTF-8, found 'caf\\udce9'", place)
  shutil.rmtree(tmp_path / 'caf\udce9')
  _folder(tmp_path / 'dog', [0], size=(5, 7), client=False)
  _raises('class/image, found .*png and .*png', place)
  (tmp_path / 'dog/cat/00.png').rename(tmp_path / 'dog/00.png')
  (tmp_path / 'dog/cat').rmdir()
  _raises('one size.*6 x 4 and .*dog/00.png of 7 x 5. Tip: .*=32', place)
  _raises('to be a height and a width', place, image_size=(1, 2, 3))
  monkeypatch.setattr(machine, 'total_bytes', lambda: 1000)
  _raises('half of the memory.*, found 25 images', place, image_size=(9,))


@pytest.mark.parametrize('parts', [('Train', 'val'), ('test', 'train', 'val')])
def test_parts_of_images_are_no_clients(tmp_path, parts):
  for part in parts:
    _folder(tmp_path / part, client=False)
  _raises(f'or train and test, found {", ".join(parts)}', f'folder:{tmp_path}')


@pytest.mark.parametrize(
    'columns, options, problem',
    [
        ({}, dict(label='lable'), "column 'lable' in .*mean 'label'?"),
        ({}, dict(client='who'), "the column 'who' in .*a.csv, found a, b, l"),
        ({}, dict(features=('c',)), "the column 'c' in"),
        ({}, dict(lable='a'), "one of label, client, .*mean 'label'?"),
        (
            dict(c=['0.5', '', '-1', 'high'] * 6),
            {},
            "numbers in the column 'c' of .*, found 'high' in row 4",
        ),
        (
            dict(b=[1.0] * 3 + [np.nan] + [1.0] * 20),
            {},
            "found nan in column 'b' of row 4. Tip: leave out",
        ),
        (dict(b=np.inf), {}, "found inf in column 'b' of row 1"),
        (dict(b=1e300), {}, 'numbers of float32 .* in 24 examples'),
        (
            dict(label=['x', ''] * 12),
            {},
            "none in column 'label' of row 2",
        ),
        (
            dict(who=['x', ''] * 12),
            dict(client='who'),
            "none in column 'who' of row 2",
        ),
        (dict(label='x'), {}, "at least two classes .* found only 'x'"),
        (
            dict(label=np.arange(24) / 7),
            {},
            'labels that name classes .*, found 24 different ones of 24',
        ),
        ({}, dict(separator='tab'), 'a single column.*separator=comma'),
        ({}, dict(image='label'), 'an image at .*/cat, as row 1 of'),
        ({}, dict(image='label', features=('a',)), 'found both'),
        ({}, dict(image_shape=(3, 1, 1)), r'image of shape \(3, 1, 1\)'),
        ({}, dict(features=(), scaling='raw', test_file='no.csv'), 'no.csv'),
    ],
)
def test_what_is_wrong_with_a_table_is_named(
    tmp_path, columns, options, problem
):
  _csv(tmp_path / 'a.csv', **columns)
  _raises(problem, f'csv:{tmp_path}/a.csv', **options)


@pytest.mark.parametrize(
    'text, problem',
    [
        ('', 'line of names.*, found: No columns'),
        ('a,label\n', 'Expected examples in .*, found none'),
        ('a,a,label\n1,2,x\n', "two columns are called 'a'"),
        ('a,label\n1,x\n2,y,3\n', 'found: '),
        ('a,label,\n1,x,\n', 'found: no name of column 3'),
        ('a,label\n1,x\n2\n', "none in column 'label' of row 2"),
        ('label\nx\ny\n', 'columns of numbers in .*, found none beside'),
        ('a,label\n\xff,x\n', 'found: .*utf-8'),
    ],
)
def test_what_is_no_table_is_named(tmp_path, text, problem):
  (tmp_path / 'a.csv').write_text(text, encoding='latin-1')
  _raises(problem, f'csv:{tmp_path}/a.csv')


def test_what_is_wrong_with_arrays_is_named(tmp_path):
  path = tmp_path / 'a.npz'
  name = f'npz:{path}'

  def raises(problem, options=None, **arrays):
    np.savez(path, **arrays)
    _raises(problem, name, **(options or {}))

  _raises('a file, found none at .*a.npz', name)
  _raises('a file, found the folder .*Tip: join its files', f'npz:{tmp_path}')
  path.write_text('?')
  _raises('a.npz to be a file of np.savez.*found', name)
  np.save(tmp_path / 'b.npy', _PIXELS)
  (tmp_path / 'b.npy').rename(path)
  _raises('a.npz to be a file of np.savez.*not a zip', name)
  raises("the array 'y' in .*a.npz, found x, z", x=_PIXELS, z=_LABELS)
  raises("array 'y_test' in", x=_PIXELS, y=_LABELS, x_test=_PIXELS[:2])
  raises('one label for each of the 24 .* shape', x=_PIXELS, y=_LABELS[:3])
  halves = {'x': _PIXELS, 'y': np.arange(24) % 3 + 0.5, 'who': _OWNERS}
  raises("names, found 0.5 of client 'ann'. Tip", {'client': 'who'}, **halves)
  raises(
      'names, found 0.5 of example 1. Tip: --dataset_options=label', **halves
  )
  raises(
      'one client for each of the 24',
      dict(client='c'),
      x=_PIXELS,
      y=_LABELS,
      c=_OWNERS[:2],
  )
  objects = np.array([None] * 24, object)
  raises('strings, found: Object arrays', x=_PIXELS, y=objects)
  raises('numbers in the examples of .*, found <U3', x=_LABELS, y=_LABELS)
  raises('none above 16. Tip: .*=standard', x=_PIXELS // 16 + 1, y=_LABELS)
  raises(
      'whole numbers or names, found complex', x=_PIXELS, y=_NUMBERS[:, 0] * 1j
  )
  wild = _NUMBERS.copy()
  wild[5, 1] = np.nan
  raises('in 1 examples, first in example 6', x=wild, y=_LABELS)


def test_a_client_without_examples_is_named(tmp_path):
  with h5py.File(tmp_path / 'a.h5', 'w') as file:
    file['examples/ann/pixels'] = _NUMBERS
    file['examples/ann/label'] = _LABELS.tolist()
    file['examples/bob/pixels'] = _NUMBERS[:0]
    file['examples/bob/label'] = np.zeros(0, np.int64)
  _raises(
      "client of .*a.h5 to have examples, found none of 'bob'",
      f'hdf5:{tmp_path}/a.h5',
  )
  _raises("array 'x' in client 'ann' of", f'hdf5:{tmp_path}/a.h5', features='x')


@pytest.mark.parametrize(
    'name, problem',
    [
        ('cvs:a', "one of folder:PATH, .*, found 'cvs:a'. Tip: .*'csv'"),
        ('csv:', "found 'csv:'"),
        (
            'x/y.csv',
            'digits, .*Tip: data of your own are --dataset=csv:x/y.csv',
        ),
        ('x/y', 'Tip: data of your own are --dataset=KIND:x/y'),
        (os.path.dirname(__file__), 'Tip: .* --dataset=folder:/'),
    ],
)
def test_the_kind_of_data_is_asked_for(name, problem):
  with pytest.raises(ValueError, match=problem):
    datasets.get(name)


def test_what_suits_the_data_is_looked_up(tmp_path):
  """And what was looked at is not read again, unless it changes."""
  path = tmp_path / 'a.npz'
  y = np.arange(480) % 10
  x = np.random.default_rng(0).integers(0, 256, (480, 8, 8), np.uint8)
  np.savez(path, x=x, y=y, c=y % 7)
  spec = datasets.get(f'npz:{path}')
  options = dict(features='x', label='y', client='', scaling='auto')
  found = spec.look(None, options)
  assert (found.default_model, found.partition) == ('conv4', None)
  assert (found.clients.num_clients, found.test_fraction) == (8, 0.2)
  assert (found.few_round.way, found.few_round.num_clients) == (2, 5)
  looked_at = own_data._found.copy()
  assert spec.load(None, **options) in looked_at.values()
  assert spec.load(None, **options) not in looked_at.values()  # Read again.
  by_client = spec.look(None, options | dict(client='c'))
  assert (by_client.partition, by_client.clients.num_clients) == (
      'by_writer',
      7,
  )
  spec.look(None, options)
  np.savez(path, x=x[:-1], y=y[:-1])
  assert len(spec.load(None, **options).train.y) == 479


def test_what_was_looked_at_is_every_file_that_is_read(tmp_path):
  _csv(tmp_path / 'a.csv', file=[f'{row:02}.png' for row in _ROWS])
  _csv(tmp_path / 'test.csv', a=3)
  for row in _ROWS:
    Image.fromarray(_PIXELS[row]).save(tmp_path / f'{row:02}.png')
  _folder(tmp_path / 'images')
  image = next((tmp_path / 'images/ann').rglob('*.png'))
  for name, options, changed in (
      ('csv:a.csv', dict(image='file'), tmp_path / '00.png'),
      (
          'csv:a.csv',
          dict(features=('a', 'b'), test_file='test.csv'),
          tmp_path / 'test.csv',
      ),
      ('folder:images', {}, image),
  ):
    spec = datasets.get(name)
    spec.look(str(tmp_path), options)
    before = spec.load(str(tmp_path), **options).fingerprint()
    spec.look(str(tmp_path), options)
    if changed.suffix == '.png':
      Image.fromarray(255 - _PIXELS[0]).save(changed)
    else:
      _csv(changed, a=7)
    assert spec.load(str(tmp_path), **options).fingerprint() != before


@pytest.mark.parametrize(
    'name, short',
    [
        ('digits', 'digits'),
        ('csv:/a/b.c.csv', 'b.c'),
        ('folder:/a/b/', 'b'),
        ('folder:.', os.path.basename(os.getcwd())),
        ('folder:/', 'own'),
    ],
)
def test_a_run_is_called_after_its_data(name, short):
  assert datasets.short_name(name) == short
