"""An algorithm of your own, FedProx, in some forty lines.

A client minimises its loss and mu / 2 times the squared distance to the weights
that it received. With `--plugins=own_algorithm` all programs know it:

  python -m binaries.train --plugins=own_algorithm --algorithm=my_fed_prox
"""

import dataclasses

import tff_meta
from tff_meta import configurations
from tff_meta import method
from tff_meta import registry
from tff_meta import weights as weights_lib
from tff_meta.client_works import client_work
from tff_meta.learners import classifiers
from tff_meta.losses import proximal


@dataclasses.dataclass(frozen=True)
class MyConfig(configurations.LocalTraining):
  """Beside what local training has: its rate, epochs, batch size and so on.

  Attributes:
    mu: How strongly a client is pulled to the weights that it received.
  """

  mu: float = 0.1


PAPER = RELEASE = MyConfig()
DEMO = dataclasses.replace(PAPER, learning_rate=0.1)


def my_fed_prox(model, config, num_classes):
  """Returns the algorithm for a network, a configuration and classes."""
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(received, client):
    def pulled_loss(weights, batch):
      pull = proximal.proximal(weights, received, config.mu)
      return classifier.loss(weights, batch) + pull

    trained, report = config.train(
        pulled_loss, received, client.examples, client.seed
    )
    return client_work.ClientOutput(
        weights_lib.subtract(received, trained),
        config.weight(client.examples),
        report,
    )

  def use():
    return classifiers.build_client_personalizer(classifier)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      known_client=use,
      new_client=use,
  )


registry.register_algorithm(
    registry.AlgorithmSpec(
        name='my_fed_prox',
        summary="Federated averaging, held to the server's model",
        paper='Mine',
        module_name=__name__,
        function='my_fed_prox',
        uses=('known_client', 'new_client'),
    )
)


def main(rounds: int = 50, **settings) -> float:
  """Returns the accuracy of known clients."""
  fitted = tff_meta.fit('digits', 'my_fed_prox', rounds=rounds, **settings)
  return fitted.evaluate('known_clients')['known_clients']['accuracy_mean']


if __name__ == '__main__':
  print(f'known clients: {100 * main():.1f} % right')
