"""Gradient inversion (DLG): an image guessed from the gradient that it gave.

An attacker who knows the weights theta and the gradient g that a client shared
for one image looks for a dummy image x' and a soft label softmax(y') with

  minimum of |grad_theta L(x', y') - g|^2 .

Three victims: FedAvg, whose L is the cross-entropy of a linear classifier;
MetaVers, whose L is the prototypical loss of one query among the client's
classes and whose prototypes the attacker does not know, so that they become
unknowns too; and MetaVers with prototypes that have leaked.

Prototypes are constants: the victim's gradient does not flow through them. (In
training it does; whether it does in the paper's experiment is not said.)

Source: Zhu, Liu and Han 2019, "Deep Leakage from Gradients"; MetaVers (Lim et
al., WACV 2024), Fig. 3.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize
import tensorflow as tf

from tff_meta import weights as weights_lib
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import groups as groups_lib
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib

CLASSIFIER = 'classifier'
HIDDEN_PROTOTYPES = 'hidden_prototypes'
LEAKED_PROTOTYPES = 'leaked_prototypes'

# As in DLG's code: of L-BFGS, and the most of its iterations in one of those
# 300 that are told of.
_HISTORY = 100
_INNER_ITERATIONS = 20

# x [1, ...], class probabilities [1, C] and prototypes [C, D] or None -> loss.
LossFn = Callable[[Any, tf.Tensor, tf.Tensor, tf.Tensor | None], tf.Tensor]


class Scene(NamedTuple):
  """An image that a client trains on, and what else it has.

  Attributes:
    image: float64, in [0, 1].
    label: Its class in the whole problem.
    num_classes: Of the whole problem.
    support: Images of the client's classes, float64 [N, k, ...].
    local_label: Which of these classes the image is of.
  """

  image: np.ndarray
  label: int
  num_classes: int
  support: np.ndarray
  local_label: int


def draw_scene(
    corpus: corpus_lib.Corpus, index: int, ways: int, shots: int, seed: int
) -> Scene:
  """Draws the classes and the support images of a client with an image.

  Args:
    corpus: Of pixels that are in [0, 1] when preprocessed.
    index: Row of the image in the pool: the train part, then the test part.
    ways: N, classes of the client; that of the image is one of them.
    shots: Support images of each; the image is none of them.
    seed: Of the other classes and of the support images.

  Returns:
    The scene; local classes are in the order of their labels.

  Raises:
    ValueError: If there is no such image, there are too few classes or images,
      or pixels are not in [0, 1].
  """
  labels = corpus.pooled_labels
  for name, value, least, most in (
      ('image_index', index, 0, len(labels) - 1),
      ('local_classes', ways, 1, corpus.num_classes),
      ('shots', shots, 1, len(labels)),
  ):
    if not least <= value <= most:
      raise ValueError(f'Expected `{name}` in {least}..{most}, found {value}.')
  label = int(labels[index])
  rng = np.random.default_rng([seed, index])
  others = np.setdiff1d(np.arange(corpus.num_classes), label)
  chosen = rng.choice(others, ways - 1, replace=False)
  classes = sorted([label, *chosen.tolist()])
  rows = groups_lib.rows_by_class(corpus)
  support = []
  for local_class in classes:
    available = rows[local_class][rows[local_class] != index]
    if len(available) < shots:
      raise ValueError(
          f'Expected at least {shots} further images of class {local_class}'
          f' of {corpus.name!r}, found {len(available)}.'
      )
    support.append(rng.choice(available, shots, replace=False))
  pixels = corpus.preprocess(
      corpus.raw_rows(np.concatenate([[index], *support]))
  ).astype(np.float64)
  if not (pixels.min() >= 0 and pixels.max() <= 1):
    raise ValueError(
        f'Expected pixels of {corpus.name!r} in [0, 1], found'
        f' {pixels.min():g}..{pixels.max():g}.'
    )
  return Scene(
      pixels[0],
      label,
      corpus.num_classes,
      pixels[1:].reshape(ways, shots, *pixels.shape[1:]),
      classes.index(label),
  )


@dataclasses.dataclass(frozen=True)
class Victim:
  """What a client computed, and what of it an attacker knows.

  Attributes:
    loss: `(weights, x, probabilities, prototypes) -> scalar`; prototypes are
      None for a classifier without.
    weights: theta, float64.
    gradient: g, like `weights`.
    label: The true class, which the attacker does not know.
    num_classes: Of the soft label.
    prototypes: float64 [C, D] if the attacker knows them, or else None.
    hidden_prototypes: Shape [C, D] of those that it has to guess, or None.
  """

  loss: LossFn
  weights: Any
  gradient: Any
  label: int
  num_classes: int
  prototypes: tf.Tensor | None = None
  hidden_prototypes: tuple[int, int] | None = None


class Reconstruction(NamedTuple):
  """What an attack has found.

  Attributes:
    image: float64, of the shape of an example; not cut off at 0 and 1.
    label: The class of the largest probability.
    gradient_match: The objective that was reached.
    lbfgs_iterations: Of the start that was chosen.
  """

  image: np.ndarray
  label: int
  gradient_match: float
  lbfgs_iterations: int


def classifier_loss(model: model_lib.Model) -> LossFn:
  """Returns softmax cross-entropy of a network with a classifier."""

  def loss(weights, x, probabilities, prototypes):
    del prototypes  # A linear classifier has none.
    log_p = tf.nn.log_softmax(model.logits(weights, x))
    return -tf.reduce_mean(tf.reduce_sum(probabilities * log_p, 1))

  return loss


def query_loss(model: model_lib.Model) -> LossFn:
  """Returns MetaVers' L_S of queries, with soft labels (eq. 2)."""

  def loss(weights, x, probabilities, prototypes):
    embeddings = model.embed(weights['body'], x, None)
    distances = prototypical.squared_distances(embeddings, prototypes)
    log_p = tf.nn.log_softmax(-distances)
    return -tf.reduce_mean(tf.reduce_sum(probabilities * log_p, 1))

  return loss


