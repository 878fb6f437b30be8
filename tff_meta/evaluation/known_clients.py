"""Accuracy of known clients on their own held-out test examples."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_meta import episodes
from tff_meta.data import federated_dataset
from tff_meta.evaluation import accuracy
from tff_meta.learners import personalizer as personalizer_lib


def build_client_accuracy(
    client_personalizer: personalizer_lib.ClientPersonalizer,
) -> Callable[..., tf.Tensor]:
  """Builds the traced function that adapts to a client and tests the result.

  Args:
    client_personalizer: What a client does with trained weights.

  Returns:
    `(weights, train_x, train_y, test_x, test_y, seed) -> accuracy`, a float32
    scalar.
  """

  @tf.function(reduce_retracing=True)
  def client_accuracy(weights, train_x, train_y, test_x, test_y, seed):
    train, test = (
        episodes.Examples(x, y, tf.ones(tf.shape(y), tf.float32))
        for x, y in ((train_x, train_y), (test_x, test_y))
    )
    adapted = client_personalizer.adapt(weights, train, seed)
    predicted = client_personalizer.predict(adapted, test)
    return tf.reduce_mean(tf.cast(tf.equal(predicted, test.y), tf.float32))

  return client_accuracy


def evaluate_clients(
    client_accuracy: Callable[..., tf.Tensor],
    weights: Any,
    dataset: federated_dataset.FederatedDataset,
    client_ids: Sequence[str],
    seed: int,
) -> accuracy.AccuracyReport:
  """Adapts to each client's training examples and tests on its test examples.

  Args:
    client_accuracy: From `build_client_accuracy`; reuse it, it is traced for a
      few shapes only.
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
  accuracies, counts = [], []
  for client_id in client_ids:
    client = dataset.client(client_id)
    if not len(client.test.y):
      continue
    arrays = (client.train.x, client.train.y, client.test.x, client.test.y)
    client_seed = tf.constant([seed, dataset.salt(client_id)], tf.int32)
    accuracies.append(
        float(client_accuracy(weights, *map(tf.constant, arrays), client_seed))
    )
    counts.append(len(client.test.y))
  if not counts:
    raise ValueError(
        f'Expected test examples in some client of {dataset.name!r}, found'
        ' none. Tip: hold some out when the data set is partitioned.'
    )
  return accuracy.AccuracyReport(np.array(accuracies), np.array(counts))
