"""Reports show ours beside published numbers, and no number where none is."""

import csv
import dataclasses
import hashlib
import io
import json
import re

import numpy as np
import pytest

from tff_meta.comparison import cell_texts
from tff_meta.comparison import figures
from tff_meta.comparison import provenance
from tff_meta.comparison import record
from tff_meta.comparison import report
from tff_meta.comparison import results
from tff_meta.comparison import runner
from tff_meta.comparison import tables
from tff_meta.comparison import verdicts
from tff_meta.training import sealed_json

_PICTURE = 'data:image/svg+xml;base64,'
_MEASURES = (
    tables.Measure(
        'micro',
        'evaluation/known_clients/accuracy_micro',
        'evaluation/known_clients/accuracy_std',
    ),
    tables.Measure('best', 'evaluation_best/known_clients/accuracy_micro'),
)
_TABLE = tables.Table(
    name='t',
    title='Table <2>',
    source='Somebody, Table 2',
    settings=(tables.Setting('50 clients', _MEASURES),),
    rows=(
        tables.Row(
            'Good',
            ('--algorithm=good',),
            {'50 clients': {'micro': tables.Published(80.0, 1.5)}},
        ),
        tables.Row('Bad', ('--algorithm=bad',)),
        tables.Row(
            'Elsewhere',
            (),
            {'50 clients': {'micro': tables.Published(70.0)}},
            settings=(),
        ),
    ),
    scales={'cpu': tables.Scale((1, 2, 3), changes='half the rounds')},
    notes=('A note.',),
)


def _finish(root, cell, micro):
  folder = runner.CellFolder(root, cell)
  folder.write(runner.Outcome('finished', 1800.0, flags=cell.flags))
  folder.run.mkdir()
  summary = {
      'evaluation': {
          'known_clients': {
              'accuracy_micro': micro,
              'accuracy_std': 0.1,
              'curve': [0.5, micro],
          }
      }
  }
  (folder.run / 'summary.json').write_text(json.dumps(summary))
  (folder.run / 'metrics.csv').write_text(
      'round,train/loss,train/accuracy,validation_clients/accuracy\n'
      '1,2.0,0.1,\n2,1.0,0.2,0.5\n3,0.5,0.2,\n4,0.4,0.2,0.75\n'
  )
  (folder.run / 'clients_known_clients.csv').write_text(
      'client_id,accuracy\n0,0.5\n1,1.0\n'
  )


def _comparison(root, cells):
  return report.Comparison(
      _TABLE,
      'cpu',
      cells,
      results.collect(root, _TABLE, cells),
      results.provenance(root, cells),
      'python -m x',
  )


@pytest.fixture
def comparison(tmp_path):
  cells = tables.cells(_TABLE, 'cpu')
  by_place = {(c.row, c.seed): c for c in cells}
  for seed, micro in ((1, 0.81), (2, 0.83), (3, 0.85)):
    _finish(tmp_path, by_place['Good', seed], micro)
  failed = by_place['Bad', 1]
  runner.CellFolder(tmp_path, failed).write(
      runner.Outcome('failed', 3.0, 'Error: no <data>', failed.flags)
  )
  interrupted = by_place['Bad', 2]
  runner.CellFolder(tmp_path, interrupted).write(
      runner.Outcome('interrupted', 3.0, flags=interrupted.flags)
  )
  return _comparison(tmp_path, cells)


# Names that are markup, formulas or mathematics somewhere.
_HOSTILE = '<script>alert(1)</script>'
_NAMES = (
    f'=cmd()|{_HOSTILE}',
    '$\\frac{$',
    'a $x_1$ & [b](javascript:c)\nd',
)


