"""Properties of all partitions and splits, on data that hypothesis makes up.

Parts are disjoint, exhaustive where that is promised, of the promised sizes,
and the same when they are made again from the same seed.
"""

import functools
import random

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tff_meta.data import class_splits
from tff_meta.data import client_sampling
from tff_meta.data import client_sources
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.data import groups as groups_lib
from tff_meta.data import partitioners

# Repeatable, and nothing is written.
check = hypothesis.settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
SEEDS = st.integers(0, 2**31 - 1)
FRACTIONS = st.sampled_from([0.0, 0.07, 0.1, 0.25, 0.29, 0.5])


@st.composite
def labels_of(draw, least=8, most=40, max_classes=6):
  """Labels 0..C-1 in random order, every class of its own size."""
  sizes = draw(st.lists(st.integers(least, most), min_size=2,
                        max_size=max_classes))  # fmt: skip
  labels = np.repeat(np.arange(len(sizes)), sizes)
  return np.random.default_rng(draw(SEEDS)).permutation(labels)


def counts(clients, labels):
  """Examples of every class at every client, [clients, classes]."""
  num_classes = labels.max() + 1
  return np.array(
      [np.bincount(labels[k], minlength=num_classes) for k in clients]
  )


def sizes_within(table, axis, width):
  return (np.ptp(table, axis=axis) <= width).all()


def neighbours(table, stride, width):
  """Whether client u holds classes stride * u, ... and no others."""
  num_classes = table.shape[1]
  for u, row in enumerate(table):
    held = {(stride * u + j) % num_classes for j in range(width)}
    if not set(np.flatnonzero(row)) <= held:
      return False
  return True


# Name -> (partitioner, clients a class, least size of a class, exhaustive,
# what is promised of the table of counts).
PARTITIONS = {
    'iid': (
        partitioners.iid,
        2,
        8,
        True,
        lambda t: np.ptp(t.sum(axis=1)) <= 1,
    ),
    'iid_per_class': (
        partitioners.iid_per_class,
        1,
        8,
        True,
        lambda t: sizes_within(t, 0, 1),
    ),
    'shards': (
        partitioners.shards,
        2,
        8,
        True,
        lambda t: np.ptp(t.sum(axis=1)) <= 2,
    ),
    'class_shards': (
        partitioners.class_shards,
        2,
        8,
        True,
        lambda t: ((t > 0).sum(axis=1) <= 2).all(),
    ),
    'pieces_per_class': (
        functools.partial(partitioners.pieces_per_class, classes_per_client=2),
        2,
        8,
        True,
        lambda t: ((t > 0).sum(axis=1) <= 2).all(),
    ),
    'proportions_per_class': (
        functools.partial(
            partitioners.proportions_per_class, classes_per_client=2
        ),
        2,
        8,
        False,
        # Of each of its slots a class loses less than one example.
        lambda t: ((t > 0).sum(axis=1) == 2).all(),
    ),
    'dirichlet': (
        functools.partial(partitioners.dirichlet, alpha=1.0, min_examples=1),
        1,
        8,
        True,
        lambda t: t.sum(axis=1).min() >= 1,
    ),
    'fedmeta_per_cifar10': (
        partitioners.fedmeta_per_cifar10,
        1,
        20,
        False,
        lambda t: neighbours(t, 1, 2) and t.sum(axis=1).min() >= 20,
    ),
    'fedmeta_per_mnist': (
        functools.partial(partitioners.fedmeta_per_mnist, stride=1),
        1,
        11,
        True,
        lambda t: neighbours(t, 1, 2),
    ),
    'fedec_femnist': (
        functools.partial(
            partitioners.fedec_femnist, classes_per_client=2, start_over=False
        ),
        1,
        12_000,
        False,
        lambda t: neighbours(t, 1, 2) and t.sum(axis=1).min() >= 98,
    ),
    'by_group': (
        partitioners.by_group,
        2,
        8,
        True,
        lambda t: ((t > 0).sum(axis=1) == 1).all() and sizes_within_class(t),
    ),
    'by_writer': (
        partitioners.by_writer,
        1,
        8,
        True,
        lambda t: ((t > 0).sum(axis=1) == 1).all(),
    ),
}


def sizes_within_class(table):
  """Whether those who hold a class hold the same of it, to within one."""
  return all(np.ptp(own[own > 0]) <= 1 for own in table.T)


def test_every_partitioner_is_tried():
  assert set(PARTITIONS) == set(partitioners.PARTITIONERS)


