"""FedMeta-Per: two rounds by hand, second derivatives, what stays private."""

import collections
import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import plain_process
import pytest
import tensorflow as tf
import tree

from tff_meta import episodes
from tff_meta import method
from tff_meta import models
from tff_meta import registry
from tff_meta import weights as weights_lib
from tff_meta.algorithms import fedmeta_per
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import personal_layers
from tff_meta.losses import cross_entropy

fold_in = tf.random.experimental.stateless_fold_in

# Support sizes 2, 3 and 5, query sizes 9, 14 and 21.
CLIENTS = (
    oracle.make_client((7, 4, 0), salt=1),
    oracle.make_client((0, 12, 5), salt=2),
    oracle.make_client((3, 3, 20), salt=3),
)
PAPER = dataclasses.replace(
    fedmeta_per.PAPER, inner_learning_rate=0.8, outer_learning_rate=0.3
)
RELEASE = dataclasses.replace(
    fedmeta_per.RELEASE,
    inner='meta_sgd',
    inner_learning_rate=0.6,
    outer_learning_rate=0.05,
    inner_batch_size=2,
    query_batch_size=4,
    inner_epochs=2,
)
FIRST_ORDER = dataclasses.replace(PAPER, inner='meta_sgd', order=1)
FEDMETA = dataclasses.replace(
    PAPER, inner='meta_sgd', personal_layers=0, inner_batch_size=2
)
CONFIGS = {
    'paper': PAPER,
    'release': RELEASE,
    'first_order': FIRST_ORDER,
    'fedmeta': FEDMETA,
}
HEAD = slice(9, 25)  # Of a vector of weights; the body comes first.


def build_method(config):
  return fedmeta_per.fedmeta_per(
      oracle.build_model(), config, oracle.NUM_CLASSES
  )


@functools.cache
def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'fedmeta_per',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def run(config, cohorts, build_process=plain_process.PlainProcess):
  """Weights before and after every round, losses, and memories by client."""
  process = build(config, build_process)
  state, memories = process.initialize(), {}
  weights, losses = [process.get_model_weights(state).trainable], []
  for cohort in cohorts:
    data = []
    for k in cohort:
      data.append(CLIENTS[k].data())
      if config.personal_layers:
        data[-1]['memory'] = client_work.memory_dataset(
            process.initial_memory, memories.get(k)
        )
    if config.personal_layers:
      output, kept = process.next_with_memory(state, data)
      assert all(memory.present for memory in kept)
      memories.update(zip(cohort, [m.value for m in kept], strict=True))
    else:
      output = process.next(state, data)
    state = output.state
    weights.append(process.get_model_weights(state).trainable)
    losses.append(output.metrics['client_work']['train']['loss'])
  return weights, losses, memories


def vector(weights, own=None):
  """The network as a vector, and the rates as another (None for MAML)."""
  if own is not None:
    weights = personal_layers.merge(weights, own)
  rates = weights.get('rates')
  return oracle.to_vector(weights), rates and oracle.to_vector(rates)


def without_head(weights):
  """What is shared where the head is personal."""
  return personal_layers.split(weights, {('head', 'kernel'), ('head', 'bias')})[
      0
  ]


# ---------------------------------------------------------------------------
# The oracle: derivatives written out, except for the second ones, which are
# differences.


def cross_entropy_gradient(w, pairs):
  kernel, bias = w[9:21].reshape(3, 4), w[21:]
  g = np.zeros(25)
  for x, label in pairs:
    e = oracle.embed(w, x)
    z = np.exp(e @ kernel + bias)
    error = z / z.sum() - np.eye(4)[label]
    back = (kernel @ error) * (1 - e**2)
    g[:6] += np.outer(x, back).ravel()
    g[6:9] += back
    g[9:21] += np.outer(e, error).ravel()
    g[21:] += error
  return g / max(len(pairs), 1)


def inner(w, rates, batches):
  for batch in batches:
    w = w - rates * cross_entropy_gradient(w, batch)
  return w


