"""FedRep as CAFeMe's code has it: head, then base, and both are averaged.

A client receives the whole model, takes some steps of an Adam on the head above
the frozen base, then one step of another Adam on the base under the frozen
head, and uploads both; the server averages both. All that a client keeps are
its two Adams. The head is not the last layer, as in FedRep, but all dense
layers with their batch normalisation, nine tenths of the network on 28x28
images. As nobody has a head of its own, every client fine-tunes the whole model
by SGD before a test.

Source: the released code of Anna Vettoruzzo, Mohamed-Rafik Bouguelia and
Thorsteinn Rögnvaldsson, "Personalized Federated Learning with Contextual
Modulation and Meta-Learning" (CAFeMe), 2023, where it is called FedRep; see
`fed_rep` for Collins et al., ICML 2021.
Deviations: docs/algorithms/cafeme_fed_rep.md.
"""

import collections
import dataclasses
from typing import Literal

import tensorflow as tf

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import method
from tff_meta import optimizers
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.learners import fine_tuning
from tff_meta.learners import local_sgd
from tff_meta.learners import personal_layers
from tff_meta.models import model as model_lib

_PARTS = ('head', 'base')  # In the order in which a client trains them.


@dataclasses.dataclass(frozen=True)
class CafemeFedRepConfig(configurations.FineTuned):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    head_layers: How many dense layers, counted from the output and with their
      batch normalisation, are the head; at least 1, the classifier. The code
      has all that there are: 2 on 28x28 images, 3 on 32x32.
    client_optimizer_state: `'persist'`: a client keeps the moments of its two
      Adams for all rounds. `'reset'`: they start anew every round.
    learning_rate: Of both Adams.
    head_steps: Minibatches of a round on the head, first.
    base_steps: Minibatches of a round on the base, then.
    batch_size: Examples of a minibatch, in training and in fine-tuning; at
      least 1.
  """

  head_layers: int = 2
  client_optimizer_state: Literal['persist', 'reset'] = 'persist'
  learning_rate: float = 0.001
  head_steps: int = 5
  base_steps: int = 1
  batch_size: int = 30
  fine_tuning_learning_rate: float = 0.001

  def __post_init__(self):
    super().__post_init__()
    for name in ('head_layers', 'batch_size'):
      config_checks.check_at_least_one(self, name)


# The code on rotated MNIST; the paper says nothing of what its FedRep does. The
# embedded digits learn from that, too.
PAPER = CafemeFedRepConfig()
RELEASE = PAPER
DEMO = PAPER


def cafeme_fed_rep(
    model: model_lib.Model, config: CafemeFedRepConfig, num_classes: int
) -> method.Method:
  """CAFeMe's FedRep; a client's memory are the states of its optimizers.

  They are `OrderedDict(head, base)`; there is no memory where they do not
  persist. A client, known or new, fine-tunes the server's whole model, with a
  curve of `fine_tuning_steps + 1` points.

  Raises:
    ValueError: The network has fewer dense layers than `head_layers`, or no
      other.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  optimizer = optimizers.build_optimizer('adam', config.learning_rate)
  head = personal_layers.parameters(model, config.head_layers, 'head_layers')
  persists = config.client_optimizer_state == 'persist'

  def split(weights):
    return collections.OrderedDict(
        zip(('base', 'head'), personal_layers.split(weights, head), strict=True)
    )

  def merge(parts):
    return personal_layers.merge(parts['base'], parts['head'])

  def loss(parts, batch):
    return classifier.loss(merge(parts), batch)

  def initial_states(parts):
    return collections.OrderedDict(
        (part, local_sgd.initial_optimizer_state(optimizer, parts, (part,)))
        for part in _PARTS
    )

  def client_update(weights, client):
    parts = split(weights)
    states = client.memory.value if persists else initial_states(parts)
    lengths = (config.head_steps, config.base_steps)
    seeds = tf.unstack(tf.random.experimental.stateless_split(client.seed))
    new_states, reports = collections.OrderedDict(), []
    for part, length, part_seed in zip(_PARTS, lengths, seeds, strict=True):
      parts, new_states[part], report = local_sgd.resume_local_sgd(
          loss,
          parts,
          states[part],
          client.examples,
          optimizer,
          batch_size=config.batch_size,
          seed=part_seed,
          trainable=(part,),
          **local_sgd.length_of(length, 'steps'),
      )
      reports.append(report)
    return client_work.ClientOutput(
        weights_lib.subtract(weights, merge(parts)),
        local_sgd.client_weight(tf.size(client.examples.y), uniform=True),
        weights_lib.add(*reports),
        memory=new_states if persists else (),
    )

  def client():
    return fine_tuning.build_classifier_personalizer(
        config.fine_tuning(), classifier
    )

  def initial_memory(seed):
    return initial_states(split(classifier.initialize(seed)))

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=initial_memory if persists else None,
      memory_reaches=(
          {'update': 'training', 'loss': 'training'} if persists else {}
      ),
      known_client=client,
      new_client=client,
  )
