"""Tables of one's own, an example a row: CSV and Parquet, read with pandas."""

import os
from typing import Any, Literal
import warnings

import numpy as np

from tff_meta import machine
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import image_folders
from tff_meta.datasets import own_parts

_SEPARATORS = {'comma': ',', 'semicolon': ';', 'tab': '\t'}
_MISSING = ('', 'NA', 'N/A', 'NaN', 'nan', 'null', 'None')
_BYTES_OF_A_VALUE = 8
_PYARROW = 'pyarrow==17.0.0'


def csv(
    path: str,
    download: bool = False,
    *,
    label: str = 'label',
    client: str = '',
    features: tuple[str, ...] = (),
    image: str = '',
    image_shape: tuple[int, ...] = (),
    image_size: tuple[int, ...] = (),
    test_file: str = '',
    separator: Literal['comma', 'semicolon', 'tab'] = 'comma',
    scaling: own_parts.OwnScaling = 'auto',
) -> corpus_lib.Corpus:
  """Reads a text file whose first line has the names of the columns.

  Args:
    path: The file.
    download: Not used.
    label: The column with the class, a whole number or a name.
    client: The column with the client that holds the example, '' for none.
    features: The columns with the numbers of an example, () for all others.
    image: The column with the path of an image, relative to the file's folder;
      '' for an example of numbers.
    image_shape: Height, width and channels if `features` are the pixels of an
      image, row by row; () if they are not.
    image_size: Height and width, or both in one number, that images of `image`
      are resized to; () where they have one size.
    test_file: A file of the same kind and columns, relative to this one's
      folder, with the examples to test on; '' where clients hold some of their
      own back.
    separator: What is between two values.
    scaling: 'unit' divides by 255, 'standard' gives each number mean 0 and
      variance 1, 'channels' each channel of images, 'raw' leaves numbers as
      they are. 'auto' is 'unit' for images of whole numbers 0..255, 'raw' for
      other images, and 'standard' for other numbers.

  Returns:
    The corpus.

  Raises:
    DatasetNotFoundError: If there is no such file.
    ValueError: If it is not what it should be.
  """
  del download

  def read(file):
    return _read_csv(file, _SEPARATORS[separator], (label, client, image))

  return _corpus(
      path,
      test_file,
      read,
      label=label,
      client=client,
      features=features,
      image=image,
      image_shape=image_shape,
      image_size=image_size,
      scaling=scaling,
  )


def parquet(
    path: str,
    download: bool = False,
    *,
    label: str = 'label',
    client: str = '',
    features: tuple[str, ...] = (),
    image: str = '',
    image_shape: tuple[int, ...] = (),
    image_size: tuple[int, ...] = (),
    test_file: str = '',
    scaling: own_parts.OwnScaling = 'auto',
) -> corpus_lib.Corpus:
  """Reads a file of columns; the arguments are as for `csv`."""
  del download
  return _corpus(
      path,
      test_file,
      _read_parquet,
      label=label,
      client=client,
      features=features,
      image=image,
      image_shape=image_shape,
      image_size=image_size,
      scaling=scaling,
  )


def _corpus(path, test_file, read, *, scaling, **columns):
  table = _table(read, path)
  used = (columns['label'], columns['image'], *columns['features'])
  own_parts.warn_of_clients(
      columns['client'], [str(n) for n in table.columns if n not in used], path
  )
  takes_all = not (columns['image'] or columns['features'])
  if takes_all:  # By name: a test file may have them in another order.
    columns['features'] = _others(table, columns)
  train = _part(table, path, **columns)
  test = None
  if test_file:
    beside = os.path.join(os.path.dirname(path), test_file)
    table = _table(read, beside)
    more = set(_others(table, columns)) - set(columns['features'])
    if takes_all and more:
      raise ValueError(
          f'Expected the columns of {path} in {beside}, found {min(more)!r} as'
          ' well.'
      )
    test = _part(table, beside, **columns)
  return own_parts.to_corpus(
      os.path.basename(path),
      train,
      test,
      scaling,
      path,
      is_table=not (columns['image'] or columns['image_shape']),
  )


def _read_csv(path: str, separator: str, names: tuple[str, ...]) -> Any:
  """Returns a table.

  Args:
    path: The file.
    separator: What is between two values.
    names: The columns with the label, the client and the image, which are read
      as text; labels are made whole numbers where all are written like them.
  """
  import pandas as pd  # Only when needed.

  # Text that holds numbers takes about as much again as numbers.
  machine.check_fits(4 * os.path.getsize(path), path)
  how: dict[str, Any] = dict(sep=separator, encoding='utf-8-sig')
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('error', pd.errors.ParserWarning)
      first = pd.read_csv(
          path, header=None, nrows=1, dtype=str, na_filter=False, **how
      )
      columns = first.iloc[0].tolist()
      _check_columns(columns)
      table = pd.read_csv(
          path,
          dtype={name: str for name in names if name in columns},
          keep_default_na=False,
          na_values={
              name: [''] if name in names else list(_MISSING)
              for name in columns
          },
          index_col=False,
          low_memory=False,
          **how,
      )
  except (ValueError, pd.errors.ParserWarning) as e:
    raise ValueError(
        f'Expected {path} to be a table with a line of names, and as many'
        f' values in every line after it, found: {" ".join(str(e).split())}'
    ) from e
  if names[0] in columns:
    table[names[0]] = own_parts.as_whole_numbers(table[names[0]].to_numpy())
  return table


