"""CAFeMe: its rounds by hand, on a modulated network of a few weights."""

import collections
import dataclasses
import functools

import numpy as np
import plain_process
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta import models
from tff_meta import registry
from tff_meta.algorithms import cafeme
from tff_meta.client_works import client_work
from tff_meta.learners import cyclic_batches
from tff_meta.losses import cross_entropy
from tff_meta.models import modulated_cnn

RUN_SEED = 11
NUM_CLASSES = 3
RATE = 0.01
PAPER = dataclasses.replace(
    cafeme.PAPER,
    inner_steps=2,
    query_batches=2,
    batch_size=3,
    inner_learning_rate=0.4,
    outer_learning_rate=RATE,
    fine_tuning_steps=4,
    fine_tuning_learning_rate=0.3,
)
SUPPORT = dataclasses.replace(PAPER, query_context='support')
RELEASE = dataclasses.replace(
    PAPER,
    context_mode='unlabeled_self',
    disjoint_support_query=False,
    batch_position='persist',
    client_adam_state='persist',
)
CONTEXTS = [
    PAPER,
    SUPPORT,
    dataclasses.replace(PAPER, context_mode='unlabeled_self'),
]
CONTEXT_IDS = ['last_batch', 'support', 'self']

fold_in = tf.random.experimental.stateless_fold_in


def build_model(num_classes=None, *, gating='c1', num_labels=0):
  """Two inputs, three tanh units with a gate each, and a linear head."""
  assert gating == 'c1'

  def init_body(seed):
    kernel = tf.random.stateless_normal([2, 3], seed)
    return collections.OrderedDict(
        base=0.8 * kernel,
        modulator=tf.random.stateless_normal([2 + num_labels, 3], seed + 1),
    )

  def modulate(body, x, y, mask=None):
    h = tf.cast(x, body['base'].dtype)
    mask = tf.cast(tf.ones(tf.shape(x)[0]) if mask is None else mask, h.dtype)
    if num_labels:
      h = tf.concat([h, tf.one_hot(y, num_labels, dtype=h.dtype)], 1)
    z = tf.math.divide_no_nan(
        tf.linalg.matvec(h, mask, transpose_a=True), tf.reduce_sum(mask)
    )
    return tf.matmul(z[tf.newaxis], body['modulator'])

  def embed_modulated(body, eta, x, mask=None):
    del mask  # Examples see each other in the context only.
    x = tf.cast(x, body['base'].dtype)
    return tf.tanh(tf.matmul(x, body['base'])) * tf.sigmoid(eta[0])

  def init_head(seed, num_classes):
    return collections.OrderedDict(
        kernel=tf.random.stateless_normal([3, num_classes], seed)
    )

  return modulated_cnn.ModulatedModel(
      name='tiny',
      input_shape=(2,),
      embedding_size=3,
      num_classes=num_classes,
      init_body=init_body,
      init_head=init_head,
      embed=lambda body, x, mask: embed_modulated(
          body, modulate(body, x, None, mask), x
      ),
      classify=lambda head, e: tf.matmul(e, head['kernel']),
      num_labels=num_labels,
      modulate=modulate,
      embed_modulated=embed_modulated,
      rebuild=build_model,
  )


def make_examples(counts, seed):
  rng = np.random.default_rng(seed)
  y = rng.permutation(np.repeat(np.arange(len(counts)), counts))
  centers = np.array([[1.0, 0.5], [-1.0, 0.3], [0.2, -1.2]])
  x = centers[y] + 0.6 * rng.normal(size=(len(y), 2))
  return x.astype(np.float32), y.astype(np.int32)


# Seven batches of 3 and two over; one batch of 2 and one of 3; 4 examples.
CLIENTS = {
    5: make_examples((12, 8, 3), 1),
    6: make_examples((0, 4, 1), 2),
    7: make_examples((4, 0, 0), 3),
}
NOBODY = (np.zeros([0, 2], np.float32), np.zeros(0, np.int32))


def to_examples(xy):
  x, y = xy
  return episodes.Examples(
      tf.constant(x), tf.constant(y), tf.ones(len(y), tf.float32)
  )


def data(process, salt, xy, memory=None):
  out = collections.OrderedDict(
      examples=tf.data.Dataset.from_tensors(
          collections.OrderedDict(x=xy[0], y=xy[1])
      ),
      salt=tf.data.Dataset.from_tensors(np.int32(salt)),
  )
  if hasattr(process, 'initial_memory'):
    out['memory'] = client_work.memory_dataset(process.initial_memory, memory)
  return out


