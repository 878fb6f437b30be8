"""Clients made of corpora and of ClientData: contents, salts, cache, TFF."""

import collections
import functools
import itertools
import os
import sqlite3

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta.data import client_sources
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners

FederatedDataset = federated_dataset.FederatedDataset


def make_corpus(num_train=90, num_test=45, num_classes=3, **fields):
  """Every class has 30 train and 15 test images; pixel 0, 0 is the row."""
  y = np.tile(np.arange(num_classes), num_train + num_test)
  y = y[: num_train + num_test].astype(np.int32)
  x = np.random.RandomState(1).randint(0, 256, (len(y), 2, 3, 1))
  x[:, 0, 0, 0] = np.arange(len(y))
  x = x.astype(np.uint8)
  return corpus_lib.Corpus(
      name='toy',
      train=corpus_lib.LabelledExamples(x[:num_train], y[:num_train]),
      test=corpus_lib.LabelledExamples(x[num_train:], y[num_train:]),
      num_classes=num_classes,
      **fields,
  )


def rows_of(examples):
  """The corpus rows of examples, read from their first pixel."""
  rows = np.rint(examples.x[:, 0, 0, 0] * 255).astype(int)
  return rows.tolist()


def all_rows(dataset, role='meta_train', parts=federated_dataset.PARTS):
  return [
      row
      for client_id in dataset.client_ids(role)
      for part in parts
      for row in rows_of(getattr(dataset.client(client_id), part))
  ]


def test_own_split_of_pooled_examples():
  corpus = make_corpus()
  dataset = FederatedDataset.from_corpus(
      corpus,
      partitioners.iid,
      4,
      seed=2,
      validation_fraction=0.1,
      test_fraction=0.25,
  )
  assert sorted(all_rows(dataset)) == list(range(135))
  pool = corpus.pooled()
  for client_id in dataset.client_ids():
    client = dataset.client(client_id)
    n = sum(len(part.y) for part in client)
    assert [len(part.y) for part in client] == [
        n - n // 10 - n // 4,
        n // 10,
        n // 4,
    ]
    for part_name, part in zip(federated_dataset.PARTS, client, strict=True):
      rows = rows_of(part)
      np.testing.assert_array_equal(part.y, pool.y[rows])
      np.testing.assert_allclose(part.x, pool.x[rows] / 255, rtol=1e-6)
      assert part.x.dtype == np.float32 and part.y.dtype == np.int32
      assert dataset.num_examples(client_id, part_name) == len(part.y)


def test_published_parts_are_dealt_with_matching_classes():
  dataset = FederatedDataset.from_corpus(
      make_corpus(),
      functools.partial(partitioners.pieces_per_class, classes_per_client=1),
      6,
      seed=4,
      validation_fraction=0.2,
  )
  train = all_rows(dataset, parts=('train',))
  validation = all_rows(dataset, parts=('validation',))
  test = all_rows(dataset, parts=('test',))
  assert sorted(train + validation) == list(range(90))
  assert len(validation) == 18
  assert sorted(test) == list(range(90, 135))
  for client_id in dataset.client_ids():
    labels = [set(part.y.tolist()) for part in dataset.client(client_id)]
    assert labels[0] == labels[1] == labels[2] and len(labels[0]) == 1


