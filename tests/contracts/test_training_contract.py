"""What every registered training process promises."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tff_meta import composition
from tff_meta.client_works import client_work
from tff_meta.execution import computation_graph
from tff_meta.execution import nodes as graph_nodes
from tff_meta.training import checkpoints

_TRAIN_METRICS = {
    'loss',
    'num_examples',
    'num_clients',
    'num_trained_clients',
    'num_empty_clients',
    'max_update_norm',
}
# Sums of float32 over clients in another order differ in the last bit, about
# 1e-7 of values near 1; some steps of training on top of that multiply it.
_OTHER_ORDER = dict(rtol=1e-5, atol=1e-5)
# Batch normalisation divides by standard deviations well below 1.
_OTHER_ORDER_CONV4 = dict(rtol=1e-3, atol=1e-4)
# An Adam that starts anew divides a gradient by its own size: where that is
# rounding noise, the weight moves by the noise times a rate of 0.1. On a
# processor with AVX-512 3 of 100 biases were 4e-3 apart, and a norm 0.7 %;
# that this is such noise was not tried.
_OTHER_ORDER_ADAM = dict(rtol=1e-2, atol=1e-3, share=0.05)


def _other_order(subject):
  """How far results may be from those of the same sums in another order."""
  if subject.case.network in ('conv4', 'norm_cnn'):
    return _OTHER_ORDER_CONV4
  config = subject.case.config
  if (
      getattr(config, 'optimizer', None) == 'adam'
      or getattr(config, 'outer_optimizer', None) == 'adam_fresh'
  ):
    return _OTHER_ORDER_ADAM
  return _OTHER_ORDER


def _train(output):
  return output.metrics['client_work']['train']


def _assert_identical(actual, expected):
  """Compares states or metrics bit for bit."""
  np.testing.assert_equal(
      checkpoints.to_arrays(actual), checkpoints.to_arrays(expected)
  )


def _assert_close(actual, expected, *, share=0.0, **tolerance):
  """Compares states or metrics; a share of an array may be further."""
  actual, expected = map(checkpoints.to_arrays, (actual, expected))
  assert actual.keys() == expected.keys()
  for name, array in expected.items():
    far = ~np.isclose(actual[name], array, equal_nan=True, **tolerance)
    if far.sum() > share * far.size:
      np.testing.assert_allclose(actual[name], array, err_msg=name, **tolerance)


def _differ(actual, expected):
  pairs = zip(tree.flatten(actual), tree.flatten(expected), strict=True)
  return any(np.any(np.not_equal(a, b)) for a, b in pairs)


def _learned(subject, output):
  """What a round has changed: the weights, or only what clients keep."""
  return subject.weights(output.state), list(output.memories.values())


def _all_finite(structure):
  arrays = checkpoints.to_arrays(structure).values()
  return all(np.isfinite(array).all() for array in arrays)


def test_process_is_a_learning_process(subject):
  assert isinstance(subject.process, tff.learning.templates.LearningProcess)
  memory_type = None
  if isinstance(subject.process, composition.StatefulLearningProcess):
    output_type = subject.process.next_with_memory.type_signature.result
    memory_type = output_type[1].member.value
  data_type = client_work.client_data_type(
      subject.model.input_shape, memory_type
  )
  assert subject.process.next.type_signature.parameter[1] == tff.FederatedType(
      data_type, tff.CLIENTS
  )


def test_model_weights_are_a_body_and_a_head(subject):
  weights = subject.process.get_model_weights(subject.states[-1])

  assert isinstance(weights, tff.learning.models.ModelWeights)
  assert weights.non_trainable == ()
  assert isinstance(weights.trainable, collections.OrderedDict)
  assert list(weights.trainable)[:2] == ['body', 'head']
  assert weights.trainable['body']
  for leaf in tree.flatten(weights.trainable):
    assert np.asarray(leaf).dtype == np.float32


def test_metrics_are_finite_scalars(subject):
  for output in subject.outputs:
    assert list(output.metrics) == [
        'distributor',
        'client_work',
        'aggregator',
        'finalizer',
    ]
    assert _train(output).keys() >= _TRAIN_METRICS
    assert _train(output)['num_clients'] == 3
    assert _train(output)['num_non_finite_clients'] == 0
    assert all(np.ndim(m) == 0 for m in tree.flatten(output.metrics))
    assert _all_finite(output.metrics)


def _aggregated(process):
  """Dtypes and shapes of all that the compiled round adds up over clients."""
  found, nodes = collections.Counter(), []
  graph = computation_graph.ComputationGraph(process.next)
  waiting = graph_nodes.nodes_in(graph.result)
  while waiting:
    node = waiting.pop()
    if node not in nodes:
      nodes.append(node)
      waiting += node.inputs
      if isinstance(node, graph_nodes.Aggregation):
        found.update(_kinds(node.type_signature))
  return found


def _kinds(type_signature):
  if isinstance(type_signature, tff.StructType):
    return [k for part in type_signature for k in _kinds(part)]
  return [(type_signature.dtype.name, tuple(type_signature.shape))]


def test_nothing_is_aggregated_that_is_not_declared(subject):
  """Changes of models and their weights, channels, and scalar metrics."""
  method = subject.method
  weights = [w.shape for w in tree.flatten(subject.weights(subject.states[0]))]
  copies = 1
  if method.num_models is not None:
    copies, weights = method.num_models, [shape[1:] for shape in weights]
  summed = [
      tuple(spec.shape)
      for channel in method.channels
      for spec in tree.flatten(channel.summed)
  ]
  has_weight = not method.sums_updates
  sent = copies * (weights + [()] * has_weight) * method.sends_updates
  metrics = len(_train(subject.outputs[0]))

  assert _aggregated(subject.process) == collections.Counter(
      ('float32', shape) for shape in sent + summed + [()] * metrics
  )
  names = [channel.name for channel in method.channels]
  if method.num_models is not None:
    names.append('choices among models')
  assert ', '.join(names) == (subject.case.spec.channels or '')


def test_weights_that_are_set_are_got(subject):
  process, state = subject.process, subject.states[1]
  weights = tree.map_structure(
      lambda w: np.float32(0.5) * w + np.float32(0.01),
      process.get_model_weights(state),
  )

  changed = process.set_model_weights(state, weights)

  _assert_identical(process.get_model_weights(changed), weights)
  assert _differ(subject.weights(changed), subject.weights(state))
  # And the round that follows is one of them.
  data = [*map(subject.data, subject.cohort)]
  assert _all_finite(subject.one_round(changed, data)[0].state)


def test_same_seed_same_states(thriftiest_subject):
  subject = thriftiest_subject
  rebuilt = subject.build(copy=1)

  assert rebuilt is not subject.process
  _assert_identical(rebuilt.initialize(), subject.states[0])
  for output, expected in zip(
      subject.run(subject.cohort, process=rebuilt),
      subject.outputs,
      strict=True,
  ):
    _assert_identical(output.state, expected.state)
    _assert_identical(output.metrics, expected.metrics)


def test_native_and_in_process_execution_agree(
    thriftiest_subject, native_context
):
  subject = thriftiest_subject
  with tff.framework.get_context_stack().install(native_context):
    outputs = subject.run(subject.cohort)

  tolerance = _other_order(subject)
  for output, expected in zip(outputs, subject.outputs, strict=True):
    _assert_close(output.state, expected.state, **tolerance)
    _assert_close(output.metrics, expected.metrics, **tolerance)
    _assert_close(output.memories, expected.memories, **tolerance)


def test_next_is_next_with_memory_without_the_memory(recalling_subject):
  """For clients that are new, and for those that are known."""
  subject = recalling_subject
  if not isinstance(subject.process, composition.StatefulLearningProcess):
    pytest.skip('Clients of this process keep nothing.')
  for state, memories in (
      (subject.states[0], {}),
      (subject.states[1], subject.outputs[0].memories),
  ):
    data = [subject.data(client, memories) for client in subject.cohort]
    whole, _ = subject.process.next_with_memory(state, data)
    plain = subject.process.next(state, data)
    _assert_identical(plain.state, whole.state)
    _assert_identical(plain.metrics, whole.metrics)


def test_every_client_that_took_part_keeps_something(stateful_subject):
  subject = stateful_subject
  salts = {client.salt for client in subject.cohort}
  for output in subject.outputs:
    assert output.memories.keys() == salts
    assert _all_finite(output.memories)
    for memory in output.memories.values():
      tree.assert_same_structure(memory, subject.process.initial_memory)


def test_another_seed_draws_other_weights_and_other_rounds(thriftiest_subject):
  other = thriftiest_subject.build(seed=8)
  initial = thriftiest_subject.process.get_model_weights(
      thriftiest_subject.states[0]
  )
  state = other.initialize()

  assert _differ(thriftiest_subject.weights(state), initial.trainable)
  state = other.set_model_weights(state, initial)
  outputs = thriftiest_subject.run(
      thriftiest_subject.cohort, process=other, state=state
  )
  assert _differ(
      _learned(thriftiest_subject, outputs[-1]),
      _learned(thriftiest_subject, thriftiest_subject.outputs[-1]),
  )


def test_another_salt_draws_other_rounds(subject):
  cohort = [dataclasses.replace(c, salt=c.salt + 1) for c in subject.cohort]

  outputs = subject.run(cohort)

  assert _differ(
      _learned(subject, outputs[-1]), _learned(subject, subject.outputs[-1])
  )


def test_every_round_or_episode_draws_anew(subject):
  """From the initial weights again, but some rounds later."""
  if subject.case.has_a_fixed_order:
    pytest.skip('Its examples come in the order of its memory.')
  if subject.case.algorithm == 'scaffold':
    pytest.skip("The server's control variate tells the rounds apart.")
  initial = subject.process.get_model_weights(subject.states[0])
  first = subject.run(subject.cohort, num_rounds=subject.rounds_per_cohort)[-1]

  again = subject.run(
      subject.cohort,
      state=subject.process.set_model_weights(first.state, initial),
      num_rounds=subject.rounds_per_cohort,
  )[-1]

  assert _differ(_learned(subject, again), _learned(subject, first))


def test_the_same_rounds_again_are_bit_identical(preset_subject):
  """Whichever thread is faster; eight times, as most races are rare."""
  outputs = [
      preset_subject.run(
          preset_subject.cohort, num_rounds=preset_subject.rounds_per_cohort
      )[-1]
      for _ in range(8)
  ]
  for output in outputs[1:]:
    _assert_identical(output.state, outputs[0].state)
    _assert_identical(output.metrics, outputs[0].metrics)
    _assert_identical(output.memories, outputs[0].memories)


def test_client_order_does_not_matter(subject):
  tolerance = _other_order(subject)
  first, second, third = subject.cohort

  outputs = subject.run([third, first, second])

  _assert_close(outputs[-1].state, subject.states[-1], **tolerance)
  _assert_close(outputs[-1].metrics, subject.outputs[-1].metrics, **tolerance)
  _assert_close(outputs[-1].memories, subject.outputs[-1].memories, **tolerance)


def test_batching_of_the_examples_does_not_matter(thrifty_subject):
  """Clients' examples are made dense first, so the results are identical."""
  subject = thrifty_subject
  outputs = subject.run(subject.cohort, batch_size=2)
  _assert_identical(outputs[-1].state, subject.states[-1])
  _assert_identical(outputs[-1].memories, subject.outputs[-1].memories)


