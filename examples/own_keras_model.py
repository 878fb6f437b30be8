"""A Keras model as the network of any algorithm.

All but the last layer is the body, which algorithms share, average or adapt;
the last, a Dense one, is the head. The programs take it by its name:

  python -m binaries.train --algorithm=fedmeta_per --model=own_keras_model:build
"""

import os

os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')  # Read by the next import.

import tensorflow as tf  # noqa: E402

import tff_meta  # noqa: E402


def build(input_shape: tuple[int, ...], num_classes: int) -> tf.keras.Model:
  """Returns a small network of convolutions."""
  return tf.keras.Sequential(
      [
          tf.keras.Input(input_shape),
          tf.keras.layers.Conv2D(16, 3, activation='relu'),
          tf.keras.layers.GroupNormalization(4),
          tf.keras.layers.MaxPool2D(),
          tf.keras.layers.Flatten(),
          tf.keras.layers.Dense(32, activation='tanh'),
          tf.keras.layers.Dense(num_classes),
      ]
  )


def main(rounds: int = 50, **settings) -> float:
  """Returns the accuracy of known clients."""
  fitted = tff_meta.fit(
      'digits', 'fedmeta_per', model=build, rounds=rounds, **settings
  )
  return fitted.evaluate('known_clients')['known_clients']['accuracy_mean']


if __name__ == '__main__':
  print(f'known clients: {100 * main():.1f} % right')
