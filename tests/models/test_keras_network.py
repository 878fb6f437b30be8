"""Keras models as networks: the same numbers, derivatives, and refusals."""

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import datasets
from tff_meta import models
from tff_meta import registry
from tff_meta.data import federated_dataset
from tff_meta.training import client_state_store
from tff_meta.training import loop

_L = tf.keras.layers
_SHAPE = (6, 5, 1)


def _keras(*layers, shape=_SHAPE, head=None):
  head = _L.Dense(3, activation='softmax') if head is None else head
  return tf.keras.Sequential([tf.keras.Input(shape), *layers, head])


def _conv(pool=_L.MaxPool2D):
  return _keras(
      _L.Conv2D(4, 3, activation='silu'),  # With a gradient of its own.
      _L.GroupNormalization(2),
      pool(2),
      _L.Flatten(),
      _L.Dense(7, activation='tanh'),
  )


def _examples(n=4):
  return np.random.default_rng(0).standard_normal((n, *_SHAPE), np.float32)


def test_what_it_computes_is_what_keras_computes():
  keras_model, x = _conv(), _examples()
  network = models.from_keras(keras_model, keep_weights=True)
  head = collections.OrderedDict(
      zip(('kernel', 'bias'), keras_model.layers[-1].weights, strict=True)
  )
  weights = network.initialize(tf.constant([1, 2]))
  weights['head'] = head
  np.testing.assert_allclose(
      tf.nn.softmax(network.logits(weights, x)),
      keras_model(x),
      rtol=1e-5,  # Rounding.
  )
  assert (network.embedding_size, network.num_classes) == (7, 3)
  assert network.num_parameters() == keras_model.count_params()
  # It depends on the weights that it is given, and the model is left as it was.
  zeros = tf.nest.map_structure(tf.zeros_like, weights)
  assert not network.logits(zeros, x).numpy().any()
  assert all(isinstance(w, tf.Variable) for w in keras_model.weights)
  assert network.embed(weights['body'], x[:0]).shape == (0, 7)


def test_derivatives_of_two_orders_are_exact():
  """Against differences: of a value, and of the first derivative."""
  # The largest of some numbers has a kink where it becomes another.
  network = models.from_keras(_conv(_L.AveragePooling2D))
  x = _examples()
  body = network.initialize(tf.constant([3, 4]))['body']
  names = list(body)
  rng = np.random.default_rng(1)
  along = {n: rng.standard_normal(body[n].shape, np.float32) for n in names}

  def moved(step):
    return collections.OrderedDict(
        (n, body[n] + step * along[n]) for n in names
    )

  @tf.function(autograph=False)
  def three(step):
    with tf.GradientTape() as outer:
      outer.watch(step)
      with tf.GradientTape() as inner:
        inner.watch(step)
        value = tf.reduce_sum(network.embed(moved(step), x) ** 2)
      first = inner.gradient(value, step)
    return value, first, outer.gradient(first, step)

  h = 5e-3
  low, middle, high = (three(tf.constant(s)) for s in (-h, 0.0, h))
  for order in 1, 2:
    difference = (high[order - 1] - low[order - 1]) / (2 * h)
    # Differences are right to h**2 times the next but one derivative.
    np.testing.assert_allclose(middle[order], difference, rtol=2e-2)


def test_weights_are_drawn_from_the_seed_as_keras_draws_them():
  keras_model = _keras(
      _L.Flatten(),
      _L.Dense(400, bias_initializer='ones'),
      _L.Dense(300, kernel_initializer='he_normal'),
      _L.Dense(50, kernel_initializer=tf.keras.initializers.RandomNormal(1, 2)),
  )
  network = models.from_keras(keras_model)
  drawn, again, other = (
      network.initialize(tf.constant([s, 5])) for s in (1, 1, 2)
  )
  tf.nest.map_structure(np.testing.assert_array_equal, drawn, again)
  own = [w.numpy() for w in keras_model.weights]
  for name, theirs in zip(drawn['body'], own, strict=False):
    mine = drawn['body'][name].numpy()
    assert mine.shape == theirs.shape
    # Means of as many numbers, within five standard errors of each other.
    error = theirs.std() * (2 / theirs.size) ** 0.5
    np.testing.assert_allclose(mine.mean(), theirs.mean(), atol=5 * error)
    np.testing.assert_allclose(mine.std(), theirs.std(), rtol=0.03)
    if theirs.std():
      assert not np.array_equal(mine, other['body'][name])


