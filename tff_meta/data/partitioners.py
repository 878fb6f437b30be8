"""Ways to deal the examples of a corpus to clients.

Every partitioner is a function

    (labels, num_clients, seed, **options) -> [row numbers of client 0, 1, ...]

of the labels (or writers, or groups) of n examples: a vector of finite numbers
or strings, anything else is refused. `seed` is a non-negative integer, or a
NumPy generator to go on with. The row numbers are
int64 and no client has a row twice. No row goes to two clients, either, but for
partitioners with an attribute `shares_rows` that is True: `fedec_femnist`, when
it is to `start_over`. One that deals by writers or groups instead of labels has
an attribute `partition_by`, `'writer'` or `'rotation'`. Partitioners that
promise to be exhaustive give every row to some client. Where the docstring says
so, two parts of a corpus that are partitioned with the same seed give clients
of the same classes.

No global random state is read or written.
"""

from collections.abc import Callable, Mapping, Sequence
import inspect
import random
from typing import Literal

import numpy as np

from tff_meta import catalog
from tff_meta.data import checks

FEW_ROUND = 'few_round'  # No partitioner: `FederatedDataset.few_round`.

Partition = list[np.ndarray]
Seed = int | np.random.Generator

_MAX_REDRAWS = 10_000
# Outside NumPy takes ever longer for a draw, or draws nothing but zeros.
_LEAST_ALPHA, _LARGEST_ALPHA = 1e-3, 1e6
_LEGACY_SEEDS = 2**32


class NumClientsError(ValueError):
  """What there is cannot be dealt to as many clients."""


def iid(labels: np.ndarray, num_clients: int, seed: Seed) -> Partition:
  """Shuffles all examples and deals them in equal parts; exhaustive.

  Args:
    labels: One entry an example, [n]; only their number matters.
    num_clients: Parts; they differ by at most one example.
    seed: Source of the shuffle.

  Returns:
    Row numbers of every client.

  Raises:
    ValueError: If there are fewer examples than clients.

  Source: McMahan et al., Communication-Efficient Learning of Deep Networks from
    Decentralized Data, AISTATS 2017, section 3.
  """
  num_examples = len(_vector(labels))
  _check_enough(num_examples, num_clients, num_clients, 'client')
  order = _generator(seed).permutation(num_examples)
  return np.array_split(order, num_clients)


def iid_per_class(
    labels: np.ndarray, num_clients: int, seed: Seed
) -> Partition:
  """Deals every class in equal parts to all clients; exhaustive.

  Where a class does not divide evenly the first clients get one more of it.

  Args:
    labels: Labels [n].
    num_clients: Clients.
    seed: Source of the shuffle within the classes.

  Returns:
    Row numbers of every client, each class in random order.

  Raises:
    ValueError: If a class has fewer examples than there are clients.

  Source: Park et al., Few-Round Learning for Federated Learning, NeurIPS 2021,
    IID groups at deployment (600 images a class, 60 to each of 10 clients).
  """
  rng = _generator(seed)
  parts = []
  for label, rows in _rows_by_label(labels).items():
    of_class = f'examples of class {label}'
    _check_enough(len(rows), num_clients, num_clients, 'client', of_class)
    parts.append(np.array_split(rng.permutation(rows), num_clients))
  return [np.concatenate(own) for own in zip(*parts, strict=True)]


def shards(
    labels: np.ndarray,
    num_clients: int,
    seed: Seed,
    shards_per_client: int = 2,
) -> Partition:
  """Sorts by label, cuts into shards, deals as many to each; exhaustive.

  The shards are equal to within one example and may straddle two classes.

  Args:
    labels: Labels [n].
    num_clients: N; there are N * shards_per_client shards.
    seed: Source of the dealing.
    shards_per_client: Shards of each client.

  Returns:
    Row numbers of every client.

  Raises:
    ValueError: If there are fewer examples than shards.

  Source: McMahan et al., AISTATS 2017, section 3 ("pathological" partition, 200
    shards, 2 for each of 100 clients); FedLab's `shards` as CAFeMe uses it.
  """
  labels = _vector(labels)
  checks.check_count('num_clients', num_clients, 1)
  checks.check_count('shards_per_client', shards_per_client, 1)
  num_shards = num_clients * shards_per_client
  _check_enough(len(labels), num_shards, num_clients, 'shard')
  order = np.argsort(labels, kind='stable')
  return _deal(np.array_split(order, num_shards), num_clients, seed)


