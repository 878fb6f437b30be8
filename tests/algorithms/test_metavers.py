"""MetaVers in its process, against loops in NumPy and by hand."""

import dataclasses
import functools
import itertools
import math

import few_round_oracle as oracle
import numpy as np
import plain_process
import pytest
import tensorflow as tf

from tff_meta import episodes
from tff_meta import registry
from tff_meta.aggregators import margins
from tff_meta.algorithms import metavers

# Classes of 5 and 4; of 8 and 3, one short of K + Q; one class of 6.
CLIENTS = oracle.CLIENTS
SMALL = dict(shots=2, queries=2, warm_up_rounds=1, learning_rate=0.05)
SGD = dict(optimizer='sgd', learning_rate=0.5)
CONFIGS = {
    'paper': dataclasses.replace(metavers.PAPER, margin_window=2, **SMALL),
    'release': dataclasses.replace(
        metavers.RELEASE,
        margin_window=2,
        **SMALL | dict(weight_decay=0.1, gamma=0.3),
    ),
    'zero history': dataclasses.replace(
        metavers.PAPER,
        **SMALL
        | dict(
            margin_window=3,
            warm_start=False,
            initial_margin=3.0,
            local_update='model',
            **SGD,
        ),
    ),
    'all that is left': dataclasses.replace(
        metavers.RELEASE, **SMALL | dict(queries=0, ways=2, warm_up_rounds=0)
    ),
    'triplet': dataclasses.replace(
        metavers.PAPER, loss='triplet', **SMALL | SGD
    ),
    'ce': dataclasses.replace(metavers.PAPER, loss='ce', **SMALL | SGD),
    'as printed': dataclasses.replace(
        metavers.PAPER,
        squared_distance=False,
        triplet_reduction='sum',
        margin_normalizer='printed',
        **SMALL | dict(gamma=0.9),
    ),
}