@functools.cache
def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'cafeme', build_model(), config, num_classes=NUM_CLASSES, seed=RUN_SEED
  )


def run(
    config,
    num_rounds,
    clients=CLIENTS,
    build_process=plain_process.PlainProcess,
):
  """Weights before and after rounds, the last metrics and memories."""
  process = build(config, build_process)
  state, memories = process.initialize(), dict.fromkeys(clients)
  weights = [to_vector(process.get_model_weights(state).trainable)]
  for _ in range(num_rounds):
    cohort = [data(process, s, xy, memories[s]) for s, xy in clients.items()]
    if hasattr(process, 'initial_memory'):
      output, kept = process.next_with_memory(state, cohort)
      memories = dict(zip(clients, (m.value for m in kept), strict=True))
    else:
      output = process.next(state, cohort)
    state = output.state
    weights.append(to_vector(process.get_model_weights(state).trainable))
  return weights, output.metrics['client_work']['train'], memories


def to_vector(weights):
  leaves = [np.ravel(w) for w in tf.nest.flatten(weights)]
  return np.concatenate(leaves).astype(np.float64)


class Oracle:
  """The network on a vector of weights, in NumPy; its gradients by TF eager."""

  def __init__(self, is_labeled):
    self.is_labeled = is_labeled
    self.inputs = 2 + 3 * is_labeled
    self.cuts = np.cumsum([6, 3 * self.inputs])

  def loss(self, w, context, batch):
    base, modulator, head = tf.split(w, [6, 3 * self.inputs, 9])
    h = np.asarray(context[0], np.float64)
    if self.is_labeled:
      h = np.concatenate([h, np.eye(3)[context[1]]], 1)
    z = np.mean(h, 0) if len(h) else np.zeros(self.inputs)
    gates = tf.sigmoid(
        tf.linalg.matvec(
            tf.reshape(modulator, [self.inputs, 3]), z, transpose_a=True
        )
    )
    hidden = tf.tanh(batch[0].astype(np.float64) @ tf.reshape(base, [2, 3]))
    logits = (hidden * gates) @ tf.reshape(head, [3, 3])
    chosen = tf.gather(tf.nn.log_softmax(logits), batch[1], batch_dims=1)
    return -tf.reduce_mean(chosen)

  def gradient(self, w, context, batch):
    w = tf.constant(w)
    with tf.GradientTape() as tape:
      tape.watch(w)
      loss = self.loss(w, context, batch)
    return loss.numpy(), tape.gradient(loss, w).numpy()


def rows(n, num_batches, seed, start, batch_size=3):
  return cyclic_batches.cyclic_minibatches(
      n, batch_size, num_batches, seed, start
  ).indices.numpy()


def naive_batches(config, xy, salt, round_num, rounds_before):
  """Two inner batches and the query set, from halves or from one stream."""
  fixed = fold_in([0, RUN_SEED], salt)
  seed = fold_in(fold_in([0, RUN_SEED], round_num), salt)
  goes_on = config.batch_position == 'persist'
  order, k = (fixed, rounds_before) if goes_on else (seed, 0)
  if config.disjoint_support_query:
    halves = [
        (part.x.numpy(), part.y.numpy())
        for part in episodes.split_support_query(
            to_examples(xy), config.support_fraction, fixed
        )
    ]
    inner = rows(len(halves[0][1]), 2, fold_in(order, 0), 2 * k)
    query = rows(len(halves[1][1]), 2, fold_in(order, 1), 2 * k)
  else:
    halves = [xy, xy]
    both = rows(len(xy[1]), 4, order, 4 * k)
    inner, query = both[:2], both[2:]
  pick = lambda part, r: (part[0][r], part[1][r])  # noqa: E731
  return [pick(halves[0], r) for r in inner], pick(halves[1], query.ravel())


def naive_client(config, w, xy, salt, round_num, adam):
  """The client's new weights and query loss; `adam` (m, v, t) is updated.

  Every client takes part in every round, numbered from 0.
  """
  oracle = Oracle(config.context_mode == 'labeled_support')
  inner, query = naive_batches(config, xy, salt, round_num, round_num)
  phi = w
  for batch in inner:
    phi = phi - 0.4 * oracle.gradient(phi, batch, batch)[1]
  context = query
  if oracle.is_labeled:
    seen = inner if config.query_context == 'support' else inner[-1:]
    context = tuple(np.concatenate(part) for part in zip(*seen, strict=True))
  loss, g = oracle.gradient(phi, context, query)
  adam[:] = 0.9 * adam[0] + 0.1 * g, 0.999 * adam[1] + 0.001 * g**2, adam[2] + 1
  m, v = adam[0] / (1 - 0.9 ** adam[2]), adam[1] / (1 - 0.999 ** adam[2])
  return w - RATE * m / (np.sqrt(v) + 1e-8), loss, len(query[1])


