"""Accuracy of known clients, against a naive count."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.evaluation import known_clients
from tff_meta.learners import personalizer


def unequal(labels, num_clients, rng):
  """Clients of 40, 30, 2 and 18 examples, in corpus order."""
  del num_clients, rng
  return np.split(np.arange(len(labels)), [40, 70, 72])


def make_dataset(test_fraction=0.25):
  rng = np.random.default_rng(2)
  y = rng.integers(0, 3, 90).astype(np.int32)
  x = rng.integers(0, 256, (90, 2, 2, 1)).astype(np.uint8)
  corpus = corpus_lib.Corpus(
      name='toy',
      train=corpus_lib.LabelledExamples(x, y),
      test=corpus_lib.LabelledExamples(x[:0], y[:0]),
      num_classes=3,
  )
  return federated_dataset.FederatedDataset.from_corpus(
      corpus, unequal, 4, seed=2, test_fraction=test_fraction
  )


def most_frequent(log):
  """Answers the most frequent training label, plus the weights' offset."""

  def adapt(weights, examples, seed):
    tf.py_function(lambda s: log.append(tuple(s.numpy())), [seed], [])
    counts = tf.reduce_sum(
        tf.one_hot(examples.y, 3) * examples.mask[:, tf.newaxis], 0
    )
    return tf.argmax(counts, output_type=tf.int32) + weights['offset']

  def predict(adapted, query):
    return tf.fill(tf.shape(query.y), adapted % 3)

  return personalizer.ClientPersonalizer(adapt, predict)


def test_against_a_naive_count():
  dataset, log = make_dataset(), []
  ids = dataset.client_ids('meta_train')
  client_accuracy = known_clients.build_client_accuracy(most_frequent(log))
  report = known_clients.evaluate_clients(
      client_accuracy, {'offset': np.int32(1)}, dataset, ids, seed=5
  )
  ids = [ids[0], ids[1], ids[3]]  # The third has nothing to be tested on.
  for index, client_id in enumerate(ids):
    client = dataset.client(client_id)
    answer = (int(np.argmax(np.bincount(client.train.y))) + 1) % 3
    right = sum(int(label) == answer for label in client.test.y)
    assert report.num_examples[index] == len(client.test.y)
    assert report.accuracies[index] == pytest.approx(right / len(client.test.y))
  assert len(report.accuracies) == 3 and len(set(report.accuracies)) > 1
  assert log == [(5, dataset.salt(client_id)) for client_id in ids]


def test_other_weights_are_used_without_another_trace():
  dataset, traces = make_dataset(), []
  personal = most_frequent([])

  def adapt(*args):
    traces.append(1)
    return personal.adapt(*args)

  client_accuracy = known_clients.build_client_accuracy(
      personal._replace(adapt=adapt)
  )
  counts, means = [], []
  for offset in (0, 1, 2):
    report = known_clients.evaluate_clients(
        client_accuracy,
        {'offset': np.int32(offset)},
        dataset,
        dataset.client_ids(),
        seed=5,
    )
    counts.append(len(traces))
    means.append(float(report.accuracies @ report.num_examples))
  assert counts[0] == counts[1] == counts[2] <= 2
  # Each label is the answer once: every test is right once.
  assert sum(means) == pytest.approx(report.num_examples.sum())


def test_clients_without_test_examples_are_left_out_or_named():
  dataset = make_dataset(test_fraction=0.0)
  with pytest.raises(ValueError, match="test examples in some client of 'toy'"):
    known_clients.evaluate_clients(
        known_clients.build_client_accuracy(most_frequent([])),
        {'offset': np.int32(0)},
        dataset,
        dataset.client_ids('meta_train'),
        seed=5,
    )
