"""FedPAC: aligned features, and heads combined for every client."""

import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
from scipy import optimize
import tensorflow as tf

from tff_meta import composition
from tff_meta import registry
from tff_meta.aggregators import bounds
from tff_meta.baselines import fed_pac
from tff_meta.baselines import fed_rep
from tff_meta.learners import head_combination

CLIENTS = oracle.CLIENTS
# The first client comes late, to heads of others alone, and has a class without
# a mean of all clients. In the third round nobody holds class 0, and a client
# was not there the round before, as in the last.
COHORTS = (CLIENTS[1:], CLIENTS[::2], CLIENTS[1:], CLIENTS)
CONFIG = fed_pac.FedPacConfig(
    learning_rate=0.2,
    head_learning_rate=0.3,
    momentum=0.5,
    epochs=2,
    batch_size=4,
    weight_decay=0.1,
    alignment_weight=2.0,
    slots=2,
)


def build(config, build_process=plain_process.PlainProcess):
  return build_process(
      'fed_pac',
      oracle.build_model(),
      config,
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )


def initial_vector():
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  seed = composition.initial_seed(oracle.RUN_SEED)
  return oracle.to_vector(model.initialize(seed))


def naive_statistics(w, pairs):
  """Both statistics, as the authors have them: class by class."""
  h, v = np.zeros([oracle.NUM_CLASSES, 3]), 0.0
  for label in range(oracle.NUM_CLASSES):
    es = [oracle.embed(w, x) for x, y in pairs if y == label]
    if es:
      share, mean = len(es) / len(pairs), np.mean(es, axis=0)
      h[label] = share * mean
      v += share * np.mean([e @ e for e in es]) - share**2 * mean @ mean
  return h, v / len(pairs)


def naive_weights(h, candidates):
  """By an exact solver; without those below 0.001.

  The least of `x P x / 2 - sum(x)` over x >= 0, divided by its sum.
  """
  bias = np.stack([np.ravel(h - other) for other, _ in candidates])
  factor = np.linalg.cholesky(
      np.diag([v for _, v in candidates]) + bias @ bias.T
  )
  ones = np.ones(len(candidates))
  weights, _ = optimize.nnls(factor.T, np.linalg.solve(factor, ones))
  weights /= weights.sum()
  weights = np.where(weights > 1e-3, weights, 0.0)
  return weights / weights.sum()


def naive_head(client, kept, own, slots, round_num):
  """The head that a client begins its round with.

  Args:
    client: Who.
    kept: Salt -> (head, statistics, slot, round).
    own: Its statistics now.
    slots: Slot -> list of (head, statistics) of the round before.
    round_num: Of this round.
  """
  others = dict(slots)
  candidates = []
  if client.salt in kept:
    head, statistics, slot, its_round = kept[client.salt]
    if its_round == round_num - 1:
      own = statistics
      others.pop(slot)
    candidates.append((head, own))
  for members in others.values():
    heads, (hs, vs) = [m[0] for m in members], zip(
        *(m[1] for m in members), strict=True
    )
    candidates.append(
        (
            np.mean(heads, axis=0),
            (np.mean(hs, axis=0), np.sum(vs) / len(members) ** 2),
        )
    )
  if not candidates:
    return initial_vector()[personal.HEAD]
  weights = naive_weights(own[0], [statistics for _, statistics in candidates])
  return sum(w * head for w, (head, _) in zip(weights, candidates, strict=True))


def naive_client(w, client, targets, config, seeds):
  """Epochs on the head, then aligned ones on the body."""
  w, head_loss, head_count = personal.train(
      w,
      client.pairs(),
      config,
      seeds[0],
      config.head_epochs,
      personal.HEAD,
      rate=config.head_learning_rate,
  )

  def loss(w, pairs):
    squares = [
        np.mean((oracle.embed(w, x) - targets[label]) ** 2)
        for x, label in pairs
        if label in targets
    ]
    pull = config.alignment_weight * sum(squares) / len(pairs)
    return oracle.cross_entropy(w, pairs) + pull

  w, loss_sum, count = oracle.descend(
      loss,
      w,
      oracle.batches_of(
          client.pairs(), config.batch_size, seeds[1], config.epochs
      ),
      personal.naive_optimizer(
          'sgd', config.learning_rate, config.momentum, personal.BODY
      ),
      config.weight_decay,
  )
  return w, head_loss + loss_sum, head_count + count