@pytest.mark.parametrize('name', PARTITIONS)
@check
@hypothesis.given(data=st.data())
def test_partitions(name, data):
  partition, per_class, least, exhaustive, promised = PARTITIONS[name]
  labels = data.draw(labels_of(least, least + 32, 2 if least > 99 else 6))
  num_clients = per_class * (labels.max() + 1)
  seed = data.draw(SEEDS)
  before = labels.copy(), np.random.get_state()[1].tolist(), random.getstate()
  clients = partition(labels, num_clients, seed)
  assert len(clients) == num_clients
  assert all(own.dtype == np.int64 and own.ndim == 1 for own in clients)
  rows = np.concatenate(clients)
  assert 0 <= rows.min() and rows.max() < len(labels)
  assert len(np.unique(rows)) == len(rows)
  assert not exhaustive or len(rows) == len(labels)
  assert promised(counts(clients, labels))
  again = partition(labels, num_clients, seed)
  # What a label is called makes no difference.
  named = np.array([f'class {label}' for label in labels])
  for other in (again, partition(named, num_clients, seed)):
    for one, two in zip(clients, other, strict=True):
      np.testing.assert_array_equal(one, two)
  # Neither the argument nor any global state has changed.
  np.testing.assert_array_equal(labels, before[0])
  assert np.random.get_state()[1].tolist() == before[1]
  assert random.getstate() == before[2]


BAD_LABELS = {
    'a column': (np.arange(40)[:, np.newaxis] % 4, r'\(40, 1\)'),
    'one-hot': (np.eye(4)[np.arange(40) % 4], r'\(40, 4\)'),
    'a scalar': (np.array(3), r'shape \(\)'),
    'nothing': (np.zeros(0, int), r'shape \(0,\)'),
    'NaN': (np.where(np.arange(40) % 4, 1.0, np.nan), 'nan'),
    'infinity': (np.where(np.arange(40) % 4, 1.0, np.inf), 'inf'),
    'complex': (np.arange(40) % 4 + 0j, 'complex128'),
    'objects': (np.array(['a', None] * 20, object), 'object'),
    'rows of several lengths': ([[1], [2, 3]], 'object'),
    'dates': (np.full(40, np.datetime64('2020-01-01')), 'datetime64'),
}


@pytest.mark.parametrize('bad', BAD_LABELS)
@pytest.mark.parametrize('name', PARTITIONS)
def test_every_partitioner_refuses_the_same_labels(name, bad):
  labels, found = BAD_LABELS[bad]
  with pytest.raises(
      ValueError, match=f'Expected `labels` to be a vector of .*{found}'
  ):
    PARTITIONS[name][0](labels, 4, 0)


@pytest.mark.parametrize('name', PARTITIONS)
def test_every_partitioner_refuses_numbers_that_are_not_whole(name):
  partition, per_class, least, *_ = PARTITIONS[name]
  labels = np.tile(np.arange(2), least)
  with pytest.raises(
      (TypeError, ValueError), match='Expected .*clients.* found [24].0'
  ):
    partition(labels, 2.0 * per_class, 0)
  for seed, error in ((-1, ValueError), (0.5, TypeError), (True, TypeError)):
    with pytest.raises(error, match=f'Expected `seed` .* found {seed}'):
      partition(labels, 2 * per_class, seed)


@check
@hypothesis.given(labels_of(), FRACTIONS, FRACTIONS, st.booleans(), SEEDS)
def test_splits_of_a_client(labels, validation, test, stratify, seed):
  hypothesis.assume(validation + test < 1)
  rows = np.random.default_rng(seed).permutation(1000)[: len(labels)]

  def split():
    rng = np.random.default_rng(seed)
    return client_sources.split_rows(
        rows, rng, validation, test, labels if stratify else None
    )

  parts = split()
  assert sorted(np.concatenate(parts)) == sorted(rows)
  groups = [labels == label for label in np.unique(labels)]
  for group in groups if stratify else [np.ones(len(labels), bool)]:
    n = group.sum()
    found = [np.isin(part, rows[group]).sum() for part in parts]
    num_test, num_validation = (round(1e6 * f) * n // 10**6
                                for f in (test, validation))  # fmt: skip
    expected = [n - num_test - num_validation, num_validation, num_test]
    assert found == expected
  for one, two in zip(parts, split(), strict=True):
    np.testing.assert_array_equal(one, two)


def corpus_of(labels, num_test, **fields):
  """A corpus whose last `num_test` examples are its test part."""
  x = np.zeros((len(labels), 1, 1), np.uint8)
  y = labels.astype(np.int32)
  cut = len(labels) - num_test
  return corpus_lib.Corpus(
      'toy',
      corpus_lib.LabelledExamples(x[:cut], y[:cut]),
      corpus_lib.LabelledExamples(x[cut:], y[cut:]),
      int(labels.max()) + 1,
      **fields,
  )


def rows_by_part(clients):
  return [
      np.concatenate([getattr(own, part) for own in clients.values()])
      for part in client_sources.PARTS
  ]