def test_names_are_shown_as_they_are(tmp_path):
  formula, fraction, link = _NAMES
  table = tables.Table(
      name='t',
      title=f'{link} {_HOSTILE}',
      source=_HOSTILE,
      settings=(tables.Setting(f'{_HOSTILE} $a', _MEASURES),),
      rows=tuple(tables.Row(name, ()) for name in _NAMES),
      scales={'cpu': tables.Scale((1, 2), changes=_HOSTILE)},
      notes=(_HOSTILE,),
  )
  cells = tables.cells(table, 'cpu')
  for cell in cells:
    _finish(tmp_path, cell, 0.5)
  problem = runner.Outcome('failed', 1.0, f'+1|\n{_HOSTILE}', cells[-1].flags)
  runner.CellFolder(tmp_path, cells[-1]).write(problem)
  report.write(
      tmp_path,
      report.Comparison(
          table,
          'cpu',
          cells,
          results.collect(tmp_path, table, cells),
          [_HOSTILE],
          f'x "{_HOSTILE}\n"',
      ),
  )

  page = (tmp_path / 'report.html').read_text()
  assert page.count('<img ') == 5  # Pictures with all these names.
  assert '<script' not in page and page.count('&lt;script&gt;') > 8
  assert '<img alt="' in page and '"=' not in page
  markdown = (tmp_path / 'table.md').read_text()
  code = next(x for x in markdown.split('\n') if x.startswith('    x '))
  assert '<' not in markdown.replace(code, '')
  rows = [x for x in markdown.split('\n') if x.startswith('| ')]
  # Numbers, two rows minus the first one, and how fast numbers grow.
  num_rows = 2 + len(_NAMES)
  first, last = num_rows, 2 * num_rows - 1
  assert len(rows) == last + num_rows
  for part in (rows[:first], rows[first:last], rows[last:]):
    assert len({row.count('|') - row.count(r'\|') for row in part}) == 1
  assert r'\[b](javascript:c) d' in rows[-1]
  with open(tmp_path / 'table.csv', newline='') as file:
    found = list(csv.DictReader(file))
  assert {row['row'] for row in found} == {f"'{formula}", fraction, link}
  assert not any(
      value.startswith(('=', '+', '@'))
      for row in found
      for value in row.values()
  )


def test_numbers_are_means_over_seeds_beside_the_published(comparison):
  entry = comparison.entries[0]
  assert entry.mean == pytest.approx(83.0)
  assert entry.std == pytest.approx(2.0)
  # t(0.975, 2) = 4.3027, from a printed table.
  assert entry.half_width == pytest.approx(4.3027 * 2.0 / np.sqrt(3), rel=1e-4)
  assert entry.difference == pytest.approx(3.0)
  assert entry.spread == pytest.approx(10.0)
  assert entry.hours == pytest.approx(1.5)


def test_a_measure_of_another_unit_is_shown_in_it(tmp_path):
  measure = tables.Measure(
      'ms', _MEASURES[1].path.replace('_best', ''), factor=50
  )
  table = dataclasses.replace(
      _TABLE,
      settings=(tables.Setting('50 clients', (_MEASURES[0], measure)),),
  )
  (cell, *_) = cells = tables.cells(table, 'cpu', rows=['Good'], seeds=[1])
  _finish(tmp_path, cell, 0.75)
  percent, ms = results.collect(tmp_path, table, cells)[:2]
  assert (percent.mean, ms.mean) == (75.0, 37.5)
  with pytest.raises(ValueError, match="first measure of 'Time' in percent"):
    tables.Setting('Time', (measure,))


def test_markdown_has_a_row_a_method_and_no_number_where_none_is(comparison):
  lines = report.markdown(comparison).split('\n')
  rows = [line for line in lines if line.startswith('| ')]
  assert rows == [
      '| Method | micro | published | difference | best | seeds | hours |',
      '| --- | --- | --- | --- | --- | --- | --- |',
      '| Good | 83.00 ± 4.97 (± 10.00, std over clients) | 80 ± 1.5 | +3.00 |'
      ' no number | 3 of 3 | 1.50 |',
      '| Bad | failed, interrupted, not run | – | – | failed, interrupted, not'
      ' run | 0 of 3 | 0.00 |',
      '| Elsewhere | not run here | 70 | – | not run here | – | – |',
  ]
  text = '\n'.join(lines)
  assert '* Finished runs: 3 of the 6 asked for; the scale has 6.' in lines
  without = [line for line in lines if ' seed 1 ' in line]
  assert len(without) == 2  # One measure of a row, and a row.
  assert without[0].startswith('* 50 clients, Good, best: seed 1 finished: ')
  assert without[1] == (
      '* 50 clients, Bad: seed 1 failed: Error: no &lt;data>; seed 2'
      ' interrupted; seed 3 not run'
  )
  assert 'half the rounds' in text
  assert 'its summary.json has no evaluation_best' in text


