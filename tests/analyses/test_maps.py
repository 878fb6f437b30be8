"""Maps of embeddings and of groups, and their pictures."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import datasets
from tff_meta import episodes
from tff_meta import models
from tff_meta.algorithms import frl
from tff_meta.analyses import embedding_map
from tff_meta.analyses import group_map
from tff_meta.analyses import pictures
from tff_meta.analyses import projections
from tff_meta.data import groups as groups_lib
from tff_meta.learners import few_round
from tff_meta.training import embeddings

pytestmark = pytest.mark.ci

PCA = projections.Layout('pca')
RNG = np.random.default_rng(0)
CONFIG = dataclasses.replace(
    frl.PAPER,
    rounds=2,
    deployment_learning_rate=0.01,
    aux_weight=0.5,
    local_weight=0.5,
)
SEED = tf.constant([0, 1], tf.int32)
CLIENT = 2


def test_an_embedding_map_has_every_example_and_the_class_means():
  labels = np.repeat([4, 1], 10).astype(np.int32)
  points = np.where(labels == 4, 100.0, 0.0)[:, np.newaxis] + (
      RNG.standard_normal((20, 3))
  )
  panel, numbers = embedding_map.build_panel(
      'metavers', embeddings.EmbeddedExamples(points, labels), PCA
  )
  assert numbers['silhouette'] > 0.9
  assert (numbers['num_examples'], numbers['num_classes']) == (20, 2)
  examples, means = panel.layers
  np.testing.assert_array_equal(examples.labels, labels)
  np.testing.assert_array_equal(means.labels, [1, 4])
  for xy, label in zip(means.xy, means.labels, strict=True):
    np.testing.assert_allclose(
        xy, examples.xy[labels == label].mean(0), atol=1e-9
    )


def test_a_random_subset_is_the_same_for_a_seed():
  everything = embeddings.EmbeddedExamples(
      np.arange(50.0)[:, np.newaxis], np.arange(50, dtype=np.int32)
  )
  some = everything.choose(20, seed=3)
  assert len(set(some.labels)) == 20
  np.testing.assert_array_equal(some.embeddings[:, 0], some.labels)
  np.testing.assert_array_equal(some.labels, everything.choose(20, 3).labels)
  assert set(some.labels) != set(everything.choose(20, 4).labels)
  assert everything.choose(50, 3) is everything


@pytest.fixture(scope='module')
def model():
  return models.build('mlp', (8, 8, 1), None)


@pytest.fixture(scope='module')
def weights(model):
  return model.initialize(tf.constant([0, 0]))


@pytest.fixture(scope='module')
def group():
  pools = groups_lib.ClassPools(datasets.load_corpus('synthetic', noise=5.0))
  return groups_lib.sample_group(
      pools,
      role='meta_test',
      way=3,
      num_clients=6,
      deployment='non_iid',
      seed=0,
      index=1,
  )


@pytest.fixture(scope='module')
def views(model, weights, group):
  rounds = frl.frl(model, CONFIG, 3).gpal_rounds()
  return group_map.view_client(model, rounds, weights, group, CLIENT, SEED)


def by_hand(model, config, weights, group):
  """The group's round before the last, and the client's last, step by step."""
  rounds_seed = tf.random.experimental.stateless_split(SEED)[1]
  rounds = frl.frl(model, config, 3).gpal_rounds()
  classifier, settings = rounds.classifier, rounds.settings
  support = episodes.Examples(
      *map(tf.constant, (group.support_x, group.support_y, group.support_mask))
  )
  theta, prototypes = few_round.adapt_group(
      classifier,
      settings,
      config.rounds - 1,
      weights,
      support,
      tf.constant(group.salts),
      rounds_seed,
  )
  own = episodes.drop_padding(
      tf.nest.map_structure(lambda t: t[CLIENT], support)
  )
  fold_in = tf.random.experimental.stateless_fold_in
  seed = fold_in(
      fold_in(rounds_seed, config.rounds - 1), int(group.salts[CLIENT])
  )
  upload = few_round.client_round(
      classifier, settings, theta, prototypes, own, seed
  )
  return theta, prototypes, upload.weights


def test_views_are_those_of_the_client_in_the_last_round(
    views, model, weights, group
):
  asked = group.query_mask > 0
  assert len(views.labels) == len(views.own) == asked.sum()
  assert 0 < views.own.sum() < len(views.own)
  held = group.support_y[CLIENT][group.support_mask[CLIENT] > 0]
  assert set(views.labels[views.own]) == set(held)

  theta, prototypes, trained = by_hand(model, CONFIG, weights, group)

  def embed(w):
    return model.embed(w['body'], group.query_x[asked], None).numpy()

  close = dict(rtol=1e-4, atol=1e-5)
  found = views.embeddings
  np.testing.assert_allclose(found[group_map.BEFORE], embed(theta), **close)
  np.testing.assert_allclose(
      found[group_map.WITH_GPAL], embed(trained), **close
  )
  np.testing.assert_array_equal(views.prototype_labels, [0, 1, 2])
  np.testing.assert_allclose(views.prototypes, prototypes.means, **close)
  apart = np.abs(found[group_map.WITH_GPAL] - found[group_map.WITHOUT_GPAL])
  assert apart.max() > 1e-3


def test_a_group_map_shows_the_own_and_the_others_examples(views, tmp_path):
  panels, numbers = group_map.build_panels(views, PCA)
  assert list(numbers) == [
      group_map.BEFORE,
      group_map.WITHOUT_GPAL,
      group_map.WITH_GPAL,
  ]
  for panel, (name, values) in zip(panels, numbers.items(), strict=True):
    others, own, stars = panel.layers
    assert (others.marker, own.marker, stars.marker) == ('o', 'D', '*')
    assert len(own.xy) == views.own.sum() and len(stars.xy) == 3
    np.testing.assert_array_equal(others.labels, views.labels[~views.own])
    np.testing.assert_array_equal(stars.xy, panels[0].layers[2].xy)
    assert values['silhouette'] == projections.silhouette(
        views.embeddings[name], views.labels
    )
  path = tmp_path / 'map.png'
  pictures.write_panels(path, panels, 'class')
  assert path.read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
    'config, client, problem',
    [
        (dataclasses.replace(CONFIG, rounds=1), 0, '`rounds` of at least 2'),
        (
            dataclasses.replace(CONFIG, aux_weight=0.0),
            0,
            'positive `aux_weight',
        ),
        (dataclasses.replace(CONFIG, classifier='linear'), 0, "'linear'"),
        (CONFIG, 6, '`client` in 0..5, found 6'),
    ],
)
def test_impossible_group_maps(model, weights, group, config, client, problem):
  with pytest.raises(ValueError, match=problem):
    rounds = frl.frl(model, config, 3).gpal_rounds()
    group_map.view_client(model, rounds, weights, group, client, SEED)


def test_pictures_of_many_panels_and_classes(tmp_path):
  """More panels than fit in a row, and more classes than a legend has."""
  labels = np.arange(30)
  layer = pictures.Points(
      'dot', RNG.standard_normal((30, 2)), labels, connected=True
  )
  path = tmp_path / 'panels.png'
  pictures.write_panels(path, [pictures.Panel('a', [layer])] * 5, 'class')
  assert path.read_bytes().startswith(b'\x89PNG')
  path = tmp_path / 'images.png'
  images = [RNG.uniform(-1, 2, (4, 4, channels)) for channels in (1, 3)]
  pictures.write_images(path, [images], [['grey', 'colour']])
  assert path.read_bytes().startswith(b'\x89PNG')
  with pytest.raises(ValueError):
    pictures.write_images(path, [images], [['too few']])
