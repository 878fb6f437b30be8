"""Fine-tuning: SGD steps at a falling rate, and the curve of what they give."""

from collections.abc import Callable
import dataclasses
from typing import Any

import tensorflow as tf

from tff_meta import episodes
from tff_meta.learners import classifiers
from tff_meta.learners import cyclic_batches
from tff_meta.learners import personalizer


@dataclasses.dataclass(frozen=True)
class FineTuning:
  """How a client fine-tunes.

  Step s = 0, 1, ... has the rate `learning_rate * decay^floor(s / decay_steps)`
  and the s-th batch of `cyclic_batches.cyclic_minibatches`.

  Attributes:
    num_steps: At least 0.
    learning_rate: Of the first steps.
    batch_size: Examples of a step; also of prediction.
    decay: Factor of the rate; 1 keeps it.
    decay_steps: Steps from one decay to the next, at least 1.

  Source: the test of CAFeMe's released code (Vettoruzzo et al. 2023): 50 steps,
  decay 0.8, 5 steps.
  """

  num_steps: int
  learning_rate: float
  batch_size: int
  decay: float = 1.0
  decay_steps: int = 1

  def rate(self, step: tf.Tensor) -> tf.Tensor:
    """Returns the float32 rate of step s, an int32 scalar."""
    times = tf.cast(step // self.decay_steps, tf.float32)
    return self.learning_rate * tf.pow(self.decay, times)


def build_client_personalizer(
    settings: FineTuning,
    input_shape: tuple[int, ...],
    loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
    predict: Callable[[Any, episodes.Examples], tf.Tensor],
    to_adapted: Callable[[Any, episodes.Examples], Any] | None = None,
    *,
    context_is_all: bool = False,
) -> personalizer.ClientPersonalizer:
  """A client takes all its weights through SGD steps on its own examples.

  Args:
    settings: How.
    input_shape: Shape of one example.
    loss_fn: From weights and a minibatch to a scalar.
    predict: `(adapted, batch) -> labels`, int32 [n]; also
      `personalizer.ByScores`.
    to_adapted: `(weights, context) -> adapted`, with the batch of the last step
      (no examples before the first): what `predict` needs of it beside the
      weights. By default the weights alone.
    context_is_all: Whether that context is all of the client's examples instead
      (before the first step, none still).

  Returns:
    A `ClientPersonalizer`, with a curve of `num_steps + 1` points.
  """

  def finish(weights, context):
    return to_adapted(weights, context) if to_adapted else weights

  spec = personalizer.answer_spec(predict)

  def asking_in_batches(ask):
    return lambda adapted, query: cyclic_batches.predict_in_batches(
        ask, adapted, query, settings.batch_size, spec
    )

  def batches(examples, seed):
    """Returns `s -> batch` of step s - 1, which has no examples for s = 0."""
    examples = episodes.drop_padding(examples)
    minibatches = cyclic_batches.cyclic_minibatches(
        tf.size(examples.y), settings.batch_size, settings.num_steps, seed
    )
    minibatches = episodes.Minibatches(
        *(tf.pad(part, [[1, 0], [0, 0]]) for part in minibatches)
    )
    return lambda s: episodes.take(examples, minibatches, s)

  def context_after(s, examples, batch_before):
    if not context_is_all:
      return batch_before(s)
    mask = examples.mask * tf.cast(s > 0, examples.mask.dtype)
    return episodes.drop_padding(examples._replace(mask=mask))

  def step(weights, batch, s):
    with tf.GradientTape() as tape:
      tape.watch(weights)
      loss = loss_fn(weights, batch)
    gradients = tape.gradient(
        loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    rate = settings.rate(s)
    return tf.nest.map_structure(
        lambda w, g: w - tf.cast(rate, w.dtype) * g, weights, gradients
    )

  def start(weights, memory):
    del memory  # The model of all clients.
    none = episodes.Examples(
        tf.zeros([0, *input_shape]), tf.zeros([0], tf.int32), tf.zeros([0])
    )
    return finish(weights, none)

  def adapt(weights, memory, examples, seed):
    del memory
    batch_before = batches(examples, seed)
    _, weights = tf.while_loop(
        lambda s, _: s < settings.num_steps,
        lambda s, w: (s + 1, step(w, batch_before(s + 1), s)),
        (tf.constant(0), weights),
    )
    return finish(
        weights, context_after(settings.num_steps, examples, batch_before)
    )

  def asking_on_the_way(ask):
    def curve(weights, memory, examples, query, seed):
      del memory
      batch_before = batches(examples, seed)

      def answers_after(s, weights):
        context = context_after(s, examples, batch_before)
        return ask(finish(weights, context), query)

      def ask_and_step(s, weights, answers):
        answers = answers.write(s, answers_after(s, weights))
        return s + 1, step(weights, batch_before(s + 1), s), answers

      answers = tf.TensorArray(
          spec.dtype, settings.num_steps + 1, element_shape=spec.shape
      )
      last, weights, answers = tf.while_loop(
          lambda s, *_: s < settings.num_steps,
          ask_and_step,
          (tf.constant(0), weights, answers),
      )
      return answers.write(last, answers_after(last, weights)).stack()

    return curve

  predict_all = personalizer.lift(asking_in_batches, predict)
  curve = personalizer.lift(asking_on_the_way, predict_all)
  return personalizer.ClientPersonalizer(start, adapt, predict_all, curve)


def build_classifier_personalizer(
    settings: FineTuning, classifier: classifiers.LinearClassifier
) -> personalizer.ClientPersonalizer:
  """A client takes a linear classifier and its body through SGD steps.

  Args:
    settings: How.
    classifier: Whose weights are fine-tuned, all of them.

  Returns:
    A `ClientPersonalizer` that uses no memory, with a curve.
  """
  return build_client_personalizer(
      settings,
      classifier.model.input_shape,
      classifier.loss,
      classifiers.build_predict(classifier),
  )