@pytest.mark.ci
def test_bytes_are_of_the_runs_that_say_so(tmp_path, comparison):
  """Those of earlier versions do not, nor is there a column of them alone."""

  def files(*said):
    for cell, traffic in zip(comparison.cells[::2], said, strict=False):
      path = runner.CellFolder(tmp_path, cell).run / 'summary.json'
      summary = json.loads(path.read_text())
      summary.pop('client_bytes_per_round', None)
      if traffic is not None:
        down, up = traffic
        summary['client_bytes_per_round'] = {'down': down, 'up': up}
      path.write_text(json.dumps(summary))
    report.write(tmp_path, _comparison(tmp_path, comparison.cells))
    entry = json.loads((tmp_path / 'table.json').read_text())['entries'][0]
    lines = (tmp_path / 'table.md').read_text().split('\n')
    shown = [x.split(' | ')[-3] for x in lines if x.startswith('| ')][:5]
    page = (tmp_path / 'report.html').read_text()
    rows = list(
        csv.DictReader(io.StringIO((tmp_path / 'table.csv').read_text()))
    )
    assert rows[0].get('bytes_up', '') == str(entry.get('bytes_up', ''))
    return entry.get('bytes_down'), entry.get('bytes_up'), shown, page

  title = cell_texts.MEGABYTES
  none = [title, '---', None, '–', '–']
  for said, down, up, text in (
      ([(1234567, 8000)] * 3, 1234567, 8000, '1.235 + 0.008'),
      ([None, (50000, 0), None], 50000, 0, '0.050 + 0.000'),
      ([(None, 7000), (None, 7000), None], None, 7000, '? + 0.007'),
  ):
    *found, shown, page = files(*said)
    assert found == [down, up]
    assert shown == [text if cell is None else cell for cell in none]
    assert f'<td>{text}</td>' in page
  for said in ([None] * 3, [(1, 2), (3, 4), None], [('x', []), None, None]):
    *found, shown, page = files(*said)
    assert found == [None, None]
    assert title not in shown and title not in page


def test_page_and_markdown_say_how_fast_accuracy_grows(tmp_path, comparison):
  report.write(tmp_path, comparison)
  markdown = (tmp_path / 'table.md').read_text()
  page = (tmp_path / 'report.html').read_text()
  # Evaluated after rounds 2 (0.5) and 4 (0.75), all seeds alike.
  line = ['Good', '≤ 2', '4', '4', '4', '62.50', '2 to 4', '–', '–', '–']
  assert f'| {" | ".join(line)} |' in markdown
  assert ''.join(f'<td>{cell}</td>' for cell in line[1:]) in page
  found = json.loads((tmp_path / 'table.json').read_text())['progress']
  assert found['50 clients']['final'] == 0.75


def test_page_draws_known_and_new_clients_those_of_the_setting_first(
    tmp_path, comparison
):
  report.write(tmp_path, comparison)
  page = (tmp_path / 'report.html').read_text()
  # In the table on speed, and with the curves, once for who cannot see them.
  assert page.count('about known_clients/accuracy_micro, which was not') == 3
  names = [f'{who}_clients/accuracy' for who in ('new', 'known')]
  header = ','.join(n + end for n in names for end in ('', '_micro'))
  for cell in comparison.cells[::2]:  # Those of a row.
    path = runner.CellFolder(tmp_path, cell).run / 'metrics.csv'
    path.write_text(f'round,{header}\n2,0.1,0.2,0.3,0.4\n4,0.5,0.6,0.7,0.8\n')
  report.write(tmp_path, comparison)
  page = (tmp_path / 'report.html').read_text()
  shown = re.findall(r'Accuracy of (\w+) clients .*?as (\S+) in metrics', page)
  assert list(dict.fromkeys(shown)) == [
      (who, f'{who}_clients/accuracy_micro') for who in ('known', 'new')
  ]
  assert 'the last evaluation of Good' in page and '80.00 %' in page
  assert 'Attention: the setting' not in page


def test_page_draws_margins_where_there_are_any(tmp_path, comparison):
  for cell in comparison.cells[::2]:  # Those of a row.
    path = runner.CellFolder(tmp_path, cell).run / 'metrics.csv'
    path.write_text(
        'round,client_work/signal/margin,train/max_update_norm\n'
        '2,0.5,0.0\n4,1.0,0.0\n'
    )
  report.write(tmp_path, comparison)
  page = (tmp_path / 'report.html').read_text()
  assert ' margin between classes: ' in page
  assert 'Drift: ' not in page  # Nothing but zeros.
  assert 'How fast accuracy grows' not in page  # Nothing was evaluated.


def test_files_say_the_same(tmp_path, comparison):
  report.write(tmp_path, comparison)
  found = json.loads((tmp_path / 'table.json').read_text())
  assert found['entries'][0]['mean'] == pytest.approx(83.0)
  assert found['entries'][2]['mean'] is None
  lines = csv.DictReader(io.StringIO((tmp_path / 'table.csv').read_text()))
  first = next(lines)
  assert float(first['seed_3']) == pytest.approx(85.0)
  assert float(first['difference']) == pytest.approx(3.0)


