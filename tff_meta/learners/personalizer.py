"""What a trained model is used for: the interface evaluation relies on.

A personalizer is a pair of pure TensorFlow functions. Evaluation never
re-implements adaptation; it only calls these.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class GroupPersonalizer(NamedTuple):
  """Makes a global model for a new group of clients with its own classes.

  Attributes:
    adapt: `(weights, support, salts, seed) -> adapted`. `weights` is the
      trained `OrderedDict(body, head)`; `support` are `Examples` with a leading
      client axis (`x` `[K, S, ...]`, `y` int32 `[K, S]` in `0..way-1`, `mask`
      float32 `[K, S]`); `salts` int32 `[K]`; `seed` int32 `[2]`. `adapted` is
      any structure of tensors.
    predict: `(adapted, query) -> labels`, with `query` `Examples` `[Q, ...]`
      and `labels` int32 `[Q]` in `0..way-1`.
  """

  adapt: Callable[..., Any]
  predict: Callable[..., Any]


class ClientPersonalizer(NamedTuple):
  """Makes a model for one client from the client's own examples.

  Attributes:
    adapt: `(weights, examples, seed) -> adapted`, with `examples` the client's
      training `Examples` `[n, ...]` and `seed` int32 `[2]`.
    predict: `(adapted, query) -> labels`, int32 `[Q]`.
  """

  adapt: Callable[..., Any]
  predict: Callable[..., Any]
