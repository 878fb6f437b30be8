"""A use of a trained model as a computation, as programs evaluate it."""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta.client_works import client_work
from tff_meta.learners import personalizer as personalizer_lib


def build_evaluation(
    personalizer: personalizer_lib.ClientPersonalizer,
    weights_type: tff.Type,
    input_shape: tuple[int, ...],
    *,
    seed: int = 0,
    secure: bool = False,
) -> tff.Computation:
  """Returns how accurate clients are after they have adapted.

  Args:
    personalizer: Of a new client, which needs nothing that others have kept.
    weights_type: Unplaced type of the model's weights.
    input_shape: Of an example.
    seed: Of the draws of adaptation.
    secure: Whether the counts are summed by secure sums.

  Returns:
    `(weights at SERVER, data at CLIENTS) -> metrics at SERVER`. A client holds
    `support` and `query`, sequences of batches `<x, y>` in any sizes, and
    `salt`. The metrics are `accuracy`, of all queries, and `num_examples` and
    `num_clients`, float32; the accuracy is NaN without a query.

  Raises:
    ValueError: If the personalizer begins with what known clients have kept.
  """
  if personalizer.uses_bank:
    raise ValueError(
        'Expected a personalizer that needs nothing of known clients, found one'
        ' that begins with what they have kept for themselves.'
    )
  data_kind = client_work.client_data_type(input_shape)
  data_type = tff.to_type(
      collections.OrderedDict(
          support=data_kind.examples,
          query=data_kind.examples,
          salt=data_kind.salt,
      )
  )

  @tff.tensorflow.computation(weights_type, data_type)
  def of_client(weights, data):
    support, query = map(episodes.to_examples, (data['support'], data['query']))
    own_seed = tf.random.experimental.stateless_fold_in(
        tf.constant([3, seed]), episodes.to_salt(data['salt'])
    )
    adapted = personalizer.adapt(weights, (), support, own_seed)
    labels = personalizer.predict(adapted, query)
    right = tf.cast(tf.equal(labels, query.y), tf.float32)
    return collections.OrderedDict(
        num_right=tf.reduce_sum(right * query.mask),
        num_examples=tf.reduce_sum(query.mask),
        num_clients=tf.constant(1.0),
    )

  counts_type = of_client.type_signature.result

  @tff.tensorflow.computation(counts_type)
  def to_metrics(counts):
    accuracy = counts['num_right'] / counts['num_examples']
    return collections.OrderedDict(
        accuracy=accuracy,
        num_examples=counts['num_examples'],
        num_clients=counts['num_clients'],
    )

  total = tff.aggregators.SumFactory()
  if secure:
    total = tff.aggregators.SecureSumFactory(_LARGEST_COUNT)
  process = total.create(counts_type)

  @tff.federated_computation(
      tff.FederatedType(weights_type, tff.SERVER),
      tff.FederatedType(data_type, tff.CLIENTS),
  )
  def evaluate(weights, data):
    counts = tff.federated_map(
        of_client, (tff.federated_broadcast(weights), data)
    )
    nothing = tff.federated_value((), tff.SERVER)
    return tff.federated_map(to_metrics, process.next(nothing, counts).result)

  return evaluate


_LARGEST_COUNT = np.float32(2.0**20).item()
