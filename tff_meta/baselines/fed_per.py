"""FedPer: the body is averaged, every client keeps its own head.

A client puts its own head onto the server's body, trains both together, keeps
the head and uploads the body. The head of the first participation is random and
common to all; it is a function of the run's seed, so it need not be anywhere. A
known client is tested with the server's body under its own head.

FedMeta-Per's experiments test FedPer differently: heads are uploaded too, the
server averages them, and that average is tested (`head_of_evaluation`). FedPer
with a pass of fine-tuning before the test is their FedPerMeta.

Source: Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh and Sunav
Choudhary, "Federated Learning with Personalization Layers", 2019,
https://arxiv.org/abs/1912.00818.
Deviations: docs/algorithms/fed_per.md.
"""

import dataclasses
from typing import Literal

from tff_meta import configurations
from tff_meta import method
from tff_meta.learners import classifiers
from tff_meta.learners import personal_head
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedPerConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    head_of_evaluation: `'personal'`: heads never leave the clients;
      `'averaged'`: heads are uploaded and averaged as well. Clients still train
      their own, from the average in their first round, but are tested with the
      average.
    fine_tuning_epochs: Epochs on body and head together before a test; 0 is
      FedPer, 1 FedPerMeta.
    new_client_epochs: Epochs, before these, in which a new client gets itself a
      head when there is no averaged one; body and head together.
  """

  learning_rate: float = 0.01
  epochs: int = 4
  batch_size: int = 128
  head_of_evaluation: Literal['personal', 'averaged'] = 'personal'
  fine_tuning_epochs: int = 0
  new_client_epochs: int = 10


# As a public reproduction of Arivazhagan et al. has it: SGD, E = 4, B = 128.
PAPER = FedPerConfig()
# FedMeta-Per's code: Adam, one epoch, B = 32; 1e-4 on CIFAR-10 (5e-6 in its
# runs on MNIST); the averaged head is tested.
RELEASE = dataclasses.replace(
    PAPER,
    optimizer='adam',
    learning_rate=1e-4,
    epochs=1,
    batch_size=32,
    head_of_evaluation='averaged',
)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.3, epochs=1, batch_size=16)


def fed_per(
    model: model_lib.Model, config: FedPerConfig, num_classes: int
) -> method.Method:
  """FedPer; a client's memory is its head.

  A known client has the server's body under its own or the averaged head, and
  trains `fine_tuning_epochs`. A new client has no head of its own: it takes the
  averaged or a random one, with which it first trains `new_client_epochs` as
  clients do in training. (The paper does not treat new clients.)
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  averaged = config.head_of_evaluation == 'averaged'

  def server_part(weights):
    return weights if averaged else personal_head.split(weights)[0]

  def client_update(weights, client):
    memory = client.memory
    head = memory.value_or(weights['head']) if averaged else memory.value
    trained, report = config.train(
        classifier.loss,
        personal_head.merge(weights, head),
        client.examples,
        client.seed,
    )
    return config.output(
        weights,
        server_part(trained),
        report,
        client.examples,
        memory=trained['head'],
    )

  def use(head_of, num_epochs):
    def start(weights, memory):
      return (
          weights if averaged else personal_head.merge(weights, head_of(memory))
      )

    return classifiers.build_client_personalizer(
        classifier,
        start,
        lambda *start: config.train_for(num_epochs, classifier.loss, *start)[0],
    )

  new_client_epochs = 0 if averaged else config.new_client_epochs
  return method.Method(
      num_classes,
      lambda seed: server_part(classifier.initialize(seed)),
      client_update,
      memory=lambda seed: classifier.initialize(seed)['head'],
      # Where heads are averaged, a client's own is where its upload begins.
      memory_reaches={
          'update': 'itself' if averaged else 'training',
          'loss': 'itself',
      },
      known_client=lambda: use(
          lambda memory: memory.value, config.fine_tuning_epochs
      ),
      new_client=lambda: use(
          lambda _: personal_head.unseen_head(model, num_classes),
          new_client_epochs + config.fine_tuning_epochs,
      ),
  )
