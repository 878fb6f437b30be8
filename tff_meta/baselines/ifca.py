"""IFCA: k models, of which every client trains the one that fits it best.

The server has k models that begin at random. A client takes the loss of each on
its examples, trains the one with the smallest and uploads it; the server
averages every model over the clients that picked it, and leaves one that nobody
picked as it is. A client, known or new, picks a model in the same way; it uses
it as it is, or fine-tunes it first (IFCA-FT in CAFeMe's tables).

Source: Avishek Ghosh, Jichan Chung, Dong Yin and Kannan Ramchandran, "An
Efficient Framework for Clustered Federated Learning", NeurIPS 2020,
https://arxiv.org/abs/2006.04088, Algorithm 1, option II (model averaging).
Deviations: BUILD_NOTES.md, IFCA.
"""

import dataclasses
from typing import Literal

import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta import config_checks
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.aggregators import clusters
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class IfcaConfig:
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    clusters: k, models of the server, at least 1.
    optimizer: Of the clients; its state starts anew every round.
    learning_rate: Of the clients.
    momentum: Of SGD, in [0, 1).
    epochs: Local epochs of a round.
    batch_size: Examples of a minibatch, also in fine-tuning; 0 is the whole
      set.
    weight_decay: Coupled L2 coefficient.
    uniform: Clients count alike; otherwise by their number of examples.
    fine_tuning_steps: SGD steps of a client on the model that it picked, with
      fine-tuning, which needs a `batch_size` of at least 1.
    fine_tuning_learning_rate: Of the first of them.
    fine_tuning_decay: Factor of that rate every `fine_tuning_decay_steps`.
    fine_tuning_decay_steps: At least 1.
  """

  clusters: int = 4
  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.1
  momentum: float = 0.0
  epochs: int = 10
  batch_size: int = 100
  weight_decay: float = 0.0
  uniform: bool = True
  fine_tuning_steps: int = 50
  fine_tuning_learning_rate: float = 0.01
  fine_tuning_decay: float = 0.8
  fine_tuning_decay_steps: int = 5

  def __post_init__(self):
    config_checks.check_fields(self)
    for name in ('clusters', 'fine_tuning_decay_steps'):
      config_checks.check_at_least_one(self, name)
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )


# The authors' experiment and code on rotated MNIST: four models, ten steps of
# rate 0.1 on all 100 examples of a client, clients alike. Fine-tuning is that
# of CAFeMe's code.
PAPER = IfcaConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, epochs=1, batch_size=16, fine_tuning_steps=10)


def _stack(models):
  return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *models)


def _model(models, index):
  """One of the stacked models."""
  return tf.nest.map_structure(lambda leaf: leaf[index], models)


def _pick(classifier, config, models, examples):
  """The number of the model with the smallest loss, int32; 0 without examples.

  Args:
    classifier: Whose loss it is.
    config: Has k.
    models: Weights with a leading axis of k.
    examples: The client's.
  """
  losses = [
      classifier.loss(_model(models, i), examples)
      for i in range(config.clusters)
  ]
  return tf.argmin(tf.stack(losses), output_type=tf.int32)


def build_ifca(
    model: model_lib.Model,
    config: IfcaConfig,
    *,
    num_classes: int,
    seed: int = 0,
    aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds IFCA.

  Args:
    model: The network; it gets a head of `num_classes`.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.
    seed: The run's seed, in the int32 range.
    aggregator: Of one model over the clients that picked it, see
      `clusters.ClusterMeansFactory`; by default the weighted mean.
    server_optimizer: Of all models; by default SGD of rate 1, which puts the
      means in their place. One with a state, such as momentum, also moves a
      model that nobody picked, by what it remembers.

  Returns:
    A `LearningProcess` on `<examples, salt>` client data. Its model weights
    have a leading axis of k models.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def initial_weights():
    seed_of_all = composition.initial_seed(seed)
    fold_in = tf.random.experimental.stateless_fold_in
    return _stack(
        [
            classifier.initialize(fold_in(seed_of_all, i))
            for i in range(config.clusters)
        ]
    )

  def client_update(weights, client):
    index = _pick(classifier, config, weights, client.examples)
    received = _model(weights, index)
    trained, report = composition.train_epochs(
        classifier.loss,
        config,
        received,
        client.examples,
        client.seed,
        config.epochs,
    )
    change = weights_lib.subtract(received, trained)
    return client_work.ClientOutput(
        clusters.ClusterUpdate(
            _stack([change] * config.clusters),
            tf.one_hot(index, config.clusters),
        ),
        local_sgd.client_weight(tf.size(client.examples.y), config.uniform),
        report,
        change=change,
    )

  return composition.build_learning_process(
      initial_weights,
      model,
      client_update,
      num_classes=num_classes,
      seed=seed,
      aggregator=clusters.ClusterMeansFactory(
          aggregator or composition.mean_factory()
      ),
      server_optimizer=server_optimizer,
  )


def build_ifca_client(
    model: model_lib.Model, config: IfcaConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client, known or new, picks the model that fits its examples best.

  Args:
    model: The network.
    config: The configuration.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` that trains nothing. It has no model before it has
    seen examples.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  plain = classifiers.build_client_personalizer(
      classifier, lambda weights, memory: weights, classifiers.as_it_is
  )
  return _with_choice(plain, classifier, config)


def build_ifca_ft_client(
    model: model_lib.Model, config: IfcaConfig, *, num_classes: int
) -> personalizer.ClientPersonalizer:
  """A client, known or new, picks a model and fine-tunes it.

  Args:
    model: The network.
    config: The configuration, whose `batch_size` must be at least 1.
    num_classes: Number of classes of the clients' labels.

  Returns:
    A `ClientPersonalizer` with a curve of `fine_tuning_steps + 1` points, the
    first that of the model as it was picked.

  Raises:
    ValueError: If the configuration has no batch size.
  """
  config_checks.check_at_least_one(config, 'batch_size')
  classifier = classifiers.LinearClassifier(model, num_classes)
  tuned = fine_tuning.build_classifier_personalizer(
      fine_tuning.of_config(config), classifier
  )
  return _with_choice(tuned, classifier, config)


def _with_choice(one, classifier, config):
  """From a use of one model to that of the one of k that the client picks."""

  def pick(weights, examples):
    return _model(weights, _pick(classifier, config, weights, examples))

  def adapt(weights, memory, examples, seed):
    return one.adapt(pick(weights, examples), memory, examples, seed)

  def curve(weights, memory, examples, query, seed):
    picked = pick(weights, examples)
    return one.curve(picked, memory, examples, query, seed)

  return personalizer.ClientPersonalizer(
      start=None,
      adapt=adapt,
      predict=one.predict,
      curve=curve if one.curve else None,
  )
