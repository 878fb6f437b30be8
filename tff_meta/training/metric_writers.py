"""Where a run's metrics go: metrics.csv, timings.csv and TensorBoard.

metrics.csv holds only what the seed determines, so that an interrupted and
continued run ends with the very bytes of an uninterrupted one; wall-clock
times, and what else differs from run to run, are in timings.csv. A row is
handed to the operating system before the next round starts (a killed process
loses none) and flushed to the disk before a checkpoint names its position (a
power cut loses none either).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import pathlib
import statistics
import time
from typing import Any, Protocol

import numpy as np
import tree

from tff_meta import plain_files
from tff_meta.training import atomic_files

_ROUND = 'round'
# How many clients of a round there were, trained, and why others did not.
CLIENTS = 'train/num_clients'
TRAINED = 'train/num_trained_clients'
NON_FINITE = 'train/num_non_finite_clients'
BAD_LABEL = 'train/num_bad_label_clients'  # They are among the former.
EMPTY = 'train/num_empty_clients'
# What all clients of a round were sent, and sent.
BYTES_DOWN, BYTES_UP = 'train/bytes_down', 'train/bytes_up'
_SECONDS = 'seconds'
# Those of older versions are the first ones.
_TIMINGS = (_SECONDS, 'cached', 'bytes_sent', 'slowest_shard_seconds')
# Where a TFF learning process puts the metrics of local training.
_TRAIN_PATH = 'client_work/train/'


def flatten_metrics(metrics: object) -> dict[str, Any]:
  """Returns the scalars of a learning process's metrics by short names.

  Args:
    metrics: Nested structure of numeric scalars, as `process.next` returns it.

  Returns:
    Path (joined by '/', with `client_work/train/` shortened to `train/`) ->
    NumPy scalar, in the structure's order.

  Raises:
    ValueError: If a metric is not a numeric scalar.
  """
  flat = {}
  for path, value in _walk(metrics, ()):
    name = '/'.join(path)
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in 'biuf':
      raise ValueError(
          f'Expected the metric `{name}` to be a number, found'
          f' {array.dtype}{list(array.shape)}.'
      )
    if name.startswith(_TRAIN_PATH):
      name = 'train/' + name[len(_TRAIN_PATH) :]
    flat[name] = array[()]
  return flat


def num_without_reason(metrics: Mapping[str, float]) -> float:
  """Returns how many clients have finite examples, but did not train.

  Args:
    metrics: Of a round, or sums over rounds; 0 without the counts.
  """
  if TRAINED not in metrics:
    return 0
  clients, *counted = (
      metrics.get(name, 0) for name in (CLIENTS, TRAINED, NON_FINITE, EMPTY)
  )
  return max(clients - sum(counted), 0)


def is_accuracy(name: str) -> bool:
  """Returns whether a column holds shares that people read in percent."""
  return name.rpartition('/')[2].startswith('accuracy')


def evaluations(columns: Iterable[str]) -> list[str]:
  """Returns the columns of metrics.csv that evaluations on the way have."""
  return [
      name
      for name in columns
      if name.endswith('/accuracy') and not name.startswith('train/')
  ]


def for_people(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Returns metrics as they are shown: accuracies in percent, by other names.

  Args:
    metrics: Column of metrics.csv -> number.
  """
  return {
      f'{name}_percent'
      if is_accuracy(name)
      else name: (100 * float(value) if is_accuracy(name) else float(value))
      for name, value in metrics.items()
  }


def title(name: str) -> str:
  """Returns what a column of accuracies is called where people read it.

  That is `new clients` for `new_clients/accuracy`, with `, micro` for the mean
  over their examples; other names stay as they are.
  """
  whose, _, what = name.rpartition('/')
  if not is_accuracy(name):
    return name
  which = what.removeprefix('accuracy').strip('_')
  whose = 'training' if whose == 'train' else whose.replace('_', ' ')
  return ', '.join(filter(None, (whose, which)))


def sentence(measured: Mapping[str, float]) -> str:
  """Returns what was measured as a part of a sentence.

  Args:
    measured: Column of metrics.csv -> number. Means over examples, whose names
      end with `_micro`, stand in parentheses behind the means before them.
  """
  parts: list[str] = []
  for name, value in measured.items():
    if not is_accuracy(name):
      parts.append(f'{name} {value:.4f}')
    elif parts and name.endswith('_micro'):
      parts[-1] += f' (micro {100 * value:.2f} %)'
    else:
      parts.append(f'{title(name)} {100 * value:.2f} %')
  is_of_people = any(map(is_accuracy, measured))
  return ('accuracy of ' if is_of_people else '') + ', '.join(parts)


