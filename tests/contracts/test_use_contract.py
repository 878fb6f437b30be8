"""What every registered algorithm's personalizers promise.

They are given groups and clients that took no part in training; a group has
other classes than training had, and more of them.
"""

import numpy as np
import pytest
import tensorflow as tf
import tree

from tff_meta import episodes
from tff_meta import registry
from tff_meta.client_works import client_work
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import groups as group_evaluation

_SEED = tf.constant([3, 14])


@pytest.fixture(scope='session')
def groups(pools, way) -> list[groups_lib.Group]:
  """Groups of four clients with one or two of four unseen classes."""
  drawn = [
      groups_lib.sample_group(
          pools,
          role='meta_test',
          way=way,
          num_clients=4,
          deployment='non_iid',
          seed=2,
          index=index,
      )._replace(classes=())
      for index in range(3)
  ]
  return tree.map_structure(tf.convert_to_tensor, drawn)


@pytest.fixture(scope='session')
def group(groups) -> groups_lib.Group:
  return groups[0]


def _parts(group):
  support = episodes.Examples(
      group.support_x, group.support_y, group.support_mask
  )
  query = episodes.Examples(group.query_x, group.query_y, group.query_mask)
  return support, group.salts, query


def _use(subject, support, salts, query):
  """Returns the adapted structure and the labels of the queries."""
  return subject.use_in_group(
      subject.trained_weights, support, salts, query, _SEED
  )


