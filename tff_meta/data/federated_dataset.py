"""A corpus as clients see it: client id -> train, validation, test examples."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
import hashlib
from typing import Any, Literal, NamedTuple

import cachetools
import numpy as np
import tensorflow as tf

from tff_meta import config_checks
from tff_meta import machine
from tff_meta.client_works import client_work
from tff_meta.data import availability
from tff_meta.data import checks
from tff_meta.data import client_sources
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import groups as groups_lib
from tff_meta.data import partitioners

PARTS = client_sources.PARTS
NEW_CLIENTS = ('held_out', 'redealt')
ClientExamples = client_sources.ClientExamples


class _HeldClient(NamedTuple):
  """A client in memory.

  Attributes:
    tensors: Its examples; each array is a tensor on the CPU.
    examples: The same memory as NumPy arrays, which nobody can write to.
    tff_data: By part, what a TFF computation takes, once asked for.
  """

  tensors: ClientExamples
  examples: ClientExamples
  tff_data: dict[str, collections.OrderedDict[str, tf.data.Dataset]]

  @property
  def num_bytes(self) -> int:
    """Size of the examples."""
    return sum(x.nbytes + y.nbytes for x, y in self.examples)


class NamedSequence(NamedTuple):
  """A part of a client's data, by name: to be opened where it is used.

  Attributes:
    dataset: Who has the client.
    client_id: The client.
    part: 'train', 'validation', 'test' or 'half_train'.
    field: 'examples' or 'salt'.
  """

  dataset: FederatedDataset
  client_id: str
  part: str
  field: str

  def open(self) -> tf.data.Dataset:
    """Returns what `FederatedDataset.tff_client_data` has."""
    return self.dataset.tff_client_data(self.client_id, self.part)[self.field]


class _Cache(cachetools.LRUCache):
  """Clients in memory, by id; those that are let go leave their digests.

  Attributes:
    digests: By id, of clients that were let go.
  """

  def __init__(self, num_bytes: int):
    """Starts empty.

    Args:
      num_bytes: The most that clients take; larger ones are let go at once.
    """
    super().__init__(num_bytes, lambda held: held.num_bytes)
    self.digests: dict[str, bytes] = {}

  def __setitem__(self, client_id, held):
    if held.num_bytes > self.maxsize:
      self._leave_digest(client_id, held)
    else:
      super().__setitem__(client_id, held)

  def popitem(self):
    """Lets the client go that was used longest ago."""
    client_id, held = super().popitem()
    self._leave_digest(client_id, held)
    return client_id, held

  def _leave_digest(self, client_id, held):
    if client_id not in self.digests:
      self.digests[client_id] = client_sources.examples_digest(held.examples)


class FederatedDataset:
  """Clients and their examples, read when asked for and cached.

  Attributes:
    name: Name of the data set.
    input_shape: Shape of one example.
    num_classes: Labels of all clients are 0..num_classes-1.
    seed: The seed that the clients were made with.
    class_pools: Images by class to draw few-round groups from, or None.
    class_names: What labels 0, 1, ... stand for, or None.
  """

  def __init__(
      self,
      *,
      name: str,
      input_shape: tuple[int, ...],
      num_classes: int,
      seed: int,
      clients_by_role: Mapping[str, Sequence[str]],
      source: Any,
      class_pools: groups_lib.ClassPools | None = None,
      class_names: tuple[str, ...] | None = None,
      cache_bytes: int | None = None,
  ):
    """Use `from_corpus`, `few_round` or `from_client_data` instead."""
    if cache_bytes is None:
      cache_bytes = machine.cache_bytes()
    checks.check_count('cache_bytes', cache_bytes)
    self.name = name
    self.input_shape = tuple(input_shape)
    self.num_classes = num_classes
    self.seed = seed
    self.class_pools = class_pools
    self.class_names = class_names
    self._clients_by_role = {
        role: tuple(clients_by_role.get(role, ())) for role in corpus_lib.ROLES
    }
    self._batch_spec = collections.OrderedDict(
        x=tf.TensorSpec((None, *self.input_shape), tf.float32),
        y=tf.TensorSpec((None,), tf.int32),
    )
    self._all_ids = frozenset().union(*self._clients_by_role.values())
    self._source = source
    self._cache = _Cache(cache_bytes)

  def __getstate__(self) -> dict[str, Any]:
    """Returns what is pickled: all but what is in memory of clients."""
    return {k: v for k, v in self.__dict__.items() if k != '_cache'}

  def __setstate__(self, state: dict[str, Any]) -> None:
    """Begins with no client in memory, of which it may fill a quarter."""
    self.__dict__.update(state)
    self._cache = _Cache(machine.cache_bytes())

  def client_ids(self, role: str = 'meta_train') -> tuple[str, ...]:
    """Returns the ids of the clients of a role."""
    corpus_lib.check_role(role)
    return self._clients_by_role[role]

  def client(self, client_id: str) -> ClientExamples:
    """Returns what a client holds.

    Args:
      client_id: One of `client_ids`.

    Returns:
      Train, validation and test examples, x float32 [n, *input_shape] and y
      int32 [n]. They are cached, and NumPy refuses to write to them.

    Raises:
      ValueError: If there is no such client, it has nothing to train on though
        it is no meta-test client, its examples are not finite or not of this
        data set's shape or classes, or not the same as when they were read
        before.
    """
    return self._hold(client_id).examples

  def preprocess(self, x: np.ndarray) -> np.ndarray:
    """Returns raw examples as those of clients are preprocessed.

    Args:
      x: Of the dtype and shape that the data set has them in, [n, ...].

    Returns:
      float32 [n, *input_shape].

    Raises:
      ValueError: If they are of another dtype or shape.
    """
    found = self._source.preprocess(x)
    if found.shape[1:] != self.input_shape:
      raise ValueError(
          f'Expected examples of shape {self.input_shape}, found'
          f' {found.shape[1:]}.'
      )
    return found

  @property
  def raw_form(self) -> tuple[np.dtype, tuple[int, ...]] | None:
    """Dtype and shape of a raw example; None where only reading would tell."""
    return self._source.raw_form

  def is_cached(self, client_id: str) -> bool:
    """Returns whether a client is in memory, so that it need not be read."""
    return client_id in self._cache

  def num_examples(self, client_id: str, part: str = 'train') -> int:
    """Returns the number of examples of a part, without reading pixels."""
    self._check_client(client_id, part)
    return self._source.count(client_id, part)

  def salt(self, client_id: str) -> int:
    """Returns a number in 0..2**31-1 for the client's own randomness.

    It is the same on every machine and in every order of clients.
    """
    digest = hashlib.sha256(f'{self.seed}/{client_id}'.encode()).digest()
    return int.from_bytes(digest[:4], 'big') & 0x7FFFFFFF

  def tff_client_data(
      self, client_id: str, part: str = 'train'
  ) -> collections.OrderedDict[str, tf.data.Dataset]:
    """Returns what a TFF computation takes for this client.

    Args:
      client_id: One of `client_ids`.
      part: 'train', 'validation', 'test' or 'half_train'.

    Returns:
      `examples`: a data set of ONE element, the batch of all examples,
      OrderedDict(x=float32 [None, *input_shape], y=int32 [None]); `salt`: a
      data set of one int32. The same objects for as long as they are cached,
      which half a part is not.

    Raises:
      ValueError: As `client`.
    """
    self._check_client(client_id, part, (*PARTS, availability.HALF_TRAIN))
    held = self._hold(client_id)
    if part == availability.HALF_TRAIN:
      x, y = held.tensors.train
      return self._tff_data(client_id, x[::2], y[::2])
    if part not in held.tff_data:
      x, y = getattr(held.tensors, part)
      held.tff_data[part] = self._tff_data(client_id, x, y)
    return held.tff_data[part]

  def _tff_data(self, client_id, x, y):
    salt = tf.constant(self.salt(client_id), tf.int32)
    return collections.OrderedDict(
        examples=client_work.one_element_dataset(
            collections.OrderedDict(x=x, y=y), self._batch_spec
        ),
        salt=client_work.one_element_dataset(salt, tf.TensorSpec((), tf.int32)),
    )

  def named_client_data(
      self, client_id: str, part: str = 'train'
  ) -> collections.OrderedDict[str, NamedSequence]:
    """Returns the same by name; nothing is read before it is opened.

    Args:
      client_id: One of `client_ids`.
      part: 'train', 'validation', 'test' or 'half_train'.

    Returns:
      `examples` and `salt`.

    Raises:
      ValueError: If there is no such client or part.
    """
    self._check_client(client_id, part, (*PARTS, availability.HALF_TRAIN))
    return collections.OrderedDict(
        (field, NamedSequence(self, client_id, part, field))
        for field in ('examples', 'salt')
    )

  def fingerprint(self) -> str:
    """Returns 16 hex digits that change when clients or examples do.

    They depend on all pixels and labels, as they are when they are first read:
    of a corpus on all its examples, of ClientData on those of all clients here,
    which are read for it if they have not been. The images that class pools
    draw from are those of the corpus.

    Raises:
      ValueError: If a client cannot be read.
    """
    pools = self.class_pools
    facts = (
        self.name,
        self.input_shape,
        self.num_classes,
        self.seed,
        sorted(self._clients_by_role.items()),
        self._source.digest(sorted(self._all_ids)),
        pools and pools.digest(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

  def _check_client(self, client_id, part, parts=PARTS):
    if client_id not in self._all_ids:
      raise ValueError(
          f'Expected `client_id` to be a client of {self.name!r}, found'
          f' {client_id!r}. See `client_ids`.'
      )
    if part not in parts:
      raise ValueError(f'Expected `part` to be one of {parts}, found {part!r}.')

  def _hold(self, client_id):
    """Returns a client, from the cache or read and put there."""
    if client_id in self._cache:
      return self._cache[client_id]
    self._cache[client_id] = held = self._load(client_id)
    return held

  def _load(self, client_id):
    self._check_client(client_id, 'train')
    examples = self._source.load(client_id)
    trains = client_id not in self._clients_by_role['meta_test']
    if trains and not len(examples.train.y):
      raise ValueError(
          f'Expected client {client_id!r} of {self.name!r} to hold examples to'
          ' train on, found none.'
      )
    for part, (x, y) in zip(PARTS, examples, strict=True):
      where = f'the {part} examples of client {client_id!r} of {self.name!r}'
      if x.shape != (len(y), *self.input_shape) or x.dtype != np.float32:
        raise ValueError(
            f'Expected {where} to be float32 of shape'
            f' {(len(y), *self.input_shape)}, found {x.dtype} {x.shape}.'
        )
      if not np.isfinite(x).all():
        raise ValueError(
            f'Expected {where} to be finite, found NaN or infinity.'
        )
      if len(y) and not (0 <= y.min() and y.max() < self.num_classes):
        raise ValueError(
            f'Expected the labels of {where} in 0..{self.num_classes - 1},'
            f' found {y.min()}..{y.max()}.'
        )
    known = self._cache.digests.get(client_id)
    if known and client_sources.examples_digest(examples) != known:
      raise ValueError(
          f'Expected client {client_id!r} of {self.name!r} to hold the same'
          ' examples in the same order when it is read twice, found others when'
          ' it was read again. Tip: nothing may change the arrays or files of a'
          ' data set that is in use.'
      )
    return _to_held(examples)

  @classmethod
  def from_corpus(
      cls,
      corpus: corpus_lib.Corpus,
      partition: Callable[[np.ndarray, int, int], partitioners.Partition],
      num_clients: int,
      seed: int,
      *,
      partition_by: str = 'label',
      validation_fraction: float = 0.0,
      test_fraction: float | None = None,
      stratify: bool = False,
      num_validation_clients: int = 0,
      num_test_clients: int = 0,
      new_clients: Literal['held_out', 'redealt'] = 'held_out',
      cache_bytes: int | None = None,
  ) -> FederatedDataset:
    """Deals a corpus to clients.

    With a `test_fraction` train and test part are pooled and dealt together;
    then every client's own examples are split at random. Without one, the train
    part is dealt and the published test part follows it: of the test examples
    of a class a client gets the share, to within one example, that it has of
    the training examples of the class, so that none is tested on a class that
    it did not train on (pFedHN, FedRep and MetaVers do so by partitioning both
    parts with the same seed). Validation examples are drawn from the train part
    beforehand and dealt like test examples. By writer, a client gets what its
    writer has in the test part, and validates on a share of its own.

    Two examples with the same pixels are two examples: one may be trained on
    and the other be tested on, so that a corpus with duplicates leaks.

    Args:
      corpus: The examples.
      partition: One of `partitioners`, its options bound.
      num_clients: Number of clients, all roles together.
      seed: Source of all randomness, non-negative.
      partition_by: What `partition` gets to see of every example: 'label',
        'rotation' (with `partitioners.by_group`) or 'writer' (with
        `by_writer`). Of a test part without `test_writers` nothing is dealt by
        writer.
      validation_fraction: Share of validation examples.
      test_fraction: Share of each client's test examples, or None.
      stratify: Whether to split off the `test_fraction` class by class.
      num_validation_clients: How many clients, at random, are held out as
        meta-validation clients.
      num_test_clients: How many meta-test clients there are.
      new_clients: What meta-test clients are: training clients `'held_out'`, or
        further ones that hold the test parts of all the others `'redealt'`.
        The latter have no train part: all of it is `test`, and no client has
        the classes of one that trains. See `client_sources.deal_tests_again`.
      cache_bytes: Most bytes of preprocessed examples to keep; None for a
        quarter of the machine's memory.

    Returns:
      The clients.

    Raises:
      TypeError: If a number is no whole number, or no number.
      ValueError: If the partition is impossible or returns rows that are none,
        a client gets no training examples, the test part has a writer that the
        train part has not, or there is no way to deal new clients.
    """
    config_checks.check_seed(seed)
    checks.check_count('num_clients', num_clients, 1)
    if new_clients not in NEW_CLIENTS:
      raise ValueError(
          f'Expected `new_clients` to be one of {NEW_CLIENTS}, found'
          f' {new_clients!r}.'
      )
    clients = client_sources.deal_corpus(
        corpus,
        partition,
        num_clients,
        seed,
        partition_by=partition_by,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        stratify=stratify,
    )
    redealt: Mapping[str, client_sources.ClientRows] = {}
    if new_clients == 'redealt':
      redealt = client_sources.deal_tests_again(
          corpus, clients, num_test_clients, seed
      )
      num_test_clients = 0
    clients_by_role = _hold_out(
        list(clients), num_validation_clients, num_test_clients, seed
    )
    if redealt:
      clients_by_role['meta_test'] = list(redealt)
    return cls(
        name=corpus.name,
        input_shape=corpus.input_shape,
        num_classes=corpus.num_classes,
        seed=seed,
        clients_by_role=clients_by_role,
        source=client_sources.CorpusSource(corpus, {**clients, **redealt}),
        class_names=corpus.class_names,
        cache_bytes=cache_bytes,
    )

  @classmethod
  def few_round(
      cls,
      corpus: corpus_lib.Corpus,
      num_clients: int,
      seed: int,
      *,
      examples_per_class: int | None = None,
      cache_bytes: int | None = None,
  ) -> FederatedDataset:
    """Deals the meta-train classes as FRL's preparation does.

    Train and test part are pooled; the meta-train classes become labels
    0..C-1 and are dealt by `partitioners.class_shards`: 2 * num_clients / C
    shards a class, two random shards a client. All of it is in `train`: FRL
    splits into support and query anew in every episode. The classes of all
    roles are in `class_pools`, to draw groups from.

    Args:
      corpus: Examples with a `class_split`.
      num_clients: N; 2N must be a multiple of the number of meta-train classes.
      seed: Source of the shards, non-negative.
      examples_per_class: Keeps the first so many images of every class, or all
        (None).
      cache_bytes: Most bytes of preprocessed examples to keep; None for a
        quarter of the machine's memory.

    Returns:
      The clients, all of them meta-train clients.

    Raises:
      ValueError: If there is no class split, 2N is no multiple of the number of
        meta-train classes, or there are too few images.

    Source: Park et al., Few-Round Learning for Federated Learning, NeurIPS
      2021, section 4.
    """
    config_checks.check_seed(seed)
    pools = groups_lib.ClassPools(corpus, examples_per_class)
    classes = pools.classes('meta_train')
    rows = np.concatenate([pools.rows(label) for label in classes])
    dealt = partitioners.class_shards(
        corpus.pooled_labels[rows], num_clients, seed
    )
    none = rows[:0]
    clients = client_sources.name_clients(
        [client_sources.ClientRows(rows[k], none, none) for k in dealt],
        corpus.name,
    )
    return cls(
        name=corpus.name,
        input_shape=corpus.input_shape,
        num_classes=len(classes),
        seed=seed,
        clients_by_role={'meta_train': list(clients)},
        source=client_sources.CorpusSource(corpus, clients, classes),
        class_pools=pools,
        class_names=corpus.class_names
        and tuple(corpus.class_names[label] for label in classes),
        cache_bytes=cache_bytes,
    )

  @classmethod
  def from_client_data(
      cls,
      train: Any,
      test: Any | None = None,
      *,
      name: str,
      num_classes: int,
      seed: int,
      num_clients: int | None = None,
      x_key: str = 'pixels',
      y_key: str = 'label',
      add_channel_axis: bool = False,
      preprocess: corpus_lib.Preprocess = np.float32,
      validation_fraction: float = 0.0,
      test_fraction: float | None = None,
      num_validation_clients: int = 0,
      num_test_clients: int = 0,
      cache_bytes: int | None = None,
  ) -> FederatedDataset:
    """Takes clients as they are from `tff.simulation.datasets.ClientData`.

    The examples of a client are split by their position. So they have to be the
    same, in the same order, whenever they are read: each client is read twice
    the first time, and held against that whenever it is read again. A data set
    that repeats examples (`Dataset.repeat`) is the same when read twice, but
    may train on one copy and be tested on another: leave it out.

    Args:
      train: ClientData whose elements are mappings with one example each, such
        as TFF's emnist and cifar100, or `sqlite_client_data`.
      test: ClientData with test examples of the same clients, or None. Clients
        of `train` that it lacks have no test examples; one that `train` lacks
        is refused, and so is one that has the same examples in both.
      name: Name of the data set.
      num_classes: Labels are 0..num_classes-1.
      seed: Source of all randomness, non-negative.
      num_clients: How many clients to choose at random; None takes all.
      x_key: Key of the pixels ('image' in cifar100).
      y_key: Key of the label.
      add_channel_axis: Whether to turn [height, width] into [height, width, 1].
      preprocess: Turns a batch of pixels, as they are, into float32 network
        input, row by row. The default only makes them float32 and scales
        nothing.
      validation_fraction: Share of each client's train examples that validate.
      test_fraction: Without `test`: share of each client's train examples that
        test.
      num_validation_clients: As for `from_corpus`.
      num_test_clients: As for `from_corpus`.
      cache_bytes: Most bytes of preprocessed examples to keep; None for a
        quarter of the machine's memory.

    Returns:
      The clients.

    Raises:
      TypeError: If a number is no whole number, or no number, or `train` or
        `test` no ClientData.
      ValueError: If there are too few clients, both `test` and `test_fraction`
        are given, `test` has a client that `train` has not, or what the first
        client holds is not one example an element with these keys, labels
        0..num_classes-1 and finite pixels, or not the same when it is read
        twice. Other clients are read, and refused, when they are used.
    """
    config_checks.check_seed(seed)
    checks.check_count('num_classes', num_classes, 1)
    client_sources.check_fractions(validation_fraction, test_fraction)
    if test is not None and test_fraction is not None:
      raise ValueError(
          'Expected `test_fraction` to be None where `test` examples are given,'
          f' found {test_fraction}.'
      )
    source = client_sources.ClientDataSource(
        train,
        test,
        name=name,
        num_classes=num_classes,
        seed=seed,
        x_key=x_key,
        y_key=y_key,
        add_channel_axis=add_channel_axis,
        preprocess=preprocess,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction or 0.0,
    )
    ids = list(source.ids)
    if num_clients is not None:
      checks.check_count('num_clients', num_clients)
      if not 1 <= num_clients <= len(ids):
        raise ValueError(
            'Expected `num_clients` to be between 1 and the number of clients'
            f' of {name!r}, {len(ids)}, found {num_clients}.'
        )
      rng = np.random.default_rng([seed, 1])
      ids = sorted(ids[i] for i in rng.permutation(len(ids))[:num_clients])
    return cls(
        name=name,
        input_shape=source.load(ids[0]).train.x.shape[1:],
        num_classes=num_classes,
        seed=seed,
        clients_by_role=_hold_out(
            ids, num_validation_clients, num_test_clients, seed
        ),
        source=source,
        cache_bytes=cache_bytes,
    )


def sqlite_client_data(
    path: str, split_name: str, image_shape: tuple[int, ...]
) -> Any:
  """Opens an SQLite file with TFF's schema as ClientData.

  Args:
    path: File with the tables `examples` and `client_metadata`; an example is a
      serialized tf.train.Example with float `pixels` and an integer `label`, as
      in TFF's fed_emnist.
    split_name: 'train' or 'test'.
    image_shape: Shape of the pixels of one example, (28, 28) for EMNIST.

  Returns:
    A `tff.simulation.datasets.ClientData` with elements
    OrderedDict(pixels=float32 image_shape, label=int32 []).

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If the file has no clients in this split.
  """
  # TFF takes seconds to import and most data sets do without it.
  import tensorflow_federated as tff  # pylint: disable=g-import-not-at-top

  if not tf.io.gfile.exists(path):
    raise FileNotFoundError(f'Expected an SQLite file, found none at {path}.')
  features = {
      'pixels': tf.io.FixedLenFeature(image_shape, tf.float32),
      'label': tf.io.FixedLenFeature((), tf.int64),
  }

  def parse(serialized):
    example = tf.io.parse_single_example(serialized, features)
    label = example['label']
    in_range = tf.debugging.assert_equal(
        tf.cast(tf.cast(label, tf.int32), tf.int64),
        label,
        'Expected labels in the range of int32.',
    )
    with tf.control_dependencies([in_range]):
      label = tf.cast(label, tf.int32)
    return collections.OrderedDict(pixels=example['pixels'], label=label)

  client_data = tff.simulation.datasets.SqlClientData(path, split_name)
  if not client_data.client_ids:
    raise ValueError(
        f'Expected {path} to hold clients with the split name'
        f' {split_name!r}, found none.'
    )
  return client_data.preprocess(lambda dataset: dataset.map(parse))


def _to_held(examples):
  """Copies a client's examples into memory that TensorFlow and NumPy share."""
  with tf.device('/device:CPU:0'):
    tensors = tf.nest.map_structure(tf.constant, examples)
  # NumPy's arrays are views of tensors; the reverse, TensorFlow copies.
  return _HeldClient(tensors, tf.nest.map_structure(np.asarray, tensors), {})


def _hold_out(ids, num_validation_clients, num_test_clients, seed):
  """Returns role -> client ids, the held-out ones chosen at random."""
  counts = (num_test_clients, num_validation_clients)
  checks.check_count('num_test_clients', num_test_clients)
  checks.check_count('num_validation_clients', num_validation_clients)
  if min(counts) < 0 or sum(counts) >= len(ids):
    raise ValueError(
        'Expected `num_validation_clients` and `num_test_clients` to be at'
        f' least 0 and to leave some of the {len(ids)} clients for'
        f' meta-training, found {num_validation_clients} and'
        f' {num_test_clients}.'
    )
  # Of numbers: NumPy cuts zero bytes off the end of strings.
  numbers = np.random.default_rng([seed, 0]).permutation(len(ids))
  order = [ids[i] for i in numbers]
  bounds = (counts[0], sum(counts))
  return {
      'meta_test': sorted(order[: bounds[0]]),
      'meta_validation': sorted(order[bounds[0] : bounds[1]]),
      'meta_train': sorted(order[bounds[1] :]),
  }
