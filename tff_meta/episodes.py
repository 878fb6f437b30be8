"""Client data as dense tensors: examples, minibatches, support and query."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# Apart from the seeds that algorithms make of the same one.
_VIEWS = 0x51A7


class Examples(NamedTuple):
  """Labelled examples, some of which may be padding.

  Attributes:
    x: [n, ...], float.
    y: int32 [n], labels.
    mask: float32 [n], 1 for an example and 0 for padding.
    augment: `(x, seed) -> x`, how `take` and `augmented` vary the examples that
      they hand out; `()` if they hand them out as they are.
  """

  x: tf.Tensor
  y: tf.Tensor
  mask: tf.Tensor
  augment: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | tuple[()] = ()


class Minibatches(NamedTuple):
  """Which examples form which minibatch.

  Attributes:
    indices: int32 [num_batches, batch_size], rows of the examples.
    sizes: int32 [num_batches, 1], how many of them a batch really has; behind
      these it is filled up.
    seeds: int32 [num_batches, 2], of how the examples of a batch are augmented.
  """

  indices: tf.Tensor
  sizes: tf.Tensor
  seeds: tf.Tensor


def to_examples(dataset: tf.data.Dataset) -> Examples:
  """Makes a client's data set dense.

  Args:
    dataset: Batches `OrderedDict(x=[b, ...], y=[b])` of any sizes. Fastest with
      one batch; an empty data set gives n = 0.

  Returns:
    All examples in order, none of them padding.
  """
  spec = dataset.element_spec['x']
  x_dtype = spec.dtype if spec.dtype.is_floating else tf.float32
  empty = (
      tf.zeros([0, *spec.shape[1:]], x_dtype),
      tf.zeros([0], tf.int32),
  )

  @tf.autograph.experimental.do_not_convert  # Which takes longer than tracing.
  def append(state, batch):
    batch = tf.cast(batch['x'], x_dtype), tf.cast(batch['y'], tf.int32)
    # As it is: if it is the only one, its memory is shared instead of copied.
    return tf.cond(
        tf.equal(tf.size(state[1]), 0),
        lambda: batch,
        lambda: tuple(
            tf.concat(parts, 0) for parts in zip(state, batch, strict=True)
        ),
    )

  x, y = dataset.reduce(empty, append)
  return Examples(x, y, tf.ones(tf.shape(y), tf.float32))


def to_salt(dataset: tf.data.Dataset) -> tf.Tensor:
  """The int32 scalar in a data set of at most one; 0 when it is empty."""

  @tf.autograph.experimental.do_not_convert
  def last(_, salt):
    return salt

  return dataset.reduce(tf.constant(0), last)


def labels_fit(examples: Examples, num_classes: int) -> tf.Tensor:
  """Whether all labels are in 0..num_classes-1, a boolean scalar.

  Args:
    examples: The examples; padding is looked at, too.
    num_classes: C.
  """
  return tf.reduce_all((examples.y >= 0) & (examples.y < num_classes))


def refuse_bad_labels(examples: Examples, num_classes: int) -> Examples:
  """The examples; computing them fails if a label is not in 0..num_classes-1.

  Args:
    examples: Of any number of leading axes; padding is not looked at.
    num_classes: C.

  Returns:
    The same examples. Where a label is out of range there is an
    `InvalidArgumentError` when they are used.
  """
  y = examples.y
  bad = (examples.mask > 0) & ((y < 0) | (y >= num_classes))
  message = f'Expected labels in 0..{num_classes - 1}, found'
  check = tf.debugging.Assert(
      ~tf.reduce_any(bad), [message, tf.boolean_mask(y, bad)]
  )
  with tf.control_dependencies([check] if check is not None else []):
    return examples._replace(y=tf.identity(y))


def all_or_none(examples: Examples, condition: tf.Tensor) -> Examples:
  """All of the examples if a boolean scalar is true, none of them otherwise."""
  num_kept = tf.where(condition, tf.size(examples.y), 0)
  x, y, mask = (part[:num_kept] for part in examples[:3])
  return examples._replace(x=x, y=y, mask=mask)


def drop_padding(examples: Examples) -> Examples:
  """Keeps the examples and drops the padding; the order stays."""
  return _gather(examples, tf.where(examples.mask > 0)[:, 0])


def split_support_query(
    examples: Examples,
    fraction: float,
    seed: tf.Tensor,
    num_classes: int | None = None,
) -> tuple[Examples, Examples]:
  """Splits at random; floor(fraction * n) examples become support.

  Args:
    examples: The examples; padding goes to neither side.
    fraction: The part that becomes support, in [0, 1].
    seed: int32 [2].
    num_classes: None splits all examples together; a number splits every class
      0..num_classes-1 by itself: floor(fraction * n_c) of class c are support.

  Returns:
    Support and query, disjoint, together all examples, none of them padding.

  Raises:
    ValueError: `fraction` is not in [0, 1].
  """
  if not 0.0 <= fraction <= 1.0:
    raise ValueError(
        f'Expected `fraction` to be in [0, 1], found {fraction}. It is the part'
        ' of the examples that becomes the support set.'
    )
  examples = drop_padding(examples)
  order = _permutations(1, tf.size(examples.y), seed)[0]
  y = tf.gather(examples.y, order)
  if num_classes is None:
    num_classes, y = 1, tf.zeros_like(y)
  member = tf.one_hot(y, num_classes, dtype=tf.int32)  # [n, C].
  rank = _rank_in_class(member)
  class_size = tf.reduce_sum(member * tf.reduce_sum(member, 0), 1)
  # 1e-9: 0.29 * 100 is 28.999999999999996 in float64 and means 29.
  num_support = tf.floor(fraction * tf.cast(class_size, tf.float64) + 1e-9)
  is_support = rank < tf.cast(num_support, tf.int32)
  return (
      _gather(examples, tf.boolean_mask(order, is_support)),
      _gather(examples, tf.boolean_mask(order, ~is_support)),
  )


def n_way_k_shot(
    examples: Examples,
    num_classes: int,
    seed: tf.Tensor,
    *,
    ways: int,
    shots: int,
    queries: int,
    max_examples: int,
) -> tuple[Examples, Examples]:
  """Draws an episode: K support and Q query examples of each of N classes.

  Classes with fewer than K examples take no part. Where a chosen class has
  fewer than K + Q, all examples of the chosen classes are dealt instead (at
  most `max_examples` of them, at random): K of each to support and the others
  to query; but where these are more than (K + Q) * N, a class still gives at
  most K + Q.

  Args:
    examples: The client's examples; padding takes no part.
    num_classes: C, labels are in 0..C-1.
    seed: int32 [2].
    ways: N, the classes drawn; 0, or more than there are, means all.
    shots: K, at least 1.
    queries: Q; 0 means all that are left, of every class.
    max_examples: The most that are dealt where they are dealt whole; 0 means no
      limit.

  Returns:
    Support and query, disjoint, without padding; both empty where no class has
    K examples.

  Raises:
    ValueError: `shots` is out of range.

  Source: the released code of MetaVers (Lim et al., WACV 2024); the paper has
  its algorithm in a supplement, which was not available.
  """
  if shots < 1:
    raise ValueError(f'Expected `shots` to be at least 1, found {shots}.')
  examples = drop_padding(examples)
  way_seed, order_seed = tf.unstack(
      tf.random.experimental.stateless_split(seed)
  )
  order = _permutations(1, tf.size(examples.y), order_seed)[0]
  member = tf.one_hot(tf.gather(examples.y, order), num_classes, dtype=tf.int32)
  sizes = tf.reduce_sum(member, 0)  # [C].
  chosen = _choose(sizes >= shots, ways or num_classes, way_seed)
  member *= tf.cast(chosen, tf.int32)
  dealt_whole = tf.reduce_any(chosen & (sizes < shots + queries))
  if not queries:
    dealt_whole = tf.constant(True)
  if max_examples:
    used = tf.reduce_sum(member, 1)
    beyond = tf.cumsum(used, exclusive=True) >= max_examples
    member *= tf.cast(~(dealt_whole & beyond), tf.int32)[:, tf.newaxis]
  sizes = tf.reduce_sum(member, 0)
  member *= tf.cast(sizes >= shots, tf.int32)  # Of those that were cut.
  rank, used = _rank_in_class(member), tf.reduce_sum(member, 1) > 0
  is_support = used & (rank < shots)
  is_query = used & (rank >= shots)
  if queries:
    num_ways = tf.reduce_sum(tf.cast(sizes >= shots, tf.int32))
    plenty = tf.reduce_sum(member) > (shots + queries) * num_ways
    is_query &= (rank < shots + queries) | (dealt_whole & ~plenty)
  return (
      _gather(examples, tf.boolean_mask(order, is_support)),
      _gather(examples, tf.boolean_mask(order, is_query)),
  )


def what_is_missing(
    class_sizes: np.ndarray,
    shots: int,
    queries: int,
    *,
    ways: int,
    max_examples: int,
    needs_query: bool,
) -> str | None:
  """Returns what a client lacks for an episode from which anything is learned.

  Args:
    class_sizes: Numbers of its training examples by class, int [C].
    shots: K, see `n_way_k_shot`.
    queries: Q.
    ways: N, not 1; 0 means all.
    max_examples: The most that are dealt where they are dealt whole, which a
      configuration has as `max_whole_examples`; 0 means no limit.
    needs_query: Whether one of the classes needs an example more.

  Returns:
    What an episode takes, and what the client has; None if it lacks nothing.
  """
  enough = class_sizes[class_sizes >= shots]
  has_query = not needs_query or np.any(enough > shots)
  num_ways = min(ways or len(enough), len(enough))
  least = 2 * shots + needs_query
  # Of classes that all have K + Q nothing is dealt whole, nor cut.
  has_plenty = queries > 0 and np.sum(enough >= shots + queries) >= num_ways
  is_left = has_plenty or not max_examples or max_examples >= least
  if len(enough) > 1 and has_query and is_left:
    return None
  more = ', one of them with a query example more' if needs_query else ''
  largest = np.max(class_sizes, initial=0)
  found = (
      f'of classes with {shots} or more the client has {len(enough)}, and of'
      f' its largest class {largest} examples'
  )
  takes = (
      f'an episode takes two classes with `shots` ({shots}) examples at least'
      f'{more}'
  )
  whole = 'all that the client has of its classes'
  if max_examples:
    whole += f', `max_whole_examples` ({max_examples}) at most'
  if not is_left:
    return f'{takes}, {least} in all, but of {whole}; {found}'
  if not queries:
    return f'{takes}, and deals {whole}; {found}'
  return (
      f'{takes}, and `queries` ({queries}) more of each or, where a class has'
      f' fewer, {whole}; {found}'
  )


def join(
    support: Examples, query: Examples
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Joins the examples of an episode, to be embedded as one batch.

  Args:
    support: s examples, none of them padding.
    query: q examples, none of them padding.

  Returns:
    x [s + q, ...], y int32 [s + q], and float32 [s + q], 1 for support and 0
    for query.
  """
  return (
      tf.concat([support.x, query.x], 0),
      tf.concat([support.y, query.y], 0),
      tf.concat([support.mask, tf.zeros_like(query.mask)], 0),
  )


