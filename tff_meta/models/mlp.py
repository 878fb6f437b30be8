"""A perceptron with one hidden layer, of 100 units by default."""

import collections
import math

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model


def build_mlp(
    input_shape: tuple[int, ...] = (28, 28, 1),
    num_classes: int | None = 10,
    *,
    hidden_units: int = 100,
) -> model.Model:
  """Builds a dense layer with ReLU (the body) and a dense head.

  79,510 parameters on 28x28x1 with ten classes.

  Args:
    input_shape: The shape of one example; it is flattened.
    num_classes: The number of classes; None builds no head.
    hidden_units: The size of the hidden layer, which is the embedding.

  Returns:
    The model.

  Source: the MNIST network of FedMeta-Per (Nguyen et al. 2022).
  """
  num_inputs = math.prod(input_shape)

  def init_body(seed):
    kernel, bias = layers.uniform_fan_in(seed, (num_inputs, hidden_units))
    return collections.OrderedDict(kernel=kernel, bias=bias)

  def embed(body, x, mask=None):
    del mask  # Examples do not see each other.
    x = tf.reshape(x, [-1, num_inputs])
    return tf.nn.relu(layers.dense(x, body['kernel'], body['bias']))

  return model.Model(
      name='mlp',
      input_shape=tuple(input_shape),
      embedding_size=hidden_units,
      num_classes=num_classes,
      init_body=init_body,
      init_head=layers.dense_head(layers.uniform_fan_in, hidden_units),
      embed=embed,
      classify=layers.classify_linear,
  )
