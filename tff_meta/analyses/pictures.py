"""PNGs of points in planes, side by side, and of images."""

from collections.abc import Sequence
import io
import itertools
import math
import pathlib
from typing import NamedTuple

import numpy as np

from tff_meta import escapes
from tff_meta.training import atomic_files

_MAX_IN_LEGEND = 20
_PANELS_IN_A_ROW = 4


class Points(NamedTuple):
  """Points that are drawn alike.

  Attributes:
    name: In the legend; '' for none.
    xy: float [n, 2].
    labels: Integers [n], what their colours stand for.
    marker: Matplotlib's name of their shape.
    size: Their area, in square points.
    outlined: Whether they have a black outline.
    connected: Whether a line goes through those of a label, in their order.
  """

  name: str
  xy: np.ndarray
  labels: np.ndarray
  marker: str = 'o'
  size: float = 10.0
  outlined: bool = False
  connected: bool = False


class Panel(NamedTuple):
  """One plane.

  Attributes:
    title: Above it.
    layers: From the bottom to the top.
  """

  title: str
  layers: Sequence[Points]


def write_panels(
    path: pathlib.Path, panels: Sequence[Panel], legend: str
) -> None:
  """Draws planes side by side; a label has one colour in all of them.

  Args:
    path: The PNG to write (atomically).
    panels: At least one.
    legend: What a label is, such as 'class'.
  """
  plt = _pyplot()
  labels = np.unique(
      np.concatenate([p.labels for panel in panels for p in panel.layers])
  )
  colours = dict(zip(labels.tolist(), _colours(plt, len(labels)), strict=True))
  columns = min(len(panels), _PANELS_IN_A_ROW)
  rows = math.ceil(len(panels) / columns)
  figure, grid = plt.subplots(
      rows,
      columns,
      squeeze=False,
      figsize=(4.2 * columns + 1.4, 4.2 * rows + 0.4),
      layout='constrained',
  )
  for axes in grid.flat[len(panels) :]:
    axes.axis('off')
  for axes, panel in zip(grid.flat, panels, strict=False):
    for layer in panel.layers:
      _draw(axes, layer, colours)
    axes.set(xticks=[], yticks=[])
    axes.set_title(escapes.picture_text(panel.title), fontsize='medium')
  _add_legend(plt, figure, panels, colours, legend)
  _save(plt, figure, path)


def write_images(
    path: pathlib.Path,
    images: Sequence[Sequence[np.ndarray]],
    titles: Sequence[Sequence[str]],
) -> None:
  """Draws images in rows.

  Args:
    path: The PNG to write (atomically).
    images: Rows of equal length of float [height, width, 1 or 3], 0 black and 1
      white; what lies outside is cut off.
    titles: One each.
  """
  plt = _pyplot()
  figure, grid = plt.subplots(
      len(images),
      len(images[0]),
      squeeze=False,
      figsize=(1.6 * len(images[0]), 2.0 * len(images)),
      layout='constrained',
  )
  chain = itertools.chain.from_iterable
  flat = zip(chain(images), chain(titles), strict=True)
  for axes, (image, title) in zip(grid.flat, flat, strict=True):
    pixels = np.clip(image, 0, 1)
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    axes.imshow(pixels, cmap='gray', vmin=0, vmax=1, interpolation='nearest')
    axes.set(xticks=[], yticks=[])
    axes.set_title(escapes.picture_text(title), fontsize='xx-small')
  _save(plt, figure, path)


def _draw(axes, layer, colours) -> None:
  if layer.connected:
    for label in np.unique(layer.labels):
      own = layer.xy[layer.labels == label]
      axes.plot(*own.T, color=colours[int(label)], linewidth=0.8, alpha=0.7)
  axes.scatter(
      *layer.xy.T,
      c=[colours[int(label)] for label in layer.labels],
      marker=layer.marker,
      s=layer.size,
      edgecolors='black' if layer.outlined else 'none',
      linewidths=0.7,
      zorder=3,
  )


def _add_legend(plt, figure, panels, colours, legend) -> None:
  """Says what the shapes are, and the colours unless there are too many."""
  handles = {}
  for panel in panels:
    for layer in panel.layers:
      if layer.name:
        handles[escapes.picture_text(layer.name)] = plt.Line2D(
            [],
            [],
            color='grey',
            marker=layer.marker,
            markersize=math.sqrt(layer.size),
            markeredgecolor='black' if layer.outlined else 'none',
            linestyle='',
        )
  if len(colours) <= _MAX_IN_LEGEND:
    for label, colour in colours.items():
      handles[f'{legend} {label}'] = plt.Line2D(
          [], [], color=colour, marker='s', linestyle=''
      )
  figure.legend(
      handles.values(),
      handles.keys(),
      loc='outside right upper',
      fontsize='small',
      frameon=False,
  )


def _colours(plt, count):
  """Returns so many colours, easy to tell apart while they are few."""
  if count <= 20:
    return plt.get_cmap('tab10' if count <= 10 else 'tab20').colors[:count]
  return plt.get_cmap('hsv')(np.linspace(0, 1, count, endpoint=False))


def _save(plt, figure, path) -> None:
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=110)
  plt.close(figure)
  atomic_files.write_bytes(path, buffer.getvalue())


def _pyplot():
  import matplotlib  # Takes seconds: only when needed.

  matplotlib.use('Agg')
  from matplotlib import pyplot

  return pyplot
