import collections
import hashlib
import json
import math
import os

import numpy as np
import pytest

from tff_meta import plain_files
from tff_meta.training import metric_writers

_TIMINGS_HEADER = 'round,seconds,cached,bytes_sent,slowest_shard_seconds\n'


def _rows(path, rows, num_rows=0, num_bytes=0, sha256='', sparse=()):
  prefix = metric_writers.read_prefix(path, num_bytes, sha256)
  file = metric_writers.MetricsFile(path, num_rows, prefix, sparse)
  for round_num, values in rows:
    file.append(round_num, values)
  position = file.sync()
  file.close()
  return position


def test_metrics_are_flattened_in_order_with_short_names():
  metrics = collections.OrderedDict(
      distributor=(),
      client_work=collections.OrderedDict(
          train=collections.OrderedDict(
              loss=np.float32(0.1), accuracy=np.float32(0.5)
          )
      ),
      finalizer=collections.OrderedDict(update_non_finite=np.int32(0)),
  )
  flat = metric_writers.flatten_metrics(metrics)
  assert list(flat) == [
      'train/loss',
      'train/accuracy',
      'finalizer/update_non_finite',
  ]
  assert str(flat['train/loss']) == '0.1'


def test_a_metric_that_is_no_number_is_refused():
  with pytest.raises(ValueError, match='`a/b` to be a number'):
    metric_writers.flatten_metrics({'a': {'b': np.zeros(2)}})


def test_rows_are_readable_and_exact(tmp_path):
  path = tmp_path / 'metrics.csv'
  _rows(
      path, [(1, {'loss': np.float32(0.1)}), (2, {'loss': np.float32('nan')})]
  )
  assert path.read_text() == 'round,loss\n1,0.1\n2,nan\n'
  columns = metric_writers.read_metrics(path)
  assert columns['round'] == [1, 2]
  assert columns['loss'][0] == 0.1 and math.isnan(columns['loss'][1])


def test_sparse_columns_are_empty_where_there_is_no_value(tmp_path):
  path = tmp_path / 'metrics.csv'
  rows = [(1, {'loss': 3}), (2, {'loss': 2, 'new': 0.5})]
  _rows(path, rows, sparse=['new'])
  assert path.read_text() == 'round,loss,new\n1,3,\n2,2,0.5\n'
  assert math.isnan(metric_writers.read_metrics(path)['new'][0])


@pytest.mark.parametrize(
    'count, expected', [(1, 8), (2, 6), (3, 13 / 3), (9, 13 / 3)]
)
def test_the_mean_of_the_last_values(tmp_path, count, expected):
  """Of 1, 4 and 8, between rows without a value."""
  path = tmp_path / 'metrics.csv'
  values = [1, None, 4, 8, None]
  rows = [
      (i, {'loss': 2} | ({} if v is None else {'new': v}))
      for i, v in enumerate(values, 1)
  ]
  _rows(path, rows, sparse=['new'])
  metrics = metric_writers.read_metrics(path)
  mean = metric_writers.mean_of_last(metrics, 'new', count)
  assert mean == pytest.approx(expected)


def test_the_mean_of_no_values(tmp_path):
  path = tmp_path / 'metrics.csv'
  _rows(path, [(1, {'loss': 2})], sparse=['new'])
  metrics = metric_writers.read_metrics(path)
  assert metric_writers.mean_of_last(metrics, 'new', 3) is None


def test_what_an_older_file_has_no_column_for_is_left_out(tmp_path):
  path = tmp_path / 'metrics.csv'
  position = _rows(path, [(1, {'loss': 3})])
  _rows(path, [(2, {'loss': 2, 'num_trained': 4})], *position)
  assert path.read_text() == 'round,loss\n1,3\n2,2\n'


@pytest.mark.parametrize('rest', ['', '3,1', '3,1\n4,0\n', 'garbage\n\n'])
def test_a_continued_file_is_the_file_of_one_go(tmp_path, rest):
  rows = [(n, {'loss': np.float32(1 / n)}) for n in range(1, 6)]
  whole = tmp_path / 'whole.csv'
  _rows(whole, rows)
  path = tmp_path / 'metrics.csv'
  position = _rows(path, rows[:2])
  content = path.read_bytes()
  sha256 = hashlib.sha256(content).hexdigest()
  assert position == (2, len(content), sha256)
  with open(path, 'a') as file:
    file.write(rest)

  _rows(path, rows[2:], *position)

  assert path.read_bytes() == whole.read_bytes()