def class_shards(labels: np.ndarray, num_clients: int, seed: Seed) -> Partition:
  """Cuts each class into shards and deals two to each client; exhaustive.

  Every class is shuffled and cut into 2 * num_clients / num_classes shards,
  equal to within one example. All shards are shuffled; a client takes two, of
  one class or of two.

  Args:
    labels: Labels [n]; every distinct one is a class.
    num_clients: N; 2N must be a multiple of the number of classes.
    seed: Source of cutting and dealing.

  Returns:
    Row numbers of every client, each class in random order.

  Raises:
    ValueError: If 2N is no multiple of the number of classes, or a class has
      fewer examples than shards.

  Source: Park et al., Few-Round Learning for Federated Learning, NeurIPS 2021:
    both the preparation (64 clients, 64 classes, 128 shards of 300) and the
    non-IID groups at deployment (10 clients, 5 classes, 20 shards of 150).
  """
  rng = _generator(seed)
  classes = _rows_by_label(labels)
  per_class = class_shards_per_class(len(classes), num_clients)
  pieces = []
  for label, rows in classes.items():
    of_class = f'examples of class {label}'
    _check_enough(
        len(rows), per_class, num_clients, 'shard of the class', of_class
    )
    pieces += np.array_split(rng.permutation(rows), per_class)
  return _deal(pieces, num_clients, rng)


def class_shards_per_class(num_classes: int, num_clients: int) -> int:
  """Returns 2 * num_clients / num_classes, or raises if it is no integer."""
  checks.check_count('num_clients', num_clients)
  if num_clients < 1 or 2 * num_clients % num_classes:
    step = num_classes if num_classes % 2 else num_classes // 2
    below = num_clients // step * step
    raise NumClientsError(
        'Expected 2 * `num_clients` to be a positive multiple of the number of'
        ' classes, so that every class is cut into as many shards, found'
        f' {num_clients} clients and {num_classes} classes.'
        f' {max(below, step)} or {max(below, step) + step} clients would do.'
    )
  return 2 * num_clients // num_classes


def pieces_per_class(
    labels: np.ndarray, num_clients: int, seed: Seed, classes_per_client: int
) -> Partition:
  """Cuts every class into equal pieces, c pieces to each client; exhaustive.

  A class has c * N / num_classes pieces, equal to within one example. The list
  that names every class once a piece is shuffled and cut into N rows of c
  classes; each entry of a row takes a random unused piece of its class. A
  client can get the same class twice. The rows depend on the seed and the
  number of classes only, so that another part of the corpus gives the same
  classes.

  Args:
    labels: Labels [n]; every distinct one is a class.
    num_clients: N.
    seed: Source of assignment and cutting.
    classes_per_client: c.

  Returns:
    Row numbers of every client.

  Raises:
    ValueError: If c * N is no multiple of the number of classes, or a class has
      fewer examples than pieces.

  Source: Collins et al., Exploiting Shared Representations for Personalized
    Federated Learning (FedRep), ICML 2021, released code; used by FedEC.
  """
  rng = _generator(seed)
  classes = _rows_by_label(labels)
  per_class = _slots_per_class(len(classes), num_clients, classes_per_client)
  names = rng.permutation(np.repeat(list(classes), per_class))
  unused = {}
  for label, rows in classes.items():
    of_class = f'examples of class {label}'
    _check_enough(
        len(rows), per_class, num_clients, 'piece of the class', of_class
    )
    pieces = np.array_split(rng.permutation(rows), per_class)
    unused[label] = [pieces[i] for i in rng.permutation(per_class)]
  return [
      np.concatenate([unused[label].pop() for label in row])
      for row in names.reshape(num_clients, classes_per_client)
  ]


