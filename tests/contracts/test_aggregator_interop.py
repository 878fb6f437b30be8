"""TFF's own aggregators in place of the weighted mean, in every module."""

import dataclasses

import numpy as np
import pytest
import tensorflow_federated as tff
import tree

from tff_meta import aggregation


def _run(subject, process):
  """Returns the weights at the beginning and at the end of some rounds.

  The clients have as many examples as each other, so equal weights.
  """
  counts = ({0: 4, 1: 4}, {1: 4, 2: 4}, {2: 4, 0: 4})
  pairs = zip(subject.cohort, counts, strict=True)
  cohort = [dataclasses.replace(client, counts=c) for client, c in pairs]
  outputs = subject.run(cohort, process=process)
  states = (process.initialize(), outputs[-1].state)
  first, last = map(process.get_model_weights, states)
  return tree.flatten(first.trainable), tree.flatten(last.trainable)


def _distance_moved(first, last):
  squares = [np.sum((a - b) ** 2) for a, b in zip(first, last, strict=True)]
  return np.sqrt(sum(squares))


def test_differential_privacy_without_noise_is_the_mean(composed_subject):
  """Nothing else is left of it where nothing is clipped."""
  if composed_subject.case.algorithm == 'ifca':
    pytest.skip('There a model has zeros of those who picked another one.')
  if getattr(composed_subject.case.config, 'server_aggregate', None) == 'sum':
    pytest.skip('The sum is an aggregator itself, and takes no other.')
  aggregator = tff.aggregators.as_weighted_aggregator(
      tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
          noise_multiplier=0.0, clients_per_round=3.0, clip=1e3
      )
  )
  process = composed_subject.build_with(
      aggregation=aggregation.OfModels(aggregator)
  )

  _, actual = _run(composed_subject, process)

  _, desired = _run(composed_subject, composed_subject.process)
  # float32 sums, divided by 3 here and by the sum of the weights there.
  for a, d in zip(actual, desired, strict=True):
    np.testing.assert_allclose(a, d, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_robust_aggregation_bounds_a_round(module_subject):
  """Zeroing and clipping at a norm that begins at 1e-3 and follows slowly."""
  if module_subject.case.algorithm in ('local', 'fed_proto'):
    pytest.skip('No weights are uploaded that could be bounded.')
  if module_subject.case.algorithm == 'metavers':
    pytest.skip("The server's Adam moves by its rate, however small the mean.")
  norm = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(
      initial_estimate=1e-3, target_quantile=0.8, learning_rate=0.2
  )
  aggregator = tff.aggregators.zeroing_factory(
      10.0,
      tff.aggregators.clipping_factory(norm, tff.aggregators.MeanFactory()),
  )
  process = module_subject.build_with(
      aggregation=aggregation.OfModels(aggregator)
  )

  moved = _distance_moved(*_run(module_subject, process))

  # The norm grows by at most exp(0.2 * 0.8) = 1.17 a round.
  bound = 2e-3 * module_subject.num_rounds
  assert 0 < moved < bound
  plain = _distance_moved(*_run(module_subject, module_subject.process))
  assert plain > 2 * bound