def assert_same(clients, again):
  assert list(clients) == list(again)
  for client_id, parts in clients.items():
    for one, two in zip(parts, again[client_id], strict=True):
      np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize('name', ['iid', 'shards', 'dirichlet', 'class_shards'])
@check
@hypothesis.given(
    labels_of(20), st.none() | FRACTIONS, FRACTIONS, st.integers(0, 30), SEEDS
)
def test_corpora_are_dealt_without_loss(
    name, labels, test, validation, num_test, seed
):
  hypothesis.assume((test or 0) + validation < 0.6)
  hypothesis.assume(test is not None or num_test)
  corpus = corpus_of(labels, num_test)
  partition, per_class, *_ = PARTITIONS[name]

  def deal():
    return client_sources.deal_corpus(
        corpus,
        partition,
        per_class * corpus.num_classes,
        seed,
        partition_by='label',
        validation_fraction=validation,
        test_fraction=test,
    )

  try:
    clients = deal()
  except ValueError as e:  # A class may be all in the test part.
    assert 'train' in str(e) or 'number of' in str(e) or 'multiple' in str(e)
    hypothesis.reject()
  train, validated, tested = rows_by_part(clients)
  rows = np.concatenate([train, validated, tested])
  assert sorted(rows) == list(range(len(labels)))
  if test is None:
    cut = len(labels) - num_test
    assert sorted(tested) == list(range(cut, len(labels)))
  for own in clients.values():
    assert len(own.train)
    if test is not None:
      n = sum(map(len, own))
      assert len(own.test) == round(1e6 * test) * n // 10**6
  assert_same(clients, deal())


