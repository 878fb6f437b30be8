import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import aggregation
from tff_meta import method as method_lib
from tff_meta import models
from tff_meta.aggregators import bounds
from tff_meta.aggregators import margins
from tff_meta.aggregators import prototypes
from tff_meta.baselines import fed_avg
from tff_meta.losses import prototypical


def aggregate(factory, values, weights=None):
  """Returns the result of one round of an aggregator."""
  value_type = tff.types.type_conversions.infer_type(values[0])
  if weights is None:
    process = factory.create(value_type)
    return process.next(process.initialize(), values)
  process = factory.create(value_type, tff.TensorType(np.float32))
  return process.next(process.initialize(), values, weights)


def class_sums(weight, *means):
  """Of two classes, each held with a weight where it has a mean."""
  held = np.float32([weight * (mean is not None) for mean in means])
  means = np.float32([(0, 0) if mean is None else mean for mean in means])
  return prototypical.PrototypeSums(
      held[:, np.newaxis] * means, held, np.float32(weight)
  )


def margin(value, weight=1.0):
  return margins.Margin(tf.constant(weight * value), tf.constant(weight))


def arrays(structure):
  return [np.asarray(leaf) for leaf in tf.nest.flatten(structure)]


@pytest.mark.parametrize(
    'bound, small, large',
    [
        (bounds.VECTOR, np.float32([3, -4]), np.float32([1e30, -1e30])),
        (
            prototypes.BOUND,
            class_sums(1.0, (3, -4), None),
            class_sums(1e20, (1e15, 2), (1e-3, -1e15)),
        ),
        (margins.BOUND, margin(4.0), margin(1e30)),
    ],
    ids=['vector', 'class means', 'margins'],
)
def test_what_a_client_adds_is_bounded(bound, small, large):
  limits = bounds.Limits(size=5.0)
  shortened, is_cut = bound.shorten(small, limits)
  assert not is_cut
  for found, sent in zip(
      arrays(bound.restore(shortened, limits, 0.0)), arrays(small), strict=True
  ):
    np.testing.assert_allclose(found, sent, rtol=1e-6)

  shortened, is_cut = bound.shorten(large, limits)
  assert is_cut
  numbers = np.concatenate([leaf.ravel() for leaf in arrays(shortened)])
  assert np.abs(numbers).max() <= 1 and np.linalg.norm(numbers) < 5.001**0.5
  if bound is not prototypes.BOUND:  # Which may have several vectors.
    assert np.linalg.norm(numbers) <= 1 + 1e-6


def test_class_means_and_weights_are_limited_apart():
  """A mean of norm 10 is cut to 5, a weight of 40 to 8; other rows stay."""
  limits = bounds.Limits(size=5.0, weight=8.0)
  sent = class_sums(40.0, (6, -8), (1, 2))
  shortened, is_cut = prototypes.BOUND.shorten(sent, limits)
  restored = prototypes.BOUND.restore(shortened, limits, 0.0)
  assert is_cut
  small = class_sums(40.0, (1, 2), None)
  assert prototypes.BOUND.shorten(small, limits)[1]  # For its weight alone.
  assert not prototypes.BOUND.shorten(class_sums(8.0, (1, 2)), limits)[1]
  np.testing.assert_allclose(restored.class_weight, [8, 8])
  np.testing.assert_allclose(restored.total_weight, 8)
  np.testing.assert_allclose(restored.means, [[24, -32], [8, 16]], rtol=1e-6)


def test_classes_that_may_be_noise_alone_are_none():
  limits = bounds.Limits(size=2.0)
  total = class_sums(1.0, (1, 0), (0.5, 0))._replace(
      class_weight=np.float32([3.0, 0.2])
  )
  restored = prototypes.BOUND.restore(total, limits, 0.5)
  np.testing.assert_allclose(restored.class_weight, [3, 0])
  np.testing.assert_allclose(restored.means, [[2, 0], [0, 0]])


