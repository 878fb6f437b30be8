"""pFedHN: one network makes the clients' models from vectors that they keep."""

import collections
import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import registry
from tff_meta.baselines import pfedhn
from tff_meta.learners import classifiers
from tff_meta.learners import cyclic_batches
from tff_meta.models import hypernetwork as hypernetwork_lib

CLIENTS = oracle.CLIENTS
# A client alone, as in the paper; several; one that comes back.
COHORTS = (CLIENTS[:1], CLIENTS, CLIENTS[1:])
CONFIG = pfedhn.PFedHNConfig(
    num_clients=5,
    hidden_layers=1,
    hidden_units=3,
    server_learning_rate=0.3,
    server_momentum=0.5,
    server_weight_decay=0.1,
    learning_rate=0.2,
    momentum=0.5,
    weight_decay=0.05,
    local_steps=4,
    batch_size=4,
    fine_tuning_steps=3,
    fine_tuning_learning_rate=0.5,
)
CLIPPED = dataclasses.replace(CONFIG, max_gradient_norm=0.3)
# Gradients are what they are: no decay, no momentum.
PLAIN = dataclasses.replace(
    CONFIG,
    server_momentum=0.0,
    server_weight_decay=0.0,
    momentum=0.0,
    weight_decay=0.0,
)


@functools.cache
def build(
    config,
    seed=oracle.RUN_SEED,
    build_process=plain_process.PlainProcess,
):
  return build_process(
      'pfedhn',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=seed,
  )


def method():
  return pfedhn.pfedhn(oracle.build_model(), CONFIG, oracle.NUM_CLASSES)


def hypernetwork(config=CONFIG):
  return hypernetwork_lib.Hypernetwork(
      oracle.build_model().with_head(oracle.NUM_CLASSES),
      config.embedding_size,
      config.hidden_layers,
      config.hidden_units,
  )


def first_embedding(client, seed=oracle.RUN_SEED):
  own_seed = oracle.fold_in((0, seed), client.salt)
  return tf.random.stateless_normal([2], own_seed).numpy()


def to_flat(structure):
  leaves = [np.ravel(leaf) for leaf in tf.nest.flatten(structure)]
  return np.concatenate(leaves).astype(np.float64)


def from_flat(vector, like):
  leaves, begin = [], 0
  for leaf in tf.nest.flatten(like):
    leaves.append(vector[begin : begin + np.size(leaf)].reshape(leaf.shape))
    begin += np.size(leaf)
  return tf.nest.pack_sequence_as(like, leaves)


def naive_model(phi, v):
  """The weights h(v; phi), as `oracle.to_vector`; one hidden layer.

  Args:
    phi: A structure of arrays.
    v: The embedding.
  """
  body, head = phi['body'], phi['head']
  hidden = np.maximum(v @ body['dense0_kernel'] + body['dense0_bias'], 0)
  features = hidden @ body['dense1_kernel'] + body['dense1_bias']
  return np.concatenate(
      [
          features @ head['kernels'][part][name] + head['biases'][part][name]
          for part in ('body', 'head')
          for name in ('kernel', 'bias')
      ]
  )


def naive_clip(gradient, norm):
  length = np.linalg.norm(gradient)
  return gradient * norm / length if length > norm else gradient


def naive_training(config, theta, pairs, seed):
  """Local SGD; also the summed loss, and the norms of the gradients."""
  batches = oracle.batches_of(
      pairs, config.batch_size, seed, config.local_steps
  )
  velocity, loss_sum, norms = np.zeros_like(theta), 0.0, []
  for batch in batches[: config.local_steps]:
    loss_sum += len(batch) * oracle.cross_entropy(theta, batch)
    gradient = oracle.gradient(oracle.cross_entropy, theta, batch)
    norms.append(np.linalg.norm(gradient))
    gradient = naive_clip(gradient, config.max_gradient_norm)
    gradient = gradient + config.weight_decay * theta
    velocity = config.momentum * velocity + gradient
    theta = theta - config.learning_rate * velocity
  return theta, loss_sum, norms


def naive_gradient(phi, like, v, dtheta):
  """`J^T dtheta`, of phi and v in one."""
  return oracle.gradient(
      lambda z, _: dtheta
      @ naive_model(from_flat(z[: len(phi)], like), z[len(phi) :]),
      np.concatenate([phi, v]),
      None,
  )


