"""The names of protocols, see `protocols`, without TensorFlow."""

from collections.abc import Sequence

from tff_meta import spelling

NONE = 'none'
NEW_GROUPS = 'new_groups'
NEW_GROUPS_IID = 'new_groups_iid'
NEW_GROUPS_MIXED = 'new_groups_mixed'
NEW_GROUPS_MIXED_IID = 'new_groups_mixed_iid'
KNOWN_CLIENTS = 'known_clients'
NEW_CLIENTS = 'new_clients'
NEW_CLASS_CLIENTS = 'new_class_clients'

# Name -> who is tested.
MEANINGS = {
    NEW_GROUPS: 'groups of clients with new classes, few of them a client',
    NEW_GROUPS_IID: 'groups of clients with new classes, all of them a client',
    NEW_GROUPS_MIXED: (
        'groups with three fifths of classes of training, few of them a client'
    ),
    NEW_GROUPS_MIXED_IID: (
        'groups with three fifths of classes of training, all of them a client'
    ),
    KNOWN_CLIENTS: 'clients of training, on their own test examples',
    NEW_CLIENTS: 'clients that training never saw',
    NEW_CLASS_CLIENTS: 'clients with new classes, each with its own model',
}
PROTOCOLS = tuple(MEANINGS)
# Whose groups have one model for all their clients; and all that have groups.
OF_GROUPS = (
    NEW_GROUPS,
    NEW_GROUPS_IID,
    NEW_GROUPS_MIXED,
    NEW_GROUPS_MIXED_IID,
)
WITH_GROUPS = (*OF_GROUPS, NEW_CLASS_CLIENTS)
# Protocol -> who is tested on the way in its place, where there are some.
VALIDATED_AS = {
    KNOWN_CLIENTS: 'validation_clients',
    NEW_CLASS_CLIENTS: 'validation_new_class_clients',
    **dict.fromkeys(OF_GROUPS, 'validation_groups'),
}

# Settings of an evaluation, and axes of a grid -> the protocols that have them.
_HAVING = {
    'group_rounds': OF_GROUPS,
    'group_clients': WITH_GROUPS,
    'way': WITH_GROUPS,
    'eval_groups': WITH_GROUPS,
    'eval_support_fraction': (KNOWN_CLIENTS, NEW_CLIENTS),
    'restrict_f1_to_client_labels': (
        KNOWN_CLIENTS,
        NEW_CLIENTS,
        NEW_CLASS_CLIENTS,
    ),
}


def having(setting: str) -> tuple[str, ...]:
  """Returns the protocols that have a setting, which is all for most."""
  return _HAVING.get(setting, PROTOCOLS)


def check(names: Sequence[str]) -> None:
  """Raises a ValueError if there is no protocol of a name.

  Args:
    names: Any number of names; `'none'` means no protocol if it is alone.
  """
  for name in () if tuple(names) == (NONE,) else names:
    if name not in PROTOCOLS:
      raise ValueError(
          f'Expected protocols of {", ".join(PROTOCOLS)}, found'
          f' {name!r}.{spelling.tip(name, PROTOCOLS)}'
      )
