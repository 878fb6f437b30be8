"""Personalized FL: Per-FedAvg as preparation for few federated rounds.

Every participant is prepared alone: from the initial model it takes local
epochs on its support set, and the initial model then moves by the query
gradient of where they led (first-order MAML); the server averages. A new group
runs R federated rounds from that initial model. The comparison isolates what
FRL gains by training for a *group's* rounds instead of a client's own steps.

Source: the rows "Personalized FL" of Park et al., "Few-Round Learning for
Federated Learning", NeurIPS 2021, Tables 1 to 3; the preparation is that of
Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical
Guarantees", NeurIPS 2020, https://arxiv.org/abs/2002.07948.
Deviations: docs/algorithms/personalized_fl.md.
"""

import dataclasses
from typing import Literal

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import few_round
from tff_meta.learners import local_sgd
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class PersonalizedFlConfig(configurations.Averaged):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    classifier: `'distance'` to prototypes, or a `'linear'` layer.
    inner_epochs: Local epochs on the support set before the meta-update.
    batch_size: Examples of a support minibatch; 0 is the whole set.
    inner_learning_rate: alpha, of the local epochs.
    meta_learning_rate: beta, of the update of the initial model.
    weight_decay: Coupled L2 coefficient of both.
    support_fraction: Share of every class's examples that is support.
    prototype_source: Weights that embed a group's prototypes, as in FRL: those
      `'downloaded'` in the round or the client's `'updated'` ones.
    rounds: R, federated rounds of a new group, at least 1.
    deployment_learning_rate: alpha at deployment.
    deployment_batch_size: Examples of a minibatch at deployment.
  """

  classifier: Literal['distance', 'linear'] = 'distance'
  inner_epochs: int = 3
  batch_size: int = 60
  inner_learning_rate: float = 1e-4
  meta_learning_rate: float = 1e-3
  weight_decay: float = 0.0
  support_fraction: float = 0.5
  prototype_source: Literal['downloaded', 'updated'] = 'downloaded'
  rounds: int = 3
  deployment_learning_rate: float = 1e-4
  deployment_batch_size: int = 60

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'rounds')
    config_checks.check_fraction(self, 'support_fraction')


PAPER = PersonalizedFlConfig()
RELEASE = dataclasses.replace(
    PAPER,
    weight_decay=5e-4,
    uniform=True,
    prototype_source='updated',
    deployment_learning_rate=1e-3,
    deployment_batch_size=30,
)
# For demonstrations: the embedded digits learn little at the published rates in
# a few hundred rounds.
DEMO = dataclasses.replace(
    PAPER,
    inner_learning_rate=0.1,
    meta_learning_rate=0.5,
    deployment_learning_rate=0.5,
)


def personalized_fl(
    model: model_lib.Model, config: PersonalizedFlConfig, num_classes: int
) -> method.Method:
  """Personalized FL; the loss that is reported is that of the query sets.

  A client's preparation:

    theta = epochs of SGD from phi on the support set
    phi_k = phi - beta * (grad_theta loss(theta, query set) + decay * phi)

  A new group runs R federated rounds from the prepared model; with `'distance'`
  its aggregated prototypes classify.
  """
  kinds = dict(
      linear=classifiers.LinearClassifier,
      distance=classifiers.DistanceClassifier,
  )
  classifier = kinds[config.classifier](model, num_classes)
  none = classifier.no_prototypes()
  settings = few_round.RoundSettings(
      optimizer=optimizers.build_optimizer('sgd', config.inner_learning_rate),
      batch_size=config.batch_size,
      num_epochs=config.inner_epochs,
      weight_decay=config.weight_decay,
      prototype_source=config.prototype_source,
      uniform=config.uniform,
  )

  def client_update(phi, client):
    fold_in = tf.random.experimental.stateless_fold_in
    split_seed = fold_in(client.seed, 0)
    support, query = episodes.split_support_query(
        episodes.augmented(client.examples, split_seed),
        config.support_fraction,
        split_seed,
        num_classes,
    )
    upload = few_round.client_round(
        classifier, settings, phi, none, support, fold_in(client.seed, 1)
    )
    theta = upload.weights
    with tf.GradientTape() as tape:
      tape.watch(theta)
      loss = classifier.loss(theta, query, none)
    gradient = tape.gradient(
        loss, theta, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    delta = weights_lib.scale(
        weights_lib.add_decay(gradient, phi, config.weight_decay),
        config.meta_learning_rate,
    )
    num_query = tf.size(query.y)
    weight = local_sgd.client_weight(
        tf.size(support.y) + num_query, config.uniform
    )
    num_query = tf.cast(num_query, tf.float32)
    report = local_sgd.LocalReport(loss * num_query, num_query)
    return client_work.ClientOutput(
        delta,
        weight,
        report,
        learned=classifiers.learns_from(classifier, query, none),
    )

  def group():
    deployment = dataclasses.replace(
        settings,
        optimizer=optimizers.build_optimizer(
            'sgd', config.deployment_learning_rate
        ),
        batch_size=config.deployment_batch_size,
        num_epochs=1,
    )
    return few_round.build_group_personalizer(
        classifier, deployment, config.rounds
    )

  return method.Method(
      num_classes, classifier.initialize, client_update, group=group
  )
