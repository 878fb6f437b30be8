r"""Makes the files of users that `users_mnist_writers` and others are run on.

  ./run python docs/users_files.py --mnist=DIR --omniglot=DIR --output_dir=DATA

Both are files of `tff.simulation.datasets.SqlClientData` with the features
`pixels` [784], 0 where there is ink and 1 where there is none, and `label`, and
with the splits `train` and `test`, which the tables pool.

* `mnist_by_writer.sqlite`: 836 clients `f0000_mnisttrain` and so on. `--mnist`
  is a folder with MNIST's four files (`train-images-idx3-ubyte` and so on) and
  `qmnist-train-labels-idx2-int` and `qmnist-test-labels-idx2-int` of QMNIST,
  each with or without `.gz`. MNIST does not say whose its digits are; QMNIST,
  whose first examples are MNIST's in MNIST's order, found it again.
* `omniglot_by_drawer.sqlite`: 1,000 clients `Greek_01` and so on, an alphabet
  and a drawer. `--omniglot` is a folder with `images_background` and
  `images_evaluation` as Omniglot's archives have them, whose files end in the
  number of the drawer. Images are shrunk to 28 by 28 by areas.

Sources: Yadav and Bottou, Cold Case: The Lost MNIST Digits, NeurIPS 2019; Lake
et al., Human-level concept learning, Science, 2015.
"""

import argparse
from collections.abc import Mapping, Sequence
import gzip
import pathlib
import sqlite3

import numpy as np
import tensorflow as tf

Example = tuple[np.ndarray, int]  # Pixels float32 [28, 28], and the label.
_SIZE = 28
_WRITER = 2  # Column of QMNIST's labels; the first one is the class.
_DTYPES = {8: '>u1', 12: '>i4'}  # Third byte of an IDX file.
_TEST_FRACTION = 0.1


def _read_idx(folder: pathlib.Path, name: str) -> np.ndarray:
  """Returns the array of an IDX file.

  Args:
    folder: Where it is.
    name: Of the file, which may have `.gz` after it.

  Raises:
    FileNotFoundError: If it is not there.
    ValueError: If it is no IDX file.
  """
  for path in (folder / name, folder / f'{name}.gz'):
    if path.exists():
      break
  else:
    raise FileNotFoundError(f'Expected {folder / name} or {name}.gz there.')
  content = path.read_bytes()
  try:
    if path.suffix == '.gz':
      content = gzip.decompress(content)
    head = 4 * (1 + content[3])
    shape = np.frombuffer(content[4:head], '>i4').tolist()
    dtype = _DTYPES[content[2]]
    return np.frombuffer(content[head:], dtype).reshape(shape)
  except (OSError, EOFError, LookupError, ValueError) as e:
    raise ValueError(f'Expected an IDX file in {path}, found: {e!r}') from e


def mnist_by_writer(folder: pathlib.Path) -> dict[str, list[Example]]:
  """Returns client -> its digits, in the order of MNIST.

  Args:
    folder: With the files of MNIST and QMNIST.

  Raises:
    FileNotFoundError: If one is missing.
    ValueError: If one is something else, or they do not fit together.
  """
  clients: dict[str, list[Example]] = {}
  for part, of_qmnist, client in (
      ('train', 'train', 'mnisttrain'),
      ('t10k', 'test', 'mnisttest'),
  ):
    images = _read_idx(folder, f'{part}-images-idx3-ubyte')
    labels = _read_idx(folder, f'{part}-labels-idx1-ubyte')
    told = _read_idx(folder, f'qmnist-{of_qmnist}-labels-idx2-int')
    told = told[: len(labels)]
    if len(images) != len(labels):
      raise ValueError(
          f'Expected as many images as labels of MNIST, {part}, in {folder},'
          f' found {len(images)} and {len(labels)}.'
      )
    if told.ndim != 2 or not np.array_equal(told[:, 0], labels):
      raise ValueError(
          f'Expected the first {len(labels)} classes of QMNIST in {folder} to'
          f' be those of MNIST, {part}, found others.'
      )
    for image, label, writer in zip(
        images, labels, told[:, _WRITER], strict=True
    ):
      pixels = 1 - image.astype(np.float32) / 255
      of_writer = clients.setdefault(f'f{writer:04d}_{client}', [])
      of_writer.append((pixels, int(label)))
  return clients


