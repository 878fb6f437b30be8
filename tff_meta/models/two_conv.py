"""LeCun's layout, two 5x5 convolutions and dense layers, at given widths."""

import collections

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model

_KERNEL_SIZE = 5


def build_two_conv(
    name: str,
    input_shape: tuple[int, int, int],
    num_classes: int | None,
    *,
    num_filters: tuple[int, int],
    num_units: tuple[int, int],
    linear_embedding: bool = False,
) -> model.Model:
  """Builds two [conv5x5, ReLU, max-pool] blocks, two dense layers, and a head.

  Convolutions have no padding. All parameters start from
  uniform(-1/sqrt(fan_in), 1/sqrt(fan_in)).

  Args:
    name: The name of the network.
    input_shape: Height, width and channels of one example; at least 16x16.
    num_classes: The number of classes of the dense head; None builds no head.
    num_filters: The widths of the convolutions.
    num_units: The widths of the dense layers; the second is the embedding's.
    linear_embedding: Whether the embedding is the second dense layer before its
      ReLU; the classifier then begins with the ReLU. The logits are the same.

  Returns:
    The model; its body is everything but the last dense layer.

  Raises:
    ValueError: The input is no image, or too small.

  Source: LeCun, Bottou, Bengio and Haffner 1998, "Gradient-Based Learning
  Applied to Document Recognition", for the layout.
  """
  if len(input_shape) != 3 or min(input_shape[:2]) < 16:
    raise ValueError(
        'Expected `input_shape` to be (height, width, channels) with height and'
        f' width at least 16, found {tuple(input_shape)}. Tip: grey'
        ' images need a channel axis; use `conv4` for smaller images and `mlp`'
        ' for vectors.'
    )
  height, width = (_size_after_blocks(size) for size in input_shape[:2])
  num_features = height * width * num_filters[1]
  kernels = collections.OrderedDict(
      conv1=(_KERNEL_SIZE, _KERNEL_SIZE, input_shape[-1], num_filters[0]),
      conv2=(_KERNEL_SIZE, _KERNEL_SIZE, *num_filters),
      dense1=(num_features, num_units[0]),
      dense2=num_units,
  )

  def init_body(seed):
    body = collections.OrderedDict()
    for i, (layer, shape) in enumerate(kernels.items()):
      layer_seed = tf.random.experimental.stateless_fold_in(seed, i)
      kernel, bias = layers.uniform_fan_in(layer_seed, shape)
      body[f'{layer}_kernel'], body[f'{layer}_bias'] = kernel, bias
    return body

  @layers.allow_empty
  def embed(body, x):
    for layer in ('conv1', 'conv2'):
      kernel, bias = body[f'{layer}_kernel'], body[f'{layer}_bias']
      x = tf.nn.relu(layers.conv(x, kernel, 'VALID') + bias)
      x = layers.max_pool(x)
    x = tf.reshape(x, [-1, num_features])
    x = tf.nn.relu(layers.dense(x, body['dense1_kernel'], body['dense1_bias']))
    x = layers.dense(x, body['dense2_kernel'], body['dense2_bias'])
    return x if linear_embedding else tf.nn.relu(x)

  def classify(head, embedding):
    if linear_embedding:
      embedding = tf.nn.relu(embedding)
    return layers.classify_linear(head, embedding)

  return model.Model(
      name=name,
      input_shape=tuple(input_shape),
      embedding_size=num_units[1],
      num_classes=num_classes,
      init_body=init_body,
      init_head=layers.dense_head(layers.uniform_fan_in, num_units[1]),
      embed=embed,
      classify=classify,
  )


def _size_after_blocks(size):
  """What two blocks leave of one side of the image."""
  for _ in range(2):
    size = (size - _KERNEL_SIZE + 1) // 2
  return size