def _walk(value, path):
  """Yields (path, leaf), keeping the order of mappings (`tree` sorts them)."""
  if isinstance(value, Mapping):
    for key, child in value.items():
      yield from _walk(child, (*path, str(key)))
  else:
    for child_path, leaf in tree.flatten_with_path(value):
      yield (*path, *(str(part) for part in child_path)), leaf


class MetricsFile:
  """metrics.csv: a header and one row a round, continued at a given position.

  The columns are those of the first row and some more that only a few rows
  fill. What has no column, because an older version of the library wrote the
  first row, is left out.
  """

  def __init__(
      self,
      path: pathlib.Path,
      num_rows: int,
      prefix: bytes,
      sparse_columns: Sequence[str] = (),
  ):
    """Opens the file and forgets everything behind a position.

    Args:
      path: The file; replaced by a new one.
      num_rows: Rows before the position, without the header.
      prefix: The file's content before the position, see `read_prefix`.
      sparse_columns: Columns that the first row need not have.
    """
    header = prefix.decode().partition('\n')[0]
    self._columns = next(csv.reader([header])) if header else None
    self._path = path
    self._num_rows = num_rows
    self._sha256 = hashlib.sha256(prefix)
    self._sparse_columns = sparse_columns
    atomic_files.write_bytes(path, prefix)
    self._file = open(path, 'ab')
    self._place = plain_files.Place(path, self._file)

  def append(self, round_num: int, values: Mapping[str, object]) -> None:
    """Appends a row: the round's number (from 1) and the metrics."""
    row = {_ROUND: round_num, **values}
    text = io.StringIO()
    if self._columns is None:
      self._columns = list(dict.fromkeys([*row, *self._sparse_columns]))
      csv.writer(text, lineterminator='\n').writerow(self._columns)
    csv.DictWriter(
        text, self._columns, lineterminator='\n', extrasaction='ignore'
    ).writerow(row)
    content = text.getvalue().encode()
    with plain_files.named_errors(self._path):
      self._file.write(content)
      self._file.flush()
    self._sha256.update(content)
    self._num_rows += 1

  def sync(self) -> tuple[int, int, str]:
    """Flushes the file to the disk; returns its position.

    Returns:
      Rows, bytes, and the SHA-256 of these bytes.

    Raises:
      DamagedFileError: If the file was removed or replaced meanwhile.
    """
    self._place.check()
    with plain_files.named_errors(self._path):
      os.fsync(self._file.fileno())
      return self._num_rows, self._file.tell(), self._sha256.hexdigest()

  def check(self) -> None:
    """Raises a `DamagedFileError` if the file is not what was written."""
    self._place.check()
    read_prefix(self._path, self._file.tell(), self._sha256.hexdigest())

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read_prefix(path: pathlib.Path, num_bytes: int, sha256: str) -> bytes:
  """Returns the beginning of metrics.csv, which a checkpoint relies on.

  Args:
    path: The file; it need not exist for no bytes.
    num_bytes: How much of it.
    sha256: Its checksum; empty if nobody knows.

  Raises:
    DamagedFileError: If the file is not what was written.
    OSError: If it cannot be read.
  """
  if not num_bytes:
    return b''
  try:
    with plain_files.open_plain(path) as file:
      size = os.fstat(file.fileno()).st_size
      if size < num_bytes:
        raise plain_files.DamagedFileError(
            f'Expected {path} to hold at least {num_bytes} bytes, found {size}.'
        )
      content = file.read(num_bytes)
  except FileNotFoundError:
    raise plain_files.DamagedFileError(
        f'Expected {path} to hold at least {num_bytes} bytes, found'
        f' {plain_files.describe(path)}.'
    ) from None
  check_sha256(path, content, sha256)
  parse_metrics(path, content)
  return content


def check_sha256(path: pathlib.Path, content: bytes, sha256: str) -> None:
  """Raises a `DamagedFileError` if content has another checksum, if any."""
  if sha256 and hashlib.sha256(content).hexdigest() != sha256:
    raise plain_files.DamagedFileError(
        f'Expected the first {len(content)} bytes of {path} as they were'
        ' written, found another checksum.'
    )


