"""Trains on nineteen clients' digits, and adapts to a new one's few."""

import numpy as np
from sklearn import datasets

import tff_meta

images, digits = datasets.load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
clients = {f'client_{k}': (images[k::20], digits[k::20]) for k in range(19)}


def main(rounds: int = 50) -> float:
  """Returns the share of the new client's digits that are right."""
  fitted = tff_meta.fit(clients, algorithm='metavers', rounds=rounds)
  for name, result in fitted.evaluate().items():
    print(f'{name}: {100 * result["accuracy_mean"]:.1f} % right')
  x, y = images[19::20], digits[19::20]
  mine = fitted.personalize((x[:50], y[:50]))
  return float((mine.predict(x[50:]) == y[50:]).mean())


if __name__ == '__main__':
  print(f'a new client: {100 * main():.1f} % right')