@check
@hypothesis.given(labels_of(max_classes=5), st.data(), FRACTIONS, SEEDS)
def test_writers_take_their_own_test_examples(labels, data, validation, seed):
  """Labels stand for writers; every class has them all."""
  num_test = data.draw(st.integers(1, len(labels) // 2))
  cut = len(labels) - num_test
  writers = np.array([f'writer {label}' for label in labels])
  corpus = corpus_of(
      labels % 2, num_test, writers=writers[:cut], test_writers=writers[cut:]
  )
  known = set(writers[:cut])
  num_clients = data.draw(st.integers(1, len(known)))

  def deal():
    return client_sources.deal_corpus(
        corpus,
        partitioners.by_writer,
        num_clients,
        seed,
        partition_by='writer',
        validation_fraction=validation,
        test_fraction=None,
    )

  if not set(writers[cut:]) <= known:
    with pytest.raises(ValueError, match="such as 'writer [0-9]'"):
      deal()
    return
  clients = deal()
  assert len(clients) == num_clients
  chosen = set()
  for own in clients.values():
    (writer,) = set(writers[np.concatenate(own)])
    assert writer not in chosen
    chosen.add(writer)
    trained = np.concatenate([own.train, own.validation])
    expected = np.flatnonzero(writers == writer)
    assert sorted(trained) == [row for row in expected if row < cut]
    assert sorted(own.test) == [row for row in expected if row >= cut]
  assert_same(clients, deal())


@check
@hypothesis.given(st.integers(3, 6), st.integers(0, 3), SEEDS)
def test_tests_are_dealt_again_once(num_pairs, per_client, seed):
  """Clients hold classes 2u and 2u + 1; new ones never do."""
  num_classes = 2 * num_pairs
  labels = np.tile(np.arange(num_classes), 40 + per_client)
  corpus = corpus_of(labels, 0)
  clients = client_sources.deal_corpus(
      corpus,
      lambda y, n, s: [np.flatnonzero(y // 2 == u) for u in range(n)],
      num_pairs,
      seed,
      partition_by='label',
      validation_fraction=0.0,
      test_fraction=0.5,
  )

  def again():
    return client_sources.deal_tests_again(corpus, clients, num_classes, seed)

  new = again()
  assert sorted(rows_by_part(new)[2]) == sorted(rows_by_part(clients)[2])
  old = {frozenset(labels[own.train]) for own in clients.values()}
  assert not old & {frozenset(labels[own.test]) for own in new.values()}
  assert_same(new, again())


@check
@hypothesis.given(st.integers(1, 30), st.data(), SEEDS)
def test_roles_of_clients(num_clients, data, seed):
  num_test = data.draw(st.integers(0, num_clients))
  num_validation = data.draw(st.integers(0, num_clients))

  def make():
    return federated_dataset.FederatedDataset.from_corpus(
        corpus_of(np.zeros(num_clients, int), 0),
        partitioners.iid,
        num_clients,
        seed,
        test_fraction=0.0,
        num_validation_clients=num_validation,
        num_test_clients=num_test,
    )

  if num_test + num_validation >= num_clients:
    with pytest.raises(ValueError, match='leave some of the'):
      make()
    return
  dataset = make()
  ids = [dataset.client_ids(role) for role in corpus_lib.ROLES]
  assert len(ids[1]) == num_validation and len(ids[2]) == num_test
  assert len(set().union(*ids)) == sum(map(len, ids)) == num_clients
  assert [make().client_ids(role) for role in corpus_lib.ROLES] == ids
  salts = [dataset.salt(client_id) for own in ids for client_id in own]
  assert len(set(salts)) == num_clients


@check
@hypothesis.given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_consecutive_class_splits(num_train, num_validation, num_test):
  split = class_splits.consecutive(num_train, num_validation, num_test)
  parts = [split.of_role(role) for role in corpus_lib.ROLES]
  assert list(map(len, parts)) == [num_train, num_validation, num_test]
  assert sum(parts, ()) == tuple(range(num_train + num_validation + num_test))


@check
@hypothesis.given(labels_of(20, 30), st.data(), SEEDS)
def test_few_round_groups(labels, data, seed):
  num_classes = labels.max() + 1
  classes = np.random.default_rng(seed).permutation(num_classes)
  num_test = data.draw(st.integers(1, num_classes - 1))
  num_seen = data.draw(st.integers(0, min(2, num_classes - num_test)))
  way = num_test + num_seen
  hypothesis.assume(way >= 2)
  split = corpus_lib.ClassSplit(classes[num_test:], (), classes[:num_test])
  # The pixel is the row.
  corpus = corpus_of(labels, 3, class_split=split, preprocess=np.float32)
  pixels = np.arange(len(labels), dtype=np.float32).reshape(-1, 1, 1)
  corpus = corpus_lib.Corpus(
      'toy',
      corpus_lib.LabelledExamples(pixels[:-3], corpus.train.y),
      corpus_lib.LabelledExamples(pixels[-3:], corpus.test.y),
      num_classes,
      preprocess=np.float32,
      class_split=split,
  )
  pools = groups_lib.ClassPools(corpus)
  deployment = data.draw(st.sampled_from(groups_lib.DEPLOYMENTS))
  num_clients = 3 if deployment == 'iid' else way
  sample = functools.partial(
      groups_lib.sample_group,
      pools,
      role='meta_test',
      way=way,
      num_clients=num_clients,
      deployment=deployment,
      seed=seed,
      index=data.draw(st.integers(0, 9)),
      num_seen=num_seen,
  )
  group = sample()
  assert len(set(group.classes)) == way
  assert set(group.classes[:num_seen]) <= set(split.train)
  assert set(group.classes[num_seen:]) <= set(split.test)
  support, query = group.support_mask > 0, group.query_mask > 0
  rows = np.concatenate(
      [group.support_x[support].ravel(), group.query_x[query].ravel()]
  ).astype(int)
  y = np.concatenate([group.support_y[support], group.query_y[query]])
  expected = np.flatnonzero(np.isin(labels, group.classes))
  assert sorted(rows) == expected.tolist()
  np.testing.assert_array_equal(labels[rows], group.classes[y])
  assert set(group.query_clients[query]) <= set(range(num_clients))
  for one, two in zip(group, sample(), strict=True):
    np.testing.assert_array_equal(one, two)


@check
@hypothesis.given(labels_of(20, 30), SEEDS)
def test_few_round_preparation(labels, seed):
  num_classes = int(labels.max()) + 1
  num_train = max(1, num_classes // 2)
  corpus = corpus_of(
      labels,
      5,
      class_split=class_splits.consecutive(
          num_train, 0, num_classes - num_train
      ),
  )

  def make():
    return federated_dataset.FederatedDataset.few_round(
        corpus, 2 * num_train, seed
    )

  dataset = make()
  held = np.zeros(num_train, int)
  for client_id in dataset.client_ids():
    y = dataset.client(client_id).train.y
    assert dataset.num_examples(client_id) == len(y)
    assert 1 <= len(set(y)) <= 2
    held += np.bincount(y, minlength=num_train)
  np.testing.assert_array_equal(held, np.bincount(labels)[:num_train])
  assert make().fingerprint() == dataset.fingerprint()


@check
@hypothesis.given(st.integers(1, 40), st.data(), SEEDS, st.integers(0, 999))
def test_cohorts(num_clients, data, seed, index):
  ids = [f'client {k}' for k in range(num_clients)]
  size = data.draw(st.integers(1, num_clients))
  cohort = client_sampling.sample_cohort(ids, size, seed, index)
  assert len(set(cohort)) == size and set(cohort) <= set(ids)
  assert cohort == client_sampling.sample_cohort(ids, size, seed, index)
