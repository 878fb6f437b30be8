"""The data sets by name: one file each, and this list of them."""

import inspect

from tff_meta import catalog
from tff_meta import spelling
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import cifar10
from tff_meta.datasets import cifar100
from tff_meta.datasets import cinic10
from tff_meta.datasets import digit_pairs
from tff_meta.datasets import digits
from tff_meta.datasets import femnist
from tff_meta.datasets import meta_dataset
from tff_meta.datasets import mini_imagenet
from tff_meta.datasets import mnist
from tff_meta.datasets import omniglot
from tff_meta.datasets import own_data
from tff_meta.datasets import synthetic
from tff_meta.datasets.dataset_spec import ClientDefaults
from tff_meta.datasets.dataset_spec import DatasetSpec
from tff_meta.datasets.dataset_spec import FewRoundDefaults
from tff_meta.datasets.locations import DatasetNotFoundError
from tff_meta.datasets.own_data import KINDS as OWN_KINDS
from tff_meta.datasets.own_data import short_name

__all__ = (
    'DATASETS',
    'OWN_KINDS',
    'ClientDefaults',
    'DatasetNotFoundError',
    'DatasetSpec',
    'FewRoundDefaults',
    'get',
    'load_corpus',
    'register_dataset',
    'short_name',
)

_OURS = {
    module.SPEC.name: module.SPEC
    for module in (
        digits,
        digit_pairs,
        synthetic,
        mnist,
        cifar10,
        cifar100,
        omniglot,
        femnist,
        cinic10,
        mini_imagenet,
        meta_dataset,
    )
}

DATASETS = catalog.Catalog[DatasetSpec]('dataset', _OURS)


def register_dataset(spec: DatasetSpec) -> None:
  """Adds a data set from outside.

  Args:
    spec: Its specification, with the name that `--dataset` takes.

  Raises:
    ValueError: If there is one of its name, or that is no name.
  """
  DATASETS.register(spec.name, spec)


def get(name: str) -> DatasetSpec:
  """Returns a data set's specification.

  Args:
    name: One of `DATASETS`, or `KIND:PATH` for data of one's own.

  Raises:
    ValueError: If the name is unknown; lists the known ones.
  """
  if own_data.is_own(name):
    return own_data.spec(name)
  try:
    return DATASETS.find(name)
  except catalog.UnknownNameError as error:
    raise catalog.UnknownNameError(f'{error}{own_data.tip(name)}') from None


def load_corpus(
    name: str,
    data_dir: str | None = None,
    download: bool = False,
    **options,
) -> corpus_lib.Corpus:
  """Loads a data set by name.

  Args:
    name: As for `get`.
    data_dir: Where the data set is; None: the default place (see its file).
    download: Whether to fetch it if it is not there.
    **options: Further arguments of the data set's `load`, such as `scaling`.

  Returns:
    The corpus.

  Raises:
    DatasetNotFoundError: If it is not there, or cannot be fetched.
    TypeError: If the data set loads something else.
    ValueError: If the name or an option is unknown, or an option impossible.
  """
  load = get(name).load
  known = list(inspect.signature(load).parameters)[2:]
  for option in options:
    if option not in known:
      raise ValueError(
          f'Expected an option of the data set {name!r} to be one of'
          f' {", ".join(known)}, found {option!r}.'
          f'{spelling.tip(option, known)}'
      )
  corpus = load(data_dir, download, **options)
  if not isinstance(corpus, corpus_lib.Corpus):
    raise TypeError(
        f'Expected `load` of the data set {name!r} to return a'
        f' `corpus.Corpus`, found {corpus!r}.'
    )
  return corpus
