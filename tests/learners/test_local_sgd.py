import collections
import functools
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta import models
from tff_meta import optimizers
from tff_meta.learners import local_sgd
from tff_meta.losses import cross_entropy

SEED = (3, 7)
RNG = np.random.default_rng(7)
X = RNG.normal(size=(7, 2)).astype(np.float32)
Y = np.array([0, 1, 2, 1, 0, 2, 1], np.int32)


def linear_weights():
  return collections.OrderedDict(
      body=collections.OrderedDict(scale=tf.constant([1.0, -2.0])),
      head=collections.OrderedDict(bias=tf.constant(0.5)),
  )


def linear_loss(weights, batch):
  """Half the mean squared error of a linear model of the label."""
  error = tf.linalg.matvec(batch.x, weights['body']['scale'])
  error += weights['head']['bias'] - tf.cast(batch.y, tf.float32)
  return 0.5 * cross_entropy.masked_mean(error**2, batch.mask)


def first_examples(num_examples):
  return episodes.Examples(
      tf.constant(X[:num_examples]),
      tf.constant(Y[:num_examples]),
      tf.ones([num_examples]),
  )


def train(optimizer, num_examples=7, loss_fn=linear_loss, **options):
  options = {'batch_size': 3, 'num_epochs': 2, 'seed': SEED} | options
  return local_sgd.local_sgd(
      loss_fn,
      linear_weights(),
      first_examples(num_examples),
      optimizer,
      **options,
  )


def naive_training(
    update, weight_decay, max_steps=None, max_gradient_norm=math.inf
):
  """Returns (scale 0, scale 1, bias) and the sum of losses."""
  batches = episodes.minibatches(7, 3, SEED, 2)
  w, state, loss_sum = np.array([1.0, -2.0, 0.5]), {}, 0.0
  sizes = batches.sizes.numpy()[:max_steps, 0]
  for step, size in enumerate(sizes):
    real = batches.indices.numpy()[step, :size]
    gradient = np.zeros(3)
    for i in real:
      features = np.array([X[i, 0], X[i, 1], 1.0])
      error = features @ w - Y[i]
      loss_sum += 0.5 * error**2
      gradient += error * features / len(real)
    gradient *= min(1.0, max_gradient_norm / np.linalg.norm(gradient))
    w = w - update(gradient + weight_decay * w, state, step + 1)
  return w, loss_sum


def sgd_with_momentum(gradient, state, step):
  del step
  state['v'] = 0.9 * state.get('v', 0.0) + gradient
  return 0.1 * state['v']


def adam(gradient, state, step):
  state['m'] = 0.9 * state.get('m', 0.0) + 0.1 * gradient
  state['v'] = 0.999 * state.get('v', 0.0) + 0.001 * gradient**2
  m, v = state['m'] / (1 - 0.9**step), state['v'] / (1 - 0.999**step)
  return 0.05 * m / (np.sqrt(v) + 1e-8)


@pytest.mark.parametrize(
    'optimizer, update',
    [
        (tff.learning.optimizers.build_sgdm(0.1, 0.9), sgd_with_momentum),
        (optimizers.Adam(0.05), adam),
    ],
    ids=['momentum', 'adam'],
)
@pytest.mark.parametrize('weight_decay', [0.0, 0.3])
def test_training_against_the_oracle(optimizer, update, weight_decay):
  """Coupled decay: the penalty passes through momentum and moments."""
  expected, loss_sum = naive_training(update, weight_decay)
  weights, report = train(optimizer, weight_decay=weight_decay)
  # Float32 over six steps.
  np.testing.assert_allclose(weights['body']['scale'], expected[:2], rtol=1e-5)
  np.testing.assert_allclose(weights['head']['bias'], expected[2], rtol=1e-5)
  np.testing.assert_allclose(report.loss_sum, loss_sum, rtol=1e-5)
  assert report.num_examples.numpy() == 14


