"""Networks as pure functions on explicit weights, by name."""

from collections.abc import Callable

from tff_meta import catalog
from tff_meta.models import conv4
from tff_meta.models import fedec_mlp
from tff_meta.models import fedmeta_per_cifar
from tff_meta.models import fedrep_cifar
from tff_meta.models import lenet
from tff_meta.models import mlp
from tff_meta.models import model
from tff_meta.models import modulated_cnn
from tff_meta.models import norm_cnn

_OURS: dict[str, Callable[..., model.Model]] = {
    'cafeme_base': modulated_cnn.build_cafeme_base,
    'conv4': conv4.build_conv4,
    'fedec_mlp': fedec_mlp.build_fedec_mlp,
    'fedmeta_per_cifar': fedmeta_per_cifar.build_fedmeta_per_cifar,
    'fedrep_cifar10': fedrep_cifar.build_fedrep_cifar10,
    'fedrep_cifar100': fedrep_cifar.build_fedrep_cifar100,
    'lenet': lenet.build_lenet,
    'mlp': mlp.build_mlp,
    'modulated_cnn': modulated_cnn.build_modulated_cnn,
    'modulated_mlp': modulated_cnn.build_modulated_mlp,
    'norm_cnn': norm_cnn.build_norm_cnn,
}

MODELS = catalog.Catalog[Callable[..., model.Model]]('model', _OURS)


def register_model(name: str, build_model: Callable[..., model.Model]) -> None:
  """Adds a network from outside.

  Args:
    name: What `--model` takes.
    build_model: `(input_shape, num_classes) -> Model`, as `build` calls it.

  Raises:
    ValueError: If there is one of this name, or it is no name.
  """
  MODELS.register(name, build_model)


def build(
    name: str, input_shape: tuple[int, ...], num_classes: int | None
) -> model.Model:
  """Builds a network by name.

  Args:
    name: One of `MODELS`.
    input_shape: The shape of one example, channels last.
    num_classes: The number of classes of the head; None builds no head.

  Returns:
    The model.

  Raises:
    ValueError: The name is not known, or the network does not take the input.
  """
  return MODELS.find(name)(tuple(input_shape), num_classes)
