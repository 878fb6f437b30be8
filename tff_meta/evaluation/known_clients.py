"""Accuracy of known clients on their own held-out test examples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_meta import episodes
from tff_meta.data import federated_dataset
from tff_meta.evaluation import accuracy
from tff_meta.learners import personalizer as personalizer_lib


def evaluate_clients(
    client_personalizer: personalizer_lib.ClientPersonalizer,
    weights: Any,
    dataset: federated_dataset.FederatedDataset,
    client_ids: Sequence[str],
    seed: int,
) -> accuracy.AccuracyReport:
  """Adapts to each client's training examples and tests on its test examples.

  Args:
    client_personalizer: What a client does with trained weights.
    weights: Trained weights, `OrderedDict(body, head)`.
    dataset: Where the clients are.
    client_ids: Which clients; those without test examples are left out.
    seed: Of the adaptation.

  Returns:
    The accuracy of every client that has test examples.

  Raises:
    ValueError: If no client has any.
  """
  weights = tf.nest.map_structure(tf.convert_to_tensor, weights)

  @tf.function(reduce_retracing=True)
  def client_accuracy(train_x, train_y, test_x, test_y, client_seed):
    train = episodes.Examples(
        train_x, train_y, tf.ones(tf.shape(train_y), tf.float32)
    )
    test = episodes.Examples(
        test_x, test_y, tf.ones(tf.shape(test_y), tf.float32)
    )
    adapted = client_personalizer.adapt(weights, train, client_seed)
    predicted = client_personalizer.predict(adapted, test)
    return tf.reduce_mean(tf.cast(tf.equal(predicted, test.y), tf.float32))

  accuracies, counts = [], []
  for client_id in client_ids:
    client = dataset.client(client_id)
    if not len(client.test.y):
      continue
    arrays = (client.train.x, client.train.y, client.test.x, client.test.y)
    client_seed = tf.constant([seed, dataset.salt(client_id)], tf.int32)
    accuracies.append(
        float(client_accuracy(*map(tf.constant, arrays), client_seed))
    )
    counts.append(len(client.test.y))
  if not counts:
    raise ValueError(
        f'Expected test examples in some client of {dataset.name!r}, found'
        ' none. Tip: hold some out when the data set is partitioned.'
    )
  return accuracy.AccuracyReport(np.array(accuracies), np.array(counts))
