"""Omniglot: 1,623 characters of 50 alphabets, each drawn by 20 people.

Source: Lake, Salakhutdinov and Tenenbaum, Human-level concept learning through
probabilistic program induction, Science 2015; read through TensorFlow Datasets.
"""

import numpy as np

from tff_meta.data import class_splits
from tff_meta.data import corpus as corpus_lib
from tff_meta.datasets import dataset_spec
from tff_meta.datasets import prepared_tfds
from tff_meta.datasets import scalings

SCALINGS = {'unit': scalings.UNIT, 'raw': scalings.RAW}
IMAGE_SIZE = 28


def load(
    data_dir: str | None = None,
    download: bool = False,
    scaling: str = 'unit',
    rotated_classes: bool = False,
) -> corpus_lib.Corpus:
  """Loads Omniglot, 105x105 averaged down to 28x28, ink 1, background 0.

  The published halves ("background", "evaluation") have no character in
  common, so they are no train and test part of one classification problem:
  both are in the train part here, "background" first, and the test part is
  empty. Labels 0..1622 are those of TensorFlow Datasets: places in the order of
  the image files, in which the characters of an alphabet are neighbours.

  Args:
    data_dir: Where TensorFlow Datasets has prepared `omniglot`; None: its
      default.
    download: Whether to fetch it if it is not there.
    scaling: 'unit' ([0, 1]) or 'raw' (0..255).
    rotated_classes: Whether every character turned by 90, 180 and 270 degrees
      is a class of its own, in the part of the split that the character is in
      (Santoro et al., Vinyals et al.): 6,492 classes.

  Returns:
    The corpus; x uint8 0..255 [32460, 28, 28, 1], four times as many with
    `rotated_classes`; the class split is Vinyals'.

  Raises:
    DatasetNotFoundError: If it is not there, or cannot be fetched.
  """
  preprocess = scalings.choose(SCALINGS, scaling)
  directory = prepared_tfds.find('omniglot', data_dir, download)
  background, evaluation = prepared_tfds.read(
      directory, cache_name='tff_meta_ink_28x28_v2.npz', convert=_to_small_ink
  )
  names = prepared_tfds.label_names(directory)
  corpus = corpus_lib.Corpus(
      name='omniglot',
      train=corpus_lib.LabelledExamples(
          np.concatenate([background.x, evaluation.x]),
          np.concatenate([background.y, evaluation.y]),
      ),
      test=corpus_lib.LabelledExamples(evaluation.x[:0], evaluation.y[:0]),
      num_classes=len(names),
      preprocess=preprocess,
      class_split=class_splits.omniglot_vinyals(names),
  )
  return corpus_lib.with_rotated_classes(corpus) if rotated_classes else corpus


def _to_small_ink(images):
  """Maps black on white, uint8 [b, h, w, 3], to white on black [b, 28, 28, 1].

  Each new pixel is the mean over the area it covers, rounded to a 255th.
  """
  import tensorflow as tf

  ink = 255.0 - tf.cast(images[..., :1], tf.float32)
  small = tf.image.resize(ink, (IMAGE_SIZE, IMAGE_SIZE), method='area')
  return tf.cast(tf.round(small), tf.uint8)


SPEC = dataset_spec.DatasetSpec(
    name='omniglot',
    description='32,460 characters, 28x28, 1,623 classes (TensorFlow Datasets)',
    load=load,
    default_model='conv4',
    # As many clients as meta-train characters: shards of 10 of the 20 images.
    few_round=dataset_spec.FewRoundDefaults(
        way=5, num_clients=1028, cohort_size=10, examples_per_class=20
    ),
)
