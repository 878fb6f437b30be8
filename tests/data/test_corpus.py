"""Corpora: validation, rows of the pool, rotated classes."""

import dataclasses

import numpy as np
import pytest

from tff_meta.data import corpus as corpus_lib


def make_corpus(num_train=7, num_test=4, num_classes=3, **fields):
  rng = np.random.RandomState(0)

  def examples(n):
    return corpus_lib.LabelledExamples(
        rng.randint(0, 256, (n, 4, 4, 2)).astype(np.uint8),
        rng.randint(0, num_classes, n).astype(np.int32),
    )

  return corpus_lib.Corpus(
      name='toy',
      train=examples(num_train),
      test=examples(num_test),
      num_classes=num_classes,
      **fields,
  )


def test_raw_rows_are_the_rows_of_the_pool():
  corpus = make_corpus()
  rows = np.array([10, 0, 6, 7, 3, 3])
  pool = np.concatenate([corpus.train.x, corpus.test.x])
  np.testing.assert_array_equal(corpus.raw_rows(rows), pool[rows])
  np.testing.assert_array_equal(corpus.pooled().x, pool)
  np.testing.assert_array_equal(corpus.pooled_labels, corpus.pooled().y)
  assert corpus.input_shape == (4, 4, 2)


def test_default_preprocess_scales_to_unit():
  pixels = corpus_lib.scale_to_unit(np.array([0, 51, 255], np.uint8))
  np.testing.assert_allclose(pixels, [0, 0.2, 1], rtol=1e-6)
  assert pixels.dtype == np.float32


def test_a_corpus_may_have_no_test_part():
  corpus = make_corpus(num_test=0)
  np.testing.assert_array_equal(corpus.raw_rows([1]), corpus.train.x[1:2])


def test_a_corpus_without_its_test_part():
  corpus = corpus_lib.with_rotation_groups(make_corpus(), 0, 2, 90.0)
  alone = corpus.without_test_part()
  np.testing.assert_array_equal(alone.pooled_labels, corpus.train.y)
  np.testing.assert_array_equal(alone.pooled().x, corpus.raw_rows(np.arange(7)))
  assert alone.fingerprint() != corpus.fingerprint()


def test_fingerprint_changes_with_labels_pixels_and_preprocessing():
  corpus = make_corpus()
  labels = corpus.train.y.copy()
  labels[2] = (labels[2] + 1) % 3
  pixels = corpus.test.x.copy()
  pixels[1, 0, 0, 0] ^= 1
  others = [
      dataclasses.replace(corpus, train=corpus.train._replace(y=labels)),
      dataclasses.replace(corpus, test=corpus.test._replace(x=pixels)),
      dataclasses.replace(corpus, preprocess=lambda x: np.float32(x)),
      dataclasses.replace(
          corpus, class_split=corpus_lib.ClassSplit((0,), (), (1,))
      ),
  ]
  prints = {c.fingerprint() for c in [corpus, *others]}
  assert len(prints) == 5
  many = make_corpus(num_train=1000)
  x = 255 - many.train.x
  x[::16] = many.train.x[::16]  # So many are tried by `preprocess`.
  inverted = dataclasses.replace(many, train=many.train._replace(x=x))
  assert inverted.fingerprint() != many.fingerprint()
  assert make_corpus().fingerprint() == corpus.fingerprint()


def test_rotated_classes_turn_pixels_and_stay_in_their_part():
  corpus = make_corpus(
      class_split=corpus_lib.ClassSplit((2,), (), (0, 1)),
      writers=np.arange(7),
  )
  turned = corpus_lib.with_rotated_classes(corpus)
  assert turned.num_classes == 12 and len(turned.train.y) == 28
  # Row 7 * q + i is image i turned q quarters, by naive index arithmetic.
  for q in range(4):
    for i in range(7):
      image, side = corpus.train.x[i], 4
      expected = np.empty_like(image)
      for r in range(side):
        for c in range(side):
          source = [(r, c), (c, 3 - r), (3 - r, 3 - c), (3 - c, r)][q]
          expected[r, c] = image[source]
      np.testing.assert_array_equal(turned.train.x[7 * q + i], expected)
      assert turned.train.y[7 * q + i] == corpus.train.y[i] + 3 * q
      assert turned.writers[7 * q + i] == i
  assert turned.class_split.train == (2, 5, 8, 11)
  assert turned.class_split.test == (0, 1, 3, 4, 6, 7, 9, 10)