@pytest.mark.parametrize(
    'config, build_process',
    [(CONFIG, registry.build), (CLIPPED, plain_process.PlainProcess)],
    ids=['free', 'clipped'],
)
def test_three_rounds_by_a_naive_implementation(config, build_process):
  process = build(config, build_process=build_process)
  result = personal.run(process, COHORTS)

  like = tf.nest.map_structure(np.asarray, result.weights[0])
  phi = to_flat(like)
  velocity = np.zeros_like(phi)
  decay = config.server_weight_decay
  kept, local_norms, norms = {}, [], []
  for round_num, cohort in enumerate(COHORTS):
    uploads, loss_sum = [], 0.0
    for client in cohort:
      v, u = kept.get(client.salt, (first_embedding(client), np.zeros(2)))
      theta = naive_model(from_flat(phi, like), v)
      trained, client_loss, client_norms = naive_training(
          config,
          theta,
          client.pairs(),
          personal.client_seed(round_num, client),
      )
      gradient = naive_gradient(phi, like, v, theta - trained)
      loss_sum, local_norms = loss_sum + client_loss, local_norms + client_norms
      norms.append(np.linalg.norm(gradient))
      gradient = naive_clip(gradient, config.max_gradient_norm)
      uploads.append(gradient[:-2] + decay * phi)
      u = config.server_momentum * u + gradient[-2:] + decay * v
      kept[client.salt] = v - config.server_learning_rate * u, u
    velocity = config.server_momentum * velocity + np.mean(uploads, axis=0)
    phi = phi - config.server_learning_rate * velocity
    np.testing.assert_allclose(
        to_flat(result.weights[round_num + 1]), phi, **oracle.TOLERANCE
    )
    memories = result.heads[round_num]
    assert memories.keys() == kept.keys()
    for salt, memory in memories.items():
      for name, expected in zip(
          ('embedding', 'velocity'), kept[salt], strict=True
      ):
        np.testing.assert_allclose(memory[name], expected, **oracle.TOLERANCE)
    metrics = result.metrics[round_num]
    np.testing.assert_allclose(
        metrics['loss'], loss_sum / metrics['num_examples'], rtol=1e-4
    )
  for found in (local_norms, norms):
    assert (max(found) > config.max_gradient_norm) == (config is CLIPPED)


def test_one_round_by_hand():
  """One step of rate 1/2 on the one example, x = 1 of class 0.

  The hypernetwork has one feature, 2 v + 1 = 2. It makes b = f / 2 - 1 = 0, and
  the kernel (1, -1) and the bias (0, 0) are its biases. As in FedPer's test the
  step goes to b = 1/2 and bias (1/4, -1/4), so dtheta is -1/2 in b, (-1/4, 1/4)
  in the bias and 0 in the kernel.

  That is the gradient of the biases that make them, and twice that, for f = 2,
  of the kernels. In f it is -1/2 times 1/2, in the 2 of `2 v + 1` that times v,
  and in v twice that. All is subtracted, at a rate of 1.
  """
  config = dataclasses.replace(
      PLAIN,
      num_clients=3,
      hidden_layers=0,
      hidden_units=1,
      server_learning_rate=1.0,
      learning_rate=0.5,
      local_steps=1,
  )
  process = plain_process.PlainProcess(
      'pfedhn',
      personal.scalar_model(),
      config,
      num_classes=2,
      seed=oracle.RUN_SEED,
  )

  def structure(kernel, bias, of_b, of_kernel, of_bias):
    """Phi: of the feature, and kernels and biases that make the tensors."""
    f32 = np.float32
    body = collections.OrderedDict(
        dense0_kernel=f32([[kernel]]), dense0_bias=f32([bias])
    )

    def of_target(i):
      return collections.OrderedDict(
          body=collections.OrderedDict(b=f32(of_b[i])),
          head=collections.OrderedDict(
              kernel=f32(of_kernel[i]), bias=f32(of_bias[i])
          ),
      )

    head = collections.OrderedDict(kernels=of_target(0), biases=of_target(1))
    return collections.OrderedDict(body=body, head=head)

  phi = structure(
      2, 1, ([[0.5]], [-1]), ([[0, 0]], [1, -1]), ([[0, 0]], [0, 0])
  )
  state = process.initialize()._replace(weights=phi)
  kept = collections.OrderedDict(
      embedding=np.float32([0.5]), velocity=np.float32([0])
  )

  output, (memory,) = personal.next_with_memory(
      process, state, personal.SCALAR_CLIENTS[:1], {1: kept}
  )

  expected = structure(
      2 + 1 / 8,
      1 + 1 / 4,
      ([[0.5 + 1]], [-1 + 1 / 2]),
      ([[0, 0]], [1, -1]),
      ([[1 / 2, -1 / 2]], [1 / 4, -1 / 4]),
  )
  weights = process.get_model_weights(output.state).trainable
  np.testing.assert_allclose(to_flat(weights), to_flat(expected), rtol=1e-6)
  np.testing.assert_allclose(memory.value['embedding'], [1.0], rtol=1e-6)
  np.testing.assert_allclose(memory.value['velocity'], [-0.5], rtol=1e-6)


def test_with_one_local_step_it_is_gradient_descent_through_the_hypernetwork():
  """Of theta is then taken its gradient times eta: the chain rule."""
  config = dataclasses.replace(PLAIN, local_steps=1, batch_size=16)
  client = CLIENTS[0]
  result = personal.run(build(config), [[client]])

  phi = tf.nest.map_structure(tf.constant, result.weights[0])
  v = tf.constant(first_embedding(client))
  classifier = classifiers.LinearClassifier(
      oracle.build_model(), oracle.NUM_CLASSES
  )
  with tf.GradientTape() as tape:
    tape.watch((phi, v))
    theta = hypernetwork().generate(phi, v)
    loss = classifier.loss(theta, client.examples())
  of_phi, of_v = tape.gradient(loss, (phi, v))
  rate = config.server_learning_rate * config.learning_rate
  assert np.abs(to_flat(of_phi)).max() > 0.1
  np.testing.assert_allclose(
      to_flat(result.weights[1]),
      to_flat(phi) - rate * to_flat(of_phi),
      **oracle.TOLERANCE,
  )
  np.testing.assert_allclose(
      result.heads[0][client.salt]['embedding'],
      v - rate * of_v,
      **oracle.TOLERANCE,
  )


