"""FedProto: models of the clients' own, and prototypes from the server."""

import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import composition
from tff_meta import registry
from tff_meta.baselines import fed_proto
from tff_meta.baselines import local
from tff_meta.losses import prototypical

CLIENTS = oracle.CLIENTS
# In the second round class 0 has no holder, and one client has a class with a
# prototype and one without. The first client comes back in the third.
COHORTS = (CLIENTS[:1], CLIENTS[1:], CLIENTS)
CONFIG = fed_proto.FedProtoConfig(
    learning_rate=0.2,
    momentum=0.5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    prototype_weight=2.0,
)


def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'fed_proto',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def build_client(config=CONFIG):
  model, num_classes = oracle.build_model(), oracle.NUM_CLASSES
  return fed_proto.fed_proto(model, config, num_classes).known_client()


def server_prototypes(state):
  (_, prototypes), _ = state.client_work
  return prototypes


def initial_weights(seed):
  return oracle.build_model().with_head(oracle.NUM_CLASSES).initialize(seed)


def naive_loss(config, prototypes):
  def loss(w, pairs):
    squares = [
        np.mean((oracle.embed(w, x) - prototypes[label]) ** 2)
        for x, label in pairs
        if label in prototypes
    ]
    pull = config.prototype_weight * sum(squares) / len(pairs)
    return oracle.cross_entropy(w, pairs) + pull

  return loss


def naive_training(config, w, client, prototypes, seed):
  return oracle.descend(
      naive_loss(config, prototypes),
      w,
      oracle.batches_of(client.pairs(), config.batch_size, seed, config.epochs),
      personal.naive_optimizer('sgd', config.learning_rate, config.momentum),
      config.weight_decay,
  )


def naive_prototypes(uploads, old, uniform):
  """Class by class the mean of the holders, or of all their examples.

  Args:
    uploads: Of every client its class means and its numbers of examples.
    old: Those of the round before, label -> [3].
    uniform: Whether it is that of the holders.
  """
  new = dict(old)
  for label in range(oracle.NUM_CLASSES):
    held = [
        (1 if uniform else counts[label], means[label])
        for means, counts in uploads
        if label in means
    ]
    if held:
      total = sum(weight for weight, _ in held)
      new[label] = sum(weight * mean for weight, mean in held) / total
  return new


@pytest.mark.parametrize(
    'uniform, build_process',
    [(False, registry.build), (True, plain_process.PlainProcess)],
)
def test_three_rounds_by_a_naive_implementation(uniform, build_process):
  config = dataclasses.replace(CONFIG, uniform=uniform)
  process = build(config, build_process)

  result = personal.run(process, COHORTS)

  initial = oracle.to_vector(result.weights[0])
  own, prototypes = {}, {}
  for round_num, cohort in enumerate(COHORTS):
    uploads, loss_sum, count = [], 0.0, 0
    for client in cohort:
      w, client_loss, client_count = naive_training(
          config,
          own.get(client.salt, initial),
          client,
          prototypes,
          personal.client_seed(round_num, client),
      )
      own[client.salt] = w
      means = oracle.class_means(w, client.pairs())
      uploads.append((means, np.bincount(client.y)))
      loss_sum, count = loss_sum + client_loss, count + client_count
      kept = result.heads[round_num][client.salt]
      np.testing.assert_allclose(
          oracle.to_vector(kept['weights']), w, **oracle.TOLERANCE
      )
      oracle.assert_prototypes(
          kept['prototypes'], prototypes, **oracle.TOLERANCE
      )
    prototypes = naive_prototypes(uploads, prototypes, uniform)
    np.testing.assert_array_equal(
        oracle.to_vector(result.weights[round_num + 1]), initial
    )
    np.testing.assert_allclose(
        result.metrics[round_num]['loss'], loss_sum / count, rtol=1e-4
    )
  assert set(prototypes) == {0, 1, 2}
  oracle.assert_prototypes(
      server_prototypes(result.state), prototypes, **oracle.TOLERANCE
  )


def test_without_the_distance_it_is_local_training():
  process = build(dataclasses.replace(CONFIG, prototype_weight=0.0))
  alone = plain_process.PlainProcess(
      'local',
      oracle.build_model(),
      local.LocalConfig(
          learning_rate=0.2,
          momentum=0.5,
          epochs=2,
          batch_size=4,
          weight_decay=0.1,
      ),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )

  result, expected = (personal.run(p, COHORTS) for p in (process, alone))

  for salt, kept in result.heads[-1].items():
    np.testing.assert_allclose(
        oracle.to_vector(kept['weights']),
        oracle.to_vector(expected.heads[-1][salt]),
        rtol=1e-6,
        atol=1e-6,
    )


