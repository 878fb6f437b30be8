"""Where the examples of a client come from: rows of a corpus, or ClientData.

A source has `load(client_id) -> ClientExamples`, `preprocess(x)` of other
examples, `count(client_id, part)` without loading pixels, and
`digest(client_ids)`, a string that changes when what one of these clients holds
does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import hashlib
import re
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_meta.data import checks
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import partitioners

_READ_BATCH = 4096
_MAX_PERMUTATIONS = 10_000

PARTS = ('train', 'validation', 'test')


class ClientExamples(NamedTuple):
  """What a client holds; x is float32 and preprocessed, y int32."""

  train: corpus_lib.LabelledExamples
  validation: corpus_lib.LabelledExamples
  test: corpus_lib.LabelledExamples


class ClientRows(NamedTuple):
  """Row numbers of what a client holds, int64 [n] each."""

  train: np.ndarray
  validation: np.ndarray
  test: np.ndarray


def split_rows(
    rows: np.ndarray,
    rng: np.random.Generator,
    validation_fraction: float,
    test_fraction: float,
    labels: np.ndarray | None = None,
) -> ClientRows:
  """Splits rows at random: floor(fraction * n) to validation and to test.

  Args:
    rows: Row numbers [n].
    rng: Source of randomness.
    validation_fraction: Share of validation examples, in [0, 1).
    test_fraction: Share of test examples, in [0, 1).
    labels: The label of every row [n], to split each class by itself; None
      splits all rows together.

  Returns:
    Disjoint parts that together are `rows`.
  """
  if labels is not None:
    splits = [
        split_rows(
            rows[labels == label], rng, validation_fraction, test_fraction
        )
        for label in np.unique(labels)
    ]
    # `rows[:0]`: there may be no class at all.
    parts = zip(ClientRows(rows[:0], rows[:0], rows[:0]), *splits, strict=True)
    return ClientRows(*map(np.concatenate, parts))
  order = rng.permutation(rows)
  # 0.29 * 100 is 28.999999999999996.
  num_test = int(test_fraction * len(rows) + 1e-9)
  num_validation = int(validation_fraction * len(rows) + 1e-9)
  held_out = num_test + num_validation
  return ClientRows(
      train=order[held_out:],
      validation=order[num_test:held_out],
      test=order[:num_test],
  )


def examples_digest(examples: ClientExamples) -> bytes:
  """Returns what tells the examples of a client, in their order, apart."""
  digest = hashlib.blake2b(digest_size=16)
  for x, y in examples:
    digest.update(f'{x.dtype} {x.shape} {y.shape}'.encode())
    digest.update(np.ascontiguousarray(x).data)
    digest.update(np.ascontiguousarray(y).data)
  return digest.digest()


def _row_digest(x, y) -> bytes:
  """Returns what tells one example apart."""
  return hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=16).digest()


def check_fractions(
    validation_fraction: float, test_fraction: float | None
) -> None:
  """Raises unless both are numbers >= 0 and leave something to train on."""
  test_fraction = 0.0 if test_fraction is None else test_fraction
  checks.check_number('validation_fraction', validation_fraction)
  checks.check_number('test_fraction', test_fraction)
  total = validation_fraction + test_fraction
  if min(validation_fraction, test_fraction) < 0 or not total < 1:
    raise ValueError(
        'Expected `validation_fraction` and `test_fraction` to be at least 0'
        f' and less than 1 together, found {validation_fraction} and'
        f' {test_fraction}.'
    )


def deal_corpus(
    corpus: corpus_lib.Corpus,
    partition: Callable[[np.ndarray, int, int], partitioners.Partition],
    num_clients: int,
    seed: int,
    *,
    partition_by: str,
    validation_fraction: float,
    test_fraction: float | None,
    stratify: bool = False,
) -> Mapping[str, ClientRows]:
  """Deals the rows of a corpus to clients.

  Args:
    corpus: As for `FederatedDataset.from_corpus`, and so all the others.
    partition: The partitioner.
    num_clients: Number of clients.
    seed: Source of randomness.
    partition_by: 'label', 'writer' or 'rotation'.
    validation_fraction: Share of validation examples.
    test_fraction: Share of each client's test examples, or None to deal the
      published test part after the train part: a client gets the share of every
      class (and rotation) that it has of the training examples, or of every
      writer.
    stratify: Whether to split off the `test_fraction` class by class.

  Returns:
    Client id -> rows of the pool.

  Raises:
    ValueError: If the partition is impossible, a client gets no training
      examples, or there is no `test_fraction` to stratify.
  """
  check_fractions(validation_fraction, test_fraction)
  if stratify and test_fraction is None:
    raise ValueError(
        'Expected a `test_fraction` to split off class by class (`stratify`),'
        ' found None.'
    )
  keys = _partition_keys(corpus, partition_by)
  if (
      test_fraction is None
      and corpus.test_writers is not None
      and (partition_by == 'writer')
  ):
    clients = _deal_writers(
        corpus, partition, num_clients, seed, validation_fraction
    )
  elif test_fraction is None:
    clients = _deal_parts(
        corpus, keys, partition, num_clients, seed, validation_fraction
    )
  else:
    if partition_by == 'writer' and corpus.test_writers is not None:
      keys = np.concatenate([keys, corpus.test_writers])
    clients = [
        split_rows(
            rows,
            np.random.default_rng([seed, k]),
            validation_fraction,
            test_fraction,
            corpus.pooled_labels[rows] if stratify else None,
        )
        for k, rows in enumerate(
            _deal(partition, keys, num_clients, seed, corpus)
        )
    ]
  names = None
  if partition_by == 'writer' and corpus.writers_name_clients:
    names = [str(keys[np.concatenate(rows)[0]]) for rows in clients]
  return name_clients(clients, corpus.name, names)


def deal_tests_again(
    corpus: corpus_lib.Corpus,
    clients: Mapping[str, ClientRows],
    num_clients: int,
    seed: int,
) -> Mapping[str, ClientRows]:
  """Deals the test examples of all clients to new clients with other classes.

  With C classes and a random permutation p of them new client u holds the
  classes p[u mod C] and p[u + 1 mod C], in intervals of very unequal size
  (`partitioners.fedmeta_per_mnist`). Permutations are drawn until no new client
  has the classes of an old one.

  Args:
    corpus: The examples.
    clients: The old clients.
    num_clients: Number of new clients, a multiple of the number of classes.
    seed: Source of randomness.

  Returns:
    `new_client_00`, ... with their rows, all of them in `test`.

  Raises:
    ValueError: If the old clients have no test examples, these are too few, or
      every permutation drawn gave classes of an old client.

  Source: FedMeta-Per (Nguyen et al. 2022), section 4: new clients have a
    distribution that no training client has; the dealing of MNIST's is in the
    released code, CIFAR-10's is not and is done alike.
  """
  labels = corpus.pooled_labels
  old = {frozenset(labels[np.concatenate(c)]) for c in clients.values()}
  rows = np.sort(np.concatenate([c.test for c in clients.values()]))
  if not len(rows):
    raise ValueError(
        f'Expected the clients of {corpus.name!r} to have test examples that'
        ' can be dealt again to new clients, found none. Give a'
        ' `test_fraction`.'
    )
  order = _unlike_pairs(old, np.unique(labels[rows]), corpus.name, seed)
  rank = np.full(corpus.num_classes, -1)
  rank[order] = np.arange(len(order))
  none = rows[:0]
  dealt = partitioners.fedmeta_per_mnist(
      rank[labels[rows]], num_clients, seed, stride=1
  )
  width = len(str(num_clients - 1))
  return {
      f'new_client_{k:0{width}d}': ClientRows(none, none, rows[own])
      for k, own in enumerate(dealt)
  }


def _unlike_pairs(old, classes, corpus_name, seed):
  """Returns an order of the classes in which no neighbours are in `old`."""
  rng = np.random.default_rng([seed, 2])
  for _ in range(_MAX_PERMUTATIONS):
    order = rng.permutation(classes)
    pairs = zip(order, np.roll(order, -1), strict=True)
    if not old & set(map(frozenset, pairs)):
      return order
  raise ValueError(
      f'Expected clients of {corpus_name!r} to leave pairs of classes for new'
      f' clients, found none in {_MAX_PERMUTATIONS} random orders of the'
      ' classes.'
  )


def name_clients(
    clients: Sequence[ClientRows],
    corpus_name: str,
    names: Sequence[str] | None = None,
) -> Mapping[str, ClientRows]:
  """Returns client id -> rows; ids sort like their numbers.

  Args:
    clients: Rows of client 0, 1, ...
    corpus_name: For the error.
    names: Their ids; None for `client_00`, `client_01`, ...

  Returns:
    The ids with their rows.

  Raises:
    ValueError: If a client has no training examples.
  """
  width = len(str(len(clients) - 1))
  if names is None:
    names = [f'client_{k:0{width}d}' for k in range(len(clients))]
  named = dict(zip(names, clients, strict=True))
  for client_id, rows in named.items():
    if not len(rows.train):
      raise ValueError(
          f'Expected every client of {corpus_name!r} to get training examples,'
          f' found none for {client_id!r} of {len(named)}. Fewer clients, or'
          ' smaller fractions to validate and test on, would do.'
      )
  return named


class CorpusSource:
  """Clients that hold rows of a corpus."""

  def __init__(
      self,
      corpus: corpus_lib.Corpus,
      clients: Mapping[str, ClientRows],
      classes: tuple[int, ...] | None = None,
  ):
    """Makes a source.

    Args:
      corpus: The examples.
      clients: Client id -> rows of the pool (train first, test after it).
      classes: Corpus labels that become labels 0, 1, ...; None keeps them.
    """
    self._corpus = corpus
    self._clients = clients
    self._new_labels = np.full(corpus.num_classes, -1, np.int32)
    kept = range(corpus.num_classes) if classes is None else classes
    self._new_labels[list(kept)] = np.arange(len(kept))

  def load(self, client_id: str) -> ClientExamples:
    """Reads and preprocesses the pixels of a client."""
    labels = self._corpus.pooled_labels
    return ClientExamples(
        *(
            corpus_lib.LabelledExamples(
                self._corpus.preprocess(self._corpus.raw_rows(rows)),
                self._new_labels[labels[rows]],
            )
            for rows in self._clients[client_id]
        )
    )

  @property
  def raw_form(self) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape of a raw example."""
    raw = self._corpus.train.x
    return raw.dtype, raw.shape[1:]

  def preprocess(self, x: np.ndarray) -> np.ndarray:
    """Preprocesses pixels of the same form as the corpus has."""
    dtype, shape = self.raw_form
    if (x.dtype, x.shape[1:]) != (dtype, shape):
      raise ValueError(
          f'Expected examples of {dtype} and shape {shape}, as in training,'
          f' found {x.dtype} and shape {x.shape[1:]}.'
      )
    return self._corpus.preprocess(x)

  def count(self, client_id: str, part: str) -> int:
    """Returns the number of examples of a part."""
    return len(getattr(self._clients[client_id], part))

  def digest(self, client_ids: Sequence[str]) -> str:
    """Returns a string that depends on the whole corpus, rows and labels."""
    digest = hashlib.sha256(self._corpus.fingerprint().encode())
    digest.update(self._new_labels.tobytes())
    for client_id in client_ids:
      parts = self._clients[client_id]
      digest.update(f'{client_id} {[len(rows) for rows in parts]}'.encode())
      for rows in parts:
        digest.update(np.ascontiguousarray(rows, np.int64).tobytes())
    return digest.hexdigest()


