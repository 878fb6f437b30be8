"""FedAvg in its process and what new groups and known clients do with it."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import plain_process
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import aggregation
from tff_meta import episodes
from tff_meta import method as method_lib
from tff_meta import models
from tff_meta import registry
from tff_meta import weights as weights_lib
from tff_meta.baselines import fed_avg

CLIENTS = oracle.CLIENTS
FULL_BATCH = dataclasses.replace(fed_avg.PAPER, learning_rate=0.5, batch_size=0)
MOMENTUM = dataclasses.replace(
    fed_avg.RELEASE,
    learning_rate=0.3,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    uniform=True,
)
ADAM = dataclasses.replace(
    fed_avg.PAPER,
    optimizer='adam',
    learning_rate=0.05,
    batch_size=4,
    weight_decay=0.1,
)


@functools.cache
def build(config, build_process=registry.build, **options):
  return build_process(
      'fed_avg',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
      **options,
  )


def run(process, num_rounds, clients=CLIENTS, state=None):
  """Returns the weights before, between and after the rounds, and metrics."""
  state = state or process.initialize()
  weights, metrics = [process.get_model_weights(state).trainable], []
  for _ in range(num_rounds):
    output = process.next(state, [c.data() for c in clients])
    state = output.state
    weights.append(process.get_model_weights(state).trainable)
    metrics.append(output.metrics['client_work']['train'])
  return weights, metrics


def naive_optimizer(config):
  def sgd(gradient, state):
    state['v'] = config.momentum * state.get('v', 0.0) + gradient
    return config.learning_rate * state['v']

  def adam(gradient, state):
    state['t'] = t = state.get('t', 0) + 1
    state['m'] = 0.9 * state.get('m', 0.0) + 0.1 * gradient
    state['v'] = 0.999 * state.get('v', 0.0) + 0.001 * gradient**2
    m, v = state['m'] / (1 - 0.9**t), state['v'] / (1 - 0.999**t)
    return config.learning_rate * m / (np.sqrt(v) + 1e-8)

  return sgd if config.optimizer == 'sgd' else adam


def naive_round(config, w, round_num):
  trained, weights, loss_sum, count = [], [], 0.0, 0
  for client in CLIENTS:
    round_seed = oracle.fold_in((0, oracle.RUN_SEED), round_num)
    seed = oracle.fold_in(round_seed, client.salt)
    own, client_loss, client_count = oracle.descend(
        oracle.cross_entropy,
        w,
        oracle.batches_of(
            client.pairs(), config.batch_size, seed, config.epochs
        ),
        naive_optimizer(config),
        config.weight_decay,
    )
    trained.append(own)
    weights.append(1 if config.uniform else len(client.y))
    loss_sum, count = loss_sum + client_loss, count + client_count
  return oracle.mean(trained, weights), loss_sum / count


@pytest.mark.parametrize(
    'config, build_process',
    [
        (FULL_BATCH, registry.build),
        (MOMENTUM, plain_process.PlainProcess),
        (ADAM, plain_process.PlainProcess),
    ],
    ids=['full batch', 'momentum', 'adam'],
)
def test_two_rounds_by_hand(config, build_process):
  """In the second round momentum and moments have started anew."""
  weights, metrics = run(build(config, build_process), 2)
  w = oracle.to_vector(weights[0])
  for round_num in range(2):
    before = w
    w, loss = naive_round(config, w, round_num)
    # Adam divides by the root of a gradient's square: float32 errors in small
    # gradients weigh more.
    np.testing.assert_allclose(
        oracle.to_vector(weights[round_num + 1]), w, rtol=1e-4, atol=2e-5
    )
    np.testing.assert_allclose(metrics[round_num]['loss'], loss, rtol=1e-4)
    assert np.abs(w - before).max() > 0.02
    assert metrics[round_num]['num_examples'] == 26 * config.epochs


def test_one_full_batch_is_tff_s_own_federated_averaging():
  weights, _ = run(build(FULL_BATCH), 2)

  def flat(weights):
    body, head = weights['body'], weights['head']
    return body['kernel'], body['bias'], head['kernel'], head['bias']

  @tf.function(autograph=False)
  def predict_on_batch(weights, x, training):
    del training
    kernel, bias, head_kernel, head_bias = weights[0]
    return tf.tanh(x @ kernel + bias) @ head_kernel + head_bias

  def loss(output, label, sample_weight=None):
    del sample_weight
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(label, output)
    )

  functional_model = tff.learning.models.FunctionalModel(
      initial_weights=(flat(weights[0]), ()),
      predict_on_batch_fn=predict_on_batch,
      loss_fn=loss,
      input_spec=(
          tf.TensorSpec([None, 2], tf.float32),
          tf.TensorSpec([None], tf.int32),
      ),
  )
  process = tff.learning.algorithms.build_weighted_fed_avg(
      functional_model, tff.learning.optimizers.build_sgdm(0.5)
  )
  state = process.initialize()
  for round_num in range(2):
    state = process.next(
        state,
        [tf.data.Dataset.from_tensors((c.x, c.y)) for c in CLIENTS],
    ).state
    expected = process.get_model_weights(state).trainable
    for found, leaf in zip(flat(weights[round_num + 1]), expected, strict=True):
      np.testing.assert_allclose(found, leaf, rtol=1e-5, atol=1e-6)


def test_no_epochs_leave_the_weights():
  config = dataclasses.replace(MOMENTUM, epochs=0)
  weights, metrics = run(build(config, plain_process.PlainProcess), 1)
  np.testing.assert_array_equal(
      oracle.to_vector(weights[1]), oracle.to_vector(weights[0])
  )
  assert np.isnan(metrics[0]['loss']) and metrics[0]['num_examples'] == 0


def test_server_optimizer_and_aggregator_are_those_given():
  """At a server rate of 1/2 and a clipping norm of 0.1 the step is 0.05."""
  process = build(
      FULL_BATCH,
      server_optimizer=tff.learning.optimizers.build_sgdm(0.5),
      aggregation=aggregation.OfModels(
          tff.aggregators.clipping_factory(0.1, tff.aggregators.MeanFactory())
      ),
  )
  weights, _ = run(process, 1, CLIENTS[:1])
  step = oracle.to_vector(weights[1]) - oracle.to_vector(weights[0])
  np.testing.assert_allclose(np.linalg.norm(step), 0.05, rtol=1e-5)


@pytest.mark.parametrize('network', ['cafeme_base', 'conv4', 'lenet', 'mlp'])
def test_one_pixel_without_a_number_is_noticed_by_every_network(network):
  """Also where kernels turn NaN into a number, as oneDNN's ReLU does."""
  shape = (16, 16, 1)
  method = fed_avg.fed_avg(
      models.build(network, shape, 2),
      dataclasses.replace(fed_avg.PAPER, batch_size=3),
      num_classes=2,
  )

  @tf.function(autograph=False)
  def update(x):
    examples = episodes.Examples(x, tf.range(6) % 2, tf.ones(6))
    seed = tf.constant([1, 2])
    client = method_lib.ClientInput(examples, seed, seed, (), ())
    return method.client_update(method.initialize(seed), client)

  x = np.random.default_rng(0).normal(size=(6, *shape)).astype(np.float32)
  _, is_finite = weights_lib.where_finite_or_zero(update(x))
  x[4, 7, 7] = np.nan
  _, is_noticed = weights_lib.where_finite_or_zero(update(x))
  assert is_finite and not is_noticed


