"""Partitioners against loops written from the published descriptions."""

import random

import numpy as np
import pytest

from tff_meta.data import partitioners

# Unequal classes, not in order.
CLASS_SIZES = (31, 40, 25, 36)
LABELS = np.random.RandomState(5).permutation(
    np.repeat(np.arange(4), CLASS_SIZES)
)


def counts(clients, labels=LABELS):
  """Examples of every class at every client, [clients, classes], by loops."""
  table = np.zeros((len(clients), labels.max() + 1), int)
  for client, rows in enumerate(clients):
    for row in rows:
      table[client, labels[row]] += 1
  return table


def test_iid_parts_are_equal_and_mixed():
  clients = partitioners.iid(LABELS, 7, 0)
  assert sorted(map(len, clients)) == [18] + [19] * 6
  assert (counts(clients) > 0).sum() > 24  # Of 28.


def test_iid_per_class_deals_every_class_evenly():
  table = counts(partitioners.iid_per_class(LABELS, 7, 0))
  for label, size in enumerate(CLASS_SIZES):
    for client in range(7):
      expected = size // 7 + (client < size % 7)
      assert table[client, label] == expected


def naive_shards(labels, num_shards):
  """Rows sorted by label, cut one by one: the first shards are longer."""
  ordered = []
  for label in range(labels.max() + 1):
    for row in range(len(labels)):
      if labels[row] == label:
        ordered.append(row)
  shards, start = [], 0
  for i in range(num_shards):
    size = len(labels) // num_shards + (i < len(labels) % num_shards)
    shards.append(ordered[start : start + size])
    start += size
  return shards


@pytest.mark.parametrize('each', [2, 3])
def test_shards_are_runs_of_the_sorted_rows(each):
  clients = partitioners.shards(LABELS, 5, 1, shards_per_client=each)
  shards = naive_shards(LABELS, 5 * each)
  for own in clients:
    held = [shard for shard in shards if set(shard) <= set(own.tolist())]
    assert len(held) == each
    assert sorted(sum(held, [])) == sorted(own.tolist())


def test_shards_match_on_another_part_of_a_corpus():
  train = partitioners.shards(LABELS, 6, 2)
  test = partitioners.shards(np.repeat(LABELS, 2), 6, 2)
  np.testing.assert_array_equal(
      2 * counts(train) > 3, counts(test, np.repeat(LABELS, 2)) > 3
  )