def batch_means(w, batches):
  """The mean over minibatches of their mean losses, and its gradient."""
  losses = [oracle.cross_entropy(w, batch) for batch in batches]
  gradients = [cross_entropy_gradient(w, batch) for batch in batches]
  return np.mean(losses), np.mean(gradients, axis=0)


def differences(function, point):
  """The gradient of a function, by central differences."""
  return oracle.gradient(lambda p, _: function(p), point, [])


def split(client, fraction, fixed_seed):
  parts = episodes.split_support_query(client.examples(), fraction, fixed_seed)
  return tuple(
      oracle.Client(part.x.numpy(), part.y.numpy(), client.salt).pairs()
      for part in parts
  )


def naive_client(config, client, w, alpha, round_num):
  """One client's round: w, alpha, the query loss and the query size."""
  fixed_seed = fold_in((0, oracle.RUN_SEED), client.salt)
  support, query = split(client, config.support_fraction, fixed_seed)
  round_seed = fold_in((0, oracle.RUN_SEED), round_num)
  batches = oracle.batches_of(
      support,
      config.inner_batch_size,
      fold_in(round_seed, client.salt),
      config.inner_epochs,
  )
  size = config.query_batch_size or len(query)
  chunks = [query[i : i + size] for i in range(0, len(query), size)]
  rates = config.inner_learning_rate if alpha is None else alpha
  adapted = inner(w, rates, batches)
  loss, g = batch_means(adapted, chunks)
  g_alpha = None
  if config.order == 2:
    g = differences(
        lambda v: batch_means(inner(v, rates, batches), chunks)[0], w
    )
    if alpha is not None:
      g_alpha = differences(
          lambda a: batch_means(inner(w, a, batches), chunks)[0], alpha
      )
  elif alpha is not None:
    (batch,) = batches
    g_alpha = -g * cross_entropy_gradient(w, batch)

  def step(point, g):
    if config.outer_optimizer == 'adam_fresh':
      m, v = 0.1 * g, 0.001 * g**2  # Adam's moments after one step ...
      m, v = m / (1 - 0.9), v / (1 - 0.999)  # ... corrected for their bias.
      g = m / (np.sqrt(v) + 1e-8)
    return point - config.outer_learning_rate * g

  after = step(w, g), None if alpha is None else step(alpha, g_alpha)
  return *after, loss, len(query)


def naive_round(config, w, alpha, own, cohort, round_num):
  """A round of the server; `own` is client -> (w, alpha) and is updated."""
  results = []
  for k in cohort:
    mine, mine_alpha = w.copy(), None if alpha is None else alpha.copy()
    if k in own and config.personal_layers:
      mine[HEAD] = own[k][0][HEAD]
      if alpha is not None:
        mine_alpha[HEAD] = own[k][1][HEAD]
    results.append(
        naive_client(config, CLIENTS[k], mine, mine_alpha, round_num)
    )
    own[k] = results[-1][:2]
  sizes = [r[3] for r in results]
  loss = oracle.mean([r[2] for r in results], sizes)
  new_w = oracle.mean([r[0] for r in results], sizes)
  new_alpha = alpha
  if alpha is not None:
    new_alpha = oracle.mean([r[1] for r in results], sizes)
  if config.personal_layers and config.first_head == 'server_init':
    new_w[HEAD] = w[HEAD]  # What a new client starts with, for ever.
    if alpha is not None:
      new_alpha[HEAD] = alpha[HEAD]
  return new_w, new_alpha, loss


COHORTS = ((0, 1), (1, 2), (2, 0))


