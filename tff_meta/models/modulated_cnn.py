"""CAFeMe's networks: a base network gated by a modulator that sees the context.

The modulator embeds every example of a context batch, averages over the batch,
and turns the mean into one number for every channel and unit of the base
network, which gates there how much passes.
"""

import collections
from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model

Gating = Literal['c1', 'c0', 'c2']

_CONTEXT_UNITS = 200  # Width of a context, and of the layer after it.


class _Layout(NamedTuple):
  """Widths of a network.

  Attributes:
    kernel_size: Of the convolutions.
    padding: Of the convolutions.
    num_filters: Of the blocks, which are the same in base and modulator.
    num_units: Of the base's dense layers.
    num_feature_units: Of the modulator's dense layers before the mean.
    normalizes: Whether the base's dense layers have batch normalisation.
  """

  kernel_size: int
  padding: str
  num_filters: tuple[int, ...]
  num_units: tuple[int, ...]
  num_feature_units: tuple[int, ...]
  normalizes: bool = True


_R = _Layout(5, 'VALID', (32, 64), (512,), (100, _CONTEXT_UNITS))
_C = _Layout(3, 'SAME', (64,) * 3, (576, 576), (100, 100, _CONTEXT_UNITS))
_SMALL = _Layout(3, 'SAME', (32, 64), (128,), (100, _CONTEXT_UNITS))
_MLP = _Layout(0, '', (), (100,), (100, _CONTEXT_UNITS), normalizes=False)

# Every variant's number of vectors for a layer, and what they do with it.
_GATINGS = {
    'c1': (1, lambda a, eta: a * tf.sigmoid(eta[0])),
    'c0': (1, lambda a, eta: a + eta[0]),
    'c2': (2, lambda a, eta: a * eta[0] + eta[1]),
}