@functools.cache
def build(config, build_process):
  return build_process(
      'metavers',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def margin_of(state):
  """The global margin in the server state."""
  (_, server), _ = state.client_work
  return float(server.margin)


def run(
    config,
    num_rounds,
    clients=CLIENTS,
    build_process=plain_process.PlainProcess,
):
  """Returns weights and margins before and after the rounds, and metrics."""
  process = build(config, build_process)
  state = process.initialize()
  states, metrics = [state], []
  for _ in range(num_rounds):
    output = process.next(states[-1], [c.data() for c in clients])
    states.append(output.state)
    metrics.append(output.metrics['client_work']['train'])
  weights = [
      oracle.to_vector(process.get_model_weights(s).trainable) for s in states
  ]
  return weights, [margin_of(s) for s in states], metrics


def naive_margin(config, w, pairs):
  """The mean distance of two centroids; None with fewer than two."""
  centroids = list(oracle.class_means(w, pairs).values())
  distances = [
      np.linalg.norm(a - b) for a, b in itertools.combinations(centroids, 2)
  ]
  if not distances:
    return None
  if config.margin_normalizer == 'printed':
    return 2 * sum(distances) / (len(centroids) - 1) ** 2
  return sum(distances) / len(distances)


def naive_triplet(config, w, pairs, margin):
  """The mean over classes, over positives, over negatives; or the sum."""
  per_class, total = [], 0.0
  for k, anchor in oracle.class_means(w, pairs).items():
    own = [oracle.embed(w, x) for x, label in pairs if label == k]
    others = [oracle.embed(w, x) for x, label in pairs if label != k]
    terms = []
    for p, n in itertools.product(own, others):
      if config.triplet_variant == 'eq4':
        difference = math.dist(anchor, p) - math.dist(p, n)
      else:
        difference = math.dist(anchor, p) ** 2 - math.dist(anchor, n) ** 2
      terms.append(max(difference + margin, 0.0))
    per_class.append(sum(terms) / len(terms) if terms else 0.0)
    total += sum(terms)
  if config.triplet_reduction == 'sum':
    return total
  return sum(per_class) / len(per_class)


def naive_loss(config, w, support, query, global_margin, is_hybrid, own=None):
  """`own` is the client's margin where it is a constant of the loss."""
  ce = oracle.distance_loss(
      w, query, oracle.class_means(w, support), config.squared_distance
  )
  pairs = support + query
  if config.loss == 'ce' or (config.loss == 'hybrid' and not is_hybrid):
    return ce
  margin = config.fixed_margin
  if config.loss == 'hybrid':
    own = naive_margin(config, w, pairs) if own is None else own
    margin = max(global_margin, own or 0.0)
  triplet = naive_triplet(config, w, pairs, margin)
  if config.loss == 'triplet':
    return triplet
  return config.gamma * ce + (1 - config.gamma) * triplet


def episode_of(config, client, round_num):
  round_seed = oracle.fold_in((0, oracle.RUN_SEED), round_num)
  parts = episodes.n_way_k_shot(
      client.examples(),
      oracle.NUM_CLASSES,
      oracle.fold_in(round_seed, client.salt),
      ways=config.ways,
      shots=config.shots,
      queries=config.queries,
      max_examples=config.max_whole_examples,
  )
  return [
      oracle.Client(part.x.numpy(), part.y.numpy(), client.salt).pairs()
      for part in parts
  ]


def naive_round(config, w, round_num, global_margin, clients=CLIENTS):
  """The mean gradient, the margins of the clients and the mean loss."""
  gradients, own_margins, total = [], [], np.zeros(2)
  for client in clients:
    support, query = episode_of(config, client, round_num)
    own = naive_margin(config, w, support + query)
    if own is not None and config.loss == 'hybrid':
      own_margins.append(own)

    def loss(w, pairs, own=own, support=support):
      return naive_loss(
          config,
          w,
          pairs[: len(support)],
          pairs[len(support) :],
          global_margin,
          round_num >= config.warm_up_rounds,
          own if config.margin_stop_gradient else None,
      )

    pairs = support + query
    gradients.append(oracle.gradient(loss, w, pairs) + config.weight_decay * w)
    learns = len({label for _, label in support}) > 1
    total += oracle.counted(len(pairs) * loss(w, pairs), len(pairs), learns)
  return sum(gradients) / len(clients), own_margins, total[0] / total[1]


def naive_next_margin(config, history, rounds):
  """m(t + 1) from m(1), ..., m(t) and the margins of rounds 1, ..., t."""
  t, window = len(rounds), config.margin_window
  if config.margin_rule == 'window':
    return np.mean([m for single in rounds[-window:] for m in single])
  if config.warm_start and t <= window:
    return np.mean(rounds[-1])
  past = [
      history[s - 1] if s >= 1 else config.initial_margin
      for s in range(t - window + 1, t)
  ]
  return (sum(past) + np.mean(rounds[-1])) / window


def naive_step(config, gradient, state):
  if config.optimizer == 'sgd':
    return config.learning_rate * gradient
  state['t'] = t = state.get('t', 0) + 1
  state['m'] = 0.9 * state.get('m', 0.0) + 0.1 * gradient
  state['v'] = 0.999 * state.get('v', 0.0) + 0.001 * gradient**2
  m, v = state['m'] / (1 - 0.9**t), state['v'] / (1 - 0.999**t)
  return config.learning_rate * m / (np.sqrt(v) + 1e-8)


@pytest.mark.parametrize('name', CONFIGS)
def test_rounds_against_loops(name):
  """Five rounds: warm-up, margins, both losses, the server's moments."""
  config = CONFIGS[name]
  # In TFF both rules of the margin, and both optimizers of the server.
  by_tff = name in ('release', 'zero history')
  build_process = registry.build if by_tff else plain_process.PlainProcess
  found_weights, found_margins, metrics = run(
      config, 5, build_process=build_process
  )
  w, state = found_weights[0], {}
  history, rounds = [config.initial_margin], []
  for t in range(5):
    gradient, own_margins, loss = naive_round(config, w, t, history[-1])
    w = w - naive_step(config, gradient, state)
    rounds.append(own_margins)
    margin = history[-1]
    if config.loss == 'hybrid':
      margin = naive_next_margin(config, history, rounds)
    history.append(margin)
    np.testing.assert_allclose(metrics[t]['loss'], loss, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(
        found_weights[t + 1], w, rtol=1e-3, atol=1e-4, err_msg=f'round {t}'
    )
  np.testing.assert_allclose(found_margins, history, rtol=1e-3)
  assert np.abs(w - found_weights[0]).max() > 0.04


def test_one_round_by_hand():
  """Two clients of the identity in one dimension; the rate is 1.

  Client 1 has class 0 at 0 and class 1 at 2 four times each, so L_S is at -w x
  and its derivative is 0: d(e, c) is 0 for the true class and (2 w)^2 for the
  other, L_S = log(1 + exp(-4 w^2)); at w = 1: dL_S/dw = -8 / (1 + e^4). The
  margin is 2 w = 2. eq. 4 with a constant margin 2: 0 - 2 w + 2 = 0 on the
  kink; a global margin of 3 makes it 3 - 2 w, whose derivative is -2. Client 2
  has one class: no gradient, no margin, and yet it halves the mean.
  """
  gamma, derivative = 0.25, -8 / (1 + math.exp(4))
  expected = 1 - (gamma * derivative + (1 - gamma) * -2) / 2
  config = dataclasses.replace(
      metavers.PAPER,
      shots=2,
      queries=2,
      gamma=gamma,
      initial_margin=3.0,
      warm_up_rounds=0,
      optimizer='sgd',
      learning_rate=1.0,
  )

  def embed(body, x, mask):
    del mask
    return body['kernel'][:1] * x[:, :1]

  model = dataclasses.replace(
      oracle.build_model(),
      embedding_size=1,
      init_body=lambda seed: dict(kernel=tf.ones([1])),
      embed=embed,
  )
  process = plain_process.PlainProcess('metavers', model, config, num_classes=3)

  def client(values, labels, salt):
    x = np.zeros((len(values), 2), np.float32)
    x[:, 0] = values
    return oracle.Client(x, np.array(labels, np.int32), salt).data()

  cohort = [
      client([0, 2] * 4, [0, 1] * 4, salt=1),
      client([5] * 4, [2] * 4, salt=2),
  ]
  output = process.next(process.initialize(), cohort)
  weights = process.get_model_weights(output.state).trainable
  np.testing.assert_allclose(weights['body']['kernel'], [expected], rtol=1e-6)
  np.testing.assert_allclose(margin_of(output.state), 2.0, rtol=1e-6)


@pytest.mark.parametrize('name', ['paper', 'release'])
def test_warm_up_is_the_prototypical_loss_alone(name):
  config = dataclasses.replace(CONFIGS[name], warm_up_rounds=2)
  weights, _, _ = run(config, 3)
  ce_only, _, _ = run(dataclasses.replace(config, loss='ce'), 3)
  np.testing.assert_allclose(weights[:3], ce_only[:3], atol=1e-6)
  assert np.abs(weights[3] - ce_only[3]).max() > 1e-3


def test_gamma_of_one_is_a_prototypical_network():
  config = dataclasses.replace(CONFIGS['paper'], gamma=1.0, warm_up_rounds=0)
  weights, found_margins, _ = run(config, 3)
  ce_only, _, _ = run(dataclasses.replace(config, loss='ce'), 3)
  np.testing.assert_allclose(weights, ce_only, atol=1e-6)
  assert found_margins[-1] > 0


def test_server_sgd_is_equations_5_and_6():
  """The mean of models after a step is a step along the mean gradient."""
  gradients = dataclasses.replace(CONFIGS['paper'], **SGD)
  models = dataclasses.replace(gradients, local_update='model')
  # Float32: eta is multiplied before or after the mean.
  np.testing.assert_allclose(run(gradients, 3)[0], run(models, 3)[0], rtol=1e-5)


@pytest.mark.parametrize('name', ['paper', 'release'])
def test_a_client_of_one_class_learns_nothing(name):
  config = dataclasses.replace(
      CONFIGS[name], weight_decay=0.0, initial_margin=3.0, warm_up_rounds=0
  )
  weights, found_margins, metrics = run(config, 2, CLIENTS[2:])
  np.testing.assert_array_equal(weights[2], weights[0])
  assert found_margins == [3.0] * 3
  assert np.isnan([m['loss'] for m in metrics]).all()


def test_a_client_without_an_episode_does_not_count():
  """One example per class is fewer than K; a client of one class counts."""
  config = dataclasses.replace(CONFIGS['paper'], **SGD)
  none = oracle.make_client((1, 1, 1), salt=9)
  with_it, _, _ = run(config, 1, (*CLIENTS, none))
  without, _, _ = run(config, 1)
  fewer, _, _ = run(config, 1, CLIENTS[:2])
  np.testing.assert_allclose(with_it[1], without[1], atol=1e-7)
  np.testing.assert_allclose(
      with_it[1] - with_it[0], 2 / 3 * (fewer[1] - fewer[0]), atol=1e-6
  )


def test_the_rate_halves():
  config = dataclasses.replace(CONFIGS['paper'], **SGD)
  plain, _, _ = run(config, 3)
  halved, _, _ = run(dataclasses.replace(config, halving_rounds=2), 3)
  np.testing.assert_allclose(halved[:3], plain[:3], atol=1e-7)
  np.testing.assert_allclose(
      halved[3] - halved[2], (plain[3] - plain[2]) / 2, atol=1e-6
  )


def test_episodes_differ_from_round_to_round():
  first, second = (episode_of(CONFIGS['paper'], CLIENTS[0], t) for t in (0, 1))
  assert [label for _, label in sorted_pairs(first[0])] == [0, 0, 1, 1]
  assert str(sorted_pairs(first[0])) != str(sorted_pairs(second[0]))


def sorted_pairs(pairs):
  return sorted(pairs, key=lambda pair: (pair[1], pair[0].tolist()))


def test_margin_and_loss_of_an_episode():
  """Prototypes 0 and 2, queries 0.5 and 1. The larger margin.

  L_S is (log(1 + e^-2) + log 2) / 2. Centroids are 1 / 6 and 5 / 3, so the
  client's margin is 1.5; no loss grows when a smaller global margin does.
  """
  e = tf.constant([[0.0], [0.0], [2.0], [2.0], [0.5], [1.0]])
  y = tf.constant([0, 0, 1, 1, 0, 1])
  is_support = tf.constant([1.0, 1, 1, 1, 0, 0])

  def loss(margin, **changes):
    config = dataclasses.replace(metavers.PAPER, **changes)
    message = metavers.Message(tf.constant(margin), tf.constant(True))
    return metavers.episode_loss(e, y, is_support, message, config, 3)

  ce, none = loss(0.0, loss='ce')
  expected = (math.log(1 + math.exp(-2)) + math.log(2)) / 2
  np.testing.assert_allclose(ce, expected, rtol=1e-6)
  np.testing.assert_allclose(ce, 0.410038, atol=1e-6)
  assert none.weight == 0
  (small, margin), (smaller, _), (large, _) = map(loss, (1.4, 0.0, 1.6))
  np.testing.assert_allclose(margin.value, 1.5, rtol=1e-6)
  assert margin.weight == 1 and small == smaller < large
  translated, _ = metavers.episode_loss(
      e + 7.0,
      y,
      is_support,
      metavers.Message(tf.constant(1.6), tf.constant(True)),
      metavers.PAPER,
      3,
  )
  np.testing.assert_allclose(translated, large, rtol=1e-5)


def test_a_client_uses_all_its_examples_of_classes_never_trained():
  """More than K of a class: class 1 is at (0 + 0 + 9) / 3, not at 0."""
  model = dataclasses.replace(
      oracle.build_model(), embed=lambda body, x, mask: x
  )
  weights = model.initialize([1, 2])
  config = dataclasses.replace(metavers.PAPER, shots=1)
  method = metavers.metavers(model, config, num_classes=7)
  client = method.new_class()
  assert method.known_client is method.new_client is method.new_class
  x = [[0.0, 0], [0, 0], [9, 0], [-4, 0]]
  examples = episodes.Examples(
      tf.constant(x), tf.constant([1, 1, 1, 6]), tf.ones(4)
  )
  adapted = client.adapt(weights, (), examples, tf.constant([0, 0]))
  query = episodes.Examples(
      tf.constant([[-0.4, 0.0], [-0.6, 0.0]]), tf.zeros(2, tf.int32), tf.ones(2)
  )
  assert client.predict(adapted, query).numpy().tolist() == [1, 6]


def test_ablations_differ_in_their_loss():
  for name, loss in (('metavers_ce', 'ce'), ('metavers_triplet', 'triplet')):
    for preset, config in registry.get(name).presets.items():
      expected = registry.get('metavers').presets[preset]
      assert config == dataclasses.replace(expected, loss=loss)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'gamma': 1.1}, '`gamma` of at most 1, found 1.1'),
        ({'shots': 0}, '`shots` of at least 1, found 0'),
        ({'ways': 1}, '`ways` of at least 2, or 0 .* found 1'),
        ({'margin_window': 0}, '`margin_window` of at least 1, found 0'),
        ({'local_update': 'model'}, "'sgd'.*found 'adam' and 0"),
        (
            dict(local_update='model', optimizer='sgd', halving_rounds=3),
            "found 'sgd' and 3",
        ),
    ],
    ids=str,
)
def test_impossible_configurations_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(metavers.PAPER, **change)


def test_an_empty_episode_has_no_loss_and_no_margin():
  config = CONFIGS['paper']
  message = metavers.Message(tf.constant(0.0), tf.constant(True))
  nothing = tf.zeros([0, 3]), tf.zeros([0], tf.int32), tf.zeros([0])
  loss, margin = metavers.episode_loss(*nothing, message, config, 4)
  assert loss == 0 and isinstance(margin, margins.Margin)
  assert tuple(margin) == (0.0, 0.0)