def read_metrics(
    path: pathlib.Path, sha256: str = ''
) -> dict[str, list[float]]:
  """Returns the columns of metrics.csv, NaN where a row has no value.

  Args:
    path: The file.
    sha256: Its checksum; empty if nobody knows.

  Raises:
    OSError: If it cannot be read.
    DamagedFileError: If it is not a table of numbers, or another one.
  """
  content = plain_files.read_bytes(path, plain_files.MAX_TABLE_BYTES)
  check_sha256(path, content, sha256)
  return parse_metrics(path, content)


def parse_metrics(path: pathlib.Path, content: bytes) -> dict[str, list[float]]:
  """Returns the columns of the content of a metrics.csv, see `read_metrics`."""
  with _damaged_tables(path):
    rows = _rows(path, content, _ROUND)
    names = rows[0].keys() if rows else ()
    return {n: [float(row[n] or 'nan') for row in rows] for n in names}


def read_column(path: pathlib.Path, column: str, sha256: str) -> list[float]:
  """Returns a column of any table of a run, each row with a finite number.

  Args:
    path: The CSV file.
    column: Name of the column.
    sha256: The file's checksum; empty if nobody knows.

  Raises:
    OSError: If it cannot be read.
    DamagedFileError: If it is no such table, or another one.
  """
  content = plain_files.read_bytes(path, plain_files.MAX_TABLE_BYTES)
  check_sha256(path, content, sha256)
  with _damaged_tables(path):
    values = [float(row[column]) for row in _rows(path, content, column)]
    if not all(map(math.isfinite, values)):
      raise ValueError(f'a row without a number in {column!r}')
  return values


def read_units(path: pathlib.Path, sha256: str) -> dict[str, dict[str, float]]:
  """Returns a run's table of clients or groups: name -> column -> number.

  Args:
    path: The CSV file, whose first column has the names.
    sha256: The file's checksum; empty if nobody knows.

  Returns:
    NaN where a row has no value.

  Raises:
    OSError: If it cannot be read.
    DamagedFileError: If it is no such table, or another one.
  """
  content = plain_files.read_bytes(path, plain_files.MAX_TABLE_BYTES)
  check_sha256(path, content, sha256)
  with _damaged_tables(path):
    rows = _rows(path, content)
    key = next(iter(rows[0])) if rows else ''
    units = {
        row.pop(key): {n: float(value or 'nan') for n, value in row.items()}
        for row in rows
    }
    if len(units) < len(rows):
      raise ValueError(f'a {key} that comes twice')
  return units


def _rows(
    path: pathlib.Path, content: bytes, column: str = ''
) -> list[dict[str, str]]:
  """Returns the rows of a table of whole lines, which has a column."""
  reader = csv.DictReader(io.StringIO(content.decode(), newline=''))
  rows, columns = list(reader), reader.fieldnames or ()
  if columns and column and column not in columns:
    raise plain_files.DamagedFileError(
        f'Expected {path} to have a column {column!r}, found'
        f' {", ".join(columns)}.'
    )
  if content and not content.endswith(b'\n'):
    raise plain_files.DamagedFileError(
        f'Expected {path} to end with a whole line, found one that is cut off.'
    )
  if any(None in row or None in row.values() for row in rows):
    raise plain_files.DamagedFileError(
        f'Expected all lines of {path} to have {len(columns)} columns, found'
        ' one with more or fewer.'
    )
  return rows