@dataclasses.dataclass(frozen=True)
class ModulatedModel(model.Model):
  """A network whose body is `OrderedDict(base=..., modulator=...)`.

  `embed` takes the very batch that it embeds as the unlabelled context, so that
  the network can stand wherever a `Model` is expected.

  Attributes:
    num_labels: Width C of the one-hot labels in the context; 0 where the
      context has no labels.
    modulate: From the body's parameters and a context, `x` `[B, ...]`, `y`
      int32 `[B]` and a mask `[B]` or None, to eta `[V, G]`: V vectors (two
      where gating is `'c2'`, else one) with a number for each of the G channels
      and units that are gated. `y` is read only where the context has labels.
      Without examples eta is that of a context of zeros.
    embed_modulated: From the body's parameters, eta `[V, G]`, examples
      `[n, ...]` and a mask `[n]` or None to embeddings `[n, D]`.
    rebuild: `(num_classes, *, gating, num_labels) -> ModulatedModel`, the same
      network in another variant.
  """

  num_labels: int
  modulate: Callable[..., tf.Tensor]
  embed_modulated: Callable[..., tf.Tensor]
  rebuild: Callable[..., 'ModulatedModel']

  def modulated_logits(
      self,
      weights: model.Weights,
      eta: tf.Tensor,
      x: tf.Tensor,
      mask: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Returns class scores `[n, C]` of `x` `[n, ...]` under eta `[V, G]`."""
    embedding = self.embed_modulated(weights['body'], eta, x, mask)
    return self.classify(weights['head'], embedding)


def build_modulated_cnn(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int | None = 10,
    *,
    gating: Gating = 'c1',
    num_labels: int = 0,
) -> ModulatedModel:
  """Builds CAFeMe's modulated network for an image size.

  A layer's output a, after pooling and also once after flattening, becomes

  *   `a * sigmoid(eta)` where gating is `'c1'` (eq. 4.4); as eta grows it is
      the base;
  *   `a + eta` (`'c0'`), or `a * eta_0 + eta_1` (`'c2'`, FiLM).

  Two networks were published, with ten classes and no labels in the context:

  *   28x28x1: 583,242 parameters of the base and 543,220 of the modulator, 1632
      gates;
  *   32x32x3: 1,006,858 and 725,000 parameters, 2368 gates. Larger images get
      this one too; three 2x2 poolings leave an eighth of each side.

  Images of any other size get a narrow network of ours, with two poolings.

  Batch normalisation uses the statistics of the batch, in prediction too.

  Args:
    input_shape: Height, width and channels of one example; at least 4x4.
    num_classes: The number of classes of the head; None builds no head.
    gating: How eta acts.
    num_labels: C where the context has labels 0..C-1, which are appended to
      every example's features, one-hot; otherwise 0.

  Returns:
    The model.

  Raises:
    ValueError: The input is no image or too small, or `gating` is unknown.

  Source: Vettoruzzo, Bouguelia and Rögnvaldsson 2023, "Personalized Federated
  Learning with Contextual Modulation and Meta-Learning" (CAFeMe), and its
  released code, whose widths these are.
  """
  return _build(
      'modulated_cnn',
      functools.partial(_layout, otherwise='modulated_mlp'),
      input_shape,
      num_classes,
      gating,
      num_labels,
  )


def build_modulated_mlp(
    input_shape: tuple[int, ...] = (28, 28, 1),
    num_classes: int | None = 10,
    *,
    gating: Gating = 'c1',
    num_labels: int = 0,
) -> ModulatedModel:
  """Builds a modulated perceptron, for small examples that are no images.

  The base is dense 100 with ReLU, the modulator as on 28x28 images but for the
  convolutions. There is no batch normalisation: without a context of their own
  examples do not see each other.

  Args:
    input_shape: The shape of one example; it is flattened.
    num_classes: The number of classes of the head; None builds no head.
    gating: As in `build_modulated_cnn`.
    num_labels: As in `build_modulated_cnn`.

  Returns:
    The model.

  Raises:
    ValueError: `gating` is unknown.

  Source: ours, after `build_modulated_cnn`.
  """
  return _build(
      'modulated_mlp',
      lambda _: _MLP,
      input_shape,
      num_classes,
      gating,
      num_labels,
  )


def _build(name, choose_layout, input_shape, num_classes, gating, num_labels):
  """Builds a modulated network; `choose_layout` is a function of the shape."""
  if gating not in _GATINGS:
    raise ValueError(
        f'Expected `gating` to be one of {", ".join(_GATINGS)}, found'
        f' {gating!r}.'
    )
  layout = choose_layout(input_shape)
  num_vectors, gate = _GATINGS[gating]
  num_features = _num_features(layout, input_shape)
  gate_sizes = (*layout.num_filters, num_features, *layout.num_units)
  modulator_kernels = _modulator_kernels(
      layout, input_shape, num_labels, num_vectors * sum(gate_sizes)
  )

  def init_body(seed):
    fold_in = tf.random.experimental.stateless_fold_in
    return collections.OrderedDict(
        base=_init(fold_in(seed, 0), *_base_kernels(layout, input_shape)),
        modulator=_init(fold_in(seed, 1), *modulator_kernels),
    )

  def modulate(body, x, y, mask=None):
    parameters = body['modulator']
    h = _context_features(parameters, layout, x, mask)
    if num_labels:
      h = tf.concat([h, tf.one_hot(y, num_labels, dtype=h.dtype)], 1)
    mask = tf.ones_like(h[:, :1]) if mask is None else mask[:, tf.newaxis]
    mask = tf.cast(mask, h.dtype)
    z = tf.math.divide_no_nan(
        tf.reduce_sum(mask * h, 0, keepdims=True), tf.reduce_sum(mask)
    )
    z = tf.nn.relu(_dense(parameters, 'dense', z))
    return tf.reshape(_dense(parameters, 'eta', z), [num_vectors, -1])

  def embed_modulated(body, eta, x, mask=None):
    etas = tf.split(eta, gate_sizes, axis=1)
    return _embed_base(
        body['base'], layout, x, mask, lambda i, a: gate(a, etas[i])
    )

  def embed(body, x, mask=None):
    if num_labels:
      raise ValueError(
          'Expected a context without labels to be the batch itself, found'
          f' `num_labels` of {num_labels}. Tip: call `modulate`, then'
          ' `embed_modulated`.'
      )
    return embed_modulated(body, modulate(body, x, None, mask), x, mask)

  return ModulatedModel(
      name=name,
      num_classes=num_classes,
      init_body=init_body,
      embed=embed,
      num_labels=num_labels,
      modulate=modulate,
      embed_modulated=embed_modulated,
      rebuild=lambda num_classes, *, gating, num_labels: _build(
          name, choose_layout, input_shape, num_classes, gating, num_labels
      ),
      **_head(layout, input_shape),
  )


def build_cafeme_base(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int | None = 10,
) -> model.Model:
  """Builds the base of `build_modulated_cnn` alone, without gates.

  Args:
    input_shape: Height, width and channels of one example; at least 4x4.
    num_classes: The number of classes of the head; None builds no head.

  Returns:
    The model; from the same seed it has the modulated network's base and head.

  Raises:
    ValueError: The input is no image or too small.

  Source: the network of the baselines in CAFeMe (Vettoruzzo et al. 2023).
  """
  layout = _layout(input_shape, otherwise='mlp')

  def init_body(seed):
    seed = tf.random.experimental.stateless_fold_in(seed, 0)
    return _init(seed, *_base_kernels(layout, input_shape))

  def embed(body, x, mask=None):
    return _embed_base(body, layout, x, mask, lambda i, a: a)

  return model.Model(
      name='cafeme_base',
      num_classes=num_classes,
      init_body=init_body,
      embed=embed,
      **_head(layout, input_shape),
  )


def _layout(input_shape, otherwise):
  """The widths for a size of images; `otherwise` takes what is none."""
  if len(input_shape) != 3 or min(input_shape[:2]) < 4:
    raise ValueError(
        'Expected `input_shape` to be (height, width, channels) with height and'
        f' width at least 4, found {tuple(input_shape)}. Tip: grey images'
        f' need a channel axis; use `{otherwise}` for smaller ones and'
        ' vectors.'
    )
  if tuple(input_shape[:2]) == (28, 28):
    return _R
  return _C if min(input_shape[:2]) >= 32 else _SMALL


def _head(layout, input_shape):
  """What base and modulated network have in common as a `Model`."""
  return dict(
      input_shape=tuple(input_shape),
      embedding_size=layout.num_units[-1],
      init_head=layers.dense_head(layers.uniform_fan_in, layout.num_units[-1]),
      classify=layers.classify_linear,
  )


def _num_features(layout, input_shape):
  """The width after the blocks."""
  if not layout.num_filters:
    return math.prod(input_shape)
  lost = layout.kernel_size - 1 if layout.padding == 'VALID' else 0
  sides = input_shape[:2]
  for _ in layout.num_filters:
    sides = [(side - lost) // 2 for side in sides]
  return sides[0] * sides[1] * layout.num_filters[-1]


def _conv_kernels(layout, input_shape):
  size = layout.kernel_size
  inputs = (input_shape[-1], *layout.num_filters)
  return collections.OrderedDict(
      (f'conv{i + 1}', (size, size, inputs[i], num_filters))
      for i, num_filters in enumerate(layout.num_filters)
  )


def _dense_kernels(num_inputs, num_units):
  inputs = (num_inputs, *num_units)
  return collections.OrderedDict(
      (f'dense{i + 1}', (inputs[i], units)) for i, units in enumerate(num_units)
  )


def _base_kernels(layout, input_shape):
  """Shapes of the base's kernels, and the layers with batch normalisation."""
  kernels = _conv_kernels(layout, input_shape)
  num_features = _num_features(layout, input_shape)
  kernels |= _dense_kernels(num_features, layout.num_units)
  return kernels, tuple(kernels) if layout.normalizes else ()


def _modulator_kernels(layout, input_shape, num_labels, num_outputs):
  """Shapes of the modulator's kernels; only convolutions are normalised."""
  kernels = _conv_kernels(layout, input_shape)
  normalized = tuple(kernels)
  num_features = _num_features(layout, input_shape)
  kernels |= _dense_kernels(num_features, layout.num_feature_units)
  context_size = layout.num_feature_units[-1] + num_labels
  kernels['dense'] = (context_size, _CONTEXT_UNITS)
  kernels['eta'] = (_CONTEXT_UNITS, num_outputs)
  return kernels, normalized


def _init(seed, kernels, normalized):
  """Initial parameters of layers with kernels of these shapes."""
  parameters = collections.OrderedDict()
  for i, (name, shape) in enumerate(kernels.items()):
    layer_seed = tf.random.experimental.stateless_fold_in(seed, i)
    kernel, bias = layers.uniform_fan_in(layer_seed, shape)
    parameters[f'{name}_kernel'], parameters[f'{name}_bias'] = kernel, bias
    if name in normalized:
      parameters[f'{name}_gamma'] = tf.ones(shape[-1:])
      parameters[f'{name}_beta'] = tf.zeros(shape[-1:])
  return parameters


def _dense(parameters, name, x):
  return layers.dense(
      x, parameters[f'{name}_kernel'], parameters[f'{name}_bias']
  )


def _normalize(parameters, name, x):
  """Batch normalisation after a layer, whose own bias it takes out."""
  bias, gamma, beta = (
      parameters[f'{name}_{part}'] for part in ('bias', 'gamma', 'beta')
  )
  return layers.batch_norm(x, bias, gamma, beta)


def _blocks(parameters, layout, x, gate):
  """[conv, batch norm, ReLU, max-pool, gate] blocks, flattened."""
  for i in range(len(layout.num_filters)):
    name = f'conv{i + 1}'
    x = layers.conv(x, parameters[f'{name}_kernel'], layout.padding)
    x = tf.nn.relu(_normalize(parameters, name, x))
    x = gate(i, layers.max_pool(x))
  return tf.reshape(x, [-1, math.prod(x.shape[1:])])


def _dense_block(parameters, name, x, normalizes):
  """[dense, batch norm, ReLU]."""
  if not normalizes:
    return tf.nn.relu(_dense(parameters, name, x))
  kernel = parameters[f'{name}_kernel']
  x = tf.matmul(tf.cast(x, kernel.dtype), kernel)
  # Batch normalisation is written for images: here, of one pixel.
  x = x[:, tf.newaxis, tf.newaxis]
  return tf.nn.relu(_normalize(parameters, name, x)[:, 0, 0])


def _embed_base(parameters, layout, x, mask, gate):
  """The base network, with `gate(i, a)` after its i-th gated layer."""

  @layers.allow_padding
  def embed(parameters, x):
    num_blocks = len(layout.num_filters)
    x = gate(num_blocks, _blocks(parameters, layout, x, gate))
    for i in range(len(layout.num_units)):
      name = f'dense{i + 1}'
      x = _dense_block(parameters, name, x, layout.normalizes)
      x = gate(num_blocks + 1 + i, x)
    return x

  return embed(parameters, x, mask)


def _context_features(parameters, layout, x, mask):
  """The modulator up to the mean: h `[B, 200]`."""

  @layers.allow_padding
  def features(parameters, x):
    x = _blocks(parameters, layout, x, lambda i, a: a)
    for i in range(len(layout.num_feature_units)):
      x = tf.nn.relu(_dense(parameters, f'dense{i + 1}', x))
    return x

  return features(parameters, x, mask)
