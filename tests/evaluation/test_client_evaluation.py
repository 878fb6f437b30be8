"""Clients tested before and after they adapt, against naive counts."""

import dataclasses
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import clients as client_evaluation
from tff_meta.evaluation import groups as group_evaluation
from tff_meta.learners import personalizer as personalizer_lib

KNOWN = client_evaluation.ClientProtocol('meta_train', 'test', None, seed=5)


def unequal(labels, num_clients, rng):
  """Clients of 40, 30, 2 and 18 examples and one of 27, in corpus order."""
  del num_clients, rng
  return np.split(np.arange(len(labels)), [40, 70, 72, 90])


def make_dataset(test_fraction=0.25, num_test_clients=1):
  rng = np.random.default_rng(2)
  y = rng.integers(0, 3, 117).astype(np.int32)
  x = rng.integers(0, 256, (117, 2, 2, 1)).astype(np.uint8)
  corpus = corpus_lib.Corpus(
      name='toy',
      train=corpus_lib.LabelledExamples(x, y),
      test=corpus_lib.LabelledExamples(x[:0], y[:0]),
      num_classes=3,
  )
  return federated_dataset.FederatedDataset.from_corpus(
      corpus,
      unequal,
      5,
      seed=1,
      validation_fraction=0.2,
      test_fraction=test_fraction,
      num_test_clients=num_test_clients,
  )


def most_frequent(log=None):
  """Answers the most frequent support label, plus what it remembers.

  Before adaptation it answers what it remembers alone. Its curve takes two
  steps: after one it answers the weights' offset.
  """

  def start(weights, memory):
    del weights
    return memory['offset']

  def adapt(weights, memory, examples, seed):
    if log is not None:
      tf.py_function(
          lambda *seen: log.append([s.numpy() for s in seen]),
          [examples.x, examples.y, examples.mask, seed],
          [],
      )
    counts = tf.reduce_sum(
        tf.one_hot(examples.y, 3) * examples.mask[:, tf.newaxis], 0
    )
    most = tf.argmax(counts, output_type=tf.int32)
    return most + memory['offset'] + weights['offset']

  def predict(adapted, query):
    return tf.fill(tf.shape(query.y), adapted % 3)

  def curve(weights, memory, examples, query, seed):
    answers = (
        start(weights, memory),
        weights['offset'],
        adapt(weights, memory, examples, seed),
    )
    return tf.stack([predict(answer, query) for answer in answers])

  return personalizer_lib.ClientPersonalizer(start, adapt, predict, curve)


def memory_of(client_id):
  """Every client remembers another number."""
  return {'offset': np.int32(int(client_id[-1]) % 2)}


def evaluate(dataset, protocol=KNOWN, personalizer=None, weights=1, **options):
  test = client_evaluation.build_client_test(
      personalizer or most_frequent(), with_curve=options.pop('curve', False)
  )
  return client_evaluation.evaluate_clients(
      test,
      {'offset': np.int32(weights)},
      memory_of,
      protocol.tasks(dataset),
      seed=protocol.seed,
      **options,
  )


def right(answer, labels):
  return sum(int(label) == answer % 3 for label in labels) / len(labels)


def most(labels):
  return int(np.argmax(np.bincount(labels, minlength=3)))


@pytest.mark.parametrize('fraction', [None, 0.6])
def test_shots_are_the_first_of_every_class(fraction):
  dataset = make_dataset()
  whole = dataclasses.replace(KNOWN, support_fraction=fraction)
  cut = dataclasses.replace(whole, shots=3)
  for task, short in zip(whole.tasks(dataset), cut.tasks(dataset), strict=True):
    kept, seen = [], []
    for row, label in enumerate(task.support.y.tolist()):
      if seen.count(label) < 3:
        kept.append(row)
      seen.append(label)
    assert 0 < len(kept) <= 9
    np.testing.assert_array_equal(short.support.x, task.support.x[kept])
    np.testing.assert_array_equal(short.support.y, task.support.y[kept])
    np.testing.assert_array_equal(short.query.x, task.query.x)


def test_shots_of_a_client_without_examples_are_none():
  nothing = client_evaluation.ClientProtocol(
      'meta_train', 'test', 0.01, seed=5, shots=2
  )
  sizes = [len(t.support.y) for t in nothing.tasks(make_dataset())]
  assert sizes == [0, 0, 0]