@pytest.mark.parametrize(
    'partition, options',
    [
        ('iid', {}),
        ('iid_per_class', {}),
        ('shards', {}),
        ('class_shards', {}),
        ('pieces_per_class', {'classes_per_client': 2}),
        ('proportions_per_class', {'classes_per_client': 2}),
        ('dirichlet', {'min_examples': 1}),
        ('fedmeta_per_mnist', {}),
        ('fedmeta_per_cifar10', {}),
    ],
)
def test_published_test_examples_follow_the_training_examples(
    partition, options
):
  """Every client, every class: the share of the one is that of the other."""
  rng = np.random.default_rng(3)
  y = [
      np.repeat(np.arange(4), sizes)
      for sizes in ((90, 70, 80, 60), (8, 21, 16, 13))
  ]
  y = [rng.permutation(part).astype(np.int32) for part in y]
  corpus = corpus_lib.Corpus(
      'toy',
      *(
          corpus_lib.LabelledExamples(np.zeros((len(p), 2, 2), np.uint8), p)
          for p in y
      ),
      num_classes=4,
  )
  deal = functools.partial(partitioners.PARTITIONERS[partition], **options)
  dataset = FederatedDataset.from_corpus(corpus, deal, 8, seed=1)
  clients = [dataset.client(c) for c in dataset.client_ids()]
  expected = [sorted(y[0][rows]) for rows in deal(y[0], 8, 1)]
  assert [sorted(c.train.y) for c in clients] == expected
  held, tested = (
      np.array([np.bincount(c[part].y, minlength=4) for c in clients])
      for part in (0, 2)
  )
  assert tested.sum(axis=0).tolist() == [8, 21, 16, 13]
  share = held / held.sum(axis=0) * tested.sum(axis=0)
  assert np.abs(tested - share).max() <= 1
  assert not tested[held == 0].any()
  assert np.abs(tested - share).max() > 0


def test_a_test_class_without_training_examples_is_refused():
  corpus = make_corpus(num_train=2, num_test=4)  # Of classes 0, 1; 2, 0, 1, 2.
  with pytest.raises(
      ValueError, match="'toy' to train on class 2, .* a `test_fraction`"
  ):
    FederatedDataset.from_corpus(corpus, partitioners.iid, 2, seed=0)


def test_held_out_clients_are_seeded_and_disjoint():
  def make(seed):
    return FederatedDataset.from_corpus(
        make_corpus(),
        partitioners.iid,
        10,
        seed=seed,
        test_fraction=0.5,
        num_validation_clients=2,
        num_test_clients=3,
    )

  dataset = make(0)
  ids = [dataset.client_ids(role) for role in corpus_lib.ROLES]
  assert [len(i) for i in ids] == [5, 2, 3]
  assert len(set().union(*ids)) == 10
  assert make(0).client_ids('meta_test') == ids[2]
  assert any(make(s).client_ids('meta_test') != ids[2] for s in range(1, 4))


def test_few_round_preparation_relabels_and_deals_single_class_shards():
  split = corpus_lib.ClassSplit(train=(2, 0), validation=(), test=(1,))
  corpus = make_corpus(class_split=split)
  dataset = FederatedDataset.few_round(corpus, 5, seed=3)
  assert dataset.num_classes == 2
  pool = corpus.pooled()
  seen = all_rows(dataset)
  expected = [row for row in range(135) if pool.y[row] in (0, 2)]
  assert sorted(seen) == expected
  for client_id in dataset.client_ids():
    client = dataset.client(client_id)
    # 45 images a class in 2 * 5 / 2 shards of 9, two a client.
    assert len(client.train.y) == 18
    assert not len(client.validation.y) and not len(client.test.y)
    assert set(np.bincount(client.train.y, minlength=2)) in ({9}, {0, 18})
    for row, y in zip(rows_of(client.train), client.train.y, strict=True):
      assert pool.y[row] == (2, 0)[y]
  assert dataset.client_ids('meta_test') == ()
  assert dataset.class_pools.classes('meta_test') == (1,)


def test_few_round_keeps_the_first_images_of_a_class():
  split = corpus_lib.ClassSplit(train=(0, 1), validation=(), test=(2,))
  corpus = make_corpus(class_split=split)
  dataset = FederatedDataset.few_round(corpus, 2, 3, examples_per_class=8)
  assert sorted(all_rows(dataset)) == [
      row for row in range(24) if row % 3 in (0, 1)
  ]
  whole = FederatedDataset.few_round(corpus, 2, 3)
  assert whole.fingerprint() != dataset.fingerprint()


