"""IFCA: every client trains, and uses, the model that fits it best."""

import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import aggregation
from tff_meta import composition
from tff_meta import registry
from tff_meta.baselines import ifca

CLIENTS = oracle.CLIENTS
COHORTS = (CLIENTS, CLIENTS[1:], CLIENTS)
CONFIG = ifca.IfcaConfig(
    clusters=3,
    learning_rate=0.2,
    momentum=0.5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    fine_tuning_steps=3,
    fine_tuning_learning_rate=0.2,
    fine_tuning_decay=0.5,
    fine_tuning_decay_steps=2,
)
OPTIONS = dict(num_classes=oracle.NUM_CLASSES)


def to_vectors(weights):
  """The k models as float64 vectors."""
  leaves = tf.nest.flatten(weights)
  return [
      oracle.to_vector(tf.nest.pack_sequence_as(weights, list(model)))
      for model in zip(*leaves, strict=True)
  ]


def stack_of(*models):
  return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *models)


def random_model(seed):
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  return model.initialize(tf.constant([1, seed]))


def naive_pick(vectors, pairs):
  losses = [oracle.cross_entropy(w, pairs) for w in vectors]
  return int(np.argmin(losses))


@pytest.mark.parametrize(
    'uniform, build',
    [(False, registry.build), (True, plain_process.PlainProcess)],
)
def test_three_rounds_by_a_naive_implementation(uniform, build):
  config = dataclasses.replace(CONFIG, uniform=uniform)
  process = build(
      'ifca', oracle.build_model(), config, seed=oracle.RUN_SEED, **OPTIONS
  )

  result = personal.run(process, COHORTS)

  vectors = to_vectors(result.weights[0])
  assert len(vectors) == 3
  assert np.abs(vectors[0] - vectors[1]).max() > 0.1
  method = ifca.ifca(oracle.build_model(), config, **OPTIONS)
  other = to_vectors(method.initialize(composition.initial_seed(12)))
  assert np.all(np.abs(np.subtract(vectors, other)).max(axis=1) > 0.01)
  picks_of_rounds = set()
  for round_num, cohort in enumerate(COHORTS):
    picks, trained, loss_sum, count = [], [], 0.0, 0
    for client in cohort:
      picks.append(naive_pick(vectors, client.pairs()))
      w, client_loss, client_count = personal.train(
          vectors[picks[-1]],
          client.pairs(),
          config,
          personal.client_seed(round_num, client),
          config.epochs,
      )
      trained.append(w)
      loss_sum, count = loss_sum + client_loss, count + client_count
    sizes = [1 if uniform else len(client.y) for client in cohort]
    for i in set(picks):
      mine = [k for k, pick in enumerate(picks) if pick == i]
      vectors[i] = oracle.mean(
          [trained[k] for k in mine], [sizes[k] for k in mine]
      )
    picks_of_rounds.add(tuple(picks))
    for actual, expected in zip(
        to_vectors(result.weights[round_num + 1]), vectors, strict=True
    ):
      np.testing.assert_allclose(actual, expected, **oracle.TOLERANCE)
    np.testing.assert_allclose(
        result.metrics[round_num]['loss'], loss_sum / count, rtol=1e-4
    )
  # In some round clients share a model, and have different ones.
  assert any(1 < len(set(picks)) < len(picks) for picks in picks_of_rounds)


@pytest.mark.parametrize('client', CLIENTS, ids=lambda c: str(c.salt))
def test_a_client_uses_the_model_that_fits_best(client):
  models = [random_model(seed) for seed in (3, 4, 5)]
  vectors = [oracle.to_vector(m) for m in models]
  query = oracle.make_client((6, 7, 8), salt=9)
  method = ifca.ifca(oracle.build_model(), CONFIG, **OPTIONS)
  assert method.known_client is method.new_client
  use = method.known_client()
  assert use.start is None and use.curve is None

  adapted = use.adapt(
      stack_of(*models), (), client.examples(), tf.constant([5, 6])
  )

  pick = naive_pick(vectors, client.pairs())
  personal.assert_same(adapted, models[pick])
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == personal.predict(vectors[pick], query.pairs())