class ClientDataSource:
  """Clients of a `tff.simulation.datasets.ClientData`.

  Elements are mappings with one image and one label each.
  """

  def __init__(
      self,
      train: Any,
      test: Any | None,
      *,
      name: str,
      num_classes: int,
      seed: int,
      x_key: str,
      y_key: str,
      add_channel_axis: bool,
      preprocess: corpus_lib.Preprocess,
      validation_fraction: float,
      test_fraction: float,
  ):
    """Makes a source; for the arguments see `from_client_data`."""
    self.ids = _sorted_ids(train, 'train')
    test_ids = () if test is None else _sorted_ids(test, 'test')
    self._train = train
    self._test = test
    self._test_ids = frozenset(test_ids)
    _check_are_known(test_ids, self.ids)
    self._name = name
    self._num_classes = num_classes
    self._seed = seed
    self._keys = (x_key, y_key)
    self._add_channel_axis = add_channel_axis
    self._preprocess = preprocess
    self._fractions = (validation_fraction, test_fraction)
    self._positions = {c: i for i, c in enumerate(self.ids)}
    self._counts: dict[str, dict[str, int]] = {}
    self._digests: dict[str, bytes] = {}
    self._knows_scale = False

  def load(self, client_id: str) -> ClientExamples:
    """Reads, preprocesses and splits the examples of a client.

    They are split by position, so the first time they are read twice: a data
    set that shuffles would let examples be trained on and tested on.
    """
    examples = self._load(client_id)
    if client_id not in self._digests:
      digest = examples_digest(examples)
      if examples_digest(self._load(client_id)) != digest:
        raise self._differs(client_id)
      self._check_tests_others(client_id, examples)
      self._digests[client_id] = digest
    return examples

  raw_form = None  # A `ClientData` is not read to know it.

  def preprocess(self, x: np.ndarray) -> np.ndarray:
    """Preprocesses pixels as `preprocess` was told to."""
    return corpus_lib.preprocessed(self._preprocess, x, repr(self._name))

  def count(self, client_id: str, part: str) -> int:
    """Returns the number of examples of a part; counts each client once."""
    if client_id not in self._counts:
      num_test = None
      if client_id in self._test_ids:
        num_test = self._num_elements(self._test, client_id)
      self._remember_counts(
          client_id, self._num_elements(self._train, client_id), num_test
      )
    return self._counts[client_id][part]

  def digest(self, client_ids: Sequence[str]) -> str:
    """Returns a string that depends on all that these clients hold.

    Those that have not been read yet are read now, one at a time.
    """
    digest = hashlib.sha256(repr(list(client_ids)).encode())
    for client_id in client_ids:
      if client_id not in self._digests:
        self.load(client_id)
      digest.update(self._digests[client_id])
    return digest.hexdigest()

  def _split(self, client_id, num_elements):
    rng = np.random.default_rng([self._seed, self._positions[client_id]])
    return split_rows(np.arange(num_elements), rng, *self._fractions)

  def _load(self, client_id):
    """Reads the examples of a client once."""
    x, y = self._read(self._train, client_id)
    parts = [
        corpus_lib.LabelledExamples(x[rows], y[rows])
        for rows in self._split(client_id, len(y))
    ]
    num_test = None
    if client_id in self._test_ids:
      parts[2] = corpus_lib.LabelledExamples(*self._read(self._test, client_id))
      num_test = len(parts[2].y)
    self._remember_counts(client_id, len(y), num_test)
    return ClientExamples(*parts)

  def _remember_counts(self, client_id, num_elements, num_test):
    """Notes how many examples a client has, which must not change."""
    sizes = [len(rows) for rows in self._split(client_id, num_elements)]
    if num_test is not None:
      sizes[2] = num_test
    counts = dict(zip(PARTS, sizes, strict=True))
    if self._counts.setdefault(client_id, counts) != counts:
      raise self._differs(client_id)

  def _check_tests_others(self, client_id, examples):
    """Raises a ValueError if `test` has the examples of `train`, in any order.

    Single ones that are in both are not looked for.
    """
    if client_id not in self._test_ids:
      return
    tested = [_row_digest(*row) for row in zip(*examples.test, strict=True)]
    own = [
        _row_digest(*row)
        for part in examples[:2]
        for row in zip(*part, strict=True)
    ]
    if sorted(tested) == sorted(own):
      raise ValueError(
          f'Expected client {client_id!r} of {self._name!r} to hold other'
          f' examples in `test` than in `train`, found the same {len(own)}.'
          ' Tip: a `test_fraction` splits those of `train`.'
      )

  def _differs(self, client_id):
    return ValueError(
        f'Expected client {client_id!r} of {self._name!r} to hold the same'
        ' examples in the same order when it is read twice, found others. Tip:'
        ' leave what shuffles or draws at random out of the ClientData and of'
        ' `preprocess`; clients are shuffled when they train.'
    )

  def _dataset(self, client_data, client_id):
    """Opens the data set of a client, and checks what its elements are."""
    try:
      dataset = client_data.create_tf_dataset_for_client(client_id)
    except Exception as e:  # Whatever the caller's function raises.
      raise _unreadable(client_id, e) from e
    self._check_element(dataset.element_spec, client_id)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
      raise ValueError(
          f'Expected client {client_id!r} to hold a finite number of examples,'
          ' found a data set without end. Tip: leave `repeat` out.'
      )
    return dataset

  def _num_elements(self, client_data, client_id):
    dataset = self._dataset(client_data, client_id)
    try:
      return int(dataset.reduce(np.int64(0), lambda count, _: count + 1))
    except Exception as e:  # Whatever the caller's data set raises.
      raise _unreadable(client_id, e) from e

  def _check_element(self, spec, client_id):
    """Raises unless an element is one example, with the keys asked for."""
    expected = f'Expected examples with the keys {self._keys}, found'
    if not isinstance(spec, Mapping):
      raise ValueError(
          f'{expected} a {type(spec).__name__} for client {client_id!r}. Tip:'
          ' `client_data.preprocess(lambda ds: ds.map(...))` to a dictionary.'
      )
    if not set(self._keys) <= set(spec):
      raise ValueError(f'{expected} {sorted(spec)} for client {client_id!r}.')
    pixels, label = (spec[key] for key in self._keys)
    if not isinstance(pixels, tf.TensorSpec) or pixels.dtype.is_complex:
      raise ValueError(
          f'Expected a tensor of real numbers for {self._keys[0]!r}, found'
          f' {pixels} for client {client_id!r}.'
      )
    # Of the shape (1,) it may be a batch of one.
    if (
        not isinstance(label, tf.TensorSpec)
        or label.shape.rank not in (0, None)
        or not label.dtype.is_integer
    ):
      raise ValueError(
          'Expected one example an element, with one integer as its label,'
          f' found labels of the shape {getattr(label, "shape", None)} and type'
          f' {getattr(label, "dtype", None)} for client {client_id!r}. Tip:'
          ' leave batches and one-hot encoding out; `tf.reshape(label, [])`'
          ' makes one integer of a vector of one.'
      )

  def _read(self, client_data, client_id):
    """Returns all pixels and labels of a client."""
    dataset = self._dataset(client_data, client_id)
    x_key, y_key = self._keys
    try:
      batches = [
          (batch[x_key], batch[y_key])
          for batch in dataset.batch(_READ_BATCH).as_numpy_iterator()
      ]
      if batches:
        x, y = (np.concatenate(column) for column in zip(*batches, strict=True))
    except Exception as e:  # Whatever the caller's data set raises.
      raise _unreadable(client_id, e) from e
    if not batches:
      raise ValueError(
          f'Expected client {client_id!r} of {self._name!r} to hold examples,'
          ' found none. Tip: leave it out of `client_ids` of the ClientData.'
      )
    if self._add_channel_axis:
      x = x[..., np.newaxis]
    where = f'client {client_id!r} of {self._name!r}'
    raw = x
    x = corpus_lib.preprocessed(self._preprocess, raw, where)
    if client_id not in self._digests:
      pixels = corpus_lib.check_row_by_row(self._preprocess, raw, where)
      if not self._knows_scale:  # Of the first client: others are alike.
        self._knows_scale = True
        corpus_lib.warn_of_scale(self._preprocess, pixels, where)
    if x.ndim < 2:
      raise ValueError(
          f'Expected the pixels of {where} to have a shape, found one number'
          ' for an example.'
      )
    return x, checks.to_labels(y, where, self._num_classes)


