"""A LeNet whose every derivative exists, for gradient inversion."""

import collections

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model as model_lib

_FILTERS = 12
_KERNEL = 5
_STRIDES = (2, 2, 1)
_EMBEDDING_SIZE = 84
_INIT_BOUND = 0.5


def build_smooth_lenet(
    input_shape: tuple[int, ...], num_classes: int | None = None
) -> model_lib.Model:
  """Builds three strided 5x5 convolutions with sigmoids and a dense layer.

  The dense layer has the 84 units, without activation, that MetaVers' LeNet
  embeds in; the classifier is a sigmoid and a dense layer. Where a ReLU's
  second derivative is zero almost everywhere and pooling's jumps, a sigmoid's
  is not, which matching gradients by gradient descent needs. Convolutions start
  from uniform(-0.5, 0.5) as in the code of DLG, dense layers from
  uniform(-1/sqrt(fan_in), 1/sqrt(fan_in)).

  Args:
    input_shape: Height, width and channels of one example.
    num_classes: The number of classes; None builds no head.

  Returns:
    The model.

  Source: Zhu, Liu and Han 2019, "Deep Leakage from Gradients", section 4, and
  its code.
  """
  height, width, channels = input_shape
  for stride in _STRIDES:
    height, width = -(-height // stride), -(-width // stride)
  flat_size = height * width * _FILTERS

  def init_body(seed):
    seeds = tf.unstack(
        tf.random.experimental.stateless_split(seed, 2 * len(_STRIDES) + 1)
    )
    body = collections.OrderedDict()
    for i in range(len(_STRIDES)):
      shape = (_KERNEL, _KERNEL, _FILTERS if i else channels, _FILTERS)
      body[f'conv{i}_kernel'] = _uniform(shape, seeds[2 * i])
      body[f'conv{i}_bias'] = _uniform((_FILTERS,), seeds[2 * i + 1])
    body['dense_kernel'], body['dense_bias'] = layers.uniform_fan_in(
        seeds[-1], (flat_size, _EMBEDDING_SIZE)
    )
    return body

  def embed(body, x, mask=None):
    del mask  # Examples do not see each other.
    for i, stride in enumerate(_STRIDES):
      kernel = body[f'conv{i}_kernel']
      x = tf.nn.conv2d(tf.cast(x, kernel.dtype), kernel, stride, 'SAME')
      x = tf.sigmoid(x + body[f'conv{i}_bias'])
    x = tf.reshape(x, [-1, flat_size])
    return layers.dense(x, body['dense_kernel'], body['dense_bias'])

  return model_lib.Model(
      name='smooth_lenet',
      input_shape=tuple(input_shape),
      embedding_size=_EMBEDDING_SIZE,
      num_classes=num_classes,
      init_body=init_body,
      init_head=layers.dense_head(layers.uniform_fan_in, _EMBEDDING_SIZE),
      embed=embed,
      classify=lambda head, e: layers.classify_linear(head, tf.sigmoid(e)),
  )


def _uniform(shape, seed):
  return tf.random.stateless_uniform(shape, seed, -_INIT_BOUND, _INIT_BOUND)