def trained_weights(num_classes=oracle.NUM_CLASSES, seed=1):
  model = oracle.build_model().with_head(num_classes)
  return model.initialize(tf.constant([seed, 2]))


def group():
  """Two clients of a group with 9 and 6 examples of classes 0 to 2."""
  clients = (CLIENTS[0], CLIENTS[2])
  x, y, mask = np.zeros((2, 9, 2)), np.zeros((2, 9)), np.zeros((2, 9))
  for k, client in enumerate(clients):
    count = len(client.y)
    x[k, :count], y[k, :count], mask[k, :count] = client.x, client.y, 1
  support = episodes.Examples(
      tf.constant(x, tf.float32),
      tf.constant(y, tf.int32),
      tf.constant(mask, tf.float32),
  )
  return clients, support, tf.constant([c.salt for c in clients])


DEPLOYED = dataclasses.replace(
    fed_avg.PAPER,
    rounds=2,
    deployment_learning_rate=0.4,
    deployment_batch_size=0,
    learning_rate=9.0,
)
METHODS = {
    'fine tuning': fed_avg.fed_avg_ft,
    'from scratch': fed_avg.fed_avg,
}


@pytest.mark.parametrize('name', METHODS)
def test_a_group_runs_federated_averaging_from_a_new_head(name):
  """Without epochs adapt returns where the group starts; then two rounds."""
  clients, support, salts = group()
  weights, seed = trained_weights(), tf.constant([3, 4])
  start, adapted = (
      METHODS[name](oracle.build_model(), config, 3)
      .group()
      .adapt(weights, support, salts, seed)[0]
      for config in (dataclasses.replace(DEPLOYED, epochs=0), DEPLOYED)
  )
  same_body = np.array_equal(start['body']['kernel'], weights['body']['kernel'])
  assert same_body == (name == 'fine tuning')
  # Xavier: uniform in +-sqrt(6 / (3 + 3)) = +-1, and a bias of zero.
  head = start['head']['kernel'].numpy()
  assert head.shape == (3, 3) and 0.5 < np.abs(head).max() <= 1
  assert not start['head']['bias'].numpy().any()

  def loss(w, pairs):
    return oracle.cross_entropy(w, pairs, num_classes=3)

  w = oracle.to_vector(start)
  for _ in range(2):
    moved = [w - 0.4 * oracle.gradient(loss, w, c.pairs()) for c in clients]
    w = oracle.mean(moved, [9, 6])
  np.testing.assert_allclose(oracle.to_vector(adapted), w, **oracle.TOLERANCE)