def test_the_page_has_all_pictures_and_no_markup_of_others(
    tmp_path, comparison
):
  report.write(tmp_path, comparison)
  page = (tmp_path / 'report.html').read_text()
  assert page.count(_PICTURE) == 5
  assert 'The loss that' in page and 'runs 3 are shown' not in page
  assert 'no &lt;data&gt;' in page and '<data>' not in page
  assert 'Table &lt;2&gt;' in page
  for loaded in ('src="http', 'href="http', '<link', '<script', 'url('):
    assert loaded not in page


def test_numbers_lead_to_their_runs_and_commands(tmp_path, comparison):
  shown = dataclasses.replace(comparison, program=['train', '--device=cpu'])
  report.write(tmp_path, shown)
  page = (tmp_path / 'report.html').read_text()
  places = set(re.findall(' id="([^"]*)"', page))
  links = re.findall('href="([^"]*)"', page)
  within = [link[1:] for link in links if link.startswith('#')]
  assert set(within) <= places and len(within) == 1 + 3
  folders = [link for link in links if not link.startswith('#')]
  assert set(folders) == {f'{cell.folder}/' for cell in comparison.cells}
  assert (
      'train --device=cpu --algorithm=good --seed=2'
      ' --output_dir=DIR/50_clients/good/seed_2/run</pre>'
  ) in page


def test_best_numbers_are_bold_and_only_a_smoke_run_has_a_banner(
    tmp_path, comparison
):
  bad = next(c for c in comparison.cells if (c.row, c.seed) == ('Bad', 3))
  _finish(tmp_path, bad, 0.9)
  for scale in ('cpu', 'smoke'):
    table = dataclasses.replace(
        _TABLE, scales={scale: _TABLE.scale('cpu')}, rows=_TABLE.rows[:2]
    )
    entries = results.collect(tmp_path, table, comparison.cells)
    report.write(
        tmp_path,
        dataclasses.replace(
            comparison, table=table, scale=scale, entries=entries
        ),
    )
    page = (tmp_path / 'report.html').read_text()
    assert '<strong>90.00</strong>' in page
    assert '<strong>83.00' not in page
    assert ('class="banner"' in page) == (scale == 'smoke')
    text = (tmp_path / 'table.md').read_text()
    assert ('**Only a trial.** ' in text) == (scale == 'smoke')


def _tested(root, numbers):
  """Finishes all cells; `numbers` is row -> accuracy of each seed."""
  cells = tables.cells(_TABLE, 'cpu')
  for cell in cells:
    accuracy = numbers[cell.row][cell.seed - 1]
    apart = 0.01 if cell.row == 'Good' else 0.02
    _finish(root, cell, accuracy)
    run = runner.CellFolder(root, cell).run
    (run / 'clients_known_clients.csv').write_text(
        'client_id,num_examples,accuracy\n'
        f'0,5,{accuracy - apart}\n1,5,{accuracy + apart}\n'
    )
  return _comparison(root, cells)


def test_paired_differences_stand_in_every_form(tmp_path):
  """t(0.975, 2) = 4.3027; they have a standard deviation of 1 over seeds.

  Of clients, which are a point off each seed's mean, V = (1 + 1 + 1) / 9, with
  t(0.975, 3) = 3.1824.
  """
  found = _tested(
      tmp_path, {'Good': (0.8, 0.9, 0.7), 'Bad': (0.76, 0.84, 0.65)}
  )
  report.write(tmp_path, found)
  line = ['Bad', '-5.00', '-6.84 to -3.16', '-7.48 to -2.52', '6']
  line.append('1, 2, 3 (3 of 3 of this sign)')
  markdown = (tmp_path / 'table.md').read_text()
  assert '### Paired differences: micro, each method minus Good' in markdown
  assert f'| {" | ".join(line)} |' in markdown
  page = (tmp_path / 'report.html').read_text()
  assert ''.join(f'<td>{cell}</td>' for cell in line[1:]) in page
  (pair,) = json.loads((tmp_path / 'table.json').read_text())['paired']
  assert pair['half_width_95_over_seeds'] == pytest.approx(2.4842, rel=1e-4)
  turned = dataclasses.replace(
      found, table=dataclasses.replace(_TABLE, reference='Bad')
  )
  assert '| Good | +5.00 |' in report.markdown(turned)