def _unreadable(client_id, error):
  """Returns the error that names the client whose data set raised `error`."""
  # TensorFlow's begin with the name of a node, and go on with a traceback.
  reason, *_ = re.sub(r'{{.*?}} ?', '', str(error)).splitlines() or ('',)
  return ValueError(
      f'Expected to read the examples of client {client_id!r}, all of one shape'
      f' and type, found {type(error).__name__}: {reason}'
  )


def _sorted_ids(client_data, argument):
  """Returns the ids of a ClientData, whose order may be that of a set."""
  if not hasattr(client_data, 'create_tf_dataset_for_client'):
    raise TypeError(
        f'Expected `{argument}` to be a `tff.simulation.datasets.ClientData`,'
        f' found a {type(client_data).__name__}.'
    )
  ids = list(client_data.client_ids)
  for client_id in ids:
    if not isinstance(client_id, str):
      raise TypeError(
          f'Expected the client ids of `{argument}` to be strings, found'
          f' {client_id!r}.'
      )
    try:
      client_id.encode()
    except UnicodeEncodeError as e:
      raise ValueError(
          f'Expected the client ids of `{argument}` to be valid Unicode, found'
          f' {client_id!r}.'
      ) from e
  if not ids or len(set(ids)) < len(ids):
    twice = sorted({c for c in ids if ids.count(c) > 1})
    raise ValueError(
        f'Expected `{argument}` to have clients, each with an id of its own,'
        f' found {len(ids)} of which {twice[:3]} come more than once.'
    )
  return tuple(sorted(ids))


