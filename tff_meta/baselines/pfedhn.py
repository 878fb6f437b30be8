"""pFedHN: a hypernetwork makes every client's model from the client's vector.

A client has a vector v, its embedding, and its model has the weights
theta = h(v; phi), where the hypernetwork h is shared by all. In a round a
client trains theta on its examples, to theta', and the difference
`dtheta = theta - theta'` stands for the gradient of its loss in theta: phi and
v take a step of SGD with the gradient `J^T dtheta`, where J is the derivative
of h in phi and v. One client takes part in a round; of several, phi has the
mean gradient.

Here clients are sent phi, compute theta and `J^T dtheta` themselves, upload the
part of phi and keep v, with its velocity, as their memory. A known client's
model is h(v; phi) as it is; a new client fits a v of its own and leaves phi.

Source: Aviv Shamsian, Aviv Navon, Ethan Fetaya and Gal Chechik, "Personalized
Federated Learning using Hypernetworks", ICML 2021,
https://arxiv.org/abs/2103.04628, Algorithm 1.
Deviations: docs/algorithms/pfedhn.md.
"""

import collections
import dataclasses

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
from tff_meta.learners import personalizer
from tff_meta.models import hypernetwork as hypernetwork_lib
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class PFedHNConfig(configurations.Configuration):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    num_clients: n, all clients of the federation; an embedding has 1 + n // 4
      numbers. At least 1. A run of the programs fills in its own.
    hidden_layers: Of the hypernetwork, with ReLU.
    hidden_units: Of each of its layers, at least 1.
    server_learning_rate: alpha, of phi and of the embeddings.
    server_momentum: Of both, in [0, 1).
    server_weight_decay: Coupled L2 coefficient of both.
    learning_rate: eta, of a client's model.
    momentum: Of its SGD, in [0, 1); the velocity starts anew every round.
    weight_decay: Its coupled L2 coefficient.
    local_steps: K, minibatches of a round.
    batch_size: Examples of a minibatch, at least 1.
    max_gradient_norm: Longer gradients are scaled down to it, before weight
      decay: those of a client's model, and that of phi and v in one; above 0.
    fine_tuning_steps: SGD steps of a new client on its embedding.
    fine_tuning_learning_rate: Of these.
  """

  num_clients: int = 50
  hidden_layers: int = 3
  hidden_units: int = 100
  server_learning_rate: float = 0.01
  server_momentum: float = 0.9
  server_weight_decay: float = 1e-3
  learning_rate: float = 0.005
  momentum: float = 0.9
  weight_decay: float = 5e-5
  local_steps: int = 50
  batch_size: int = 64
  max_gradient_norm: float = 50.0
  fine_tuning_steps: int = 50
  fine_tuning_learning_rate: float = 0.1

  def __post_init__(self):
    super().__post_init__()
    for name in ('num_clients', 'hidden_units', 'batch_size'):
      config_checks.check_at_least_one(self, name)
    for name in ('server_momentum', 'momentum'):
      if getattr(self, name) >= 1:
        raise ValueError(
            f'Expected `{name}` below 1, found {getattr(self, name)}.'
        )
    if not self.max_gradient_norm:
      raise ValueError('Expected `max_gradient_norm` above 0, found 0.0.')

  @property
  def embedding_size(self) -> int:
    """Numbers of an embedding."""
    return 1 + self.num_clients // 4


# The authors' code on CIFAR-10 with 50 clients; new clients are ours.
PAPER = PFedHNConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(
    PAPER, learning_rate=0.08, local_steps=10, batch_size=16
)


def pfedhn(
    model: model_lib.Model, config: PFedHNConfig, num_classes: int
) -> method.Method:
  """pFedHN; the server's weights are phi, as those of a `Hypernetwork`.

  A client's memory is `OrderedDict(embedding, velocity)`, both float32
  `[config.embedding_size]`; the initial one is zeros, in place of which a
  client draws its first embedding from a normal distribution.

  A known client has the model that is made from its embedding; from zeros, the
  mean of first embeddings, if it was never sampled. A new client fits an
  embedding, from zeros, by SGD on its loss, with a curve of
  `fine_tuning_steps + 1` points.

  Another optimizer of the server is given the gradients with their weight
  decay.
  """
  classifier = classifiers.LinearClassifier(model, num_classes)
  hypernetwork = hypernetwork_lib.Hypernetwork(
      model.with_head(num_classes),
      config.embedding_size,
      config.hidden_layers,
      config.hidden_units,
  )

  def memory_of(embedding, velocity):
    return collections.OrderedDict(embedding=embedding, velocity=velocity)

  def zeros():
    return tf.zeros([config.embedding_size])

  def client_update(phi, client):
    first = tf.random.stateless_normal(
        [config.embedding_size], client.fixed_seed
    )
    kept = client.memory.value_or(memory_of(first, zeros()))
    embedding = kept['embedding']
    with tf.GradientTape() as tape:
      tape.watch((phi, embedding))
      received = hypernetwork.generate(phi, embedding)
    trained, report = local_sgd.local_sgd(
        classifier.loss,
        received,
        client.examples,
        optimizers.build_optimizer(
            'sgd', config.learning_rate, config.momentum
        ),
        batch_size=config.batch_size,
        seed=client.seed,
        weight_decay=config.weight_decay,
        max_gradient_norm=config.max_gradient_norm,
        **local_sgd.length_of(config.local_steps, 'steps'),
    )
    gradients = tape.gradient(
        received,
        (phi, embedding),
        output_gradients=weights_lib.subtract(received, trained),
    )
    gradients = weights_lib.clip_by_global_norm(
        gradients, config.max_gradient_norm
    )
    of_phi, of_embedding = weights_lib.add_decay(
        gradients, (phi, embedding), config.server_weight_decay
    )
    velocity = config.server_momentum * kept['velocity'] + of_embedding
    embedding -= config.server_learning_rate * velocity
    return client_work.ClientOutput(
        of_phi,
        local_sgd.client_weight(tf.size(client.examples.y), uniform=True),
        report,
        memory=memory_of(embedding, velocity),
    )

  def client_network(phi, memory):
    return hypernetwork.generate(phi, memory.value['embedding'])

  def new_client():
    settings = fine_tuning.FineTuning(
        config.fine_tuning_steps,
        config.fine_tuning_learning_rate,
        config.batch_size,
    )

    def fit(phi):
      """What takes an embedding through SGD, under this hypernetwork."""

      def generate(embedding, context=None):
        del context
        return hypernetwork.generate(phi, embedding)

      return fine_tuning.build_client_personalizer(
          settings,
          model.input_shape,
          lambda embedding, batch: classifier.loss(generate(embedding), batch),
          classifiers.build_predict(classifier),
          generate,
      )

    def curve_scores(phi, *client):
      return fit(phi).curve.scores(zeros(), *client)

    return personalizer.ClientPersonalizer(
        start=lambda phi, memory: hypernetwork.generate(phi, zeros()),
        adapt=lambda phi, *client: fit(phi).adapt(zeros(), *client),
        predict=fit(None).predict,  # Of weights that have been generated.
        curve=personalizer.ByScores(curve_scores),
    )

  return method.Method(
      num_classes,
      hypernetwork.initialize,
      client_update,
      memory=lambda seed: memory_of(zeros(), zeros()),
      server_optimizer=optimizers.build_optimizer(
          'sgd', config.server_learning_rate, config.server_momentum
      ),
      memory_reaches={'update': 'training', 'loss': 'itself'},
      known_client=lambda: classifiers.build_client_personalizer(
          classifier, client_network
      ),
      client_network=client_network,
      new_client=new_client,
  )
