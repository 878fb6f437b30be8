"""FRL in its process: episodes by hand, limits, presets, deployment."""

import collections
import dataclasses
import functools
import types

import few_round_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tff_meta import aggregation
from tff_meta import composition
from tff_meta import episodes
from tff_meta import method as method_lib
from tff_meta import registry
from tff_meta.aggregators import prototypes as prototypes_lib
from tff_meta.algorithms import frl
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import few_round
from tff_meta.losses import prototypical

CLIENTS = oracle.CLIENTS
FAST = {'inner_learning_rate': 0.5, 'meta_learning_rate': 0.4, 'rounds': 2}
PAPER = dataclasses.replace(frl.PAPER, **FAST, epochs=2, batch_size=2)
RELEASE = dataclasses.replace(
    frl.RELEASE, **FAST, batch_size=2, weight_decay=0.05
)
EVERY_OTHER_OPTION = dataclasses.replace(
    PAPER,
    exclude_true_class=True,
    squared_distance=False,
    prototype_mean='all',
    meta_update='first_then_plain',
)
LINEAR = dataclasses.replace(PAPER, classifier='linear', rounds=1, uniform=True)


@functools.cache
def build(config, num_classes=oracle.NUM_CLASSES):
  return registry.build(
      'frl',
      oracle.build_model(),
      config,
      num_classes=num_classes,
      seed=oracle.RUN_SEED,
  )


def run(config, num_rounds, clients=CLIENTS, state=None):
  """Returns the states before, between and after rounds, and the outputs."""
  process = build(config)
  states, outputs = [state or process.initialize()], []
  for _ in range(num_rounds):
    outputs.append(process.next(states[-1], [c.data() for c in clients]))
    states.append(outputs[-1].state)
  return states, outputs


def run_plain(config, num_rounds):
  """The same of new clients without TFF, whose process takes long to build."""
  model, num_classes = oracle.build_model(), oracle.NUM_CLASSES
  client_update = frl.frl(model, config, num_classes).client_update
  kind = {
      'linear': classifiers.LinearClassifier,
      'distance': classifiers.DistanceClassifier,
  }[config.classifier]
  classifier = kind(model, num_classes)
  phi = classifier.initialize(composition.initial_seed(oracle.RUN_SEED))
  state = frl.start_episode(phi, tf.constant(0), classifier, config)
  specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, state)
  x, y = tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)

  @tf.function(
      autograph=False,
      input_signature=[specs, x, y, tf.TensorSpec([], tf.int32)],
  )
  def update(state, x, y, salt):
    data = client_work.ClientData(
        episodes.Examples(x, y, tf.ones(tf.shape(y))), salt
    )
    return client_update(state, tf.constant([0, oracle.RUN_SEED]), data)

  states, outputs = [], []
  for _ in range(num_rounds):
    states.append(types.SimpleNamespace(global_model_weights=state))
    sent = [update(state, c.x, c.y, c.salt) for c in CLIENTS]
    weights = [o.update_weight for o in sent]
    sums = [
        prototypical.weigh_prototypes(o.update.prototypes, weight)
        for o, weight in zip(sent, weights, strict=True)
    ]
    sums = tf.nest.map_structure(lambda *parts: sum(parts), *sums)
    mean = prototypes_lib.ModelAndPrototypes(
        tf.nest.map_structure(
            lambda *models, weights=weights: oracle.mean(models, weights),
            *(o.update.model for o in sent),
        ),
        prototypical.divide_prototypes(sums, config.prototype_mean),
    )
    state = frl.next_state(state, mean, classifier, config)
    reports = [o.report for o in sent if o.learned]
    count = sum(report.num_examples for report in reports)
    loss_sum = sum(report.loss_sum for report in reports)
    train = {
        'loss': loss_sum / count if count else np.nan,
        'num_examples': count,
    }
    outputs.append(
        types.SimpleNamespace(metrics={'client_work': {'train': train}})
    )
  states.append(types.SimpleNamespace(global_model_weights=state))
  return states, outputs


def phi_of(state):
  return oracle.to_vector(state.global_model_weights.phi)


def theta_of(state):
  return oracle.to_vector(state.global_model_weights.theta)


def client_seed(client, episode):
  episode_seed = oracle.fold_in((0, oracle.RUN_SEED), episode)
  return oracle.fold_in(episode_seed, client.salt)