@pytest.mark.parametrize(
    'config',
    [
        PAPER,
        SUPPORT,
        dataclasses.replace(PAPER, context_mode='unlabeled_self'),
        RELEASE,
        dataclasses.replace(RELEASE, context_mode='labeled_support'),
        dataclasses.replace(
            RELEASE, disjoint_support_query=True, support_fraction=0.3
        ),
        dataclasses.replace(RELEASE, client_adam_state='reset'),
        dataclasses.replace(PAPER, client_adam_state='persist'),
    ],
    ids=[
        'paper',
        'paper-support',
        'paper-self',
        'release',
        'release-labeled',
        'release-parts',
        'release-anew',
        'paper-persist',
    ],
)
def test_rounds_by_hand(config):
  """Three clients, three rounds: gradient at phi_tau, one Adam step, mean."""
  build_process = plain_process.PlainProcess
  if config in (PAPER, RELEASE):  # Without memories, and with both.
    build_process = registry.build
  weights, metrics, memories = run(config, 3, build_process=build_process)
  adams = {salt: [0.0, 0.0, 0] for salt in CLIENTS}
  w = weights[0]
  for round_num in range(3):
    moved, losses, sizes = [], [], []
    for salt, xy in CLIENTS.items():
      adam = adams[salt]
      if config.client_adam_state == 'reset':
        adam = [0.0, 0.0, 0]
      after, loss, size = naive_client(config, w, xy, salt, round_num, adam)
      moved.append(after)
      losses.append(loss * size)
      sizes.append(size)
    # Uniform, though the clients have 23, 5 and 4 examples.
    w = np.mean(moved, 0)
    # A weight moves by about 1e-2 a round. Adam divides by the size of the
    # gradient, which magnifies float32 errors where that is nearly 0.
    np.testing.assert_allclose(weights[round_num + 1], w, atol=5e-4)
  np.testing.assert_allclose(metrics['loss'], sum(losses) / sum(sizes), 1e-3)
  assert metrics['num_examples'] == sum(sizes)
  options = dict(
      num_rounds=config.batch_position, adam=config.client_adam_state
  )
  kept = {name for name, option in options.items() if option == 'persist'}
  for salt, memory in memories.items():
    assert set(memory or ()) == kept
    if 'num_rounds' in kept:
      assert memory['num_rounds'] == 3
    if 'adam' in kept:
      first = to_vector(memory['adam']['accumulator'])
      np.testing.assert_allclose(first, adams[salt][0], atol=2e-5)


def client_gradient(config, seed=0, dtype=tf.float64):
  """The loss and gradient of the first client, and its parts."""
  is_labeled = config.context_mode == 'labeled_support'
  model = build_model(NUM_CLASSES, num_labels=NUM_CLASSES * is_labeled)
  weights = tf.nest.map_structure(
      lambda w: tf.cast(w, dtype), model.initialize([1, seed])
  )
  batches = cyclic_batches.support_and_query(
      to_examples(CLIENTS[5]),
      3,
      num_support=config.inner_steps,
      num_query=2,
      support_fraction=0.5,
      split_seed=[1, 2],
      order_seed=[3, 4],
  )
  gradient = functools.partial(
      cafeme.client_meta_gradient, model, config, batches=batches
  )
  return gradient, weights, batches


@pytest.mark.parametrize('config', CONTEXTS, ids=CONTEXT_IDS)
def test_second_order_against_finite_differences(config):
  """Through the inner steps and, with labels, the context's gates."""
  config = dataclasses.replace(config, maml_order=2)
  gradient, weights, _ = client_gradient(config)
  _, exact = gradient(weights=weights)
  rng = np.random.default_rng(4)
  direction = tf.nest.map_structure(
      lambda w: tf.constant(rng.normal(size=w.shape)), weights
  )

  def loss_at(step):
    moved = tf.nest.map_structure(lambda w, d: w + step * d, weights, direction)
    return gradient(weights=moved)[0].numpy()

  difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
  products = tf.nest.map_structure(
      lambda g, d: tf.reduce_sum(g * d), exact, direction
  )
  np.testing.assert_allclose(
      sum(tf.nest.flatten(products)), difference, rtol=1e-7
  )
  first_order, _, _ = client_gradient(dataclasses.replace(config, maml_order=1))
  loss, approximate = first_order(weights=weights)
  np.testing.assert_allclose(loss, loss_at(0), rtol=1e-12)
  assert np.abs(to_vector(approximate) - to_vector(exact)).max() > 0.003