def test_against_a_naive_count():
  dataset = make_dataset()
  report = evaluate(dataset, curve=True)
  ids = [c for c in dataset.client_ids() if dataset.num_examples(c, 'test')]
  assert len(ids) == 3 and len(dataset.client_ids()) == 4  # One has no tests.
  assert report.ids == tuple(ids)
  for index, client_id in enumerate(ids):
    client, offset = dataset.client(client_id), int(client_id[-1]) % 2
    labels = client.test.y
    after = most(client.train.y) + offset + 1
    assert report.num_support[index] == len(client.train.y)
    assert report.num_examples[index] == len(labels)
    assert report.accuracies[index] == pytest.approx(right(after, labels))
    assert report.accuracies_before[index] == pytest.approx(
        right(offset, labels)
    )
    np.testing.assert_allclose(
        report.curves[index], [right(a, labels) for a in (offset, 1, after)]
    )
  assert len(set(report.accuracies)) > 1
  assert len(set(report.accuracies_before)) > 1


def test_held_out_clients_and_validation_examples():
  dataset = make_dataset()
  (new,) = dataset.client_ids('meta_test')
  report = evaluate(dataset, dataclasses.replace(KNOWN, role='meta_test'))
  assert report.ids == (new,)
  protocol = dataclasses.replace(KNOWN, part='validation')
  tasks = list(protocol.tasks(dataset))
  for task in tasks:
    client = dataset.client(task.client_id)
    np.testing.assert_array_equal(task.query.x, client.validation.x)
    np.testing.assert_array_equal(task.support.x, client.train.x)
  assert len(tasks) == 3


def test_adaptation_on_a_share_of_the_test_part():
  """floor(.29 n) examples at random; the rest is asked; nothing is lost."""
  dataset = make_dataset(test_fraction=0.5)
  protocol = dataclasses.replace(KNOWN, support_fraction=0.29)
  tasks = list(protocol.tasks(dataset))
  assert len(tasks) == 4
  for task in tasks:
    test = dataset.client(task.client_id).test
    assert len(task.support.y) == 29 * len(test.y) // 100
    pixels = np.concatenate([task.support.x, task.query.x])
    order = np.lexsort(pixels.reshape(len(pixels), -1).T)
    expected = np.lexsort(test.x.reshape(len(test.x), -1).T)
    np.testing.assert_array_equal(pixels[order], test.x[expected])
    labels = np.concatenate([task.support.y, task.query.y])
    np.testing.assert_array_equal(labels[order], test.y[expected])
  again, other = (
      [t.query.x for t in dataclasses.replace(protocol, seed=s).tasks(dataset)]
      for s in (5, 6)
  )
  same = [
      np.array_equal(t.query.x, x) for t, x in zip(tasks, again, strict=True)
  ]
  assert all(same)
  assert not np.array_equal(tasks[0].query.x, other[0])
  assert not np.array_equal(tasks[0].query.x, dataset.client('client_0').test.x)


def test_a_share_needs_examples_to_be_tested_on():
  """Of one test example none is support, so it stays to be asked."""
  dataset = make_dataset(test_fraction=0.5)
  protocol = dataclasses.replace(KNOWN, support_fraction=0.99)
  sizes = {
      t.client_id: (len(t.support.y), len(t.query.y))
      for t in protocol.tasks(dataset)
  }
  assert (0, 1) in sizes.values()
  assert evaluate(dataset, protocol).num_support.min() == 0


@pytest.mark.parametrize('fraction', [0.0, 1.0, -0.1])
def test_impossible_shares_are_refused(fraction):
  with pytest.raises(ValueError, match='`support_fraction` between 0 and 1'):
    dataclasses.replace(KNOWN, support_fraction=fraction)


def test_clients_adapt_on_their_own_examples_with_their_own_seed():
  dataset, log = make_dataset(), []
  report = evaluate(dataset, personalizer=most_frequent(log))
  by_salt = {seen[-1][1]: seen for seen in log}
  assert len(by_salt) == len(log) == len(report.ids)
  for client_id in report.ids:
    train = dataset.client(client_id).train
    x, y, mask, seed = by_salt[dataset.salt(client_id)]
    np.testing.assert_array_equal(x, train.x)
    np.testing.assert_array_equal(y, train.y)
    assert mask.tolist() == [1.0] * len(train.y)
    assert seed.tolist() == [5, dataset.salt(client_id)]


