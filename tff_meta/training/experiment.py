"""A run's configuration made into clients, a network and a process."""

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np
import tensorflow_federated as tff

from tff_meta import augmentation
from tff_meta import composition
from tff_meta import datasets
from tff_meta import models
from tff_meta import registry
from tff_meta.data import client_sampling
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.models import model as model_lib
from tff_meta.training import run_config


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
    """Returns the training process.

    Raises:
      ValueError: If the algorithm has no such aggregation.
    """
    options = {}
    if self.config.aggregation == 'robust':
      options['aggregator'] = composition.robust_factory()
    return self.spec.build(
        self.model,
        self.config.hparams,
        num_classes=self.dataset.num_classes,
        seed=self.config.seed,
        **options,
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

  def check_can_train(self) -> None:
    """Raises a ValueError if no client has what the algorithm trains on."""
    if self.spec.needs is None:
      return
    best, missing = -1, None
    for client_id in self.dataset.client_ids():
      lacks = self._what_is_missing(client_id)
      if lacks is None:
        return
      largest = int(self._class_sizes(client_id).max())
      if largest > best:
        best, missing = largest, f'{client_id!r}: {lacks}'
    raise ValueError(
        f'Expected clients that {self.config.algorithm!r} can train on, found'
        f' none among {len(self.dataset.client_ids())}. Of {missing}. Tip:'
        ' smaller numbers with --hparams, or clients with more examples.'
    )

  def why_not_trained(self, cohort: Sequence[str]) -> str | None:
    """Returns what a client of a cohort lacks, None if nobody lacks anything.

    Args:
      cohort: Ids of clients.
    """
    for client_id in cohort:
      lacks = self._what_is_missing(client_id)
      if lacks is not None:
        return f'of {client_id!r}: {lacks}'
    return None

  def _class_sizes(self, client_id: str) -> np.ndarray:
    labels = self.dataset.client(client_id).train.y
    return np.bincount(labels, minlength=self.dataset.num_classes)

  def _what_is_missing(self, client_id: str) -> str | None:
    if self.spec.needs is None:
      return None
    return self.spec.what_is_missing(
        self.config.hparams, self._class_sizes(client_id)
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
  if not config.deal_test_images:
    corpus = corpus.without_test_part()
  if config.partition == run_config.FEW_ROUND:
    dataset = federated_dataset.FederatedDataset.few_round(
        corpus, config.num_clients, config.seed, **config.partition_options
    )
  else:
    deal = partitioners.PARTITIONERS[config.partition]
    held_out = config.num_new_clients * (config.new_clients == 'held_out')
    dataset = federated_dataset.FederatedDataset.from_corpus(
        corpus,
        functools.partial(deal, **config.partition_options),
        config.num_clients + held_out,
        config.seed,
        partition_by=getattr(deal, 'partition_by', 'label'),
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
