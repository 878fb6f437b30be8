"""What somebody else may add in a file of their own, of each kind one thing."""

import collections
import dataclasses

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import aggregation
from tff_meta import configurations
from tff_meta import datasets
from tff_meta import method
from tff_meta import models
from tff_meta import registry
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.comparison import tables
from tff_meta.data import partitioners
from tff_meta.datasets import synthetic
from tff_meta.learners import classifiers
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class TheirConfig(configurations.LocalTraining):
  """Configuration.

  Attributes:
    share: Of the client's last model, in what it starts from.
  """

  share: float = 0.5


PAPER = RELEASE = TheirConfig()
DEMO = dataclasses.replace(PAPER, learning_rate=0.3)


def theirs(model, config, num_classes):
  """Federated averaging from a mixture with the client's last model."""
  classifier = classifiers.LinearClassifier(model, num_classes)

  def start(weights, memory):
    own = weights_lib.scale(memory.value_or(weights), config.share)
    rest = weights_lib.scale(weights, 1 - config.share)
    return weights_lib.add(own, rest)

  def client_update(weights, client):
    trained, report = config.train(
        classifier.loss,
        start(weights, client.memory),
        client.examples,
        client.seed,
    )
    return client_work.ClientOutput(
        weights_lib.subtract(weights, trained),
        config.weight(client.examples),
        report,
        memory=trained,
    )

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      memory=classifier.initialize,
      known_client=lambda: classifiers.build_client_personalizer(
          classifier, start
      ),
      new_client=lambda: classifiers.build_client_personalizer(classifier),
  )


def their_net(input_shape, num_classes):
  """Tanh of a dense layer."""
  mlp = models.build('mlp', input_shape, num_classes)
  size = int(np.prod(input_shape))

  def init_body(seed):
    kernel = tf.random.stateless_normal([size, 8], seed, stddev=0.1)
    return collections.OrderedDict(kernel=kernel)

  def embed(body, x, mask=None):
    del mask
    return tf.tanh(tf.reshape(x, [-1, size]) @ body['kernel'])

  return model_lib.Model(
      'their_net',
      input_shape,
      8,
      num_classes,
      init_body,
      lambda seed, classes: collections.OrderedDict(
          kernel=tf.zeros([8, classes]), bias=tf.zeros([classes])
      ),
      embed,
      mlp.classify,
  )


def their_blobs(data_dir, download, *, num_classes: int = 4):
  """Clear blobs of theirs."""
  return dataclasses.replace(
      synthetic.load(
          data_dir, download, num_classes=num_classes, noise=0.5, seed=8
      ),
      name='their_blobs',
  )


def their_deal(labels, num_clients, seed, turn: int = 0):
  """Deals examples one by one."""
  del seed
  rows = np.roll(np.arange(len(labels)), turn)
  return [rows[client::num_clients] for client in range(num_clients)]


@dataclasses.dataclass(frozen=True)
class TheirAggregation(aggregation.Plain):
  """The mean of changes, of which long ones are cut.

  Attributes:
    longest: The largest norm of a change, above 0.
  """

  longest: float = 1.0

  def of_models(self, num_parts, summed):
    return tff.aggregators.clipping_factory(
        self.longest, super().of_models(num_parts, summed)
    )


registry.register_algorithm(
    registry.AlgorithmSpec(
        name='theirs',
        summary='Averaging from a mixture with the last model',
        paper='Them, 2026',
        module_name=__name__,
        function='theirs',
        uses=('known_client', 'new_client'),
        model='their_net',
    )
)
models.register_model('their_net', their_net)
datasets.register_dataset(
    dataclasses.replace(
        datasets.get('synthetic'), name='their_blobs', load=their_blobs
    )
)
partitioners.register_partition('their_deal', their_deal)
aggregation.register_aggregation('their_cut', TheirAggregation)
MEAN = tables.Measure('Mean', 'evaluation/known_clients/accuracy_mean')
TABLE = tables.Table(
    name='their_table',
    title='Theirs',
    source='ours',
    settings=(tables.Setting('Known', (MEAN,)),),
    rows=(tables.Row('theirs', ('--algorithm=theirs',)),),
    scales={'smoke': tables.Scale(seeds=(0,), flags=('--rounds=2',))},
    flags=(
        '--dataset=their_blobs',
        '--partition=their_deal',
        '--partition_options=turn=3',
        '--preset=demo',
    ),
)
tables.register_table(TABLE)
