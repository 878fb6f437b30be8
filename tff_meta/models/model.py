"""What every network of this package is: pure functions on explicit weights."""

import collections
from collections.abc import Callable
import dataclasses

import numpy as np
import tensorflow as tf

Weights = collections.OrderedDict  # OrderedDict(body=..., head=...).
Params = collections.OrderedDict  # OrderedDict[parameter name -> tf.Tensor].


@dataclasses.dataclass(frozen=True)
class Model:
  """A network split into a body (the embedding) and a head (the classifier).

  `logits(weights, x) = classify(weights['head'], embed(weights['body'], x))`.
  The weights are `OrderedDict(body=OrderedDict(...), head=OrderedDict(...))` of
  float32 tensors; a network without classifier has an empty head. Float64
  weights make every function compute in float64.

  Attributes:
    name: The name of the network.
    input_shape: The shape of one example, channels last.
    embedding_size: The width D of the embedding.
    num_classes: The number C of classes of the head; None means no head.
    init_body: From a seed (int32 [2]) to the initial parameters of the body.
    init_head: From a seed and a number of classes to those of the head.
    embed: From the body's parameters, examples [n, ...] and a mask [n] (1 for
      an example, 0 for padding; or None) to embeddings [n, D]. The mask matters
      only where examples see each other, that is in batch normalisation.
    classify: From the head's parameters and embeddings [n, D] to logits [n, C].
    augment: `(x, seed) -> x`, how clients vary the examples that they train on
      (`augmentation.CropAndFlip`); None for not at all. Nothing else, above all
      no test, varies them.
  """

  name: str
  input_shape: tuple[int, ...]
  embedding_size: int
  num_classes: int | None
  init_body: Callable[[tf.Tensor], Params]
  init_head: Callable[[tf.Tensor, int], Params]
  embed: Callable[[Params, tf.Tensor, tf.Tensor | None], tf.Tensor]
  classify: Callable[[Params, tf.Tensor], tf.Tensor]
  augment: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = (
      dataclasses.field(default=None, kw_only=True)
  )

  def __post_init__(self):
    if self.num_classes is not None and self.num_classes < 1:
      raise ValueError(
          'Expected `num_classes` to be None or at least 1, found'
          f' {self.num_classes}. None builds the network without a classifier.'
      )

  def initialize(self, seed: tf.Tensor) -> Weights:
    """Draws initial weights.

    Args:
      seed: int32 [2]; the same seed gives the same weights. The body's weights
        do not depend on the number of classes.

    Returns:
      The weights, float32.
    """
    fold_in = tf.random.experimental.stateless_fold_in
    head = collections.OrderedDict()
    if self.num_classes is not None:
      head = self.init_head(fold_in(seed, 1), self.num_classes)
    return collections.OrderedDict(
        body=self.init_body(fold_in(seed, 0)), head=head
    )

  def logits(
      self, weights: Weights, x: tf.Tensor, mask: tf.Tensor | None = None
  ) -> tf.Tensor:
    """Computes class scores.

    Args:
      weights: As `initialize` returns them.
      x: Examples, [n, *input_shape].
      mask: [n], 1 for an example and 0 for padding; None means no padding.

    Returns:
      Unnormalised log probabilities, [n, C].

    Raises:
      ValueError: The network was built without a classifier.
    """
    if self.num_classes is None:
      raise ValueError(
          f'Expected `{self.name}` to have a classifier, found none. Tip:'
          ' `model.with_head(num_classes)`.'
      )
    embedding = self.embed(weights['body'], x, mask)
    return self.classify(weights['head'], embedding)

  def with_head(self, num_classes: int) -> 'Model':
    """The same network with a classifier for `num_classes` classes."""
    return dataclasses.replace(self, num_classes=num_classes)

  def without_head(self) -> 'Model':
    """The same network without a classifier."""
    return dataclasses.replace(self, num_classes=None)

  def sees_neighbours(self) -> bool:
    """Whether the embedding of an example depends on those beside it.

    So it does with batch normalisation by the batch's own mean and variance:
    one example that is asked alone is not recognised then. Found by embedding
    four random examples together and the first alone, with initial weights.
    """
    x = np.random.default_rng(0).random([4, *self.input_shape], np.float32)
    body = self.initialize(tf.zeros([2], tf.int32))['body']
    together, alone = (self.embed(body, of, None) for of in (x, x[:1]))
    return not np.allclose(
        together[:1], alone, rtol=1e-3, atol=1e-5, equal_nan=True
    )

  def num_parameters(self) -> int:
    """The number of trainable scalars in body and head; runs nothing."""
    return sum(self.tensor_sizes())

  def tensor_sizes(self) -> list[int]:
    """The scalars of every tensor in body and head; runs nothing."""
    with tf.Graph().as_default():
      weights = self.initialize(tf.constant([0, 0]))
      return [w.shape.num_elements() for w in tf.nest.flatten(weights)]