@pytest.mark.parametrize('name', CONFIGS)
def test_three_rounds_by_hand(name):
  """The second and third round mix clients with and without a head."""
  config = CONFIGS[name]
  # In TFF one with memories, and one without.
  by_tff = name in ('release', 'fedmeta')
  build_process = registry.build if by_tff else plain_process.PlainProcess
  weights, losses, memories = run(config, COHORTS, build_process)
  initial = None
  if config.personal_layers and config.first_head == 'server_init':
    initial = build(config).initial_memory
  w, alpha = vector(weights[0], initial)
  own = {}
  for r, cohort in enumerate(COHORTS):
    before = w
    w, alpha, loss = naive_round(config, w, alpha, own, cohort, r)
    actual, rates = vector(weights[r + 1], initial)
    np.testing.assert_allclose(actual, w, rtol=1e-4, atol=1e-5)
    if alpha is not None:
      np.testing.assert_allclose(rates, alpha, rtol=1e-4, atol=1e-5)
      assert np.ptp(rates) > 1e-3
    np.testing.assert_allclose(losses[r], loss, rtol=1e-4)
    assert np.abs(w - before)[:9].max() > 0.01
  assert set(memories) == ({0, 1, 2} if config.personal_layers else set())
  for k, memory in memories.items():
    head, rates = vector(without_head(weights[0]), memory)
    np.testing.assert_allclose(
        head[HEAD], own[k][0][HEAD], rtol=1e-4, atol=1e-5
    )
    if rates is not None:
      np.testing.assert_allclose(
          rates[HEAD], own[k][1][HEAD], rtol=1e-4, atol=1e-5
      )


# ---------------------------------------------------------------------------
# Gradients.


def random_like(structure, rng, scale=1.0):
  return tf.nest.map_structure(
      lambda w: tf.constant(scale * rng.normal(size=w.shape)), structure
  )


def inner_product(a, b):
  pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
  return sum(float(tf.reduce_sum(x * y)) for x, y in pairs)


def float64_problem(config, network, input_shape):
  """A network with three classes, 7 support and 5 query examples."""
  rng = np.random.default_rng(4)
  model = models.build(network, input_shape, None)
  classifier = classifiers.LinearClassifier(model, 3)
  weights = fedmeta_per.initialize(classifier, config, tf.constant([3, 7]))
  weights = tf.nest.map_structure(lambda w: tf.cast(w, tf.float64), weights)
  support, query = (
      episodes.Examples(
          tf.constant(rng.normal(size=(n, *input_shape))),
          tf.constant(np.arange(n) % 3, tf.int32),
          tf.ones(n),
      )
      for n in (7, 5)
  )
  return classifier, weights, support, query


@pytest.mark.parametrize('moved, kept', [('head', 'body'), ('body', 'head')])
def test_inner_steps_of_anil_and_boil_move_one_part(moved, kept):
  """One step moves it as that of all does; the outer gradient is of both."""
  config = dataclasses.replace(PAPER, inner_learning_rate=0.3)
  classifier, weights, support, query = float64_problem(
      config, 'mlp', (4, 5, 1)
  )
  seed = tf.constant([1, 2])
  one = dataclasses.replace(config, inner_layers=moved)
  adapted, _ = fedmeta_per.adapt(classifier, one, weights, support, seed)
  both, _ = fedmeta_per.adapt(classifier, config, weights, support, seed)
  tree.map_structure(
      np.testing.assert_array_equal, adapted[kept], weights[kept]
  )
  # The common rate is a float32 on its way, 1e-7 of the step.
  tree.map_structure(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
      adapted[moved],
      both[moved],
  )
  loss, gradient = fedmeta_per.outer_gradient(
      classifier, one, weights, support, query, seed
  )
  logits = classifier.logits(adapted, query)
  expected = cross_entropy.softmax_cross_entropy(logits, query.y, query.mask)
  np.testing.assert_allclose(loss, expected, rtol=1e-12)
  assert all(np.any(w) for w in tree.flatten(gradient[kept]))


def test_meta_sgd_learns_what_to_move():
  with pytest.raises(ValueError, match="'all' with inner 'meta_sgd'.*'head'"):
    dataclasses.replace(PAPER, inner='meta_sgd', inner_layers='head')


