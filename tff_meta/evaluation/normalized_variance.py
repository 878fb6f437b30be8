"""nVAR: how widely classes spread in an embedding, by their distance."""

import numpy as np


def normalized_variance(
    embeddings: np.ndarray, labels: np.ndarray, literal: bool = False
) -> float:
  """The mean over classes of their variance by their squared separation.

    nVAR = mean_k [ mean_{x of class k} |c_k - f(x)|^2 / |c_k - n_k|^2 ]

  where c_k is the mean embedding of class k and n_k the nearest such mean of
  another class. Moving, turning and scaling the embeddings does not change it.

  Args:
    embeddings: f(x), float [n, D].
    labels: Integers [n]; classes without examples do not count.
    literal: Whether the inner mean is over all x, as the formula is printed,
      instead of over those of the class, as the text has it.

  Returns:
    At least 0, smaller is better.

  Raises:
    ValueError: If the shapes do not fit, a number is not finite, there are less
      than two classes, or two class means are equal.

  Source: MetaVers (Lim et al., WACV 2024), Table 4. It prints values of 769 to
    2031 without a unit: compare orders, not sizes.
  """
  embeddings = np.asarray(embeddings, np.float64)
  labels = np.asarray(labels)
  if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
    raise ValueError(
        'Expected embeddings [n, D] and labels [n], found shapes'
        f' {embeddings.shape} and {labels.shape}.'
    )
  if not np.isfinite(embeddings).all():
    raise ValueError('Expected finite embeddings, found NaN or infinity.')
  classes = np.unique(labels)
  if len(classes) < 2:
    raise ValueError(
        f'Expected examples of at least two classes, found {len(classes)}.'
    )
  means = class_means(embeddings, labels, classes)
  separations = _squared_distances(means, means)
  np.fill_diagonal(separations, np.inf)
  nearest = separations.min(1)
  if not nearest.all():
    raise ValueError(
        'Expected class means that differ, found equal ones of classes'
        f' {classes[nearest == 0].tolist()}.'
    )
  spreads = [
      _squared_distances(embeddings if literal else own, mean[np.newaxis])
      for own, mean in zip(
          (embeddings[labels == label] for label in classes), means, strict=True
      )
  ]
  variances = np.array([spread.mean() for spread in spreads])
  return float(np.mean(variances / nearest))


def class_means(
    embeddings: np.ndarray, labels: np.ndarray, classes: np.ndarray
) -> np.ndarray:
  """Returns the mean embedding [k, D] of each of some classes [k]."""
  return np.stack([embeddings[labels == label].mean(0) for label in classes])


def _squared_distances(a, b):
  """Returns [n, k] of [n, D] and [k, D], without cancellation."""
  return np.stack([((a - row) ** 2).sum(1) for row in b], 1)