def omniglot_by_drawer(folder: pathlib.Path) -> dict[str, list[Example]]:
  """Returns client -> its drawings, character by character.

  Args:
    folder: With `images_background` and `images_evaluation`.

  Raises:
    FileNotFoundError: If it has none of their drawings.
  """
  paths = [
      path
      for part in ('background', 'evaluation')
      for path in sorted((folder / f'images_{part}').glob('*/*/*.png'))
  ]
  if not paths:
    raise FileNotFoundError(
        f'Expected images_background/ALPHABET/CHARACTER/*.png in {folder}.'
    )
  clients: dict[str, list[Example]] = {}
  for path in paths:
    drawing = tf.io.decode_png(path.read_bytes(), channels=1)
    paper = tf.cast(drawing > 0, tf.float32)[tf.newaxis]
    pixels = tf.image.resize(paper, (_SIZE, _SIZE), method='area')
    character, drawer = path.stem.split('_')
    of_drawer = clients.setdefault(f'{path.parts[-3]}_{drawer}', [])
    of_drawer.append((pixels.numpy()[0, ..., 0], int(character) - 1))
  return clients


def write(path: pathlib.Path, clients: Mapping[str, list[Example]]) -> None:
  """Writes a file of `tff.simulation.datasets.SqlClientData`.

  Of each client a tenth of its examples, one at least, is in the split `test`.
  Who has fewer than two is left out.

  Args:
    path: The file, which is replaced.
    clients: Name of a client -> its examples.
  """
  unfinished = path.with_suffix('.unfinished')
  unfinished.unlink(missing_ok=True)
  rng = np.random.default_rng(0)
  with sqlite3.connect(unfinished) as db:
    db.execute(
        'CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT'
        ' NULL, serialized_example_proto BLOB NOT NULL)'
    )
    db.execute(
        'CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT'
        ' NOT NULL, num_examples INTEGER NOT NULL)'
    )
    for client in sorted(clients):
      number = len(clients[client])
      if number < 2:
        continue
      is_test = np.zeros(number, bool)
      num_test = max(1, round(_TEST_FRACTION * number))
      is_test[rng.permutation(number)[:num_test]] = True
      for split, of_split in ('train', ~is_test), ('test', is_test):
        held = [clients[client][i] for i in np.flatnonzero(of_split)]
        db.executemany(
            'INSERT INTO examples VALUES (?, ?, ?)',
            ((split, client, _serialize(*example)) for example in held),
        )
        db.execute(
            'INSERT INTO client_metadata VALUES (?, ?, ?)',
            (client, split, len(held)),
        )
    db.execute('CREATE INDEX of_client ON examples (client_id, split_name)')
  db.close()
  unfinished.rename(path)
  print(f'Written: {path}')


def _serialize(pixels: np.ndarray, label: int) -> bytes:
  feature = tf.train.Feature
  features = {
      'pixels': feature(float_list=tf.train.FloatList(value=pixels.ravel())),
      'label': feature(int64_list=tf.train.Int64List(value=[label])),
  }
  example = tf.train.Example(features=tf.train.Features(feature=features))
  return example.SerializeToString()


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the program.

  Args:
    argv: Its arguments; None for those of the process.

  Raises:
    FileExistsError: If a file that it would write is there.
    FileNotFoundError: If one that it reads is not.
    ValueError: If one that it reads is something else.
  """
  parser = argparse.ArgumentParser(allow_abbrev=False)
  parser.add_argument('--mnist', help='folder of MNIST and QMNIST')
  parser.add_argument('--omniglot', help='folder of Omniglot')
  parser.add_argument('--output_dir', required=True, help='folder to write to')
  args = parser.parse_args(argv)
  if not (args.mnist or args.omniglot):
    parser.error('Expected --mnist or --omniglot or both.')
  folder = pathlib.Path(args.output_dir)
  folder.mkdir(parents=True, exist_ok=True)
  jobs = [
      (folder / f'{read.__name__}.sqlite', read, pathlib.Path(source))
      for source, read in (
          (args.mnist, mnist_by_writer),
          (args.omniglot, omniglot_by_drawer),
      )
      if source
  ]
  for path, _, _ in jobs:
    if path.exists():
      raise FileExistsError(f'Expected no {path}, found one.')
  for path, read, source in jobs:
    write(path, read(source))


if __name__ == '__main__':
  main()
