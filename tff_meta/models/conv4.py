"""The four-block convolutional embedding of few-shot learning, as in FRL."""

import collections

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model

_NUM_BLOCKS = 4
_NUM_FILTERS = 64


def build_conv4(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int | None = None,
) -> model.Model:
  """Builds four blocks of conv3x3 with 64 filters, batch norm, ReLU, max-pool.

  The mean over what space is left is the 64-dimensional embedding. 113,088
  parameters for three channels, at every size:

  *   32x32: no padding, max-pool in blocks 1 and 2 (2x2 is left);
  *   84x84: no padding, max-pool in all blocks (3x3 is left);
  *   any other size: 'same' padding, max-pool in blocks 1 and 2.

  Batch normalisation uses the statistics of the batch, in prediction too.

  Args:
    input_shape: Height, width and channels of one example; at least 4x4.
    num_classes: The number of classes of the linear head (Xavier-uniform, as
      FRL's linear variant has it); None builds no head.

  Returns:
    The model.

  Raises:
    ValueError: The input is no image, or too small.

  Source: Park et al. 2021, "Few-Round Learning for Federated Learning", and its
  released code (32x32 and 84x84); the rule for other sizes is ours.
  """
  if len(input_shape) != 3 or min(input_shape[:2]) < 4:
    raise ValueError(
        'Expected `input_shape` to be (height, width, channels) with height and'
        f' width at least 4, found {tuple(input_shape)}. Tip: grey images'
        ' need a channel axis; use `mlp` for smaller ones and vectors.'
    )
  padding, num_pools = _layout(input_shape)

  def init_body(seed):
    body = collections.OrderedDict()
    num_inputs = input_shape[-1]
    for i in range(_NUM_BLOCKS):
      kernel, bias = layers.kaiming_normal(
          tf.random.experimental.stateless_fold_in(seed, i),
          (3, 3, num_inputs, _NUM_FILTERS),
      )
      body[f'conv{i + 1}_kernel'] = kernel
      body[f'conv{i + 1}_bias'] = bias
      body[f'norm{i + 1}_gamma'] = tf.ones([_NUM_FILTERS])
      body[f'norm{i + 1}_beta'] = tf.zeros([_NUM_FILTERS])
      num_inputs = _NUM_FILTERS
    return body

  @layers.allow_padding
  def embed(body, x):
    for i in range(1, _NUM_BLOCKS + 1):
      x = layers.conv(x, body[f'conv{i}_kernel'], padding)
      x = layers.batch_norm(
          x,
          body[f'conv{i}_bias'],
          body[f'norm{i}_gamma'],
          body[f'norm{i}_beta'],
      )
      x = tf.nn.relu(x)
      if i <= num_pools:
        x = layers.max_pool(x)
    return tf.reduce_mean(x, [1, 2])

  return model.Model(
      name='conv4',
      input_shape=tuple(input_shape),
      embedding_size=_NUM_FILTERS,
      num_classes=num_classes,
      init_body=init_body,
      init_head=layers.dense_head(layers.xavier_uniform, _NUM_FILTERS),
      embed=embed,
      classify=layers.classify_linear,
  )


def _layout(input_shape):
  """The padding and the number of blocks that max-pool."""
  match tuple(input_shape[:2]):
    case (32, 32):
      return 'VALID', 2
    case (84, 84):
      return 'VALID', 4
    case _:
      return 'SAME', 2