def test_layers_that_are_not_trained_stay_as_they_are():
  keras_model = _conv()
  keras_model.layers[0].trainable = False
  network, x = models.from_keras(keras_model, keep_weights=True), _examples()
  body = network.initialize(tf.constant([1, 2]))['body']
  assert len(body) == 4
  reference = tf.keras.Model(keras_model.inputs, keras_model.layers[-2].output)
  np.testing.assert_allclose(network.embed(body, x), reference(x), rtol=1e-5)


def _subclassed():
  class Theirs(tf.keras.Model):

    def call(self, x):
      return x

  return Theirs()


def _two_inputs():
  a, b = tf.keras.Input((2,)), tf.keras.Input((2,))
  return tf.keras.Model([a, b], _L.Dense(3)(a + b))


def _tied():
  x = tf.keras.Input((2,))
  layer = _L.Dense(2)
  other = _L.Dense(2)
  other.build((None, 2))
  y = layer(x)
  other.kernel = layer.kernel
  return tf.keras.Model(x, _L.Dense(3)(other(y)))


@pytest.mark.parametrize(
    'build, problem',
    [
        (
            lambda: _keras(_L.Flatten(), _L.BatchNormalization(name='bn')),
            "statistics.*'bn'",
        ),
        (
            lambda: _keras(_L.Flatten(), _L.Dropout(0.5, name='drop')),
            'in training what they do in use.*drop/.*Tip: leave out Dropout',
        ),
        (lambda: _keras(_L.RandomFlip(), _L.Flatten()), 'do in use|reads'),
        (
            lambda: _keras(
                _L.Flatten(), _L.Dense(2, name='l2', kernel_regularizer='l2')
            ),
            "penalties, found one of 'l2'",
        ),
        (
            lambda: _keras(
                _L.Flatten(),
                head=_L.Dense(3, name='last', kernel_regularizer='l2'),
            ),
            "penalties, found one of 'last'",
        ),
        (
            lambda: _keras(
                _L.Flatten(), head=_L.Dense(3, bias_constraint='non_neg')
            ),
            "without constraints, found 'bias_constraint'",
        ),
        (
            lambda: _keras(_L.Flatten(), head=_L.Dense(3, trainable=False)),
            'is trained, found .* trainable=False',
        ),
        (
            lambda: _keras(_L.Flatten(), head=_L.ReLU()),
            "to be Dense, found 're",
        ),
        (
            lambda: _keras(_L.Flatten(), head=_L.Dense(3, 'sigmoid')),
            "softmax, found 'sigmoid'",
        ),
        (lambda: _keras(), 'to be of vectors, found'),
        (
            lambda: _keras(_L.Flatten(), head=_L.Dense(3, use_bias=False)),
            'without a bias',
        ),
        (_two_inputs, 'one input .* found 2 and 1'),
        (lambda: tf.keras.Sequential([_L.Dense(3)]), 'not built'),
        (_subclassed, 'not built, or a class of its own'),
        (_tied, 'every weight once|otherwise'),
        (
            lambda: _keras(
                _L.LSTM(4, recurrent_initializer='zeros'), shape=(5, 2)
            ),
            "drawn alike, found 'bias' of .*keep_weights=True",
        ),
        (
            lambda: _keras(
                _L.Flatten(), _L.Dense(4, kernel_initializer='orthogonal')
            ),
            'drawn from a seed, found Orthogonal',
        ),
        (
            lambda: _keras(_L.GlobalMaxPool1D(), shape=(None, 2)),
            r'known shape .*\(None, 2\)',
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(build, problem):
  with pytest.raises(ValueError, match=problem):
    models.from_keras(build())


@pytest.mark.parametrize('thing', [_L.Dense(2), lambda *_: _L.Dense(2)])
def test_another_thing_is_refused(thing):
  with pytest.raises(TypeError, match='a `tf.keras.Model`, found a Dense'):
    models.adopt(thing, 'given', _SHAPE, 2)


class _Builder:

  def __call__(self, input_shape, num_classes, width=4):
    head = _L.Dense(num_classes)
    return _keras(_L.Flatten(), _L.Dense(width), shape=input_shape, head=head)


def test_whatever_can_be_called_builds_a_network():
  for builder, width in (
      (_Builder(), 4),
      (functools.partial(_Builder(), width=7), 7),
  ):
    network = models.adopt(builder, 'given', _SHAPE, 2)
    assert (network.embedding_size, network.num_classes) == (width, 2)


_MODULE = """
import tensorflow as tf
from tff_meta import models

def net(input_shape, num_classes):
  return tf.keras.Sequential([
      tf.keras.Input(input_shape), tf.keras.layers.Flatten(),
      tf.keras.layers.Dense(5), tf.keras.layers.Dense(num_classes)])

def ours(input_shape, num_classes):
  return models.build('mlp', input_shape, num_classes)

def fixed(input_shape, num_classes):
  return models.build('mlp', (3,), num_classes)
"""


def test_a_function_of_a_module_is_a_network(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'their_nets.py').write_text(_MODULE)
  network = models.build('their_nets:net', (4,), None)
  assert (network.num_classes, network.embedding_size) == (None, 5)
  assert models.build('their_nets:ours', (4,), 6).num_classes == 6
  models.check('their_nets:net')
  for name, problem in (
      ('their_nets:nets', "a function 'nets' .* found none. Tip: .*'net'"),
      ('their_nets:fixed', r'of shape \(4,\), found one for \(3,\)'),
  ):
    with pytest.raises(ValueError, match=problem):
      models.build(name, (4,), None)
  for name in 'no_nets:net', 'their_nets:', ':net', 'their_nets.py:net':
    with pytest.raises(ValueError, match='Expected'):
      models.check(name)


@pytest.mark.parametrize(
    'name',
    [
        pytest.param('fedmeta_per', marks=pytest.mark.ci),
        pytest.param('frl', marks=pytest.mark.slow),
    ],
)
def test_algorithms_train_it_as_the_same_network_of_ours(name):
  """Second derivatives, and clients in a loop: one layer of 100 units."""
  corpus = datasets.load_corpus('synthetic', num_classes=8, image_size=4)
  clients = federated_dataset.FederatedDataset.few_round(corpus, 4, seed=0)
  ours = models.build('mlp', clients.input_shape, None)
  keras_model = _keras(
      _L.Flatten(), _L.Dense(100, 'relu'), shape=clients.input_shape
  )
  theirs = models.from_keras(keras_model)
  names = list(theirs.initialize(tf.constant([0, 0]))['body'])

  def init_body(seed):
    return collections.OrderedDict(
        zip(names, ours.init_body(seed).values(), strict=True)
    )

  theirs = dataclasses.replace(
      theirs, init_body=init_body, init_head=ours.init_head
  )
  trained = []
  for network in ours, theirs:
    process = registry.build(name, network, 'demo', clients.num_classes, seed=1)
    state, store = process.initialize(), client_state_store.InMemoryStore()
    cohort = [(c, clients.tff_client_data(c)) for c in clients.client_ids()]
    initial = process.get_model_weights(state).trainable
    for round_num in range(1, 5):  # An episode of FRL.
      state = loop.next_round(process, state, round_num, cohort, store).state
    final = process.get_model_weights(state).trainable
    trained.append([list(w['body'].values()) for w in (initial, final)])
  for mine, own in zip(*trained, strict=True):
    for a, b in zip(mine, own, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)  # Rounding.
  assert not np.allclose(trained[0][0][0], trained[0][1][0])