def halves(client, config, episode):
  seed = oracle.fold_in(client_seed(client, episode), 0)
  return oracle.split(client, config.support_fraction, seed)


def loss_of(config, prototypes, stored=None):
  """Eq. 2 and 3 for the group's prototypes and, at the end, the stored ones."""
  if config.classifier == 'linear':
    return oracle.cross_entropy
  options = (config.squared_distance, config.exclude_true_class)

  def loss(w, pairs):
    own = oracle.class_means(w, pairs) if stored is None else stored
    local = oracle.distance_loss(w, pairs, own, *options)
    if not prototypes:
      return local
    auxiliary = oracle.distance_loss(w, pairs, prototypes, *options)
    return config.local_weight * local + config.aux_weight * auxiliary

  return loss


def tells_apart(config, own, prototypes):
  """Whether a loss is over more than one class, of the client or of all."""
  if config.classifier == 'linear':
    return True
  return len(own) > 1 or (config.gpal and len(prototypes) > 1)


def naive_round(config, theta, prototypes, clients, episode, round_num):
  """Algorithm 1, lines 9 to 14: theta, prototypes, uploads, loss."""
  trained, uploads, weights, total = [], [], [], np.zeros(2)
  for client in clients:
    support, _ = halves(client, config, episode)
    w, *losses = oracle.descend(
        loss_of(config, prototypes),
        theta,
        oracle.batches_of(
            support,
            config.batch_size,
            oracle.fold_in(client_seed(client, episode), 1 + round_num),
            config.epochs,
        ),
        oracle.plain_sgd(config.inner_learning_rate),
        config.weight_decay,
    )
    at = theta if config.prototype_source == 'downloaded' else w
    is_linear = config.classifier == 'linear'
    uploads.append({} if is_linear else oracle.class_means(at, support))
    trained.append(w)
    weights.append(1 if config.uniform else len(support))
    own = {label for _, label in support}
    total += oracle.counted(*losses, tells_apart(config, own, prototypes))
  theta = oracle.mean(trained, weights)
  prototypes = oracle.mean_of_holders(uploads, weights, config.prototype_mean)
  return theta, prototypes, uploads, total[0] / total[1]


def naive_meta_update(
    config, phi, theta, prototypes, uploads, clients, episode
):
  """Algorithm 1, lines 18 to 21: phi, loss."""
  moved, weights, total = [], [], np.zeros(2)
  for client, upload in zip(clients, uploads, strict=True):
    _, query = halves(client, config, episode)
    stored = config.meta_prototypes == 'stored_support'
    loss = loss_of(config, prototypes, upload if stored else None)
    one_step = config.meta_update == 'single_full_query'
    seed = oracle.fold_in(client_seed(client, episode), 1 + config.rounds)
    batches = oracle.batches_of(
        query, 0 if one_step else config.batch_size, seed
    )
    w, loss_sum = phi, 0.0
    for number, batch in enumerate(batches):
      point = theta if number == 0 else w
      g = oracle.gradient(loss, point, batch)
      loss_sum += len(batch) * loss(point, batch)
      w = w - config.meta_learning_rate * (g + config.weight_decay * w)
    own = upload if stored else {label for _, label in query}
    total += oracle.counted(
        loss_sum, len(query), tells_apart(config, own, prototypes)
    )
    moved.append(w)
    weights.append(1 if config.uniform else len(client.y))
  return oracle.mean(moved, weights), total[0] / total[1]