def proportions_per_class(
    labels: np.ndarray,
    num_clients: int,
    seed: Seed,
    classes_per_client: int,
    low: float = 0.4,
    high: float = 0.6,
) -> Partition:
  """Gives each client c distinct classes, in slightly unequal proportions.

  A class has c * N / num_classes slots, with proportions drawn from
  uniform(low, high) and normalised to 1. Client after client picks c classes,
  each time at random among the classes with the most free slots that it does
  not hold yet, and takes int(class size * proportion) examples of the shuffled
  class. Rounding leaves a few examples of a class over: not exhaustive. Classes
  and proportions depend on the seed and the number of classes only, so that
  another part of the corpus gives the same ones.

  Args:
    labels: Labels [n]; every distinct one is a class.
    num_clients: N.
    seed: Source of proportions, assignment and shuffles.
    classes_per_client: c; 2 / 10 / 4 for CIFAR-10 / CIFAR-100 / CINIC-10.
    low: Lower bound of the proportions before normalising, positive.
    high: Upper bound.

  Returns:
    Row numbers of every client.

  Raises:
    ValueError: If c * N is no multiple of the number of classes, c exceeds it,
      or some client would get no example of a class.

  Source: Shamsian et al., Personalized Federated Learning using Hypernetworks
    (pFedHN), ICML 2021, released code; used by pFedGP and MetaVers.
  """
  rng = _generator(seed)
  classes = _rows_by_label(labels)
  slots = _slots_per_class(len(classes), num_clients, classes_per_client)
  checks.check_number('low', low)
  checks.check_number('high', high)
  if classes_per_client > len(classes) or not 0 < low <= high:
    raise ValueError(
        'Expected `classes_per_client` of at most the number of classes and 0 <'
        f' `low` <= `high`, found {classes_per_client} of {len(classes)}'
        f' classes, {low} and {high}.'
    )
  proportions = rng.uniform(low, high, (len(classes), slots))
  proportions /= proportions.sum(axis=1, keepdims=True)
  assignment = _balanced_assignment(
      len(classes), num_clients, classes_per_client, slots, rng
  )
  own: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
  for c, (label, rows) in enumerate(classes.items()):
    sizes = (len(rows) * proportions[c]).astype(int)
    if not sizes.all():
      raise NumClientsError(
          f'Expected class {label} to have an example for each of its {slots}'
          f' slots, found {len(rows)} examples. Fewer clients would do.'
      )
    parts = np.split(rng.permutation(rows), np.cumsum(sizes))
    holders = [k for k in range(num_clients) if c in assignment[k]]
    for k, part in zip(holders, parts[:slots], strict=True):
      own[k].append(part)
  return [np.concatenate(parts) for parts in own]


