"""What config.json says of runs, whichever version wrote it, side by side."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple

from tff_meta.training import run_config

UNKNOWN = 'unknown'  # In the place of a commit.


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


class Fingerprint(NamedTuple):
  """The fingerprint of a run's data; only those of one rule can be compared.

  Attributes:
    of_all: Whether it is of all examples, as since version 0.2.0; earlier ones
      are of 64 examples of each part of a corpus, or of three clients. It is
      told by the version, so that runs of development between the two rules
      are taken for older ones.
    digits: As recorded.
  """

  of_all: bool
  digits: str


def fingerprint(record: Mapping[str, Any]) -> Fingerprint | None:
  """Returns the fingerprint of the data of a config.json, None without one."""
  found = dict(flatten(record))
  if 'data.fingerprint' not in found:
    return None
  version = str(found.get('versions.tff_meta', ''))
  return Fingerprint(
      not version.startswith('0.1.'), str(found['data.fingerprint'])
  )


def same_data(fingerprints: Iterable[Fingerprint | None]) -> bool | None:
  """Returns whether runs had the same data; None if that cannot be told.

  Args:
    fingerprints: Of all of them, None for each run without one.
  """
  fingerprints = list(fingerprints)
  found = set(fingerprints)
  if len(fingerprints) < 2 or len(found - {None}) == len(found) == 1:
    return True
  of_a_rule = collections.Counter(f.of_all for f in found if f)
  return False if max(of_a_rule.values(), default=0) > 1 else None


def commits(record: Mapping[str, Any]) -> dict[int, str]:
  """Returns of what code a run is: from which round on -> its commit.

  One from beyond the last round has evaluated alone.

  Args:
    record: A config.json.
  """
  found: dict[int, str] = {}
  last = None
  for code in record.get('code_of_rounds') or [{**record, 'from_round': 1}]:
    commit = str(code.get('git_commit') or UNKNOWN)
    if commit != last:  # Else its environment was another one.
      found[code['from_round']] = last = commit
  return found


def code(record: Mapping[str, Any]) -> str:
  """Returns the commit of a run, of several also their first rounds."""
  found = commits(record)
  if len(found) == 1:
    return found[1]
  return ', '.join(f'{commit} from round {r}' for r, commit in found.items())


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
