"""Learning without gradients: one prototype per class, nearest one wins."""

from collections.abc import Callable

import tensorflow as tf

from tff_meta import episodes
from tff_meta.losses import prototypical

EmbedFn = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def fit(
    embed_fn: EmbedFn, examples: episodes.Examples, num_classes: int
) -> prototypical.Prototypes:
  """The mean embedding of every class.

  Args:
    embed_fn: From x [n, ...] and mask [n] to embeddings [n, D].
    examples: What to learn from.
    num_classes: C.

  Returns:
    The prototypes; classes without examples are absent.

  Source: Snell et al. 2017, eq. 1.
  """
  embeddings = embed_fn(examples.x, examples.mask)
  return prototypical.prototypes(
      embeddings, examples.y, examples.mask, num_classes
  )


def predict(
    embed_fn: EmbedFn,
    prototypes: prototypical.Prototypes,
    examples: episodes.Examples,
) -> tf.Tensor:
  """The class of the nearest prototype; absent classes are never predicted.

  Args:
    embed_fn: From x [n, ...] and mask [n] to embeddings [n, D].
    prototypes: As `fit` returns them.
    examples: What to classify; labels are not read.

  Returns:
    int32 [n].
  """
  embeddings = embed_fn(examples.x, examples.mask)
  return prototypical.nearest_prototype(embeddings, prototypes)