def _check_columns(columns):
  """Raises a ValueError if a column has no name, or that of another."""
  twice = sorted({name for name in columns if columns.count(name) > 1})
  if twice:
    raise ValueError(f'two columns are called {twice[0]!r}.')
  if '' in columns:
    raise ValueError(f'no name of column {columns.index("") + 1}.')
  if len(columns) == 1 and any(s in columns[0] for s in _SEPARATORS.values()):
    raise ValueError(
        f'a single column, {columns[0]!r}. Tip: --dataset_options=separator='
        + next(k for k, s in _SEPARATORS.items() if s in columns[0])
    )


def _read_parquet(path: str) -> Any:
  import pandas as pd  # Only when needed.

  try:
    table = pd.read_parquet(path)
  except ImportError as e:
    raise ImportError(
        f'Expected pyarrow to read {path}, found none. Tip: `pip install'
        f' {_PYARROW}` installs it beside what there is.'
    ) from e
  except (ValueError, OSError) as e:  # Of pyarrow.
    raise ValueError(f'Expected {path} to be a Parquet file, found: {e}') from e
  table.columns = [str(name) for name in table.columns]
  return table


def _table(read, path: str) -> Any:
  """Returns the table of a file that is there, and has examples."""
  own_parts.check_is_file(path)
  table = read(path)
  if not len(table):
    raise ValueError(f'Expected examples in {path}, found none.')
  return table


def _others(table, columns) -> tuple[str, ...]:
  """Returns the columns but those with the label, client and image."""
  used = [columns[name] for name in ('label', 'client', 'image')]
  return tuple(n for n in map(str, table.columns) if n not in used)


def _part(
    table, path, *, label, client, features, image, image_shape, image_size
) -> own_parts.Part:
  """Returns what the columns of a table hold."""
  columns = [str(name) for name in table.columns]
  for name in (*filter(None, (label, client, image)), *features):
    own_parts.check_has(name, columns, 'column', path)
  if image:
    if features or image_shape:
      raise ValueError(
          f'Expected images ({image!r}) or `features` of {path}, found both.'
      )
    x = _read_images(table[image], path, image_size)
  else:
    x = _read_numbers(table, list(features), path, image_shape)
  clients = None
  if client:
    if table[client].isna().any():
      raise ValueError(
          f'Expected a client in every row of {path}, found none in column'
          f' {client!r} of row {_first(table[client].isna())}.'
      )
    clients = table[client].to_numpy()
  if table[label].isna().any():
    raise ValueError(
        f'Expected a label in every row of {path}, found none in column'
        f' {label!r} of row {_first(table[label].isna())}.'
    )
  return own_parts.Part(x, table[label].to_numpy(), clients)


def _first(mask) -> int:
  """Returns the first row of a mask, the line of names not counted."""
  return int(np.asarray(mask).argmax()) + 1


def _read_numbers(table, names, path, image_shape) -> np.ndarray:
  """Returns columns of numbers, [n, number of columns] or images."""
  if not names:
    raise ValueError(
        f'Expected columns of numbers in {path}, found none beside label and'
        ' client.'
    )
  machine.check_fits(_BYTES_OF_A_VALUE * len(table) * len(names), path)
  for name in names:
    column = table[name]
    if column.dtype.kind not in 'biuf':
      raise ValueError(
          f'Expected numbers in the column {name!r} of {path}, found'
          f' {_first_text(column)}.'
          " Tip: '--dataset_options=features=(a,b)', in quotes for the shell,"
          ' chooses columns, client=NAME says which has the client; text has to'
          ' be made numbers first.'
      )
    numbers = column.to_numpy()
    bad = ~np.isfinite(numbers)
    if bad.any():
      raise ValueError(
          f'Expected a finite number in every row of {path}, found'
          f' {numbers[bad][0]} in column {name!r} of row {_first(bad)}.'
          ' Tip: leave out such rows, or fill them in, beforehand.'
      )
  # Beside other numbers pandas would have bools as objects.
  bools = {name: np.float32 for name in names if table[name].dtype.kind == 'b'}
  x = table[names].astype(bools).to_numpy()
  if not image_shape:
    return x
  if np.prod(image_shape) != len(names):
    raise ValueError(
        f'Expected as many columns as an image of shape {image_shape} has'
        f' pixels, {np.prod(image_shape)}, found {len(names)} in {path}.'
    )
  if x.dtype.kind in 'iu' and 0 <= x.min(initial=0) <= x.max(initial=0) < 256:
    x = x.astype(np.uint8)
  return x.reshape(len(x), *image_shape)


def _first_text(column) -> str:
  """Returns what a column has in the place of numbers, and in which row."""
  import pandas as pd  # Only when needed.

  is_text = np.array([isinstance(x, str) for x in column.tolist()])
  # Beside text pandas reads numbers as text, too.
  numbers = pd.to_numeric(column.where(is_text), errors='coerce')
  bad = is_text & numbers.isna().to_numpy()
  if not bad.any():  # As of whole numbers that no dtype holds.
    bad = is_text
  if not bad.any():
    return str(column.dtype)
  return f'{column[bad].iloc[0]!r} in row {_first(bad)}'


def _read_images(column, path, image_size) -> np.ndarray:
  """Returns the images whose paths a column holds."""
  if column.isna().any():
    raise ValueError(
        f'Expected the path of an image in every row of {path}, found none in'
        f' column {column.name!r} of row {_first(column.isna())}.'
    )
  folder = os.path.dirname(path)
  files = [os.path.join(folder, str(name)) for name in column]
  for row, file in enumerate(files):
    if not os.path.isfile(file):
      raise ValueError(
          f'Expected an image at {file}, as row {row + 1} of {path} says, found'
          ' none.'
      )
  return image_folders.read_alike(files, image_size)
