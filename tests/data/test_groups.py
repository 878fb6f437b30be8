"""Groups of few-round learning: dealing, padding, errors."""

import dataclasses

import numpy as np
import pytest

from tff_meta.data import corpus as corpus_lib
from tff_meta.data import groups as groups_lib

# Images per class; unequal, so that padding matters.
CLASS_SIZES = (24, 27, 30, 40, 25, 26, 24, 33, 24, 29)


def make_corpus(class_sizes=CLASS_SIZES):
  """All images differ; some of every class are in the test part."""
  rng = np.random.RandomState(3)
  y = rng.permutation(np.repeat(np.arange(len(class_sizes)), class_sizes))
  x = rng.randint(1, 256, (len(y), 3, 2, 1)).astype(np.uint8)
  assert len(np.unique(x.reshape(len(x), -1), axis=0)) == len(x)
  cut = len(y) // 3
  return corpus_lib.Corpus(
      name='toy',
      train=corpus_lib.LabelledExamples(x[cut:], y[cut:].astype(np.int32)),
      test=corpus_lib.LabelledExamples(x[:cut], y[:cut].astype(np.int32)),
      num_classes=len(class_sizes),
      class_split=corpus_lib.ClassSplit((0, 2, 4, 3), (5,), (1, 6, 7, 8, 9)),
  )


def draw(pools, **changes):
  arguments = {
      'role': 'meta_test',
      'way': 3,
      'num_clients': 6,
      'deployment': 'non_iid',
      'seed': 5,
      'index': 0,
  }
  return groups_lib.sample_group(pools, **(arguments | changes))


def check_group(group, corpus, *, way, num_clients, deployment):
  """Asserts all that a group must be, tracing every image by its pixels.

  Args:
    group: The group under test.
    corpus: Its corpus; the images must all differ.
    way: Number of classes.
    num_clients: K.
    deployment: 'iid' or 'non_iid'.

  Returns:
    The number of support examples of each client and of query examples.
  """
  source = {}
  pool = corpus.pooled()
  for row, (x, y) in enumerate(
      zip(corpus.preprocess(pool.x), pool.y, strict=True)
  ):
    source[x.tobytes()] = (row, int(y))
  assert len(set(group.classes.tolist())) == way
  seen, support_counts, held = set(), [], []

  def visit(x, y):
    row, label = source[x.tobytes()]
    assert row not in seen
    seen.add(row)
    assert label == group.classes[y]

  for k in range(num_clients):
    count, classes = 0, {}
    for s in range(group.support_x.shape[1]):
      if group.support_mask[k, s]:
        visit(group.support_x[k, s], group.support_y[k, s])
        label = int(group.support_y[k, s])
        classes[label] = classes.get(label, 0) + 1
        count += 1
      else:
        assert not group.support_x[k, s].any()
    support_counts.append(count)
    held.append(classes)
  num_query = 0
  asked = [{} for _ in range(num_clients)]
  for q in range(group.query_x.shape[0]):
    if group.query_mask[q]:
      visit(group.query_x[q], group.query_y[q])
      own, label = asked[group.query_clients[q]], int(group.query_y[q])
      own[label] = own.get(label, 0) + 1
      num_query += 1
    else:
      assert not group.query_x[q].any()
  # All images of the classes were dealt.
  everything = {
      row for row, y in enumerate(pool.y) if int(y) in group.classes.tolist()
  }
  assert seen == everything
  for classes, own in zip(held, asked, strict=True):
    # The odd image of each of up to two shards is asked.
    assert all(0 <= own[c] - classes[c] <= 2 for c in classes)
    assert own.keys() == classes.keys()
    if deployment == 'iid':
      assert len(classes) == way
    else:
      assert len(classes) in (1, 2)
  return support_counts, num_query


@pytest.mark.parametrize('deployment', groups_lib.DEPLOYMENTS)
@pytest.mark.parametrize('way, num_clients, num_seen', [(3, 6, 0), (4, 6, 2)])
def test_groups_against_the_naive_recount(
    deployment, way, num_clients, num_seen
):
  corpus = make_corpus()
  pools = groups_lib.ClassPools(corpus)
  configuration = {
      'role': 'meta_test',
      'way': way,
      'num_clients': num_clients,
      'deployment': deployment,
      'num_seen': num_seen,
  }
  sizes = groups_lib.padded_sizes(pools, **configuration)
  shapes = set()
  for index in range(20):
    group = draw(pools, index=index, **configuration)
    support, num_query = check_group(
        group,
        corpus,
        way=way,
        num_clients=num_clients,
        deployment=deployment,
    )
    assert max(support) <= sizes[0] and num_query <= sizes[1]
    assert min(support) >= 1
    assert set(group.classes[:num_seen]) <= set(corpus.class_split.train)
    assert set(group.classes[num_seen:]) <= set(corpus.class_split.test)
    shapes.add(tuple(a.shape for a in group))
    dtypes = [str(a.dtype) for a in group]
    assert dtypes == ['float32', 'int32', 'float32'] * 2 + ['int32'] * 3
  assert shapes == {
      (
          (num_clients, sizes[0], 3, 2, 1),
          (num_clients, sizes[0]),
          (num_clients, sizes[0]),
          (sizes[1], 3, 2, 1),
          (sizes[1],),
          (sizes[1],),
          (sizes[1],),
          (num_clients,),
          (way,),
      )
  }


def test_sizes_of_frl_cifar100():
  # 600 images a class: 30 + 30 a class and client (IID), 150 + 150 a client.
  corpus = make_corpus((600,) * 10)
  pools = groups_lib.ClassPools(corpus)
  for deployment in groups_lib.DEPLOYMENTS:
    group = draw(pools, way=5, num_clients=10, deployment=deployment)
    assert group.support_mask.shape == (10, 150)
    assert group.support_mask.all()
    assert group.query_mask.shape == (1500,) and group.query_mask.all()
  labels = draw(pools, way=5, num_clients=10, deployment='iid').support_y
  for own in labels:
    np.testing.assert_array_equal(np.bincount(own), [30] * 5)


