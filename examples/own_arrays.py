"""Arrays without clients: a file of them, dealt as a partitioner deals.

What the arrays are is written to a file, which the programs read as well:

  python -m binaries.train --dataset=npz:digits.npz --algorithm=fed_per
"""

import pathlib

import numpy as np
from sklearn import datasets

import tff_meta


def write_arrays(path: pathlib.Path) -> None:
  """Writes the digits, a fifth of them to test on."""
  x, y = datasets.load_digits(return_X_y=True)
  x = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
  names = np.array('zero one two three four five six seven eight nine'.split())
  is_test = np.arange(len(y)) % 5 == 0
  np.savez(
      path,
      x_train=x[~is_test],
      y_train=names[y[~is_test]],
      x_test=x[is_test],
      y_test=names[y[is_test]],
  )


def main(folder: str = '.', rounds: int = 50) -> dict:
  """Returns what known and new clients have right."""
  path = pathlib.Path(folder) / 'digits.npz'
  write_arrays(path)
  fitted = tff_meta.fit(
      f'npz:{path}',
      algorithm='fed_per',
      model='mlp',
      rounds=rounds,
      partition='dirichlet',
      partition_options={'alpha': 0.3},
      num_clients=15,
      num_new_clients=5,
      hparams={'learning_rate': 0.3},
  )
  return fitted.evaluate()


if __name__ == '__main__':
  for protocol, result in main().items():
    print(f'{protocol}: {100 * result["accuracy_mean"]:.1f} % right')
