"""Personalized FL: its preparation by hand, its limits, its deployment."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import plain_process
import pytest
import tensorflow as tf

from tff_meta import registry
from tff_meta.algorithms import frl
from tff_meta.baselines import personalized_fl

CLIENTS = oracle.CLIENTS
DISTANCE = dataclasses.replace(
    personalized_fl.PAPER,
    inner_epochs=2,
    batch_size=2,
    inner_learning_rate=0.5,
    meta_learning_rate=0.4,
)
LINEAR = dataclasses.replace(
    personalized_fl.RELEASE,
    classifier='linear',
    batch_size=3,
    inner_learning_rate=0.5,
    meta_learning_rate=0.4,
    weight_decay=0.1,
)


@functools.cache
def build(config, build_process):
  return build_process(
      'personalized_fl',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def run(
    config,
    num_rounds,
    clients=CLIENTS,
    build_process=plain_process.PlainProcess,
):
  process = build(config, build_process)
  state, metrics = process.initialize(), []
  weights = [oracle.to_vector(process.get_model_weights(state).trainable)]
  for _ in range(num_rounds):
    output = process.next(state, [c.data() for c in clients])
    state = output.state
    weights.append(oracle.to_vector(process.get_model_weights(state).trainable))
    metrics.append(output.metrics['client_work']['train'])
  return weights, metrics


def own_prototypes_loss(w, pairs):
  return oracle.distance_loss(w, pairs, oracle.class_means(w, pairs))


def naive_round(config, phi, round_num):
  """Per-FedAvg: theta by epochs on support, phi by the query gradient there."""
  is_linear = config.classifier == 'linear'
  loss = oracle.cross_entropy if is_linear else own_prototypes_loss
  moved, weights, total = [], [], np.zeros(2)
  for client in CLIENTS:
    round_seed = oracle.fold_in((0, oracle.RUN_SEED), round_num)
    seed = oracle.fold_in(round_seed, client.salt)
    support, query = oracle.split(
        client, config.support_fraction, oracle.fold_in(seed, 0)
    )
    theta, _, _ = oracle.descend(
        loss,
        phi,
        oracle.batches_of(
            support,
            config.batch_size,
            oracle.fold_in(seed, 1),
            config.inner_epochs,
        ),
        oracle.plain_sgd(config.inner_learning_rate),
        config.weight_decay,
    )
    g = oracle.gradient(loss, theta, query) + config.weight_decay * phi
    moved.append(phi - config.meta_learning_rate * g)
    weights.append(1 if config.uniform else len(client.y))
    learns = is_linear or len({label for _, label in query}) > 1
    total += oracle.counted(len(query) * loss(theta, query), len(query), learns)
  return oracle.mean(moved, weights), total


@pytest.mark.parametrize(
    'config, build_process',
    [(DISTANCE, registry.build), (LINEAR, plain_process.PlainProcess)],
    ids=['distance', 'linear'],
)
def test_two_rounds_by_hand(config, build_process):
  weights, metrics = run(config, 2, build_process=build_process)
  phi = weights[0]
  for round_num in range(2):
    before = phi
    phi, (loss_sum, count) = naive_round(config, phi, round_num)
    np.testing.assert_allclose(weights[round_num + 1], phi, **oracle.TOLERANCE)
    np.testing.assert_allclose(
        metrics[round_num]['loss'], loss_sum / count, **oracle.TOLERANCE
    )
    assert metrics[round_num]['num_examples'] == count
    assert np.abs(phi - before).max() > 0.01


@pytest.mark.parametrize(
    'limit', [{'inner_epochs': 0}, {'inner_learning_rate': 0.0}], ids=str
)
def test_without_an_inner_step_it_is_fed_sgd_on_the_query_loss(limit):
  """Theta is phi, so phi' = phi - b grad loss(phi)."""
  config = dataclasses.replace(DISTANCE, **limit)
  weights, _ = run(config, 1, CLIENTS[1:2])
  round_seed = oracle.fold_in((0, oracle.RUN_SEED), 0)
  seed = oracle.fold_in(round_seed, CLIENTS[1].salt)
  _, query = oracle.split(CLIENTS[1], 0.5, oracle.fold_in(seed, 0))
  g = oracle.gradient(own_prototypes_loss, weights[0], query)
  np.testing.assert_allclose(
      weights[1], weights[0] - 0.4 * g, **oracle.TOLERANCE
  )


def test_one_client_of_few_round_learning_without_gpal():
  """A group of one in FRL with R = 1 is a participant prepared alone."""
  config = dataclasses.replace(DISTANCE, batch_size=0)
  weights, _ = run(config, 1, CLIENTS[1:2])
  process = registry.build(
      'frl',
      oracle.build_model(),
      dataclasses.replace(
          frl.PAPER,
          gpal=False,
          rounds=1,
          epochs=2,
          batch_size=0,
          inner_learning_rate=0.5,
          meta_learning_rate=0.4,
      ),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  state = process.initialize()
  for _ in range(2):
    state = process.next(state, [CLIENTS[1].data()]).state
  expected = oracle.to_vector(process.get_model_weights(state).trainable)
  np.testing.assert_allclose(weights[1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('source', ['downloaded', 'updated'])
def test_a_group_runs_rounds_of_one_epoch_against_its_own_prototypes(source):
  """By hand: two rounds of a full batch; prototypes of the last round."""
  config = dataclasses.replace(
      DISTANCE,
      rounds=2,
      prototype_source=source,
      deployment_batch_size=0,
      deployment_learning_rate=0.3,
      weight_decay=0.1,
  )
  model = oracle.build_model()
  weights = model.initialize(tf.constant([1, 2]))
  deployed = personalized_fl.personalized_fl(model, config, 4).group()
  client = CLIENTS[1]
  support = tf.nest.map_structure(
      lambda part: part[tf.newaxis], client.examples()
  )
  adapted = deployed.adapt(
      weights, support, tf.constant([client.salt]), tf.constant([3, 4])
  )
  w = oracle.to_vector(weights)
  for _ in range(2):
    downloaded = w
    g = oracle.gradient(own_prototypes_loss, w, client.pairs())
    w = w - 0.3 * (g + 0.1 * w)
  source_weights = w if source == 'updated' else downloaded
  prototypes = oracle.class_means(source_weights, client.pairs())
  np.testing.assert_allclose(
      oracle.to_vector(adapted[0]), w, **oracle.TOLERANCE
  )
  oracle.assert_prototypes(adapted[1], prototypes)
  query = oracle.make_client((6, 7, 8), salt=9)
  expected = [
      min(
          prototypes,
          key=lambda c, x=x: np.sum((oracle.embed(w, x) - prototypes[c]) ** 2),
      )
      for x in query.x
  ]
  predicted = deployed.predict(adapted, query.examples()).numpy()
  assert predicted.tolist() == expected


def test_presets_train_like_frl_s():
  for name in ('PAPER', 'RELEASE'):
    own, other = getattr(personalized_fl, name), getattr(frl, name)
    for field in dataclasses.fields(own):
      if field.name != 'inner_epochs':
        assert getattr(own, field.name) == getattr(other, field.name)
    assert own.inner_epochs == other.rounds * other.epochs