@pytest.mark.parametrize(
    'bound, sent, other',
    [
        (margins.BOUND, margin(4.0), margin(np.nan)),
        (margins.BOUND, margin(4.0), margin(np.inf)),
        (
            prototypes.BOUND,
            class_sums(1.0, (3, -4), None),
            class_sums(1.0, (np.nan, 0), (1, 1)),
        ),
    ],
)
def test_parts_that_are_no_numbers_weigh_nothing(bound, sent, other):
  factory = aggregation.Robust().of_sums(1, bound)
  values = [tf.nest.map_structure(np.asarray, v) for v in (sent, other)]
  output = aggregate(factory, values)
  for found, expected in zip(arrays(output.result), arrays(sent), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-6)
  assert output.measurements['num_cut_clients'] == 1


@pytest.mark.parametrize('quantile', [0.0, 0.5])
@pytest.mark.parametrize('value', [1e30, -np.inf, np.nan])
def test_one_client_cannot_stop_a_private_round(value, quantile):
  """A mean that is no number would be dropped, which shows who took part."""
  private = aggregation.DifferentiallyPrivate(
      noise_multiplier=0.1,
      clients_per_round=100,
      clip=1.0,
      clip_quantile=quantile,
  )
  values = [np.full(3, value, np.float32), np.zeros(3, np.float32)]
  factory = private.limited(private.of_models(1, summed=False))
  mean = aggregate(factory, values, [1.0, 1.0]).result
  assert np.isfinite(mean).all() and np.linalg.norm(mean) < 0.1


def test_the_noise_of_margins_is_that_of_their_bound():
  """Of `weight * value` and `weight`, with norm 1 together, 100 times."""
  private = aggregation.DifferentiallyPrivate(
      noise_multiplier=0.5, clients_per_round=4, channel_bound=3.0
  )
  value_type = tff.types.tensorflow_to_type(
      margins.Margin(tf.TensorSpec([]), tf.TensorSpec([]))
  )
  process = private.of_sums(2, margins.BOUND).create(value_type)
  clients = [margin(1.0) for _ in range(20)]
  totals = [
      process.next(process.initialize(), clients).result for _ in range(300)
  ]
  expected = 2**0.5 * 2 * 0.5 * 2**0.5
  np.testing.assert_allclose(
      np.std([total.weight for total in totals]), expected, rtol=0.2
  )
  np.testing.assert_allclose(
      np.std([total.value for total in totals]), 3 * expected, rtol=0.2
  )


@pytest.mark.parametrize('num_parts', [1, 2])
def test_noise_is_that_of_one_mechanism(num_parts):
  """Standard deviation 2 z sqrt(k) bound in a sum, 1/n of it in a mean."""
  private = aggregation.DifferentiallyPrivate(
      noise_multiplier=0.7, clients_per_round=4, clip=3.0, channel_bound=5.0
  )
  zeros = np.zeros(20000, np.float32)
  total = aggregate(private.of_sums(num_parts, bounds.VECTOR), [zeros]).result
  expected = 2 * 0.7 * num_parts**0.5 * 5
  np.testing.assert_allclose(np.std(total), expected, rtol=0.03)
  models_factory = private.of_models(num_parts, summed=False)
  mean = aggregate(models_factory, [zeros], [1.0]).result
  expected = 2 * 0.7 * num_parts**0.5 * 3 / 4
  np.testing.assert_allclose(np.std(mean), expected, rtol=0.03)


def test_a_private_mean_is_over_expected_clients_that_count_alike():
  """Norm 5 is cut to 2; the client of weight 0 sends nothing; of four."""
  private = aggregation.DifferentiallyPrivate(
      noise_multiplier=0.0, clients_per_round=4, clip=2.0
  )
  values = [np.float32(v) for v in ([3, 4], [1, 0], [7, 7])]
  factory = private.limited(private.of_models(1, summed=False))
  mean = aggregate(factory, values, [30.0, 1.0, 0.0]).result
  np.testing.assert_allclose(mean, [2.2 / 4, 1.6 / 4], rtol=1e-6)


def test_an_adaptive_clip_spends_a_part_of_the_noise():
  """With z = 3 for the value alone there is more noise than with z = 3."""
  fixed, adaptive = (
      aggregation.DifferentiallyPrivate(
          noise_multiplier=3.0,
          clients_per_round=100,
          clip=1.0,
          clip_quantile=quantile,
      )
      for quantile in (0.0, 0.5)
  )
  zeros = np.zeros(20000, np.float32)
  deviations = [
      np.std(aggregate(one.of_models(1, False), [zeros], [1.0]).result)
      for one in (fixed, adaptive)
  ]
  # TFF's counts of clients below the clip have a deviation of 100 / 20.
  expected = (1 - (6 / (2 * 5)) ** 2) ** -0.5
  np.testing.assert_allclose(deviations[1] / deviations[0], expected, rtol=0.03)
  with pytest.raises(ValueError, match='more than 60 clients .* found 60'):
    dataclasses.replace(adaptive, clients_per_round=60).of_models(1, False)
  few = dataclasses.replace(adaptive, clients_per_round=61)
  few.of_models(1, False)
  with pytest.raises(ValueError, match='more than 84.8528 clients .* found 61'):
    few.of_models(2, False)