def test_class_shards_give_two_shards_of_one_class_each():
  # 2 * 6 / 4 = 3 shards a class.
  sizes = [{n // 3, -(-n // 3)} for n in CLASS_SIZES]
  singles = 0
  for seed in range(20):
    for own in counts(partitioners.class_shards(LABELS, 6, seed)):
      (held,) = np.nonzero(own)
      if len(held) == 1:
        singles += 1
        (label,) = held
        n = CLASS_SIZES[label]
        assert own[label] in (2 * (n // 3), 2 * (n // 3) + 1, 2 * (n // 3) + 2)
      else:
        assert len(held) == 2
        for label in held:
          assert own[label] in sizes[label]
  # Both of one class: 2 / 11 of 120 clients, 21.8 expected.
  assert 8 < singles < 40


def test_class_shards_reproduce_frl_sizes():
  labels = np.tile(np.arange(64), 600)
  clients = partitioners.class_shards(labels, 64, 0)
  table = counts(clients, labels)
  assert set(table.ravel()) == {0, 300, 600}
  assert (table.sum(axis=1) == 600).all()
  labels = np.tile(np.arange(5), 600)
  table = counts(partitioners.class_shards(labels, 10, 0), labels)
  assert set(table.ravel()) <= {0, 150, 300}
  assert (table.sum(axis=1) == 300).all()


def test_pieces_follow_fedrep():
  # 2 * 6 / 4 = 3 pieces a class; leftovers go to the first pieces.
  repeated = 0
  for seed in range(10):
    table = counts(
        partitioners.pieces_per_class(LABELS, 6, seed, classes_per_client=2)
    )
    pieces = np.zeros(4, int)
    for own in table:
      held = 0
      for label in np.flatnonzero(own):
        size = CLASS_SIZES[label] // 3
        number = own[label] // size
        assert number * size <= own[label] <= number * (size + 1)
        pieces[label] += number
        repeated += number == 2
        held += number
      assert held == 2
      assert (
          sum(own[label] // (CLASS_SIZES[label] // 3) for label in range(4))
          == 2
      )
    np.testing.assert_array_equal(pieces, [3] * 4)
  assert repeated  # A client may get the same class twice.


def test_pieces_and_proportions_match_on_another_part_of_a_corpus():
  test_labels = np.random.RandomState(6).permutation(
      np.repeat(np.arange(4), (9, 13, 10, 12))
  )
  for partition in (
      partitioners.pieces_per_class,
      partitioners.proportions_per_class,
  ):
    train = counts(partition(LABELS, 6, 8, classes_per_client=2))
    test = counts(
        partition(test_labels, 6, 8, classes_per_client=2), test_labels
    )
    np.testing.assert_array_equal(train > 0, test > 0)


@pytest.mark.parametrize(
    'num_classes, num_clients, each', [(10, 50, 2), (100, 50, 10), (10, 100, 4)]
)
def test_proportions_follow_pfedhn(num_classes, num_clients, each):
  labels = np.tile(np.arange(num_classes), 1000)
  slots = each * num_clients // num_classes
  for seed in (0, 1):
    table = counts(
        partitioners.proportions_per_class(
            labels, num_clients, seed, classes_per_client=each
        ),
        labels,
    )
    for client in range(num_clients):
      assert sum(table[client] > 0) == each
    for label in range(num_classes):
      own = [n for n in table[:, label] if n]
      assert len(own) == slots
      # Rounding down loses less than one a slot.
      assert 1000 - slots < sum(own) <= 1000
      assert max(own) / min(own) <= 1.5 * 1.05 and max(own) > min(own)


def test_the_assignment_takes_the_fullest_classes_first():
  # Replays the choice: at any time the class picked has the most free slots
  # among those the client lacks, so after 5 clients of 2 out of 10 classes
  # every class is used once.
  table = counts(
      partitioners.proportions_per_class(
          np.tile(np.arange(10), 100), 20, 3, classes_per_client=2
      ),
      np.tile(np.arange(10), 100),
  )
  for start in range(0, 20, 5):
    np.testing.assert_array_equal(
        (table[start : start + 5] > 0).sum(axis=0), [1] * 10
    )


def naive_dirichlet(labels, num_clients, seed, alpha, min_examples):
  """FedLab's rule, one client and one example at a time."""
  rng = np.random.default_rng(seed)
  shuffled = []
  for label in range(labels.max() + 1):
    own = [row for row in range(len(labels)) if labels[row] == label]
    shuffled.append(rng.permutation(own).tolist())
  redraws = -1
  while True:
    redraws += 1
    clients = [[] for _ in range(num_clients)]
    for rows in shuffled:
      p = rng.dirichlet([alpha] * num_clients).tolist()
      for k in range(num_clients):
        if len(clients[k]) >= len(labels) / num_clients:
          p[k] = 0.0
      total = sum(p)
      if total == 0:
        clients = [[]] * num_clients
        break
      start, reached = 0, 0.0
      for k in range(num_clients):
        reached += p[k] / total
        end = len(rows) if k == num_clients - 1 else int(reached * len(rows))
        clients[k] = clients[k] + rows[start:end]
        start = end
    if min(len(own) for own in clients) >= min_examples:
      return clients, redraws


@pytest.mark.parametrize(
    'alpha, min_examples', [(0.3, 10), (5.0, 10), (1e3, 1)]
)
def test_dirichlet_is_fedlabs_redraw_rule(alpha, min_examples):
  all_redraws = 0
  for seed in range(10):
    clients = partitioners.dirichlet(LABELS, 5, seed, alpha, min_examples)
    expected, redraws = naive_dirichlet(LABELS, 5, seed, alpha, min_examples)
    assert [sorted(own.tolist()) for own in clients] == [
        sorted(own) for own in expected
    ]
    assert min(map(len, clients)) >= min_examples
    all_redraws += redraws
  assert all_redraws or alpha > 1


def test_dirichlet_gives_up_with_a_clear_error():
  labels = np.zeros(12, int)
  with pytest.raises(ValueError, match='at least 4 examples, found none of'):
    # One class: whoever has most of it has nearly all of it.
    partitioners.dirichlet(labels, 3, 0, alpha=1e-3, min_examples=4)


def naive_fedmeta_per_cifar10(class_rows, num_clients, seed):
  """The published generator, in its own order and with global seeds."""
  random.seed(seed)
  np.random.seed(seed)
  num_classes = len(class_rows)
  held = [[] for _ in range(num_clients)]
  position = [0] * num_classes
  for user in range(num_clients):
    for j in range(2):
      label = (user + j) % num_classes
      for _ in range(10):
        held[user].append(class_rows[label][position[label]])
        position[label] += 1
  props = np.random.lognormal(0, 2.0, (num_classes, num_clients, 2))
  for label in range(num_classes):
    scale = len(class_rows[label]) - num_clients
    props[label] = scale * props[label] / np.sum(props[label])
  for user in range(num_clients):
    for j in range(2):
      label = (user + j) % num_classes
      size = int(props[label, user // (num_clients // num_classes), j])
      size += random.randint(300, 600)
      if position[label] + size < len(class_rows[label]):
        for _ in range(size):
          held[user].append(class_rows[label][position[label]])
          position[label] += 1
  return held


@pytest.mark.parametrize(
    'class_sizes, num_clients, seed',
    [((6000,) * 10, 50, 1), ((1500, 1200, 3000), 6, 4)],
)
def test_log_normal_generator_against_the_published_loops(
    class_sizes, num_clients, seed
):
  labels = np.random.RandomState(0).permutation(
      np.repeat(np.arange(len(class_sizes)), class_sizes)
  )
  class_rows = [
      [row for row, y in enumerate(labels.tolist()) if y == label]
      for label in range(len(class_sizes))
  ]
  expected = naive_fedmeta_per_cifar10(class_rows, num_clients, seed)
  clients = partitioners.fedmeta_per_cifar10(labels, num_clients, seed)
  assert [sorted(own.tolist()) for own in clients] == [
      sorted(own) for own in expected
  ]
  rows = np.concatenate(clients)
  assert len(set(rows.tolist())) == len(rows)


def test_log_normal_generator_has_the_published_statistics():
  labels = np.repeat(np.arange(10), 6000)
  clients = partitioners.fedmeta_per_cifar10(labels)
  sizes = np.array([len(own) for own in clients])
  assert len(sizes) == 50
  # FedMeta-Per, Table 2, which cuts the decimals off.
  assert (sizes.min(), int(sizes.mean()), int(sizes.std()), sizes.max()) == (
      506,
      1049,
      250,
      1986,
  )
  assert sizes.sum() == 52497
  table = counts(clients, labels)
  for client in range(50):
    held = sorted(np.flatnonzero(table[client]).tolist())
    assert held == sorted([client % 10, (client + 1) % 10])


# Images of each digit in MNIST's train and test part together.
MNIST_SIZES = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)


def test_interval_generator_has_the_published_statistics():
  labels = np.repeat(np.arange(10), MNIST_SIZES)
  clients = partitioners.fedmeta_per_mnist(labels)
  sizes = np.array([len(own) for own in clients])
  assert round(sizes.std(), 1) == 1424.0 and sizes.max() == 5201
  # Where the paper has 135 and 69,909.
  assert sizes.min() == 137 and sizes.sum() == 70000
  rows = np.concatenate(clients)
  assert len(set(rows.tolist())) == 70000
  table = counts(clients, labels)
  for client in range(50):
    first = 2 * client % 10
    assert set(np.flatnonzero(table[client])) <= {first, first + 1}


@pytest.mark.parametrize('stride', [1, 2])
def test_interval_generator_against_loops(stride):
  labels = np.random.RandomState(2).permutation(
      np.repeat(np.arange(4), (4000, 5000, 3000, 6000))
  )
  np.random.seed(3)
  queues = []
  for label in range(4):
    rows = [row for row, y in enumerate(labels.tolist()) if y == label]
    total, intervals = len(rows), []
    for _ in range(3):
      size = np.random.randint(total // 11, total // 2)
      total -= size
      intervals.append([rows.pop(0) for _ in range(size)])
    queues.append([*intervals, rows])
  clients = partitioners.fedmeta_per_mnist(labels, 8, seed=3, stride=stride)
  for user in range(8):
    expected = []
    for j in range(2):
      expected += queues[(stride * user + j) % 4].pop(0)
    assert sorted(clients[user].tolist()) == sorted(expected)


def naive_fedec_femnist(class_rows, num_clients, classes_per_client, rng):
  """The generator client by client, without its starting over."""
  drawn = [100 + size for size in rng.lognormal(4, 1, num_clients)]
  pools = [rng.permutation(rows).tolist() for rows in class_rows]
  clients = []
  for user in range(num_clients):
    rows = []
    for j in range(classes_per_client):
      for _ in range(int(drawn[user] / classes_per_client)):
        rows.append(pools[(user + j) % len(pools)].pop(0))
    clients.append(rows)
  return clients


def test_fedec_generator_against_loops():
  labels = np.random.RandomState(2).permutation(
      np.repeat(np.arange(4), (900, 700, 800, 1000))
  )
  class_rows = [np.flatnonzero(labels == label) for label in range(4)]
  expected = naive_fedec_femnist(class_rows, 7, 3, np.random.default_rng(8))
  clients = partitioners.fedec_femnist(labels, 7, 8)
  assert [sorted(own.tolist()) for own in clients] == [
      sorted(own) for own in expected
  ]
  table = counts(clients, labels)
  for user, row in enumerate(table):
    held = sorted((user + j) % 4 for j in range(3))
    assert np.flatnonzero(row).tolist() == held
    assert len(set(row[held])) == 1 and row[held[0]] >= 33


def test_fedec_generator_at_the_published_size():
  """10 classes, 150 clients; 34,674 images in the paper."""
  labels = np.repeat(np.arange(10), 6000)
  clients = partitioners.fedec_femnist(labels, 150, 0)
  sizes = np.array([len(own) for own in clients])
  # 100 + e^4.5 = 190 a client; 150 of them vary by 118 / sqrt(150) = 10.
  assert 160 < sizes.mean() < 220 and sizes.min() >= 99
  assert np.median(sizes) < sizes.mean() - 10  # Skewed.
  used = counts(clients, labels).sum(axis=0)
  assert used.max() <= 4000 and used.min() > 2000
  fewer = partitioners.fedec_femnist(labels, 20, 0, max_per_class=1200)
  assert counts(fewer, labels).sum(axis=0).max() <= 1200


def test_fedec_generator_starts_small_classes_over():
  small = np.repeat(np.arange(10), 1000)  # Of FEMNIST's letters, j has few.
  with pytest.raises(ValueError, match='examples that its clients drew'):
    partitioners.fedec_femnist(small, 150, 0)
  clients = partitioners.fedec_femnist(small, 150, 0, start_over=True)
  whole = partitioners.fedec_femnist(np.repeat(np.arange(10), 6000), 150, 0)
  np.testing.assert_array_equal(
      counts(clients, small), counts(whole, np.repeat(np.arange(10), 6000))
  )
  for own in clients:  # Clients share images, but none has one twice.
    assert len(set(own.tolist())) == len(own)
  for label in range(10):  # All are dealt before one is dealt again.
    rows = np.concatenate([own[small[own] == label] for own in clients])
    times = np.bincount(rows - 1000 * label, minlength=1000)
    assert times.min() >= 1 and np.ptp(times) <= 1
  # Nothing changes where there are enough.
  again = partitioners.fedec_femnist(
      np.repeat(np.arange(10), 6000), 150, 0, start_over=True
  )
  for one, other in zip(whole, again, strict=True):
    np.testing.assert_array_equal(one, other)
  with pytest.raises(ValueError, match='examples that its clients drew'):
    partitioners.fedec_femnist(
        np.repeat(np.arange(10), 40), 150, 0, start_over=True
    )


def test_by_group_reproduces_rotated_mnist():
  degrees = np.random.RandomState(0).permutation(
      np.repeat(np.arange(10) * np.float32(20), 6000)
  )
  clients = partitioners.by_group(degrees, 100, 0)
  for k, own in enumerate(clients):
    assert len(own) == 600
    assert set(degrees[own].tolist()) == {20.0 * (k // 10)}


def test_by_group_keeps_so_many_examples_of_each_client():
  groups = np.repeat(np.arange(4), 50)
  whole = partitioners.by_group(groups, 8, 0)  # 25 examples each.
  few, more, all_of_them = (
      partitioners.by_group(groups, 8, 0, max_examples=n) for n in (5, 20, 99)
  )
  for k, own in enumerate(whole):
    assert (len(few[k]), len(more[k])) == (5, 20)
    assert set(few[k]) < set(more[k]) < set(own)
    assert all_of_them[k].tolist() == own.tolist()


def test_by_writer_takes_whole_writers():
  writers = np.array(['cid', 'ann', 'bob', 'ann', 'cid', 'ann', 'dan'])
  clients = partitioners.by_writer(writers, 3, 0)
  pieces = {
      writer: [row for row in range(7) if writers[row] == writer]
      for writer in ('ann', 'bob', 'cid', 'dan')
  }
  for own in clients:
    assert own.tolist() in pieces.values()
  chosen = {
      tuple(
          sorted(
              writers[own[0]] for own in partitioners.by_writer(writers, 3, s)
          )
      )
      for s in range(20)
  }
  assert len(chosen) == 4


@pytest.mark.parametrize(
    'call, message',
    [
        (
            lambda: partitioners.iid(LABELS, 133, 0),
            '133 examples for 133 clients, .* client, found 132',
        ),
        (
            lambda: partitioners.iid(LABELS, 0, 0),
            '`num_clients` .* at least 1, found 0',
        ),
        (
            lambda: partitioners.iid_per_class(LABELS, 26, 0),
            '26 examples of class 2 for 26 clients.* found 25',
        ),
        (
            lambda: partitioners.shards(LABELS, 67, 0),
            '134 examples for 67 clients, one for each shard, found 132',
        ),
        (
            lambda: partitioners.class_shards(LABELS, 7, 0),
            '7 clients and 4 classes. 6 or 8 clients',
        ),
        (
            lambda: partitioners.class_shards(LABELS, 1, 0),
            '1 clients and 4 classes. 2 or 4 clients',
        ),
        (
            lambda: partitioners.class_shards(LABELS, 54, 0),
            '27 examples of class 2 for 54 clients, .* shard .* found 25',
        ),
        (
            lambda: partitioners.pieces_per_class(LABELS, 5, 0, 2),
            r'found 2 \* 5 and 4 classes',
        ),
        (
            lambda: partitioners.pieces_per_class(LABELS, 52, 0, 2),
            '26 examples of class 2 for 52 clients, .* piece .* found 25',
        ),
        (
            lambda: partitioners.proportions_per_class(LABELS, 3, 0, 3),
            r'found 3 \* 3 and 4 classes',
        ),
        (
            lambda: partitioners.proportions_per_class(LABELS, 4, 0, 5),
            'found 5 of 4 classes',
        ),
        (
            lambda: partitioners.proportions_per_class(LABELS, 60, 0, 2),
            'class 0 .* 30 slots, found 31 examples',
        ),
        (
            lambda: partitioners.proportions_per_class(LABELS, 4, 0, 2, 0.0),
            '`low`',
        ),
        (lambda: partitioners.dirichlet(LABELS, 14, 0), '132 examples for 14'),
        (lambda: partitioners.dirichlet(LABELS, 2, 0, alpha=0), 'alpha 0'),
        # The first ran for minutes, the last had only zeros drawn.
        (lambda: partitioners.dirichlet(LABELS, 2, 0, 1e-320), 'alpha 1e-320'),
        (
            lambda: partitioners.dirichlet(LABELS, 2, 0, np.nan),
            '`alpha` .* nan',
        ),
        (lambda: partitioners.dirichlet(LABELS, 2, 0, 1e308), 'alpha 1e.308'),
        (
            lambda: partitioners.fedmeta_per_cifar10(LABELS, 10, 0),
            '10 clients and 4 classes',
        ),
        (
            lambda: partitioners.fedmeta_per_cifar10(LABELS, 8, 0),
            'each of its 4 slots, found a class of 25',
        ),
        (
            lambda: partitioners.fedmeta_per_mnist(LABELS, 40, 0),
            '20 random intervals',
        ),
        (
            lambda: partitioners.fedmeta_per_mnist(LABELS % 3, 6, 0),
            'even number of classes to pair, found 3',
        ),
        (
            lambda: partitioners.fedec_femnist(LABELS, 5, 0),
            'class 0 to have the .* examples that its clients drew, found 31',
        ),
        (
            lambda: partitioners.fedec_femnist(LABELS, 5, 0, 5),
            '`classes_per_client` .* number of classes, 4, found 5',
        ),
        (lambda: partitioners.fedec_femnist(LABELS, 0, 0), 'found 0'),
        (lambda: partitioners.by_group(LABELS, 6, 0), '6 clients and 4 groups'),
        (
            lambda: partitioners.by_group(LABELS, 4, 0, max_examples=0),
            '`max_examples` .* at least 1, found 0',
        ),
        (
            lambda: partitioners.by_writer(LABELS, 5, 0),
            'at least 5 clients, found 4 clients',
        ),
        (lambda: partitioners.shards(LABELS[:0], 5, 0), 'at least one'),
        (lambda: partitioners.class_shards(LABELS[:0], 5, 0), 'at least one'),
    ],
)
def test_impossible_arguments_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
