"""FedBN: batch normalisation stays with the client.

Clients whose images differ in style, brightness or device have features of
other means and spreads. So the server averages all layers but those of batch
normalisation: their scales and offsets are the client's own, and so are the
statistics by which it normalises when it predicts. In training a layer
normalises by its minibatch. A known client uses the server's layers with its
own normalisation; a new one trains both on its own examples first.

The statistics are the means and variances of all of the client's examples under
the weights that it ends with, layer by layer, in place of running averages over
its steps, of which a pure function has no room.

Source: Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp and Qi Dou,
"FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021, https://arxiv.org/abs/2102.07623, Algorithm 1.
Deviations: docs/algorithms/fed_bn.md.
"""

import collections
import dataclasses

import tensorflow as tf

from tff_meta import configurations
from tff_meta import method
from tff_meta.learners import classifiers
from tff_meta.learners import personal_layers
from tff_meta.models import model as model_lib
from tff_meta.models import norm_cnn


@dataclasses.dataclass(frozen=True)
class FedBnConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    new_client_epochs: Epochs on all layers in which a new client gets itself a
      normalisation.
  """

  learning_rate: float = 0.01
  batch_size: int = 32
  uniform: bool = True
  new_client_epochs: int = 1


# The authors' script for five sets of digits: rate 0.01, B = 32, one epoch,
# clients alike. What new clients do is ours.
PAPER = FedBnConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(
    PAPER, learning_rate=0.1, batch_size=16, new_client_epochs=3
)


def fed_bn(
    model: model_lib.Model, config: FedBnConfig, num_classes: int
) -> method.Method:
  """FedBN; a client's memory is `OrderedDict(layers, statistics)`.

  `layers` are the scales and offsets of its normalisation, at first 1 and 0,
  `statistics` what it normalises by in prediction, at first means of 0 and
  variances of 1.

  Raises:
    ValueError: If the network is none with normalisation of its own.
  """
  if not isinstance(model, norm_cnn.NormModel):
    raise ValueError(
        'Expected `model` with batch normalisation that has statistics, found'
        f' {model.name!r}. Tip: use `norm_cnn`, which takes images.'
    )
  classifier = classifiers.LinearClassifier(model, num_classes)
  own_parts = {('body', name) for name in model.norm_parameters}

  def split(weights):
    return personal_layers.split(weights, own_parts)

  def initial_memory(seed):
    _, layers = split(classifier.initialize(seed))
    return collections.OrderedDict(
        layers=layers, statistics=model.initial_statistics()
    )

  def normalising(weights, layers, statistics):
    """The network as it predicts."""
    merged = personal_layers.merge(weights, layers)
    merged['body'].update(statistics)
    return merged

  def own_statistics(weights, examples, otherwise):
    """Of all of the client's examples; of none, what was before."""
    found = model.statistics(weights['body'], examples.x, examples.mask)
    has_any = tf.reduce_sum(examples.mask) > 0
    return tf.nest.map_structure(
        lambda new, old: tf.where(has_any, new, old), found, otherwise
    )

  def train(num_epochs, weights, kept, examples, seed):
    trained, report = config.train_for(
        num_epochs,
        classifier.loss,
        personal_layers.merge(weights, kept['layers']),
        examples,
        seed,
    )
    shared, layers = split(trained)
    statistics = own_statistics(trained, examples, kept['statistics'])
    kept = collections.OrderedDict(layers=layers, statistics=statistics)
    return shared, kept, report

  def client_update(weights, client):
    shared, kept, report = train(
        config.epochs,
        weights,
        client.memory.value,
        client.examples,
        client.seed,
    )
    return config.output(weights, shared, report, client.examples, memory=kept)

  def start_new(weights, memory):
    del memory  # Training never saw the client.
    return normalising(weights, **initial_memory(tf.constant([0, 0])))

  def adapt_new(weights, memory, examples, seed):
    del memory
    first = initial_memory(tf.constant([0, 0]))
    shared, kept, _ = train(
        config.new_client_epochs, weights, first, examples, seed
    )
    return normalising(shared, **kept)

  return method.Method(
      num_classes,
      lambda seed: split(classifier.initialize(seed))[0],
      client_update,
      memory=initial_memory,
      memory_reaches={'update': 'training', 'loss': 'itself'},
      known_client=lambda: classifiers.build_client_personalizer(
          classifier,
          lambda weights, memory: normalising(weights, **memory.value),
      ),
      new_client=lambda: classifiers.build_client_personalizer(
          classifier, start_new
      )._replace(adapt=adapt_new),
  )
