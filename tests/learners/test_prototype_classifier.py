import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta import models
from tff_meta.learners import prototype_classifier
from tff_meta.models import model as model_lib


def test_fit_and_predict_by_hand():
  support = episodes.Examples(
      tf.constant([[0.0, 1.0], [2.0, 1.0], [9.0, 9.0], [50.0, 50.0]]),
      tf.constant([0, 0, 2, 1]),
      tf.constant([1.0, 1.0, 1.0, 0.0]),
  )

  def double(x, mask):
    del mask
    return 2 * x

  prototypes = prototype_classifier.fit(double, support, 4)
  expected = [[2.0, 2.0], [0.0, 0.0], [18.0, 18.0], [0.0, 0.0]]
  assert prototypes.means.numpy().tolist() == expected
  assert prototypes.present.numpy().tolist() == [1, 0, 1, 0]
  query = episodes.Examples(
      tf.constant([[0.0, 0.0], [8.0, 8.0]]), tf.zeros([2], tf.int32), tf.ones(2)
  )
  predicted = prototype_classifier.predict(double, prototypes, query)
  assert predicted.numpy().tolist() == [0, 2]


def test_separable_classes_are_recognised_by_an_untrained_network():
  model = models.build('lenet', (16, 16, 1), None)
  body = model.initialize([3, 7])['body']
  rng = np.random.default_rng(9)
  centres = rng.normal(size=(3, 16, 16, 1))

  def draw(num):
    y = np.arange(num, dtype=np.int32) % 3
    x = centres[y] + 0.1 * rng.normal(size=(num, 16, 16, 1))
    return episodes.Examples(
        tf.constant(x, tf.float32), tf.constant(y), tf.ones(num)
    )

  def embed(x, mask):
    return model.embed(body, x, mask)

  query = draw(10)
  prototypes = prototype_classifier.fit(embed, draw(8), 3)
  predicted = prototype_classifier.predict(embed, prototypes, query)
  np.testing.assert_array_equal(predicted, query.y)


def line(classes, pixels):
  """Examples of one pixel each."""
  return episodes.Examples(
      tf.constant(pixels, tf.float32, shape=[len(pixels), 1]),
      tf.constant(classes, tf.int32, shape=[len(classes)]),
      tf.ones(len(classes)),
  )


@pytest.fixture(name='halving_client')
def fixture_halving_client():
  """A personalizer whose body halves the pixel; 4 classes."""
  model = model_lib.Model(
      name='one parameter',
      input_shape=(1,),
      embedding_size=1,
      num_classes=4,
      init_body=lambda seed: collections.OrderedDict(factor=tf.constant(0.5)),
      init_head=lambda seed, num_classes: collections.OrderedDict(),
      embed=lambda body, x, mask: body['factor'] * x,
      classify=lambda head, embedding: embedding,
  )
  return prototype_classifier.build_client_personalizer(model, num_classes=4)


def test_a_client_learns_its_prototypes_and_nothing_else(halving_client):
  """Class 3 at (2 + 6 + 10) / 3 / 2 = 3, class 1 at 20 / 2 = 10: border 13."""
  weights = collections.OrderedDict(
      body=collections.OrderedDict(factor=tf.constant(0.5)),
      head=collections.OrderedDict(unused=tf.constant(9.0)),
  )
  assert halving_client.start is None and not halving_client.uses_bank

  @tf.function(autograph=False, reduce_retracing=True)
  def use(examples, query):
    adapted = halving_client.adapt(weights, (), examples, tf.constant([1, 2]))
    return adapted, halving_client.predict(adapted, query)

  query = line([0, 0, 0], [-5.0, 12.9, 13.1])
  (body, prototypes), labels = use(
      line([3, 1, 3, 3], [2.0, 20.0, 6.0, 10.0]), query
  )
  assert body['factor'].numpy() == 0.5
  np.testing.assert_allclose(prototypes.means[:, 0], [0, 10, 0, 3], rtol=1e-6)
  assert prototypes.present.numpy().tolist() == [0, 1, 0, 1]
  assert labels.numpy().tolist() == [3, 3, 1]
  _, labels = use(line([], []), query)
  assert labels.numpy().tolist() == [0, 0, 0]
  _, labels = use(line([2], [1.0]), line([], []))
  assert labels.shape == (0,)