def build_victims(
    model: model_lib.Model, scene: Scene, seed: int
) -> dict[str, Victim]:
  """Lets a client compute its gradient of one image in all cases.

  Args:
    model: The network, without a head; the same body in all cases.
    scene: What the client has.
    seed: Of the weights.

  Returns:
    Case -> victim.
  """
  network = model.with_head(scene.num_classes)
  weights = tf.nest.map_structure(
      lambda w: tf.cast(w, tf.float64),
      network.initialize(tf.constant([0, seed])),
  )
  body = {'body': weights['body']}
  prototypes = tf.stack(
      [
          tf.reduce_mean(model.embed(weights['body'], tf.constant(x), None), 0)
          for x in scene.support
      ]
  )

  def victim(loss, weights, label, num_classes, prototypes, is_known):
    gradient = _gradient(
        loss,
        weights,
        tf.constant(scene.image[np.newaxis]),
        tf.one_hot([label], num_classes, dtype=tf.float64),
        prototypes,
    )
    return Victim(
        loss,
        weights,
        gradient,
        label,
        num_classes,
        prototypes if is_known else None,
        None if is_known else tuple(prototypes.shape),
    )

  by_prototypes = (
      query_loss(model),
      body,
      scene.local_label,
      len(scene.support),
  )
  return {
      CLASSIFIER: victim(
          classifier_loss(network),
          weights,
          scene.label,
          scene.num_classes,
          None,
          is_known=True,
      ),
      HIDDEN_PROTOTYPES: victim(*by_prototypes, prototypes, is_known=False),
      LEAKED_PROTOTYPES: victim(*by_prototypes, prototypes, is_known=True),
  }


