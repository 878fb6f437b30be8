"""Local training in NumPy, to hold the federated algorithms against.

The network is `tanh(x @ kernel + bias)`, 2 inputs to 3 dimensions. Losses are
plain sums over examples and classes in float64 and gradients are central
differences, so nothing is shared with the library but the random numbers: which
examples are support and in which order they come (their own tests are in
test_episodes.py).
"""

import collections
import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_meta import episodes
from tff_meta.learners import cyclic_batches
from tff_meta.models import layers
from tff_meta.models import model as model_lib

NUM_CLASSES = 4  # Nobody holds class 3.
RUN_SEED = 11
# Float32 against float64 over a dozen steps of order 1; the error of a central
# difference is below 1e-9.
TOLERANCE = {'rtol': 1e-4, 'atol': 3e-6}

fold_in = tf.random.experimental.stateless_fold_in


def build_model():
  """A body of nine parameters; a head has 4 for each class."""

  def init_body(seed):
    return collections.OrderedDict(
        kernel=0.8 * tf.random.stateless_normal([2, 3], seed),
        bias=tf.constant([0.1, -0.2, 0.3]),
    )

  return model_lib.Model(
      name='tiny',
      input_shape=(2,),
      embedding_size=3,
      num_classes=None,
      init_body=init_body,
      init_head=layers.dense_head(layers.uniform_fan_in, 3),
      embed=lambda body, x, mask: tf.tanh(
          layers.dense(x, body['kernel'], body['bias'])
      ),
      classify=layers.classify_linear,
  )


class Client(NamedTuple):
  """Examples `x` [n, 2] and `y` [n] of a client, and its salt."""

  x: np.ndarray
  y: np.ndarray
  salt: int

  def data(self):
    """What the processes take."""
    examples = collections.OrderedDict(x=self.x, y=self.y)
    return collections.OrderedDict(
        examples=tf.data.Dataset.from_tensors(examples),
        salt=tf.data.Dataset.from_tensors(np.int32(self.salt)),
    )

  def examples(self):
    """What the learners take."""
    return episodes.Examples(
        tf.constant(self.x), tf.constant(self.y), tf.ones(len(self.y))
    )

  def pairs(self):
    """What the oracle takes: a list of (x, label)."""
    return list(zip(self.x.astype(np.float64), self.y.tolist(), strict=True))


def make_client(counts, salt):
  """A client with `counts[c]` examples of class c."""
  rng = np.random.default_rng(salt)
  y = rng.permutation(np.repeat(np.arange(len(counts)), counts))
  centers = np.array([[1.0, 0.5], [-1.0, 0.3], [0.2, -1.2]])
  x = centers[y] + 0.6 * rng.normal(size=(len(y), 2))
  return Client(x.astype(np.float32), y.astype(np.int32), salt)


# Support sizes 4, 5 and 3, query sizes 5, 6 and 3; class 0 has one holder and
# the last client one class.
CLIENTS = (
    make_client((5, 4, 0), salt=1),
    make_client((0, 8, 3), salt=2),
    make_client((0, 0, 6), salt=3),
)


def to_vector(weights):
  """The weights as one float64 vector: body, then head; kernel, then bias."""
  leaves = []
  for part in (weights['body'], weights['head']):
    leaves += [part['kernel'], part['bias']] if len(part) else []
  return np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float64)


def embed(w, x):
  """The embedding of one example."""
  return np.tanh(x @ w[:6].reshape(2, 3) + w[6:9])


def cross_entropy(w, pairs, num_classes=NUM_CLASSES):
  """The mean of `-log softmax(logits)[label]`."""
  if not pairs:
    return 0.0
  kernel = w[9 : 9 + 3 * num_classes].reshape(3, num_classes)
  bias = w[9 + 3 * num_classes :]
  embeddings = np.array([embed(w, x) for x, _ in pairs])
  logits = embeddings @ kernel + bias
  chosen = [z[label] for z, (_, label) in zip(logits, pairs, strict=True)]
  return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))


def class_means(w, pairs):
  """The mean embedding of every class there is: label -> [3]."""
  held = {}
  for x, label in pairs:
    held.setdefault(label, []).append(embed(w, x))
  return {label: sum(es) / len(es) for label, es in held.items()}


def distance_loss(w, pairs, prototypes, squared=True, exclude_true_class=False):
  """The mean of `d(e, c_y) + log sum_c exp(-d(e, c))`."""
  losses = []
  for x, label in pairs:
    distances = {
        c: float(np.sum((embed(w, x) - prototype) ** 2))
        for c, prototype in prototypes.items()
    }
    if not squared:
      distances = {c: math.sqrt(d) for c, d in distances.items()}
    others = [
        d for c, d in distances.items() if not exclude_true_class or c != label
    ]
    if label in distances and others:
      denominator = sum(math.exp(-d) for d in others)
      losses.append(distances[label] + math.log(denominator))
  return sum(losses) / len(losses) if losses else 0.0


