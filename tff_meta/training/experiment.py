"""A run's configuration made into clients, a network and a process."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import augmentation
from tff_meta import datasets
from tff_meta import method as method_lib
from tff_meta import models
from tff_meta import progress
from tff_meta import registry
from tff_meta.data import client_sampling
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.models import model as model_lib
from tff_meta.training import run_config

_TIP = ' Tip: smaller numbers with --hparams, or clients with more examples.'


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What a configuration stands for.

  Attributes:
    config: The configuration.
    dataset: The clients.
    model: The network that the algorithm is given, without a head; it says how
      examples are augmented.
  """

  config: run_config.RunConfig
  dataset: federated_dataset.FederatedDataset
  model: model_lib.Model

  @property
  def spec(self) -> registry.AlgorithmSpec:
    """The algorithm."""
    return registry.get(self.config.algorithm)

  @functools.cached_property
  def method(self) -> method_lib.Method:
    """The algorithm for the classes of the training clients."""
    return self._method(self.dataset.num_classes)

  @functools.cached_property
  def group_method(self) -> method_lib.Method:
    """The algorithm for the classes of a new group."""
    way, _ = self.config.evaluation.group_sizes()
    return self._method(way)

  @property
  def network(self) -> model_lib.Model:
    """The network that the algorithm trains."""
    return self.method.network or self.model

  @functools.cached_property
  def sees_neighbours(self) -> bool:
    """Whether a prediction depends on the examples that are asked with it."""
    return not self.spec.own_statistics and self.network.sees_neighbours()

  def _method(self, num_classes: int) -> method_lib.Method:
    return self.spec.method(self.model, self.config.hparams, num_classes)

  def kept(self) -> Any:
    """Returns the shapes of what the server and a client keep."""
    seed, method = tf.constant([self.config.seed, 0]), self.method
    values = method.initialize(seed), method.memory and method.memory(seed)
    return method.num_models, tf.nest.map_structure(
        lambda value: (
            value
            if value is None
            else tf.TensorSpec.from_tensor(tf.convert_to_tensor(value))
        ),
        values,
    )

  def build_process(self) -> tff.learning.templates.LearningProcess:
    """Returns the training process.

    Raises:
      ValueError: If the algorithm has no such aggregation.
    """
    return method_lib.build_process(
        self.method,
        self.model,
        seed=self.config.seed,
        aggregation=self.config.training.aggregator(),
    )

  @property
  def rounds_per_cohort(self) -> int:
    """For how many consecutive rounds a cohort stays."""
    return self.spec.rounds_per_cohort(self.config.hparams)

  def cohort(self, round_num: int, secret: int | None = None) -> Sequence[str]:
    """Returns the ids of a round's clients, a pure function of the arguments.

    Args:
      round_num: From 1.
      secret: See `client_sampling.sample_cohort`.
    """
    return client_sampling.sample_cohort(
        self.dataset.client_ids(),
        self.config.training.clients_per_round,
        self.config.seed,
        (round_num - 1) // self.rounds_per_cohort,
        secret,
    )

  def check_can_train(self) -> None:
    """Raises a ValueError if no client has what the algorithm trains on."""
    if self.method.what_is_missing is None:
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
        f' none among {len(self.dataset.client_ids())}. Of {missing}.{_TIP}'
    )

  def why_not_trained(self, cohort: Sequence[str]) -> str | None:
    """Returns what a client of a cohort lacks, None if nobody lacks anything.

    Args:
      cohort: Ids of clients.

    Returns:
      Sentences with a space before them.
    """
    for client_id in cohort:
      lacks = self._what_is_missing(client_id)
      if lacks is not None:
        return f' Of {client_id!r}, for one: {lacks}.{_TIP}'
    return None

  def _class_sizes(self, client_id: str) -> np.ndarray:
    labels = self.dataset.client(client_id).train.y
    return np.bincount(labels, minlength=self.dataset.num_classes)

  def _what_is_missing(self, client_id: str) -> str | None:
    if self.method.what_is_missing is None:
      return None
    return self.method.what_is_missing(self._class_sizes(client_id))


def prepare(
    config: run_config.RunConfig,
    *,
    download: bool = False,
    network: Any = None,
) -> Experiment:
  """Loads the data, makes the clients and builds the network.

  Args:
    config: The configuration.
    download: Whether to fetch the data set if it is not there.
    network: What `models.adopt` takes in the place of the network that the
      configuration names; None for that one.

  Raises:
    DatasetNotFoundError: If the data set is not there.
    ValueError: If the configuration is impossible with the data.
  """
  data = config.data
  with progress.Progress(f'reading the data set {data.dataset}'):
    corpus = datasets.load_corpus(
        data.dataset, data.data_dir, download, **data.dataset_options
    )
  with progress.Progress('dealing examples to clients'):
    try:
      dataset = _deal(config, corpus)
    except partitioners.NumClientsError as error:
      new = f' and `num_new_clients` {data.num_new_clients}'
      raise ValueError(
          f'{error} Asked for were `num_clients` {data.num_clients}'
          f'{new if data.num_new_clients else ""}.'
      ) from None
  if network is None:
    model = models.build(config.model, dataset.input_shape, None)
  else:
    model = models.adopt(network, config.model, dataset.input_shape, None)
  if config.training.augmentation is not None:
    augment = augmentation.CropAndFlip(
        **config.training.augmentation, fill=tuple(corpus.black.tolist())
    )
    model = dataclasses.replace(model, augment=augment)
  return Experiment(config, dataset, model)


def _deal(
    config: run_config.RunConfig, corpus: corpus_lib.Corpus
) -> federated_dataset.FederatedDataset:
  """Returns the clients that the examples of a data set are dealt to."""
  data = config.data
  if not data.deal_test_images:
    corpus = corpus.without_test_part()
  if data.partition == run_config.FEW_ROUND:
    return federated_dataset.FederatedDataset.few_round(
        corpus, data.num_clients, config.seed, **data.partition_options
    )
  deal = partitioners.PARTITIONERS[data.partition]
  return federated_dataset.FederatedDataset.from_corpus(
      corpus,
      functools.partial(deal, **data.partition_options),
      data.num_clients + data.num_held_out,
      config.seed,
      partition_by=getattr(deal, 'partition_by', 'label'),
      validation_fraction=data.validation_fraction,
      test_fraction=data.test_fraction,
      stratify=data.stratify,
      num_test_clients=data.num_new_clients,
      new_clients=data.new_clients,
  )
