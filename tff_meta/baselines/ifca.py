"""IFCA: k models, of which every client trains the one that fits it best.

The server has k models that begin at random. A client takes the loss of each on
its examples, trains the one with the smallest and uploads it; the server
averages every model over the clients that picked it, and leaves one that nobody
picked as it is. A client, known or new, picks a model in the same way; it uses
it as it is, or fine-tunes it first (IFCA-FT in CAFeMe's tables).

Source: Avishek Ghosh, Jichan Chung, Dong Yin and Kannan Ramchandran, "An
Efficient Framework for Clustered Federated Learning", NeurIPS 2020,
https://arxiv.org/abs/2006.04088, Algorithm 1, option II (model averaging).
Deviations: docs/algorithms/ifca.md.
"""

import dataclasses

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.aggregators import clusters
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import fine_tuning
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class IfcaConfig(configurations.FineTuned, configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    clusters: k, models of the server, at least 1.
    batch_size: Examples of a minibatch, also in fine-tuning, which needs at
      least 1; 0 is the whole set.
  """

  clusters: int = 4
  epochs: int = 10
  batch_size: int = 100
  uniform: bool = True

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'clusters')


# The authors' experiment and code on rotated MNIST: four models, ten steps of
# rate 0.1 on all 100 examples of a client, clients alike. Fine-tuning is that
# of CAFeMe's code.
PAPER = IfcaConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, epochs=1, batch_size=16, fine_tuning_steps=10)


def ifca(
    model: model_lib.Model, config: IfcaConfig, num_classes: int
) -> method.Method:
  """IFCA; all weights have a leading axis of k models.

  A client, known or new, picks the model that fits its examples best, and has
  none before it has seen examples. A server's optimizer with a state, such as
  momentum, also moves a model that nobody picked, by what it remembers.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def initialize(seed):
    fold_in = tf.random.experimental.stateless_fold_in
    return _stack(
        [
            classifier.initialize(fold_in(seed, i))
            for i in range(config.clusters)
        ]
    )

  def client_update(weights, client):
    index = _pick(classifier, config, weights, client.examples)
    received = _model(weights, index)
    trained, report = config.train(
        classifier.loss, received, client.examples, client.seed
    )
    change = weights_lib.subtract(received, trained)
    return client_work.ClientOutput(
        clusters.ClusterUpdate(
            _stack([change] * config.clusters),
            tf.one_hot(index, config.clusters),
        ),
        config.weight(client.examples),
        report,
        change=change,
    )

  def client():
    one = classifiers.build_client_personalizer(classifier)
    return _with_choice(one, classifier, config)

  return method.Method(
      num_classes,
      initialize,
      client_update,
      num_models=config.clusters,
      known_client=client,
      new_client=client,
  )


def ifca_ft(
    model: model_lib.Model, config: IfcaConfig, num_classes: int
) -> method.Method:
  """IFCA, then fine-tuning of the model that a client picks.

  A client, known or new, has a curve of `fine_tuning_steps + 1` points, the
  first that of the model as it was picked. `known_client` and `new_client`
  raise a ValueError where the configuration has no batch size.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client():
    config_checks.check_at_least_one(config, 'batch_size')
    one = fine_tuning.build_classifier_personalizer(
        config.fine_tuning(), classifier
    )
    return _with_choice(one, classifier, config)

  return dataclasses.replace(
      ifca(model, config, num_classes), known_client=client, new_client=client
  )


def _stack(models):
  return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *models)


def _model(models, index):
  """One of the stacked models."""
  return tf.nest.map_structure(lambda leaf: leaf[index], models)


def _pick(classifier, config, models, examples):
  """The number of the model with the least loss, int32; 0 without examples."""
  losses = [
      classifier.loss(_model(models, i), examples)
      for i in range(config.clusters)
  ]
  return tf.argmin(tf.stack(losses), output_type=tf.int32)


def _with_choice(one, classifier, config):
  """From a use of one model to that of the one of k that the client picks."""

  def pick(weights, examples):
    return _model(weights, _pick(classifier, config, weights, examples))

  def adapt(weights, memory, examples, seed):
    return one.adapt(pick(weights, examples), memory, examples, seed)

  def asking_the_picked(ask):
    def curve(weights, memory, examples, query, seed):
      picked = pick(weights, examples)
      return ask(picked, memory, examples, query, seed)

    return curve

  return personalizer.ClientPersonalizer(
      start=None,
      adapt=adapt,
      predict=one.predict,
      curve=one.curve and personalizer.lift(asking_the_picked, one.curve),
  )
