"""FedEC against loops, its limits, and what clients do with it.

The oracle minimises the constrained loss in its second form, `(1 + a)` times
the cross-entropy with soft targets (FedEC, eqs. 12 and 13), where the library
adds the divergence.
"""

import dataclasses
import functools
import math

import few_round_oracle as oracle
import numpy as np
import plain_process
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tff_meta import aggregation
from tff_meta import episodes
from tff_meta import registry
from tff_meta.algorithms import fedec
from tff_meta.baselines import fed_avg
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers

CLIENTS = oracle.CLIENTS
PLAIN = dataclasses.replace(
    fedec.PAPER,
    inner_learning_rate=0.3,
    momentum=0.0,
    weight_decay=0.0,
    tau=2,
    batch_size=4,
    eval_model='stored',
)
CONFIGS = {
    'kl': dataclasses.replace(
        PLAIN,
        constraint_weight=1.5,
        momentum=0.5,
        weight_decay=0.1,
        outer_learning_rate=0.5,
    ),
    'l2': dataclasses.replace(PLAIN, constraint='l2', constraint_weight=0.2),
    'none': dataclasses.replace(PLAIN, constraint='none', batch_size=0),
    'steps': dataclasses.replace(PLAIN, tau_unit='steps', tau=4),
    'student_first': dataclasses.replace(
        PLAIN, kl_direction='student_first', constraint_weight=1.5
    ),
    'first': dataclasses.replace(
        PLAIN, constrain='first', constraint_weight=1.5
    ),
    'first_l2': dataclasses.replace(
        PLAIN, constrain='first', constraint='l2', constraint_weight=0.2
    ),
    'sum': dataclasses.replace(
        PLAIN, server_aggregate='sum', outer_learning_rate=0.4
    ),
}
NO_MEMORY = client_work.ClientMemory(tf.constant(False), ())


@functools.cache
def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'fedec',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def run(
    config, cohorts, memories=None, build_process=plain_process.PlainProcess
):
  """Runs rounds and stores the clients' memories.

  Args:
    config: The configuration.
    cohorts: For every round the indices of its clients.
    memories: Client -> memory before the first round.
    build_process: What runs them.

  Returns:
    The global weights before, between and after the rounds; after every round
    all clients' memories so far; the metrics.
  """
  process = build(config, build_process)
  state = process.initialize()
  weights = [process.get_model_weights(state).trainable]
  stored, metrics = [dict(memories or {})], []
  for cohort in cohorts:
    data = []
    for k in cohort:
      memory = client_work.memory_dataset(
          process.initial_memory, stored[-1].get(k)
      )
      data.append(CLIENTS[k].data() | {'memory': memory})
    output, kept = process.next_with_memory(state, data)
    state = output.state
    weights.append(process.get_model_weights(state).trainable)
    stored.append(stored[-1].copy())
    for k, memory in zip(cohort, kept, strict=True):
      assert memory.present
      stored[-1][k] = memory.value
    metrics.append(output.metrics['client_work']['train'])
  return weights, stored[1:], metrics


def probabilities(w, x):
  kernel, bias = w[9:-4].reshape(3, 4), w[-4:]
  logits = oracle.embed(w, x) @ kernel + bias
  return np.exp(logits) / np.exp(logits).sum()


def naive_loss(config, last):
  """The loss of a client that is held to the model `last`, or to None."""
  kernels = np.r_[0:6, 9:21]

  def loss(w, pairs):
    total = 0.0
    for x, label in pairs:
      p = probabilities(w, x)
      if last is None or config.constraint != 'kl':
        total -= math.log(p[label])
        continue
      a, teacher = config.constraint_weight, probabilities(last, x)
      if config.kl_direction == 'student_first':
        total -= math.log(p[label])
        total += a * np.sum(p * (np.log(p) - np.log(teacher)))
        continue
      target = (np.eye(4)[label] + a * teacher) / (1 + a)
      total -= (1 + a) * np.sum(target * np.log(p))
      total += a * np.sum(teacher * np.log(teacher))
    total /= len(pairs)
    if last is not None and config.constraint == 'l2':
      total += config.constraint_weight * np.sum((w - last) ** 2)
    return total + config.weight_decay / 2 * np.sum(w[kernels] ** 2)

  return loss


