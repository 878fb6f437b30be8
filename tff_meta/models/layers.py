"""Layers as functions of explicit parameters, and their initialisers.

Every layer can be differentiated twice, takes any number of examples and
computes in the dtype of its parameters.
"""

import collections
from collections.abc import Iterator
import contextlib
import contextvars
import math

import tensorflow as tf

Params = collections.OrderedDict

_BATCH_NORM_EPSILON = 1e-5


def uniform_fan_in(
    seed: tf.Tensor, kernel_shape: tuple[int, ...]
) -> tuple[tf.Tensor, tf.Tensor]:
  """Kernel and bias from uniform(-1/sqrt(fan_in), 1/sqrt(fan_in)).

  Args:
    seed: int32 [2].
    kernel_shape: [height, width, in, out] or [in, out]; fan_in is the product
      of all but the last.

  Returns:
    The kernel and the bias [out], float32.

  Source: the default of PyTorch's Linear and Conv2d (He et al. 2015, "Delving
  Deep into Rectifiers", with negative slope sqrt(5)).
  """
  bound = 1.0 / math.sqrt(math.prod(kernel_shape[:-1]))
  kernel_seed, bias_seed = _two_seeds(seed)
  kernel = tf.random.stateless_uniform(kernel_shape, kernel_seed, -bound, bound)
  bias = tf.random.stateless_uniform(
      kernel_shape[-1:], bias_seed, -bound, bound
  )
  return kernel, bias


def kaiming_normal(
    seed: tf.Tensor, kernel_shape: tuple[int, ...]
) -> tuple[tf.Tensor, tf.Tensor]:
  """Kernel from normal(0, sqrt(2/fan_in)), bias zero.

  Args:
    seed: int32 [2].
    kernel_shape: [height, width, in, out] or [in, out].

  Returns:
    The kernel and the bias [out], float32.

  Source: He et al. 2015, "Delving Deep into Rectifiers", eq. 10.
  """
  stddev = math.sqrt(2.0 / math.prod(kernel_shape[:-1]))
  kernel = tf.random.stateless_normal(kernel_shape, seed, stddev=stddev)
  return kernel, tf.zeros(kernel_shape[-1:])


def xavier_uniform(
    seed: tf.Tensor, kernel_shape: tuple[int, int]
) -> tuple[tf.Tensor, tf.Tensor]:
  """Kernel from uniform(+-sqrt(6/(fan_in + fan_out))), bias zero.

  Args:
    seed: int32 [2].
    kernel_shape: [in, out].

  Returns:
    The kernel and the bias [out], float32.

  Source: Glorot and Bengio 2010, "Understanding the difficulty of training
  deep feedforward neural networks", eq. 16.
  """
  bound = math.sqrt(6.0 / sum(kernel_shape))
  kernel = tf.random.stateless_uniform(kernel_shape, seed, -bound, bound)
  return kernel, tf.zeros(kernel_shape[-1:])


def dense_head(initializer, embedding_size: int):
  """The `init_head` of a linear classifier on the embedding.

  Args:
    initializer: One of the initialisers of this file.
    embedding_size: The width D of the embedding.

  Returns:
    A function from a seed and a number of classes to the head's parameters.
  """

  def init_head(seed, num_classes):
    kernel, bias = initializer(seed, (embedding_size, num_classes))
    return collections.OrderedDict(kernel=kernel, bias=bias)

  return init_head


def classify_linear(head: Params, embedding: tf.Tensor) -> tf.Tensor:
  """The `classify` of a linear classifier: [n, D] to logits [n, C]."""
  return dense(embedding, head['kernel'], head['bias'])