def test_a_file_cut_back_to_its_beginning_gets_a_header_again(tmp_path):
  path = tmp_path / 'metrics.csv'
  _rows(path, [(1, {'loss': 3})])
  _rows(path, [(1, {'error': 4})])
  assert path.read_text() == 'round,error\n1,4\n'


def test_a_file_shorter_than_the_position_is_refused(tmp_path):
  path = tmp_path / 'metrics.csv'
  path.write_text('round,loss\n')
  with pytest.raises(OSError, match='at least 12 bytes, found 11'):
    metric_writers.read_prefix(path, 12, '')


def test_timings_keep_what_was_done_and_drop_the_rest(tmp_path):
  path = tmp_path / 'timings.csv'
  path.write_text('round,seconds,cached\n1,5.0,0\n2,1.0,0.5\n3,9.0,1\n4,')
  timings = metric_writers.TimingsFile(path, 2, pytest.fail)
  timings.append(3, 2.0, 2 / 3)
  timings.close()
  assert path.read_text() == (
      _TIMINGS_HEADER + '1,5.0,0,,\n2,1.0,0.5,,\n3,2.000000,0.6667,,\n'
  )
  assert metric_writers.median_seconds(path) == 2.0


def test_timings_of_an_older_version_are_gone_on_with_twice(tmp_path):
  """It wrote no share of clients in memory: that of its rows stays empty."""
  path = tmp_path / 'timings.csv'
  path.write_text('round,seconds\n1,5.0\n2,1.0\n')
  for round_num in (2, 3):
    timings = metric_writers.TimingsFile(path, round_num - 1, pytest.fail)
    elsewhere = (700.0, 0.25) if round_num == 3 else ()
    timings.append(round_num, 2.0, 1.0, *elsewhere)
    timings.close()
  assert path.read_text() == (
      _TIMINGS_HEADER + '1,5.0,,,\n2,2.000000,1,,\n3,2.000000,1,700,0.250000\n'
  )
  assert metric_writers.median_seconds(path) == 2.0


def test_no_timings_have_no_median(tmp_path):
  metric_writers.TimingsFile(tmp_path / 't.csv', 0, pytest.fail).close()
  assert metric_writers.median_seconds(tmp_path / 't.csv') is None


@pytest.mark.parametrize('hours_back', [0, 24])
def test_tensorboard_shows_a_continued_run_once(tmp_path, hours_back):
  """Also if the clock has gone back since the run was begun."""
  from tensorboard.backend.event_processing import plugin_event_accumulator
  from tensorboard.util import tensor_util

  for first, last, offset in ((0, 4, 0), (2, 3, 100)):
    writer = metric_writers.TensorBoardWriter(tmp_path, first)
    for round_num in range(first + 1, last + 1):
      writer.append(round_num, {'loss': np.float32(round_num + offset)})
    writer.close()
    if first == 0 and hours_back:
      (path,) = tmp_path.iterdir()
      start, number, end = path.name.rsplit('.', 2)
      later = int(number) + 3600 * hours_back
      path.rename(tmp_path / f'{start}.{later}.{end}')
  events = plugin_event_accumulator.EventAccumulator(str(tmp_path))
  events.Reload()
  shown = [
      (e.step, float(tensor_util.make_ndarray(e.tensor_proto)))
      for e in events.Tensors('loss')
  ]
  assert shown == [(1, 1.0), (2, 2.0), (3, 103.0)]


def test_people_read_percentages(tmp_path):
  shown = metric_writers.for_people(
      {'a/accuracy': 0.25, 'b/accuracy_micro': np.float32(0.5), 'c/loss': 2}
  )
  assert shown == {
      'a/accuracy_percent': 25,
      'b/accuracy_micro_percent': 50,
      'c/loss': 2,
  }
  measured = {'new_x/accuracy': 0.25, 'new_x/accuracy_micro': 0.5}
  assert metric_writers.sentence(measured | {'y/accuracy': 1.0}) == (
      'accuracy of new x 25.00 % (micro 50.00 %), y 100.00 %'
  )
  assert metric_writers.sentence({'slope': 0.25}) == 'slope 0.2500'


def test_tensorboard_shows_the_configuration_and_its_hyperparameters(tmp_path):
  from tensorboard.backend.event_processing import plugin_event_accumulator
  from tensorboard.plugins.hparams import metadata
  from tensorboard.util import tensor_util

  config = {'seed': 3, 'hparams': {'gamma': 0.5, 'ways': None}, 'rows': [1]}
  metric_writers.TensorBoardWriter(tmp_path, 0, config).close()
  events = plugin_event_accumulator.EventAccumulator(str(tmp_path))
  events.Reload()
  (text,) = events.Tensors('config')
  shown = tensor_util.make_ndarray(text.tensor_proto).item()
  assert json.loads(shown) == config
  content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG)
  start = metadata.parse_session_start_info_plugin_data(
      content.plugin_data.content
  )
  found = {name: value.number_value for name, value in start.hparams.items()}
  assert found == {'seed': 3, 'hparams.gamma': 0.5}


