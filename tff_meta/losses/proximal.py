"""The proximal term: stay close to other weights."""

from typing import Any

import tensorflow as tf

from tff_meta import weights as weights_lib


def proximal(weights: Any, anchor: Any, mu: float) -> tf.Tensor:
  """`mu / 2 * ||weights - anchor||^2`; `mu = 0` removes it.

  Args:
    weights: A structure of tensors.
    anchor: The same structure.
    mu: The strength, at least 0.

  Returns:
    A scalar; its gradient is `mu * (weights - anchor)`.

  Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks"
  (FedProx), eq. 2.
  """
  difference = weights_lib.subtract(weights, anchor)
  return 0.5 * mu * weights_lib.squared_norm(difference)