@pytest.mark.parametrize(
    'network, input_shape',
    [('mlp', (4, 5, 1)), ('fedmeta_per_cifar', (16, 17, 2))],
)
def test_outer_gradient_against_finite_differences(network, input_shape):
  """In float64, along random directions of all weights and of all rates."""
  config = dataclasses.replace(
      RELEASE, inner_learning_rate=0.1, inner_batch_size=4, query_batch_size=2
  )
  classifier, weights, support, query = float64_problem(
      config, network, input_shape
  )
  rng = np.random.default_rng(5)
  weights['rates'] = weights_lib.add(
      weights['rates'], random_like(weights['rates'], rng, 0.02)
  )
  seed = tf.constant([1, 2])
  outer = tf.function(
      lambda w: fedmeta_per.outer_gradient(
          classifier, config, w, support, query, seed
      ),
      autograph=False,
  )
  _, gradient = outer(weights)
  for part in ('body', 'head', 'rates'):
    direction = weights_lib.zeros_like(weights)
    direction[part] = random_like(weights[part], rng)
    norm = inner_product(direction, direction) ** 0.5
    losses = [
        float(
            outer(weights_lib.add(weights, weights_lib.scale(direction, s)))[0]
        )
        for s in (1e-5 / norm, -1e-5 / norm)
    ]
    np.testing.assert_allclose(
        inner_product(gradient, direction) / norm,
        (losses[0] - losses[1]) / 2e-5,
        rtol=1e-5,
    )
    # First order is something else.
  first = dataclasses.replace(config, order=1)
  _, g = fedmeta_per.outer_gradient(
      classifier, first, weights, support, query, seed
  )
  g['rates'], gradient['rates'] = {}, {}
  difference = weights_lib.subtract(g, gradient)
  assert inner_product(difference, difference) > 1e-4 * inner_product(g, g)


@pytest.mark.parametrize('order', [1, 2])
def test_gradient_by_the_rates_after_one_step(order):
  """dL_q/dalpha = -(grad L_s(w) o grad L_q(w')), in either order."""
  config = dataclasses.replace(PAPER, inner='meta_sgd', order=order)
  classifier, weights, support, query = float64_problem(
      config, 'mlp', (4, 5, 1)
  )

  def gradient(weights, examples):
    with tf.GradientTape() as tape:
      tape.watch(weights)
      loss = tf.reduce_mean(
          tf.nn.sparse_softmax_cross_entropy_with_logits(
              examples.y, classifier.logits(weights, examples)
          )
      )
    return tape.gradient(loss, weights)

  w = collections.OrderedDict(body=weights['body'], head=weights['head'])
  g_support = gradient(w, support)
  # The rate passes through float32.
  g_query = gradient(
      weights_lib.subtract(w, weights_lib.scale(g_support, np.float32(0.8))),
      query,
  )
  _, actual = fedmeta_per.outer_gradient(
      classifier, config, weights, support, query, tf.constant([0, 0])
  )
  tf.nest.map_structure(
      lambda a, s, q: np.testing.assert_allclose(a, -s * q, atol=1e-12),
      actual['rates'],
      g_support,
      g_query,
  )


def test_equal_rates_of_meta_sgd_are_maml():
  maml = dataclasses.replace(PAPER, inner_batch_size=3)
  sgd = dataclasses.replace(maml, inner='meta_sgd')
  classifier, weights, support, query = float64_problem(sgd, 'mlp', (4, 5, 1))
  seed = tf.constant([4, 4])
  without = collections.OrderedDict(body=weights['body'], head=weights['head'])
  loss, g = fedmeta_per.outer_gradient(
      classifier, sgd, weights, support, query, seed
  )
  loss_maml, g_maml = fedmeta_per.outer_gradient(
      classifier, maml, without, support, query, seed
  )
  np.testing.assert_allclose(loss, loss_maml, rtol=1e-9)
  del g['rates']
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9),
      g,
      g_maml,
  )


