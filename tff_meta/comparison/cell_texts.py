"""The numbers of an entry as reports print them, whatever their form."""

from tff_meta.comparison import results

NONE = '–'
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
