"""What clients hold, before anything is trained: a table and a picture."""

from collections.abc import Sequence
import dataclasses
import io
import pathlib

import numpy as np

from tff_meta import escapes
from tff_meta import machine
from tff_meta.data import client_sources
from tff_meta.data import federated_dataset
from tff_meta.training import atomic_files

_MOST_COLUMNS = 12
_MOST_LINES = 40
_ROLES = {
    'meta_train': 'train',
    'meta_validation': 'validate',
    'meta_test': 'new',
}


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
  """Numbers of what clients hold.

  Attributes:
    name: Of the data set.
    clients: Ids, those of training first.
    roles: What each is for.
    class_names: What labels 0, 1, ... stand for.
    sizes: Examples of each client to train, validate and test on, int64 [n, 3].
    histogram: Examples of each client of each class, int64 [n, C].
    input_shape: Shape of an example.
    num_bytes: What all examples take in memory.
  """

  name: str
  clients: tuple[str, ...]
  roles: tuple[str, ...]
  class_names: tuple[str, ...]
  sizes: np.ndarray
  histogram: np.ndarray
  input_shape: tuple[int, ...]
  num_bytes: int

  def to_text(self) -> str:
    """Returns the table of clients, at most forty of them, and sums."""
    names = self.class_names
    # Of many classes, how many a client has.
    is_wide = len(names) <= _MOST_COLUMNS
    head = ['client', 'for', *client_sources.PARTS]
    head += names if is_wide else ['classes', 'largest class']
    rows = [
        [client, role, *map(str, sizes), *self._classes(counts, is_wide)]
        for client, role, sizes, counts in zip(
            self.clients, self.roles, self.sizes, self.histogram, strict=True
        )
    ]
    more = len(rows) - _MOST_LINES
    if more > 0:
      rows = rows[:_MOST_LINES] + [
          [f'... {more} more', *[''] * (len(head) - 1)]
      ]
    total = self.histogram.sum(axis=0)
    rows.append(
        [
            'all',
            '',
            *map(str, self.sizes.sum(axis=0)),
            *self._classes(total, is_wide),
        ]
    )
    shape = ' x '.join(map(str, self.input_shape))
    kept = min(1.0, machine.cache_bytes() / max(self.num_bytes, 1))
    return '\n'.join(
        [
            f'{self.name}: {len(self.clients)} clients, {len(names)} classes,'
            f' {self.sizes.sum()} examples of {shape}',
            *_aligned([head, *rows]),
            f'Memory: {self.num_bytes / 2**20:.1f} MiB of examples, of which'
            f' {100 * kept:.0f} % are kept between rounds.',
        ]
    )

  def _classes(self, counts, is_wide) -> list[str]:
    if is_wide:
      return list(map(str, counts))
    largest = int(counts.argmax())
    return [
        str((counts > 0).sum()),
        f'{self.class_names[largest]} ({counts[largest]})',
    ]

  def write_picture(self, path: pathlib.Path) -> None:
    """Draws the numbers of examples, a row a client and a column a class.

    Args:
      path: The PNG to write; its directory has to exist.
    """
    from matplotlib import figure as figure_lib  # Not pyplot, which is slow.

    num_clients, num_classes = self.histogram.shape
    size = (
        min(14.0, 3.0 + 0.35 * num_classes),
        min(16.0, 2.0 + 0.22 * num_clients),
    )
    figure = figure_lib.Figure(size, layout='constrained')
    axes = figure.subplots()
    image = axes.imshow(self.histogram, aspect='auto', vmin=0)
    figure.colorbar(image, label='examples')
    for axis, labels in (
        (axes.xaxis, self.class_names),
        (axes.yaxis, self.clients),
    ):
      if len(labels) <= 60:  # More would cover each other.
        axis.set_ticks(
            range(len(labels)), [escapes.picture_text(x) for x in labels]
        )
    axes.tick_params(axis='x', rotation=90)
    axes.set_xlabel('class')
    axes.set_ylabel('client')
    axes.set_title(escapes.picture_text(self.name))
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=120)
    atomic_files.write_bytes(path, buffer.getvalue())


def describe(dataset: federated_dataset.FederatedDataset) -> Description:
  """Counts what clients hold; reads each once.

  Args:
    dataset: The clients.

  Raises:
    ValueError: If a client cannot be read.
  """
  clients, roles, sizes, histogram = [], [], [], []
  num_bytes = 0
  for role, name in _ROLES.items():
    for client_id in dataset.client_ids(role):
      held = dataset.client(client_id)
      labels = np.concatenate([part.y for part in held])
      clients.append(client_id)
      roles.append(name)
      sizes.append([len(part.y) for part in held])
      histogram.append(np.bincount(labels, minlength=dataset.num_classes))
      num_bytes += sum(part.x.nbytes + part.y.nbytes for part in held)
  class_names = dataset.class_names
  if class_names is None:
    class_names = tuple(map(str, range(dataset.num_classes)))
  return Description(
      dataset.name,
      tuple(clients),
      tuple(roles),
      class_names,
      np.array(sizes),
      np.array(histogram),
      dataset.input_shape,
      num_bytes,
  )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns lines of columns, the first two from the left."""
  shown = [[_one_line(cell) for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
  return [
      '  '
      + '  '.join(
          cell.ljust(width) if i < 2 else cell.rjust(width)
          for i, (cell, width) in enumerate(zip(row, widths, strict=True))
      ).rstrip()
      for row in shown
  ]


def _one_line(text: str) -> str:
  return ''.join(c if c.isprintable() else '?' for c in text)[:24]