def test_a_first_embedding_is_the_clients_own():
  """It depends on the client and the seed, not on the round or on others."""
  config = dataclasses.replace(CONFIG, server_learning_rate=0.0)
  for seed in (oracle.RUN_SEED, 12):
    process = build(config, seed)
    for cohorts in ((CLIENTS,), (CLIENTS[:1], CLIENTS[1:])):
      result = personal.run(process, cohorts)
      assert len(result.heads[-1]) == 3
      for client in CLIENTS:
        np.testing.assert_array_equal(
            result.heads[-1][client.salt]['embedding'],
            first_embedding(client, seed),
        )


def drawn_phi(seed=(1, 2)):
  return hypernetwork().initialize(tf.constant(seed))


@pytest.mark.parametrize('sampled', [True, False])
def test_a_known_client_has_the_model_of_its_embedding(sampled):
  phi = drawn_phi()
  v = np.float32([0.7, -1.3])
  kept = collections.OrderedDict(
      embedding=tf.constant(v), velocity=tf.constant([9.0, 9.0])
  )
  if not sampled:
    kept, v = build(CONFIG).initial_memory, np.zeros(2)
  memory = personal.memory(kept, present=sampled)
  use = method().known_client()
  query = oracle.make_client((6, 7, 8), salt=9)
  arrays = tf.nest.map_structure(lambda w: w.numpy().astype(np.float64), phi)
  theta = naive_model(arrays, v)
  for adapted in (
      use.start(phi, memory),
      use.adapt(phi, memory, CLIENTS[0].examples(), tf.constant([5, 6])),
  ):
    np.testing.assert_allclose(
        oracle.to_vector(adapted), theta, **oracle.TOLERANCE
    )
    predicted = use.predict(adapted, query.examples()).numpy().tolist()
    assert predicted == personal.predict(theta, query.pairs())


def test_a_new_client_fits_an_embedding_alone():
  """Three steps from zeros, under the hypernetwork as it is."""
  use = method().new_client()
  phi, seed = drawn_phi(), tf.constant([5, 6])
  arrays = tf.nest.map_structure(lambda w: w.numpy().astype(np.float64), phi)
  client, query = CLIENTS[1], oracle.make_client((6, 7, 8), salt=9)
  pairs = client.pairs()
  rows = cyclic_batches.cyclic_minibatches(
      len(pairs), CONFIG.batch_size, 3, seed
  ).indices.numpy()

  curve = use.curve(phi, (), client.examples(), query.examples(), seed)

  assert curve.shape == (4, 21)
  v = np.zeros(2)
  for step, labels in enumerate(curve.numpy().tolist()):
    if step:
      v = v - CONFIG.fine_tuning_learning_rate * oracle.gradient(
          lambda v, batch: oracle.cross_entropy(naive_model(arrays, v), batch),
          v,
          [pairs[i] for i in rows[step - 1]],
      )
    assert labels == personal.predict(naive_model(arrays, v), query.pairs())
  assert np.abs(v).max() > 0.1
  np.testing.assert_allclose(
      oracle.to_vector(use.start(phi, ())),
      naive_model(arrays, np.zeros(2)),
      **oracle.TOLERANCE,
  )
  adapted = use.adapt(phi, (), client.examples(), seed)
  np.testing.assert_allclose(
      oracle.to_vector(adapted), naive_model(arrays, v), **oracle.TOLERANCE
  )
  predicted = use.predict(adapted, query.examples()).numpy().tolist()
  assert predicted == curve.numpy().tolist()[-1]


@pytest.mark.parametrize(
    'num_clients, size', [(1, 1), (3, 1), (4, 2), (50, 13), (100, 26)]
)
def test_size_of_an_embedding(num_clients, size):
  config = dataclasses.replace(pfedhn.PAPER, num_clients=num_clients)
  assert config.embedding_size == size
  assert hypernetwork(config).input_size == size


@pytest.mark.parametrize(
    'change, message',
    [
        ({'num_clients': 0}, '`num_clients` of at least 1, found 0'),
        ({'hidden_units': 0}, '`hidden_units` of at least 1, found 0'),
        ({'batch_size': 0}, '`batch_size` of at least 1, found 0'),
        ({'momentum': 1.0}, '`momentum` below 1, found 1.0'),
        ({'server_momentum': 1.0}, '`server_momentum` below 1, found 1.0'),
        ({'max_gradient_norm': 0.0}, '`max_gradient_norm` above 0, found 0.0'),
        ({'learning_rate': -1.0}, '`learning_rate`.*found -1.0'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)
