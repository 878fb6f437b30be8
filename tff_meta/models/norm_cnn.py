"""A small convolutional network whose normalisation can be a client's own."""

import collections
from collections.abc import Callable
import dataclasses

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model

_FILTERS = (32, 64)
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class NormModel(model.Model):
  """A network with batch normalisation.

  It normalises by the statistics of the batch, as in training, unless the
  body's parameters hold statistics, too, as in prediction.

  Attributes:
    norm_parameters: Names in the body of the scales and offsets.
    statistics: `(body, x, mask) -> OrderedDict`, the means and variances
      `[channels]` by which each layer normalises examples `[n, ...]`, for a
      body that holds none. Of no examples they say nothing.
  """

  norm_parameters: tuple[str, ...] = dataclasses.field(kw_only=True)
  statistics: Callable[..., model.Params] = dataclasses.field(kw_only=True)

  def initial_statistics(self) -> model.Params:
    """Returns means of 0 and variances of 1, in the place of statistics."""
    found = collections.OrderedDict()
    for i, width in enumerate(_FILTERS, 1):
      found[f'norm{i}_mean'] = tf.zeros([width])
      found[f'norm{i}_variance'] = tf.ones([width])
    return found


def build_norm_cnn(
    input_shape: tuple[int, ...], num_classes: int | None
) -> NormModel:
  """Builds two blocks of a 3x3 convolution, normalisation, ReLU and pooling.

  Args:
    input_shape: Height, width and channels of one example; at least 4x4.
    num_classes: The number of classes of the dense head; None builds no head.

  Returns:
    The model, of 32 and 64 filters.

  Raises:
    ValueError: The input is no image, or too small.
  """
  if len(input_shape) != 3 or min(input_shape[:2]) < 4:
    raise ValueError(
        'Expected `input_shape` to be (height, width, channels) with height and'
        f' width at least 4, found {tuple(input_shape)}. Tip: grey images'
        " need a channel axis; no network with normalisation of a client's own"
        ' takes smaller ones and vectors, so these need another algorithm.'
    )
  height, width, channels = input_shape
  embedding_size = (height // 4) * (width // 4) * _FILTERS[1]

  def init_body(seed):
    body, num_inputs = collections.OrderedDict(), channels
    for i, num_filters in enumerate(_FILTERS, 1):
      body[f'conv{i}_kernel'], _ = layers.kaiming_normal(
          tf.random.experimental.stateless_fold_in(seed, i),
          (3, 3, num_inputs, num_filters),
      )
      body[f'norm{i}_scale'] = tf.ones([num_filters])
      body[f'norm{i}_offset'] = tf.zeros([num_filters])
      num_inputs = num_filters
    return body

  def normalise(body, i, x):
    scale, offset = body[f'norm{i}_scale'], body[f'norm{i}_offset']
    if f'norm{i}_mean' not in body:
      return layers.batch_norm(x, tf.zeros_like(offset), scale, offset)
    factor = scale * tf.math.rsqrt(body[f'norm{i}_variance'] + _EPSILON)
    return (x - body[f'norm{i}_mean']) * factor + offset

  def forward(body, x, see=lambda i, x: None):
    for i in range(1, len(_FILTERS) + 1):
      x = layers.conv(x, body[f'conv{i}_kernel'], 'SAME')
      see(i, x)
      x = layers.max_pool(tf.nn.relu(normalise(body, i, x)))
    return tf.reshape(x, [-1, embedding_size])

  def statistics(body, x, mask):
    seen: dict[str, tf.Tensor] = collections.OrderedDict()

    def see(i, x):
      seen[f'norm{i}_mean'] = tf.reduce_mean(x, [0, 1, 2])
      seen[f'norm{i}_variance'] = tf.math.reduce_variance(x, [0, 1, 2])

    layers.allow_padding(lambda body, x: forward(body, x, see))(body, x, mask)
    return seen

  return NormModel(
      name='norm_cnn',
      input_shape=tuple(input_shape),
      embedding_size=embedding_size,
      num_classes=num_classes,
      init_body=init_body,
      init_head=layers.dense_head(layers.xavier_uniform, embedding_size),
      embed=layers.allow_padding(forward),
      classify=layers.classify_linear,
      norm_parameters=tuple(
          f'norm{i}_{name}'
          for i in range(1, len(_FILTERS) + 1)
          for name in ('scale', 'offset')
      ),
      statistics=statistics,
  )