class Quadratic:
  """Stands in for the network: loss (w - mean of x)^2 / 2."""

  num_labels = 0

  def modulate(self, body, x, y, mask):
    del x, y, mask
    return body['w']

  def modulated_logits(self, weights, eta, x, mask):
    del mask
    return weights['body']['w'], eta, x


@pytest.mark.parametrize('order, factor', [(1, 1.0), (2, 0.7)])
def test_one_step_on_a_quadratic(order, factor, monkeypatch):
  """By hand: g = (1 - a) (w - t_support) + t_support - t_query.

  a = 0.3, t_support = 1, t_query = 4, w = 0: phi = 0.3, g = 0.3 - 4 = -3.7;
  in second order that times (1 - a).
  """
  monkeypatch.setattr(
      cross_entropy,
      'softmax_cross_entropy',
      lambda logits, y, mask: 0.5 * (logits[0] - logits[2][0, 0]) ** 2,
  )
  config = dataclasses.replace(
      PAPER, inner_steps=1, inner_learning_rate=0.3, maml_order=order
  )
  support, query = (to_examples(([[t]], [0])) for t in (1.0, 4.0))
  batches = cyclic_batches.SupportAndQuery(
      support, cyclic_batches.cyclic_minibatches(1, 1, 1, [0, 0]), query
  )
  weights = {'body': {'w': tf.constant(0.0)}}
  loss, g = cafeme.client_meta_gradient(Quadratic(), config, weights, batches)
  np.testing.assert_allclose(loss, 0.5 * 3.7**2, rtol=1e-6)
  assert -3.7 == pytest.approx((1 - 0.3) * (0 - 1) + (1 - 4))
  np.testing.assert_allclose(g['body']['w'], -3.7 * factor, rtol=1e-6)


@pytest.mark.parametrize('order', [1, 2])
@pytest.mark.parametrize('config', CONTEXTS, ids=CONTEXT_IDS)
def test_no_inner_step_is_adam_on_the_query_batches(config, order):
  """With labels, under the gates of a context of no examples."""
  config = dataclasses.replace(config, inner_steps=0, maml_order=order)
  gradient, weights, batches = client_gradient(config)
  oracle = Oracle(config.context_mode == 'labeled_support')
  query = batches.query.x.numpy(), batches.query.y.numpy()
  context = NOBODY if oracle.is_labeled else query
  loss, g = oracle.gradient(to_vector(weights), context, query)
  actual = gradient(weights=weights)
  np.testing.assert_allclose(actual[0], loss, rtol=1e-10)
  np.testing.assert_allclose(to_vector(actual[1]), g, rtol=1e-8, atol=1e-12)


def test_adam_that_starts_anew_moves_every_weight_by_its_rate():
  """But for those of the two labels that the context has not."""
  weights, _, _ = run(PAPER, 1, {7: CLIENTS[7]})
  step = np.abs(weights[1] - weights[0])
  np.testing.assert_allclose(step[step > 0], RATE, rtol=1e-3)
  assert np.sum(step > 0) == 30 - 2 * 3


def test_identical_clients_are_one_and_sizes_do_not_count():
  one, _, _ = run(RELEASE, 2, {5: CLIENTS[5]})
  process = build(RELEASE)
  state = process.initialize()
  cohort = [data(process, 5, CLIENTS[5])] * 3
  state = process.next(state, cohort).state
  twice = to_vector(process.get_model_weights(state).trainable)
  np.testing.assert_allclose(twice, one[1], atol=1e-6)


def test_a_client_without_examples_takes_no_part():
  with_it, metrics, memories = run(
      RELEASE, 2, {**CLIENTS, 8: NOBODY}, registry.build
  )
  without, _, _ = run(RELEASE, 2, build_process=registry.build)
  np.testing.assert_allclose(with_it[-1], without[-1], atol=1e-6)
  assert memories[8]['num_rounds'] == 0
  assert metrics['num_non_finite_clients'] == 0


