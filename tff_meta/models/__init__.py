"""Networks as pure functions on explicit weights, by name.

Nothing here imports TensorFlow before a network is built.
"""

from collections.abc import Callable
import dataclasses
import importlib
from typing import Any, TYPE_CHECKING

from tff_meta import catalog
from tff_meta import plugins
from tff_meta import spelling

if TYPE_CHECKING:
  from tff_meta.models import model

# The name of a network that is given as it is, see `adopt`.
GIVEN = 'given'
_FUNCTION = ':'
# Where a function wants a number of classes and there is no head to be.
_ANY_NUM_CLASSES = 2


@dataclasses.dataclass(frozen=True)
class _Ours:
  """A network of this library, whose module is imported when it is built.

  Attributes:
    name: Its `build_<name>` is called.
    module: Name of the module, in this package.
    summary: One line.
  """

  name: str
  module: str
  summary: str

  def __call__(self, *args: Any, **kwargs: Any) -> 'model.Model':
    module = importlib.import_module(f'{__name__}.{self.module}')
    return getattr(module, f'build_{self.name}')(*args, **kwargs)


_OURS: dict[str, Callable[..., 'model.Model']] = {
    name: _Ours(name, module, summary)
    for name, module, summary in (
        ('cafeme_base', 'modulated_cnn', "CAFeMe's network without modulator"),
        ('conv4', 'conv4', 'four convolutions with batch normalisation'),
        ('fedec_mlp', 'fedec_mlp', "FedEC's three dense layers"),
        (
            'fedmeta_per_cifar',
            'fedmeta_per_cifar',
            "FedMeta-Per's two convolutions for CIFAR-10",
        ),
        (
            'fedrep_cifar10',
            'fedrep_cifar',
            "FedRep's two convolutions for CIFAR-10",
        ),
        (
            'fedrep_cifar100',
            'fedrep_cifar',
            "FedRep's two wider convolutions for CIFAR-100",
        ),
        ('lenet', 'lenet', "MetaVers' two convolutions, at least 16x16 pixels"),
        ('mlp', 'mlp', 'one hidden layer of 100 units, for vectors and images'),
        (
            'modulated_cnn',
            'modulated_cnn',
            "CAFeMe's convolutions, modulated by a client's context",
        ),
        (
            'modulated_mlp',
            'modulated_cnn',
            "CAFeMe's modulation of a network of dense layers",
        ),
        (
            'norm_cnn',
            'norm_cnn',
            "two convolutions whose normalisation can be a client's own",
        ),
    )
}

MODELS = catalog.Catalog[Callable[..., 'model.Model']](
    'model', _OURS, reserved=(GIVEN,)
)


def register_model(
    name: str, build_model: Callable[..., 'model.Model']
) -> None:
  """Adds a network from outside.

  Args:
    name: What `--model` takes.
    build_model: `(input_shape, num_classes) -> Model`, as `build` calls it.

  Raises:
    ValueError: If there is one of this name, or it is no name.
  """
  MODELS.register(name, build_model)


def summary(name: str) -> str:
  """Returns a line about one of `MODELS`, '' if nothing is told."""
  found = MODELS[name]
  if isinstance(found, _Ours):
    return found.summary
  return (found.__doc__ or '').strip().partition('\n')[0]


def check(name: str) -> None:
  """Raises a ValueError if a name stands for no network, as far as is known.

  A module is looked for, but not imported.

  Args:
    name: As for `build`.
  """
  if not isinstance(name, str) or _FUNCTION not in name:
    MODELS.check(name)
    return
  module, _, function = name.partition(_FUNCTION)
  if not function.isidentifier():
    raise catalog.UnknownNameError(
        'Expected `model` to be a name or MODULE:FUNCTION, found' f' {name!r}.'
    )
  plugins.check_is_there(module, '--model')


def build(
    name: str, input_shape: tuple[int, ...], num_classes: int | None
) -> 'model.Model':
  """Builds a network by name.

  Args:
    name: One of `MODELS`; or `MODULE:FUNCTION`, a function `(input_shape,
      num_classes)` that returns a `Model` or a Keras model, see `from_keras`.
    input_shape: The shape of one example, channels last.
    num_classes: The number of classes of the head; None builds no head.

  Returns:
    The model.

  Raises:
    ValueError: The name is not known, or the network does not take the input.
  """
  if name == GIVEN:
    raise ValueError(
        'Expected the network that was given to `fit` as it is, found only its'
        f' name, {name!r}. Tip: `tff_meta.load(path, model=...)` takes it; a'
        ' --model=MODULE:FUNCTION is found by its name.'
    )
  if _FUNCTION not in name:
    return MODELS.find(name)(tuple(input_shape), num_classes)
  return adopt(_find_function(name), name, input_shape, num_classes)


def adopt(
    network: Any,
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int | None,
) -> 'model.Model':
  """Makes a network of what somebody else has made.

  Args:
    network: A `Model`; a Keras model, see `from_keras`; or `(input_shape,
      num_classes) -> ` one of them.
    name: What it is called in errors.
    input_shape: As for `build`.
    num_classes: As for `build`.

  Returns:
    The model.

  Raises:
    TypeError: If it is something else.
    ValueError: If it is for examples of another shape, or no network can be
      made of it.
  """
  import tensorflow as tf  # Only when a network is built.

  from tff_meta.models import model as model_lib

  built = network
  # Layers can be called, and so can the models that are made of them.
  is_network = isinstance(built, model_lib.Model | tf.keras.layers.Layer)
  if callable(built) and not is_network:
    built = network(tuple(input_shape), num_classes or _ANY_NUM_CLASSES)
  if not isinstance(built, model_lib.Model):
    built = from_keras(built)
  if tuple(built.input_shape) != tuple(input_shape):
    raise ValueError(
        f'Expected the network {name!r} to be for examples of shape'
        f' {tuple(input_shape)}, found one for {tuple(built.input_shape)}.'
    )
  return dataclasses.replace(built, num_classes=num_classes)


def from_keras(
    keras_model: Any, *, keep_weights: bool = False
) -> 'model.Model':
  """Makes a network of a Keras model, which is left as it is.

  Args:
    keras_model: As for `keras_network.from_keras`.
    keep_weights: As for `keras_network.from_keras`.

  Returns:
    The model.

  Raises:
    TypeError: If it is no Keras model.
    ValueError: If it cannot be made of it; names the layer.
  """
  from tff_meta.models import keras_network  # Imports TensorFlow.

  return keras_network.from_keras(keras_model, keep_weights=keep_weights)


def _find_function(name: str) -> Callable[..., Any]:
  module_name, _, function = name.partition(_FUNCTION)
  plugins.import_named([module_name], '--model')
  module = importlib.import_module(module_name)
  found = getattr(module, function, None)
  if not callable(found):
    known = [key for key, value in vars(module).items() if callable(value)]
    raise ValueError(
        f'Expected a function {function!r} in {module_name}, as --model says,'
        f' found {"none" if found is None else repr(found)}.'
        f'{spelling.tip(function, known)}'
    )
  return found
