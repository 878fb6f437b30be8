"""What a comparison says, in one or two sentences."""

from collections.abc import Sequence
import statistics
from typing import Literal, NamedTuple

from tff_meta.comparison import pairs
from tff_meta.comparison import results

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
    # Nobody is the best of one.
    found = {
        setting: (best, entries)
        for setting, (best, entries) in found.items()
        if sum(entry.mean is not None for entry in entries) > 1
    }
    if not found:
      return ['No setting has numbers of two rows yet.']
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
  text += f', {abs(first.mean - second.mean):.2f} points before {second.row}'
  ends = [second, first] if first.lower_is_better else [first, second]
  pair = pairs.pair(*ends)
  if pair is None:
    return f'{text}; they have no seed in common, so this may be luck.'
  judgement = judge(pair)
  if not len(pair.values) == len(first.values) == len(second.values):
    text += f' ({abs(pair.mean):.2f} with the seeds that both have'
    text += ')' if pair.mean > 0 else f', where {second.row} is ahead)'
  if judgement.word == 'confirmed':
    return f'{text}, more than chance: {judgement.why}.'
  if judgement.word == 'contradicted':
    return f'{text}; that is more than chance: {judgement.why}.'
  return f'{text}, but the two are not told apart: {judgement.why}.'


class Judgement(NamedTuple):
  """What runs say of a claim.

  Attributes:
    word: In one word or two.
    why: Half a sentence.
  """

  word: Literal['confirmed', 'contradicted', 'not decided']
  why: str


def judge(pair: pairs.Pair, margin: float = 0.0) -> Judgement:
  """Returns whether a row is ahead of another by more than a margin.

  * confirmed: the 95 % interval over clients or groups lies above the margin,
    there are at least two seeds, and the difference of each is above it.
  * contradicted: the same, all below the margin.
  * not decided: anything else, with what it is that is missing. So it is, too,
    if all differences are the same, as of few clients with few examples: they
    say nothing of how far others would be from them.

  The interval over seeds has no say: of two seeds it is 6.4 times as wide as
  they are apart, and would decide nothing. That all seeds agree is a weak
  stand-in; with two it happens by chance half of the time.

  A claim of equality ("no worse") cannot be confirmed by a difference that is
  not told from 0, which few clients always give. It has to name how much worse
  is still as good, and that is a negative margin: -1 asks whether the row is
  less than a point behind. It is contradicted by more than a point, not by any
  that is told from 0.

  Args:
    pair: The row minus the other.
    margin: In percentage points.
  """
  over = 'the margin' if margin else '0'
  signs = {(v > margin) - (v < margin) for v in pair.values.values()}
  half_width = pair.half_width_over_units
  reasons = []
  if pair.is_without_spread:
    reasons.append('all differences are the same')
  elif half_width is None:
    reasons.append(f'no interval over {pair.unit}')
  elif abs(pair.mean - margin) <= half_width:
    reasons.append(f'the interval over {pair.unit} includes {over}')
  if len(pair.values) < 2:
    reasons.append('one seed')
  elif len(signs) > 1:
    reasons.append('seeds disagree')
  if reasons:
    return Judgement('not decided', ' and '.join(reasons))
  return Judgement(
      'confirmed' if pair.mean > margin else 'contradicted',
      f'the interval over {pair.unit} leaves out {over}, and all'
      f' {len(pair.values)} seeds agree',
  )


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
  """Returns which of many differences remain when all are taken together.

  Of n differences the i-th smallest p-value, from 0 on, must be at most
  level / (n - i), and so must all that are smaller. If some are differences of
  nothing, the probability that one or more of these remain is at most the
  level, however they depend on each other.

  Source: Holm (1979), A simple sequentially rejective multiple test procedure.

  Args:
    p_values: Of each difference, from 0 to 1.
    level: Above 0 and below 1.

  Returns:
    Whether it remains, in their order.
  """
  remain = [False] * len(p_values)
  for i, place in enumerate(
      sorted(range(len(p_values)), key=p_values.__getitem__)
  ):
    if p_values[place] > level / (len(p_values) - i):
      break
    remain[place] = True
  return remain
