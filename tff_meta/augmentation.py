"""Random crops and flips of images, drawn without any state."""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class CropAndFlip:
  """Pads images, cuts their size out of that at random, mirrors every second.

  Each image has its own draw. A number of pixels of 0 and no flips leave it as
  it is.

  Attributes:
    crop_padding: P, pixels added at each side before the crop, at least 0; the
      crop begins at one of 2 P + 1 rows and as many columns, all equally
      likely.
    flip: Whether an image is mirrored, left to right, with probability 1/2.
    fill: What is added at the sides, a number for each channel. PyTorch pads
      with black and scales after that, so here it is what black becomes.

  Source: torchvision's `RandomCrop(size, padding=P)`, whose padding is zero,
  and `RandomHorizontalFlip()`, both before `Normalize`.
  """

  crop_padding: int
  flip: bool
  fill: tuple[float, ...]

  def __call__(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws a view of every image.

    Args:
      x: Images, float [n, height, width, channels].
      seed: int32 [2]; the same seed and n give the same views.

    Returns:
      Of the shape and dtype of `x`; every pixel is one of its image or `fill`.

    Raises:
      ValueError: If `x` are no images, or the padding is as long as a side.
    """
    shape = tuple(x.shape[1:])
    if len(shape) != 3:
      raise ValueError(
          'Expected images (height, width, channels) to be augmented, found'
          f' examples of shape {shape}. Tip: leave --augmentation out.'
      )
    if not 0 <= self.crop_padding < min(shape[:2]):
      raise ValueError(
          'Expected `crop_padding` to be at least 0 and less than the sides of'
          f' an image, {shape[0]} and {shape[1]}, found {self.crop_padding}.'
      )
    crop_seed, flip_seed = tf.unstack(
        tf.random.experimental.stateless_split(seed)
    )
    (height, width, _), num_images = shape, tf.shape(x)[0]
    begins = tf.random.stateless_uniform(
        [2, num_images, 1],
        crop_seed,
        minval=-self.crop_padding,
        maxval=self.crop_padding + 1,
        dtype=tf.int32,
    )
    rows = begins[0] + tf.range(height)  # [n, height].
    columns = tf.range(width)[tf.newaxis]
    if self.flip:
      drawn = tf.random.stateless_uniform([num_images, 1], flip_seed)
      columns = tf.where(drawn < 0.5, width - 1 - columns, columns)
    columns += begins[1]  # [n, width].
    views = tf.gather(
        x, tf.clip_by_value(rows, 0, height - 1), axis=1, batch_dims=1
    )
    views = tf.gather(
        views, tf.clip_by_value(columns, 0, width - 1), axis=2, batch_dims=1
    )
    is_inside = (
        _is_in(rows, height)[:, :, tf.newaxis, tf.newaxis]
        & _is_in(columns, width)[:, tf.newaxis, :, tf.newaxis]
    )
    return tf.where(is_inside, views, tf.constant(self.fill, x.dtype))


def _is_in(indices, size):
  return (indices >= 0) & (indices < size)
