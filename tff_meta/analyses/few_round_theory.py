"""FRL's Lemma 1, Lemma 2 and Theorem 1, tried on problems that can be solved.

The losses are waves, `f_k(x) = a_k sin(x + b_k)`: neither convex nor flat, and
every constant of the theory is known exactly. A group A of K of the N clients
adapts as in FRL, `theta^{r+1} = theta^r - alpha mean_{k in A} f_k'(theta^r)`
from `theta^0 = phi`, and its meta-gradient is

  first order: `g_A(phi) = mean_{k in A} f_k'(theta_A^R)`, which FRL uses;
  exact:       `g_A(phi) dtheta_A^R/dphi`, the gradient of
               `F_A(phi) = mean_{k in A} f_k(theta_A^R(phi))`.

What is assumed: (1) every f_k has an L-Lipschitz gradient; (2) alpha <= 1/L;
(3) the clients' gradients vary by at most V_p at every x,
`1/N sum_k (f_k'(x) - mean f'(x))^2 <= V_p`; (4) groups are drawn uniformly.

The statements, of which only the bound of Lemma 2 is known here word by word
(the proofs are in a supplement that was not available; so are the constants of
the other two, for which what can be derived stands in):

Lemma 1, smoothness: the first-order meta-gradient is Lipschitz with constant
`L (1 + alpha L)^R`, since a step stretches distances by at most
`1 + alpha L`. The exact one also needs a Lipschitz second derivative (rho) and
bounded gradients (G): `L s^2R + rho G / L s^(R-1) (s^R - 1)`,
`s = 1 + alpha L`.

Lemma 2, variance: printed, `Var_A(g_A) <= V_p / K`. At one point `theta` that
is the same for all groups this is so: the variance is at most `c V_p / K`,
`c = (N - K) / (N - 1)` without replacement and 1 with it. But every group has a
`theta_A^R` of its own, which depends on A, and then it need not be so. What
does hold: `Var_A(g_A) <= c s^2R V_p / K`. For, with `theta` adapted by all
clients, the root mean square `d_r` of `theta_A^r - theta^r` obeys
`d_{r+1} <= s d_r + alpha sqrt(c V_p / K)`, so `L d_R <= (s^R - 1)
sqrt(c V_p / K)`, and `sqrt(Var) <= sqrt(c V_p / K) + L d_R`. The printed bound
needs one more assumption, as that `theta^R` is common, or that all f_k are
quadratic with the same curvature h (then the factor is `(1 - alpha h)^2R`).

Theorem 1, rate: `phi <- phi - beta g_A(phi)` of a new group each episode. With
G(phi) the mean of g_A over groups and Psi its integral,
`mean_t E G(phi^t)^2 <= (2 M (Psi(phi^0) - min Psi) + sigma^2) / sqrt(T)` for
`beta = 1 / (M sqrt(T))`, M of Lemma 1 and sigma^2 of Lemma 2. That is a
statement on the first-order field. The gradient of F is another, and need not
go to zero.

Source: Park et al., NeurIPS 2021, Lemmas 1 and 2, Theorem 1.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

# Problem -> width of the interval of phases.
SPREADS = {'spread': 2 * np.pi, 'alike': 2.0}
_NUM_CLIENTS = 4
_GROUP_SIZE = 2
_NUM_POINTS = 180
_EPISODES = (100, 1000, 10000)
_RATE_PROBLEMS = 20
_RATE_REPLICAS = 16


class Problem(NamedTuple):
  """Losses `a_k sin(x + b_k)` of N clients.

  Attributes:
    amplitudes: `a`, float64 `[N]`, positive.
    phases: `b`, float64 `[N]`.
  """

  amplitudes: np.ndarray
  phases: np.ndarray

  @property
  def smoothness(self) -> float:
    """L, which is also the bound of gradients and of third derivatives."""
    return float(np.max(self.amplitudes))

  @property
  def waves(self) -> np.ndarray:
    """complex128 `[N]`, whose gradients are `Re(wave exp(ix))`."""
    return self.amplitudes * np.exp(1j * self.phases)

  @property
  def gradient_variance(self) -> float:
    """V_p, the largest variance of the clients' gradients over all x.

    With `d_k` the waves less their mean, the variance at x is half of
    `mean |d|^2 + Re(mean(d^2) exp(2ix))`.
    """
    deviations = self.waves - self.waves.mean()
    return (
        float(np.mean(np.abs(deviations) ** 2) + np.abs(np.mean(deviations**2)))
        / 2
    )


COUNTEREXAMPLE = Problem(
    np.array([0.89, 0.47, 0.83, 0.52]), np.array([3.73, 4.63, 3.15, 4.34])
)
COUNTEREXAMPLE_PHI = 4.0


class MetaGradients(NamedTuple):
  """Meta-gradients of groups, and their derivatives, float64 `[..., P]`.

  Attributes:
    first_order: At `theta^R`.
    first_order_slope: Its derivative by phi.
    exact: The derivative of the adapted loss by phi.
    exact_slope: The derivative of that.
  """

  first_order: np.ndarray
  first_order_slope: np.ndarray
  exact: np.ndarray
  exact_slope: np.ndarray


def all_groups(
    num_clients: int, group_size: int, with_replacement: bool = False
) -> np.ndarray:
  """Returns all equally likely groups, int `[G, K]`.

  Args:
    num_clients: N.
    group_size: K, from 1 to N.
    with_replacement: Whether a client can be in a group more than once; the
      groups are then ordered.
  """
  clients = range(num_clients)
  if with_replacement:
    return np.array(list(itertools.product(clients, repeat=group_size)))
  return np.array(list(itertools.combinations(clients, group_size)))


def meta_gradients(
    waves: np.ndarray, phi: np.ndarray, alpha: Any, rounds: int
) -> MetaGradients:
  """The meta-gradients of losses that are waves.

  Args:
    waves: Of the groups' mean losses, complex128, broadcasts against `phi`.
    phi: Where the groups start, float64.
    alpha: The inner learning rate, broadcasts against `phi`.
    rounds: R.

  Returns:
    The gradients, in the shape of both.
  """
  theta = phi + np.zeros_like(waves.real)
  first, second = np.ones_like(theta), np.zeros_like(theta)  # Of theta by phi.
  for _ in range(rounds):
    wave = waves * np.exp(1j * theta)  # The gradient is Re, the curvature -Im.
    second = (1 + alpha * wave.imag) * second + alpha * wave.real * first**2
    first = (1 + alpha * wave.imag) * first
    theta = theta - alpha * wave.real
  wave = waves * np.exp(1j * theta)
  return MetaGradients(
      wave.real,
      -wave.imag * first,
      wave.real * first,
      -wave.imag * first**2 + wave.real * second,
  )


def examine(
    problem: Problem,
    phi: np.ndarray,
    *,
    group_size: int,
    alpha_smoothness: float,
    rounds: int,
) -> dict[str, np.ndarray]:
  """What the lemmas bound, over their bounds: at most 1 where they hold.

  Args:
    problem: The clients' losses.
    phi: Where the groups start, float64 `[P]`.
    group_size: K, at most N.
    alpha_smoothness: `alpha L`, in `[0, 1]`.
    rounds: R.

  Returns:
    Name -> ratios at every phi, float64 `[P]`. `lemma_1` of the first-order
    gradient and `lemma_1_exact`; of the variance over V_p / K `lemma_2`, the
    same `_with_replacement`, of the exact gradient `_exact`, and of gradients
    at one common point, `_common_point`; and `lemma_2_corrected`, the variance
    over `c s^2R V_p / K`, with and without replacement.
  """
  smoothness, num_clients = problem.smoothness, len(problem.amplitudes)
  stretch = 1 + alpha_smoothness
  bound = problem.gradient_variance / group_size
  corrected = bound * stretch ** (2 * rounds)
  correction = (num_clients - group_size) / max(num_clients - 1, 1)

  def adapt(with_replacement):
    groups = all_groups(num_clients, group_size, with_replacement)
    waves = problem.waves[groups].mean(axis=1)[:, np.newaxis]
    alpha = alpha_smoothness / smoothness
    return waves, meta_gradients(waves, phi, alpha, rounds)

  waves, without = adapt(False)
  _, replaced = adapt(True)
  lipschitz = smoothness * stretch**rounds
  # The bounds of gradients and of third derivatives are L, too.
  lipschitz_exact = smoothness * (
      stretch ** (2 * rounds) + stretch ** (rounds - 1) * (stretch**rounds - 1)
  )
  variance = without.first_order.var(axis=0)
  replaced_variance = replaced.first_order.var(axis=0)
  return {
      'lemma_1': np.abs(without.first_order_slope).max(axis=0) / lipschitz,
      'lemma_1_exact': (
          np.abs(without.exact_slope).max(axis=0) / lipschitz_exact
      ),
      'lemma_2': variance / bound,
      'lemma_2_with_replacement': replaced_variance / bound,
      'lemma_2_exact': without.exact.var(axis=0) / bound,
      'lemma_2_common_point': (
          (waves * np.exp(1j * phi)).real.var(axis=0) / bound
      ),
      'lemma_2_corrected': variance / (correction * corrected),
      'lemma_2_corrected_with_replacement': replaced_variance / corrected,
  }


def draw_problem(
    rng: np.random.Generator, num_clients: int, spread: float
) -> Problem:
  """Draws amplitudes from [0.1, 1) and phases from [0, spread)."""
  return Problem(
      rng.uniform(0.1, 1.0, num_clients), rng.uniform(0.0, spread, num_clients)
  )


def _settings():
  """Families of problems, and alpha L and R of the adaptation."""
  for family in SPREADS:
    for alpha_smoothness in (0.1, 0.5, 1.0):
      for rounds in (1, 3):
        yield family, alpha_smoothness, rounds


def try_lemmas(num_problems: int, seed: int) -> list[dict[str, Any]]:
  """Holds random problems against the lemmas.

  Every setting has the same problems: four clients in groups of two, each of
  them at one random phi and at 180 others over the period.

  Args:
    num_problems: At least 1, of every family.
    seed: Of the problems.

  Returns:
    Of every setting its `family`, `alpha_smoothness` and `rounds`, and of every
    name of `examine` the share of problems for which the bound holds at the
    random phi (`holds`) and at all (`holds_everywhere`), the worst ratio
    (`worst`), and the problem that has it where that is above 1.
  """
  points = np.arange(_NUM_POINTS) * (2 * np.pi / _NUM_POINTS)
  found = []
  for family, alpha_smoothness, rounds in _settings():
    rng = np.random.default_rng(seed)
    ratios: dict[str, list[np.ndarray]] = {}
    problems, phis = [], []
    for _ in range(num_problems):
      problem = draw_problem(rng, _NUM_CLIENTS, SPREADS[family])
      phi = np.append(rng.uniform(0.0, 2 * np.pi), points)
      examined = examine(
          problem,
          phi,
          group_size=_GROUP_SIZE,
          alpha_smoothness=alpha_smoothness,
          rounds=rounds,
      )
      for name, values in examined.items():
        ratios.setdefault(name, []).append(values)
      problems.append(problem)
      phis.append(phi)
    found.append(
        {
            'family': family,
            'alpha_smoothness': alpha_smoothness,
            'rounds': rounds,
        }
        | {
            name: _summary(np.array(values), problems, np.array(phis))
            for name, values in ratios.items()
        }
    )
  return found


def _summary(ratios, problems, phis):
  """Shares and the worst of ratios `[problems, points]`."""
  # A bound that is met exactly may be passed by rounding.
  holds = ratios <= 1 + 1e-12
  row, column = np.unravel_index(np.argmax(ratios), ratios.shape)
  worst = float(ratios[row, column])
  summary: dict[str, Any] = {
      'holds': float(holds[:, 0].mean()),
      'holds_everywhere': float(holds.all(axis=1).mean()),
      'worst': worst,
  }
  if worst > 1:
    summary['worst_problem'] = {
        'amplitudes': problems[row].amplitudes.tolist(),
        'phases': problems[row].phases.tolist(),
        'phi': float(phis[row, column]),
    }
  return summary


def try_rate(
    seed: int,
    episodes: tuple[int, ...] = _EPISODES,
    *,
    num_problems: int = _RATE_PROBLEMS,
    num_replicas: int = _RATE_REPLICAS,
    alpha_smoothness: float = 0.5,
    rounds: int = 3,
) -> list[dict[str, Any]]:
  """Runs FRL's meta-updates and holds them against Theorem 1's rate.

  Args:
    seed: Of problems, starts and groups.
    episodes: Values of T, each with its own runs.
    num_problems: Of the family `spread`.
    num_replicas: Runs of each; their mean stands for the expectation.
    alpha_smoothness: `alpha L`.
    rounds: R.

  Returns:
    Of every T, over the problems: the median of the mean squared first-order
    field over all episodes and runs (`first_order`) and of the gradient of F
    (`exact`, and its maximum, `worst_exact`) where the first-order update
    leads; and the share of problems in which the first is at most the bound
    with Lemma 2's variance as it is printed (`holds`) and corrected
    (`holds_corrected`), and its worst ratio to either (`worst`,
    `worst_corrected`).
  """
  rng = np.random.default_rng(seed)
  problems = [
      draw_problem(rng, _NUM_CLIENTS, SPREADS['spread'])
      for _ in range(num_problems)
  ]
  groups = all_groups(_NUM_CLIENTS, _GROUP_SIZE)
  waves = np.array([p.waves[groups].mean(axis=1) for p in problems])
  smoothness = np.array([p.smoothness for p in problems])
  variance = np.array([p.gradient_variance for p in problems]) / _GROUP_SIZE
  correction = (_NUM_CLIENTS - _GROUP_SIZE) / (_NUM_CLIENTS - 1)
  stretch = 1 + alpha_smoothness
  lipschitz = smoothness * stretch**rounds
  alpha = alpha_smoothness / smoothness
  starts = rng.uniform(0.0, 2 * np.pi, num_problems)
  drop = np.array(
      [
          _drop(w, start, a, rounds)
          for w, start, a in zip(waves, starts, alpha, strict=True)
      ]
  )
  found = []
  for count in episodes:
    beta = 1 / (lipschitz * np.sqrt(count))
    phi = np.repeat(starts[:, np.newaxis], num_replicas, axis=1)
    squares = np.zeros((2, num_problems))
    for _ in range(count):
      gradients = meta_gradients(
          waves[:, np.newaxis],
          phi[..., np.newaxis],
          alpha[:, np.newaxis, np.newaxis],
          rounds,
      )  # Of all groups, [problems, replicas, groups].
      for i, field in enumerate((gradients.first_order, gradients.exact)):
        squares[i] += np.mean(field.mean(axis=-1) ** 2, axis=-1) / count
      drawn = rng.integers(len(groups), size=phi.shape)[..., np.newaxis]
      step = np.take_along_axis(gradients.first_order, drawn, axis=-1)
      phi = phi - beta[:, np.newaxis] * step[..., 0]
    ratios = {
        name: squares[0]
        * np.sqrt(count)
        / (2 * lipschitz * drop + factor * variance)
        for name, factor in (
            ('', 1.0),
            ('_corrected', correction * stretch ** (2 * rounds)),
        )
    }
    found.append(
        {
            'episodes': count,
            'first_order': float(np.median(squares[0])),
            'exact': float(np.median(squares[1])),
            'worst_exact': float(squares[1].max()),
        }
        | {
            f'holds{name}': float((ratio <= 1).mean())
            for name, ratio in ratios.items()
        }
        | {f'worst{name}': float(r.max()) for name, r in ratios.items()}
    )
  return found


def _drop(waves, start, alpha, rounds):
  """`Psi(start) - min Psi`: how far the integral of the mean field can fall.

  The field has period 2 pi and, for waves, no mean, so one period is enough.
  """
  points, step = np.linspace(start, start + 2 * np.pi, 20001, retstep=True)
  field = meta_gradients(
      waves[:, np.newaxis], points, alpha, rounds
  ).first_order.mean(axis=0)
  steps = (field[1:] + field[:-1]) * (step / 2)
  return max(0.0, -float(np.cumsum(steps).min()))


def try_counterexample() -> dict[str, float]:
  """Lemma 2 at the one problem and phi for which it was found not to hold.

  Returns:
    `variance` of the first-order meta-gradient over the six groups of two, at
    alpha = 1 / L and R = 3; the printed `bound` V_p / K; `common_point`, the
    variance where all groups have one theta, here phi; and the bound that does
    hold, `corrected`.
  """
  bound = COUNTEREXAMPLE.gradient_variance / _GROUP_SIZE
  ratios = examine(
      COUNTEREXAMPLE,
      np.array([COUNTEREXAMPLE_PHI]),
      group_size=_GROUP_SIZE,
      alpha_smoothness=1.0,
      rounds=3,
  )
  variance = float(ratios['lemma_2'][0]) * bound
  return {
      'variance': variance,
      'bound': bound,
      'common_point': float(ratios['lemma_2_common_point'][0]) * bound,
      'corrected': variance / float(ratios['lemma_2_corrected'][0]),
  }