def naive_update(config, w, last, client, seed):
  """Returns theta, and sum of losses and number of examples over all steps."""
  held_to = last
  if config.constrain == 'first':
    held_to = w if last is None else None
  batches = oracle.batches_of(
      client.pairs(), config.batch_size, seed, config.tau
  )
  if config.tau_unit == 'steps':
    batches = batches[: config.tau]

  def momentum(gradient, state):
    state['v'] = config.momentum * state.get('v', 0.0) + gradient
    return config.inner_learning_rate * state['v']

  return oracle.descend(naive_loss(config, held_to), w, batches, momentum)


@pytest.mark.parametrize('name', CONFIGS)
def test_three_rounds_by_hand(name):
  """Clients 0 and 1, then 1 (constrained) and 2 (not), then 1 and 0 (both)."""
  config, cohorts = CONFIGS[name], ((0, 1), (1, 2), (1, 0))
  # In TFF memory and optimizer of the server, and sums of updates.
  by_tff = name in ('kl', 'sum')
  build_process = registry.build if by_tff else plain_process.PlainProcess
  weights, memories, metrics = run(config, cohorts, None, build_process)
  w, last = oracle.to_vector(weights[0]), {}
  for round_num, cohort in enumerate(cohorts):
    round_seed = oracle.fold_in((0, oracle.RUN_SEED), round_num)
    trained, loss_sum, count = {}, 0.0, 0
    for k in cohort:
      seed = oracle.fold_in(round_seed, CLIENTS[k].salt)
      trained[k], client_loss, client_count = naive_update(
          config, w, last.get(k), CLIENTS[k], seed
      )
      loss_sum, count = loss_sum + client_loss, count + client_count
    moves = [theta - w for theta in trained.values()]
    scale = 1 if config.server_aggregate == 'sum' else len(moves)
    w = w + config.outer_learning_rate * sum(moves) / scale
    last |= trained
    tolerance = {'rtol': 1e-3, 'atol': 3e-5}  # Up to 18 steps of order 1.
    np.testing.assert_allclose(
        oracle.to_vector(weights[round_num + 1]), w, **tolerance
    )
    assert memories[round_num].keys() == last.keys()
    for k, theta in last.items():
      np.testing.assert_allclose(
          oracle.to_vector(memories[round_num][k]), theta, **tolerance
      )
    np.testing.assert_allclose(
        metrics[round_num]['loss'], loss_sum / count, rtol=1e-4
    )
    assert metrics[round_num]['num_examples'] == count


def test_steps_are_counted_across_epochs():
  """9, 11 and 6 examples in batches of 4; 4 steps are 4 + 4 + 1 + 4 of 9."""
  *_, metrics = run(CONFIGS['steps'], [(0,), (1,), (2,)])
  assert [m['num_examples'] for m in metrics] == [13, 15, 12]
  *_, metrics = run(PLAIN, [(0,), (1,), (2,)])
  assert [m['num_examples'] for m in metrics] == [18, 22, 12]


def differ(a, b):
  return not np.array_equal(oracle.to_vector(a), oracle.to_vector(b))


def test_the_constraint_begins_with_the_second_participation():
  configs = [
      dataclasses.replace(PLAIN, constraint_weight=a) for a in (0.0, 1.0)
  ]
  (free, *_), (held, *_) = (run(c, [(0, 1), (1,)]) for c in configs)
  assert not differ(free[1], held[1])
  assert differ(free[2], held[2])


def test_the_printed_algorithm_constrains_the_first_participation():
  """Algorithm 1 as printed: then free, even where a model is remembered."""
  configs = [
      dataclasses.replace(PLAIN, constrain='first', constraint_weight=a)
      for a in (0.0, 1.0)
  ]
  first, both = (run(config, [(0, 1)])[0][1] for config in configs)
  assert differ(first, both)
  memories = {1: another_model()}
  first, both = (run(config, [(1,)], memories)[0][1] for config in configs)
  assert not differ(first, both)


