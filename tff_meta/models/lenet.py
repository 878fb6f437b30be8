"""The LeNet of MetaVers: an 84-dimensional embedding, or a classifier on it."""

from tff_meta.models import model
from tff_meta.models import two_conv


def build_lenet(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int | None = None,
) -> model.Model:
  """Builds convolutions with 16 and 32 filters and dense layers 120 and 84.

  On 32x32x3: 120,332 parameters without a head, 121,182 with ten classes and
  128,832 with a hundred. The embedding has no activation; the classifier is
  ReLU and a dense layer.

  Args:
    input_shape: Height, width and channels of one example; at least 16x16.
    num_classes: The number of classes; None builds no head.

  Returns:
    The model.

  Raises:
    ValueError: The input is no image, or too small.

  Source: the released code of MetaVers and of its baselines pFedHN (Shamsian et
  al. 2021) and pFedGP (Achituve et al. 2021).
  """
  return two_conv.build_two_conv(
      'lenet',
      input_shape,
      num_classes,
      num_filters=(16, 32),
      num_units=(120, 84),
      linear_embedding=True,
  )