def dirichlet(
    labels: np.ndarray,
    num_clients: int,
    seed: Seed,
    alpha: float = 0.3,
    min_examples: int = 10,
) -> Partition:
  """Splits every class by proportions from a Dirichlet; exhaustive.

  For one class after the other: p ~ Dir(alpha * 1_N); p is set to 0 for clients
  that hold n / N examples or more already, and normalised again; the shuffled
  class is cut at floor(cumulative p * class size). If in the end a client holds
  fewer than `min_examples`, everything is drawn again.

  Args:
    labels: Labels [n]; every distinct one is a class.
    num_clients: N.
    seed: Source of everything.
    alpha: Concentration, 0.001 to a million; large is close to IID. Below,
      every class would go to one client anyway, and NumPy draws for minutes.
    min_examples: Fewest examples of a client.

  Returns:
    Row numbers of every client.

  Raises:
    ValueError: If alpha is out of its range, n < N * min_examples, or 10,000
      draws did not suffice.

  Source: Zeng et al., FedLab: A Flexible Federated Learning Framework, JMLR
    2023 (`hetero_dir_partition`, after Yurochkin et al., ICML 2019); CAFeMe
    uses alpha 0.3.
  """
  labels = _vector(labels)
  checks.check_count('num_clients', num_clients, 1)
  checks.check_count('min_examples', min_examples)
  checks.check_number('alpha', alpha)
  if not _LEAST_ALPHA <= alpha <= _LARGEST_ALPHA:
    raise ValueError(
        f'Expected `alpha` in {_LEAST_ALPHA:g}..{_LARGEST_ALPHA:g}, found'
        f' alpha {alpha}.'
    )
  if num_clients * min_examples > len(labels):
    raise NumClientsError(
        'Expected at least `num_clients` * `min_examples` examples, found'
        f' {len(labels)} examples for {num_clients} clients of at least'
        f' {min_examples}.'
    )
  rng = _generator(seed)
  classes = [rng.permutation(r) for r in _rows_by_label(labels).values()]
  for _ in range(_MAX_REDRAWS):
    cuts = _dirichlet_cuts([len(r) for r in classes], num_clients, alpha, rng)
    if cuts is not None and np.diff(cuts).sum(axis=0).min() >= min_examples:
      break
  else:
    raise NumClientsError(
        f'Expected every client to hold at least {min_examples} examples, found'
        f' none of {_MAX_REDRAWS} draws of {num_clients} clients with alpha'
        f' {alpha} to do so. A larger alpha or fewer clients would do.'
    )
  return [
      np.concatenate(
          [r[c[k] : c[k + 1]] for r, c in zip(classes, cuts, strict=False)]
      )
      for k in range(num_clients)
  ]