def test_gradients_are_clipped_before_the_decay():
  """Gradients have norms from 0.4 to 2.4 here, so some are clipped."""
  expected, loss_sum = naive_training(
      sgd_with_momentum, 0.3, max_gradient_norm=1.0
  )
  weights, report = train(
      tff.learning.optimizers.build_sgdm(0.1, 0.9),
      weight_decay=0.3,
      max_gradient_norm=1.0,
  )
  np.testing.assert_allclose(weights['body']['scale'], expected[:2], rtol=1e-5)
  np.testing.assert_allclose(weights['head']['bias'], expected[2], rtol=1e-5)
  np.testing.assert_allclose(report.loss_sum, loss_sum, rtol=1e-5)


def test_a_gradient_whose_norm_overflows_becomes_nan():
  weights, _ = train(
      tff.learning.optimizers.build_sgdm(0.1),
      loss_fn=lambda weights, batch: 1e30 * weights['head']['bias'],
      max_gradient_norm=1.0,
  )
  assert np.isnan(weights['head']['bias'])


def test_an_optimizer_goes_on_where_it_ended():
  """Two epochs of the whole set are one epoch and then another."""
  optimizer = tff.learning.optimizers.build_sgdm(0.1, 0.9)
  options = dict(batch_size=None, trainable=('body',))
  at_once, _ = train(optimizer, **options)
  weights = linear_weights()
  state = local_sgd.initial_optimizer_state(optimizer, weights, ('body',))
  for _ in range(2):
    weights, state, _ = local_sgd.resume_local_sgd(
        linear_loss,
        weights,
        state,
        first_examples(7),
        optimizer,
        num_epochs=1,
        seed=SEED,
        **options,
    )
  tf.nest.map_structure(
      functools.partial(np.testing.assert_allclose, rtol=1e-6), weights, at_once
  )
  # The last step was by the velocity, of which the first epoch has a part.
  once, _ = train(optimizer, num_epochs=1, **options)
  step = at_once['body']['scale'] - once['body']['scale']
  velocity = state['accumulator']['body']['scale']
  np.testing.assert_allclose(step, -0.1 * velocity, rtol=1e-5)


def test_max_steps_ends_amid_an_epoch():
  """After 3 + 3 + 1 examples of the first epoch and 3 of the second."""
  expected, loss_sum = naive_training(sgd_with_momentum, 0.0, max_steps=4)
  weights, report = train(
      tff.learning.optimizers.build_sgdm(0.1, 0.9), max_steps=4
  )
  np.testing.assert_allclose(weights['body']['scale'], expected[:2], rtol=1e-5)
  np.testing.assert_allclose(weights['head']['bias'], expected[2], rtol=1e-5)
  np.testing.assert_allclose(report.loss_sum, loss_sum, rtol=1e-5)
  assert report.num_examples == 10


def test_decay_alone_shrinks_the_weights():
  weights, _ = train(
      tff.learning.optimizers.build_sgdm(0.1),
      loss_fn=lambda weights, batch: tf.constant(0.0),
      weight_decay=5e-2,
  )
  factor = (1 - 0.1 * 5e-2) ** 6
  np.testing.assert_allclose(
      weights['body']['scale'], [factor, -2 * factor], rtol=1e-6
  )


def test_only_the_trainable_part_moves():
  optimizer = tff.learning.optimizers.build_sgdm(0.1)
  weights, _ = train(optimizer, trainable=('head',), weight_decay=0.1)
  assert list(weights) == ['body', 'head']
  assert weights['body']['scale'].numpy().tolist() == [1.0, -2.0]
  assert weights['head']['bias'].numpy() != 0.5
  everything, _ = train(optimizer, trainable=('head', 'body'))
  tf.nest.map_structure(
      np.testing.assert_array_equal, everything, train(optimizer)[0]
  )


def test_an_unknown_part_is_named():
  with pytest.raises(ValueError, match=r"\['body', 'head'\], found \['tail'\]"):
    train(tff.learning.optimizers.build_sgdm(0.1), trainable=('tail',))


