"""Prototypes through TFF's aggregators: holders, weights, nested factories."""

import functools

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_meta.aggregators import prototypes as prototypes_lib
from tff_meta.losses import prototypical

VALUE_TYPE = tff.to_type(
    prototypes_lib.ModelAndPrototypes(
        tff.TensorType(np.float32, [2]),
        prototypical.Prototypes(
            tff.TensorType(np.float32, [3, 2]), tff.TensorType(np.float32, [3])
        ),
    )
)


def update(model, **classes):
  """An update with prototypes of some classes, `c0=(1, 0)`."""
  means, present = np.zeros((3, 2), np.float32), np.zeros(3, np.float32)
  for name, mean in classes.items():
    means[int(name[1])], present[int(name[1])] = mean, 1
  return prototypes_lib.ModelAndPrototypes(
      np.array(model, np.float32), prototypical.Prototypes(means, present)
  )


@functools.cache
def build(model_factory=None, sum_factory=None, over='holders'):
  return prototypes_lib.ModelAndPrototypesFactory(
      model_factory or tff.aggregators.MeanFactory(), sum_factory, over
  ).create(VALUE_TYPE, tff.TensorType(np.float32))


def aggregate(updates, weights, process=None):
  process = process or build()
  return process.next(process.initialize(), updates, weights)


def test_disjoint_classes_keep_their_prototypes():
  """The mean over all clients would give halves."""
  updates = [update((2, 4), c0=(1, 0)), update((4, 8), c1=(0, 1))]
  result = aggregate(updates, [1.0, 1.0]).result
  assert result.model.tolist() == [3, 6]
  assert result.prototypes.means.tolist() == [[1, 0], [0, 1], [0, 0]]
  assert result.prototypes.present.tolist() == [1, 1, 0]


def test_the_mean_of_a_class_is_over_the_weights_of_its_holders():
  """.25 * 0 + .75 * 4 = 3; class 2 has one holder; model .25 * 4 + .75 * 8."""
  updates = [
      update((4, 0), c0=(0, 0), c2=(5, 7)),
      update((8, 0), c0=(4, 8)),
  ]
  result = aggregate(updates, [0.25, 0.75]).result
  assert result.model.tolist() == [7, 0]
  assert result.prototypes.means.tolist() == [[3, 6], [0, 0], [5, 7]]
  assert result.prototypes.present.tolist() == [1, 0, 1]


def test_over_all_clients_a_rare_class_shrinks():
  """Algorithm 1, lines 13-14, literal: class 2 has a quarter of the weight."""
  updates = [
      update((4, 0), c0=(0, 0), c2=(8, 4)),
      update((8, 0), c0=(4, 8)),
  ]
  result = aggregate(updates, [0.25, 0.75], build(over='all')).result
  assert result.prototypes.means.tolist() == [[3, 6], [0, 0], [2, 1]]
  assert result.prototypes.present.tolist() == [1, 0, 1]


def test_a_client_of_weight_zero_holds_nothing():
  updates = [
      update((9, 9), c0=(9, 9), c1=(9, 9)),
      update((1, 2), c0=(4, 8)),
      update((3, 4), c2=(6, 6)),
  ]
  result = aggregate(updates, [0.0, 2.0, 2.0]).result
  assert result.model.tolist() == [2, 3]
  assert result.prototypes.means.tolist() == [[4, 8], [0, 0], [6, 6]]
  assert result.prototypes.present.tolist() == [1, 0, 1]


def test_nobody_of_any_weight():
  process = build(tff.aggregators.MeanFactory(no_nan_division=True))
  result = aggregate([update((9, 9), c0=(9, 9))], [0.0], process).result
  assert not result.model.any() and not result.prototypes.means.any()
  assert not result.prototypes.present.any()


THREE = [
    update((3.0, 4.0), c0=(1, 0)),
    update((300.0, 400.0), c0=(3, 2)),
    update((0.0, 1.0), c1=(0, 1)),
]


@pytest.mark.parametrize(
    'model_factory, expected',
    [
        # The second is zeroed, and counts: (2 * 3 + 0) / 8, (2 * 4 + 5) / 8.
        (
            tff.aggregators.zeroing_factory(
                10.0, tff.aggregators.MeanFactory()
            ),
            (0.75, 1.625),
        ),
        # Clipped to norm 1: (.6, .8) twice and (0, 1), weights 2, 1 and 5.
        (
            tff.aggregators.clipping_factory(
                1.0, tff.aggregators.MeanFactory()
            ),
            (0.225, 0.925),
        ),
        # Clipped to norm 1 and divided by 3 clients, whatever they weigh.
        (
            tff.aggregators.as_weighted_aggregator(
                tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
                    noise_multiplier=0.0, clients_per_round=3, clip=1.0
                )
            ),
            (0.4, 2.6 / 3),
        ),
    ],
    ids=['zeroing', 'clipping', 'differentially private, no noise'],
)
def test_the_model_goes_through_any_factory(model_factory, expected):
  """Prototypes do not: (2 (1, 0) + (3, 2)) / 3 for class 0."""
  result = aggregate(THREE, [2.0, 1.0, 5.0], build(model_factory)).result
  np.testing.assert_allclose(result.model, expected, rtol=1e-6)
  np.testing.assert_allclose(
      result.prototypes.means, [[5 / 3, 2 / 3], [0, 1], [0, 0]], rtol=1e-6
  )


def test_the_sums_go_through_the_sum_factory():
  """Sums clipped to norm 1: the mean keeps its direction, and its size.

  One client of weight 2 sends means (6, 0), class weight 2 and weight 2, all
  scaled by the same factor; the server's division cancels it.
  """
  process = build(
      sum_factory=tff.aggregators.clipping_factory(
          1.0, tff.aggregators.SumFactory()
      )
  )
  output = aggregate([update((1, 1), c0=(3, 0))], [2.0], process)
  np.testing.assert_allclose(
      output.result.prototypes.means, [[3, 0], [0, 0], [0, 0]], rtol=1e-6
  )
  assert output.measurements['prototypes']['clipped_count'] == 1


def test_state_and_measurements_are_those_of_the_factories():
  process = build(tff.learning.robust_aggregator())
  output = aggregate(THREE, [2.0, 1.0, 5.0], process)
  assert set(output.measurements) == {'model', 'prototypes'}
  assert 'zeroed_count' in output.measurements['model']
  again = process.next(output.state, THREE, [2.0, 1.0, 5.0])
  assert str(again.state[0]) != str(output.state[0])


def test_an_unknown_mean_is_named():
  with pytest.raises(ValueError, match="`over` as 'holders'.*found 'some'"):
    prototypes_lib.ModelAndPrototypesFactory(
        tff.aggregators.MeanFactory(), over='some'
    )
