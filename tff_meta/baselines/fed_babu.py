"""FedBABU: the body is trained and averaged under a head that never learns.

All clients have the same random head throughout the federation: they train the
body only and the server averages the bodies. The head learns at the end, when a
client fine-tunes the model to its own examples before it is tested. (What is
uploaded of the head is zero, as an update has one type; so the head stays, but
where an aggregation adds noise, which moves it like the body.) Without
heads ("FedBABU-Proto" in MetaVers), a client classifies by the class prototypes
of the trained body.

Source: Jaehoon Oh, SangMook Kim and Se-Young Yun, "FedBABU: Towards Enhanced
Representation for Federated Image Classification", ICLR 2022,
https://arxiv.org/abs/2106.06042; ten steps of fine-tuning and prototypes: Lim
et al. (MetaVers), tables 2 and 3.
Deviations: docs/algorithms/fed_babu.md.
"""

import dataclasses
from typing import Literal

import tensorflow as tf

from tff_meta import configurations
from tff_meta import method
from tff_meta import optimizers
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedBabuConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    learning_rate: Of the body in training, in the first rounds.
    decay_rounds: T, the rounds of the whole training: the rate is a tenth after
      half of them and a hundredth after three quarters (rounded up). 0 keeps
      it.
    fine_tuned: What a client fine-tunes before it is tested.
    fine_tuning_learning_rate: Then.
    fine_tuning_epochs: Then; without a test, 0.
    fine_tuning_batch_size: Then; 0 is the whole set, so that an epoch is one
      step.
  """

  learning_rate: float = 0.1
  momentum: float = 0.9
  epochs: int = 4
  batch_size: int = 50
  uniform: bool = True
  decay_rounds: int = 0
  fine_tuned: Literal['all', 'body', 'head'] = 'all'
  fine_tuning_learning_rate: float = 0.1
  fine_tuning_epochs: int = 10
  fine_tuning_batch_size: int = 0


# As public reproductions have it: SGD 0.1, momentum 0.9, B = 50, E = 4. Ten
# steps of fine-tuning: MetaVers. Their rate and their batches are ours.
PAPER = FedBabuConfig()
# FedBABU's own fine-tuning: epochs of minibatches, with a rate of ours.
RELEASE = dataclasses.replace(
    PAPER, fine_tuning_epochs=5, fine_tuning_batch_size=50
)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, epochs=1, batch_size=16)


def fed_babu(
    model: model_lib.Model, config: FedBabuConfig, num_classes: int
) -> method.Method:
  """FedBABU; the head is the same in all rounds.

  A client, known or new, fine-tunes the server's model.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def rate(rounds_done):
    """The body's rate: a tenth of it from T/2 on, a hundredth from 3T/4 on."""
    if not config.decay_rounds:
      return config.learning_rate
    past_half = 2 * rounds_done >= config.decay_rounds
    past_three_quarters = 4 * rounds_done >= 3 * config.decay_rounds
    factor = tf.where(past_half, 0.1, 1.0) * tf.where(
        past_three_quarters, 0.1, 1.0
    )
    return config.learning_rate * factor

  def client_update(weights, client):
    trained, report = config.train(
        classifier.loss,
        weights,
        client.examples,
        client.seed,
        optimizer=optimizers.build_optimizer(
            config.optimizer, rate(client.message), config.momentum
        ),
        trainable=('body',),
    )
    return config.output(weights, trained, report, client.examples)

  def client():
    tuning = dataclasses.replace(
        config,
        learning_rate=config.fine_tuning_learning_rate,
        batch_size=config.fine_tuning_batch_size,
        epochs=config.fine_tuning_epochs,
    )
    part = None if config.fine_tuned == 'all' else (config.fine_tuned,)
    return classifiers.build_client_personalizer(
        classifier,
        train=lambda *start: tuning.train(
            classifier.loss, *start, trainable=part
        )[0],
    )

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      state=(
          (lambda seed: client_work.rounds_done())
          if config.decay_rounds
          else None
      ),
      known_client=client,
      new_client=client,
  )


def fed_babu_proto(
    model: model_lib.Model, config: FedBabuConfig, num_classes: int
) -> method.Method:
  """FedBABU, then class prototypes in the place of the head."""
  return method.with_prototypes(fed_babu(model, config, num_classes), model)