def counted(loss_sum, count, learns):
  """What a client counts for in the mean loss: nothing, if over nothing."""
  return np.array([loss_sum, count]) * learns


def gradient(loss, w, pairs):
  """The gradient of `loss(w, pairs)` in w, by central differences."""
  columns = []
  for i in range(len(w)):
    step = np.zeros(len(w))
    step[i] = 1e-5
    difference = loss(w + step, pairs) - loss(w - step, pairs)
    columns.append(difference / 2e-5)
  return np.array(columns)


def plain_sgd(rate):
  """An optimizer: `(gradient, state) -> step`."""
  return lambda g, state: rate * g


def descend(loss, w, batches, optimizer, decay=0.0, state=None):
  """One step of `g + decay * w` per batch; also the losses before the steps.

  Args:
    loss: `(w, pairs) -> float`.
    w: The weights.
    batches: Lists of pairs.
    optimizer: `(gradient, state dict) -> what is subtracted`.
    decay: Coupled weight decay.
    state: The optimizer's dict of earlier steps, which these change.

  Returns:
    The weights, the sum of the losses over the examples of all batches, and
    the number of these.
  """
  state = {} if state is None else state
  loss_sum, count = 0.0, 0
  for batch in batches:
    loss_sum += len(batch) * loss(w, batch)
    count += len(batch)
    w = w - optimizer(gradient(loss, w, batch) + decay * w, state)
  return w, loss_sum, count


def split(client, fraction, seed):
  """Support and query, as pairs."""
  parts = episodes.split_support_query(
      client.examples(), fraction, seed, NUM_CLASSES
  )
  return tuple(
      Client(part.x.numpy(), part.y.numpy(), client.salt).pairs()
      for part in parts
  )


def batches_of(pairs, batch_size, seed, num_epochs=1):
  """The minibatches, as lists of pairs; 0 is one batch of all."""
  batches = episodes.minibatches(
      len(pairs), batch_size or None, seed, num_epochs
  )
  return [
      [pairs[i] for i in rows[:size]]
      for rows, (size,) in zip(batches.indices, batches.sizes, strict=True)
  ]


def mean(values, weights):
  """The weighted mean."""
  total = sum(w * v for w, v in zip(weights, values, strict=True))
  return total / sum(weights)


def mean_of_holders(uploads, weights, over='holders'):
  """Class by class the mean over those that hold it; or divided by all."""
  result = {}
  for label in range(NUM_CLASSES):
    held = [
        (w, upload[label])
        for w, upload in zip(weights, uploads, strict=True)
        if label in upload
    ]
    if held:
      divisor = sum(weights if over == 'all' else (w for w, _ in held))
      result[label] = sum(w * prototype for w, prototype in held) / divisor
  return result


def assert_prototypes(actual, expected, **tolerance):
  """Compares `Prototypes` with label -> [3]."""
  present = [float(c in expected) for c in range(len(actual.present))]
  np.testing.assert_array_equal(actual.present, present)
  for label, row in enumerate(np.asarray(actual.means)):
    np.testing.assert_allclose(
        row, expected.get(label, np.zeros(3)), **(tolerance or TOLERANCE)
    )


def assert_fine_tunes(use, batch_size, rates):
  """Holds a client that fine-tunes, and its curve, against steps by hand.

  Args:
    use: A `ClientPersonalizer` of `build_model()` for `NUM_CLASSES`.
    batch_size: Of a step.
    rates: Of the steps.
  """
  weights = build_model().with_head(NUM_CLASSES).initialize([1, 2])
  client, query = CLIENTS[0], make_client((3, 4, 5), salt=9)
  seed = tf.constant([6, 7])
  curve = use.curve(weights, (), client.examples(), query.examples(), seed)
  assert curve.shape == (len(rates) + 1, 12)
  pairs = list(client.pairs())
  rows = cyclic_batches.cyclic_minibatches(
      len(pairs), batch_size, len(rates), seed
  ).indices.numpy()
  w = to_vector(weights)
  for step, labels in enumerate(curve.numpy().tolist()):
    if step:
      batch = [pairs[i] for i in rows[step - 1]]
      w = w - rates[step - 1] * gradient(cross_entropy, w, batch)
    assert labels == [
        np.argmin([cross_entropy(w, [(x, c)]) for c in range(NUM_CLASSES)])
        for x, _ in query.pairs()
    ]
  adapted = use.adapt(weights, (), client.examples(), seed)
  np.testing.assert_allclose(to_vector(adapted), w, **TOLERANCE)