@pytest.mark.parametrize(
    'config',
    [PAPER, RELEASE, EVERY_OTHER_OPTION, LINEAR],
    ids=['paper', 'release', 'every other option', 'linear'],
)
def test_two_episodes_by_hand(config):
  """Every state of two episodes is that of the loops, from phi on.

  The oracle never stores anything on a client either: it hands the uploads of
  the last round to the meta-update.
  """
  tolerance = oracle.TOLERANCE
  if not config.squared_distance:
    # Where an example is its class's only one, the root of a rounding error of
    # 1e-7 in the squared distance, which is zero, is 3e-4.
    tolerance = {'rtol': 1e-3, 'atol': 1e-4}
  length = config.rounds + 1
  # Other tests run these two in TFF, too.
  in_tff = config in (PAPER, RELEASE)
  states, outputs = (run if in_tff else run_plain)(config, 2 * length)
  for episode in range(2):
    phi = theta = phi_of(states[episode * length])
    prototypes = {}
    for r in range(config.rounds):
      theta, prototypes, uploads, loss = naive_round(
          config, theta, prototypes, CLIENTS, episode, r
      )
      number = episode * length + r
      state = states[number + 1].global_model_weights
      assert state.phase == r + 1
      np.testing.assert_array_equal(phi_of(states[number + 1]), phi)
      np.testing.assert_allclose(
          theta_of(states[number + 1]), theta, **tolerance
      )
      oracle.assert_prototypes(state.prototypes, prototypes, **tolerance)
      train = outputs[number].metrics['client_work']['train']
      np.testing.assert_allclose(train['loss'], loss, **tolerance)
    phi, loss = naive_meta_update(
        config, phi, theta, prototypes, uploads, CLIENTS, episode
    )
    number = episode * length + config.rounds
    state = states[number + 1].global_model_weights
    np.testing.assert_allclose(phi_of(states[number + 1]), phi, **tolerance)
    np.testing.assert_array_equal(
        theta_of(states[number + 1]), phi_of(states[number + 1])
    )
    assert state.phase == 0 and not np.any(state.prototypes.present)
    train = outputs[number].metrics['client_work']['train']
    np.testing.assert_allclose(train['loss'], loss, **tolerance)
    assert train['num_examples'] == 14
  # Or the numbers above would hardly change.
  assert np.abs(theta - phi_of(states[0])).max() > 0.01
  assert np.abs(phi - phi_of(states[0])).max() > 0.01


@dataclasses.dataclass(frozen=True)
class Quadratic:
  """`loss = 0.5 (theta - x)^2`, with no prototypes that matter."""

  def initialize(self, seed):
    del seed
    body = collections.OrderedDict(theta=tf.constant(0.0))
    return collections.OrderedDict(body=body, head=collections.OrderedDict())

  def no_prototypes(self):
    return prototypical.Prototypes(tf.zeros([2, 3]), tf.zeros([2]))

  def prototypes(self, weights, examples):
    del weights, examples
    return self.no_prototypes()

  def loss(self, weights, batch, global_prototypes, local_prototypes=None):
    del global_prototypes, local_prototypes
    return 0.5 * tf.reduce_mean((weights['body']['theta'] - batch.x[:, 0]) ** 2)


def test_first_order_meta_step(monkeypatch):
  """f_k = (theta - t_k)^2 / 2, t = (1, 3), phi = 0, a = 1/2.

  Round: theta_k = 0 - a (0 - t_k) = (0.5, 1.5), so theta^1 = 1. At theta^1 the
  gradients are (1 - 1, 1 - 3) = (0, -2), and phi' = 0 - b mean(0, -2) = b. With
  d theta^1 / d phi = 1 - a instead of 1, it would be b / 2.
  """
  monkeypatch.setattr(classifiers, 'LinearClassifier', lambda *_: Quadratic())
  config = dataclasses.replace(
      frl.PAPER,
      classifier='linear',
      rounds=1,
      batch_size=0,
      inner_learning_rate=0.5,
      meta_learning_rate=0.25,
  )
  process = registry.build('frl', oracle.build_model(), config, num_classes=2)
  clients = [
      oracle.Client(np.full((4, 2), t, np.float32), np.zeros(4, np.int32), t)
      for t in (1, 3)
  ]
  state = process.initialize()
  for expected_theta, expected_phi in ((1.0, 0.0), (0.25, 0.25)):
    state = process.next(state, [c.data() for c in clients]).state
    found = state.global_model_weights
    assert found.theta['body']['theta'] == expected_theta
    assert found.phi['body']['theta'] == expected_phi


def test_without_rounds_it_is_fed_sgd_on_the_query_loss():
  """R = 0, phi' = phi - b sum_k n_k grad L_local(phi) / n."""
  config = dataclasses.replace(PAPER, rounds=0)
  states, _ = run_plain(config, 2)
  phi = phi_of(states[0])
  for episode in range(2):
    gradients = []
    for client in CLIENTS:
      _, query = halves(client, config, episode)
      gradients.append(oracle.gradient(loss_of(config, {}), phi, query))
    phi = phi - 0.4 * oracle.mean(gradients, [9, 11, 6])
    np.testing.assert_allclose(
        phi_of(states[episode + 1]), phi, **oracle.TOLERANCE
    )


