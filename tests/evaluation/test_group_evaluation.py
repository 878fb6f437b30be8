"""Accuracy in new groups, against a naive count."""

import dataclasses
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.data import corpus as corpus_lib
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import client_metrics
from tff_meta.evaluation import groups as group_evaluation
from tff_meta.learners import personalizer

CLASS_SIZES = (24, 27, 30, 40, 25, 26, 24, 33, 24, 29)
PROTOCOL = group_evaluation.GroupProtocol(
    role='meta_test',
    way=3,
    num_clients=6,
    deployment='non_iid',
    num_groups=5,
    seed=7,
)
WEIGHTS = {'shift': np.float32(0.25)}


@pytest.fixture(scope='module')
def pools():
  """Images of 2x2 pixels, brighter for larger classes but noisy."""
  rng = np.random.default_rng(3)
  y = rng.permutation(np.repeat(np.arange(10), CLASS_SIZES)).astype(np.int32)
  x = 20 * y[:, None, None, None] + rng.integers(0, 60, (len(y), 2, 2, 1))
  return groups_lib.ClassPools(
      corpus_lib.Corpus(
          name='toy',
          train=corpus_lib.LabelledExamples(x[50:].astype(np.uint8), y[50:]),
          test=corpus_lib.LabelledExamples(x[:50].astype(np.uint8), y[:50]),
          num_classes=10,
          class_split=corpus_lib.ClassSplit(
              (0, 2, 4, 3), (5,), (1, 6, 7, 8, 9)
          ),
      )
  )


def nearest_mean_brightness(log=None):
  """A personalizer that knows each class by its mean brightness."""

  def adapt(weights, support, salts, seed):
    if log is not None:
      tf.py_function(
          lambda *seen: log.append(seen), [support.x, salts, seed], []
      )
    brightness = tf.reduce_mean(support.x, [2, 3, 4])
    member = tf.one_hot(support.y, 3) * support.mask[..., tf.newaxis]
    means = tf.reduce_sum(member * brightness[..., tf.newaxis], [0, 1])
    return means / tf.reduce_sum(member, [0, 1]) + weights['shift']

  def predict(adapted, query):
    brightness = tf.reduce_mean(query.x, [1, 2, 3])
    distance = tf.abs(brightness[:, tf.newaxis] - adapted[tf.newaxis])
    return tf.argmin(distance, 1, output_type=tf.int32)

  return personalizer.GroupPersonalizer(adapt, predict)


def evaluate(pools, protocol=PROTOCOL, deployed=None):
  return group_evaluation.evaluate_groups(
      group_evaluation.build_group_test(deployed or nearest_mean_brightness()),
      WEIGHTS,
      pools,
      protocol,
  )


def naive_answers(group, shift):
  """Labels and answers, by loops over what is not padding."""
  brightness = {0: [], 1: [], 2: []}
  for k in range(len(group.support_y)):
    for s in range(len(group.support_y[k])):
      if group.support_mask[k, s] == 1:
        label = int(group.support_y[k, s])
        brightness[label].append(group.support_x[k, s].mean())
  means = [np.mean(brightness[label]) + shift for label in range(3)]
  labels, answers = [], []
  for i in range(len(group.query_y)):
    if group.query_mask[i] == 1:
      distances = [abs(group.query_x[i].mean() - mean) for mean in means]
      answers.append(int(np.argmin(distances)))
      labels.append(int(group.query_y[i]))
  return np.array(labels), np.array(answers)


def test_a_bar_counts_groups_on_a_terminal(pools, monkeypatch, terminal):
  monkeypatch.setattr(sys, 'stderr', terminal)
  evaluate(pools)
  assert '0/5 [00:00<?, ? groups/s]' in terminal.getvalue()


