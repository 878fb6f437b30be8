"""Meta-Dataset, from small records, folders and a prepared CIFAR-100."""

import inspect
import io
import shutil

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from tff_meta.data import class_splits
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.datasets import decoded_cache
from tff_meta.datasets import meta_dataset
from tff_meta.datasets import prepared_tfds
from tff_meta.datasets.locations import DatasetNotFoundError

_NUM_RECORD_CLASSES = 12
# The sources in order; every colour is their number, class and image.
_SOURCES = (*meta_dataset.RECORDS, 'mini_imagenet', 'cifar100')
_OMNIGLOT, _MINI_IMAGENET = 5, 6


def _pixels(source, label, image, size):
  """Returns an image of one colour, grey in Omniglot (in records, inverted)."""
  if source == _OMNIGLOT:
    return np.full((*size, 3), 20 * label + 3 * image, np.uint8)
  # The classes of CIFAR-100 are more than the others'.
  step = 2 if _SOURCES[source] == 'cifar100' else 20
  return np.full(
      (*size, 3), (30 * source, step * label, 60 * image + 20), np.uint8
  )


def _write_records(folder, source, num_images):
  folder.mkdir(parents=True)
  for label in range(_NUM_RECORD_CLASSES):
    path = str(folder / f'{label:02d}.tfrecords')
    with tf.io.TFRecordWriter(path) as writer:
      for i in range(num_images):
        encoded = io.BytesIO()
        pixels = _pixels(source, label, i, (50 + i, 40))
        Image.fromarray(pixels).save(encoded, 'JPEG', quality=100)
        feature = {
            'image': tf.train.Feature(
                bytes_list=tf.train.BytesList(value=[encoded.getvalue()])
            ),
            'label': tf.train.Feature(
                int64_list=tf.train.Int64List(value=[label])
            ),
        }
        example = tf.train.Example(features=tf.train.Features(feature=feature))
        writer.write(example.SerializeToString())


def _write_mini_imagenet(folder):
  """Writes 11 meta-train classes, and one of each other part."""
  (folder / 'images').mkdir(parents=True)
  tables = {'train.csv': range(11), 'val.csv': [11], 'test.csv': [12]}
  for name, labels in tables.items():
    rows = ['filename,label']
    for label in labels:
      for i in range(4):
        rows.append(f'{label:02d}_{i}.png,n{label:02d}')
        image = Image.fromarray(_pixels(_MINI_IMAGENET, label, i, (84, 84)))
        image.save(folder / 'images' / f'{label:02d}_{i}.png')
    (folder / name).write_text('\n'.join(rows) + '\n')