def test_without_an_inner_step_it_is_fed_sgd_on_the_query_sets():
  """With alpha = 0 all weights move by -beta times the gradient at w."""
  config = dataclasses.replace(
      PAPER, personal_layers=0, inner_learning_rate=0.0
  )
  weights, _, _ = run(config, [(0, 1)])
  w, gradients, sizes = oracle.to_vector(weights[0]), [], []
  for client in CLIENTS[:2]:
    fixed_seed = fold_in((0, oracle.RUN_SEED), client.salt)
    _, query = split(client, 0.2, fixed_seed)
    gradients.append(cross_entropy_gradient(w, query))
    sizes.append(len(query))
  np.testing.assert_allclose(
      oracle.to_vector(weights[1]),
      w - 0.3 * oracle.mean(gradients, sizes),
      **oracle.TOLERANCE,
  )


# ---------------------------------------------------------------------------
# What is shared and what is not.


def client_output(config, client, present=False):
  process = build(config)
  weights = process.get_model_weights(process.initialize()).trainable
  to_tensors = functools.partial(tf.nest.map_structure, tf.constant)
  memory = client_work.ClientMemory(
      tf.constant(present), to_tensors(process.initial_memory)
  )
  return build_method(config).client_update(
      to_tensors(weights),
      method.ClientInput(
          client.examples(),
          tf.constant([5, 6]),
          tf.constant([7, 8]),
          (),
          memory,
      ),
  )


def leaf_shapes(structure):
  return [tuple(np.shape(leaf)) for leaf in tf.nest.flatten(structure)]


@pytest.mark.parametrize('inner', ['maml', 'meta_sgd'])
def test_no_head_leaves_a_client(inner):
  """Its shapes are (3, 4) and (4,); the body's are (2, 3) and (3,)."""
  config = dataclasses.replace(PAPER, inner=inner)
  private = {(3, 4), (4,)}
  output = client_output(config, CLIENTS[0])
  assert not private & set(
      leaf_shapes((output.update, output.report, output.signal))
  )
  copies = 1 if inner == 'maml' else 2  # The head, and its rates.
  assert sorted(leaf_shapes(output.memory)) == sorted([(3, 4), (4,)] * copies)
  state = build(config).initialize()
  assert not private & set(leaf_shapes(state.weights))
  shared = {(2, 3), (3,)}
  assert shared <= set(leaf_shapes(state.weights))
  # The other way round: `averaged_head` shares it.
  averaged = dataclasses.replace(config, first_head='averaged_head')
  assert private <= set(leaf_shapes(build(averaged).initialize().weights))


def test_the_first_head_follows_from_the_seed_alone():
  memory = build(PAPER).initial_memory
  other = plain_process.PlainProcess(
      'fedmeta_per',
      oracle.build_model(),
      PAPER,
      num_classes=oracle.NUM_CLASSES,
      seed=12,
  ).initial_memory
  seeded = build(dataclasses.replace(PAPER, first_head='averaged_head'))
  weights = seeded.get_model_weights(seeded.initialize()).trainable
  np.testing.assert_array_equal(
      memory['head']['kernel'], weights['head']['kernel']
  )
  assert np.any(memory['head']['kernel'] != other['head']['kernel'])


@pytest.mark.parametrize(
    'count, query', [(100, 80), (25, 20), (14, 12), (4, 4)]
)
def test_weights_are_the_sizes_of_the_query_sets(count, query):
  output = client_output(PAPER, oracle.make_client((count - 1, 1), salt=9))
  assert float(output.update_weight) == query
  assert float(output.report.num_examples) == query


def test_a_client_without_examples_has_no_weight():
  output = client_output(RELEASE, oracle.make_client((0, 0), salt=9))
  assert float(output.update_weight) == 0
  for leaf in tf.nest.flatten(output):
    assert np.isfinite(np.asarray(leaf)).all()


# ---------------------------------------------------------------------------
# Known and new clients.