def _assert_close(actual, expected):
  """Up to float32 sums over clients in another order, or over one more."""
  for a, e in zip(*map(tree.flatten, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize(
    'spec', registry.ALGORITHMS.values(), ids=lambda spec: spec.name
)
def test_there_is_a_use(spec):
  assert {'known_client', 'new_client', 'group'} & set(spec.uses)


def test_unseen_groups_are_classified_above_chance(group_subject, groups):
  """And one trace serves all groups of a configuration."""
  accuracies, num_traces = [], []
  for group in groups:
    support, salts, query = _parts(group)
    _, labels = _use(group_subject, support, salts, query)
    accuracies.append(np.mean((labels == query.y)[query.mask > 0]))
    num_traces.append(
        group_subject.use_in_group.experimental_get_tracing_count()
    )

  assert np.mean(accuracies) > 0.6  # Chance is 0.25.
  assert num_traces == num_traces[:1] * 3


def test_labels_of_no_class_are_refused_in_a_group(group_subject, group, way):
  support, salts, query = _parts(group)
  y = tf.where(support.mask > 0, support.y + 1, 0)  # From 1, by mistake.

  with pytest.raises(
      tf.errors.InvalidArgumentError, match=f'labels in 0..{way - 1}, found'
  ):
    _use(group_subject, support._replace(y=y), salts, query)


def test_labels_of_no_class_are_refused_in_a_client(client_use, pools):
  task = client_use.task(pools)
  for part, label in (('support', client_use.num_classes), ('query', -1)):
    x, y = getattr(task, part)
    bad = corpus_lib.LabelledExamples(
        x, np.append(y[:-1], label).astype(np.int32)
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f'labels in 0..{client_use.num_classes - 1}, found',
    ):
      client_use.ask(task._replace(**{part: bad}))


def test_labels_are_those_of_the_group(group_subject, group, way):
  support, salts, query = _parts(group)
  adapted, labels = _use(group_subject, support, salts, query)

  assert labels.dtype == tf.int32
  assert labels.shape == query.y.shape
  assert set(labels.numpy()) <= set(range(way))
  for leaf in tree.flatten(adapted):
    assert np.isfinite(leaf).all()


def test_a_class_that_nobody_holds_is_not_predicted(group_subject, group):
  """Not even by a network that tells nothing apart, where all classes tie."""
  support, salts, query = _parts(group)
  held = tf.cast(support.y != 0, tf.float32)
  support = support._replace(mask=support.mask * held)
  blind = tree.map_structure(tf.zeros_like, group_subject.trained_weights)

  _, labels = group_subject.use_in_group(blind, support, salts, query, _SEED)

  assert 0 not in labels.numpy()


def test_same_seed_same_group_model(group_subject, group):
  parts = _parts(group)
  first, _ = _use(group_subject, *parts)
  again, _ = _use(group_subject, *parts)
  tree.map_structure(np.testing.assert_array_equal, first, again)


def test_order_of_the_groups_clients_does_not_matter(group_subject, group):
  support, salts, query = _parts(group)
  order = [2, 0, 3, 1]
  expected, _ = _use(group_subject, support, salts, query)
  actual, _ = _use(
      group_subject,
      tree.map_structure(lambda t: tf.gather(t, order), support),
      tf.gather(salts, order),
      query,
  )
  _assert_close(actual, expected)


def test_groups_answer_alike_whoever_is_asked_with_them(
    composed_group_subject, pools, way
):
  ask = group_evaluation.build_group_test(
      composed_group_subject.group_personalizer
  )
  weights = composed_group_subject.trained_weights
  protocol = group_evaluation.GroupProtocol(
      'meta_test', way, 4, 'non_iid', 3, seed=2
  )
  report = group_evaluation.evaluate_groups(ask, weights, pools, protocol)
  for index in range(3):
    group = protocol.sample(pools, index)._replace(classes=())
    (labels,), _ = ask(
        weights,
        tree.map_structure(lambda leaf: tf.constant(leaf[np.newaxis]), group),
        tf.constant([[2, index]]),
    )
    asked = group.query_mask > 0
    right = np.mean(labels[asked] == group.query_y[asked])
    assert report.accuracies[index] == right


def _pad(support, padding):
  """Adds a fifth client and two rows to each client, all filled alike."""
  return tree.map_structure(
      lambda t, fill: tf.pad(
          t,
          [[0, 1], [0, 2]] + [[0, 0]] * (len(t.shape) - 2),
          constant_values=fill,
      ),
      support,
      padding,
  )


def test_padding_and_a_client_without_support_change_nothing(
    group_subject, group
):
  """The padding holds loud pixels; the client is nothing but padding."""
  support, salts, query = _parts(group)
  expected, _ = _use(group_subject, support, salts, query)
  real = tf.cast(support.mask, tf.bool)[:, :, None, None, None]
  loud = support._replace(x=tf.where(real, support.x, 1e3))
  loud = _pad(loud, episodes.Examples(x=1e3, y=2, mask=0.0))

  actual, _ = _use(group_subject, loud, tf.pad(salts, [[0, 1]]), query)

  _assert_close(actual, expected)


def test_a_non_finite_client_of_a_group_counts_nothing(group_subject, group):
  support, salts, query = _parts(group)
  expected, _ = _use(group_subject, support, salts, query)
  padded = _pad(support, episodes.Examples(x=np.nan, y=2, mask=0.0))
  mask = np.array(padded.mask)
  mask[-1, :4] = 1  # Four real rows of the fifth client, all NaN.

  actual, _ = _use(
      group_subject, padded._replace(mask=mask), tf.pad(salts, [[0, 1]]), query
  )

  _assert_close(actual, expected)


def test_the_trained_weights_are_not_changed(group_subject, group):
  """Run eagerly, because a traced function is given copies."""
  support, salts, _ = _parts(group)
  support = tree.map_structure(lambda t: t[:3, :3], support)
  weights = group_subject.trained_weights
  before = {name: dict(part) for name, part in weights.items()}

  group_subject.group_personalizer.adapt(weights, support, salts[:3], _SEED)

  assert weights.keys() == before.keys()
  for name, part in weights.items():
    assert part.keys() == before[name].keys()
    assert all(part[key] is leaf for key, leaf in before[name].items())


def test_a_client_is_classified_above_chance(client_use, pools):
  """Above a guess of one of its classes, too; and the same once more."""
  task = client_use.task(pools)
  answers = client_use.ask(task)

  assert np.mean(answers.after == answers.labels) > 0.5
  again = client_use.ask(task)
  np.testing.assert_array_equal(again.after, answers.after)


def test_clients_answer_with_their_classes(client_use, pools):
  """Before, after and on the way; one trace serves all."""
  for index in range(2):
    task = client_use.task(pools, index)
    answers = client_use.ask(task)
    given = [a for a in (answers.before, answers.after) if a is not None]
    given += [] if answers.curve is None else list(answers.curve)
    for labels in given:
      assert labels.dtype == np.int32 and labels.shape == task.query.y.shape
      assert set(labels) <= set(range(client_use.num_classes))
  assert client_use.test.experimental_get_tracing_count() == 1


def _assert_sure_of_labels(predict, adapted, query, labels, how_sure):
  """Whatever is answered has the greatest of probabilities that sum to 1."""
  scores = predict.scores(adapted, query)
  probabilities = tf.exp(predict.to_log_probabilities(scores)).numpy()

  np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
  np.testing.assert_array_equal(predict(adapted, query), labels)
  of_labels = probabilities[np.arange(len(labels)), labels]
  np.testing.assert_array_equal(of_labels, probabilities.max(1))
  of_right = probabilities[np.arange(len(labels)), query.y]
  np.testing.assert_allclose(how_sure.confidence, of_labels, atol=1e-4)
  np.testing.assert_allclose(np.exp(-how_sure.nll), of_right, atol=1e-4)


def test_clients_are_surest_of_what_they_answer(scoring_use, pools):
  task = scoring_use.task(pools)
  start, adapt, predict, curve, *_ = scoring_use.personalizer
  memory = tree.map_structure(tf.convert_to_tensor, scoring_use.memory())
  of_client = scoring_use.subject.trained_weights, memory
  support, query = (
      episodes.Examples(*map(tf.constant, (*part, np.ones(len(part.y), 'f4'))))
      for part in (task.support, task.query)
  )
  answers = scoring_use.ask(task)

  adapted = adapt(*of_client, support, tf.constant([3, task.salt]))
  _assert_sure_of_labels(
      predict, adapted, query, answers.after, answers.certainty
  )
  if start is not None:
    _assert_sure_of_labels(
        predict,
        start(*of_client),
        query,
        answers.before,
        answers.certainty_before,
    )
  assert (answers.before is None) == (answers.certainty_before is None)
  assert curve is None or isinstance(curve, type(predict))


def test_groups_are_surest_of_what_they_answer(composed_group_subject, group):
  support, salts, query = _parts(group)
  personalizer = composed_group_subject.group_personalizer
  adapted, _ = _use(composed_group_subject, support, salts, query)
  (labels,), how_sure = group_evaluation.build_group_test(personalizer)(
      composed_group_subject.trained_weights,
      tree.map_structure(lambda leaf: leaf[tf.newaxis], group),
      _SEED[tf.newaxis],
  )

  how_sure = tree.map_structure(lambda part: part[0], how_sure)
  _assert_sure_of_labels(personalizer.predict, adapted, query, labels, how_sure)


def test_a_longer_bank_needs_no_new_trace(client_use, pools):
  """With every memory twice the first of equals is taken, as before."""
  if not client_use.personalizer.uses_bank:
    pytest.skip('New clients are given no memories.')
  task, bank = client_use.task(pools), client_use.memory()
  twice = tree.map_structure(lambda leaf: np.concatenate([leaf, leaf]), bank)
  tree.map_structure(
      np.testing.assert_array_equal,
      client_use.ask(task, twice),
      client_use.ask(task),
  )
  assert client_use.test.experimental_get_tracing_count() == 1


def test_a_curve_goes_from_the_start_to_what_adaptation_gives(
    client_use, pools
):
  """So a client with a curve adapts once."""
  if client_use.personalizer.curve is None:
    pytest.skip('Adaptation has no steps to look between.')
  task = client_use.task(pools)
  curve = client_use.ask(task).curve
  start, adapt, predict = client_use.personalizer[:3]
  memory = tree.map_structure(tf.convert_to_tensor, client_use.memory())
  of_client = client_use.subject.trained_weights, memory
  support, query = (
      episodes.Examples(*map(tf.constant, (*part, np.ones(len(part.y), 'f4'))))
      for part in (task.support, task.query)
  )

  adapted = adapt(*of_client, support, tf.constant([3, task.salt]))

  assert len(curve) > 1
  np.testing.assert_array_equal(curve[-1], predict(adapted, query))
  if start is not None:
    np.testing.assert_array_equal(curve[0], predict(start(*of_client), query))


def test_clients_answer_alike_whoever_is_asked_with_them(client_use, pools):
  """Clients of three sizes, alone and together."""
  task = client_use.task(pools)
  some = corpus_lib.LabelledExamples(*(a[1:] for a in task.support))
  asked = corpus_lib.LabelledExamples(*(a[:3] for a in task.query))
  tasks = [
      task._replace(query=asked),
      task._replace(salt=5),
      task._replace(support=some),
  ]
  together = client_use.ask_all(tasks)
  for own, given in zip(tasks, together, strict=True):
    tree.map_structure(
        np.testing.assert_array_equal, given, client_use.ask(own)
    )


def test_a_client_without_examples_keeps_what_it_starts_with(client_use, pools):
  task = client_use.task(pools)
  none = corpus_lib.LabelledExamples(*(a[:0] for a in task.support))
  answers = client_use.ask(task._replace(support=none))

  assert set(answers.after) <= set(range(client_use.num_classes))
  if answers.before is not None:
    np.testing.assert_array_equal(answers.after, answers.before)


def test_a_client_that_never_took_part_is_served(client_use, pools):
  """It has the initial memory, and nobody else's."""
  memory = client_use.memory()
  if client_use.kind != 'known_client' or memory == ():
    pytest.skip('Clients bring nothing along.')
  initial = client_use.subject.process.initial_memory
  task = client_use.task(pools)
  never = client_work.ClientMemory(False, initial)
  answers = client_use.ask(task, never)

  assert set(answers.after) <= set(range(client_use.num_classes))
  again = client_use.ask(task, never)
  np.testing.assert_array_equal(again.after, answers.after)


def test_adaptation_changes_neither_weights_nor_memory(client_use, pools):
  """Run eagerly, because a traced function is given copies."""
  weights = client_use.subject.trained_weights
  memory = tree.map_structure(tf.convert_to_tensor, client_use.memory())
  task = client_use.task(pools)
  x, y = (tf.constant(a[:3]) for a in task.support)
  before = tree.map_structure(lambda t: t, (weights, memory))

  client_use.personalizer.adapt(
      weights, memory, episodes.Examples(x, y, tf.ones(3)), _SEED
  )

  tree.assert_same_structure(before, (weights, memory))
  leaves = zip(*map(tree.flatten, (before, (weights, memory))), strict=True)
  assert all(old is new for old, new in leaves)