def dense(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
  """`x @ kernel + bias`: [n, in] to [n, out]."""
  return tf.matmul(tf.cast(x, kernel.dtype), kernel) + bias


def conv(x: tf.Tensor, kernel: tf.Tensor, padding: str) -> tf.Tensor:
  """Convolution with stride 1, without a bias.

  Args:
    x: [n, height, width, in].
    kernel: [kernel height, kernel width, in, out].
    padding: 'VALID' or 'SAME'.

  Returns:
    [n, height', width', out].
  """
  x = tf.cast(x, kernel.dtype)
  return tf.nn.conv2d(x, kernel, strides=1, padding=padding)


_POOLING = dict(ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding='VALID')


_in_one_graph = contextvars.ContextVar('in_one_graph', default=False)


@contextlib.contextmanager
def in_one_graph() -> Iterator[None]:
  """Makes layers without functions of their own, which TensorFlow Lite lacks.

  They compute the same; their gradients may be slower.
  """
  token = _in_one_graph.set(True)
  try:
    yield
  finally:
    _in_one_graph.reset(token)


def max_pool(x: tf.Tensor) -> tf.Tensor:
  """The maximum of 2x2 windows; an odd last row or column is dropped.

  Inside a loop TensorFlow 2.14 takes oneDNN's fast gradient of this operation
  or its own slow one (a round of LeNet then takes 1.4 times as long), depending
  on the order in which it happens to visit the loop's graph. In a function of
  its own, with the forward operation done again, it always takes the fast one.

  Args:
    x: [n, height, width, channels].

  Returns:
    [n, height // 2, width // 2, channels].
  """
  if _in_one_graph.get():
    return tf.raw_ops.MaxPool(input=x, **_POOLING)
  return _max_pool(x)


@tf.custom_gradient
def _max_pool(x):
  return tf.raw_ops.MaxPool(input=x, **_POOLING), lambda dy: _max_pool_gradient(
      x, dy
  )


@tf.function(autograph=False, experimental_attributes={'_noinline': True})
def _max_pool_gradient(x, dy):
  y = tf.raw_ops.MaxPool(input=x, **_POOLING)
  return tf.raw_ops.MaxPoolGrad(
      orig_input=x, orig_output=y, grad=dy, **_POOLING
  )


def batch_norm(
    x: tf.Tensor, bias: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor
) -> tf.Tensor:
  """Batch normalisation that always uses the statistics of this batch.

  `gamma * (x + bias - mean) / sqrt(var + 1e-5) + beta`, mean and biased
  variance over the batch and both spatial axes, per channel. There is no
  running average, in training or prediction, hence predictions depend on the
  other examples of the batch.

  The mean has the bias in it, too, so nothing depends on the bias. It is not
  added, and its gradient is exactly 0: computed, it would be rounding noise, of
  which Adam's first steps make full steps.

  TensorFlow has one operation for float32, one for its gradient, and for the
  gradient of that a formula. (`tf.nn.moments` is not used for other dtypes: it
  stops the gradient at the mean inside the variance, which makes second
  derivatives wrong.)

  Args:
    x: [n, height, width, channels], n of at least 1, no padding among them.
    bias: [channels], of the layer before.
    gamma: [channels].
    beta: [channels].

  Returns:
    [n, height, width, channels].

  Source: Ioffe and Szegedy 2015, "Batch Normalization", algorithm 1.
  """
  beta = beta + 0.0 * bias  # With `+=` a tf.Variable would be an error.
  if x.dtype == tf.float32:
    no_average = tf.zeros([0])
    return tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=gamma,
        offset=beta,
        mean=no_average,
        variance=no_average,
        epsilon=_BATCH_NORM_EPSILON,
        is_training=True,
    ).y
  centred = x - tf.reduce_mean(x, [0, 1, 2])
  variance = tf.reduce_mean(centred**2, [0, 1, 2])
  return (
      centred * (gamma * tf.math.rsqrt(variance + _BATCH_NORM_EPSILON)) + beta
  )


def allow_empty(embed):
  """Makes an `embed` function of examples that do not see each other complete.

  TensorFlow 2.14's oneDNN convolution returns its input's shape for an empty
  batch, so an empty batch gets one row of zeros, which is dropped again.

  Args:
    embed: A function of parameters and x [n, ...], n of at least 1, to
      embeddings [n, D].

  Returns:
    A function of parameters, x [n, ...] for all n >= 0, and a mask, which is
    not looked at, to embeddings [n, D].
  """

  def embed_any(body, x, mask=None):
    del mask
    x = tf.convert_to_tensor(x)
    if x.shape[0]:
      return embed(body, x)
    num_examples = tf.shape(x)[0]
    is_empty = tf.cast(tf.equal(num_examples, 0), tf.int32)
    # Not `tf.pad`: oneDNN takes that into a convolution, without the row.
    x = tf.concat([x, tf.zeros([is_empty, *x.shape[1:]], x.dtype)], 0)
    return embed(body, x)[:num_examples]

  return embed_any


def allow_padding(embed):
  """Makes an `embed` function of examples that see each other complete.

  Padding is dropped first, so that it does not enter batch statistics, and
  comes back as embeddings of zeros.

  Args:
    embed: A function of parameters and x [n, ...], n of at least 1, to
      embeddings [n, D].

  Returns:
    A function of parameters, x [n, ...] for all n >= 0, and mask [n], 1 for an
    example and 0 for padding, or None for no padding, to embeddings [n, D].
  """
  embed_examples = allow_empty(embed)

  def embed_any(body, x, mask=None):
    if mask is None:
      return embed_examples(body, x)
    rows = tf.cast(tf.where(mask > 0), tf.int32)  # [number of examples, 1].
    embeddings = embed_examples(body, tf.gather_nd(x, rows))
    shape = [tf.shape(x)[0], embeddings.shape[1]]
    return tf.scatter_nd(rows, embeddings, shape)

  return embed_any


def _two_seeds(seed):
  return tf.unstack(tf.random.experimental.stateless_split(seed, 2))