def test_the_verdict_is_of_published_numbers_or_of_the_lead(tmp_path):
  good, bad = (0.83, 0.84, 0.85), (0.80, 0.81, 0.82)
  found = _tested(tmp_path, {'Good': good, 'Bad': bad})
  first = [e for e in found.entries if e.measure == 'micro']
  assert verdicts.verdict([('50 clients', first)]) == (
      'Ours minus published: Good in 50 clients (+4.00), in percentage points.'
  )

  def lead(entries):
    ours = [dataclasses.replace(e, published=None) for e in entries]
    return verdicts.verdict([('50 clients', ours)])

  assert '3.00 points before Bad, more than chance: ' in lead(first)
  lower = [dataclasses.replace(e, lower_is_better=True) for e in first]
  assert 'Bad has 81.00 %' in lead(lower)
  assert 'before Good, more than chance: ' in lead(lower)
  # In both seeds that both have the other row is ahead.
  extra = dataclasses.replace(
      first[0], published=None, values={1: 70.0, 2: 71.0, 3: 99.0}
  )
  fewer = dataclasses.replace(first[1], values={1: 75.0, 2: 76.0})
  unequal = verdicts.verdict([('50 clients', [extra, fewer])])
  assert '4.50 points before Bad (5.00 with the seeds' in unequal
  assert 'both have, where Bad is ahead)' in unequal
  # Nobody is the best of one.
  alone = [dataclasses.replace(first[0], published=None)]
  settings = [(name, alone) for name in ('50', '100', '500')]
  assert verdicts.verdict(settings) == 'No setting has numbers of two rows yet.'
  settings.append(('10', [*alone, fewer]))
  assert 'Good is the best row in 1 of 1 settings' in verdicts.verdict(settings)
  one = [dataclasses.replace(e, values={1: e.values[1]}) for e in first[:2]]
  assert re.search('not told apart: .*one seed.$', lead(one))


def test_no_two_rows_of_a_table_look_the_same():
  names = [f'row {i}' for i in range(40)]
  styles = figures.row_styles(names)
  looks = {(s['color'], s['marker']) for s in styles.values()}
  assert len(looks) == len(names)
  assert figures.row_styles(names[:3])['row 2'] == styles['row 2']


def test_the_legend_of_many_rows_is_within_the_picture(monkeypatch):
  names = [f'row {i}' for i in range(40)]
  drawn = []
  monkeypatch.setattr(
      figures, '_picture', lambda _, figure, __: drawn.append(figure)
  )
  figures._lines(
      {name: (np.arange(3), np.random.rand(2, 3)) for name in names},
      figures.row_styles(names),
      'x',
      'y',
      'caption',
  )
  (figure,) = drawn
  assert len(figure.axes[0].collections) == 40  # Bands over two seeds.
  figure.canvas.draw()
  (legend,) = figure.legends
  box, page = legend.get_window_extent(), figure.bbox
  assert box.y0 >= page.y0 and box.y1 <= page.y1


def test_nothing_is_drawn_where_nothing_has_finished(tmp_path):
  cells = tables.cells(_TABLE, 'cpu')
  empty = _comparison(tmp_path, cells)
  report.write(tmp_path, empty)
  page = (tmp_path / 'report.html').read_text()
  assert 'data:image' not in page
  assert all(entry.mean is None for entry in empty.entries)


def _files(directory):
  return [path for path in directory.rglob('*') if path.is_file()]


def test_seeds_are_averaged_round_by_round(tmp_path):
  """Where none of them lacks the loss, because nobody trained."""
  for name, rows in (
      ('a', '1,nan\n2,1\n3,3\n4,5\n'),
      ('b', '1,4\n2,2\n3,nan\n'),
  ):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'metrics.csv').write_text('round,train/loss\n' + rows)
    (tmp_path / name / 'summary.json').write_text('{"rounds": 4}')
  good = [results.read_metrics(tmp_path / name) for name in ('a', 'b')]
  curves, num_shown = figures._columns(
      {'Good': good, 'Bad': []}, 'train/loss', every_round=True
  )
  rounds, values = curves.pop('Good')
  assert (rounds.tolist(), values.tolist()) == ([2], [[1], [2]])
  assert not curves and num_shown == 2