def test_clients_that_cannot_train_count_nothing(subject, bad_labels):
  """They are counted, and nothing else is otherwise, to the last bit.

  Their images are no numbers; they have no examples, in no batch or in an empty
  one; or a label of no class, one among good ones. Classes are 0 to 2: a
  `one_hot` of such a label is zeros, and so is a loss, which would be lower.
  """
  first, second, third = subject.cohort
  nan = dataclasses.replace(first, salt=3, pixel=np.nan)
  infinite = dataclasses.replace(second, salt=4, pixel=np.inf)
  none = dataclasses.replace(first, counts={}, salt=6)
  empty_batch = dataclasses.replace(none, salt=7, empty_batch=True)
  num_batches = [len(list(c.data()['examples'])) for c in (none, empty_batch)]
  assert num_batches == [0, 1]
  bad = [
      dataclasses.replace(first, salt=100 + i, last_label=label)
      for i, label in enumerate(bad_labels)
  ]
  cohort = [bad[0], none, first, nan, second, infinite, *bad[1:], empty_batch]

  outputs = subject.run([*cohort, third])

  for output, expected in zip(outputs, subject.outputs, strict=True):
    _assert_identical(output.state, expected.state)
    _assert_identical(output.memories, expected.memories)
    train = dict(_train(output))
    assert train.pop('num_clients') == 3 + 2 + 2 + len(bad)
    assert train.pop('num_bad_label_clients') == len(bad)
    assert train.pop('num_non_finite_clients') == 2 + len(bad)
    assert train.pop('num_empty_clients') == 2
    for name, measured in train.items():
      assert measured == _train(expected)[name], name