def _check_are_known(test_ids, ids):
  """Raises a ValueError if a client of `test` is none of `train`."""
  strangers = sorted(set(test_ids) - set(ids))
  if strangers:
    raise ValueError(
        'Expected the clients of `test` to be among those of `train`, whose'
        f' test examples it holds, found {len(strangers)} of'
        f' {len(test_ids)} that are not, such as {strangers[0]!r}. Tip: clients'
        ' that training never sees are a data set of their own: give them as'
        ' its `train`, with a `test_fraction`.'
    )


def _partition_keys(corpus, partition_by):
  """Returns what a partitioner sees of every example it may deal."""
  keys = {
      'label': corpus.pooled_labels,
      'writer': corpus.writers,
      'rotation': corpus.rotations,
  }
  if partition_by not in keys:
    raise ValueError(
        f'Expected `partition_by` to be one of {tuple(keys)}, found'
        f' {partition_by!r}.'
    )
  if keys[partition_by] is None:
    raise ValueError(
        f'Expected a corpus with the {partition_by} of every example to'
        f' partition by it, found none in {corpus.name!r}. Some data sets have'
        ' an option for it, such as `rotation_groups` of MNIST.'
    )
  return keys[partition_by]


def _deal_parts(
    corpus, keys, partition, num_clients, seed, validation_fraction
):
  """Partitions the train part; validation and test part follow it."""
  num_train, num_all = len(corpus.train.y), len(corpus.pooled_labels)
  if num_train == num_all or len(keys) < num_all:
    raise ValueError(
        f'Expected {corpus.name!r} to have a test part that can be dealt like'
        ' its train part, found none. Give a `test_fraction` (0 for no test'
        ' examples).'
    )
  rng = np.random.default_rng(_apart_from_rotations(corpus, seed, 3))
  train, validation, _ = split_rows(
      np.arange(num_train), rng, validation_fraction, 0.0
  )
  if validation_fraction and len(train) < num_clients:
    raise ValueError(
        'Expected `validation_fraction` to leave at least an example to each of'
        f' {num_clients} clients, found {validation_fraction}, which leaves'
        f' {len(train)} of {num_train}.'
    )
  train = np.sort(train)  # Some partitioners keep the corpus order.
  try:
    own = [
        train[k]
        for k in _deal(partition, keys[train], num_clients, seed, corpus)
    ]
  except ValueError as e:
    if not validation_fraction:
      raise
    raise ValueError(
        f'{e} (Of {num_train} training examples a `validation_fraction` of'
        f' {validation_fraction} leaves {len(train)} to be dealt.)'
    ) from e
  # Rows of one label and one key, should the key be another than the label.
  kinds = np.unique(keys, return_inverse=True)[1] * corpus.num_classes
  kinds = kinds + corpus.pooled_labels
  parts = [own]
  for rows in (validation, np.arange(num_train, num_all)):
    parts.append(_deal_like(own, rng.permutation(rows), kinds, corpus))
  return [ClientRows(*client) for client in zip(*parts, strict=True)]