def test_small_files_of_finished_cells_are_kept(tmp_path, comparison):
  good = [c for c in comparison.cells if c.row == 'Good']
  for cell in good:
    run = runner.CellFolder(tmp_path, cell).run
    config = {'config': {'data_dir': '/home/me', 'seed': cell.seed}}
    (run / 'config.json').write_text(json.dumps(config))
  traffic = {'50 clients': {'Good': {'down': 8, 'up': 3, 'clients': 5}}}
  (tmp_path / 'traffic.json').write_text(json.dumps(traffic))
  report.write(tmp_path, comparison)
  target = tmp_path / 'kept'
  record.keep(tmp_path, _TABLE, 'cpu', comparison.cells, target)
  for cell in good:
    copy = runner.CellFolder(target, cell)
    config = json.loads((copy.run / 'config.json').read_text())
    assert config['config'] == {'seed': cell.seed}
    summary = json.loads((copy.run / 'summary.json').read_text())
    assert summary['evaluation']['known_clients']['accuracy_std'] == 0.1
    assert copy.outcome().seconds == 1800.0
    assert (copy.run / 'metrics.csv').read_text() == (
        'round,train/loss,train/accuracy,validation_clients/accuracy\n'
        '2,1.0,0.2,0.5\n4,0.4,0.2,0.75\n'
    )
    table = (copy.run / 'clients_known_clients.csv').read_text()
    assert table == 'client_id,accuracy\n0,0.5\n1,1.0\n'
  assert not (target / '50_clients' / 'bad').exists()
  files = _files(target)
  assert len(files) == 2 + 3 * 5  # Tables are written of the copies.
  assert json.loads((target / 'traffic.json').read_text()) == traffic
  with pytest.raises(runner.ComparisonError, match='another directory'):
    record.keep(tmp_path, _TABLE, 'paper', comparison.cells, target)
  kept = {path: path.read_bytes() for path in files}
  with pytest.raises(runner.ComparisonError, match=f'found {good[-1].folder}'):
    record.keep(tmp_path, _TABLE, 'cpu', good[:-1], target)
  assert {path: path.read_bytes() for path in files} == kept
  assert not any(b'/home/me' in path.read_bytes() for path in files)


def _keep_good(root, comparison):
  good = [c for c in comparison.cells if c.row == 'Good']
  for cell in good:
    run = runner.CellFolder(root, cell).run
    (run / 'config.json').write_text(json.dumps({'config': {}}))
  report.write(root, comparison)
  record.keep(root, _TABLE, 'cpu', comparison.cells, root / 'kept')
  return good


def test_files_of_an_earlier_copy_go(tmp_path, comparison):
  first, *_ = _keep_good(tmp_path, comparison)
  run = runner.CellFolder(tmp_path, first).run
  (run / 'metrics.csv').unlink()
  (run / 'clients_known_clients.csv').rename(run / 'clients_new_clients.csv')
  record.keep(tmp_path, _TABLE, 'cpu', comparison.cells, tmp_path / 'kept')
  copy = runner.CellFolder(tmp_path / 'kept', first).run
  assert {path.name for path in copy.iterdir()} == {
      'summary.json',
      'config.json',
      'clients_new_clients.csv',
  }


def test_a_copy_is_not_replaced_by_an_unfinished_run(tmp_path, comparison):
  first, *_ = _keep_good(tmp_path, comparison)
  before = {p: p.read_bytes() for p in _files(tmp_path / 'kept')}
  folder = runner.CellFolder(tmp_path, first)
  folder.write(runner.Outcome('failed', 3.0, 'Error', first.flags))
  with pytest.raises(runner.ComparisonError, match='found it failed'):
    record.keep(tmp_path, _TABLE, 'cpu', comparison.cells, tmp_path / 'kept')
  assert {p: p.read_bytes() for p in _files(tmp_path / 'kept')} == before


@pytest.mark.parametrize(
    'name, content',
    [
        ('config.json', None),
        ('config.json', b'[]'),
        ('summary.json', b'{"evaluation": '),
        ('summary.json', b'[1]'),
        ('metrics.csv', b'\xff\xfe'),
    ],
)
def test_nothing_is_kept_where_a_file_is_missing(
    tmp_path, comparison, name, content
):
  *_, last = _keep_good(tmp_path, comparison)
  before = {p: p.read_bytes() for p in _files(tmp_path / 'kept')}
  path = runner.CellFolder(tmp_path, last).run / name
  if content is None:
    path.unlink()
  else:
    path.write_bytes(content)
  first = runner.CellFolder(tmp_path, comparison.cells[0])
  first.write(runner.Outcome('finished', 7.0, flags=first.outcome().flags))
  with pytest.raises(runner.ComparisonError, match='files of a finished run'):
    record.keep(tmp_path, _TABLE, 'cpu', comparison.cells, tmp_path / 'kept')
  assert {p: p.read_bytes() for p in _files(tmp_path / 'kept')} == before


