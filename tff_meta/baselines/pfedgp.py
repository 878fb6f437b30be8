"""pFedGP: a shared kernel network, and Gaussian processes of each client alone.

Clients and server share a network that embeds examples; nobody has a head. A
client classifies by a binary tree over its classes, in which every node is a
Gaussian process classifier whose covariance is that of the embeddings
(`learners.gp_tree`). In a round it takes a few gradient steps on how well the
tree of one half of its examples predicts the other half, and the server
averages the networks. At the test a client, known or new and even with classes
never trained, builds the tree of all its training examples. Nothing is kept
between rounds.

Source: Idan Achituve, Aviv Shamsian, Aviv Navon, Gal Chechik and Ethan Fetaya,
"Personalized Federated Learning with Gaussian Processes", NeurIPS 2021,
https://arxiv.org/abs/2106.15482.
Deviations: docs/algorithms/pfedgp.md.
"""

import dataclasses
from typing import Literal

import numpy as np
import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import method
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import gp_classifier
from tff_meta.learners import gp_tree
from tff_meta.learners import local_sgd
from tff_meta.learners import personalizer
from tff_meta.learners import prototype_classifier
from tff_meta.losses import prototypical
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class PFedGPConfig(configurations.Configuration):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    learning_rate: Of the clients' SGD, which starts anew every round.
    momentum: Of SGD, in [0, 1).
    weight_decay: Coupled L2 coefficient.
    inner_steps: Local steps of a round, each on all of a client's examples.
    max_gradient_norm: Longer gradients are scaled down to it, before weight
      decay; above 0.
    held_out: The part of each class's examples, rounded down, that is predicted
      from the others; strictly between 0 and 1.
    output_scale: Variance of the Gaussian processes, above 0.
    length_scale: Of their covariance, above 0.
    gibbs_steps: Draws in a chain after the first one.
    train_draws: Chains in training, at least 1.
    test_draws: Chains of the model that is tested, at least 1.
    likelihood: How a probability is taken over the latent function, see
      `gp_classifier.GaussianProcess`.
  """

  learning_rate: float = 0.05
  momentum: float = 0.9
  weight_decay: float = 1e-3
  inner_steps: int = 1
  max_gradient_norm: float = 50.0
  held_out: float = 0.5
  output_scale: float = 8.0
  length_scale: float = 1.0
  gibbs_steps: int = 5
  train_draws: int = 20
  test_draws: int = 30
  likelihood: Literal['mean', 'geometric'] = 'mean'

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_fraction(self, 'held_out')
    for name in ('train_draws', 'test_draws'):
      config_checks.check_at_least_one(self, name)
    for name in ('max_gradient_norm', 'output_scale', 'length_scale'):
      if getattr(self, name) <= 0:
        raise ValueError(
            f'Expected `{name}` above 0, found {getattr(self, name)}.'
        )
    optimizers.build_optimizer('sgd', self.learning_rate, self.momentum)

  @property
  def process(self) -> gp_classifier.GaussianProcess:
    """The Gaussian process of every node."""
    return gp_classifier.GaussianProcess(
        output_scale=self.output_scale,
        length_scale=self.length_scale,
        gibbs_steps=self.gibbs_steps,
        likelihood=self.likelihood,
    )


# The numbers are those of the authors' code.
PAPER = PFedGPConfig()
RELEASE = dataclasses.replace(PAPER, likelihood='geometric')
DEMO = PAPER  # Learns the embedded digits as it is.


def held_out_loss(
    model: model_lib.Model,
    config: PFedGPConfig,
    body: model_lib.Params,
    tree: gp_tree.Tree,
    examples: episodes.Examples,
    seed: tf.Tensor,
) -> tf.Tensor:
  """The predictive loss of a part of the examples, given the rest.

  Args:
    model: The network.
    config: The configuration.
    body: Its parameters.
    tree: Of the client's classes.
    examples: The client's, none of them padding.
    seed: int32 [2]; of which examples are held out, and of the draws.

  Returns:
    A float32 scalar; 0 for a client of one class.
  """
  split_seed, draw_seed = tf.unstack(
      tf.random.experimental.stateless_split(seed)
  )
  held_out, given = episodes.split_support_query(
      examples, config.held_out, split_seed, tree.present.shape[0]
  )
  x, _, mask = episodes.join(given, held_out)
  embeddings = model.embed(body, x, tf.ones_like(mask))
  num_given = tf.size(given.y)
  posterior = gp_tree.fit(
      config.process,
      tree,
      embeddings[:num_given],
      given.y,
      config.train_draws,
      draw_seed,
  )
  return gp_tree.predictive_loss(
      config.process, posterior, embeddings[num_given:], held_out.y
  )


def _build_tree(model, body, examples, num_classes):
  def embed(x, mask):
    return model.embed(body, x, mask)

  return gp_tree.build_tree(
      prototype_classifier.fit(embed, examples, num_classes)
  )


def pfedgp(
    model: model_lib.Model, config: PFedGPConfig, num_classes: int
) -> method.Method:
  """pFedGP; the federated averaging of kernel networks.

  In all steps of a round the tree is that of the server's network. All clients
  with examples count alike, those of one class, whose gradient is that of the
  weight decay, included.

  A client, known, new or with classes that training never saw, builds a tree of
  all its training examples and answers with the class of the greatest
  predictive probability. It has no model before it has seen examples, and
  predicts class 0 without any.
  """
  model = model.without_head()
  optimizer = optimizers.build_optimizer(
      'sgd', config.learning_rate, config.momentum
  )

  def client_update(weights, client):
    examples = client.examples
    tree = _build_tree(model, weights['body'], examples, num_classes)
    count = tf.cast(tf.size(examples.y), tf.float32)

    def step(i, w, state, loss_sum):
      seed = tf.random.experimental.stateless_fold_in(client.seed, i)
      with tf.GradientTape() as tape:
        tape.watch(w)
        loss = held_out_loss(model, config, w['body'], tree, examples, seed)
      gradient = tape.gradient(
          loss, w, unconnected_gradients=tf.UnconnectedGradients.ZERO
      )
      gradient = weights_lib.clip_by_global_norm(
          gradient, config.max_gradient_norm
      )
      gradient = weights_lib.add_decay(gradient, w, config.weight_decay)
      state, w = optimizer.next(state, w, gradient)
      return i + 1, w, state, loss_sum + loss * count

    _, trained, _, loss_sum = tf.while_loop(
        lambda i, *_: i < config.inner_steps,
        step,
        (
            tf.constant(0),
            weights,
            local_sgd.initial_optimizer_state(optimizer, weights),
            tf.constant(0.0),
        ),
    )
    # How many are held out does not depend on the seed.
    held_out, _ = episodes.split_support_query(
        examples, config.held_out, client.seed, num_classes
    )
    scored = prototypical.num_scored(held_out.y, held_out.mask, tree.present)
    return client_work.ClientOutput(
        weights_lib.subtract(weights, trained),
        local_sgd.client_weight(count, uniform=True),
        local_sgd.LocalReport(loss_sum, config.inner_steps * count),
        learned=scored > 0,
    )

  def what_is_missing(class_sizes):
    num_own = np.count_nonzero(class_sizes)
    largest = np.max(class_sizes, initial=0)
    if num_own > 1 and int(config.held_out * largest + 1e-9):
      return None
    return (
        'it takes two classes, one of them so large that a part `held_out`'
        f' ({config.held_out}) of it is an example or more; the client has'
        f' {num_own} classes, and {largest} examples of the largest'
    )

  def adapt(weights, memory, examples, seed):
    del memory  # Clients keep nothing.
    body = weights['body']
    examples = episodes.drop_padding(examples)
    tree = _build_tree(model, body, examples, num_classes)
    posterior = gp_tree.fit(
        config.process,
        tree,
        model.embed(body, examples.x, examples.mask),
        examples.y,
        config.test_draws,
        seed,
    )
    return body, posterior

  def scores(adapted, query):
    body, posterior = adapted
    embeddings = model.embed(body, query.x, query.mask)
    return gp_tree.class_log_probabilities(
        config.process, posterior, embeddings
    )

  def use():
    # The softmax of logarithms of probabilities is these probabilities.
    return personalizer.ClientPersonalizer(
        None, adapt, personalizer.ByScores(scores)
    )

  return method.Method(
      num_classes,
      model.initialize,
      client_update,
      what_is_missing=what_is_missing,
      known_client=use,
      new_client=use,
      new_class=use,
  )


def pfedgp_proto(
    model: model_lib.Model, config: PFedGPConfig, num_classes: int
) -> method.Method:
  """pFedGP, then class prototypes in the place of the Gaussian processes.

  So has a client, known, new or with classes that training never saw.

  Source: Lim et al. (MetaVers), WACV 2024, table 3, "pFedGP-Proto".
  """
  return method.with_prototypes(pfedgp(model, config, num_classes), model)
