"""Embeddings of test examples in a plane, coloured by class.

Source: MetaVers (Lim et al., WACV 2024), Fig. 2: Local, triplets with a fixed
margin, cross-entropy alone, MetaVers.
"""

from typing import Any

import numpy as np

from tff_meta.analyses import pictures
from tff_meta.analyses import projections
from tff_meta.evaluation import normalized_variance
from tff_meta.training import embeddings as embeddings_lib


def build_panel(
    title: str,
    examples: embeddings_lib.EmbeddedExamples,
    layout: projections.Layout,
) -> tuple[pictures.Panel, dict[str, Any]]:
  """Lays out examples, with the means of their classes as large points.

  The means are laid out along with the examples.

  Args:
    title: Above the panel.
    examples: At least two, of at least two classes.
    layout: Of the plane.

  Returns:
    The panel, and how well the classes separate before they are laid out:
    `silhouette`, `num_examples` and `num_classes`.

  Raises:
    ValueError: If there are too few examples or classes.
  """
  points, labels = examples
  silhouette = projections.silhouette(points, labels)
  classes = np.unique(labels)
  means = normalized_variance.class_means(points, labels, classes)
  xy = layout.project(np.concatenate([points, means]))
  layers = (
      pictures.Points('test example', xy[: len(labels)], labels),
      pictures.Points(
          'class mean', xy[len(labels) :], classes, size=110, outlined=True
      ),
  )
  panel = pictures.Panel(f'{title}\nsilhouette {silhouette:.3f}', layers)
  return panel, {
      'silhouette': silhouette,
      'num_examples': len(labels),
      'num_classes': len(classes),
  }