def test_a_client_with_one_class_that_is_left_out_did_not_train():
  """L_local is then over no example; L_aux is over all of them afterwards."""
  config = dataclasses.replace(PAPER, exclude_true_class=True)
  start = state_in(config, 0)
  nobody = start.prototypes._replace(present=tf.zeros([4]))
  start = start._replace(prototypes=nobody)
  first = eager_update(config, 0, start, CLIENTS[2])
  assert not first.learned
  second = eager_update(config, 1, client=CLIENTS[2])
  assert second.learned and np.isfinite(second.report.loss_sum)


def test_a_client_with_one_class():
  """L_local is over one class at r = 0, L_aux moves it afterwards."""
  states, outputs = run(PAPER, 1, clients=CLIENTS[2:])
  train = outputs[0].metrics['client_work']['train']
  assert np.isnan(train['loss']) and train['num_trained_clients'] == 0
  np.testing.assert_array_equal(theta_of(states[1]), theta_of(states[0]))

  group_states, _ = run(PAPER, 1)
  states, outputs = run(PAPER, 1, CLIENTS[2:], state=group_states[1])
  assert outputs[0].metrics['client_work']['train']['loss'] > 0.01
  assert np.abs(theta_of(states[1]) - theta_of(states[0])).max() > 1e-3


def test_a_mean_over_nobody_changes_nothing():
  """In the rounds of the group and in the meta-update."""
  nobody = tf.nest.map_structure(lambda w: w * np.nan, state_in(PAPER, 0).phi)
  for phase in (0, PAPER.rounds):
    state = state_in(PAPER, phase)
    classifier = classifiers.DistanceClassifier(
        oracle.build_model(), oracle.NUM_CLASSES
    )
    update = prototypes_lib.ModelAndPrototypes(nobody, state.prototypes)
    after = frl.next_state(state, update, classifier, PAPER)
    before = state.phi if phase else state.theta
    tf.nest.map_structure(np.testing.assert_array_equal, after.theta, before)


@pytest.mark.parametrize('noisy', [False, True])
def test_a_class_keeps_its_prototype_while_its_holders_are_missing(noisy):
  """Class 3 is new, 1 is of this round, 0 and 2 are held by nobody."""
  state = state_in(PAPER, 1)
  old, new = state.prototypes, prototypical.Prototypes(
      tf.constant([[0.0] * 3, [1.0] * 3, [0.0] * 3, [3.0] * 3]),
      tf.constant([0.0, 1.0, 0.0, 1.0]),
  )
  classifier = classifiers.DistanceClassifier(
      oracle.build_model(), oracle.NUM_CLASSES
  )
  nothing = tf.nest.map_structure(tf.zeros_like, state.theta)
  update = prototypes_lib.ModelAndPrototypes(nothing, new)
  found = frl.next_state(
      state, update, classifier, PAPER, noisy=noisy
  ).prototypes
  rows = [new.means[0], [1] * 3, new.means[2], [3] * 3]
  if not noisy:
    rows[0], rows[2] = old.means[0], old.means[2]
  np.testing.assert_array_equal(found.means, rows)
  np.testing.assert_array_equal(
      found.present, new.present if noisy else [1, 1, 1, 1]
  )
  after = state_in(PAPER, PAPER.rounds)
  after = frl.next_state(after, update, classifier, PAPER, noisy=noisy)
  assert not np.any(after.prototypes.present)


@pytest.mark.ci
def test_only_a_private_aggregation_is_noisy(monkeypatch):
  seen, next_state = [], frl.next_state

  def recording(*args, noisy):
    seen.append(noisy)
    return next_state(*args, noisy=noisy)

  monkeypatch.setattr(frl, 'next_state', recording)
  for chosen in (
      aggregation.Plain(),
      aggregation.DifferentiallyPrivate(
          noise_multiplier=1.0, clients_per_round=3, clip=1.0, channel_bound=1.0
      ),
  ):
    registry.build(
        'frl', oracle.build_model(), PAPER, 4, seed=1, aggregation=chosen
    )
  assert (seen[0], seen[-1]) == (False, True)


def test_batches_of_one_example_tell_nothing_apart():
  """At r = 0; from then on the prototypes of all do."""
  config = dataclasses.replace(PAPER, batch_size=1)
  start = state_in(config, 0)
  nobody = start.prototypes._replace(present=tf.zeros([4]))
  first = eager_update(config, 0, start._replace(prototypes=nobody))
  second = eager_update(config, 1)
  assert not first.learned and second.learned
  assert second.report.loss_sum > 0


