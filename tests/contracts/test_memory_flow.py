"""What a client's memory reaches of what leaves the client, as a flow of data.

The memory of one client is perturbed, and all else of a round stays as it is.
What the server then has otherwise, to the last bit, is what the memory reaches;
`Method.memory_reaches` has to say so, no more and no less. Where memory
takes part in training alone, it must reach nothing with rates of zero, so that
what is no gradient cannot hide behind one. What is out of sight: a leak in a
channel that the memory reaches by itself, as the loss of a client's own model.
"""

import collections
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tree

from tff_meta import composition
from tff_meta import method
from tff_meta import models
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.learners import personal_head
from tff_meta.training import checkpoints

_SCALES = (0.01, 10.0)


_HYPERPARAMETERS = ('learning_rate', 'beta_1', 'beta_2', 'epsilon')


def _perturb(memory, scale, rng):
  """Adds to every number; second moments stay positive, counts whole.

  Of the hyperparameters that an optimizer's state has, it takes: a rate of zero
  stays, and a decay stays below one.
  """

  def perturb(path, leaf):
    leaf = np.asarray(leaf)
    if path and path[-1] in _HYPERPARAMETERS:
      return leaf * np.asarray(rng.uniform(0.5, 1.0), leaf.dtype)
    if leaf.dtype.kind == 'i':
      return leaf + rng.integers(1, 4, leaf.shape).astype(leaf.dtype)
    return leaf + np.asarray(
        rng.uniform(0.5, 1.5, leaf.shape) * scale, leaf.dtype
    )

  return tree.map_structure_with_path(perturb, memory)


def _with_hyperparameters_of(first, memory):
  """A memory whose optimizers have the hyperparameters of another."""
  return tree.map_structure_with_path(
      lambda path, own, other: (
          other if path and path[-1] in _HYPERPARAMETERS else own
      ),
      memory,
      first,
  )


def _channels(output):
  """Channel -> all that the server has of it after a round."""
  state = output.state
  metrics = {
      name: array
      for name, array in checkpoints.to_arrays(output.metrics).items()
      if 'loss' not in name
  }
  update = checkpoints.to_arrays(
      (state.global_model_weights, state.aggregator, state.finalizer)
  )
  return {
      'update': (update, metrics),
      'signal': checkpoints.to_arrays(state.client_work),
      'loss': np.asarray(output.metrics['client_work']['train']['loss']),
  }


def _same_bits(first, second):
  pairs = zip(tree.flatten(first), tree.flatten(second), strict=True)
  return all(
      np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
  )


def _reached(process, state, cohort, memories):
  """The channels that the first client's memory reaches in one round."""
  rng = np.random.default_rng(5)

  def run(memory):
    kept = memories | {cohort[0].salt: memory}
    data = []
    for client in cohort:
      arguments = client.data()
      arguments['memory'] = client_work.memory_dataset(
          process.initial_memory, kept[client.salt]
      )
      data.append(arguments)
    output, _ = process.next_with_memory(state, data)
    train = output.metrics['client_work']['train']
    assert train['num_non_finite_clients'] == 0
    return _channels(output)

  before = run(memories[cohort[0].salt])
  reached = set()
  for scale in _SCALES:
    after = run(_perturb(memories[cohort[0].salt], scale, rng))
    reached |= {
        name for name in before if not _same_bits(before[name], after[name])
    }
  return reached


def test_a_memory_reaches_what_the_algorithm_says(stateful_subject):
  subject = stateful_subject
  declared = subject.method.memory_reaches
  reached = set()
  for state, output in zip(
      subject.states[1:], subject.outputs, strict=True
  ):  # Of every round: some have phases.
    reached |= _reached(subject.process, state, subject.cohort, output.memories)
  assert reached == set(declared)


def test_who_keeps_nothing_declares_nothing(subject):
  if not isinstance(subject.process, composition.StatefulLearningProcess):
    assert not subject.method.memory_reaches


def test_training_alone_is_no_way_without_rates(frozen_subject):
  subject = frozen_subject
  process, declared = subject.frozen_process, subject.method.memory_reaches
  reached = set()
  for state, output in zip(subject.states[1:], subject.outputs, strict=True):
    memories = {
        salt: _with_hyperparameters_of(process.initial_memory, memory)
        for salt, memory in output.memories.items()
    }
    reached |= _reached(process, state, subject.cohort, memories)
  assert reached == {
      channel for channel, how in declared.items() if how == 'itself'
  }