def test_a_run_is_not_replaced_by_a_copy(tmp_path, comparison):
  first, *_ = _keep_good(tmp_path, comparison)
  runner.CellFolder(tmp_path / 'kept', first).log.write_text('round 1\n')
  with pytest.raises(runner.ComparisonError, match='run there'):
    record.check_target(tmp_path / 'kept', comparison.cells)


def test_what_is_kept_is_a_comparison_and_can_be_kept_again(
    tmp_path, comparison
):
  good = [c for c in comparison.cells if c.row == 'Good']
  for cell in good:
    run = runner.CellFolder(tmp_path, cell).run
    (run / 'config.json').write_text(json.dumps({'config': {}}))
  first = runner.CellFolder(tmp_path, good[0]).run / 'metrics.csv'
  first.unlink()  # As in a copy of a run without evaluations.
  of_good = _comparison(tmp_path, good)
  report.write(tmp_path, of_good)
  kept, again = tmp_path / 'kept', tmp_path / 'again'
  record.keep(tmp_path, _TABLE, 'cpu', good, kept)
  copied = _comparison(kept, good)
  assert copied.entries == of_good.entries
  before = {p.relative_to(kept): p.read_bytes() for p in _files(kept)}
  report.write(kept, copied)
  pages = [(d / 'report.html').read_text() for d in (tmp_path, kept)]
  # Without the picture of losses, of which rounds are missing.
  assert [p.count(_PICTURE) for p in pages] == [5, 4]
  assert ['The loss that' in page for page in pages] == [True, False]
  assert 'Of 3 runs 2 are shown' in pages[0]
  record.keep(kept, _TABLE, 'cpu', good, again)
  assert {p.relative_to(again): p.read_bytes() for p in _files(again)} == before


def test_a_copy_without_evaluations_names_no_metrics(tmp_path, comparison):
  cell = comparison.cells[0]
  run = runner.CellFolder(tmp_path, cell).run
  (run / 'metrics.csv').write_text('round,train/loss\n1,2.5\n')
  summary = json.loads((run / 'summary.json').read_text())
  names = ('metrics.csv', 'clients_known_clients.csv')
  summary['files'] = {
      name: hashlib.sha256((run / name).read_bytes()).hexdigest()
      for name in names
  }
  config = {'config': {'data_dir': '/home/me'}}
  for name, value in (('summary.json', summary), ('config.json', config)):
    (run / name).write_text(json.dumps(sealed_json.seal(value)))
  of_one = _comparison(tmp_path, [cell])
  report.write(tmp_path, of_one)
  kept = tmp_path / 'kept'
  record.keep(tmp_path, _TABLE, 'cpu', [cell], kept)
  files = results.read_json(runner.CellFolder(kept, cell).run / 'summary.json')
  assert list(files['files']) == ['clients_known_clients.csv']
  report.write(kept, _comparison(kept, [cell]))  # Nothing is missing.
  # In a copy by other means something is, and that is no number without one.
  (run / 'metrics.csv').unlink()
  with pytest.raises(OSError, match='which the summary.json beside it names'):
    report.write(tmp_path, of_one)
  with pytest.raises(runner.ComparisonError, match='No such file'):
    record.keep(tmp_path, _TABLE, 'cpu', [cell], tmp_path / 'again')


def test_runs_of_several_codes_or_data_are_pointed_out(tmp_path, comparison):
  runs = [
      runner.CellFolder(tmp_path, c).run
      for c in comparison.cells
      if c.row == 'Good'
  ]
  for commit, run in zip('aab', runs, strict=True):
    config = {'git_commit': commit, 'data': {'fingerprint': commit}}
    (run / 'config.json').write_text(json.dumps(config))
  found = ' '.join(results.provenance(tmp_path, comparison.cells))
  assert 'Code of the runs: a, b.' in found
  assert 'more than one version' in found and 'different data' not in found
  assert found in ' '.join(_comparison(tmp_path, comparison.cells).header())
  other = tables.Cell('Bad', '50 clients', 3, ())
  _finish(tmp_path, other, 0.5)
  (runner.CellFolder(tmp_path, other).run / 'config.json').write_text(
      json.dumps({'git_commit': 'b', 'data': {'fingerprint': 'c'}})
  )
  found = ' '.join(results.provenance(tmp_path, comparison.cells))
  assert 'different data in 50 clients, seed 3' in found