def test_a_cohort_that_cannot_train_leaves_the_weights(subject):
  bad = dataclasses.replace(subject.cohort[0], pixel=np.nan)
  empty = dataclasses.replace(subject.cohort[1], counts={})

  outputs = subject.run([bad, empty], state=subject.process.initialize())

  for output in outputs:
    _assert_identical(
        subject.weights(output.state), subject.weights(subject.states[0])
    )
    assert _all_finite(output.state)
    assert _train(output)['num_non_finite_clients'] == 1
    assert _train(output)['num_empty_clients'] == 1
  recovered = subject.run(subject.cohort, state=outputs[-1].state)
  assert _all_finite(recovered[-1].state)
  assert _differ(
      _learned(subject, recovered[-1]), _learned(subject, recovered[0])
  )


@pytest.mark.parametrize('why', ['no examples', 'not finite'])
def test_a_round_in_which_nobody_trained_is_said_to_be_one(subject, why):
  """A mean over nothing is no number; all else that is measured is one."""
  change = {'counts': {}} if why == 'no examples' else {'pixel': np.nan}
  client = dataclasses.replace(subject.cohort[0], **change)

  for output in subject.run([client], num_rounds=subject.rounds_per_cohort):
    train = dict(_train(output))
    assert train['num_clients'] == 1
    assert train['num_trained_clients'] == train['num_examples'] == 0
    assert np.isnan(train.pop('loss'))
    assert np.isnan(train.pop('max_update_norm'))
    assert _all_finite(train)
    assert output.memories == {}