def memory_of(weights, received, present=True):
  """A memory with prototypes label -> [3]."""
  means = np.zeros([oracle.NUM_CLASSES, 3], np.float32)
  for label, mean in received.items():
    means[label] = mean
  held = np.float32([c in received for c in range(oracle.NUM_CLASSES)])
  value = {
      'weights': weights,
      'prototypes': prototypical.Prototypes(
          tf.constant(means), tf.constant(held)
      ),
  }
  return personal.memory(value, present)


def predict(use, weights, memory, client, query):
  adapted = use.adapt(weights, memory, client.examples(), tf.constant([5, 6]))
  return use.predict(adapted, query.examples()).numpy().tolist()


def naive_labels(w, means, query):
  return [
      min(means, key=lambda c: np.sum((oracle.embed(w, x) - means[c]) ** 2))
      for x, _ in query.pairs()
  ]


def test_a_client_has_the_nearest_received_prototype_of_its_classes():
  """Of class 2, which it does not have, and 1, of which it received none."""
  server, own = (initial_weights(tf.constant([1, s])) for s in (2, 3))
  w, client = oracle.to_vector(own), CLIENTS[0]  # Of classes 0 and 1.
  query = oracle.make_client((6, 7, 8), salt=9)
  means = oracle.class_means(w, client.pairs())
  received = {0: -means[0], 2: oracle.class_means(w, query.pairs())[2]}

  actual = predict(
      build_client(), server, memory_of(own, received), client, query
  )

  assert actual == naive_labels(w, {0: received[0], 1: means[1]}, query)
  # Which is another answer than of its own means, or of all classes.
  assert actual != naive_labels(w, means, query)
  assert actual != naive_labels(w, received | {1: means[1]}, query)


def test_a_client_that_was_never_sampled_has_its_own_means():
  server, own = (initial_weights(tf.constant([1, s])) for s in (2, 3))
  w, client = oracle.to_vector(server), CLIENTS[0]
  query = oracle.make_client((6, 7, 8), salt=9)

  actual = predict(
      build_client(), server, memory_of(own, {}, present=False), client, query
  )

  assert actual == naive_labels(w, oracle.class_means(w, client.pairs()), query)


def test_a_client_may_use_its_head():
  server, own = (initial_weights(tf.constant([1, s])) for s in (2, 3))
  query = oracle.make_client((6, 7, 8), salt=9)
  use = build_client(dataclasses.replace(CONFIG, classifier='head'))

  for present, weights in ((True, own), (False, server)):
    actual = predict(
        use, server, memory_of(own, {0: 0.0}, present), CLIENTS[0], query
    )
    assert actual == personal.predict(oracle.to_vector(weights), query.pairs())


def test_a_class_may_have_a_weight_of_its_own():
  """What a client uploads: sums over its examples of each class."""
  prototypes = prototypical.Prototypes(
      tf.constant([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]),
      tf.constant([1.0, 1.0, 0.0]),
  )
  sums = prototypical.weigh_prototypes(prototypes, tf.constant([2.0, 5.0, 0.0]))
  np.testing.assert_array_equal(sums.means, [[2, 4], [15, 20], [0, 0]])
  np.testing.assert_array_equal(sums.class_weight, [2, 5, 0])


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(prototype_weight=-1.0), 'prototype_weight'),
        (dict(classifier='linear'), 'classifier'),
        (dict(momentum=1.0), 'momentum'),
        (dict(epochs=-1), 'epochs'),
    ],
)
def test_settings_out_of_range(change, message):
  with pytest.raises(ValueError, match=message):
    fed_proto.FedProtoConfig(**change)


def test_the_server_s_initial_weights_are_of_the_run_s_seed():
  process = build(CONFIG)
  weights = process.get_model_weights(process.initialize()).trainable
  seed = composition.initial_seed(oracle.RUN_SEED)
  personal.assert_same(weights, initial_weights(seed))
  assert np.sum(process.initial_memory['prototypes'].present) == 0


def test_a_client_begins_with_weights_that_the_server_was_given():
  process = build(dataclasses.replace(CONFIG, learning_rate=0.0))
  given = initial_weights(tf.constant([1, 2]))
  state = process.initialize()._replace(weights=given)
  _, (kept,) = personal.next_with_memory(process, state, CLIENTS[:1], {})
  personal.assert_same(kept.value['weights'], given)