def _in_metrics(leak, update, weight, report):
  num_examples = report.num_examples + 1e-3 * leak[0, 0]
  return update, weight, report._replace(num_examples=num_examples)


def _in_weight(leak, update, weight, report):
  return update, weight * (1 + tf.sigmoid(leak[0, 0])), report


def _in_update(form):
  def add(leak, update, weight, report):
    head = collections.OrderedDict(update['head'], kernel=form(leak))
    return personal_head.merge(update, head), weight, report

  return add


# What a client's kernel `[units, classes]` can look like on its way out.
_LEAKS = {
    'twice': _in_update(lambda k: 2 * k),
    'negated': _in_update(lambda k: -k),
    'scaled': _in_update(lambda k: 1e-3 * k),
    'transposed': _in_update(
        lambda k: tf.reshape(tf.transpose(k), tf.shape(k))
    ),
    'a row': _in_update(lambda k: tf.pad(k[:1], [[0, k.shape[0] - 1], [0, 0]])),
    'sum': _in_update(lambda k: tf.fill(tf.shape(k), tf.reduce_sum(k))),
    'quantised': _in_update(lambda k: tf.round(8 * k) / 8),
    'permuted': _in_update(lambda k: k[::-1]),
    'signs': _in_update(lambda k: tf.sign(k - 0.3)),
    'in a metric': _in_metrics,
    'in the weight': _in_weight,
}


@pytest.fixture(scope='module')
def leaky_process():
  """FedPer with rates of zero, whose clients leak as the server state says.

  The server has a head too, so that there is room: in its place clients send
  how bright their images are, which differs, so that weights show. State 0
  leaks nothing, n has the n-th leak.
  """
  model = models.build('mlp', (8, 8, 1), None)
  classifier = classifiers.LinearClassifier(model, 3)

  def client_update(weights, client):
    trained, report = local_sgd.local_sgd(
        classifier.loss,
        personal_head.merge(weights, client.memory.value),
        client.examples,
        optimizers.build_optimizer('sgd', 0.0),
        batch_size=4,
        num_epochs=1,
        seed=client.seed,
    )
    brightness = tf.reduce_mean(client.examples.x)
    update = personal_head.merge(
        weights_lib.subtract(weights, trained),
        tf.nest.map_structure(lambda p: p * 0 + brightness, weights['head']),
    )
    sent = update, tf.constant(1.0), report
    kernel = client.memory.value['kernel']
    forms = [lambda: sent]
    forms += [lambda leak=leak: leak(kernel, *sent) for leak in _LEAKS.values()]
    return client_work.ClientOutput(
        *tf.switch_case(client.message, forms), memory=trained['head']
    )

  leaking = method.Method(
      3,
      classifier.initialize,
      client_update,
      memory=lambda seed: classifier.initialize(seed)['head'],
      state=lambda seed: client_work.ClientWorkState(
          initialize=lambda: tf.constant(0),
          message=lambda number: number,
          next=lambda number, aggregate: number,
      ),
  )
  return method.build_process(leaking, model, seed=7)


class _Noise(NamedTuple):
  """A client of random examples."""

  salt: int

  def data(self):
    rng = np.random.default_rng(self.salt)
    examples = collections.OrderedDict(
        x=rng.normal(size=(6, 8, 8, 1)).astype(np.float32),
        y=rng.integers(0, 3, 6).astype(np.int32),
    )
    return collections.OrderedDict(
        examples=tf.data.Dataset.from_tensors(examples),
        salt=tf.data.Dataset.from_tensors(np.int32(self.salt)),
    )


@pytest.mark.parametrize('leak', ['none', *_LEAKS])
def test_planted_leaks_are_seen(leaky_process, leak):
  number = ['none', *_LEAKS].index(leak)
  state = leaky_process.initialize()
  seeds, _ = state.client_work
  state = state._replace(client_work=(seeds, np.int32(number)))
  memories = {
      salt: _perturb(
          leaky_process.initial_memory, 0.1, np.random.default_rng(salt)
      )
      for salt in (1, 2)
  }

  reached = _reached(leaky_process, state, [_Noise(1), _Noise(2)], memories)

  assert reached == ({'loss', 'update'} if number else {'loss'})
