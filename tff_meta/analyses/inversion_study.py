"""Gradient inversion of many images: a table that goes on, and its summary.

A row of inversion.csv is one image attacked in one case. It is written as soon
as all cases of its image are, and a study that is started again goes on behind
it. The case `grey` is no attack: a guess of mid-grey, for comparison.
"""

from collections.abc import Callable, Mapping, Sequence
import csv
import dataclasses
import io
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize
from scipy import stats
import tensorflow as tf

from tff_meta import plain_files
from tff_meta.analyses import inversion
from tff_meta.analyses import smooth_lenet
from tff_meta.data import corpus as corpus_lib
from tff_meta.training import atomic_files

GREY = 'grey'
RECOGNISED = 20.0  # dB.
_BEST_PSNR = 120.0  # dB; of an image without any error it would be infinite.
_SSIM_WINDOW = 11  # Pixels, or the largest odd number of them that fits.
# FedAvg's message of as many images, where that is not `classifier`.
_COMPARED_WITH = dict.fromkeys(
    (inversion.EPISODE, inversion.MINIBATCH), inversion.MINIBATCH
)
_TABLE = 'inversion.csv'
_PICTURES = 'pictures'


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a study attacks, and how hard; columns of each row of its table.

  Attributes:
    dataset: Its name.
    fingerprint: `Corpus.fingerprint` of what it holds. A table that an earlier
      version wrote has none, and is taken to be of these data.
    local_classes: N, of a client.
    shots: Images behind a prototype of the client or of the server.
    iterations: Of L-BFGS from each start.
    restarts: Starts of each attack.
    seed: Of everything.
  """

  dataset: str
  fingerprint: str
  local_classes: int
  shots: int
  iterations: int
  restarts: int
  seed: int


class Row(NamedTuple):
  """An image attacked in a case.

  Attributes:
    image_index: In the pool of the data set.
    image_class: In the whole problem.
    case: Its name.
    mse: See `measure`.
    psnr: See `measure`.
    ssim: See `measure`.
    mismatch: See `inversion.Reconstruction`; None of grey.
    lbfgs_iterations: Of the start that was chosen.
    label: That the attacker ends up with, guessed or sent; or None.
    true_label: Of the same classes.
  """

  image_index: int
  image_class: int
  case: str
  mse: float
  psnr: float
  ssim: float
  mismatch: float | None
  lbfgs_iterations: int
  label: int | None
  true_label: int


def run(
    corpus: corpus_lib.Corpus,
    settings: Settings,
    num_images: int,
    root: pathlib.Path,
    report: Callable[[str], None],
) -> list[Row]:
  """Attacks images that are drawn by the seed, and keeps what was found.

  Args:
    corpus: The data set.
    settings: What to attack, and how hard.
    num_images: At least 1; those of fewer are the first of those of more.
    root: Where the table and the pictures are. Images of the table that is
      there are not attacked again, unless their picture is lost, or rows of
      cases that an earlier version did not have.
    report: Called with a line for every image.

  Returns:
    The rows, image by image.

  Raises:
    ValueError: If there are not so many images, the data set does not suit, or
      the table that is there has other settings.
  """
  size = len(corpus.pooled_labels)
  if num_images > size:
    raise ValueError(
        f'Expected `images` of at most {size}, all of {corpus.name!r}, found'
        f' {num_images}.'
    )
  order = np.random.default_rng(settings.seed).permutation(size)
  place = {index: i for i, index in enumerate(order.tolist())}
  indices = list(place)[:num_images]

  def draw_scene(index):
    return inversion.draw_scene(
        corpus, index, settings.local_classes, settings.shots, settings.seed
    )

  table = root / _TABLE
  rows = _read(table, settings)
  attacker = _Attacker(draw_scene(indices[0]), settings)
  cases: dict[int, set[str]] = {}
  for row in rows:
    cases.setdefault(row.image_index, set()).add(row.case)
  done = {
      index
      for index, names in cases.items()
      if names == attacker.names and _strip(root, index).exists()
  }
  rows = [row for row in rows if row.image_index in done]
  for number, index in enumerate(indices, 1):
    if index in done:
      continue
    scene = draw_scene(index)
    found, images = attacker.attack(scene, index)
    plain_files.make_directory(root / _PICTURES, parents=True)
    atomic_files.write_bytes(_strip(root, index), _to_png(images))
    rows = sorted([*rows, *found], key=lambda row: place[row.image_index])
    atomic_files.write_bytes(table, _to_csv(rows, settings))
    psnrs = ', '.join(f'{row.case} {row.psnr:.1f}' for row in found)
    report(f'Image {number} of {num_images}, PSNR in dB: {psnrs}.')
  return [row for index in indices for row in rows if row.image_index == index]


class _Attacker:
  """All cases, compiled for images of one shape."""

  def __init__(self, scene, settings):
    self._settings = settings
    self._model = smooth_lenet.build_smooth_lenet(scene.image.shape)
    self._cases = inversion.build_cases(self._model, scene.num_classes)
    self._attacks = {
        name: inversion.Attack(case) for name, case in self._cases.items()
    }

  @property
  def names(self):
    """What an image has a row of each."""
    return {*self._cases, GREY}

  def attack(self, scene, index):
    """Returns the rows of an image, and it beside what was found."""
    seed = self._settings.seed, index
    victims = inversion.build_victims(self._model, self._cases, scene, seed)
    found = {
        name: inversion.invert(
            self._attacks[name],
            victim,
            iterations=self._settings.iterations,
            restarts=self._settings.restarts,
            seed=seed,
        )
        for name, victim in victims.items()
    }
    images = {
        name: guess_of_the_first(victims[name].truth['image'], guess.images)
        for name, guess in found.items()
    }
    rows = [
        Row(
            index,
            scene.label,
            name,
            *measure(scene.image, images[name]),
            guess.mismatch,
            guess.lbfgs_iterations,
            guess.label,
            victims[name].label,
        )
        for name, guess in found.items()
    ]
    grey = measure(scene.image, np.full(scene.image.shape, 0.5))
    rows.append(
        Row(index, scene.label, GREY, *grey, None, 0, None, scene.label)
    )
    return rows, [scene.image, *images.values()]


def guess_of_the_first(images: np.ndarray, guesses: np.ndarray) -> np.ndarray:
  """Returns the guess that is taken for the first of a client's images.

  An attacker does not know which is which. Each guess is taken for another
  image, so that the mean squared errors have the least sum.

  Args:
    images: float64 in [0, 1], [n, height, width, channels].
    guesses: The same, cut off at 0 and 1 where they are compared.

  Returns:
    One of `guesses`, as it is, [height, width, channels].
  """
  differences = np.clip(guesses, 0, 1) - np.expand_dims(images, 1)
  _, chosen = optimize.linear_sum_assignment(
      np.mean(differences**2, axis=(2, 3, 4))
  )
  return guesses[chosen[0]]


def measure(image: np.ndarray, guess: np.ndarray) -> tuple[float, float, float]:
  """Returns how like an image a guess is.

  Args:
    image: In [0, 1], [height, width, channels].
    guess: The same, cut off at 0 and 1.

  Returns:
    The mean squared error; the PSNR in dB, 120 at most; and the SSIM, 1 at
    most, of Gaussian windows of 11 x 11 pixels (or the largest odd number that
    fits) with a standard deviation of 1.5.
  """
  guess = np.clip(guess, 0, 1)
  mse = float(np.mean((guess - image) ** 2))
  fits = min(image.shape[:2])
  ssim = tf.image.ssim(
      tf.constant(image, tf.float32),
      tf.constant(guess, tf.float32),
      max_val=1.0,
      filter_size=min(_SSIM_WINDOW, fits - (fits + 1) % 2),
  )
  psnr = min(-10 * math.log10(mse), _BEST_PSNR) if mse else _BEST_PSNR
  return mse, psnr, float(ssim)


def summarize(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
  """Returns what each case gave away, for JSON.

  Args:
    rows: All cases of all images, from `run`.

  Returns:
    Case -> number of `images`, `psnr` and `ssim` as `mean` and `half_width_95`
    (Student's t over images; None of one), the same of `psnr_difference` and
    `ssim_difference` image by image from FedAvg's case that it is
    `compared_with` (but for these themselves), how many images are `recognised`
    (a PSNR of at least 20 dB), how many guessed labels are right
    (`right_labels`, None where none is guessed), and the median `mismatch`.
  """
  by_case: dict[str, list[Row]] = {}
  for row in rows:
    by_case.setdefault(row.case, []).append(row)
  summary = {}
  for case, own in by_case.items():
    entry: dict[str, Any] = {'images': len(own)}
    other = _COMPARED_WITH.get(case, inversion.CLASSIFIER)
    if case != other:
      entry['compared_with'] = other
    for name in 'psnr', 'ssim':
      values, others = (
          np.array([getattr(row, name) for row in part])
          for part in (own, by_case[other])
      )
      entry[name] = _interval(values)
      if case != other:
        entry[f'{name}_difference'] = _interval(values - others)
    entry['recognised'] = sum(row.psnr >= RECOGNISED for row in own)
    guesses_label = (
        own[0].label is not None and case not in inversion.LABEL_IS_GIVEN
    )
    entry['right_labels'] = (
        sum(row.label == row.true_label for row in own)
        if guesses_label
        else None
    )
    entry['median_mismatch'] = (
        None
        if own[0].mismatch is None
        else float(np.median([row.mismatch for row in own]))
    )
    summary[case] = entry
  return summary


def read_pictures(
    root: pathlib.Path, rows: Sequence[Row], most: int
) -> tuple[list[list[np.ndarray]], list[list[str]]]:
  """Returns images in [0, 1] and titles of the first images, a list of each.

  Args:
    root: The study's directory.
    rows: From `run`.
    most: So many images at most.
  """
  attacked = [row for row in rows if row.case != GREY]
  images, titles = [], []
  for index in list(dict.fromkeys(row.image_index for row in rows))[:most]:
    own = [row for row in attacked if row.image_index == index]
    content = plain_files.read_bytes(
        _strip(root, index), plain_files.MAX_TABLE_BYTES
    )
    strip = tf.io.decode_png(content).numpy() / 255
    images.append(np.split(strip, 1 + len(own), axis=1))
    titles.append([f'image {index}'])
    titles[-1] += [
        f'{row.case.replace("_", " ")}\n{row.psnr:.1f} dB' for row in own
    ]
  return images, titles


def _interval(values):
  """Returns a mean and half of its 95 % interval."""
  n, half_width = len(values), None
  if n > 1:
    error = np.std(values, ddof=1) / math.sqrt(n)
    half_width = float(stats.t.ppf(0.975, n - 1) * error)
  return {'mean': float(np.mean(values)), 'half_width_95': half_width}


def _strip(root, index):
  """Returns the file of an image beside all that was found of it."""
  return root / _PICTURES / f'{index}.png'


def _to_png(images):
  strip = np.clip(np.concatenate(images, axis=1), 0, 1)
  return tf.io.encode_png(np.round(255 * strip).astype(np.uint8)).numpy()


def _to_csv(rows, settings):
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  fixed = dataclasses.asdict(settings)
  writer.writerow([*fixed, *Row._fields])
  writer.writerows([*fixed.values(), *row] for row in rows)
  return text.getvalue().encode()


def _read(table, settings):
  """Returns the rows of a table that has these settings, if it is there."""
  try:
    content = plain_files.read_bytes(table, plain_files.MAX_TABLE_BYTES)
  except FileNotFoundError:
    return []
  fixed = {k: str(v) for k, v in dataclasses.asdict(settings).items()}
  rows = []
  for values in csv.DictReader(io.StringIO(content.decode())):
    found = {'fingerprint': fixed['fingerprint']} | {
        name: values.get(name) for name in fixed if name in values
    }
    differing = [name for name in fixed if found.get(name) != fixed[name]]
    if differing:
      wanted = ', '.join(f'{name}={fixed[name]}' for name in differing)
      there = ', '.join(f'{name}={found.get(name)}' for name in differing)
      raise ValueError(
          f'Expected {table} to be of {wanted}, found {there}. Tip: give'
          ' another --output_dir.'
      )
    try:
      row = Row(*(_PARSERS[name](values[name]) for name in Row._fields))
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(
          f'Expected in {table} {", ".join(Row._fields)} of each image, found a'
          f' row without one ({error}). Tip: give another --output_dir.'
      ) from None
    rows.append(row)
  return rows


def _optional(parse):
  return lambda text: parse(text) if text else None


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    'image_index': int,
    'image_class': int,
    'case': str,
    'mse': float,
    'psnr': float,
    'ssim': float,
    'mismatch': _optional(float),
    'lbfgs_iterations': int,
    'label': _optional(int),
    'true_label': int,
}