def test_a_run_of_several_codes_is_pointed_out(tmp_path):
  cell = tables.Cell('Good', '50 clients', 1, ())
  _finish(tmp_path, cell, 0.5)
  codes = [
      {'from_round': r, 'git_commit': c}
      for r, c in ((1, 'a'), (3, 'a'), (9, 'b'))
  ]
  (runner.CellFolder(tmp_path, cell).run / 'config.json').write_text(
      json.dumps({'git_commit': 'b', 'code_of_rounds': codes})
  )
  found = ' '.join(results.provenance(tmp_path, [cell]))
  assert 'Code of the runs: a, b.' in found
  assert 'Good in 50 clients, seed 1: a from round 1, b from round 9.' in found
  note, *_ = provenance.notes(tmp_path, [cell])
  assert note.title == 'Code of the runs: 2 versions'
  assert note.lines == ['a from round 1, b from round 9: Good (50 clients 1)']


def test_fingerprints_of_two_rules_are_not_compared(tmp_path):
  """Those of before 0.2.0 are of other examples of the same data."""
  cells = [
      tables.Cell(row, '50 clients', 1, ()) for row in ('Old', 'New', 'Other')
  ]
  for cell, version, fingerprint in zip(
      cells,
      ('0.1.0', '0.2.0', '0.1.0'),
      ('old', 'new', 'other'),
      strict=True,
  ):
    _finish(tmp_path, cell, 0.5)
    config = {
        'data': {'fingerprint': fingerprint},
        'versions': {'tff_meta': version},
    }
    path = runner.CellFolder(tmp_path, cell).run / 'config.json'
    path.write_text(json.dumps(config))
  (_, of_two) = results.provenance(tmp_path, cells[:2])
  *_, note = provenance.notes(tmp_path, cells[:2])
  for said in (of_two, note.title):
    assert 'Whether methods had the same data in 50 clients, seed 1' in said
  assert 'version 0.2.0' in note.lines[-1]
  *_, of_three = results.provenance(tmp_path, cells)
  assert 'different data in 50 clients, seed 1' in of_three


@pytest.mark.parametrize(
    'options, commit, cause',
    [
        (
            {'alpha': 2},
            'c2',
            'partition_options.alpha is 1 for Good, 2 for Bad',
        ),
        ({'alpha': 1}, 'c2', 'the code .* is not: c1 for Good; c2 for Bad'),
        ({'alpha': 1}, 'c1', "the data set's files must have been others"),
    ],
)
def test_why_data_differ_is_said(tmp_path, options, commit, cause):
  cells = [cell for cell in tables.cells(_TABLE, 'cpu') if cell.seed == 1]
  for cell, partition_options, git_commit, fingerprint in (
      (cells[0], {'alpha': 1}, 'c1', 'one'),
      (cells[1], options, commit, 'two'),
  ):
    _finish(tmp_path, cell, 0.5)
    config = {
        'config': {
            'partition_options': partition_options,
            'rounds': len(commit),
        },
        'data': {
            'fingerprint': fingerprint,
            'num_classes': 2,
            'class_names': ['cat', 'dog'],
            'input_shape': [8, 8],
        },
        'git_commit': git_commit,
    }
    path = runner.CellFolder(tmp_path, cell).run / 'config.json'
    path.write_text(json.dumps(config))
  code, facts, data = provenance.notes(tmp_path, cells)
  assert (code.title == 'Code of the runs: one version') == (commit == 'c1')
  assert '2 classes (cat, dog), examples of shape [8, 8]' in facts.lines[0]
  assert data.title == 'Methods had different data in 50 clients, seed 1'
  assert data.lines[:2] == ['one: Good', 'two: Bad']
  assert re.search(cause, data.lines[2])


def test_a_finished_cell_without_its_files_has_no_number(tmp_path, comparison):
  cell = next(c for c in comparison.cells if c.row == 'Good')
  run = runner.CellFolder(tmp_path, cell).run
  for path in run.iterdir():
    path.unlink()
  poorer = _comparison(tmp_path, comparison.cells)
  report.write(tmp_path, poorer)
  assert poorer.entries[0].values.keys() == {2, 3}
  assert (
      'seed 1 finished: its summary.json is missing or unreadable'
      in (tmp_path / 'report.html').read_text()
  )
  assert not results.is_complete(tmp_path, cell)
  (run / 'summary.json').write_text('[1]')
  assert _comparison(tmp_path, comparison.cells).entries == poorer.entries
  assert not results.is_complete(tmp_path, cell)