def test_updates_are_summed_if_asked_for():
  """With phi = 0 and models 2 and 4: 2.4 at a rate of 0.4; the empty adds 0."""
  process = build(CONFIGS['sum'], registry.build)
  state = process.initialize()
  data, none = [], client_work.memory_dataset(process.initial_memory, None)
  for client in (*CLIENTS[:2], oracle.make_client((0, 0, 0), salt=4)):
    data.append(client.data() | {'memory': none})
  output, memories = process.next_with_memory(state, data)
  before, after = (
      oracle.to_vector(process.get_model_weights(s).trainable)
      for s in (state, output.state)
  )
  moves = [oracle.to_vector(m.value) - before for m in memories[:2]]
  expected = before + 0.4 * sum(moves)
  np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-6)


def test_an_aggregator_is_no_sum():
  config = dataclasses.replace(PLAIN, server_aggregate='sum')
  with pytest.raises(ValueError, match='no aggregator with.*MeanFactory'):
    registry.build(
        'fedec',
        oracle.build_model(),
        config,
        num_classes=4,
        aggregation=aggregation.OfModels(tff.aggregators.MeanFactory()),
    )


def test_without_constraint_and_server_rate_it_is_uniform_fed_avg():
  """Also in the second round, and although the clients' sizes differ."""
  weights, *_ = run(
      dataclasses.replace(PLAIN, constraint_weight=0.0), [(0, 1, 2)] * 2
  )
  config = fed_avg.FedAvgConfig(
      learning_rate=0.3, epochs=2, batch_size=4, uniform=True
  )
  process = plain_process.PlainProcess(
      'fed_avg',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  state = process.initialize()
  for _ in range(2):
    state = process.next(state, [c.data() for c in CLIENTS]).state
  np.testing.assert_allclose(
      oracle.to_vector(weights[2]),
      oracle.to_vector(process.get_model_weights(state).trainable),
      rtol=1e-6,
      atol=1e-6,
  )
  assert differ(weights[0], weights[2])


@pytest.mark.parametrize('rate', [0.0, 0.5])
def test_the_server_moves_by_its_rate_towards_the_mean(rate):
  """With phi = 0 and models 2 and 4: 1.5 at a rate of 1/2, 0 at 0."""
  config = dataclasses.replace(PLAIN, outer_learning_rate=rate)
  (before, after), (memories,), _ = run(config, [(0, 1)])
  before, after, *models = map(
      oracle.to_vector, (before, after, memories[0], memories[1])
  )
  expected = before + rate * ((models[0] + models[1]) / 2 - before)
  np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-6)
  assert (rate == 0) == np.array_equal(before, after)


def test_a_client_remembers_what_it_uploaded_to_the_bit():
  """A single client's model becomes the server's at a rate of 1."""
  weights, memories, _ = run(PLAIN, [(0,), (1,), (0,)])
  for k, uploaded, memory in zip((0, 1, 0), weights[1:], memories, strict=True):
    assert not differ(uploaded, memory[k])


def network(num_classes=2):
  return classifiers.LinearClassifier(oracle.build_model(), num_classes)


def predicting(p, shift=0.0):
  """Weights whose predictions are `p`, whatever the input."""
  zeros = tree.map_structure(
      tf.zeros_like, network(len(p)).initialize(tf.constant([0, 0]))
  )
  zeros['head']['bias'] = tf.constant(np.log(p) + shift, tf.float32)
  return zeros


def one_example(label=0):
  return episodes.Examples(tf.ones([1, 2]), tf.constant([label]), tf.ones([1]))


def value_and_gradient(config, p, last):
  """The loss, and its gradient with respect to the logits."""
  weights = predicting(p)
  memory = NO_MEMORY
  if last is not None:
    memory = client_work.ClientMemory(tf.constant(True), predicting(last))
  with tf.GradientTape() as tape:
    tape.watch(weights)
    loss = fedec.client_loss(
        network(len(p)), config, weights, one_example(), memory
    )
  return loss.numpy(), tape.gradient(loss, weights['head']['bias']).numpy()


