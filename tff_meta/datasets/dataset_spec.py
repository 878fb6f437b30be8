"""What the rest of the program knows about a data set before loading it."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from tff_meta.data import corpus as corpus_lib


@dataclasses.dataclass(frozen=True)
class FewRoundDefaults:
  """Sizes of FRL's preparation and deployment that suit a data set.

  Attributes:
    way: Classes of a deployment group.
    num_clients: Clients of the preparation; they hold two shards each.
    cohort_size: Clients of a preparation episode, and of a group (K). Non-IID
      deployment cuts a class into 2 * cohort_size / way shards.
    examples_per_class: How many images of a class are used; None: all.
  """

  way: int
  num_clients: int
  cohort_size: int
  examples_per_class: int | None = None


@dataclasses.dataclass(frozen=True)
class ClientDefaults:
  """Numbers of clients that suit a data set dealt by a partitioner.

  Attributes:
    num_clients: Clients to train with.
    num_new_clients: Clients that are held out of training.
    cohort_size: Clients of a round.
    are_all: Whether there are no others, so that clients that are held out are
      fewer to train with.
  """

  num_clients: int = 100
  num_new_clients: int = 0
  cohort_size: int = 10
  are_all: bool = False


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
  """A data set by name.

  Attributes:
    name: What `--dataset` takes.
    description: One line for `--list`.
    load: (data_dir, download, **options) -> Corpus. Nothing is read, and no
      large library imported, before it is called.
    default_model: Name in `tff_meta.models.MODELS`.
    few_round: Sizes for few-round learning, or None without a class split.
    clients: Numbers of clients for everything else.
    partition: The only way to make clients of it, a name of
      `tff_meta.data.partitioners`; None where there are many.
    preset: Name of the hyperparameters that are taken unless others are asked
      for; `'demo'` where published ones learn too slowly.
    load_client_data: Same arguments -> (train, test)
      `tff.simulation.datasets.ClientData` with one client per writer; None
      where the writers are not known.
    earlier_options: From the options of a run of an earlier version to those
      that were added since, as they were before there was a choice; None where
      none were.
  """

  name: str
  description: str
  load: Callable[..., corpus_lib.Corpus]
  default_model: str
  few_round: FewRoundDefaults | None = None
  clients: ClientDefaults = ClientDefaults()
  partition: str | None = None
  preset: str = 'paper'
  load_client_data: Callable[..., tuple] | None = None
  earlier_options: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = (
      None
  )
  test_fraction: float | None = None
  look: Callable[[str | None, Mapping[str, Any]], 'DatasetSpec'] | None = None