def test_rotation_groups_are_equal_seeded_and_turn_counter_clockwise():
  corpus = make_corpus(num_train=10, num_test=4)
  turned = corpus_lib.with_rotation_groups(
      corpus, seed=0, num_groups=2, degrees_between_groups=90.0
  )
  assert turned.rotations.dtype == np.float32
  assert sorted(turned.rotations[:10]) == [0.0] * 5 + [90.0] * 5
  assert sorted(turned.rotations[10:]) == [0.0] * 2 + [90.0] * 2
  rows = np.array([13, 4, 0, 9, 5, 7, 1])
  assert len(set(turned.rotations[rows])) == 2
  pool = corpus.pooled().x
  for row, image in zip(rows, turned.raw_rows(rows), strict=True):
    quarters = int(turned.rotations[row] // 90)
    np.testing.assert_array_equal(image, np.rot90(pool[row], quarters))
  assert turned.fingerprint() != corpus.fingerprint()
  other = corpus_lib.with_rotation_groups(corpus, 1, 2, 90.0)
  assert not np.array_equal(other.rotations, turned.rotations)


def test_oblique_rotation_moves_a_dot_where_trigonometry_says():
  x = np.zeros((1, 41, 41, 1), np.uint8)
  x[0, 18:23, 33:38] = 255  # Centred 15 to the right of the middle.
  examples = corpus_lib.LabelledExamples(x, np.zeros(1, np.int32))
  corpus = corpus_lib.Corpus(
      'dot',
      examples,
      examples._replace(y=examples.y + 1),
      2,
      rotations=np.float32([20, 40]),
      interpolation='bilinear',
  )
  turned = corpus.raw_rows([0, 1])[..., 0].astype(float)
  for image, degrees in zip(turned, (20, 40), strict=True):
    row, column = (
        (image * axis).sum() / image.sum() for axis in np.indices((41, 41))
    )
    angle = np.deg2rad(degrees)
    # Rows count downwards. A tenth of a pixel for bilinear rounding.
    assert row == pytest.approx(20 - 15 * np.sin(angle), abs=0.1)
    assert column == pytest.approx(20 + 15 * np.cos(angle), abs=0.1)
  nearest = dataclasses.replace(corpus, interpolation='nearest')
  assert nearest.fingerprint() != corpus.fingerprint()


def test_rotation_is_that_of_torchvision():
  """What `functional.rotate` of torchvision 0.29.1 makes of 1, 2, ..., 25.

  At 240 degrees four pixels come from the middle between two others.
  """
  image = np.arange(1, 26, dtype=np.uint8).reshape(1, 5, 5, 1)
  examples = corpus_lib.LabelledExamples(image, np.zeros(1, np.int32))
  corpus = corpus_lib.Corpus(
      'numbers',
      examples,
      examples._replace(y=examples.y + 1),
      2,
      preprocess=np.float32,
      rotations=np.float32([20, 240]),
  )
  np.testing.assert_array_equal(
      corpus.raw_rows([0, 1])[..., 0],
      [
          [
              [0, 3, 4, 5, 0],
              [1, 7, 8, 9, 15],
              [6, 12, 13, 14, 20],
              [11, 17, 18, 19, 25],
              [0, 21, 22, 23, 0],
          ],
          [
              [0, 22, 16, 11, 0],
              [23, 18, 12, 12, 6],
              [24, 18, 13, 8, 2],
              [20, 14, 14, 8, 3],
              [0, 15, 10, 4, 0],
          ],
      ],
  )


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda c: {'num_classes': 1}, r'labels of `toy.train.y` .* 0\.\.0'),
        (lambda c: {'writers': np.arange(3)}, 'each of the 7 train examples'),
        (lambda c: {'interpolation': 'cubic'}, "'bilinear'.*found 'cubic'"),
        (
            lambda c: {'train': c.train._replace(y=c.train.y.astype(np.int64))},
            'int32',
        ),
        (
            lambda c: {'train': c.train._replace(x=c.train.x.astype(float))},
            'uint8 or float32',
        ),
        (lambda c: {'test': c.test._replace(x=c.test.x[:, :3])}, 'one shape'),
        (
            lambda c: {
                'train': corpus_lib.LabelledExamples(*(a[:0] for a in c.train))
            },
            'to hold examples',
        ),
        (
            lambda c: {'class_split': corpus_lib.ClassSplit((0,), (), (3,))},
            r'classes 0\.\.2, found 3',
        ),
        (lambda c: {'preprocess': lambda x: x}, '`preprocess`'),
        (lambda c: {'rotations': np.zeros(7, np.float32)}, 'of the 11 exam'),
    ],
)
def test_bad_corpora_are_refused(change, message):
  corpus = make_corpus()
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(corpus, **change(corpus))


def test_nan_pixels_are_refused_and_located():
  x = np.zeros((5, 2, 2, 1), np.float32)
  x[3, 1, 0, 0] = np.nan
  examples = corpus_lib.LabelledExamples(x, np.zeros(5, np.int32))
  with pytest.raises(ValueError, match='1 examples, first in row 3'):
    corpus_lib.Corpus('toy', examples, examples, 1)


@pytest.mark.parametrize(
    'train, validation, test, message',
    [
        ((0, 1), (1,), (2,), r'more than once: \[1\]'),
        ((0, 0), (), (2,), r'more than once: \[0\]'),
        ((0, -1), (), (2,), 'non-negative, found -1'),
        ((), (1,), (2,), 'at least one class each'),
    ],
)
def test_bad_class_splits_are_refused(train, validation, test, message):
  with pytest.raises(ValueError, match=message):
    corpus_lib.ClassSplit(train, validation, test)


def test_class_split_by_role():
  split = corpus_lib.ClassSplit((0, 4), (3,), (1,))
  assert split.of_role('meta_train') == (0, 4)
  assert split.of_role('meta_test') == (1,)
  with pytest.raises(ValueError, match="found 'test'"):
    split.of_role('test')