def test_decay_alone_shrinks_the_weights():
  """(1 - a wd) for each of the two minibatches."""
  states, _ = run(RELEASE, 1, clients=CLIENTS[2:])
  expected = (1 - 0.5 * 0.05) ** 2 * theta_of(states[0])
  np.testing.assert_allclose(theta_of(states[1]), expected, rtol=1e-6)


def test_the_first_round_ignores_prototypes():
  """Garbage where no class is present changes nothing."""
  (start, expected), _ = run(PAPER, 1)
  garbage = prototypical.Prototypes(
      np.full((4, 3), 7.0, np.float32), np.zeros(4, np.float32)
  )
  weights = start.global_model_weights._replace(prototypes=garbage)
  (_, found), _ = run(
      PAPER, 1, state=start._replace(global_model_weights=weights)
  )
  np.testing.assert_array_equal(theta_of(found), theta_of(expected))


def global_prototypes():
  return prototypical.Prototypes(
      tf.constant([[0.5, 0.0, 0.2], [-0.6, 0.3, 0.0], [0, -0.4, 0.9], [0] * 3]),
      tf.constant([1.0, 1.0, 1.0, 0.0]),
  )


def state_in(config, phase):
  """A state with other phi, theta and prototypes in any phase."""
  model = oracle.build_model()
  phi, theta = (model.initialize(tf.constant([seed, 0])) for seed in (1, 2))
  previous = (theta, global_prototypes())
  return frl.FrlState(
      phi,
      theta,
      global_prototypes(),
      tf.constant(phase),
      tf.constant(0),
      previous if config.meta_prototypes == 'stored_support' else (),
  )


def eager_update(config, phase, state=None, client=CLIENTS[1]):
  """The update of a client outside of TFF."""
  method = frl.frl(oracle.build_model(), config, oracle.NUM_CLASSES)
  data = client.data()
  return method.client_update(
      state or state_in(config, phase),
      tf.constant([5, 6]),
      client_work.ClientData(
          episodes.to_examples(data['examples']),
          episodes.to_salt(data['salt']),
      ),
  )


@pytest.mark.parametrize('phase', [1, 2], ids=['train', 'meta'])
@pytest.mark.parametrize('preset', [PAPER, RELEASE], ids=['paper', 'release'])
def test_release_combines_to_1_2_times_paper(phase, preset):
  """(1, 0.2) = 1.2 (5/6, 1/6), so a step is 1.2 as long."""
  # At rate 0 the round that is replayed in the meta-update stores the same.
  common = dataclasses.replace(
      preset,
      weight_decay=0.0,
      batch_size=0,
      epochs=1,
      inner_learning_rate=0.5 if phase < 2 else 0.0,
  )
  paper, release = (
      eager_update(
          dataclasses.replace(
              common, local_weight=p.local_weight, aux_weight=p.aux_weight
          ),
          phase,
      )
      for p in (frl.PAPER, frl.RELEASE)
  )
  paper, release = (oracle.to_vector(u.update.model) for u in (paper, release))
  assert np.abs(paper).max() > 1e-3
  # The differences of float32 weights of order 1.
  np.testing.assert_allclose(release, 1.2 * paper, rtol=1e-4, atol=3e-7)


def test_the_stored_prototypes_are_those_uploaded_last(monkeypatch):
  """Bit for bit, although the client stores nothing and replays its round."""
  seen = []

  class Recording(classifiers.DistanceClassifier):

    def loss(self, weights, batch, global_prototypes, local_prototypes=None):
      seen.append(local_prototypes)
      return super().loss(weights, batch, global_prototypes, local_prototypes)

  monkeypatch.setattr(classifiers, 'DistanceClassifier', Recording)
  classifier = Recording(
      oracle.build_model(), oracle.NUM_CLASSES, local_weight=1.0, aux_weight=0.2
  )
  state = frl.start_episode(
      classifier.initialize(tf.constant([1, 2])),
      tf.constant(0),
      classifier,
      RELEASE,
  )
  for phase in range(RELEASE.rounds):
    upload = eager_update(RELEASE, phase, state)
    state = frl.next_state(state, upload.update, classifier, RELEASE)
  seen.clear()
  eager_update(RELEASE, RELEASE.rounds, state)
  # The replay trains against its batches' own prototypes; three query batches
  # follow it.
  stored = [prototypes for prototypes in seen if prototypes is not None]
  assert len(stored) == 3 and seen[-3:] == stored
  for prototypes in stored:
    tf.nest.map_structure(
        np.testing.assert_array_equal, prototypes, upload.update.prototypes
    )
  assert stored[0].present.numpy().tolist() == [0, 1, 1, 0]


