"""Groups of clients as FRL deploys to them: a few classes, few clients.

A group is drawn from the classes of one role (meta-test classes were never
seen in preparation), its images are dealt to K clients, and every client
splits what it got into support (to learn from) and query (to be tested on).
Source of the whole file: Park et al., Few-Round Learning for Federated
Learning, NeurIPS 2021, section 4 and the released code.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tff_meta.data import checks
from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import partitioners

_PARTITIONS = {
    'iid': partitioners.iid_per_class,
    'non_iid': partitioners.class_shards,
}
DEPLOYMENTS = tuple(_PARTITIONS)


class Group(NamedTuple):
  """K clients with S support examples each, and Q query examples together.

  All groups of one configuration have the same S and Q: rows beyond what a
  client holds are zero and have mask 0.

  Attributes:
    support_x: float32 [K, S, ...], preprocessed.
    support_y: int32 [K, S], group labels 0..way-1.
    support_mask: float32 [K, S], 1 for examples and 0 for padding.
    query_x: float32 [Q, ...], the query sets of all clients, client by client.
    query_y: int32 [Q], group labels.
    query_mask: float32 [Q].
    query_clients: int32 [Q], number of the client that each belongs to.
    salts: int32 [K], sources of randomness of the clients.
    classes: int32 [way], the corpus label behind every group label; `()` where
      nobody asks.
  """

  support_x: np.ndarray
  support_y: np.ndarray
  support_mask: np.ndarray
  query_x: np.ndarray
  query_y: np.ndarray
  query_mask: np.ndarray
  query_clients: np.ndarray
  salts: np.ndarray
  classes: Any


class ClassPools:
  """The images of a corpus by class, raw, for groups to be drawn from.

  Train and test images are pooled. Nothing is copied: the pools are row
  numbers, and pixels are preprocessed for one group at a time.
  """

  def __init__(
      self, corpus: corpus_lib.Corpus, examples_per_class: int | None = None
  ):
    """Sorts the rows of a corpus by class.

    Args:
      corpus: Images with a `class_split`.
      examples_per_class: Keeps the first so many images of every class (FRL on
        FEMNIST: 600); None keeps all.

    Raises:
      ValueError: If the corpus has no class split, or a class of the split has
        no images.
    """
    if corpus.class_split is None:
      raise ValueError(
          'Expected a corpus with a `class_split` to draw groups of classes'
          f' from, found none in {corpus.name!r}. Tip: files of your own have'
          f' one from {class_splits.LEAST_CLASSES} classes on, and a loader of'
          ' yours may make one.'
      )
    if examples_per_class is not None:
      checks.check_count('examples_per_class', examples_per_class, 1)
    self.corpus = corpus
    self._class_split = corpus.class_split
    self._rows = rows_by_class(corpus, examples_per_class)
    for role in corpus_lib.ROLES:
      for label in self.classes(role):
        if not len(self._rows[label]):
          raise ValueError(
              f'Expected every class of {corpus.name!r} to hold images, found'
              f' none of class {label} ({role}).'
          )

  def classes(self, role: str) -> tuple[int, ...]:
    """Returns the corpus labels of the classes of a role."""
    return self._class_split.of_role(role)

  def rows(self, label: int) -> np.ndarray:
    """Returns the pool's row numbers of one class, in corpus order."""
    return self._rows[label]

  def digest(self) -> str:
    """Returns a string that depends on the corpus and the rows kept."""
    kept = [len(self._rows[label]) for label in sorted(self._rows)]
    return f'{self.corpus.fingerprint()} {kept}'


def rows_by_class(
    corpus: corpus_lib.Corpus, examples_per_class: int | None = None
) -> Mapping[int, np.ndarray]:
  """Returns label -> rows of the pool (train, then test), in corpus order."""
  labels = corpus.pooled_labels
  order = np.argsort(labels, kind='stable')
  bounds = np.searchsorted(labels[order], np.arange(corpus.num_classes + 1))
  return {
      label: order[bounds[label] : bounds[label + 1]][:examples_per_class]
      for label in range(corpus.num_classes)
  }


