"""Rounds of federated learning as bare PyTorch loops, to compare times with.

They compute what the processes of this package compute, from the same weights:
the same networks, losses, minibatch sizes and numbers of steps. What a process
does beside (client work as a computation, metrics, checks for clients that are
not finite) they leave out. Each call of a function built here is one round (of
FRL an episode) from the same initial weights. The caller chooses the number of
threads, `torch.set_num_threads`.

PyTorch is no requirement of this package. For the benchmarks (2.1 GB, 3.6 GB on
disk; of its dependencies those without which `import torch` fails or warns, CPU
or not, so that `pip check` misses the others):

  pip install --no-deps torch==2.0.1 sympy==1.12 mpmath==1.3.0 \
    nvidia-cublas-cu11==11.10.3.66 nvidia-cuda-cupti-cu11==11.7.101 \
    nvidia-cuda-nvrtc-cu11==11.7.99 nvidia-cuda-runtime-cu11==11.7.99 \
    nvidia-cudnn-cu11==8.5.0.96 nvidia-cufft-cu11==10.9.0.58 \
    nvidia-curand-cu11==10.2.10.91 nvidia-cusparse-cu11==11.7.4.91 \
    nvidia-nccl-cu11==2.14.3 nvidia-nvtx-cu11==11.7.91

This changes nothing that requirements.txt installs. It does change what
requirements-gpu.txt installs, other versions of the CUDA libraries: have an
environment for each. Import this module before TensorFlow.
"""

import collections
from collections.abc import Callable, Sequence
import functools
import sys
from typing import Any, NamedTuple

import numpy as np

if 'tensorflow' in sys.modules and 'torch' not in sys.modules:
  # PyTorch's initialisation would abort the process ("random_device could not
  # be read"), as it then finds TensorFlow's copy of the C++ library.
  raise ImportError(
      'Expected `torch_loops` to be imported before TensorFlow, found'
      ' TensorFlow imported already.'
  )

import torch
from torch.nn import functional as F

Weights = collections.OrderedDict  # OrderedDict(body=..., head=...) of arrays.
Client = tuple[np.ndarray, np.ndarray]  # x [n, height, width, channels], y [n].
Tensors = dict[str, torch.Tensor]  # By path, such as 'body.conv1_kernel'.

_ABSENT = -1e30  # The logit of a class without a prototype.
# TFF adds Adam's epsilon before the bias correction and PyTorch after it. With
# this one their first steps are the same.
_FIRST_STEP_EPSILON = 1e-8 / (1 - 0.999) ** 0.5


def build_fed_avg(
    network: str,
    weights: Weights,
    clients: Sequence[Client],
    batch_size: int,
    learning_rate: float,
    *,
    shuffle: bool = True,
) -> Callable[[], Weights]:
  """Builds a round of `baselines.fed_avg`: an epoch of SGD, weighted mean.

  Args:
    network: `'lenet'` or `'mlp'`.
    weights: The network's, with a head.
    clients: Their examples.
    batch_size: Examples of a minibatch; the last one may be short.
    learning_rate: Of SGD.
    shuffle: False takes the examples in their order.

  Returns:
    A function that returns the mean of the clients' weights.
  """
  logits = {'lenet': _lenet_logits, 'mlp': _mlp_logits}[network]
  start = _to_tensors(weights)
  examples = [_to_examples(client) for client in clients]

  def train(x, y):
    model = _copy(start)
    for rows in _minibatches(len(y), batch_size, shuffle):
      loss = F.cross_entropy(logits(model, x[rows]), y[rows])
      _descend(model, _gradient(loss, model), learning_rate)
    return model

  def one_round():
    models = [train(x, y) for x, y in examples]
    return _to_arrays(_mean(models, [len(y) for _, y in examples]), weights)

  return one_round


