"""What a comparison says, in one or two sentences."""

from collections.abc import Sequence
import statistics

from tff_meta.comparison import results

_INTERVAL = 'the paired 95 % interval over'
_NAMED = 2  # Settings, or rows, that are named; more are counted.


def verdict(by_setting: Sequence[tuple[str, Sequence[results.Entry]]]) -> str:
  """Returns what the first measure of every setting says.

  Args:
    by_setting: Settings, each with its rows' entries of the first measure.
  """
  entries = [entry for _, of_one in by_setting for entry in of_one]
  states = [state for e in entries for state in e.states.values()]
  if not any(entry.values for entry in entries):
    return 'No run has a number yet.'
  sentences = []
  if states.count('finished') < len(states):
    sentences.append(
        f'Not complete: {states.count("finished")} of {len(states)} runs have'
        ' finished.'
    )
  compared = [entry for entry in entries if entry.difference is not None]
  if compared:
    sentences += _against_published(by_setting, compared)
  else:
    sentences += _best_rows(by_setting)
  return ' '.join(sentences)


def _against_published(by_setting, compared) -> list[str]:
  """Returns how far ours are from the paper's, and if the best is the same."""

  def off(entry):
    return abs(entry.difference)

  def named(entry):
    return f'{entry.row} in {entry.setting} ({entry.difference:+.2f})'

  far, near = max(compared, key=off), min(compared, key=off)
  if len(compared) == 1:
    return [f'Ours minus published: {named(far)}, in percentage points.']
  apart = statistics.fmean(map(off, compared))
  bias = statistics.fmean(entry.difference for entry in compared)
  sentences = [
      f'{compared[0].measure}: our {len(compared)} numbers are {apart:.2f}'
      ' points from the published ones on average (mean difference'
      f' {bias:+.2f}); the nearest is {named(near)}, the farthest {named(far)}.'
  ]
  same = total = 0
  for _, entries in by_setting:
    both = [entry for entry in entries if entry.difference is not None]
    if len(both) > 1:
      ours = {e.row for e in results.best(both, results.mean)}
      theirs = {e.row for e in results.best(both, results.published)}
      total += 1
      same += bool(ours & theirs)
  if total:
    where = 'The' if total == 1 else f'In {same} of {total} settings the'
    is_same = 'is' if same or total > 1 else 'is not'
    sentences.append(
        f'{where} best method of those with both numbers {is_same} that of the'
        ' paper.'
    )
  return sentences


def _best_rows(by_setting) -> list[str]:
  """Returns which rows are the best ones, and by how much."""
  found = {
      setting: (best, entries)
      for setting, entries in by_setting
      for best in [results.best(entries, results.mean)]
      if best
  }
  if len(found) > _NAMED:
    names = [entry.row for best, _ in found.values() for entry in best]
    most = max(dict.fromkeys(names), key=names.count)
    return [
        f'{most} is the best row in {names.count(most)} of {len(found)}'
        f' settings ({_measure(found)}).'
    ]
  return [
      _lead(setting, best, entries)
      for setting, (best, entries) in found.items()
  ]


def _measure(found) -> str:
  measures = (best[0].measure for best, _ in found.values())
  return ', '.join(dict.fromkeys(measures))


def _lead(setting, best, entries) -> str:
  """Returns a sentence on the best row of a setting and its lead."""
  first = best[0]
  text = f'{setting}: {first.row} has {first.mean:.2f} % ({first.measure})'
  if len(best) > 1:
    others = ', '.join(entry.row for entry in best[1:])
    if len(best) > _NAMED + 1:
      others = f'{len(best) - 1} other rows'
    return f'{text}, and so {"has" if len(best) == 2 else "have"} {others}.'
  rest = [entry for entry in entries if entry is not first]
  second = next(iter(results.best(rest, results.mean)), None)
  if second is None:
    return f'{text}.'
  seeds = len(first.values.keys() & second.values.keys())
  text += f', {abs(first.mean - second.mean):.2f} points before {second.row}'
  pairs = {p.row: p for p in results.paired_with_best(entries)}
  pair = pairs.get(second.row)
  if pair is None or pair.half_width is None:
    shared = 'one seed' if seeds else 'no seed'
    return f'{text}; with {shared} in common this may be luck.'
  if abs(pair.mean) > pair.half_width:
    return f'{text}, more than chance: {_INTERVAL} {seeds} seeds leaves out 0.'
  return (
      f'{text}, but the two are not told apart: {_INTERVAL} {seeds} seeds'
      ' includes 0.'
  )
