"""FedEC's FEMNIST network: three dense layers."""

import collections
import math

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model

_HIDDEN_UNITS = (256, 64)


def build_fedec_mlp(
    input_shape: tuple[int, ...] = (28, 28, 1), num_classes: int | None = 10
) -> model.Model:
  """Builds dense 256 and 64, each with ReLU (the body), and a dense head.

  218,058 parameters on 28x28x1 with ten classes. FedEC asks for three layers
  and gives no widths; these are those of FedRep's four-layer FEMNIST network
  (512, 256, 64) without its first. That network has a softmax before the
  cross-entropy; here are logits.

  Args:
    input_shape: The shape of one example; it is flattened.
    num_classes: The number of classes; None builds no head.

  Returns:
    The model; the embedding has 64 dimensions.

  Source: FedEC, section on experiments ("three fully connected layers"); the
  released code of FedRep (Collins et al. 2021).
  """
  num_inputs = math.prod(input_shape)
  widths = (num_inputs, *_HIDDEN_UNITS)
  shapes = tuple(zip(widths[:-1], widths[1:], strict=True))

  def init_body(seed):
    body = collections.OrderedDict()
    for i, shape in enumerate(shapes):
      layer_seed = tf.random.experimental.stateless_fold_in(seed, i)
      kernel, bias = layers.uniform_fan_in(layer_seed, shape)
      body[f'dense{i + 1}_kernel'], body[f'dense{i + 1}_bias'] = kernel, bias
    return body

  def embed(body, x, mask=None):
    del mask  # Examples do not see each other.
    x = tf.reshape(x, [-1, num_inputs])
    for layer in ('dense1', 'dense2'):
      x = layers.dense(x, body[f'{layer}_kernel'], body[f'{layer}_bias'])
      x = tf.nn.relu(x)
    return x

  return model.Model(
      name='fedec_mlp',
      input_shape=tuple(input_shape),
      embedding_size=_HIDDEN_UNITS[-1],
      num_classes=num_classes,
      init_body=init_body,
      init_head=layers.dense_head(layers.uniform_fan_in, _HIDDEN_UNITS[-1]),
      embed=embed,
      classify=layers.classify_linear,
  )