def build_metavers_round(
    weights: Weights,
    clients: Sequence[Client],
    *,
    shots: int = 20,
    queries: int = 30,
    global_margin: float = 0.0,
    shuffle: bool = True,
) -> Callable[[], tuple[Weights, float]]:
  """Builds a round of `algorithms.metavers` with its `release` preset.

  It is one after the warm-up: the loss is the hybrid one.

  Args:
    weights: LeNet's, without a head.
    clients: Their examples, of each class at least `shots + queries` or none.
    shots: Support examples of a class.
    queries: Query examples of a class.
    global_margin: The server's margin.
    shuffle: False draws the first examples of every class.

  Returns:
    A function that returns the server's weights after a step of a new Adam, and
    the mean of the clients' margins.
  """
  start = _to_tensors(weights)
  examples = [_to_examples(client) for client in clients]
  num_classes = _num_classes(examples)

  def client_gradient(x, y):
    order, rank = _ranks(y, num_classes, shuffle)
    support = order[rank < shots]
    query = order[(rank >= shots) & (rank < shots + queries)]
    rows = torch.cat([support, query])
    model = _copy(start)
    loss, margin = _metavers_loss(
        _lenet_embedding(model, x[rows]),
        y[rows],
        len(support),
        global_margin,
        num_classes,
    )
    return _gradient(loss, model), margin

  def one_round():
    results = [client_gradient(x, y) for x, y in examples]
    gradients = [gradient for gradient, _ in results]
    mean = [
        torch.stack(leaves).mean(0) for leaves in zip(*gradients, strict=True)
    ]
    model = _copy(start)
    _adam_step(model, mean, weight_decay=1e-3)
    margin = torch.stack([margin for _, margin in results]).mean()
    return _to_arrays(model, weights), margin.item()

  return one_round


def build_frl_episode(
    weights: Weights,
    clients: Sequence[Client],
    *,
    rounds: int = 3,
    batch_size: int = 60,
    replay: bool = False,
    shuffle: bool = True,
) -> Callable[[], Weights]:
  """Builds an episode of `algorithms.frl` with its `release` preset.

  The clients train in R rounds on one half of each class, their support; then
  the initial model is updated on the other half.

  Args:
    weights: Conv4's on 32x32 images, without a head.
    clients: Their examples, support and query together.
    rounds: R, at least 1.
    batch_size: Examples of a minibatch, of support and of query.
    replay: Whether a client trains its last round once more for the update, as
      the process's clients do, which keep nothing; this changes no result.
    shuffle: False takes the examples in their order, to split them too.

  Returns:
    A function that returns the initial model after the episode.
  """
  phi = _to_tensors(weights)
  examples = [_to_examples(client) for client in clients]
  num_classes = _num_classes(examples)

  def split(x, y):
    order, rank = _ranks(y, num_classes, shuffle)
    is_support = rank < torch.bincount(y)[y[order]] // 2
    support, query = order[is_support], order[~is_support]
    return (x[support], y[support]), (x[query], y[query])

  def train(support, theta, prototypes):
    x, y = support
    model = _copy(theta)
    for rows in _minibatches(len(y), batch_size, shuffle):
      e = _conv4_embedding(model, x[rows])
      own = _prototypes(e, y[rows], num_classes)
      loss = _gpal_loss(e, y[rows], own, prototypes)
      _descend(model, _gradient(loss, model), 1e-4, weight_decay=5e-4)
    with torch.no_grad():
      return model, _prototypes(_conv4_embedding(model, x), y, num_classes)

  def update(query, theta, prototypes, stored):
    x, y = query
    model, point = _copy(phi), _copy(theta)
    for rows in _minibatches(len(y), batch_size, shuffle):
      e = _conv4_embedding(point, x[rows])
      loss = _gpal_loss(e, y[rows], stored, prototypes)
      _descend(model, _gradient(loss, point), 1e-3, weight_decay=5e-4)
      point = model  # Only the first gradient is that at theta.
    return model

  def one_episode():
    supports, queries = zip(*(split(x, y) for x, y in examples), strict=True)
    theta, prototypes = phi, None
    for _ in range(rounds):
      previous = theta, prototypes
      results = [train(support, *previous) for support in supports]
      models, stored = zip(*results, strict=True)
      theta, prototypes = _mean(models), _mean_prototypes(stored)
    updated = []
    for support, query, own in zip(supports, queries, stored, strict=True):
      if replay:
        train(support, *previous)
      updated.append(update(query, theta, prototypes, own))
    return _to_arrays(_mean(updated), weights)

  return one_episode