def test_secure_sums_cut_what_is_beyond_their_bounds_and_count_it():
  """Changes times weights: of weight 1 a change of 3 is not cut."""
  secure = aggregation.Secure(clip=2.0, max_weight=10.0)
  values = [np.float32(v) for v in ([1, -1], [3, 0], [3, 0])]
  factory = secure.limited(secure.of_models(1, summed=False))
  output = aggregate(factory, values, [1.0, 30.0, 1.0])
  # 20 of 30, which is 3 * 10 cut to 2 * 10, and weights 1, 10 and 1.
  np.testing.assert_allclose(output.result, [24 / 12, -1 / 12], atol=1e-6)
  for of_all in output.measurements.values():
    assert of_all['secure_upper_clipped_count'] == 1


@pytest.mark.parametrize(
    'make, expected',
    [
        (lambda: aggregation.Secure(clip=0.0), '`clip` above 0'),
        (
            lambda: aggregation.Secure(clip=1e30, max_weight=1e30),
            r'`clip` times `max_weight` .* 1e\+30, found 1e\+60',
        ),
        (
            lambda: aggregation.DifferentiallyPrivate(
                clip=1e36, clip_quantile=0.5
            ),
            r'10000 times `clip` .* found 1e\+40',
        ),
        (
            lambda: aggregation.DifferentiallyPrivate(noise_multiplier=1e-5),
            'of at least 0.001, .* found 1e-05',
        ),
        (lambda: aggregation.Robust(rule='median'), "'median'"),
        (lambda: aggregation.Compressed(bits=0), '`bits` from 1 to 16'),
        (
            lambda: aggregation.DifferentiallyPrivate(clients_per_round=0),
            'clients_per_round',
        ),
        (
            lambda: aggregation.DifferentiallyPrivate(delta=0.0),
            '`delta` between 0 and 1',
        ),
    ],
)
def test_options_that_make_no_sense(make, expected):
  with pytest.raises(ValueError, match=expected):
    make()


MODEL = models.build('mlp', (2, 2, 1), None)
METHOD = fed_avg.fed_avg(
    MODEL, dataclasses.replace(fed_avg.PAPER, learning_rate=0.3), 2
)


def client(index, num_examples=20, shuffled=False):
  """Two classes, around (1, 1, 1, 1) and (-1, -1, -1, -1)."""
  rng = np.random.default_rng(index)
  y = np.arange(num_examples, dtype=np.int32) % 2
  x = rng.normal(1.0 - 2 * y, 1.0, (4, num_examples)).T
  if shuffled:  # And large, so that these clients' gradients are, too.
    x, y = 10 * x, 1 - y
  examples = {'x': np.float32(x).reshape(-1, 2, 2, 1), 'y': y}
  return collections.OrderedDict(
      examples=tf.data.Dataset.from_tensors(collections.OrderedDict(examples)),
      salt=tf.data.Dataset.from_tensors(np.int32(index)),
  )


def final_accuracy(how, attack=None, shuffled=False):
  """The accuracy after 8 rounds, three of whose ten clients are at fault.

  Args:
    how: The aggregation.
    attack: `update -> update` of these clients, who have 21 examples.
    shuffled: Whether they have the labels of the other class.
  """

  def client_update(weights, data):
    output = METHOD.client_update(weights, data)
    if attack is None:
      return output
    attacked = tf.nest.map_structure(attack, output.update)
    is_faulty = tf.size(data.examples.y) > 20
    return output._replace(
        update=tf.nest.map_structure(
            lambda a, b: tf.where(is_faulty, a, b), attacked, output.update
        )
    )

  process = method_lib.build_process(
      dataclasses.replace(METHOD, client_update=client_update),
      MODEL,
      aggregation=how,
  )
  cohort = [client(i) for i in range(7)]
  cohort += [client(i, 21, shuffled) for i in range(7, 10)]
  state = process.initialize()
  for _ in range(8):
    state = process.next(state, cohort).state
  weights = process.get_model_weights(state).trainable
  (test,) = client(99, 400)['examples']
  embeddings = MODEL.embed(weights['body'], test['x'], tf.ones([400]))
  logits = MODEL.classify(weights['head'], embeddings)
  return np.mean(np.argmax(logits, 1) == test['y'].numpy())