@pytest.mark.parametrize(
    'slots, build_process',
    [(2, registry.build), (200, plain_process.PlainProcess)],
)
def test_four_rounds_by_a_naive_implementation(slots, build_process):
  config = dataclasses.replace(CONFIG, slots=slots)

  result = personal.run(build(config, build_process), COHORTS)

  w, kept, in_slots, means = initial_vector(), {}, {}, {}
  shared = 0
  for round_num, cohort in enumerate(COHORTS):
    trained, sizes, uploads, next_slots = [], [], {}, {}
    loss_sum, count = 0.0, 0
    for client in cohort:
      pairs = client.pairs()
      seeds = tf.unstack(
          tf.random.experimental.stateless_split(
              personal.client_seed(round_num, client), num=3
          )
      )
      start = w.copy()
      statistics = naive_statistics(start, pairs)
      start[personal.HEAD] = naive_head(
          client, kept, statistics, in_slots, round_num
      )
      targets = oracle.class_means(start, pairs) | means if means else {}
      own, its_loss, its_count = naive_client(
          start, client, targets, config, seeds
      )
      loss_sum, count = loss_sum + its_loss, count + its_count
      slot = int(
          tf.random.stateless_uniform([], seeds[2], 0, slots, dtype=tf.int32)
      )
      head = own[personal.HEAD]
      kept[client.salt] = head, statistics, slot, round_num
      next_slots.setdefault(slot, []).append((head, statistics))
      for label, mean in oracle.class_means(own, pairs).items():
        number = np.sum(client.y == label)
        uploads.setdefault(label, []).append((number, mean))
      trained.append(own)
      sizes.append(len(client.y))
    w = oracle.mean(trained, sizes)
    in_slots = next_slots
    shared += sum(len(members) > 1 for members in in_slots.values())
    for label, held in uploads.items():
      means[label] = sum(n * m for n, m in held) / sum(n for n, _ in held)
    tolerance = dict(rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        oracle.to_vector(result.weights[round_num + 1]),
        w[personal.BODY],
        **tolerance,
    )
    for salt, memory in result.heads[round_num].items():
      head, (h, v), slot, its_round = kept[salt]
      np.testing.assert_allclose(
          personal.head_vector(memory['head']), head, **tolerance
      )
      np.testing.assert_allclose(memory['statistics'].features, h, **tolerance)
      np.testing.assert_allclose(memory['statistics'].variance, v, **tolerance)
      assert (memory['slot'], memory['round']) == (slot, its_round)
    np.testing.assert_allclose(
        result.metrics[round_num]['loss'], loss_sum / count, rtol=1e-3
    )
  (_, state), _ = result.state.client_work
  oracle.assert_prototypes(state.prototypes, means, rtol=1e-3, atol=1e-4)
  assert (shared > 0) == (slots == 2)  # Clients met in a slot, or did not.


def test_without_heads_of_others_a_client_goes_on_with_its_own():
  """Which is then FedRep without its heads' many epochs, but for the pull."""
  config = dataclasses.replace(CONFIG, combines=False, alignment_weight=0.0)
  rep = plain_process.PlainProcess(
      'fed_rep',
      oracle.build_model(),
      fed_rep.FedRepConfig(
          learning_rate=0.2,
          momentum=0.5,
          head_epochs=1,
          body_epochs=2,
          batch_size=0,
          weight_decay=0.1,
          uniform=False,
      ),
      num_classes=oracle.NUM_CLASSES,
      seed=oracle.RUN_SEED,
  )
  config = dataclasses.replace(config, head_learning_rate=0.2, batch_size=0)

  result, expected = (personal.run(p, COHORTS) for p in (build(config), rep))

  for mine, theirs in zip(result.weights, expected.weights, strict=True):
    np.testing.assert_allclose(
        oracle.to_vector(mine), oracle.to_vector(theirs), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    'num_heads, num_examples, num_own', [(2, 9, 5), (11, 60, 5), (21, 480, 2)]
)
def test_weights_of_heads_by_another_solver(num_heads, num_examples, num_own):
  """Heads that are not there have none, whatever stands in their slot.

  Of clients with some classes of five each.
  """
  rng = np.random.default_rng(num_heads)
  centers = rng.normal(size=(5, 8))
  candidates = []
  for _ in range(num_heads):
    y = rng.choice(
        rng.choice(5, size=num_own, replace=False), size=num_examples
    )
    shift = 0.2 * rng.normal(size=8)
    e = centers[y] + shift + rng.normal(size=(num_examples, 8))
    candidates.append(
        head_combination.statistics(
            tf.constant(e, tf.float32), tf.constant(y, tf.int32), 5
        )
    )
  present = np.ones(num_heads, np.float32)
  if num_heads > 2:
    present[[1, 4]] = 0
    candidates[1] = tf.nest.map_structure(
        lambda leaf: leaf * np.nan, candidates[1]
    )
    candidates[4] = candidates[0]._replace(variance=tf.constant(1e6))

  weights = head_combination.combination(
      candidates[0].features,
      tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *candidates),
      tf.constant(present),
  )

  there = np.flatnonzero(present)
  expected = np.zeros(num_heads)
  expected[there] = naive_weights(
      candidates[0].features.numpy(),
      [
          (candidates[i].features.numpy(), float(candidates[i].variance))
          for i in there
      ],
  )
  np.testing.assert_allclose(weights, expected, atol=2e-3)
  assert np.sum(expected[1:] > 0.01) > 0  # Others' heads take part.