def test_loss_and_gradient_at_published_numbers():
  """With y = (1, 0), last (.5, .5), p = (.8, .2), a = 1, so q = (.75, .25).

  Directly -log .8 + .5 log(.5 / .8) + .5 log(.5 / .2) = .446287, and as twice
  the cross-entropy of q and p minus log 2. Gradient: 2 (p - q) = (.1, -.1).
  """
  config = dataclasses.replace(PLAIN, constraint_weight=1.0)
  loss, gradient = value_and_gradient(config, (0.8, 0.2), (0.5, 0.5))
  assert loss == pytest.approx(0.446287, abs=1e-6)
  by_targets = -2 * (0.75 * math.log(0.8) + 0.25 * math.log(0.2))
  assert loss == pytest.approx(by_targets - math.log(2), abs=1e-6)
  np.testing.assert_allclose(gradient, [0.1, -0.1], atol=1e-6)


def test_a_shift_of_the_last_model_s_logits_is_no_penalty():
  """The constraint is on predictions, that of FedEC-l2 on weights."""
  batch, weights = one_example(), predicting((0.8, 0.2))
  last = client_work.ClientMemory(
      tf.constant(True), predicting((0.8, 0.2), shift=2.0)
  )
  losses = {
      name: float(
          fedec.client_loss(network(), CONFIGS[name], weights, batch, last)
      )
      for name in ('kl', 'l2')
  }
  assert losses['kl'] == pytest.approx(-math.log(0.8), abs=1e-6)
  # Two biases, each 2 away: .2 * (4 + 4).
  assert losses['l2'] == pytest.approx(-math.log(0.8) + 1.6, abs=1e-5)


def another_model():
  """A model with decided predictions of its own."""
  drawn = network(4).initialize(tf.constant([8, 9]))
  return tree.map_structure(lambda w: 3.0 * w, drawn)


def adapted(config, a, tau):
  """What client 1 trains under a constraint of weight a to another model."""
  config = dataclasses.replace(
      config, constraint_weight=a, tau=tau, batch_size=0
  )
  last = client_work.ClientMemory(tf.constant(True), another_model())
  weights = network(4).initialize(tf.constant([1, 2]))

  @tf.function(autograph=False)
  def train():
    return fedec.inner_update(
        network(4),
        config,
        weights,
        last,
        CLIENTS[1].examples(),
        tf.constant([3, 4]),
    )[0]

  return oracle.to_vector(train())


def test_a_strong_constraint_reproduces_the_last_model_s_predictions():
  config = dataclasses.replace(PLAIN, inner_learning_rate=1e-2)
  last = oracle.to_vector(another_model())
  distances = [
      max(
          np.abs(probabilities(w, x) - probabilities(last, x)).max()
          for x in CLIENTS[1].x
      )
      for w in (adapted(config, a, tau=300) for a in (0.0, 200.0))
  ]
  assert distances[0] > 0.3 and distances[1] < 0.05


def test_a_strong_constraint_on_weights_returns_the_last_model():
  """With a = 1000 a rate of 1 / 2a goes there in a step."""
  config = dataclasses.replace(
      PLAIN, constraint='l2', inner_learning_rate=1 / 2000
  )
  last = oracle.to_vector(another_model())
  np.testing.assert_allclose(adapted(config, 1000.0, 3), last, atol=2e-3)
  free = adapted(dataclasses.replace(config, constraint='none'), 1000.0, 3)
  assert np.abs(free - last).max() > 1


# What clients do with a trained model.


def models():
  weights = network(4).initialize(tf.constant([1, 2]))
  return weights, another_model()


def naive_predictions(w, query):
  return [int(np.argmax(probabilities(w, x))) for x in query.x]


QUERY = oracle.make_client((6, 7, 8), salt=9)


@pytest.mark.parametrize('sampled', [True, False])
def test_a_known_client_uses_the_model_it_trained_last(sampled):
  weights, last = models()
  memory = client_work.ClientMemory(tf.constant(sampled), last)
  known = fedec.fedec(oracle.build_model(), PLAIN, 4).known_client()
  expected = last if sampled else weights
  adapted = known.adapt(
      weights, memory, CLIENTS[0].examples(), tf.constant([3, 4])
  )
  assert not differ(adapted, expected)
  assert not differ(known.start(weights, memory), expected)
  assert known.predict(adapted, QUERY.examples()).numpy().tolist() == (
      naive_predictions(oracle.to_vector(expected), QUERY)
  )


