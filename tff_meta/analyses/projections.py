"""Points of many dimensions laid out in a plane, and how well they separate."""

import dataclasses

import numpy as np

METHODS = ('tsne', 'pca')


@dataclasses.dataclass(frozen=True)
class Layout:
  """How points are laid out; the same layout of the same points is the same.

  The papers publish no settings of theirs.

  Attributes:
    method: `'tsne'`, started from the first two principal components, or these
      themselves (`'pca'`).
    perplexity: Of t-SNE: about how many neighbours a point has.
    seed: Of t-SNE.

  Source: van der Maaten and Hinton 2008, "Visualizing Data using t-SNE".
  """

  method: str = 'tsne'
  perplexity: float = 30.0
  seed: int = 0

  def __post_init__(self):
    if self.method not in METHODS:
      raise ValueError(
          f'Expected `method` to be one of {", ".join(METHODS)}, found'
          f' {self.method!r}.'
      )
    if not self.perplexity > 0:
      raise ValueError(
          f'Expected `perplexity` to be positive, found {self.perplexity:g}.'
      )

  def check(self, num_points: int) -> None:
    """Raises a ValueError if there are too few points."""
    least = 2 if self.method == 'pca' else int(self.perplexity) + 1
    if num_points < least:
      tip = ' Tip: a smaller `perplexity`, or the projection pca.'
      raise ValueError(
          f'Expected at least {least} points to lay out, found {num_points}.'
          f'{tip if self.method != "pca" else ""}'
      )

  def project(self, points: np.ndarray) -> np.ndarray:
    """Lays points out in a plane.

    Args:
      points: float [n, D], D of at least 2.

    Returns:
      float64 [n, 2].

    Raises:
      ValueError: If there are too few points.
    """
    from sklearn import decomposition  # Takes seconds: only when needed.
    from sklearn import manifold
    import threadpoolctl

    self.check(len(points))
    points = np.asarray(points, np.float64)
    if self.method == 'pca':
      return decomposition.PCA(2, svd_solver='full').fit_transform(points)
    tsne = manifold.TSNE(
        2,
        perplexity=self.perplexity,
        init='pca',
        random_state=self.seed,
        n_jobs=1,
    )
    # Sums depend on the number of threads; and on a busy machine theirs wait
    # for each other most of the time.
    with threadpoolctl.threadpool_limits(1):
      return tsne.fit_transform(points).astype(np.float64)


def silhouette(points: np.ndarray, labels: np.ndarray) -> float:
  """How much nearer points are to their own class than to the next one.

  Args:
    points: float [n, D].
    labels: Integers [n], of at least two classes and of less than n.

  Returns:
    The mean silhouette, in [-1, 1]; 1 for classes that are points apart.

  Raises:
    ValueError: If there are too few classes, or as many as points.

  Source: Rousseeuw 1987, "Silhouettes".
  """
  from sklearn import metrics  # Takes seconds: only when needed.

  num_classes = len(np.unique(labels))
  if not 2 <= num_classes < len(labels):
    raise ValueError(
        'Expected at least two classes and more points than classes, found'
        f' {num_classes} classes and {len(labels)} points.'
    )
  return float(metrics.silhouette_score(points, labels))
