"""What the configurations of algorithms share."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import episodes
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd


@dataclasses.dataclass(frozen=True)
class Configuration:
  """The base of all configurations, which checks every field by its type."""

  def __post_init__(self):
    """Checks all fields, those of subclasses, too.

    Raises:
      TypeError, ValueError: If a field is, or holds, what it cannot, see
        `config_checks.check_fields`.
    """
    config_checks.check_fields(self)


@dataclasses.dataclass(frozen=True)
class Averaged(Configuration):
  """The server takes the mean of what clients make of its model.

  Attributes:
    uniform: Clients count alike; otherwise by their number of examples.
  """

  uniform: bool = False

  def weight(self, examples: episodes.Examples) -> tf.Tensor:
    """Returns what a client counts for, float32; 0 without examples.

    Args:
      examples: The client's, none of them padding.
    """
    return local_sgd.client_weight(tf.size(examples.y), self.uniform)

  def output(
      self,
      received: Any,
      trained: Any,
      report: local_sgd.LocalReport,
      examples: episodes.Examples,
      **others: Any,
  ) -> client_work.ClientOutput:
    """Returns what a client's work results in.

    Args:
      received: The weights that the server sent.
      trained: What the client made of them, a structure alike.
      report: Of its training.
      examples: The client's, see `weight`.
      **others: Of `client_work.ClientOutput`, such as its `memory`.
    """
    return client_work.ClientOutput(
        weights_lib.subtract(received, trained),
        self.weight(examples),
        report,
        **others,
    )


@dataclasses.dataclass(frozen=True)
class FineTuned(Configuration):
  """SGD steps at a falling rate before a test.

  Attributes:
    batch_size: Examples of a minibatch, at least 1 where there is fine-tuning.
    fine_tuning_steps: How many steps a client takes before it is tested.
    fine_tuning_learning_rate: Of the first of them.
    fine_tuning_decay: Factor of that rate every `fine_tuning_decay_steps`.
    fine_tuning_decay_steps: At least 1.
  """

  batch_size: int = 10
  fine_tuning_steps: int = 50
  fine_tuning_learning_rate: float = 0.01
  fine_tuning_decay: float = 0.8
  fine_tuning_decay_steps: int = 5

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_at_least_one(self, 'fine_tuning_decay_steps')

  def fine_tuning(self) -> fine_tuning.FineTuning:
    """Returns how a client is fine-tuned."""
    return fine_tuning.FineTuning(
        num_steps=self.fine_tuning_steps,
        learning_rate=self.fine_tuning_learning_rate,
        batch_size=self.batch_size,
        decay=self.fine_tuning_decay,
        decay_steps=self.fine_tuning_decay_steps,
    )


@dataclasses.dataclass(frozen=True)
class LocalOptimizer(Configuration):
  """Minibatch steps on a client.

  Attributes:
    optimizer: Of the clients; its state starts anew every round.
    learning_rate: Of the clients.
    momentum: Of SGD, in [0, 1).
    batch_size: Examples of a minibatch; 0 is the whole set.
    weight_decay: Coupled L2 coefficient.
  """

  optimizer: Literal['sgd', 'adam'] = 'sgd'
  learning_rate: float = 0.1
  momentum: float = 0.0
  batch_size: int = 10
  weight_decay: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )

  def train_for(
      self,
      num_epochs: int,
      loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
      weights: Any,
      examples: episodes.Examples,
      seed: tf.Tensor,
      **options: Any,
  ) -> tuple[Any, local_sgd.LocalReport]:
    """Trains for that many epochs.

    Args:
      num_epochs: How many, at least 0.
      loss_fn: As in `local_sgd.local_sgd`.
      weights: Where training begins.
      examples: The client's.
      seed: int32 `[2]`.
      **options: Of `local_sgd.local_sgd`, also in place of what the
        configuration says.

    Returns:
      The weights after the last step, and a report.
    """
    settings = dict(
        batch_size=self.batch_size or None,
        num_epochs=num_epochs,
        weight_decay=self.weight_decay,
    )
    optimizer = options.pop('optimizer', None) or optimizers.build_optimizer(
        self.optimizer, self.learning_rate, self.momentum
    )
    return local_sgd.local_sgd(
        loss_fn, weights, examples, optimizer, seed=seed, **settings | options
    )


@dataclasses.dataclass(frozen=True)
class LocalTraining(Averaged, LocalOptimizer):
  """Local epochs, whose results are averaged.

  Attributes:
    epochs: Local epochs of a round.
  """

  epochs: int = 1

  def train(
      self,
      loss_fn: Callable[[Any, episodes.Examples], tf.Tensor],
      weights: Any,
      examples: episodes.Examples,
      seed: tf.Tensor,
      **options: Any,
  ) -> tuple[Any, local_sgd.LocalReport]:
    """Trains for the epochs of a round; arguments as of `train_for`."""
    return self.train_for(
        self.epochs, loss_fn, weights, examples, seed, **options
    )
