"""What a trained model is used for: the interface evaluation relies on.

A personalizer is a pair of pure TensorFlow functions. Evaluation never
re-implements adaptation; it only calls these, traced without AutoGraph: as in
TFF's computations, Python's `if` and `for` do not work on tensors.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_meta import episodes


@dataclasses.dataclass(frozen=True)
class ByScores:
  """Predicts the class of the greatest score, of equals the first.

  A `predict` or `curve` of this kind can be asked how sure it is, too. There is
  nothing beside the scores that label and probability could disagree about. A
  plain function that returns labels may be in its place.

  Attributes:
    scores: What is called, `(...) -> scores`, float `[..., Q, C]`.
    to_log_probabilities: From scores to the natural logarithms of
      probabilities, which are in the same order; by default scores are logits.
  """

  scores: Callable[..., tf.Tensor]
  to_log_probabilities: Callable[[tf.Tensor], tf.Tensor] = tf.nn.log_softmax

  def __call__(self, *args: Any) -> tf.Tensor:
    """Returns labels, int32 `[..., Q]`."""
    return self.to_labels(self.scores(*args))

  @staticmethod
  def to_labels(scores: tf.Tensor) -> tf.Tensor:
    """Returns labels, int32 `[..., Q]`."""
    return tf.argmax(scores, axis=-1, output_type=tf.int32)


def answer_spec(ask: Any) -> tf.TensorSpec:
  """Returns what `predict` gives, or its scores where it goes by scores."""
  if isinstance(ask, ByScores):
    return tf.TensorSpec([None, None], tf.float32)
  return tf.TensorSpec([None], tf.int32)


def lift(
    function: Callable[[Callable[..., Any]], Callable[..., Any]], ask: Any
) -> Any:
  """Returns `function(ask)`, by scores where `ask` is.

  Args:
    function: From what returns labels, or scores, to what returns such, too.
    ask: A `predict` or a `curve`.
  """
  if isinstance(ask, ByScores):
    return dataclasses.replace(ask, scores=function(ask.scores))
  return function(ask)


class GroupPersonalizer(NamedTuple):
  """Makes a global model for a new group of clients with its own classes.

  Attributes:
    adapt: `(weights, support, salts, seed) -> adapted`. `weights` is the
      trained `OrderedDict(body, head)`; `support` are `Examples` with a leading
      client axis (`x` `[K, S, ...]`, `y` int32 `[K, S]` in `0..way-1`, `mask`
      float32 `[K, S]`); `salts` int32 `[K]`; `seed` int32 `[2]`. `adapted` is
      any structure of tensors.
    predict: `(adapted, query) -> labels`, with `query` `Examples` `[Q, ...]`
      and `labels` int32 `[Q]` in `0..way-1`. With `ByScores` evaluation also
      tells how sure the model is.
  """

  adapt: Callable[..., Any]
  predict: Callable[..., Any]


class ClientPersonalizer(NamedTuple):
  """Makes a model for one client from the client's own examples.

  Which examples a client adapts on is the evaluation's choice, not the
  personalizer's. Every function works inside `tf.function`, with any number of
  examples; a client without examples keeps the model that it starts with.

  `weights` is the trained `OrderedDict(body, head)`. `memory` is, for a client
  of the training population, the `ClientMemory` it has kept since it was last
  sampled, `()` with an algorithm that keeps none. For a client that training
  never saw it is `()`, or with `uses_bank` the values of the memories of all
  clients ever sampled, each leaf with a leading axis `[M, ...]` of clients.

  Attributes:
    start: `(weights, memory) -> adapted`, the client's model before it learns
      from its examples, of the same structure as `adapt` returns; None where
      there is none, as with prototypes.
    adapt: `(weights, memory, examples, seed) -> adapted`, with `examples` the
      client's `Examples` `[n, ...]` and `seed` int32 `[2]`. `adapted` is any
      structure of tensors.
    predict: `(adapted, query) -> labels`, with `query` `Examples` `[Q, ...]`
      and `labels` int32 `[Q]`. With `ByScores` evaluation also tells how sure
      the model is.
    curve: `(weights, memory, examples, query, seed) -> labels`, int32
      `[num_points, Q]`, the labels after 0, 1, 2, ... steps of adaptation; None
      where adaptation has no steps to look between. `ByScores` where `predict`
      is.
    uses_bank: Whether a new client is given the bank of known memories.
    adapts_during_training: Whether evaluations during training ask the adapted
      model; otherwise they ask `start`, and only the final one adapts.
    num_classes: C where other labels than 0..C-1 are refused, see
      `refusing_bad_labels`; otherwise None.
  """

  start: Callable[..., Any] | None
  adapt: Callable[..., Any]
  predict: Callable[..., Any]
  curve: Callable[..., Any] | None = None
  uses_bank: bool = False
  adapts_during_training: bool = True
  num_classes: int | None = None

  def during_training(self) -> 'ClientPersonalizer':
    """Returns what evaluations during training ask."""
    start = self.start
    if self.adapts_during_training:
      return self
    assert start is not None, 'Nothing could be asked.'
    return self._replace(
        adapt=lambda weights, memory, *_: start(weights, memory)
    )


class AmongOwnClasses(NamedTuple):
  """A model for one client, and which classes it has.

  Attributes:
    model: What predicts among all classes.
    own: bool `[C]`, as `own_classes` returns it.
  """

  model: Any
  own: tf.Tensor


def own_classes(examples: episodes.Examples, num_classes: Any) -> tf.Tensor:
  """Returns which classes a client has, bool `[C]`; without examples, all.

  Args:
    examples: Of the client, labels `[n]` and a mask `[n]` or None.
    num_classes: C, a number or a tensor.
  """
  has = tf.one_hot(examples.y, num_classes) > 0
  if examples.mask is not None:
    has &= examples.mask[:, tf.newaxis] > 0
  has = tf.reduce_any(has, axis=0)
  return has | ~tf.reduce_any(has)


def among(own: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
  """Returns scores `[..., C]`, those of classes that are not `own` -inf."""
  return tf.where(own, scores, -np.inf)


def among_own_classes(
    client: ClientPersonalizer, num_classes: int
) -> ClientPersonalizer:
  """Leaves out classes of which a client has no example, when it predicts.

  Those that count are the examples that it adapts on, which need not be all
  that it has trained on. Before it learns from them, and without any, all
  classes are possible.

  Args:
    client: What predicts by scores, without a curve.
    num_classes: C.
  """
  predict: Any = client.predict
  start = client.start
  assert isinstance(predict, ByScores) and start and client.curve is None

  def adapt(weights, memory, examples, seed):
    return AmongOwnClasses(
        client.adapt(weights, memory, examples, seed),
        own_classes(examples, num_classes),
    )

  def scores(adapted, query):
    return among(adapted.own, predict.scores(adapted.model, query))

  return client._replace(
      start=lambda weights, memory: AmongOwnClasses(
          start(weights, memory), tf.ones([num_classes], tf.bool)
      ),
      adapt=adapt,
      predict=dataclasses.replace(predict, scores=scores),
  )


def refusing_bad_labels(
    personalizer: GroupPersonalizer | ClientPersonalizer, num_classes: int
) -> GroupPersonalizer | ClientPersonalizer:
  """Lets a personalizer fail on labels that no class has.

  Such a label would otherwise add nothing to a loss, which is then the better
  for it.

  Args:
    personalizer: What to guard.
    num_classes: Labels are 0..num_classes-1.

  Returns:
    The same, but that `adapt` and `curve` raise an `InvalidArgumentError` that
    names the range and the labels.
  """

  def adapt(weights, *args):
    # A group's `(support, salts, seed)`, a client's `(memory, support, seed)`.
    checked = [
        episodes.refuse_bad_labels(arg, num_classes)
        if isinstance(arg, episodes.Examples)
        else arg
        for arg in args
    ]
    return personalizer.adapt(weights, *checked)

  if isinstance(personalizer, GroupPersonalizer):
    return personalizer._replace(adapt=adapt)

  guarded = personalizer._replace(adapt=adapt, num_classes=num_classes)
  if personalizer.curve is None:
    return guarded

  def refusing(ask):
    def curve(weights, memory, support, query, seed):
      support, query = (
          episodes.refuse_bad_labels(examples, num_classes)
          for examples in (support, query)
      )
      return ask(weights, memory, support, query, seed)

    return curve

  return guarded._replace(curve=lift(refusing, personalizer.curve))
