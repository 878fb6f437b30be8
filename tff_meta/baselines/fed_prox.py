"""FedProx: federated averaging, whose clients are held to the server's model.

A client minimises its loss and `mu / 2 * ||w - w_t||^2`, the squared distance
to the weights that it received, so that many local epochs on data of its own
kind do not lead it far away. With mu = 0 it is federated averaging. There is
one model for all: clients, known or new, use the server's as it is.

The paper samples clients in proportion to their examples and takes the plain
mean of their models; here all clients are as likely, and the mean is weighted.
It also lets slow clients do less work, which is not here.

Source: Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar
and Virginia Smith, "Federated Optimization in Heterogeneous Networks", MLSys
2020, https://arxiv.org/abs/1812.06127, Algorithm 2.
Deviations: docs/algorithms/fed_prox.md.
"""

import dataclasses

from tff_meta import config_checks
from tff_meta import configurations
from tff_meta import method
from tff_meta.learners import classifiers
from tff_meta.losses import proximal
from tff_meta.models import model as model_lib


@dataclasses.dataclass(frozen=True)
class FedProxConfig(configurations.LocalTraining):
  """Configuration; the defaults are the `paper` preset.

  Attributes:
    proximal_weight: mu, of the pull towards the weights that were received.
      Times `learning_rate` it is below 2: steps beyond the double distance
      diverge.
  """

  learning_rate: float = 0.03
  epochs: int = 20
  proximal_weight: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    config_checks.check_pull(self, 'learning_rate')


# For MNIST. B = 10 and E = 20 are in the authors' scripts; the rate and mu, for
# which they refer to the paper's appendix, are from memory.
PAPER = FedProxConfig()
RELEASE = PAPER
# For the demonstration on the embedded digits only.
DEMO = dataclasses.replace(
    PAPER, learning_rate=0.1, epochs=1, proximal_weight=0.1
)


def fed_prox(
    model: model_lib.Model, config: FedProxConfig, num_classes: int
) -> method.Method:
  """FedProx; the loss that it reports is that of what it minimises."""
  classifier = classifiers.LinearClassifier(model, num_classes)

  def client_update(received, client):
    def pulled_loss(weights, batch):
      pull = proximal.proximal(weights, received, config.proximal_weight)
      return classifier.loss(weights, batch) + pull

    trained, report = config.train(
        pulled_loss, received, client.examples, client.seed
    )
    return config.output(received, trained, report, client.examples)

  def use():
    return classifiers.build_client_personalizer(classifier)

  return method.Method(
      num_classes,
      classifier.initialize,
      client_update,
      known_client=use,
      new_client=use,
  )