def test_changed_metrics_are_found(tmp_path):
  path = tmp_path / 'metrics.csv'
  _, num_bytes, sha256 = _rows(path, [(1, {'loss': 3}), (2, {'loss': 2})])
  assert metric_writers.read_prefix(path, num_bytes, sha256)
  path.write_text(path.read_text().replace('2,2', '2,7') + '3,1')
  with pytest.raises(OSError, match='metrics.csv as they were'):
    metric_writers.read_prefix(path, num_bytes, sha256)
  assert metric_writers.read_prefix(path, num_bytes, '')  # Nobody knows.
  path.write_text(path.read_text().replace('2,7', 'x,7'))
  with pytest.raises(OSError, match='metrics.csv to be a table of numbers'):
    metric_writers.read_prefix(path, num_bytes, '')


@pytest.mark.parametrize(
    'table, why',
    [
        ('client_id,n\na,3\n', "have a column 'accuracy', found client_id, n"),
        ('client_id,accuracy\na,0.5\nb', 'end with a whole line'),
        ('client_id,accuracy\na,0.5\nb\n', 'have 2 columns'),
        ('client_id,accuracy\na,x\n', 'be a table of numbers'),
    ],
)
def test_what_a_table_lacks_is_named(tmp_path, table, why):
  path = tmp_path / 'clients.csv'
  path.write_text(table)
  with pytest.raises(plain_files.DamagedFileError, match=why):
    metric_writers.read_column(path, 'accuracy', '')
  path.write_text('loss\n1\n')
  with pytest.raises(OSError, match="have a column 'round', found loss"):
    metric_writers.read_metrics(path)


def test_metrics_that_go_or_change_while_they_are_written_are_an_error(
    tmp_path,
):
  path = tmp_path / 'metrics.csv'
  file = metric_writers.MetricsFile(path, 0, b'')
  file.append(1, {'loss': 2})
  file.check()
  content = path.read_text()
  path.write_text(content.replace('2', '7'))  # In the same file.
  with pytest.raises(OSError, match='as they were written'):
    file.check()
  path.unlink()
  with pytest.raises(OSError, match='removed'):
    file.sync()
  path.write_text(content)
  with pytest.raises(OSError, match='replaced'):
    file.sync()
  file.close()


@pytest.mark.parametrize(
    'content',
    [
        b'round,seconds\n1,x\n2,1.0\n',
        b'round,seconds\n2,1.0\n1,1.0\n',
        b'round,seconds\n1,-1\n',
        b'round,seconds\n1,nan\n',
        b'round,seconds\n1\n',
        b'round,minutes\n1,1.0\n',
        b'round,seconds\n1,1.0,1\n',
        b'round,seconds,cached\n1,1.0\n',
        b'round,seconds,cached\n1,1.0,2\n',
        b'round,seconds,cached\n1,1.0,x\n',
        b'\xff\xfe',
        b'',
    ],
)
def test_unreadable_timings_are_begun_anew_with_a_note(tmp_path, content):
  path, lines = tmp_path / 'timings.csv', []
  path.write_bytes(content)
  metric_writers.TimingsFile(path, 2, lines.append).close()
  assert path.read_text() == _TIMINGS_HEADER
  assert len(lines) == 1 and f'Note: {path} is begun anew' in lines[0]


def test_a_device_or_a_pipe_for_timings_is_not_read(tmp_path):
  for place in (lambda p: os.symlink('/dev/full', p), os.mkfifo):
    path, lines = tmp_path / 'timings.csv', []
    place(path)
    metric_writers.TimingsFile(path, 2, lines.append).close()
    assert path.read_text() == _TIMINGS_HEADER and not path.is_symlink()
    assert 'to be a plain file, found a' in lines[0]
    path.unlink()


def test_a_full_disk_is_named(tmp_path):
  path = tmp_path / 'metrics.csv'
  file = metric_writers.MetricsFile(path, 0, b'')
  file._file.close()
  file._file = open('/dev/full', 'ab')  # What a full disk does.
  with pytest.raises(OSError, match='No space left on device.*metrics.csv'):
    file.append(1, {'loss': 2})