def group(clients=CLIENTS):
  """The clients as a group: all examples are support, padded to 11."""
  size = max(len(c.y) for c in clients)

  def padded(array, fill):
    missing = [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1)
    return np.pad(array, missing, constant_values=fill)

  support = few_round.episodes.Examples(
      np.stack([padded(c.x, 99.0) for c in clients]),
      np.stack([padded(c.y, 1) for c in clients]),
      np.stack([padded(np.ones(len(c.y), np.float32), 0) for c in clients]),
  )
  salts = tf.constant([c.salt for c in clients])
  return tf.nest.map_structure(tf.constant, support), salts


def adapt_from(weights, config):
  """What the personalizer makes of the group."""
  method = frl.frl(oracle.build_model(), config, oracle.NUM_CLASSES)
  deployed = method.group()
  support, salts = group()
  theta, prototypes = deployed.adapt(
      weights, support, salts, tf.constant([3, 4])
  )
  return oracle.to_vector(theta), prototypes


@functools.cache  # It takes seconds.
def adapt(config):
  """The same from fixed weights."""
  weights = oracle.build_model().initialize(tf.constant([1, 2]))
  return adapt_from(weights, config)


def test_deployment_is_the_rounds_of_an_episode():
  """adapt(phi) is theta^R and Gamma^{R-1} of the process on the same examples.

  A support share of 1 - 1e-12 makes all examples support (and the meta-update
  one without queries, which leaves phi); whole batches leave nothing to chance.
  """
  config = dataclasses.replace(
      RELEASE,
      batch_size=0,
      support_fraction=1 - 1e-12,
      deployment_batch_size=0,
      deployment_learning_rate=RELEASE.inner_learning_rate,
  )
  states, _ = run_plain(config, 3)
  phi = tf.nest.map_structure(tf.constant, states[0].global_model_weights.phi)
  theta, prototypes = adapt_from(phi, config)
  trained = states[2].global_model_weights
  # The server adds mean differences there and averages weights here.
  np.testing.assert_allclose(theta, theta_of(states[2]), rtol=1e-5, atol=1e-6)
  oracle.assert_prototypes(
      trained.prototypes,
      {c: prototypes.means[c].numpy() for c in range(3)},
      rtol=1e-5,
      atol=1e-6,
  )
  np.testing.assert_array_equal(phi_of(states[3]), phi_of(states[0]))


DEPLOYED = dataclasses.replace(
    PAPER, epochs=1, deployment_learning_rate=0.5, deployment_batch_size=6
)


@pytest.mark.ci
def test_deployment_has_its_own_rate_and_batch_size():
  """And the other settings of a round."""
  one_round = dataclasses.replace(DEPLOYED, rounds=1)
  expected, _ = adapt(one_round)
  same, _ = adapt(
      dataclasses.replace(one_round, inner_learning_rate=9.0, batch_size=1)
  )
  np.testing.assert_array_equal(same, expected)
  for change in (
      {'deployment_learning_rate': 0.25},
      {'deployment_batch_size': 0},
      {'epochs': 2},
      {'weight_decay': 0.1},
      {'uniform': True},
      {'squared_distance': False},
      {'exclude_true_class': True},
  ):
    other, _ = adapt(dataclasses.replace(one_round, **change))
    assert np.abs(other - expected).max() > 1e-4, change


def test_no_gpal_is_the_local_loss_alone():
  """The weight gamma = 1 removes GPAL in all rounds."""
  without, prototypes = adapt(dataclasses.replace(DEPLOYED, gpal=False))
  gamma_1, same_prototypes = adapt(
      dataclasses.replace(DEPLOYED, local_weight=1.0, aux_weight=0.0)
  )
  np.testing.assert_array_equal(gamma_1, without)
  tf.nest.map_structure(
      np.testing.assert_array_equal, prototypes, same_prototypes
  )
  assert prototypes.present.numpy().tolist() == [1, 1, 1, 0]
  with_gpal, _ = adapt(DEPLOYED)
  assert np.abs(with_gpal - without).max() > 1e-3