QUERY = make_examples((3, 3, 3), 9)


@pytest.mark.parametrize(
    'config', [PAPER, SUPPORT, RELEASE], ids=['paper', 'support', 'release']
)
def test_fine_tuning_by_hand(config):
  """Four steps; gates of the last step's batch, all examples or the query."""
  config = dataclasses.replace(config, fine_tuning_learning_rate=1.5)
  method = cafeme.cafeme(build_model(), config, NUM_CLASSES)
  use, weights = method.known_client(), method.initialize([1, 5])
  oracle = Oracle(config.context_mode == 'labeled_support')
  x, y = CLIENTS[5]
  query = to_examples(QUERY)
  curve = use.curve(weights, (), to_examples((x, y)), query, [6, 7]).numpy()
  assert curve.shape == (5, 9)
  w, context = to_vector(weights), NOBODY
  parts = [QUERY[0][i::3] for i in range(3)]  # In batches of three.

  def labels(w, context):
    losses = [
        [
            oracle.loss(
                w,
                context if oracle.is_labeled else (part, None),
                (x[np.newaxis], np.array([c])),
            )
            for c in range(3)
        ]
        for i in range(9)
        for part, x in [(parts[i % 3], QUERY[0][i])]
    ]
    return np.argmin(losses, 1)

  for step, row in enumerate([None, *rows(23, 4, [6, 7], 0)]):
    if step:
      last = x[row], y[row]
      w = w - 1.5 * oracle.gradient(w, last, last)[1]
      context = (x, y) if config.query_context == 'support' else last
    np.testing.assert_array_equal(curve[step], labels(w, context))
  assert np.any(curve[-1] != curve[0])
  adapted = use.adapt(weights, (), to_examples((x, y)), [6, 7])
  np.testing.assert_array_equal(use.predict(adapted, query), curve[-1])
  before = use.predict(use.start(weights, ()), query)
  np.testing.assert_array_equal(before, curve[0])


def test_the_published_curve_has_51_points():
  """It begins before the first step, see the test above."""
  for config in (cafeme.PAPER, cafeme.RELEASE):
    assert config.fine_tuning_steps == 50


@pytest.mark.ci
def test_rounds_of_the_convolutional_network():
  """Its small form, through TFF: losses are finite and fall."""
  process = registry.build(
      'cafeme',
      models.build('modulated_cnn', (4, 4, 1), None),
      RELEASE,
      num_classes=2,
  )
  rng = np.random.default_rng(0)
  y = np.array([0, 1] * 6, np.int32)
  x = (y - 0.5)[:, np.newaxis, np.newaxis, np.newaxis]
  x = (x + 0.5 * rng.normal(size=(12, 4, 4, 1))).astype(np.float32)
  state, memories, losses = process.initialize(), [None, None], []
  for _ in range(6):
    cohort = [
        data(process, 3, (x, y), memories[0]),
        data(process, 4, (x[:0], y[:0]), memories[1]),
    ]
    output, memories = process.next_with_memory(state, cohort)
    memories = [m.value if m.present else None for m in memories]
    state = output.state
    losses.append(output.metrics['client_work']['train']['loss'])
  assert np.isfinite(losses).all() and losses[-1] < 0.7 * losses[0]
  assert memories[0]['num_rounds'] == 6 and memories[1] is None


def test_other_networks_are_refused():
  with pytest.raises(ValueError, match="found 'mlp'. Tip: .*`modulated_mlp`"):
    registry.build(
        'cafeme', models.build('mlp', (4, 4, 1), None), PAPER, num_classes=3
    )


@pytest.mark.parametrize(
    'changes',
    [
        dict(query_batches=0),
        dict(batch_size=0),
        dict(fine_tuning_decay_steps=0),
        dict(maml_order=3),
        dict(gating='film'),
        dict(context_mode='labeled_self'),
        dict(query_context='query'),
        dict(client_adam_state='keep'),
        dict(batch_position='keep'),
        dict(support_fraction=1.0),
        dict(outer_learning_rate=-1.0),
    ],
    ids=str,
)
def test_bad_configurations(changes):
  (name,) = changes
  with pytest.raises(ValueError, match=f'`{name}`'):
    dataclasses.replace(PAPER, **changes)


def test_the_batch_itself_leaves_no_context_to_choose():
  with pytest.raises(
      ValueError,
      match="`query_context` as 'last_batch'.*'unlabeled_self'.*'support'",
  ):
    dataclasses.replace(RELEASE, query_context='support')
