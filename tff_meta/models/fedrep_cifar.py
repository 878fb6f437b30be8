"""FedRep's networks for CIFAR-10 and CIFAR-100."""

from tff_meta.models import model
from tff_meta.models import two_conv


def build_fedrep_cifar10(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int | None = 10,
) -> model.Model:
  """Builds two convolutions with 64 filters, dense 120 and 64, and a head.

  307,842 parameters on 32x32x3 with ten classes.

  Args:
    input_shape: Height, width and channels of one example; at least 16x16.
    num_classes: The number of classes; None builds no head.

  Returns:
    The model.

  Raises:
    ValueError: The input is no image, or too small.

  Source: the released code of FedRep (Collins et al. 2021).
  """
  return two_conv.build_two_conv(
      'fedrep_cifar10',
      input_shape,
      num_classes,
      num_filters=(64, 64),
      num_units=(120, 64),
  )


def build_fedrep_cifar100(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int | None = 100,
) -> model.Model:
  """Builds convolutions with 64 and 128 filters, dense 256, 128, and a head.

  1,075,044 parameters on 32x32x3 with a hundred classes. Deviation: FedRep
  drops 60 % of the second dense layer in training; networks here have no
  randomness, so there is no dropout.

  Args:
    input_shape: Height, width and channels of one example; at least 16x16.
    num_classes: The number of classes; None builds no head.

  Returns:
    The model.

  Raises:
    ValueError: The input is no image, or too small.

  Source: the released code of FedRep (Collins et al. 2021).
  """
  return two_conv.build_two_conv(
      'fedrep_cifar100',
      input_shape,
      num_classes,
      num_filters=(64, 128),
      num_units=(256, 128),
  )