@contextlib.contextmanager
def _damaged_tables(path: pathlib.Path) -> Iterator[None]:
  """Turns what goes wrong with the content of a file into an error of it."""
  try:
    yield
  except (ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:
    raise plain_files.DamagedFileError(
        f'Expected {path} to be a table of numbers, found'
        f' {type(error).__name__}: {error}.'
    ) from None


def mean_of_last(
    metrics: Mapping[str, Sequence[float]], column: str, count: int
) -> float | None:
  """Returns the mean of the last values of a column of metrics.csv.

  Args:
    metrics: From `read_metrics`.
    column: One of its columns, which not every row need fill.
    count: Of how many values; of all if there are fewer, None if none.
  """
  values = [v for v in metrics[column] if not math.isnan(v)]
  return statistics.fmean(values[-count:]) if values else None


class TimingsFile:
  """timings.csv: what a round took and had in memory when it began.

  A row has the round's seconds, and of its clients the share whose data need
  not be read; or, where other processes computed clients, the bytes of what
  they were sent for the round, once, and sent back, and the seconds of the
  slowest shard. There is nothing where an older
  version of the library wrote the row, or there was no such thing.
  """

  def __init__(
      self, path: pathlib.Path, num_rounds: int, report: Callable[[str], None]
  ):
    """Opens the file, keeping the first `num_rounds` rounds.

    Args:
      path: The file; replaced by a new one.
      num_rounds: Rounds that were done before.
      report: Called with a line if what was there cannot be read, and so is
        not kept: nothing depends on it but the median in summary.json.
    """
    kept = {}
    try:
      kept = {r: t for r, t in _read_timings(path).items() if r <= num_rounds}
    except FileNotFoundError:
      if num_rounds:
        report(f'Note: {path} is lost and begun anew.')
    except plain_files.DamagedFileError as error:
      report(f'Note: {path} is begun anew: {error}')
    rows = [
        (_ROUND, *_TIMINGS),
        *((r, *timings) for r, timings in kept.items()),
    ]
    lines = [','.join(map(str, row)) + '\n' for row in rows]
    atomic_files.write_bytes(path, ''.join(lines).encode())
    self._path = path
    self._file = open(path, 'a')
    self._place = plain_files.Place(path, self._file)

  def append(
      self,
      round_num: int,
      seconds: float,
      cached: float | None,
      bytes_sent: float | None = None,
      slowest_shard: float | None = None,
  ) -> None:
    """Appends a round's seconds, and what else there is, see the class."""
    values = (
        f'{seconds:.6f}',
        '' if cached is None else f'{cached:.4g}',
        '' if bytes_sent is None else f'{bytes_sent:.0f}',
        '' if slowest_shard is None else f'{slowest_shard:.6f}',
    )
    with plain_files.named_errors(self._path):
      self._file.write(','.join((str(round_num), *values)) + '\n')
      self._file.flush()

  def check(self) -> None:
    """Raises if the file was removed or replaced meanwhile."""
    self._place.check()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _read_timings(path: pathlib.Path) -> dict[int, tuple[str, ...]]:
  """Returns the rounds of a timings.csv with their values, as they stand there.

  A last line that was cut off is left out. What an older version of the library
  did not write is empty.

  Raises:
    DamagedFileError: If it is something else.
    OSError: If it cannot be read, or is not there.
  """
  content = plain_files.read_bytes(path, plain_files.MAX_TABLE_BYTES)
  with _damaged_tables(path):
    header, *lines = content.decode().split('\n')
    names = header.split(',')
    if len(names) < 2 or names != [_ROUND, *_TIMINGS][: len(names)]:
      raise ValueError('another header')
    missing = ('',) * (1 + len(_TIMINGS) - len(names))
    timings: dict[int, tuple[str, ...]] = {}
    for line in lines[:-1]:
      round_num, seconds, *others = line.split(',')
      if len(others) != len(names) - 2:
        raise ValueError(f'the line {line!r}')
      # The file is begun anew if rounds are done again: none comes twice.
      if int(round_num) <= max(timings, default=0):
        raise ValueError(f'round {round_num} behind a later one')
      if not 0 <= float(seconds) < math.inf:
        raise ValueError(f'{seconds} seconds')
      most = 1.0, math.inf, math.inf  # A share, bytes and seconds.
      for value, limit in zip(others, most, strict=False):
        if value and not 0 <= float(value) <= limit:
          raise ValueError(f'a value of {value}')
      timings[int(round_num)] = (seconds, *others, *missing)
  return timings


def read_seconds(path: pathlib.Path) -> dict[int, float]:
  """Returns the rounds of a timings.csv with their seconds.

  Raises:
    OSError: If it cannot be read, or is not there.
    DamagedFileError: If it is something else.
  """
  return {r: float(value) for r, (value, *_) in _read_timings(path).items()}


def median_seconds(path: pathlib.Path) -> float | None:
  """Returns the median of a timings.csv in seconds, None if it has no rows.

  Raises:
    OSError: If it cannot be read.
    DamagedFileError: If it is something else.
  """
  seconds = read_seconds(path).values()
  return statistics.median(seconds) if seconds else None


def total_seconds(path: pathlib.Path) -> float:
  """Returns the seconds of all rounds of a timings.csv.

  Raises:
    OSError: If it cannot be read, or is not there.
    DamagedFileError: If it is something else.
  """
  return sum(read_seconds(path).values())


class Writer(Protocol):
  """Where else the numbers of a run go, for people to look at."""

  def append(self, round_num: int, values: Mapping[str, float]) -> None:
    """Takes the numbers of a round.

    Rounds after the last checkpoint come again when a run is continued, with
    the same numbers.

    Args:
      round_num: From 1.
      values: As `for_people` returns them.
    """

  def finish(self, round_num: int, values: Mapping[str, float]) -> None:
    """Takes what the run was found to be worth at its end.

    Args:
      round_num: The last round.
      values: As `for_people` returns them.
    """

  def flush(self) -> None:
    """Hands on what was taken, before a checkpoint of it is written."""

  def close(self) -> None:
    """Ends the writing, also of a run that was stopped."""


class TensorBoardWriter:
  """TensorBoard's event files, one set of scalars a round.

  `tff.program.TensorBoardReleaseManager` would serve but for three things: it
  cannot be flushed at a checkpoint, so that a killed run loses up to two
  minutes of events for good; it cannot tell TensorBoard that a continued run
  goes back behind what it had shown; and its files are named after the clock.
  TensorBoard reads files in the order of their names, so after a clock has gone
  back it would not read the newest file, or take it for the oldest.
  """

  def __init__(
      self,
      directory: pathlib.Path,
      num_rounds: int,
      config: Mapping[str, Any] | None = None,
  ):
    """Opens a new event file that goes on after `num_rounds` rounds.

    Args:
      directory: Where event files are.
      num_rounds: Rounds that were done before.
      config: The run's configuration as JSON values, which TensorBoard shows
        as text and, as far as they are single values, as hyperparameters.
    """
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.summary.writer import record_writer

    self._event = event_pb2.Event
    self._summary = summary_pb2.Summary
    plain_files.make_directory(directory)
    numbers = [
        int(path.name.split('.')[3])
        for path in directory.glob('events.out.tfevents.*')
        if path.name.split('.')[3].isdecimal()
    ]
    number = max([wall_clock(), *(n + 1 for n in numbers)])
    path = directory / f'events.out.tfevents.{int(number):010d}.tff_meta'
    self._path = path
    self._file = open(path, 'xb')
    self._records = record_writer.RecordWriter(self._file)
    self._write(file_version='brain.Event:2')
    # From the second such mark on, TensorBoard forgets what it had read of the
    # rounds that follow.
    started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(step=num_rounds + 1, session_log=started)
    if config is not None:
      self._write_config(config)

  def _write_config(self, config: Mapping[str, Any]) -> None:
    from tensorboard.compat.proto import tensor_pb2
    from tensorboard.compat.proto import types_pb2
    from tensorboard.plugins.hparams import summary_v2
    from tensorboard.plugins.text import metadata

    code = json.dumps(config, indent=2).replace('\n', '\n    ')
    text = self._summary.Value(
        tag='config',
        tensor=tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[f'    {code}'.encode()]
        ),
        metadata=metadata.create_summary_metadata('config', ''),
    )
    self._write(step=0, summary=self._summary(value=[text]))
    self._write(summary=summary_v2.hparams_pb(flat_settings(config)))

  def _write(self, **fields: object) -> None:
    event = self._event(wall_time=wall_clock(), **fields)
    with plain_files.named_errors(self._path):
      self._records.write(event.SerializeToString())

  def append(self, round_num: int, values: Mapping[str, float]) -> None:
    """Writes a round's scalars."""
    scalars = [
        self._summary.Value(tag=name, simple_value=float(value))
        for name, value in values.items()
    ]
    self._write(step=round_num, summary=self._summary(value=scalars))

  finish = append

  def flush(self) -> None:
    """Hands the events to the operating system."""
    with plain_files.named_errors(self._path):
      self._records.flush()

  def close(self) -> None:
    """Closes the event file."""
    with plain_files.named_errors(self._path):
      self._records.close()


def flat_settings(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the settings of a configuration that are single values.

  Args:
    config: Of JSON values; hyperparameters become `hparams.NAME`.
  """
  flat: dict[str, Any] = {}
  for name, value in config.items():
    if isinstance(value, Mapping):
      flat |= {f'{name}.{k}': v for k, v in flat_settings(value).items()}
    elif isinstance(value, bool | int | float | str):
      flat[name] = value
  return flat


def wall_clock() -> float:
  """Returns seconds since 1970, for people: nothing may rely on its order."""
  return time.time()  # noqa: TID251
