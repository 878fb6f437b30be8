"""pFedGP: a federated kernel network, and Gaussian processes of clients."""

import dataclasses

import few_round_oracle as oracle
import gp_oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import composition
from tff_meta import episodes
from tff_meta import registry
from tff_meta.baselines import pfedgp
from tff_meta.learners import gp_classifier

# Of two classes, two others, one class, and three with an only example of one.
CLIENTS = (*oracle.CLIENTS, oracle.make_client((4, 3, 1), salt=4))
COHORTS = (CLIENTS[:2], CLIENTS)
CONFIG = pfedgp.PFedGPConfig(
    learning_rate=0.3,
    momentum=0.5,
    weight_decay=0.1,
    inner_steps=2,
    output_scale=3.0,
    length_scale=0.5,
    gibbs_steps=1,
    train_draws=2,
    test_draws=3,
)


def build_client(config=CONFIG, function=pfedgp.pfedgp):
  method = function(oracle.build_model(), config, oracle.NUM_CLASSES)
  assert method.known_client is method.new_client is method.new_class
  return method.known_client()


def initial_weights(seed):
  return oracle.build_model().initialize(seed)


def embedded(w, pairs):
  return [(oracle.embed(w, x), label) for x, label in pairs]


def drawn_omegas(config, nodes, pairs, num_draws, seed):
  """The library's random omegas of every node, given embedded pairs."""
  omegas = []
  for i, node in enumerate(nodes):
    _, given, kappa = gp_oracle.node_examples(node, pairs)
    omegas.append(
        gp_classifier.draw_omegas(
            config.process,
            tf.constant(given, tf.float32),
            tf.constant(kappa, tf.float32),
            num_draws,
            oracle.fold_in(seed, i),
        )
    )
  return omegas


def as_pairs(examples):
  client = oracle.Client(examples.x.numpy(), examples.y.numpy(), salt=0)
  return client.pairs()


def naive_step(config, w, nodes, client, seed):
  """The loss and its clipped gradient."""
  split_seed, draw_seed = tf.random.experimental.stateless_split(seed)
  held_out, given = map(
      as_pairs,
      episodes.split_support_query(
          client.examples(), config.held_out, split_seed, oracle.NUM_CLASSES
      ),
  )
  omegas = drawn_omegas(
      config, nodes, embedded(w, given), config.train_draws, draw_seed
  )

  def loss(w, pairs):
    del pairs  # Both parts are above.
    return gp_oracle.predictive_loss(
        config.process, nodes, omegas, embedded(w, given), embedded(w, held_out)
    )

  gradient = oracle.gradient(loss, w, None)
  norm = np.sqrt(np.sum(gradient**2))
  clipped = gradient * min(1.0, config.max_gradient_norm / max(norm, 1e-9))
  return loss(w, None), clipped, norm


def naive_training(config, w, client, seed):
  """The client's weights, its losses, and the largest norm of a gradient."""
  nodes = gp_oracle.tree(oracle.class_means(w, client.pairs()))
  velocity, losses, norms = 0.0, [], []
  for i in range(config.inner_steps):
    loss, gradient, norm = naive_step(
        config, w, nodes, client, oracle.fold_in(seed, i)
    )
    decayed = gradient + config.weight_decay * w
    velocity = config.momentum * velocity + decayed
    w = w - config.learning_rate * velocity
    losses.append(loss)
    norms.append(norm)
  return w, losses, max(norms)


@pytest.mark.parametrize(
    'change, build',
    [
        ({}, registry.build),
        (
            {'likelihood': 'geometric', 'max_gradient_norm': 0.02},
            plain_process.PlainProcess,
        ),
    ],
    ids=['paper', 'clipped'],
)
def test_two_rounds_by_a_naive_implementation(change, build):
  config = dataclasses.replace(CONFIG, **change)
  process = build(
      'pfedgp',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )

  result = personal.run(process, COHORTS)

  w = oracle.to_vector(
      initial_weights(composition.initial_seed(oracle.RUN_SEED))
  )
  for round_num, cohort in enumerate(COHORTS):
    trained, loss_sum, count, norms = [], 0.0, 0, []
    for client in cohort:
      mine, losses, norm = naive_training(
          config, w, client, personal.client_seed(round_num, client)
      )
      trained.append(mine)
      if len(set(client.y)) > 1:  # Of one class the loss is over nothing.
        loss_sum += sum(losses) * len(client.y)
        count += config.inner_steps * len(client.y)
      norms.append(norm)
    # All count alike, the one of one class by its decay alone.
    w = oracle.mean(trained, [1] * len(cohort))
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]), w, **oracle.TOLERANCE
    )
    metrics = result.metrics[round_num]
    np.testing.assert_allclose(metrics['loss'], loss_sum / count, rtol=1e-4)
    assert metrics['num_examples'] == count
    assert 0.02 < max(norms) < 50  # So that one setting clips, and one not.