def minibatches(
    num_examples: int | tf.Tensor,
    batch_size: int | None,
    seed: tf.Tensor,
    num_epochs: int = 1,
    shuffle: bool = True,
) -> Minibatches:
  """Lays out epochs of minibatches; the last one of an epoch may be short.

  Args:
    num_examples: int32 scalar, n.
    batch_size: b, at least 1; None means one batch of all examples.
    seed: int32 [2].
    num_epochs: The number of passes, each with its own order.
    shuffle: False keeps the order of the examples.

  Returns:
    num_epochs * ceil(n / b) minibatches of min(b, n) places; index 0 fills a
    short one. All have seeds of their own.

  Raises:
    ValueError: `batch_size` or `num_epochs` is out of range.
  """
  if batch_size is not None and batch_size < 1:
    raise ValueError(
        f'Expected `batch_size` to be at least 1, found {batch_size}. None'
        ' means one batch of all examples.'
    )
  if num_epochs < 0:
    raise ValueError(
        f'Expected `num_epochs` to be at least 0, found {num_epochs}.'
    )
  num_examples = tf.convert_to_tensor(num_examples, tf.int32)
  # Larger batches would be padding, and take the memory of it.
  all_examples = tf.maximum(num_examples, 1)
  batch_size = tf.minimum(batch_size or all_examples, all_examples)
  if shuffle:
    order = _permutations(num_epochs, num_examples, seed)
  else:
    order = tf.tile(tf.range(num_examples)[tf.newaxis], [num_epochs, 1])
  num_batches = -(-num_examples // batch_size)
  padding = num_batches * batch_size - num_examples
  padded = tf.pad(order, [[0, 0], [0, padding]])
  indices = tf.reshape(padded, [num_epochs * num_batches, batch_size])
  starts = tf.range(num_batches) * batch_size
  sizes = tf.minimum(num_examples - starts, batch_size)
  sizes = tf.tile(sizes[:, tf.newaxis], [num_epochs, 1])
  seeds = batch_seeds(seed, tf.range(num_epochs * num_batches))
  return Minibatches(indices, sizes, seeds)


def batch_seeds(seed: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
  """The `seeds` of `Minibatches`.

  Args:
    seed: int32 [2], of all minibatches.
    numbers: int32 [k], which of them.

  Returns:
    int32 [k, 2].
  """
  own = tf.random.experimental.stateless_fold_in(seed, _VIEWS)
  key = tf.random.stateless_uniform([], own, None, None, tf.int32)
  return tf.stack([tf.fill(tf.shape(numbers), key), numbers], 1)


def take(examples: Examples, batches: Minibatches, i: tf.Tensor) -> Examples:
  """One minibatch, without the rows that only fill it up.

  A short minibatch is cut rather than padded: convolutions over padding cost as
  much as over examples (a client with 4 examples and a batch size of 60 would
  pay 15 times).

  Args:
    examples: Where to take from.
    batches: Minibatches of b.
    i: int32 scalar, which of them.

  Returns:
    The rows, at most b, augmented where the examples are to be; rows that are
    padding in `examples` stay padding.
  """
  # Few operations: of a small step they are most of the time.
  size = tf.gather(batches.sizes, i)
  rows = tf.slice(tf.gather(batches.indices, i), [0], size)
  return _augment(_gather(examples, rows), batches.seeds[i])


def take_all(examples: Examples, batches: Minibatches) -> Examples:
  """All minibatches in one, see `take`."""
  width = tf.shape(batches.indices)[1]
  used = tf.sequence_mask(batches.sizes[:, 0], width)
  rows = tf.boolean_mask(batches.indices, used)
  return _augment(_gather(examples, rows), tf.reduce_sum(batches.seeds, 0))


def augmented(examples: Examples, seed: tf.Tensor) -> Examples:
  """All examples, augmented here and now where they are to be.

  For algorithms that take the examples of an episode whole; what is taken from
  the result later stays as it is.

  Args:
    examples: The examples.
    seed: int32 [2]; may be that of the episode's split.

  Returns:
    As many examples, in the same order.
  """
  own = tf.random.experimental.stateless_fold_in(seed, _VIEWS)
  return _augment(examples, own)


def _augment(examples, seed):
  if not examples.augment:
    return examples
  x = examples.augment(examples.x, seed)
  return examples._replace(x=tf.ensure_shape(x, examples.x.shape), augment=())


def _gather(examples, indices):
  x, y, mask = (tf.gather(part, indices) for part in examples[:3])
  return examples._replace(x=x, y=y, mask=mask)


def _rank_in_class(member):
  """How many rows of its class come before a row, int32 [n]; member [n, C]."""
  return tf.reduce_sum(member * tf.cumsum(member, 0, exclusive=True), 1)


def _choose(eligible, num_chosen, seed):
  """Keeps at most `num_chosen` of the true entries of `eligible` [C]."""
  keys = tf.random.stateless_uniform(tf.shape(eligible), seed)
  keys = tf.where(eligible, keys, 2.0)  # Behind all others.
  rank = tf.argsort(tf.argsort(keys, stable=True), stable=True)
  return eligible & (rank < num_chosen)


def _permutations(num_permutations, num_examples, seed):
  """Independent permutations of 0..n-1, int32 [num_permutations, n]."""
  keys = tf.random.stateless_uniform([num_permutations, num_examples], seed)
  return tf.argsort(keys, stable=True)
