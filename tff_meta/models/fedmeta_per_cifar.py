"""FedMeta-Per's network for CIFAR-10."""

from tff_meta.models import model
from tff_meta.models import two_conv


def build_fedmeta_per_cifar(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int | None = 10,
) -> model.Model:
  """Builds convolutions with 6 and 16 filters, dense 120 and 84, and a head.

  62,006 parameters on 32x32x3 with ten classes, 850 of them in the head.

  Args:
    input_shape: Height, width and channels of one example; at least 16x16.
    num_classes: The number of classes; None builds no head.

  Returns:
    The model.

  Raises:
    ValueError: The input is no image, or too small.

  Source: the released code of FedMeta-Per (Nguyen et al. 2022).
  """
  return two_conv.build_two_conv(
      'fedmeta_per_cifar',
      input_shape,
      num_classes,
      num_filters=(6, 16),
      num_units=(120, 84),
  )