def test_few_round_refuses_a_wrong_number_of_clients():
  split = corpus_lib.ClassSplit(train=(0, 1), validation=(), test=(2,))
  corpus = make_corpus(class_split=split)
  with pytest.raises(
      ValueError, match='46 examples of class 0 for 46 clients.* found 45'
  ):
    FederatedDataset.few_round(corpus, 46, 0)
  corpus = make_corpus(
      num_classes=5, class_split=corpus_lib.ClassSplit((0, 1, 2), (), (3, 4))
  )
  with pytest.raises(ValueError, match='10 clients and 3 cl.* 9 or 12 clients'):
    FederatedDataset.few_round(corpus, 10, 0)
  with pytest.raises(ValueError, match='`class_split`'):
    FederatedDataset.few_round(make_corpus(), 3, 0)


def make_toy(**options):
  arguments = {'seed': 7, 'test_fraction': 0.2, 'num_test_clients': 2}
  return FederatedDataset.from_corpus(
      make_corpus(), partitioners.iid, 10, **(arguments | options)
  )


def test_salts_are_stable_and_distinct():
  dataset = make_toy()
  salts = [dataset.salt(f'client_{k}') for k in range(10)]
  assert len(set(salts)) == 10
  assert all(0 <= salt < 2**31 for salt in salts)
  # Written down once: a change would break the continuation of old runs.
  assert dataset.salt('client_3') == 1036007257
  assert make_toy(seed=8).salt('client_3') != dataset.salt('client_3')


def test_fingerprint_tells_data_sets_apart():
  prints = {
      make_toy().fingerprint(),
      make_toy(seed=8).fingerprint(),
      make_toy(test_fraction=0.3).fingerprint(),
      make_toy(num_test_clients=3).fingerprint(),
  }
  assert len(prints) == 4
  assert make_toy().fingerprint() in prints


def test_clients_are_cached_within_the_budget():
  reads = collections.Counter()

  def preprocess(x):
    reads[len(x)] += 1
    return corpus_lib.scale_to_unit(x)

  corpus = make_corpus(num_test=0, preprocess=preprocess)
  # Clients of 45, 30 and 15 examples of 6 float32 pixels and a label: 28 bytes.
  bounds = ((0, 45), (45, 75), (75, 90))

  def partition(labels, num_clients, seed):
    del labels, num_clients, seed
    return [np.arange(*bound) for bound in bounds]

  dataset = FederatedDataset.from_corpus(
      corpus,
      partition,
      3,
      seed=0,
      test_fraction=0.0,
      cache_bytes=28 * 80,
  )
  reads.clear()
  for client in (1, 0, 0, 1):
    dataset.client(f'client_{client}')
  assert (reads[45], reads[30]) == (1, 1)
  dataset.client('client_2')  # 90 examples: client 0 was used longest ago.
  dataset.client('client_1')
  assert (reads[45], reads[30], reads[15]) == (1, 1, 1)
  assert [dataset.is_cached(f'client_{i}') for i in range(3)] == [False, 1, 1]
  dataset.client('client_0')
  assert reads[45] == 2


def test_a_client_is_in_memory_once_and_cannot_be_written_to():
  dataset = make_toy(test_fraction=0.2)
  train = dataset.client('client_0').train
  (batch,) = dataset.tff_client_data('client_0')['examples']
  for array, tensor in zip(train, (batch['x'], batch['y']), strict=True):
    assert len(array) and np.shares_memory(array, np.asarray(tensor))
    with pytest.raises(ValueError, match='read-only'):
      array[:] = 0


