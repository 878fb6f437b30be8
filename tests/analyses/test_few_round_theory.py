"""FRL's lemmas: the counterexample, and all numbers by two implementations."""

import functools

import few_round_theory_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tff_meta.analyses import few_round_theory

_POINTS = np.linspace(0, 2 * np.pi, 100_001)


def _wave(amplitude, phase):
  return lambda x: amplitude * tf.sin(x + phase)


def _losses(problem):
  return [_wave(*pair) for pair in zip(*problem, strict=True)]


def test_the_counterexample_to_lemma_2():
  """By hand: V_p of a common x, then 6 groups of 2; published beside it."""
  found = few_round_theory.try_counterexample()
  assert found['variance'] == pytest.approx(0.2119, abs=5e-5)
  assert found['bound'] == pytest.approx(0.0681, abs=5e-5)

  problem = few_round_theory.COUNTEREXAMPLE
  losses = _losses(problem)
  variance = functools.partial(
      oracle.variance, losses, 2, 4.0, order=0, with_replacement=False
  )
  bound = oracle.client_variance(losses, _POINTS) / 2
  assert found['variance'] == pytest.approx(variance(1 / 0.89, 3), rel=1e-9)
  assert found['bound'] == pytest.approx(bound, rel=1e-8)
  assert found['common_point'] == pytest.approx(variance(0.0, 0), rel=1e-9)
  # c = (4 - 2) / (4 - 1) and s^2R = 2^6.
  assert found['corrected'] == pytest.approx(2 / 3 * 64 * bound, rel=1e-8)


@pytest.mark.parametrize('num_clients, group_size', [(4, 2), (3, 1)])
def test_both_implementations_agree(num_clients, group_size):
  rng = np.random.default_rng(num_clients)
  problem = few_round_theory.draw_problem(rng, num_clients, 2 * np.pi)
  losses, phi, alpha_smoothness, rounds = _losses(problem), 0.7, 0.8, 2
  smoothness = problem.amplitudes.max()
  alpha = alpha_smoothness / smoothness
  bound = oracle.client_variance(losses, _POINTS) / group_size
  stretch = 1 + alpha_smoothness
  slopes = [
      max(
          abs(oracle.slope(group, phi, alpha, rounds, order))
          for group in oracle.groups_of(losses, group_size, False)
      )
      for order in (0, 1)
  ]
  variance = functools.partial(oracle.variance, losses, group_size, phi)
  without, replaced, exact = (
      variance(alpha, rounds, order, with_replacement)
      for order, with_replacement in ((0, False), (0, True), (1, False))
  )
  correction = (num_clients - group_size) / (num_clients - 1)
  expected = {
      'lemma_1': slopes[0] / (smoothness * stretch**2),
      'lemma_1_exact': slopes[1]
      / (smoothness * (stretch**4 + stretch * (stretch**2 - 1))),
      'lemma_2': without / bound,
      'lemma_2_with_replacement': replaced / bound,
      'lemma_2_exact': exact / bound,
      'lemma_2_common_point': variance(0.0, 0, 0, False) / bound,
      'lemma_2_corrected': without / (correction * stretch**4 * bound),
      'lemma_2_corrected_with_replacement': replaced / (stretch**4 * bound),
  }

  found = few_round_theory.examine(
      problem,
      np.array([phi]),
      group_size=group_size,
      alpha_smoothness=alpha_smoothness,
      rounds=rounds,
  )

  assert found.keys() == expected.keys()
  for name, ratio in expected.items():
    # Points 6e-5 apart find the largest variance to 1e-9, differences slopes.
    assert found[name][0] == pytest.approx(ratio, rel=1e-7), name


def test_lemma_2_holds_for_quadratics_of_one_curvature():
  """The variance is V_p / K times c (1 - alpha h)^2R, with c = 2 / 3."""
  curvature, alpha, rounds = 2.0, 0.3, 2
  targets = (0.0, 1.0, 5.0, -2.0)
  losses = [lambda x, t=t: curvature / 2 * (x - t) ** 2 for t in targets]
  bound = curvature**2 * np.var(targets) / 2

  variance = oracle.variance(losses, 2, 0.7, alpha, rounds, 0, False)

  assert variance == pytest.approx(bound * 2 / 3 * 0.4**4, rel=1e-12)


def test_what_holds_and_what_does_not():
  first, again, other = (
      few_round_theory.try_lemmas(2, seed=seed) for seed in (0, 0, 1)
  )
  assert first == again != other
  lemmas = few_round_theory.try_lemmas(30, seed=0)
  assert len(lemmas) == 12
  for setting in lemmas:
    for name, numbers in setting.items():
      if name.startswith(('lemma_1', 'lemma_2_co')):
        assert numbers['holds_everywhere'] == 1, (setting['family'], name)
        assert numbers['worst'] > 0.1, name  # It is near what it bounds.
  # The largest steps, and clients that are alike.
  assert lemmas[-1]['lemma_2']['holds_everywhere'] < 0.2
  worst = lemmas[-1]['lemma_2']
  problem = few_round_theory.Problem(
      np.array(worst['worst_problem']['amplitudes']),
      np.array(worst['worst_problem']['phases']),
  )
  losses, phi = _losses(problem), worst['worst_problem']['phi']
  variance = oracle.variance(
      losses, 2, phi, 1 / problem.smoothness, 3, 0, False
  )
  bound = oracle.client_variance(losses, _POINTS) / 2
  assert variance / bound == pytest.approx(worst['worst'], rel=1e-7)


def test_the_first_order_field_falls_at_the_rate():
  """From 25 to 2,500 episodes by ten, if it fell as the root of them."""
  few, many = few_round_theory.try_rate(
      0, (25, 2500), num_problems=4, num_replicas=4
  )
  assert few['holds_corrected'] == many['holds_corrected'] == 1
  assert many['first_order'] < few['first_order'] / 3
