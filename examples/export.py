"""A trained model as files that need TensorFlow alone.

What it writes also serves where neither tff_meta nor TFF is installed:

  python bundle/serve.py new_client examples.npz labels.npy
"""

import pathlib

import numpy as np
from sklearn import datasets

import tff_meta
from tff_meta.bundles import serve


def main(folder: str = '.', rounds: int = 50) -> float:
  """Returns what a new client's model has right, as it is served."""
  x, y = datasets.load_digits(return_X_y=True)
  x = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
  clients = {f'client_{k}': (x[k::20], y[k::20]) for k in range(19)}
  fitted = tff_meta.fit(
      clients, algorithm='metavers', model='mlp', rounds=rounds
  )
  bundle = fitted.export(pathlib.Path(folder) / 'bundle', uses=['new_client'])

  # From here on nothing of tff_meta is needed but this one file.
  mine_x = x[19::20]
  mine_y = y[19::20]
  predicted = serve.predict(
      bundle,
      'new_client',
      dict(support_x=mine_x[:50], support_y=mine_y[:50], query_x=mine_x[50:]),
  )
  return float((predicted.astype(int) == mine_y[50:]).mean())


if __name__ == '__main__':
  print(f'{100 * main():.1f} % right')