def _apart_from_rotations(corpus, seed, number):
  """Returns a seed of permutations of all rows, in which rotations are drawn.

  If both had the same seed, the permutations would be the same, and a client
  would have examples of one rotation.
  """
  return seed if corpus.rotations is None else [seed, number]


def _deal(partition, keys, num_clients, seed, corpus):
  """Calls a partitioner, which may be the caller's own, and checks the rows."""
  function = getattr(partition, 'func', partition)  # Of a functools.partial.
  if function is partitioners.iid and corpus.rotations is not None:
    seed = np.random.default_rng(_apart_from_rotations(corpus, seed, 4))
  found = partition(keys, num_clients, seed)
  if not isinstance(found, Iterable):
    raise TypeError(
        'Expected `partition` to return a list of rows for every client, found'
        f' {found!r}.'
    )
  dealt = [np.asarray(rows) for rows in found]
  if len(dealt) != num_clients:
    raise ValueError(
        f'Expected `partition` to return the rows of {num_clients} clients'
        f' (`num_clients`), found {len(dealt)}.'
    )
  may_share = getattr(function, 'shares_rows', False)
  if not _are_rows_of_nobody_else(dealt, len(keys)):
    _check_rows(dealt, len(keys), may_share)
  return [rows.astype(np.int64) for rows in dealt]


