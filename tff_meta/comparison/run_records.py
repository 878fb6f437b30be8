"""What config.json says of runs, whichever version wrote it, side by side."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
from typing import Any

from tff_meta.training import run_config


def as_of_now(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a configuration as this version of the library writes it.

  As far as it can be read: one with names that nobody registers any more, or
  without a field that there is no default of, stays as it is.

  Args:
    config: The entry `config` of a config.json.
  """
  config = dict(config)
  with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
    config = run_config.upgrade(config)
    config = run_config.from_json(config).to_json()
  return config


def flatten(
    record: Mapping[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  """Yields name and value of every field, names of nested ones with points."""
  for name, value in record.items():
    if isinstance(value, Mapping):
      yield from flatten(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def differences(
    records: Sequence[Mapping[str, Any]],
) -> dict[str, dict[int, Any]]:
  """Returns the fields that are not the same in all records.

  Args:
    records: As nested mappings.

  Returns:
    Field -> index of a record -> value, without records that have no such
    field.
  """
  flat = [dict(flatten(record)) for record in records]
  fields = dict.fromkeys(field for of_one in flat for field in of_one)
  found = {
      field: {
          i: of_one[field] for i, of_one in enumerate(flat) if field in of_one
      }
      for field in fields
  }
  return {
      field: values
      for field, values in found.items()
      if len(values) < len(flat)
      or any(value != flat[0][field] for value in values.values())
  }