def sample_group(
    pools: ClassPools,
    *,
    role: str,
    way: int,
    num_clients: int,
    deployment: str,
    seed: int,
    index: int,
    num_seen: int = 0,
    shots: int | None = None,
) -> Group:
  """Draws one group; a pure function of its arguments.

  `way` classes are drawn without replacement; group labels are given in the
  order of the draw. The images are dealt
  * iid: by `partitioners.iid_per_class` (FRL: 60 images of each class to each
    of 10 clients), or
  * non_iid: by `partitioners.class_shards` (FRL: 4 shards of 150 images a
    class, 2 random shards a client).
  Then every client keeps floor(half) of its images of a class as support; the
  rest is query. With `shots` the support is the first so many of these, which
  are random ones, and the query is the same.

  With the same seed and index the deployments draw the same classes. The
  generator is seeded with [seed, index]; cohorts and client splits seed theirs
  alike for other uses, so draws of different kinds are not independent of each
  other.

  Args:
    pools: Images by class.
    role: 'meta_test', 'meta_validation' or 'meta_train': where the classes
      come from.
    way: Number of classes.
    num_clients: K.
    deployment: 'iid' or 'non_iid'.
    seed: Non-negative.
    index: Number of the group, non-negative.
    num_seen: How many of the `way` classes are meta-train classes instead,
      with the very images that preparation used (FRL's Table 3: way 5, 3
      seen). They have the first group labels.
    shots: Support images of every class that a client holds; None for half of
      what it has.

  Returns:
    The group.

  Raises:
    ValueError: If the classes or images do not suffice for the configuration.

  Source: FRL, section 4 (IID and non-IID groups, mixed classes, Table 3).
  """
  support_size, query_size = padded_sizes(
      pools,
      role=role,
      way=way,
      num_clients=num_clients,
      deployment=deployment,
      num_seen=num_seen,
      shots=shots,
  )
  rng = np.random.default_rng([seed, index])
  salts = rng.integers(0, 2**31 - 1, num_clients, dtype=np.int32)
  classes = np.concatenate(
      [
          rng.choice(pools.classes('meta_train'), num_seen, replace=False),
          rng.choice(pools.classes(role), way - num_seen, replace=False),
      ]
  ).astype(np.int32)
  rows = [pools.rows(label) for label in classes]
  labels = np.repeat(np.arange(way), [len(own) for own in rows])
  rows = np.concatenate(rows)
  support, query = [], []
  for held in _PARTITIONS[deployment](labels, num_clients, rng):
    learn, test = _halve_classes(held, labels, shots)
    support.append((rows[learn], labels[learn]))
    query.append((rows[test], labels[test]))
  padded = [_pad(pools.corpus, *s, support_size) for s in support]
  asked_rows, asked_labels = map(np.concatenate, zip(*query, strict=True))
  query_clients = np.zeros(query_size, np.int32)
  query_clients[: len(asked_rows)] = np.repeat(
      np.arange(num_clients), [len(own) for own, _ in query]
  )
  support_x, support_y, support_mask = map(np.stack, zip(*padded, strict=True))
  query_x, query_y, query_mask = _pad(
      pools.corpus, asked_rows, asked_labels, query_size
  )
  return Group(
      support_x=support_x,
      support_y=support_y,
      support_mask=support_mask,
      query_x=query_x,
      query_y=query_y,
      query_mask=query_mask,
      query_clients=query_clients,
      salts=salts,
      classes=classes,
  )