def test_clients_do_not_all_pick_the_same():
  """Or the test above would tell nothing."""
  vectors = [oracle.to_vector(random_model(seed)) for seed in (3, 4, 5)]
  picks = [naive_pick(vectors, client.pairs()) for client in CLIENTS]
  assert len(set(picks)) > 1


def test_a_client_fine_tunes_the_model_that_it_picks():
  """As FedAvg-FT does with one model; its curve begins with that as picked."""
  models = [random_model(seed) for seed in (3, 4, 5)]
  client, seed = CLIENTS[0], tf.constant([5, 6])
  query = oracle.make_client((6, 7, 8), salt=9)
  pick = naive_pick([oracle.to_vector(m) for m in models], client.pairs())
  others = [m for i, m in enumerate(models) if i != pick]

  def tuned(*chosen):
    config = dataclasses.replace(CONFIG, clusters=len(chosen))
    use = ifca.ifca_ft(oracle.build_model(), config, **OPTIONS).known_client()
    weights = stack_of(*chosen)
    return (
        use.adapt(weights, (), client.examples(), seed),
        use.curve(weights, (), client.examples(), query.examples(), seed),
    )

  adapted, curve = tuned(*others, models[pick])
  alone, curve_alone = tuned(models[pick])

  personal.assert_same(adapted, alone)
  np.testing.assert_array_equal(curve, curve_alone)
  assert curve.shape == (4, len(query.y))
  assert curve[0].numpy().tolist() == personal.predict(
      oracle.to_vector(models[pick]), query.pairs()
  )
  assert (
      np.abs(oracle.to_vector(adapted) - oracle.to_vector(models[pick])).max()
      > 0.01
  )


def test_fine_tuning_of_one_model_by_hand():
  config = dataclasses.replace(CONFIG, clusters=1)
  of_many = ifca.ifca_ft(oracle.build_model(), config, **OPTIONS).new_client()
  use = of_many._replace(
      adapt=lambda weights, *rest: of_many.adapt(stack_of(weights), *rest),
      curve=lambda weights, *rest: of_many.curve(stack_of(weights), *rest),
  )
  oracle.assert_fine_tunes(use, 4, [0.2, 0.2, 0.1])


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(clusters=0), 'clusters'),
        (dict(fine_tuning_decay_steps=0), 'fine_tuning_decay_steps'),
        (dict(momentum=1.0), 'momentum'),
        (dict(learning_rate=-0.1), 'learning_rate'),
    ],
)
def test_settings_out_of_range(change, message):
  with pytest.raises(ValueError, match=message):
    ifca.IfcaConfig(**change)


def test_fine_tuning_needs_a_batch_size():
  config = dataclasses.replace(CONFIG, batch_size=0)
  method = ifca.ifca_ft(oracle.build_model(), config, **OPTIONS)
  with pytest.raises(ValueError, match='batch_size'):
    method.known_client()


def test_a_chosen_aggregator_and_server_optimizer():
  """One of the models is picked, by TFF's mean of updates clipped to 0.01."""
  aggregator = tff.aggregators.clipping_factory(
      0.01, tff.aggregators.MeanFactory()
  )
  process = registry.build(
      'ifca',
      oracle.build_model(),
      CONFIG,
      seed=oracle.RUN_SEED,
      aggregation=aggregation.OfModels(aggregator),
      server_optimizer=tff.learning.optimizers.build_sgdm(0.5),
      **OPTIONS,
  )

  result = personal.run(process, (CLIENTS[:1],))

  before, after = (to_vectors(weights) for weights in result.weights)
  pick = naive_pick(before, CLIENTS[0].pairs())
  expected = [0.005 if i == pick else 0.0 for i in range(3)]
  moved = np.linalg.norm(np.subtract(after, before), axis=1)
  np.testing.assert_allclose(moved, expected, rtol=1e-3)
