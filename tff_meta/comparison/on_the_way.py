"""Which columns of metrics.csv show the accuracy that a setting is about.

And what rounds measure beside it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tff_meta.comparison import tables
from tff_meta.training import protocol_names

_MICRO = '_micro'  # Ends the names of accuracies over all examples.


class Signal(NamedTuple):
  """What rounds measure, if their method does.

  Attributes:
    column: Of metrics.csv.
    label: A few words.
    meaning: A sentence without its point.
  """

  column: str
  label: str
  meaning: str


SIGNALS = (
    Signal(
        'client_work/signal/margin',
        "the server's margin",
        "The server's margin between classes: the distance between the means of"
        " two classes in a client's embedding, the mean over pairs of classes"
        " and clients, and over rounds by the algorithm's rule",
    ),
    Signal(
        'train/max_update_norm',
        'largest norm of an update',
        "Drift: the largest norm of an update among a round's clients",
    ),
)


def wanted(setting: tables.Setting) -> tuple[str, ...]:
  """Returns the columns that a setting is about, the best first.

  Args:
    setting: Its first measure of an evaluation says whose accuracy is meant,
      and if that of all examples.

  Returns:
    Empty if no measure says so.
  """
  for measure in setting.measures:
    section, _, rest = measure.path.partition('/')
    if section == 'last_ten_evaluations_mean':
      return (rest,)
    if section in ('evaluation', 'evaluation_best'):
      protocol, _, number = rest.partition('/')
      ending = _MICRO if number == 'accuracy_micro' else ''
      instead = protocol_names.VALIDATED_AS.get(protocol, protocol)
      names = dict.fromkeys((instead, protocol))
      return tuple(f'{name}/accuracy{ending}' for name in names)
  return ()


def columns(setting: tables.Setting, found: Iterable[str]) -> list[str]:
  """Returns a column for each of those who were tested on the way.

  Args:
    setting: Whose column is the first one, if there is one.
    found: All columns of its runs.

  Returns:
    Of all examples where that is wanted and there; empty without evaluations.
  """
  names = list(dict.fromkeys(found))
  first = wanted(setting)
  ending = _MICRO if any(name.endswith(_MICRO) for name in first) else ''
  own = [name.split('/')[0] for name in first]

  def place(column: str) -> int:
    who = column.split('/')[0]
    return own.index(who) if who in own else len(own)

  of_all = [
      name
      for name in names
      if name.split('/')[-1] == 'accuracy' and not name.startswith('train/')
  ]
  return sorted(
      (n + ending if n + ending in names else n for n in of_all), key=place
  )


def attention(setting: tables.Setting, column: str) -> str:
  """Returns a sentence if a column is not one that a setting is about.

  Args:
    setting: The setting.
    column: What is shown for it.
  """
  first = wanted(setting)
  if not first or column in first:
    return ''
  return (
      f'Attention: the setting is about {first[-1]}, which was not measured on'
      f' the way; this is {column}.'
  )
