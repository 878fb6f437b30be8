"""The ways to make training clients, by name, without TensorFlow."""

from typing import Any

from tff_meta.data import partitioners
from tff_meta.training import hyperparameters


def read_options(
    partition: str, text: str, examples_per_class: int | None
) -> dict[str, Any]:
  """Returns all options of a partition.

  Args:
    partition: One of `partitioners.PARTITIONERS.names`.
    text: `name=value,...`, those that are not left at their defaults.
    examples_per_class: The default of `'few_round'`'s.

  Raises:
    ValueError: If the partition or an option is unknown, or a value impossible.
  """
  partitioners.PARTITIONERS.check(partition)
  if partition == partitioners.FEW_ROUND:
    hint = {'examples_per_class': int | None}
    given = hyperparameters.parse(text, hint, of=partition)
    return {'examples_per_class': examples_per_class} | given
  deal = partitioners.PARTITIONERS[partition]
  return hyperparameters.parse_options(deal, 3, text)
