"""What a client of a new group sees before and after it trains, and with GPAL.

Source: FRL (Park et al., NeurIPS 2021), Fig. 3.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_meta import episodes
from tff_meta.analyses import pictures
from tff_meta.analyses import projections
from tff_meta.data import groups as groups_lib
from tff_meta.learners import few_round
from tff_meta.models import model as model_lib
from tff_meta.training import experiment as experiment_lib

BEFORE = 'before local training'
WITHOUT_GPAL = 'after it, without GPAL'
WITH_GPAL = 'after it, with GPAL'


class ClientViews(NamedTuple):
  """A group's query examples as one client's model embeds them.

  Attributes:
    embeddings: `BEFORE`, `WITHOUT_GPAL`, `WITH_GPAL` -> float32 [q, D].
    labels: int32 [q], the group's labels.
    own: Bool [q], whether the example is the client's own.
    prototypes: float32 [k, D], the global prototypes that the client downloads
      for the round, of the classes that have one.
    prototype_labels: int32 [k].
  """

  embeddings: Mapping[str, np.ndarray]
  labels: np.ndarray
  own: np.ndarray
  prototypes: np.ndarray
  prototype_labels: np.ndarray


def build_rounds(
    experiment: experiment_lib.Experiment,
) -> few_round.GpalRounds:
  """Returns how the clients of a run's new groups train, with GPAL and without.

  Args:
    experiment: What the run's configuration stands for.

  Raises:
    ValueError: If the algorithm or its configuration has no two rounds with
      GPAL.
  """
  gpal_rounds = experiment.group_method.gpal_rounds
  if gpal_rounds is None:
    raise ValueError(
        'Expected a run of an algorithm whose loss has global prototypes'
        f' (GPAL), found {experiment.config.algorithm!r}.'
    )
  return gpal_rounds()


def view_client(
    model: model_lib.Model,
    rounds: few_round.GpalRounds,
    weights: Any,
    group: groups_lib.Group,
    client: int,
    seed: tf.Tensor,
) -> ClientViews:
  """Runs a group up to its last round, which one client does twice.

  The R - 1 rounds before are those of the run's configuration, with the
  randomness of the evaluation of new groups. Query examples, which nobody
  trains on, are shown, all embedded as one batch. (Prototypes are embedded
  client by client; with batch normalisation they may lie beside their classes.)

  Args:
    model: The network.
    rounds: From `build_rounds`, or its like for the group's classes.
    weights: phi, the trained weights.
    group: The group.
    client: Number of the client, from 0.
    seed: int32 [2], as the evaluation has it: of the run, of the group.

  Returns:
    The views.

  Raises:
    ValueError: If the group has no such client.
  """
  num_clients = len(group.salts)
  if not 0 <= client < num_clients:
    raise ValueError(
        f'Expected `client` in 0..{num_clients - 1}, found {client}.'
    )
  last_round = rounds.num_rounds - 1

  @tf.function(autograph=False)
  def views(weights, group, seed):
    rounds_seed = tf.random.experimental.stateless_split(seed)[1]
    support = episodes.Examples(
        group.support_x, group.support_y, group.support_mask
    )
    theta, prototypes = few_round.adapt_group(
        rounds.classifier,
        rounds.settings,
        last_round,
        weights,
        support,
        group.salts,
        rounds_seed,
    )
    own = episodes.drop_padding(
        tf.nest.map_structure(lambda t: t[client], support)
    )

    def train(classifier):
      return few_round.client_round(
          classifier,
          rounds.settings,
          theta,
          prototypes,
          own,
          few_round.client_seed(rounds_seed, last_round, group.salts[client]),
      ).weights

    embedded = [
        model.embed(w['body'], group.query_x, group.query_mask)
        for w in (theta, train(rounds.without_gpal), train(rounds.with_gpal))
    ]
    return embedded, prototypes

  tensors = tf.nest.map_structure(
      tf.convert_to_tensor, group._replace(classes=())
  )
  weights = tf.nest.map_structure(tf.convert_to_tensor, weights)
  embedded, prototypes = views(weights, tensors, seed)
  asked = group.query_mask > 0
  labels = np.flatnonzero(prototypes.present.numpy())
  names = (BEFORE, WITHOUT_GPAL, WITH_GPAL)
  return ClientViews(
      {n: e.numpy()[asked] for n, e in zip(names, embedded, strict=True)},
      group.query_y[asked],
      group.query_clients[asked] == client,
      prototypes.means.numpy()[labels],
      labels,
  )


def build_panels(
    views: ClientViews, layout: projections.Layout
) -> tuple[list[pictures.Panel], dict[str, dict[str, float]]]:
  """Lays out the three views in one plane, so that they can be compared.

  Args:
    views: Of one client.
    layout: Of the plane.

  Returns:
    The panels: own examples as diamonds, those of others as circles, global
    prototypes as stars; and for each view the `silhouette` of all examples and
    that of other clients' alone, by class, before they are laid out.

  Raises:
    ValueError: If there are too few examples or classes.
  """
  labels, own = views.labels, views.own
  xy = layout.project(
      np.concatenate([*views.embeddings.values(), views.prototypes])
  )
  stars = pictures.Points(
      'global prototype',
      xy[len(labels) * len(views.embeddings) :],
      views.prototype_labels,
      marker='*',
      size=190,
      outlined=True,
  )
  panels, numbers = [], {}
  for place, (name, embeddings) in enumerate(views.embeddings.items()):
    at = xy[place * len(labels) :][: len(labels)]
    numbers[name] = {
        'silhouette': projections.silhouette(embeddings, labels),
        'silhouette_others': projections.silhouette(
            embeddings[~own], labels[~own]
        ),
    }
    layers = (
        pictures.Points("others' example", at[~own], labels[~own], size=14),
        pictures.Points(
            'own example', at[own], labels[own], 'D', size=24, outlined=True
        ),
        stars,
    )
    title = f'{name}\nsilhouette {numbers[name]["silhouette"]:.3f}'
    panels.append(pictures.Panel(title, layers))
  return panels, numbers
