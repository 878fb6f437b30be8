"""What there is of a kind, by name: ours, and what comes from outside.

Algorithms, networks, data sets, partitions and tables are each a catalog beside
what they are of, and each has a function that adds to it. `tff_meta.plugins`
imports the modules that call these.
"""

from collections.abc import Collection, Mapping
import re
from typing import TypeVar

from tff_meta import spelling

_T = TypeVar('_T')
_TIP = (
    ' Tip: --plugins=MODULE imports what a module of yours registers; --list'
    ' says what there is.'
)


class UnknownNameError(ValueError):
  """There is nothing of a name; the message lists what there is."""


class Catalog(dict[str, _T]):
  """Values by name, in the order in which they came."""

  def __init__(
      self,
      kind: str,
      values: Mapping[str, _T],
      reserved: Collection[str] = (),
  ):
    """Makes a catalog of this library's own values.

    Args:
      kind: What they are, as the field or flag is called that takes a name.
      values: Name -> value.
      reserved: Names that mean something without being here.
    """
    super().__init__(values)
    self._kind = kind
    self._reserved = tuple(reserved)

  @property
  def names(self) -> tuple[str, ...]:
    """All names that mean something, reserved ones first."""
    return (*self._reserved, *self)

  def check(self, name: str) -> None:
    """Raises an `UnknownNameError` if a name means nothing."""
    if name not in self.names:
      raise UnknownNameError(
          f'Expected `{self._kind}` to be one of {", ".join(self.names)}, found'
          f' {name!r}.{spelling.tip(name, self.names) or _TIP}'
      )

  def find(self, name: str) -> _T:
    """Returns the value of a name.

    Raises:
      UnknownNameError: If there is none.
    """
    self.check(name)
    if name not in self:
      raise UnknownNameError(
          f'Expected a `{self._kind}` with a value, found {name!r}, which means'
          ' something else.'
      )
    return self[name]

  def register(self, name: str, value: _T) -> None:
    """Adds a value.

    Args:
      name: Of ASCII letters, digits, `_`, `-` and `.`: flags and folders hold
        it.
      value: The value.

    Raises:
      ValueError: If the name is another, or means something already.
    """
    if not re.fullmatch(r'[A-Za-z0-9_][\w.-]*', name, re.ASCII):
      raise ValueError(
          f'Expected the name of a new `{self._kind}` to consist of letters,'
          f' digits, "_", "-" and ".", found {name!r}.'
      )
    if name in self.names:
      raise ValueError(
          f'Expected the name of a new `{self._kind}` to be free, found'
          f' {name!r}, which there is already.'
      )
    self[name] = value
