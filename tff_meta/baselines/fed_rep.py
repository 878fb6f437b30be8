"""FedRep: a shared representation, and a head that every client fits anew.

A client receives the body, trains its own head for many epochs on the frozen
body, then the body for a few epochs under the frozen head; it keeps the head
and the server averages the bodies. A new client only trains a head. Without
heads ("FedRep-Proto" in MetaVers), a client classifies by the class prototypes
of the trained body.

What CAFeMe's code calls FedRep is another algorithm, `cafeme_fed_rep`.

Source: Liam Collins, Hamed Hassani, Aryan Mokhtari and Sanjay Shakkottai,
"Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, https://arxiv.org/abs/2102.07078; prototypes: Lim et al. (MetaVers), table
3.
Deviations: docs/algorithms/fed_rep.md.
"""

import dataclasses

import tensorflow as tf

from tff_meta import configurations
from tff_meta import method
from tff_meta import weights as weights_lib
from tff_meta.learners import classifiers
from tff_meta.learners import personal_head
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedRepConfig(configurations.Averaged, configurations.LocalOptimizer):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    optimizer: Of the clients, one for the head and one for the body, which
      start anew every round.
    head_epochs: Epochs of a round on the head, first.
    body_epochs: Epochs of a round on the body, then.
    known_client_epochs: Epochs on its own head before a known client is tested;
      0 keeps that of its last round.
    new_client_epochs: The same for a new client, whose head is random at first.
  """

  learning_rate: float = 0.01
  momentum: float = 0.5
  head_epochs: int = 10
  body_epochs: int = 1
  uniform: bool = True
  known_client_epochs: int = 0
  new_client_epochs: int = 10


# Collins et al.: SGD with momentum, ten epochs on the head, then one (CIFAR-10
# with 100 clients) or five on the body; a new client trains ten on a head.
PAPER = FedRepConfig()
# Their code: decay, and ten last epochs on every head before the final test.
RELEASE = dataclasses.replace(PAPER, weight_decay=1e-4, known_client_epochs=10)
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(PAPER, learning_rate=0.3, head_epochs=2)


def fed_rep(
    model: model_lib.Model, config: FedRepConfig, num_classes: int
) -> method.Method:
  """FedRep; a client's memory is its head.

  A known client has the server's body under its own head. A new client, of any
  classes, trains a random head on that body.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(weights, client):
    """Algorithm 1: the head's updates and then the body's."""
    local = personal_head.merge(weights, client.memory.value)
    seeds = tf.unstack(tf.random.experimental.stateless_split(client.seed))
    with_head, of_head = config.train_for(
        config.head_epochs,
        classifier.loss,
        local,
        client.examples,
        seeds[0],
        trainable=('head',),
    )
    trained, of_body = config.train_for(
        config.body_epochs,
        classifier.loss,
        with_head,
        client.examples,
        seeds[1],
        trainable=('body',),
    )
    uploaded, head = personal_head.split(trained)
    return config.output(
        weights,
        uploaded,
        weights_lib.add(of_head, of_body),
        client.examples,
        memory=head,
    )

  def use(head_of, num_epochs):
    return classifiers.build_client_personalizer(
        classifier,
        lambda weights, memory: personal_head.merge(weights, head_of(memory)),
        lambda *start: config.train_for(
            num_epochs, classifier.loss, *start, trainable=('head',)
        )[0],
    )

  def new_client():
    return use(
        lambda _: personal_head.unseen_head(model, num_classes),
        config.new_client_epochs,
    )

  return method.Method(
      num_classes,
      lambda seed: personal_head.split(classifier.initialize(seed))[0],
      client_update,
      memory=lambda seed: classifier.initialize(seed)['head'],
      memory_reaches={'update': 'training', 'loss': 'itself'},
      known_client=lambda: use(
          lambda memory: memory.value, config.known_client_epochs
      ),
      new_client=new_client,
      new_class=new_client,
  )


def fed_rep_proto(
    model: model_lib.Model, config: FedRepConfig, num_classes: int
) -> method.Method:
  """FedRep, then class prototypes in the place of heads."""
  return method.with_prototypes(fed_rep(model, config, num_classes), model)