def _are_rows_of_nobody_else(dealt, num_rows) -> bool:
  """Whether all is well, found without looking at clients one by one."""
  if any(r.ndim != 1 or r.dtype.kind not in 'iu' for r in dealt):
    return False
  rows = np.concatenate(dealt).astype(np.int64)
  if len(rows) and not (0 <= rows.min() and rows.max() < num_rows):
    return False
  return np.bincount(rows, minlength=1).max() <= 1


def _check_rows(dealt, num_rows, may_share):
  """Raises a ValueError that says what is wrong with the rows, if anything."""
  for k, rows in enumerate(dealt):
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in 'iu'):
      raise ValueError(
          f'Expected `partition` to return a vector of row numbers for client'
          f' {k}, found {rows.dtype} of shape {rows.shape}.'
      )
    if len(rows) and not (0 <= rows.min() and rows.max() < num_rows):
      raise ValueError(
          f'Expected `partition` to return rows in 0..{num_rows - 1} for'
          f' client {k}, found {rows.min()}..{rows.max()}.'
      )
    if len(np.unique(rows)) < len(rows):
      raise ValueError(
          f'Expected `partition` to give client {k} every row once, since it'
          ' might train on one copy and be tested on another, found'
          f' {len(rows) - len(np.unique(rows))} rows more than once.'
      )
  owner = np.full(num_rows, -1)
  for k, rows in enumerate([] if may_share else dealt):
    rows = rows.astype(np.int64)  # Without any it may be of another dtype.
    shared = rows[owner[rows] >= 0]
    if len(shared):
      raise ValueError(
          'Expected `partition` to give no row to two clients, since one might'
          ' train on what the other is tested on, found row'
          f' {shared[0]} given to client {owner[shared[0]]} and to client {k}.'
          ' Tip: one that means to has an attribute `shares_rows = True`.'
      )
    owner[rows] = k