class Attack:
  """The attacker's objective as a function of one flat vector."""

  def __init__(self, victim: Victim, input_shape: tuple[int, ...]):
    """Lays out the unknowns: image, label and, where hidden, prototypes."""
    self._victim = victim
    self._shapes = [(1, *input_shape), (1, victim.num_classes)]
    if victim.hidden_prototypes is not None:
      self._shapes.append(victim.hidden_prototypes)
    self._sizes = [math.prod(shape) for shape in self._shapes]
    self._compiled = tf.function(self._value_and_gradient, autograph=False)

  @property
  def num_unknowns(self) -> int:
    """The length of the vector."""
    return sum(self._sizes)

  def unpack(self, unknowns: Any) -> list[tf.Tensor]:
    """Returns x' [1, ...], y' [1, C] and, where hidden, prototypes [C, D]."""
    parts = tf.split(unknowns, self._sizes)
    return [
        tf.reshape(part, shape)
        for part, shape in zip(parts, self._shapes, strict=True)
    ]

  def __call__(self, unknowns: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns how badly gradients match, and the derivative by the unknowns.

    Args:
      unknowns: float64 [num_unknowns].

    Returns:
      |grad_theta L(x', y') - g|^2, and float64 [num_unknowns].
    """
    value, gradient = self._compiled(tf.constant(unknowns, tf.float64))
    return float(value), gradient.numpy()

  def _value_and_gradient(self, unknowns):
    victim = self._victim
    with tf.GradientTape() as tape:
      tape.watch(unknowns)
      x, y, *hidden = self.unpack(unknowns)
      found = _gradient(
          victim.loss,
          victim.weights,
          x,
          tf.nn.softmax(y),
          hidden[0] if hidden else victim.prototypes,
      )
      value = weights_lib.squared_norm(
          weights_lib.subtract(found, victim.gradient)
      )
    return value, tape.gradient(value, unknowns)


def invert(
    victim: Victim,
    input_shape: tuple[int, ...],
    *,
    iterations: int,
    restarts: int,
    seed: int,
) -> Reconstruction:
  """Attacks a victim by L-BFGS from standard normal starts.

  Args:
    victim: The victim.
    input_shape: Shape of its image.
    iterations: From each start, as DLG counts them: of up to 20 iterations of
      L-BFGS each.
    restarts: Number of starts, at least 1.
    seed: Of the starts.

  Returns:
    The reconstruction whose gradient matches best, which the attacker can tell;
    how like the image it is, which the attacker cannot, does not matter.
  """
  attack = Attack(victim, input_shape)
  rng = np.random.default_rng(seed)
  found = []
  for _ in range(restarts):
    result = optimize.minimize(
        attack,
        rng.standard_normal(attack.num_unknowns),
        jac=True,
        method='L-BFGS-B',
        # Never content before the last iteration, unless nothing moves.
        options={
            'maxiter': _INNER_ITERATIONS * iterations,
            'maxfun': 2 * _INNER_ITERATIONS * iterations,
            'maxcor': _HISTORY,
            'ftol': 0.0,
            'gtol': 0.0,
        },
    )
    x, y, *_ = attack.unpack(tf.constant(result.x))
    found.append(
        Reconstruction(
            x.numpy()[0], int(np.argmax(y)), float(result.fun), int(result.nit)
        )
    )
  return min(found, key=lambda r: r.gradient_match)


def measure(
    reconstruction: Reconstruction, victim: Victim, scene: Scene
) -> dict[str, Any]:
  """Returns how well an attack went, for JSON.

  Args:
    reconstruction: What it found, cut off at 0 and 1 before it is compared.
    victim: Whom it attacked.
    scene: What the victim has.

  Returns:
    `mse`; `psnr` in dB, None without any error; `gradient_match`, reached from
    zero gradient's `gradient_squared_norm`; `lbfgs_iterations`; and the `label`
    found beside the `true_label`, both local ones with MetaVers.
  """
  image = scene.image
  mse = float(np.mean((np.clip(reconstruction.image, 0, 1) - image) ** 2))
  return {
      'mse': mse,
      'psnr': -10 * math.log10(mse) if mse else None,
      'gradient_match': reconstruction.gradient_match,
      'gradient_squared_norm': float(weights_lib.squared_norm(victim.gradient)),
      'lbfgs_iterations': reconstruction.lbfgs_iterations,
      'label': reconstruction.label,
      'true_label': victim.label,
  }


def _gradient(loss, weights, x, probabilities, prototypes):
  """Returns the gradient of a loss by the weights, prototypes constant."""
  with tf.GradientTape() as tape:
    tape.watch(weights)
    value = loss(weights, x, probabilities, prototypes)
  return tape.gradient(
      value, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