def test_tff_client_data_is_one_batch_of_open_size():
  dataset = make_toy()
  for part in ('train', 'test'):
    data = dataset.tff_client_data('client_4', part)
    assert data['examples'].element_spec == collections.OrderedDict(
        x=tf.TensorSpec((None, 2, 3, 1), tf.float32),
        y=tf.TensorSpec((None,), tf.int32),
    )
    (batch,) = data['examples'].as_numpy_iterator()
    expected = getattr(dataset.client('client_4'), part)
    np.testing.assert_array_equal(batch['x'], expected.x)
    np.testing.assert_array_equal(batch['y'], expected.y)
    assert list(data['salt'].as_numpy_iterator()) == [dataset.salt('client_4')]
    assert data['salt'].element_spec == tf.TensorSpec((), tf.int32)
    assert dataset.tff_client_data('client_4', part) is data


def test_a_tff_computation_takes_clients_of_different_size():
  dataset = make_toy(validation_fraction=0.0)
  cohort = [
      dataset.tff_client_data('client_0'),
      dataset.tff_client_data('client_5'),
      dataset.tff_client_data('client_1', 'validation'),  # Empty.
  ]
  batch_type = tff.types.tensorflow_to_type(
      collections.OrderedDict(
          x=(tf.float32, (None, 2, 3, 1)), y=(tf.int32, [None])
      )
  )
  data_type = tff.types.StructWithPythonType(
      [
          ('examples', tff.types.SequenceType(batch_type)),
          ('salt', tff.types.SequenceType(np.int32)),
      ],
      collections.OrderedDict,
  )

  @tff.tensorflow.computation(data_type)
  def total(data):
    pixels = data['examples'].reduce(
        0.0, lambda s, batch: s + tf.reduce_sum(batch['x'])
    )
    salt = data['salt'].reduce(0, lambda s, element: s + element)
    return pixels, salt % 1000

  @tff.federated_computation(tff.types.FederatedType(data_type, tff.CLIENTS))
  def total_of_cohort(clients):
    return tff.federated_sum(tff.federated_map(total, clients))

  pixels, salts = total_of_cohort(cohort)
  expected = sum(
      dataset.client(c).train.x.sum() for c in ('client_0', 'client_5')
  )
  np.testing.assert_allclose(pixels, expected, rtol=1e-5)
  assert salts == sum(dataset.salt(f'client_{k}') % 1000 for k in (0, 5, 1))


def test_half_of_a_client_is_every_other_example():
  dataset = make_toy()
  found, salt = dataset.tff_client_data('client_1', 'half_train').values()
  (whole,) = dataset.tff_client_data('client_1')['examples']
  for half in (found, dataset.named_client_data('client_1', 'half_train')):
    half = half if half is found else half['examples'].open()
    (batch,) = half
    np.testing.assert_array_equal(batch['x'], whole['x'][::2])
    np.testing.assert_array_equal(batch['y'], whole['y'][::2])
  assert [int(s) for s in salt] == [dataset.salt('client_1')]


def test_unknown_clients_roles_and_parts_are_refused():
  dataset = make_toy()
  with pytest.raises(ValueError, match="'toy', found 'client_10'"):
    dataset.client('client_10')
  with pytest.raises(ValueError, match="found 'train'"):
    dataset.client_ids('train')
  with pytest.raises(ValueError, match="found 'dev'"):
    dataset.num_examples('client_1', 'dev')


@pytest.mark.parametrize(
    'options, message',
    [
        ({'test_fraction': 1.0}, 'less than 1 together, found 0.0 and 1.0'),
        ({'validation_fraction': -0.1}, 'at least 0'),
        ({'num_test_clients': 10}, 'some of the 10 clients for meta-train'),
        ({'partition_by': 'writer'}, 'the writer of every example'),
        ({'partition_by': 'label_'}, "found 'label_'"),
    ],
)
def test_impossible_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make_toy(**options)


def test_corpora_without_test_part_need_a_test_fraction():
  with pytest.raises(ValueError, match="'toy' .* Give a `test_fraction`"):
    FederatedDataset.from_corpus(
        make_corpus(num_test=0), partitioners.iid, 3, seed=0
    )