def test_odd_leftovers_go_to_the_query():
  # Omniglot: 20 images a class in 4 shards of 5: 2 support + 3 query a shard,
  # or 5 + 5 where both shards of a client are of one class.
  pools = groups_lib.ClassPools(make_corpus((20,) * 10))
  counts = set()
  for index in range(30):
    group = draw(pools, way=5, num_clients=10, index=index)
    for y, mask in zip(group.support_y, group.support_mask, strict=True):
      own = np.bincount(y[mask > 0])
      counts.add(tuple(own[own > 0]))
  assert counts == {(2, 2), (5,)}


def test_a_group_is_a_function_of_seed_and_index():
  pools = groups_lib.ClassPools(make_corpus())
  first, again = draw(pools, index=3), draw(pools, index=3)
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a, b)
  for other in (draw(pools, index=4), draw(pools, index=3, seed=6)):
    assert not np.array_equal(first.support_x, other.support_x)
    assert not np.array_equal(first.salts, other.salts)
  iid = draw(pools, index=3, deployment='iid')
  np.testing.assert_array_equal(first.classes, iid.classes)


@pytest.mark.parametrize('deployment, most', [('iid', 6), ('non_iid', 4)])
def test_shots_are_the_first_of_the_support(deployment, most):
  """Of every class that a client holds; the query is the same."""
  pools = groups_lib.ClassPools(make_corpus())
  changes = dict(deployment=deployment, num_clients=3, index=4)
  whole, cut = draw(pools, **changes), draw(pools, **changes, shots=2)
  for name in ('query_x', 'query_y', 'query_mask', 'query_clients', 'salts'):
    np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name))
  assert cut.support_y.shape == (3, most)
  for k in range(3):
    held, kept = whole.support_mask[k] > 0, cut.support_mask[k] > 0
    labels, images = whole.support_y[k][held], whole.support_x[k][held]
    rows = np.concatenate(
        [np.flatnonzero(labels == y)[:2] for y in np.unique(labels)]
    )
    np.testing.assert_array_equal(cut.support_y[k][kept], labels[rows])
    np.testing.assert_array_equal(cut.support_x[k][kept], images[rows])
    assert not cut.support_x[k][~kept].any()
    assert set(np.bincount(labels[rows])) <= {0, 2}


@pytest.mark.parametrize('shots', [0, 5])
def test_more_shots_than_a_client_has_are_refused(shots):
  pools = groups_lib.ClassPools(make_corpus())
  problem = f'at least 1 and at most 4 images .* of 3 clients .*found {shots}'
  with pytest.raises(ValueError, match=problem):
    draw(pools, deployment='iid', num_clients=3, shots=shots)


def test_all_classes_and_shards_come_up():
  pools = groups_lib.ClassPools(make_corpus())
  groups = [draw(pools, index=i) for i in range(40)]
  assert set(np.concatenate([g.classes for g in groups])) == {1, 6, 7, 8, 9}
  # A client has two shards of one class in about 3 * 4 * 3 / (12 * 11) of all
  # cases, 0.27; 240 clients.
  single = [
      len(set(y[m > 0].tolist())) == 1
      for g in groups
      for y, m in zip(g.support_y, g.support_mask, strict=True)
  ]
  assert 0.15 < np.mean(single) < 0.4


def test_examples_per_class_keeps_the_first():
  corpus = make_corpus()
  pools = groups_lib.ClassPools(corpus, examples_per_class=12)
  for label in range(10):
    expected = [r for r, y in enumerate(corpus.pooled_labels) if y == label]
    np.testing.assert_array_equal(pools.rows(label), expected[:12])
  assert draw(pools, way=3, num_clients=3).query_mask.sum() == 18


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'way': 6}, 'at least 6 meta_test classes in .*`way`.*found 5'),
        ({'role': 'meta_validation'}, 'at least 3 meta_validation .* found 1'),
        ({'way': 5, 'num_seen': 5}, 'at least 5 meta_train classes'),
        ({'num_seen': 4}, '`num_seen` in 0..way, found 3, 6 and 4'),
        ({'num_seen': 1, 'role': 'meta_train'}, 'to be 0 for groups of'),
        ({'num_clients': 7}, 'found 7 clients and 3 classes. 6 or 9 clients'),
        ({'num_clients': 24}, 'at least 32 images .* found 24 of class 6'),
        (
            {'num_clients': 13, 'deployment': 'iid'},
            'at least 26 images .* 13 clients, found 24 of class 6',
        ),
        ({'way': 1}, '`way` of at least 2'),
        ({'num_clients': 0}, '`num_clients` of at least 1'),
        ({'deployment': 'mixed'}, "found 'mixed'"),
        ({'role': 'test'}, "found 'test'"),
    ],
)
def test_impossible_groups_are_refused(changes, message):
  pools = groups_lib.ClassPools(make_corpus())
  with pytest.raises(ValueError, match=message):
    draw(pools, **changes)


def test_pools_need_a_class_split_and_images():
  corpus = make_corpus()
  with pytest.raises(ValueError, match="`class_split` .* 'toy'"):
    groups_lib.ClassPools(dataclasses.replace(corpus, class_split=None))
  with pytest.raises(ValueError, match='found none of class 9'):
    groups_lib.ClassPools(make_corpus((24,) * 9 + (0,)))
  with pytest.raises(ValueError, match='`examples_per_class` .* found 0'):
    groups_lib.ClassPools(corpus, examples_per_class=0)