@pytest.mark.parametrize('batch_size', [3, None])
def test_no_examples_change_nothing(batch_size):
  optimizer = optimizers.Adam(0.1)
  weights, report = train(
      optimizer, num_examples=0, batch_size=batch_size, weight_decay=1.0
  )
  tf.nest.map_structure(
      np.testing.assert_array_equal, weights, linear_weights()
  )
  assert [part.numpy() for part in report] == [0, 0]


def test_padding_changes_nothing():
  optimizer = tff.learning.optimizers.build_sgdm(0.1)
  expected, expected_report = train(optimizer)
  padded = episodes.Examples(
      tf.constant(np.concatenate([X[:3], 9 * X[:2], X[3:]])),
      tf.constant(np.concatenate([Y[:3], Y[:2], Y[3:]])),
      tf.constant([1.0] * 3 + [0.0] * 2 + [1.0] * 4),
  )
  weights, report = local_sgd.local_sgd(
      linear_loss,
      linear_weights(),
      padded,
      optimizer,
      batch_size=3,
      num_epochs=2,
      seed=SEED,
  )
  tf.nest.map_structure(np.testing.assert_array_equal, weights, expected)
  assert [r.numpy() for r in report] == [r.numpy() for r in expected_report]


def test_the_seed_decides():
  optimizer = tff.learning.optimizers.build_sgdm(0.1)
  first, again, other = (
      train(optimizer, seed=tf.constant(seed))[0]['head']['bias'].numpy()
      for seed in ([1, 2], [1, 2], [1, 3])
  )
  assert first == again != other


@pytest.mark.parametrize(
    'name, optimizer',
    [
        ('conv4', tff.learning.optimizers.build_sgdm(0.1, 0.9)),
        ('mlp', optimizers.Adam(0.01)),
    ],
    ids=['momentum', 'adam'],
)
def test_a_network_trains_inside_a_tff_graph(name, optimizer):
  """The graph that TFF would send to a client, run by this TensorFlow."""
  model = models.build(name, (8, 8, 1), 3)

  def loss_fn(weights, batch):
    logits = model.logits(weights, batch.x, batch.mask)
    return cross_entropy.softmax_cross_entropy(logits, batch.y, batch.mask)

  def train_network(dataset):
    return local_sgd.local_sgd(
        loss_fn,
        model.initialize(SEED),
        episodes.to_examples(dataset),
        optimizer,
        batch_size=4,
        num_epochs=5,
        seed=SEED,
    )

  spec = collections.OrderedDict(
      x=tf.TensorSpec([None, 8, 8, 1]), y=tf.TensorSpec([None], tf.int32)
  )
  computation = tff.tensorflow.computation(
      train_network, tff.SequenceType(tff.types.tensorflow_to_type(spec))
  )
  assert str(computation.type_signature.result[1]) == (
      '<loss_sum=float32,num_examples=float32>'
  )
  y = np.arange(10, dtype=np.int32) % 3
  x = RNG.normal(size=(10, 8, 8, 1)) + y[:, None, None, None]
  dataset = tf.data.Dataset.from_tensors(
      collections.OrderedDict(x=x.astype(np.float32), y=y)
  )
  weights, report = tf.function(train_network, autograph=False)(dataset)
  examples = episodes.to_examples(dataset)
  before = loss_fn(model.initialize(SEED), examples)
  assert loss_fn(weights, examples) < 0.7 * before
  assert report.num_examples.numpy() == 50


@pytest.mark.parametrize(
    'num_examples, uniform, expected',
    [(7, False, 7), (7, True, 1), (0, False, 0), (0, True, 0)],
)
def test_client_weights(num_examples, uniform, expected):
  weight = local_sgd.client_weight(tf.constant(num_examples), uniform)
  assert weight.dtype == tf.float32 and weight == expected
