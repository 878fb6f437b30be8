"""The numbers of an entry as reports print them, whatever their form."""

from collections.abc import Iterable, Sequence

from tff_meta.comparison import pairs as pairs_lib
from tff_meta.comparison import results

NONE = '–'
_NO_SEED = 'none: no seed that both have'
# Heads the column of `megabytes`.
MEGABYTES = "a client's MB a round, down + up"


def ours(entry: results.Entry) -> str:
  """Returns the mean and its interval, or why there is none."""
  if not entry.states:
    return 'not run here'
  if entry.mean is None:
    # Never a number where there is none: say how the seeds stand.
    states = dict.fromkeys(entry.states.values())
    return ', '.join('no number' if s == 'finished' else s for s in states)
  text = f'{entry.mean:.2f}'
  if entry.half_width is not None:
    text += f' ± {entry.half_width:.2f}'
  return text


def spread(entry: results.Entry) -> str:
  """Returns the spread within single runs, empty where there is none."""
  if entry.mean is None or entry.spread is None:
    return ''
  return f'(± {entry.spread:.2f}, {entry.spread_name})'


def published(entry: results.Entry) -> str:
  """Returns what the paper prints."""
  if entry.published is None:
    return NONE
  behind = entry.published.spread
  return f'{entry.published.value:g}' + (
      '' if behind is None else f' ± {behind:g}'
  )


def difference(entry: results.Entry) -> str:
  """Returns ours minus published."""
  return NONE if entry.difference is None else f'{entry.difference:+.2f}'


def seeds(entry: results.Entry) -> str:
  """Returns how many of its runs have a number."""
  if not entry.states:
    return NONE
  return f'{len(entry.values)} of {len(entry.states)}'


def has_megabytes(entry: results.Entry) -> bool:
  """Returns whether its runs say what clients are sent, or send."""
  return entry.bytes_down is not None or entry.bytes_up is not None


def megabytes(entry: results.Entry) -> str:
  """Returns what one of its clients is sent, and sends, in a round.

  In millions of bytes; `?` for what is not known.
  """
  if not has_megabytes(entry):
    return NONE
  both = entry.bytes_down, entry.bytes_up
  return ' + '.join('?' if n is None else f'{n / 1e6:.3f}' for n in both)


def hours(entry: results.Entry) -> str:
  """Returns the wall clock of its runs."""
  if not entry.states or entry.hours is None:
    return NONE
  return f'{entry.hours:.2f}'


_PAIRS = (
    'Percentage points, over the seeds that both have. A seed is the same draw'
    ' of clients or groups for both, and each is compared with itself. The'
    ' first interval says what other clients or groups of this kind would have'
    ' with the models that were trained; the second, over seeds, what another'
    ' draw and training would have: of two or three seeds it is wide, of one'
    ' there is none. Neither is corrected for the number of rows.'
)


def about_pairs(pairs: Iterable[Sequence[pairs_lib.Pair]]) -> str:
  """Returns what paired differences are, those of each measure in turn."""
  if all(of_one[0].in_percent for of_one in pairs):
    return _PAIRS
  return f'{_PAIRS} Where the name of a measure says another unit, in that.'


def pairs_title(pairs: Sequence[pairs_lib.Pair]) -> str:
  """Returns what paired differences of one measure are of."""
  return f'{pairs[0].measure}, each method minus {pairs[0].other}'


def pairs_header(pairs: Sequence[pairs_lib.Pair]) -> list[str]:
  """Returns what heads the columns of `pair`, behind that of the method."""
  unit = pairs[0].unit
  return ['difference', f'95 % over {unit}', '95 % over seeds', unit, 'seeds']


def pair(pair: pairs_lib.Pair) -> list[str]:
  """Returns a paired difference with its intervals."""
  return [
      f'{pair.mean:+.2f}' if pair.values else NONE,
      over_units(pair),
      over_seeds(pair),
      NONE if pair.num_units is None else str(pair.num_units),
      seeds_of(pair),
  ]


def over_units(pair: pairs_lib.Pair) -> str:
  """Returns the interval over clients or groups, or why there is none."""
  if not pair.values:
    return _NO_SEED
  if pair.half_width_over_units is None:
    if pair.is_without_spread:
      return 'none: all differences are the same'
    return f'none: {"; ".join(dict.fromkeys(pair.problems.values()))}'
  return _interval(pair.mean, pair.half_width_over_units)


def over_seeds(pair: pairs_lib.Pair) -> str:
  """Returns the interval over seeds, or that there is none."""
  if not pair.values:
    return _NO_SEED
  if pair.half_width_over_seeds is None:
    return 'none: one seed'
  return _interval(pair.mean, pair.half_width_over_seeds)


def seeds_of(pair: pairs_lib.Pair) -> str:
  """Returns which seeds both have, and how many agree in the sign."""
  text = ', '.join(map(str, pair.values)) or NONE
  if len(pair.values) < 2:
    return text
  return f'{text} ({pair.num_same_sign} of {len(pair.values)} of this sign)'


def _interval(mean: float, half_width: float) -> str:
  return f'{mean - half_width:+.2f} to {mean + half_width:+.2f}'
