import numpy as np
import pytest
import tensorflow as tf

from tff_meta import augmentation
from tff_meta import episodes

FILL = (-1.0, -2.0)


def numbered_images(num_images, height=3, width=4):
  """Images whose pixels and channels are all different."""
  shape = (num_images, height, width, 2)
  return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


def view(image, top, left, is_mirrored, padding):
  """Pads, mirrors and cuts, as PyTorch would the mirrored padded image."""
  height, width, _ = image.shape
  padded = np.empty((height + 2 * padding, width + 2 * padding, 2), np.float32)
  padded[:] = FILL
  padded[padding : padding + height, padding : padding + width] = image
  if is_mirrored:
    padded = padded[:, ::-1]
  return padded[top : top + height, left : left + width]


@pytest.mark.parametrize('padding, flip', [(2, True), (2, False), (0, True)])
def test_every_view_comes_and_nothing_else(padding, flip):
  """25 crops, mirrored or not: each of them in 1,000 draws."""
  (image,) = numbered_images(1)
  draw = augmentation.CropAndFlip(padding, flip, FILL)
  drawn = draw(tf.tile(image[np.newaxis], [1000, 1, 1, 1]), [3, 7]).numpy()
  expected = {
      view(image, top, left, is_mirrored, padding).tobytes()
      for top in range(2 * padding + 1)
      for left in range(2 * padding + 1)
      for is_mirrored in (False, True)[: 1 + flip]
  }
  assert len(expected) == (2 * padding + 1) ** 2 * (1 + flip)
  counts = {}
  for one in drawn:
    counts[one.tobytes()] = counts.get(one.tobytes(), 0) + 1
  assert counts.keys() == expected
  # 20 of each on average where there are 50, with a deviation of 4.4.
  mean = 1000 / len(expected)
  assert max(counts.values()) < mean + 5 * mean**0.5


def test_nothing_asked_for_changes_nothing():
  images = numbered_images(3)
  drawn = augmentation.CropAndFlip(0, False, FILL)(images, [1, 2])
  np.testing.assert_array_equal(drawn, images)


def test_errors():
  images = tf.zeros([2, 3, 4, 1])
  for padding in (-1, 3):
    with pytest.raises(ValueError, match='sides of an image, 3 and 4, found'):
      augmentation.CropAndFlip(padding, True, (0.0,))(images, [0, 0])
  with pytest.raises(ValueError, match=r'found examples of shape \(7,\)'):
    augmentation.CropAndFlip(1, True, (0.0,))(tf.zeros([2, 7]), [0, 0])


def test_minibatches_have_views_of_their_own():
  """One epoch after another, and each batch, draws anew; a seed repeats."""
  num_epochs = 4
  examples = episodes.Examples(
      tf.constant(numbered_images(6)),
      tf.range(6),
      tf.ones(6),
      augmentation.CropAndFlip(2, True, FILL),
  )

  def views(seed):
    batches = episodes.minibatches(6, 4, seed, num_epochs)
    found = {}
    for i in range(2 * num_epochs):
      batch = episodes.take(examples, batches, i)
      assert batch.augment == ()  # Once is enough.
      for x, y in zip(batch.x.numpy(), batch.y.numpy(), strict=True):
        assert x.max() > 12 * 2 * y  # Still the image of its label.
        found.setdefault(int(y), []).append(x.tobytes())
    return found

  found = views([5, 6])
  assert {y: len(v) for y, v in found.items()} == dict.fromkeys(range(6), 4)
  assert sum(len(set(v)) for v in found.values()) > 20  # Of 24; 50 to draw.
  assert views([5, 6]) == found
  assert views([5, 7]) != found


def test_what_is_augmented_whole_is_left_alone_later():
  examples = episodes.Examples(
      tf.constant(numbered_images(5)),
      tf.zeros(5, tf.int32),
      tf.ones(5),
      augmentation.CropAndFlip(2, True, FILL),
  )
  support, query = episodes.split_support_query(
      episodes.augmented(examples, [1, 2]), 0.4, [1, 2]
  )
  whole = {x.tobytes() for x in episodes.augmented(examples, [1, 2]).x.numpy()}
  batches = episodes.minibatches(3, None, [3, 4])
  taken = [support.x.numpy(), episodes.take(query, batches, 0).x.numpy()]
  assert {x.tobytes() for x in np.concatenate(taken)} == whole