def test_who_learned_nothing_is_in_no_mean(subject):
  """A client of one example, beside one that learns."""
  client = subject.cohort[0]
  idle = dataclasses.replace(client, counts={2: 1}, salt=client.salt + 1)
  alone, both = (
      _train(subject.run(cohort, num_rounds=1)[0])
      for cohort in ([client], [client, idle])
  )
  if both['num_trained_clients'] == 2:
    pytest.skip('One example is enough for these to learn from.')
  assert both['loss'] == alone['loss']
  assert both['num_examples'] == alone['num_examples']


@pytest.mark.parametrize(
    'counts',
    [{0: 1}, {0: 5}, {0: 1, 1: 1}, {0: 1, 2: 4}, {0: 6, 1: 3}],
    ids=str,
)
def test_what_is_missing_is_what_keeps_a_client_from_training(subject, counts):
  """Said beforehand of some algorithms; any examples do for the others."""
  client = dataclasses.replace(subject.cohort[0], counts=counts)
  what_is_missing = subject.method.what_is_missing
  missing = None
  if what_is_missing is not None:
    sizes = np.array([counts.get(label, 0) for label in range(3)])
    missing = what_is_missing(sizes)
  elif len(counts) == 1 or 1 in counts.values():
    pytest.skip('What these do with so little is told by the count alone.')

  rounds = subject.run([client])
  trained = [_train(output)['num_trained_clients'] for output in rounds]
  assert any(trained) == (missing is None)
  for output, count in zip(rounds, trained, strict=True):
    assert np.isnan(_train(output)['loss']) == (count == 0)


def test_a_restored_checkpoint_goes_on_as_if_never_interrupted(
    subject, tmp_path
):
  """Saved after every round, so amid an episode, too."""
  store = checkpoints.CheckpointStore(tmp_path)
  process = subject.restored
  for rounds, (state, expected) in enumerate(
      zip(subject.states, subject.outputs, strict=False)
  ):
    store.save(
        checkpoints.Checkpoint(
            config={},
            position=checkpoints.Position(rounds + 1, 0, 0),
            server_state=checkpoints.to_arrays(state),
        )
    )
    restored = checkpoints.from_arrays(
        process.initialize(), store.load_latest(pytest.fail).server_state
    )
    memories = subject.outputs[rounds - 1].memories if rounds else {}

    output = subject.run(
        subject.cohort,
        process=process,
        state=restored,
        memories=memories,
        num_rounds=1,
    )[0]

    for actual, wanted in zip(output, expected, strict=True):
      _assert_identical(actual, wanted)


def _contents(state, weights, data):
  """Copies of everything that a computation is given."""
  datasets = [list(d.as_numpy_iterator()) for d in tree.flatten(data)]
  structures = checkpoints.to_arrays((state, weights, datasets))
  return {name: np.array(array) for name, array in structures.items()}


def test_arguments_are_not_changed(thrifty_subject):
  subject = thrifty_subject
  process, state = subject.process, subject.states[1]
  weights = process.get_model_weights(subject.states[0])
  memories = subject.outputs[0].memories
  data = [subject.data(client, memories) for client in subject.cohort]
  before = _contents(state, weights, data)

  subject.one_round(state, data)
  process.get_model_weights(state)
  process.set_model_weights(state, weights)

  np.testing.assert_equal(_contents(state, weights, data), before)


def test_later_rounds_trace_nothing(subject, monkeypatch):
  """No graph is built, even for another number of clients and examples."""
  state = subject.outputs[0].state
  first, second, _ = subject.cohort
  fewer = dataclasses.replace(first, counts={1: 2, 2: 3})
  data = [subject.data(fewer), subject.data(second, batch_size=3)]
  graphs = []
  initialize = tf.Graph.__init__

  def count(graph):
    graphs.append(graph)
    initialize(graph)

  with monkeypatch.context() as patch:
    patch.setattr(tf.Graph, '__init__', count)
    with tf.Graph().as_default():
      pass
    assert len(graphs) == 1  # So it is a count of graphs.
    state = subject.one_round(state, data)[0].state
    subject.one_round(state, data)
    assert len(graphs) == 1


def test_loss_falls(subject):
  """By a tenth, from the first to the last two cohorts or episodes."""
  losses = [_train(output)['loss'] for output in subject.long_run]
  per_cohort = np.reshape(losses, [-1, subject.rounds_per_cohort]).mean(1)
  first, last = np.mean(per_cohort[:2]), np.mean(per_cohort[-2:])
  assert last < first - 0.1 * abs(first)
