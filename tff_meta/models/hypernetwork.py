"""A hypernetwork: a perceptron whose outputs are the weights of a network."""

import collections
import dataclasses
import functools
import itertools

import tensorflow as tf

from tff_meta.models import layers
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class Hypernetwork:
  """From a vector v to the weights of a target network, `h(v; phi)`.

  Hidden dense layers with ReLU and one without make features of v. For every
  tensor of the target there is a dense layer on the features, whose outputs in
  row-major order are the tensor. With L hidden layers of H units, a vector of E
  numbers and a target of P parameters there are
  `(E + 1) H + L H (H + 1) + (H + 1) P` parameters.

  Its weights are `OrderedDict(body, head)`: the body makes the features, and
  the head is `OrderedDict(kernels, biases)`, two structures like the target's
  weights with kernels `[H, p]` and biases `[p]` for a tensor of p numbers.

  Attributes:
    target: The network whose weights it makes, with its head if it has one.
    input_size: E, at least 1.
    hidden_layers: L, layers with ReLU, at least 0.
    hidden_units: H, of each of them and of the features, at least 1.

  Source: Shamsian, Navon, Fetaya and Chechik 2021, "Personalized Federated
  Learning using Hypernetworks", and its released code, which has the layer
  without ReLU.
  """

  target: model_lib.Model
  input_size: int
  hidden_layers: int
  hidden_units: int

  @functools.cached_property
  def _specs(self):
    """The target's weights as `TensorSpec`s; nothing is drawn."""
    with tf.Graph().as_default():
      return tf.nest.map_structure(
          lambda w: tf.TensorSpec(w.shape, w.dtype),
          self.target.initialize(tf.constant([0, 0])),
      )

  def initialize(self, seed: tf.Tensor) -> model_lib.Weights:
    """Draws initial weights, all of `layers.uniform_fan_in`.

    Args:
      seed: int32 [2]; the same seed gives the same weights.

    Returns:
      The weights, float32.
    """
    fold_in = tf.random.experimental.stateless_fold_in
    body_seed, head_seed = fold_in(seed, 0), fold_in(seed, 1)
    sizes = self.input_size, *[self.hidden_units] * (self.hidden_layers + 1)
    body = collections.OrderedDict()
    for i, shape in enumerate(itertools.pairwise(sizes)):
      kernel, bias = layers.uniform_fan_in(fold_in(body_seed, i), shape)
      body[f'dense{i}_kernel'], body[f'dense{i}_bias'] = kernel, bias
    specs = self._specs
    drawn = [
        layers.uniform_fan_in(
            fold_in(head_seed, i),
            (self.hidden_units, spec.shape.num_elements()),
        )
        for i, spec in enumerate(tf.nest.flatten(specs))
    ]
    kernels, biases = (
        tf.nest.pack_sequence_as(specs, part)
        for part in zip(*drawn, strict=True)
    )
    head = collections.OrderedDict(kernels=kernels, biases=biases)
    return collections.OrderedDict(body=body, head=head)

  def generate(
      self, weights: model_lib.Weights, vector: tf.Tensor
  ) -> model_lib.Weights:
    """Computes the target's weights.

    Args:
      weights: As `initialize` returns them.
      vector: v, [E], in the dtype of the weights.

    Returns:
      The target's weights.
    """
    body, head = weights['body'], weights['head']
    features = vector[tf.newaxis]
    for i in range(self.hidden_layers + 1):
      features = tf.nn.relu(features) if i else features
      features = layers.dense(
          features, body[f'dense{i}_kernel'], body[f'dense{i}_bias']
      )
    return tf.nest.map_structure(
        lambda spec, kernel, bias: tf.reshape(
            layers.dense(features, kernel, bias), spec.shape
        ),
        self._specs,
        head['kernels'],
        head['biases'],
    )
