"""Where a run's metrics go: metrics.csv, timings.csv and TensorBoard.

metrics.csv holds only what the seed determines, so that an interrupted and
continued run ends with the very bytes of an uninterrupted one; wall-clock times
are in timings.csv. A row is handed to the operating system before the next
round starts (a killed process loses none) and flushed to the disk before a
checkpoint names its position (a power cut loses none either).
"""

from collections.abc import Mapping, Sequence
import csv
import io
import math
import os
import pathlib
import statistics
import time

import numpy as np
import tree

from tff_meta.training import atomic_files

_ROUND = 'round'
# Where a TFF learning process puts the metrics of local training.
_TRAIN_PATH = 'client_work/train/'


def flatten_metrics(metrics: object) -> dict[str, np.generic]:
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
  fill.
  """

  def __init__(
      self,
      path: pathlib.Path,
      num_rows: int,
      num_bytes: int,
      sparse_columns: Sequence[str] = (),
  ):
    """Opens the file and forgets everything behind a position.

    Args:
      path: The file; created if the position is its beginning.
      num_rows: Rows before the position, without the header.
      num_bytes: Bytes before the position.
      sparse_columns: Columns that the first row need not have.

    Raises:
      ValueError: If the file is shorter than the position.
    """
    self._file = open(path, 'r+b' if path.exists() else 'x+b')
    size = self._file.seek(0, os.SEEK_END)
    if size < num_bytes:
      self._file.close()
      raise ValueError(
          f'Expected {path} to hold at least {num_bytes} bytes, found {size}.'
      )
    self._file.truncate(num_bytes)
    self._file.seek(0)
    header = self._file.readline().decode()
    self._columns = next(csv.reader([header])) if header else None
    self._file.seek(num_bytes)
    self._num_rows = num_rows
    self._sparse_columns = sparse_columns

  def append(self, round_num: int, values: Mapping[str, object]) -> None:
    """Appends a row: the round's number (from 1) and the metrics."""
    row = {_ROUND: round_num, **values}
    text = io.StringIO()
    if self._columns is None:
      self._columns = list(dict.fromkeys([*row, *self._sparse_columns]))
      csv.writer(text, lineterminator='\n').writerow(self._columns)
    csv.DictWriter(text, self._columns, lineterminator='\n').writerow(row)
    self._file.write(text.getvalue().encode())
    self._file.flush()
    self._num_rows += 1

  def sync(self) -> tuple[int, int]:
    """Flushes the file to the disk; returns its position (rows, bytes)."""
    os.fsync(self._file.fileno())
    return self._num_rows, self._file.tell()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read_metrics(path: pathlib.Path) -> dict[str, list[float]]:
  """Returns the columns of metrics.csv, NaN where a row has no value.

  Args:
    path: The file.

  Raises:
    OSError: If it cannot be read.
    ValueError: If it is not a table of numbers.
  """
  try:
    with open(path, newline='') as file:
      rows = list(csv.DictReader(file))
    names = rows[0].keys() if rows else ()
    return {n: [float(row[n] or 'nan') for row in rows] for n in names}
  except (ValueError, TypeError, csv.Error) as error:
    raise ValueError(
        f'Expected {path} to be a table of numbers, found {error}.'
    ) from None


def mean_of_last(path: pathlib.Path, column: str, count: int) -> float | None:
  """Returns the mean of the last values of a column of metrics.csv.

  Args:
    path: The file.
    column: One of its columns, which not every row need fill.
    count: Of how many values; of all if there are fewer, None if none.
  """
  values = [v for v in read_metrics(path)[column] if not math.isnan(v)]
  return statistics.fmean(values[-count:]) if values else None


class TimingsFile:
  """timings.csv: the wall-clock seconds of each round."""

  def __init__(self, path: pathlib.Path, num_rounds: int):
    """Opens the file, keeping the first `num_rounds` rounds."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [x for x in lines[1:] if _round_of(x) <= num_rounds]
    text = '\n'.join([f'{_ROUND},seconds', *kept]) + '\n'
    atomic_files.write_bytes(path, text.encode())
    self._file = open(path, 'a')

  def append(self, round_num: int, seconds: float) -> None:
    """Appends a round's time."""
    self._file.write(f'{round_num},{seconds:.6f}\n')
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _round_of(line: str) -> float:
  """Returns the round of a line of timings.csv, infinity for a cut-off one."""
  try:
    round_num, _ = line.split(',')
    return int(round_num)
  except ValueError:
    return float('inf')


def median_seconds(path: pathlib.Path) -> float | None:
  """Returns the median of a timings.csv in seconds, None if it has no rows."""
  with open(path, newline='') as file:
    seconds = [float(row['seconds']) for row in csv.DictReader(file)]
  return statistics.median(seconds) if seconds else None


class TensorBoardWriter:
  """TensorBoard's event files, one set of scalars a round.

  `tff.program.TensorBoardReleaseManager` would serve but for three things: it
  cannot be flushed at a checkpoint, so that a killed run loses up to two
  minutes of events for good; it cannot tell TensorBoard that a continued run
  goes back behind what it had shown; and its files are named after the clock.
  TensorBoard reads files in the order of their names, so after a clock has gone
  back it would not read the newest file, or take it for the oldest.
  """

  def __init__(self, directory: pathlib.Path, num_rounds: int):
    """Opens a new event file that goes on after `num_rounds` rounds."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.summary.writer import record_writer

    self._event = event_pb2.Event
    self._summary = summary_pb2.Summary
    directory.mkdir(parents=True, exist_ok=True)
    numbers = [
        int(path.name.split('.')[3])
        for path in directory.glob('events.out.tfevents.*')
        if path.name.split('.')[3].isdecimal()
    ]
    number = max([_wall_clock(), *(n + 1 for n in numbers)])
    path = directory / f'events.out.tfevents.{int(number):010d}.tff_meta'
    self._file = open(path, 'xb')
    self._records = record_writer.RecordWriter(self._file)
    self._write(file_version='brain.Event:2')
    # From the second such mark on, TensorBoard forgets what it had read of the
    # rounds that follow.
    started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(step=num_rounds + 1, session_log=started)

  def _write(self, **fields: object) -> None:
    event = self._event(wall_time=_wall_clock(), **fields)
    self._records.write(event.SerializeToString())

  def append(self, round_num: int, values: Mapping[str, object]) -> None:
    """Writes a round's scalars."""
    scalars = [
        self._summary.Value(tag=name, simple_value=float(value))
        for name, value in values.items()
    ]
    self._write(step=round_num, summary=self._summary(value=scalars))

  def flush(self) -> None:
    """Hands the events to the operating system."""
    self._records.flush()

  def close(self) -> None:
    """Closes the event file."""
    self._records.close()


def _wall_clock() -> float:
  """Seconds since 1970, for people to read: nothing may rely on its order."""
  return time.time()  # noqa: TID251