@pytest.mark.parametrize(
    'eval_model, asked_during, asked_after',
    [
        ('stored', 'stored', 'stored'),
        ('finetune', 'trained', 'trained'),
        ('stored_then_finetune', 'stored', 'trained'),
    ],
)
def test_what_evaluations_ask(eval_model, asked_during, asked_after):
  """The stored model is what a client has before it trains, in all cases."""
  weights, last = models()
  memory = client_work.ClientMemory(tf.constant(True), last)
  config = dataclasses.replace(PLAIN, eval_model=eval_model)
  known = fedec.fedec(oracle.build_model(), config, 4).known_client()
  arguments = weights, memory, CLIENTS[1].examples(), tf.constant([3, 4])
  for use, expected in (
      (known.during_training(), asked_during),
      (known, asked_after),
  ):
    adapted = use.adapt(*arguments)
    assert differ(adapted, last) == (expected == 'trained')
    assert not differ(use.start(weights, memory), last)


@pytest.mark.parametrize('sampled', [True, False])
def test_a_known_client_can_train_the_initialisation_once_more(sampled):
  """With the constraint, if it was ever sampled."""
  weights, last = models()
  memory = client_work.ClientMemory(tf.constant(sampled), last)
  config = dataclasses.replace(CONFIGS['kl'], eval_model='finetune')
  known = fedec.fedec(oracle.build_model(), config, 4).known_client()
  seed = tf.constant([3, 4])
  adapted = known.adapt(weights, memory, CLIENTS[1].examples(), seed)
  expected, _, _ = naive_update(
      config,
      oracle.to_vector(weights),
      oracle.to_vector(last) if sampled else None,
      CLIENTS[1],
      seed,
  )
  np.testing.assert_allclose(
      oracle.to_vector(adapted), expected, rtol=1e-4, atol=1e-5
  )
  assert not differ(known.start(weights, memory), last if sampled else weights)


@pytest.mark.parametrize('name', ['kl', 'l2', 'first'])
def test_a_new_client_trains_as_in_its_first_round(name):
  """Unconstrained, unless the constraint is on first rounds."""
  weights, _ = models()
  config, seed = CONFIGS[name], tf.constant([3, 4])
  new = fedec.fedec(oracle.build_model(), config, 4).new_client()
  adapted = new.adapt(weights, (), CLIENTS[1].examples(), seed)
  expected, _, _ = naive_update(
      config, oracle.to_vector(weights), None, CLIENTS[1], seed
  )
  np.testing.assert_allclose(
      oracle.to_vector(adapted), expected, rtol=1e-4, atol=1e-5
  )
  assert new.predict(adapted, QUERY.examples()).numpy().tolist() == (
      naive_predictions(expected, QUERY)
  )
  assert not differ(new.start(weights, ()), weights)
  nothing = oracle.make_client((0, 0, 0), salt=4).examples()
  assert not differ(new.adapt(weights, (), nothing, seed), weights)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'momentum': 1.0}, '`momentum`.*found 1.0'),
        ({'optimizer': 'rmsprop'}, "momentum.*'rmsprop'.*found 0.5"),
        ({'constraint': 'L2'}, "`constraint` as one of 'kl', 'l2', 'none'"),
        ({'kl_direction': 'kl'}, "'teacher_first', 'student_first'.*'kl'"),
        ({'constrain': 'all'}, "`constrain`.*'returning', 'first'.*'all'"),
        ({'server_aggregate': 'median'}, "'mean', 'sum'.*'median'"),
        ({'eval_model': 'last'}, "`eval_model`.*'last'"),
        ({'constraint_weight': -0.1}, '`constraint_weight`.*found -0.1'),
        ({'tau': 1.5}, '`tau` as a whole number .* found 1.5'),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(fedec.PAPER, **change)