def test_one_trace_serves_all_clients_and_all_weights():
  dataset, traces, personal = make_dataset(), [], most_frequent()

  def adapt(*args):
    traces.append(1)
    return personal.adapt(*args)

  test = client_evaluation.build_client_test(personal._replace(adapt=adapt))
  right_answers = 0
  for offset in (0, 1, 2):
    report = client_evaluation.evaluate_clients(
        test,
        {'offset': np.int32(offset)},
        memory_of,
        KNOWN.tasks(dataset),
        seed=5,
    )
    right_answers += report.accuracies @ report.num_examples
  assert len(traces) == 1
  # Each label is the answer once: every test is right once.
  assert right_answers == pytest.approx(report.num_examples.sum())


def test_what_a_personalizer_lacks_is_not_reported():
  personal = most_frequent()._replace(start=None, curve=None)
  report = evaluate(make_dataset(), personalizer=personal, curve=True)
  assert report.accuracies_before is report.curves is None
  assert evaluate(make_dataset()).curves is None  # It was not asked for.


def test_restricted_f1_is_passed_on():
  """One answer is a label that the client does not have."""
  dataset = make_dataset()
  task = next(KNOWN.tasks(dataset))
  two = task.query.y < 2
  task = task._replace(
      query=corpus_lib.LabelledExamples(task.query.x[two], task.query.y[two])
  )
  personal = most_frequent()._replace(
      predict=lambda adapted, query: tf.concat([[2], query.y[1:]], 0)
  )
  free, restricted = (
      client_evaluation.evaluate_clients(
          client_evaluation.build_client_test(personal),
          {'offset': np.int32(0)},
          memory_of,
          [task],
          seed=1,
          restrict_f1=restrict_f1,
      )
      for restrict_f1 in (False, True)
  )
  assert 0 < free.macro_f1[0] < restricted.macro_f1[0] < 1
  assert free.accuracies == restricted.accuracies


def test_no_clients_are_refused():
  dataset = make_dataset(test_fraction=0.0)
  with pytest.raises(ValueError, match='clients with examples to be tested on'):
    evaluate(dataset)


def test_a_bar_counts_clients_on_a_terminal(monkeypatch, terminal):
  monkeypatch.setattr(sys, 'stderr', terminal)
  evaluate(make_dataset())
  assert '? clients/s' in terminal.getvalue()


CLASS_SIZES = (24, 27, 30, 40, 25, 26, 24, 33, 24, 29)


@pytest.fixture(scope='module')
def pools():
  """Images whose first pixel tells their class and the second their number."""
  y = np.repeat(np.arange(10), CLASS_SIZES).astype(np.int32)
  numbers = np.concatenate([np.arange(size) for size in CLASS_SIZES])
  x = np.stack([y, numbers], 1).astype(np.uint8)[:, np.newaxis, :, np.newaxis]
  return groups_lib.ClassPools(
      corpus_lib.Corpus(
          name='toy',
          train=corpus_lib.LabelledExamples(x[50:], y[50:]),
          test=corpus_lib.LabelledExamples(x[:50], y[:50]),
          num_classes=10,
          preprocess=corpus_lib.scale_to_unit,
          class_split=corpus_lib.ClassSplit(
              (0, 2, 4, 3), (5,), (1, 6, 7, 8, 9)
          ),
      )
  )


@pytest.mark.parametrize('deployment', ['iid', 'non_iid'])
def test_the_clients_of_groups_keep_to_themselves(pools, deployment):
  """All examples of a client, and no others, each once, with group labels."""
  protocol = group_evaluation.GroupProtocol(
      role='meta_test',
      way=3,
      num_clients=6,
      deployment=deployment,
      num_groups=4,
      seed=7,
  )
  tasks = list(client_evaluation.new_class_tasks(pools, protocol))
  assert len(tasks) == 24
  assert tasks[7].client_id == 'group_1_client_1'
  for index in range(4):
    group, own = protocol.sample(pools, index), tasks[6 * index :][:6]
    seen = []
    for k, task in enumerate(own):
      assert task.salt == group.salts[k]
      held = set(task.support.y.tolist())
      assert held == set(task.query.y.tolist())
      assert len(held) == 3 or deployment == 'non_iid'
      for x, y in (task.support, task.query):
        assert len(x) == len(y) > 0
        pixels = np.rint(255 * x[:, 0, :, 0]).astype(int)
        np.testing.assert_array_equal(pixels[:, 0], group.classes[y])
        seen += [tuple(pixel) for pixel in pixels.tolist()]
      # Half is asked, class by class, and the odd ones, too.
      for label in held:
        asked = np.sum(task.query.y == label)
        assert 0 <= asked - np.sum(task.support.y == label) <= 2
    assert len(set(seen)) == len(seen)
    assert len(seen) == sum(CLASS_SIZES[c] for c in group.classes)
