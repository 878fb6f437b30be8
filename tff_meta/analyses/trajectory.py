"""How clients' features move from one local update to the next.

Source: FedEC (Lan et al., 2023), Fig. 2: FedEC-wo and FedEC, mean feature of a
client after each of its updates in 30 and in 100 rounds.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow_federated as tff

from tff_meta import progress as progress_lib
from tff_meta.analyses import pictures
from tff_meta.analyses import projections
from tff_meta.training import checkpoints
from tff_meta.training import client_memories
from tff_meta.training import client_state_store
from tff_meta.training import embeddings
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import loop
from tff_meta.training import metric_writers


class Trajectory(NamedTuple):
  """One client's way.

  Attributes:
    client_id: The client.
    rounds: The rounds of its updates, from 1.
    features: float32 [u, D], the mean embedding of all its training examples by
      its own model after each of these updates.
  """

  client_id: str
  rounds: tuple[int, ...]
  features: np.ndarray

  def steps(self) -> np.ndarray:
    """Returns the lengths [u - 1] of the ways between updates."""
    return np.linalg.norm(np.diff(self.features, axis=0), axis=1)


class Recording:
  """The first rounds of a run, done again in memory while clients are watched.

  The rounds are the run's own: a round is a pure function of the state before
  it, the seed and its number.
  """

  def __init__(
      self,
      experiment: experiment_lib.Experiment,
      num_rounds: int,
      num_clients: int,
  ):
    """Chooses the clients; no round is done yet.

    Args:
      experiment: What the run's configuration stands for.
      num_rounds: How many rounds, at least 1.
      num_clients: How many clients; those that take part most often in these
        rounds, the first by name among equals.

    Raises:
      ValueError: If the run has fewer rounds, is differentially private, its
        clients keep no model, or fewer than `num_clients` take part twice.
    """
    if not 1 <= num_rounds <= experiment.config.training.rounds:
      raise ValueError(
          "Expected `num_rounds` (--rounds) between 1 and the run's"
          f' {experiment.config.training.rounds}, found {num_rounds}.'
      )
    config = experiment.config
    if config.privacy(1) is not None:
      raise ValueError(
          'Expected a run whose rounds can be done again, found one with'
          f' --aggregation={config.training.aggregation}, whose cohorts are'
          ' secret and whose noise is not kept.'
      )
    available = config.training.availability()
    self._experiment = experiment
    self._clients = {
        r: available.present(
            experiment.cohort(r), config.seed, r, experiment.rounds_per_cohort
        ).clients
        for r in range(1, num_rounds + 1)
    }
    self._cohorts = {
        r: [client_id for client_id, _ in clients]
        for r, clients in self._clients.items()
    }
    self._watched = _sampled_most_often(self._cohorts.values(), num_clients)
    self._process = experiment.build_process()
    _check_keeps_model(self._process, experiment.config.algorithm)

  @property
  def num_updates(self) -> int:
    """Updates of all the clients together."""
    return sum(
        len(set(self._watched).intersection(cohort))
        for cohort in self._cohorts.values()
    )

  def run(self) -> list[Trajectory]:
    """Does the rounds and returns the clients, most often sampled first."""
    process, dataset = self._process, self._experiment.dataset
    states = client_state_store.InMemoryStore()
    memories = client_memories.ClientMemories(process, states)
    embed = embeddings.build_embed(self._experiment.network)
    features: dict[str, dict[int, np.ndarray]] = {
        client_id: {} for client_id in self._watched
    }
    state = process.initialize()
    with progress_lib.Progress(
        'round',
        len(self._cohorts),
        'rounds',
        first='the first one is traced, which takes longest',
        stays=True,
    ) as progress:
      for round_num, cohort in self._cohorts.items():
        clients = [
            (client_id, dataset.tff_client_data(client_id, part))
            for client_id, part in self._clients[round_num]
        ]
        output = loop.next_round(process, state, round_num, clients, states)
        states.commit({round_num})  # Drops the models of earlier rounds.
        state = output.state
        for client_id in features.keys() & set(cohort):
          body = memories.of(client_id).value['body']
          x = dataset.client(client_id).train.x
          features[client_id][round_num] = embed(body, x).numpy().mean(0)
        metrics = metric_writers.flatten_metrics(output.metrics)
        loss = metrics.get('train/loss')
        progress.update(round_num, '' if loss is None else f'loss {loss:.4f}')
    return [
        Trajectory(client_id, tuple(means), np.stack(list(means.values())))
        for client_id, means in features.items()
    ]


def _sampled_most_often(cohorts, num_clients) -> list[str]:
  """Returns clients to watch, all of them sampled at least twice."""
  counts = collections.Counter(c for cohort in cohorts for c in cohort)
  order = sorted(counts, key=lambda c: (-counts[c], c))
  often = [c for c in order if counts[c] > 1][:num_clients]
  if len(often) < max(1, num_clients):
    raise ValueError(
        f'Expected at least {max(1, num_clients)} clients that are sampled'
        f' twice, found {len(often)}. Tip: more rounds, or fewer clients.'
    )
  return often


def _check_keeps_model(
    process: tff.learning.templates.LearningProcess, algorithm: str
) -> None:
  """Raises a ValueError unless a client keeps a whole model."""
  weights = process.get_model_weights(process.initialize()).trainable
  shapes = [
      {n: a.shape for n, a in checkpoints.to_arrays(value).items()}
      for value in (weights, getattr(process, 'initial_memory', ()))
  ]
  if shapes[0] != shapes[1]:
    raise ValueError(
        'Expected an algorithm whose clients keep the model that they trained'
        f' last, found {algorithm!r}.'
    )


def summarize(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
  """Returns how far clients move, for JSON.

  Args:
    trajectories: At least one.

  Returns:
    `mean_step_length`, over clients of the mean over their steps;
    `relative_step_length`, the same in units of the client's mean feature norm,
    since embeddings of different models have different sizes, None where all
    features are zero; and `clients`, the same for each with its rounds.
  """
  clients = []
  for trajectory in trajectories:
    steps = trajectory.steps()
    norm = np.linalg.norm(trajectory.features, axis=1).mean()
    clients.append(
        {
            'client': trajectory.client_id,
            'rounds': list(trajectory.rounds),
            'step_lengths': steps.tolist(),
            'mean_step_length': float(steps.mean()),
            'relative_step_length': float(steps.mean() / norm)
            if norm
            else None,
        }
    )
  means = {}
  for key in ('mean_step_length', 'relative_step_length'):
    values = [client[key] for client in clients if client[key] is not None]
    means[key] = float(np.mean(values)) if values else None
  return means | {'clients': clients}


def build_panel(
    title: str,
    trajectories: Sequence[Trajectory],
    layout: projections.Layout,
) -> pictures.Panel:
  """Lays out all clients' features together.

  Args:
    title: Above the panel.
    trajectories: At least one; colours number them, from 0.
    layout: Of the plane.

  Returns:
    The panel: a line for each client, its last update a large point.

  Raises:
    ValueError: If there are too few updates.
  """
  clients = np.concatenate(
      [np.full(len(t.rounds), i) for i, t in enumerate(trajectories)]
  )
  xy = layout.project(np.concatenate([t.features for t in trajectories]))
  last = np.cumsum([len(t.rounds) for t in trajectories]) - 1
  length = summarize(trajectories)['mean_step_length']
  return pictures.Panel(
      f'{title}\nmean step length {length:.3g}',
      (
          pictures.Points('local update', xy, clients, connected=True),
          pictures.Points(
              'last update', xy[last], clients[last], size=70, outlined=True
          ),
      ),
  )