ROBUST = [aggregation.Robust(), aggregation.Robust(rule='centered')]


@pytest.mark.parametrize(
    'attack',
    [
        pytest.param(lambda update: tf.fill(update.shape, 1e30), id='1e30'),
        pytest.param(
            lambda update: -10 * update, id='-10 times', marks=pytest.mark.ci
        ),
    ],
)
def test_a_robust_mean_outlives_clients_that_attack_it(attack):
  assert final_accuracy(aggregation.Plain(), attack) < 0.6
  for robust in ROBUST:
    assert final_accuracy(robust, attack) > 0.8


@pytest.mark.ci
@pytest.mark.parametrize('robust', ROBUST, ids=['adaptive', 'centered'])
def test_a_robust_mean_outlives_labels_that_are_wrong(robust):
  assert final_accuracy(aggregation.Plain(), shuffled=True) < 0.7
  assert final_accuracy(robust, shuffled=True) > 0.9


@pytest.mark.parametrize('rule', ['adaptive', 'centered'])
def test_what_is_no_number_does_not_count_in_a_robust_mean(rule):
  """Nor in later rounds, which begin with the state of this one."""
  robust = aggregation.Robust(rule=rule)
  factory = robust.limited(robust.of_models(1, summed=False))
  values = [np.float32(v) for v in ([0.3, 0.1], [np.nan, 0], [0.3, 0.1])]
  output = aggregate(factory, values, [1.0, 1.0, 0.0])
  np.testing.assert_allclose(output.result, [0.3, 0.1], rtol=1e-6)
  for leaf in tf.nest.flatten(output.state):
    assert np.isfinite(leaf).all()


@pytest.mark.parametrize('rule', ['adaptive', 'centered'])
@pytest.mark.parametrize('weight', [1e9, 3e38])
def test_no_weight_takes_over_a_robust_mean(rule, weight):
  """Two of ten clients claim so many examples; their mean is -0.5."""
  robust = aggregation.Robust(rule=rule)
  factory = robust.limited(robust.of_models(1, summed=False))
  values = [np.float32([0.5, 0.5])] * 8 + [np.float32([-0.5, -0.5])] * 2
  output = aggregate(factory, values, [20.0] * 8 + [weight] * 2)
  np.testing.assert_allclose(output.result, [0.3, 0.3], rtol=1e-6)


def test_centered_clipping_moves_by_the_radius_at_most():
  """From (0, 0): one client at (3, 4) is cut to 2; then both differ from v."""
  factory = aggregation.Robust(rule='centered', radius=2.0).of_models(1, False)
  process = factory.create(
      tff.TensorType(np.float32, [2]), tff.TensorType(np.float32)
  )
  values = [np.float32(v) for v in ([3, 4], [0, 0], [9, 9])]
  first = process.next(process.initialize(), values, [5.0, 1.0, 0.0])
  np.testing.assert_allclose(first.result, [0.6, 0.8], rtol=1e-6)
  # Of (2.4, 3.2), norm 4, half; and of (-0.6, -0.8), norm 1, all.
  second = process.next(first.state, values, [1.0, 1.0, 0.0])
  np.testing.assert_allclose(second.result, [0.9, 1.2], rtol=1e-6)


def test_it_is_known_when_nothing_is_compressed():
  """Tensors of more than 20,000 numbers are, unless something else is said."""
  why = aggregation.Compressed().why_in_vain([100, 20_000])
  assert 'more than 20,000 numbers (the largest has 20,000)' in why
  assert aggregation.Compressed().why_in_vain([100, 20_001]) is None
  fewer = aggregation.Compressed(min_elements=19_999)
  assert fewer.why_in_vain([100, 20_000]) is None
  assert aggregation.Plain().why_in_vain([1]) is None