def padded_sizes(
    pools: ClassPools,
    *,
    role: str,
    way: int,
    num_clients: int,
    deployment: str,
    num_seen: int = 0,
    shots: int | None = None,
) -> tuple[int, int]:
  """Returns S and Q of all groups of a configuration, and checks it.

  Args:
    pools: As for `sample_group`.
    role: As for `sample_group`.
    way: As for `sample_group`.
    num_clients: As for `sample_group`.
    deployment: As for `sample_group`.
    num_seen: As for `sample_group`.
    shots: As for `sample_group`.

  Returns:
    The most support examples a client, and the most query examples a group can
    have.

  Raises:
    ValueError: If the classes or images do not suffice for the configuration.
  """
  _check_counts(pools, role, way, num_clients, deployment, num_seen)
  if deployment == 'iid':
    num_parts, held = num_clients, f'{num_clients} clients'
  else:
    num_parts = partitioners.class_shards_per_class(way, num_clients)
    held = f'{num_parts} shards'
  labels = pools.classes(role)
  if num_seen:
    labels += pools.classes('meta_train')
  sizes = {label: len(pools.rows(label)) for label in labels}
  smallest = min(sizes, key=sizes.__getitem__)
  if sizes[smallest] < 2 * num_parts:
    raise ValueError(
        f'Expected at least {2 * num_parts} images in every class, one for'
        f' support and one for query in each of {held}, found'
        f' {sizes[smallest]} of class {smallest} in {pools.corpus.name!r}.'
        ' Fewer clients would do.'
    )
  if shots is not None and not 1 <= shots <= sizes[smallest] // num_parts // 2:
    raise ValueError(
        'Expected support of at least 1 and at most'
        f' {sizes[smallest] // num_parts // 2} images of a class, half of what'
        f' a client of {held} has of class {smallest} in'
        f' {pools.corpus.name!r}, found {shots}.'
    )
  largest = max(sizes.values())
  part_sizes = np.full(num_parts, largest // num_parts)
  part_sizes[: largest % num_parts] += 1
  # Two shards of one class halve together: at most the size of one shard.
  support = way * (part_sizes[0] // 2) if deployment == 'iid' else part_sizes[0]
  if shots is not None:  # Of two classes a client where they are not IID.
    support = min(support, shots * (way if deployment == 'iid' else 2))
  return int(support), int(way * (part_sizes - part_sizes // 2).sum())


def _check_counts(pools, role, way, num_clients, deployment, num_seen):
  """Raises a ValueError if there are too few classes or clients."""
  corpus_lib.check_role(role)
  if deployment not in DEPLOYMENTS:
    raise ValueError(
        f'Expected `deployment` to be one of {DEPLOYMENTS}, found'
        f' {deployment!r}.'
    )
  if way < 2 or num_clients < 1 or not 0 <= num_seen <= way:
    raise ValueError(
        'Expected `way` of at least 2, `num_clients` of at least 1 and'
        f' `num_seen` in 0..way, found {way}, {num_clients} and {num_seen}.'
    )
  if num_seen and role == 'meta_train':
    raise ValueError(
        'Expected `num_seen` to be 0 for groups of meta-train classes, which'
        f' are all seen, found {num_seen}.'
    )
  for needed, of_role in ((way - num_seen, role), (num_seen, 'meta_train')):
    available = len(pools.classes(of_role))
    if available < needed:
      raise ValueError(
          f'Expected at least {needed} {of_role} classes in'
          f' {pools.corpus.name!r} for groups of {way} classes (`way`), found'
          f' {available}.'
      )


def _halve_classes(held, labels, shots):
  """Returns the first floor(half) of each class, and the rest of each.

  With `shots`, only so many of the former.
  """
  # Partitioners shuffle within the classes: the first half is a random one.
  own = [held[labels[held] == label] for label in np.unique(labels[held])]
  return (
      np.concatenate([rows[: len(rows) // 2][:shots] for rows in own]),
      np.concatenate([rows[len(rows) // 2 :] for rows in own]),
  )


def _pad(corpus, rows, labels, size):
  """Returns pixels [size, ...], labels [size] and mask [size]."""
  x = np.zeros((size, *corpus.input_shape), np.float32)
  y = np.zeros(size, np.int32)
  mask = np.zeros(size, np.float32)
  x[: len(rows)] = corpus.preprocess(corpus.raw_rows(rows))
  y[: len(rows)] = labels
  mask[: len(rows)] = 1
  return x, y, mask
