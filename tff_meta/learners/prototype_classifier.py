"""Learning without gradients: one prototype per class, nearest one wins."""

from collections.abc import Callable

import tensorflow as tf

from tff_meta import episodes
from tff_meta.learners import personalizer
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib

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


def scores(
    embed_fn: EmbedFn,
    prototypes: prototypical.Prototypes,
    examples: episodes.Examples,
) -> tf.Tensor:
  """Minus the squared distance to every prototype, the logits of a softmax.

  Args:
    embed_fn: From x [n, ...] and mask [n] to embeddings [n, D].
    prototypes: As `fit` returns them.
    examples: What to classify; labels are not read.

  Returns:
    float32 [n, C]; -1e30 for absent classes, which are never the greatest.

  Source: Snell et al. 2017, eq. 2.
  """
  embeddings = embed_fn(examples.x, examples.mask)
  return prototypical.prototype_logits(embeddings, prototypes)


def predict(
    embed_fn: EmbedFn,
    prototypes: prototypical.Prototypes,
    examples: episodes.Examples,
) -> tf.Tensor:
  """The class of the greatest of `scores`, int32 [n]."""
  return personalizer.ByScores.to_labels(scores(embed_fn, prototypes, examples))


def build_client_personalizer(
    model: model_lib.Model, *, num_classes: int, squared: bool = True
) -> personalizer.ClientPersonalizer:
  """A client's classifier: the shared body and its own class prototypes.

  `argmin_c ||f(x) - mean of f over the client's examples of class c||^2`, over
  all examples given, with no gradient step. The classes need not be those that
  the body was trained on. A client without examples predicts class 0.

  Args:
    model: The network; its head is not used.
    num_classes: Number of classes of the client's labels.
    squared: Whether probabilities are by squared distances, or by their roots,
      as the body was trained.

  Returns:
    A `ClientPersonalizer` that reads the body of the weights and no memory. It
    has no model before it has seen examples.

  Source: Snell et al. 2017, eq. 1; in personalised federated learning Lim et
  al. (MetaVers), test procedure, and the "-Proto" rows of its table 3.
  """

  def embed_with(body):
    return lambda x, mask: model.embed(body, x, mask)

  def adapt(weights, memory, examples, seed):
    del memory, seed  # Nothing is kept and nothing is random.
    body = weights['body']
    return body, fit(embed_with(body), examples, num_classes)

  def scores_of(adapted, query):
    body, prototypes = adapted
    return scores(embed_with(body), prototypes, query)

  def to_log_probabilities(logits):
    return prototypical.log_probabilities(logits, squared=squared)

  predict_labels = personalizer.ByScores(scores_of, to_log_probabilities)
  return personalizer.ClientPersonalizer(None, adapt, predict_labels)