def test_a_client_without_training_examples_is_named():
  def partition(labels, num_clients, seed):
    del num_clients, seed
    return [np.arange(len(labels)), np.arange(0)]

  with pytest.raises(ValueError, match="none for 'client_1' of 2"):
    FederatedDataset.from_corpus(
        make_corpus(), partition, 2, seed=0, test_fraction=0.0
    )


def two_class_corpus():
  """6 classes of 400 images, of unequal size after the test part is split."""
  return make_corpus(num_train=2400, num_test=0, num_classes=6)


def redealt(seed, **options):
  return FederatedDataset.from_corpus(
      two_class_corpus(),
      functools.partial(partitioners.pieces_per_class, classes_per_client=2),
      6,
      seed,
      test_fraction=0.5,
      new_clients='redealt',
      **options,
  )


def pixel_rows(examples):
  """The rows again, of a corpus with more than 256: by all pixels."""
  return [x.tobytes() for x in examples.x]


@pytest.mark.parametrize('seed', range(5))
def test_redealt_clients_hold_all_tests_and_no_old_pair(seed):
  dataset = redealt(seed, num_test_clients=12)
  old, new = dataset.client_ids(), dataset.client_ids('meta_test')
  assert len(old) == 6
  assert new == tuple(f'new_client_{k:02d}' for k in range(12))
  tests = [r for c in old for r in pixel_rows(dataset.client(c).test)]
  again = [r for c in new for r in pixel_rows(dataset.client(c).test)]
  assert sorted(again) == sorted(tests) and len(tests) == 1200
  old_classes = {frozenset(dataset.client(c).train.y.tolist()) for c in old}
  new_classes = [frozenset(dataset.client(c).test.y.tolist()) for c in new]
  assert not old_classes & set(new_classes)
  # A ring of all classes, gone round twice.
  assert all(len(pair) == 2 for pair in new_classes)
  assert new_classes[:6] == new_classes[6:] and len(set(new_classes)) == 6
  for client_id in new:
    assert dataset.num_examples(client_id, 'train') == 0
    assert dataset.num_examples(client_id, 'validation') == 0
  assert len({len(dataset.client(c).test.y) for c in new}) > 6


def test_redealt_clients_follow_the_seed():
  assert redealt(3, num_test_clients=6).fingerprint() == (
      redealt(3, num_test_clients=6).fingerprint()
  )
  assert redealt(3, num_test_clients=6).fingerprint() != (
      redealt(3, num_test_clients=12).fingerprint()
  )


def test_validation_clients_beside_redealt_ones():
  dataset = redealt(1, num_test_clients=6, num_validation_clients=2)
  counts = [len(dataset.client_ids(role)) for role in corpus_lib.ROLES]
  assert counts == [4, 2, 6]


def test_impossible_new_clients_are_refused():
  def from_corpus(partition, num_clients, **options):
    options = {'new_clients': 'redealt', 'num_test_clients': 6} | options
    FederatedDataset.from_corpus(
        two_class_corpus(), partition, num_clients, 0, **options
    )

  # All 15 pairs of 6 classes are taken.
  def all_pairs(labels, num_clients, seed):
    del num_clients, seed
    pairs = itertools.combinations(range(6), 2)
    rows = [np.flatnonzero(labels == label) for label in range(6)]
    return [
        np.concatenate([rows[i][20 * k :][:20], rows[j][20 * k :][:20]])
        for k, (i, j) in enumerate(pairs)
    ]

  with pytest.raises(ValueError, match='leave pairs of classes for new'):
    from_corpus(all_pairs, 15, test_fraction=0.5)
  with pytest.raises(ValueError, match='test examples that can be dealt'):
    from_corpus(partitioners.iid, 3, test_fraction=0.0)
  with pytest.raises(ValueError, match='positive multiple .* found 7 clients'):
    from_corpus(partitioners.iid, 3, test_fraction=0.5, num_test_clients=7)
  with pytest.raises(ValueError, match="found 'new'"):
    from_corpus(partitioners.iid, 3, test_fraction=0.5, new_clients='new')


