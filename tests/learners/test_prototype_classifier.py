import numpy as np
import tensorflow as tf

from tff_meta import episodes
from tff_meta import models
from tff_meta.learners import prototype_classifier


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
