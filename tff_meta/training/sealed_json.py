"""JSON files that tell if they were changed: the first entry is a checksum.

`sha256` is that of the other entries, as `json.dumps` writes them with sorted
keys. Files without it, as earlier versions wrote them, are read as they are,
but not beside those of the same run that have one.
"""

from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

from tff_meta import plain_files

_SEAL = 'sha256'
_MAX_DEPTH = 100  # Of lists in lists; ours have about ten.


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the content of a JSON file with its checksum."""
  return {_SEAL: _digest(content), **content}


def read(path: pathlib.Path, *others: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a JSON file without its checksum.

  Args:
    path: The file.
    *others: Files of the same run, all of which had a checksum or none.

  Raises:
    DamagedFileError: If it is not plain, not JSON of an object, or was changed.
    OSError: If it cannot be read, or is not there.
  """
  content = plain_files.read_bytes(path, plain_files.MAX_JSON_BYTES)
  try:
    value = parse(content)
    found = value.pop(_SEAL, None)
    if found is None and any(map(is_sealed, others)):
      raise ValueError('its checksum is gone')
    if found is not None and found != _digest(value):
      raise ValueError('its checksum does not match its content')
  except ValueError as error:
    raise plain_files.DamagedFileError(
        f'Expected {path} as it was written, found it damaged: {error}.'
    ) from None
  return value


def is_sealed(path: pathlib.Path) -> bool:
  """Returns whether a file has a checksum; not if it is unreadable."""
  try:
    return _SEAL in parse(
        plain_files.read_bytes(path, plain_files.MAX_JSON_BYTES)
    )
  except (OSError, ValueError):
    return False


def parse(content: bytes) -> dict[str, Any]:
  """Returns the JSON object in some bytes, which may come from anywhere.

  Raises:
    ValueError: If there is something else, or if it is nested too deeply for
      what is done with it later.
  """
  try:
    value = json.loads(content.decode(), parse_constant=_refuse)
  except RecursionError:
    raise ValueError('it is nested too deeply') from None
  if not isinstance(value, dict):
    raise ValueError(f'it is no object but of type {type(value).__name__}')
  layer = [value]
  for _ in range(_MAX_DEPTH):
    layer = [child for parent in layer for child in _children(parent)]
    if not layer:
      return value
  raise ValueError('it is nested too deeply')


def _refuse(constant: str) -> None:
  raise ValueError(f'it has {constant} for a number')


def _children(value) -> list[Any]:
  children = value.values() if isinstance(value, dict) else value
  return [child for child in children if isinstance(child, dict | list)]


def _digest(content: Mapping[str, Any]) -> str:
  # There and back: JSON makes strings of keys, which sorts them differently.
  plain = json.loads(json.dumps(content))
  return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