def test_stratified_tests_take_their_share_of_every_class():
  dataset = FederatedDataset.from_corpus(
      make_corpus(num_train=135, num_test=0),
      partitioners.dirichlet,
      4,
      seed=5,
      test_fraction=0.25,
      validation_fraction=0.1,
      stratify=True,
  )
  assert sorted(all_rows(dataset)) == list(range(135))
  uneven = []
  for client_id in dataset.client_ids():
    client = dataset.client(client_id)
    sizes = [np.bincount(part.y, minlength=3) for part in client]
    total = sum(sizes)
    np.testing.assert_array_equal(sizes[2], total // 4)
    np.testing.assert_array_equal(sizes[1], total // 10)
    uneven.append(sum(total) // 4 - sum(total // 4))
  assert max(uneven) > 0  # Otherwise a plain split might do as much.
  with pytest.raises(ValueError, match='`stratify`'):
    make_toy(test_fraction=None, stratify=True)


def test_pixels_that_preprocessing_spoils_are_refused_with_the_client():
  def preprocess(x):
    x = corpus_lib.scale_to_unit(x)
    x[x[:, 0, 0, 0] > 0.5] = np.nan  # Rows above 127.
    return x

  dataset = FederatedDataset.from_corpus(
      make_corpus(preprocess=preprocess),
      lambda labels, num_clients, seed: np.split(np.arange(135), [100]),
      2,
      seed=0,
      test_fraction=0.0,
  )
  dataset.client('client_0')
  with pytest.raises(ValueError, match="'client_1' of 'toy' to be finite"):
    dataset.client('client_1')


def test_writers_and_rotation_groups_as_clients():
  writers = np.repeat(['ann', 'bob', 'cid'], 30)
  dataset = FederatedDataset.from_corpus(
      make_corpus(writers=writers),
      partitioners.by_writer,
      2,
      seed=0,
      partition_by='writer',
      test_fraction=0.1,
  )
  owners = [
      {row // 30 for part in dataset.client(c) for row in rows_of(part)}
      for c in dataset.client_ids()
  ]
  assert all(len(owner) == 1 for owner in owners)
  assert owners[0] != owners[1]
  rotated = corpus_lib.with_rotation_groups(make_corpus(), 0, num_groups=3)
  dataset = FederatedDataset.from_corpus(
      rotated,
      partitioners.by_group,
      6,
      seed=0,
      partition_by='rotation',
  )
  sizes = [
      [len(part.y) for part in dataset.client(c)] for c in dataset.client_ids()
  ]
  assert [size[0] for size in sizes] == [15] * 6
  tests = [size[2] for size in sizes]
  assert [tests[k] + tests[k + 1] for k in (0, 2, 4)] == [15] * 3
  for client_id in dataset.client_ids():
    client = dataset.client(client_id)
    assert set(client.test.y) <= set(client.train.y)


@pytest.mark.parametrize('test_fraction', [None, 0.2])
@pytest.mark.parametrize('name', ['iid', 'shards'])
def test_rotations_do_not_follow_from_how_examples_are_dealt(
    name, test_fraction
):
  """Both are drawn with seed 0, of as many rows."""
  corpus = corpus_lib.with_rotation_groups(
      make_corpus(num_train=900, num_test=300), 0, num_groups=3
  )
  clients = client_sources.deal_corpus(
      corpus,
      getattr(partitioners, name),
      3,
      seed=0,
      partition_by='label',
      validation_fraction=0.3,
      test_fraction=test_fraction,
  )
  for client in clients.values():
    for rows in client:
      shares = np.unique(corpus.rotations[rows], return_counts=True)[1]
      assert len(shares) == 3 and shares.max() < 0.6 * len(rows)


def make_client_data(sizes, key='pixels', shape=(4, 5)):
  rng = np.random.RandomState(0)
  return tff.simulation.datasets.TestClientData(
      {
          f'writer_{k}': collections.OrderedDict(
              label=rng.randint(0, 4, n).astype(np.int64),
              **{key: rng.rand(n, *shape).astype(np.float32)},
          )
          for k, n in enumerate(sizes)
      }
  )


def elements(client_data, client_id):
  dataset = client_data.create_tf_dataset_for_client(client_id)
  return list(dataset.as_numpy_iterator())


def test_client_data_with_published_test_examples():
  train = make_client_data((5, 12, 9))
  test = make_client_data((2, 3))
  dataset = FederatedDataset.from_client_data(
      train,
      test,
      name='letters',
      num_classes=4,
      seed=0,
      add_channel_axis=True,
      preprocess=lambda x: 1 - x,
      validation_fraction=0.25,
  )
  assert dataset.input_shape == (4, 5, 1)
  expected = {
      'writer_0': (4, 1, 2),
      'writer_1': (9, 3, 3),
      'writer_2': (7, 2, 0),
  }
  for client_id, counts in expected.items():
    client = dataset.client(client_id)
    assert tuple(len(part.y) for part in client) == counts
    parts = federated_dataset.PARTS
    assert (
        tuple(dataset.num_examples(client_id, part) for part in parts) == counts
    )
    own = sorted(
        (int(e['label']), (1 - e['pixels']).tobytes())
        for e in elements(train, client_id)
    )
    split = [
        (int(y), x.tobytes())
        for part in client[:2]
        for x, y in zip(part.x, part.y, strict=True)
    ]
    assert sorted(split) == own
  held = dataset.client('writer_1').test
  for x, y, e in zip(held.x, held.y, elements(test, 'writer_1'), strict=True):
    np.testing.assert_array_equal(x[..., 0], 1 - e['pixels'])
    assert y == e['label']


def test_client_data_choose_clients_keys_and_roles():
  train = make_client_data((6,) * 9, key='image', shape=(2, 2, 3))

  def make(seed):
    return FederatedDataset.from_client_data(
        train,
        name='images',
        num_classes=4,
        seed=seed,
        num_clients=5,
        x_key='image',
        test_fraction=0.5,
        num_test_clients=2,
    )

  dataset = make(1)
  assert len(dataset.client_ids()) == 3
  assert len(dataset.client_ids('meta_test')) == 2
  assert [len(part.y) for part in dataset.client(dataset.client_ids()[0])] == [
      3,
      0,
      3,
  ]
  assert make(1).fingerprint() == dataset.fingerprint()
  assert make(2).fingerprint() != dataset.fingerprint()


@pytest.mark.parametrize('key', ['pixels', 'label'])
@pytest.mark.parametrize('changed', range(5))
def test_fingerprint_depends_on_every_client(key, changed):
  train = make_client_data((6,) * 5)
  client_id = f'writer_{changed}'

  def change(c):
    examples = train.create_tf_dataset_for_client(c)
    if c != client_id:
      return examples
    return examples.map(lambda e: e | {key: (e[key] + 1) % 4})

  data = tff.simulation.datasets.ClientData
  prints = {
      FederatedDataset.from_client_data(
          clients, name='letters', num_classes=4, seed=0
      ).fingerprint()
      for clients in (
          train,
          data.from_clients_and_tf_fn(train.client_ids, change),
      )
  }
  assert len(prints) == 2


def test_client_data_errors():
  arguments = {'name': 'letters', 'num_classes': 4, 'seed': 0}
  train = make_client_data((5, 6))
  make = FederatedDataset.from_client_data
  with pytest.raises(ValueError, match='2, found 3'):
    make(train, num_clients=3, **arguments)
  with pytest.raises(ValueError, match=r"found \['label', 'pixels'\]"):
    make(train, x_key='image', **arguments)
  batched = train.preprocess(lambda ds: ds.batch(2))
  with pytest.raises(
      ValueError, match=r"shape \(None,\) and type .* for client 'writer_0'"
  ):
    make(batched, **arguments)
  halves = train.preprocess(
      lambda ds: ds.map(lambda e: e | {'label': tf.cast(e['label'], 'float32')})
  )
  with pytest.raises(ValueError, match=r'shape \(\) and type .*float32'):
    make(halves, **arguments)
  pairs = train.preprocess(lambda ds: ds.map(lambda e: tuple(e.values())))
  with pytest.raises(ValueError, match="found a tuple for client 'writer_0'"):
    make(pairs, **arguments)
  with pytest.raises(ValueError, match='`test_fraction` to be None'):
    make(train, train, test_fraction=0.1, **arguments)
  with pytest.raises(ValueError, match=r"'writer_0' of 'letters' in 0\.\.0"):
    make(train, name='letters', num_classes=1, seed=0)


def test_sqlite_files_by_path(tmp_path):
  path = str(tmp_path / 'toy.sqlite')
  write_sqlite(path, {'ann': 3, 'bob': 2})
  client_data = federated_dataset.sqlite_client_data(path, 'train', (2, 3))
  dataset = FederatedDataset.from_client_data(
      client_data, name='toy', num_classes=5, seed=0, add_channel_axis=True
  )
  assert dataset.client_ids() == ('ann', 'bob')
  assert dataset.input_shape == (2, 3, 1)
  assert dataset.num_examples('ann') == 3
  client = dataset.client('bob').train
  np.testing.assert_allclose(
      sorted(client.x[:, 1, 2, 0]), [0.5, 1.5], rtol=1e-6
  )
  assert sorted(client.y) == [0, 1]
  with pytest.raises(ValueError, match="split name 'held_out', found none"):
    federated_dataset.sqlite_client_data(path, 'held_out', (2, 3))
  with pytest.raises(FileNotFoundError, match='found none at'):
    federated_dataset.sqlite_client_data(path + '_', 'train', (2, 3))


def write_sqlite(path, sizes):
  """Writes what TFF's loaders read; pixel j of example i is i + j / 10."""
  connection = sqlite3.connect(path)
  connection.execute(
      'CREATE TABLE examples (split_name TEXT, client_id TEXT,'
      ' serialized_example_proto BLOB)'
  )
  connection.execute(
      'CREATE TABLE client_metadata (client_id TEXT, split_name TEXT,'
      ' num_examples INTEGER)'
  )
  for client_id, size in sizes.items():
    connection.execute(
        'INSERT INTO client_metadata VALUES (?, "train", ?)', (client_id, size)
    )
    for i in range(size):
      pixels = tf.train.FloatList(value=[i + j / 10 for j in range(6)])
      example = tf.train.Example(
          features=tf.train.Features(
              feature={
                  'pixels': tf.train.Feature(float_list=pixels),
                  'label': tf.train.Feature(
                      int64_list=tf.train.Int64List(value=[i])
                  ),
              }
          )
      )
      connection.execute(
          'INSERT INTO examples VALUES ("train", ?, ?)',
          (client_id, example.SerializeToString()),
      )
  connection.commit()
  connection.close()


@pytest.mark.skipif(
    'TFF_META_DATA_DIR' not in os.environ,
    reason='needs the restored data: set TFF_META_DATA_DIR',
)
def test_mnist_by_writer():
  directory = os.path.join(os.environ['TFF_META_DATA_DIR'], 'fed')
  path = os.path.join(directory, 'mnist_by_writer.sqlite')
  train, test = (
      federated_dataset.sqlite_client_data(path, split, (28, 28))
      for split in ('train', 'test')
  )
  dataset = FederatedDataset.from_client_data(
      train,
      test,
      name='mnist_by_writer',
      num_classes=10,
      seed=0,
      add_channel_axis=True,
  )
  assert len(dataset.client_ids()) == 836
  ids = dataset.client_ids()[:5]
  for client_id in ids:
    client = dataset.client(client_id)
    assert len(client.train.y) == dataset.num_examples(client_id)
    assert client.train.x.max() <= 1 and len(client.test.y)
