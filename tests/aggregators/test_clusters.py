"""Updates of several models through TFF's aggregators, cluster by cluster."""

import collections
import functools

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_meta.aggregators import clusters

VALUE_TYPE = tff.to_type(
    clusters.ClusterUpdate(
        collections.OrderedDict(
            a=tff.TensorType(np.float32, [3, 2]),
            b=tff.TensorType(np.float32, [3]),
        ),
        tff.TensorType(np.float32, [3]),
    )
)


def update(index, a, b):
  """Of model `index`; in the other rows stands what nobody is to read."""
  models = collections.OrderedDict(
      a=np.full((3, 2), np.nan, np.float32), b=np.full(3, 1e6, np.float32)
  )
  models['a'][index], models['b'][index] = a, b
  return clusters.ClusterUpdate(models, np.eye(3, dtype=np.float32)[index])


MEAN = tff.aggregators.MeanFactory(no_nan_division=True)


@functools.cache
def build(factory=None):
  return clusters.ClusterMeansFactory(factory or MEAN).create(
      VALUE_TYPE, tff.TensorType(np.float32)
  )


def aggregate(updates, weights, process=None):
  process = process or build()
  return process.next(process.initialize(), updates, weights)


def test_a_mean_is_over_those_that_picked_the_model():
  """Model 0: .25 * 4 + .75 * 8, of weights 1 and 3; nobody picked model 1."""
  updates = [update(0, (4, 0), 1), update(2, (5, 6), 7), update(0, (8, 4), 5)]
  result = aggregate(updates, [1.0, 9.0, 3.0]).result
  assert list(result) == ['a', 'b']
  assert result['a'].tolist() == [[7, 3], [0, 0], [5, 6]]
  assert result['b'].tolist() == [4, 0, 7]


def test_a_client_of_weight_zero_moves_nothing():
  updates = [update(0, (4, 0), 1), update(0, (8, 4), 5), update(1, (1, 1), 1)]
  result = aggregate(updates, [0.0, 3.0, 0.0]).result
  assert result['a'].tolist() == [[8, 4], [0, 0], [0, 0]]
  assert result['b'].tolist() == [5, 0, 0]


@pytest.mark.parametrize(
    'factory, expected',
    [
        # Norm 5 of model 0's first client is clipped to 1, its second has 1.
        (
            tff.aggregators.clipping_factory(1.0, MEAN),
            [[0.3, 0.9], [0, 0], [0.6, 0.8]],
        ),
        # The same, divided by three clients: zeros are updates.
        (
            tff.aggregators.as_weighted_aggregator(
                tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
                    noise_multiplier=0.0, clients_per_round=3, clip=1.0
                )
            ),
            [[0.2, 0.6], [0, 0], [0.2, 0.8 / 3]],
        ),
    ],
    ids=['clipping', 'differentially private, no noise'],
)
def test_every_model_goes_through_the_factory(factory, expected):
  updates = [update(0, (3, 4), 0), update(2, (6, 8), 0), update(0, (0, 1), 0)]
  result = aggregate(updates, [1.0, 1.0, 1.0], build(factory)).result
  np.testing.assert_allclose(result['a'], expected, rtol=1e-6)


def test_a_mean_of_nobody_moves_nothing():
  """TFF's own mean is NaN then, which would stop the other models, too."""
  updates = [update(0, (4, 0), 1), update(2, (5, 6), 7)]
  process = build(tff.aggregators.MeanFactory())
  result = aggregate(updates, [1.0, 1.0], process).result
  assert result['a'].tolist() == [[4, 0], [0, 0], [5, 6]]
  assert result['b'].tolist() == [1, 0, 7]


def test_what_a_factory_keeps_is_of_each_model():
  """Model 0 is aggregated with a norm that follows its own updates."""
  norm = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(
      initial_estimate=1.0, target_quantile=1.0, learning_rate=1.0
  )
  process = build(tff.aggregators.clipping_factory(norm, MEAN))
  state = process.initialize()
  assert len(state) == 3
  output = process.next(state, [update(0, (3, 4), 0)], [1.0])
  np.testing.assert_allclose(output.result['a'][0], (0.6, 0.8), rtol=1e-6)
  output = process.next(output.state, [update(0, (3, 4), 0)], [1.0])
  grown = np.linalg.norm(output.result['a'][0])
  assert 1 < grown < 5
  (last,) = process.next(output.state, [update(1, (3, 4), 0)], [1.0]).result[
      'a'
  ][1:2]
  # Its clients were zeros, which are within any norm.
  assert np.linalg.norm(last) < grown
