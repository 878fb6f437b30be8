"""FedProto: clients share class prototypes in place of weights.

Every client has a model of its own, which it trains on its loss and on the
distance of its embeddings to the prototypes of their classes, and then uploads
the mean embeddings of its own classes. The server averages these, class by
class over the clients that hold it; a class that nobody held in a round keeps
the prototype that it had. No weights are averaged: the server's stay those with
which every client begins.

A known client classifies by the nearest prototype among its own classes, of
those that it received in its last round. A new client has neither a model nor
prototypes: there is no use for it.

Source: Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang and
Chengqi Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022, https://arxiv.org/abs/2105.00243, Algorithm 1.
Deviations: docs/algorithms/fed_proto.md.
"""

import collections
import dataclasses
from typing import Literal

import tensorflow as tf

from tff_meta import configurations
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.aggregators import prototypes as prototypes_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import local_sgd
from tff_meta.learners import prototype_classifier
from tff_meta.losses import cross_entropy
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedProtoConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    uniform: The clients that hold a class count alike in its prototype;
      otherwise by their number of examples of it (the paper's eq. 6).
    prototype_weight: lambda, of the distance to the prototypes; with 0 this is
      local training.
    classifier: What a client classifies with: the `'prototypes'`, or the
      `'head'` of its model.
  """

  learning_rate: float = 0.01
  momentum: float = 0.5
  batch_size: int = 4
  prototype_weight: float = 1.0
  classifier: Literal['prototypes', 'head'] = 'prototypes'


# The numbers are those of the authors' code for MNIST.
PAPER = FedProtoConfig()
RELEASE = dataclasses.replace(PAPER, uniform=True)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.3, batch_size=16)


def fed_proto(
    model: model_lib.Model, config: FedProtoConfig, num_classes: int
) -> method.Method:
  """FedProto; clients send no change of the weights, only prototypes.

  The server keeps the prototypes, at first of no class. A client's memory is
  `OrderedDict(weights, prototypes)`: its model and the prototypes that it
  received last. One without a memory trains the server's model.

  With `'prototypes'` a known client classifies by the nearest prototype of its
  own classes; those of which it received none have the mean embedding of its
  examples. One that was never sampled has the server's model, and received
  none. With `'head'` it uses its model alone.
  """
  network = classifiers.LinearClassifier(model, num_classes)
  by_distance = classifiers.DistanceClassifier(model, num_classes)

  def own_weights(weights, memory):
    """Those of the client's model, or the server's if it has none yet."""
    return memory._replace(value=memory.value['weights']).value_or(weights)

  def loss_given(prototypes):
    """The clients' loss, given the server's prototypes.

      cross-entropy + lambda * mean_ij (f(x_i)_j - G(y_i)_j)^2

    Examples of classes without a prototype are at no distance.
    """

    def loss(weights, batch):
      embeddings = model.embed(weights['body'], batch.x, batch.mask)
      logits = model.classify(weights['head'], embeddings)
      pull = prototypical.mean_squared_distance(
          embeddings, batch.y, batch.mask, prototypes
      )
      return (
          cross_entropy.softmax_cross_entropy(logits, batch.y, batch.mask)
          + config.prototype_weight * pull
      )

    return loss

  def client_update(weights, client):
    examples = client.examples
    trained, report = config.train(
        loss_given(client.message),
        own_weights(weights, client.memory),
        examples,
        client.seed,
    )
    class_weight = tf.ones([num_classes])
    if not config.uniform:
      class_weight = tf.reduce_sum(tf.one_hot(examples.y, num_classes), axis=0)
    return client_work.ClientOutput(
        weights_lib.zeros_like(weights),
        local_sgd.client_weight(tf.size(examples.y), uniform=True),
        report,
        signal=prototypical.weigh_prototypes(
            by_distance.prototypes(trained, examples), class_weight
        ),
        memory=collections.OrderedDict(
            weights=trained, prototypes=client.message
        ),
    )

  def known_client():
    if config.classifier == 'head':
      return classifiers.build_client_personalizer(network, own_weights)
    by_means = prototype_classifier.build_client_personalizer(
        model, num_classes=num_classes
    )

    def adapt(weights, memory, examples, seed):
      own = own_weights(weights, memory)
      body, means = by_means.adapt(own, (), examples, seed)
      received = memory.value['prototypes']
      is_received = received.present[:, tf.newaxis] > 0
      return body, means._replace(
          means=tf.where(is_received, received.means, means.means)
      )

    return by_means._replace(adapt=adapt)

  of_classes = tf.TensorSpec([num_classes])
  means = tf.TensorSpec([num_classes, model.embedding_size])
  prototypes = method.Channel(
      'class prototypes',
      prototypical.PrototypeSums(means, of_classes, of_classes),
      bound=prototypes_lib.BOUND,
  )
  return method.Method(
      num_classes,
      network.initialize,
      client_update,
      memory=lambda seed: collections.OrderedDict(
          weights=weights_lib.zeros_like(network.initialize(seed)),
          prototypes=by_distance.no_prototypes(),
      ),
      state=lambda seed: client_work.ClientWorkState(
          initialize=by_distance.no_prototypes,
          message=lambda prototypes: prototypes,
          next=prototypical.newest,
      ),
      sends_updates=False,
      channels=(prototypes,),
      # Prototypes are of the client's own model.
      memory_reaches={'signal': 'itself', 'loss': 'itself'},
      known_client=known_client,
      client_network=own_weights,
  )
