"""A run's configuration made into clients, a network and a process."""

from collections.abc import Sequence
import dataclasses
import functools

import tensorflow_federated as tff

from tff_meta import augmentation
from tff_meta import datasets
from tff_meta import models
from tff_meta import registry
from tff_meta.data import client_sampling
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.models import model as model_lib
from tff_meta.training import run_config

# What a partitioner looks at where it is not the label.
_PARTITION_BY = {'by_writer': 'writer', 'by_group': 'rotation'}


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What a configuration stands for.

  Attributes:
    config: The configuration.
    dataset: The clients.
    model: The network, without a head; it says how examples are augmented.
  """

  config: run_config.RunConfig
  dataset: federated_dataset.FederatedDataset
  model: model_lib.Model

  @property
  def spec(self) -> registry.AlgorithmSpec:
    """The algorithm."""
    return registry.get(self.config.algorithm)

  def build_process(self) -> tff.learning.templates.LearningProcess:
    """Returns the training process."""
    return self.spec.build(
        self.model,
        self.config.hparams,
        num_classes=self.dataset.num_classes,
        seed=self.config.seed,
    )

  def cohort(self, round_num: int) -> Sequence[str]:
    """Returns the ids of a round's clients, a pure function of the round.

    Args:
      round_num: From 1.
    """
    rounds_per_cohort = self.spec.rounds_per_cohort(self.config.hparams)
    return client_sampling.sample_cohort(
        self.dataset.client_ids(),
        self.config.clients_per_round,
        self.config.seed,
        (round_num - 1) // rounds_per_cohort,
    )


def prepare(
    config: run_config.RunConfig, *, download: bool = False
) -> Experiment:
  """Loads the data, makes the clients and builds the network.

  Args:
    config: The configuration.
    download: Whether to fetch the data set if it is not there.

  Raises:
    DatasetNotFoundError: If the data set is not there.
    ValueError: If the configuration is impossible with the data.
  """
  corpus = datasets.load_corpus(
      config.dataset, config.data_dir, download, **config.dataset_options
  )
  if config.partition == run_config.FEW_ROUND:
    dataset = federated_dataset.FederatedDataset.few_round(
        corpus, config.num_clients, config.seed, **config.partition_options
    )
  else:
    held_out = config.num_new_clients * (config.new_clients == 'held_out')
    dataset = federated_dataset.FederatedDataset.from_corpus(
        corpus,
        functools.partial(
            partitioners.PARTITIONERS[config.partition],
            **config.partition_options,
        ),
        config.num_clients + held_out,
        config.seed,
        partition_by=_PARTITION_BY.get(config.partition, 'label'),
        validation_fraction=config.validation_fraction,
        test_fraction=config.test_fraction,
        stratify=config.stratify,
        num_test_clients=config.num_new_clients,
        new_clients=config.new_clients,
    )
  model = models.build(config.model, dataset.input_shape, None)
  if config.augmentation is not None:
    augment = augmentation.CropAndFlip(
        **config.augmentation, fill=tuple(corpus.black.tolist())
    )
    model = dataclasses.replace(model, augment=augment)
  return Experiment(config, dataset, model)