def bank_problem(config=PAPER):
  """Weights, a bank of three heads, and the examples of a new client."""
  model = oracle.build_model()
  shared, memory = build(config).initialize(), build(config).initial_memory
  shared = build(config).get_model_weights(shared).trainable
  rng = np.random.default_rng(3)
  bank = tf.nest.map_structure(
      lambda leaf: tf.constant(
          rng.normal(size=(3, *leaf.shape)).astype(np.float32)
      ),
      memory,
  )
  if 'rates' in bank:
    bank['rates'] = tf.nest.map_structure(
        lambda r: 0.1 * tf.abs(r), bank['rates']
    )
  shared = tf.nest.map_structure(tf.constant, shared)
  return model, shared, bank, oracle.make_client((4, 3, 0), salt=6)


def one_of(bank, i):
  return tf.nest.map_structure(lambda b: b[i], bank)


def rolled(bank, shift):
  return tf.nest.map_structure(lambda b: tf.roll(b, shift, 0), bank)


def naive_scores(config, shared, bank, client, seed):
  """Per head the adapted vector and the mean of the losses before a step.

  That is, of the steps of all epochs or of the last one.
  """
  batches = oracle.batches_of(
      client.pairs(), config.inner_batch_size, seed, config.inner_epochs
  )
  results = []
  for i in range(3):
    own = one_of(bank, i)
    w, alpha = vector(shared, own)
    rates = config.inner_learning_rate if alpha is None else alpha
    losses = []
    for batch in batches:
      losses.append(oracle.cross_entropy(w, batch))
      w = inner(w, rates, [batch])
    if config.head_score == 'last_epoch':
      losses = losses[-len(losses) // config.inner_epochs :]
    results.append((w, np.mean(losses)))
  return results


@pytest.mark.parametrize(
    'config',
    [dataclasses.replace(PAPER, inner_batch_size=3), RELEASE],
    ids=['maml', 'meta_sgd'],
)
def test_a_new_client_adapts_under_the_head_that_fits_best(config):
  if config.inner == 'meta_sgd':
    config = dataclasses.replace(config, first_head='server_init')
  model, shared, bank, client = bank_problem(config)
  use = build_method(config).new_client()
  assert use.uses_bank and use.start is None
  seed = tf.constant([8, 1])
  for shift in range(3):  # The best head comes first, second and third.
    shifted = rolled(bank, shift)
    adapted = tf.function(use.adapt, autograph=False)(
        shared, shifted, client.examples(), seed
    )
    results = naive_scores(config, shared, shifted, client, seed)
    best = np.argmin([score for _, score in results])
    np.testing.assert_allclose(
        oracle.to_vector(adapted), results[best][0], rtol=1e-4, atol=1e-5
    )
  labels = use.predict(adapted, client.examples())
  logits = model.with_head(4).logits(adapted, client.x)
  np.testing.assert_array_equal(labels, np.argmax(logits, 1))


@pytest.mark.parametrize(
    'head_score, expected', [('all_epochs', 0), ('last_epoch', 2)]
)
def test_the_epochs_that_a_head_is_judged_by(head_score, expected):
  """The third head begins badly and ends well."""
  config = dataclasses.replace(
      PAPER, inner_batch_size=3, inner_epochs=3, head_score=head_score
  )
  model, shared, _, client = bank_problem(config)
  rng = np.random.default_rng(0)
  bank = {
      'head': {
          'kernel': tf.constant(2 * rng.normal(size=[3, 3, 4]), tf.float32),
          'bias': tf.constant(rng.normal(size=[3, 4]), tf.float32),
      }
  }
  seed = tf.constant([8, 1])
  results = naive_scores(config, shared, bank, client, seed)
  assert np.argmin([score for _, score in results]) == expected
  use = build_method(config).new_client()
  adapted = use.adapt(shared, bank, client.examples(), seed)
  np.testing.assert_allclose(
      oracle.to_vector(adapted), results[expected][0], rtol=1e-4, atol=1e-5
  )


def test_equal_heads_and_heads_that_diverge():
  """Of equal scores the first counts; one that is not finite counts last."""
  model, shared, bank, client = bank_problem()
  equal = {'head': {'kernel': tf.zeros([3, 3, 4]), 'bias': tf.zeros([3, 4])}}
  # Rates of zero but for the body, so that the heads can be told apart after.
  config = dataclasses.replace(PAPER, inner_learning_rate=0.0)
  use = build_method(config).new_client()
  seed = tf.constant([0, 0])
  # Adding the same to all logits changes no loss.
  equal['head']['bias'] += tf.constant([[2.0], [1.0], [4.0]])
  adapted = use.adapt(shared, equal, client.examples(), seed)
  np.testing.assert_allclose(adapted['head']['bias'], [2.0] * 4)
  broken = tf.nest.map_structure(tf.identity, bank)
  broken['head']['bias'] *= tf.constant([[np.nan], [1.0], [np.inf]])
  adapted = use.adapt(shared, broken, client.examples(), seed)
  np.testing.assert_allclose(adapted['head']['bias'], bank['head']['bias'][1])
  none = oracle.make_client((0, 0), salt=1).examples()
  adapted = use.adapt(shared, bank, none, seed)
  np.testing.assert_allclose(adapted['head']['bias'], bank['head']['bias'][0])


@pytest.mark.parametrize('name', ['paper', 'release', 'fedmeta'])
def test_a_known_client_adapts_under_its_own_head(name):
  config = CONFIGS[name]
  weights, _, memories = run(config, [(0, 1)])
  weights = tf.nest.map_structure(tf.constant, weights[-1])
  use = build_method(config).known_client()
  assert not use.uses_bank
  client, seed = CLIENTS[0], tf.constant([8, 1])
  memory, w = (), oracle.to_vector(weights) if name != 'paper' else None
  rates = config.inner_learning_rate
  if config.inner == 'meta_sgd':
    rates = oracle.to_vector(weights['rates'])
  if config.personal_layers:
    memory = client_work.ClientMemory(tf.constant(True), memories[0])
    own = personal_layers.merge(without_head(weights), memories[0])
    w = oracle.to_vector(own)
    if config.inner == 'meta_sgd':
      rates = oracle.to_vector(own['rates'])
  np.testing.assert_allclose(
      oracle.to_vector(use.start(weights, memory)), w, rtol=1e-6
  )
  batches = oracle.batches_of(
      client.pairs(), config.inner_batch_size, seed, config.inner_epochs
  )
  adapted = tf.function(use.adapt, autograph=False)(
      weights, memory, client.examples(), seed
  )
  np.testing.assert_allclose(
      oracle.to_vector(adapted),
      inner(w, rates, batches),
      rtol=1e-4,
      atol=1e-5,
  )


def test_a_client_never_sampled_has_the_first_head():
  """The server's average where there is one, otherwise the common draw."""
  for config in (PAPER, RELEASE):
    process = build(config)
    weights, _, _ = run(config, [(0, 1)])
    memory = client_work.ClientMemory(
        tf.constant(False), process.initial_memory
    )
    start = build_method(config).known_client().start(weights[-1], memory)
    first = process.initial_memory['head']
    averaged = config.first_head == 'averaged_head'
    expected = weights[-1]['head'] if averaged else first
    np.testing.assert_array_equal(start['head']['bias'], expected['bias'])
    if averaged:
      assert np.any(expected['bias'] != first['bias'])


def test_configurations_that_cannot_be():
  for field, value in (
      ('order', 3),
      ('inner', 'sgd'),
      ('support_fraction', 1),
      ('head_score', 'first_epoch'),
      ('eval_support_fraction', 1.0),
      ('f1_restrict_to_client_labels', 1),
  ):
    with pytest.raises(ValueError, match=f'`{field}`'):
      dataclasses.replace(PAPER, **{field: value})
  with pytest.raises(ValueError, match='`personal_layers` .*found 2'):
    build(dataclasses.replace(PAPER, personal_layers=2))