def test_only_fine_tuning_uses_the_trained_weights():
  _, support, salts = group()
  config = dataclasses.replace(DEPLOYED, rounds=1)
  for name, function in METHODS.items():
    deployed = function(oracle.build_model(), config, num_classes=3).group()
    one, other, reseeded = (
        oracle.to_vector(
            deployed.adapt(
                trained_weights(seed=seed), support, salts, tf.constant(s)
            )[0]
        )
        for seed, s in ((1, [3, 4]), (2, [3, 4]), (1, [3, 5]))
    )
    assert np.array_equal(one, other) == (name == 'from scratch')
    assert not np.array_equal(one, reseeded)


def predict(w, x):
  kernel, bias = w[9:-4].reshape(3, 4), w[-4:]
  return int(
      np.argmax([oracle.embed(w, x) @ kernel[:, c] + bias[c] for c in range(4)])
  )


def test_known_clients_use_the_global_model_or_train_it_first():
  """Fine-tuning: its own rate, batch size and epochs, FedAvg's optimizer."""
  config = dataclasses.replace(
      MOMENTUM,
      deployment_learning_rate=0.3,
      deployment_batch_size=4,
      fine_tuning_epochs=3,
      learning_rate=9.0,
      epochs=1,
  )
  client, weights, seed = CLIENTS[1], trained_weights(), tf.constant([5, 6])
  query = oracle.make_client((6, 7, 8), salt=9)
  w = oracle.to_vector(weights)
  tuned, _, _ = oracle.descend(
      oracle.cross_entropy,
      w,
      oracle.batches_of(client.pairs(), 4, seed, 3),
      naive_optimizer(dataclasses.replace(config, learning_rate=0.3)),
      0.1,
  )
  for function, expected in ((fed_avg.fed_avg, w), (fed_avg.fed_avg_ft, tuned)):
    personalizer = function(oracle.build_model(), config, 4).known_client()
    np.testing.assert_array_equal(
        oracle.to_vector(personalizer.start(weights, ())), w
    )
    adapted = personalizer.adapt(weights, (), client.examples(), seed)
    np.testing.assert_allclose(
        oracle.to_vector(adapted), expected, rtol=1e-4, atol=1e-5
    )
    predicted = personalizer.predict(adapted, query.examples()).numpy()
    assert predicted.tolist() == [predict(expected, x) for x in query.x]
  assert np.abs(tuned - w).max() > 0.1


