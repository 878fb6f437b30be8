"""Gradient inversion (DLG): images guessed from what a client sent of them.

An attacker, such as a server, knows the weights theta and what a client sent
after it had computed on one image, or on a few. It looks for dummy images x'
and whatever else it does not know, so that the client would have sent the same:

  minimum of  sum over all that was sent  |found - sent|^2 / |sent|^2 ,

where every thing that was sent (a gradient, a prototype) counts alike. DLG
looks among pixels, from normal ones. Here x' is a sum of cosines whose standard
deviations fall as 1 / (1 + frequency), as those of photographs do, and L-BFGS
looks among their coefficients, from a faint random picture: what the network
hardly sees, the finest detail, is not left as noise. The minimum sought is the
same one and is found in a small part of the steps.

A client sends, in these cases,

* `classifier`: the gradient of the cross-entropy of a linear classifier
  (FedAvg's). The label is guessed, too, as softmax(y').
* `hidden_prototypes`: the gradient of the prototypical loss of one query among
  the client's classes (MetaVers' L_S), with prototypes constant. The attacker
  guesses the label and the prototypes.
* `leaked_prototypes`: the same; the attacker has the prototypes.
* `hidden_prototypes_by_bias`: the same; the attacker has no prototypes and
  needs none. The loss reaches the body through the embedding e alone, so that
  the body's gradient is that of <u, e(x)> with u = dL/de. Where the last layer
  of the body is affine, u is in plain sight: the gradient of its bias. With
  constant prototypes only, see below.
* `update_and_prototype`: a step of local training and the class prototype, as
  in FRL. The client's support set is the image. Alone in its class it has a
  local loss of 0, so that the step is that of the loss against the global
  prototypes, times a number known to the server; these are of the round before
  and the server's own. The prototype is the mean embedding of the support set
  at theta, here the image's embedding, and is sent under its label.
* `prototype_only`: the class prototype, as in FedProto, of one image and under
  its label. That the attacker knows theta is more than FedProto gives away: a
  client's model never leaves it.

Prototypes are constants of all these gradients, which do not flow through them.
So MetaVers as this library trains it sends none of the three messages that have
its loss. They are a reading of the paper's experiment, which does not say
whether gradients stop at prototypes. Two cases are of several images, one to be
a query and one to be support of each of the client's classes:

* `episode`: what MetaVers sends in this library in the rounds of its warm-up:
  the gradient of L_S, which flows through prototypes (a test holds the two to
  each other). The attacker guesses all images. The prototypes follow from them,
  and which class is which does not matter to the loss; how many images there
  are is known, as ways, shots and queries are to a server. After the warm-up
  the message is of gamma L_S + (1 - gamma) L_T, which was not attacked: where a
  triplet begins or ceases to count the objective jumps, and L-BFGS stops there.
  Both losses depend on differences of embeddings alone: a shift of all
  embeddings changes nothing, so that the gradient of the last bias, the sum of
  all dL/de, is 0 whatever the images are, and `hidden_prototypes_by_bias` would
  get nothing from it.
* `minibatch`: to compare that with, `classifier` of the mean over the same
  images; the attacker has their labels.

Source: Zhu, Liu and Han 2019, "Deep Leakage from Gradients"; MetaVers (Lim et
al., WACV 2024), Fig. 3; for `hidden_prototypes_by_bias` the known remark that a
bias's gradient is that of its layer's output (Geiping et al. 2020, "Inverting
Gradients", section 3); for the spectrum of photographs Field 1987, "Relations
between the statistics of natural images and the response properties of cortical
cells".
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
from scipy import fft
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
HIDDEN_BY_BIAS = 'hidden_prototypes_by_bias'
UPDATE_AND_PROTOTYPE = 'update_and_prototype'
PROTOTYPE_ONLY = 'prototype_only'
EPISODE = 'episode'
MINIBATCH = 'minibatch'

# Cases in which the label need not be found, since the client sends it or the
# attacker is given it.
LABEL_IS_GIVEN = UPDATE_AND_PROTOTYPE, PROTOTYPE_ONLY, MINIBATCH

# The bias of the body's last layer, without an activation behind it.
_LAST_BIAS = 'dense_bias'
_HISTORY = 20  # Of L-BFGS.
# Of the pixels of a random picture, in [0, 1].
_MEAN = 0.5
_STD = 0.25
_START = 0.1  # How much of such a picture's contrast a start has.


class Scene(NamedTuple):
  """An image that a client trains on, and what else it has.

  Attributes:
    image: float64, in [0, 1].
    label: Its class in the whole problem.
    num_classes: Of the whole problem.
    support: Images of the client's classes, float64 [N, k, ...], k at least 2.
    local_label: Which of these classes the image is of.
    classes: int [N], the client's classes in the whole problem.
  """

  image: np.ndarray
  label: int
  num_classes: int
  support: np.ndarray
  local_label: int
  classes: np.ndarray


def draw_scene(
    corpus: corpus_lib.Corpus, index: int, ways: int, shots: int, seed: int
) -> Scene:
  """Draws the classes and the support images of a client with an image.

  Args:
    corpus: Of pixels that are in [0, 1] when preprocessed.
    index: Row of the image in the pool: the train part, then the test part.
    ways: N, classes of the client, at least 2; that of the image is one.
    shots: Support images of each, at least 2; the image is none of them.
    seed: Of the other classes and of the support images.

  Returns:
    The scene; local classes are in the order of their labels.

  Raises:
    ValueError: If there is no such image, there are too few classes or images,
      examples are no images, or pixels are not in [0, 1].
  """
  labels = corpus.pooled_labels
  for name, value, least, most in (
      ('image_index', index, 0, len(labels) - 1),
      ('local_classes', ways, 2, corpus.num_classes),
  ):
    if not least <= value <= most:
      raise ValueError(f'Expected `{name}` in {least}..{most}, found {value}.')
  if shots < 2:  # An episode takes two of a class.
    raise ValueError(f'Expected `shots` of at least 2, found {shots}.')
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
          f'Expected `shots` of at most {len(available)}, the further images of'
          f' class {local_class} of {corpus.name!r}, found {shots}.'
      )
    support.append(rng.choice(available, shots, replace=False))
  pixels = corpus.preprocess(
      corpus.raw_rows(np.concatenate([[index], *support]))
  ).astype(np.float64)
  if pixels.ndim != 4:
    raise ValueError(
        f'Expected images in {corpus.name!r}, found examples of shape'
        f' {pixels.shape[1:]}.'
    )
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
      np.array(classes),
  )


class Victim(NamedTuple):
  """What a client has and what it sent.

  Attributes:
    weights: theta, float64.
    truth: `image` [n, ...], of which the first one is the image of the scene;
      where there are any, `label` (probabilities [n, C]); and `points`, the
      prototypes [C, D] or u [1, D].
    sent: The list of what it sent.
    label: The true class of the first one, among those of the soft label.
  """

  weights: Any
  truth: Mapping[str, tf.Tensor]
  sent: Sequence[Any]
  label: int


class Case(NamedTuple):
  """What clients send, and what an attacker has to guess.

  Attributes:
    message: `(weights, image, label, points) -> sent`; what there is not of
      `Victim.truth` is None.
    guessed: Which entries of `Victim.truth`, after the image.
    finds_label: Whether the attacker ends up with a label, guessed or sent.
  """

  message: Callable[[Any, Any, Any, Any], Sequence[Any]]
  guessed: tuple[str, ...] = ()
  finds_label: bool = True


class Reconstruction(NamedTuple):
  """What an attack has found.

  Attributes:
    images: float64 [n, ...], in no particular order; not cut off at 0 and 1.
    label: The class of the largest probability of the first one, or None.
    mismatch: The objective that was reached; a guess that sends zeros has 1 for
      each thing that was sent.
    lbfgs_iterations: Of the start that was chosen.
  """

  images: np.ndarray
  label: int | None
  mismatch: float
  lbfgs_iterations: int


def build_cases(model: model_lib.Model, num_classes: int) -> dict[str, Case]:
  """Returns name -> case.

  Args:
    model: The network, without a head; the same body in all cases.
    num_classes: Of the whole problem, which a classifier tells apart.
  """
  network = model.with_head(num_classes)

  def cross_entropy(logits, label):
    return -tf.reduce_sum(label * tf.nn.log_softmax(logits))

  def classifier_loss(weights, image, label, points):
    del points  # A linear classifier has none.
    total = cross_entropy(network.logits(weights, image), label)
    return total / image.shape[0]

  def query_loss(weights, image, label, points):
    """L_S of MetaVers of a query (eq. 2), L_aux of FRL of an image (eq. 3)."""
    return cross_entropy(
        -prototypical.squared_distances(embed(weights, image), points), label
    )

  def output_loss(weights, image, label, points):
    del label  # It has had its say in u.
    return tf.reduce_sum(points * embed(weights, image))

  def episode_loss(weights, image, label, points):
    del points  # They are made of the images.
    e, ways = embed(weights, image), label.shape[1]
    y = tf.argmax(label, 1, output_type=tf.int32)
    is_support = tf.repeat(tf.constant([0.0, 1.0], tf.float64), ways)
    prototypes = prototypical.prototypes(e, y, is_support, ways)
    return prototypical.prototypical_loss(e, y, 1 - is_support, prototypes)

  def embed(weights, image, *_):
    return model.embed(weights['body'], image, None)

  def gradient_of(loss):
    return lambda *args: [_gradient(loss, *args)]

  return {
      CLASSIFIER: Case(gradient_of(classifier_loss), ('label',)),
      HIDDEN_PROTOTYPES: Case(gradient_of(query_loss), ('label', 'points')),
      LEAKED_PROTOTYPES: Case(gradient_of(query_loss), ('label',)),
      HIDDEN_BY_BIAS: Case(gradient_of(output_loss), finds_label=False),
      UPDATE_AND_PROTOTYPE: Case(
          lambda *args: [_gradient(query_loss, *args), embed(*args)]
      ),
      PROTOTYPE_ONLY: Case(lambda *args: [embed(*args)]),
      EPISODE: Case(gradient_of(episode_loss), finds_label=False),
      MINIBATCH: Case(gradient_of(classifier_loss), finds_label=False),
  }


def build_victims(
    model: model_lib.Model,
    cases: Mapping[str, Case],
    scene: Scene,
    seed: Sequence[int],
) -> dict[str, Victim]:
  """Lets a client compute what it sends in all cases.

  Args:
    model: The network, without a head.
    cases: From `build_cases`.
    scene: What the client has.
    seed: Two numbers, of the weights.

  Returns:
    Case -> victim.
  """
  network = model.with_head(scene.num_classes)
  weights = tf.nest.map_structure(
      lambda w: tf.cast(w, tf.float64), network.initialize(tf.constant(seed))
  )
  body = {'body': weights['body']}
  prototypes = tf.stack(
      [
          tf.reduce_mean(model.embed(weights['body'], tf.constant(x), None), 0)
          for x in scene.support
      ]
  )

  images = scene.image[np.newaxis]

  def victim(case, weights, labels, num_classes, points=None, images=images):
    truth = {
        'image': tf.constant(images),
        'label': tf.one_hot(labels, num_classes, dtype=tf.float64),
    }
    if points is not None:
      truth['points'] = points
    return Victim(
        weights, truth, _send(cases[case], weights, truth), int(labels[0])
    )

  local = [scene.local_label], len(scene.support)
  victims = {
      CLASSIFIER: victim(CLASSIFIER, weights, [scene.label], scene.num_classes)
  }
  for case in HIDDEN_PROTOTYPES, LEAKED_PROTOTYPES, UPDATE_AND_PROTOTYPE:
    victims[case] = victim(case, body, *local, prototypes)
  victims[PROTOTYPE_ONLY] = victim(PROTOTYPE_ONLY, body, *local)
  hidden = victims[HIDDEN_PROTOTYPES]
  u = hidden.sent[0]['body'][_LAST_BIAS]
  victims[HIDDEN_BY_BIAS] = hidden._replace(
      truth={'image': hidden.truth['image'], 'points': u[tf.newaxis]}
  )
  # A query of each class, the image itself first, and a support image of each.
  others = np.delete(np.arange(len(scene.support)), scene.local_label)
  classes = np.concatenate([local[0], others])
  episode = np.concatenate(
      [images, scene.support[others, 1], scene.support[classes, 0]]
  )
  local_labels = np.tile(classes, 2)
  victims[EPISODE] = victim(
      EPISODE, body, local_labels, len(classes), images=episode
  )
  victims[MINIBATCH] = victim(
      MINIBATCH,
      weights,
      scene.classes[local_labels],
      scene.num_classes,
      images=episode,
  )
  return {case: victims[case] for case in cases}


class Attack:
  """A case's objective as a function of one flat vector, compiled once.

  The vector has the coefficients of the image, then all else that is guessed;
  of the label the logits.
  """

  def __init__(self, case: Case):
    """Takes the case."""
    self._case = case
    self._value = tf.function(self._value_and_gradient, autograph=False)

  def start(self, victim: Victim, rng: np.random.Generator) -> np.ndarray:
    """Returns a random vector: a faint picture, and normal numbers."""
    image, *others = map(math.prod, self._shapes(victim.truth))
    picture = _START * rng.standard_normal(image)
    return np.concatenate([picture, rng.standard_normal(sum(others))])

  def guess(
      self, victim: Victim, unknowns: np.ndarray
  ) -> tuple[np.ndarray, int | None]:
    """Returns the images [n, ...], and the class that is found if any is.

    Args:
      victim: Whom to attack.
      unknowns: float64, like `start`.
    """
    truth = self._truth(tf.constant(unknowns), victim.truth)
    label = int(np.argmax(truth['label'])) if self._case.finds_label else None
    return truth['image'].numpy(), label

  def __call__(
      self, victim: Victim, unknowns: np.ndarray
  ) -> tuple[float, np.ndarray]:
    """Returns how badly a guess explains what was sent, and the derivative.

    Args:
      victim: Whom to attack.
      unknowns: float64, like `start`.

    Returns:
      The objective, and its derivative float64, like `start`.
    """
    value, gradient = self._value(
        tf.constant(unknowns),
        victim.weights,
        dict(victim.truth),
        list(victim.sent),
    )
    return float(value), gradient.numpy()

  def _shapes(self, truth):
    names = 'image', *self._case.guessed
    return [tuple(truth[name].shape) for name in names]

  def _truth(self, unknowns, truth):
    """Returns what is known, with guesses in place of what is not."""
    shapes = self._shapes(truth)
    parts = tf.split(unknowns, [math.prod(shape) for shape in shapes])
    image, *guesses = (
        tf.reshape(part, shape)
        for part, shape in zip(parts, shapes, strict=True)
    )
    guessed = dict(zip(self._case.guessed, guesses, strict=True))
    if 'label' in guessed:
      guessed['label'] = tf.nn.softmax(guessed['label'])
    return truth | guessed | {'image': to_picture(image)}

  def _value_and_gradient(self, unknowns, weights, truth, sent):
    with tf.GradientTape() as tape:
      tape.watch(unknowns)
      found = _send(self._case, weights, self._truth(unknowns, truth))
      value = sum(
          weights_lib.squared_norm(weights_lib.subtract(a, b))
          / weights_lib.squared_norm(b)
          for a, b in zip(found, sent, strict=True)
      )
    return value, tape.gradient(value, unknowns)


def to_picture(coefficients: tf.Tensor) -> tf.Tensor:
  """Returns pictures of these coefficients, both [n, height, width, channels].

  Of independent standard normal coefficients they are random pictures, whose
  pixels have the mean 0.5 and, on average over the picture, the standard
  deviation 0.25.
  """
  _, height, width, _ = coefficients.shape
  rows, columns = (
      fft.idct(np.eye(n), axis=0, norm='ortho') for n in (height, width)
  )
  frequency = np.hypot(np.arange(height)[:, np.newaxis], np.arange(width))
  std = 1 / (1 + frequency)
  std *= _STD / np.sqrt(np.mean(std**2))
  return _MEAN + tf.einsum(
      'hu,wv,nuvc->nhwc', rows, columns, std[..., np.newaxis] * coefficients
  )


def invert(
    attack: Attack,
    victim: Victim,
    *,
    iterations: int,
    restarts: int,
    seed: Sequence[int],
) -> Reconstruction:
  """Attacks a victim by L-BFGS from random starts.

  Args:
    attack: Of the victim's case.
    victim: The victim.
    iterations: Of L-BFGS, at most, from each start.
    restarts: Number of starts, at least 1.
    seed: Of the starts; with the same one all cases start from the same images.

  Returns:
    The reconstruction with the least mismatch, which the attacker can tell; how
    like the image it is, which the attacker cannot, does not matter.
  """
  found = []
  for start in range(restarts):
    rng = np.random.default_rng([*seed, start])
    result = optimize.minimize(
        lambda unknowns: attack(victim, unknowns),
        attack.start(victim, rng),
        jac=True,
        method='L-BFGS-B',
        # Never content before the last iteration, unless nothing moves.
        options={
            'maxiter': iterations,
            'maxfun': 2 * iterations,
            'maxcor': _HISTORY,
            'ftol': 0.0,
            'gtol': 0.0,
        },
    )
    images, label = attack.guess(victim, result.x)
    found.append(
        Reconstruction(images, label, float(result.fun), int(result.nit))
    )
  return min(found, key=lambda r: (np.isnan(r.mismatch), r.mismatch))


def _send(case, weights, truth):
  """Returns what a client with this truth sends."""
  return case.message(
      weights, truth['image'], truth.get('label'), truth.get('points')
  )


def _gradient(loss, weights, *args):
  """Returns the gradient of a loss by the weights, all else constant."""
  with tf.GradientTape() as tape:
    tape.watch(weights)
    value = loss(weights, *args)
  return tape.gradient(
      value, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
