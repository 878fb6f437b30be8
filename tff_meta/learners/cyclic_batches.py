"""Minibatches of an endless stream, and prediction batch by batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tff_meta import episodes

_LABELS = tf.TensorSpec([None], tf.int32)


def cyclic_minibatches(
    num_examples: int | tf.Tensor,
    batch_size: int,
    num_batches: int,
    seed: tf.Tensor,
    start: int | tf.Tensor = 0,
) -> episodes.Minibatches:
  """Takes the next minibatches of a stream without end.

  The examples are shuffled once, cut into floor(n / b) whole batches (what is
  left over is dropped), and traversed in that order again and again. With fewer
  than b examples all of them are the only batch.

  Args:
    num_examples: int32 scalar, n.
    batch_size: b, at least 1.
    num_batches: How many to take, at least 0.
    seed: int32 [2]; decides the order. The same seed is the same stream.
    start: int32 scalar, number of the first batch to take.

  Returns:
    `num_batches` minibatches of min(b, n) examples, all whole.

  Raises:
    ValueError: `batch_size` or `num_batches` is out of range.

  Source: the data loaders in the released code of CAFeMe (Vettoruzzo et al.
  2023).
  """
  if batch_size < 1 or num_batches < 0:
    raise ValueError(
        'Expected `batch_size` of at least 1 and `num_batches` of at least 0,'
        f' found {batch_size} and {num_batches}.'
    )
  num_examples = tf.convert_to_tensor(num_examples, tf.int32)
  length = tf.minimum(num_examples, batch_size)
  in_a_cycle = tf.maximum(num_examples // batch_size, 1)
  order = episodes.minibatches(num_examples, None, seed).indices
  order = tf.reshape(order, [-1])[: in_a_cycle * length]
  cycle = tf.reshape(order, [in_a_cycle, length])
  numbers = start + tf.range(num_batches)
  indices = tf.gather(cycle, numbers % in_a_cycle)
  return episodes.Minibatches(
      indices,
      tf.fill([num_batches, 1], length),
      episodes.batch_seeds(seed, numbers),
  )


class SupportAndQuery(NamedTuple):
  """Batches of support and query examples.

  Attributes:
    examples: The examples that support batches are taken from.
    support: Which of them form which batch, `Minibatches`.
    query: The query batches in one, `Examples`.
  """

  examples: episodes.Examples
  support: episodes.Minibatches
  query: episodes.Examples


def support_and_query(
    examples: episodes.Examples,
    batch_size: int,
    *,
    num_support: int,
    num_query: int,
    support_fraction: float | None,
    split_seed: tf.Tensor,
    order_seed: tf.Tensor,
    num_rounds: int | tf.Tensor = 0,
) -> SupportAndQuery:
  """Takes a client's batches of a round, see `cyclic_minibatches`.

  Args:
    examples: All examples of the client, none of them padding.
    batch_size: Examples of a batch, at least 1.
    num_support: Support batches, at least 0.
    num_query: Query batches, at least 0.
    support_fraction: Share of the examples that is for support alone, the
      others being for query; None takes the query batches from the one stream
      of all examples, behind the support batches.
    split_seed: int32 `[2]`, of that split.
    order_seed: int32 `[2]`, of the order of the batches.
    num_rounds: int32 scalar, rounds that have taken batches from this order.

  Returns:
    The batches.

  Source: Vettoruzzo et al. 2023, CAFeMe (two sets), and its released code (one
  stream).
  """

  def stream(examples, seed, num_batches):
    return cyclic_minibatches(
        tf.size(examples.y),
        batch_size,
        num_batches,
        seed,
        num_rounds * num_batches,
    )

  if support_fraction is None:
    pool, query_pool = examples, examples
    batches = stream(examples, order_seed, num_support + num_query)
    support = episodes.Minibatches(*(part[:num_support] for part in batches))
    query = episodes.Minibatches(*(part[num_support:] for part in batches))
  else:
    fold_in = tf.random.experimental.stateless_fold_in
    pool, query_pool = episodes.split_support_query(
        examples, support_fraction, split_seed
    )
    support = stream(pool, fold_in(order_seed, 0), num_support)
    query = stream(query_pool, fold_in(order_seed, 1), num_query)
  return SupportAndQuery(pool, support, episodes.take_all(query_pool, query))


def predict_in_batches(
    predict: Callable[[Any, episodes.Examples], tf.Tensor],
    adapted: Any,
    query: episodes.Examples,
    batch_size: int,
    spec: tf.TensorSpec = _LABELS,
) -> tf.Tensor:
  """Predicts batch by batch, for networks whose examples see each other.

  Batch normalisation by the statistics of the batch, and a context that is the
  batch itself, make a prediction depend on how many and which examples come
  with it. The m examples form ceil(m / b) batches of nearly equal size, example
  i in batch i mod ceil(m / b), so that no batch is of one class only because
  the examples lie in the order of their classes, and none is a small rest.

  Args:
    predict: `(adapted, batch) -> labels`, int32 [n], or what else `spec` says,
      such as scores, [n, C]; padding may be in a batch.
    adapted: What the client has adapted to, any structure.
    query: Q examples, of which m are no padding.
    batch_size: b, at least 1, the size to train with.
    spec: Of what is predicted for a batch.

  Returns:
    int32 [Q], labels, or [Q, ...] of that; 0 for padding.

  Source: released code of CAFeMe, which tests in batches of the training size
  (it drops a last batch of a single example; ours are formed otherwise).
  """
  rows = tf.where(query.mask > 0)[:, 0]
  num_rows = tf.size(rows, tf.int64)
  num_batches = tf.maximum(-(-num_rows // batch_size), 1)
  length = -(-num_rows // num_batches)
  padding = num_batches * length - num_rows
  padded = tf.pad(rows, [[0, padding]])
  indices = tf.transpose(tf.reshape(padded, [length, num_batches]))
  mask = tf.pad(tf.ones_like(rows, tf.float32), [[0, padding]])
  mask = tf.transpose(tf.reshape(mask, [length, num_batches]))

  def predict_batch(batch):
    batch_indices, batch_mask = batch
    examples = episodes.Examples(
        tf.gather(query.x, batch_indices),
        tf.gather(query.y, batch_indices),
        batch_mask,
    )
    return predict(adapted, examples)

  answers = tf.map_fn(predict_batch, (indices, mask), fn_output_signature=spec)
  place_first = [1, 0, *range(2, answers.shape.rank)]
  of_one = tf.shape(answers, tf.int64)[2:]
  answers = tf.reshape(
      tf.transpose(answers, place_first), tf.concat([[-1], of_one], 0)
  )
  return tf.scatter_nd(
      rows[:, tf.newaxis],
      answers[:num_rows],
      tf.concat([[tf.size(query.y, tf.int64)], of_one], 0),
  )