def fedmeta_per_cifar10(
    labels: np.ndarray, num_clients: int = 50, seed: int = 1
) -> Partition:
  """Deals neighbouring pairs of classes with log-normal sizes.

  With C classes client u holds the classes u mod C (slot 0) and u + 1 mod C
  (slot 1). First every slot takes the next 10 examples of its class. Then
  w ~ lognormal(0, 2) of shape [C, N, 2], each class normalised to the sum n_c -
  N, and slot after slot takes int(w[class, u // (N / C), slot]) +
  randint(300..600) further examples, or none if fewer than one more than that
  is left. Not exhaustive.

  With 6,000 examples of each of 10 classes, 50 clients and seed 1 the clients
  hold 506 (least) / 1,049 (mean) / 250 (standard deviation) / 1,986 (most)
  examples, 52,497 in all, as published.

  Args:
    labels: Labels [n]; every distinct one is a class, in ascending order.
    num_clients: N, a multiple of the number of classes.
    seed: Seed of both generators (Python's and NumPy's legacy one, so that the
      published draws come out).

  Returns:
    Row numbers of every client, in the order of the corpus.

  Raises:
    ValueError: If N is no multiple of the number of classes, there are fewer
      than two classes, or a class cannot give every slot 10 examples.

  Source: FedMeta-Per, Table 2 (CIFAR-10), released code.
  """
  first_take = 10
  classes = list(_rows_by_label(labels).values())
  num_classes = len(classes)
  _check_pairs(num_classes, num_clients)
  slots_per_class = 2 * num_clients // num_classes
  smallest = min(map(len, classes))
  if smallest < first_take * slots_per_class:
    raise NumClientsError(
        f'Expected at least {first_take} examples of every class for each of'
        f' its {slots_per_class} slots, found a class of {smallest}.'
    )
  seed = _legacy_seed(seed)
  weights = np.random.RandomState(seed).lognormal(
      0, 2, (num_classes, num_clients, 2)
  )
  draw = random.Random(seed)
  taken = np.zeros(num_classes, int)
  own: list[list[np.ndarray]] = [[] for _ in range(num_clients)]

  def take(client, c, count):
    own[client].append(classes[c][taken[c] : taken[c] + count])
    taken[c] += count

  slots = [
      (u, j, (u + j) % num_classes)
      for u in range(num_clients)
      for j in range(2)
  ]
  for u, _, c in slots:
    take(u, c, first_take)
  for u, j, c in slots:
    size = len(classes[c])
    weight = weights[c] * (size - num_clients) / weights[c].sum()
    count = int(weight[u // (num_clients // num_classes), j])
    count += draw.randint(300, 600)
    if taken[c] + count < size:
      take(u, c, count)
  return [np.concatenate(parts) for parts in own]


def fedmeta_per_mnist(
    labels: np.ndarray,
    num_clients: int = 50,
    seed: int = 1,
    stride: Literal[1, 2] = 2,
) -> Partition:
  """Deals pairs of classes in intervals of very unequal size; exhaustive.

  With C classes client u holds the classes stride * u mod C and stride * u + 1
  mod C. A class is cut, in corpus order, into 2N / C intervals: each but the
  last has randint(left // 11, left // 2 - 1) of the examples that are left, the
  last has the rest. Clients take the intervals of a class in order.

  On all 70,000 MNIST images with 50 clients and seed 1 the standard deviation
  (1,424.0) and the largest client (5,201) are the published ones; the least is
  137 and the total 70,000 where the paper has 135 and 69,909.

  Args:
    labels: Labels [n]; every distinct one is a class, in ascending order.
    num_clients: N, a multiple of the (even) number of classes.
    seed: Seed of NumPy's legacy generator, so that the published draws come
      out.
    stride: 2 makes C / 2 different pairs, which needs an even C; 1 makes all C
      pairs of neighbours.

  Returns:
    Row numbers of every client, in the order of the corpus.

  Raises:
    ValueError: If N is no multiple of the number of classes, that is odd with a
      stride of 2, or a class is too small for an interval to hold an example.

  Source: FedMeta-Per, Table 2 (MNIST), released code; the pairs (2u, 2u + 1)
    are those that give the published statistics.
  """
  classes = _rows_by_label(labels)
  num_classes = len(classes)
  _check_pairs(num_classes, num_clients)
  checks.check_count('stride', stride, 1)
  if num_classes % stride:
    raise ValueError(
        f'Expected an even number of classes to pair, found {num_classes}.'
    )
  num_intervals = 2 * num_clients // num_classes
  rng = np.random.RandomState(_legacy_seed(seed))
  intervals = []
  for label, rows in classes.items():
    cuts, left = [], len(rows)
    for _ in range(num_intervals - 1):
      if left < 11:
        raise NumClientsError(
            f'Expected class {label} to be large enough for {num_intervals}'
            f' random intervals, found {len(rows)} examples. Fewer clients'
            ' would do.'
        )
      left -= rng.randint(left // 11, left // 2)
      cuts.append(len(rows) - left)
    intervals.append(iter(np.split(rows, cuts)))
  return [
      np.concatenate(
          [next(intervals[(stride * u + j) % num_classes]) for j in range(2)]
      )
      for u in range(num_clients)
  ]


def fedec_femnist(
    labels: np.ndarray,
    num_clients: int,
    seed: Seed,
    classes_per_client: int = 3,
    max_per_class: int = 4000,
    start_over: bool = False,
) -> Partition:
  """Deals neighbouring classes, with log-normal sizes split evenly over them.

  With C classes client u holds the c classes u, u + 1, ..., u + c - 1 (mod C).
  It has n_u = lognormal(4, 1) + 100 examples: int(n_u / c) of each of them, the
  next ones of the shuffled class. Not exhaustive.

  Published totals: 150 clients with 3 classes each, 34,674 images, of which a
  tenth of each client's is for testing. The draws have a mean of 190 images.

  Args:
    labels: Labels [n]; every distinct one is a class, in ascending order.
    num_clients: N.
    seed: Source of sizes and shuffles; the sizes depend on nothing else.
    classes_per_client: c.
    max_per_class: Most images of a class that are used, at random.
    start_over: Whether a class whose images are used up begins again with its
      first, so that clients share images, and one may train on what another,
      also a new client, is tested on; if not, no two clients share any.

  Returns:
    Row numbers of every client.

  Raises:
    ValueError: If c exceeds the number of classes, or a class does not have the
      examples that its clients (with `start_over`: that one of them) drew.

  Source: FedEC, experiments on FEMNIST, after Collins et al. (FedRep), ICML
    2021. The paper does not say whether clients share images.
  """
  rng = _generator(seed)
  classes = _rows_by_label(labels)
  checks.check_count('max_per_class', max_per_class, 1)
  _check_enough(len(labels), num_clients, num_clients, 'client')
  checks.check_count('classes_per_client', classes_per_client, 1)
  if classes_per_client > len(classes):
    raise ValueError(
        'Expected `classes_per_client` to be at most the number of classes,'
        f' {len(classes)}, found {classes_per_client}.'
    )
  drawn = rng.lognormal(4, 1, num_clients) + 100
  sizes = (drawn / classes_per_client).astype(int)
  first = np.arange(num_clients)[:, np.newaxis]
  held = (first + np.arange(classes_per_client)) % len(classes)
  own: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
  for c, (label, rows) in enumerate(classes.items()):
    rows = rng.permutation(rows)[:max_per_class]
    holders = np.flatnonzero((held == c).any(axis=1))
    ends = np.cumsum(sizes[holders])
    total = sizes[holders].sum()
    needed = sizes[holders].max(initial=0) if start_over else total
    if needed > len(rows):
      raise NumClientsError(
          f'Expected class {label} to have the {needed} examples that its'
          f' clients drew, found {len(rows)}. Fewer clients would do.'
      )
    dealt = np.resize(rows, total)  # Over and over, where they are too few.
    for k, part in zip(holders, np.split(dealt, ends), strict=False):
      own[k].append(part)
  return [np.concatenate(parts) for parts in own]


# mypy knows no attributes of functions, here and below.
fedec_femnist.shares_rows = True  # type: ignore[attr-defined]


def by_group(
    groups: np.ndarray,
    num_clients: int,
    seed: Seed,
    max_examples: int | None = None,
) -> Partition:
  """Gives each group of examples to as many clients of its own.

  The examples of a group are shuffled and dealt in equal parts to num_clients /
  num_groups clients, so that a client has the examples of one group only.
  Exhaustive without `max_examples`.

  Args:
    groups: The group of every example [n]: with the `rotations` of a corpus
      this is RMNIST's partition (10 groups of 6,000, 10 clients each).
    num_clients: A multiple of the number of groups.
    seed: Source of the shuffle.
    max_examples: Most examples of a client, at least 1, which are among those
      that it has with a larger number; None for no limit.

  Returns:
    Row numbers of every client; the clients of the first group come first.

  Raises:
    ValueError: If the clients are no multiple of the groups, a group has fewer
      examples than clients, or a client may have none.

  Source: Ghosh et al., An Efficient Framework for Clustered Federated Learning
    (IFCA), NeurIPS 2020 (rotated MNIST); CAFeMe, released code (10 x 20
    degrees, partition `None`).
  """
  rng = _generator(seed)
  members = _rows_by_label(groups)
  checks.check_count('num_clients', num_clients)
  if num_clients < 1 or num_clients % len(members):
    raise NumClientsError(
        'Expected `num_clients` to be a positive multiple of the number of'
        f' groups, found {num_clients} clients and {len(members)} groups.'
    )
  if max_examples is not None:
    checks.check_count('max_examples', max_examples, 1)
  each = num_clients // len(members)
  clients = []
  for group, rows in members.items():
    of_group = f'examples of group {group}'
    _check_enough(len(rows), each, num_clients, 'client of the group', of_group)
    clients += np.array_split(rng.permutation(rows), each)
  return [own[:max_examples] for own in clients]


by_group.partition_by = 'rotation'  # type: ignore[attr-defined]


def by_writer(writers: np.ndarray, num_clients: int, seed: Seed) -> Partition:
  """Makes clients of randomly chosen writers, each with all they wrote.

  Exhaustive if there are as many clients as writers; those that are not chosen
  are left out with all that they wrote.

  Args:
    writers: Who made every example [n].
    num_clients: How many writers to choose.
    seed: Source of the choice.

  Returns:
    Row numbers of every client, in the order of the corpus.

  Raises:
    ValueError: If there are fewer writers than clients.

  Source: Caldas et al., LEAF: A Benchmark for Federated Settings, 2018
    (FEMNIST); CAFeMe takes 100 random writers.
  """
  own = list(_rows_by_label(writers).values())
  checks.check_count('num_clients', num_clients, 1)
  if num_clients > len(own):
    raise NumClientsError(
        f'Expected data that tell of at least {num_clients} clients, found'
        f' {len(own)} clients in them.'
    )
  chosen = _generator(seed).permutation(len(own))[:num_clients]
  return [own[writer] for writer in chosen]


by_writer.partition_by = 'writer'  # type: ignore[attr-defined]


_OURS: dict[str, Callable[..., Partition]] = {
    'iid': iid,
    'iid_per_class': iid_per_class,
    'shards': shards,
    'class_shards': class_shards,
    'pieces_per_class': pieces_per_class,
    'proportions_per_class': proportions_per_class,
    'dirichlet': dirichlet,
    'fedmeta_per_cifar10': fedmeta_per_cifar10,
    'fedmeta_per_mnist': fedmeta_per_mnist,
    'fedec_femnist': fedec_femnist,
    'by_group': by_group,
    'by_writer': by_writer,
}

PARTITIONERS = catalog.Catalog[Callable[..., Partition]](
    'partition', _OURS, reserved=(FEW_ROUND,)
)


def register_partition(
    name: str, partitioner: Callable[..., Partition]
) -> None:
  """Adds a partitioner from outside.

  Args:
    name: What `--partition` takes.
    partitioner: As this module's docstring says; its annotated parameters after
      the first three are what `--partition_options` takes.

  Raises:
    ValueError: If there is one of this name, or it is no name.
    TypeError: If the partitioner does not take the first three.
  """
  taken = inspect.signature(partitioner)
  try:
    taken.bind_partial('labels', 'num_clients', 'seed')
  except TypeError as error:
    raise TypeError(
        'Expected a partitioner to take (labels, num_clients, seed, **options),'
        f' found {name!r} with {taken}.'
    ) from error
  PARTITIONERS.register(name, partitioner)


def _vector(labels: np.ndarray) -> np.ndarray:
  """Returns what examples are dealt by as a vector, or raises a ValueError."""
  try:
    labels = np.asarray(labels)
    if labels.dtype == object and all(isinstance(x, str) for x in labels.flat):
      labels = labels.astype(str)
  except ValueError:  # Rows of several lengths.
    labels = np.array(labels, object)
  if labels.ndim != 1 or not len(labels):
    raise ValueError(
        'Expected `labels` to be a vector of at least one entry, found shape'
        f' {labels.shape}.'
    )
  if labels.dtype.kind not in 'biufUS' or (
      labels.dtype.kind == 'f' and not np.isfinite(labels).all()
  ):
    raise ValueError(
        'Expected `labels` to be a vector of finite numbers or of strings,'
        f' found {labels.dtype} with {_first_odd(labels)!r} in it.'
    )
  return labels


def _first_odd(labels):
  """Returns the first entry that is no finite number."""
  for label in labels.tolist():
    if not isinstance(label, int | float) or not np.isfinite(label):
      return label
  return labels[0]


def _generator(seed: Seed) -> np.random.Generator:
  """Returns the generator of a seed, or the one that was given."""
  if isinstance(seed, np.random.Generator):
    return seed
  return np.random.default_rng(checks.check_count('seed', seed))


def _legacy_seed(seed: int) -> int:
  """Returns a seed for NumPy's legacy generator."""
  if checks.check_count('seed', seed) >= _LEGACY_SEEDS:
    raise ValueError(
        f'Expected `seed` to be below 2**32 for this partition, found {seed}.'
    )
  return int(seed)


def _rows_by_label(labels: np.ndarray) -> Mapping[object, np.ndarray]:
  """Returns label -> row numbers in corpus order, labels ascending."""
  labels = _vector(labels)
  order = np.argsort(labels, kind='stable')
  names, starts = np.unique(labels[order], return_index=True)
  return dict(zip(names.tolist(), np.split(order, starts[1:]), strict=True))


def _check_enough(available, needed, num_clients, part, things='examples'):
  """Raises a ValueError if there is not one thing for every part.

  Args:
    available: How many things there are.
    needed: How many parts.
    num_clients: To how many clients they are dealt, at least 1.
    part: What each part is.
    things: What the things are.
  """
  checks.check_count('num_clients', num_clients, 1)
  if needed > available:
    raise NumClientsError(
        f'Expected at least {needed} {things} for {num_clients} clients, one'
        f' for each {part}, found {available}.'
    )


def _check_pairs(num_classes, num_clients):
  """Raises a ValueError if pairs of classes do not go round evenly."""
  checks.check_count('num_clients', num_clients)
  if num_classes < 2 or num_clients < 1 or num_clients % num_classes:
    raise NumClientsError(
        'Expected `num_clients` to be a positive multiple of the number of'
        f' classes, which is at least 2, found {num_clients} clients and'
        f' {num_classes} classes.'
    )


def _slots_per_class(num_classes, num_clients, classes_per_client):
  """Returns classes_per_client * num_clients / num_classes."""
  checks.check_count('classes_per_client', classes_per_client)
  checks.check_count('num_clients', num_clients)
  slots = classes_per_client * num_clients
  if slots < 1 or slots % num_classes:
    raise NumClientsError(
        'Expected `classes_per_client` * `num_clients` to be a positive'
        ' multiple of the number of classes, found'
        f' {classes_per_client} * {num_clients} and {num_classes} classes.'
    )
  return slots // num_classes


def _deal(pieces: Sequence[np.ndarray], num_clients, seed):
  """Gives each client as many random pieces."""
  order = _generator(seed).permutation(len(pieces))
  return [
      np.concatenate([pieces[i] for i in row])
      for row in order.reshape(num_clients, -1)
  ]


def _balanced_assignment(num_classes, num_clients, each, slots, rng):
  """Returns the set of class numbers of every client."""
  free = np.full(num_classes, slots)
  assignment = []
  for _ in range(num_clients):
    own: set[int] = set()
    while len(own) < each:
      fullest = np.flatnonzero(free == free.max())
      # All classes are within one slot of each other, so that a class the
      # client lacks is always among the fullest.
      c = int(rng.choice([c for c in fullest if c not in own]))
      own.add(c)
      free[c] -= 1
    assignment.append(own)
  return assignment


def _dirichlet_cuts(class_sizes, num_clients, alpha, rng):
  """Returns where to cut each class, int [C, N + 1], or None to draw again."""
  quota = sum(class_sizes) / num_clients
  held = np.zeros(num_clients, int)
  cuts = np.zeros((len(class_sizes), num_clients + 1), int)
  for c, size in enumerate(class_sizes):
    p = rng.dirichlet(np.full(num_clients, alpha)) * (held < quota)
    if not p.sum() > 0:
      return None
    cuts[c, 1:-1] = (np.cumsum(p / p.sum())[:-1] * size).astype(int)
    cuts[c, -1] = size
    held += np.diff(cuts[c])
  return cuts