def test_the_tree_stays_that_of_the_servers_network():
  """Two steps of a client that after the first would build another tree."""
  config = dataclasses.replace(CONFIG, learning_rate=2.0)
  client = oracle.make_client((4, 3, 2), salt=14)
  process = plain_process.PlainProcess(
      'pfedgp',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  before, after = map(
      oracle.to_vector, personal.run(process, [[client]]).weights
  )
  seed = personal.client_seed(0, client)
  once, _, _ = naive_training(
      dataclasses.replace(config, inner_steps=1), before, client, seed
  )
  trees = [
      gp_oracle.tree(oracle.class_means(w, client.pairs()))
      for w in (before, once)
  ]
  assert trees[0] != trees[1]
  twice, _, _ = naive_training(config, before, client, seed)
  np.testing.assert_allclose(after, twice, **oracle.TOLERANCE)


def test_a_client_of_one_class_has_the_decay_alone():
  process = plain_process.PlainProcess(
      'pfedgp',
      oracle.build_model(),
      dataclasses.replace(CONFIG, inner_steps=1),
      num_classes=oracle.NUM_CLASSES,
  )
  before, after = personal.run(process, [CLIENTS[2:3]]).weights
  np.testing.assert_allclose(
      oracle.to_vector(after), 0.97 * oracle.to_vector(before), rtol=1e-6
  )


@pytest.mark.parametrize('client', CLIENTS, ids=lambda c: str(c.salt))
@pytest.mark.parametrize('likelihood', ['mean', 'geometric'])
def test_a_client_by_a_naive_implementation(client, likelihood):
  config = dataclasses.replace(CONFIG, likelihood=likelihood)
  weights = initial_weights(tf.constant([1, 2]))
  w, query = oracle.to_vector(weights), oracle.make_client((6, 7, 8), salt=9)
  use, seed = build_client(config), tf.constant([5, 6])
  assert use.start is None

  adapted = use.adapt(weights, (), client.examples(), seed)

  given = embedded(w, client.pairs())
  nodes = gp_oracle.tree(oracle.class_means(w, client.pairs()))
  omegas = drawn_omegas(config, nodes, given, config.test_draws, seed)
  expected = []
  for x, _ in query.pairs():
    probabilities = gp_oracle.class_probabilities(
        config.process, nodes, omegas, given, oracle.embed(w, x)
    )
    expected.append(max(probabilities, key=probabilities.get))
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == expected
  labels = set(client.y.tolist())
  assert set(predicted) <= labels and len(set(predicted)) >= min(len(labels), 2)


def test_prototypes_in_the_place_of_gaussian_processes():
  weights = initial_weights(tf.constant([1, 2]))
  client, query = CLIENTS[3], oracle.make_client((6, 7, 8), salt=9)
  use = build_client(function=pfedgp.pfedgp_proto)
  adapted = use.adapt(weights, (), client.examples(), tf.constant([5, 6]))
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == personal.nearest_class(
      oracle.to_vector(weights), client.pairs(), query.pairs()
  )


def test_a_client_without_examples_predicts_class_0():
  use, weights = build_client(), initial_weights(tf.constant([1, 2]))
  query = oracle.make_client((1, 2, 1), salt=9)
  adapted = use.adapt(
      weights, (), personal.EMPTY_CLIENT.examples(), tf.constant([5, 6])
  )
  assert use.predict(adapted, query.examples()).numpy().tolist() == [0] * 4


def test_padding_is_no_example():
  client = CLIENTS[0]
  padded = oracle.Client(
      np.insert(client.x, 1, 7.0, axis=0), np.insert(client.y, 1, 3), salt=1
  ).examples()
  mask = tf.constant(np.insert(np.ones(len(client.y), np.float32), 1, 0.0))
  use, weights = build_client(), initial_weights(tf.constant([1, 2]))
  seed = tf.constant([5, 6])
  tf.nest.map_structure(
      np.testing.assert_array_equal,
      use.adapt(weights, (), padded._replace(mask=mask), seed),
      use.adapt(weights, (), client.examples(), seed),
  )


@pytest.mark.parametrize(
    'change, message',
    [
        ({'held_out': 1.0}, '`held_out` between 0 and 1.*found 1.0'),
        ({'train_draws': 0}, '`train_draws` of at least 1, found 0'),
        ({'test_draws': 0}, '`test_draws` of at least 1, found 0'),
        ({'output_scale': 0.0}, '`output_scale` above 0, found 0.0'),
        ({'length_scale': 0.0}, '`length_scale` above 0, found 0.0'),
        ({'max_gradient_norm': 0.0}, '`max_gradient_norm` above 0, found 0.0'),
        ({'likelihood': 'marginal'}, '`likelihood` .*found .marginal'),
        ({'momentum': 1.0}, '`momentum` .*found 1.0'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