def test_many_like_heads_have_like_weights():
  """Although each is below the least weight that counts otherwise."""
  statistics = head_combination.Statistics(
      tf.zeros([2000, 2, 3]), tf.ones([2000])
  )
  weights = head_combination.combination(
      tf.zeros([2, 3]), statistics, tf.ones([2000])
  )
  np.testing.assert_allclose(weights, 1 / 2000, rtol=1e-4)


def test_without_examples_there_are_no_statistics():
  result = head_combination.statistics(
      tf.zeros([0, 3]), tf.zeros([0], tf.int32), 2
  )
  assert not np.any(result.features) and result.variance == 0.0


@pytest.mark.parametrize(
    'combines, client', [(True, personal.EMPTY_CLIENT), (False, CLIENTS[0])]
)
def test_who_has_no_head_for_others_uploads_none(combines, client):
  process = build(dataclasses.replace(CONFIG, combines=combines))
  state = process.initialize()
  output, _ = personal.next_with_memory(process, state, [client], {})
  (_, shared), _ = output.state.client_work
  assert np.sum(shared.heads.number) == 0


def test_what_is_shortened_keeps_its_means():
  """A head is cut with its number; its variance grows as if it were less."""
  method = fed_pac.fed_pac(oracle.build_model(), CONFIG, oracle.NUM_CLASSES)
  (channel,) = method.channels
  sums = tf.nest.map_structure(lambda spec: tf.ones(spec.shape), channel.summed)
  for size, is_cut in ((1000.0, False), (2.0, True)):
    limits = bounds.Limits(size, 5.0)
    shortened, cut = channel.bound.shorten(sums, limits)
    assert bool(cut) == is_cut
    restored = channel.bound.restore(shortened, limits, 0.0)
    heads = head_combination.means(restored.heads)
    for leaf in tf.nest.flatten((heads.head, heads.statistics.features)):
      np.testing.assert_allclose(leaf, 1.0, rtol=1e-5)
    np.testing.assert_allclose(
        heads.statistics.variance * restored.heads.number, 1.0, rtol=1e-5
    )
    assert bool(np.all(restored.heads.number < 1)) == is_cut
    silent = channel.bound.restore(shortened, limits, 2.0)
    assert np.sum(silent.heads.number) == 0  # May be noise alone.


def test_a_known_client_trains_its_head_and_a_new_one_a_random_one():
  method = fed_pac.fed_pac(oracle.build_model(), CONFIG, oracle.NUM_CLASSES)
  shared = method.initialize(tf.constant([1, 2]))
  seed, client = tf.constant([5, 6]), CLIENTS[0]
  model = oracle.build_model().with_head(oracle.NUM_CLASSES)
  own = model.initialize(tf.constant([3, 4]))['head']
  unseen = model.init_head(tf.constant([2, 0]), oracle.NUM_CLASSES)
  for use, memory, head, epochs in (
      (method.known_client(), personal.memory({'head': own}), own, 1),
      (method.new_client(), (), unseen, 10),
  ):
    adapted = use.adapt(shared, memory, client.examples(), seed)
    start = oracle.to_vector({'body': shared['body'], 'head': head})
    expected, _, _ = personal.train(
        start, client.pairs(), CONFIG, seed, epochs, personal.HEAD, rate=0.3
    )
    np.testing.assert_allclose(
        oracle.to_vector(adapted), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(slots=0), 'slots'),
        (dict(alignment_weight=-1.0), 'alignment_weight'),
        (dict(head_learning_rate=-0.1), 'head_learning_rate'),
        (dict(head_epochs=-1), 'head_epochs'),
    ],
)
def test_settings_out_of_range(change, message):
  with pytest.raises(ValueError, match=message):
    fed_pac.FedPacConfig(**change)