def test_the_options_of_the_prototypes_reach_deployment():
  """At one round: divided by the weight of all, class 0 shrinks by 9 / 26."""
  config = dataclasses.replace(DEPLOYED, rounds=1)
  _, holders = adapt(config)
  _, all_clients = adapt(dataclasses.replace(config, prototype_mean='all'))
  np.testing.assert_allclose(
      all_clients.means[0], 9 / 26 * holders.means[0], rtol=1e-5
  )
  _, updated = adapt(dataclasses.replace(config, prototype_source='updated'))
  assert np.abs(updated.means - holders.means).max() > 1e-3


def test_a_new_group_is_classified_by_its_own_prototypes():
  """The zero row of the absent class 3 attracts nothing."""
  config = dataclasses.replace(DEPLOYED, rounds=1)
  deployed = frl.frl(oracle.build_model(), config, num_classes=4).group()
  weights = oracle.build_model().initialize(tf.constant([1, 2]))
  theta, prototypes = adapt(config)
  support, salts = group()
  adapted = deployed.adapt(weights, support, salts, tf.constant([3, 4]))
  query = oracle.make_client((6, 7, 8), salt=9)
  predicted = deployed.predict(adapted, query.examples()).numpy()
  expected = []
  for x in query.x:
    e = oracle.embed(theta, x)
    distances = [np.sum((e - prototypes.means[c]) ** 2) for c in range(3)]
    expected.append(int(np.argmin(distances)))
  assert predicted.tolist() == expected
  assert len(set(expected)) == 3


def test_deployment_without_rounds_is_refused():
  config = dataclasses.replace(frl.PAPER, rounds=0)
  with pytest.raises(ValueError, match='`rounds` of at least 1, found 0'):
    frl.frl(oracle.build_model(), config, num_classes=3).group()


def test_changes_of_theta_and_phi_have_no_center_in_common():
  with pytest.raises(ValueError, match='every round by itself .*centered'):
    method_lib.build_process(
        frl.frl(oracle.build_model(), PAPER, oracle.NUM_CLASSES),
        oracle.build_model(),
        aggregation=aggregation.Robust(rule='centered'),
    )


def test_model_weights_are_phi():
  """Reading gives phi in any phase; writing starts an episode from it."""
  process = build(RELEASE)
  states, _ = run(RELEASE, 1)
  phi = process.get_model_weights(states[1]).trainable
  np.testing.assert_array_equal(oracle.to_vector(phi), phi_of(states[0]))
  doubled = tf.nest.map_structure(lambda w: 2 * w, phi)
  weights = process.get_model_weights(states[1])
  written = process.set_model_weights(
      states[1], weights._replace(trainable=doubled)
  )
  state = written.global_model_weights
  assert state.phase == 0 and not state.prototypes.present.any()
  for found in (state.phi, state.theta, state.previous[0]):
    np.testing.assert_array_equal(
        oracle.to_vector(found), 2 * phi_of(states[0])
    )


def test_weights_set_in_an_episode_begin_the_next_one():
  """The split follows the episode's number, not the rounds done before."""
  process = build(RELEASE)
  states, _ = run(RELEASE, 2)
  written = process.set_model_weights(
      states[2], process.get_model_weights(states[2])
  )
  episodes_seen = []
  for _ in range(RELEASE.rounds + 2):
    episodes_seen.append(int(written.global_model_weights.episode))
    written = process.next(written, [c.data() for c in CLIENTS]).state
  assert episodes_seen == [1] * (RELEASE.rounds + 1) + [2]


def test_a_linear_classifier_stores_no_prototypes():
  """So no third model is sent, and the episode is the same."""
  release = dataclasses.replace(LINEAR, meta_prototypes='stored_support')
  (first, *_, last), _ = run_plain(release, 2)
  assert first.global_model_weights.previous == ()
  (*_, expected), _ = run_plain(LINEAR, 2)
  np.testing.assert_array_equal(phi_of(last), phi_of(expected))


def test_support_prototypes_need_a_round_to_be_stored_in():
  with pytest.raises(ValueError, match='`rounds` of at least 1.*found 0'):
    dataclasses.replace(frl.RELEASE, rounds=0)
