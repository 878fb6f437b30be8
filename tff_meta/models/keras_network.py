"""A Keras model as a network: pure functions on weights outside of it.

Keras' layers read their weights from attributes. While a function is traced (or
run) tensors are put in their place, so that nothing of the model is captured,
and derivatives of any order are those of its operations.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import math
import threading
from typing import Any, NamedTuple

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model

_TIP_KEEP = (
    ' Tip: keep_weights=True begins with the weights that the model has.'
)
_lock = threading.RLock()  # Tensors are in the place of weights for one only.


class _Place(NamedTuple):
  """Where a weight is: an attribute of a layer, or of what is in a layer."""

  module: tf.Module
  attribute: str

  @property
  def weight(self) -> tf.Variable:
    """The weight there."""
    return vars(self.module)[self.attribute]

  @property
  def name(self) -> str:
    """What it is called in errors."""
    return f'{self.attribute!r} of the layer {self.module.name!r}'


def from_keras(keras_model: Any, *, keep_weights: bool = False) -> model.Model:
  """Makes a network of a Keras model, which is left as it is.

  The head is the last layer, which has to be a `Dense` one, without its softmax
  if it has one: losses are of logits. The body is everything before. Weights of
  layers that are not trainable stay as they are.

  Args:
    keras_model: A functional or `Sequential` `tf.keras.Model` with one input of
      a known shape and one output. What it was compiled with is not used.
    keep_weights: Whether the body begins with the weights that the model has,
      whatever the seed; otherwise they are drawn from the seed as the layers'
      initializers say. A head is always drawn.

  Returns:
    The network; it computes in float32.

  Raises:
    TypeError: If it is no Keras model.
    ValueError: If layers behave in another way in training or keep statistics
      (`Dropout`, `BatchNormalization`), have penalties or constraints, cannot
      be split or drawn, or the head is not trainable; names the layer.
  """
  if not isinstance(keras_model, tf.keras.Model):
    raise TypeError(
        f'Expected a `tf.keras.Model`, found a {type(keras_model).__name__}.'
    )
  head = _check_form(keras_model)
  body = tf.keras.Model(keras_model.inputs, head.input)
  _check_layers([*_layers(body), head])
  if not head.trainable:
    raise ValueError(
        'Expected a last layer that is trained, found'
        f' {head.name!r} with trainable=False.'
    )
  places, frozen = _places(body)
  constants = [place.weight.numpy() for place in frozen]
  input_shape = tuple(keras_model.input_shape[1:])
  embedding_size = int(head.input_shape[-1])

  def run(tensors, x, training):
    values = [*tensors, *map(tf.constant, constants)]
    with _in_place([*places, *frozen], values):
      return body(x, training=training)

  _check_is_pure(run, places, input_shape)
  names = [f'weight{i:03}_{place.attribute}' for i, place in enumerate(places)]
  initializers = {
      name: _kept(place) if keep_weights else _initializer(place)
      for name, place in zip(names, places, strict=True)
  }
  of_kernel = _drawing(head.kernel_initializer, "the last layer's kernel")
  of_bias = _drawing(head.bias_initializer, "the last layer's bias")

  def init_body(seed):
    fold_in = tf.random.experimental.stateless_fold_in
    return collections.OrderedDict(
        (name, draw(fold_in(seed, i), tuple(places[i].weight.shape)))
        for i, (name, draw) in enumerate(initializers.items())
    )

  def init_head(seed, num_classes):
    fold_in = tf.random.experimental.stateless_fold_in
    return collections.OrderedDict(
        kernel=of_kernel(fold_in(seed, 0), (embedding_size, num_classes)),
        bias=of_bias(fold_in(seed, 1), (num_classes,)),
    )

  def embed(weights, x):
    return run([weights[name] for name in names], x, False)

  return model.Model(
      name=keras_model.name,
      input_shape=input_shape,
      embedding_size=embedding_size,
      num_classes=int(head.units),
      init_body=init_body,
      init_head=init_head,
      embed=layers.allow_empty(embed),
      classify=layers.classify_linear,
  )


def _check_form(keras_model: Any) -> Any:
  """Returns the last layer, or raises a ValueError if the form is another."""
  name = keras_model.name
  try:
    inputs, outputs = keras_model.inputs, keras_model.outputs
  except AttributeError:
    inputs = outputs = None
  if not inputs or not outputs:
    raise ValueError(
        f'Expected the Keras model {name!r} to know its input, found a model'
        ' that is not built, or a class of its own. Tip: begin with'
        ' `tf.keras.Input(shape)`, in a functional or Sequential model.'
    )
  if len(inputs) != 1 or len(outputs) != 1:
    raise ValueError(
        f'Expected one input and one output of the Keras model {name!r}, found'
        f' {len(inputs)} and {len(outputs)}.'
    )
  if None in inputs[0].shape[1:]:
    raise ValueError(
        f'Expected an input of a known shape of the Keras model {name!r}, found'
        f' {tuple(inputs[0].shape[1:])}.'
    )
  head = keras_model.layers[-1]
  if not isinstance(head, tf.keras.layers.Dense) or (
      head.output is not outputs[0]
  ):
    raise ValueError(
        f'Expected the last layer of the Keras model {name!r} to be Dense,'
        f' found {head.name!r} ({type(head).__name__}).'
    )
  activation = tf.keras.activations.serialize(head.activation)
  if activation not in ('linear', 'softmax'):
    raise ValueError(
        f'Expected a linear last layer of the Keras model {name!r}, or softmax,'
        f' found {activation!r} in {head.name!r}.'
    )
  if not head.use_bias or len(head.input_shape) != 2:
    raise ValueError(
        f'Expected the last layer of the Keras model {name!r} to have a bias'
        f' and to be of vectors, found {head.name!r} of {head.input_shape}'
        f' {"with" if head.use_bias else "without"} a bias.'
    )
  return head


def _check_layers(found: Sequence[Any]) -> None:
  """Raises a ValueError that names the first layer that cannot work."""
  for layer in found:
    kind, name = type(layer).__name__, layer.name
    if isinstance(layer, tf.keras.layers.BatchNormalization):
      if layer.trainable:
        raise ValueError(
            f'Expected no moving statistics, found those of {name!r} ({kind}),'
            ' which clients cannot keep. Tip: GroupNormalization and'
            ' LayerNormalization have none; with trainable=False they stay as'
            ' they are.'
        )
    if layer.losses:
      raise ValueError(
          f'Expected layers without penalties, found one of {name!r} ({kind}).'
          ' Tip: weight_decay in --hparams, where an algorithm has it.'
      )
    constraints = [
        attribute
        for attribute, value in vars(layer).items()
        if attribute.endswith('_constraint') and value is not None
    ]
    if constraints:
      raise ValueError(
          f'Expected layers without constraints, found {constraints[0]!r} of'
          f' {name!r} ({kind}).'
      )
    if layer.compute_dtype != 'float32':
      raise ValueError(
          f'Expected layers that compute in float32, found {name!r} ({kind})'
          f' in {layer.compute_dtype}.'
      )


def _layers(body: Any) -> list[Any]:
  """Returns the layers within layers, too."""
  return [
      module
      for module in body.submodules
      if isinstance(module, tf.keras.layers.Layer)
      and not isinstance(module, tf.keras.Model)
  ]


def _places(body: Any) -> tuple[list[_Place], list[_Place]]:
  """Returns where weights are: those that are trained, and the others.

  Raises:
    ValueError: If one is in no attribute of its own.
  """
  found: dict[int, _Place] = {}
  again: list[_Place] = []
  for module in body.submodules:
    for attribute, value in sorted(vars(module).items()):
      if isinstance(value, tf.Variable):
        place = _Place(module, attribute)
        again += [place] if id(value) in found else []
        found.setdefault(id(value), place)
  for weight in body.weights:
    if id(weight) not in found or weight.dtype != tf.float32:
      raise ValueError(
          'Expected every weight to be float32 and an attribute of its layer,'
          f' found {weight.name} otherwise.'
      )
  if again:
    raise ValueError(
        f'Expected every weight once, found {again[0].name} again.'
    )
  trained = [found.pop(id(weight)) for weight in body.trainable_weights]
  return trained, list(found.values())


@contextlib.contextmanager
def _in_place(
    places: Sequence[_Place], tensors: Sequence[tf.Tensor]
) -> Iterator[None]:
  """Puts tensors in the place of weights."""
  with _lock:
    weights = [(place, place.weight) for place in places]
    try:
      for place, tensor in zip(places, tensors, strict=True):
        vars(place.module)[place.attribute] = tensor
      yield
    finally:
      for place, weight in weights:
        vars(place.module)[place.attribute] = weight


def _check_is_pure(
    run: Callable[..., tf.Tensor],
    places: Sequence[_Place],
    input_shape: tuple[int, ...],
) -> None:
  """Raises a ValueError if training would draw numbers or change something."""
  tip = (
      ' Tip: leave out Dropout and layers that draw numbers or keep statistics;'
      ' --augmentation varies images.'
  )
  specs = [
      tf.TensorSpec(place.weight.shape, place.weight.dtype) for place in places
  ]
  training = tf.function(
      lambda x, *tensors: run(tensors, x, True), autograph=False
  )
  try:
    traced = training.get_concrete_function(
        tf.TensorSpec([None, *input_shape], tf.float32), *specs
    )
  except Exception as e:  # Whatever a layer raises that has no variable.
    raise ValueError(
        'Expected a Keras model that only reads its weights, found'
        f' {type(e).__name__}: {e}{tip}'
    ) from e
  for operation in traced.graph.get_operations():
    if operation.type != 'Placeholder' and operation.op_def.is_stateful:
      raise ValueError(
          'Expected layers that do in training what they do in use, found'
          f' {operation.type} in {operation.name}.{tip}'
      )
  if traced.captured_inputs:
    raise ValueError(
        'Expected a Keras model that reads nothing but its weights, found'
        f' {traced.captured_inputs[0]}.'
    )


def _kept(place: _Place) -> Callable[..., tf.Tensor]:
  value = place.weight.numpy()
  return lambda seed, shape: tf.constant(value)


def _initializer(place: _Place) -> Callable[..., tf.Tensor]:
  """Returns what draws a weight as its layer would."""
  module, attribute = place
  if getattr(module, 'unit_forget_bias', False) and attribute == 'bias':
    raise ValueError(
        f'Expected weights that are drawn alike, found {place.name}.{_TIP_KEEP}'
    )
  for name in attribute, attribute.removesuffix('_kernel'):
    found = getattr(module, f'{name}_initializer', None)
    if found is not None:
      return _drawing(found, place.name)
  raise ValueError(
      f'Expected an initializer of {place.name}, found none.{_TIP_KEEP}'
  )


def _drawing(initializer: Any, of: str) -> Callable[..., tf.Tensor]:
  """Returns `(seed, shape) -> tensor`, which draws like an initializer.

  Source: Keras 2.14, `keras.initializers`.
  """
  kinds = tf.keras.initializers
  random = tf.random
  match initializer:
    case kinds.Zeros():
      return lambda seed, shape: tf.zeros(shape)
    case kinds.Ones():
      return lambda seed, shape: tf.ones(shape)
    case kinds.Constant():
      return lambda seed, shape: tf.fill(shape, float(initializer.value))
    case kinds.RandomUniform():
      return lambda seed, shape: random.stateless_uniform(
          shape, seed, initializer.minval, initializer.maxval
      )
    case kinds.RandomNormal():
      return lambda seed, shape: random.stateless_normal(
          shape, seed, initializer.mean, initializer.stddev
      )
    case kinds.TruncatedNormal():
      return lambda seed, shape: random.stateless_truncated_normal(
          shape, seed, initializer.mean, initializer.stddev
      )
    case kinds.VarianceScaling():
      return lambda seed, shape: _variance_scaling(initializer, seed, shape)
  raise ValueError(
      'Expected an initializer that can be drawn from a seed, found'
      f' {type(initializer).__name__} of {of}.{_TIP_KEEP}'
  )


def _variance_scaling(initializer, seed, shape):
  """Draws with a variance of scale / fan, as `GlorotUniform` and others do."""
  size = math.prod(shape[:-2])
  fan_in, fan_out = shape[-2:] if len(shape) > 1 else (shape[0], shape[0])
  fans = {
      'fan_in': fan_in * size,
      'fan_out': fan_out * size,
      'fan_avg': (fan_in + fan_out) * size / 2,
  }
  variance = initializer.scale / max(1.0, fans[initializer.mode])
  match initializer.distribution:
    case 'truncated_normal':
      # Of a normal distribution that is cut at two deviations.
      stddev = math.sqrt(variance) / 0.87962566103423978
      return tf.random.stateless_truncated_normal(shape, seed, stddev=stddev)
    case 'untruncated_normal':
      return tf.random.stateless_normal(shape, seed, stddev=math.sqrt(variance))
  bound = math.sqrt(3 * variance)
  return tf.random.stateless_uniform(shape, seed, -bound, bound)