def _deal_writers(corpus, partition, num_clients, seed, validation_fraction):
  """Deals the train part; what their writers have in the test part follows."""
  num_train = len(corpus.train.y)
  strangers = np.setdiff1d(corpus.test_writers, corpus.writers)
  if len(strangers):
    raise ValueError(
        f'Expected the writers of the test part of {corpus.name!r} to be among'
        f' those of its train part, found {len(strangers)} that are not, such'
        f' as {str(strangers[0])!r}. Tip: give a `test_fraction`, which pools'
        ' the parts, or a file that is split within its writers.'
    )
  own = _deal(partition, corpus.writers, num_clients, seed, corpus)
  writers = np.concatenate([corpus.writers, corpus.test_writers])
  kinds = np.unique(writers, return_inverse=True)[1]
  chosen = np.isin(kinds[num_train:], kinds[np.concatenate(own)])
  test = _deal_like(own, num_train + np.flatnonzero(chosen), kinds, corpus)
  clients = []
  for k, rows in enumerate(own):
    rng = np.random.default_rng([seed, k])
    parts = split_rows(rows, rng, validation_fraction, 0.0)
    clients.append(parts._replace(test=test[k]))
  return clients


def _deal_like(own, rows, kinds, corpus):
  """Gives each client the share of every kind of rows that it has in `own`."""
  held = [np.bincount(kinds[k], minlength=kinds.max() + 1) for k in own]
  cumulative = np.cumsum(held, axis=0)
  dealt = [[rows[:0]] for _ in own]
  for kind in np.unique(kinds[rows]):
    members = rows[kinds[rows] == kind]
    upto = cumulative[:, kind]
    if not upto[-1]:
      raise ValueError(
          f'Expected some client of {corpus.name!r} to train on class'
          f' {kind % corpus.num_classes}, which others than training examples'
          ' have, found none. Give a `test_fraction` instead.'
      )
    cuts = np.rint(upto[:-1] / upto[-1] * len(members)).astype(int)
    for parts, part in zip(dealt, np.split(members, cuts), strict=True):
      parts.append(part)
  return [np.concatenate(parts) for parts in dealt]