def test_fine_tuning_by_steps_has_a_curve():
  """Plain SGD at a falling rate, whatever FedAvg's optimizer is."""
  config = dataclasses.replace(
      MOMENTUM,
      deployment_learning_rate=0.5,
      deployment_batch_size=3,
      fine_tuning_steps=3,
      fine_tuning_decay=0.5,
      fine_tuning_decay_steps=2,
  )
  method = fed_avg.fed_avg_ft(oracle.build_model(), config, oracle.NUM_CLASSES)
  use = method.known_client()
  oracle.assert_fine_tunes(use, batch_size=3, rates=(0.5, 0.5, 0.25))


def test_a_client_without_a_class_is_never_told_that_class():
  """All are possible before it has examples, and for one who has none."""
  method = fed_avg.fed_avg_own(
      oracle.build_model(), fed_avg.PAPER, oracle.NUM_CLASSES
  )
  weights, query = trained_weights(), oracle.make_client((40, 40, 40), salt=9)
  plain = fed_avg.fed_avg(
      oracle.build_model(), fed_avg.PAPER, oracle.NUM_CLASSES
  ).known_client()
  logits = plain.predict.scores(weights, query.examples()).numpy()
  weights['head']['bias'] -= logits.mean(0)  # No class is always the first.
  logits -= logits.mean(0)
  assert set(logits.argmax(1)) > {1, 2}
  examples = CLIENTS[1].examples()  # Of classes 1 and 2.
  for use in (method.known_client(), method.new_client()):
    adapted = use.adapt(weights, (), examples, tf.constant([5, 6]))
    found = use.predict(adapted, query.examples()).numpy()
    np.testing.assert_array_equal(found, logits[:, 1:3].argmax(1) + 1)
    scores = use.predict.scores(adapted, query.examples()).numpy()
    assert np.isneginf(scores[:, 0]).all()  # However low those of others are.
    nobody = examples._replace(mask=tf.zeros_like(examples.mask))
    for other in (
        use.start(weights, ()),
        use.adapt(weights, (), nobody, tf.constant([5, 6])),
    ):
      found = use.predict(other, query.examples()).numpy()
      np.testing.assert_array_equal(found, logits.argmax(1))


def test_prototypes_in_place_of_the_trained_head():
  """The same training; then the nearest class mean of the averaged body."""
  method = fed_avg.fed_avg_proto(oracle.build_model(), fed_avg.PAPER, 3)
  client, query = CLIENTS[1], oracle.make_client((6, 7, 8), salt=9)
  weights = trained_weights()
  w = oracle.to_vector(weights)
  means = oracle.class_means(w, client.pairs())
  expected = [
      min(
          means,
          key=lambda c, x=x: np.linalg.norm(oracle.embed(w, x) - means[c]),
      )
      for x in query.x
  ]
  for use in (method.known_client, method.new_client, method.new_class):
    client_personalizer = use()
    adapted = client_personalizer.adapt(
        weights, (), client.examples(), tf.constant([5, 6])
    )
    found = client_personalizer.predict(adapted, query.examples())
    assert found.numpy().tolist() == expected
  assert set(expected) == {1, 2}  # The client holds no example of class 0.


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'momentum': 1.5}, '`momentum`.*found 1.5'),
        ({'optimizer': 'adam', 'momentum': 0.5}, 'momentum.*found 0.5'),
        ({'rounds': 0}, '`rounds` of at least 1, found 0'),
        ({'fine_tuning_decay_steps': 0}, '`fine_tuning_decay_steps`.*found 0'),
        (
            {'fine_tuning_steps': 1, 'deployment_batch_size': 0},
            '`deployment_batch_size` of at least 1, found 0',
        ),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(fed_avg.PAPER, **change)