def build_cafeme_round(
    weights: Weights,
    clients: Sequence[Client],
    *,
    inner_steps: int = 5,
    query_batches: int = 6,
    batch_size: int = 50,
    shuffle: bool = True,
) -> Callable[[], Weights]:
  """Builds a round of `algorithms.cafeme` with its `release` preset.

  It is the first of every client: Adam's moments are zero.

  Args:
    weights: Those of the modulated network on 28x28 images, with a head.
    clients: Their examples, at least `batch_size`.
    inner_steps: tau, inner steps, each on a batch of its own.
    query_batches: The batches after these, which make up one query set.
    batch_size: Examples of a batch.
    shuffle: False takes the examples in their order.

  Returns:
    A function that returns the mean of the clients' weights.
  """
  start = _to_tensors(weights)
  examples = [_to_examples(client) for client in clients]

  def update(x, y):
    whole = list(_minibatches(len(y), batch_size, shuffle))
    whole = whole[: len(y) // batch_size]
    batches = [
        whole[i % len(whole)] for i in range(inner_steps + query_batches)
    ]
    adapted = _copy(start)
    for rows in batches[:inner_steps]:
      loss = F.cross_entropy(_modulated_logits(adapted, x[rows]), y[rows])
      _descend(adapted, _gradient(loss, adapted), 0.05)
    rows = torch.cat(batches[inner_steps:])
    loss = F.cross_entropy(_modulated_logits(adapted, x[rows]), y[rows])
    model = _copy(start)
    _adam_step(model, _gradient(loss, adapted))
    return model

  def one_round():
    return _to_arrays(_mean([update(x, y) for x, y in examples]), weights)

  return one_round


# By name in `workloads.SYSTEMS`: `(weights, clients) -> one_round`.
SYSTEMS: dict[str, Callable[..., Callable[[], Any]]] = {
    'metavers': build_metavers_round,
    'frl': build_frl_episode,
    'cafeme': functools.partial(build_cafeme_round, batch_size=30),
}


# Weights and examples. Convolutions run in PyTorch's channels-last format, here
# the faster one; features are flattened in TensorFlow's order.


def _to_tensors(weights: Any, prefix: str = '') -> Tensors:
  """The leaves of nested weights by path, kernels of convolutions as OIHW."""
  tensors: Tensors = {}
  for name, value in weights.items():
    if isinstance(value, dict):
      tensors |= _to_tensors(value, f'{prefix}{name}.')
      continue
    tensor = torch.tensor(np.asarray(value))
    if tensor.ndim == 4:
      tensor = tensor.permute(3, 2, 0, 1)
      tensor = tensor.contiguous(memory_format=torch.channels_last)
    tensors[prefix + name] = tensor
  return tensors


def _to_arrays(tensors: Tensors, like: Any, prefix: str = '') -> Weights:
  """The inverse of `_to_tensors`; `like` has the structure."""
  arrays = collections.OrderedDict()
  for name, value in like.items():
    if isinstance(value, dict):
      arrays[name] = _to_arrays(tensors, value, f'{prefix}{name}.')
      continue
    tensor = tensors[prefix + name].detach()
    if tensor.ndim == 4:
      tensor = tensor.permute(2, 3, 1, 0)
    arrays[name] = tensor.numpy()
  return arrays


def _to_examples(client: Client) -> tuple[torch.Tensor, torch.Tensor]:
  """`x` [n, channels, height, width] in the channels-last format, and `y`."""
  x, y = (torch.tensor(np.asarray(part)) for part in client)
  return x.permute(0, 3, 1, 2), y.long()


def _num_classes(examples) -> int:
  return 1 + max(y.max().item() for _, y in examples)


def _flatten(x: torch.Tensor) -> torch.Tensor:
  return x.permute(0, 2, 3, 1).flatten(1)


def _minibatches(num_examples, batch_size, shuffle):
  order = torch.randperm if shuffle else torch.arange
  return order(num_examples).split(batch_size)


def _ranks(y, num_classes, shuffle):
  """An order of the examples, and how many of its class are before each."""
  order = (torch.randperm if shuffle else torch.arange)(len(y))
  member = F.one_hot(y[order], num_classes)
  return order, (member * (member.cumsum(0) - 1)).sum(1)


# Steps.


def _copy(model: Tensors) -> Tensors:
  return {
      name: w.detach().clone().requires_grad_() for name, w in model.items()
  }


def _gradient(loss: torch.Tensor, model: Tensors):
  return torch.autograd.grad(loss, tuple(model.values()), allow_unused=True)


@torch.no_grad()
def _descend(model: Tensors, gradient, learning_rate, weight_decay=0.0):
  """A step of SGD, in place; weights that the loss does not use stay."""
  for w, g in zip(model.values(), gradient, strict=True):
    if g is not None:
      if weight_decay:
        g = g.add(w, alpha=weight_decay)
      w.sub_(g, alpha=learning_rate)


def _adam_step(model: Tensors, gradient, weight_decay=0.0):
  """The first step of Adam, of rate 1e-3, in place."""
  for w, g in zip(model.values(), gradient, strict=True):
    w.grad = g
  torch.optim.Adam(
      model.values(),
      lr=1e-3,
      eps=_FIRST_STEP_EPSILON,
      weight_decay=weight_decay,
      foreach=True,
  ).step()


@torch.no_grad()
def _mean(models: Sequence[Tensors], counts: Sequence[int] | None = None):
  """The mean of models, weighted by `counts` if there are any."""
  shares = torch.tensor(counts or [1] * len(models), dtype=torch.float32)
  fractions = shares / shares.sum()
  return {
      name: sum(
          f * model[name] for f, model in zip(fractions, models, strict=True)
      )
      for name in models[0]
  }


# Networks, as in `tff_meta.models`.


def _dense(model, name, x):
  return torch.addmm(model[f'{name}bias'], x, model[f'{name}kernel'])


def _mlp_logits(model, x):
  x = F.relu(_dense(model, 'body.', _flatten(x)))
  return _dense(model, 'head.', x)


def _lenet_embedding(model, x):
  for i in (1, 2):
    x = F.conv2d(x, model[f'body.conv{i}_kernel'], model[f'body.conv{i}_bias'])
    x = F.max_pool2d(F.relu(x), 2)
  x = F.relu(_dense(model, 'body.dense1_', _flatten(x)))
  return _dense(model, 'body.dense2_', x)


def _lenet_logits(model, x):
  return _dense(model, 'head.', F.relu(_lenet_embedding(model, x)))


def _batch_norm(model, name, x):
  """Batch normalisation by the statistics of this batch."""
  gamma, beta = model[f'{name}_gamma'], model[f'{name}_beta']
  return F.batch_norm(x, None, None, gamma, beta, training=True)


def _conv4_embedding(model, x):
  for i in (1, 2, 3, 4):
    x = F.conv2d(x, model[f'body.conv{i}_kernel'], model[f'body.conv{i}_bias'])
    x = F.relu(_batch_norm(model, f'body.norm{i}', x))
    if i <= 2:
      x = F.max_pool2d(x, 2)
  return x.mean((2, 3))


def _modulated_blocks(model, part, x, gates=None):
  for i in (1, 2):
    name = f'body.{part}.conv{i}'
    # Batch normalisation takes the bias out again: it has no gradient.
    x = F.conv2d(x, model[f'{name}_kernel'], model[f'{name}_bias'].detach())
    x = F.max_pool2d(F.relu(_batch_norm(model, name, x)), 2)
    if gates is not None:
      x = x * gates[i - 1][:, None, None]
  return _flatten(x)


def _modulated_logits(model, x):
  """CAFeMe's network whose context is the batch itself, gating 'c1'."""
  h = _modulated_blocks(model, 'modulator', x)
  for i in (1, 2):
    h = F.relu(_dense(model, f'body.modulator.dense{i}_', h))
  z = F.relu(_dense(model, 'body.modulator.dense_', h.mean(0, keepdim=True)))
  eta = _dense(model, 'body.modulator.eta_', z)[0]
  num_features, num_units = model['body.base.dense1_kernel'].shape
  gates = eta.sigmoid().split((32, 64, num_features, num_units))
  x = _modulated_blocks(model, 'base', x, gates) * gates[2]
  name = 'body.base.dense1'
  bias = model[f'{name}_bias'].detach()
  x = torch.addmm(bias, x, model[f'{name}_kernel'])
  x = F.relu(_batch_norm(model, name, x)) * gates[3]
  return _dense(model, 'head.', x)


# Losses, as in `tff_meta.losses`.


class _Prototypes(NamedTuple):
  """As `losses.prototypical.Prototypes`; `present` is Boolean."""

  means: torch.Tensor
  present: torch.Tensor


def _prototypes(e, y, num_classes):
  member = F.one_hot(y, num_classes).to(e.dtype)
  count = member.sum(0)
  means = (member.T @ e) / count.clamp(min=1)[:, None]
  return _Prototypes(means, count > 0)


def _mean_prototypes(prototypes: Sequence[_Prototypes]) -> _Prototypes:
  """The mean of every class over those who hold it."""
  means, present = (torch.stack(part) for part in zip(*prototypes, strict=True))
  holders = present.sum(0)
  return _Prototypes(means.sum(0) / holders.clamp(min=1)[:, None], holders > 0)


def _squared_distances(e, c):
  origin = c.detach().mean(0)
  e, c = e - origin, c - origin
  squared = (e**2).sum(1)[:, None] - 2 * e @ c.T + (c**2).sum(1)
  return F.relu(squared)


def _prototypical_loss(e, y, prototypes):
  """The mean over the examples whose class has a prototype."""
  distances = _squared_distances(e, prototypes.means)
  logits = torch.where(prototypes.present, -distances, _ABSENT)
  counts = prototypes.present[y].to(e.dtype)
  losses = F.cross_entropy(logits, y, reduction='none')
  return (counts * losses).sum() / counts.sum().clamp(min=1)


def _gpal_loss(e, y, own, prototypes):
  """FRL's loss; there are no global prototypes in the first round."""
  loss = _prototypical_loss(e, y, own)
  if prototypes is None:
    return loss
  return loss + 0.2 * _prototypical_loss(e, y, prototypes)


def _metavers_loss(e, y, num_support, global_margin, num_classes):
  """The hybrid loss, and the client's own margin, a constant."""
  own = _prototypes(e[:num_support], y[:num_support], num_classes)
  cross_entropy = _prototypical_loss(e[num_support:], y[num_support:], own)

  means, present = _prototypes(e, y, num_classes)
  pair = present[:, None] & present & ~torch.eye(num_classes, dtype=torch.bool)
  margin = _squared_distances(means, means)[pair].sqrt().mean()
  positive = ((e - means[y]) ** 2).sum(1)
  negative = _squared_distances(means, e)[y]  # From p's centroid to all n.
  differs = (y[:, None] != y).to(e.dtype)
  triplets = F.relu(
      positive[:, None] - negative + margin.clamp(min=global_margin)
  )
  per_positive = (triplets * differs).sum(1) / differs.sum(1)
  per_class = _prototypes(per_positive[:, None], y, num_classes).means
  triplet = per_class.sum() / present.sum()
  return 0.4 * cross_entropy + 0.6 * triplet, margin.detach()