def _write_cifar100(folder):
  """Writes what is left of a prepared CIFAR-100 once it has been read."""
  folder.mkdir(parents=True)
  (folder / 'dataset_info.json').write_text('{}')
  labels = np.repeat(np.arange(100, dtype=np.int32), 2)
  parts = {}
  for i, part in enumerate(('train', 'test')):
    parts[f'{part}_y'] = labels
    parts[f'{part}_x'] = np.stack(
        [_pixels(7, c, 2 * i + k % 2, (32, 32)) for k, c in enumerate(labels)]
    )
  decoded_cache.load_or_decode(
      str(folder / 'tff_meta_decoded_v2.npz'),
      prepared_tfds.source(str(folder)),
      list(parts),
      lambda: parts,
  )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The folder of all sources: four images a class, three of them in DTD."""
  data_dir = tmp_path_factory.mktemp('data')
  for source, name in enumerate(meta_dataset.RECORDS):
    num_images = 3 if name == 'dtd' else 4
    _write_records(data_dir / 'meta_dataset' / name, source, num_images)
  _write_mini_imagenet(data_dir / 'mini_imagenet')
  _write_cifar100(data_dir / 'cifar100' / '3.0.2')
  return data_dir


def _decode(x):
  """Returns (source, class, image) of an image, from its colour."""
  red, green, blue = x.reshape(-1, 3).mean(0)
  if max(abs(red - green), abs(green - blue)) < 3:
    ink = 255 - red
    return _OMNIGLOT, int(ink // 20), round(ink % 20 / 3)
  source = round(red / 30)
  step = 2 if _SOURCES[source] == 'cifar100' else 20
  return source, round(green / step), round((blue - 20) / 60)


def _clients(corpus):
  """Returns for each client (source, class, image, label) of its images."""
  return [
      [
          (*_decode(corpus.train.x[row]), corpus.train.y[row])
          for row in np.flatnonzero(corpus.writers == client)
      ]
      for client in range(max(corpus.writers) + 1)
  ]


def test_a_client_has_ten_classes_of_one_source(whole):
  corpus = meta_dataset.load(str(whole), dealt_clients=40, images_per_client=30)
  assert corpus.train.x.shape == (40 * 30, 32, 32, 3)
  assert not len(corpus.test.y) and corpus.num_classes == 10
  seen = set()
  for images in _clients(corpus):
    sources, classes, numbers, labels = map(list, zip(*images, strict=True))
    (source,) = set(sources)
    seen.add(source)
    assert labels == sorted(labels) and set(labels) == set(range(10))
    # Ten classes in random order, with a label each, and no image twice.
    in_order = list(dict.fromkeys(classes))
    assert len(set(zip(classes, labels, strict=True))) == len(in_order) == 10
    assert in_order != sorted(in_order)
    assert len(set(images)) == 30
    # Omniglot is inverted: else there would be other classes and images.
    assert set(numbers) <= set(range(4))
    if source <= _OMNIGLOT:
      assert set(classes) <= set(range(_NUM_RECORD_CLASSES))
  assert seen == set(range(8))


def test_a_class_has_other_labels_in_other_clients(whole):
  corpus = meta_dataset.load(str(whole), dealt_clients=40, images_per_client=30)
  labels = {}
  for images in _clients(corpus):
    for source, label_of_source, _, label in images:
      labels.setdefault((source, label_of_source), set()).add(label)
  # Of records, each class is in about four clients.
  assert sum(len(own) > 1 for own in labels.values()) > 40


def test_only_meta_train_classes_of_mini_imagenet_and_cifar_fs(whole):
  corpus = meta_dataset.load(str(whole), dealt_clients=40, images_per_client=30)
  classes = {}
  images = {}
  for own in _clients(corpus):
    for source, label, image, _ in own:
      classes.setdefault(source, set()).add(label)
      images.setdefault(source, set()).add(image)
  assert classes[_MINI_IMAGENET] == set(range(11))
  assert classes[7] <= set(class_splits.cifar_fs().train)
  # Of the published test part, too.
  assert images[7] == {0, 1, 2, 3}


def test_a_client_takes_what_a_class_has(whole):
  corpus = meta_dataset.load(str(whole), dealt_clients=40, images_per_client=80)
  sizes = {own[0][0]: len(own) for own in _clients(corpus)}
  dtd = _SOURCES.index('dtd')
  assert sizes == {source: 30 if source == dtd else 40 for source in range(8)}


def test_clients_do_not_depend_on_their_number_but_on_the_seed(whole):
  def load(**options):
    return meta_dataset.load(str(whole), images_per_client=10, **options).train

  five, three = load(dealt_clients=5), load(dealt_clients=3)
  np.testing.assert_array_equal(five.x[:30], three.x)
  np.testing.assert_array_equal(five.y[:30], three.y)
  again = load(dealt_clients=5)  # From the file that the first call left.
  np.testing.assert_array_equal(five.x, again.x)
  other = load(dealt_clients=5, dealing_seed=1)
  assert (five.x != other.x).any()


def test_smaller_clients_have_less_of_the_same(whole):
  def load(size):
    corpus = meta_dataset.load(
        str(whole), dealt_clients=5, images_per_client=size
    )
    return [set(own) for own in _clients(corpus)]

  for small, large in zip(load(20), load(30), strict=True):
    assert small < large


def test_a_new_class_is_noticed(tmp_path, whole):
  shutil.copytree(whole, tmp_path, dirs_exist_ok=True)

  def load():
    corpus = meta_dataset.load(
        str(tmp_path), dealt_clients=20, images_per_client=10
    )
    return corpus.train.x

  before = load()
  for name in meta_dataset.RECORDS:
    folder = tmp_path / 'meta_dataset' / name
    shutil.copy(folder / '00.tfrecords', folder / '12.tfrecords')
  assert not np.array_equal(load(), before)


def test_a_replaced_image_of_another_source_is_noticed(tmp_path, whole):
  shutil.copytree(whole, tmp_path, dirs_exist_ok=True)

  def load():
    corpus = meta_dataset.load(
        str(tmp_path), dealt_clients=20, images_per_client=40
    )
    return corpus.train.x

  before = load()
  for path in (tmp_path / 'mini_imagenet' / 'images').iterdir():
    Image.new('RGB', (84, 84), (180, 7, 7)).save(path, 'BMP')
  assert not np.array_equal(load(), before)


def test_sizes_are_the_published_ones():
  parameters = inspect.signature(meta_dataset.load).parameters
  assert parameters['dealt_clients'].default == 100
  assert parameters['images_per_client'].default == 600


def test_an_image_of_16_bits_is_refused():
  encoded = io.BytesIO()
  Image.new('I;16', (50, 40), 4500).save(encoded, 'PNG')
  with pytest.raises(ValueError, match='8 bits a channel, found mode I'):
    meta_dataset._small(encoded)


def test_images_are_resized_whole_and_smoothly():
  image = np.zeros((20, 64, 3), np.uint8)
  image[:, 32:] = 255
  small = meta_dataset._small(image)
  assert small.shape == (32, 32, 3)
  assert (small[:, :15] == 0).all() and (small[:, 17:] == 255).all()
  assert (0 < small[:, 15]).all() and (small[:, 15] < 255).all()


def test_pixels_are_scaled_as_asked(whole):
  for scaling, top in (('unit', 1), ('raw', 255)):
    corpus = meta_dataset.load(
        str(whole), scaling=scaling, dealt_clients=5, images_per_client=10
    )
    x = corpus.preprocess(corpus.train.x)
    assert x.max() == pytest.approx(corpus.train.x.max() * top / 255)


def test_clients_are_dealt_as_they_are(whole):
  corpus = meta_dataset.load(str(whole), dealt_clients=5, images_per_client=40)
  dataset = federated_dataset.FederatedDataset.from_corpus(
      corpus,
      partitioners.by_writer,
      5,
      seed=0,
      partition_by='writer',
      test_fraction=0.25,
      num_test_clients=1,
  )
  assert len(dataset.client_ids('meta_test')) == 1
  found = set()
  for client_id in (*dataset.client_ids(), *dataset.client_ids('meta_test')):
    client = dataset.client(client_id)
    x = np.concatenate([client.train.x, client.test.x]) * 255
    sources = {_decode(image)[0] for image in x}
    assert len(sources) == 1
    assert len(client.test.y) == len(x) // 4
    found.add(x.round().tobytes())
  assert len(found) == 5


@pytest.mark.parametrize('missing', ['dtd', 'mini_imagenet', 'cifar100'])
def test_a_source_that_is_not_there(tmp_path, whole, missing):
  folders = [whole / 'meta_dataset' / name for name in meta_dataset.RECORDS]
  (tmp_path / 'meta_dataset').mkdir()
  for folder in folders + [whole / 'mini_imagenet', whole / 'cifar100']:
    if folder.name != missing:
      (tmp_path / folder.relative_to(whole)).symlink_to(folder)
  with pytest.raises(DatasetNotFoundError, match=missing):
    meta_dataset.load(str(tmp_path), dealt_clients=1)


def test_too_few_classes(tmp_path):
  for name in meta_dataset.RECORDS:
    (tmp_path / name).mkdir()
  with pytest.raises(
      ValueError, match='at least 10 files .*aircraft.* found 0'
  ):
    meta_dataset.load(str(tmp_path))


def test_a_damaged_record_is_named(tmp_path):
  for name in meta_dataset.RECORDS:
    (tmp_path / name).mkdir()
    for label in range(10):
      (tmp_path / name / f'{label}.tfrecords').write_bytes(b'not a record')
  records = meta_dataset._Records(
      [str(tmp_path / 'dtd' / '3.tfrecords')], False
  )
  with pytest.raises(ValueError, match='3.tfrecords to hold records'):
    records.draw(0, 5, np.random.default_rng(0))


@pytest.mark.parametrize(
    'options, message',
    [
        ({'dealt_clients': 0}, '`dealt_clients` >= 1, found 0'),
        ({'dealing_seed': -1}, '`dealing_seed` >= 0, found -1'),
        ({'images_per_client': 25}, 'multiple of 10, found 25'),
        ({'images_per_client': 0}, 'multiple of 10, found 0'),
        ({'scaling': 'ink'}, "unit, raw, found 'ink'"),
    ],
)
def test_impossible_options(options, message):
  with pytest.raises(ValueError, match=message):
    meta_dataset.load('nowhere', **options)
