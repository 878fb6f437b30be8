"""Rows are compared client by client, and claims are judged by that."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from tff_meta import plain_files
from tff_meta.comparison import cell_texts
from tff_meta.comparison import pairs
from tff_meta.comparison import results
from tff_meta.comparison import verdicts
from tff_meta.evaluation import client_metrics


def _entry(root, row, tested, path='evaluation/known_clients/accuracy_mean'):
  """Makes runs; `tested` is seed -> (client, examples, accuracy in percent)."""
  section, protocol, number = path.split('/')
  values, runs = {}, {}
  for seed, clients in tested.items():
    run = runs[seed] = root / f'{row}_{seed}'
    run.mkdir(parents=True)
    weights = [n if number == 'accuracy_micro' else 1 for _, n, _ in clients]
    weighted = sum(w * a for w, (*_, a) in zip(weights, clients, strict=True))
    values[seed] = weighted / sum(weights)
    suffix = '_best' if section == 'evaluation_best' else ''
    unit = 'group' if 'groups' in protocol else 'client'
    lines = [f'{unit}_id,num_support,num_examples,accuracy']
    lines += [f'{name},7,{n},{a / 100!r}' for name, n, a in clients]
    table = run / f'{unit}s_{protocol}{suffix}.csv'
    table.write_text('\n'.join(lines) + '\n')
  return results.Entry(
      row=row,
      setting='all',
      measure='accuracy',
      published=None,
      values=values,
      spread=None,
      spread_name='',
      states=dict.fromkeys(tested, 'finished'),
      problems={},
      hours=None,
      path=path,
      runs=runs,
  )


# In another order, as the rows of two tables may be.
_LOW = [('a', 10, 1.0), ('b', 10, 2.0), ('c', 10, 3.0)]
_HIGH = [('c', 10, 33.0), ('a', 10, 11.0), ('b', 10, 22.0)]


def _pair(root, mine, others, path='evaluation/known_clients/accuracy_mean'):
  entries = (_entry(root, 'A', mine, path), _entry(root, 'B', others, path))
  return pairs.pair(*entries)


def test_intervals_by_hand(tmp_path):
  """Differences of 10, 20 and 30: s = 10, V = 100 / 3."""
  one = _pair(tmp_path / 'one', {1: _HIGH, 2: _HIGH}, {1: _LOW, 3: _LOW})
  assert one.values == pytest.approx({1: 20.0})
  # t(0.975, 2) = 4.3027, from a printed table, as all of these.
  expected = 4.3027 * 10 / math.sqrt(3)
  assert one.half_width_over_units == pytest.approx(expected, rel=1e-4)
  # Of 2 degrees of freedom, 1 - t / sqrt(2 + t^2), with t of 12^0.5 and 3^0.5.
  assert one.p_value_over_units() == pytest.approx(1 - (12 / 14) ** 0.5)
  assert one.p_value_over_units(10) == pytest.approx(1 - (3 / 5) ** 0.5)
  assert one.half_width_over_seeds is None
  shifted = [(name, n, a - 5) for name, n, a in _HIGH]
  two = _pair(tmp_path / 'two', {1: _HIGH, 2: shifted}, {1: _LOW, 2: _LOW})
  assert two.mean == pytest.approx(17.5)
  # V = (100 / 3 + 100 / 3) / 4; (2 x)^2 / (2 x^2 / 2) = 4 degrees: t = 2.7764.
  expected = 2.7764 * math.sqrt(200 / 3) / 2
  assert two.half_width_over_units == pytest.approx(expected, rel=1e-4)
  # Of 20 and 15: s = 3.5355; t(0.975, 1) = 12.7062.
  expected = 12.7062 * 3.5355 / math.sqrt(2)
  assert two.half_width_over_seeds == pytest.approx(expected, rel=1e-4)
  assert (two.num_units, two.num_same_sign, two.unit) == (6, 2, 'clients')


def test_writers_of_several_seeds_count_once(tmp_path):
  """Parts of a, b, c: 1.5 ** 0.5 / 3 times -10, 0, 10, in both seeds.

  So V = 2 (2 x 10)^2 x 1.5 / 9 / 4 = 100 / 3, as of one seed, and the 2 degrees
  of freedom are those of three writers.
  """
  two = ({1: _HIGH, 2: _HIGH}, {1: _LOW, 2: _LOW})
  entries = [_entry(tmp_path, *of) for of in zip('AB', two, strict=True)]
  expected = 4.3027 * 10 / math.sqrt(3)
  assert pairs.pair(*entries).half_width_over_units < expected / 2
  for run in (run for entry in entries for run in entry.runs.values()):
    config = {'config': {'partition': 'by_writer'}}
    (run / 'config.json').write_text(json.dumps(config))
  found = pairs.pair(*entries)
  assert found.half_width_over_units == pytest.approx(expected, rel=1e-4)
  assert found.num_units == 3


def test_examples_are_weights_where_the_measure_has_them(tmp_path):
  """D = (1 x 80 + 3 x 0) / 4, V = 2 (60^2 / 16 + 9 x 20^2 / 16)."""
  path = 'evaluation_best/known_clients/accuracy_micro'
  tested = ([('a', 1, 80.0), ('b', 3, 0.0)], [('a', 1, 0.0), ('b', 3, 0.0)])
  found = _pair(tmp_path, {1: tested[0]}, {1: tested[1]}, path)
  assert found.mean == pytest.approx(20.0)
  expected = 12.7062 * math.sqrt(2 * (3600 + 9 * 400) / 16)
  assert found.half_width_over_units == pytest.approx(expected, rel=1e-4)


def _of_columns(root, row, number, value, table):
  """An entry whose table of clients is given, and so is its number."""
  entry = _entry(
      root / number, row, {1: [('a', 10, value)]}, f'evaluation/known/{number}'
  )
  (entry.runs[1] / 'clients_known.csv').write_text(table)
  return entry


def test_what_every_client_has_is_paired_by_it(tmp_path):
  """NLL is a column, who is hurt is told by two."""
  head = 'client_id,num_support,num_examples,accuracy,accuracy_before,nll\n'
  mine = head + 'a,7,10,0.5,0.6,0.09\nb,7,10,0.5,0.4,0.06\n'
  others = head + 'a,7,10,0.5,0.5,0.05\nb,7,10,0.5,0.5,0.04\n'

  def pair(number, value, other):
    return pairs.pair(
        _of_columns(tmp_path, 'A', number, value, mine),
        _of_columns(tmp_path, 'B', number, other, others),
    )

  # Differences of 4 and 2 hundredths: s^2 / n = 2 / 2.
  nll = pair('nll_mean', 7.5, 4.5)
  assert nll.mean == pytest.approx(3.0)
  assert nll.spreads[1].variance == pytest.approx(1.0)
  # One of two is hurt and none of two; of 100 and 0 s^2 / n is 5,000 / 2.
  hurt = pair('share_hurt', 50.0, 0.0)
  assert hurt.mean == pytest.approx(50.0)
  assert hurt.spreads[1].variance == pytest.approx(2500.0)
  worst = pair('accuracy_worst_decile', 50.0, 50.0)
  assert worst.spreads == {}
  assert worst.problems == {1: 'fewer than 4 in the worst decile'}


def test_a_worst_decile_varies_as_its_clients_do():
  """There are as many degrees of freedom as if there were these alone."""
  d = np.arange(50.0)
  of_seed = pairs.spread_of(
      list(map(str, d)), np.full(50, 0.02), d, d.mean(), is_of_worst=True
  )
  both = {seed: of_seed for seed in (1, 2)}
  pair = pairs.Pair('', '', '', dict.fromkeys(both, d.mean()), '', both, {})
  # Two times the 4 of 5 clients, and half the variance.
  assert pair.half_width_over_units == pytest.approx(
      2.306 * math.sqrt(of_seed.variance / 2), rel=1e-4
  )
  # The same 50 in both seeds have the degrees of freedom of 50.
  same = dataclasses.replace(pair, is_same_by_name=True)
  assert same.half_width_over_units == pytest.approx(
      2.7764 * math.sqrt(of_seed.variance), rel=1e-4
  )


def test_a_worst_decile_needs_groups_where_clients_share_classes(tmp_path):
  """Of 40 clients the worst four are enough, of 20 groups the worst two not."""
  path = 'evaluation/new_class_clients/accuracy_worst_decile'
  names = [f'group_{g}_client_{k}' for g in range(20) for k in range(2)]
  clients = [(name, 10, float(i)) for i, name in enumerate(names)]
  entries = [
      dataclasses.replace(
          _entry(tmp_path, row, {1: clients}, path), values={1: 1.5}
      )
      for row in 'AB'
  ]
  assert pairs.pair(*entries).problems == {
      1: 'fewer than 4 in the worst decile'
  }


@pytest.mark.parametrize(
    'number, of_clients, degrees',
    [
        ('accuracy_worst_decile', client_metrics.worst_decile, 14),
        ('accuracy_gini', client_metrics.gini, 150),
    ],
)
def test_what_is_nearly_a_mean_has_the_spread_of_the_jackknife(
    tmp_path, number, of_clients, degrees
):
  """What leaving out each of 151 clients changes, after Tukey (1958).

  It is the worst 15 that say how far a worst decile varies.
  """
  rng = np.random.default_rng(5)
  n, level = 151, rng.beta(4, 2, 151)
  accuracies = [np.clip(level + rng.normal(0, 0.1, n), 0, 1) for _ in range(2)]
  head = 'client_id,num_support,num_examples,accuracy\n'
  entries = [
      _of_columns(
          tmp_path,
          row,
          number,
          100 * of_clients(a),
          head + ''.join(f'c{i},7,10,{float(a[i])!r}\n' for i in range(n)),
      )
      for row, a in zip('AB', accuracies, strict=True)
  ]
  left_out = np.array(
      [[of_clients(np.delete(a, i)) for a in accuracies] for i in range(n)]
  )
  apart = 100 * (left_out[:, 0] - left_out[:, 1])
  expected = (n - 1) / n * np.sum((apart - apart.mean()) ** 2)
  found = pairs.pair(*entries)
  assert found.problems == {}  # That the mean is the number is checked.
  variance = found.spreads[1].variance
  assert variance == pytest.approx(expected, rel=0.1)
  assert found.half_width_over_units == pytest.approx(
      stats.t.ppf(0.975, degrees) * math.sqrt(variance)
  )


@pytest.mark.parametrize(
    'clients, why',
    [
        ([('d', 10, 1.0), *_LOW[1:]], 'the clients are others'),
        ([('a', 11, 1.0), *_LOW[1:]], 'numbers of test examples'),
        (_LOW[:2], 'the clients are others'),
    ],
)
def test_other_clients_are_not_paired(tmp_path, clients, why):
  found = _pair(tmp_path, {1: _HIGH, 2: _HIGH}, {1: clients, 2: _LOW})
  assert re.search(why, found.problems[1]) and set(found.spreads) == {2}
  assert found.half_width_over_units is None
  assert found.half_width_over_seeds is not None


def test_clients_of_other_data_are_not_paired_by_their_names(tmp_path):
  """Other clients have the same names and sizes where they are dealt anew."""
  entries = [_entry(tmp_path, row, {1: _LOW}) for row in 'AB']
  for entry, digits in zip(entries, ['one', 'two'], strict=True):
    record = {'data': {'fingerprint': digits}, 'versions': {'tff_meta': '0.2'}}
    (entry.runs[1] / 'config.json').write_text(json.dumps(record))
  found = pairs.pair(*entries)
  assert found.problems == {1: 'the data are others'} and not found.spreads


def test_groups_of_other_kinds_are_not_paired(tmp_path):
  """Though they have the same names and numbers of examples."""
  path = 'evaluation/new_groups/accuracy_mean'
  entries = [
      _entry(tmp_path, row, {1: tested}, path)
      for row, tested in (('A', _HIGH), ('B', _LOW))
  ]
  assert pairs.pair(*entries).unit == 'groups'
  assert not pairs.pair(*entries).problems
  config = json.dumps({'config': {'group_clients': 20}})
  (entries[1].runs[1] / 'config.json').write_text(config)
  assert 'drawn otherwise' in pairs.pair(*entries).problems[1]


def test_clients_of_a_group_are_not_independent(tmp_path):
  """Means of 10 and 30 by group: V = 10^2, t(0.975, 1) = 12.7062."""
  path = 'evaluation/new_class_clients/accuracy_mean'
  names = [f'group_{g}_client_{k}' for g in range(2) for k in range(2)]
  mine = [(name, 10, a) for name, a in zip(names, (9, 11, 29, 31), strict=True)]
  others = [(name, 10, 0.0) for name in names[::-1]]  # In another order.
  entries = [
      _entry(tmp_path, row, {1: tested}, path)
      for row, tested in (('A', mine), ('B', others))
  ]
  found = pairs.pair(*entries)
  assert (found.mean, found.unit, found.num_units) == (20.0, 'groups', 2)
  assert found.half_width_over_units == pytest.approx(127.062, rel=1e-4)
  (entries[1].runs[1] / 'config.json').write_text('{"config": {"way": 5}}')
  assert 'drawn otherwise' in pairs.pair(*entries).problems[1]


@pytest.mark.parametrize('seeds', [(1,), (1, 2)])
def test_differences_without_spread_decide_nothing(tmp_path, seeds):
  """As of two clients with ten test examples each, but for rounding."""
  mine = [('a', 10, 10 * 1.1), ('b', 10, 20.0)]
  others = [('a', 10, 1.1), ('b', 10, 20.0 - 9 * 1.1)]
  found = _pair(
      tmp_path, dict.fromkeys(seeds, mine), dict.fromkeys(seeds, others)
  )
  assert found.mean == pytest.approx(9.9) and found.num_units == 2 * len(seeds)
  assert found.half_width_over_units is found.p_value_over_units() is None
  assert 'the same' in cell_texts.over_units(found)
  same = _pair(tmp_path / 'same', {1: mine, 2: mine}, {1: mine, 2: mine})
  assert same.half_width_over_units == 0
  for pair, margin in ((found, 0), (same, 0), (same, -1)):
    judgement = verdicts.judge(pair, margin)
    assert judgement.word == 'not decided'
    assert 'all differences are the same' in judgement.why


def test_clients_make_up_the_number_or_are_refused(tmp_path):
  mine = _entry(tmp_path, 'A', {1: _HIGH})
  other = _entry(tmp_path, 'B', {1: _LOW})
  other.values[1] += 1e-3
  assert 'mean over clients is +20.0' in pairs.pair(mine, other).problems[1]
  table = other.runs[1] / 'clients_known_clients.csv'
  summary = {'files': {table.name: '0' * 64}}
  (other.runs[1] / 'summary.json').write_text(json.dumps(summary))
  with pytest.raises(plain_files.DamagedFileError, match='another checksum'):
    pairs.pair(mine, other)
  summary['files'] = {}
  (other.runs[1] / 'summary.json').write_text(json.dumps(summary))
  table.unlink()
  assert 'B has no table' in pairs.pair(mine, other).problems[1]


def test_the_reference_is_named_or_the_first_with_a_number(tmp_path):
  rows = [_entry(tmp_path, row, {1: _HIGH}) for row in 'AB']
  rows.append(_entry(tmp_path, 'C', {}))
  for reference, other, row in (('B', 'B', 'A'), ('C', 'A', 'B')):
    (found,) = pairs.with_reference(rows, reference)
    assert (found.row, found.other) == (row, other)


def test_a_row_that_is_not_paired_stays_and_says_why(tmp_path):
  """With one seed, too, of which there is no interval at all."""
  others = [('d', 10, 1.0), *_LOW[1:]]
  tested = {'A': {1: _HIGH}, 'B': {1: others}, 'C': {2: _LOW}}

  def compared(number):
    path = f'evaluation/known_clients/{number}'
    rows = [_entry(tmp_path / number, *item, path) for item in tested.items()]
    return pairs.with_reference(rows, 'A')

  found = compared('accuracy_mean')
  why = 'none: the clients are others'
  assert [[pair.row, *cell_texts.pair(pair)] for pair in found] == [
      ['B', '-20.00', why, 'none: one seed', '–', '1'],
      ['C', '–', *['none: no seed that both have'] * 2, '–', '–'],
  ]
  assert found[1].to_json()['mean'] is None
  assert not compared('accuracy_std')  # Of no row there is anything to say.


@pytest.mark.parametrize(
    'differences, half_width, margin, word, why',
    [
        ((2.0, 1.0), 1.0, 0, 'confirmed', 'all 2 seeds agree'),
        ((-2.0, -1.0), 1.0, 0, 'contradicted', 'leaves out 0'),
        ((2.0,), 1.0, 0, 'not decided', 'one seed'),
        ((2.0, 1.0), 2.0, 0, 'not decided', 'includes 0'),
        ((4.0, -1.0), 1.0, 0, 'not decided', 'seeds disagree'),
        ((2.0, 1.0), None, 0, 'not decided', 'no interval'),
        # No worse by a point.
        ((-0.2, 0.1), 0.5, -1, 'confirmed', 'leaves out the margin'),
        ((-0.2, 0.1), 1.5, -1, 'not decided', 'includes the margin'),
        ((-0.9, -0.8), 0.5, -1, 'not decided', 'includes the margin'),
        ((-3.0, -2.0), 0.5, -1, 'contradicted', 'all 2 seeds'),
    ],
)
def test_the_rule_for_claims(
    monkeypatch, differences, half_width, margin, word, why
):
  monkeypatch.setattr(pairs.Pair, 'half_width_over_units', half_width)
  pair = pairs.Pair('A', 'B', 'm', dict(enumerate(differences)), 'x', {}, {})
  judgement = verdicts.judge(pair, margin)
  assert judgement.word == word and why in judgement.why


def test_what_remains_of_many_differences():
  """At most 0.05 / 4, 0.05 / 3, 0.05 / 2 and 0.05, until one is above."""
  remain = verdicts.holm([0.011, 0.04, 0.03, 0.005])
  assert remain == [True, False, False, True]
  assert verdicts.holm([0.0125, 1.0, 0.016]) == [True, False, True]
  assert verdicts.holm([0.02, 0.03]) == [True, True]
  assert verdicts.holm([]) == []