def test_against_a_naive_count(pools):
  report = evaluate(pools)
  padded = 0
  for index in range(5):
    group = groups_lib.sample_group(
        pools,
        role='meta_test',
        way=3,
        num_clients=6,
        deployment='non_iid',
        seed=7,
        index=index,
    )
    labels, answers = naive_answers(group, shift=0.25)
    padded += len(group.query_y) - len(labels)
    assert report.num_examples[index] == len(labels)
    assert report.num_support[index] == np.sum(group.support_mask == 1)
    assert report.accuracies[index] == np.mean(labels == answers)
    assert report.macro_f1[index] == client_metrics.macro_f1(labels, answers)
  assert report.ids == tuple(f'group_{index}' for index in range(5))
  assert report.unit == 'group' and report.accuracies_before is None
  # So that neither padding nor perfect or chance answers hide an error.
  assert padded > 0 and len(set(report.accuracies)) > 1
  assert 0.2 < report.accuracy.mean < 0.98


def test_padded_queries_do_not_count(pools):
  """Zero images with label 0: whoever always answers 0 has them right."""

  def always_zero(adapted, query):
    del adapted
    return tf.zeros_like(query.y)

  deployed = nearest_mean_brightness()._replace(predict=always_zero)
  report = evaluate(pools, deployed=deployed)
  for index in range(5):
    group = PROTOCOL.sample(pools, index)
    real = group.query_y[group.query_mask == 1]
    assert report.accuracies[index] == pytest.approx(np.mean(real == 0))


def test_every_algorithm_gets_the_same_groups(pools):
  """And the same salts and seeds; another protocol seed gives others."""
  logs = [], [], []
  for log, seed in zip(logs, (7, 7, 8), strict=True):
    protocol = dataclasses.replace(PROTOCOL, seed=seed)
    evaluate(pools, protocol, nearest_mean_brightness(log))
  seen = [
      sorted(tuple(part.numpy().tobytes() for part in group) for group in log)
      for log in logs
  ]
  assert seen[0] == seen[1] and len(set(seen[0])) == 5
  assert not set(seen[0]) & set(seen[2])
  seeds = sorted(tuple(group[2].numpy().tolist()) for group in logs[0])
  assert seeds == [(7, index) for index in range(5)]


def test_more_groups_begin_with_the_same_ones(pools):
  more = evaluate(pools, dataclasses.replace(PROTOCOL, num_groups=7))
  np.testing.assert_array_equal(more.accuracies[:5], evaluate(pools).accuracies)


def test_one_trace_serves_all_groups(pools):
  traces = []
  deployed = nearest_mean_brightness()

  def adapt(*args):
    traces.append(1)
    return deployed.adapt(*args)

  group_test = group_evaluation.build_group_test(deployed._replace(adapt=adapt))
  for _ in range(2):
    group_evaluation.evaluate_groups(group_test, WEIGHTS, pools, PROTOCOL)
  assert len(traces) == 1


@pytest.mark.parametrize(
    'change, classes',
    [
        ({}, {1, 6, 7, 8, 9}),
        ({'role': 'meta_train'}, {0, 2, 3, 4}),
        ({'deployment': 'iid'}, {1, 6, 7, 8, 9}),
        ({'num_seen': 2}, {0, 1, 2, 3, 4, 6, 7, 8, 9}),
    ],
    ids=str,
)
def test_a_protocol_says_which_classes(pools, change, classes):
  protocol = dataclasses.replace(PROTOCOL, **change)
  drawn = [protocol.sample(pools, index) for index in range(20)]
  assert {int(c) for group in drawn for c in group.classes} == classes
  for group in drawn:
    seen = sum(c in (0, 2, 3, 4) for c in group.classes)
    expected = {'role': 3, 'num_seen': 2}.get(next(iter(change), None), 0)
    assert seen == expected
    holders = [
        len(set(y[mask == 1].tolist()))
        for y, mask in zip(group.support_y, group.support_mask, strict=True)
    ]
    assert (min(holders) == 3) == (protocol.deployment == 'iid')


def test_no_groups_are_refused():
  with pytest.raises(ValueError, match='`num_groups` of at least 1, found 0'):
    dataclasses.replace(PROTOCOL, num_groups=0)
