import math

from matplotlib import image
import numpy as np
import pytest

from tff_meta.training import learning_curve

_NAN = math.nan


def _draw(path, metrics, **kwargs):
  learning_curve.write_learning_curve(path, metrics, 'a run', **kwargs)
  return image.imread(path)


@pytest.mark.parametrize(
    'metrics',
    [
        {},
        {'round': [1], 'train/loss': [0.5]},
        {'round': [1, 2], 'train/loss': [_NAN, _NAN]},
        {'round': [1, 2], 'train/loss': [math.inf, 1.0]},
        {
            'round': list(range(1, 1001)),
            'train/loss': list(range(1000)),
            'groups/accuracy': [_NAN] * 999 + [0.5],
            'train/num_clients': [3] * 1000,
        },
    ],
    ids=['nothing', 'one round', 'only nan', 'infinite', 'long'],
)
def test_every_run_has_a_picture(tmp_path, metrics):
  pixels = _draw(tmp_path / 'curve.png', metrics)
  assert np.ptp(pixels[..., :3]) > 0.5


def test_a_panel_is_drawn_for_what_there_is(tmp_path):
  losses = {'round': [1, 2], 'train/loss': [2.0, 1.0]}
  both = losses | {'train/accuracy': [0.1, 0.2]}
  one = _draw(tmp_path / 'one.png', losses)
  two = _draw(tmp_path / 'two.png', both)
  assert two.shape[0] == 2 * one.shape[0]


def test_the_legend_tells_means_from_single_rounds():
  labels = []

  class Axes:

    def plot(self, *unused_points, label):
      labels.append(label)

  for window in (1, 4):
    learning_curve._draw(Axes(), [1, 2], [0.5, 0.4], 'train/loss', window)
  assert labels == ['train/loss', 'train/loss, mean of 4 rounds']


def test_a_round_without_a_loss_is_a_gap_in_the_line():
  """A mean is over the others; evaluations with gaps are points."""
  drawn = {}

  class Axes:

    def plot(self, x, y, *style, label):
      drawn[label] = x, y, style

  values = [4.0, _NAN, _NAN, 2.0]
  for name in ('train/loss', 'groups/loss'):
    learning_curve._draw(Axes(), [1, 2, 3, 4], values, name, 2)
  x, y, style = drawn['train/loss, mean of 2 rounds']
  assert x == [1, 2, 3, 4] and not style
  np.testing.assert_array_equal(y, [4.0, 4.0, _NAN, 2.0])
  assert drawn['groups/loss'] == ([1, 4], [4.0, 2.0], ('o-',))


def test_the_best_round_and_ends_of_phases_are_marked():
  """The first of two largest values; a phase that the run ends with is none."""
  metrics = {
      'round': [1, 2, 3, 4],
      'train/accuracy': [0.9, 0.9, 0.9, 0.9],
      'a/accuracy': [_NAN, 0.25, 0.5, 0.5],
      'a/accuracy_micro': [_NAN, 0.75, 0.5, 0.25],
  }
  phases = {'warm-up': 2, 'rest': 4}

  def marks(best_by=None):
    figure = learning_curve._figure(metrics, 'a run', 1, phases, best_by)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines['a'].get_ydata()) == [25, 50, 50]
    assert list(lines['training'].get_ydata()) == 4 * [90]
    assert list(lines['warm-up ends after round 2'].get_xdata()) == [2.5, 2.5]
    (best,) = (name for name in lines if 'best' in name)
    (x,), (y,) = lines[best].get_data()
    assert len(lines) == 4
    return best, x, y

  assert marks() == ('best: 50.00 % in round 3', 3, 50)
  assert marks('a/accuracy_micro') == ('best: 75.00 % in round 2', 2, 25)


def test_means_are_over_the_window(tmp_path):
  """Within episodes of two the loss jumps; over them it does not change."""
  rounds = list(range(1, 9))
  jumping = {'round': rounds[1:], 'loss': [3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0]}
  assert learning_curve._last(jumping['loss'], 4, 2) == [1.0, 3.0]
  assert learning_curve._last(jumping['loss'], 0, 2) == [3.0]
  shown = _draw(tmp_path / 'a.png', jumping, min_window=1)
  smoothed = _draw(tmp_path / 'b.png', jumping, min_window=2)
  assert not np.array_equal(shown, smoothed)
